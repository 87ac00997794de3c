"""Plans executed on real ranks: every rank ends with its slice of the full tensor."""

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import sim
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.machine import find_machine
from hyper_parallel.core.mesh.device_mesh import OwnerMesh
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.redistribute import execute, from_local, full_tensor, plan, redistribute
from hyper_parallel.core.redistribute.plan import plan_for, plan_here

pytestmark = pytest.mark.tier("test")

SQUARE = Layout((2, 2), ("dp", "tp"))
CUBE = Layout((2, 2, 2), ("dp", "cp", "tp"))
WIDE = Layout((2, 4), ("dp", "tp"))
FLAT = Layout((4,), ("tp",))


def whole_of(shape, dtype):
    """Elements that tell places apart, and that are small enough to be added up exactly."""
    index = torch.arange(math.prod(shape)).reshape(shape)
    if dtype == torch.bool:
        return index * 5 % 3 == 0
    if dtype == torch.complex64:
        return torch.complex(index - 9.0, 5.0 - index % 7)
    return (index % 13 - 4).to(dtype)


def check(ctx, src, dst, shape, dtype=torch.float32, on=None, mesh=None, **options):
    """Redistribute a tensor of which every rank knows the whole, and compare; return the kinds of the steps."""
    full = whole_of(shape, dtype)
    steps = plan(src, dst, shape, dtype, on, **options)
    if ctx.rank in steps.ranks:
        part = sim.scatter_full(full, src).to(ctx.device) if ctx.rank in src.rank_list else None
        before = None if part is None else part.clone()
        found = execute(steps, part, mesh=mesh)
        assert part is None or torch.equal(part, before), f"the source changed: {steps}"
        if ctx.rank not in dst.rank_list:
            assert found.numel() == 0, str(steps)
        elif dst.is_partial():
            whole = execute(plan(dst, dst(), shape, dtype), found)
            assert torch.equal(whole.cpu(), full), f"{steps}\n{found}"
        else:
            assert torch.equal(found.cpu(), sim.scatter_full(full, dst)), f"{steps}\n{found}"
    return [step.kind for step in steps.steps]


@sim.ranks(4)
def test_every_kind_of_transition(ctx):
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    moves = ["all_to_all"], ["permute"], ["slice", "all_gather"]  # as it comes out cheaper
    for src, dst, shape, kinds in [
        (SQUARE("dp"), SQUARE("dp"), (8,), [[]]),
        (SQUARE(), SQUARE("dp", "tp"), (4, 6), [["slice"]]),
        (SQUARE("dp", "tp"), SQUARE(), (4, 6), [["all_gather"]]),
        (SQUARE("dp", "tp"), SQUARE("dp"), (4, 6), [["all_gather"]]),
        (SQUARE("dp", "tp"), SQUARE(), (5, 3), [["all_gather"]]),  # uneven
        (SQUARE(("dp", "tp")), SQUARE(), (3,), [["all_gather"]]),  # a rank holds nothing
        (SQUARE("dp"), SQUARE(None, "dp"), (6, 4), [["all_to_all"]]),
        (SQUARE("dp"), SQUARE(None, "dp"), (5, 3), [["all_to_all"]]),
        (SQUARE("tp"), SQUARE(None, ("dp", "tp")), (4, 6), [["all_to_all"]]),
        (SQUARE(("dp", "tp")), SQUARE(("tp", "dp")), (8,), moves),
        (SQUARE(("tp", "dp")), SQUARE(("dp", "tp")), (7,), moves),
        (SQUARE("dp"), SQUARE("tp"), (7,), moves),
        (SQUARE("dp"), SQUARE("tp"), (1, 1), moves),
        (SQUARE("dp", "tp"), SQUARE("tp", "dp"), (4, 6), moves),
        (SQUARE("dp"), SQUARE("tp"), (0, 3), [[], ["slice"]]),
    ]:
        seen = check(ctx, src, dst, shape, mesh=mesh)
        assert seen in kinds, f"{src} -> {dst} {shape}: {seen}"


