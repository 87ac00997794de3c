"""Experts: grouped products, ranks that they are split over, and shared ones that compute meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import sim
from benchmarks.dims import OPTIMIZER
from benchmarks.engine_counts import Traffic
from hyper_parallel.core.expert_parallel.experts import grouped, one_by_one
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.models.moe import MixtureOfExperts, MoEConfig
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.config import ParallelConfig, PrecisionConfig
from hyper_parallel.trainer.loop import RankPlace, Trainer
from sim.mesh import Recipe, estimate_run
from sim.mesh.pricing.measure_steps import measured_run
from sim.mesh.recordings.library import recordings

SHAPES = ((8, 512, 128, 256), (32, 1024, 256, 256), (64, 256, 64, 64), (8, 4096, 256, 512))
"""Experts, rows, hidden size, inner size."""
BLOCKS, CALLS = 11, 4


def table() -> str:
    """CPU time of both as a Markdown table."""
    torch.set_num_threads(1)
    lines = [
        "| experts | rows | hidden, inner | grouped, ms | one by one, ms | grouped / one by one |",
        "|--:|--:|---|--:|--:|--:|",
    ]
    for count, rows, hidden, inner in SHAPES:
        group, loop = times_of(count, rows, hidden, inner)
        lines.append(f"| {count} | {rows} | {hidden}, {inner} | {group:.2f} | {loop:.2f} | {group / loop:.2f} |")
    return "\n".join(lines)


def times_of(
    count: int, rows: int, hidden: int, inner: int, device: str = "cpu", blocks: int = BLOCKS
) -> tuple[float, float]:
    """Milliseconds of a forward and backward of both, the medians over blocks: on a CPU those of the processor."""
    now, finish = time.process_time if device == "cpu" else time.perf_counter, get_platform(device).synchronize
    sizes = ((rows, hidden), (count, inner, hidden), (count, hidden, inner), (count, inner, hidden))
    given = [torch.randn(size, device=device).to(torch.bfloat16).requires_grad_() for size in sizes]
    grad = torch.randn(rows, hidden, device=device).to(torch.bfloat16)
    counts = torch.full((count,), rows // count, device=device)
    each = counts.tolist()
    ways: list[Callable[[], torch.Tensor]] = [
        lambda: grouped(given[0], counts, *given[1:]),
        lambda: one_by_one(given[0], each, *given[1:]),
    ]
    found: list[list[float]] = [[], []]
    for block in range(1 + blocks):
        for way, seconds in zip(ways, found, strict=True):
            finish()
            start = now()
            for _ in range(CALLS):
                torch.autograd.grad(way(), given, grad)
            finish()
            if block:
                seconds.append((now() - start) / CALLS * 1e3)
    return median(found[0]), median(found[1])


# -- experts over folded ranks, and over ranks of their own -----------------------------------------------------------

RANKS, STEPS = 8, 3
FOLDINGS: tuple[dict[str, Any], ...] = (
    {"tp": 2, "etp": 1, "ep": 4},
    {"tp": 2, "etp": 1, "ep": 2, "fold_experts": True},
    {"tp": 2, "etp": 1, "ep": 4, "fold_experts": True},
    {"cp": 2, "ep": 4},
    {"cp": 2, "ep": 2, "fold_experts": True},
    {"cp": 2, "ep": 4, "fold_experts": True},
)


def folded_table() -> str:
    """What a rank holds and communicates in a step of the trainer, on simulated ranks, as a Markdown table."""
    lines = [
        "| dp x others | ep | folded | ranks that split experts | experts of a rank, bytes "
        "| collectives | sent, bytes |",
        "|---|--:|---|--:|--:|--:|--:|",
    ]
    expected: list[tuple[float, float]] | None = None
    for degrees in FOLDINGS:
        dims = ParallelDims.from_config(degrees, RANKS)
        found, held, figures = _of_run(dims)
        expected = expected or figures
        near = torch.allclose(torch.tensor(figures), torch.tensor(expected), rtol=1e-4, atol=1e-4)
        assert near, f"{degrees} computes something else: {figures}, not {expected}"
        other = next(f"{name}={degrees[name]}" for name in ("tp", "cp") if name in degrees)
        folds = "yes" if dims.fold_experts else "no"
        cells = [f"4 x {other}", dims.ep, folds, dims.expert_ranks, f"{held:,}", sum(found.operations.values())]
        lines.append(f"| {' | '.join(map(str, cells))} | {found.sent:,} |")
    return "\n".join(lines)


def _of_run(dims: ParallelDims) -> tuple[Traffic, int, list[tuple[float, float]]]:
    """Count the last of some steps; return bytes of experts on a rank, and losses and norms, too."""
    shape = MoEConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        max_seq_len=64,
        num_experts=16,
        expert_intermediate_size=64,
    )
    run = replace(measured_run(shape, 8, 64, ParallelConfig().placed(dims, None)), optimizer=OPTIMIZER)
    trainers: dict[int, Trainer] = {}

    def build() -> int:
        rank = dist.get_rank()
        place = RankPlace(rank, rank, RANKS, RANKS)
        trainers[rank] = Trainer(run, dims, get_platform("cpu"), place, dims.build_mesh("cpu"))
        named = trainers[rank].model.named_parameters()
        weights = [weight for name, weight in named if ".experts." in name]
        return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in weights)

    def step() -> tuple[float, float]:
        record = trainers[dist.get_rank()].step()
        return record.loss, record.grad_norm

    with sim.world(RANKS) as world:
        held, figures = max(world.run(build)), []
        for _ in range(STEPS):
            world.trace.clear()
            figures.append(world.run(step)[0])
        return Traffic.of(world.trace), held, figures


# -- shared experts while tokens are on their way ---------------------------------------------------------------------


def overlap_table() -> str:
    """Estimates of a step with shared experts that compute meanwhile, and after it, as a Markdown table."""
    lines = [
        "| ep | exchange exposed, ms | after it, ms | step, ms | after it, ms | step / after it |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for ep in (8, 16):
        both = [_estimated(ep)]
        with _shared_afterwards():
            both.append(_estimated(ep))
        cells = [f"{seconds * 1e3:.0f}" for pair in zip(*both, strict=True) for seconds in pair]
        lines.append(f"| {ep} | {' | '.join(cells)} | {both[0][1] / both[1][1]:.3f} |")
    return "\n".join(lines)


def _estimated(ep: int) -> tuple[float, float]:
    """Seconds of exposed exchange, and of the step, of DeepSeekMoE-16B's shape on 64 H100s."""
    shape = MoEConfig(
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=10944,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_seq_len=4096,
        num_experts=64,
        experts_per_token=6,
        expert_intermediate_size=1408,
        num_shared_experts=2,
        num_dense_layers=1,
    )
    run = replace(measured_run(shape, 64, 4096, ParallelConfig(ep=ep)), precision=PrecisionConfig("bf16"))
    run = Recipe.of(run).with_savings("full")
    recordings.clear()  # what was recorded of the same run in the other order
    time_of = estimate_run(run, 64, "h100-sxm").time
    return sum(part.value for axis, part in time_of.exposed.items() if axis == "ep"), time_of.step.value


@contextmanager
def _shared_afterwards() -> Iterator[None]:
    """Let shared experts compute once tokens are back."""
    kept = MixtureOfExperts.forward

    def forward(self: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
        assert self.shared is not None
        out: torch.Tensor = self.experts(x, *self.router(x))
        return out + self.shared(x)

    MixtureOfExperts.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        MixtureOfExperts.forward = kept  # type: ignore[method-assign]
