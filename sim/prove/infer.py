"""Which layouts explain what the ranks hold: every split and every pending reduction that the values allow."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import torch

from hyper_parallel.core.dtensor.forms import REDUCTIONS
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.shards import Splits
from sim.prove.candidates import free_axes, pendings, splits_by_shape, to_layout
from sim.prove.evidence import Bound, Evidence, Mesh, Parts, Pending, Worst, read
from sim.prove.fits import Fit, fit, measured
from sim.prove.gaps import combine, divided, gap

__all__ = ["Bound", "Fit", "Mesh", "Parts", "explanations", "fit", "infer_layout"]

LIKELY = ("sum", "avg")
"""The reductions that explain parts; that a maximum or minimum of copies is right can mean that one copy is wrong."""

_SAMPLE = 64


def infer_layout(locals: Parts, reference: torch.Tensor, mesh: Mesh, *, bound: Bound = None) -> list[Layout]:
    """Return every layout that explains what the ranks hold of a whole tensor, the simplest first.

    >>> whole = torch.arange(8.0).reshape(4, 2)
    >>> infer_layout([whole[:2], whole[:2], whole[2:], whole[2:]], whole, "dp=2,tp=2")
    [Layout((2, 2), ('dp', 'tp'))('dp', 'None')]
    >>> infer_layout([whole - 1, whole - 1, torch.ones(4, 2), torch.ones(4, 2)], whole, {"dp": 2, "tp": 2})
    [Layout((2, 2), ('dp', 'tp'))('None', 'None', partial={'dp': 'sum'})]
    >>> infer_layout([whole, whole.flip(0)], whole, "dp=2")  # nothing does
    []

    Values cannot tell everything: zeros are also a sum of zeros, and both layouts are listed. What would be listed for
    any tensor is not: a pending "avg", "max" or "min" of equal copies (a "prod" of equal ones), a reduction of parts
    without elements, a split over an axis of one rank. Sums and averages may be pending over different axes, of other
    reductions only one kind. Costs no communication: it compares each part with its piece of the whole, after a
    comparison of 64 elements that rules out most candidates.

    Args:
        locals: what each rank holds, by rank; the results of `sim.run` are. DTensors count as their local parts.
        reference: the whole tensor, all reductions taken. Other dtypes than the parts' are converted.
        mesh: a `Layout`, whose assignment does not matter, a DeviceMesh, {"dp": 2, "tp": 4} or "dp=2,tp=4".
        bound: how far an element may be off: a number, or a tensor that broadcasts to the reference. Whole numbers
            and booleans must agree exactly, whatever the bound. Default: 8 n u s, where u is the unit roundoff of the
            coarsest dtype, n the number of copies that a pending reduction takes plus one, and s the largest magnitude
            in the reference or, if larger, the sum of the largest magnitudes in the copies. A sum of n terms is off
            by at most (n - 1) u times the sum of their magnitudes (Higham 2002, "Accuracy and Stability of Numerical
            Algorithms", sec. 4.2, to first order in u), once more for the reference's own rounding; 8 is for the
            roundings of the few operations before. So it suits tensors that were moved or reduced; for the results
            of long computations, measure a bound: `sim.prove.bound.deviation`.

    Returns:
        Layouts in alias form, one entry per dim: fewer pending reductions before more, then fewer splits before more,
        then mesh order before others; sums before averages before other reductions.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a rank of the mesh without a tensor, a bound that is negative or does not broadcast, tensors
            without values, text or sizes that make no mesh.
    """
    return [found.layout for found in explanations(locals, reference, mesh, bound, reductions=REDUCTIONS)]


def explanations(
    locals: Parts,
    reference: torch.Tensor,
    mesh: Mesh,
    bound: Bound = None,
    *,
    reductions: Collection[str] = LIKELY,
) -> list[Fit]:
    """Return what `infer_layout` does, with the worst error of each layout and where it is.

    >>> whole = torch.arange(4.0)
    >>> infer_layout([whole, whole + 1], whole, "dp=2")  # true, but a wrong copy is more likely
    [Layout((2,), ('dp',))('None', partial={'dp': 'min'})]
    >>> explanations([whole, whole + 1], whole, "dp=2")
    []

    Args:
        locals, reference, mesh, bound: as for `infer_layout`.
        reductions: which ones may be pending. Default: sums and averages, the only ones that training leaves pending.
    """
    evidence = read("cannot infer a layout", locals, reference, mesh, bound)
    found: list[tuple[Splits, Pending, Worst]] = []
    for splits in splits_by_shape(evidence):
        if not evidence.whole.numel():  # nothing to compare, and nothing to reduce
            found.append((splits, (), (0.0, 0.0, 0)))
            continue
        accepted: list[Pending] = []
        sample = _Sample(evidence, splits)
        for pending in pendings(evidence, sample.free, reductions):
            if any(_follows(evidence, pending, other) for other in accepted) or not sample.allows(pending):
                continue
            worst = evidence.worst(splits, pending, stop=True)
            if worst[1] <= 1:
                accepted.append(pending)
                found.append((splits, pending, worst))
    found.sort(key=lambda each: len(each[1]))  # stable: the rest of the order is that of the search
    return [measured(evidence, to_layout(evidence.mesh, *each[:2]), *each) for each in found]


def _follows(evidence: Evidence, pending: Pending, known: Pending) -> bool:
    """Whether a layout explains the parts only because another does that reduces over fewer axes.

    Where `known` explains them, the copies along the axes that only `pending` has are equal once reduced. The maximum
    of equal copies is no news; and their sum over n ranks, divided as `pending` says, is a known multiple of the
    reference, which is right if that is 1 (or if everything is 0: then pure sums are listed, and no more).
    """
    axes, fewer = {axis for axis, _ in pending}, {axis for axis, _ in known}
    if not fewer < axes:
        return False
    kinds = {kind for _, kind in pending + known}
    if not kinds <= {"sum", "avg"}:
        return len(kinds) == 1
    copies = math.prod(evidence.sizes[axis] for axis in axes - fewer)
    return any(kind == "avg" for _, kind in pending) or (copies * evidence.divisor(known) == evidence.divisor(pending))


class _Sample:
    """A few elements of the ranks that hold the first piece: enough to rule out what is wrong nearly everywhere."""

    def __init__(self, evidence: Evidence, splits: Splits) -> None:
        self.evidence = evidence
        self.free = free_axes(evidence, splits)
        taken = [axis for axes in splits for axis in axes]
        positions = np.arange(math.prod(evidence.sizes)).reshape(evidence.sizes)
        first = positions[tuple(0 if axis in taken else slice(None) for axis in range(positions.ndim))]
        shape = tuple(evidence.parts[0].shape)
        count = math.prod(shape)
        picked = np.linspace(0, max(count - 1, 0), min(count, _SAMPLE)).astype(np.int64)
        at = tuple(map(torch.from_numpy, np.unravel_index(picked, shape))) if shape else ()
        self.want = evidence.whole[at] if at else evidence.whole.reshape(1)
        rows = [evidence.parts[int(place)][at] if at else evidence.parts[int(place)].reshape(1) for place in first.flat]
        wide = torch.float64 if rows[0].dtype.is_floating_point else rows[0].dtype
        self.held = torch.stack(rows).to(wide).reshape(*first.shape, -1)
        # The axes of `held`, one per axis that splits nothing: those of one rank too.
        self.axes = [axis for axis in range(positions.ndim) if axis not in taken]
        limit = evidence.bound
        self.limit = limit[at] if isinstance(limit, torch.Tensor) and at else limit

    def allows(self, pending: Pending) -> bool:
        """Whether the sampled elements, reduced, are within the bound."""
        value = self.held
        for axis, kind in pending:
            value = _reduce(value, self.axes.index(axis), kind)
        limit = self.evidence.limit(pending) if self.limit is None or self.evidence.exact else self.limit
        return bool((gap(value, self.want) <= limit).all())


def _reduce(value: torch.Tensor, dim: int, kind: str) -> torch.Tensor:
    total, *rest = value.split(1, dim)
    for other in rest:
        total = combine(kind, total, other)
    return divided(total, value.shape[dim]) if kind == "avg" else total
