"""Held parameters: gradients that are computed in any way, and reduced when asked, are those of plain backwards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sim
from hyper_parallel import fully_shard, hsdp, hsdp_sync_stream, init_device_mesh
from hyper_parallel.core.fully_shard.module import StepReductions, hold_parameters, reduce_gradients, release_parameters
from hyper_parallel.core.fully_shard.unit import nested_units

WAYS = {
    "fully_shard": lambda unit, device: fully_shard(unit),
    "not freed after forward": lambda unit, device: fully_shard(unit, reshard_after_forward=False),
    "replicas": lambda unit, device: fully_shard(
        unit, mesh=init_device_mesh(device, (2, 1), mesh_dim_names=("replicate", "shard"))
    ),
    "level1": lambda unit, device: hsdp(unit, threshold=0),
    "level3": lambda unit, device: hsdp(unit, threshold=0, optimizer_level="level3"),
    "async": lambda unit, device: hsdp(unit, threshold=0, optimizer_level="level2", comm_async=True),
}


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Linear(4, 2))


def wrapped(way: str, device: torch.device) -> nn.Sequential:
    model = net().to(device)
    for unit in (model[2], model):
        WAYS[way](unit, device.type)
    return model


def rows(rank: int, device: torch.device) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)).to(device)


@torch.no_grad()
def shift(model: nn.Module) -> None:
    for param in model.parameters():
        param.add_(0.25)


def check_gradients(model: nn.Module, device: torch.device, times: int, shifts: int = 0) -> None:
    """They are the mean over ranks of what `times` batches bring, of parameters that were shifted so often."""
    alone = net().to(device)
    for _ in range(shifts):
        shift(alone)
    for rank in range(dist.get_world_size()):
        for _ in range(times):
            (alone(rows(rank, device)).square().sum() / dist.get_world_size()).backward()
    for (name, param), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        got = param.grad.full_tensor()
        torch.testing.assert_close(got, other.grad, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.tier("full")
@sim.ranks(2)
def test_gradients_by_backward_and_by_hand(ctx):
    for way in WAYS:
        model = wrapped(way, ctx.device)
        given = rows(ctx.rank, ctx.device)
        for step in range(2):  # the second time all is as after a step, and new values have to be gathered
            hold_parameters(model)
            outputs = [model(given), model(given)]  # both forwards before a backward
            outputs[1].square().sum().backward()
            params = list(model.parameters())
            grads = torch.autograd.grad(outputs[0].square().sum(), params)  # no hook tells anybody
            for param, grad in zip(params, grads, strict=True):
                param.grad += grad
            reduce_gradients(model)
            hsdp_sync_stream()
            check_gradients(model, ctx.device, times=2, shifts=step)
            assert all(unit.is_resharded() for unit in nested_units(model))
            shift(model)
            model.zero_grad()
        model(given).square().sum().backward()  # and without holding, all is as ever
        hsdp_sync_stream()
        check_gradients(model, ctx.device, times=1, shifts=2)


@sim.ranks(2, backends=("sim",))
def test_a_rank_without_gradients_takes_part(ctx):
    model = wrapped("fully_shard", ctx.device)
    hold_parameters(model)
    output = model(rows(ctx.rank, ctx.device))
    if ctx.rank == 0:
        output.square().sum().backward()
    reduce_gradients(model)
    alone = net()
    (alone(rows(0, ctx.device)).square().sum() / 2).backward()
    for param, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), other.grad)


@sim.ranks(2, backends=("sim",))
def test_what_is_released_is_not_reduced(ctx):
    model = wrapped("fully_shard", ctx.device)
    for failed in (True, False):
        hold_parameters(model)
        model(rows(ctx.rank, ctx.device)).square().sum().backward()
        release_parameters(model, failed=failed)
        assert all(param.grad is None for param in model.parameters())
        assert all(unit.is_resharded() for unit in nested_units(model))
        model.zero_grad()
    hold_parameters(model)
    model(rows(ctx.rank, ctx.device)).square().sum().backward()
    reduce_gradients(model)
    check_gradients(model, ctx.device, times=1)


@sim.ranks(2, backends=("sim",))
def test_a_change_in_place_is_noticed(ctx):
    model = wrapped("fully_shard", ctx.device)
    hold_parameters(model)
    model(rows(ctx.rank, ctx.device)).square().sum().backward()
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"forward changed the parameter '0\.weight' in place"):
        reduce_gradients(model)
    release_parameters(model, failed=True)
    assert all(unit.is_resharded() for unit in nested_units(model))


@sim.ranks(2, backends=("sim",))
def test_units_without_a_common_root(ctx):
    """A module that is not wrapped itself: each outermost unit in it is a root of its own."""
    model = net()
    fully_shard(model[0])
    fully_shard(model[2])
    hold_parameters(model)
    model(rows(ctx.rank, ctx.device)).square().sum().backward()
    reduce_gradients(model)
    for param in model[3].parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
        param.grad /= 2
    alone = net()
    for rank in range(2):
        (alone(rows(rank, ctx.device)).square().sum() / 2).backward()
    for param, other in zip(model.parameters(), alone.parameters(), strict=True):
        got = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
        torch.testing.assert_close(got, other.grad)


# -- reductions that start in the last backward ------------------------------------------------------------------------


def backward_in(reductions: StepReductions, loss: torch.Tensor) -> None:
    with reductions.in_backward():
        loss.backward()
    reductions.start()
    reductions.finish()


@pytest.mark.tier("test")
@sim.ranks(2)
def test_reductions_in_backward(ctx):
    for way in WAYS:
        model = wrapped(way, ctx.device)
        given = rows(ctx.rank, ctx.device)
        for step in range(2):
            hold_parameters(model)
            outputs = [model(given), model(given)]
            outputs[1].square().sum().backward()
            backward_in(StepReductions(model), outputs[0].square().sum())
            hsdp_sync_stream()
            check_gradients(model, ctx.device, times=2, shifts=step)
            assert all(unit.is_resharded() for unit in nested_units(model))
            shift(model)
            model.zero_grad()


@pytest.mark.tier("test")
@sim.ranks(2, backends=("sim",))
def test_reductions_start_behind_the_last_gradient_of_a_unit(ctx):
    model = wrapped("fully_shard", ctx.device)
    started: list[int] = []
    hold_parameters(model)
    inner = len(list(model[2].parameters()))
    arrivals: list[int] = []
    for param in (unit.params[0].unsharded for unit in nested_units(model)):
        param.register_hook(lambda gradient: arrivals.append(len(started)))
    reductions = StepReductions(model, before=lambda unit: started.append(len(unit.params)))
    with reductions.in_backward():
        model(rows(ctx.rank, ctx.device)).square().sum().backward()
        assert started == [inner, len(list(model.parameters())) - inner]
    assert arrivals == [0, 1]  # that of the first weight of all came when the inner unit was on its way
    assert not reductions.is_started  # their parameters are there yet
    reductions.start()
    reductions.finish()
    check_gradients(model, ctx.device, times=1)


@sim.ranks(2, backends=("sim",))
def test_a_rank_without_some_gradients_reduces_in_the_same_order(ctx):
    """Where a rank has not used a unit, its reduction and those behind it wait for the end: no rank waits for ever."""
    model, alone = wrapped("fully_shard", ctx.device), net()
    if ctx.rank == 1:
        model[2].register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    hold_parameters(model)
    backward_in(StepReductions(model), model(rows(ctx.rank, ctx.device)).square().sum())
    other_rank = alone[3](torch.zeros(4, 4)).square().sum()
    ((alone(rows(0, ctx.device)).square().sum() + other_rank) / 2).backward()
    for param, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), other.grad)


@sim.ranks(2, backends=("sim",))
def test_frozen_weights_are_there_until_backward_is_through(ctx):
    """All gradients of the inner unit are there before its frozen weights are read for those of its input."""

    def adapted() -> nn.Sequential:
        torch.manual_seed(1)
        inner = nn.Sequential(nn.Linear(5, 5).requires_grad_(False), nn.Tanh(), nn.Linear(5, 4))
        return nn.Sequential(nn.Linear(3, 5), inner, nn.Linear(4, 2))

    model, alone = adapted(), adapted()
    for unit in (model[1], model):
        fully_shard(unit)
    hold_parameters(model)
    backward_in(StepReductions(model), model(rows(ctx.rank, ctx.device)).square().sum())
    for rank in range(2):
        (alone(rows(rank, ctx.device)).square().sum() / 2).backward()
    for param, other in zip(model.parameters(), alone.parameters(), strict=True):
        if other.requires_grad:
            torch.testing.assert_close(param.grad.full_tensor(), other.grad)


@sim.ranks(2, backends=("sim",))
def test_gradients_that_come_once_more_are_added(ctx):
    """As with one graph that two backwards go through in the block: the second one's are reduced at the end."""
    model = wrapped("fully_shard", ctx.device)
    given = rows(ctx.rank, ctx.device)
    hold_parameters(model)
    first, second = model(given).square().sum(), model(given).square().sum()
    reductions = StepReductions(model)
    with reductions.in_backward():
        first.backward()
        second.backward()
    reductions.start()
    reductions.finish()
    check_gradients(model, ctx.device, times=2)


@pytest.mark.tier("test")
@sim.ranks(2, backends=("sim",))
def test_reductions_of_a_step_that_fails_are_forgotten(ctx):
    model = wrapped("fully_shard", ctx.device)
    given = rows(ctx.rank, ctx.device)
    hold_parameters(model)
    with StepReductions(model).in_backward():
        model(given).square().sum().backward()
    release_parameters(model, failed=True)
    model.zero_grad()
    hold_parameters(model)
    backward_in(StepReductions(model), model(given).square().sum())
    check_gradients(model, ctx.device, times=1)
