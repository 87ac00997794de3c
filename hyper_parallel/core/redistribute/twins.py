"""The obvious plans: what the clever one is compared with, and never worse than."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hyper_parallel.core.dtensor.shards import Splits
from hyper_parallel.core.redistribute.builders import Builder
from hyper_parallel.core.redistribute.holdings import Holding
from hyper_parallel.core.redistribute.steps import Step
from hyper_parallel.core.redistribute.transition import Transition


def axis_by_axis(task: Transition, builder: Builder) -> list[Step]:
    """Return the steps that change one axis at a time, as DTensor's default plan does.

    Pending axes first, in mesh order: reduced and scattered where the destination splits over the axis and the axes
    outside of it are in place, else reduced everywhere. Then each axis that is not where it should be, inner ones
    first, moves to another dim if it can come to its place there, and is gathered otherwise. Slices come last.
    """
    steps: list[Step] = []
    held = task.source
    for _, parts in itertools.groupby(task.reduces, key=lambda axis: task.names[axis]):
        axes = tuple(parts)  # of one axis of the mesh, which is cut where nodes end
        if all(_append(held, task.dst, axis) is None for axis in axes):
            steps.append(builder.all_reduce(held, axes))
            continue
        for axis in axes:
            better = _append(held, task.dst, axis)
            if better is not None:
                steps.append(builder.reduce_into(held, better, (axis,)))
                held = better
            else:
                steps.append(builder.all_reduce(held, (axis,)))
    for dim in range(len(task.shape)):
        while held.splits[dim] != task.dst[dim][: len(held.splits[dim])]:
            axis = held.splits[dim][-1]
            less = _with(held, dim, held.splits[dim][:-1])
            after = _append(less, task.dst, axis) or less
            step = builder.exchange(held, after, (axis,))
            steps += [step] if step is not None else builder.local(held, after)
            held = after
    return [*steps, *builder.local(held, task.target)]


def gather_everything(task: Transition, builder: Builder) -> list[Step]:
    """Return the steps that give every rank the whole tensor, reduced, and then slice: the brute-force twin."""
    whole = Holding(task.sizes, task.shape, ((),) * len(task.shape))
    steps = [builder.all_reduce(task.source, task.reduces)] if task.reduces else []
    axes = tuple(axis for axis in task.live if axis in task.split_axes)
    gather = builder.exchange(task.source, whole, axes) if axes else None
    return [*steps, *([gather] if gather is not None else []), *builder.local(whole, task.target)]


def _append(held: Holding, wanted: Splits, axis: int) -> Holding | None:
    """Return the holding split over one more axis, if that puts the axis where it is wanted; else None."""
    for dim, chain in enumerate(wanted):
        if axis in chain and held.splits[dim] == chain[: chain.index(axis)]:
            return _with(held, dim, (*held.splits[dim], axis))
    return None


def _with(held: Holding, dim: int, chain: tuple[int, ...]) -> Holding:
    return replace(held, splits=(*held.splits[:dim], chain, *held.splits[dim + 1 :]))
