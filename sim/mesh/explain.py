"""An estimate in words: what takes the time and the memory, how sure that is, and what to change."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

from sim.mesh.report import gib, headline, interval, kinds, per_second, percent, rate_of, seconds, terms
from sim.mesh.searching.advice import Advice, advise

_WIDTH = 120
_SHOWN = 0.01  # of the step, or of memory: what is less is not shown
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
    """Return the largest terms in words with their evidence grades, what bounds the step, and what to change.

    Args:
        estimate: what `sim.mesh.estimate` has returned.
        check: how many of the suggested changes are estimated, too: each costs what an estimate costs.
        estimator: what estimates them, such as `sim.mesh.estimate`; None: none is estimated.
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
    fullest = max(estimate.memory.classes, key=lambda one: one.peak_reserved)
    alike = f", as {fullest.like - 1:,} more ranks" if fullest.like > 1 else ""
    lines = [f"Where the memory goes, on rank {fullest.rank}{alike}, at its peak in {fullest.at}:"]
    for name, amount in sorted(fullest.by_category.items(), key=lambda pair: -pair[1]):
        if amount >= _SHOWN * fullest.peak_allocated:
            lines.append(_item(f"{percent(amount / fullest.peak_allocated)} {name}: {gib(amount)}, {_meaning(name)}"))
    lost = fullest.peak_reserved - fullest.peak_allocated
    line = f"{gib(fullest.peak_allocated)} in all; the allocator reserves {gib(lost)} more"
    lines.append(_item(f"{line}, in pieces that did not fit what was asked for"))
    if fullest.context_bytes:
        lines.append(_item(f"{gib(fullest.context_bytes)} outside of torch: the driver's context and communicators"))
    return "\n".join(lines)


def _meaning(category: str) -> str:
    return _MEANINGS.get(category, "other tensors")


def _bound(estimate: Any) -> str:
    """Say what would have to be faster for the step to be shorter."""
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
