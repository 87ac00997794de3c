"""Compares a model that is made parallel with the same model on one device, tensor by tensor, as things happen."""

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
from sim.prove.infer import Order, furthest, in_orders, order_of, order_of_rows
from sim.prove.judge import (
    CUT_OFF,
    AutogradGraph,
    Finding,
    Judged,
    absent,
    first_bug,
    incomparable,
    innermost,
    of_own_rows,
    of_unequal_shares,
    pending_words,
    row_of,
    settle,
    short,
    spelling,
    split_name,
    within,
)
from sim.prove.modes.draws import ModuleTensor
from sim.prove.modes.values import listed
from sim.prove.randomness import Draw, masks_problem, redrawn_row
from sim.prove.record import spread_layout
from sim.prove.report import ReportRow
from sim.prove.runs import Given
from sim.prove.steps.compare import LoopComparison
from sim.prove.steps.names import NameMap
from sim.prove.steps.updates import ROUNDINGS
from sim.prove.steps.watch import LOSS, CallKey, Declared, LoopRecord, RecordedStep

_MOST_ADDENDS = 16
_COARSE = 2.0**-7  # a bound that is larger than that, beside the tensor, hides errors
_TINY, _MANY = 1e-5, 1024.0  # beside the largest tensor of its kind; and in units of rounding

Boundary: TypeAlias = tuple[CallKey, int]
"""A tensor at a module's boundary, in one of its calls."""


