"""Estimates of a step: memory, time and its terms, and their uncertainty."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyper_parallel.core.common.tables import as_html, as_text
from hyper_parallel.core.machine.calibration import Calibration, load_calibration
from hyper_parallel.core.machine.description import Machine, find_machine
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.trainer.config import Config
from sim.kernel.threads import collector_paused
from sim.mesh.cost import Pricing, ring_kernel_of, weakest
from sim.mesh.explain import explain as explain_estimate
from sim.mesh.job import Job
from sim.mesh.memory import ClassMemory, replay_memory, with_workspaces
from sim.mesh.models import find_model
from sim.mesh.program import Program
from sim.mesh.recipe import Recipe, Routing
from sim.mesh.replay.allocator import PLAIN, AllocatorRules
from sim.mesh.replay.pieces import PriceBasis
from sim.mesh.replay.player import RankTime
from sim.mesh.replay.timeline import Timeline, replay_time
from sim.mesh.report import estimate_line, estimate_view, memory_line
from sim.mesh.tracing.trace import trace

Z80 = 1.2816  # z of a two-sided 80 % normal interval
LEVELS = ("often", "seldom", "never", "nothing")
"""How much is known of a step, most first: see `level_of`."""
_MANY = 10  # published runs: beyond this count, more runs barely change the spread


@dataclass(frozen=True)
class Quantity:
    """A figure with its 80 % interval and the grade of its evidence.

    Attributes:
        value: the figure.
        low: lower end of the 80 % interval.
        high: upper end of the 80 % interval.
        grade: weakest evidence that matters: measured, calibrated, datasheet or assumed.
    """

    value: float
    low: float
    high: float
    grade: str

    def __float__(self) -> float:
        return self.value

    @classmethod
    def spread_by(cls, value: float, spread: float, grade: str) -> Quantity:
        """Return a figure whose logarithm has the standard deviation `spread`.

        >>> Quantity.spread_by(100.0, 0.1, "calibrated").high > 110
        True
        """
        factor = math.exp(Z80 * spread)
        return cls(value, value / factor, value * factor, grade)


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of each class of ranks, in bytes.

    Attributes:
        classes: one for each position along the pipeline.
        limit: bytes that the device's allocator can take.
        spread: relative standard deviation of the reserved bytes.
        host_limit: bytes of host memory per device; None: unknown.
    """

    classes: tuple[ClassMemory, ...]
    limit: int
    spread: float
    host_limit: int | None = None

    @property
    def fullest(self) -> ClassMemory:
        """The class that reserves the most memory."""
        return max(self.classes, key=lambda one: one.peak_reserved)

    @property
    def peak(self) -> int:
        """Peak allocated bytes over all ranks."""
        return max(one.peak_allocated for one in self.classes)

    @property
    def reserved(self) -> int:
        """Peak reserved bytes over all ranks."""
        return max(one.peak_reserved for one in self.classes)

    @property
    def interval(self) -> Quantity:
        """Peak reserved bytes with their 80 % interval."""
        return Quantity.spread_by(float(self.reserved), self.spread, "calibrated")

    def __repr__(self) -> str:
        return f"MemoryEstimate({memory_line(self)})"

    def fits(self, limit_bytes: float | None = None) -> bool:
        """Return True if each rank's reserved memory, plus its memory outside the allocator, is within a limit.

        Offloaded tensors must fit into the host's memory, too.

        Args:
            limit_bytes: limit per device; None: the device's own.
        """
        limit = self.limit if limit_bytes is None else limit_bytes
        if self.host_limit is not None and any(one.host_bytes > self.host_limit for one in self.classes):
            return False
        return all(one.peak_reserved + one.context_bytes <= limit and not one.missing for one in self.classes)


@dataclass(frozen=True)
class TimeEstimate:
    """Terms of a step's time on the slowest class of ranks, in seconds.

    Attributes:
        step: from the end of one step to the end of the next.
        compute: at least one stream computes.
        exposed: by axis: no stream computes, because it waits for communication.
        bubble: no stream computes, because it waits for another pipeline stage.
        optimizer: part of all these terms that lies in the optimizer.
        host: no stream computes, because the host has not issued the work yet.
        mfu: model FLOPs over the devices' peak in the dtype of the computation. Attention counts in full, recomputation
            does not count.
        tokens_per_second_per_device: tokens of a step over its time and all devices.
    """

    step: Quantity
    compute: Quantity
    exposed: Mapping[str, Quantity]
    bubble: Quantity
    optimizer: Quantity
    host: Quantity
    mfu: Quantity
    tokens_per_second_per_device: Quantity


