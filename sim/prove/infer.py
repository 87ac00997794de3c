"""The layouts that explain the local tensors: every sharding and pending reduction that the values allow."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, permutations, product
from typing import TypeAlias

import numpy as np
import torch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.ownership import Splits, count_parts, split_points
from hyper_parallel.core.dtensor.spelling import REDUCTIONS
from sim.prove.evidence import (
    Bound,
    Evidence,
    Mesh,
    Parts,
    Pending,
    Worst,
    all_boxes,
    combine,
    divided,
    gap,
    ratios,
    read,
    top,
)


def submesh(mesh: Layout, ranks: Sequence[int]) -> Layout:
    """Return the mesh of some of its ranks: the axes that they span; one axis where they span no block.

    >>> submesh(Layout((2, 2), ("pp", "tp")), [2, 3])
    Layout((2,), ('tp',), range(2, 4))
    """
    ranks = sorted(ranks)
    if len(ranks) == len(mesh.rank_list):
        return mesh
    places = dict(zip(mesh.rank_list, product(*map(range, mesh.mesh_shape)), strict=True))
    spans = [sorted({places[rank][axis] for rank in ranks}) for axis in range(len(mesh.mesh_shape))]
    if math.prod(map(len, spans)) != len(ranks):
        return Layout((len(ranks),), ("ranks",), rank_list=tuple(ranks))
    axes = [(name, len(span)) for name, span in zip(mesh.alias_name, spans, strict=True) if len(span) > 1]
    axes = axes or [("ranks", 1)]
    return Layout(tuple(size for _, size in axes), tuple(name for name, _ in axes), rank_list=tuple(ranks))


def split_axes(mesh: Layout, part: torch.Tensor, full: torch.Tensor) -> Iterator[Layout]:
    """Yield meshes with an axis cut in two, where a dim is in as many parts, e.g. 2 heads of keys over 4 ranks of tp.

    >>> list(split_axes(Layout((4,), ("tp",)), torch.ones(1), torch.ones(2)))
    [Layout((2, 2), ('tp_1', 'tp_2'))]
    """
    counts = {size // held for size, held in zip(full.shape, part.shape, strict=False) if held}
    for at, (name, size) in enumerate(zip(mesh.alias_name, mesh.mesh_shape, strict=True)):
        for outer in (each for each in range(2, size) if size % each == 0 and {each, size // each} & counts):
            shape = (*mesh.mesh_shape[:at], outer, size // outer, *mesh.mesh_shape[at + 1 :])
            names = (*mesh.alias_name[:at], f"{name}_1", f"{name}_2", *mesh.alias_name[at + 1 :])
            yield Layout(shape, names, rank_list=mesh.rank_list)


def splits_by_shape(evidence: Evidence) -> list[Splits]:
    """Return every way to split the full tensor that gives each rank a part of the shape that it holds.

    Fewer splitting axes come first, then mesh order; axes of one rank split nothing. Each dim is looked at by itself,
    so four axes cost at most 65 ordered choices per dim, of which nearly all fail on the size of one part: rank 0 of
    the mesh holds ceil(size / product of the axes), however they are ordered.
    """
    shape, sizes = tuple(evidence.full.shape), evidence.sizes
    if any(part.ndim != len(shape) for part in evidence.parts):
        return []
    held = np.array([tuple(part.shape) for part in evidence.parts], dtype=np.int64).reshape(*sizes, len(shape))
    large = [axis for axis, size in enumerate(sizes) if size > 1]
    choices = list(chain.from_iterable(permutations(large, count) for count in range(len(large) + 1)))
    per_dim: list[list[tuple[int, ...]]] = []
    for dim, size in enumerate(shape):
        first = int(evidence.parts[0].shape[dim])
        likely = [axes for axes in choices if -(-size // count_parts(sizes, axes)) == first]
        per_dim.append([axes for axes in likely if _gives(size, sizes, axes, held[..., dim])])
    return sorted(_disjoint(per_dim), key=_simplicity)


def free_axes(evidence: Evidence, splits: Splits) -> list[int]:
    """Return the axes of several ranks that split no dim."""
    taken = [axis for axes in splits for axis in axes]
    return [axis for axis, size in enumerate(evidence.sizes) if size > 1 and axis not in taken]


def pendings(evidence: Evidence, axes: Sequence[int], reductions: Collection[str]) -> Iterator[Pending]:
    """Yield the reductions that could be pending over some of these axes: none, then over few, then over many.

    Sums and averages commute, so each axis may have either; of the others all axes have the same.
    """
    yield ()
    dtype = evidence.full.dtype
    if not evidence.full.numel() or dtype == torch.bool:
        return  # nothing is there to reduce
    linear = [kind for kind in ("sum", "avg") if kind in reductions]
    others = [kind for kind in ("max", "min", "prod") if kind in reductions and not dtype.is_complex]
    for count in range(1, len(axes) + 1):
        chosen = list(combinations(axes, count))
        for some in chosen:
            yield from (tuple(zip(some, kinds, strict=True)) for kinds in product(linear, repeat=count))
        yield from (tuple((axis, kind) for axis in some) for kind in others for some in chosen)


def to_layout(mesh: Layout, splits: Splits, pending: Pending) -> Layout:
    """Write splits and reductions as a layout in alias form."""
    names = mesh.alias_name
    entries = [tuple(names[axis] for axis in axes) for axes in splits]
    partial = {names[axis]: kind for axis, kind in pending}
    return mesh(*("None" if not e else e[0] if len(e) == 1 else e for e in entries), partial=partial)


def _gives(size: int, sizes: tuple[int, ...], axes: tuple[int, ...], held: np.ndarray) -> bool:
    """Whether these axes, outer first, cut a dim into the lengths that the ranks hold."""
    start, stop = split_points(size, sizes, axes)
    order = sorted(range(len(axes)), key=lambda place: axes[place])
    broad = [sizes[axis] if axis in axes else 1 for axis in range(len(sizes))]
    return bool(((stop - start).transpose(order).reshape(broad) == held).all())


def _disjoint(per_dim: Sequence[Sequence[tuple[int, ...]]], taken: tuple[int, ...] = ()) -> Iterator[Splits]:
    if not per_dim:
        yield ()
        return
    for axes in per_dim[0]:
        if not set(axes) & set(taken):
            yield from ((axes, *rest) for rest in _disjoint(per_dim[1:], taken + axes))


def _simplicity(splits: Splits) -> tuple[object, ...]:
    several = sum(len(axes) > 1 for axes in splits)
    disorder = sum(list(axes) != sorted(axes) for axes in splits)
    return sum(map(len, splits)), disorder, several, splits


# -- how well a layout fits: the worst difference from the full tensor, against a bound --------------------------------


@dataclass(frozen=True)
class Fit:
    """How well one layout explains what the ranks hold.

    Args:
        layout: the layout.
        error: the worst |difference| from the full tensor; inf where only one of the two is finite.
        ratio: the worst |difference| / bound; the layout explains the parts when it is 1 or less.
        rank: who holds the worst element; of copies that were reduced first, the first rank.
        index: where the worst element is in the full tensor; None, as rank is, if nothing differs.
        seen: what the ranks hold there, reduced where a reduction is pending.
        expected: what the full tensor holds there.
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
    >>> full = torch.tensor([1.0, 2.0])
    >>> print(fit([torch.tensor([1.0]), torch.tensor([2.5])], full, dp("dp")))
    rank 1 holds 2.5 at (1,), not 2: off by 5.00e-01, 2.6e+05 x the bound
    >>> print(fit([full, full], full, dp("dp")))
    rank 0 holds shape (2,) where dp gives it (1,)

    Args:
        locals: what each rank holds, by rank.
        reference: the full tensor.
        layout: who should hold what.
        bound: as for `infer_layout`.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a layout without an assignment or with more entries than dims, a rank without a tensor.
    """
    evidence = read("cannot compare parts with a full tensor", locals, reference, layout, bound)
    splits = layout.splits(evidence.full.ndim)
    names = layout.alias_name
    pending = tuple((names.index(name), kind) for name, kind in layout.partial.items())
    kinds = {kind for axis, kind in pending if evidence.sizes[axis] > 1}
    if len(kinds) > 1 and not kinds <= {"sum", "avg"}:
        problem = f"{' and '.join(sorted(kinds))} are pending, and the order in which to take them is nowhere said"
        return Fit(layout, math.inf, math.inf, problem=problem)
    pending = tuple((axis, kind) for axis, kind in pending if evidence.sizes[axis] > 1)
    shapes = np.diff(all_boxes(evidence.full.shape, evidence.sizes, splits))[..., 0].tolist()
    for rank, part, shape in zip(evidence.ranks, evidence.parts, shapes, strict=True):
        if tuple(part.shape) != tuple(shape):
            short = str(layout).partition(" on ")[0].removeprefix("(").replace(")", "", 1) or "the layout"
            problem = f"rank {rank} holds shape {tuple(part.shape)} where {short} gives it {tuple(shape)}"
            return Fit(layout, math.inf, math.inf, rank, problem=problem)
    return measured(evidence, layout, splits, pending, evidence.worst(splits, pending))


def measured(evidence: Evidence, layout: Layout, splits: Splits, pending: Pending, worst: Worst) -> Fit:
    """Find the element with the worst difference, of parts that have the right shapes."""
    error, ratio, where = worst
    if ratio == 0:
        return Fit(layout, error, ratio)
    limit = evidence.limit(pending)
    group = next(group for group in evidence.groups(pending).tolist() if group[0] == where)
    box = evidence.box(all_boxes(evidence.full.shape, evidence.sizes, splits), where)
    part = evidence.reduced(group, pending)
    off = gap(part, evidence.full[box])
    off = ratios(off, limit[box]) if isinstance(limit, torch.Tensor) else off
    at = tuple(int(i) for i in np.unravel_index(int(off.argmax()), tuple(off.shape)))
    index = tuple(i + piece.start for i, piece in zip(at, box, strict=True))
    return Fit(layout, error, ratio, evidence.ranks[where], index, part[at].item(), evidence.full[index].item())


LIKELY = ("sum", "avg")
"""The reductions that explain parts; that a maximum or minimum of copies is right can mean that one copy is wrong."""

_SAMPLE = 64


# -- all layouts that fit ----------------------------------------------------------------------------------------------


def infer_layout(locals: Parts, reference: torch.Tensor, mesh: Mesh, *, bound: Bound = None) -> list[Layout]:
    """Return every layout that explains what the ranks hold of a full tensor, the simplest first.

    >>> full = torch.arange(8.0).reshape(4, 2)
    >>> infer_layout([full[:2], full[:2], full[2:], full[2:]], full, "dp=2,tp=2")
    [Layout((2, 2), ('dp', 'tp'))('dp', 'None')]
    >>> infer_layout([full - 1, full - 1, torch.ones(4, 2), torch.ones(4, 2)], full, {"dp": 2, "tp": 2})
    [Layout((2, 2), ('dp', 'tp'))('None', 'None', partial={'dp': 'sum'})]
    >>> infer_layout([full, full.flip(0)], full, "dp=2")  # nothing does
    []

    Values cannot tell everything: zeros are also a sum of zeros, and both layouts are listed. What would be listed for
    any tensor is not: a pending "avg", "max" or "min" of equal copies (a "prod" of equal ones), a reduction of parts
    without elements, a split over an axis of one rank. Sums and averages may be pending over different axes, of other
    reductions only one kind. Costs no communication: it compares each part with its shard of the full tensor, after a
    comparison of 64 elements that rules out most candidates.

    Args:
        locals: what each rank holds, by rank; the results of `sim.run` are. DTensors count as their local parts.
        reference: the full tensor, all reductions taken. Other dtypes than the parts' are converted.
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
    locals: Parts, reference: torch.Tensor, mesh: Mesh, bound: Bound = None, *, reductions: Collection[str] = LIKELY
) -> list[Fit]:
    """Return what `infer_layout` does, with the worst error of each layout and where it is.

    >>> full = torch.arange(4.0)
    >>> infer_layout([full, full + 1], full, "dp=2")  # true, but a wrong copy is more likely
    [Layout((2,), ('dp',))('None', partial={'dp': 'min'})]
    >>> explanations([full, full + 1], full, "dp=2")
    []

    Args:
        locals, reference, mesh, bound: as for `infer_layout`.
        reductions: which ones may be pending. Default: sums and averages, the only ones that training leaves pending.
    """
    evidence = read("cannot infer a layout", locals, reference, mesh, bound)
    found: list[tuple[Splits, Pending, Worst]] = []
    for splits in splits_by_shape(evidence):
        if not evidence.full.numel():  # nothing to compare, and nothing to reduce
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
        self.want = evidence.full[at] if at else evidence.full.reshape(1)
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


