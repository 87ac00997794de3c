"""A checkpoint of torch.distributed.checkpoint: `dcp.py ENGINE save` on four ranks, `dcp.py ENGINE load` on two."""

from __future__ import annotations

import sys

import tiny
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

engine, task = sys.argv[1:3]
if engine == "torch":
    from torch.distributed.fsdp import fully_shard
else:
    from hyper_parallel import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = tiny.llama()
mesh = init_device_mesh("cpu", (world,))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
steps = range(tiny.STEPS)
if task == "load":
    parameters, moments = get_state_dict(model, optimizer)
    state = {"model": parameters, "optimizer": moments}
    dcp.load(state, checkpoint_id="checkpoint")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
for step in steps[: len(steps) // 2] if task == "save" else steps[len(steps) // 2 :]:
    ids = tiny.mine(step, rank, world)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        print("loss", total.item() / world)
if task == "save":
    parameters, moments = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": moments}, checkpoint_id="checkpoint")
dist.destroy_process_group()
