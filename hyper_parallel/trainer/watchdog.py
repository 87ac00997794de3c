"""The end of a run that cannot go on: which rank is stuck, and where, or which one is lost."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import json
import math
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import FrameSummary
from typing import Any, TypeVar

import torch.distributed as dist

from hyper_parallel.core.common.errors import HyperParallelError, InvalidValue, explain
from hyper_parallel.core.fully_shard.schedule import last_operations
from hyper_parallel.trainer.guards import StopRequest

T = TypeVar("T")

STUCK_EXIT = 70
"""Exit code of a process that the watchdog ends (EX_SOFTWARE in sysexits.h)."""

_LOOK_S = 1.0  # longest time between two looks
_ANSWER_S = 4.0  # how long to wait for ranks that only have to look
_STOP_S = 5.0  # how long a step may take, at least, once the run is asked to stop
_MAY_TAKE_LONG = ("saving", "validating")  # far longer than a step, and it was not said how long
_CONNECTION = re.compile(r"gloo|NCCL|HCCL|Connection (closed|refused|reset)|Broken pipe|[Ss]ocket")


class RankLostError(HyperParallelError, RuntimeError):
    """A rank could not communicate, because other ranks have failed or do not answer; says which."""


def default_store() -> Any:
    """Return the store of torch.distributed's default group, over which ranks can talk; None without a group."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


@dataclasses.dataclass(frozen=True)
class _Progress:
    """The last beat of the main thread; replaced as one object, so that no lock is needed."""

    step: int = 0
    beats: int = 0
    at: float = 0.0
    doing: str = ""
    watched: bool = False
    longest: float = 0.0  # time between two beats so far, but for what may take long


