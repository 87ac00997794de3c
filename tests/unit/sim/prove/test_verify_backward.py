"""Faults in the backward of a step, named where the gradient of an activation first is wrong; keyword arguments."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from zoo_kit import (
    Enter,
    Leave,
    Net,
    average,
    draw,
    made_of,
    megatron,
    proved_plan,
    proved_step,
    right,
    same,
    squared,
    take,
    tokens,
    with_averages,
)

import sim
from sim.prove.steps.watch import LOSS, LoopWatch

pytestmark = pytest.mark.tier("test")


def proved(parallelize, mesh="tp=2", model=Net, x=None, **options):
    x = tokens() if model is Net else x
    return proved_step(parallelize, model, x, mesh, **{"optimizer_fn": None, "steps": 1, **options})


@pytest.mark.tier("full")
def test_an_all_reduce_that_backward_lacks_is_missed_where_it_should_be():
    def lacking(model, mesh):
        megatron(model, mesh)
        model.blocks[0].mlp.enter = same

    assert proved(megatron).ok
    first = proved(lacking).first
    assert (first.kind, first.place) == ("gradient", "the gradient of blocks.0.mlp.up.input"), first
    assert "parts of a sum over tp, and nothing reduced it before the gradient of" in first.sentence
    assert "in the backward of its module" in first.suggestion


@pytest.mark.parametrize("micro", [1, 2])
def test_what_backward_doubles_is_found_among_rows_that_ranks_share(micro):
    """The mean over a rank's own rows makes all gradients of activations as many times larger as there are ranks."""

    def step(model, batch):
        losses = []
        for part in batch.chunk(micro):
            losses.append(model(part).square().mean() / micro)
            losses[-1].backward()
        average(model)
        return sum(each.detach() for each in losses)

    def doubled(model, mesh):
        def twice(x):
            x = x.view_as(x)
            x.register_hook(lambda grad: grad * 2)
            return plain(x)

        plain, model.blocks[0].attn.forward = model.blocks[0].attn.forward, twice

    first = proved(doubled, "dp=2", rank_step=step).first
    assert first.place == "the gradient of blocks.0.attn.input", first
    assert "2 times what it should be" in first.sentence
    assert "from the gradient of blocks.0.attn." in first.suggestion


def test_a_fault_of_one_parameter_alone_is_none_of_an_activation():
    def hooked(model, mesh):
        model.blocks[0].mlp.up.weight.register_hook(lambda grad: grad * 2)

    first = proved(hooked, "dp=2", rank_step=with_averages(squared)).first
    assert first.place == "the gradient of blocks.0.mlp.up.weight", first


@pytest.mark.parametrize("micro", [1, 2])
def test_gradients_that_nobody_averages_are_none_of_an_activation(micro):
    """Micro-batches are other rows on each side, also where there are as many."""

    def step(model, batch):
        losses = [model(part).square().mean() / micro for part in batch.chunk(micro)]
        sum(losses).backward()
        return sum(losses).detach()

    first = proved(None, "dp=2", step=step).first
    assert first.place == "the gradient of head.weight", first


