"""A timeline as a file for https://ui.perfetto.dev and ``chrome://tracing``."""

from __future__ import annotations

import os
from collections.abc import Sequence

from sim.mesh.memory import ClassMemory
from sim.mesh.replay.player import ReplayedStep
from sim.mesh.replay.spans import COMMUNICATION, EXPOSED, spans
from sim.timeline.perfetto import PerfettoEvents

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
    chrome_events(timeline, memory, limit).write(path, "ms")


def chrome_events(
    timeline: ReplayedStep, memory: Sequence[ClassMemory] | None = None, limit: int = 200_000
) -> PerfettoEvents:
    """Return what `write_chrome` writes."""
    found = PerfettoEvents()
    lanes: dict[tuple[int, str], int] = {}
    for row, program in enumerate(timeline.programs):
        like = f" and {program.like - 1:,} like it" if program.like > 1 else ""
        found.process(row, f"rank {program.rank}{like}")
    for span in spans(timeline, limit=limit):
        waits = span.kind in (EXPOSED, "bubble", "host")
        lane = "waits" if waits else f"communication {span.lane}" if span.kind == COMMUNICATION else span.lane
        thread = lanes.get((span.row, lane))
        if thread is None:
            thread = lanes[span.row, lane] = len([row for row, _ in lanes if row == span.row])
            found.thread(span.row, thread, lane)
        name = f"exposed {span.lane}" if span.kind == EXPOSED else span.name
        start, duration = span.start * 1e6, (span.end - span.start) * 1e6
        args = {"micro-batch": span.batch} if span.batch >= 0 else None
        found.slice(span.row, thread, name, span.kind, start=start, duration=duration, args=args)
    for row, class_memory in enumerate(memory or ()):
        _add_counters(found, timeline, row, class_memory)
    return found


def _add_counters(found: PerfettoEvents, timeline: ReplayedStep, row: int, memory: ClassMemory) -> None:
    for point in memory.curve:
        at = timeline.when(row, point.position, point.event) * 1e6
        totals = {name: size for name, size in zip(memory.categories, point.totals, strict=True) if size}
        found.counter(row, "allocated (bytes)", at, totals)
        found.counter(row, "reserved (bytes)", at, {"reserved": point.reserved})
