"""Elements held by each rank between two steps of a plan, and their counts on all ranks at once.

A holding is the distribution of a layout, or one that no layout can express, e.g. every second block of a dim. Counts
are numpy arrays that broadcast over the mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hyper_parallel.core.dtensor.ownership import Splits, chunk, split_points

Intervals = tuple[tuple[int, int], ...]
Part = tuple[Intervals, ...]
"""Per dim the intervals that a rank holds, sorted, apart from each other and not empty; the part is their product."""


@dataclass(frozen=True)
class Holding:
    """The elements of a tensor that every rank of a mesh holds.

    >>> half = Holding((2, 2), (8,), ((0,),))  # split over axis 0, replicated over axis 1
    >>> half.part((1, 0)), half.counts().tolist()
    ((((4, 8),),), [[4, 4], [4, 4]])
    >>> comb = Holding((2, 2), (8,), ((),), ((((0, 1), (1,))),))  # chain 0 then 1, only axis 1 fixed
    >>> comb.part((0, 1))
    (((2, 4), (6, 8)),)

    Attributes:
        sizes: ranks along each axis of the mesh.
        shape: the tensor's sizes, in elements; at least one dim.
        splits: per dim the axes that split it, outer first.
        combs: per dim a `Comb`, or None; () if no dim has one.
        share: a dim, and the axes that divide its remaining elements evenly; None: no division.
        first: axes on which only coordinate 0 holds elements.
    """

    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    splits: Splits
    combs: tuple[Comb | None, ...] = ()
    share: tuple[int, tuple[int, ...]] | None = None
    first: tuple[int, ...] = ()

    @property
    def plain(self) -> bool:
        """True if `splits` alone defines the holding."""
        return not any(self.combs) and self.share is None and not self.first

    @property
    def even(self) -> bool:
        """True if every rank holds the same number of elements, and at least one."""
        counts = self.counts()
        return bool(counts.flat[0] and (counts == counts.flat[0]).all())

    def restricted(self, chains: Splits, fixed: Sequence[int]) -> Holding:
        """Keep, per dim, the blocks of `chains` whose coordinates on the axes in `fixed` are the rank's own.

        A dim that already has a comb keeps its chain and fixes more axes of it.
        """
        combs: list[Comb | None] = []
        for dim, chain in enumerate(chains):
            own = self.combs[dim] if self.combs else None
            if own is not None:
                assert own[0] == chain, "a dim has one comb"
            held = set(own[1]) if own is not None else set()
            axes = tuple(axis for axis in chain if axis in fixed or axis in held)
            combs.append((chain, axes) if axes else None)
        return replace(self, combs=tuple(combs) if any(combs) else ())

    def axes_of(self, dim: int) -> frozenset[int]:
        """Return the axes on which a rank's indices of a dim depend."""
        comb = self.combs[dim] if self.combs else None
        shared = self.share[1] if self.share is not None and self.share[0] == dim else ()
        return frozenset((*self.splits[dim], *(comb[1] if comb is not None else ()), *shared))

    def part(self, coordinates: Sequence[int]) -> Part:
        """Return the part of the rank at these mesh coordinates."""
        if any(coordinates[axis] for axis in self.first):
            return ((),) * len(self.shape)
        return tuple(self.part_of_dim(dim, coordinates) for dim in range(len(self.shape)))

    def part_of_dim(self, dim: int, coordinates: Sequence[int]) -> Intervals:
        """Return the indices of a dim held by the rank at these mesh coordinates, ignoring `first`."""
        start, size = 0, self.shape[dim]
        for axis in self.splits[dim]:
            offset, size = chunk(size, self.sizes[axis], coordinates[axis])
            start += offset
        held: Intervals = ((start, start + size),) if size else ()
        if self.combs and (comb := self.combs[dim]) is not None:
            fixed = tuple(coordinates[axis] if axis in comb[1] else None for axis in comb[0])
            held = intersect(held, teeth(self.shape[dim], tuple(self.sizes[axis] for axis in comb[0]), fixed))
        if self.share is not None and self.share[0] == dim:
            index, parts = 0, 1
            for axis in self.share[1]:
                index, parts = index * self.sizes[axis] + coordinates[axis], parts * self.sizes[axis]
            held = cut(held, *chunk(length(held), parts, index))
        return held

    def counts(self) -> Counts:
        """Return the number of elements per rank, in an array of the shape of the mesh."""
        return counts(self)

    def overlaps(self, other: Holding) -> Counts:
        """Return the number of elements per rank that it holds in both, in an array of the shape of the mesh."""
        return overlaps(self, other)