@dataclass
class Estimate:
    """The result of an estimate: memory and time of a step.

    Attributes:
        job: the estimated job.
        hardware: the hardware it runs on.
        memory: by class of ranks.
        time: terms of a step's time.
        timeline: streams of each class of ranks.
        programs: one recorded program for each class of ranks.
    """

    job: Job
    hardware: Machine
    memory: MemoryEstimate
    time: TimeEstimate
    timeline: Timeline
    programs: list[Program] = field(repr=False)

    @property
    def model(self) -> Any:
        """The estimated model."""
        return self.job.model

    @property
    def dims(self) -> ParallelDims:
        """The degrees of parallelism."""
        return self.job.dims

    @property
    def recipe(self) -> Recipe:
        """The training recipe."""
        return self.job.recipe

    @property
    def batch(self) -> int:
        """Sequences per step on each data-parallel rank."""
        return self.job.batch

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""
        return self.job.seq_len

    def __str__(self) -> str:
        return as_text(estimate_view(self))

    def __repr__(self) -> str:
        return f"Estimate({estimate_line(self)})"

    def _repr_html_(self) -> str:
        return as_html(estimate_view(self))

    def explain(self, check: int = 0) -> str:
        """Return a text with the largest terms of time and memory, their evidence, and suggested changes.

        Args:
            check: number of suggested changes to estimate as well.
        """
        return explain_estimate(self, check, estimate)


def estimate(
    model: Any,
    dims: ParallelDims,
    batch: int,
    seq_len: int,
    hardware: str | Path | Machine,
    recipe: Recipe | None = None,
    *,
    layers_per_stage: Sequence[int] | None = None,
    calibration: Calibration | None = None,
) -> Estimate:
    """Estimate memory and time of a training step on any number of devices, without access to one.

    >>> from sim.mesh.estimate import estimate
    >>> est = estimate("llama-tiny", ParallelDims(dp_shard=4, world_size=4), batch=2, seq_len=64, hardware="h100-sxm")
    >>> est.memory.fits(), est.time.step.low < est.time.step.value < est.time.step.high
    (True, True)

    The real model, plan and engine run on fake tensors, once for each kind of rank. The recorded operations are priced
    by the hardware's calibrated figures and replayed. It takes seconds, whatever the number of devices.

    Args:
        model: a name (`sim.mesh.model_names`), a config of `hyper_parallel.models`, or `sim.mesh.Custom`.
        dims: the degrees of parallelism.
        batch: sequences per step on each data-parallel rank: the global batch over dp_replicate * dp_shard * ep.
        seq_len: tokens per sequence.
        hardware: a name (`sim.mesh.machine_names`), the path of a TOML file, or a `sim.mesh.Machine`.
        recipe: precision, recomputation, sharding, schedule and `train.accumulate` of the run. None: `Recipe()`, with
            one micro-batch per sequence in a pipeline.
        layers_per_stage: layers of each pipeline stage; None: balanced.
        calibration: figures for prices; None: the package's.

    Raises:
        ValueError: degrees, sizes or names that do not fit; sizes in the model that depend on values.
        UnknownOperation: an operation has no price.
    """
    sizes = None if layers_per_stage is None else tuple(layers_per_stage)
    find_machine(hardware)  # an unknown name is reported first
    job = Job(find_model(model), dims, batch, seq_len, recipe or usual_recipe(dims, batch), sizes)
    return estimate_job(job, hardware, calibration)


def usual_recipe(dims: ParallelDims, batch: int) -> Recipe:
    """Return the default recipe: one micro-batch per sequence in a pipeline, else one micro-batch."""
    return Recipe().cut_into(batch if dims.pp_enabled else 1)


