"""The twin of torch's planner: known plans, the reasons it refuses, and versions that cannot be asked."""

import sys

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard, _redistribute

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.machine import find_machine
from hyper_parallel.core.redistribute import bounds, plan
from hyper_parallel.core.redistribute.bounds import NO_PLANNER, torch_plan

MESH = Layout((2, 4), ("dp", "tp"))
F32 = torch.float32


def steps_of(plan):
    assert plan.refused is None, plan.refused
    return [(step.kind, step.axis, step.group_size, step.recv_bytes.tolist()) for step in plan.steps]


def alike(number):
    return [number] * 8


# Known plans: a float32 matrix of 16 x 8 elements is 512 bytes


@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        pytest.param(MESH("dp", "tp"), MESH("dp", "tp"), [], id="equal layouts"),
        pytest.param(MESH(), MESH("dp", "tp"), [("slice", "dp", 2, alike(0)), ("slice", "tp", 4, alike(0))], id="R-S"),
        pytest.param(
            MESH(("dp", "tp")),
            MESH(),
            [("all_gather", "tp", 4, alike(3 * 64)), ("all_gather", "dp", 2, alike(256))],
            id="gathered axis by axis, the inner one first",
        ),
        pytest.param(MESH("tp"), MESH("None", "tp"), [("all_to_all", "tp", 4, alike(3 * 32))], id="exchanged"),
        pytest.param(
            MESH(partial={"tp": "sum"}), MESH("tp"), [("reduce_scatter", "tp", 4, alike(3 * 128))], id="reduced"
        ),
        pytest.param(
            MESH(partial={"tp": "avg", "dp": "avg"}),
            MESH(),
            [("all_reduce", "dp", 2, alike(512)), ("all_reduce", "tp", 4, alike(768))],
            id="reduced axis by axis",
        ),
        pytest.param(
            MESH("tp", partial={"dp": "sum"}),
            MESH(("dp", "tp")),
            [
                ("all_gather", "tp", 4, alike(3 * 128)),
                ("reduce_scatter", "dp", 2, alike(256)),
                ("slice", "tp", 4, alike(0)),
            ],
            id="gathered before it is reduced",
        ),
        pytest.param(
            MESH(("dp", "tp")),
            MESH(("tp", "dp")),
            [
                ("all_gather", "tp", 4, alike(3 * 64)),
                ("all_gather", "dp", 2, alike(256)),
                ("slice", "tp", 4, alike(0)),
                ("slice", "dp", 2, alike(0)),
            ],
            id="another order of split goes through replicas",
        ),
    ],
)
def test_known_plans(src, dst, steps):
    plan = torch_plan(src, dst, (16, 8), F32)
    assert steps_of(plan) == steps
    assert plan.num_collectives == sum(kind not in ("slice", "copy") for kind, *_ in steps)
    assert plan.recv_bytes.tolist() == plan.send_bytes.tolist() == alike(sum(step[3][0] for step in steps))


def test_padding_counts():
    """Five rows over four ranks: parts of 2, 2, 1 and 0 rows, each padded to 2."""
    mesh = Layout((4,), ("tp",))
    assert steps_of(torch_plan(mesh("tp"), mesh(), (5, 3), F32)) == [("all_gather", "tp", 4, [3 * 2 * 3 * 4] * 4)]
    exchanged = torch_plan(mesh("tp"), mesh("None", "tp"), (5, 3), F32)
    assert steps_of(exchanged) == [("all_to_all", "tp", 4, [3 * (2 * 1) * 4] * 4)]
    reduced = torch_plan(mesh(partial={"tp": "max"}), mesh("tp"), (5, 3), torch.float64)
    assert steps_of(reduced) == [("reduce_scatter", "tp", 4, [3 * (2 * 3) * 8] * 4)]


def test_ranks_of_an_uneven_dim_receive_different_amounts():
    mesh = Layout((2, 2), ("dp", "tp"))
    plan = torch_plan(mesh("dp", "tp"), mesh("dp"), (5, 4), F32)
    assert steps_of(plan) == [("all_gather", "tp", 2, [3 * 2 * 4] * 2 + [2 * 2 * 4] * 2)]


def test_a_cpu_gathers_where_others_exchange():
    plan = torch_plan(MESH("tp"), MESH("None", "tp"), (16, 8), F32, device_type="cpu")
    assert steps_of(plan) == [("all_gather", "tp", 4, alike(3 * 128))]