@dataclass(frozen=True)
class Located:
    """A holding on a mesh of certain ranks.

    Attributes:
        holding: the elements of each position on the mesh.
        ranks: the rank at each position, last axis fastest.
    """

    holding: Holding
    ranks: range | tuple[int, ...]

    def part_of(self, rank: int) -> Part | None:
        """Return a rank's part; None for a rank outside the mesh."""
        coordinates = self.coordinates(rank)
        return None if coordinates is None else self.holding.part(coordinates)

    def coordinates(self, rank: int) -> tuple[int, ...] | None:
        """Return the mesh coordinates of a rank, or None."""
        if rank not in self.ranks:
            return None
        position, found = self.ranks.index(rank), []
        for size in reversed(self.holding.sizes):
            position, index = divmod(position, size)
            found.append(index)
        return tuple(reversed(found))


# -- arithmetic of intervals -----------------------------------------------------------------------------------------


def length(intervals: Intervals) -> int:
    """Return the number of elements.

    >>> length(((0, 2), (5, 9)))
    6
    """
    return sum(stop - start for start, stop in intervals)


def intersect(left: Intervals, right: Intervals) -> Intervals:
    """Return the intersection.

    >>> intersect(((0, 4), (6, 9)), ((3, 7),))
    ((3, 4), (6, 7))
    """
    if len(left) == 1 and len(right) == 1:  # fast path for nearly all calls
        start, stop = max(left[0][0], right[0][0]), min(left[0][1], right[0][1])
        return ((start, stop),) if start < stop else ()
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < stop:
            found.append((start, stop))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def cut(intervals: Intervals, offset: int, count: int) -> Intervals:
    """Return `count` elements, starting with element `offset`.

    >>> cut(((0, 2), (5, 9)), 1, 3)
    ((1, 2), (5, 7))
    """
    found = []
    for start, stop in intervals:
        size = stop - start
        low, high = min(max(offset, 0), size), min(max(offset + count, 0), size)
        if low < high:
            found.append((start + low, start + high))
        offset -= size
    return tuple(found)


@lru_cache(maxsize=4096)
def teeth(size: int, parts: tuple[int, ...], fixed: tuple[int | None, ...]) -> Intervals:
    """Return the chunks of `size` elements whose coordinates agree with `fixed`, neighbours joined.

    >>> teeth(8, (2, 2), (None, 1)), teeth(8, (2, 2), (1, None))
    (((2, 4), (6, 8)), ((4, 8),))

    Args:
        size: elements of the dim.
        parts: ranks along each axis of the chain, outer first.
        fixed: the coordinate on each axis of the chain, None for any.
    """
    pieces = [(0, size)]
    for number, only in zip(parts, fixed, strict=True):
        wanted = range(number) if only is None else (only,)
        pieces = [
            (start + offset, count)
            for start, whole in pieces
            for index in wanted
            for offset, count in [chunk(whole, number, index)]
            if count
        ]
    joined: list[tuple[int, int]] = []
    for start, count in pieces:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], start + count)
        else:
            joined.append((start, start + count))
    return tuple(joined)


def meet(left: Part, right: Part) -> Part | None:
    """Return the elements in both parts, or None if there are none."""
    found = []
    for mine, theirs in zip(left, right, strict=True):
        both = intersect(mine, theirs)
        if not both:
            return None
        found.append(both)
    return tuple(found)


def volume(part: Part) -> int:
    """Return the number of elements of a part."""
    return math.prod(map(length, part))


def divide(part: Part, shares: int, index: int) -> Part | None:
    """Divide a part evenly along one of its dims and return share `index`; None if it is empty.

    >>> divide((((0, 2),), ((0, 6),)), 3, 1)
    (((0, 2),), ((2, 4),))

    The dim is the first that divides without remainder, else the longest.
    """
    if shares == 1:
        return part
    lengths = [length(intervals) for intervals in part]
    even = [dim for dim, count in enumerate(lengths) if count % shares == 0]
    dim = even[0] if even else max(range(len(lengths)), key=lengths.__getitem__)
    offset, count = chunk(lengths[dim], shares, index)
    return (*part[:dim], cut(part[dim], offset, count), *part[dim + 1 :]) if count else None


def boxes(part: Part) -> list[tuple[tuple[int, int], ...]]:
    """Return the boxes of a part, as one (start, stop) per dim.

    >>> boxes((((0, 1), (4, 5)), ((0, 3),)))
    [((0, 1), (0, 3)), ((4, 5), (0, 3))]
    """
    return list(itertools.product(*part))


Counts = npt.NDArray[np.int64]

