"""What a plan has to do: two layouts of one mesh, read as index arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hyper_parallel.core.dtensor.shards import Splits
from hyper_parallel.core.redistribute.counting import Counts
from hyper_parallel.core.redistribute.holdings import Holding

LINEAR = frozenset({"sum", "avg"})


@dataclass(frozen=True)
class Transition:
    """From which layout to which, on one mesh.

    Axes are indices from the left. Axes of size 1 take no part. Every axis has one role at the source: it splits a dim
    (`split_axes`), copies are to be reduced over it (`reduces`), copies stay as they are over it (`keeps`), or the
    ranks along it hold the same (`copy_axes`).

    Attributes:
        sizes: ranks along each axis.
        names: the axes' names.
        ranks: the rank at each position.
        shape: the tensor's sizes; a scalar is taken as one element in one dim.
        src: splits at the source, per dim, outer first.
        dst: splits at the destination.
        reduces: axes pending at the source, and no longer at the destination.
        reduction: by what; None without such axes.
        keeps: axes pending at both.
        opens: axes pending at the destination only.
        opening: by what; None without such axes.
        times: kept copies are multiplied by this, to turn one linear reduction into the other,
        over: and divided by this.
        itemsize: bytes per element.
        at_once: copies are to be reduced in one step: an average of ints is rounded, once.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    ranks: range | tuple[int, ...]
    shape: tuple[int, ...]
    src: Splits
    dst: Splits
    reduces: tuple[int, ...]
    reduction: str | None
    keeps: tuple[int, ...]
    opens: tuple[int, ...]
    opening: str | None
    times: int
    over: int
    itemsize: int
    at_once: bool = False

    @property
    def source(self) -> Holding:
        """What each rank holds at the start, copies to reduce aside."""
        return Holding(self.sizes, self.shape, self.src)

    @property
    def result(self) -> Holding:
        """What each rank holds in the end."""
        return Holding(self.sizes, self.shape, self.dst)

    @cached_property
    def target(self) -> Holding:
        """What each rank needs from the others: the result, but of copies that open, each element at one of them.

        Where the ranks along an opening axis hold different parts, each contributes its own; where they hold the same,
        the first does.
        """
        if not self.opens:
            return self.result
        apart = [axis for axis in self.opens if axis in self.split_axes]
        alike = tuple(axis for axis in self.opens if axis not in self.split_axes)
        held = self.result.restricted(self.src, apart)
        return Holding(held.sizes, held.shape, held.splits, held.combs, None, alike)

    @property
    def live(self) -> tuple[int, ...]:
        """The axes of more than one rank over which anything may move."""
        return tuple(axis for axis, size in enumerate(self.sizes) if size > 1 and axis not in self.keeps)

    @cached_property
    def split_axes(self) -> frozenset[int]:
        """Axes that split a dim at the source."""
        return frozenset(axis for chain in self.src for axis in chain)

    @cached_property
    def wanted_axes(self) -> frozenset[int]:
        """Axes that split a dim at the destination."""
        return frozenset(axis for chain in self.dst for axis in chain)

    @cached_property
    def copy_axes(self) -> tuple[int, ...]:
        """Axes along which ranks hold the same at the source."""
        return tuple(a for a in self.live if a not in self.split_axes and a not in self.reduces)

    def ways(self, axes: Iterable[int]) -> int:
        """Return how many ranks there are along some axes together."""
        return math.prod(self.sizes[axis] for axis in axes)

    def along(self, counts: Counts, axes: Iterable[int]) -> Counts:
        """Return, on every rank, the sum over the ranks along some axes."""
        return np.broadcast_to(counts.sum(axis=tuple(axes), keepdims=True), self.sizes)
