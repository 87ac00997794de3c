"""Communication of a pipeline's step, and memory in it and after it: counted on simulated ranks."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_kit import Case, make, rows_and_targets
from torch import nn

import sim
from hyper_parallel import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, init_device_mesh
from hyper_parallel.core.fully_shard.unit import StepControl, nested_units
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.pipeline import SCHEDULES, Pipeline, stages_of_rank
from hyper_parallel.models import LlamaConfig
from sim.mesh import Job, Recipe, find_model, trace
from sim.mesh.program import Alloc, Comm, Op, Wait
from sim.mesh.tracing.stitch import orders

pytestmark = [pytest.mark.sim, pytest.mark.tier("test")]

NAMES = [name for name, kind in SCHEDULES.items() if kind.is_available]


def one_step(case: Case, evaluates: bool) -> None:
    """Take a step, after one that finds out shapes and a barrier."""
    device = torch.device("cpu")
    mesh = init_device_mesh("cpu", (case.pp, case.dp, case.tp), mesh_dim_names=("pp", "dp", "tp"))
    pipeline = make(case, device, torch.float32, mesh)
    rows, targets = (full.chunk(case.dp)[mesh["dp"].get_local_rank()] for full in rows_and_targets(device))
    run = pipeline.eval if evaluates else pipeline.step
    run(rows, targets)
    dist.barrier()
    run(rows, targets)


def counted(case: Case, *, evaluates: bool = False) -> Counter[tuple[int, str, str]]:
    """How often the ranks of each place along pp did what on which axis."""
    counts: Counter[tuple[int, str, str]] = Counter()
    with sim.world(case.pp * case.dp, seed=0) as world:
        world.run(one_step, (case, evaluates))
        for rank in range(case.pp * case.dp):
            events = [event for event in world.trace.events if event.rank == rank]
            last = max(place for place, event in enumerate(events) if event.op == "barrier")
            counts.update((rank // case.dp, event.axis, event.op) for event in events[last + 1 :])
    return counts


@pytest.mark.tier("test", each=5)
@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_gathered_and_gradients_reduced_once_per_step(name):
    few, many = (counted(Case(name, dp=2, shard="fully_shard", micro_batches=count)) for count in (2, 4))
    for place in (0, 1):
        for op in ("all_gather", "reduce_scatter"):
            # Units are two layers, and a stage with the embedding or the head; both ranks along dp count.
            units = 2 + (2 * (place == 0) if name == "zbv" else 1)
            assert few[place, "dp", op] == many[place, "dp", op] == 2 * units
    boundaries = 2 * SCHEDULES[name].stages_per_rank - 1 - (name == "zbv")  # of those between two ranks
    for counts, micro_batches in ((few, 2), (many, 4)):
        sent = sum(count for (_, axis, op), count in counts.items() if (axis, op) == ("pp", "send"))
        assert sent == 2 * 2 * boundaries * micro_batches  # forward and backward, on both ranks along dp


@pytest.mark.tier("full", each=4)
@pytest.mark.parametrize("name", NAMES)
def test_stages_reduce_beside_their_last_backward_unless_another_one_waits_for_it(name):
    """Those of one that another stage waits for start behind its last product, and behind what it sends."""
    config = LlamaConfig(vocab_size=96, hidden_size=16, intermediate_size=24, num_hidden_layers=12)
    dims = ParallelDims(pp=2, dp_shard=2, world_size=4)
    beside = {}
    for program in trace(Job(find_model(config), dims, 2, 8, Recipe().having(schedule=name, accumulate=2))):
        for (kind, stage, variant), segment in program.segments.items():
            events = segment.events
            reductions = [n for n, e in enumerate(events) if isinstance(e, Comm) and e.op == "reduce_scatter"]
            if variant != "last" or not reductions:
                continue
            products = [n for n, e in enumerate(events) if isinstance(e, Op) and e.kind == "matmul"]
            sent = [n for n, e in enumerate(events) if isinstance(e, Comm) and e.op == "send"]
            beside[stage] = sum(n < products[-1] for n in reductions)
            assert beside[stage] or reductions[0] > max(sent, default=-1)
            assert beside[stage] or (kind, stage > 0) == ("backward", True)
    layers = 12 // (2 * SCHEDULES[name].stages_per_rank)
    assert beside[0] >= layers - 1  # all but the first layer, whose last gradient comes behind its last product
    assert any(beside[stage] == 0 for stage in beside) is not SCHEDULES[name].splits_backward


IN_PLACE = [(name, 4, {}, True) for name in NAMES if SCHEDULES[name].begins_all_stages(4, 2)]


@pytest.mark.tier("full", each=4)
@pytest.mark.parametrize(
    ("name", "micro_batches", "other", "in_place"),
    [
        *IN_PLACE,
        ("interleaved", 2, {}, False),  # one stage's gradients would stay while another's come
        ("gpipe", 1, {}, False),  # those of a unit would stay while another's come
        ("interleaved", 4, {"dp_replicate": 2}, False),  # an all_reduce goes behind each
        ("interleaved", 4, {"dp_shard": 3}, False),  # there is padding
    ],
)
def test_stages_send_gradients_from_where_they_are_and_wait_for_no_reduction(name, micro_batches, other, in_place):
    """What a rank computes after a stage's last backward waits for none, and nothing is packed."""
    config = LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=12)
    degrees = {"pp": 2, "dp_shard": 2, "dp_replicate": 1, **other}
    dims = ParallelDims(**degrees, world_size=2 * degrees["dp_shard"] * degrees["dp_replicate"])
    seen = 0
    recipe = Recipe().having(schedule=name, accumulate=micro_batches)
    for program in trace(Job(find_model(config), dims, micro_batches, 8, recipe)):
        for (_, stage, variant), segment in program.segments.items():
            sent = [e for e in segment.events if isinstance(e, Comm) and e.op == "reduce_scatter"]
            if variant not in ("last", "only") or len(sent) < 2:
                continue
            seen += 1
            waits = [e for e in segment.events if isinstance(e, Wait) and e.handle in {comm.handle for comm in sent}]
            behind = segment.events[segment.events.index(sent[0]) :]
            buffers = [e for e in behind if isinstance(e, Alloc) and e.bytes >= sent[0].size]
            assert (not waits, not buffers) == (in_place, in_place), stage
    assert seen == 2 * SCHEDULES[name].stages_per_rank


