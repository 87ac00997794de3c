"""Layouts that explain given shards, how well one does, and the error when none does."""

import math
from fractions import Fraction

import pytest
import torch

import sim
from hyper_parallel.core.dtensor.layout import Layout
from sim.prove import faults
from sim.prove.evidence import gap
from sim.prove.faults import diagnose
from sim.prove.infer import explanations, fit

pytestmark = pytest.mark.sim

MESH = Layout((2, 4), ("dp", "tp"))


def whole(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def held(full, layout):
    return [sim.scatter_full(full, layout, rank) for rank in layout.rank_list]


@pytest.mark.parametrize(
    ("entries", "partial"),
    [
        ((None, None), {}),
        (("dp", None), {}),
        (("tp", "dp"), {}),
        ((("dp", "tp"), None), {}),
        ((("tp", "dp"), None), {}),
        ((None, "tp"), {"dp": "sum"}),
        ((None, None), {"tp": "avg"}),
        ((None, None), {"dp": "sum", "tp": "sum"}),
        (("dp", None), {"tp": "max"}),
        (("dp", None), {"tp": "min"}),
        ((None, None), {"dp": "prod"}),
    ],
)
@pytest.mark.parametrize("shape", [(8, 16), (7, 5)])
def test_the_layout_is_found_and_no_other(entries, partial, shape):
    layout = MESH(*entries, partial=partial)
    assert sim.infer_layout(held(whole(*shape), layout), whole(*shape), MESH) == [layout]


def test_sums_and_averages_may_be_pending_together():
    full, layout = whole(6), Layout((2, 3), ("dp", "tp"))
    parts = held(2 * full, layout(partial={"dp": "sum", "tp": "sum"}))
    found = sim.infer_layout(parts, full, layout)
    assert found == [layout("None", partial={"dp": "avg", "tp": "sum"})]


def test_simple_explanations_come_first():
    zeros = torch.zeros(4, 4)
    found = sim.infer_layout([zeros] * 8, zeros, MESH)
    pending = [layout.partial for layout in found]
    assert pending == [{}, {"dp": "sum"}, {"tp": "sum"}, {"dp": "sum", "tp": "sum"}]
    square = torch.ones(4, 4)
    both = sim.infer_layout([square[:2]] * 2, square, "a=2")
    assert [layout.alias_placements for layout in both] == [("a", "None")]
    either = sim.infer_layout([torch.zeros(0, 3)] * 2, torch.zeros(0, 3), "a=2")
    assert [layout.alias_placements for layout in either] == [("None", "None"), ("a", "None")]


def test_axes_of_one_rank_split_nothing():
    full = whole(4)
    mesh = Layout((1, 2, 1), ("dp", "tp", "cp"))
    assert sim.infer_layout(list(full.chunk(2)), full, mesh) == [mesh("tp")]
    assert sim.infer_layout([full], full, "dp=1") == [Layout((1,), ("dp",))("None")]


def test_both_orders_are_listed_when_the_values_allow_both():
    full = torch.ones(8)
    found = sim.infer_layout([full[:2]] * 4, full, "a=2,b=2")
    mesh = Layout((2, 2), ("a", "b"))
    assert found == [mesh(("a", "b")), mesh(("b", "a"))]


def test_meshes_in_every_spelling_and_parts_by_rank():
    from torch.distributed.device_mesh import init_device_mesh

    full = whole(6)
    parts = {rank: full.chunk(2)[rank] for rank in range(2)}
    for mesh in (Layout((2,), ("tp",)), {"tp": 2}, "tp=2"):
        assert sim.infer_layout(parts, full, mesh) == [Layout((2,), ("tp",))("tp")]
    found = sim.run(
        lambda: sim.infer_layout(parts, full, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))), world_size=2
    )
    assert found == [[Layout((2,), ("tp",))("tp")]] * 2
    turned = Layout((2,), ("tp",), (5, 3))
    assert sim.infer_layout({3: full[3:], 5: full[:3]}, full, turned) == [turned("tp")]


