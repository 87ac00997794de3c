"""Verdicts on the boundaries of modules in one step of a model with a plan, and on the gradients there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from hyper_parallel.core.dtensor.layout import Layout
from sim.explain.errors import ranks_phrase
from sim.prove.bound import FEW, SAFETY
from sim.prove.evidence import largest, unit_roundoff
from sim.prove.infer import in_orders, order_of_rows
from sim.prove.judge import (
    AutogradGraph,
    Finding,
    Judged,
    absent,
    innermost,
    of_own_rows,
    of_unequal_shares,
    settle,
    spelling,
)
from sim.prove.record import spread_layout
from sim.prove.report import ReportRow
from sim.prove.runs import Given
from sim.prove.steps.comparison import Comparison
from sim.prove.steps.finder import Finder, Parts
from sim.prove.steps.watch import LOSS, CallKey, Declared, LoopRecord, RecordedStep

_MOST_ADDENDS = 16
_COARSE = 2.0**-7  # a bound that is larger than that, beside the tensor, hides errors
_TINY, _MANY = 1e-5, 1024.0  # beside the largest tensor of its kind; and in units of rounding

Boundary: TypeAlias = tuple[CallKey, int]
"""A tensor at a module's boundary, in one of its calls."""


class PlanJudge:
    """Judges one tensor at a time by its declared layout, else by the layout that explains it.

    Args:
        given: what the ranks are given, and what is declared.
        expected: the record of one device, with how far perturbed runs move each tensor.
        finder: of layouts that are not declared.
        dtype: that ranks compute in.
    """

    def __init__(self, given: Given, expected: LoopRecord, finder: Finder, dtype: torch.dtype) -> None:
        self.given, self._moves, self._finder, self._unit = given, expected.moves, finder, unit_roundoff(dtype)
        self._memo: dict[Any, Finding] = {}
        self._bounds: dict[int, float] = {}
        self._sizes: dict[int, float] = {}
        self._coarse: set[int] = set()  # tensors with so wide a bound that they are not proved
        self.enter(RecordedStep())

    def enter(self, mine: RecordedStep) -> None:
        """Begin to judge tensors of a step of one device."""
        self.mine = mine
        self._scales: dict[str, float] = {}

    def is_coarse(self, full: torch.Tensor) -> bool:
        """Return True if a tensor has so wide a bound that it is not proved."""
        return id(full) in self._coarse

    def bound(self, kind: str, full: torch.Tensor, floor: float = FEW) -> float:
        """Return what rounding can do to a tensor; note if it is so much that the tensor is not proved."""
        if id(full) not in self._bounds:
            size, move = self._size(full), SAFETY * self._moves.get(id(full), 0.0)
            self._bounds[id(full)] = max(move, floor * self._unit * size, torch.finfo(torch.float64).tiny)
            # A tensor that is zero but for rounding has a bound above its own size, and so has one that is tiny.
            least = max(_TINY, _MANY * self._unit) * self._scale_of(kind, full)
            # Adam steps by the sign of a gradient, also of one that is zero but for rounding: its own bound shows it.
            is_wide = kind not in ("update", "stepped buffer") and move > max(_COARSE * size, least)
            self._coarse.update([id(full)] if is_wide else [])
        return self._bounds[id(full)]

    def _size(self, full: torch.Tensor) -> float:
        if id(full) not in self._sizes:
            self._sizes[id(full)] = largest(full)
        return self._sizes[id(full)]

    def _scale_of(self, kind: str, full: torch.Tensor) -> float:
        """Return the largest element of all tensors of a kind in the step."""
        if kind not in self._scales:
            kinds: dict[str, Iterable[torch.Tensor | None]] = {
                "value": itertools.chain(*self.mine.calls.values()),
                "grad": self.mine.grads.values(),
                "gradient": self.mine.gradients.values(),
                "changed buffer": self.mine.after_forward.values(),
            }
            sizes = (self._size(each) for each in kinds.get(kind, [full]) if each is not None)
            self._scales[kind] = max(sizes, default=0.0)
        return self._scales[kind]

    def judged(
        self,
        parts: Parts,
        full: torch.Tensor,
        bound: float,
        said: Mapping[int, Declared] | None = None,
        layout: Layout | None = None,
        addends: Callable[[], Mapping[str, torch.Tensor]] = dict,
    ) -> Finding:
        """Judge parts by what the ranks' DTensors say, else by a declaration, else by what can be found."""
        spoken = {rank: each for rank, each in (said or {}).items() if each.layout is not None}
        known = self._finder.mesh.alias_name
        if spoken and len(spoken) == len(parts):
            first = spoken[min(spoken)]
            odd = [rank for rank, each in spoken.items() if each.layout != first.layout]
            if odd:
                one, other = (str(spoken[rank].layout).partition(" on ")[0] for rank in (min(spoken), odd[0]))
                sentence = f"rank {min(spoken)} {one}, {ranks_phrase(odd)} {other}"
                sentence = f"the ranks declare different layouts: {sentence}"
                return Finding("wrong", None, one, math.inf, math.inf, bound, sentence)
            layout, known = first.layout, first.known
        memo = (id(full), tuple(id(parts[rank]) for rank in sorted(parts)), layout, known if layout else ())
        if memo not in self._memo:
            judge = self._finder.judge(parts)
            found = (
                judge.declared(parts, full, bound, layout, known)
                if layout is not None
                else judge.undeclared(parts, full, bound, addends)
            )
            self._memo[memo] = replace(found, is_zero=largest(full) <= bound, is_coarse=id(full) in self._coarse)
        return self._memo[memo]


