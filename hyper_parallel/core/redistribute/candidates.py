"""Candidate plans from one layout to another.

All candidates keep the wanted elements, reduce, exchange, and gather last. The first candidate moves the fewest bytes:
each element is reduced at one rank, if possible at one that needs it, so that n copies take n - 1 transfers. Then it
moves once to each other rank that needs it. The other candidates trade bytes for fewer steps, or for fewer bytes over
slow links.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from hyper_parallel.core.dtensor.ownership import Splits, all_slices
from hyper_parallel.core.machine.description import Machine
from hyper_parallel.core.redistribute import cost
from hyper_parallel.core.redistribute.builder import Builder
from hyper_parallel.core.redistribute.holdings import Counts, Holding, Located, coordinate, extent
from hyper_parallel.core.redistribute.steps import Fill, Step, price
from hyper_parallel.core.redistribute.transition import LayoutSide, MeshTransition, Transition, on_one_mesh


def candidates(transition: Transition, on: Machine | None) -> tuple[range | tuple[int, ...], list[list[Step]]]:
    """Return the participating ranks, and every candidate; the first candidate moves the fewest bytes.

    The ranks are the ranks of the mesh, in its order, or of both meshes, sorted.
    """
    task = on_one_mesh(transition, cost.ranks_per_node(on))
    if task is None:
        return transition.ranks, list(_between_meshes(transition, on))
    return task.ranks, list(ways(task, Builder(task, on)))


def ways(task: MeshTransition, builder: Builder) -> Iterator[list[Step]]:
    """Yield every candidate on one mesh."""
    if 0 in task.shape:  # an empty tensor needs no steps
        yield []
        return
    closing = _closing(task, builder)
    found = reductions(task, builder) if task.reduces else exchanges(task, builder, task.source, task.replica_axes)
    for way in itertools.chain(found, [axis_by_axis(task, builder)] if task.reduces or task.split_axes else []):
        if not task.at_once or sum(bool(step.reduces) for step in way) == 1:
            yield [*way, *closing]


def _closing(task: MeshTransition, builder: Builder) -> list[Step]:
    """Return the local step that makes pending copies or rescales them; [] if neither is needed."""
    if not task.opens and task.times == task.over:
        return []
    times = task.times * (task.ways(task.opens) if task.opening == "avg" else 1)
    return [builder.fill(task.target, task.result, Fill(task.opening or "sum", times, task.over))]


# -- without reductions ------------------------------------------------------------------------------------------------


def exchanges(task: MeshTransition, builder: Builder, held: Holding, replicas: tuple[int, ...]) -> Iterator[list[Step]]:
    """Yield the candidates from a plain holding to the target; ranks along `replicas` hold the same elements."""
    target = task.target
    communicating = communicating_axes(task, held, target)
    if not communicating:
        yield builder.local(held, target)
        return
    yield from _sliced_gather(task, builder, held, communicating)
    yield from ([step] for step in _single(task, builder, held, target, communicating, replicas))
    if not task.opens:
        yield from _gather_intra_node_last(task, builder, held, replicas)


def _sliced_gather(
    task: MeshTransition, builder: Builder, held: Holding, communicating: tuple[int, ...]
) -> Iterator[list[Step]]:
    """Slice each part to the elements that the whole group needs, then all_gather: nothing is packed per receiver."""
    wanted = task.wanted_axes
    if not task.target.plain or not wanted or wanted & {*communicating}:
        return
    sliced = held.restricted(task.target.splits, sorted(wanted))
    first = builder.local(held, sliced)
    last = builder.exchange(sliced, task.target, communicating, inside=True)
    if first and last is not None and last.kind == "all_gather":
        yield [*first, last]


def communicating_axes(task: MeshTransition, held: Holding, target: Holding) -> tuple[int, ...]:
    """Return the axes of a plain holding along which some rank needs elements of another rank."""
    axes = sorted({axis for chain in held.splits for axis in chain} & set(task.live))
    counts = target.counts()
    if target.plain:
        return tuple(a for a in axes if (target.restricted(held.splits, [a]).counts() != counts).any())
    fixed = {axis for comb in target.combs if comb is not None for axis in comb[1]}
    return tuple(a for a in axes if a not in fixed and (target.restricted(held.splits, [a]).counts() != counts).any())


def _single(
    task: MeshTransition,
    builder: Builder,
    held: Holding,
    target: Holding,
    communicating: tuple[int, ...],
    replicas: tuple[int, ...],
) -> Iterator[Step]:
    """Yield single collectives: over the communicating axes, and over replicas as well, which share the sending."""
    alone = builder.exchange(held, target, communicating)
    assert alone is not None, "axes communicate because something is missing"
    if not target.plain:
        yield alone
        return
    intra_node = tuple(axis for axis in replicas if axis in builder.nodes.intra_node_axes((*communicating, *replicas)))
    if alone.kind != "all_gather":
        for helpers in dict.fromkeys([(), replicas, intra_node]):
            moved = builder.permute(held, target, sorted((*communicating, *helpers)), helpers)
            if moved is not None:
                yield moved
    yield alone
    even = alone.sent_most <= int(alone.recv_bytes.max())
    for helpers in dict.fromkeys([intra_node] if even else [replicas, *((axis,) for axis in replicas), intra_node]):
        step = builder.exchange(held, target, sorted((*communicating, *helpers)), replicas=helpers) if helpers else None
        if step is not None:
            yield step


# -- once over slow links --------------------------------------------------------------------------------------------


def _gather_intra_node_last(
    task: MeshTransition, builder: Builder, held: Holding, replicas: tuple[int, ...]
) -> Iterator[list[Step]]:
    """Yield the candidate that sends each element to a node once, then gathers within the node."""
    intra_node = builder.nodes.intra_node_axes(task.live)
    gathered = tuple(axis for axis in intra_node if axis not in task.wanted_axes)
    if len(intra_node) == len(task.live) or not gathered:
        return
    target = task.target
    between = target.restricted(held.splits, [axis for axis in gathered if axis in task.split_axes])
    rest = tuple(axis for axis in gathered if axis not in task.split_axes)
    if rest:
        between = shared_out(task, between, rest, inside=held.splits)
    if between == target:
        return
    communicating = {axis for chain in held.splits for axis in chain if axis in task.live and axis not in gathered}
    helpers = tuple(axis for axis in replicas if axis not in gathered)
    step = builder.exchange(held, between, sorted((*communicating, *helpers)), replicas=helpers)
    first = [step] if step is not None else builder.local(held, between)
    last = builder.exchange(between, target, gathered, inside=True)
    yield [*first, *([last] if last is not None else [])]


def spread_intra_node_last(
    task: MeshTransition, builder: Builder, held: Holding, communicating: tuple[int, ...]
) -> Iterator[list[Step]]:
    """Yield the candidate that sends each reduced element to a node once; no two ranks hold the same element."""
    intra_node = builder.nodes.intra_node_axes(task.live)
    gathered = tuple(axis for axis in communicating if axis in intra_node and axis not in task.wanted_axes)
    if not gathered or len(gathered) == len(communicating):
        return
    combs = held.combs or (None,) * len(task.shape)
    chains = tuple(comb[0] if comb is not None else chain for comb, chain in zip(combs, held.splits, strict=True))
    between = task.target.restricted(chains, gathered)
    first = builder.exchange(held, between, [axis for axis in communicating if axis not in gathered])
    last = builder.exchange(between, task.target, gathered, inside=True)
    if first is not None and last is not None:
        yield [first, last]


# -- even shares -----------------------------------------------------------------------------------------------------


def shared_out(
    task: MeshTransition, held: Holding, axes: tuple[int, ...], apart: Sequence[int] = (), *, anew: bool = False,
    inside: Splits = (),
) -> Holding:  # fmt: skip
    """Divide a holding evenly over more axes, along which ranks hold the same elements.

    One dim is divided, the one that divides most evenly. If possible the division extends the splits of the source or
    of the destination, because then both sides can name the same elements. Otherwise each part is divided anew, which
    is more even if sizes are uneven.

    Args:
        task: the transition.
        held: the holding to divide.
        axes: the axes to divide over.
        apart: axes over which the destination's splits will divide it later.
        anew: divide each part anew where sizes are uneven.
        inside: splits whose parts are divided, if `held` does not split the dim so. Otherwise one rank would get its
            whole share from one part, and another rank no elements from it.
    """
    dim = _roomiest(task, held, axes, [dim for dim, chain in enumerate(task.dst) if set(apart) & set(chain)])
    comb = held.combs[dim] if held.combs else None
    chain = _chain(task, held, dim, inside)
    uneven = chain is not None and held.shape[dim] % task.ways((*chain, *axes))
    if chain is None or any(axis in chain for axis in axes) or (anew and uneven):
        return replace(held, share=(dim, axes))
    fixed = comb[1] if comb is not None else ()
    combs = list(held.combs or (None,) * len(held.shape))
    combs[dim] = ((*chain, *axes), (*fixed, *axes))
    return replace(held, combs=tuple(combs))


def _chain(task: MeshTransition, held: Holding, dim: int, inside: Splits) -> tuple[int, ...] | None:
    """Return the chain of splits after which a part of a dim can be divided, or None."""
    comb = held.combs[dim] if held.combs else None
    own = held.splits[dim]
    if comb is not None:
        return comb[0] if own == comb[0][: len(own)] else None
    if inside and own == inside[dim][: len(own)]:
        return inside[dim]
    wanted = task.dst[dim]
    return wanted if own == wanted[: len(own)] else own


def _roomiest(task: MeshTransition, held: Holding, axes: tuple[int, ...], later: Sequence[int] = ()) -> int:
    """Return the dim whose extent on one rank divides most evenly over some axes; dims in `later` rank last in ties."""
    ways = task.ways(axes)
    sizes = [int(extent(held, dim).flat[0]) for dim in range(len(held.shape))]
    sizes = sizes if all(sizes) else list(task.shape)
    waste = [-(-size // ways) * ways / max(size, 1) for size in sizes]
    return min(range(len(sizes)), key=lambda dim: (waste[dim], dim in later, dim))


# -- with pending copies -----------------------------------------------------------------------------------------------
# The fewest bytes move if each element is reduced at one rank, if possible at one that needs it, and is then sent to
# the other ranks that need it. Reducing everywhere at once takes fewer steps and more bytes. Reducing within the nodes
# first takes more steps and fewer bytes between nodes.


def reductions(task: MeshTransition, builder: Builder) -> Iterator[list[Step]]:
    """Yield the candidates that start with copies over `task.reduces`; the first moves the fewest bytes."""
    yield from _scatter_first(task, builder)
    yield from _reduce_whole(task, builder)
    yield from _directly(task, builder)
    yield from _intra_node_first(task, builder)


def _scatter_first(task: MeshTransition, builder: Builder) -> Iterator[list[Step]]:
    """Reduce each element at one rank, if possible at one that needs it, then exchange."""
    spread = (*task.reduces, *task.replica_axes)
    settled = _settled(task)
    aimed = [task.wanted_axes]
    if builder.on is not None and not task.wanted_axes & {*spread} <= settled:
        aimed.append(settled)  # more bytes in all, but no rank handles more than its share
    for wanted in aimed:
        between = _reducers(task, spread, wanted, anew=not builder.nodes.spans_nodes(range(len(task.sizes))))
        first = builder.reduce_into(task.source, between, task.reduces)
        for rest in _from_reducers(task, builder, between):
            yield [first, *rest]
            if len(rest) == 1 and rest[0].kind == "all_gather" and rest[0].group_axes == first.group_axes:
                # Scattering the sum and gathering it over the same ranks is one collective.
                whole = rest[0].after.holding
                yield [*builder.local(task.source, whole), builder.all_reduce(whole, task.reduces)]


def _settled(task: MeshTransition) -> frozenset[int]:
    """Return the axes that split, at the destination, dims whose source splits are a prefix of the destination's.

    In such a dim the destination's splits divide every rank's part evenly; in others a rank may get all or nothing.
    """
    pairs = zip(task.src, task.dst, strict=True)
    return frozenset(axis for own, wanted in pairs if own == wanted[: len(own)] for axis in wanted)


def _reduce_whole(task: MeshTransition, builder: Builder) -> Iterator[list[Step]]:
    """Reduce, on every rank, all elements needed along the copies, then exchange: fewer steps, more bytes."""
    held = task.source.restricted(task.dst, [axis for axis in task.replica_axes if axis in task.wanted_axes])
    if not held.plain:
        held = task.source
    first = [*builder.local(task.source, held), builder.all_reduce(held, task.reduces)]
    for rest in exchanges(task, builder, held, (*task.reduces, *task.replica_axes)):
        yield [*first, *rest]


def _directly(task: MeshTransition, builder: Builder) -> Iterator[list[Step]]:
    """Yield the single step in which every rank receives all copies of its elements and reduces them itself."""
    if task.target.plain:
        axes = sorted((*communicating_axes(task, task.source, task.target), *task.reduces))
        step = builder.exchange(task.source, task.target, axes, reduces=task.reduces)
        assert step is not None, "the copies of others are missing somewhere"
        yield [step]


def _intra_node_first(task: MeshTransition, builder: Builder) -> Iterator[list[Step]]:
    """Reduce_scatter within the nodes, reduce the shards between them, then gather within them."""
    intra_node = builder.nodes.intra_node_axes(task.live)
    inner = tuple(axis for axis in task.reduces if axis in intra_node)
    outer = tuple(axis for axis in task.reduces if axis not in intra_node)
    replicas = tuple(axis for axis in task.replica_axes if axis in intra_node or axis in task.wanted_axes)
    if len(intra_node) == len(task.live) or not (inner or replicas) or task.opens:
        return
    scattered = tuple(axis for axis in outer if axis in task.wanted_axes)
    reduced = _reducers(task, (*inner, *replicas), task.wanted_axes, scattered)
    steps = [builder.reduce_into(task.source, reduced, inner)] if inner else builder.local(task.source, reduced)
    if scattered:
        if reduced.share is not None:  # an even share cannot be divided a second time
            return
        whole, reduced = reduced, reduced.restricted(_chains(task, reduced), scattered)
        steps = [*steps, builder.reduce_into(whole, reduced, scattered)]
    everywhere = tuple(axis for axis in outer if axis not in scattered)
    if everywhere:
        steps = [*steps, builder.all_reduce(reduced, everywhere)]
    for rest in _from_reducers(task, builder, reduced):
        yield [*steps, *rest]


def _chains(task: MeshTransition, held: Holding) -> tuple[tuple[int, ...], ...]:
    """Return the destination's splits; a dim with a comb keeps the chain of its comb."""
    combs = held.combs or (None,) * len(task.dst)
    return tuple(comb[0] if comb is not None else chain for comb, chain in zip(combs, task.dst, strict=True))


