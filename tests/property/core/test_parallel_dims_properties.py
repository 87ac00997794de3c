"""Drawn degrees: they multiply to the world size, infer back, and split the ranks as the table says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

import sim
from hyper_parallel.core.mesh.parallel_dims import ParallelDims

pytestmark = pytest.mark.sim

ORDER = ["dp_replicate", "dp_shard", "ep", "cp", "tp", "pp"]
NAMES = (*ORDER, "etp", "ulysses_degree", "fold_experts")
RANKS = ["pp", "dp_replicate", "dp_shard", "ep", "cp", "tp"]  # outermost first


@st.composite
def parallel_dims(draw: st.DrawFn, max_world: int) -> ParallelDims:
    """Draw valid `ParallelDims` with at most `max_world` ranks; they shrink towards one rank and few axes."""
    degrees = dict.fromkeys(ORDER, 1)
    for axis in draw(st.permutations(ORDER)):
        degrees[axis] = draw(st.integers(1, max_world // math.prod(degrees.values())))
    etp = draw(st.sampled_from([1, degrees["tp"]]))
    cp = degrees["cp"]
    ulysses = draw(st.none() | st.sampled_from([d for d in range(1, cp + 1) if cp % d == 0]))
    options = {"etp": etp, "ulysses_degree": ulysses, "fold_experts": draw(st.booleans())}
    return ParallelDims(**degrees, **options, world_size=math.prod(degrees.values()))


@contextmanager
def world_of(world_size: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@given(parallel_dims(max_world=4096))
def test_degrees_multiply_to_the_world(dims: ParallelDims) -> None:
    assert dims.dp_size * dims.non_dp_size == dims.world_size
    assert math.prod(dims.mesh_axes.values()) == dims.world_size
    assert [axis for axis in ORDER if axis in dims.mesh_axes] == list(dims.mesh_axes)
    assert all(dims.mesh_axes.get(axis, 1) == getattr(dims, axis) for axis in ORDER)
    # Each expert's weights are on the ranks that split experts, split each of them, and shard what is left.
    splits = dims.etp if dims.ep > 1 or dims.fold_experts else 1
    held = dims.expert_ranks * dims.expert_shards * splits * dims.dp_replicate * dims.pp
    assert dims.world_size % held == 0
    assert held == dims.world_size or "tp" not in dims.expert_axes


@given(parallel_dims(max_world=4096))
def test_inference_finds_the_degree_that_was_there(dims: ParallelDims) -> None:
    given_degrees = {axis: getattr(dims, axis) for axis in NAMES if axis != "dp_shard"}
    inferred = ParallelDims(**given_degrees, dp_shard=-1, world_size=dims.world_size)
    assert inferred == dims
    assert ParallelDims.from_config(given_degrees, dims.world_size) == dims


@given(parallel_dims(max_world=4096), st.integers(1, 4096))
def test_no_other_world_size_is_accepted(dims: ParallelDims, world_size: int) -> None:
    degrees = {axis: getattr(dims, axis) for axis in NAMES}
    if world_size == dims.world_size:
        assert ParallelDims(**degrees, world_size=world_size) == dims
        return
    with pytest.raises(ValueError, match=rf"is {dims.world_size}, not world_size={world_size}"):
        ParallelDims(**degrees, world_size=world_size)


@given(parallel_dims(max_world=4096))
def test_flattened_names_follow_the_table(dims: ParallelDims) -> None:
    present = [axis for axis in ("dp_replicate", "dp_shard", "cp") if axis in dims.mesh_axes]
    expected = {}
    if "dp_shard" in present:
        expected["fsdp"] = ("dp_shard",)
    if present and present != ["cp"]:
        expected["dp"] = tuple(axis for axis in present if axis != "cp")
    if present:
        expected["loss"] = tuple(present)
    assert dims.flattened_axes == expected


@settings(max_examples=settings.default.max_examples // 2)
@given(parallel_dims(max_world=32), st.data())
def test_built_mesh_cuts_the_ranks_as_the_table_says(dims: ParallelDims, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, dims.world_size - 1), label="rank")
    axes = dims.mesh_axes
    ranks = np.arange(dims.world_size).reshape([getattr(dims, axis) for axis in RANKS])
    ranks = ranks.transpose([RANKS.index(axis) for axis in ORDER]).reshape(tuple(axes.values()))
    place = dict(zip(axes, np.argwhere(ranks == rank)[0], strict=True))
    with world_of(dims.world_size, rank):
        mesh = dims.build_mesh("cpu")
        assert (mesh.mesh_dim_names, tuple(mesh.shape)) == (tuple(axes), tuple(axes.values()))
        for name, parts in {**{axis: (axis,) for axis in axes}, **dims.flattened_axes}.items():
            mine = ranks[tuple(slice(None) if axis in parts else place[axis] for axis in axes)].flatten().tolist()
            assert dims.get_mesh(name).mesh.tolist() == mine
            assert dist.get_process_group_ranks(dims.get_mesh(name).get_group()) == mine
            assert dims.get_mesh(name).size() == math.prod(axes[axis] for axis in parts)
        stage = [mesh[tuple(axis for axis in axes if axis != "pp")].mesh] if 1 < dims.pp < dims.world_size else []
        assert all(ranks.max() - ranks.min() + 1 == dims.world_size // dims.pp for ranks in stage), "in a row"


@settings(max_examples=settings.default.max_examples // 10)
@given(parallel_dims(max_world=8))
def test_ranks_of_one_process_that_share_dims_get_their_own_meshes(dims: ParallelDims) -> None:
    def body() -> None:
        mesh = dims.build_mesh("cpu")
        assert mesh.get_rank() == dist.get_rank()
        assert dims.build_mesh() is mesh
        for name in dims.flattened_axes:
            group = dims.get_mesh(name).get_group()
            total = torch.tensor(float(dist.get_rank()))
            dist.all_reduce(total, group=group)
            assert total.item() == sum(dist.get_process_group_ranks(group))

    sim.run(body, world_size=dims.world_size)
