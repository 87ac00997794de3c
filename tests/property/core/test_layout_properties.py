"""Layouts against a twin that really chunks a tensor, against torch's own placements, and there and back again."""

import json
import math
import pickle
from itertools import product

import pytest
import torch
from hypothesis import assume, find, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hyper_parallel.core.dtensor import in_split_order, to_placements
from hyper_parallel.core.dtensor.layout import Layout
from sim.strategies import LayoutPair, layout_pairs, layouts, meshes, shapes

pytestmark = pytest.mark.sim

many = settings(max_examples=2 * settings.default.max_examples)


def arange(shape):
    return torch.arange(math.prod(shape)).reshape(shape)


def chunked(full, layout):
    """The twin: the part of every rank, made by nothing but torch.chunk, split after split."""
    parts = {}
    for rank, coordinates in zip(layout.rank_list, product(*map(range, layout.mesh_shape)), strict=True):
        part = full
        for dim, entry in enumerate(layout.alias_placements):
            for name in (entry,) if isinstance(entry, str) else entry:
                if name == "None":
                    continue
                axis = layout.alias_name.index(name)
                pieces = list(torch.chunk(part, layout.mesh_shape[axis], dim))
                empty = part.narrow(dim, part.size(dim), 0)  # torch.chunk leaves the empty parts out
                pieces += [empty] * (layout.mesh_shape[axis] - len(pieces))
                part = pieces[coordinates[axis]]
        parts[rank] = part
    return parts


def by_torch(full, mesh_shape, placements, rank_list):
    """The part of every rank as DTensor makes it: one placement after the other, by torch's own splitting."""
    parts = {}
    for rank, coordinates in zip(rank_list, product(*map(range, mesh_shape)), strict=True):
        part = full
        for size, coordinate, placement in zip(mesh_shape, coordinates, placements, strict=True):
            if isinstance(placement, Shard | _StridedShard):
                part = placement._split_tensor(part, size, with_padding=False)[0][coordinate]
        parts[rank] = part
    return parts


def ours(full, layout):
    return {rank: full[layout.local_slice(full.shape, rank)] for rank in layout.rank_list}


def assert_same_parts(left, right):
    assert left.keys() == right.keys()
    for rank, part in left.items():
        assert part.shape == right[rank].shape, f"rank {rank}"
        assert torch.equal(part, right[rank]), f"rank {rank}"


@st.composite
def placed(draw, **options):
    """A layout and the shape of a tensor."""
    even = options.pop("even", False)
    mesh, shape = draw(meshes(48, 4)), draw(shapes(0, 3, max_size=48 if even else 16))
    if even:
        shape = tuple(math.prod(mesh.mesh_shape) * size if size < 3 else size for size in shape)
    return draw(layouts(mesh, shape, even=even, **options)), shape


@many
@given(placed(partial=True), st.randoms(use_true_random=False))
def test_slices_are_a_chunk_of_a_chunk(case, random):
    layout, shape = case
    ranks = random.sample(range(200), len(layout.rank_list))
    layout = Layout.from_dict({**layout.to_dict(), "rank_list": ranks})
    full = arange(shape)
    parts = chunked(full, layout)
    assert_same_parts(ours(full, layout), parts)
    table = layout.slices(shape)
    assert table.shape == (len(ranks), len(shape), 2)
    for rank, row in zip(ranks, table.tolist(), strict=True):
        assert_same_parts({rank: full[tuple(slice(*ends) for ends in row)]}, {rank: parts[rank]})
        assert layout.local_shape(shape, rank) == tuple(parts[rank].shape)


@many
@given(placed(partial=True))
def test_every_element_is_held_equally_often(case):
    layout, shape = case
    count = torch.zeros(shape, dtype=torch.int64)
    for row in layout.slices(shape).tolist():
        count[tuple(slice(*ends) for ends in row)] += 1
    copies = layout.repeat_num()
    for name in layout.partial:
        copies *= layout.mesh_shape[layout.alias_name.index(name)]
    assert (count == copies).all()


