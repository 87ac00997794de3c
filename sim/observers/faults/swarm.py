"""Many runs of a function, each with another interleaving, other faults and another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any

from hyper_parallel.core.common.checks import check_least
from hyper_parallel.core.common.errors import InvalidValue
from sim.explain.callables import check_call
from sim.explain.errors import RankLost, SimError
from sim.observers.faults.plan import Corrupt, Drop, Fault, Freeze, Kill, Slow, SlowLink, check_kinds
from sim.world import World, world

Draw = Callable[[Random, int], Sequence[Any]]


class SwarmFailed(SimError):
    """A run of a swarm has failed; its own error is the cause.

    Attributes:
        seed: Of the run.
        world_size: Its number of ranks.
        faults: Those without which it does not fail.
        mesh: The sizes of its mesh, if one was drawn.
    """

    seed: int = -1
    world_size: int = 0
    faults: tuple[Fault, ...] = ()
    mesh: tuple[int, ...] = ()


def swarm(
    fn: Callable[..., Any],
    world_size: int | Sequence[int],
    args: Sequence[Any] | Draw = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    seeds: Iterable[int] = range(100),
    kinds: Sequence[type[Fault]] = (Kill, Freeze, Slow),
    max_faults: int = 2,
    mesh_axes: int = 0,
    check: Callable[[World, list[Any]], None] | None = None,
    allow: tuple[type[Exception], ...] = (RankLost,),
    **options: Any,
) -> int:
    """Run `fn` once for each seed, which draws the number of ranks, their mesh, the interleaving and the faults.

    A run fails when it raises anything but `allow`, or when `check(world, results)` raises. Faults that the failure
    does not need are then left out, one after the other.

    >>> import torch, torch.distributed as dist
    >>> def total() -> float:
    ...     x = torch.ones(1)
    ...     dist.all_reduce(x)
    ...     return x.item()
    >>> def is_right(world: World, results: list) -> None:
    ...     assert set(results) <= {None, float(world.world_size)}
    >>> swarm(total, (2, 3), seeds=range(20), check=is_right)
    20

    Args:
        fn: What each rank runs.
        world_size: Number of ranks, or the numbers to choose from: `(2, 4)` is 2 or 4 and never 3, and
            `range(2, 5)` is 2, 3 or 4.
        args: Of `fn`; or a function of a `random.Random` and the number of ranks that draws them (sizes, layouts).
        kwargs: Of `fn`.
        seeds: One run each; a failure names the one that replays it.
        kinds: Classes of `sim.faults` to draw from; Kill, Freeze and Slow unless others are named.
        max_faults: Most faults in a run; one in three runs or more has none.
        mesh_axes: If not 0, the sizes of a mesh of all ranks with so many axes are drawn, and are `fn`'s first
            argument: `(1, 8)`, `(4, 2)` ... on 8 ranks.
        check: Called after each run that has not raised, with the world and the results.
        allow: What a run may raise.
        **options: Of `sim.world`, such as `machine`.

    Returns:
        The number of runs.

    Raises:
        SwarmFailed: The first run that failed.
        ValueError: No seed, no number of ranks, no kind of fault, or fewer than 0 faults or axes.
        TypeError: `fn` cannot be called with what it would get, or a call would run nothing.
    """
    sizes = (world_size,) if isinstance(world_size, int) else tuple(world_size)
    chosen = list(seeds)
    asked = "cannot run a swarm"
    check_least(asked, 0, mesh_axes=mesh_axes, max_faults=max_faults)
    if not chosen or not sizes:
        seen = f"seeds: {len(chosen)}, world_size: {sizes}"
        raise InvalidValue(asked, "there is no run to make", seen, "seeds=range(100), world_size=(2, 4)")
    if max_faults or kinds:
        check_kinds(asked, kinds)

    def run(seed: int, size: int, given: Sequence[Any], faults: Sequence[Fault]) -> tuple[World, Exception | None]:
        with world(size, seed=seed, faults=faults, **options) as w:
            try:
                results = w.run(fn, given, kwargs)
                if check is not None:
                    check(w, results)
            except allow:
                pass
            except Exception as error:
                return w, error
        return w, None

    lengths: dict[tuple[int, ...], int] = {}
    for seed in chosen:
        random = Random(f"swarm {seed}")
        size = random.choice(sizes)
        mesh = draw_mesh(random, size, mesh_axes) if mesh_axes else ()
        given = args(random, size) if callable(args) else args
        if mesh_axes:
            given = (mesh, *given)
        check_call(fn, given, kwargs, size)
        place = (size, *mesh)
        if place not in lengths:  # how long the program is: the first run on such ranks goes without faults
            w, error = run(seed, size, given, ())
            if error is not None:
                raise _failed(fn, w, seed, (), mesh, error) from error
            lengths[place] = max(w.trace.count(rank) for rank in range(size))
        faults = draw_faults(random, size, lengths[place], kinds, max_faults)
        w, error = run(seed, size, given, faults)
        if error is None:
            continue
        for fault in faults:
            fewer = tuple(each for each in faults if each is not fault)
            other, same = run(seed, size, given, fewer)
            if same is not None:
                faults, w, error = fewer, other, same
        raise _failed(fn, w, seed, faults, mesh, error) from error
    return len(chosen)


def draw_mesh(random: Random, world_size: int, axes: int) -> tuple[int, ...]:
    """Draw the sizes of a mesh of all ranks: each prime factor of their number goes to some axis.

    >>> draw_mesh(Random(1), 6, 2), draw_mesh(Random(4), 6, 2)
    ((6, 1), (2, 3))
    """
    sizes, left, factor = [1] * axes, world_size, 2
    while left > 1:
        if left % factor:
            factor += 1
            continue
        sizes[random.randrange(axes)] *= factor
        left //= factor
    return tuple(sizes)


def draw_faults(
    random: Random, world_size: int, operations: int, kinds: Sequence[type[Fault]], most: int
) -> tuple[Fault, ...]:
    """Draw up to `most` faults for a program of so many operations on each rank; one rank is never lost."""
    spared = random.randrange(world_size)
    faults: list[Fault] = []
    for _ in range(random.randint(0, most)):
        kind = random.choice(kinds)
        rank = random.randrange(world_size)
        at = random.randrange(operations + 1)
        factor = random.choice((2.0, 10.0, 100.0))
        other = (rank + random.randrange(1, world_size)) % world_size if world_size > 1 else rank
        if kind in (SlowLink, Drop) and other == rank:
            continue
        if kind in (Kill, Freeze) and rank == spared:
            continue
        if kind is SlowLink:
            faults.append(SlowLink(rank, other, factor))
        elif kind is Drop:
            faults.append(Drop(rank, other, at=at))
        elif kind is Slow:
            faults.append(Slow(rank, factor))
        elif kind is Corrupt:
            faults.append(Corrupt(rank, bits=random.choice((1, 2, 8)), at=at))
        else:
            assert kind in (Kill, Freeze)
            faults.append(Kill(rank, at=at) if kind is Kill else Freeze(rank, at=at))
    return tuple(faults)


def _failed(
    fn: Callable[..., Any], w: World, seed: int, faults: tuple[Fault, ...], mesh: tuple[int, ...], error: Exception
) -> SwarmFailed:
    text = "\n".join(line for line in str(error).splitlines() if not line.startswith("  replay: "))
    plural = "" if len(faults) == 1 else "s"
    failure = SwarmFailed(
        f"{getattr(fn, '__name__', 'the function')} fails on {w.world_size} ranks from seed {seed} "
        f"{f'with {len(faults)} fault{plural}' if faults else 'without any fault'}\n"
        f"  seen: {type(error).__name__}: {text}\n"
        f"{f'  mesh: {mesh}, the first argument' + chr(10) if mesh else ''}"
        f"  try: fix that first, then the same swarm again\n"
        f"  replay: {w.replay}"
    )
    failure.seed, failure.world_size, failure.faults, failure.mesh = seed, w.world_size, faults, mesh
    return failure
