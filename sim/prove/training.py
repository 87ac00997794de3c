"""The proof of a training run: the steps that `train` takes, on simulated ranks and on one device.

Both runs are the trainer's own: model, engine, schedule of the pipeline, accumulation, clipping and update are what
`train` executes. They are recorded and compared as any loop of steps is (`sim.prove.steps`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from hyper_parallel.core.activations import ActivationPolicy
from hyper_parallel.core.common.checks import read_int
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.context_parallel.api import split_over
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.expert_parallel.api import split_over_nodes
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.pipeline.schedules import find_schedule
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.config import CheckpointConfig, Config, DataConfig, PrecisionConfig
from hyper_parallel.trainer.loop import RankPlace, Trainer
from hyper_parallel.trainer.preflight import plan_run
from sim.prove.evidence import largest, machine_words
from sim.prove.modes.choices import Choices
from sim.prove.randomness import DrawPlace
from sim.prove.record import settle
from sim.prove.report import Report, ReportRow
from sim.prove.runs import offloaded_of
from sim.prove.steps.mutants import Mutant, put_in, put_into_model
from sim.prove.steps.proof import Loop, RanksRecord, References, Taken
from sim.prove.steps.watch import LoopRecord, LoopWatch, PerturbedSteps
from sim.world import World, WorldOptions

__all__ = ["MOST_RANKS", "reduced_run", "verify_run"]

MOST_RANKS = 16
"""Ranks up to which a run is proved on its own degrees."""

_ASKED = "cannot verify the run"
_STEPS = 2  # the second step shows what the first has left in the optimizer
_BYTES_OF_TEXT = 200_000
_COARSE = 1e-6  # of a tensor's largest element: in float64 a bound that is wider says little
_FP64 = PrecisionConfig("fp64")
_DEGREES = ("dp_replicate", "dp_shard", "ep", "cp", "tp", "pp")


def reduced_run(run: Config, world_size: int, dtypes: PrecisionConfig = _FP64) -> tuple[Config, int, tuple[str, ...]]:
    """Return a small run of the same kind, its ranks, and what was reduced.

    Every degree above 1 becomes 2, or 3 where it is odd, unless there are few ranks; layers, widths, heads, experts,
    tokens and sequences become as small as these degrees allow. What a run is made of stays: grouped heads, tied
    weights, dense layers, shared experts, schedule, accumulation, checkpointing, engine.

    >>> from hyper_parallel.trainer.config import ParallelConfig
    >>> small, ranks, said = reduced_run(Config(parallel=ParallelConfig(tp=2, dp_replicate=4)), world_size=32)
    >>> ranks, small.parallel.tp, said[:2]
    (8, 2, ('dp_replicate 4 -> 2', 'dp_shard 4 -> 2'))

    Args:
        run: that `train` is to take.
        world_size: number of its ranks.
        dtypes: of the small run; fp64 for proofs.

    Raises:
        ValueError: a run that `train` refuses.
    """
    read_int(_ASKED, "world_size", world_size, 1)
    dims = plan_run(run, world_size)
    degrees = {name: getattr(dims, name) for name in _DEGREES}
    if world_size > MOST_RANKS:
        degrees = {name: degree if degree < 3 else 3 if degree % 2 else 2 for name, degree in degrees.items()}
    ulysses = run.parallel.ulysses_degree
    if ulysses is not None and dims.cp > 1 and world_size > MOST_RANKS:
        if 1 < ulysses < dims.cp:
            degrees["cp"], ulysses = 4, 2  # both a ring and an exchange of heads
        else:
            ulysses = 1 if ulysses == 1 else degrees["cp"]
    etp = run.parallel.etp if run.parallel.etp in (None, 1) else degrees["tp"]
    parallel = dataclasses.replace(run.parallel, **degrees, ulysses_degree=ulysses, etp=etp, compile=False)
    kind = find_schedule(parallel.schedule)
    if parallel.stages_per_rank is not None and kind.is_multi and kind.style == "loop":
        parallel = dataclasses.replace(parallel, stages_per_rank=min(parallel.stages_per_rank, 2))
    stages = degrees["pp"] * kind.checked_stages_per_rank(parallel.stages_per_rank) if degrees["pp"] > 1 else 1
    sizes = _stage_sizes(run, stages)
    if degrees["pp"] > 1:
        text = None if sizes is None else ",".join(map(str, sizes))
        parallel = dataclasses.replace(parallel, layers_per_stage=text)
    few = ParallelDims.from_config(parallel, math.prod(degrees.values()))
    parallel = dataclasses.replace(parallel, ranks_per_node=_few_on_a_node(run, dims, few))
    small = dataclasses.replace(
        run,
        parallel=parallel,
        precision=dtypes,
        checkpoint=CheckpointConfig(),
        # Any text will do, and that of the run may not be here.
        data=DataConfig(max_bytes=_BYTES_OF_TEXT, ignored=run.data.ignored),
    )
    small = _with_small_model(small, few, dims.tp, sum(sizes) if sizes else max(2, stages))
    for accumulate in _counts_of_micro_batches(run, few):
        found = _with_batch(small, few, accumulate)
        try:
            plan_run(found, few.world_size)
        except ValueError:
            continue
        return found, few.world_size, tuple(_said(run, found, dims, few))
    raise InvalidValue(_ASKED, "no small run of its kind was found", dims.summary(), "sim.verify_plan")


def _few_on_a_node(run: Config, dims: ParallelDims, few: ParallelDims) -> int | None:
    """Return ranks of a node, so that experts are split over several where they are in the run."""
    asked = run.parallel.ranks_per_node
    if asked is None or not dims.ep_enabled or split_over_nodes(_ASKED, dims.expert_groups(), asked)[0] == 1:
        return None
    for size in range(few.world_size - 1, 0, -1):
        try:
            if split_over_nodes(_ASKED, few.expert_groups(), size)[0] > 1:
                return size
        except ValueError:
            continue
    return None


def _stage_sizes(run: Config, stages: int) -> list[int] | None:
    """Return layers per stage where the run says them: those without a layer stay without; None: balanced."""
    asked = run.parallel.stage_sizes()
    if asked is None or stages == 1:
        return None
    few = [min(size, 2) for size in asked]
    if len(few) == stages:
        return few
    return [few[0], *[max(few[1:-1], default=1)] * (stages - 2), few[-1]]


def _with_small_model(run: Config, dims: ParallelDims, tp: int, layers: int) -> Config:
    """Return a run with a small model; what `tp` ranks cannot split evenly stays uneven."""
    model, experts = run.model, run.experts
    ulysses = dims.ulysses_degree or 1 if dims.cp > 1 else 1
    groups = 1 if model.num_attention_heads == model.num_key_value_heads else 2
    kv_heads = dims.tp * ulysses
    heads, of_head = kv_heads * groups, 4
    rows = split_over(dims.cp, dims.ulysses_degree, balance=True).multiple * dims.tp if dims.cp > 1 else dims.tp
    seq_len = rows * max(1, math.ceil(8 / rows))
    if run.train.model == "moe":
        dense = min(experts.num_dense_layers, 1)
        layers = max(layers, dense + 1)
        count = max(dims.expert_ranks * 2, experts.experts_per_token if experts.experts_per_token < 3 else 3)
        count = dims.expert_ranks * math.ceil(count / dims.expert_ranks)
        experts = dataclasses.replace(
            experts,
            num_experts=min(count, experts.num_experts),
            experts_per_token=min(experts.experts_per_token, 2),
            num_shared_experts=min(experts.num_shared_experts, 1),
            expert_intermediate_size=4 * dims.tp,
            num_dense_layers=dense,
        )
    small = dataclasses.replace(
        model,
        vocab_size=math.ceil(256 / dims.tp) * dims.tp + (model.vocab_size % tp > 0),  # at least the text's 256 bytes
        hidden_size=heads * of_head,
        intermediate_size=6 * dims.tp + (model.intermediate_size % tp > 0),
        num_hidden_layers=min(layers, max(model.num_hidden_layers, 1)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_size=None if model.head_size is None else of_head,
        max_seq_len=seq_len,
    )
    return dataclasses.replace(run, model=small, experts=experts, train=dataclasses.replace(run.train, seq_len=seq_len))


def _counts_of_micro_batches(run: Config, dims: ParallelDims) -> Iterator[int]:
    """Yield the run's own number where it is small, then what schedules ask for."""
    own = run.train.accumulate
    counts = [own] if own <= 4 else []
    counts += [1] if own == 1 and not dims.pp_enabled else [2, 3, 4]
    yield from (*counts, dims.pp, 2 * dims.pp, 4 * dims.pp, own)


