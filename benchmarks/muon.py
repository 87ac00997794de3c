"""Work and bytes of Muon's step on sharded parameters, beside `torch.optim.Muon` on one device.

Both are counted and not timed: FLOPs of the busiest rank by torch's counter, bytes by the simulator's trace.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from hyper_parallel.core.fully_shard.api import fully_shard
from hyper_parallel.core.optim.matrices import Sharing, share
from hyper_parallel.core.optim.muon import Muon
from hyper_parallel.core.redistribute.bounds import lower_bound
from hyper_parallel.models.llama import Llama, LlamaConfig

SMALL = LlamaConfig(vocab_size=256, hidden_size=256, intermediate_size=768, num_hidden_layers=8)
LARGE = {  # rows and columns of the matrices of a block, and blocks
    "llama3-8b": ([(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)], 32),
    "llama3-70b": ([(8192, 8192)] * 2 + [(1024, 8192)] * 2 + [(28672, 8192)] * 2 + [(8192, 28672)], 80),
}


def table() -> str:
    """Work and bytes as a Markdown table."""
    lines = [
        "| matrices | ranks | work, of one device's / n | received by a rank, bytes | least, bytes | ratio |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    alone = _flops_alone()
    for ranks in (2, 4, 8):
        flops, received, least = small_step(ranks)
        share_of = flops * ranks / alone
        lines.append(
            f"| 8 blocks of 256 | {ranks} | {share_of:.3f} | {received:,} | {least:,} | {received / least:.3f} |"
        )
    for name, (shapes, blocks) in LARGE.items():
        for ranks in (8, 32, 64, 256):
            lines.append(f"| {name}, who computes what only | {ranks} | {balance(shapes * blocks, ranks):.3f} | | | |")
    return "\n".join(lines)


def small_step(ranks: int) -> tuple[int, int, int]:
    """Take two steps of a small Llama on simulated ranks; return what the second takes: FLOPs, bytes received, least.

    All are those of the rank with the most.
    """
    made: dict[int, tuple[list[nn.Parameter], Muon]] = {}

    def build() -> None:
        model = Llama.build(SMALL)
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        params = _matrices(fully_shard(model, mesh=mesh))
        made[dist.get_rank()] = params, Muon(params)
        for number, param in enumerate(params):
            param.grad = torch.full_like(param, number + 1.0)
        made[dist.get_rank()][1].step()

    def step() -> tuple[int, int]:
        params, optimizer = made[dist.get_rank()]
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        return counter.get_total_flops(), sum(_least(params, sharing) for sharing in share(params))

    with sim.world(ranks) as world:
        world.run(build)
        world.trace.clear()
        found = world.run(step)
    return max(flops for flops, _ in found), Traffic.of(world.trace).received, max(least for _, least in found)


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


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for name, param in model.named_parameters() if param.ndim == 2 and name.startswith("layers.")]


def _flops_alone() -> int:
    params = _matrices(Llama.build(SMALL))
    optimizer = torch.optim.Muon(params)
    for number, param in enumerate(params):
        param.grad = torch.full_like(param, number + 1.0)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    return counter.get_total_flops()


def _least(params: Sequence[torch.Tensor], sharing: Sharing) -> int:
    """Return the least bytes that the calling rank receives, there and back, by redistribution's bound."""
    rank, total = dist.get_rank(), 0
    for matrix, owner in zip(sharing.matrices, sharing.owners, strict=True):
        layout = Layout.of(params[matrix.param])
        alone = Layout((1,), ("owner",), (sharing.ranks[owner],))()
        for src, dst in ((layout, alone), (alone, layout)):
            total += int(lower_bound(src, dst, matrix.shape, torch.bfloat16)[rank])
    return total
