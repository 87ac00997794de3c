"""The state of an optimizer by parameter name, so that it can be loaded on any mesh and any pipeline stage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hyper_parallel.core.checkpoint.record import CheckpointMetadata, TensorEntry
from hyper_parallel.core.common.checks import check, list_modules
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.common.torch_compat import plain_name

_ASKED = "cannot name the state of an optimizer"


def model_tensors(model_parts: nn.Module | Iterable[nn.Module], prefix: str = "model.") -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name, sharing memory with the model: to save, or to be filled.

    >>> sorted(model_tensors(nn.Linear(2, 3)))
    ['model.bias', 'model.weight']

    Args:
        model_parts: a model, or the stages of it that this rank has.
        prefix: goes before each name.

    Raises:
    """
    from hyper_parallel.core.fully_shard.state_dict import get_model_state_dict

    found = {}
    for part in list_modules(model_parts):
        if not part.state_dict():  # a pipeline stage without a layer; torch refuses those
            continue
        for name, value in get_model_state_dict(part).items():
            if isinstance(value, torch.Tensor):
                found[prefix + name] = value
    return found


def optimizer_tensors(
    model_parts: nn.Module | Iterable[nn.Module], optimizer: Optimizer, prefix: str = "optimizer."
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Return the state as tensors by "optimizer.<parameter>.<state>", and the numbers of each group.

        tensors, groups = optimizer_tensors(model, optimizer)
        save_checkpoint(folder, {**model_tensors(model), **tensors}, {"optimizer": groups})

    >>> model = nn.Linear(2, 3, bias=False)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> optimizer_tensors(model, optimizer)[0]  # before the first step there is none
    {}
    >>> model(torch.ones(2)).sum().backward()
    >>> optimizer.step()
    >>> tensors, groups = optimizer_tensors(model, optimizer)
    >>> sorted(tensors), groups[0]["lr"]
    (['optimizer.weight.exp_avg', 'optimizer.weight.exp_avg_sq', 'optimizer.weight.step'], 0.1)

    Args:
        model_parts: a model, or the stages of it that this rank has.
        optimizer: of (some of) its parameters, with its state in tensors, as all of torch's but LBFGS have it.
        prefix: goes before each name.

    Raises:
        ValueError: a parameter that is not the model's, or state that is neither a tensor nor None.
    """
    check(_ASKED, "str", prefix=prefix)
    tensors = {}
    for name, param in _named(model_parts, optimizer):
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{prefix}{name}.{key}"] = value
            elif value is not None:
                asked = "cannot save the state of an optimizer"
                blame = f"{key!r} of {name!r} is a {type(value).__name__}, not a tensor"
                raise InvalidValue(asked, blame, f"{type(optimizer).__name__}: {value!r}"[:200], "a tensor")
    groups = [
        {key: _number(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return tensors, groups


def optimizer_targets(
    model_parts: nn.Module | Iterable[nn.Module],
    optimizer: Optimizer,
    metadata: CheckpointMetadata,
    prefix: str = "optimizer.",
) -> dict[str, torch.Tensor]:
    """Return the state of an optimizer to be filled; what a checkpoint has and the optimizer does not is made first.

        metadata = read_metadata(folder)
        tensors = {**model_tensors(model), **optimizer_targets(model, optimizer, metadata)}
        extra = load_checkpoint(folder, tensors)
        load_optimizer_scalars(optimizer, extra["optimizer"])

    State of its parameter's shape is sharded as the parameter is; other state is on every rank in full. Nothing is
    communicated.

    Args:
        model_parts: as for `optimizer_tensors`.
        optimizer: may have made steps or not.
        metadata: of the checkpoint.
        prefix: goes before each name.

    Raises:
        ValueError: as `optimizer_tensors`; or state that is larger than its parameter, which only the optimizer can
            make, by a step.
    """
    check(_ASKED, "str", prefix=prefix)
    saved: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in metadata.tensors.items():
        if name.startswith(prefix):
            owner, _, key = name[len(prefix) :].rpartition(".")
            saved.setdefault(owner, {})[key] = entry
    on_device = {
        id(param): bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for param in group["params"]
    }
    for name, param in _named(model_parts, optimizer):
        for key, entry in saved.get(name, {}).items():
            if optimizer.state[param].get(key) is None:
                _check_size(name, param, key, entry)
                optimizer.state[param][key] = _new_state(param, key, entry, on_device[id(param)])
    return optimizer_tensors(model_parts, optimizer, prefix)[0]


def load_optimizer_scalars(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Give the groups of an optimizer the numbers that `optimizer_tensors` returned.

    Raises:
        ValueError: it has another number of groups.
    """
    asked = "cannot load an optimizer"
    if len(groups) != len(optimizer.param_groups):
        blame = f"it has {len(optimizer.param_groups)} groups of parameters, and {len(groups)} were saved"
        seen = f"saved: {groups!r}"[:300]
        raise InvalidValue(asked, blame, seen, "the groups that were saved, in their order")
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def _check_size(name: str, param: torch.Tensor, key: str, entry: TensorEntry) -> None:
    """A record must not say how much memory is taken."""
    if math.prod(entry.shape) > max(param.numel(), 1):
        blame = f"{key!r} of {name!r} is larger than the parameter"
        seen = f"saved: {entry.shape}   parameter: {tuple(param.shape)}"
        hint = "the model that was saved, or a step of the optimizer first, which makes its state"
        raise InvalidValue("cannot load the state of an optimizer", blame, seen, hint)


def _new_state(param: torch.Tensor, key: str, entry: TensorEntry, on_device: bool) -> torch.Tensor:
    with torch.no_grad():
        if entry.shape == tuple(param.shape) and key != "step":
            return torch.zeros_like(param, dtype=entry.dtype, requires_grad=False)
        # As torch's optimizers place it: the number of steps on the host, unless it is counted where the parameter is.
        device = torch.device("cpu") if key == "step" and not on_device else param.device
        return torch.zeros(entry.shape, dtype=entry.dtype, device=device)


def _named(model_parts: nn.Module | Iterable[nn.Module], optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of an optimizer with their names, in the order of its groups.

    Not those of which this rank has nothing: it takes no steps of them, so that its number of steps is an old one.
    """
    names: dict[int, str] = {}
    for part in list_modules(model_parts):
        for name, param in part.named_parameters():
            names.setdefault(id(param), plain_name(name))
    for number, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            if id(param) not in names:
                blame = f"parameter {place} of its group {number} is in none of the modules"
                seen = f"it is {tuple(param.shape)}; the modules have {len(names)} parameters"
                hint = "the modules it was made for, after they were sharded"
                raise InvalidValue(_ASKED, blame, seen, hint)
            if not isinstance(param, DTensor) or param.device_mesh.get_coordinate() is not None:
                yield names[id(param)], param


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
