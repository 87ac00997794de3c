"""A timeline as a file for https://ui.perfetto.dev and ``chrome://tracing``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from sim.mesh.memory import ClassMemory
from sim.mesh.replay.player import ReplayedStep
from sim.mesh.replay.spans import COMMUNICATION, EXPOSED, spans

__all__ = ["chrome_events", "write_chrome"]


def write_chrome(
    timeline: ReplayedStep,
    path: str | os.PathLike[str],
    memory: Sequence[ClassMemory] | None = None,
    limit: int = 200_000,
) -> None:
    """Write a timeline in the trace event format: a process per rank, a thread per stream, counters of memory.

    Args:
        timeline: of a step.
        path: of the file, such as ``step.json``.
        memory: of each rank, in the order of the timeline's.
        limit: of boxes; above it, operations of a layer are one.
    """
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": chrome_events(timeline, memory, limit), "displayTimeUnit": "ms"}, file)


def chrome_events(
    timeline: ReplayedStep, memory: Sequence[ClassMemory] | None = None, limit: int = 200_000
) -> list[dict[str, Any]]:
    """Return what :func:`write_chrome` writes: times in microseconds."""
    found = spans(timeline, limit=limit)
    lanes: dict[tuple[int, str], int] = {}
    events: list[dict[str, Any]] = []
    for row, program in enumerate(timeline.programs):
        like = f" and {program.like - 1:,} like it" if program.like > 1 else ""
        _name(events, "process_name", row, 0, f"rank {program.rank}{like}")
        events.append({"ph": "M", "name": "process_sort_index", "pid": row, "tid": 0, "args": {"sort_index": row}})
    for span in found:
        waits = span.kind in (EXPOSED, "bubble", "host")
        lane = "waits" if waits else f"communication {span.lane}" if span.kind == COMMUNICATION else span.lane
        thread = lanes.get((span.row, lane))
        if thread is None:
            thread = lanes[span.row, lane] = len([row for row, _ in lanes if row == span.row])
            _name(events, "thread_name", span.row, thread, lane)
        event: dict[str, Any] = {
            "ph": "X",
            "name": f"exposed {span.lane}" if span.kind == EXPOSED else span.name,
            "cat": span.kind,
            "pid": span.row,
            "tid": thread,
            "ts": span.start * 1e6,
            "dur": (span.end - span.start) * 1e6,
        }
        if span.batch >= 0:
            event["args"] = {"micro-batch": span.batch}
        events.append(event)
    for row, class_memory in enumerate(memory or ()):
        events.extend(_counters(timeline, row, class_memory))
    return events


def _name(events: list[dict[str, Any]], what: str, process: int, thread: int, name: str) -> None:
    events.append({"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}})


def _counters(timeline: ReplayedStep, row: int, memory: ClassMemory) -> list[dict[str, Any]]:
    events = []
    for point in memory.curve:
        at = timeline.when(row, point.position, point.event) * 1e6
        totals = {name: size for name, size in zip(memory.categories, point.totals, strict=True) if size}
        events.append({"ph": "C", "name": "allocated (bytes)", "pid": row, "ts": at, "args": totals})
        events.append(
            {"ph": "C", "name": "reserved (bytes)", "pid": row, "ts": at, "args": {"reserved": point.reserved}}
        )
    return events
