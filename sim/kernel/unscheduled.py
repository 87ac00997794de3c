"""Unscheduled threads of ranks: those with which ``multiprocessing`` talks to other processes.

What another process answers comes when it comes. A rank that waits for that keeps its turn, so that the seed goes on
fixing the interleaving. Only a rank that also has helper threads gives its turn up, and is woken when nobody else can
run.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from typing import Protocol

from sim.kernel.waiting import RankThread, Waitable

__all__ = ["UnscheduledThreads"]

_sleep_for_real = time.sleep
_is_alive = threading.Thread.is_alive
_IDLE_S = 5.0


class _Turns(Protocol):
    """The scheduler, as far as these threads need it."""

    ranks: list[RankThread]
    helpers: list[RankThread]

    def complete_unscheduled(self, waitable: Waitable) -> None:
        """Complete what an unscheduled thread has done."""

    def may_go_on(self) -> bool:
        """Whether some thread can run."""

    def somebody_sleeps(self) -> bool:
        """Whether some thread goes on by itself as time passes."""


class UnscheduledThreads:
    """The threads of a world's ranks that do not take turns.

    Attributes:
        arrived: What they have completed and the scheduler has not passed on, in the order in which it came.
    """

    __slots__ = ("_scheduler", "_threads", "arrived")

    def __init__(self, scheduler: _Turns) -> None:
        self._scheduler = scheduler
        self._threads: list[tuple[int, threading.Thread]] = []
        self.arrived: deque[Waitable] = deque()

    def add(self, rank: int, thread: threading.Thread) -> None:
        """Note a thread that ``rank`` has started."""
        self._threads = [(r, t) for r, t in self._threads if _is_alive(t)]
        self._threads.append((rank, thread))

    def __bool__(self) -> bool:
        return bool(self._threads or self.arrived)

    def are_waited_for_by(self, thread: RankThread) -> bool:
        """Whether what ``thread`` waits for can only come from one of them."""
        return (
            bool(self._threads)
            and any(rank == thread.rank and _is_alive(each) for rank, each in self._threads)
            and not any(helper.rank == thread.rank for helper in self._scheduler.helpers)
        )

    def listen(self) -> None:
        """When nobody can run: let those run whom an unscheduled thread has woken, if need be after a wait for real."""
        scheduler, since = self._scheduler, time.monotonic()
        while True:
            while self.arrived:
                scheduler.complete_unscheduled(self.arrived.popleft())
            patience = 0.0 if scheduler.may_go_on() else self._patience()
            if time.monotonic() - since >= patience:
                return
            _sleep_for_real(0.002)

    def _patience(self) -> float:
        """For so many seconds an unscheduled thread may take to wake somebody."""
        alive = {rank for rank, thread in self._threads if _is_alive(thread)}
        waiting = [
            thread
            for thread in (*self._scheduler.ranks, *self._scheduler.helpers)
            if thread.rank in alive and thread.waiting is not None and not thread.waiting.is_global
        ]
        if not waiting:
            return 0.0
        if self._scheduler.somebody_sleeps():
            return 0.05
        return math.inf if any(not thread.name for thread in waiting) else _IDLE_S  # a helper may just have no work
