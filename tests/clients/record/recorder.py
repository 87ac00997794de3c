"""Figures of each rank's parameters and gradients after each step of an optimizer, of clients that know nothing of it.

Both runs that are compared, simulated and real, write them through torch's global hook of optimizers. In a real process
without a device, `CLIENTS_MAP_DEVICE=cuda` puts on the CPU what the client puts there, as `--map-device` does for
simulated ranks: by the same table, but with torch's own processes, groups and gloo.
"""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Iterator
from functools import wraps
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["begin"]


def begin() -> None:
    """Record all steps that follow in this process, of every rank that it hosts."""
    folder = Path(os.environ["CLIENTS_RECORD"])
    folder.mkdir(parents=True, exist_ok=True)

    def record(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            line = json.dumps(_figures(optimizer))
        with (folder / f"{os.environ.get('RANK', '0')}.jsonl").open("a") as file:
            file.write(line + "\n")

    register_optimizer_step_post_hook(record)
    if "CLIENTS_SIMULATED" in os.environ:
        return
    _seed_as_simulated(int(os.environ["RANK"]))
    if kind := os.environ.get("CLIENTS_MAP_DEVICE"):
        _use_cpu_for(kind)


def _seed_as_simulated(rank: int) -> None:
    """Begin with the random state of a simulated rank: torch begins with the same on each rank, and `sim` does not."""
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.set_state(np.random.RandomState(np.random.MT19937(rank)).get_state())


def _figures(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return two figures of each local tensor, and a checksum of the bits of all."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    found: dict[str, Any] = {"params": [], "grads": []}
    bits = 0
    for kind, tensors in (("params", parameters), ("grads", [each.grad for each in parameters])):
        for tensor in tensors:
            for local in _plain(tensor):
                bits = zlib.crc32(local.reshape(-1).view(torch.uint8).numpy().tobytes(), bits)
                found[kind].append(_norm_and_place(local.reshape(-1).double()))
    return {**found, "bits": bits}


def _norm_and_place(x: torch.Tensor) -> tuple[float, float]:
    """Return the norm of a vector, and its product with a unit vector, which changes if signs or places do."""
    direction = torch.cos(torch.arange(x.numel(), dtype=torch.double))
    return x.norm().item(), (x @ direction / max(direction.norm().item(), 1.0)).item()


def _plain(tensor: Any) -> Iterator[torch.Tensor]:
    """Yield this rank's part of a tensor, and where a library has wrapped it, all tensors that it is made of."""
    if tensor is None:
        return
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        yield from _plain(tensor._local_tensor)
    elif is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor.contiguous()


def _use_cpu_for(kind: str) -> None:
    """Put on the CPU what this process puts on devices of a kind, and use gloo for its backend."""
    from sim.patches import devices

    network = SimpleNamespace(world_size=int(os.environ["WORLD_SIZE"]))
    host = SimpleNamespace(map_device=kind)
    context = SimpleNamespace(rank=int(os.environ["RANK"]), network=network, host=host, device_index=0)
    devices.current_context = lambda: context
    for patch in devices.DEVICE_PATCHES:
        if patch.__name__ == "_mapped_device":
            patch(host)
    devices.MapDevice(kind).__enter__()
    make_group, make_mesh = dist.init_process_group, DeviceMesh.__init__

    @wraps(make_group)
    def init_process_group(backend: Any = None, *args: Any, **options: Any) -> Any:
        return make_group("gloo", *args, **{**options, "device_id": None})

    @wraps(make_mesh)
    def init(self: DeviceMesh, device_type: str, *args: Any, **options: Any) -> None:
        make_mesh(self, devices.mapped(device_type, kind), *args, **options)

    def scales_first(reduce: Any, source: str) -> Any:
        @wraps(reduce)
        def call(*args: Any, **options: Any) -> Any:
            asked = signature(reduce).bind(*args, **options).arguments
            if isinstance(asked.get("op"), dist.ReduceOp) and asked["op"] == dist.ReduceOp.PREMUL_SUM:
                asked[source].mul_(asked["op"].__getstate__()[1])  # gloo has no such operation
                asked["op"] = dist.ReduceOp.SUM
            return reduce(**asked)

        return call

    dist.all_reduce = scales_first(dist.all_reduce, "tensor")
    dist.reduce_scatter_single = scales_first(dist.reduce_scatter_single, "input")
    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
    DeviceMesh.__init__ = init
