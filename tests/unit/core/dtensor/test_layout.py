"""The Layout value: both ways to make one, its forms, its properties, and what makes two of them equal."""

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hyper_parallel.core.dtensor.layout import Layout

MESH = Layout((2, 4), ("dp", "tp"))
SHUFFLED = (3, 0, 7, 1, 5, 4, 2, 6)


def test_a_mesh_without_an_assignment():
    assert MESH.mesh_shape == (2, 4)
    assert MESH.alias_name == ("dp", "tp")
    assert MESH.rank_list == (0, 1, 2, 3, 4, 5, 6, 7)
    assert MESH.mesh is None
    assert (MESH.alias_placements, MESH.placements, MESH.tensor_map) == (None, None, None)
    assert MESH.partial == {}
    assert not MESH.is_partial()


@pytest.mark.parametrize("ranks", [SHUFFLED, list(SHUFFLED), np.array(SHUFFLED), range(8, 16), range(7, -1, -1)])
def test_rank_list_is_a_tuple_of_ints(ranks):
    layout = Layout([2, 4], ["dp", "tp"], rank_list=ranks)
    assert layout.rank_list == tuple(int(rank) for rank in ranks)
    assert all(type(rank) is int for rank in layout.rank_list)


def test_numpy_sizes_become_ints():
    assert repr(Layout(np.array([2, 4]), ("dp", "tp"))) == repr(MESH)


@pytest.mark.parametrize(
    ("entries", "alias", "tensor_map", "placements"),
    [
        ((), (), (), (Replicate(), Replicate())),
        (("dp", "None"), ("dp", "None"), (1, -1), (Shard(0), Replicate())),
        (("dp", None), ("dp", "None"), (1, -1), (Shard(0), Replicate())),
        (("None", "tp"), ("None", "tp"), (-1, 0), (Replicate(), Shard(1))),
        ((("dp", "tp"), "None"), (("dp", "tp"), "None"), ((1, 0), -1), (Shard(0), Shard(0))),
        ((("tp", "dp"), "None"), (("tp", "dp"), "None"), ((0, 1), -1), (_StridedShard(0, split_factor=4), Shard(0))),
        ((("dp", "tp"),), (("dp", "tp"),), ((1, 0),), (Shard(0), Shard(0))),
        ((["dp", "tp"],), (("dp", "tp"),), ((1, 0),), (Shard(0), Shard(0))),
        ((("dp",), "tp"), ("dp", "tp"), (1, 0), (Shard(0), Shard(1))),
    ],
)
def test_alias_form(entries, alias, tensor_map, placements):
    layout = MESH(*entries)
    assert layout.alias_placements == alias
    assert layout.tensor_map == tensor_map
    assert layout.placements == placements
    assert layout.tensor_map_to_placement().placement_to_tensor_map(len(alias)).alias_placements == alias


def test_three_axes_in_every_order():
    mesh = Layout((2, 3, 5), ("a", "b", "c"))
    factors = {
        ("a", "b", "c"): (1, 1, 1),
        ("a", "c", "b"): (1, 5, 1),
        ("b", "a", "c"): (3, 1, 1),
        ("b", "c", "a"): (15, 1, 1),
        ("c", "a", "b"): (5, 5, 1),
        ("c", "b", "a"): (15, 5, 1),
    }
    for order, wanted in factors.items():
        layout = mesh(order)
        assert tuple(getattr(p, "split_factor", 1) for p in layout.placements) == wanted
        assert layout.tensor_map_to_placement().placement_to_tensor_map(1).alias_placements == (order,)


def test_placement_form():
    layout = MESH(Shard(0), Replicate())
    assert layout == MESH((Shard(0), Replicate())) == MESH([Shard(0), Replicate()])
    assert layout.placements == (Shard(0), Replicate())
    assert layout.alias_placements is None
    assert layout.tensor_map is None
    filled = layout.placement_to_tensor_map(3)
    assert filled.tensor_map == (1, -1, -1)
    assert filled.alias_placements == ("dp", "None", "None")
    assert filled.tensor_map_to_placement().tensor_map is None
    assert repr(filled.tensor_map_to_placement()) == repr(layout)


