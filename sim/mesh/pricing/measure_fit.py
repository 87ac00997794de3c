"""Fits of measured kernels and links."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from hyper_parallel.core.machine.description import Machine, find_machine, machine_of_device
from hyper_parallel.core.machine.file import Figure
from hyper_parallel.core.machine.links import Links, NodeSpread, collective_seconds
from sim.mesh.pricing.compute_cost import attention_seconds, matmul_seconds, stream_seconds

# Fits the few figures of a curve to times: coordinate descent on the relative error, which outliers do not rule -------


class Measurement(NamedTuple):
    """A measured time, and how to predict it.

    Attributes:
        id: of the row.
        seconds: measured.
        predict: returns the seconds that some figures give.
        size: bytes that are communicated, where that matters.
    """

    id: str
    seconds: float
    predict: Callable[[Mapping[str, float]], float]
    size: float = 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of the values does not exceed; of none: not a number.

    >>> quantile([4.0, 1.0, 2.0], 0.5)
    2.0
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


def errors(rows: Sequence[Measurement], figures: Mapping[str, float]) -> list[float]:
    """Return log(predicted / measured) of each row."""
    return [math.log(row.predict(figures) / row.seconds) for row in rows]


def summary(rows: Sequence[Measurement], figures: Mapping[str, float]) -> tuple[float, float, float]:
    """Return median, 90th percentile and worst of |predicted / measured - 1|."""
    off = [abs(math.expm1(error)) for error in errors(rows, figures)]
    return quantile(off, 0.5), quantile(off, 0.9), max(off, default=math.nan)


def spread_in(rows: Sequence[Measurement], figures: Mapping[str, float]) -> float:
    """Return the standard deviation of the logarithm that has as many rows within 80 % as the rows do."""
    return round(quantile([abs(error) for error in errors(rows, figures)], 0.8) / 1.2816, 3)


def loss_of(rows: Sequence[Measurement], figures: Mapping[str, float]) -> float:
    """Return what a fit makes small: the mean of |log(predicted / measured)|, and half its 90th percentile."""
    off = [abs(error) for error in errors(rows, figures)]
    return sum(off) / len(off) + 0.5 * quantile(off, 0.9)


def descend(
    rows: Sequence[Measurement], start: Mapping[str, float], free: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    """Improve the free figures one after the other, each within its bounds; returns all, to three digits.

    >>> rows = [Measurement("", 2e-6 * size, lambda figures, size=size: figures["each"] * size) for size in (1, 2, 3)]
    >>> descend(rows, {"each": 1e-6, "other": 1.0}, {"each": (1e-9, 1.0)})
    {'each': 2e-06, 'other': 1.0}

    Args:
        rows: to fit to.
        start: all figures.
        free: lowest and highest value of those that are fitted.
    """
    best, least = dict(start), loss_of(rows, start)
    step = 0.3
    while step > 0.004:
        better = False
        for name, (low, high) in free.items():
            for factor in (1 + step, 1 / (1 + step)):
                tried = {**best, name: min(high, max(low, best[name] * factor))}
                now = loss_of(rows, tried)
                if now < least - 1e-6:
                    best, least, better = tried, now, True
        step = step if better else step / 2
    return {name: float(f"{value:.3g}") for name, value in best.items()}


# Fits a hardware description to what `sim/mesh/pricing/measure.py` has timed ----------------------------------------

Sample = dict[str, Any]
_NAMES = MappingProxyType({"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"})
OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send")


def fit_hardware(samples: list[Sample], machine: Mapping[str, Any], processes: int) -> Machine:
    """Fit a description to what was measured.

    Args:
        samples: each with `what`, `seconds` and what it takes to predict them.
        machine: `device`, `title`, `memory` and `cores` of a process.
        processes: that shared the machine.
    """
    cpu = machine["device"] == "cpu"
    day = datetime.date.today().isoformat()
    share = f"{processes} processes of {machine['cores']} cores" if cpu else f"{processes} processes"
    source = f"measured by `hyper-parallel hardware measure` on {machine['title']}, {share}, torch {torch.__version__}"
    source += f", {day}"
    figures: dict[str, Figure] = {}

    def add(name: str, value: float, unit: str, grade: str = "measured", said: str = source) -> None:
        figures[name] = Figure(float(value if unit == "B" else f"{value:.4g}"), unit, grade, said)

    add("device.memory", machine["memory"], "B")
    add("device.usable_memory", machine["memory"], "B")
    add("device.cores", machine["cores"], "1")
    streams = [sample for sample in samples if sample["what"] == "stream"]
    bandwidth = streams[-1]["bytes"] / streams[-1]["seconds"]
    add("device.bandwidth", bandwidth, "B/s")
    peaks: dict[str, float] = {}
    for sample in samples:
        if sample["what"] == "matmul":
            name = _NAMES[sample["dtype"]]
            rate = 2.0 * math.prod(sample["shape"]) / sample["seconds"]
            peaks[name] = max(peaks.get(name, 0.0), rate)
    for name, rate in peaks.items():
        add(f"peak.{name}", rate, "FLOP/s")
    add("node.devices", processes, "1")
    operation = next(sample["seconds"] for sample in samples if sample["what"] == "operation")
    issue = next((sample["seconds"] for sample in samples if sample["what"] == "issue"), 5e-5)
    host = [sample for sample in samples if sample["what"] == "host"]
    if host:
        operation, issue = _fit_host(host, issue)
    # On a CPU the host is the device. Without steps, what an operation costs to issue is in its own time: floor_us.
    add("host.op", 0.0 if cpu and not host else operation, "s")
    add("host.collective", issue, "s")
    floor = 1.0 if host else operation * 1e6 if cpu else min(streams[0]["seconds"] * 1e6, 5.0)
    curves: dict[str, Any] = {
        "matmul": _fit_matmul(samples, peaks, machine["cores"], bandwidth, floor),
        "memory": _fit_memory(samples, bandwidth, floor),
        "attention": _fit_attention(samples, peaks, floor),
    }
    fastest, links = _fit_links(samples, processes)
    if links:
        curves["links"] = links
        if cpu:
            curves["overlap"] = _fit_overlap(samples)
    add("intra.bandwidth", fastest, "B/s", "measured" if links else "assumed", source if links else "assumed")
    add("inter.bandwidth", 125e6, "B/s", "assumed", "assumed: 1 Gbit/s Ethernet")
    like = {"cpu": "laptop-cpu", "cuda": "h100-sxm", "npu": "ascend-910b"}[machine["device"]]
    base = machine_of_device(machine["title"]) or find_machine(like)  # for its family, links, fabric and backend
    title = f"{machine['title']}, {share}, as measured"
    return replace(base, name="measured", title=title, figures=figures, curves=curves)


def _fit_host(host: Sequence[Sample], issue: float) -> tuple[float, float]:
    """Return the seconds that the host adds for an operation and for a communication.

    Args:
        host: of steps: operations, communications, and what the thread has spent beside kernels.
        issue: seconds to issue a communication and do nothing else: the least that one costs.
    """
    alone = [sample for sample in host if not sample["comms"]]
    each = statistics.median([sample["seconds"] / sample["ops"] for sample in alone])
    rest = [(sample["seconds"] - each * sample["ops"]) / sample["comms"] for sample in host if sample["comms"]]
    return each, max(issue, statistics.median(rest)) if rest else issue


def _fit_overlap(samples: Sequence[Sample]) -> dict[str, float]:
    """Return 1, and the seconds that gloo takes of the processor for each second of a large communication."""
    large = max(sample["size"] for sample in samples if sample["what"] == "collective")
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    busy = [s["busy"] for s in samples if s["what"] == "collective" and s["size"] == large and s["op"] in kinds]
    return {"slowdown": round(1.0 + statistics.median(busy), 3)}


def _rows(samples: Sequence[Sample], predict: Callable[[Sample, Mapping[str, float]], float]) -> list[Measurement]:
    return [Measurement("", sample["seconds"], partial(predict, sample)) for sample in samples]


def _noted(figures: dict[str, Any], rows: list[Measurement]) -> dict[str, Any]:
    error = [round(x, 3) for x in summary(rows, figures)]
    return {**figures, "grade": "measured", "spread": max(0.03, spread_in(rows, figures)), "error": error}


def _fit_matmul(
    samples: list[Sample], peaks: Mapping[str, float], cores: int, bandwidth: float, floor: float
) -> dict[str, Any]:
    start = {"floor_us": floor, "rate": 1.0, "prologue": 32.0, "edge": 8.0, "quantised": 0.0, "cap": 1.0, "stream": 0.9}
    free = {"rate": (0.3, 1.5), "prologue": (1, 400), "edge": (1, 100)}
    made: dict[str, Any] = {}
    for name, peak in peaks.items():
        item = 4 if name == "fp32" else 2

        def predict(sample: Sample, at: Mapping[str, float], peak: float = peak, item: int = item) -> float:
            # Timed in a row, operations do not pay what a model pays for each: that is floor_us.
            return matmul_seconds({**at, "floor_us": 1.0}, tuple(sample["shape"]), peak, cores, item, bandwidth)[0]

        timed = [s for s in samples if s["what"] == "matmul" and _NAMES[s["dtype"]] == name]
        rows = _rows(timed, predict)
        fitted = _noted(descend(rows, start, free), rows)
        made = {**made, name: fitted} if made else {**fitted, name: fitted}
    return made


_SMALL, _LARGE = 2**14, 2**20
"""Bytes: below, a kernel takes what any kernel takes; from there on, caches hold its operands in no step."""


def _fit_memory(samples: list[Sample], bandwidth: float, floor: float) -> dict[str, Any]:
    def predict(sample: Sample, at: Mapping[str, float]) -> float:
        return stream_seconds({**at, "floor_us": at["least_us"]}, sample["bytes"], bandwidth)[0]

    timed = [sample for sample in samples if sample["what"] == "stream"]
    start = {"least_us": 1.0, "cache_mib": 8.0, "cache_speedup": 3.0, "stream": 1.0}
    free = {"least_us": (0.1, 50.0), "cache_mib": (0.2, 200.0), "cache_speedup": (1.0, 30.0)}
    in_steps = [sample for sample in samples if sample["what"] == "step stream"]
    small = [sample["seconds"] for sample in in_steps if sample["bytes"] < _SMALL]
    if small:  # what a kernel takes at least, and what caches do for it, are those of a step
        start["least_us"] = statistics.median(small) * 1e6
        del free["least_us"]
        timed = [sample for sample in timed if sample["bytes"] >= _LARGE]
        timed += [sample for sample in in_steps if sample["bytes"] >= _SMALL]
    rows = _rows(timed, predict)
    fitted = descend(rows, start, free)
    made: dict[str, Any] = {**_noted(fitted, rows), "floor_us": round(max(floor, fitted["least_us"]), 2)}
    made |= {"fused": 1.0, "softmax": 1.0}
    for what in ("random", "optimizer"):
        sample = next(sample for sample in samples if sample["what"] == what)
        alone = stream_seconds({**made, "floor_us": 0.0}, sample["bytes"], bandwidth)[0]
        made[what] = float(f"{alone / sample['seconds']:.3g}")
    return made


def _fit_attention(samples: list[Sample], peaks: Mapping[str, float], floor: float) -> dict[str, Any]:
    timed = [sample for sample in samples if sample["what"].startswith("attention")]
    peak = peaks["fp32" if timed[0]["dtype"] == "torch.float32" else "bf16"]
    base: dict[str, Any] = {"causal_length_forward": 0.5, "causal_length_backward": 0.5, "floor_us": 1.0}
    made: dict[str, Any] = {**base, "floor_us": round(floor, 2), "grade": "measured", "spread": 0.05}
    causal = []
    for name, what in (("forward", "attention"), ("backward", "attention_backward")):

        def predict(sample: Sample, at: Mapping[str, float], name: str = name) -> float:
            shares = {"64": at["share"], "128": at["share"]}
            curve = {**base, name: shares, f"half_{name}": at["half"], "causal": at["causal"]}
            return attention_seconds(curve, tuple(sample["shape"]), peak, backward=name == "backward")[0]

        rows = _rows([sample for sample in timed if sample["what"] == what], predict)
        free = {"share": (0.01, 1.5), "half": (1, 1000), "causal": (0.4, 1.0)}
        fitted = descend(rows, {"share": 0.5, "half": 100, "causal": 0.9}, free)
        made |= {name: {"64": fitted["share"], "128": fitted["share"]}, f"half_{name}": fitted["half"]}
        made["spread"] = max(made["spread"], spread_in(rows, fitted))
        causal.append(fitted["causal"])
    return {"default": "flash2", "flash2": {**made, "causal": round(statistics.fmean(causal), 3)}}


def _fit_links(samples: list[Sample], processes: int) -> tuple[float, dict[str, Any]]:
    timed = [sample for sample in samples if sample["what"] == "collective"]
    if not timed:
        return 1e9, {}

    def wire(sample: Sample) -> float:
        if sample["op"] in ("broadcast", "send"):
            return float(sample["size"])
        return sample["size"] * (processes - 1) / processes * (2 if sample["op"] == "all_reduce" else 1)

    fastest = max(wire(sample) / sample["seconds"] for sample in timed)
    made = {}
    for op in OPS:
        name, ranks = ("broadcast", 2) if op == "send" else (op, processes)

        def predict(sample: Sample, at: Mapping[str, float], name: str = name, ranks: int = ranks) -> float:
            links = Links(fastest, False, processes, None, 2, 1.0, 0.0, {name: at}, {})
            return collective_seconds(links, name, sample["size"], NodeSpread(ranks, 1, ranks))[0]

        rows = _rows([sample for sample in timed if sample["op"] == op], predict)
        smallest = min(row.seconds for row in rows) * 1e6
        start = {"efficiency": 0.8, "base_us": smallest, "ramp_us": 20.0, "power": 0.8, "hop_us": 0.0, "pair_loss": 0.0}
        free = {"efficiency": (0.02, 1.2), "base_us": (1, 5000), "ramp_us": (1, 5000), "power": (0.5, 0.95)}
        starts = [start, *({**start, "ramp_us": ramp, "power": 0.6} for ramp in (100.0, 1000.0))]
        tried = [descend(rows, one, free) for one in starts]
        made[op] = _noted(min(tried, key=lambda at: loss_of(rows, at)), rows)
    return fastest, made
