"""The program of one rank in a step, as data: operations, communication, waits, allocations and frees.

A `Program` is recorded once from the real model and engine (`tracing/record.py`) and knows nothing of any
device. It is priced, replayed and drawn afterwards, as often as one likes. Events are in the order in which the rank's
host issues them.
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
    """What an operation reads or writes of a block of memory.

    Attributes:
        block: which.
        bytes: how much of it.
    """

    block: int
    bytes: int


class Op(NamedTuple):
    """One kernel.

    Attributes:
        name: torch's, such as `aten.mm`.
        kind: `matmul`, `attention`, `attention_backward`, `memory` (bounded by what it reads and writes), `scalar`,
            `general` (the same, slower for how operands lie in memory, see `memory_kind`), `random`, `optimizer`,
            `fused` (several of them as one kernel), `host` (nothing on the device), or `on_host` (computed by the host,
            in its memory).
        flops: floating-point operations.
        reads: what it reads.
        writes: what it writes.
        dtype: that it computes in, such as `bfloat16`.
        shape: of a matmul `(batch, m, n, k)`; of an attention `(batch, heads, kv_heads, queries, keys, head_dim,
            is_causal)`; of `scalar` and `general` `(elements,)`; of a `host` one perhaps `(how many,)`; else ().
        stream: where it is queued.
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

    It runs on a stream of its group's own; copies have one for each direction.

    Attributes:
        op: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `broadcast`, `send`, `recv` ..., or one of
            `HOST_COPIES`.
        group: number of its `CommGroup`.
        size: bytes of the full buffer, as nccl-tests count: what is gathered, or what goes into a reduction.
        moved: the larger of the bytes that the rank sends and receives.
        dtype: of the data.
        stream: that it was issued from: it starts after what is queued there.
        handle: what a `Wait` names.
        place: number of its `Place`.
        peer: of a send or recv: the global rank on the other side.
        messages: tensors that go together in it.
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
    """Later work on `stream` starts after the communication `handle`; the host goes on."""

    handle: int
    stream: int


class EventRecord(NamedTuple):
    """`event` is reached when what is queued on `stream` so far is done."""

    event: int
    stream: int


class Await(NamedTuple):
    """Later work on `stream` starts after `event`; the host goes on."""

    event: int
    stream: int


class HostWait(NamedTuple):
    """The host waits for what is queued on `stream` so far; None: for everything."""

    stream: int | None


class Alloc(NamedTuple):
    """A block of memory is taken: of the device's, or of the host's where the program says so."""

    block: int
    bytes: int
    stream: int


class Free(NamedTuple):
    """A block of memory is freed."""

    block: int


Event: TypeAlias = Op | Comm | Wait | EventRecord | Await | HostWait | Alloc | Free


class Place(NamedTuple):
    """Where in the program an event belongs.

    Attributes:
        phase: `build`, `forward`, `loss`, `backward`, `reduce` (left-over gradient communication),
            `optimizer`.
        layer: number of the block in the whole model; None: outside of blocks.
        module: path of the innermost module, such as `layers.3.attention`; empty where it is not known.
        recomputes: whether it does again what forward has done, for activation checkpointing.
        compiled: number of the compiled region that it is in, where a compiler makes few kernels of many operations;
            0: none, every operation is a kernel.
        watched: whether a dispatch mode sees its operations in Python first, as those of selective checkpointing do.
    """

    phase: str
    layer: int | None = None
    module: str = ""
    recomputes: bool = False
    compiled: int = 0
    watched: bool = False


class CommGroup(NamedTuple):
    """The ranks of a communication, and the axis of the mesh that they lie along.

    Attributes:
        axis: of the mesh, such as `tp`; `world`.
        ranks: global ranks, in group order.
    """

    axis: str
    ranks: Sequence[int]


@dataclass
class Segment:
    """A part of a step that repeats: the forward or backward of a stage for one micro-batch, or what comes around.

    Attributes:
        name: `forward`, `backward`, `optimizer`, `build` ...
        stage: number of the pipeline stage; -1 for what belongs to all.
        variant: `first`, `steady` or `last` micro-batch of a step; `only` where there is one, or no such thing.
        events: in the order of issue.
    """

    name: str
    stage: int
    variant: str
    events: list[Event] = field(default_factory=list)


@dataclass
class Program:
    """What one rank, and all that are like it, do in a step.

    A block that a segment allocates and another one frees has one number in both; for pipelines, in which several
    micro-batches are under way, `step` gives each micro-batch its own.

    Attributes:
        rank: the device that stands for its class.
        like: how many ranks are alike.
        world_size: ranks in all.
        groups: of its communication.
        places: of its events.
        categories: of blocks: `parameters`, `gradients`, `optimizer`, `activations`, `gathered weights`,
            `communication`, `logits`, `inputs`, `workspace`.
        segments: by (name, stage, variant).
        order: the segments of a step and the number of the micro-batch each works on (-1: none), in the order of the
            rank's schedule. `build` is not among them.
        stages: pipeline stages of the rank, in model order.
        on_host: blocks that are in the host's memory.
        held: bytes of the weights that ranks of its stages hold, and how many ranks that many, its own first; empty:
            all ranks are alike.
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
        """Yield the segments of a step with the micro-batch of each."""
        for key, batch in self.order:
            yield self.segments[key], batch