def test_axes_of_one_rank_take_no_step():
    mesh = Layout((1, 2), ("dp", "tp"))
    assert steps_of(torch_plan(mesh("dp", "tp"), mesh(), (4, 4), F32)) == [("all_gather", "tp", 2, [32, 32])]


def test_rank_lists_stay_in_mesh_order():
    mesh = Layout((2,), ("tp",), (7, 3))
    plan = torch_plan(mesh("tp"), mesh(), (4,), F32)
    assert (plan.ranks, plan.recv_bytes.tolist()) == ((7, 3), [8, 8])


def test_placement_form_is_understood():
    plan = torch_plan(MESH(Replicate(), Shard(-1)), MESH(Replicate(), Replicate()), (16, 8), F32)
    assert steps_of(plan) == [("all_gather", "tp", 4, alike(3 * 128))]


def test_scalars_have_plans_too():
    plan = torch_plan(MESH(partial={"tp": "sum"}), MESH(), (), F32)
    assert steps_of(plan) == [("all_reduce", "tp", 4, alike(6))]


def test_an_all_reduce_that_does_not_divide_evenly():
    """Five bytes over three ranks, which reduce 1, 2 and 2 of them: 2 (n - 1) times the data is received in all."""
    mesh = Layout((3,), ("tp",))
    plan = torch_plan(mesh(partial={"tp": "max"}), mesh(), (5,), torch.uint8)
    assert steps_of(plan) == [("all_reduce", "tp", 3, [5 + 1, 5 + 2, 5 + 2])]
    assert plan.recv_bytes.sum() == 2 * (3 - 1) * 5


def test_a_mix_of_sums_and_averages_is_reduced():
    plan = torch_plan(MESH(partial={"dp": "sum", "tp": "avg"}), MESH(), (4,), F32)
    assert [step.kind for step in plan.steps] == ["all_reduce", "all_reduce"]


# Time and memory


def test_steps_are_priced_like_our_own():
    on = find_machine("h100-sxm").with_figures(node__devices=4)
    src, dst = MESH(("dp", "tp"), "None"), MESH()
    gather = torch_plan(src, dst, (1024, 1024), F32, on).steps
    near = plan(MESH("tp"), MESH(), (1024, 1024), F32, on)
    assert gather[0].seconds < gather[1].seconds, "tp is within a node, dp is not"
    assert torch_plan(MESH("tp"), MESH(), (1024, 1024), F32, on).seconds == pytest.approx(near.seconds, rel=0.3)
    assert torch_plan(src, dst, (1024, 1024), F32, on).seconds == sum(step.seconds for step in gather)


def test_extra_memory_is_what_is_neither_source_nor_result():
    """16 x 8 float32: the first gather leaves 256 bytes that the second one starts from."""
    plan = torch_plan(MESH(("dp", "tp")), MESH(), (16, 8), F32)
    assert [step.peak_extra_bytes for step in plan.steps] == [256, 256]
    assert plan.peak_extra_bytes == 256
    columns = torch_plan(MESH("None", "tp"), MESH(), (16, 8), F32)
    assert columns.peak_extra_bytes == 512, "gathered along dim 0, then put side by side"
    assert torch_plan(MESH(), MESH(), (16, 8), F32).peak_extra_bytes == 0


# Refusals


@pytest.mark.parametrize(
    ("src", "dst", "shape", "reason"),
    [
        (MESH(), Layout((8,), ("dp",))(), (4,), "torch does not redistribute from one mesh to another"),
        (MESH(), Layout((2, 4), ("dp", "tp"), range(8, 16))(), (4,), "from one mesh to another"),
        (MESH(), MESH(partial={"tp": "sum"}), (4,), "to Partial: sum over 'tp' would be new"),
        (MESH(partial={"tp": "sum"}), MESH(partial={"tp": "avg"}), (4,), "to Partial: avg over 'tp' would be new"),
        (MESH("tp"), MESH(partial={"tp": "max"}), (4,), "to Partial: max over 'tp' would be new"),
        (MESH(partial={"tp": "sum", "dp": "max"}), MESH(), (4,), "does not mix kinds of Partial: max and sum"),
        (MESH(("tp", "dp")), MESH(), (7,), "dim 0 (size 7) is split over 'tp' then 'dp', against the order of"),
        (MESH(), MESH(("tp", "dp")), (7,), "dim 0 (size 7) is split over 'tp' then 'dp', against the order of"),
    ],
)
def test_torch_refuses(src, dst, shape, reason):
    plan = torch_plan(src, dst, shape, F32)
    assert reason in plan.refused
    assert "\n" not in plan.refused
    assert (plan.steps, plan.num_collectives, plan.recv_bytes.tolist()) == ((), 0, alike(0))


