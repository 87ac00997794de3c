"""Replay of a program's memory: peak allocated and reserved bytes, by category, and the peak's place in the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sim.mesh.program import Alloc, Comm, Event, Op, Place, Program, Segment
from sim.mesh.replay.allocator import (
    CACHING,
    AllocatorRules,
    CachingAllocator,
    MemoryBlock,
    MemoryPlan,
    Pattern,
    find_pattern,
)

ROUNDING = "rounding"
"""Category of what blocks are larger than asked for, because the allocator did not split them."""
OTHER = "other"
"""Category of blocks that the program names none for."""
_FINEST = 0.004  # share of the peak: the curve leaves out smaller changes
_MOST_POINTS = 20_000


class CurvePoint(NamedTuple):
    """Memory in use at a moment of the steady step.

    Attributes:
        position: in `Program.order`; -1: before it.
        event: its number in the segment.
        totals: bytes by category, in the order of `ClassMemory.categories`.
        reserved: bytes taken from the device.
    """

    position: int
    event: int
    totals: tuple[int, ...]
    reserved: int


@dataclass(frozen=True)
class ClassMemory:
    """Memory of a rank class in the second step, because the optimizer allocates its state only in the first.

    Attributes:
        rank: global rank that represents the class.
        like: number of ranks in the class.
        peak_allocated: bytes, as counted by `torch.cuda.max_memory_allocated`.
        peak_reserved: bytes, as counted by `torch.cuda.max_memory_reserved`.
        at: place in the step of `peak_allocated`, e.g. `backward of layers.3`.
        by_category: bytes at that moment, largest first; they sum to `peak_allocated`.
        context_bytes: bytes outside torch's allocator: the device's context and communicators.
        first_allocated: peak allocated bytes of the first step.
        first_reserved: peak reserved bytes of the first step.
        persistent: bytes in use between steps.
        retries: number of times in both steps that cached memory was returned to the device to stay within its limit.
        missing: bytes above the limit in spite of that; 0: it fits.
        blocks: number of allocations and frees in both steps.
        skipped: number of them that the replay skipped as repetitions.
        categories: in the order of `CurvePoint.totals`.
        curve: memory over the steady step.
        unmatched: frees in the second step of blocks that were not in use; not 0: an error of the recording.
        on_host: bytes in the host's memory by category, at their peak in the second step, largest first.
        held: pairs of weight bytes and number of ranks that hold that many, see `Program.held`.
    """

    rank: int
    like: int
    peak_allocated: int
    peak_reserved: int
    at: str
    by_category: dict[str, int]
    context_bytes: int = 0
    first_allocated: int = 0
    first_reserved: int = 0
    persistent: int = 0
    retries: int = 0
    missing: int = 0
    blocks: int = 0
    skipped: int = 0
    categories: tuple[str, ...] = ()
    curve: list[CurvePoint] = field(default_factory=list, repr=False)
    unmatched: int = 0
    on_host: dict[str, int] = field(default_factory=dict)
    held: tuple[tuple[int, int], ...] = ()

    @property
    def host_bytes(self) -> int:
        """Peak bytes in the host's memory."""
        return sum(self.on_host.values())