Order: TypeAlias = Mapping[int, torch.Tensor]
"""For each rank, where each of its elements is in the full tensor, flattened."""


# -- parameters in an order that no layout says, such as fused weights cut one by one ----------------------------------


def order_of(parts: Mapping[int, torch.Tensor], full: torch.Tensor) -> Order | None:
    """Return where each rank's elements come from, if all are elements of the full tensor and none of it is missing.

    >>> full = torch.tensor([1.0, 2.0, 3.0, 4.0])
    >>> order_of({0: torch.tensor([1.0, 3.0]), 1: torch.tensor([2.0, 4.0])}, full)
    {0: tensor([0, 2]), 1: tensor([1, 3])}
    >>> order_of({0: torch.tensor([1.0, 3.0]), 1: torch.tensor([1.0, 3.0])}, full) is None
    True

    Elements are recognised by their values, so these must be different from each other.
    """
    flat, order = full.flatten().sort()
    if not flat.numel() or not bool((flat.diff() > 0).all()):
        return None
    found, covered = {}, torch.zeros(flat.numel(), dtype=torch.bool)
    for rank, part in parts.items():
        values = part.flatten().to(flat.dtype)
        places = torch.searchsorted(flat, values.contiguous()).clamp(max=flat.numel() - 1)
        if not torch.equal(flat[places], values):
            return None
        found[rank] = order[places]
        covered[found[rank]] = True
    return found if bool(covered.all()) else None


