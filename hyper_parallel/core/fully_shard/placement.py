"""Placement of each parameter: sharded, replicated, kept as the DTensor it is, or sharded further.

The data-parallel mesh is read once, into `DataParallelMesh`; a `ParameterPlacement` then says of one parameter what
optimizers see, what its module sees, and over which groups it is gathered and reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from hyper_parallel.core.common.checks import list_modules, read_int
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.dtensor.spelling import is_strided
from hyper_parallel.core.fully_shard.utils import FullyShardParamMode
from hyper_parallel.core.mesh.device_mesh import check_member, describe_mesh, flatten_axes
from hyper_parallel.core.mesh.spmd_mesh import spmd_mesh_of
from hyper_parallel.platform import Platform, get_platform

PlacementFn = Callable[[nn.Parameter], Any]


@dataclass(frozen=True)
class Owner:
    """What `shard_placement_fn` returns for a parameter that one rank is to hold whole; see `whole_parameters`.

        fully_shard(block, mesh=mesh, shard_placement_fn=lambda p: Owner(0) if p.ndim == 2 else None)

    Args:
        rank: Of the shard axis, from 0.

    Raises:
        TypeError: It is no int.
        ValueError: It is below 0.
    """

    rank: int

    def __post_init__(self) -> None:
        read_int("cannot name an owner", "rank", self.rank, 0, "Owner(0)")


def whole_parameters(module: nn.Module | Iterable[nn.Module], ranks: int, *, block: int | None = None) -> PlacementFn:
    """Return a `shard_placement_fn` by which each parameter of some modules is whole on one rank of the shard axis.

        placement = whole_parameters(model.layers, mesh.size())
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, shard_placement_fn=placement)

    The largest parameter goes first, to the rank that has the least so far (Graham 1969): no rank has more than a
    rank's even part of all elements and one parameter beside it. A parameter of three dims or more, a stack of
    matrices as the weights of experts are, is split on dim 0, and so is what the modules do not have.

    With `block=128` no block of 128 x 128 is split, as an optimizer needs it that keeps its state in such blocks. A
    parameter is then whole only if neither of its dims can be sharded so that all but the last shard are multiples of
    `block`; those that can are `Shard(0)` or, if their columns alone can, `Shard(1)`.

    Args:
        module: With the parameters as they are before `fully_shard`.
        ranks: Of the shard axis; its owners are the same on all ranks.
        block: Rows, and columns, that are kept together; None: all of a parameter.

    Raises:
        TypeError: No module; ranks or block is no int.
        ValueError: ranks or block is below 1.
    """
    asked = "cannot place parameters whole"
    modules = list_modules(module)
    ranks = read_int(asked, "ranks", ranks, 1, "ranks=mesh.size(-1)")
    if block is not None:
        block = read_int(asked, "block", block, 1, "block=128")
    found = dict.fromkeys(param for part in modules for param in part.parameters() if param.dim() < 3)
    held, placements = [0] * ranks, WeakTensorKeyDictionary()  # weak: what is unsharded goes once it has been split
    for param in sorted(found, key=torch.Tensor.numel, reverse=True):  # equal ones in their order, rank after rank
        # The shards of torch.chunk, which alone a DTensor can say, of what tensor parallelism has left.
        sizes = param._local_tensor.shape if isinstance(param, DTensor) else param.shape
        dims = [dim for dim, size in enumerate(sizes) if block is not None and -(-size // ranks) % block == 0]
        if dims:
            placements[param] = Shard(dims[0])
            continue
        least = held.index(min(held))
        held[least] += param.numel()
        placements[param] = Owner(least)
    return placements.get


@dataclass(frozen=True)
class DataParallelMesh:
    """A 1-D mesh (shard) or a 2-D mesh (replicate, shard), with its groups looked up once.

    Attributes:
        mesh: torch's mesh.
        shard_group: The ranks that hold the shards of one copy.
        shard_size: How many they are.
        shard_rank: The calling rank's place among them.
        replicate_group: The ranks that hold the same shard; None on a 1-D mesh.
        replicate_size: How many they are.
        platform: The device under it.
        axes: How many of the mesh's axes, the last ones, these are: 1 or 2.
    """

    mesh: DeviceMesh
    shard_group: dist.ProcessGroup
    shard_size: int
    shard_rank: int
    replicate_group: dist.ProcessGroup | None
    replicate_size: int
    platform: Platform
    axes: int

    @classmethod
    def of(cls, mesh: DeviceMesh, platform: Platform, axes: int) -> DataParallelMesh:
        """Read the last axis of `mesh` as the shard axis and, of two, that before it as the replicate axis."""
        shard_group = mesh.get_group(mesh.ndim - 1)
        replicate_group = mesh.get_group(mesh.ndim - 2) if axes == 2 else None
        return cls(
            mesh=mesh,
            shard_group=shard_group,
            shard_size=shard_group.size(),
            shard_rank=shard_group.rank(),
            replicate_group=replicate_group,
            replicate_size=1 if replicate_group is None else replicate_group.size(),
            platform=platform,
            axes=axes,
        )

    @property
    def size(self) -> int:
        """Ranks over which gradients are averaged."""
        return self.shard_size * self.replicate_size

    @property
    def domain_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups over which to reduce, one after the other, to have reduced over all ranks of the mesh."""
        # One all_reduce instead of one per axis, where these are all ranks anyway.
        world = dist.group.WORLD
        if world is not None and self.size == world.size():
            return (world,)
        return (self.shard_group,) if self.replicate_group is None else (self.shard_group, self.replicate_group)


