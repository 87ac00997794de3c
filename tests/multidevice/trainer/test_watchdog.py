"""A run of real processes in which one rank is stuck: all processes end by themselves, and say where it is."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import warm
from torch._C import _distributed_c10d

from hyper_parallel.trainer.watchdog import STUCK_EXIT

PROGRAM = """
import ctypes, os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn
from hyper_parallel import fully_shard
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.watchdog import RunWatchdog, default_store

port, rank, world_size, stuck = map(int, sys.argv[1:5])
mode, folder = sys.argv[5:]
GRACE = {"loop": 60.0, "lock": 1.0, "gone": 1.0, "skips": 60.0}[mode]


class Units(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(fully_shard(nn.Linear(6, 6)) for _ in range(4))
        self.head = nn.Linear(6, 6)

    def forward(self, x, count):
        return self.head(sum(layer(x) for layer in self.layers[:count]))


class Model(nn.Module):
    step = 0

    def forward(self, x):
        if mode == "skips":
            units(torch.ones(2, 6), 3 if self.step == 2 and rank == stuck else 4).sum().backward()
        elif self.step == 2 and rank == stuck:
            if mode == "gone":
                os.kill(os.getpid(), 19)  # SIGSTOP
            if mode == "lock":
                ctypes.PyDLL(None).sleep(10_000)  # PyDLL keeps the lock
            while True:
                pass  # here it hangs
        return x * 2


# As without torchrun: rank 0 holds the store, and takes it along when it ends.
store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timedelta(seconds=300), wait_for_workers=False)
print(store.port, flush=True)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
model = Model()
units = fully_shard(Units()) if mode == "skips" else None
kept = dict(rank=rank, world_size=world_size, store=default_store(), grace_s=GRACE)
kept["recording"] = get_platform("cpu").flight_recording
with RunWatchdog(1.0, folder, **kept) as watchdog:
    for step in range(4):
        model.step = step
        watchdog.beat(step, "training")
        x = model(torch.ones(1))
        dist.all_reduce(x)
"""
LOCKED = "                ctypes.PyDLL(None).sleep(10_000)  # PyDLL keeps the lock"


@dataclass
class Ended:
    """How a rank ended: its exit code, and what it wrote to stderr."""

    code: int
    said: str


def run_stuck(tmp_path: Path, mode: str, world_size: int, stuck: int) -> list[Ended]:
    """Start the ranks, and wait until all have ended by themselves, but for one that is stopped for good."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    ranks: list[subprocess.Popen[str]] = []
    port = "0"
    try:
        for rank in range(world_size):
            about = [port, str(rank), str(world_size), str(stuck), mode, str(tmp_path / "stuck")]
            command = [sys.executable, str(script), *about]
            ranks.append(warm.WarmPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            if rank == 0:
                assert ranks[0].stdout is not None
                port = ranks[0].stdout.readline().strip()
        waited = [rank for rank in range(world_size) if mode != "gone" or rank != stuck]
        said = {rank: ranks[rank].communicate(timeout=120)[1] for rank in waited}
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [Ended(process.returncode, said.get(rank, "")) for rank, process in enumerate(ranks)]


def line_of(text: str) -> int:
    return PROGRAM.splitlines().index(text) + 1


@pytest.mark.tier("test")
def test_an_endless_loop_is_found_and_all_processes_end(tmp_path: Path) -> None:
    stuck = 0
    ranks = run_stuck(tmp_path, "loop", 3, stuck)
    said = "".join(rank.said for rank in ranks)
    assert [rank.code for rank in ranks] == [STUCK_EXIT] * 3, said
    verdict = (tmp_path / "stuck" / "verdict.txt").read_text()
    assert said.count(verdict) == 1, "one rank tells it all"
    assert f"cannot go on in step 2: rank {stuck} does not come to where the others wait for it" in verdict
    at = [line_of("            while True:"), line_of("                pass  # here it hangs")]
    assert any(f"train.py:{line} in forward" in verdict for line in at), verdict
    assert verdict.count("in all_reduce") == 2
    assert f"{tmp_path / 'stuck'}/rank-{stuck}.txt" in verdict
    for rank in range(3):
        stacks = (tmp_path / "stuck" / f"rank-{rank}.txt").read_text()
        assert ("in forward" if rank == stuck else "in all_reduce") in stacks
        assert rank == stuck or f"rank {rank}, step 2 (training)" in verdict
        assert "thread 'watchdog'" in stacks
    if not hasattr(_distributed_c10d, "_dump_fr_trace_json"):
        assert "last collectives" not in verdict, "torch 2.11 does not record gloo's"
        return
    assert f"last collectives, for torchfrtrace: {tmp_path / 'stuck'}/flight" in verdict
    records = [pickle.loads((tmp_path / "stuck" / "flight" / f"rank_{rank}").read_bytes()) for rank in range(3)]
    names = [[each["profiling_name"] for each in record["entries"]] for record in records]
    assert [found.count("gloo:all_reduce") for found in names] == [2, 3, 3], "the others wait in step 2"
    groups = [record["pg_config"][record["entries"][-1]["process_group"][0]]["ranks"] for record in records]
    assert groups == ["[0, 1, 2]"] * 3, "which torchfrtrace looks up, and gloo leaves out"


def test_ranks_that_have_not_as_many_units_name_those_in_which_they_wait(tmp_path: Path) -> None:
    ranks = run_stuck(tmp_path, "skips", 2, stuck=1)
    said = "".join(rank.said for rank in ranks)
    assert [rank.code for rank in ranks] == [STUCK_EXIT] * 2, said
    verdict = (tmp_path / "stuck" / "verdict.txt").read_text()
    rows = re.findall(r"  rank (\d), step 2 .* in wait, last (?:gather|reduction) of layers\.\d\n", verdict)
    assert rows == ["0", "1"], verdict


@pytest.mark.parametrize("mode", ["lock", "gone"])
def test_a_process_that_cannot_run_is_named_by_the_others(tmp_path: Path, mode: str) -> None:
    ranks = run_stuck(tmp_path, mode, 2, stuck=1)
    assert ranks[0].code == STUCK_EXIT
    assert "cannot go on in step 2: rank 1 does not answer" in ranks[0].said
    assert "rank 0, step 2 (training)" in ranks[0].said
    if mode == "lock":
        assert ranks[1].code == 1, "C code has ended it"
        assert f'train.py", line {line_of(LOCKED)} in forward' in ranks[1].said


def test_the_others_end_where_the_process_with_the_store_cannot_run(tmp_path: Path) -> None:
    ranks = run_stuck(tmp_path, "gone", 2, stuck=0)
    assert ranks[1].code == STUCK_EXIT
    first, *rest = ranks[1].said.splitlines()
    assert first.startswith("watchdog: no progress of rank 1, step 2 (training), "), "told before anybody is asked"
    assert "in all_reduce" in first
    assert rest[-1] == "  the other ranks could not be asked: rank 0 does not answer, which holds the ranks' store"
    assert "in all_reduce" in (tmp_path / "stuck" / "rank-1.txt").read_text()
