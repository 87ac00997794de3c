"""The training step of our engine, of torch's FSDP2 and of the plain model, interleaved in one run.

Protocol: all contestants are set up in the same processes; then blocks of a few steps alternate, in an order drawn
anew for each, timed from barrier to barrier, the slowest rank's time counts. The figure is the ratio of the medians
over the blocks, with a 95 % bootstrap interval. One intra-op thread; fused AdamW everywhere; fp32; model of
`benchmarks/toy.py`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import sim
from benchmarks.toy import Shape, batch, build, has_comm_fusion, step
from hyper_parallel.platform import get_platform

NAMES = {
    "plain": "plain",
    "part": "plain, updating 1/n",
    "ours": "ours",
    "fused": "ours, comm_fusion=True",
    "fsdp2": "FSDP2",
}
STEPS_PER_BLOCK, BLOCKS, WARMUP_BLOCKS = 3, 9, 2


@dataclass(frozen=True)
class Protocol:
    """How many steps are timed, of whom, on what device, of a model of which shape (None: the small one) and dtypes.

    With `bf16`, engines compute in bfloat16 and keep and reduce in float32; the plain model is bfloat16 altogether.
    """

    contestants: tuple[str, ...]
    steps: int = STEPS_PER_BLOCK
    blocks: int = BLOCKS
    warmup: int = WARMUP_BLOCKS
    device: str = "cpu"
    shape: Shape | None = None
    bf16: bool = False

    def build(self, engine: str, mesh: Any) -> tuple[nn.Module, Any]:
        """The model and its optimizer, wrapped by an engine."""
        if not self.bf16:
            return build(engine, mesh, shape=self.shape)
        if engine in ("plain", "part"):
            return build(engine, mesh, shape=self.shape, prepare=nn.Module.bfloat16)
        return build(engine, mesh, shape=self.shape, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass
class Result:
    """Seconds per step, one entry per timed block, by engine."""

    backend: str
    ranks: int
    shape: str
    seconds: dict[str, list[float]]

    @property
    def where(self) -> str:
        return f"{self.ranks} {self.backend} | {self.shape}"

    def median(self, engine: str) -> float:
        return float(np.median(self.seconds[engine]))

    def ratio(self, of: str, over: str) -> tuple[float, float, float]:
        """Ratio of medians and its 95 % bootstrap interval (blocks are drawn in pairs)."""
        return self._figure(lambda medians: medians(of) / medians(over))

    def overhead(self, of: str, over: str, base: str = "plain") -> tuple[float, float, float]:
        """What `of` takes longer than `base`, over what `over` takes longer than it, with the interval."""
        return self._figure(lambda medians: (medians(of) - medians(base)) / (medians(over) - medians(base)))

    def _figure(self, figure: Callable[[Callable[[str], Any]], Any]) -> tuple[float, float, float]:
        """A figure of the medians of all blocks, and of 2000 draws of as many blocks, the same for each engine."""
        times = {engine: np.array(seconds) for engine, seconds in self.seconds.items()}
        blocks = len(next(iter(times.values())))
        draws = np.random.default_rng(0).integers(0, blocks, size=(2000, blocks))
        low, high = np.percentile(figure(lambda engine: np.median(times[engine][draws], axis=1)), [2.5, 97.5])
        return float(figure(lambda engine: np.median(times[engine]))), float(low), float(high)


def engines() -> tuple[str, ...]:
    """All contestants, as far as the engine of this version takes part."""
    return tuple(engine for engine in NAMES if engine != "fused" or has_comm_fusion())


def contest(sequences: int, length: int, protocol: Protocol) -> dict[str, list[float]]:
    """Run the protocol on the calling rank; the same times come back on every rank."""
    mesh = init_device_mesh(protocol.device, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    built = {engine: protocol.build(engine, mesh) for engine in protocol.contestants}
    return _in_turns(built, sequences, length, protocol)


def contest_of_units(sequences: int, length: int, protocol: Protocol) -> dict[str, list[float]]:
    """The protocol between our engine with a unit per layer and with a unit per module that has parameters."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    built = {
        "layers": build("ours", mesh),
        "modules": build("ours", mesh, units=_leaves),
        "plain": build("plain", mesh),
    }
    return _in_turns(built, sequences, length, protocol)


