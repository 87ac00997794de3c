"""How well a layout explains what the ranks hold: the worst difference from the whole tensor, against a bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.shards import Splits, all_slices
from sim.prove.evidence import Bound, Evidence, Parts, Pending, Worst, read, read_mesh
from sim.prove.gaps import gap, ratios, unit_roundoff

__all__ = ["Fit", "fit", "gap", "measured", "read_mesh", "unit_roundoff"]


@dataclass(frozen=True)
class Fit:
    """How well one layout explains what the ranks hold.

    Args:
        layout: the layout.
        error: the worst |difference| from the whole tensor; inf where only one of the two is finite.
        ratio: the worst |difference| / bound; the layout explains the parts when it is 1 or less.
        rank: who holds the worst element; of copies that were reduced first, the first rank.
        index: where the worst element is in the whole tensor; None, as rank is, if nothing differs.
        seen: what the ranks hold there, reduced where a reduction is pending.
        expected: what the whole tensor holds there.
        problem: why nothing could be compared, such as a part of another shape.
    """

    layout: Layout
    error: float
    ratio: float
    rank: int | None = None
    index: tuple[int, ...] | None = None
    seen: complex | float | None = None
    expected: complex | float | None = None
    problem: str | None = None

    @property
    def fits(self) -> bool:
        """Whether the layout explains what the ranks hold."""
        return self.problem is None and self.ratio <= 1

    def __str__(self) -> str:
        if self.problem is not None:
            return self.problem
        if self.index is None or self.ratio == 0:
            return "equal"
        place = f"rank {self.rank} holds {self.seen:.6g} at {self.index}, not {self.expected:.6g}"
        return f"{place}: off by {self.error:.2e}, {self.ratio:.2g} x the bound"


def fit(locals: Parts, reference: torch.Tensor, layout: Layout, bound: Bound = None) -> Fit:
    """Measure how well one layout explains what the ranks hold; pending reductions are taken first.

    >>> dp = Layout((2,), ("dp",))
    >>> whole = torch.tensor([1.0, 2.0])
    >>> print(fit([torch.tensor([1.0]), torch.tensor([2.5])], whole, dp("dp")))
    rank 1 holds 2.5 at (1,), not 2: off by 5.00e-01, 2.6e+05 x the bound
    >>> print(fit([whole, whole], whole, dp("dp")))
    rank 0 holds shape (2,) where dp gives it (1,)

    Args:
        locals: what each rank holds, by rank.
        reference: the whole tensor.
        layout: who should hold what.
        bound: as for `infer_layout`.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a layout without an assignment or with more entries than dims, a rank without a tensor.
    """
    evidence = read("cannot compare parts with a whole tensor", locals, reference, layout, bound)
    splits = layout.splits(evidence.whole.ndim)
    names = layout.alias_name
    pending = tuple((names.index(name), kind) for name, kind in layout.partial.items())
    kinds = {kind for axis, kind in pending if evidence.sizes[axis] > 1}
    if len(kinds) > 1 and not kinds <= {"sum", "avg"}:
        problem = f"{' and '.join(sorted(kinds))} are pending, and the order in which to take them is nowhere said"
        return Fit(layout, math.inf, math.inf, problem=problem)
    pending = tuple((axis, kind) for axis, kind in pending if evidence.sizes[axis] > 1)
    boxes = all_slices(evidence.whole.shape, evidence.sizes, splits)
    shapes = (boxes[..., 1] - boxes[..., 0]).tolist()
    for rank, part, shape in zip(evidence.ranks, evidence.parts, shapes, strict=True):
        if tuple(part.shape) != tuple(shape):
            short = str(layout).partition(" on ")[0].removeprefix("(").replace(")", "", 1)
            problem = (
                f"rank {rank} holds shape {tuple(part.shape)} where {short or 'the layout'} gives it {tuple(shape)}"
            )
            return Fit(layout, math.inf, math.inf, rank, problem=problem)
    return measured(evidence, layout, splits, pending, evidence.worst(splits, pending))


def measured(evidence: Evidence, layout: Layout, splits: Splits, pending: Pending, worst: Worst) -> Fit:
    """Find the element with the worst difference, of parts that have the right shapes."""
    error, ratio, where = worst
    if ratio == 0:
        return Fit(layout, error, ratio)
    limit = evidence.limit(pending)
    group = next(group for group in evidence.groups(pending).tolist() if group[0] == where)
    box = evidence.box(all_slices(evidence.whole.shape, evidence.sizes, splits), where)
    part = evidence.reduced(group, pending)
    off = gap(part, evidence.whole[box])
    off = ratios(off, limit[box]) if isinstance(limit, torch.Tensor) else off
    at = tuple(int(i) for i in np.unravel_index(int(off.argmax()), tuple(off.shape)))
    index = tuple(i + piece.start for i, piece in zip(at, box, strict=True))
    return Fit(layout, error, ratio, evidence.ranks[where], index, part[at].item(), evidence.whole[index].item())
