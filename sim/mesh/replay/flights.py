"""Communication as other work sees it: when it runs, who waits for it, and how it shares links and devices."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BUBBLE", "HOST", "Blame", "Chain", "Channel", "Flight", "Posted", "arrive", "beside", "share"]

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
        before: why it did not begin earlier: its own axis (it was queued), ``HOST``, ``BUBBLE``.
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
    """A message that is waited for: when its receiver was ready, and which one of its channel it is."""

    at: float
    channel: Channel
    number: int
    seconds: float
    axis: str
    by_host: bool
    lane: int
    event: int

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
    """Seconds between start and end in which some communication runs."""
    spans = sorted([(max(f.start, start), min(f.end, end)) for f in flying if f.end > start and f.start < end])
    covered, until = 0.0, start
    for left, right in spans:
        if right > until:
            covered += right - max(left, until)
            until = right
    return covered
