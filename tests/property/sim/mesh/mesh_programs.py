"""A trainer's run as a job of the simulator, and what its programs say of communication, memory and FLOPs."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from mesh_kit import Seen
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hyper_parallel.core.pipeline.stage import Stage
from sim.mesh.program import MEMORY_KINDS, Alloc, Comm, Event, Free, Op, Program
from sim.mesh.replay.allocator import MemoryPlan
from sim.mesh.tracing.kinds import attention_shape, kind_of, matmul_shape
from sim.trace import Event as TraceEvent

# -- communication ---------------------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """What must be the same of a collective or message: devices in order of number, bytes as programs count them."""

    op: str
    axis: str
    devices: tuple[int, ...]
    peer: int | None
    size: int
    moved: int
    dtype: str


def events_of(program: Program) -> Iterator[Event]:
    """All events of a step, in the order of issue."""
    for segment, _ in program.segments_in_order():
        yield from segment.events


def sent_by_program(program: Program) -> list[Sent]:
    """What a program communicates in a step."""
    found: list[Sent] = []
    for event in events_of(program):
        if isinstance(event, Comm):
            group = program.groups[event.group]
            devices = () if event.op in ("send", "recv") else tuple(sorted(group.ranks))
            found.append(Sent(event.op, group.axis, devices, event.peer, event.size, event.moved, event.dtype))
    return found


def sent_in_reality(events: list[TraceEvent]) -> list[Sent]:
    """The same of events of the real world."""
    found = []
    for event in events:
        is_message = event.op in ("send", "recv")
        devices = () if is_message else tuple(sorted(event.group))
        peer = event.peer if is_message else None
        size = max(_bytes(event.input_shapes, event.dtype), _bytes(event.output_shapes, event.dtype))
        moved = max(event.send_bytes, event.recv_bytes)
        found.append(Sent(event.op, event.axis, devices, peer, size, moved, event.dtype))
    return found


def _bytes(shapes: tuple[tuple[int, ...], ...], dtype: str) -> int:
    return sum(math.prod(shape) for shape in shapes) * getattr(torch, dtype).itemsize


# -- operations and FLOPs --------------------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """What must be the same of an operation.

    `shape` is that of a product or an attention, `written` the bytes of what it writes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    written: int


class Turn(NamedTuple):
    """What a stage does with a micro-batch, as `Action` names it: operations, and bytes of memory at its end and most.

    What comes between two turns belongs to the second. What has been sent counts no longer, whoever still holds it.
    """

    kind: str
    stage: int
    batch: int
    kernels: Counter[Kernel]
    live: int
    peak: int