def _with_batch(run: Config, dims: ParallelDims, accumulate: int) -> Config:
    steps = max(run.train.steps, _STEPS + 1)  # the last step of a run is followed by a validation
    batch = {"batch_size": dims.batch_ranks * accumulate, "accumulate": accumulate, "steps": steps}
    return run.with_changes("train", batch)


def _said(run: Config, found: Config, dims: ParallelDims, few: ParallelDims) -> Iterator[str]:
    """Yield what is other than in the run."""
    degrees = [(name, getattr(dims, name), getattr(few, name)) for name in _DEGREES]
    values = [
        (key.name, getattr(getattr(run, section), key.name), getattr(getattr(found, section), key.name))
        for section in ("parallel", "precision", "model", "experts", "train")
        for key in dataclasses.fields(getattr(run, section))
        if key.name not in _DEGREES and (section != "experts" or run.train.model == "moe")
    ]
    for name, before, after in (*degrees, *values):
        if before != after and name not in ("steps", "max_seq_len", "log"):
            yield f"{name} {before} -> {after}"


def _trainer(run: Config, world_size: int) -> Trainer:
    place, dims, platform = RankPlace.current(), plan_run(run, world_size), get_platform(run.train.device)
    return Trainer(run, dims, platform, place, dims.build_mesh(platform.device_type))


