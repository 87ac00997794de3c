"""Experts split over ranks compute what they compute on one device: outputs, all gradients, counts and losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sim
from hyper_parallel import DTensor, full_tensor, init_device_mesh
from hyper_parallel.core.expert_parallel import expert_parallel, set_aux_scale, update_expert_bias
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
        experts_per_token=draw(st.integers(1, min(experts, 4))),
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
        config,
        tuple(draw(st.lists(st.integers(0, 3), min_size=dp * ep, max_size=dp * ep))),
        tuple(draw(st.lists(st.integers(0, 4), min_size=split, max_size=split))),
        draw(st.sampled_from(["even", "one"])),
        draw(st.sampled_from([torch.float64, torch.float32])),
        draw(st.integers(0, 2**16)),
    )


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
    expert_parallel(layer, mesh, ep=case.over, etp=case.etp)
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


@settings(max_examples=80, deadline=None)
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
