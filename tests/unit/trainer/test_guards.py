"""Early ends of a run: a signal, a NaN, a rank that is stuck."""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

import sim
from hyper_parallel import fully_shard, init_device_mesh
from hyper_parallel.core.common import groups
from hyper_parallel.core.common.groups import attempt_store, init_process_group
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.trainer import watchdog
from hyper_parallel.trainer.config import TrainConfig
from hyper_parallel.trainer.guards import (
    NonFiniteError,
    StopRequest,
    action_after,
    dump_nonfinite,
    nonfinite_error,
    stop_on_signals,
)
from hyper_parallel.trainer.watchdog import RankLostError, RankReport, RunWatchdog, default_store, report_of, verdict
from sim.script.launch import main as run_script


def attempt(store: dist.Store, world_size: int) -> None:
    """Start the ranks of an attempt; each leaves its address, as gloo does, and reads those of the others."""

    def rank(number: int) -> list[bytes]:
        own = attempt_store(store, number, world_size)
        assert not own.check([f"address/{number}"]), "of an attempt before"
        own.set(f"address/{number}", f"{threading.get_ident()}")
        return [own.get(f"address/{other}") for other in range(world_size)]

    with ThreadPoolExecutor(world_size) as threads:
        reported = list(threads.map(rank, range(world_size)))
    assert len(set(map(tuple, reported))) == 1
    assert len(set(reported[0])) == world_size


def test_attempts_have_nothing_in_common_though_their_store_goes_on() -> None:
    store = HashStore()
    attempt(store, 3)
    store.set("hello/1", "of a rank that died before it was welcomed")
    attempt(store, 3)
    attempt(store, 2)
    attempt(store, 4)


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(groups, "_SAY_S", 0.0)
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=30))
    store.set("hello/2", "of an attempt before")
    with pytest.raises(
        RuntimeError, match=r"cannot start 4 ranks: not all have come in 0 s\n  missing: 1, 2, 3\n  try: "
    ):
        attempt_store(store, 0, 4)
    assert caplog.messages == ["waiting for ranks [1, 2, 3] of 4"], "before it gives up, and once"


@pytest.mark.parametrize(
    "start", [init_process_group, lambda: ParallelDims(dp_shard=2, world_size=2).build_mesh("cpu")]
)
def test_every_attempt_of_a_torchrun_gets_names_of_its_own(
    start: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{server.port}"}
    for name, value in {**torchrun, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", lambda backend=None, **kept: asked.append(kept))
    for _ in range(2):
        with ThreadPoolExecutor() as threads, suppress(ValueError):  # there is no group to build a mesh on
            rank_0 = threads.submit(attempt_store, dist.PrefixStore("hyper_parallel", server), 0, 2)
            start()
        rank_0.result().set("key", f"{len(asked)}")
    assert [kept["store"].get("key") for kept in asked] == [b"1", b"2"]
    assert [(kept["rank"], kept["world_size"]) for kept in asked] == [(1, 2)] * 2


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_the_first_signal_asks_and_the_second_acts_as_before(name: str) -> None:
    number = getattr(signal, name)
    second: list[int] = []
    before = signal.signal(number, lambda number, frame: second.append(number))
    try:
        with stop_on_signals() as stop:
            assert not stop.requested()
            os.kill(os.getpid(), number)
            assert stop.requested()
            assert (stop.reason, second) == (name, [])
            os.kill(os.getpid(), number)
            assert second == [number]
        os.kill(os.getpid(), number)
        assert second == [number] * 2, "the handler from before is back"
    finally:
        signal.signal(number, before)


def test_handlers_are_put_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = StopRequest()

    def fail() -> None:
        with stop_on_signals(stop, ["SIGTERM", "SIGNOTHERE"]) as given:
            assert given is stop
            assert signal.getsignal(signal.SIGTERM) is not before
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_launcher_handles_signals_and_ranks_read_its_flag() -> None:
    with ThreadPoolExecutor() as threads:
        error = threads.submit(stop_on_signals().__enter__).exception()
    assert isinstance(error, RuntimeError)
    assert "only a process's main thread may" in str(error)
    assert "in the launcher" in str(error)

    def steps(stop: StopRequest) -> int:
        for step in range(100):
            if dist.get_rank() == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGTERM)  # reaches the launcher's thread when it likes to
                while not stop.requested():
                    dist.barrier(dist.new_group([1], use_local_synchronization=True))
            asked = torch.tensor(float(stop.requested()))
            dist.all_reduce(asked)
            if asked:
                return step
        return -1

    with stop_on_signals() as stop:
        assert sim.run(steps, world_size=3, args=(stop,)) == [3] * 3


def test_a_script_may_do_so_on_simulated_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\n"
        "from hyper_parallel.trainer.guards import stop_on_signals\n"
        "with stop_on_signals() as stop:\n"
        f"    open(r'{tmp_path}/' + os.environ['RANK'], 'w').write(str(stop.requested()))\n"
    )
    before = signal.getsignal(signal.SIGTERM)
    assert run_script(["--nproc", "2", str(script)]) == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["False"] * 2
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("policy", ["skip", "stop", "dump"])
@pytest.mark.parametrize("bad", [(math.nan, 1.0), (1.0, math.nan), (-math.inf, 1.0), (1.0, math.inf)])
def test_what_is_not_finite_is_noticed(policy: str, bad: tuple[float, float]) -> None:
    train = TrainConfig(on_nonfinite=policy)
    assert action_after(1.0, 0.0, train, skipped_in_a_row=10**6) == "go"
    assert action_after(*bad, train) == policy
    assert action_after(*bad, train, skipped_in_a_row=train.max_skips - 1) == policy
    assert action_after(*bad, train, skipped_in_a_row=train.max_skips) == ("stop" if policy == "skip" else policy)


