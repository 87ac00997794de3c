"""The layouts that could explain what the ranks hold, as far as the shapes of the parts tell."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, combinations, permutations, product

import numpy as np
import torch

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.shards import Splits, count_parts, split_points
from sim.prove.evidence import Evidence, Pending

__all__ = ["free_axes", "pendings", "splits_by_shape", "to_layout"]


def splits_by_shape(evidence: Evidence) -> list[Splits]:
    """Return every way to split the whole tensor that gives each rank a part of the shape that it holds.

    Fewer splitting axes come first, then mesh order; axes of one rank split nothing. Each dim is looked at by itself,
    so four axes cost at most 65 ordered choices per dim, of which nearly all fail on the size of one part: rank 0 of
    the mesh holds ceil(size / product of the axes), however they are ordered.
    """
    shape, sizes = tuple(evidence.whole.shape), evidence.sizes
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
    dtype = evidence.whole.dtype
    if not evidence.whole.numel() or dtype == torch.bool:
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
