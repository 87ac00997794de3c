"""A 1F1B pipeline, one stage per rank, compared with the whole model on one device.

torchrun --nproc-per-node 4 examples/torch_scripts/pipeline.py
python -m sim run --nproc 4 examples/torch_scripts/pipeline.py
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

options = argparse.ArgumentParser()
options.add_argument("--width", type=int, default=12)
WIDTH = options.parse_args().width
BATCH, MICROBATCHES, STEPS = 16, 8, 4


def make_layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, dims=1).sigmoid()


def train_alone(stages: int) -> list[float]:
    model = nn.Sequential(*make_layers(stages))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(STEPS):
        x, y = batch_of(step)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    rank, stages = dist.get_rank(), dist.get_world_size()
    module = make_layers(stages)[rank]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    stage = PipelineStage(module, rank, stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)
    losses = []
    for step in range(STEPS):
        x, y = batch_of(step)
        parts: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x, **({"target": y, "losses": parts} if stages == 1 else {}))
        elif rank == stages - 1:
            schedule.step(target=y, losses=parts)
        else:
            schedule.step()
        optimizer.step()
        loss = torch.stack([part.detach() for part in parts]).mean() if parts else torch.zeros(())
        dist.broadcast(loss, src=stages - 1)
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step}  loss {losses[-1]:.6f}")
    torch.testing.assert_close(losses, train_alone(stages), rtol=1e-4, atol=1e-6)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