def test_results_of_ranks_with_dtensors_count_as_local_parts():
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    full = whole(4, 6)

    def body():
        return distribute_tensor(full, init_device_mesh("cpu", (4,)), [Shard(1)])

    assert sim.infer_layout(sim.run(body, world_size=4), full, "tp=4")[0].alias_placements == ("None", "tp")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_the_default_bound_lets_roundings_through_and_nothing_more(dtype):
    layout = MESH("dp", partial={"tp": "sum"})
    full = whole(64, 8).to(dtype)
    parts = held(full, layout)
    assert layout in sim.infer_layout(parts, full, MESH)
    parts[3] = parts[3] + (64 if dtype == torch.bfloat16 else 1)
    assert sim.infer_layout(parts, full, MESH) == []


def test_the_default_bound_grows_with_the_copies_that_cancel():
    full = whole(1000)
    noise = [whole(1000) * 1e4 * (rank + 1) for rank in range(3)]
    parts = [*noise, full - sum(noise)]  # each about 1e4 times larger than their sum, and rounded accordingly
    found = explanations(parts, full, "tp=4")
    assert [each.layout.partial for each in found] == [{"tp": "sum"}]
    assert found[0].error > 16 * 2**-24 * full.abs().max()


def test_bounds_by_number_and_by_element():
    full = torch.tensor([1.0, 100.0])
    off = torch.tensor([1.5, 99.5])
    mesh = Layout((2,), ("dp",))
    assert sim.infer_layout([full, off], full, mesh, bound=0.2) == []
    assert sim.infer_layout([full, off], full, mesh, bound=0.5) == [mesh("None")]
    assert sim.infer_layout([full, off], full, mesh, bound=torch.tensor([0.2, 0.2])) == []
    (found,) = explanations([full, off], full, mesh, torch.tensor([1.0, 2.0]))
    assert (found.error, found.ratio, found.rank, found.index) == (0.5, 0.5, 1, (0,))
    assert sim.infer_layout([full, off], full, mesh, bound=math.inf)[0] == mesh("None")


def test_whole_numbers_and_booleans_are_exact():
    counts = torch.arange(6)
    mesh = Layout((2,), ("dp",))
    assert sim.infer_layout([counts, counts + 1], counts, mesh, bound=5.0) == [mesh("None", partial={"dp": "min"})]
    assert sim.infer_layout([counts - 1, torch.ones(6, dtype=torch.int64)], counts, mesh) == [
        mesh("None", partial={"dp": "sum"})
    ]
    large = torch.tensor([2**60 + 1])
    assert sim.infer_layout([large, large - 2], large, mesh) == [mesh("None", partial={"dp": "max"})]
    mask = torch.tensor([True, False])
    assert sim.infer_layout([mask, mask], mask, mesh) == [mesh("None")]
    assert sim.infer_layout([mask, ~mask], mask, mesh) == []


def test_nan_equals_nan_and_infinity_itself():
    full = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    assert sim.infer_layout([full, full.clone()], full, "dp=2") == [Layout((2,), ("dp",))("None")]
    for wrong in (torch.tensor([0.0, math.inf, -math.inf, 1.0]), torch.tensor([math.nan, -math.inf, -math.inf, 1.0])):
        assert Layout((2,), ("dp",))("None") not in sim.infer_layout([full, wrong], full, "dp=2")
        assert fit([full, wrong], full, Layout((2,), ("dp",))("None")).error == math.inf


def test_scalars_and_tensors_without_elements():
    mesh = Layout((2,), ("dp",))
    assert sim.infer_layout([torch.tensor(1.0)] * 2, torch.tensor(2.0), mesh) == [mesh(partial={"dp": "sum"})]
    assert sim.infer_layout([torch.tensor(2.0)] * 2, torch.tensor(2.0), mesh) == [mesh()]
    assert sim.infer_layout([torch.zeros(0)] * 2, torch.zeros(0), mesh) == [mesh("None"), mesh("dp")]
    assert sim.infer_layout([torch.ones(1), torch.ones(0)], torch.ones(1), mesh) == [mesh("dp")]


