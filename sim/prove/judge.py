"""Whether the parts that the ranks hold are what they should be, of one tensor at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from hyper_parallel.core.dtensor.layout import Layout
from sim.errors import ranks_phrase
from sim.prove.diagnose import diagnose
from sim.prove.fits import Fit, fit
from sim.prove.infer import explanations
from sim.prove.record import ranks_along, spread_layout

__all__ = ["Finding", "Judge", "short", "spelling", "use_of"]

_WORDS = {
    "sum": "parts of a sum",
    "avg": "parts of an average",
    "max": "parts of a maximum",
    "min": "parts of a minimum",
}


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


class Judge:
    """Compares parts with whole tensors; remembers which layouts were found, as the next tensor often has the same.

    Args:
        mesh: the axes of all ranks.
    """

    def __init__(self, mesh: Layout) -> None:
        self.mesh = mesh
        self._sizes = dict(zip(mesh.alias_name, mesh.mesh_shape, strict=True))
        self._recent: dict[int, list[Layout]] = {}

    def declared(
        self, parts: Mapping[int, torch.Tensor], whole: torch.Tensor, bound: float, layout: Layout, known: Sequence[str]
    ) -> Finding:
        """Measure a declared layout, and say what the parts are if it is not true.

        Args:
            parts: what the ranks hold.
            whole: what one device holds.
            bound: what rounding can do to an element.
            layout: the declaration.
            known: the axes that it speaks of; over the others any layout will do.
        """
        with suppress(ValueError):  # one entry per dim
            layout = layout.placement_to_tensor_map(whole.ndim)
        text = spread_layout(layout, known)
        best: Fit | None = None
        for full in self._extended(layout, known, whole.ndim):
            found = self._fit(parts, whole, full, bound)
            if found is not None and found.fits:
                self._remember(whole.ndim, full)
                return Finding("right", full, text, found.error, found.ratio, bound)
            best = found if best is None or (found is not None and found.ratio < best.ratio) else best
        if best is None:
            sentence = f"the declaration is for more dims than the tensor's {whole.ndim}"
            return Finding("wrong", None, text, math.inf, math.inf, bound, sentence)
        return self._explain_wrong(
            parts,
            whole,
            bound,
            layout,
            known,
            Finding("wrong", None, text, best.error, best.ratio, bound, f"declared {text}, and {best}"),
        )

    def undeclared(
        self,
        parts: Mapping[int, torch.Tensor],
        whole: torch.Tensor,
        bound: float,
        addends: Callable[[], Mapping[str, torch.Tensor]] = dict,
    ) -> Finding:
        """Find a layout that explains the parts; pending reductions come last.

        Args:
            parts: what the ranks hold.
            whole: what one device holds.
            bound: what rounding can do to an element.
            addends: returns whole tensors by name, of which one may have been added once per rank.
        """
        for layout in self._recent.get(whole.ndim, []):
            found = self._fit(parts, whole, layout, bound)
            if found is not None and found.fits:
                self._remember(whole.ndim, layout)
                return Finding("right", layout, "", found.error, found.ratio, bound)
        fits = explanations(parts, whole, self.mesh, bound)
        if fits:
            best = fits[0]
            if not best.layout.is_partial():
                self._remember(whole.ndim, best.layout)
                return Finding("right", best.layout, "", best.error, best.ratio, bound)
            sentence = f"the ranks hold {pending_words(best.layout)}"
            alike = self._alike(parts)
            return Finding("pending", best.layout, "", best.error, best.ratio, bound, sentence, alike=alike)
        return self._unexplained(parts, whole, bound, addends())

    def _alike(self, parts: Mapping[int, torch.Tensor]) -> tuple[str, ...]:
        """Return the axes along which all ranks hold the same, to the last bit."""
        return tuple(name for name in self._sizes if self._are_copies(parts, name))

    def _are_copies(self, parts: Mapping[int, torch.Tensor], axis: str) -> bool:
        lines = {rank: ranks_along(self.mesh, (axis,), rank)[0] for rank in parts}
        return all(torch.equal(part, parts[lines[rank]]) for rank, part in parts.items())

    def _unexplained(
        self,
        parts: Mapping[int, torch.Tensor],
        whole: torch.Tensor,
        bound: float,
        addends: Mapping[str, torch.Tensor],
    ) -> Finding:
        near = self._nearest(parts, whole, bound)
        told = diagnose(parts, whole, self.mesh, bound, addends=addends)
        shapes = sorted({tuple(part.shape) for part in parts.values()})
        if told is not None:
            sentence = told.sentence
        elif near is None:
            held = ", ".join(map(str, shapes[:4]))
            sentence = f"no layout gives the ranks parts of shape {held} of a tensor of shape {tuple(whole.shape)}"
        else:
            agree = all(size == 1 or name in self._alike(parts) for name, size in self._sizes.items())
            what = "all ranks hold the same, and it is wrong" if agree else "no layout explains what the ranks hold"
            sentence = f"{what}; as {short(near.layout)}, {near}"
        error, ratio = (near.error, near.ratio) if near is not None else (math.inf, math.inf)
        return Finding("unexplained", None, "", error, ratio, bound, sentence, alike=self._alike(parts))

    def _explain_wrong(
        self,
        parts: Mapping[int, torch.Tensor],
        whole: torch.Tensor,
        bound: float,
        layout: Layout,
        known: Sequence[str],
        finding: Finding,
    ) -> Finding:
        """Say what the parts are instead of what was declared."""
        fits = explanations(parts, whole, self.mesh, bound)
        alike = self._alike(parts)  # equal copies of 1/n are rather divided once too often than parts of a sum
        fits = [each for each in fits if not any(name in alike for name in each.layout.partial)]
        if not fits:
            full = layout if set(known) == set(self._sizes) else None
            told = diagnose(parts, whole, self.mesh, bound, declared=full)
            return replace(finding, sentence=told.sentence) if told is not None else finding
        found = min(fits, key=lambda each: self._distance(each.layout, layout, known, whole.ndim)).layout
        sentences, hints = [], []
        for name in known:
            was, truly = use_of(layout, name, whole.ndim), use_of(found, name, whole.ndim)
            if was != truly:
                sentences.append(f"declared {was} over {name}, but the ranks hold {_held(found, name, whole.ndim)}")
                hints.append(_hint(was, truly, name))
        if not sentences and len(known) < len(self._sizes):  # true, and over the other axes no usual split
            return replace(finding, status="right", found=found, error=0.0, ratio=0.0, sentence="")
        if not sentences:
            sentences = [f"declared {finding.declared}, but the ranks hold {short(found)}"]
        hint = "; ".join(hint for hint in hints if hint)
        spelled = f"declare {spelling(found)}"
        return replace(
            finding,
            found=found,
            sentence="; ".join(sentences),
            suggestion=f"{hint}; or {spelled}" if hint else spelled,
        )

    def _distance(self, found: Layout, declared: Layout, known: Sequence[str], ndim: int) -> int:
        return sum(use_of(found, name, ndim) != use_of(declared, name, ndim) for name in known)

    def _nearest(self, parts: Mapping[int, torch.Tensor], whole: torch.Tensor, bound: float) -> Fit | None:
        """Return how well the likeliest layout does that at least has the right shapes."""
        best: Fit | None = None
        for layout in [*self._recent.get(whole.ndim, []), *self._extended(self.mesh(), (), whole.ndim)]:
            found = None if layout.is_partial() else self._fit(parts, whole, layout, bound)
            if found is not None and found.problem is None and (best is None or found.ratio < best.ratio):
                best = found
        return best

    def _fit(self, parts: Mapping[int, torch.Tensor], whole: torch.Tensor, layout: Layout, bound: float) -> Fit | None:
        try:
            return _close(parts, whole, layout, bound) or fit(parts, whole, layout, bound)
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


def _close(parts: Mapping[int, torch.Tensor], whole: torch.Tensor, layout: Layout, bound: float) -> Fit | None:
    """Return the fit of a layout that explains the parts, in one pass; None: look closer."""
    if layout.is_partial() or not whole.is_floating_point():
        return None
    error = 0.0
    for rank, box in zip(layout.rank_list, layout.slices(whole.shape).tolist(), strict=True):
        wanted, part = whole[tuple(slice(start, stop) for start, stop in box)], parts[rank]
        if part.shape != wanted.shape:
            return None
        if part.numel():
            error = max(error, float(torch.linalg.vector_norm(part - wanted, math.inf)))
        if not error <= bound:  # also where one is not finite
            return None
    return Fit(layout, error, error / bound)


def absent(have: Sequence[int], every: Sequence[int], declared: str = "") -> Finding:
    """Return the finding for a tensor that only some ranks have."""
    lacking = ranks_phrase(rank for rank in every if rank not in have)
    return Finding(
        "absent",
        declared=declared,
        error=math.inf,
        ratio=math.inf,
        sentence=f"{lacking} did not compute it, {ranks_phrase(have)} did",
    )


# -- words -------------------------------------------------------------------------------------------------------------


def short(layout: Layout | None) -> str:
    """Write a layout without its mesh.

    >>> short(Layout((2, 2), ("dp", "tp"))("dp", partial={"tp": "sum"}))
    '(dp) pending sum over tp'
    """
    return (
        ""
        if layout is None
        else str(layout).partition(" on ")[0]
        if layout.alias_placements
        else "replicated"
        + (
            f" pending {', '.join(f'{kind} over {name}' for name, kind in layout.partial.items())}"
            if layout.partial
            else ""
        )
    )


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
        return (
            "("
            + ", ".join(use_of(layout, name, len(layout.alias_placements or ())) for name in layout.alias_name)
            + ")"
        )
    entries = layout.alias_placements or ()
    return repr(entries) if entries else "it replicated"


def pending_words(layout: Layout) -> str:
    """Say which reductions are still to be taken."""
    told = [f"{_WORDS.get(kind, f'parts of a {kind}')} over {name}" for name, kind in layout.partial.items()]
    return " and ".join(told)


def _held(found: Layout, axis: str, ndim: int) -> str:
    use = use_of(found, axis, ndim)
    if use == "Replicate":
        return f"the same over {axis}"
    if use.startswith("Partial"):
        return f"{_WORDS.get(found.partial[axis], f'parts of a {found.partial[axis]}')} over {axis}"
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
