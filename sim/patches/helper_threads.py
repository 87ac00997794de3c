"""Threads that a rank starts: they are the rank's, and take turns like ranks.

A helper thread has its rank's environment, process groups, default generators and clock. It runs when the scheduler
lets it, and gives its turn up where a rank does. When the functions of all ranks have returned, helpers are waited for
as Python waits for them; those that are daemon threads, or wait for work that nobody is left to give, are ended.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from sim.explain.errors import RankStopped, SimError
from sim.kernel.context import current_context
from sim.kernel.scheduler import Scheduler
from sim.kernel.waiting import RankThread
from sim.patches.locks import Local, exchange, my_scheduler
from sim.patches.rank import RankContext
from sim.patches.rank_thread import catch_up, on_helper_thread

# What they start talks to other processes, by ways that the scheduler does not see.
_RUN_BY_THEMSELVES = (
    *("multiprocessing.", "concurrent.futures.process", "torch.utils.data.", "torch.multiprocessing."),
    *("multiprocess.", "billiard.", "loky.", "joblib.externals.loky."),  # others' versions of it
)


def _threads(host: object) -> Callable[[], None]:
    """A thread that a rank starts takes part; to wait for its end yields the turn."""
    start, join, is_alive = threading.Thread.start, threading.Thread.join, threading.Thread.is_alive
    init = threading.Thread.__init__
    helpers: dict[threading.Thread, RankThread] = {}

    def init_on_rank(thread: threading.Thread, *args: Any, **options: Any) -> None:
        init(thread, *args, **options)
        scheduler = my_scheduler()
        me = None if scheduler is None else scheduler.running
        if me is not None and not me.name and options.get("daemon") is None:
            thread.daemon = False  # as on a process's main thread; a rank's own is a daemon

    def start_on_rank(thread: threading.Thread) -> None:
        scheduler = my_scheduler()
        me = None if scheduler is None else scheduler.running
        if scheduler is None or me is None:
            start(thread)
            return
        vars(thread)[_OF_RANK] = me.rank
        by_itself = str(sys._getframe(1).f_globals.get("__name__", "")).startswith(_RUN_BY_THEMSELVES)
        helper = None if by_itself else _as_helper(scheduler, me, thread)
        me.by_itself = True
        try:
            start(thread)  # waits until the thread is there
        except BaseException:
            vars(thread).pop("run", None)
            raise
        finally:
            me.by_itself = False
        if helper is None:
            scheduler.unscheduled.add(me.rank, thread)
        else:
            for ended in [each for each, its in helpers.items() if its.finished and not is_alive(each)]:
                del helpers[ended]
            helpers[thread] = helper
            me.resumed = catch_up
            scheduler.adopt(helper)

    def join_on_rank(thread: threading.Thread, timeout: float | None = None) -> None:
        scheduler, helper = my_scheduler(), helpers.get(thread)
        if scheduler is not None and helper is not None and helper is not scheduler.running:
            assert helper.ended is not None
            if not scheduler.wait(helper.ended, None if timeout is None else scheduler.now + max(timeout, 0.0)):
                return
            timeout = None  # it only has to clear up
        join(thread, timeout)

    def is_alive_on_rank(thread: threading.Thread) -> bool:
        scheduler, helper = my_scheduler(), helpers.get(thread)
        if scheduler is not None and helper is not None and helper is not scheduler.running:
            if not helper.finished:
                scheduler.poll()  # a loop that asks until it has ended lets it run
            if helper.finished:
                join(thread)
        return is_alive(thread)

    restore = exchange(
        [
            (threading.Thread, "__init__", init_on_rank),
            (threading.Thread, "start", start_on_rank),
            (threading.Thread, "join", join_on_rank),
            (threading.Thread, "is_alive", is_alive_on_rank),
        ]
    )

    def undo() -> None:
        restore()
        for thread in helpers:
            thread.join(_CLEARING_UP_S)

    return undo


_OF_RANK = "_of_simulated_rank"  # of a thread: the rank that has started it


def _main_thread(host: object) -> Callable[[], None]:
    """Where a rank runs a script, the thread that does is the main thread, and other ranks' threads are not seen."""
    main_thread, enumerate_all, count = threading.main_thread, threading.enumerate, threading.active_count

    def main_of_rank() -> threading.Thread | None:
        context: RankContext | None = current_context()
        return None if context is None or context.view is None else context.view.thread

    def main_on_rank() -> threading.Thread:
        return main_of_rank() or main_thread()

    def enumerate_on_rank() -> list[threading.Thread]:
        main, context = main_of_rank(), current_context()
        if main is None or context is None:
            return enumerate_all()
        return [main, *(each for each in enumerate_all() if vars(each).get(_OF_RANK) == context.rank)]

    def count_on_rank() -> int:
        return count() if main_of_rank() is None else len(enumerate_on_rank())

    return exchange(
        [
            (threading, "main_thread", main_on_rank),
            (threading, "enumerate", enumerate_on_rank),
            (threading, "active_count", count_on_rank),
        ]
    )


