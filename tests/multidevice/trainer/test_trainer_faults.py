"""Whole runs in which something goes wrong outside: ranks die, the disk is full, a scheduler says stop, a rank hangs.

A run that is started anew goes on from the last complete checkpoint, and ends with the numbers of one that was never
interrupted.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import warm

import sim
from hyper_parallel.cli.kit import LOST_FOLDER, NOT_SAVED
from hyper_parallel.models import LlamaConfig
from hyper_parallel.trainer.config import CheckpointConfig, Config, DataConfig, ParallelConfig, TrainConfig, load_config
from hyper_parallel.trainer.guards import StopRequest
from hyper_parallel.trainer.loop import train
from hyper_parallel.trainer.report import StepRecord, TrainResult, read_log
from hyper_parallel.trainer.watchdog import STUCK_EXIT

pytestmark = pytest.mark.tier("full")

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
    done = warm.run([sys.executable, str(SCRIPT)])
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) == 5, done.stderr
    for outcome in outcomes:
        where, victim, background, left = outcome["case"]
        full, again = outcome["whole"], outcome["again"]
        assert outcome["killed"][victim] == signal.SIGKILL, outcome
        survivor = outcome["killed"][1 - victim]
        if survivor != "RankLostError":  # it had left the last step behind before the other one died in the background
            assert background, f"nobody goes on alone: {outcome}"
            assert survivor["failures"], outcome
        done_before = again["first"] - 1
        if where == "step" and background:  # the second checkpoint may still be on its way
            assert done_before in (1, 2), outcome
        else:
            assert done_before == (3 if where == "prune" else 2), outcome  # at "prune" the third one is complete
        if left == 2:
            assert again["losses"] == full["losses"][done_before:], outcome
            assert again["valid"] == full["valid"], outcome
        else:
            assert again["losses"] == pytest.approx(full["losses"][done_before:], rel=1e-5), outcome
            assert again["valid"] == pytest.approx(full["valid"], rel=1e-5), outcome
        assert again["failures"] == []
        assert outcome["left"] == ["step-00000003", "step-00000004"], f"leftovers: {outcome}"


def numbers(result: TrainResult) -> list[tuple[float, float, float | None]]:
    return [(record.loss, record.grad_norm, record.valid_loss) for record in result.steps]


@pytest.mark.tier("full", each=2)
@pytest.mark.sim
@pytest.mark.parametrize("background", [False, True])
def test_a_simulated_run_survives_a_kill_anywhere(tmp_path: Path, background: bool) -> None:
    """The rank dies at operations that are spread over the whole run, saves included."""
    parallel = ParallelConfig(dp_shard=2)
    full = sim.run(train, 2, args=(replace(TINY, parallel=parallel),))[0]
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
        assert numbers(again) == numbers(full)[again.first_step - 1 :], f"killed at operation {at}"
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
    # What is compiled would be cut off where files have a limit.
    no_bytecode = {"PYTHONDONTWRITEBYTECODE": "1"} if "file_size_limit" in options else {}
    return warm.WarmPopen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**env, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **no_bytecode, **options.pop("env", {})},
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
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


def start_ranks(number: int, *arguments: str, folder: Path, **options: Any) -> list[subprocess.Popen[str]]:
    """Start ranks as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    size = str(number)
    meeting = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [{**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]
    return [start(*arguments, folder=folder, env=env, **options) for env in ranks]


@contextmanager
def two_ranks(folder: Path, *options: str) -> Iterator[list[subprocess.Popen[str]]]:
    processes = start_ranks(2, "-m", "hyper_parallel.cli", "train", "tiny.toml", *FOREVER, *options, folder=folder)
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.gloo
def test_a_signal_to_one_process_stops_all_after_the_same_step(tmp_path: Path) -> None:
    with two_ranks(tmp_path, "--tp", "2") as processes:
        read_until(processes[0], "step 1/")
        processes[1].send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    out = outputs[0][0]
    assert "stopped by another rank after step" in out
    assert outputs[1][0] == "", "only the first rank prints"
    stopped_after = check_stopped(tmp_path, out)
    config = load_config(tmp_path / "tiny.toml").with_changes("checkpoint", {"folder": str(tmp_path / "saved")})
    config = config.with_changes("train", {"steps": stopped_after + 1, "log": str(tmp_path / "again.jsonl")})
    config = config.with_changes("parallel", {"tp": 2})
    assert sim.run(train, 2, args=(config,))[0].first_step == stopped_after + 1


@pytest.mark.tier("test")
@pytest.mark.gloo
@pytest.mark.parametrize("have_met", [False, True])
def test_a_rank_that_waits_for_one_that_stands_still_ends_when_asked_to_stop(tmp_path: Path, have_met: bool) -> None:
    with two_ranks(tmp_path) as processes:
        if not have_met:
            processes[1].send_signal(signal.SIGSTOP)
        read_until(processes[0], "step 1/" if have_met else "batch: ")
        processes[1].send_signal(signal.SIGSTOP)
        processes[0].send_signal(signal.SIGTERM)
        _, err = processes[0].communicate(timeout=120)
    assert processes[0].returncode == STUCK_EXIT, err
    assert "watchdog: rank 0 ends: SIGTERM asks it to stop, and it makes no progress in step " in err
    assert "another rank is gone, or stuck" in err


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
def test_a_second_run_in_a_folder_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    command = ("-m", "hyper_parallel.cli", "train", "tiny.toml")
    first = start(*command, *FOREVER, "--save-every", "1", folder=tmp_path)
    try:
        read_until(first, "step 1/")  # which has been saved by then
        second = start(*command, "--sim", "2", "--log-file", "second.jsonl", folder=tmp_path)
        _, err = second.communicate(timeout=120)
        assert second.returncode == 1, err
        assert "error: cannot save to saved: another run is using it\n" in err
        assert f", process {first.pid}, since " in err
        assert "Traceback" not in err
        assert not (tmp_path / "second.jsonl").exists(), "not one step"
    finally:
        first.kill()
        first.communicate()
    (saved,) = sorted((tmp_path / "saved").glob("step-*"))[-1:]
    third = start(*command, "--sim", "2", "--steps", str(int(saved.name[5:]) + 1), folder=tmp_path)
    out, err = third.communicate(timeout=120)
    assert third.returncode == 0, err
    assert f"went on from step {int(saved.name[5:])}\n" in out
    assert all(path.name.startswith("step-") for path in (tmp_path / "saved").iterdir()), "nothing is left behind"


@pytest.mark.tier("test")
@pytest.mark.sim
@pytest.mark.parametrize("background", [False, True])
def test_a_run_whose_folder_goes_away_ends_with_a_code_of_its_own(tmp_path: Path, background: bool) -> None:
    options = ("--sim", "2", *FOREVER, "--save-every", "1", *["--background"] * background)
    run = start("-m", "hyper_parallel.cli", "train", "tiny.toml", *options, folder=tmp_path)
    try:
        read_until(run, "step 1/")
        (tmp_path / "saved").rename(tmp_path / "moved")
        _, err = run.communicate(timeout=120)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == LOST_FOLDER, err
    assert (
        "error: cannot save to saved: this path leads to another folder than at the start\n  at the start: dev" in err
    )
    assert "Traceback" not in err
    assert not (tmp_path / "saved").exists(), "it is not made anew"
    assert background or list((tmp_path / "moved").glob("step-*"))


NO_SPACE = 20_000  # bytes of a file; a checkpoint has more


def last_line(text: str) -> str:
    return text.rstrip().splitlines()[-1]


@pytest.mark.sim
def test_a_disk_without_space_does_not_end_the_run_but_is_its_exit_code(tmp_path: Path) -> None:
    command = ("-m", "hyper_parallel.cli", "train", "tiny.toml", "--sim", "2", "--save-every", "2")
    process = start(*command, folder=tmp_path, file_size_limit=NO_SPACE)
    out, err = process.communicate(timeout=200)
    assert process.returncode == NOT_SAVED, err
    for step in (2, 4):
        assert f"a checkpoint could not be written: step {step}: cannot save" in out
    assert last_line(err) == "error: the last save failed; nothing is saved in saved"
    assert [record.step for record in read_log(tmp_path / "log.jsonl")] == [1, 2, 3, 4]
    assert not list((tmp_path / "saved").glob("step-*"))
    again = start(*command, folder=tmp_path)  # with space
    out, err = again.communicate(timeout=200)
    assert again.returncode == 0, err
    assert "could not be written" not in out
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["step-00000002", "step-00000004"]
    short = start(*command, "--steps", "6", "--background", folder=tmp_path, file_size_limit=NO_SPACE)
    out, err = short.communicate(timeout=200)
    assert short.returncode == NOT_SAVED, err
    assert last_line(err) == "error: the last save failed; step 4 is safe, and the last in saved"


@pytest.mark.gloo
def test_all_processes_tell_by_their_exit_code_that_the_last_save_failed(tmp_path: Path) -> None:
    command = ("-m", "hyper_parallel.cli", "train", "tiny.toml", "--background", "--stuck-after", "60")
    processes = start_ranks(2, *command, folder=tmp_path, file_size_limit=NO_SPACE)
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [NOT_SAVED] * 2, outputs
    assert last_line(outputs[0][1]) == "error: the last save failed; nothing is saved in saved"


HANGS = """
import sys
from hyper_parallel import cli
from hyper_parallel.trainer import loop

real = loop.clip_gradients
steps = 0


def clip(*args):
    global steps
    steps += 1
    while steps == 2:
        pass  # here it hangs
    return real(*args)


loop.clip_gradients = clip
sys.argv = ["hyper-parallel", "train", "tiny.toml", "--stuck-after", "3"]
cli.main()
"""


@pytest.mark.tier("test")
def test_a_run_that_hangs_ends_and_says_where(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    process = start("hangs.py", folder=tmp_path)
    _, err = process.communicate(timeout=200)
    assert process.returncode == STUCK_EXIT, err
    assert "watchdog: cannot go on in step 2: it makes no progress" in err
    line = HANGS.splitlines().index("        pass  # here it hangs") + 1
    assert any(f"hangs.py:{number} in clip" in err for number in (line - 1, line)), err
    assert "in clip" in (tmp_path / "stuck" / "rank-0.txt").read_text()
    assert not (tmp_path / "stuck" / "flight").exists(), "it has communicated with nobody"
    assert [record.step for record in read_log(tmp_path / "log.jsonl")] == [1]


# -- torchrun starts the ranks anew ------------------------------------------------------------------------------------

FAULTS = """
import json, os, resource, signal, sys, threading, time
from functools import partial
from pathlib import Path

import torch

from hyper_parallel import cli
from hyper_parallel.trainer import loop, saving

rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
kind, who, where = json.loads(os.environ["FAULT"])
arguments = sys.argv[1:]
Path(f"pid-{attempt}-{rank}").write_text(str(os.getpid()))
victims = {"rank 0": "0", "another": "1", "all": rank}[who]
steps = saves = 0


def out_of_memory():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
    torch.empty(1 << 40).fill_(1.0)


def raises():
    raise KeyError("drawn")


def exits():
    on_main_thread = threading.current_thread() is threading.main_thread()
    (sys.exit if on_main_thread else os._exit)(3)


def fault():
    Path(f"fault-{rank}").write_text(str(time.time()))
    if kind.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, kind))
    {"raise": raises, "exit": exits, "memory": out_of_memory}[kind]()


class Loss(loop.ShareOfLoss):
    def __call__(self, *args):
        global steps
        loss = super().__call__(*args)
        steps += 1
        at = 1 if where == "first step" else 3
        if steps == at and where in ("forward", "first step"):
            fault()
        elif steps == at and where == "backward":
            loss.register_hook(lambda gradient: fault())
        elif steps == at and where == "load":
            raise KeyError("so that the next attempt loads")
        return loss


class Checkpointer(saving.Checkpointer):
    def save(self, step, *args, **kwargs):
        if where == "save" and step == 3 and kind in ("raise", "memory"):
            fault()  # what is raised later, while files are written, does not end the run
        return super().save(step, *args, **kwargs)

    def load(self, *args, **kwargs):
        if where == "load" and attempt == 1:
            fault()
        return super().load(*args, **kwargs)


def on_stage(name):
    global saves
    saves += name == "begin"
    if name == "data" and saves == 3:
        fault()


if rank == victims and attempt < (2 if where == "load" else 1):
    loop.ShareOfLoss = Loss if attempt == 0 else loop.ShareOfLoss
    stages = {"on_stage": on_stage} if where == "save" and kind not in ("raise", "memory") else {}
    saving.Checkpointer = partial(Checkpointer, **stages)
if kind == "SIGSTOP":
    arguments += ["--stuck-after", "12"]  # a machine with other work may take some seconds to begin
sys.argv = ["hyper-parallel", "train", "tiny.toml", "--save-every", "1", "--batch-size", "6", *arguments]
cli.main()
"""
KINDS = ("raise", "exit", "SIGKILL", "SIGSEGV", "SIGSTOP", "memory")
WHO = ("rank 0", "another", "all")
WHERE = ("first step", "forward", "backward", "save", "load")
DEGREES = (("--dp-shard", "2"), ("--tp", "2"), ("--dp-shard", "2", "--background"), ("--dp-shard", "3"))
Fault = tuple[str, str, str]


def drawn(number: int) -> tuple[Fault, tuple[str, ...]]:
    """Return the fault of a number, and the run that it befalls. Nobody is left to notice that all are stopped."""
    draw = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    return (kind, draw.choice(WHO[: 2 if kind == "SIGSTOP" else 3]), draw.choice(WHERE)), draw.choice(DEGREES)


def torchrun(
    folder: Path, fault: Fault | None, *options: str, restarts: int = 3, ranks: int = 2
) -> subprocess.Popen[str]:
    (folder / "faults.py").write_text(FAULTS)
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    env = {"FAULT": json.dumps(fault or ("none", "all", "none")), "TORCHELASTIC_ERROR_FILE": ""}
    return start(*command, "--max-restarts", str(restarts), "faults.py", *options, folder=folder, env=env)


def is_alive(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def seconds_until_all_had_ended(folder: Path, attempt: int, run: subprocess.Popen[str]) -> float:
    """Wait for the fault, and then for the end of all ranks that ran; return the time from the first to the second."""
    while not (faults := list(folder.glob("fault-*"))):
        assert run.poll() is None, run.communicate()[1]
        time.sleep(0.02)
    pids = [int(path.read_text()) for path in folder.glob(f"pid-{attempt}-*")]
    while any(map(is_alive, pids)):
        time.sleep(0.02)
    return time.time() - min(float(path.read_text()) for path in faults)


def losses(folder: Path) -> list[tuple[int, float, float, float | None]]:
    return [(line.step, line.loss, line.grad_norm, line.valid_loss) for line in read_log(folder / "log.jsonl")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Any]:
    """Return what gives the numbers of a run that nothing befalls."""

    @cache
    def numbers_of(degrees: tuple[str, ...]) -> list[tuple[int, float, float, float | None]]:
        folder = tmp_path_factory.mktemp("whole")
        command = ("-m", "hyper_parallel.cli", "train", "tiny.toml", "--save-every", "1", "--batch-size", "6", *degrees)
        ranks = start_ranks(int(degrees[1]), *command, folder=folder)
        told = [rank.communicate(timeout=120) for rank in ranks]
        assert [step for step, *_ in losses(folder)] == [1, 2, 3, 4], told
        return losses(folder)

    return lambda degrees: numbers_of(degrees[:2])


def kill_with_ranks(host: subprocess.Popen[str]) -> None:
    """Kill a torchrun and its ranks, which are in sessions of their own and would go on."""
    if host.poll() is None:
        ranks = Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text().split()
        for pid in (host.pid, *map(int, ranks)):
            os.kill(pid, signal.SIGKILL)
    host.wait()


def check_resumes(folder: Path, fault: Fault, degrees: tuple[str, ...], full: Any) -> str:
    """A run that a fault befalls goes on by itself, to the same end; return what it has printed."""
    run = torchrun(folder, fault, *degrees, ranks=int(degrees[1]))
    try:
        seconds = seconds_until_all_had_ended(folder, 1 if fault[2] == "load" else 0, run)
        out, err = run.communicate(timeout=240)
    finally:
        kill_with_ranks(run)
    print(f"| {' | '.join(fault)} | {' '.join(degrees)} | {seconds:.1f} |")
    assert run.returncode == 0, out + err
    assert losses(folder) == full(degrees), out + err
    went_on = fault[2] != "first step"
    assert ("went on from step " in out) == went_on, out + err
    assert not list((folder / "saved").glob(".*")), "leftovers"
    return err


@pytest.mark.tier("full", each=3)
@pytest.mark.gloo
@pytest.mark.parametrize(
    ("fault", "degrees"),
    [
        (("SIGKILL", "another", "backward"), ("--dp-shard", "2")),
        (("raise", "rank 0", "forward"), ("--tp", "2")),
        (("exit", "all", "first step"), ("--dp-shard", "2")),
    ],
)
def test_torchrun_starts_the_ranks_anew_and_they_go_on(
    tmp_path: Path, fault: Fault, degrees: tuple[str, ...], uninterrupted: Any
) -> None:
    err = check_resumes(tmp_path, fault, degrees, uninterrupted)
    if fault[0] == "SIGKILL":  # in one line, without gloo's traceback
        assert "error: rank 0 cannot go on in step 3: rank 1 does not answer\n" in err, err
        assert "Traceback" not in err
    if fault[0] == "raise":
        assert "error: rank 1 cannot go on in step 3: rank 0 failed: KeyError: 'drawn'\n" in err, err


HOLDS = """
import os, sys
import torch
import torch.distributed as dist
from hyper_parallel.core.checkpoint import Checkpointer
from hyper_parallel.core.common.groups import init_process_group, token_of_torchrun
who, attempt = sys.argv[1], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
init_process_group("gloo")
open(f"{who}-{attempt}-{dist.get_rank()}", "w").write(token_of_torchrun())
checkpointer = Checkpointer("saved", on_error="raise")
checkpointer.acquire()
checkpointer.save(2 * attempt, {"w": torch.zeros(3)})
if attempt == 0:
    open(f"here-{dist.get_rank()}").read()  # until the other torchrun has ended
    checkpointer.save(1, {"w": torch.zeros(3)})
    os._exit(3)
checkpointer.close()
"""


@pytest.mark.gloo
def test_another_torchrun_of_the_same_name_never_takes_the_lease_of_a_live_one(tmp_path: Path) -> None:
    (tmp_path / "holds.py").write_text(HOLDS)
    for rank in range(2):
        os.mkfifo(tmp_path / f"here-{rank}")

    def begin(who: str) -> subprocess.Popen[str]:
        meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "456")
        options = ("--nproc-per-node", "2", "--max-restarts", "1", *meeting, "holds.py", who)
        return start("-m", "torch.distributed.run", *options, folder=tmp_path, env={"TORCHELASTIC_ERROR_FILE": ""})

    first = begin("first")
    try:
        gates = [(tmp_path / f"here-{rank}").open("w") for rank in range(2)]  # once both ranks have saved
        second = begin("second")
        _, err = second.communicate(timeout=120)
        assert second.returncode == 1
        assert "CheckpointError: cannot save to saved: another run is using it\n" in err, err
        assert (tmp_path / "second-1-0").exists(), "it has been started anew, and refused again"
        for gate in gates:
            gate.close()
        _, err = first.communicate(timeout=120)
    finally:
        kill_with_ranks(first)
    assert first.returncode == 0, err
    there = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert there == [f"step-0000000{step}" for step in range(3)], "its second attempt has taken the lease at once"
    tokens = {who: {path.read_text() for path in tmp_path.glob(f"{who}-*-*")} for who in ("first", "second")}
    assert [len(tokens["first"]), len(tokens["second"]), len(tokens["first"] | tokens["second"])] == [1, 1, 2]
    assert "" not in tokens["first"] | tokens["second"]


LOSES = """
import os
import torch
import torch.distributed as dist
from hyper_parallel.core.checkpoint import Checkpointer
from hyper_parallel.core.common.groups import init_process_group
init_process_group("gloo")
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
checkpointer = Checkpointer("saved", on_error="raise")
try:
    checkpointer.save(1, {"w": torch.zeros(3)})
    if dist.get_rank() == 0:
        os.rename("saved", "elsewhere")
    checkpointer.save(2, {"w": torch.zeros(3)})
except RuntimeError as error:
    open(f"{attempt}-{dist.get_rank()}", "w").write(f"{type(error).__name__}: {error}")
    raise SystemExit(73)
"""


@pytest.mark.tier("test")
@pytest.mark.gloo
def test_an_attempt_whose_folder_an_earlier_one_has_lost_does_not_begin_anew(tmp_path: Path) -> None:
    (tmp_path / "loses.py").write_text(LOSES)
    options = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "loses.py")
    process = start("-m", "torch.distributed.run", *options, folder=tmp_path, env={"TORCHELASTIC_ERROR_FILE": ""})
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    said = {path.name: path.read_text() for path in tmp_path.glob("?-?")}
    assert sorted(said) == [f"{attempt}-{rank}" for attempt in range(3) for rank in range(2)]
    blame = "LeaseLostError: cannot save to saved: this path leads to another folder than at the start\n"
    assert all(text.startswith(blame) for text in said.values()), said
    assert [path.name for path in (tmp_path / "elsewhere").glob("step*")] == ["step-00000001"]
    assert not list((tmp_path / "saved").iterdir()), "nothing is saved where no earlier checkpoint is"


@pytest.mark.tier("test")
@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("number", range(20))
def test_drawn_faults(tmp_path: Path, number: int, uninterrupted: Any) -> None:
    fault, degrees = drawn(number)
    check_resumes(tmp_path, fault, degrees, uninterrupted)


@pytest.mark.tier("test")
def test_all_kinds_of_faults_are_drawn() -> None:
    faults, degrees = zip(*map(drawn, range(20)), strict=True)
    for index, names in enumerate((KINDS, WHO, WHERE)):
        assert {fault[index] for fault in faults} == set(names)
    assert set(degrees) == set(DEGREES)


@pytest.mark.sim
def test_degrees_that_are_given_hold_and_dp_shard_takes_what_is_left(tmp_path: Path) -> None:
    """A run that is started anew with other ranks: the rule of docs/training.md."""
    keep = CheckpointConfig(folder=str(tmp_path), every=1)
    config = replace(TINY, parallel=ParallelConfig(tp=2), checkpoint=keep)
    layouts, found = [], []
    for ranks, steps in ((4, 1), (2, 2), (4, 3)):
        result = sim.run(train, ranks, args=(config.with_changes("train", {"steps": steps}),))[0]
        layouts.append(result.layout)
        found += result.losses
    assert layouts == ["4 ranks: dp_shard=2 x tp=2", "2 ranks: tp=2", "4 ranks: dp_shard=2 x tp=2"]
    full = train(TINY.with_changes("train", {"steps": 3}))
    assert found == pytest.approx(full.losses, rel=1e-4)
    for ranks in (1, 3):
        with pytest.raises(ValueError, match=rf"world_size={ranks} is not divisible by .* = 2\n.*\n  try: "):
            sim.run(train, ranks, args=(config,))


def wait_until(holds: Callable[[], bool], run: subprocess.Popen[str], what: str) -> None:
    for _ in range(6000):
        if holds():
            return
        assert run.poll() is None, f"ended before {what}"
        time.sleep(0.02)
    raise AssertionError(f"never {what}")


@pytest.mark.tier("test")
@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("comes", [False, True])
def test_a_host_goes_and_comes(tmp_path: Path, comes: bool) -> None:
    """A torchrun per host: two ranks, then one; or one before, which counts no restart when the other one comes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "faults.py").write_text(FAULTS)
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf")
    command = ("-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1", *meeting)
    command = (*command, f"last_call_timeout={1 if comes else 25}", "--max-restarts", "3", "faults.py", *FOREVER)
    log, out = tmp_path / "log.jsonl", tmp_path / "out"
    env = {"FAULT": json.dumps(("none", "all", "none"))}
    if comes:  # else torch 2.13 does not tell a new process where its store is
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    options = {"folder": tmp_path, "env": env}

    def steps() -> int:
        return len(log.read_text().splitlines()) if log.exists() else 0

    def meets(ranks: str, times: int) -> None:
        wait_until(lambda: out.read_text().count(f"; {ranks}") == times, hosts[0], f"{ranks} meet")
        done = steps()
        wait_until(lambda: steps() > done + 2, hosts[0], f"steps of {ranks}")

    hosts = []
    try:
        with out.open("w") as file:
            hosts.append(start(*command, **options, stdout=file, stderr=file))
        if comes:
            meets("1 rank", 1)
        hosts.append(start(*command, **options, stderr=subprocess.DEVNULL))
        meets("2 ranks: dp_shard=2", 1)
        kill_with_ranks(hosts[1])
        meets("1 rank", 1 + comes)
        os.kill(hosts[0].pid, signal.SIGTERM)
        hosts[0].communicate(timeout=60)
    finally:
        for host in hosts:
            kill_with_ranks(host)
    found = losses(tmp_path)
    assert [step for step, *_ in found] == list(range(1, len(found) + 1))
    config = replace(load_config(tmp_path / "tiny.toml"), checkpoint=CheckpointConfig())
    config = config.with_changes("train", {"steps": int(FOREVER[1]), "batch_size": 6, "log": str(tmp_path / "whole")})
    expected = losses_of_the_first(len(found), config)
    assert [loss for _, loss, *_ in found] == pytest.approx(expected, rel=1e-3)


def losses_of_the_first(steps: int, config: Config) -> list[float]:
    """Return the losses with which a run of one rank begins."""
    stop, seen = StopRequest(), []

    def on_step(record: StepRecord) -> None:
        seen.append(record.loss)
        if len(seen) == steps:
            stop.request("enough")

    train(config, on_step, stop)
    return seen[:steps]  # who asks in the last step is heard after the next
