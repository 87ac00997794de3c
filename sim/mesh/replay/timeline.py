"""Replay of a step's time: when everything runs on each rank of a pipeline, and what each rank waits for."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence

from hyper_parallel.core.common.errors import InvalidValue
from sim.mesh.program import Comm, Program
from sim.mesh.replay.draw import draw
from sim.mesh.replay.pieces import Channel, Prices
from sim.mesh.replay.player import Player, ReplayedStep
from sim.mesh.replay.spans import chrome_events


class Timeline(ReplayedStep):
    """A steady step of one rank, or of the ranks of a pipeline; see `ReplayedStep` for its attributes."""

    def to_chrome(self, path: str | os.PathLike[str]) -> None:
        """Write a file for https://ui.perfetto.dev or `chrome://tracing`, with the memory as counters."""
        chrome_events(self).write(path, "ms")

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the step with matplotlib (the extra `plot`), as `.png`, `.svg` or `.pdf`; the fullest memory below."""
        draw(self, path)


def replay_time(programs: Sequence[Program], prices: Prices, *, exact: bool = False) -> Timeline:
    """Replay two steps, and return the second one.

    Each segment is cut into pieces, which depend on the streams' state and on the messages of other ranks alone; a
    piece that has run in the same state before is not simulated again. States that differ by less than a nanosecond
    are the same; for pieces that are hardly ever in the same state twice the difference grows to 0.5 % of their length.

    A message is under way when it has been sent and its receiver is ready for it; it does not hold up its sender.

    Args:
        programs: of the ranks of a pipeline, in its order; or one.
        prices: of operations and communication. Of its attributes, `overlap_slowdown` says by how much computation
            is slower while communication runs beside it (default 1); groups share links with those that cross nodes as
            they do, or do not (`crosses_nodes`). On a CPU (`is_synchronous`), `work_seconds` of a communication are
            added to what is computed, instead.
        exact: whether every piece is simulated.

    Raises:
        ValueError: no program, an order without segments, or messages that ranks wait for and that are never sent.
    """
    if not programs or not all(program.order for program in programs):
        raise InvalidValue(
            "cannot replay a step",
            "programs: there is nothing to run",
            f"segments in their orders: {[len(program.order) for program in programs]}",
            "the programs that sim.mesh.trace records",
        )
    peers = frozenset([program.rank for program in programs]) if len(programs) > 1 else frozenset()
    _check_peers(programs)
    # A processor that does both has one queue: communication takes the same from what is computed, whenever that is.
    works = getattr(prices, "is_synchronous", False)
    slowdown = 1.0 if works else float(getattr(prices, "overlap_slowdown", 1.0))
    sent: defaultdict[Channel, list[float]] = defaultdict(list)
    players = [Player(row, program, prices, peers, exact, slowdown) for row, program in enumerate(programs)]
    while not all(player.is_over for player in players):
        went_on = [player.run(sent) for player in players]
        if not any(went_on):
            raise InvalidValue(*_stuck(players, sent))
    first = max([player.ends[0] for player in players])
    step = max([player.ends[1] for player in players]) - first
    begins = [one.base + one.outcome.ops[0].start for one in players[0].occurrences if one.outcome.ops]
    zero = begins[0] if begins else first
    return Timeline(
        step,
        [player.summary(step) for player in players],
        list(programs),
        [[one._replace(base=one.base - zero) for one in player.occurrences] for player in players],
        sum([player.simulated for player in players]),
        sum([len(player.flow) for player in players]),
    )


def _check_peers(programs: Sequence[Program]) -> None:
    """Stages must know each other by the ranks that their programs are of."""
    known = {program.rank for program in programs}
    for program in programs if len(programs) > 1 else ():
        for segment in program.segments.values():
            for event in segment.events:
                if isinstance(event, Comm) and event.op in ("send", "recv") and event.peer not in known:
                    if program.groups[event.group].axis != "pp":
                        continue  # within a stage, where all do the same
                    raise InvalidValue(
                        "cannot replay a pipeline",
                        f"rank {program.rank} has a {event.op} whose peer, rank {event.peer}, is in no program",
                        f"programs of ranks: {', '.join(map(str, sorted(known)))}",
                        "programs of ranks that differ in their place along 'pp' alone",
                    )


def _stuck(players: Sequence[Player], sent: Mapping[Channel, list[float]]) -> tuple[str, str, str, str]:
    lines = []
    for player in players:
        if player.is_over:
            continue
        _, batch, piece = player.flow[player.at]
        missing = player.missing(sent)
        assert missing is not None, "a rank that waits for nothing can go on"
        (axis, source, _), number = missing
        name, stage, _ = piece.key
        lines.append(
            f"rank {player.program.rank} in {name} of stage {stage}, micro-batch {batch}, waits for message {number} "
            f"of rank {source} on axis {axis!r}"
        )
    return (
        "cannot replay a pipeline",
        "its ranks wait for messages that are never sent, as the order of each stands",
        "\n  ".join(lines),
        "a schedule in which every message is sent before its receiver waits for it",
    )
