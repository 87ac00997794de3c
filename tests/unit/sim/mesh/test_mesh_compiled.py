"""Activations that a compiled block keeps or computes again: as torch.compile's own partition of the graph has it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from benchmarks.published.float8 import use_float8
from benchmarks.published.losses import one_kernel
from benchmarks.published.step import PublishedRecipe
from hyper_parallel.core.activations import ActivationPolicy
from hyper_parallel.core.machine.calibration import load_calibration
from hyper_parallel.core.machine.description import find_machine
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.models.llama import Block, LlamaConfig, causal_attention
from hyper_parallel.models.moe import MoEConfig, MoELlama
from hyper_parallel.trainer.config import Config, ParallelConfig
from sim.mesh.estimate import price
from sim.mesh.job import Job
from sim.mesh.models import find_model
from sim.mesh.program import Op, Place
from sim.mesh.recipe import Recipe
from sim.mesh.tracing.compiled import CompiledLike, compile_block
from sim.mesh.tracing.kinds import running
from sim.mesh.tracing.trace import trace

_CONFIG = LlamaConfig(256, 64, 192, 1, 4, 2, 128)


def _block() -> tuple[Block, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    block = Block(_CONFIG).to(torch.bfloat16)
    x = torch.randn(2, 128, 64, dtype=torch.bfloat16, requires_grad=True)
    return block, (x, torch.randn(128, 16).bfloat16(), torch.randn(128, 16).bfloat16())


def _kept(function: Callable[..., Any], block: nn.Module, given: tuple[torch.Tensor, ...]) -> list[int]:
    """Return the bytes of each storage that a forward keeps for backward, parameters and inputs left out."""
    function(*given)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(*given)
    own = {tensor.untyped_storage()._cdata for tensor in (*block.parameters(), *given)}
    found = sorted(size for key, size in kept.items() if key not in own)
    result.sum().backward()
    return found


def _by_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile by torch, with the cut and the decompositions of its compiler, and graphs that are run as they are."""
    # Only here: importing them takes longer than to collect this file's items.
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def cut(joint: Any, inputs: Any, **options: Any) -> Any:
        return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)

    backend = aot_autograd(
        fw_compiler=lambda module, inputs: make_boxed_func(module),
        partition_fn=cut,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    return torch.compile(function, backend=backend)


@pytest.mark.tier("full")
@pytest.mark.parametrize("checkpointing", ["none", "selective", "alternate", "full"])
def test_a_block_keeps_what_torchs_compiler_keeps(checkpointing: str) -> None:
    block, given = _block()
    ours = _kept(CompiledLike(block, checkpointing), block, given)

    def checkpointed(*args: torch.Tensor) -> Any:
        keep = ActivationPolicy.of(checkpointing).contexts()
        options: dict[str, Any] = {"context_fn": keep} if keep else {}
        return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False, **options)

    theirs = _kept(_by_torch(block if checkpointing == "none" else checkpointed), block, given)
    tokens, d, f, kv, heads = 256, 64, 192, 32, 4
    state = [size for size in theirs if size == torch.get_rng_state().numel()]  # of the generator, not on accelerators
    assert ours == theirs
    expected = {
        # norm twice, q, attention, what wo returns, k and v; w1, w3 and their product; two roots, one of a sum
        "none": 2 * tokens * (5 * d + 2 * kv + 3 * f) + 4 * tokens * (2 + heads),
        # q, attention, what wo returns, k and v; w1 and w3; one of a sum
        "selective": 2 * tokens * (3 * d + 2 * kv + 2 * f) + 4 * tokens * heads,
        # q, v, attention, w1 and what w2 returns, which the residual needs not; one of a sum
        "alternate": 2 * tokens * (2 * d + kv + f) + 4 * tokens * heads,
        "full": 0,
    }
    assert sum(ours) - sum(state) == expected[checkpointing]


@pytest.mark.tier("test", each=2)
@pytest.mark.parametrize("checkpointing", ["none", "selective", "alternate", "full"])
def test_it_computes_what_the_block_computes(checkpointing: str) -> None:
    block, given = _block()
    wanted = block(*given)
    grads = torch.autograd.grad(wanted.square().sum(), [given[0], *block.parameters()])
    assert compile_block(block, checkpointing)
    found = block(*given)
    assert torch.equal(found, wanted)
    for grad, other in zip(
        torch.autograd.grad(found.square().sum(), [given[0], *block.parameters()]), grads, strict=True
    ):
        torch.testing.assert_close(grad, other, rtol=0.05, atol=0.05 * float(other.abs().max()))


