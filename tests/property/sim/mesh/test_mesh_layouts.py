"""Redistributions on a rank that lives alone, without values: shapes, layouts and communication of the real world.

Most examples are compared on all ranks of up to 16.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_kit import COMPARED, alone, assert_same, compare, describe, facts, in_real_numbers
from torch.distributed.device_mesh import init_device_mesh

from hyper_parallel import from_local, full_tensor, redistribute, to_local
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.machine.description import one_node
from hyper_parallel.core.redistribute import execute, plan
from sim.mesh.tracing.lone import LoneWorld
from sim.strategies import layouts, meshes, shapes

pytestmark = pytest.mark.sim

many = settings(max_examples=settings.default.max_examples // 2)

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class Path(NamedTuple):
    """Where a tensor starts, and where it goes from there, each time at once or in the background."""

    src: Layout
    hops: tuple[tuple[Layout, bool], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


@st.composite
def paths(draw, max_ranks=16, max_hops=2):
    mesh, shape = draw(meshes(max_ranks, 4)), draw(shapes(0, 3, max_size=13))
    src = draw(layouts(mesh, shape, partial=("sum", "avg")))
    hops = [draw(layouts(mesh, shape, partial=True)) for _ in range(draw(st.integers(1, max_hops)))]
    return Path(src, tuple((hop, draw(st.booleans())) for hop in hops), shape, draw(st.sampled_from(DTYPES)))


def part_of(path):
    """What a rank has at first: values do not matter here, and for fake tensors there are none."""
    where = path.src.local_slice(path.shape, dist.get_rank())
    return torch.ones(torch.empty(path.shape, dtype=path.dtype, device="meta")[where].shape, dtype=path.dtype)


def follow(path):
    """A body that takes a tensor along a path, and its gradient back."""

    def body(mode):
        mesh = init_device_mesh("cpu", path.src.mesh_shape, mesh_dim_names=path.src.alias_name)
        with mode():
            part = part_of(path).requires_grad_()
            x = from_local(part, path.src.with_mesh(mesh), shape=path.shape)
            seen = [describe(x)]
            for hop, in_background in path.hops:
                x = redistribute(x, hop.with_mesh(mesh), async_op=in_background)
                x = x.wait() if in_background else x
                seen.append(describe(x))
            whole = full_tensor(x, grad_layout=())
            whole.sum().backward()
            return [*seen, describe(whole), describe(part.grad)]

    return body


@pytest.mark.tier("full")
@many
@given(paths())
def test_a_path_and_its_gradient_are_those_of_the_real_world(path):
    compare(follow(path), len(path.src.rank_list))


@st.composite
def crossings(draw):
    """A tensor, its layout, and one on a mesh of other ranks, other axes, or both."""
    mesh, shape = draw(meshes(8, 3)), draw(shapes(1, 3, max_size=9))
    other = draw(meshes(8, 2))
    first = draw(st.integers(0, len(mesh.rank_list)))
    ranks = range(first, first + math.prod(other.mesh_shape))
    other = Layout(other.mesh_shape, other.alias_name, draw(st.permutations(ranks)))
    return draw(layouts(mesh, shape, partial=True)), draw(layouts(other, shape)), shape


@many
@given(crossings())
def test_a_plan_to_other_ranks_is_carried_out_as_in_the_real_world(crossing):
    src, dst, shape = crossing
    steps = plan(src, dst, shape, torch.float32)

    def body(mode):
        rank = dist.get_rank()
        if rank not in steps.ranks:
            return None
        with mode():
            part = None
            if rank in src.rank_list:
                part = torch.ones(torch.empty(shape, device="meta")[src.local_slice(shape, rank)].shape)
            return describe(execute(steps, part))

    compare(body, max(steps.ranks) + 1)


@settings(many, max_examples=many.max_examples // 2)
@given(paths(max_ranks=12, max_hops=1), st.sampled_from([None, 64, 4096]))
def test_a_limit_of_memory_makes_the_same_steps(path, limit):
    """What `max_extra_bytes` does to a plan does not depend on values."""

    def body(mode):
        mesh = init_device_mesh("cpu", path.src.mesh_shape, mesh_dim_names=path.src.alias_name)
        with mode(), torch.no_grad():
            x = from_local(part_of(path), path.src.with_mesh(mesh), shape=path.shape)
            try:
                return describe(redistribute(x, path.hops[0][0].with_mesh(mesh), max_extra_bytes=limit))
            except ValueError as error:
                return str(error)

    compare(body, len(path.src.rank_list))


@settings(many, max_examples=many.max_examples // 2)
@given(meshes(16, 3), st.data())
def test_parts_whose_shapes_are_agreed_on_are_alike_in_both(mesh, data):
    """Without `shape`, ranks tell each other their parts' shapes; where parts are even, those are what one has."""
    sizes = tuple(math.prod(mesh.mesh_shape) * factor for factor in data.draw(st.tuples(*[st.integers(1, 3)] * 2)))
    layout = data.draw(layouts(mesh, sizes, even=True))

    def body(mode):
        real = init_device_mesh("cpu", mesh.mesh_shape, mesh_dim_names=mesh.alias_name)
        with mode():
            part = torch.ones(torch.empty(sizes, device="meta")[layout.local_slice(sizes, dist.get_rank())].shape)
            x = from_local(part, layout.with_mesh(real))
            assert tuple(x.shape) == sizes
            return describe(x), describe(to_local(x))

    compare(body, len(mesh.rank_list))


