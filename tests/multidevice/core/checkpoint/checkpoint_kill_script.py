"""Kills processes with SIGKILL while they save, and prints what is left of their checkpoints, one line of JSON each.

Started by test_checkpoint_kills.py in a process of its own, which imports torch once and forks from then on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # which DTensors import, in every fork if it is not there before
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hyper_parallel.core.checkpoint import Checkpointer, folders, load_checkpoint, save_checkpoint

CASES = [  # the step that is saved second; stage, victim, in the background
    *((2, stage, 0, False) for stage in ("begin", "data", "sync", "record", "commit", "committed", "prune", "done")),
    *((2, stage, 1, False) for stage in ("begin", "data", "sync", "done")),
    *((2, stage, 0, True) for stage in ("data", "commit", "prune")),
    (2, "sync", 1, True),
    (1, "commit", 0, False),
    (1, "rename 2", 0, False),
    (1, "committed", 0, False),
]


def full(step: int) -> torch.Tensor:
    return torch.arange(21.0).reshape(7, 3) * step


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def one_rank(root: Path, rank: int, case: tuple[int, str, int, bool]) -> None:
    """Save step 1, then die while saving another, or tell how that has ended for the one who lives."""
    step, stage, victim, background = case
    armed = False
    renames = 0

    def on_stage(name: str) -> None:
        if armed and (name, rank) == (stage, victim):
            die()

    def rename(old, new):
        nonlocal renames
        renames += armed
        if stage == f"rename {renames}":
            die()
        real(old, new)

    real, folders.os.rename = os.rename, rename
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/store", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    mesh = init_device_mesh("cpu", (2,))
    checkpointer = Checkpointer(
        root / "run", keep_last=1, async_save=background, timeout=timedelta(seconds=20), on_stage=on_stage
    )

    def save(step: int, value: int):
        w = distribute_tensor(full(value), mesh, [Shard(0)], src_data_rank=None)
        saved = checkpointer.save(step, {"w": w, "step": torch.tensor(value)}, {"value": value})
        return checkpointer.wait() if background else saved

    assert save(1, 1).error is None
    armed = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = save(step, 2)
    (root / f"s-{rank}").write_text(saved.error or "no error")


def forked(body, *args) -> int:
    child = os.fork()
    if child:
        return child
    try:
        body(*args)
    except BaseException as error:
        (args[0] / f"r-{args[1]}").write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)


def after(root: Path) -> dict[str, object]:
    """What the next run finds, alone: the value that the latest checkpoint has; what it leaves after a save."""
    tensors = {"w": torch.zeros(7, 3), "step": torch.tensor(0)}
    with Checkpointer(root / "run", keep_last=1) as checkpointer:
        found = checkpointer.latest().name
        extra = checkpointer.load(tensors)
        right = torch.equal(tensors["w"], full(extra["value"])) and tensors["step"].item() == extra["value"]
        checkpointer.save(3, tensors)
    return {
        "latest": found,
        "value": extra["value"],
        "right": right,
        "left": sorted(path.name for path in (root / "run").iterdir()),
    }


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # so that all that is imported is imported before the forks
        save_checkpoint(f"{folder}/c", {"w": torch.zeros(1)})
        load_checkpoint(f"{folder}/c", {"w": torch.zeros(1)})
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            children = [forked(one_rank, root, rank, case) for rank in range(2)]
            ends = [os.waitpid(child, 0)[1] for child in children]
            told = {path.name: path.read_text() for path in sorted([*root.glob("s-*"), *root.glob("r-*")])}
            print(json.dumps({"case": case, "ends": ends, "told": told, **after(root)}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
