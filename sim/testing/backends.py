"""The backends of a test body: simulated ranks, processes of our own, or the ranks that torchrun started."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.platform import PlatformUnavailableError, get_platform
from hyper_parallel.platform.accelerator import torch_npu_is_installed
from hyper_parallel.pytest_plugin import SIMULATED_BACKENDS
from sim.explain.callables import check_result
from sim.explain.errors import CollectiveMismatch, Deadlock
from sim.testing.processes import (
    DEVICE_TYPES,
    Watch,
    end_as_all_have,
    outcome_of,
    run_processes,
    stuck_message,
    take_device,
    who_left,
)
from sim.testing.rank_test import RankTest
from sim.world import Checks, world

_TIMEOUT = datetime.timedelta(seconds=300)  # of one communication between the ranks of torchrun


def run_body(
    backend: str,
    test: Callable[..., None],
    world_size: int,
    fixtures: dict[str, Any],
    request: pytest.FixtureRequest,
    owner: object = None,
) -> None:
    """Run the body of `test` on `world_size` ranks of `backend`; as a method of `owner`, if there is one."""
    __tracebackhide__ = True
    seed = request.config.getoption("--sim-seed")
    body: Callable[..., Any] = test.body  # type: ignore[attr-defined]
    if owner is not None:
        body = MethodType(body, owner)
    like = request.config.getoption("--sim-backend")
    like = like if backend == SIMULATED_BACKENDS.get(like) else None
    if backend == "sim" or like is not None:
        checks: Checks = test.checks if backend == "sim" else {}  # type: ignore[attr-defined]
        kind = _device_of(test, request) if request.config.getoption("--sim-backend") in (None, like) else None
        if kind == "npu" and not torch_npu_is_installed():  # late devices: for any seed, not for some
            checks = {**checks, "check_races": True}
        with world(world_size, seed=seed, backend=like, device=kind, **checks) as simulated:
            rules = "" if like is None else f" --sim-backend={like}"
            rules += "" if kind is None else f" --sim-device={kind}"
            simulated.replay = f"pytest '{request.node.nodeid}' --sim-seed={seed}{rules}"
            left: dict[int, str] = {}
            device = torch.device("cpu") if kind is None else torch.device(kind, 0)
            try:
                simulated.run(_on_simulated_rank, (body, world_size, backend, seed, device, fixtures, left))
            except (CollectiveMismatch, Deadlock) as missed:
                if left:  # it is them that the others have missed
                    pytest.fail(f"{who_left(left, world_size)}\n{missed}", pytrace=False)
                raise
        end_as_all_have(left, world_size)
        return
    _need_ranks(backend, world_size, required=request.config.getoption("--require-devices"))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _run_under_torchrun(backend, body, world_size, seed, fixtures, request)
        return
    run_processes(backend, test, world_size, seed, fixtures, request)


def _device_of(test: Callable[..., None], request: pytest.FixtureRequest) -> str | None:
    """The device that `--sim-device` names, for a body that is made for devices of that kind; None: the CPU."""
    kind = request.config.getoption("--sim-device")
    takes = [DEVICE_TYPES.get(name) for name in test.rank_backends]  # type: ignore[attr-defined]
    return kind if kind in takes else None


def _on_simulated_rank(
    body: Callable[..., Any],
    world_size: int,
    backend: str,
    seed: int,
    device: torch.device,
    fixtures: dict[str, Any],
    left: dict[int, str],
) -> None:
    """Run the body; note in `left` that it skipped or failed as expected, and why."""
    rank = dist.get_rank()
    try:
        check_result(body(RankTest(rank, world_size, backend, device, seed), **fixtures), body)
    except (pytest.skip.Exception, pytest.xfail.Exception) as end:
        left[rank] = outcome_of(end)


def _need_ranks(backend: str, wanted: int, *, required: bool) -> None:
    """Skip, or fail, a body that wants more devices than there are, or more ranks than torchrun has started."""
    __tracebackhide__ = True
    reason = None
    if backend != "gloo":
        device_type = DEVICE_TYPES[backend]
        try:
            found = get_platform(device_type).device_count()
        except PlatformUnavailableError as error:
            reason = f"needs {wanted} {device_type} devices: {str(error).splitlines()[0]}"
        else:
            if found < min(wanted, int(os.environ.get("LOCAL_WORLD_SIZE", wanted))):
                reason = f"needs {wanted} {device_type} devices, found {found}"
    started = int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else wanted
    if started < wanted:
        reason = f"needs {wanted} ranks, torchrun started {started}"
    if reason is not None and required:
        pytest.fail(f"{reason} (--require-devices)", pytrace=False)
    if reason is not None:
        pytest.skip(reason)


# -- ranks that torchrun started ---------------------------------------------------------------------------------


def _run_under_torchrun(
    backend: str,
    body: Callable[..., Any],
    world_size: int,
    seed: int,
    fixtures: dict[str, Any],
    request: pytest.FixtureRequest,
) -> None:
    """Run the body on the first `world_size` of torchrun's ranks; the others wait for them."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, library = take_device(backend, int(os.environ["LOCAL_RANK"]))
    base, _, _ = next(dist.rendezvous("env://", rank, size, timeout=_TIMEOUT))
    store = dist.PrefixStore(request.node.nodeid, base)
    if rank < world_size:
        watch = Watch(_EndIfAllWait(rank, world_size, request))
        watch.start()
        dist.init_process_group(library, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
        try:
            check_result(body(RankTest(rank, world_size, backend, device, seed), **fixtures), body)
        except BaseException:
            store.add("done", 1)  # the others do not wait for this rank
            raise
        finally:
            watch.end()
            dist.destroy_process_group()
    store.add("done", 1)
    if rank == 0:
        while store.add("done", 0) < size:
            time.sleep(0.01)
        store.set("all", "1")
    store.wait(["all"], _TIMEOUT)


class _EndIfAllWait:
    """What a rank of torchrun reports to: ends the process once all ranks of the body stand still in communications.

    pytest cannot go on in a process whose main thread waits for ever, so the message is the last thing it prints.
    """

    def __init__(self, rank: int, world_size: int, request: pytest.FixtureRequest) -> None:
        self._rank, self._ranks, self._name = rank, range(world_size), request.node.nodeid
        self._simulated = "sim" in getattr(request.function, "rank_backends", ())
        self._capture = request.config.pluginmanager.getplugin("capturemanager")
        # A connection of its own: the main thread may be waiting in a call of the other one.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = dist.PrefixStore(f"{self._name}/waits", dist.TCPStore(address, port, is_master=False))

    def __call__(self, waits: str | None) -> None:
        self._store.set(str(self._rank), waits or "")
        if not waits or not self._store.check([str(rank) for rank in self._ranks]):
            return
        waiting = {rank: self._store.get(str(rank)).decode() for rank in self._ranks}
        if all(waiting.values()):
            if self._capture is not None:
                self._capture.suspend(in_=True)  # else the message would go to a file that nobody reads any more
            print(stuck_message(waiting, self._name, simulated=self._simulated), file=sys.__stderr__, flush=True)
            os._exit(1)