def test_negative_dims_are_resolved():
    layout = MESH(Shard(-1), Shard(-2))
    assert layout.placement_to_tensor_map(2).tensor_map == (0, 1)
    assert layout.placement_to_tensor_map(3).tensor_map == (-1, 0, 1)
    assert layout.local_shape((4, 6), rank=0) == (1, 3)
    both = MESH(Shard(0), Shard(-1))
    assert both.placement_to_tensor_map(1).alias_placements == (("dp", "tp"),)


def test_a_scalar():
    assert MESH().placement_to_tensor_map(0).tensor_map == ()
    assert MESH().local_shape((), rank=3) == ()
    assert MESH().slices(()).shape == (8, 0, 2)


def test_strided_placements_are_read():
    layout = MESH(_StridedShard(0, split_factor=4), Shard(0))
    assert layout == MESH(("tp", "dp"))
    assert layout.placement_to_tensor_map(2).alias_placements == (("tp", "dp"), "None")


def test_partial():
    layout = MESH("dp", "None", partial={"tp": "sum"})
    assert layout.partial == {"tp": "sum"}
    assert layout.is_partial()
    assert layout.placements == (Shard(0), Partial("sum"))
    assert layout.reset_partial() == MESH("dp", "None")
    assert layout.partial == {"tp": "sum"}, "reset_partial returns a new layout"
    assert MESH(Shard(0), Partial("sum")).placement_to_tensor_map(2) == layout
    assert layout("tp").partial == {}, "a new assignment starts without reductions"


def test_the_partial_dict_is_a_copy():
    layout = MESH(partial={"tp": "sum"})
    layout.partial["dp"] = "max"
    assert layout.partial == {"tp": "sum"}


@pytest.mark.parametrize("reduction", ["sum", "avg", "max", "min", "prod"])
def test_every_reduction(reduction):
    layout = MESH(partial={"dp": reduction})
    torch_name = "product" if reduction == "prod" else reduction
    assert layout.placements == (Partial(torch_name), Replicate())
    assert MESH(Partial(torch_name), Replicate()) == layout
    assert MESH(partial={"dp": torch_name}) == layout
    assert MESH(Replicate(), Replicate(), partial={"dp": reduction}) == layout
    assert MESH(Partial(torch_name), Replicate(), partial={"dp": reduction}) == layout


def test_repeat_num():
    mesh = Layout((2, 3, 5), ("a", "b", "c"))
    assert mesh().repeat_num() == 30
    assert mesh("b").repeat_num() == 10
    assert mesh(("c", "a"), "b").repeat_num() == 1
    assert mesh("b", partial={"c": "sum"}).repeat_num() == 2
    assert mesh(Shard(-1), Replicate(), Partial()).repeat_num() == 3


def test_local_shape_follows_chunk():
    layout = MESH("tp", "dp")
    assert [layout.local_shape((5, 3), rank) for rank in range(4)] == [(2, 2), (2, 2), (1, 2), (0, 2)]
    assert layout.local_shape(torch.Size((5, 3)), rank=7) == (0, 1)
    assert layout.local_slice((5, 3), rank=6) == (slice(4, 5), slice(2, 3))


def test_order_of_axes_matters():
    full = torch.arange(7)
    tp_outside, dp_outside = MESH(("tp", "dp")), MESH(("dp", "tp"))
    assert [full[tp_outside.local_slice((7,), rank)].tolist() for rank in range(8)] == [
        [0], [2], [4], [6], [1], [3], [5], [],
    ]  # fmt: skip
    assert [full[dp_outside.local_slice((7,), rank)].tolist() for rank in range(8)] == [
        [0], [1], [2], [3], [4], [5], [6], [],
    ]  # fmt: skip


def test_slices_agree_with_local_slice_for_any_rank_list():
    layout = Layout((2, 4), ("dp", "tp"), SHUFFLED)(("tp", "dp"), "None")
    table = layout.slices((11, 3))
    assert table.dtype == np.int64
    for row, rank in zip(table.tolist(), layout.rank_list, strict=True):
        assert [[part.start, part.stop] for part in layout.local_slice((11, 3), rank)] == row


