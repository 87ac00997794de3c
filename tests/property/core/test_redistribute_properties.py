"""Plans executed on simulated ranks: right values, the bytes that were predicted, back again, and as torch does it.

Costs are in `test_redistribute_bounds`, gradients in `test_redistribute_gradients`.
"""

import dataclasses
import json
import math
import re
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from machine_kit import Made, machine
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import sim
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.machine import find_machine
from hyper_parallel.core.redistribute import Plan, execute, plan
from hyper_parallel.core.redistribute.bounds import torch_plan
from hyper_parallel.core.redistribute.plan import _cached
from sim.strategies import AXIS_NAMES, layouts, meshes, shapes

pytestmark = pytest.mark.sim


def examples(share):
    """Settings for a share of what hypothesis would try."""
    return settings(max_examples=max(1, round(share * settings.default.max_examples)))


# -- cases -----------------------------------------------------------------------------------------------------------

DTYPES = {
    None: (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64),
    "sum": (torch.float32, torch.bfloat16, torch.int64, torch.complex64),
    "avg": (torch.float32, torch.int64),
    "max": (torch.float32, torch.bfloat16, torch.int64),
    "min": (torch.float32, torch.bfloat16, torch.int64),
    "prod": (torch.float32, torch.bfloat16, torch.int64),
}
SLOW_BETWEEN = Made(1e-9, 0.0, 1e6)  # so slow, and so soon, that tensors of a few bytes are worth many steps
SLOW = [machine("slow", Made(1e-9, 0.0, 1e9), SLOW_BETWEEN, per_node) for per_node in (2, 4)]


class Case(NamedTuple):
    """A transition, and what draws the copies and the interleaving of the ranks."""

    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int


def kind_of(layout):
    return next(iter(layout.partial.values()), None)


@st.composite
def cases(draw, max_ranks=16, *, src=False, dst=False, other_mesh=False):
    """A case; `src` and `dst` say whether reductions may be pending there."""
    mesh, shape = draw(meshes(max_ranks, 4)), draw(shapes(0, 3, max_size=13))
    target = draw(other_meshes(mesh)) if other_mesh else mesh
    before, after = draw(layouts(mesh, shape, partial=src)), draw(layouts(target, shape, partial=dst))
    fitting = [dtype for dtype in DTYPES[kind_of(before)] if dtype in DTYPES[kind_of(after)]]
    if kind_of(before) == "avg" and kind_of(after):  # what stays pending cannot be rounded to whole numbers
        fitting.remove(torch.int64)
    return Case(before, after, shape, draw(st.sampled_from(fitting)), draw(st.integers(0, 2**16)))


@st.composite
def other_meshes(draw, mesh):
    """A mesh of other axes, or of other ranks: the same ones, some of them, more, others, in any order."""
    count = len(mesh.rank_list)
    if draw(st.booleans()):
        sizes = draw(factors(count))
        ranks = mesh.rank_list
    else:
        sizes = draw(meshes(16, 3)).mesh_shape
        first = draw(st.integers(0, count))  # 0: from the same rank on; count: only other ranks
        ranks = range(first, first + math.prod(sizes))
    order = draw(st.booleans())
    return Layout(sizes, AXIS_NAMES[: len(sizes)], draw(st.permutations(ranks)) if order else ranks)


@st.composite
def factors(draw, number):
    """Sizes of axes that are so many ranks together."""
    sizes = []
    while number > 1 and len(sizes) < 3:
        sizes.append(draw(st.sampled_from([size for size in range(1, number + 1) if number % size == 0])))
        number //= sizes[-1]
    return (*sizes, number)


def whole_of(case):
    """Elements that tell places apart, and that are small enough to be added up exactly."""
    index = torch.arange(math.prod(case.shape)).reshape(case.shape)
    if case.dtype == torch.bool:
        return index * 5 % 3 == 0
    if case.dtype == torch.bfloat16 and (case.src.partial or case.dst.partial):
        return (index % 4 - 1).to(case.dtype)
    if case.dtype == torch.complex64:
        return torch.complex(index % 251 - 9.0, 5.0 - index % 7)
    return (index % 251 - 9).to(case.dtype) + (2**54 if case.dtype == torch.int64 else 0)


# -- carrying out ----------------------------------------------------------------------------------------------------


def parts_of(case, full):
    """What every rank holds at the start; of half of the cases not contiguous in memory."""
    parts = {rank: sim.scatter_full(full, case.src, rank, seed=case.seed) for rank in case.src.rank_list}
    if case.seed % 2 and len(case.shape) > 1:
        return {rank: part.transpose(0, -1).contiguous().transpose(0, -1) for rank, part in parts.items()}
    return parts


