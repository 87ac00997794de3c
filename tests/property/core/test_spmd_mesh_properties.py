"""SPMD meshes against brute force: coordinates counted out one by one, divisors tried one by one."""

from itertools import product

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

import sim
from hyper_parallel.core.mesh.spmd_mesh import divisor, split_replicated, spmd_mesh_of

SETTINGS = settings(max_examples=60)


@st.composite
def roots(draw, max_ranks=12):
    """Sizes of a mesh and its ranks in any order."""
    sizes = [draw(st.integers(1, 4))]
    while len(sizes) < 4 and draw(st.booleans()):
        sizes.append(draw(st.integers(1, max(1, min(4, max_ranks // torch.Size(sizes).numel())))))
    ranks = draw(st.permutations(range(torch.Size(sizes).numel())))
    return tuple(sizes), tuple(ranks)


@st.composite
def pairs(draw):
    """A root, the axes of the parameter's mesh, the data axes, and whether these are flattened into one."""
    sizes, ranks = draw(roots())
    axes = range(len(sizes))
    param = draw(st.sets(st.sampled_from(axes), min_size=1))
    data = draw(st.sets(st.sampled_from(axes), min_size=1, max_size=2))
    return sizes, ranks, tuple(sorted(param)), tuple(sorted(data)), draw(st.booleans())


def name(axis):
    return f"a{axis}"


def root_mesh(sizes, ranks):
    return DeviceMesh("cpu", torch.tensor(ranks).reshape(sizes), mesh_dim_names=tuple(map(name, range(len(sizes)))))


def slice_of(root, axes):
    return root[tuple(map(name, axes))]


def counted_out(sizes, ranks, axes):
    """The ranks over some axes of the root, flat, last axis fastest; the others stay where the calling rank is."""
    table = dict(zip(product(*map(range, sizes)), ranks, strict=True))
    here = next(at for at, rank in table.items() if rank == dist.get_rank())
    found = []
    for place in product(*(range(sizes[axis]) for axis in axes)):
        at = list(here)
        for axis, index in zip(axes, place, strict=True):
            at[axis] = index
        found.append(table[tuple(at)])
    return found


@SETTINGS
@given(pairs())
def test_ranks_are_those_counted_out(drawn):
    sizes, ranks, param, data, flat = drawn

    def body():
        root = root_mesh(sizes, ranks)
        data_mesh = slice_of(root, data)
        if flat and len(data) > 1:
            data_mesh = data_mesh._flatten("flat")
        spmd = spmd_mesh_of(slice_of(root, param), data_mesh)
        # Of an axis of one rank, only its name tells that it is a data axis; a flattened one has lost the name.
        named = not flat or len(data) == 1
        shared = [axis for axis in param if axis in data and (sizes[axis] > 1 or named)]
        kept = [axis for axis in param if axis not in shared]
        assert spmd.shared == tuple(map(param.index, shared))
        assert spmd.kept == tuple(map(param.index, kept))
        expected = counted_out(sizes, ranks, (*kept, *data))
        data_sizes = [sizes[axis] for axis in data]
        data_shape = [torch.Size(data_sizes).numel()] if flat else data_sizes
        assert spmd.mesh.mesh.flatten().tolist() == expected
        assert list(spmd.mesh.shape) == [*(sizes[axis] for axis in kept), *data_shape]
        data_names = ["flat"] if flat and len(data) > 1 else map(name, data)
        assert spmd.mesh.mesh_dim_names == (*map(name, kept), *data_names)
        for axis, group in enumerate(spmd.mesh.get_all_groups()):
            here = spmd.mesh.get_coordinate()
            line = spmd.mesh.mesh[tuple(slice(None) if at == axis else here[at] for at in range(len(here)))]
            assert sorted(dist.get_process_group_ranks(group)) == sorted(line.tolist())
        return spmd.mesh.mesh.tolist()

    seen = sim.run(body, world_size=len(ranks))
    for rank, mesh in enumerate(seen):
        for other in torch.tensor(mesh).flatten().tolist():
            assert seen[other] == mesh, (rank, other)  # all ranks of a mesh tell the same of it


@SETTINGS
@given(roots(), st.data())
def test_domains_are_cut_into_runs(root, data):
    sizes, ranks = root
    axes = tuple(sorted(data.draw(st.sets(st.sampled_from(range(len(sizes)))))))
    domain = torch.Size([sizes[axis] for axis in axes]).numel()
    shard = data.draw(st.sampled_from([size for size in range(1, domain + 1) if domain % size == 0]))

    def body():
        mesh = root_mesh(sizes, ranks)
        spmd = split_replicated(mesh, axes, shard)
        kept = tuple(axis for axis in range(len(sizes)) if axis not in axes)
        assert (spmd.kept, spmd.shared) == (kept, axes)
        assert spmd.mesh.mesh.flatten().tolist() == counted_out(sizes, ranks, (*kept, *axes))
        assert list(spmd.mesh.shape) == [*(sizes[axis] for axis in kept), domain // shard, shard]
        copies = counted_out(sizes, ranks, axes)
        at = copies.index(dist.get_rank())
        run = copies[at // shard * shard : at // shard * shard + shard]
        assert dist.get_process_group_ranks(spmd.mesh.get_group("shard")) == sorted(run)
        assert dist.get_process_group_ranks(spmd.mesh.get_group("replicate")) == sorted(copies[at % shard :: shard])
        for group in spmd.mesh.get_all_groups():  # each group is one that its members agree on
            total = torch.tensor(float(dist.get_rank()))
            dist.all_reduce(total, group=group)
            assert total.item() == sum(dist.get_process_group_ranks(group))

    sim.run(body, world_size=len(ranks))


@given(st.integers(-1, 40).filter(bool), st.integers(0, 60), st.integers(1, 40))
def test_divisor_is_the_largest(shard_size, rows, domain):
    most = domain if shard_size == -1 else shard_size
    assert divisor(shard_size, rows, domain) == max(
        size for size in range(1, domain + 1) if size <= most and rows % size == 0 and domain % size == 0
    )
