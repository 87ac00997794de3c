"""``fully_shard``: split a module's parameters over a mesh, gather them around its forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from hyper_parallel.core.fully_shard.bucket import Bucket
from hyper_parallel.core.fully_shard.mesh import DataParallelMesh, resolve_mesh
from hyper_parallel.core.fully_shard.module import HSDPModule, show_shards_in_state_dicts, wrapped_class
from hyper_parallel.core.fully_shard.param import ShardedParam, Slot
from hyper_parallel.core.fully_shard.policy import MixedPrecisionPolicy
from hyper_parallel.core.fully_shard.unit import Unit, unit_of

__all__ = ["HSDPModule", "MixedPrecisionPolicy", "fully_shard"]

T = TypeVar("T", bound="nn.Module | Sequence[nn.Module]")


def fully_shard(
    module: T,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> T:
    """Split the parameters of ``module`` over a mesh; returns what was passed in, changed in place.

    Wrap inner modules first, then the whole model: each call makes one *unit*, whose parameters are gathered
    together before its forward and backward and freed after it. Parameters become DTensors, split along dim 0.

    ::

        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    A unit may be called in any way and return containers or dataclasses of tensors; every rank must run the same
    units in the same order.

    With each rank's loss a mean over its own equal-sized batch, gradients are those of the mean over the global
    batch.

    Communication per step and unit of N bytes on n ranks: two all_gathers (one with
    ``reshard_after_forward=False``, and one for the root, whose parameters backward needs first) and one
    reduce_scatter, each N (n - 1) / n received per rank; on a 2-D mesh also one all_reduce of N / n over the
    replicate axis.

    Args:
        module: A module, or a list of modules that form one unit. Nested units keep their own parameters.
        mesh: 1-D: shard over it. 2-D: the first axis replicates, the second shards. None: shard over all ranks.
        reshard_after_forward: Free the whole parameters after forward. False: keep them until backward is done.
        mp_policy: Dtypes of gather, computation and reduction.
        ignored_params: Parameters to leave alone: not split, not moved, not reduced.

    Raises:
        ValueError: ``module`` is no module, is wrapped already, or shares a parameter with another unit; an
            argument of the wrong kind; a mesh with other than one or two axes; a parameter that cannot be split.
    """
    modules = _modules(module)
    if not isinstance(reshard_after_forward, bool):
        raise ValueError(
            f"fully_shard cannot use {reshard_after_forward!r} as reshard_after_forward\n"
            "  expected: True or False\n"
            "  try: reshard_after_forward=True"
        )
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise ValueError(
            f"fully_shard cannot use {mp_policy!r} as mp_policy\n"
            "  expected: a MixedPrecisionPolicy\n"
            "  try: mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        )
    ignored = _ignored(ignored_params)
    found = _find_parameters(modules, ignored)
    data_mesh = resolve_mesh(mesh, {whole.device.type for whole, _, _ in found})
    _move_buffers(modules, data_mesh)
    unit = Unit(modules, _make_buckets(found, data_mesh, mp_policy), data_mesh, mp_policy, reshard_after_forward)
    for root in modules:
        root.__dict__["_hyper_parallel_unit"] = unit
        object.__setattr__(root, "__class__", wrapped_class(type(root)))  # type: ignore[arg-type]
    for owner in dict.fromkeys(slot.module for _, _, slots in found for slot in slots):
        show_shards_in_state_dicts(unit, owner)
    return module


def _modules(module: Any) -> list[nn.Module]:
    """Check the first argument; of a list, keep the modules that no other one contains."""
    given = list(module) if isinstance(module, (list, tuple)) else [module]
    if not given:
        raise ValueError("fully_shard got an empty list\n  expected: at least one module\n  try: fully_shard(model)")
    for index, item in enumerate(given):
        if not isinstance(item, nn.Module):
            where = f"item {index} of the list" if isinstance(module, (list, tuple)) else "its argument"
            raise ValueError(
                f"fully_shard takes modules, but {where} is a {type(item).__name__}: {item!r}\n"
                "  try: fully_shard(model)"
            )
    roots = [item for item in given if not any(item is not other and item in list(other.modules()) for other in given)]
    roots = list(dict.fromkeys(roots))
    for root in roots:
        if unit_of(root) is not None:
            raise ValueError(
                f"{type(root).__name__} is wrapped already\n"
                "  seen: a second fully_shard of the same module\n"
                "  try: wrap each module once, inner modules first"
            )
        if getattr(root.forward, "__func__", None) is nn.Module.forward:
            raise ValueError(
                f"{type(root).__name__} has no forward of its own, before which its parameters could be gathered\n"
                "  seen: a container, whose modules are called one by one\n"
                "  try: fully_shard each module in it, or the module that contains it"
            )
    return roots


def _ignored(params: Iterable[nn.Parameter] | None) -> set[int]:
    chosen = list(params) if params is not None else []
    for item in chosen:
        if not isinstance(item, nn.Parameter):
            raise ValueError(
                f"fully_shard cannot ignore a {type(item).__name__}\n"
                "  expected: ignored_params of nn.Parameter\n"
                "  try: ignored_params=[model.scale]"
            )
    return {id(item) for item in chosen}


def _find_parameters(modules: list[nn.Module], ignored: set[int]) -> list[tuple[nn.Parameter, str, list[Slot]]]:
    """The parameters of this unit with their names and places, tied ones once; nested units' are left out."""
    found: dict[int, tuple[nn.Parameter, str, list[Slot]]] = {}
    seen: set[nn.Module] = set()
    for root in modules:
        for path, owner in _own_modules(root, "", seen):
            for name, parameter in owner._parameters.items():
                if parameter is None or id(parameter) in ignored:
                    continue
                full_name = f"{path}{name}"
                _check_parameter(parameter, full_name)
                found.setdefault(id(parameter), (parameter, full_name, []))[2].append(Slot(owner, name))
    _check_data([(whole, name) for whole, name, _ in found.values()])
    return list(found.values())


