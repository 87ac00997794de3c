"""Save with torch.distributed.checkpoint in the middle of training, load on half as many ranks, and go on.

torchrun --nproc-per-node 4 examples/torch_scripts/checkpoint.py
python -m sim run --nproc 4 examples/torch_scripts/checkpoint.py
"""

import argparse
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

options = argparse.ArgumentParser()
options.add_argument("--width", type=int, default=10)
WIDTH, BATCH = options.parse_args().width, 8


def make_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH + 4), nn.ReLU(), nn.Linear(WIDTH + 4, 1))


def sharded(seed: int, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard(make_model(seed), mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Every rank sees the whole batch, so that the losses do not depend on how many there are."""
    losses = []
    for step in steps:
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = F.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp(prefix="checkpoint-") if rank == 0 else ""]
    dist.broadcast_object_list(folder)

    model, optimizer = sharded(0, init_device_mesh("cpu", (world_size,)))
    losses = train(model, optimizer, range(3))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder[0])
    losses += train(model, optimizer, range(3, 6))

    members = list(range((world_size + 1) // 2))
    mesh, group = DeviceMesh("cpu", members), dist.new_group(members)
    if rank in members:  # other weights, half as many shards; only then what was saved
        model, optimizer = sharded(7, mesh)
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=folder[0], process_group=group)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        torch.testing.assert_close(train(model, optimizer, range(3, 6)), losses[3:], rtol=1e-4, atol=1e-6)

    alone = make_model(0)
    torch.testing.assert_close(
        losses, train(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2), range(6)), rtol=1e-4, atol=1e-6
    )
    if rank == 0:
        for step, loss in enumerate(losses):
            print(f"step {step}  loss {loss:.6f}")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
