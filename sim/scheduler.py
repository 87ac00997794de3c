"""One rank runs at a time; where it would block, the seed says who runs next.

The scheduler knows nothing of torch. A rank is a thread that holds the *baton* while it runs. It hands it on
when it waits for something (:class:`Waitable`) or ends. Since exactly one thread ever runs, the seed fixes the
whole interleaving, no lock is needed anywhere else in the simulator, and "no rank can run" is a fact that is
known at once and not after a timeout.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from sim.errors import RankStopped, SimError
from sim.threads import Worker
from sim.watchdog import Watchdog

__all__ = ["RankThread", "Scheduler", "Waitable"]

# So many times in a row may ranks ask whether something has happened while nothing does, before they count as stuck;
# a sleep counts for less, since it makes time pass.
_MAX_IDLE_POLLS = 10_000
_IDLE_SLEEP = 0.01


class Waitable:
    """Something a rank can wait for: it becomes ready once and stays so.

    Attributes:
        ready: Whether it has happened.
        at: The virtual time at which it did.
    """

    __slots__ = ("at", "ready", "waiters")

    def __init__(self) -> None:
        self.ready = False
        self.at = 0.0
        self.waiters: list[RankThread] = []

    def describe(self) -> str:
        """Say what is being waited for, as in "waits in all_reduce ..."."""
        return "something"

    def missing(self) -> list[int]:
        """Name the ranks that have to act before this can become ready."""
        return []


class RankThread:
    """One rank of the world: its thread's baton, what it waits for, how it ended."""

    __slots__ = ("baton", "context", "finished", "ident", "polls", "rank", "result", "told", "waiting")

    def __init__(self, rank: int, context: Any) -> None:
        self.rank = rank
        self.context = context  # whatever the world keeps for the rank; switched in and out with it
        self.baton = threading.Lock()
        self.baton.acquire()
        self.ident = 0  # of its thread
        self.finished = False
        self.polls = False  # it gave up its turn without waiting for anything
        self.told = False  # it has got the error that ended the world
        self.waiting: Waitable | None = None
        self.result: Any = None


