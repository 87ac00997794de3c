"""fully_shard against FSDP2: when parameters are gathered and freed, by default and by hand.

After `reshard_after_forward=False` or an evaluation, FSDP2 leaves unsharded parameters in the modules, and ours shows
the shards: what the modules show is therefore compared where both gather by hand only.
"""

import torch
from fsdp2_kit import OURS, Theme, loss_of, on_processes, sgd

import sim
from hyper_parallel.core.fully_shard.unit import unit_of

THEME = Theme()


# -- after forward -------------------------------------------------------------------------------------------------


@THEME.behaviour()
def freed_after_forward(run):
    run.train(run.nested(reshard_after_forward=True))


@THEME.behaviour()
def kept_after_forward(run):
    run.train(run.nested(reshard_after_forward=False))


@THEME.behaviour()
def some_units_kept_after_forward(run):
    model = run.net()
    for keep, block in zip((True, False, True), model.blocks, strict=True):
        run.wrap(block, reshard_after_forward=not keep)
    run.train(run.wrap(model, reshard_after_forward=False))


@THEME.behaviour(4, without_hsdp="reshard_after_forward")
def split_over_fewer_ranks_after_forward(run):
    run.train(run.nested(reshard_after_forward=2), steps=3)


@THEME.behaviour(4, without_hsdp="reshard_after_forward")
def split_over_fewer_ranks_and_two_forwards(run):
    model = run.nested(reshard_after_forward=2)
    run.train(model, lambda step: loss_of(model, run.batch(step)) + loss_of(model, run.batch(step + 5)))


@THEME.behaviour(4, without_hsdp="reshard_after_forward")
def split_over_fewer_ranks_and_evaluation(run):
    model = run.nested(reshard_after_forward=2)
    optimizer = sgd(model)
    run.train(model, steps=1, optimizer=optimizer)
    with torch.no_grad():
        run.losses.append(loss_of(model, run.batch(9)))
    run.tell(model, "reshard")
    optimizer.zero_grad()
    run.backward(loss_of(model, run.batch(1)))
    optimizer.step()
    run.note_model(model, "after")


@THEME.behaviour(4, without_hsdp="reshard_after_forward")
def split_over_fewer_ranks_while_accumulating(run):
    model = run.nested(reshard_after_forward=2)

    def loss(step):
        run.tell(model, "set_requires_gradient_sync", False)
        run.backward(loss_of(model, run.batch(step + 5)))
        run.tell(model, "set_requires_gradient_sync", True)
        return loss_of(model, run.batch(step))

    run.train(model, loss)


@THEME.behaviour(4, without_hsdp="reshard_after_forward")
def split_over_all_ranks_or_one_after_forward(run):
    """The two ends: as many ranks as there are is True, one rank is False."""
    model = run.net()
    run.wrap(model.blocks[0], reshard_after_forward=4)
    run.wrap(model.blocks[1], reshard_after_forward=1)
    run.wrap(model.blocks[2], reshard_after_forward=2)
    run.train(run.wrap(model))


@THEME.behaviour(4, without_hsdp="reshard_after_forward")
def split_over_fewer_ranks_of_a_two_axis_mesh(run):
    run.train(run.nested(mesh=run.mesh(1, 4), reshard_after_forward=2))


@THEME.behaviour()
def changed_for_an_evaluation_and_back(run):
    model = run.nested()
    optimizer = sgd(model)
    run.train(model, steps=1, optimizer=optimizer)
    run.tell(model, "set_reshard_after_forward", False)
    with torch.no_grad():
        for step in range(2):
            run.losses.append(loss_of(model, run.batch(7 + step)))
    run.tell(model, "set_reshard_after_forward", True)
    for part in (*model.blocks, model):
        run.tell(part, "reshard")
    optimizer.zero_grad()
    run.backward(loss_of(model, run.batch(1)))
    optimizer.step()
    run.note_model(model, "after")


