"""Verdicts on a training loop: every tensor of every step, put together from the ranks and held against one device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hyper_parallel.core.dtensor.layout import Layout
from sim.explain.errors import ranks_phrase
from sim.prove.bound import FEW, bound_of
from sim.prove.evidence import largest
from sim.prove.faults import diagnose
from sim.prove.infer import in_orders, pad_pieces, pieces_of, split_axes, submesh
from sim.prove.judge import (
    NOTHING_TRAINED,
    AutogradGraph,
    Finding,
    Judge,
    Judged,
    advised,
    divided_words,
    first_bug,
    of_copies,
    of_other_rows,
    of_own_rows,
    of_unequal_shares,
    pending_words,
    row_of,
    settle,
    short,
    split_name,
)
from sim.prove.modes.choices import ChoiceKey, agreed_words, free_choices
from sim.prove.modes.draws import ModuleTensor, SharedDraws, shared_draws
from sim.prove.randomness import THE_STEP, DrawPlace, DrawUse, redrawn_row
from sim.prove.report import Report, ReportRow
from sim.prove.steps.names import NameMap, find_names
from sim.prove.steps.updates import ROUNDINGS, RankGradients, UpdateReplay, UpdateRule, UpdatesOfStep, UpdateStarts
from sim.prove.steps.watch import LOSS, CallKey, LoopRecord, RecordedStep

_COARSE, _TINY = 2.0**-7, 1e-5  # a bound above both proves nothing: beside its tensor, and beside all of its kind
_MOST_SAID = 6
_DIVIDE_ONCE = "add up sums and counts over all ranks, and divide once: a mean of means weighs unequal parts alike"
_MOST_ELEMENTS = 2**25  # of the gradients of all ranks, among which one cause of all is looked for
_MOST_ROUNDS = 16  # of choices that follow from others

Permutation = tuple[int, ...]
Parts = Mapping[int, torch.Tensor]


def agreed_choices(
    references: tuple[LoopRecord, Sequence[LoopRecord]],
    records: Sequence[LoopRecord],
    mesh: Layout,
    dtype: torch.dtype | None,
    again: Callable[[Mapping[ChoiceKey, torch.Tensor]], tuple[LoopRecord, Sequence[LoopRecord]]],
) -> tuple[tuple[LoopRecord, Sequence[LoopRecord]], list[str]]:
    """Let one device choose as the ranks do in all steps, where candidates lie within the bound; say where."""
    taken: dict[ChoiceKey, torch.Tensor] = {}
    for _ in range(_MOST_ROUNDS):  # what was chosen first decides between what is chosen later
        expected, moved = references

        def limit(key: ChoiceKey, given: torch.Tensor, others: Sequence[LoopRecord] = moved) -> float:
            return bound_of(given, [other.choices[key].given for other in others if key in other.choices], dtype)

        free = free_choices(expected.choices, [record.choices for record in records], mesh, limit)
        if not free:
            break
        taken |= free
        references = again(taken)
    return references, agreed_words(taken)


class LoopComparison:
    """Compares what the ranks recorded with what one device did.

    Calls of a module within a step are put one behind the other, on both sides: micro-batches on the ranks are rows of
    the batch on one device. Losses, gradients, updates and buffers have to be right. Where they are, tensors between
    modules may be what they like; where they are not, the first of those that is wrong tells where to look.

    Args:
        expected: of one device.
        moved: of one device again, perturbed.
        ranks: of each rank.
        mesh: the axes.
        names: a map of names that was given.
        orders: permutations of the batch in which the ranks hold it, where they are known.
        stopped: the ranks have failed; compared is what came before.
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
        self._stopped = stopped
        self.expected, self.moved, self.ranks, self.mesh = expected, moved, ranks, mesh
        self.names = self._find_names(names)
        self.before: list[ReportRow] = []  # what has been found already
        self.notes: list[str] = []
        self._orders = list(dict.fromkeys(orders))
        self._pieces: list[Mapping[int, Permutation]] = []  # rows of each rank, where these are of different numbers
        self._judges: dict[tuple[int, ...], Judge] = {}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in expected.initial.items()}
        paths = [rank.paths for rank in ranks]
        self._paths = [self.names.paths(path, expected.paths) for path in paths]
        self._split = len({frozenset(path) for path in paths}) > 1  # stages of a pipeline
        self._left: dict[str, None] = {}
        self._proved: set[str] = set()  # parameters of which a gradient or an update is right
        self._own: dict[str, None] = {}  # statistics of each rank's own rows that differ
        self._made: dict[str, None] = {}  # buffers that ranks make for themselves, and nobody changes
        self._gradients: dict[str, Finding] = {}  # of the parameters, in the step that is judged
        self._weights = expected.initial  # before the step that is judged
        self._layouts: dict[str, Layout] = {}  # of the parameters
        self._late: set[str] = set()  # boundaries that are right until the step updates weights
        self._moves: dict[int, dict[str, float]] = {}
        self._replays = {rank: UpdateReplay() for rank in range(len(ranks))}
        self._inputs: dict[str, Layout | None] = {}  # how ranks hold what went into modules first

    def report(self) -> Report:
        """Judge everything, in the order in which things happen."""
        rows = [*self.before, *self._parameters()]
        if self._stopped:
            return self._until_stopped(rows)
        for number in range(len(self.expected.steps)):
            rows += self._of_step(number)
        rows += [*self._redrawn(), *self._miscounted()]
        if self._is_unproved() and first_bug(rows) is None:
            rows.append(NOTHING_TRAINED)
        rows = advised(rows)
        self._note_rest()
        return Report(tuple(rows), str(self.mesh.axes), tuple(self.notes))

    def _find_names(self, given: Mapping[str, Any]) -> NameMap:
        """Return which parameter of one device each parameter of a rank stands for."""
        return find_names(self.expected.initial, [rank.initial for rank in self.ranks], self.mesh, given)

    def _is_unproved(self) -> bool:
        """Return True if there are weights to train, and no gradient and no update was compared."""
        return bool(self.expected.trained) and not self._proved

    def _miscounted(self) -> Iterator[ReportRow]:
        counts = {len(self.expected.steps), *(len(rank.steps) for rank in self.ranks)}
        if len(counts) > 1:
            counted = ", ".join(str(len(rank.steps)) for rank in self.ranks[:_MOST_SAID])
            sentence = f"one device takes {len(self.expected.steps)} steps, the ranks {counted}"
            yield ReportRow("", "steps", "update", verdict="bug", sentence=sentence)

    def _note_rest(self) -> None:
        """Note what was compared otherwise, or not at all."""
        self.notes += [f"by their values, {text}" for text in self._said(self.names.found)]
        if self._left:
            self.notes.append(f"not compared, as no rank has them by a name that is known: {self._some(self._left)}")
        if self.names.missing:
            self.notes.append(f"on the ranks alone, and not compared: {self._some(self.names.missing)}")
        if self._own:
            self.notes.append(f"of each rank's own rows, as nothing synchronises them: {self._some(self._own)}")
        if self._made:
            self.notes.append(f"the ranks' own, which no step changes: {self._some(self._made)}")

    def _until_stopped(self, rows: list[ReportRow]) -> Report:
        """Judge the steps that all ranks have taken, and forward of the one in which they failed."""
        done = min(sum(bool(step.updates) for step in rank.steps) for rank in self.ranks)
        for number in range(min(done, len(self.expected.steps))):
            rows += self._of_step(number)
        if done < len(self.expected.steps):
            rows += self._with_number(self._forward(*self._sides(done)), done)
        return Report(tuple(advised(rows)), str(self.mesh.axes), tuple(self.notes))

    def held_in(self, rank: int, path: str) -> Iterator[str]:
        """Say what a module took and returned on a rank before it failed, where shapes are not those of one device."""
        done = len(self.ranks[rank].steps) - 1
        if not 0 <= done < len(self.expected.steps):
            return
        (mine, others, theirs), path = self._sides(done), self._paths[rank].get(path, path)
        calls = {each: self._calls(step, self._paths[each]) for each, step in theirs.items()}
        for key, values in mine.calls.items():
            own = calls[rank].get(key)
            if not own or own[-1].shape == values[-1].shape or not f"{key[0]}.".startswith(f"{path}." if path else ""):
                continue
            parts = {each: held[key][-1] for each, held in calls.items() if key in held}
            found = self._find(parts, values[-1], bound_of(values[-1], [other.calls[key][-1] for other in others]))
            layout = f", found {short(found.found)}" if found.found is not None else ""
            place = ReportRow(key[0], _title(key), "forward").place
            yield f"{place}: {tuple(own[-1].shape)} of {tuple(values[-1].shape)}{layout}"

    def _redrawn(self) -> Iterator[ReportRow]:
        named = [
            rank.redraw and rank.redraw._replace(path=paths.get(rank.redraw.path, rank.redraw.path))
            for rank, paths in zip(self.ranks, self._paths, strict=True)
        ]
        row = redrawn_row(self.expected.redraw, named)
        if row is not None:
            yield row

    # -- random numbers ----------------------------------------------------------------------------------------------

    @property
    def draws(self) -> bool:
        """Whether modules have drawn random numbers on any side."""
        return any(record.uses for record in (self.expected, *self.ranks))

    def shared(self) -> SharedDraws:
        """Find each rank's part of one device's random numbers; after `report`."""
        ranks = [
            {(paths.get(path, path), op, number, step): use for (path, op, number, step), use in rank.uses.items()}
            for rank, paths in zip(self.ranks, self._paths, strict=True)
        ]
        called = [
            {
                (paths.get(path, path), number)
                for number, step in enumerate(rank.steps)
                for (path, _, _), values in step.calls.items()
                if any(value.numel() for value in values)
            }
            for rank, paths in zip(self.ranks, self._paths, strict=True)
        ]
        return shared_draws(
            self.expected.uses,
            ranks,
            self.mesh,
            self._bound_of_draw,
            lambda step: list(self._boundaries(step)),
            self._orders,
            [record.repeats for record in (self.expected, *self.ranks)],
            lambda rank, path, step: (path, step) in called[rank],
            self._inputs.get,
            self._is_repeated,
        )

    def _is_repeated(self, step: int, path: str) -> bool:
        paths = self.expected.roots if path == THE_STEP else [path]
        return any(len(values) > 1 for key, values in self.expected.steps[step].calls.items() if key[0] in paths)

    def check_used(self, shared: SharedDraws) -> None:
        """Refuse, as `SharedDraws.check_used` does, what drew otherwise than these numbers are for."""
        records = (self.expected, *self.ranks)
        misfit = any(record.is_misfit for record in records)
        taken = min(len(rank.steps) for rank in self.ranks)  # ranks may have ended where all is wrong
        mine = [place for place in self.expected.uses if place[3] < taken]
        shared.check_used(mine, [_own(rank.uses) for rank in self.ranks], misfit=misfit)

    def _bound_of_draw(self, place: DrawPlace, given: torch.Tensor) -> float:
        return bound_of(given, [other.uses[place].given for other in self.moved if place in other.uses])

    def _boundaries(self, step: int) -> Iterator[ModuleTensor]:
        for key, values in self.expected.steps[step].calls.items():
            full = _joined(values)
            if full is not None and full.is_floating_point():
                others = [_joined(each.steps[step].calls.get(key, [])) for each in self.moved if step < len(each.steps)]
                yield ModuleTensor(ReportRow(key[0], _title(key), "forward").place, full, bound_of(full, others))

    # -- words -------------------------------------------------------------------------------------------------------

    def _said(self, texts: Sequence[str]) -> list[str]:
        return [self._some(texts)] if texts else []

    def _some(self, names: Any) -> str:
        listed = list(names)
        more = f" and {len(listed) - _MOST_SAID} more" if len(listed) > _MOST_SAID else ""
        return ", ".join(listed[:_MOST_SAID]) + more

    # -- what is compared --------------------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[ReportRow]:
        held = [self.names.translated(rank.initial, self._shapes) for rank in self.ranks]
        for name, full in self.expected.initial.items():
            parts = {rank: tensors[name] for rank, tensors in enumerate(held) if name in tensors}
            module, _, leaf = name.rpartition(".")
            row = ReportRow(module, leaf, "parameter")
            if not parts:
                hint = 'names={"<name on the ranks>": "' + name + '"}'
                missing = f"; the ranks' {self._some(self.names.missing)} stand for none" if self.names.missing else ""
                yield replace(row, verdict="bug", sentence=f"no rank has it{missing}", suggestion=hint)
                continue
            found = self._find(parts, self.names.ordered(name, full), bound_of(full, ()))
            self._layouts |= {} if found.found is None else {name: found.found}
            yield self._row(row, found)

    def _of_step(self, number: int) -> list[ReportRow]:
        mine, others, theirs = self._sides(number)
        self._late = set()
        self._weights = self.expected.steps[number - 1].updates if number else self.expected.initial
        rows = [*self._numbers("forward", mine, others, theirs), *self._forward(mine, others, theirs)]
        self._gradients = {}
        late = [row for row in rows if row.place in self._late or (row.tensor == "loss" and self._late)]
        at = len(rows := [row for row in rows if row not in late])
        for kind, title in (("gradients", "gradient"), ("updates", "update"), ("buffers", "buffer")):
            named = list(self._named(kind, title, number, mine, others, theirs))
            if kind == "gradients":
                cause = self._cause(number, named, mine, theirs)
                rows, named = _blamed(rows, cause), _blamed(named, cause)
            if kind == "gradients" and not any(
                row.verdict == "bug" and row.place == "the model's loss" for row in rows
            ):
                named = [*self._backward(named, mine, others, theirs), *named]
            rows += named
            rows += self._numbers(title, mine, others, theirs)
        # What is computed with weights that a wrong gradient has updated in the same step is wrong because of it.
        first, turns = first_bug(rows[at:]), mine.turns
        name = "" if first is None else f"{first.module}.{first.tensor}".lstrip(".")
        is_cause = first is not None and turns.get(name, math.inf) < max(turns.values(), default=0)
        rows = [*rows, *late] if is_cause else [*rows[:at], *late, *rows[at:]]
        losses = [row for row in rows if row.tensor == "loss" and not row.module]
        is_trained = self._is_trained(number, rows)
        if losses and losses[0].verdict == "bug" and is_trained:
            what = "gradients" if self._gradients else "weights after the step"
            self._note(f"the ranks' losses are neither equal nor parts of a mean or a sum; {what} are right")
        if is_trained or (losses and losses[0].verdict != "bug"):  # between modules, code may keep what it likes
            rows = [_as_private(row) if row.kind == "forward" else row for row in rows]
        if is_trained:
            rows = [self._as_made(row) if row.kind == "buffer" else row for row in rows]
        rows += self._results(mine, others, theirs)
        return self._with_number(rows, number)

    def _sides(self, number: int) -> tuple[RecordedStep, list[RecordedStep], dict[int, RecordedStep]]:
        """Return a step of one device, the same perturbed, and those of the ranks."""
        others = [each.steps[number] for each in self.moved if number < len(each.steps)]
        theirs = {rank: each.steps[number] for rank, each in enumerate(self.ranks) if number < len(each.steps)}
        return self.expected.steps[number], others, theirs

    def _with_number(self, rows: Iterable[ReportRow], number: int) -> list[ReportRow]:
        step = f" of step {number + 1}" if len(self.expected.steps) > 1 else ""
        return [replace(row, tensor=f"{row.tensor}{step}") for row in rows]

    def _is_trained(self, number: int, rows: Sequence[ReportRow]) -> bool:
        """Return True if every weight that one device trains in a step has the right gradient or is right after it."""
        judged = [row for row in rows if row.kind in ("gradient", "update")]
        right = {f"{row.module}.{row.tensor}".lstrip(".") for row in judged if row.verdict in ("exact", "rounding")}
        gradients = self.expected.steps[number].gradients
        wanted = {
            name
            for name in self.expected.initial
            if self._changes(number).get(name) or ((grad := gradients.get(name)) is not None and bool(grad.any()))
        }
        self._proved |= wanted & right
        unseen = [name for name in self.expected.initial if name in wanted & right and name not in self._gradients]
        if unseen:
            self._note(f"the weights after the step are compared, and not the gradients, of {self._some(unseen)}")
        return bool(wanted) and wanted <= right and first_bug(judged) is None

    def _changes(self, number: int) -> dict[str, float]:
        """Return how far one device moves each parameter in a step at most."""
        if number not in self._moves:
            before = self.expected.steps[number - 1].updates if number else self.expected.initial
            after = self.expected.steps[number].updates
            self._moves[number] = {
                name: largest(after[name].double() - value.double()) for name, value in before.items() if name in after
            }
        return self._moves[number]

    def _drop_gradients(self, number: int, theirs: Mapping[int, RecordedStep]) -> bool:
        """Return True if a rank has changed a weight in a step, and dropped its gradient."""
        for rank, step in theirs.items():
            before = self.ranks[rank].steps[number - 1].updates if number else self.ranks[rank].initial
            lacking = [name for name, grad in step.gradients.items() if grad is None and name in before]
            if any(not torch.equal(before[name], step.updates[name]) for name in lacking if name in step.updates):
                return True
        return False

    def _as_made(self, row: ReportRow) -> ReportRow:
        """Forgive a buffer that nobody changes, such as the place where a rank's part of a vocabulary begins."""
        name = f"{row.module}.{row.tensor}".lstrip(".")
        pairs = zip((self.expected, *self.ranks), ({}, *self._paths), strict=True)
        changes = (
            not torch.equal(held[name], before[name])
            for record, paths in pairs
            for before in [_renamed(record.buffers, paths)]
            for held in (_renamed(step.buffers, paths) for step in record.steps)
            if name in before and name in held
        )
        if row.verdict != "bug" or any(changes):
            return row
        self._made[name] = None
        return _as_private(row)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _forward(
        self, mine: RecordedStep, others: Sequence[RecordedStep], theirs: Mapping[int, RecordedStep]
    ) -> Iterator[ReportRow]:
        """Judge what went into and came out of modules, and the loss."""
        events = [*self._at_modules(mine, others, theirs), *self._loss(mine, others, theirs)]
        for row in settle(events, AutogradGraph().forward):
            yield replace(row, sentence="") if row.verdict in ("exact", "rounding", "private") else row

    def _at_modules(
        self, mine: RecordedStep, others: Sequence[RecordedStep], theirs: Mapping[int, RecordedStep]
    ) -> Iterator[Judged]:
        calls = {rank: self._calls(step, self._paths[rank]) for rank, step in theirs.items()}
        given: dict[str, Layout | None] = {}  # what modules were given first
        self._inputs = self._inputs or given
        for key, values in mine.calls.items():
            path, side = key[:2]
            if self._split and not path:
                continue  # every stage has a model of its own
            there = {rank: each[key] for rank, each in calls.items() if key in each}
            alike = len({len(values), *map(len, there.values())}) > 1 and all(map(_are_equal, there.values()))
            joined = _there({rank: _joined(each) for rank, each in there.items()})
            parts = {rank: there[rank][0] for rank in joined} if alike else joined
            full = values[0] if alike and _are_equal(values) else _joined(values)
            if self._stopped and not self._is_complete(path, there, full):
                continue
            if full is None or not parts:
                self._left.update({path: None} if path and not parts else {})
                continue
            bound = bound_of(full, (_joined(other.calls.get(key, [])) for other in others))
            bias = f"{path}.bias".lstrip(".")
            addends = {bias: self._weights[bias]} if side == "output" and bias in self._weights else {}
            found = self._find(parts, full, bound, addends, may_reorder=True)
            if found.status == "unexplained":
                early = len(values) if mine.early is None else mine.early.get(key, 0)
                if early < len(values) and self._are_right(key, early, mine, others, there):
                    self._late.add(ReportRow(path, _title(key), "forward").place)
            if side == "input":
                given.setdefault(path, found.found)
                if path in self.expected.roots:
                    steps = self.expected.steps
                    found = of_other_rows(found, parts, full, (_joined(each.calls.get(key, [])) for each in steps))
            elif path in self.expected.batch_norms:
                found = of_own_rows(found, given.get(path), parts, full)
            found = replace(found, is_zero=largest(full) <= bound)
            nodes = [node for (other, _), node in mine.nodes.items() if other == key]
            is_given = not nodes and side == "input"
            if is_given:  # a constant: it stands where the outputs of its module do
                nodes = [node for (other, _), node in mine.nodes.items() if other[:2] == (path, "output")]
            yield Judged(path, _title(key), "forward", found, tuple(nodes), given=is_given)

    def _is_complete(self, path: str, there: Mapping[int, Sequence[torch.Tensor]], full: torch.Tensor | None) -> bool:
        """Return True if all ranks with a module have called it as often, and hold no less than one device does.

        Before a failure, they may have had the first of several micro-batches only.
        """
        having = {rank for rank, paths in enumerate(self._paths) if path in paths.values()}
        if full is None or having != set(there) or len({len(values) for values in there.values()}) > 1:
            return False
        distinct: list[torch.Tensor] = []
        for value in itertools.chain(*there.values()):
            distinct += [] if any(torch.equal(value, other) for other in distinct) else [value]
        return sum(value.numel() for value in distinct) >= full.numel()

    def _are_right(
        self,
        key: CallKey,
        count: int,
        mine: RecordedStep,
        others: Sequence[RecordedStep],
        there: Mapping[int, Sequence[torch.Tensor]],
    ) -> bool:
        """Whether the first calls of a module are right, each by itself, if the ranks make as many as one device."""
        values = mine.calls[key]
        if count and any(len(each) != len(values) for each in there.values()):
            return False
        for at, full in enumerate(values[:count]):
            bound = bound_of(full, [_value_of(other, key, at) for other in others])
            if self._explained({rank: each[at] for rank, each in there.items()}, full, bound) is None:
                return False
        return True

    def _backward(
        self,
        parameters: Sequence[ReportRow],
        mine: RecordedStep,
        others: Sequence[RecordedStep],
        theirs: Mapping[int, RecordedStep],
    ) -> list[ReportRow]:
        """Return the gradients of activations up to one from which all wrong ones of parameters are computed."""
        if first_bug(parameters) is None:
            return []
        events = list(self._activations(mine, others, theirs))
        for row in parameters:
            name = f"{row.module}.{row.tensor}" if row.module else row.tensor
            found, place = self._gradients.get(name, Finding("wrong")), self.expected.leaves.get(name)
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

    def _activations(
        self, mine: RecordedStep, others: Sequence[RecordedStep], theirs: Mapping[int, RecordedStep]
    ) -> Iterator[Judged]:
        """Judge the gradients of what went into and came out of modules, in the order in which they are computed.

        Each rank's loss may be a mean over its own rows, or scaled: then all of them are as many times larger. How many
        times the first one tells.
        """
        named = {rank: self._named_calls(step, self._paths[rank]) for rank, step in theirs.items()}
        scale: float | None = None
        joined: set[CallKey] = set()
        for key, call in mine.grads:
            path = key[0]
            there = {rank: (theirs[rank], keys[key]) for rank, keys in named.items() if key in keys}
            # Calls are those of one forward, one by one, or micro-batches, put together: as was computed in forward.
            ways = [] if key in joined else [call, None]
            ways = [way for way in ways if self._is_forward_right(key, way, mine, others, there)][:1]
            if not ways:
                continue
            joined.update([key] if ways[0] is None else [])
            full, which = _gradient_of(mine, key, ways[0]), ways[0]
            parts = _there({rank: _gradient_of(step, own, which) for rank, (step, own) in there.items()})
            if full is None or not parts or (key, call) not in mine.nodes:
                continue
            bound = bound_of(full, [_gradient_of(other, key, which) for other in others])
            if scale is None:
                if bound >= largest(full):
                    continue  # zero but for rounding
                scale = self._scale(parts, full, bound)
            judged = self._find(parts, full * scale, bound * scale, may_reorder=True)
            judged = replace(judged, is_zero=largest(full) <= bound)
            yield Judged(path, _title(key), "gradient", judged, (mine.nodes[key, call],))

    def _is_forward_right(
        self,
        key: CallKey,
        call: int | None,
        mine: RecordedStep,
        others: Sequence[RecordedStep],
        there: Mapping[int, tuple[RecordedStep, CallKey]],
    ) -> bool:
        """Whether what stood at a boundary in a call, or in all, is explained, so that its gradient can be."""
        full = _value_of(mine, key, call)
        parts = _there({rank: _value_of(step, own, call) for rank, (step, own) in there.items()})
        counts = {len(mine.calls[key]), *(len(step.calls[own]) for step, own in there.values())}
        if full is None or not parts or len(parts) < len(there) or (call is not None and len(counts) > 1):
            return False
        bound = bound_of(full, [_value_of(other, key, call) for other in others])
        return self._explained(parts, full, bound, may_reorder=True) is not None

    def _named_calls(self, step: RecordedStep, paths: Mapping[str, str]) -> dict[CallKey, CallKey]:
        """Return what a rank calls each boundary of one device."""
        return {(paths[path], side, way): (path, side, way) for path, side, way in step.calls if path in paths}

    def _scale(self, parts: Mapping[int, torch.Tensor], full: torch.Tensor, bound: float) -> float:
        """Return how many times a gradient is larger on the ranks than on one device; 1 where it is no such thing."""
        sizes = [size for size in self.mesh.mesh_shape if size > 1]
        products = {math.prod(some) for count in range(len(sizes) + 1) for some in itertools.combinations(sizes, count)}
        for times in sorted(products):
            found = self._explained(parts, full * times, bound * times, may_reorder=True)
            if found is not None and found.status == "right":
                return float(times)
        here = submesh(self.mesh, tuple(sorted(parts)))
        fault = diagnose(parts, full, here, bound)
        return float(fault.factor) if fault is not None and fault.kind == "scaled" and fault.factor else 1.0

    def _calls(self, step: RecordedStep, paths: Mapping[str, str]) -> dict[CallKey, list[torch.Tensor]]:
        named = ((path, side, way, values) for (path, side, way), values in step.calls.items())
        return {(paths[path], side, way): values for path, side, way, values in named if path in paths}

    def _loss(
        self, mine: RecordedStep, others: Sequence[RecordedStep], theirs: Mapping[int, RecordedStep]
    ) -> Iterator[Judged]:
        if not mine.losses:
            return
        full, moved = _sum(mine), [_sum(other) for other in others if other.losses]
        parts = {rank: _sum(step) for rank, step in theirs.items() if step.losses}
        if self._stopped and {len(step.losses) for step in theirs.values()} != {len(mine.losses)}:
            return
        if parts:
            found = self._find(parts, full, bound_of(full, moved, mine.losses[0].dtype))
            found = replace(found, status="right") if found.status == "pending" else found
            if found.status == "unexplained" and "should hold the same" in found.sentence:
                named = [self._calls(step, self._paths[rank]) for rank, step in theirs.items()]
                keys = [key for key in mine.calls if key[0] in self.expected.roots and key[1] == "input"]
                values = [
                    {rank: _joined(each.get(key, [])) for rank, each in zip(theirs, named, strict=True)} for key in keys
                ]
                found = of_unequal_shares(found, parts, full, [_there(each) for each in values])
            found = replace(found, is_coarse=_is_coarse(found, full))
            nodes = tuple(node for (key, _), node in mine.nodes.items() if key == LOSS)
            yield Judged("", "loss", "forward", found, nodes, True)
        else:
            self._note("the loss is not compared, as no rank has differentiated or returned one")

    def _numbers(
        self, kind: str, mine: RecordedStep, others: Sequence[RecordedStep], theirs: Mapping[int, RecordedStep]
    ) -> Iterator[ReportRow]:
        """Judge what the step reports, which is the same on all ranks."""
        for key, full in mine.numbers.items():
            if key[0] == kind:
                bound = bound_of(full, [other.numbers.get(key) for other in others])
                parts = {rank: step.numbers[key] for rank, step in theirs.items()}
                found = self._judge(parts).declared(parts, full, bound, self.mesh(), self.mesh.alias_name)
                yield self._row(ReportRow("", key[1], kind), replace(found, is_coarse=_is_coarse(found, full)))

    def _results(
        self, mine: RecordedStep, others: Sequence[RecordedStep], theirs: Mapping[int, RecordedStep]
    ) -> Iterator[ReportRow]:
        """Judge other numbers that all ranks return alike; each may return its own, as it may return its own loss."""
        for (kind, title), full in mine.numbers.items():
            if kind not in ("float", "tensor"):
                continue
            parts = _there({rank: step.numbers.get((kind, title)) for rank, step in theirs.items()})
            moved = [each for each in (other.numbers.get((kind, title)) for other in others) if each is not None]
            values = {float(part) for part in parts.values()}
            is_own = kind == "float" and all(torch.equal(each, full) for each in moved)  # e.g. a rate, or a size
            if is_own or len(values) != 1 or len(parts) < len(theirs):
                if values != {float(full)} or len(parts) < len(theirs):
                    self._note(f"{title} is not compared, as ranks return their own, or none")
                continue
            found = self._find(parts, full, bound_of(full, moved, next(iter(self.expected.initial.values())).dtype))
            if found.status != "pending" and not _is_coarse(found, full):
                yield self._row(ReportRow("", title, "forward"), replace(found, suggestion=_DIVIDE_ONCE))

    def _named(
        self,
        kind: str,
        title: str,
        number: int,
        mine: RecordedStep,
        others: Sequence[RecordedStep],
        theirs: Mapping[int, RecordedStep],
    ) -> Iterator[ReportRow]:
        full_by_name: dict[str, Any] = getattr(mine, kind)
        named = {rank: self._tensors(kind, rank, step) for rank, step in theirs.items()}
        order = list(full_by_name)
        if kind == "gradients":  # as backward computes them, those of the first optimizer first
            order.reverse()
            order.sort(key=lambda name: mine.turns.get(name, 0))
        scale = max((largest(full) for full in full_by_name.values() if full is not None), default=0.0)
        updates = self._updates(number, mine, theirs) if kind == "updates" else None
        stepped = {rank: self._tensors("stepped", rank, step) for rank, step in theirs.items()}
        held = {rank: self.names.translated(self.ranks[rank].initial, self._shapes) for rank in theirs}
        for name in order:
            full, module, leaf = full_by_name[name], *split_name(name)
            parts = _there({rank: tensors.get(name) for rank, tensors in named.items()})
            row = ReportRow(module, leaf, title)
            if full is None:
                if any(bool(part.count_nonzero()) for part in parts.values()):
                    yield replace(row, verdict="bug", sentence=f"only {ranks_phrase(parts)} have one")
                continue
            having = [rank for rank, tensors in (named if kind != "updates" else held).items() if name in tensors]
            if not parts:
                if kind == "buffers":
                    yield from self._lacking(row, name, full, number)
                elif having and bool(full.count_nonzero()) and not self._drop_gradients(number, theirs):
                    yield replace(row, verdict="bug", sentence="no rank has one, and one device has")
                continue
            if len(parts) < len(having):
                sentence = f"{ranks_phrase(rank for rank in having if rank not in parts)} has none"
                yield replace(row, verdict="bug", sentence=sentence)
                continue
            moved = [getattr(other, kind).get(name) for other in others]
            floor = ROUNDINGS * (number + 1) if kind != "gradients" else FEW
            if kind == "gradients":  # as they were before clipping: a wrong norm has a row of its own
                parts = {rank: part / theirs[rank].clipped for rank, part in parts.items()}
                full, clipped = full / mine.clipped, [other.clipped for other in others]
                moved = [None if each is None else each / by for each, by in zip(moved, clipped, strict=True)]
            found = self._find(parts, self.names.ordered(name, full), bound_of(full, moved, floor=floor))
            if kind == "gradients" and found.status == "pending" and self._say_partial(name, theirs):
                found = replace(found, status="right")  # the optimizer adds them up
            if updates is not None:
                found = updates.judged(
                    name, _there({rank: tensors.get(name) for rank, tensors in stepped.items()}), found
                )
                found = replace(found, is_coarse=self._is_wide(number, name, found.bound, mine, others))
            if kind == "buffers" and found.status != "right" and self._are_all("statistics", name, parts):
                self._own[name] = None
                found = replace(found, status="private")
            if kind == "buffers" and found.status == "pending" and self._are_all("unsaved", name, parts):
                found = replace(found, status="right")
            if kind == "gradients" and found.status == "unexplained":
                found = self._of_another(name, parts, full_by_name, found)
            if kind == "updates" and found.status in ("wrong", "unexplained") and mine.gradients.get(name) is None:
                found = self._of_zeros(name, theirs, found)
            if kind == "gradients":  # AdamW's updates have wide bounds where all is well: it steps by signs
                found = replace(found, is_coarse=_is_coarse(found, full, scale))
                self._gradients[name] = replace(found, is_zero=largest(full) <= found.bound)
            yield self._row(row, found)

    def _of_zeros(self, name: str, theirs: Mapping[int, RecordedStep], found: Finding) -> Finding:
        """Explain an update from a gradient of zeros, of a parameter that has no gradient on one device."""
        named = (self.names.translated(step.gradients, self._shapes) for step in theirs.values())
        grads = [tensors[name] for tensors in named if tensors.get(name) is not None]
        if not grads or any(bool(grad.count_nonzero()) for grad in grads):
            return found
        sentence = "one device has no gradient of it, and the ranks one of zeros: their optimizer moves it"
        return replace(found, sentence=sentence, suggestion="leave its grad None on ranks, or fill it on one device")

    def _cause(
        self, number: int, rows: Sequence[ReportRow], mine: RecordedStep, theirs: Mapping[int, RecordedStep]
    ) -> tuple[str, str] | None:
        """Return one cause of all gradients that are wrong, and a remedy, if there is one."""
        odd = [found.status for found in self._gradients.values() if found.status != "right"]
        if {*odd} != {"unexplained"} or len(odd) < sum(row.verdict == "bug" for row in rows):
            return None
        fulls = {name: full for name, full in mine.gradients.items() if full is not None and name in self._gradients}
        if sum(full.numel() for full in fulls.values()) * len(theirs) > _MOST_ELEMENTS:
            return None
        ranks = {}
        for rank, step in theirs.items():
            before = self.ranks[rank].steps[number - 1].updates if number else self.ranks[rank].initial
            taken, raw, weights = (
                self.names.translated(each, self._shapes) for each in (step.gradients, step.raw, before)
            )
            here = {name: full for name, full in fulls.items() if taken.get(name) is not None and name in weights}
            wanted = [self._part(name, rank, full) for name, full in here.items()]
            if not here or any(part.shape != taken[name].shape for name, part in zip(here, wanted, strict=True)):
                return None
            ranks[rank] = RankGradients(
                _flat(wanted) / mine.clipped,
                _flat(self._part(name, rank, mine.raw.get(name, torch.nan * full)) for name, full in here.items()),
                _flat(torch.full_like(taken[name], self._gradients[name].bound) for name in here),
                _flat(taken[name] for name in here) / step.clipped,
                _flat(raw.get(name, torch.nan * taken[name]) for name in here),
                _flat(weights[name] for name in here),
            )
        return RankGradients.cause_of(ranks, self.mesh)

    def _part(self, name: str, rank: int, full: torch.Tensor) -> torch.Tensor:
        """Return a rank's part of a tensor that is split as a parameter is; nothing, where that is not known."""
        layout = self._layouts.get(name)
        if layout is None or rank not in layout.rank_list:
            return torch.empty(0)
        box = layout.slices(full.shape)[layout.rank_list.index(rank)].tolist()
        return self.names.ordered(name, full)[tuple(slice(start, stop) for start, stop in box)]

    def _of_another(
        self, name: str, parts: Mapping[int, torch.Tensor], gradients: Mapping[str, Any], found: Finding
    ) -> Finding:
        """Explain a gradient that is another parameter's, e.g. by swapped views of a flat buffer."""
        for other, full in gradients.items():
            if other == name or full is None or full.shape != gradients[name].shape or not bool(full.any()):
                continue
            same = self._explained(parts, full, max(found.bound, bound_of(full, ())))
            if same is not None and same.status == "right":
                hint = "look at the order in which gradients are put into buffers, and taken out again"
                return replace(found, sentence=f"it is the gradient of {other}", suggestion=hint)
        return found

    def _tensors(self, kind: str, rank: int, step: RecordedStep) -> dict[str, Any]:
        """Return what a rank has of a kind, by the names of one device."""
        tensors: dict[str, Any] = getattr(step, kind)
        if kind == "buffers":
            return _renamed(tensors, self._paths[rank])
        return self.names.translated(tensors, self._shapes)

    def _lacking(self, row: ReportRow, name: str, full: torch.Tensor, number: int) -> Iterator[ReportRow]:
        """Say of a buffer that no rank has by a name that is known that it is not compared, if the step changes it."""
        before = self.expected.steps[number - 1].buffers if number else self.expected.buffers
        if name in before and not torch.equal(before[name], full) and name not in self.expected.statistics:
            sentence, hint = (
                "one device changes it, and no rank has a buffer of that name",
                "the same name on the ranks",
            )
            yield replace(row, verdict="not proved", sentence=sentence, suggestion=hint)
        else:
            self._left[name] = None

    def _are_all(self, kind: str, name: str, ranks: Collection[int]) -> bool:
        """Return True if a buffer is one of the `statistics`, or of the `unsaved`, on all of some ranks."""
        own = [_renamed(dict.fromkeys(getattr(self.ranks[rank], kind)), self._paths[rank]) for rank in ranks]
        return all(name in each for each in own)

    def _is_wide(
        self, number: int, name: str, bound: float, mine: RecordedStep, others: Sequence[RecordedStep]
    ) -> bool:
        """Return True if a weight whose gradient is not compared may move anywhere within its bound.

        Adam moves a weight by the sign of its gradient, also of one that is zero but for rounding: that is no evidence.
        """
        grad, changes = mine.gradients.get(name), self._changes(number)
        change = changes.get(name, 0.0)
        if name in self._gradients or bound <= _COARSE * change or change <= _TINY * max(changes.values(), default=0.0):
            return False
        noise = None if grad is None else bound_of(grad, [other.gradients.get(name) for other in others])
        return grad is None or noise is None or largest(grad) > noise

    def _updates(self, number: int, mine: RecordedStep, theirs: Mapping[int, RecordedStep]) -> UpdatesOfStep:
        """Return the updates of a step, beside what one device's optimizers make of each rank's gradients."""
        starts = {
            rank: UpdateStarts(self._rules(step), self.names.translated(step.starts.values, self._shapes))
            for rank, step in theirs.items()
        }
        gradients = {rank: self.names.translated(step.gradients, self._shapes) for rank, step in theirs.items()}
        return UpdatesOfStep(mine.starts.rules, starts, gradients, self._replays, number + 1)

    def _rules(self, step: RecordedStep) -> dict[str, UpdateRule]:
        """Return how a rank's optimizers update its parameters, by the names of one device."""
        named = ((self.names.parts.get(name, ((name,), 0))[0], rule) for name, rule in step.starts.rules.items())
        return {each: rule for names, rule in named for each in names}

    def _say_partial(self, name: str, steps: Mapping[int, RecordedStep]) -> bool:
        """Whether the gradients of a parameter are DTensors that say so themselves, on all ranks that have one."""
        theirs = [each for each, (names, _) in self.names.parts.items() if name in names]
        return all(each in step.partial for step in steps.values() for each in theirs if each in step.gradients)

    # -- one tensor --------------------------------------------------------------------------------------------------

    def _find(
        self, parts: Parts, full: torch.Tensor, bound: float, addends: Any = None, *, may_reorder: bool = False
    ) -> Finding:
        """Judge a tensor as it is, then in the orders in which ranks are known, or found, to hold the batch."""
        found = self._explained(parts, full, bound, may_reorder=may_reorder)
        if found is not None:
            return found
        judge, full = self._judge(parts), _as_parts(full, parts)
        found = self._of_pieces(judge.unexplained, parts, full, bound)
        found = found or judge.unexplained(parts, full, bound, addends)
        for mesh in split_axes(judge.mesh, next(iter(parts.values())), full):
            again = Judge(mesh).explained(parts, full, bound)
            found = of_copies(found, again) if again is not None else found
        return found

    def _explained(
        self, parts: Parts, full: torch.Tensor, bound: float, *, may_reorder: bool = False
    ) -> Finding | None:
        """Judge a tensor as `_find` does; None where nothing explains it: to find out why takes far longer."""
        judge, full = self._judge(parts), _as_parts(full, parts)
        found = judge.explained(parts, full, bound)
        for mesh in split_axes(judge.mesh, next(iter(parts.values())), full) if found is None else ():
            again = Judge(mesh).explained(parts, full, bound)
            if again is not None and again.status == "right":
                return replace(again, found=None)
        if found is not None or not may_reorder:
            return found
        for other in in_orders(full, self._orders):
            found = judge.explained(parts, other, bound)
            if found is not None:
                return found
        found = self._of_pieces(judge.explained, parts, full, bound)
        held = pieces_of(parts, full, bound) if found is None else None
        if held is None:
            return found
        dim, pieces = held
        places = tuple(itertools.chain(*dict.fromkeys(pieces.values())))
        found = judge.explained(parts, full.index_select(dim, torch.tensor(places)), bound)
        if found is not None:
            self._orders.append(places)
            return found
        self._pieces.append(pieces)
        return self._of_pieces(judge.explained, parts, full, bound)

    def _of_pieces(
        self,
        judged: Callable[[Mapping[int, torch.Tensor], torch.Tensor, float], Finding | None],
        parts: Mapping[int, torch.Tensor],
        full: torch.Tensor,
        bound: float,
    ) -> Finding | None:
        """Judge a tensor of which ranks hold pieces of different lengths, where these are known."""
        for pieces in self._pieces:
            even = pad_pieces(parts, full, pieces)
            found = judged(*even, bound) if even is not None else None
            if found is not None:
                return replace(found, found=None) if found.status == "right" else found  # no layout of this tensor
        return None

    def _judge(self, parts: Collection[int]) -> Judge:
        here = tuple(sorted(parts))
        is_whole = len(here) == len(self.ranks)
        return self._judges.setdefault(here, Judge(submesh(self.mesh, here), is_whole=is_whole))

    def _row(self, row: ReportRow, found: Finding) -> ReportRow:
        row = row_of(Judged(row.module, row.tensor, row.kind, found))
        if row.verdict in ("exact", "rounding", "private"):
            return replace(row, sentence="")
        if row.verdict != "pending" or found.found is None or row.kind == "forward":
            return row
        sentence = f"the ranks hold {pending_words(found.found)}, and nothing reduced it"
        hint = f"all_reduce over {' and '.join(found.found.partial)}"
        partial = found.found.partial  # only the sum of what all ranks hold alike would be right
        if row.kind == "gradient" and {*partial.values()} == {"sum"} and {*partial} <= {*found.alike}:
            sentence, hint = divided_words(found.found)
        return replace(row, verdict="bug", sentence=sentence, suggestion=found.suggestion or hint)


