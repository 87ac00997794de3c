"""A Llama with experts on many ranks trains as on one device: losses, gradients of every step, biases, parameters."""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from moe_kit import (
    CONFIG,
    TEXT,
    Case,
    Trained,
    add_up,
    alone,
    full,
    in_float32,
    mesh_of,
    own_rows,
    split,
    train,
    variant,
)
from rounding_kit import measured, tolerances
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

import sim
from hyper_parallel import DTensor, init_device_mesh
from hyper_parallel.core.expert_parallel import GroupedExperts, Router, expert_parallel, take_aux, update_expert_bias
from hyper_parallel.core.expert_parallel.experts import exchange_rows
from hyper_parallel.core.fully_shard.api import get_model_state_dict, load_state_dict
from hyper_parallel.models.moe import MoEConfig

pytestmark = pytest.mark.tier("test")

STEPS = 2
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


class Twin(NamedTuple):
    """A model on one device: what it starts with, how it trains, and what it has then."""

    start: list[tuple[str, torch.Tensor]]
    trained: Trained
    state: dict[str, Any]
    aux: dict[str, torch.Tensor]


@cache
def twin_of(config: MoEConfig, dtype: torch.dtype) -> Twin:
    """Train on the CPU, once for all ranks and cases with this model, which only read it."""
    model = alone(config, dtype=dtype)
    start = [(name, full(param)) for name, param in model.named_parameters()]
    trained = train(model, TEXT, STEPS, after=update_expert_bias)
    return Twin(start, trained, model.state_dict(), take_aux(model))


def check(ctx: Any, case: Case) -> None:
    """Train on ranks and on one device, and compare everything."""
    mesh = mesh_of(ctx.device_type, case)
    dtype = ctx.float_dtype
    model = split(case, mesh, dtype)
    twin = twin_of(case.config, dtype)
    for (name, param), (_, value) in zip(model.named_parameters(), twin.start, strict=True):
        assert torch.equal(full(param), value), f"{name} starts differently"
    over = [mesh[axis] for axis in case.rows]
    found = train(
        model,
        own_rows(case, mesh),
        STEPS,
        reduce=None if case.shard else lambda model: add_up(model, case, mesh),
        after=lambda model: update_expert_bias(model, over),
    )
    expected = twin.trained
    loss = torch.tensor([sum(found.losses)], dtype=dtype, device=ctx.device_type)
    dist.all_reduce(loss)
    copies = ctx.world_size / math.prod(case.mesh[axis] for axis in case.rows)
    rounding = None if dtype is torch.float64 else measured(in_float32)
    assert loss.item() / copies == pytest.approx(sum(expected.losses), rel=rounding or 1e-10)
    assert found.norms == pytest.approx(expected.norms, rel=rounding or 1e-9)
    for step, (mine, theirs) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        close = tolerances(theirs.values(), in_float32, **CLOSE)
        for name, grad in theirs.items():
            at = f"step {step}, {name}"
            torch.testing.assert_close(mine[name], grad, **close, msg=lambda text, at=at: f"{at}: {text}")
    state, wanted = get_model_state_dict(model), twin.state
    assert list(state) == list(wanted)
    close = tolerances(wanted.values(), in_float32, **CLOSE)
    for name, value in wanted.items():
        torch.testing.assert_close(full(state[name]), value.cpu(), **close)
    check_aux(model, twin)


def check_aux(model: Any, twin: Twin) -> None:
    """The terms of all ranks add up to the auxiliary losses of all sequences and steps."""
    for name, terms in take_aux(model).items():
        dist.all_reduce(terms)
        torch.testing.assert_close(terms.cpu(), twin.aux[name], rtol=1e-4, atol=0)
        assert terms > 0


@pytest.mark.tier("full")
@sim.ranks(4)
def test_experts_and_tensors_are_split(ctx):
    check(ctx, Case({"ep": 2, "tp": 2}))
    check(ctx, Case({"ep": 2, "tp": 2}, etp=1))
    check(ctx, Case({"ep": 2, "tp": 2}, options={"ep": ("ep", "tp")}))


