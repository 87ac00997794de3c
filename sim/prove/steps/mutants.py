"""Faults that are put into a program to see whether a proof finds them: in collectives, messages and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sim.comm.collectives import Call
from sim.comm.group import Message
from sim.comm.observer import Observer, forget, observe
from sim.explain.errors import SimError
from sim.prove.evidence import magnitude
from sim.prove.record import local_of, named_parameters
from sim.prove.report import MutantRow, Report, Sensitivity
from sim.world import World

_KINDS: Mapping[str, tuple[str, ...]] = {
    "all_reduce": ("missing reduction", "twice", "wrong scale", "one rank"),
    "reduce_scatter": ("missing reduction", "twice", "wrong scale", "wrong part", "one rank"),
    "all_gather": ("wrong order", "one rank"),
    "all_to_all": ("wrong part", "one rank"),
    "send": ("wrong scale",),
    "gradient": ("wrong scale", "one rank"),
    "parameter": ("wrong order", "one rank"),
}
_MOST_PARAMETERS = 4
_NOTHING = 1e-12  # of the largest gradient


@dataclass(frozen=True)
class Mutant:
    """One fault at one place.

    Args:
        kind: "missing reduction", "twice", "wrong scale", "wrong part", "wrong order", or "one rank", which alone does
            it wrong.
        op: the collective, "send", or "gradient" and "parameter" for those of a parameter.
        axis: the axis of the mesh, where the group has one.
        place: the line that communicates, or the name of the parameter.

    Attributes:
        done: how many tensors it has changed, each time.
        doubled: the sum, over ranks, of gradients that it has doubled, by shape; parts of one may cancel each other.
        beside: the size of each gradient beside the one that it changes.
    """

    kind: str
    op: str
    axis: str
    place: str
    done: list[int] = field(default_factory=list, compare=False, repr=False)
    doubled: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict, compare=False, repr=False)
    beside: list[float] = field(default_factory=list, compare=False, repr=False)

    @property
    def has_effect(self) -> bool:
        """Whether it has changed anything; a multiple of a gradient that is zero but for rounding is no change."""
        most = max(map(magnitude, self.doubled.values()), default=0.0)
        return any(self.done) or most > _NOTHING * max(self.beside, default=0.0)

    def __str__(self) -> str:
        over = f" over {self.axis}" if self.axis else ""
        return f"{self.op}{over} at {self.place}" if self.op in _KINDS and self.axis else f"{self.op} of {self.place}"


def mutants_of(events: Iterable[Any], names: Sequence[str]) -> list[Mutant]:
    """Return what may be put into a program: each fault at each line that communicates, and in a few parameters."""
    sites = dict.fromkeys(
        (_plain(event.op), event.axis or "group", event.line)
        for event in events
        if _plain(event.op) in _KINDS and len(event.group) > 1
    )
    found = [Mutant(kind, *site) for site in sites for kind in _KINDS[site[0]]]
    chosen = list(names)[:: max(1, len(names) // _MOST_PARAMETERS)][:_MOST_PARAMETERS]
    found += [Mutant(kind, op, "", name) for name in chosen for op in ("gradient", "parameter") for kind in _KINDS[op]]
    return found


def _plain(op: str) -> str:
    """Return a collective's name without its variant, such as "_coalesced"."""
    return next((name for name in _KINDS if op.startswith(name)), op)


@contextmanager
def put_in(world: World, mutant: Mutant | None) -> Iterator[None]:
    """Let a world's communication have a fault, while the `with` block runs."""
    if mutant is None or not mutant.axis:
        yield
        return
    network, before = world.network, world.network.execute

    def execute(calls: list[Call]) -> Any:
        first = calls[0]
        if _plain(first.contract.op) != mutant.op or first.line != mutant.place or len(calls) < 2:
            return before(calls)
        given = [[tensor.clone() for tensor in call.inputs] for call in calls]
        problem = before(calls)
        if problem is None:
            right = [[tensor.clone() for tensor in call.outputs] for call in calls]
            _spoil(mutant, calls, given)
            both = (zip(call.outputs, those, strict=True) for call, those in zip(calls, right, strict=True))
            mutant.done.append(sum(not torch.equal(now, was) for pairs in both for now, was in pairs))
        return problem

    messages = _Messages(mutant)
    network.execute = execute
    observe(network, messages)
    try:
        yield
    finally:
        network.execute = before
        forget(network, messages)