class Scheduler:
    """Runs rank functions one at a time, in an order drawn from ``seed``.

    Args:
        seed: Fixes the interleaving.
        leave: Called with a rank's context when the rank stops running (saves process-wide state).
        enter: Called with a rank's context before it runs on (restores that state).
        stuck: Called when ranks wait and none can run; returns the error that every waiting rank gets.
        clocks: The ranks' virtual clocks, in seconds, which go on; None: they start at 0.
    """

    def __init__(
        self,
        seed: int,
        *,
        leave: Callable[[Any], None],
        enter: Callable[[Any], None],
        stuck: Callable[[], BaseException],
        clocks: list[float] | None = None,
    ) -> None:
        self._draw = random.Random(seed).random
        self._leave = leave
        self._enter = enter
        self._stuck = stuck
        self._ready: list[RankThread] = []
        self._asleep: list[tuple[float, int, RankThread]] = []  # a heap: until when, who went to sleep first, who
        self._sleeps = 0
        self._unfinished = 0
        self._idle_polls = 0.0
        self._turns = 0
        self._all_done = threading.Lock()
        self.clocks = clocks if clocks is not None else []
        self.ranks: list[RankThread] = []
        self.running: RankThread | None = None
        self.fatal: BaseException | None = None  # set once; ends every rank at its next step
        self.failed_rank: int | None = None  # whose function raised it

    # -- called from outside -------------------------------------------------------------------------------

    def run(self, workers: list[Worker], contexts: list[Any], body: Callable[[RankThread], Any]) -> None:
        """Run ``body`` once for each context, each on the thread of the same number, until all have ended."""
        ranks = [RankThread(rank, context) for rank, context in enumerate(contexts)]
        self.clocks.extend([0.0] * (len(ranks) - len(self.clocks)))
        self._all_done.acquire()
        try:
            for worker, rank in zip(workers, ranks, strict=True):
                worker.run(partial(self._main, rank, body))
                self.ranks.append(rank)
            self._start()
            self._wait_for_all()
        except BaseException as interrupt:  # Ctrl-C in the launching thread: end every rank, then go on raising
            self.fatal = self.fatal or interrupt
            if self.ranks:
                self._start()
                # A second Ctrl-C ends this wait: a rank that computes for ever is left behind.
                if self._unfinished:
                    self._wait_for_all()
            raise

    def _wait_for_all(self) -> None:
        # With a timeout, because a signal that comes just before the thread falls asleep does not wake it.
        watchdog = Watchdog()
        while not self._all_done.acquire(timeout=0.2):
            running = self.running
            if running is not None:
                watchdog.look(running.rank, running.ident, self._turns)

    def _start(self) -> None:
        """Let the first rank run, once."""
        if not self._unfinished and self.running is None and not any(rank.finished for rank in self.ranks):
            self._ready = list(self.ranks)
            self._unfinished = len(self.ranks)
            self._hand_to(self._pick())

    # -- called by the running rank ------------------------------------------------------------------------

    def block(self, waitable: Waitable) -> None:
        """Let other ranks run until ``waitable`` is ready. Raises what ended the world, if it has ended.

        The rank's clock moves on to when that was.
        """
        if self.fatal is not None:
            raise self.end_of_rank()
        if waitable.ready:
            if waitable.at:
                self.reach(waitable.at)
            return
        me = self._myself()
        me.waiting = waitable
        waitable.waiters.append(me)
        self._switch(me)
        me.waiting = None
        self.reach(waitable.at)
        if not waitable.ready:  # woken because the world has failed
            raise self.end_of_rank()

    @property
    def now(self) -> float:
        """The running rank's virtual clock."""
        me = self.running
        return 0.0 if me is None else self.clocks[me.rank]

    def reach(self, at: float) -> None:
        """Move the running rank's clock to ``at``, unless it is past that."""
        me = self.running
        if me is not None and at > self.clocks[me.rank]:
            self.clocks[me.rank] = at

    def sleep(self, seconds: float) -> None:
        """Let other ranks run until none of them can, or only those that sleep longer."""
        if self.fatal is not None:
            raise self.end_of_rank()
        me = self._myself()
        self._note_idle(_IDLE_SLEEP)
        until = self.clocks[me.rank] + seconds
        self._sleeps += 1
        heapq.heappush(self._asleep, (until, self._sleeps, me))
        me.polls = True
        self._switch(me)
        me.polls = False
        if self.fatal is not None:
            raise self.end_of_rank()
        self.reach(until)

    def _note_idle(self, much: float) -> None:
        """Count that a rank gave up its turn without having done anything; too often in a row, and all are stuck."""
        self._idle_polls += much
        if self._idle_polls > _MAX_IDLE_POLLS:
            self._diagnose()

    def poll(self) -> None:
        """Let other ranks run once: the caller asked whether something has happened, and it has not.

        A loop that asks again and again thus makes progress as it would with real ranks. If all that happens is
        such questions, the ranks are stuck like ranks that wait.
        """
        if self.fatal is not None:
            raise self.end_of_rank()
        me = self._myself()
        me.polls = True
        self._note_idle(1)
        self._ready.append(me)
        idle = self._idle_polls > len(self._ready) and all(rank.polls for rank in self._ready)
        if idle and self._asleep:  # while some ask again and again, the sleep of others passes
            self._wake_one()
        self._switch(me)
        me.polls = False
        if self.fatal is not None:
            raise self.end_of_rank()

    def _myself(self) -> RankThread:
        me = self.running
        if me is None or me.ident != threading.get_ident():
            raise SimError(
                "a thread that is not a rank's own waited for other ranks\n"
                f"  seen: thread {threading.current_thread().name!r}\n"
                "  try: wait on the thread that runs the rank's function"
            )
        return me

    def complete(self, waitable: Waitable, at: float | None = None) -> None:
        """Make ``waitable`` ready and its waiters runnable; it happens at ``at``, or now."""
        waitable.at = self.now if at is None else at
        waitable.ready = True
        self._idle_polls = 0.0
        if waitable.waiters:
            self._ready.extend(waitable.waiters)
            waitable.waiters = []

    def fail(self, error: BaseException) -> None:
        """End the world: the caller, a rank, raises ``error``, and every other rank gets it at its next step."""
        if self.fatal is None:
            self.fatal = error
        if self.running is not None:
            self.running.told = True

    def end_of_rank(self) -> BaseException:
        """The exception that ends the calling rank now that the world has failed.

        What the simulator found is raised once on each rank; a rank that caught it and goes on, like everybody
        when another rank has raised, gets what ``except Exception`` does not catch.
        """
        fatal, me = self.fatal, self.running
        if isinstance(fatal, SimError) and me is not None and not me.told:
            me.told = True
            return type(fatal)(*fatal.args)  # a copy: each rank has a traceback of its own
        return RankStopped("the world has ended")

    # -- the inside ----------------------------------------------------------------------------------------

    def _main(self, rank: RankThread, body: Callable[[RankThread], Any]) -> Callable[[], None]:
        rank.baton.acquire()
        rank.ident = threading.get_ident()
        try:
            if self.fatal is None:
                rank.result = body(rank)
        except RankStopped:
            pass
        except BaseException as error:
            if self.fatal is None:
                self.fatal, self.failed_rank = error, rank.rank
        rank.finished = True
        self._idle_polls = 0.0
        self._unfinished -= 1
        if self._unfinished == 0:
            self._leave(rank.context)
            self.running = None
            return self._all_done.release
        next_rank = self._pick()
        self._leave(rank.context)
        return partial(self._hand_to, next_rank)

    def _switch(self, me: RankThread) -> None:
        next_rank = self._pick()
        if next_rank is me:
            return
        self._leave(me.context)
        self._hand_to(next_rank)
        me.baton.acquire()

    def _hand_to(self, rank: RankThread) -> None:
        self._enter(rank.context)
        self.running = rank
        self._turns += 1
        rank.baton.release()

    def _pick(self) -> RankThread:
        ready = self._ready
        if not ready and self._asleep:
            self._wake_one()
        if not ready and self.fatal is None:
            self._diagnose()
        if self.fatal is not None:
            # Whoever waits has to be woken as well, so that it can unwind; in rank order.
            ready = self._ready = [rank for rank in self.ranks if not rank.finished]
        index = int(self._draw() * len(ready))
        ready[index], ready[-1] = ready[-1], ready[index]
        return ready.pop()

    def _wake_one(self) -> None:
        """Let the rank run whose sleep is over first."""
        self._ready.append(heapq.heappop(self._asleep)[2])

    def _diagnose(self) -> None:
        """End the world because no rank gets any further."""
        try:
            self.fatal = self._stuck()
        except Exception as error:  # in describing it; without any fatal error the ranks would sleep for ever
            self.fatal = error
