"""How each arm of a test starts its ranks: threads here, processes over gloo, or devices."""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sim.callables import check_result
from sim.errors import CollectiveMismatch, Deadlock, ranks_phrase
from sim.pytest_plugin import RankTest
from sim.world import world

__all__ = ["run_arm", "run_processes"]

_DEVICE_TYPES = {"gloo": "cpu", "gpu": "cuda", "npu": "npu"}
_LIMIT_S = 300.0  # for a body on real processes; a hang there has no other end
_TIMEOUT = datetime.timedelta(seconds=200)  # of one communication: virtual machines stand still for a minute at times
_PRELOAD = ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "hyper_parallel", "sim.arms"]


def run_arm(
    arm: str,
    test: Callable[..., None],
    world_size: int,
    fixtures: dict[str, Any],
    request: pytest.FixtureRequest,
    owner: object = None,
) -> None:
    """Run the body of ``test`` on ``world_size`` ranks of ``arm``; as a method of ``owner``, if there is one."""
    __tracebackhide__ = True
    seed = request.config.getoption("--sim-seed")
    body: Callable[..., Any] = test.body  # type: ignore[attr-defined]
    if owner is not None:
        body = MethodType(body, owner)
    if arm == "sim":
        races, replicas = test.checks  # type: ignore[attr-defined]
        with world(world_size, seed=seed, check_races=races, check_replicas=replicas) as simulated:
            simulated.replay = f"pytest '{request.node.nodeid}' --sim-seed={seed}"
            left: dict[int, str] = {}
            try:
                simulated.run(_on_simulated_rank, (body, world_size, seed, fixtures, left))
            except (CollectiveMismatch, Deadlock) as missed:
                if left:  # it is them that the others have missed
                    pytest.fail(f"{_who_left(left, world_size)}\n{missed}", pytrace=False)
                raise
        _end_as_all_have(left, world_size)
        return
    device_type = _DEVICE_TYPES[arm]
    if arm in ("gpu", "npu"):
        _need_devices(device_type, world_size, required=request.config.getoption("--require-devices"))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _run_under_torchrun(arm, body, world_size, seed, fixtures, request.node.nodeid)
        return
    run_processes(arm, test.__module__, test.__qualname__, world_size, seed, fixtures)


def _on_simulated_rank(
    body: Callable[..., Any], world_size: int, seed: int, fixtures: dict[str, Any], left: dict[int, str]
) -> None:
    """Run the body; note in ``left`` that it skipped or failed as expected, and why."""
    rank = dist.get_rank()
    try:
        check_result(body(RankTest(rank, world_size, "sim", torch.device("cpu"), seed), **fixtures), body)
    except (pytest.skip.Exception, pytest.xfail.Exception) as end:
        left[rank] = _outcome_of(end)


_SKIPPED = "skipped: "
_XFAILED = "xfailed: "


def _outcome_of(end: BaseException) -> str:
    return f"{_XFAILED if isinstance(end, pytest.xfail.Exception) else _SKIPPED}{end}"


def _who_left(left: dict[int, str], world_size: int) -> str:
    return f"only {ranks_phrase(left)} of {world_size} {left[min(left)]}"


def _end_as_all_have(left: dict[int, str], world_size: int) -> None:
    """Skip a test, or let it fail as expected, if all of its ranks have; ``left`` has the outcome of those that did."""
    __tracebackhide__ = True
    if not left:
        return
    if len(left) < world_size:
        pytest.fail(_who_left(left, world_size), pytrace=False)
    failed = [outcome for _, outcome in sorted(left.items()) if outcome.startswith(_XFAILED)]
    if failed:
        pytest.xfail(failed[0].removeprefix(_XFAILED))
    pytest.skip(left[0].removeprefix(_SKIPPED))