@dataclass(frozen=True)
class ParameterPlacement:
    """Where a parameter lives: what optimizers see of it, what its module sees, and over whom it is reduced.

    Attributes:
        mode: How the engine manages it.
        mesh: Mesh of the DTensor that optimizers see.
        placements: Its placements.
        shard_dim: The dim that is split over the shard axis; None: replicated over the data mesh.
        data: The data mesh; None for a DTensor that keeps its layout.
        view_mesh: Mesh of the DTensor that the module sees; None: it sees a plain tensor.
        view_placements: Its placements.
        reduced_axes: The axes of `view_mesh` over which the engine reduces gradients.
        reduce_groups: Where it is replicated: groups over which gradients are all_reduced, one after the other.
        owner: The rank of the shard axis that holds all of it, as its only shard; None: it is split, or replicated.
    """

    mode: FullyShardParamMode
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shard_dim: int | None
    data: DataParallelMesh | None
    view_mesh: DeviceMesh | None = None
    view_placements: tuple[Placement, ...] = ()
    reduced_axes: tuple[int, ...] = ()
    reduce_groups: tuple[dist.ProcessGroup, ...] = ()
    owner: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether the calling rank has a shard of it, which may be empty."""
        return self.owner is None or self.owner == self.shard_rank

    @property
    def shard_size(self) -> int:
        """Ranks that the parameter is split over, along the shard axis."""
        return 1 if self.shard_dim is None or self.data is None else self.data.shard_size

    @property
    def shard_rank(self) -> int:
        """The shard of the calling rank."""
        return 0 if self.shard_dim is None or self.data is None else self.data.shard_rank


def resolve_mesh(mesh: DeviceMesh | None, device_types: set[str]) -> DataParallelMesh:
    """Check `mesh`, or make the default one: 1-D, over all ranks, on the parameters' device type.

    Raises:
        ValueError: More than two axes; axes named in the wrong order; no process group yet.
    """
    if mesh is None:
        mesh = _default_mesh(device_types)
    asked = "fully_shard cannot use its mesh"
    seen = f"mesh: {describe_mesh(mesh)}"
    if mesh.ndim not in (1, 2):
        blame = f"it takes 1 axis (shard) or 2 axes (replicate, shard), got {mesh.ndim}"
        raise InvalidValue(asked, blame, seen, "a slice of it, such as mesh['dp_replicate', 'dp_shard']")
    names = mesh.mesh_dim_names
    if names and mesh.ndim == 2 and "shard" in names[0].lower() and "repl" in names[1].lower():
        blame = f"the first axis is to replicate and the second to shard, but they are named {names}"
        hint = f"mesh[{names[1]!r}, {names[0]!r}] of a mesh built in that order"
        raise InvalidValue(asked, blame, seen, hint)
    check_member(asked, mesh)
    with _disable_current_modes():  # the ranks are real numbers under a fake tensor mode too
        in_order = bool((mesh.mesh.diff(dim=-1) > 0).all())
    if not in_order:
        # A process group sorts its ranks: shards would change places.
        blame, seen = "ranks along the shard axis have to ascend", f"{seen}   ranks: {mesh.mesh.tolist()}"
        raise InvalidValue(asked, blame, seen, "a mesh whose rows ascend, as init_device_mesh makes them")
    return DataParallelMesh.of(mesh, platform_of(mesh), mesh.ndim)


def data_axes(mesh: Any, dims: Any) -> DeviceMesh:
    """The data-parallel axes of an SPMD mesh, as torch's `DataParallelMeshDims` names them; several are flattened.

    Raises:
        ValueError: No mesh with names, or an axis that is not there.
    """
    asked = "fully_shard cannot find the data-parallel axes"
    if not isinstance(mesh, DeviceMesh) or not mesh.mesh_dim_names:
        blame, hint = "dp_mesh_dims names axes of mesh", "init_device_mesh('cpu', (2, 4), mesh_dim_names=('dp', 'tp'))"
        seen = "mesh=None" if mesh is None else "a mesh without names"
        raise InvalidValue(asked, blame, f"seen: {seen}", f"mesh={hint}")
    replicate, shard = tuple(dims.replicate_names), tuple(dims.shard_names)
    missing = [name for name in (*replicate, *shard) if name not in mesh.mesh_dim_names]
    if missing or not (replicate or shard) or set(replicate) & set(shard):
        blame = f"no axis {missing[0]!r}" if missing else "each axis once, and at least one"
        asked, seen = f"fully_shard cannot use dp_mesh_dims={dims!r}", f"mesh: {describe_mesh(mesh)}"
        raise InvalidValue(asked, blame, seen, f"DataParallelMeshDims(shard={mesh.mesh_dim_names[0]!r})")
    # All ranks make these meshes in one order: where an axis is flattened, its groups are made, by all together.
    lines = [_one_axis(mesh, names) for names in (replicate, shard) if names]
    if len(lines) == 1:
        return lines[0]
    here = mesh.get_coordinate()
    assert here is not None, "the axes' meshes exist on this rank"
    order = [mesh.mesh_dim_names.index(name) for name in (*replicate, *shard)]
    others = [axis for axis in range(mesh.ndim) if axis not in order]
    with _disable_current_modes():
        ranks = mesh.mesh.permute(*others, *order)[tuple(here[axis] for axis in others)]
        ranks = ranks.reshape(lines[0].size(), lines[1].size()).contiguous()
    names = ("_".join(replicate), "_".join(shard))
    groups = [line.get_group() for line in lines]
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=names)


def _one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else flatten_axes(mesh, names, "_".join(names))


def _default_mesh(device_types: set[str]) -> DeviceMesh:
    known = sorted(device_types - {"meta"})
    asked, seen = "fully_shard cannot make a mesh", "seen: mesh=None"
    if len(known) > 1:
        blame = f"parameters are on several device types: {', '.join(known)}"
        raise InvalidValue(asked, blame, seen, "pass mesh=, or move the module to one device first")
    if not dist.is_initialized():
        hint = "torch.distributed.init_process_group() first, or pass mesh="
        raise InvalidValue(asked, "torch.distributed is not initialised", seen, hint)
    device_type = known[0] if known else get_platform().device_type
    return init_device_mesh(device_type, (dist.get_world_size(),))


def platform_of(mesh: DeviceMesh) -> Platform:
    """The platform under a mesh.

    Raises:
        ValueError: Its device type is unknown.
    """
    try:
        return get_platform(mesh.device_type)
    except ValueError as error:
        blame = f"there is no platform for the device type {mesh.device_type!r}"
        asked, seen = "fully_shard cannot use its mesh", f"mesh: {describe_mesh(mesh)}"
        raise InvalidValue(asked, blame, seen, "a mesh on cuda, npu or cpu") from error


def unpackable(parameter: nn.Parameter) -> str | None:
    """Why shards of a parameter cannot be copied as plain memory; None if they can."""
    local: Any = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    if local.layout is not torch.strided:
        return "it is sparse"
    if has_extension(local):
        return "it is gathered in its own way, by fsdp_pre_all_gather"
    if is_traceable_wrapper_subclass(local):
        return "it is a tensor subclass that holds its values in other tensors"
    return None


def refuse_fusion(name: str, reason: str) -> None:
    """Refuse `comm_fusion` for a parameter.

    Raises:
        ValueError: Always.
    """
    hint = "comm_fusion=False, or pass it in replicate_params or ignored_params"
    raise InvalidValue(f"comm_fusion cannot take parameter {name!r}", reason, "seen: comm_fusion=True", hint)


def shard_dim(
    parameter: nn.Parameter, name: str, placement_fn: PlacementFn | None, ranks: int
) -> tuple[int, int | None]:
    """The dim to split and, of a parameter that is kept whole, the owner, as `shard_placement_fn` says.

    Args:
        parameter: The parameter.
        name: Its name.
        placement_fn: What chooses.
        ranks: Of the shard axis.

    Raises:
        ValueError: It returns something else than `Shard(dim)`, `Owner(rank)` or None, a dim that the parameter lacks,
            or a rank that the shard axis lacks.
    """
    if placement_fn is None:
        return 0, None
    placement = placement_fn(parameter)
    if placement is None:
        return 0, None
    asked = f"fully_shard cannot split parameter {name!r}"
    returned = f"shard_placement_fn returned {placement!r}"
    if isinstance(placement, Owner):
        return 0, _checked_owner(parameter, placement, ranks, asked, returned)
    if type(placement) is not Shard:
        hint = "lambda p: Shard(1) if p.dim() > 1 else None, with torch.distributed.tensor.Shard"
        expected = "expected: Shard(dim), Owner(rank), or None for dim 0"
        raise InvalidValue(asked, returned, expected, hint)
    dims = parameter.dim()
    if not -dims <= placement.dim < dims:
        seen = f"seen: shape {tuple(parameter.shape)}"
        raise InvalidValue(asked, f"{returned}, and it has no such dim", seen, f"a dim from 0 to {dims - 1}")
    if placement.dim % dims and has_extension(parameter):
        seen = "seen: fsdp_pre_all_gather, whose results fsdp_post_all_gather gets one below the other"
        raise InvalidValue(asked, returned, seen, "Shard(0) or None for this parameter")
    return placement.dim % dims, None


def _checked_owner(parameter: nn.Parameter, placement: Owner, ranks: int, asked: str, returned: str) -> int:
    if placement.rank >= ranks:
        seen = f"seen: a shard axis of {ranks} ranks"
        hint = f"a rank from 0 to {ranks - 1}; whole_parameters(model, {ranks})"
        raise InvalidValue(asked, f"{returned}, and the shard axis has no such rank", seen, hint)
    if has_extension(parameter):
        seen = "seen: fsdp_pre_all_gather, of which every rank gives a shard"
        raise InvalidValue(asked, returned, seen, "Shard(0) or None for this parameter")
    return placement.rank


def has_extension(parameter: torch.Tensor) -> bool:
    """Whether a parameter says itself what is gathered of it, by FSDP2's tensor extension."""
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return hasattr(local, "fsdp_pre_all_gather") and hasattr(local, "fsdp_post_all_gather")