def _reducers(
    task: MeshTransition, over: Sequence[int], wanted: frozenset[int], apart: Sequence[int] = (), *, anew: bool = False
) -> Holding:
    """Return the elements that each rank reduces over some axes, along which ranks hold the same part.

    Each rank takes its block of the destination's splits over these axes. Ranks with the same block share it evenly.

    Args:
        task: the transition.
        over: the axes.
        wanted: axes along which the destination's splits decide; along the others the shares are even.
        apart: axes over which the destination's splits will divide it later.
        anew: divide parts anew where sizes are uneven, see `shared_out`.
    """
    held = task.source.restricted(task.dst, [axis for axis in over if axis in wanted])
    idle = tuple(axis for axis in task.opens if axis in over)
    held = replace(held, first=idle)
    rest = tuple(axis for axis in sorted(over) if axis not in wanted and axis not in task.opens)
    return shared_out(task, held, rest, apart, anew=anew) if rest else held


def _from_reducers(task: MeshTransition, builder: Builder, between: Holding) -> Iterator[list[Step]]:
    """Yield the candidates from the reducing ranks to the target."""
    target = task.target
    communicating = _divided(task, between) | set(between.first)
    for axis in task.split_axes:
        if axis in task.live and (not target.plain or _communicates_over(task, axis)):
            communicating.add(axis)
    step = builder.exchange(between, target, sorted(communicating)) if communicating else None
    if step is None:
        yield builder.local(between, target)
        return
    yield [step]
    if target.plain and between.share is None:
        yield from spread_intra_node_last(task, builder, between, tuple(sorted(communicating)))