@dataclasses.dataclass(frozen=True)
class _RunLoop(Loop):
    """The first steps of a run of the trainer."""

    run: Config
    axes: Mapping[str, int]

    def on_one(self, taken: Taken | None, seed: int | None) -> LoopRecord:
        """Take the steps without any degree."""
        numbers = [self.shared.one] if self.shared is not None else ()
        loops: dict[int, LoopRecord] = {}
        with World(1, WorldOptions(seed=self.run.train.seed, machine=self.machine)) as world:
            world.run(_take_steps, args=(loops, _on_one_device(self.run), 1, seed, taken, None, numbers))
        return loops[0]

    def on_ranks(self, references: References, mutant: Mutant | None) -> RanksRecord:
        """Take the steps on the ranks."""
        device = None if self.device == "cpu" else self.device
        numbers = self.shared.ranks if self.shared is not None else ()
        watched = self.world_size > 1 and mutant is None and not numbers
        options: Any = {"device": device, "machine": self.machine, "check_races": watched}
        run = self.run.with_changes("train", {"device": self.device})
        with World(self.world_size, WorldOptions(seed=run.train.seed, **options)) as world:
            found, loops, moved = RanksRecord(), dict[int, LoopRecord](), list[bool]()
            with put_in(world, mutant), found.until_stopped(loops, self.world_size):
                moved = world.run(_take_steps, args=(loops, run, self.world_size, None, None, mutant, numbers))
            events = list(world.trace.kept())
        offloads = ActivationPolicy.of(run.parallel.checkpointing).offload
        return dataclasses.replace(found, events=events, offloads=offloads, has_moved=any(moved))

    def make(self) -> None:
        """Build the trainers once more, in a world that compares what engines split."""
        options: Any = {"machine": self.machine, "check_replicas": True}
        with World(self.world_size, WorldOptions(seed=self.run.train.seed, **options)) as world:
            world.run(_trainer, args=(self.run, self.world_size))

    def mesh_of(self, found: RanksRecord) -> Layout:
        """Return the degrees above 1."""
        del found
        return Layout(tuple(self.axes.values()) or (1,), tuple(self.axes) or ("rank",))


