"""Advice on a candidate: single changes that its estimate suggests, the most promising first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.pipeline.schedules import find_schedule
from sim.mesh.recipe import Recipe
from sim.mesh.report import percent

_FULL = 0.95  # of a device's memory: no room for what allocators lose
_ROOM = 0.75
_MUCH = 0.05  # of a step, or of memory: worth a word


@dataclass(frozen=True)
class Advice:
    """One change.

    Attributes:
        change: what to do, as one would type it.
        why: which figure suggests it.
        saves: "memory" or "time".
        dims: the degrees after it.
        recipe: the recipe after it.
        batch: sequences on each data-parallel rank after it.
    """

    change: str
    why: str
    saves: str
    dims: ParallelDims
    recipe: Recipe
    batch: int


def advise(estimate: Any) -> list[Advice]:
    """Return changes worth a try, without having tried them.

    Args:
        estimate: what `sim.mesh.estimate` has returned.
    """
    return list(_Advisor(estimate).all())


class _Advisor:
    def __init__(self, estimate: Any) -> None:
        self.estimate = estimate
        self.dims, self.recipe, self.batch = estimate.dims, estimate.recipe, estimate.batch
        self.parts = self.recipe.parts(self.batch, self.dims)
        self.fullest = max(estimate.memory.classes, key=lambda one: one.peak_reserved)
        used = estimate.memory.reserved + self.fullest.context_bytes
        self.used = used / estimate.hardware.memory_bytes
        self.step = estimate.time.step.value

    def all(self) -> Iterator[Advice]:
        if self.used > _FULL or not self.estimate.memory.fits():
            yield from self._memory()
        yield from self._time()

    def _share(self, category: str) -> float:
        """Part of the fullest rank's memory."""
        return float(self.fullest.by_category.get(category, 0) / max(self.fullest.peak_allocated, 1))

    def _with(self, change: str, why: str, saves: str, **recipe: Any) -> Advice:
        return Advice(change, why, saves, self.dims, dataclasses.replace(self.recipe, **recipe), self.batch)

    def _memory(self) -> Iterator[Advice]:
        recipe = self.recipe
        activations = self._share("activations")
        why = f"activations are {percent(activations)} of the fullest rank's memory"
        if activations > _MUCH and recipe.checkpointing != "full":
            more = "selective" if recipe.checkpointing == "none" and not self._splits_backward() else "full"
            yield self._with(f'checkpointing="{more}"', why, "memory", checkpointing=more)
        if activations > _MUCH and self.batch % (2 * self.parts) == 0:
            yield self._with(f"microbatches={2 * self.parts}", why, "memory", microbatches=2 * self.parts)
        if not recipe.fused_loss and self._share("logits") > _MUCH:
            why = f"logits are {percent(self._share('logits'))} of the fullest rank's memory"
            yield self._with("fused_loss=True", why, "memory", fused_loss=True)
        if recipe.zero < 3 and self.dims.dp_shard * self.dims.ep * self.dims.cp > 1:
            share = self._share("gathered weights") + self._share("parameters")
            why = f"weights are {percent(share)} of the fullest rank's memory"
            yield self._with("zero=3", why, "memory", zero=3, **_without_overlaps(recipe))
        states = self._share("parameters") + self._share("gradients") + self._share("optimizer")
        if self.dims.dp_replicate > 1 and states > _MUCH:
            why = f"weights, gradients and optimizer state are {percent(states)} of the fullest rank's memory"
            dims = dataclasses.replace(self.dims, dp_replicate=1, dp_shard=self.dims.dp_shard * self.dims.dp_replicate)
            yield Advice(f"dp_replicate=1 dp_shard={dims.dp_shard}", why, "memory", dims, self.recipe, self.batch)

    def _time(self) -> Iterator[Advice]:
        recipe, time = self.recipe, self.estimate.time
        has_room = self.used < _ROOM
        if has_room and recipe.checkpointing != "none":
            less = "none" if recipe.checkpointing == "selective" or self._splits_backward() else "selective"
            why = f"backward computes again, and {percent(1 - self.used)} of memory is free"
            layers = {"checkpoint_layers": None} if less == "none" else {}
            yield self._with(f'checkpointing="{less}"', why, "time", checkpointing=less, **layers)
        if has_room and recipe.zero == 3 and self._exposed("dp_shard", "shard", "fsdp", "dp") > _MUCH * self.step:
            why = f"weights are gathered again in backward, and {percent(1 - self.used)} of memory is free"
            yield self._with("zero=2", why, "time", zero=2)
        yield from self._pipeline()
        if (waits := self._exposed("tp")) > _MUCH * self.step and self.dims.tp > 1:
            why = f"{percent(waits / self.step)} of the step waits for axis tp"
            yield from self._less_tp(why)
        if time.host.value > _MUCH * self.step and not recipe.graphs:
            why = f"{percent(time.host.value / self.step)} of the step waits for the host to issue operations"
            yield (
                self._with("compile=True", why, "time", compile=True)
                if not recipe.compile
                else self._with("graphs=True", why, "time", graphs=True)
            )
        elif not recipe.compile and not self._splits_backward():
            why = "what lies between matrix products reads and writes memory, one kernel for each operation"
            yield self._with("compile=True", why, "time", compile=True)

    def _pipeline(self) -> Iterator[Advice]:
        bubble = self.estimate.time.bubble.value / self.step
        if self.dims.pp == 1 or bubble < _MUCH:
            return
        why = f"the bubble of the pipeline is {percent(bubble)} of the step"
        if self.batch % (2 * self.parts) == 0:
            yield self._with(f"microbatches={2 * self.parts}", why, "time", microbatches=2 * self.parts)
        if self.recipe.schedule == "1f1b" and self.parts % max(1, self.parts // self.dims.pp) == 0:
            yield self._with('schedule="interleaved"', why, "time", schedule="interleaved")

    def _less_tp(self, why: str) -> Iterator[Advice]:
        dims = self.dims
        if self.batch % 2 or dims.tp % 2:
            return
        # Half the ranks along tp, twice along dp: each data-parallel rank takes half of the sequences.
        fewer = dataclasses.replace(
            dims, tp=dims.tp // 2, dp_shard=2 * dims.dp_shard, etp=dims.tp // 2 if dims.etp > 1 else dims.etp
        )
        batch = self.batch // 2
        recipe = self.recipe
        if recipe.microbatches is not None:
            parts = recipe.microbatches if batch % recipe.microbatches == 0 else batch
            if dims.pp > 1 and parts < dims.pp:
                return
            recipe = dataclasses.replace(recipe, microbatches=parts)
        elif dims.pp > 1 and batch < dims.pp:
            return
        yield Advice(f"tp={fewer.tp} dp_shard={fewer.dp_shard}", why, "time", fewer, recipe, batch)

    def _exposed(self, *axes: str) -> float:
        return float(sum(quantity.value for axis, quantity in self.estimate.time.exposed.items() if axis in axes))

    def _splits_backward(self) -> bool:
        """Whether the schedule goes backward twice, which neither selective checkpointing nor compile can."""
        return self.dims.pp > 1 and find_schedule(self.recipe.schedule).splits_backward


def _without_overlaps(recipe: Recipe) -> dict[str, Any]:
    """Options of replicated weights, as they are by default: ZeRO-3 has others."""
    fields = {field.name: field.default for field in dataclasses.fields(recipe)}
    return {name: fields[name] for name in ("overlap_grad_reduce", "overlap_param_gather")}