def _divided(task: MeshTransition, held: Holding) -> set[int]:
    """Return the axes over which a holding divides the blocks of `splits` in another way than the destination does."""
    fixed: set[int] = set()
    for comb, wanted in zip(held.combs, task.dst, strict=False):
        if comb is not None:
            same = wanted if comb[0][: len(wanted)] == wanted else ()
            fixed.update(axis for axis in comb[1] if axis not in same)
    return fixed | set(held.share[1] if held.share is not None else ())


def _communicates_over(task: MeshTransition, axis: int) -> bool:
    target = task.target
    return bool((target.restricted(task.src, [axis]).counts() != target.counts()).any())


# -- baseline candidates, so that the chosen plan is never worse -------------------------------------------------------


def axis_by_axis(task: MeshTransition, builder: Builder) -> list[Step]:
    """Return the steps that change one axis at a time, as DTensor's default plan does.

    Pending axes are first, in mesh order. An axis is reduce-scattered if the destination splits over it and its outer
    axes are in place; otherwise it is all-reduced. Then each misplaced axis, inner ones first, moves to its wanted dim
    if the outer axes are in place there, and is gathered otherwise. Slices are last.
    """
    steps: list[Step] = []
    held = task.source
    for _, parts in itertools.groupby(task.reduces, key=lambda axis: task.names[axis]):
        axes = tuple(parts)  # sub-axes of one mesh axis, which is cut at node boundaries
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