def _need_devices(device_type: str, wanted: int, *, required: bool) -> None:
    from hyper_parallel.platform import PlatformUnavailableError, get_platform

    local = int(os.environ.get("LOCAL_WORLD_SIZE", wanted))
    started = int(os.environ.get("WORLD_SIZE", wanted))
    try:
        found = get_platform(device_type).device_count()
        reason = f"needs {wanted} {device_type} devices, found {found}"
    except PlatformUnavailableError as error:
        found, reason = 0, f"needs {wanted} {device_type} devices: {str(error).splitlines()[0]}"
    if found >= min(wanted, local) and started >= wanted:
        return
    if started < wanted:
        reason = f"needs {wanted} ranks, torchrun started {started}"
    if required:
        pytest.fail(f"{reason} (--require-devices)", pytrace=False)
    pytest.skip(reason)


# -- processes of our own --------------------------------------------------------------------------------------


@dataclass
class _Job:
    """What one process needs to run its rank of a body."""

    arm: str
    module: str
    test: str
    rank: int
    world_size: int
    seed: int
    store: str
    fixtures: dict[str, Any]
    path: list[str] = field(default_factory=lambda: list(sys.path))


def run_processes(arm: str, module: str, test: str, world_size: int, seed: int, fixtures: dict[str, Any]) -> None:
    """Run the body of ``module.test`` on ``world_size`` fresh processes, and raise what went wrong on any rank.

    Where a process of gloo has crashed (SIGABRT, SIGSEGV), all run once more, with a warning. That has been seen twice,
    as "double free or corruption" in tests that also run torch's FSDP2; its cause is not known. The process prints its
    stacks, which `pytest -rP` shows where the second run passes.
    """
    __tracebackhide__ = True
    outcomes = _run_processes(arm, module, test, world_size, seed, fixtures)
    crashed = [rank for rank, text in enumerate(outcomes) if text and any(f"({name})" in text for name in _CRASHES)]
    if crashed and arm == "gloo":
        told = "; ".join(f"rank {rank}: {str(outcomes[rank]).strip()}" for rank in crashed)
        warnings.warn(f"{test} runs once more: {told}", RuntimeWarning, stacklevel=2)
        outcomes = _run_processes(arm, module, test, world_size, seed, fixtures)
    _raise_outcomes(outcomes, world_size)


def _run_processes(
    arm: str, module: str, test: str, world_size: int, seed: int, fixtures: dict[str, Any]
) -> list[str | None]:
    """Return one outcome per rank, see `_collect`."""
    __tracebackhide__ = True
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(_PRELOAD)  # torch is imported once, not once per rank
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes: list[Any] = []
        pipes: list[Connection] = []
        for rank in range(world_size):
            ours, theirs = start.Pipe(duplex=False)
            job = _Job(arm, module, test, rank, world_size, seed, os.path.join(folder, "store"), fixtures)
            process = start.Process(target=_process_main, args=(job, theirs), daemon=True)
            try:
                process.start()
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                for started in processes:
                    started.kill()
                pytest.fail(
                    f"the arguments of {test} cannot be sent to other processes: {error}\n"
                    f"  fixtures: {', '.join(fixtures)}\n  try: arms=('sim',), or make the object in the body",
                    pytrace=False,
                )
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        outcomes = _collect(pipes)
        for rank, process in enumerate(processes):
            if process.is_alive() and None in outcomes:
                process.kill()
            process.join()
            if outcomes[rank] == _NO_ANSWER:
                outcomes[rank] = f"{_NO_ANSWER} ({_how_it_ended(process.exitcode)})\n"
    return outcomes


def _collect(pipes: list[Connection]) -> list[str | None]:
    """One outcome per rank: "" when it passed, its traceback, or None when it gave no answer in time."""
    outcomes: list[str | None] = [None] * len(pipes)
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    end = time.monotonic() + _LIMIT_S
    while open_pipes and time.monotonic() < end:
        for pipe in wait(list(open_pipes), timeout=max(0.0, end - time.monotonic())):
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                outcomes[rank] = pipe.recv()
            except EOFError:
                outcomes[rank] = _NO_ANSWER
            if outcomes[rank]:  # the others may now wait for this rank for ever: give them a moment, no more
                end = min(end, time.monotonic() + 5.0)
    return outcomes