def pieces_of(
    parts: Mapping[int, torch.Tensor], full: torch.Tensor, bound: float
) -> tuple[int, dict[int, tuple[int, ...]]] | None:
    """Return along which dim, and where in the full tensor, the slices of each rank are, if together they are all.

    >>> parts = {0: torch.tensor([3.0]), 1: torch.tensor([]), 2: torch.tensor([1.0, 2.0])}
    >>> pieces_of(parts, torch.tensor([1.0, 2.0, 3.0]), 0.0)
    (0, {0: (2,), 1: (), 2: (0, 1)})
    """
    for dim in range(min(full.dim(), 2)):
        size, found = full.shape[dim], dict[int, tuple[int, ...]]()
        rest = [length for at, length in enumerate(full.shape) if at != dim]
        if size < 2 or any([n for at, n in enumerate(part.shape) if at != dim] != rest for part in parts.values()):
            continue
        for rank, part in parts.items():
            places: list[int] = []
            for row in part.unbind(dim):
                near = (
                    at
                    for at in range(size)
                    if at not in places
                    and top(gap(row, full.select(dim, at))) <= (bound if row.is_floating_point() else 0)
                )
                places.append(next(near, -1))
            found[rank] = tuple(places)
        if sorted(_in_turn(found)) == list(range(size)):
            return dim, found
    return None