def _take_steps(
    loops: dict[int, LoopRecord],
    run: Config,
    world_size: int,
    seed: int | None,
    taken: Taken | None,
    mutant: Mutant | None,
    numbers: Sequence[Mapping[DrawPlace, torch.Tensor]],
) -> bool:
    """Take the first steps of a run as one of its ranks, record them, and return whether activations were moved."""
    trainer, rank = _trainer(run, world_size), RankPlace.current().rank
    parts, device = trainer.model.parts, trainer.platform.device_type
    is_plain, shared = world_size == 1 and seed is None, numbers[rank] if numbers else None
    watch = LoopWatch(parts, _STEPS, keeps_graph=is_plain, shared=shared, one_model=True, explicit_steps=True)
    loops[rank] = watch.record
    put_into_model(mutant, parts, rank)
    watch.note_initial()
    choices = Choices(lambda: watch.where if watch.is_inside else None, taken)
    watch.record.choices = choices.made
    with nullcontext() if seed is None else PerturbedSteps(watch, seed), watch, choices:
        for _ in range(_STEPS):
            step = trainer.step()
            watch.note_result(step.loss)
            watch.note_numbers({_TOKENS: step.tokens or 0, _NORM: step.grad_norm})
            watch.note_clipping(step.grad_norm, run.optimizer.max_grad_norm)
            watch.end_step()
    settle(device)
    if device != "cpu":  # proved without
        watch.record.uses, watch.record.choices = {}, {}
    return any(block.has_moved for part in parts for block in offloaded_of(part))


def _wrong_dtypes(run: Config, world_size: int) -> list[tuple[str, str, torch.dtype, torch.dtype]]:
    """Take a step, and return what the rank stores in another dtype than the run asks for: kind, name, and both."""
    trainer, precision = _trainer(run, world_size), run.precision
    found: list[tuple[str, str, torch.dtype, torch.dtype]] = []

    def note(kind: str) -> None:
        for name, param in trainer.model.named_parameters():
            stored = param if kind == "update" else param.grad
            if stored is not None:
                found.append((kind, name, stored.dtype, precision.stored(param)))

    trainer.optimizer.register_step_pre_hook(lambda *_: note("gradient"))
    trainer.step()
    note("update")
    for name, param in trainer.model.named_parameters():
        states = {key: state for key, state in trainer.optimizer.state.get(param, {}).items() if key != "step"}
        found += [("update", f"{name}, {key}", x.dtype, precision.dtype("moments")) for key, x in states.items()]
    return [each for each in found if each[2] != each[3]]


def _stored_otherwise(run: Config, world_size: int) -> Iterator[ReportRow]:
    """Yield what ranks store in another dtype than the run asks for."""
    with World(world_size, WorldOptions(seed=run.train.seed)) as world:
        ranks = world.run(_wrong_dtypes, args=(run, world_size))
    for wrong in dict.fromkeys(each for rank in ranks for each in rank):
        (kind, name, seen, asked), numbers = wrong, [number for number, rank in enumerate(ranks) if wrong in rank]
        said = f"it is in {str(seen)[6:]} on {_ranks(numbers)}, and {str(asked)[6:]} is asked for"
        module, _, tensor = name.rpartition(".")
        yield ReportRow(module, f"{tensor} as it is stored", kind, verdict="bug", sentence=said)


