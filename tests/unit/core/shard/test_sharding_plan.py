"""Reading of a ShardingPlan: every spelling of layouts, paths with globs, which argument a layout is for."""

import copy
import functools
import pickle
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.boundaries import Arguments, remade, spread
from hyper_parallel.core.shard.local_module import shared_axes
from hyper_parallel.core.shard.sharding_plan import ShardingPlan, matches, names_of, read_plan, resolve
from hyper_parallel.core.shard.spelling import describe, leaves, read_layout, read_layouts

MESH = Layout((2, 4), ("dp", "tp"))
ROWS, COLUMNS = MESH("dp", "None"), MESH("None", "tp")
WIDE = Layout((2, 2, 2, 2), ("dp", "cp", "ep", "tp"))
BY_ROWS, BY_COLUMNS = (Shard(0), Replicate()), (Replicate(), Shard(1))


def test_a_plan_is_empty_unless_told_otherwise():
    plan = ShardingPlan()
    assert (plan.plan, plan.input_plan, plan.output_plan, plan.return_local_tensor) == (None, None, None, None)
    assert plan.wrap_inputs is False
    assert plan == ShardingPlan() != ShardingPlan(plan={"w": ("tp",)})
    assert copy.deepcopy(plan) == pickle.loads(pickle.dumps(plan)) == plan


# -- one layout, and several -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "means"),
    [
        (("dp", "None"), ROWS),
        (("dp",), ROWS),  # dims that are not mentioned are not split
        (("dp", None), ROWS),
        (("None", "tp"), COLUMNS),
        ((None,), MESH()),
        (("None", "None", "None"), MESH()),
        ((("dp", "tp"), "None"), MESH(("dp", "tp"), "None")),
        ((("tp", "dp"),), MESH(("tp", "dp"))),
        ((("dp",), ("tp",)), MESH("dp", "tp")),
        ((Shard(0), Shard(1)), MESH("dp", "tp")),
        ((Replicate(), Replicate()), MESH()),
        ((Shard(0), Partial()), MESH("dp", partial={"tp": "sum"})),
        ((Shard(0), Shard(0)), MESH(("dp", "tp"))),
        (ROWS, ROWS),
        (MESH("tp", partial={"dp": "avg"}), MESH("tp", partial={"dp": "avg"})),
    ],
    ids=str,
)
def test_one_layout(written, means):
    assert read_layout("", written, MESH) == read_layouts("", written, MESH) == means


@pytest.mark.parametrize(
    ("written", "means"),
    [
        ([("dp", "None")], (ROWS,)),
        ([("dp", "None"), ("None", "tp")], (ROWS, COLUMNS)),
        ([("dp", "None"), None, ("None", "tp")], (ROWS, None, COLUMNS)),
        ([None], (None,)),
        ([ROWS, BY_COLUMNS], (ROWS, COLUMNS)),
        ((BY_ROWS, BY_COLUMNS), (ROWS, COLUMNS)),  # a tuple that holds tuples of placements
        ((None, BY_COLUMNS), (None, COLUMNS)),
        ((ROWS, COLUMNS), (ROWS, COLUMNS)),  # or Layouts
        ((ROWS, None), (ROWS, None)),
        ((ROWS, ("None", "tp")), (ROWS, COLUMNS)),
        ({"x": ("dp", "None"), "mask": None}, {"x": ROWS, "mask": None}),
        (OrderedDict(x=BY_ROWS), {"x": ROWS}),
        ([[("dp",), None], {"k": ("None", "tp")}], ((ROWS, None), {"k": COLUMNS})),
        ({"x": [("dp",)]}, {"x": (ROWS,)}),
        (None, None),
    ],
    ids=str,
)
def test_several_layouts(written, means):
    assert read_layouts("", written, MESH) == means


def test_tuples_of_names_are_one_layout_whose_dims_are_split_by_two_axes_each():
    mesh = Layout((2, 2), ("dp", "tp"))
    with pytest.raises(ValueError, match=r"list, for several layouts$"):
        read_layouts("", (("dp", "None"), ("None", "tp")), mesh)  # so it says: "None" is no axis to split with
    assert read_layouts("", [("dp", "None"), ("None", "tp")], mesh) == (mesh("dp"), mesh("None", "tp"))
    assert read_layouts("", (("dp", "cp"), ("ep", "tp")), WIDE) == WIDE(("dp", "cp"), ("ep", "tp"))


