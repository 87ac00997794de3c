"""A training loop written by hand: torch, and `import hyper_parallel` for what is parallel.

Runs unchanged on real ranks and on simulated ones:

    torchrun --nproc-per-node 2 examples/train_loop.py
    python -c "import sim, train_loop; sim.run(train_loop.main, 8)"        (in examples/)
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import hyper_parallel as hp

STEPS, BATCH, FEATURES, HIDDEN = 8, 16, 32, 64  # BATCH counts the samples of all ranks together


def build_model() -> nn.Sequential:
    torch.manual_seed(0)  # the same weights on every rank
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 1)
    )


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, FEATURES, generator=generator)
    return x, x[:, :4].prod(dim=1, keepdim=True) + x.sum(dim=1, keepdim=True)


def main() -> list[float]:
    platform = hp.get_platform()
    platform.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group(platform.backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    # Two copies of the weights where the ranks are even enough, each split over the other half of the ranks.
    replicas = 2 if world_size % 2 == 0 and world_size > 2 else 1
    dims = hp.ParallelDims(dp_replicate=replicas, dp_shard=-1, world_size=world_size)
    mesh = dims.build_mesh(platform.device_type)

    model = build_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            hp.fully_shard(layer, mesh=mesh)
    hp.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    losses = []
    for step in range(STEPS):
        x, y = (t.chunk(world_size)[rank].to(platform.device()) for t in batch_of(step))
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
        if rank == 0:
            print(f"step {step}  loss {losses[-1]:.6f}")
    return losses


if __name__ == "__main__":
    main()
    dist.barrier()  # nobody leaves while others still communicate
    dist.destroy_process_group()