def _in_turn(pieces: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the places of all ranks, one behind the other; of copies, those of one rank."""
    return tuple(chain.from_iterable(dict.fromkeys(pieces.values())))


def order_of_rows(
    parts: Mapping[int, torch.Tensor], full: torch.Tensor, bound: float
) -> tuple[int, list[tuple[int, ...]]] | None:
    """Return along which dim, and where in the full tensor, the slices of each rank are; of copies, one rank's.

    >>> parts = {0: torch.tensor([3.0]), 1: torch.tensor([3.0]), 2: torch.tensor([1.0, 2.0])}
    >>> order_of_rows(parts, torch.tensor([1.0, 2.0, 3.0]), 0.0)
    (0, [(2,), (0, 1)])
    """
    found = pieces_of(parts, full, bound)
    return None if found is None else (found[0], [piece for piece in dict.fromkeys(found[1].values()) if piece])


def pad_pieces(
    parts: Mapping[int, torch.Tensor], full: torch.Tensor, pieces: Mapping[int, tuple[int, ...]]
) -> tuple[dict[int, torch.Tensor], torch.Tensor] | None:
    """Pad parts of different lengths, and the pieces of the full tensor, with zeros; return None if no dim fits.

    An even split then explains a ragged one, e.g. packed documents, or the tokens of an expert.

    >>> held = {0: torch.tensor([1]), 1: torch.tensor([2, 3])}
    >>> parts, full = pad_pieces(held, torch.tensor([1, 2, 3]), {0: (0,), 1: (1, 2)})
    >>> parts[0].tolist(), full.tolist()
    ([1, 0], [1, 0, 2, 3])
    """
    order, most = _in_turn(pieces), max(map(len, pieces.values()))
    for dim in range(min(full.dim(), 3)):
        fit = full.shape[dim] == len(order) and all(
            part.dim() == full.dim() and part.shape[dim] == len(pieces.get(rank, ())) for rank, part in parts.items()
        )
        if fit:

            def filled(tensor: torch.Tensor, dim: int = dim) -> torch.Tensor:
                shape = list(tensor.shape)
                shape[dim] = most - shape[dim]
                return torch.cat([tensor, tensor.new_zeros(shape)], dim)

            places = [torch.tensor(each, dtype=torch.long) for each in dict.fromkeys(pieces.values())]
            whole = torch.cat([filled(full.index_select(dim, each)) for each in places], dim)
            return {rank: filled(part) for rank, part in parts.items()}, whole
    return None


def in_orders(full: torch.Tensor, orders: Sequence[tuple[int, ...]]) -> Iterator[torch.Tensor]:
    """Yield a tensor in orders of rows, along each dim that has as many; then in two of them, along both dims.

    >>> [turned.tolist() for turned in in_orders(torch.tensor([[1, 2], [3, 4]]), [(1, 0)])]
    [[[3, 4], [1, 2]], [[2, 1], [4, 3]]]
    """
    for places in orders:
        for dim in range(min(full.dim(), 3)):
            if full.shape[dim] == len(places):
                turned = full.index_select(dim, torch.tensor(places))
                yield turned
                for more in orders:
                    if dim == 0 and full.dim() > 1 and full.shape[1] == len(more) and more != places:
                        yield turned.index_select(1, torch.tensor(more))


def order_said(tensor: torch.Tensor, rank: int) -> torch.Tensor | None:
    """Return where a rank's part of a DTensor is in the full tensor, flattened, by its own mesh; None: unknown."""
    try:
        layout = Layout.of(tensor) if isinstance(tensor, DTensor) else None
    except ValueError:  # placements that no layout can say
        return None
    if layout is None or layout.is_partial() or rank not in layout.rank_list:
        return None
    places = torch.arange(tensor.numel()).reshape(tensor.shape)
    return places[layout.local_slice(tensor.shape, rank)].flatten()


def furthest(parts: Mapping[int, torch.Tensor], full: torch.Tensor, order: Order) -> float:
    """Return the worst difference of parts from a full tensor, taken in an order."""
    worst = 0.0
    for rank, part in parts.items():
        if part.numel() != order[rank].numel():
            return math.inf
        if part.numel():
            worst = max(worst, float(gap(part.flatten(), full.flatten()[order[rank]]).max()))
    return worst
