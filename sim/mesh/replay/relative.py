"""The state of a rank's streams as seen from the end of its last computation, reduced to what a piece depends on.

Two pieces in equal states end alike, wherever in the step they are. That makes long pipelines cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sim.mesh.replay.pieces import Blame, Channel, Flight, Piece, Posted
from sim.mesh.replay.streams import Clock, PieceResult


class Start(NamedTuple):
    """The state before a piece.

    Attributes:
        key: equal for states that end alike.
        clock: relative to the last computation's end.
        arrived: when the messages that the piece waits for were sent.
        flights: communication under way, relative.
        originals: the same in the rank's clock.
    """

    key: tuple[object, ...]
    clock: Clock
    arrived: dict[tuple[Channel, int], float]
    flights: list[Flight]
    originals: list[Flight]


def relative_clock(
    clock: Clock,
    piece: Piece,
    batch: int,
    sent: Mapping[Channel, list[float]],
    find: Callable[[int, int], Any],
    unit: float,
) -> Start:
    """Return the part of a clock that a piece depends on.

    Args:
        clock: of a rank.
        piece: that comes next.
        batch: its micro-batch.
        sent: when messages were sent, by channel.
        find: a communication by handle and micro-batch.
        unit: seconds to which times are rounded; 0: they are not.
    """
    base = clock.busy

    def seen(time: float) -> float:
        time -= base
        return round(time / unit) * unit if unit else time

    def chain(blames: tuple[Blame, ...]) -> tuple[Blame, ...]:
        return tuple([Blame(seen(b.start), seen(b.end), b.axis, b.before) for b in blames if b.end > base])

    host = seen(clock.host)
    if unit and not piece.halts:  # a host, or an idle stream, that is further ahead than that holds up nothing
        host = max(host, -piece.host - 2 * piece.total)
    streams = tuple(clock.tails) if piece.halts else piece.streams
    start = Clock(host=host, busy=0.0)
    for stream in streams:
        start.tails[stream] = max(host, seen(clock.tails.get(stream, clock.host)))
        start.waits[stream] = chain(clock.waits.get(stream, ()))
    start.host_waits = chain(clock.host_waits)
    for lane in piece.lanes:
        queued = seen(clock.queues.get(lane, clock.host))
        if queued > host:
            start.queues[lane] = queued
    copies: dict[int, Flight] = {}
    originals: list[Flight] = []

    def copy(flight: Flight) -> Flight:
        found = copies.get(id(flight))
        if found is None:
            found = Flight(
                seen(flight.start), seen(flight.end), chain(flight.chain), flight.lane, flight.link, flight.rate
            )
            found.fixed = flight.fixed
            copies[id(flight)] = found
            originals.append(flight)
        return found

    start.flying = [copy(flight) for flight in clock.flying if flight.end > base]
    arrived: dict[tuple[Channel, int], float] = {}
    for number, (kind, which) in enumerate(piece.needs):
        if kind == "event":
            if which in clock.marks:
                reached, waits = clock.marks[which]
                start.marks[which] = (max(host, seen(reached)), chain(waits))
            continue
        found = find(which, batch)
        if isinstance(found, Posted):
            own = -1 - number  # so that the number says nothing about how far the step is
            start.done[which] = found._replace(at=max(host, seen(found.at)), number=own)
            arrived[found.channel, own] = max(host, seen(sent[found.channel][found.number]))
        elif found is not None and found.end > base:
            start.done[which] = copy(found)
    for channel, number in piece.awaits:
        arrived[channel, number] = max(host, seen(sent[channel][number + clock.received.get(channel, 0)]))
    flights = list(copies.values())
    key = (
        host,
        tuple(start.tails.items()),
        tuple(start.waits.items()),
        start.host_waits,
        tuple(start.queues.items()),
        tuple([flight.key() for flight in flights]),
        tuple(
            [(which, done if isinstance(done, Posted) else flights.index(done)) for which, done in start.done.items()]
        ),
        tuple(start.marks.items()),
        tuple(arrived.items()),
    )
    return Start(key, start, arrived, flights, originals)


def advance(clock: Clock, base: float, piece: Piece, batch: int, start: Start, outcome: PieceResult) -> None:
    """Move a rank's clock on by what came of a piece.

    Args:
        clock: of the rank; is changed.
        base: end of the computation before the piece.
        piece: that ran.
        batch: its micro-batch.
        start: the state before it.
        outcome: of it, or of one like it.
    """
    after = outcome.clock
    if piece.halts:
        clock.host = base + after.host
    else:
        clock.host += after.host - start.key[0]  # type: ignore[operator]
    for stream, tail in after.tails.items():
        clock.tails[stream] = base + tail
    for stream, waits in after.waits.items():
        clock.waits[stream] = tuple([blame.moved(base) for blame in waits])
    clock.host_waits = tuple([blame.moved(base) for blame in after.host_waits])
    for lane, queued in after.queues.items():
        clock.queues[lane] = base + queued
    moved: dict[int, Flight] = {}
    for original, (end, fixed) in zip(start.originals, outcome.carried, strict=True):
        if end != original.end - base:
            original.end = base + end
        original.fixed = fixed
    before = dict(zip([id(flight) for flight in outcome.entered], start.originals, strict=True))

    def back(flight: Flight) -> Flight:
        found = before.get(id(flight)) or moved.get(id(flight))
        if found is None:
            found = moved[id(flight)] = flight.moved(base)
        return found

    for handle in piece.keeps:
        done = after.done.get(handle)
        if done is None:
            continue
        found = done.moved(base, clock.received.get(done.channel, 0)) if isinstance(done, Posted) else back(done)
        clock.done[handle] = found
        if batch >= 0:
            clock.done[handle, batch] = found
    for event in piece.marks:
        reached, waits = after.marks[event]
        clock.marks[event] = (base + reached, tuple([blame.moved(base) for blame in waits]))
    busy = base + after.busy
    clock.flying = [flight for flight in [back(flight) for flight in after.flying] if flight.end > busy]
    for channel in piece.receives:
        clock.received[channel] = clock.received.get(channel, 0) + 1
    clock.busy = busy