def replay_memory(
    program: Program, rules: AllocatorRules | None = CACHING, *, context_bytes: int = 0, cut: bool = True
) -> ClassMemory:
    """Replay a program's allocations and frees: the build of the model, then two steps.

    Each micro-batch has its own instance of the blocks that its forward allocates and its backward frees. Other blocks
    exist once: those allocated or freed outside of micro-batches, e.g. accumulated gradients, and those never freed.

    Repetitions of a long schedule are skipped without an effect on the result. A repetition is found when the allocator
    is, block by block, in a state that it had before at the same point of the schedule's pattern.

    Args:
        program: of a rank.
        rules: rules of the allocator. None: no allocator; sizes are rounded up to 512 bytes, and reserved equals
            allocated.
        context_bytes: stored in the result.
        cut: skip repetitions.
    """
    plan = MemoryPlan(program)
    replay = _Replay(plan, rules if rules is not None else AllocatorRules(caching=False), cut)
    first, persistent, second = replay.all()
    totals, curve = _by_category(plan, replay.between, first, second)
    by_category = {name: size for name, size in totals.items() if size}
    rest = second.allocated - sum(by_category.values())
    if rest:
        by_category[ROUNDING] = rest
    on_host: dict[str, int] = {}
    if program.on_host:
        hosts = MemoryPlan(program, on_host=True)
        replay_of_host = _Replay(hosts, AllocatorRules(caching=False), cut)
        begun, _, ended = replay_of_host.all()
        of_host, _ = _by_category(hosts, replay_of_host.between, begun, ended)
        on_host = {name: size for name, size in of_host.items() if size}
    return ClassMemory(
        rank=program.rank,
        like=program.like,
        peak_allocated=second.allocated,
        peak_reserved=second.reserved,
        at=_describe(plan, second.position, second.index),
        by_category=dict(sorted(by_category.items(), key=lambda item: -item[1])),
        context_bytes=context_bytes,
        first_allocated=first.allocated,
        first_reserved=first.reserved,
        persistent=persistent,
        retries=replay.retries + replay.allocator.retries,
        missing=replay.allocator.missing,
        blocks=2 * sum(len(plan.memory[key]) for key, _ in program.order),
        skipped=sum(plan.count(jump.start, jump.end) for step in (first, second) for jump in step.jumps),
        categories=tuple(totals),
        curve=curve,
        unmatched=second.unmatched,
        on_host=dict(sorted(on_host.items(), key=lambda item: -item[1])),
        held=program.held,
    )


def with_workspaces(program: Program, size: int) -> Program:
    """Return a copy of a program that allocates cuBLAS workspaces after the build of the model.

    Torch gives cuBLAS one workspace per handle and stream, and never frees it. Each thread has its own handle, and
    backward runs in autograd's thread, so forward and backward count separately.

    Args:
        program: of a rank.
        size: bytes of a workspace; 0: no workspace.
    """
    users = set()
    last = 0
    for segment in program.segments.values():
        for event in segment.events:
            if type(event) is Alloc:
                last = max(last, event.block)
            elif type(event) is Op and event.kind == "matmul":
                users.add((program.places[event.place].phase == "backward", event.stream))
    if not size or not users:
        return program
    blocks: list[Event] = [Alloc(last + at, size, stream) for at, (_, stream) in enumerate(sorted(users), 1)]
    built = ("build", -1, "workspaces")
    categories = program.categories | {block.block: "workspace" for block in blocks if type(block) is Alloc}
    return replace(program, segments=program.segments | {built: Segment(*built, blocks)}, categories=categories)


class _Jump(NamedTuple):
    """A skipped range of positions, `start` to `end`: it repeats the one from `like`, `shift` micro-batches later."""

    start: int
    end: int
    like: int
    shift: int


@dataclass
class _Step:
    """Result of the replay of a step."""

    allocated: int = 0
    position: int = -1
    index: int = -1
    reserved: int = 0
    unmatched: int = 0
    jumps: list[_Jump] = field(default_factory=list)
    reserved_after: dict[int, int] = field(default_factory=dict)


