"""The order of several axes on one dim, as torch writes it: one (dim, split factor) per axis.

torch applies placements from the first axis to the last. When a dim is split by a later axis first, torch gives the
earlier axis a strided shard whose split factor is the number of parts already made by later axes: with mesh
(dp=2, tp=4) and tp outside, dp has split factor 4. Split factor 1 is a plain shard. Where an axis of size 1 comes in
the order makes no difference to anything: it always has split factor 1, and is read back as the outer one.
"""

import math
from collections.abc import Sequence

from hyper_parallel.core.dtensor.shards import Splits

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

    From the last axis to the first, each axis is put where the axes before it, all of them later on the mesh, make as
    many parts as its split factor says.

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
    """Return the axes in an order in which every dim is split from left to right, as near as can be to mesh order.

    >>> split_order(3, ((2, 0), (1,)))
    (1, 2, 0)
    >>> split_order(2, ((0, 1),))
    (0, 1)

    An axis splits one dim at most, so there always is one.

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