@pytest.mark.tier("full")
def test_a_script_whose_backward_lacks_an_all_reduce(tmp_path):
    one = """
import torch
import torch.distributed as dist
from zoo_kit import Net, megatron, tokens
torch.manual_seed(0)
model = Net()
if RANKS:
    dist.init_process_group()
    megatron(model, dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    model.blocks[1].mlp.enter = lambda x: x
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(tokens()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    (tmp_path / "one.py").write_text(one.replace("RANKS", "False"))
    (tmp_path / "ranks.py").write_text(one.replace("RANKS", "True"))
    report = sim.verify(f"{tmp_path}/ranks.py", 2, reference=f"{tmp_path}/one.py", steps=1)
    assert report.first.place == "the gradient of blocks.1.mlp.up.input", report


# -- keyword arguments -------------------------------------------------------------------------------------------------


@made_of(lambda: {"weight": nn.Parameter(torch.eye(4) + 0.1)})
def mixed(self, x, *, scale, bias=None):
    return x @ self.weight * scale + (0 if bias is None else bias)


@made_of(lambda factor=1.0: {"first": nn.Linear(4, 4), "mixed": mixed(), "factor": factor})
def named(self, x):
    """Calls modules with names."""
    y = self.first(input=x)
    return self.mixed(y, scale=y.mean() * self.factor, bias=x)


@pytest.mark.parametrize("given", [("scale",), ("bias",), ()])
def test_keyword_arguments_are_compared(given):
    def parallelize(model, mesh):
        if given == ("scale",):
            model.factor = 1 + mesh.get_local_rank() * 1e-3
        if given == ("bias",):
            model.forward = lambda x: model.mixed((y := model.first(input=x)), scale=y.mean(), bias=x * 1.001)

    report = proved(parallelize, model=named, x=draw(4, 4))
    assert report.ok == (not given), report
    if given:
        assert report.first.place in (f"mixed.input.{given[0]}", "mixed.input.2"), report.first
    compared = {row.tensor for row in report.rows if row.module == "mixed" and row.kind == "forward"}
    assert {"input", "output"} < compared
    assert ("first", "input") in {(row.module, row.tensor) for row in report.rows}


def test_a_keyword_on_one_side_and_a_place_on_the_other_are_the_same():
    def by_place(model, mesh):
        model.forward = lambda x: model.mixed((y := model.first(x)), scale=y.mean(), bias=x)

    report = right(proved(by_place, model=named, x=draw(4, 4)))
    assert ("first", "input") in {(row.module, row.tensor) for row in report.rows if row.kind == "forward"}


def test_an_all_reduce_that_the_backward_of_a_keyword_argument_lacks():
    @made_of(lambda: {"first": nn.Linear(4, 4), "up": nn.Linear(4, 8), "down": nn.Linear(8, 4, bias=False)})
    def wide(self, x):
        return self.down(self.up(input=self.first(x)).relu())

    def split(model, mesh, enters):
        rank, group = mesh.get_local_rank(), mesh.get_group()
        for owner, name, dim in ((model.up, "weight", 0), (model.up, "bias", 0), (model.down, "weight", 1)):
            take(owner, name, dim, rank, 2)
        enter = (lambda x: Enter.apply(x, group)) if enters else same
        model.forward = lambda x: Leave.apply(model.down(model.up(input=enter(model.first(x))).relu()), group)

    for enters in (True, False):
        report = proved(partial(split, enters=enters), model=wide, x=draw(4, 4))
        assert report.ok == enters, report
    assert report.first.place == "the gradient of up.input", report


# -- what both sides cast by hand --------------------------------------------------------------------------------------


@made_of(lambda: {"first": nn.Linear(16, 16), "last": nn.Linear(16, 4)})
def casting(self, x):
    """Computes a part in bfloat16, by hand."""
    y = self.first(x).bfloat16()
    return self.last((y * y.sigmoid()).to(x.dtype))


@pytest.mark.parametrize("prove", ["step", "plan"])
@pytest.mark.parametrize("fault", [False, True])
def test_casts_that_both_sides_have_are_right(fault, prove):
    def scaled(model, mesh):
        if fault:
            plain = model.first.forward
            model.first.forward = lambda x: plain(x) * (1 + 1e-4 * mesh.get_local_rank())

    if prove == "step":
        report = proved(scaled, "dp=2", casting, draw(4, 16), rank_step=with_averages(squared))
    else:
        report = sim.verify_plan(casting, (draw(4, 16),), "dp=2", parallelize=scaled, optimizer_fn=None, steps=1)
    assert report.ok != fault, report
    assert any("says bfloat16, whose rounding is not compared" in note for note in report.notes)
    if fault:
        assert report.first.place == "first.output", report


# -- the watch ---------------------------------------------------------------------------------------------------------


def test_a_watch_leaves_no_graph_behind():
    def count():
        gc.collect()
        return sum(1 for each in gc.get_objects() if isinstance(each, torch.Tensor))

    def watched():
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        with LoopWatch([model], keeps_graph=True) as watch:
            model(torch.randn(2, 3)).sum().backward()
        assert len(watch.record.steps[0].grads) == 6  # not those of the inputs, which want none
        assert watch.record.steps[0].nodes.keys() == {*watch.record.steps[0].grads, (LOSS, 0)}

    def proved():
        asked = {"parallelize": lambda model, mesh: None, "steps": 1}
        assert sim.verify_plan(two_layers, (torch.randn(2, 6),), "dp=1", **asked).ok

    for each in (watched, proved):
        each()
        before = count()
        each()
        assert count() <= before


# -- what is issued and never waited for -------------------------------------------------------------------------------


def two_layers():
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def bucketed(model, forgotten, *, is_flat):
    """Average gradients, two in a bucket, while backward goes on; wait for all but one, and copy them back.

    Args:
        model: changed in place.
        forgotten: the bucket that is not waited for; None: all are.
        is_flat: a bucket is a buffer of its own; else the gradients are reduced in place.
    """
    ready, issued = [], []

    def reduce(parameter):
        ready.append(parameter)
        if len(ready) % 2 == 0:
            grads = [each.grad for each in ready[-2:]]
            buffers = [torch.cat([grad.flatten() for grad in grads])] if is_flat else grads
            works = [dist.all_reduce(buffer, op=dist.ReduceOp.AVG, async_op=True) for buffer in buffers]
            issued.append((works, grads, buffers[0]))
        if len(ready) == 4:
            for number, (works, grads, buffer) in enumerate(issued):
                for work in works if number != forgotten else ():
                    work.wait()
                for grad, part in zip(
                    grads, buffer.split([grad.numel() for grad in grads]) if is_flat else (), strict=False
                ):
                    grad.copy_(part.view_as(grad))
            ready.clear()
            issued.clear()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)


def plan_of_buckets(parallelize, **options):
    return proved_plan(parallelize, two_layers, (draw(4, 6),), loss_fn=lambda y, x: y.square().mean(), **options)


def step_of_buckets(parallelize, **options):
    return proved_step(parallelize, two_layers, draw(4, 6), **options)


@pytest.mark.parametrize("optimizer_fn", [None, True])
@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("proof", [plan_of_buckets, step_of_buckets])
def test_a_bucket_that_is_never_waited_for_is_found(proof, is_flat, optimizer_fn):
    def parallel(model, mesh, forgotten=None):
        bucketed(model, forgotten, is_flat=is_flat)

    assert proof(parallel, optimizer_fn=optimizer_fn).ok
    for number in (0, 1):
        with pytest.raises(
            sim.InFlightBufferRace, match=r"reads a buffer that all_reduce #\d of .* it has not waited for"
        ):
            proof(lambda model, mesh, at=number: bucketed(model, at, is_flat=is_flat), optimizer_fn=optimizer_fn)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("proof", [plan_of_buckets, step_of_buckets])
def test_a_hook_of_ddp_that_does_not_wait_for_its_bucket(proof, waits):
    def reduce(state, bucket):
        buffer = bucket.buffer().div_(2)
        work, done = dist.all_reduce(buffer, async_op=True), torch.futures.Future()
        done.set_result(buffer)
        return work.get_future().then(lambda future: future.value()[0]) if waits else done

    def parallel(model, mesh):
        model = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())
        model.register_comm_hook(None, reduce)
        return model

    if waits:
        assert proof(parallel).ok
        return
    with pytest.raises(sim.InFlightBufferRace, match="writes and that it has not waited for"):
        proof(parallel)


@pytest.mark.parametrize("waits", [True, False])
def test_a_loss_that_is_never_waited_for(waits):
    def step(model, batch):
        loss = with_averages(squared)(model, batch).detach()
        work = dist.all_reduce(loss, op=dist.ReduceOp.AVG, async_op=True)
        if waits:
            work.wait()
        return loss

    def prove():
        return step_of_buckets(None, rank_step=step)

    if waits:
        assert prove().ok
        return
    with pytest.raises(sim.InFlightBufferRace, match="by the end of the step"):
        prove()
