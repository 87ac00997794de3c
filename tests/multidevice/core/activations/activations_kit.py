"""A model of blocks, and its training with a policy of activation memory by some engine."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import hyper_parallel as hp
from hyper_parallel import checkpoint_blocks, fully_shard
from hyper_parallel.platform import get_platform


class Block(nn.Module):
    """A feed-forward with a residual; keeps its input, what is normed, and the four times wider two."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Some of them, one after the other."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def wrapped(model: Blocks, engine: str, device: str) -> nn.Module:
    """The model as an engine makes it: "none", "ours", "hsdp", "replicated" (twice) or "fsdp2"."""
    if engine == "none":
        return model
    ranks = dist.get_world_size()
    if engine == "hsdp":
        for cell in (*model.layers, model):
            hp.hsdp(cell, shard_size=ranks, threshold=0, optimizer_level="level3")
        return model
    sizes = (2, ranks // 2) if engine == "replicated" else (ranks,)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    shard: Any = fsdp.fully_shard if engine == "fsdp2" else fully_shard
    for layer in model.layers:
        shard(layer, mesh=mesh)
    shard(model, mesh=mesh)
    return model


def trained(
    device: str,
    policy: Any,
    engine: str,
    depth: int = 4,
    width: int = 16,
    rows: int = 12,
    steps: int = 2,
    compiled: str = "nothing",
) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses of all ranks' rows, the whole parameters, and the most bytes that a step after the first has allocated.

    On one rank with "none" it is what training is; ranks have a part of the rows each. What is compiled is "nothing",
    the "insides" of the blocks, the "blocks" as they are wrapped by the policy, or the "model".
    """
    torch.manual_seed(0)
    model = Blocks(depth, width).to(device)
    if compiled == "insides":
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    checkpoint_blocks(model, policy)
    if compiled == "blocks":
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    net = wrapped(model, engine, device)
    if compiled == "model":
        net.compile(backend="aot_eager")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    platform, losses, peak = get_platform(device), [], 0
    for step in range(steps):
        batch = torch.randn(rows, width, generator=torch.Generator().manual_seed(step))
        x = batch[rank * rows // ranks : (rank + 1) * rows // ranks].to(device)
        if step and platform.has_own_memory:
            gc.collect()  # what was there before the parameters were split
            platform.reset_peak_memory()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if platform.has_own_memory:
        peak = platform.memory_stats().peak_allocated
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return losses, [each.detach().cpu() for each in whole], peak