class Operations(TorchDispatchMode):
    """Counts the operations of a rank's own tensors, their FLOPs by torch's formulas, and the memory that they take.

    A DTensor's are those of its parts. Views and what only takes memory are no operations, nor is communication. Of
    memory, single numbers do not count.

    Args:
        standing: tensors whose memory is there before and does not count.
    """

    def __init__(self, standing: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.total = 0
        self.kernels: Counter[Kernel] = Counter()
        self.before_update: Counter[Kernel] = Counter()
        self.turns: list[Turn] = []
        self.live = self.peak = 0
        self.messages: dict[tuple[int, int], list[weakref.ref[Any]]] = {}
        self._sizes: dict[weakref.ref[Any], int] = {}
        self._known: dict[int, weakref.ref[Any]] = {}
        self._turned: Counter[Kernel] = Counter()
        self.take_out(standing)
        self.peak = self.live

    def _note(self, tensor: torch.Tensor) -> weakref.ref[Any]:
        """Follow the memory of a tensor."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            reference = self._known[storage._cdata] = weakref.ref(storage, self._freed(storage._cdata))
            self._sizes[reference] = 0
            if tensor.device.type != "meta" and storage.nbytes() > LEAST:
                self._set(reference, storage.nbytes())
        return self._known[storage._cdata]

    def _freed(self, key: int) -> Any:
        def freed(reference: Any) -> None:
            del self._known[key]
            self.live -= self._sizes.pop(reference)

        return freed

    def _set(self, reference: weakref.ref[Any], size: int) -> None:
        if reference in self._sizes:
            self.live += size - self._sizes[reference]
            self._sizes[reference] = size
            self.peak = max(self.peak, self.live)

    def take_out(self, tensors: Iterable[Any]) -> None:
        """Let the memory of tensors count no longer."""
        for tensor in tensors_of(list(tensors)):
            self._set(self._note(tensor_of(tensor)), 0)

    def take_in(self, stage: Any, batch: int, tensors: Iterable[Any]) -> None:
        """Let the memory of what a stage has received for a micro-batch count, until it has done with it."""
        for tensor in tensors_of(list(tensors)):
            if not self._sizes[self._note(tensor)]:  # else it is another stage's of this rank
                self._set(self._note(tensor), tensor.untyped_storage().nbytes())
                self.passed(stage, batch, [tensor])

    def passed(self, stage: Any, batch: int, tensors: Iterable[Any]) -> None:
        """Let the memory of messages count until a stage has done with a micro-batch, whoever holds it then."""
        references = [self._note(tensor) for tensor in tensors_of(list(tensors))]
        self.messages.setdefault((stage.stage_index, batch), []).extend(references)

    def forget(self, stage: Any, batch: int) -> None:
        """A stage has done with a micro-batch."""
        for reference in self.messages.pop((stage.stage_index, batch), ()):
            self._set(reference, 0)

    def end_turn(self, kind: str, stage: int, batch: int) -> None:
        """A stage has done something with a micro-batch."""
        self.turns.append(Turn(kind, stage, batch, self.kernels - self._turned, self.live, self.peak))
        self._turned = Counter(self.kernels)
        self.peak = self.live

    def end_reduction(self) -> None:
        """What came after the last turn belongs to it."""
        kind, stage, batch, kernels, _, peak = self.turns.pop()
        more = self.kernels - self._turned
        self.end_turn(kind, stage, batch)
        last = self.turns.pop()
        self.turns.append(last._replace(kernels=kernels + more, peak=max(peak, last.peak)))

    def begin_update(self) -> None:
        """Tell that gradients and loss are there: what comes next is the update."""
        self.before_update = Counter(self.kernels)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            self.total += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            self.total += sdpa_flop_count(*_of_equal_heads(args[0], args[1], args[2]))
        elif packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
            self.total += sdpa_backward_flop_count(args[0].shape, *_of_equal_heads(args[1], args[2], args[3]))
        elif packet is torch.ops.aten._grouped_mm:  # of rows that are grouped by expert
            self.total += 2 * args[0].numel() * args[1].shape[-1]
        for made in tensors_of(out):
            self._note(made)
        if func.namespace == "aten" and kind_of(func) != "host":
            self._count(func, args, kwargs or {}, out)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        given, made = tensors_of((args, tuple(kwargs.values()))), tensors_of(out)
        changed = [
            value
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads"
            for value in tensors_of(args[place] if place < len(args) else kwargs.get(argument.name))
        ]
        if not changed and (not made or {memory(each) for each in made} <= {memory(each) for each in given}):
            return
        shape: tuple[int, ...] = ()
        if kind_of(func) == "matmul":
            shape = matmul_shape(func, args, out)
        elif kind_of(func) in ("attention", "attention_backward"):
            shape = attention_shape(func, args, kwargs)
        written = sum(size for _, size in {(memory(each), extent(each)) for each in (*changed, *made)})
        if func._opname.startswith(("_foreach_", "_fused_")):  # lists may have several parts of one block
            written = sum(map(extent, {id(each): each for each in (*changed, *made)}.values()))
        elif func._opname in ("scatter_", "scatter_add_"):
            written = min(extent(args[0]), args[2].numel() * args[0].dtype.itemsize)
        leading = (given or made)[0]
        name = func._schema.name.replace("::", ".")
        self.kernels[Kernel(name, str(leading.dtype).removeprefix("torch."), shape, written)] += 1


LEAST = 8  # bytes: what is no larger is a number


def tensor_of(tensor: torch.Tensor) -> torch.Tensor:
    """A rank's part."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


@contextmanager
def turns_followed() -> Iterator[None]:
    """Let the stages of pipelines tell the ranks' `Operations` of their turns, and of what they send and receive."""

    def told(name: str, tell: Any) -> Any:
        original = getattr(Stage, name)

        def method(stage: Any, *args: Any, **kwargs: Any) -> Any:
            counted = next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Operations)), None)
            if counted is None:
                return original(stage, *args, **kwargs)
            return tell(counted, stage, lambda: original(stage, *args, **kwargs), *args, **kwargs)

        return mock.patch.object(Stage, name, method)

    with ExitStack() as stack:
        for name, tell in _TELLS.items():
            stack.enter_context(told(name, tell))
        yield


