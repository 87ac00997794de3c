"""Copies of wrapped modules: the same units over the same groups, with values of their own."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.tensor import DTensor

from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.fully_shard.build import Found, install, make_unit
from hyper_parallel.core.fully_shard.fsdp2 import nested_traced_units, nested_units
from hyper_parallel.core.fully_shard.mesh import Home
from hyper_parallel.core.fully_shard.module import register_forward_method
from hyper_parallel.core.fully_shard.param import ManagedParam, Slot, has_extension
from hyper_parallel.core.fully_shard.unit import Unit

__all__ = ["copy_wrapped"]

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
OF_A_UNIT = ("_hyper_parallel_unit", STATE_KEY, REGISTRY_KEY)


def copy_wrapped(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """What ``copy.deepcopy`` of a wrapped module returns; gradients are left behind, as torch does for parameters.

    Raises:
        TypeError: A unit for ``torch.compile`` to trace.
        ValueError: A unit has modules outside of this one.
    """
    units = list(nested_units(module))
    _check(module, units)
    for unit in units:
        unit.reshard()
    with _unwrapped(module, units) as stand_ins:
        made: nn.Module = copy.deepcopy(module, memo)
    copies: dict[int, Unit] = {}
    for unit in reversed(units):  # inner ones first
        copies[id(unit)] = _copy_unit(unit, stand_ins, memo)
    for unit in units:
        _copy_links(unit, copies)
    return made


def _check(module: nn.Module, units: list[Unit]) -> None:
    if nested_traced_units(module):
        raise TypeError(
            explain(
                f"cannot copy a {type(module).__name__}",
                "a cell in it was wrapped for torch.compile to trace",
                "seen: hsdp(..., use_eager_hook=False)",
                "its state_dict(), or copy the module before it is wrapped",
            )
        )
    inside = set(module.modules())
    for unit in units:
        outside = [type(m).__name__ for m in (*unit.modules, *(s.module for s in _slots(unit))) if m not in inside]
        if outside:
            raise ValueError(
                explain(
                    f"cannot copy a {type(module).__name__} alone",
                    "its unit has modules outside of it",
                    f"seen: {', '.join(dict.fromkeys(outside))}",
                    "copy the module that contains them",
                )
            )


def _params(unit: Unit) -> list[ManagedParam]:
    return [param for bucket in unit.buckets for param in bucket.params]


def _slots(unit: Unit) -> list[Slot]:
    return [slot for param in _params(unit) for slot in param.slots]


@contextmanager
def _unwrapped(module: nn.Module, units: list[Unit]) -> Iterator[dict[int, nn.Parameter]]:
    """For a while, the module as it was before: no units, and parameters of the original shapes without data."""
    before = [(child, type(child), dict(child.__dict__), dict(child._parameters)) for child in module.modules()]
    stand_ins: dict[int, nn.Parameter] = {}
    try:
        for unit in units:
            for param in _params(unit):
                empty = torch.empty(param.shape, dtype=param.local.dtype, device="meta")
                stand_ins[id(param)] = nn.Parameter(empty, requires_grad=param.sharded.requires_grad)
                for slot in param.slots:
                    slot.module._parameters[slot.name] = stand_ins[id(param)]
            for root in unit.modules:
                object.__setattr__(root, "__class__", unit.original_classes[id(root)])
                for name in (*OF_A_UNIT, *unit.forward_methods.get(id(root), ())):
                    root.__dict__.pop(name, None)
        for child, *_ in before:
            for name in HOOKS:
                child.__dict__[name] = OrderedDict(
                    (number, hook) for number, hook in child.__dict__[name].items() if not _is_of_a_unit(hook)
                )
        yield stand_ins
    finally:
        for child, kind, attributes, parameters in before:
            object.__setattr__(child, "__class__", kind)
            child.__dict__.clear()
            child.__dict__.update(attributes)
            child._parameters.update(parameters)


def _is_of_a_unit(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # torch wraps those on state dicts
    return isinstance(getattr(hook, "__self__", None), Unit) or getattr(hook, "is_of_a_unit", False)


def _copy_unit(unit: Unit, stand_ins: dict[int, nn.Parameter], memo: dict[int, Any]) -> Unit:
    params = _params(unit)
    placed: list[tuple[Found, Home]] = []
    device = unit.storage.device
    for param in params:
        empty = memo[id(stand_ins[id(param)])]
        whole = nn.Parameter(empty.detach() if param.local.is_meta else torch.empty_like(empty, device=device))
        if has_extension(param.local):
            whole = nn.Parameter(param.local.detach().new_zeros(param.shape))
        whole.requires_grad_(empty.requires_grad)
        if param.home.view_mesh is not None:
            whole = _as_dtensor(whole, param)
        whole.__dict__.update(copy.deepcopy(param.attributes | param.sharded.__dict__, memo))
        slots = tuple(Slot(memo[id(slot.module)], slot.name) for slot in param.slots)
        placed.append((Found(whole, param.name, slots), param.home))
    roots = [memo[id(root)] for root in unit.modules]
    made = make_unit(roots, placed, unit.storage, replace(unit.options), unit.grouping)
    for param, twin in zip(params, _params(made), strict=True):  # the same keys, hence the same buckets
        memo[id(param.sharded)] = twin.sharded
        with torch.no_grad():
            twin.local.copy_(param.local)
    made.ignored = [memo.get(id(parameter), parameter) for parameter in unit.ignored]
    classes = {unit.original_classes[id(root)]: type(root) for root in unit.modules}
    install(made, placed, classes.__getitem__, "fully_shard")
    made.copied_by = copy_wrapped
    for root, twin in zip(unit.modules, roots, strict=True):
        for name in unit.forward_methods.get(id(root), ()):
            register_forward_method(twin, name)
    return made


def _as_dtensor(whole: nn.Parameter, param: ManagedParam) -> nn.Parameter:
    model: Any = param.sharded
    assert param.home.view_mesh is not None
    local = DTensor.from_local(
        whole.detach(),
        param.home.view_mesh,
        param.home.view_placements,
        run_check=False,
        shape=model.shape,
        stride=model.stride(),
    )
    return nn.Parameter(local, requires_grad=whole.requires_grad)


def _copy_links(unit: Unit, copies: dict[int, Unit]) -> None:
    """What units know of each other."""
    made = copies[id(unit)]
    for name in ("forward_prefetch", "backward_prefetch"):
        others = getattr(unit, name)
        if others is not None:
            setattr(made, name, [copies[id(other)] for other in others if id(other) in copies])
    made.is_last_backward = unit.is_last_backward if unit.schedule is None else unit.schedule.is_last_backward
    for bucket, twin in zip(unit.buckets, made.buckets, strict=True):
        twin.keep_pieces, twin.all_gather_with = bucket.keep_pieces, bucket.all_gather_with