@pytest.mark.tier("full")
@sim.ranks(4)
def test_tokens_go_to_each_node_once(ctx):
    check(ctx, Case({"ep": 4}, options={"ranks_per_node": 2}))
    check(ctx, Case({"ep": 2, "tp": 2}, options={"ranks_per_node": 2}))  # one rank of each node has the experts
    check(ctx, Case({"ep": 2, "tp": 2}, options={"ep": ("ep", "tp"), "ranks_per_node": 2}))


@pytest.mark.tier("full")
@sim.ranks(4)
def test_experts_are_split_and_all_is_sharded(ctx):
    check(ctx, Case({"dp_shard": 2, "ep": 2}))


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("etp", [1, 2])
@sim.ranks(8, backends=("sim", "gpu", "npu"))
def test_three_axes(ctx, etp):
    check(ctx, Case({"dp_shard": 2, "ep": 2, "tp": 2}, etp=etp))


@pytest.mark.tier("full", each=16)
@pytest.mark.parametrize(
    "case",
    [
        Case({"ep": 8}),
        Case({"ep": 8}, shard=False),
        Case({"ep": 4, "tp": 2}, etp=1, shard=False),
        Case({"tp": 2, "ep": 4}),
        Case({"ep": 4, "dp_shard": 2}),
        Case({"dp_shard": 4, "tp": 2}, etp=1),
        Case({"dp_shard": 4, "tp": 2}),
        Case({"dp_shard": 2, "tp": 4}, options={"ep": ("tp",)}),
        Case({"dp_shard": 2, "ep": 2, "tp": 2}, options={"ep": ("ep", "tp")}),
        Case({"ep": 2, "tp": 4}, options={"ep": ("ep", "tp")}, shard=False),
        Case({"ep": 2, "tp": 4}, etp=1),
        Case({"ep": 8}, options={"ranks_per_node": 4}),
        Case({"dp_shard": 2, "ep": 4}, options={"ranks_per_node": 2}),
        Case({"ep": 4, "dp_shard": 2}, options={"ranks_per_node": 4}),
        Case({"ep": 2, "tp": 4}, options={"ep": ("ep", "tp"), "ranks_per_node": 2}),
        Case({"ep": 2, "tp": 4}, config=variant(num_shared_experts=0, score="softmax")),
        Case({"ep": 4, "tp": 2}, config=variant(tie_embeddings=True, num_dense_layers=0)),
    ],
    ids=str,
)
@sim.ranks(8, backends=("sim",))
def test_other_meshes(ctx, case):
    check(ctx, case)


# -- who has nothing -------------------------------------------------------------------------------------------------


def lopsided(model: Any) -> None:
    """Let all tokens choose the same experts: some ranks get all rows, others none."""
    for module in model.modules():
        if isinstance(module, Router):
            module.bias[: module.experts_per_token] += 100.0


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize(
    "case", [Case({"ep": 4}), Case({"ep": 2, "tp": 2}, etp=1), Case({"ep": 4}, options={"ranks_per_node": 2})], ids=str
)
@sim.ranks(4)
def test_all_tokens_go_to_the_experts_of_one_rank_and_some_ranks_have_no_rows(ctx, case):
    mesh = mesh_of(ctx.device_type, case)
    model, twin = split(case, mesh, ctx.float_dtype), alone(CONFIG, ctx.device_type, ctx.float_dtype)
    for each in (model, twin):
        lopsided(each)
    rows = TEXT.to(ctx.device_type)
    mine = rows if mesh.get_local_rank("ep") == 0 else rows[:0]
    results = []
    for each, text in ((model, mine), (twin, rows)):
        logits = each(text[:, :-1])
        (logits.square().sum() / TEXT.numel()).backward()
        results.append({name: full(param.grad) for name, param in each.named_parameters()})
    close = tolerances(results[1].values(), in_float32, **CLOSE)
    for name, grad in results[1].items():
        torch.testing.assert_close(results[0][name], grad, **close, msg=lambda text, n=name: f"{n}: {text}")
    idle = results[0]["layers.1.mlp.experts.w1"][CONFIG.experts_per_token :]
    assert idle.count_nonzero() == 0


