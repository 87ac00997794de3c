"""Which rank holds which elements between two steps of a plan: a layout, or a piece of one that no layout can say.

On the way from one layout to another a rank may hold only those rows of its part that it, and no other rank, has to
reduce or to pass on. Per dim such a piece is a list of intervals, and the piece is the product of these lists. A
`Holding` says so for all ranks at once, in four parts that are applied in order:

1. `splits`: chunk of chunk, as in a layout.
2. `combs`: of that, per dim, only what a second chain of splits gives to ranks with the own coordinate on some of its
   axes. Fixing inner axes of a chain leaves the teeth of a comb, hence the name.
3. `share`: of that, one dim is divided once more, evenly, over the ranks that would hold the same.
4. `first`: ranks with another coordinate than 0 on these axes hold nothing.

Everything is arithmetic on ints and numpy arrays, for one rank (`part`) or for all (`counts`, `overlaps`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hyper_parallel.core.dtensor.shards import Splits, chunk
from hyper_parallel.core.redistribute import counting
from hyper_parallel.core.redistribute.counting import Comb
from hyper_parallel.core.redistribute.counting import Counts as Counts  # the callers' word for arrays of counts

Intervals = tuple[tuple[int, int], ...]
Part = tuple[Intervals, ...]
"""Per dim the intervals that a rank holds, sorted, apart from each other and not empty; the part is their product."""


@dataclass(frozen=True)
class Holding:
    """What every rank of a mesh holds of a tensor.

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
        combs: per dim a `Comb`, or None; () for none at all.
        share: a dim and the axes over which what is left of it is divided evenly, or None.
        first: axes on which only coordinate 0 holds anything.
    """

    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    splits: Splits
    combs: tuple[Comb | None, ...] = ()
    share: tuple[int, tuple[int, ...]] | None = None
    first: tuple[int, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether `splits` alone says it."""
        return not any(self.combs) and self.share is None and not self.first

    @property
    def even(self) -> bool:
        """Whether every rank holds the same number of elements, and not none."""
        counts = self.counts()
        return bool(counts.flat[0] and (counts == counts.flat[0]).all())

    def restricted(self, chains: Splits, fixed: Sequence[int]) -> Holding:
        """Return what is left after a comb per dim: `chains` with the axes in `fixed` at the rank's own coordinate.

        A dim that has a comb already keeps its chain and fixes more of it.
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
        """Return the axes that what a rank holds of a dim depends on."""
        comb = self.combs[dim] if self.combs else None
        shared = self.share[1] if self.share is not None and self.share[0] == dim else ()
        return frozenset((*self.splits[dim], *(comb[1] if comb is not None else ()), *shared))

    def part(self, coordinates: Sequence[int]) -> Part:
        """Return what the rank at these mesh coordinates holds."""
        if any(coordinates[axis] for axis in self.first):
            return ((),) * len(self.shape)
        return tuple(self.part_of_dim(dim, coordinates) for dim in range(len(self.shape)))

    def part_of_dim(self, dim: int, coordinates: Sequence[int]) -> Intervals:
        """Return which indices of a dim the rank at these mesh coordinates holds, `first` left aside."""
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
        """Return how many elements each rank holds, in an array of the shape of the mesh."""
        return counting.counts(self)

    def overlaps(self, other: Holding) -> Counts:
        """Return how many elements each rank holds in both, in an array of the shape of the mesh."""
        return counting.overlaps(self, other)


# -- arithmetic of intervals -----------------------------------------------------------------------------------------


def length(intervals: Intervals) -> int:
    """Return the number of elements.

    >>> length(((0, 2), (5, 9)))
    6
    """
    return sum(stop - start for start, stop in intervals)


def intersect(left: Intervals, right: Intervals) -> Intervals:
    """Return what lies in both.

    >>> intersect(((0, 4), (6, 9)), ((3, 7),))
    ((3, 4), (6, 7))
    """
    if len(left) == 1 and len(right) == 1:  # nearly always
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
    """Return `count` elements from the `offset`-th on.

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


def divide(part: Part, pieces: int, index: int) -> Part | None:
    """Return piece `index` when a part is divided evenly along one of its dims, or None when that piece is empty.

    >>> divide((((0, 2),), ((0, 6),)), 3, 1)
    (((0, 2),), ((2, 4),))

    The dim is the first that divides without a remainder, else the longest.
    """
    if pieces == 1:
        return part
    lengths = [length(intervals) for intervals in part]
    even = [dim for dim, count in enumerate(lengths) if count % pieces == 0]
    dim = even[0] if even else max(range(len(lengths)), key=lengths.__getitem__)
    offset, count = chunk(lengths[dim], pieces, index)
    return (*part[:dim], cut(part[dim], offset, count), *part[dim + 1 :]) if count else None


def boxes(part: Part) -> list[tuple[tuple[int, int], ...]]:
    """Return the boxes that a part consists of, one (start, stop) per dim each.

    >>> boxes((((0, 1), (4, 5)), ((0, 3),)))
    [((0, 1), (0, 3)), ((4, 5), (0, 3))]
    """
    return list(itertools.product(*part))