def test_dims_beyond_the_entries_are_not_split():
    assert MESH("dp").local_shape((4, 6, 8), rank=0) == (2, 6, 8)
    assert MESH("dp").placement_to_tensor_map(3).tensor_map == (1, -1, -1)


def test_splits():
    assert MESH(("tp", "dp"), "None").splits(3) == ((1, 0), (), ())
    assert MESH(Replicate(), Shard(-1)).splits(2) == ((), (1,))


def test_to_dict():
    layout = MESH(("tp", "dp"), "None")
    assert layout.to_dict() == {
        "mesh_shape": (2, 4),
        "tensor_map": ((0, 1), -1),
        "alias_name": ("dp", "tp"),
        "rank_list": (0, 1, 2, 3, 4, 5, 6, 7),
        "partial": {},
    }
    assert MESH.to_dict()["tensor_map"] is None
    assert MESH(Shard(-1), Replicate()).to_dict()["placements"] == ((-1, 1), None)


LAYOUTS = [
    MESH,
    MESH(),
    MESH("dp", "None"),
    MESH(("tp", "dp"), None, partial={}),
    MESH("None", "tp", partial={"dp": "prod"}),
    MESH(Shard(-1), Partial("product")),
    MESH(_StridedShard(0, split_factor=4), Shard(0)),
    MESH(_StridedShard(-1, split_factor=4), Shard(-1)),
    Layout((1,), ("x",), (5,))("x"),
    Layout((2, 2), ("a", "b"), (0, 1, 4, 5))("b", "a"),
    Layout((2, 2), ("a b", 'c"d'), range(8, 16, 2))('c"d'),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_round_trips(layout):
    assert Layout.from_dict(layout.to_dict()) == layout
    assert Layout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout
    names = {
        "Layout": Layout,
        "Shard": Shard,
        "Replicate": Replicate,
        "Partial": Partial,
        "_StridedShard": _StridedShard,
    }
    pasted = eval(repr(layout), names)
    assert pasted == layout
    assert repr(pasted) == repr(layout)
    for other in (Layout.from_dict(layout.to_dict()), pickle.loads(pickle.dumps(layout))):
        assert repr(other) == repr(layout)
        assert hash(other) == hash(layout)


def test_from_dict_fills_in_what_may_be_left_out():
    assert Layout.from_dict({"mesh_shape": [2, 4], "alias_name": ["dp", "tp"]}) == MESH
    assert Layout.from_dict({"mesh_shape": [2, 4], "alias_name": ["dp", "tp"], "tensor_map": [-1, 0]}) == MESH(
        None, "tp"
    )


def test_repr_and_str():
    assert repr(MESH("dp", None, partial={"tp": "sum"})) == (
        "Layout((2, 4), ('dp', 'tp'))('dp', 'None', partial={'tp': 'sum'})"
    )
    assert repr(MESH(Shard(0), Partial("sum"))) == "Layout((2, 4), ('dp', 'tp'))(Shard(0), Partial('sum'))"
    assert str(MESH) == "(no assignment) on dp=2, tp=4"
    assert str(MESH(("tp", "dp"), None)) == "(tp>dp, -) on dp=2, tp=4"
    assert str(MESH(None, "tp", partial={"dp": "max"})) == "(-, tp) pending max over dp on dp=2, tp=4"
    assert str(MESH(Shard(0), Partial())) == "(Shard(0), Replicate()) pending sum over tp on dp=2, tp=4"
    assert str(Layout((4,), ("dp",), range(4, 8))("dp")) == "(dp) on dp=4 (ranks 4..7)"


def test_equality_is_by_meaning():
    assert MESH("dp", "None") == MESH("dp") == MESH(Shard(0), Replicate())
    assert MESH("dp", None).placement_to_tensor_map(3) == MESH("dp")
    assert hash(MESH("dp", "None")) == hash(MESH(Shard(0), Replicate()))
    assert MESH(("dp", "tp")) != MESH(("tp", "dp"))
    assert MESH("dp") != MESH(None, "dp")
    assert MESH("dp") != MESH("tp")
    assert MESH() != MESH
    assert MESH() != MESH(partial={"tp": "sum"}) != MESH(partial={"tp": "avg"})
    assert Layout((2, 4), ("dp", "cp")) != MESH
    assert Layout((4, 2), ("dp", "tp")) != MESH
    assert Layout((2, 4), ("dp", "tp"), SHUFFLED) != MESH
    assert Layout((2, 4), ("dp", "tp"), list(range(8))) == MESH
    assert MESH(Shard(-1), Replicate()) != MESH("dp")
    assert MESH(Shard(-1), Replicate()).placement_to_tensor_map(1) == MESH("dp")
    assert MESH != "dp=2, tp=4"
    one = Layout((1, 4), ("dp", "tp"))
    assert one(("dp", "tp")) == one(("tp", "dp")), "an axis of size 1 has no place in the order"
    assert one(("dp", "tp")) != one("tp"), "but it is an axis of the split"
    assert len({MESH("dp"), MESH("dp", None), MESH(Shard(0), Replicate())}) == 1


def test_a_layout_never_changes():
    layout = MESH("dp")
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'mesh_shape'"):
        layout.mesh_shape = (1,)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field '_axes'"):
        del layout._axes
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'new'"):
        layout.new = 1
    assert copy.copy(layout) is layout
    assert copy.deepcopy(layout) is layout


@pytest.mark.tier("full")
def test_a_pickle_from_another_process_is_equal():
    program = (
        "import pickle, sys; from hyper_parallel.core.dtensor.layout import Layout;"
        "sys.stdout.buffer.write(pickle.dumps(Layout((2, 4), ('dp', 'tp'))(('tp', 'dp'))))"
    )
    other = pickle.loads(subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True).stdout)
    assert other == MESH(("tp", "dp"))
    assert hash(other) == hash(MESH(("tp", "dp"))), "the hash is computed here, where str hashes differ"


