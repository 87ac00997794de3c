"""Things that a rank waits for, and the threads of ranks that wait."""

from __future__ import annotations

import _thread
from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["Lost", "RankThread", "Waitable"]

Lost: TypeAlias = "Callable[[Waitable, int], BaseException]"


class Waitable:
    """Something a rank can wait for: it becomes ready once and stays so.

    Attributes:
        ready: Whether it has happened.
        at: The virtual time at which it did.
        lost: It never will be: makes the error for each rank that waits for it. None: it may be.
    """

    __slots__ = ("at", "lost", "ready", "waiters")
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
        """Name the user's line in which ``rank`` waits for this; empty where none is known."""
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
