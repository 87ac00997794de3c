"""Lifetimes and streams of memory as torch's FSDP2 has them, and as graphs of operations have (torchtitan)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sim.mesh.program import Alloc, Comm, Event, Free, Op, Program, Segment, Wait

__all__ = ["allocate_as_fsdp2", "free_after_last_use"]

_PHASES = ("forward", "backward")

_GATHERS, _REDUCTIONS = 1001, 1002
"""Streams that FSDP2 allocates on, beside the one that computes."""


def free_after_last_use(program: Program, *, with_loss: bool = False) -> Program:
    """Return the program with blocks of forward and backward freed after the last operation that touches them.

    A graph that is run operation by operation (`aot_eager`, or torch.fx's generated code) lets go of each value after
    its last use, where eager code holds what a Python frame or a checkpoint's cache refers to: all results that a
    policy of selective checkpointing saves, whether backward reads them or not. Weights that forward and backward both
    read are gathered for each (torchtitan, `fsdp_reshard_after_fwd_pass`), the last block's and the root's among them.

    A block that is read by communication lives until that is waited for. Only what is taken and freed changes, and
    only for programs with one kind of micro-batch: others, with blocks in two segments of a name, stay as they are.

    Args:
        program: not changed.
        with_loss: the loss is part of the graph; else its blocks stay as they are.
    """
    keys = [key for key, _ in program.order if key[0] in _PHASES]
    if len(keys) != len({key[:2] for key in keys}):
        return program
    segments = dict(program.segments)
    for stage in {key[1] for key in keys}:
        pair = [key for key in keys if key[1] == stage]
        changed = _freed([program.segments[key] for key in pair], program, with_loss)
        segments.update(zip(pair, changed, strict=True))
    return replace(program, segments=segments)


def _freed(segments: list[Segment], program: Program, with_loss: bool) -> list[Segment]:
    """Return segments of one stage, in their order, with blocks freed early."""
    flat = [event for segment in segments for event in segment.events]
    ends = [sum(len(each.events) for each in segments[: number + 1]) for number in range(len(segments))]
    taken = {event.block: (at, event) for at, event in enumerate(flat) if isinstance(event, Alloc)}
    freed = {event.block: at for at, event in enumerate(flat) if isinstance(event, Free)}
    touches = _touches(flat)
    kept = set[int]() if with_loss else _of_loss(flat, program)
    drop, after = set[int](), dict[int, list[Event]]()
    for block, (begin, event) in taken.items():
        at, used = freed.get(block), [each for each in touches.get(block, ()) if each > begin]
        if at is None or not used or used[-1] > at or block in kept:
            continue
        drop.add(at)
        if program.categories.get(block) == "gathered weights":
            _gather_twice(event, used, ends, after)
        after.setdefault(_waited(flat, used[-1], at, event.bytes), []).append(Free(block))
    made: list[list[Event]] = [[] for _ in segments]
    for at, each in enumerate(flat):
        number = next(number for number, end in enumerate(ends) if at < end)
        if at not in drop:
            made[number].append(each)
        made[number] += after.get(at, ())
    return [replace(segment, events=events) for segment, events in zip(segments, made, strict=True)]


def _gather_twice(event: Alloc, used: list[int], ends: list[int], after: dict[int, list[Event]]) -> None:
    """Free a weight that is read on both sides of the end of forward, and take it again before the first later use."""
    for end in ends[:-1]:
        before, later = [at for at in used if at < end], [at for at in used if at >= end]
        if before and later:
            after.setdefault(before[-1], []).append(Free(event.block))
            after.setdefault(later[0] - 1, []).append(event)


def _touches(events: list[Event]) -> dict[int, list[int]]:
    """Return where each block is touched by an operation, in order."""
    found: dict[int, list[int]] = {}
    for at, event in enumerate(events):
        if isinstance(event, Op):
            for touch in (*event.reads, *event.writes):
                found.setdefault(touch.block, []).append(at)
    return found


def _of_loss(events: list[Event], program: Program) -> set[int]:
    """Return the blocks that the loss makes or reads."""
    return {
        touch.block
        for event in events
        if isinstance(event, Op) and program.places[event.place].phase == "loss"
        for touch in (*event.reads, *event.writes)
    } | {block for block, name in program.categories.items() if name == "logits"}


def _waited(events: list[Event], last: int, freed: int, size: int) -> int:
    """Return where communication that may read a block after its last use is waited for; without any, the last use."""
    comms: Iterator[Comm] = (event for event in events[last:freed] if isinstance(event, Comm))
    handle = next((event.handle for event in comms if size in (event.size, event.size - event.moved)), None)
    if handle is None:
        return last
    waits = (at for at in range(last, freed) if isinstance(wait := events[at], Wait) and wait.handle == handle)
    return next(waits, freed)


# torch's FSDP2 -------------------------------------------------------------------------------------------------------


def allocate_as_fsdp2(program: Program, *, embedding: int = 0, keeps_last: bool = False) -> Program:
    """Return the program with the buffers of its sharded weights and gradients where, and while, FSDP2 has them.

    As torch/distributed/fsdp/_fully_shard has it: what is gathered, and the casts that go into it, are allocated on a
    stream of their own (`foreach_all_gather`), and live in forward until the next weights are copied out
    (`wait_for_unshard`); gradients that have been reduced are allocated on another stream (`foreach_reduce`), what they
    are reduced of lives until the next reduction. The caching allocator never uses blocks of one stream for another,
    so all of them add to what is reserved. Our own engine allocates on the stream that computes.

    Args:
        program: not changed; nor are programs with several kinds of micro-batches, or that gather nothing.
        embedding: bytes of the gathered embedding, where it is a unit of its own, and norm and head are another one;
            0: they are one unit.
        keeps_last: the weights of the last block are kept from forward to backward.
    """
    keys = [key for key, _ in program.order if key[0] in _PHASES]
    if len(keys) != 2 or keys[0][0] == keys[1][0]:
        return program
    changes = _FSDP2(program, [program.segments[key] for key in keys])
    if not changes.copied_out:
        return program
    changes.gather()
    changes.reduce()
    if embedding:
        changes.split_root(embedding)
    if keeps_last:
        changes.keep_last()
    segments = program.segments | dict(zip(keys, changes.made(), strict=True))
    return replace(program, segments=segments, categories=program.categories | changes.categories)


class _FSDP2:
    """Changes of a forward and a backward, by where their events are when one follows the other."""

    def __init__(self, program: Program, segments: list[Segment]) -> None:
        self.program, self.segments = program, segments
        self.events = [event for segment in segments for event in segment.events]
        self.end = len(segments[0].events)  # of forward
        self.new: dict[int, list[Event]] = {}  # in place of an event
        self.before: dict[int, list[Event]] = {}
        self.after: dict[int, list[Event]] = {}
        self.categories: dict[int, str] = {}
        self.number = 1 + max(e.block for s in program.segments.values() for e in s.events if isinstance(e, Alloc))
        self.taken = {event.block: at for at, event in enumerate(self.events) if isinstance(event, Alloc)}
        self.freed = {event.block: at for at, event in enumerate(self.events) if isinstance(event, Free)}
        self.copied_out = [
            (at, event.reads[0].block, event.writes[0].block)
            for at, event in enumerate(self.events)
            if isinstance(event, Op)
            and event.name == "aten.split_with_sizes_copy"
            and event.reads[0].block in self.taken
        ]

    def gather(self) -> None:
        """Give gathers their stream, and free their buffers in forward when the next weights are copied out."""
        for (at, buffer, _), later in zip(self.copied_out, [*self.copied_out[1:], None], strict=True):
            begin = self.taken[buffer]
            comm = next(event for event in self.events[begin:] if isinstance(event, Comm) and event.op == "all_gather")
            cast = self._block("gathered weights")
            copy = next(n for n in range(begin, at) if isinstance(self.events[n], Op))
            take = self._alloc(begin)._replace(stream=_GATHERS)
            self.new[begin] = [Alloc(cast, comm.size - comm.moved, _GATHERS), take]
            self.after.setdefault(copy, []).append(Free(cast))
            if at < self.end and later is not None:
                self.new[self.freed[buffer]] = []
                self.after.setdefault(later[0], []).append(Free(buffer))

    def reduce(self) -> None:
        """Give reduced gradients their stream, and keep what is reduced until it is waited for."""
        waits = {event.handle: at for at, event in enumerate(self.events) if isinstance(event, Wait)}
        for at, event in enumerate(self.events):
            if isinstance(event, Alloc) and self.program.categories.get(event.block) == "gradients":
                self.new[at] = [event._replace(stream=_REDUCTIONS)]
            if not isinstance(event, Comm) or event.op != "reduce_scatter":
                continue
            free = next((n for n in range(at, min(at + 4, len(self.events))) if self._is_input(n, event.size)), None)
            if free is not None and event.handle in waits:
                self.new[free] = []
                self.after.setdefault(waits[event.handle], []).append(self.events[free])

    def split_root(self, embedding: int) -> None:
        """Make two units of the root's: the embedding, freed after it was used; norm and head, reduced at once."""
        _, buffer, weight = self.copied_out[0]
        last = max(n for n in range(self.end) if self._reads(n, weight, "aten.embedding"))
        own = self._block("gathered weights")
        self.new[self.taken[weight]] = [
            Alloc(own, embedding, 0),
            self._less(self._alloc(self.taken[weight]), embedding),
        ]
        self.after.setdefault(last, []).append(Free(own))
        cast, whole = self.new[self.taken[buffer]]
        assert isinstance(whole, Alloc)
        self.new[self.taken[buffer]] = [cast, self._less(whole, embedding)]
        self._reduce_head()

    def _reduce_head(self) -> None:
        """Reduce the gradient of the head where it is made, and that of the embedding alone at the end."""
        reduced = [event for event in self.events if isinstance(event, Alloc) and self._is_reduced(event.block)]
        root = reduced[-1]
        made = [
            e.reads[0].block
            for e in self.events
            if isinstance(e, Op) and e.name == "aten.copy_"
            if e.reads and e.writes[0].block == root.block
        ]
        sizes = {block: self._alloc(self.taken[block]).bytes for block in made if block in self.taken}
        ends = [
            block
            for block in made
            if any(self._writes(n, block, "aten.embedding_dense_backward") for n in range(self.end, len(self.events)))
        ]
        head = max((block for block in sizes if block not in ends), key=sizes.__getitem__, default=None)
        if head is None or not ends:
            return  # tied: there is one weight
        part = root.bytes * sizes[head] // sum(sizes.values())
        at = next(n for n in range(self.end, len(self.events)) if self._writes(n, head))
        whole = self._block("communication")
        self.after.setdefault(at, []).extend([Alloc(whole, part, 0), Free(head), Free(whole)])
        self.new[self.freed[head]] = []
        self.new[self.taken[root.block]] = [self._less(root, part)]

    def keep_last(self) -> None:
        """Keep the last block's weights until backward would have gathered them again."""
        of_forward = [weight for at, _, weight in self.copied_out if at < self.end]
        again = next((at for at, _, _ in self.copied_out if at >= self.end), None)
        free = self.freed.get(of_forward[-1])
        if again is not None and free is not None and free < self.end:
            self.new[free] = []
            self.before.setdefault(self.taken[self.copied_out[len(of_forward)][2]], []).append(self.events[free])

    def made(self) -> list[Segment]:
        """Return the changed forward and backward."""
        made: list[list[Event]] = [[], []]
        for at, event in enumerate(self.events):
            made[at >= self.end] += [*self.before.get(at, ()), *self.new.get(at, (event,)), *self.after.get(at, ())]
        return [replace(segment, events=events) for segment, events in zip(self.segments, made, strict=True)]

    def _block(self, category: str) -> int:
        self.number += 1
        self.categories[self.number - 1] = category
        return self.number - 1

    def _alloc(self, at: int) -> Alloc:
        event = self.events[at]
        assert isinstance(event, Alloc)
        return event

    def _less(self, event: Alloc, size: int) -> Alloc:
        return event._replace(bytes=event.bytes - size)

    def _is_input(self, at: int, size: int) -> bool:
        event = self.events[at]
        return (
            isinstance(event, Free) and event.block in self.taken and self._alloc(self.taken[event.block]).bytes >= size
        )

    def _is_reduced(self, block: int) -> bool:
        at = self.freed.get(block)
        near = [] if at is None else self.events[max(0, at - 4) : at]
        return any(
            isinstance(event, Comm) and event.op == "reduce_scatter" and self.program.groups[event.group].axis != "tp"
            for event in near
        )

    def _reads(self, at: int, block: int, name: str) -> bool:
        event = self.events[at]
        return isinstance(event, Op) and event.name == name and any(touch.block == block for touch in event.reads)

    def _writes(self, at: int, block: int, name: str = "") -> bool:
        event = self.events[at]
        return isinstance(event, Op) and name in event.name and any(touch.block == block for touch in event.writes)
