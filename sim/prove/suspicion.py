"""What the checks for the usual faults share: the finding, and comparisons of parts with pieces of the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import combinations

import numpy as np
import numpy.typing as npt
import torch

from hyper_parallel.core.dtensor.shards import Splits, all_slices
from sim.prove.candidates import free_axes
from sim.prove.evidence import Evidence, Pending
from sim.prove.gaps import gap

__all__ = ["Case", "Diagnosis", "coordinates", "named_ranks", "quoted", "sums"]


@dataclass(frozen=True)
class Diagnosis:
    """A usual fault that fits what was seen.

    Args:
        kind: "not_finite", "scaled", "same_values", "reordered", "some_ranks", "blocks", "added", "copies_differ",
            "coarse", "permuted", "pieces", "gathered", "padded" or "shapes".
        sentence: what happened, for a person.
        axis: the axis to blame, if it is one.
        factor: by what the parts, or how often an addend, is too large.
        ranks: the ranks to blame, if they are not all.
        order: per coordinate along the axis, whose part (of a gathered tensor: piece) is held there.
    """

    kind: str
    sentence: str
    axis: str | None = None
    factor: Fraction | None = None
    ranks: tuple[int, ...] = ()
    order: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True, eq=False)
class Case:
    """Evidence, looked at under one way to split the whole tensor, after some sums are taken."""

    evidence: Evidence
    splits: Splits
    pending: Pending = ()

    @cached_property
    def boxes(self) -> npt.NDArray[np.int64]:
        """Start and stop of every dim at every mesh position."""
        return all_slices(self.evidence.whole.shape, self.evidence.sizes, self.splits)

    @cached_property
    def groups(self) -> list[list[int]]:
        """Mesh positions, one row per sum."""
        return self.evidence.groups(self.pending).tolist()

    def part(self, group: Sequence[int]) -> torch.Tensor:
        """What the ranks of a group hold, summed."""
        return self.evidence.reduced(group, self.pending)

    def want(self, position: int) -> torch.Tensor:
        """What a mesh position should hold."""
        return self.evidence.whole[self.evidence.box(self.boxes, position)]

    def close(self, part: torch.Tensor, want: torch.Tensor, position: int, slack: float = 1.0) -> bool:
        """Whether two tensors that belong to a mesh position agree within `slack` times the bound."""
        limit = self.evidence.limit(self.pending)
        limit = limit[self.evidence.box(self.boxes, position)] if isinstance(limit, torch.Tensor) else limit
        if part.numel() > 4096:  # a few elements tell most differences
            some = tuple(slice(0, 2) for _ in part.shape)
            few = limit[some] if isinstance(limit, torch.Tensor) else limit
            if bool((gap(part[some], want[some]) > few * slack).any()):
                return False
        return bool((gap(part, want) <= limit * slack).all())

    def fits(self, position: int) -> bool:
        """Whether a part is what its rank should hold."""
        return self.close(self.evidence.parts[position], self.want(position), position)

    @property
    def what(self) -> str:
        """The parts, or their sums, as the subject of a sentence."""
        if not self.pending:
            return "every part"
        return f"the sum of the parts over {quoted([self.evidence.names[axis] for axis, _ in self.pending])}"


def sums(evidence: Evidence, splits: Splits) -> Iterator[Case]:
    """Yield the parts as they are, then their sums over axes that split nothing."""
    yield Case(evidence, splits)
    free = free_axes(evidence, splits)
    if evidence.whole.dtype == torch.bool:
        return
    for count in range(1, len(free) + 1):
        for axes in combinations(free, count):
            yield Case(evidence, splits, tuple((axis, "sum") for axis in axes))


def coordinates(evidence: Evidence, position: int) -> tuple[int, ...]:
    """Where a mesh position lies along each axis."""
    return tuple(int(i) for i in np.unravel_index(position, evidence.sizes))


def named_ranks(evidence: Evidence, positions: Sequence[int]) -> str:
    """Name ranks, and where they lie if that is one place along an axis."""
    ranks = [evidence.ranks[position] for position in positions]
    words = (
        ("rank " if len(ranks) == 1 else "ranks ")
        + ", ".join(map(str, ranks[:8]))
        + (", ..." if len(ranks) > 8 else "")
    )
    for axis, size in enumerate(evidence.sizes):
        there = {coordinates(evidence, position)[axis] for position in positions}
        if size > 1 and len(there) == 1 and len(positions) == math.prod(evidence.sizes) // size:
            return f"{words} ({evidence.names[axis]}={min(there)})"
    return words


def quoted(names: Sequence[str], word: str = "and") -> str:
    """Join axis names for a sentence.

    >>> quoted(["dp", "tp"])
    "'dp' and 'tp'"
    """
    return f" {word} ".join(map(repr, names))
