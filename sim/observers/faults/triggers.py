"""Triggers of faults, and the record that one has happened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import NamedTuple

from sim.explain.errors import ranks_phrase
from sim.kernel.context import current_context
from sim.observers.faults.plan import At, AtTime, Corrupt, Drop, Fault, Kill, Slow, SlowLink

__all__ = ["Flip", "Happening", "Trigger", "region"]


class Trigger:
    """Decides at which of the operations that it is shown a fault happens.

    Args:
        fault: Which one; it has an ``at``.
        random: What a probability is drawn from.
    """

    def __init__(self, fault: Fault, random: Random) -> None:
        self.fault = fault
        self.random = random
        self.happened = False
        self._at: At = getattr(fault, "at", 0)
        self._seen = 0

    @property
    def recurs(self) -> bool:
        """Whether the fault can happen again once it has happened."""
        return isinstance(self._at, float)

    def is_due(self, regions: Sequence[str], now: float) -> bool:
        """Whether the fault happens at the next operation, issued inside of ``regions`` at the virtual time ``now``."""
        at = self._at
        if isinstance(at, float):
            return self.random.random() < at
        if isinstance(at, AtTime):
            return now >= at.seconds
        if isinstance(at, int):
            self._seen += 1
            return self._seen > at
        name, number = (at, 0) if isinstance(at, str) else at
        if name in regions:
            self._seen += 1
            return self._seen > number
        return False


class Flip(NamedTuple):
    """A bit that was flipped.

    Attributes:
        tensor: Which of the tensors that the rank gave to the operation.
        element: Which element of it, counted along its flattened shape.
        bit: Which bit of the element, from the lowest one of its first byte in memory.
    """

    tensor: int
    element: int
    bit: int


class Happening(NamedTuple):
    """A fault that has happened.

    Attributes:
        fault: Which one.
        rank: Whose operation it happened at.
        number: Of the operation, among all of the rank's, as ``world.trace.count(rank)`` counts them; -1: of none.
        op: ``all_reduce``, ``send``, ... or ``advance``, ``sleep``.
        group: The name of its group.
        line: The user's source line, ``file:line in function``.
        time: The rank's virtual clock, in seconds.
        flips: Of a :class:`Corrupt`.
    """

    fault: Fault
    rank: int
    number: int
    op: str
    group: str
    line: str
    time: float
    flips: tuple[Flip, ...] = ()

    def describe(self) -> str:
        """Say what happened, in one line.

        >>> Happening(Kill(2, at=3), 2, 3, "all_reduce", "tp", "train.py:9 in step", 0.0).describe()
        "rank 2 was killed at its operation 3, all_reduce of group 'tp', train.py:9 in step"
        """
        fault = self.fault
        if isinstance(fault, (Slow, SlowLink)):
            who = f"rank {self.rank}" if isinstance(fault, Slow) else f"what {ranks_phrase(fault.involved())} share"
            return f"{who} took {fault.factor:g} times as long from {self.op} on, {self.line}"
        if isinstance(fault, Drop):
            what = f"the message of rank {self.rank} to rank {fault.receiver} was lost"
        elif isinstance(fault, Corrupt):
            what = f"rank {self.rank} gave data with {len(self.flips)} flipped bits"
        else:
            what = f"rank {self.rank} was {'killed' if isinstance(fault, Kill) else 'frozen'}"
        return f"{what} at its operation {self.number}, {self.op} of group {self.group!r}, {self.line}"


@contextmanager
def region(name: str) -> Iterator[None]:
    """Name what the calling rank does inside of the ``with`` block, so that a fault can happen there.

    ::

        with sim.region("backward"):
            loss.backward()

    Regions can be nested; on what is no simulated rank they do nothing.

    Args:
        name: For the ``at`` of a fault.

    Raises:
        TypeError: A name that is no string.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"cannot name a region {name!r}\n  name: a str, not {type(name).__name__}\n"
            "  try: with sim.region('backward')"
        )
    context = current_context()
    if context is None:
        yield
        return
    context.regions.append(name)
    try:
        yield
    finally:
        context.regions.pop()
