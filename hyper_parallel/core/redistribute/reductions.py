"""The ways from copies that are still to be reduced.

For every element the fewest copies move if it is reduced at one rank, which is one that needs it if any holder does,
and then goes to the other ranks that need it. Reducing everywhere at once takes fewer steps, and more bytes; reducing
within the nodes first takes more steps, and fewer bytes between the nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hyper_parallel.core.redistribute.builders import Builder
from hyper_parallel.core.redistribute.exchanges import axes_to_cross, exchanges, shared_out, spread_near_last
from hyper_parallel.core.redistribute.holdings import Holding
from hyper_parallel.core.redistribute.steps import Step
from hyper_parallel.core.redistribute.transition import Transition


def reductions(task: Transition, builder: Builder) -> Iterator[list[Step]]:
    """Yield the ways that start with copies over `task.reduces`; the first moves the fewest bytes."""
    yield from _scatter_first(task, builder)
    yield from _reduce_whole(task, builder)
    yield from _directly(task, builder)
    yield from _near_first(task, builder)


def _scatter_first(task: Transition, builder: Builder) -> Iterator[list[Step]]:
    """Reduce each element at one rank, which needs it if it can, then exchange."""
    spread = (*task.reduces, *task.copy_axes)
    settled = _settled(task)
    aimed = [task.wanted_axes]
    if not builder.on.counts_bytes_only and not task.wanted_axes & {*spread} <= settled:
        aimed.append(settled)  # more bytes, but no rank has to do with more of them than its share
    for wanted in aimed:
        between = _reducers(task, spread, wanted, anew=builder.on.inter is None)
        first = builder.reduce_into(task.source, between, task.reduces)
        for rest in _from_reducers(task, builder, between):
            yield [first, *rest]
            if len(rest) == 1 and rest[0].kind == "all_gather" and rest[0].group_axes == first.group_axes:
                # Scattering the sum and gathering it over the same ranks is one collective.
                whole = rest[0].after.holding
                yield [*builder.local(task.source, whole), builder.all_reduce(whole, task.reduces)]


def _settled(task: Transition) -> frozenset[int]:
    """Return the axes that the destination splits dims over which the source splits less far, or not at all.

    There the destination's splits divide what any rank holds evenly; elsewhere they may give it all or nothing.
    """
    pairs = zip(task.src, task.dst, strict=True)
    return frozenset(axis for own, wanted in pairs if own == wanted[: len(own)] for axis in wanted)


def _reduce_whole(task: Transition, builder: Builder) -> Iterator[list[Step]]:
    """Reduce everywhere what any of the ranks along the copies needs, then exchange: fewer steps, more bytes."""
    held = task.source.restricted(task.dst, [axis for axis in task.copy_axes if axis in task.wanted_axes])
    if not held.plain:
        held = task.source
    first = [*builder.local(task.source, held), builder.all_reduce(held, task.reduces)]
    for rest in exchanges(task, builder, held, (*task.reduces, *task.copy_axes)):
        yield [*first, *rest]


def _directly(task: Transition, builder: Builder) -> Iterator[list[Step]]:
    """Yield the one step in which every rank gets all copies of what it needs and reduces them itself."""
    if task.target.plain:
        axes = sorted((*axes_to_cross(task, task.source, task.target), *task.reduces))
        step = builder.exchange(task.source, task.target, axes, reduces=task.reduces)
        assert step is not None, "the copies of others are missing somewhere"
        yield [step]


def _near_first(task: Transition, builder: Builder) -> Iterator[list[Step]]:
    """Reduce within the nodes, then between them on what is left, then spread within them."""
    near = builder.nodes.near_axes(task.live)
    inner = tuple(axis for axis in task.reduces if axis in near)
    outer = tuple(axis for axis in task.reduces if axis not in near)
    alike = tuple(axis for axis in task.copy_axes if axis in near or axis in task.wanted_axes)
    if len(near) == len(task.live) or not (inner or alike) or task.opens:
        return
    scattered = tuple(axis for axis in outer if axis in task.wanted_axes)
    reduced = _reducers(task, (*inner, *alike), task.wanted_axes, scattered)
    steps = [builder.reduce_into(task.source, reduced, inner)] if inner else builder.local(task.source, reduced)
    if scattered:
        if reduced.share is not None:  # what is shared out cannot be divided once more
            return
        whole, reduced = reduced, reduced.restricted(_chains(task, reduced), scattered)
        steps = [*steps, builder.reduce_into(whole, reduced, scattered)]
    everywhere = tuple(axis for axis in outer if axis not in scattered)
    if everywhere:
        steps = [*steps, builder.all_reduce(reduced, everywhere)]
    for rest in _from_reducers(task, builder, reduced):
        yield [*steps, *rest]


def _chains(task: Transition, held: Holding) -> tuple[tuple[int, ...], ...]:
    """Return the destination's splits, but where a dim has a comb already the chain of that."""
    combs = held.combs or (None,) * len(task.dst)
    return tuple(comb[0] if comb is not None else chain for comb, chain in zip(combs, task.dst, strict=True))


def _reducers(
    task: Transition, over: Sequence[int], wanted: frozenset[int], apart: Sequence[int] = (), *, anew: bool = False
) -> Holding:
    """Return who reduces what over some axes, along which ranks hold the same part.

    Of its part, each rank takes what the destination's splits over these axes give it, and an even share with the ranks
    that would take the same.

    Args:
        task: the transition.
        over: the axes.
        wanted: those along which the destination's splits decide; along the others the shares are even.
        apart: axes over which the destination's splits will divide it later.
        anew: divide parts anew where sizes are uneven, see `shared_out`.
    """
    held = task.source.restricted(task.dst, [axis for axis in over if axis in wanted])
    idle = tuple(axis for axis in task.opens if axis in over)
    held = replace(held, first=idle)
    rest = tuple(axis for axis in sorted(over) if axis not in wanted and axis not in task.opens)
    return shared_out(task, held, rest, apart, anew=anew) if rest else held


def _from_reducers(task: Transition, builder: Builder, between: Holding) -> Iterator[list[Step]]:
    """Yield the ways from who reduced each element to the target."""
    target = task.target
    crossed = _divided(task, between) | set(between.first)
    for axis in task.split_axes:
        if axis in task.live and (not target.plain or _is_crossed(task, axis)):
            crossed.add(axis)
    step = builder.exchange(between, target, sorted(crossed)) if crossed else None
    if step is None:
        yield builder.local(between, target)
        return
    yield [step]
    if target.plain and between.share is None:
        yield from spread_near_last(task, builder, between, tuple(sorted(crossed)))


def _divided(task: Transition, held: Holding) -> set[int]:
    """Return the axes over which a holding divides what `splits` gives in another way than the destination does."""
    fixed: set[int] = set()
    for comb, wanted in zip(held.combs, task.dst, strict=False):
        if comb is not None:
            same = wanted if comb[0][: len(wanted)] == wanted else ()
            fixed.update(axis for axis in comb[1] if axis not in same)
    return fixed | set(held.share[1] if held.share is not None else ())


def _is_crossed(task: Transition, axis: int) -> bool:
    target = task.target
    return bool((target.restricted(task.src, [axis]).counts() != target.counts()).any())
