"""The ways to get from one layout to another that are worth pricing.

All follow one form: keep what is wanted, reduce, exchange, gather last. For every element that form moves the least
there is: one copy short of all copies to the rank that reduces it, which is one that needs it if any holder does, and
then one copy to each rank that needs it and is not that one. The others trade bytes for fewer steps, or for less over
slow links.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hyper_parallel.core.redistribute.builders import Builder
from hyper_parallel.core.redistribute.holdings import Holding, length
from hyper_parallel.core.redistribute.steps import Fill, Step
from hyper_parallel.core.redistribute.transition import Transition
from hyper_parallel.core.redistribute.twins import axis_by_axis


def candidates(task: Transition, builder: Builder) -> Iterator[list[Step]]:
    """Yield every way considered; the first moves the fewest bytes."""
    closing = _closing(task, builder)
    ways = _reductions(task, builder) if task.reduces else _exchanges(task, builder, task.source, task.copy_axes)
    for way in ways:
        yield [*way, *closing]
    if task.reduces or len(task.split_axes) > 1:
        yield [*axis_by_axis(task, builder), *closing]


def _closing(task: Transition, builder: Builder) -> list[Step]:
    """Return the local step that makes pending copies, or rescales those that stay."""
    if not task.opens and task.times == task.over:
        return []
    times = task.times * (task.ways(task.opens) if task.opening == "avg" else 1)
    kind = task.opening or "sum"
    fill = Fill(kind, times, task.over)
    return [builder.fill(task.target, task.result, fill)]


# -- without copies to reduce ----------------------------------------------------------------------------------------


def _exchanges(task: Transition, builder: Builder, held: Holding, alike: tuple[int, ...]) -> Iterator[list[Step]]:
    """Yield the ways from a plain holding to the target; along `alike` ranks hold the same."""
    target = task.target
    crossed = _axes_to_cross(task, held, target)
    if not crossed:
        yield builder.local(held, target)
        return
    yield from ([step] for step in _single(task, builder, held, target, crossed, alike))
    near = builder.near_axes(task.live)
    late = tuple(axis for axis in near if axis not in task.wanted_axes and axis not in task.opens)
    if len(near) < len(task.live) and late and not task.opens:
        yield from _gather_near_last(task, builder, held, alike, late)


def _single(
    task: Transition, builder: Builder, held: Holding, target: Holding, crossed: tuple[int, ...], alike: tuple[int, ...]
) -> Iterator[Step]:
    """Yield single collectives: over the axes that must be crossed, and with replicas that can share in the sending."""
    options = [(), alike, *((axis,) for axis in alike)] if target.plain else [()]
    near = tuple(axis for axis in alike if axis in builder.near_axes((*crossed, *alike)))
    for helpers in dict.fromkeys([*options, near]):
        axes = tuple(sorted((*crossed, *helpers)))
        step = builder.exchange(held, target, axes, alike=helpers)
        assert step is not None, "axes are crossed because something is missing"
        if target.plain and step.kind != "all_gather":
            moved = builder.permute(held, target, axes, helpers)
            if moved is not None:
                yield moved
        yield step


def _gather_near_last(
    task: Transition, builder: Builder, held: Holding, alike: tuple[int, ...], late: tuple[int, ...]
) -> Iterator[list[Step]]:
    """Yield the way that brings each element to a node once, and then spreads it among the ranks of the node."""
    target = task.target
    source_axes = [axis for axis in late if axis in task.split_axes]
    rest = tuple(axis for axis in late if axis not in task.split_axes)
    between = target.restricted(held.splits, source_axes)
    if rest:
        between = replace(between, share=(_roomiest(task, between, rest), rest))
    if between == target:
        return
    first = builder.local(held, between)
    if _axes_to_cross(task, held, between):
        crossed = tuple(a for a in sorted(task.split_axes) if a in task.live and a not in late)
        helpers = tuple(axis for axis in alike if axis not in late)
        step = builder.exchange(held, between, tuple(sorted((*crossed, *helpers))), alike=helpers)
        first = [step] if step is not None else first
    last = builder.exchange(between, target, late, inside=True)
    yield [*first, *([last] if last is not None else [])]


def _axes_to_cross(task: Transition, held: Holding, target: Holding) -> tuple[int, ...]:
    """Return the axes of a plain holding along which some rank needs what another one has."""
    axes = sorted({axis for chain in held.splits for axis in chain} & set(task.live))
    counts = target.counts()
    if target.plain:
        return tuple(a for a in axes if (target.restricted(held.splits, [a]).counts() != counts).any())
    fixed = {axis for comb in target.combs if comb is not None for axis in comb[1]}
    if target.share is not None:  # what is shared out says nothing about single axes
        return tuple(a for a in axes if a not in fixed)
    return tuple(a for a in axes if a not in fixed and (target.restricted(held.splits, [a]).counts() != counts).any())


# -- with copies to reduce -------------------------------------------------------------------------------------------


def _reductions(task: Transition, builder: Builder) -> Iterator[list[Step]]:
    """Yield the ways that start with copies over `task.reduces`."""
    yield from _scatter_first(task, builder)
    yield from _reduce_whole(task, builder)
    direct = _directly(task, builder)
    if direct is not None:
        yield [direct]
    near = builder.near_axes(task.live)
    if len(near) < len(task.live):
        yield from _reduce_near_first(task, builder, near)


def _scatter_first(task: Transition, builder: Builder) -> Iterator[list[Step]]:
    """Reduce each element at one rank, which needs it if it can, then exchange."""
    between = _reducers(task, task.reduces, task.copy_axes)
    first = _reduce(task, builder, task.source, between, task.reduces)
    for rest in _from_reducers(task, builder, between, ()):
        way = [*first, *rest]
        yield way
        merged = _as_all_reduce(task, builder, way)
        if merged is not None:
            yield merged


def _reducers(task: Transition, over: tuple[int, ...], alike: tuple[int, ...]) -> Holding:
    """Return who reduces what: of its part, each rank takes what the destination's splits over the axes of copies give
    it, and an even share with the ranks that would take the same."""
    spread = (*over, *alike)
    held = task.source.restricted(task.dst, [axis for axis in spread if axis in task.wanted_axes])
    rest = tuple(axis for axis in sorted(spread) if axis not in task.wanted_axes and axis not in task.opens)
    idle = tuple(axis for axis in task.opens if axis in spread)
    if idle:
        held = replace(held, first=idle)
    return replace(held, share=(_roomiest(task, held, rest), rest)) if rest else held


def _roomiest(task: Transition, held: Holding, axes: tuple[int, ...]) -> int:
    """Return the dim that is divided most evenly over some axes, the first of equals: by what one rank holds."""
    ways = task.ways(axes)
    part = next((p for p in (held.part(at) for at in [(0,) * len(task.sizes)]) if all(p)), None)
    sizes = [length(intervals) for intervals in part] if part else list(task.shape)
    waste = [-(-size // ways) * ways / max(size, 1) for size in sizes]
    return min(range(len(sizes)), key=lambda dim: (waste[dim], dim))


def _reduce(task: Transition, builder: Builder, held: Holding, between: Holding, over: tuple[int, ...]) -> list[Step]:
    """Return the reduction over some axes, after what nobody along them needs has been left out."""
    return [builder.reduce_into(held, between, over)]


def _from_reducers(
    task: Transition, builder: Builder, between: Holding, alike: tuple[int, ...]
) -> Iterator[list[Step]]:
    """Yield the ways from who reduced each element to the target."""
    target = task.target
    shared = between.share[1] if between.share is not None else ()
    crossed = set(shared) | set(between.first)
    for axis in task.split_axes:
        if axis in task.live and (not target.plain or _is_crossed(task, axis)):
            crossed.add(axis)
    if not crossed:
        yield builder.local(between, target)
        return
    inside = not target.plain
    step = (
        builder.exchange(between, target, tuple(sorted(crossed)), alike=alike)
        if not inside
        else builder.exchange_parts(between, target, tuple(sorted(crossed)))
    )
    yield [step] if step is not None else builder.local(between, target)


def _is_crossed(task: Transition, axis: int) -> bool:
    target = task.target
    return bool((target.restricted(task.src, [axis]).counts() != target.counts()).any())


def _as_all_reduce(task: Transition, builder: Builder, way: list[Step]) -> list[Step] | None:
    """Return the way with "scatter the sum, gather it over the same ranks" as one collective, or None."""
    if len(way) != 2 or way[1].kind != "all_gather" or way[0].group_axes != way[1].group_axes:
        return None
    before = task.source
    after = way[1].after.holding
    return [*builder.local(before, after), builder.all_reduce(after, task.reduces)]


def _reduce_whole(task: Transition, builder: Builder) -> Iterator[list[Step]]:
    """Reduce everywhere what any of the ranks along the copies needs, then exchange: fewer steps, more bytes."""
    fixed = [axis for axis in task.copy_axes if axis in task.wanted_axes]
    held = task.source.restricted(task.dst, fixed)
    if not held.plain:
        held = task.source
    first = [*builder.local(task.source, held), builder.all_reduce(held, task.reduces)]
    alike = (*task.reduces, *task.copy_axes)
    for rest in _exchanges(task, builder, held, alike):
        yield [*first, *rest]


def _directly(task: Transition, builder: Builder) -> Step | None:
    """Return the one step in which every rank gets all copies of what it needs and reduces them itself."""
    if not task.target.plain:
        return None
    crossed = _axes_to_cross(task, task.source, task.target)
    axes = tuple(sorted((*crossed, *task.reduces)))
    return builder.exchange(task.source, task.target, axes, reduces=task.reduces)


def _reduce_near_first(task: Transition, builder: Builder, near: tuple[int, ...]) -> Iterator[list[Step]]:
    """Reduce within the nodes, then between them on what is left, then spread within them."""
    inner = tuple(axis for axis in task.reduces if axis in near)
    outer = tuple(axis for axis in task.reduces if axis not in near)
    if not inner or not outer or task.opens or any(axis in task.wanted_axes for axis in outer):
        return
    between = _reducers(task, inner, tuple(axis for axis in task.copy_axes if axis in near))
    first = _reduce(task, builder, task.source, between, inner)
    slow = builder.all_reduce(between, outer)
    for rest in _from_reducers(task, builder, between, ()):
        yield [*first, slow, *rest]
