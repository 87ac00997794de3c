"""Modules with a local_plan inside of others: plain tensors between them, gradients of any order, and copies."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rounding_kit import tolerances
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import sim
from hyper_parallel import Layout, ShardingPlan, distribute_tensor, full_tensor, fully_shard, shard_module
from hyper_parallel.core.shard.entry_exit import mark_of

pytestmark = pytest.mark.tier("test")

WIDTH, HIDDEN, TOKENS = 8, 16, 13
ROWS, SHARE = ("dp", "None"), (Shard(0), Partial())


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.rand(1) + 0.5)  # held whole, used in a share of the work

    def forward(self, x):
        return self.down(F.silu(self.up(x)) * self.scale)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(WIDTH), FeedForward()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH, padding_idx=padding_idx)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.recompute = False

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


def make(padding_idx: int | None = None, dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(0)
    return Model(padding_idx).to(dtype)


def batch(rows: int = 4, length: int = 6) -> torch.Tensor:
    return torch.randint(0, TOKENS, (rows, length), generator=torch.Generator().manual_seed(1))


def plan(sequence: bool, *, root: bool = False, dp: str = "dp") -> ShardingPlan:
    """The residual stream split over the sequence or whole; DTensors between blocks, or none at all (root)."""
    between, full = (dp, "tp" if sequence else "None", "None"), (dp, "None", "None")
    local = {
        "embed": SHARE,
        "blocks.*": between,
        "**.norm": between,
        "blocks.*.mlp": SHARE,
        "head": (dp, "None", "tp"),
        **({"": full} if root else {}),
    }
    return ShardingPlan(
        plan={
            "embed.weight": ("tp", "None"),
            "**.up.weight": ("tp", "None"),
            "**.down.weight": ("None", "tp"),
            "**.scale": ("None",),
            "**.norm.weight": ("None",),
            "head.weight": ("tp", "None"),
        },
        input_plan={"blocks.*.mlp.input": full, "head.input": full, "embed.input": (dp, "None")},
        output_plan={
            "embed.output": between,
            "blocks.*.output": between,
            "blocks.*.mlp.output": between,
            "head.output": full,
        },
        local_plan=local,
        wrap_inputs=True,
    )


def in_float32() -> dict[str, torch.Tensor]:
    model = make(dtype=torch.float32)
    model(batch()).square().mean().backward()
    return {name: param.grad for name, param in model.named_parameters()}


def compare(model: nn.Module, reference: nn.Module, in_float32: Any = in_float32) -> None:
    wanted = [full.grad for full in reference.parameters()]
    close = tolerances(wanted, in_float32, rtol=1e-11, atol=1e-12)
    for (name, param), full in zip(model.named_parameters(), wanted, strict=True):
        assert param.grad.placements == param.placements, name
        torch.testing.assert_close(full_tensor(param.grad), full, **close, msg=name)


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_of_blocks_with_modules_inside(sequence, root):
    reference, tokens = make(), batch()
    expected = reference(tokens)
    expected.square().mean().backward()

    def body():
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        model = shard_module(make(), mesh, plan(sequence, root=root))
        rows = tokens.chunk(2)[mesh["dp"].get_local_rank()]
        logits = model(rows)
        assert isinstance(logits, DTensor)
        assert logits.shape == expected.shape
        logits.square().mean().backward()
        torch.testing.assert_close(full_tensor(logits), expected, rtol=1e-11, atol=1e-12)
        compare(model, reference)

    sim.run(body, world_size=8)


@sim.ranks(4)
def test_inner_modules_on_every_kind_of_rank(ctx):
    reference, tokens = make(dtype=ctx.float_dtype), batch()
    reference(tokens).square().mean().backward()
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = shard_module(make(dtype=ctx.float_dtype).to(ctx.device), mesh, plan(True))
    rows = tokens.chunk(2)[mesh["dp"].get_local_rank()].to(ctx.device)
    model(rows).square().mean().backward()
    compare(model, reference.to(ctx.device))


@pytest.mark.parametrize("recompute", [False, True])
def test_with_fully_shard_over_another_axis(recompute):
    reference, tokens = make(), batch()
    reference(tokens).square().mean().backward()

    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = make()
        model.recompute = recompute
        model = shard_module(model, mesh["tp"], _without_dp(plan(True)))
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        for _ in range(2):
            model.zero_grad()
            logits = model(tokens.chunk(2)[mesh["dp"].get_local_rank()])
            (logits.square().mean() / 2).backward()
        for (name, param), (_, full) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            torch.testing.assert_close(full_tensor(param.grad), full.grad, rtol=1e-11, atol=1e-12, msg=name)

    sim.run(body, world_size=4)


def _without_dp(full: ShardingPlan) -> ShardingPlan:
    def strip(value):
        if any(isinstance(entry, (Shard, Replicate, Partial)) for entry in value):
            return tuple(value[1:])
        return tuple("None" if entry == "dp" else entry for entry in value)

    fields = {
        name: {key: strip(value) for key, value in getattr(full, name).items()}
        for name in ("plan", "input_plan", "output_plan", "local_plan")
    }
    return ShardingPlan(**fields, wrap_inputs=True)


@sim.ranks(2, backends=("sim",))
def test_nothing_is_dispatched_to_dtensors_between_inner_modules(ctx):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = shard_module(make(), mesh, plan(True, root=True))
    seen: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda module, args, result, name=name: seen.append(name) if isinstance(result, DTensor) else None
        )
    model(batch())
    assert seen == [""]


def test_a_sequence_that_does_not_divide():
    reference, tokens = make(), batch(length=7)
    reference(tokens).square().mean().backward()

    def body():
        mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
        model = shard_module(make(), mesh, plan(True, root=True))
        model(tokens).square().mean().backward()
        compare(model, reference)
        for length in (5, 7, 6):  # shapes are agreed on anew where they change
            assert model(batch(length=length)).shape == (4, length, TOKENS)

    sim.run(body, world_size=4)


@pytest.mark.parametrize("padding_idx", [0, 5, TOKENS - 1])
def test_the_padding_row_of_a_split_embedding_learns_nothing(padding_idx):
    reference, tokens = make(padding_idx), batch()
    reference(tokens).square().mean().backward()
    assert not reference.embed.weight.grad[padding_idx].any()

    def body():
        mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
        model = shard_module(make(padding_idx), mesh, plan(False))
        model(tokens).square().mean().backward()
        compare(model, reference)
        assert model.embed.padding_idx == padding_idx

    sim.run(body, world_size=4)


@pytest.mark.parametrize(
    ("tokens", "ranks", "change", "message"),
    [
        (3, 4, {}, "some rank has none of the 3 rows"),
        (8, 2, {"max_norm": 1.0}, "max_norm changes them in each forward"),
    ],
)
def test_embeddings_that_cannot_be_split(tokens, ranks, change, message):
    def body():
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        embed = shard_module(
            nn.Embedding(tokens, 4, **change),
            mesh,
            ShardingPlan(plan={"weight": ("tp", "None")}, local_plan={"": (Partial(),)}),
        )
        with pytest.raises(ValueError, match=message):
            embed(torch.zeros(2, dtype=torch.long))

    sim.run(body, world_size=ranks)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
@pytest.mark.parametrize(("weight", "produced"), [("width", ("dp", "tp")), ("whole", ROWS), ("vocabulary", SHARE)])
@sim.ranks(4, backends=("sim",))
def test_embeddings_that_need_all_tokens_or_rows(ctx, option, weight, produced):
    layouts = {"width": ("None", "tp"), "whole": ("None",), "vocabulary": ("tp", "None")}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Embedding(10, 8, **option))
    shard_module(model, mesh, ShardingPlan(plan={"0.weight": layouts[weight]}, local_plan={"0": produced}))
    tokens = distribute_tensor(torch.tensor([1, 2, 2, 9]), mesh, ("dp",))
    with pytest.raises(ValueError, match=f"(?s)cannot look up tokens.*{next(iter(option))}.*try: "):
        model(tokens)
    assert isinstance(model[0].weight, DTensor)


class Loose(nn.Module):
    """What goes into `inner` comes out of no module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.inner(x * 2)


