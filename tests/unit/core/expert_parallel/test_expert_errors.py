"""Errors of expert parallelism: on all ranks, before any communication."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from errors_kit import assert_says, error_on_ranks, errors_on_ranks
from torch import nn

import sim
from hyper_parallel import DeviceMesh, fully_shard, init_device_mesh, shard_module
from hyper_parallel.core.expert_parallel import GroupedExperts, Router, expert_parallel, update_expert_bias
from hyper_parallel.models.llama import Llama, LlamaConfig
from hyper_parallel.models.moe import MoEConfig, MoELlama
from hyper_parallel.models.moe_plan import moe_plan, parallelize_moe

pytestmark = pytest.mark.sim

CONFIG = MoEConfig(num_hidden_layers=2, num_dense_layers=1, expert_intermediate_size=6)


SPLIT = "cannot split the experts"
NODES = "the ranks that share experts must lie equally many on each of equally many nodes"
EXPERTS = "of 'layers.1.mlp.experts' evenly"


def split(config: LlamaConfig, sizes: dict[str, int], **options: Any) -> tuple[int, Callable[[], object]]:
    """Return the number of ranks, and a call that splits the experts of a model over a mesh of these sizes."""

    def call() -> object:
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return expert_parallel(MoELlama(config) if isinstance(config, MoEConfig) else Llama(config), mesh, **options)

    return math.prod(sizes.values()), call


MISTAKES = {
    "experts": (
        split(replace(CONFIG, num_experts=9), {"ep": 2}),
        f"the 2 ranks of ep cannot share num_experts=9 {EXPERTS}\n  ep=2, tp=1, cp=1, etp=1\n  try: ep one of 1, 3, 9",
    ),
    "width": (
        split(CONFIG, {"ep": 2, "tp": 4}),
        f"the 4 ranks of etp cannot share inner_size=6 {EXPERTS}\n  ep=2, tp=4, cp=1, etp=4\n"
        "  try: etp one of 1, 2, 3, 6",
    ),
    "etp": (
        split(CONFIG, {"ep": 2, "tp": 4}, etp=2),
        "inside of an expert tp splits either the inner width, on all its ranks, or nothing\n"
        "  ep=2, tp=4, cp=1, etp=2\n  try: etp=4, or etp=1",
    ),
    "tp twice": (
        split(CONFIG, {"ep": 2, "tp": 2}, ep=("ep", "tp"), etp=2),
        "ranks along tp cannot both split experts and have experts of their own\n  ep=4, tp=2, cp=1, etp=2\n"
        "  try: etp=1, or an ep without the axis of tp",
    ),
    "order": (
        split(CONFIG, {"ep": 2, "tp": 2}, ep=("tp", "ep")),
        "ep must hold each axis once, in mesh order\n  ep: ('tp', 'ep')   mesh: ep=2, tp=2\n  try: ep=('ep', 'tp')",
    ),
    "axis": (
        split(CONFIG, {"expert": 2}, ep="experts"),
        "ep='experts' is no axis of the mesh\n  mesh: expert=2\n  try: ep='expert'",
    ),
    "some": (
        split(CONFIG, {"dp": 2, "ep": 2}, ranks_per_node=3),
        f"{NODES}\n  ranks: [2, 3], of which each node has [1, 1]   ranks_per_node: 3\n"
        "  try: ranks_per_node=None, or another size of ep",
    ),
    "uneven": (
        split(CONFIG, {"ep": 4}, ranks_per_node=3),
        f"{NODES}\n  ranks: [0, 1, 2, 3], of which each node has [3, 1]   ranks_per_node: 3\n"
        "  try: ranks_per_node=None, or another size of ep",
    ),
    "none": (
        split(CONFIG, {"ep": 2}, ranks_per_node=0),
        "ranks_per_node must be a finite number of at least 1\n  ranks_per_node: 0\n  try: ranks_per_node=1",
    ),
    "llama": (
        split(LlamaConfig(num_hidden_layers=1), {"ep": 2}),
        "there are none in this Llama\n  ep=2, tp=1, cp=1, etp=1\n"
        "  try: a model with GroupedExperts, such as hyper_parallel.models.MoELlama",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_does_not_fit_is_refused(name):
    (world_size, call), expected = MISTAKES[name]
    assert_says(error_on_ranks(call, world_size), f"{SPLIT}: {expected}")


def test_ranks_out_of_order() -> None:
    """A group sorts its ranks: tokens would go to another rank than the one that has their expert."""
    mesh = lambda: DeviceMesh("cpu", [1, 0], mesh_dim_names=("ep",))  # noqa: E731
    assert_says(
        error_on_ranks(lambda: expert_parallel(MoELlama(CONFIG), mesh()), 2),
        f"{SPLIT}: ranks along axis 'ep' have to ascend, as a process group has no other order\n"
        "  mesh: ep=2   ranks: 1, 0\n  try: a mesh whose rows and columns ascend, as init_device_mesh makes them",
    )


def with_a_gradient(experts: GroupedExperts) -> None:
    experts.w1.grad = torch.zeros_like(experts.w1)


def with_a_hook(experts: GroupedExperts) -> None:
    experts.w2.register_hook(lambda grad: grad)


def with_another_holder(experts: GroupedExperts) -> None:
    experts.head = nn.Module()
    experts.head.weight = experts.w1


def with_one_weight_for_two(experts: GroupedExperts) -> None:
    experts.w2 = experts.w1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (with_a_gradient, "weight 'layer.w1': it has a gradient, which would be lost"),
        (with_a_hook, "weight 'layer.w2': it has hooks, which would be lost"),
        (with_another_holder, "'layer.w1' is also 'weight' of 'layer.head', which needs it otherwise"),
        (with_one_weight_for_two, "'layer.w1' is also 'w2' of 'layer', which needs it otherwise"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_of_which_something_would_be_lost(change, expected, ranks):
    def call() -> None:
        model = nn.ModuleDict({"layer": GroupedExperts(4, 8, 8)})
        change(model["layer"])
        expert_parallel(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",)))

    assert error_on_ranks(call, ranks).startswith(f"InvalidValue: {SPLIT}: {expected}")


@pytest.mark.parametrize("wrapped", [False, True])
def test_experts_that_are_split_already(wrapped):
    def call() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        model = MoELlama(CONFIG)
        if wrapped:
            fully_shard(model.layers[1].mlp.experts, mesh=mesh)
        else:
            expert_parallel(model, mesh)
        expert_parallel(model, mesh)

    message = error_on_ranks(call, 2)
    assert "the weights of 'layers.1.mlp.experts' are split already" in message
    assert "try: expert_parallel once, before shard_module and fully_shard" in message


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("wrapped", "expected"),
    [
        (False, "parameter 'experts.w1' has no layout, and over 'tp' its gradients are shares to be added"),
        (True, "fully_shard has 'experts' in it, whose parameters are gathered only when that is called"),
    ],
)
def test_experts_that_nobody_has_split_are_not_trained_wrong(wrapped, expected):
    """`expert_parallel` was left out."""

    def call() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = MoELlama(CONFIG)
        shard_module(model, mesh["tp"], moe_plan(CONFIG, mesh["tp"]))
        if wrapped:
            fully_shard(model.layers[1].mlp.experts, mesh=mesh["dp"])
        model(torch.zeros(2, 4, dtype=torch.long))

    texts = errors_on_ranks(call, 4, sends=True)
    assert all(expected in text for text in texts)


def test_plans_that_are_refused():
    with pytest.raises(ValueError, match="cannot plan the mixture of experts: ranks along tp would send the same"):
        moe_plan(CONFIG, {"tp": 2}, etp=1, sequence_parallel=False)
    with pytest.raises(ValueError, match=r"tp splits either the inner width(?s:.*)try: etp=4, or etp=1"):
        moe_plan(CONFIG, {"tp": 4}, etp=2)
    with pytest.raises(TypeError, match="model is a LlamaConfig, not a MoELlama or a MoEConfig"):
        moe_plan(LlamaConfig(), {"tp": 2})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot share num_key_value_heads=2 evenly"):
        moe_plan(CONFIG, {"tp": 4})
    with pytest.raises(TypeError, match="mesh is a dict, not a DeviceMesh"):
        parallelize_moe(MoELlama(CONFIG), {"ep": 2})  # type: ignore[arg-type]


def test_routers_that_are_refused():
    with pytest.raises(TypeError, match="groups is a set, not a list"):
        update_expert_bias(MoELlama(CONFIG), groups={None})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a token cannot choose 3 of 2 experts"):
        Router(2, 8, 3)
    with pytest.raises(ValueError, match="there is no such kind of score\n  score: 'top'\n  try: score=\"sigmoid\""):
        Router(2, 8, 1, score="top")


@sim.ranks(1, backends=("sim",))
def test_axes_of_a_single_rank_change_nothing(ctx):
    model = MoELlama(CONFIG)
    before = dict(model.named_parameters())
    parallelize_moe(model, init_device_mesh("cpu", (1, 1), mesh_dim_names=("ep", "tp")))
    assert all(before[name] is param for name, param in model.named_parameters())


@sim.ranks(2, backends=("sim",))
def test_a_stage_without_experts_passes(ctx):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    stage: nn.Module = MoELlama(CONFIG).keep(range(1), embed=True, head=False)
    assert [name for name, _ in parallelize_moe(stage, mesh).named_children()] == ["embed", "layers"]  # type: ignore[arg-type]
