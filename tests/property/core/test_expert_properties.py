"""Experts split over ranks compute what they compute on one device: outputs, all gradients, counts and losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sim
from hyper_parallel import DTensor, full_tensor, init_device_mesh
from hyper_parallel.core.expert_parallel import GroupedExperts, expert_parallel, set_aux_scale, update_expert_bias
from hyper_parallel.models.moe import MixtureOfExperts, MoEConfig

pytestmark = pytest.mark.sim

AXES = ("dp", "ep", "cp", "tp")
HIDDEN = 6
MESHES = sorted(
    (mesh for mesh in product((1, 2), range(1, 9), (1, 2), (1, 2, 3)) if math.prod(mesh) <= 12),
    key=lambda mesh: (math.prod(mesh), mesh),
)


@dataclass(frozen=True)
class Drawn:
    """A layer, a mesh, and who has which tokens.

    Attributes:
        mesh: sizes of the axes.
        etp: inside of experts, tp or 1.
        over: the axes that split the experts.
        per_node: ranks of a node, each of which gets a token once; None: nobody says nodes.
        config: of the layer.
        rows: how many rows each rank along (dp, ep) has.
        parts: how many tokens of each row each rank along cp has, or along (cp, tp) with etp=1.
        skew: what the router prefers: "even"; "one": all tokens choose the same experts.
        dtype: of weights and tokens.
        seed: of the values.
    """

    mesh: tuple[int, int, int, int]
    etp: int
    over: tuple[str, ...]
    per_node: int | None
    config: MoEConfig
    rows: tuple[int, ...]
    parts: tuple[int, ...]
    skew: str
    dtype: torch.dtype
    seed: int


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """Shrinks towards one rank, one expert, no tokens."""
    dp, ep, cp, tp = draw(st.sampled_from(MESHES))
    etp = draw(st.sampled_from(sorted({1, tp}, reverse=True)))
    may = {"ep": ep, "cp": cp} | ({"tp": tp} if etp == 1 else {})
    over = tuple(axis for axis in may if axis == "ep" or draw(st.booleans()))
    experts = math.prod(may[axis] for axis in over) * draw(st.integers(1, 3))
    config = MoEConfig(
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_experts=experts,
        experts_per_token=draw(st.integers(1, min(experts, 6))),
        num_shared_experts=0,
        expert_intermediate_size=etp * draw(st.integers(1, 3)),
        score=draw(st.sampled_from(["sigmoid", "softmax"])),
        norm_weights=draw(st.booleans()),
        routed_scale=draw(st.sampled_from([1.0, 2.5])),
        bias_update_rate=0.125,
        aux_loss_weight=draw(st.sampled_from([0.5, 0.0])),
    )
    split = cp * (tp if etp < tp else 1)
    return Drawn(
        (dp, ep, cp, tp),
        etp,
        over,
        draw(st.sampled_from(nodes_for((dp, ep, cp, tp), over))),
        config,
        tuple(draw(st.lists(st.integers(0, 3), min_size=dp * ep, max_size=dp * ep))),
        tuple(draw(st.lists(st.integers(0, 4), min_size=split, max_size=split))),
        draw(st.sampled_from(["even", "one"])),
        draw(st.sampled_from([torch.float64, torch.float32])),
        draw(st.integers(0, 2**16)),
    )


def nodes_for(mesh: tuple[int, int, int, int], over: tuple[str, ...]) -> list[int | None]:
    """Return the numbers of ranks per node that fit: at first none, then those with which experts lie on most nodes."""
    ranks = np.arange(math.prod(mesh)).reshape(mesh)
    groups = np.moveaxis(ranks, [AXES.index(axis) for axis in over], range(-len(over), 0))
    groups = groups.reshape(-1, math.prod(mesh[AXES.index(axis)] for axis in over))
    fits: list[int | None] = [None]
    for per_node in range(1, ranks.size + 1):
        counts = [np.unique(group // per_node, return_counts=True)[1] for group in groups]
        if len({(len(count), *count) for count in counts}) == 1 and len(set(counts[0])) == 1:
            fits.append(per_node)
    return fits


def layer_of(case: Drawn) -> MixtureOfExperts:
    generator = torch.Generator().manual_seed(case.seed)
    layer = MixtureOfExperts(case.config).to(case.dtype)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64))
        if case.skew == "one":
            layer.router.bias[-case.config.experts_per_token :] = 100.0
    return layer


def values(case: Drawn, which: int) -> torch.Tensor:
    """Return tokens (0), or the gradient of what becomes of them (1)."""
    generator = torch.Generator().manual_seed(case.seed * 2 + which)
    shape = (sum(case.rows), sum(case.parts), HIDDEN)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)


def steps(case: Drawn, layer: MixtureOfExperts, x: torch.Tensor, cotangent: torch.Tensor) -> dict[str, Any]:
    """Run forward and backward, and return what came of it."""
    set_aux_scale(layer, 1 / max(sum(case.rows), 1))
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * cotangent).sum().backward()
    found = {"y": y.detach(), "x": x.grad, "counts": layer.router.counts.clone(), "aux": layer.router.aux_sum.clone()}
    return {**found, **{name: param.grad for name, param in layer.named_parameters()}}


def on_ranks(case: Drawn) -> dict[str, Any]:
    """Run as one rank, and return the whole of everything."""
    mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=AXES)
    dp, ep, cp, tp = mesh.get_coordinate()
    layer = layer_of(case)
    expert_parallel(layer, mesh, ep=case.over, etp=case.etp, ranks_per_node=case.per_node)
    split_by_tp = case.etp < case.mesh[3]
    row, part = dp * case.mesh[1] + ep, cp * case.mesh[3] + tp if split_by_tp else cp
    own = place(case.rows, row), place(case.parts, part)
    x, cotangent = values(case, 0)[own], values(case, 1)[own]
    found = steps(case, layer, x, cotangent)
    update_expert_bias(layer, [mesh[axis] for axis in AXES[:3]])
    for name in ("y", "x"):  # put parts and shares together
        out = torch.zeros_like(values(case, 0))
        out[own] = found[name]
        found[name] = added(out, mesh, AXES)
    over_all = AXES if split_by_tp else AXES[:3]
    found["counts"] = added(found["counts"], mesh, over_all)
    found["aux"] = added(found["aux"], mesh, AXES)
    found["router.weight"] = added(found["router.weight"], mesh, AXES)
    for name, grad in found.items():
        if name.startswith("experts."):
            assert not isinstance(grad, DTensor) or grad.placements == layer.get_parameter(name).placements
            full = full_tensor(grad) if isinstance(grad, DTensor) else grad
            found[name] = added(full.clone(), mesh, tuple(axis for axis in ("dp", "cp") if axis not in case.over))
    return {**found, "bias": layer.router.bias}


def place(sizes: tuple[int, ...], index: int) -> slice:
    ends = [0, *accumulate(sizes)]
    return slice(ends[index], ends[index + 1])


def added(value: torch.Tensor, mesh: Any, axes: tuple[str, ...]) -> torch.Tensor:
    for axis in axes:
        torch.distributed.all_reduce(value, group=mesh.get_group(axis))
    return value


@pytest.mark.tier("full")
@settings(max_examples=80)
@given(drawn())
def test_split_experts_are_the_experts(case: Drawn) -> None:
    layer = layer_of(case)
    expected = steps(case, layer, values(case, 0), values(case, 1))
    update_expert_bias(layer)
    expected["bias"] = layer.router.bias
    for found in sim.run(on_ranks, world_size=math.prod(case.mesh), args=(case,)):
        assert torch.equal(found["counts"], expected["counts"])
        assert torch.equal(found["bias"], expected["bias"])
        for name, value in expected.items():
            limit = 1e-11 if case.dtype == torch.float64 and name != "aux" else 1e-4
            scale = max(1.0, float(value.abs().max())) if value.numel() else 1.0
            torch.testing.assert_close(
                found[name], value, rtol=0, atol=limit * scale, msg=lambda text, name=name: f"{name}: {text}"
            )


# What crosses between nodes -------------------------------------------------------------------------------------------


def crossing(chosen: list[list[list[int]]], per_node: int, own: int) -> list[tuple[int, int]]:
    """Return how many rows each rank sends to other nodes, and how many come from there: one for a token and a node.

    Args:
        chosen: the experts of each rank's tokens.
        per_node: ranks of a node.
        own: experts of a rank.
    """
    sent, come = [0] * len(chosen), [0] * len(chosen)
    for source, tokens in enumerate(chosen):
        home, place = divmod(source, per_node)
        for experts in tokens:
            for node in {expert // own // per_node for expert in experts} - {home}:
                sent[source] += 1
                come[node * per_node + place] += 1
    return list(zip(sent, come, strict=True))


def exchanged(chosen: list[list[list[int]]], per_node: int, experts: int) -> None:
    """Run experts forward and backward as one rank."""
    mesh = init_device_mesh("cpu", (len(chosen),), mesh_dim_names=("ep",))
    layer = nn.ModuleList([GroupedExperts(experts, HIDDEN, 2)])
    expert_parallel(layer, mesh, ranks_per_node=per_node)
    mine = torch.tensor(chosen[dist.get_rank()], dtype=torch.int64).view(-1, len(chosen[0][0]))
    x, weights = torch.ones(len(mine), HIDDEN, requires_grad=True), torch.ones(mine.shape, requires_grad=True)
    layer[0](x, mine, weights).sum().backward()


@given(st.data())
def test_one_row_crosses_for_each_token_and_node(data: st.DataObject) -> None:
    nodes, per_node, own = data.draw(st.integers(2, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    ranks, experts = nodes * per_node, nodes * per_node * own
    each = data.draw(st.integers(1, min(experts, 4)))
    choice = st.permutations(range(experts)).map(lambda order: order[:each])
    chosen = [data.draw(st.lists(choice, min_size=rank == 0, max_size=4)) for rank in range(ranks)]
    with sim.world(ranks) as world:
        world.run(partial(exchanged, chosen, per_node, experts))
    row, numbers = HIDDEN * 4, each * 4
    for rank, (sent, come) in enumerate(crossing(chosen, per_node, own)):
        events = [event for event in world.trace.of_rank(rank) if event.axis == ("ep_nodes" if per_node > 1 else "ep")]
        counts = (nodes - 1) * (1 + per_node * own) * 8
        there, back = (sent, come), (come, sent)
        forward = [(there, numbers), (there, row), (there, numbers), (back, row)]  # experts, tokens, weights, results
        backward = [(there, row), (back, row), (back, numbers)]
        expected = [(counts, counts), *((out * size, into * size) for (out, into), size in forward + backward)]
        assert sorted((event.send_bytes, event.recv_bytes) for event in events) == sorted(expected)


def rounded(per_node: int | None) -> torch.Tensor:
    """Return what experts make of this rank's tokens in bfloat16."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    layer = in_bfloat16()
    expert_parallel(layer, mesh, ranks_per_node=per_node)
    own = slice(64 * dist.get_rank(), 64 * (dist.get_rank() + 1))
    x, chosen, weights = (value[own] for value in for_rounding())
    return cast(torch.Tensor, layer[0](x.bfloat16(), chosen, weights)).detach()


def in_bfloat16() -> nn.ModuleList:
    layer = nn.ModuleList([GroupedExperts(16, 32, 16)])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * param.shape[-1] ** -0.5)
    return layer.bfloat16()


def for_rounding() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 32, generator=generator).bfloat16().float()
    scores = torch.rand(256, 16, generator=generator)
    return x, scores.topk(8).indices, scores.topk(8).values


def test_sums_in_nodes_round_little() -> None:
    """What crosses nodes is rounded to bfloat16 once more: errors stay near those of the experts' results."""
    x, chosen, weights = for_rounding()
    right = in_bfloat16().double()[0](x.double(), chosen, weights.double()).detach()
    size = right.square().mean().sqrt()
    plain, once = (
        (torch.cat(sim.run(rounded, 4, args=(per_node,))).double() - right).square().mean().sqrt() / size
        for per_node in (None, 2)
    )
    assert 0 < once < 1.5 * plain < 2**-7