@pytest.mark.tier("full")
@sim.ranks(4)
def test_every_pending_reduction(ctx):
    for kind in ("sum", "avg", "max", "min", "prod"):
        pending, beside = SQUARE(partial={"tp": kind}), SQUARE("dp", partial={"tp": kind})
        both = SQUARE(partial={"dp": kind, "tp": kind})
        for src, dst, shape in [
            (both, SQUARE(), ()),
            (both, SQUARE(), (5, 2)),
            (both, SQUARE("tp", "dp"), (4, 2)),
            (both, SQUARE(("tp", "dp")), (7,)),
            (both, SQUARE("tp", partial={"dp": kind}), (3, 2)),
            (beside, SQUARE("dp"), (4, 3)),
            (beside, SQUARE(("dp", "tp")), (5, 2)),
            (beside, SQUARE("tp", "dp"), (4, 4)),
            (pending, SQUARE(), (0, 2)),
            (pending, SQUARE(partial={"dp": kind}), (6,)),
            (SQUARE("tp"), pending, (5,)),
            (SQUARE(), pending, ()),
        ]:
            check(ctx, src, dst, shape)
            if kind != "avg":  # an average of whole numbers is rounded, and so once more when it stays pending
                check(ctx, src, dst, shape, torch.int64)
    check(ctx, SQUARE(partial={"tp": "sum"}), SQUARE(partial={"tp": "avg"}), (4,))
    check(ctx, SQUARE(partial={"tp": "avg"}), SQUARE(partial={"tp": "sum"}), (4,))  # divided in a copy, not in place
    check(ctx, SQUARE(partial={"tp": "sum"}), SQUARE("dp", partial={"tp": "max"}), (4,))


@sim.ranks(4)
def test_averages_of_ints_round_down(ctx):
    """By an all-reduce, a reduce-scatter, and exchanges that add up copies in pairs and in fours."""
    both, one, shape = SQUARE(partial={"dp": "avg", "tp": "avg"}), SQUARE(partial={"tp": "avg"}), (5, 3)
    copies = [whole_of(shape, torch.int64) * (rank + 1) - 7 for rank in range(4)]
    rounded = 0
    for src, dst in [
        (both, SQUARE()),
        (both, SQUARE(("dp", "tp"))),
        (both, SQUARE(None, ("tp", "dp"))),
        (one, SQUARE()),
        (one, SQUARE("tp")),
        (one, SQUARE("tp", "dp")),
    ]:
        added = copies if src is both else copies[:2]  # ranks 2 and 3 hold the copies of ranks 0 and 1
        total = torch.stack(added).sum(0)
        rounded += int(((total < 0) & (total % len(added) != 0)).sum())
        held = added[ctx.rank % len(added)].to(ctx.device)
        found = execute(plan(src, dst, shape, torch.int64), held)
        wanted = total.div(len(added), rounding_mode="floor")
        assert torch.equal(found.cpu(), sim.scatter_full(wanted, dst)), f"{src} -> {dst}"
    assert rounded > 20, "nothing was rounded"


@sim.ranks(4)
def test_every_dtype(ctx):
    for dtype in (torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64):
        check(ctx, SQUARE("dp", "tp"), SQUARE(), (4, 6), dtype)
        check(ctx, SQUARE("dp", "tp"), SQUARE("tp"), (5, 3), dtype)
        check(ctx, SQUARE(("tp", "dp")), SQUARE(("dp", "tp")), (7,), dtype)
        if dtype.is_complex or (dtype != torch.bool and ctx.reductions.takes(dtype, collective="reduce_scatter")):
            check(ctx, SQUARE("dp", partial={"tp": "sum"}), SQUARE(), (4, 6), dtype)
            check(ctx, SQUARE(partial={"tp": "sum"}), SQUARE("tp", "dp"), (5, 3), dtype)


@sim.ranks(4)
def test_memory_can_be_bounded(ctx):
    for src, dst, shape in [
        (FLAT("tp"), FLAT(None, "tp"), (12, 8)),
        (FLAT("tp"), FLAT(), (30, 3)),
        (SQUARE(("dp", "tp")), SQUARE(None, ("tp", "dp")), (14, 15)),
        (FLAT(partial={"tp": "sum"}), FLAT("tp"), (36, 6)),
    ]:
        limit = plan(src, dst, shape, torch.float32).peak_extra_bytes * 2 // 3
        bounded = plan(src, dst, shape, torch.float32, max_extra_bytes=limit)
        assert bounded.peak_extra_bytes <= limit
        assert bounded.num_collectives > 1, str(bounded)
        check(ctx, src, dst, shape, max_extra_bytes=limit)


@pytest.mark.tier("full")
@sim.ranks(8)
def test_three_axes(ctx):
    for src, dst, shape in [
        (CUBE(("dp", "cp", "tp")), CUBE(("tp", "cp", "dp")), (16, 3)),
        (CUBE(("dp", "cp", "tp")), CUBE(("tp", "cp", "dp")), (13, 2)),
        (CUBE("dp", "cp", "tp"), CUBE("tp", "dp", "cp"), (3, 5, 7)),
        (CUBE("tp"), CUBE(("dp", "cp")), (9,)),
        (CUBE(("cp", "tp"), "dp"), CUBE(None, ("tp", "dp")), (6, 5)),
        (CUBE("cp", partial={"dp": "sum", "tp": "sum"}), CUBE(("tp", "cp")), (11, 2)),
        (CUBE(partial={"dp": "max"}), CUBE("cp", ("dp", "tp")), (4, 6)),
        (CUBE("cp", partial={"dp": "avg"}), CUBE("tp", partial={"cp": "avg"}), (8,)),
        (WIDE(("tp", "dp")), WIDE("dp", "tp"), (10, 6)),
        (WIDE("tp", partial={"dp": "min"}), WIDE("dp"), (5, 3)),
    ]:
        check(ctx, src, dst, shape)
        for name, per_node in (("h100-sxm", 4), ("a100-80gb", 2)):  # other plans, which take less time there
            check(ctx, src, dst, shape, on=find_machine(name).with_figures(node__devices=per_node))


