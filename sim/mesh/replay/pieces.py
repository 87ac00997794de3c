"""Pieces of segments, and the flights of messages between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from sim.mesh.program import (
    HOST_COPIES,
    Alloc,
    Await,
    Comm,
    CommGroup,
    Event,
    EventRecord,
    Free,
    HostWait,
    Op,
    Place,
    Program,
    Wait,
)

# Communication as other work sees it: when it runs, who waits for it, and how it shares links and devices -------------

_TO_HOST = frozenset(HOST_COPIES.values())
"""What stands for the axis of copies between host and device; a device's engines for them take none of its cores."""
BUBBLE = "bubble"
"""Cause of a gap: the rank that sends has not got there yet."""
HOST = "host"
"""Cause of a gap: the host has not issued the next operation yet."""

Channel = tuple[str, int, int]
"""Of messages: axis, and the global ranks that send and receive. They arrive in the order in which they were sent."""


class Blame(NamedTuple):
    """A communication that something waits for, or has waited for.

    Attributes:
        start: when it began.
        end: when it was over.
        axis: of its group.
        before: why it did not begin earlier: its own axis (it was queued), `HOST`, `BUBBLE`.
    """

    start: float
    end: float
    axis: str
    before: str

    def moved(self, by: float) -> Blame:
        """Return it as seen from another zero."""
        return Blame(self.start + by, self.end + by, self.axis, self.before)


class Flight:
    """A communication as later ones see it; its end can still move while nobody has waited for it."""

    __slots__ = ("chain", "end", "fixed", "lane", "link", "rate", "ready", "start")

    def __init__(self, start: float, end: float, chain: tuple[Blame, ...], lane: int, link: str, rate: float) -> None:
        self.start = start
        self.end = end
        self.chain = chain  # of the stream that issued it, and its own
        self.lane = lane
        self.link = link
        self.rate = rate  # of its progress beside another one
        self.fixed = False

    def moved(self, by: float) -> Flight:
        """Return it as seen from another zero."""
        flight = Flight(
            self.start + by, self.end + by, tuple([b.moved(by) for b in self.chain]), self.lane, self.link, self.rate
        )
        flight.fixed = self.fixed
        return flight

    def key(self) -> tuple[object, ...]:
        """Return all of it as a value."""
        return (self.start, self.end, self.chain, self.lane, self.link, self.rate, self.fixed)


class Posted(NamedTuple):
    """A message that is waited for: when its receiver was ready, which one of its channel it is, and its `WORK`."""

    at: float
    channel: Channel
    number: int
    seconds: float
    axis: str
    by_host: bool
    lane: int
    event: int
    work: float = 0.0

    def moved(self, by: float, numbers: int = 0) -> Posted:
        """Return it as seen from another zero, and counted from another number."""
        return self._replace(at=self.at + by, number=self.number + numbers)


Chain = tuple[Blame, ...]
"""What something waits for, in the order of the waits."""


def arrive(posted: Posted, arrived: dict[tuple[Channel, int], float]) -> Flight:
    """The message is under way once it has been sent and its receiver is ready."""
    sent = arrived[posted.channel, posted.number]
    start = max(sent, posted.at)
    before = BUBBLE if sent > posted.at else HOST if posted.by_host else posted.axis
    end = start + posted.seconds
    return Flight(start, end, (Blame(start, end, posted.axis, before),), posted.lane, "", 1.0)


def share(flight: Flight, seconds: float, flying: list[Flight], queues: dict[object, float]) -> None:
    """Slow down communication of different groups while they share links.

    Both sides go on at the rate that they have beside another one; with more than two, the new one is slowed by each.
    What somebody already waits for, or what has others queued behind it, is no longer moved. So a communication takes
    at least as long as alone, and at most as long as if all that it overlaps with came first.
    """
    if flight.rate == 1.0 and all(other.rate == 1.0 for other in flying):
        return
    beside = sorted(
        [o for o in flying if o.link == flight.link and o.lane != flight.lane and o.end > flight.start],
        key=lambda other: other.start,
    )
    end = flight.start + seconds
    for other in beside:
        both = min(other.end, end) - max(other.start, flight.start)
        if both <= 0:
            continue
        end += both * (1 - flight.rate)
        if not other.fixed and queues.get(other.lane) == other.end:
            other.end += both * (1 - other.rate)
            queues[other.lane] = other.end
    flight.end = end