# -- the comparison notices ------------------------------------------------------------------------------------------

FIXED = Layout((2, 2), ("dp", "tp"))
THERE = Path(FIXED("dp", "tp"), ((FIXED(("tp", "dp"), None), False), (FIXED(None, "dp"), False)), (6, 4), torch.float32)


def both(rank=1):
    return in_real_numbers(follow(THERE), 4)[rank], alone(follow(THERE), 4, rank)


def test_what_is_compared_is_the_same_before_a_fault_is_put_in():
    assert_same(*both())


@pytest.mark.parametrize("number", [0, 1, -1])
def test_an_event_left_out_is_noticed(number):
    real, fake = both()
    del fake.events[number]
    with pytest.raises(AssertionError, match=r"left out alone|event \d+, "):
        assert_same(real, fake)


def test_an_event_too_much_is_noticed():
    real, fake = both()
    with pytest.raises(AssertionError, match="1 events too much alone"):
        assert_same(real, fake._replace(events=[*fake.events, fake.events[-1]]))


def test_another_order_is_noticed():
    real, fake = both()
    assert len(fake.events) > 1
    with pytest.raises(AssertionError, match="event 0, "):
        assert_same(real, fake._replace(events=fake.events[::-1]))


OTHER = {
    "rank": 0,
    "op": "broadcast",
    "axis": "pp",
    "group": (0, 1, 2),
    "members": (1, 2),
    "seq": 17,
    "dtype": "int8",
    "reduce_op": "PREMUL_SUM",
    "root": 3,
    "peer": 3,
    "input_shapes": ((1, 2, 3),),
    "output_shapes": ((1, 2, 3),),
    "send_bytes": -1,
    "recv_bytes": -1,
}


@pytest.mark.parametrize("field", COMPARED)
def test_every_other_fact_is_noticed(field):
    real, fake = both()
    changed = fake.events[0]._replace(**{field: OTHER[field]})
    assert facts(changed) != facts(fake.events[0])
    with pytest.raises(AssertionError, match=f"{field}: "):
        assert_same(real, fake._replace(events=[changed, *fake.events[1:]]))


def test_another_result_is_noticed():
    real, fake = both()
    with pytest.raises(AssertionError):
        assert_same(real, fake._replace(result=[*fake.result[:-1], ()]))


def test_a_rank_that_communicates_more_than_the_others_is_noticed():
    def body(mode):
        with mode():
            x = torch.ones(4)
            if isinstance(x, torch._subclasses.FakeTensor):
                dist.all_reduce(x)
            dist.all_reduce(x)
            return describe(x)

    with pytest.raises(AssertionError, match="1 events too much alone: all_reduce #1 of group 'world'"):
        compare(body, 2)


# -- beyond what a real world can do ---------------------------------------------------------------------------------


@settings(many, max_examples=max(many.max_examples // 8, 1))
@given(st.data())
def test_a_large_world_sends_what_its_plan_says(data):
    """Of 4,096 ranks, one is asked; the plan counts what each receives by index arithmetic."""
    sizes = data.draw(st.permutations([2, 8, 16, 16]))
    mesh, shape = Layout(tuple(sizes), ("dp", "cp", "ep", "tp")), (8192, 512)
    src, dst = (data.draw(layouts(mesh, shape, ordered=False)) for _ in range(2))
    rank = data.draw(st.integers(0, 4095))

    def body(mode):
        real = init_device_mesh("cpu", mesh.mesh_shape, mesh_dim_names=mesh.alias_name)
        with mode(), torch.no_grad():
            part = torch.empty(torch.empty(shape, device="meta")[src.local_slice(shape, rank)].shape)
            x = from_local(part, src.with_mesh(real), shape=shape)
            return tuple(redistribute(x, dst.with_mesh(real)).to_local().shape)

    seen = alone(body, 4096, rank)
    assert seen.result == tuple(torch.empty(shape, device="meta")[dst.local_slice(shape, rank)].shape)
    steps = plan(src, dst, shape, torch.float32, one_node())
    assert sum(event.recv_bytes for event in seen.events) == steps.recv_bytes[rank]
    assert all(event.rank == rank and rank in event.group for event in seen.events)
    assert all(one.order < other.order for one, other in itertools.pairwise(seen.events))


def test_no_rank_but_the_living_one_has_events():
    with LoneWorld(1000, 7) as world:
        world.run_alone(dist.barrier)
        assert [event.op for event in world.trace.of_rank(7)] == ["barrier"]
        assert world.trace.of_rank(8) == []
        with pytest.raises(ValueError, match="rank must be from 0 to 999"):
            world.trace.of_rank(1000)
