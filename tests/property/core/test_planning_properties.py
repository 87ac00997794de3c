"""Memory and time of plans, against what is allocated and against what no plan may be worse than.

Memory is watched on one rank at a time: its tensors are real, and its collectives return at once and move nothing.
"""

import contextlib
import math
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from machine_kit import Made, machine
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.machine import find_machine
from hyper_parallel.core.redistribute import plan
from hyper_parallel.core.redistribute.execute import _run, drive
from hyper_parallel.core.redistribute.steps import moves, price
from sim.strategies import layouts, meshes, shapes

pytestmark = pytest.mark.sim

EXECUTE = "hyper_parallel.core.redistribute.execute"
SLOW = machine("slow between", Made(1e-6, 1e-7, 1e9), Made(1e-6, 1e-7, 1e6), 2)


def examples(share):
    """Settings for a share of what hypothesis would try."""
    return settings(max_examples=max(1, round(share * settings.default.max_examples)))


@st.composite
def transitions(draw, max_ranks=12, *, src=False, dst=False, other_mesh=False):
    """Two layouts of a tensor, on one mesh, or on two meshes of partly the same ranks."""
    mesh, shape = draw(meshes(max_ranks, 3)), draw(shapes(0, 3, max_size=13))
    target = mesh
    if other_mesh:
        sizes, first = draw(meshes(max_ranks, 2)).mesh_shape, draw(st.integers(0, len(mesh.rank_list)))
        target = Layout(sizes, ("x", "y")[: len(sizes)], range(first, first + math.prod(sizes)))
    return draw(layouts(mesh, shape, partial=src)), draw(layouts(target, shape, partial=dst)), shape


NAMED = (("laptop-cpu", 2**31), ("h100-sxm", 2), ("ascend-910b", 4))
MACHINES = st.sampled_from([None, SLOW, *(find_machine(name).with_figures(node__devices=n) for name, n in NAMED)])


# -- memory ----------------------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Counts the bytes of all memory that is allocated while it is on, as long as a tensor lies in it."""

    def __init__(self):
        super().__init__()
        self.seen, self.tensors, self.sizes, self.most = WeakIdKeyDictionary(), {}, {}, 0

    @property
    def live(self):
        return sum(self.sizes.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if not torch.is_tensor(made) or made in self.seen:
                continue
            storage = made.untyped_storage()
            key = storage._cdata
            if key in self.sizes or key not in given:
                self.seen[made] = True
                self.sizes[key] = storage.nbytes()
                self.tensors[key] = self.tensors.get(key, 0) + 1
                weakref.finalize(made, self._gone, key)
        self.most = max(self.most, self.live)
        return result

    def _gone(self, key):
        self.tensors[key] -= 1
        if not self.tensors[key]:
            del self.tensors[key], self.sizes[key]


class _Done:
    def wait(self):
        return None


def done(*args, **options):
    """Stand in for a collective."""
    return _Done()


@contextlib.contextmanager
def without_collectives(backend):
    """Let every collective of the executor return at once."""
    names = ("group_of", "all_to_all", "all_gather_single", "reduce_scatter_single")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch(f"{EXECUTE}.{name}", done))
        stack.enter_context(mock.patch.object(dist, "all_reduce", done))
        stack.enter_context(mock.patch.object(dist, "get_backend", return_value=backend))
        yield


def held_beside(steps, rank, backend):
    """Return the most bytes that a rank holds besides its part of the source and of the result."""

    shape, dtype = steps.global_shape, steps.dtype
    here, there = (rank in layout.rank_list for layout in (steps.src, steps.dst))
    local = torch.zeros(steps.src.local_shape(shape, rank) if here else (0,), dtype=dtype)
    with without_collectives(backend), Watch() as watch:
        result = drive(_run(steps, local, rank, None))
    assert result.shape == (steps.dst.local_shape(shape, rank) if there else (0,))
    own = result.numel() * result.element_size()
    return watch.most - own


