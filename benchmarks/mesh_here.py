"""This machine: the step time and the memory that the mesh simulator predicts, beside those that are measured.

The machine is measured, as by `hyper-parallel hardware measure`, before and after the trainer trains in real
processes, of which each has its share of the cores. The prediction is made of both descriptions, so that it comes out
of the same minutes as what it is put beside: a virtual machine's speed may halve from one minute to the next.

- *step*: from barrier to barrier, of the slowest rank; the median of the steps, and the range of the middle half.
- *allocated*: the most bytes that tensors take during a step after the first, as torch's CPU allocator counts them, in
  a second run that is watched by torch's profiler.
- *resident*: how far the process's peak resident memory, reset before each step, lies above what was resident before
  the model was built. It holds what tensors take, and what neither torch nor the simulator counts: buffers of gloo and
  of matrix products, and pages of freed tensors that glibc's malloc keeps.

Ten drawn runs, small ones, are put beside a prediction from a description that was measured once (`drawn_table`). Of
them, the seconds on the processor count, those of all threads of the busiest process: they are those of an idle machine
even where others work on it. The shortest step by the clock, in which processes also wait for each other, is shown too.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import record_function

from benchmarks.engine_counts import watch_memory
from benchmarks.mesh_probe import status_bytes
from hyper_parallel.core.init import api as init
from hyper_parallel.core.init import filling
from hyper_parallel.core.init.tiles import FillTarget
from hyper_parallel.core.machine.description import Machine
from hyper_parallel.core.mesh.parallel_dims import AXIS_ORDER, ParallelDims
from hyper_parallel.models.llama import LlamaConfig
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.config import Config, ParallelConfig, PrecisionConfig
from hyper_parallel.trainer.data import load_corpus
from hyper_parallel.trainer.loop import RankPlace, Trainer
from sim.mesh.estimate import Estimate, estimate_job
from sim.mesh.job import Job
from sim.mesh.pricing.measure import measure
from sim.mesh.pricing.measure_steps import measured_run

MODEL = LlamaConfig(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=12,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_seq_len=256,
)
"""46 million parameters: 735 MB with gradients and Adam's moments, beside which Python's own noise is small."""
WARMUP, STEPS = 2, 9


@dataclass(frozen=True)
class Case:
    """What is trained, by how many processes.

    Attributes:
        parallel: the degrees; their product is the number of processes.
        model: what is trained.
        sequences: of a step, over all ranks.
        length: tokens of a sequence.
        micro_batches: of a pipeline.
        device: `cpu`, `cuda` or `npu`.
        precision: what is computed in and stored.
    """

    parallel: ParallelConfig
    model: LlamaConfig = MODEL
    sequences: int = 4
    length: int = 128
    micro_batches: int = 1
    device: str = "cpu"
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)

    @property
    def processes(self) -> int:
        return math.prod(getattr(self.parallel, axis) or 1 for axis in AXIS_ORDER)

    @property
    def config(self) -> Config:
        """The run, as the trainer takes it."""
        run = measured_run(self.model, self.sequences, self.length, self.parallel).cut_into(self.micro_batches)
        return replace(run, precision=self.precision)

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims.from_config(self.parallel, self.processes)

    def __str__(self) -> str:
        names = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
        shown = [f"{name}={size}" for name in names if (size := getattr(self.parallel, name) or 1) > 1]
        parts = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        parts += "" if self.parallel.activations.is_none else f", {self.parallel.activations} checkpointing"
        parts += ", compiled" if self.parallel.fuses else ""
        return (", ".join(shown) or "one process") + parts


CASES = (
    Case(ParallelConfig(dp_shard=1)),
    Case(ParallelConfig(dp_shard=2)),
    Case(ParallelConfig(dp_shard=1, dp_replicate=2)),
    Case(ParallelConfig(dp_shard=1, tp=2)),
    Case(ParallelConfig(dp_shard=1, pp=2), micro_batches=4),
)


# -- measured --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Seconds of each step, of the slowest rank, and bytes of the rank that has most.

    Attributes:
        steps: by the clock.
        allocated: bytes of tensors.
        resident: bytes of the process.
        busy: on the processor, of all threads of a process.
    """

    steps: tuple[float, ...]
    allocated: int
    resident: int
    busy: tuple[float, ...] = ()

    @property
    def step(self) -> float:
        return statistics.median(self.steps)


