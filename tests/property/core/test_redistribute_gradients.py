"""Gradients through `redistribute`: those of a single device, whatever the layouts on the way."""

import math
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import sim
from hyper_parallel import from_local, full_tensor, redistribute, to_local
from hyper_parallel.core.dtensor.layout import Layout
from sim.strategies import layouts, meshes, shapes

pytestmark = pytest.mark.sim


class Path(NamedTuple):
    """Where a tensor starts, and where it goes from there, each time at once or in the background."""

    src: Layout
    hops: tuple[tuple[Layout, bool], ...]
    shape: tuple[int, ...]
    seed: int


@st.composite
def paths(draw, max_hops=3, *, last_partial=True):
    mesh, shape = draw(meshes(12, 3)), draw(shapes(0, 3, max_size=8))
    src = draw(layouts(mesh, shape, partial=("sum", "avg")))
    hops = [draw(layouts(mesh, shape, partial=True)) for _ in range(draw(st.integers(0, max_hops - 1)))]
    hops.append(draw(layouts(mesh, shape, partial=last_partial)))
    hops = tuple((layout, draw(st.booleans())) for layout in hops)
    return Path(src, hops, shape, draw(st.integers(0, 2**16)))


def whole_of(shape):
    return (torch.arange(math.prod(shape)).reshape(shape) % 17 - 5).to(torch.float64)


def loss_of(full):
    return (full * full * full).sum() + (full * (whole_of(full.shape) % 7)).sum()


def on_one_device(shape):
    """The gradient of the loss, without any rank."""
    full = whole_of(shape).requires_grad_()
    loss_of(full).backward()
    return full.grad


def wanted(grad, layout, rank):
    """What a rank's part gets of a gradient: its part, the whole for a pending sum, of an average its share."""
    part = sim.scatter_full(grad, layout.reset_partial(), rank)
    sizes = dict(zip(layout.alias_name, layout.mesh_shape, strict=True))
    ways = math.prod(sizes[name] for name, kind in layout.partial.items() if kind == "avg")
    return part / ways


def start(path):
    """This rank's part, a leaf, the DTensor of it, and the mesh."""
    mesh = init_device_mesh("cpu", path.src.mesh_shape, mesh_dim_names=path.src.alias_name)
    part = sim.scatter_full(whole_of(path.shape), path.src, seed=path.seed).requires_grad_()
    return part, from_local(part, path.src.with_mesh(mesh), shape=path.shape), mesh


def follow(x, hops, mesh):
    for layout, in_background in hops:
        x = redistribute(x, layout.with_mesh(mesh), async_op=in_background)
        x = x.wait() if in_background else x
    return x


def run(body, path):
    return sim.run(body, world_size=len(path.src.rank_list), seed=path.seed)


def check(grads, grad, layout):
    for rank, found in enumerate(grads):
        torch.testing.assert_close(found, wanted(grad, layout, rank), rtol=1e-12, atol=1e-12)


@given(paths())
def test_the_gradient_of_the_whole_is_that_of_one_device(path):
    def on_rank():
        part, x, mesh = start(path)
        full = full_tensor(follow(x, path.hops, mesh), grad_layout=())
        torch.testing.assert_close(full, whole_of(path.shape), rtol=1e-12, atol=1e-12)
        loss_of(full).backward()
        return part.grad

    check(run(on_rank, path), on_one_device(path.shape), path.src)


@given(paths(last_partial=False), st.data())
def test_gradients_of_parts_are_put_together(path, data):
    """The gradient comes in as parts, and over some axes that do not split the tensor as copies to be added."""
    dst, _ = path.hops[-1]
    used = {dst.alias_name[axis] for chain in dst.splits(len(path.shape)) for axis in chain}
    loose = [name for name in dst.alias_name if name not in used]
    added = data.draw(st.sets(st.sampled_from(loose)) if loose else st.just(set()), label="axes to add over")
    comes_in = dst(*dst.alias_placements, partial={name: "sum" for name in loose if name in added})
    grad = whole_of(path.shape) % 11 - 4

    def on_rank():
        part, x, mesh = start(path)
        y = to_local(follow(x, path.hops, mesh), grad_layout=comes_in.with_mesh(mesh))
        y.backward(sim.scatter_full(grad, comes_in, seed=path.seed))
        return part.grad

    check(run(on_rank, path), grad, path.src)


@given(paths(1))
def test_a_double_round_trip_leaves_values_and_gradients_alone(path):
    (dst, in_background), back = path.hops[0], path.src.reset_partial()
    way = [(layout, in_background) for layout in (dst, back, dst, back)]

    def on_rank():
        part, x, mesh = start(path)
        x = redistribute(x, back.with_mesh(mesh))
        y = follow(x, way, mesh)
        assert torch.equal(to_local(y).detach(), to_local(x).detach())
        for full in (full_tensor(x, grad_layout=()), full_tensor(y, grad_layout=())):
            loss_of(full).backward()
            grads.setdefault(dist.get_rank(), []).append(part.grad)
            part.grad = None

    grads = {}
    run(on_rank, path)
    for short, turned in grads.values():
        assert torch.equal(short, turned)
    check([turned for _, (_, turned) in sorted(grads.items())], on_one_device(path.shape), path.src)


def test_the_check_can_fail():
    src = Layout((2,), ("tp",))("tp")
    grad = on_one_device((4,))
    check([grad[:2], grad[2:]], grad, src)
    for wrong in ([grad[:2], grad[:2]], [grad[:2], 2 * grad[2:]]):
        with pytest.raises(AssertionError):
            check(wrong, grad, src)
    with pytest.raises(AssertionError):
        check([grad, grad], grad, Layout((2,), ("tp",))(partial={"tp": "avg"}))
