"""The oracle of redistributions: full tensors cut up and put together again, and what it must find wrong."""

import pytest
import torch

import sim
from hyper_parallel.core.dtensor.layout import Layout

MESH = Layout((2, 3), ("dp", "tp"))
KINDS = ("sum", "avg", "max", "min", "prod")
DTYPES = {
    "sum": (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64),
    "avg": (torch.float32, torch.int64, torch.complex64),
    "max": (torch.float32, torch.bfloat16, torch.int64, torch.uint8),
    "min": (torch.float32, torch.bfloat16, torch.int64, torch.uint8),
    "prod": (torch.float32, torch.bfloat16, torch.int64, torch.uint8),
}


def whole(*shape, dtype=torch.int64):
    values = torch.arange(torch.Size(shape).numel()).reshape(shape) % 7
    return values.to(dtype) if not dtype.is_signed else (values - 3).to(dtype)


def parts_of(full, layout, **options):
    return {rank: sim.scatter_full(full, layout, rank, **options) for rank in layout.rank_list}


@pytest.mark.parametrize(
    ("entries", "shape", "parts"),
    [
        ((), (), [0] * 6),
        (("dp",), (3,), [[0, 1]] * 3 + [[2]] * 3),
        ((("tp", "dp"),), (4,), [[0], [2], [], [1], [3], []]),
        (("tp", "dp"), (2, 2), [[[0]], [[2]], [], [[1]], [[3]], []]),
    ],
)
def test_parts_are_slices(entries, shape, parts):
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    found = parts_of(full, MESH(*entries))
    assert [part.tolist() for part in found.values()] == parts
    assert torch.equal(sim.gather_full(found, MESH(*entries), shape), full)


def test_ranks_go_by_the_rank_list():
    layout = Layout((2,), ("dp",), (5, 3))("dp")
    parts = parts_of(torch.arange(4), layout)
    assert {rank: part.tolist() for rank, part in parts.items()} == {5: [0, 1], 3: [2, 3]}
    assert sim.gather_full(parts, layout, (4,)).tolist() == [0, 1, 2, 3]


def test_a_part_is_the_caller_s_own():
    full = torch.zeros(4, 4, requires_grad=True)
    part = sim.scatter_full(full, MESH(None, "dp"), 0)
    assert part.is_contiguous()
    assert not part.requires_grad
    part += 1
    assert full.eq(0).all()


@pytest.mark.parametrize(("kind", "dtype"), [(kind, dtype) for kind in KINDS for dtype in DTYPES[kind]], ids=str)
def test_copies_differ_and_reduce_to_the_tensor(kind, dtype):
    full = whole(5, 4, dtype=dtype)
    layout = MESH("dp", partial={"tp": kind})
    parts = parts_of(full, layout)
    assert all(part.dtype == dtype for part in parts.values())
    assert not torch.equal(parts[0], parts[1])
    assert not any(torch.equal(parts[rank], full[:3]) for rank in range(3))
    rows = torch.stack([parts[rank] for rank in range(3)])
    wanted = {
        "sum": lambda: rows.sum(0, dtype=dtype),
        "avg": lambda: (rows.sum(0, dtype=dtype) / 3).to(dtype),
        "max": lambda: rows.amax(0),
        "min": lambda: rows.amin(0),
        "prod": lambda: rows.prod(0, dtype=dtype),
    }[kind]()
    assert torch.equal(wanted, full[:3])
    assert torch.equal(sim.gather_full(parts, layout, full.shape), full)


def test_a_gathered_average_of_ints_rounds_down():
    layout = Layout((2,), ("tp",))(partial={"tp": "avg"})
    parts = [torch.tensor([-3, 3, -4, -4]), torch.tensor([2, -2, 1, 2])]
    assert sim.gather_full(parts, layout, (4,)).tolist() == [-1, 0, -2, -1]


@pytest.mark.parametrize("kind", KINDS)
def test_no_copy_can_be_left_out(kind):
    full = whole(50, dtype=torch.float64) * 2 + 11
    layout = Layout((4,), ("tp",))(partial={"tp": kind})
    parts = parts_of(full, layout)
    for left_out in range(4):
        neutral = {"max": -torch.inf, "min": torch.inf, "prod": 1.0}.get(kind, 0.0)
        fewer = parts | {left_out: torch.full_like(full, neutral)}
        assert not torch.equal(sim.gather_full(fewer, layout, full.shape), full)


def test_copies_over_several_axes_and_beside_replicas():
    mesh = Layout((2, 2, 2), ("dp", "cp", "tp"))
    layout, full = mesh(partial={"dp": "sum", "tp": "sum"}), whole(9)
    parts = parts_of(full, layout)
    assert torch.equal(parts[0], parts[2])  # along cp they are replicas
    assert torch.equal(parts[5], parts[7])
    assert torch.equal(parts[0] + parts[1] + parts[4] + parts[5], full)
    assert torch.equal(sim.gather_full(parts, layout, (9,)), full)


def test_an_axis_of_one_rank_has_nothing_pending():
    layout, full = Layout((1, 2), ("dp", "tp"))("tp", partial={"dp": "sum"}), whole(4)
    parts = parts_of(full, layout)
    assert torch.equal(parts[0], full[:2])
    assert torch.equal(sim.gather_full(parts, layout, (4,)), full)


