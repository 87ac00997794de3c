"""Memory of a late device: allocations, their re-use in the order of streams, poison in what is not written yet."""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from sim.explain.errors import InFlightBufferRace, SimError
from sim.explain.lines import user_line
from sim.late.queue import Lane, LateQueue, LateTask
from sim.observers.races import Part, extent_of, overlap

_GRAIN = 512  # bytes: sizes are rounded up, so that memory is used again as a caching allocator does
_RELEASE = "the release"
_POISON = 0xFF  # in every byte: NaN as a float, -1 as an int


class RaceReport(NamedTuple):
    """What is done about a race.

    Attributes:
        fail: Ends the world.
        replay: The call that runs the same again.
    """

    fail: Callable[[BaseException], None]
    replay: Callable[[], str]


class MemoryTouch(NamedTuple):
    """One access of a task to a part of an allocation."""

    part: Part
    writes: bool
    task: LateTask


class Allocation:
    """A piece of a device's memory.

    Attributes:
        memory: Where it is on the host.
        size: Bytes that were asked for.
        lane: The stream on which it was allocated, and behind which it may be used again.
        users: The other streams that it must not be given back before (`record_stream`).
        touches: The accesses that a later one has to come after.
    """

    __slots__ = ("lane", "memory", "size", "touches", "users")

    def __init__(self, memory: torch.UntypedStorage, size: int, lane: Lane) -> None:
        self.memory = memory
        self.size = size
        self.lane = lane
        self.users: dict[Lane, None] = {}
        self.touches: list[MemoryTouch] = []


class Released(NamedTuple):
    """Memory that is given back and has not been used again.

    Attributes:
        allocation: The memory.
        line: Where it was given back.
        mark: Comes after what was issued by then to the streams that `record_stream` has named; None: it named none.
    """

    allocation: Allocation
    line: str
    mark: LateTask | None


class Owned(NamedTuple):
    """What is known of a storage of the device.

    Attributes:
        allocation: Its memory; None while it has none.
        room: The bytes with which it was made.
        gone: Releases it with its last reference.
    """

    allocation: Allocation | None
    room: int
    gone: weakref.ref[Any]