def run_case(case: Case, steps: int = STEPS, warmup: int = WARMUP) -> Measured:
    """Train in real processes: once for the time and what is resident, once for what is allocated.

    Args:
        case: what is trained.
        steps: that are timed.
        warmup: steps before them.
    """
    timed = _in_processes(partial(take_steps, case=case, steps=steps, warmup=warmup), case)
    watched = _in_processes(partial(_watched, case=case), case)
    return Measured(tuple(timed[0]["steps"]), max(r["allocated"] for r in watched), max(r["resident"] for r in timed))


def _in_processes(held: Any, case: Case) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (case, held, folder), nprocs=case.processes)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(case.processes)]


def _rank(rank: int, case: Case, held: Any, folder: str) -> None:
    get_platform(case.device).set_device(rank)
    if case.device == "cpu":  # as torchrun does, and `measure(threads=1)`
        torch.set_num_threads(1)
    backend = get_platform(case.device).backend
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=case.processes)
    Path(folder, f"{rank}.json").write_text(json.dumps(held()))
    dist.barrier()
    dist.destroy_process_group()


def _trainer(case: Case) -> Trainer:
    rank, world = dist.get_rank(), dist.get_world_size()
    dims = case.dims
    # The engine is what makes bf16 of fp32 weights, so that it takes part even on one rank.
    alone = world == 1 and case.precision.policy() is None
    mesh = None if alone else dims.build_mesh(case.device)
    return Trainer(case.config, dims, get_platform(case.device), RankPlace(rank, rank, world, world), mesh)


@contextlib.contextmanager
def _drawn_on_device() -> Iterator[None]:
    """Let a device draw the weights at once: the host takes a minute for 3 billion, which are the same everywhere."""

    def whole(targets: Sequence[FillTarget]) -> None:
        numbers: Any = None  # a device has its own
        for target in targets:
            for write, _ in target._writes:
                write(target.local, numbers)

    def normal(weights: torch.Tensor, numbers: None, mean: float = 0.0, std: float = 1.0) -> None:
        weights.normal_(mean, std)

    def uniform(weights: torch.Tensor, numbers: None, low: float = 0.0, high: float = 1.0) -> None:
        weights.uniform_(low, high)

    # Both: nn.Linear draws uniformly before the model does again, and what is not here is drawn on the host at once.
    draws = {"normal_": normal, "uniform_": uniform}
    with patch.object(init, "flush", whole), patch.object(filling, "_DRAWS", draws):
        yield


def take_steps(case: Case, steps: int, warmup: int) -> dict[str, Any]:
    """Train on the calling rank of torch.distributed; seconds of each step, and bytes at the peak."""
    platform = get_platform(case.device)
    load_corpus()
    device = torch.device(case.device)
    a = torch.randn(256, 256, device=device)
    (a @ a).sum().item()  # what libraries take for themselves
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    before = status_bytes("VmRSS")
    with _drawn_on_device() if case.device != "cpu" else contextlib.nullcontext():
        trainer = _trainer(case)
    seconds, busy, resident = [], [], 0
    for number in range(warmup + steps):
        dist.barrier()
        begin, worked = time.perf_counter(), time.process_time()
        record = trainer.step()  # which resets the peak first
        worked = time.process_time() - worked
        dist.barrier()
        took = torch.tensor([time.perf_counter() - begin, worked], device=device)  # hccl has no float64
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        if number >= warmup:
            seconds.append(took[0].item())
            busy.append(took[1].item())
            resident = max(resident, status_bytes("VmHWM") - before)
    del record
    allocated = 0
    if case.device != "cpu":
        stats = platform.memory_stats()
        allocated, resident = stats.peak_allocated, stats.peak_reserved
    return {"steps": seconds, "busy": busy, "resident": resident, "allocated": allocated}


def _watched(case: Case) -> dict[str, Any]:
    load_corpus()
    with watch_memory() as memory:
        trainer = _trainer(case)
        trainer.step()
        with record_function("phase: step"):
            trainer.step()
    return {"allocated": memory.peak("step")}


# -- predicted -------------------------------------------------------------------------------------------------------


def predict(case: Case, hardware: Machine) -> Estimate:
    """Estimate what a case needs.

    Args:
        case: what is trained.
        hardware: on what.
    """
    job = Job.of_run(case.config, case.processes)  # with the trainer's waits, and compiled as it compiles
    if case.device != "cuda":  # torch has a kernel of RMSNorm for GPUs alone
        job = replace(job, recipe=replace(job.recipe, norm="eager"))
    return estimate_job(job, hardware)


# -- tables ----------------------------------------------------------------------------------------------------------


