"""Threads that a rank starts: they are the rank's, and take turns like ranks.

A helper thread has its rank's environment, process groups, default generators and clock. It runs when the scheduler
lets it, and gives its turn up where a rank does. When the functions of all ranks have returned, helpers are waited for
as Python waits for them; those that are daemon threads, or wait for work that nobody is left to give, are ended.
"""

from __future__ import annotations

import _thread
import concurrent.futures
import copy
import itertools
import logging
import multiprocessing.pool
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, ref

from sim.explain.errors import RankStopped, SimError
from sim.kernel.context import current_context, this_thread
from sim.kernel.scheduler import Scheduler
from sim.kernel.waiting import RankThread
from sim.patches.locks import Local, exchange, my_scheduler, scheduler_of_turn
from sim.patches.rank import RankContext
from sim.patches.rank_thread import catch_up, on_helper_thread

# What they start talks to other processes, by ways that the scheduler does not see.
_RUN_BY_THEMSELVES = (
    *("multiprocessing.", "concurrent.futures.process", "torch.utils.data.", "torch.multiprocessing."),
    "torchdata.stateful_dataloader.",
    *("multiprocess.", "billiard.", "loky.", "joblib.externals.loky."),  # others' versions of it
)

# The functions of those by which nobody learns what a process has done, or whose queue is asked with a timeout.
_ONLY_SEND = ("_feed", "_handle_workers", "_pin_memory_loop")


def _threads(host: object) -> Callable[[], None]:
    """A thread that a rank starts takes part; to wait for its end yields the turn."""
    start, join, is_alive = threading.Thread.start, threading.Thread.join, threading.Thread.is_alive
    init, start_bare = threading.Thread.__init__, _thread.start_new_thread
    helpers: dict[threading.Thread, RankThread] = {}

    def init_on_rank(thread: threading.Thread, *args: Any, **options: Any) -> None:
        init(thread, *args, **options)
        scheduler = scheduler_of_turn()
        me = None if scheduler is None else scheduler.running
        if me is not None and not me.name and options.get("daemon") is None:
            thread.daemon = False  # as on a process's main thread; a rank's own is a daemon

    def start_on_rank(thread: threading.Thread) -> None:
        context, turn = current_context(), scheduler_of_turn()
        if context is None:
            start(thread)
            return
        scheduler: Scheduler = context.scheduler
        me = helpers.get(threading.current_thread()) if turn is None else turn.running
        is_here = me is not None and scheduler.pid == os.getpid()  # and in no process that a rank has forked off
        helper = RankThread(context.rank if me is None else me.rank, context)
        helper.name, helper.daemon, helper.ended = thread.name, thread.daemon, Local()
        helper.by_itself = not is_here or _talks_to_processes(thread, sys._getframe(1))
        answers = getattr(getattr(thread, "_target", None), "__name__", "") not in _ONLY_SEND
        vars(thread)[_OF_RANK] = ref(helper.context)
        run = _run_by_itself if helper.by_itself else _run
        vars(thread)["run"] = partial(run, scheduler, helper, thread, thread.run)
        try:
            with nullcontext() if me is None else _waiting_for_real(me):
                start(thread)  # waits until the thread is there
        except BaseException:
            vars(thread).pop("run", None)
            raise
        for ended in [each for each, its in list(helpers.items()) if its.finished and not is_alive(each)]:
            del helpers[ended]
        helpers[thread] = helper
        if helper.by_itself:
            scheduler.unscheduled.add(helper.rank, thread, answers=answers)
        else:
            assert me is not None
            me.resumed = catch_up
            scheduler.adopt(helper)

    def start_bare_on_rank(function: Any, args: Any, kwargs: Any = None, /) -> int:
        if scheduler_of_turn() is None:
            return start_bare(function, args, *([] if kwargs is None else [kwargs]))
        thread = threading.Thread(target=function, args=args, kwargs=kwargs, daemon=True)
        thread.start()
        return thread.ident or 0

    def join_on_rank(thread: threading.Thread, timeout: float | None = None) -> None:
        scheduler, helper = scheduler_of_turn(), helpers.get(thread)
        if helper is not None and helper.by_itself:
            scheduler = my_scheduler()
        if scheduler is not None and helper is not None and helper is not scheduler.running:
            assert helper.ended is not None
            if not scheduler.wait(helper.ended, None if timeout is None else scheduler.now + max(timeout, 0.0)):
                return
            timeout = None  # it only has to clear up
        join(thread, timeout)

    def is_alive_on_rank(thread: threading.Thread) -> bool:
        scheduler, helper = scheduler_of_turn(), helpers.get(thread)
        if scheduler is not None and helper is not None and not helper.by_itself and helper is not scheduler.running:
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
            (_thread, "start_new_thread", start_bare_on_rank),
        ]
    )

    def undo() -> None:
        restore()
        for thread, helper in helpers.items():
            if not helper.by_itself:
                thread.join(_CLEARING_UP_S)

    return undo


@contextmanager
def _waiting_for_real(me: RankThread) -> Iterator[None]:
    before, me.by_itself = me.by_itself, True
    try:
        yield
    finally:
        me.by_itself = before


def _talks_to_processes(thread: threading.Thread, caller: FrameType) -> bool:
    """Return True for a thread of multiprocessing and its like; those of its pools of threads run users' functions."""
    name, owner = str(caller.f_globals.get("__name__", "")), caller.f_locals.get("self")
    in_thread_pool = any(kind.__name__ in ("ThreadPool", "DummyProcess") for kind in type(owner).__mro__)
    runs: Any = getattr(thread, "_target", None)
    return name.startswith(_RUN_BY_THEMSELVES) and (not in_thread_pool or runs.__name__ == "_handle_workers")