class RunWatchdog:
    """Ends a process whose run has made no progress for some time, together with those of the other ranks.

        with RunWatchdog(300.0, "out/stuck", rank=rank, world_size=world_size, store=default_store()) as watchdog:
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
        recording: returns what `Platform.flight_recording` does, which goes to folder/flight; None: nothing goes there.

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
        recording: Callable[[], bytes | None] | None = None,
    ) -> None:
        if not timeout_s > 0:
            blame, seen = "timeout_s is not above 0", f"timeout_s: {timeout_s}"
            raise InvalidValue("cannot watch the run", blame, seen, "timeout_s=300.0, or no watchdog")
        self.timeout_s, self.folder, self.grace_s = timeout_s, Path(folder), grace_s
        self.rank, self.world_size = rank, world_size
        self._first_store = store
        self._store: Any = None
        self._stop, self._asked_at = stop, math.inf
        self._on_stuck, self._recording = on_stuck or _end_process, recording
        self._progress = _Progress()
        self._failed = ""
        self._over, self._alarmed = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> RunWatchdog:
        """Start watching with the next beat; on a thread that is not the process's main one, do nothing."""
        needed = self.world_size > 1 or self.timeout_s < math.inf
        if needed and threading.current_thread() is threading.main_thread():
            self._arm()
            self._run("watchdog", self._watch)
            self.connect(self._first_store)
        return self

    def __exit__(self, *_: object) -> None:
        threads, self._threads = self._threads, []
        if threads:
            self._over.set()
            for thread in threads:
                thread.join(self.grace_s)
            faulthandler.cancel_dump_traceback_later()

    def connect(self, store: Any) -> None:
        """Let the watchdogs of all ranks talk over a store, see `RunWatchdog`, from now on; all ranks do so."""
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
    def telling(self) -> Iterator[None]:
        """Tell the other ranks of an error of the block; if it is that others are lost, raise which.

        Raises:
            RankLostError: this rank could not communicate, and other ranks have failed or do not answer.
        """
        try:
            yield
        except BaseException as error:
            if not _is_of_a_connection(error):
                self._failed = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                if (store := self._store) is not None:
                    with suppress(Exception):
                        self._within(_ANSWER_S, lambda: self._send_report(store))
                raise
            lost = self._lost()
            if not lost:
                raise
            raise RankLostError(f"cannot go on in step {self._progress.step}: {lost}") from error

    def _run(self, name: str, target: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=target, name=name, daemon=True))
        self._threads[-1].start()

    def _lost(self) -> str:
        """Say which ranks have failed or do not answer; "" if all are well, or nobody can be asked."""
        if self._store is None:
            return ""
        try:
            return self._agree("lost", _ANSWER_S, lambda reports: _lost_ranks(reports, self.world_size))
        except Exception as error:
            return str(error)

    def _watch(self) -> None:
        pause = min(max(self.timeout_s / 4, 0.01), _LOOK_S)
        while not self._over.wait(pause):
            self._arm()
            if self._is_late() or self._alarmed.is_set():
                self._raise_alarm()
                return
            if why := self._why_not_stopped():
                self._on_stuck(why)
                return

    def _answer(self) -> None:
        """Answer when another rank asks, and hear of an alarm. Who held the store may be gone: then nobody asks."""
        asked = False
        with suppress(Exception):
            while not self._over.wait(_LOOK_S) and not self._alarmed.is_set():
                if not asked and self._store.check(["question"]):
                    asked = True
                    self._send_report(self._store)
                if asked and self._store.check(["alarm"]):
                    self._alarmed.set()

    def _arm(self) -> None:
        """If the watchdog's thread does not get to run again, let C code end the process."""
        seconds = self.timeout_s + 8 * self.grace_s
        if seconds < threading.TIMEOUT_MAX:  # after which its clock begins anew: in hundreds of years
            faulthandler.dump_traceback_later(seconds, exit=True, file=2)

    def _is_late(self) -> bool:
        progress = self._progress
        return progress.watched and time.monotonic() - progress.at > self.timeout_s

    def _why_not_stopped(self) -> str:
        """Say that the run was asked to stop, and takes too long to do so; "" if it does not."""
        if self._stop is None or not self._stop.requested() or self.world_size == 1:
            return ""
        self._asked_at, progress, now = min(self._asked_at, time.monotonic()), self._progress, time.monotonic()
        if not progress.watched or progress.doing in _MAY_TAKE_LONG:
            return ""
        if now - max(self._asked_at, progress.at) <= max(_STOP_S, 3 * progress.longest):
            return ""
        return (
            f"rank {self.rank} ends: {self._stop.reason} asks it to stop, and it makes no progress in step "
            f"{progress.step} for {now - progress.at:.0f} s: another rank is gone, or stuck"
        )

    def _report(self) -> RankReport:
        now = self._progress
        return report_of(self.rank, now.step, now.beats, time.monotonic() - now.at, now.doing, self._failed)

    def _send_report(self, store: Any) -> None:
        store.set(f"report/{self.rank}", json.dumps(dataclasses.asdict(self._report())))

    def _raise_alarm(self) -> None:
        report, stacks = self._report(), all_stacks().encode()
        if self._store is not None and not self._alarmed.is_set():  # said first: what follows may take its time
            _say(f"no progress of {report.line()}; asking the other ranks")
        self._write(f"rank-{self.rank}.txt", lambda: stacks)
        if self._recording is not None:
            self._write(f"flight/rank_{self.rank}", self._recording)
        text = self._verdict([report], 1)
        if self._store is not None:
            try:
                text = self._agree("alarm", self.grace_s, lambda reports: self._verdict(reports, self.world_size))
            except Exception as error:
                text = f"rank {self.rank}: {text}\n  the other ranks could not be asked: {error}"
        self._on_stuck(text)

    def _verdict(self, reports: list[RankReport], world_size: int) -> str:
        text = verdict(reports, world_size, self.folder, has_recordings=(self.folder / "flight").is_dir())
        if world_size > 1:
            self._write("verdict.txt", f"{text}\n".encode)
        return text

    def _write(self, name: str, content: Callable[[], bytes | None]) -> None:
        def write() -> None:
            if (found := content()) is not None:
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / name).write_bytes(found)

        # A disk that is full, or a recorder that does not answer: the process ends all the same.
        with suppress(Exception):
            self._within(self.grace_s, write)

    def _agree(self, about: str, seconds: float, judge: Callable[[list[RankReport]], str]) -> str:
        """Ask the others about an "alarm", which ends all, or who is "lost", and wait `seconds` for their answers.

        Return what the first one to ask makes of them by `judge`. Raise TimeoutError if the store does not answer.
        """
        store = self._store
        try:
            self._within(seconds, lambda: store.check([about]))
            return self._within(4 * seconds, lambda: self._ask(store, about, seconds, judge))
        except Exception as error:
            by = "torchrun" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
            raise TimeoutError(f"{by} does not answer, which holds the ranks' store") from error

    def _ask(self, store: Any, about: str, seconds: float, judge: Callable[[list[RankReport]], str]) -> str:
        self._send_report(store)
        is_first = store.add(about, 1) == 1
        store.set("question", "")
        if is_first:
            names = [f"report/{rank}" for rank in range(self.world_size)]
            self._wait(lambda: bool(store.check(names)), seconds)
            found = [name for name in names if store.check([name])]
            reports = [RankReport(**json.loads(store.get(name))) for name in found]
            text = judge(reports)
            # All hear of an alarm; of a lost rank, those that have asked, too.
            readers = sum(not report.failed for report in reports) if about == "alarm" else store.add(about, 0)
            store.set(f"{about}/readers", str(readers))
            store.set(f"{about}/text", text)
        else:
            self._wait(lambda: bool(store.check([f"{about}/text"])), 2 * seconds)
            text = store.get(f"{about}/text").decode() if store.check([f"{about}/text"]) else "a rank is gone, or stuck"
            if about == "alarm":  # one rank prints it all
                text = f"rank {self.rank} ends: {text.splitlines()[0]}"
        # Let all have read before the process ends that holds the store, which is rank 0's, or none of the ranks'.
        store.add(f"{about}/left", 1)
        if self.rank == 0 and store.check([f"{about}/readers"]):
            readers = int(store.get(f"{about}/readers"))
            self._wait(lambda: store.add(f"{about}/left", 0) >= readers, seconds)
        return text

    def _wait(self, is_done: Callable[[], bool], seconds: float) -> None:
        """Wait until something holds, but no longer than so many seconds."""
        end = time.monotonic() + seconds
        while not is_done() and time.monotonic() < end:
            self._over.wait(0.05)

    def _within(self, seconds: float, call: Callable[[], T]) -> T:
        """Return what a call returns, or raise what it raises; raise `TimeoutError` if it takes too long."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=run, name="watchdog's question", daemon=True).start()
        return answer.result(timeout=seconds)


def _is_of_a_connection(error: BaseException) -> bool:
    """Tell whether an error is of the communication between ranks; gloo's are no more than RuntimeErrors."""
    if isinstance(error, getattr(dist, "DistError", ())):
        return True
    return isinstance(error, RuntimeError) and _CONNECTION.search(str(error)) is not None