def test_a_layout_is_put_on_the_mesh_and_a_tree_can_be_walked_and_told():
    tree = read_layouts("", [ROWS, {"k": COLUMNS}, None], MESH)
    assert list(leaves(tree)) == [ROWS, COLUMNS]
    assert describe(tree) == "[(dp, -), {k: (-, tp)}, None]"
    assert describe(MESH("dp", partial={"tp": "sum"})) == "(dp); tp=sum"


# -- paths -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "hits", "misses"),
    [
        ("a.b", ["a.b"], ["a", "a.b.c", "a.bc", "xa.b"]),
        ("*", ["a", "b"], ["", "a.b"]),
        ("*.b", ["a.b"], ["b", "a.c", "x.a.b"]),
        ("layers.*.w1", ["layers.0.w1", "layers.12.w1"], ["layers.w1", "layers.0.x.w1", "layers.0.w1.weight"]),
        ("layers.1*.w", ["layers.1.w", "layers.10.w"], ["layers.2.w", "layers.21.w"]),
        ("*_norm", ["q_norm", "_norm"], ["norm", "q_norm.w"]),
        ("**", ["a", "a.b.c"], [""]),
        ("**.w", ["w", "a.w", "a.b.w"], ["aw", "a.w.b"]),
        ("a.**.w", ["a.w", "a.b.w", "a.b.c.w"], ["w", "b.w", "ab.w"]),
        ("a.*b*.w", ["a.b.w", "a.xby.w"], ["a.x.w"]),
        ("", [""], ["a"]),
    ],
)
def test_paths(path, hits, misses):
    assert [name for name in hits + misses if matches(path, name)] == hits


def test_the_more_exact_path_counts_in_whatever_order():
    names = ["l.0.w", "l.1.w", "n"]
    entries = {"**": "all", "l.*.w": "some", "l.0.w": "one"}
    for keys in (list(entries), list(entries)[::-1]):
        found = resolve("", {key: (key, entries[key]) for key in keys}, names, "parameter")
        assert {name: match.value for name, match in found.items()} == {"l.0.w": "one", "l.1.w": "some", "n": "all"}
        assert list(found) == names
    same = {"l.*.w": ("l.*.w", 1), "*.0.w": ("*.0.w", 1)}
    assert {name: match.value for name, match in resolve("", same, names, "parameter").items()} == {
        "l.0.w": 1,
        "l.1.w": 1,
    }


# -- a whole plan ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(4, 8), nn.Linear(8, 4, bias=False)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 3)
        self.head.input = nn.Identity()  # a module may have that name


def read(**fields):
    modules, parameters = names_of(Model())
    return read_plan("cannot shard the model", ShardingPlan(**fields), MESH, modules, parameters)


def test_reading_a_plan():
    reading = read(
        plan={"layers.*.w1.*": ("tp",), "layers.1.w1.bias": None, "**.w2.weight": BY_COLUMNS, "head.bias": ("None",)},
        input_plan={"input": ("dp",), "layers.*.input": [None, ("tp",)], "head.input.input": {"x": ("dp",)}},
        output_plan={"output": None, "layers.0.output": ("dp",), "*.output": (BY_ROWS, None)},
        return_local_tensor=["head", "**.w?", "layers.*.w2"][::2],
        wrap_inputs=True,
    )
    assert reading.parameters == {
        "layers.0.w1.weight": MESH("tp"),
        "layers.0.w1.bias": MESH("tp"),
        "layers.0.w2.weight": COLUMNS,
        "layers.1.w1.weight": MESH("tp"),
        "layers.1.w1.bias": MESH("tp"),  # None is skipped: what the glob says holds
        "layers.1.w2.weight": COLUMNS,
        "head.bias": MESH(),
    }
    assert reading.inputs == {
        "": MESH("dp"),
        "layers.0": (None, MESH("tp")),
        "layers.1": (None, MESH("tp")),
        "head.input": {"x": MESH("dp")},
    }
    assert reading.outputs == {"layers.0": MESH("dp"), "layers": (ROWS, None), "head": (ROWS, None)}
    assert list(reading.returned) == ["layers.0.w2", "layers.1.w2", "head"]
    assert reading.wrap_inputs


