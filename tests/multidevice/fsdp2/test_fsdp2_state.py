"""fully_shard against FSDP2: state dicts of models and optimizers, and checkpoints.

What one saves the other loads: both show the same keys, layouts and values.
"""

import contextlib
import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp2_kit import FSDP2, OURS, Even, Run, Theme, full, loss_of, on_processes
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import sim

pytestmark = pytest.mark.tier("test")

THEME = Theme()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)


def a_step(run, model, optimizer, step=0):
    optimizer.zero_grad()
    run.backward(loss_of(model, run.batch(step)))
    optimizer.step()


def stepped(run):
    model = run.nested()
    optimizer = adam(model)
    a_step(run, model, optimizer)
    return model, optimizer


def describe(value):
    if isinstance(value, DTensor):
        return "DTensor", value.placements, value.device_mesh.shape, tuple(value.to_local().shape), value.dtype
    return type(value).__name__, tuple(value.shape), value.dtype


def note_state(run, state, when=""):
    for name, value in state.items():
        run.note(f"{name} {when}", value)
    if not run.alone:
        run.layouts[f"state {when}"] = {name: describe(value) for name, value in state.items()}


def shifted(model):
    """Values other than the model's, as full tensors."""
    return {name: full(value.detach()) * 0.5 + 1 for name, value in model.state_dict().items()}


# -- saving --------------------------------------------------------------------------------------------------------


@THEME.behaviour()
def keys_layouts_and_values(run):
    model = run.nested()
    note_state(run, model.state_dict())
    note_state(run, model.blocks[1].state_dict(), "of a block")
    note_state(run, model.state_dict(prefix="model."), "with a prefix")


@THEME.behaviour(4)
def keys_layouts_and_values_over_two_axes(run):
    model = run.nested(mesh=run.mesh(2, 2))
    note_state(run, model.state_dict())


@THEME.behaviour(dtype=torch.bfloat16, without_hsdp="mp_policy")
def the_state_has_the_parameters_dtype(run):
    model = run.net(torch.float32)
    run.wrap_blocks(model, mp_policy=run.policy(torch.bfloat16, torch.float32))
    note_state(run, model.state_dict())


@THEME.behaviour()
def buffers_and_tied_weights(run):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("kept", torch.ones(3))
            self.register_buffer("lost", torch.ones(2), persistent=False)

        def forward(self, x):
            return self.head(self.embed(x))

    model = run.build(Odd)
    run.wrap(model)
    note_state(run, model.state_dict())
    values = shifted(model)
    values["head.weight"] = values["embed.weight"]
    if run.alone:
        model.load_state_dict(values)
    else:
        set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
        assert model.head.weight is model.embed.weight
    note_state(run, model.state_dict(), "loaded")


@THEME.behaviour()
def saved_between_steps(run):
    model = run.nested()
    optimizer = adam(model)
    for step in range(2):
        a_step(run, model, optimizer, step)
        note_state(run, model.state_dict(), f"after step {step}")


@THEME.behaviour(without_fsdp2="its root, unsharded after the evaluation, saves unsharded parameters")
def saved_after_an_evaluation(run):
    model = run.nested()
    with torch.no_grad():
        model(run.batch())
    state = model.state_dict()
    loss = loss_of(model, run.batch())
    between = model.state_dict()
    for values in (state, between):
        assert run.alone or all(isinstance(value, DTensor) for value in values.values())
    note_state(run, state)
    note_state(run, between, "between forward and backward")
    run.backward(loss)
    run.note_model(model)


@THEME.behaviour()
def saved_while_gradients_wait(run):
    model = run.nested()
    run.tell(model, "set_requires_gradient_sync", False)
    run.backward(loss_of(model, run.batch(0)))
    note_state(run, model.state_dict())
    run.tell(model, "set_requires_gradient_sync", True)
    run.backward(loss_of(model, run.batch(1)))
    run.note_model(model)


@THEME.behaviour()
def saved_whole(run):
    model = run.nested()
    options = StateDictOptions(full_state_dict=True)
    state = model.state_dict() if run.alone else get_model_state_dict(model, options=options)
    note_state(run, state)


@THEME.behaviour()
def saved_whole_to_the_host(run):
    """Rank 0 has everything, the others nothing."""
    model = run.nested()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = model.state_dict() if run.alone else get_model_state_dict(model, options=options)
    run.facts["keys"] = sorted(state)
    if run.ctx.rank == 0:
        note_state(run, state)


# -- loading -------------------------------------------------------------------------------------------------------


@THEME.behaviour()
def loads_what_it_has_saved(run):
    model = run.nested()
    saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    outcome = model.load_state_dict(saved)
    run.facts["outcome"] = list(outcome.missing_keys), list(outcome.unexpected_keys)
    run.train(model)


@THEME.behaviour()
def loads_whole_values(run):
    model = run.nested()
    values = shifted(model)
    if run.alone:
        model.load_state_dict(values)
    else:
        set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
    run.train(model)


@THEME.behaviour()
def loads_whole_values_that_rank_0_has(run):
    model = run.nested()
    values = shifted(model)
    if run.alone:
        model.load_state_dict(values)
    else:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, values if run.ctx.rank == 0 else {}, options=options)
    run.train(model)


