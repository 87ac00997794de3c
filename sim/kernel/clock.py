"""Virtual time: every rank has a clock, computing is free, and communication takes what a cost function says.

A collective starts when the last member of its group has come and the group's collective before it is over; it ends
when the cost function says so, and ``wait`` moves the clock of each member to that end. So the clocks depend on the
program and not on the order in which the simulator happens to run the ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hyper_parallel.core.redistribute.cost import Load, Topology, seconds, topology
from sim.comm.collectives import Call
from sim.kernel.context import current_context

if TYPE_CHECKING:
    from sim.world import World

__all__ = ["CLOCK_SEAMS", "Cost", "CommPricing", "advance", "sleep"]

Cost = Callable[[str, Load], float]
_sleep_for_real = time.sleep
_OF_ONE_COPY = {"broadcast": "recv_bytes", "reduce": "send_bytes"}  # a root does not send to each one itself


class CommPricing:
    """What communication costs in a world.

    >>> CommPricing(None).of_message(0, 1, 2**20)
    0.0
    >>> round(CommPricing("h100").of_message(0, 1, 2**20) * 1e6)  # microseconds
    17

    Args:
        on: The topology that is priced, or its name; None: communication is free.
        cost: Seconds of an operation and a load, in place of the topology's own model.
    """

    def __init__(self, on: str | Topology | None, cost: Cost | None = None) -> None:
        found = topology(on) if isinstance(on, str) else on
        if found is not None and not isinstance(found, Topology):
            raise TypeError(
                f"cannot use {on!r} as the topology of a world\n  topology: a name, a Topology or None\n"
                "  try: sim.world(8, topology='h100')"
            )
        if cost is not None and not callable(cost):
            raise TypeError(
                f"cannot use {cost!r} as the cost of communication\n  cost: a function of an operation and its Load\n"
                "  try: sim.world(8, cost=lambda op, load: 1e-6)"
            )
        if cost is None and found is not None:
            model: Topology = found
            cost = lambda op, load: seconds(op, load, model)  # noqa: E731
        self._cost = cost
        self._per_node = found.ranks_per_node if found is not None else None

    def of_collective(self, calls: Sequence[Call], ranks: tuple[int, ...]) -> float:
        """Seconds of a collective that ``ranks`` have called."""
        if self._cost is None:
            return 0.0
        op = calls[0].contract.op
        if op in _OF_ONE_COPY:
            moved = max(getattr(call, _OF_ONE_COPY[op]) for call in calls)
        else:
            moved = max(max(call.send_bytes, call.recv_bytes) for call in calls)
        near = self._most_on_a_node(ranks)
        far = moved * (len(ranks) - near) // max(len(ranks) - 1, 1)
        return self._checked(op, Load(len(ranks), near, moved, far, 0))

    def of_message(self, sender: int, receiver: int, size: int) -> float:
        """Seconds of a send of ``size`` bytes."""
        if self._cost is None or sender == receiver:
            return 0.0
        near = self._most_on_a_node((sender, receiver))
        return self._checked("send", Load(2, near, size, size if near == 1 else 0, 0))

    def _most_on_a_node(self, ranks: tuple[int, ...]) -> int:
        if self._per_node is None:
            return len(ranks)
        nodes = [rank // self._per_node for rank in ranks]
        return max(map(nodes.count, set(nodes)))

    def _checked(self, op: str, load: Load) -> float:
        assert self._cost is not None
        return check_seconds(self._cost(op, load), f"the cost of {op}")


def check_seconds(value: float, what: str) -> float:
    """``value`` as seconds, or the error that ``what`` cannot take so long."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{what} cannot be {value!r}\n  seconds: a number from 0 up\n  try: 0.001, a millisecond")
    return float(value)


def advance(seconds: float) -> None:
    """Let the calling rank compute for so long: its virtual clock moves on, nobody else's does.

    >>> import sim
    >>> with sim.world(2) as world:
    ...     _ = world.run(lambda: advance(0.5 * sim.current_rank()))
    >>> world.clock(0), world.clock(1), world.now
    (0.0, 0.5, 0.5)

    Args:
        seconds: Virtual seconds, 0 or more.

    Raises:
        ValueError: A negative number, or none.
        SimError: The caller is no simulated rank.
    """
    from sim.explain.errors import SimError

    took = check_seconds(seconds, "the time that a rank computes")
    context = current_context()
    if context is None:
        raise SimError(
            "there is no clock to advance: the caller is not a simulated rank\n"
            "  try: call sim.advance inside of the function that sim.run runs"
        )
    context.check_caller()
    if context.faults is not None:
        took = context.faults.stretch(context, took, "advance")
    context.world.scheduler.clocks[context.rank] += took


def sleep(seconds: float) -> None:
    """What ``time.sleep`` is on a simulated rank: it takes virtual time, and others run meanwhile.

    A rank wakes up when nobody who is awake can go on, and whoever sleeps until the earliest time wakes first.
    Elsewhere it is ``time.sleep``.

    Args:
        seconds: Virtual seconds, 0 or more.
    """
    context = current_context()
    if context is None:
        _sleep_for_real(seconds)
        return
    took = check_seconds(float(seconds), "the time that a rank sleeps")
    context.check_caller()
    if context.faults is not None:
        took = context.faults.stretch(context, took, "sleep")
    context.world.scheduler.sleep(took)


def _time_sleep(world: World) -> Callable[[], None]:
    """Let ``time.sleep`` on a rank be :func:`sleep` while a world is alive; returns how to undo that."""
    original = time.sleep
    time.sleep = sleep  # type: ignore[assignment]

    def undo() -> None:
        time.sleep = original

    return undo


CLOCK_SEAMS = (_time_sleep,)
"""What of Python the clock changes; the list of all seams is in ``sim/torch_seams.py``."""
