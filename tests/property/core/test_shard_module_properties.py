"""Any tree of modules with any plan computes what one device does: outputs, the loss, and all gradients.

Modules compute on DTensors, with parameters and activations in any layouts; or on local tensors, in all the ways in
which a module's own code is right then. Everything is float64, so that the bound on rounding lies far below any real
difference. Splits of one dim over several axes are in mesh order where torch computes on them.
"""

import copy
import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import sim
from hyper_parallel import DTensor, distribute_tensor, full_tensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.api import ShardingPlan, shard_module

pytestmark = pytest.mark.sim

many = settings(max_examples=max(1, settings.default.max_examples // 2))

WIDTHS = (4, 1, 2, 3, 5, 8)


class Tree(nn.Module):
    """Modules one after the other; if the width stays, with what went in added."""

    def __init__(self, layers, residual):
        super().__init__()
        self.layers, self.residual = nn.ModuleList(layers), residual

    def forward(self, x):
        y = x
        for layer in self.layers:
            y = layer(y)
        return x + y if self.residual else y


class Case(NamedTuple):
    """What hypothesis draws; shrinks towards one rank, one module, everything whole, DTensors."""

    model: nn.Module
    mesh: Layout
    rows: int  # of the batch
    width: int
    start: Layout  # of what goes into the model
    fields: dict[str, Any]  # of the plan
    wrap: bool  # what goes in is a plain tensor, this rank's part
    steps: int  # backward passes that add up
    seed: int


@st.composite
def trees(draw, width, depth):
    """A tree, and the width of what it returns."""
    layers, out = [], width
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["linear", "norm", "gelu", *(["tree"] if depth > 1 else [])]))
        if kind == "tree":
            layer, out = draw(trees(out, depth - 1))
        elif kind == "linear":
            wide = draw(st.sampled_from(WIDTHS))
            bias = draw(st.booleans()) and wide > 1  # torch refuses the gradient of one that is split of one element
            layer, out = nn.Linear(out, wide, bias=bias), wide
        else:
            layer = nn.RMSNorm(out) if kind == "norm" else nn.GELU()
        layers.append(layer)
    return Tree(layers, draw(st.booleans()) and out == width), out


def dtensors(draw, mesh, name, layer, rows, width, fields):
    """Anything that torch computes on: what it cannot keep split, it gathers; an RMSNorm it does not."""
    out = layer.out_features if isinstance(layer, nn.Linear) else width
    for key, param in layer.named_parameters():
        fields["plan"][f"{name}.{key}"] = draw(sim.strategies.layouts(mesh, param.shape, ordered=False))
    entering = sim.strategies.layouts(mesh, (rows, width), ordered=False)
    if isinstance(layer, nn.RMSNorm):
        entering = sim.strategies.layouts(mesh, (rows,), ordered=False)
        fields["plan"][f"{name}.weight"] = mesh()
    fields["input_plan"][f"{name}.input"] = draw(entering)
    if draw(st.booleans()):
        fields["output_plan"][f"{name}.output"] = draw(sim.strategies.layouts(mesh, (rows, out), ordered=False))


def local(draw, mesh, name, layer, rows, width, fields):
    """What each axis does for a module's own code: nothing, or split the batch, what comes out, or what goes in."""
    roles = {"none": [], "batch": [], "out": [], "in": []}
    can = ["none", "batch"]
    if isinstance(layer, nn.Linear):
        can += ["out"] if layer.bias is not None else ["out", "in"]  # a bias would be added on every rank
    elif isinstance(layer, nn.GELU):
        can += ["out"]
    for axis in mesh.alias_name:
        roles[draw(st.sampled_from(can))].append(axis)
    for axes in roles.values():
        axes[:] = draw(st.permutations(axes)) if len(axes) > 1 else axes
    batch, outs, ins = (tuple(roles[role]) or None for role in ("batch", "out", "in"))
    if isinstance(layer, nn.Linear):
        fields["plan"][f"{name}.weight"] = mesh(outs, ins)
        if layer.bias is not None:
            fields["plan"][f"{name}.bias"] = mesh(outs)
    elif isinstance(layer, nn.RMSNorm):
        fields["plan"][f"{name}.weight"] = mesh()
    fields["input_plan"][f"{name}.input"] = mesh(batch, outs if isinstance(layer, nn.GELU) else ins)
    fields["local_plan"][name] = mesh(batch, outs, partial=dict.fromkeys(ins or (), "sum"))
    out = layer.out_features if isinstance(layer, nn.Linear) else width
    fields["output_plan"][f"{name}.output"] = draw(sim.strategies.layouts(mesh, (rows, out), ordered=False))