def contest_of_checks(sequences: int, length: int, protocol: Protocol) -> dict[str, list[float]]:
    """The protocol between our engine comparing what ranks gather and reduce, and not doing so."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    built = {"compared": build("ours", mesh), "not compared": build("ours", mesh)}
    model: Any = built["not compared"][0]
    model.set_check_identity(False)
    return _in_turns(built, sequences, length, protocol)


def _leaves(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if list(module.parameters(recurse=False))]


def _in_turns(
    built: dict[str, tuple[nn.Module, Any]], sequences: int, length: int, protocol: Protocol
) -> dict[str, list[float]]:
    tokens = batch(dist.get_rank(), sequences, length).to(protocol.device)
    seconds: dict[str, list[float]] = {name: [] for name in built}
    draw = random.Random(0)  # on all ranks the same
    for block in range(protocol.warmup + protocol.blocks):
        for name in draw.sample(sorted(built), len(built)):
            model, optimizer = built[name]
            took = timed(partial(step, model, optimizer, tokens), protocol.steps, protocol.device)
            if block >= protocol.warmup:
                seconds[name].append(took)
    return seconds


def timed(call: Callable[[], object], times: int, device: str) -> float:
    """Seconds of a call on the slowest rank, from barrier to barrier, with the end of the device's work."""
    finish = get_platform(device).synchronize
    finish()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        call()
    finish()
    dist.barrier()
    took = torch.tensor([(time.perf_counter() - start) / times], device=device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


Contest = Callable[[int, int, Protocol], dict[str, list[float]]]


def on_sim(ranks: int, sequences: int, length: int, held: Contest = contest) -> Result:
    """The contest on simulated ranks, in a process of their own; `plain` is then the sum of all ranks' compute."""
    protocol = Protocol(engines()) if ranks <= 8 else Protocol(engines(), steps=2, blocks=10, warmup=1)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        seconds = pool.submit(_simulate, ranks, sequences, length, protocol, held).result()
    return Result("sim", ranks, f"{sequences}x{length}", seconds)


def _simulate(ranks: int, sequences: int, length: int, protocol: Protocol, held: Contest) -> dict[str, list[float]]:
    core = min(os.sched_getaffinity(0))
    return sim.run(held, ranks, (sequences, length, protocol), pin=core)[0]


def on_gloo(ranks: int, sequences: int, length: int, held: Contest = contest) -> Result:
    """The contest on gloo processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        args = (ranks, sequences, length, Protocol(engines()), held, folder)
        mp.spawn(_gloo_rank, args, nprocs=ranks)
        seconds = json.loads(Path(folder, "seconds.json").read_text())
    return Result("gloo", ranks, f"{sequences}x{length}", seconds)


def _gloo_rank(
    rank: int, ranks: int, sequences: int, length: int, protocol: Protocol, held: Contest, folder: str
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    seconds = held(sequences, length, protocol)
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


# -- tables ----------------------------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """Times and ratios as a Markdown table."""
    lines = [
        "| ranks | batch per rank | plain, ms | ours, ms | comm_fusion, ms | FSDP2, ms | ours / plain | FSDP2 / plain "
        "| ours / FSDP2 | comm_fusion / FSDP2 |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in results:
        times = [_time(r, engine) for engine in ("plain", "ours", "fused", "fsdp2")]
        pairs = [("ours", "plain"), ("fsdp2", "plain"), ("ours", "fsdp2"), ("fused", "fsdp2")]
        ratios = [_with_interval(*r.ratio(*pair)) if set(pair) <= set(r.seconds) else "-" for pair in pairs]
        lines.append(f"| {r.where} | {' | '.join(times + ratios)} |")
    return "\n".join(lines)


def overhead_table(results: Sequence[Result]) -> str:
    """What the engines cost beyond computing, ours over FSDP2's."""
    lines = [
        "| ranks | batch per rank | plain, updating 1/n, ms | ours | comm_fusion | ours, updating 1/n "
        "| comm_fusion, updating 1/n |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for r in results:
        cells = [
            _with_interval(*r.overhead(engine, "fsdp2", base)) if engine in r.seconds else "-"
            for base in ("plain", "part")
            for engine in ("ours", "fused")
        ]
        lines.append(f"| {r.where} | {_time(r, 'part')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def units_table(results: Sequence[Result]) -> str:
    """A unit per layer beside one per module."""
    lines = [
        "| ranks | batch per rank | plain, ms | 5 units, ms | 27 units, ms | 27 units / 5 units | overhead |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for r in results:
        times = [_time(r, name) for name in ("plain", "layers", "modules")]
        figures = [r.ratio("modules", "layers"), r.overhead("modules", "layers")]
        lines.append(f"| {r.where} | {' | '.join(times + [_with_interval(*figure) for figure in figures])} |")
    return "\n".join(lines)


def checks_table(results: Sequence[Result]) -> str:
    """Steps whose units are compared over ranks, beside steps without."""
    lines = [
        "| ranks | batch per rank | not compared, ms | compared, ms | compared / not compared |",
        "|---|---|--:|--:|--:|",
    ]
    for r in results:
        times = [_time(r, name) for name in ("not compared", "compared")]
        lines.append(f"| {r.where} | {' | '.join([*times, _with_interval(*r.ratio('compared', 'not compared'))])} |")
    return "\n".join(lines)


def _time(result: Result, engine: str) -> str:
    return f"{result.median(engine) * 1e3:.1f}" if engine in result.seconds else "-"


def _with_interval(value: float, low: float, high: float) -> str:
    return f"{value:.2f} ({low:.2f}-{high:.2f})"
