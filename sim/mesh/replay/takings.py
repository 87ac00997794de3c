"""A program reduced to what it takes and gives back of memory, and the part of its order that repeats itself."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from hyper_parallel.core.common.errors import explain
from sim.mesh.program import Alloc, Free, Program

__all__ = ["MemoryPlan", "Pattern", "Taking", "find_pattern"]


class Taking(NamedTuple):
    """A block taken (``size`` bytes) or given back (-1) by a segment; one per micro-batch or one in all."""

    block: int
    size: int
    stream: int
    each: bool
    event: int


class MemoryPlan:
    """A program reduced to what concerns memory."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.stride = 1
        events = {
            key: [(at, event) for at, event in enumerate(segment.events) if isinstance(event, Alloc | Free)]
            for key, segment in program.segments.items()
        }
        for found in events.values():
            self.stride = max([self.stride, *(event.block + 1 for _, event in found)])
        once = self._once(events)
        empty = {
            event.block
            for found in events.values()
            for _, event in found
            if isinstance(event, Alloc) and not event.bytes
        }
        self.memory: dict[tuple[str, int, str], list[Taking]] = {}
        for key, found in events.items():
            self.memory[key] = [
                Taking(event.block, event.bytes, event.stream, event.block not in once, at)
                if isinstance(event, Alloc)
                else Taking(event.block, -1, 0, event.block not in once, at)
                for at, event in found
                if event.block not in empty
            ]
        for key, _ in program.order:
            if key not in self.memory:
                known = ", ".join(map(str, sorted(self.memory)))
                raise ValueError(
                    explain(
                        f"cannot replay the memory of rank {program.rank}",
                        f"its order names the segment {key}, which it does not have",
                        f"segments: {known}",
                        "a program whose segments are all there",
                    )
                )

    def _once(self, events: dict[tuple[str, int, str], list[tuple[int, Alloc | Free]]]) -> set[int]:
        """Blocks of which there is one, rather than one for each micro-batch.

        A block is per micro-batch if some micro-batch runs both a segment that takes it and one that gives it back.
        """
        batches: defaultdict[tuple[str, int, str], set[int]] = defaultdict(set)
        for key, batch in self.program.order:
            batches[key].add(batch)
        taken: defaultdict[int, set[int]] = defaultdict(set)
        given: defaultdict[int, set[int]] = defaultdict(set)
        for key, found in events.items():
            for _, event in found:
                (taken if isinstance(event, Alloc) else given)[event.block] |= batches[key] or {-1}
        return {block for block, by in taken.items() if -1 in by or -1 in given[block] or not by & given[block]}

    def count(self, start: int, end: int) -> int:
        """Return how many blocks are taken or given back between two positions of the order."""
        return sum(len(self.memory[key]) for key, _ in self.program.order[start:end])


class Pattern(NamedTuple):
    """The longest part of an order that repeats itself: the same segments, each time for later micro-batches.

    Attributes:
        start: first position.
        end: behind the last one.
        length: positions from one repetition to the next.
        shift: micro-batches from one repetition to the next.
    """

    start: int
    end: int
    length: int
    shift: int

    def starts(self, position: int) -> bool:
        """Whether a repetition starts here."""
        return self.start <= position < self.end and (position - self.start) % self.length == 0


def find_pattern(order: list[tuple[tuple[str, int, str], int]], longest: int = 256) -> Pattern | None:
    """Return the part of an order that repeats itself most; None where nothing does so at least three times.

    >>> forward, backward = ("forward", 0, "steady"), ("backward", 0, "steady")
    >>> find_pattern([(forward, 0), *[one for i in range(9) for one in ((forward, i + 1), (backward, i))]])
    Pattern(start=1, end=19, length=2, shift=1)
    """
    numbers: dict[tuple[str, int, str], int] = {}
    keys = np.array([numbers.setdefault(key, len(numbers)) for key, _ in order])
    batches = np.array([batch for _, batch in order])
    best: Pattern | None = None
    for length in range(1, min(longest, len(order) // 3) + 1):
        moved = batches[length:] - batches[:-length]
        same = (keys[length:] == keys[:-length]) & (batches[:-length] >= 0) & (batches[length:] >= 0) & (moved > 0)
        label = np.where(same, moved, 0)
        starts = np.concatenate([[0], np.flatnonzero(np.diff(label)) + 1])
        ends = np.append(starts[1:], len(label))
        for at in np.flatnonzero((label[starts] > 0) & (ends - starts >= 2 * length)).tolist():
            start, repeats = int(starts[at]), int(ends[at] - starts[at]) // length + 1
            pattern = Pattern(start, start + repeats * length, length, int(label[start]))
            if best is None or pattern.end - pattern.start - 2 * length > best.end - best.start - 2 * best.length:
                best = pattern
    return best
