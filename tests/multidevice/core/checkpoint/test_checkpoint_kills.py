"""Ranks that die while they save, really and simulated: the last complete checkpoint is there, whole, and is found."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import warm
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import sim
from hyper_parallel.core.checkpoint import Checkpointer

SCRIPT = Path(__file__).with_name("checkpoint_kill_script.py")
COMPLETE = ("committed", "prune", "done")  # stages after which the second save counts


@pytest.mark.tier("full")
@pytest.mark.gloo
def test_processes_killed_at_every_stage_of_a_save() -> None:
    done = warm.run([sys.executable, str(SCRIPT)])
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) == 19
    for outcome in outcomes:
        step, stage, victim, _ = outcome["case"]
        survivor = 1 - victim
        assert outcome["ends"] == [9 if rank == victim else 0 for rank in range(2)], outcome  # SIGKILL, and it went on
        assert outcome["right"], outcome
        assert outcome["value"] == (2 if stage in COMPLETE else 1), outcome
        if step == 2:
            assert outcome["latest"] == f"step-0000000{outcome['value']}", outcome
        assert outcome["left"] == ["step-00000003"], f"leftovers: {outcome}"
        told = outcome["told"][f"s-{survivor}"]
        assert ("could not talk to each other" in told) == (stage not in ("prune", "done")), outcome


def full(step: int) -> torch.Tensor:
    return torch.arange(21.0).reshape(7, 3) * step


def save_twice(root: Path, background: bool) -> list[str | None]:
    mesh = init_device_mesh("cpu", (3,))
    checkpointer = Checkpointer(root, keep_last=1, async_save=background)
    errors = []
    for step in (1, 2):
        dist.barrier()
        w = distribute_tensor(full(step), mesh, [Shard(0)], src_data_rank=None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saved = checkpointer.save(step, {"w": w}, {"step": step})
            saved = checkpointer.wait() if background else saved
        errors.append(saved.error)
    return errors


def load_alone(root: Path) -> int:
    w = torch.zeros(7, 3)
    with Checkpointer(root) as checkpointer:
        step = checkpointer.load({"w": w})["step"]
        assert torch.equal(w, full(step))
        assert checkpointer.latest().name == f"step-{step:08d}"
    return step


@pytest.mark.tier("full")
@pytest.mark.sim
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
def test_simulated_ranks_killed_at_every_operation(tmp_path: Path, victim: int, background: bool) -> None:
    """The rank dies at its first operation, its second, ... until it lives through both saves."""
    found = []
    for at in range(60):
        root = tmp_path / str(at)
        with sim.world(3) as world:
            world.faults.kill(victim, at=at)
            try:
                results = world.run(save_twice, args=(root, background))
            except sim.RankLost:
                results = None  # in the barrier before the second save, or when the mesh was made
            died = bool(world.faults.log)
        complete = root.is_dir() and any(path.name.startswith("step-") for path in root.iterdir())
        found.append(load_alone(root) if complete else 0)
        if not died:
            assert results == [[None, None]] * 3
            break
        for errors in results or []:  # None is the victim's
            for error in errors or []:
                assert error is None or ("could not talk to each other" in error and "RankLost" in error)
    else:
        pytest.fail("the rank never lived")
    assert found == sorted(found), f"a later death lost more: {found}"
    assert {0, 1, 2} <= set(found[:-1]), f"not killed at all stages: {found}"
    assert found[-1] == 2