def test_four_axes():
    mesh = Layout((2, 2, 2, 2), ("a", "b", "c", "d"))
    layout = mesh(("d", "a"), "None", partial={"b": "sum", "c": "sum"})
    assert sim.infer_layout(held(whole(9, 4), layout), whole(9, 4), mesh) == [layout]


def test_a_fit_says_where_the_worst_element_is():
    full, layout = whole(8, 4), MESH("dp", "tp")
    parts = held(full, layout)
    assert fit(parts, full, layout).fits
    assert str(fit(parts, full, layout)) == "equal"
    parts[6][1, 0] += 2  # dp 1, tp 2: rows 4.., column 2
    found = fit(parts, full, layout)
    assert not found.fits
    assert (found.rank, found.index) == (6, (5, 2))
    assert found.seen == pytest.approx(found.expected + 2)
    assert str(found).startswith(
        f"rank 6 holds {found.seen:.6g} at (5, 2), not {found.expected:.6g}: off by 2.00e+00, "
    )


def test_a_fit_reduces_what_is_pending():
    full, layout = whole(8), MESH("None", partial={"dp": "sum"})
    parts = held(full, layout)
    assert fit(parts, full, layout).fits
    assert not fit(parts, full, MESH("None")).fits
    mixed = fit(parts, full, MESH("None", partial={"dp": "sum", "tp": "max"}))
    assert mixed.problem == "max and sum are pending, and the order in which to take them is nowhere said"
    assert not mixed.fits


def test_a_fit_reports_shapes_and_does_not_raise():
    found = fit([whole(8, 4)] * 8, whole(8, 4), MESH("dp", "tp"))
    assert not found.fits
    assert str(found) == "rank 0 holds shape (8, 4) where dp, tp gives it (4, 1)"


# -- diagnoses ---------------------------------------------------------------------------------------------------------


def diagnosed(parts, full, mesh=MESH, **more):
    assert explanations(parts, full, mesh) == [] or "declared" in more
    return diagnose(parts, full, mesh, **more)


def test_nothing_is_said_of_parts_that_a_layout_explains():
    full = whole(8, 4)
    assert diagnose(held(full, MESH("dp", "tp")), full, MESH) is None
    assert diagnose(held(full, MESH("dp", "tp")), full, MESH, declared=MESH("dp", "tp")) is None


def test_nothing_is_said_of_noise_that_all_ranks_share():
    noise = torch.rand(8, 4)
    assert diagnosed([noise] * 8, whole(8, 4)) is None


@pytest.mark.parametrize(
    ("factor", "axis", "sentence"),
    [
        (2, "dp", "every part is 2 times what it should be: counted once per rank of 'dp'"),
        (4, "tp", "every part is 4 times what it should be: counted once per rank of 'tp'"),
        (8, None, "every part is 8 times what it should be: counted once per rank of 'dp' and 'tp'"),
        (1.5, None, "every part is 3/2 times what it should be"),
        (-1, None, "every part is what it should be with the wrong sign"),
        (0, None, "every part is zero"),
    ],
)
def test_factors(factor, axis, sentence):
    full = whole(8, 4)
    found = diagnosed([factor * full] * 8, full)
    assert (str(found), found.kind, found.axis, found.factor) == (sentence, "scaled", axis, Fraction(factor))


def test_factors_of_shards_and_of_sums():
    full = whole(8, 4)
    found = diagnosed([part / 4 for part in held(full, MESH("None", "tp"))], full)
    assert found.sentence == "every part is 1/4 of what it should be: averaged once too often over 'tp'"
    found = diagnosed(held(3 * full, MESH("dp", partial={"tp": "sum"})), full)
    assert found.sentence == "the sum of the parts over 'tp' is 3 times what it should be"


