"""Verdicts on the boundaries of modules in one step of a loop: their values, the loss, and the gradients there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from hyper_parallel.core.dtensor.layout import Layout
from sim.prove.bound import bound_of
from sim.prove.evidence import largest
from sim.prove.judge import (
    AutogradGraph,
    Finding,
    Judged,
    first_bug,
    of_other_rows,
    of_own_rows,
    of_unequal_shares,
    settle,
)
from sim.prove.report import ReportRow
from sim.prove.steps.comparison import Comparison, boundary_title, calls_of, is_coarse, joined, present
from sim.prove.steps.watch import LOSS, CallKey, RecordedStep


class Activations:
    """Compares what modules get and return in one step, where any layout that explains the parts is right.

    Calls of a module are put one behind the other, on both sides: micro-batches are rows of one device's batch.

    Args:
        whole: the comparison of the loop.
        number: of the step.

    Attributes:
        given: how ranks hold the first input of each module.
        late: places that are right until the step updates weights, and wrong afterwards.
    """

    def __init__(self, whole: Comparison, number: int) -> None:
        self.whole, self.find = whole, whole.finder.find
        self.mine, self.others, self.theirs = whole.sides(number)
        self._weights = whole.expected.weights(number)
        self._calls = {rank: calls_of(step, whole.paths[rank]) for rank, step in self.theirs.items()}
        self.given: dict[str, Layout | None] = {}
        self.late: set[str] = set()

    def forward(self) -> Iterator[ReportRow]:
        """Judge the boundaries of modules, and the loss."""
        events = [*self._at_modules(), *self._loss()]
        for row in settle(events, AutogradGraph().forward):
            yield replace(row, sentence="") if row.verdict in ("exact", "rounding", "private") else row

    def _at_modules(self) -> Iterator[Judged]:
        for key, values in self.mine.calls.items():
            path, side = key[:2]
            if self.whole.is_split and not path:
                continue  # every stage has a model of its own
            there = {rank: each[key] for rank, each in self._calls.items() if key in each}
            alike = len({len(values), *map(len, there.values())}) > 1 and all(map(_are_equal, there.values()))
            one = present({rank: joined(each) for rank, each in there.items()})
            parts = {rank: there[rank][0] for rank in one} if alike else one
            full = values[0] if alike and _are_equal(values) else joined(values)
            if self.whole.stopped and not self._is_complete(path, there, full):
                continue
            if full is None or not parts:
                self.whole.left.update({path: None} if path and not parts else {})
                continue
            bound = bound_of(full, (joined(other.calls.get(key, [])) for other in self.others))
            bias = f"{path}.bias".lstrip(".")
            addends = {bias: self._weights[bias]} if side == "output" and bias in self._weights else {}
            found = self.find(parts, full, bound, addends, may_reorder=True)
            if found.status == "unexplained":
                early = len(values) if self.mine.early is None else self.mine.early.get(key, 0)
                if early < len(values) and self._are_right(key, early, there):
                    self.late.add(ReportRow(path, boundary_title(key), "forward").place)
            if side == "input":
                self.given.setdefault(path, found.found)
                if path in self.whole.expected.roots:
                    steps = self.whole.expected.steps
                    found = of_other_rows(found, parts, full, (joined(each.calls.get(key, [])) for each in steps))
            elif path in self.whole.expected.batch_norms:
                found = of_own_rows(found, self.given.get(path), parts, full)
            found = replace(found, is_zero=largest(full) <= bound)
            nodes = [node for (other, _), node in self.mine.nodes.items() if other == key]
            is_given = not nodes and side == "input"
            if is_given:  # a constant: it stands where the outputs of its module do
                nodes = [node for (other, _), node in self.mine.nodes.items() if other[:2] == (path, "output")]
            yield Judged(path, boundary_title(key), "forward", found, tuple(nodes), given=is_given)

    def _is_complete(self, path: str, there: Mapping[int, Sequence[torch.Tensor]], full: torch.Tensor | None) -> bool:
        """Return True if all ranks with a module have called it as often, and hold no less than one device does.

        Before a failure, they may have had the first of several micro-batches only.
        """
        having = {rank for rank, paths in enumerate(self.whole.paths) if path in paths.values()}
        if full is None or having != set(there) or len({len(values) for values in there.values()}) > 1:
            return False
        distinct: list[torch.Tensor] = []
        for value in itertools.chain(*there.values()):
            distinct += [] if any(torch.equal(value, other) for other in distinct) else [value]
        return sum(value.numel() for value in distinct) >= full.numel()

    def _are_right(self, key: CallKey, count: int, there: Mapping[int, Sequence[torch.Tensor]]) -> bool:
        """Return True if each of the first calls of a module is right; ranks have to call it as often as one device."""
        values = self.mine.calls[key]
        if count and any(len(each) != len(values) for each in there.values()):
            return False
        for at, full in enumerate(values[:count]):
            bound = bound_of(full, [_value_of(other, key, at) for other in self.others])
            if self.whole.finder.explained({rank: each[at] for rank, each in there.items()}, full, bound) is None:
                return False
        return True

    def _loss(self) -> Iterator[Judged]:
        mine, theirs = self.mine, self.theirs
        if not mine.losses:
            return
        full, moved = _sum(mine), [_sum(other) for other in self.others if other.losses]
        parts = {rank: _sum(step) for rank, step in theirs.items() if step.losses}
        if self.whole.stopped and {len(step.losses) for step in theirs.values()} != {len(mine.losses)}:
            return
        if not parts:
            self.whole.note("the loss is not compared, as no rank has differentiated or returned one")
            return
        found = self.find(parts, full, bound_of(full, moved, mine.losses[0].dtype))
        found = replace(found, status="right") if found.status == "pending" else found
        if found.status == "unexplained" and "should hold the same" in found.sentence:
            keys = [key for key in mine.calls if key[0] in self.whole.expected.roots and key[1] == "input"]
            given = ({rank: joined(each.get(key, [])) for rank, each in self._calls.items()} for key in keys)
            found = of_unequal_shares(found, parts, full, [present(each) for each in given])
        nodes = tuple(node for (key, _), node in mine.nodes.items() if key == LOSS)
        yield Judged("", "loss", "forward", replace(found, is_coarse=is_coarse(found, full)), nodes, True)

    # -- backward ----------------------------------------------------------------------------------------------------

    def backward(self, parameters: Sequence[ReportRow], gradients: Mapping[str, Finding]) -> list[ReportRow]:
        """Return the gradients of activations, up to one from which all wrong gradients of parameters are computed.

        Args:
            parameters: rows of the gradients of parameters.
            gradients: the findings of those that were compared, by name.
        """
        if first_bug(parameters) is None:
            return []
        events = list(self._gradients())
        for row in parameters:
            name = f"{row.module}.{row.tensor}" if row.module else row.tensor
            found, place = gradients.get(name, Finding("wrong")), self.whole.expected.leaves.get(name)
            where = () if place is None else (place,)
            events.append(Judged(row.module, row.tensor, "gradient", found, where, True))
        graph = AutogradGraph()
        rows = settle(events, graph.backward)[: -len(parameters)]
        first = first_bug(rows)
        if first is None:
            return []
        at = rows.index(first)
        wrong = [event for event, row in zip(events[len(rows) :], parameters, strict=True) if row.verdict == "bug"]
        # Others may have their own reasons, such as a sum over ranks that is taken of no gradient.
        is_cause = all(graph.backward(events[at], each) for each in wrong)
        return rows[: at + 1] if is_cause else []

    def _gradients(self) -> Iterator[Judged]:
        """Judge the gradients at boundaries, in the order in which backward computes them.

        Each rank's loss may be a mean over its own rows, or scaled: then all gradients are larger by one factor, which
        the first gradient tells.
        """
        mine = self.mine
        named = {rank: _named_calls(step, self.whole.paths[rank]) for rank, step in self.theirs.items()}
        scale: float | None = None
        done: set[CallKey] = set()
        for key, call in mine.grads:
            there = {rank: (self.theirs[rank], keys[key]) for rank, keys in named.items() if key in keys}
            # Calls are those of one forward, one by one, or micro-batches, put together: as was computed in forward.
            ways = [] if key in done else [call, None]
            ways = [way for way in ways if self._is_forward_right(key, way, there)][:1]
            if not ways:
                continue
            done.update([key] if ways[0] is None else [])
            full, which = _gradient_of(mine, key, ways[0]), ways[0]
            parts = present({rank: _gradient_of(step, own, which) for rank, (step, own) in there.items()})
            if full is None or not parts or (key, call) not in mine.nodes:
                continue
            bound = bound_of(full, [_gradient_of(other, key, which) for other in self.others])
            if scale is None:
                if bound >= largest(full):
                    continue  # zero but for rounding
                scale = self.whole.finder.scale(parts, full, bound)
            judged = self.find(parts, full * scale, bound * scale, may_reorder=True)
            judged = replace(judged, is_zero=largest(full) <= bound)
            yield Judged(key[0], boundary_title(key), "gradient", judged, (mine.nodes[key, call],))

    def _is_forward_right(
        self, key: CallKey, call: int | None, there: Mapping[int, tuple[RecordedStep, CallKey]]
    ) -> bool:
        """Return True if the value at a boundary in a call, or in all, is explained, so that its gradient can be."""
        full = _value_of(self.mine, key, call)
        parts = present({rank: _value_of(step, own, call) for rank, (step, own) in there.items()})
        counts = {len(self.mine.calls[key]), *(len(step.calls[own]) for step, own in there.values())}
        if full is None or not parts or len(parts) < len(there) or (call is not None and len(counts) > 1):
            return False
        bound = bound_of(full, [_value_of(other, key, call) for other in self.others])
        return self.whole.finder.explained(parts, full, bound, may_reorder=True) is not None


def _named_calls(step: RecordedStep, paths: Mapping[str, str]) -> dict[CallKey, CallKey]:
    """Return a rank's name of each boundary of one device."""
    return {(paths[path], side, way): (path, side, way) for path, side, way in step.calls if path in paths}


