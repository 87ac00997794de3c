"""Patches of Python itself, and of the process: environment, memory, time, random generators, imports, signals ...

Random generators are each rank's own in every world. A world that runs a script also has a `ProcessView` per rank,
which these patches put in place.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import ctypes
import functools
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import _bootstrap
from importlib.machinery import PathFinder
from typing import Any

import numpy as np
import torch.multiprocessing

from sim.explain.errors import SimError
from sim.kernel.clock import sleep
from sim.kernel.context import current_context
from sim.patches.locks import exchange, my_scheduler
from sim.patches.rank import Host, RankContext, Undo
from sim.script.modules import RankFinder, RankLocks
from sim.script.output import SLOTS, ForwardToRank, ProcessView

__all__ = ["PROCESS_PATCHES"]

Replacement = tuple[Any, str, Any]
_sleep_for_real = time.sleep
_OTHER_PROCESS_S = 0.05  # the most that a rank sleeps for real before it asks again what another process has done
_WAIT_FOR_PROCESSES = ("filelock", "subprocess")  # a lock file that another one has; the end of one, with a timeout


def _context() -> RankContext | None:
    context: RankContext | None = current_context()
    return context


def _view() -> ProcessView | None:
    context = _context()
    return None if context is None else context.view


# -- in every world ----------------------------------------------------------------------------------------------


def _dispatch(original: Callable[..., Any], generator: str, method: str) -> Callable[..., Any]:
    """`original` outside of ranks; on a rank, `method` of its own generator."""

    @functools.wraps(original)
    def draw(*args: Any, **options: Any) -> Any:
        context = _context()
        if context is None:
            return original(*args, **options)
        return getattr(getattr(context.generators, generator), method)(*args, **options)

    return draw


@functools.cache
def _python_draws() -> list[Replacement]:
    shared = getattr(random, "_inst")  # noqa: B009 - unknown to its stubs
    bound = [n for n in dir(random) if getattr(getattr(random, n), "__self__", None) is shared]
    return [(random, name, _dispatch(getattr(random, name), "python", name)) for name in bound]


@functools.cache
def _numpy_draws() -> list[Replacement]:
    shared = np.random.mtrand._rand
    bound = [name for name in np.random.__all__ if getattr(getattr(np.random, name), "__self__", None) is shared]
    methods = {name: name for name in bound} | {"seed": "seed", "ranf": "random_sample", "sample": "random_sample"}
    return [(np.random, name, _dispatch(getattr(np.random, name), "numpy", to)) for name, to in methods.items()]


def _python_random(host: Host) -> Undo:
    """`random.random` and the others draw from the rank's own generator."""
    return exchange(_python_draws())


def _numpy_random(host: Host) -> Undo:
    """`np.random.rand` and the others draw from the rank's own generator."""
    return exchange(_numpy_draws())


def _process_exit(host: Host) -> Undo:
    """`os._exit` would end every rank; a process that a rank has started may call it."""
    original = os._exit

    def refuse_on_ranks(status: int) -> Any:
        context = _context()
        if context is None or os.getpid() != context.scheduler.pid:
            original(status)
        raise SimError(
            f"rank {context.rank} called os._exit({status}), which would end all "
            f"{host.network.world_size} simulated ranks\n"
            "  seen: every rank is a thread of this one process\n"
            "  try: sys.exit(status), which ends the calling rank alone"
        )

    return exchange([(os, "_exit", refuse_on_ranks)])


def _fork(host: Host) -> Undo:
    """A process that a rank has forked off by itself ends with the world; multiprocessing's end with this process."""
    original, forked = os.fork, list[int]()

    def fork() -> int:
        pid = original()
        if (
            pid
            and _context() is not None
            and sys._getframe(1).f_globals.get("__name__") != "multiprocessing.popen_fork"
        ):
            forked.append(pid)
        return pid

    restore = exchange([(os, "fork", fork)])

    def undo() -> None:
        restore()
        for pid in forked:
            with suppress(ChildProcessError):  # somebody has waited for it, and its number may be another's
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    return undo