def carry_out(steps, parts, seed):
    """Execute plans, one after the other, on all ranks; return per plan what each rank got, and the trace."""

    def on_rank():
        rank, results = dist.get_rank(), []
        part = parts.get(rank)
        for step in steps:
            if rank not in step.ranks:
                results.append(None)
                continue
            before = None if part is None else part.clone()
            result = execute(step, part)
            assert part is None or torch.equal(part, before), "the source changed"
            results.append(result.clone())
            part = result
        return results

    with sim.world(max(rank for step in steps for rank in step.ranks) + 1, seed=seed) as world:
        by_rank = world.run(on_rank)
        return [dict(enumerate(results)) for results in zip(*by_rank, strict=True)], world.trace


def check_values(case, full, found):
    """Compare what the ranks hold with slices of the full tensor."""
    for rank, part in found.items():
        if part is not None and rank not in case.dst.rank_list:
            assert part.shape == (0,), f"rank {rank}"
    whole = sim.gather_full(found, case.dst, case.shape)
    if kind_of(case.src) == "avg" and case.dtype == torch.float32:  # divided by numbers such as 3
        torch.testing.assert_close(whole, full)
    else:
        assert torch.equal(whole, full)


def check_trace(steps, trace):
    """Compare the bytes that went over the wires with those of a plan."""
    events = [trace.of_rank(rank) for rank in steps.ranks]
    assert [sum(event.recv_bytes for event in own) for own in events] == steps.recv_bytes.tolist()
    assert [sum(event.send_bytes for event in own) for own in events] == steps.send_bytes.tolist()
    assert max(map(len, events)) == steps.num_collectives


def check(case, **options):
    """Plan, execute, compare values and bytes; return the plan."""
    full = whole_of(case)
    steps = plan(case.src, case.dst, case.shape, case.dtype, **options)
    (found,), trace = carry_out([steps], parts_of(case, full), case.seed)
    check_values(case, full, found)
    check_trace(steps, trace)
    return steps


@examples(3)
@given(cases())
def test_plain_layouts(case):
    check(case)


@pytest.mark.tier("full")
@examples(3)
@given(cases(src=True))
def test_copies_are_reduced(case):
    check(case)


@examples(2)
@given(cases(src=True, dst=True))
def test_copies_are_made(case):
    check(case)


@examples(1)
@given(cases(64, src=True, dst=True))
def test_many_ranks(case):
    check(case)


@pytest.mark.tier("full")
@examples(2)
@given(cases(12, src=True, dst=True, other_mesh=True))
def test_two_meshes(case):
    check(case)


@st.composite
def machines(draw):
    name = draw(st.sampled_from(["h100-sxm", "a100-80gb", "ascend-910b", "laptop-cpu", "slow", None]))
    if name == "slow":
        return draw(st.sampled_from(SLOW))
    return name and find_machine(name).with_figures(node__devices=draw(st.sampled_from([1, 2, 4, 8])))


@examples(2)
@given(cases(src=True, dst=True), machines())
def test_plans_that_save_time(case, on):
    check(case, machine=on)


@examples(1)
@given(cases(12, src=True, other_mesh=True), machines())
def test_plans_between_meshes_that_save_time(case, on):
    check(case, machine=on)


@examples(1)
@given(cases(other_mesh=False) | cases(12, other_mesh=True))
def test_there_and_back(case):
    there = plan(case.src, case.dst, case.shape, case.dtype)
    back = plan(case.dst, case.src, case.shape, case.dtype)
    parts = parts_of(case, whole_of(case))
    (_, found), _ = carry_out([there, back], parts, case.seed)
    for rank, part in parts.items():
        assert torch.equal(found[rank], part), f"rank {rank}"


# -- bounded memory --------------------------------------------------------------------------------------------------


def least_of(case, limit):
    """The least limit that a refusal names, None if the limit can be met."""
    try:
        plan(case.src, case.dst, case.shape, case.dtype, max_extra_bytes=limit)
    except ValueError as error:
        refusal = str(error)
    else:
        return None
    assert f"cannot redistribute within max_extra_bytes={limit}: " in refusal
    return int(re.search(r"try: max_extra_bytes=(\d+)$", refusal)[1])


