"""The least time of a pipeline's step: its schedule with the seconds of its stages, and with messages between them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

from hyper_parallel.core.pipeline.schedules import find_schedule
from hyper_parallel.core.pipeline.split import rank_of_stage, split_layers
from sim.mesh.searching.space import Candidate
from sim.mesh.tracing.stitch import Action, orders

_MOST = 2048
"""Stages times micro-batches of a schedule that is played."""


def layers_of_stages(layers: int, candidate: Candidate) -> list[range]:
    """Return the layers of each stage, in model order."""
    return _split(layers, len(owners_of(candidate)), candidate.layers_per_stage)


@cache
def _split(layers: int, stages: int, sizes: tuple[int, ...] | None) -> list[range]:
    return split_layers(layers, stages, sizes=None if sizes is None else list(sizes))


def owners_of(candidate: Candidate) -> list[int]:
    """Return the place along the pipeline of the rank that has each stage."""
    recipe = candidate.recipe
    return _owners(recipe.schedule, candidate.dims.pp, recipe.stages_per_rank)


@cache
def _owners(schedule: str, ranks: int, stages_per_rank: int | None) -> list[int]:
    each = find_schedule(schedule).checked_stages_per_rank(stages_per_rank)
    return [rank_of_stage(schedule, stage, ranks, each) for stage in range(ranks * each)]


def least_time(candidate: Candidate, forward: Sequence[float], backward: Sequence[float], message: float) -> float:
    """Return seconds from the first forward to the last backward, if nothing else is waited for.

    Of schedules that split backward in two, nobody says how long either half is: there it is what the fullest rank
    computes, and so it is with many micro-batches, of which the first and the last matter little.

    Args:
        candidate: with a pipeline.
        forward: seconds of a micro-batch in each stage.
        backward: likewise.
        message: seconds that a micro-batch takes from one rank to the next.
    """
    recipe, ranks, parts, owners = candidate.recipe, candidate.dims.pp, candidate.parts, owners_of(candidate)
    if find_schedule(recipe.schedule).splits_backward or len(owners) * parts > _MOST:
        busy = [0.0] * ranks
        for owner, *seconds in zip(owners, forward, backward, strict=True):
            busy[owner] += parts * sum(seconds)
        return max(busy)
    return _makespan(_orders(recipe.schedule, ranks, recipe.stages_per_rank, parts), owners, forward, backward, message)


_orders = lru_cache(maxsize=64)(orders)


def _makespan(
    rows: Sequence[Sequence[Action]],
    owners: Sequence[int],
    forward: Sequence[float],
    backward: Sequence[float],
    message: float,
) -> float:
    """Return when the last action ends, each as soon as its rank is free and what it needs is there."""
    ends: dict[tuple[str, int, int], float] = {}
    at, free, last = [0] * len(rows), [0.0] * len(rows), len(forward) - 1
    waiting = True
    while waiting:
        waiting = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                kind, stage, batch = row[at[rank]]
                source = stage - 1 if kind == "forward" else stage + 1
                if 0 <= source <= last:
                    found = ends.get((kind, source, batch))
                    if found is None:
                        break
                    free[rank] = max(free[rank], found + (message if owners[source] != rank else 0.0))
                free[rank] += (forward if kind == "forward" else backward)[stage]
                ends[kind, stage, batch] = free[rank]
                at[rank] += 1
                waiting = True
    return max(free)