def _spawn(host: Host) -> Undo:
    """`torch.multiprocessing.spawn` starts ranks of its own, with which simulated ranks cannot communicate."""
    module = sys.modules["torch.multiprocessing.spawn"]
    original = torch.multiprocessing.start_processes

    @functools.wraps(original)
    def start_processes(fn: Any, *args: Any, **options: Any) -> Any:
        context = _context()
        if context is None:
            return original(fn, *args, **options)
        name = getattr(fn, "__name__", "main")
        raise SimError(
            f"rank {context.rank} called torch.multiprocessing.spawn({name}, ...): it starts processes as ranks, but "
            f"the {host.network.world_size} simulated ranks run already\n"
            f"  fn: {name}\n"
            f"  try: under torchrun and in sim, call {name}(int(os.environ['LOCAL_RANK']), ...) instead; or in a "
            f"program of your own: sim.run(lambda: {name}(dist.get_rank(), ...), world_size={host.network.world_size})"
        )

    return exchange(
        [(module, "start_processes", start_processes), (torch.multiprocessing, "start_processes", start_processes)]
    )


def _start_method(host: Host) -> Undo:
    """`set_start_method` may be called by every rank: each would call it once in a process of its own."""
    default: Any = multiprocessing.get_context.__self__  # type: ignore[attr-defined]
    original, before = multiprocessing.set_start_method, default._actual_context

    def set_start_method(method: Any, force: bool = False) -> None:
        context = _context()
        if context is None or context.view is not None or default._actual_context is None:
            original(method, force)
        elif method != default.get_start_method():
            raise RuntimeError(
                f"rank {context.rank} cannot set the start method {method!r}: another rank has set "
                f"{default.get_start_method()!r}\n"
                "  seen: ranks share the process\n  try: the same method on all ranks, or a context of its own: "
                f"multiprocessing.get_context({method!r})"
            )

    if host.contexts[0].view is None:
        default._actual_context = None  # as in a new process
    restore = exchange(
        [
            (multiprocessing, "set_start_method", set_start_method),
            (torch.multiprocessing, "set_start_method", set_start_method),
        ]
    )

    def undo() -> None:
        restore()
        default._actual_context = before

    return undo


def _child_environment(host: Host) -> Undo:
    """A process that a rank starts inherits the rank's environment, as the rank's `os.environ` has it."""
    original: Callable[..., int] = _posixsubprocess.fork_exec
    environment_at = 5  # among the arguments, which have no names

    def fork_exec(*args: Any) -> int:
        context = _context()
        if context is None or args[environment_at] is not None or _is_fork_server(args[0]):
            return original(*args)
        own = [name + b"=" + value for name, value in context.environment.items()]
        return original(*args[:environment_at], own, *args[environment_at + 1 :])

    replacements: list[Replacement] = [(_posixsubprocess, "fork_exec", fork_exec)]
    if hasattr(subprocess, "_fork_exec"):  # Python 3.11 and later
        replacements.append((subprocess, "_fork_exec", fork_exec))
    return exchange(replacements)


def _is_fork_server(command: Sequence[Any]) -> bool:
    """Whether this starts multiprocessing's server, which all ranks share: it must not pass for one of them."""
    return any("multiprocessing.forkserver" in os.fsdecode(word) for word in command)


# -- where a script runs -----------------------------------------------------------------------------------------


def _process_view(host: Host) -> Undo:
    """`__main__`, `sys.argv`, streams and what else a script finds in its process: one copy per rank."""
    if host.contexts[0].view is None:
        return lambda: None
    restore = exchange([(owner, name, getattr(owner, name)) for owner, name in SLOTS])
    main, root, forward = sys.modules["__main__"], logging.root, ForwardToRank()
    root.addHandler(forward)

    def undo() -> None:
        restore()
        root.removeHandler(forward)
        sys.modules["__main__"] = main

    return undo


