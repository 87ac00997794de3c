"""Steps of the trainer on four gloo processes, beside the same Llama written with torch's own parallelism.

Protocol as for the engine: contestants in the same processes, blocks of steps that alternate, in an order drawn anew
for each, from barrier to barrier; the figure is the ratio of the medians with its interval. Before that, all take some
steps on the same batches from the same weights, and must find the same losses and norms of gradients.

`torch` is what torchtitan does: `parallelize_module` with sequence parallelism, FSDP2 around each block, the loss
on logits that stay split over the vocabulary (`replicated`: that are gathered), `clip_grad_norm_`, fused AdamW. All
cut their batches out of the same text, and report the loss and the norm of every step.

Below these are changes of the library, before and after: counted on simulated ranks, and not timed.
"""

from __future__ import annotations

import logging
import random
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

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
from hyper_parallel.core.fully_shard.api import fully_shard as fully_shard_of_ours
from hyper_parallel.core.init.api import init_parameters
from hyper_parallel.core.machine import find_machine
from hyper_parallel.core.mesh import parallel_dims
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.models.llama import Llama, LlamaConfig
from hyper_parallel.models.moe import MoEConfig
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer import parallelize
from hyper_parallel.trainer.config import Config, OptimizerConfig, ParallelConfig
from hyper_parallel.trainer.data import load_corpus, rank_part, samples
from hyper_parallel.trainer.loop import RankPlace, Trainer
from sim.mesh.pricing.measure_steps import measured_run

RANKS, SEQUENCES, LENGTH, CHECKED_STEPS = 4, 8, 128, 3
OPTIMIZER = OptimizerConfig(lr=1e-3, warmup_steps=0, schedule="constant")
BLOCKS = {128: (3, 7), 256: (2, 7), 512: (1, 7)}
"""By width: steps of a block, and blocks."""

Step = Callable[[], tuple[float, float]]
"""Take the next step; return its loss and the norm of its gradients."""


def run_of(hidden: int, parallel: ParallelConfig, accumulate: int = 1, sequences: int = SEQUENCES) -> Config:
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
    run = measured_run(model, sequences, LENGTH, parallel).cut_into(accumulate)
    return replace(run, optimizer=OPTIMIZER)


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
    schedule = Schedule1F1B(stage, run.micro_batches, loss_fn=_mean_loss)
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
        (sequences, length), dp = self._run.batch_shape, self._dp
        part = rank_part(self._used, sequences, dp.get_local_rank(), dp.size())
        self._used += sequences
        return samples(self._text, part, length, self._run.seed_of())

    def mean(self, loss: torch.Tensor) -> float:
        dist.all_reduce(loss, group=self._dp.get_group())
        return loss.item() / self._dp.size()


def _same_weights(run: Config) -> Llama:
    with torch.device("meta"):
        model = Llama(run.shape())
    init_parameters(model, run.seed_of(), device="cpu")
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
        run = run_of(hidden, ParallelConfig(tp=2))
        lines.append(row("dp=2, tp=2", run, ("torch", "replicated")))
        print(lines[-1], flush=True)
    run = run_of(512, ParallelConfig(tp=2, tp_chunks=2))
    lines.append(row("dp=2, tp=2, 2 chunks", run, ("torch", "replicated")))
    print(lines[-1], flush=True)
    run = run_of(256, ParallelConfig(pp=2), accumulate=4)
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


# -- changes of the library, before and after ------------------------------------------------------------------------

PER_NODE = 4
MACHINE = find_machine("h100-sxm").with_figures(node__devices=PER_NODE)
"""Ranks of a node, where it matters which these are."""