@pytest.mark.parametrize("name", NAMES)
def test_all_stages_of_a_rank_have_gradients_before_the_last_backward_of_any(name):
    kind = SCHEDULES[name]
    for ranks in (2, 3, 4):
        for count in (1, 2, 3, 4, 6, 8, 9, 12, 16):
            try:
                kind.check_micro_batches(count, ranks, ranks * kind.stages_per_rank)
            except ValueError:
                continue
            begun = True
            for actions in orders(name, ranks, None, count):
                done = [
                    a.stage for a in actions if a.kind == ("backward_weight" if kind.splits_backward else "backward")
                ]
                for stage in set(done):
                    last = max(place for place, other in enumerate(done) if other == stage)
                    begun &= set(done[:last]) == set(done)
            assert begun or not kind.begins_all_stages(count, ranks)
            assert name == "zbv" or kind.begins_all_stages(count, ranks) is begun, (ranks, count)


@pytest.mark.tier("full")
def test_gathering_for_each_micro_batch_costs_that_many_gathers():
    few, many = (counted(Case("1f1b", dp=2, shard="fully_shard", micro_batches=count, keep=False)) for count in (2, 4))
    for place in (0, 1):
        assert many[place, "dp", "all_gather"] > 1.5 * few[place, "dp", "all_gather"] > 0
        assert many[place, "dp", "reduce_scatter"] == few[place, "dp", "reduce_scatter"]


@pytest.mark.parametrize("name", NAMES)
def test_an_evaluation_sends_no_gradients(name):
    counts = counted(Case(name, dp=2, shard="fully_shard"), evaluates=True)
    assert not any(op == "reduce_scatter" for _, _, op in counts)
    boundaries = 2 * SCHEDULES[name].stages_per_rank - 1 - (name == "zbv")
    assert sum(count for (_, axis, op), count in counts.items() if (axis, op) == ("pp", "send")) == 2 * boundaries * 4


# -- memory and dtypes -------------------------------------------------------------------------------------------------


def two_linears(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Linear(4, 4, bias=False)


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.float() - target).square().sum()


