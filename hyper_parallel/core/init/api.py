"""`init_parameters`: the call that fills a model shard by shard, with the same global values on every mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from hyper_parallel.core.common.checks import read_int
from hyper_parallel.core.common.errors import InvalidValue, class_name
from hyper_parallel.core.common.torch_compat import forget_empty, is_empty, plain_name
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.init.filling import DefaultsToCpu, Filling
from hyper_parallel.core.init.tiles import FillTarget, Region, flush
from hyper_parallel.platform import get_platform

__all__ = ["init_parameters"]

_ASKED = "cannot initialise the model"

M = TypeVar("M", bound=nn.Module)


def init_parameters(
    model: M, seed: int = 0, *, device: Any = None, init_fn: Callable[[nn.Module], Any] | None = None
) -> M:
    """Fill the parameters and buffers of a model from `seed`, in place; what is on meta gets memory first.

    >>> with torch.device("meta"):
    ...     model = nn.Linear(4, 2)
    >>> model = init_parameters(model, seed=1)
    >>> bool((model.weight.abs() <= 0.5).all())  # nn.Linear's own bound, 1 / sqrt(4)
    True

    A DTensor is filled with this rank's slice of values that depend on the seed, on the parameter's name and on the
    place in the full tensor only: bit-identical for any mesh, any layout and any number of ranks, and for a model that
    is not sharded. Nothing is communicated. torch's generators are neither read nor moved.

    What is drawn is up to the modules: `reset_parameters()` runs for each module that has it, children before their
    parents, so that a parent can override. What fills a parameter by `normal_`, `uniform_`, `trunc_normal_` and all of
    `torch.nn.init` that is made of them, by constants and by element-wise operations with numbers costs time and memory
    for this rank's shard only. For what else is done to a parameter (`orthogonal_`, a norm, indexing) it is unsharded
    on the CPU of each rank, one module at a time; so it is where all values are copied from a plain tensor, the same on
    all ranks. A DTensor may be copied that lies as the parameter does, or is replicated. A parameter under several
    names is filled once, by the module that has it first.

    Several threads draw, as many as the process has CPUs; `LOCAL_WORLD_SIZE` processes, as torchrun has them, share
    those of a machine. Their number changes no bit. What goes to a device passes through a few MB of the host.

    Under torch's FakeTensorMode, where no tensor has values, this fills nothing.

    Args:
        model: whose parameters may be on meta, DTensors or both; those that have values get new ones, in their place.
        seed: 0 or more.
        device: where to put what is on meta. Default: the device of the DTensors' mesh; without DTensors, "cpu". "cpu"
            also for shards that stay on the host.
        init_fn: called with each module, instead of `reset_parameters()`; for a Hugging Face model,
            `init_fn=model._init_weights`.

    Returns:
        The model. Parameters stay the same objects, with the same `requires_grad`.

    Raises:
        TypeError: seed is no int.
        ValueError: a negative seed; a device that cannot be; a lazy parameter, or one with a reduction pending; a
            parameter or buffer that was on meta and that nothing fills, also where `to_empty` of a wrapped module has
            given it memory since; an operation that needs values of other ranks, of a parameter that already had values
            or was unsharded for a child, or of a DTensor that is copied.
    """
    read_int(_ASKED, "seed", seed, 0, most=math.inf)
    if detect_fake_mode() is not None:
        return model  # tensors have no values here
    where = _device(model, device)
    targets = _targets(model, int(seed))
    with torch.inference_mode(False), torch.no_grad():
        for target in targets:
            if target.tensor.is_meta:
                _materialise(model, target, where)
            elif is_empty(target.tensor):
                _poison(target.local)
            forget_empty(target.tensor)
        filling = Filling(int(seed), targets)
        with DefaultsToCpu(filling), torch.random.fork_rng(devices=[]):
            _fill(model, filling, targets, init_fn)
        flush(targets)
    _check_filled(model, targets, init_fn)
    return model


def _fill(model: nn.Module, mode: Filling, targets: Sequence[FillTarget], init_fn: Any) -> None:
    """Let each module fill its tensors; what is done to all of their elements alike is only noted."""
    owners = _owners(model)
    shared = [target for target in targets if len(owners[id(target.tensor)]) > 1]
    for path, module in _children_first(model, "", set()):
        fill = _filler(module, init_fn)
        if fill is None:
            continue
        for target in shared:
            target.locked = _is_elsewhere(owners[id(target.tensor)], path)
        mode.fill(fill, plain_name(path), class_name(module))


def _filler(module: nn.Module, init_fn: Callable[[nn.Module], Any] | None) -> Callable[[], Any] | None:
    if init_fn is not None:
        return lambda: init_fn(module)
    for name in ("reset_parameters", "_reset_parameters"):  # the second: nn.MultiheadAttention, nn.Transformer
        # Not getattr(module, ...): wrappers hand on what they lack to the module inside, which has its own turn.
        if callable(getattr(type(module), name, None)) or name in module.__dict__:
            return getattr(module, name)
    return None


def _children_first(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name, seen)
    yield path, module


# -- parameters and buffers --------------------------------------------------------------------------------------------


def _tensors(model: nn.Module, *, all_names: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=not all_names)
    yield from model.named_buffers(remove_duplicate=not all_names)


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """The paths of the modules that have a tensor, by its id, in order."""
    found: dict[int, list[str]] = {}
    for name, tensor in _tensors(model, all_names=True):
        found.setdefault(id(tensor), []).append(name.rpartition(".")[0])
    return found


def _is_elsewhere(owners: list[str], path: str) -> bool:
    """Whether a tensor is in a module, but was in another one before."""

    def inside(owner: str) -> bool:
        return not path or owner == path or owner.startswith(f"{path}.")

    return not inside(owners[0]) and any(map(inside, owners))


def _targets(model: nn.Module, seed: int) -> list[FillTarget]:
    """What is to be filled; raises before anything is changed."""
    for path, module in model.named_modules():
        unit = module.__dict__.get("_hyper_parallel_unit")
        if unit is not None and not unit.is_resharded():
            blame = f"{path or 'the model'} shows unsharded parameters, which are freed or gathered again later"
            raise InvalidValue(_ASKED, blame, f"seen: {class_name(module)}, unsharded", "reshard() first")
    targets, outside = [], _outside_of_state_dicts(model)
    for name, tensor in _tensors(model):
        if is_lazy(tensor):
            hint = "one forward pass with an input of the right size first, or sizes instead of a Lazy module"
            raise InvalidValue(_ASKED, f"{name!r} has no shape yet", f"seen: {type(tensor).__name__}", hint)
        region, sharded = _region(name, tensor)
        # What is in no state dict has to be filled here, or assigned: no checkpoint can have written to it.
        fresh = tensor.is_meta or is_empty(tensor, may_be_written=name in outside)
        targets.append(FillTarget(plain_name(name), tensor, region, seed, sharded, fresh=fresh))
    return targets


def _outside_of_state_dicts(model: nn.Module) -> set[str]:
    """The names of buffers that no state dict has."""
    modules = model.named_modules()
    return {f"{path}.{name}".lstrip(".") for path, module in modules for name in module._non_persistent_buffers_set}


def _region(name: str, tensor: torch.Tensor) -> tuple[Region, bool]:
    """The elements of a tensor that this rank holds, and whether it is sharded."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape), False
    layout = Layout.of(tensor)
    if layout.is_partial():
        hint = "redistribute(parameter, layout.reset_partial()), or a layout without a reduction"
        blame = f"{name!r} has a reduction pending, so no rank holds values of it"
        raise InvalidValue(_ASKED, blame, f"layout: {layout}", hint)
    sharded = any(layout.mesh_shape[axis] > 1 for axes in layout.splits(tensor.ndim) for axis in axes)
    if tensor.device_mesh.get_coordinate() is None:  # this rank holds nothing of it
        return tuple(slice(0, 0) for _ in tensor.shape), sharded
    region = layout.local_slice(tuple(tensor.shape))
    size = tuple(part.stop - part.start for part in region)
    if size != tuple(tensor._local_tensor.shape):
        seen = f"shard: {tuple(tensor._local_tensor.shape)}   of: {tuple(tensor.shape)}   layout: {layout}"
        blame = f"this rank's shard of {name!r} has another shape than its layout says, {size}"
        raise InvalidValue(_ASKED, blame, seen, "distribute_tensor, or from_local with the global shape")
    return region, sharded


