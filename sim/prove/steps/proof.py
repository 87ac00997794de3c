"""The one way in which a program is proved: a model with a plan, a step function, a script or a run of the trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.machine import Machine
from sim.explain.errors import CollectiveMismatch, InFlightBufferRace, RankFailed, ReplicaMismatch, SimError
from sim.prove.evidence import machine_words
from sim.prove.modes.choices import ChoiceKey
from sim.prove.modes.draws import SharedDraws, proved_with
from sim.prove.modes.precision import WidePrecision, narrow_words
from sim.prove.modes.values import check_varied, unreached
from sim.prove.randomness import bare_words
from sim.prove.record import spread_layout
from sim.prove.report import Report, ReportRow, Sensitivity
from sim.prove.runs import proved_on_device
from sim.prove.steps.compare import LoopComparison, agreed_choices
from sim.prove.steps.comparison import Comparison
from sim.prove.steps.drawn import with_cause
from sim.prove.steps.finder import Permutation
from sim.prove.steps.mutants import Mutant, mutants_of, run_mutants
from sim.prove.steps.names import read_names
from sim.prove.steps.watch import Declared, LoopRecord

RUNS = 3
"""Perturbed runs of one device."""

_SAY_ALL = (InFlightBufferRace, ReplicaMismatch)  # errors that name what is wrong themselves
_MOST_HELD = 8  # parameters that a message lists
_MOST_LINES = 6  # that say what a rank held where it failed

Taken: TypeAlias = Mapping[ChoiceKey, torch.Tensor]
"""Choices that one device is to make as the ranks did."""

References: TypeAlias = tuple[LoopRecord, Sequence[LoopRecord]]
"""What one device does, and what it does perturbed."""


@dataclass
class RanksRecord:
    """The record of all ranks' loops.

    Attributes:
        loops: of each rank.
        events: of their communication.
        wide: of ranks, where the program asks for fewer bits than it computes in.
        orders: permutations of the batch in which ranks hold it.
        rows: faults found before the comparison.
        notes: changes to the program, for the report.
        groups: process groups: name and ranks of each.
        offloads: there are blocks whose activations wait on the host.
        why_not: these cannot be proved on a device; "": they can.
        has_moved: activations have been on the host.
        stopped: a rank has failed, or ranks did not come together; the loops have what came before.
        grads: each rank's part of the gradients of what a plan's model returns.
    """

    loops: list[LoopRecord] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    wide: list[WidePrecision] = field(default_factory=list)
    orders: list[Permutation] = field(default_factory=list)
    rows: list[ReportRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    groups: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    offloads: bool = False
    why_not: str = ""
    has_moved: bool = False
    stopped: SimError | None = None
    grads: Sequence[Mapping[str, torch.Tensor]] = ()

    @contextmanager
    def until_stopped(self, loops: Mapping[int, LoopRecord], count: int) -> Iterator[None]:
        """Keep the records that ranks make in a `with` block, also if they fail there once all `count` have begun."""
        try:
            yield
        except SimError as error:
            has_begun = len(loops) == count and all(loop.steps and loop.initial for loop in loops.values())
            is_said = isinstance(error, _SAY_ALL) or (isinstance(error, CollectiveMismatch) and bool(error.meant))
            if is_said or not has_begun:
                raise
            self.stopped = error
        self.loops = [loops[rank] for rank in sorted(loops)]


@dataclass(frozen=True)
class Compared:
    """A comparison of the ranks with one device.

    Attributes:
        report: its rows, without the perturbations that follow.
        events: of the ranks' communication.
        names: of their parameters.
        on_device: compares once more on a kind of device; None: there are no activations that go to the host.
        why_not: this cannot be done; "": it can.
        draws: finds each rank's part of one device's random numbers; None: none are drawn.
    """

    report: Report
    events: Sequence[Any] = ()
    names: Sequence[str] = ()
    on_device: Callable[[str], Report] | None = None
    why_not: str = ""
    draws: Callable[[], SharedDraws] | None = None


@dataclass(frozen=True)
class Loop(ABC):
    """A program to be proved, which takes steps on one device and on ranks.

    Attributes:
        asked: first words of an error, e.g. "cannot verify a step".
        world_size: of the ranks.
        dtype: that ranks compute in.
        names: names of parameters on the ranks -> names on one device.
        machine: what the ranks stand for.
        shared: random numbers, in place of their means.
        device: of the ranks.
    """

    asked: str
    world_size: int
    dtype: torch.dtype
    names: Mapping[str, Any]
    machine: str | Machine | None
    shared: SharedDraws | None = field(default=None, kw_only=True)
    device: str = field(default="cpu", kw_only=True)

    @abstractmethod
    def on_one(self, taken: Taken | None, seed: int | None) -> LoopRecord:
        """Take the steps on one device; perturbed, if there is a seed, with the choices of `taken`."""

    @abstractmethod
    def on_ranks(self, references: References, mutant: Mutant | None) -> RanksRecord:
        """Take the steps on ranks of their own world, with a fault put in or without."""

    @abstractmethod
    def make(self) -> None:
        """Make the ranks' models once more, in a world that compares the copies that engines split."""

    @abstractmethod
    def mesh_of(self, found: RanksRecord) -> Layout:
        """Return the axes of the ranks."""

    def explained(self, report: Report, comparison: Comparison, found: RanksRecord) -> Report:
        """Add notes and hints of this kind of program to a report."""
        del comparison, found
        return report

    def with_draws(self, shared: SharedDraws) -> Loop:
        """Return the same loop with random numbers in place of their means."""
        return replace(self, shared=shared)

    def shortened(self) -> Loop:
        """Return the loop that faults are put into."""
        return self

    def possible(self, mutants: list[Mutant]) -> list[Mutant]:
        """Return the faults that can be put into this kind of program."""
        return mutants

    def comparison(self, references: References, found: RanksRecord) -> Comparison:
        """Make the comparison of the ranks with one device."""
        known = list(dict.fromkeys(name for loop in found.loops for name in loop.initial))
        names = read_names(self.asked, self.names, known, list(references[0].initial))
        stopped = found.stopped is not None
        return LoopComparison(*references, found.loops, self.mesh_of(found), names, found.orders, stopped=stopped)

    def agreed(self, references: References, found: RanksRecord) -> tuple[References, list[str]]:
        """Let one device choose as the ranks do, where candidates lie within the bound; say where."""
        return agreed_choices(references, found.loops, self.mesh_of(found), None, self.references)

    def references(self, taken: Taken | None = None) -> References:
        """Take the steps on one device, plainly and perturbed, the latter with the choices of the first."""
        expected = self.on_one(taken, None)
        same = {key: choice.indices for key, choice in expected.choices.items()}
        return expected, [self.on_one(same, seed) for seed in range(RUNS)]

    def compared(self, references: References, mutant: Mutant | None = None, *, is_varied: bool = False) -> Compared:
        """Take the steps on ranks, with a fault put in or without, and compare; `is_varied`: see `check_varied`."""
        found = self.on_ranks(references, mutant)
        if found.stopped is not None and self.device != "cpu":
            raise found.stopped  # copies from the device may not have arrived
        if is_varied:
            check_varied([record.initial for record in found.loops], references[0].initial)
        agreed, notes = self.agreed(references, found)
        comparison = self.comparison(agreed, found)
        expected = comparison.expected
        comparison.before += found.rows
        comparison.notes += [*found.notes, *notes, *narrow_words(found.wide, self.dtype)]
        comparison.notes += unreached([step.gradients for step in expected.steps], expected.trained, expected.tables)
        comparison.notes += [*bare_words(found.loops), *machine_words(self.machine, self.world_size)]
        if found.stopped is not None:
            return Compared(_until(found.stopped, comparison))
        report = self.explained(comparison.report(), comparison, found)
        if self.shared is not None:
            comparison.check_used(self.shared)
        if self.device != "cpu" and not found.has_moved:
            report = replace(report, rows=())
        known = list(dict.fromkeys(name for loop in found.loops for name in loop.initial))
        on_device = (lambda kind: self.on_device(kind, found).compared(references).report) if found.offloads else None
        draws = comparison.shared if comparison.draws else None
        return Compared(report, found.events, known, on_device, found.why_not, draws)

    def on_device(self, kind: str, found: RanksRecord) -> Loop:
        """Return the loop on a kind of device, once it is known what the ranks do without."""
        del found
        return replace(self, device=kind)

    def proved(self, references: References, *, is_varied: bool = False) -> Report:
        """Compare; then take away what the comparison leaves open, one after the other.

        In this order: choices between candidates that are equal but for rounding (in the comparison), the cause of
        wrong parameters, and, if all is right so far, activations that go to the host on devices, and random numbers in
        place of their means. Each says in the report's notes what it has done, or why not.
        """
        found = self.compared(references, is_varied=is_varied)
        report = replace(with_cause(found.report, self.make), mutants=partial(self._mutated, found))
        if self.shared is not None or report.bug is not None:
            return report
        if found.on_device is not None:
            report = proved_on_device(report, found.on_device, found.why_not)
        if report.bug is not None or found.draws is None:
            return report

        def prove(shared: SharedDraws) -> Report:
            program = self.with_draws(shared)
            return program.proved(program.references())

        return proved_with(report, found.draws(), prove)

    def _mutated(self, found: Compared, most: int) -> Sensitivity:
        """Compare with faults put in, one at a time."""
        program = self.shortened()
        references, mutants = program.references(), program.possible(mutants_of(found.events, found.names))
        return run_mutants(mutants, lambda mutant: program.compared(references, mutant).report, most)


