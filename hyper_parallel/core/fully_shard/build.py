"""From modules and the homes of their parameters to a unit: find, check, bucket, take over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from hyper_parallel.core.fully_shard.arguments import check_parameter, check_same_data, together
from hyper_parallel.core.fully_shard.bucket import Bucket, Storage, computed_in
from hyper_parallel.core.fully_shard.extension import ExtensionBucket
from hyper_parallel.core.fully_shard.fsdp2 import register_state
from hyper_parallel.core.fully_shard.mesh import DataParallelMesh, Home
from hyper_parallel.core.fully_shard.module import show_shards_in_state_dicts
from hyper_parallel.core.fully_shard.param import ManagedParam, Slot, has_extension
from hyper_parallel.core.fully_shard.reduce import GradientReducer
from hyper_parallel.core.fully_shard.unit import Unit, UnitOptions, is_wrapped, unit_of
from hyper_parallel.platform import Platform

__all__ = ["Found", "Grouping", "find_parameters", "install", "make_unit", "move_buffers", "refuse_gradients"]


@dataclass(frozen=True)
class Found:
    """A parameter to be managed.

    Attributes:
        parameter: As the module has it now.
        name: Its full name in the module that is wrapped.
        slots: Where it is registered; tied weights have several places.
    """

    parameter: nn.Parameter
    name: str
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Grouping:
    """Which parameters communicate together.

    Attributes:
        reduce_bytes: Gradients are reduced in buffers of at most so many bytes; -1: one buffer; 0: one each.
        whole_gradients: Reduce whole gradients on every rank, and take the own part of the result.
    """

    reduce_bytes: int = -1
    whole_gradients: bool = False


def find_parameters(roots: list[nn.Module], ignored: set[int], face: str) -> list[Found]:
    """The parameters of this unit with their names and places, tied ones once; nested units' are left out.

    Raises:
        ValueError: One cannot be managed; some are on the meta device and others are not.
    """
    found: dict[int, tuple[nn.Parameter, str, list[Slot]]] = {}
    for path, owner in _own_modules(roots):
        for name, parameter in owner._parameters.items():
            if parameter is None or id(parameter) in ignored:
                continue
            full_name = f"{path}{name}"
            check_parameter(parameter, full_name, face)
            found.setdefault(id(parameter), (parameter, full_name, []))[2].append(Slot(owner, name))
    check_same_data([(parameter, name) for parameter, name, _ in found.values()])
    return [Found(parameter, name, tuple(slots)) for parameter, name, slots in found.values()]


def _own_modules(roots: list[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The modules of this unit with the paths to them; what nested units contain is left out."""
    seen: set[nn.Module] = set()
    own: list[tuple[str, nn.Module]] = []

    def walk(module: nn.Module, path: str) -> None:
        if module in seen:
            return
        seen.add(module)
        own.append((path, module))
        for name, child in module.named_children():
            if not is_wrapped(child):
                walk(child, f"{path}{name}.")

    for root in roots:
        walk(root, "")
    return own


def make_unit(
    roots: list[nn.Module],
    placed: Sequence[tuple[Found, Home]],
    storage: Storage,
    options: UnitOptions,
    grouping: Grouping,
) -> Unit:
    """Make the unit and let the modules show its sharded parameters; nothing else is changed."""
    platform = storage.platform
    not_flat = Storage(platform, on_host=storage.on_host, pinned=storage.pinned)
    groups: dict[Any, list[tuple[Found, Home]]] = {}
    for found, home in placed:
        split = home.shard_dim is not None
        dtype = found.parameter.dtype
        if not storage.flat:  # converted when they are packed
            dtype = computed_in(dtype, options.mp_policy.param_dtype)
        key = (split, home.data if split else home.reduce_groups, dtype, has_extension(found.parameter))
        groups.setdefault(key, []).append((found, home))
    buckets: list[Bucket] = []
    reducers: list[GradientReducer] = []
    for (split, *_, extended), members in groups.items():
        params = []
        for found, home in members:
            found.parameter._hyper_parallel_unit_name = found.name  # type: ignore[attr-defined]
            params.append(ManagedParam(found.name, list(found.slots), found.parameter, home))
        home = members[0][1]
        wholes = [found.parameter for found, _ in members]
        group = home.data.shard_group if split and home.data is not None else None
        if extended:
            bucket: Bucket = ExtensionBucket(params, wholes, group, storage, options.mp_policy)
        else:
            bucket = Bucket(params, wholes, group, storage if split else not_flat, options.mp_policy.param_dtype)
        bucket.show_shards()
        buckets.append(bucket)
        for some in _portions(params, grouping.reduce_bytes):
            reducers.append(_reducer(bucket, some, home, platform, whole=grouping.whole_gradients or not split))
    target = "main_grad" if options.mp_policy.apply_grad_on_fp32_main_grad else "grad"
    for bucket in buckets:
        for param in bucket.params:
            param.target = target
    unit = Unit(roots, buckets, reducers, platform, options)
    unit.storage, unit.grouping = storage, grouping
    return unit


