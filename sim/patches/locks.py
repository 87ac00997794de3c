"""Locks and event loops, made so that whoever waits for one on a rank lets the other threads of the world run.

`threading`, `queue` and `concurrent.futures` build everything that waits (conditions, events, semaphores, queues,
futures) on three things: the locks that a waiting thread makes for itself, locks in general, and a clock for timeouts.
These are exchanged while a world is alive, and only for what ranks and their helper threads make.
"""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import fcntl
import os
import queue
import selectors
import struct
import sys
import threading
import time
import types
from asyncio.selector_events import BaseSelectorEventLoop
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from sim.explain.lines import user_line
from sim.kernel.context import Context, current_context
from sim.kernel.scheduler import Scheduler
from sim.kernel.threads import collector_paused
from sim.kernel.waiting import RankThread, Waitable

_real_lock = _thread.allocate_lock
_real_monotonic, _real_sleep = time.monotonic, time.sleep
_COMPILER = "torch._dynamo.convert_frame"
_WAIT_IN = (threading.__file__, queue.__file__, concurrent.futures._base.__file__)
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def scheduler_of_turn() -> Scheduler | None:
    """Return the scheduler if the calling thread is the one that it lets run, e.g. to decide whose a new thread is."""
    context = current_context()
    if context is None or context.scheduler.pid != os.getpid():  # or a process that a rank has forked off
        return None
    scheduler: Scheduler = context.scheduler
    me = scheduler.running
    return scheduler if me is not None and me.ident == threading.get_ident() and not me.by_itself else None


def my_scheduler() -> Scheduler | None:
    """Return the scheduler if the calling thread waits for threads of the world; None: waiting is Python's own affair.

    A rank that waits for another process keeps its turn. What it makes meanwhile is its own all the same: ask
    `scheduler_of_turn` for that.
    """
    scheduler = scheduler_of_turn()
    return scheduler if scheduler is not None and scheduler.may_wait() else None


class Local(Waitable):
    """Something that a thread of the same process does: what it is stands in the stack of whoever waits for it."""

    __slots__ = ()
    is_global = False

    def describe(self) -> str:
        """Name the call in which somebody waits for it."""
        return where(self.waiters[0])[0] if self.waiters else "a lock"


def where(thread: RankThread) -> tuple[str, str]:
    """What a thread that waits for another one has called ("Queue.get"), and the user's line that called it."""
    with collector_paused():
        frame = sys._current_frames().get(thread.ident)
    call = "a lock"
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        call = _name_of(frame, call)
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename in _WAIT_IN and frame.f_code.co_name != "run":
        call = _name_of(frame, call)
        frame = frame.f_back
    return call, user_line(frame)


def _name_of(frame: FrameType, otherwise: str) -> str:
    owner = frame.f_locals.get("self", frame.f_locals.get("thread"))
    name = frame.f_code.co_name.strip("_").removesuffix("_on_rank")
    if name == "enter":
        name = "acquire"
    if owner is None:
        return name if frame.f_code.co_filename in _WAIT_IN else otherwise
    kind = type(owner).__name__
    if not isinstance(owner, (Lock, threading.Thread)) and frame.f_code.co_filename.startswith(OURS):
        return otherwise
    return f"{'Thread' if isinstance(owner, threading.Thread) else kind.removeprefix('_Py').lstrip('_')}.{name}"