@sim.ranks(2, backends=("sim",))
def test_a_plain_tensor_of_which_nothing_says_what_it_is(ctx):
    loose = ShardingPlan(
        plan={"inner.weight": ("tp", "None")},
        input_plan={"inner.input": ("None", "None")},
        local_plan={"inner": ("None", "tp"), "": ("None", "tp")},
    )
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = shard_module(Loose(), mesh, loose)
    full = distribute_tensor(torch.ones(2, 4), Layout.from_device_mesh(mesh)("None", "None"))
    with pytest.raises(ValueError, match=r"input 'input' of module 'inner'(.|\n)*nothing says which shard"):
        model(full)
    model = shard_module(Loose(), mesh, replace(loose, wrap_inputs=True))
    assert full_tensor(model(full)).shape == (2, 4)


def test_marks_say_what_a_part_is_of():
    def body():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = shard_module(make(), mesh, plan(True))
        marks = []
        model.blocks[0].norm.register_forward_hook(lambda module, args, result: marks.append(mark_of(result)))
        model(batch())
        (mark,) = marks
        return str(mark.layout), tuple(mark.shape)

    assert sim.run(body, world_size=2)[0] == ("(dp, tp, -) on dp=1, tp=2", (4, 6, WIDTH))


# -- two modules in a row ----------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = FeedForward(), FeedForward()

    def forward(self, x):
        x = x + self.first(x)
        return x + self.second(x)