def here_table(cases: Sequence[Case] = CASES, steps: int = STEPS, seconds: float = 0.1) -> str:
    """Predicted beside measured on this machine's CPU, as a Markdown table.

    Args:
        cases: what is trained, those of as many processes one after the other.
        steps: that are timed of each.
        seconds: that each figure of the machine is taken over.
    """
    lines = _head()
    for processes, group in itertools.groupby(cases, key=lambda case: case.processes):
        before = measure(processes, "cpu", seconds, threads=1)
        for case in group:
            found = run_case(case, steps)
            after = measure(processes, "cpu", seconds, threads=1)
            lines.append(_row(case, found, [predict(case, hardware) for hardware in (before, after)]))
            print(lines[-1], flush=True)
            before = after
    return "\n".join(lines)


def drawn_cases(seed: int = 0) -> list[Case]:
    """Draw ten small runs: five of one process, five of two."""
    draw = random.Random(seed)
    alone = ParallelConfig(dp_shard=1)
    two = [ParallelConfig(dp_shard=2), ParallelConfig(dp_shard=1, dp_replicate=2), ParallelConfig(dp_shard=1, tp=2)]
    two += [ParallelConfig(dp_shard=1, pp=2), ParallelConfig(dp_shard=2)]
    cases = []
    for parallel in [alone] * 5 + two:
        hidden = draw.choice((64, 128, 192, 256))
        model = LlamaConfig(
            vocab_size=draw.choice((512, 1024, 2048)),
            hidden_size=hidden,
            intermediate_size=draw.choice((2, 3)) * hidden,
            num_hidden_layers=draw.choice((2, 4, 6)),
            num_attention_heads=4,
            num_key_value_heads=draw.choice((2, 4)),
            max_seq_len=128,
        )
        parts = draw.choice((2, 4)) if parallel.pp > 1 else 1
        cases.append(Case(parallel, model, draw.choice((4, 8)), draw.choice((32, 64, 128)), parts))
    return cases


def drawn_table(cases: Sequence[Case] | None = None, steps: int = 25, seconds: float = 0.05) -> str:
    """Predicted beside measured step times of drawn runs, as a Markdown table, with the median ratio below.

    Args:
        cases: what is trained; None: `drawn_cases()`.
        steps: that are timed of each.
        seconds: that each figure of the machine is taken over.
    """
    lines = [
        "| processes | hidden x layers, vocabulary | tokens | shortest step, ms | on the processor, ms | predicted, ms "
        "| predicted / measured |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    ratios = []
    for processes, group in itertools.groupby(cases or drawn_cases(), key=lambda case: case.processes):
        hardware = measure(processes, "cpu", seconds, threads=1)
        for case in group:
            found = _in_processes(partial(take_steps, case=case, steps=steps, warmup=WARMUP), case)[0]
            shortest, busy = min(found["steps"]), statistics.quantiles(found["busy"], n=4)[0]
            predicted = predict(case, hardware).time.step.value
            ratios.append(predicted / busy)
            shape = case.model
            cells = [
                f"{processes}, {case}" if processes > 1 else str(case),
                f"{shape.hidden_size} x {shape.num_hidden_layers}, {shape.vocab_size}",
                f"{case.sequences} x {case.length}",
                f"{shortest * 1e3:.1f}",
                f"{busy * 1e3:.1f}",
                f"{predicted * 1e3:.1f}",
                f"{ratios[-1]:.2f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    off = statistics.median(abs(ratio - 1) for ratio in ratios)
    return "\n".join([*lines, "", f"Predicted / measured: median {statistics.median(ratios):.2f}, off by {off:.0%}."])


def _head() -> list[str]:
    return [
        "| processes | step measured, ms | step predicted, ms | predicted / measured | allocated measured, MB "
        "| allocated predicted, MB | predicted / measured | resident measured, MB | allocated predicted / resident |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]


def _row(case: Case, measured: Measured, predicted: Sequence[Estimate]) -> str:
    low, _, high = statistics.quantiles(measured.steps, n=4)
    steps = [made.time.step for made in predicted]
    step = statistics.fmean(one.value for one in steps)
    peak = predicted[0].memory.peak
    cells = [
        f"{case.processes}, {case}" if case.processes > 1 else str(case),
        f"{measured.step * 1e3:.0f} ({low * 1e3:.0f}-{high * 1e3:.0f})",
        f"{step * 1e3:.0f} ({min(one.low for one in steps) * 1e3:.0f}-{max(one.high for one in steps) * 1e3:.0f})",
        f"{step / measured.step:.2f}",
        f"{measured.allocated / 1e6:.1f}",
        f"{peak / 1e6:.1f}",
        f"{peak / measured.allocated:.3f}",
        f"{measured.resident / 1e6:.1f}",
        f"{peak / measured.resident:.3f}",
    ]
    return f"| {' | '.join(cells)} |"