class DeviceMemory:
    """The caching allocator of one rank's device.

    As that of CUDA and of Ascend: freed memory may be used again at once behind the work of the stream on
    which it was allocated, and `record_stream` says of which other streams' work it has to wait for. Whoever reads it
    before he has written it, or after he has given it back, reads poison.

    Args:
        rank: Whose.
        queue: Of the world's work.
        races: What is done about a race; None: nobody looks for them.

    Attributes:
        allocated: Bytes in tensors now.
        reserved: Bytes that the device has taken from the host.
        watched: Whether races are looked for.
        history: What `torch.npu.memory._record_memory_history` has recorded, as memory_viz reads it; None: it is off.
        peak_allocated: The most that `allocated` was since `reset_peaks`.
        peak_reserved: The most that `reserved` was.
    """

    def __init__(self, rank: int, queue: LateQueue, races: RaceReport | None) -> None:
        self._rank = rank
        self._queue = queue
        self._races = races
        self.watched = races is not None
        self._allocator = queue.new_lane(rank, "the allocator")  # where it waits for other streams' work
        self._free: defaultdict[tuple[int, int], list[Allocation]] = defaultdict(list)  # by lane and rounded size
        self._released: list[Released] = []
        self._of_storage: dict[int, Owned] = {}
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.history: deque[dict[str, Any]] | None = None

    def allocate(self, size: int, lane: Lane) -> Allocation:
        """Find memory of a size in bytes, to be used behind a stream."""
        rounded = -(-size // _GRAIN) * _GRAIN
        self._take_back(lane)
        free = self._free[lane.index, rounded]
        if free:
            memory = free.pop().memory
        else:
            memory = torch.UntypedStorage(rounded)
            _fill(memory, rounded)
            self.reserved += rounded
            self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.allocated += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        allocation = Allocation(memory, size, lane)
        if self.history is not None:
            self.history.append(_event("alloc", allocation))
        return allocation

    def give(self, storage: torch.UntypedStorage, allocation: Allocation, *, poison: bool = True) -> None:
        """Let an allocation be the memory of a storage of the device, until that is gone or `release`d.

        Args:
            storage: The storage.
            allocation: Its memory.
            poison: Fill it, in the order of its stream; False: the next task there writes all of it.
        """
        key = storage._cdata
        known = self._of_storage.get(key)
        gone = known.gone if known else weakref.ref(storage, lambda _: self.release(key, forget=True))
        self._of_storage[key] = Owned(allocation, known.room if known else allocation.size, gone)
        if poison and allocation.size:
            self._poison(allocation, "the allocation", user_line())

    def allocation_of(self, storage: torch.UntypedStorage) -> Allocation:
        """The memory of a storage.

        Raises:
            SimError: It has none (any more), or it is of another rank.
        """
        found = self._of_storage.get(storage._cdata)
        if found is None or found.allocation is None:
            what = "memory that was given back" if found else f"memory that is not that of rank {self._rank}'s device"
            raise SimError(f"rank {self._rank} uses {what}\n  try: tensors that this rank has made, while they live")
        return found.allocation

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is on this device, with memory or without."""
        return storage._cdata in self._of_storage

    def size_of(self, storage: torch.UntypedStorage) -> int:
        """The bytes of memory that a storage has; 0 once they are given back."""
        allocation = self._of_storage[storage._cdata].allocation
        return 0 if allocation is None else allocation.size

    def room_of(self, storage: torch.UntypedStorage) -> int:
        """The bytes with which a storage was made."""
        return self._of_storage[storage._cdata].room

    def address_of(self, storage: torch.UntypedStorage) -> int:
        """Where the memory of a storage begins; 0 if it has none."""
        allocation = self._of_storage[storage._cdata].allocation
        return 0 if allocation is None or not allocation.size else allocation.memory.data_ptr()

    def release(self, key: int, *, forget: bool = False) -> None:
        """Take back the memory of a storage, if it has some.

        Args:
            key: The storage's `_cdata`.
            forget: The storage is gone; else it has only no memory now.
        """
        found = self._of_storage.pop(key, None)
        if found is None:
            return
        if not forget:
            self._of_storage[key] = found._replace(allocation=None)
        allocation = found.allocation
        if allocation is not None:
            self.allocated -= allocation.size
            if self.history is not None:
                self.history.append(_event("free_completed", allocation))
            line, mark = user_line(), None
            if allocation.users:
                mark = self._queue.put(self._allocator, "", line, after=[lane.tail for lane in allocation.users])
            self._released.append(Released(allocation, line, mark))

    def _take_back(self, lane: Lane) -> None:
        """Let memory be used again on its own stream, on which something is allocated now: that may get any of it.

        Other streams' work is waited for where `record_stream` has told of it. If there is more, it meets poison.
        """
        waiting = []
        for each in self._released:
            allocation = each.allocation
            if allocation.lane is not lane or (each.mark is not None and not each.mark.done):
                waiting.append(each)
                continue
            self._free[lane.index, allocation.memory.nbytes()].append(allocation)
            if allocation.size:
                self._poison(allocation, _RELEASE, each.line, each.mark)
        self._released = waiting

    def _poison(self, allocation: Allocation, what: str, line: str, mark: LateTask | None = None) -> None:
        # The mark has been come by. That orders this memory alone: on a device that is slower it had not been, other
        # memory had been taken, and whatever else comes behind the mark now had not.
        memory, size = allocation.memory, allocation.size
        task = self._queue.put(allocation.lane, what, line, lambda: _fill(memory, size))
        if self._races is not None:
            self.touch(task, allocation, _bytes_of(memory, size), writes=True, after=mark)

    # -- races ---------------------------------------------------------------------------------------------------------

    def touch(
        self, task: LateTask, allocation: Allocation, twin: torch.Tensor, *, writes: bool, after: LateTask | None = None
    ) -> None:
        """Note an access, and raise where it may come before one that it has to come after.

        Args:
            task: What accesses.
            allocation: Where.
            twin: The tensor, on the host.
            writes: It writes.
            after: Of which the access is known to come after, too.

        Raises:
            InFlightBufferRace: Nothing orders the two; names both lines.
        """
        if self._races is None or not twin.numel():
            return
        part = extent_of(twin)
        kept = []
        for touch in reversed(allocation.touches):  # the last one says most
            lane, number = touch.task.lane.index, touch.task.number
            ordered = task.comes_after(lane, number) or (after is not None and after.comes_after(lane, number))
            if (writes or touch.writes) and not ordered and overlap(part, touch.part):
                self._raise(task, twin, touch, writes=writes)
            covers = part.dense and part.first <= touch.part.first and part.last >= touch.part.last
            if not (ordered and covers and (writes or not touch.writes)):
                kept.append(touch)
        allocation.touches = [*reversed(kept), MemoryTouch(part, writes, task)]

    def _raise(self, task: LateTask, twin: torch.Tensor, first: MemoryTouch, *, writes: bool) -> None:
        shape = f"{str(first.part.tensor.dtype).removeprefix('torch.')} {list(first.part.tensor.shape)}"
        if task.what == _RELEASE:
            did = f"gives back memory to {task.lane.title} that {first.task.lane.title} still uses"
            hint = f"tensor.record_stream(stream), or let {task.lane.title} wait for that stream first"
        else:
            shape = f"{str(twin.dtype).removeprefix('torch.')} {list(twin.shape)}"
            verb, other = "writes" if writes else "reads", "writes" if first.writes else "reads"
            did = f"{verb} a buffer on {task.lane.title} that {first.task.lane.title} {other}, and nothing orders them"
            hint = f"let {task.lane.title} wait: stream.wait_stream(other), stream.wait_event(event), or work.wait()"
        assert self._races is not None
        error = InFlightBufferRace(
            f"rank {self._rank} {did}\n"
            f"  first: {first.task.line}, by {first.task.what}\n"
            f"  then:  {task.line}, by {task.what} on {shape}\n"
            f"  try: {hint}\n"
            f"  replay: {self._races.replay()}"
        )
        self._races.fail(error)
        raise error

    # -- statistics ----------------------------------------------------------------------------------------------------

    def reset_peaks(self) -> None:
        """Start the peaks afresh."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def record(self, most: int | None) -> None:
        """Record allocations from now on, the last `most` of them; None: no longer."""
        self.history = None if most is None else deque(maxlen=min(most, sys.maxsize))

    def snapshot(self) -> dict[str, Any]:
        """What memory there is, and what was recorded, as torch's memory_viz reads it: every allocation a segment."""
        segments = []
        for owned in self._of_storage.values():
            if owned.allocation is not None:
                event = _event("active_allocated", owned.allocation)
                block = {"state": event["action"], "requested_size": owned.allocation.size, **event}
                sizes = dict.fromkeys(("total_size", "allocated_size", "active_size"), event["size"])
                place = {"address": event["addr"], "stream": event["stream"], "segment_type": "small", "device": 0}
                segments.append({**place, **sizes, "blocks": [{**block, "address": event["addr"], "frames": []}]})
        return {"segments": segments, "device_traces": [list(self.history or ())]}

    def empty_cache(self) -> None:
        """Give memory that no tensor uses back to the host."""
        self.reserved -= sum(each.memory.nbytes() for free in self._free.values() for each in free)
        self._free.clear()


def _event(action: str, allocation: Allocation) -> dict[str, Any]:
    memory, stream = allocation.memory, allocation.lane.index
    frame = {"filename": user_line(), "line": 0, "name": ""}  # which names the line and the function, too
    address = memory.data_ptr() if allocation.size else 0
    return {"action": action, "addr": address, "size": memory.nbytes(), "stream": stream, "frames": [frame]}


def _bytes_of(memory: torch.UntypedStorage, size: int) -> torch.Tensor:
    whole: Any = torch.empty(0, dtype=torch.uint8, device=memory.device)
    found: torch.Tensor = whole.set_(memory, 0, (size,))
    return found


def _fill(memory: torch.UntypedStorage, size: int) -> None:
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        _bytes_of(memory, size).fill_(_POISON)
