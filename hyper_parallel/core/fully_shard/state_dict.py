"""Loading values of any layout into sharded parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from hyper_parallel.core.fully_shard.param import dtensor_like

__all__ = ["load_into"]


def load_into(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    load: Callable[[dict[str, Any]], Any],
    *,
    strict: bool,
    assign: bool,
) -> Any:
    """Bring every value into the layout of its parameter, then let torch's own ``load_state_dict`` do the rest."""
    if assign:
        warnings.warn(
            "load_state_dict(assign=True): sharded parameters keep their storage; values are copied", stacklevel=3
        )
    parameters = module.named_parameters(remove_duplicate=False)
    targets = {name: target for name, target in parameters if isinstance(target, DTensor)}
    for name, value in state_dict.items():  # all of them before the first one communicates
        if name in targets:
            _check_fits(name, value, targets[name])
    values = {name: _fit(value, targets[name]) if name in targets else value for name, value in state_dict.items()}
    outcome = load(values)
    missing, unexpected = sorted(outcome.missing_keys), sorted(outcome.unexpected_keys)
    if strict and (missing or unexpected):
        lines = [f"the state dict does not fit {type(module).__name__}"]
        if missing:
            lines.append(f"  missing: {', '.join(missing)}")
        if unexpected:
            lines.append(f"  unexpected: {', '.join(unexpected)}")
        lines.append("  try: strict=False to load the keys that fit")
        raise RuntimeError("\n".join(lines))
    return outcome


def _check_fits(name: str, value: Any, target: DTensor) -> None:
    shapes = (target.shape,) if isinstance(value, DTensor) else (target.shape, target._local_tensor.shape)
    if isinstance(value, torch.Tensor) and value.shape in shapes:
        return
    got = f"{type(value).__name__} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    raise ValueError(
        f"cannot load {name!r}: got a {got}\n"
        f"  global shape: {tuple(target.shape)}   this rank's part: {tuple(target._local_tensor.shape)}\n"
        "  try: a tensor of one of these two shapes, or a DTensor of the global shape"
    )


def _fit(value: torch.Tensor, target: DTensor) -> DTensor:
    """``value`` in the layout of ``target``."""
    if isinstance(value, DTensor):
        return _relayout(value, target)
    local = target._local_tensor
    if value.shape == local.shape:
        return dtensor_like(value.detach().to(local.device), target)
    return _cut(value, target)


def _relayout(value: DTensor, target: DTensor) -> DTensor:
    if value.device_mesh == target.device_mesh and value.placements == target.placements:
        return value
    if value.device_mesh == target.device_mesh:
        return value.redistribute(placements=target.placements)
    whole = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim).to_local()
    return _cut(whole, target)


def _cut(whole: torch.Tensor, target: DTensor) -> DTensor:
    """This rank's part of a tensor that every rank has whole; no communication."""
    return distribute_tensor(
        whole.detach().to(target._local_tensor.device), target.device_mesh, target.placements, src_data_rank=None
    )
