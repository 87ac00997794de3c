"""The training step of our engine, of torch's FSDP2 and of the plain model, interleaved in one run.

Protocol: all contestants are set up in the same processes; then blocks of a few steps alternate, timed from
barrier to barrier, the slowest rank's time counts. The figure is the ratio of the medians over the blocks, with
a 95 % bootstrap interval. One intra-op thread; fused AdamW everywhere; fp32; model of ``benchmarks/toy.py``.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import sim
from benchmarks.toy import batch, build, step

ENGINES = ("ours", "fsdp2", "plain")
STEPS_PER_BLOCK, BLOCKS, WARMUP_BLOCKS = 3, 9, 2


@dataclass
class Result:
    """Seconds per step, one entry per timed block, by engine."""

    arm: str
    ranks: int
    shape: str
    seconds: dict[str, list[float]]

    def median(self, engine: str) -> float:
        return float(np.median(self.seconds[engine]))

    def ratio(self, of: str, over: str) -> tuple[float, float, float]:
        """Ratio of medians and its 95 % bootstrap interval (blocks are drawn in pairs)."""
        a, b = np.array(self.seconds[of]), np.array(self.seconds[over])
        draws = np.random.default_rng(0).integers(0, len(a), size=(2000, len(a)))
        ratios = np.median(a[draws], axis=1) / np.median(b[draws], axis=1)
        low, high = np.percentile(ratios, [2.5, 97.5])
        return self.median(of) / self.median(over), float(low), float(high)


def contest(sequences: int, length: int) -> dict[str, list[float]]:
    """Run the protocol on the calling rank; the same times come back on every rank."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    tokens = batch(rank, sequences, length)
    contestants: dict[str, Any] = {engine: build(engine, mesh) for engine in ENGINES}
    seconds: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for block in range(WARMUP_BLOCKS + BLOCKS):
        for engine, (model, optimizer) in contestants.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS_PER_BLOCK):
                step(model, optimizer, tokens)
            dist.barrier()
            took = torch.tensor([(time.perf_counter() - start) / STEPS_PER_BLOCK])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if block >= WARMUP_BLOCKS:
                seconds[engine].append(took.item())
    return seconds


def on_sim(ranks: int, sequences: int, length: int) -> Result:
    """The contest on simulated ranks; ``plain`` is then the sum of all ranks' compute."""
    core = min(os.sched_getaffinity(0))
    seconds = sim.run(contest, ranks, (sequences, length), pin=core)[0]
    return Result("sim", ranks, f"{sequences}x{length}", seconds)


def on_gloo(ranks: int, sequences: int, length: int) -> Result:
    """The contest on gloo processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_gloo_rank, (ranks, sequences, length, folder), nprocs=ranks)  # type: ignore[no-untyped-call]
        seconds = json.loads(Path(folder, "seconds.json").read_text())
    return Result("gloo", ranks, f"{sequences}x{length}", seconds)


def _gloo_rank(rank: int, ranks: int, sequences: int, length: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    seconds = contest(sequences, length)
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def table(results: list[Result]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| ranks | batch per rank | plain, ms | ours, ms | FSDP2, ms | ours / plain | FSDP2 / plain | ours / FSDP2 |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for r in results:
        times = [f"{r.median(engine) * 1e3:.1f}" for engine in ("plain", "ours", "fsdp2")]
        pairs = [("ours", "plain"), ("fsdp2", "plain"), ("ours", "fsdp2")]
        ratios = ["{:.2f} ({:.2f}-{:.2f})".format(*r.ratio(*pair)) for pair in pairs]
        lines.append(f"| {r.ranks} {r.arm} | {r.shape} | {' | '.join(times + ratios)} |")
    return "\n".join(lines)


def as_json(results: list[Result]) -> str:
    """All block times, for whoever wants to look closer."""
    return json.dumps([asdict(r) for r in results], indent=1)
