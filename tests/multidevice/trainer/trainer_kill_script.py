"""Kills a rank of a run with SIGKILL, starts the run anew, and prints what came out, one line of JSON per case.

Started by test_trainer_faults.py in a process of its own, which imports torch once and forks from then on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import warnings
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which DTensors import, in every fork if it is not there before
import torch.distributed as dist

from hyper_parallel.core.checkpoint.checkpointer import Checkpointer
from hyper_parallel.models import LlamaConfig
from hyper_parallel.trainer import loop, saving
from hyper_parallel.trainer.config import CheckpointConfig, Config, DataConfig, ParallelConfig, TrainConfig
from hyper_parallel.trainer.loop import train

RUN = Config(
    model=LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    ),
    data=DataConfig(max_bytes=200_000),
    train=TrainConfig(steps=4, batch_size=4, seq_len=8, eval_sequences=4, device="cpu"),
)
KILLED_IN = 3
"""The step in which the rank dies, or after which the save is that it dies in."""
CASES = [  # where, victim, degrees, in the background, ranks that go on
    ("step", 1, {"dp_shard": 2}, False, 2),
    ("data", 1, {"tp": 2}, False, 2),
    ("commit", 0, {"dp_shard": 2}, True, 2),
    ("prune", 0, {"dp_replicate": 2}, False, 2),
    ("step", 0, {"tp": 2}, True, 1),
]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(where: str) -> None:
    """Let this process die in step `KILLED_IN`, when its gradients are there, or at a stage of the save after it."""
    real, steps, saves = loop.clip_gradients, 0, 0

    def clip(*args: Any) -> float:
        nonlocal steps
        steps += 1
        if where == "step" and steps == KILLED_IN:
            die()
        return real(*args)

    def on_stage(name: str) -> None:
        nonlocal saves
        saves += name == "begin"
        if name == where and saves == KILLED_IN:
            die()

    loop.clip_gradients = clip
    saving.Checkpointer = partial(Checkpointer, on_stage=on_stage, timeout=timedelta(seconds=20))


def one_rank(root: Path, name: str, rank: int, world_size: int, config: Config, where: str | None) -> None:
    """Train as one rank, and write down what came of it."""
    warnings.simplefilter("ignore")
    if where is not None:
        arm(where)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{root}/store-{name}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=20),
    )
    result = train(config)
    outcome = {"first": result.first_step, "losses": result.losses, "valid": result.valid_loss}
    (root / f"{name}-{rank}").write_text(json.dumps({**outcome, "failures": result.save_failures}))


def ranks(root: Path, name: str, world_size: int, config: Config, killed: tuple[str, int] | None = None) -> list[Any]:
    """Fork the ranks, and return how they ended: what they wrote, or the number of the signal that killed them."""
    children = []
    for rank in range(world_size):
        child = os.fork()
        if not child:
            try:
                one_rank(root, name, rank, world_size, config, killed[0] if killed and killed[1] == rank else None)
            except BaseException as error:
                (root / f"{name}-{rank}").write_text(json.dumps(type(error).__name__))
            finally:
                os._exit(0)
        children.append(child)
    ends = [os.waitpid(child, 0)[1] for child in children]
    return [end or json.loads((root / f"{name}-{rank}").read_text()) for rank, end in enumerate(ends)]


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # so that all that is imported is imported before the forks
        once = CheckpointConfig(folder=folder)
        train(replace(RUN, checkpoint=once).with_changes("train", {"steps": 1}))
    for where, victim, degrees, background, left in CASES:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            full = replace(RUN, parallel=ParallelConfig(**degrees))
            keep = CheckpointConfig(folder=f"{folder}/run", every=1, keep=2, background=background)
            config = replace(full, checkpoint=keep)
            again = config if left == 2 else replace(config, parallel=ParallelConfig())
            outcome = {
                "case": [where, victim, background, left],
                "whole": ranks(root, "whole", 2, full)[0],
                "killed": ranks(root, "killed", 2, config, killed=(where, victim)),
                "again": ranks(root, "again", left, again)[0],
                "left": sorted(path.name for path in (root / "run").iterdir()),
            }
            print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    sys.exit(main())