@sim.ranks(8)
def test_two_meshes(ctx):
    """Other axes over the same ranks, other ranks in another order, some of them, none of them."""
    some, others = Layout((2, 2), ("dp", "tp")), Layout((4,), ("ep",), range(4, 8))
    shuffled = Layout((2, 4), ("dp", "tp"), (5, 2, 7, 0, 1, 4, 6, 3))
    for src, dst, shape in [
        (CUBE(("dp", "cp")), WIDE("tp"), (8, 2)),
        (CUBE("dp", "tp"), WIDE(None, "tp"), (7, 5)),
        (WIDE("dp", "tp"), shuffled("dp", "tp"), (5, 9)),
        (WIDE("dp"), some("dp", "tp"), (6, 4)),
        (some("tp", "dp"), WIDE("tp"), (6, 4)),
        (some("tp"), others("ep"), (10,)),
        (others("ep"), some(), (3, 3)),
        (some(partial={"tp": "sum"}), others(None, "ep"), (4, 9)),
        (some(partial={"dp": "max", "tp": "max"}), others(), ()),
        (some("dp"), others(partial={"ep": "sum"}), (4,)),
        (some("dp"), others(partial={"ep": "avg"}), (4,)),
    ]:
        check(ctx, src, dst, shape)


@sim.ranks(4, backends=("sim", "gpu", "npu"))
def test_parts_that_are_on_the_host(ctx):
    """With nothing but a device's backend they travel by way of the device, where the result is."""
    mesh, full = init_device_mesh(ctx.device_type, (4,), mesh_dim_names=("tp",)), whole_of((8, 4), torch.float32)
    layout = Layout.from_device_mesh(mesh)
    part = sim.scatter_full(full, layout("tp"))
    of_parts = from_local(part, layout("tp"))  # whose shape the ranks agree on
    for x in (of_parts, of_parts.cpu()):
        turned = redistribute(x, layout(None, "tp"))
        assert turned.to_local().device == full_tensor(x).device == ctx.device
        assert torch.equal(turned.to_local().cpu(), sim.scatter_full(full, layout(None, "tp")))
        assert torch.equal(full_tensor(x).cpu(), full)


@sim.ranks(4, backends=("sim", "gpu", "npu"))
def test_one_rank_has_all_of_it(ctx):
    """What torch's operators return for the other ranks is on the host."""
    among = init_device_mesh(ctx.device_type, (4,), mesh_dim_names=("tp",))
    mesh, full = OwnerMesh(among, 2), whole_of((8, 4), torch.float32)
    own = full.to(ctx.device) if ctx.rank == 2 else torch.empty(0, device=ctx.device)
    x = DTensor.from_local(own, mesh, (Shard(0),), run_check=False, shape=full.shape, stride=full.stride())
    for held in (x, x * 1, x.cpu()):
        found = redistribute(held, Layout.from_device_mesh(among)("tp")).to_local()
        assert found.device == full_tensor(held).device == ctx.device
        assert torch.equal(found.cpu(), full[2 * ctx.rank : 2 * ctx.rank + 2])
        assert torch.equal(full_tensor(held).cpu(), full)


@sim.ranks(2)
def test_a_mesh_and_its_slices_have_the_machine_that_they_are_planned_for(ctx):
    dims = ParallelDims(tp=2, world_size=2)
    mesh = dims.build_mesh(ctx.device_type)
    layout = Layout.from_device_mesh(dims.get_mesh("tp"))
    before = plan_here(layout("tp"), layout(), (8,), torch.float32, dims.get_mesh("tp")).machine
    plan_for(mesh, find_machine("ascend-910b-376"))
    for each in (mesh, dims.get_mesh("tp")):
        assert plan_here(layout("tp"), layout(), (8,), torch.float32, each).machine.name == "ascend-910b-376"
    assert before.name != "ascend-910b-376"
    x = from_local(torch.full((4,), ctx.rank + 1.0, device=ctx.device), layout("tp"))
    assert full_tensor(redistribute(x, layout())).tolist() == [1.0] * 4 + [2.0] * 4
