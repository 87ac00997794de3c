"""What the ranks communicated: one event per rank and operation, with bytes, axis and the user's line."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

__all__ = ["Event", "Row", "Trace", "user_line"]


class Event(NamedTuple):
    """One rank's part in one operation.

    Attributes:
        rank: Global rank.
        op: ``all_reduce``, ``all_gather``, ``send``, ...
        axis: The mesh axis whose group it ran on; ``world`` for the default group.
        group: The global ranks of the group.
        seq: Number of the operation in its group, from 0 (-1 for point to point).
        send_bytes: Bytes the rank sends to others when each talks to each directly, and an all_reduce is a
            reduce_scatter and an all_gather: the least there is, except that a real tree spreads a root's share.
        recv_bytes: Bytes it receives, likewise.
        dtype: Of the data.
        line: The user's source line, ``file:line in function``.
    """

    rank: int
    op: str
    axis: str
    group: tuple[int, ...]
    seq: int
    send_bytes: int
    recv_bytes: int
    dtype: str
    line: str


class Row(NamedTuple):
    """One line of the summary: how often an operation ran on an axis, and what it moved.

    Attributes:
        axis: Mesh axis.
        op: Operation.
        count: Operations; one that n ranks take part in counts once.
        bytes: Bytes received, all ranks together.
        bytes_per_rank: The most that one rank received.
    """

    axis: str
    op: str
    count: int  # type: ignore[assignment]
    bytes: int
    bytes_per_rank: int


class Trace:
    """The events of a world, rank by rank.

    >>> trace = Trace(2)
    >>> for rank in (0, 1):
    ...     trace.add(Event(rank, "all_gather", "dp", (0, 1), 0, 8, 8, "float32", "train.py:3 in step"))
    >>> print(trace.summary())
    axis  op          count  bytes received  most on one rank
    dp    all_gather      1              16                 8
    """

    def __init__(self, world_size: int) -> None:
        self._by_rank: list[list[Event]] = [[] for _ in range(world_size)]

    def add(self, event: Event) -> None:
        """Append an event of ``event.rank``."""
        self._by_rank[event.rank].append(event)

    @property
    def events(self) -> list[Event]:
        """All events: rank 0's in its order, then rank 1's, and so on."""
        return [event for events in self._by_rank for event in events]

    def of_rank(self, rank: int) -> list[Event]:
        """The events of one rank, in the order in which it issued them."""
        return list(self._by_rank[rank])

    def bytes(self, axis: str | None = None, op: str | None = None, rank: int | None = None) -> int:
        """Bytes received, of one axis, operation or rank, or of all."""
        events: Iterable[Event] = self.events if rank is None else self._by_rank[rank]
        return sum(e.recv_bytes for e in events if axis in (None, e.axis) and op in (None, e.op))

    def by_axis(self) -> list[Row]:
        """One row per axis and operation, axes in the order of first use by the lowest rank."""
        counted: dict[tuple[str, str], set[tuple[tuple[int, ...], int, int]]] = {}
        moved: dict[tuple[str, str], dict[int, int]] = {}
        for rank, events in enumerate(self._by_rank):
            for number, event in enumerate(events):
                key = (event.axis, event.op)
                once = (event.group, event.seq, 0) if event.seq >= 0 else (event.group, rank, number)
                counted.setdefault(key, set()).add(once)
                per_rank = moved.setdefault(key, {})
                per_rank[rank] = per_rank.get(rank, 0) + event.recv_bytes
        order = list(dict.fromkeys(axis for axis, _ in moved))
        return [
            Row(axis, op, len(counted[axis, op]), sum(per_rank.values()), max(per_rank.values()))
            for (axis, op), per_rank in sorted(moved.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
        ]

    def summary(self) -> str:
        """A table of :meth:`by_axis`."""
        head = ("axis", "op", "count", "bytes received", "most on one rank")
        rows = [(r.axis, r.op, f"{r.count:,}", f"{r.bytes:,}", f"{r.bytes_per_rank:,}") for r in self.by_axis()]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        lines = []
        for row in [head, *rows]:
            cells = [row[i].ljust(widths[i]) if i < 2 else row[i].rjust(widths[i]) for i in range(len(head))]
            lines.append("  ".join(cells))
        return "\n".join(lines)

    def clear(self) -> None:
        """Forget all events, for example after a warm-up."""
        for events in self._by_rank:
            events.clear()


def _library_folders() -> tuple[str, ...]:
    here = Path(__file__).resolve().parent
    return tuple(str(folder) + os.sep for folder in (here, here.parent / "hyper_parallel", Path(torch.__file__).parent))


_LIBRARIES = _library_folders()
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_is_library: dict[str, bool] = {}  # a cache of a pure function of the file name


def _belongs_to_a_library(file: str) -> bool:
    if file.startswith((*_LIBRARIES, "<frozen")):
        return True
    return file.startswith(_STDLIB) and "site-packages" not in file


def user_line() -> str:
    """The innermost line of the calling stack that is neither torch's, the standard library's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        internal = _is_library.get(name)
        if internal is None:
            internal = _is_library[name] = _belongs_to_a_library(name)
        if not internal:
            return f"{os.path.basename(name)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "(no line of user code)"
