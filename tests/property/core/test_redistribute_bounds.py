"""Costs of plans, against counts of single elements and against the obvious plans; nothing is executed here."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.machine import find_machine
from hyper_parallel.core.redistribute import lower_bound, plan
from hyper_parallel.core.redistribute.builder import Builder
from hyper_parallel.core.redistribute.candidates import axis_by_axis
from hyper_parallel.core.redistribute.holdings import Holding
from hyper_parallel.core.redistribute.transition import on_one_mesh, read
from sim.strategies import layouts, meshes, shapes

pytestmark = pytest.mark.sim

LINEAR = {"sum", "avg"}
NAMED = ("h100-sxm", "a100-80gb", "ascend-910b", "laptop-cpu")


def examples(share):
    """Settings for a share of what hypothesis would try."""
    return settings(max_examples=max(1, round(share * settings.default.max_examples)))


@st.composite
def transitions(draw, *, src=False, dst=False, max_ranks=64, scale=1):
    """Two layouts on one mesh, of a tensor whose sizes are multiples of `scale`."""
    mesh = draw(meshes(max_ranks, 4))
    shape = tuple(scale * size for size in draw(shapes(0, 3, max_size=13)))
    return draw(layouts(mesh, shape, partial=src)), draw(layouts(mesh, shape, partial=dst)), shape


# -- counting single elements ----------------------------------------------------------------------------------------


def masks(layout, shape):
    """Per rank, which elements it holds."""
    found = {}
    for rank, box in zip(layout.rank_list, layout.slices(shape).tolist(), strict=True):
        found[rank] = np.zeros(shape, dtype=bool)
        found[rank][tuple(slice(*ends) for ends in box)] = True
    return found


def roles(src, dst):
    """The axes whose copies are reduced, stay as they are, and are made; those of one rank have none."""
    real = [name for name, size in zip(src.alias_name, src.mesh_shape, strict=True) if size > 1]
    pairs = {name: (src.partial.get(name), dst.partial.get(name)) for name in real}
    keeps = {n for n, (old, new) in pairs.items() if old and (old == new or {old, new} <= LINEAR)}
    reduces = {n for n, (old, _) in pairs.items() if old} - keeps
    return reduces, keeps, {n for n, (_, new) in pairs.items() if new} - keeps


def grouped(layout, names, ranks):
    """Sets of those ranks that differ in their coordinates on these axes only."""
    others = [place for place, name in enumerate(layout.alias_name) if name not in names]
    where = dict(zip(layout.rank_list, itertools.product(*map(range, layout.mesh_shape)), strict=True))
    found = {}
    for rank in ranks:
        found.setdefault(tuple(where[rank][place] for place in others), []).append(rank)
    return list(found.values())


def transfers(src, dst, shape):
    """The least transfers of elements there are, all ranks together: every element counted for itself.

    Of an element there are `copies` to reduce, and each of `wanted` ranks, or sets of ranks that are to make pending
    copies of it, needs it. Where there are copies it can be reduced at one of those who need it if any of them has one.
    """
    reduces, keeps, opens = roles(src, dst)
    have, need = masks(src, shape), masks(dst, shape)
    copies = math.prod(size for name, size in zip(src.alias_name, src.mesh_shape, strict=True) if name in reduces)
    total = 0
    for apart in grouped(src, set(src.alias_name) - keeps, src.rank_list):  # ranks with one coordinate on kept axes
        wanted, served = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for makers in grouped(src, opens, apart):
            wanted += need[makers[0]]
            served += need[makers[0]] & np.any([have[rank] for rank in makers], axis=0)
        total += int((wanted - served if copies == 1 else copies - 1 + wanted - (served > 0)).sum())
    return total


def missing(src, dst, shape):
    """Per rank the number of elements that it needs and does not hold."""
    have, need = masks(src, shape), masks(dst, shape)
    empty = np.zeros(shape, dtype=bool)
    return [int((need.get(r, empty) & ~have.get(r, empty)).sum()) for r in sorted({*src.rank_list, *dst.rank_list})]


@examples(2)
@given(transitions(), st.sampled_from([torch.float32, torch.int8]))
def test_plain_layouts_move_what_is_missing_and_nothing_else(case, dtype):
    wanted = [count * dtype.itemsize for count in missing(*case)]
    steps = plan(*case, dtype)
    assert steps.recv_bytes.tolist() == wanted
    assert lower_bound(*case, dtype).tolist() == wanted
    assert steps.send_bytes.sum() == sum(wanted)
    assert steps.num_collectives == (sum(wanted) > 0)


@examples(1)
@given(transitions(max_ranks=12), st.data())
def test_plain_layouts_of_two_meshes_move_what_is_missing_and_nothing_else(case, data):
    src, _, shape = case
    mesh = data.draw(meshes(12, 3), label="mesh")
    first = data.draw(st.integers(0, len(src.rank_list)), label="first rank")
    ranks = data.draw(st.permutations(range(first, first + len(mesh.rank_list))), label="ranks")
    dst = data.draw(layouts(Layout(mesh.mesh_shape, mesh.alias_name, ranks), shape), label="dst")
    wanted = [4 * count for count in missing(src, dst, shape)]
    steps = plan(src, dst, shape, torch.float32)
    order = np.argsort(steps.ranks)
    assert steps.recv_bytes[order].tolist() == wanted
    assert lower_bound(src, dst, shape, torch.float32)[order].tolist() == wanted


@examples(2)
@given(transitions(src=True))
def test_copies_are_reduced_with_the_fewest_transfers(case):
    least = 4 * transfers(*case)
    assert plan(*case, torch.float32).recv_bytes.sum() == least
    assert lower_bound(*case, torch.float32).sum() == pytest.approx(least)


@examples(1)
@given(transitions(src=True, dst=True))
def test_copies_are_made_with_few_transfers(case):
    src, dst, _ = case
    least = 4 * transfers(*case)
    steps = plan(*case, torch.float32)
    assert lower_bound(*case, torch.float32).sum() == pytest.approx(least)
    assert steps.recv_bytes.sum() >= least
    reduces, _, opens = roles(src, dst)
    if not (reduces and opens):
        assert steps.recv_bytes.sum() == least


CUT = Layout((1, 1, 4, 4), ("dp", "tp", "cp", "pp"))


# -- never worse than the obvious plans ------------------------------------------------------------------------------


def twin_of(twin, case, on):
    task = on_one_mesh(read("cannot plan", *case, torch.float32))
    return twin(task, Builder(task, on))


def gather_everything(task, builder):
    """Return the steps that give every rank the full tensor, reduced, and then slice: the brute-force twin."""
    replicated = Holding(task.sizes, task.shape, ((),) * len(task.shape))
    steps = [builder.all_reduce(task.source, task.reduces)] if task.reduces else []
    axes = tuple(axis for axis in task.live if axis in task.split_axes)
    gather = builder.exchange(task.source, replicated, axes) if axes else None
    return [*steps, *([gather] if gather is not None else []), *builder.local(replicated, task.target)]


def received(steps):
    return sum(int(step.recv_bytes.sum()) for step in steps)


@examples(1)
@given(transitions(src=True, dst=True))
def test_never_more_bytes_than_the_obvious_plans(case):
    steps = plan(*case, torch.float32)
    assert steps.recv_bytes.sum() <= received(twin_of(axis_by_axis, case, None))
    assert steps.recv_bytes.sum() <= received(twin_of(gather_everything, case, None))


@examples(2)
@given(
    st.sampled_from([1, 64, 1000]).flatmap(lambda scale: transitions(src=True, dst=True, scale=scale)),
    st.sampled_from(NAMED),
    st.sampled_from([1, 2, 4, 8]),
)
@example((CUT("cp", partial={"pp": "sum"}), CUT("None", partial={"pp": "max"}), (64,)), NAMED[0], 2)  # pp on 2 nodes
def test_never_more_time_than_axis_by_axis(case, name, per_node):
    on = find_machine(name).with_figures(node__devices=per_node)
    steps = plan(*case, torch.float32, on)
    closing = steps.steps[-1].seconds if steps.steps and steps.steps[-1].kind == "copy" else 0.0
    assert steps.seconds - closing <= sum(step.seconds for step in twin_of(axis_by_axis, case, on)) * (1 + 1e-9)


# -- balance ---------------------------------------------------------------------------------------------------------


@examples(1)
@given(st.data())
def test_nobody_sends_more_than_its_share(data):
    """Where each piece that moves divides evenly among its owners no rank sends more than the busiest one receives."""
    mesh = data.draw(meshes(16, 4, min_size=2), label="mesh")
    ranks = len(mesh.rank_list)
    shape = tuple(ranks**2 * factor for factor in data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    src, dst = (data.draw(layouts(mesh, shape, even=True), label=label) for label in ("src", "dst"))
    steps = plan(src, dst, shape, torch.float32)
    assume(steps.recv_bytes.any())
    assert steps.send_bytes.max() <= steps.recv_bytes.max()


# -- the checks themselves -------------------------------------------------------------------------------------------


def test_the_counts_are_those_of_examples_by_hand():
    mesh = Layout((2, 2), ("dp", "tp"))
    assert missing(mesh("dp"), mesh("tp"), (8,)) == [0, 4, 4, 0]
    assert transfers(mesh("dp"), mesh("tp"), (8,)) == 8
    assert transfers(mesh(partial={"dp": "sum"}), mesh(), (8,)) == 8 * (1 + 4 - 1)
    assert transfers(mesh("tp", partial={"dp": "sum"}), mesh("tp", "dp"), (8, 2)) == 16 * (1 + 1 - 1)
    assert transfers(mesh("dp", partial={"tp": "sum"}), mesh("dp", partial={"tp": "avg"}), (8,)) == 0
    assert transfers(mesh("dp"), mesh(partial={"dp": "sum"}), (8,)) == 0
    assert transfers(mesh("dp"), mesh(partial={"tp": "sum"}), (8,)) == 8
