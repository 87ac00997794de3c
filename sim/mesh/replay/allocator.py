"""Allocator of a device: its rules, and the trace of what is allocated."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sim.mesh.program import Alloc, Event, Free, Program

# torch's caching allocator as a model: which memory it takes from the device, and which pieces of it lie idle ---------
#
# Rules as in torch's `CUDACachingAllocator`, which `torch_npu` shares: sizes are rounded up to 512 bytes;
# requests of up to 1 MiB come from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, larger ones from segments
# of their own size, rounded up to 2 MiB; the smallest free block that is large enough is taken, and split if what is
# left is worth it; a block that comes back is joined with free neighbours. Blocks belong to the stream that they were
# taken on.

MIB = 1 << 20
_SMALL, _SMALL_SEGMENT = MIB, 2 * MIB  # the largest request of the small pool, and what that takes at once
_LARGE, _LARGE_SEGMENT = 10 * MIB, 20 * MIB  # requests from here on have segments of their own; the others share these
_ROUND_SEGMENT = 2 * MIB  # of which own segments are multiples
_FAR = 1 << 30  # pages between ranges that expand


@dataclass(frozen=True)
class AllocatorRules:
    """Parameters of an allocator, in bytes.

    Attributes:
        caching: whether it keeps what is freed; if not, reserved is allocated.
        expandable: `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`: one range of addresses per stream and pool, that
            grows by pages.
        limit: what the device can give; before it passes that, it returns cached segments. None: no limit.
        round_to: sizes are multiples of this.
    """

    caching: bool = True
    expandable: bool = False
    limit: int | None = None
    round_to: int = 512


CACHING = AllocatorRules()
"""Of CUDA and NPU devices, as they are set without environment variables."""
PLAIN = AllocatorRules(caching=False, round_to=64)
"""Of a CPU: nothing is kept; malloc aligns to 64 bytes."""


class MemoryBlock:
    """A piece of a segment; `asked` is the size that was wanted of it."""

    __slots__ = ("address", "after", "arena", "asked", "before", "free", "size")

    def __init__(self, size: int, address: int, arena: _Arena) -> None:
        self.size = self.asked = size
        self.address = address
        self.arena = arena
        self.free = False
        self.before: MemoryBlock | None = None
        self.after: MemoryBlock | None = None


class _Arena:
    """Blocks of one stream and pool: the free ones by size, then address."""

    __slots__ = ("free", "heads", "least_rest", "small", "tail")

    def __init__(self, small: bool, least_rest: int) -> None:
        self.small = small
        self.least_rest = least_rest  # a block is split if at least this is left of it
        self.free: list[tuple[int, int, MemoryBlock]] = []
        self.heads: dict[int, MemoryBlock] = {}  # first block of each segment
        self.tail: MemoryBlock | None = None  # of the one segment that grows


class CachingAllocator:
    """Allocates and frees blocks, and knows the totals.

    >>> allocator = CachingAllocator(CACHING)
    >>> block = allocator.take(3 * MIB, stream=0)
    >>> allocator.allocated // MIB, allocator.reserved // MIB
    (3, 20)
    >>> allocator.give(block)
    >>> allocator.allocated, allocator.reserved // MIB
    (0, 20)

    Attributes:
        allocated: bytes of blocks that are in use, as `torch.cuda.memory_allocated` counts them.
        reserved: bytes taken from the device, as `torch.cuda.memory_reserved`.
        peak_reserved: the most of `reserved` so far, as `torch.cuda.max_memory_reserved`; set it to begin anew.
        retries: how often cached segments had to be returned to stay within the limit.
        missing: bytes by which the limit was passed all the same; 0: it fits.
    """

    def __init__(self, rules: AllocatorRules) -> None:
        self.rules = rules
        self.allocated = 0
        self.reserved = 0
        self.peak_reserved = 0
        self.retries = 0
        self.missing = 0
        self._arenas: dict[tuple[int, bool], _Arena] = {}
        self._next_address = 0

    def take(self, size: int, stream: int) -> MemoryBlock:
        """Return a block of at least `size` bytes."""
        rules = self.rules
        asked, size = size, -(-size // rules.round_to) * rules.round_to
        small = size <= _SMALL
        arena = self._arenas.get((stream, small))
        if arena is None:
            least_rest = rules.round_to if small or rules.expandable else _SMALL + 1
            arena = self._arenas[stream, small] = _Arena(small, least_rest)
        if not rules.caching:
            self.allocated += size
            self.reserved = self.allocated
            self.peak_reserved = max(self.peak_reserved, self.reserved)
            block = MemoryBlock(size, 0, arena)
            block.asked = asked
            return block
        free = arena.free
        at = bisect_left(free, (size,))
        if rules.expandable and at < len(free) - 1 and free[at][2] is arena.tail:
            at += 1  # what can grow counts as the largest
        block = free.pop(at)[2] if at < len(free) else self._grow(arena, size)
        rest = block.size - size
        if rest >= arena.least_rest:
            other = MemoryBlock(rest, block.address + size, arena)
            other.free = True
            other.before = block
            after = other.after = block.after
            if after is not None:
                after.before = other
            elif block is arena.tail:
                arena.tail = other
            block.after = other
            block.size = size
            insort(free, (rest, other.address, other))
        block.free = False
        block.asked = asked
        self.allocated += block.size
        return block

    def give(self, block: MemoryBlock) -> None:
        """Take a block back."""
        self.allocated -= block.size
        if not self.rules.caching:
            self.reserved = self.allocated
            return
        arena = block.arena
        free = arena.free
        before, after = block.before, block.after
        if after is not None and after.free:
            del free[bisect_left(free, (after.size, after.address))]
            self._join(block, after)
        if before is not None and before.free:
            del free[bisect_left(free, (before.size, before.address))]
            self._join(before, block)
            block = before
        block.free = True
        insort(free, (block.size, block.address, block))

    def release_cached(self) -> None:
        """Return to the device what is free: whole segments, or whole pages of the one that expands."""
        for arena in self._arenas.values():
            page = self._page(arena)
            for size, address, block in list(arena.free):
                if self.rules.expandable:
                    self._unmap(arena, block, page)
                elif block.before is None and block.after is None:
                    del arena.free[bisect_left(arena.free, (size, address))]
                    del arena.heads[address]
                    self.reserved -= size

    def state(self, name: Callable[[MemoryBlock], object]) -> tuple[object, ...]:
        """Return all that later calls depend on: free and used blocks in the order of their addresses.

        Two moments with equal states behave alike from then on.

        Args:
            name: of a block in use.
        """
        found: list[object] = []
        for key, arena in self._arenas.items():
            found.append(key)
            for address in sorted(arena.heads):
                block: MemoryBlock | None = arena.heads[address]
                found.append("segment")
                while block is not None:
                    found.append((block.size, "free" if block.free else name(block)))
                    block = block.after
        return tuple(found)

    def _page(self, arena: _Arena) -> int:
        return _SMALL_SEGMENT if arena.small else _LARGE_SEGMENT

    def _grow(self, arena: _Arena, size: int) -> MemoryBlock:
        """Take memory from the device and return it as a block that is in no free list."""
        wanted = self._from_device(arena, size)
        if self.rules.limit is not None and self.reserved + wanted > self.rules.limit:
            self.release_cached()
            self.retries += 1
            wanted = self._from_device(arena, size)
            self.missing = max(self.missing, self.reserved + wanted - self.rules.limit)
        self.reserved += wanted
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        tail = arena.tail if self.rules.expandable else None
        if tail is not None and tail.free:
            del arena.free[bisect_left(arena.free, (tail.size, tail.address))]
            tail.size += wanted
            return tail
        if tail is None:
            block = MemoryBlock(wanted, self._next_address, arena)
            arena.heads[block.address] = block
            # Ranges that expand must not run into each other.
            self._next_address += wanted if not self.rules.expandable else _FAR * _LARGE_SEGMENT
        else:
            block = MemoryBlock(wanted, tail.address + tail.size, arena)
            block.before, tail.after = tail, block
        arena.tail = block
        return block

    def _from_device(self, arena: _Arena, size: int) -> int:
        if not self.rules.expandable:
            if size < _LARGE:
                return self._page(arena)
            return -(-size // _ROUND_SEGMENT) * _ROUND_SEGMENT
        page = self._page(arena)
        at_hand = arena.tail.size if arena.tail is not None and arena.tail.free else 0
        return -(-(size - at_hand) // page) * page

    def _unmap(self, arena: _Arena, block: MemoryBlock, page: int) -> None:
        """Return the whole pages inside of a free block; their addresses stay behind as a gap that nothing uses."""
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if end <= start:
            return
        del arena.free[bisect_left(arena.free, (block.size, block.address))]
        self.reserved -= end - start
        left, right = start - block.address, block.address + block.size - end
        gap = MemoryBlock(end - start, start, arena)
        gap.before, gap.after = block.before, block.after
        if left:
            block.size = left
            gap.before, block.after = block, gap
            insort(arena.free, (left, block.address, block))
        elif gap.before is not None:
            gap.before.after = gap
        else:
            del arena.heads[block.address]
            arena.heads[start] = gap
        if right:
            rest = MemoryBlock(right, end, arena)
            rest.free = True
            rest.before, rest.after, gap.after = gap, gap.after, rest
            insort(arena.free, (right, end, rest))
        last = gap.after if right else gap
        if last is not None and last.after is not None:
            last.after.before = last
        if arena.tail is block and last is not None:
            arena.tail = last

    @staticmethod
    def _join(left: MemoryBlock, right: MemoryBlock) -> None:
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        if right.arena.tail is right:
            right.arena.tail = left


# A program reduced to what it allocates and frees, and the part of its order that repeats itself ---------------------


class Taking(NamedTuple):
    """A block allocated (`size` bytes) or freed (-1) by a segment; one per micro-batch or one in all."""

    block: int
    size: int
    stream: int
    each: bool
    event: int


_Change = tuple[int, int, int, int]
"""A block, its size or -1, its stream, and the number of the event."""


def _of_memory(events: list[Event]) -> list[_Change]:
    found: list[_Change] = []
    for at, event in enumerate(events):
        kind = type(event)  # there are very many: `isinstance` takes three times as long
        if kind is Alloc:
            found.append((*event, at))
        elif kind is Free:
            found.append((event[0], -1, 0, at))  # type: ignore[arg-type]
    return found


class MemoryPlan:
    """A program reduced to what concerns memory: the device's, or the host's.

    Args:
        program: of a rank.
        on_host: which of the two.
    """

    def __init__(self, program: Program, *, on_host: bool = False) -> None:
        self.program = program
        events = {key: _of_memory(segment.events) for key, segment in program.segments.items()}
        if program.on_host or on_host:
            hosted = program.on_host
            events = {key: [each for each in found if (each[0] in hosted) == on_host] for key, found in events.items()}
        self.stride = 1 + max([0, *[block for found in events.values() for block, _, _, _ in found]])
        once = self._once(events)
        empty = {block for found in events.values() for block, size, _, _ in found if not size}
        self.memory: dict[tuple[str, int, str], list[Taking]] = {
            key: [
                Taking(block, size, stream, block not in once, at)
                for block, size, stream, at in found
                if block not in empty
            ]
            for key, found in events.items()
        }

    def _once(self, events: dict[tuple[str, int, str], list[_Change]]) -> set[int]:
        """Blocks of which there is one, rather than one for each micro-batch.

        A block is per micro-batch if some micro-batch runs both a segment that takes it and one that gives it back.
        """
        batches: defaultdict[tuple[str, int, str], set[int]] = defaultdict(set)
        for key, batch in self.program.order:
            batches[key].add(batch)
        nobody, nothing = {-1}, frozenset[int]()
        taken: dict[int, set[int]] = {}
        given: dict[int, set[int]] = {}
        for key, found in events.items():
            of_key = batches[key] or nobody
            for side, is_free in ((taken, False), (given, True)):
                new = dict.fromkeys([block for block, size, _, _ in found if (size < 0) is is_free], of_key)
                for block in side.keys() & new.keys():
                    new[block] = side[block] | of_key
                side.update(new)
        once = set()
        for block, by in taken.items():
            others = given.get(block, nothing)
            if -1 in by or -1 in others or by.isdisjoint(others):
                once.add(block)
        return once

    def count(self, start: int, end: int) -> int:
        """Return how many blocks are allocated or freed between two positions of the order."""
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
