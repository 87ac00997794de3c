"""Placement of each parameter of a ``fully_shard`` call: sharded, replicated, ignored, or sharded further."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hyper_parallel.core.dtensor.placements import is_strided
from hyper_parallel.core.fully_shard.arguments import PlacementFn, check_fusion, shard_dim
from hyper_parallel.core.fully_shard.carrier import carrier_of
from hyper_parallel.core.fully_shard.mesh import DataParallelMesh, Home, describe_mesh
from hyper_parallel.core.fully_shard.policy import FullyShardParamMode

__all__ = ["common_carrier", "kept_home", "plain_home", "unified_home"]


def plain_home(
    parameter: nn.Parameter,
    name: str,
    data: DataParallelMesh,
    placement_fn: PlacementFn | None,
    carrier: DeviceMesh | None,
    *,
    whole: bool,
) -> Home:
    """Where a plain parameter goes: split over the shard axis or, if it is to be whole or has no dim, on every rank.

    Args:
        parameter: The parameter.
        name: Its name.
        data: The data mesh.
        placement_fn: What chooses the dim.
        carrier: The mesh that DTensor parameters of the same model are on, and this one is to be on as well.
        whole: Keep it whole.
    """
    mesh = data.mesh if carrier is None else carrier
    before: list[Placement] = [Replicate() for _ in range(mesh.ndim - data.axes)]
    local = FullyShardParamMode.LOCAL_PARAM
    if whole or parameter.dim() == 0:
        placements = (*before, *[Replicate()] * data.axes)
        return Home(local, mesh, placements, None, data, reduce_groups=data.domain_groups)
    dim = shard_dim(parameter, name, placement_fn)
    placements = (*before, *[Replicate()] * (data.axes - 1), Shard(dim))
    return Home(local, mesh, placements, dim, data)


def kept_home(parameter: DTensor, name: str, *, fused: bool, face: str = "fully_shard") -> Home:
    """Where a DTensor goes that keeps its layout: nowhere; gradients are reduced where it is replicated.

    Raises:
        ValueError: It has a partial placement; communication was to be fused.
    """
    if fused:
        check_fusion(name, f"it is a DTensor that keeps its layout, {parameter.placements}")
    _check_placements(parameter, name, face)
    mesh = parameter.device_mesh
    axes = tuple(axis for axis, placement in enumerate(parameter.placements) if placement.is_replicate())
    groups = tuple(mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1)
    world = dist.group.WORLD
    if world is not None and len(groups) > 1 and prod(group.size() for group in groups) == world.size():
        groups = (world,)
    return Home(
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


def unified_home(
    parameter: DTensor, name: str, data: DataParallelMesh, placement_fn: PlacementFn | None, *, whole: bool
) -> Home:
    """Where a DTensor goes that is split further: on the mesh over both its axes and the data axes.

    Raises:
        ValueError: It is split over a data axis already, or has a placement that cannot be split further; the meshes
            are no slices of one mesh.
    """
    _check_placements(parameter, name, "fully_shard")
    carrier = carrier_of(parameter.device_mesh, data.mesh)
    for axis in carrier.shared:
        if not parameter.placements[axis].is_replicate():
            raise ValueError(
                f"fully_shard cannot split parameter {name!r} over its mesh: it is split over these ranks already\n"
                f"  layout: {parameter.placements} on {describe_mesh(parameter.device_mesh)}   "
                f"mesh: {describe_mesh(data.mesh)}\n"
                "  try: mesh=None, which keeps its layout, or a mesh of axes along which it is replicated"
            )
    kept = [parameter.placements[axis] for axis in carrier.kept]
    unified = FullyShardParamMode.DTENSOR_UNIFIED
    view = (parameter.device_mesh, tuple(parameter.placements), carrier.shared)
    if whole or parameter._local_tensor.dim() == 0:
        placements = (*kept, *[Replicate()] * data.axes)
        return Home(unified, carrier.mesh, placements, None, data, *view, reduce_groups=data.domain_groups)
    dim = shard_dim(parameter, name, placement_fn)  # type: ignore[arg-type]
    placements = (*kept, *[Replicate()] * (data.axes - 1), Shard(dim))
    return Home(unified, carrier.mesh, placements, dim, data, *view)


def common_carrier(homes: Sequence[Home], data: DataParallelMesh) -> DeviceMesh | None:
    """The one mesh that carries the DTensor parameters among these, if there is exactly one over this data mesh."""
    found: list[DeviceMesh] = []
    for home in homes:
        is_carrier = home.data is not None and home.data.mesh == data.mesh and home.mesh.ndim > data.axes
        if is_carrier and home.mesh not in found:
            found.append(home.mesh)
    return found[0] if len(found) == 1 else None


def _check_placements(parameter: DTensor, name: str, face: str) -> None:
    for placement in parameter.placements:
        if placement.is_partial() or is_strided(placement):
            raise ValueError(
                f"{face} cannot manage parameter {name!r}, a DTensor with placement {placement}\n"
                f"  layout: {parameter.placements} on {describe_mesh(parameter.device_mesh)}\n"
                "  try: hyper_parallel.redistribute it to Shard and Replicate placements first"
            )
