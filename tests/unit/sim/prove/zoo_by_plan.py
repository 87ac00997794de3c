"""Broken plans: false layouts passed to `ShardingPlan`, `custom_shard`, `from_local` and torch's styles."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from zoo_case import Case, found, register, says
from zoo_kit import WIDTH, Mlp, axis, draw, made_of, summed

from hyper_parallel import Layout, ShardingPlan, custom_shard, shard_module

CASES: list[Case] = []
case = register(CASES)

INPUTS = (draw(4, 6, WIDTH),)
WHOLE = ("None", "None", "None")


@made_of(
    lambda: {
        "norms": nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2)),
        "mlps": nn.ModuleList(Mlp(bias=False) for _ in range(2)),
        "head": nn.Linear(WIDTH, 8),
    }
)
def feed(self, x):
    """Two normalised feed-forwards, added back, and a head."""
    for norm, mlp in zip(self.norms, self.mlps, strict=True):
        x = x + mlp(norm(x))
    return self.head(x)


FEED = {"model": feed, "inputs": INPUTS}
SPLIT = {"mlps.*.up.weight": ("tp", "None"), "mlps.*.down.weight": ("None", "tp")}
REST = {"norms.*.*": ("None",), "head.weight": ("None", "None"), "head.bias": ("None",)}


def local_plan_of(**local):
    """The plan of a feed, with what its modules are said to return."""
    return ShardingPlan(
        plan={**SPLIT, **REST},
        input_plan={"input": WHOLE, "mlps.*.input": WHOLE},
        output_plan={"mlps.*.output": WHOLE},
        local_plan=local["local_plan"],
    )


@case("parts of a sum that a plan calls whole", options={"input_layouts": [("None",)]}, **FEED)
@found("forward", "mlps.1.down", "output")
@says("parts of a sum over tp", "nothing reduced it before mlps.1.output", hint="over tp")
def _(model, mesh, broken):
    pending = Layout.from_device_mesh(mesh)(*WHOLE, partial={"tp": "sum"})
    shard_module(model, mesh, local_plan_of(local_plan={"mlps.0": pending, "mlps.1": WHOLE if broken else pending}))
    model.register_forward_pre_hook(lambda module, args: DTensor.from_local(args[0], mesh, [Replicate()]))


class Pair(nn.Module):
    """Two layers, and between them what a rank does with its part."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.mid = Middle()

    def forward(self, x):
        return self.last(self.mid(self.first(x)))


class Middle(nn.Module):
    def forward(self, x):
        return F.gelu(x)


PAIR = {"model": Pair, "inputs": INPUTS}


@case("a plan with two axes in the wrong order", mesh="dp=2,tp=2", **PAIR)
@found("forward", "mid", "output")
@says("the 4 pieces of dim 2 are in another order: (0, 2, 1, 3), as if gathered over 'dp' and 'tp'")
def _(model, mesh, broken):
    both = ("dp", "tp")
    plan = ShardingPlan(
        plan={"first.weight": (both, "None"), "last.weight": ("None", "None")},
        output_plan={"mid.output": WHOLE},
        local_plan={"mid": ("None", "None", both[::-1] if broken else both)},
    )
    shard_module(model, mesh, plan)
    model.register_forward_pre_hook(lambda module, args: DTensor.from_local(args[0], mesh, [Replicate(), Replicate()]))


@case("custom code whose sum is said to be taken", **PAIR)
@found("forward", "last", "output")
@says("declared Replicate over tp, but the ranks hold parts of a sum over tp", hint="all_reduce over tp")
def _(model, mesh, broken):
    layout = Layout.from_device_mesh(mesh)
    shard_module(model, mesh, ShardingPlan(plan={"first.weight": ("tp", "None"), "last.weight": ("None", "tp")}))
    out = layout(*WHOLE) if broken else layout(*WHOLE, partial={"tp": "sum"})
    rows = custom_shard(lambda y, w: y @ w.T, mesh, [("None", "None", "tp"), ("None", "tp")], out, out_shapes=shape)
    model.last.forward = lambda y: rows(y, model.last.weight)
    model.register_forward_pre_hook(lambda module, args: DTensor.from_local(args[0], mesh, [Replicate()]))
    model.register_forward_hook(lambda module, args, y: y.full_tensor())


