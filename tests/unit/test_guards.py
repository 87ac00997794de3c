"""What ends a run early: a signal, a NaN, a rank that is stuck."""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

import sim
from hyper_parallel import fully_shard, init_device_mesh
from hyper_parallel.trainer.nonfinite import NonFiniteError, NonFinitePolicy, dump_nonfinite, nonfinite_error
from hyper_parallel.trainer.stacks import RankReport, report_of, verdict
from hyper_parallel.trainer.stop import StopRequest, stop_on_signals
from hyper_parallel.trainer.watchdog import Watchdog, default_store
from sim.script.launch import main as run_script

# -- stopping ----------------------------------------------------------------------------------------------------------


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
        "from hyper_parallel.trainer.stop import stop_on_signals\n"
        "with stop_on_signals() as stop:\n"
        f"    open(r'{tmp_path}/' + os.environ['RANK'], 'w').write(str(stop.requested()))\n"
    )
    before = signal.getsignal(signal.SIGTERM)
    assert run_script(["--nproc", "2", str(script)]) == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["False"] * 2
    assert signal.getsignal(signal.SIGTERM) is before


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["skip", "stop", "dump"])
@pytest.mark.parametrize("bad", [(math.nan, 1.0), (1.0, math.nan), (-math.inf, 1.0), (1.0, math.inf)])
def test_what_is_not_finite_is_noticed(policy: str, bad: tuple[float, float]) -> None:
    rule = NonFinitePolicy(policy)
    assert rule.check(1.0, 0.0, skipped_in_a_row=10**6) == "go"
    assert rule.check(*bad) == policy
    assert rule.check(*bad, skipped_in_a_row=rule.max_skips - 1) == policy
    assert rule.check(*bad, skipped_in_a_row=rule.max_skips) == ("stop" if policy == "skip" else policy)


@pytest.mark.parametrize("wrong", [{"on_nonfinite": "ignore"}, {"max_skips": -1}])
def test_policies_that_do_not_exist_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="\n  try: "):
        NonFinitePolicy(**wrong)  # type: ignore[arg-type]


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


# -- progress ----------------------------------------------------------------------------------------------------------


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
        Watchdog(
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
        told = dict(said.get(timeout=60) for _ in dogs)
    assert told[0].startswith("cannot go on in step 0: rank 1 does not come to")
    assert "rank 1, step 0 (training)" in told[0]
    assert told[1].startswith("rank 1 ends: cannot go on in step 0: rank 1 does not")
    assert (tmp_path / "verdict.txt").read_text() == told[0] + "\n"
    for rank in (0, 1):
        assert "test_guards.py" in (tmp_path / f"rank-{rank}.txt").read_text()


def test_a_process_without_a_store_reports_itself(tmp_path: Path) -> None:
    said: queue.Queue[str] = queue.Queue()
    with Watchdog(0.05, tmp_path, on_stuck=said.put) as watchdog:
        watchdog.beat(5)
        assert said.get(timeout=60).startswith("cannot go on in step 5: it makes no progress")


def test_progress_a_pause_and_no_beat_raise_no_alarm(tmp_path: Path) -> None:
    watchdog, patient = Watchdog(1e-9, tmp_path), Watchdog(3600.0, tmp_path)
    assert not watchdog._is_late(), "it watches from the first beat on"
    for dog in (watchdog, patient):
        dog.beat(1)
    assert watchdog._is_late()
    assert not patient._is_late()
    with watchdog.paused():
        assert not watchdog._is_late()
    assert watchdog._is_late()


def test_nothing_is_left_of_a_run_that_went_well(tmp_path: Path) -> None:
    with Watchdog(3600.0, tmp_path / "new") as watchdog:
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["rank-0.txt"]
        watchdog.beat(1)
    assert list((tmp_path / "new").iterdir()) == []
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


def test_on_simulated_ranks_it_does_nothing(tmp_path: Path) -> None:
    def watched() -> None:
        with Watchdog(1e-9, tmp_path / "new", rank=dist.get_rank(), world_size=2, store=default_store()) as watchdog:
            watchdog.beat(1)
            dist.barrier()
            watchdog.beat(2)

    threads = threading.active_count()
    sim.run(watched, world_size=2)
    assert threading.active_count() <= threads + 2, "the ranks' own"
    assert not (tmp_path / "new").exists()


def test_a_timeout_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="timeout_s is not above 0"):
        Watchdog(0.0, tmp_path)
