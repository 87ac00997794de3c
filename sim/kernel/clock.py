"""Virtual time: every rank has a clock, computing is free, and what a rank waits for says when it happened.

So the clocks depend on the program and not on the order in which the simulator happens to run the ranks.
"""

from __future__ import annotations

import math
import time

from hyper_parallel.core.common.checks import check
from hyper_parallel.core.common.errors import InvalidValue
from sim.explain.errors import SimError
from sim.kernel.context import current_context

_sleep_for_real = time.sleep


def check_seconds(value: float, what: str) -> float:
    """`value` as seconds, or the error that `what` cannot take so long."""
    if type(value) is float and 0 <= value < math.inf:  # in sight, as this is asked of every priced operation
        return value
    asked, hint = "cannot let time pass", "0.001, a millisecond"
    check(asked, "float", hint, **{what: value})
    if not 0 <= value < math.inf:
        raise InvalidValue(asked, f"{what} must be a finite number of at least 0", f"seconds: {value!r}", hint)
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
    took = check_seconds(seconds, "the time that a rank computes")
    context = current_context()
    if context is None:
        raise SimError(
            "there is no clock to advance: the caller is not a simulated rank\n"
            "  try: call sim.advance inside of the function that sim.run runs"
        )
    context.check_caller()
    if context.stretch is not None:
        took = context.stretch(took, "advance")
    context.scheduler.clocks[context.rank] += took


def sleep(seconds: float) -> None:
    """What `time.sleep` is on a simulated rank: it takes virtual time, and others run meanwhile.

    A rank wakes up when nobody who is awake can go on, and whoever sleeps until the earliest time wakes first.
    Elsewhere, and on threads of a rank that take no turns, it is `time.sleep`.

    Args:
        seconds: Virtual seconds, 0 or more.
    """
    context = current_context()
    if context is None or not context.has_turn():
        _sleep_for_real(seconds)
        return
    took = check_seconds(float(seconds), "the time that a rank sleeps")
    if context.stretch is not None:
        took = context.stretch(took, "sleep")
    context.scheduler.sleep(took)
