"""fully_shard against FSDP2: gradients of several micro-batches, when they are reduced, and by how much scaled.

Ours adds micro-batches up in the order in which they come, as FSDP2 does: these sums are equal to the last bit, too.
"""

import pytest
import torch
from fsdp2_kit import OURS, SAME_ORDER, Net, Theme, assert_resharded, loss_of, on_processes, sgd
from torch import nn
from torch.distributed.fsdp import FSDPModule

import sim
from hyper_parallel.core.fully_shard.unit import unit_of

pytestmark = pytest.mark.tier("test")

THEME = Theme()


def micro_batches(run, model, before, *, steps=2, micros=3, after=None, when=""):
    """Steps of a few micro-batches each; `before(micro)` sets flags."""
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micros):
            before(micro)
            run.backward(loss_of(model, run.batch(10 * step + micro)))
            if after is not None:
                after(step, micro)
        optimizer.step()
    run.note_model(model, when)


def have_gradients(run, model):
    """After each micro-batch of the first step, note which parameters have gradients; ours has freed what it is to."""
    seen = run.facts.setdefault("has gradient", [])

    def look(step, micro):
        if step == 0:
            seen.append([p.grad is not None for p in model.parameters()])
        if run.engine is OURS:
            assert_resharded(model)

    return look


# -- when gradients are reduced ------------------------------------------------------------------------------------


@THEME.behaviour()
def every_micro_batch_is_reduced(run):
    model = run.nested()
    micro_batches(run, model, lambda micro: None)


@THEME.behaviour()
def only_the_last_micro_batch_communicates(run):
    model = run.nested()
    flag = "set_requires_gradient_sync"
    micro_batches(run, model, lambda micro: run.tell(model, flag, micro == 2), after=have_gradients(run, model))


@THEME.behaviour()
def the_first_micro_batch_communicates_too(run):
    model = run.nested()
    micro_batches(run, model, lambda micro: run.tell(model, "set_requires_gradient_sync", micro != 1))


@THEME.behaviour()
def weights_are_kept_while_accumulating(run):
    model = run.nested()

    def before(micro):
        run.tell(model, "set_requires_gradient_sync", micro == 2)
        run.tell(model, "set_reshard_after_backward", micro == 2)

    micro_batches(run, model, before)


@THEME.behaviour()
def weights_are_never_freed_while_accumulating(run):
    model = run.nested(reshard_after_forward=False)

    def before(micro):
        run.tell(model, "set_requires_gradient_sync", micro == 2)
        run.tell(model, "set_reshard_after_backward", micro == 2)

    micro_batches(run, model, before)


@THEME.behaviour()
def the_flag_of_an_inner_unit_alone(run):
    """A flag of a unit holds for all units below: the blocks wait, the root reduces."""
    model = run.nested()

    def before(micro):
        for block in model.blocks:
            run.tell(block, "set_requires_gradient_sync", micro == 2)

    micro_batches(run, model, before)


@THEME.behaviour(without_traced="torch.compile to trace")
def not_the_last_backward(run):
    model = run.nested()

    def look(step, micro):
        assert run.engine is not OURS or bool(unit_of(model).schedule.reductions) == (micro < 2)  # are under way

    micro_batches(run, model, lambda micro: run.tell(model, "set_is_last_backward", micro == 2), after=look)


@THEME.behaviour(without_traced="torch.compile to trace")
def not_the_last_backward_and_no_communication(run):
    """As a pipeline schedule does it."""
    model = run.nested()

    def before(micro):
        run.tell(model, "set_is_last_backward", micro == 2)
        run.tell(model, "set_requires_gradient_sync", micro == 2)
        run.tell(model, "set_reshard_after_backward", micro == 2)

    micro_batches(run, model, before)


@THEME.behaviour(4)
def hsdp_every_micro_batch(run):
    model = run.nested(mesh=run.mesh(2, 2))
    micro_batches(run, model, lambda micro: None)


@THEME.behaviour(4)
def hsdp_only_the_last_micro_batch(run):
    model = run.nested(mesh=run.mesh(2, 2))
    micro_batches(run, model, lambda micro: run.tell(model, "set_requires_gradient_sync", micro == 2))


@THEME.behaviour(4, without_traced="other facts")
def hsdp_the_all_reduce_waits(run):
    model = run.nested(mesh=run.mesh(2, 2))
    flag = "set_requires_all_reduce"
    micro_batches(run, model, lambda micro: run.tell(model, flag, micro == 2), after=have_gradients(run, model))


