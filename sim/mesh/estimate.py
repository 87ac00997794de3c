"""Estimates of a step: memory, time, where the time goes, and how sure that is."""

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

Z80 = 1.2816  # of the normal distribution: 80 % lie within so many standard deviations
LEVELS = ("often", "seldom", "never", "nothing")
"""How much is known of a step, most first: see `level_of`."""
_MANY = 10  # published runs: of so many, more tell little


@dataclass(frozen=True)
class Quantity:
    """A figure, how sure it is, and what it rests on.

    Attributes:
        value: the figure.
        low: lower end of the interval that is to hold the truth in 80 of 100 cases.
        high: its upper end.
        grade: of the weakest evidence that matters: measured, calibrated, datasheet or assumed.
    """

    value: float
    low: float
    high: float
    grade: str

    def __float__(self) -> float:
        return self.value

    @classmethod
    def spread_by(cls, value: float, spread: float, grade: str) -> Quantity:
        """Return a figure whose logarithm has a standard deviation.

        >>> Quantity.spread_by(100.0, 0.1, "calibrated").high > 110
        True
        """
        factor = math.exp(Z80 * spread)
        return cls(value, value / factor, value * factor, grade)


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of each class of ranks, in bytes.

    Attributes:
        classes: one for each place along the pipeline.
        limit: what the device's allocator can have.
        spread: relative standard deviation of what is reserved.
        host_limit: a device's share of its host's memory; None: it is not known.
    """

    classes: tuple[ClassMemory, ...]
    limit: int
    spread: float
    host_limit: int | None = None

    @property
    def fullest(self) -> ClassMemory:
        """The class that reserves most."""
        return max(self.classes, key=lambda one: one.peak_reserved)

    @property
    def peak(self) -> int:
        """Allocated at most, by any rank."""
        return max(one.peak_allocated for one in self.classes)

    @property
    def reserved(self) -> int:
        """Reserved at most, by any rank."""
        return max(one.peak_reserved for one in self.classes)

    @property
    def interval(self) -> Quantity:
        """What is reserved at most, with its 80 % interval."""
        return Quantity.spread_by(float(self.reserved), self.spread, "calibrated")

    def __repr__(self) -> str:
        return f"MemoryEstimate({memory_line(self)})"

    def fits(self, limit_bytes: float | None = None) -> bool:
        """Tell whether every rank's allocated memory, and what lies outside of the allocator, are within a limit.

        What is offloaded to the host has to fit there, too.

        Args:
            limit_bytes: None: what the device has.
        """
        limit = self.limit if limit_bytes is None else limit_bytes
        if self.host_limit is not None and any(one.host_bytes > self.host_limit for one in self.classes):
            return False
        return all(one.peak_reserved + one.context_bytes <= limit and not one.missing for one in self.classes)


@dataclass(frozen=True)
class TimeEstimate:
    """Where a step's time goes, in seconds, on the slowest class of ranks.

    Attributes:
        step: from one step's end to the next one's.
        compute: at least one stream computes.
        exposed: by axis: nothing computes, as it waits for communication.
        bubble: nothing computes, as other stages have not got there.
        optimizer: of all that, in the optimizer.
        host: nothing computes, as the host has not issued it.
        mfu: model FLOPs (attention counted in full, recomputation not) over what the devices could do in the dtype that
            is computed in.
        tokens_per_second_per_device: of a step, over all devices.
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
    """What a step needs.

    Attributes:
        job: what was estimated.
        hardware: what it runs on.
        memory: by class of ranks.
        time: of a step.
        timeline: of the streams of each class of ranks.
        programs: what each class of ranks does.
    """

    job: Job
    hardware: Machine
    memory: MemoryEstimate
    time: TimeEstimate
    timeline: Timeline
    programs: list[Program] = field(repr=False)

    @property
    def model(self) -> Any:
        """The model."""
        return self.job.model

    @property
    def dims(self) -> ParallelDims:
        """The degrees of parallelism."""
        return self.job.dims

    @property
    def recipe(self) -> Recipe:
        """How it is trained."""
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
        """Say in words what takes the time and the memory, how sure that is, and what to change.

        Args:
            check: how many of the changes to estimate, too.
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
    """Estimate memory and time of a training step on any number of devices, without any of them.

    >>> from sim.mesh.estimate import estimate
    >>> est = estimate("llama-tiny", ParallelDims(dp_shard=4, world_size=4), batch=2, seq_len=64, hardware="h100-sxm")
    >>> est.memory.fits(), est.time.step.low < est.time.step.value < est.time.step.high
    (True, True)

    The real model, plan and engine run on tensors without values, one rank of each kind; what they do is priced by
    the calibrated figures of the hardware, and replayed. It costs seconds, whatever the number of devices.

    Args:
        model: a name (`sim.mesh.model_names`), a config of `hyper_parallel.models`, or `sim.mesh.Custom`.
        dims: the degrees of parallelism.
        batch: sequences per step on each data-parallel rank: the global batch over dp_replicate * dp_shard * ep.
        seq_len: tokens of a sequence.
        hardware: a name (`sim.mesh.machine_names`), the path of a TOML file, or a `sim.mesh.Machine`.
        recipe: the run: its precision, recomputation, sharding, schedule, `train.accumulate`. None: `Recipe()`, and
            in a pipeline a micro-batch for each sequence.
        layers_per_stage: of a pipeline; None: balanced.
        calibration: figures to price with; None: those of the package.

    Raises:
        ValueError: degrees, sizes or names that do not fit; sizes in the model that depend on values.
        UnknownOperation: an operation that there is no price for.
    """
    sizes = None if layers_per_stage is None else tuple(layers_per_stage)
    find_machine(hardware)  # an unknown name is reported first
    job = Job(find_model(model), dims, batch, seq_len, recipe or usual_recipe(dims, batch), sizes)
    return estimate_job(job, hardware, calibration)


def usual_recipe(dims: ParallelDims, batch: int) -> Recipe:
    """Return the recipe of an estimate that is given none."""
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
        run: what `hyper_parallel.trainer.train` is given, or `load_config` reads.
        devices: that it would run on, a rank on each.
        hardware: a name of `machine_names()`, the path of a file, or a `Machine`.
        routing: how tokens go to experts; None: evenly.
        calibration: figures to price with; None: those of the package.

    Raises:
        TypeError: no `Config`.
        ValueError: as `train`, before it starts; a hardware that is not known.
        UnknownOperation: an operation that there is no price for.
    """
    return estimate_job(Job.of_run(run, devices, routing=routing), hardware, calibration)