@many
@given(placed(partial=True))
def test_there_and_back(case):
    layout, shape = case
    ndim = len(shape)
    there = layout.tensor_map_to_placement()
    assert there == layout
    assert there.tensor_map is None
    back = there.placement_to_tensor_map(ndim)
    assert back == layout
    assert torch.equal(torch.from_numpy(back.slices(shape)), torch.from_numpy(layout.slices(shape)))
    if 1 not in layout.mesh_shape:
        assert back.tensor_map == layout.tensor_map
        assert back.alias_placements == layout.alias_placements
    assert layout(*layout.placements) == layout
    names = {
        "Layout": Layout,
        "Shard": Shard,
        "Replicate": Replicate,
        "Partial": Partial,
        "_StridedShard": _StridedShard,
    }
    for form in (layout, there, layout(*negative(layout.placements, ndim))):
        for copy in (
            Layout.from_dict(form.to_dict()),
            Layout.from_dict(json.loads(json.dumps(form.to_dict()))),
            pickle.loads(pickle.dumps(form)),
            eval(repr(form), names),
        ):
            assert copy == form
            assert hash(copy) == hash(form)
            assert (repr(copy), str(copy), copy.to_dict()) == (repr(form), str(form), form.to_dict())
        assert form.placement_to_tensor_map(ndim) == layout
        assert form.repeat_num() == layout.repeat_num()
        assert form.partial == layout.partial


def negative(placements, ndim):
    turned = []
    for placement in placements:
        if isinstance(placement, _StridedShard):
            placement = _StridedShard(placement.dim - ndim, split_factor=placement.split_factor)
        elif isinstance(placement, Shard):
            placement = Shard(placement.dim - ndim)
        turned.append(placement)
    return turned


@many
@given(meshes(24, 3, min_size=2).flatmap(lambda mesh: st.tuples(*[layouts(mesh, (1, 1), partial=True)] * 2)))
def test_equal_means_the_same_parts(pair):
    one, two = pair
    shape = (one.slices((1, 1)).shape[0] ** 2,) * 2  # so large and so even that all splits differ
    same = one.partial == two.partial and one.slices(shape).tolist() == two.slices(shape).tolist()
    assert (one == two) is same
    assert (one.placement_to_tensor_map(3) == two.tensor_map_to_placement()) is same
    assert not same or hash(one) == hash(two)


@many
@given(placed(ordered=False))
def test_torch_agrees_on_splits_in_mesh_order(case):
    layout, shape = case
    full = arange(shape)
    placements = to_placements(layout, shape)
    assert not any(isinstance(placement, _StridedShard) for placement in placements)
    assert_same_parts(by_torch(full, layout.mesh_shape, placements, layout.rank_list), ours(full, layout))


@many
@given(placed(even=True))
def test_torch_agrees_on_even_splits_in_any_order(case):
    layout, shape = case
    full = arange(shape)
    placements = to_placements(layout, shape)
    assert_same_parts(by_torch(full, layout.mesh_shape, placements, layout.rank_list), ours(full, layout))


@many
@given(placed(partial=("sum",)))
def test_torch_agrees_on_any_split_once_the_mesh_is_in_split_order(case):
    layout, shape = case
    full = arange(shape)
    plain = in_split_order(layout, len(shape))
    placements = to_placements(plain, shape)
    assert not any(isinstance(placement, _StridedShard) for placement in placements)
    assert plain.partial.items() == layout.partial.items()
    assert sorted(plain.rank_list) == sorted(layout.rank_list)
    assert_same_parts(by_torch(full, plain.mesh_shape, placements, plain.rank_list), ours(full, layout))


@many
@given(placed())
def test_what_cannot_become_a_dtensor_is_refused(case):
    layout, shape = case
    full = arange(shape)
    split = by_torch(full, layout.mesh_shape, layout.placements, layout.rank_list)
    mine = ours(full, layout)
    said = refusal(layout, shape)
    if not said:
        assert all(torch.equal(split[rank], mine[rank]) for rank in mine)
        return
    assert "against the order of the mesh" in said
    suggested = said.split("try: size ")[1].split(" for dim")[0].split(" or ")
    dim = int(said.split("for dim ")[1].split(";")[0])
    for size in map(int, suggested):
        assert f"dim {dim} (size" not in refusal(layout, (*shape[:dim], size, *shape[dim + 1 :]))


def refusal(layout, shape):
    try:
        to_placements(layout, shape)
    except ValueError as error:
        return str(error)
    return ""


