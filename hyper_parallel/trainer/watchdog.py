"""A run that makes no progress ends by itself, and says which rank is stuck, and where."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from hyper_parallel.core.dtensor.messages import explain
from hyper_parallel.trainer.stacks import RankReport, all_stacks, report_of, verdict

__all__ = ["STUCK_EXIT", "Watchdog", "default_store"]

STUCK_EXIT = 70
"""Exit code of a process that the watchdog ends (EX_SOFTWARE in sysexits.h)."""

_LONGEST_WAIT_S = 5.0  # between two looks


def default_store() -> Any:
    """Return the store of torch.distributed's default group, over which ranks can talk; None without a group."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


@dataclasses.dataclass(frozen=True)
class _Progress:
    """The last thing that the main thread has told; replaced as a whole, so that no lock is needed."""

    step: int
    beats: int
    at: float
    doing: str
    watched: bool


class Watchdog:
    """Ends a process whose run has made no progress for some time, together with those of the other ranks.

        with Watchdog(300.0, "out/stuck", rank=rank, world_size=world_size, store=default_store()) as watchdog:
            for step in range(steps):
                watchdog.beat(step)
                ...

    A rank that hangs keeps all others waiting in their next collective, so that after a while none makes progress. The
    first to notice raises the alarm; every process writes the stacks of all its threads to folder/rank-3.txt and says
    over the store what it is about; who noticed first prints which rank the others wait for, with its last lines of
    code, also to folder/verdict.txt. Then all processes end with exit code 70. A process whose interpreter cannot run
    any more, as in a C call that does not return and keeps Python's lock, writes its stacks by `faulthandler` and ends,
    somewhat later.

    It watches from the first beat on, by a daemon thread of this process, which costs a message to the store every few
    seconds. Only one in a process, and only where the run is on the main thread: on simulated ranks, which are threads,
    it does nothing, and is not needed, since the simulator reports a deadlock at once.

    Args:
        timeout_s: longest time between two beats, in seconds: more than the longest step, with compilation.
        folder: for the stacks; made at the start. Reachable for people, not necessarily for other ranks.
        rank: of this process.
        world_size: number of ranks.
        store: a `torch.distributed.Store` of all ranks, such as `default_store()`; None: each process is on its own.
        grace_s: how long to wait for other ranks' answers, in seconds.
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
        on_stuck: Callable[[str], None] | None = None,
    ) -> None:
        if not timeout_s > 0:
            blame, seen = "timeout_s is not above 0", f"timeout_s: {timeout_s}"
            raise ValueError(explain("cannot watch the run", blame, seen, "timeout_s=300.0, or no watchdog"))
        self.timeout_s, self.folder, self.grace_s = timeout_s, Path(folder), grace_s
        self.rank, self.world_size = rank, world_size
        self._store = store if world_size > 1 else None
        self._on_stuck = on_stuck or _end_process
        self._progress = _Progress(0, 0, 0.0, "", watched=False)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._file: Any = None

    # -- the main thread's side

    def start(self) -> Watchdog:
        """Start watching with the next beat; on a thread that is not the process's main one, do nothing."""
        if self._thread is not None or threading.current_thread() is not threading.main_thread():
            return self
        if self._store is not None:
            # A connection of its own: the main thread may be waiting in the other one.
            own = self._store.clone() if hasattr(self._store, "clone") else self._store
            self._store = dist.PrefixStore("hyper_parallel.watchdog", own)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = open(self._path, "w", encoding="utf-8")  # noqa: SIM115  closed by stop
        self._arm()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def beat(self, step: int, doing: str = "") -> None:
        """Tell that the run makes progress; takes a microsecond.

        Args:
            step: the step that begins, or goes on.
            doing: what is about to be done, for the message.
        """
        self._progress = _Progress(step, self._progress.beats + 1, time.monotonic(), doing, watched=True)

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

    def stop(self) -> None:
        """Stop watching, and remove the empty file of stacks."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._over.set()
        thread.join(self.grace_s)
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        if self._path.exists() and self._path.stat().st_size == 0:
            self._path.unlink()

    def __enter__(self) -> Watchdog:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _path(self) -> Path:
        return self.folder / f"rank-{self.rank}.txt"

    # -- the watchdog's thread

    def _watch(self) -> None:
        pause = min(max(self.timeout_s / 4, 0.01), _LONGEST_WAIT_S)
        while not self._over.wait(pause):
            self._arm()
            if self._is_late() or self._alarm_is_raised():
                self._raise_alarm()
                return

    def _arm(self) -> None:
        """If this thread does not get to run again, or is caught in a call to the store, let C code end the process."""
        faulthandler.dump_traceback_later(self.timeout_s + 4 * self.grace_s, exit=True, file=self._file)

    def _is_late(self) -> bool:
        progress = self._progress
        return progress.watched and time.monotonic() - progress.at > self.timeout_s

    def _alarm_is_raised(self) -> bool:
        try:
            return self._store is not None and bool(self._store.check(["alarm"]))
        except Exception:  # who held the store is gone; if that was no success, the others stop to make progress
            self._store = None
            return False

    def _raise_alarm(self) -> None:
        now = self._progress
        report = report_of(self.rank, now.step, now.beats, time.monotonic() - now.at, now.doing)
        self._file.write(all_stacks())
        self._file.flush()
        text = verdict([report], 1, self.folder)
        try:
            text = self._agree(self._store, report) if self._store is not None else text
        except Exception as error:  # the store is gone: tell at least about this rank
            text = f"rank {self.rank}: {text}\n  the other ranks could not be asked: {error}"
        self._on_stuck(text)

    def _agree(self, store: Any, report: RankReport) -> str:
        """Tell the others, and return the message: for who was first, all that is known."""
        is_first = store.add("alarm", 1) == 1
        store.set(f"report/{self.rank}", json.dumps(dataclasses.asdict(report)))
        if is_first:
            names = [f"report/{rank}" for rank in range(self.world_size)]
            self._wait(lambda: bool(store.check(names)))
            found = [name for name in names if store.check([name])]
            reports = [_read(store.get(name)) for name in found]
            text = verdict(reports, self.world_size, self.folder)
            (self.folder / "verdict.txt").write_text(text + "\n", encoding="utf-8")
            store.set("readers", str(len(found)))
            store.set("verdict", text)
        else:
            self._wait(lambda: bool(store.check(["verdict"])), 2)
            said = store.get("verdict").decode().splitlines()[0] if store.check(["verdict"]) else "a rank is stuck"
            text = f"rank {self.rank} ends: {said}"
        self._leave(store)
        return text

    def _leave(self, store: Any) -> None:
        """Let all have read before the process ends that holds the store, which is rank 0's, or none of the ranks'."""
        store.add("left", 1)
        if self.rank == 0 and store.check(["readers"]):
            readers = int(store.get("readers"))
            self._wait(lambda: store.add("left", 0) >= readers)

    def _wait(self, is_done: Callable[[], bool], times: int = 1) -> None:
        """Wait until something holds, but no longer than the grace time."""
        end = time.monotonic() + times * self.grace_s
        while not is_done() and time.monotonic() < end:
            self._over.wait(0.05)


def _read(told: bytes) -> RankReport:
    fields = json.loads(told)
    return RankReport(**{**fields, "lines": tuple(fields["lines"])})


def _end_process(text: str) -> None:
    # The main thread is stuck: an exception would not reach it, and neither would exit handlers end.
    print(f"watchdog: {text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(STUCK_EXIT)
