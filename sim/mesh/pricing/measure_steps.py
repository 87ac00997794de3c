"""Training steps of this machine, measured: samples of kernels as they run in a step, and of the host beside them.

A kernel timed alone, over and over, finds its operands in caches and the memory of its result mapped; in a step it
does not. What the host adds to kernels, in Python, dispatch and hooks, no kernel shows at all. So each process trains a
few tiny models, alone and together with the others, and each operation that `torch.profiler` saw is paired with that
of the recorded program, of which it takes the shape and the bytes.

Seconds of the host are those of the thread, on the processor: neither other processes on the machine nor waiting for
other ranks count.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.models.llama import LlamaConfig
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.config import Config, OptimizerConfig, ParallelConfig, TrainConfig
from hyper_parallel.trainer.loop import RankPlace, Trainer
from hyper_parallel.trainer.preflight import plan_run
from sim.mesh.job import Job
from sim.mesh.pricing.profiled import step_operations
from sim.mesh.program import Comm, Op
from sim.mesh.tracing.trace import trace

_TIMED, _PROFILED = 12, 10
_SHAPES = (  # hidden size, layers, vocabulary, tokens of a sequence
    (16, 4, 256, 16),
    (64, 3, 256, 64),
    (192, 2, 1024, 64),
)


def _runs(count: int) -> list[tuple[Config, int]]:
    """Return the runs, each with its number of ranks: by each process for itself, and by all together."""
    made = []
    for hidden, layers, vocab, length in _SHAPES:
        model = LlamaConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_seq_len=length,
        )
        made += [(measured_run(model, 4 * ranks, length), ranks) for ranks in sorted({1, count})]
    return made


def measured_run(shape: LlamaConfig, sequences: int, length: int, parallel: ParallelConfig | None = None) -> Config:
    """Return a run to take steps of one by one, with so many sequences over all ranks, and so many tokens in each."""
    train = TrainConfig(batch_size=sequences, seq_len=length)
    optimizer = OptimizerConfig(lr=1e-4, warmup_steps=0, schedule="constant")
    return Config(optimizer=optimizer, train=train, parallel=parallel or ParallelConfig()).with_shape(shape)


# In each process -----------------------------------------------------------------------------------------------------


def timed_steps(rank: int, count: int, folder: str) -> list[dict[str, Any]]:
    """Train, and return of each run the thread's seconds of a step and those of each operation in it.

    Args:
        rank: of the calling process.
        count: processes, which all call it.
        folder: for traces.
    """
    found = []
    for config, ranks in _runs(count):
        dims = plan_run(config, ranks)
        place = RankPlace(rank, rank, count, count) if ranks > 1 else RankPlace()
        mesh = dims.build_mesh("cpu") if ranks > 1 else None
        trainer = Trainer(config, dims, get_platform("cpu"), place, mesh)
        for _ in range(2):
            trainer.step()
        dist.barrier()
        seconds = []
        for _ in range(_TIMED):
            begin = time.thread_time()
            trainer.step()
            seconds.append(time.thread_time() - begin)
        path = Path(folder, f"steps-{rank}.json")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
            for number in range(_PROFILED):
                with torch.profiler.record_function(f"ProfilerStep#{number}"):
                    trainer.step()
        profiler.export_chrome_trace(str(path))
        found.append({"seconds": statistics.quantiles(seconds, n=4)[0], "operations": _typical(step_operations(path))})
    return found


def _typical(steps: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Return the seconds of each call of each operation: the lower quartile over the steps that have as many.

    Not the mean: the clock of the profiler runs on while another process has the processor.
    """
    found = {}
    for name in steps[0]:
        calls = [step[name] for step in steps if name in step]
        most = Counter(len(each) for each in calls).most_common(1)[0][0]
        alike = [each for each in calls if len(each) == most]
        found[name] = [sorted(times)[len(times) // 4] for times in zip(*alike, strict=True)]
    return found


# In the process that fits --------------------------------------------------------------------------------------------


def step_samples(results: Sequence[Sequence[Mapping[str, Any]]], count: int) -> list[dict[str, Any]]:
    """Pair what was measured with the recorded programs of the same steps.

    Args:
        results: what `timed_steps` has returned in each process.
        count: processes.
    """
    samples: list[dict[str, Any]] = []
    for number, (config, ranks) in enumerate(_runs(count)):
        # Of several processes the one that was disturbed least.
        found = min((result[number] for result in results), key=lambda one: float(one["seconds"]))
        job = Job.of_run(config, ranks)
        job = dataclasses.replace(job, recipe=dataclasses.replace(job.recipe, norm="eager"))
        (program,) = trace(job)
        events = [event for segment, _ in program.segments_in_order() for event in segment.events]
        ops = [event for event in events if isinstance(event, Op) and event.kind != "host"]
        samples += paired_samples(ops, found["operations"])
        computing = sum(sum(times) for times in found["operations"].values())
        rest = max(0.0, found["seconds"] - computing)
        comms = sum(isinstance(event, Comm) for event in events)
        samples.append({"what": "host", "ops": len(ops), "comms": comms, "seconds": rest})
    return samples


def paired_samples(ops: Sequence[Op], measured: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return samples of kernels: the median of those that are alike.

    Args:
        ops: recorded, in their order.
        measured: seconds of each call by name of the operation; a name with more or fewer calls is left out.
    """
    recorded: dict[str, list[Op]] = defaultdict(list)
    for op in ops:
        recorded[op.name].append(op)
    times: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for name, several in recorded.items():
        taken = measured.get(name, ())
        if len(taken) == len(several):
            for op, seconds in zip(several, taken, strict=True):
                times[name, op.kind, op.dtype, op.shape, op.bytes].append(seconds)
    samples = []
    for (_, kind, dtype, shape, moved), alike in times.items():
        seconds = statistics.median(alike)
        if (kind == "matmul" and shape) or kind in ("attention", "attention_backward"):
            samples.append({"what": kind, "dtype": f"torch.{dtype}", "shape": list(shape), "seconds": seconds})
        elif kind == "memory":
            samples.append({"what": "step stream", "bytes": moved, "seconds": seconds})
    return samples