def test_copies_stay_within_the_dtype():
    full = torch.tensor([0, 255, 1, 254] * 8, dtype=torch.uint8)
    for kind in ("max", "min"):
        layout = Layout((3,), ("tp",))(partial={"tp": kind})
        assert torch.equal(sim.gather_full(parts_of(full, layout), layout, full.shape), full)


def test_the_seed_draws_the_copies():
    layout, full = MESH(partial={"tp": "sum"}), whole(40)
    one, same, other = (sim.scatter_full(full, layout, 0, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_rank_is_its_own_default():
    layout = Layout((4,), ("tp",))("tp", partial={})
    parts = sim.run(lambda: sim.scatter_full(torch.arange(6), layout), world_size=4)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4, 5], []]
    assert sim.gather_full(parts, layout, (6,)).tolist() == [0, 1, 2, 3, 4, 5]
    pending = Layout((4,), ("tp",))(partial={"tp": "prod"})
    parts = sim.run(lambda: sim.scatter_full(torch.arange(6), pending), world_size=4)
    assert sim.gather_full(parts, pending, (6,)).tolist() == [0, 1, 2, 3, 4, 5]


# -- what it must find -----------------------------------------------------------------------------------------------


def test_replicas_that_disagree_are_named():
    layout = MESH("dp", None)
    parts = parts_of(whole(4, 4), layout)
    parts[5] = parts[5].clone()
    parts[5][1, 2] += 100
    parts[5][1, 3] += 100
    wrong = r"^ranks 3 and 5 disagree at \(3, 2\): -3 and 97\n  layout: \(dp, -\) on dp=2, tp=3$"
    with pytest.raises(AssertionError, match=wrong):
        sim.gather_full(parts, layout, (4, 4))


def test_a_scalar_on_which_ranks_disagree():
    parts = [torch.tensor(1.0)] * 5 + [torch.tensor(2.0)]
    with pytest.raises(AssertionError, match=r"^ranks 0 and 5 disagree at \(\): 1.0 and 2.0\n"):
        sim.gather_full(parts, MESH(), ())


def test_replicas_of_pending_copies_that_disagree_are_named():
    layout = MESH(partial={"tp": "sum"})
    parts = parts_of(whole(4), layout)
    parts[4] = parts[4] + 1
    with pytest.raises(AssertionError, match=r"^ranks 1 and 4 disagree at \(0,\)"):
        sim.gather_full(parts, layout, (4,))


def test_nan_agrees_with_nan_only():
    layout, nan = Layout((2,), ("tp",))(), torch.tensor([torch.nan, 1.0])
    assert sim.gather_full([nan, nan], layout, (2,)).isnan().tolist() == [True, False]
    with pytest.raises(AssertionError, match=r"^ranks 0 and 1 disagree at \(0,\): nan and 1.0"):
        sim.gather_full([nan, torch.ones(2)], layout, (2,))


def test_a_part_of_the_wrong_shape_or_dtype_is_named():
    layout = Layout((2,), ("tp",))("tp")
    with pytest.raises(AssertionError, match=r"^rank 1 holds a part of shape \(2,\), and the layout gives it \(1,\)\n"):
        sim.gather_full([torch.zeros(2), torch.zeros(2)], layout, (3,))
    with pytest.raises(AssertionError, match=r"^rank 1 holds torch.int64, rank 0 torch.float32\n"):
        sim.gather_full([torch.zeros(2), torch.zeros(2, dtype=torch.int64)], layout, (4,))
    with pytest.raises(AssertionError, match=r"^rank 1 holds torch.float64, rank 0 torch.float32\n"):
        sim.gather_full([torch.zeros(2), torch.zeros(2, dtype=torch.float64)], layout, (4,))


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: sim.scatter_full(whole(2), MESH, 0), ValueError, "the layout is a mesh without an assignment"),
        (lambda: sim.scatter_full(whole(2), MESH(None, "dp"), 0), ValueError, "entry 1, 'dp', is for a dim that"),
        (lambda: sim.scatter_full(whole(2), MESH(), 6), ValueError, "cannot find rank 6 on the mesh"),
        (
            lambda: sim.scatter_full(whole(2), MESH(partial={"dp": "sum", "tp": "max"}), 0),
            ValueError,
            "cannot scatter a tensor: sum and max are pending, and the order in which to take them is nowhere said",
        ),
        (
            lambda: sim.scatter_full(whole(2, dtype=torch.bool), MESH(partial={"dp": "max"}), 0),
            TypeError,
            "max is pending, which is not taken of torch.bool",
        ),
        (
            lambda: sim.scatter_full(whole(2, dtype=torch.complex64), MESH(partial={"dp": "prod"}), 0),
            TypeError,
            "prod is pending, which is not taken of torch.complex64",
        ),
        (lambda: sim.gather_full([], MESH, (2,)), ValueError, "the layout is a mesh without an assignment"),
        (lambda: sim.gather_full([whole(2)], MESH(), (2,)), ValueError, "there is no part of rank 1"),
        (lambda: sim.gather_full({0: whole(2), 2: whole(2)}, MESH(), (2,)), ValueError, "there is no part of rank 1"),
        (lambda: sim.gather_full([1, 2], MESH(), (2,)), ValueError, "rank 0 gave a int"),
        (
            lambda: sim.gather_full([], MESH(partial={"dp": "sum", "tp": "max"}), (2,)),
            ValueError,
            "cannot gather a tensor: sum and max are pending",
        ),
    ],
)
def test_wrong_arguments(call, kind, text):
    with pytest.raises(kind, match=text):
        call()
