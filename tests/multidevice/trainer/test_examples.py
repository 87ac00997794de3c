"""`examples/train_loop.py` and `tensor_parallel.py`, unchanged: on simulated ranks, and under torchrun with gloo."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import warm

import sim
from hyper_parallel import init_parameters
from hyper_parallel.models import Llama, llama_loss

FOLDER = Path(__file__).parents[3] / "examples"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")  # --standalone picks a free port


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_example", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_losses(example: ModuleType, name: str) -> list[float]:
    """The naive twin: the whole batch on one device."""
    if name == "train_loop":
        state = torch.get_rng_state()
        model: Any = example.build_model()
        torch.set_rng_state(state)
    else:
        with torch.device("meta"):
            model = Llama(example.CONFIG)
        init_parameters(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses = []
    for step in range(example.STEPS):
        batch = example.batch_of(step)
        if name == "train_loop":
            loss = F.mse_loss(model(batch[0]), batch[1])
        else:
            loss = llama_loss(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.tier("full")
@pytest.mark.sim
@pytest.mark.parametrize(
    ("name", "world_size"),
    [*(("train_loop", size) for size in (1, 2, 4, 8)), *(("tensor_parallel", n) for n in (2, 8))],
)
def test_simulated_ranks_train_like_one_device(name: str, world_size: int, capsys: pytest.CaptureFixture[str]) -> None:
    example = load(name)
    expected = plain_losses(example, name)
    results = sim.run(example.main, world_size)
    assert all(losses == results[0] for losses in results), "every rank must see the same mean"
    assert results[0] == pytest.approx(expected, rel=1e-4 if name == "train_loop" else 1e-3)
    assert results[0][-1] < (0.8 if name == "train_loop" else 0.7) * results[0][0]
    assert capsys.readouterr().out.count("step ") == example.STEPS, "only the first rank prints"


@pytest.mark.tier("full")
@pytest.mark.sim
def test_the_plan_is_proved(capsys: pytest.CaptureFixture[str]) -> None:
    load("tensor_parallel").verify()
    assert capsys.readouterr().out.startswith("the model on dp=2, tp=2 computes what it computes on one device")


@pytest.mark.tier("full", each=2)
@pytest.mark.gloo
@pytest.mark.parametrize(("name", "ranks"), [("train_loop", 2), ("tensor_parallel", 4)])
def test_torchrun_prints_the_losses_of_simulated_ranks(name: str, ranks: int) -> None:
    command = [*TORCHRUN, "--nproc-per-node", str(ranks), str(FOLDER / f"{name}.py")]
    done = warm.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [int(line[1]) for line in lines] == list(range(len(lines)))
    losses = sim.run(load(name).main, world_size=ranks)[0]
    assert [float(line[3]) for line in lines] == pytest.approx(losses, rel=1e-4)