@THEME.behaviour(4)
def hsdp_the_all_reduce_of_some_units_waits(run):
    """Blocks wait, and the root, set with recurse=False, does not."""
    model = run.nested(mesh=run.mesh(2, 2))

    def before(micro):
        run.tell(model, "set_requires_all_reduce", micro == 2)
        run.tell(model, "set_requires_all_reduce", True, recurse=False)

    micro_batches(run, model, before)


@THEME.behaviour(4)
def hsdp_reduction_and_all_reduce_wait(run):
    """First neither, then the shard axis alone, then both."""
    model = run.nested(mesh=run.mesh(2, 2))

    def before(micro):
        run.tell(model, "set_requires_gradient_sync", micro > 0)
        if micro > 0:
            run.tell(model, "set_requires_all_reduce", micro == 2)

    micro_batches(run, model, before)


# -- what is trained changes between micro-batches -----------------------------------------------------------------


def frozen_at(run, model, micro):
    """In the second micro-batch a block and half of another layer are frozen, in the third they are trained again."""
    for parameter in (*model.blocks[1].parameters(), model.head.weight):
        parameter.requires_grad_(micro != 1)


@THEME.behaviour()
def frozen_between_micro_batches(run):
    model = run.nested()
    micro_batches(run, model, lambda micro: frozen_at(run, model, micro))


@THEME.behaviour()
def frozen_while_gradients_wait(run):
    """What was added up before stays, for the last micro-batch to reduce."""
    model = run.nested()

    def before(micro):
        run.tell(model, "set_requires_gradient_sync", micro == 2)
        frozen_at(run, model, micro)

    micro_batches(run, model, before)


@THEME.behaviour()
def frozen_when_gradients_are_reduced(run):
    model = run.nested()

    def before(micro):
        run.tell(model, "set_requires_gradient_sync", micro == 2)
        frozen_at(run, model, micro - 1)

    micro_batches(run, model, before)


@THEME.behaviour(4, without_fsdp2="partial gradients of other sizes cannot be added")
def hsdp_frozen_while_the_all_reduce_waits(run):
    model = run.nested(mesh=run.mesh(2, 2))

    def before(micro):
        run.tell(model, "set_requires_all_reduce", micro == 2)
        frozen_at(run, model, micro)

    micro_batches(run, model, before)


# -- which units run -----------------------------------------------------------------------------------------------


class Routed(Net):
    """Runs the chosen blocks only."""

    chosen = (0, 1, 2)

    def forward(self, x):
        x = self.embed(x) * self.scale
        for index in self.chosen:
            x = self.blocks[index](x)
        return self.head(x)


@THEME.behaviour()
def other_units_in_each_micro_batch(run):
    model = run.build(Routed)
    run.wrap_blocks(model)

    def before(micro):
        model.chosen = ((0, 1), (1, 2), (2, 0))[micro]

    micro_batches(run, model, before)


@THEME.behaviour(without_fsdp2="what waits in a unit that the last backward does not reach is never reduced")
def other_units_in_each_micro_batch_reduced_at_the_end(run):
    for flag in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        model = run.build(Routed)
        run.wrap_blocks(model, mesh=run.mesh(2, 1))

        def before(micro, model=model, flag=flag):
            run.tell(model, flag, micro == 2)
            model.chosen = ((0, 1), (1, 2), (2,))[micro]

        micro_batches(run, model, before, when=f"after {flag}")