# -- counts of all ranks at once ---------------------------------------------------------------------------------------


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
    """Return start and stop of each rank's block of a dim that a chain of axes splits.

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
    """Return the number of elements per rank, in an array of the shape of the mesh."""
    return _product(held, [extent(held, dim) for dim in range(len(held.shape))], held.first)


@lru_cache(maxsize=1024)
def overlaps(held: Holding, other: Holding) -> Counts:
    """Return the number of elements per rank that it holds in both, in an array of the shape of the mesh."""
    first = tuple(dict.fromkeys((*held.first, *other.first)))
    return _product(held, [_common(held, other, dim) for dim in range(len(held.shape))], first)


def _product(held: Holding, extents: Sequence[Counts], first: Sequence[int]) -> Counts:
    total = np.ones((1,) * len(held.sizes), dtype=np.int64)
    for extent in extents:
        total = total * extent
    if first:
        total = np.where(coordinate(held.sizes, first) == 0, total, 0)
    full = np.broadcast_to(total, held.sizes)
    full.flags.writeable = False  # cached arrays are shared
    return full


def extent(held: Holding, dim: int) -> Counts:
    """Return the number of indices of a dim per rank, ignoring `first`; the array broadcasts over the mesh."""
    return _common(held, None, dim)


def _common(held: Holding, other: Holding | None, dim: int) -> Counts:
    """Count the indices of a dim that each rank holds in both, or in `held` if `other` is None."""
    sides = [_Side(held, dim)] + ([_Side(other, dim)] if other is not None else [])
    low, high = sides[0].start, sides[0].stop
    for side in sides[1:]:
        low, high = np.maximum(low, side.start), np.minimum(high, side.stop)
    combs = tuple(comb for comb in dict.fromkeys(side.comb for side in sides) if comb is not None)
    ruler = _ruler(held.shape[dim], held.sizes, combs)
    common: Counts = np.maximum(ruler.below(high) - ruler.below(low), 0)
    return common


class _Side:
    """The block of a dim in which each rank's part lies, and the comb within that block."""

    def __init__(self, held: Holding, dim: int) -> None:
        size, sizes = held.shape[dim], held.sizes
        self.start, self.stop = edges(size, sizes, held.splits[dim])
        self.comb: Comb | None = held.combs[dim] if held.combs else None
        if self.comb is not None and self.comb[1] == self.comb[0][: len(self.comb[1])]:  # a prefix: one block
            start, stop = edges(size, sizes, self.comb[1])
            self.start, self.stop = np.maximum(self.start, start), np.minimum(self.stop, stop)
            self.stop = np.maximum(self.start, self.stop)
            self.comb = None
        if held.share is not None and held.share[0] == dim:
            self._divide(held, size, held.share[1])

    def _divide(self, held: Holding, size: int, axes: tuple[int, ...]) -> None:
        """Reduce the block to an even share of its elements, by moving start and stop."""
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
    """Counts, on every rank at once, the elements below a point that lie in all combs; `point` inverts `below`.

    The chains cut a dim into teeth. The teeth of ranks with equal coordinates on the fixed axes form a row. A rank's
    teeth are one row, or none.
    """

    def __init__(self, size: int, sizes: tuple[int, ...], combs: Sequence[Comb]) -> None:
        own: Counts = np.zeros((1,) * len(sizes), dtype=np.int64)  # the row of every rank
        parts = [split_points(size, sizes, chain) for chain, _ in combs]
        start = np.sort(np.concatenate([first.ravel() for first, _ in parts]))
        start = start[(np.diff(start, append=size) > 0) & (start < size)]  # the last of equal starts
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
        """Return the position of the element with `rank` elements below it; beyond the last, a position behind it."""
        if not len(self._start):
            return np.zeros_like(rank)
        index, _ = self._find(self._before_keys, rank)
        return self._start[index] + (rank - self._before[index])

    def _find(self, keys: Counts, value: Counts) -> tuple[Counts, npt.NDArray[np.bool_]]:
        """Return the last tooth of the rank's row with a key <= `value`, and True where there is none."""
        index = np.searchsorted(keys, self._row * self._step + value, side="right") - 1
        first = self._first[self._row]
        return np.maximum(index, first), self._none | (index < first)


class _Unrestricted:
    """Ruler of a dim without combs: every element counts."""

    def below(self, point: Counts) -> Counts:
        return point

    def point(self, rank: Counts) -> Counts:
        return rank


@lru_cache(maxsize=1024)
def _ruler(size: int, sizes: tuple[int, ...], combs: tuple[Comb, ...]) -> _Ruler | _Unrestricted:
    return _Ruler(size, sizes, combs) if combs else _Unrestricted()