@THEME.behaviour()
def changed_for_the_root_alone(run):
    model = run.nested()
    run.tell(model, "set_reshard_after_forward", True, recurse=False)
    run.train(model)


@THEME.behaviour()
def changed_for_one_block(run):
    model = run.nested()
    run.tell(model.blocks[1], "set_reshard_after_forward", False)
    run.train(model)


# -- after backward ------------------------------------------------------------------------------------------------


@THEME.behaviour()
def kept_after_backward_without_a_step(run):
    model = run.nested()
    run.tell(model, "set_reshard_after_backward", False)
    for step in range(3):
        run.backward(loss_of(model, run.batch(step)))
    run.tell(model, "set_reshard_after_backward", True)
    run.backward(loss_of(model, run.batch(3)))
    run.note_model(model)


@THEME.behaviour(without_fsdp2="goes on with the weights from before the optimizer's step, without a call to reshard")
def kept_after_backward_with_a_step(run):
    model = run.nested()
    optimizer = sgd(model)
    run.tell(model, "set_reshard_after_backward", False)
    run.train(model, steps=3, optimizer=optimizer)
    run.tell(model.blocks[0], "set_reshard_after_backward", True, recurse=False)
    run.backward(loss_of(model, run.batch(3)))
    if run.engine is OURS:
        assert [unit_of(block).is_unsharded for block in model.blocks] == [False, True, True]
    run.tell(model, "set_reshard_after_backward", True)
    run.tell(model, "set_reshard_after_forward", False)
    run.train(model, when="kept after forward")


