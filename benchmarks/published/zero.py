"""ZeRO of other trainers: whole gradients reduced in large buckets, weights broadcast by their owners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sim.mesh.program import COMPUTE, Comm, CommGroup, Event, HostWait, Op, Program, Segment, Touch, Wait

__all__ = ["broadcast_weights", "reduce_whole_gradients"]

_BUCKET = 512 * 2**20
"""Elements of a bucket: InternEvo's `reduce_bucket_size`, in configs/7B_sft.py and where none is given."""


def reduce_whole_gradients(program: Program, bucket: int = _BUCKET) -> Program:
    """Return the program with gradients that are all-reduced over all data-parallel ranks, a bucket at a time.

    When a gradient does not fit into the bucket any more, the host waits for everything, copies the bucket together and
    all-reduces it on another stream, beside what backward computes next; the last one is reduced after backward
    (InternEvo of July 2023, `HybridZeroOptimizer._store_and_try_reduce_grads_by_bucket` and `step`). Where the state of
    the optimizer is shared by some of these ranks alone, all of them take part all the same. No memory is taken for it.

    Args:
        program: not changed; without reductions along dp_shard it is returned as it is.
        bucket: elements.
    """
    reduced = _handles(program, ("dp_shard", "dp_replicate"), ("reduce_scatter", "all_reduce"))
    if not reduced:
        return program
    groups = [*program.groups, CommGroup("dp_shard", _data_parallel(program))]
    writer = _Buckets(program, len(groups) - 1, bucket)
    segments = dict(program.segments)
    for key in dict.fromkeys(key for key, _ in program.order):
        segment = program.segments[key]
        events: list[Event] = []
        for event in segment.events:
            if isinstance(event, Op):
                writer.last = event
            if isinstance(event, Wait) and event.handle in reduced:
                events += writer.emptied()
            elif not (isinstance(event, Comm) and event.handle in reduced):
                events.append(event)
            elif program.groups[event.group].axis == "dp_shard":
                events += writer.filled(event)
        segments[key] = replace(segment, events=events)
    return replace(program, groups=groups, segments=segments)


class _Buckets:
    """Gradients on their way: what is in the bucket, and the events that empty it."""

    def __init__(self, program: Program, group: int, most: int) -> None:
        self.group, self.most = group, most
        self.ranks = len(_data_parallel(program))
        events = [event for segment in program.segments.values() for event in segment.events]
        self.handle = 1 + max((event.handle for event in events if isinstance(event, Comm)), default=0)
        self.stream = 1 + max((event.stream for event in events if isinstance(event, Op | Comm)), default=0)
        self.waiting: list[Comm] = []
        self.last: Op | None = None

    def filled(self, gradient: Comm) -> list[Event]:
        """Return what happens when one more gradient is there."""
        elements = sum(one.size for one in [*self.waiting, gradient]) // _item(gradient.dtype)
        events = self.emptied() if elements > self.most else []
        self.waiting.append(gradient)
        return events

    def emptied(self) -> list[Event]:
        """Return what reduces the bucket; nothing if it is empty."""
        if not self.waiting or self.last is None:
            return []
        size, like = sum(one.size for one in self.waiting), self.waiting[-1]
        self.waiting, self.handle = [], self.handle + 1
        touches = (Touch(self.last.writes[0].block if self.last.writes else 0, size),)
        copy = Op("aten.cat", "memory", 0, touches, touches, like.dtype, (), self.stream, like.place)
        moved = 2 * (size - size // self.ranks)
        reduction = Comm("all_reduce", self.group, size, moved, like.dtype, self.stream, self.handle, like.place)
        return [HostWait(None), copy, reduction, Wait(self.handle, self.stream), copy]


def _item(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _data_parallel(program: Program) -> list[int]:
    """Return the ranks that have the same part of the model as the program's, in order."""
    offsets = {0}
    for group in program.groups:
        if group.axis in ("dp_shard", "dp_replicate"):
            offsets = {offset + rank - program.rank for offset in offsets for rank in group.ranks}
    return sorted(program.rank + offset for offset in offsets)


def _handles(program: Program, axes: Sequence[str], ops: Sequence[str]) -> set[int]:
    """Return the handles of some collectives along some axes."""
    return {
        event.handle
        for segment in program.segments.values()
        for event in segment.events
        if isinstance(event, Comm) and program.groups[event.group].axis in axes and event.op.startswith(tuple(ops))
    }


def broadcast_weights(program: Program) -> Program:
    """Return the program with weights that their owners broadcast after the update, one owner after the other.

    A weight is owned whole by one of the ranks that share the optimizer's state: the largest first, each by the one
    that owns least (InternEvo of July 2023, `HybridZeroOptimizer._partition_param_list` and `broadcast_params`, which
    says `TODO: support broadcast overlap`). With more ranks than weights some own none.

    Args:
        program: not changed; without gathers along dp_shard in its update it is returned as it is.
    """
    keys = [key for key, _ in program.order if key[0] == "optimizer"]
    gathers = [
        event
        for key in keys
        for event in program.segments[key].events
        if isinstance(event, Comm) and event.op.startswith("all_gather")
        if program.groups[event.group].axis == "dp_shard"
    ]
    if not gathers:
        return program
    gone = {event.handle for event in gathers}
    segments = {
        key: replace(segment, events=[event for event in segment.events if getattr(event, "handle", None) not in gone])
        for key, segment in program.segments.items()
    }
    like, handle = gathers[0], max(_all_handles(program.segments.values()))
    sent: list[Event] = []
    for size in _owned([event.size for event in gathers], len(program.groups[like.group].ranks)):
        handle += 1
        sent.append(like._replace(op="broadcast", size=size, moved=size, stream=COMPUTE, handle=handle))
    waits = [Wait(event.handle, COMPUTE) for event in sent if isinstance(event, Comm)]
    last = segments[keys[-1]]
    segments[keys[-1]] = replace(last, events=[*last.events, *sent, *waits])
    return replace(program, segments=segments)


def _all_handles(segments: Iterable[Segment]) -> list[int]:
    return [event.handle for segment in segments for event in segment.events if isinstance(event, Comm)]


def _owned(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the bytes of each rank that owns any."""
    owned = [0] * ranks
    for size in sorted(sizes, reverse=True):
        owned[owned.index(min(owned))] += size
    return [size for size in owned if size]