@st.composite
def cases(draw):
    mesh = draw(sim.strategies.meshes(max_ranks=8, max_axes=3))
    rows, width = draw(st.sampled_from((4, 1, 3, 5, 8))), draw(st.sampled_from(WIDTHS))
    model, out = draw(trees(width, 2))
    fields = {"plan": {}, "input_plan": {}, "output_plan": {}, "local_plan": {}}
    wide = width
    for name, layer in model.named_modules():
        if not isinstance(layer, (Tree, nn.ModuleList)):
            add = local if draw(st.booleans()) else dtensors
            add(draw, mesh, name, layer, rows, wide, fields)
            wide = layer.out_features if isinstance(layer, nn.Linear) else wide
    # Of a sum of layouts torch makes what it likes; the model's own is drawn.
    fields["output_plan"]["output"] = draw(sim.strategies.layouts(mesh, (rows, out), ordered=False))
    wrap = draw(st.booleans())  # parts of different shapes are refused: nothing says what they are parts of
    start = draw(sim.strategies.layouts(mesh, (rows, width), ordered=False, even=wrap))
    if draw(st.booleans()):
        fields["input_plan"]["input"] = draw(sim.strategies.layouts(mesh, (rows, width), ordered=False))
    if wrap:
        fields["input_plan"]["input"] = start
    return Case(model, mesh, rows, width, start, fields, wrap, draw(st.integers(1, 2)), draw(st.integers(0, 99)))


def full(tensor):
    return full_tensor(tensor.detach()) if isinstance(tensor, DTensor) else tensor.detach()


def assert_close(name, got, wanted):
    """Equal up to eps per addition: fewer than 2 ** 20 of them, and what an RMSNorm of one number magnifies."""
    assert got.shape == wanted.shape, name
    bound = torch.finfo(torch.float64).eps * 2**20 * max(1.0, wanted.abs().max().item())
    assert (got - wanted).abs().max().item() <= bound, (name, got, wanted)


def on_rank(case, model, value, reference):
    mesh = init_device_mesh("cpu", case.mesh.mesh_shape, mesh_dim_names=case.mesh.alias_name)
    net = copy.deepcopy(model)
    shard_module(net, mesh, ShardingPlan(**case.fields, wrap_inputs=case.wrap))
    assert mesh.size() == 1 or all(isinstance(param, DTensor) for param in net.parameters())
    start = case.start.with_mesh(mesh)
    x = distribute_tensor(value, start, src_data_rank=None)
    x = x.to_local().detach() if case.wrap and mesh.size() > 1 else x
    if mesh.size() == 1:
        x = value.clone()
    x.requires_grad_()
    for _ in range(case.steps):
        y = net(x)
        loss = y.sin().sum()
        loss.backward()
    assert_close("output", full(y), reference["output"])
    assert_close("loss", full(loss), reference["loss"])
    gradient = reference["gradient of the input"]
    if case.wrap and mesh.size() > 1:  # every rank gets its part of it, the whole where ranks hold the same
        assert_close("gradient of the input", x.grad, sim.scatter_full(gradient, start))
    else:
        assert_close("gradient of the input", full(x.grad), gradient)
    for name, param in net.named_parameters():
        assert_close(name, full(param.grad), reference[name])
        if isinstance(param, DTensor):
            assert param.grad.placements == param.placements, name
            assert param.grad.device_mesh == param.device_mesh, name
            layout = case.fields["plan"][name].with_mesh(mesh)
            assert torch.equal(param.to_local(), sim.scatter_full(model.get_parameter(name).detach(), layout)), name
    if isinstance(y, DTensor):
        assert Layout.of(y) == case.fields["output_plan"]["output"]


@pytest.mark.tier("full")
@many
@given(cases())
def test_any_plan_computes_what_one_device_does(case):
    torch.manual_seed(case.seed)
    model = case.model.double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[-1]))
    value = torch.randn(case.rows, case.width, dtype=torch.float64)
    alone, x = copy.deepcopy(model), value.clone().requires_grad_()
    for _ in range(case.steps):
        y = alone(x)
        loss = y.sin().sum()
        loss.backward()
    reference = {"output": y.detach(), "loss": loss.detach(), "gradient of the input": x.grad}
    reference |= {name: param.grad for name, param in alone.named_parameters()}
    sim.run(on_rank, math.prod(case.mesh.mesh_shape), (case, model, value, reference), seed=case.seed)
