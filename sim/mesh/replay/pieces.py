"""Segments priced, and cut into pieces that run without a look at other ranks."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from sim.mesh.program import Await, Comm, CommGroup, Event, EventRecord, HostWait, Op, Program, Wait
from sim.mesh.replay.flights import Channel

__all__ = [
    "AWAIT",
    "COMM",
    "HOST_WAIT",
    "ISSUE",
    "MARK",
    "OP",
    "RECV",
    "SEND",
    "WAIT",
    "PriceBasis",
    "Piece",
    "Prices",
    "cut_into_pieces",
]

OP, COMM, WAIT, MARK, AWAIT, HOST_WAIT, ISSUE, SEND, RECV = range(9)
"""Kinds of codes."""


class Prices(Protocol):
    """What a timeline asks of ``Pricing``."""

    def op(self, op: Op) -> Any:
        """Return something with the ``seconds`` of an operation."""

    def comm(self, comm: Comm, group: CommGroup, sharing: float = 1.0, *, rank: int | None = None) -> Any:
        """Return something with the ``seconds`` of a communication whose links are shared by so many."""

    def host_seconds(self, event: Event) -> float:
        """Return how long the host takes to issue an event."""


class PriceBasis:
    """What prices rest on: seconds by kind of operation, or axis of communication, and how sure they are.

    Attributes:
        seconds: by kind or axis, then evidence grade.
        spreads: by kind or axis: seconds times the relative standard deviation of each.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = {}
        self.spreads: dict[str, float] = {}

    def add(self, what: str, price: Any) -> None:
        """Count a price."""
        self._count(what, getattr(price, "grade", "assumed"), price.seconds)
        self.spreads[what] = self.spreads.get(what, 0.0) + price.seconds * getattr(price, "spread", 0.0)

    def update(self, other: PriceBasis) -> None:
        """Count what another one has counted."""
        for what, grades in other.seconds.items():
            for grade, seconds in grades.items():
                self._count(what, grade, seconds)
            self.spreads[what] = self.spreads.get(what, 0.0) + other.spreads[what]

    def _count(self, what: str, grade: str, seconds: float) -> None:
        grades = self.seconds.setdefault(what, {})
        grades[grade] = grades.get(grade, 0.0) + seconds

    def spread(self, what: str) -> float:
        """Return the mean relative standard deviation of the prices of a kind or axis, if all err together."""
        total = sum(self.seconds.get(what, {}).values())
        return self.spreads[what] / total if total else 0.0


class Piece(NamedTuple):
    """Consecutive events of a segment, priced; what they depend on is known before the first of them runs.

    Attributes:
        key: of the segment.
        last: whether it ends the segment.
        codes: of the events, see :func:`sim.mesh.replay.streams.simulate`.
        host: seconds that issuing them takes.
        total: seconds that all of them take one after the other.
        streams: that they use.
        lanes: groups that they communicate in.
        needs: handles and events that they wait for and that come from before.
        receives: channels of messages that they post, in order.
        awaits: messages that they post themselves and wait for: channel, and number among theirs on that channel.
        seconds: of computation, by kind of operation.
        evidence: of the prices.
        keeps: handles that they issue and something else may wait for.
        marks: events that they mark.
        halts: whether the host waits in them.
    """

    key: tuple[str, int, str]
    last: bool
    codes: list[tuple[Any, ...]]
    host: float
    total: float
    streams: tuple[int, ...]
    lanes: tuple[object, ...]
    needs: tuple[tuple[str, int], ...]
    receives: tuple[Channel, ...]
    awaits: tuple[tuple[Channel, int], ...]
    seconds: dict[str, float]
    evidence: PriceBasis
    keeps: frozenset[int]
    marks: frozenset[int]
    halts: bool


def cut_into_pieces(program: Program, key: tuple[str, int, str], prices: Prices, peers: frozenset[int]) -> list[Piece]:
    """Price a segment and cut it where it has sent something and then waits for a message.

    Args:
        program: that it belongs to.
        key: of the segment.
        prices: of its events.
        peers: global ranks whose programs are simulated too. Others are taken to do the same at the same time.
    """
    events = program.segments[key].events
    elsewhere = _waited_elsewhere(program, key)
    cuts, sent, posted = [0], False, set()
    for at, event in enumerate(events):
        if isinstance(event, Comm) and event.op == "send":
            sent = True
        elif isinstance(event, Comm) and event.op == "recv" and event.peer in peers:
            posted.add(event.handle)
        elif isinstance(event, Wait) and sent and (event.handle in posted or event.handle in elsewhere.arrives):
            cuts.append(at)
            sent = False
    cuts.append(len(events))
    return [_piece(program, key, start, end, prices, peers, elsewhere) for start, end in pairwise(cuts)]