_CLEARING_UP_S = 5.0  # to be through with what Python does after a thread's function; far more than it takes


def _as_helper(scheduler: Scheduler, me: RankThread, thread: threading.Thread) -> RankThread:
    """Let the thread that is about to start wait for its turn before it runs."""
    helper = RankThread(me.rank, me.context)
    helper.name, helper.daemon, helper.ended = thread.name, thread.daemon, Local()
    vars(thread)["run"] = partial(_run, scheduler, helper, thread, thread.run)
    return helper


def _run(scheduler: Scheduler, helper: RankThread, thread: threading.Thread, run: Callable[[], Any]) -> None:
    """What a helper thread does: its own function, with the rank's state, while it has the baton."""
    vars(thread).pop("run", None)
    helper.baton.acquire()
    helper.ident = threading.get_ident()
    helper.name = thread.name
    if scheduler.fatal is None:
        try:
            with on_helper_thread(helper):
                _call(scheduler, run, thread)
        except BaseException as error:  # none of the thread's own; without its baton the others would sleep for ever
            if scheduler.fatal is None:
                scheduler.fatal = error
    hand_on = scheduler.end(helper)
    del run, helper
    hand_on()


def _call(scheduler: Scheduler, run: Callable[[], Any], thread: threading.Thread) -> None:
    """Run a thread's function; what it raises is reported as Python does it, unless the world is at an end."""
    try:
        run()
    except (SystemExit, RankStopped):
        return
    except BaseException:
        if scheduler.fatal is None:
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), thread)))


class _InOrder(list[Any]):
    """What an executor keeps its threads in: it joins them in the order in which they began, not by their address."""

    add = list.append


def _futures(host: object) -> Callable[[], None]:
    """What goes through sets of futures and threads does so in one order, and not by where they lie in memory.

    Also, a loop that asks a future until it is done lets others run, and an executor's thread ends without an outcry.
    """
    done, init = concurrent.futures.Future.done, concurrent.futures.Future.__init__
    init_executor = concurrent.futures.ThreadPoolExecutor.__init__
    numbers = itertools.count()

    def init_on_rank(future: concurrent.futures.Future[Any], *args: Any, **options: Any) -> None:
        init(future, *args, **options)
        if my_scheduler() is not None:
            vars(future)["_number"] = next(numbers)

    def number(future: concurrent.futures.Future[Any]) -> int:
        found = vars(future).get("_number")
        return object.__hash__(future) if found is None else hash(found)

    def init_executor_on_rank(executor: Any, *args: Any, **options: Any) -> None:
        init_executor(executor, *args, **options)
        if my_scheduler() is not None:
            executor._threads = _InOrder(executor._threads)

    def done_on_rank(future: concurrent.futures.Future[Any]) -> bool:
        if done(future):
            return True
        scheduler = my_scheduler()
        if scheduler is not None and scheduler.helpers:
            scheduler.poll()
        return done(future)

    def is_no_end_of_a_rank(record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if record.exc_info else None
        return kind is None or not issubclass(kind, (RankStopped, SimError))

    logger = concurrent.futures._base.LOGGER
    logger.addFilter(is_no_end_of_a_rank)
    restore = exchange(
        [
            (concurrent.futures.Future, "__init__", init_on_rank),
            (concurrent.futures.Future, "__hash__", number),
            (concurrent.futures.Future, "done", done_on_rank),
            (concurrent.futures.ThreadPoolExecutor, "__init__", init_executor_on_rank),
        ]
    )

    def undo() -> None:
        restore()
        logger.removeFilter(is_no_end_of_a_rank)

    return undo


HELPER_PATCHES = (_threads, _main_thread, _futures)
