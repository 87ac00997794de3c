"""The least that any plan must move, by counting; and what the obvious plans move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.redistribute.holdings import Counts
from hyper_parallel.core.redistribute.transition import MeshTransition, Side, Transition, on_one_mesh, read


def lower_bound(src: Layout, dst: Layout, global_shape: Sequence[int], dtype: torch.dtype) -> npt.NDArray[Any]:
    """Return the least bytes that each rank must receive on the way from one layout to another.

    >>> mesh = Layout((2, 2), ("dp", "tp"))
    >>> lower_bound(mesh("dp"), mesh("tp"), (8,), torch.float32).tolist()  # dp 0, tp 1 lacks elements 4 to 7
    [0, 16, 16, 0]

    Without copies to reduce, it is what a rank needs and does not hold: exact for every rank. With copies to reduce, an
    element of which there are n copies, needed by d ranks, takes n - 1 transfers to be reduced at one rank and d to get
    to all who need it, one less if that rank is one of them, which it can be where a rank that needs the element holds
    a copy. Then only the sum over all ranks is a bound, and each rank is given an equal share of it (a float).
    Receivers combine; nothing is reduced within a switch.

    Args:
        src: where the tensor is.
        dst: where it should be.
        global_shape: the whole tensor's sizes, in elements.
        dtype: its dtype.

    Returns:
        One number per rank of the mesh; for two meshes, per rank of both, sorted.

    Raises:
        TypeError, ValueError: as `plan`.
    """
    transition = read("cannot bound a redistribution", src, dst, global_shape, dtype)
    task = on_one_mesh(transition)
    if task is None:
        return _between_meshes(transition)
    if not task.reduces:
        target = task.target
        both = target.overlaps(task.source)
        return ((target.counts() - both) * task.itemsize).ravel()
    total = _transfers(task) * task.itemsize
    ranks = len(task.ranks)
    return np.full(ranks, total / ranks)


def _transfers(task: MeshTransition) -> int:
    """Return the least transfers of single elements, copies reduced on the way, over all ranks."""
    copies = task.ways(task.reduces)
    elements = int(np.prod(task.shape)) * task.ways(task.keeps)
    replicas = [a for a in task.live if a not in task.wanted_axes and a not in task.opens]
    needed_by = task.ways(replicas)
    return elements * (copies - 1 + needed_by) - _met(task)


def _met(task: MeshTransition) -> int:
    """Return of how many elements a rank that needs them holds a copy."""
    source, result = task.source, task.result
    both = source.overlaps(result)
    free = [a for a in task.live if a not in task.wanted_axes and a not in task.split_axes]
    return int(both.sum()) // task.ways(free)


def _between_meshes(transition: Transition) -> npt.NDArray[Any]:
    """Count element by element of a coarse grid: the cells between all edges of both layouts."""
    before, after, ranks = transition.before, transition.after, transition.ranks
    cells, sizes = _cells(before, after)
    copies = before.ways(before.pending)
    have, need = _held(before, cells), _held(after, cells)
    first = _first_only(after)
    if copies == 1:
        result = []
        for rank in ranks:
            wanted = need.get(rank) if rank in first else None
            mine = have.get(rank)
            if wanted is None:
                result.append(0)
            else:
                missing = wanted if mine is None else wanted & ~mine
                result.append(int(sizes[missing].sum()) * transition.itemsize)
        return np.array(result, dtype=np.int64)
    wanted_by = sum(need[rank].astype(np.int64) for rank in need if rank in first)
    met = sum((have[rank] & need[rank]).astype(np.int64) for rank in have if rank in need and rank in first)
    total = int((sizes * (copies - 1 + wanted_by - (np.asarray(met) > 0))).sum()) * transition.itemsize
    return np.full(len(ranks), total / len(ranks))


def _first_only(side: Side) -> set[int]:
    """Return the ranks at coordinate 0 of the pending axes: the others need nothing."""
    mesh = np.asarray(side.ranks).reshape(side.sizes)
    index = tuple(slice(0, 1) if axis in side.pending else slice(None) for axis in range(len(side.sizes)))
    return set(mesh[index].ravel().tolist())


def _cells(before: Side, after: Side) -> tuple[list[Counts], Counts]:
    """Return per dim the first index of each cell, and the number of elements of every cell."""
    starts, lengths = [], []
    slices = [_slices(side) for side in (before, after)]
    for dim, size in enumerate(before.shape):
        edges = np.unique(np.concatenate([part[:, dim].ravel() for part in slices] + [np.array([0, size])]))
        starts.append(edges[:-1] if len(edges) > 1 else np.zeros(0, dtype=np.int64))
        lengths.append(np.diff(edges))
    sizes = lengths[0]
    for more in lengths[1:]:
        sizes = np.multiply.outer(sizes, more)
    return starts, sizes


def _slices(side: Side) -> Counts:
    parts = [side.held.holding.part(at) for at in np.ndindex(*side.sizes)]
    return np.array([[pieces[0] if pieces else (0, 0) for pieces in part] for part in parts], dtype=np.int64)


def _held(side: Side, starts: list[Counts]) -> dict[int, npt.NDArray[np.bool_]]:
    held = {}
    for rank, part in zip(side.ranks, _slices(side), strict=True):
        mask = np.ones((), dtype=bool)
        for dim, (start, stop) in enumerate(part):
            mask = np.logical_and.outer(mask, (starts[dim] >= start) & (starts[dim] < stop))
        held[rank] = mask
    return held
