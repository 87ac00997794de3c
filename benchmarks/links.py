"""The figures of a machine for `hyper_parallel.core.redistribute.Link`: gloo processes exchange, a line is fitted.

An all_to_all of n ranks in which each sends b bytes is taken to last latency + per_rank (n - 1) + b / bandwidth.
Medians of many calls on the slowest rank, for 2 and 4 ranks and 64 B to 16 MiB; the latencies are those of the smallest
size, the bandwidth that of the largest, of 4 ranks.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = (64, 16 * 1024, 1024 * 1024, 16 * 1024 * 1024)


def measure(ranks: int) -> dict[int, float]:
    """Median seconds of an all_to_all by bytes sent per rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (ranks, folder), nprocs=ranks)  # type: ignore[no-untyped-call]
        return {int(size): took for size, took in json.loads(Path(folder, "seconds.json").read_text()).items()}


def _rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = {}
    for size in SIZES:
        elements = size // 4 // (ranks - 1) * ranks  # a rank keeps one part of its own
        give, take = torch.ones(elements), torch.empty(elements)
        times = []
        for _ in range(60 if size < 1 << 20 else 15):
            dist.barrier()
            start = time.perf_counter()
            dist.all_to_all_single(take, give)
            took = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            times.append(took.item())
        found[size] = float(np.median(times[3:]))
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def table() -> str:
    """What was measured, and the fit."""
    found = {ranks: measure(ranks) for ranks in (2, 4)}
    lines = ["| all_to_all, sent per rank | 2 processes | 4 processes |", "|---|--:|--:|"]
    for size in SIZES:
        lines.append(f"| {size:,} B | {found[2][size] * 1e6:,.0f} us | {found[4][size] * 1e6:,.0f} us |")
    small, large = SIZES[0], SIZES[-1]
    per_rank = max((found[4][small] - found[2][small]) / 2, 0.0)
    latency = found[2][small] - per_rank
    if latency < 0:  # more ranks than cores: a line through the origin
        latency, per_rank = 0.0, (found[2][small] + 3 * found[4][small]) / 10
    bandwidth = large / (found[4][large] - found[4][small])
    lines += ["", f"Link(latency={latency:.1e}, per_rank={per_rank:.1e}, bandwidth={bandwidth:.2e})"]
    return "\n".join(lines)
