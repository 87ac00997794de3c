"""fully_shard on a small transformer, with gradient clipping, compared with one device.

torchrun --nproc-per-node 4 examples/torch_scripts/fsdp2.py
python -m sim run --nproc 4 examples/torch_scripts/fsdp2.py
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

options = argparse.ArgumentParser()
options.add_argument("--width", type=int, default=24)
WIDTH = options.parse_args().width
VOCABULARY, LENGTH, BATCH, STEPS = 50, 10, 8, 5  # BATCH counts the samples of all ranks together


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = {"nhead": 4, "dim_feedforward": WIDTH * 3 // 2, "dropout": 0.0, "batch_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, **layer) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(0, 1))


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch_of(step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def train(model: Model, rank: int, world_size: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        tokens = batch_of(step % 2).chunk(world_size)[rank]
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world_size
        if world_size > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())
        if rank == 0 and dist.get_world_size() == world_size:
            print(f"step {step}  loss {losses[-1]:.6f}")
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    model = make_model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = train(model, dist.get_rank(), dist.get_world_size())
    if dist.get_world_size() > 1:
        alone = train(make_model(), 0, 1)
        torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-6)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