@pytest.mark.tier("test")
def test_one_graph_serves_all_blocks_that_are_alike() -> None:
    graphs: dict[Any, Any] = {}
    with FakeTensorMode():
        for _ in range(3):
            block = Block(_CONFIG)
            compile_block(block, graphs=graphs)
            x = torch.zeros(1, 128, 64, requires_grad=True)
            for _ in range(2):
                block(x, torch.zeros(128, 16), torch.zeros(128, 16)).sum().backward()
            assert isinstance(block.mlp.w1.weight.grad, FakeTensor)
    assert len(graphs) == 1


@pytest.mark.tier("test")
def test_no_graph_keeps_what_it_was_traced_with() -> None:
    """Or the first estimate of a process would have tensors in memory that those after it have not."""
    with FakeTensorMode():
        x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        kept = [StorageWeakRef(tensor.untyped_storage()) for tensor in (x, weight)]
        run = CompiledLike(lambda x, weight: torch.relu(x @ weight).sum())
        run(x, weight).backward()
        del x, weight
    gc.collect()
    assert run.graphs
    assert all(ref.expired() for ref in kept)


def test_other_shapes_and_no_gradients_are_other_graphs() -> None:
    graphs: dict[Any, Any] = {}
    double = CompiledLike(lambda x: x * 2, graphs=graphs)
    with FakeTensorMode():
        x = torch.zeros(3, requires_grad=True)
        double(x)
        with torch.no_grad():
            assert not double(x).requires_grad
        assert double(torch.zeros(4)).shape == (4,)
    assert len(graphs) == 3


def test_while_kernels_run_they_have_numbers_and_what_is_done_again_is_told() -> None:
    seen: list[tuple[str, int, bool]] = []

    class Looks(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func._schema.name, running.region, running.recomputes))
            return func(*args, **(kwargs or {}))

    function = CompiledLike(lambda x, w: (x.sin().cos() @ w).sin(), "full")
    with FakeTensorMode(), Looks():
        x, w = torch.zeros(8, 8, requires_grad=True), torch.zeros(8, 8, requires_grad=True)
        seen.clear()
        y = function(x, w)
        forward = list(seen)
        seen.clear()
        y.backward(torch.zeros(8, 8))
    numbers = {name: number for name, number, _ in forward if number}
    assert numbers["aten::cos"] < numbers["aten::mm"]
    assert len({number for name, number, _ in forward if name in ("aten::sin", "aten::cos")}) == 2
    assert not any(again for _, _, again in forward)
    assert ("aten::mm", True) in {(name, again) for name, _, again in seen}
    assert ("aten::mm", False) in {(name, again) for name, _, again in seen}
    assert not {n for _, n, _ in seen if n} & {n for _, n, _ in forward}
    assert running.region == 0
    assert not running.traces


def test_what_depends_on_values_is_run_as_it_is() -> None:
    function = CompiledLike(lambda x: x * int(x.sum()))
    assert torch.equal(function(torch.ones(2)), torch.tensor([2.0, 2.0]))
    chosen = CompiledLike(lambda x: x[x > 0])
    assert torch.equal(chosen(torch.tensor([1.0, -1.0])), torch.tensor([1.0]))


@pytest.mark.tier("test")
def test_attention_over_ranks_is_called_between_two_graphs() -> None:
    block, given = _block()
    wanted = block(*given)
    calls = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        calls.append((q.shape, running.region))
        return causal_attention(q, k, v)

    attend.__module__ = "hyper_parallel.core.context_parallel.api"
    block.attention.attend = attend
    assert compile_block(block)  # nothing is to be wrapped
    for _ in range(2):
        assert torch.equal(block(*given), wanted)
    assert calls == [(torch.Size([2, 4, 128, 16]), 0)] * 2
    assert isinstance(block.attention.forward, CompiledLike)
    assert not isinstance(block.forward, CompiledLike)


def test_a_block_that_communicates_is_compiled_in_pieces() -> None:
    block = Block(_CONFIG)

    def hook(module: Any, args: Any) -> None:
        return None

    hook.__module__ = "hyper_parallel.core.shard.api"
    block.attention.register_forward_pre_hook(hook)
    assert not compile_block(block, "full")  # the checkpoint is to be put around it
    assert not isinstance(block.forward, CompiledLike)
    compiled = [name for name, child in block.named_modules() if isinstance(child.forward, CompiledLike)]
    assert compiled == ["attention_norm", "attention", "mlp_norm", "mlp"]


