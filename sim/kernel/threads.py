"""A pool of threads for ranks: a fresh thread pays 5-25 ms for its first operations in torch, a used one does not.

torch also keeps caches by thread, so a world leases its threads: a rank runs on the same one for the world's life.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sim.explain.errors import SimError

Job = Callable[[], Callable[[], None]]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let memory go when its last reference does, and not when Python's collector happens to run.

    Almost all that an estimate makes lives on, so that the collector would walk over it again and again. And where it
    runs within `sys._current_frames` or `sys._current_exceptions`, and a finalizer starts a thread, CPython before
    3.12.1 waits for a lock that it holds itself.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Worker:
    """One daemon thread that runs one job at a time and sleeps in between.

    Attributes:
        thread: The thread.
        busy: Whether it runs a job now.
        reusable: False once a job has left something behind on the thread, so that it must serve no other world.
    """

    __slots__ = ("_job", "_wake", "busy", "reusable", "thread")

    def __init__(self, number: int) -> None:
        self.busy = False
        self.reusable = True
        self._job: Job | None = None
        self._wake = threading.Lock()
        self._wake.acquire()
        self.thread = threading.Thread(target=self._loop, name=f"sim-worker-{number}", daemon=True)
        self.thread.start()

    def run(self, job: Job) -> None:
        """Start `job`, which must not raise.

        When it returns, the thread counts as idle and then calls what the job returned: whoever that wakes finds
        the thread idle.
        """
        self.busy = True
        _count(1)
        self._job = job
        self._wake.release()

    def stop(self) -> None:
        """End the thread once it has nothing to do."""
        self._wake.release()

    def _loop(self) -> None:
        while True:
            self._wake.acquire()
            job, self._job = self._job, None
            if job is None:
                return
            afterwards = job()
            del job
            self.busy = False
            _count(-1)
            afterwards()
            del afterwards


# The pool belongs to the process: a worker that is not leased belongs to no rank and no world.
_lock = threading.Lock()
_idle: list[Worker] = []
_made = 0
_busy = 0


def _count(change: int) -> None:
    global _busy  # noqa: PLW0603 - a counter of the process, guarded by the lock
    with _lock:
        _busy += change


def lease(count: int) -> list[Worker]:
    """Take `count` threads from the pool, which makes new ones as needed.

    Raises:
        SimError: The system gives no more threads; those that were made stay in the pool.
    """
    global _made  # noqa: PLW0603 - a counter of the process, guarded by the lock
    with _lock:
        keep = max(len(_idle) - count, 0)
        workers = _idle[keep:][::-1]
        del _idle[keep:]
        first = _made
        _made += count - len(workers)
    try:
        for number in range(first, first + count - len(workers)):
            workers.append(Worker(number))
    except (RuntimeError, MemoryError) as error:
        made = len(workers)
        release(workers)
        raise SimError(
            f"cannot start {count} ranks: the system gives {made} threads and no more ({error})\n"
            "  try: fewer ranks, or a higher limit (ulimit -u)"
        ) from error
    return workers


def call_on(workers: list[Worker], fn: Callable[[], None]) -> None:
    """Call `fn`, which must not raise, on each of these idle threads, one after the other."""
    for worker in workers:
        done = threading.Lock()
        done.acquire()

        def job(done: threading.Lock = done) -> Callable[[], None]:
            fn()
            return done.release

        worker.run(job)
        done.acquire()


def release(workers: list[Worker]) -> None:
    """Return leased threads to the pool; one that still runs, or that carries something over, ends instead."""
    kept = [worker for worker in workers if worker.reusable and not worker.busy]
    with _lock:
        _idle.extend(reversed(kept))
    for worker in workers:
        if worker.busy or not worker.reusable:
            worker.stop()


def _start_afresh() -> None:
    """In a process that was forked off: none of the threads came along."""
    global _busy, _lock  # noqa: PLW0603 - the process is new
    _lock = threading.Lock()
    _idle.clear()
    _busy = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)


def busy_threads() -> int:
    """Count the threads that run a rank; 0 when no world runs anything.

    >>> busy_threads()
    0
    """
    with _lock:
        return _busy
