"""`examples/train_loop.py`, unchanged: on simulated ranks, and under torchrun with gloo processes."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import warm

import sim

SCRIPT = Path(__file__).parents[3] / "examples" / "train_loop.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")  # --standalone picks a free port


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_loop_example", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_losses(example: ModuleType) -> list[float]:
    """The naive twin: the whole batch on one device, without hyper_parallel."""
    import torch
    import torch.nn.functional as F

    state = torch.get_rng_state()
    model = example.build_model()
    torch.set_rng_state(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for step in range(example.STEPS):
        x, y = example.batch_of(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.tier("test")
@pytest.mark.sim
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_simulated_ranks_train_like_one_device(world_size: int, capsys: pytest.CaptureFixture[str]) -> None:
    example = load()
    expected = plain_losses(example)
    results = sim.run(example.main, world_size)
    assert all(losses == results[0] for losses in results), "every rank must see the same mean"
    assert results[0] == pytest.approx(expected, rel=1e-4)
    assert results[0][-1] < 0.8 * results[0][0]
    assert capsys.readouterr().out.count("step ") == example.STEPS, "only the first rank prints"


@pytest.mark.tier("full")
@pytest.mark.gloo
def test_torchrun_prints_the_losses_of_simulated_ranks() -> None:
    command = [*TORCHRUN, "--nproc-per-node", "2", str(SCRIPT)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = warm.run(command, env=env)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [int(line[1]) for line in lines] == list(range(len(lines)))
    losses = sim.run(load().main, world_size=2)[0]
    assert [float(line[3]) for line in lines] == pytest.approx(losses, rel=1e-4)
