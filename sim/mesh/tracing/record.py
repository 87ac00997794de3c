"""The record of what the one living rank does: operations, communication, waits and memory, as a list of events.

The recorder sees every operation of torch as a dispatch mode above the fake tensors, every collective as the lone
world's listener, every stream and event as its platform, and every block of memory by the life of its storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.redistribute.plan import Plan
from hyper_parallel.platform import AttentionKernel
from hyper_parallel.platform.cpu import HostEvent, HostStream
from sim.comm.collectives import Call
from sim.kernel.waiting import Waitable
from sim.mesh.program import (
    COMPUTE,
    HOST_COPIES,
    Alloc,
    Await,
    Comm,
    CommGroup,
    Event,
    EventRecord,
    Free,
    HostWait,
    Op,
    Place,
    Touch,
    Wait,
)
from sim.mesh.tracing.kernels import fused_attention
from sim.mesh.tracing.kinds import (
    attention_shape,
    count_flops,
    having,
    kind_of,
    matmul_shape,
    memory_kind,
    reads_only_its_output,
    running,
)
from sim.mesh.tracing.lone import Listener
from sim.ops import Level, OnOperations, Proceed, mode_before_all, tensors_of, written_tensors

_SCALAR = 8  # bytes: what a kernel may read of the host's memory
_GROUPED_MM = torch.ops.aten._grouped_mm.default
_DTYPE_NAMES: dict[torch.dtype, str] = {}  # a cache of a pure function


class _Kernel:
    """What is known of an overload, worked out once."""

    __slots__ = ("attention", "by_index", "by_output", "kind", "matmul", "name", "several", "space")

    def __init__(self, func: Any) -> None:
        space, _, name = func._schema.name.rpartition("::")
        self.space, self.name = space, f"{space}.{name}"
        self.kind = kind_of(func)
        self.matmul = self.kind == "matmul"
        self.attention = self.kind in ("attention", "attention_backward")
        self.by_output = reads_only_its_output(func)
        self.by_index = name in ("scatter_", "scatter_add_")
        self.several = name.startswith(("_foreach_", "_fused_"))


class _Fakes(OnOperations):
    """Not a recorder of its own: hands every operation to its recorder, before fake tensors take it for theirs."""

    order = Level.RECORD

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and self._recorder.answer is not None:
            self._recorder.on_read()
            return self._recorder.answer
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        for kind in types:
            if kind is not FakeTensor and kind is not torch.Tensor and kind is not torch.nn.Parameter:
                return NotImplemented  # a DTensor asks again with its local tensors
        return self._recorder.on_operation(func, args, kwargs, proceed)


class RecordedEvent(HostEvent):
    """An event of the simulated device: a number."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.number: int | None = None

    def record(self, stream: Any = None) -> None:
        """Mark the work queued so far on `stream`."""
        self.number = self._recorder.mark(stream)

    def wait(self, stream: Any = None) -> None:
        """Make later work on `stream` wait."""
        self._recorder.await_event(self, stream)

    def synchronize(self) -> None:
        """Let the host wait."""
        self._recorder.emit(HostWait(None))


class RecordedStream(HostStream):
    """A stream of the simulated device: a number."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder = recorder
        self.number = number

    def wait_event(self, event: Any) -> None:
        """Make later work on this stream wait for `event`."""
        self._recorder.await_event(event, self)

    def wait_stream(self, stream: Any) -> None:
        """Make later work on this stream wait for what is queued on `stream`."""
        event = RecordedEvent(self._recorder)
        event.record(stream)
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        """Record `event`, or a new one, on this stream."""
        event = RecordedEvent(self._recorder) if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait."""
        self._recorder.emit(HostWait(self.number))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecordedStream) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)