class Recomputed(Pair):
    """The second module is computed again in backward."""

    reentrant = False

    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=self.reentrant)


def pair(kind: type[Pair] = Pair, dtype: torch.dtype = torch.float64) -> Pair:
    torch.manual_seed(0)
    return kind().to(dtype)


def activations(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)


def trained_pair(kind: type[Pair] = Pair) -> Pair:
    model = pair(kind)
    model(activations()).square().mean().backward()
    return model


PAIR_WEIGHTS = {"**.up.weight": ("tp", "None"), "**.down.weight": ("None", "tp"), "**.scale": ("None",)}
PARTS = ("first", "second")


def pair_plan(*, local: bool) -> ShardingPlan:
    return ShardingPlan(
        plan=PAIR_WEIGHTS,
        input_plan={f"{part}.input": ROWS for part in PARTS},
        output_plan={f"{part}.output": ROWS for part in PARTS},
        local_plan=dict.fromkeys(PARTS, SHARE) if local else None,
    )


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The square of the gradient, which is differentiated again."""
    found = torch.autograd.grad(model(x).square().mean(), list(model.parameters()), create_graph=True)
    total = found[0].square().sum()
    for each in found[1:]:
        total = total + each.square().sum()
    return total


def penalty_in_float32() -> dict[str, torch.Tensor]:
    model = pair(dtype=torch.float32)
    penalty(model, activations(torch.float32)).backward()
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.tier("test")
@sim.ranks(4)
def test_gradients_of_gradients(ctx):
    reference, x = pair(dtype=ctx.float_dtype), activations(ctx.float_dtype)
    penalty(reference, x).backward()
    reference, x = reference.to(ctx.device), x.to(ctx.device)
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    for local in (False, True):
        model = shard_module(pair(dtype=ctx.float_dtype).to(ctx.device), mesh, pair_plan(local=local))
        penalty(model, distribute_tensor(x, mesh, ROWS)).backward()
        compare(model, reference, penalty_in_float32)


@pytest.mark.tier("test")
@sim.ranks(4, backends=("sim",))
def test_copies_of_a_model_that_has_gradients(ctx):
    reference = trained_pair()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = shard_module(pair(), mesh, pair_plan(local=True))
    x = distribute_tensor(activations(), mesh, ROWS)
    for _ in range(3):
        model(x).square().mean().backward()
        model = copy.deepcopy(model)  # of memory that is known by weak references, which must not be freed twice
        model.zero_grad()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    torch.testing.assert_close(full_tensor(averaged(x)), reference(activations()))
    assert pickle.dumps(model)
    model(x).square().mean().backward()
    compare(model, reference)


def _cast(model):
    return model.float().bfloat16().float().double()


def _loaded(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model


def _unfrozen(model):
    return model.requires_grad_(False).requires_grad_(True)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(
    "change", [copy.deepcopy, _cast, _loaded, _unfrozen], ids=["copied", "cast", "loaded", "unfrozen"]
)
@sim.ranks(4, backends=("sim",))
def test_gradients_of_parameters_that_are_new_ones_lie_as_they_do(ctx, change, local):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = change(shard_module(pair(), mesh, pair_plan(local=local)))
    x = distribute_tensor(activations(), mesh, ROWS)
    reference = pair()
    reference.load_state_dict({name: full_tensor(value) for name, value in model.state_dict().items()})
    reference(activations()).square().mean().backward()
    seen = []
    model.first.scale.register_hook(lambda grad: seen.append(grad.placements))
    for _ in range(2):
        model.zero_grad()
        model(x).square().mean().backward()
    compare(model, reference)
    assert len(seen) == 2  # a hook of the user's own is called once per backward pass
    assert len(model.first.up.weight._backward_hooks) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_between_modules_inside_of_another(reentrant):
    """A reentrant one computes again with tensors that carry no marks: shares of a sum must not pass as the whole."""
    reference = trained_pair(Recomputed)

    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = ShardingPlan(
            plan=PAIR_WEIGHTS,
            input_plan={"input": ROWS, "first.input": ROWS, "second.input": ROWS},
            output_plan={"second.output": ROWS},
            local_plan={"": ROWS, "first": SHARE, "second": SHARE},
            wrap_inputs=True,
        )
        model = shard_module(pair(Recomputed), mesh, plan)
        model.reentrant = reentrant
        loss = model(distribute_tensor(activations(), mesh, ROWS)).square().mean()
        if not reentrant:
            loss.backward()
            compare(model, reference)
            return
        with pytest.raises(
            ValueError, match=r"inputs of module 'second': nothing says .*\n.*\n  try: .*use_reentrant="
        ):
            loss.backward()

    sim.run(body, world_size=4)