@THEME.behaviour()
def loads_a_part_of_the_keys(run):
    model = run.nested()
    state = {name: value * 2 for name, value in model.state_dict().items() if name.startswith("blocks.1")}
    outcome = model.load_state_dict(state | {"stray": torch.ones(1)}, strict=False)
    run.facts["outcome"] = sorted(outcome.missing_keys), sorted(outcome.unexpected_keys)
    run.train(model)


@THEME.behaviour()
def refuses_missing_and_unexpected_keys(run):
    model = run.nested()
    state = model.state_dict()
    del state["head.bias"]
    state["stray"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"(?s)head\.bias.*stray"):
        model.load_state_dict(state)
    run.train(model)


@THEME.behaviour(without_fsdp2="wants DTensors of its own layout: a plain tensor is an error")
def loads_plain_values(run):
    model = run.nested()
    model.load_state_dict(shifted(model))
    empty = torch.zeros(4, 7, dtype=run.dtype)
    for nothing in (empty.to("meta"), empty.to_sparse()) if run.ours else ():  # refused before anything is copied
        with pytest.raises(ValueError, match=r"cannot load 'head.weight': got a .*(meta|sparse)"):
            model.load_state_dict({"scale": torch.zeros(1), "head.weight": nothing}, strict=False)
    run.train(model)


@THEME.behaviour()
def one_loads_what_the_other_has_saved(run):
    """State dicts of ours go into FSDP2's, and the other way round."""
    model = run.nested()
    if run.alone:
        model.load_state_dict(shifted(model))
    else:
        other = Run(run.ctx, FSDP2 if run.engine is OURS else OURS, run.meshes)
        source = other.wrap_blocks(other.net())
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.mul_(0.5).add_(1)
        model.load_state_dict(source.state_dict())
    run.train(model)


# -- optimizers ----------------------------------------------------------------------------------------------------


@THEME.behaviour()
def state_of_the_optimizer(run):
    model, optimizer = stepped(run)
    state = get_optimizer_state_dict(model, optimizer)["state"]
    run.facts["keys"] = sorted(state)
    for name, values in state.items():
        for key, value in values.items():
            run.note(f"{name} {key}", value)
            if not run.alone:
                run.layouts[f"{name} {key}"] = describe(value)


@THEME.behaviour()
def whole_state_of_the_optimizer(run):
    model, optimizer = stepped(run)
    options = None if run.alone else StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    for name, values in state["state"].items():
        for key, value in values.items():
            run.note(f"{name} {key}", value)


@THEME.behaviour()
def the_optimizers_state_is_loaded(run):
    model, optimizer = stepped(run)
    saved = get_optimizer_state_dict(model, optimizer)
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    again = run.nested()
    other = adam(again)
    again.load_state_dict(weights)
    set_optimizer_state_dict(again, other, saved)
    run.train(again, optimizer=other)


@THEME.behaviour()
def the_optimizers_own_state_dict(run):
    model, optimizer = stepped(run)
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    again = run.nested()
    other = adam(again)
    again.load_state_dict(weights)
    other.load_state_dict(optimizer.state_dict())
    run.train(again, optimizer=other)


# -- checkpoints ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def a_folder_of_all_ranks(run):
    name = [tempfile.mkdtemp() if run.ctx.rank == 0 else ""]
    dist.broadcast_object_list(name, src=0, device=run.ctx.device)
    try:
        yield name[0]
    finally:
        dist.barrier()
        if run.ctx.rank == 0:
            shutil.rmtree(name[0])


def note_layout(run, model):
    note_state(run, model.state_dict(), "loaded")


@THEME.behaviour()
def a_checkpoint_goes_round(run):
    model, optimizer = stepped(run)
    if run.alone:
        a_step(run, model, optimizer, 1)
        run.note_model(model)
        return
    with a_folder_of_all_ranks(run) as folder:
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder)
        again = run.nested()
        other = adam(again)
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        state = {"model": get_model_state_dict(again), "optimizer": get_optimizer_state_dict(again, other)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(again, state["model"])
        set_optimizer_state_dict(again, other, state["optimizer"])
    a_step(run, again, other, 1)
    run.note_model(again)


@THEME.behaviour(4)
def a_checkpoint_of_another_layout(run):
    """Saved over (2, 2), loaded over 4; and by the other engine than the one that has saved it."""
    model = run.build(Even)
    if run.alone:
        model.load_state_dict(shifted(model))
    else:
        other = Run(run.ctx, FSDP2 if run.engine is OURS else OURS, run.meshes)
        source = other.build(Even)
        other.wrap_blocks(source, mesh=run.mesh(2, 2))
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.mul_(0.5).add_(1)
        run.wrap_blocks(model)
        with a_folder_of_all_ranks(run) as folder:
            dcp.save(get_model_state_dict(source), checkpoint_id=folder)
            state = get_model_state_dict(model)
            dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state)
    note_layout(run, model)
    run.train(model, lambda step: loss_of(model, run.batch(step, width=8)))


# -- the tests -----------------------------------------------------------------------------------------------------


@THEME.contestants(2)
@sim.ranks(2, backends=("sim",))
def test_state(ctx, name, contestant):
    THEME.check(ctx, name, contestant)


@THEME.contestants(4)
@sim.ranks(4, backends=("sim",))
def test_state_on_four_ranks(ctx, name, contestant):
    THEME.check(ctx, name, contestant)


@on_processes("full")
@sim.ranks(2, backends=("gloo", "gpu", "npu"))
def test_state_on_processes(ctx, contestant):
    THEME.check_all(ctx, 2, contestant)
