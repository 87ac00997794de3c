"""What the ranks communicated: one event per rank and operation, with bytes, axis and the user's line."""

from __future__ import annotations

import difflib
import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

__all__ = ["Event", "Row", "Span", "Trace", "belongs_to_a_library", "raised_at", "user_line"]

Shape = tuple[int, ...]
_OPS = (
    *("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "recv", "reduce", "reduce_scatter"),
    *("scatter", "send"),
)


@dataclass(slots=True)
class Span:
    """When an operation ran, in virtual seconds: one object for all who take part in it.

    Attributes:
        start: When the last of them had come; None while somebody is missing.
        end: When it was over.
    """

    start: float | None = None
    end: float | None = None


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
        reduce_op: ``SUM``, ``AVG``, ...; empty where nothing is reduced.
        root: Global rank that gives or gets everything, where there is one.
        peer: Global rank on the other side of a send or recv; None for a recv from anybody, which came first.
        input_shapes: Of the tensors the rank gives.
        output_shapes: Of the tensors it gets.
        process_group: torch's name of the group.
        members: The global ranks of the process group; for a send or recv, ``group`` is the pair.
        order: Number of the event over all ranks, in the order in which they were issued.
        issued: The rank's virtual clock at the call, in seconds.
        span: When the operation ran; shared by all who take part in it.
        digest: Of the bytes the rank gives, where :func:`sim.check_determinism` asked for it.
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
    reduce_op: str = ""
    root: int | None = None
    peer: int | None = None
    input_shapes: tuple[Shape, ...] = ()
    output_shapes: tuple[Shape, ...] = ()
    process_group: str = ""
    members: tuple[int, ...] = ()
    order: int = -1
    issued: float = 0.0
    span: Span | None = None
    digest: str = ""

    @property
    def shape(self) -> Shape:
        """Of the first tensor the rank gives, or, where it gives none, gets; ``()`` where there is no data."""
        return next(iter((*self.input_shapes, *self.output_shapes)), ())

    @property
    def start(self) -> float | None:
        """When the operation began, in virtual seconds; None while a rank is missing."""
        return None if self.span is None else self.span.start

    @property
    def end(self) -> float | None:
        """When the operation was over, in virtual seconds; None while a rank is missing."""
        return None if self.span is None else self.span.end

    @property
    def completed(self) -> bool:
        """Whether all who take part have come, and the data has moved; only then do its bytes count."""
        return self.span is None or self.span.end is not None

    @property
    def name(self) -> str:
        """What it is called in messages.

        >>> Event(0, "all_reduce", "tp", (0, 1), 3, 8, 8, "float32", "train.py:3 in step").name
        "all_reduce #3 of group 'tp'"
        """
        if self.seq >= 0:
            return f"{self.op} #{self.seq} of group {self.axis!r}"
        whom = "any rank" if self.peer is None else f"rank {self.peer}"
        return f"{self.op} {'to' if self.op == 'send' else 'from'} {whom} in group {self.axis!r}"


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
        self._issued = 0
        self._axes: dict[str, None] = {"world": None}  # besides those of events

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._by_rank)

    def know(self, axes: Iterable[str]) -> None:
        """Note axes of a mesh: nothing may ever be communicated on some of them."""
        self._axes.update(dict.fromkeys(axes))

    def add(self, event: Event) -> None:
        """Append an event of ``event.rank``."""
        self._by_rank[event.rank].append(event)

    def next_order(self) -> int:
        """Count an event that is about to be added."""
        self._issued += 1
        return self._issued - 1

    def in_order(self) -> list[Event]:
        """All events in the order in which they were issued: for one seed, always the same."""
        return sorted(self.events, key=lambda event: event.order)

    @property
    def events(self) -> list[Event]:
        """All events: rank 0's in its order, then rank 1's, and so on."""
        return [event for events in self._by_rank for event in events]

    def of_rank(self, rank: int) -> list[Event]:
        """The events of one rank, in the order in which it issued them.

        Raises:
            ValueError: There is no such rank.
        """
        return list(self._by_rank[self._checked_rank(rank)])

    def bytes(self, axis: str | None = None, op: str | None = None, rank: int | None = None) -> int:
        """Bytes received by completed operations, of one axis, operation or rank, or of all.

        Args:
            axis: A mesh axis, ``world``, or what else an event has as its axis; 0 if nothing was communicated on it.
            op: ``all_reduce``, ``send``, ...; 0 if there was none.
            rank: Global rank.

        Raises:
            ValueError: No group of the world has that name, there is no such operation, or no such rank.
        """
        if axis is not None:
            known = dict.fromkeys(event.axis for event in self.events) | self._axes
            _check_name("axis", axis, list(known), "no group of this world is called that")
        if op is not None:
            _check_name("op", op, _OPS, "there is no such operation")
        events: Iterable[Event] = self.events if rank is None else self._by_rank[self._checked_rank(rank)]
        return sum(e.recv_bytes for e in events if e.completed and axis in (None, e.axis) and op in (None, e.op))

    def _checked_rank(self, rank: int) -> int:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise ValueError(
                f"the trace has no events of rank {rank!r}: it is of a world of {self.world_size} ranks\n"
                f"  rank: an int from 0 to {self.world_size - 1}\n  try: rank=0"
            )
        return rank

    def by_axis(self) -> list[Row]:
        """One row per axis and operation that has been completed, axes in the order of first use by the lowest rank."""
        counted: dict[tuple[str, str], set[tuple[tuple[int, ...], int, int]]] = {}
        moved: dict[tuple[str, str], dict[int, int]] = {}
        for rank, events in enumerate(self._by_rank):
            for number, event in enumerate(events):
                if not event.completed:
                    continue
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

    def to_chrome(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline for https://ui.perfetto.dev and ``chrome://tracing``.

        One process per rank, one row per axis and group, an arrow through the members of each operation. Time is
        virtual; where none has passed, an operation comes one step after what its ranks did before it.
        """
        from sim.views.export import write_chrome

        write_chrome(self, path)

    def plot(self, path: str | os.PathLike[str], *, color: str = "op") -> None:
        """Draw the timeline, one row per rank, as a picture: ``.png``, ``.svg`` or ``.pdf``.

        Args:
            path: Where to write it; the ending says in which format.
            color: What the colours tell apart, ``op`` or ``axis``.

        Raises:
            SimError: matplotlib is not installed.
            ValueError: Another ``color``, or an ending that is no format.
        """
        from sim.views.plot import draw

        draw(self, path, color)

    def to_flight_recorder(self, folder: str | os.PathLike[str]) -> None:
        """Write one dump per rank in the format of torch's flight recorder, for torch's own analyser.

        ``python -m torch.distributed.flight_recorder.fr_trace FOLDER`` (torch 2.12 and later) reads them. A world that
        failed can be dumped, too: what not all ranks have joined counts as scheduled.
        """
        from sim.views.export import write_flight_recorder

        write_flight_recorder(self, folder)

    def clear(self) -> None:
        """Forget all events, for example after a warm-up."""
        self.know(event.axis for event in self.events)
        for events in self._by_rank:
            events.clear()


def _check_name(argument: str, asked: str, known: Sequence[str], what: str) -> None:
    if asked not in known:
        nearest = difflib.get_close_matches(str(asked), known, n=1, cutoff=0.5) or known[:1]
        raise ValueError(
            f"cannot count the bytes of {argument}={asked!r}: {what}\n"
            f"  {argument}: one of {', '.join(map(repr, known))}\n"
            f"  try: {argument}={nearest[0]!r}"
        )


def _library_folders() -> tuple[str, ...]:
    here = Path(__file__).resolve().parent
    return tuple(str(folder) + os.sep for folder in (here, here.parent / "hyper_parallel", Path(torch.__file__).parent))


_LIBRARIES = _library_folders()
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_is_library: dict[str, bool] = {}  # a cache of a pure function of the file name


def belongs_to_a_library(file: str) -> bool:
    """Tell whether a source file is torch's, the standard library's or ours, and not the user's."""
    if file.startswith((*_LIBRARIES, "<frozen")) or os.path.basename(file) == "typing_extensions.py":
        return True  # the latter is around whatever torch has deprecated
    return file.startswith(_STDLIB) and "site-packages" not in file


def user_line(frame: FrameType | None = None) -> str:
    """The innermost line of a stack (the caller's own) that is neither torch's, the standard library's nor ours."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        internal = _is_library.get(name)
        if internal is None:
            internal = _is_library[name] = belongs_to_a_library(name)
        if not internal:
            return f"{os.path.basename(name)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "(no line of user code)"


def raised_at(error: BaseException) -> str:
    """The innermost line of user code that an exception has come through; empty where it has come through none."""
    line, part = "", error.__traceback__
    while part is not None:
        code = part.tb_frame.f_code
        if not belongs_to_a_library(code.co_filename):
            line = f"{os.path.basename(code.co_filename)}:{part.tb_lineno} in {code.co_name}"
        part = part.tb_next
    return line
