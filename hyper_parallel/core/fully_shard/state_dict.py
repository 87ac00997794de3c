"""State dicts of sharded models: values of any layout go in, shards or full tensors come out.

Loading lets torch walk through the modules. Just before a module takes its values, a hook brings each of them into the
layout of its parameter. So a module's own hooks and overrides see what the caller gave, and no more than one module's
values are in memory twice.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from hyper_parallel.core.common.errors import InvalidState, InvalidValue, class_name

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import distribute_tensor as distribute_by_torch
from torch.nn.parameter import is_lazy

from hyper_parallel.core.dtensor.convert import on_mesh_device
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.fully_shard.param import dtensor_like
from hyper_parallel.core.fully_shard.unit import is_wrapped, nested_units
from hyper_parallel.core.redistribute import full_tensor, redistribute
from hyper_parallel.platform import get_platform

CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."  # torch's activation checkpointing leaves it out of its keys


COMPILED_PREFIX = "_orig_mod."  # its get_model_state_dict leaves out this one, its state_dict does not


OWN_HOOKS = ("torch.", "hyper_parallel.")


# -- out -------------------------------------------------------------------------------------------------------------


def get_model_state_dict(model: nn.Module, *, options: StateDictOptions | None = None) -> dict[str, Any]:
    """Return the values of a model by full name, sharded or full; all ranks of its meshes call it.

        shards = get_model_state_dict(model)  # DTensors, for torch.distributed.checkpoint
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if torch.distributed.get_rank() == 0:
            torch.save(full, "model.pt")

    Keys are those of torch's `get_model_state_dict`, and of `state_dict()` of the model before it was wrapped. What
    is gathered at the moment is resharded first. Values are detached; those that were neither gathered nor copied to
    the host share memory with the model, as in `state_dict()`, so save or clone them before the next step.

    Communication: none for shards. With `full_state_dict` one parameter after the other is gathered over the axes that
    split it: beside the result, one gathered parameter at a time is in memory, and the buffers it was gathered in.

    Args:
        model: Wrapped, or with wrapped modules in it, or neither.
        options: torch's `StateDictOptions`; None: all at their defaults. `full_state_dict`: plain, full tensors.
            `cpu_offload`: on the host; together with `full_state_dict`, on rank 0 alone, the dict of the others is
            empty. `ignore_frozen_params`: without parameters that require no gradient, under any of their names.
            `strict=False` lets a model have no values. The others are for loading, submodules and optimizers, and do
            nothing here.

    Raises:
        ValueError: `broadcast_from_rank0` without `full_state_dict`.
        RuntimeError: The model has no values, and `strict`.
    """
    from torch.distributed.checkpoint import state_dict as torchs  # costs time to import, so only where it is used

    options = torchs.StateDictOptions() if options is None else options
    asked = "get_model_state_dict cannot read a model"
    if options.broadcast_from_rank0 and not options.full_state_dict:
        blame = "broadcast_from_rank0=True is for full tensors, and full_state_dict is False"
        raise InvalidValue(asked, blame, f"options: {options}", "full_state_dict=True beside it")
    for unit in nested_units(model):
        unit.reshard()  # torch reads what modules show, which after an `unshard()` are no shards
    sharded_only = replace(options, full_state_dict=False, cpu_offload=False, broadcast_from_rank0=False)
    sharded: dict[str, Any] = torchs.get_model_state_dict(model, options=sharded_only)
    if options.ignore_frozen_params:
        _drop_frozen_aliases(model, sharded)
    if not (options.full_state_dict or options.cpu_offload):
        return sharded
    keeps = not (options.full_state_dict and options.cpu_offload) or _rank() == 0

    def one(value: torch.Tensor) -> torch.Tensor | None:
        value = whole_of(value) if options.full_state_dict and isinstance(value, DTensor) else value
        if not keeps:
            return None  # this rank was needed to gather it
        return value.to("cpu") if options.cpu_offload and not value.is_meta else value

    result: dict[str, Any] = {}
    with torch.no_grad():
        for name, value in sharded.items():
            given = tree_map_only(torch.Tensor, one, value)  # extra state may hold tensors anywhere
            if keeps:
                result[name] = given
    return result


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _drop_frozen_aliases(model: nn.Module, values: dict[str, Any]) -> None:
    """torch leaves out a frozen parameter under the first of its names only."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            values.pop(name.replace(CHECKPOINT_PREFIX, "").replace(COMPILED_PREFIX, ""), None)


# -- in --------------------------------------------------------------------------------------------------------------


