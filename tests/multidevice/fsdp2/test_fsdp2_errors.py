"""fully_shard against FSDP2: what both refuse, with which kind of error; and what one of them takes.

A value that FSDP2 answers with an assertion of its own, or with whatever comes first, is a `ValueError` of ours. A
wrong kind of argument ends in whatever comes first in both.
"""

import pytest
import torch
from fsdp2_kit import FSDP2, OURS, Run, Theme, on_processes
from torch import nn
from torch.distributed.tensor import Replicate

import sim
from hyper_parallel import InvalidState, InvalidValue

THEME = Theme()
ANY = Exception  # an AssertionError of FSDP2, or what happens to go wrong


def both_refuse(run, mistake, own, theirs):
    """Each engine raises its kind; the other behaviours of the model are then as before."""
    if run.alone:
        return
    wanted = own if run.ours else theirs
    with pytest.raises(wanted) as caught:
        mistake()
    run.facts["refused"] = True
    if run.ours and own is not ANY:
        # An error of the arguments, and not one that happened inside.
        assert type(caught.value) in (InvalidValue, InvalidState), caught.value
        lines = str(caught.value).splitlines()
        assert len(lines) >= 2, lines
        assert lines[-1].startswith("  try: "), lines


def refusal(mistake, own, theirs, **options):
    """A behaviour: `mistake(run, model)` is refused by both."""

    def body(run):
        model = run.net()
        both_refuse(run, lambda: mistake(run, model), own, theirs)

    body.__name__ = mistake.__name__
    THEME.behaviour(one=False, **options)(body)
    return mistake


def refused(own, theirs=None, **options):
    return lambda mistake: refusal(mistake, own, theirs or own, **options)


# -- modules -------------------------------------------------------------------------------------------------------


@refused(ANY)
def no_module(run, model):
    run.wrap("model")


@refused(ANY)
def a_list_with_something_else(run, model):
    run.wrap([model.embed, "head"])


@refused(ValueError, ANY)
def an_empty_list(run, model):
    run.wrap([])


@refused(ValueError)
def a_container_without_a_forward(run, model):
    run.wrap(model.blocks)


@refused(ValueError, ANY)
def the_same_module_twice(run, model):
    run.wrap(model.blocks[0])
    run.wrap(model.blocks[0])


@refused(ValueError)
def a_parameter_in_two_units(run, model):
    """FSDP2 sees it in the first forward, and before 2.13 not at all."""
    model.blocks[1].up.weight = model.blocks[0].up.weight
    run.wrap_blocks(model)
    model(run.batch())
    if run.engine is FSDP2 and torch.__version__ < (2, 13):
        raise ValueError("as later versions do")


# -- arguments -----------------------------------------------------------------------------------------------------


@refused(ValueError, without_hsdp="mesh")
def a_mesh_of_three_axes(run, model):
    run.wrap(model, mesh=run.mesh(1, 1, 2, names=("a", "b", "c")))


@refused(ANY)
def no_mesh(run, model):
    run.wrap(model, mesh=2)


@refused(ValueError, without_hsdp="reshard_after_forward")
def resharding_to_no_divisor(run, model):
    run.wrap(model, reshard_after_forward=3)


@refused(ValueError, without_hsdp="reshard_after_forward")
def resharding_to_a_word(run, model):
    run.wrap(model, reshard_after_forward="yes")


@refused(ValueError, ANY, without_hsdp="shard_placement_fn")
def a_placement_that_is_no_shard(run, model):
    run.wrap(model, shard_placement_fn=lambda parameter: Replicate())


@refused(ValueError, ANY, without_hsdp="shard_placement_fn")
def a_shard_of_a_dim_that_is_not_there(run, model):
    run.wrap(model, shard_placement_fn=lambda parameter: torch.distributed.tensor.Shard(3))


@refused(ANY)
def a_policy_that_is_none(run, model):
    run.wrap(model, mp_policy=torch.bfloat16)
    model(run.batch())


# -- methods -------------------------------------------------------------------------------------------------------


@refused(ValueError)
def a_flag_that_is_no_bool(run, model):
    run.wrap(model).set_reshard_after_forward(2)


@refused(ValueError)
def prefetch_of_a_module_that_is_no_unit(run, model):
    run.wrap(model).set_modules_to_forward_prefetch([model.head])


@refused(ValueError)
def backward_prefetch_of_a_module_that_is_no_unit(run, model):
    run.wrap(model).set_modules_to_backward_prefetch([model.head])


@refused(ValueError)
def a_forward_method_that_is_not_there(run, model):
    run.forward_method(run.wrap(model), "generate")


@refused(RuntimeError, without_traced="device meta is not on the expected")
def parameters_still_on_meta(run, model):
    with torch.device("meta"):
        model = nn.Linear(5, 3)
    run.wrap(model)
    model(run.batch().float())


# -- in training ---------------------------------------------------------------------------------------------------


@THEME.behaviour(one=False)
def a_forward_that_fails(run):
    """The error comes through as it is. Ours goes on by itself; FSDP2 has reset_iter_state for it, since 2.13."""
    model = run.nested()

    def fail(*_):
        raise ArithmeticError("on purpose")

    handle = model.blocks[1].up.register_forward_hook(fail)
    with pytest.raises(ArithmeticError, match="on purpose"):
        model(run.batch())
    handle.remove()
    if run.engine is FSDP2:
        model = run.net()  # instead of the reset, which older versions do not have
        run.wrap_blocks(model)
    run.train(model)


@THEME.behaviour(one=False, without_traced="DID NOT RAISE")
def the_data_of_a_parameter_is_assigned(run):
    """FSDP2 goes on with the old values and says nothing; ours refuses the next forward, and names the parameter."""
    model = run.nested()
    before = model(run.batch()).detach()
    model.reshard()
    with torch.no_grad():
        model.head.weight.data = model.head.weight.detach() * 2
    if run.ours:
        with pytest.raises(RuntimeError, match=r"the data of 'head.weight' was assigned"):
            model(run.batch())
    else:
        assert torch.equal(model(run.batch()), before)
    run.facts["no other values were used"] = True


@pytest.mark.sim
def test_a_face_that_does_not_refuse_is_found():
    """The check itself fails where nothing is raised, and where ours raises another kind."""

    def body(engine, kind):
        run = Run(sim.RankTest(0, 1, "sim", torch.device("cpu")), engine)
        both_refuse(run, lambda: run.wrap([]), kind, kind)

    with sim.world(1) as world, pytest.raises(sim.RankFailed, match="the list is empty"):
        world.run(body, (OURS, KeyError))
    run = Run(sim.RankTest(0, 1, "sim", torch.device("cpu")), OURS)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        both_refuse(run, lambda: None, ValueError, ValueError)


# -- the tests -----------------------------------------------------------------------------------------------------


@THEME.contestants(2, tier="check")
@sim.ranks(2, backends=("sim",))
def test_errors(ctx, name, contestant):
    THEME.check(ctx, name, contestant)


@on_processes("full")
@sim.ranks(2, backends=("gloo", "gpu", "npu"))
def test_errors_on_processes(ctx, contestant):
    THEME.check_all(ctx, 2, contestant)