@pytest.mark.tier("full")
@examples(1.5)
@given(cases(12, src=True, dst=True) | cases(8, src=True, other_mesh=True), st.floats(0, 1))
def test_a_limit_of_memory_is_kept(case, share):
    most = plan(case.src, case.dst, case.shape, case.dtype).peak_extra_bytes
    assume(most)
    limit = round(share * most)
    least = least_of(case, limit)
    if least is not None:
        assert limit < least <= most
        assert least_of(case, least - 1) == least
        limit = least
    assert check(case, max_extra_bytes=limit).peak_extra_bytes <= limit


# -- one plan on all ranks -------------------------------------------------------------------------------------------


def written_out(steps):
    """Everything that a rank does by a plan, as plain values."""
    rows = []
    for step in steps.steps:
        fields = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
        fields["known_send_bytes"] = step.send_bytes
        rows.append({name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in fields.items()})
    _, *table = str(steps).splitlines()  # the title says where axes of one rank are, which makes no difference
    return table, steps.src, steps.dst, tuple(steps.ranks), rows


@examples(1)
@given(cases(8, src=True, dst=True) | cases(6, src=True, other_mesh=True), cases(8), machines() | st.none())
def test_every_rank_picks_the_same_plan(case, other, on):
    parts, full = parts_of(case, whole_of(case)), whole_of(case)

    def on_rank():
        rank = dist.get_rank()
        if rank % 3 == 1:
            _cached.cache_clear()
        if rank % 3 == 2:
            plan(other.src, other.dst, other.shape, other.dtype, on)
        src, dst = (Layout.from_dict(json.loads(text)) for text in texts)
        mine = plan(src, dst, list(case.shape), case.dtype, on)
        return mine, execute(mine, parts.get(rank)) if rank in mine.ranks else None

    texts = [json.dumps(layout.to_dict()) for layout in (case.src, case.dst)]
    size = max(*case.src.rank_list, *case.dst.rank_list) + 1
    plans, found = zip(*sim.run(on_rank, world_size=size, seed=case.seed), strict=True)
    check_values(case, full, dict(enumerate(found)))
    said = written_out(plans[0])
    for mine in plans[1:]:
        assert written_out(mine) == said


# -- torch -----------------------------------------------------------------------------------------------------------


@st.composite
def cases_for_torch(draw):
    """A case that torch takes: splits in mesh order, or even ones in any order; pending reductions at the source."""
    even = draw(st.booleans())
    mesh, shape = draw(meshes(12, 3)), draw(shapes(0, 3, max_size=12))
    if even:
        shape = tuple(math.prod(mesh.mesh_shape) * size if size < 3 else size for size in shape)
    options = {"ordered": even, "even": even}
    src = draw(layouts(mesh, shape, partial=("sum", "max"), **options))
    dst = draw(layouts(mesh, shape, **options))
    assume(torch_plan(src, dst, shape, torch.float32, device_type="cpu").refused is None)
    return Case(src, dst, shape, torch.float32, draw(st.integers(0, 2**16)))


@pytest.mark.tier("full")
@examples(2)
@given(cases_for_torch())
def test_torch_agrees(case):
    full = whole_of(case)
    steps = plan(case.src, case.dst, case.shape, case.dtype)

    def on_rank():
        mesh = init_device_mesh("cpu", case.src.mesh_shape, mesh_dim_names=case.src.alias_name)
        part = sim.scatter_full(full, case.src, seed=case.seed)
        source, target = (layout.placement_to_tensor_map(full.ndim).placements for layout in (case.src, case.dst))
        x = DTensor.from_local(part, mesh, source, shape=full.shape, stride=full.stride())
        return x.redistribute(mesh, target).to_local(), execute(steps, part)

    for theirs, ours in sim.run(on_rank, world_size=len(case.src.rank_list), seed=case.seed):
        assert torch.equal(theirs, ours)


# -- the checks themselves -------------------------------------------------------------------------------------------


def test_the_checks_can_fail():
    mesh = Layout((2, 2), ("dp", "tp"))
    case = Case(mesh("dp"), mesh("tp"), (8,), torch.float32, 0)
    full, steps = whole_of(case), check(case)
    assert isinstance(steps, Plan)
    (found,), trace = carry_out([steps], parts_of(case, full), 0)
    with pytest.raises(AssertionError):
        check_values(case, full + 1, found)
    with pytest.raises(AssertionError, match="disagree"):
        check_values(case, full, {**found, 3: found[2]} | {2: found[3]} | {0: found[1]})
    with pytest.raises(AssertionError):
        check_trace(plan(case.src, mesh(), (8,), torch.float32), trace)