def _say(text: str) -> None:
    print(f"watchdog: {text}", file=sys.stderr, flush=True)


def _end_process(text: str) -> None:
    # The main thread is stuck: an exception would not reach it, and neither would exit handlers end.
    _say(text)
    sys.stdout.flush()
    os._exit(STUCK_EXIT)


_LINES = 6  # of a stack in a verdict; the files have all
_ROWS = 16
_PASSED_OVER = ("torch/_ops.py", "torch/utils/_contextlib.py")  # they stand around calls into C++
_COMMUNICATES = ("torch/distributed/", "hyper_parallel/core/")


@dataclasses.dataclass(frozen=True)
class RankReport:
    """What a rank says of itself when a run is stuck.

    Args:
        rank, step: who, and the step that it is in.
        beats, seconds: how often it has reported progress, and the time since then.
        doing: what it was about.
        waits_in: the call in which it waits for other ranks, "" where it does not.
        lines: the innermost calls of its main thread, the last one last.
        failed: the error with which it ends, "" where there is none.
        units: what it has last gathered or reduced of `fully_shard`'s units, over each group.
    """

    rank: int
    step: int
    beats: int
    seconds: float
    doing: str
    waits_in: str
    lines: Sequence[str]
    failed: str = ""
    units: Sequence[str] = ()

    def line(self) -> str:
        """Say on one line where the rank is.

        >>> RankReport(3, 7, 8, 30.0, "training", "", ("train.py:5 in forward",)).line()
        'rank 3, step 7 (training), 30 s, in no communication'
        """
        about = f" ({self.doing})" if self.doing else ""
        head = f"rank {self.rank}, step {self.step}{about}, {self.seconds:.0f} s"
        if self.failed:
            return f"{head}, failed: {self.failed}"
        if not self.waits_in:
            return f"{head}, in no communication"
        return ", last ".join((f"{head}, waits in {self.waits_in}", *self.units))


