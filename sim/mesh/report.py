"""Tables and text of estimates: numbers with units, and the report of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hyper_parallel.core.common.tables import View, plain_table
from sim.mesh.models import find_model
from sim.mesh.pricing.profiled import Breakdown, compare_seconds
from sim.mesh.searching.space import Candidate

# Numbers of estimates as people read them -----------------------------------------------------------------------------

GIB = 2**30


def gib(amount: float) -> str:
    """Write bytes.

    >>> gib(85_899_345_920), gib(5_242_880), gib(512)
    ('80.0 GiB', '5.0 MiB', '512 B')
    """
    if amount >= 0.1 * GIB:
        return f"{amount / GIB:,.1f} GiB"
    if amount >= 0.1 * 2**20:
        return f"{amount / 2**20:,.1f} MiB"
    return f"{amount / 1024:,.1f} KiB" if amount >= 1024 else f"{amount:.0f} B"


def seconds(amount: float) -> str:
    """Write a time with three digits.

    >>> seconds(12.3456), seconds(0.0456), seconds(7.2e-5), seconds(123.4)
    ('12.3 s', '45.6 ms', '72.0 us', '123 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if amount >= 0.9995 * size:
            return f"{per_second(amount / size)} {unit}"
    return f"{per_second(amount / 1e-6)} us"


def per_second(amount: float) -> str:
    """Write a rate, or another number, with three digits.

    >>> per_second(5432.1), per_second(54.321), per_second(0.5)
    ('5,432', '54.3', '0.500')
    """
    if amount >= 99.95:
        return f"{amount:,.0f}"
    return f"{amount:.1f}" if amount >= 9.995 else f"{amount:.2f}" if amount >= 0.9995 else f"{amount:.3f}"


def percent(part: float) -> str:
    """Write a share.

    >>> percent(0.4567), percent(0.0123)
    ('46 %', '1.2 %')
    """
    return f"{100 * part:.0f} %" if abs(part) >= 0.0995 else f"{100 * part:.1f} %"


def interval(quantity: Any, write: Any = seconds) -> str:
    """Write the 80 % interval of a quantity, the unit once.

    >>> from types import SimpleNamespace
    >>> interval(SimpleNamespace(low=11.2, high=13.9)), interval(SimpleNamespace(low=0.9, high=1.2))
    ('11.2 to 13.9 s', '900 ms to 1.20 s')
    """
    low, high = write(quantity.low), write(quantity.high)
    number, _, unit = low.partition(" ")
    return f"{number} to {high}" if unit and high.endswith(" " + unit) else f"{low} to {high}"


# Estimates as tables --------------------------------------------------------------------------------------------------

_MOST_CLASSES = 8
_SHORT: dict[str, str] = {"parameters": "params", "gradients": "grads", "gathered weights": "gathered"}
"""What is above the column of a category, where that is not its name."""
_ORDER = ("parameters", "gradients", "optimizer", "activations", "gathered weights", "communication", "logits")


def model_name(estimate: Any) -> str:
    """Return the display name of an estimate's model, e.g. `llama3-8b`."""
    return find_model(estimate.model).name


def estimate_view(estimate: Any) -> View:
    """Return the tables of an estimate, to be printed by rich."""
    return View(
        Text(headline(estimate)),
        Text(),
        Text("Memory of a rank, where it is fullest", style="bold"),
        memory_table(estimate),
        Text("\n".join(memory_notes(estimate))),
        Text(),
        Text("Time of a step", style="bold"),
        time_table(estimate),
        Text("\n".join(_time_notes(estimate))),
    )


def estimate_line(estimate: Any) -> str:
    """Return an estimate in one line: model, hardware, degrees, step time and memory."""
    dims, step = estimate.dims, estimate.time.step
    degrees = Candidate(dims, estimate.recipe, estimate.batch).degrees
    where = f"{model_name(estimate)} on {dims.world_size:,} x {estimate.hardware.name}, {degrees}"
    return f"{where}: {seconds(step.value)} a step ({interval(step)}), {memory_line(estimate.memory)}"


def memory_line(memory: Any) -> str:
    """Return the memory of an estimate in a few words, e.g. `61.2 GiB reserved, fits`."""
    return f"{gib(memory.reserved)} reserved, {'fits' if memory.fits() else 'DOES NOT FIT'}"


def headline(estimate: Any) -> str:
    """Return the estimated configuration in three lines."""
    dims = estimate.dims
    candidate = Candidate(dims, estimate.recipe, estimate.batch)
    sequences = estimate.batch * dims.batch_ranks
    parts = candidate.parts
    cut = f", in {parts} micro-batches of {estimate.batch // parts}" if parts > 1 else ""
    of = f"sequence{'s' * (sequences > 1)} of {estimate.seq_len:,} tokens"
    steps = f"{sequences:,} {of if _has_tokens(estimate) else 'sample' + 's' * (sequences > 1)} in a step"
    return (
        f"{model_name(estimate)} on {dims.world_size:,} x {estimate.hardware.title}: {candidate.degrees}\n"
        f"{steps}, {estimate.batch:,} on each data-parallel rank{cut}\n{estimate.recipe.describe()}"
    )


def _has_tokens(estimate: Any) -> bool:
    return find_model(estimate.model).has_tokens(estimate.seq_len)


def rate_of(estimate: Any) -> tuple[Any, str]:
    """Return the training rate per device with its unit: tokens/s, or samples/s for models without tokens."""
    rate = estimate.time.tokens_per_second_per_device
    if _has_tokens(estimate):
        return rate, "tokens"
    by = estimate.seq_len
    return dataclasses.replace(rate, value=rate.value / by, low=rate.low / by, high=rate.high / by), "samples"


def memory_table(estimate: Any) -> Table:
    """Return a table of memory by rank class and category."""
    classes = _shown(estimate.memory.classes)
    found = {name for one in classes for name, size in one.by_category.items() if size >= 0.02 * one.peak_allocated}
    names = [*(name for name in _ORDER if name in found), *sorted(found.difference(_ORDER))]
    table = plain_table(
        "rank", "ranks alike", "reserved", "allocated", *(_SHORT.get(name, name) for name in names), "other"
    )
    for one in classes:
        shown = [one.by_category.get(name, 0) for name in names]
        rest = one.peak_allocated - sum(shown)
        table.add_row(
            str(one.rank),
            f"{one.like:,}",
            gib(one.peak_reserved),
            gib(one.peak_allocated),
            *(gib(amount) if amount else "-" for amount in (*shown, rest)),
        )
    return table


def _shown(classes: Sequence[Any]) -> list[Any]:
    """Return all classes; if there are many, the first, the last and the fullest."""
    if len(classes) <= _MOST_CLASSES:
        return list(classes)
    fullest = sorted(classes, key=lambda one: -one.peak_reserved)[: _MOST_CLASSES - 2]
    return [one for at, one in enumerate(classes) if at in (0, len(classes) - 1) or any(one is it for it in fullest)]


def memory_notes(estimate: Any) -> list[str]:
    """Return notes on the memory peak: its place in the step, its fit and its interval."""
    memory, fullest = estimate.memory, estimate.memory.fullest
    left_out = len(memory.classes) - len(_shown(memory.classes))
    notes = [f"{left_out} more rank classes are not shown"] if left_out else []
    notes.append(f"allocated is highest in {fullest.at}, on rank {fullest.rank}")
    notes += [f"of the weights, {_held(one)}" for one in _shown(memory.classes) if one.held]
    limit = estimate.hardware.memory_bytes
    used = memory.reserved + fullest.context_bytes
    fits = "fits" if memory.fits() else "DOES NOT FIT"
    outside = f" and {gib(fullest.context_bytes)} outside of torch's allocator" if fullest.context_bytes else ""
    notes.append(f"{fits}: {gib(memory.reserved)} reserved{outside}, {percent(used / limit)} of {gib(limit)}")
    notes.append(f"80 % interval of reserved: {gib(memory.interval.low)} to {gib(memory.interval.high)}")
    return notes + _host_notes(memory)


def _held(one: Any) -> str:
    """Return a text on how many ranks hold how many bytes of a class's weights, its own rank first."""
    parts = [f"{ranks:,} rank{'s' * (ranks > 1)} hold{'s' * (ranks == 1)} {gib(size)}" for size, ranks in one.held]
    return ", ".join(parts[:_MOST_CLASSES]) + (", ..." if len(parts) > _MOST_CLASSES else "")


def _host_notes(memory: Any) -> list[str]:
    """Return a note on the memory offloaded to the host."""
    fullest = max(memory.classes, key=lambda one: one.host_bytes)
    if not fullest.host_bytes:
        return []
    parts = ", ".join(f"{name} {gib(size)}" for name, size in fullest.on_host.items())
    share = ""
    if memory.host_limit is not None:
        over = "" if fullest.host_bytes <= memory.host_limit else ", which DOES NOT FIT"
        share = f", {percent(fullest.host_bytes / memory.host_limit)} of a device's share{over}"
    return [f"on the host: {gib(fullest.host_bytes)} for each rank{share}: {parts}"]


def terms(estimate: Any) -> list[tuple[str, Any]]:
    """Return the terms of a step's time with their names in tables; zero terms are left out."""
    time = estimate.time
    named = [("compute", time.compute)]
    named += [(f"exposed communication, {axis}", quantity) for axis, quantity in time.exposed.items()]
    named += [("bubble", time.bubble), ("waits for the host", time.host)]
    return [(name, quantity) for name, quantity in named if quantity.value > 1e-4 * time.step.value]


_KINDS: dict[str, str] = {
    "matmul": "matrix products",
    "attention": "attention, forward",
    "attention_backward": "attention, backward",
    "memory": "memory-bound operations",
    "scalar": "broadcast or converting operations",
    "general": "general elementwise kernels",
    "fused": "fused operations",
    "random": "random numbers",
    "optimizer": "the optimizer",
}


def kinds(estimate: Any) -> list[tuple[str, float]]:
    """Return the kinds of the slowest rank's operations with their shares of its compute, largest first."""
    found: dict[str, float] = dict(estimate.timeline.slowest.kinds)
    total = sum(found.values())
    ordered = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
    return [(_KINDS.get(name) or name, amount / total) for name, amount in ordered if amount > 0]


def time_table(estimate: Any) -> Table:
    """Return a table of the terms of a step, with intervals and evidence grades."""
    step = estimate.time.step
    table = plain_table("", "time", "share", "80 % interval", "evidence")
    for name, quantity in terms(estimate):
        share = percent(quantity.value / step.value)
        table.add_row(name, seconds(quantity.value), share, interval(quantity), quantity.grade)
    table.add_row("step", seconds(step.value), "", interval(step), step.grade, style="bold")
    return table


def _time_notes(estimate: Any) -> list[str]:
    time = estimate.time
    rate, unit = rate_of(estimate)
    optimizer = time.optimizer.value / time.step.value
    return [
        compute_note(estimate),
        *([f"the optimizer's part of the step, with its communication: {percent(optimizer)}"] if optimizer else []),
        f"{per_second(rate.value)} {unit}/s on each device ({interval(rate, per_second)}), "
        f"{per_second(rate.value * estimate.dims.world_size)} on all; MFU {percent(time.mfu.value)}",
    ]


def compute_note(estimate: Any) -> str:
    """Return one line with the kinds of operations of the slowest rank."""
    return "compute: " + ", ".join(f"{name} {percent(share)}" for name, share in kinds(estimate) if share >= 0.005)


def estimate_dict(estimate: Any) -> dict[str, Any]:
    """Return an estimate as data for JSON: bytes, seconds, and intervals."""
    time, memory = estimate.time, estimate.memory
    rate, unit = rate_of(estimate)
    return {
        "model": model_name(estimate),
        "hardware": estimate.hardware.name,
        "degrees": {each.name: getattr(estimate.dims, each.name) for each in dataclasses.fields(estimate.dims)},
        "recipe": estimate.recipe.describe(),
        "batch": estimate.batch,
        "seq_len": estimate.seq_len,
        "memory": memory_dict(memory),
        "time": terms_dict(estimate) | {"mfu": time.mfu.value, f"{unit}_per_second_per_device": _quantity(rate)},
    }


def memory_dict(memory: Any) -> dict[str, Any]:
    """Return the memory of an estimate as data for JSON."""
    return {
        "reserved": memory.reserved,
        "allocated": memory.peak,
        "fits": memory.fits(),
        "classes": [
            {
                "rank": one.rank,
                "like": one.like,
                "held": [list(each) for each in one.held],
                "peak_allocated": one.peak_allocated,
                "peak_reserved": one.peak_reserved,
                "context_bytes": one.context_bytes,
                "at": one.at,
                "by_category": dict(one.by_category),
                "on_host": dict(one.on_host),
            }
            for one in memory.classes
        ],
    }


def terms_dict(estimate: Any) -> dict[str, Any]:
    """Return the terms of a step's time as data for JSON."""
    time = estimate.time
    return {
        "step": _quantity(time.step),
        "terms": {name: _quantity(quantity) for name, quantity in terms(estimate)},
        "optimizer": _quantity(time.optimizer),
        "kinds": dict(kinds(estimate)),
    }


_MOST_OPERATIONS = 12


def comparison_view(predicted: Breakdown, measured: Breakdown, at_most: int = _MOST_OPERATIONS) -> RenderableType:
    """Return tables that compare the seconds of a predicted and a measured step, largest difference first."""
    table = plain_table("kind", "predicted", "measured", "difference", "predicted / measured")
    for gap in compare_seconds(predicted, measured):
        if max(gap.predicted, gap.measured) >= 1e-3 * measured.step:
            table.add_row(gap.kind, *_side_by_side(gap.predicted, gap.measured))
    table.add_row("step", *_side_by_side(predicted.step, measured.step), style="bold")
    calls = plain_table("operation", "calls", "measured", "predicted", "measured", "difference", "ratio")
    both = {**predicted.operations, **measured.operations}
    rows = [(name, predicted.operations.get(name, (0, 0.0)), measured.operations.get(name, (0, 0.0))) for name in both]
    for name, (count, spent), (times, took) in sorted(rows, key=lambda row: -abs(row[1][1] - row[2][1]))[:at_most]:
        calls.add_row(name, f"{count:,}", f"{times:,}", *_side_by_side(spent, took))
    return Group(Text("Predicted beside measured"), table, Text(""), Text("Operations that differ most"), calls)


def _side_by_side(predicted: float, measured: float) -> tuple[str, str, str, str]:
    off = predicted - measured
    ratio = f"{predicted / measured:.2f}" if measured else "-"
    sign = "-" if off < 0 else "+"
    return (
        seconds(predicted) if predicted else "-",
        seconds(measured) if measured else "-",
        sign + seconds(abs(off)),
        ratio,
    )


def comparison_dict(predicted: Breakdown, measured: Breakdown) -> dict[str, Any]:
    """Return a comparison as data for JSON."""
    names = {**predicted.operations, **measured.operations}

    def of(step: Breakdown, name: str) -> dict[str, float]:
        count, spent = step.operations.get(name, (0, 0.0))
        return {"calls": count, "seconds": spent}

    return {
        "step": {"predicted": predicted.step, "measured": measured.step},
        "kinds": [{**gap._asdict(), "ratio": gap.ratio} for gap in compare_seconds(predicted, measured)],
        "operations": {name: {"predicted": of(predicted, name), "measured": of(measured, name)} for name in names},
    }


def _quantity(quantity: Any) -> dict[str, Any]:
    return {name: getattr(quantity, name) for name in ("value", "low", "high", "grade")}
