"""The program of one rank in a step, as data: operations, communication, waits, allocations and frees.

A `Program` is recorded once from the real model and engine (`tracing/record.py`), independent of any device. It is
priced, replayed and drawn afterwards, as often as needed. Events are in the order in which the rank's host issues
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

COMPUTE = 0
"""The stream that operations are queued on unless the engine says otherwise."""
MEMORY_KINDS = ("memory", "scalar", "general")
"""Of operations that are bounded by what they read and write, from the fastest to the slowest."""
HOST_COPIES = MappingProxyType(
    {
        "copy_to_device": "host to device",
        "copy_to_device_pageable": "host to device",
        "copy_to_host": "device to host",
        "copy_to_host_pageable": "device to host",
    }
)
"""Copies between host and device, of page-locked memory unless they say otherwise; what stands for the axis of each."""


class Touch(NamedTuple):
    """Bytes that an operation reads or writes in one block of memory.

    Attributes:
        block: number of the block.
        bytes: bytes read or written.
    """

    block: int
    bytes: int


class Op(NamedTuple):
    """One kernel.

    Attributes:
        name: torch's name, e.g. `aten.mm`.
        kind: `matmul`, `attention`, `attention_backward`, `memory` (bounded by reads and writes), `scalar`, `general`
            (as `memory`, but slower because of the operands' layout in memory, see `memory_kind`), `random`,
            `optimizer`, `fused` (several operations as one kernel), `host` (nothing on the device), or `on_host`
            (computed by the host, in its memory).
        flops: floating-point operations.
        reads: blocks read.
        writes: blocks written.
        dtype: dtype of the computation, e.g. `bfloat16`.
        shape: of a matmul `(batch, m, n, k)`; of an attention `(batch, heads, kv_heads, queries, keys, head_dim,
            is_causal)`; of `scalar` and `general` `(elements,)`; of `host` `(count,)` or (); else ().
        stream: number of the stream it is queued on.
        place: number of its `Place`.
    """

    name: str
    kind: str
    flops: int
    reads: tuple[Touch, ...]
    writes: tuple[Touch, ...]
    dtype: str
    shape: tuple[int, ...]
    stream: int
    place: int

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        total = 0
        for _, size in self.reads:
            total += size
        for _, size in self.writes:
            total += size
        return total


class Comm(NamedTuple):
    """A collective, one side of a point-to-point transfer, or a copy between host and device.

    It runs on a stream of its group; copies have one stream for each direction.

    Attributes:
        op: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `broadcast`, `send`, `recv` ..., or one of
            `HOST_COPIES`.
        group: number of its `CommGroup`.
        size: bytes of the full buffer, as nccl-tests count: the gathered output, or the input of a reduction.
        moved: the larger of the bytes that the rank sends and receives.
        dtype: of the data.
        stream: number of the issuing stream; it starts after the earlier work on that stream.
        handle: number by which a `Wait` refers to it.
        place: number of its `Place`.
        peer: of a send or recv: the global rank on the other side; else None.
        messages: number of tensors in it.
    """

    op: str
    group: int
    size: int
    moved: int
    dtype: str
    stream: int
    handle: int
    place: int
    peer: int | None = None
    messages: int = 1


class Wait(NamedTuple):
    """Later work on `stream` starts after the communication `handle`; the host does not block."""

    handle: int
    stream: int


class EventRecord(NamedTuple):
    """`event` is reached when all work queued on `stream` so far is done."""

    event: int
    stream: int


class Await(NamedTuple):
    """Later work on `stream` starts after `event`; the host does not block."""

    event: int
    stream: int


class HostWait(NamedTuple):
    """The host blocks until all work queued on `stream` so far is done; None: on all streams."""

    stream: int | None


class Alloc(NamedTuple):
    """Allocation of a block, in the device's memory or, if the program lists it in `on_host`, in the host's."""

    block: int
    bytes: int
    stream: int


class Free(NamedTuple):
    """Free of a block."""

    block: int


Event: TypeAlias = Op | Comm | Wait | EventRecord | Await | HostWait | Alloc | Free


class Place(NamedTuple):
    """Position of an event in the training step and the model.

    Attributes:
        phase: `build`, `forward`, `loss`, `backward`, `reduce` (left-over gradient communication),
            `optimizer`.
        layer: number of the block in the whole model; None: outside of blocks.
        module: path of the innermost module, e.g. `layers.3.attention`; empty: unknown.
        recomputes: True if it repeats forward for activation checkpointing.
        compiled: number of its compiled region, in which a compiler fuses operations into few kernels;
            0: none, every operation is a kernel.
        watched: True if a dispatch mode sees its operations in Python first, e.g. in selective checkpointing.
    """

    phase: str
    layer: int | None = None
    module: str = ""
    recomputes: bool = False
    compiled: int = 0
    watched: bool = False


class CommGroup(NamedTuple):
    """The ranks of a communication, and the mesh axis along which they lie.

    Attributes:
        axis: mesh axis, e.g. `tp`, or `world`.
        ranks: global ranks, in group order.
    """

    axis: str
    ranks: Sequence[int]


@dataclass
class Segment:
    """A repeated part of a step: forward or backward of a stage for one micro-batch, or the work around them.

    Attributes:
        name: `forward`, `backward`, `optimizer`, `build` ...
        stage: number of the pipeline stage; -1: shared by all stages.
        variant: `first`, `steady` or `last` micro-batch of a step; `only` if there is one, or none.
        events: in the order of issue.
    """

    name: str
    stage: int
    variant: str
    events: list[Event] = field(default_factory=list)


@dataclass
class Program:
    """The events of one rank in a step, which stand for all ranks of its class.

    A block that one segment allocates and another frees has the same number in both. In pipelines several micro-batches
    are in flight, so the replay gives each micro-batch its own instance.

    Attributes:
        rank: global rank that represents its class.
        like: number of ranks in the class.
        world_size: number of ranks.
        groups: groups of its communication.
        places: places of its events.
        categories: of blocks: `parameters`, `gradients`, `optimizer`, `activations`, `gathered weights`,
            `communication`, `logits`, `inputs`, `workspace`.
        segments: by (name, stage, variant).
        order: keys of the step's segments, each with its micro-batch (-1: none), in the order of the rank's schedule.
            `build` is not included.
        stages: pipeline stages of the rank, in model order.
        on_host: numbers of the blocks in the host's memory.
        held: pairs of weight bytes held and number of ranks that hold that many, its own rank first; empty: all ranks
            are alike.
    """

    rank: int
    like: int
    world_size: int
    groups: list[CommGroup] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    categories: dict[int, str] = field(default_factory=dict)
    segments: dict[tuple[str, int, str], Segment] = field(default_factory=dict)
    order: list[tuple[tuple[str, int, str], int]] = field(default_factory=list)
    stages: tuple[int, ...] = (0,)
    on_host: frozenset[int] = frozenset()
    held: tuple[tuple[int, int], ...] = ()

    def segments_in_order(self) -> Iterator[tuple[Segment, int]]:
        """Yield the segments of a step, each with its micro-batch."""
        for key, batch in self.order:
            yield self.segments[key], batch