@pytest.mark.parametrize("keep", [True, False])
@sim.ranks(2, backends=("sim",))
def test_micro_batches_are_added_up_in_the_dtype_of_the_reduction(ctx, keep):
    """Sums of bf16 gradients would lose what is added last: 1 + 2^-9 eight times."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    stage = nn.Linear(1, 1, bias=False)
    nn.init.ones_(stage.weight)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(stage, mesh=mesh["dp"], mp_policy=policy).set_reduce_op_type("sum")

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output.float() * target).sum()

    run = Pipeline([stage], mesh["pp"], "gpipe", 9, loss, keep_gathered=keep)
    targets = torch.tensor([1.0, *[2.0**-9] * 8]).unsqueeze(1)
    for _ in range(2):
        run.step(torch.ones(9, 1), targets)
        assert stage.weight.grad.full_tensor().item() == 2 * (1 + 8 * 2.0**-9)
        assert stage.weight.grad.dtype == torch.float32
        stage.zero_grad()


@sim.ranks(2, backends=("sim",))
def test_micro_batches_of_another_dtype_have_boundaries_of_their_own(ctx):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    run = Pipeline([nn.Identity()], mesh, "gpipe", 2, lambda output, target: (output * target).sum())
    dtypes = (torch.float32, torch.float64)
    assert [run.eval(torch.ones(2, 4, dtype=dtype), torch.ones(2, 4)).dtype for dtype in dtypes] == [
        torch.float32,
        torch.float64,
    ]


@sim.ranks(4, backends=("sim",))
def test_nothing_is_whole_or_kept_after_a_step(ctx):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stages = [fully_shard(two_linears(rank), mesh=mesh["dp"]) for rank in range(2)]
    seen: list[weakref.ref[torch.Tensor]] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(output))
        return squares(output, target)

    run = Pipeline(stages, mesh["pp"], "interleaved", 4, loss)
    for method in (run.step, run.eval):
        method(torch.randn(8, 4), torch.randn(8, 4))
        for unit in nested_units(*stages):
            assert unit.is_resharded()
            assert unit.control is StepControl.HOOKS
            assert all(bucket.unsharded_buffer.untyped_storage().nbytes() == 0 for bucket in unit.buckets)
        assert len(seen) == 4 * run.has_last
        assert [reference() for reference in seen] == [None] * len(seen)
        seen.clear()


class Held:
    """An object that a graph holds."""


class Holding(torch.autograd.Function):
    """The identity, which keeps an object in its graph that backward does not free, and counts those that are alive."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, held: list[Any]) -> torch.Tensor:
        ctx.held = Held()
        held.append(weakref.ref(ctx.held))
        held[0] = max(held[0], sum(each() is not None for each in held[1:]))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class HoldingLinear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.held: list[Any] = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Holding.apply(super().forward(x), self.held)


