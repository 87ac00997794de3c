"""`examples/tensor_parallel.py`, unchanged: proved, on simulated ranks, and under torchrun with gloo processes."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import warm

import sim
from hyper_parallel import init_parameters
from hyper_parallel.models import Llama, llama_loss

pytestmark = pytest.mark.tier("full")

SCRIPT = Path(__file__).parents[4] / "examples" / "tensor_parallel.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tensor_parallel_example", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_losses(example: ModuleType) -> list[float]:
    """The naive twin: the whole batch on one device."""
    with torch.device("meta"):
        model = Llama(example.CONFIG)
    init_parameters(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses = []
    for step in range(example.STEPS):
        rows = example.batch_of(step)
        loss = llama_loss(model(rows[:, :-1]), rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.sim
@pytest.mark.parametrize("world_size", [2, 8])
def test_simulated_ranks_train_like_one_device(world_size: int) -> None:
    example = load()
    expected = plain_losses(example)
    results = sim.run(example.main, world_size)
    assert all(losses == results[0] for losses in results), "every rank must see the same mean"
    assert results[0] == pytest.approx(expected, rel=1e-3)
    assert results[0][-1] < 0.7 * results[0][0]


@pytest.mark.sim
def test_the_plan_is_proved(capsys: pytest.CaptureFixture[str]) -> None:
    load().verify()
    assert capsys.readouterr().out.startswith("the model on dp=2, tp=2 computes what it computes on one device")


@pytest.mark.tier("deep")
@pytest.mark.gloo
def test_torchrun_prints_losses_that_fall() -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = warm.run([*torchrun, str(SCRIPT)], env=env)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert losses == pytest.approx(sim.run(load().main, world_size=4)[0], rel=1e-4)
