"""An estimate in words: the largest terms of time and memory, their uncertainty, and suggested changes."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from sim.mesh.recipe import Recipe
from sim.mesh.report import gib, headline, interval, kinds, per_second, percent, rate_of, seconds, terms

_WIDTH = 120
_SHOWN = 0.01  # share of the step, or of memory: smaller terms are not shown
_GRADES = {
    "measured": "measured on this hardware",
    "calibrated": "fitted to published measurements",
    "datasheet": "from the data sheet",
    "assumed": "assumed: there is no measurement",
}
_MEANINGS = {
    "parameters": "weights that stay",
    "gradients": "gradients that stay until the optimizer's step",
    "optimizer": "state of the optimizer",
    "activations": "what backward needs of forward, and what is being computed",
    "gathered weights": "whole weights of the blocks at work",
    "communication": "buffers of communication",
    "logits": "logits and what the loss makes of them",
    "inputs": "tokens and positions",
    "workspace": "workspaces of kernels",
}


def explain(estimate: Any, check: int = 0, estimator: Callable[..., Any] | None = None) -> str:
    """Return a text with the largest terms, their evidence grades, the bound of the step, and suggested changes.

    Args:
        estimate: a result of `sim.mesh.estimate`.
        check: number of suggested changes to estimate as well; each costs a full estimate.
        estimator: function that estimates them, e.g. `sim.mesh.estimate`; None: no change is estimated.
    """
    parts = [headline(estimate), _in_short(estimate), _time(estimate), _memory(estimate), _bound(estimate)]
    parts.append(_changes(estimate, check, estimator))
    return "\n\n".join(part for part in parts if part)


def _in_short(estimate: Any) -> str:
    time, memory = estimate.time, estimate.memory
    rate, unit = rate_of(estimate)
    limit = estimate.hardware.memory_bytes
    fits = "which fits" if memory.fits() else "which does not fit"
    return _wrapped(
        f"A step takes {seconds(time.step.value)} (80 % interval {interval(time.step)}): {per_second(rate.value)} "
        f"{unit}/s on each device. The fullest rank reserves {gib(memory.reserved)} of {gib(limit)}, {fits}."
    )


def _time(estimate: Any) -> str:
    step = estimate.time.step.value
    lines = ["Where the time goes:"]
    ordered = sorted(terms(estimate), key=lambda pair: -pair[1].value)
    for name, quantity in ordered:
        if quantity.value >= _SHOWN * step:
            line = f"{percent(quantity.value / step)} {name}: {seconds(quantity.value)}, 80 % interval"
            lines.append(_item(f"{line} {interval(quantity)} ({_GRADES.get(quantity.grade, quantity.grade)})"))
            if name == "compute":
                of = "; ".join(f"{kind} {percent(share)}" for kind, share in kinds(estimate) if share >= _SHOWN)
                lines.append(_item(f"of compute: {of}"))
    return "\n".join(lines)


def _memory(estimate: Any) -> str:
    fullest = estimate.memory.fullest
    alike = f", as {fullest.like - 1:,} more ranks" if fullest.like > 1 else ""
    lines = [f"Where the memory goes, on rank {fullest.rank}{alike}, at its peak in {fullest.at}:"]
    for name, amount in sorted(fullest.by_category.items(), key=lambda pair: -pair[1]):
        if amount >= _SHOWN * fullest.peak_allocated:
            share, meaning = percent(amount / fullest.peak_allocated), _MEANINGS.get(name, "other tensors")
            lines.append(_item(f"{share} {name}: {gib(amount)}, {meaning}"))
    lost = fullest.peak_reserved - fullest.peak_allocated
    line = f"{gib(fullest.peak_allocated)} in all; the allocator reserves {gib(lost)} more"
    lines.append(_item(f"{line}, in pieces that did not fit what was asked for"))
    if fullest.context_bytes:
        lines.append(_item(f"{gib(fullest.context_bytes)} outside of torch: the driver's context and communicators"))
    return "\n".join(lines)


def _bound(estimate: Any) -> str:
    """Return a text that names the term that bounds the step."""
    step, named = estimate.time.step.value, dict(terms(estimate))
    waits = {name: q.value for name, q in named.items() if name.startswith("exposed")}
    communication = sum(waits.values())
    bubble = named["bubble"].value if "bubble" in named else 0.0
    host = named["waits for the host"].value if "waits for the host" in named else 0.0
    compute = named["compute"].value if "compute" in named else 0.0
    largest = max((compute, "compute"), (communication, "waits"), (bubble, "bubble"), (host, "host"))[1]
    if largest == "waits":
        axis = max(waits, key=lambda name: waits[name]).rpartition(", ")[2]
        text = f"Communication bounds the step, most of all along axis {axis}: devices wait for it"
        text += f" {percent(communication / step)} of the time."
    elif largest == "bubble":
        text = f"The pipeline bounds the step: devices have nothing to do {percent(bubble / step)} of the time."
    elif largest == "host":
        text = f"The host bounds the step: devices wait {percent(host / step)} of the time for it to issue operations."
    else:
        text = f"Compute bounds the step: it is {percent(compute / step)} of it."
    return _wrapped(text)


def _changes(estimate: Any, check: int, estimator: Callable[..., Any] | None) -> str:
    found = advise(estimate)
    if not found:
        return ""
    lines = ["What to change:"]
    for at, advice in enumerate(found):
        lines.append(_item(f"{advice.change}: {advice.why}. {_outcome(estimate, advice, estimator, at < check)}"))
    return "\n".join(lines)


def _outcome(estimate: Any, advice: Advice, estimator: Callable[..., Any] | None, checked: bool) -> str:
    if not checked or estimator is None:
        return f"May save {advice.saves}; not estimated."
    try:
        after = estimator(
            model=estimate.model,
            dims=advice.dims,
            batch=advice.batch,
            seq_len=estimate.seq_len,
            hardware=estimate.hardware,
            recipe=advice.recipe,
        )
    except ValueError as error:
        return f"It cannot be done here: {str(error).splitlines()[0]}"
    before_s, after_s = estimate.time.step.value, after.time.step.value
    fits = "" if after.memory.fits() else ", which does not fit"
    kind = "better" if (after_s < before_s) == (advice.saves == "time") else "no better"
    if advice.saves == "memory":
        kind = "better" if after.memory.reserved < estimate.memory.reserved else "no better"
    return (
        f"Estimated, {kind}: the step {seconds(before_s)} -> {seconds(after_s)}, "
        f"reserved {gib(estimate.memory.reserved)} -> {gib(after.memory.reserved)}{fits}."
    )


def _item(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="  - ", subsequent_indent="    ")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH)


# Advice: single changes that an estimate suggests, the most promising first -------------------------------------------

_FULL = 0.95  # share of a device's memory: above it, no room for fragmentation
_ROOM = 0.75
_MUCH = 0.05  # share of a step, or of memory: smaller terms suggest no change


@dataclass(frozen=True)
class Advice:
    """One suggested change.

    Attributes:
        change: the change as a user types it, e.g. `accumulate=8`.
        why: the figure that suggests it.
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
    """Return changes worth a try, without estimating them."""
    return list(_Advisor(estimate).all())