def _renamed(tensors: Mapping[str, Any], paths: Mapping[str, str]) -> dict[str, Any]:
    """Return a rank's buffers by the names of one device's modules, as far as these are known."""
    split = ((*split_name(name), tensor) for name, tensor in tensors.items())
    return {f"{paths.get(module, module)}.{leaf}".lstrip("."): tensor for module, leaf, tensor in split}


def _is_coarse(found: Finding, full: torch.Tensor, scale: float = 0.0) -> bool:
    """Whether a bound is so wide that a fault could hide below it; `scale`: of the largest tensor of the kind."""
    return found.bound > max(_COARSE * largest(full), _TINY * scale)


def _blamed(rows: list[ReportRow], cause: tuple[str, str] | None) -> list[ReportRow]:
    """Say in the first wrong loss or gradient which cause all wrong gradients have."""
    bug = first_bug(rows)
    if bug is None or cause is None or (bug.kind != "gradient" and bug.place != "the model's loss"):
        return rows
    sentence = cause[0] if bug.kind == "gradient" else f"{bug.sentence}; {cause[0]}"
    return [replace(row, sentence=sentence, suggestion=cause[1]) if row is bug else row for row in rows]


def _as_private(row: ReportRow) -> ReportRow:
    return replace(row, verdict="private", sentence="") if row.verdict == "bug" else row


