"""The end of a run that cannot go on: which rank is stuck, and where, or which one is lost."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import math
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from hyper_parallel.core.common.errors import explain
from hyper_parallel.trainer.stacks import RankReport, all_stacks, line_of, lost_ranks, report_of, verdict
from hyper_parallel.trainer.stop import StopRequest

__all__ = ["STUCK_EXIT", "RankLostError", "Watchdog", "default_store"]

T = TypeVar("T")

STUCK_EXIT = 70
"""Exit code of a process that the watchdog ends (EX_SOFTWARE in sysexits.h)."""

_LOOK_S = 1.0  # longest time between two looks
_ANSWER_S = 4.0  # how long to wait for ranks that only have to look
_STOP_S = 5.0  # how long a step may take, at least, once the run is asked to stop
_MAY_TAKE_LONG = ("saving", "validating")  # far longer than a step, and it was not said how long
_CONNECTION = re.compile(r"gloo|NCCL|HCCL|Connection (closed|refused|reset)|Broken pipe|[Ss]ocket")


class RankLostError(RuntimeError):
    """A rank could not communicate, because other ranks have failed or do not answer; says which."""


def default_store() -> Any:
    """Return the store of torch.distributed's default group, over which ranks can talk; None without a group."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


@dataclasses.dataclass(frozen=True)
class _Progress:
    """The last thing that the main thread has told; replaced as a whole, so that no lock is needed."""

    step: int = 0
    beats: int = 0
    at: float = 0.0
    doing: str = ""
    watched: bool = False
    longest: float = 0.0  # time between two beats so far, but for what may take long


