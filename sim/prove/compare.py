"""Compares what the ranks recorded with what one device did, tensor by tensor, in the order in which things happen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from hyper_parallel.core.common.torch_compat import own_statistics
from hyper_parallel.core.dtensor.layout import Layout
from sim.explain.errors import ranks_phrase
from sim.prove.evidence import largest
from sim.prove.infer import Order, furthest, in_orders, order_of, order_of_rows, submesh
from sim.prove.judge import (
    CUT_OFF,
    NOTHING_TRAINED,
    AutogradGraph,
    Finding,
    Judge,
    Judged,
    absent,
    advised,
    first_bug,
    incomparable,
    innermost,
    leaf,
    of_own_rows,
    of_unequal_shares,
    pending_words,
    row_of,
    settle,
    short,
    spelling,
    split_name,
    title_of,
    within,
)
from sim.prove.modes.draws import ModuleTensor
from sim.prove.modes.values import listed
from sim.prove.randomness import masks_problem, redrawn_row
from sim.prove.record import Declarations, Entry, Key, spread_layout
from sim.prove.report import Report, ReportRow
from sim.prove.runs import Bounds, Run, Task
from sim.prove.steps.updates import UpdateReplay, UpdatesOfStep, UpdateStarts

_MOST_ADDENDS = 16


class Comparison:
    """Judges everything once all runs have computed.

    Args:
        task: what was computed.
        reference: the plain run on one device.
        bounds: how far rounding can go.
        runs: what each rank did.
        declared: what was said about plain tensors.
        judge: finds layouts.
        before: the comparison of the first step, if this is a later one.
    """

    def __init__(
        self,
        task: Task,
        reference: Run,
        bounds: Bounds,
        runs: Sequence[Run],
        declared: Declarations,
        judge: Judge,
        before: Comparison | None = None,
    ) -> None:
        self.task, self.reference, self.bounds, self.runs = task, reference, bounds, runs
        self.declared, self.judge = declared, judge
        self.notes: list[str] = []
        self._every = range(len(runs))
        self._memo: dict[Any, Finding] = {}
        self._graph = AutogradGraph()
        self._forward: dict[Key, Finding] = {}
        self._parameters: dict[str, Finding] = {}
        self._orders: dict[str, Order] = {}
        self._row_orders: list[tuple[int, tuple[int, ...]]] = []  # of inputs: the dim, and the places along it
        self._owned: dict[str, tuple[int, ...]] = {}  # modules that only some ranks have, and which
        self.stopped = False  # forward has not come to its end on all ranks
        self._buffers: dict[str, Finding] = {}
        self._events: list[Judged] = []
        self._keys: list[Key] = []  # of the boundaries in forward, in order
        self._private: set[Key] = set()
        self._replays: Mapping[int, UpdateReplay] = {rank: UpdateReplay() for rank in range(len(runs))}
        if before is not None:  # how parameters are held does not change
            self._parameters, self._orders, self._owned = before._parameters, before._orders, before._owned
            self._buffers, self._replays = before._buffers, before._replays

    # -- forward -----------------------------------------------------------------------------------------------------

    def value(self, key: Key) -> Finding | None:
        """Judge what stands at a boundary; None where no rank has such a boundary."""
        if key not in self._forward:
            mine = self.reference.recorder.entries[key]
            held = self._entries(key)
            if not held:
                return None
            if len(held) < len(self.runs):
                self._forward[key] = absent(list(held), self._every)
            else:
                self._forward[key] = self._value(mine, held)
        return self._forward[key]

    def _entries(self, key: Key) -> dict[int, Entry]:
        """Return what the ranks have at a boundary, of those that come to it."""
        return {rank: run.recorder.entries[key] for rank, run in enumerate(self.runs) if key in run.recorder.entries}

    def _value(self, mine: Entry, held: Mapping[int, Entry]) -> Finding:
        said = {rank: (entry.layout, entry.known) for rank, entry in held.items()}
        parts = {rank: entry.value for rank, entry in held.items()}
        bound = self.bounds.of(("value", mine.key), mine.value)
        every = len(self.task.mesh.alias_name)  # a DTensor on a slice of the mesh may be a part itself
        shapes = {entry.shape for entry in held.values() if entry.layout is not None and len(entry.known) == every}
        if len(shapes) == 1 and shapes != {mine.shape}:
            found = self._judge(parts, mine.value, bound, {}, None)
            sentence = f"the ranks take it for parts of a tensor of shape {shapes.pop()}, and that has {mine.shape}"
            declared = next(spread_layout(entry.layout, entry.known) for entry in held.values() if entry.layout)
            hint = f"declare {spelling(found.found)}" if found.found is not None else ""
            full = [name for name in self.task.inputs if name not in self.task.cuts]
            if full and found.found is not None and not any(found.found.splits(mine.value.ndim)):
                hint += f"; or split it before; or give each rank its part of {full[0]!r}, by input_layouts"
            return replace(
                found,
                status="wrong",
                declared=declared,
                sentence=sentence,
                suggestion=hint,
                error=math.inf,
                ratio=math.inf,
            )
        layout = self.declared.of(mine.key, mine.title)
        found = self._judge(parts, mine.value, bound, said, layout, lambda: self._addends(mine))
        if found.status != "unexplained":
            return found
        if mine.key not in self.reference.recorder.nodes and mine.key.side == "input":
            self._learn_order(parts, mine)
            return found  # private, where something right is made of it
        return self._reordered(parts, mine.value, bound) or found

    def _learn_order(self, parts: Mapping[int, torch.Tensor], mine: Entry) -> None:
        """Note in which order the ranks were given an input, zig-zag or in turns, unless parts are only swapped."""
        found = order_of_rows(parts, mine.value, 0.0)
        if found is None:
            return
        dim, pieces = found
        order = dim, tuple(itertools.chain(*pieces))
        is_cut = any(after - before != 1 for piece in pieces for before, after in itertools.pairwise(piece))
        if is_cut and order not in self._row_orders:
            self._row_orders.append(order)
            self.notes.append(f"dim {dim} of {self._place(mine)} is held in another order, and compared in that")

    @property
    def row_orders(self) -> list[tuple[int, ...]]:
        """The orders in which ranks were given inputs, zig-zag or in turns: the places along a dim."""
        return [places for _, places in self._row_orders]

    def boundaries(self) -> list[ModuleTensor]:
        """Return what went into and came out of modules on one device, each tensor once."""
        found: dict[int, ModuleTensor] = {}
        for key, entry in self.reference.recorder.entries.items():
            if entry.value.is_floating_point():
                bound = self.bounds.of(("value", key), entry.value)
                found.setdefault(id(entry.value), ModuleTensor(self._place(entry), entry.value, bound))
        return list(found.values())

    def _place(self, entry: Entry) -> str:
        return Judged(entry.key.path, title_of(entry), "forward", Finding("right")).place

    def _reordered(self, parts: Mapping[int, torch.Tensor], full: torch.Tensor, bound: float) -> Finding | None:
        """Judge a tensor in the orders in which the ranks were given inputs; None: these explain nothing."""
        found = (self.judge.undeclared(parts, other, bound) for other in in_orders(full, self.row_orders))
        return next((each for each in found if each.status != "unexplained"), None)

    def _addends(self, mine: Entry) -> dict[str, torch.Tensor]:
        """Return what may have been added once per rank: what went into a module and into those within it."""
        if mine.key.side != "output":
            return {}
        prefix = f"{mine.key.path}." if mine.key.path else ""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for key, entry in self.reference.recorder.entries.items():
            within = key.path == mine.key.path or key.path.startswith(prefix)
            if key.side == "input" and within and entry.shape == mine.shape and entry.value.is_floating_point():
                found.setdefault(id(entry.value), (f"the input of {key.path or 'the model'}", entry.value))
            if len(found) == _MOST_ADDENDS:
                break
        return dict(found.values())

    def scale(self) -> float:
        """Return how many times larger the gradients of activations are than on one device.

        Where each rank's loss is the mean over its own data, they are as many times larger as there are such ranks;
        parameters are not, once the mean over the ranks has been taken.
        """
        sizes = dict(zip(self.task.mesh.alias_name, self.task.mesh.mesh_shape, strict=True))
        if self.reference.loss is None:
            return math.prod(sizes[name] for name in self.task.data_axes) if self.runs[0].averages else 1.0
        found = self.loss().found
        return math.prod(sizes[name] for name, kind in found.partial.items() if kind == "avg") if found else 1.0

    def output_layout(self, way: str) -> Layout | None:
        """Return the layout of what the model returned: the declared one, or the one found."""
        key = Key("", 0, "output", way)
        found = self.value(key)
        if found is None:
            return None
        if found.status in ("right", "pending"):
            return found.found
        said = self.runs[0].recorder.entries.get(key)
        return (said.layout if said is not None else None) or found.found

    def loss(self) -> Finding:
        """Judge the loss; over ranks with different data it may be the part of a sum or of a mean."""
        assert self.reference.loss is not None
        full = self.reference.loss.detach()
        parts = {rank: run.loss.detach() for rank, run in enumerate(self.runs) if run.loss is not None}
        if len(parts) < len(self.runs):
            return absent(list(parts), self._every)
        found = self._judge(parts, full, self.bounds.of("loss", full), {}, None)
        spread = found.found is not None and set(found.found.partial) <= set(self.task.input_axes)
        spread = spread or bool(self._row_orders)  # the model has split its input by itself
        if found.status == "pending" and spread:
            return replace(found, status="right", sentence="")
        if found.status == "unexplained" and self.task.input_axes:
            keys = [key for key in self.reference.recorder.entries if key.path == "" and key.side == "input"]
            held = [{rank: entry.value for rank, entry in self._entries(key).items()} for key in keys]
            return of_unequal_shares(found, parts, full, held)
        return found

    def _judge(
        self,
        parts: Mapping[int, torch.Tensor],
        full: torch.Tensor,
        bound: float,
        said: Mapping[int, tuple[Layout | None, tuple[str, ...]]],
        layout: Layout | None,
        addends: Callable[[], Mapping[str, torch.Tensor]] = dict,
    ) -> Finding:
        """Judge parts by what the ranks' DTensors say, else by a declaration, else by what can be found."""
        spoken = {rank: each for rank, each in said.items() if each[0] is not None}
        if len(spoken) == len(parts):
            first = spoken[min(spoken)]
            odd = [rank for rank, each in spoken.items() if each[0] != first[0]]
            if odd:
                one, other = (str(spoken[rank][0]).partition(" on ")[0] for rank in (min(spoken), odd[0]))
                sentence = f"rank {min(spoken)} {one}, {ranks_phrase(odd)} {other}"
                return Finding(
                    "wrong", None, one, math.inf, math.inf, bound, f"the ranks declare different layouts: {sentence}"
                )
            layout, known = first
        else:
            known = self.task.mesh.alias_name
        memo = (id(full), tuple(id(parts[rank]) for rank in sorted(parts)), layout, known if layout else ())
        if memo not in self._memo:
            found = (
                self.judge.declared(parts, full, bound, layout, known)
                if layout is not None
                else self.judge.undeclared(parts, full, bound, addends)
            )
            self._memo[memo] = replace(found, is_zero=largest(full) <= bound, is_coarse=self.bounds.is_coarse(full))
        return self._memo[memo]

    @cached_property
    def forward_rows(self) -> list[ReportRow]:
        """What the report says of forward."""
        self._events = self.forward_events()
        rows = settle(self._events, self._graph.forward)
        self._private = {key for key, row in zip(self._keys, rows, strict=False) if row.verdict == "private"}
        return rows

    def forward_events(self) -> list[Judged]:
        """Judge all boundaries, in program order."""
        events, left = [], 0
        for key, entry in self.reference.recorder.entries.items():
            found = self.value(key)
            if found is None or (self.stopped and found.status == "absent"):
                left += 1
                continue
            self._keys.append(key)
            found = self._forward[key] = self._cast(key, self._batch_norm(key, found))
            final = key.path == "" and key.side == "output" and not self._is_split_loss(key, found)
            given = key not in self.reference.recorder.nodes and key.side == "input"
            events.append(Judged(key.path, title_of(entry), "forward", found, self._nodes(entry), final, given))
        if left and not self.stopped:
            self.notes.append(
                f"{left} tensors of modules that the ranks do not have, or do not call, were not compared"
            )
        if self.reference.loss is not None and self.task.loss_fn is not None and not self.stopped:
            node = self.reference.loss.grad_fn
            events.append(Judged("", "loss", "forward", self.loss(), (node,) if node else (), True))
        return events

    def _nodes(self, entry: Entry, *, own: bool = False) -> tuple[Any, ...]:
        """Return where a tensor stands in the graph; an input without history where its module's results do."""
        nodes = self.reference.recorder.nodes
        if own or entry.key in nodes or entry.key.side == "output":
            return (nodes[entry.key],) if entry.key in nodes else ()
        there = (entry.key.path, entry.key.call, "output")
        return tuple(node for key, node in nodes.items() if key[:3] == there)

    def _batch_norm(self, key: Key, found: Finding) -> Finding:
        """Say what is the matter with a batch norm that sees only a rank's own rows."""
        module = self.reference.recorder.modules.get(key.path)
        if not isinstance(module, torch.nn.modules.batchnorm._BatchNorm) or found.status != "unexplained":
            return found
        given = self.value(key._replace(side="input", name="0"))
        if not module.training or given is None:
            return found
        parts = {rank: run.recorder.entries[key].value for rank, run in enumerate(self.runs)}
        return of_own_rows(found, given.found, parts, self.reference.recorder.entries[key].value)

    def _cast(self, key: Key, found: Finding) -> Finding:
        """Say where a module casts by hand on the ranks, and not on one device."""
        low = {rank: run.low[key.path] for rank, run in enumerate(self.runs) if key.path in run.low}
        if key.side == "input" or not low or key.path in self.reference.low or found.status not in ("right", "pending"):
            return found
        dtype = str(next(iter(low.values()))).removeprefix("torch.")
        sentence = f"{ranks_phrase(low)} computed it in {dtype} or cast to it by hand, and one device did not"
        hint = "the same casts in both models; or autocast, or a mixed-precision policy"
        return replace(found, status="wrong", sentence=sentence, suggestion=hint)

    def _is_split_loss(self, key: Key, found: Finding) -> bool:
        scalar = self.reference.recorder.entries[key].value.dim() == 0
        return scalar and found.found is not None and set(found.found.partial) <= set(self.task.input_axes)

    def random_rows(self) -> Iterator[ReportRow]:
        """Compare the states of the generators with which the ranks drew random numbers."""
        drawn = [_by_place(run) for run in self.runs]
        for place, draw in _by_place(self.reference).items():
            ranks = [run[place] for run in drawn if place in run]
            if len(ranks) < len(self.runs):
                continue
            found = next(
                (
                    self.value(key)
                    for key in self.reference.recorder.entries
                    if key.path == draw.path and key.side == "input"
                ),
                None,
            )
            layout = found.found if found is not None else None
            split, rows = (_splitting(layout), _splitting(layout, 1)) if layout is not None else ([], [])
            problem = masks_problem(ranks, draw.shape, self.task.mesh, split, rows)
            word, where = draw.op.rstrip("_"), short(found.found) if found is not None else ""
            if problem is not None:
                yield ReportRow(
                    draw.path, word, "random", found=where, verdict="bug", sentence=problem[0], suggestion=problem[1]
                )
            else:
                yield ReportRow(draw.path, word, "random", found=where)

    # -- backward ----------------------------------------------------------------------------------------------------

    def gradient_events(self) -> list[Judged]:
        """Judge the gradients of activations, in the order in which they are computed; then those of parameters."""
        scale = self.scale()
        if scale != 1:
            self.notes.append(
                f"gradients of activations are {scale:g} times those of one device, as each rank's loss "
                "is the mean over its own data"
            )
        groups: dict[int, list[Entry]] = {}
        for entry in self.reference.recorder.entries.values():
            if entry.grad is not None:
                groups.setdefault(entry.grad_order, []).append(entry)
        events = []
        for order in sorted(groups):
            judged = [(entry, self._gradient(entry, scale)) for entry in reversed(groups[order])]
            for entry, found in _best_named_first(judged):
                events.append(Judged(entry.key.path, title_of(entry), "gradient", found, self._nodes(entry, own=True)))
        return events + list(self._parameter_gradients())

    def _gradient(self, entry: Entry, scale: float) -> Finding | None:
        there = self._entries(entry.key)
        grads = {rank: each.grad for rank, each in there.items() if each.grad is not None}
        if len(there) < len(self.runs):
            return None  # forward has said so
        if not grads:
            return Finding("missing", sentence="no rank computes it")
        if len(grads) < len(there):
            return absent(list(grads), list(there))
        assert entry.grad is not None
        full = entry.grad if scale == 1 else entry.grad * scale
        bound = self.bounds.of(("grad", entry.key), entry.grad) * scale
        said = {rank: (each.grad_layout, each.grad_known) for rank, each in there.items()}
        if any(layout is None for layout, _ in said.values()):
            forward = self.value(entry.key)
            declared = self.declared.of(entry.key, entry.title)
            if declared is not None and forward is not None and forward.status == "right":
                found = self._judge(grads, full, bound, {}, declared.reset_partial())
                if found.status == "right":
                    return found
        found = self._judge(grads, full, bound, said, None)
        found = replace(found, is_coarse=self.bounds.is_coarse(entry.grad)) if scale != 1 else found
        if found.status == "unexplained":
            found = self._reordered(grads, full, bound) or found
        if found.status == "unexplained" and entry.key in self._private:  # as its value was
            return replace(found, status="private")
        return found

    def _parameter_gradients(self) -> Iterator[Judged]:
        for name, mine in self.reference.gradients.items():
            layout = self._parameters.get(name)
            if layout is None:
                continue  # there is no such parameter, as was said before
            there = self._there("gradients", name)
            yield Judged(
                *split_name(name),
                "gradient",
                self._parameter_gradient(name, mine, there, layout),
                leaf(self.reference.leaves[name]),
                True,
            )

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
        bound = self.bounds.of(("gradient", name), mine) if mine is not None else 0.0
        if made.status == "absent" and mine is not None:
            return self._of_owners(name, there, mine, bound)
        if len(there) < len(self.runs):
            return replace(absent(list(there), self._every, made.declared), status="wrong")
        if name in self._orders:
            return self._in_order(name, there, mine, bound)
        said = {rank: run.grad_layouts[run.same.get(name, name)] for rank, run in enumerate(self.runs)}
        layout = made.found.reset_partial() if made.found is not None else None
        if all(each[0] is not None for each in said.values()):
            found = self._judge(there, mine, bound, said, None)
            known = next(iter(said.values()))[1]
            silent = found.found is not None and any(name not in known for name in found.found.partial)
            if made.status != "right" or found.status != "right" or not silent:
                return found  # else it is a part of a sum, along an axis that the gradient says nothing of
        found = self._judge(there, mine, bound, {}, layout)
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

    def parameter_events(self) -> list[Judged]:
        """Judge the parameters as they were made."""
        events = []
        for name, mine in self.reference.initial.items():
            found = self._made(name, mine)
            if found is not None:
                if found.status in ("right", "pending", "private", "absent"):
                    self._parameters[name] = found
                events.append(Judged(*split_name(name), "parameter", found))
        for name, first in self.reference.same.items():
            apart = [
                rank
                for rank, run in enumerate(self.runs)
                if name in run.same and first in run.same and run.same[name] != run.same[first]
            ]
            if apart:
                sentence = f"one tensor with {first} on one device, and a parameter of its own on {ranks_phrase(apart)}"
                found = Finding("wrong", sentence=sentence, suggestion=f"tie {name} to {first} again")
                events.append(Judged(*split_name(name), "parameter", found))
        return events

    def buffer_rows(self) -> Iterator[ReportRow]:
        """Judge buffers as they were made; ranks may have their own, if nobody changes it and its module is right."""
        bug, own, left = first_bug(self.forward_rows), list[str](), list[str]()
        for name, mine in self.reference.buffers.items():
            found = self._buffer(("buffer", name), mine, [run.buffers for run in self.runs])
            if found is not None:
                self._buffers[name] = found
                row = self._buffer_row(name, found, "")
                to_blame = bug is not None and f"{bug.module}.".startswith(f"{row.module}." if row.module else "")
                is_own = row.verdict == "bug" and not to_blame and not self._is_changed(name)
                own += [name] if is_own else []
                yield replace(row, verdict="private") if is_own else row
            elif self._is_changed(name) and name not in self._statistics(self.reference):
                sentence, hint = "one device changes it, and no rank has a buffer of that name", "keep its name"
                row = ReportRow(*split_name(name), "buffer", verdict="not proved", sentence=sentence, suggestion=hint)
                yield row
            else:
                left.append(name)
        self.notes += [f"the ranks' own, which no step changes: {listed(own)}"] if own else []
        self.notes += [f"not compared, as no rank has them: {listed(left)}"] if left and not self.stopped else []

    def _is_changed(self, name: str) -> bool:
        """Return True if forward or a step changes a buffer, on one device or on a rank."""
        for run in (self.reference, *self.runs):
            held = [each[name] for each in (run.buffers, run.changed_buffers, run.stepped_buffers) if name in each]
            if any(not torch.equal(before, after) for before, after in itertools.pairwise(held)):
                return True
        return False

    def _statistics(self, run: Run) -> set[str]:
        """Return the buffers that are statistics of a rank's own rows, by name."""
        own = ((path, name) for path, module in run.recorder.modules.items() for name in own_statistics(module))
        return {f"{path}.{name}".lstrip(".") for path, name in own}

    def _buffer_row(self, name: str, found: Finding, when: str) -> ReportRow:
        """Return the row of a buffer; nothing adds up parts of it later, and each rank has statistics of its own."""
        module, tensor = split_name(name)
        holders = [run for run in self.runs if name in run.buffers]
        owners = [run.recorder.modules.get(module) for run in holders]
        # A count that is not saved, such as a router's of its tokens, may be added up where it is used.
        is_kept = any(owner is None or tensor not in owner._non_persistent_buffers_set for owner in owners)
        row = row_of(Judged(module, f"{tensor}{when}", "buffer", found, final=is_kept))
        if not when or row.verdict != "bug" or not all(name in self._statistics(run) for run in holders):
            return row
        note = f"of each rank's own rows, as nothing synchronises them: the buffers of {module or 'the model'}"
        self.notes += [note] if note not in self.notes else []
        return replace(row, verdict="private", sentence="", suggestion="")

    def changed_buffer_rows(self) -> Iterator[ReportRow]:
        """Judge buffers that forward has changed, if they were right before it."""
        for name, mine in self.reference.changed_buffers.items():
            pairs = [(run.buffers.get(name), run.changed_buffers.get(name)) for run in (self.reference, *self.runs)]
            changed = any(a is not None and b is not None and not torch.equal(a, b) for a, b in pairs)
            made = self._buffers.get(name)
            if not changed or made is None or made.status != "right":
                continue
            found = self._buffer(("changed buffer", name), mine, [run.changed_buffers for run in self.runs])
            if found is not None:
                yield self._buffer_row(name, found, " after forward")

    def stepped_buffer_rows(self) -> Iterator[ReportRow]:
        """Judge buffers that the optimizer's step has changed, such as moving averages, if they were right at first."""
        for name, mine in self.reference.stepped_buffers.items():
            made = self._buffers.get(name)
            if made is None or made.status != "right" or not self._stepped(name):
                continue
            held = [run.stepped_buffers for run in self.runs]
            found = self._buffer(("stepped buffer", self.reference.step, name), mine, held)
            if found is not None:
                yield self._buffer_row(name, found, f" after step {self.reference.step + 1}")

    def _stepped(self, name: str) -> bool:
        """Whether one device or a rank has changed a buffer since forward."""
        for run in (self.reference, *self.runs):
            one, other = run.changed_buffers.get(name), run.stepped_buffers.get(name)
            if one is not None and other is not None and not torch.equal(one, other):
                return True
        return False

    def _buffer(
        self, key: tuple[Any, ...], mine: torch.Tensor, runs: Sequence[Mapping[str, torch.Tensor]]
    ) -> Finding | None:
        name = key[-1]
        parts = {rank: buffers[name] for rank, buffers in enumerate(runs) if name in buffers}
        if 0 < len(parts) < len(runs):  # of a module that only some ranks have
            judge = Judge(submesh(self.task.mesh, tuple(parts)), is_whole=False)
            return judge.undeclared(parts, mine, self.bounds.of(key, mine))
        return self._judge(parts, mine, self.bounds.of(key, mine), {}, None) if parts else None

    def _made(self, name: str, mine: torch.Tensor) -> Finding:
        there = self._there("initial", name)
        if not there:
            sentence = "the parallel model has no parameter of that name, so nothing is known of it"
            return incomparable(sentence, "keep the names of the single-device model")
        if len(there) < len(self.runs):
            return self._lacking(name, mine, there)
        said = {rank: run.layouts[run.same[name]] for rank, run in enumerate(self.runs)}
        bound = self.bounds.of(("initial", name), mine)
        found = self._judge(there, mine, bound, said, self.declared.parameters.get(name))
        if found.status != "unexplained":
            return found
        places = self._there("places", name)
        if len(places) == len(self.runs) and furthest(there, mine, places) == 0:
            self._orders[name] = places
            return Finding("right", bound=bound)
        order = order_of(there, mine)
        if order is None:
            return found
        self._orders[name] = order
        self.notes.append(f"{name} is held in an order that no layout says, and compared in that: {found.sentence}")
        return replace(found, status="private", error=0.0, ratio=0.0)

    def _lacking(self, name: str, mine: torch.Tensor, there: Mapping[int, torch.Tensor]) -> Finding:
        """Judge a parameter that some ranks do not have: right for experts, of which each rank calls only its own."""
        lacking = [rank for rank in self._every if rank not in there]
        sentence = f"{ranks_phrase(lacking)} {'has' if len(lacking) == 1 else 'have'} no such parameter"
        path = split_name(name)[0]
        if any(path in self.runs[rank].recorder.calls for rank in lacking):
            return incomparable(sentence)
        otherwise = f"{ranks_phrase(there)} alone {'has' if len(there) == 1 else 'have'} it, and not with its values"
        found = within(_furthest_copy(there, mine), self.bounds.of(("initial", name), mine), otherwise)
        if found.status == "wrong":
            return found
        self._owned.setdefault(path, tuple(there))
        return Finding("absent", sentence=sentence)

    def _of_owners(self, name: str, parts: Mapping[int, torch.Tensor], full: torch.Tensor, bound: float) -> Finding:
        """Compare what the ranks that have a parameter hold of it, or of its gradient."""
        have = "has" if len(parts) == 1 else "have"
        otherwise = f"it is not that of one device; {ranks_phrase(parts)} alone {have} it"
        return within(_furthest_copy(parts, full), bound, otherwise)

    def _in_order(self, name: str, parts: Mapping[int, torch.Tensor], full: torch.Tensor, bound: float) -> Finding:
        """Compare parts of a parameter, or of its gradient, in the order in which the ranks hold it."""
        otherwise = "it is not that of one device, in the order in which the ranks hold the parameter"
        return within(furthest(parts, full, self._orders[name]), bound, otherwise)

    def update_events(self) -> Iterator[Judged]:
        """Judge the parameters after the optimizer's step."""
        step = self.reference.step
        updates = self._updates() if self.reference.update else None
        for name, mine in self.reference.update.items():
            made = self._parameters.get(name)
            if made is None or updates is None:
                continue
            there = self._there("update", name)
            found = self._updated(name, mine, there, made, self.bounds.of(("update", step, name), mine))
            found = updates.judged(name, there, found)
            module, tensor = split_name(name)
            only = self.task.steps == 1 or (self.task.second is not None and not step)
            title = tensor if only else f"{tensor} after step {step + 1}"
            yield Judged(module, title, "update", found)

    def _updates(self) -> UpdatesOfStep:
        """Return the updates of the step, beside what one device's optimizer makes of each rank's gradients."""
        starts, gradients = {}, {}
        for rank, run in enumerate(self.runs):
            named = {name: run.same.get(name, name) for name in self.reference.update}
            rules = {name: run.starts.rules[own] for name, own in named.items() if own in run.starts.rules}
            values = {name: run.starts.values[own] for name, own in named.items() if own in run.starts.values}
            starts[rank] = UpdateStarts(rules, values)
            gradients[rank] = {name: run.gradients.get(own) for name, own in named.items()}
        step = self.reference.step + 1
        return UpdatesOfStep(self.reference.starts.rules, starts, gradients, self._replays, step)

    def _updated(
        self, name: str, mine: torch.Tensor, there: Mapping[int, torch.Tensor], made: Finding, bound: float
    ) -> Finding:
        if made.status == "absent":
            return self._of_owners(name, there, mine, bound)
        if len(there) < len(self.runs):
            return replace(absent(list(there), self._every, made.declared), status="wrong")
        if name in self._orders:
            return self._in_order(name, there, mine, bound)
        found = replace(self._judge(there, mine, bound, {}, made.found), declared=made.declared)
        if found.status == "wrong" and made.status == "pending":
            sentence = "each rank holds a share of it and stepped on that; the sum is not what it should be"
            return replace(found, sentence=sentence, suggestion="replicate it on every rank, and add up its gradients")
        if found.status == "wrong" and self._unmoved(name):
            hint = "a step on the parameters themselves"
            return replace(found, sentence="no rank has changed it, one device has", suggestion=hint)
        return found

    def _unmoved(self, name: str) -> bool:
        """Whether a parameter is on all ranks what it was before the step."""
        before, after = self._there("initial", name), self._there("update", name)
        return all(rank in before and rank in after and torch.equal(before[rank], after[rank]) for rank in self._every)

    def _there(self, kind: str, name: str) -> dict[int, torch.Tensor]:
        """Return what each rank has of a parameter, where it has any: its values, gradient, update or places."""
        held = {rank: getattr(run, kind).get(run.same.get(name, name)) for rank, run in enumerate(self.runs)}
        return {rank: each for rank, each in held.items() if each is not None}

    # -- all of it ---------------------------------------------------------------------------------------------------

    def report(self, later: Sequence[Comparison] = ()) -> Report:
        """Judge everything, in order."""
        rows = self._with_orders([row_of(event) for event in self.parameter_events()])
        rows += self.buffer_rows()
        rows += self._step_rows()
        for each in later:
            rows += each._step_rows()
            self.notes += [note for note in each.notes if note not in self.notes]
        if self._is_nothing_compared() and first_bug(rows) is None:
            rows.append(NOTHING_TRAINED)
        rows = advised(rows)
        self._note_calls()
        if self._owned:
            some = ", ".join(f"{path} on {ranks_phrase(ranks)}" for path, ranks in list(self._owned.items())[:4])
            more = f" and {len(self._owned) - 4} more" if len(self._owned) > 4 else ""
            self.notes.append(f"{some}{more}: other ranks do not have these modules, and do not call them")
        return Report(tuple(rows), str(self.task.mesh.axes), tuple(self.notes))

    def _is_nothing_compared(self) -> bool:
        """Return True if no gradient tells anything, though there are weights to train, or no result does."""
        grads = self.reference.gradients.values()
        is_trained = all(run.gradients for run in self.runs) and any(
            bool(each.any()) for each in grads if each is not None
        )
        has_end = self.reference.loss is not None or any(key[0] == "" and key.side == "output" for key in self._keys)
        wants = any(each.requires_grad for each in self.reference.leaves.values())
        return not (is_trained if wants else has_end)

    def _step_rows(self) -> list[ReportRow]:
        """Judge forward, backward and what the optimizer has made of it."""
        rows = [*self.forward_rows, *self.changed_buffer_rows(), *self.random_rows()]
        backward = all(run.gradients for run in self.runs)
        redraw = redrawn_row(self.reference.redraw, [run.redraw for run in self.runs])
        rows += [redraw] if redraw is not None else []
        rows += settle(self.gradient_events(), self._graph.backward) if backward else []
        if self.reference.step:
            rows = [replace(row, tensor=f"{row.tensor} in step {self.reference.step + 1}") for row in rows]
        if backward:
            rows += [row_of(event) for event in self.update_events()]
            rows += self.stepped_buffer_rows()
        return rows

    def _with_orders(self, rows: list[ReportRow]) -> list[ReportRow]:
        """Blame parameters in an order of their own, where forward goes wrong and nothing right is made of them."""
        if first_bug(self.forward_rows) is None:
            return rows
        right = [event for event in self._events if event.finding.status == "right" and not event.finding.is_zero]
        fine = [event for event in right if event.tensor.startswith("output")]
        for name in self._orders:
            made = Judged("", "", "parameter", Finding("right"), leaf(self.reference.leaves[name]))
            if not any(self._graph.forward(made, event) for event in fine):
                odd = (*split_name(name), "private")  # not those whose DTensors say their order
                rows = [
                    replace(row, verdict="bug") if (row.module, row.tensor, row.verdict) == odd else row for row in rows
                ]
        return rows

    def _note_calls(self) -> None:
        first = self.runs[0].recorder.calls
        for rank, run in enumerate(self.runs):
            if run.recorder.calls != first:
                pairs = zip([*first, "(the end)"], [*run.recorder.calls, "(the end)"], strict=False)
                at, (one, other) = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
                self.notes.append(
                    f"ranks call modules in different order: call {at} is of {one or '(the model)'} on "
                    f"rank 0, of {other or '(the model)'} on rank {rank}"
                )
                return