@pytest.mark.parametrize("wrong", [{"on_nonfinite": "ignore"}, {"max_skips": -1}])
def test_policies_that_do_not_exist_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="\n  try: "):
        TrainConfig(**wrong)  # type: ignore[arg-type]


def test_the_error_says_what_was_not_finite() -> None:
    error = nonfinite_error(3, 2.5, math.inf, skipped_in_a_row=2)
    assert isinstance(error, NonFiniteError)
    assert str(error).startswith("cannot take step 3: the gradient norm is inf, after 2 steps in a row")


def test_a_dump_names_the_parameters_to_blame(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].weight.grad = torch.tensor([[3.0, math.nan, 0.0], [4.0, math.inf, -math.inf]])
    model[1].weight.grad = torch.ones(1, 2)
    with torch.no_grad():
        model[1].bias.fill_(math.nan)
    about = {"rank": 3, "step": 7, "loss": math.nan, "grad_norm": math.inf, "samples": [5, 6]}
    path = dump_nonfinite(tmp_path / "new", model.named_parameters(), **about)
    assert path == tmp_path / "new" / "step-00000007" / "rank-3.json"

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found = json.loads(path.read_text(), parse_constant=refuse)
    assert (found["loss"], found["grad_norm"], found["samples"]) == ("nan", "inf", [5, 6])
    assert [row["name"] for row in found["parameters"]] == ["0.weight", "1.bias", "0.bias", "1.weight"]
    assert found["parameters"][0] == {
        "name": "0.weight",
        "shape": [2, 3],
        "value_nonfinite": 0,
        "grad_nonfinite": 3,
        "grad_norm_of_finite": 5.0,
    }
    assert found["parameters"][1] == {"name": "1.bias", "shape": [1], "value_nonfinite": 1}