@dataclass(frozen=True)
class Footprint:
    """What simulated ranks hold and communicate in the second step of the trainer, after which nothing changes.

    Bytes are those of tensors on the rank's simulated accelerator, one figure for each rank.

    Attributes:
        experts: weights of experts.
        activations: what the first forward leaves there for backward, its output included.
        gradients: what waits between the first micro-batch and the second.
        peak: the most in the step.
        left: what lives after the step beyond weights, their buffers and the optimizer's state.
        losses: of both steps.
        trace: the communication of the step.
    """

    experts: list[int]
    activations: list[int]
    gradients: list[int]
    peak: list[int]
    left: list[int]
    losses: list[float]
    trace: sim.Trace

    def of(self, op: str, axis: str | None = None) -> list[sim.Event]:
        """The operations of a kind that rank 0 takes part in."""
        return [event for event in self.trace.of_rank(0) if event.op == op and axis in (None, event.axis)]

    def between_nodes(self) -> int:
        """Bytes that all ranks send to other nodes, where each talks to each of its group directly."""
        total = 0
        for event in self.trace.events:
            node = event.rank // PER_NODE
            away = sum(rank // PER_NODE != node for rank in event.group)
            total += event.send_bytes * away // max(len(event.group) - 1, 1)
        return total

    def microseconds(self) -> int:
        """The virtual time of the step, in which computing takes none."""
        issued, ends = zip(*((event.issued, event.end or 0.0) for event in self.trace.events), strict=True)
        return round((max(ends) - min(issued)) * 1e6)


def footprint(run: Config, ranks: int, older: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Footprint:
    """Take two steps on simulated ranks.

    Args:
        run: what they train.
        ranks: how many there are.
        older: what is in force while models are built.
    """
    trainers: dict[int, Trainer] = {}
    forwards: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
    built: dict[int, int] = {}

    def live() -> int:
        return get_platform("npu").memory_stats().allocated

    def build() -> int:
        rank, dims = dist.get_rank(), ParallelDims.from_config(run.parallel, ranks)
        place = RankPlace(rank, 0, ranks, 1)  # each has a device of its own
        trainer = trainers[rank] = Trainer(run, dims, get_platform("npu"), place, dims.build_mesh("npu"))
        for part in trainer.model.parts:
            part.register_forward_pre_hook(lambda *_: forwards[rank].append(live()), prepend=True)
            part.register_forward_hook(lambda *_: forwards[rank].append(live()))
        built[rank] = live()
        return sum(_bytes(weight) for name, weight in trainer.model.named_parameters() if ".experts." in name)

    def step() -> tuple[int, int, float]:
        trainer, rank = trainers[dist.get_rank()], dist.get_rank()
        forwards[rank].clear()
        record = trainer.step()
        state = sum(_bytes(value) for each in trainer.optimizer.state.values() for value in each.values())
        return record.memory_bytes or 0, live() - built[rank] - state, record.loss

    with sim.world(ranks, device="npu", machine=MACHINE) as world:
        with older():
            experts = world.run(build)
        first = world.run(step)[0][2]
        world.trace.clear()
        peaks, left, losses = zip(*world.run(step), strict=True)
        marks = [(before, after, more[0] if more else before) for before, after, *more in forwards.values()]
        activations = [after - before for before, after, _ in marks]
        gradients = [second - before for before, _, second in marks]
        return Footprint(experts, activations, gradients, list(peaks), list(left), [first, losses[0]], world.trace)


def _bytes(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


Figures = dict[str, Callable[[Footprint], int]]


@dataclass(frozen=True)
class Change:
    """What was changed, with the run that shows it.

    Attributes:
        what: in the words of the table.
        where: the mesh, likewise.
        ranks: how many there are.
        now: the run.
        figures: what is looked at, by its name.
        before: the run without the change; None: it cannot be had any more.
        older: what is in force while models are built as before.
        counted: what can be told of it nevertheless, in the order of the figures.
    """

    what: str
    where: str
    ranks: int
    now: Config
    figures: Figures
    before: Config | None = None
    older: Callable[[], AbstractContextManager[Any]] = nullcontext
    counted: tuple[int, ...] = ()

    def rows(self) -> list[str]:
        """Run both, which must find the same losses."""
        now = footprint(self.now, self.ranks)
        after = [figure(now) for figure in self.figures.values()]
        first: list[int | None] = [*self.counted, *[None] * (len(after) - len(self.counted))]
        if self.before is not None:
            before = footprint(self.before, self.ranks, self.older)
            assert torch.allclose(torch.tensor(before.losses), torch.tensor(now.losses)), f"{self.what}: other losses"
            first = [figure(before) for figure in self.figures.values()]
        lines = []
        for name, was, is_now in zip(self.figures, first, after, strict=True):
            pair = ["-", f"{is_now:,}", "-"] if was is None else [f"{was:,}", f"{is_now:,}", _ratio(was, is_now)]
            lines.append(f"| {self.what} | {self.where} | {name} | {' | '.join(pair)} |")
        return lines


def _ratio(was: int, is_now: int) -> str:
    return f"{is_now / was:.2f}" if was else "-"


def _small(parallel: dict[str, Any], accumulate: int = 1, experts: int = 0) -> Config:
    """Return a run of two layers, for up to eight ranks with sequences of their own in each micro-batch."""
    run = run_of(128, ParallelConfig(**parallel), accumulate, SEQUENCES * accumulate)
    shape = replace(run.shape(), num_hidden_layers=2, num_key_value_heads=8)
    if experts:
        shape = MoEConfig(**asdict(shape), num_experts=experts, expert_intermediate_size=256)
    return run.with_shape(shape)


def _on_dim_0(*args: Any, **options: Any) -> Any:
    return fully_shard_of_ours(*args, **{**options, "shard_placement_fn": lambda param: Shard(0)})


def _row_major() -> AbstractContextManager[Any]:
    return mock.patch.object(parallel_dims, "RANK_ORDER", parallel_dims.AXIS_ORDER)


def changes() -> list[Change]:
    """List what `changes_table` measures."""
    found: list[Change] = []
    received: Figures = {
        "weights of experts, the rank with the least": lambda f: min(f.experts),
        "weights of experts, the rank with the most": lambda f: max(f.experts),
        "received in all_gathers": lambda f: sum(event.recv_bytes for event in f.of("all_gather")),
    }
    for experts, degrees in ((4, {"dp_shard": 2, "ep": 4}), (4, {"dp_shard": 8}), (12, {"dp_shard": 2, "ep": 4})):
        run = _small(degrees, experts=experts)
        where = f"{_named(degrees)}, {experts} experts"
        older = partial(mock.patch.object, parallelize, "fully_shard", _on_dim_0)
        found.append(Change("split of experts", where, 8, run, received, run, older))
    degrees = {"dp_shard": 4}
    both = [_small({**degrees, "reduce_each": each}, 4) for each in (False, True)]
    reduced: Figures = {
        "gradients between micro-batches": lambda f: max(f.gradients),
        "peak of the step": lambda f: max(f.peak),
        "reduce_scatters": lambda f: len(f.of("reduce_scatter")),
        "sent": lambda f: Traffic.of(f.trace).sent,
    }
    where = f"{_named(degrees)}, 4 micro-batches"
    found.append(Change("`reduce_each`", where, 4, both[1], reduced, both[0]))
    between: Figures = {
        "sent by all ranks": lambda f: sum(event.send_bytes for event in f.trace.events),
        "of it to the other node": Footprint.between_nodes,
        "communication of the step, virtual us": Footprint.microseconds,
    }
    for degrees in ({"dp_shard": 2, "tp": 2, "pp": 2}, {"tp": 4, "pp": 2}):
        run, where = _small(degrees, 4), f"{_named(degrees)}, 4 micro-batches"
        found.append(Change("order of ranks", where, 8, run, between, run, _row_major))
    kept: Figures = {
        "kept for backward": lambda f: max(f.activations),
        "peak of the step": lambda f: max(f.peak),
        "all_gathers": lambda f: len(f.of("all_gather")),
        "sent": lambda f: Traffic.of(f.trace).sent,
    }
    for tp in (2, 4, 8):
        both = [_small({"tp": tp, "reshard_inputs": again}) for again in (False, True)]
        found.append(Change("`reshard_inputs`", f"tp={tp}", tp, both[1], kept, both[0]))
    degrees = {"dp_shard": 2, "tp": 2}
    run, where = _small(degrees, 4), f"{_named(degrees)}, 4 micro-batches"
    norms = 2 * run.model.num_hidden_layers + 1
    sums: Figures = {"all_reduces of their gradients": _sums_of_norms}
    found.append(Change("norms over tp", where, 4, run, sums, counted=(norms * 4,)))
    left: Figures = {"beyond weights and optimizer state": lambda f: max(f.left)}
    for zero, again in ((3, True), (2, False)):
        run = _small({**degrees, "reshard_after_forward": again}, 4)
        found.append(Change("what lives between steps", f"{where}, ZeRO-{zero}", 4, run, left))
    return found


def _named(degrees: dict[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in degrees.items())


def _sums_of_norms(found: Footprint) -> int:
    """Count all_reduces of one or more whole norms, flat: others have two dims, or one element."""
    shapes = [event.input_shapes[0] for event in found.of("all_reduce", "tp")]
    return sum(len(shape) == 1 and shape[0] > 1 for shape in shapes)


def changes_table() -> str:
    """What changes of the library have changed on a rank, as a Markdown table."""
    lines = ["| change | mesh | figure | before | now | now / before |", "|---|---|---|--:|--:|--:|"]
    for change in changes():
        lines += change.rows()
        print(lines[-1], flush=True)
    return "\n".join(lines)