def beside(flying: list[Flight], start: float, end: float) -> float:
    """Seconds between start and end in which some communication runs, other than copies to the host and from it."""
    near = [flight for flight in flying if flight.end > start and flight.start < end and flight.link not in _TO_HOST]
    if not near:
        return 0.0
    if len(near) == 1:
        return min(near[0].end, end) - max(near[0].start, start)
    spans = sorted([(max(flight.start, start), min(flight.end, end)) for flight in near])
    covered, until = 0.0, start
    for left, right in spans:
        if right > until:
            covered += right - max(left, until)
            until = right
    return covered


# Segments priced, and cut into pieces that run without a look at other ranks ------------------------------------------

OP, COMM, WAIT, MARK, AWAIT, HOST_WAIT, ISSUE, SEND, RECV, WORK = range(10)
"""Kinds of codes. `WORK` is what a communication takes of the processor that computes, where they share one."""


class Prices(Protocol):
    """What a timeline asks of `Pricing`."""

    def op(self, op: Op) -> Any:
        """Return something with the `seconds` of an operation."""

    def comm(self, comm: Comm, group: CommGroup, sharing: float = 1.0, *, rank: int | None = None) -> Any:
        """Return something with the `seconds` of a communication whose links are shared by so many."""

    def host_seconds(self, event: Event, place: Place | None = None) -> float:
        """Return how long the host takes to issue an event of a place."""


class PriceBasis:
    """What prices rest on: seconds by kind of operation, or axis of communication, and how sure they are.

    Attributes:
        seconds: by kind or axis, then evidence grade.
        spreads: by kind or axis: seconds times the relative standard deviation of each.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = {}
        self.spreads: dict[str, float] = {}

    def add(self, what: str, price: Any, times: int = 1) -> None:
        """Count a price, once or several times."""
        seconds = price.seconds * times
        self._count(what, getattr(price, "grade", "assumed"), seconds)
        self.spreads[what] = self.spreads.get(what, 0.0) + seconds * getattr(price, "spread", 0.0)

    def update(self, other: PriceBasis) -> None:
        """Count what another one has counted."""
        for what, grades in other.seconds.items():
            for grade, seconds in grades.items():
                self._count(what, grade, seconds)
            self.spreads[what] = self.spreads.get(what, 0.0) + other.spreads[what]

    def _count(self, what: str, grade: str, seconds: float) -> None:
        grades = self.seconds.setdefault(what, {})
        grades[grade] = grades.get(grade, 0.0) + seconds


class Piece(NamedTuple):
    """Consecutive events of a segment, priced; what they depend on is known before the first of them runs.

    Attributes:
        key: of the segment.
        last: whether it ends the segment.
        codes: of the events, see `sim.mesh.replay.streams.simulate`.
        host: seconds that issuing them takes, and their `WORK`.
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


def cut_into_pieces(program: Program, prices: Prices, peers: frozenset[int]) -> dict[tuple[str, int, str], list[Piece]]:
    """Price the segments of a program and cut each where it has sent something and then waits for a message.

    Args:
        program: of one rank.
        prices: of its events.
        peers: global ranks whose programs are simulated too. Others are taken to do the same at the same time.
    """
    waits, received = set[int](), set[int]()
    for segment in program.segments.values():
        for event in segment.events:
            if type(event) is Wait:  # there are very many events: `isinstance` takes three times as long
                waits.add(event.handle)
            elif type(event) is Comm and event.op == "recv":
                received.add(event.handle)
    waited = frozenset(waits)
    made = {}
    for key in {key for key, _ in program.order}:
        cuts = [0, *_cuts(program.segments[key].events, received, peers), len(program.segments[key].events)]
        made[key] = [_piece(program, key, start, end, prices, peers, waited) for start, end in pairwise(cuts)]
    return made