def _imports(host: Host) -> Undo:
    """What a rank imports of user code and of some packages becomes its own; Python's locks by module name do, too."""
    finder = RankFinder(host.folder)
    for context in host.contexts:
        context.modules.folder = host.folder
    place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
    sys.meta_path.insert(place, finder)
    locks = RankLocks(vars(_bootstrap)["_module_locks"])
    lock: Any = vars(_bootstrap)["_ModuleLock"]
    restore = exchange([(_bootstrap, "_module_locks", locks), (lock, "acquire", _acquire_import(lock.acquire))])
    host.references.begin()

    def undo() -> None:
        host.references.end()
        restore()
        sys.meta_path.remove(finder)

    return undo


def _acquire_import(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Python's wait for another thread's import of the same module, giving up the turn to that thread."""

    def acquire(lock: Any) -> bool:
        scheduler, me = my_scheduler(), threading.get_ident()
        if scheduler is not None and lock.owner not in (None, me):
            others = {thread.ident for thread in (*scheduler.ranks, *scheduler.helpers)}
            while lock.owner != me and lock.owner in others:
                scheduler.poll()
        return original(lock)

    return acquire


def _exit_calls(host: Host) -> Undo:
    """What a script registers with `atexit` runs when its rank ends."""
    register, unregister = atexit.register, atexit.unregister

    def register_on_rank(func: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        view = _view()
        if view is None:
            return register(func, *args, **options)
        view.at_exit.append(partial(func, *args, **options))
        return func

    def unregister_on_rank(func: Callable[..., Any]) -> None:
        view = _view()
        if view is None:
            unregister(func)
        else:
            view.at_exit = [call for call in view.at_exit if getattr(call, "func", None) != func]

    return exchange([(atexit, "register", register_on_rank), (atexit, "unregister", unregister_on_rank)])


def _signals(host: Host) -> Undo:
    """A script may set signal handlers, which Python allows on the main thread only.

    The rank's handler is called for what the rank sends itself. No other signal reaches a rank, and no timer goes off.
    """
    set_handler, get_handler, kill, raise_signal = signal.signal, signal.getsignal, os.kill, signal.raise_signal

    def set_on_rank(number: int, handler: Any) -> Any:
        view = _view()
        if view is None:
            return set_handler(number, handler)
        before = get_on_rank(number)
        view.signals[number] = handler
        return before

    def get_on_rank(number: int) -> Any:
        view = _view()
        return view.signals[number] if view is not None and number in view.signals else get_handler(number)

    def kill_on_rank(process: int, number: int) -> None:
        context = _context()
        if context is None or number == 0 or process != os.getpid() or process != context.scheduler.pid:
            kill(process, number)
        else:
            deliver(context, number, lambda: kill(process, number))

    def raise_on_rank(number: int) -> None:
        context = _context()
        if context is None or os.getpid() != context.scheduler.pid:
            raise_signal(number)
        else:
            deliver(context, number, lambda: raise_signal(number))

    def deliver(context: RankContext, number: int, send: Callable[[], None]) -> None:
        handler = get_on_rank(number)
        if handler == signal.SIG_DFL and number not in _HARMLESS:
            raise SimError(_ends_all_ranks(context, number))
        if context.view is None:
            send()
        elif callable(handler):
            handler(int(number), sys._getframe(2))

    def no_timer(name: str, answer: Any) -> Replacement:
        original = getattr(signal, name)

        @functools.wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            return original(*args, **options) if _view() is None else answer

        return signal, name, call

    return exchange(
        [
            (signal, "signal", set_on_rank),
            (signal, "getsignal", get_on_rank),
            (signal, "raise_signal", raise_on_rank),
            (os, "kill", kill_on_rank),
            no_timer("alarm", 0),
            no_timer("setitimer", (0.0, 0.0)),
            no_timer("set_wakeup_fd", -1),  # by which an event loop hears of signals
        ]
    )


_HARMLESS = (signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH)  # without a handler nothing happens


def _ends_all_ranks(context: RankContext, number: int) -> str:
    name = signal.Signals(number).name
    return (
        f"rank {context.rank} sent itself {name}, which would end all {context.network.world_size} simulated ranks\n"
        "  seen: every rank is a thread of this one process, and the rank has set no handler\n"
        "  try: sys.exit(1), which ends the calling rank alone, or sim.faults.Kill"
    )


class _PerRankEnvironment(MutableMapping[bytes, bytes]):
    """The data behind `os.environ`: the calling rank's copy, or the process's."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.touched: set[bytes] = set()

    def _data(self) -> Any:
        context = current_context()
        return self.real if context is None else context.environment

    def __getitem__(self, key: bytes) -> bytes:
        return self._data()[key]

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self.touched.add(key)
        self._data()[key] = value

    def __delitem__(self, key: bytes) -> None:
        self.touched.add(key)
        del self._data()[key]

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._data()))

    def __len__(self) -> int:
        return len(self._data())


