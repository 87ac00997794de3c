"""Context parallelism on real ranks: attention, and models trained with it, against one device."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rounding_kit import largest, measured
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import sim
from hyper_parallel import fully_shard, shard_module
from hyper_parallel.core.context_parallel import ContextParallel, context_parallel
from hyper_parallel.models import Llama, LlamaConfig, llama_plan

pytestmark = pytest.mark.tier("test")

CONFIG = LlamaConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=42,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_seq_len=16,
)
TEXT = torch.randint(0, 50, (2, 17), generator=torch.Generator().manual_seed(1))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}


def close(found: torch.Tensor, expected: torch.Tensor, what: object = "", bound: float | None = None) -> None:
    """Compare with one device; `bound` is absolute, None: by dtype."""
    scale = TOLERANCE[found.dtype]
    near = {"rtol": scale, "atol": scale} if bound is None else {"rtol": 0.0, "atol": bound}
    torch.testing.assert_close(found.cpu().double(), expected.double(), **near, msg=lambda m: f"{what}\n{m}")


# -- attention -------------------------------------------------------------------------------------------------------


def full(dtype: torch.dtype, documents: bool) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Queries, keys, values and the gradient of the output, of one device; and documents that lie in pieces."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, heads, 16, 8, generator=generator).to(dtype) for heads in (4, 2, 2, 4)]
    return drawn, torch.randint(0, 2, (2, 16), generator=generator) if documents else None


def alone(dtype: torch.dtype, causal: bool, documents: bool, scale: float | None = None) -> list[torch.Tensor]:
    """The output and the gradients on one device, in float64."""
    drawn, ids = full(dtype, documents)
    q, k, v, grad = (x.double().requires_grad_() for x in drawn)
    seen = torch.ones(16, 16, dtype=torch.bool).tril(0 if causal else 16).expand(2, 1, 16, 16)
    if ids is not None:
        seen = seen & (ids[:, None, :, None] == ids[:, None, None])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad]


def check_attention(ctx, cp: ContextParallel, dtype: torch.dtype, causal: bool, documents: bool) -> None:
    drawn, ids = full(dtype, documents)
    q, k, v, grad = (cp.split(x.to(ctx.device), dim=2).requires_grad_() for x in drawn)
    out = cp.attend(q, k, v, is_causal=causal, documents=None if ids is None else cp.split(ids.to(ctx.device)))
    out.backward(grad)
    grads = (out.detach(), q.grad, k.grad, v.grad)
    for name, found, expected in zip("oqkv", grads, alone(dtype, causal, documents), strict=True):
        close(found, cp.split(expected, dim=2), f"{name} {cp} {dtype} {causal=} {documents=}")


@pytest.mark.tier("full")
@sim.ranks(4)
def test_every_way_to_attend(ctx):
    mesh = init_device_mesh(ctx.device_type, (4,), mesh_dim_names=("cp",))
    for degree, balance in itertools.product((1, 2, 4), (True, False)):
        cp = ContextParallel(mesh, degree, balance)
        assert (cp.size, cp.rank, cp.ulysses_degree, cp.ring_degree) == (4, ctx.rank, degree, 4 // degree)
        places = cp.positions(4)
        assert places.device.type == ctx.device_type
        assert torch.equal(places.cpu(), cp.split(torch.arange(16), dim=0))
        for causal, documents in itertools.product((True, False), repeat=2):
            for dtype in (torch.float32, torch.bfloat16):
                check_attention(ctx, cp, dtype, causal, documents)
    for dtype in (ctx.float_dtype, torch.float16):
        check_attention(ctx, ContextParallel(mesh, 2), dtype, True, True)
        check_attention(ctx, ContextParallel(mesh, 1), dtype, True, False)


@sim.ranks(4, backends=("sim",))
def test_scales_that_are_not_positive(ctx):
    """Of torch's kernel for the CPU a causal mask makes NaN with such a scale."""
    mesh = init_device_mesh(ctx.device_type, (4,), mesh_dim_names=("cp",))
    for degree, scale, causal in itertools.product((1, 2, 4), (0.0, -0.5), (True, False)):
        cp = ContextParallel(mesh, degree)
        q, k, v, grad = (cp.split(x, dim=2).requires_grad_() for x in full(torch.float64, documents=False)[0])
        out = cp.attend(q, k, v, is_causal=causal, scale=scale)
        out.backward(grad)
        expected = alone(torch.float64, causal, documents=False, scale=scale)
        for name, found, wanted in zip("oqkv", (out.detach(), q.grad, k.grad, v.grad), expected, strict=True):
            close(found, cp.split(wanted, dim=2), f"{name} {cp} {scale=} {causal=}")


@sim.ranks(4)
def test_flex_attention_with_a_window(ctx):
    """The mask is that of one device, of the whole sequence, whoever holds which tokens."""
    from torch.nn.attention.flex_attention import create_block_mask

    drawn, _ = full(torch.float32, documents=False)
    mask = create_block_mask(
        lambda b, h, q, kv: (q >= kv) & (q - kv < 6), None, None, 16, 16, device="cpu", BLOCK_SIZE=4
    )
    seen = torch.ones(16, 16, dtype=torch.bool).tril().triu(-5)
    q, k, v, grad = (x.double().requires_grad_() for x in drawn)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    out.backward(grad)
    expected = (out.detach(), q.grad, k.grad, v.grad)
    mesh = init_device_mesh(ctx.device_type, (4,), mesh_dim_names=("cp",))
    for degree in (1, 2, 4):
        cp = ContextParallel(mesh, degree)
        q, k, v, grad = (cp.split(x.to(ctx.device), dim=2).requires_grad_() for x in drawn)
        out = cp.flex_attention(q, k, v, block_mask=mask.to(ctx.device), enable_gqa=True)
        out.backward(grad)
        for name, found, full_one in zip("oqkv", (out.detach(), q.grad, k.grad, v.grad), expected, strict=True):
            close(found, cp.split(full_one, dim=2), f"{name} {degree=}")