# -- what else trains over it ----------------------------------------------------------------------------------------


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("options", [{}, {"ranks_per_node": 2}], ids=["once for each expert", "on nodes"])
@pytest.mark.parametrize("kind", list(CheckpointImpl), ids=str)
@sim.ranks(4, backends=("sim",))
def test_blocks_that_are_computed_again(ctx, kind, options):
    case = Case({"ep": 2, "tp": 2}, etp=1, shard=False, options=options)
    mesh = mesh_of(ctx.device_type, case)
    found = []
    for wrap in (False, True):
        model = split(case, mesh)
        if wrap:
            for name, block in model.layers.named_children():
                model.layers._modules[name] = checkpoint_wrapper(block, checkpoint_impl=kind, preserve_rng_state=False)
        trained = train(model, own_rows(case, mesh), 1, after=lambda model: update_expert_bias(model, [mesh["ep"]]))
        biases = [module.bias.clone() for module in model.modules() if isinstance(module, Router)]
        found.append(([list(step.values()) for step in trained.gradients], biases))
    (plain, bias), (again, bias_again) = found
    torch.testing.assert_close(plain, again, rtol=0, atol=0)
    torch.testing.assert_close(bias, bias_again, rtol=0, atol=0)
    assert any(each.count_nonzero() for each in bias)


@pytest.mark.tier("full")
@sim.ranks(8, backends=("sim",))
def test_state_of_one_mesh_is_loaded_on_another(ctx):
    case = Case({"dp_shard": 2, "ep": 2, "tp": 2})
    mesh = mesh_of(ctx.device_type, case)
    model = split(case, mesh)
    train(model, own_rows(case, mesh), 1, after=lambda model: update_expert_bias(model, [mesh[a] for a in case.rows]))
    state = {name: full(value) for name, value in get_model_state_dict(model).items()}
    shapes = {name: tuple(value.shape) for name, value in alone(CONFIG).state_dict().items()}
    assert {name: tuple(value.shape) for name, value in state.items()} == shapes
    other = Case({"ep": 4, "tp": 2}, etp=1)
    target = split(other, mesh_of(ctx.device_type, other))
    load_state_dict(target, state)
    loaded = get_model_state_dict(target)
    assert all(torch.equal(full(loaded[name]), value) for name, value in state.items())


@sim.ranks(4, backends=("sim",))
def test_experts_are_dtensors_of_the_whole_model(ctx):
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("ep", "tp"))
    model = split(Case({"ep": 2, "tp": 2}, shard=False), mesh)
    weights = model.layers[1].mlp.experts
    assert isinstance(weights.w1, DTensor)
    assert isinstance(weights.w2, DTensor)
    assert weights.w1.shape == (8, 12, 32)
    assert weights.w1.to_local().shape == (4, 6, 32)
    assert weights.w2.shape == (8, 32, 12)
    assert weights.w2.to_local().shape == (4, 32, 6)
    tokens = TEXT[:2, :8].to(ctx.device_type)
    assert torch.equal(copy.deepcopy(model)(tokens), model(tokens))


def shared_experts() -> nn.ModuleList:
    torch.manual_seed(0)
    layers = nn.ModuleList(GroupedExperts(4, 8, 6).double() for _ in range(3))
    layers[1].w1, layers[1].w3, layers[2].w2 = layers[0].w1, layers[0].w1, layers[1].w2
    return layers


def gradients_of_shared_experts(layers: nn.ModuleList, places: slice) -> dict[str, torch.Tensor]:
    rows = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))[places]
    chosen = torch.tensor([[0, 3], [1, 2], [3, 1], [3, 0]])[places]
    for experts in layers:
        rows = experts(rows, chosen, torch.ones_like(chosen, dtype=rows.dtype))
    rows.square().sum().backward()
    return {name: full(param.grad) for name, param in layers.named_parameters()}


