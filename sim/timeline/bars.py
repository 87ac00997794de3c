"""Events of a trace on a time axis, for those who draw them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sim.comm.trace import Event
from sim.comm.trace import EventLog as Trace


class Bar(NamedTuple):
    """One rank's part in one operation, on the time axis.

    Attributes:
        event: The event.
        waits: From here on the rank had called it.
        left: Where it begins.
        right: Where it ends.
        number: Of the operation; one for all its members.
        complete: Whether all members came.
    """

    event: Event
    waits: float
    left: float
    right: float
    number: int
    complete: bool


class TraceBars(NamedTuple):
    """The bars of a trace, in the order in which the events were issued.

    Attributes:
        bars: One per event.
        timed: Whether they lie in virtual seconds; otherwise in steps.
    """

    bars: list[Bar]
    timed: bool


def lay_out(trace: Trace) -> TraceBars:
    """Place the events that a trace has kept: in virtual time, or, where none has passed, in steps.

    An operation is one step after the last thing that any of its members did before.
    """
    events = sorted(trace.kept(), key=lambda event: event.order)
    operations: dict[int, list[Event]] = {}
    for event in events:
        operations.setdefault(id(event.span) if event.span is not None else -1 - id(event), []).append(event)
    numbered = list(operations.values())
    timed = any(event.end or event.issued for event in events)
    bars = _in_time(numbered) if timed else _in_steps(numbered)
    return TraceBars(sorted(bars, key=lambda bar: bar.event.order), timed)


def _is_complete(members: list[Event]) -> bool:
    """Whether everybody came; an operation that carries no time is taken as it is."""
    return members[0].span is None or members[0].end is not None


def _in_time(operations: list[list[Event]]) -> Iterable[Bar]:
    last = max(event.end or event.issued for members in operations for event in members)
    for number, members in enumerate(operations):
        for event in members:
            if event.start is None or event.end is None:  # it waits for ever
                yield Bar(event, event.issued, event.issued, last, number, _is_complete(members))
            else:
                yield Bar(event, event.issued, event.start, event.end, number, True)


def _in_steps(operations: list[list[Event]]) -> Iterable[Bar]:
    reached: dict[int, int] = {}
    # By the order in which they were complete, so that what a rank did one after the other stays so.
    for number, members in sorted(enumerate(operations), key=lambda item: max(event.order for event in item[1])):
        step = max(reached.get(event.rank, 0) for event in members)
        for event in members:
            reached[event.rank] = step + 1
            yield Bar(event, step, step, step + 1, number, _is_complete(members))


def row_names(bars: Iterable[Bar]) -> dict[tuple[str, str], str]:
    """A name for each axis and group: the axis's, with a number where an axis has several groups of one rank.

    Point to point is on a row of its own, since it does not wait for the collectives of its group.
    """
    groups: dict[str, list[str]] = {}
    per_rank: dict[tuple[int, str], list[str]] = {}
    for bar in bars:
        axis, group = row_of(bar.event)
        if group not in (mine := per_rank.setdefault((bar.event.rank, axis), [])):
            mine.append(group)
        if group not in (known := groups.setdefault(axis, [])):
            known.append(group)
    several = {axis for (_, axis), mine in per_rank.items() if len(mine) > 1}
    return {
        (axis, group): f"{axis} ({number})" if axis in several and number else axis
        for axis, names in groups.items()
        for number, group in enumerate(names)
    }


def row_of(event: Event) -> tuple[str, str]:
    """The axis and group whose row an event is on."""
    return (f"{event.axis} {event.op}" if event.seq < 0 else event.axis), event.process_group


def stack(spans: list[tuple[float, float]]) -> list[int]:
    """Put intervals that overlap into lanes; returns the lane of each, in the order given.

    >>> stack([(0, 2), (1, 3), (2, 4)])
    [0, 1, 0]
    """
    free: list[float] = []
    lanes = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: spans[i]):
        left, right = spans[index]
        lane = next((number for number, until in enumerate(free) if until <= left), len(free))
        if lane == len(free):
            free.append(right)
        free[lane] = right
        lanes[index] = lane
    return lanes
