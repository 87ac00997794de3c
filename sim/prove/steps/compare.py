"""Verdicts on a training loop: every tensor of every step, put together from the ranks and held against one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hyper_parallel.core.dtensor.layout import Layout
from sim.explain.errors import ranks_phrase
from sim.prove.bound import FEW, bound_of
from sim.prove.evidence import largest
from sim.prove.judge import Finding, Judged, divided_words, first_bug, pending_words, row_of, split_name
from sim.prove.modes.choices import ChoiceKey, agreed_words, free_choices
from sim.prove.modes.draws import ModuleTensor
from sim.prove.randomness import THE_STEP, redrawn_row
from sim.prove.report import ReportRow
from sim.prove.steps.activations import Activations
from sim.prove.steps.comparison import Comparison, boundary_title, is_coarse, joined, present, some
from sim.prove.steps.finder import Parts
from sim.prove.steps.names import NameMap, find_names
from sim.prove.steps.updates import ROUNDINGS, RankGradients
from sim.prove.steps.watch import LoopRecord, RecordedStep

_COARSE, _TINY = 2.0**-7, 1e-5  # a change below both proves nothing: beside its bound, and beside the largest change
_DIVIDE_ONCE = "add up sums and counts over all ranks, and divide once: a mean of means weighs unequal parts alike"
_MOST_ELEMENTS = 2**25  # of the gradients of all ranks, among which one cause of all is looked for
_MOST_ROUNDS = 16  # of choices that follow from others
_MOST_COUNTS = 6


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


class LoopComparison(Comparison):
    """Compares a loop whose ranks run a program of their own, e.g. a script.

    Losses, gradients, updates and buffers have to be right. Where they are, tensors between modules may be what they
    like; where they are not, the first of those that is wrong tells where to look.

    Attributes:
        own: statistics of each rank's own rows that differ.
        made: buffers that ranks make for themselves, and no step changes.
        layouts: of the parameters.
        proved: parameters of which a gradient or an update is right.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.own: dict[str, None] = {}
        self.made: dict[str, None] = {}
        self.layouts: dict[str, Layout] = {}
        self.proved: set[str] = set()
        self._changes: dict[int, dict[str, float]] = {}

    def _find_names(self, given: Mapping[str, Any]) -> NameMap:
        return find_names(self.expected.initial, [rank.initial for rank in self.ranks], self.mesh, given)

    def _is_unproved(self) -> bool:
        return bool(self.expected.trained) and not self.proved

    def _of_step(self, number: int) -> list[ReportRow]:
        return self._with_number(LoopStep(self, number).rows(), number)

    def _of_forward(self, number: int) -> list[ReportRow]:
        return self._with_number(LoopStep(self, number).activations.forward(), number)

    def _with_number(self, rows: Iterable[ReportRow], number: int) -> list[ReportRow]:
        step = f" of step {number + 1}" if len(self.expected.steps) > 1 else ""
        return [replace(row, tensor=f"{row.tensor}{step}") for row in rows]

    def _parameters(self) -> Iterator[ReportRow]:
        held = [self.names.translated(rank.initial, self.shapes) for rank in self.ranks]
        for name, full in self.expected.initial.items():
            parts = {rank: tensors[name] for rank, tensors in enumerate(held) if name in tensors}
            module, _, leaf = name.rpartition(".")
            row = ReportRow(module, leaf, "parameter")
            if not parts:
                hint = 'names={"<name on the ranks>": "' + name + '"}'
                missing = f"; the ranks' {some(self.names.missing)} stand for none" if self.names.missing else ""
                yield replace(row, verdict="bug", sentence=f"no rank has it{missing}", suggestion=hint)
                continue
            found = self.finder.find(parts, self.names.ordered(name, full), bound_of(full, ()))
            self.layouts |= {} if found.found is None else {name: found.found}
            yield _judged_row(row, found)

    def _after_steps(self) -> list[ReportRow]:
        rows = [*self._redrawn(), *self._miscounted()]
        self.notes += [f"by their values, {some(self.names.found)}"] if self.names.found else []
        for names, words in (
            (self.left, "not compared, as no rank has them by a name that is known"),
            (self.names.missing, "on the ranks alone, and not compared"),
            (self.own, "of each rank's own rows, as nothing synchronises them"),
            (self.made, "the ranks' own, which no step changes"),
        ):
            self.notes += [f"{words}: {some(names)}"] if names else []
        return rows

    def _redrawn(self) -> Iterator[ReportRow]:
        named = [
            rank.redraw and rank.redraw._replace(path=paths.get(rank.redraw.path, rank.redraw.path))
            for rank, paths in zip(self.ranks, self.paths, strict=True)
        ]
        row = redrawn_row(self.expected.redraw, named)
        if row is not None:
            yield row

    def _miscounted(self) -> Iterator[ReportRow]:
        counts = {len(self.expected.steps), *(len(rank.steps) for rank in self.ranks)}
        if len(counts) > 1:
            counted = ", ".join(str(len(rank.steps)) for rank in self.ranks[:_MOST_COUNTS])
            sentence = f"one device takes {len(self.expected.steps)} steps, the ranks {counted}"
            yield ReportRow("", "steps", "update", verdict="bug", sentence=sentence)

    def _boundaries(self, step: int) -> Iterator[ModuleTensor]:
        for key, values in self.expected.steps[step].calls.items():
            full = joined(values)
            if full is not None and full.is_floating_point():
                others = [joined(each.steps[step].calls.get(key, [])) for each in self.moved if step < len(each.steps)]
                place = ReportRow(key[0], boundary_title(key), "forward").place
                yield ModuleTensor(place, full, bound_of(full, others))

    def _is_repeated(self, step: int, path: str) -> bool:
        paths = self.expected.roots if path == THE_STEP else [path]
        return any(len(values) > 1 for key, values in self.expected.steps[step].calls.items() if key[0] in paths)

    def changes(self, number: int) -> dict[str, float]:
        """Return how far one device moves each parameter in a step at most."""
        if number not in self._changes:
            before, after = self.expected.weights(number), self.expected.steps[number].updates
            self._changes[number] = {
                name: largest(after[name].double() - value.double()) for name, value in before.items() if name in after
            }
        return self._changes[number]

    def part(self, name: str, rank: int, full: torch.Tensor) -> torch.Tensor:
        """Return a rank's part of a tensor that is split as a parameter is; nothing, where that is not known."""
        layout = self.layouts.get(name)
        if layout is None or rank not in layout.rank_list:
            return torch.empty(0)
        box = layout.slices(full.shape)[layout.rank_list.index(rank)].tolist()
        return self.names.ordered(name, full)[tuple(slice(start, stop) for start, stop in box)]