def _forward(counted: Operations, stage: Any, run: Any, index: int, *args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    # Of what the first stage is given, torch 2.11 has no buffer, and later ones say so.
    received = [info for info in stage.args_recv_info[index] if not getattr(info, "is_root_arg", stage.is_first)]
    counted.take_in(stage, index, [info.buffer for info in received])
    output = run()
    counted.end_turn("forward", stage.stage_index, index)
    return output


def _backward(counted: Operations, stage: Any, run: Any, index: int, *args: Any, **kwargs: Any) -> None:
    del args
    counted.take_in(stage, index, [info.buffer for info in stage.grad_recv_info[index]])
    run()
    counted.passed(stage, index, stage.bwd_cache.get(index, ()))
    is_whole = kwargs.get("full_backward", True)
    if is_whole:
        counted.forget(stage, index)
    counted.end_turn("backward" if is_whole else "backward_input", stage.stage_index, index)


def _backward_weight(counted: Operations, stage: Any, run: Any, index: int, *args: Any, **kwargs: Any) -> None:
    del args, kwargs
    run()
    counted.forget(stage, index)
    counted.end_turn("backward_weight", stage.stage_index, index)


def _receives(counted: Operations, stage: Any, run: Any, index: int) -> Any:
    del stage, index
    before = counted.peak
    ops = run()
    counted.take_out(op.tensor for op in ops)
    counted.peak = max(before, counted.live)
    return ops


def _sends(counted: Operations, stage: Any, run: Any, index: int) -> Any:
    ops = run()
    counted.passed(stage, index, [op.tensor for op in ops])
    return ops


def _reduces(counted: Operations, stage: Any, run: Any, factor: int) -> None:
    del factor
    waits = stage.reductions is not None and not stage.reductions.is_started
    run()
    if waits:
        counted.end_reduction()


_TELLS = {
    "forward_one_chunk": _forward,
    "backward_one_chunk": _backward,
    "backward_weight_one_chunk": _backward_weight,
    "get_fwd_recv_ops": _receives,
    "get_bwd_recv_ops": _receives,
    "get_fwd_send_ops": _sends,
    "perform_reduce_grad": _reduces,
}


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


def memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def extent(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements, those counted once that it shows several times."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(sizes) * tensor.dtype.itemsize if tensor.numel() else 0


def kernels_of(program: Program) -> tuple[Counter[Kernel], Counter[Kernel]]:
    """The operations of a step by a program, before its update and in it."""
    before, update = Counter[Kernel](), Counter[Kernel]()
    for segment, _ in program.segments_in_order():
        for event in segment.events:
            if isinstance(event, Op):
                found = update if segment.name == "optimizer" else before
                found[kernel_of(event)] += 1
    return before, update


def kernel_of(event: Op) -> Kernel:
    shape = () if event.kind in MEMORY_KINDS else event.shape
    return Kernel(event.name, event.dtype, shape, sum(touch.bytes for touch in event.writes))


def _of_equal_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Size]:
    """Shapes with a head of keys and values for each of queries: torch before 2.12 counts no others."""
    return [q.shape, *(torch.Size((x.shape[0], q.shape[1], *x.shape[2:])) for x in (k, v))]


def flops_of(program: Program) -> int:
    """The FLOPs of a step by a program."""
    return sum(event.flops for event in events_of(program) if isinstance(event, Op))


# -- memory ----------------------------------------------------------------------------------------------------------


def bytes_of(tensors: Any) -> int:
    """Bytes of the memory that these tensors, or a rank's parts of them, lie in; what they share counts once."""
    sizes = {}
    for tensor in tensors:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def standing_bytes(program: Program) -> Counter[str]:
    """Bytes that live through a step, by category."""
    found: Counter[str] = Counter()
    for event in program.segments["build", -1, "only"].events:
        if isinstance(event, Alloc):
            found[program.categories[event.block]] += event.bytes
    return found


def bytes_before_update(program: Program, category: str) -> int:
    """Bytes of a category that live when the optimizer's part of a step begins."""
    sizes: dict[int, int] = {}
    segments = [program.segments["build", -1, "only"], *(segment for segment, _ in program.segments_in_order())]
    for segment in segments:
        if segment.name == "optimizer":
            break
        for event in segment.events:
            if isinstance(event, Alloc) and program.categories.get(event.block) == category:
                sizes[event.block] = event.bytes
            elif isinstance(event, Free):
                sizes.pop(event.block, None)
    return sum(sizes.values())


def turns_of(program: Program) -> list[Turn]:
    """The turns of a program's stages in a step."""
    plan = MemoryPlan(program)
    sizes: dict[int, int] = {}
    found: list[Turn] = []
    kernels = Counter[Kernel]()
    live = peak = 0
    for key, batch in program.order:
        for block, size, _, each, _ in plan.memory[key]:
            number = block + plan.stride * (batch + 1) if each else block
            if size < 0:
                live -= sizes.pop(number, 0)
            elif number not in sizes:
                sizes[number] = size if size > LEAST else 0
                live += sizes[number]
                peak = max(peak, live)
        kernels.update(kernel_of(event) for event in program.segments[key].events if isinstance(event, Op))
        if batch >= 0:  # else it is what comes before the next turn
            found.append(Turn(key[0], key[1], batch, kernels, live, peak))
            kernels, peak = Counter(), live
    return found


# -- which events are the same ---------------------------------------------------------------------------------------


def renumbered(program: Program, *, ranks: bool = True) -> list[Any]:
    """The events of a step up to its update, blocks, handles and marks numbered by when they come first.

    What is freed at one time is in order of number; what was allocated in the step before is left out.

    Args:
        program: which.
        ranks: say the devices of groups and peers; False: only how many there are.
    """
    numbers: dict[tuple[str, int], int] = {}

    def number(space: str, old: int) -> int:
        return numbers.setdefault((space, old), len(numbers))

    found: list[Any] = []
    freed: list[int] = []
    taken = {event.block for event in program.segments["build", -1, "only"].events if isinstance(event, Alloc)}
    for segment, batch in program.segments_in_order():
        found.append((segment.name, segment.stage, segment.variant, batch))
        for event in segment.events if segment.name != "optimizer" else ():
            if isinstance(event, Free):
                if event.block in taken:
                    freed.append(number("block", event.block))
                continue
            if isinstance(event, Alloc):
                taken.add(event.block)
            if freed:
                found.append(("Free", *sorted(freed)))
                freed = []
            found.append(_said(program, event, number, ranks))
    return found


def _said(program: Program, event: Event, number: Any, ranks: bool) -> tuple[Any, ...]:
    said: dict[str, Any] = {"is": type(event).__name__, **event._asdict()}
    for space in ("block", "handle", "event"):
        if space in said:
            said[space] = number(space, said[space])
    for side in ("reads", "writes"):
        if side in said:
            said[side] = tuple((number("block", touch.block), touch.bytes) for touch in said[side])
    if "place" in said:
        said["place"] = program.places[said["place"]]
    if "group" in said:
        group = program.groups[said["group"]]
        said["group"] = (group.axis, tuple(group.ranks) if ranks else len(group.ranks))
        if not ranks:
            said["peer"] = said["peer"] is not None
    if isinstance(event, Alloc):
        said["category"] = program.categories.get(event.block)
    return tuple(said.items())


def updated(program: Program) -> dict[str, Any]:
    """What the update of a step touches and communicates; its operations on many tensors are in any order."""
    found: Counter[str] = Counter()
    sent = []
    for segment, _ in program.segments_in_order():
        for event in segment.events if segment.name == "optimizer" else ():
            if isinstance(event, Op):
                for side in (event.reads, event.writes):
                    for touch in side:
                        category = program.categories.get(touch.block, "workspace")
                        if category not in ("workspace", "communication"):  # norms of single tensors and the like
                            found[f"{event.name} {category}"] += touch.bytes
            elif isinstance(event, Comm):
                sent.append(
                    (event.op, event.dtype, event.size if event.dtype != "int64" else None)
                )  # of counts of rows
    return {**dict(sorted(found.items())), "sent": sent, **dict(sorted(standing_bytes(program).items()))}


def step_of(seen: Seen, step: int) -> list[TraceEvent]:
    """The events of one step of a rank."""
    begins: list[int] = seen.result.begins
    return seen.events[begins[step] : begins[step + 1]]
