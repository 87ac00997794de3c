"""The comparison of recorded loops: what all kinds of programs share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hyper_parallel.core.dtensor.layout import Layout
from sim.prove.bound import bound_of
from sim.prove.evidence import largest
from sim.prove.judge import NOTHING_TRAINED, Finding, advised, first_bug, short
from sim.prove.modes.draws import ModuleTensor, SharedDraws, shared_draws
from sim.prove.randomness import DrawPlace, DrawUse
from sim.prove.report import Report, ReportRow
from sim.prove.steps.finder import Finder, Permutation
from sim.prove.steps.names import NameMap
from sim.prove.steps.updates import UpdateReplay, UpdateRule, UpdatesOfStep, UpdateStarts
from sim.prove.steps.watch import CallKey, LoopRecord, RecordedStep

_COARSE, _TINY = 2.0**-7, 1e-5  # a bound above both proves nothing: beside its tensor, and beside all of its kind
_MOST_NAMES = 6


class Comparison(ABC):
    """Compares the records of all ranks with the record of one device.

    Args:
        expected: the record of one device.
        moved: records of one device, perturbed.
        ranks: the record of each rank.
        mesh: the axes of the ranks.
        names: a map of names that was given.
        orders: permutations of the batch in which the ranks hold it, where they are known.
        stopped: the ranks have failed, so that only the steps before are compared.

    Attributes:
        before: rows that are known already.
        notes: of the report.
        inputs: how ranks hold the first input of each module.
        left: modules and buffers that were not compared.
    """

    def __init__(
        self,
        expected: LoopRecord,
        moved: Sequence[LoopRecord],
        ranks: Sequence[LoopRecord],
        mesh: Layout,
        names: Mapping[str, Any],
        orders: Sequence[Permutation] = (),
        *,
        stopped: bool = False,
    ) -> None:
        self.stopped = stopped
        self.expected, self.moved, self.ranks, self.mesh = expected, moved, ranks, mesh
        self.names = self._find_names(names)
        self.before: list[ReportRow] = []
        self.notes: list[str] = []
        self.finder = Finder(mesh, orders)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in expected.initial.items()}
        paths = [rank.paths for rank in ranks]
        self.paths = [self.names.paths(path, expected.paths) for path in paths]
        self.is_split = len({frozenset(path) for path in paths}) > 1  # stages of a pipeline
        self.inputs: dict[str, Layout | None] = {}
        self.left: dict[str, None] = {}
        self._replays = {rank: UpdateReplay() for rank in range(len(ranks))}

    @abstractmethod
    def _find_names(self, given: Mapping[str, Any]) -> NameMap:
        """Return which parameter of one device each parameter of a rank stands for."""

    @abstractmethod
    def _parameters(self) -> Iterable[ReportRow]:
        """Judge the parameters that the loop began with."""

    @abstractmethod
    def _of_step(self, number: int) -> list[ReportRow]:
        """Judge a step that all ranks have taken."""

    @abstractmethod
    def _of_forward(self, number: int) -> list[ReportRow]:
        """Judge the forward of the step in which ranks have failed."""

    @abstractmethod
    def _after_steps(self) -> list[ReportRow]:
        """Judge what concerns all steps, and complete the notes."""

    @abstractmethod
    def _is_unproved(self) -> bool:
        """Return True if the comparison shows nothing, e.g. no gradient and no update of any weight."""

    @abstractmethod
    def _boundaries(self, step: int) -> Iterator[ModuleTensor]:
        """Yield the tensors at the boundaries of modules in a step of one device."""

    @abstractmethod
    def _is_repeated(self, step: int, path: str) -> bool:
        """Return True if one device calls a module several times in a step, e.g. for micro-batches."""

    def report(self) -> Report:
        """Judge everything, in the order in which things happen."""
        rows = [*self.before, *self._parameters()]
        if self.stopped:
            return self._until_stopped(rows)
        for number in range(len(self.expected.steps)):
            rows += self._of_step(number)
        rows += self._after_steps()
        if self._is_unproved() and first_bug(rows) is None:
            rows.append(NOTHING_TRAINED)
        return Report(tuple(advised(rows)), str(self.mesh.axes), tuple(self.notes))

    def _until_stopped(self, rows: list[ReportRow]) -> Report:
        """Judge the steps that all ranks have taken, and forward of the one in which they failed."""
        done = min(sum(bool(step.updates) for step in rank.steps) for rank in self.ranks)
        for number in range(min(done, len(self.expected.steps))):
            rows += self._of_step(number)
        if done < len(self.expected.steps):
            rows += self._of_forward(done)
        return Report(tuple(advised(rows)), str(self.mesh.axes), tuple(self.notes))

    def held_in(self, rank: int, path: str) -> Iterator[str]:
        """Describe the tensors of a module on a rank that failed, where shapes are not those of one device."""
        done = len(self.ranks[rank].steps) - 1
        if not 0 <= done < len(self.expected.steps):
            return
        (mine, others, theirs), path = self.sides(done), self.paths[rank].get(path, path)
        calls = {each: calls_of(step, self.paths[each]) for each, step in theirs.items()}
        for key, values in mine.calls.items():
            own = calls[rank].get(key)
            if not own or own[-1].shape == values[-1].shape or not f"{key[0]}.".startswith(f"{path}." if path else ""):
                continue
            parts = {each: held[key][-1] for each, held in calls.items() if key in held}
            found = self.finder.find(parts, values[-1], bound_of(values[-1], [each.calls[key][-1] for each in others]))
            layout = f", found {short(found.found)}" if found.found is not None else ""
            place = ReportRow(key[0], boundary_title(key), "forward").place
            yield f"{place}: {tuple(own[-1].shape)} of {tuple(values[-1].shape)}{layout}"

    def sides(self, number: int) -> tuple[RecordedStep, list[RecordedStep], dict[int, RecordedStep]]:
        """Return a step of one device, the same perturbed, and those of the ranks."""
        others = [each.steps[number] for each in self.moved if number < len(each.steps)]
        theirs = {rank: each.steps[number] for rank, each in enumerate(self.ranks) if number < len(each.steps)}
        return self.expected.steps[number], others, theirs

    def updates_of(self, number: int) -> UpdatesOfStep:
        """Return the updates of a step, beside what one device's optimizers make of each rank's gradients."""
        mine, _, theirs = self.sides(number)
        starts = {
            rank: UpdateStarts(self._rules(step), self.names.translated(step.starts.values, self.shapes))
            for rank, step in theirs.items()
        }
        gradients = {rank: self.names.translated(step.gradients, self.shapes) for rank, step in theirs.items()}
        return UpdatesOfStep(mine.starts.rules, starts, gradients, self._replays, number + 1)

    def _rules(self, step: RecordedStep) -> dict[str, UpdateRule]:
        """Return how a rank's optimizers update its parameters, by the names of one device."""
        named = ((self.names.parts.get(name, ((name,), 0))[0], rule) for name, rule in step.starts.rules.items())
        return {each: rule for names, rule in named for each in names}

    def note(self, note: str) -> None:
        """Add a note to the report, once."""
        if note not in self.notes:
            self.notes.append(note)

    # -- random numbers ----------------------------------------------------------------------------------------------

    @property
    def draws(self) -> bool:
        """True if modules have drawn random numbers on any side."""
        return any(record.uses for record in (self.expected, *self.ranks))

    def shared(self) -> SharedDraws:
        """Find each rank's part of one device's random numbers; after `report`."""
        ranks = [
            {(paths.get(path, path), op, number, step): use for (path, op, number, step), use in rank.uses.items()}
            for rank, paths in zip(self.ranks, self.paths, strict=True)
        ]
        called = [
            {
                (paths.get(path, path), number)
                for number, step in enumerate(rank.steps)
                for (path, _, _), values in step.calls.items()
                if any(value.numel() for value in values)
            }
            for rank, paths in zip(self.ranks, self.paths, strict=True)
        ]
        return shared_draws(
            self.expected.uses,
            ranks,
            self.mesh,
            self._bound_of_draw,
            lambda step: list(self._boundaries(step)),
            self.finder.orders,
            [record.repeats for record in (self.expected, *self.ranks)],
            lambda rank, path, step: (path, step) in called[rank],
            self.inputs.get,
            self._is_repeated,
        )

    def check_used(self, shared: SharedDraws) -> None:
        """Refuse draws of which the numbers are not, as `SharedDraws.check_used` does."""
        records = (self.expected, *self.ranks)
        misfit = any(record.is_misfit for record in records)
        taken = min(len(rank.steps) for rank in self.ranks)  # ranks may have ended where all is wrong
        mine = [place for place in self.expected.uses if place[3] < taken]
        shared.check_used(mine, [_own(rank.uses) for rank in self.ranks], misfit=misfit)

    def _bound_of_draw(self, place: DrawPlace, given: torch.Tensor) -> float:
        return bound_of(given, [other.uses[place].given for other in self.moved if place in other.uses])


