"""One operation for each kernel of what is compiled: what it moves, what vanishes, and how many there are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.published.float8 import use_float8
from hyper_parallel.models.llama import Block, LlamaConfig
from sim.mesh.program import Alloc, Comm, Event, Free, Op, Place, Program, Segment, Touch
from sim.mesh.tracing.compiled import compile_block
from sim.mesh.tracing.fusion import fuse, fuse_events, order_by_kernel
from sim.mesh.tracing.kernels import AcceleratorKernels
from sim.mesh.tracing.record import Recorder

_CONFIG = LlamaConfig(256, 256, 768, 1, 4, 2, 512)
_TOKENS = 512
_PLACES = [Place("forward"), Place("forward", compiled=1), Place("forward", compiled=2)]


def _op(name: str, place: int, reads: tuple[Touch, ...], writes: tuple[Touch, ...], kind: str = "memory") -> Op:
    return Op(f"aten.{name}", kind, 0, reads, writes, "bfloat16", (), 0, place)


def _record(checkpointing: str | None, *, float8: bool = False) -> tuple[Recorder, list[Event], list[Event]]:
    """Record forward and backward of a block; None: not compiled."""
    recorder = Recorder()
    with recorder.recording(), AcceleratorKernels():
        block = Block(_CONFIG)
        for child in block.modules():
            for name, param in child._parameters.items():
                if param is not None:
                    child._parameters[name] = torch.nn.Parameter(torch.empty_like(param, dtype=torch.bfloat16))
        if float8:
            use_float8(block)
        if checkpointing is not None:
            compile_block(block, checkpointing)
        x = torch.zeros(1, _TOKENS, 256, dtype=torch.bfloat16, requires_grad=True)
        tables = [torch.zeros(_TOKENS, 64, dtype=torch.bfloat16) for _ in range(2)]
        gradient = torch.zeros_like(x)
        for _ in range(2):
            block.zero_grad()
            x.grad = None
            recorder.cut()
            y = block(x, *tables)
            middle = len(recorder.events)
            y.backward(gradient)
            del y
    events = recorder.cut()
    return recorder, events[:middle], events[middle:]


def _live(events: list[Event]) -> tuple[int, int]:
    """Return the most bytes, and those at the end, of blocks taken by events."""
    live, most = dict[int, int](), 0
    for event in events:
        if isinstance(event, Alloc):
            live[event.block] = event.bytes
        elif isinstance(event, Free):
            live.pop(event.block, None)
        most = max(most, sum(live.values()))
    return most, sum(live.values())


def test_a_chain_becomes_one_kernel_and_what_is_between_vanishes() -> None:
    events: list[Event] = [
        Alloc(2, 8, 0),
        _op("mul", 1, (Touch(1, 8),), (Touch(2, 8),)),
        Alloc(3, 8, 0),
        _op("neg", 1, (Touch(2, 8),), (Touch(3, 8),)),
        Free(2),
        Alloc(4, 8, 0),
        _op("add", 1, (Touch(3, 8), Touch(1, 8)), (Touch(4, 8),)),
        Free(3),
    ]
    alloc, kernel = fuse_events(events, _PLACES, {1: 8, 2: 8, 3: 8, 4: 8})
    assert alloc == Alloc(4, 8, 0)
    assert isinstance(kernel, Op)
    assert (kernel.kind, kernel.name, kernel.bytes) == ("fused", "fused.mul_neg_add", 16)
    assert kernel.place == 1


def test_numbers_keep_kernels_apart_and_what_has_none_stays() -> None:
    events: list[Event] = [
        Alloc(2, 8, 0),
        _op("mul", 1, (Touch(1, 8),), (Touch(2, 8),)),
        Alloc(3, 8, 0),
        _op("neg", 2, (Touch(2, 8),), (Touch(3, 8),)),
        Free(2),
        Alloc(4, 8, 0),
        _op("add", 0, (Touch(3, 8),), (Touch(4, 8),)),
        Alloc(5, 8, 0),
        _op("add", 0, (Touch(4, 8),), (Touch(5, 8),)),
    ]
    assert fuse_events(events, _PLACES, {}) == events


def test_products_and_communication_are_left_alone() -> None:
    comm = Comm("all_gather", 0, 8, 8, "bfloat16", 0, 0, 0)
    product = _op("mm", 1, (Touch(1, 8),), (Touch(2, 8),), "matmul")
    events: list[Event] = [product, _op("mul", 1, (Touch(2, 8),), (Touch(3, 8),))]
    assert fuse_events(events, _PLACES, {}) == events
    split: list[Event] = [
        _op("mul", 1, (Touch(1, 8),), (Touch(2, 8),)),
        comm,
        _op("neg", 1, (Touch(2, 8),), (Touch(3, 8),)),
    ]
    assert fuse_events(split, _PLACES, {}) == split


def test_the_result_takes_the_place_of_what_is_read_for_the_last_time() -> None:
    events: list[Event] = [
        Alloc(2, 8, 0),
        _op("mul", 1, (Touch(1, 8),), (Touch(2, 8),)),
        Alloc(3, 8, 0),
        _op("neg", 1, (Touch(2, 8),), (Touch(3, 8),)),
        Free(2),
        Free(1),
    ]
    sizes = {1: 8, 2: 8, 3: 8}
    names = [type(event).__name__ for event in fuse_events(events, _PLACES, sizes, own={1})]
    assert names == ["Free", "Alloc", "Op"]
    names = [type(event).__name__ for event in fuse_events(events, _PLACES, sizes, own=())]  # somebody else's memory
    assert names == ["Alloc", "Op", "Free"]
    names = [type(event).__name__ for event in fuse_events(events, _PLACES, {**sizes, 1: 9}, own={1})]
    assert names == ["Alloc", "Op", "Free"]


def test_two_that_read_halves_read_the_block_once() -> None:
    halves = [_op("neg", 1, (Touch(1, 4),), (Touch(2, 4),)), _op("add", 1, (Touch(1, 4), Touch(2, 4)), (Touch(3, 4),))]
    (kernel,) = fuse_events(halves, _PLACES, {1: 8})
    assert isinstance(kernel, Op)
    assert kernel.reads == (Touch(1, 8),)
    wholes = [_op("neg", 1, (Touch(1, 8),), (Touch(2, 8),)), _op("add", 1, (Touch(1, 8), Touch(2, 8)), (Touch(3, 8),))]
    (kernel,) = fuse_events(wholes, _PLACES, {1: 8})
    assert isinstance(kernel, Op)
    assert kernel.reads == (Touch(1, 8),)


def test_a_program_is_fused_segment_by_segment() -> None:
    events: list[Event] = [Alloc(2, 8, 0), _op("mul", 1, (Touch(1, 8),), (Touch(2, 8),))]
    events += [Alloc(3, 8, 0), _op("neg", 1, (Touch(2, 8),), (Touch(3, 8),)), Free(2)]
    key = ("forward", 0, "only")
    program = Program(0, 1, 1, places=_PLACES, segments={key: Segment(*key, events)}, order=[(key, 0)])
    fused = fuse(program)
    assert [type(event).__name__ for event in fused.segments[key].events] == ["Alloc", "Op"]
    assert len(program.segments[key].events) == 5


@pytest.mark.tier("test")
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_a_block_has_the_kernels_that_torchs_compiler_makes(checkpointing: str) -> None:
    recorder, forward, backward = _record(checkpointing)
    own = {event.block for event in (*forward, *backward) if isinstance(event, Alloc)}
    forward, backward = (fuse_events(part, recorder.places, recorder.sizes, own) for part in (forward, backward))
    kinds = Counter(event.kind for event in forward if isinstance(event, Op))
    # norm, positions of q and of k, residual and norm, silu and product, residual: counted in TorchInductor's output
    assert kinds == {"matmul": 7, "attention": 1, "fused": 6}
    kinds = Counter(event.kind for event in backward if isinstance(event, Op))
    again = {"none": 0, "selective": 0, "full": 6}[checkpointing]  # all products but the last one
    assert kinds["matmul"] == 14 + again
    assert kinds["attention_backward"] == 1
    if checkpointing == "none":
        assert 6 <= kinds["fused"] <= 8  # TorchInductor has 6, which are 7 where weights of norms are summed apart


@pytest.mark.tier("full")
@pytest.mark.parametrize("float8", [False, True])
def test_no_kernel_touches_what_has_vanished_and_the_same_is_left(float8: bool) -> None:
    recorder, forward, backward = _record("none", float8=float8)
    before = _live([*forward, *backward])
    fused = fuse_events([*forward, *backward], recorder.places, recorder.sizes)
    after = _live(fused)
    assert after[1] == before[1]
    assert after[0] < before[0]
    taken = {event.block for event in (*forward, *backward) if isinstance(event, Alloc)}
    there = {event.block for event in fused if isinstance(event, Alloc)}
    for event in fused:
        if isinstance(event, Op):
            assert not {touch.block for touch in (*event.reads, *event.writes)} & (taken - there)
    assert sum(event.flops for event in fused if isinstance(event, Op)) == sum(
        event.flops for event in (*forward, *backward) if isinstance(event, Op)
    )
    moved = [sum(event.bytes for event in part if isinstance(event, Op)) for part in ((*forward, *backward), fused)]
    assert moved[1] < 0.6 * moved[0]


@pytest.mark.tier("full")
def test_a_compiled_block_takes_less_memory_than_one_that_is_not() -> None:
    peaks = []
    for checkpointing in (None, "none", "selective", "full"):
        recorder, forward, _ = _record(checkpointing)
        peaks.append(_live(fuse_events(forward, recorder.places, recorder.sizes))[1] / _TOKENS)
    d, kv, f, heads = 256, 128, 768, 4
    fused = 2 * (5 * d + 2 * kv + 3 * f) + 4 * (2 + heads)  # x itself is not taken here, and the result is:
    assert peaks[1] == pytest.approx(fused + 2 * d, rel=0.01)
    assert peaks[0] == pytest.approx(fused + 2 * f + 2 * d, rel=0.01)  # silu is kept, too
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.tier("full")
def test_float8_that_is_not_compiled_moves_many_times_the_bytes() -> None:
    moved = {}
    for compiled in (False, True):
        for float8 in (False, True):
            recorder, forward, backward = _record("none" if compiled else None, float8=float8)
            events = fuse_events([*forward, *backward], recorder.places, recorder.sizes)
            moved[compiled, float8] = sum(
                event.bytes for event in events if isinstance(event, Op) and event.kind in ("memory", "fused")
            )
    assert moved[False, True] > 5 * moved[False, False]
    assert moved[True, True] < 2 * moved[True, False]


@pytest.mark.tier("test")
@given(st.lists(st.integers(-20, 20), min_size=48, max_size=48), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=10)
def test_rows_of_any_size_keep_their_digits_in_rowwise_products(exponents: list[int], steps: int, seed: int) -> None:
    """Within 1/16 of each factor, what three bits round, and what the smallest numbers of a row or column lose."""
    generator = torch.Generator().manual_seed(seed)
    linear = torch.nn.Linear(32 * steps, 16, bias=False, dtype=torch.bfloat16)
    x, grad = (torch.randn(48, size, generator=generator) for size in (32 * steps, 16))
    x = (x * 2.0 ** torch.tensor(exponents)[:, None]).bfloat16().requires_grad_()
    use_float8(linear, rowwise=True)
    y = linear(x)
    y.backward(grad.bfloat16())
    rows, weight = x.detach().float(), linear.weight.detach().float()
    grad = grad.bfloat16().float()
    for found, one, other in ((y, rows, weight.t()), (x.grad, grad, weight), (linear.weight.grad, grad.t(), rows)):
        most = one.abs() @ other.abs() + 0.02 * one.shape[1] * one.abs().amax(1)[:, None] * other.abs().amax(0)
        assert found is not None
        assert ((found.float() - one @ other).abs() <= 0.14 * most).all()


# -- which operations become one -------------------------------------------------------------------------------------


def _kernels(function: Any, *shapes: tuple[int, ...]) -> list[list[str]]:
    with FakeTensorMode():
        module = make_fx(function)(*[torch.zeros(shape) for shape in shapes])
    for node in module.graph.nodes:
        node.meta.setdefault("val", None)
    found: dict[int, list[str]] = {}
    for node in order_by_kernel(module.graph).nodes:
        if node.op == "call_function":
            found.setdefault(node.meta["kernel"], []).append(node.target._schema.name.rpartition("::")[2])
    return [[name for name in names if name not in ("view", "t", "detach")] for names in found.values()]


def test_elementwise_operations_go_with_the_one_who_reads_them() -> None:
    assert _kernels(lambda x: x.sin().cos() + 1, (8, 8)) == [["sin", "cos", "add"]]


def test_what_a_product_reads_is_written_first() -> None:
    assert _kernels(lambda x, w: (x.sin() @ w).cos(), (8, 8), (8, 8)) == [["sin"], ["mm"], ["cos"]]


def test_a_reduction_and_what_uses_it_are_one_kernel() -> None:
    names = _kernels(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)), (8, 16))
    assert names == [["pow", "mean", "rsqrt", "mul"]]


def test_who_needs_sums_over_rows_and_all_elements_reads_them_once_more() -> None:
    names = _kernels(lambda x: x * x.abs().amax(0, keepdim=True).reciprocal(), (8, 16))
    assert names == [["abs", "amax"], ["reciprocal", "mul"]]
    assert _kernels(lambda x: x.abs().amax(0).reciprocal(), (8, 16)) == [["abs", "amax", "reciprocal"]]


def test_reductions_over_other_dims_are_other_kernels() -> None:
    assert _kernels(lambda x: (x.sin().sum(0), x.sin().sum(1)), (8, 16)) == [["sin", "sum"], ["sin", "sum"]]


def test_two_that_read_the_same_are_one_kernel() -> None:
    assert _kernels(lambda x: (x.sin(), x.cos()), (8, 16)) == [["sin", "cos"]]


def test_what_lies_around_a_product_is_not_one_kernel() -> None:
    names = _kernels(lambda x, w: ((x.sin() @ w) + x, x.cos()), (8, 8), (8, 8))
    assert names == [["sin"], ["mm"], ["add", "cos"]]
