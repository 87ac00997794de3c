"""Waiting threads: ranks that wait for something, and threads that the scheduler does not run."""

from __future__ import annotations

import _thread
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

# Things that a rank waits for, and the threads of ranks that wait -----------------------------------------------------

Lost: TypeAlias = "Callable[[Waitable, int], BaseException]"


class Waitable:
    """Something a rank can wait for: it becomes ready once and stays so.

    Attributes:
        ready: Whether it has happened.
        at: The virtual time at which it did.
        lost: It never will be: makes the error for each rank that waits for it. None: it may be.
    """

    __slots__ = ("__weakref__", "at", "lost", "ready", "waiters")
    is_global = True  # other ranks have a part in it

    def __init__(self) -> None:
        self.ready = False
        self.at = 0.0
        self.lost: Lost | None = None
        self.waiters: list[RankThread] = []

    def describe(self) -> str:
        """Say what is being waited for, as in "waits in all_reduce ..."."""
        return "something"

    def missing(self) -> list[int]:
        """Name the ranks that have to act before this can become ready."""
        return []

    def line_of(self, rank: int) -> str:
        """Name the user's line in which `rank` waits for this; empty where none is known."""
        return ""


class RankThread:
    """One thread of a rank, its own or a helper: its baton, what it waits for, how it ended.

    Attributes:
        name: Of a helper thread; "" for the rank's own.
        resumed: Called on the thread when it runs on, if there is something to catch up with.
        by_itself: While set, the scheduler leaves its waiting to Python.
    """

    __slots__ = (
        "alarm",
        "asked_at",
        "baton",
        "by_itself",
        "context",
        "daemon",
        "ended",
        "finished",
        "ident",
        "name",
        "notified",
        "polls",
        "rank",
        "refusals",
        "result",
        "resumed",
        "since",
        "waiting",
    )

    def __init__(self, rank: int, context: Any) -> None:
        self.rank = rank
        self.context = context  # whatever the world keeps for the rank; switched in and out with it
        self.baton = _thread.allocate_lock()  # a real one, also when a rank makes it
        self.baton.acquire()
        self.ident = 0  # of its thread
        self.asked_at = -1.0
        self.finished = False
        self.polls = False  # it gave up its turn without waiting for anything
        self.notified = False  # it has got the error that ended the world
        self.refusals = 0  # how often it has got what ends it, and gone on
        self.waiting: Waitable | None = None
        self.since = 0  # the number of the turn in which it began to wait
        self.alarm: tuple[float, int, RankThread] | None = None  # when it stops waiting
        self.result: Any = None
        self.name = ""
        self.daemon = False
        self.ended: Waitable | None = None  # of a helper thread, for who joins it
        self.by_itself = False
        self.resumed: Callable[[], None] | None = None


# Unscheduled threads of ranks: those with which `multiprocessing` talks to other processes --------------------------
#
# What another process answers comes when it comes. A rank that waits for that keeps its turn, so that the seed goes
# on fixing the interleaving. Only a rank that also has helper threads gives its turn up, and is woken when nobody
# else can run.

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
        self._threads: list[tuple[int, threading.Thread, bool]] = []
        self.arrived: deque[Waitable] = deque()

    def add(self, rank: int, thread: threading.Thread, *, answers: bool) -> None:
        """Note a thread that `rank` has started; who waits for one that only sends waits for a lock, if at all."""
        self._threads = [each for each in self._threads if _is_alive(each[1])]
        self._threads.append((rank, thread, answers))

    def __bool__(self) -> bool:
        return bool(self._threads or self.arrived)

    def are_waited_for_by(self, thread: RankThread) -> bool:
        """Whether what `thread` waits for can only come from one of them."""
        return (
            bool(self._threads)
            and any(rank == thread.rank and _is_alive(each) for rank, each, _ in self._threads)
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
        alive = {rank for rank, thread, _ in self._threads if _is_alive(thread)}
        waiting = [
            thread
            for thread in (*self._scheduler.ranks, *self._scheduler.helpers)
            if thread.rank in alive and thread.waiting is not None and not thread.waiting.is_global
        ]
        if not waiting:
            return 0.0
        if self._scheduler.somebody_sleeps():
            return 0.05
        answered = {rank for rank, thread, answers in self._threads if answers and _is_alive(thread)}
        is_long = any(not thread.name and thread.rank in answered for thread in waiting)
        return math.inf if is_long else _IDLE_S  # a helper may just have no work
