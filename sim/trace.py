"""The trace of a world: its events, and these in the formats of other tools and as a picture."""

from __future__ import annotations

import os

from sim.comm.trace import Event, EventLog, Row, Span
from sim.timeline.export import write_chrome, write_flight_recorder
from sim.timeline.plot import draw

__all__ = ["Event", "Row", "Span", "Trace"]


class Trace(EventLog):
    """The events of a world, as `sim.comm.trace.EventLog` counts them, and their exports."""

    def to_chrome(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline for https://ui.perfetto.dev and `chrome://tracing`.

        One process per rank, one row per axis and group, an arrow through the members of each operation. Time is
        virtual; where none has passed, an operation comes one step after what its ranks did before it.
        """
        write_chrome(self, path)

    def plot(self, path: str | os.PathLike[str], *, color: str = "op") -> None:
        """Draw the timeline, one row per rank, as a picture: `.png`, `.svg` or `.pdf`.

        Args:
            path: Where to write it; the ending says in which format.
            color: What the colours tell apart, `op` or `axis`.

        Raises:
            SimError: matplotlib is not installed.
            ValueError: Another `color`, or an ending that is no format.
        """
        draw(self, path, color)

    def to_flight_recorder(self, folder: str | os.PathLike[str]) -> None:
        """Write one dump per rank in the format of torch's flight recorder, for torch's own analyser.

        `python -m torch.distributed.flight_recorder.fr_trace FOLDER` (torch 2.12 and later) reads them. A world that
        failed can be dumped, too: what not all ranks have joined counts as scheduled.
        """
        write_flight_recorder(self, folder)