@THEME.behaviour(without_fsdp2="goes on with the weights from before the optimizer's step, without a call to reshard")
def kept_after_backward_with_a_step_of_any_optimizer(run):
    """Some take many tensors at once, which leaves no mark on each; a closure runs inside of the step."""
    model = run.nested()
    run.tell(model, "set_reshard_after_backward", False)
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)

        def again(optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(model, run.batch(1))
            run.backward(loss)
            return loss

        again()
        optimizer.step()
        optimizer.step(again)
        with torch.no_grad():
            run.losses.append(loss_of(model, run.batch(2)))


@THEME.behaviour()
def kept_after_backward_then_freed_by_hand(run):
    model = run.nested()
    optimizer = sgd(model)
    run.tell(model, "set_reshard_after_backward", False)
    for step in range(2):
        optimizer.zero_grad()
        run.backward(loss_of(model, run.batch(step)))
        for part in (*model.blocks, model):
            run.tell(part, "reshard")
        optimizer.step()
    run.note_model(model)


# -- by hand -------------------------------------------------------------------------------------------------------


def shown(model):
    return [(name, tuple(p.shape), type(p.data).__name__) for name, p in model.named_parameters()]


@THEME.behaviour(without_traced="torch.compile to trace")
def gathered_and_freed_by_hand(run):
    model = run.nested()
    for part in (model.blocks[1], model):
        run.facts[f"returned {len(run.facts)}"] = run.tell(part, "unshard")
        run.facts[f"shown {len(run.facts)}"] = shown(model)
        run.note(f"unsharded {len(run.facts)}", model.head.weight)
        run.tell(part, "reshard")
        run.tell(part, "reshard")
        run.facts[f"shown {len(run.facts)}"] = shown(model)
    if run.alone:
        assert not run.facts["returned 0"]
    run.train(model)


@THEME.behaviour(without_traced="torch.compile to trace")
def gathered_by_a_handle(run):
    model = run.nested()
    optimizer = sgd(model)  # while the modules show the shards
    handles = [run.tell(part, "unshard", async_op=True) for part in (*model.blocks, model)]
    for handle in handles:
        if handle is not None:
            handle.wait()
            handle.wait()
    run.facts["shown"] = shown(model)
    for name, parameter in model.named_parameters():
        run.note(f"unsharded {name}", parameter)
    run.train(model, optimizer=optimizer)


@THEME.behaviour(without_traced="torch.compile to trace")
def gathered_ahead_and_nobody_waits(run):
    model = run.nested()

    def loss(step):
        for part in (model, *model.blocks):
            run.tell(part, "unshard", async_op=True)
        return loss_of(model, run.batch(step))

    run.train(model, loss)


@THEME.behaviour()
def freed_between_forward_and_backward(run):
    model = run.nested(reshard_after_forward=False)

    def loss(step):
        now = loss_of(model, run.batch(step))
        for part in (*model.blocks, model):
            run.tell(part, "reshard")
        return now

    run.train(model, loss)


@THEME.behaviour(without_traced="torch.compile to trace")
def gathered_between_forward_and_backward(run):
    model = run.nested()

    def loss(step):
        now = loss_of(model, run.batch(step))
        for part in (*model.blocks, model):
            run.tell(part, "unshard")
        return now

    run.train(model, loss)


@THEME.behaviour(without_hsdp="is a list")
def a_unit_of_several_modules_gathered_through_any(run):
    model = run.net()
    run.wrap([model.blocks[0], model.blocks[1]])
    run.wrap(model)
    run.tell(model.blocks[1] if run.ours else model.blocks[0], "unshard")
    run.facts["shown"] = shown(model)
    run.tell(model.blocks[0], "reshard")
    run.train(model)


@THEME.behaviour()
def changed_in_place_while_sharded(run):
    model = run.nested()
    run.train(model, steps=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    run.losses.append(loss_of(model, run.batch(5)).detach())


# -- prefetch ------------------------------------------------------------------------------------------------------


@THEME.behaviour()
def prefetched_in_forward(run):
    model = run.nested()
    run.tell(model, "set_modules_to_forward_prefetch", [model.blocks[0], model.blocks[1]])
    run.tell(model.blocks[0], "set_modules_to_forward_prefetch", [model.blocks[1], model.blocks[2]])
    run.tell(model.blocks[1], "set_modules_to_forward_prefetch", [model.blocks[2]])
    run.train(model)


@THEME.behaviour()
def prefetched_in_backward(run):
    model = run.nested()
    run.tell(model, "set_modules_to_backward_prefetch", [model.blocks[2], model.blocks[1]])
    run.tell(model.blocks[2], "set_modules_to_backward_prefetch", [model.blocks[1], model.blocks[0]])
    run.train(model)


@THEME.behaviour()
def prefetched_although_not_used_next(run):
    model = run.nested()
    run.tell(model.blocks[2], "set_modules_to_forward_prefetch", (model.blocks[0],))
    run.tell(model.blocks[1], "set_modules_to_forward_prefetch", [])
    run.tell(model.blocks[0], "set_modules_to_backward_prefetch", [model.blocks[2]])
    run.train(model)
    run.facts["shown"] = shown(model)


@THEME.behaviour()
def prefetched_under_checkpointing(run):
    model = run.nested()
    forward = {block: block.forward for block in model.blocks}
    for index, block in enumerate(model.blocks):
        if index:
            run.tell(model.blocks[index - 1], "set_modules_to_forward_prefetch", [block])
            run.tell(block, "set_modules_to_backward_prefetch", [model.blocks[index - 1]])
        block.forward = lambda x, block=block: torch.utils.checkpoint.checkpoint(forward[block], x, use_reentrant=False)
    run.train(model)


# -- the tests -----------------------------------------------------------------------------------------------------


@THEME.contestants(2)
@sim.ranks(2, backends=("sim",))
def test_resharding(ctx, name, contestant):
    THEME.check(ctx, name, contestant)


@THEME.contestants(4, tier="full")
@sim.ranks(4, backends=("sim",))
def test_resharding_on_four_ranks(ctx, name, contestant):
    THEME.check(ctx, name, contestant)


@on_processes()
@sim.ranks(2, backends=("gloo", "gpu", "npu"))
def test_resharding_on_processes(ctx, contestant):
    THEME.check_all(ctx, 2, contestant)