def test_torch_does_contradict_chunk_of_chunk_on_an_uneven_re_ordered_split():
    layout = Layout((3, 2), ("dp", "tp"))(("tp", "dp"))
    split = by_torch(arange((7,)), (3, 2), layout.placements, layout.rank_list)
    mine = ours(arange((7,)), layout)
    assert [rank for rank in mine if not torch.equal(split[rank], mine[rank])], (
        "then the refusal is not needed any more"
    )


@settings(many, max_examples=settings.default.max_examples)
@given(st.integers(1, 64), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.data())
def test_meshes_keep_their_bounds(max_ranks, max_axes, min_axes, min_size, data):
    assume(min_axes <= max_axes and min_size**min_axes <= max_ranks)
    mesh = data.draw(meshes(max_ranks, max_axes, min_axes=min_axes, min_size=min_size))
    assert math.prod(mesh.mesh_shape) <= max_ranks
    assert min_axes <= len(mesh.mesh_shape) <= max_axes
    assert min(mesh.mesh_shape) >= min_size
    assert mesh.tensor_map is None


@settings(many, max_examples=settings.default.max_examples)
@given(layout_pairs(16, 3, even=True, partial=("sum",)))
def test_layout_pairs_are_two_layouts_of_one_tensor(pair):
    assert isinstance(pair, LayoutPair)
    assert pair.src.mesh_shape == pair.dst.mesh_shape
    assert not pair.dst.is_partial()
    assert set(pair.src.partial.values()) <= {"sum"}
    for layout in (pair.src, pair.dst):
        assert len(layout.alias_placements) == len(pair.shape)
        sizes = (layout.slices(pair.shape)[..., 1] - layout.slices(pair.shape)[..., 0]).tolist()
        assert all(size == sizes[0] for size in sizes)


def simplest(strategy, condition=lambda value: True):
    return find(strategy, condition, settings=settings(many, max_examples=500, database=None))


def test_what_the_strategies_shrink_towards():
    assert simplest(meshes()) == Layout((1,), ("dp",))
    assert simplest(meshes(), lambda mesh: math.prod(mesh.mesh_shape) > 1) == Layout((2,), ("dp",))
    assert simplest(shapes(2, 3)) == (1, 1)
    assert simplest(shapes(), lambda shape: 0 in shape) == (0,)
    mesh = Layout((2, 2), ("dp", "tp"))
    assert simplest(layouts(mesh, (4, 4), partial=True)) == mesh(None, None)
    assert simplest(layouts(mesh, (4,)), lambda layout: isinstance(layout.tensor_map[0], tuple)) == mesh(("dp", "tp"))
    assert simplest(layouts(mesh, (4,), partial=True), Layout.is_partial).partial.keys() <= {"dp", "tp"}
    assert simplest(layout_pairs()) == LayoutPair(Layout((1,), ("dp",))(), Layout((1,), ("dp",))(), ())


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: meshes(0), ValueError, "max_ranks must be at least 1"),
        (lambda: meshes(2.5), TypeError, "max_ranks is a float, not an int\n  max_ranks: 2.5"),
        (lambda: meshes(8, 9), ValueError, "max_axes must be from 1 to 8\n"),
        (lambda: meshes(8, 2, min_axes=3), ValueError, "max_axes must be from 3 to 8\n"),
        (
            lambda: meshes(7, 3, min_axes=3, min_size=2),
            ValueError,
            "3 axes of 2 ranks are more than max_ranks\n  max_ranks: 7",
        ),
        (lambda: shapes(-1), ValueError, "min_dims must be at least 0"),
        (lambda: shapes(2, 1), ValueError, "max_dims must be at least 2\n"),
        (lambda: shapes(max_size=True), TypeError, "max_size is a bool, not an int"),
        (lambda: layouts(Layout((2,), ("dp",)), (8, -1)), ValueError, r"shape\[1\] must be at least 0"),
        (
            lambda: layouts(Layout((2,), ("dp",)), (8,), partial=("mean",)),
            ValueError,
            "there is no kind of partial 'mean'",
        ),
        (lambda: layout_pairs(partial=("mean",)), ValueError, "no kind of partial 'mean'"),
        (lambda: layout_pairs(0), ValueError, "max_ranks must be at least 1"),
    ],
)
def test_the_strategies_check_their_arguments_at_once(make, kind, text):
    with pytest.raises(kind, match=text):
        make()
