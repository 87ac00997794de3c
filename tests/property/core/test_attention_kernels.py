"""Fused attention of devices: operators called as their schemas and layouts want it, equal to plain products."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from attention_kit import KERNELS, STAND_INS, blocks_by, gpu_operators_on_the_cpu
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import sim
from hyper_parallel.core.activations import ActivationPolicy
from hyper_parallel.core.activations.api import checkpointed
from hyper_parallel.core.context_parallel import ContextParallel, attention
from hyper_parallel.core.context_parallel.attention import AttentionBlock, Joined
from hyper_parallel.core.machine.description import find_machine
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.models import LlamaConfig
from hyper_parallel.platform import attention_operators, get_platform
from hyper_parallel.platform.attention import (
    CudnnAttention,
    EfficientAttention,
    FlashAttention,
    HostAttention,
    NpuAttention,
    gpu_attention,
)
from sim.late.switch import why_not
from sim.mesh.cost import ring_kernel_of
from sim.mesh.estimate import estimate
from sim.mesh.job import Job
from sim.mesh.models import find_model
from sim.mesh.program import Op
from sim.mesh.tracing.kernels import fused_attention
from sim.mesh.tracing.kinds import kind_of
from sim.mesh.tracing.lone import LoneWorld
from sim.mesh.tracing.record import Recorder

pytestmark = pytest.mark.sim

ON_GPUS = (FlashAttention, EfficientAttention, CudnnAttention)
NAMES = ("host", "flash", "efficient", "cudnn")
EPS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
needs_late = pytest.mark.skipif(bool(why_not()), reason=why_not())


def drawn(dtype: torch.dtype, queries: int, keys: int, *, heads=(4, 2), size: int = 8) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(queries + 7 * keys)
    shapes = ((2, heads[0], queries, size), (2, heads[1], keys, size), (2, heads[1], keys, size))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in (*shapes, shapes[0]))


@pytest.fixture
def on_the_cpu():
    with gpu_operators_on_the_cpu():
        yield


# -- what the operators are called with --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STAND_INS)
def test_stand_ins_take_what_the_schema_says(name: str) -> None:
    """Also in the order of the schema: what is passed by position means the same."""
    code = STAND_INS[name].__code__
    taken = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    arguments = getattr(torch.ops.aten, name).default._schema.arguments
    assert len(taken) == len(arguments)
    by_keyword = [argument.name for argument in arguments if argument.kwarg_only]
    assert list(taken[code.co_argcount :]) == by_keyword == ["scale"]
    for ours, theirs in zip(taken, arguments, strict=True):
        if ours in ("dropout_p", "is_causal", "scale", "compute_log_sumexp", "grad_input_mask", "max_q", "max_k"):
            assert ours == theirs.name


@pytest.mark.parametrize("kind", ON_GPUS)
@pytest.mark.parametrize(("heads", "size", "queries", "keys"), [((8, 8), 64, 40, 24), ((8, 2), 20, 33, 33)])
@pytest.mark.parametrize("causal", [True, False])
def test_shapes_by_the_operators_own_meta_kernels(kind, heads, size, queries, keys, causal: bool) -> None:
    with FakeTensorMode():
        q, k, v, grad = drawn(torch.bfloat16, queries, keys, heads=heads, size=size)
        out, lse = kind().forward(q, k, v, causal, 0.1)
        grads = kind().backward(grad, q, k, v, out, lse, causal, 0.1)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    assert [each.shape for each in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("name", [name for name in STAND_INS if "backward" not in name])
def test_stand_ins_return_what_the_meta_kernels_return(name: str) -> None:
    more = () if "flash" in name else (None, True)
    q, k, v, _ = drawn(torch.bfloat16, 40, 24, heads=(4, 4))
    op = getattr(torch.ops.aten, name)
    with gpu_operators_on_the_cpu():
        found = op(q, k, v, *more, scale=0.1)
    expected = op(*(x.to("meta") for x in (q, k, v)), *more, scale=0.1)
    assert len(found) == len(expected)
    for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if isinstance(theirs, torch.Tensor):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), f"result {place}"
        elif isinstance(theirs, int):
            assert ours == theirs, f"result {place}"


def test_kernels_that_are_called_wrongly_fail() -> None:
    """The stand-ins are not lenient: unpadded log-sums, head sizes, shared heads and dtypes are refused."""

    class Unpadded(EfficientAttention):
        _ALIGNED = 1

    class Odd(FlashAttention):
        head_dim_multiple = 1

    class Shared(EfficientAttention):
        shares_heads = True

    q, k, v, grad = drawn(torch.bfloat16, 5, 5, size=6)
    with gpu_operators_on_the_cpu():
        out, lse = EfficientAttention().forward(q, k, v, True, 1.0)
        with pytest.raises(AssertionError):
            Unpadded().backward(grad, q, k, v, out, lse, True, 1.0)
        with pytest.raises(AssertionError, match="a multiple of 8"):
            Odd().forward(q, k, v, True, 1.0)
        with pytest.raises(AssertionError, match="no shared heads"):
            Shared().forward(q, k, v, True, 1.0)
        with pytest.raises(AssertionError, match="does not take"):
            FlashAttention().forward(q.float(), k.float(), v.float(), True, 1.0)


# -- what they compute -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("on_the_cpu")
@given(
    name=st.sampled_from(NAMES),
    pick=st.integers(0, 3),
    queries=st.integers(1, 40),
    keys=st.integers(2, 40),
    shared=st.integers(1, 3),
    size=st.sampled_from([1, 5, 8]),
    causal=st.booleans(),
)
def test_two_blocks_by_a_kernel_are_one_by_products(name, pick, queries, keys, shared, size, causal) -> None:
    """Forward merged, backward of each by itself with the log-sum of both."""
    kernel, dtypes = KERNELS[name]
    dtype = dtypes[pick % len(dtypes)]
    queries = keys if causal else queries
    q, k, v, grad = drawn(dtype, queries, keys, heads=(2 * shared, 2), size=size)
    rest = drawn(dtype, queries, 3, heads=(2 * shared, 2), size=size)[1:3]
    blocks = [(k, v, causal), (*rest, False)]
    (first, lse), (second, more) = (kernel.forward(q, *keys_, seen, 0.3) for *keys_, seen in blocks)
    joined = Joined(first.to(lse.dtype, copy=True), lse.clone())
    joined.add(second, more, slice(None))
    out = joined.out.to(dtype)
    found = [kernel.backward(grad, q, *keys_, out, joined.lse, seen, 0.3) for *keys_, seen in blocks]
    seen = torch.ones(queries, keys + 3, dtype=torch.bool)
    seen[:, :keys].tril_(0 if causal else keys)
    whole = [x.double().requires_grad_() for x in (q, torch.cat((k, rest[0]), 2), torch.cat((v, rest[1]), 2))]
    expected = torch.nn.functional.scaled_dot_product_attention(*whole, attn_mask=seen, scale=0.3, enable_gqa=True)
    expected.backward(grad.double())
    grads = (found[0][0] + found[1][0], *(torch.cat(pair, 2) for pair in zip(found[0][1:], found[1][1:], strict=True)))
    for ours, theirs in zip((out, *grads), (expected, *(x.grad for x in whole)), strict=True):
        bound = 4 * EPS[dtype] * (1 + theirs.detach().abs().max().item()) * (shared + 1)
        assert (ours.double() - theirs).abs().max() <= bound


def test_a_block_with_its_own_log_sum_would_be_noticed() -> None:
    q, k, v, grad = drawn(torch.float32, 6, 6)
    out, lse = HostAttention().forward(q, k, v, False, 0.3)
    right = AttentionBlock(q, k, v, False, 0.3)._gradients_by_hand(grad, out, lse + 1.0)
    wrong = HostAttention().backward(grad, q, k, v, out, lse, False, 0.3)
    assert not torch.allclose(right[0], wrong[0], atol=1e-2)


# -- which is taken ----------------------------------------------------------------------------------------------------


def test_torch_chooses_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import SDPBackend as Choice

    q, k, v, _ = drawn(torch.bfloat16, 8, 8)
    answers: dict[bool, Choice] = {}

    def choice(q, k, v, mask, dropout_p, is_causal, *, scale, enable_gqa=False):
        assert (mask, dropout_p, is_causal, scale) == (None, 0.0, True, 0.5)
        assert enable_gqa == (q.shape[1] != k.shape[1])
        return answers[enable_gqa].value

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    kinds = {Choice.FLASH_ATTENTION: FlashAttention, Choice.EFFICIENT_ATTENTION: EfficientAttention}
    kinds |= {Choice.CUDNN_ATTENTION: CudnnAttention, Choice.MATH: None}
    for shared, alone in itertools.product(kinds, kinds):
        answers.update({True: shared, False: alone})
        found = gpu_attention(q, k, v, True, 0.5)
        wanted = kinds[shared] or (EfficientAttention if alone is Choice.EFFICIENT_ATTENTION else None)
        assert (None if found is None else type(found)) is wanted
    assert gpu_attention(q[:0], k[:0], v[:0], True, 0.5) is None


def test_devices_without_a_kernel_get_products() -> None:
    q, k, v, _ = drawn(torch.float32, 4, 4)
    assert isinstance(attention.fused(q, k, v, True, 1.0), HostAttention)
    assert attention.fused(*(x.mT.contiguous().mT for x in (q, k, v)), True, 1.0) is None
    assert attention.fused(*(x.to("meta") for x in (q, k, v)), True, 1.0) is None
    with FakeTensorMode():
        assert attention.fused(*(torch.empty(1, 1, 2, 8, device="xpu") for _ in range(3)), True, 1.0) is None


# -- what an estimate records ------------------------------------------------------------------------------------------


def ring_of(device: str, balance: bool) -> ContextParallel:
    return ContextParallel(init_device_mesh(device, (4,), mesh_dim_names=("cp",)), 1, balance)


def ring_step(cp: ContextParallel, full: tuple[torch.Tensor, ...], causal: bool) -> None:
    """Forward and backward of the calling rank's share."""
    q, k, v, grad = (cp.split(x, dim=2) for x in full)
    local = [x.requires_grad_() for x in (q, k, v)]
    torch.autograd.grad(cp.attend(*local, is_causal=causal), local, grad)


