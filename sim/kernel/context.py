"""The rank that the calling thread runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from sim.explain.errors import SimError
from sim.kernel.scheduler import Scheduler


class Context:
    """What belongs to one simulated rank; the layers above add what they keep for it.

    Attributes:
        rank: Global rank.
        scheduler: Lets it run.
        stretch: How long so many seconds of its own time take in "advance" or "sleep"; None: as long as they are.
    """

    def __init__(self, rank: int, scheduler: Scheduler) -> None:
        self.rank = rank
        self.scheduler = scheduler
        self.stretch: Callable[[float, str], float] | None = None

    def has_turn(self) -> bool:
        """Return True if the calling thread is one of this rank's, and the one that runs."""
        running = self.scheduler.running
        if running is None or self.scheduler.pid != os.getpid():  # or in a process that it has forked off
            return False
        return running.ident == threading.get_ident() and running.context is self

    def check_caller(self) -> None:
        """Refuse a thread that is not one of this rank's, or takes no turns: it does not hold the turn."""
        if not self.has_turn() and self.scheduler.pid == os.getpid():
            raise SimError(
                f"a thread that takes no turns with rank {self.rank}'s used one of the rank's process groups\n"
                f"  seen: thread {threading.current_thread().name!r}\n"
                "  try: communicate from the thread that runs the rank's function, or from a threading.Thread that it "
                "starts"
            )


class _ThisThread(threading.local):
    context: Any = None


this_thread = _ThisThread()


def current_context() -> Any:
    """The rank that the calling thread runs, or None outside of any world; each layer knows its part of a context."""
    return this_thread.context


def current_rank() -> int | None:
    """The simulated rank of the calling thread, or None outside of any world.

    >>> current_rank() is None
    True
    """
    context = this_thread.context
    return None if context is None else context.rank
