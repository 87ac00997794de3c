"""Tensor and sequence parallelism by a plan, with `fully_shard` over the ranks that are left.

The model is made on the meta device, and its weights are filled after they were split: the same ones on every mesh.
Prove the plan first, then run it; the same file on simulated ranks and on real ones:

    python examples/tensor_parallel.py --verify
    torchrun --nproc-per-node 4 examples/tensor_parallel.py
    python -m sim run --nproc 8 examples/tensor_parallel.py
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import hyper_parallel as hp
from hyper_parallel.models import Llama, LlamaConfig, llama_loss, llama_plan

STEPS, BATCH, LENGTH, TP = 8, 8, 32, 2  # BATCH counts the sequences of all ranks together
CONFIG = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, max_seq_len=LENGTH)


def batch_of(step: int) -> torch.Tensor:
    """Sequences that count up by one from a random start."""
    start = torch.randint(0, CONFIG.vocab_size, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return (start + torch.arange(LENGTH + 1)) % CONFIG.vocab_size


def main() -> list[float]:
    platform = hp.get_platform()
    platform.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group(platform.backend)
    dims = hp.ParallelDims(tp=TP, dp_shard=-1, world_size=dist.get_world_size())
    mesh = dims.build_mesh(platform.device_type)

    with torch.device("meta"):
        model = Llama(CONFIG)
    model = hp.shard_module(model, mesh["tp"], llama_plan(CONFIG, mesh["tp"]))
    hp.init_parameters(model, seed=0)
    rank = 0
    if dims.fsdp_enabled:
        rank = mesh["dp_shard"].get_local_rank()
        for block in model.layers:
            hp.fully_shard(block, mesh=mesh["dp_shard"])
        hp.fully_shard(model, mesh=mesh["dp_shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)

    losses = []
    for step in range(STEPS):
        rows = batch_of(step).chunk(dims.dp_size)[rank].to(platform.device())
        # Units that hold DTensors add gradients up, so that the loss of this rank's rows is its share of the mean.
        loss = llama_loss(model(rows[:, :-1]), rows[:, 1:]) / dims.dp_size
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = hp.full_tensor(loss.detach())
        if dims.fsdp_enabled:
            dist.all_reduce(total, group=mesh["dp_shard"].get_group())
        losses.append(total.item())
        if dist.get_rank() == 0:
            print(f"step {step}  loss {losses[-1]:.6f}")
    return losses


def verify() -> None:
    """Compare every module, gradient and update with one device, on simulated ranks."""
    import sim

    mesh = {"dp": 2, "tp": TP}
    rows = batch_of(0)
    plan = llama_plan(CONFIG, mesh)
    report = sim.verify_plan(
        lambda: Llama.build(CONFIG), [rows[:, :-1]], mesh, plan, loss_fn=lambda out, _: llama_loss(out, rows[:, 1:])
    )
    print(report)


if __name__ == "__main__":
    if "--verify" in sys.argv:
        verify()
    else:
        main()
        dist.barrier()  # nobody leaves while others still communicate
        dist.destroy_process_group()
