"""DistributedDataParallel on a sampler's shards, compared with one device on the whole batches.

torchrun --nproc-per-node 4 examples/torch_scripts/ddp.py
python -m sim run --nproc 4 examples/torch_scripts/ddp.py
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

options = argparse.ArgumentParser()
options.add_argument("--width", type=int, default=16)
FEATURES = options.parse_args().width
SAMPLES, EPOCHS, LR = 96, 4, 0.02
PER_RANK = 6


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 2 * FEATURES), nn.Tanh(), nn.Linear(2 * FEATURES, 1))


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    return TensorDataset(x, x[:, :3].sum(dim=1, keepdim=True))


def train_alone(world_size: int) -> list[float]:
    """The same samples in the same order: the batches of all ranks, one after the other, are one batch."""
    data, model, losses = make_data(), make_model(), []
    samplers = [DistributedSampler(data, world_size, rank, seed=0) for rank in range(world_size)]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    for epoch in range(EPOCHS):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        shards = [torch.tensor(list(sampler)).split(PER_RANK) for sampler in samplers]
        for parts in zip(*shards, strict=True):
            x, y = data[torch.cat(parts)]
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), dist.get_world_size()
    data = make_data()
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=PER_RANK, sampler=sampler)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        losses.append(mean.item())
        if rank == 0:
            print(f"epoch {epoch}  loss {losses[-1]:.6f}")
    torch.testing.assert_close(losses, train_alone(world_size), rtol=1e-4, atol=1e-6)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