class _Advisor:
    def __init__(self, estimate: Any) -> None:
        self.estimate = estimate
        self.dims, self.recipe, self.batch = estimate.dims, estimate.recipe, estimate.batch
        self.parts = self.recipe.micro_batches
        self.fullest = estimate.memory.fullest
        used = estimate.memory.reserved + self.fullest.context_bytes
        self.used = used / estimate.hardware.memory_bytes
        self.step = estimate.time.step.value

    def all(self) -> Iterator[Advice]:
        if self.used > _FULL or not self.estimate.memory.fits():
            yield from self._memory()
        yield from self._time()

    def _share(self, category: str) -> float:
        """Return a category's share of the fullest rank's memory."""
        return float(self.fullest.by_category.get(category, 0) / max(self.fullest.peak_allocated, 1))

    def _with(self, change: str, why: str, saves: str, recipe: Recipe) -> Advice:
        return Advice(change, why, saves, self.dims, recipe, self.batch)

    def _memory(self) -> Iterator[Advice]:
        recipe = self.recipe
        activations = self._share("activations")
        why = f"activations are {percent(activations)} of the fullest rank's memory"
        if activations > _MUCH and recipe.checkpointing != "full":
            more = "selective" if recipe.checkpointing == "none" and not self._splits_backward() else "full"
            yield self._with(f'checkpointing="{more}"', why, "memory", recipe.with_savings(more))
        if activations > _MUCH and self.batch % (2 * self.parts) == 0:
            yield self._with(f"accumulate={2 * self.parts}", why, "memory", recipe.cut_into(2 * self.parts))
        if recipe.zero < 3 and self.dims.dp_shard * self.dims.ep * self.dims.cp > 1:
            share = self._share("gathered weights") + self._share("parameters")
            why = f"weights are {percent(share)} of the fullest rank's memory"
            yield self._with("reshard_after_forward=True", why, "memory", recipe.with_zero(3))
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
            yield self._with(f'checkpointing="{less}"', why, "time", recipe.with_savings(less))
        if has_room and recipe.zero == 3 and self._exposed("dp_shard", "shard", "fsdp", "dp") > _MUCH * self.step:
            why = f"weights are gathered again in backward, and {percent(1 - self.used)} of memory is free"
            yield self._with("reshard_after_forward=False", why, "time", recipe.with_zero(2))
        yield from self._pipeline()
        if (waits := self._exposed("tp")) > _MUCH * self.step and self.dims.tp > 1:
            why = f"{percent(waits / self.step)} of the step waits for axis tp"
            yield from self._less_tp(why)
        if not recipe.parallel.fuses and not self._splits_backward():
            why = "what lies between matrix products reads and writes memory, one kernel for each operation"
            if time.host.value > _MUCH * self.step:
                why = f"{percent(time.host.value / self.step)} of the step waits for the host to issue operations"
            yield self._with("compile=True", why, "time", recipe.having(compile=True))

    def _pipeline(self) -> Iterator[Advice]:
        bubble = self.estimate.time.bubble.value / self.step
        if self.dims.pp == 1 or bubble < _MUCH:
            return
        why = f"the bubble of the pipeline is {percent(bubble)} of the step"
        if self.batch % (2 * self.parts) == 0:
            yield self._with(f"accumulate={2 * self.parts}", why, "time", self.recipe.cut_into(2 * self.parts))
        if self.recipe.parallel.pipeline.name == "1f1b" and self.parts % max(1, self.parts // self.dims.pp) == 0:
            yield self._with('schedule="interleaved"', why, "time", self.recipe.having(schedule="interleaved"))

    def _less_tp(self, why: str) -> Iterator[Advice]:
        dims = self.dims
        if self.batch % 2 or dims.tp % 2:
            return
        # Halve tp and double dp_shard, so each data-parallel rank takes half the sequences.
        fewer = dataclasses.replace(
            dims, tp=dims.tp // 2, dp_shard=2 * dims.dp_shard, etp=dims.tp // 2 if dims.etp > 1 else dims.etp
        )
        batch = self.batch // 2
        recipe = self.recipe
        parts = self.parts if batch % self.parts == 0 else batch
        if dims.pp > 1 and parts < dims.pp:
            return
        recipe = recipe.cut_into(parts)
        yield Advice(f"tp={fewer.tp} dp_shard={fewer.dp_shard}", why, "time", fewer, recipe, batch)

    def _exposed(self, *axes: str) -> float:
        return float(sum(quantity.value for axis, quantity in self.estimate.time.exposed.items() if axis in axes))

    def _splits_backward(self) -> bool:
        """Return True if the schedule splits backward in two, which excludes selective checkpointing and compile."""
        return self.dims.pp > 1 and self.recipe.parallel.pipeline.splits_backward
