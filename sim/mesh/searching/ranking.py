"""Results of a search: the ranking, the front of memory and time, and the confidence in the order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sim.mesh.searching.space import Candidate, Rejected

__all__ = ["Found", "SearchResult", "chance_faster", "pareto"]

_NINETY_PERCENT = 1.2815515655446004  # standard deviations: 80 % of a normal distribution lie within
_OWN_ERROR = 0.02  # assumed: relative error of a step that two candidates on the same hardware do not share


@dataclass(frozen=True)
class Found:
    """A candidate that fits.

    Attributes:
        candidate: the degrees and the recipe.
        estimate: of its memory and time.
        chance: probability that it is really faster than the next one in the ranking; None for the last.
    """

    candidate: Candidate
    estimate: Any
    chance: float | None = None

    @property
    def seconds(self) -> float:
        """Of a step."""
        return float(self.estimate.time.step.value)

    @property
    def bytes(self) -> float:
        """Of memory, on the fullest rank."""
        return float(self.estimate.memory.reserved)

    @property
    def tokens_per_second(self) -> float:
        """Of each device."""
        return float(self.estimate.time.tokens_per_second_per_device.value)


@dataclass(frozen=True)
class SearchResult:
    """The ranking, and what is not in it.

    Attributes:
        found: what fits, the fastest first.
        too_large: what was estimated and does not fit, the smallest first.
        rejected: what was not estimated because it cannot work or cannot fit, with the reason.
        left_out: what could have been estimated, and was not: the most promising first.
        limit_bytes: of memory.
        complete: False where the search was interrupted.
        title: what was searched.
    """

    found: tuple[Found, ...]
    too_large: tuple[Found, ...]
    rejected: tuple[Rejected, ...]
    left_out: tuple[Candidate, ...]
    limit_bytes: float
    complete: bool
    title: str

    @property
    def best(self) -> Found:
        """The fastest that fits."""
        return self.found[0]

    @property
    def pareto(self) -> tuple[Found, ...]:
        """What is beaten by no other one in both memory and time, the smallest first."""
        return pareto([*self.found, *self.too_large])

    @property
    def reasons(self) -> dict[str, int]:
        """How many were rejected for which reason, the most frequent first."""
        counts = Counter(entry.reason for entry in self.rejected)
        counts.update({"does not fit": len(self.too_large)} if self.too_large else {})
        return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))

    def __str__(self) -> str:
        from sim.mesh.searching.search_report import search_text

        return search_text(self)


def pareto(found: Sequence[Found]) -> tuple[Found, ...]:
    """Return what no other one beats in both memory and time, the smallest first.

    Args:
        found: with estimates.
    """
    front: list[Found] = []
    for entry in sorted(found, key=lambda one: (one.bytes, one.seconds)):
        if not front or entry.seconds < front[-1].seconds:
            front.append(entry)
    return tuple(front)


def chance_faster(first: Any, second: Any) -> float:
    """Return the probability that a step of the first estimate is really shorter than one of the second.

    What makes one estimate wrong mostly makes the other one wrong, too: matrix products that are slower than thought
    slow down both. So each term (compute, the communication of an axis, the bubble ...) counts by how much of it the
    two do not share; what is left is taken as independent.

    Args:
        first: an estimate.
        second: another one, on the same hardware.
    """
    ours, theirs = _terms(first.time), _terms(second.time)
    variance = 0.0
    for name in sorted({*ours, *theirs}):
        (value, spread), (other, other_spread) = ours.get(name, (0.0, 0.0)), theirs.get(name, (0.0, 0.0))
        variance += ((value - other) * max(spread, other_spread)) ** 2
    steps = float(first.time.step.value), float(second.time.step.value)
    variance += sum((_OWN_ERROR * step) ** 2 for step in steps)
    return 0.5 * (1 + math.erf((steps[1] - steps[0]) / math.sqrt(2 * variance)))


def _terms(time: Any) -> dict[str, tuple[float, float]]:
    """Value and relative standard deviation of what a step consists of."""
    named = {name: getattr(time, name) for name in ("compute", "bubble", "host")}
    named.update({f"exposed {axis}": quantity for axis, quantity in time.exposed.items()})
    return {
        name: (q.value, (q.high - q.low) / 2 / _NINETY_PERCENT / q.value) for name, q in named.items() if q.value > 0
    }