class _Replay:
    """Replay with an allocator; block numbers of micro-batch n are `stride * (n + 1)` higher."""

    def __init__(self, plan: MemoryPlan, rules: AllocatorRules, cut: bool) -> None:
        self.plan = plan
        self.allocator = CachingAllocator(rules)
        self.live: dict[int, MemoryBlock] = {}
        self.between: dict[int, int] = {}  # requested bytes of the blocks in use between the steps
        self.retries = 0  # in skipped repetitions
        self.pattern = find_pattern(plan.program.order) if cut else None
        self.found = _Step()

    def all(self) -> tuple[_Step, int, _Step]:
        """Replay the build of the model and two steps; return the first step, the bytes in use after it, the second."""
        for key in self.plan.program.segments:
            if key[0] == "build":
                self.item(key, -1, -1)
        first, persistent = self.step(), self.allocator.allocated
        self.between = {number: block.asked for number, block in self.live.items()}
        return first, persistent, self.step()

    def step(self) -> _Step:
        """Replay a step."""
        self.found = _Step(self.allocator.allocated)
        self.allocator.peak_reserved = self.allocator.reserved
        order = self.plan.program.order
        seen: dict[object, tuple[int, int]] = {}
        position = 0
        while position < len(order):
            if self.pattern is not None and self.pattern.starts(position):
                position = self._jump(self.pattern, position, seen)
                if position == len(order):
                    break
            self.item(*order[position], position)
            self.found.reserved_after[position] = self.allocator.reserved
            position += 1
        # Track the peak inside the allocator, not after each segment: a segment may free blocks, or return cached
        # memory to the device, so its own peak would be missed.
        self.found.reserved = self.allocator.peak_reserved
        return self.found

    def item(self, key: tuple[str, int, str], batch: int, position: int) -> None:
        """Replay a segment for a micro-batch."""
        allocator, live, found = self.allocator, self.live, self.found
        take, give = allocator.take, allocator.give
        shift = self.plan.stride * (batch + 1)
        peak = found.allocated
        for block, size, stream, each, index in self.plan.memory[key]:
            handle = block + shift if each else block
            if size < 0:
                used = live.pop(handle, None)
                if used is not None:
                    give(used)
                else:
                    found.unmatched += 1
            elif handle not in live:
                live[handle] = take(size, stream)
                if allocator.allocated > peak:
                    peak = found.allocated = allocator.allocated
                    found.position, found.index = position, index

    def _jump(self, pattern: Pattern, position: int, seen: dict[object, tuple[int, int]]) -> int:
        """Return the position to continue from: later than `position` if the allocator's state repeats."""
        stride = self.plan.stride
        moved = stride * pattern.shift * ((position - pattern.start) // pattern.length)
        names = {id(block): (n - moved if n >= stride else n) for n, block in self.live.items()}
        state = self.allocator.state(lambda block: names.get(id(block), "gap"))
        if state not in seen:
            seen[state] = (position, self.allocator.retries)
            return position
        like, retries = seen[state]
        cycle = position - like
        times = (pattern.end - position) // cycle
        if times == 0:
            return position
        shift = times * pattern.shift * (cycle // pattern.length)
        self.live = {(n + stride * shift if n >= stride else n): block for n, block in self.live.items()}
        self.retries += times * (self.allocator.retries - retries)
        self.found.jumps.append(_Jump(position, position + times * cycle, like, shift))
        seen.clear()
        return position + times * cycle


class _Walk:
    """Bytes in use by category in the second step, without an allocator."""

    def __init__(self, plan: MemoryPlan, between: dict[int, int]) -> None:
        self.plan = plan
        self.names = list(dict.fromkeys([*plan.program.categories.values(), OTHER]))
        self.totals = [0] * len(self.names)
        self.live: dict[int, tuple[int, int]] = {}
        self.points: list[CurvePoint] = []
        self.numbers = {name: at for at, name in enumerate(self.names)}
        for number, asked in between.items():
            used = self.live[number] = (self._category(number % plan.stride), -(-asked // 512) * 512)
            self.totals[used[0]] += used[1]

    def _category(self, block: int) -> int:
        return self.numbers[self.plan.program.categories.get(block, OTHER)]

    def item(self, key: tuple[str, int, str], batch: int) -> Iterator[tuple[int, int]]:
        """Replay a segment; after each change of a block, yield the index of its event and the change in bytes."""
        shift = self.plan.stride * (batch + 1)
        live, totals, category = self.live, self.totals, self._category
        for block, size, _, each, index in self.plan.memory[key]:
            handle = block + shift if each else block
            if size < 0:
                used = live.pop(handle, None)
                if used is None:
                    continue
                totals[used[0]] -= used[1]
                yield index, -used[1]
            elif handle not in live:
                used = live[handle] = (category(block), -(-size // 512) * 512)
                totals[used[0]] += used[1]
                yield index, used[1]

    def step(self, found: _Step) -> dict[str, int]:
        """Replay the step with the found jumps; return the totals at its peak, and record the curve."""
        order, stride = self.plan.program.order, self.plan.stride
        jumps = {jump.start: jump for jump in found.jumps}
        at_peak = list(self.totals)
        reserved, kept, finest = 0, -1, max(1, int(_FINEST * found.allocated))
        starts: dict[int, int] = {}
        position, total = 0, sum(self.totals)
        while position < len(order):
            jump = jumps.get(position)
            if jump is not None:
                self._repeat(jump, starts)
                by = stride * jump.shift  # renumber the blocks in use to those of later micro-batches
                self.live = {(n + by if n >= stride else n): used for n, used in self.live.items()}
                position = jump.end
                continue
            starts[position] = len(self.points)
            key, batch = order[position]
            reserved = found.reserved_after.get(position, reserved)
            for index, change in self.item(key, batch):
                total += change
                is_peak = position == found.position and index == found.index
                if is_peak:
                    at_peak = list(self.totals)
                if is_peak or abs(total - kept) >= finest:
                    kept = total
                    # `reserved` is of the segment's end; within it, at least the bytes in use are reserved.
                    self.points.append(CurvePoint(position, index, tuple(self.totals), max(reserved, kept)))
            position += 1
        return dict(zip(self.names, at_peak, strict=True))

    def _repeat(self, jump: _Jump, starts: dict[int, int]) -> None:
        """Copy the points of one repetition for all skipped ones."""
        cycle = self.points[starts[jump.like] :]
        for by in range(jump.start - jump.like, jump.end - jump.like, jump.start - jump.like):
            if len(self.points) + len(cycle) > _MOST_POINTS:
                return
            self.points.extend([point._replace(position=point.position + by) for point in cycle])


def _by_category(
    plan: MemoryPlan, between: dict[int, int], first: _Step, second: _Step
) -> tuple[dict[str, int], list[CurvePoint]]:
    """Return the bytes by category at the peak of the second step, and the curve of that step."""
    walk = _Walk(plan, between)
    left = first.reserved_after[max(first.reserved_after)] if first.reserved_after else first.reserved
    walk.points.append(CurvePoint(-1, 0, tuple(walk.totals), left))
    totals = walk.step(second)
    points, each = walk.points, -(-len(walk.points) // _MOST_POINTS)  # thin out, keeping the highest of neighbours
    highest = (max(points[at : at + each], key=lambda it: sum(it.totals)) for at in range(0, len(points), each))
    return totals, list(highest)


def _describe(plan: MemoryPlan, position: int, index: int) -> str:
    """Return an event's place in words, e.g. `backward of layers.3 of micro-batch 2`."""
    program = plan.program
    if position < 0:
        return "between steps"
    key, batch = program.order[position]
    events = program.segments[key].events
    near = [*events[index:], *reversed(events[:index])]
    number = next((event.place for event in near if isinstance(event, Op | Comm)), None)
    place = program.places[number] if number is not None and number < len(program.places) else Place(key[0])
    words = [place.phase]
    if place.module:
        words.append(f"of {place.module}")
    elif place.layer is not None:
        words.append(f"of layer {place.layer}")
    if place.recomputes:
        words.append("(recomputed)")
    if batch >= 0 and len({number for _, number in program.order if number >= 0}) > 1:
        words.append(f"of micro-batch {batch}")
    if len(program.stages) > 1 and key[1] >= 0:
        words.append(f"of stage {key[1]}")
    return " ".join(words)