def test_a_declared_layout_is_looked_at_even_when_another_explains_the_parts():
    full = whole(8, 4)
    parts = [full / 2] * 8  # also parts of a sum over dp
    assert diagnose(parts, full, MESH) is None
    found = diagnosed(parts, full, declared=MESH("None", "None"))
    assert found.sentence == "every part is 1/2 of what it should be: averaged once too often over 'dp'"
    assert found.axis == "dp"


def test_parts_in_another_order():
    full, layout = whole(8, 4), MESH("dp", "tp")
    parts = held(full, layout)
    swapped = [parts[rank] for rank in (0, 2, 1, 3, 4, 6, 5, 7)]
    found = diagnosed(swapped, full)
    assert found.sentence == "the parts of the ranks along 'tp' are in another order: (0, 2, 1, 3)"
    assert (found.kind, found.axis, found.order) == ("reordered", "tp", (0, 2, 1, 3))
    found = diagnosed([parts[rank] for rank in (0, 1, 2, 7, 4, 5, 6, 3)], full)
    assert found.sentence == "parts are on the wrong ranks: rank 3 holds rank 7's part, rank 7 holds rank 3's part"


def test_pieces_of_a_gathered_tensor_in_another_order():
    full = whole(8, 4)
    found = diagnosed([torch.cat(full.chunk(2)[::-1])] * 8, full)
    words = "pieces of dim 0 are in another order"
    assert found.sentence == f"the 2 {words}: (1, 0), as if gathered over 'dp' in another order of ranks"
    assert (found.kind, found.axis, found.order) == ("permuted", "dp", (1, 0))
    pieces = full.chunk(8)
    found = diagnosed([torch.cat([*pieces[::2], *pieces[1::2]])] * 8, full)
    assert found.sentence.startswith(f"the 8 {words}: (0, 2, 4, 6, 1, 3, 5, 7), as if gathered over 'dp' and 'tp'")
    assert diagnosed([torch.cat([*pieces[:7], pieces[0]])] * 8, full) is None  # a piece is lost


def test_to_look_for_another_order_costs_as_many_comparisons_as_there_are_ranks(monkeypatch):
    def comparisons(dp):
        full, seen = torch.rand(64, 2), []
        monkeypatch.setattr(faults, "gap", lambda *pair: seen.append(pair) or gap(*pair))
        assert "should hold the same" in diagnosed([torch.rand(64, 2) for _ in range(dp)], full, f"dp={dp}").sentence
        return len(seen)

    assert comparisons(64) <= 8 * comparisons(8)


