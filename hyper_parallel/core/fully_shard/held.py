"""Parameters that stay whole for many forwards and backwards, and gradients that are reduced when asked.

A pipeline runs forwards and backwards of several micro-batches in an order of its own, and some schedules compute the
gradients of inputs and of weights apart, through none of the hooks that tell a unit where backward is. So a step is
put between two calls, and the hooks stay out of it::

    hold_parameters(stage)   # one gather per unit
    ...                      # forwards and backwards, in any order
    reduce_gradients(stage)  # free the whole parameters, one reduction per unit
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.fully_shard.unit import Unit, traced_unit_of, unit_of
from hyper_parallel.core.fully_shard.waiting import remember

__all__ = ["hold_parameters", "reduce_gradients", "release_parameters", "units_with_wider_sums"]


Told = Callable[[Unit], object]
"""Told of each unit before anything is done with it."""


def hold_parameters(module: nn.Module, *, keep: bool = True, before: Told | None = None) -> None:
    """Gather all parameters in `module`, and leave them whole until `reduce_gradients` or `release_parameters`.

    Forwards meanwhile cast inputs and outputs as the policy says and do nothing else. Gradients add up in the whole
    parameters without communication, whoever computes them: `backward`, or `torch.autograd.grad` and an assignment.

    Communication: one all_gather per unit, all of them started here.

    Args:
        module: with units of `fully_shard` or `hsdp` in it, or none: then this does nothing.
        keep: False: gather and free in each forward and backward as ever, which must then be a whole one; only the
            reductions wait.
        before: called with each unit before it is gathered.

    Raises:
        ValueError: a unit for `torch.compile` to trace, whose communication is part of its graph.
        RuntimeError: the parameters are held already.
    """
    _refuse_traced(module)
    units = [unit for root in _roots(module) for unit in root.prepared_units()]
    held = next((unit for unit in units if unit.held or unit.defers), None)
    if held is not None:
        name = type(held.modules[0]).__name__
        hint = "reduce_gradients(module), or release_parameters(module), once per hold_parameters(module)"
        raise RuntimeError(explain("cannot hold parameters", "they are held already", f"seen: unit {name}", hint))
    for unit in units:
        if before is not None:
            before(unit)
        if keep:
            unit.become_held()
        else:
            unit.defers = True


def units_with_wider_sums(module: nn.Module) -> list[Unit]:
    """Return the held units that reduce gradients in another dtype than autograd adds them up in.

    After each micro-batch `unit.keep_gradients()` adds theirs up in that dtype; no communication.

    Args:
        module: whose parameters are held.
    """
    units = [unit for root in _roots(module) for unit in root.prepared_units()]
    return [unit for unit in units if unit.held and unit.has_wider_sums]


def reduce_gradients(module: nn.Module, *, before: Told | None = None) -> None:
    """Reduce all gradients that wait in `module`, in `param.grad` of the sharded parameters, as a backward's end would.

    What waits are gradients of held parameters, which are freed, and those of backwards without gradient sync. With
    ``set_requires_gradient_sync(False)`` all of them go on waiting. A rank that has no gradients takes part with zeros.

    Communication: one reduction per unit, as `fully_shard` says; every rank calls this at the same place.

    Args:
        module: with units of `fully_shard` or `hsdp` in it, or none.
        before: called with each unit before its gradients are reduced.

    Raises:
        ValueError: a unit for `torch.compile` to trace.
        RuntimeError: forward changed a whole parameter in place.
    """
    _refuse_traced(module)
    for root in _roots(module):
        units = root.prepared_units()
        schedule = root.schedule
        assert schedule is not None
        for unit in units:
            for bucket in unit.buckets:
                if bucket.gathered:
                    bucket.check_untouched()
        for unit in reversed(units):
            if before is not None:
                before(unit)
            unit.reduce_now()
        if any(unit.options.finish_late for unit in units):
            remember(schedule)
        else:
            with torch.no_grad():
                schedule.finish_reductions()


def release_parameters(module: nn.Module, *, failed: bool = False) -> None:
    """Free the whole parameters that are held in `module`, without a reduction; no communication.

    Args:
        module: with units in it, or none.
        failed: drop all gradients that wait, as after a step that ended with an error.
    """
    for root in _roots(module):
        for unit in root.prepared_units():
            unit.release(failed=failed)


def _roots(module: nn.Module) -> Iterator[Unit]:
    """The units in `module` that are in no other one, each once, in module order."""
    found: list[Unit] = []

    def visit(child: nn.Module) -> None:
        unit = unit_of(child)
        if unit is None:
            for below in child.children():
                visit(below)
        elif unit not in found:
            found.append(unit)

    visit(module)
    yield from found


def _refuse_traced(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if traced_unit_of(child) is not None:
            blame = f"{name or type(child).__name__!r} was wrapped for torch.compile to trace"
            hint = "hsdp(cell, ..., use_eager_hook=True)"
            seen = "seen: hsdp(..., use_eager_hook=False), whose communication is part of its graph"
            raise ValueError(explain("cannot reduce gradients when asked", blame, seen, hint))