def test_none_is_skipped_everywhere():
    reading = read(plan={"head.weight": None, "no.such": None}, input_plan={"input": None}, output_plan=None)
    assert (reading.parameters, reading.inputs, reading.outputs, list(reading.returned)) == ({}, {}, {}, [])


def test_entries_that_a_tensor_has_dims_for():
    assert read(plan={"head.bias": ("tp",)}).parameters == {"head.bias": MESH("tp")}
    assert read(plan={"head.weight": (Shard(-1), Replicate())}).parameters["head.weight"].splits(2) == ((), (0,))
    for layout in (("tp", "None"), (Shard(1), Replicate()), (Shard(-2), Replicate()), MESH("None", "tp")):
        with pytest.raises(ValueError, match=r"more dims than the 1 of parameter 'head\.bias'"):
            read(plan={"head.bias": layout})


# -- which argument a layout is for ------------------------------------------------------------------------------------


def plain(x, mask=None, *, scale=1.0): ...
def with_any(x, *rest, flag=0, **names): ...
def by_place(x, /, y, *, k): ...


class Method:
    def __call__(self, x, y): ...


@pytest.mark.parametrize(
    ("function", "tree", "places"),
    [
        (plain, ROWS, [(0, "x")]),
        (plain, (ROWS, COLUMNS), [(0, "x"), (1, "mask")]),
        (plain, (None, COLUMNS), [(1, "mask")]),
        (plain, {"scale": ROWS, "x": COLUMNS, "mask": None}, [(None, "scale"), (0, "x")]),
        (with_any, (ROWS, ROWS, ROWS), [(0, "x"), (1, None), (2, None)]),
        (with_any, {"other": ROWS, "flag": ROWS}, [(None, "other"), (None, "flag")]),
        (by_place, (ROWS, COLUMNS), [(0, None), (1, "y")]),
        (by_place, {"y": ROWS, "k": ROWS}, [(1, "y"), (None, "k")]),
        (Method(), {"y": ROWS}, [(1, "y")]),
        (functools.partial(plain, scale=2.0), {"mask": ROWS}, [(1, "mask")]),
        (torch.sin, (ROWS, ROWS), [(0, None), (1, None)]),  # no signature: anything
        (torch.sin, {"input": ROWS}, [(None, "input")]),
        (plain, None, []),
    ],
)
def test_places(function, tree, places):
    assert [(place.index, place.name) for place in Arguments.of(function).places("", tree)] == places


# -- containers --------------------------------------------------------------------------------------------------------


def test_containers_are_kept():
    pair = namedtuple("pair", "x y")
    mark = lambda value, layout: (value, layout)  # noqa: E731
    one = spread("it", 1, ROWS, mark)
    assert one == (1, ROWS)
    for value in ([1, 2], (1, 2), pair(1, 2)):
        found = spread("it", value, (None, ROWS), mark)
        assert type(found) is type(value)
        assert tuple(found) == (1, (2, ROWS))
    assert remade(pair(1, 2), [3, 4]) == pair(3, 4)
    given = OrderedDict(b=1, a=2)
    found = spread("it", given, {"a": ROWS}, mark)
    assert type(found) is OrderedDict
    assert list(found.items()) == [("b", 1), ("a", (2, ROWS))]
    assert given == OrderedDict(b=1, a=2)  # what the module returned is not written into
    assert spread("it", None, (ROWS, ROWS), mark) is None
    assert spread("it", (None, 2), (ROWS, ROWS), mark) == (None, (2, ROWS))
    assert spread("it", 1, None, mark) == 1


# -- local code --------------------------------------------------------------------------------------------------------


def test_axes_over_which_ranks_share_the_work():
    assert shared_axes("", MESH()) == frozenset()
    assert shared_axes("", ROWS) == {"dp"}
    assert shared_axes("", MESH("dp", partial={"tp": "sum"})) == {"dp", "tp"}
    assert shared_axes("", (ROWS, {"k": MESH(partial={"dp": "sum"})}, None)) == {"dp"}
    assert shared_axes("", (Layout((2, 1), ("dp", "tp"))("dp", "tp"), Layout((2, 1), ("dp", "tp"))("dp"))) >= {"dp"}
    with pytest.raises(ValueError, match="over axis 'tp' one result is replicated"):
        shared_axes("", (ROWS, MESH("dp", "tp")))