class PlanStep:
    """Compares one step of a model with a plan: each call of a module on one device is one on the ranks.

    Args:
        whole: the comparison of all steps.
        judge: of single tensors.
        number: of the step.
        has_loss_fn: there is a loss beside what the model returns.

    Attributes:
        keys: the boundaries that were compared in forward, in order.
        events: what was judged in forward.
        graph: autograd's graph on one device.
    """

    def __init__(self, whole: Comparison, judge: PlanJudge, number: int, *, has_loss_fn: bool) -> None:
        self.whole, self._judge, self.number, self._has_loss_fn = whole, judge, number, has_loss_fn
        self.mine, _, self.theirs = whole.sides(number)
        judge.enter(self.mine)
        self.graph = AutogradGraph()
        self.keys: list[Boundary] = []
        self.events: list[Judged] = []
        self._forward_of: dict[Boundary, Finding] = {}
        self._private: set[Boundary] = set()
        self._rows: list[ReportRow] | None = None

    # -- forward -----------------------------------------------------------------------------------------------------

    def value(self, boundary: Boundary) -> Finding | None:
        """Judge what stands at a boundary; None where no rank has such a boundary."""
        if boundary not in self._forward_of:
            parts = self.parts(boundary)
            if not parts:
                return None
            every = len(parts) == len(self.whole.ranks)
            self._forward_of[boundary] = (
                self._value(boundary, parts) if every else absent(list(parts), range(len(self.whole.ranks)))
            )
        return self._forward_of[boundary]

    def _full(self, boundary: Boundary) -> torch.Tensor:
        return self.mine.calls[boundary[0]][boundary[1]]

    def parts(self, boundary: Boundary) -> Parts:
        """Return the parts at a boundary, of the ranks that come to it."""
        return {
            rank: step.calls[boundary[0]][boundary[1]]
            for rank, step in self.theirs.items()
            if boundary in step.declared
        }

    def _value(self, boundary: Boundary, parts: Parts) -> Finding:
        (path, side, way), full, title = boundary[0], self._full(boundary), self._argument(boundary[0])
        said = {rank: self.theirs[rank].declared[boundary] for rank in parts}
        bound = self._judge.bound("value", full)
        every = len(self.whole.mesh.alias_name)  # a DTensor on a slice of the mesh may be a part itself
        shapes = {each.shape for each in said.values() if each.layout is not None and len(each.known) == every}
        shape = self.mine.declared[boundary].shape
        if len(shapes) == 1 and shapes != {shape}:
            found = self._judge.judged(parts, full, bound)
            sentence = f"the ranks take it for parts of a tensor of shape {shapes.pop()}, and that has {shape}"
            declared = next(spread_layout(each.layout, each.known) for each in said.values() if each.layout)
            hint = f"declare {spelling(found.found)}" if found.found is not None else ""
            whole = [name for name in self._judge.given.names if name not in self._judge.given.cuts]
            if whole and found.found is not None and not any(found.found.splits(full.ndim)):
                hint += f"; or split it before; or give each rank its part of {whole[0]!r}, by input_layouts"
            wrong = replace(found, status="wrong", declared=declared, sentence=sentence, suggestion=hint)
            return replace(wrong, error=math.inf, ratio=math.inf)
        layout = self._judge.given.said.of(path, side, way, title)
        found = self._judge.judged(parts, full, bound, said, layout, lambda: self._addends(boundary))
        if found.status != "unexplained":
            return found
        if boundary not in self.mine.nodes and side == "input":
            self._learn_order(boundary, parts, full)
            return found  # private, where something right is made of it
        return self._reordered(parts, full, bound) or found

    def _learn_order(self, boundary: Boundary, parts: Parts, full: torch.Tensor) -> None:
        """Note in which order the ranks were given an input, zig-zag or in turns, unless parts are only swapped."""
        found = order_of_rows(parts, full, 0.0)
        if found is None:
            return
        dim, pieces = found
        places = tuple(itertools.chain(*pieces))
        is_cut = any(after - before != 1 for piece in pieces for before, after in itertools.pairwise(piece))
        if is_cut and places not in self.whole.finder.orders:
            self.whole.finder.orders.append(places)
            self.whole.note(f"dim {dim} of {self.place(boundary)} is held in another order, and compared in that")

    def _argument(self, key: CallKey) -> str:
        """Return the argument, or the result, as a person names it, with the way to the tensor inside of it."""
        path, side, way = key
        place, dot, rest = way.partition(".")
        names = self.whole.expected.arguments.get(path, [])
        is_known = side == "input" and place.isdecimal() and int(place) < len(names)
        return f"{names[int(place)] if is_known else place}{dot}{rest}"

    def _title(self, key: CallKey) -> str:
        """Name a tensor at a boundary, as "input x" or "output"."""
        name = self._argument(key).lstrip(".")
        return key[1] if name in ("", key[1]) else f"{key[1]} {name}"

    def place(self, boundary: Boundary) -> str:
        """Name a boundary with its module."""
        return ReportRow(boundary[0][0], self._title(boundary[0]), "forward").place

    def _reordered(self, parts: Parts, full: torch.Tensor, bound: float) -> Finding | None:
        """Judge a tensor in the orders in which the ranks were given inputs; None: these explain nothing."""
        finder = self.whole.finder
        found = (finder.judge(parts).undeclared(parts, other, bound) for other in in_orders(full, finder.orders))
        return next((each for each in found if each.status != "unexplained"), None)

    def _addends(self, boundary: Boundary) -> dict[str, torch.Tensor]:
        """Return what may have been added once per rank: what went into a module and into those within it."""
        path, side, _ = boundary[0]
        if side != "output":
            return {}
        prefix, shape = f"{path}." if path else "", self.mine.declared[boundary].shape
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for other, said in self.mine.declared.items():
            (within_path, way, _), full = other[0], self._full(other)
            is_within = within_path == path or within_path.startswith(prefix)
            if way == "input" and is_within and said.shape == shape and full.is_floating_point():
                found.setdefault(id(full), (f"the input of {within_path or 'the model'}", full))
            if len(found) == _MOST_ADDENDS:
                break
        return dict(found.values())

    def scale(self) -> float:
        """Return how many times larger the gradients of activations are than on one device.

        Where each rank's loss is the mean over its own data, they are as many times larger as there are such ranks;
        parameters are not, once the mean over the ranks has been taken.
        """
        sizes = dict(zip(self.whole.mesh.alias_name, self.whole.mesh.mesh_shape, strict=True))
        if not self.mine.losses:
            averaged = self._judge.given.data_axes if self.whole.ranks[0].averages else ()
            return float(math.prod(sizes[name] for name in averaged))
        found = self.loss().found
        return math.prod(sizes[name] for name, kind in found.partial.items() if kind == "avg") if found else 1.0

    def output_layout(self, way: str) -> Layout | None:
        """Return the layout of what the model returned: the declared one, or the one found."""
        boundary = (("", "output", way), 0)
        found = self.value(boundary)
        if found is None:
            return None
        if found.status in ("right", "pending"):
            return found.found
        return self.theirs[0].declared.get(boundary, Declared()).layout or found.found

    def loss(self) -> Finding:
        """Judge the loss; over ranks with different data it may be the part of a sum or of a mean."""
        full = self.mine.losses[0]
        parts = {rank: step.losses[0] for rank, step in self.theirs.items() if step.losses}
        if len(parts) < len(self.whole.ranks):
            return absent(list(parts), range(len(self.whole.ranks)))
        found = self._judge.judged(parts, full, self._judge.bound("loss", full))
        spread = found.found is not None and set(found.found.partial) <= set(self._judge.given.input_axes)
        spread = spread or bool(self.whole.finder.orders)  # the model has split its input by itself
        if found.status == "pending" and spread:
            return replace(found, status="right", sentence="")
        if found.status == "unexplained" and self._judge.given.input_axes:
            held = [self.parts(each) for each in self.mine.declared if each[0][:2] == ("", "input")]
            return of_unequal_shares(found, parts, full, held)
        return found

    @property
    def forward_rows(self) -> list[ReportRow]:
        """The rows of the step's forward."""
        if self._rows is None:
            self.events = self._forward_events()
            self._rows = settle(self.events, self.graph.forward)
            pairs = zip(self.keys, self._rows, strict=False)
            self._private = {boundary for boundary, row in pairs if row.verdict == "private"}
        return self._rows

    def _forward_events(self) -> list[Judged]:
        """Judge all boundaries, in program order."""
        events, left = [], 0
        for boundary in self.mine.declared:
            (path, side, _), found = boundary[0], self.value(boundary)
            if found is None or (self.whole.stopped and found.status == "absent"):
                left += 1
                continue
            self.keys.append(boundary)
            found = self._forward_of[boundary] = self._cast(boundary, self._batch_norm(boundary, found))
            final = (path, side) == ("", "output") and not self._is_split_loss(boundary, found)
            is_given = boundary not in self.mine.nodes and side == "input"
            title, nodes = self._title(boundary[0]), self._nodes(boundary)
            events.append(Judged(path, title, "forward", found, nodes, final, is_given))
        if left and not self.whole.stopped:
            self.whole.note(f"{left} tensors of modules that the ranks do not have, or do not call, were not compared")
        has_come_to_it = not self.whole.stopped or all(step.losses for step in self.theirs.values())
        if self.mine.losses and self._has_loss_fn and has_come_to_it:
            nodes = tuple(node for (key, _), node in self.mine.nodes.items() if key == LOSS)
            events.append(Judged("", "loss", "forward", self.loss(), nodes, True))
        return events

    def _nodes(self, boundary: Boundary, *, own: bool = False) -> tuple[Any, ...]:
        """Return where a tensor stands in the graph; an input without history where its module's results do."""
        nodes, (path, side, _) = self.mine.nodes, boundary[0]
        if own or boundary in nodes or side == "output":
            return (nodes[boundary],) if boundary in nodes else ()
        there = (path, "output")
        return tuple(node for (key, call), node in nodes.items() if key[:2] == there and call == boundary[1])

    def _batch_norm(self, boundary: Boundary, found: Finding) -> Finding:
        """Say what is the matter with a batch norm that sees only a rank's own rows."""
        path = boundary[0][0]
        if path not in self.whole.expected.batch_norms or found.status != "unexplained":
            return found
        input_of_it = ((path, "input", "0"), boundary[1])
        given = self.value(input_of_it) if input_of_it in self.mine.declared else None
        return found if given is None else of_own_rows(found, given.found, self.parts(boundary), self._full(boundary))

    def _cast(self, boundary: Boundary, found: Finding) -> Finding:
        """Say where a module casts by hand on the ranks, and not on one device."""
        path, side, _ = boundary[0]
        low = {rank: run.low[path] for rank, run in enumerate(self.whole.ranks) if path in run.low}
        if side == "input" or not low or path in self.whole.expected.low or found.status not in ("right", "pending"):
            return found
        dtype = str(next(iter(low.values()))).removeprefix("torch.")
        sentence = f"{ranks_phrase(low)} computed it in {dtype} or cast to it by hand, and one device did not"
        hint = "the same casts in both models; or autocast, or a mixed-precision policy"
        return replace(found, status="wrong", sentence=sentence, suggestion=hint)

    def _is_split_loss(self, boundary: Boundary, found: Finding) -> bool:
        scalar = self._full(boundary).dim() == 0
        return scalar and found.found is not None and set(found.found.partial) <= set(self._judge.given.input_axes)

    # -- backward ----------------------------------------------------------------------------------------------------

    def gradients(self) -> list[Judged]:
        """Judge the gradients of activations, in the order in which they are computed; then those of parameters."""
        scale = self.scale()
        if scale != 1:
            self.whole.note(
                f"gradients of activations are {scale:g} times those of one device, as each rank's loss "
                "is the mean over its own data"
            )
        groups: dict[int, list[Boundary]] = {}
        for boundary, grad in self.mine.grads.items():
            groups.setdefault(id(grad), []).append(boundary)
        events = []
        for group in groups.values():
            judged = [(boundary, self._gradient(boundary, scale)) for boundary in reversed(group)]
            for boundary, found in _best_named_first(judged):
                path, title, nodes = boundary[0][0], self._title(boundary[0]), self._nodes(boundary, own=True)
                events.append(Judged(path, title, "gradient", found, nodes))
        return [*events]

    def _gradient(self, boundary: Boundary, scale: float) -> Finding | None:
        there = self.parts(boundary)
        grads = {rank: self.theirs[rank].grads[boundary] for rank in there if boundary in self.theirs[rank].grads}
        if len(there) < len(self.whole.ranks):
            return None  # forward has said so
        if not grads:
            return Finding("missing", sentence="no rank computes it")
        if len(grads) < len(there):
            return absent(list(grads), list(there))
        mine = self.mine.grads[boundary]
        full = mine if scale == 1 else mine * scale
        bound = self._judge.bound("grad", mine) * scale
        said = {rank: self.theirs[rank].grads_declared.get(boundary, Declared()) for rank in there}
        if any(each.layout is None for each in said.values()):
            forward, (path, side, way) = self.value(boundary), boundary[0]
            declared = self._judge.given.said.of(path, side, way, self._argument(boundary[0]))
            if declared is not None and forward is not None and forward.status == "right":
                found = self._judge.judged(grads, full, bound, None, declared.reset_partial())
                if found.status == "right":
                    return found
        found = self._judge.judged(grads, full, bound, said)
        found = replace(found, is_coarse=self._judge.is_coarse(mine)) if scale != 1 else found
        if found.status == "unexplained":
            found = self._reordered(grads, full, bound) or found
        if found.status == "unexplained" and boundary in self._private:  # as its value was
            return replace(found, status="private")
        return found


def _best_named_first(judged: Sequence[tuple[Boundary, Finding | None]]) -> Iterator[tuple[Boundary, Finding]]:
    """Yield one gradient's boundaries, consumers first; of those that hold the same, the one that names it best."""
    groups: dict[int, list[tuple[Boundary, Finding]]] = {}
    for boundary, found in judged:
        if found is not None:
            groups.setdefault(id(found), []).append((boundary, found))
    for group in groups.values():
        best = innermost([key for (key, _), _ in group[::-1]])
        yield from sorted(group, key=lambda each: each[0][0] != best)