class Recorder(Listener):
    """Collects events; `recording` is the context in which the program runs.

    Attributes:
        events: so far, since `cut` was last called.
        groups: that communicated.
        places: of events.
        sizes: of blocks, in bytes, by number.
        sources: the place at which each block was taken.
        fake: the mode in which tensors have no values.
        stream: the number of the current one.
        answer: what a tensor's value is said to be, while a program may ask for one; None: torch's error.
        reads: whether the host waits for such a value.
        on_host: blocks that are in the host's memory.
        ring_kernel: whose fused attention computes the blocks of a ring, see `Job`.
        plans: of redistributions, each with its limit of memory, in order.
        asleep: whether operations and communication are left out; memory goes on being followed.
        borrows: whether what is made takes no memory of the rank's: another one has it, and keeps it longer.
    """

    def __init__(self) -> None:
        self.answer: float | None = None
        self.reads = True
        self.events: list[Event] = []
        self.cuts: list[tuple[int, int | None]] = []  # in the events: where a layer begins, and which
        self.groups: list[CommGroup] = []
        self.places: list[Place] = [Place("build")]
        self.sizes: dict[int, int] = {}
        self.sources: dict[int, int] = {}
        self.gathered: dict[int, str] = {}  # blocks that collectives wrote or read, and on which axis
        self.fake = FakeTensorMode(allow_non_fake_inputs=False)
        self.stream = COMPUTE
        self._place = 0
        self._place_numbers: dict[Place, int] = {self.places[0]: 0}
        self._group_numbers: dict[CommGroup, int] = {}
        self._kernels: dict[Any, _Kernel] = {}
        self._blocks: dict[int, int] = {}  # by storage
        self._lives: dict[int, weakref.ref[Any]] = {}
        self._next_block = self._next_handle = self._next_event = 0
        self._next_stream = COMPUTE + 1
        self._handles: dict[int, int] = {}  # by identity of what is waited for: of the latest one that has it
        self._waited: set[tuple[int, int]] = set()
        self.refilled: set[int] = set()  # blocks of storages that are given memory again, as those of whole weights are
        self.gradients: set[int] = set()  # blocks that were gradients when a step's backward was done
        self._works: dict[int, dist.Work] = {}  # of functional collectives, by storage of the result
        self.on_host: set[int] = set()
        self.ring_kernel = "flash"
        self.plans: dict[tuple[Plan, int | None], None] = {}
        self.asleep = False
        self.borrows = False
        self._deaf = False

    # -- where ---------------------------------------------------------------------------------------------------

    @property
    def place(self) -> Place:
        """Where in the program the next events belong."""
        return self.places[self._place]

    @place.setter
    def place(self, place: Place) -> None:
        self._place = self._number_of(place)

    @property
    def is_watched(self) -> bool:
        """Whether another dispatch mode sees operations before this recorder does; inside of one it is not known."""
        return mode_before_all()

    def _number_of(self, place: Place) -> int:
        return _numbered(place, self._place_numbers, self.places)

    def emit(self, event: Event) -> None:
        """Append an event."""
        if not self.asleep:
            self.events.append(event)

    def begin(self, layer: int | None) -> None:
        """Let a new chunk begin, of a layer or of what is around layers."""
        self.cuts.append((len(self.events), layer))

    def go_on(self, layer: int | None) -> None:
        """Let a new chunk begin, unless the one under way is of that layer, or around layers, too."""
        if (self.cuts[-1][1] if self.cuts else None) != layer:
            self.begin(layer)

    def cut(self) -> list[Event]:
        """Return what has been recorded since the last cut."""
        events, self.events, self.cuts = self.events, [], []
        return events

    def chunks(self) -> list[tuple[int | None, list[Event]]]:
        """Return what has been recorded since the last cut, chunk by chunk: (layer, events)."""
        bounds = [(0, None), *self.cuts]
        ends = [start for start, _ in bounds[1:]] + [len(self.events)]
        found = [(layer, self.events[start:end]) for (start, layer), end in zip(bounds, ends, strict=True)]
        self.cut()
        return found

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what the calling thread does, on tensors without values."""
        with self.following(), self.modes():
            yield

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Be in the modes of torch in which the calling thread's operations are recorded."""
        with self.fake, _Fakes(self):
            yield

    @contextmanager
    def following(self) -> Iterator[None]:
        """Let torch tell, in the whole process, what no mode of it does."""
        resize, shape_of = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        def resize_(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            self._resized(storage)
            return result

        def propagate(*args: Any, **kwargs: Any) -> Any:
            """Leave out what is computed on full tensors without values, to find the shape of a DTensor's result."""
            with having(self, _deaf=True):
                return shape_of(*args, **kwargs)

        shapes = having(ShardingPropagator, _propagate_tensor_meta_non_cached=propagate)
        with having(torch.UntypedStorage, resize_=resize_), shapes:
            yield

    def on_read(self) -> None:
        """Let the host wait for a value, which it reads."""
        if self.reads:
            self.emit(HostWait(self.stream))

    # -- operations ----------------------------------------------------------------------------------------------

    def on_operation(self, func: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        """Run an operation and write it down."""
        kernel = self._kernels.get(func)
        if kernel is None:
            kernel = self._kernels[func] = _Kernel(func)
        if self._deaf:
            return proceed(*args, **kwargs)
        if kernel.space == "_c10d_functional":
            return self._functional(kernel, args, kwargs, proceed)
        out = _grouped_mm(*args, **kwargs) if func is _GROUPED_MM else proceed(*args, **kwargs)
        kind = kernel.kind
        if kind == "host":
            for tensor in tensors_of((out,)):
                if tensor.device.type != "meta":  # no memory of anybody's
                    self._block(tensor.untyped_storage())
            if self.on_host and any(self._is_on_host(t) for t in tensors_of(args)):
                self.on_host.update([self._block(t.untyped_storage()) for t in tensors_of((out,))])
            return out
        given = tensors_of(args) + tensors_of(kwargs.values()) if kwargs else tensors_of(args)
        results = tensors_of((out,))
        sources = [self._touch(t) for t in given]
        targets = [self._touch(t) for t in results]
        if self.asleep:
            return out
        # Fused optimizers say that they write gradients, which they do only to unscale them.
        written = written_tensors(func, args, kwargs, but="grads")
        if not written and not targets:
            return out
        known = {touch.block for touch in sources}
        if kind == "unknown" and not written and all(touch.block in known for touch in targets):
            return out  # a view, whatever it is called
        if kernel.by_output and sources and targets:
            sources[0] = Touch(sources[0].block, min(sources[0].bytes, targets[0].bytes))
        if kernel.by_index:  # of what it writes to, it touches as many elements as it has indices
            index = max(given[1:], key=torch.Tensor.numel, default=given[0])
            targets = [Touch(sources[0].block, min(sources[0].bytes, index.numel() * given[0].dtype.itemsize))]
            sources[0], written, results = targets[0], [], given[:1]
        writes = self._each_once(kernel, [*written, *results], [*[self._touch(t) for t in written], *targets])
        overwritten = {touch.block for touch in writes} if kernel.name in _OVERWRITES else set()
        reads = self._each_once(kernel, given, sources)
        reads = tuple(touch for touch in reads if touch.block not in overwritten) if overwritten else reads
        if self.on_host and self._is_done_by_host((*sources, *writes)):
            kind = "on_host"
            self.on_host.update([touch.block for touch in targets])
        shape: tuple[int, ...] = ()
        flops = 0
        if kernel.matmul:
            flops, shape = count_flops(func, args, kwargs, out), matmul_shape(func, args, out)
        elif kernel.attention:
            flops, shape = count_flops(func, args, kwargs, out), attention_shape(func, args, kwargs)
        if kind == "memory":
            kind = memory_kind(func, args, given, results)
            shape = () if kind == "memory" else (results[0].numel(),)
        leading = given[0] if given else results[0]
        place = self._compiled_place(running.region) if running.region else self._place
        self.events.append(Op(kernel.name, kind, flops, reads, writes, _name(leading.dtype), shape, self.stream, place))
        return out

    def _compiled_place(self, kernel: int) -> int:
        """The place of an operation that a compiler makes one kernel of with others."""
        place = self.place
        again = place.recomputes or running.recomputes
        # A mode sees what calls a graph, not the kernels in it.
        return self._number_of(place._replace(compiled=kernel, recomputes=again, watched=False))

    def _each_once(
        self, kernel: _Kernel, tensors: Sequence[torch.Tensor], touches: Sequence[Touch]
    ) -> tuple[Touch, ...]:
        """What is touched, without what is given twice; lists may have several parts of a block of the same size."""
        if not kernel.several:
            return tuple(dict.fromkeys(touches))
        return tuple({id(tensor): touch for tensor, touch in zip(tensors, touches, strict=True)}.values())

    def _touch(self, tensor: torch.Tensor) -> Touch:
        block = self._block(tensor.untyped_storage())
        count = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            if stride:
                count *= size
        return Touch(block, count * tensor.dtype.itemsize if tensor.numel() else 0)

    # -- the host's memory ---------------------------------------------------------------------------------------

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        return self._blocks.get(tensor.untyped_storage()._cdata) in self.on_host

    def _is_done_by_host(self, touches: Sequence[Touch]) -> bool:
        """Tell whether an operation works on what is on the host; a kernel may read numbers there."""
        hosted = [touch.bytes for touch in touches if touch.block in self.on_host]
        elsewhere = [touch.bytes for touch in touches if touch.block not in self.on_host]
        return bool(hosted) and (max(hosted) > _SCALAR or max(elsewhere, default=0) <= _SCALAR)

    def copy_to_device(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool) -> None:
        """Copy what is on the host to the device: converted there, as torch does, from what `source` is."""
        self.on_host.add(self.block_of(source))
        landed = target
        if target.dtype != source.dtype:
            landed = torch.empty_like(target, dtype=source.dtype)
        self.block_of(landed)  # it is taken before it is copied to
        self._copy("copy_to_device", source, pinned=pinned, wait=not pinned)
        if landed is not target:
            target.copy_(landed)

    def copy_to_host(self, source: torch.Tensor, *, pinned: bool, wait: bool) -> torch.Tensor:
        """Return a copy on the host of what is on the device."""
        copy = torch.empty(source.shape, dtype=source.dtype)
        self.on_host.add(self.block_of(copy))
        self._copy("copy_to_host", source, pinned=pinned, wait=wait or not pinned)
        return copy

    def _copy(self, op: str, source: torch.Tensor, *, pinned: bool, wait: bool) -> None:
        """Write a copy down, in the order of the current stream."""
        if self.asleep:
            return
        name = op if pinned else f"{op}_pageable"
        size = source.numel() * source.dtype.itemsize
        self._next_handle += 1
        # A group for each direction: a device has an engine for either.
        group = self._group(HOST_COPIES[name], ())
        dtype = _name(source.dtype)
        self.emit(Comm(name, group, size, size, dtype, self.stream, self._next_handle, self._place))
        self.emit(Wait(self._next_handle, self.stream))
        if wait:
            self.emit(HostWait(self.stream))

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> AttentionKernel | None:
        """Return the fused attention of the device that is recorded; tensors with values are the host's."""
        if not isinstance(q, FakeTensor):
            return super().attention(q, k, v, causal, scale)
        return fused_attention(self.ring_kernel, q, k, v)

    # -- memory --------------------------------------------------------------------------------------------------

    def _block(self, storage: Any) -> int:
        key = storage._cdata
        block = self._blocks.get(key)
        return self._take(storage, key) if block is None else block

    def _take(self, storage: Any, key: int) -> int:
        block = self._next_block = self._next_block + 1
        size = 0 if self.borrows else storage.nbytes()
        self._blocks[key] = block
        self.sizes[block] = size
        self.sources[block] = self._place
        if key not in self._lives:
            self._lives[key] = weakref.ref(storage, self._when_dead(key))
        self.events.append(Alloc(block, size, self.stream))
        return block

    def _when_dead(self, key: int) -> Callable[[Any], None]:
        def dead(reference: Any) -> None:
            del reference
            self._lives.pop(key, None)
            block = self._blocks.pop(key, None)
            if block is not None:
                self.events.append(Free(block))

        return dead

    def _resized(self, storage: Any) -> None:
        key = storage._cdata
        block = self._blocks.get(key)
        if block is None and not storage.nbytes() and key not in self._lives:
            return
        if block is not None:
            if self.sizes[block] == storage.nbytes():
                return
            del self._blocks[key]
            if self.sizes[block]:
                self.events.append(Free(block))
        if storage.nbytes():
            self.refilled.add(self._take(storage, key))
        else:
            self._blocks[key] = 0  # no block: it has no memory until it is resized again
            self.sizes[0] = 0

    def live_blocks(self) -> list[int]:
        """Return the blocks that are in use now, in the order in which they were taken."""
        return sorted(block for block in self._blocks.values() if block)

    def block_of(self, tensor: torch.Tensor) -> int:
        """Return the number of the block that a tensor lies in."""
        return self._block(tensor.untyped_storage())

    # -- communication -------------------------------------------------------------------------------------------

    def _group(self, axis: str, ranks: tuple[int, ...]) -> int:
        return _numbered(CommGroup(axis, ranks), self._group_numbers, self.groups)

    @property
    def latest_handle(self) -> int:
        """The handle of what was communicated last."""
        return self._next_handle

    def wait_for(self, handle: int) -> None:
        """Write down that the current stream waits for a communication."""
        self.emit(Wait(handle, self.stream))

    def _handle(self, waitable: Waitable) -> int:
        self._next_handle += 1
        self._handles[id(waitable)] = self._next_handle
        return self._next_handle

    def on_plan(self, plan: Plan, limit: int | None) -> None:
        """Keep the plan, because another machine may need another one."""
        self.plans[plan, limit] = None

    def on_collective(self, call: Call, axis: str, ranks: tuple[int, ...], waitable: Waitable) -> None:
        """Write a collective down."""
        inputs = sum([t.numel() * t.dtype.itemsize for t in call.inputs])
        outputs = sum([t.numel() * t.dtype.itemsize for t in call.outputs])
        for tensor in (*call.inputs, *call.outputs):
            self.gathered.setdefault(self.block_of(tensor), f"{call.contract.op} {axis}")
        handle = self._handle(waitable)
        if self.asleep:
            return
        dtype = _name((*call.inputs, *call.outputs)[0].dtype) if call.inputs or call.outputs else ""
        self.events.append(
            Comm(
                call.contract.op,
                self._group(axis, ranks),
                max(inputs, outputs),
                max(call.send_bytes, call.recv_bytes),
                dtype,
                self.stream,
                handle,
                self._place,
                messages=max(len(call.inputs), len(call.outputs), 1),
            )
        )

    def on_message(
        self, tensor: torch.Tensor, axis: str, pair: tuple[int, int], waitable: Waitable, *, sending: bool
    ) -> None:
        """Write one side of a message down; `pair` is this rank and the other one."""
        size = tensor.numel() * tensor.dtype.itemsize
        handle = self._handle(waitable)
        if self.asleep:
            return
        op = "send" if sending else "recv"
        group = self._group(axis, (min(pair), max(pair)))  # in the order of a group's ranks, on both sides
        self.events.append(Comm(op, group, size, size, _name(tensor.dtype), self.stream, handle, self._place, pair[1]))

    def on_wait(self, waitable: Waitable) -> None:
        """Write down that the current stream waits."""
        handle = self._handles.get(id(waitable))
        if handle is not None and (handle, self.stream) not in self._waited:
            self._waited.add((handle, self.stream))
            self.emit(Wait(handle, self.stream))

    def _functional(self, kernel: _Kernel, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        """Carry out one of torch's functional collectives: the fake tensors alone would leave it out."""
        name = kernel.name.rpartition(".")[2]
        if name == "wait_tensor":
            work = self._works.pop(args[0].untyped_storage()._cdata, None)
            if work is not None:
                work.wait()
            return args[0]
        if name == "_wrap_tensor_autograd":
            return AsyncCollectiveTensor(args[0])  # is waited for where it is used; fake tensors would leave that out
        out = proceed(*args, **kwargs)
        group: Any = c10d._resolve_process_group(args[-1])
        given = list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]]
        results = list(out) if isinstance(out, (list, tuple)) else [out]
        for source, result in zip(given, results, strict=True):
            source = source if source.is_contiguous() else source.contiguous()
            work = _issue(group, name, source, result, args)
            self._works[result.untyped_storage()._cdata] = work
        return out

    # -- streams -------------------------------------------------------------------------------------------------

    def new_stream(self, priority: int = 0) -> RecordedStream:
        """Return a stream that nothing is queued on."""
        del priority
        self._next_stream += 1
        return RecordedStream(self, self._next_stream - 1)

    def current_stream(self) -> RecordedStream:
        """Return the stream that operations are queued on."""
        return RecordedStream(self, self.stream)

    @contextmanager
    def use_stream(self, stream: Any) -> Iterator[Any]:
        """Queue the operations of the block on `stream`."""
        with having(self, stream=stream.number):
            yield stream

    def new_event(self) -> RecordedEvent:
        """Return an event, not yet recorded on any stream."""
        return RecordedEvent(self)

    def mark(self, stream: Any) -> int:
        """Write a mark down, and return its number."""
        self._next_event += 1
        self.emit(EventRecord(self._next_event, self.stream if stream is None else stream.number))
        return self._next_event

    def await_event(self, event: RecordedEvent, stream: Any) -> None:
        """Write down that a stream waits for a mark; one that was never recorded is not waited for."""
        if event.number is not None:
            self.emit(Await(event.number, self.stream if stream is None else stream.number))


_OVERWRITES = frozenset(
    {"aten.fill_", "aten.zero_", "aten.copy_", "aten.normal_", "aten.uniform_", "aten.bernoulli_"}
    | {"aten._foreach_copy_", "aten._foreach_zero_"}
)


def _numbered(each: Any, numbers: dict[Any, int], known: list[Any]) -> int:
    """Return the place of something in a list that it is added to when it is new."""
    if (number := numbers.get(each)) is None:
        number = numbers[each] = len(known)
        known.append(each)
    return number


def _issue(group: Any, name: str, source: torch.Tensor, result: torch.Tensor, args: Sequence[Any]) -> dist.Work:
    """Let a process group do what a functional collective of this name asks for."""
    if name.startswith("all_gather_into_tensor"):
        return group.all_gather_single(result, source)
    if name.startswith("reduce_scatter_tensor"):
        options = dist.ReduceScatterOptions()
        options.reduceOp = getattr(dist.ReduceOp, str(args[1]).upper())
        return group.reduce_scatter_single(result, source, options)
    if name.startswith("all_reduce"):
        reduce_options = dist.AllreduceOptions()
        reduce_options.reduceOp = getattr(dist.ReduceOp, str(args[1]).upper())
        return group.allreduce([result], reduce_options)
    if name.startswith("all_to_all_single"):
        return group.all_to_all_single(result, source, list(args[1]), list(args[2]))
    if name.startswith("broadcast"):
        cast_options = dist.BroadcastOptions()
        cast_options.rootRank = int(args[1])
        return group.broadcast([result], cast_options)
    asked, blame = f"cannot record the functional collective {name!r}", "it is none that is known here"
    raise InvalidValue(asked, blame, f"group: {group!r}", "dist.all_gather and the like, or another collective")


def _grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return what a product by groups makes in any dtype: torch's kernels take all floats, its fake one bf16 alone."""
    if mat_a.dtype == mat_b.dtype == torch.bfloat16 or bias is not None:
        made: torch.Tensor = _GROUPED_MM(mat_a, mat_b, offs, bias, out_dtype)
        return made
    sizes = (*(mat_a.shape[:1] if mat_a.dim() == mat_b.dim() == 3 else ()), mat_a.shape[-2], mat_b.shape[-1])
    if offs is not None and mat_a.dim() == mat_b.dim() == 2:  # each group has some of the inner dimension
        sizes = (offs.shape[0], *sizes)
    return mat_a.new_empty(sizes, dtype=out_dtype or mat_a.dtype)


def _name(dtype: torch.dtype) -> str:
    found = _DTYPE_NAMES.get(dtype)
    if found is None:
        found = _DTYPE_NAMES[dtype] = str(dtype).removeprefix("torch.")
    return found
