"""Between two meshes that have no axes in common: subsets, disjoint sets, the same ranks in another shape.

Copies are reduced on the mesh they are on, each element at one rank; then one exchange over the ranks of both meshes
moves what is missing; what many ranks of the destination need may be scattered among them first and gathered there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.shards import all_slices
from hyper_parallel.core.redistribute import cost
from hyper_parallel.core.redistribute.builders import Builder
from hyper_parallel.core.redistribute.candidates import candidates
from hyper_parallel.core.redistribute.counting import Counts, coordinate
from hyper_parallel.core.redistribute.holdings import Holding
from hyper_parallel.core.redistribute.nodes import Nodes
from hyper_parallel.core.redistribute.read import task_of
from hyper_parallel.core.redistribute.steps import Fill, Located, Step, price


def ways(
    src: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype, on: cost.Topology
) -> tuple[tuple[int, ...], list[list[Step]]]:
    """Return the ranks of both meshes, sorted, and the ways from one layout to the other.

    Args:
        src: a layout with at most one kind of reduction pending.
        dst: likewise, on another mesh.
        shape: the tensor's sizes.
        dtype: its dtype.
        on: the topology.
    """
    ranks = tuple(sorted({*src.rank_list, *dst.rank_list}))
    full = shape or (1,)
    names = tuple(dict.fromkeys((*src.alias_name, *dst.alias_name)))
    found = []
    for opening, reducing in _openings(src, shape, dtype, on):
        for target, gathering in _closings(dst, shape, dtype, on):
            before, after = Located(_holding(opening, full), src._axes.ranks), _needed(target, full)
            middle = _exchange(before, after, ranks, dtype.itemsize, on, names)
            last = _pending(target, full, dtype.itemsize)
            found.append([_on(step, ranks) for step in (*reducing, *middle, *gathering, *last)])
    return ranks, found


# -- on each of the meshes -------------------------------------------------------------------------------------------


def _openings(
    src: Layout, shape: tuple[int, ...], dtype: torch.dtype, on: cost.Topology
) -> Iterator[tuple[Layout, list[Step]]]:
    """Yield layouts after all reductions, each with the steps to it: spread over the ranks that had copies, or not."""
    live = [name for name, size in zip(src.alias_name, src.mesh_shape, strict=True) if name in src.partial and size > 1]
    if not live:
        yield src.reset_partial(), []
        return
    for target in dict.fromkeys([_spread(src, shape, live), src.reset_partial()]):
        yield target, _cheapest(src, target, shape, dtype, on)


def _closings(
    dst: Layout, shape: tuple[int, ...], dtype: torch.dtype, on: cost.Topology
) -> Iterator[tuple[Layout, list[Step]]]:
    """Yield the layouts to exchange into, each with the steps from there to the destination."""
    yield dst, []
    used = {dst.alias_name[axis] for chain in dst.splits(len(shape)) for axis in chain}
    alike = [name for name, size in zip(dst.alias_name, dst.mesh_shape, strict=True) if size > 1 and name not in used]
    if not alike or not shape or dst.partial:
        return
    nodes = Nodes(dst._axes.ranks, dst.mesh_shape, on.ranks_per_node)
    near = [dst.alias_name[axis] for axis in nodes.near_axes([dst.alias_name.index(name) for name in alike])]
    for names in dict.fromkeys([tuple(alike), tuple(near)]):
        if names:
            spread = _spread(dst, shape, names)
            yield spread, _cheapest(spread, dst, shape, dtype, on)


def _spread(layout: Layout, shape: tuple[int, ...], names: Sequence[str]) -> Layout:
    """Return a layout that also splits the dim which divides best over some axes that it does not split over."""
    if not shape:
        return layout.reset_partial()
    sizes = dict(zip(layout.alias_name, layout.mesh_shape, strict=True))
    splits = [[layout.alias_name[axis] for axis in chain] for chain in layout.splits(len(shape))]
    local = [-(-size // math.prod(sizes[name] for name in chain)) for size, chain in zip(shape, splits, strict=True)]
    pieces = math.prod(sizes[name] for name in names)
    dim = min(range(len(shape)), key=lambda d: (-(-local[d] // pieces) * pieces / max(local[d], 1), d))
    splits[dim] += names
    return layout(*(tuple(chain) or None for chain in splits))


def _cheapest(src: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype, on: cost.Topology) -> list[Step]:
    task = task_of(src, dst, shape, dtype, on.ranks_per_node)
    assert task is not None, "both layouts are on one mesh"
    return min(candidates(task, Builder(task, on)), key=lambda steps: price(steps, on))


def _holding(layout: Layout, shape: tuple[int, ...]) -> Holding:
    sizes = layout.mesh_shape
    splits = layout.splits(len(shape))
    return Holding(sizes, shape, tuple(tuple(axis for axis in chain if sizes[axis] > 1) for chain in splits))


def _needed(target: Layout, shape: tuple[int, ...]) -> Located:
    """Return what has to get to the target's mesh: of copies that open, the first rank along these axes has it all."""
    alike = tuple(target._axes.index(name) for name in target.partial)
    return Located(replace(_holding(target, shape), first=alike), target._axes.ranks)