def _spoil(mutant: Mutant, calls: Sequence[Call], given: list[list[torch.Tensor]]) -> None:
    """Change what a collective has delivered."""
    size, right = len(calls), [[tensor.clone() for tensor in call.outputs] for call in calls]
    for member, call in enumerate(calls):
        for number, output in enumerate(call.outputs):
            if not output.is_floating_point() or not output.numel():
                continue
            own, kind = given[member][min(number, len(given[member]) - 1)], mutant.kind
            if kind == "one rank":
                if member:
                    continue
                kind = "missing reduction" if mutant.op in ("all_reduce", "reduce_scatter") else "wrong part"
            if kind == "missing reduction":
                if own.numel() == output.numel() * size:
                    own = own.reshape(-1).chunk(size)[member]
                elif len(given[member]) == size:
                    own = given[member][member]
                if own.numel() == output.numel():
                    output.copy_(own.reshape(output.shape))
            elif kind == "twice":
                output.mul_(size)
            elif kind == "wrong scale":
                output.div_(size)
            elif kind == "wrong part":
                other = right[(member + 1) % size][number]
                if other.shape == output.shape and not torch.equal(other, output):
                    output.copy_(other)
                elif len(call.outputs) > 1:
                    output.copy_(right[member][(number + 1) % len(call.outputs)].reshape(output.shape))
                else:
                    output.copy_(right[member][number].reshape(-1).roll(output.numel() // size).reshape(output.shape))
            elif kind == "wrong order":
                if len(call.outputs) == size:
                    source = right[member][(number + 1) % size]
                    if source.shape == output.shape:
                        output.copy_(source)
                elif output.numel() % size == 0:
                    output.copy_(right[member][number].reshape(-1).roll(output.numel() // size).reshape(output.shape))


class _Messages(Observer):
    """Sends another multiple of what a line sends."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def issuing(self, endpoint: Any, group: Any, what: Call | Message) -> None:
        """Change a message that is about to be sent."""
        del endpoint, group
        if not isinstance(what, Message) or what.who_waits != "send" or self._mutant.op != "send":
            return
        if what.line == self._mutant.place and what.tensor.is_floating_point():
            what.tensor = what.tensor * 2
            self._mutant.done.append(1)


def put_into_model(mutant: Mutant | None, models: Sequence[nn.Module], rank: int) -> None:
    """Let a parameter of a rank, or its gradient, be wrong."""
    if mutant is None or mutant.axis or (mutant.kind == "one rank" and rank):
        return
    for model in models:
        parameter = named_parameters(model).get(mutant.place)
        if parameter is None:
            continue
        if mutant.op == "gradient":
            _double_gradient(mutant, parameter, models)
            return
        with torch.no_grad():
            local = local_of(parameter)
            before = local.clone()
            if mutant.kind == "wrong order":
                local.copy_(before.flip(0) if before.dim() else before)
            else:
                local.mul_(1.01)
            mutant.done.append(int(not torch.equal(before, local)))
        return


def _double_gradient(mutant: Mutant, wrong: nn.Parameter, models: Sequence[nn.Module]) -> None:
    """Let backward compute twice a parameter's gradient, and note how large it is beside those of the others."""

    def doubled(grad: torch.Tensor) -> torch.Tensor:
        local = local_of(grad)
        shape = tuple(local.shape)
        mutant.doubled[shape] = mutant.doubled[shape] + local if shape in mutant.doubled else local.clone()
        return grad * 2

    def noted(grad: torch.Tensor) -> None:
        mutant.beside.append(magnitude(local_of(grad)))

    for parameter in {id(each): each for model in models for each in named_parameters(model).values()}.values():
        if parameter.requires_grad:
            parameter.register_hook(doubled if parameter is wrong else noted)


def run_mutants(mutants: Sequence[Mutant], prove: Callable[[Mutant], Report], most: int) -> Sensitivity:
    """Prove a program with each of some faults in it; of all kinds, where there are more than `most`."""
    by_kind: dict[tuple[str, str], list[Mutant]] = {}
    for mutant in mutants:
        by_kind.setdefault((mutant.op, mutant.kind), []).append(mutant)
    turns = itertools.zip_longest(*by_kind.values())  # of each kind one, then of each another
    rows = []
    for mutant in itertools.islice((each for turn in turns for each in turn if each is not None), most):
        try:
            report = prove(mutant)
            found, first = not report.ok, report.first
            said = "" if first is None else f"{first.place}: {first.sentence}"
        except (SimError, ValueError, RuntimeError) as error:
            found, said = True, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        outcome = "none" if not mutant.has_effect else "found" if found else "missed"
        rows.append(MutantRow(mutant.kind, str(mutant), outcome, said))
    return Sensitivity(tuple(rows), len(mutants))