def _as_parts(full: torch.Tensor, parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return a tensor of whole numbers in floating point, if a part of it is."""
    is_float = full.dtype.is_floating_point
    return full if all(part.dtype.is_floating_point == is_float for part in parts.values()) else full.double()


def _are_equal(values: Sequence[torch.Tensor]) -> bool:
    """Whether all calls of a step had the same, such as positions in each micro-batch."""
    return all(torch.equal(value, values[0]) for value in values[1:])


def _joined(values: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Put the calls of a step one behind the other; None where they have no rows."""
    if len(values) < 2:
        return values[0] if values else None
    if values[0].dim() == 0 or any(value.shape[1:] != values[0].shape[1:] for value in values):
        return None
    return torch.cat(list(values))


def _value_of(step: RecordedStep, key: CallKey, call: int | None) -> torch.Tensor | None:
    """Return what stood at a boundary in one call, or in all one behind the other; once if all had the same."""
    values = step.calls.get(key, [])
    if call is not None:
        return values[call] if call < len(values) else None
    return values[0] if len(values) > 1 and _are_equal(values) else _joined(values)


def _gradient_of(step: RecordedStep, key: CallKey, call: int | None) -> torch.Tensor | None:
    """Return the gradient of one call, or those of all one behind the other; added up if all calls had the same."""
    if call is not None:
        return step.grads.get((key, call))
    values = step.calls.get(key, [])
    grads = [step.grads[key, each] for each in range(len(values)) if (key, each) in step.grads]
    if not grads or len(grads) < len(values):
        return None
    return torch.stack(grads).sum(0) if len(values) > 1 and _are_equal(values) else _joined(grads)


def _sum(step: RecordedStep) -> torch.Tensor:
    """Add up the losses of a step's micro-batches."""
    return torch.stack([loss.double() for loss in step.losses]).sum()


def _there(parts: Mapping[int, torch.Tensor | None]) -> dict[int, torch.Tensor]:
    """Return the parts of the ranks that have one."""
    return {rank: part for rank, part in parts.items() if part is not None}


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0), *(each.flatten() for each in tensors)])


def _title(key: CallKey) -> str:
    _, side, way = key
    return f"{side} {way}".strip().removesuffix(" 0") if side == "input" else f"{side} {way.lstrip('.')}".strip()


def _own(uses: Mapping[DrawPlace, DrawUse]) -> set[DrawPlace]:
    """Return draws by the names of who drew."""
    return {use.place for use in uses.values()}