def ran(full: tuple[torch.Tensor, ...], device: str, *, balance: bool, causal: bool) -> list[list[str]]:
    """Names of the operations that each rank has run, on tensors with values; those of kernels only."""

    def body() -> list[str]:
        cp, on_device = ring_of(device, balance), tuple(x.to(device) for x in full)
        with Operators() as operators:
            ring_step(cp, on_device, causal)
        named = zip(operators.names, operators.kinds, strict=True)
        return [name for name, kind in named if kind != "host" and not name.startswith("c10d.")]

    return sim.run(body, 4, **({"device": "npu"} if device == "npu" else {}))


def recorded(full: tuple[torch.Tensor, ...], kernel: str, rank: int, *, balance: bool, causal: bool) -> list[Op]:
    """The operations that an estimate records of a rank."""
    recorder = Recorder()
    recorder.ring_kernel = kernel

    def body() -> list[Op]:
        cp = ring_of("cpu", balance)
        with recorder.recording():
            fakes = tuple(torch.empty(x.shape, dtype=x.dtype) for x in full)
            ring_step(cp, fakes, causal)
            return [event for event in recorder.cut() if isinstance(event, Op) and event.kind != "host"]

    with LoneWorld(4, rank, recorder) as world:
        return world.run_alone(body)


@pytest.mark.tier("test", each=3)
@pytest.mark.parametrize("balance", [True, False], ids=["balanced", "in order"])
@pytest.mark.parametrize("kernel", ["cpu", "flash", "efficient", "cudnn", pytest.param("npu", marks=needs_late)])
def test_what_is_recorded_of_a_ring_is_what_the_device_runs(kernel: str, balance: bool) -> None:
    """Operation by operation, of fewer key heads: the blocks by the device's kernel, and all that is between them."""
    full = drawn(torch.float32 if kernel in ("cpu", "efficient") else torch.bfloat16, 32, 32)
    device = "flash" if kernel == "efficient" else kernel  # of float32, on GPUs
    found = [recorded(full, device, rank, balance=balance, causal=True) for rank in (0, 0, 1, 2, 3)][1:]
    with blocks_by(kernel if kernel in NAMES else "host") if kernel != "npu" else nullcontext():
        wanted = ran(full, "npu" if kernel == "npu" else "cpu", balance=balance, causal=True)
    assert [[op.name for op in of_rank] for of_rank in found] == wanted


