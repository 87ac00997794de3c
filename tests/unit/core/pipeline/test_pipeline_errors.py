"""Errors of pipelines; a step that fails has no effect on the next one."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from errors_kit import errors_on_ranks, fails_on_ranks
from torch import nn

import sim
from hyper_parallel import DeviceMesh, Layout, from_local, fully_shard, hsdp, init_device_mesh
from hyper_parallel.core.fully_shard.module import hold_parameters, reduce_gradients, release_parameters
from hyper_parallel.core.pipeline import SCHEDULES, Pipeline, TiedWeights, clip_grad_norm

pytestmark = pytest.mark.sim


def square(output, target):
    return (output - target).square().sum()


def mesh_of(ranks=2):
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))


def linear(size=3):
    torch.manual_seed(0)
    return nn.Linear(size, size)


def pipeline(stage=None, ranks=2, micro_batches=2, **options):
    stages = [linear()] if stage is None else [stage]
    return Pipeline(stages, mesh_of(ranks), options.pop("schedule", "gpipe"), micro_batches, square, **options)


X = torch.arange(12.0).view(4, 3)


# -- making a pipeline -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not SCHEDULES["zbv"].is_available, reason="this torch has no right one")
def test_a_split_backward_of_what_is_compiled():
    stage = linear()
    stage.forward = torch.compile(stage.forward)

    def body():
        Pipeline([linear(), stage], mesh_of(), "zbv", 2, square)

    fails_on_ranks(body, ValueError, "computes gradients of inputs and weights apart, and '' is compiled as one")
    stage.forward = torch._dynamo.disable(linear().forward)  # that one is left alone by the compiler
    sim.run(body, world_size=2)


class Shared(nn.Module):
    """Its weight is used twice, with a bias of its own each time."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
        self.weight = nn.Parameter(torch.eye(3))

    def forward(self, x):
        return nn.functional.linear(nn.functional.linear(x, self.weight, self.first).tanh(), self.weight, self.second)


def of_one_rank(schedule, loss, *stages):
    Pipeline(stages, mesh_of(1), schedule, 2, loss).step(X, X)


def pipelined(stages, mesh=mesh_of, schedule="gpipe", micro_batches=1, loss=square, **options):
    return Pipeline([linear() for _ in range(stages)], mesh(), schedule, micro_batches, loss, **options)


ZBV_APART = "cannot compute the gradients of the weights of stage 1 apart: some weight is used several times"

# What every rank does, and what it raises: none is left waiting.
REFUSED = {
    "a schedule misspelt": (lambda: pipeline(schedule="1fb"), "there is no schedule '1fb'.*\n.*\n.*try: '1f1b'"),
    "fewer micro-batches than stages": (
        lambda: pipeline(schedule="1f1b", micro_batches=1),
        "'1f1b' needs at least as many micro-batches as stages",
    ),
    "another number of stages": (
        lambda: pipeline(num_stages=3),
        "every rank has as many stages as this one, which are 2 in all",
    ),
    "other stages": (
        lambda: pipeline(stage_indices=[5]),
        "'gpipe' gives this rank other stages\n.*stage_indices: \\[5\\]",
    ),
    "a boundary without a mesh": (lambda: pipeline(boundary=Layout((2,), ("tp",))("tp")), "its layout has no mesh"),
    "two stages per rank": (lambda: pipelined(2), "'gpipe' has exactly 1 per rank"),
    "no loss": (lambda: pipelined(1, loss=None), "InvalidType: .*loss_fn is None, not something to call"),
    "a mesh of two axes": (
        lambda: pipelined(1, lambda: init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))),
        "mesh has 2 axes, and stages are along one",
    ),
    "ranks out of order": (
        lambda: pipelined(1, lambda: DeviceMesh("cpu", [1, 0], mesh_dim_names=("pp",))),
        "cannot make a pipeline: ranks along axis 'pp' have to ascend",
    ),
    # Without a mesh both wrap over all ranks, of which some have other layers.
    "fully_shard over stages": (
        lambda: pipeline(fully_shard(linear())),
        "parameters of Linear are shared with rank [01]",
    ),
    "hsdp over stages": (lambda: pipeline(hsdp(linear())), "parameters of Linear are shared with rank [01]"),
    "a split backward of parameters that are freed": (
        lambda: pipelined(2, schedule="zero-bubble", micro_batches=2, keep_gathered=False),
        "computes gradients of weights later, when parameters would be freed",
    ),
    "a split backward of a weight that torch cannot take apart": (
        lambda: of_one_rank("zbv", square, Shared(), Shared()),
        f"InvalidState: {ZBV_APART}",
    ),
    "inputs that do not divide": (
        lambda: pipeline(micro_batches=3).step(X, X),
        "the batch of inputs does not divide into 3 micro-batches of equal size\n.*inputs: \\(4, 3\\)\n.*try: 3 rows",
    ),
    "targets that do not divide": (lambda: pipeline().step(X, X[:3]), "the batch of targets does not divide"),
    "inputs that are no tensor": (lambda: pipeline().step([1, 2], X), "InvalidType: .*inputs is an int, not a tensor"),
    "a step without gradients": (
        torch.no_grad()(lambda: pipeline().step(X, X)),
        "InvalidState: .*gradients are switched off here\n.*\n.*pipeline.eval",
    ),
    "a loss that is no number": (
        lambda: of_one_rank("interleaved", lambda output, target: output, linear(), linear()),
        r"InvalidType: .*loss_fn returned a Tensor of shape \(2, 3\)",
    ),
    "tied weights of other shapes": (
        lambda: TiedWeights(pipeline(linear(3 + dist.get_rank())), "weight", "weight"),
        r"'weight' of the first stage and 'weight' of the last differ\n.*\(3, 3\) float32\n.*\(4, 4\) float32",
    ),
    "tied weights that are not there": (
        lambda: TiedWeights(pipeline(), "table", "weight"),
        "a stage has no such parameter\n.*'table': none",
    ),
    "tied weights of which one is frozen": (
        lambda: TiedWeights(pipeline(linear().requires_grad_(dist.get_rank() == 0)), "weight", "weight"),
        r"differ\n.*float32\n.*float32, frozen",
    ),
}


