"""torch's parallelize_module with sequence parallelism around the MLPs, compared with one device.

torchrun --nproc-per-node 4 examples/torch_scripts/tensor_parallel.py
python -m sim run --nproc 4 examples/torch_scripts/tensor_parallel.py
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

options = argparse.ArgumentParser()
options.add_argument("--width", type=int, default=16)
WIDTH = options.parse_args().width
HIDDEN, BATCH, LENGTH, STEPS = 3 * WIDTH, 3, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def train(model: nn.Sequential, show: bool) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))
        y = model(x)
        y = y.full_tensor() if isinstance(y, DTensor) else y
        loss = F.mse_loss(y, x.flip(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if show:
            print(f"step {step}  loss {losses[-1]:.6f}")
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
    plan = {"0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))}
    for block in ("0", "1"):
        plan[f"{block}.norm"] = SequenceParallel()
        plan[f"{block}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"{block}.down"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    model = parallelize_module(make_model(), mesh, plan)
    losses = train(model, show=dist.get_rank() == 0)
    torch.testing.assert_close(losses, train(make_model(), show=False), rtol=1e-4, atol=1e-6)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
