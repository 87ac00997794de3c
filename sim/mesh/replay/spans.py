"""Spans of a replayed step, few enough to be drawn, and as a Perfetto file."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from hyper_parallel.core.common.checks import check_choice
from sim.mesh.memory import ClassMemory
from sim.mesh.program import COMPUTE, Comm, Op, Place, Program
from sim.mesh.replay.pieces import BUBBLE, HOST
from sim.mesh.replay.player import Occurrence, ReplayedStep
from sim.mesh.replay.streams import Ran
from sim.timeline.perfetto import PerfettoEvents

# A timeline as boxes: what runs from when to when in which row, few enough to be drawn --------------------------------

COMMUNICATION = "communication"
"""Kind of spans in which something is sent or received."""
EXPOSED = "exposed"
"""Kind of spans in which a rank computes nothing, as it waits for communication."""
_DETAILS = ("op", "layer", "segment")
_MOST_BOXES = 200_000  # of a file; above it, operations of a layer are one


class DrawnSpan(NamedTuple):
    """A box.

    Attributes:
        row: number of the program.
        lane: `compute`, `compute 1` for other streams, or the axis that is communicated along.
        start: seconds from the beginning of the step.
        end: likewise.
        name: what is written on it.
        kind: of computation its phase (`forward`, `recompute`, `loss`, `backward`, `optimizer` ...), or
            `COMMUNICATION`; of time without computation `EXPOSED` (in the axis's lane), `bubble` or `host`.
        batch: micro-batch; -1: none.
    """

    row: int
    lane: str
    start: float
    end: float
    name: str
    kind: str
    batch: int = -1


def spans(timeline: ReplayedStep, detail: str | None = None, limit: int = 20_000) -> list[DrawnSpan]:
    """Return a timeline as spans, in the order of ranks.

    Args:
        timeline: of a step.
        detail: `op`: one for each operation; `layer`: one for each stretch of a layer and phase; `segment`: one
            for each forward, backward ... None: the finest that has at most `limit` spans of computation.
        limit: see `detail`.
    """
    if detail is None:
        ops = sum([len(one.outcome.ops) for one in chain(*timeline.occurrences)])
        detail = "op" if ops <= limit else "layer"
        if detail == "layer" and sum(1 for _ in _computed(timeline, "layer")) > limit:
            detail = "segment"
    else:
        check_choice("cannot list spans", "detail", detail, _DETAILS)
    found = [*_computed(timeline, detail), *_communicated(timeline), *_idle(timeline)]
    # Some stages are ahead of the first one, in what belongs to this step.
    return [span._replace(start=max(0.0, span.start)) for span in found if span.end > 0]


def exposed_parts(found: list[DrawnSpan]) -> list[DrawnSpan]:
    """Return the parts of communication during which its rank waits for it, as spans of the kind `EXPOSED`."""
    waits: dict[tuple[int, str], list[DrawnSpan]] = {}
    for span in found:
        if span.kind == EXPOSED:
            waits.setdefault((span.row, span.lane), []).append(span)
    parts: list[DrawnSpan] = []
    for several in waits.values():
        several.sort(key=lambda span: span.start)
    starts = {key: [span.start for span in several] for key, several in waits.items()}
    for span in found:
        several = waits.get((span.row, span.lane), [])
        if span.kind != COMMUNICATION or not several:
            continue
        at = max(0, bisect_right(starts[span.row, span.lane], span.start) - 1)
        while at < len(several) and several[at].start < span.end:
            start, end = max(span.start, several[at].start), min(span.end, several[at].end)
            if end > start:
                parts.append(span._replace(start=start, end=end, kind=EXPOSED))
            at += 1
    return parts


def _computed(timeline: ReplayedStep, detail: str) -> Iterator[DrawnSpan]:
    for one in chain(*timeline.occurrences):
        program = timeline.programs[one.row]
        if detail == "op":
            yield from _each(one, program, named="op")
        elif detail == "layer":
            yield from _stretches(_each(one, program, named="layer"))
        else:
            yield from _whole(one, program, timeline.step / 200)


def _each(one: Occurrence, program: Program, *, named: str) -> Iterator[DrawnSpan]:
    """Yield the operations of a piece, named by themselves ("op") or by the layer that they are in ("layer")."""
    events = program.segments[one.piece.key].events
    for ran in one.outcome.ops:
        op = events[ran.event]
        assert isinstance(op, Op)
        place = program.places[op.place] if program.places else Place(one.piece.key[0])
        kind = "recompute" if place.recomputes else place.phase
        name = op.name if named == "op" else kind if place.layer is None else str(place.layer)
        yield DrawnSpan(one.row, _lane(ran.lane), one.base + ran.start, one.base + ran.end, name, kind, one.batch)


def _stretches(found: Iterator[DrawnSpan]) -> Iterator[DrawnSpan]:
    """Join spans of one name and kind that follow each other in a lane."""
    open_: dict[str, DrawnSpan] = {}
    for span in found:
        before = open_.get(span.lane)
        if before is not None and (before.name, before.kind) == (span.name, span.kind):
            span = before._replace(end=span.end)
        elif before is not None:
            yield before
        open_[span.lane] = span
    yield from open_.values()


def _whole(one: Occurrence, program: Program, closest: float) -> Iterator[DrawnSpan]:
    """A segment, in parts where it waits for long."""
    name, stage, _ = one.piece.key
    label = name if one.batch < 0 else str(one.batch)
    if len(program.stages) > 1 and stage >= 0 and one.batch >= 0:
        label = f"{one.batch} ({stage})"
    kind = "backward" if name.startswith("backward") else name
    part: DrawnSpan | None = None
    for ran in sorted(one.outcome.ops):
        start, end = one.base + ran.start, one.base + ran.end
        if part is not None and start <= part.end + closest:
            part = part._replace(end=max(part.end, end))
            continue
        if part is not None:
            yield part
        part = DrawnSpan(one.row, _lane(COMPUTE), start, end, label, kind, one.batch)
    if part is not None:
        yield part


def _communicated(timeline: ReplayedStep) -> Iterator[DrawnSpan]:
    for one in chain(*timeline.occurrences):
        program = timeline.programs[one.row]
        events = program.segments[one.piece.key].events
        for ran in one.outcome.comms:
            axis, name = program.groups[ran.lane].axis, _comm_name(events, ran)
            yield DrawnSpan(one.row, axis, one.base + ran.start, one.base + ran.end, name, COMMUNICATION, one.batch)


def _comm_name(events: Sequence[object], ran: Ran) -> str:
    event = events[ran.event] if 0 <= ran.event < len(events) else None
    return event.op if isinstance(event, Comm) else "recv"


def _idle(timeline: ReplayedStep) -> Iterator[DrawnSpan]:
    for one in chain(*timeline.occurrences):
        for gap in one.outcome.gaps:
            is_own = gap.cause in (BUBBLE, HOST)
            lane, kind = (_lane(COMPUTE), gap.cause) if is_own else (gap.cause, EXPOSED)
            yield DrawnSpan(one.row, lane, one.base + gap.start, one.base + gap.end, gap.cause, kind, one.batch)


def _lane(stream: int) -> str:
    return "compute" if stream == COMPUTE else f"compute {stream}"


# A timeline as a file for https://ui.perfetto.dev and `chrome://tracing` --------------------------------------------


def chrome_events(timeline: ReplayedStep) -> PerfettoEvents:
    """Return a timeline in the trace event format: a process per rank, a thread per stream, counters of memory."""
    found = PerfettoEvents()
    lanes: dict[tuple[int, str], int] = {}
    for row, program in enumerate(timeline.programs):
        like = f" and {program.like - 1:,} like it" if program.like > 1 else ""
        found.process(row, f"rank {program.rank}{like}")
    for span in spans(timeline, limit=_MOST_BOXES):
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
    for row, class_memory in enumerate(timeline.memory):
        _add_counters(found, timeline, row, class_memory)
    return found


def _add_counters(found: PerfettoEvents, timeline: ReplayedStep, row: int, memory: ClassMemory) -> None:
    for point in memory.curve:
        at = timeline.when(row, point.position, point.event) * 1e6
        totals = {name: size for name, size in zip(memory.categories, point.totals, strict=True) if size}
        found.counter(row, "allocated (bytes)", at, totals)
        found.counter(row, "reserved (bytes)", at, {"reserved": point.reserved})
