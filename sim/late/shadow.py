"""The record of a device that ranks share: what its streams have to do, as `check_races` follows it.

The device does the work, and nobody can look into its streams. So what a rank issues is entered a second time, as tasks
without work on the streams of a late device without memory. Whatever orders the streams orders the tasks, and two
accesses that nothing orders are found as on a late device.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from sim.late.device import LateDevice, apart
from sim.late.memory import Allocation, DeviceMemory, RaceReport
from sim.late.queue import Lane, LateQueue, LateTask
from sim.observers.races import accesses, is_harmless
from sim.ops import PLAIN, tensors_of

_KNOWS_VALUES = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_COPIES = ("copy_", "_to_copy")
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")  # whoever carries them out enters them
_ABOUT_STORAGES = ("set_", "resize_", "_has_compatible_shallow_copy_type")


class ShadowMemory(DeviceMemory):
    """The allocations of a rank, without memory of their own: whoever has them lets torch's allocator make them."""

    def enter(self, storage: torch.UntypedStorage, lane: Lane) -> Allocation:
        """The allocation of a storage; one that was not known has just been made on a stream.

        It may be memory that was given back there before, so it comes after that.
        """
        owned = self._of_storage.get(storage._cdata)
        if owned is not None and owned.allocation is not None:
            return owned.allocation
        self._take_back(lane)
        self._free.clear()
        size = storage.nbytes()
        allocation = Allocation(torch.UntypedStorage(size, device="meta"), size, lane)
        self.give(storage, allocation, poison=False)
        return allocation


class _Thread(threading.local):
    lane: Lane | None = None  # the stream that a thread was on when it last issued something, or that Python went to

    def __init__(self) -> None:
        self.in_backward: list[Lane] = []  # streams that C++ went to