def _portions(params: list[ManagedParam], limit: int) -> list[list[ManagedParam]]:
    """Cut a list of parameters where the bytes of their gradients reach ``limit``; -1: nowhere."""
    if limit < 0:
        return [params]
    portions: list[list[ManagedParam]] = []
    size = 0
    for param in params:
        numel = param.numel * param.local.element_size()
        if not portions or size + numel > limit:
            portions.append([])
            size = 0
        portions[-1].append(param)
        size += numel
    return portions


def _reducer(
    bucket: Bucket, params: list[ManagedParam], home: Home, platform: Platform, *, whole: bool
) -> GradientReducer:
    scatter: dist.ProcessGroup | None = None
    replicas = home.reduce_groups
    if home.shard_dim is not None and home.data is not None:
        data = home.data
        if whole:
            replicas = data.domain_groups
        else:
            scatter = data.shard_group
            replicas = () if data.replicate_group is None else (data.replicate_group,)
    ranks = prod(group.size() for group in replicas) * (1 if scatter is None else scatter.size())
    return GradientReducer(
        bucket,
        params,
        scatter=scatter,
        replicas=replicas,
        ranks=ranks,
        scatters_by_exchange=platform.backend == "gloo",
        sends_each=platform.backend != "gloo" and not platform.prefers_large_messages,
    )


def install(unit: Unit, placed: Sequence[tuple[Found, Home]], make_class: Callable[[Any], Any], face: str) -> None:
    """Give the modules their new class, and let state dicts and stale parameters know of the unit."""
    for root in unit.modules:
        root.__dict__["_hyper_parallel_unit"] = unit
        object.__setattr__(root, "__class__", make_class(type(root)))
    register_state(unit)
    for owner in dict.fromkeys(slot.module for found, _ in placed for slot in found.slots):
        show_shards_in_state_dicts(unit, owner)
    for found, _ in placed:
        refuse_gradients(found, face)


def refuse_gradients(found: Found, face: str) -> None:
    """Let a gradient for the parameter as it was be an error: whoever still uses it trains a copy."""
    if not found.parameter.requires_grad:
        return
    name = found.name

    def refuse(gradient: torch.Tensor) -> None:
        del gradient
        raise RuntimeError(
            f"a gradient arrived for {name!r} as it was before {face} replaced it by a sharded parameter\n"
            "  seen: a module outside of the unit, or a variable, that still uses the old one\n"
            f"  try: if two modules share the weight, {together(face)}"
        )

    found.parameter.register_hook(refuse)


def move_buffers(roots: list[nn.Module], platform: Platform) -> None:
    """Move the buffers of a unit's modules to its device; meta stays meta, one that several modules hold stays one."""
    device = platform.device()
    moved: dict[int, torch.Tensor] = {}
    for _, owner in _own_modules(roots):
        for name, buffer in owner._buffers.items():
            if buffer is None or buffer.device.type in ("meta", device.type):
                continue
            if id(buffer) not in moved:
                moved[id(buffer)] = buffer.to(device)
            owner._buffers[name] = moved[id(buffer)]


def move_plain(roots: Iterable[nn.Module], data: DataParallelMesh, carrier: DeviceMesh) -> None:
    """Put plain parameters of units inside, that were wrapped before there was a carrier, onto it."""
    units = dict.fromkeys(u for root in roots for child in root.modules() if (u := unit_of(child)) is not None)
    for unit in units:
        for param in [param for bucket in unit.buckets for param in bucket.params]:
            home = param.home
            if home.data is not None and home.data.mesh == data.mesh and home.mesh == data.mesh:
                before = [Replicate() for _ in range(carrier.ndim - data.axes)]
                param.move_to(carrier, (*before, *home.placements))


def nested_homes(roots: Iterable[nn.Module]) -> list[Home]:
    """The homes of the parameters of units inside these modules."""
    units = dict.fromkeys(u for root in roots for child in root.modules() if (u := unit_of(child)) is not None)
    return [param.home for unit in units for bucket in unit.buckets for param in bucket.params]


def is_dtensor(found: Found) -> bool:
    """Whether the parameter is a DTensor already."""
    return isinstance(found.parameter, DTensor)
