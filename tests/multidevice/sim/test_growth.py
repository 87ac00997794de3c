"""Growth of long runs: none in memory, threads, open files and process groups after the first hundred steps.

Each case runs in a process of its own, which prints what it has after `FIRST` rounds and after all.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import warm
from torch import multiprocessing, nn

import sim
from hyper_parallel import fully_shard, hsdp
from hyper_parallel.core.checkpoint.checkpointer import Checkpointer
from hyper_parallel.core.checkpoint.optimizer import model_tensors, optimizer_tensors
from hyper_parallel.models import LlamaConfig
from hyper_parallel.trainer import loop
from hyper_parallel.trainer.config import Config, DataConfig, TrainConfig

FIRST = 200
MIB = 8  # that the allocator may add; what it keeps for large tensors comes and goes
OBJECTS = 280  # fewer than one per round, in the case with the fewest

ROUNDS = {
    "fully_shard": 10_000,
    "hsdp": 10_000,
    "fully_shard on gloo": 10_000,
    "hsdp on gloo": 10_000,
    "training": 2_000,
    "worlds": 1_000,
    "worlds that fail": 1_000,
    "saves": 500,
    "saves on gloo": 500,
    "groups": 2_000,  # on gloo torch itself keeps an empty list of each
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="what a process has is read from /proc")
@pytest.mark.parametrize("case", ROUNDS)
def test_nothing_grows(case: str, tmp_path: Path) -> None:
    command = [sys.executable, __file__, case, str(ROUNDS[case])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, last = (json.loads(line) for line in done.stdout.splitlines())
    print(case, ROUNDS[case], first, last)
    for what, allowed in {"MiB": MIB, "objects": OBJECTS, "threads": 0, "files": 0, "groups": 0}.items():
        assert last[what] - first[what] <= allowed, f"{what}: {first}, then {last}"


@pytest.mark.tier("test")
def test_what_grows_is_seen(tmp_path: Path) -> None:
    """The twin that has to fail: memory, objects, a file and a group for each round."""
    done = warm.run([sys.executable, __file__, "leak", "300"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, last = (json.loads(line) for line in done.stdout.splitlines())
    assert last["MiB"] - first["MiB"] > MIB
    assert last["objects"] - first["objects"] > OBJECTS
    assert last["files"] - first["files"] == last["groups"] - first["groups"] == 100


# -- in the process of a case ---------------------------------------------------------------------------------------


class Meter:
    """Prints, from the first rank, what the process has at the two rounds that are compared."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def __call__(self, done: int) -> None:
        """Note that so many rounds are done."""
        if done not in (FIRST, self.rounds) or (dist.is_initialized() and dist.get_rank() != 0):
            return
        gc.collect()
        has = {
            "MiB": round(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20, 1),
            "objects": len(gc.get_objects()),
            "threads": len(os.listdir("/proc/self/task")),
            "files": len(os.listdir("/proc/self/fd")),
            "groups": len(dist.distributed_c10d._world.pg_map),
        }
        print(json.dumps(has), flush=True)


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def wrapped(engine: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(Block(), Block())
    size = dist.get_world_size()
    if engine == "hsdp":
        model = hsdp(model, 2, threshold=0, optimizer_level="level3")
    else:
        mesh = dist.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 8, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def steps(engine: str, meter: Meter) -> None:
    pair = wrapped(engine)
    for number in range(meter.rounds):
        step(*pair)
        meter(number + 1)


def saves(meter: Meter) -> None:
    model, optimizer = wrapped("fully_shard")
    with Checkpointer("saved", keep_last=2, async_save=True) as files:
        for number in range(meter.rounds):
            step(model, optimizer)
            state, _ = optimizer_tensors([model], optimizer)
            files.save(number, {**model_tensors([model]), **state}, {"round": number})
            files.wait()
            meter(number + 1)


def groups(meter: Meter) -> None:
    """A group of two ranks, as each Checkpointer makes one; the others only hear of it."""
    for number in range(meter.rounds):
        group = dist.new_group([0, 1], backend="gloo")
        if dist.get_rank() < 2:
            dist.all_reduce(torch.ones(2), group=group)
            dist.destroy_process_group(group)
        meter(number + 1)


def one_step() -> None:
    step(*wrapped("fully_shard"))


def fails() -> None:
    dist.all_reduce(torch.ones(3))
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(3))


def worlds(body: Callable[[], None], meter: Meter) -> None:
    for number in range(meter.rounds):
        with suppress(sim.Deadlock, sim.RankLost):
            sim.run(body, 4, seed=number, faults=[sim.faults.Kill(2, at=number % 5)] if number % 3 == 1 else ())
        meter(number + 1)


def training(meter: Meter) -> None:
    shape = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    )
    run = TrainConfig(steps=meter.rounds, batch_size=4, seq_len=16, device="cpu", log="log.jsonl")
    config = replace(Config(), model=shape, train=run, data=DataConfig(max_bytes=200_000))
    loop.KEPT = 100
    with sim.world(4, keep_events=100) as world:
        world.run(loop.train, (config, lambda record: meter(record.step)))


def leak(meter: Meter) -> None:
    kept = []
    for number in range(meter.rounds):
        kept.append((dist.new_group([0]), open(__file__), torch.ones(2**16), [[] for _ in range(9)]))  # noqa: SIM115
        meter(number + 1)


def on_gloo(rank: int, store: str, case: str, meter: Meter) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    BODIES[case](meter)
    dist.destroy_process_group()


BODIES: dict[str, Callable[[Meter], None]] = {
    "fully_shard": lambda meter: steps("fully_shard", meter),
    "hsdp": lambda meter: steps("hsdp", meter),
    "saves": saves,
    "groups": groups,
    "leak": leak,
}


def main(case: str, meter: Meter) -> None:
    torch.set_num_threads(1)
    name, _, gloo = case.partition(" on ")
    if gloo:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(on_gloo, (f"{folder}/store", name, meter), nprocs=2)
    elif name == "training":
        training(meter)
    elif name.startswith("worlds"):
        worlds(fails if name.endswith("fail") else one_step, meter)
    else:
        with sim.world(4, keep_events=100) as world:
            world.run(BODIES[name], (meter,))


if __name__ == "__main__":
    main(sys.argv[1], Meter(int(sys.argv[2])))
