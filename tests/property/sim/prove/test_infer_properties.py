"""Layouts found from parts: the one they were made with is among them, and a search of all layouts finds no other."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import sim
from hyper_parallel.core.dtensor.layout import Layout
from sim.prove.faults import diagnose
from sim.prove.infer import explanations, fit, furthest, in_orders, order_of, order_of_rows, submesh
from sim.prove.judge import Judge
from sim.strategies import layouts, meshes, shapes

pytestmark = pytest.mark.sim

many = settings(max_examples=2 * settings.default.max_examples)
KINDS = ("sum", "avg", "max", "min", "prod")


def numbers(shape, seed, least=-9):
    return torch.randint(least, 10, shape, generator=torch.Generator().manual_seed(seed)).double()


def held(full, layout, seed=0):
    return {rank: sim.scatter_full(full, layout, rank, seed=seed) for rank in layout.rank_list}


def every_layout(mesh, ndim, kinds):
    """All ways to use each axis of several ranks: for nothing, a dim (in every order), or a reduction."""
    axes = [name for name, size in zip(mesh.alias_name, mesh.mesh_shape, strict=True) if size > 1]
    for order in itertools.permutations(axes):
        for uses in itertools.product([None, *range(ndim), *kinds], repeat=len(axes)):
            entries = [tuple(a for a, use in zip(order, uses, strict=True) if use == dim) for dim in range(ndim)]
            partial = {a: use for a, use in zip(order, uses, strict=True) if isinstance(use, str)}
            if set(partial.values()) <= {"sum", "avg"} or len(set(partial.values())) == 1:
                yield mesh(*(entry or "None" for entry in entries), partial=partial)


def explains(parts, full, layout):
    """The twin: put the parts where they belong, reduce, and compare, with numpy and no bound at all."""
    boxes = dict(zip(layout.rank_list, layout.slices(full.shape).tolist(), strict=True))
    if any(list(parts[rank].shape) != [stop - start for start, stop in box] for rank, box in boxes.items()):
        return False
    grid = np.arange(len(layout.rank_list)).reshape(layout.mesh_shape)
    pending = [(layout.alias_name.index(name), kind) for name, kind in layout.partial.items()]
    for place in np.ndindex(*layout.mesh_shape):
        if any(place[axis] for axis, _ in pending):
            continue
        where = tuple(slice(None) if axis in dict(pending) else i for axis, i in enumerate(place))
        ranks = [layout.rank_list[position] for position in np.ravel(grid[where])]
        copies = np.stack([parts[rank].numpy() for rank in ranks])
        kinds = {kind for _, kind in pending}
        if kinds <= {"sum", "avg"}:
            shrunk = math.prod(layout.mesh_shape[axis] for axis, kind in pending if kind == "avg")
            value = copies.sum(0) / shrunk
        else:
            value = {"max": np.max, "min": np.min, "prod": np.prod}[kinds.pop()](copies, axis=0)
        box = tuple(slice(start, stop) for start, stop in boxes[ranks[0]])
        if not np.array_equal(value, full[box].numpy()):
            return False
    return True


@st.composite
def cases(draw, max_ranks=12, max_axes=3, max_size=8):
    mesh = draw(meshes(max_ranks=max_ranks, max_axes=max_axes))
    shape = draw(shapes(max_dims=3, max_size=max_size))
    return draw(layouts(mesh, shape, partial=True)), shape


@many
@given(cases(), st.integers(0, 9))
def test_the_layout_that_parts_were_made_with_explains_them(case, seed):
    layout, shape = case
    full = numbers(shape, seed)
    parts = held(full, layout, seed)
    assert fit(parts, full, layout).fits
    found = sim.infer_layout(parts, full, layout)
    assert all(fit(parts, full, each).fits and explains(parts, full, each) for each in found)
    whole_axes = {name for name, size in zip(layout.alias_name, layout.mesh_shape, strict=True) if size > 1}
    partial = {name: kind for name, kind in layout.partial.items() if name in whole_axes}
    plain = layout.placement_to_tensor_map(len(shape)).reset_partial()
    plain = without(plain, set(layout.alias_name) - whole_axes)
    exact = plain(*plain.alias_placements, partial=partial)
    # Either it is listed, or one with the same splits that takes fewer reductions is.
    assert exact in found or any(
        each.reset_partial() == plain and set(each.partial) < set(partial) for each in found
    ), (exact, found)


def without(layout, names):
    """The layout, in alias form, with these axes splitting nothing."""
    entries = [(entry,) if isinstance(entry, str) else entry for entry in layout.alias_placements]
    kept = [tuple(name for name in entry if name not in names and name != "None") for entry in entries]
    return layout(*(entry or "None" for entry in kept))


@settings(many, max_examples=settings.default.max_examples)
@given(cases(max_ranks=8, max_axes=2, max_size=4), st.integers(0, 9), st.booleans())
def test_no_other_layout_explains_the_parts(case, seed, zeros):
    layout, shape = case
    full = numbers(shape, seed) * (not zeros)
    parts = held(full, layout, seed)
    found = sim.infer_layout(parts, full, layout)
    assert len(set(found)) == len(found)
    right = {each for each in every_layout(layout, len(shape), KINDS) if explains(parts, full, each)}
    assert set(found) <= right
    for each in right - set(found):  # left out: what another one, that reduces over fewer axes, says already
        assert any(
            other.reset_partial() == each.reset_partial() and set(other.partial) < set(each.partial) for other in found
        ), each


@many
@given(cases(), st.integers(0, 9), st.data())
def test_a_wrong_element_is_found(case, seed, data):
    layout, shape = case
    full = numbers(shape, seed)
    parts = held(full, layout, seed)
    rank = data.draw(st.sampled_from([rank for rank, part in parts.items() if part.numel()] or [None]))
    assume(rank is not None and not layout.is_partial())
    at = tuple(data.draw(st.integers(0, size - 1)) for size in parts[rank].shape)
    parts[rank][at] += 0.5
    found = fit(parts, full, layout)
    where = layout.local_slice(shape, rank)
    assert not found.fits
    assert (found.error, found.rank) == (0.5, rank)
    assert found.index == tuple(i + part.start for i, part in zip(at, where, strict=True))


@many
@given(cases(), st.integers(0, 9))
def test_explanations_are_within_their_bound_and_ordered(case, seed):
    layout, shape = case
    full = numbers(shape, seed).float()
    parts = held(full, layout, seed)
    found = explanations(parts, full, layout, 0.25)
    assert all(each.fits and each.error <= 0.25 for each in found)
    counts = [len(each.layout.partial) for each in found]
    assert counts == sorted(counts)


@many
@given(cases(), st.integers(0, 9), st.integers(2, 5))
def test_every_multiple_is_diagnosed(case, seed, factor):
    layout, shape = case
    assume(not layout.is_partial())
    full = numbers(shape, seed, least=1)
    parts = {rank: part * factor for rank, part in held(full, layout).items()}
    diagnosed = diagnose(parts, full, layout, declared=layout)
    assert diagnosed is None if full.numel() == 0 else (diagnosed.kind, diagnosed.factor) == ("scaled", factor)


@many
@given(cases(), st.integers(0, 9))
def test_diagnose_takes_whatever_it_is_given(case, seed):
    layout, shape = case
    full = numbers(shape, seed)
    noise = {rank: part + torch.rand(part.shape) for rank, part in held(full, layout).items()}
    diagnosed = diagnose(noise, full, layout)
    assert diagnosed is None or (diagnosed.sentence == diagnosed.sentence.strip() and "\n" not in diagnosed.sentence)


# -- parts of any number of rows, as data decides: none on some ranks, and more on a later one ------------------------


@st.composite
def dealt_rows(draw):
    """Rows that are dealt to ranks in any order: the mesh, the full tensor, and for each rank its places and rows."""
    mesh = draw(meshes(max_ranks=6, max_axes=2))
    ranks, shape = len(mesh.rank_list), draw(shapes(1, 2, max_size=6))
    full = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) + 1
    places = draw(st.permutations(range(shape[0])))
    cuts = [0, *sorted(draw(st.lists(st.integers(0, shape[0]), min_size=ranks - 1, max_size=ranks - 1))), shape[0]]
    dealt = {rank: tuple(places[start:stop]) for rank, (start, stop) in enumerate(itertools.pairwise(cuts))}
    return mesh, full, dealt, {rank: full[list(own)] for rank, own in dealt.items()}


@many
@given(dealt_rows())
def test_dealt_rows_are_found_in_their_order(case):
    _, full, dealt, parts = case
    found = order_of_rows(parts, full, 0.0)
    if len(full) > 1 and full.numel():
        assert found == (0, [own for own in dealt.values() if own])
        (turned, *_) = in_orders(full, [tuple(itertools.chain(*found[1]))])
        assert torch.equal(turned, torch.cat(list(parts.values())))
    order = order_of(parts, full)
    assert (order is None) is (not full.numel())
    assert order is None or furthest(parts, full, order) == 0.0
    if full.numel():
        parts[0] = parts[0] + 0.5
        assert (order_of_rows(parts, full, 0.0) is None) is (bool(parts[0].numel()) or found is None)


@many
@given(dealt_rows(), st.sampled_from([0.0, 0.5]), st.data())
def test_dealt_rows_are_judged(case, off, data):
    mesh, full, _, parts = case
    layout = data.draw(layouts(mesh, full.shape))
    parts[0] = parts[0] + off
    judge = Judge(mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = judge.undeclared(parts, full, 1e-12)
        said = judge.declared(parts, full, 1e-12, layout, mesh.alias_name)
    right = {each for each in every_layout(mesh, full.ndim, ()) if explains(parts, full, each)}
    assert (found.status == "right") is bool(right)
    assert (said.status == "right") is explains(parts, full, layout)
    assert off == 0 or found.status != "right" or not parts[0].numel()


@many
@given(dealt_rows(), st.data())
def test_a_submesh_holds_what_its_ranks_hold(case, data):
    mesh, full, _, parts = case
    some = data.draw(st.sets(st.sampled_from(list(parts)), min_size=1))
    few = submesh(mesh, list(some))
    assert sorted(few.rank_list) == sorted(some)
    assert all(explains(parts, full, each) for each in sim.infer_layout(parts, full, few))


def test_the_twin_can_fail():
    mesh = Layout((2,), ("dp",))
    full = torch.arange(4.0)
    assert explains(held(full, mesh("dp")), full, mesh("dp"))
    assert not explains(held(full, mesh("dp")), full, mesh("None"))
    assert not explains({0: full, 1: full + 1}, full, mesh("None"))