def _own_modules(module: nn.Module, prefix: str, seen: set[nn.Module]) -> Iterable[tuple[str, nn.Module]]:
    if module in seen:
        return
    seen.add(module)
    yield prefix, module
    for name, child in module.named_children():
        if unit_of(child) is None:
            yield from _own_modules(child, f"{prefix}{name}.", seen)


def _check_data(parameters: list[tuple[nn.Parameter, str]]) -> None:
    on_meta = [name for parameter, name in parameters if parameter.is_meta]
    if on_meta and len(on_meta) < len(parameters):
        raise ValueError(
            f"some parameters of the unit are on the meta device, others have data\n"
            f"  on meta: {', '.join(on_meta)}\n"
            "  try: make the whole module on meta, or none of it; or pass the former in ignored_params"
        )


def _check_parameter(parameter: nn.Parameter, name: str) -> None:
    owner = getattr(parameter, "_hyper_parallel_unit_name", None)
    if owner is not None:
        raise ValueError(
            f"parameter {name!r} is the same as {owner!r}, which another unit already manages\n"
            "  seen: one tensor in two units, whose gradients would drift apart\n"
            "  try: wrap both modules as one unit, fully_shard([a, b]), or only the module that contains both"
        )
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"parameter {name!r} is a DTensor already\n"
            f"  seen: placements {parameter.placements} on {parameter.device_mesh}\n"
            "  try: fully_shard plain parameters, or pass it in ignored_params"
        )
    if is_lazy(parameter):
        raise ValueError(
            f"parameter {name!r} has no shape yet\n"
            "  seen: a lazy module that has not run\n"
            "  try: run it once, on any rank's input, before fully_shard"
        )
    if parameter.dim() == 0:
        raise ValueError(
            f"parameter {name!r} is a scalar, which has no dim to split\n"
            "  seen: shape ()\n"
            "  try: make it a tensor of shape (1,), or pass it in ignored_params"
        )


def _make_buckets(
    found: list[tuple[nn.Parameter, str, list[Slot]]], mesh: DataParallelMesh, mp_policy: MixedPrecisionPolicy
) -> list[Bucket]:
    """One bucket per dtype, in the order of first use."""
    by_dtype: dict[torch.dtype, list[tuple[nn.Parameter, str, list[Slot]]]] = {}
    for entry in found:
        by_dtype.setdefault(entry[0].dtype, []).append(entry)
    buckets = []
    for entries in by_dtype.values():
        for whole, name, _ in entries:
            whole._hyper_parallel_unit_name = name  # type: ignore[attr-defined]
        params = [ShardedParam(name, slots, whole, mesh) for whole, name, slots in entries]
        bucket = Bucket(params, [whole for whole, _, _ in entries], mesh, mp_policy.param_dtype)
        bucket.show_shards()
        buckets.append(bucket)
    return buckets


def _move_buffers(modules: list[nn.Module], mesh: DataParallelMesh) -> None:
    device = mesh.platform.device()
    seen: set[nn.Module] = set()
    moved: dict[int, torch.Tensor] = {}  # one that several modules hold stays one
    for root in modules:
        for _, owner in _own_modules(root, "", seen):
            for name, buffer in owner._buffers.items():
                if buffer is not None and buffer.device.type not in ("meta", device.type):
                    if id(buffer) not in moved:
                        moved[id(buffer)] = buffer.to(device)
                    owner._buffers[name] = moved[id(buffer)]
