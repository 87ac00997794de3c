"""Every error of a Layout: its type, and all four parts of its text."""

import numpy as np
import pytest
from errors_kit import assert_says
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hyper_parallel import HyperParallelError
from hyper_parallel.core.dtensor import in_split_order, to_placements, to_torch
from hyper_parallel.core.dtensor.layout import Layout

L = Layout((3, 2), ("dp", "tp"))

ERRORS = {
    "unknown axis": (
        lambda: L("td", "None"),
        "cannot split dim 0 over 'td': no axis is called 'td'\n  layout: ('td', 'None')   mesh: dp=3, tp=2\n"
        "  try: 'tp'",
    ),
    "unknown axis, none near": (
        lambda: L("None", ("dp", "x")),
        "cannot split dim 1 over 'x': no axis is called 'x'\n  layout: ('None', ('dp', 'x'))   mesh: dp=3, tp=2\n"
        "  try: one of 'dp', 'tp'",
    ),
    "empty name as an entry": (lambda: L(""), "cannot split dim 0 over '': no axis is called ''\n  …\n  try: …"),
    "axis used twice": (
        lambda: L("dp", "dp"),
        "cannot split dim 1 over 'dp': axis 'dp' already splits dim 0\n  layout: ('dp', 'dp')   mesh: dp=3, tp=2\n"
        '  try: "None" in one of the two places',
    ),
    "None among several": (
        lambda: L(("dp", "None")),
        "cannot split dim 0 over 'None': \"None\" is no axis, so it cannot be one of several\n"
        "  layout: (('dp', 'None'),)\n  try: one entry per dim, without the inner brackets: ('dp', 'None')",
    ),
    "an empty entry": (
        lambda: L((), "dp"),
        "cannot read a layout: the entry of dim 0 is empty\n  layout: ((), 'dp')\n"
        '  try: "None" for a dim that is not split',
    ),
    "an entry of another type": (
        lambda: L(3),
        "InvalidType: cannot split dim 0 over 3: an entry is an axis name, a tuple of names, or None, not a int\n"
        "  layout: (3,)\n  try: layout('dp', \"None\")",
    ),
    "forms mixed": (
        lambda: L(Shard(0), "tp"),
        "cannot read a layout from placements: entry 1, 'tp', is no placement, and the two forms do not mix\n"
        "  placements: (Shard(dim=0), 'tp')   mesh: dp=3, tp=2\n"
        "  try: names only (one per dim) or placements only (one per axis)",
    ),
    "forms mixed in a tuple": (lambda: L(("tp", Shard(0))), "cannot …entry 0, 'tp', is no placement…\n  …\n  try: …"),
    "a placement class": (
        lambda: L(Shard(0), Replicate),
        "InvalidType: cannot read a layout from placements: entry 1 is the class Replicate\n  …\n  try: …",
    ),
    "too few placements": (
        lambda: L(Shard(0)),
        "cannot read a layout from placements: there are 1 placements for 2 axes\n"
        "  placements: (Shard(dim=0),)   mesh: dp=3, tp=2\n  try: one for each of dp, tp",
    ),
    "a bitwise partial": (
        lambda: L(Partial("band"), Replicate()),
        "cannot leave a reduction pending over 'dp': no reduction is called 'band'\n"
        "  placements: (Partial(band), Replicate())   mesh: dp=3, tp=2\n"
        "  try: one of 'sum', 'avg', 'max', 'min', 'prod'",
    ),
    "impossible split factor": (
        lambda: L(_StridedShard(0, split_factor=3), Shard(0)),
        "cannot read strided placements: no order of the axes gives 'dp' the split factor 3\n"
        "  placements: (_StridedShard(0, split_factor=3), Shard(0))   mesh: dp=3, tp=2\n"
        "  try: a split factor that is the product of later axes on the same dim, or the alias form",
    ),
    "impossible split factor, known only with ndim": (
        lambda: L(_StridedShard(-1, split_factor=3), Shard(-1)).placement_to_tensor_map(2),
        "cannot …no order of the axes gives 'dp' the split factor 3\n  …\n  try: …",
    ),
    "splits and is partial": (
        lambda: L("dp", partial={"dp": "sum"}),
        "cannot leave a reduction pending over 'dp': axis 'dp' already splits dim 0\n"
        "  partial: {'dp': 'sum'}   mesh: dp=3, tp=2\n  try: 'dp' in one of the two places only",
    ),
    "splits by placement and is partial": (
        lambda: L(Replicate(), Shard(1), partial={"tp": "sum"}),
        "cannot leave a reduction pending over 'tp': axis 'tp' already splits dim 1\n  …\n  try: …",
    ),
    "two reductions": (
        lambda: L(Partial("sum"), Replicate(), partial={"dp": "max"}),
        "cannot leave a reduction pending over 'dp': axis 'dp' has 'sum' pending by its placement and 'max' by "
        "partial=\n  partial: {'dp': 'max'}   mesh: dp=3, tp=2\n  try: one of the two",
    ),
    "unknown reduction": (
        lambda: L(partial={"dp": "mean"}),
        "cannot leave a reduction pending over 'dp': no reduction is called 'mean'\n"
        "  partial: {'dp': 'mean'}   mesh: dp=3, tp=2\n  try: one of 'sum', 'avg', 'max', 'min', 'prod'",
    ),
    "partial over an unknown axis": (
        lambda: L(partial={"pd": "sum"}),
        "cannot leave a reduction pending over 'pd': no axis is called 'pd'\n"
        "  partial: {'pd': 'sum'}   mesh: dp=3, tp=2\n  try: 'dp'",
    ),
    "more entries than dims": (
        lambda: L("dp", "tp").local_shape((4,), 0),
        "cannot place a tensor: entry 1, 'tp', is for a dim that a tensor of ndim 1 does not have\n"
        "  layout: (dp, tp)   mesh: dp=3, tp=2\n  try: one entry per dim at most",
    ),
    "more entries than ndim": (
        lambda: L("dp", "None").placement_to_tensor_map(1),
        "cannot …entry 1, not split, is for a dim…\n  …\n  try: …",
    ),
    "Shard dim out of range": (
        lambda: L(Shard(3), Shard(0)).placement_to_tensor_map(2),
        "cannot split dim 3 over 'dp': the tensor has ndim 2\n  placements: (Shard(3), Shard(0))   mesh: dp=3, tp=2\n"
        "  try: a dim from -2 to 1",
    ),
    "Shard of a scalar": (
        lambda: L(Shard(0), Replicate()).slices(()),
        "cannot …\n  …\n  try: Replicate(); 0 dims cannot be split",
    ),
    "negative ndim": (
        lambda: L("dp").placement_to_tensor_map(-1),
        "cannot place a tensor: ndim must be at least 0\n  …\n  try: …",
    ),
    "no assignment": (
        lambda: L.slices((4,)),
        "cannot place a tensor: the layout is a mesh without an assignment\n"
        "  layout: (no assignment)   mesh: dp=3, tp=2\n"
        '  try: layout("dp", "None"), or layout() for everything replicated',
    ),
    "a negative size": (
        lambda: L("dp").slices((4, -2)),
        "cannot place a tensor: global_shape[1] must be at least 0\n  …\n  try: …",
    ),
    "rank not on the mesh": (
        lambda: L("dp").local_slice((4,), 6),
        "cannot find rank 6 on the mesh: rank is not one of its ranks\n  mesh: dp=3, tp=2   ranks: 0..5\n"
        "  try: rank=0, or a mesh that holds rank 6",
    ),
    "no rank to ask": (
        lambda: L("dp").local_shape((4,)),
        "cannot tell which shard a rank holds: no rank was given and torch.distributed is not initialized\n"
        "  layout: (dp)   mesh: dp=3, tp=2\n  try: rank=0",
    ),
    "lengths differ": (
        lambda: Layout((2, 4), ("dp",)),
        "cannot make a Layout: names has 1 entries and shape has 2\n  shape: (2, 4)   names: ('dp',)\n"
        "  try: one name per axis",
    ),
    "no axes": (
        lambda: Layout((), ()),
        "cannot make a Layout: shape has no axes\n  shape: ()   names: ()\n"
        '  try: one axis of size 1: Layout((1,), ("dp",))',
    ),
    "'None' as a name": (
        lambda: Layout((2, 4), ("dp", "None")),
        "cannot make a Layout: 'None', given for axis 1, cannot be an axis name\n"
        "  shape: (2, 4)   names: ('dp', 'None')\n  try: a name such as \"dp\"; \"None\" means a dim that is not split",
    ),
    "'' as a name": (
        lambda: Layout((2, 4), ("", "tp")),
        "cannot make a Layout: '', given for axis 0, cannot be an axis name\n  …\n  try: …",
    ),
    "repeated names": (
        lambda: Layout((2, 4), ("dp", "dp")),
        "cannot make a Layout: axis name 'dp' is given to axes 0 and 1\n  shape: (2, 4)   names: ('dp', 'dp')\n"
        "  try: a different name for each axis",
    ),
    "a size-0 axis": (
        lambda: Layout((2, 0), ("dp", "tp")),
        "cannot make a Layout: the size of axis 'tp' must be at least 1\n  the size of axis 'tp': 0\n"
        "  try: tp=1, or a mesh without 'tp'",
    ),
    "a negative axis": (
        lambda: Layout((-2,), ("dp",)),
        "cannot make a Layout: the size of axis 'dp' must be at least 1\n  …\n  try: …",
    ),
    "rank list of the wrong length": (
        lambda: Layout((2, 2), ("dp", "tp"), (0, 1)),
        "cannot make a Layout: rank_list has 2 ranks and the mesh has 4 places\n"
        "  shape: (2, 2)   names: ('dp', 'tp')\n  try: rank_list=range(4)",
    ),
    "a range of the wrong length": (
        lambda: Layout((2, 2), ("dp", "tp"), range(5)),
        "cannot make a Layout: rank_list has 5 ranks and the mesh has 4 places\n  …\n  try: …",
    ),
    "rank list with repeats": (
        lambda: Layout((2, 2), ("dp", "tp"), np.array([0, 1, 1, 2])),
        "cannot make a Layout: rank_list holds rank 1 more than once\n  shape: (2, 2)   names: ('dp', 'tp')\n"
        "  try: rank_list=range(4)",
    ),
    "a negative rank": (
        lambda: Layout((2,), ("dp",), range(-1, 1)),
        "cannot make a Layout: rank_list[0] must be at least 0\n  rank_list[0]: -1\n  try: rank_list=range(2)",
    ),
    "a missing key": (
        lambda: Layout.from_dict({"mesh_shape": (2,)}),
        "cannot read a layout from a dict: key 'alias_name' is missing\n  keys: mesh_shape\n"
        "  try: a dict with mesh_shape and alias_name",
    ),
    "an unknown key": (
        lambda: Layout.from_dict({"mesh_shape": (2,), "alias_name": ("dp",), "tensormap": ()}),
        "cannot read a layout from a dict: key 'tensormap' is unknown\n  keys: mesh_shape, alias_name, tensormap\n"
        "  try: 'tensor_map'",
    ),
    "a tensor map out of range": (
        lambda: Layout.from_dict({**L("dp").to_dict(), "tensor_map": (-1, 2)}),
        "cannot split dim 1 over axis 2: the mesh has 2 axes\n  tensor_map: (-1, 2)   mesh: dp=3, tp=2\n"
        "  try: 0 (tp) to 1 (dp), counted from the right, or -1",
    ),
    "placements of the wrong length": (
        lambda: Layout.from_dict({**L(Shard(0), Shard(1)).to_dict(), "placements": [None]}),
        "cannot read a layout: placements has 1 entries for 2 axes\n  placements: [None]   mesh: dp=3, tp=2\n"
        "  try: one for each of dp, tp",
    ),
    "placements of another form": (
        lambda: Layout.from_dict({**L(Shard(0), Shard(1)).to_dict(), "placements": [None, 0]}),
        "InvalidType: cannot read a layout: entry 1 of placements is 0\n  placements: [None, 0]   mesh: dp=3, tp=2\n"
        "  try: per axis None or (dim, split factor)",
    ),
    "uneven against mesh order": (
        lambda: to_placements(L(None, ("tp", "dp")), (4, 13)),
        "cannot make a DTensor of this shape: dim 1 (size 13) is split over 'tp' then 'dp', against the order of the "
        "mesh, and tp=2 * dp=3 does not divide it; torch places such a split in two ways that differ\n"
        "  global_shape: (4, 13)   layout: (-, tp>dp) on dp=3, tp=2\n"
        "  try: size 12 or 18 for dim 1; ('dp', 'tp') there; or a mesh with its axes in the order of the split",
    ),
    "uneven and smaller than the mesh": (
        lambda: to_placements(L(("tp", "dp")), (5,)),
        "cannot …\n  …\n  try: size 6 for dim 0; ('dp', 'tp') there…",
    ),
    "mixed reductions": (
        lambda: to_placements(L(partial={"dp": "sum", "tp": "max"}), (4,)),
        "cannot make a DTensor: sum over 'dp', max over 'tp' are pending, and torch keeps no order between kinds of "
        "reduction\n  layout: () pending sum over dp, max over tp on dp=3, tp=2\n"
        "  try: one kind, such as partial={'dp': 'sum', 'tp': 'sum'}, or reduce over one axis first",
    ),
    "no mesh": (
        lambda: to_torch(L("dp"), (4,)),
        "cannot make a DTensor: the layout was made without a DeviceMesh\n  layout: (dp) on dp=3, tp=2\n"
        "  try: Layout.from_device_mesh(mesh)(...), or layout.with_mesh(mesh)",
    ),
    "no assignment to convert": (
        lambda: to_placements(L, (4,)),
        "cannot …the layout is a mesh without an assignment\n  …\n  try: …",
    ),
    "no assignment to order": (
        lambda: in_split_order(L, 1),
        "cannot …the layout is a mesh without an assignment\n  …\n  try: …",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, expected = ERRORS[case]
    with pytest.raises(HyperParallelError) as caught:
        call()
    assert_says(caught.value, expected)