@pytest.mark.parametrize(
    ("kernel", "balance", "causal"),
    [("flash", True, True), ("flash", False, True), ("flash", True, False), ("npu", True, True)],
)
def test_all_ranks_of_a_ring_together_compute_one_attention(kernel: str, balance: bool, causal: bool) -> None:
    """Scores that are seen are those of the whole, and nothing is written that is as large as those of a block."""
    full = drawn(torch.bfloat16, 4096, 4096, heads=(8, 2), size=16)
    rows = [recorded(full, kernel, rank, balance=balance, causal=causal) for rank in range(4)]
    for kind, products in (("attention", 2), ("attention_backward", 5)):
        seen = 0
        for op in (op for row in rows for op in row if op.kind == kind):
            batch, heads, kv_heads, queries, keys, size, is_causal = op.shape
            assert (batch, heads, kv_heads, size) == (2, 8, 2, 16)
            assert op.flops == 2 * products * batch * heads * queries * keys * size
            seen += queries * (queries + 1) // 2 if is_causal else queries * keys
        assert seen == (4096 * 4097 // 2 if causal else 4096**2)
    written = max(touch.bytes for row in rows for op in row for touch in op.writes)
    assert written < 2 * 8 * 512 * 1024 * 2  # of the smallest block, in bfloat16


TINY = LlamaConfig(num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, hidden_size=256, max_seq_len=512)


@pytest.mark.tier("test", each=2)
@pytest.mark.parametrize(
    ("hardware", "names"),
    [
        ("h100-sxm", ("aten._scaled_dot_product_cudnn_attention", "aten._scaled_dot_product_cudnn_attention_backward")),
        (
            "a100-80gb",
            ("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_flash_attention_backward"),
        ),
        ("ascend-910b", ("npu.npu_fusion_attention", "npu.npu_fusion_attention_grad")),
    ],
)
def test_a_step_with_a_ring_has_the_attention_of_its_device_and_no_other(hardware: str, names: tuple[str, str]) -> None:
    """One of the own keys and one of those of each other rank, in every layer."""
    dims = ParallelDims(cp=4, ulysses_degree=1, world_size=4)
    (program,) = estimate(TINY, dims, 1, 512, hardware).programs
    events = [event for segment, _ in program.segments_in_order() for event in segment.events]
    found = Counter((op.name, op.kind) for op in events if isinstance(op, Op) and op.kind.startswith("attention"))
    assert found == {(names[0], "attention"): 2 * 4, (names[1], "attention_backward"): 2 * 4}


NAMED = ("h100-sxm", "a100-80gb", "b200", "ascend-910b", "laptop-cpu")


def test_whose_attention_a_hardware_has() -> None:
    found = {name: ring_kernel_of(find_machine(name)) for name in NAMED}
    assert found == {
        "h100-sxm": "cudnn",
        "a100-80gb": "flash",
        "b200": "cudnn",
        "ascend-910b": "npu",
        "laptop-cpu": "cpu",
    }


@pytest.mark.parametrize(
    ("device", "dtype", "size", "kind"),
    [
        ("flash", torch.bfloat16, 256, FlashAttention),
        ("flash", torch.float16, 64, FlashAttention),
        ("flash", torch.bfloat16, 264, EfficientAttention),
        ("cudnn", torch.bfloat16, 128, CudnnAttention),
        ("cudnn", torch.bfloat16, 192, FlashAttention),
        ("cudnn", torch.bfloat16, 100, FlashAttention),
        ("cudnn", torch.float32, 64, EfficientAttention),
        ("cudnn", torch.float64, 64, type(None)),
        ("npu", torch.float32, 512, NpuAttention),
        ("npu", torch.float32, 520, type(None)),
        ("npu", torch.float64, 64, type(None)),
        ("cpu", torch.float64, 64, HostAttention),
    ],
)
def test_which_kernel_a_device_would_take(device: str, dtype: torch.dtype, size: int, kind: type) -> None:
    with FakeTensorMode():
        q, k, v, _ = drawn(dtype, 8, 8, size=size)
        assert type(fused_attention(device, q, k, v)) is kind
        assert fused_attention(device, q[:0], k[:0], v[:0]) is None


def test_a_kernel_that_nobody_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot estimate(?s:.*)ring_kernel: 'flesh'(?s:.*)'cudnn'"):
        Job(find_model(TINY), ParallelDims(world_size=1), 1, 512, ring_kernel="flesh")


# -- on a late device --------------------------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    """Notes which operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.kinds: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.replace("::", "."))
        self.kinds.append(kind_of(func))
        return func(*args, **(kwargs or {}))


@needs_late
def test_a_late_device_computes_with_the_operators_of_torch_npu() -> None:
    full = drawn(torch.float32, 16, 16)

    def body() -> tuple[list[torch.Tensor], list[str]]:
        q, k, v, grad = (x.to("npu") for x in full)
        kernel = get_platform("npu").attention(q, k, v, True, 0.3)
        assert isinstance(kernel, NpuAttention)
        assert get_platform("npu").attention(*(x.double() for x in (q, k, v)), True, 0.3) is None
        block = AttentionBlock(q, k, v, True, 0.3)
        with Operators() as operators:
            out, lse = block.forward()
            grads = block.backward(grad, out, lse)
        assert torch.ops.npu.npu_fusion_attention.default in attention_operators()
        assert torch.equal(out, kernel.forward(q, k, v, True, 0.3)[0])
        return [x.cpu() for x in (out, lse, *grads)], operators.names

    found, names = sim.run(body, 1, device="npu")[0]
    assert [name for name in names if name.startswith("npu.")] == [
        "npu.npu_fusion_attention",
        "npu.npu_fusion_attention_grad",
    ]
    block = AttentionBlock(*full[:3], True, 0.3)
    out, lse = block._by_hand()
    for ours, theirs in zip(found, (out, lse, *block._gradients_by_hand(full[3], out, lse)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


class Attends(nn.Module):
    """One projection, for queries, keys and values, and attention over a ring."""

    def __init__(self, cp: ContextParallel) -> None:
        super().__init__()
        self.cp = cp
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        return self.cp.attend(y, y, y)


@needs_late
@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_selective_checkpointing_keeps_what_the_operator_returns(device: str) -> None:
    """The operator runs once, and twice where all is computed again; gradients are the same."""

    def body(policy: str) -> tuple[torch.Tensor, int]:
        cp = ContextParallel(init_device_mesh(device, (2,), mesh_dim_names=("cp",)), 1)
        module = Attends(cp).to(device)
        whole = torch.linspace(-1, 1, 2 * 8 * 8).view(1, 2, 8, 8).to(device)
        calls = 0

        class Counts(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                nonlocal calls
                calls += func in attention_operators()
                return func(*args, **(kwargs or {}))

        run = module if policy == "none" else checkpointed(module, ActivationPolicy.of(policy))
        with Counts():
            run(cp.split(whole, dim=2)).square().sum().backward()
        return module.weight.grad.cpu(), calls

    options = {"device": "npu"} if device == "npu" else {}
    found = {policy: sim.run(body, 2, (policy,), **options) for policy in ("none", "full", "selective")}
    for rank in range(2):
        assert [found[policy][rank][1] for policy in found] == [2, 4, 2]
        for policy in ("full", "selective"):
            assert torch.equal(found[policy][rank][0], found["none"][rank][0])


@needs_late
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"keep_prob": 0.5}, "and .'keep_prob'."),
        ({"sparse_mode": 3}, "sparse_mode=3"),
        ({"atten_mask": torch.ones(8, 8, dtype=torch.bool), "sparse_mode": 2}, "needs a mask"),
        ({"head_num": 3}, "3 heads"),
        ({"query": torch.ones(1, 8, 8, 2).transpose(1, 3)}, "must be contiguous"),
    ],
)
def test_the_simulated_operator_refuses_what_it_has_not(options, error: str) -> None:
    def body() -> None:
        x = torch.ones(1, 2, 8, 8, device="npu")
        given = {"query": x, "key": x, "value": x, "head_num": 2, "input_layout": "BNSD", **options}
        given = {name: each.to("npu") if isinstance(each, torch.Tensor) else each for name, each in given.items()}
        with pytest.raises((NotImplementedError, RuntimeError), match=error):
            torch.ops.npu.npu_fusion_attention(**given)

    sim.run(body, 1, device="npu")