_OF_RANK = "_of_simulated_rank"  # of a thread: a weak reference to the context of the rank that has started it


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
        mine = ref(context)
        return [main, *(each for each in enumerate_all() if vars(each).get(_OF_RANK) == mine)]

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


def _run_by_itself(scheduler: Scheduler, helper: RankThread, thread: threading.Thread, run: Callable[[], Any]) -> None:
    """Run a thread that takes no turns as one of its rank: it can ask who it is, but not communicate."""
    vars(thread).pop("run", None)
    this_thread.context = helper.context
    try:
        catch_up()
        run()
    finally:
        this_thread.context = None
        helper.finished = True
        if helper.ended is not None:
            scheduler.wake(helper.ended)


def _run(scheduler: Scheduler, helper: RankThread, thread: threading.Thread, run: Callable[[], Any]) -> None:
    """What a helper thread does: its own function, with the rank's state, while it has the baton."""
    vars(thread).pop("run", None)
    helper.baton.acquire()
    if helper.finished:  # before its first turn
        return
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


def _run_of_rank() -> tuple[RankContext, int] | None:
    """Return the rank that runs and the number of its run, with which its threads end; None on no rank."""
    context: RankContext | None = current_context()
    if context is None or context.scheduler.pid != os.getpid():
        return None
    return context, context.scheduler.runs


def _pools(host: object) -> Callable[[], None]:
    """Work is done by threads of the rank that gives it, whoever has made the pool.

    Of an executor each rank has threads of its own, as each process would. To a `ThreadPool` of others it gives none.
    """
    executors, pools = concurrent.futures.ThreadPoolExecutor, multiprocessing.pool.ThreadPool
    init, submit, shutdown, init_pool = executors.__init__, executors.submit, executors.shutdown, pools.__init__
    owners = WeakKeyDictionary[Any, Any]()
    copies = WeakKeyDictionary[Any, dict[Any, Any]]()

    def init_on_rank(executor: Any, *args: Any, **options: Any) -> None:
        init(executor, *args, **options)
        owners[executor] = _run_of_rank()
        if scheduler_of_turn() is not None:
            executor._threads = _InOrder(executor._threads)

    def own(executor: Any) -> Any:
        asking = _run_of_rank()
        if asking is None or owners.get(executor) == asking:
            return executor
        mine = copies.setdefault(executor, {})
        if asking not in mine:
            mine[asking], fresh = copy.copy(executor), executors(1)
            parts = ("_work_queue", "_idle_semaphore", "_threads", "_shutdown_lock")
            vars(mine[asking]).update({name: vars(fresh)[name] for name in parts})
            owners[mine[asking]] = asking
        return mine[asking]

    def init_pool_on_rank(pool: Any, *args: Any, **options: Any) -> None:
        owners[pool] = _run_of_rank()
        init_pool(pool, *args, **options)

    def check_running(pool: Any) -> None:
        asking, owner = _run_of_rank(), owners.get(pool)
        if asking is not None and owner != asking:
            made_by = "the process, not by a rank" if owner is None else f"rank {owner[0].rank}"
            raise SimError(
                f"rank {asking[0].rank} cannot give work to this ThreadPool: its threads are not the rank's\n"
                f"  seen: a multiprocessing.pool.ThreadPool made by {made_by}\n"
                "  try: make it in the rank's function, or a concurrent.futures.ThreadPoolExecutor, of which each rank "
                "has threads of its own"
            )
        multiprocessing.pool.Pool._check_running(pool)  # type: ignore[attr-defined]

    restore = exchange(
        [
            (executors, "__init__", init_on_rank),
            (executors, "submit", lambda self, fn, /, *args, **options: submit(own(self), fn, *args, **options)),
            (executors, "shutdown", lambda self, *args, **options: shutdown(own(self), *args, **options)),
            (pools, "__init__", init_pool_on_rank),
            (pools, "_check_running", check_running),
        ]
    )

    def undo() -> None:
        restore()
        for pool in [pool for pool, owner in owners.items() if owner is not None]:
            if isinstance(pool, executors):
                pool._broken = "the simulated rank that made this pool has ended"  # type: ignore[assignment]
            else:
                pool._state = pool._worker_handler._state = multiprocessing.pool.TERMINATE
                pool._change_notifier.put(None)  # on which that thread waits
                pool._worker_handler.join(_CLEARING_UP_S)

    return undo


def _futures(host: object) -> Callable[[], None]:
    """What goes through sets of futures and threads does so in one order, and not by where they lie in memory.

    Also, a loop that asks a future until it is done lets others run, and an executor's thread ends without an outcry.
    """
    done, init = concurrent.futures.Future.done, concurrent.futures.Future.__init__
    numbers = itertools.count()

    def init_on_rank(future: concurrent.futures.Future[Any], *args: Any, **options: Any) -> None:
        init(future, *args, **options)
        if scheduler_of_turn() is not None:
            vars(future)["_number"] = next(numbers)

    def number(future: concurrent.futures.Future[Any]) -> int:
        found = vars(future).get("_number")
        return object.__hash__(future) if found is None else hash(found)

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
        ]
    )

    def undo() -> None:
        restore()
        logger.removeFilter(is_no_end_of_a_rank)

    return undo


HELPER_PATCHES = (_threads, _main_thread, _pools, _futures)