def best_of(count, function):
    times = []
    for _ in range(count):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def test_100_000_ranks():
    mesh = Layout((25, 40, 10, 10), ("pp", "dp", "cp", "tp"))
    layout = mesh(("tp", "dp"), "cp", "None", "pp")
    shape = (1_000_003, 777, 5, 64)
    table = layout.slices(shape)
    assert table.shape == (100_000, 4, 2)
    assert table[99_999].tolist() == [[part.start, part.stop] for part in layout.local_slice(shape, 99_999)]
    assert best_of(10, lambda: layout.slices(shape)) < 0.5
    again = Layout((25, 40, 10, 10), ("pp", "dp", "cp", "tp"))(("tp", "dp"), "cp", "None", "pp")
    assert best_of(10, lambda: (again == layout, hash(again))) < 0.001
    assert len(pickle.dumps(layout)) < 1000
    shuffled = tuple(np.random.default_rng(0).permutation(100_000).tolist())
    one, two = (Layout((25, 40, 10, 10), ("pp", "dp", "cp", "tp"), shuffled)("dp") for _ in range(2))
    assert one == two
    assert best_of(10, lambda: (hash(one), one == layout, one == one("dp"))) < 0.001


def test_equal_hashes_do_not_make_layouts_equal():
    assert hash(MESH(Shard(-1), Replicate())) == hash(MESH(Shard(-2), Replicate())), "as hash(-1) == hash(-2)"
    assert MESH(Shard(-1), Replicate()) != MESH(Shard(-2), Replicate())
    for other in (Layout((2, 4), ("dp", "tp"), SHUFFLED), Layout((4, 2), ("dp", "tp")), Layout((2, 4), ("dp", "cp"))):
        collided = copy.copy(other("dp", None))
        object.__setattr__(collided, "_hash", hash(MESH("dp")))
        object.__setattr__(collided._axes, "_hash", hash(MESH._axes))
        assert collided != MESH("dp")
