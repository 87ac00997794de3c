"""The schedules of torch.distributed.pipelining by short names, and what each of them asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from hyper_parallel.core.common.checks import check_int
from hyper_parallel.core.common.errors import InvalidValue, nearest

__all__ = ["SCHEDULES", "ScheduleKind", "find_schedule"]

_ASKED = "cannot schedule the pipeline"


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule and its rules.

    Attributes:
        name: ours.
        torch_name: of torch's class.
        stages_per_rank: how many stages a rank has by default.
        is_multi: whether that number may be another one; torch's class then takes a list of stages.
        style: "loop": stage s is on rank s % ranks; "v": two per rank, and the first and the last are on rank 0.
        splits_backward: whether gradients of inputs and of weights are computed apart.
        rule: "any" number of micro-batches; "stages": at least as many as stages; "rounds": see `check_micro_batches`.
    """

    name: str
    torch_name: str
    stages_per_rank: int
    is_multi: bool
    style: str
    splits_backward: bool
    rule: str

    @property
    def is_available(self) -> bool:
        """Whether this torch has it, and computes right gradients with it.

        Before 2.13 the gradients of weights are wrong, without a word, where an operation that they go through has
        several outputs, or where one such operation leads to another.
        """
        version = tuple(int(part) for part in torch.__version__.split(".")[:2])
        return not self.splits_backward or version >= (2, 13)

    @property
    def torch_class(self) -> Any:
        """Torch's class.

        Raises:
            ValueError: this torch has none of that name, or a wrong one.
        """
        if not self.is_available:
            blame = f"the gradients of {self.name!r} are wrong before torch 2.13"
            raise InvalidValue(_ASKED, blame, f"torch: {torch.__version__}", "'interleaved', or torch 2.13")
        from torch.distributed.pipelining import schedules  # half a second, which only pipelines pay

        found = getattr(schedules, self.torch_name, None)
        if found is None:
            blame = f"this torch has no {self.torch_name}"
            raise InvalidValue(_ASKED, blame, f"torch: {torch.__version__}", "'1f1b', or a newer torch")
        return found

    def checked_stages_per_rank(self, asked: int | None) -> int:
        """Return how many stages a rank has.

        >>> find_schedule("interleaved").checked_stages_per_rank(None)
        2

        Args:
            asked: None for the default.

        Raises:
            ValueError: a number that this schedule cannot have.
        """
        if asked is None:
            return self.stages_per_rank
        number = check_int(asked)
        if number == self.stages_per_rank or (self.is_multi and self.style == "loop" and number and number > 0):
            return int(asked)
        if self.is_multi and self.style == "loop":
            blame = "a rank must have one stage at least"
        else:
            blame = f"{self.name!r} has exactly {self.stages_per_rank} per rank"
        hint = f"stages_per_rank={self.stages_per_rank}" + ("" if self.is_multi else ", or schedule='interleaved'")
        raise InvalidValue(_ASKED, blame, f"stages_per_rank: {asked!r}", hint)

    def begins_all_stages(self, micro_batches: int, ranks: int) -> bool:
        """Whether all gradients of a rank are in memory, of each of its stages, before any stage's last backward.

        >>> [find_schedule("interleaved").begins_all_stages(count, ranks=4) for count in (4, 8)]
        [False, True]

        Args:
            micro_batches: in a step.
            ranks: along the pipeline axis.
        """
        if not self.is_multi:
            return micro_batches > 1
        return self.rule == "rounds" and micro_batches // ranks > 1

    def check_micro_batches(self, micro_batches: int, ranks: int, stages: int) -> None:
        """Check the number of micro-batches against the rule of this schedule.

        >>> find_schedule("interleaved").check_micro_batches(6, ranks=4, stages=8)
        >>> find_schedule("1f1b").check_micro_batches(3, ranks=4, stages=4)
        Traceback (most recent call last):
            ...
        hyper_parallel.InvalidValue: cannot schedule the pipeline: '1f1b' needs at least as many micro-batches as stages
          micro_batches: 3   stages: 4
          try: micro_batches=4, or schedule='gpipe'

        "rounds": micro-batches go in `max(1, micro_batches // ranks)` rounds, of equal size.

        Args:
            micro_batches: in a step.
            ranks: along the pipeline axis.
            stages: of all ranks.

        Raises:
            ValueError: it is below 1, or against the rule.
        """
        seen = f"micro_batches: {micro_batches!r}   stages: {stages}"
        number = check_int(micro_batches)
        if number is None or number < 1:
            raise InvalidValue(_ASKED, "micro_batches must be an int from 1 up", seen, f"micro_batches={stages}")
        if self.rule == "stages" and number < stages:
            blame = f"{self.name!r} needs at least as many micro-batches as stages"
            raise InvalidValue(_ASKED, blame, seen, f"micro_batches={stages}, or schedule='gpipe'")
        rounds = max(1, number // ranks)
        if self.rule == "rounds" and number % rounds:
            blame = f"{self.name!r} runs them in {rounds} rounds of equal size, {ranks} or more at a time"
            fits = f"micro_batches={number // ranks * ranks} or {-(-number // ranks) * ranks}"
            raise InvalidValue(_ASKED, blame, f"{seen}   ranks: {ranks}", fits)


SCHEDULES: Mapping[str, ScheduleKind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            ScheduleKind("gpipe", "ScheduleGPipe", 1, False, "loop", False, "any"),
            ScheduleKind("1f1b", "Schedule1F1B", 1, False, "loop", False, "stages"),
            ScheduleKind("interleaved", "ScheduleInterleaved1F1B", 2, True, "loop", False, "rounds"),
            ScheduleKind("looped-bfs", "ScheduleLoopedBFS", 2, True, "loop", False, "any"),
            ScheduleKind("zero-bubble", "ScheduleInterleavedZeroBubble", 2, True, "loop", True, "rounds"),
            ScheduleKind("zbv", "ScheduleZBVZeroBubble", 2, True, "v", True, "any"),
        )
    }
)


def find_schedule(name: str) -> ScheduleKind:
    """Return the schedule of a name.

    >>> find_schedule("1f1b").torch_name
    'Schedule1F1B'
    >>> find_schedule("1fib")
    Traceback (most recent call last):
        ...
    hyper_parallel.InvalidValue: cannot schedule the pipeline: there is no schedule '1fib'
      schedules: gpipe, 1f1b, interleaved, looped-bfs, zero-bubble, zbv
      try: '1f1b'

    Raises:
        ValueError: there is none of that name.
    """
    kind = SCHEDULES.get(name) if isinstance(name, str) else None
    if kind is None:
        seen = f"schedules: {', '.join(SCHEDULES)}"
        raise InvalidValue(_ASKED, f"there is no schedule {name!r}", seen, nearest(name, SCHEDULES))
    return kind