class _Elsewhere(NamedTuple):
    """Handles of a program: those that are waited for in another segment than they are issued in; messages."""

    waited: frozenset[int]
    arrives: frozenset[int]


def _waited_elsewhere(program: Program, key: tuple[str, int, str]) -> _Elsewhere:
    issued = {event.handle for event in program.segments[key].events if isinstance(event, Comm)}
    arrives = {
        event.handle
        for other, segment in program.segments.items()
        if other != key
        for event in segment.events
        if isinstance(event, Comm) and event.op == "recv"
    }
    waited = {
        event.handle
        for segment in program.segments.values()
        for event in segment.events
        if isinstance(event, Wait) and event.handle in issued
    }
    return _Elsewhere(frozenset(waited), frozenset(arrives - issued))


def _piece(
    program: Program,
    key: tuple[str, int, str],
    start: int,
    end: int,
    prices: Prices,
    peers: frozenset[int],
    elsewhere: _Elsewhere,
) -> Piece:
    codes: list[tuple[Any, ...]] = []
    streams: dict[int, None] = {}
    lanes: dict[object, None] = {}
    needs: dict[tuple[str, int], None] = {}
    receives: list[Channel] = []
    issued: dict[int, tuple[Channel, int] | None] = {}
    marked: set[int] = set()
    awaits: list[tuple[Channel, int]] = []
    seconds: defaultdict[str, float] = defaultdict(float)
    evidence = PriceBasis()
    host = 0.0
    for at in range(start, end):
        event = program.segments[key].events[at]
        if isinstance(event, Op):
            cost, price = prices.host_seconds(event), prices.op(event)
            host += cost
            if event.kind == "host":
                codes.append((ISSUE, cost))
                continue
            evidence.add(event.kind, price)
            seconds[event.kind] += price.seconds
            streams[event.stream] = None
            codes.append((OP, event.stream, price.seconds, cost, at))
        elif isinstance(event, Comm):
            group = program.groups[event.group]
            cost, alone = prices.host_seconds(event), prices.comm(event, group, rank=program.rank)
            price = alone.seconds
            host += cost
            evidence.add(group.axis, alone)
            streams[event.stream] = None
            issued[event.handle] = None
            if event.op in ("send", "recv") and event.peer is not None:
                lane = (event.group, event.op, event.peer)
                if event.op == "recv" and event.peer in peers:
                    channel = (group.axis, event.peer, program.rank)
                    issued[event.handle] = (channel, receives.count(channel))
                    posted = (RECV, event.stream, channel, price, cost, event.handle, group.axis, event.group, at)
                    codes.append((*posted, getattr(prices, "posts_early", False)))
                    receives.append(channel)
                    continue
                channel = (group.axis, program.rank, event.peer)
                told = channel if event.op == "send" and event.peer in peers else None
                lanes[lane] = None
                codes.append((SEND, event.stream, lane, price, cost, event.handle, group.axis, told, at))
                continue
            lanes[event.group] = None
            shared = prices.comm(event, group, sharing=2.0, rank=program.rank).seconds
            link = _link(prices, group)
            rate = price / shared if shared > price else 1.0
            codes.append((COMM, event.stream, event.group, price, rate, cost, event.handle, group.axis, link, at))
        elif isinstance(event, Wait):
            streams[event.stream] = None
            if event.handle not in issued:
                needs["handle", event.handle] = None
            message = issued.get(event.handle)
            if message is not None:
                awaits.append(message)
            codes.append((WAIT, event.stream, event.handle))
        elif isinstance(event, EventRecord):
            streams[event.stream] = None
            marked.add(event.event)
            codes.append((MARK, event.stream, event.event))
        elif isinstance(event, Await):
            streams[event.stream] = None
            if event.event not in marked:
                needs["event", event.event] = None
            codes.append((AWAIT, event.stream, event.event))
        elif isinstance(event, HostWait):
            codes.append((HOST_WAIT, event.stream))
    return Piece(
        key,
        end == len(program.segments[key].events),
        codes,
        host,
        sum([sum(grades.values()) for grades in evidence.seconds.values()]),
        tuple(streams),
        tuple(lanes),
        tuple(needs),
        tuple(receives),
        tuple(awaits),
        dict(seconds),
        evidence,
        elsewhere.waited & issued.keys(),
        frozenset(marked),
        any(code[0] == HOST_WAIT for code in codes),
    )


def _link(prices: Prices, group: CommGroup) -> str:
    crosses = getattr(prices, "crosses_nodes", None)
    return "between nodes" if crosses is not None and crosses(group) else "within a node"