def _pending(dst: Layout, shape: tuple[int, ...], itemsize: int) -> list[Step]:
    """Return the local step that makes pending copies of what the first rank along these axes has got."""
    names = [name for name in dst.partial if dst.mesh_shape[dst._axes.index(name)] > 1]
    if not names:
        return []
    kind, sizes = dst.partial[names[0]], [dst.mesh_shape[dst._axes.index(name)] for name in names]
    fill = Fill(kind, math.prod(sizes) if kind == "avg" else 1, 1)
    after = Located(_holding(dst, shape), dst._axes.ranks)
    none = np.zeros(len(after.ranks), dtype=np.int64)
    return [Step("copy", (), 1, none, 0.0, _needed(dst, shape), after, itemsize, after.ranks, known_send_bytes=none,
                 fill=fill)]  # fmt: skip


# -- between them ----------------------------------------------------------------------------------------------------


def _exchange(
    before: Located, after: Located, ranks: tuple[int, ...], itemsize: int, on: cost.Topology, names: tuple[str, ...]
) -> list[Step]:
    """Return the exchange over the ranks of both meshes, a local slice where nothing moves, or nothing."""
    have, need = _boxes(before, ranks), _boxes(after, ranks)
    held, wanted, both = _volumes(have), _volumes(need), _volumes(np.stack([have, need]).swapaxes(0, 1), common=True)
    received = (wanted - both) * itemsize
    if not received.any():
        if (held == wanted).all():
            return []
        return [Step("slice", (), 1, received, 0.0, before, after, itemsize, ranks, known_send_bytes=received)]
    askers, owners = (math.prod(at.holding.sizes) for at in (after, before))
    askers //= math.prod(at for at in _ways(after.holding))
    owners //= math.prod(at for at in _ways(before.holding))
    sent = np.maximum(askers * held - both, 0) // owners * itemsize
    moved = int(max(received.max(), sent.max()))
    per_node = Nodes(ranks, (len(ranks),), on.ranks_per_node).share((0,))
    far = 0 if per_node == len(ranks) else moved
    load = cost.Load(len(ranks), per_node, moved, far, int((received + sent).max()))
    return [Step("all_to_all", names, len(ranks), received, cost.seconds("all_to_all", load, on), before, after,
                 itemsize, ranks, None, estimated_send_bytes=sent, load=load)]  # fmt: skip


def _ways(held: Holding) -> list[int]:
    """Return the sizes of the axes along which ranks hold, or need, different elements."""
    axes = {axis for chain in held.splits for axis in chain} | set(held.first)
    return [size for axis, size in enumerate(held.sizes) if axis in axes]


def _boxes(at: Located, ranks: tuple[int, ...]) -> Counts:
    """Return start and stop of every dim of what each rank holds, as an array of ranks x dims x 2."""
    held = at.holding
    found = all_slices(held.shape, held.sizes, held.splits)
    if held.first:
        found[np.broadcast_to(coordinate(held.sizes, held.first) > 0, held.sizes).ravel()] = 0
    full = np.zeros((len(ranks), *found.shape[1:]), dtype=np.int64)
    full[np.searchsorted(ranks, np.asarray(at.ranks))] = found
    return full


def _volumes(boxes: Counts, *, common: bool = False) -> Counts:
    """Return the elements in each box, or in what the boxes of a row have in common."""
    start, stop = boxes[..., 0], boxes[..., 1]
    if common:
        start, stop = start.max(axis=1), stop.min(axis=1)
    return np.maximum(stop - start, 0).prod(axis=-1)


def _on(step: Step, ranks: tuple[int, ...]) -> Step:
    """Return a step with its bytes listed for the ranks of both meshes."""
    if tuple(step.ranks) == ranks:
        return step
    place = np.searchsorted(ranks, np.asarray(step.ranks))

    def spread(counts: Counts | None) -> Counts | None:
        if counts is None:
            return None
        full = np.zeros(len(ranks), dtype=np.int64)
        full[place] = counts
        return full

    received = spread(step.recv_bytes)
    assert received is not None, "every step says what is received"
    known, estimated = spread(step.known_send_bytes), spread(step.estimated_send_bytes)
    return replace(step, ranks=ranks, recv_bytes=received, known_send_bytes=known, estimated_send_bytes=estimated)