def test_pieces_that_are_not_as_many_as_ranks():
    full = whole(8, 4)
    parts = [full.chunk(2)[rank // 2] for rank in range(4)]
    found = diagnosed(parts, full, "tp=4")
    assert (found.kind, found.sentence) == (
        "pieces",
        "dim 0 is held in 2 pieces, which no split over the mesh gives: "
        "ranks 0, 1 hold piece 0; ranks 2, 3 hold piece 1",
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_of_a_coarser_dtype(dtype):
    full = torch.rand(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    word = str(dtype).removeprefix("torch.")
    tail = f"numbers that {word} has, near the right ones: they were computed in {word} or cast to it"
    cast = full.to(dtype).to(torch.float64)
    assert diagnosed([cast] * 2, full, "dp=2").sentence == f"the ranks hold {tail}"
    found = diagnosed([full, cast], full, "dp=2")
    assert (found.sentence, found.ranks) == (f"rank 1 (dp=1) holds {tail}", (1,))
    ones = torch.ones(8, 4, dtype=torch.float64)  # any dtype has them
    assert diagnosed([ones, ones], ones + 1e-3 * full, "dp=2") is None
    assert diagnosed([cast + 1] * 2, full, "dp=2") is None  # far from the right ones


def test_the_same_values_on_every_shard():
    full = whole(8, 4)
    found = diagnosed([torch.full((8, 1), 2.0)] * 4 + [torch.full((8, 1), 3.0)] * 4, full)
    words = "the ranks along 'tp' hold the same values where each should hold its own part"
    assert (found.sentence, found.axis) == (f"{words}: the same random seed on every shard?", "tp")
    found = diagnosed([full[:, :1]] * 8, full)
    assert found.sentence == f"{words}: all hold the first one's"


def test_some_ranks_are_wrong():
    full = whole(8, 4)
    parts = held(full, MESH("dp", "None"))
    parts[5] = parts[5] + 1
    found = diagnosed(parts, full)
    assert found.sentence == "rank 5 is wrong, and the other 7 hold what they should"
    assert (found.kind, found.ranks) == ("some_ranks", (5,))
    parts = held(full, MESH())[:4] + [torch.zeros(8, 4)] * 4
    found = diagnose(parts, full, MESH, declared=MESH())
    assert found.sentence == "ranks 4, 5, 6, 7 (dp=1) hold zeros, and the other 4 hold what they should"
    assert found.axis == "dp"


def test_copies_that_differ():
    full, wrong = whole(8, 4), torch.rand(8, 4)
    parts = [wrong] * 7 + [wrong + 0.25]
    found = diagnosed(parts, full)
    head = "the ranks along 'dp' and 'tp' should hold the same and do not"
    assert found.sentence == f"{head}: rank 7 differs from the others by 0.25"
    assert (found.kind, found.axis, found.ranks) == ("copies_differ", None, (7,))
    drifted = diagnosed([wrong + rank % 4 for rank in range(8)], full)
    assert drifted.sentence == "the ranks along 'tp' should hold the same and do not: ranks 0 and 1 differ by 1"
    found = diagnosed([torch.full((4,), float(rank)) for rank in range(2)], whole(4), "dp=2")
    assert found.sentence == "the ranks along 'dp' should hold the same and do not: ranks 0 and 1 differ by 1"


def test_a_bias_that_is_added_by_every_rank():
    product, bias = whole(8, 4), torch.tensor([1.0, -2.0, 3.0, 0.5])
    full = product + bias
    parts = [part + bias for part in held(product, MESH(partial={"tp": "sum"}))]
    found = diagnosed(parts, full)
    words = "the sum of the parts over 'tp' is off by the same vector in each row, as by a bias"
    assert found.sentence == f"{words} that each of the 4 ranks adds: add it once, after the reduction"
    assert (found.kind, found.axis) == ("added", "tp")
    found = diagnosed([full + 3 * bias] * 8, full)
    words = "every part is off by the same vector in each row, as by a bias"
    assert found.sentence == f"{words} that was added once per rank of an axis, or not at all"


def test_a_residual_that_is_added_by_every_rank():
    product, residual = whole(8, 4), torch.rand(8, 4)
    parts = [part + residual for part in held(product, MESH(partial={"tp": "sum"}))]
    found = diagnosed(parts, product + residual, addends={"x": residual, "far": torch.ones(3)})
    words = "the sum of the parts over 'tp' is the reference plus 3 times x"
    assert found.sentence == f"{words}: each of the 4 ranks adds it; add it once, after the reduction"
    found = diagnosed([product + 2 * residual] * 2, product + residual, "tp=2", addends={"x": residual})
    words = "every part is the reference plus x once more, as if each of the 2 ranks along 'tp' adds it"
    assert found.sentence == f"{words}; add it once, after the reduction"
    found = diagnosed([product] * 8, product + residual, addends={"x": residual})
    assert found.sentence == "every part has 1 times x too little"


def test_fused_weights_and_parts_dealt_in_turn():
    full = whole(24, 4)
    pieces = [torch.cat([block.chunk(4)[rank] for block in full.chunk(3)]) for rank in range(4)]
    found = diagnosed(pieces, full, "tp=4")
    words = "each part holds a piece of each of 3 blocks of dim 0"
    assert found.sentence == f"{words}, as if 'tp' split fused weights one by one"
    found = diagnosed([full[rank::4] for rank in range(4)], full, "tp=4")
    assert found.sentence == "dim 0 is dealt to the ranks along 'tp' in turn, one element each, not in one piece each"


def test_values_that_are_not_finite():
    full = whole(8, 4)
    parts = held(full, MESH("dp"))
    parts[3][0, 0] = math.nan
    assert diagnosed(parts, full).sentence == "rank 3 holds NaN or infinity where the reference is finite"


def test_shapes():
    full = whole(8, 4)
    found = diagnosed([torch.zeros(8, 16)] * 8, full)
    assert found.sentence == "dim 1 is 4 times as long as it should be: gathered once too often over 'tp'"
    found = diagnosed([torch.zeros(2, 16)] * 8, full)
    assert found.sentence == (
        "dim 1 is 4 times as long as it should be, and dim 0 1/4 as long: "
        "gathered over 'tp' along dim 1 instead of dim 0"
    )
    found = diagnosed([torch.zeros(8)] * 8, full)
    assert found.sentence == "rank 0 holds 1 dims, (8,), and the reference has 2, (8, 4)"
    found = diagnosed([torch.zeros(3, 4)] * 2, torch.zeros(5, 4), "dp=2")
    assert found.sentence == (
        "dim 0 of size 5 does not split evenly over 'dp', and the last part is padded: every rank holds 3"
    )
    found = diagnosed([torch.zeros(5, 4), torch.zeros(3, 4)], full, "dp=2")
    assert found.sentence == (
        "no split of (8, 4) over dp=2 gives these parts: rank 1 holds (3, 4), rank 0 holds (5, 4) (2 ranks)"
    )


def test_shapes_that_another_layout_than_the_declared_one_gives():
    full = whole(8, 4)
    found = diagnosed(held(full, MESH("dp")), full, declared=MESH("tp"))
    assert (found.kind, found.sentence) == ("shapes", "rank 0 holds shape (4, 4) where tp gives it (2, 4)")


def test_exact_numbers_are_diagnosed_too():
    counts = torch.arange(6)
    assert diagnosed([counts * 2] * 2, counts, "dp=2").factor == 2
    assert diagnosed([counts, counts * 0 - 5, counts], counts, "dp=3").ranks == (1,)


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((torch.ones(2), torch.ones(2), "dp=2"), TypeError, "locals is a Tensor, not one tensor per rank"),
        (([torch.ones(2)], torch.ones(2), "dp=2"), ValueError, "locals has none for rank 1 of the mesh"),
        (({0: torch.ones(2)}, torch.ones(2), "dp=2"), ValueError, "locals: 1 tensors for 2 ranks"),
        (([torch.ones(2), 3.0], torch.ones(2), "dp=2"), TypeError, r"locals\[1\] is a float, not a tensor"),
        (([torch.ones(2)] * 2, [1.0, 1.0], "dp=2"), TypeError, "reference is a list, not a tensor"),
        (([torch.ones(2)] * 2, torch.ones(2, device="meta"), "dp=2"), ValueError, "reference is on meta"),
        (([torch.ones(2)] * 2, torch.ones(2), 2), TypeError, "mesh is a int"),
        (([torch.ones(2)] * 2, torch.ones(2), "dp"), ValueError, "'dp' has no '='"),
    ],
)
def test_mistakes_are_named(arguments, error, words):
    with pytest.raises(error, match=words) as caught:
        sim.infer_layout(*arguments)
    assert "\n  try: " in str(caught.value) or "try" in str(caught.value)


@pytest.mark.parametrize(
    ("bound", "error", "words"),
    [
        (-1.0, ValueError, "bound is negative or NaN"),
        (math.nan, ValueError, "bound is negative or NaN"),
        ("tight", TypeError, "str"),
        (torch.ones(3), RuntimeError, "expand"),
        (torch.tensor([-1.0, 1.0]), ValueError, "bound is negative or NaN"),
    ],
)
def test_bad_bounds_are_named(bound, error, words):
    with pytest.raises(error, match=words):
        sim.infer_layout([torch.ones(2)] * 2, torch.ones(2), "dp=2", bound=bound)
