"""Layouts as DTensors on real ranks: every rank holds the slice that the layout says, and together they are whole."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import sim
from hyper_parallel.core.dtensor import flatten_axes, to_torch
from hyper_parallel.core.dtensor.layout import Layout

pytestmark = pytest.mark.tier("test")

CASES = [
    (("dp", "tp"), (5, 3)),
    ((("dp", "tp"), "None"), (7, 2)),
    ((("tp", "dp"), "None"), (8, 2)),
    ((("tp", "dp"), "None"), (7, 2)),
    (("None", ("tp", "dp")), (2, 3)),
    (("None", "None", "tp"), (2, 3, 1)),
    ((), (3,)),
]


@sim.ranks(4)
def test_every_rank_holds_its_slice(ctx):
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    for entries, shape in CASES:
        layout = Layout.from_device_mesh(mesh)(*entries)
        full = torch.arange(float(torch.Size(shape).numel()), device=ctx.device).reshape(shape)
        x = distribute_tensor(full, *to_torch(layout, shape))
        assert layout.local_shape(shape) == tuple(x.to_local().shape), layout
        assert torch.equal(x.to_local(), full[layout.local_slice(shape)]), layout
        assert torch.equal(x.full_tensor(), full), layout
        read = Layout.of(x)
        assert read.mesh == x.device_mesh
        for rank in range(ctx.world_size):
            assert read.local_slice(shape, rank) == layout.local_slice(shape, rank), layout


@sim.ranks(4)
def test_every_reduction_is_torch_s(ctx):
    mesh = init_device_mesh(ctx.device_type, (4,), mesh_dim_names=("tp",))
    for reduction, wanted in {"sum": 10.0, "avg": 2.5, "max": 4.0, "min": 1.0, "prod": 24.0}.items():
        layout = Layout.from_device_mesh(mesh)("None", partial={"tp": reduction})
        local = torch.full((3,), ctx.rank + 1.0, device=ctx.device)
        x = DTensor.from_local(local, *to_torch(layout, (3,)))
        assert Layout.of(x) == layout
        assert x.full_tensor().tolist() == [wanted] * 3, reduction


@sim.ranks(8)
def test_flattened_axes_communicate_together(ctx):
    mesh = init_device_mesh(ctx.device_type, (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    flat = flatten_axes(mesh, ("dp", "tp"), "dp_tp")
    assert flatten_axes(mesh, ("dp", "tp"), "dp_tp") is flat
    ranks = torch.tensor([float(ctx.rank)], device=ctx.device)
    dist.all_reduce(ranks, group=flat.get_group())
    cp = ctx.rank // 2 % 2
    assert ranks.item() == sum(rank for rank in range(8) if rank // 2 % 2 == cp)
    assert Layout.from_device_mesh(flat).rank_list == tuple(rank for rank in range(8) if rank // 2 % 2 == cp)
