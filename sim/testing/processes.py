"""Processes that run one body each time, forked from a process in which torch is loaded.

A body gets fresh processes: nothing that another body left behind can reach it. They are cheap because the process that
they are forked from, one for each pytest process, has already imported what bodies import (`_PRELOAD`).

Each process watches itself (`_Watch`) and reports when it stands still in a communication. As soon as all that have not
ended do so, none of them can go on, and the test fails with what each of them waits for.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import linecache
import multiprocessing
import os
import pickle
import re
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.platform import get_platform
from sim.explain.callables import check_result
from sim.explain.errors import ranks_phrase
from sim.explain.lines import belongs_to_a_library, user_line
from sim.kernel.threads import collector_paused
from sim.testing.rank_test import RankTest

DEVICE_TYPES = {"gloo": "cpu", "gpu": "cuda", "npu": "npu"}
_LIMIT_S = 300.0  # for a body; one that neither ends nor stands still has no other end
_TIMEOUT = datetime.timedelta(seconds=200)  # of one communication: virtual machines stand still for a minute at times
_PRELOAD = [  # the second half is what torch imports late: 0.7 s per process where an optimizer or FSDP2 is first used
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "hyper_parallel",
    "sim.testing.processes",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.utils.checkpoint",
    "hyper_parallel.trainer.trainer",  # and with it the whole library: 0.1 to 0.3 s per process, else
]
_COMMUNICATES = ("torch/distributed/", "hyper_parallel/core/")
_REPORTS = 3  # after which a rank is believed to stand still
_GRACE_S = 5.0  # for ranks that wait for one that has failed


@dataclass
class _Job:
    """What one process needs to run its rank of a body."""

    backend: str
    module: str
    test: str
    rank: int
    world_size: int
    seed: int
    folder: str
    fixtures: dict[str, Any]
    path: list[str] = field(default_factory=lambda: list(sys.path))
    working_directory: str = field(default_factory=os.getcwd)

    def output(self) -> Path:
        """Return the file of all that the process prints."""
        return Path(self.folder, f"rank-{self.rank}.txt")


@dataclass
class _Rank:
    """A started process, as its parent knows it.

    Attributes:
        outcome: "" when the body passed, its traceback, or None while there is no answer.
        waits: what it reports to wait for while it stands still in a communication, else None.
        reports: how often in a row it has reported that, since another rank has ended.
        cpu_s: CPU time that it has used.
        printed: what it has printed.
    """

    job: _Job
    process: Any
    pipe: Connection
    outcome: str | None = None
    waits: str | None = None
    reports: int = 0
    cpu_s: float = 0.0
    printed: str = ""

    def read(self) -> bool:
        """Take what the process has sent; return whether that was its last message."""
        try:
            kind, value = self.pipe.recv()
        except EOFError:
            self.outcome = _NO_ANSWER
            return True
        if kind == "waits":
            self.waits, self.reports = value, self.reports + 1 if value else 0
            return False
        self.outcome, self.cpu_s = value
        return True


def run_processes(
    backend: str,
    test: Callable[..., Any],
    world_size: int,
    seed: int,
    fixtures: dict[str, Any],
    request: pytest.FixtureRequest,
) -> None:
    """Run the body of `test` on `world_size` fresh processes, and raise what went wrong on any rank."""
    __tracebackhide__ = True
    ranks = _run(backend, test, world_size, seed, fixtures)
    request.node.user_properties.append(("ranks_cpu_s", sum(rank.cpu_s for rank in ranks)))
    for rank in ranks:
        if rank.printed:
            print(f"--- rank {rank.job.rank} printed ---\n{rank.printed}", file=sys.stderr)
    _raise_outcomes(ranks, world_size, request.node.nodeid, simulated="sim" in getattr(test, "rank_backends", ()))


def _run(backend: str, test: Callable[..., Any], world_size: int, seed: int, fixtures: dict[str, Any]) -> list[_Rank]:
    """Run the body once; return its ranks, all of which have ended."""
    __tracebackhide__ = True
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks: list[_Rank] = []
        for rank in range(world_size):
            ours, theirs = start.Pipe(duplex=False)
            job = _Job(backend, test.__module__, test.__qualname__, rank, world_size, seed, folder, fixtures)
            process = start.Process(target=_process_main, args=(job, theirs), daemon=True)
            try:
                process.start()
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                for started in ranks:
                    started.process.kill()
                pytest.fail(
                    f"the arguments of {test.__qualname__} cannot be sent to other processes: {error}\n"
                    f"  fixtures: {', '.join(fixtures)}\n  try: backends=('sim',), or make the object in the body",
                    pytrace=False,
                )
            theirs.close()
            ranks.append(_Rank(job, process, ours))
        _collect(ranks)
        failed = any(ended.outcome != "" for ended in ranks)
        for ended in ranks:
            if ended.process.is_alive() and failed:
                ended.process.kill()
            ended.process.join()
            if ended.outcome == _NO_ANSWER:
                ended.outcome = f"{_NO_ANSWER} ({_how_it_ended(ended.process.exitcode)})\n"
            with contextlib.suppress(OSError):
                ended.printed = ended.job.output().read_text(errors="replace")
    return ranks


def _collect(ranks: Iterable[_Rank]) -> None:
    """Read what the processes send, until all have ended, none of them can go on, or their time is up."""
    running = {rank.pipe: rank for rank in ranks}
    end = time.monotonic() + _LIMIT_S
    while running and time.monotonic() < end:
        for pipe in wait(list(running), timeout=max(0.0, end - time.monotonic())):
            assert isinstance(pipe, Connection)
            rank = running[pipe]
            if rank.read():
                del running[pipe]
                for other in running.values():
                    other.reports = 0  # this one may have been what it waited for
                if rank.outcome:  # the others may now wait for this rank for ever
                    end = min(end, time.monotonic() + _GRACE_S)
        if running and all(rank.reports >= _REPORTS for rank in running.values()):
            return


def _raise_outcomes(ranks: list[_Rank], world_size: int, name: str, *, simulated: bool) -> None:
    __tracebackhide__ = True
    outcomes = {rank.job.rank: rank.outcome for rank in ranks}
    left = {r: o for r, o in outcomes.items() if o is not None and o.startswith((_SKIPPED, _XFAILED))}
    if len(left) == world_size:
        end_as_all_have(left, world_size)
    failed = [(rank, text) for rank, text in outcomes.items() if text]
    # A rank that passed and then missed another one has nothing to say if that one says why it failed.
    failed = [(r, text) for r, text in failed if not text.startswith(_MISSED)] or failed
    silent = [rank for rank in ranks if rank.outcome is None]
    if not failed and not silent:
        return
    if not failed and all(rank.waits for rank in silent):
        pytest.fail(stuck_message({rank.job.rank: str(rank.waits) for rank in silent}, name, simulated), pytrace=False)
    causes = [(rank, text) for rank, text in failed if not _has_lost_a_peer(text)]
    if causes:  # the others only say that these are gone
        late = [(rank, f"{text.strip().splitlines()[-1]}\n") for rank, text in failed if _has_lost_a_peer(text)]
        failed = late + causes
    parts = [f"--- rank {rank} ---\n{text}" for rank, text in failed]
    if silent:
        parts.append(f"--- {ranks_phrase(rank.job.rank for rank in silent)} ---\nno answer; stopped")
        parts += [f"rank {rank.job.rank} waits in {rank.waits}" for rank in silent if rank.waits]
    pytest.fail("\n".join(parts), pytrace=False)


def stuck_message(waits: dict[int, str], name: str, simulated: bool) -> str:
    """Return the message for ranks that all wait for each other.

    Args:
        waits: what each rank that has not ended waits in.
        name: the pytest id of the test.
        simulated: whether the body also runs on simulated ranks.
    """
    rows = "".join(f"\n  rank {rank}: {where}" for rank, where in sorted(waits.items()))
    test = re.sub(r"\[[^-\]]*", "[sim", name)
    advice = f"\n  try: pytest '{test}': simulated ranks name the operations that differ at once" if simulated else ""
    who = ranks_phrase(waits)
    return f"cannot go on: {who} wait in communication, and no other rank is left to join them{rows}{advice}"


_SKIPPED = "skipped: "
_XFAILED = "xfailed: "
_MISSED = "passed, but could not leave together with the others:\n"
_NO_ANSWER = "the process ended without an answer"
_GONE = ("Connection reset by peer", "Connection closed by peer", "Broken pipe", "Connection refused")


def outcome_of(end: BaseException) -> str:
    """Return the text that stands for a body that has skipped or failed as expected."""
    return f"{_XFAILED if isinstance(end, pytest.xfail.Exception) else _SKIPPED}{end}"


def who_left(left: dict[int, str], world_size: int) -> str:
    """Return which of the ranks have skipped or failed as expected."""
    return f"only {ranks_phrase(left)} of {world_size} {left[min(left)]}"


def end_as_all_have(left: dict[int, str], world_size: int) -> None:
    """Skip a test, or let it fail as expected, if all of its ranks have; `left` has the outcome of those that did."""
    __tracebackhide__ = True
    if not left:
        return
    if len(left) < world_size:
        pytest.fail(who_left(left, world_size), pytrace=False)
    failed = [outcome for _, outcome in sorted(left.items()) if outcome.startswith(_XFAILED)]
    if failed:
        pytest.xfail(failed[0].removeprefix(_XFAILED))
    pytest.skip(left[0].removeprefix(_SKIPPED))


def _has_lost_a_peer(text: str) -> bool:
    """Tell whether a traceback's last line is about another process that is gone."""
    return any(words in text.strip().splitlines()[-1] for words in _GONE)


