"""The twin of torch's planner beside torch: byte for byte, rank by rank, collective by collective."""

import itertools
import math
import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import sim
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.redistribute.bounds import COLLECTIVES, torch_plan
from sim.strategies import layouts, meshes, shapes

pytestmark = pytest.mark.sim


def redistribute(world, pairs, shape):
    """Let torch redistribute on every rank; return per pair and rank the bytes received and the collectives."""

    def on_rank():
        rank, (first, _) = dist.get_rank(), pairs[0]
        mesh = init_device_mesh("cpu", first.mesh_shape, mesh_dim_names=first.alias_name)
        full = torch.empty(shape, device="meta")
        seen = []
        for src, dst in pairs:
            source, target = (layout.placement_to_tensor_map(len(shape)).placements for layout in (src, dst))
            local = torch.zeros(src.local_shape(shape, rank))
            x = DTensor.from_local(local, mesh, source, shape=full.shape, stride=full.stride())
            known = len(world.trace.of_rank(rank))
            y = x.redistribute(mesh, target)
            assert tuple(y.to_local().shape) == dst.local_shape(shape, rank)
            seen.append(world.trace.of_rank(rank)[known:])
        return seen

    by_rank = world.run(on_rank)
    return [[events[index] for events in by_rank] for index in range(len(pairs))]


def check(pairs, shape):
    """Compare the twin's steps with what torch does in a simulated world, for the pairs that torch takes."""
    plans = [(pair, torch_plan(*pair, shape, torch.float32, device_type="cpu")) for pair in pairs]
    taken = [(pair, plan) for pair, plan in plans if plan.refused is None]
    if not taken:
        return 0
    with sim.world(math.prod(pairs[0][0].mesh_shape)) as world:
        seen = redistribute(world, [pair for pair, _ in taken], shape)
    for (pair, plan), events in zip(taken, seen, strict=True):
        wanted = [step for step in plan.steps if step.kind in COLLECTIVES]
        for position, mine in enumerate(events):
            said = [(step.kind, step.axis, step.recv_bytes[position], step.send_bytes[position]) for step in wanted]
            assert [(event.op, event.axis, event.recv_bytes, event.send_bytes) for event in mine] == said, pair
    return len(taken)


def every_layout(mesh, dims, *, partial):
    """All layouts in mesh order: each axis replicated, pending, or splitting one of the dims."""
    for roles in itertools.product(["none", *["sum"] * partial, *range(dims)], repeat=len(mesh.mesh_shape)):
        axes = list(zip(mesh.alias_name, roles, strict=True))
        entries = [tuple(name for name, role in axes if role == dim) or None for dim in range(dims)]
        yield mesh(*entries, partial={name: role for name, role in axes if role == "sum"})


@pytest.mark.tier("test", each=3)
@pytest.mark.parametrize("shape", [(8, 16), (5, 3)], ids=["even", "uneven"])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (2, 2, 2)], ids=str)
def test_plain_layouts_of_a_matrix(sizes, shape):
    mesh = Layout(sizes, ("dp", "cp", "tp")[: len(sizes)])
    pairs = [*itertools.product(every_layout(mesh, 2, partial=True), every_layout(mesh, 2, partial=False))]
    chosen = random.Random(0).sample(pairs, 144)
    assert check(chosen, shape) == 144


@given(st.data())
def test_any_layouts(data):
    mesh = data.draw(meshes(max_ranks=12, max_axes=3), label="mesh")
    shape = data.draw(shapes(0, 3, max_size=13), label="shape")
    src = layouts(mesh, shape, partial=("sum", "avg", "max", "min", "prod"))
    check([(data.draw(src, label="src"), data.draw(layouts(mesh, shape), label="dst"))], shape)


@given(st.data())
def test_pending_reductions_that_stay(data):
    mesh = data.draw(meshes(max_ranks=8, max_axes=3, min_axes=2, min_size=2), label="mesh")
    shape = data.draw(shapes(1, 2, max_size=8), label="shape")
    src, dst = (data.draw(layouts(mesh, shape, partial=("sum",)), label=label) for label in ("src", "dst"))
    kept = {name: kind for name, kind in dst.partial.items() if name in src.partial}
    check([(src, dst.reset_partial()(*dst.alias_placements, partial=kept))], shape)


def test_asking_within_a_rank_changes_nothing_for_it():
    """torch keeps planners by mesh for the whole process; the twin asks as rank 0 of a mesh of its own."""
    mesh = Layout((2, 2), ("dp", "tp"))
    src, dst, shape = mesh(("tp", "dp")), mesh(("dp", "tp")), (8,)

    def on_rank():
        asked = torch_plan(src, dst, shape, torch.float32)
        device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        local = torch.arange(8.0)[src.local_slice(shape)]
        x = DTensor.from_local(local, device_mesh, src.placements)
        y = x.redistribute(placements=dst.placements).to_local()
        assert torch.equal(y, torch.arange(8.0)[dst.local_slice(shape)])
        return [(step.kind, step.axis, *step.recv_bytes) for step in asked.steps]

    outside = [(step.kind, step.axis, *step.recv_bytes) for step in torch_plan(src, dst, shape, torch.float32).steps]
    assert sim.run(on_rank, world_size=4) == [outside] * 4


def test_the_comparison_can_fail(monkeypatch):
    mesh = Layout((2,), ("tp",))
    pair = (mesh("tp"), mesh())
    assert check([pair], (4,)) == 1
    plan = torch_plan(*pair, (8,), torch.float32, device_type="cpu")
    monkeypatch.setitem(globals(), "torch_plan", lambda *_, **__: plan)
    with pytest.raises(AssertionError):
        check([pair], (4,))