def shape(y, w):
    return (*y.shape[:-1], w.shape[0])


@case("custom code that says each rank has the full gradient of what it has only a share of", **PAIR)
@found("gradient", "last", "input")
@says("declared Replicate over tp, but the ranks hold parts of a sum over tp", hint="all_reduce over tp")
def _(model, mesh, broken):
    layout = Layout.from_device_mesh(mesh)
    shard_module(model, mesh, ShardingPlan(plan={"first.weight": ("None", "None"), "last.weight": ("tp", "None")}))
    share = layout(*WHOLE) if broken else layout(*WHOLE, partial={"tp": "sum"})
    columns = custom_shard(
        lambda y, w: y @ w.T,
        mesh,
        [WHOLE, ("tp", "None")],
        ("None", "None", "tp"),
        out_shapes=shape,
        in_grad_layouts=[share, None],
    )
    model.last.forward = lambda y: columns(y, model.last.weight)
    model.register_forward_pre_hook(lambda module, args: DTensor.from_local(args[0], mesh, [Replicate()]))


@case("a part of the rows that from_local calls whole", mesh="dp=2", options={"input_layouts": [("dp",)]}, **PAIR)
@found("forward", "mid", "output")
@says("the ranks take it for parts of a tensor of shape (2, 6, 32), and that has (4, 6, 32)")
def _(model, mesh, broken):
    def forward(y):
        return DTensor.from_local(F.gelu(y), mesh, [Replicate() if broken else Shard(0)])

    model.mid.forward = forward
    whole = model.last.forward
    model.last.forward = lambda y: whole(y.to_local())
    for weight in model.parameters():
        weight.register_hook(lambda grad: summed(grad, mesh.get_group()))


# -- torch's styles ----------------------------------------------------------------------------------------------------


def styles(**changed):
    """Torch's plan of a feed whose sequence is split between the split modules."""
    plan = {}
    for index in range(2):
        plan[f"norms.{index}"] = SequenceParallel(use_local_output=True)
        plan[f"mlps.{index}"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan[f"mlps.{index}.up"] = ColwiseParallel()
        plan[f"mlps.{index}.down"] = RowwiseParallel(output_layouts=Shard(1))
    plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    plan.update(changed)
    return {name: style for name, style in plan.items() if style is not None}


SEQUENCE = {**FEED, "options": {"input_layouts": [("None", "tp")], "declared": {"output": WHOLE}}}


@case("a norm that torch's plan leaves out", **SEQUENCE)
@found("gradient", "norms.1", "weight")
@says("parts of a sum over tp: nothing adds up the gradients", hint="all_reduce of gradients over tp")
def _(model, mesh, broken):
    return parallelize_module(model, mesh, styles(**({"norms.1": None} if broken else {})))


@case("a head that is told that it gets the whole sequence", **SEQUENCE)
@found("forward", "head", "input")
@says("the ranks take it for parts of a tensor of shape (4, 3, 16), and that has (4, 6, 16)")
def _(model, mesh, broken):
    wrong = {"head": ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}
    parallelize_module(model, mesh, styles(**(wrong if broken else {})))


@case("shards that were loaded from a transposed weight", **FEED)
@found("parameter", "mlps.0.up", "weight", "declared (tp, -), and rank", "x the bound")
def _(model, mesh, broken):
    rank, size, _ = axis(mesh)
    plan = {"mlps.0.up": ColwiseParallel(), "mlps.0.down": RowwiseParallel()}
    weight = model.mlps[0].up.weight.detach().clone()
    parallelize_module(model, mesh, plan)
    if broken:
        local = model.mlps[0].up.weight.to_local()
        with torch.no_grad():
            local.copy_(weight.T.reshape(weight.shape).chunk(size)[rank])
