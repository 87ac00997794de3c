"""A step's seconds by kind of operation: of a profiled step, of a predicted one, and both side by side.

Both are reduced to the same spans, of operations and of communication on one rank, and broken down by the same rule:
where something computes, the time is the operation's; where nothing computes and communication is under way, it is
exposed, and the collective's; the rest is the host's, which includes waiting for other ranks that are late.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hyper_parallel.core.common.errors import InvalidValue
from sim.mesh.program import Comm, Op
from sim.mesh.tracing.kinds import kind_of, reported_kind
from sim.timeline.perfetto import EVENTS

HOST = "host"
"""Where nothing computes, and nothing is communicated: Python, dispatch, and waiting for ranks that are late."""
_STEP = "ProfilerStep#"
_COLLECTIVES = (
    ("all_gather", ("allgather", "all_gather")),
    ("reduce_scatter", ("reducescatter", "reduce_scatter")),
    ("all_reduce", ("allreduce", "all_reduce")),
    ("all_to_all", ("alltoall", "all_to_all")),
    ("broadcast", ("broadcast",)),
    ("recv", ("recv",)),  # before send: NCCL has one kernel, SendRecv, for both
    ("send", ("send",)),
    ("barrier", ("barrier",)),
    ("gather", ("gather",)),
    ("reduce", ("reduce",)),
)


class TimedSpan(NamedTuple):
    """An operation or a communication that ran.

    Attributes:
        start: seconds.
        end: seconds.
        kind: as reports name it; of communication the collective.
        name: torch's, such as `aten.mm`.
    """

    start: float
    end: float
    kind: str
    name: str


@dataclass(frozen=True)
class Breakdown:
    """Where the seconds of a step went; `kinds` add up to `step`, unless several streams compute at once.

    Attributes:
        step: seconds.
        kinds: by kind of operation, `exposed` collective, and `HOST`.
        operations: calls and seconds of each operation, and of each collective whether it was hidden or not.
    """

    step: float
    kinds: Mapping[str, float]
    operations: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class ComparedKind(NamedTuple):
    """What was predicted and measured of one kind.

    Attributes:
        kind: of operation, `exposed` collective, or `HOST`.
        predicted: seconds.
        measured: seconds.
    """

    kind: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """Predicted over measured; None where nothing was measured."""
        return self.predicted / self.measured if self.measured else None


def break_down(start: float, end: float, ops: Iterable[TimedSpan], comms: Iterable[TimedSpan]) -> Breakdown:
    """Break a step down; what lies outside of it does not count.

    >>> ops = [TimedSpan(0.0, 1.0, "matrix products", "aten.mm"), TimedSpan(3.0, 4.0, "optimizer", "aten.mul")]
    >>> break_down(0.0, 5.0, ops, [TimedSpan(0.5, 2.0, "all_gather", "gloo:all_gather")]).kinds
    {'matrix products': 1.0, 'optimizer': 1.0, 'exposed all_gather': 1.0, 'host': 2.0}
    """
    kinds: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    spent: dict[str, float] = defaultdict(float)
    computing = sorted(_clipped(ops, start, end))
    for span in computing:
        kinds[span.kind] += span.end - span.start
        calls[span.name] += 1
        spent[span.name] += span.end - span.start
    flying = sorted(_clipped(comms, start, end))
    for span in flying:
        calls[span.kind] += 1
        spent[span.kind] += span.end - span.start
    idle = 0.0
    first = 0
    for left, right in _gaps(computing, start, end):
        while (
            first < len(flying) and flying[first].end <= left
        ):  # those that begin later may end earlier, and cost time
            first += 1
        at = left
        for span in flying[first:]:
            if span.start >= right:
                break
            begin, stop = max(at, span.start), min(right, span.end)
            if stop > begin:
                kinds[f"exposed {span.kind}"] += stop - begin
                idle += begin - at
                at = stop
        idle += right - at
    kinds[HOST] = idle
    return Breakdown(end - start, dict(kinds), {name: (calls[name], spent[name]) for name in calls})


def _clipped(spans: Iterable[TimedSpan], start: float, end: float) -> Iterator[TimedSpan]:
    for span in spans:
        if span.start < end and span.end > start:
            yield span._replace(start=max(span.start, start), end=min(span.end, end))


def _gaps(computing: Sequence[TimedSpan], start: float, end: float) -> Iterator[tuple[float, float]]:
    """Yield the time in which nothing computes."""
    at = start
    for span in computing:
        if span.start > at:
            yield at, span.start
        at = max(at, span.end)
    if end > at:
        yield at, end


# Predicted -----------------------------------------------------------------------------------------------------------


def predicted_step(estimate: Any, rank: int | None = None) -> Breakdown:
    """Break the step of an estimate down.

    Args:
        estimate: a `sim.mesh.Estimate`.
        rank: which; None, or one that no program was recorded of: the slowest.
    """
    timeline = estimate.timeline
    ranks = [one.rank for one in timeline.ranks]
    row = ranks.index(rank if rank in ranks else timeline.slowest.rank)
    program = timeline.programs[row]
    ops: list[TimedSpan] = []
    comms: list[TimedSpan] = []
    for one in timeline.occurrences[row]:
        events = program.segments[one.piece.key].events
        for ran in one.outcome.ops:
            op = events[ran.event]
            assert isinstance(op, Op)
            kind = reported_kind(op.kind, op.name)
            ops.append(TimedSpan(one.base + ran.start, one.base + ran.end, kind, op.name))
        for ran in one.outcome.comms:
            comm = events[ran.event] if 0 <= ran.event < len(events) else None
            name = comm.op if isinstance(comm, Comm) else "recv"
            comms.append(TimedSpan(one.base + ran.start, one.base + ran.end, name, name))
    # A stage of a pipeline is ahead of the first one, whose step begins at 0.
    start = min([span.start for span in ops], default=0.0)
    return break_down(start, start + timeline.step, ops, comms)


# Measured ------------------------------------------------------------------------------------------------------------


def read_trace(path: str | os.PathLike[str]) -> Breakdown:
    """Break down the median step of a trace that `torch.profiler` has written.

    Args:
        path: of the JSON file, of `export_chrome_trace` or `hyper-parallel train --profile-steps`.

    Raises:
        ValueError: it is not such a file, or has no operations.
    """
    steps = sorted(profiled_steps(_content(path), str(path)), key=lambda step: step.step)
    return steps[(len(steps) - 1) // 2]


def step_operations(path: str | os.PathLike[str]) -> list[dict[str, list[float]]]:
    """Return the seconds of every call in each step of a trace of a CPU, by name of the operation, in their order."""
    content = _content(path)
    ops, _, steps = _spans_of(content, str(path))
    found = []
    for start, end in steps:
        calls: dict[str, list[float]] = defaultdict(list)
        for span in _clipped(ops, start, end):
            calls[span.name].append(span.end - span.start)
        if calls:
            found.append(dict(calls))
    return found


def rank_of_trace(path: str | os.PathLike[str]) -> int | None:
    """Return the rank that a trace says it was written by, if any."""
    rank = _content(path).get("distributedInfo", {}).get("rank")
    return rank if isinstance(rank, int) else None


def _content(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidValue(*_refused(str(path), f"it cannot be read as JSON: {error}")) from None
    return content if isinstance(content, dict) else {EVENTS: content}


def _refused(path: str, blame: str) -> tuple[str, str, str, str]:
    hint = "a file of hyper-parallel train --profile-steps 3, or of torch.profiler's export_chrome_trace"
    return ("cannot compare with a trace", blame, f"file: {path}", hint)


def profiled_steps(content: Mapping[str, Any], path: str = "") -> list[Breakdown]:
    """Break down every step of a trace's content; all is one step where the profiler's `step()` was not called."""
    ops, comms, steps = _spans_of(content, path)
    found = [break_down(start, end, ops, comms) for start, end in steps]
    found = [step for step in found if step.operations]
    if not found:
        raise InvalidValue(*_refused(path, "nothing that it has computed lies within a step"))
    return found


def _spans_of(
    content: Mapping[str, Any], path: str
) -> tuple[list[TimedSpan], list[TimedSpan], list[tuple[float, float]]]:
    """Return what computed, what was communicated, and the begin and end of each step."""
    events = content.get(EVENTS)
    if not isinstance(events, list):
        raise InvalidValue(*_refused(path, f"it has no {EVENTS}"))
    whole = [event for event in events if isinstance(event, dict) and event.get("ph") == "X" and "dur" in event]
    tree = [event for event in whole if event.get("cat") == "cpu_op"]
    if not tree:
        raise InvalidValue(*_refused(path, "it has no operations: no events of category cpu_op"))
    marks = [event for event in whole if str(event["name"]).startswith(_STEP) and event.get("cat") == "user_annotation"]
    thread = marks[0]["tid"] if marks else Counter(event["tid"] for event in tree).most_common(1)[0][0]
    kernels = [event for event in whole if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if kernels:
        ops, comms = _on_device(kernels, tree)
    else:
        ops = [_span(event, *names) for event, names in _outermost([e for e in tree if e["tid"] == thread])]
        comms = [
            _span(event, op, str(event["name"]))
            for event in whole
            if str(event["name"]).startswith("gloo:") and (op := _collective(str(event["name"])))
        ]
    steps = [(event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6) for event in marks]
    if not steps:
        steps = [(min(span.start for span in ops), max(span.end for span in ops))] if ops else []
    if kernels and len(steps) > 1:  # the host runs ahead: a device's step ends where the next one's begins
        begins = sorted(begin for begin, _ in steps)
        steps = [(a, b) for a, b in zip(begins, [*begins[1:], max(span.end for span in ops)], strict=True)]
    return ops, comms, steps


def _span(event: Mapping[str, Any], kind: str, name: str) -> TimedSpan:
    return TimedSpan(event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6, kind, name)


def _on_device(
    kernels: Sequence[Mapping[str, Any]], tree: Sequence[Mapping[str, Any]]
) -> tuple[list[TimedSpan], list[TimedSpan]]:
    """Attribute kernels to the operations that launched them, which they name by `External id`."""
    names: dict[Any, tuple[str, str]] = {}
    for thread in {event["tid"] for event in tree}:
        for event, what in _outermost([e for e in tree if e["tid"] == thread], inside=True):
            names[event.get("args", {}).get("External id")] = what
    ops: list[TimedSpan] = []
    comms: list[TimedSpan] = []
    for kernel in kernels:
        name = str(kernel["name"])
        op = _collective(name) if name.lower().startswith(("nccl", "hccl")) else None
        if op is not None:
            comms.append(_span(kernel, op, name))
            continue
        other = ("other", name) if kernel["cat"] == "kernel" else ("copies", name)
        ops.append(_span(kernel, *names.get(kernel.get("args", {}).get("External id"), other)))
    return ops, comms


def _outermost(
    events: Sequence[Mapping[str, Any]], inside: bool = False
) -> Iterator[tuple[Mapping[str, Any], tuple[str, str]]]:
    """Yield the outermost events of a thread that have a kernel, with their kind and name: what a recorder sees.

    Args:
        events: of a thread, which lie in each other.
        inside: whether to yield those that lie in them, too, with the kind and name of the outermost one.
    """
    until, what = float("-inf"), ("", "")
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        if event["ts"] < until:
            if inside:
                yield event, what
            continue
        kind = _kind(str(event["name"]))
        if kind is not None:
            until, what = event["ts"] + event["dur"], (kind, str(event["name"]).replace("::", "."))
            yield event, what


@functools.cache
def _kind(name: str) -> str | None:
    """Return the kind of an operation by its name; None: it has no kernel of its own."""
    namespace, _, rest = name.partition("::")
    if not rest.isidentifier() or namespace in ("c10d", "_c10d_functional", "autograd"):
        return None
    packet = getattr(getattr(torch.ops, namespace), rest, None)
    if packet is None or not hasattr(packet, "overloads"):
        return None
    funcs = [getattr(packet, overload) for overload in packet.overloads()]
    funcs = [func for func in funcs if torch._C._dispatch_has_kernel(func.name())]  # not those of TorchScript alone
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    # What is made of other operations: a dispatch mode sees these in its place.
    if not funcs or any(has(f.name(), "CompositeImplicitAutograd") and not has(f.name(), "CPU") for f in funcs):
        return None
    kind = kind_of(funcs[0])
    return None if kind in ("host", "unknown") else reported_kind(kind, name)


def _collective(name: str) -> str | None:
    text = name.lower()
    return next((op for op, words in _COLLECTIVES if any(word in text for word in words)), None)


# Side by side --------------------------------------------------------------------------------------------------------


def compare_seconds(predicted: Breakdown, measured: Breakdown) -> list[ComparedKind]:
    """Put the kinds of two breakdowns side by side, those that differ by most seconds first."""
    names = {**predicted.kinds, **measured.kinds}
    gaps = [ComparedKind(name, predicted.kinds.get(name, 0.0), measured.kinds.get(name, 0.0)) for name in names]
    return sorted(gaps, key=lambda gap: -abs(gap.predicted - gap.measured))
