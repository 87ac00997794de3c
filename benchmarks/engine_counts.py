"""What a rank communicates and holds during a training step: ours beside torch's FSDP2, counted and not timed.

Communication is that of simulated ranks, as their trace has it. Memory is what torch's allocator says of one rank in a
world that moves nothing (torch's fake group), where nobody else allocates. Both are of a step after one to warm up.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _EventType
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_map_only

import sim
from benchmarks.engine import NAMES
from benchmarks.toy import Toy, batch, build, has_comm_fusion, step
from hyper_parallel.platform import Platform, register_provider, unregister_provider
from hyper_parallel.platform.cpu import CpuPlatform

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_WATCHED = "watched"  # marks the thread that is watched


@dataclass(frozen=True)
class Case:
    """A mesh, what `fully_shard` is told, and what is done to the model before."""

    mesh: tuple[int, ...]
    what: str
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Toy], None] | None = None

    def build(self, engine: str) -> tuple[nn.Module, Any]:
        names = ("dp_replicate", "dp_shard")[-len(self.mesh) :]
        mesh = init_device_mesh("cpu", self.mesh, mesh_dim_names=names)
        return build(engine, mesh, prepare=self.prepare, **self.options)


def norms_in_bf16(model: Toy) -> None:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.bfloat16()


def linears_frozen_in_bf16(model: Toy) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.bfloat16().requires_grad_(False)


class EightBits(torch.Tensor):
    """A weight that travels in float8, as those of torchao's float8 linears, by FSDP2's tensor extension."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> EightBits:
        made: Any = torch.Tensor._make_wrapper_subclass
        return cast(EightBits, made(cls, held.shape, strides=held.stride(), dtype=held.dtype, device=held.device))

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: Any, size: Any, stride: Any) -> EightBits:
        return EightBits(inner["held"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda weight: weight.held, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs)) if func in _KEEPING else func(*args, **kwargs)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor], torch.Tensor]:
        scale = self.held.abs().max() / 448
        dist.all_reduce(scale, dist.ReduceOp.MAX, group=mesh.get_group())
        return ((self.held / scale).to(torch.float8_e4m3fn),), scale

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor], scale: torch.Tensor, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        full = outputs[0].to(dtype) * scale.to(dtype)
        if out is None:
            return full, (full,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(full)
        return None


_aten = torch.ops.aten
_KEEPING = {
    _aten.detach.default, _aten.empty_like.default, _aten.new_zeros.default, _aten.slice.Tensor, _aten.split.Tensor,
    _aten.copy_.default, _aten.view.default, _aten.as_strided.default, _aten._to_copy.default, _aten.clone.default,
}  # fmt: skip


def linears_in_float8(model: Toy) -> None:
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(EightBits(module.weight.detach()))


_MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
_POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("fp32", {}),
    ("fp32, reshard_after_forward=False", {"reshard_after_forward": False}),
    ("bf16, reduced in fp32", _MIXED),
    ("bf16, reduced in fp32, reshard_after_forward=False", {**_MIXED, "reshard_after_forward": False}),
]
CASES = [
    *(Case(mesh, what, options) for mesh in ((8,), (2, 4)) for what, options in _POLICIES),
    Case((8,), "linears bf16 and frozen, the rest fp32; computed in bf16", _MIXED, linears_frozen_in_bf16),
    Case((8,), "norms bf16, the rest fp32; computed in fp32", {"param_dtype": torch.float32}, norms_in_bf16),
]


def engines() -> list[str]:
    """`ours` and `fsdp2`, and `fused` between them where there is `comm_fusion`."""
    return ["ours", *(["fused"] if has_comm_fusion() else []), "fsdp2"]


# -- communication ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """What one rank communicates: operations by kind, bytes sent and received; of all ranks the most."""

    operations: dict[str, int]
    sent: int
    received: int

    @classmethod
    def of(cls, trace: sim.Trace) -> Traffic:
        """Count the completed operations of a trace."""
        operations: dict[str, int] = {}
        sent = received = 0
        for rank in range(trace.world_size):
            events = [event for event in trace.of_rank(rank) if event.completed]
            for op, count in Counter(event.op for event in events).items():
                operations[op] = max(operations.get(op, 0), count)
            sent = max(sent, sum(event.send_bytes for event in events))
            received = max(received, sum(event.recv_bytes for event in events))
        return cls(operations, sent, received)


def traffic(engine: str, case: Case) -> Traffic:
    """What a rank communicates in the second step of simulated ranks.

    Raises:
        AssertionError: FSDP2 refuses the case: sim.RankFailed, which is also an instance of what a rank raised.
    """
    ranks = torch.Size(case.mesh).numel()
    built: dict[int, tuple[nn.Module, Any]] = {}

    def train() -> None:
        rank = dist.get_rank()
        if rank not in built:
            built[rank] = case.build(engine)
        step(*built[rank], batch(rank, 1, 8))

    with sim.world(ranks) as world:
        world.run(train)
        world.trace.clear()
        world.run(train)
    return Traffic.of(world.trace)


