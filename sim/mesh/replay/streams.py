"""Streams of one rank: when each operation and communication of a part of its program runs.

The host issues events one after the other. An operation starts when it is issued and what is queued before it on its
stream is done; a communication when it is issued, its stream has got there, and the group's previous one is done.
All times here are in seconds after the end of the computation that came before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from sim.mesh.replay.pieces import (
    AWAIT,
    COMM,
    HOST,
    HOST_WAIT,
    ISSUE,
    MARK,
    OP,
    SEND,
    WAIT,
    WORK,
    Blame,
    Chain,
    Channel,
    Flight,
    Piece,
    Posted,
    arrive,
    beside,
    share,
)


class Ran(NamedTuple):
    """An operation or communication that ran: when, and the number of its event in the segment.

    `lane` is the number of the stream of an operation, and of the group of a communication.
    """

    start: float
    end: float
    lane: int
    event: int


class Gap(NamedTuple):
    """Time without computation, and its cause: an axis, `HOST` or `BUBBLE`."""

    start: float
    end: float
    cause: str


@dataclass
class Clock:
    """Where a rank's host and streams are.

    Attributes:
        host: when it issues the next event.
        busy: end of the last computation.
        tails: of streams.
        queues: ends of the groups' last communications.
        waits: what a stream, by number, has waited for since its last operation.
        host_waits: what the host has waited for since it issued an operation.
        done: communication by handle, and by handle and micro-batch.
        marks: time and waits of events.
        flying: communication that may share links with what comes.
        received: messages posted so far, by channel.
    """

    host: float = 0.0
    busy: float = 0.0
    tails: dict[int, float] = field(default_factory=dict)
    queues: dict[object, float] = field(default_factory=dict)
    waits: dict[int, Chain] = field(default_factory=dict)
    host_waits: Chain = ()
    done: dict[object, Flight | Posted] = field(default_factory=dict)
    marks: dict[int, tuple[float, Chain]] = field(default_factory=dict)
    flying: list[Flight] = field(default_factory=list)
    received: dict[Channel, int] = field(default_factory=dict)


@dataclass
class PieceResult:
    """What running a piece has led to.

    Attributes:
        clock: after it, without `Clock.received`.
        ops: that ran.
        comms: likewise; the end may have moved since.
        gaps: between computation.
        compute: seconds in which something was computed.
        sends: channel of each message and when it left.
        entered: communication that was under way before.
        carried: its end, and whether that has become final.
    """

    clock: Clock
    ops: list[Ran]
    comms: list[Ran]
    gaps: list[Gap]
    compute: float
    sends: list[tuple[Channel, float]]
    entered: list[Flight] = field(default_factory=list)
    carried: list[tuple[float, bool]] = field(default_factory=list)


def simulate(piece: Piece, clock: Clock, arrived: dict[tuple[Channel, int], float], slowdown: float) -> PieceResult:
    """Run a piece.

    Args:
        piece: to run.
        clock: before it; is changed.
        arrived: when messages were sent, by channel and number.
        slowdown: of computation while communication runs beside it, at least 1. Where `WORK` says what communication
            takes of the processor, it is 1.
    """
    host, tails, queues, waits, done, marks = (
        clock.host,
        clock.tails,
        clock.queues,
        clock.waits,
        clock.done,
        clock.marks,
    )
    host_waits = clock.host_waits
    flying = clock.flying
    ops: list[Ran] = []
    blames: list[Chain] = []
    flights: list[tuple[Flight, int]] = []
    sends: list[tuple[Channel, float]] = []
    busy = clock.busy
    floor = min(0.0, host)
    for code in piece.codes:
        kind = code[0]
        if kind == OP:
            _, stream, seconds, cost, at = code
            host += cost
            tail = tails.get(stream, floor)
            if host > tail:
                start, chain = host, host_waits + waits.get(stream, ())
            else:
                start, chain = tail, waits.get(stream, ())
            waits[stream] = ()
            host_waits = ()
            end = start + seconds
            if slowdown > 1 and flying:
                end += (slowdown - 1) * beside(flying, start, end)
            tails[stream] = end
            if end > busy:
                busy = end
            ops.append(Ran(start, end, stream, at))
            blames.append(chain)
        elif kind == COMM:
            _, stream, lane, seconds, rate, cost, handle, axis, link, at = code
            host += cost
            tail = tails.get(stream, floor)
            start, before = (host, HOST) if host > tail else (tail, axis)
            queued = queues.get(lane, floor)
            if queued > start:
                start, before = queued, axis
            flight = Flight(start, start + seconds, (), lane, link, rate)
            if len(flying) > 32:
                flying[:] = [other for other in flying if other.end > min(start, busy)]
            share(flight, seconds, flying, queues)
            queues[lane] = flight.end
            flight.chain = (*_recent(waits.get(stream, ()), busy), Blame(start, flight.end, axis, before))
            flying.append(flight)
            flights.append((flight, at))
            done[handle] = flight
        elif kind == WAIT:
            _, stream, handle = code
            found = done.get(handle)
            if found is None:
                continue
            if isinstance(found, Posted):
                at, work = found.event, found.work
                found = done[handle] = arrive(found, arrived)
                flights.append((found, at))
                if work:  # of which the host notices nothing, if it waits for the rest of the message anyway
                    host_waits += (Blame(host, host + work, found.chain[-1].axis, HOST),)
                    host += work
            else:
                found.fixed = True
            if found.end > tails.get(stream, floor):
                tails[stream] = found.end
                chain = found.chain
                if chain[-1].end != found.end:  # it has been slowed down since
                    chain = (*chain[:-1], chain[-1]._replace(end=found.end))
                waits[stream] = _joined(_recent(waits.get(stream, ()), busy), chain)
        elif kind == MARK:
            _, stream, event = code
            marks[event] = (tails.get(stream, floor), waits.get(stream, ()))
        elif kind == AWAIT:
            _, stream, event = code
            reached, chain = marks.get(event, (floor, ()))
            if reached > tails.get(stream, floor):
                tails[stream] = reached
                if chain:
                    waits[stream] = _joined(_recent(waits.get(stream, ()), busy), chain)
        elif kind == ISSUE:
            host += code[1]
        elif kind == WORK:
            _, work, axis = code
            host_waits += (Blame(host, host + work, axis, HOST),)
            host += work
        elif kind == HOST_WAIT:
            host, host_waits = _host_wait(code[1], clock, host, host_waits, busy)
        elif kind == SEND:
            _, stream, lane, seconds, cost, handle, axis, channel, at = code
            host += cost
            tail = tails.get(stream, floor)
            start, before = (host, HOST) if host > tail else (tail, axis)
            start = max(start, queues.get(lane, floor))
            end = queues[lane] = start + seconds
            flight = Flight(
                start, end, (*_recent(waits.get(stream, ()), busy), Blame(start, end, axis, before)), lane[0], "", 1.0
            )
            done[handle] = flight
            flights.append((flight, at))
            if channel is not None:
                sends.append((channel, start))
        else:
            _, stream, channel, seconds, cost, handle, axis, lane, at, early, work = code
            host += cost
            tail = floor if early else tails.get(stream, floor)
            first = clock.received.get(channel, 0)
            clock.received[channel] = first + 1
            done[handle] = Posted(max(host, tail), channel, first, seconds, axis, host > tail, lane, at, work)
    clock.host, clock.host_waits = host, host_waits
    gaps, compute, clock.busy = _gaps(ops, blames, clock.busy)
    comms = [Ran(flight.start, flight.end, flight.lane, at) for flight, at in flights]
    return PieceResult(clock, ops, comms, gaps, compute, sends)


def _joined(known: Chain, more: Chain) -> Chain:
    """Put two chains together; a stream that computes nothing, or waits for one that waits for it, knows most of it."""
    return tuple(dict.fromkeys(known + more)) if known else more


def _recent(chain: Chain, busy: float) -> Chain:
    """Forget what was over before the last computation was: no later gap is its fault."""
    return tuple([blame for blame in chain if blame.end > busy]) if chain else chain


def _host_wait(stream: int | None, clock: Clock, host: float, host_waits: Chain, busy: float) -> tuple[float, Chain]:
    chains: list[Blame] = []
    for number, tail in clock.tails.items():
        if stream is None or number == stream:
            host = max(host, tail)
            chains += clock.waits.get(number, ())
    if stream is None:
        for flight in clock.flying:
            flight.fixed = True
            host = max(host, flight.end)
            chains += flight.chain
    return host, host_waits + tuple([blame for blame in chains if blame.end > busy])


def _gaps(ops: list[Ran], blames: list[Chain], busy: float) -> tuple[list[Gap], float, float]:
    """Find the time in which no stream computes, whose fault that is, and the time in which one does."""
    numbers = (
        sorted(range(len(ops)), key=lambda at: ops[at].start) if len({op.lane for op in ops}) > 1 else range(len(ops))
    )
    gaps: list[Gap] = []
    compute = 0.0
    for at in numbers:
        start, end, _, _ = ops[at]
        if start > busy:
            cursor = busy
            for blame in sorted(blames[at], key=lambda found: found.end):
                if blame.end <= cursor:
                    continue
                if blame.start > cursor and blame.before != blame.axis:
                    begun = min(blame.start, start)
                    gaps.append(Gap(cursor, begun, blame.before))
                    cursor = begun
                if cursor < start:
                    gaps.append(Gap(cursor, min(blame.end, start), blame.axis))
                    cursor = min(blame.end, start)
            if cursor < start:
                gaps.append(Gap(cursor, start, HOST))
            busy = start
        if end > busy:
            compute += end - busy
            busy = end
    return gaps, compute, busy