ON_ONE_RANK = ("a split backward of a weight that torch cannot take apart", "a loss that is no number")


@pytest.mark.parametrize("name", REFUSED)
def test_what_every_rank_refuses(name):
    if "split backward" in name and not SCHEDULES["zbv"].is_available:
        pytest.skip("this torch has no right one")
    call, said = REFUSED[name]
    for text in errors_on_ranks(call, 1 if name in ON_ONE_RANK else 2, sends=True):
        assert re.search(said if said.startswith("Invalid") else f"^InvalidValue: .*{said}", text), text


# -- running it --------------------------------------------------------------------------------------------------------


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make, self.linear = make, linear()

    def forward(self, x):
        return self.make(self.linear(x))


def fails_on_rank_0(kind, said, body):
    """The stage that is to blame raises; the others would wait for it, and are stopped."""
    with pytest.raises(sim.RankFailed, match="(?s)rank 0 raised.*" + said) as caught:
        sim.run(body, world_size=2)
    assert isinstance(caught.value.__cause__, kind)


def test_stages_that_return_what_cannot_be_sent():
    fails_on_rank_0(TypeError, "only tensors can go to the next stage\n  returned: dict", lambda: _first({"x": 0}))
    fails_on_rank_0(ValueError, "there must be a layout for each tensor", _two_for_one)


def _first(value):
    pipeline(Returns(lambda x: value) if dist.get_rank() == 0 else None).step(X, X)


def _two_for_one():
    layout = Layout.from_device_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))("None", "None")
    pipeline(Returns(lambda x: (x, x)), boundary=[layout]).step(X, X)


def test_a_dtensor_without_a_boundary():
    def body():
        tp = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))["tp"]
        layout = Layout.from_device_mesh(tp)("None", "None")
        pipeline(Returns(lambda x: from_local(x, layout))).step(X, X)

    fails_on_rank_0(ValueError, "it is a DTensor, and no boundary was given", body)


def test_a_boundary_without_a_dtensor():
    def body():
        tp = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))["tp"]
        pipeline(boundary=Layout.from_device_mesh(tp)("None", "None")).step(X, X)

    fails_on_rank_0(ValueError, "it is a plain tensor, and a boundary of DTensors was given", body)


def test_a_shape_that_changes():
    def body():
        calls = []

        def cut(x):
            calls.append(1)
            return x[:1] if len(calls) > 2 else x  # the first call is to find out shapes

        pipeline(Returns(cut) if dist.get_rank() == 0 else None).step(X, X)

    fails_on_rank_0(ValueError, "for micro-batch 1: it differs from what the stage returned before", body)


@sim.ranks(1, backends=("sim",))
def test_after_a_step_that_fails_the_next_one_is_right(ctx):
    mesh = mesh_of(1)
    calls = []

    def loss(output, target):
        calls.append(1)
        if len(calls) == 2:
            raise ArithmeticError("the second micro-batch")
        return square(output, target)

    data = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    stages = [fully_shard(linear(), mesh=data), linear()]
    run = Pipeline(stages, mesh, "interleaved", 2, loss)
    with pytest.raises(ArithmeticError, match="the second micro-batch"):
        run.step(X, X)
    stages[1].zero_grad()  # a plain stage has what the first micro-batch brought, as after any backward
    run.step(X, X)
    alone = nn.Sequential(linear(), linear())
    square(alone(X), X).backward()
    torch.testing.assert_close(stages[0].weight.grad.to_local(), alone[0].weight.grad)
    torch.testing.assert_close(stages[1].weight.grad, alone[1].weight.grad)


# -- tied weights ------------------------------------------------------------------------------------------------------


@sim.ranks(2, backends=("sim",))
def test_a_norm_counts_what_is_tied_once(ctx):
    run = pipeline(schedule="1f1b")
    tied = TiedWeights(run, "weight", "weight")
    weight, bias = run.stages[0].weight, run.stages[0].bias
    weight.grad, bias.grad = torch.full((3, 3), 1.0), torch.full((3,), 2.0)
    tied.add_gradients()
    assert weight.grad.tolist() == [[2.0] * 3] * 3
    norm = clip_grad_norm(run.stages, 1.0, run.group, tied=tied)
    assert norm.item() == pytest.approx((9 * 2.0**2 + 2 * 3 * 2.0**2) ** 0.5)
    assert weight.grad[0, 0].item() == pytest.approx(2.0 / norm.item())


# -- holding parameters ------------------------------------------------------------------------------------------------


@sim.ranks(2, backends=("sim",))
def test_parameters_are_held_once(ctx):
    model = fully_shard(linear(), mesh=mesh_of())
    hold_parameters(model)
    with pytest.raises(RuntimeError, match="they are unsharded for a step already\n  seen: unit Linear"):
        hold_parameters(model)
    release_parameters(model)
    hold_parameters(model)
    release_parameters(model)


@sim.ranks(2, backends=("sim",))
def test_what_is_traced_cannot_be_held(ctx):
    model = hsdp(linear(), use_eager_hook=False)
    for verb in (hold_parameters, reduce_gradients):
        with pytest.raises(ValueError, match=r"was wrapped for torch\.compile to trace"):
            verb(model)