def _materialise(model: nn.Module, target: FillTarget, device: torch.device) -> None:
    """Give a tensor memory, full of NaN; whoever refers to it sees the new one."""
    old = target.tensor
    fresh = torch.empty_like(target.local, device=device)
    _poison(fresh)
    if isinstance(old, DTensor):
        fresh = DTensor.__new__(DTensor, fresh, old._spec, requires_grad=False)
    if isinstance(old, nn.Parameter):
        fresh = nn.Parameter(fresh, requires_grad=old.requires_grad)
    fresh.__dict__.update({name: kept for name, kept in old.__dict__.items() if name not in fresh.__dict__})
    try:
        torch.utils.swap_tensors(old, fresh)
    except RuntimeError:  # a weak reference to it, which torch does not let it leave
        for module in model.modules():
            registered: Any
            for registered in (module._parameters, module._buffers):
                registered.update({name: fresh for name, tensor in registered.items() if tensor is old})
        target.tensor = fresh


def _poison(local: torch.Tensor) -> None:
    local.fill_(float("nan") if local.is_floating_point() or local.is_complex() else 0)


# -- checks ------------------------------------------------------------------------------------------------------------


def _device(model: nn.Module, device: Any) -> torch.device:
    """Where new memory goes."""
    kinds = [tensor.device_mesh.device_type for _, tensor in _tensors(model) if isinstance(tensor, DTensor)]
    if device is None:
        return get_platform(kinds[0]).device() if kinds else torch.device("cpu")
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidValue(_ASKED, f"device: {error}", f"device: {device!r}", 'device="cpu"') from None
    hint = 'device=None, or device="cpu"'
    if target.type == "meta":
        raise InvalidValue(_ASKED, "nothing on meta has values", f"device: {device!r}", hint)
    for kind in kinds:
        if target.type not in (kind, "cpu"):
            blame = f"its DTensors are on a mesh of another device type, {kind!r}"
            raise InvalidValue(_ASKED, blame, f"device: {device!r}", f'device=None, or device="{kind}"')
    return target


