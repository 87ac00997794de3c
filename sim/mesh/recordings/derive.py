"""A recording for other sizes, made of recordings that do the same with other numbers.

What a stage does does not depend on how many ranks there are along the data-parallel axes and the pipeline, as long as
there are several: its groups and peers get the ranks of the other mesh. A number of bytes is the sum of four terms: a
fixed one, one that grows with the sequences of a micro-batch, one that is divided by the number of shards, and one that
grows with it. So four recordings give all others, in whole numbers. Where recordings differ in more than numbers, or a
number would not be whole, there is no such sum, and the stage is recorded.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.machine.description import Machine
from hyper_parallel.core.mesh.parallel_dims import RANK_ORDER
from sim.comm.process_group import moved_by_all_reduce
from sim.mesh.job import Job, StagePart
from sim.mesh.program import Alloc, Comm, CommGroup, Event, Op, Touch
from sim.mesh.tracing.categories import logit_sizes
from sim.mesh.tracing.stitch import Chunk, Recording, Standing, UsedPlan

_COUNTED = ("dp_replicate", "dp_shard", "pp")
"""Axes of which a recording depends on whether there are several ranks, and not on how many."""


@dataclass(frozen=True)
class Anchor:
    """A recording with what was recorded.

    Attributes:
        job: of which it is a part.
        part: the stage.
        kept: its layers that were recorded.
        recording: of these; groups and peers are ranks of the mesh.
    """

    job: Job
    part: StagePart
    kept: tuple[int, ...]
    recording: Recording

    @property
    def sizes(self) -> _Sizes:
        """The terms that its numbers are sums of."""
        return _sizes(self.job.micro_batch, self.job.dims.dp_shard)

    def holds_on(self, machine: Machine | None) -> bool:
        """Return True if the step is the same on a machine."""
        return self.job.machine == machine or all(used.holds_on(machine) for used in self.recording.plans)


_Sizes = tuple[Fraction, ...]


def _sizes(micro_batch: int, shards: int) -> _Sizes:
    return Fraction(1), Fraction(micro_batch), Fraction(1, shards), Fraction(shards)


class _DifferentError(Exception):
    """Recordings differ in more than numbers, or a number is not whole."""


def derive(anchors: Sequence[Anchor], job: Job, part: StagePart, kept: Sequence[int]) -> Recording | None:
    """Return what would be recorded of a stage, of the layers `kept`; None: that does not follow from the anchors.

    These are recordings of stages that are built and arranged alike, with the plans of the job's machine.
    """
    found = _weights([anchor.sizes for anchor in anchors], _sizes(job.micro_batch, job.dims.dp_shard))
    if found is None:
        return None
    chosen = [(anchors[at], weight) for at, weight in found]
    if len(chosen) > 1 and not all(_splits_evenly(anchor, job.dims.dp_shard) for anchor, _ in chosen):
        return None
    if len(chosen) == 1 and (chosen[0][0].job, chosen[0][0].part, chosen[0][0].kept) == (job, part, tuple(kept)):
        return chosen[0][0].recording
    try:
        recording = _Sum([anchor.recording for anchor, _ in chosen], [weight for _, weight in chosen]).recording()
        if len(chosen) > 1:
            _check_logits(chosen[0][0], recording, job)
        moved = _Move(chosen[0][0], job, part, kept).recording(recording)
        return moved if all(used.holds_on(job.machine) for used in moved.plans) else None
    except _DifferentError:
        return None


def _splits_evenly(anchor: Anchor, shards: int) -> bool:
    even = anchor.recording.even
    return even % shards == 0 and even % anchor.job.dims.dp_shard == 0


def _weights(sizes: Sequence[_Sizes], target: _Sizes) -> list[tuple[int, Fraction]] | None:
    """Return as few as possible of some points, with weights by which they add up to the target.

    >>> points = [_sizes(micro_batch, 2) for micro_batch in (2, 4)]
    >>> _weights(points, _sizes(8, 2))
    [(0, Fraction(-2, 1)), (1, Fraction(3, 1))]
    """
    for count in range(1, len(target) + 1):
        for chosen in itertools.combinations(range(len(sizes)), count):
            weights = _solved([sizes[at] for at in chosen], target)
            if weights is not None:
                return list(zip(chosen, weights, strict=True))
    return None


def _solved(columns: Sequence[_Sizes], target: _Sizes) -> list[Fraction] | None:
    """Return the weights of independent columns that give the target; None: there are none."""
    rows = [[*row, wanted] for *row, wanted in zip(*columns, target, strict=True)]
    for at in range(len(columns)):
        pivot = next((row for row in rows[at:] if row[at]), None)
        if pivot is None:
            return None
        rows.remove(pivot)
        pivot = [value / pivot[at] for value in pivot]
        rows = [[value - row[at] * by for value, by in zip(row, pivot, strict=True)] for row in rows]
        rows.insert(at, pivot)
    return None if any(row[-1] for row in rows[len(columns) :]) else [row[-1] for row in rows[: len(columns)]]


class _Sum:
    """The sum of recordings by weight: all that is not a number is the same in all of them."""

    def __init__(self, recordings: Sequence[Recording], weights: Sequence[Fraction]) -> None:
        self.first, self.others = recordings[0], recordings[1:]
        self.weights = weights

    def recording(self) -> Recording:
        first, others = self.first, self.others
        if not others:
            return first
        if any(_frame(other) != _frame(first) for other in others):
            raise _DifferentError
        several = (first, *others)
        sizes = {block: self.number(*[each.sizes[block] for each in several]) for block in first.sizes}
        segments = {
            key: self.chunks(*[list(recording.segments.values())[at] for recording in several])
            for at, key in enumerate(first.segments)
        }
        standing = [self.value(alike) for alike in _side_by_side([each.standing for each in several])]
        plans = tuple([self.value(alike) for alike in _side_by_side([each.plans for each in several])])
        return dataclasses.replace(first, sizes=sizes, standing=standing, segments=segments, plans=plans)

    def number(self, *values: int) -> int:
        if values.count(values[0]) == len(values):
            return values[0]
        total = sum([weight * value for weight, value in zip(self.weights, values, strict=True)])
        if total.denominator != 1 or total < 0:
            raise _DifferentError
        return int(total)

    def chunks(self, *several: list[Chunk]) -> list[Chunk]:
        return [
            (chunks[0][0], [self.value(events) for events in _side_by_side([events for _, events in chunks])])
            for chunks in _side_by_side(several)
        ]

    def value(self, several: Sequence[Any]) -> Any:
        """Return the sum of numbers, of tuples of these, or of events and the like by their fields in `_SUMMED`."""
        first = several[0]
        if all(first == other for other in several[1:]):
            return first
        kind = type(first)
        if kind is int:
            return self.number(*several)
        if kind is tuple:
            return tuple([self.value(alike) for alike in _side_by_side(several)])
        if kind not in _SUMMED or any(type(other) is not kind for other in several):
            raise _DifferentError
        if kind is Comm:  # `_Move` finds the peer, and what an all_reduce moves over other ranks
            several = [each._replace(peer=first.peer, moved=each.moved * (each.op != "all_reduce")) for each in several]
        summed = {name: self.value([getattr(each, name) for each in several]) for name in _SUMMED[kind]}
        made = several[0]._replace(**summed)
        if any(other._replace(**summed) != made for other in several[1:]):
            raise _DifferentError
        return made


def _frame(recording: Recording) -> tuple[object, ...]:
    """Return what recordings must have in common before their numbers are looked at."""
    axes, keys = [group.axis for group in recording.groups], [(name, kind) for name, _, kind in recording.segments]
    return recording.places, axes, recording.categories, recording.sizes.keys(), keys


_SUMMED = MappingProxyType(
    {
        Op: ("flops", "reads", "writes", "shape"),
        Touch: ("bytes",),
        Comm: ("size", "moved"),
        Alloc: ("bytes",),
        Standing: ("bytes",),
        UsedPlan: ("shape",),
    }
)
"""Fields that are sums of terms; all others are equal."""


def _side_by_side(several: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    if len({len(each) for each in several}) > 1:
        raise _DifferentError
    return zip(*several, strict=True)


def _check_logits(anchor: Anchor, recording: Recording, job: Job) -> None:
    """Refuse a block that is as large as the logits in one of two recordings only: its category follows from that."""
    before, now = logit_sizes(anchor.job), logit_sizes(job)
    old = anchor.recording.sizes
    if any((old[block] in before) != (size in now) for block, size in recording.sizes.items()):
        raise _DifferentError


class _Move:
    """A recording on other ranks, with other layers."""

    def __init__(self, anchor: Anchor, job: Job, part: StagePart, kept: Sequence[int]) -> None:
        self.old, self.new = _Seat(anchor.job, anchor.part), _Seat(job, part)
        self.part = part
        self.layers = dict(zip(anchor.kept, kept, strict=True))

    def recording(self, found: Recording) -> Recording:
        layers = self.layers
        groups = [group._replace(ranks=self._ranks(group)) for group in found.groups]
        if len({(group.axis, group.ranks) for group in groups}) < len(groups):
            raise _DifferentError  # two groups have become one
        places = [p if p.layer is None else p._replace(layer=layers.get(p.layer, p.layer)) for p in found.places]
        standing = [
            each if each.layer is None else each._replace(layer=layers.get(each.layer, each.layer))
            for each in found.standing
        ]
        segments = {
            (name, self.part.index, variant): [
                (None if layer is None else layers.get(layer, layer), [self._event(e, found, groups) for e in events])
                for layer, events in chunks
            ]
            for (name, _, variant), chunks in found.segments.items()
        }
        weights = tuple([w if w.layer is None else w._replace(layer=layers[w.layer]) for w in found.weights])
        plans = tuple([u._replace(src=self._layout(u.src), dst=self._layout(u.dst)) for u in found.plans])
        return dataclasses.replace(
            found, groups=groups, places=places, standing=standing, segments=segments, weights=weights, plans=plans
        )

    def _layout(self, layout: Layout) -> Layout:
        ranks = self._ranks(CommGroup("", layout.rank_list))
        if len(ranks) != len(layout.rank_list):
            raise _DifferentError
        return layout if ranks == layout.rank_list else Layout.from_dict({**layout.to_dict(), "rank_list": ranks})

    def _event(self, event: Event, found: Recording, groups: Sequence[CommGroup]) -> Event:
        if not isinstance(event, Comm):
            return event
        if event.peer is not None:
            return event._replace(peer=self._peer(event.peer))
        ranks = groups[event.group].ranks
        if event.op == "all_reduce":
            return event._replace(moved=moved_by_all_reduce(event.size, len(ranks), ranks.index(self.new.rank)))
        if len(ranks) != len(found.groups[event.group].ranks):
            varied, _ = self.new.parts_of(tuple(ranks))
            if varied != ("dp_shard",):
                raise _DifferentError  # of the counted axes, only the number of shards is in the terms
        return event

    def _ranks(self, group: CommGroup) -> tuple[int, ...]:
        ranks = tuple(group.ranks)
        varied, inner = self.old.parts_of(ranks)
        if self.old.ranks_of(varied, inner) == ranks:
            return self.new.ranks_of(varied, inner)
        if group.axis == "pp" and len(ranks) == 2 and self.old.rank in ranks:
            return tuple(sorted([self._peer(rank) for rank in ranks]))
        raise _DifferentError

    def _peer(self, rank: int) -> int:
        if rank == self.old.rank:
            return self.new.rank
        varied, inner = self.old.parts_of((self.old.rank, rank))
        if not varied:
            return self.new.rank_at(inner[1])
        for name in ("before", "after", "first", "last"):
            if rank == getattr(self.old, name):
                return int(getattr(self.new, name))
        raise _DifferentError


class _Seat:
    """Where in the mesh a recording was made."""

    def __init__(self, job: Job, part: StagePart) -> None:
        self.sizes = [getattr(job.dims, axis) for axis in RANK_ORDER]
        self.rank = job.rank_of_stage_rank(part.rank)
        by_index = {each.index: each.rank for each in job.stages()}
        before, after = by_index.get(part.index - 1), by_index.get(part.index + 1)
        self.before = -1 if before is None else job.rank_of_stage_rank(before)
        self.after = -1 if after is None else job.rank_of_stage_rank(after)
        self.first, self.last = [job.rank_of_stage_rank(rank) for rank in job.tied_ranks or ()] or (-1, -1)
        self.own = dict(zip(RANK_ORDER, self._places((self.rank,))[:, 0].tolist(), strict=True))

    def _places(self, ranks: Sequence[int]) -> Any:
        return np.array(np.unravel_index(np.asarray(ranks, dtype=np.int64), self.sizes))

    def parts_of(self, ranks: Sequence[int]) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
        """Return the counted axes along which ranks differ, and their places along the others, each once."""
        places = self._places(ranks)
        counted = [axis in _COUNTED for axis in RANK_ORDER]
        varied = tuple(
            axis for at, axis in enumerate(RANK_ORDER) if counted[at] and (places[at] != places[at][0]).any()
        )
        rest = places[[at for at, is_counted in enumerate(counted) if not is_counted]]
        return varied, tuple(dict.fromkeys(map(tuple, rest.T.tolist())))

    def ranks_of(self, varied: Sequence[str], inner: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the ranks of all places along some axes, at some places along the axes that are not counted."""
        sizes = dict(zip(RANK_ORDER, self.sizes, strict=True))
        strides = self._strides()
        found = np.zeros(1, dtype=np.int64)
        for axis in _COUNTED:
            along = np.arange(sizes[axis]) if axis in varied else np.array([self.own[axis]])
            found = np.add.outer(found, along * strides[axis]).ravel()
        others = [axis for axis in RANK_ORDER if axis not in _COUNTED]
        offsets = [sum(n * strides[axis] for n, axis in zip(place, others, strict=True)) for place in inner]
        return tuple(np.sort(np.add.outer(found, np.array(offsets)).ravel()).tolist())

    def rank_at(self, inner: tuple[int, ...]) -> int:
        """Return the rank of another place along the axes that are not counted."""
        return self.ranks_of((), [inner])[0]

    def _strides(self) -> dict[str, int]:
        strides, stride = {}, 1
        for axis, size in zip(reversed(RANK_ORDER), reversed(self.sizes), strict=True):
            strides[axis] = stride
            stride *= size
        return strides