def test_a_split_becomes_a_pending_sum_where_this_torch_can():
    plan = torch_plan(MESH("tp"), MESH(partial={"tp": "sum"}), (4,), F32)
    if hasattr(Shard, "_to_partial_tensor"):
        assert steps_of(plan) == [("copy", "tp", 4, alike(0))]
    else:
        assert "would be new" in plan.refused


@pytest.mark.parametrize(
    ("src", "dst", "shape", "message"),
    [
        (MESH, MESH(), (4,), "a mesh without an assignment"),
        (MESH(), MESH, (4,), "a mesh without an assignment"),
        (MESH("dp", "tp"), MESH(), (4,), "a dim that a tensor of ndim 1 does not have"),
        (MESH(), MESH(Shard(3), Replicate()), (4,), "the tensor has ndim 1"),
        (MESH(), MESH(), (-1,), "global_shape.0. must be at least 0"),
    ],
)
def test_mistakes_of_the_caller_are_errors(src, dst, shape, message):
    with pytest.raises(ValueError, match=message):
        torch_plan(src, dst, shape, F32)


# Versions of torch that cannot be asked


def test_no_planner_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor._redistribute", None)
    monkeypatch.delattr("torch.distributed.tensor._redistribute")
    assert torch_plan(MESH("tp"), MESH(), (4,), F32).refused == NO_PLANNER


def test_no_planner_function(monkeypatch):
    monkeypatch.delattr(_redistribute, "_gen_transform_infos_non_cached")
    assert torch_plan(MESH("tp"), MESH(), (4,), F32).refused == NO_PLANNER


def test_another_signature(monkeypatch):
    monkeypatch.setattr(_redistribute, "_gen_transform_infos_non_cached", lambda source, target: [])
    assert torch_plan(MESH("tp"), MESH(), (4,), F32).refused == NO_PLANNER


def test_another_answer(monkeypatch):
    monkeypatch.setattr(_redistribute, "_gen_transform_infos_non_cached", lambda src_spec, dst_spec: [object()])
    assert torch_plan(MESH("tp"), MESH(), (4,), F32).refused == NO_PLANNER


def test_a_planner_that_fails_is_a_refusal(monkeypatch):
    def fail(src_spec, dst_spec):
        raise AssertionError("no path")

    monkeypatch.setattr(_redistribute, "_gen_transform_infos_non_cached", fail)
    assert torch_plan(MESH("tp"), MESH(), (4,), F32).refused == "torch's planner fails: AssertionError: no path"


# Nothing is left behind


def test_torch_keeps_no_planner_of_ours():
    before = len(getattr(_redistribute, "_planner_cache", ()))
    torch_plan(MESH(("tp", "dp")), MESH(("dp", "tp")), (8,), F32)
    torch_plan(MESH("tp"), MESH(partial={"dp": "sum"}), (8,), F32)
    assert len(getattr(_redistribute, "_planner_cache", ())) == before


def test_an_unknown_device_type_is_planned_for_as_cuda():
    plan = torch_plan(MESH(("tp", "dp")), MESH(("dp", "tp")), (8,), F32, device_type="abacus")
    assert [step.kind for step in plan.steps] == ["all_gather", "all_gather", "slice", "slice"]


def test_byte_counts_cannot_be_changed():
    plan = torch_plan(MESH("tp"), MESH(), (4,), F32)
    with pytest.raises(ValueError, match="read-only"):
        plan.steps[0].recv_bytes[0] = 1


def test_the_kinds_are_those_of_the_placements():
    full = np.full((1, 1), 8)
    kinds = {
        (Partial(), Replicate()): "all_reduce",
        (Partial(), Shard(0)): "reduce_scatter",
        (Shard(0), Replicate()): "all_gather",
        (Replicate(), Shard(0)): "slice",
        (Replicate(), Partial()): "copy",
    }
    for (before, after), kind in kinds.items():
        assert bounds._load(full, 2, before, after, on_cpu=False).kind == kind
