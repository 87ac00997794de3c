"""The trace of communication: one event per rank and operation, with bytes, axis and the user's line."""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from hyper_parallel.core.common.checks import check_choice, read_int
from hyper_parallel.core.common.tables import View, as_html, plain_table

Shape = tuple[int, ...]
OPS = (
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
        op: `all_reduce`, `all_gather`, `send`, ...
        axis: The mesh axis whose group it ran on; `world` for the default group.
        group: The global ranks of the group.
        seq: Number of the operation in its group, from 0 (-1 for point to point).
        send_bytes: Bytes the rank sends to others when each talks to each directly, and an all_reduce is a
            reduce_scatter and an all_gather: the least there is, except that a real tree spreads a root's share.
        recv_bytes: Bytes it receives, likewise.
        dtype: Of the data.
        line: The user's source line, `file:line in function`.
        reduce_op: `SUM`, `AVG`, ...; empty where nothing is reduced.
        root: Global rank that gives or gets everything, where there is one.
        peer: Global rank on the other side of a send or recv; None for a recv from anybody, which came first.
        input_shapes: Of the tensors the rank gives.
        output_shapes: Of the tensors it gets.
        process_group: torch's name of the group.
        members: The global ranks of the process group; for a send or recv, `group` is the pair.
        order: Number of the event over all ranks, in the order in which they were issued.
        issued: The rank's virtual clock at the call, in seconds.
        span: When the operation ran; shared by all who take part in it.
        digest: Of the bytes the rank gives, where `sim.check_determinism` asked for it.
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
        """Of the first tensor the rank gives, or, where it gives none, gets; `()` where there is no data."""
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


class _Sums:
    """What completed operations have moved, and how often they ran, without their events.

    Attributes:
        moved: Bytes received by rank, for each axis and operation.
        counts: Operations; one that n ranks take part in counts once.
        first: The lowest rank that took part, and the number of its first event of the kind.
    """

    def __init__(self) -> None:
        self.moved: dict[tuple[str, str], dict[int, int]] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        self.first: dict[tuple[str, str], tuple[int, int]] = {}
        self._partly: dict[tuple[Any, ...], int] = {}  # by operation: members so far, where more are to come

    def add(self, event: Event, number: int) -> None:
        """Count an event, the `number`-th of its rank."""
        key, here = (event.axis, event.op), (event.rank, number)
        per_rank = self.moved.setdefault(key, {})
        per_rank[event.rank] = per_rank.get(event.rank, 0) + event.recv_bytes
        self.first[key] = min(self.first.get(key, here), here)
        if event.seq < 0:
            self.counts[key] += 1
            return
        once = (key, event.process_group, event.group, event.seq)
        members = self._partly.pop(once, 0) + 1
        self.counts[key] += members == 1
        if members < len(event.group):
            self._partly[once] = members

    def received(self, axis: str | None, op: str | None, rank: int | None) -> int:
        """Bytes received, of one axis, operation or rank, or of all."""
        chosen = [per_rank for key, per_rank in self.moved.items() if axis in (None, key[0]) and op in (None, key[1])]
        return sum(size for per_rank in chosen for each, size in per_rank.items() if rank in (None, each))


class EventLog:
    """The events of a world, rank by rank: counts and sums of all of them, and the last ones themselves.

    >>> trace = EventLog(2)
    >>> for rank in (0, 1):
    ...     trace.add(Event(rank, "all_gather", "dp", (0, 1), 0, 8, 8, "float32", "train.py:3 in step"))
    >>> print(trace.summary())
    axis  op          count  bytes received  most on one rank
    dp    all_gather      1              16                 8

    Args:
        world_size: Number of ranks.
        keep_events: How many events of each rank to keep, besides those that are not completed; None: all. The others
            are in `bytes`, `by_axis`, `summary` and `count` only.
    """

    def __init__(self, world_size: int, keep_events: int | None = None) -> None:
        self._by_rank: list[deque[Event]] = [deque() for _ in range(world_size)]
        self._keep = math.inf if keep_events is None else keep_events
        self._first = [0] * world_size  # by rank: the number of the first event that is in `_by_rank`
        self._open: dict[int, list[tuple[int, Event]]] = {}  # by rank: older ones, with numbers, that may yet count
        self._sums = _Sums()  # of the events that are forgotten
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
        """Append an event of `event.rank`."""
        events = self._by_rank[event.rank]
        events.append(event)
        if len(events) > self._keep:
            self._forget(event.rank, events.popleft())

    def _forget(self, rank: int, event: Event) -> None:
        """Keep of the oldest event what it counts for, once all ranks have come."""
        number = self._first[rank]
        self._first[rank] = number + 1
        if event.completed and rank not in self._open:
            self._sums.add(event, number)
            return
        older = [*self._open.pop(rank, ()), (number, event)]
        for each, late in older:
            if late.completed:
                self._sums.add(late, each)
        if waiting := [pair for pair in older if not pair[1].completed]:
            self._open[rank] = waiting

    def next_order(self) -> int:
        """Count an event that is about to be added."""
        self._issued += 1
        return self._issued - 1

    def in_order(self) -> list[Event]:
        """The events in the order in which they were issued: for one seed, always the same."""
        self._say_forgotten()
        return sorted(self.kept(), key=lambda event: event.order)

    @property
    def events(self) -> list[Event]:
        """The events: rank 0's in its order, then rank 1's, and so on; a warning where older ones are forgotten."""
        self._say_forgotten()
        return list(self.kept())

    def of_rank(self, rank: int) -> list[Event]:
        """The events of one rank, in the order in which it issued them; a warning where older ones are forgotten.

        Raises:
            ValueError: There is no such rank.
        """
        self._checked_rank(rank)
        self._say_forgotten()
        return [event for _, event in self._numbered(rank)]

    def kept(self) -> Iterator[Event]:
        """The events that are not forgotten, without a warning: for callers that say themselves what is missing."""
        return (event for place in range(len(self._by_rank)) for _, event in self._numbered(place))

    def count(self, rank: int) -> int:
        """How many events of a rank there have been, forgotten ones included.

        Raises:
            ValueError: There is no such rank.
        """
        self._checked_rank(rank)
        return self._first[rank] + len(self._by_rank[rank])

    def forgotten(self, rank: int | None = None) -> int:
        """How many events, of a rank or of all ranks together, are in counts and sums only.

        Raises:
            ValueError: There is no such rank.
        """
        if rank is None:
            return sum(self._first) - sum(map(len, self._open.values()))
        self._checked_rank(rank)
        return self._first[rank] - len(self._open.get(rank, ()))

    def _numbered(self, place: int) -> Iterator[tuple[int, Event]]:
        """The events that are not forgotten of the rank at this place, with their numbers among all of the rank."""
        return chain(self._open.get(place, ()), enumerate(self._by_rank[place], self._first[place]))

    def _say_forgotten(self) -> None:
        if older := self.forgotten():
            warnings.warn(
                f"the trace has the last {self._keep:,} events of each rank; {older:,} older ones are in its "
                "counts and sums only\n  try: sim.world(..., keep_events=None), which keeps all",
                stacklevel=3,
            )

    def bytes(self, axis: str | None = None, op: str | None = None, rank: int | None = None) -> int:
        """Bytes received by completed operations, of one axis, operation or rank, or of all.

        Args:
            axis: A mesh axis, `world`, or what else an event has as its axis; 0 if nothing was communicated on it.
            op: `all_reduce`, `send`, ...; 0 if there was none.
            rank: Global rank.

        Raises:
            ValueError: No group of the world has that name, there is no such operation, or no such rank.
        """
        asked = "cannot count the bytes of a trace"
        if axis is not None:
            known = (
                dict.fromkeys(chain((axis for axis, _ in self._sums.moved), (e.axis for e in self.kept()))) | self._axes
            )
            check_choice(asked, "axis", axis, known)
        if op is not None:
            check_choice(asked, "op", op, OPS)
        events = self.kept() if rank is None else (e for _, e in self._numbered(self._checked_rank(rank)))
        chosen = (e for e in events if e.completed and axis in (None, e.axis) and op in (None, e.op))
        return self._sums.received(axis, op, rank) + sum(event.recv_bytes for event in chosen)

    def _checked_rank(self, rank: int) -> int:
        return read_int("cannot find events in the trace", "rank", rank, 0, most=self.world_size - 1)

    def by_axis(self) -> list[Row]:
        """One row per axis and operation that has been completed, axes in the order of first use by the lowest rank."""
        sums, first = copy.deepcopy(self._sums), dict[str, tuple[int, int]]()
        for number, event in chain.from_iterable(map(self._numbered, range(len(self._by_rank)))):
            if event.completed:
                sums.add(event, number)
        for (axis, _), here in sums.first.items():
            first[axis] = min(first.get(axis, here), here)
        return [
            Row(axis, op, sums.counts[axis, op], sum(per_rank.values()), max(per_rank.values()))
            for (axis, op), per_rank in sorted(sums.moved.items(), key=lambda item: (first[item[0][0]], item[0][1]))
        ]

    def summary(self) -> str:
        """A table of `by_axis`."""
        return str(View(self._table()))

    def _table(self) -> Table:
        table = plain_table("axis", "op", "count", "bytes received", "most on one rank", left=2)
        for row in self.by_axis():
            table.add_row(row.axis, row.op, f"{row.count:,}", f"{row.bytes:,}", f"{row.bytes_per_rank:,}")
        return table

    def __repr__(self) -> str:
        count = sum(map(self.count, range(self.world_size)))
        return f"{type(self).__name__}({count:,} event{'s' * (count != 1)} of {self.world_size:,} ranks)"

    def _repr_html_(self) -> str:
        return as_html(View(Text(repr(self), style="bold"), self._table()))

    def clear(self) -> None:
        """Start anew, without events, counts and sums, for example after a warm-up."""
        self.know(chain((axis for axis, _ in self._sums.moved), (event.axis for event in self.kept())))
        for events in self._by_rank:
            events.clear()
        self._first, self._open, self._sums = [0] * len(self._by_rank), {}, _Sums()
