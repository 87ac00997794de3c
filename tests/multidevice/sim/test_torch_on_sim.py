"""torch's own parallelism runs unchanged on simulated ranks, and gives what one device gives."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sim

pytestmark = pytest.mark.tier("test")

WIDTH, BATCH, STEPS = 12, 16, 3


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 20), nn.ReLU(), nn.Linear(20, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)]
    return nn.Sequential(*layers)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, 1, generator=generator)


def train(model: nn.Module, part: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> list[float]:
    """Losses of a few steps, averaged over the ranks, each of which takes its part of the batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        x, y = (part(t) for t in batch(step))
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(whole)
            whole /= dist.get_world_size()
        losses.append(whole.item())
    return losses


def mine(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    return {k.removeprefix("module."): v.detach() for k, v in state.items()}


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build()
    return train(model), full(model)


def check(found: tuple[list[float], dict[str, torch.Tensor]], alone) -> None:
    torch.testing.assert_close(found[0], alone[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1], alone[1], rtol=1e-4, atol=1e-6)


@sim.ranks(4, backends=("sim",))
def test_ddp(ctx, alone):
    model = nn.parallel.DistributedDataParallel(build())
    check((train(model, mine), full(model)), alone)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["fsdp", "hsdp"])
@sim.ranks(4, backends=("sim",))
def test_fsdp2(ctx, alone, shape):
    names = ("dp",) if len(shape) == 1 else ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = build()
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    check((train(model, mine), full(model)), alone)


@sim.ranks(4, backends=("sim",))
def test_tensor_parallel(ctx, alone):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = parallelize_module(build(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    check((train(model), full(model)), alone)


@sim.ranks(3, backends=("sim",))
def test_pipeline(ctx):
    model, (x, y) = build(), batch(0)
    whole = copy.deepcopy(model)
    loss = F.mse_loss(whole(x), y)
    loss.backward()
    bounds = [(0, 2), (2, 4), (4, 5)]
    part = nn.Sequential(*list(model)[slice(*bounds[ctx.rank])])
    stage = PipelineStage(part, ctx.rank, 3, ctx.device)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=F.mse_loss)
    losses: list[torch.Tensor] = []
    if ctx.rank == 0:
        schedule.step(x)
    elif ctx.rank == 2:
        schedule.step(target=y, losses=losses)
        torch.testing.assert_close(torch.stack(losses).mean(), loss)
    else:
        schedule.step()
    wanted = nn.Sequential(*list(whole)[slice(*bounds[ctx.rank])])
    assert len(list(part.parameters())) > 0
    for found, expected in zip(part.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


@sim.ranks(4, backends=("sim",))
def test_checkpoint(ctx, tmp_path):
    """Saved by four ranks as FSDP, loaded on a 2 x 2 mesh."""
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(build(), mesh=line)
    train(model, mine)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=tmp_path)
    other = build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    fully_shard(other, mesh=grid)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(other, state["model"])
    torch.testing.assert_close(full(other), full(model), rtol=0, atol=0)
    assert any(p.abs().sum() > 0 for p in full(other).values())


@sim.ranks(4, backends=("sim",))
def test_optimizer_over_tensor_parallel_and_fsdp(ctx, alone):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(build(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    rank = mesh.get_local_rank("dp")
    check((train(model, lambda x: x.chunk(2)[rank]), full(model)), alone)
