"""The steps that a plan is made of: data, which can be printed, priced and compared without moving a byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from hyper_parallel.core.redistribute.cost import Load, Topology
from hyper_parallel.core.redistribute.counting import Counts
from hyper_parallel.core.redistribute.holdings import Holding, Part

Kind = Literal["slice", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute", "copy"]
COLLECTIVES = frozenset({"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"})

_MANY_PAIRS = 2**17  # of a rank with a member of its group


@dataclass(frozen=True)
class Located:
    """A holding on a mesh of certain ranks.

    Attributes:
        holding: who holds what, by position on the mesh.
        ranks: the rank at each position, last axis fastest.
    """

    holding: Holding
    ranks: range | tuple[int, ...]

    def part_of(self, rank: int) -> Part | None:
        """Return what a rank holds; None for a rank that is not on the mesh."""
        coordinates = self.coordinates(rank)
        return None if coordinates is None else self.holding.part(coordinates)

    def coordinates(self, rank: int) -> tuple[int, ...] | None:
        """Return where a rank sits on the mesh, or None."""
        if rank not in self.ranks:
            return None
        position, found = self.ranks.index(rank), []
        for size in reversed(self.holding.sizes):
            position, index = divmod(position, size)
            found.append(index)
        return tuple(reversed(found))


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a plan.

    Attributes:
        kind: "slice" and "copy" move nothing between ranks; a "permute" is an all_to_all in which no rank sends to, or
            receives from, more than one other.
        axes: names of the axes it runs over, in mesh order; () for a local step; between two meshes, of both.
        group_size: ranks that take part in it together.
        recv_bytes: what each rank receives, in the order of the plan's ranks.
        seconds: its time on the plan's topology.
        load: what that is modelled from; None for a local step.
        before: what the ranks hold before it.
        after: what they hold after it.
        group_axes: the axes of its groups as indices; None: all of the plan's ranks are one group.
        reduces: the axes over which it reduces copies, as indices.
        reduction: "sum", "avg", "max", "min" or "prod", for those.
        rounds: into how many exchanges it is cut to bound memory.
        fill: for a "copy": how the result is made, see `Fill`.
        known_send_bytes: what each rank sends, where that is known without going through all that moves.
        estimated_send_bytes: about what it sends, else.
        kept_bytes: what a rank holds meanwhile of earlier steps, or for later ones, and is neither source nor result.
    """

    kind: Kind
    axes: tuple[str, ...]
    group_size: int
    recv_bytes: Counts
    seconds: float
    before: Located
    after: Located
    itemsize: int
    ranks: range | tuple[int, ...]
    group_axes: tuple[int, ...] | None = ()
    reduces: tuple[int, ...] = ()
    reduction: str | None = None
    rounds: int = 1
    fill: Fill | None = None
    known_send_bytes: Counts | None = None
    estimated_send_bytes: Counts | None = None
    load: Load | None = None
    kept_bytes: int = 0

    @property
    def communicates(self) -> bool:
        """Whether ranks exchange anything."""
        return self.kind in COLLECTIVES

    @cached_property
    def send_bytes(self) -> Counts:
        """What each rank sends, in the order of the plan's ranks.

        It is exact, but for exchanges of so many ranks that going through all that moves would take seconds: then what
        several ranks could send counts as shared evenly among them.
        """
        if self.known_send_bytes is not None:
            return self.known_send_bytes
        if self.estimated_send_bytes is not None and len(self.ranks) * self.group_size > _MANY_PAIRS:
            return self.estimated_send_bytes
        from hyper_parallel.core.redistribute.exchange import count_sent

        if self.group_axes is None or self.ranks == self.before.ranks:
            return count_sent(self)
        own = dict(zip(self.before.ranks, count_sent(replace(self, ranks=self.before.ranks)).tolist(), strict=True))
        return np.array([own.get(rank, 0) for rank in self.ranks], dtype=np.int64)

    @property
    def sent_most(self) -> int:
        """About the most bytes that a rank sends, told without going through all that moves."""
        counts = self.estimated_send_bytes if self.known_send_bytes is None else self.known_send_bytes
        return 0 if counts is None else int(counts.max())

    @cached_property
    def peak_extra_bytes(self) -> int:
        """The most that a rank holds meanwhile besides the plan's source and result."""
        from hyper_parallel.core.redistribute.memory import buffers

        return self.kept_bytes + buffers(self)

    def takes_part(self) -> npt.NDArray[np.bool_]:
        """Return which of the plan's ranks take part: all, but for a step on one of two meshes."""
        if self.group_axes is None or self.ranks == self.before.ranks:
            return np.ones(len(self.ranks), dtype=bool)
        return np.isin(np.asarray(self.ranks), np.asarray(self.before.ranks))

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks, sorted, that a rank takes part with."""
        if self.group_axes is None:
            return tuple(sorted(self.ranks))
        coordinates = self.before.coordinates(rank)
        assert coordinates is not None, "a group over axes is asked for on the mesh only"
        sizes = self.before.holding.sizes
        grid = np.arange(len(self.before.ranks)).reshape(sizes)
        index = tuple(slice(None) if axis in self.group_axes else at for axis, at in enumerate(coordinates))
        return tuple(sorted(self.before.ranks[position] for position in grid[index].ravel().tolist()))


@dataclass(frozen=True)
class Fill:
    """How a "copy" makes pending copies of what a rank holds, or turns one kind of pending reduction into another.

    Attributes:
        value: what fills the elements that the rank does not contribute: the reduction's neutral element.
        times: what the own elements are multiplied by.
        over: what they are divided by.
    """

    value: str = "sum"
    times: int = 1
    over: int = 1


def price(steps: Sequence[Step], on: Topology) -> tuple[float, ...]:
    """Return what ways are compared by, smaller is better: without latencies bytes come first, else time does."""
    received = sum(int(step.recv_bytes.sum()) for step in steps)
    count = sum(step.rounds for step in steps if step.communicates)
    time = float(f"{sum(step.seconds for step in steps):.9g}")  # sums that differ by rounding are equal
    if not on.counts_bytes_only:
        return time, received, count
    return (received, count, time) if on.inter is None else (received, time, count)


def with_kept(steps: Sequence[Step]) -> list[Step]:
    """Return the steps of a way with `kept_bytes` filled in: what lies between two steps is held during both."""
    held = [int(step.after.holding.counts().max(initial=0)) * step.itemsize for step in steps[:-1]]
    return [replace(step, kept_bytes=a + b) for step, a, b in zip(steps, [0, *held], [*held, 0])]  # noqa: B905