def _are_equal(values: Sequence[torch.Tensor]) -> bool:
    """Return True if all calls of a step had the same, e.g. positions in each micro-batch."""
    return all(torch.equal(value, values[0]) for value in values[1:])


def _value_of(step: RecordedStep, key: CallKey, call: int | None) -> torch.Tensor | None:
    """Return the value at a boundary in one call, or in all one behind the other; once if all had the same."""
    values = step.calls.get(key, [])
    if call is not None:
        return values[call] if call < len(values) else None
    return values[0] if len(values) > 1 and _are_equal(values) else joined(values)


def _gradient_of(step: RecordedStep, key: CallKey, call: int | None) -> torch.Tensor | None:
    """Return the gradient of one call, or those of all one behind the other; their sum if all calls had the same."""
    if call is not None:
        return step.grads.get((key, call))
    values = step.calls.get(key, [])
    grads = [step.grads[key, each] for each in range(len(values)) if (key, each) in step.grads]
    if not grads or len(grads) < len(values):
        return None
    return torch.stack(grads).sum(0) if len(values) > 1 and _are_equal(values) else joined(grads)


def _sum(step: RecordedStep) -> torch.Tensor:
    """Add up the losses of a step's micro-batches."""
    return torch.stack([loss.double() for loss in step.losses]).sum()
