"""One kernel where a compiler makes one of many operations: in what was recorded, one `Op` in place of several.

`sim.mesh.tracing.compiled` numbers the kernels while the operations run, and a recorder writes the number into
`Place.compiled`. Here operations in a row with one number become an `Op` of kind "fused":

1. It reads what its operations read of blocks that were there before them, each once.
2. It writes the blocks that are still there after it. The others vanish: such values stay in registers.
3. Where it is the last to read a block that a compiled graph has made, its result takes that block's place, if it is as
   large: a compiler writes there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from sim.mesh.program import Alloc, Event, Free, Op, Place, Program, Segment, Touch

__all__ = ["fuse", "fuse_events"]

_FUSABLE = frozenset({"memory", "random", "host", "fused"})
_NAMES_SHOWN = 4


def fuse(program: Program) -> Program:
    """Return the program with one operation for each kernel of what is compiled.

    What is not compiled, products of matrices, attention and communication stay as they are. The bytes that a kernel
    moves are those that its operations move to and from blocks that are there before or after them.

    Args:
        program: not changed.
    """
    sizes = {
        event.block: event.bytes
        for segment in program.segments.values()
        for event in segment.events
        if isinstance(event, Alloc)
    }
    own = set[int]().union(*[_made_by_compiled(part.events, program.places) for part in program.segments.values()])
    segments = {
        key: Segment(part.name, part.stage, part.variant, fuse_events(part.events, program.places, sizes, own))
        for key, part in program.segments.items()
    }
    return replace(program, segments=segments)


def fuse_events(
    events: Sequence[Event],
    places: Sequence[Place],
    sizes: Mapping[int, int],
    own: Collection[int] | None = None,
) -> list[Event]:
    """Return events with one operation for each kernel of what is compiled.

    >>> double = Op("aten.mul", "memory", 0, (Touch(1, 8),), (Touch(2, 8),), "float32", (), 0, 1)
    >>> negate = Op("aten.neg", "memory", 0, (Touch(2, 8),), (Touch(3, 8),), "float32", (), 0, 1)
    >>> recorded = [Alloc(2, 8, 0), double, Alloc(3, 8, 0), negate, Free(2)]
    >>> alloc, kernel = fuse_events(recorded, [Place("build"), Place("forward", compiled=1)], {1: 8, 2: 8, 3: 8})
    >>> kernel.name, kernel.reads, kernel.writes
    ('fused.mul_neg', (Touch(block=1, bytes=8),), (Touch(block=3, bytes=8),))

    Args:
        events: in the order of issue.
        places: that the events name.
        sizes: of blocks, in bytes, by number.
        own: blocks that compiled graphs have made, in whose place they may write. None: those made by these events.
    """
    result: list[Event] = []
    own = _made_by_compiled(events, places) if own is None else own
    for number, run in _runs(events, places):
        operations = [event for event in run if isinstance(event, Op)]
        if number and len(operations) > 1 and all(op.kind in _FUSABLE for op in operations):
            result += _one_kernel(run, operations, sizes, own)
        else:
            result += run
    return result


def _runs(events: Sequence[Event], places: Sequence[Place]) -> Iterator[tuple[int, list[Event]]]:
    """Yield the events of each kernel in a row, with its number, and what is between with 0.

    Taking and giving back memory goes with the operation before it; what is taken last, with the one after it.
    """
    number, run = 0, list[Event]()
    for event in events:
        if isinstance(event, (Alloc, Free)):
            run.append(event)
            continue
        new = places[event.place].compiled if isinstance(event, Op) else 0
        if new != number or not new:
            ahead = len(run)
            while ahead and isinstance(run[ahead - 1], Alloc):
                ahead -= 1
            yield number, run[:ahead]
            number, run = new, run[ahead:]
        run.append(event)
    yield number, run


def _made_by_compiled(events: Sequence[Event], places: Sequence[Place]) -> set[int]:
    return {
        touch.block
        for event in events
        if isinstance(event, Op) and places[event.place].compiled
        for touch in event.writes
    }


def _one_kernel(run: list[Event], operations: list[Op], sizes: Mapping[int, int], own: Collection[int]) -> list[Event]:
    taken = {event.block: event for event in run if isinstance(event, Alloc)}
    freed = {event.block for event in run if isinstance(event, Free)}
    read, written = dict[int, int](), dict[int, int]()
    for op in operations:
        for touch in op.reads:
            if touch.block not in taken and touch.block not in written:
                _add(read, touch, sizes)
        for touch in op.writes:
            if not (touch.block in taken and touch.block in freed):
                _add(written, touch, sizes)
    before: list[Event] = []
    after = [Free(block) for block in freed if block not in taken]
    new = [event for block, event in taken.items() if block not in freed]
    for event in new:
        fits = (free for free in after if free.block in read and sizes.get(free.block) == event.bytes)
        last = next((free for free in fits if free.block in own), None)
        if last is not None:
            after.remove(last)
            before.append(last)
    heaviest = max(operations, key=lambda op: op.bytes)
    kernel = Op(
        _name(operations),
        "fused",
        sum(op.flops for op in operations),
        tuple(Touch(block, size) for block, size in read.items()),
        tuple(Touch(block, size) for block, size in written.items()),
        heaviest.dtype,
        (),
        operations[-1].stream,
        operations[-1].place,
    )
    return [*before, *new, kernel, *after]


def _add(found: dict[int, int], touch: Touch, sizes: Mapping[int, int]) -> None:
    """Count what is touched of a block: two operations that touch half of it each touch it all, but no more."""
    whole = max(sizes.get(touch.block, 0), touch.bytes)
    found[touch.block] = min(whole, found.get(touch.block, 0) + touch.bytes)


def _name(operations: list[Op]) -> str:
    """Return a name made of those that a kernel's operations have most often."""
    names = Counter(op.name.rpartition(".")[2].strip("_") for op in operations if op.kind != "host")
    shown = [name for name, _ in names.most_common(_NAMES_SHOWN)]
    return "fused." + "_".join(shown)