class Watchdog:
    """Ends a process whose run has made no progress for some time, together with those of the other ranks.

        with Watchdog(300.0, "out/stuck", rank=rank, world_size=world_size, store=default_store()) as watchdog:
            for step in range(steps):
                watchdog.beat(step)
                ...

    A rank that hangs keeps all others waiting in their next collective, so that after a while none makes progress. Who
    notices says so at once, and raises the alarm; every process writes the stacks of all its threads to
    folder/rank-3.txt and says over the store what it is about; who noticed first prints which rank the others wait for,
    with its last lines of code, also to folder/verdict.txt. Then all processes end with exit code 70, those that get no
    answer from the store as well. A process whose interpreter cannot run any more, as in a C call that does not return
    and keeps Python's lock, writes its stacks to stderr by `faulthandler` and ends, somewhat later.

    Once the run is asked to stop, a rank that waits for one that has died ends after a few seconds, in place of waiting
    to be killed: when a step takes more than 5 s and more than three times the longest one before.

    It watches from the first beat on, by daemon threads of this process, which cost a message to the store every
    second. Only one in a process, and only where the run is on the main thread: on simulated ranks, which are threads,
    it does nothing, and is not needed, since the simulator reports a deadlock at once.

    Args:
        timeout_s: longest time between two beats, in seconds: more than the longest step, with compilation, and more
            than a load or save; `math.inf`: any.
        folder: for the stacks; made when there are some. Reachable for people, not necessarily for other ranks.
        rank: of this process.
        world_size: number of ranks.
        store: a `torch.distributed.Store` of all ranks, such as `default_store()`; None: each process is on its own,
            until it is connected.
        grace_s: how long to wait for other ranks' answers, in seconds.
        stop: asks the run to stop.
        on_stuck: called on the watchdog's thread with the message, in place of printing it and ending the process.

    Raises:
        ValueError: a timeout that is not above 0.
    """

    def __init__(
        self,
        timeout_s: float,
        folder: str | Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        store: Any = None,
        grace_s: float = 10.0,
        stop: StopRequest | None = None,
        on_stuck: Callable[[str], None] | None = None,
    ) -> None:
        if not timeout_s > 0:
            blame, seen = "timeout_s is not above 0", f"timeout_s: {timeout_s}"
            raise ValueError(explain("cannot watch the run", blame, seen, "timeout_s=300.0, or no watchdog"))
        self.timeout_s, self.folder, self.grace_s = timeout_s, Path(folder), grace_s
        self.rank, self.world_size = rank, world_size
        self._first_store = store
        self._store: Any = None
        self._stop, self._asked_at = stop, math.inf
        self._on_stuck = on_stuck or _end_process
        self._progress = _Progress()
        self._failed = ""
        self._over, self._alarmed = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    # -- the main thread's side

    def start(self) -> Watchdog:
        """Start watching with the next beat; on a thread that is not the process's main one, do nothing."""
        needed = self.world_size > 1 or self.timeout_s < math.inf
        if needed and not self._threads and threading.current_thread() is threading.main_thread():
            self._arm()
            self._run("watchdog", self._watch)
            self.connect(self._first_store)
        return self

    def connect(self, store: Any) -> None:
        """Let the watchdogs of all ranks talk over a store from now on; all ranks do so.

        Args:
            store: see `Watchdog`.
        """
        if self._threads and store is not None and self.world_size > 1:
            # A connection of its own: the main thread may be waiting in the other one.
            own = store.clone() if hasattr(store, "clone") else store
            self._store = dist.PrefixStore("hyper_parallel.watchdog", own)
            self._run("watchdog's messenger", self._answer)

    def beat(self, step: int, doing: str = "") -> None:
        """Tell that the run makes progress; takes a microsecond.

        Args:
            step: the step that begins, or goes on.
            doing: what is about to be done, for the message; "saving" and "validating" may take long.
        """
        before, now = self._progress, time.monotonic()
        is_step = before.watched and before.doing not in _MAY_TAKE_LONG
        longest = max(before.longest, now - before.at) if is_step else before.longest
        self._progress = _Progress(step, before.beats + 1, now, doing, watched=True, longest=longest)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not watch during the block, for what may take any time; the other ranks must pause there, too."""
        before = self._progress
        self._progress = dataclasses.replace(before, watched=False)
        try:
            yield
        finally:
            if before.watched:
                self.beat(before.step, before.doing)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks of an error of the block; if it is that others are lost, raise which.

        Raises:
            RankLostError: this rank could not communicate, and other ranks have failed or do not answer.
        """
        try:
            yield
        except BaseException as error:
            if not _is_of_a_connection(error):
                self._tell(error)
                raise
            lost = self._lost()
            if not lost:
                raise
            raise RankLostError(f"cannot go on in step {self._progress.step}: {lost}") from error

    def stop(self) -> None:
        """Stop watching."""
        threads, self._threads = self._threads, []
        if threads:
            self._over.set()
            for thread in threads:
                thread.join(self.grace_s)
            faulthandler.cancel_dump_traceback_later()

    def __enter__(self) -> Watchdog:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self, name: str, target: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=target, name=name, daemon=True))
        self._threads[-1].start()

    def _tell(self, error: BaseException) -> None:
        """Let the others know why this rank ends."""
        self._failed = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if (store := self._store) is not None:
            with suppress(Exception):
                self._within(_ANSWER_S, lambda: store.set(f"report/{self.rank}", self._report_text()))

    def _lost(self) -> str:
        """Say which ranks have failed or do not answer; "" if all are well, or nobody can be asked."""
        if self._store is None:
            return ""
        try:
            return self._agree("lost", _ANSWER_S, lambda reports: lost_ranks(reports, self.world_size))
        except Exception as error:
            return str(error)

    # -- the watchdog's threads

    def _watch(self) -> None:
        pause = min(max(self.timeout_s / 4, 0.01), _LOOK_S)
        while not self._over.wait(pause):
            self._arm()
            if self._is_late() or self._alarmed.is_set():
                self._raise_alarm()
                return
            if self._is_late_to_stop():
                self._on_stuck(self._why_not_stopped())
                return

    def _answer(self) -> None:
        """Answer when another rank asks, and hear of an alarm. Who held the store may be gone: then nobody asks."""
        asked = False
        with suppress(Exception):
            while not self._over.wait(_LOOK_S) and not self._alarmed.is_set():
                if not asked and self._store.check(["question"]):
                    asked = True
                    self._store.set(f"report/{self.rank}", self._report_text())
                if asked and self._store.check(["alarm"]):
                    self._alarmed.set()

    def _arm(self) -> None:
        """If the watchdog's thread does not get to run again, let C code end the process."""
        if self.timeout_s < math.inf:
            faulthandler.dump_traceback_later(self.timeout_s + 8 * self.grace_s, exit=True, file=2)

    def _is_late(self) -> bool:
        progress = self._progress
        return progress.watched and time.monotonic() - progress.at > self.timeout_s

    def _is_late_to_stop(self) -> bool:
        if self._stop is None or not self._stop.requested() or self.world_size == 1:
            return False
        self._asked_at, progress = min(self._asked_at, time.monotonic()), self._progress
        if not progress.watched or progress.doing in _MAY_TAKE_LONG:
            return False
        return time.monotonic() - max(self._asked_at, progress.at) > max(_STOP_S, 3 * progress.longest)

    def _why_not_stopped(self) -> str:
        assert self._stop is not None, "it was asked to"
        seconds = time.monotonic() - self._progress.at
        return (
            f"rank {self.rank} ends: {self._stop.reason} asks it to stop, and it makes no progress in step "
            f"{self._progress.step} for {seconds:.0f} s: another rank is gone, or stuck"
        )

    def _report(self) -> RankReport:
        now = self._progress
        return report_of(self.rank, now.step, now.beats, time.monotonic() - now.at, now.doing, self._failed)

    def _report_text(self) -> str:
        return json.dumps(dataclasses.asdict(self._report()))

    def _raise_alarm(self) -> None:
        report = self._report()
        text = verdict([report], 1, self.folder)
        if self._store is not None and not self._alarmed.is_set():  # told first: what follows may take its time
            _say(f"no progress of {line_of(report)}; asking the other ranks")
        self._write(f"rank-{self.rank}.txt", all_stacks())
        if self._store is not None:
            try:
                text = self._agree("alarm", self.grace_s, self._verdict)
            except Exception as error:
                text = f"rank {self.rank}: {text}\n  the other ranks could not be asked: {error}"
        self._on_stuck(text)

    def _verdict(self, reports: list[RankReport]) -> str:
        text = verdict(reports, self.world_size, self.folder)
        self._write("verdict.txt", text + "\n")
        return text

    def _write(self, name: str, text: str) -> None:
        def write() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text, encoding="utf-8")

        with suppress(OSError, queue.Empty):  # a disk that is full or does not answer: the process ends all the same
            self._within(self.grace_s, write)

    # -- what ranks tell each other

    def _agree(self, about: str, seconds: float, judge: Callable[[list[RankReport]], str]) -> str:
        """Ask the others, and return what the first one to ask makes of their answers.

        Args:
            about: "alarm", which ends all, or "lost".
            seconds: to wait for their answers.
            judge: makes a text of those that have come.

        Raises:
            TimeoutError: the store does not answer.
        """
        store = self._store
        try:
            self._within(seconds, lambda: store.check([about]))
            return self._within(4 * seconds, lambda: self._ask(store, about, seconds, judge))
        except Exception as error:
            by = "torchrun" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
            raise TimeoutError(f"{by} does not answer, which holds the ranks' store") from error

    def _ask(self, store: Any, about: str, seconds: float, judge: Callable[[list[RankReport]], str]) -> str:
        store.set(f"report/{self.rank}", self._report_text())
        is_first = store.add(about, 1) == 1
        store.set("question", "")
        if is_first:
            names = [f"report/{rank}" for rank in range(self.world_size)]
            self._wait(lambda: bool(store.check(names)), seconds)
            found = [name for name in names if store.check([name])]
            reports = [_read(store.get(name)) for name in found]
            text = judge(reports)
            # All hear of an alarm; of a lost rank, those that have asked, too.
            readers = sum(not report.failed for report in reports) if about == "alarm" else store.add(about, 0)
            store.set(f"{about}/readers", str(readers))
            store.set(f"{about}/text", text)
        else:
            self._wait(lambda: bool(store.check([f"{about}/text"])), 2 * seconds)
            text = store.get(f"{about}/text").decode() if store.check([f"{about}/text"]) else "a rank is gone, or stuck"
            if about == "alarm":  # one rank tells it all
                text = f"rank {self.rank} ends: {text.splitlines()[0]}"
        self._leave(store, about, seconds)
        return text

    def _leave(self, store: Any, about: str, seconds: float) -> None:
        """Let all have read before the process ends that holds the store, which is rank 0's, or none of the ranks'."""
        store.add(f"{about}/left", 1)
        if self.rank == 0 and store.check([f"{about}/readers"]):
            readers = int(store.get(f"{about}/readers"))
            self._wait(lambda: store.add(f"{about}/left", 0) >= readers, seconds)

    def _wait(self, is_done: Callable[[], bool], seconds: float) -> None:
        """Wait until something holds, but no longer than so many seconds."""
        end = time.monotonic() + seconds
        while not is_done() and time.monotonic() < end:
            self._over.wait(0.05)

    def _within(self, seconds: float, call: Callable[[], T]) -> T:
        """Return what a call returns, or raise what it raises; raise `queue.Empty` if it takes too long."""
        told: queue.Queue[tuple[T | None, Exception | None]] = queue.Queue()

        def run() -> None:
            try:
                told.put((call(), None))
            except Exception as error:
                told.put((None, error))

        threading.Thread(target=run, name="watchdog's question", daemon=True).start()
        value, error = told.get(timeout=seconds)
        if error is not None:
            raise error
        return value  # type: ignore[return-value]


def _is_of_a_connection(error: BaseException) -> bool:
    """Tell whether an error is of the communication between ranks; gloo's are no more than RuntimeErrors."""
    if isinstance(error, getattr(dist, "DistError", ())):
        return True
    return isinstance(error, RuntimeError) and _CONNECTION.search(str(error)) is not None


def _read(told: bytes) -> RankReport:
    fields = json.loads(told)
    return RankReport(**{**fields, "lines": tuple(fields["lines"])})


def _say(text: str) -> None:
    print(f"watchdog: {text}", file=sys.stderr, flush=True)


def _end_process(text: str) -> None:
    # The main thread is stuck: an exception would not reach it, and neither would exit handlers end.
    _say(text)
    sys.stdout.flush()
    os._exit(STUCK_EXIT)