def _append(held: Holding, wanted: Splits, axis: int) -> Holding | None:
    """Split the holding over one more axis if that puts the axis at its wanted place; else return None."""
    for dim, chain in enumerate(wanted):
        if axis in chain and held.splits[dim] == chain[: chain.index(axis)]:
            return _with(held, dim, (*held.splits[dim], axis))
    return None


def _with(held: Holding, dim: int, chain: tuple[int, ...]) -> Holding:
    return replace(held, splits=(*held.splits[:dim], chain, *held.splits[dim + 1 :]))


# -- between two meshes without common axes: subsets, disjoint sets, the same ranks in another shape -------------------
# Copies are reduced on their own mesh, each element at one rank. Then one exchange over the ranks of both meshes moves
# the missing elements. Elements that many destination ranks need may be scattered first and gathered there.


def _between_meshes(transition: Transition, on: Machine | None) -> Iterator[list[Step]]:
    """Yield the candidates from a layout on one mesh to a layout on another."""
    ranks, size = transition.ranks, transition.itemsize
    names = tuple(dict.fromkeys((*transition.before.names, *transition.after.names)))
    for opening, reducing in _openings(transition, on):
        for target, gathering in _closings(transition, on):
            middle = _exchange(opening.held, target.needed, ranks, size, on, names)
            last = _made_pending(target, size)
            yield [_on(step, ranks) for step in (*reducing, *middle, *gathering, *last)]


