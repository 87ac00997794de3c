"""Steps of the trainer on four gloo processes, beside the same Llama written with torch's own parallelism.

Protocol as for the engine: contestants in the same processes, blocks of steps that alternate, in an order drawn anew
for each, from barrier to barrier; the figure is the ratio of the medians with its interval. Before that, all take some
steps on the same batches from the same weights, and must find the same losses and norms of gradients.

`torch` is what torchtitan does: `parallelize_module` with sequence parallelism, FSDP2 around each block, the loss
on logits that stay split over the vocabulary (`replicated`: that are gathered), `clip_grad_norm_`, fused AdamW. All
cut their batches out of the same text, and report the loss and the norm of every step.
"""

from __future__ import annotations

import logging
import random
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel

import sim
from benchmarks.engine import Protocol, _time, _with_interval, on_gloo
from benchmarks.engine_counts import Traffic
from benchmarks.shard import _with_styles
from hyper_parallel.core.init.api import init_parameters
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.models.llama import Llama, LlamaConfig
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.config import Config, OptimizerConfig, ParallelConfig, TrainConfig
from hyper_parallel.trainer.data import load_corpus, rank_part, samples
from hyper_parallel.trainer.loop import RankPlace, Trainer

RANKS, SEQUENCES, LENGTH, CHECKED_STEPS = 4, 8, 128, 3
OPTIMIZER = OptimizerConfig(lr=1e-3, warmup_steps=0, schedule="constant")
BLOCKS = {128: (3, 7), 256: (2, 7), 512: (1, 7)}
"""By width: steps of a block, and blocks."""

Step = Callable[[], tuple[float, float]]
"""Take the next step; return its loss and the norm of its gradients."""


def run_of(hidden: int, parallel: ParallelConfig, accumulate: int = 1) -> Config:
    """Return the run that all contestants are about."""
    model = LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_seq_len=LENGTH,
    )
    train = TrainConfig(steps=10**9, batch_size=SEQUENCES, seq_len=LENGTH, accumulate=accumulate, device="cpu")
    return Config(model=model, optimizer=OPTIMIZER, train=train, parallel=parallel)


def contest(
    sequences: int, length: int, protocol: Protocol, *, run: Config, rivals: Sequence[str], blocks: tuple[int, int]
) -> dict[str, list[float]]:
    """Run the protocol on the calling rank; the same times come back on every rank."""
    del sequences, length, protocol  # the run has them
    steps = {"ours": ours(run), **{name: TORCH[name](run) for name in rivals}}
    check(steps)
    return in_turns({name: partial(_several, step, blocks[0]) for name, step in steps.items()}, *blocks)


def check(steps: dict[str, Step]) -> None:
    """Refuse to time contestants that compute something else."""
    found = {name: [step() for _ in range(CHECKED_STEPS)] for name, step in steps.items()}
    for name, figures in found.items():
        say = f"{name} computes something else: losses and norms {figures}, ours {found['ours']}"
        assert torch.allclose(torch.tensor(figures), torch.tensor(found["ours"]), rtol=1e-4, atol=1e-4), say


def in_turns(blocks_of: dict[str, Callable[[], None]], steps: int, blocks: int) -> dict[str, list[float]]:
    """Time blocks of steps in turn; seconds per step of the slowest rank, by contestant."""
    seconds: dict[str, list[float]] = {name: [] for name in blocks_of}
    draw = random.Random(0)  # on all ranks the same
    for block in range(1 + blocks):
        for name in draw.sample(sorted(blocks_of), len(blocks_of)):
            dist.barrier()
            start = time.perf_counter()
            blocks_of[name]()
            dist.barrier()
            took = torch.tensor([(time.perf_counter() - start) / steps])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if block:
                seconds[name].append(took.item())
    return seconds


def _several(step: Step, times: int) -> None:
    for _ in range(times):
        step()


# -- ours ------------------------------------------------------------------------------------------------------------


def ours(run: Config) -> Step:
    """The trainer's step as it is."""
    dims = ParallelDims.from_config(run.parallel, dist.get_world_size())
    mesh = dims.build_mesh("cpu")
    place = RankPlace(dist.get_rank(), dist.get_rank(), dist.get_world_size(), dist.get_world_size())
    trainer = Trainer(run, dims, get_platform("cpu"), place, mesh)

    def step() -> tuple[float, float]:
        record = trainer.step()
        return record.loss, record.grad_norm

    return step


# -- with torch's own parallelism ------------------------------------------------------------------------------------


