"""Recording of a script's steps on one rank, from one update of its optimizer to the next, as a `Program`."""

from __future__ import annotations

import gc
import io
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed import _functional_collectives
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _collective_utils, _decompositions, _dispatch
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from sim.comm.collectives import Call
from sim.explain.lines import user_line
from sim.kernel.context import current_context
from sim.kernel.waiting import Waitable
from sim.mesh.program import COMPUTE, Alloc, Comm, Event, Free, HostWait, Op, Place, Program, Segment
from sim.mesh.tracing.kernels import AcceleratorKernels
from sim.mesh.tracing.record import RecordedEvent, RecordedStream, Recorder
from sim.ops import Proceed, local_part, tensors_of
from sim.patches.locks import exchange
from sim.script.changes import recorded_fsdp, without_compiler_and_workers
from sim.script.reducer import python_reducer
from sim.script.values import MOST_ELEMENTS, Values

_MODULE = "sim_module"  # key of a node's metadata: the name of the module that made its output
_ITEM = torch.ops.aten._local_scalar_dense.default
_EQUAL = torch.ops.aten.equal.default
_SQUARES = torch.ops.aten.mse_loss.default


class NeedsRank(BaseException):
    """Signal that ends the script because a rank that it communicates with has to run as well."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class EnoughSteps(BaseException):
    """Signal that ends the script after its recorded steps; a `BaseException`, so that `except Exception` misses it."""


@dataclass(frozen=True)
class StandIn:
    """Line of the script that reads a value which depends on data, e.g. `loss.item()`.

    Attributes:
        line: file and line number in the script.
        asked: the value that is read, e.g. `a value of float32` or `aten.nonzero`.
        given: the value that the script got.
        count: number of reads in all recorded ranks.
    """

    line: str
    asked: str
    given: str
    count: int


class ScriptRecorder(Recorder):
    """Recorder of a script's operations; a call of its first optimizer's `step` ends a step.

    Args:
        rank: the recorded rank.
        warmup: steps before the recorded ones.
        steps: number of recorded steps.
        on_accelerator: True if norms, dropout and attention are the kernels of accelerators, and host memory is
            separate from device memory (for offload policies).

    Attributes:
        done: number of steps that the script has made.
        stand_ins: number of reads by (line, value asked for, value given).
        changes: pairs of a line and how it is run differently, in order of first use.
        unpriced: names of operations of unknown kind, priced by the bytes that they read and write.
        needs: callback for each rank that this rank sends to or receives from; it may end the run. None: no callback.
        program: the recorded steps; None until the last one has ended.
        move: copy of a tensor while torch offloads; True as second argument means non-blocking. None: not offloading.
        count_events: function that counts the collectives and messages issued so far.
        traced: `count_events()` at the start and at the end of the recorded steps.
    """

    def __init__(self, rank: int, warmup: int, steps: int, *, on_accelerator: bool) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.rank, self.warmup, self.steps = rank, warmup, steps
        self.values = Values()
        self.done = 0
        self.stand_ins: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        self.changes: dict[tuple[str, str], None] = {}
        self.unpriced: set[str] = set()
        self.needs: Callable[[int], None] | None = None
        self._on_accelerator = self.has_host = on_accelerator
        self.move: Callable[[torch.Tensor, bool], torch.Tensor] | None = None
        self._cuts: list[tuple[int, str]] = []  # start of each segment: index into `events`, and phase
        self._standing: list[int] = []
        self._first: weakref.ref[Any] | None = None
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._names: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._stack: list[str] = []
        self._was_called = self._is_updating = False
        self._backward_of = ""
        self.categories: dict[int, str] = {}
        self.program: Program | None = None
        self.count_events: Callable[[], int] = lambda: 0
        self.traced = (0, 0)

    # -- operations ----------------------------------------------------------------------------------------------

    def on_operation(self, func: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        """Run and record an operation, and follow the values of its results."""
        if self._deaf:
            return proceed(*args, **kwargs)
        if func is _ITEM:
            return self._item(args[0])
        if func is torch.ops.aten.record_stream.default:
            return None
        self.place = self._where()
        is_mean = func is _SQUARES and args[2:] != (0,)  # mean or sum; reduction 0 is "none"
        elements = self._elements(args) if is_mean and not self._on_accelerator else None
        try:
            out = super().on_operation(func, args, kwargs, proceed)
        except (DynamicOutputShapeException, DataDependentOutputException):
            return self._without_shape(func, args, kwargs)
        if elements is not None:
            out = elements.as_strided((), ())
        if func.namespace != "_c10d_functional":  # `on_collective` has followed it
            self.values.follow(func, args, kwargs, out)
        return out

    def _elements(self, args: Any) -> torch.Tensor:
        """Allocate a loss's elements, because on the CPU the mean of squares stays in a storage of their size."""
        with self.fake:
            kept = torch.empty(torch.broadcast_shapes(args[0].shape, args[1].shape), dtype=args[0].dtype)
            squares = torch.empty_like(kept)  # the squares before the reduction
        for tensor in (kept, squares):
            self._touch(tensor)
        return kept

    def _item(self, tensor: torch.Tensor) -> Any:
        """Return the value of a one-element tensor as a Python number; a stand-in if it depends on data."""
        value = self.values.of(tensor)
        stands_in = self.values.is_stand_in(tensor)
        if value is None:
            value = self.values.stand_in(tensor)
        with _as_outside():
            number = value.item()
        if stands_in:
            self.note(f"a value of {str(tensor.dtype).removeprefix('torch.')}", repr(number))
        return number

    def note(self, asked: str, given: str) -> None:
        """Record that the script reads a value, at which the host waits for the device."""
        self.emit(HostWait(self.stream))
        self.stand_ins[user_line(), asked, given] += 1

    def change(self, what: str) -> None:
        """Record that the current line of the script is run in a different way, e.g. without `torch.compile`."""
        self.changes[user_line(), what] = None

    def _values_of(self, tensor: torch.Tensor, how: str) -> torch.Tensor:
        """Return the values of a tensor that the script reads as a whole."""
        value = self.values.of(tensor)
        if value is None or self.values.is_stand_in(tensor):
            dtype = str(tensor.dtype).removeprefix("torch.")
            given = "1s" if tensor.dtype.is_floating_point else "0s"
            self.note(
                f"{how} of {dtype} {list(tensor.shape)}", "what follows from stand-ins" if value is not None else given
            )
        return self.values.stand_in(tensor) if value is None else value

    def list_of(self, tensor: torch.Tensor) -> Any:
        """Implement `Tensor.tolist`."""
        value = self._values_of(tensor, "a list")
        with _as_outside():
            return value.tolist()

    def array_of(self, tensor: torch.Tensor, *, force: bool = False) -> Any:
        """Implement `Tensor.numpy`."""
        value = self._values_of(tensor, "an array")
        with _as_outside():
            return value.numpy(force=force)

    def tensors_of(self, obj: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pickled bytes of an object and their number, as torch's object collectives send them."""
        written = io.BytesIO()
        c10d._pickler(written).dump(obj)  # torch's own pickler, so that sizes match
        with _as_outside():
            data = torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)
            size = torch.tensor([data.numel()])
        return self._known(data), self._known(size)

    def _without_shape(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation whose result has a shape that depends on values, e.g. `nonzero`."""
        name = func._schema.name.rpartition("::")[2]
        given = tensors_of((args, kwargs))
        known = [self.values.of(tensor) for tensor in given]
        if all(value is not None for value in known) and not any(map(self.values.is_stand_in, given)):
            with _as_outside():
                real = tree_map_only(torch.Tensor, self.values.of, (args, kwargs))
                found = func(*real[0], **real[1])
            return tree_map_only(torch.Tensor, self._known, found)
        if func is _EQUAL:
            self.note("whether tensors are equal", "True")
            return True
        if name in ("nonzero", "masked_select", "index"):
            results, said = self._all_elements(name, given, args), "all of its elements"
        else:
            out, said = _AT_MOST.get(name, _everything)(func, given, args, kwargs)
            results = tree_map_only(torch.Tensor, self._known, out)
        made = tensors_of((results,))
        for tensor in made:
            value = self.values.of(tensor)
            if value is not None:
                self.values.set(tensor, value, stands_in=True)
        self.note(f"the sizes of aten.{name}", said)
        if not self.asleep:
            reads = tuple(dict.fromkeys([self._touch(tensor) for tensor in given]))
            writes = tuple(dict.fromkeys([self._touch(tensor) for tensor in made]))
            dtype = str(given[0].dtype).removeprefix("torch.")
            self.events.append(Op(f"aten.{name}", "memory", 0, reads, writes, dtype, (), self.stream, self._place))
        return results

    def _all_elements(self, name: str, given: list[torch.Tensor], args: Any) -> torch.Tensor:
        """Return the result of a masked operation whose mask is all True."""
        with self.fake:
            if name == "nonzero":
                return torch.empty(given[0].numel(), given[0].dim(), dtype=torch.int64)
            if name == "masked_select":
                sizes = torch.broadcast_shapes(given[0].shape, given[1].shape)
                return torch.empty(sizes.numel(), dtype=given[0].dtype)
            numbers: list[torch.Tensor | None] = []
            for index in args[1]:
                if index is None or index.dtype not in (torch.bool, torch.uint8):
                    numbers.append(index)
                else:
                    numbers += [torch.empty(index.numel(), dtype=torch.int64) for _ in range(index.dim())]
            return torch.ops.aten.index.Tensor(args[0], numbers)

    def _known(self, value: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor that carries a known value."""
        with self.fake:  # because torch disables the mode while it makes meshes
            tensor = torch.empty_like(value)
        if value.numel() <= MOST_ELEMENTS:
            self.values.set(tensor, value, stands_in=False)
        return tensor

    # -- where ---------------------------------------------------------------------------------------------------

    def _where(self) -> Place:
        if self._is_updating:
            return Place("optimizer")
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            if self._stack:  # recomputation of a checkpoint
                return _place("backward", self._stack[-1], again=True)
            self._backward_of = _notes(node).get(_MODULE, self._backward_of)
            return _place("backward", self._backward_of)
        if self._stack:
            return _place("forward", self._stack[-1])
        return Place("loss") if self._was_called else Place("forward")

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        del inputs
        known = self._names.get(id(module))
        if known is None or known[0]() is not module:
            prefix = self._stack[-1] + "." if self._stack and self._stack[-1] else ""
            for name, part in module.named_modules():
                self._names[id(part)] = (weakref.ref(part), prefix + name if name else prefix.rstrip("."))
                self._modules.add(part)
            known = self._names[id(module)]
        self._stack.append(known[1])
        self._was_called = True

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs
        name = self._stack.pop() if self._stack else ""
        if torch.is_grad_enabled() and name:
            for tensor in output if isinstance(output, (tuple, list)) else (output,):
                node = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
                if node is not None:
                    _notes(node).setdefault(_MODULE, name)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        self._optimizers.add(optimizer)
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
        self._is_updating = True
        self._cut("optimizer")
        for param in self._parameters():
            if param.grad is not None:
                self.gradients.add(self.block_of(local_part(param.grad)))

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        self._is_updating = self._was_called = False
        self._backward_of = ""
        is_step = self._first is not None and self._first() is optimizer
        if is_step:
            gc.collect()  # garbage in cycles would count as memory until Python's next collection
            self.done += 1
            self._own()
            if self.done == self.warmup:
                self.begin_steps()
            elif self.done == self.warmup + self.steps:
                self.traced = (self.traced[0], self.count_events())
                self.program = self._assembled()
                raise EnoughSteps
        self._cut("step")

    def begin_steps(self) -> None:
        """Start the recorded steps; live blocks count as present at the beginning of each step."""
        self._standing = self.live_blocks()
        self._streams_of = {event.block: event.stream for event in self.events if isinstance(event, Alloc)}
        self.cut()
        self._cuts = []
        self.traced = (self.count_events(), self.count_events())

    def _cut(self, what: str) -> None:
        self._cuts.append((len(self.events), what))

    def _parameters(self) -> Iterator[nn.Parameter]:
        for optimizer in list(self._optimizers):
            for group in optimizer.param_groups:
                yield from group["params"]
        for module in list(self._modules):
            yield from [param for param in module._parameters.values() if param is not None]

    def _own(self) -> None:
        """Set the category (parameters or optimizer) of the blocks that live across steps."""
        for param in self._parameters():
            self.categories.setdefault(self.block_of(local_part(param)), "parameters")
        for module in list(self._modules):
            for buffer in module._buffers.values():
                if buffer is not None:
                    self.categories.setdefault(self.block_of(local_part(buffer)), "parameters")
        for optimizer in list(self._optimizers):
            for param, state in optimizer.state.items():
                for value in state.values() if isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor):
                        self.categories.setdefault(self.block_of(local_part(value)), "optimizer")
                        if isinstance(param, torch.Tensor) and self._is_on_host(local_part(param)):
                            self.on_host.add(self.block_of(local_part(value)))  # step counters, too

    # -- the program ---------------------------------------------------------------------------------------------

    def _assembled(self) -> Program:
        """Assemble the recorded steps into one periodic program, which ends with the blocks that it began with."""
        context = current_context()
        assert context is not None
        program = Program(self.rank, 1, context.network.world_size, list(self.groups), list(self.places))
        events, cuts = self.events, [(0, "step"), *self._cuts]
        self._name_blocks(events)
        renamed, dropped = self._carried_over(events)
        build: list[Event] = [
            Alloc(block, self.sizes[block], self._streams_of.get(block, 0))
            for block in self._standing
            if block not in dropped and self.sizes[block]
        ]
        program.segments["build", -1, "only"] = Segment("build", -1, "only", build)
        ends = [at for at, _ in cuts[1:]] + [len(events)]
        for (start, what), end in zip(cuts, ends, strict=True):
            part = [self._settled(event, renamed) for event in events[start:end]]
            part = [event for event in part if not (isinstance(event, Free) and event.block in dropped)]
            if part:
                key = (what, 0, str(len(program.order)))
                program.segments[key] = Segment(*key, part)
                program.order.append((key, -1))
        program.categories = {renamed.get(block, block): name for block, name in self.categories.items()}
        program.on_host = frozenset(renamed.get(block, block) for block in self.on_host)
        return program

    def _carried_over(self, events: Sequence[Event]) -> tuple[dict[int, int], set[int]]:
        """Match blocks that the steps leave with blocks of earlier steps that they free, by memory and size.

        Returns:
            For each block left: the freed block that it replaces in the next period. And the blocks that are freed
            without a replacement, because they belong to the script's beginning.
        """
        found, made = set(self._standing), dict.fromkeys(e.block for e in events if isinstance(e, Alloc))
        freed = dict.fromkeys(e.block for e in events if isinstance(e, Free))
        gone: defaultdict[tuple[bool, int], deque[int]] = defaultdict(deque)
        for block in freed:
            if block in found:
                gone[block in self.on_host, self.sizes[block]].append(block)
        renamed: dict[int, int] = {}
        for block in made:
            like = gone[block in self.on_host, self.sizes[block]]
            if block not in freed and like:
                renamed[block] = like.popleft()
        return renamed, {block for blocks in gone.values() for block in blocks}

    def _settled(self, event: Event, renamed: dict[int, int]) -> Event:
        if isinstance(event, (Alloc, Free)) and event.block in renamed:
            return event._replace(block=renamed[event.block])
        if isinstance(event, Op) and event.kind == "unknown":
            self.unpriced.add(event.name)
            return event._replace(kind="memory")
        return event

    def _name_blocks(self, events: Sequence[Event]) -> None:
        """Set the category of each block that the steps allocate, e.g. "activations" for forward to backward."""
        phases: dict[int, str] = {}
        place = 0
        categories = self.categories
        for event in events:
            if isinstance(event, (Op, Comm)):
                place = event.place
            elif isinstance(event, Alloc):
                phases[event.block] = self.places[self.sources[event.block]].phase
            elif isinstance(event, Free) and event.block not in categories and event.block in phases:
                began, ended = phases[event.block], self.places[place].phase
                if event.block in self.gradients:
                    categories[event.block] = "gradients"
                elif event.block in self.refilled:
                    categories[event.block] = "gathered weights"
                elif event.block in self.gathered:
                    categories[event.block] = "communication"
                elif began in ("forward", "loss") and ended == "backward":
                    categories[event.block] = "activations"
                else:
                    categories[event.block] = "workspace"
        for block in self.gradients:
            categories.setdefault(block, "gradients")
        for block in self.live_blocks():
            categories.setdefault(block, "communication" if block in self.gathered else "other")

    # -- communication -------------------------------------------------------------------------------------------

    def on_collective(self, call: Call, axis: str, ranks: tuple[int, ...], waitable: Waitable) -> None:
        """Record a collective; every other rank is taken to contribute the same input as this one."""
        self.place = self._where()
        super().on_collective(call, axis, ranks, waitable)
        self._exchange(call, len(ranks))

    def _exchange(self, call: Call, size: int) -> None:
        """Set the values of small results, as if all ranks had contributed this rank's inputs."""
        given = [self.values.of(tensor) for tensor in call.inputs]
        for number, tensor in enumerate(call.outputs):
            source = given[min(number, len(given) - 1)] if given else None
            if tensor.numel() > MOST_ELEMENTS:
                continue
            with _as_outside():
                if source is None or source.numel() == 0 or tensor.numel() % source.numel():
                    value = self.values.stand_in(tensor)
                elif call.contract.op == "all_reduce" and call.contract.reduce_op == "SUM":
                    value = source * size
                else:
                    flat = source.reshape(-1).repeat(tensor.numel() // source.numel())
                    value = flat.reshape(tensor.shape).to(tensor.dtype)
                if not isinstance(tensor, FakeTensor):
                    tensor.copy_(value)
                    continue
            known = source is not None and all(self.values.of(each) is not None for each in call.inputs)
            stands_in = not known or any(map(self.values.is_stand_in, call.inputs))
            if known or tensor.numel() == 1:
                self.values.set(tensor, value, stands_in=stands_in)

    def on_message(
        self, tensor: torch.Tensor, axis: str, pair: tuple[int, int], waitable: Waitable, *, sending: bool
    ) -> None:
        """Record one side of a point-to-point message."""
        if self.needs is not None:
            self.needs(pair[1])
        self.place = self._where()
        super().on_message(tensor, axis, pair, waitable, sending=sending)

    def on_delivery(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the value that was sent to the tensor that received it."""
        value = self.values.of(source)
        if value is None or value.numel() != target.numel():
            return
        with _as_outside():
            value = value.clone().reshape(target.shape)
            if not isinstance(target, FakeTensor):
                target.copy_(value)
        self.values.set(target, value, stands_in=self.values.is_stand_in(source))

    def _resized(self, storage: Any) -> None:
        context = current_context()
        if context is None or context.rank == self.rank:
            super()._resized(storage)

    # -- the rank's thread ---------------------------------------------------------------------------------------

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Record the calling thread, which runs the script."""
        hooks = [
            module_hooks.register_module_forward_pre_hook(self._enter_module),
            module_hooks.register_module_forward_hook(self._leave_module, always_call=True),
            optimizer_hooks.register_optimizer_step_pre_hook(self._before_update),
            optimizer_hooks.register_optimizer_step_post_hook(self._after_update),
        ]
        with ExitStack() as stack:
            for hook in hooks:
                stack.callback(hook.remove)
            stack.enter_context(_ScriptCalls(self, self._on_accelerator))
            stack.enter_context(super().modes())
            if not self.warmup:
                self.begin_steps()
            yield


class _ScriptCalls(AcceleratorKernels):
    """Replacements of torch calls that bypass operations because they read values or leave function modes."""

    def __init__(self, recorder: ScriptRecorder, on_accelerator: bool) -> None:
        super().__init__()
        self._recorder = recorder
        if not on_accelerator:
            self._kernels = {}
        self._kernels |= {torch.Tensor.numpy: recorder.array_of}
        self._kernels |= {torch.Tensor.pin_memory: _as_it_is}

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        """Call the replacement of `func`, or `func` itself if it has none."""
        if func is torch.Tensor.to and self._recorder.move is not None and "non_blocking" in kwargs:
            return self._recorder.move(args[0], kwargs["non_blocking"])
        return super().handle(func, types, args, kwargs, proceed)


# -- stand-ins of sizes --------------------------------------------------------------------------------------------


def _everything(func: Any, given: list[torch.Tensor], args: Any, kwargs: Any) -> tuple[Any, str]:
    """Run an operation on ones, which gives the largest result, e.g. all elements of a mask."""
    del given
    with _as_outside():
        ones = tree_map_only(torch.Tensor, lambda one: torch.ones(tuple(one.shape), dtype=one.dtype), (args, kwargs))
        return func(*ones[0], **ones[1]), "as if all were 1"


def _bins(func: Any, given: list[torch.Tensor], args: Any, kwargs: Any) -> tuple[Any, str]:
    del func
    least = int(kwargs.get("minlength", args[2] if len(args) > 2 else 0)) or 1
    total = given[0].numel()
    with _as_outside():
        counts = torch.full((least,), total // least)
        counts[: total % least] += 1
        return counts, f"as many in each of {least} bins"


_AT_MOST: dict[str, Callable[..., tuple[Any, str]]] = {"bincount": _bins}


# -- streams -------------------------------------------------------------------------------------------------------


_ASKING: tuple[Any, ...] = (_functional_collectives, _collective_utils, _decompositions, _dispatch)


class _ScriptEvent(RecordedEvent):
    """Event without a clock."""

    def elapsed_time(self, end: Any) -> float:
        """Return 0, because no time passes while a script is recorded."""
        del end
        return 0.0


class _ScriptStream(RecordedStream):
    """Stream that a script can enter with `with`."""

    def __enter__(self) -> _ScriptStream:
        self._entered = self._recorder.use_stream(self)
        self._entered.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


@contextmanager
def recorders_in_place(recorders: dict[int, ScriptRecorder], device: str | None) -> Iterator[None]:
    """Replace torch's streams and events by the calling rank's recorder's.

    FSDP2 uses the CPU's streams, because the CPU stands for the device here; a script uses those of `device`.
    """

    def here() -> ScriptRecorder:
        context = current_context()
        assert context is not None, "threads without a rank have no streams here"
        return recorders[context.rank]

    class Stream:
        def __new__(cls, *args: Any, **options: Any) -> Any:
            return _ScriptStream(here(), here().new_stream().number)

    class Event:
        def __new__(cls, *args: Any, **options: Any) -> Any:
            return _ScriptEvent(here())

    def use(stream: Any = None) -> Any:
        return nullcontext() if stream is None else here().use_stream(stream)

    standing_in: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: _ScriptStream(here(), here().stream),
        "default_stream": lambda device=None: _ScriptStream(here(), COMPUTE),
        "stream": use,
        "synchronize": lambda device=None: here().emit(HostWait(None)),
    }
    owners = [torch.cpu, torch.accelerator, *([getattr(torch, device)] if device else [])]
    swap = torch.utils.swap_tensors
    replacements = [
        *((owner, name, value) for owner in owners for name, value in standing_in.items() if hasattr(owner, name)),
        (FakeTensor, "tolist", lambda tensor: here().list_of(tensor)),
        (torch.utils, "swap_tensors", lambda one, other: _take_over(one, other, swap)),
        (DeviceMesh, "__init__", _with_values(DeviceMesh.__init__, here)),
        (c10d, "_object_to_tensor", lambda obj, device, group: here().tensors_of(obj)),
        # Without a compiler a functional collective is waited for at the first use of its result.
        *((module, "_are_we_tracing", lambda: False) for module in _ASKING),
    ]
    with ExitStack() as stack:
        stack.callback(exchange(replacements))
        stack.enter_context(python_reducer())
        stack.enter_context(without_compiler_and_workers(lambda what: here().change(what)))
        stack.enter_context(recorded_fsdp(here))
        for recorder in recorders.values():
            stack.enter_context(recorder.following())
        stack.enter_context(_older_objects_left_out())
        yield


@contextmanager
def _older_objects_left_out() -> Iterator[None]:
    """Freeze older objects, so that the collection at each step only visits objects of the script."""
    others = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not others:  # unfreezing would thaw objects that other code has frozen, too
            gc.unfreeze()


# -- small things --------------------------------------------------------------------------------------------------


@contextmanager
def _as_outside() -> Iterator[None]:
    """Compute with real values, outside the dispatch modes of the rank's thread."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _notes(node: Any) -> dict[str, Any]:
    """Return the metadata of an autograd node."""
    found: dict[str, Any] = node.metadata
    return found


def _take_over(one: torch.Tensor, other: torch.Tensor, swap: Callable[..., None]) -> None:
    """Move a parameter in place for `Module.to`, because fake tensors refuse torch's `swap_tensors`."""
    if not isinstance(one, FakeTensor):
        swap(one, other)
    elif one is not other:
        one.data = other.detach()


def _with_values(init: Callable[..., None], here: Callable[[], ScriptRecorder]) -> Callable[..., None]:
    """Keep a mesh's ranks as real numbers, because code outside the modes reads them, e.g. this library."""

    def init_mesh(mesh: DeviceMesh, *args: Any, **options: Any) -> None:
        init(mesh, *args, **options)
        ranks = mesh._rank_map
        if isinstance(ranks, FakeTensor):
            known = here().values.of(ranks)
            if known is not None:
                mesh._rank_map = known

    return init_mesh


def _as_it_is(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    """Return the tensor unchanged, because pinning has no effect without a device."""
    del args
    return tensor


def _place(phase: str, module: str, *, again: bool = False) -> Place:
    """Return the place of a module; the first number in its path is its layer, e.g. 3 for `blocks.3.mlp`."""
    layer = next((int(part) for part in module.split(".") if part.isdecimal()), None)
    return Place(phase, layer, module, again)
