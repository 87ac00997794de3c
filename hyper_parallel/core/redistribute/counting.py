"""How many elements every rank of a mesh holds, all ranks at once: numpy arrays that broadcast over the mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hyper_parallel.core.dtensor.shards import split_points

if TYPE_CHECKING:
    from hyper_parallel.core.redistribute.holdings import Holding

Counts = npt.NDArray[np.int64]

Comb = tuple[tuple[int, ...], tuple[int, ...]]
"""A chain of axes that split a dim, outer first, and those of them whose coordinate is fixed to the rank's own."""


def coordinate(sizes: Sequence[int], axes: Sequence[int]) -> Counts:
    """Return the joint coordinate of every rank on some axes, first axis slowest.

    >>> coordinate((2, 3), (1, 0)).tolist()
    [[0, 2, 4], [1, 3, 5]]
    """
    joint: Any = np.zeros((1,) * len(sizes), dtype=np.int64)
    for axis in axes:
        broad = [1] * len(sizes)
        broad[axis] = sizes[axis]
        joint = joint * sizes[axis] + np.arange(sizes[axis], dtype=np.int64).reshape(broad)
    return joint


@lru_cache(maxsize=1024)
def edges(size: int, sizes: tuple[int, ...], chain: tuple[int, ...]) -> tuple[Counts, Counts]:
    """Return start and stop of what each rank gets of a dim that a chain of axes splits.

    >>> start, stop = edges(5, (2, 2), (1,))
    >>> start.tolist(), stop.tolist()
    ([[0, 3]], [[3, 5]])
    """
    start, stop = split_points(size, sizes, chain)
    order = sorted(range(len(chain)), key=chain.__getitem__)
    broad = [sizes[axis] if axis in chain else 1 for axis in range(len(sizes))]
    found = start.transpose(order).reshape(broad), stop.transpose(order).reshape(broad)
    for array in found:
        array.flags.writeable = False
    return found


@lru_cache(maxsize=1024)
def counts(held: Holding) -> Counts:
    """Return how many elements each rank holds, in an array of the shape of the mesh."""
    return _product(held, [extent(held, dim) for dim in range(len(held.shape))], held.first)


@lru_cache(maxsize=1024)
def overlaps(held: Holding, other: Holding) -> Counts:
    """Return how many elements each rank holds in both, in an array of the shape of the mesh."""
    first = tuple(dict.fromkeys((*held.first, *other.first)))
    return _product(held, [_common(held, other, dim) for dim in range(len(held.shape))], first)


def _product(held: Holding, extents: Sequence[Counts], first: Sequence[int]) -> Counts:
    total = np.ones((1,) * len(held.sizes), dtype=np.int64)
    for extent in extents:
        total = total * extent
    if first:
        total = np.where(coordinate(held.sizes, first) == 0, total, 0)
    full = np.broadcast_to(total, held.sizes)
    full.flags.writeable = False  # it is shared
    return full


def extent(held: Holding, dim: int) -> Counts:
    """Return how many indices of a dim each rank holds, `first` left aside; the array broadcasts over the mesh."""
    return _common(held, None, dim)


def _common(held: Holding, other: Holding | None, dim: int) -> Counts:
    """Return how many indices of a dim each rank holds in both, or just in the one."""
    sides = [_Side(held, dim)] + ([_Side(other, dim)] if other is not None else [])
    low, high = sides[0].start, sides[0].stop
    for side in sides[1:]:
        low, high = np.maximum(low, side.start), np.minimum(high, side.stop)
    combs = tuple(comb for comb in dict.fromkeys(side.comb for side in sides) if comb is not None)
    ruler = _ruler(held.shape[dim], held.sizes, combs)
    common: Counts = np.maximum(ruler.below(high) - ruler.below(low), 0)
    return common