def estimate_job(job: Job, hardware: str | Path | Machine, calibration: Calibration | None = None) -> Estimate:
    """Trace a job, and estimate it on a hardware; see `estimate`."""
    found, recipe = find_machine(hardware), job.recipe
    if found.family == "cpu":  # torch has a kernel of RMSNorm for accelerators alone
        recipe = dataclasses.replace(recipe, norm="eager")
    job = dataclasses.replace(job, recipe=recipe, ring_kernel=ring_kernel_of(found, calibration), machine=found)
    with collector_paused():
        return price(trace(job), job, found, calibration)


def price(programs: list[Program], job: Job, hardware: Machine, calibration: Calibration | None = None) -> Estimate:
    """Estimate what has been traced already, on a hardware.

    Args:
        programs: what `sim.mesh.tracing.trace.trace` has returned for the job.
        job: what was traced.
        hardware: to run it on.
        calibration: figures to price with; None: those of the package.
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
    """Return of which kinds of kernels published runs must tell how sure the estimate of a step is."""
    return (*(("experts",) if job.model.family == "moe" else ()), *job.recipe.kernels) or ("dense",)


def level_of(runs: int, of_family: int) -> str:
    """Return how much is known of steps with a kind of kernels.

    >>> [level_of(*seen) for seen in ((10, 90), (1, 90), (0, 90), (0, 0))]
    ['often', 'seldom', 'never', 'nothing']

    Args:
        runs: published ones of the framework on the family of devices, that figures were fitted to.
        of_family: those of all frameworks.
    """
    return ("often" if runs >= _MANY else "seldom") if runs else "never" if of_family else "nothing"


def step_spread(general: Mapping[str, Any], kernels: Sequence[str]) -> float:
    """Return the standard deviation of the logarithm of a step, beside that of its prices; see `level_of`."""
    own, family, spreads = general.get("framework", {}), general.get("seen", {}), general["spread"]
    return max(float(spreads[kind][level_of(own.get(kind, 0), family.get(kind, 0))]) for kind in kernels)


def memory_of(programs: Sequence[Program], hardware: Machine, general: Mapping[str, Any]) -> MemoryEstimate:
    """Replay the memory of each class of ranks.

    Args:
        programs: one of each class.
        hardware: that they run on.
        general: figures of estimates, the section `estimate` of a calibration.
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
    """Say where the time of a replayed step goes, on the slowest class of ranks.

    Args:
        timeline: of the step.
        world_size: ranks in all.
        hardware: that they run on.
        general: figures of estimates, the section `estimate` of a calibration.
        at_peak: seconds that a device would compute at its peak.
        tokens: of a step, for each device.
        steps: that the timeline holds.
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
    """The grade of the weakest evidence that makes up a tenth or more, and the spread of all of it.

    What one kind of operation's price is off by is the same for all of the kind, and independent of other kinds.
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
