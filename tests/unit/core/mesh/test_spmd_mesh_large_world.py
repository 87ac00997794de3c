"""SPMD meshes of a world of 1,024 ranks, as seen from one of them, under torch's fake backend."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from hyper_parallel.core.mesh.spmd_mesh import split_replicated, split_world, spmd_mesh_of


@pytest.fixture(params=[0, 1021])
def rank(request):
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=1024)
    yield request.param
    dist.destroy_process_group()


def test_ranks_and_groups(rank):
    root = init_device_mesh("cpu", (16, 8, 8), mesh_dim_names=("replicate", "shard", "tp"))
    made = len(c10d._world.pg_names)
    spmd = spmd_mesh_of(root["tp"], root["replicate", "shard"])
    assert torch.equal(spmd.mesh.mesh, torch.arange(1024, dtype=torch.int32).view(16, 8, 8).permute(2, 0, 1))
    assert spmd.mesh.get_coordinate() == (rank % 8, rank // 64, rank // 8 % 8)
    assert len(c10d._world.pg_names) == made

    nodes = split_world("cpu", 8)
    assert nodes.get_coordinate() == (rank // 8, rank % 8)
    assert dist.get_process_group_ranks(nodes.get_group("shard")) == list(range(rank // 8 * 8, rank // 8 * 8 + 8))
    halves = split_replicated(root, (0, 1), 64).mesh
    tp = rank % 8
    first = rank // 512 * 512 + tp
    assert dist.get_process_group_ranks(halves.get_group("shard")) == list(range(first, first + 512, 8))
    assert dist.get_process_group_ranks(halves.get_group("replicate")) == [rank % 512, rank % 512 + 512]
    made = len(c10d._world.pg_names)
    for _ in range(3):
        split_world("cpu", 8)
        split_replicated(root, [0, 1], 64)
    assert len(c10d._world.pg_names) == made
