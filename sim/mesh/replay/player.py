"""One rank of a pipeline in the replay of time: it runs its pieces as far as the messages that it gets allow."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sim.mesh.memory import ClassMemory
from sim.mesh.program import Program
from sim.mesh.replay.pieces import BUBBLE, HOST, Channel, Piece, Posted, PriceBasis, Prices, cut_into_pieces
from sim.mesh.replay.relative import advance, relative_clock
from sim.mesh.replay.streams import Clock, PieceResult, simulate

_EXACT = 1e-9  # seconds: states of streams that differ by less are the same
_COARSER = ((24, 5e-4), (96, 5e-3))  # after so many different states of a piece: this part of its length


class Occurrence(NamedTuple):
    """A piece of a segment as it ran in the steady step.

    Attributes:
        row: number of the program.
        position: in its order.
        batch: the micro-batch; -1: none.
        piece: that ran.
        base: seconds from the beginning of the step; what `outcome` says is after it.
        outcome: what came of it.
    """

    row: int
    position: int
    batch: int
    piece: Piece
    base: float
    outcome: PieceResult


@dataclass(frozen=True)
class RankTime:
    """Where a rank's time goes in a step, in seconds: `compute`, `exposed`, `bubble` and `host` add up to the step.

    Attributes:
        rank: that stands for its class.
        like: ranks that are alike.
        compute: at least one stream computes.
        exposed: nothing computes, as it waits for communication on this axis.
        bubble: nothing computes, as other stages have not got there.
        host: nothing computes, as the host has not issued it.
        optimizer: of all that, in the segments of the optimizer.
        kinds: compute by kind of operation, streams added up.
        communication: seconds in which communication runs, by axis, hidden or not.
        evidence: what the prices of kinds and axes rest on.
    """

    rank: int
    like: int
    compute: float
    exposed: Mapping[str, float]
    bubble: float
    host: float
    optimizer: float
    kinds: Mapping[str, float]
    communication: Mapping[str, float]
    evidence: PriceBasis = field(default_factory=PriceBasis, repr=False, compare=False)


class Player:
    """One rank: what it has still to run, and the state of its streams."""

    def __init__(
        self, row: int, program: Program, prices: Prices, peers: frozenset[int], exact: bool, slowdown: float
    ) -> None:
        self.row = row
        self.program = program
        self.slowdown = slowdown
        self.exact = exact
        self.clock = Clock()
        self.at = 0
        self.ends: list[float] = []
        self.occurrences: list[Occurrence] = []
        self.simulated = 0
        self.is_piped = bool(peers)
        self._seen: dict[int, dict[object, PieceResult]] = defaultdict(dict)
        pieces = cut_into_pieces(program, prices, peers)
        step = [(at, batch, piece) for at, (key, batch) in enumerate(program.order) for piece in pieces[key]]
        self.flow: list[tuple[int, int, Piece]] = step + step

    @property
    def is_over(self) -> bool:
        """Whether both steps have run."""
        return self.at == len(self.flow)

    def run(self, sent: dict[Channel, list[float]]) -> bool:
        """Go on as far as the messages that have been sent allow; return whether that was anywhere."""
        before = self.at
        while not self.is_over:
            position, batch, piece = self.flow[self.at]
            if self.missing(sent) is not None:
                break
            base = self.clock.busy
            outcome = self._play(piece, batch, sent)
            for channel, at in outcome.sends:
                sent[channel].append(base + at)
            self.at += 1
            if self.at > len(self.flow) // 2:
                self.occurrences.append(Occurrence(self.row, position, batch, piece, base, outcome))
            if self.at in (len(self.flow) // 2, len(self.flow)):
                self.ends.append(max([self.clock.busy, *self.clock.tails.values()]))
        return self.at > before

    def missing(self, sent: Mapping[Channel, list[float]]) -> tuple[Channel, int] | None:
        """Return a message that the next piece waits for and that has not been sent: its channel and number."""
        _, batch, piece = self.flow[self.at]
        for channel, number in piece.awaits:
            number += self.clock.received.get(channel, 0)
            if len(sent.get(channel, ())) <= number:
                return channel, number
        for kind, number in piece.needs:
            found = self._done(number, batch) if kind == "handle" else None
            if isinstance(found, Posted) and len(sent.get(found.channel, ())) <= found.number:
                return found.channel, found.number
        return None

    def _done(self, handle: int, batch: int) -> Any:
        found = self.clock.done.get((handle, batch))
        return self.clock.done.get(handle) if found is None else found

    def _play(self, piece: Piece, batch: int, sent: Mapping[Channel, list[float]]) -> PieceResult:
        """Run a piece, or look up what came of it in this state, and move the clock on."""
        base = self.clock.busy
        seen = self._seen[id(piece)]
        unit = 0.0 if self.exact else _EXACT
        for states, part in _COARSER:
            if len(seen) >= states and not self.exact:
                unit = max(_EXACT, part * sum(piece.seconds.values()))
        start = relative_clock(self.clock, piece, batch, sent, self._done, unit)
        outcome = seen.get(start.key) if not self.exact else None
        if outcome is None:
            self.simulated += 1
            outcome = simulate(piece, start.clock, start.arrived, self.slowdown)
            outcome.entered = start.flights
            outcome.carried = [(flight.end, flight.fixed) for flight in start.flights]
            if not self.exact:
                seen[start.key] = outcome
        advance(self.clock, base, piece, batch, start, outcome)
        return outcome

    def summary(self, step: float) -> RankTime:
        """Add up the second step."""
        causes: defaultdict[str, float] = defaultdict(float)
        kinds: defaultdict[str, float] = defaultdict(float)
        moving: defaultdict[str, float] = defaultdict(float)
        compute = optimizer = 0.0
        evidence = PriceBasis()
        for one in self.occurrences:
            compute += one.outcome.compute
            idle = 0.0
            for gap in one.outcome.gaps:
                causes[gap.cause] += gap.end - gap.start
                idle += gap.end - gap.start
            if one.piece.key[0] == "optimizer":
                optimizer += idle + one.outcome.compute
            evidence.update(one.piece.evidence)
            for kind, seconds in one.piece.seconds.items():
                kinds[kind] += seconds
            for ran in one.outcome.comms:
                moving[self.program.groups[ran.lane].axis] += ran.end - ran.start
        bubble, host = causes.pop(BUBBLE, 0.0), causes.pop(HOST, 0.0)
        rest = max(0.0, step - compute - bubble - host - sum(causes.values()))
        if self.is_piped:
            bubble += rest
        else:
            host += rest
        return RankTime(
            self.program.rank,
            self.program.like,
            compute,
            dict(sorted(causes.items(), key=lambda item: -item[1])),
            bubble,
            host,
            optimizer,
            dict(sorted(kinds.items(), key=lambda item: -item[1])),
            dict(moving),
            evidence,
        )


@dataclass
class ReplayedStep:
    """A steady step of one rank, or of the ranks of a pipeline.

    Attributes:
        step: seconds from one step's end to the next one's.
        ranks: in the order of the programs.
        programs: that ran.
        occurrences: what ran when, by rank.
        simulated: pieces of segments that were simulated; the others were in a state seen before.
        played: pieces in all.
        memory: of each rank, to be drawn beside; none: only the time is.
        title: of pictures.
    """

    step: float
    ranks: list[RankTime]
    programs: list[Program] = field(repr=False)
    occurrences: list[list[Occurrence]] = field(repr=False)
    simulated: int = 0
    played: int = 0
    memory: Sequence[ClassMemory] = ()
    title: str = ""
    _moments: dict[tuple[int, int], tuple[list[int], list[float]]] = field(default_factory=dict, repr=False)

    @property
    def slowest(self) -> RankTime:
        """The rank that computes and waits for its own host and communication longest: the others wait for it."""
        return max(self.ranks, key=lambda rank: (self.step - rank.bubble, -rank.rank))

    def when(self, row: int, position: int, event: int) -> float:
        """Return the second of the step at which the device gets to an event.

        Args:
            row: number of the program.
            position: in its order; negative: the beginning of the step.
            event: its number in the segment.
        """
        if not self._moments:
            for occurrences in self.occurrences:
                for one in occurrences:
                    events, times = self._moments.setdefault((one.row, one.position), ([], []))
                    if not times:
                        events.append(-1)
                        times.append(one.base + (one.outcome.ops[0].start if one.outcome.ops else 0.0))
                    for ran in one.outcome.ops:
                        events.append(ran.event)
                        times.append(max(times[-1], one.base + ran.end))
        events, times = self._moments.get((row, position), ([], []))
        if not times:
            return 0.0
        return times[max(0, bisect_right(events, event) - 1)]
