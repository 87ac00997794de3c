"""Whole runs in which something goes wrong outside: ranks die, the disk is full, a scheduler says stop, a rank hangs.

A run that is started anew goes on from the last complete checkpoint, and ends with the numbers of one that was never
interrupted.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sim
from hyper_parallel.models import LlamaConfig
from hyper_parallel.trainer.config import CheckpointConfig, Config, DataConfig, ParallelConfig, TrainConfig
from hyper_parallel.trainer.config_file import load_config
from hyper_parallel.trainer.record import TrainResult, read_log
from hyper_parallel.trainer.trainer import train
from hyper_parallel.trainer.watchdog import STUCK_EXIT

SCRIPT = Path(__file__).with_name("trainer_kill_script.py")
TINY = Config(
    model=LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    ),
    data=DataConfig(max_bytes=200_000),
    train=TrainConfig(steps=3, batch_size=4, seq_len=8, eval_sequences=4, device="cpu"),
)
TINY_TOML = """
[model]
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 2
[data]
max_bytes = 200_000
[train]
steps = 4
batch_size = 4
seq_len = 8
eval_sequences = 4
device = "cpu"
log = "log.jsonl"
[checkpoint]
folder = "saved"
"""
FOREVER = ("--steps", "1000000")


@pytest.mark.gloo
def test_a_run_of_processes_survives_a_kill() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) == 5, done.stderr
    for outcome in outcomes:
        where, victim, _, left = outcome["case"]
        whole, again = outcome["whole"], outcome["again"]
        assert outcome["killed"][victim] == signal.SIGKILL, outcome
        survivor = outcome["killed"][1 - victim]
        if survivor != "RuntimeError":  # it had left the last step behind before the other one died in the background
            assert outcome["case"][2], f"nobody goes on alone: {outcome}"
            assert survivor["failures"], outcome
        done_before = 3 if where == "prune" else 2  # then the third checkpoint is complete
        assert again["first"] == done_before + 1, outcome
        if left == 2:
            assert again["losses"] == whole["losses"][done_before:], outcome
            assert again["valid"] == whole["valid"], outcome
        else:
            assert again["losses"] == pytest.approx(whole["losses"][done_before:], rel=1e-5), outcome
            assert again["valid"] == pytest.approx(whole["valid"], rel=1e-5), outcome
        assert again["failures"] == []
        assert outcome["left"] == ["step-00000003", "step-00000004"], f"leftovers: {outcome}"


def numbers(result: TrainResult) -> list[tuple[float, float, float | None]]:
    return [(record.loss, record.grad_norm, record.valid_loss) for record in result.steps]


@pytest.mark.sim
@pytest.mark.parametrize("background", [False, True])
def test_a_simulated_run_survives_a_kill_anywhere(tmp_path: Path, background: bool) -> None:
    """The rank dies at operations that are spread over the whole run, saves included."""
    parallel = ParallelConfig(dp_shard=2)
    whole = sim.run(train, 2, args=(replace(TINY, parallel=parallel),))[0]
    went_on_from = set()
    for at in range(0, 400, 13):
        keep = CheckpointConfig(folder=str(tmp_path / str(at)), every=1, background=background)
        config = replace(TINY, parallel=parallel, checkpoint=keep)
        with sim.world(2) as world:
            world.faults.kill(at % 2, at=at)
            with suppress(sim.RankLost):
                world.run(train, args=(config,))
            died = bool(world.faults.log)
        again = sim.run(train, 2, args=(config,))[0]
        went_on_from.add(again.first_step - 1)
        assert numbers(again) == numbers(whole)[again.first_step - 1 :], f"killed at operation {at}"
        assert again.save_failures == ()
        if not died:
            break
    else:
        pytest.fail("the rank never lived")
    assert {0, 1, 2, 3} <= went_on_from, "not killed in all steps"


def start(*arguments: str, folder: Path, **options: Any) -> subprocess.Popen[str]:
    (folder / "tiny.toml").write_text(TINY_TOML)
    known = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in known}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**env, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **options.pop("env", {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def read_until(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            return
    raise AssertionError(f"the run ended without {word!r}:\n{process.communicate()[1]}")


def check_stopped(tmp_path: Path, out: str) -> int:
    """The run has said where it stopped, and saved; return the step."""
    steps = [record.step for record in read_log(tmp_path / "log.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert f" after step {steps[-1]}\n" in out
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [f"step-{steps[-1]:08d}"]
    return steps[-1]


@pytest.mark.gloo
def test_a_signal_to_one_process_stops_all_after_the_same_step(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    meeting = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = ("-m", "hyper_parallel.cli", "train", "tiny.toml", *FOREVER, "--tp", "2")
    processes = []
    try:
        for rank in ("0", "1"):
            env = {**meeting, "RANK": rank, "LOCAL_RANK": rank}
            processes.append(start(*command, folder=tmp_path, env=env))
        read_until(processes[0], "step 1/")
        processes[1].send_signal(signal.SIGTERM)
        told = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], told
    out = told[0][0]
    assert "stopped by another rank after step" in out
    assert told[1][0] == "", "only the first rank prints"
    stopped_after = check_stopped(tmp_path, out)
    config = load_config(tmp_path / "tiny.toml").with_changes("checkpoint", {"folder": str(tmp_path / "saved")})
    config = config.with_changes("train", {"steps": stopped_after + 1, "log": str(tmp_path / "again.jsonl")})
    config = config.with_changes("parallel", {"tp": 2})
    assert sim.run(train, 2, args=(config,))[0].first_step == stopped_after + 1


@pytest.mark.sim
def test_a_signal_stops_simulated_ranks_and_a_second_start_goes_on(tmp_path: Path) -> None:
    command = ("-m", "hyper_parallel.cli", "train", "tiny.toml", "--sim", "2")
    process = start(*command, *FOREVER, folder=tmp_path)
    try:
        read_until(process, "step 1/")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    assert "stopped by SIGTERM after step" in out
    stopped_after = check_stopped(tmp_path, out)
    again = start(*command, "--steps", str(stopped_after + 1), folder=tmp_path)
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert f"went on from step {stopped_after}\n" in out
    assert [record.step for record in read_log(tmp_path / "log.jsonl")] == list(range(1, stopped_after + 2))


@pytest.mark.sim
def test_a_disk_without_space_does_not_end_the_run(tmp_path: Path) -> None:
    def no_space() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # bytes of a file; a checkpoint has more

    command = ("-m", "hyper_parallel.cli", "train", "tiny.toml", "--sim", "2", "--save-every", "2")
    process = start(*command, folder=tmp_path, preexec_fn=no_space)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    for step in (2, 4):
        assert f"a checkpoint could not be written: step {step}: cannot save" in out
    assert [record.step for record in read_log(tmp_path / "log.jsonl")] == [1, 2, 3, 4]
    assert not list((tmp_path / "saved").glob("step-*"))
    again = start(*command, folder=tmp_path)  # with space
    out, err = again.communicate(timeout=200)
    assert again.returncode == 0, err
    assert "could not be written" not in out
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["step-00000002", "step-00000004"]


HANGS = """
import sys
from hyper_parallel import cli
from hyper_parallel.trainer import trainer

real = trainer.clip_gradients
steps = 0


def clip(*args):
    global steps
    steps += 1
    while steps == 2:
        pass  # here it hangs
    return real(*args)


trainer.clip_gradients = clip
sys.argv = ["hyper-parallel", "train", "tiny.toml", "--stuck-after", "3"]
cli.main()
"""


def test_a_run_that_hangs_ends_and_says_where(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    process = start("hangs.py", folder=tmp_path)
    _, err = process.communicate(timeout=200)
    assert process.returncode == STUCK_EXIT, err
    assert "watchdog: cannot go on in step 2: it makes no progress" in err
    line = HANGS.splitlines().index("        pass  # here it hangs") + 1
    assert any(f"hangs.py:{number} in clip" in err for number in (line - 1, line)), err
    assert "in clip" in (tmp_path / "stuck" / "rank-0.txt").read_text()
    assert [record.step for record in read_log(tmp_path / "log.jsonl")] == [1]
