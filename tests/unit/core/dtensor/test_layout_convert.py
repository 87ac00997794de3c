"""Layouts to and from DTensors and DeviceMeshes, on a process group that only pretends to have other ranks."""

import math
import pickle
import re
from itertools import permutations

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hyper_parallel.core.dtensor import flatten_axes, in_split_order, layout_of, reorder_axes, to_placements, to_torch
from hyper_parallel.core.dtensor.dtensor import DTensor as DTensorAgain
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement as PlacementAgain
from hyper_parallel.core.dtensor.placement_types import Shard as ShardAgain


@pytest.fixture(params=[0, 7])
def mesh(request):
    """A (dp=2, cp=2, tp=3) mesh, as seen from one of its ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=12)
    yield init_device_mesh("cpu", (2, 2, 3), mesh_dim_names=("dp", "cp", "tp"))
    dist.destroy_process_group()


def test_the_types_are_torch_s_own():
    assert DTensorAgain is DTensor
    assert ShardAgain is Shard
    assert issubclass(Shard, PlacementAgain)


def test_from_device_mesh(mesh):
    layout = Layout.from_device_mesh(mesh)
    assert layout == Layout((2, 2, 3), ("dp", "cp", "tp"))
    assert layout.mesh is mesh
    assert layout("dp", "None").mesh is mesh
    assert layout("dp").placement_to_tensor_map(2).tensor_map_to_placement().reset_partial().mesh is mesh
    assert pickle.loads(pickle.dumps(layout("dp"))).mesh is None
    assert pickle.loads(pickle.dumps(layout("dp"))) == layout("dp")
    assert hash(layout("dp")) == hash(Layout((2, 2, 3), ("dp", "cp", "tp"))("dp"))


def test_from_a_slice_of_a_mesh(mesh):
    rank = dist.get_rank()
    assert Layout.from_device_mesh(mesh["tp"]) == Layout((3,), ("tp",), range(rank // 3 * 3, rank // 3 * 3 + 3))
    one = mesh["dp", "tp"]
    assert Layout.from_device_mesh(one).rank_list == tuple(one.mesh.flatten().tolist())


def test_from_a_mesh_without_names(mesh):
    bare = init_device_mesh("cpu", (4, 3))
    layout = Layout.from_device_mesh(bare)
    assert layout == Layout((4, 3), ("axis0", "axis1"))
    assert layout.with_mesh(None).with_mesh(bare).mesh is bare


def test_under_a_fake_tensor_mode(mesh):
    with FakeTensorMode():
        assert Layout.from_device_mesh(mesh).rank_list == tuple(range(12))
        x = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Replicate(), Partial()])
        assert Layout.of(x).alias_placements == ("dp", "None")
        assert reorder_axes(mesh, ("tp", "dp", "cp")).shape == (3, 2, 2)


def test_the_calling_rank_is_the_default(mesh):
    layout = Layout.from_device_mesh(mesh)(("dp", "tp"))
    assert layout.local_shape((13,)) == layout.local_shape((13,), dist.get_rank())
    assert layout.local_slice((13,)) == layout.local_slice((13,), dist.get_rank())


def test_with_mesh(mesh):
    layout = Layout((2, 2, 3), ("dp", "cp", "tp"))("dp")
    assert layout.with_mesh(mesh).mesh is mesh
    assert layout.with_mesh(mesh) == layout
    assert layout.mesh is None
    text = """cannot put a layout on a mesh: mesh has other axes or ranks than the layout
  layout: (a)   mesh: a=12   given: (no assignment) on dp=2, cp=2, tp=3
  try: the mesh that it was made for"""
    with pytest.raises(ValueError, match=re.escape(text)):
        Layout((12,), ("a",))("a").with_mesh(mesh)


@pytest.mark.parametrize("order", list(permutations(("dp", "cp", "tp"))))
@pytest.mark.parametrize("size", [24, 12, 0])
def test_even_splits_in_every_order_are_dtensors(mesh, order, size):
    layout = Layout.from_device_mesh(mesh)("None", order)
    full = torch.arange(2.0 * size).reshape(2, size)
    place, placements = to_torch(layout, full.shape)
    assert place is mesh
    assert placements == to_placements(layout, full.shape) == layout.placements
    x = distribute_tensor(full, place, placements, src_data_rank=None)
    assert torch.equal(x.to_local(), full[layout.local_slice(full.shape)])
    assert Layout.of(x) == layout
    assert Layout.of(x).alias_placements == layout.alias_placements
    assert Layout.of(x).mesh is mesh


@pytest.mark.parametrize("order", list(permutations(("dp", "cp", "tp"))))
@pytest.mark.parametrize("size", [23, 13, 7, 1])
def test_uneven_splits_in_every_order_are_dtensors_on_a_mesh_in_split_order(mesh, order, size):
    layout = Layout.from_device_mesh(mesh)(order, "None")
    full = torch.arange(2.0 * size).reshape(size, 2)
    place, placements = to_torch(layout, full.shape)
    assert placements == (Shard(0),) * 3
    assert place.mesh_dim_names == order
    assert (place is mesh) is (order == ("dp", "cp", "tp"))
    assert [place.get_group(name) for name in order] == [mesh.get_group(name) for name in order], "no new groups"
    assert to_torch(layout, full.shape)[0] == place
    x = distribute_tensor(full, place, placements, src_data_rank=None)
    assert torch.equal(x.to_local(), full[layout.local_slice(full.shape)])
    assert Layout.of(x).slices(x.shape).shape == (12, 2, 2)
    for rank in range(12):
        assert Layout.of(x).local_slice(x.shape, rank) == layout.local_slice(x.shape, rank)


def test_a_default_order_dim_beside_an_uneven_re_ordered_one(mesh):
    layout = Layout.from_device_mesh(mesh)(("tp", "dp"), "cp")
    place, placements = to_torch(layout, (7, 5))
    assert place.mesh_dim_names == ("cp", "tp", "dp")
    assert placements == (Shard(1), Shard(0), Shard(0))
    full = torch.arange(35).reshape(7, 5)
    x = distribute_tensor(full, place, placements, src_data_rank=None)
    assert torch.equal(x.to_local(), full[layout.local_slice((7, 5))])


def test_axes_of_size_1_do_not_make_a_split_uneven():
    layout = Layout((1, 4), ("dp", "tp"))(("tp", "dp"))
    assert to_placements(layout, (7,)) == (Shard(0), Shard(0))


def test_in_split_order():
    layout = Layout((2, 3), ("dp", "tp"))("dp", "tp")
    assert in_split_order(layout, 2) is layout
    turned = in_split_order(Layout((2, 3), ("dp", "tp"), range(10, 16))(("tp", "dp"), partial={}), 2)
    assert turned == Layout((3, 2), ("tp", "dp"), (10, 13, 11, 14, 12, 15))(("tp", "dp"))
    partial = in_split_order(Layout((2, 3, 2), ("dp", "tp", "cp"))(("tp", "dp"), partial={"cp": "avg"}), 1)
    assert partial.partial == {"cp": "avg"}
    assert partial.alias_name == ("tp", "dp", "cp")


def test_partials(mesh):
    layout = Layout.from_device_mesh(mesh)("tp", partial={"dp": "prod", "cp": "prod"})
    _, placements = to_torch(layout, (6,))
    assert placements == (Partial("product"), Partial("product"), Shard(0))
    x = DTensor.from_local(torch.ones(2), mesh, placements)
    assert Layout.of(x) == layout
    assert Layout.of(x).partial == {"dp": "prod", "cp": "prod"}
    mixed = Layout.from_device_mesh(mesh)(partial={"dp": "sum", "tp": "avg"})
    for convert in (to_torch, to_placements):
        with pytest.raises(ValueError, match=r"sum over 'dp', avg over 'tp' are pending"):
            convert(mixed, (6,))


def test_of_says_what_a_layout_cannot_say(mesh):
    local = torch.ones(3, 2)
    uneven = DTensor.from_local(
        local, mesh, [_StridedShard(0, split_factor=3), Replicate(), Shard(0)], shape=torch.Size((13, 2)), stride=(2, 1)
    )
    text = "cannot read the layout of a DTensor: dim 0 (size 13) is split over 'tp' then 'dp', against the order"
    with pytest.raises(ValueError, match=re.escape(text)):
        layout_of(uneven)
    view = DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=5), Replicate(), Replicate()])
    with pytest.raises(ValueError, match="no order of the axes gives 'dp' the split factor 5"):
        layout_of(view)
    masked = DTensor.from_local(local, mesh, [_MaskPartial(offset_shape=(3, 2)), Replicate(), Replicate()])
    with pytest.raises(ValueError, match=r"on axis 'dp' carries more than a layout can say\n.*\n  try: x.redistribute"):
        layout_of(masked)
    bitwise = DTensor.from_local(local.int(), mesh, [Partial("bor"), Replicate(), Replicate()])
    with pytest.raises(ValueError, match="no reduction is called 'bor'"):
        layout_of(bitwise)


def test_of_reads_the_order_that_torch_keeps_beside_plain_placements(mesh):
    x = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Replicate(), Shard(0)])
    if not x._spec.shard_order:
        pytest.skip("this torch keeps no order beside the placements")
    entry = type(x._spec.shard_order[0])
    x._spec.shard_order = (entry(0, (2, 0)),)
    assert Layout.of(x).alias_placements == (("tp", "dp"), "None")


def test_flatten_axes(mesh):
    first = flatten_axes(mesh, ("dp", "tp"), "fsdp")
    assert first.mesh_dim_names == ("fsdp",)
    assert first.size() == 6
    assert sorted(first.mesh.tolist()) == sorted(mesh["dp", "tp"].mesh.flatten().tolist())
    assert flatten_axes(mesh, ["dp", "tp"], "fsdp") is first
    everything = flatten_axes(mesh, ("dp", "cp", "tp"), "all")
    assert everything.mesh.tolist() == list(range(12))
    assert flatten_axes(mesh, mesh.mesh_dim_names, "all") is everything
    one = flatten_axes(mesh, ("cp",), "solo")
    assert one.mesh.tolist() == mesh["cp"].mesh.tolist()
    assert flatten_axes(mesh["cp"], ("cp",), "cp").mesh_dim_names == ("cp",)


@pytest.mark.parametrize(
    ("names", "name", "kind", "text"),
    [
        (
            ("dp", "pt"),
            "x",
            ValueError,
            """cannot flatten axes into 'x': no axis is called 'pt'
  names: ('dp', 'pt')   mesh: dp=2, cp=2, tp=3
  try: 'tp'""",
        ),
        (
            ("tp", "dp"),
            "x",
            ValueError,
            """cannot flatten axes into 'x': names must hold each axis once, in mesh order
  names: ('tp', 'dp')   name: 'x'   mesh: dp=2, cp=2, tp=3
  try: ('dp', 'tp')""",
        ),
        (("dp", "dp"), "x", ValueError, "cannot flatten axes into 'x': names must hold each axis once"),
        ((), "x", ValueError, "cannot flatten axes into 'x': names is empty"),
        (("dp", 1), "x", ValueError, "cannot flatten axes into 'x': no axis is called 1"),
        (
            ("dp", "cp"),
            "tp",
            ValueError,
            """cannot flatten axes into 'tp': the name 'tp' is taken, by an axis or by other axes flattened before
  names: ('dp', 'cp')   name: 'tp'   mesh: dp=2, cp=2, tp=3
  try: another name, such as 'dp_cp'""",
        ),
        (("cp", "tp"), "taken", ValueError, "the name 'taken' is taken, by an axis or by other axes flattened before"),
    ],
)
def test_flatten_axes_errors(mesh, names, name, kind, text):
    flatten_axes(mesh, ("dp", "cp"), "taken")
    with pytest.raises(kind, match=re.escape(text)):
        flatten_axes(mesh, names, name)


def test_flatten_axes_needs_names(mesh):
    text = "cannot flatten axes into 'x': the mesh has no axis names"
    with pytest.raises(ValueError, match=re.escape(text)):
        flatten_axes(init_device_mesh("cpu", (4, 3)), ("axis0", "axis1"), "x")


def test_reorder_axes(mesh):
    assert reorder_axes(mesh, ("dp", "cp", "tp")) is mesh
    turned = reorder_axes(mesh, ("tp", "dp", "cp"))
    assert turned.shape == (3, 2, 2)
    assert torch.equal(turned.mesh, mesh.mesh.permute(2, 0, 1))
    assert turned == reorder_axes(mesh, ("tp", "dp", "cp"))
    for name in ("dp", "cp", "tp"):
        assert turned.get_group(name) == mesh.get_group(name)
        assert turned.get_local_rank(name) == mesh.get_local_rank(name)
    text = """cannot re-order the axes of a mesh: names must hold each axis of the mesh once
  names: ('tp', 'dp')   mesh: dp=2, cp=2, tp=3
  try: ('dp', 'cp', 'tp')"""
    with pytest.raises(ValueError, match=re.escape(text)):
        reorder_axes(mesh, ("tp", "dp"))


@pytest.mark.parametrize("size", [6, 7])
def test_a_rank_that_is_not_on_the_mesh(mesh, size):
    others = [rank for rank in range(12) if rank != dist.get_rank()][:6]
    away = DeviceMesh("cpu", torch.tensor(others).reshape(2, 3), mesh_dim_names=("dp", "tp"))
    layout = Layout.from_device_mesh(away)(("tp", "dp"))
    assert math.prod(layout.mesh_shape) == 6
    if size == 6:
        assert to_torch(layout, (size,))[0] is away
        return
    with pytest.raises(ValueError, match=r"cannot make a DTensor off the mesh: dim 0 \(size 7\)"):
        to_torch(layout, (size,))
    with pytest.raises(ValueError, match="cannot re-order the axes of a mesh: the calling rank is not on the mesh"):
        reorder_axes(away, ("tp", "dp"))