def plain_placement(
    parameter: nn.Parameter,
    name: str,
    data: DataParallelMesh,
    placement_fn: PlacementFn | None,
    spmd_mesh: DeviceMesh | None,
    *,
    replicate: bool,
) -> ParameterPlacement:
    """Where a plain parameter goes: split over the shard axis; replicated if asked to, or if it has no dim.

    Args:
        parameter: The parameter.
        name: Its name.
        data: The data mesh.
        placement_fn: What chooses the dim.
        spmd_mesh: The mesh that DTensor parameters of the same model are on, and this one is to be on as well.
        replicate: Do not split it.
    """
    mesh = data.mesh if spmd_mesh is None else spmd_mesh
    before: list[Placement] = [Replicate() for _ in range(mesh.ndim - data.axes)]
    local = FullyShardParamMode.LOCAL_PARAM
    if replicate or parameter.dim() == 0:
        placements = (*before, *[Replicate()] * data.axes)
        return ParameterPlacement(local, mesh, placements, None, data, reduce_groups=data.domain_groups)
    dim, owner = shard_dim(parameter, name, placement_fn, data.shard_size)
    placements = (*before, *[Replicate()] * (data.axes - 1), Shard(dim))
    return ParameterPlacement(local, mesh, placements, dim, data, owner=owner)