def estimate_run(
    run: Config,
    devices: int,
    hardware: str | Path | Machine,
    *,
    routing: Routing | None = None,
    calibration: Calibration | None = None,
) -> Estimate:
    """Estimate memory and time of a step of a training run, as `hyper-parallel estimate run.toml` does.

    >>> from hyper_parallel.trainer.config import Config, ParallelConfig
    >>> from sim.mesh.estimate import estimate_run
    >>> est = estimate_run(Config(parallel=ParallelConfig(tp=2)), devices=4, hardware="h100-sxm")
    >>> est.memory.fits(), est.dims.dp_shard
    (True, 2)

    Args:
        run: as for `hyper_parallel.trainer.train`, e.g. read by `load_config`.
        devices: number of devices, one rank on each.
        hardware: a name of `machine_names()`, the path of a file, or a `Machine`.
        routing: distribution of tokens over experts; None: even.
        calibration: figures for prices; None: the package's.

    Raises:
        TypeError: `run` is not a `Config`.
        ValueError: a check that `train` makes before its first step fails, or the hardware is unknown.
        UnknownOperation: an operation has no price.
    """
    return estimate_job(Job.of_run(run, devices, routing=routing), hardware, calibration)


def estimate_job(job: Job, hardware: str | Path | Machine, calibration: Calibration | None = None) -> Estimate:
    """Trace a job and price it on a hardware; see `estimate`."""
    found, recipe = find_machine(hardware), job.recipe
    if found.family == "cpu":  # torch has a fused RMSNorm kernel on accelerators only
        recipe = dataclasses.replace(recipe, norm="eager")
    job = dataclasses.replace(job, recipe=recipe, ring_kernel=ring_kernel_of(found, calibration), machine=found)
    with collector_paused():
        return price(trace(job), job, found, calibration)


def price(programs: list[Program], job: Job, hardware: Machine, calibration: Calibration | None = None) -> Estimate:
    """Estimate a traced job on a hardware.

    Args:
        programs: result of `sim.mesh.tracing.trace.trace` for the job.
        job: the traced job.
        hardware: the hardware to price for.
        calibration: figures for prices; None: the package's.
    """
    figures = calibration or load_calibration()
    general = figures.of(hardware, "estimate", hardware.family)
    memory = memory_of(programs, hardware, general)
    timeline = replay_time(programs, Pricing(hardware, figures, **job.recipe.pricing))
    tokens = job.tokens_per_step / job.dims.world_size
    peak = hardware.peak(job.recipe.precision.param_dtype)
    flops = job.model.flops_per_token(job.seq_len) * tokens
    time = time_of(timeline, job.dims.world_size, hardware, general, flops / peak, tokens, kernels=kernels_of(job))
    timeline.memory, timeline.title = memory.classes, f"{job.model.name} on {job.dims.world_size:,} x {hardware.title}"
    return Estimate(job, hardware, memory, time, timeline, programs)


def kernels_of(job: Job) -> tuple[str, ...]:
    """Return the kinds of kernels whose published runs determine the spread of a step, e.g. `("experts",)`."""
    return (*(("experts",) if job.model.family == "moe" else ()), *job.recipe.kernels) or ("dense",)


def level_of(runs: int, of_family: int) -> str:
    """Return how well published runs cover steps with a kind of kernels.

    >>> [level_of(*seen) for seen in ((10, 90), (1, 90), (0, 90), (0, 0))]
    ['often', 'seldom', 'never', 'nothing']

    Args:
        runs: number of published runs of the framework on the family of devices, used in the fit.
        of_family: number of published runs of all frameworks on the family.
    """
    return ("often" if runs >= _MANY else "seldom") if runs else "never" if of_family else "nothing"


def step_spread(general: Mapping[str, Any], kernels: Sequence[str]) -> float:
    """Return the standard deviation of the logarithm of a step, without the part from prices; see `level_of`."""
    own, family, spreads = general.get("framework", {}), general.get("seen", {}), general["spread"]
    return max(float(spreads[kind][level_of(own.get(kind, 0), family.get(kind, 0))]) for kind in kernels)