class Shadow(LateDevice):
    """What one rank has issued to a device that it shares.

    Args:
        rank: Whose.
        kind: `cuda` or `npu`.
        current_stream: Says which stream of the device is current.
        queue: Of the shadows of all ranks.
        races: What is done about a race.
    """

    memory: ShadowMemory

    def __init__(
        self, rank: int, kind: str, current_stream: Callable[[], Any], queue: LateQueue, races: RaceReport
    ) -> None:
        super().__init__(rank, queue, races)
        self.kind = kind
        self.memory = ShadowMemory(rank, queue, races)
        self.is_blind = False  # while the rank's part of the device sees to something itself
        self._current_stream = current_stream
        self._lanes: dict[int, Lane] = {}
        self._marks: WeakKeyDictionary[Any, LateTask] = WeakKeyDictionary()
        self._thread = _Thread()

    @contextlib.contextmanager
    def blind(self) -> Iterator[None]:
        """Do not enter what streams and events are told meanwhile."""
        before, self.is_blind = self.is_blind, True
        try:
            yield
        finally:
            self.is_blind = before

    # -- streams -------------------------------------------------------------------------------------------------------

    def lane_of(self, stream: Any) -> Lane:
        """Where the tasks of a stream are; None: of the current one."""
        if stream is None:
            return self.current
        lane = self._lanes.get(stream.stream_id)
        if lane is None:
            title = f"stream {stream.stream_id}"
            lane = self._lanes[stream.stream_id] = self.queue.new_lane(self.rank, title)
        return lane

    def begin_on(self, stream: Any) -> None:
        """Let a stream be the rank's default one."""
        self._lanes[stream.stream_id] = self.default

    @property
    def current(self) -> Lane:
        """The lane of the stream that is current.

        In backward, C++ moves from stream to stream, and lets each wait for the one that it comes from.
        """
        lane, before = self.lane_of(self._current_stream()), self._thread.lane
        if before is not None and before is not lane and torch._C._current_graph_task_id() != -1:
            self.wait_for(lane, before.tail)
            self._thread.in_backward += [before, lane]
        self._thread.lane = lane
        return lane

    @current.setter
    def current(self, lane: Lane) -> None:
        raise AssertionError("the device's current stream is what it is")

    def moved(self) -> None:
        """Note that Python has made another stream current: nothing waits."""
        self._thread.lane = self.lane_of(self._current_stream())

    def mark(self, event: Any, stream: Any) -> None:
        """Enter that an event was recorded."""
        lane = self.lane_of(stream)
        self._marks.pop(event, None)
        if lane.tail is not None:
            self._marks[event] = lane.tail

    def wait_for_event(self, event: Any, stream: Any) -> None:
        """Enter that a stream waits for an event."""
        self.wait_for(self.lane_of(stream), self._marks.get(event))

    def wait_for_stream(self, stream: Any, other: Any) -> None:
        """Enter that a stream waits for another one."""
        self.wait_for(self.lane_of(stream), self.lane_of(other).tail)

    def finish_event(self, event: Any) -> None:
        """Enter that the host has waited for an event."""
        self.finish(self._marks.get(event))

    def finish_stream(self, stream: Any) -> None:
        """Enter that the host has waited for a stream."""
        self.finish(self.lane_of(stream).tail)

    def backward_returned(self) -> None:
        """Enter that the current stream waits for those on which C++ has run backward."""
        lane, self._thread.lane = self.lane_of(self._current_stream()), None
        for each in self._thread.in_backward:
            self.wait_for(lane, each.tail)
        self._thread.in_backward = []

    # -- operations ----------------------------------------------------------------------------------------------------

    def follow(self, op: Any, args: Any, kwargs: Any, found: Any) -> None:
        """Enter an operation of torch that the rank has issued.

        Args:
            op: Of torch.
            args: Its arguments.
            kwargs: Those by name.
            found: What has come out.
        """
        if op._opname in _ABOUT_STORAGES or op.namespace in _COLLECTIVES:
            return
        reads, writes = accesses(op, args, kwargs)
        made = [each for each in tensors_of((found,)) if not any(each is other for other in (*reads, *writes))]
        if op._opname == "record_stream":
            if self._is_here(args[0]):
                self.use_on(args[0], self.lane_of(args[1]))
            return
        if is_harmless(op):
            reads, writes = [], [] if not op._opname.startswith("new_") and not op._opname.endswith("_like") else made
        elif not op.is_view:
            writes = [*writes, *made]
        if any(map(self._is_here, (*reads, *writes))):
            with apart(), torch.inference_mode(False):
                self._enter(op, reads, writes, is_late=_is_late_copy(op, args, kwargs))

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.kind and type(tensor) in PLAIN

    def _enter(self, op: Any, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], *, is_late: bool) -> None:
        """Enter what an operation reads and writes; where it has to know values, or copies to the host, that waits."""
        task = self.put(self.current, f"{op.namespace}.{op._opname}")
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in filter(self._is_here, tensors):
                self.touch(task, tensor, self.twin(tensor), writes=writing)
        given, taken = ([each for each in tensors if not self._is_here(each)] for tensors in (reads, writes))
        on_host = [each for each in (*given, *taken) if each.device.type == "cpu" and each.dim()]
        if is_late and on_host and all(map(self.is_pinned, on_host)):
            self.share_with_host(task, given, taken)
        elif (op._opname in _COPIES and on_host) or _tells_values(op):
            self.finish(task)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether copies from and to a tensor of the host may be late."""
        return tensor.is_pinned()

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same part of memory without data."""
        storage = tensor.untyped_storage()
        memory: Any = self.memory.enter(storage, self.current).memory
        twin: Any = torch.empty(0, dtype=tensor.dtype, device="meta")
        found: torch.Tensor = twin.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
        return found


def _is_late_copy(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host has asked for a copy that it does not wait for."""
    names = [argument.name for argument in op._schema.arguments]
    place = names.index("non_blocking") if op._opname in _COPIES else len(args)
    return bool(args[place] if place < len(args) else kwargs.get("non_blocking"))


def _tells_values(op: Any) -> bool:
    """Whether the host knows values once an operation has returned, and so has waited for it."""
    return any("Tensor" not in str(result.type) for result in op._schema.returns) or any(
        tag in op.tags for tag in _KNOWS_VALUES
    )


# -- what it is told --------------------------------------------------------------------------------------------------

# By what a program calls, what is entered then, given what that has returned, and what it was called with.
EVENT: dict[str, Callable[..., None]] = {
    "record": lambda shadow, _, event, stream=None: shadow.mark(event, stream),
    "wait": lambda shadow, _, event, stream=None: shadow.wait_for_event(event, stream),
    "synchronize": lambda shadow, _, event: shadow.finish_event(event),
    "query": lambda shadow, done, event: shadow.finish_event(event) if done else None,
}
STREAM: dict[str, Callable[..., None]] = {
    "record_event": lambda shadow, event, stream, _=None: shadow.mark(event, stream),
    "wait_event": lambda shadow, _, stream, event: shadow.wait_for_event(event, stream),
    "wait_stream": lambda shadow, _, stream, other: shadow.wait_for_stream(stream, other),
    "synchronize": lambda shadow, _, stream: shadow.finish_stream(stream),
    "query": lambda shadow, done, stream: shadow.finish_stream(stream) if done else None,
    "__enter__": lambda shadow, _, stream: shadow.moved(),
    "__exit__": lambda shadow, _, stream, *error: shadow.moved(),
}