class Lock:
    """A lock that a rank or one of its helper threads has made: to wait for it yields the turn.

    It is a real lock all the same, and so works between any threads and after the world has ended.
    """

    __slots__ = ("__weakref__", "_real", "_waiting")

    def __init__(self) -> None:
        self._real = _real_lock()
        self._waiting: deque[tuple[Scheduler, Local]] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As a lock of Python; a timeout is in virtual time."""
        if self._real.acquire(False):
            return True
        scheduler = my_scheduler() if blocking and (timeout == -1 or timeout > 0) else None
        if scheduler is None:
            return self._real.acquire(blocking, timeout)
        until = None if timeout == -1 else scheduler.now + timeout
        while True:
            released = Local()
            self._waiting.append((scheduler, released))
            try:
                if self._real.acquire(False):  # released meanwhile by a thread that is none of the world's
                    return True
                if not scheduler.wait(released, until):
                    return self._real.acquire(False)
            finally:
                self._forget(released)
            if self._real.acquire(False):
                return True

    def _forget(self, released: Local) -> None:
        for entry in list(self._waiting):
            if entry[1] is released:
                self._waiting.remove(entry)

    def release(self) -> None:
        """Let whoever waits for the lock run, the one that came first."""
        self._real.release()
        try:
            scheduler, released = self._waiting.popleft()
        except IndexError:
            return
        scheduler.wake(released)

    def locked(self) -> bool:
        """Whether somebody has it."""
        return self._real.locked()

    _is_owned = locked  # what a Condition asks for

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:  # Python calls it in a new process
        self._real = _real_lock()
        self._waiting = deque()

    def __repr__(self) -> str:
        return f"<{'locked' if self.locked() else 'unlocked'} sim.locks.Lock at {id(self):#x}>"


class _LockOfWhoever:
    """What `threading.Lock` is while a world is alive."""

    def __new__(cls) -> Any:
        return _real_lock() if scheduler_of_turn() is None else Lock()


class _SimpleQueueOfWhoever:
    """What `queue.SimpleQueue` is while a world is alive: on ranks the one in Python, whose waiting can be seen."""

    __class_getitem__: Any = classmethod(types.GenericAlias)

    def __new__(cls) -> Any:
        return _c_simple_queue() if scheduler_of_turn() is None else _python_simple_queue()


_c_simple_queue: Any = queue.SimpleQueue
_python_simple_queue: Any = vars(queue)["_PySimpleQueue"]
_python_rlock: Any = vars(threading)["_PyRLock"]


def _monotonic() -> float:
    """The clock by which timeouts count: virtual where waiting is."""
    scheduler = my_scheduler()
    return _real_monotonic() if scheduler is None else scheduler.now


class _TimeModule(types.ModuleType):
    """The module `time` as `concurrent.futures` sees it."""

    def monotonic(self) -> float:
        """As above; `concurrent.futures` asks until a time is past, and not just until it has come."""
        scheduler = my_scheduler()
        return _real_monotonic() if scheduler is None else scheduler.moving_now()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def _locks(host: object) -> Callable[[], None]:
    """Locks that ranks make, and with them conditions, events, semaphores, queues and futures, yield the turn."""
    original_rlock = threading.RLock

    def rlock(*args: Any, **options: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") == _COMPILER:  # imported now, maybe on no rank
            return _yielding_rlock()
        return original_rlock(*args, **options) if scheduler_of_turn() is None else _python_rlock(*args, **options)

    replacements: list[tuple[Any, str, Any]] = [
        (threading, "_allocate_lock", _LockOfWhoever),
        (threading, "Lock", _LockOfWhoever),
        (threading, "RLock", rlock),
        (queue, "SimpleQueue", _SimpleQueueOfWhoever),
    ]
    return exchange(replacements)


def _timeouts(host: object) -> Callable[[], None]:
    """Timeouts of what waits on a rank are in virtual time, like the waiting."""
    return exchange(
        [
            (threading, "_time", _monotonic),
            (queue, "time", _monotonic),
            (concurrent.futures._base, "time", _TimeModule("time")),
        ]
    )


def exchange(replacements: list[tuple[Any, str, Any]]) -> Callable[[], None]:
    """Set attributes of modules and classes; returns how to undo that.

    A function of ours takes the name of what it replaces, so that it is pickled by that, as by a process pool.
    """
    missing = object()  # or inherited; and not getattr, which would bind class methods and unwrap static ones
    originals = [(owner, name, vars(owner).get(name, missing)) for owner, name, _ in replacements]
    for owner, name, value in replacements:
        if _is_ours(value):
            is_module = isinstance(owner, types.ModuleType)
            value.__module__ = owner.__name__ if is_module else owner.__module__
            value.__qualname__ = name if is_module else f"{owner.__qualname__}.{name}"
        setattr(owner, name, value)

    def undo() -> None:
        for owner, name, value in reversed(originals):
            if value is not missing:
                setattr(owner, name, value)
            elif name in vars(owner):  # not gone yet: a name may be there twice
                delattr(owner, name)

    return undo


def _is_ours(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        return value.__code__.co_filename.startswith(OURS)
    return isinstance(value, type) and value.__module__.startswith("sim.")


def _compile_lock(host: object) -> Callable[[], None]:
    """The lock under which torch.compile compiles yields the turn: the compiler waits for processes, and so yields it.

    It was made when torch._dynamo was imported, which may have been before the ranks began.
    """
    frames = sys.modules.get(_COMPILER)
    return exchange([] if frames is None else [(frames, "compile_lock", _yielding_rlock())])


def _yielding_rlock() -> Any:
    """A lock that its owner can take again, and that yields the turn to whoever has it."""
    lock = _python_rlock()
    lock._block = Lock()
    return lock


# -- locks of files --------------------------------------------------------------------------------------------------

_OTHER_PROCESS_S = 0.05


class _Holder(NamedTuple):
    """The last rank that has locked a file, and by which open file."""

    rank: int
    number: int


def _file_locks(host: object) -> Callable[[], None]:
    """A rank that waits for the lock of a file lets others run, who may have it.

    `lockf` locks for a process, which ranks are in common: on ranks it locks for the open file, as `flock` does.
    """
    holders: dict[tuple[int, int], _Holder] = {}
    flock, lockf = fcntl.flock, fcntl.lockf

    def flock_on_rank(file: Any, operation: int, /) -> None:
        if _of_this_process() is None:
            flock(file, operation)
        else:
            lock("flock", file, operation, lambda how: flock(file, how))

    def lockf_on_rank(file: Any, cmd: int, len: int = 0, start: int = 0, whence: int = 0, /) -> Any:
        def attempt(how: int) -> None:
            kind = next(kind for flag, kind in kinds if how & flag)
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, whence, start, len, 0))

        if _of_this_process() is None or not cmd & (fcntl.LOCK_UN | fcntl.LOCK_EX | fcntl.LOCK_SH):
            return lockf(file, cmd, len, start, whence)
        return lock("lockf", file, cmd, attempt)

    kinds = ((fcntl.LOCK_UN, fcntl.F_UNLCK), (fcntl.LOCK_EX, fcntl.F_WRLCK), (fcntl.LOCK_SH, fcntl.F_RDLCK))

    def lock(name: str, file: Any, operation: int, attempt: Callable[[int], None]) -> None:
        number = file if isinstance(file, int) else file.fileno()
        place, context, scheduler = _place_of(number), _of_this_process(), my_scheduler()
        if scheduler is None or operation & (fcntl.LOCK_UN | fcntl.LOCK_NB):
            attempt(operation)
        else:
            wait_for_file(scheduler, f"fcntl.{name}", number, lambda: attempt(operation | fcntl.LOCK_NB))
        if place is not None and context is not None and not operation & fcntl.LOCK_UN:
            holders[place] = _Holder(context.rank, number)

    def wait_for_file(scheduler: Scheduler, call: str, number: int, attempt: Callable[[], None]) -> None:
        place, held_up_by = _place_of(number), set()
        while True:
            try:
                attempt()
                break
            except BlockingIOError:
                found = holders.get(place) if place is not None else None
            if found is not None and _place_of(found.number) == place:
                held_up_by.add(found.rank)
                asked = f"{call} of a file that rank {found.rank} has locked"  # noqa: F841 - a deadlock's text has it
                scheduler.poll()
            else:  # another process has it: as for `time.sleep`
                scheduler.sleep(_OTHER_PROCESS_S)
                _real_sleep(_OTHER_PROCESS_S)
        for rank in held_up_by:
            scheduler.reach(scheduler.clocks[rank])

    replaced = [(fcntl, "flock", flock_on_rank)]
    if hasattr(fcntl, "F_OFD_SETLK"):  # Linux
        replaced.append((fcntl, "lockf", lockf_on_rank))
    return exchange(replaced)


def _of_this_process() -> Context | None:
    """The calling rank, if it is not a process that a rank has forked off."""
    context: Context | None = current_context()
    return None if context is None or context.scheduler.pid != os.getpid() else context


def _place_of(number: int) -> tuple[int, int] | None:
    """Which file it is that is open under this number."""
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return found.st_dev, found.st_ino


LOCK_PATCHES = (_locks, _timeouts, _compile_lock, _file_locks)


# -- asyncio -----------------------------------------------------------------------------------------------------------
#
# A loop sleeps in a selector, which the scheduler does not see. While a world is alive, the loops that ranks and their
# helper threads make get a selector that gives its turn up, and the virtual clock of their rank.

_GRACE_S, _SLICE_S = 0.05, 0.002  # what comes from outside comes in real time


class _Wakening(Local):
    """A loop is given something to do: by a timer, or by another thread."""

    __slots__ = ()

    def describe(self) -> str:
        """Say what waits."""
        return "an asyncio event loop"


class RankSelector(selectors.DefaultSelector):
    """The selector of a loop that a rank has made.

    Args:
        context: The rank.
    """

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._wakening: tuple[Scheduler, _Wakening] | None = None

    @property
    def now(self) -> float:
        """The rank's virtual clock."""
        return self._context.scheduler.clocks[self._context.rank]

    def wake(self) -> None:
        """Let the loop run on; any thread may ask for that."""
        waits, self._wakening = self._wakening, None
        if waits is not None:
            scheduler, wakening = waits
            scheduler.wake(wakening)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready; if nothing is, others run until something is, or until `timeout` virtual seconds are over.

        Beside the loop's own end of a pipe, through which other threads wake it, there may be files and sockets, of
        which the scheduler learns nothing: they are looked at in real time.
        """
        scheduler = scheduler_of_turn()
        if scheduler is None:
            return super().select(timeout)
        found = super().select(0)
        if found or (timeout is not None and timeout <= 0):
            return found
        is_outside = len(self.get_map()) > 1
        if timeout is None and is_outside:
            while not (found := super().select(_SLICE_S)):
                scheduler.poll()
            return found
        if timeout is None and not scheduler.may_wait():  # for another process: the seed goes on fixing who runs
            return super().select(None)
        if is_outside and (found := super().select(_GRACE_S)):
            return found
        wakening = _Wakening()
        self._wakening = scheduler, wakening
        try:
            scheduler.wait(wakening, None if timeout is None else scheduler.now + timeout)
        finally:
            self._wakening = None
        return super().select(0)


def _event_loops(host: object) -> Callable[[], None]:
    """An event loop that a rank makes waits in virtual time, and lets others run meanwhile."""
    init, write_to_self = BaseSelectorEventLoop.__init__, vars(BaseSelectorEventLoop)["_write_to_self"]
    time = asyncio.BaseEventLoop.time

    def init_on_rank(loop: Any, selector: Any = None) -> None:
        context = current_context()
        if selector is None and context is not None and scheduler_of_turn() is not None:
            selector = RankSelector(context)
        init(loop, selector)

    def write_to_self_on_rank(loop: Any) -> None:
        write_to_self(loop)
        selector = loop._selector
        if isinstance(selector, RankSelector):
            selector.wake()

    def time_on_rank(loop: Any) -> float:
        selector = vars(loop).get("_selector")
        return selector.now if isinstance(selector, RankSelector) else time(loop)

    return exchange(
        [
            (BaseSelectorEventLoop, "__init__", init_on_rank),
            (BaseSelectorEventLoop, "_write_to_self", write_to_self_on_rank),
            (asyncio.BaseEventLoop, "time", time_on_rank),
        ]
    )


EVENT_LOOP_PATCHES = (_event_loops,)