def memory_of(programs: Sequence[Program], hardware: Machine, general: Mapping[str, Any]) -> MemoryEstimate:
    """Replay the memory of each class of ranks.

    Args:
        programs: one per class.
        hardware: the hardware they run on.
        general: section `estimate` of a calibration.
    """
    if hardware.family == "cpu":
        rules = PLAIN
    else:
        rules = AllocatorRules(limit=hardware.allocatable_bytes, expandable=hardware.allocator == "expandable")
    classes = []
    for program in programs:
        groups = {(group.axis, tuple(group.ranks)) for group in program.groups if len(group.ranks) > 1}
        context = hardware.context_bytes + len(groups) * hardware.bytes_per_group
        with_all = with_workspaces(program, int(hardware.value("device.workspace", 0)))
        classes.append(replay_memory(with_all, rules, context_bytes=context))
    host = int(hardware.value("host.memory", 0)) or None
    spread = math.hypot(float(general.get("memory_spread", 0.05)), float(general.get("unseen_memory_spread", 0.0)))
    return MemoryEstimate(tuple(classes), hardware.memory_bytes, spread, host)


def time_of(
    timeline: Timeline,
    world_size: int,
    hardware: Machine,
    general: Mapping[str, Any],
    at_peak: float,
    tokens: float,
    steps: int = 1,
    kernels: Sequence[str] = ("dense",),
) -> TimeEstimate:
    """Return the terms of a replayed step's time on the slowest class of ranks.

    Args:
        timeline: of the step.
        world_size: number of ranks.
        hardware: the hardware they run on.
        general: section `estimate` of a calibration.
        at_peak: seconds per step of a device that computes at its peak.
        tokens: tokens of a step per device.
        steps: number of steps in the timeline.
        kernels: see `kernels_of`.
    """
    slowest = timeline.slowest
    nodes = max(1, -(-world_size // hardware.devices_per_node))
    factor = (1.0 + float(general.get("straggler", 0.0)) * math.log2(nodes)) / steps
    grade, spread = _evidence(slowest)
    model_spread = step_spread(general, kernels)
    total = math.hypot(spread, model_spread)

    def part(seconds: float, names: Sequence[str]) -> Quantity:
        own_grade, own_spread = _evidence(slowest, names)
        return Quantity.spread_by(seconds * factor, math.hypot(own_spread, model_spread), own_grade)

    step = Quantity.spread_by(timeline.step * factor, total, grade)
    kinds = list(slowest.kinds)

    def rate(of: float) -> Quantity:
        return Quantity(of / step.value, of / step.high, of / step.low, grade)

    return TimeEstimate(
        step=step,
        compute=part(slowest.compute, kinds),
        exposed={axis: part(seconds, [axis]) for axis, seconds in slowest.exposed.items() if seconds > 0},
        bubble=part(slowest.bubble, kinds),
        optimizer=part(slowest.optimizer, kinds),
        host=part(slowest.host, ["on_host"]),
        mfu=rate(at_peak),
        tokens_per_second_per_device=rate(tokens),
    )


def _evidence(rank: RankTime, names: Sequence[str] | None = None) -> tuple[str, float]:
    """Return the weakest grade among kinds of evidence with 10 % of the time or more, and the spread of all evidence.

    Errors in the price of one kind of operation are fully correlated; errors of different kinds are independent.
    """
    evidence: PriceBasis = rank.evidence
    chosen = evidence.seconds if names is None else {n: evidence.seconds[n] for n in names if n in evidence.seconds}
    weight: dict[str, float] = {**rank.kinds, **rank.exposed, "on_host": rank.host}
    total = sum(sum(by_grade.values()) for by_grade in chosen.values())
    if not total:
        return "assumed", 0.2
    if names is None:
        whole = sum(weight.get(name, 0.0) for name in chosen) or total
        variance = 0.0
        grades: dict[str, float] = {}
        for name, by_grade in chosen.items():
            seconds = sum(by_grade.values())
            share = weight.get(name, 0.0) / whole
            relative = evidence.spreads.get(name, 0.0) / seconds if seconds else 0.0
            variance += (share * relative) ** 2
            for grade, amount in by_grade.items():
                grades[grade] = grades.get(grade, 0.0) + share * (amount / seconds if seconds else 0.0)
        large = [grade for grade, share in grades.items() if share >= 0.1] or list(grades)
        return weakest(*large), math.sqrt(variance)
    spread = math.sqrt(sum(evidence.spreads.get(name, 0.0) ** 2 for name in chosen)) / total
    amounts: dict[str, float] = {}
    for by_grade in chosen.values():
        for grade, amount in by_grade.items():
            amounts[grade] = amounts.get(grade, 0.0) + amount
    return weakest(*[grade for grade, amount in amounts.items() if amount >= 0.1 * total]), spread