def with_styles(run: Config, *, split_loss: bool) -> Step:
    """Tensor and sequence parallelism, then FSDP2."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of a view, on which nothing works in place
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # of the norm's two sums
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _same_weights(run)
    head = ColwiseParallel(
        input_layouts=Shard(1),
        output_layouts=Shard(-1) if split_loss else Replicate(),
        use_local_output=not split_loss,
    )
    _with_styles(model, mesh["tp"], sequence_parallel=True, head=head)
    _shard_blocks(model, mesh["dp"], reshard=True)
    optimizer, batches = _optimizer(model), _Batches(run, mesh["dp"])

    def step() -> tuple[float, float]:
        inputs, targets = batches.take()
        with loss_parallel() if split_loss else nullcontext():
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
        norm = _whole(nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm))
        optimizer.step()
        optimizer.zero_grad()
        return batches.mean(_whole(loss.detach())), norm.item()

    return step


def with_pipelining(run: Config) -> Step:
    """Two stages, each with FSDP2, by torch's 1F1B."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pipe, last = mesh["pp"], mesh["pp"].get_local_rank() == 1
    half = run.model.num_hidden_layers // 2
    model = _same_weights(run)
    model.keep(range(half, 2 * half) if last else range(half), embed=not last, head=last)
    _shard_blocks(model, mesh["dp"], reshard=False)
    stage = PipelineStage(model, pipe.get_local_rank(), 2, torch.device("cpu"), group=pipe.get_group())
    schedule = Schedule1F1B(stage, run.train.accumulate, loss_fn=_mean_loss)
    optimizer, batches = _optimizer(model), _Batches(run, mesh["dp"])

    def step() -> tuple[float, float]:
        inputs, targets = batches.take()
        losses: list[torch.Tensor] = []
        if last:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step(inputs)
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        power = _whole(nn.utils.get_total_norm(grads)) ** 2
        dist.all_reduce(power, group=pipe.get_group())
        norm = power.sqrt()
        nn.utils.clip_grads_with_norm_(model.parameters(), OPTIMIZER.max_grad_norm, norm)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).mean().detach() if last else torch.zeros(())
        dist.all_reduce(mean, group=pipe.get_group())
        return batches.mean(mean), norm.item()

    return step


TORCH: dict[str, Callable[[Config], Step]] = {
    "torch": partial(with_styles, split_loss=True),
    "replicated": partial(with_styles, split_loss=False),
    "pipelining": with_pipelining,
}


class _Batches:
    """The rows of a rank, step by step, and the mean of its losses with the others'."""

    def __init__(self, run: Config, dp: DeviceMesh) -> None:
        self._run, self._dp, self._used = run, dp, 0
        self._text = load_corpus().train

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        train, dp = self._run.train, self._dp
        part = rank_part(self._used, train.batch_size, dp.get_local_rank(), dp.size())
        self._used += train.batch_size
        return samples(self._text, part, train.seq_len, train.seed)

    def mean(self, loss: torch.Tensor) -> float:
        dist.all_reduce(loss, group=self._dp.get_group())
        return loss.item() / self._dp.size()


def _same_weights(run: Config) -> Llama:
    with torch.device("meta"):
        model = Llama(run.shape())
    init_parameters(model, run.train.seed, device="cpu")
    return model


def _shard_blocks(model: Llama, mesh: DeviceMesh, reshard: bool) -> None:
    for block in model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [
        {"params": [param for param in params if param.ndim >= 2], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (OPTIMIZER.beta1, OPTIMIZER.beta2)
    return torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=betas, fused=True)


def _mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


# -- tables ----------------------------------------------------------------------------------------------------------


def traffic(run: Config, name: str) -> Traffic:
    """Count what a rank communicates in the second step, on simulated ranks."""
    built: dict[int, Step] = {}

    def train() -> None:
        rank = dist.get_rank()
        if rank not in built:
            built[rank] = ours(run) if name == "ours" else TORCH[name](run)
        built[rank]()

    with sim.world(RANKS) as world:
        world.run(train)
        world.trace.clear()
        world.run(train)
    return Traffic.of(world.trace)


def table() -> str:
    """Times, ratios and bytes of whole steps as a Markdown table."""
    lines = [
        "| mesh | width, layers | ours, ms | torch, ms | torch, logits gathered, ms | ours / torch "
        "| ours / logits gathered | ours, collectives | torch, collectives | ours, bytes sent | torch, bytes sent |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for hidden in BLOCKS:
        run = run_of(hidden, ParallelConfig(dp_shard=2, tp=2))
        lines.append(row("dp=2, tp=2", run, ("torch", "replicated")))
        print(lines[-1], flush=True)
    run = run_of(512, ParallelConfig(dp_shard=2, tp=2, tp_chunks=2))
    lines.append(row("dp=2, tp=2, 2 chunks", run, ("torch", "replicated")))
    print(lines[-1], flush=True)
    run = run_of(256, ParallelConfig(dp_shard=2, pp=2), accumulate=4)
    lines.append(row("dp=2, pp=2, 4 micro-batches", run, ("pipelining",)))
    print(lines[-1], flush=True)
    return "\n".join(lines)


def row(mesh: str, run: Config, rivals: tuple[str, ...]) -> str:
    """Hold one contest, and count what ours and the first rival communicate."""
    hidden = run.model.hidden_size
    counted = [traffic(run, name) for name in ("ours", rivals[0])]
    result = on_gloo(RANKS, SEQUENCES, LENGTH, partial(contest, run=run, rivals=rivals, blocks=BLOCKS[hidden]))
    times = [_time(result, name) for name in ("ours", *rivals)]
    ratios = [_with_interval(*result.ratio("ours", rival)) for rival in rivals]
    blank = ["-"] * (2 - len(rivals))
    cells = [mesh, f"{hidden}, {run.model.num_hidden_layers}", *times, *blank, *ratios, *blank]
    cells += [str(sum(found.operations.values())) for found in counted]
    cells += [f"{found.sent:,}" for found in counted]
    return f"| {' | '.join(cells)} |"
