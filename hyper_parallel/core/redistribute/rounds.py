"""Bounding memory: exchanges cut into rounds until their buffers fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hyper_parallel.core.dtensor.messages import explain
from hyper_parallel.core.redistribute import cost
from hyper_parallel.core.redistribute.cost import Topology
from hyper_parallel.core.redistribute.counting import extent
from hyper_parallel.core.redistribute.steps import Step, price, with_kept


class TooTight(ValueError):
    """A limit of memory that no plan meets.

    Attributes:
        least: the smallest one that some plan meets, in bytes.
    """

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message)
        self.least = least


def cheapest_within(limit: int, ways: Sequence[Sequence[Step]], on: Topology, seen: str) -> list[Step]:
    """Return the cheapest way that stays within a limit, its exchanges cut into as many rounds as that takes.

    Args:
        limit: the most bytes that a rank may hold besides its part of source and result.
        ways: the ways to choose from.
        on: the topology.
        seen: the line of the error message that shows what was asked.

    Raises:
        ValueError: none does, with the least limit that one meets.
    """
    best: list[Step] | None = None
    least = []
    for steps in sorted(ways, key=lambda way: price(way, on)):
        if best is not None and price(best, on) <= price(steps, on):  # rounds make no way cheaper
            break
        fitted = [_fit(step, limit, on) for step in with_kept(steps)]
        most = max((step.peak_extra_bytes for step in fitted), default=0)
        least.append(most)
        if most <= limit and (best is None or price(fitted, on) < price(best, on)):
            best = fitted
    if best is None:
        asked = f"cannot redistribute within max_extra_bytes={limit}"
        blame = "even in the smallest pieces, every plan takes more"
        raise TooTight(explain(asked, blame, seen, f"max_extra_bytes={min(least)}"), min(least))
    return best


def _fit(step: Step, limit: int, on: Topology) -> Step:
    """Return the step in as few rounds as keep it within a limit, or that which takes the least if none do."""
    if step.peak_extra_bytes <= limit or not step.communicates or step.kind == "all_reduce":
        return step
    held = step.after.holding
    most = max(int(extent(held, dim).max(initial=1)) for dim in range(len(held.shape)))  # then each piece is one row
    finest = _cut(step, most, on)
    if finest.peak_extra_bytes > limit:
        return min(step, finest, key=lambda cut: cut.peak_extra_bytes)
    received = int(step.recv_bytes.max(initial=0))
    for rounds in _numbers(most):
        if rounds * limit >= received:
            cut = _cut(step, rounds, on)
            if cut.peak_extra_bytes <= limit:
                return cut
    return finest


def _cut(step: Step, rounds: int, on: Topology) -> Step:
    """Return the step in rounds, each of which takes its latency; together they move the same bytes.

    Rounds are exchanges, which pack what they send, and cross nodes from rank to rank: no ring does that for them.
    """
    load = step.load
    assert load is not None, "only what communicates is cut"
    load = load._replace(copied=max(load.copied, int(step.recv_bytes.max()) + step.sent_most))
    once = max(step.seconds, cost.seconds("all_to_all", load, on))
    return replace(step, rounds=rounds, seconds=once + (rounds - 1) * cost.latency(load, on))


def _numbers(most: int) -> Iterator[int]:
    """Yield numbers of rounds to try.

    >>> list(_numbers(30))
    [2, 3, 4, 6, 8, 12, 16, 24]
    """
    rounds = 2
    while rounds < most:
        yield rounds
        rounds = rounds * 3 // 2 if rounds & (rounds - 1) == 0 else rounds * 4 // 3