def check_memory(case, backend, dtype, **options):
    steps = plan(*case, dtype, **options)
    for rank in steps.ranks:
        assert held_beside(steps, rank, backend) <= steps.peak_extra_bytes, f"rank {rank}"
    return steps


BACKENDS = st.sampled_from(["nccl", "gloo"])
DTYPES = st.sampled_from([torch.float32, torch.int8])


@examples(3)
@given(transitions(src=True, dst=True) | transitions(8, src=True, other_mesh=True), MACHINES, BACKENDS, DTYPES)
def test_no_rank_holds_more_than_the_plan_says(case, on, backend, dtype):
    averages = "avg" in {*case[0].partial.values(), *case[1].partial.values()}  # of int8 these are refused
    check_memory(case, backend, torch.float32 if averages else dtype, machine=on)


@pytest.mark.tier("full")
@examples(3)
@given(transitions(src=True) | transitions(8, other_mesh=True), MACHINES, BACKENDS, st.floats(0, 1))
def test_no_rank_holds_more_than_the_limit(case, on, backend, share):
    free = plan(*case, torch.float32, on)
    assume(free.peak_extra_bytes)
    limit = round(share * free.peak_extra_bytes)
    try:
        steps = check_memory(case, backend, torch.float32, machine=on, max_extra_bytes=limit)
    except ValueError as refusal:
        assert f"max_extra_bytes={limit}: even in the smallest rounds" in str(refusal)  # noqa: PT017
    else:
        assert steps.peak_extra_bytes <= limit
        assert steps.recv_bytes.sum() >= 0


def test_the_watch_sees_what_lives():
    with Watch() as watch:
        first = torch.zeros(100)
        del first
        second = torch.zeros(150)
        view = second.view(10, 15)[2:]
        third = view.t().contiguous()
    assert third.shape == (15, 8)
    assert watch.most == 4 * (150 + 120)
    assert watch.live == watch.most
    del second, view
    assert watch.live == 4 * 120


def test_the_plan_of_memory_is_no_guess():
    """8 ranks turn 16 x 8 floats: each packs its 2 x 8, and what arrives, eight pieces of 2 x 1, lies in order."""
    mesh = Layout((8,), ("tp",))
    steps = plan(mesh("tp"), mesh("None", "tp"), (16, 8), torch.float32)
    assert steps.peak_extra_bytes == 64
    assert {held_beside(steps, rank, "nccl") for rank in range(8)} == {64}


# -- rounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.tier("full")
@examples(2)
@given(transitions(src=True), MACHINES, st.floats(0, 1))
def test_rounds_move_the_same_and_take_longer(case, on, share):
    free = plan(*case, torch.float32, on)
    assume(free.peak_extra_bytes)
    try:
        cut = plan(*case, torch.float32, on, max_extra_bytes=round(share * free.peak_extra_bytes))
    except ValueError:
        return
    assert price(cut.steps, on) >= price(free.steps, on)
    for step in cut.steps:
        if step.rounds == 1:
            continue
        for rank in step.ranks:
            full = [sum(moves(step, rank, index).receives) for index in range(step.rounds)]
            assert sum(full) * step.itemsize == step.recv_bytes[list(step.ranks).index(rank)]


# -- nodes -----------------------------------------------------------------------------------------------------------


@examples(3)
@given(st.data())
def test_nodes_of_one_rank_or_of_all_make_no_difference(data):
    """One node has no slow links, and nodes of one rank have no others: with one kind of link, prices are equal.

    Between nodes without hops, of which a tree has fewer than a ring within a node.
    """
    case = data.draw(transitions(src=True))
    ranks = len(case[0].rank_list)
    assume(ranks > 1)
    near, far = Made(2e-6, 1e-7, 1e8), Made(3e-6, 0.0, 1e7)
    all_near = machine("near", near), machine("near", near, far, ranks)
    all_far = machine("far", far), machine("far", near, far, 1)
    for one, other in (all_near, all_far):
        assert plan(*case, torch.float32, one).seconds == pytest.approx(plan(*case, torch.float32, other).seconds)
