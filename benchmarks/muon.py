"""Work and bytes of Muon's step on sharded parameters, beside `torch.optim.Muon` on one device.

FLOPs of the busiest rank are counted by torch, bytes by the simulator's trace; CPU time is that of the busiest rank's
thread, beside one device's in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

import sim
from benchmarks.engine_counts import Traffic
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.fully_shard.api import fully_shard, whole_parameters
from hyper_parallel.core.optim.matrices import Matrix, Sharing, share
from hyper_parallel.core.optim.muon import Muon
from hyper_parallel.core.redistribute.bounds import lower_bound
from hyper_parallel.models.llama import Llama, LlamaConfig

SMALL = LlamaConfig(vocab_size=256, hidden_size=256, intermediate_size=768, num_hidden_layers=8)
LARGE = {  # rows and columns of the matrices of a block, and blocks
    "llama3-8b": ([(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)], 32),
    "llama3-70b": ([(8192, 8192)] * 2 + [(1024, 8192)] * 2 + [(28672, 8192)] * 2 + [(8192, 28672)], 80),
}


class Taken(NamedTuple):
    """What a step takes, of the rank with the most: FLOPs, seconds of CPU time, bytes received, and the least bytes."""

    flops: int
    seconds: float
    received: int
    least: int


def table() -> str:
    """Work, CPU time and bytes as a Markdown table."""
    lines = [
        "| matrices | ranks | work, of one device's / n | CPU time, likewise | received, bytes | least, bytes |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for whole, layout in ((False, "split"), (True, "on one rank each")):
            for ranks in (2, 4, 8):
                flops, seconds = _alone()
                taken = small_step(ranks, whole=whole)
                lines.append(
                    f"| 8 blocks of 256, {layout} | {ranks} | {taken.flops * ranks / flops:.3f} | "
                    f"{taken.seconds * ranks / seconds:.2f} | {taken.received:,} | {taken.least:,} |"
                )
    finally:
        torch.set_num_threads(threads)
    for name, (shapes, blocks) in LARGE.items():
        for ranks in (8, 32, 64, 256):
            shares = f"{balance(shapes * blocks, ranks):.3f}, {owned_balance(shapes, blocks, ranks):.3f}"
            lines.append(f"| {name}, who computes what only: split, on one rank each | {ranks} | {shares} | | | |")
    return "\n".join(lines)


def small_step(ranks: int, *, whole: bool = False) -> Taken:
    """Take steps of a small Llama on simulated ranks, and return what one takes after the first.

    Args:
        ranks: how many.
        whole: each parameter of the blocks has an owner; otherwise all are split.
    """
    made: dict[int, tuple[list[nn.Parameter], Muon]] = {}

    def build() -> None:
        model = Llama.build(SMALL)
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        placement = whole_parameters(model.layers, ranks) if whole else None
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, shard_placement_fn=placement)
        params = _matrices(fully_shard(model, mesh=mesh))
        made[dist.get_rank()] = params, Muon(params)
        for number, param in enumerate(params):
            if param.device_mesh.get_coordinate() is not None:  # type: ignore[attr-defined]
                param.grad = torch.full_like(param, number + 1.0)
        made[dist.get_rank()][1].step()

    def step() -> tuple[int, int]:
        params, optimizer = made[dist.get_rank()]
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        return counter.get_total_flops(), sum(_least(params, sharing) for sharing in share(params) if sharing.ranks)

    with sim.world(ranks) as world:
        world.run(build)
        world.trace.clear()
        found = world.run(step)
        received = Traffic.of(world.trace).received
        seconds = max(world.run(lambda: _seconds(made[dist.get_rank()][1].step)))
    return Taken(max(flops for flops, _ in found), seconds, received, max(least for _, least in found))


def _seconds(step: Callable[[], object], times: int = 5) -> float:
    """The least CPU time of a step, of the calling thread."""
    found = []
    for _ in range(times):
        start = time.thread_time()
        step()
        found.append(time.thread_time() - start)
    return min(found)


def balance(shapes: Sequence[tuple[int, int]], ranks: int) -> float:
    """Return the work of the busiest of n ranks, over a n-th of all work."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        parts = [torch.empty(-(-rows // ranks), columns, device="meta") for rows, columns in shapes]
        (sharing,) = share(
            [
                DTensor.from_local(
                    part, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
                )
                for part, shape in zip(parts, shapes, strict=True)
            ]
        )
    finally:
        dist.destroy_process_group()
    work = [0] * ranks
    for matrix, owner in zip(sharing.matrices, sharing.owners, strict=True):
        work[owner] += matrix.flops()
    return max(work) * ranks / sum(work)


def owned_balance(shapes: Sequence[tuple[int, int]], blocks: int, ranks: int) -> float:
    """Return the work of the busiest of n ranks that own matrices whole, over a n-th of all work."""
    layers = nn.ModuleList(
        nn.ParameterList(nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes) for _ in range(blocks)
    )
    placement, work = whole_parameters(layers, ranks), [0] * ranks
    for param in layers.parameters():
        work[placement(param).rank] += Matrix(0, 0, (param.shape[0], param.shape[1]), ()).flops()
    return max(work) * ranks / sum(work)


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for name, param in model.named_parameters() if param.ndim == 2 and name.startswith("layers.")]


def _alone() -> tuple[int, float]:
    """FLOPs and seconds of CPU time of a step on one device, by torch's optimizer."""
    params = _matrices(Llama.build(SMALL))
    optimizer = torch.optim.Muon(params)
    for number, param in enumerate(params):
        param.grad = torch.full_like(param, number + 1.0)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    return counter.get_total_flops(), _seconds(optimizer.step)


def _least(params: Sequence[torch.Tensor], sharing: Sharing) -> int:
    """Return the least bytes that the calling rank receives, there and back, by redistribution's bound."""
    rank, total = dist.get_rank(), 0
    for matrix, owner in zip(sharing.matrices, sharing.owners, strict=True):
        layout = Layout.of(params[matrix.param])
        alone = Layout((1,), ("owner",), (sharing.ranks[owner],))()
        for src, dst in ((layout, alone), (alone, layout)):
            total += int(lower_bound(src, dst, matrix.shape, torch.bfloat16)[rank])
    return total
