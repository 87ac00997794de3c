"""Writer of timelines for https://ui.perfetto.dev and chrome://tracing, in the trace event format."""

from __future__ import annotations

import json
import os
from typing import Any

Json = dict[str, Any]
EVENTS = "traceEvents"
"""Key in a file under which its events are; torch's profiler writes the same format."""


class PerfettoEvents:
    """Processes, threads, slices, arrows and counters of a timeline; times are in microseconds.

    >>> found = PerfettoEvents()
    >>> found.process(0, "rank 0")
    >>> found.slice(0, 1, "all_reduce", "dp", start=0.0, duration=2.5)
    >>> [event["name"] for event in found.events]
    ['process_name', 'process_sort_index', 'all_reduce']

    Attributes:
        events: in the format, in the order in which they were added.
    """

    def __init__(self) -> None:
        self.events: list[Json] = []

    def process(self, process: int, name: str) -> None:
        """Name a process, and sort it by its number."""
        self._name("process_name", process, 0, {"name": name})
        self._name("process_sort_index", process, 0, {"sort_index": process})

    def label(self, process: int, label: str) -> None:
        """Write a label beside the name of a process."""
        self._name("process_labels", process, 0, {"labels": label})

    def thread(self, process: int, thread: int, name: str) -> None:
        """Name a thread, which is a row of slices that do not overlap."""
        self._name("thread_name", process, thread, {"name": name})

    def slice(
        self,
        process: int,
        thread: int,
        name: str,
        category: str,
        *,
        start: float,
        duration: float,
        args: Json | None = None,
    ) -> None:
        """Add what runs on a thread."""
        event = {"ph": "X", "name": name, "cat": category, "pid": process, "tid": thread, "ts": start, "dur": duration}
        self.events.append(event | ({"args": args} if args else {}))

    def arrow(self, phase: str, number: int, process: int, thread: int, name: str, category: str, at: float) -> None:
        """Lead an arrow through a slice.

        Args:
            phase: "s" where it starts, "t" on its way, "f" where it ends.
            number: of the arrow.
            process: of the slice.
            thread: of the slice.
            name: of the arrow.
            category: of the arrow.
            at: when.
        """
        event = {"ph": phase, "id": number, "name": name, "cat": category, "ts": at, "pid": process, "tid": thread}
        self.events.append(event | ({"bp": "e"} if phase == "f" else {}))

    def counter(self, process: int, name: str, at: float, values: Json) -> None:
        """Set the values of a counter, which are stacked."""
        self.events.append({"ph": "C", "name": name, "pid": process, "ts": at, "args": values})

    def write(self, path: str | os.PathLike[str], unit: str, left_out: str = "") -> None:
        """Write the file.

        Args:
            path: of the file, such as step.json.
            unit: in which times are shown: "ms" or "ns".
            left_out: what the file does not have; empty: it has all.
        """
        content: Json = {EVENTS: self.events, "displayTimeUnit": unit}
        if left_out:
            content["otherData"] = {"left out": left_out}
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file)

    def _name(self, kind: str, process: int, thread: int, args: Json) -> None:
        self.events.append({"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args})