def _how_it_ended(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return name + (": perhaps out of memory" if name == "SIGKILL" else "")


# -- in the process of a rank ----------------------------------------------------------------------------------------


class Watch(threading.Thread):
    """A thread that reports when its process stands still in a communication.

    A process that waits for others over gloo uses no CPU time. So one that has used hardly any for some seconds, and
    has been in the same call of torch.distributed all the while, waits for another rank. It goes on waiting for ever
    where that rank does the same.

    Args:
        report: called once a second with the call that it stands still in, and with None once it goes on.
    """

    _BEAT_S = 1.0
    _BEATS = 5  # a virtual machine that stands still gives no beats, so this is not a limit of wall time
    _BUSY_S = 0.05  # CPU time in a beat above which a process works; stores that poll use some 0.02

    def __init__(self, report: Callable[[str | None], None]) -> None:
        super().__init__(name="watch of a test body", daemon=True)
        self.stage = ""  # what the process waits in, where that is known without its stack
        self._report = report
        self._ended = threading.Event()

    def end(self) -> None:
        """Report no more."""
        self._ended.set()

    def run(self) -> None:
        """Look once a second, until `end`."""
        beats, used, place = 0, self._used(), (0, 0)
        reported = False
        while not self._ended.wait(self._BEAT_S):
            before = used, place
            used = self._used()
            works = used - before[0] >= self._BUSY_S or _would_run()
            place = (0, 0) if works else _place()
            beats = 0 if works or place != before[1] else beats + 1
            waits = (self.stage or _communication(_frame())) if beats >= self._BEATS else None
            if (waits or reported) and not self._ended.is_set():
                self._report(waits)
                reported = bool(waits)

    def _used(self) -> float:
        return time.process_time() - time.thread_time()


def _would_run() -> bool:
    """Whether another thread of this process computes, or waits for a core: on a machine under load, for seconds.

    Where the system does not say so, false.
    """
    own = threading.get_native_id()
    for task in Path("/proc/self/task").glob("*"):
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # the thread has ended
            continue
        if state == "R" and int(task.name) != own:
            return True
    return False


def _frame() -> FrameType | None:
    """Return where the main thread is; to be released at once, since a frame keeps its function's tensors alive.

    Whoever holds one changes what autograd does: a gradient that somebody else has is copied.
    """
    with collector_paused():
        return sys._current_frames().get(threading.main_thread().ident or 0)


def _place() -> tuple[int, int]:
    frame = _frame()
    return id(frame), frame.f_lasti if frame else 0


def _communication(frame: FrameType | None) -> str | None:
    """Return the call of torch.distributed that a stack is in, and the user's line; None where it is in none."""
    where = user_line(frame)
    names = []
    while frame is not None and belongs_to_a_library(frame.f_code.co_filename):
        if any(part in frame.f_code.co_filename for part in _COMMUNICATES):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    names = [name for name in names if name != "wrapper"]  # of c10d_logger.py, around every public function
    if not names and frame is not None and ".wait(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        names = ["wait"]  # of a handle: a call into C++ has no frame
    return f"{names[-1]}, {where}" if names else None


def _process_main(job: _Job, answer: Connection) -> None:
    gc.freeze()  # what is imported lives until the end: a collection that walks over it copies all of its memory
    with open(job.output(), "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ["LIBC_FATAL_STDERR_"] = "1"  # glibc says to stderr, not to a terminal, why it aborts
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable()  # where each thread was, should the process crash
    sending = threading.Lock()

    def send(kind: str, value: object) -> None:
        with sending:
            answer.send((kind, value))

    watch = Watch(lambda waits: send("waits", waits))
    outcome, missed = "", ""
    try:
        sys.path[:] = job.path
        os.chdir(job.working_directory)
        torch.set_num_threads(1)
        test = getattr(importlib.import_module(job.module), job.test)
        os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank), WORLD_SIZE=str(job.world_size))
        device, library = take_device(job.backend, job.rank)
        watch.start()
        _give_gloo_one_worker()
        store = dist.FileStore(os.path.join(job.folder, "store"), job.world_size)
        dist.init_process_group(library, store=store, rank=job.rank, world_size=job.world_size, timeout=_TIMEOUT)
        # A rank that skips at once must not be gone while another one still connects to it.
        store.set(f"connected/{job.rank}", "yes")
        store.wait([f"connected/{rank}" for rank in range(job.world_size)], _TIMEOUT)
        context = RankTest(job.rank, job.world_size, job.backend, device, job.seed)
        check_result(test.body(context, **job.fixtures), test.body)
        watch.stage, missed = "the end, it has run its body", _MISSED
        dist.barrier()
        dist.destroy_process_group()
    except (pytest.skip.Exception, pytest.xfail.Exception) as end:
        outcome = outcome_of(end)
    except BaseException:
        outcome = missed + traceback.format_exc()
    watch.end()
    try:
        send("end", (outcome, time.process_time()))
        answer.close()
    except (OSError, pickle.PicklingError):
        traceback.print_exc()
    os._exit(1 if outcome else 0)  # a rank whose peers are gone could hang in the backend's own clean-up


def _give_gloo_one_worker() -> None:
    """Let each group of gloo have one worker thread: torch's two race, and crash one process of some thousand.

    Both write the name of the work that they have done, a `std::string`, without a lock (`ProcessGroupGloo::runLoop` of
    torch 2.13, `pgStatus_->lastCompletedWorkName`). Names of more than 15 characters lie on the heap: if two works end
    at once, one thread frees what the other has freed.
    """
    group = dist.ProcessGroupGloo
    made = group.__init__

    def init(self: dist.ProcessGroupGloo, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        options = group._Options()  # type: ignore[attr-defined]
        options._threads, options._timeout, options._devices = 1, timeout, [group.create_default_device()]
        made(self, store, rank, size, options)

    group.__init__ = init  # type: ignore[method-assign]


def take_device(backend: str, local_rank: int) -> tuple[torch.device, str]:
    """Make the device of a rank current; return it and the name of its backend."""
    platform = get_platform(DEVICE_TYPES[backend])
    if backend == "gloo":
        return torch.device("cpu"), "gloo"
    platform.set_device(local_rank)
    return platform.device(local_rank), platform.backend