def _on_one_device(run: Config) -> Config:
    """The same run without any degree."""
    alone: dict[str, Any] = {**dict.fromkeys(_DEGREES, 1), "checkpointing": "none", "schedule": "1f1b"}
    alone |= {"engine": "fully_shard", "ulysses_degree": None, "etp": None, "layers_per_stage": None}
    parallel = dataclasses.replace(run.parallel, **alone, stages_per_rank=None)
    return dataclasses.replace(run, parallel=parallel, train=dataclasses.replace(run.train, accumulate=1))


def verify_run(run: Config, world_size: int) -> Report:
    """Prove that a training run computes on its ranks what it computes on one device.

    >>> from hyper_parallel.trainer.config import ParallelConfig
    >>> print(verify_run(Config(parallel=ParallelConfig(tp=2)), world_size=4).ok)
    True

    Two optimizer steps of `train` are taken on simulated ranks and on one device, from the same weights and with the
    same text, in float64. Compared is what `verify_step` compares, the gradients as they are before clipping, and with
    it the number of tokens and the norm of the gradients. The ranks also take a step in the run's own dtypes, as
    [precision] has them for weights, gradients and the optimizer's state.

    Args:
        run: what `train` is given; redistributions are planned for its `train.hardware`, if it names one.
        world_size: number of its ranks.

    Returns:
        The report; its notes say what was reduced, see `reduced_run`, and which bounds are coarse.

    Raises:
        TypeError: no `Config`.
        ValueError: a run that `train` refuses.
        RankFailed: a rank has failed.
    """
    precision, machine, every = run.precision, run.train.hardware, world_size
    run, world_size, said = reduced_run(run, world_size)
    # Steps of full length: the first of a long warmup would move weights by less than they are rounded by.
    run = run.with_changes("optimizer", {"warmup_steps": 0, "schedule": "constant"})
    # A step that is skipped, on one device too, would prove nothing.
    run = run.with_changes("train", {"device": "cpu", "eval_every": 0, "on_nonfinite": "stop"})
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, log=None, tensorboard=None, start_from=None))
    axes = {name: size for name, size in plan_run(run, world_size).mesh_axes.items() if size > 1}
    loop = _RunLoop(_ASKED, world_size, torch.float64, {}, machine, run, axes)
    report = loop.proved(references := loop.references())
    notes = [f"reduced: {', '.join(said)}"] if said else []
    notes += [*report.notes, *_coarse(report.rows, references[0])]
    notes += [note for note in machine_words(machine, every) if note not in notes]
    rows = list(report.rows)
    if precision not in (PrecisionConfig(), run.precision):  # of which the steps in float64 say nothing
        rows += _stored_otherwise(dataclasses.replace(run, precision=precision), world_size)
    mesh = ", ".join(f"{name}={size}" for name, size in axes.items()) or "1 rank"
    return dataclasses.replace(report, rows=tuple(rows), mesh=mesh, notes=tuple(notes))


def _coarse(rows: Sequence[ReportRow], expected: LoopRecord) -> list[str]:
    """Name the tensors whose bounds are wide beside their values: smaller faults would hide below them."""
    bounds = {(row.kind, f"{row.module}.{row.tensor}".lstrip(".")): row.bound for row in rows}
    wide = []
    for number, step in enumerate(expected.steps, 1):
        held = [("forward", "loss", torch.stack(step.losses).sum())]
        held += [(*key, each) for key, each in step.numbers.items()]
        held += [("gradient", name, each) for name, each in step.gradients.items() if each is not None]
        held += [("update", name, each) for name, each in step.updates.items()]
        for kind, name, full in held:
            said = f"{name} of step {number}"
            wide += [said] if bounds.get((kind, said), 0.0) > _COARSE * largest(full) > 0 else []
    return [f"bounds are coarse, and smaller faults hide below them: {', '.join(wide)}"] if wide else []


_TOKENS, _NORM = ("forward", "count of tokens"), ("gradient", "norm of the gradients")


def _ranks(numbers: Sequence[int]) -> str:
    more, few = " ..." * (len(numbers) > 8), ", ".join(map(str, numbers[:8]))
    return f"rank{'s' * (len(numbers) > 1)} {few}{more}"