def _best_named_first(judged: Sequence[tuple[Entry, Finding | None]]) -> Iterator[tuple[Entry, Finding]]:
    """Yield one gradient's boundaries, consumers first; of those that hold the same, the one that names it best."""
    groups: dict[int, list[tuple[Entry, Finding]]] = {}
    for entry, found in judged:
        if found is not None:
            groups.setdefault(id(found), []).append((entry, found))
    for group in groups.values():
        entries = [entry for entry, _ in group]
        chosen = innermost(entries[::-1])
        yield chosen, group[0][1]
        yield from ((entry, found) for entry, found in group if entry is not chosen)


def _furthest_copy(parts: Mapping[int, torch.Tensor], full: torch.Tensor) -> float:
    """Return how far copies are from a tensor at most; infinite for a part of it."""
    if any(part.shape != full.shape for part in parts.values()):
        return math.inf
    return max((float((part - full).abs().max()) for part in parts.values() if part.numel()), default=0.0)


def _splitting(layout: Layout, dims: int | None = None) -> list[str]:
    """Return the axes that split a tensor, or the first of its dims."""
    entries = (layout.alias_placements or ())[:dims]
    return [name for entry in entries for name in ((entry,) if isinstance(entry, str) else entry) if name != "None"]


def _by_place(run: Run) -> dict[tuple[str, str, int], Any]:
    """Return the random draws by module, operation and how many there were before."""
    found: dict[tuple[str, str, int], Any] = {}
    count: dict[tuple[str, str], int] = {}
    for draw in run.draws:
        place = (draw.path, draw.op)
        number = count[place] = count.get(place, -1) + 1
        found[draw.path, draw.op, number] = draw
    return found
