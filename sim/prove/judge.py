"""The verdict on the local tensors of one tensor at a time."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from hyper_parallel.core.dtensor.layout import Layout
from sim.explain.errors import ranks_phrase
from sim.prove.evidence import gap, top
from sim.prove.faults import diagnose
from sim.prove.infer import Fit, explanations, fit
from sim.prove.record import ranks_along, spread_layout
from sim.prove.report import ReportRow

COARSE = "its bound is so wide beside its values that a fault could hide below it"
WIDER = "other inputs, or a larger batch, that make it larger than its rounding; dtype=torch.float64, if it is not"

NOTHING_TRAINED = ReportRow(
    "",
    "weights",
    "update",
    verdict="not proved",
    sentence="no gradient and no update was compared",
    suggestion="a loss that trains the weights; or requires_grad_(False) of all, to compare forward alone",
)
"""The row of a proof in which neither a gradient nor an update tells anything."""

Parts = Mapping[int, torch.Tensor]
_WORDS = {"sum": "a sum", "avg": "an average", "max": "a maximum", "min": "a minimum"}


@dataclass(frozen=True)
class Finding:
    """What the ranks hold of one tensor.

    Args:
        status: "right", "pending" (undeclared, and a reduction explains it), "wrong" (not what was declared),
            "unexplained" (undeclared, and nothing explains it), "absent" (not every rank has it).
        found: the simplest layout that explains the parts.
        declared: the declaration, in words.
        error: worst |difference| in the declared layout, else in the one found.
        ratio: worst |difference| / bound.
        bound: what rounding can do.
        sentence: what is the matter.
        suggestion: what would be right.
        alike: the axes along which all ranks hold the same, to the last bit; looked for where something is odd.
        is_zero: rounding may make all of the tensor.
        is_coarse: the bound is so wide beside the tensor that it proves nothing.
    """

    status: str
    found: Layout | None = None
    declared: str = ""
    error: float = 0.0
    ratio: float = 0.0
    bound: float = 0.0
    sentence: str = ""
    suggestion: str = ""
    alike: tuple[str, ...] = ()
    is_zero: bool = False
    is_coarse: bool = False


class Judge:
    """Compares parts with full tensors; remembers which layouts were found, as the next tensor often has the same.

    Args:
        mesh: the axes of all ranks, or of some that alone have a tensor.
        is_whole: of all.
    """

    def __init__(self, mesh: Layout, *, is_whole: bool = True) -> None:
        self.mesh, self._is_whole = mesh, is_whole
        self._sizes = dict(zip(mesh.alias_name, mesh.mesh_shape, strict=True))
        self._recent: dict[int, list[Layout]] = {}

    def declared(
        self, parts: Mapping[int, torch.Tensor], full: torch.Tensor, bound: float, layout: Layout, known: Sequence[str]
    ) -> Finding:
        """Measure a declared layout, and say what the parts are if it is not true.

        Args:
            parts: what the ranks hold.
            full: what one device holds.
            bound: what rounding can do to an element.
            layout: the declaration.
            known: the axes that it speaks of; over the others any layout will do.
        """
        with suppress(ValueError):  # one entry per dim
            layout = layout.placement_to_tensor_map(full.ndim)
        text = spread_layout(layout, known)
        best: Fit | None = None
        for extended in self._extended(layout, known, full.ndim):
            found = self._fit(parts, full, extended, bound)
            if found is not None and found.fits:
                self._remember(full.ndim, extended)
                return Finding("right", extended, text, found.error, found.ratio, bound)
            best = found if best is None or (found is not None and found.ratio < best.ratio) else best
        if best is None:
            sentence = f"the declaration is for more dims than the tensor's {full.ndim}"
            return Finding("wrong", None, text, math.inf, math.inf, bound, sentence)
        wrong = Finding("wrong", None, text, best.error, best.ratio, bound, f"declared {text}, and {best}")
        return self._explain_wrong(parts, full, layout, known, wrong)

    def undeclared(
        self, parts: Parts, full: torch.Tensor, bound: float, addends: Callable[[], Mapping[str, torch.Tensor]] = dict
    ) -> Finding:
        """Find a layout that explains the parts; pending reductions come last.

        Args:
            parts: what the ranks hold.
            full: what one device holds.
            bound: what rounding can do to an element.
            addends: returns full tensors by name, of which one may have been added once per rank.
        """
        return self.explained(parts, full, bound) or self.unexplained(parts, full, bound, addends())

    def explained(self, parts: Mapping[int, torch.Tensor], full: torch.Tensor, bound: float) -> Finding | None:
        """Find a layout that explains the parts, as `undeclared` does; None if there is none, without a reason."""
        for layout in self._recent.get(full.ndim, []):
            found = self._fit(parts, full, layout, bound)
            if found is not None and found.fits:
                self._remember(full.ndim, layout)
                return Finding("right", layout, "", found.error, found.ratio, bound)
        fits = explanations(parts, full, self.mesh, bound)
        if fits:
            best = fits[0]
            if not best.layout.is_partial():
                self._remember(full.ndim, best.layout)
                return Finding("right", best.layout, "", best.error, best.ratio, bound)
            sentence = f"the ranks hold {pending_words(best.layout)}"
            alike = self._alike(parts)
            return Finding("pending", best.layout, "", best.error, best.ratio, bound, sentence, alike=alike)
        return None

    def _alike(self, parts: Mapping[int, torch.Tensor]) -> tuple[str, ...]:
        """Return the axes along which all ranks hold the same, to the last bit."""
        return tuple(name for name in self._sizes if self._are_copies(parts, name))

    def _are_copies(self, parts: Mapping[int, torch.Tensor], axis: str) -> bool:
        lines = {rank: ranks_along(self.mesh, (axis,), rank)[0] for rank in parts}
        return all(torch.equal(part, parts[lines[rank]]) for rank, part in parts.items())

    def unexplained(
        self,
        parts: Mapping[int, torch.Tensor],
        full: torch.Tensor,
        bound: float,
        addends: Mapping[str, torch.Tensor] | None = None,
    ) -> Finding:
        """Say what is wrong with parts that no layout explains."""
        near = self._nearest(parts, full, bound)
        diagnosis = diagnose(parts, full, self.mesh, bound, addends=addends or {})
        shapes = sorted({tuple(part.shape) for part in parts.values()})
        if diagnosis is not None:
            sentence = diagnosis.sentence
        elif near is None:
            held = ", ".join(map(str, shapes[:4]))
            sentence = f"no layout gives the ranks parts of shape {held} of a tensor of shape {tuple(full.shape)}"
        else:
            agree = all(size == 1 or name in self._alike(parts) for name, size in self._sizes.items())
            who = "all ranks hold the same" if self._is_whole else f"{ranks_phrase(parts)} hold the same"
            who = f"{ranks_phrase(parts)} alone has it" if len(parts) == 1 and not self._is_whole else who
            what = f"{who}, and it is wrong" if agree else "no layout explains what the ranks hold"
            sentence = f"{what}; as {short(near.layout)}, {near}"
        error, ratio = (near.error, near.ratio) if near is not None else (math.inf, math.inf)
        is_more = diagnosis is not None and diagnosis.kind == "added" and (diagnosis.factor or 0) > 0
        hint = "add it once, after the reduction, or a share of it on each rank" if is_more else ""
        return Finding("unexplained", None, "", error, ratio, bound, sentence, hint, self._alike(parts))

    def _explain_wrong(
        self, parts: Parts, full: torch.Tensor, layout: Layout, known: Sequence[str], finding: Finding
    ) -> Finding:
        """Say what the parts are instead of what was declared."""
        fits = explanations(parts, full, self.mesh, bound := finding.bound)
        alike = self._alike(parts)  # equal copies of 1/n are rather divided once too often than parts of a sum
        fits = [each for each in fits if not any(name in alike for name in each.layout.partial)]
        if not fits:
            complete = layout if set(known) == set(self._sizes) else None
            diagnosis = diagnose(parts, full, self.mesh, bound, declared=complete)
            return replace(finding, sentence=diagnosis.sentence) if diagnosis is not None else finding
        found = min(fits, key=lambda each: self._distance(each.layout, layout, known, full.ndim)).layout
        sentences, hints = [], []
        for name in known:
            was, truly = use_of(layout, name, full.ndim), use_of(found, name, full.ndim)
            if was != truly:
                sentences.append(f"declared {was} over {name}, but the ranks hold {_held(found, name, full.ndim)}")
                hints.append(_hint(was, truly, name))
        if not sentences and len(known) < len(self._sizes):  # true, and over the other axes no usual split
            return replace(finding, status="right", found=found, error=0.0, ratio=0.0, sentence="")
        if not sentences:
            sentences = [f"declared {finding.declared}, but the ranks hold {short(found)}"]
        hint = "; or ".join(filter(None, ("; ".join(filter(None, hints)), f"declare {spelling(found)}")))
        return replace(finding, found=found, sentence="; ".join(sentences), suggestion=hint)

    def _distance(self, found: Layout, declared: Layout, known: Sequence[str], ndim: int) -> int:
        return sum(use_of(found, name, ndim) != use_of(declared, name, ndim) for name in known)

    def _nearest(self, parts: Mapping[int, torch.Tensor], full: torch.Tensor, bound: float) -> Fit | None:
        """Return how well the likeliest layout does that at least has the right shapes."""
        best: Fit | None = None
        for layout in [*self._recent.get(full.ndim, []), *self._extended(self.mesh(), (), full.ndim)]:
            found = None if layout.is_partial() else self._fit(parts, full, layout, bound)
            if found is not None and found.problem is None and (best is None or found.ratio < best.ratio):
                best = found
        return best

    def _fit(self, parts: Mapping[int, torch.Tensor], full: torch.Tensor, layout: Layout, bound: float) -> Fit | None:
        try:
            return _close(parts, full, layout, bound) or fit(parts, full, layout, bound)
        except ValueError:  # more entries than dims
            return None

    def _extended(self, layout: Layout, known: Sequence[str], ndim: int) -> list[Layout]:
        """Return the layouts that a declaration allows, where it does not speak of all axes."""
        silent = [name for name, size in self._sizes.items() if name not in known and size > 1]
        if not silent:
            return [layout]
        entries = [_names(entry) for entry in layout.alias_placements or ()]
        entries += [()] * (ndim - len(entries))
        allowed = []
        for uses in itertools.product([None, *range(ndim), "sum", "avg"], repeat=len(silent)):
            split, partial = [list(entry) for entry in entries], dict(layout.partial)
            for name, use in zip(silent, uses, strict=True):
                if isinstance(use, int) and use < len(split):
                    split[use].insert(sum(other in silent for other in split[use]), name)  # outside, in mesh order
                elif isinstance(use, str):
                    partial[name] = use
            made = self.mesh(*(tuple(entry) or None for entry in split), partial=partial)
            allowed.append(made)
        recent = self._recent.get(ndim, [])
        return sorted(allowed, key=lambda each: recent.index(each) if each in recent else len(recent))

    def _remember(self, ndim: int, layout: Layout) -> None:
        if layout.is_partial():
            return
        recent = self._recent.setdefault(ndim, [])
        if layout in recent:
            recent.remove(layout)
        recent.insert(0, layout)


def _close(parts: Mapping[int, torch.Tensor], full: torch.Tensor, layout: Layout, bound: float) -> Fit | None:
    """Return the fit of a layout that explains the parts, in one pass; None: look closer."""
    if layout.is_partial() or not full.is_floating_point():
        return None
    error = 0.0
    for rank, box in zip(layout.rank_list, layout.slices(full.shape).tolist(), strict=True):
        wanted, part = full[tuple(slice(start, stop) for start, stop in box)], parts[rank]
        if part.shape != wanted.shape:
            return None
        if part.numel():
            error = max(error, float(torch.linalg.vector_norm(part - wanted, math.inf)))
        if not error <= bound:  # also where one is not finite
            return None
    return Fit(layout, error, error / bound)


def incomparable(sentence: str, suggestion: str = "", declared: str = "") -> Finding:
    """Return the finding for what is no part of the tensor, or is not there."""
    return Finding("wrong", None, declared, math.inf, math.inf, 0.0, sentence, suggestion)


def within(error: float, bound: float, otherwise: str) -> Finding:
    """Return the finding for parts of which the largest error is known, and what to say where it is too large."""
    is_right = error <= bound
    sentence = "" if is_right else otherwise
    return Finding("right" if is_right else "wrong", None, "", error, error / bound, bound, sentence)


def absent(have: Sequence[int], every: Sequence[int], declared: str = "") -> Finding:
    """Return the finding for a tensor that only some ranks have."""
    lacking = ranks_phrase(rank for rank in every if rank not in have)
    found = incomparable(f"{lacking} did not compute it, {ranks_phrase(have)} did", declared=declared)
    return replace(found, status="absent")


def of_own_rows(found: Finding, given: Layout | None, parts: Mapping[int, torch.Tensor], full: torch.Tensor) -> Finding:
    """Say so where a batch norm takes the mean and the variance of each rank's rows alone.

    Then the mean of what it returns is, of each rank's rows, that of all rows: the bias.
    """
    rows = given.splits(full.ndim)[0] if given is not None and full.ndim > 1 else ()
    if found.status != "unexplained" or not rows or given is None:
        return found
    dims = [dim for dim in range(full.ndim) if dim != 1]
    mean = full.mean(dims)
    if any(
        part.shape[1:] != full.shape[1:] or top(gap(part.mean(dims), mean)) > found.bound for part in parts.values()
    ):
        return found
    axes = " and ".join(given.alias_name[axis] for axis in rows)
    sentence = f"each rank along {axes} normalises with the mean and the variance of its own rows, not of all"
    return replace(found, sentence=sentence, suggestion="nn.SyncBatchNorm.convert_sync_batchnorm(model)")


def of_copies(found: Finding, finer: Finding) -> Finding:
    """Return a finding over a finer mesh, without its layout, if it explains more; axes that it cuts end in numbers."""
    partial = {} if finer.found is None else finer.found.partial
    is_cut = {*partial.values()} == {"sum"} and all(name[-2:] in ("_1", "_2") for name in partial)
    if finer.status != "pending" or not is_cut:
        return replace(finer, found=None) if finer.status == "right" else found
    sentence = "the ranks that have the same part of it hold parts of a sum, and nothing reduced it"
    return replace(found, sentence=sentence, suggestion="an all_reduce over these ranks")


def of_other_rows(found: Finding, parts: Parts, full: torch.Tensor, others: Iterable[Any]) -> Finding:
    """Say which rows of a batch ranks have, where they have not each once, or have rows of another step."""
    if found.status != "unexplained" or not all(each.dim() for each in (full, *parts.values())):
        return found
    rows, held = _rows(full), dict[tuple[Any, ...], list[int]]()
    for rank, part in parts.items():  # copies on several ranks count once
        held.setdefault(tuple(_rows(part)), []).append(rank)
    once, there = Counter(rows), Counter(itertools.chain(*held))
    known = {*rows, *(row for each in others if each is not None and each.dim() for row in _rows(each))}
    if there == once or not {*there} <= known:
        return found
    words = []
    for each, ranks in held.items():
        own, verb = [rows.index(row) for row in each if row in once], "has" if len(ranks) == 1 else "have"
        more = len(each) - len(own)
        some = [f"{ranks_phrase(own).replace('rank', 'row')} of the batch"] * bool(own)
        some += [f"{more} row{'s' * (more > 1)} of another step's batch"] * (more > 0)
        words.append(f"{ranks_phrase(ranks)} {verb} {' and '.join(some)}")
    lost = [rows.index(row) for row in once - there]
    words += [f"no rank has {ranks_phrase(lost).replace('rank', 'row')}"] * bool(lost)
    hint = "each row on one rank: a sampler with the rank and the number of ranks; one seed, epoch and position for all"
    return replace(found, sentence="; ".join(words), suggestion=hint)


def _rows(tensor: torch.Tensor) -> list[tuple[Any, ...]]:
    return [tuple(row.flatten().tolist()) for row in tensor]


def of_unequal_shares(found: Finding, losses: Parts, full: torch.Tensor, inputs: Iterable[Parts]) -> Finding:
    """Explain a loss by unequal shares of ranks, if the mean of their losses, weighed by these, is that of all rows.

    Args:
        found: of the loss.
        losses: of the ranks.
        full: of one device.
        inputs: what each rank has of each input of the model.
    """
    sentence = "neither the mean nor the sum of the ranks' losses is that of the whole batch"
    hint = "each rank takes its loss of its own data: look at what it needs of that of all ranks"
    for held in inputs:
        if len(held) < len(losses) or any(not each.dim() for each in held.values()):
            continue
        counted = {"the rows": {rank: len(each) for rank, each in held.items()}}
        if not any(each.is_floating_point() for each in held.values()):
            counted["the labels that are not -100"] = {rank: int((each != -100).sum()) for rank, each in held.items()}
        for what, shares in counted.items():
            total = sum(shares.values())
            if len(set(shares.values())) == 1 or not total:
                continue
            mean = sum(losses[rank].double() * share for rank, share in shares.items() if rank in losses) / total
            if bool((mean - full).abs() <= 2 * found.bound):
                hint = f"weigh each rank's loss by its share of {what}: a mean over unequal parts is no mean over all"
                return replace(found, sentence=sentence, suggestion=hint)
    return replace(found, sentence=sentence, suggestion=hint)


# -- words -------------------------------------------------------------------------------------------------------------


def short(layout: Layout | None) -> str:
    """Write a layout without its mesh.

    >>> short(Layout((2, 2), ("dp", "tp"))("dp", partial={"tp": "sum"}))
    '(dp) pending sum over tp'
    """
    if layout is None or layout.alias_placements:
        return "" if layout is None else str(layout).partition(" on ")[0]
    pending = ", ".join(f"{kind} over {name}" for name, kind in layout.partial.items())
    return f"replicated pending {pending}" if pending else "replicated"


def use_of(layout: Layout, axis: str, ndim: int) -> str:
    """Say what a layout does with an axis, as torch's placements are written.

    >>> layout = Layout((2, 2), ("dp", "tp"))("None", "dp", partial={"tp": "sum"})
    >>> use_of(layout, "dp", 2), use_of(layout, "tp", 2)
    ('Shard(1)', 'Partial(sum)')
    """
    if axis in layout.partial:
        return f"Partial({layout.partial[axis]})"
    index = layout.alias_name.index(axis)
    for dim, axes in enumerate(layout.splits(ndim)):
        if index in axes:
            return f"Shard({dim})"
    return "Replicate"


def spelling(layout: Layout) -> str:
    """Write a layout as a plan does."""
    if layout.is_partial():
        uses = (use_of(layout, name, len(layout.alias_placements or ())) for name in layout.alias_name)
        return f"({', '.join(uses)})"
    entries = layout.alias_placements or ()
    return repr(entries) if entries else "it replicated"


def pending_words(layout: Layout) -> str:
    """Say which reductions are still to be taken."""
    parts = [f"parts of {_WORDS.get(kind, f'a {kind}')} over {name}" for name, kind in layout.partial.items()]
    return " and ".join(parts)


def _held(found: Layout, axis: str, ndim: int) -> str:
    use = use_of(found, axis, ndim)
    if use == "Replicate":
        return f"the same over {axis}"
    if use.startswith("Partial"):
        return f"parts of {_WORDS.get(found.partial[axis], f'a {found.partial[axis]}')} over {axis}"
    return f"dim {use[6:-1]} split over {axis}"


def _hint(was: str, truly: str, axis: str) -> str:
    if truly.startswith("Partial") and not was.startswith("Partial"):
        op = "an all_reduce" if was == "Replicate" else "a reduce_scatter"
        return f"{op} over {axis} before it"
    if was == "Replicate" and truly.startswith("Shard"):
        return f"an all_gather over {axis} before it"
    if was.startswith("Shard") and truly.startswith("Shard"):
        return f"an all_to_all over {axis} before it"
    return ""


def _names(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    return () if entry == "None" else (entry,) if isinstance(entry, str) else entry


_VERDICTS = dict.fromkeys(("absent", "missing"), "skipped") | dict.fromkeys(("wrong", "unexplained"), "bug")
_VERDICTS |= {"pending": "pending", "private": "private"}

CUT_OFF = "look for what cuts it off: detach, no_grad, a collective in place, gradients that are not synchronised"


# -- from single findings to rows, and to the first place that is to blame ---------------------------------------------


@dataclass
class Judged:
    """One tensor that was judged.

    Attributes:
        module: path of its module.
        tensor: what it is called there.
        kind: as in `ReportRow`.
        finding: what the ranks hold.
        nodes: where it stands in the graph of the model on one device; () where that is not known.
        final: nothing comes after it that could take a reduction.
        given: it has no history of its own, such as a table of constants; its nodes are of what is made with it.
    """

    module: str
    tensor: str
    kind: str
    finding: Finding
    nodes: tuple[Any, ...] = ()
    final: bool = False
    given: bool = False

    @property
    def place(self) -> str:
        """The tensor with its module."""
        return row_of(self).place


def row_of(event: Judged) -> ReportRow:
    """Return what the report says of an event."""
    found = event.finding
    verdict = _VERDICTS.get(found.status) or ("exact" if found.error == 0 else "rounding")
    if found.status == "pending" and event.final:
        verdict = "bug"
    sentence = found.sentence
    hint = found.suggestion
    if found.is_coarse and verdict in ("rounding", "exact"):
        verdict, sentence, hint = "not proved", COARSE, hint or WIDER
    place, numbers = (event.module, event.tensor, event.kind), (found.error, found.bound, found.ratio)
    return ReportRow(*place, found.declared, short(found.found), *numbers, verdict, sentence, hint)


def settle(events: Sequence[Judged], later: Callable[[Judged, Judged], bool]) -> list[ReportRow]:
    """Return the rows of events, forgiving what does no harm, with the place to blame marked as a bug.

    A tensor that nothing explains, and from which something right is computed, is a module's private matter. Where a
    tensor is wrong, and parts of a sum on the way to it were never added up, those are to blame. They were added up, in
    whatever way, where all ranks came to hold the same.

    Args:
        events: in the order in which they happen.
        later: whether the second of two events is computed from the first.
    """
    rows = [row_of(event) for event in events]
    # What is zero, but for rounding, comes out right whatever went wrong before it.
    speaks = [not event.finding.is_zero and not event.given for event in events]
    right = [at for at, event in enumerate(events) if event.finding.status == "right" and speaks[at]]
    ends = [event.finding.status for event in events if event.final]
    ends_well = bool(ends) and all(status == "right" for status in ends)
    for at, event in enumerate(events):
        healed = (
            event.finding.status == "unexplained"
            and not event.final
            and (any(other > at and later(event, events[other]) for other in right) if event.nodes else ends_well)
        )
        if healed:
            rows[at] = replace(rows[at], verdict="private", suggestion="")
    bug = next((at for at, row in enumerate(rows) if row.verdict == "bug"), None)
    if bug is None:
        return rows
    if not rows[bug].suggestion:
        rows[bug] = replace(rows[bug], suggestion=_window(events, bug, later))
    for at in range(bug):
        if rows[at].verdict not in ("pending", "skipped") or not later(events[at], events[bug]):
            continue
        if any(at < other and later(events[at], events[other]) for other in right):
            continue
        reduced = [e for e in range(at, bug + 1) if _was_reduced(events[at], events[e])]
        reduced = [e for e in reduced if e == bug or (later(events[at], events[e]) and later(events[e], events[bug]))]
        if not reduced:
            rows[at] = _to_blame(events[at], rows[at], events[bug])
        elif reduced[0] != bug:
            rows[reduced[0]] = _divided(rows[reduced[0]], events[reduced[0]], events[bug])
        break
    return rows


def _window(events: Sequence[Judged], bug: int, later: Callable[[Judged, Judged], bool]) -> str:
    """Say where to look: from the last right tensor that leads to the wrong one."""
    harmed = events[bug]
    before = [
        event
        for event in events[:bug]
        if event.finding.status == "right"
        and (later(event, harmed) or (event.module == harmed.module and event.tensor.startswith("input")))
    ]
    last = next((event for event in reversed(before) if not event.finding.is_zero), before[-1] if before else None)
    return f"look at what is computed from {last.place}, which is right, to this" if last is not None else ""


def _was_reduced(event: Judged, other: Judged) -> bool:
    """Whether all ranks hold the same of a tensor, along the axes along which another one is pending."""
    found = event.finding.found
    return found is not None and found.is_partial() and set(found.partial) <= set(other.finding.alike)


def divided_words(layout: Layout) -> tuple[str, str]:
    """Say of equal copies that would be right if they were added up what is the matter, and what to do.

    >>> divided_words(Layout((2,), ("dp",))(partial={"dp": "sum"}))[0]
    "every part is 1/2 of what it should be: averaged once too often over 'dp'"
    """
    axes = " and ".join(layout.partial)
    copies = math.prod(layout.mesh_shape[layout.alias_name.index(name)] for name in layout.partial)
    sentence = f"every part is 1/{copies} of what it should be: averaged once too often over {axes!r}"
    return sentence, f"the sum over {axes} there, and no mean or division"


def _divided(row: ReportRow, event: Judged, harmed: Judged) -> ReportRow:
    """Blame equal copies that would be right if they were added up."""
    found = event.finding.found
    assert found is not None
    sentence, hint = divided_words(found)
    return replace(row, verdict="bug", sentence=f"{sentence}; and {harmed.place} is wrong", suggestion=hint)


def _to_blame(event: Judged, row: ReportRow, harmed: Judged) -> ReportRow:
    found = event.finding.found
    if event.finding.status != "pending" or found is None:
        hint = CUT_OFF if event.kind == "gradient" else row.suggestion
        if event.finding.status == "absent" and event.kind == "forward":
            called = f"{event.module or 'the model'} on all ranks"
            hint = f"call {called}; or, if each has modules of its own, look at how {harmed.place} is made of all"
        sentence = f"{event.finding.sentence}, and {harmed.place} is wrong"
        return replace(row, verdict="bug", sentence=sentence, suggestion=hint)
    axes = " and ".join(found.partial)
    op = "all_reduce (or reduce_scatter)"
    sentence = f"the ranks hold {pending_words(found)}, and nothing reduced it before {harmed.place}"
    how = "in the backward of its module" if event.kind == "gradient" else "after its module"
    return replace(row, verdict="bug", sentence=sentence, suggestion=f"{op} over {axes} {how}")


_ADVICE = {
    "parameter": "look at how the ranks make, load or split it",
    "buffer": "a broadcast of it, or the same change on all ranks",
    "forward": "look at what the ranks are given",
    "gradient": "look at the loss, and at whether the ranks' losses are added up or averaged",
}
_STEP = re.compile(r" (?:after|in) step (\d+)$")


def advised(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """Return the rows with advice in the first that is a bug, where nobody knows anything better."""
    bug = first_bug(rows)
    if bug is None or bug.suggestion:
        return list(rows)
    step = _STEP.search(bug.tensor)
    if bug.kind == "update":
        advice = _of_update(rows, bug)
    elif step is not None and int(step[1]) > 1 and bug.kind in ("forward", "gradient"):
        advice = f"step {int(step[1]) - 1} is right: look at what it leaves for the next, in buffers or in the program"
    else:
        advice = _ADVICE.get(bug.kind, "")
    return [replace(row, suggestion=advice) if row is bug else row for row in rows]


def _of_update(rows: Sequence[ReportRow], bug: ReportRow) -> str:
    """Say where to look for the fault of an update: at the optimizer only where its gradients are proved."""
    gradients, step = [row for row in rows if row.kind == "gradient"], _STEP.search(bug.tensor)
    tensor = _STEP.sub("", bug.tensor)
    tensor += f" in step {step[1]}" if step is not None and int(step[1]) > 1 else ""
    own = [row for row in gradients if (row.module, row.tensor) == (bug.module, tensor)]
    unproved = next((row for row in gradients if row.verdict == "not proved"), None)
    if unproved is not None:
        return f"look at {unproved.place} first, which is not proved"
    if any(row.verdict in ("exact", "rounding") for row in own):
        return "its gradient is right: look at what the optimizer does on each rank"
    return "look at its gradient, and at what the optimizer does on each rank"


def first_bug(rows: Iterable[ReportRow]) -> ReportRow | None:
    """Return the first row that is a bug."""
    return next((row for row in rows if row.verdict == "bug"), None)


class AutogradGraph:
    """What is computed from what, in autograd's graph of the model on one device.

    A node's ancestors are found once, and only for nodes that somebody asks about.
    """

    def __init__(self) -> None:
        self._known: dict[Any, frozenset[Any]] = {}

    def depends(self, node: Any, on: Any) -> bool:
        """Whether a node's value is computed from another's."""
        return on in self.before(node)

    def before(self, node: Any) -> frozenset[Any]:
        """Return the node and everything that it is computed from; leaves stand for themselves."""
        found = self._known.get(node)
        if found is None:
            seen, stack = {node}, [node]
            while stack:
                for earlier, _ in stack.pop().next_functions:
                    if earlier is not None and earlier not in seen:
                        seen.add(earlier)
                        stack.append(earlier)
            leaves = {getattr(each, "variable", None) for each in seen}
            found = self._known[node] = frozenset([*seen, *(id(leaf) for leaf in leaves if leaf is not None)])
        return found

    def forward(self, earlier: Judged, later: Judged) -> bool:
        """Whether the later tensor is computed from the earlier one."""
        return any(self.depends(node, on) for node in later.nodes for on in earlier.nodes if not isinstance(node, int))

    def backward(self, earlier: Judged, later: Judged) -> bool:
        """Whether the later gradient is computed from the earlier one."""
        return any(self.depends(node, on) for node in earlier.nodes for on in later.nodes if not isinstance(node, int))


def split_name(name: str) -> tuple[str, str]:
    """Return the module of a parameter or buffer, and its name there."""
    module, _, tensor = name.rpartition(".")
    return module, tensor


def innermost(places: Sequence[tuple[str, str, str]]) -> tuple[str, str, str]:
    """Of the boundaries at which one gradient was seen, return the one that says best who computed it.

    That is the input of the innermost module, or, where several modules share it, whatever gave it to them.

    >>> innermost([("", "output", ""), ("mlp", "input", "0"), ("mlp.up", "input", "0")])
    ('mlp.up', 'input', '0')
    """
    inputs = [place for place in places if place[1] == "input"] or list(places)
    depth = max(path.count(".") for path, *_ in inputs)
    deepest = [place for place in inputs if place[0].count(".") == depth]
    return deepest[0] if len(deepest) == 1 else places[0]
