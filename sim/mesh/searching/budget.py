"""Activation policies by a budget of memory: the fastest one with which a step fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hyper_parallel.core.common.errors import HyperParallelError
from hyper_parallel.core.machine.description import Machine, find_machine
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from sim.mesh.cost import UnknownOperation
from sim.mesh.estimate import Estimate, estimate_job, usual_recipe
from sim.mesh.job import Job
from sim.mesh.models import Model, find_model
from sim.mesh.recipe import Recipe
from sim.mesh.report import gib

_KINDS = (("selective", "alternate", "full"), ("full offload", "offload"))
"""What is tried: the second group where nothing of the first fits."""


def fit_activations(
    model: Model,
    dims: ParallelDims,
    batch: int,
    seq_len: int,
    hardware: str | Path | Machine,
    memory_limit: float | None = None,
    recipe: Recipe | None = None,
    *,
    layers_per_stage: Sequence[int] | None = None,
) -> Estimate:
    """Estimate a step with the fastest activation policy that fits into a budget of memory.

        found = fit_activations("llama3-8b", ParallelDims(dp_shard=8), 1, 8192, "h100-sxm", memory_limit=60 * 2**30)
        hp.checkpoint_blocks(model, found.recipe.activations)

    Each kind of checkpointing is estimated for all blocks, and for the first ones of each stage: as few as fit. Memory
    and time are about straight in their number, so that two or three estimates find it. Offload is tried where nothing
    else fits.

    Args:
        model: name, config or `Custom`.
        dims: the degrees of parallelism.
        batch: sequences per step on each data-parallel rank.
        seq_len: tokens of a sequence.
        hardware: name, file or `Machine`.
        memory_limit: bytes on a device, with what torch's allocator reserves and what lies outside of it; None: what
            the hardware has.
        recipe: the rest of it; its checkpointing is not read.
        layers_per_stage: of a pipeline; None: balanced.

    Returns:
        The estimate; its `recipe.activations` is what `hp.checkpoint_blocks` takes, and as text what `checkpointing`
        of the trainer takes.

    Raises:
        ValueError: as `estimate`; no policy fits.
    """
    sizes = None if layers_per_stage is None else tuple(layers_per_stage)
    device = find_machine(hardware)
    job = Job(find_model(model), dims, batch, seq_len, recipe or usual_recipe(dims, batch), sizes)
    return fit_job(job, device, memory_limit)


def fit_job(
    job: Job,
    hardware: str | Path | Machine,
    memory_limit: float | None = None,
    estimator: Callable[[Job, Machine], Estimate] = estimate_job,
) -> Estimate:
    """Estimate a job with the fastest activation policy that fits; see `fit_activations`.

    Args:
        job: what is estimated, but for its checkpointing.
        hardware: to run it on.
        memory_limit: bytes on a device; None: what the hardware has.
        estimator: of a job.
    """
    device = find_machine(hardware)
    return _Fitting(job, device, device.memory_within("cannot fit activations", memory_limit), estimator).run()


class NoPolicyFits(HyperParallelError, ValueError):
    """A step that needs more memory than there is, whatever its blocks keep."""


class _Checkpointing(NamedTuple):
    """A kind of checkpointing that fits for all blocks.

    Attributes:
        name: of it.
        whole: the estimate with all blocks.
        blocks: how many it may take to fit, by a straight line.
        seconds: of a step, likewise.
    """

    name: str
    whole: Estimate
    blocks: int
    seconds: float


class _Fitting:
    """One choice of a policy."""

    def __init__(
        self, job: Job, hardware: Machine, limit: float, estimator: Callable[[Job, Machine], Estimate]
    ) -> None:
        self.job, self.hardware, self.limit, self.estimator = job, hardware, limit, estimator
        self.most = max(len(part.layers) for part in job.stages())
        self.tried: list[Estimate] = []

    def run(self) -> Estimate:
        none = self.estimate("none", None)
        if self.fits(none):
            return none
        for names in _KINDS:
            found: list[Estimate] = []
            for kind in sorted(self.kinds(names, none), key=lambda one: one.seconds):
                if not found or kind.seconds < min(map(_seconds, found)):  # else no number of its blocks is faster
                    found.append(self.fewest(kind))
            if found:
                return min(found, key=_seconds)
        closest = min(self.tried, key=_bytes)
        asked = f"cannot fit {self.job.model.name} into {gib(self.limit)}"
        seen = f"{closest.recipe.activations} needs {gib(_bytes(closest))} on a device"
        host = max(one.host_bytes for one in closest.memory.classes)
        if host and _bytes(closest) <= self.limit:
            seen += f", and {gib(host)} of its host's memory, which is more than it has"
        hint = "a larger budget, shorter sequences or more micro-batches, or weights split over more devices"
        raise NoPolicyFits(asked, "no activation policy needs less", seen, hint)

    def kinds(self, names: Sequence[str], none: Estimate) -> Iterator[_Checkpointing]:
        """Yield the kinds that fit for all blocks, with a straight line's guess for fewer."""
        for name in names:
            try:
                whole = self.estimate(name, None)
            except UnknownOperation:
                raise
            except ValueError:  # the schedule refuses it; what is wrong with the job itself, "none" has told
                continue
            if self.fits(whole):
                part = (_bytes(none) - self.limit) / max(_bytes(none) - _bytes(whole), 1)
                blocks = min(max(int(-(-part * self.most // 1)), 1), self.most)
                seconds = _seconds(none) + blocks / self.most * (_seconds(whole) - _seconds(none))
                yield _Checkpointing(name, whole, blocks, seconds)

    def fewest(self, kind: _Checkpointing) -> Estimate:
        """Return the estimate with the fewest blocks that fit, from the guess on one by one."""
        blocks, best = kind.blocks, kind.whole
        while blocks < self.most and not self.fits(found := self.estimate(kind.name, blocks)):
            blocks += 1
        if blocks < self.most:
            best = found
        while blocks > 1 and self.fits(found := self.estimate(kind.name, blocks - 1)):
            blocks, best = blocks - 1, found
        return min(best, kind.whole, key=_seconds)

    def estimate(self, kind: str, blocks: int | None) -> Estimate:
        job, text = self.job, kind if blocks is None else f"{kind} first {blocks}"
        self.tried.append(self.estimator(replace(job, recipe=job.recipe.with_savings(text)), self.hardware))
        return self.tried[-1]

    def fits(self, found: Estimate) -> bool:
        return found.memory.fits(self.limit)


def _seconds(found: Estimate) -> float:
    return found.time.step.value


def _bytes(found: Estimate) -> int:
    """What the fullest rank needs."""
    return max(one.peak_reserved + one.context_bytes for one in found.memory.classes)