def _check_filled(model: nn.Module, targets: list[FillTarget], init_fn: Any) -> None:
    """Refuse a model with garbage in it."""
    kept = {id(tensor) for _, tensor in _tensors(model)}
    for target in targets:
        if isinstance(target.tensor, nn.Parameter) and id(target.tensor) not in kept:
            seen = f"seen: {target.name!r} of shape {tuple(target.tensor.shape)}"
            hint = "write into the parameter, as copy_ does"
            raise InvalidValue(_ASKED, f"{target.name!r} was replaced by another parameter", seen, hint)
    fresh = [target for target in targets if target.fresh and id(target.tensor) in kept]  # buffers may be replaced
    bare = [target for target in fresh if not target.filled] or [one for one in fresh if _has_nan(one.local)]
    if not bare:
        return
    modules = {plain_name(path): module for path, module in model.named_modules()}
    rows = []
    for target in bare:
        owner = target.name.rpartition(".")[0]
        kind = "parameter" if isinstance(target.tensor, nn.Parameter) else "buffer"
        rows.append(f"{kind} {target.name!r} of {class_name(modules[owner])}" if owner in modules else target.name)
    shown = ", ".join(rows[:8]) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
    blame = "nothing fills what was on meta" if init_fn is None else "init_fn leaves out what was on meta"
    hint = "a reset_parameters() there that fills all of it" + (", or init_fn=..." if init_fn is None else "")
    raise InvalidValue(_ASKED, blame, f"not filled: {shown}", hint)


def _has_nan(local: torch.Tensor) -> bool:
    if not (local.is_floating_point() or local.is_complex()):
        return False
    if local.dtype.itemsize > 1 and not local.sum().isnan():  # one pass; a sum may overflow, but hides no NaN
        return False
    return bool(local.isnan().any())