@pytest.mark.tier("full")
def test_a_feed_forward_in_chunks_is_compiled_for_each_chunk() -> None:
    """Communication of a chunk lies between graphs, as `torch.compile` breaks there."""
    dims = ParallelDims(tp=2, world_size=2)
    made: list[list[tuple[Op, Place]]] = []
    for compiled in (False, True):
        recipe = PublishedRecipe().having(level=0, tp_chunks=2, compile=compiled)
        (program,) = trace(Job(find_model("llama-tiny"), dims, 2, 128, recipe))
        events = [event for segment in program.segments.values() for event in segment.events if isinstance(event, Op)]
        made.append([(op, program.places[op.place]) for op in events])
    plain, graphs = ([op.shape for op, _ in ops if op.kind == "matmul"] for ops in made)
    assert sorted(graphs) == sorted(plain)
    mlp = [(op.kind, place.compiled > 0) for op, place in made[1] if place[:3] == ("forward", 0, "mlp")]
    chunk = [("matmul", True), ("matmul", True), ("fused", True), ("matmul", True)]
    assert mlp == [*chunk, *chunk, ("memory", False)], "and what joins the chunks is outside"


def test_experts_are_left_alone() -> None:
    config = MoEConfig(256, 64, 192, 1, 4, 2, 128, num_experts=4, expert_intermediate_size=32)
    with torch.device("meta"):
        block = MoELlama(config).layers[0]
    assert not compile_block(block, "full")
    compiled = {name for name, child in block.named_modules() if isinstance(child.forward, CompiledLike)}
    assert {"attention_norm", "attention", "mlp_norm"} <= compiled
    assert not {name for name in compiled if name == "mlp" or name.startswith(("mlp.experts", "mlp.router"))}


@pytest.mark.tier("test", each=3)
@pytest.mark.parametrize("policy", ["none", "full", "selective", "alternate"])
@pytest.mark.parametrize("of_run", [False, True])
def test_modes_of_selective_checkpointing_cost_the_host(policy: str, of_run: bool) -> None:
    """In forward, and in what is computed again, which ends as soon as backward has what it needs."""
    if of_run:
        job = Job.of_run(Config(model=_CONFIG, parallel=ParallelConfig(checkpointing=policy)), 1)
    else:
        job = Job(find_model(_CONFIG), ParallelDims(), 1, 64, Recipe().having(checkpointing=policy))
    (program,) = programs = trace(job)
    found: Counter[tuple[str, bool, bool]] = Counter()
    hidden, products = Counter[str](), 0
    for segment, _ in program.segments_in_order():
        for op in segment.events:
            if isinstance(op, Op):
                place = program.places[op.place]
                found[place.phase, place.recomputes, place.watched] += 1
                hidden[op.name] += place.recomputes
                products += op.kind == "matmul" and place.watched and place.phase == "forward"
    watched = {(phase, again) for phase, again, seen in found if seen}
    assert watched == ({("forward", False), ("backward", True)} if policy in ("selective", "alternate") else set())
    assert products == (7 if watched else 0), "those of the block, and not the head's"
    again = sum(count for (_, recomputes, _), count in found.items() if recomputes)
    assert again < sum(count for (phase, *_), count in found.items() if phase == "forward"), "backward is not among it"
    assert not [name for name in hidden if hidden[name] and "backward" in name]
    assert hidden["aten.mm"] == {"none": 0, "full": 6, "selective": 0, "alternate": 3}[policy]
    figures = load_calibration().replace({"host.op_us": 1e4})
    step = price(programs, job, find_machine("h200"), figures).time.step.value
    each = [1e-2 * (1 if not seen else 10.4 if recomputes else 6.3) for _, recomputes, seen in found.elements()]
    assert step == pytest.approx(sum(each), rel=0.02), "the host bounds it"


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no kind of checkpointing 'ful'") as caught:
        CompiledLike(lambda x: x, "ful")
    assert "try: checkpointing='full'" in str(caught.value)


@pytest.mark.tier("full")
def test_float8_products_keep_what_bfloat16_ones_keep() -> None:
    block, given = _block()
    plain = _kept(block, block, given)
    assert use_float8(block) == 7
    assert _kept(block, block, given) == plain


def test_float8_is_close_to_bfloat16() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 32).bfloat16(), torch.randn(48, 64, dtype=torch.bfloat16, requires_grad=True)
    wanted = layer(x)
    grads = torch.autograd.grad(wanted.sum(), [x, layer.weight])
    use_float8(layer)
    found = layer(x)
    torch.testing.assert_close(found, wanted, rtol=0.1, atol=0.1)
    for grad, other in zip(torch.autograd.grad(found.sum(), [x, layer.weight]), grads, strict=True):
        torch.testing.assert_close(grad, other, rtol=0.15, atol=0.15 * float(other.abs().max()))


@pytest.mark.tier("test")
def test_what_is_written_by_hand_is_one_kernel() -> None:
    with one_kernel():
        first = running.region
        assert first
    with one_kernel():
        assert running.region == first + 1
    assert running.region == 0