def place_words(path: str | None, record: LoopRecord) -> list[str]:
    """Say which parameters of a module a rank has, in as many lines as one reads."""
    prefix, rows = f"{path}." if path else "", []
    for name, part in record.initial.items():
        if path is not None and name.startswith(prefix):
            said = record.declared.get(name, Declared())
            split = said.layout and spread_layout(said.layout.placement_to_tensor_map(len(said.shape)), said.known)
            split = f" of {said.shape}, declared {split}" if split else ""
            rows.append(f"{name.removeprefix(prefix)}: {tuple(part.shape)}{split}")
    return rows if len(rows) <= _MOST_HELD else [*rows[:_MOST_HELD], f"... and {len(rows) - _MOST_HELD} more"]


def _until(error: SimError, comparison: Comparison) -> Report:
    """Return the report of what came before a failure, if something was wrong there; else raise it, with its place."""
    report = comparison.report()
    ranks = [error.rank] if isinstance(error, RankFailed) else list(range(len(comparison.ranks)))
    lines = []
    for rank in ranks:
        path = comparison.ranks[rank].stopped_in
        where = "no module" if path is None else f"module {path or '(the model)'!r}"
        lines.append(f"  rank {rank} was in {where}, {comparison.ranks[rank].stopped_while}")
        held = [] if path is None else [*comparison.held_in(rank, path)][-_MOST_LINES:]
        lines += [f"    {line}" for line in [*place_words(path, comparison.ranks[rank]), *held]]
    if report.bug is None:
        error.args = ("\n".join([str(error), *lines]), *error.args[1:])
        raise error
    places = [line.strip() for line in lines if line.startswith("  rank")]
    note = "; ".join([f"the ranks have stopped: {str(error).splitlines()[0]}", *places])
    return replace(report, notes=(*report.notes, note))
