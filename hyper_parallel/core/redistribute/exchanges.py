"""The ways between what ranks hold and what they need when there is nothing to reduce."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hyper_parallel.core.dtensor.shards import Splits
from hyper_parallel.core.redistribute.builders import Builder
from hyper_parallel.core.redistribute.counting import extent
from hyper_parallel.core.redistribute.holdings import Holding
from hyper_parallel.core.redistribute.steps import Step
from hyper_parallel.core.redistribute.transition import Transition


def exchanges(task: Transition, builder: Builder, held: Holding, alike: tuple[int, ...]) -> Iterator[list[Step]]:
    """Yield the ways from a plain holding to the target; along `alike` ranks hold the same."""
    target = task.target
    crossed = axes_to_cross(task, held, target)
    if not crossed:
        yield builder.local(held, target)
        return
    yield from _sliced_gather(task, builder, held, crossed)
    yield from ([step] for step in _single(task, builder, held, target, crossed, alike))
    if not task.opens:
        yield from _gather_near_last(task, builder, held, alike)


def _sliced_gather(task: Transition, builder: Builder, held: Holding, crossed: tuple[int, ...]) -> Iterator[list[Step]]:
    """Yield the way that gathers what all ranks along the crossed axes need alike; nothing is packed for each one."""
    wanted = task.wanted_axes
    if not task.target.plain or not wanted or wanted & {*crossed}:
        return
    sliced = held.restricted(task.target.splits, sorted(wanted))
    first = builder.local(held, sliced)
    last = builder.exchange(sliced, task.target, crossed, inside=True)
    if first and last is not None and last.kind == "all_gather":
        yield [*first, last]


def axes_to_cross(task: Transition, held: Holding, target: Holding) -> tuple[int, ...]:
    """Return the axes of a plain holding along which some rank needs what another one has."""
    axes = sorted({axis for chain in held.splits for axis in chain} & set(task.live))
    counts = target.counts()
    if target.plain:
        return tuple(a for a in axes if (target.restricted(held.splits, [a]).counts() != counts).any())
    fixed = {axis for comb in target.combs if comb is not None for axis in comb[1]}
    return tuple(a for a in axes if a not in fixed and (target.restricted(held.splits, [a]).counts() != counts).any())


def _single(
    task: Transition, builder: Builder, held: Holding, target: Holding, crossed: tuple[int, ...], alike: tuple[int, ...]
) -> Iterator[Step]:
    """Yield single collectives: over the axes that must be crossed, and with replicas that can share in the sending."""
    alone = builder.exchange(held, target, crossed)
    assert alone is not None, "axes are crossed because something is missing"
    if not target.plain:
        yield alone
        return
    near = tuple(axis for axis in alike if axis in builder.nodes.near_axes((*crossed, *alike)))
    if alone.kind != "all_gather":
        for helpers in dict.fromkeys([(), alike, near]):
            moved = builder.permute(held, target, sorted((*crossed, *helpers)), helpers)
            if moved is not None:
                yield moved
    yield alone
    even = alone.sent_most <= int(alone.recv_bytes.max())
    for helpers in dict.fromkeys([near] if even else [alike, *((axis,) for axis in alike), near]):
        step = builder.exchange(held, target, sorted((*crossed, *helpers)), alike=helpers) if helpers else None
        if step is not None:
            yield step


# -- over slow links once --------------------------------------------------------------------------------------------


def _gather_near_last(
    task: Transition, builder: Builder, held: Holding, alike: tuple[int, ...]
) -> Iterator[list[Step]]:
    """Yield the way that brings each element to a node once, and then spreads it among the ranks of the node."""
    near = builder.nodes.near_axes(task.live)
    late = tuple(axis for axis in near if axis not in task.wanted_axes)
    if len(near) == len(task.live) or not late:
        return
    target = task.target
    between = target.restricted(held.splits, [axis for axis in late if axis in task.split_axes])
    rest = tuple(axis for axis in late if axis not in task.split_axes)
    if rest:
        between = shared_out(task, between, rest, inside=held.splits)
    if between == target:
        return
    crossed = {axis for chain in held.splits for axis in chain if axis in task.live and axis not in late}
    helpers = tuple(axis for axis in alike if axis not in late)
    step = builder.exchange(held, between, sorted((*crossed, *helpers)), alike=helpers)
    first = [step] if step is not None else builder.local(held, between)
    last = builder.exchange(between, target, late, inside=True)
    yield [*first, *([last] if last is not None else [])]


def spread_near_last(
    task: Transition, builder: Builder, held: Holding, crossed: tuple[int, ...]
) -> Iterator[list[Step]]:
    """Yield the way from reduced parts that brings each element to a node once; along no axis ranks hold the same."""
    near = builder.nodes.near_axes(task.live)
    late = tuple(axis for axis in crossed if axis in near and axis not in task.wanted_axes)
    if not late or len(late) == len(crossed):
        return
    combs = held.combs or (None,) * len(task.shape)
    chains = tuple(comb[0] if comb is not None else chain for comb, chain in zip(combs, held.splits, strict=True))
    between = task.target.restricted(chains, late)
    first = builder.exchange(held, between, [axis for axis in crossed if axis not in late])
    last = builder.exchange(between, task.target, late, inside=True)
    if first is not None and last is not None:
        yield [first, last]


# -- even shares -----------------------------------------------------------------------------------------------------


def shared_out(
    task: Transition, held: Holding, axes: tuple[int, ...], apart: Sequence[int] = (), *, anew: bool = False,
    inside: Splits = (),
) -> Holding:  # fmt: skip
    """Return a holding divided over some more axes, along which ranks hold the same.

    One dim is divided: the one that does so most evenly. Where that can be said as one more split after those of the
    source or of the destination it is, as then the same elements can be named at both; else each part is divided anew.
    Where sizes are uneven, anew is the more even.

    Args:
        task: the transition.
        held: what the ranks hold.
        axes: the axes.
        apart: axes over which the destination's splits will divide it later.
        anew: divide each part anew where sizes are uneven.
        inside: splits to divide the parts of, where `held` is of whole ones: then no rank has to get all of its share
            from one part, and another one nothing.
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


def _chain(task: Transition, held: Holding, dim: int, inside: Splits) -> tuple[int, ...] | None:
    """Return the chain of splits that a part of a dim can be divided after, or None."""
    comb = held.combs[dim] if held.combs else None
    own = held.splits[dim]
    if comb is not None:
        return comb[0] if own == comb[0][: len(own)] else None
    if inside and own == inside[dim][: len(own)]:
        return inside[dim]
    wanted = task.dst[dim]
    return wanted if own == wanted[: len(own)] else own


def _roomiest(task: Transition, held: Holding, axes: tuple[int, ...], later: Sequence[int] = ()) -> int:
    """Return the dim that is divided most evenly over some axes, by what one rank holds; those to divide later last."""
    ways = task.ways(axes)
    sizes = [int(extent(held, dim).flat[0]) for dim in range(len(held.shape))]
    sizes = sizes if all(sizes) else list(task.shape)
    waste = [-(-size // ways) * ways / max(size, 1) for size in sizes]
    return min(range(len(sizes)), key=lambda dim: (waste[dim], dim in later, dim))
