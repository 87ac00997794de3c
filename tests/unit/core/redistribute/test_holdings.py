"""Holdings between the steps of a plan: arithmetic on all ranks at once against sets of single elements.

The twin below says in a dozen lines of Python what a `Holding` means: every element of every dim is walked through.
"""

import ast
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import sim
from hyper_parallel.core import redistribute
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.redistribute.api import read_grad_layout
from hyper_parallel.core.redistribute.holdings import (
    Holding,
    _ruler,
    boxes,
    coordinate,
    cut,
    divide,
    edges,
    extent,
    intersect,
    length,
    meet,
    teeth,
    volume,
)
from hyper_parallel.core.redistribute.transition import cut_at_nodes, on_common_mesh, read
from sim.strategies import layouts, meshes, shapes

pytestmark = pytest.mark.tier("test")

EXAMPLES = settings(max_examples=200)
SIZES = st.sampled_from([1, 2, 2, 3, 4])
NAMES = ("a", "b", "c")
LENGTHS = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 16, 24])


# -- the twin --------------------------------------------------------------------------------------------------------


def chunks(indices, parts):
    """Cut a list of indices into so many parts of ceil(length / parts) each, the last ones smaller or empty."""
    full = -(-len(indices) // parts)
    return [indices[full * index : full * (index + 1)] for index in range(parts)]


def leaves(indices, sizes, chain, fixed, at):
    """The indices that a chain of splits gives to ranks with the coordinates `at` on the fixed axes, any on others."""
    if not chain:
        return indices
    axis, *rest = chain
    parts = chunks(indices, sizes[axis])
    wanted = [parts[at[axis]]] if axis in fixed else parts
    return [index for part in wanted for index in leaves(part, sizes, rest, fixed, at)]


def indices_of(held, dim, at):
    """The indices of a dim that the rank at some coordinates holds, `first` left aside."""
    whole = list(range(held.shape[dim]))
    own = leaves(whole, held.sizes, held.splits[dim], held.splits[dim], at)
    comb = held.combs[dim] if held.combs else None
    if comb is not None:
        allowed = set(leaves(whole, held.sizes, *comb, at))
        own = [index for index in own if index in allowed]
    if held.share is not None and held.share[0] == dim:
        index = 0
        for axis in held.share[1]:
            index = index * held.sizes[axis] + at[axis]
        own = chunks(own, math.prod(held.sizes[axis] for axis in held.share[1]))[index]
    return own


def elements(held, at):
    """The elements that the rank at some coordinates holds."""
    if any(at[axis] for axis in held.first):
        return set()
    return set(itertools.product(*(indices_of(held, dim, at) for dim in range(len(held.shape)))))


def everywhere(sizes):
    return itertools.product(*map(range, sizes))


def listed(part):
    """The elements of a part, of which every one must be named once."""
    found = [
        element for box in boxes(part) for element in itertools.product(*(range(start, stop) for start, stop in box))
    ]
    assert len(found) == len(set(found)) == volume(part)
    return set(found)


# -- drawn holdings --------------------------------------------------------------------------------------------------


@st.composite
def chains(draw, axes, ndim):
    """Splits of the dims over some of the axes, in any order; no axis twice."""
    splits = [[] for _ in range(ndim)]
    for axis in draw(st.permutations(axes)):
        dim = draw(st.integers(0, ndim))
        if dim < ndim:
            splits[dim].append(axis)
    return tuple(map(tuple, splits))


@st.composite
def holdings(draw, sizes, shape):
    """Any holding: splits, combs of a chain of their own, a share, and ranks that hold nothing."""
    axes, ndim = range(len(sizes)), len(shape)
    held = Holding(sizes, shape, draw(chains(axes, ndim)))
    if draw(st.booleans()):
        held = held.restricted(draw(chains(axes, ndim)), draw(st.sets(st.sampled_from(axes))))
    if draw(st.booleans()):
        dim = draw(st.integers(0, ndim - 1))
        free = [axis for axis in axes if axis not in held.axes_of(dim)]
        if free:
            over = tuple(draw(st.lists(st.sampled_from(free), min_size=1, unique=True)))
            held = Holding(sizes, shape, held.splits, held.combs, (dim, over))
    first = tuple(draw(st.sets(st.sampled_from(axes), max_size=1)))
    return Holding(sizes, shape, held.splits, held.combs, held.share, first)


@st.composite
def pairs(draw):
    """Two holdings of one tensor on one mesh."""
    sizes = tuple(draw(st.lists(SIZES, min_size=1, max_size=4)))
    shape = tuple(draw(st.lists(LENGTHS, min_size=1, max_size=2)))
    return draw(holdings(sizes, shape)), draw(holdings(sizes, shape))


# -- holdings --------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(pairs())
def test_every_rank_holds_what_the_twin_says(pair):
    held, other = pair
    counts, both = held.counts(), held.overlaps(other)
    assert counts.shape == both.shape == held.sizes
    for at in everywhere(held.sizes):
        mine, theirs = elements(held, at), elements(other, at)
        part = held.part(at)
        assert listed(part) == mine
        assert counts[at] == len(mine)
        assert both[at] == len(mine & theirs)
        common = meet(part, other.part(at))
        assert (set() if common is None else listed(common)) == mine & theirs


@EXAMPLES
@given(pairs())
def test_the_extent_of_every_dim(pair):
    held, _ = pair
    for dim in range(len(held.shape)):
        found = np.broadcast_to(extent(held, dim), held.sizes)
        for at in everywhere(held.sizes):
            assert found[at] == len(indices_of(held, dim, at)) == length(held.part_of_dim(dim, at))


@EXAMPLES
@given(pairs())
def test_what_it_does_not_depend_on_changes_nothing(pair):
    held, _ = pair
    for dim in range(len(held.shape)):
        for at in everywhere(held.sizes):
            moved = [place if axis in held.axes_of(dim) else 0 for axis, place in enumerate(at)]
            assert held.part_of_dim(dim, at) == held.part_of_dim(dim, moved)


@EXAMPLES
@given(pairs())
def test_even_is_even(pair):
    for held in pair:
        sizes = {len(elements(held, at)) for at in everywhere(held.sizes)}
        assert held.even == (len(sizes) == 1 and 0 not in sizes)
        assert not held.plain or (held.combs, held.share, held.first) == ((), None, ())


@EXAMPLES
@given(st.data())
def test_a_layout_is_a_holding(data):
    mesh = data.draw(meshes(24, 4))
    shape = data.draw(shapes(1, 3))
    layout = data.draw(layouts(mesh, shape))
    held = Holding(mesh.mesh_shape, shape, layout.splits(len(shape)))
    for at, box in zip(everywhere(held.sizes), layout.slices(shape).tolist(), strict=True):
        assert elements(held, at) == set(itertools.product(*(range(start, stop) for start, stop in box)))


def test_the_twin_agrees_with_examples_by_hand():
    # 7 rows over 2: 4 and 3; each over 3: 2, 2, 0 and 1, 1, 1.
    held = Holding((2, 3), (7,), ((0, 1),))
    assert [sorted(elements(held, at)) for at in everywhere((2, 3))] == [
        [(0,), (1,)], [(2,), (3,)], [], [(4,)], [(5,)], [(6,)],
    ]  # fmt: skip
    assert held.counts().tolist() == [[2, 2, 0], [1, 1, 1]]
    # The same chain with the inner axis fixed alone: the teeth of a comb.
    comb = Holding((2, 3), (7,), ((),)).restricted(((0, 1),), [1])
    assert [comb.part((0, place)) for place in range(3)] == [(((0, 2), (4, 5)),), (((2, 4), (5, 6)),), (((6, 7),),)]
    assert comb.counts().tolist() == [[3, 3, 1]] * 2
    # Two combs of unlike chains: rows of 12 over (0 then 1) with 1 fixed, and over (1 then 0) with 0 fixed.
    one = Holding((2, 2), (12,), ((),)).restricted(((0, 1),), [1])
    two = Holding((2, 2), (12,), ((),)).restricted(((1, 0),), [0])
    assert one.part((0, 0)) == (((0, 3), (6, 9)),) == two.part((0, 1))
    assert one.overlaps(two).tolist() == [[6, 0], [0, 6]]
    # Shared out over an axis along which ranks hold the same, and the first rank only.
    shared = Holding((2, 2), (6,), ((0,),), (), (0, (1,)))
    assert shared.counts().tolist() == [[2, 1], [2, 1]]
    assert Holding((2, 2), (6,), ((0,),), first=(1,)).counts().tolist() == [[3, 0], [3, 0]]


def test_many_ranks_are_counted_at_once():
    sizes = (8, 8, 8, 8)
    one = Holding(sizes, (50_257,), ((),)).restricted(((0, 1, 2, 3),), [1, 3])
    two = Holding(sizes, (50_257,), ((2,),)).restricted(((3, 2, 1, 0),), [0, 1])
    both = one.overlaps(two)
    for at in ((0, 0, 0, 0), (7, 1, 2, 3), (3, 6, 5, 0), (7, 7, 7, 7)):
        assert both[at] == len(elements(one, at) & elements(two, at))


# -- arithmetic of intervals -----------------------------------------------------------------------------------------


@st.composite
def intervals(draw):
    """Intervals as a part has them: sorted, apart from each other, none empty."""
    points = sorted(draw(st.sets(st.integers(0, 24), max_size=8)))
    return tuple(zip(points[: len(points) // 2 * 2 : 2], points[1::2], strict=True))


def points_of(found):
    return [index for start, stop in found for index in range(start, stop)]


@EXAMPLES
@given(intervals(), intervals(), st.integers(0, 12), st.integers(0, 12))
def test_intervals(left, right, offset, count):
    assert length(left) == len(points_of(left))
    assert points_of(intersect(left, right)) == sorted({*points_of(left)} & {*points_of(right)})
    assert points_of(cut(left, offset, count)) == points_of(left)[offset : offset + count]


@EXAMPLES
@given(st.lists(intervals().filter(bool), min_size=1, max_size=3).map(tuple), st.integers(1, 5))
def test_pieces_of_a_part_are_the_part(part, pieces):
    found = [divide(part, pieces, index) for index in range(pieces)]
    there = [listed(piece) for piece in found if piece is not None]
    assert sum(map(len, there)) == volume(part)
    assert set().union(*there) == listed(part)
    if any(length(mine) % pieces == 0 for mine in part):
        assert {len(piece) for piece in there} == {volume(part) // pieces}


@EXAMPLES
@given(LENGTHS, st.lists(st.tuples(SIZES, st.booleans()), max_size=4), st.data())
def test_teeth(size, chain, data):
    parts = tuple(count for count, _ in chain)
    at = tuple(data.draw(st.integers(0, count - 1)) for count in parts)
    fixed = [axis for axis, (_, is_fixed) in enumerate(chain) if is_fixed]
    found = teeth(size, parts, tuple(at[axis] if axis in fixed else None for axis in range(len(parts))))
    assert points_of(found) == leaves(list(range(size)), parts, list(range(len(parts))), fixed, at)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(found))


@EXAMPLES
@given(st.lists(SIZES, min_size=1, max_size=4).map(tuple), LENGTHS, st.data())
def test_edges_and_coordinates(sizes, size, data):
    chain = tuple(data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True)))
    start, stop = (np.broadcast_to(ends, sizes) for ends in edges(size, sizes, chain))
    joint = np.broadcast_to(coordinate(sizes, chain), sizes)
    rows = list(itertools.product(*(range(sizes[axis]) for axis in chain)))
    for at in everywhere(sizes):
        assert list(range(start[at], stop[at])) == leaves(list(range(size)), sizes, chain, chain, at)
        assert rows[joint[at]] == tuple(at[axis] for axis in chain)


# -- smaller axes ----------------------------------------------------------------------------------------------------


def sides(src, dst, shape):
    """Two layouts as the planner reads them."""
    found = read("cannot plan", src, dst, shape, torch.float32)
    return found.before, found.after


def written(side):
    """A side as a layout again; pieces of an axis have one name, so that each gets another."""
    mesh = Layout(side.sizes, [f"piece{axis}" for axis in range(len(side.sizes))], side.ranks)
    entries = [tuple(mesh.alias_name[axis] for axis in chain) or None for chain in side.splits]
    return mesh(*entries, partial={mesh.alias_name[axis]: side.reduction for axis in side.pending})


def same_parts(one, two, shape):
    """Whether two layouts give every rank the same part, and pend the same copies."""
    slices = [dict(zip(layout.rank_list, layout.slices(shape).tolist(), strict=True)) for layout in (one, two)]
    empty = [{rank: 0 in [stop - start for start, stop in box] for rank, box in by.items()} for by in slices]
    boxes_agree = all(slices[0][rank] == slices[1][rank] or (empty[0][rank] and empty[1][rank]) for rank in slices[0])
    return boxes_agree and pending_groups(one) == pending_groups(two)


def pending_groups(layout):
    """Sets of ranks whose copies are reduced together, and by what."""
    mesh = np.array(layout.rank_list).reshape(layout.mesh_shape)
    axes = [layout.alias_name.index(name) for name in layout.partial]
    size = math.prod(layout.mesh_shape[axis] for axis in axes)
    rows = np.moveaxis(mesh, axes, range(-len(axes), 0)).reshape(-1, size) if axes else mesh.reshape(-1, 1)
    kinds = {kind for name, kind in layout.partial.items() if layout.mesh_shape[layout.alias_name.index(name)] > 1}
    return {frozenset(row) for row in rows.tolist()}, kinds


@st.composite
def on_two_meshes(draw):
    """Two layouts of the same ranks on meshes of unlike axes."""
    first = draw(st.sampled_from([(2, 4), (8,), (4, 2), (2, 2, 2), (6, 4), (12, 2), (2, 3, 4), (24,), (3, 8)]))
    fitting = [s for s in [(8,), (2, 4), (4, 2), (24,), (4, 6), (6, 4), (2, 12)] if math.prod(s) == math.prod(first)]
    second = draw(st.sampled_from(fitting))
    shape = draw(st.lists(st.sampled_from([24, 48, 8, 7, 1, 0]), min_size=1, max_size=2).map(tuple))
    ranks = draw(st.permutations(range(math.prod(first))))
    meshes_of = [Layout(sizes, NAMES[: len(sizes)], ranks) for sizes in (first, second)]
    return (*(draw(layouts(mesh, shape, partial=True)) for mesh in meshes_of), shape)


@EXAMPLES
@given(on_two_meshes())
def test_layouts_on_a_common_mesh_are_the_same_layouts(case):
    src, dst, shape = case
    found = on_common_mesh(*sides(src, dst, shape))
    if found is None:
        return
    first, second = found
    assert (first.sizes, first.names) == (second.sizes, second.names)
    assert len(first.names) == len(first.sizes)
    assert same_parts(src, written(first), shape)
    assert same_parts(dst, written(second), shape)


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [((2, 4), (8,), (2, 4)), ((4, 2), (2, 4), (2, 2, 2)), ((2, 3), (3, 2), None), ((12,), (4, 3), (4, 3))],
)
def test_axes_that_have_pieces_in_common(first, second, common):
    src, dst = (Layout(sizes, NAMES[: len(sizes)]) for sizes in (first, second))
    found = on_common_mesh(*sides(src("a"), dst(None, "a"), (24, 24)))
    assert (found and found[0].sizes) == common
    assert (
        on_common_mesh(*sides(src("a"), dst(None, "a"), (25, 25))) is None
    )  # uneven parts cannot be split in two steps


@EXAMPLES
@given(st.data())
def test_axes_are_cut_where_nodes_end(data):
    sizes = data.draw(st.sampled_from([(8,), (2, 8), (4, 6), (16,), (2, 2, 4)]))
    mesh = Layout(sizes, NAMES[: len(sizes)])
    shape = data.draw(st.lists(st.sampled_from([48, 32, 7]), min_size=1, max_size=2).map(tuple))
    src, dst = (data.draw(layouts(mesh, shape, partial=True)) for _ in range(2))
    per_node = data.draw(st.sampled_from([1, 2, 3, 4, 8]))
    first, second = cut_at_nodes(*sides(src, dst, shape), per_node)
    assert same_parts(src, written(first), shape)
    assert same_parts(dst, written(second), shape)
    assert [math.prod(size for size, owner in zip(first.sizes, first.names, strict=True) if owner == name)
            for name in mesh.alias_name] == [*sizes]  # fmt: skip
    nodes = np.array(first.ranks).reshape(first.sizes) // per_node
    for axis, owner in enumerate(first.names):
        if owner in first.names[:axis]:  # the inner piece
            assert (nodes == nodes.take([0], axis=axis)).all()


def test_what_nodes_cut_by_hand():
    flat = Layout((8,), ("a",))
    first, _ = cut_at_nodes(*sides(flat("a"), flat(), (16,)), 4)
    assert (first.sizes, first.names) == ((2, 4), ("a", "a"))
    assert cut_at_nodes(*sides(flat("a"), flat(), (7,)), 4)[0].sizes == (8,)  # 7 rows are split otherwise by two
    assert cut_at_nodes(*sides(flat("a"), flat(), (16,)), 3)[0].sizes == (8,)  # 3, 3 and 2 are no equal pieces


def test_nothing_of_an_empty_dim_lies_below_a_point():
    ruler = _ruler(0, (2, 2), (((0, 1), (1,)),))
    assert ruler.below(np.array([[0, 3]])).tolist() == [[0, 0]]


# -- the layout of gradients -------------------------------------------------------------------------------------------


@sim.ranks(4, backends=("sim",))
def test_a_gradient_may_be_laid_out_over_axes_of_other_names(ctx):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parts = Layout.from_device_mesh(mesh)(("dp", "tp"), "None")
    wanted = Layout.from_device_mesh(init_device_mesh("cpu", (4,), mesh_dim_names=("ranks",)))("ranks", "None")
    assert read_grad_layout("cannot take parts", wanted, parts, (8, 3)) == wanted
    with pytest.raises(ValueError, match="grad_layout gives rank 1 "):  # chunks of 2, 2, 1, 0, not of 2, 1, 1, 1
        read_grad_layout("cannot take parts", wanted, parts, (5, 3))


# -- below the reader, tuples of ints ----------------------------------------------------------------------------------

PLANNING = Path(redistribute.__file__).parent


def asks_a_layout(source):
    """Whether a file imports the Layout, of which it could ask something."""
    return "Layout" in {alias.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)
                        for alias in node.names}  # fmt: skip


@pytest.mark.parametrize("name", ["holdings", "steps", "builder", "candidates", "cost", "execute"])
def test_nothing_below_the_reader_asks_a_layout(name):
    assert not asks_a_layout((PLANNING / f"{name}.py").read_text())


def test_a_file_that_asks_a_layout_is_found():
    assert asks_a_layout("def f():\n    from hyper_parallel.core.dtensor.layout import Layout")
    assert asks_a_layout((PLANNING / "transition.py").read_text())
