"""Bounding memory: exchanges cut into rounds until their buffers fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hyper_parallel.core.dtensor.messages import explain
from hyper_parallel.core.redistribute.exchange import program
from hyper_parallel.core.redistribute.steps import Step

_MANY_RANKS = 64  # beyond, what a round takes is estimated, not counted rank by rank


def bounded(ways: Sequence[list[Step]], limit: int, seen: str) -> list[list[Step]]:
    """Return the ways that stay within a limit, their exchanges cut into as many rounds as that takes.

    Args:
        ways: the ways to choose from.
        limit: the most bytes that a rank may hold besides its part of source and result.
        seen: the line of the error message that shows what was asked.

    Raises:
        ValueError: none does, with the least limit that one meets.
    """
    found, least = [], None
    for steps in ways:
        fitted = [_fit(step, limit - _kept(steps, index)) for index, step in enumerate(steps)]
        needs = [need for need, _ in fitted]
        if all(step is not None for _, step in fitted):
            found.append([step for _, step in fitted if step is not None])
        else:
            need = max(need + _kept(steps, index) for index, need in enumerate(needs))
            least = need if least is None else min(least, need)
    if not found:
        asked = f"cannot redistribute within max_extra_bytes={limit}"
        blame = "even in the smallest pieces, every plan takes more"
        raise ValueError(explain(asked, blame, seen, f"max_extra_bytes={least}"))
    return found


def _kept(steps: Sequence[Step], index: int) -> int:
    """Return the bytes of what lies between two steps and is neither source nor result."""
    step = steps[index]
    before = int(step.before.holding.counts().max(initial=0)) if index > 0 else 0
    after = int(step.after.holding.counts().max(initial=0)) if index < len(steps) - 1 else 0
    return (before + after) * step.itemsize


def _fit(step: Step, room: int) -> tuple[int, Step | None]:
    """Return the least room a step takes, and the step in rounds that fit, or None."""
    if step.peak_extra_bytes <= max(room, 0) or not step.communicates or step.kind == "all_reduce":
        return step.peak_extra_bytes, step if step.peak_extra_bytes <= max(room, 0) else None
    most = max(1, int(step.after.holding.counts().max(initial=1)))
    rounds, need = 1, step.peak_extra_bytes
    while rounds < most:
        rounds = min(most, max(rounds + 1, rounds * need // max(room, 1)) if room > 0 else most)
        need = _peak(step, rounds)
        if need <= room:
            exact = replace(step, rounds=rounds, peak_extra_bytes=need)
            return need, replace(exact, seconds=step.seconds * _slower(step, rounds))
    return need, None


def _slower(step: Step, rounds: int) -> float:
    """Return how many times longer a step takes in rounds: a guess, between nothing and its latency each time."""
    del step
    return 1.0 + 0.05 * (rounds - 1)


def _peak(step: Step, rounds: int) -> int:
    """Return the most bytes of buffers that a rank needs in any round."""
    if len(step.ranks) > _MANY_RANKS:
        return -(-step.peak_extra_bytes // rounds)
    cut, peak = replace(step, rounds=rounds), 0
    for rank in step.ranks:
        for index in range(rounds):
            work = program(cut, rank, index)
            moved = sum(piece.volume for piece in (*work.sends, *work.receives))
            own = sum(piece.volume for piece in work.own) if step.reduces else 0
            stack = work.copies * max((p.volume for p in (*work.receives, *work.own)), default=0) if step.reduces else 0
            peak = max(peak, (moved + max(own, stack)) * step.itemsize)
    return peak