def _raise_outcomes(outcomes: list[str | None], world_size: int) -> None:
    __tracebackhide__ = True
    left = {r: o for r, o in enumerate(outcomes) if o is not None and o.startswith((_SKIPPED, _XFAILED))}
    if len(left) == world_size:
        _end_as_all_have(left, world_size)
    failed = [(rank, text) for rank, text in enumerate(outcomes) if text]
    # A rank that passed and then missed another one has nothing to say if that one says why it failed.
    failed = [(r, text) for r, text in failed if not text.startswith(_MISSED)] or failed
    silent = [rank for rank, text in enumerate(outcomes) if text is None]
    if not failed and not silent:
        return
    causes = [(rank, text) for rank, text in failed if not _has_lost_a_peer(text)]
    if causes:  # the others only tell that these are gone
        late = [(rank, f"{text.strip().splitlines()[-1]}\n") for rank, text in failed if _has_lost_a_peer(text)]
        failed = late + causes
    parts = [f"--- rank {rank} ---\n{text}" for rank, text in failed]
    if silent:
        parts.append(f"--- {ranks_phrase(silent)} ---\nno answer; stopped")
    pytest.fail("\n".join(parts), pytrace=False)


_MISSED = "passed, but could not leave together with the others:\n"
_NO_ANSWER = "the process ended without an answer"
_CRASHES = ("SIGABRT", "SIGSEGV", "SIGBUS")
_GONE = ("Connection reset by peer", "Connection closed by peer", "Broken pipe", "Connection refused")


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


def _process_main(job: _Job, answer: Connection) -> None:
    outcome, missed = "", ""
    faulthandler.enable()  # where each thread was, should the process crash
    try:
        sys.path[:] = job.path
        torch.set_num_threads(1)
        test = getattr(importlib.import_module(job.module), job.test)
        os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank), WORLD_SIZE=str(job.world_size))
        device, backend = _take_device(job.arm, job.rank)
        store = dist.FileStore(job.store, job.world_size)
        dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.world_size, timeout=_TIMEOUT)
        # A rank that skips at once must not be gone while another one still connects to it.
        store.set(f"connected/{job.rank}", "yes")
        store.wait([f"connected/{rank}" for rank in range(job.world_size)], _TIMEOUT)
        context = RankTest(job.rank, job.world_size, job.arm, device, job.seed)
        check_result(test.body(context, **job.fixtures), test.body)
        missed = _MISSED
        dist.barrier()
        dist.destroy_process_group()
    except (pytest.skip.Exception, pytest.xfail.Exception) as end:
        outcome = _outcome_of(end)
    except BaseException:
        outcome = missed + traceback.format_exc()
    try:
        answer.send(outcome)
        answer.close()
    except (OSError, pickle.PicklingError):
        traceback.print_exc()
    os._exit(1 if outcome else 0)  # a rank whose peers are gone could hang in the backend's own clean-up


def _take_device(arm: str, local_rank: int) -> tuple[torch.device, str]:
    from hyper_parallel.platform import get_platform

    platform = get_platform(_DEVICE_TYPES[arm])
    if arm == "gloo":
        return torch.device("cpu"), "gloo"
    platform.set_device(local_rank)
    return platform.device(local_rank), platform.backend


# -- ranks that torchrun started ---------------------------------------------------------------------------------


def _run_under_torchrun(
    arm: str, body: Callable[..., Any], world_size: int, seed: int, fixtures: dict[str, Any], name: str
) -> None:
    """The first ``world_size`` of torchrun's ranks run the body; the others wait for them."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, backend = _take_device(arm, int(os.environ["LOCAL_RANK"]))
    timeout = datetime.timedelta(seconds=_LIMIT_S)
    base, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
    store = dist.PrefixStore(name, base)
    if rank < world_size:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        try:
            check_result(body(RankTest(rank, world_size, arm, device, seed), **fixtures), body)
        except BaseException:
            store.add("done", 1)  # the others do not wait for this rank
            raise
        finally:
            dist.destroy_process_group()
    store.add("done", 1)
    if rank == 0:
        while store.add("done", 0) < size:
            time.sleep(0.01)
        store.set("all", "1")
    store.wait(["all"], timeout)