class LoopStep:
    """Compares one step of a loop.

    Args:
        whole: the comparison of the loop.
        number: of the step.

    Attributes:
        activations: the comparison of what stands at the boundaries of modules.
    """

    def __init__(self, whole: LoopComparison, number: int) -> None:
        self.whole, self.number = whole, number
        self.mine, self.others, self.theirs = whole.sides(number)
        self.activations = Activations(whole, number)
        whole.inputs = whole.inputs or self.activations.given
        self._gradients: dict[str, Finding] = {}

    def rows(self) -> list[ReportRow]:
        """Judge forward, gradients, updates and buffers, in the order in which they are computed."""
        mine, late = self.mine, self.activations.late
        rows = [*self._numbers("forward"), *self.activations.forward()]
        after = [row for row in rows if row.place in late or (row.tensor == "loss" and late)]
        at = len(rows := [row for row in rows if row not in after])
        for kind, title in (("gradients", "gradient"), ("updates", "update"), ("buffers", "buffer")):
            named = list(self._named(kind, title))
            if kind == "gradients":
                cause = self._cause(named)
                rows, named = _blamed(rows, cause), _blamed(named, cause)
                is_loss_wrong = any(row.verdict == "bug" and row.place == "the model's loss" for row in rows)
                above = [] if is_loss_wrong else self.activations.backward(named, self._gradients)
                named = [*above, *named]
            rows += named
            rows += self._numbers(title)
        # What is computed with weights that a wrong gradient has updated in the same step is wrong because of it.
        first, turns = first_bug(rows[at:]), mine.turns
        name = "" if first is None else f"{first.module}.{first.tensor}".lstrip(".")
        is_cause = first is not None and turns.get(name, math.inf) < max(turns.values(), default=0)
        rows = [*rows, *after] if is_cause else [*rows[:at], *after, *rows[at:]]
        losses = [row for row in rows if row.tensor == "loss" and not row.module]
        is_trained = self._is_trained(rows)
        if losses and losses[0].verdict == "bug" and is_trained:
            what = "gradients" if self._gradients else "weights after the step"
            self.whole.note(f"the ranks' losses are neither equal nor parts of a mean or a sum; {what} are right")
        if is_trained or (losses and losses[0].verdict != "bug"):  # between modules, code may keep what it likes
            rows = [_as_private(row) if row.kind == "forward" else row for row in rows]
        if is_trained:
            rows = [self._as_made(row) if row.kind == "buffer" else row for row in rows]
        return [*rows, *self._results()]

    def _is_trained(self, rows: Sequence[ReportRow]) -> bool:
        """Return True if every weight that one device trains in the step has the right gradient, or is right after."""
        whole = self.whole
        judged = [row for row in rows if row.kind in ("gradient", "update")]
        right = {f"{row.module}.{row.tensor}".lstrip(".") for row in judged if row.verdict in ("exact", "rounding")}
        wanted = {
            name
            for name in whole.expected.initial
            if whole.changes(self.number).get(name)
            or ((grad := self.mine.gradients.get(name)) is not None and bool(grad.any()))
        }
        whole.proved |= wanted & right
        unseen = [name for name in whole.expected.initial if name in wanted & right and name not in self._gradients]
        if unseen:
            whole.note(f"the weights after the step are compared, and not the gradients, of {some(unseen)}")
        return bool(wanted) and wanted <= right and first_bug(judged) is None

    def _numbers(self, kind: str) -> Iterator[ReportRow]:
        """Judge what the step reports, which is the same on all ranks."""
        for key, full in self.mine.numbers.items():
            if key[0] == kind:
                bound = bound_of(full, [other.numbers.get(key) for other in self.others])
                parts, mesh = {rank: step.numbers[key] for rank, step in self.theirs.items()}, self.whole.mesh
                found = self.whole.finder.judge(parts).declared(parts, full, bound, mesh(), mesh.alias_name)
                yield _judged_row(ReportRow("", key[1], kind), replace(found, is_coarse=is_coarse(found, full)))

    def _results(self) -> Iterator[ReportRow]:
        """Judge other numbers that all ranks return alike; each may return its own, as it may return its own loss."""
        theirs = self.theirs
        for (kind, title), full in self.mine.numbers.items():
            if kind not in ("float", "tensor"):
                continue
            parts = present({rank: step.numbers.get((kind, title)) for rank, step in theirs.items()})
            moved = [each for each in (other.numbers.get((kind, title)) for other in self.others) if each is not None]
            values = {float(part) for part in parts.values()}
            is_own = kind == "float" and all(torch.equal(each, full) for each in moved)  # e.g. a rate, or a size
            if is_own or len(values) != 1 or len(parts) < len(theirs):
                if values != {float(full)} or len(parts) < len(theirs):
                    self.whole.note(f"{title} is not compared, as ranks return their own, or none")
                continue
            bound = bound_of(full, moved, next(iter(self.whole.expected.initial.values())).dtype)
            found = self.whole.finder.find(parts, full, bound)
            if found.status != "pending" and not is_coarse(found, full):
                yield _judged_row(ReportRow("", title, "forward"), replace(found, suggestion=_DIVIDE_ONCE))

    # -- by name -----------------------------------------------------------------------------------------------------

    def _named(self, kind: str, title: str) -> Iterator[ReportRow]:
        """Judge the gradients, updates or buffers of the step."""
        mine, theirs, names = self.mine, self.theirs, self.whole.names
        full_by_name: dict[str, Any] = getattr(mine, kind)
        named = {rank: self._tensors(kind, rank, step) for rank, step in theirs.items()}
        order = list(full_by_name)
        if kind == "gradients":  # as backward computes them, those of the first optimizer first
            order.reverse()
            order.sort(key=lambda name: mine.turns.get(name, 0))
        scale = max((largest(full) for full in full_by_name.values() if full is not None), default=0.0)
        updates = self.whole.updates_of(self.number) if kind == "updates" else None
        stepped = {rank: self._tensors("stepped", rank, step) for rank, step in theirs.items()}
        held = {rank: names.translated(self.whole.ranks[rank].initial, self.whole.shapes) for rank in theirs}
        for name in order:
            full, module, leaf = full_by_name[name], *split_name(name)
            parts = present({rank: tensors.get(name) for rank, tensors in named.items()})
            row = ReportRow(module, leaf, title)
            if full is None:
                if any(bool(part.count_nonzero()) for part in parts.values()):
                    yield replace(row, verdict="bug", sentence=f"only {ranks_phrase(parts)} have one")
                continue
            having = [rank for rank, tensors in (named if kind != "updates" else held).items() if name in tensors]
            if not parts:
                if kind == "buffers":
                    yield from self._lacking(row, name, full)
                elif having and bool(full.count_nonzero()) and not self._drop_gradients():
                    yield replace(row, verdict="bug", sentence="no rank has one, and one device has")
                continue
            if len(parts) < len(having):
                sentence = f"{ranks_phrase(rank for rank in having if rank not in parts)} has none"
                yield replace(row, verdict="bug", sentence=sentence)
                continue
            moved = [getattr(other, kind).get(name) for other in self.others]
            floor = ROUNDINGS * (self.number + 1) if kind != "gradients" else FEW
            if kind == "gradients":  # as they were before clipping: a wrong norm has a row of its own
                parts = {rank: part / theirs[rank].clipped for rank, part in parts.items()}
                full, clipped = full / mine.clipped, [other.clipped for other in self.others]
                moved = [None if each is None else each / by for each, by in zip(moved, clipped, strict=True)]
            found = self.whole.finder.find(parts, names.ordered(name, full), bound_of(full, moved, floor=floor))
            if kind == "gradients":
                found = self._as_gradient(name, parts, full, found, scale)
            elif updates is not None:
                there = present({rank: tensors.get(name) for rank, tensors in stepped.items()})
                found = self._as_update(name, updates.judged(name, there, found))
            else:
                found = self._as_buffer(name, parts, found)
            yield _judged_row(row, found)

    def _tensors(self, kind: str, rank: int, step: RecordedStep) -> dict[str, Any]:
        """Return a rank's tensors of a kind, by the names of one device."""
        tensors: dict[str, Any] = getattr(step, kind)
        if kind == "buffers":
            return _renamed(tensors, self.whole.paths[rank])
        return self.whole.names.translated(tensors, self.whole.shapes)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _as_gradient(self, name: str, parts: Parts, full: torch.Tensor, found: Finding, scale: float) -> Finding:
        """Complete the finding of a gradient; `scale`: the largest element of all gradients."""
        if found.status == "pending" and self._is_declared_partial(name):
            found = replace(found, status="right")  # the optimizer adds them up
        if found.status == "unexplained":
            found = self._of_another(name, parts, found)
        found = replace(found, is_coarse=is_coarse(found, full, scale))
        self._gradients[name] = replace(found, is_zero=largest(full) <= found.bound)
        return found

    def _is_declared_partial(self, name: str) -> bool:
        """Return True if the gradients of a parameter are `Partial` DTensors, on all ranks that have one."""
        theirs = [each for each, (names, _) in self.whole.names.parts.items() if name in names]
        steps = self.theirs.values()
        return all(each in step.partial for step in steps for each in theirs if each in step.gradients)

    def _drop_gradients(self) -> bool:
        """Return True if a rank has changed a weight in the step, and dropped its gradient."""
        for rank, step in self.theirs.items():
            before = self.whole.ranks[rank].weights(self.number)
            lacking = [name for name, grad in step.gradients.items() if grad is None and name in before]
            if any(not torch.equal(before[name], step.updates[name]) for name in lacking if name in step.updates):
                return True
        return False

    def _of_another(self, name: str, parts: Parts, found: Finding) -> Finding:
        """Explain a gradient that is another parameter's, e.g. by swapped views of a flat buffer."""
        gradients: dict[str, Any] = self.mine.gradients
        for other, full in gradients.items():
            if other == name or full is None or full.shape != gradients[name].shape or not bool(full.any()):
                continue
            same = self.whole.finder.explained(parts, full, max(found.bound, bound_of(full, ())))
            if same is not None and same.status == "right":
                hint = "look at the order in which gradients are put into buffers, and taken out again"
                return replace(found, sentence=f"it is the gradient of {other}", suggestion=hint)
        return found

    def _cause(self, rows: Sequence[ReportRow]) -> tuple[str, str] | None:
        """Return one cause of all gradients that are wrong, and a remedy, if there is one."""
        whole, mine, found = self.whole, self.mine, self._gradients
        odd = [each.status for each in found.values() if each.status != "right"]
        if {*odd} != {"unexplained"} or len(odd) < sum(row.verdict == "bug" for row in rows):
            return None
        fulls = {name: full for name, full in mine.gradients.items() if full is not None and name in found}
        if sum(full.numel() for full in fulls.values()) * len(self.theirs) > _MOST_ELEMENTS:
            return None
        ranks = {}
        for rank, step in self.theirs.items():
            before = whole.ranks[rank].weights(self.number)
            taken, raw, weights = (
                whole.names.translated(each, whole.shapes) for each in (step.gradients, step.raw, before)
            )
            here = {name: full for name, full in fulls.items() if taken.get(name) is not None and name in weights}
            wanted = [whole.part(name, rank, full) for name, full in here.items()]
            if not here or any(part.shape != taken[name].shape for name, part in zip(here, wanted, strict=True)):
                return None
            ranks[rank] = RankGradients(
                _flat(wanted) / mine.clipped,
                _flat(whole.part(name, rank, mine.raw.get(name, torch.nan * full)) for name, full in here.items()),
                _flat(torch.full_like(taken[name], found[name].bound) for name in here),
                _flat(taken[name] for name in here) / step.clipped,
                _flat(raw.get(name, torch.nan * taken[name]) for name in here),
                _flat(weights[name] for name in here),
            )
        return RankGradients.cause_of(ranks, whole.mesh)

    # -- updates -----------------------------------------------------------------------------------------------------

    def _as_update(self, name: str, found: Finding) -> Finding:
        """Complete the finding of an update."""
        found = replace(found, is_coarse=self._is_wide(name, found.bound))
        if found.status in ("wrong", "unexplained") and self.mine.gradients.get(name) is None:
            return self._of_zeros(name, found)
        return found

    def _is_wide(self, name: str, bound: float) -> bool:
        """Return True if a weight whose gradient is not compared may move anywhere within its bound.

        Adam moves a weight by the sign of its gradient, also of one that is zero but for rounding: that is no evidence.
        """
        grad, changes = self.mine.gradients.get(name), self.whole.changes(self.number)
        change = changes.get(name, 0.0)
        if name in self._gradients or bound <= _COARSE * change or change <= _TINY * max(changes.values(), default=0.0):
            return False
        noise = None if grad is None else bound_of(grad, [other.gradients.get(name) for other in self.others])
        return grad is None or noise is None or largest(grad) > noise

    def _of_zeros(self, name: str, found: Finding) -> Finding:
        """Explain an update from a gradient of zeros, of a parameter that has no gradient on one device."""
        named = (self.whole.names.translated(step.gradients, self.whole.shapes) for step in self.theirs.values())
        grads = [tensors[name] for tensors in named if tensors.get(name) is not None]
        if not grads or any(bool(grad.count_nonzero()) for grad in grads):
            return found
        sentence = "one device has no gradient of it, and the ranks one of zeros: their optimizer moves it"
        return replace(found, sentence=sentence, suggestion="leave its grad None on ranks, or fill it on one device")

    # -- buffers -----------------------------------------------------------------------------------------------------

    def _as_buffer(self, name: str, parts: Parts, found: Finding) -> Finding:
        """Pardon statistics of each rank's own rows, and sums that the ranks add up where they use them."""
        if found.status != "right" and self._are_all("statistics", name, parts):
            self.whole.own[name] = None
            return replace(found, status="private")
        if found.status == "pending" and self._are_all("unsaved", name, parts):
            return replace(found, status="right")
        return found

    def _are_all(self, kind: str, name: str, ranks: Collection[int]) -> bool:
        """Return True if a buffer is one of the `statistics`, or of the `unsaved`, on all of some ranks."""
        own = (_renamed(dict.fromkeys(getattr(self.whole.ranks[rank], kind)), self.whole.paths[rank]) for rank in ranks)
        return all(name in each for each in own)

    def _lacking(self, row: ReportRow, name: str, full: torch.Tensor) -> Iterator[ReportRow]:
        """Report a buffer that no rank has by a known name, if the step changes it; else note it."""
        expected = self.whole.expected
        before = expected.steps[self.number - 1].buffers if self.number else expected.buffers
        if name in before and not torch.equal(before[name], full) and name not in expected.statistics:
            sentence = "one device changes it, and no rank has a buffer of that name"
            yield replace(row, verdict="not proved", sentence=sentence, suggestion="the same name on the ranks")
        else:
            self.whole.left[name] = None

    def _as_made(self, row: ReportRow) -> ReportRow:
        """Pardon a buffer that no step changes, e.g. the place where a rank's part of a vocabulary begins."""
        name = f"{row.module}.{row.tensor}".lstrip(".")
        pairs = zip((self.whole.expected, *self.whole.ranks), ({}, *self.whole.paths), strict=True)
        changes = (
            not torch.equal(held[name], before[name])
            for record, paths in pairs
            for before in [_renamed(record.buffers, paths)]
            for held in (_renamed(step.buffers, paths) for step in record.steps)
            if name in before and name in held
        )
        if row.verdict != "bug" or any(changes):
            return row
        self.whole.made[name] = None
        return _as_private(row)


def _renamed(tensors: Mapping[str, Any], paths: Mapping[str, str]) -> dict[str, Any]:
    """Return a rank's buffers by the names of one device's modules, as far as these are known."""
    split = ((*split_name(name), tensor) for name, tensor in tensors.items())
    return {f"{paths.get(module, module)}.{leaf}".lstrip("."): tensor for module, leaf, tensor in split}


def _judged_row(row: ReportRow, found: Finding) -> ReportRow:
    """Return a row with its verdict; parts of a sum are a bug where nothing reduces them any more."""
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


def _blamed(rows: list[ReportRow], cause: tuple[str, str] | None) -> list[ReportRow]:
    """Name in the first wrong loss or gradient the one cause of all wrong gradients."""
    bug = first_bug(rows)
    if bug is None or cause is None or (bug.kind != "gradient" and bug.place != "the model's loss"):
        return rows
    sentence = cause[0] if bug.kind == "gradient" else f"{bug.sentence}; {cause[0]}"
    return [replace(row, sentence=sentence, suggestion=cause[1]) if row is bug else row for row in rows]


def _as_private(row: ReportRow) -> ReportRow:
    return replace(row, verdict="private", sentence="") if row.verdict == "bug" else row


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0), *(each.flatten() for each in tensors)])