def traffic_table(cases: Sequence[Case] = CASES) -> str:
    """Communication of a rank and step as a Markdown table."""
    lines = [
        f"| mesh | dtypes | engine | {' | '.join(KINDS)} | others | sent, bytes | received, bytes |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for case in cases:
        for engine in engines():
            head = f"| {case.mesh} | {case.what} | {NAMES[engine]} "
            try:
                found = traffic(engine, case)
            except AssertionError as error:
                if "FSDP expects uniform" not in str(error):
                    raise
                lines.append(f"{head}| {' | '.join(['refused'] * 6)} |")
                continue
            counts = [found.operations.get(kind, 0) for kind in KINDS]
            others = sum(found.operations.values()) - sum(counts)
            cells = [*map(str, [*counts, others]), f"{found.sent:,}", f"{found.received:,}"]
            lines.append(f"{head}| {' | '.join(cells)} |")
    return "\n".join(lines)


# -- weights that travel in float8 -------------------------------------------------------------------------------------

FLOAT8 = (
    Case((8,), "bf16", _MIXED),
    Case((8,), "linears of blocks in float8, the rest bf16", _MIXED, linears_in_float8),
)
FLOAT8_STEPS = 5


def float8_table() -> str:
    """Communication and CPU time of a step whose weights travel in float8, beside bf16, as a Markdown table."""
    lines = [
        "| gathered in | engine | all_gather | all_reduce | sent, bytes | CPU ms of a step | beside bf16 |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for engine in ("ours", "fsdp2"):
        before = 0.0
        for case in FLOAT8:
            found, took = traffic(engine, case), median(_losses_and_seconds(engine, case)[1]) * 1e3
            before = before or took
            counts = " | ".join(str(found.operations.get(kind, 0)) for kind in ("all_gather", "all_reduce"))
            figures = f"{found.sent:,} | {took:.0f} | {took / before:.2f}"
            lines.append(f"| {case.what} | {NAMES[engine]} | {counts} | {figures} |")
    for case in FLOAT8:
        (ours, _), (theirs, _) = (_losses_and_seconds(engine, case) for engine in ("ours", "fsdp2"))
        assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=1e-3), (case.what, ours, theirs)
    return "\n".join(lines)


def _losses_and_seconds(engine: str, case: Case) -> tuple[list[float], list[float]]:
    """Losses of rank 0 in some steps after the first, and the CPU seconds of all ranks in each."""

    def train() -> list[tuple[float, float]]:
        built, found = case.build(engine), []
        for number in range(1 + FLOAT8_STEPS):
            dist.barrier()
            start = time.thread_time()
            loss = step(*built, batch(dist.get_rank(), 1, 8))
            took = torch.tensor([time.thread_time() - start], dtype=torch.float64)
            dist.all_reduce(took)
            found += [(float(loss), took.item())] if number else []
        return found

    losses, seconds = zip(*sim.run(train, torch.Size(case.mesh).numel())[0], strict=True)
    return list(losses), list(seconds)


# -- memory ----------------------------------------------------------------------------------------------------------


@dataclass
class Memory:
    """The bytes that torch's CPU allocator has handed out, from `watch_memory`.

    Attributes:
        live: Pairs of a time in ns and the bytes that are live from then on; what was there before counts as none.
        copies: For each of these pairs the bytes among them that a process group has taken for itself, such as gloo's
            flat output of an all_gather: below the profiler's event of a collective, or on another thread.
        phases: Beginning and end, in ns, by name.
    """

    live: list[tuple[int, int]] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    phases: dict[str, tuple[int, int]] = field(default_factory=dict)

    def at_start(self, phase: str) -> int:
        """Live bytes when the phase began."""
        return next((live for when, live in reversed(self.live) if when <= self.phases[phase][0]), 0)

    def peak(self, phase: str) -> int:
        """The most bytes that were live during the phase."""
        begin, end = self.phases[phase]
        return max([self.at_start(phase), *(live for when, live in self.live if begin <= when <= end)])


@contextmanager
def watch_memory() -> Iterator[Memory]:
    """Note what torch's CPU allocator has handed out, on all threads, until the end; then the memory is filled in.

    It is noted whenever the calling thread, or work of a process group that it has issued, allocates or releases. Name
    phases with `torch.profiler.record_function("phase: ...")`, each once. A resized storage counts as what it is: one
    release and one allocation. A release of what was allocated before is not seen.

    ::

        with watch_memory() as memory:
            with record_function("phase: step"):
                step()
        memory.peak("step")
    """
    memory = Memory()
    gc.collect()
    _count_all_threads()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with record_function(_WATCHED):
            pass
        yield memory
    changes: list[tuple[int, int, int, int, bool]] = []
    events = profiler.profiler.kineto_results.experimental_event_tree()
    thread = next(event.start_tid for event in events if event.name == _WATCHED)
    left = [(event, False) for event in events]
    while left:
        event, is_copy = left.pop()
        is_copy = is_copy or event.start_tid != thread or event.name.startswith("c10d::")
        left.extend((child, is_copy) for child in event.children)
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            changes.append((event.start_time_ns, fields.alloc_size, fields.ptr, fields.total_allocated, is_copy))
        elif event.name.startswith("phase: "):
            memory.phases[event.name.removeprefix("phase: ")] = (event.start_time_ns, event.end_time_ns)
    sizes: dict[int, tuple[int, bool]] = {}  # by address; only of what was allocated here
    live, copies, before = 0, 0, None
    for when, size, pointer, total, is_copy in sorted(changes, key=lambda change: change[0]):
        if before is not None:
            unseen = total - size - before  # by threads that the profiler does not follow, which release copies
            live, copies = live + unseen, max(0, copies + unseen)
        before = total
        if size > 0:
            sizes[pointer] = (size, is_copy)
            change = size
        else:
            released, is_copy = sizes.pop(pointer, (0, False))
            change = -released
        live += change
        if is_copy:
            copies = max(0, copies + change)
        memory.live.append((when, live))
        memory.copies.append(copies)


def _count_all_threads() -> None:
    """Let torch's CPU allocator count what is released while no profiler listens, such as by gloo's threads.

    The profiler hears of releases on profiled threads only. Its events also tell the allocator's own total, which is
    right for all threads with this flag of C++. It stays set: what is released without it would stay in that total.
    """
    library = next(Path(torch.__file__).parent.joinpath("lib").glob("libc10.*"))
    ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage").value = True


class NoPlatform(CpuPlatform):
    """The CPU without gloo: gradients are then reduced as on devices, not in the way that is fastest on gloo."""

    backend = "fake"


@contextmanager
def one_rank(ranks: int) -> Iterator[None]:
    """Be rank 0 of a world that moves nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def provide(device_type: str | None) -> Platform | None:
        return NoPlatform() if device_type in (None, "cpu") else None

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    register_provider(provide)
    try:
        yield
    finally:
        unregister_provider(provide)
        dist.destroy_process_group()


@dataclass(frozen=True)
class Held:
    """Bytes of one rank: between steps, and at most during one."""

    resting: int
    peak: int


def held(engine: str, case: Case, sequences: int, length: int) -> Held:
    """The memory of the third step of one rank."""
    tokens = batch(0, sequences, length)
    with one_rank(torch.Size(case.mesh).numel()), watch_memory() as memory:
        model, optimizer = case.build(engine)
        for number in range(3):
            with record_function(f"phase: {number}"):
                step(model, optimizer, tokens)
    return Held(memory.at_start("2"), memory.peak("2"))


def activations(case: Case, sequences: int, length: int) -> int:
    """The most that the unwrapped model holds during forward and backward beyond its parameters.

    Each gradient is dropped as soon as it is there; computed in `param_dtype`, as the units would.
    """
    tokens = batch(0, sequences, length)
    with watch_memory() as memory:
        torch.manual_seed(0)
        model = Toy().to(case.options.get("param_dtype"))
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # updates nothing
        for number in range(2):
            with record_function(f"phase: {number}"):
                step(model, optimizer, tokens)
    return memory.peak("1") - memory.at_start("1")


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def bound(case: Case, active: int) -> int:
    """The aim: the rank's shards, their gradients and optimizer state, two units whole with gradients, activations."""
    model = Toy()
    elements = sum(parameter.numel() for parameter in model.parameters())
    largest = max(sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks)
    rest = elements - sum(parameter.numel() for block in model.blocks for parameter in block.parameters())
    param_size = case.options.get("param_dtype", torch.float32).itemsize
    reduce_size = case.options.get("reduce_dtype", torch.float32).itemsize
    return 4 * 4 * elements // case.mesh[-1] + 2 * max(largest, rest) * (param_size + reduce_size) + active


def memory_table(shapes: Sequence[tuple[int, int]] = ((1, 32), (4, 128))) -> str:
    """Memory of a rank as a Markdown table."""
    names = [NAMES[engine] for engine in engines()]
    lines = [
        f"| mesh | dtypes | batch | activations | between steps: {' | '.join(names)} | peak: {' | '.join(names)} "
        "| ours / FSDP2 | at most |",
        f"|---|---|---|--:|{'--:|' * 2 * len(names)}--:|--:|",
    ]
    for case in [case for case in CASES if case.prepare is None]:
        for shape in shapes if case.options.get("reshard_after_forward", True) else shapes[:1]:
            lines.append(_memory_row(case, shape))
    return "\n".join(lines)


def _memory_row(case: Case, shape: tuple[int, int]) -> str:
    torch.set_num_threads(1)
    found = {engine: held(engine, case, *shape) for engine in engines()}
    active = activations(case, *shape)
    cells = [
        f"{case.mesh} | {case.what} | {shape[0]}x{shape[1]} | {_mb(active)}",
        *(_mb(found[engine].resting) for engine in found),
        *(_mb(found[engine].peak) for engine in found),
        f"{found['ours'].peak / found['fsdp2'].peak:.2f}",
        # Kept for backward, all units are whole at once: two are then no bound.
        _mb(bound(case, active)) if case.options.get("reshard_after_forward", True) else "-",
    ]
    return f"| {' | '.join(cells)} |"


def _mb(size: int) -> str:
    return f"{size / 1e6:.2f}"