# -- on each of the meshes -------------------------------------------------------------------------------------------


def _openings(transition: Transition, on: Machine | None) -> Iterator[tuple[LayoutSide, list[Step]]]:
    """Yield layouts after all reductions, each with its steps: spread over the ranks that had copies, or replicated."""
    before = transition.before
    if not before.pending:
        yield before, []
        return
    spread = before.reduced if transition.scalar else _spread(before, before.pending)
    for target in dict.fromkeys([spread, before.reduced]):
        yield target, _cheapest(replace(transition, after=target), on)


def _closings(transition: Transition, on: Machine | None) -> Iterator[tuple[LayoutSide, list[Step]]]:
    """Yield the layouts to exchange into, each with the steps from it to the destination."""
    after = transition.after
    yield after, []
    used = {axis for chain in after.splits for axis in chain}
    replicas = tuple(axis for axis in after.live if axis not in used)
    if not replicas or transition.scalar or after.pending:
        return
    intra_node = cost.Nodes(after.ranks, after.sizes, cost.ranks_per_node(on)).intra_node_axes(replicas)
    for axes in dict.fromkeys([replicas, intra_node]):
        if axes:
            spread = _spread(after, axes)
            yield spread, _cheapest(replace(transition, before=spread), on)


def _spread(side: LayoutSide, axes: tuple[int, ...]) -> LayoutSide:
    """Return a layout that also splits over `axes`, which it does not split over, the dim that divides best."""
    local = [-(-size // side.ways(chain)) for size, chain in zip(side.shape, side.splits, strict=True)]
    ways = side.ways(axes)
    dim = min(range(len(local)), key=lambda d: (-(-local[d] // ways) * ways / max(local[d], 1), d))
    chain = (*side.splits[dim], *axes)
    return replace(side.reduced, splits=(*side.splits[:dim], chain, *side.splits[dim + 1 :]))


def _cheapest(transition: Transition, on: Machine | None) -> list[Step]:
    task = on_one_mesh(transition, cost.ranks_per_node(on))
    assert task is not None, "both layouts are on one mesh"
    return min(ways(task, Builder(task, on)), key=lambda steps: price(steps, on))


def _made_pending(side: LayoutSide, itemsize: int) -> list[Step]:
    """Return the local step that makes pending copies; rank 0 along the pending axes contributes the data."""
    if side.reduction is None:
        return []
    fill = Fill(side.reduction, side.ways(side.pending) if side.reduction == "avg" else 1, 1)
    none = np.zeros(len(side.ranks), dtype=np.int64)
    return [Step("copy", (), 1, none, 0.0, side.needed, side.held, itemsize, side.ranks, known_send_bytes=none,
                 fill=fill)]  # fmt: skip


# -- between them ----------------------------------------------------------------------------------------------------


def _exchange(
    before: Located, after: Located, ranks: tuple[int, ...], itemsize: int, on: Machine | None, names: tuple[str, ...]
) -> list[Step]:
    """Return the exchange over the ranks of both meshes, or a local slice if no bytes move, or no step."""
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
    _, nodes, most = cost.Nodes(ranks, (len(ranks),), cost.ranks_per_node(on)).spread((0,))
    load = cost.Load(len(ranks), most, moved, moved * (nodes > 1), int((received + sent).max()), nodes)
    return [Step("all_to_all", names, len(ranks), received, cost.seconds("all_to_all", load, on), before, after,
                 itemsize, ranks, None, estimated_send_bytes=sent, load=load)]  # fmt: skip


def _ways(held: Holding) -> list[int]:
    """Return the sizes of the axes along which ranks hold, or need, different elements."""
    axes = {axis for chain in held.splits for axis in chain} | set(held.first)
    return [size for axis, size in enumerate(held.sizes) if axis in axes]


def _boxes(at: Located, ranks: tuple[int, ...]) -> Counts:
    """Return start and stop of each rank's part in every dim, as an array of ranks x dims x 2."""
    held = at.holding
    found = all_slices(held.shape, held.sizes, held.splits)
    if held.first:
        found[np.broadcast_to(coordinate(held.sizes, held.first) > 0, held.sizes).ravel()] = 0
    full = np.zeros((len(ranks), *found.shape[1:]), dtype=np.int64)
    full[np.searchsorted(ranks, np.asarray(at.ranks))] = found
    return full


def _volumes(boxes: Counts, *, common: bool = False) -> Counts:
    """Return the elements of each box, or of the intersection of the boxes in a row."""
    start, stop = boxes[..., 0], boxes[..., 1]
    if common:
        start, stop = start.max(axis=1), stop.min(axis=1)
    return np.maximum(stop - start, 0).prod(axis=-1)


def _on(step: Step, ranks: tuple[int, ...]) -> Step:
    """List the bytes of a step for the ranks of both meshes."""
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
