"""In which order each rank of a pipeline works on stages and micro-batches: torch's schedules, asked without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from hyper_parallel.core.pipeline.schedules import find_schedule
from hyper_parallel.core.pipeline.split import stages_of_rank

__all__ = ["Action", "orders"]

_KINDS = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "backward_input",
    "BACKWARD_WEIGHT": "backward_weight",
}


class Action(NamedTuple):
    """One thing that a rank does.

    Attributes:
        kind: ``forward``, ``backward``, ``backward_input`` or ``backward_weight``.
        stage: number of the stage.
        batch: number of the micro-batch.
    """

    kind: str
    stage: int
    batch: int


def orders(schedule: str, ranks: int, stages_per_rank: int | None, micro_batches: int) -> list[list[Action]]:
    """Return what each rank does in a step, in its order.

    >>> [f"{a.kind[0]}{a.batch}" for a in orders("1f1b", 2, None, 3)[0]]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']

    Args:
        schedule: its name.
        ranks: along the pipeline axis.
        stages_per_rank: None: as the schedule has it.
        micro_batches: of a step.
    """
    kind = find_schedule(schedule)
    each = kind.checked_stages_per_rank(stages_per_rank)
    if schedule == "gpipe":
        return [_gpipe(rank, micro_batches) for rank in range(ranks)]
    if schedule == "1f1b":
        return [_one_forward_one_backward(rank, ranks, micro_batches) for rank in range(ranks)]
    own = stages_of_rank(schedule, 0, ranks, each)
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=index,
            num_stages=ranks * each,
            group_size=ranks,
            group_rank=0,
            is_first=index == 0,
            is_last=index == ranks * each - 1,
            has_backward=True,
            submod=None,
            device=None,
        )
        for index in own
    ]
    made = kind.torch_class(stages, micro_batches, loss_fn=lambda *given: None, scale_grads=False)
    found: list[list[Action]] = []
    for rank in range(ranks):
        actions = [action for action in made.pipeline_order[rank] if action is not None]
        found.append(
            [
                Action(_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)
                for action in actions
                if action.computation_type.name in _KINDS
            ]
        )
    return found


def _gpipe(rank: int, count: int) -> list[Action]:
    return [Action("forward", rank, n) for n in range(count)] + [Action("backward", rank, n) for n in range(count)]


def _one_forward_one_backward(rank: int, ranks: int, count: int) -> list[Action]:
    """As torch's Schedule1F1B: as many forwards ahead as there are stages from here on."""
    ahead = min(ranks - rank, count)
    actions = [Action("forward", rank, n) for n in range(ahead)]
    for n in range(count):
        actions.append(Action("backward", rank, n))
        if ahead + n < count:
            actions.append(Action("forward", rank, ahead + n))
    return actions