def kept_placement(parameter: DTensor, name: str, *, fused: bool, api: str = "fully_shard") -> ParameterPlacement:
    """Where a DTensor goes that keeps its layout: nowhere; gradients are reduced where it is replicated.

    Raises:
        ValueError: It has a partial placement; communication was to be fused.
    """
    if fused:
        refuse_fusion(name, f"it is a DTensor that keeps its layout, {parameter.placements}")
    _check_placements(parameter, name, api)
    mesh = parameter.device_mesh
    # Along the other axes ranks hold different shards, of which each has a gradient of its own.
    axes = tuple(axis for axis, placement in enumerate(parameter.placements) if placement.is_replicate())
    groups = tuple(mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1)
    world = dist.group.WORLD
    if world is not None and len(groups) > 1 and prod(group.size() for group in groups) == world.size():
        groups = (world,)
    return ParameterPlacement(
        FullyShardParamMode.DTENSOR_COMPAT,
        mesh,
        tuple(parameter.placements),
        None,
        None,
        view_mesh=mesh,
        view_placements=tuple(parameter.placements),
        reduced_axes=axes,
        reduce_groups=groups,
    )


def unified_placement(
    parameter: DTensor, name: str, data: DataParallelMesh, placement_fn: PlacementFn | None, *, replicate: bool
) -> ParameterPlacement:
    """Where a DTensor goes that is split further: on the mesh over both its axes and the data axes.

    Raises:
        ValueError: It is split over a data axis already, or has a placement that cannot be split further; the meshes
            are no slices of one mesh.
    """
    _check_placements(parameter, name, "fully_shard")
    spmd_mesh = spmd_mesh_of(parameter.device_mesh, data.mesh)
    # Meshes may share axes along which the DTensor is replicated: these are the engine's, the others stay its own.
    for axis in spmd_mesh.shared:
        if not parameter.placements[axis].is_replicate():
            asked = f"fully_shard cannot split parameter {name!r} over its mesh"
            seen = f"{_layout(parameter)}   mesh: {describe_mesh(data.mesh)}"
            hint = "mesh=None, which keeps its layout, or a mesh of axes along which it is replicated"
            raise InvalidValue(asked, "it is split over these ranks already", seen, hint)
    kept = [parameter.placements[axis] for axis in spmd_mesh.kept]
    unified = FullyShardParamMode.DTENSOR_UNIFIED
    view = (parameter.device_mesh, tuple(parameter.placements), spmd_mesh.shared)
    if replicate or parameter._local_tensor.dim() == 0:
        placements = (*kept, *[Replicate()] * data.axes)
        return ParameterPlacement(
            unified, spmd_mesh.mesh, placements, None, data, *view, reduce_groups=data.domain_groups
        )
    dim, owner = shard_dim(parameter, name, placement_fn, data.shard_size)  # type: ignore[arg-type]
    placements = (*kept, *[Replicate()] * (data.axes - 1), Shard(dim))
    return ParameterPlacement(unified, spmd_mesh.mesh, placements, dim, data, *view, owner=owner)


def common_spmd_mesh(placements: Sequence[ParameterPlacement], data: DataParallelMesh) -> DeviceMesh | None:
    """The one SPMD mesh of the DTensor parameters among these, if there is exactly one over this data mesh."""
    # If there are several, none is preferred: plain parameters stay on the data mesh.
    found: list[DeviceMesh] = []
    for placement in placements:
        is_over_data = placement.data is not None and placement.data.mesh == data.mesh
        if is_over_data and placement.mesh.ndim > data.axes and placement.mesh not in found:
            found.append(placement.mesh)
    return found[0] if len(found) == 1 else None


def _check_placements(parameter: DTensor, name: str, api: str) -> None:
    for placement in parameter.placements:
        if placement.is_partial() or is_strided(placement):
            asked, blame = f"{api} cannot manage parameter {name!r}", f"it is a DTensor with placement {placement}"
            hint = "hyper_parallel.redistribute it to Shard and Replicate placements first"
            raise InvalidValue(asked, blame, _layout(parameter), hint)


def _layout(parameter: DTensor) -> str:
    return f"layout: {parameter.placements} on {describe_mesh(parameter.device_mesh)}"
