"""The late device of one rank: its streams, its memory, and the tensors on it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from sim.explain.errors import SimError
from sim.explain.lines import user_line
from sim.kernel.context import current_context
from sim.late.memory import DeviceMemory, RaceReport
from sim.late.queue import Lane, LateQueue, LateTask
from sim.observers.races import Flights

_CPU = torch._C.DispatchKey.CPU
_ATEN = torch.ops.aten


class apart:  # noqa: N801 - a context manager, and no generator: one begins with every operation
    """Keep the modes of the calling thread away from what the device does on the host."""

    __slots__ = ("_guards",)

    def __enter__(self) -> None:
        self._guards = (
            torch._C.DisableTorchFunction(),
            torch._C._DisableTorchDispatch(),
            torch._C._AutoDispatchBelowAutograd(),
        )
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *error: Any) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(*error)


@contextmanager
def as_device() -> Iterator[None]:
    """Let work of devices run as such, whatever modes and whichever grad mode the thread has that lets it run."""
    with apart(), torch.inference_mode(False), torch.no_grad():
        yield


class _Current(threading.local):
    lane: Lane | None = None


class LateDevice:
    """The accelerator of one rank.

    Args:
        rank: Whose.
        queue: Of the world's work.
        races: What is done about a race; None: nobody looks for them.

    Attributes:
        queue: Of the world's work.
        memory: Its allocator.
        default: The stream on which work is issued if no other is current.
        join: Waits until all ranks have joined what this one communicates.
    """

    def __init__(self, rank: int, queue: LateQueue, races: RaceReport | None) -> None:
        self.rank = rank
        self.queue = queue
        self.memory = DeviceMemory(rank, queue, races)
        self.default = queue.new_lane(rank, "the default stream")
        self._streams = [self.default]
        self._current = _Current()  # by thread, as on any device
        self._seen: dict[int, int] = {}  # the clock of what the host has waited for
        self._pinned: dict[int, weakref.ref[Any]] = {}
        self.flights: Flights | None = None  # where copies are entered that the host must not interfere with
        self._shared: list[LateTask] = []
        self.raised: BaseException | None = None  # by a hook of the backward that runs
        self.join: Callable[[], None] = lambda: None

    # -- streams -------------------------------------------------------------------------------------------------------

    @property
    def current(self) -> Lane:
        """The calling thread's stream."""
        return self._current.lane or self.default

    @current.setter
    def current(self, lane: Lane) -> None:
        self._current.lane = lane

    def new_stream(self) -> int:
        """Make a stream; returns its number."""
        number = len(self._streams)
        self._streams.append(self.queue.new_lane(self.rank, f"stream {number}"))
        return number

    def stream(self, number: int) -> Lane:
        """The stream of a number."""
        return self._streams[number]

    def number_of(self, lane: Lane) -> int:
        """The number of a stream."""
        return self._streams.index(lane)

    def put(
        self,
        lane: Lane,
        what: str,
        run: Callable[[], object] | None = None,
        after: Sequence[LateTask | None] = (),
        *,
        held: bool = False,
    ) -> LateTask:
        """Issue work to a stream, behind what the host has waited for."""
        return self.queue.put(lane, what, user_line(), run, after, self._seen, held=held)

    def wait_for(self, lane: Lane, task: LateTask | None) -> None:
        """Let what is issued to a stream from now on come after a task."""
        if task is not None and task is not lane.tail:
            self.put(lane, "a wait", after=[task])

    def finish(self, task: LateTask | None) -> None:
        """Let the host wait for a task."""
        if task is None:
            return
        self.queue.finish(task)
        for lane, number in task.clock.items():
            self._seen[lane] = max(number, self._seen.get(lane, 0))
        over = [each for each in self._shared if self._seen.get(each.lane.index, 0) >= each.number]
        for each in over:
            self._shared.remove(each)
            if self.flights is not None:
                self.flights.complete(each)

    def advance(self) -> None:
        """Let the device run one task: somebody asks whether something is done."""
        self.queue.advance()

    def finish_all(self) -> None:
        """Let the host wait for all that was issued, and so for the ranks that have not joined an operation yet."""
        self.join()
        for lane in self.queue.lanes_of(self.rank):
            self.finish(lane.tail)

    # -- communication ---------------------------------------------------------------------------------------------

    kind = "npu"

    def lane_of_group(self, title: str) -> Lane:
        """A stream for what a group communicates."""
        return self.queue.new_lane(self.rank, title)

    def begin(self, lane: Lane, what: str) -> tuple[LateTask, LateTask]:
        """Issue an operation to a group's stream, behind the current one: its beginning, and its end, which is held."""
        return self.put(lane, what, after=[self.current.tail]), self.put(lane, what, held=True)

    def use(self, end: LateTask, lane: Lane, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Note which tensors an operation reads and writes until its end."""
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                self.touch(end, tensor, self.twin(tensor), writes=writing)
                self.use_on(tensor, lane)

    def reach(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor through which whoever carries out an operation gets at one of the device."""
        return self.twin(tensor)

    def move(self, sides: Sequence[Any], run: Callable[[], None]) -> None:
        """Issue what comes after the beginning of all sides, and before the end of each."""
        first = sides[0].begins
        task = self.queue.put_apart(first.what, first.line, run, [side.begins for side in sides])
        for side in sides:
            self.queue.release(side.ends, [task])

    def wait(self, end: LateTask) -> None:
        """Let the current stream wait for the end of an operation."""
        self.wait_for(self.current, end)

    def forget(self) -> None:
        """Nothing is kept for operations that nobody has waited for."""

    # -- tensors -------------------------------------------------------------------------------------------------------

    def new_tensor(
        self, size: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype, *, poison: bool = True
    ) -> torch.Tensor:
        """A tensor on the device; without strides, a contiguous one.

        Args:
            size: Its shape.
            stride: Its strides.
            dtype: Its dtype.
            poison: Fill it; False: the next task writes all of it.
        """
        if stride is None:
            stride = _contiguous(size)
        reach = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        allocation = self.memory.allocate(reach * dtype.itemsize, self.current)
        whole = _with_room(dtype, reach, allocation.memory)
        storage = whole.untyped_storage()
        self.memory.give(storage, allocation, poison=poison)
        return _set(whole, storage, 0, size, stride)

    def view(
        self,
        tensor: torch.Tensor,
        size: Sequence[int],
        stride: Sequence[int],
        offset: int,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Another tensor over the same memory; the offset is that in the storage, in elements of its own."""
        new = tensor.data if dtype in (None, tensor.dtype) else torch._C._acc.create_empty_tensor((0,), dtype)
        return _set(new, tensor.untyped_storage(), offset, size, stride)

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host over the memory of one on the device; it does not keep that from being given back."""
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            twin = torch.empty(0, dtype=tensor.dtype)
            if tensor.numel():
                memory = self.memory.allocation_of(tensor.untyped_storage()).memory
                _ATEN.set_.source_Storage_storage_offset(
                    twin, memory, tensor.storage_offset(), tensor.shape, tensor.stride()
                )
            else:
                twin = twin.new_empty(tensor.shape)
        if tensor.is_conj():
            twin = torch._conj(twin)
        return torch._neg_view(twin) if tensor.is_neg() else twin

    def touch(self, task: LateTask, tensor: torch.Tensor, twin: torch.Tensor, *, writes: bool) -> None:
        """Note that a task reads or writes a tensor."""
        if tensor.numel():
            allocation = self.memory.allocation_of(tensor.untyped_storage())
            self.memory.touch(task, allocation, twin, writes=writes)

    def use_on(self, tensor: torch.Tensor, lane: Lane) -> None:
        """Do not use the memory of a tensor again before what another stream has been given by then has run."""
        if tensor.numel():
            allocation = self.memory.allocation_of(tensor.untyped_storage())
            if lane is not allocation.lane:
                allocation.users[lane] = None

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Take a storage's memory, or give it some again; what was in it is gone.

        Raises:
            SimError: Any other size.
        """
        memory, now = self.memory, self.memory.size_of(storage)
        if size == now:
            return
        if size not in (0, memory.room_of(storage)):
            raise SimError(
                f"rank {self.rank} resizes a storage of its simulated npu from {now:,} to {size:,} bytes\n"
                "  try: 0 bytes, or the size with which it was made; torch.empty for others"
            )
        memory.release(storage._cdata)
        if size:
            memory.give(storage, memory.allocate(size, self.current))

    # -- memory of the host ------------------------------------------------------------------------------------------

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Say that copies from and to this tensor of the host may be late; returns it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._pinned[key] = weakref.ref(storage, lambda _: self._pinned.pop(key, None))
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether that was said."""
        return tensor.untyped_storage()._cdata in self._pinned

    def share_with_host(self, task: LateTask, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Note a copy during which the host must not write to some tensors, and not touch others."""
        if self.flights is not None:

            def follows(earlier: LateTask) -> bool:  # what the device does in this order, the host need not wait for
                return isinstance(earlier, LateTask) and task.comes_after(earlier.lane.index, earlier.number)

            self.flights.issue(task, f"a copy on {task.lane.title}", task.line, reads, writes, follows)
            self._shared.append(task)


def _contiguous(size: Sequence[int]) -> list[int]:
    stride, step = [], 1
    for n in reversed(size):
        stride.append(step)
        step *= max(n, 1)
    return stride[::-1]


def _with_room(dtype: torch.dtype, numel: int, memory: torch.UntypedStorage) -> torch.Tensor:
    """A tensor on the device whose storage is as long as that, at the address of its memory on the host."""
    tensor: torch.Tensor = torch._C._acc.create_empty_tensor((0,), dtype)
    size = numel * tensor.element_size()
    storage: Any = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), tensor.device, size)
    return _set(tensor, storage, 0, (numel,), (1,))


def _set(
    tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    kernel = _ATEN.set_.source_Storage_storage_offset
    found: torch.Tensor = kernel._op_dk(_CPU, tensor, storage, offset, tuple(size), tuple(stride))
    return found


def late_device(what: Any = "this") -> LateDevice:
    """The device of the rank that the calling thread runs.

    Raises:
        SimError: It runs none, or one without such a device.
    """
    context = current_context()
    device: LateDevice | None = None if context is None else context.late
    if device is None:
        raise SimError(
            f"{what} needs an npu, which only ranks have whose world was made with device='npu'\n"
            "  try: sim.run(fn, world_size=2, device='npu'), and .cpu() on what fn returns"
        )
    return device