class _Side:
    """Of a dim, the block that each rank's part lies in, and the comb that it has in there."""

    def __init__(self, held: Holding, dim: int) -> None:
        size, sizes = held.shape[dim], held.sizes
        self.start, self.stop = edges(size, sizes, held.splits[dim])
        self.comb: Comb | None = held.combs[dim] if held.combs else None
        if self.comb is not None and self.comb[1] == self.comb[0][: len(self.comb[1])]:  # a block, no teeth
            start, stop = edges(size, sizes, self.comb[1])
            self.start, self.stop = np.maximum(self.start, start), np.minimum(self.stop, stop)
            self.stop = np.maximum(self.start, self.stop)
            self.comb = None
        if held.share is not None and held.share[0] == dim:
            self._divide(held, size, held.share[1])

    def _divide(self, held: Holding, size: int, axes: tuple[int, ...]) -> None:
        """Leave an even share of what there is, told by the points where it starts and stops."""
        ruler = _ruler(size, held.sizes, () if self.comb is None else (self.comb,))
        base = ruler.below(self.start)
        parts, index = math.prod(held.sizes[axis] for axis in axes), coordinate(held.sizes, axes)
        whole = ruler.below(self.stop) - base
        full = -(-whole // parts)
        offset = np.minimum(whole, full * index)
        count = np.minimum(full, whole - offset)
        self.start = ruler.point(base + offset)
        self.stop = np.where(count > 0, ruler.point(base + offset + count - 1) + 1, self.start)


class _Ruler:
    """Counts the elements of all of some combs that lie below a point, on every rank at once; finds the point again.

    The chains cut a dim into teeth. Those that belong to ranks with the same coordinates on the fixed axes are a row,
    and a rank's teeth are one row, or none.
    """

    def __init__(self, size: int, sizes: tuple[int, ...], combs: Sequence[Comb]) -> None:
        own: Counts = np.zeros((1,) * len(sizes), dtype=np.int64)  # the row of every rank
        parts = [split_points(size, sizes, chain) for chain, _ in combs]
        start = np.sort(np.concatenate([first.ravel() for first, _ in parts]))
        start = start[(np.diff(start, append=size) > 0) & (start < size)]  # the last of those that are equal
        row = np.zeros_like(start)
        for (chain, fixed), (_, last) in zip(combs, parts, strict=True):
            rows = math.prod(sizes[axis] for axis in fixed)
            own = own * rows + coordinate(sizes, [axis for axis in chain if axis in fixed])
            places = [place for place, axis in enumerate(chain) if axis in fixed]
            of_part = np.broadcast_to(coordinate(last.shape, places), last.shape).ravel()
            row = row * rows + of_part[np.searchsorted(last.ravel(), start, side="right")]
        length = np.diff(start, append=size)
        order = np.argsort(row, kind="stable")
        row = row[order]
        new = np.diff(row, prepend=-1) > 0
        number, self._first = np.cumsum(new) - 1, np.flatnonzero(new)
        found = row[new]
        self._start, self._length = start[order], length[order]
        total = np.cumsum(self._length) - self._length
        self._before = total - total[self._first][number]
        self._row = np.minimum(np.searchsorted(found, own), max(len(found) - 1, 0))
        self._none = found[self._row] != own if len(found) else np.ones_like(own, dtype=bool)
        self._step = size + 1
        self._start_keys, self._before_keys = (kept + number * self._step for kept in (self._start, self._before))

    def below(self, point: Counts) -> Counts:
        """Return how many elements of the rank's teeth are smaller than `point`."""
        if not len(self._start):
            return np.zeros_like(point)
        index, none = self._find(self._start_keys, point)
        inside = np.clip(point - self._start[index], 0, self._length[index])
        return np.where(none, 0, self._before[index] + inside)

    def point(self, rank: Counts) -> Counts:
        """Return where the element lies that has so many below it; beyond the last one, a point behind it."""
        if not len(self._start):
            return np.zeros_like(rank)
        index, _ = self._find(self._before_keys, rank)
        return self._start[index] + (rank - self._before[index])

    def _find(self, keys: Counts, value: Counts) -> tuple[Counts, npt.NDArray[np.bool_]]:
        """Return the last tooth of the own row whose key is not above a value, and where there is none."""
        index = np.searchsorted(keys, self._row * self._step + value, side="right") - 1
        first = self._first[self._row]
        return np.maximum(index, first), self._none | (index < first)


class _Whole:
    """The ruler of a dim that no comb restricts."""

    def below(self, point: Counts) -> Counts:
        return point

    def point(self, rank: Counts) -> Counts:
        return rank


@lru_cache(maxsize=1024)
def _ruler(size: int, sizes: tuple[int, ...], combs: tuple[Comb, ...]) -> _Ruler | _Whole:
    return _Ruler(size, sizes, combs) if combs else _Whole()