def some(names: Iterable[str]) -> str:
    """Join names, the first six of them.

    >>> some("abcdefgh")
    'a, b, c, d, e, f and 2 more'
    """
    listed = list(names)
    more = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    return ", ".join(listed[:_MOST_NAMES]) + more


def is_coarse(found: Finding, full: torch.Tensor, scale: float = 0.0) -> bool:
    """Return True if a bound is so wide that a fault could hide below it; `scale`: of the largest tensor of the kind.

    >>> [is_coarse(Finding("right", bound=bound), torch.ones(3)) for bound in (1e-6, 0.1)]
    [False, True]
    """
    return found.bound > max(_COARSE * largest(full), _TINY * scale)


def boundary_title(key: CallKey) -> str:
    """Name a boundary within its module, e.g. "input" or "output 1"."""
    _, side, way = key
    return f"{side} {way}".strip().removesuffix(" 0") if side == "input" else f"{side} {way.lstrip('.')}".strip()


def calls_of(step: RecordedStep, paths: Mapping[str, str]) -> dict[CallKey, list[torch.Tensor]]:
    """Return the values at a rank's boundaries, by the names of one device's modules."""
    named = ((path, side, way, values) for (path, side, way), values in step.calls.items())
    return {(paths[path], side, way): values for path, side, way, values in named if path in paths}


def joined(values: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Put the calls of a step one behind the other; None where they have no rows."""
    if len(values) < 2:
        return values[0] if values else None
    if values[0].dim() == 0 or any(value.shape[1:] != values[0].shape[1:] for value in values):
        return None
    return torch.cat(list(values))


def present(parts: Mapping[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
    """Return the parts of the ranks that have one."""
    return {rank: part for rank, part in parts.items() if part is not None}


def _own(uses: Mapping[DrawPlace, DrawUse]) -> set[DrawPlace]:
    """Return draws by the names of the ranks' modules."""
    return {use.place for use in uses.values()}
