"""Assignment of layers to stages and of stages to ranks: numbers only, no process group."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.core.common.checks import check_int
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.pipeline.schedules import find_schedule

__all__ = ["StageSlice", "rank_of_stage", "split_layers", "stage_slices", "stages_of_rank"]

_ASKED = "cannot split the layers over stages"


def split_layers(
    num_layers: int, stages: int, *, sizes: Sequence[int] | None = None, first_extra: float = 1, last_extra: float = 1
) -> list[range]:
    """Return the layers of each stage, so that the heaviest stage is as light as can be.

    >>> split_layers(6, 3)
    [range(0, 2), range(2, 4), range(4, 6)]
    >>> [len(layers) for layers in split_layers(10, 4)]  # the embedding and the head weigh as much as a layer
    [2, 3, 3, 2]
    >>> [len(layers) for layers in split_layers(6, 3, sizes=[1, 3, 2])]
    [1, 3, 2]

    Among such splits it is an even one; what does not divide goes to later stages, as earlier ones hold activations of
    more micro-batches.

    Args:
        num_layers: of the whole model.
        stages: of all ranks.
        sizes: the number of layers of each stage, in place of a balanced split; zeros are allowed here.
        first_extra: what the first stage has beside layers, the embedding, in layers.
        last_extra: what the last stage has beside layers, the head and the loss, in layers.

    Raises:
        ValueError: fewer layers than stages; sizes that do not add up to num_layers, or are not one per stage.
    """
    seen = f"num_layers: {num_layers}   stages: {stages}"
    if stages < 1:
        raise InvalidValue(_ASKED, "there must be a stage at least", seen, "stages=1")
    if sizes is not None:
        return _ranges(_checked(list(sizes), num_layers, stages))
    if num_layers < stages:
        hint = f"at most {max(num_layers, 1)} stages, or sizes=[...], which may name stages without a layer"
        raise InvalidValue(_ASKED, "there are fewer layers than stages", seen, hint)
    extras = [0.0] * stages
    for place, name, extra in ((0, "first_extra", first_extra), (-1, "last_extra", last_extra)):
        if isinstance(extra, bool) or not isinstance(extra, (int, float)) or not 0 <= extra < math.inf:
            blame = f"{name} must be a number of layers, from 0 up"
            raise InvalidValue(_ASKED, blame, f"{name}: {extra!r}", f"{name}=1")
        extras[place] += extra
    return _ranges(_balanced(num_layers, tuple(extras)))


@functools.lru_cache(maxsize=4096)  # a search asks for the same splits with thousands of candidates
def _balanced(num_layers: int, extras: tuple[float, ...]) -> tuple[int, ...]:
    """Return the layers per stage: the heaviest stage as light as can be, and then as even as can be."""
    stages = range(len(extras))
    counts = [1 for _ in stages]
    for _ in range(num_layers - len(extras)):  # to the lightest: that gives the least heaviest
        counts[min(stages, key=lambda stage: counts[stage] + extras[stage])] += 1
    heaviest = max(counts[stage] + extras[stage] for stage in stages)
    counts = [1 for _ in stages]
    for _ in range(num_layers - len(extras)):
        able = [stage for stage in stages if counts[stage] + 1 + extras[stage] <= heaviest]
        counts[min(able, key=lambda stage: (counts[stage], -stage))] += 1
    return tuple(counts)


def _checked(sizes: list[int], num_layers: int, stages: int) -> list[int]:
    seen = f"sizes: {sizes}   num_layers: {num_layers}   stages: {stages}"
    hint = f"sizes={[len(part) for part in split_layers(max(num_layers, stages), stages)]}, or none"
    if any(check_int(size) is None or size < 0 for size in sizes):
        raise InvalidValue(_ASKED, "sizes must be numbers of layers, from 0 up", seen, hint)
    if len(sizes) != stages:
        raise InvalidValue(_ASKED, f"there are {len(sizes)} sizes for {stages} stages", seen, hint)
    if sum(sizes) != num_layers:
        raise InvalidValue(_ASKED, f"sizes add up to {sum(sizes)} layers, not {num_layers}", seen, hint)
    return sizes


def _ranges(counts: Sequence[int]) -> list[range]:
    starts = itertools.accumulate(counts, initial=0)
    return [range(first, last) for first, last in itertools.pairwise(starts)]


# -- stages and ranks --------------------------------------------------------------------------------------------------


def stages_of_rank(schedule: str, rank: int, ranks: int, stages_per_rank: int | None = None) -> tuple[int, ...]:
    """Return the numbers of the stages of a rank, in model order.

    >>> stages_of_rank("1f1b", 1, 4), stages_of_rank("interleaved", 1, 4), stages_of_rank("zbv", 1, 4)
    ((1,), (1, 5), (1, 6))

    Args:
        schedule: its name; what lies in a V gives rank 0 the first stage and the last.
        rank: its place along the pipeline axis.
        ranks: along that axis.
        stages_per_rank: default: the schedule's own.

    Raises:
        ValueError: no such schedule, or one that cannot have so many stages per rank; no such rank.
    """
    kind = find_schedule(schedule)
    each = kind.checked_stages_per_rank(stages_per_rank)
    if not 0 <= rank < ranks:
        blame = f"there is no rank {rank} along an axis of {ranks}"
        raise InvalidValue("cannot place stages", blame, f"rank: {rank}   ranks: {ranks}", f"rank={ranks - 1}")
    total = ranks * each
    if kind.style == "v":
        return (rank, total - 1 - rank)
    return tuple(range(rank, total, ranks))


def rank_of_stage(schedule: str, stage: int, ranks: int, stages_per_rank: int | None = None) -> int:
    """Return the place along the pipeline axis of the rank that has a stage.

    >>> rank_of_stage("interleaved", 5, 4), rank_of_stage("zbv", 7, 4)
    (1, 0)

    Args:
        schedule: its name.
        stage: number of the stage.
        ranks: along the pipeline axis.
        stages_per_rank: default: the schedule's own.
    """
    owners = [rank for rank in range(ranks) if stage in stages_of_rank(schedule, rank, ranks, stages_per_rank)]
    if not owners:
        total = ranks * find_schedule(schedule).checked_stages_per_rank(stages_per_rank)
        blame = f"there are {total} stages, numbered from 0"
        raise InvalidValue("cannot find a stage", blame, f"stage: {stage}   ranks: {ranks}", f"{total - 1}")
    return owners[0]


@dataclass(frozen=True)
class StageSlice:
    """What a stage has of a model: `model.keep(part.layers, embed=part.is_first, head=part.is_last)`.

    Attributes:
        index: number of the stage.
        layers: numbers of its layers.
        is_first: whether it has the embedding.
        is_last: whether it has the head.
    """

    index: int
    layers: range
    is_first: bool
    is_last: bool


def stage_slices(
    num_layers: int,
    schedule: str,
    rank: int,
    ranks: int,
    *,
    stages_per_rank: int | None = None,
    sizes: Sequence[int] | None = None,
    first_extra: float = 1,
    last_extra: float = 1,
) -> list[StageSlice]:
    """Return what the stages of one rank have of a model, in model order.

    >>> for part in stage_slices(8, "interleaved", rank=1, ranks=2):
    ...     print(part)
    StageSlice(index=1, layers=range(2, 4), is_first=False, is_last=False)
    StageSlice(index=3, layers=range(6, 8), is_first=False, is_last=True)

    Args:
        num_layers: of the whole model.
        schedule: its name.
        rank: the place along the pipeline axis.
        ranks: along that axis.
        stages_per_rank: see `stages_of_rank`.
        sizes: see `split_layers`, as the other arguments.
        first_extra: as there.
        last_extra: as there.

    Raises:
        ValueError: as the two.
    """
    total = ranks * find_schedule(schedule).checked_stages_per_rank(stages_per_rank)
    parts = split_layers(num_layers, total, sizes=sizes, first_extra=first_extra, last_extra=last_extra)
    mine = stages_of_rank(schedule, rank, ranks, stages_per_rank)
    return [StageSlice(index, parts[index], index == 0, index == total - 1) for index in mine]