def _environment(host: Host) -> Undo:
    """`os.environ` is the rank's own; what ranks have set does not outlive the world."""
    real = os.environ._data  # type: ignore[attr-defined]
    data = _PerRankEnvironment(real)
    os.environ._data = data  # type: ignore[attr-defined]
    os.environb._data = data  # type: ignore[attr-defined]

    def undo() -> None:
        os.environ._data = real  # type: ignore[attr-defined]
        os.environb._data = real  # type: ignore[attr-defined]
        for key in sorted(data.touched):  # a rank's os.environ also reached the C library's environment
            if key in real:
                os.putenv(key, real[key])
            else:
                os.unsetenv(key)

    return undo


def _allocator(host: Host) -> Undo:
    """glibc keeps freed memory for the next rank instead of giving it back to the system page by page.

    One arena is enough, since one rank runs at a time. glibc cannot tell its former settings, so they stay.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            m_trim_threshold, m_top_pad, m_mmap_threshold, m_arena_max = -1, -2, -3, -8
            mallopt(m_arena_max, 1)
            mallopt(m_mmap_threshold, 32 << 20)
            mallopt(m_trim_threshold, 256 << 20)
            mallopt(m_top_pad, 64 << 20)
    return lambda: None


def _time_sleep(host: Host) -> Undo:
    """`time.sleep` on a rank takes virtual time, and others run meanwhile.

    While it waits for another process it takes real time as well: asking again and again would soon count as being
    stuck.
    """

    def sleep_on_rank(seconds: float) -> None:
        sleep(seconds)
        asked_by = str(sys._getframe(1).f_globals.get("__name__", ""))
        if asked_by.partition(".")[0] in _WAIT_FOR_PROCESSES and current_context() is not None:
            _sleep_for_real(min(seconds, _OTHER_PROCESS_S))

    return exchange([(time, "sleep", sleep_on_rank)])


PROCESS_PATCHES: tuple[Callable[[Host], Undo], ...] = (
    _environment,
    _allocator,
    _time_sleep,
    _python_random,
    _numpy_random,
    _process_exit,
    *([_fork] if hasattr(os, "fork") else []),
    _spawn,
    _start_method,
    _child_environment,
    _process_view,
    _imports,
    _exit_calls,
    _signals,
)


def _stop_ranks_in_child() -> None:
    """In a process that a rank has forked off: it is no rank, and would wait for ever for the others."""
    context = _context()
    if context is not None:
        context.scheduler.fatal = SimError(
            f"a process that rank {context.rank} started used one of the rank's process groups\n"
            f"  seen: process {os.getpid()}, forked off process {context.scheduler.pid}\n"
            "  try: communicate from the rank itself, and let its processes load or compute only"
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_ranks_in_child)