class PlanComparison(LoopComparison):
    """Compares the steps of a model with a plan, where every call of a module on one device is one on the ranks.

    So each boundary is held against its like, with what DTensors declare there; parameters have their own names.

    Args:
        given: what the ranks are given, and what is declared.
        expected: of one device.
        moved: of one device again, perturbed.
        ranks: of each rank.
        dtype: that ranks compute in.
        has_loss_fn: there is a loss beside what the model returns.
        has_optimizer: there are updates.
        has_second: the steps after the first have other inputs.
        stopped: the ranks have failed; compared is what came before.
    """

    def __init__(
        self,
        given: Given,
        expected: LoopRecord,
        moved: Sequence[LoopRecord],
        ranks: Sequence[LoopRecord],
        dtype: torch.dtype,
        *,
        has_loss_fn: bool,
        has_optimizer: bool,
        has_second: bool = False,
        stopped: bool = False,
    ) -> None:
        super().__init__(expected, moved, ranks, given.mesh, {}, stopped=stopped)
        self.given, self._unit = given, unit_roundoff(dtype)
        self._has_loss_fn, self._has_optimizer, self._has_second = has_loss_fn, has_optimizer, has_second
        self._every = range(len(ranks))
        self._memo: dict[Any, Finding] = {}
        self._bounds: dict[int, float] = {}
        self._sizes: dict[int, float] = {}
        self._coarse: set[int] = set()  # tensors with so wide a bound that they are not proved
        self._made_as: dict[str, Finding] = {}  # parameters
        self._held_in_order: dict[str, Order] = {}
        self._owned: dict[str, tuple[int, ...]] = {}  # modules that only some ranks have, and which
        self._buffers: dict[str, Finding] = {}
        self._is_end_compared = False
        self._enter(0)

    def _find_names(self, given: Mapping[str, Any]) -> NameMap:
        """Return the map of tied parameters of which a rank has another name first; others have their own."""
        del given
        same = {name: first for rank in self.ranks for name, first in rank.same.items()}
        firsts = {same.get(name, name): name for name in self.expected.initial}
        return NameMap({first: ((name,), 0) for first, name in firsts.items() if first != name})

    def _enter(self, number: int) -> None:
        """Begin to judge a step."""
        self.number = number
        self.mine, _, self.theirs = self._sides(number)
        self._graph = AutogradGraph()
        self._forward_of: dict[Boundary, Finding] = {}
        self._keys: list[Boundary] = []  # of forward, in order
        self._private: set[Boundary] = set()
        self._events: list[Judged] = []
        self._rows: list[ReportRow] | None = None
        self._scales: dict[str, float] = {}

    # -- bounds ------------------------------------------------------------------------------------------------------

    def _bound(self, kind: str, full: torch.Tensor, floor: float = FEW) -> float:
        """Return what rounding can do to a tensor; note if it is so much that the tensor is not proved."""
        if id(full) not in self._bounds:
            size, move = self._size(full), SAFETY * self.expected.moves.get(id(full), 0.0)
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

    # -- forward -----------------------------------------------------------------------------------------------------

    def value(self, boundary: Boundary) -> Finding | None:
        """Judge what stands at a boundary; None where no rank has such a boundary."""
        if boundary not in self._forward_of:
            parts = self._parts(boundary)
            if not parts:
                return None
            every = len(parts) == len(self.ranks)
            self._forward_of[boundary] = self._value(boundary, parts) if every else absent(list(parts), self._every)
        return self._forward_of[boundary]

    def _full(self, boundary: Boundary) -> torch.Tensor:
        return self.mine.calls[boundary[0]][boundary[1]]

    def _parts(self, boundary: Boundary) -> dict[int, torch.Tensor]:
        """Return what the ranks have at a boundary, of those that come to it."""
        return {
            rank: step.calls[boundary[0]][boundary[1]]
            for rank, step in self.theirs.items()
            if boundary in step.declared
        }

    def _value(self, boundary: Boundary, parts: Mapping[int, torch.Tensor]) -> Finding:
        (path, side, way), full, title = boundary[0], self._full(boundary), self._argument(boundary[0])
        said = {rank: self.theirs[rank].declared[boundary] for rank in parts}
        bound = self._bound("value", full)
        every = len(self.mesh.alias_name)  # a DTensor on a slice of the mesh may be a part itself
        shapes = {each.shape for each in said.values() if each.layout is not None and len(each.known) == every}
        shape = self.mine.declared[boundary].shape
        if len(shapes) == 1 and shapes != {shape}:
            found = self._judged(parts, full, bound)
            sentence = f"the ranks take it for parts of a tensor of shape {shapes.pop()}, and that has {shape}"
            declared = next(spread_layout(each.layout, each.known) for each in said.values() if each.layout)
            hint = f"declare {spelling(found.found)}" if found.found is not None else ""
            whole = [name for name in self.given.names if name not in self.given.cuts]
            if whole and found.found is not None and not any(found.found.splits(full.ndim)):
                hint += f"; or split it before; or give each rank its part of {whole[0]!r}, by input_layouts"
            wrong = replace(found, status="wrong", declared=declared, sentence=sentence, suggestion=hint)
            return replace(wrong, error=math.inf, ratio=math.inf)
        layout = self.given.said.of(path, side, way, title)
        found = self._judged(parts, full, bound, said, layout, lambda: self._addends(boundary))
        if found.status != "unexplained":
            return found
        if boundary not in self.mine.nodes and side == "input":
            self._learn_order(boundary, parts, full)
            return found  # private, where something right is made of it
        return self._reordered(parts, full, bound) or found

    def _learn_order(self, boundary: Boundary, parts: Mapping[int, torch.Tensor], full: torch.Tensor) -> None:
        """Note in which order the ranks were given an input, zig-zag or in turns, unless parts are only swapped."""
        found = order_of_rows(parts, full, 0.0)
        if found is None:
            return
        dim, pieces = found
        places = tuple(itertools.chain(*pieces))
        is_cut = any(after - before != 1 for piece in pieces for before, after in itertools.pairwise(piece))
        if is_cut and places not in self._orders:
            self._orders.append(places)
            self._note(f"dim {dim} of {self._place(boundary)} is held in another order, and compared in that")

    def _argument(self, key: CallKey) -> str:
        """Return the argument, or the result, as a person names it, with the way to the tensor inside of it."""
        path, side, way = key
        place, dot, rest = way.partition(".")
        names = self.expected.arguments.get(path, [])
        is_known = side == "input" and place.isdecimal() and int(place) < len(names)
        return f"{names[int(place)] if is_known else place}{dot}{rest}"

    def _title(self, key: CallKey) -> str:
        """Name a tensor at a boundary, as "input x" or "output"."""
        name = self._argument(key).lstrip(".")
        return key[1] if name in ("", key[1]) else f"{key[1]} {name}"

    def _place(self, boundary: Boundary) -> str:
        return ReportRow(boundary[0][0], self._title(boundary[0]), "forward").place

    def _reordered(self, parts: Mapping[int, torch.Tensor], full: torch.Tensor, bound: float) -> Finding | None:
        """Judge a tensor in the orders in which the ranks were given inputs; None: these explain nothing."""
        found = (self._judge(parts).undeclared(parts, other, bound) for other in in_orders(full, self._orders))
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
        sizes = dict(zip(self.mesh.alias_name, self.mesh.mesh_shape, strict=True))
        if not self.mine.losses:
            return math.prod(sizes[name] for name in self.given.data_axes) if self.ranks[0].averages else 1.0
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
        if len(parts) < len(self.ranks):
            return absent(list(parts), self._every)
        found = self._judged(parts, full, self._bound("loss", full))
        spread = found.found is not None and set(found.found.partial) <= set(self.given.input_axes)
        spread = spread or bool(self._orders)  # the model has split its input by itself
        if found.status == "pending" and spread:
            return replace(found, status="right", sentence="")
        if found.status == "unexplained" and self.given.input_axes:
            held = [self._parts(each) for each in self.mine.declared if each[0][:2] == ("", "input")]
            return of_unequal_shares(found, parts, full, held)
        return found

    def _judged(
        self,
        parts: Mapping[int, torch.Tensor],
        full: torch.Tensor,
        bound: float,
        said: Mapping[int, Declared] | None = None,
        layout: Layout | None = None,
        addends: Callable[[], Mapping[str, torch.Tensor]] = dict,
    ) -> Finding:
        """Judge parts by what the ranks' DTensors say, else by a declaration, else by what can be found."""
        spoken = {rank: each for rank, each in (said or {}).items() if each.layout is not None}
        known = self.mesh.alias_name
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
            judge = self._judge(parts)
            found = (
                judge.declared(parts, full, bound, layout, known)
                if layout is not None
                else judge.undeclared(parts, full, bound, addends)
            )
            self._memo[memo] = replace(found, is_zero=largest(full) <= bound, is_coarse=id(full) in self._coarse)
        return self._memo[memo]

    @property
    def forward_rows(self) -> list[ReportRow]:
        """The rows of the step's forward."""
        if self._rows is None:
            self._events = self._forward_events()
            self._rows = settle(self._events, self._graph.forward)
            pairs = zip(self._keys, self._rows, strict=False)
            self._private = {boundary for boundary, row in pairs if row.verdict == "private"}
        return self._rows

    def _forward(
        self, mine: RecordedStep, others: Sequence[RecordedStep], theirs: Mapping[int, RecordedStep]
    ) -> Iterator[ReportRow]:
        """Judge the forward of the step in which ranks have failed."""
        del others, theirs
        if mine is not self.mine:
            self._enter(next(number for number, step in enumerate(self.expected.steps) if step is mine))
        yield from [*self.forward_rows, *self._changed_buffers()]

    def _forward_events(self) -> list[Judged]:
        """Judge all boundaries, in program order."""
        events, left = [], 0
        for boundary in self.mine.declared:
            (path, side, _), found = boundary[0], self.value(boundary)
            if found is None or (self._stopped and found.status == "absent"):
                left += 1
                continue
            self._keys.append(boundary)
            found = self._forward_of[boundary] = self._cast(boundary, self._batch_norm(boundary, found))
            final = (path, side) == ("", "output") and not self._is_split_loss(boundary, found)
            is_given = boundary not in self.mine.nodes and side == "input"
            title, nodes = self._title(boundary[0]), self._nodes(boundary)
            events.append(Judged(path, title, "forward", found, nodes, final, is_given))
        if left and not self._stopped:
            self._note(f"{left} tensors of modules that the ranks do not have, or do not call, were not compared")
        has_come_to_it = not self._stopped or all(step.losses for step in self.theirs.values())
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
        if path not in self.expected.batch_norms or found.status != "unexplained":
            return found
        input_of_it = ((path, "input", "0"), boundary[1])
        given = self.value(input_of_it) if input_of_it in self.mine.declared else None
        return found if given is None else of_own_rows(found, given.found, self._parts(boundary), self._full(boundary))

    def _cast(self, boundary: Boundary, found: Finding) -> Finding:
        """Say where a module casts by hand on the ranks, and not on one device."""
        path, side, _ = boundary[0]
        low = {rank: run.low[path] for rank, run in enumerate(self.ranks) if path in run.low}
        if side == "input" or not low or path in self.expected.low or found.status not in ("right", "pending"):
            return found
        dtype = str(next(iter(low.values()))).removeprefix("torch.")
        sentence = f"{ranks_phrase(low)} computed it in {dtype} or cast to it by hand, and one device did not"
        hint = "the same casts in both models; or autocast, or a mixed-precision policy"
        return replace(found, status="wrong", sentence=sentence, suggestion=hint)

    def _is_split_loss(self, boundary: Boundary, found: Finding) -> bool:
        scalar = self._full(boundary).dim() == 0
        return scalar and found.found is not None and set(found.found.partial) <= set(self.given.input_axes)

    def _random_rows(self) -> Iterator[ReportRow]:
        """Compare the states of the generators with which the ranks drew random numbers."""
        drawn = [_by_place(run) for run in self.ranks]
        for place, draw in _by_place(self.expected).items():
            ranks = [run[place] for run in drawn if place in run]
            if len(ranks) < len(self.ranks):
                continue
            inputs = (self.value(each) for each in self.mine.declared if each[0][:2] == (draw.path, "input"))
            found = next(inputs, None)
            layout = found.found if found is not None else None
            split, rows = (_splitting(layout), _splitting(layout, 1)) if layout is not None else ([], [])
            problem = masks_problem(ranks, draw.shape, self.mesh, split, rows)
            row = ReportRow(draw.path, draw.op.rstrip("_"), "random", found=short(layout))
            yield row if problem is None else replace(row, verdict="bug", sentence=problem[0], suggestion=problem[1])

    # -- backward ----------------------------------------------------------------------------------------------------

    def _gradient_events(self) -> list[Judged]:
        """Judge the gradients of activations, in the order in which they are computed; then those of parameters."""
        scale = self.scale()
        if scale != 1:
            self._note(
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
        return [*events, *self._parameter_gradients()]

    def _gradient(self, boundary: Boundary, scale: float) -> Finding | None:
        there = self._parts(boundary)
        grads = {rank: self.theirs[rank].grads[boundary] for rank in there if boundary in self.theirs[rank].grads}
        if len(there) < len(self.ranks):
            return None  # forward has said so
        if not grads:
            return Finding("missing", sentence="no rank computes it")
        if len(grads) < len(there):
            return absent(list(grads), list(there))
        mine = self.mine.grads[boundary]
        full = mine if scale == 1 else mine * scale
        bound = self._bound("grad", mine) * scale
        said = {rank: self.theirs[rank].grads_declared.get(boundary, Declared()) for rank in there}
        if any(each.layout is None for each in said.values()):
            forward, (path, side, way) = self.value(boundary), boundary[0]
            declared = self.given.said.of(path, side, way, self._argument(boundary[0]))
            if declared is not None and forward is not None and forward.status == "right":
                found = self._judged(grads, full, bound, None, declared.reset_partial())
                if found.status == "right":
                    return found
        found = self._judged(grads, full, bound, said)
        found = replace(found, is_coarse=id(mine) in self._coarse) if scale != 1 else found
        if found.status == "unexplained":
            found = self._reordered(grads, full, bound) or found
        if found.status == "unexplained" and boundary in self._private:  # as its value was
            return replace(found, status="private")
        return found

    def _parameter_gradients(self) -> Iterator[Judged]:
        for name, mine in self.mine.gradients.items():
            made = self._made_as.get(name)
            if made is None:
                continue  # there is no such parameter, as was said before
            found = self._parameter_gradient(name, mine, self._there("gradients", name), made)
            yield Judged(*split_name(name), "gradient", found, (self.expected.leaves[name],), True)

    def _parameter_gradient(
        self, name: str, mine: torch.Tensor | None, there: Mapping[int, torch.Tensor], made: Finding
    ) -> Finding:
        if mine is None or not bool(mine.count_nonzero()):
            if all(not bool(grad.count_nonzero()) for grad in there.values()):
                return Finding("right", made.found, made.declared)
            if mine is None:
                sentence = f"there is no gradient on one device, and one on {ranks_phrase(there)}"
                return incomparable(sentence, declared=made.declared)
        if not there:
            return incomparable("no rank has a gradient, and one device has", CUT_OFF, made.declared)
        bound = self._bound("gradient", mine)
        if made.status == "absent":
            return self._of_owners(there, mine, bound)
        if len(there) < len(self.ranks):
            return replace(absent(list(there), self._every, made.declared), status="wrong")
        if name in self._held_in_order:
            return self._in_order(name, there, mine, bound)
        own = {rank: run.same.get(name, name) for rank, run in enumerate(self.ranks)}
        said = {rank: step.gradients_declared.get(own[rank], Declared()) for rank, step in self.theirs.items()}
        layout = made.found.reset_partial() if made.found is not None else None
        if all(each.layout is not None for each in said.values()):
            found = self._judged(there, mine, bound, said)
            known = next(iter(said.values())).known
            silent = found.found is not None and any(axis not in known for axis in found.found.partial)
            if made.status != "right" or found.status != "right" or not silent:
                return found  # else it is a part of a sum, along an axis that the gradient says nothing of
        found = self._judged(there, mine, bound, None, layout)
        if found.status == "wrong" and found.found is not None and not found.found.is_partial():
            return replace(
                found, status="right", sentence="", suggestion=""
            )  # replicated, or sharded: the update shows it
        if found.status == "wrong" and found.found is not None:
            axes = " and ".join(found.found.partial)
            sentence = f"{pending_words(found.found)}: nothing adds up the gradients of ranks that share the parameter"
            hint = f"an all_reduce of gradients over {axes}, as DDP or fully_shard would do"
            return replace(found, sentence=sentence, suggestion=hint)
        return found

    # -- parameters --------------------------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[ReportRow]:
        """Judge the parameters and buffers as they were made."""
        rows = [row_of(event) for event in self._parameter_events()]
        yield from self._with_orders(rows)
        yield from self._initial_buffers()

    def _parameter_events(self) -> Iterator[Judged]:
        for name, mine in self.expected.initial.items():
            found = self._made_of(name, mine)
            if found.status in ("right", "pending", "private", "absent"):
                self._made_as[name] = found
            yield Judged(*split_name(name), "parameter", found)
        for name, first in self.expected.same.items():
            apart = [
                rank
                for rank, run in enumerate(self.ranks)
                if name in run.same and first in run.same and run.same[name] != run.same[first]
            ]
            if apart:
                sentence = f"one tensor with {first} on one device, and a parameter of its own on {ranks_phrase(apart)}"
                found = Finding("wrong", sentence=sentence, suggestion=f"tie {name} to {first} again")
                yield Judged(*split_name(name), "parameter", found)

    def _made_of(self, name: str, mine: torch.Tensor) -> Finding:
        there = self._there("initial", name)
        if not there:
            sentence = "the parallel model has no parameter of that name, so nothing is known of it"
            return incomparable(sentence, "keep the names of the single-device model")
        if len(there) < len(self.ranks):
            return self._of_some(name, mine, there)
        own = {rank: run.same.get(name, name) for rank, run in enumerate(self.ranks)}
        said = {rank: run.declared[own[rank]] for rank, run in enumerate(self.ranks)}
        bound = self._bound("initial", mine)
        found = self._judged(there, mine, bound, said, self.given.said.parameters.get(name))
        if found.status != "unexplained":
            return found
        places = self._there("places", name)
        if len(places) == len(self.ranks) and furthest(there, mine, places) == 0:
            self._held_in_order[name] = places
            return Finding("right", bound=bound)
        order = order_of(there, mine)
        if order is None:
            return found
        self._held_in_order[name] = order
        self._note(f"{name} is held in an order that no layout says, and compared in that: {found.sentence}")
        return replace(found, status="private", error=0.0, ratio=0.0)

    def _of_some(self, name: str, mine: torch.Tensor, there: Mapping[int, torch.Tensor]) -> Finding:
        """Judge a parameter that some ranks do not have: right for experts, of which each rank calls only its own."""
        lacking = [rank for rank in self._every if rank not in there]
        sentence = f"{ranks_phrase(lacking)} {'has' if len(lacking) == 1 else 'have'} no such parameter"
        path = split_name(name)[0]
        if any(path in step.called for rank in lacking for step in self.ranks[rank].steps[:1]):
            return incomparable(sentence)
        otherwise = f"{ranks_phrase(there)} alone {'has' if len(there) == 1 else 'have'} it, and not with its values"
        found = within(_furthest_copy(there, mine), self._bound("initial", mine), otherwise)
        if found.status == "wrong":
            return found
        self._owned.setdefault(path, tuple(there))
        return Finding("absent", sentence=sentence)

    def _of_owners(self, parts: Mapping[int, torch.Tensor], full: torch.Tensor, bound: float) -> Finding:
        """Compare what the ranks that have a parameter hold of it, or of its gradient."""
        have = "has" if len(parts) == 1 else "have"
        otherwise = f"it is not that of one device; {ranks_phrase(parts)} alone {have} it"
        return within(_furthest_copy(parts, full), bound, otherwise)

    def _in_order(self, name: str, parts: Mapping[int, torch.Tensor], full: torch.Tensor, bound: float) -> Finding:
        """Compare parts of a parameter, or of its gradient, in the order in which the ranks hold it."""
        otherwise = "it is not that of one device, in the order in which the ranks hold the parameter"
        return within(furthest(parts, full, self._held_in_order[name]), bound, otherwise)

    def _with_orders(self, rows: list[ReportRow]) -> list[ReportRow]:
        """Blame parameters in an order of their own, where forward goes wrong and nothing right is made of them."""
        if first_bug(self.forward_rows) is None:
            return rows
        right = [event for event in self._events if event.finding.status == "right" and not event.finding.is_zero]
        fine = [event for event in right if event.tensor.startswith("output")]
        for name in self._held_in_order:
            made = Judged("", "", "parameter", Finding("right"), (self.expected.leaves[name],))
            if not any(self._graph.forward(made, event) for event in fine):
                odd = (*split_name(name), "private")  # not those whose DTensors declare their order
                rows = [
                    replace(row, verdict="bug") if (row.module, row.tensor, row.verdict) == odd else row for row in rows
                ]
        return rows

    def _there(self, kind: str, name: str) -> dict[int, torch.Tensor]:
        """Return what each rank has of a parameter, where it has any: its values, gradient, update or places."""
        found = {}
        for rank, run in enumerate(self.ranks):
            held = getattr(run if kind in ("initial", "places") else self.theirs[rank], kind)
            found[rank] = held.get(run.same.get(name, name))
        return {rank: each for rank, each in found.items() if each is not None}

    # -- buffers -----------------------------------------------------------------------------------------------------

    def _initial_buffers(self) -> Iterator[ReportRow]:
        """Judge buffers as they were made; ranks may have their own, if nobody changes it and its module is right."""
        bug, own, left = first_bug(self.forward_rows), list[str](), list[str]()
        for name, mine in self.expected.buffers.items():
            found = self._buffer(name, mine, [run.buffers for run in self.ranks], self._bound("buffer", mine))
            if found is not None:
                self._buffers[name] = found
                row = self._buffer_row(name, found, "")
                to_blame = bug is not None and f"{bug.module}.".startswith(f"{row.module}." if row.module else "")
                is_own = row.verdict == "bug" and not to_blame and not self._is_changed(name)
                own += [name] if is_own else []
                yield replace(row, verdict="private") if is_own else row
            elif self._is_changed(name) and name not in self.expected.statistics:
                sentence, hint = "one device changes it, and no rank has a buffer of that name", "keep its name"
                row = ReportRow(*split_name(name), "buffer", verdict="not proved", sentence=sentence, suggestion=hint)
                yield row
            else:
                left.append(name)
        self.notes += [f"the ranks' own, which no step changes: {listed(own)}"] if own else []
        self.notes += [f"not compared, as no rank has them: {listed(left)}"] if left and not self._stopped else []

    def _states(self, name: str) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]]:
        """Yield a buffer before the step, after its forward and after the step, on one device and on each rank."""
        for record in (self.expected, *self.ranks):
            steps, number = record.steps, self.number
            before = steps[number - 1].buffers if number else record.buffers
            step = steps[number] if number < len(steps) else RecordedStep()
            yield before.get(name), step.after_forward.get(name), step.buffers.get(name)

    def _is_changed(self, name: str) -> bool:
        """Return True if forward or a step changes a buffer, on one device or on a rank."""
        held = ([each for each in states if each is not None] for states in self._states(name))
        return any(not torch.equal(*pair) for states in held for pair in itertools.pairwise(states))

    def _buffer_row(self, name: str, found: Finding, when: str) -> ReportRow:
        """Return the row of a buffer; nothing adds up parts of it later, and each rank has statistics of its own."""
        module, tensor = split_name(name)
        holders = [run for run in self.ranks if name in run.buffers]
        # A count that is not saved, such as a router's of its tokens, may be added up where it is used.
        is_kept = any(name not in run.unsaved for run in holders)
        row = row_of(Judged(module, f"{tensor}{when}", "buffer", found, final=is_kept))
        if not when or row.verdict != "bug" or not all(name in run.statistics for run in holders):
            return row
        self._note(f"of each rank's own rows, as nothing synchronises them: the buffers of {module or 'the model'}")
        return replace(row, verdict="private", sentence="", suggestion="")

    def _changed_buffers(self) -> Iterator[ReportRow]:
        """Judge buffers that forward has changed, if they were right before it."""
        for name, mine in self.mine.after_forward.items():
            pairs = [(before, after) for before, after, _ in self._states(name)]
            if self._is_right_and_changed(name, pairs):
                bound = self._bound("changed buffer", mine)
                found = self._buffer(name, mine, [step.after_forward for step in self.theirs.values()], bound)
                if found is not None:
                    yield self._buffer_row(name, found, " after forward")

    def _stepped_buffers(self) -> Iterator[ReportRow]:
        """Judge buffers that the step has changed since forward, such as moving averages, if they were right before."""
        for name, mine in self.mine.buffers.items():
            pairs = [(before, after) for _, before, after in self._states(name)]
            if self._is_right_and_changed(name, pairs):
                bound = self._bound("stepped buffer", mine, ROUNDINGS * (self.number + 1))
                found = self._buffer(name, mine, [step.buffers for step in self.theirs.values()], bound)
                if found is not None:
                    yield self._buffer_row(name, found, f" after step {self.number + 1}")

    def _is_right_and_changed(
        self, name: str, pairs: Iterable[tuple[torch.Tensor | None, torch.Tensor | None]]
    ) -> bool:
        made = self._buffers.get(name)
        is_changed = any(a is not None and b is not None and not torch.equal(a, b) for a, b in pairs)
        return is_changed and made is not None and made.status == "right"

    def _buffer(
        self, name: str, mine: torch.Tensor, runs: Sequence[Mapping[str, torch.Tensor]], bound: float
    ) -> Finding | None:
        parts = {rank: buffers[name] for rank, buffers in enumerate(runs) if name in buffers}
        if 0 < len(parts) < len(runs):  # of a module that only some ranks have
            return self._judge(parts).undeclared(parts, mine, bound)
        return self._judged(parts, mine, bound) if parts else None

    # -- updates -----------------------------------------------------------------------------------------------------

    def _update_events(self) -> Iterator[Judged]:
        """Judge the parameters after the optimizer's step."""
        if not self._has_optimizer:
            return
        updates = self._updates(self.number, self.mine, self.theirs)
        for name, mine in self.mine.updates.items():
            made = self._made_as.get(name)
            if made is None:
                continue
            there = self._there("updates", name)
            bound = self._bound("update", mine, ROUNDINGS * (self.number + 1))
            found = updates.judged(name, there, self._updated(name, mine, there, made, bound))
            module, tensor = split_name(name)
            only = len(self.expected.steps) == 1 or (self._has_second and not self.number)
            title = tensor if only else f"{tensor} after step {self.number + 1}"
            yield Judged(module, title, "update", found)

    def _updated(
        self, name: str, mine: torch.Tensor, there: Mapping[int, torch.Tensor], made: Finding, bound: float
    ) -> Finding:
        if made.status == "absent":
            return self._of_owners(there, mine, bound)
        if len(there) < len(self.ranks):
            return replace(absent(list(there), self._every, made.declared), status="wrong")
        if name in self._held_in_order:
            return self._in_order(name, there, mine, bound)
        found = replace(self._judged(there, mine, bound, None, made.found), declared=made.declared)
        if found.status == "wrong" and made.status == "pending":
            sentence = "each rank holds a share of it and stepped on that; the sum is not what it should be"
            return replace(found, sentence=sentence, suggestion="replicate it on every rank, and add up its gradients")
        if found.status == "wrong" and self._is_unmoved(name, there):
            hint = "a step on the parameters themselves"
            return replace(found, sentence="no rank has changed it, one device has", suggestion=hint)
        return found

    def _is_unmoved(self, name: str, after: Mapping[int, torch.Tensor]) -> bool:
        """Whether a parameter is on all ranks what it was before the step."""
        for rank, run in enumerate(self.ranks):
            before = (run.steps[self.number - 1].updates if self.number else run.initial).get(run.same.get(name, name))
            if before is None or rank not in after or not torch.equal(before, after[rank]):
                return False
        return True

    # -- all of it ---------------------------------------------------------------------------------------------------

    def _of_step(self, number: int) -> list[ReportRow]:
        """Judge forward, backward and what the optimizer has made of it."""
        if number != self.number:
            self._enter(number)
        if len(self.theirs) < len(self.ranks):
            return []  # backward was not compared
        rows = [*self.forward_rows, *self._changed_buffers(), *([] if number else self._random_rows())]
        has_gone_back = all(step.gradients for step in self.theirs.values())
        redraw = redrawn_row(self.mine.redraw, [step.redraw for step in self.theirs.values()])
        rows += [redraw] if redraw is not None else []
        if not number:
            self._is_end_compared = self._is_compared(has_gone_back)
        rows += settle(self._gradient_events(), self._graph.backward) if has_gone_back else []
        rows = [replace(row, tensor=f"{row.tensor} in step {number + 1}") if number else row for row in rows]
        if has_gone_back:
            rows += [row_of(event) for event in self._update_events()]
            rows += self._stepped_buffers()
        return rows

    def _is_compared(self, has_gone_back: bool) -> bool:
        """Return True if a gradient tells something, where there are weights to train, or else a result does."""
        if self.expected.trained:
            return has_gone_back and any(bool(each.any()) for each in self.mine.gradients.values() if each is not None)
        return bool(self.mine.losses) or any(key[:2] == ("", "output") for key, _ in self._keys)

    def _is_unproved(self) -> bool:
        return not self._is_end_compared

    def _with_number(self, rows: Iterable[ReportRow], number: int) -> list[ReportRow]:
        return [replace(row, tensor=f"{row.tensor} in step {number + 1}") if number else row for row in rows]

    def _miscounted(self) -> Iterator[ReportRow]:
        yield from ()  # where backward was not compared, that is said

    def _redrawn(self) -> Iterator[ReportRow]:
        yield from ()  # it is among the rows of its step

    def _note_rest(self) -> None:
        self._note_calls()
        if self._owned:
            some = ", ".join(f"{path} on {ranks_phrase(ranks)}" for path, ranks in list(self._owned.items())[:4])
            more = f" and {len(self._owned) - 4} more" if len(self._owned) > 4 else ""
            self.notes.append(f"{some}{more}: other ranks do not have these modules, and do not call them")

    def _note_calls(self) -> None:
        every = [run.steps[0].called if run.steps else [] for run in self.ranks]
        for rank, called in enumerate(every):
            if called != every[0]:
                pairs = zip([*every[0], "(the end)"], [*called, "(the end)"], strict=False)
                at, (one, other) = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
                self.notes.append(
                    f"ranks call modules in different order: call {at} is of {one or '(the model)'} on "
                    f"rank 0, of {other or '(the model)'} on rank {rank}"
                )
                return

    def _boundaries(self, step: int) -> Iterator[ModuleTensor]:
        for boundary in self.expected.steps[step].declared:
            full = self.expected.steps[step].calls[boundary[0]][boundary[1]]
            if full.is_floating_point():
                yield ModuleTensor(self._place(boundary), full, self._bound("value", full))

    def _is_repeated(self, step: int, path: str) -> bool:
        del step, path
        return False  # calls are no micro-batches


