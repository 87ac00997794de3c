"""ZeRO of other trainers: buckets of whole gradients, weights that owners broadcast or that modules fetch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeGuard

from sim.mesh.program import COMPUTE, Comm, CommGroup, Event, HostWait, Op, Program, Segment, Touch, Wait

__all__ = ["broadcast_weights", "fetch_weights", "reduce_whole_gradients"]

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
        self.handle = max(_all_handles(program.segments.values()), default=0)
        self.stream = _new_stream(program)
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


def _new_stream(program: Program) -> int:
    events = [event for segment in program.segments.values() for event in segment.events]
    return 1 + max((event.stream for event in events if isinstance(event, Op | Comm)), default=0)


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


# Weights that each module fetches (DeepSpeed 0.3.13)


class _Use(NamedTuple):
    """A product, or the two of its backward, that reads one weight.

    Attributes:
        at: number of the first product's event in its segment.
        elements: of the weight.
        is_backward: whether it is backward's.
        op: the first product.
    """

    at: int
    elements: int
    is_backward: bool
    op: Op


_SMALL = 10**5
"""Elements from which on a weight is split: `stage3_param_persistence_threshold`."""
_LIVE = 10**9
"""Elements of gathered weights from which on none is gathered ahead: `stage3_max_live_parameters`."""


def fetch_weights(program: Program, small: int = _SMALL, live: int = _LIVE) -> Program:
    """Return the program with weights that each module fetches, and gradients that are all-reduced weight by weight.

    Before a module computes, the host waits until its weight has come and the device has nothing left to do. Then the
    next weight's gather is issued, unless the one that is there has a billion elements, and runs beside the module. A
    gather is a list: the host cuts the buffer for each rank, waits for the device, and copies each rank's part out of
    what was gathered (DeepSpeed 0.3.13: runtime/zero/stage3.py, `fetch_sub_module`, `prefetch_next_sub_modules`,
    `_synchronize_communication`; partition_parameters.py, `_allgather_param`; torch's ProcessGroupNCCL of lists). A
    weight that backward reads right after it has been read again stays. A gradient is reduced when the next one is
    there, whole, as gradients are not contiguous by default (`reduce_ipg_grads`). Small weights stay on all ranks, and
    those of lookups are taken to. No memory is taken for it.

    Args:
        program: not changed; without gathers along dp_shard it is returned as it is.
        small: elements of the smallest weight that is split.
        live: elements of a weight beside which no other one is gathered ahead.
    """
    gone = _handles(program, ("dp_shard",), ("all_gather", "reduce_scatter"))
    if not gone:
        return program
    fetches = _Fetches([group.axis for group in program.groups].index("dp_shard"), program, small, live)
    segments = dict(program.segments)
    for key in dict.fromkeys(key for key, _ in program.order):
        before = fetches.before(program.segments[key])
        events: list[Event] = []
        for at, event in enumerate(program.segments[key].events):
            events += before.get(at, [])
            if getattr(event, "handle", None) not in gone:
                events.append(event)
        if rest := fetches.reduced():
            events += [*rest, HostWait(None)]
        segments[key] = replace(program.segments[key], events=events)
    return replace(program, segments=segments)


class _Fetches:
    """Weights and gradients on their way, in the order of the products that read and make them."""

    def __init__(self, group: int, program: Program, small: int, live: int) -> None:
        self.small, self.live = small, live
        self.group, self.ranks, self.places = group, len(program.groups[group].ranks), program.places
        self.handle, self.stream = max(_all_handles(program.segments.values())), _new_stream(program)
        products = [
            event for segment, _ in program.segments_in_order() for event in segment.events if _is_linear(event)
        ]
        self.tokens = products[0].shape[1] if products else 1
        self.gradient: _Use | None = None

    def before(self, segment: Segment) -> dict[int, list[Event]]:
        """Return what happens before some events of a segment, by their numbers."""
        uses = self._uses(segment)
        fetched = [at for at, use in enumerate(uses) if not (at and _stays(uses[at - 1], use))]
        events: dict[int, list[Event]] = {}
        ahead = -1
        for at, use in enumerate(uses):
            found = events[use.at] = []
            if at in fetched:
                found += [*([] if at == ahead else self._gather(use)), HostWait(None)]
            following = next((other for other in fetched if other > at), -1)
            if following not in (-1, ahead) and use.elements < self.live:
                found += self._gather(uses[following])
                ahead = following
            if use.is_backward:
                found += self.reduced()
                self.gradient = use
        return events

    def _uses(self, segment: Segment) -> list[_Use]:
        """Return the uses of weights; backward has two products for each, one of which sums over the tokens.

        Of a block's products of as many elements that follow each other, those of forward come first.
        """
        products = [
            (at, event) for at, event in enumerate(segment.events) if isinstance(event, Op) if _is_linear(event)
        ]
        uses: list[_Use] = []
        for (elements, _), run in itertools.groupby(products, self._weight):
            found = list(run)
            pairs = sum(op.shape[3] == self.tokens != op.shape[1] for _, op in found)
            forward = max(0, len(found) - 2 * pairs)
            uses += [_Use(at, elements, False, op) for at, op in found[:forward]]
            uses += [_Use(at, elements, True, op) for at, op in found[forward::2]]
        return [use for use in uses if use.elements >= self.small]

    def _weight(self, product: tuple[int, Op]) -> tuple[int, int | None]:
        """Return the elements of what a product reads, and the block that it is in."""
        return math.prod(product[1].shape) // self.tokens, self.places[product[1].place].layer

    def _gather(self, use: _Use) -> list[Event]:
        size, copied = self._size(use)
        parts = use.op._replace(name="aten.narrow", kind="host", flops=0, reads=(), writes=(), shape=(self.ranks,))
        self.handle += 1
        moved = size - size // self.ranks
        gather = Comm("all_gather", self.group, size, moved, use.op.dtype, self.stream, self.handle, use.op.place)
        filled = copied._replace(name="aten.zero_", reads=())
        return [filled, HostWait(None), parts, gather, parts, Wait(self.handle, self.stream), copied]

    def reduced(self) -> list[Event]:
        """Return what reduces the last gradient, if there is one."""
        if self.gradient is None:
            return []
        use, self.gradient = self.gradient, None
        size, copied = self._size(use)
        self.handle += 1
        moved = 2 * (size - size // self.ranks)
        reduction = Comm("all_reduce", self.group, size, moved, use.op.dtype, self.stream, self.handle, use.op.place)
        return [copied, reduction, Wait(self.handle, self.stream), copied]

    def _size(self, use: _Use) -> tuple[int, Op]:
        """Return the bytes of a weight, and the operation that copies it."""
        size = use.elements * _item(use.op.dtype)
        touches = (Touch(use.op.writes[0].block if use.op.writes else 0, size),)
        op = use.op._replace(kind="memory", name="aten.copy_", flops=0, reads=touches, writes=touches, shape=())
        return size, op._replace(stream=self.stream)


def _is_linear(event: Event) -> TypeGuard[Op]:
    return isinstance(event, Op) and event.kind == "matmul" and event.shape[:1] == (1,)


def _stays(last: _Use, use: _Use) -> bool:
    """Tell whether backward reads a weight that forward has just been computed with again."""
    return use.is_backward and not last.is_backward and use.elements == last.elements