@sim.ranks(4)
def test_an_axis_among_others(ctx):
    """Each part of the mesh has its own groups, also where ranks have made different numbers of groups before."""
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("cp", "tp"))
    if ctx.rank in (0, 2):
        dist.new_group([0, 2], use_local_synchronization=True)
    for degree in (1, 2):
        check_attention(ctx, ContextParallel(mesh["cp"], degree), torch.float32, True, False)
    single = init_device_mesh(ctx.device_type, (4, 1), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(single["cp"])
    assert cp.multiple == cp.size == 1
    check_attention(ctx, cp, torch.float32, True, True)


@sim.ranks(8, backends=("sim", "gpu", "npu"))
def test_rings_of_several_ranks_around_groups_of_several(ctx):
    for degree in (2, 4):
        mesh = init_device_mesh(ctx.device_type, (8,), mesh_dim_names=("cp",))
        for causal in (True, False):
            check_attention(ctx, ContextParallel(mesh, degree), torch.float32, causal, causal)
    mesh = init_device_mesh(ctx.device_type, (2, 4), mesh_dim_names=("dp", "cp"))
    for balance in (True, False):
        check_attention(ctx, ContextParallel(mesh["cp"], 2, balance), torch.float32, True, False)


# -- models ----------------------------------------------------------------------------------------------------------


def built(ctx) -> Llama:
    return Llama.build(CONFIG, seed=0).to(ctx.device, ctx.float_dtype)


def trained_alone(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return logits and gradients of the mean loss."""
    model = Llama.build(CONFIG, seed=0).to(dtype)
    logits = model(TEXT[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), TEXT[:, 1:].flatten()).backward()
    return logits.detach(), {name: param.grad for name, param in model.named_parameters()}


def in_float32() -> dict[str, torch.Tensor]:
    logits, gradients = trained_alone(torch.float32)
    return {"logits": logits, **gradients}


def bounds(ctx, logits: torch.Tensor, gradients: dict[str, torch.Tensor]) -> tuple[float | None, float | None]:
    """Of logits and of gradients: measured where there is no float64, else by dtype."""
    if ctx.float_dtype is torch.float64:
        return None, None
    return measured(in_float32) * largest([logits]), measured(in_float32) * largest(gradients.values())


def share_of_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / TEXT[:, 1:].numel()


def train(ctx, model, cp: ContextParallel, times: int = 1) -> torch.Tensor:
    logits = model(cp.split(TEXT[:, :-1].to(ctx.device)))
    (share_of_loss(logits, cp.split(TEXT[:, 1:].to(ctx.device))) * times).backward()
    return logits.detach()


@sim.ranks(4)
def test_a_model_computes_the_same(ctx):
    """Logits of this rank's tokens, and gradients whose sum over the ranks is that of one device."""
    logits, gradients = trained_alone()
    of_logits, of_gradients = bounds(ctx, logits, gradients)
    mesh = init_device_mesh(ctx.device_type, (4,), mesh_dim_names=("cp",))
    for degree, recompute in ((1, False), (2, True), (None, False)):
        model = built(ctx)
        cp = context_parallel(model, mesh, degree)
        if recompute:  # what communicates in a block does it again, in the backward pass
            for block in model.layers:
                block.forward = _recomputed(block.forward)
        close(train(ctx, model, cp), cp.split(logits), bound=of_logits)
        for name, param in model.named_parameters():
            dist.all_reduce(param.grad)
            close(param.grad, gradients[name], f"{name} {degree=}", of_gradients)


def _recomputed(forward):
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


@sim.ranks(4)
def test_with_parameters_split_over_the_same_ranks(ctx):
    logits, gradients = trained_alone()
    of_logits, of_gradients = bounds(ctx, logits, gradients)
    mesh = init_device_mesh(ctx.device_type, (4,), mesh_dim_names=("cp",))
    model = built(ctx)
    cp = context_parallel(model, mesh, 2)
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh)
    found = train(ctx, model, cp, times=4)  # `fully_shard` takes the mean over ranks
    close(found, cp.split(logits), bound=of_logits)
    for name, param in model.named_parameters():
        close(param.grad.full_tensor(), gradients[name], name, of_gradients)


@sim.ranks(4)
def test_with_heads_split_by_tensor_parallelism(ctx):
    """The heads of a rank are shared once more; between modules, its tokens are split over tp."""
    logits, gradients = trained_alone()
    of_logits, of_gradients = bounds(ctx, logits, gradients)
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("cp", "tp"))
    for degree in (1, 2):
        model = built(ctx)
        shard_module(model, mesh["tp"], llama_plan(model, mesh["tp"], logits="local"))
        cp = context_parallel(model, mesh["cp"], degree)
        close(train(ctx, model, cp), cp.split(logits), bound=of_logits)
        for name, param in model.named_parameters():
            whole_grad = param.grad.full_tensor()
            dist.all_reduce(whole_grad, group=mesh.get_group("cp"))
            close(whole_grad, gradients[name], f"{name} {degree=}", of_gradients)


@sim.ranks(2, backends=("sim",))
def test_a_wrong_neighbour_would_be_noticed(ctx):
    """The comparison is not blind: the tokens of another rank are not close."""
    mesh = init_device_mesh(ctx.device_type, (2,), mesh_dim_names=("cp",))
    model = built(ctx)
    cp = context_parallel(model, mesh, 1)
    logits = train(ctx, model, cp)
    with pytest.raises(AssertionError):
        close(logits, ContextParallel(mesh, 1, balance=False).split(trained_alone()[0]))