def _best_named_first(judged: Sequence[tuple[Boundary, Finding | None]]) -> Iterator[tuple[Boundary, Finding]]:
    """Yield one gradient's boundaries, consumers first; of those that hold the same, the one that names it best."""
    groups: dict[int, list[tuple[Boundary, Finding]]] = {}
    for boundary, found in judged:
        if found is not None:
            groups.setdefault(id(found), []).append((boundary, found))
    for group in groups.values():
        best = innermost([key for (key, _), _ in group[::-1]])
        yield from sorted(group, key=lambda each: each[0][0] != best)


def _furthest_copy(parts: Mapping[int, torch.Tensor], full: torch.Tensor) -> float:
    """Return how far copies are from a tensor at most; infinite for a part of it."""
    if any(part.shape != full.shape for part in parts.values()):
        return math.inf
    return max((float((part - full).abs().max()) for part in parts.values() if part.numel()), default=0.0)


def _splitting(layout: Layout, dims: int | None = None) -> list[str]:
    """Return the axes that split a tensor, or the first of its dims."""
    entries = (layout.alias_placements or ())[:dims]
    return [name for entry in entries for name in ((entry,) if isinstance(entry, str) else entry) if name != "None"]


def _by_place(run: LoopRecord) -> dict[tuple[str, str, int], Draw]:
    """Return the random draws by module, operation and how many there were before."""
    found: dict[tuple[str, str, int], Draw] = {}
    count: dict[tuple[str, str], int] = {}
    for draw in run.draws:
        place = (draw.path, draw.op)
        number = count[place] = count.get(place, -1) + 1
        found[draw.path, draw.op, number] = draw
    return found
