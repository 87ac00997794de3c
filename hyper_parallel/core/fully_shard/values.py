"""One value of a state dict, brought to where a parameter holds its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import distribute_tensor as distribute_by_torch
from torch.nn.parameter import is_lazy

from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.fully_shard.param import dtensor_like
from hyper_parallel.core.redistribute import full_tensor, redistribute
from hyper_parallel.platform import get_platform

__all__ = ["fit", "fits", "give_memory", "misfit", "whole_of"]


def fits(value: Any, target: torch.Tensor) -> bool:
    """Whether ``value`` has a shape that ``target`` can be loaded from, and data."""
    if is_lazy(target):
        return True  # it takes any shape
    if not isinstance(value, torch.Tensor) or (_has_no_data(value) and not _has_no_data(target)):
        return False
    if isinstance(target, DTensor) and value.layout != torch.strided:
        return False  # parts of it are no views
    if target.dim() == 0 and value.shape == (1,):
        return True  # what torch has always accepted
    if value.shape == target.shape:
        return True
    return isinstance(target, DTensor) and not isinstance(value, DTensor) and value.shape == target._local_tensor.shape


def misfit(key: str, value: Any, target: torch.Tensor, others: str = "") -> ValueError:
    """The error for a value that does not fit; ``others``: the names of more."""
    got = f"{type(value).__name__} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        got += f", {value.layout}"
    elif isinstance(value, torch.Tensor) and _has_no_data(value):
        got += " on the meta device"
    local = target._local_tensor if isinstance(target, DTensor) else target
    seen = f"global shape: {tuple(target.shape)}   this rank's part: {tuple(local.shape)}"
    seen += f"\n  likewise: {others}" if others else ""
    hint = "a dense tensor of one of these two shapes, or a DTensor of the global shape, with data"
    return ValueError(explain(f"cannot load {key!r}", f"got a {got}", seen, hint))


def _has_no_data(tensor: torch.Tensor) -> bool:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).is_meta


@torch.no_grad()
def fit(key: str, value: Any, target: torch.Tensor) -> Any:
    """``value`` in the layout of ``target``, for torch to copy, which sees to dtypes and devices."""
    if is_lazy(target):
        return value
    if not fits(value, target):
        raise misfit(key, value, target)
    if target.dim() == 0 and value.dim() == 1:
        value = (whole_of(value) if isinstance(value, DTensor) else value)[0]
    if not isinstance(target, DTensor):
        return whole_of(value) if isinstance(value, DTensor) else value
    return dtensor_like(_part(value.detach(), target), target)


def _part(value: torch.Tensor, target: DTensor) -> torch.Tensor:
    """This rank's part of ``value``; communicates only for a DTensor that is laid out otherwise."""
    held = target._local_tensor
    if not isinstance(value, DTensor):
        # Also right where the two shapes are the same: then this rank holds the whole parameter.
        return value if value.shape == held.shape else _cut(value, target)
    if value.device_mesh == target.device_mesh and value._spec.placements == target._spec.placements:
        return value._local_tensor
    if value._local_tensor.is_meta:
        return torch.empty_like(held, device="meta")
    try:
        return redistribute(_on_its_mesh(value), Layout.of(target)).to_local()
    except ValueError:  # raised before anything is sent, on all ranks: between slices of a mesh, for one
        return _cut(whole_of(value), target).clone()  # a view would keep all of it


def _cut(whole: torch.Tensor, target: DTensor) -> torch.Tensor:
    """This rank's part of what it has whole: a view."""
    try:
        rows = Layout.of(target).local_slice(target.shape)
    except ValueError:  # strided parts, of which no layout speaks
        return distribute_by_torch(whole, target.device_mesh, target.placements, src_data_rank=None).to_local()
    return whole[rows]


def whole_of(value: DTensor) -> torch.Tensor:
    """All of ``value``, on every rank of its mesh."""
    if value._local_tensor.is_meta and _device_of(value).type != "meta":
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    with torch.no_grad():
        return full_tensor(_on_its_mesh(value))


def _on_its_mesh(value: DTensor) -> DTensor:
    """``value`` where its mesh can send it: parts may have been kept on the host."""
    local = value._local_tensor
    if local.is_meta or local.device.type == _device_of(value).type:
        return value
    return dtensor_like(local.to(_device_of(value)), value)


def _device_of(value: DTensor) -> torch.device:
    return get_platform(value.device_mesh.device_type).device()


def give_memory(target: torch.Tensor, value: Any) -> None:
    """Put an empty tensor in place of one that is on the meta device; all who refer to it see the new one."""
    if is_lazy(target) or not target.is_meta or not isinstance(value, torch.Tensor) or value.is_meta:
        return
    new = _empty_like(target, value.device)
    if isinstance(target, nn.Parameter):
        new = nn.Parameter(new, requires_grad=target.requires_grad)
    new.__dict__.update({name: kept for name, kept in target.__dict__.items() if name not in new.__dict__})
    torch.utils.swap_tensors(target, new)


def _empty_like(target: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not isinstance(target, DTensor):
        return torch.empty_like(target, device=device)
    return dtensor_like(torch.empty_like(target._local_tensor, device=_device_of(target)), target)