def most_graphs(schedule: str) -> int:
    """Run a step of six micro-batches on two stages; return how many of their graphs this rank had at a time."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    layer, rows = HoldingLinear(), torch.ones(6, 4)
    Pipeline([layer], mesh, schedule, 6, squares).step(rows, rows)
    return layer.held[0]


def test_the_last_stage_keeps_no_graph_of_a_micro_batch_that_is_through():
    assert sim.run(most_graphs, 2, args=("1f1b",)) == [2, 1]
    assert sim.run(most_graphs, 2, args=("gpipe",)) == [6, 6], "all forwards come before the first backward"


def test_gradients_of_several_steps_add_up_and_wait_if_asked():
    """As on one device: two steps without zero_grad; with gradient sync off the first of them communicates nothing."""

    def body(waits: bool) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        stage = fully_shard(two_linears(mesh["pp"].get_local_rank()), mesh=mesh["dp"])
        stage.set_reduce_op_type("sum")
        run = Pipeline([stage], mesh["pp"], "1f1b", 2, squares)
        rows = torch.arange(16.0).view(4, 4) / 16
        stage.set_requires_gradient_sync(not waits)
        run.step(rows, rows)
        assert (stage.weight.grad is None) is waits
        stage.set_requires_gradient_sync(True)
        run.step(rows * 2, rows)
        return stage.weight.grad.full_tensor()

    for waits in (False, True):
        outcomes = sim.run(body, world_size=4, args=(waits,))
        alone = nn.Sequential(two_linears(0), two_linears(1))
        rows = torch.arange(16.0).view(4, 4) / 16
        for given in (rows, rows * 2):
            (2 * squares(alone(given), rows)).backward()
        for rank, gradient in enumerate(outcomes):
            torch.testing.assert_close(gradient, alone[rank // 2].weight.grad, rtol=1e-5, atol=1e-6)


@sim.ranks(4, backends=("sim",))
def test_parts_on_the_host(ctx):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place = mesh["pp"].get_local_rank()
    stage = fully_shard(two_linears(place), mesh=mesh["dp"], offload_policy=CPUOffloadPolicy(pin_memory=False))
    stage.set_reduce_op_type("sum")
    rows = torch.arange(16.0).view(4, 4) / 16
    Pipeline([stage], mesh["pp"], "1f1b", 2, squares).step(rows, rows)
    alone = nn.Sequential(two_linears(0), two_linears(1))
    (2 * squares(alone(rows), rows)).backward()
    torch.testing.assert_close(stage.weight.grad.full_tensor(), alone[place].weight.grad, rtol=1e-5, atol=1e-6)


def test_finding_out_shapes_leaves_buffers_and_generators_alone():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("replaced", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.replaced = self.replaced + 1
            return nn.functional.dropout(self.linear(x), 0.5)

    def body() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        stage = Counting()
        run = Pipeline([stage], mesh, "gpipe", 2, squares)
        torch.manual_seed(7)
        run.step(torch.ones(4, 4), torch.ones(4, 4))
        after = torch.rand(())
        assert (stage.calls.item(), stage.replaced.item()) == (2, 2)
        torch.manual_seed(7)
        for _ in range(2):
            nn.functional.dropout(torch.ones(2, 4), 0.5)
        assert torch.equal(torch.rand(()), after)

    sim.run(body, world_size=2)


def test_batches_of_other_shapes():
    """Shapes are found out once each, by one more forward of all stages but the last."""

    def body() -> tuple[list[float], int]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        stage, calls = two_linears(mesh.get_local_rank()), []
        stage.register_forward_hook(lambda *_: calls.append(1))
        run = Pipeline([stage], mesh, "1f1b", 2, squares)
        losses = [run.step(torch.ones(rows, 4), torch.zeros(rows, 4)).item() for rows in (2, 6, 4, 6)]
        run.eval(torch.ones(2, 4), torch.zeros(2, 4))
        return losses, len(calls)

    one = squares(nn.Sequential(two_linears(0), two_linears(1))(torch.ones(1, 4)), torch.zeros(1, 4)).item()
    first, last = sim.run(body, world_size=2)
    assert first == ([0.0] * 4, 5 * 2 + 3)
    assert last == (pytest.approx([rows * one for rows in (2, 6, 4, 6)]), 5 * 2)


def test_steps_under_autocast_and_evaluations_without():
    """What goes between stages is bfloat16 in the ones, float32 in the others."""

    def body() -> list[float]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        run = Pipeline([two_linears(mesh.get_local_rank())], mesh, "1f1b", 2, squares)
        rows, targets, losses = torch.ones(4, 4), torch.zeros(4, 4), []
        for enabled in (True, False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                losses += [run.step(rows, targets).item(), run.eval(rows, targets).item()]
        return losses

    model, expected = nn.Sequential(two_linears(0), two_linears(1)), []
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            expected += [squares(model(torch.ones(4, 4)), torch.zeros(4, 4)).item()] * 2
    assert sim.run(body, world_size=2)[1] == pytest.approx(expected, rel=1e-2)


class Rotated(nn.Module):
    """Takes a tensor and a complex one, whose gradients and values may be conjugated views; returns such a pair."""

    def __init__(self, place: int) -> None:
        super().__init__()
        torch.manual_seed(place)
        self.factor = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.place = place

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.complex(x, 2 * x) if z is None else z
        return x + (z * self.factor).abs(), z.conj() if self.place % 2 else (z * self.factor).mH.mT


@pytest.mark.parametrize("name", NAMES)
def test_complex_numbers_go_between_stages(name):
    def loss_of(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        return (output[0] * output[1].real - target).square().sum()

    generator = torch.Generator().manual_seed(0)
    rows, targets = (torch.randn(8, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    each = SCHEDULES[name].stages_per_rank if SCHEDULES[name].stages_per_rank else 2
    stages = [Rotated(place) for place in range(2 * each)]
    given: tuple[torch.Tensor, ...] = (rows,)
    for stage in stages:
        given = stage(*given)
    expected = loss_of(given, targets)
    expected.backward()

    def body() -> tuple[float, dict[int, torch.Tensor]]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        mine = stages_of_rank(name, mesh.get_local_rank(), 2, each)
        own = [Rotated(place) for place in mine]
        loss = Pipeline(own, mesh, name, 4, loss_of).step(rows, targets)
        return loss.item(), {place: stage.factor.grad for place, stage in zip(mine, own, strict=True)}

    found = sim.run(body, world_size=2)
    assert sum(loss for loss, _ in found) == pytest.approx(expected.item(), rel=1e-12)
    for _, gradients in found:
        for place, gradient in gradients.items():
            torch.testing.assert_close(gradient, stages[place].factor.grad, rtol=1e-9, atol=1e-12)
