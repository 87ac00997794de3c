"""Ownership of tensor elements by ranks: arithmetic on ints and numpy arrays, for one rank or for 100,000.

One rule covers everything. Splitting `size` elements over `n` ranks gives each rank a part of ceil(size / n) elements,
in order; the last parts are smaller or empty (as in `torch.chunk`, which omits empty ones). If several axes split a
dim, the first axis splits it, then the next axis splits each part: a chunk of a chunk.

Here an axis is its index from the left, and `splits` holds, per tensor dim, the axes that split it, outer first.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Splits = tuple[tuple[int, ...], ...]


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return start and length of part `index` when `size` elements are split into `parts`.

    >>> [chunk(7, 4, i) for i in range(4)]
    [(0, 2), (2, 2), (4, 2), (6, 1)]
    >>> [chunk(5, 4, i) for i in range(4)]  # the last part is empty, and starts at the end
    [(0, 2), (2, 2), (4, 1), (5, 0)]

    Args:
        size: elements to split, 0 or more.
        parts: number of parts, 1 or more.
        index: index of the part, from 0.
    """
    full = -(-size // parts)
    start = min(size, full * index)
    return start, min(full, size - start)


def mesh_lines(sizes: Sequence[int], axes: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the mesh positions along some axes, one row for each position on the other axes.

    >>> mesh_lines((2, 3), (1,)).tolist(), mesh_lines((2, 3), (0,)).tolist()
    ([[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]])

    Args:
        sizes: ranks along each axis.
        axes: the axes within a row, the last one fastest.
    """
    kept = [axis for axis in range(len(sizes)) if axis not in axes]
    positions = np.arange(math.prod(sizes)).reshape(sizes)
    return positions.transpose(*kept, *axes).reshape(-1, math.prod(sizes[axis] for axis in axes))


def one_slice(
    global_shape: Sequence[int], sizes: Sequence[int], splits: Splits, coordinates: Sequence[int]
) -> tuple[slice, ...]:
    """Return the part of the rank at some mesh coordinates, as one `slice` per dim.

    >>> one_slice((7, 4), (2, 3), ((0, 1), ()), (0, 1))  # 7 rows: 4 and 3; 4 rows: 2, 2 and 0
    (slice(2, 4, None), slice(0, 4, None))

    Args:
        global_shape: the tensor's sizes, in elements.
        sizes: ranks along each axis.
        splits: per dim, the axes that split it, outer first.
        coordinates: the rank's coordinate along each axis.
    """
    parts = []
    for size, axes in zip(global_shape, splits, strict=True):
        start = 0
        for axis in axes:
            offset, size = chunk(size, sizes[axis], coordinates[axis])
            start += offset
        parts.append(slice(start, start + size))
    return tuple(parts)


def all_slices(global_shape: Sequence[int], sizes: Sequence[int], splits: Splits) -> npt.NDArray[np.int64]:
    """Return start and stop of every dim on every rank, as an array of ranks x dims x 2.

    >>> all_slices((5,), (2, 2), ((1, 0),)).tolist()  # axis 1 outside: 3 and 2; then axis 0: 2 and 1, 1 and 1
    [[[0, 2]], [[3, 4]], [[2, 3]], [[4, 5]]]

    Rows are in mesh order, last axis fastest. Each dim enumerates only the axes that split it, so the cost is writing
    the result.

    Args:
        global_shape: the tensor's sizes, in elements.
        sizes: ranks along each axis.
        splits: per dim, the axes that split it, outer first.
    """
    result = np.empty((*sizes, len(global_shape), 2), dtype=np.int64)
    for dim, axes in enumerate(splits):
        start, stop = split_points(global_shape[dim], sizes, axes)
        order = sorted(range(len(axes)), key=lambda place: axes[place])
        broad = [sizes[axis] if axis in axes else 1 for axis in range(len(sizes))]
        result[..., dim, 0] = start.transpose(order).reshape(broad)
        result[..., dim, 1] = stop.transpose(order).reshape(broad)
    return result.reshape(math.prod(sizes), len(global_shape), 2)


def is_even(size: int, sizes: Sequence[int], axes: Sequence[int]) -> bool:
    """Return True if all parts have the same size when these axes split `size` elements.

    >>> is_even(12, (2, 3), (0, 1)), is_even(8, (2, 3), (0, 1)), is_even(0, (2, 3), (0, 1))
    (True, False, True)
    """
    return size % count_parts(sizes, axes) == 0


def count_parts(sizes: Sequence[int], axes: Sequence[int]) -> int:
    """Return the number of parts that these axes make together.

    >>> count_parts((2, 3, 4), (0, 2)), count_parts((2, 3, 4), ())
    (8, 1)
    """
    return math.prod(sizes[axis] for axis in axes)


def reordered_positions(sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return the old mesh position of each position on the mesh with its axes in another order.

    >>> reordered_positions((2, 3), (1, 0))
    [0, 3, 1, 4, 2, 5]

    Args:
        sizes: ranks along each axis, in the old order.
        order: the old index of each axis, in the new order.
    """
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(order).ravel().tolist()


def split_points(
    size: int, sizes: Sequence[int], axes: Sequence[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return start and stop of every part, in arrays with one dimension per splitting axis, outer first."""
    start = np.zeros((), dtype=np.int64)
    length = np.full((), size, dtype=np.int64)
    for axis in axes:
        parts = sizes[axis]
        length = length[..., None]
        full = -(-length // parts)
        offset = np.minimum(length, full * np.arange(parts, dtype=np.int64))
        start = start[..., None] + offset
        length = np.minimum(full, length - offset)
    return start, start + length


# -- torch's encoding of several axes on one dim -----------------------------------------------------------------------
# torch applies placements from the first axis to the last. If a later axis splits a dim first, torch gives the earlier
# axis a strided shard. Its split factor is the number of parts that later axes have already made. E.g. with mesh
# (dp=2, tp=4) and tp outside, dp has split factor 4. Split factor 1 is a plain shard. An axis of size 1 always has
# split factor 1 and is read back as the outer one, because its place in the order makes no difference.


Spec = tuple[int, int]
"""The dim that an axis splits, and its split factor."""

Specs = tuple[Spec | None, ...]
"""One per axis; None for an axis that does not split."""


def to_specs(sizes: Sequence[int], splits: Splits) -> Specs:
    """Return the (dim, split factor) of every axis.

    >>> to_specs((2, 4), ((0, 1), ()))
    ((0, 1), (0, 1))
    >>> to_specs((2, 4), ((1, 0), ()))
    ((0, 4), (0, 1))

    Args:
        sizes: ranks along each axis.
        splits: per dim, the axes that split it, outer first.
    """
    specs: list[Spec | None] = [None] * len(sizes)
    for dim, axes in enumerate(splits):
        for place, axis in enumerate(axes):
            factor = math.prod(sizes[outer] for outer in axes[:place] if outer > axis)
            specs[axis] = (dim, factor if sizes[axis] > 1 else 1)
    return tuple(specs)


def to_splits(sizes: Sequence[int], specs: Specs, ndim: int) -> Splits | int:
    """Return, per dim, the axes that split it, or the first axis whose split factor fits no order.

    >>> to_splits((2, 4), ((0, 4), (0, 1)), ndim=2)
    ((1, 0), ())
    >>> to_splits((2, 4), ((0, 3), (0, 1)), ndim=2)
    0

    From the last axis to the first, each axis is inserted where the axes before it, all later on the mesh, make
    as many parts as its split factor.

    Args:
        sizes: ranks along each axis.
        specs: one per axis, dims not negative and below ndim.
        ndim: dims of the tensor.
    """
    splits: list[list[int]] = [[] for _ in range(ndim)]
    for axis in reversed(range(len(sizes))):
        spec = specs[axis]
        if spec is None:
            continue
        order = splits[spec[0]]
        parts, place = 1, 0
        while parts != spec[1]:
            if place == len(order):
                return axis
            parts *= sizes[order[place]]
            place += 1
        order.insert(place, axis)
    return tuple(map(tuple, splits))


def split_order(count: int, splits: Splits) -> tuple[int, ...]:
    """Return the axes in an order in which every dim is split from left to right, as close as possible to mesh order.

    >>> split_order(3, ((2, 0), (1,)))
    (1, 2, 0)
    >>> split_order(2, ((0, 1),))
    (0, 1)

    Such an order always exists, because an axis splits one dim at most.

    Args:
        count: number of axes.
        splits: per dim, the axes that split it, outer first.
    """
    before = {axis: set(axes[:place]) for axes in splits for place, axis in enumerate(axes)}
    done: list[int] = []
    while len(done) < count:
        left = (axis for axis in range(count) if axis not in done)
        done.append(next(axis for axis in left if before.get(axis, set()) <= set(done)))
    return tuple(done)
