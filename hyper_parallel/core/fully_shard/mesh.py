"""Which ranks share a parameter and which repeat it: the mesh as the engine sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from hyper_parallel.platform import Platform, get_platform

__all__ = ["DataParallelMesh", "resolve_mesh"]


@dataclass(frozen=True)
class DataParallelMesh:
    """A 1-D mesh (shard) or a 2-D mesh (replicate, shard), with its groups looked up once.

    Attributes:
        mesh: torch's mesh.
        shard_group: The ranks that hold the parts of one copy.
        shard_size: How many they are.
        shard_rank: The calling rank's place among them.
        replicate_group: The ranks that hold the same part; None on a 1-D mesh.
        replicate_size: How many they are.
        platform: The device under it.
    """

    mesh: DeviceMesh
    shard_group: dist.ProcessGroup
    shard_size: int
    shard_rank: int
    replicate_group: dist.ProcessGroup | None
    replicate_size: int
    platform: Platform

    @property
    def size(self) -> int:
        """Ranks over which gradients are averaged."""
        return self.shard_size * self.replicate_size

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements of a sharded parameter: dim 0 over the shard axis."""
        return (Shard(0),) if self.replicate_group is None else (Replicate(), Shard(0))


def resolve_mesh(mesh: DeviceMesh | None, device_types: set[str]) -> DataParallelMesh:
    """Check ``mesh``, or make the default one: 1-D, over all ranks, on the parameters' device type.

    Raises:
        ValueError: Not a mesh; more than two axes; axes named in the wrong order; no process group yet.
    """
    if mesh is None:
        mesh = _default_mesh(device_types)
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"fully_shard cannot use {mesh!r} as its mesh\n"
            "  expected: a DeviceMesh, or None for all ranks\n"
            "  try: mesh=init_device_mesh('cpu', (2, 4), mesh_dim_names=('dp_replicate', 'dp_shard'))"
        )
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard needs a mesh of 1 axis (shard) or 2 axes (replicate, shard), got {mesh.ndim}\n"
            f"  mesh: {_describe(mesh)}\n"
            "  try: a slice of it, such as mesh['dp_replicate', 'dp_shard']"
        )
    names = mesh.mesh_dim_names
    if names and mesh.ndim == 2 and "shard" in names[0].lower() and "repl" in names[1].lower():
        raise ValueError(
            f"fully_shard takes the first axis to replicate and the second to shard, but they are named {names}\n"
            f"  mesh: {_describe(mesh)}\n"
            f"  try: mesh[{names[1]!r}, {names[0]!r}] of a mesh built in that order"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"fully_shard was called on rank {dist.get_rank()}, which is not in its mesh\n"
            f"  mesh: {_describe(mesh)}   ranks: {mesh.mesh.flatten().tolist()}\n"
            "  try: call fully_shard on the ranks of the mesh only"
        )
    shard_group = mesh.get_group(mesh.ndim - 1)
    replicate_group = mesh.get_group(0) if mesh.ndim == 2 else None
    return DataParallelMesh(
        mesh=mesh,
        shard_group=shard_group,
        shard_size=shard_group.size(),
        shard_rank=shard_group.rank(),
        replicate_group=replicate_group,
        replicate_size=1 if replicate_group is None else replicate_group.size(),
        platform=_platform(mesh),
    )


def _default_mesh(device_types: set[str]) -> DeviceMesh:
    known = sorted(device_types - {"meta"})
    if len(known) > 1:
        raise ValueError(
            f"fully_shard cannot choose a mesh for parameters on several device types: {', '.join(known)}\n"
            "  seen: mesh=None\n"
            "  try: pass mesh=, or move the module to one device first"
        )
    if not dist.is_initialized():
        raise ValueError(
            "fully_shard cannot make a mesh: torch.distributed is not initialised\n"
            "  seen: mesh=None\n"
            "  try: torch.distributed.init_process_group() first, or pass mesh="
        )
    device_type = known[0] if known else get_platform().device_type
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _platform(mesh: DeviceMesh) -> Platform:
    try:
        return get_platform(mesh.device_type)
    except ValueError as error:
        raise ValueError(
            f"fully_shard does not know the device type {mesh.device_type!r} of its mesh\n"
            f"  mesh: {_describe(mesh)}\n"
            "  try: a mesh on cuda, npu or cpu"
        ) from error


def _describe(mesh: Any) -> str:
    names = mesh.mesh_dim_names or [f"axis {i}" for i in range(mesh.ndim)]
    return ", ".join(f"{name}={size}" for name, size in zip(names, torch.Size(mesh.shape), strict=True))