@THEME.behaviour(
    without_fsdp2="ranks reduce different units: wrong shapes meet, or a deadlock", without_traced=SAME_ORDER
)
def other_parts_of_a_unit_on_each_rank(run):
    """All ranks gather and reduce the unit, though each uses another part of it."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))

        def forward(self, x, chosen):
            return self.experts[chosen](x)

    model = run.build(Experts)
    run.wrap(model)
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(2):
            run.tell(model, "set_requires_gradient_sync", micro == 1)
            x = run.batch(10 * step + micro).split(4)
            each = [loss_of(model, part, (rank + micro) % 3) for rank, part in zip(run.parts(), x, strict=True)]
            run.backward(sum(each) / len(each))
        optimizer.step()
    run.note_model(model)


# -- clearing ------------------------------------------------------------------------------------------------------


@THEME.behaviour(
    without_fsdp2="zero_grad leaves unreduced gradients, which the next reduction adds",
    without_traced="torch.compile to trace",
)
def zero_grad_clears_what_waits(run):
    model = run.nested()
    run.tell(model, "set_requires_gradient_sync", False)
    run.backward(loss_of(model, run.batch(8)))
    run.tell(model, "set_requires_gradient_sync", True)
    model.zero_grad()  # of the model; an optimizer's does not know what waits
    run.train(model, when="to None")
    run.tell(model, "set_is_last_backward", False)
    run.backward(loss_of(model, run.batch(9)))
    run.tell(model, "unshard")
    model.zero_grad(set_to_none=False)
    run.tell(model, "reshard")
    run.tell(model, "set_is_last_backward", True)
    run.note_model(model, "cleared")
    run.train(model, when="to zeros")


@THEME.behaviour(4, without_fsdp2="zero_grad leaves partial gradients, which the next all_reduce adds")
def hsdp_zero_grad_clears_what_waits(run):
    model = run.nested(mesh=run.mesh(2, 2))
    run.tell(model, "set_requires_all_reduce", False)
    run.backward(loss_of(model, run.batch(8)))
    run.tell(model, "set_requires_all_reduce", True)
    model.zero_grad()
    run.train(model)


@THEME.behaviour()
def zero_grad_to_zeros(run):
    model = run.nested()
    for step in range(3):
        model.zero_grad(set_to_none=False)
        run.backward(loss_of(model, run.batch(step)))
    run.note_model(model)
    model.zero_grad(set_to_none=False)
    run.note_model(model, "cleared")


@THEME.behaviour()
def gradients_are_added_to_what_is_there(run):
    """A gradient that the user has put there, or changed, between two backwards."""
    model = run.nested()
    run.backward(loss_of(model, run.batch(0)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
    run.backward(loss_of(model, run.batch(1)))
    run.note_model(model)


@THEME.behaviour()
def gradients_of_some_parameters_are_dropped(run):
    model = run.nested()
    run.backward(loss_of(model, run.batch(0)))
    for parameter in (model.scale, model.blocks[1].up.weight):
        parameter.grad = None
    run.backward(loss_of(model, run.batch(1)))
    run.note_model(model)


# -- scaling -------------------------------------------------------------------------------------------------------


def divide_by(run, model, divisor):
    """As torchtitan does: each unit is found by its class."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(divisor)


def scaled_one_device(run, model, factor):
    def scale(parameter):
        parameter.grad.mul_(factor)

    if run.alone:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(scale)


@THEME.behaviour(without_traced="torch.compile to trace")
def sums_instead_of_means(run):
    model = run.nested()
    divide_by(run, model, 1.0)
    scaled_one_device(run, model, run.ctx.world_size)
    run.train(model)


@THEME.behaviour(without_traced="torch.compile to trace")
def sums_divided_by_a_number(run):
    model = run.nested()
    divide_by(run, model, 8.0)
    scaled_one_device(run, model, run.ctx.world_size / 8)
    run.train(model)


@THEME.behaviour(4, without_traced="torch.compile to trace")
def hsdp_sums_divided_by_a_number(run):
    model = run.nested(mesh=run.mesh(2, 2))
    divide_by(run, model, 8.0)
    scaled_one_device(run, model, run.ctx.world_size / 8)
    run.train(model)


@THEME.behaviour(
    without_fsdp2="has a divisor of the sum, and no factor for the mean", without_traced="torch.compile to trace"
)
def means_times_a_factor(run):
    model = run.nested()
    run.tell(model, "set_gradient_scaling_factor", torch.tensor(0.25))
    run.tell(model.blocks[1], "set_reduce_op_type", "sum")
    scaled_one_device(run, model, 0.25)
    scaled_one_device(run, model.blocks[1], run.ctx.world_size)
    run.train(model)


@THEME.behaviour()
def losses_divided_by_the_number_of_micro_batches(run):
    model = run.nested()
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(4):
            run.tell(model, "set_requires_gradient_sync", micro == 3)
            run.backward(loss_of(model, run.batch(10 * step + micro)) / 4)
        optimizer.step()
    run.note_model(model)


# -- the tests -----------------------------------------------------------------------------------------------------


@THEME.contestants(2)
@sim.ranks(2, backends=("sim",))
def test_accumulation(ctx, name, contestant):
    THEME.check(ctx, name, contestant)


@THEME.contestants(4)
@sim.ranks(4, backends=("sim",))
def test_accumulation_on_four_ranks(ctx, name, contestant):
    THEME.check(ctx, name, contestant)


@on_processes()
@sim.ranks(2, backends=("gloo", "gpu", "npu"))
def test_accumulation_on_processes(ctx, contestant):
    THEME.check_all(ctx, 2, contestant)
