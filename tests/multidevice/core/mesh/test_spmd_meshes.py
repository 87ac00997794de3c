"""Meshes that carry parameters which lie on a mesh of their own: their ranks, their groups, and DTensors on them."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import sim
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.mesh.spmd_mesh import split_replicated, split_world, spmd_mesh_of

NO_GLOO = ("sim", "gpu", "npu")
SIM = ("sim",)


def groups_made():
    return len(c10d._world.pg_names)


def part(tensor, index, of, dim=0):
    """What `index` of `of` ranks holds, as torch.chunk splits: empty where the rows have run out."""
    parts = tensor.chunk(of, dim)
    return parts[index] if index < len(parts) else tensor.narrow(dim, 0, 0)


def ranks_of(group):
    return dist.get_process_group_ranks(group)


def check_part_of_part(root, data_mesh, rows, device):
    """A weight that tp has split, split further: chunk of chunk on each rank, and whole again."""
    spmd = spmd_mesh_of(root["tp"], data_mesh)
    full = torch.arange(rows * 3, dtype=torch.float32, device=device).reshape(rows, 3)
    mine = part(full, root.get_local_rank("tp"), root["tp"].size())
    mine = part(mine, data_mesh.get_local_rank(), data_mesh.size())
    split = DTensor.from_local(
        mine.clone(), spmd.mesh, (Shard(0), Shard(0)), run_check=False, shape=full.shape, stride=full.stride()
    )
    assert torch.equal(split.full_tensor(), full)
    assert torch.equal(distribute_tensor(full, spmd.mesh, (Shard(0), Shard(0))).to_local(), mine)
    return split, full


def check_checkpoint(split, full, folder, device):
    """Saved as it lies, loaded as it lies and onto other meshes."""
    dcp.save({"w": split}, checkpoint_id=folder)
    again = DTensor.from_local(
        torch.full_like(split.to_local(), -1.0),
        split.device_mesh,
        split.placements,
        run_check=False,
        shape=split.shape,
        stride=split.stride(),
    )
    dcp.load({"w": again}, checkpoint_id=folder)
    assert torch.equal(again.to_local(), split.to_local())
    flat = init_device_mesh(device.type, (dist.get_world_size(),))
    for target in (flat, split_world(device.type, 2)):
        other = distribute_tensor(torch.full_like(full, -1.0), target, [Shard(0)] * target.ndim)
        dcp.load({"w": other}, checkpoint_id=folder)
        assert torch.equal(other.full_tensor(), full)


@pytest.mark.tier("test")
@sim.ranks(4)
def test_part_of_part_and_checkpoint_and_replicas(ctx, tmp_path):
    root = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    before = groups_made()
    for rows in (8, 7, 5, 1):
        split, full = check_part_of_part(root, root["dp"], rows, ctx.device)
    assert groups_made() == before
    split, full = check_part_of_part(root, root["dp"], 7, ctx.device)
    check_checkpoint(split, full, tmp_path, ctx.device)

    # The same weight, by hsdp: the ranks along dp have copies of it, which are split as well.
    halves = split_replicated(root, (0,), 2)
    assert halves.mesh.shape == (2, 1, 2)
    kept = distribute_tensor(full, halves.mesh, (Shard(0), Replicate(), Shard(0)))
    assert torch.equal(kept.to_local(), split.to_local())
    assert torch.equal(kept.full_tensor(), full)

    # Groups made for a split of the world work, and are made once.
    pairs = split_world(ctx.device_type, 2)
    made = groups_made()
    assert split_world(ctx.device_type, 2) is pairs
    assert split_replicated(root, (0,), 2) is halves
    assert groups_made() == made
    assert [ranks_of(pairs.get_group(axis)) for axis in (0, 1)] == [
        [ctx.rank % 2, ctx.rank % 2 + 2],
        [ctx.rank // 2 * 2, ctx.rank // 2 * 2 + 1],
    ]
    total = torch.tensor([float(ctx.rank)], device=ctx.device)
    dist.all_reduce(total, group=pairs.get_group("shard"))
    assert total.item() == sum(ranks_of(pairs.get_group("shard")))


@pytest.mark.tier("test")
@sim.ranks(6, backends=NO_GLOO)
def test_sizes_that_no_axis_divides(ctx, tmp_path):
    root = init_device_mesh(ctx.device_type, (3, 2), mesh_dim_names=("dp", "tp"))
    for rows in (13, 7, 3):
        split, full = check_part_of_part(root, root["dp"], rows, ctx.device)
    check_checkpoint(split, full, tmp_path, ctx.device)


@pytest.mark.tier("test")
@sim.ranks(8, backends=NO_GLOO)
def test_flattened_data_axis(ctx):
    root = init_device_mesh(ctx.device_type, (2, 2, 2), mesh_dim_names=("dp_shard", "cp", "tp"))
    fsdp = root["dp_shard", "cp"]._flatten("fsdp")
    made = groups_made()
    for rows in (16, 13):
        check_part_of_part(root, fsdp, rows, ctx.device)
    for param_mesh, kept, shared in (
        (root, (2,), (0, 1)),
        (root["dp_shard", "tp"], (1,), (0,)),  # only one of the flattened axes
        (root["cp", "tp"], (1,), (0,)),
        (root["tp"], (0,), ()),
    ):
        spmd = spmd_mesh_of(param_mesh, fsdp)
        assert (spmd.kept, spmd.shared) == (kept, shared)
        assert spmd.mesh == spmd_mesh_of(root["tp"], fsdp).mesh
        assert spmd.mesh.mesh_dim_names == ("tp", "fsdp")
        assert spmd.mesh.mesh.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert spmd_mesh_of(root["dp_shard", "cp"], fsdp) == (fsdp, (), (0, 1))
    assert groups_made() == made


@pytest.mark.tier("test")
@sim.ranks(8, backends=SIM)
def test_meshes_of_parallel_dims(ctx):
    dims = ParallelDims(dp_replicate=2, dp_shard=2, tp=2, world_size=8)
    root = dims.build_mesh("cpu")
    for param_mesh, kept, shared in ((dims.get_mesh("tp"), (0,), ()), (root, (2,), (0, 1))):
        for data_mesh, expected in (
            (dims.get_mesh("dp"), [[0, 2, 4, 6], [1, 3, 5, 7]]),
            (root["dp_replicate", "dp_shard"], [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]),
        ):
            spmd = spmd_mesh_of(param_mesh, data_mesh)
            assert spmd.mesh.mesh.tolist() == expected
            assert (spmd.kept, spmd.shared) == (kept, shared)
    first = ctx.rank // 4 * 4
    stage = spmd_mesh_of(dims.get_mesh("tp"), dims.get_mesh("fsdp"))  # fsdp is another name of dp_shard
    assert stage.mesh.mesh.tolist() == [[first, first + 2], [first + 1, first + 3]]


@sim.ranks(8, backends=NO_GLOO)
def test_two_data_axes(ctx):
    root = init_device_mesh(ctx.device_type, (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    spmd = spmd_mesh_of(root["tp"], root["replicate", "shard"])
    assert spmd.mesh.mesh_dim_names == ("tp", "replicate", "shard")
    assert spmd.mesh.get_all_groups() == [root.get_group(name) for name in ("tp", "replicate", "shard")]
    full = torch.arange(7.0, device=ctx.device)
    split = distribute_tensor(full, spmd.mesh, (Shard(0), Replicate(), Shard(0)))
    mine = part(part(full, root.get_local_rank("tp"), 2), root.get_local_rank("shard"), 2)
    assert torch.equal(split.to_local(), mine)
    dp = root["replicate", "shard"]._flatten("dp")  # the parameter's axis is the product of both
    assert spmd_mesh_of(dp, root["replicate", "shard"]) == (root["replicate", "shard"], (), (0,))


@sim.ranks(8, backends=SIM)
def test_pipeline_stage_has_a_mesh_of_its_own(ctx):
    root = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    first = 0 if ctx.rank < 4 else 4
    spmd = spmd_mesh_of(root["dp", "tp"], root["dp"])
    assert spmd.mesh.mesh.tolist() == [[first, first + 2], [first + 1, first + 3]]
    made = groups_made()
    stage = split_replicated(root["dp", "tp"], (0,), 2)  # the shards are the ranks of dp: only groups of one are made
    assert stage.mesh.mesh.tolist() == [[[first, first + 2]], [[first + 1, first + 3]]]
    assert stage.mesh.get_group("shard") == root.get_group("dp")
    assert groups_made() <= made + 1


@sim.ranks(4, backends=SIM)
def test_meshes_that_were_made_apart(ctx):
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    twin = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    expected = [[0, 2], [1, 3]]
    assert spmd_mesh_of(twin["tp"], root["dp"]).mesh.mesh.tolist() == expected
    # Slices that are meshes of their own, whose root knows nobody else.
    alone = DeviceMesh.from_group(root.get_group("tp"), "cpu")
    spmd = spmd_mesh_of(alone, root["dp"])
    assert spmd.mesh.mesh.tolist() == expected
    assert spmd.mesh.mesh_dim_names == ("axis_0", "dp")
    assert spmd_mesh_of(root["tp"], DeviceMesh.from_group(root.get_group("dp"), "cpu")).mesh.mesh.tolist() == expected
    # A spmd carries on.
    again = spmd_mesh_of(spmd_mesh_of(root["tp"], root["dp"]).mesh, root["dp"])
    assert (again.mesh.mesh.tolist(), again.kept, again.shared) == (expected, (0,), (1,))
    # Axes are told apart by ranks, not by names: these two are both called "dp".
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "dp"))
    crossed = spmd_mesh_of(other["dp"], root["dp"])
    assert crossed.mesh.mesh.tolist() == expected
    assert crossed.mesh.mesh_dim_names == ("dp", "dp_1")


@sim.ranks(2, backends=SIM)
def test_axes_of_one_rank(ctx):
    root = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("dp", "tp", "cp"))
    assert spmd_mesh_of(root["cp"], root["dp"])[1:] == ((0,), ())  # another axis, though of the same rank
    assert spmd_mesh_of(root["dp"], root["dp"])[1:] == ((), (0,))
    assert spmd_mesh_of(root, root["dp"])[1:] == ((1, 2), (0,))
    assert spmd_mesh_of(root, root["tp"])[1:] == ((0, 2), (1,))


@sim.ranks(4, backends=SIM)
def test_the_same_carrier_every_time(ctx):
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    first = spmd_mesh_of(root["tp"], root["dp"])
    gc.collect()  # the slices above are gone
    assert spmd_mesh_of(root["tp"], root["dp"]) is first
    assert spmd_mesh_of(root["dp"], root["tp"]) is not first
    assert split_replicated(root, (0,), 2) is split_replicated(root, [0], 2)
    assert split_replicated(root, (0,), 2) is not split_replicated(root, (0,), 1)


@sim.ranks(4, backends=SIM)
def test_modes_that_change_tensors(ctx):
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with FakeTensorMode():
        spmd = spmd_mesh_of(root["tp"], root["dp"])
    assert spmd.mesh.mesh.tolist() == [[0, 2], [1, 3]]
    with torch.device("meta"):
        assert split_replicated(root, (0,), 1).mesh.mesh.tolist() == [[[0], [2]], [[1], [3]]]
        assert split_world("cpu", 2).mesh.tolist() == [[0, 1], [2, 3]]
    with torch.inference_mode():
        assert spmd_mesh_of(root["dp"], root["tp"]).mesh.mesh.tolist() == [[0, 1], [2, 3]]


@sim.ranks(4, backends=SIM)
def test_copies_and_pickles_leave_carriers_behind(ctx):
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weight = distribute_tensor(torch.arange(6.0), root["tp"], (Shard(0),))
    spmd_mesh_of(root["tp"], root["dp"])
    bare = pickle.loads(pickle.dumps(root))
    assert bare == root
    assert not bare.__dict__["_hyper_parallel_spmd_meshes"]
    assert spmd_mesh_of(copy.deepcopy(root)["tp"], root["dp"]).mesh.mesh.tolist() == [[0, 2], [1, 3]]
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True).to_local(), weight.to_local())


@sim.ranks(4, backends=SIM)
def test_split_world_has_all_sizes(ctx):
    made = groups_made()
    assert split_world("cpu", 4).mesh.tolist() == [[0, 1, 2, 3]]
    assert split_world("cpu", 4).get_group("shard") == dist.group.WORLD
    full = split_world("cpu", 1)
    assert full.mesh.tolist() == [[0], [1], [2], [3]]
    assert full.get_group("replicate") == dist.group.WORLD
    assert full.mesh_dim_names == ("replicate", "shard")
    assert groups_made() == made + 1  # one, of the calling rank alone, for both


@sim.ranks(8, backends=SIM)
def test_split_replicated_over_several_axes(ctx):
    root = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "tp", "b"))
    spmd = split_replicated(root, (0, 2), 4)
    assert (spmd.kept, spmd.shared) == ((1,), (0, 2))
    assert spmd.mesh.mesh.tolist() == [[[0, 1, 4, 5]], [[2, 3, 6, 7]]]
    made = groups_made()
    pairs = split_replicated(root, (0, 2), 2)  # these are the axes themselves
    assert pairs.mesh.mesh.tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert pairs.mesh.get_all_groups() == [root.get_group(name) for name in ("tp", "a", "b")]
    assert groups_made() == made
    nobody = split_replicated(root, (), 1)  # replicated nowhere: whole on each rank
    assert nobody.mesh.shape == (2, 2, 2, 1, 1)
    clash = init_device_mesh("cpu", (2, 4), mesh_dim_names=("shard", "x"))
    assert split_replicated(clash, (1,), 2).mesh.mesh_dim_names == ("shard", "replicate", "shard_2")


def half_of_an_axis():
    root = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    dp = root["dp_replicate", "dp_shard"]._flatten("dp")
    spmd_mesh_of(dp, root["dp_shard"])


def no_common_root():
    pair = dist.get_rank() // 2 * 2
    split_world("cpu", 2)
    alone = DeviceMesh.from_group(dist.new_group([pair, pair + 1], use_local_synchronization=True), "cpu")
    across = [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    if dist.get_rank() >= 4:
        across = [rank + 4 for rank in across]
    other = DeviceMesh.from_group(dist.new_group(across, use_local_synchronization=True), "cpu", mesh_dim_names=("dp",))
    spmd_mesh_of(alone, other)


def two_device_types():
    spmd_mesh_of(DeviceMesh.from_group(dist.group.WORLD, "cuda"), init_device_mesh("cpu", (8,)))


def no_common_numbering():
    root = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    ranks = torch.tensor([[0, 5], [2, 7], [4, 1], [6, 3]])  # the pairs are no rows of the other mesh
    spmd_mesh_of(DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b"))["b"], root["dp"])


def does_not_divide():
    root = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    split_replicated(root, (0,), 3)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (half_of_an_axis, ("of the 4 ranks along 'dp'", "2 are on the data mesh", "dp=4", "dp_shard=2", "replicates")),
        (no_common_root, ("axis 0=2", "dp=2", "neither's root holds the ranks of both", "the root mesh")),
        (two_device_types, ("'cuda'", "'cpu'", "slices of one mesh")),
        (no_common_numbering, ("b=2", "dp=4", "do not cross", "of one mesh")),
        (does_not_divide, ("over 3 ranks", "the 4 ranks", "dp=4, tp=2", "shard_size=2")),
    ],
)
@sim.ranks(8, backends=("sim",))
def test_errors_say_what_and_why(ctx, body, words):
    with pytest.raises(ValueError) as caught:
        body()
    message = str(caught.value)
    assert message.startswith("cannot ")
    assert len(message.splitlines()) == 3
    assert message.splitlines()[2].startswith("  try: ")
    assert [word for word in words if word not in message] == [], message


@sim.ranks(4, backends=("sim",))
def test_a_rank_that_is_not_on_the_mesh(ctx):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    few = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    if dist.get_rank() >= 2:
        with pytest.raises(ValueError, match=r"the calling rank is not on the parameter's mesh\n.*tp=2"):
            spmd_mesh_of(few, mesh)
        with pytest.raises(ValueError, match=r"the calling rank is not on the data mesh\n.*tp=2"):
            spmd_mesh_of(mesh, few)
        with pytest.raises(ValueError, match=r"the calling rank is not on the parameters' mesh\n.*tp=2"):
            split_replicated(few, (0,), 2)


@sim.ranks(8, backends=("sim",))
def test_numbering_that_differs_elsewhere_only(ctx):
    """Rank 0 sees two slices that cross; what it would make of them is no slice of the other mesh."""
    root = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "x", "tp"))
    ranks = torch.tensor([[0, 1], [2, 3], [4, 6], [5, 7]])
    other = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "tp"))
    with pytest.raises(ValueError, match="number the ranks differently"):
        spmd_mesh_of(other["tp"], root["dp"])


@pytest.mark.tier("test")
@sim.ranks(12, backends=("sim",))
def test_a_mesh_of_one_axis_that_was_unflattened(ctx):
    """Then the slices of the result have a root of one axis, along which all of them lie."""
    line = init_device_mesh("cpu", (12,), mesh_dim_names=("world",))
    grid = line._unflatten(0, (2, 3, 2), ("pp", "dp", "tp"))
    first = dist.get_rank() // 6 * 6
    spmd = spmd_mesh_of(grid["tp"], grid["dp"])
    assert spmd.mesh.mesh.tolist() == [[first, first + 2, first + 4], [first + 1, first + 3, first + 5]]
    threes = line._unflatten(0, (4, 3), ("a", "b"))["b"]
    pairs = line._unflatten(0, (3, 2, 2), ("x", "y", "z"))["y"]
    with pytest.raises(ValueError, match=r"do not cross|are on the data mesh"):
        spmd_mesh_of(threes, pairs)


def test_nothing_outlives_the_world():
    def body():
        root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        spmd_mesh_of(root["tp"], root["dp"])
        split_replicated(root, (0,), 2)
        mesh = split_world("cpu", 4)  # holds the default group
        return weakref.ref(root), weakref.ref(mesh), weakref.ref(dist.group.WORLD)

    held = sim.run(body, world_size=4)
    gc.collect()
    assert [[thing() for thing in things] for things in held] == [[None] * 3] * 4
