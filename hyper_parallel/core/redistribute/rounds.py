"""Bounding memory: exchanges cut into rounds until their buffers fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hyper_parallel.core.dtensor.messages import explain
from hyper_parallel.core.redistribute.steps import Step, with_kept


def bounded(ways: Sequence[Sequence[Step]], limit: int, seen: str) -> list[list[Step]]:
    """Return the ways that stay within a limit, their exchanges cut into as many rounds as that takes.

    Args:
        ways: the ways to choose from.
        limit: the most bytes that a rank may hold besides its part of source and result.
        seen: the line of the error message that shows what was asked.

    Raises:
        ValueError: none does, with the least limit that one meets.
    """
    found, least = [], []
    for steps in ways:
        fitted = [_fit(step, limit) for step in with_kept(steps)]
        if all(step.peak_extra_bytes <= limit for step in fitted):
            found.append(fitted)
        else:
            least.append(max(step.peak_extra_bytes for step in fitted))
    if not found:
        asked = f"cannot redistribute within max_extra_bytes={limit}"
        blame = "even in the smallest pieces, every plan takes more"
        raise ValueError(explain(asked, blame, seen, f"max_extra_bytes={min(least)}"))
    return found


def _fit(step: Step, limit: int) -> Step:
    """Return the step in as few rounds as keep it within a limit, or that which takes the least if none do."""
    if step.peak_extra_bytes <= limit or not step.communicates or step.kind == "all_reduce":
        return step
    best = step
    for rounds in _numbers(int(step.after.holding.counts().max(initial=1))):
        cut = replace(step, rounds=rounds, seconds=step.seconds + (rounds - 1) * step.latency)
        if cut.peak_extra_bytes < best.peak_extra_bytes:
            best = cut
            if cut.peak_extra_bytes <= limit:
                break
    return best


def _numbers(most: int) -> Iterator[int]:
    """Yield numbers of rounds, up to one per element.

    >>> list(_numbers(30))
    [2, 3, 4, 6, 8, 12, 16, 24, 30]
    """
    rounds = 2
    while rounds < most:
        yield rounds
        rounds += max(1, rounds // 2 if rounds & (rounds - 1) == 0 else rounds // 3)
    if most > 1:
        yield most
