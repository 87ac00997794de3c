"""The scheduler: one rank runs at a time, and where it would block, the seed says who runs next.

The scheduler knows nothing of torch. A rank is a thread that holds the *baton* while it runs. It hands it on
when it waits for something (`Waitable`) or ends. Since exactly one thread ever runs, the seed fixes the
whole interleaving, no lock is needed anywhere else in the simulator, and "no rank can run" is a fact that is
known at once and not after a timeout.
"""

from __future__ import annotations

import heapq
import math
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from sim.explain.errors import RankLost, RankStopped, SimError, ranks_phrase, said
from sim.explain.lines import raised_at
from sim.kernel import watchdog
from sim.kernel.threads import Worker
from sim.kernel.waiting import Lost, RankThread, UnscheduledThreads, Waitable

# So many times in a row may ranks ask whether something has happened while nothing does, before they count as stuck;
# a sleep counts for less, since it makes time pass.
_MAX_IDLE_POLLS = 10_000
_IDLE_SLEEP = 0.01
_IDLE_TIMEOUT = 0.1


class Scheduler:
    """Runs rank functions one at a time, in an order drawn from `seed`.

    Args:
        seed: Fixes the interleaving.
        leave: Called with a rank's context when the rank stops running (saves process-wide state).
        enter: Called with a rank's context before it runs on (restores that state).
        stuck: Called when ranks wait and none can run; returns the error that every waiting rank gets.
        clocks: The ranks' virtual clocks, in seconds, which go on; None: they start at 0.
        schedule: Who runs next, in place of the seed: where several can, 0 is the one that could first. It goes on
            with zeros when it ends, so that ranks take turns and none of them is left out.
    """

    def __init__(
        self,
        seed: int,
        *,
        leave: Callable[[Any], None],
        enter: Callable[[Any], None],
        stuck: Callable[[], BaseException],
        clocks: list[float] | None = None,
        schedule: Iterator[int] | None = None,
    ) -> None:
        self._schedule = schedule
        self._leave = leave
        self._enter = enter
        self._stuck = stuck
        self.runs = 0
        self._launcher = 0  # the thread that waits for the ranks
        self.pid = os.getpid()  # in a process that a rank has forked off, nobody takes turns
        self.clocks = clocks if clocks is not None else []
        self.rescue: Callable[[float | None, bool], bool] | None = None  # lets time pass where faults hold ranks up
        self.restart(seed)

    def restart(self, seed: int) -> None:
        """Forget the last run: the next one begins with an interleaving of its own; clocks and rescue stay."""
        self.runs += 1
        self._draw = random.Random(seed).random
        self._ready: list[RankThread] = []
        self._asleep: list[tuple[float, int, RankThread]] = []  # a heap: until when, who went to sleep first, who
        self._sleeps = 0
        self._unfinished = 0
        self._idle_polls = 0.0
        self._turns = 0
        self._all_done = threading.Lock()
        self.helpers: list[RankThread] = []  # the threads that ranks have started and that have not ended
        self.unscheduled = UnscheduledThreads(self)
        self.ranks: list[RankThread] = []
        self.running: RankThread | None = None
        self.fatal: BaseException | None = None  # set once; ends every rank at its next step
        self.failed_rank: int | None = None  # whose function raised it
        self.gone: set[int] = set()  # the ranks that count as dead, and only unwind

    # -- called from outside -------------------------------------------------------------------------------

    def run(self, workers: list[Worker], contexts: list[Any], body: Callable[[RankThread], Any]) -> None:
        """Run `body` once for each context, each on the thread of the same number, until all have ended."""
        ranks = [RankThread(rank, context) for rank, context in enumerate(contexts)]
        self._launcher = threading.get_ident()
        self.clocks.extend([0.0] * (len(ranks) - len(self.clocks)))
        self._all_done.acquire()
        try:
            for worker, rank in zip(workers, ranks, strict=True):
                worker.run(partial(self._main, rank, body))
                self.ranks.append(rank)
            self._start()
            self._wait_for_all()
            self._dismiss()
        except BaseException as interrupt:  # Ctrl-C in the launching thread: end every rank, then go on raising
            self.fatal = self.fatal or interrupt
            if self.ranks:
                self._start()
                # A second Ctrl-C ends this wait: a rank that computes for ever is left behind.
                if self._unfinished or self.helpers:
                    self._wait_for_all(interrupted=True)
            raise

    def _wait_for_all(self, *, interrupted: bool = False) -> None:
        # With a timeout, because a signal that comes just before the thread falls asleep does not wake it.
        dog, since = watchdog.Watchdog(), time.monotonic()
        while not self._all_done.acquire(timeout=0.2):
            running = self.running
            if running is not None:
                dog.look(running, self._turns, self._failure(), alone=len(self.ranks) == 1 and not self.helpers)
            if interrupted and time.monotonic() - since > watchdog.INTERRUPT_S:
                interrupted = False
                watchdog.report_interrupt(ranks_phrase(rank.rank for rank in self.ranks if not rank.finished))

    def _failure(self) -> str:
        """What has ended the world, in a line; empty while nothing has."""
        fatal, rank = self.fatal, self.failed_rank
        if fatal is None:
            return ""
        line = raised_at(fatal)
        return f"{'' if rank is None else f'rank {rank} raised '}{said(fatal)}{line and f'  {line}'}"

    def _start(self) -> None:
        """Let the first rank run, once."""
        if not self._unfinished and self.running is None and not any(rank.finished for rank in self.ranks):
            self._ready = list(self.ranks)
            self._unfinished = len(self.ranks)
            self._hand_to(self._pick())

    # -- called by the running rank ------------------------------------------------------------------------

    def block(self, waitable: Waitable) -> None:
        """Let other ranks run until `waitable` is ready. Raises what ended the world, if it has ended.

        The rank's clock moves on to when that was.
        """
        if self.fatal is not None:
            raise self.end_of_rank()
        if waitable.ready:
            if waitable.at:
                self.reach(waitable.at)
            return
        me = self._myself()
        self.check_alive()
        if waitable.lost is None:
            me.waiting, me.since = waitable, self._turns
            waitable.waiters.append(me)
            self._switch(me)
            me.waiting = None
        else:
            self.poll()
        self.reach(waitable.at)
        if not waitable.ready:  # woken because the world has failed, or because this never will be
            raise self._why_not(waitable, me)

    def wait(self, waitable: Waitable, until: float | None = None) -> bool:
        """Like `block`, but no longer than `until` in virtual time; returns whether it is ready."""
        if self.fatal is not None:
            raise self.end_of_rank()
        if not waitable.ready:
            me = self._myself()
            me.waiting = waitable
            waitable.waiters.append(me)
            if until is not None:
                self._note_idle(_IDLE_TIMEOUT)
                self._sleeps += 1
                me.alarm = (max(until, self.clocks[me.rank]), self._sleeps, me)
                heapq.heappush(self._asleep, me.alarm)
            self._switch(me)
            me.waiting = None
        if waitable.ready:
            self.reach(waitable.at)
            return True
        if self.fatal is not None:
            raise self.end_of_rank()
        self.check_alive()
        if until is not None:
            self.reach(until)
        return waitable.ready

    def wake(self, waitable: Waitable) -> None:
        """Complete what threads of this process wait for; any thread may do so, at any time."""
        me = self.running
        if me is None or me.ident != threading.get_ident():
            self.unscheduled.arrived.append(waitable)
            return
        own = all(waiter.rank == me.rank for waiter in waitable.waiters)  # not so when garbage of another rank goes
        self.complete(waitable, None if own else 0.0)

    def complete_unscheduled(self, waitable: Waitable) -> None:
        """Complete what an unscheduled thread has done; that takes no virtual time."""
        self.complete(waitable, 0.0)

    def may_go_on(self) -> bool:
        """Whether some thread can run, be it to its end."""
        return bool(self._ready) or self.fatal is not None

    def somebody_sleeps(self) -> bool:
        """Whether some thread goes on by itself as time passes."""
        return bool(self._asleep)

    def _turn_off_alarms(self, waitable: Waitable) -> None:
        for waiter in waitable.waiters:
            if waiter.alarm is not None:
                self._asleep.remove(waiter.alarm)
                heapq.heapify(self._asleep)
                waiter.alarm = None

    def may_wait(self) -> bool:
        """Return True if the thread that has the turn would wait for a thread of the world."""
        me = self.running
        return me is not None and not self.unscheduled.are_waited_for_by(me)

    def is_stranger(self) -> bool:
        """Return True while ranks run, on a thread that is neither one of theirs nor the one that waits for them."""
        me = threading.get_ident()
        if self.running is None or self.pid != os.getpid() or me == self._launcher:
            return False
        return all(thread.ident != me for thread in (*self.ranks, *self.helpers))

    def adopt(self, helper: RankThread) -> None:
        """Let a thread take part that a thread of a rank has just started, and that waits for its baton."""
        self.helpers.append(helper)
        started = Waitable()
        started.waiters.append(helper)
        self.wake(started)  # by a thread without the turn: when nobody else can run
        if self.running is None:
            self._dismiss()  # that one has started it after the last turn

    def _dismiss(self) -> None:
        """End those threads that began when all others had ended: nobody hands them a baton."""
        while self.helpers:
            helper = self.helpers.pop()
            helper.finished = True
            assert helper.ended is not None
            self.complete(helper.ended)
            helper.baton.release()

    @property
    def now(self) -> float:
        """The running rank's virtual clock."""
        me = self.running
        return 0.0 if me is None else self.clocks[me.rank]

    def moving_now(self) -> float:
        """The running rank's clock for a loop that waits until it is past some time: it does not stand still."""
        me, now = self.running, self.now
        if me is not None and me.asked_at == now:
            return math.nextafter(now, math.inf)
        if me is not None:
            me.asked_at = now
        return now

    def reach(self, at: float) -> None:
        """Move the running rank's clock to `at`, unless it is past that."""
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
            self._diagnose(polling=True)

    def poll(self) -> None:
        """Let other ranks run once: the caller asked whether something has happened, and it has not.

        A loop that asks again and again thus makes progress as it would with real ranks. If all that happens is
        such questions, the ranks are stuck like ranks that wait.
        """
        if self.fatal is not None:
            raise self.end_of_rank()
        self.check_alive()
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
        """Make `waitable` ready and its waiters runnable; it happens at `at`, or now."""
        waitable.at = self.now if at is None else at
        waitable.ready = True
        self._idle_polls = 0.0
        if waitable.waiters:
            if self._asleep:
                self._turn_off_alarms(waitable)
            self._ready.extend(waitable.waiters)
            waitable.waiters = []

    def lose(self, waitable: Waitable, lost: Lost, at: float) -> None:
        """Let whoever waits for `waitable`, now or later, get the error that `lost` makes, at `at` or later."""
        self._turn_off_alarms(waitable)
        waitable.at = at
        waitable.lost = lost
        self._ready.extend(waitable.waiters)
        waitable.waiters = []

    def end_threads_of(self, rank: int) -> None:
        """Let all threads of a rank count as dead, and those that wait unwind."""
        self.gone.add(rank)
        for thread in (*self.ranks, *self.helpers):
            waits_for = thread.waiting if thread.rank == rank and not thread.finished else None
            if waits_for is not None and thread in waits_for.waiters:
                self._turn_off_alarms(waits_for)
                waits_for.waiters.remove(thread)
                self._ready.append(thread)

    def check_alive(self) -> None:
        """Stop the running rank if it is dead and only unwinds: nobody must hear of it."""
        if self.running is not None and self.running.rank in self.gone:
            self.running.refusals += 1
            raise RankStopped("the rank is dead")

    def _why_not(self, waitable: Waitable, me: RankThread) -> BaseException:
        if self.fatal is None:
            self.check_alive()
            if waitable.lost is not None:
                return waitable.lost(waitable, me.rank)
        return self.end_of_rank()

    def fail(self, error: BaseException) -> None:
        """End the world: the caller, a rank, raises `error`, and every other rank gets it at its next step."""
        if self.fatal is None:
            self.fatal = error
        if self.running is not None:
            self.running.notified = True

    def end_of_rank(self) -> BaseException:
        """The exception that ends the calling rank now that the world has failed.

        What the simulator found is raised once on each rank; a rank that caught it and goes on, like everybody
        when another rank has raised, gets what `except Exception` does not catch.
        """
        fatal, me = self.fatal, self.running
        if me is not None:
            me.refusals += 1
        of_the_world = not isinstance(fatal, RankLost)  # which is a rank's own affair
        if isinstance(fatal, SimError) and of_the_world and me is not None and not me.notified:
            me.notified = True
            return type(fatal)(*fatal.args)  # a copy: each rank has a traceback of its own
        return RankStopped("the world has ended")

    # -- the inside ----------------------------------------------------------------------------------------

    def _main(self, rank: RankThread, body: Callable[[RankThread], Any]) -> Callable[[], None]:
        rank.baton.acquire()
        rank.ident = threading.get_ident()
        try:
            if self.fatal is None:
                rank.result = body(rank)
        except BaseException as error:
            if os.getpid() != self.pid:
                _end_process(error)
            if not isinstance(error, RankStopped) and self.fatal is None and rank.rank not in self.gone:
                self.fatal, self.failed_rank = error, rank.rank
        if os.getpid() != self.pid:
            _end_process(None)
        if rank.rank in self.gone:
            rank.result = None
        self._unfinished -= 1
        return self.end(rank)

    def end(self, me: RankThread) -> Callable[[], None]:
        """Note that the calling thread is done; returns what hands its baton on."""
        me.finished = True
        self._idle_polls = 0.0
        if me.ended is not None:
            self.helpers.remove(me)
            self._turn_off_alarms(me.ended)
            self.complete(me.ended)
        if self._unfinished == 0 and not self.helpers:
            self._leave(me.context)
            self.running = None
            return self._all_done.release
        next_rank = self._pick()
        self._leave(me.context)
        return partial(self._hand_to, next_rank)

    def _switch(self, me: RankThread) -> None:
        next_rank = self._pick()
        if next_rank is me:
            return
        self._leave(me.context)
        self._hand_to(next_rank)
        me.baton.acquire()
        if me.resumed is not None:
            me.resumed()

    def _hand_to(self, rank: RankThread) -> None:
        self._enter(rank.context)
        self.running = rank
        self._turns += 1
        rank.baton.release()

    def _pick(self) -> RankThread:
        ready = self._ready
        if self.helpers and self._unfinished == 0:
            self._stop_idle_helpers()
        if not ready and self.unscheduled:
            self.unscheduled.listen()
        if not ready and self._asleep and not self._is_rescued(polling=False):
            self._wake_one()
        if not ready and self.fatal is None:
            self._diagnose()
        if self.fatal is not None:
            # Whoever waits has to be woken as well, so that it can unwind; in rank order.
            ready = self._ready = [rank for rank in (*self.ranks, *self.helpers) if not rank.finished]
        if self._schedule is not None:  # the line stays in the order in which they became able to run
            return ready.pop(next(self._schedule, 0) % len(ready) if len(ready) > 1 else 0)
        index = int(self._draw() * len(ready))
        ready[index], ready[-1] = ready[-1], ready[index]
        return ready.pop()

    def _wake_one(self) -> None:
        """Let the rank run whose sleep is over first."""
        thread = heapq.heappop(self._asleep)[2]
        if thread.alarm is not None:  # it waits for something that has not come in time
            thread.alarm = None
            assert thread.waiting is not None
            thread.waiting.waiters.remove(thread)
        self._ready.append(thread)

    def _stop_idle_helpers(self) -> None:
        """End the helper threads for which a process would not wait: all ranks' functions have returned.

        Those are daemon threads, and those that only wait for something that a thread of the process would do, as the
        threads of an executor do that nobody has shut down.
        """
        kept = [helper for helper in self.helpers if not helper.daemon]
        busy = any(thread.waiting is None or thread.waiting.is_global or thread.alarm is not None for thread in kept)
        if self.fatal is None and not busy and not (kept and self._ready):
            self.fatal = RankStopped("the ranks' functions have returned")

    def _is_rescued(self, *, polling: bool) -> bool:
        """Whether something that cannot happen has timed out, before the first of those that sleep wakes up."""
        until = self._asleep[0][0] if self._asleep else None
        return self.rescue is not None and self.fatal is None and self.rescue(until, polling)

    def _diagnose(self, *, polling: bool = False) -> None:
        """End the world because no rank gets any further, unless faults hold them up, which time will show."""
        try:
            if self._is_rescued(polling=polling):
                self._idle_polls = 0.0
                return
            self.fatal = self._stuck()
        except Exception as error:  # in describing it; without any fatal error the ranks would sleep for ever
            self.fatal = error


def _end_process(error: BaseException | None) -> NoReturn:
    """End a process that a rank has forked off, as Python does where a program ends: no thread takes its baton."""
    code: object = error.code if isinstance(error, SystemExit) else int(error is not None)
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