def load_state_dict(model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
    """Load values of any layout into a model that has sharded parameters anywhere; it need not be wrapped itself.

        load_state_dict(model, torch.load("model.pt", weights_only=True))

    A wrapped model's own `load_state_dict` does the same; that of a module that only contains wrapped ones is torch's
    and takes DTensors of exactly the parameters' layouts.

    A value is a DTensor of any layout on any mesh, or a plain tensor of the global shape or of this rank's shard; where
    one rank has all of a parameter, the two are one. Each rank checks its own values. Dtypes and devices are those of
    the model. Values that are DTensors in other layouts are communicated, one parameter after the other, as
    `redistribute` does; between slices of a larger mesh, each slice gathers its own.

    Args:
        model: A module.
        state_dict: Values by full name; it is not changed.
        strict: Raise for missing and for unexpected keys, once the others are loaded.
        assign: Sharded parameters keep their storage: this warns and copies. Parameters and buffers that are on the
            meta device get memory, on the device of their mesh or, if they have none, of the value.

    Returns:
        torch's `missing_keys` and `unexpected_keys`.

    Raises:
        ValueError: A value of another shape, or no tensor; found for all keys before anything is sent or copied, but
            for those of modules that convert what they load (by an override of `_load_from_state_dict` or by a hook).
        RuntimeError: `strict` and keys are missing or unexpected; both are listed, sorted.
        TypeError: `state_dict` is no mapping.
    """
    if is_wrapped(model):  # its class has a method of its own
        return model.load_state_dict(state_dict, strict=strict, assign=assign)
    for unit in nested_units(model):
        unit.reshard()

    def load(values: Mapping[str, Any]) -> Any:
        return model.load_state_dict(values, strict=False)

    return load_into(model, state_dict, load, strict=strict, assign=assign)


def load_into(module: nn.Module, state_dict: Any, load: Callable[[Any], Any], *, strict: bool, assign: bool) -> Any:
    """Check all values, then have `load`, torch's own `load_state_dict` without `strict`, walk the modules."""
    asked = "load_state_dict cannot read its argument"
    if assign:
        warnings.warn(
            "load_state_dict(assign=True): sharded parameters keep their storage; values are copied", stacklevel=3
        )
    state_dict = _under_own_names(module, state_dict)
    # All before the first is brought into its layout, for which ranks communicate: one that raised half way would leave
    # the others waiting, and the model with some values of each.
    _check_all(module, state_dict)

    # Hooks, called as torch walks the modules, instead of a second state dict: one converted value at a time is alive.
    def bring_into_layout(owner: nn.Module, values: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, target in _tensors_of(owner):
            key = prefix + name
            if key in values:
                if assign:
                    give_memory(target, values[key])
                values[key] = fit(key, values[key], target)

    hooks = [owner.register_load_state_dict_pre_hook(bring_into_layout) for owner in module.modules()]
    try:
        outcome = load(state_dict)
    finally:
        for hook in hooks:
            hook.remove()
    missing, unexpected = sorted(outcome.missing_keys), sorted(outcome.unexpected_keys)
    if strict and (missing or unexpected):
        kinds = (("Missing", missing), ("Unexpected", unexpected))  # in torch's words, which callers look for
        seen = [f"{kind} key(s) in state_dict: {_quoted(keys)}. " for kind, keys in kinds if keys]
        asked, blame = f"cannot load all of {class_name(module)}", "the keys are not those of the module"
        raise InvalidState(asked, blame, "\n  ".join(seen), "strict=False to load the keys that fit")
    return outcome


def _quoted(keys: list[str]) -> str:
    return ", ".join(f'"{key}"' for key in keys)


def _under_own_names(module: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same values; what compiled modules load has their names also where it was saved under the usual ones."""
    paths = [path for path, _ in module.named_modules(remove_duplicate=False)]
    own = {path.replace(COMPILED_PREFIX, ""): path for path in (f"{p}." for p in paths) if COMPILED_PREFIX in path}
    if not own:
        return state_dict
    renamed: OrderedDict[str, Any] = OrderedDict()
    for key, value in state_dict.items():
        path, dot, name = key.rpartition(".")
        renamed[own.get(path + dot, path + dot) + name] = value
    if hasattr(state_dict, "_metadata"):
        renamed._metadata = state_dict._metadata  # type: ignore[attr-defined]
    return renamed


def _tensors_of(owner: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a module itself saves: its parameters and persistent buffers."""
    for name, parameter in owner._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in owner._buffers.items():
        if buffer is not None and name not in owner._non_persistent_buffers_set:
            yield name, buffer


def _check_all(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    wrong = []
    for key, target in _targets(module):
        if key not in state_dict:
            key = key.replace(CHECKPOINT_PREFIX, "")
        if key in state_dict and not fits(state_dict[key], target):
            wrong.append((key, target))
    if wrong:
        key, target = wrong[0]
        others = ", ".join(repr(name) for name, _ in wrong[1:])
        raise misfit(key, state_dict[key], target, others)


def _targets(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that loads as it is, with its name; not what is in modules that convert values first."""
    hooks = [*module._load_state_dict_pre_hooks.values(), type(module)._load_from_state_dict]
    if not all(getattr(hook, "__module__", "").startswith(OWN_HOOKS) for hook in hooks):
        return
    for name, target in _tensors_of(module):
        yield prefix + name, target
    for name, child in module._modules.items():
        if child is not None:
            yield from _targets(child, f"{prefix}{name}.")


def fits(value: Any, target: torch.Tensor) -> bool:
    """Whether `value` has a shape that `target` can be loaded from, and data."""
    if is_lazy(target):
        return True  # it takes any shape
    if not isinstance(value, torch.Tensor) or (_has_no_data(value) and not _has_no_data(target)):
        return False
    if isinstance(target, DTensor) and value.layout != torch.strided:
        return False  # shards of it are no views
    if target.dim() == 0 and value.shape == (1,):
        return True  # what torch has always accepted
    if value.shape == target.shape:
        return True
    return isinstance(target, DTensor) and not isinstance(value, DTensor) and value.shape == target._local_tensor.shape


def misfit(key: str, value: Any, target: torch.Tensor, others: str = "") -> ValueError:
    """The error for a value that does not fit; `others`: the names of more."""
    got = f"{type(value).__name__} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        got += f", {value.layout}"
    elif isinstance(value, torch.Tensor) and _has_no_data(value):
        got += " on the meta device"
    local = target._local_tensor if isinstance(target, DTensor) else target
    seen = f"global shape: {tuple(target.shape)}   this rank's shard: {tuple(local.shape)}"
    seen += f"\n  likewise: {others}" if others else ""
    hint = "a dense tensor of one of these two shapes, or a DTensor of the global shape, with data"
    return InvalidValue(f"cannot load {key!r}", f"got a {got}", seen, hint)


def _has_no_data(tensor: torch.Tensor) -> bool:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).is_meta


@torch.no_grad()
def fit(key: str, value: Any, target: torch.Tensor) -> Any:
    """`value` in the layout of `target`, for torch to copy, which sees to dtypes and devices."""
    if is_lazy(target):
        return value
    if not fits(value, target):
        raise misfit(key, value, target)
    if target.dim() == 0 and value.dim() == 1:
        value = (whole_of(value) if isinstance(value, DTensor) else value)[0]
    if not isinstance(target, DTensor):
        return whole_of(value) if isinstance(value, DTensor) else value
    if not isinstance(value, DTensor) and target.device_mesh.get_coordinate() is None:
        return _detached(target)  # this rank has nothing of it
    return dtensor_like(_shard_of(_detached(value), target), target)


def _detached(value: torch.Tensor) -> torch.Tensor:
    """`value` without autograd; torch's own `detach` of a DTensor puts what a rank off its mesh has on the host."""
    return dtensor_like(value._local_tensor.detach(), value) if isinstance(value, DTensor) else value.detach()


def _shard_of(value: torch.Tensor, target: DTensor) -> torch.Tensor:
    """This rank's shard of `value`; communicates only for a DTensor that is laid out otherwise."""
    own = target._local_tensor
    if not isinstance(value, DTensor):
        # Also right where the two shapes are the same: then this rank holds the unsharded parameter.
        return value if value.shape == own.shape else _cut(value, target)
    if value.device_mesh == target.device_mesh and value._spec.placements == target._spec.placements:
        return value._local_tensor
    if value._local_tensor.is_meta:
        return torch.empty_like(own, device="meta")
    try:
        return redistribute(_on_its_mesh(value), Layout.of(target)).to_local()
    except ValueError:  # raised before anything is sent, on all ranks: between slices of a mesh, for one
        return _cut(whole_of(value), target).clone()  # a view would keep all of it


def _cut(full: torch.Tensor, target: DTensor) -> torch.Tensor:
    """This rank's shard of a full tensor: a view."""
    try:
        rows = Layout.of(target).local_slice(target.shape)
    except ValueError:  # strided shards, of which no layout speaks
        return distribute_by_torch(full, target.device_mesh, target.placements, src_data_rank=None).to_local()
    return full[rows]


def whole_of(value: DTensor) -> torch.Tensor:
    """All of `value`, on every rank of its mesh."""
    if value._local_tensor.is_meta and _device_of(value).type != "meta":
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    with torch.no_grad():
        return full_tensor(_on_its_mesh(value))


def _on_its_mesh(value: DTensor) -> DTensor:
    """`value` where its mesh can send it: shards may have been kept on the host."""
    return dtensor_like(on_mesh_device(value._local_tensor, value.device_mesh), value)


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
