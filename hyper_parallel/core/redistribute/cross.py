"""Between two meshes that have no axes in common: subsets, disjoint sets, the same ranks in another shape.

Copies are reduced on the mesh they are on, each element at one rank; then one exchange over the ranks of both meshes
moves what is missing; what many ranks of the destination need may be scattered among them first and gathered there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.redistribute import cost
from hyper_parallel.core.redistribute.builders import Builder
from hyper_parallel.core.redistribute.candidates import candidates
from hyper_parallel.core.redistribute.holdings import Counts, Holding, meet, volume
from hyper_parallel.core.redistribute.read import transition_of
from hyper_parallel.core.redistribute.steps import Fill, Located, Step


def ways(
    src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, on: cost.Topology
) -> tuple[tuple[int, ...], list[list[Step]]]:
    """Return the ranks of both meshes, sorted, and the ways from one layout to the other.

    Args:
        src: a layout with at most one kind of reduction pending.
        dst: likewise, on another mesh.
        shape: the tensor's sizes.
        itemsize: bytes per element.
        on: the topology.
    """
    ranks = tuple(sorted({*src.rank_list, *dst.rank_list}))
    full = shape or (1,)
    opening, closing = _opening(src, shape, itemsize, on)
    found = []
    for target, gathering in _closings(dst, shape, itemsize, on):
        before = Located(_holding(opening, full), src._axes.ranks)
        alike = tuple(target._axes.index(name) for name in target.partial)
        after = Located(replace(_holding(target, full), first=alike), target._axes.ranks)
        step = _exchange(before, after, ranks, itemsize, on, (*src.alias_name, *dst.alias_name))
        middle = [step] if step is not None else []
        found.append([_on(s, ranks) for s in (*closing, *middle, *gathering, *_pending(target, full, itemsize))])
    return ranks, found


def _opening(src: Layout, shape: tuple[int, ...], itemsize: int, on: cost.Topology) -> tuple[Layout, list[Step]]:
    """Return the layout after all reductions, spread over the ranks that had copies, and the steps to it."""
    live = [name for name in src.partial if src.mesh_shape[src.alias_name.index(name)] > 1]
    if not live:
        return src.reset_partial(), []
    spread = _spread(src, shape, live)
    return spread, _cheapest(src, spread, shape, itemsize, on)


def _closings(dst: Layout, shape: tuple[int, ...], itemsize: int, on: cost.Topology) -> list[tuple[Layout, list[Step]]]:
    """Return the layouts to exchange into, each with the steps from there to the destination."""
    found: list[tuple[Layout, list[Step]]] = [(dst, [])]
    used = {dst.alias_name[axis] for chain in dst.splits(len(shape)) for axis in chain} | set(dst.partial)
    alike = [name for name, size in zip(dst.alias_name, dst.mesh_shape, strict=True) if size > 1 and name not in used]
    if alike and shape and not dst.partial:
        spread = _spread(dst, shape, alike)
        found.append((spread, _cheapest(spread, dst, shape, itemsize, on)))
    return found


def _spread(layout: Layout, shape: tuple[int, ...], names: Sequence[str]) -> Layout:
    """Return a layout that also splits the dim which divides best over some axes that it does not split over."""
    if not shape:
        return layout.reset_partial()
    splits = [[layout.alias_name[axis] for axis in chain] for chain in layout.splits(len(shape))]
    local = [-(-size // int(np.prod([layout.mesh_shape[layout.alias_name.index(n)] for n in chain], initial=1)))
             for size, chain in zip(shape, splits, strict=True)]  # fmt: skip
    pieces = int(np.prod([layout.mesh_shape[layout.alias_name.index(name)] for name in names]))
    dim = min(range(len(shape)), key=lambda d: (-(-local[d] // pieces) * pieces / max(local[d], 1), d))
    splits[dim] += names
    return layout(*(tuple(chain) or None for chain in splits))


def _cheapest(src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, on: cost.Topology) -> list[Step]:
    task = transition_of(src, dst, shape, itemsize)
    assert task is not None, "both layouts are on one mesh"
    return min(
        candidates(task, Builder(task, on)),
        key=lambda steps: (sum(int(s.recv_bytes.sum()) for s in steps), sum(s.seconds for s in steps)),
    )


def _holding(layout: Layout, shape: tuple[int, ...]) -> Holding:
    splits = layout.splits(len(shape))
    sizes = layout.mesh_shape
    return Holding(sizes, shape, tuple(tuple(axis for axis in chain if sizes[axis] > 1) for chain in splits))


def _exchange(
    before: Located, after: Located, ranks: tuple[int, ...], itemsize: int, on: cost.Topology, axes: Sequence[str]
) -> Step | None:
    """Return the exchange over the ranks of both meshes, a local slice where nothing moves, or None for nothing."""
    received = np.zeros(len(ranks), dtype=np.int64)
    changes = False
    have = dict(zip(before.ranks, _parts(before.holding), strict=True))
    need = dict(zip(after.ranks, _parts(after.holding), strict=True))
    for place, rank in enumerate(ranks):
        mine, wanted = have.get(rank), need.get(rank)
        both = meet(mine, wanted) if mine is not None and wanted is not None else None
        received[place] = (volume(wanted) if wanted is not None else 0) - (volume(both) if both is not None else 0)
        changes = changes or mine != wanted
    if not changes:
        return None
    moved = int(received.max(initial=0)) * itemsize
    per_node = len(ranks)
    if on.ranks_per_node is not None:
        per_node = int(max(np.bincount(np.asarray(ranks) // on.ranks_per_node)))
    load = cost.Load(len(ranks), per_node, moved, 0 if per_node == len(ranks) else moved, 2 * moved // itemsize)
    if not moved:
        return _step("slice", (), before, after, received, 0.0, itemsize, ranks)
    names = tuple(dict.fromkeys(axes))
    time = cost.seconds("all_to_all", load, on)
    return _step("all_to_all", names, before, after, received * itemsize, time, itemsize, ranks)


def _step(
    kind: str, axes: tuple[str, ...], before: Located, after: Located, received: Counts, time: float, itemsize: int,
    ranks: tuple[int, ...], fill: Fill | None = None,
) -> Step:  # fmt: skip
    return Step(
        kind=kind,  # type: ignore[arg-type]
        axes=axes,
        group_size=len(ranks) if axes else 1,
        recv_bytes=received,
        peak_extra_bytes=2 * int(received.max(initial=0)),
        seconds=time,
        before=before,
        after=after,
        itemsize=itemsize,
        ranks=ranks,
        group_axes=None if axes else (),
        fill=fill,
        known_send_bytes=None if axes else received,
    )


def _pending(dst: Layout, shape: tuple[int, ...], itemsize: int) -> list[Step]:
    """Return the local step that makes pending copies of what the first rank along these axes has got."""
    names = [name for name in dst.partial if dst.mesh_shape[dst.alias_name.index(name)] > 1]
    if not names:
        return []
    kind = dst.partial[names[0]]
    axes = tuple(dst.alias_name.index(name) for name in names)
    whole = _holding(dst, shape)
    ways_ = int(np.prod([dst.mesh_shape[axis] for axis in axes])) if kind == "avg" else 1
    before, after = Located(replace(whole, first=axes), dst._axes.ranks), Located(whole, dst._axes.ranks)
    none = np.zeros(len(dst._axes.ranks), dtype=np.int64)
    return [_step("copy", (), before, after, none, 0.0, itemsize, dst.rank_list, Fill(kind, ways_, 1))]


def _on(step: Step, ranks: tuple[int, ...]) -> Step:
    """Return a step with its bytes listed for the ranks of both meshes."""
    if tuple(step.ranks) == ranks:
        return step
    place = {rank: index for index, rank in enumerate(ranks)}
    index = [place[rank] for rank in step.ranks]

    def spread(counts: Counts) -> Counts:
        full = np.zeros(len(ranks), dtype=np.int64)
        full[index] = counts
        return full

    return replace(step, ranks=ranks, recv_bytes=spread(step.recv_bytes), known_send_bytes=spread(step.send_bytes))


def _parts(held: Holding) -> list[tuple[tuple[tuple[int, int], ...], ...]]:
    return [held.part(at) for at in np.ndindex(*held.sizes)]