def _cuts(events: Sequence[Event], received: set[int], peers: frozenset[int]) -> Iterator[int]:
    """Yield where a segment waits for a message, its own or another segment's, after it has sent something."""
    if not received:
        return
    issued = {event.handle for event in events if isinstance(event, Comm)}
    sent, arrives = False, received - issued
    for at, event in enumerate(events):
        if isinstance(event, Comm) and event.op == "send":
            sent = True
        elif isinstance(event, Comm) and event.op == "recv" and event.peer in peers:
            arrives.add(event.handle)
        elif isinstance(event, Wait) and sent and event.handle in arrives:
            yield at
            sent = False


def _piece(
    program: Program,
    key: tuple[str, int, str],
    start: int,
    end: int,
    prices: Prices,
    peers: frozenset[int],
    waited: frozenset[int],
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
    counts: dict[tuple[str, int], tuple[Any, int]] = {}
    host = 0.0
    synchronous = getattr(prices, "is_synchronous", False)
    work_seconds = getattr(prices, "work_seconds", None)
    for at, event in enumerate(program.segments[key].events[start:end], start):
        if type(event) is Alloc or type(event) is Free:  # most are
            continue
        if isinstance(event, Op):
            kind, stream = event.kind, event.stream
            place = program.places[event.place] if event.place < len(program.places) else None
            cost, price = prices.host_seconds(event, place), prices.op(event)
            taken = price.seconds
            host += cost
            if kind in ("host", "on_host"):
                if kind == "on_host":
                    evidence.add(kind, price)
                host += taken
                codes.append((ISSUE, cost + taken))
                continue
            same = (kind, id(price))  # prices are shared by operations of one size
            counted = counts.get(same)
            counts[same] = (price, 1) if counted is None else (price, counted[1] + 1)
            streams[stream] = None
            codes.append((OP, stream, taken, cost, at))
            if synchronous:
                codes.append((HOST_WAIT, stream))
        elif isinstance(event, Comm):
            group = program.groups[event.group]
            cost, alone = prices.host_seconds(event), prices.comm(event, group, rank=program.rank)
            price = alone.seconds
            work = work_seconds(event, group) if work_seconds is not None else 0.0
            host += cost + work
            evidence.add(group.axis, alone)
            streams[event.stream] = None
            issued[event.handle] = None
            if event.op in ("send", "recv") and event.peer is not None:
                lane = (event.group, event.op, event.peer)
                if event.op == "recv" and event.peer in peers:
                    channel = (group.axis, event.peer, program.rank)
                    issued[event.handle] = (channel, receives.count(channel))
                    posted = (RECV, event.stream, channel, price, cost, event.handle, group.axis, event.group, at)
                    codes.append((*posted, getattr(prices, "posts_early", False), work))
                    receives.append(channel)
                    continue
                channel = (group.axis, program.rank, event.peer)
                to = channel if event.op == "send" and event.peer in peers else None
                lanes[lane] = None
                codes.append((SEND, event.stream, lane, price, cost, event.handle, group.axis, to, at))
                if work:
                    codes.append((WORK, work, group.axis))
                continue
            lanes[event.group] = None
            shared = prices.comm(event, group, sharing=2.0, rank=program.rank).seconds
            link = _link(prices, group)
            rate = price / shared if shared > price else 1.0
            codes.append((COMM, event.stream, event.group, price, rate, cost, event.handle, group.axis, link, at))
            if work:
                codes.append((WORK, work, group.axis))
        elif isinstance(event, Wait):
            streams[event.stream] = None
            if event.handle not in issued:
                needs["handle", event.handle] = None
            message = issued.get(event.handle)
            if message is not None:
                awaits.append(message)
            codes.append((WAIT, event.stream, event.handle))
            if synchronous:
                codes.append((HOST_WAIT, event.stream))
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
    for (kind, _), (price, times) in counts.items():
        evidence.add(kind, price, times)
        seconds[kind] += price.seconds * times
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
        waited & issued.keys(),
        frozenset(marked),
        any(code[0] == HOST_WAIT for code in codes),
    )


def _link(prices: Prices, group: CommGroup) -> str:
    if group.axis in _TO_HOST:
        return group.axis
    crosses = getattr(prices, "crosses_nodes", None)
    return "between nodes" if crosses is not None and crosses(group) else "within a node"