@sim.ranks(2, backends=("sim",))
def test_layers_may_share_weights_of_experts(ctx):
    expected = gradients_of_shared_experts(shared_experts(), slice(0, 4))
    layers = shared_experts()
    expert_parallel(layers, init_device_mesh(ctx.device_type, (2,), mesh_dim_names=("ep",)))
    found = gradients_of_shared_experts(layers, slice(2 * ctx.rank, 2 * ctx.rank + 2))
    assert len(expected) == 6, "of nine names"
    assert list(found) == list(expected)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, **CLOSE)


# -- the exchange ----------------------------------------------------------------------------------------------------


@sim.ranks(3)
def test_rows_go_where_they_are_sent_and_gradients_back(ctx):
    sent = [[2, 0, 1], [0, 0, 0], [3, 1, 0]]  # from rank, to rank
    mine, come = sent[ctx.rank], [row[ctx.rank] for row in sent]
    rows = torch.arange(float(sum(mine)), device=ctx.device).view(-1, 1) + 10 * ctx.rank
    rows.requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    there = exchange_rows(rows, mine, come, group)
    assert there.flatten().tolist() == [[0.0, 1.0, 20.0, 21.0, 22.0], [23.0], [2.0]][ctx.rank]
    back = exchange_rows(there, come, mine, group)
    assert torch.equal(back, rows)
    (there * (ctx.rank + 1)).sum().backward()
    assert rows.grad is not None
    assert rows.grad.flatten().tolist() == [[1.0, 1.0, 3.0], [], [1.0, 1.0, 1.0, 2.0]][ctx.rank]


@sim.ranks(2)
def test_gradients_of_gradients_travel_as_well(ctx):
    sent = [[1, 2], [3, 0]]
    mine, come = sent[ctx.rank], [row[ctx.rank] for row in sent]
    rows = (torch.arange(float(sum(mine)), device=ctx.device) + ctx.rank).view(-1, 1).requires_grad_()
    there = exchange_rows(rows, mine, come, dist.group.WORLD)
    (grad,) = torch.autograd.grad((there**3).sum(), rows, create_graph=True)
    torch.testing.assert_close(grad, 3 * rows**2)
    grad.sum().backward()
    torch.testing.assert_close(rows.grad, 6 * rows.detach())


@sim.ranks(2, backends=("sim",))
def test_shared_experts_compute_while_tokens_are_on_their_way(ctx):
    case = Case({"ep": 2})
    mesh = mesh_of(ctx.device_type, case)
    model = split(case, mesh)
    layer = next(block.mlp for block in model.layers if hasattr(block.mlp, "experts"))
    send, flights, on_their_way = layer.experts.send, [], []

    def noted(x, chosen):
        flights.append((sent := send(x, chosen)).flight)
        return sent

    layer.experts.send = noted
    layer.shared.register_forward_hook(lambda *_: on_their_way.append(flights[-1].work is not None))
    layer.shared.register_full_backward_hook(lambda *_: on_their_way.append(flights[-1].grad[1].work is not None))
    model(own_rows(case, mesh)).square().mean().backward()
    assert on_their_way == [True, True]
    assert flights[-1].work is None
    assert flights[-1].grad is None


@pytest.mark.tier("full")
@pytest.mark.parametrize("case", [Case({"ep": 2}), Case({"ep": 2}, options={"ranks_per_node": 1})], ids=str)
@pytest.mark.sim
def test_compiled_layers(case):
    def body():
        mesh = mesh_of("cpu", case)
        found = []
        for compiles in (False, True):
            model = split(case, mesh)
            for layer in model.layers if compiles else ():
                layer.compile(backend="aot_eager")
            for _ in range(2):
                model(own_rows(case, mesh)).square().mean().backward()
            found.append([full(param.grad) for param in model.parameters() if param.grad is not None])
        torch.testing.assert_close(found[1], found[0], **CLOSE)

    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        sim.run(body, 2)