def test_each_rank_dumps_its_part(tmp_path: Path) -> None:
    def dump() -> int:
        model = nn.Linear(2, 4, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        x = torch.ones(1, 2)
        model(x * (math.nan if dist.get_rank() == 0 else 1)).sum().backward()
        path = dump_nonfinite(
            tmp_path, model.named_parameters(), rank=dist.get_rank(), step=1, loss=math.nan, grad_norm=math.nan
        )
        return json.loads(path.read_text())["parameters"][0]

    for row in sim.run(dump, world_size=2):
        assert (row["shape"], row["grad_nonfinite"]) == ([2, 2], 4)


def report(rank: int, beats: int = 8, waits_in: str = "", step: int = 7) -> RankReport:
    return RankReport(rank, step, beats, 30.0, "", waits_in, (f"train.py:{rank} in forward",))


@pytest.mark.parametrize(
    ("reports", "world_size", "blame"),
    [
        ([report(0, waits_in="a:1 in b"), report(1)], 2, "rank 1 does not come to where the others wait for it"),
        ([report(0, 9), report(1, 8), report(2, 9)], 3, "rank 1 does not come to"),
        ([report(0, 9, "x"), report(1, 8, "x"), report(2, 9)], 3, "rank 2 does not come to"),
        ([report(0, 9, "x"), report(1, 8, "x"), report(2, 9, "x")], 3, "rank 1 does not come to"),
        (
            [report(0, 8), report(1, 8), report(2, 9, "x")],
            3,
            "ranks 0, 1 do not come to where the others wait for them",
        ),
        ([report(0, 8), report(2, 8, "x")], 4, "ranks 1, 3 do not answer"),
        ([report(0, waits_in="x"), report(1, waits_in="y")], 2, "all ranks wait, for each other or for a device"),
        ([report(0), report(1)], 2, "no rank goes on"),
        ([report(0)], 1, "it makes no progress"),
        (
            [report(0, waits_in="x"), replace(report(1), failed="ValueError: x")],
            3,
            "rank 1 failed: ValueError: x; rank 2",
        ),
    ],
)
def test_the_verdict_names_the_rank_that_the_others_wait_for(
    reports: list[RankReport], world_size: int, blame: str
) -> None:
    text = verdict(list(reversed(reports)), world_size, "out")
    assert text.startswith(f"cannot go on in step 7: {blame}")
    assert "stacks of all threads: out/rank-*.txt" in text
    assert "\n  try: " in text
    for each in reports:
        where = f"waits in {each.waits_in}" if each.waits_in else "in no communication:"
        where = f"failed: {each.failed}" if each.failed else where
        assert f"rank {each.rank}, step 7, 30 s, {where}" in text


def test_a_thousand_ranks_make_a_short_verdict() -> None:
    text = verdict([report(rank, waits_in="" if rank == 700 else "x") for rank in range(1000)], 1000, "out")
    assert len(text.splitlines()) < 25
    assert "in step 7: rank 700 does" in text
    assert "rank 700, step 7, 30 s, in no communication:\n    train.py:700 in forward" in text
    assert "and 984 ranks more" in text


def test_a_report_knows_user_code_from_waiting() -> None:
    found: queue.Queue[RankReport] = queue.Queue()
    thread = threading.Thread(target=lambda: found.put(report_of(0, 1, 2, 3.0, "")))
    thread.start()
    thread.join()
    here = found.get()
    assert here.waits_in == ""
    assert any("test_guards.py" in line for line in here.lines)


def test_the_first_to_notice_tells_all_and_the_others_end_with_it(tmp_path: Path) -> None:
    said: queue.Queue[tuple[int, str]] = queue.Queue()
    store = HashStore()
    # Two processes' watchdogs in one: rank 1 is the one that has not come as far.
    dogs = [
        RunWatchdog(
            0.2 if rank == 0 else 60.0,
            tmp_path,
            rank=rank,
            world_size=2,
            store=store,
            grace_s=20.0,
            on_stuck=lambda text, rank=rank: said.put((rank, text)),
        )
        for rank in (0, 1)
    ]
    with dogs[0], dogs[1]:
        for dog, beats in zip(dogs, (2, 1), strict=True):
            for step in range(beats):
                dog.beat(step, "training")
        reported = dict(said.get(timeout=60) for _ in dogs)
    assert reported[0].startswith("cannot go on in step 0: rank 1 does not come to")
    assert "rank 1, step 0 (training)" in reported[0]
    assert reported[1].startswith("rank 1 ends: cannot go on in step 0: rank 1 does not")
    assert (tmp_path / "verdict.txt").read_text() == reported[0] + "\n"
    for rank in (0, 1):
        assert "test_guards.py" in (tmp_path / f"rank-{rank}.txt").read_text()


def test_a_process_without_a_store_reports_itself(tmp_path: Path) -> None:
    said: queue.Queue[str] = queue.Queue()
    with RunWatchdog(0.05, tmp_path, on_stuck=said.put) as watchdog:
        watchdog.beat(5)
        assert said.get(timeout=60).startswith("cannot go on in step 5: it makes no progress")


GLOO = "[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:43180: Connection reset by peer."


def dogs_of(store: HashStore, world_size: int, tmp_path: Path) -> list[RunWatchdog]:
    return [RunWatchdog(60.0, tmp_path, rank=rank, world_size=world_size, store=store) for rank in range(world_size)]


def raised(dog: RunWatchdog, error: BaseException) -> BaseException | None:
    try:
        with dog.telling():
            raise error
    except BaseException as error:
        return error


@pytest.mark.parametrize(
    ("failed", "blame"),
    [
        ((1,), "rank 1 failed: MemoryError: of rank 1"),
        ((0, 2), "rank 0 failed: MemoryError: of rank 0; rank 2 failed, too"),
    ],
)
def test_ranks_whose_connection_breaks_name_those_that_have_failed(
    failed: tuple[int, ...], blame: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        dogs = [stack.enter_context(dog) for dog in dogs_of(HashStore(), 4, tmp_path)]
        for rank in failed:
            own = MemoryError(f"of rank {rank}\nand more")
            assert raised(dogs[rank], own) is own
        others = [dog for dog in dogs if dog.rank not in failed]
        for dog in others:
            dog.beat(3)
        with ThreadPoolExecutor() as threads:
            errors = list(threads.map(raised, others, [RuntimeError(GLOO)] * len(others)))
    assert [(type(error), str(error)) for error in errors] == [
        (RankLostError, f"cannot go on in step 3: {blame}")
    ] * len(others)


def test_a_rank_that_is_no_more_does_not_answer_and_one_that_waits_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_LOOK_S", 0.01)
    monkeypatch.setattr(watchdog, "_ANSWER_S", 0.5)
    store = HashStore()
    dogs = dogs_of(store, 3, tmp_path)
    with dogs[0], dogs[2]:  # rank 1 is gone, rank 2 waits in another communication
        error = raised(dogs[0], RuntimeError(GLOO))
    assert str(error) == "cannot go on in step 0: rank 1 does not answer"


def test_errors_of_the_ranks_own_are_left_alone(tmp_path: Path) -> None:
    dogs, unsupported = dogs_of(HashStore(), 2, tmp_path), RuntimeError("ReduceOp.AVG: not with gloo")
    with dogs[0], dogs[1], ThreadPoolExecutor() as threads:
        assert list(threads.map(raised, dogs, [unsupported] * 2)) == [unsupported] * 2
    alone = RunWatchdog(60.0, tmp_path, world_size=2)
    with alone:
        assert raised(alone, unsupported) is unsupported, "nobody to ask"


def test_a_store_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_ANSWER_S", 0.05)
    monkeypatch.setattr(watchdog, "_LOOK_S", 60.0)
    hangs = threading.Event()

    class Stopped(dist.Store):
        def clone(self) -> dist.Store:
            return self

        def check(self, keys: list[str]) -> bool:
            return hangs.wait()

    said: queue.Queue[str] = queue.Queue()
    kept: dict[str, Any] = {"world_size": 2, "store": Stopped(), "grace_s": 0.05}
    with RunWatchdog(60.0, tmp_path, **kept) as dog:
        error = raised(dog, RuntimeError(GLOO))
        assert str(error).endswith("step 0: rank 0 does not answer, which holds the ranks' store")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with RunWatchdog(0.05, tmp_path, on_stuck=said.put, **kept) as dog:
        dog.beat(2)
        reported = said.get(timeout=60)
    assert "the other ranks could not be asked: torchrun does not answer, which holds the ranks' store" in reported
    hangs.set()


def test_a_disk_that_does_not_answer_keeps_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hangs, said = threading.Event(), queue.Queue[str]()
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: hangs.wait())
    kept: dict[str, Any] = {"world_size": 2, "store": HashStore(), "grace_s": 0.05}
    with RunWatchdog(0.05, tmp_path, on_stuck=said.put, **kept) as dog:
        dog.beat(4, "saving")
        assert said.get(timeout=60).startswith("cannot go on in step 4: rank 1 does not answer")
    assert capfd.readouterr().err.startswith("watchdog: no progress of rank 0, step 4 (saving), 0 s, ")
    hangs.set()


def test_a_rank_that_is_asked_to_stop_and_ends_no_step_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stop = StopRequest()
    dog = RunWatchdog(900.0, tmp_path, rank=1, world_size=2, stop=stop)
    assert not dog._why_not_stopped()
    dog.beat(1, "training")
    now = 4.0
    dog.beat(2, "training")  # after a step of 4 s
    now = 100.0
    assert not dog._why_not_stopped(), "nobody has asked"
    stop.request("SIGTERM")
    assert not dog._why_not_stopped()
    now = 111.9
    assert not dog._why_not_stopped(), "a step may take three times the longest before"
    dog.beat(2, "saving")
    now = 1000.0
    assert not dog._why_not_stopped(), "a save may take long"
    dog.beat(3, "training")
    assert dog._progress.longest == 107.9
    now = 1400.0
    assert dog._why_not_stopped() == (
        "rank 1 ends: SIGTERM asks it to stop, and it makes no progress in step 3 for 400 s: "
        "another rank is gone, or stuck"
    )
    alone = RunWatchdog(900.0, tmp_path, stop=stop)
    alone.beat(1)
    now = 10_000.0
    assert not alone._why_not_stopped(), "it waits for nobody"


def test_a_signal_is_heard_while_the_main_thread_is_in_a_call_that_runs_no_handlers() -> None:
    """As in a collective. Here the call holds the signal's own Python handler off: it is not the main thread's turn."""
    with stop_on_signals() as stop:
        (listener,) = [thread for thread in threading.enumerate() if thread.name == "signals"]
        signal.signal(signal.SIGUSR1, lambda number, frame: None)  # what Python would call sets no flag
        os.kill(os.getpid(), signal.SIGUSR1)
        while not stop.requested():
            time.sleep(0.001)
        assert stop.reason == "SIGUSR1"
    assert not listener.is_alive()


def test_progress_and_no_beat_raise_no_alarm(tmp_path: Path) -> None:
    hasty, patient = RunWatchdog(1e-9, tmp_path), RunWatchdog(3600.0, tmp_path)
    assert not hasty._is_late(), "it watches from the first beat on"
    for dog in (hasty, patient):
        dog.beat(1)
    assert hasty._is_late()
    assert not patient._is_late()


def test_nothing_is_left_of_a_run_that_went_well(tmp_path: Path) -> None:
    with RunWatchdog(3600.0, tmp_path / "new") as watchdog:
        watchdog.beat(1)
    assert not (tmp_path / "new").exists()
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


def test_on_simulated_ranks_it_does_nothing(tmp_path: Path) -> None:
    def watched() -> None:
        with RunWatchdog(1e-9, tmp_path / "new", rank=dist.get_rank(), world_size=2, store=default_store()) as watchdog:
            watchdog.beat(1)
            dist.barrier()
            watchdog.beat(2)

    threads = threading.active_count()
    sim.run(watched, world_size=2)
    assert threading.active_count() <= threads + 2, "the ranks' own"
    assert not (tmp_path / "new").exists()


def test_a_timeout_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="timeout_s is not above 0"):
        RunWatchdog(0.0, tmp_path)