def _frames() -> dict[int, Any]:
    """Return where each thread is, with the collector off: CPython before 3.12.1 may wait for itself in there."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if enabled:
            gc.enable()


def all_stacks() -> str:
    """Return the stacks of all threads of this process, the main thread first, innermost calls last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    for ident, frame in sorted(_frames().items(), key=lambda item: item[0] != main):
        parts.append(f"thread {names.get(ident, 'unknown')!r}\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)


def report_of(rank: int, step: int, beats: int, seconds: float, doing: str, failed: str = "") -> RankReport:
    """Return the report of the calling process, see `RankReport`, with what the stacks of its threads say."""
    stacks = {ident: list(traceback.extract_stack(frame)) for ident, frame in _frames().items()}
    stacks.pop(threading.get_ident(), None)
    main = stacks.pop(threading.main_thread().ident or 0, [])
    waits_in = _waiting(main)
    if not waits_in and main and main[-1].name == "_engine_run_backward":
        # Backward of an accelerator runs on threads of its own, and their hooks communicate.
        waits_in = next(filter(None, map(_waiting, stacks.values())), "")
    lines, units = tuple(map(_line, main[-_LINES:])), tuple(last_operations())
    return RankReport(rank, step, beats, seconds, doing, waits_in, lines, failed, units)


def _waiting(calls: Sequence[FrameSummary]) -> str:
    """Return the innermost call of a stack if it waits for other ranks, as far as Python shows that, else ""."""
    inner = next((call for call in reversed(calls) if not _is_in(call, _PASSED_OVER)), None)
    if inner is None:
        return ""
    # What waits for a device waits for the collectives that are queued there.
    waits = _is_in(inner, _COMMUNICATES) or inner.name == "synchronize" or ".item()" in (inner.line or "")
    return _line(inner) if waits else ""


def _is_in(call: FrameSummary, places: tuple[str, ...]) -> bool:
    path = Path(call.filename).as_posix()
    return any(f"/{place}" in path for place in places)


def _line(call: FrameSummary) -> str:
    parts = Path(call.filename).parts
    short = Path(*parts[parts.index("site-packages") + 1 :]) if "site-packages" in parts else call.filename
    return f"{short}:{call.lineno} in {call.name}"


def verdict(reports: Sequence[RankReport], world_size: int, folder: str | Path, *, has_recordings: bool = False) -> str:
    """Say in four parts which ranks the others wait for.

    >>> waits = RankReport(0, 7, 8, 30.0, "", "torch/distributed/distributed_c10d.py:3029 in all_reduce", ())
    >>> hangs = RankReport(1, 7, 8, 30.0, "", "", ("train.py:5 in forward",))
    >>> print(verdict([waits, hangs], 2, "out/stuck"))
    cannot go on in step 7: rank 1 does not come to where the others wait for it
      rank 1, step 7, 30 s, in no communication:
        train.py:5 in forward
      rank 0, step 7, 30 s, waits in torch/distributed/distributed_c10d.py:3029 in all_reduce
      stacks of all threads: out/stuck/rank-*.txt
      try: out/stuck/rank-1.txt shows what it is about; a longer timeout where a step may take this long

    A rank that has failed is to blame first; then, one that does not answer; then, one in no communication, of those
    that are behind if there are any; then, those that are behind. Stacks are in `folder`, and with `has_recordings` the
    last collectives, too; `reports` are of the ranks that have answered.
    """
    answered = {report.rank: report for report in sorted(reports, key=lambda report: report.rank)}
    silent = [rank for rank in range(world_size) if rank not in answered]
    step = min((report.step for report in reports), default=0)
    failed = [rank for rank, report in answered.items() if report.failed]
    asked, blamed = f"cannot go on in step {step}", failed + silent or _blamed(list(answered.values()))
    who, one = _ranks(blamed), len(blamed) == 1
    rows = [_row(answered[rank]) for rank in blamed if rank in answered]
    rows += [_row(report) for rank, report in answered.items() if rank not in blamed]
    if lost := _lost_ranks(reports, world_size):
        blame = lost
        hint = "look whether the process is alive, and its machine; what a process that is but cannot run has printed"
    elif world_size == 1:
        blame, hint = "it makes no progress", f"{folder}/rank-0.txt; a longer timeout where a step may take this long"
    elif len(blamed) == world_size:
        all_wait = all(report.waits_in for report in reports)
        blame = "all ranks wait, for each other or for a device" if all_wait else "no rank goes on"
        hint = (
            "compare what they wait in: hyper-parallel train --sim runs the same ranks, and names what does not match"
        )
    else:
        blame = f"{who} {'does' if one else 'do'} not come to where the others wait for {'it' if one else 'them'}"
        hint = f"{folder}/rank-{blamed[0]}.txt shows what it is about; a longer timeout where a step may take this long"
    more = [f"and {len(rows) - _ROWS} ranks more"] if len(rows) > _ROWS else []
    more += [f"stacks of all threads: {folder}/rank-*.txt"]
    more += [f"last collectives, for torchfrtrace: {folder}/flight"] * has_recordings
    seen = "\n  ".join([*rows[:_ROWS], *more])
    return explain(asked, blame, seen, hint)


def _lost_ranks(reports: Sequence[RankReport], world_size: int) -> str:
    """Say on one line which ranks have failed, and which do not answer; "" if there are none.

    >>> fails = RankReport(1, 7, 8, 0.1, "", "", (), "ValueError: no such file")
    >>> _lost_ranks([fails, RankReport(2, 7, 8, 9.0, "", "", ())], 4)
    'rank 1 failed: ValueError: no such file; ranks 0, 3 do not answer'
    """
    failed = sorted((report.rank, report.failed) for report in reports if report.failed)
    found = [f"rank {rank} failed: {text}" for rank, text in failed[:1]]
    found += [f"{_ranks([rank for rank, _ in failed[1:]])} failed, too"] if len(failed) > 1 else []
    silent = sorted(set(range(world_size)) - {report.rank for report in reports})
    found += [f"{_ranks(silent)} {'does' if len(silent) == 1 else 'do'} not answer"] if silent else []
    return "; ".join(found)


def _blamed(reports: list[RankReport]) -> list[int]:
    """Return the ranks that the others wait for, all of them where nothing tells them apart."""
    least = min(report.beats for report in reports)
    behind = [report for report in reports if report.beats == least]
    busy = [report for report in behind if not report.waits_in] or [report for report in reports if not report.waits_in]
    return [report.rank for report in busy or behind]


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_ROWS])) + (", ..." if len(ranks) > _ROWS else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _row(report: RankReport) -> str:
    if report.waits_in or report.failed:
        return report.line()
    return "\n    ".join([f"{report.line()}:", *report.lines])
