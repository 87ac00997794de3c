"""The SPMD mesh of a sharded parameter that is already on another mesh.

A tensor-parallel weight is on a mesh already, and is split further over the data-parallel ranks. One DTensor must then
describe both splits on one mesh. If its axes are in the order of the splits, the parameter's axes first, plain `Shard`
placements mean a shard of a shard, also for uneven sizes and in distributed checkpoints. Such a mesh reuses existing
process groups; its ranks follow from the mesh that both meshes were sliced from.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.common.groups import group_of
from hyper_parallel.core.mesh.device_mesh import check_member, describe_mesh

Ranks = npt.NDArray[np.int64]


# Guards the table below, and is held only for look-ups; a lock is no state of a rank.
_LOCK = threading.Lock()


# Meshes of `split_world` by default process group: no state of a rank, because each rank has a separate default group.
# All access is under the lock. The meshes are weak, because each holds groups, possibly the default group. A mesh that
# is made again finds its groups again.
_WORLD_MESHES = WeakKeyDictionary[dist.ProcessGroup, WeakValueDictionary[tuple[str, int], DeviceMesh]]()


class SpmdMesh(NamedTuple):
    """The mesh of a sharded parameter, and the places of its first mesh's axes.

    Attributes:
        mesh: the kept axes of the parameter's mesh, in their order, then the data-parallel axes.
        kept: indices of the axes of the parameter's mesh that are the first axes of `mesh`.
        shared: indices of the axes of the parameter's mesh whose ranks are data-parallel. The caller must ensure that
            the parameter is replicated along them.
    """

    mesh: DeviceMesh
    kept: tuple[int, ...]
    shared: tuple[int, ...]


def spmd_mesh_of(param_mesh: DeviceMesh, data_mesh: DeviceMesh) -> SpmdMesh:
    """Return the mesh over the axes of two meshes, without new groups and without communication.

        root = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        spmd_mesh_of(root["tp"], root["dp"])  # mesh: tp=2, dp=4; kept: (0,), shared: ()
        spmd_mesh_of(root, root["dp"])        # mesh: tp=2, dp=4; kept: (1,), shared: (0,)

    Axes are identified by their ranks. An axis is shared if all of its ranks are on the data mesh, e.g. as one axis, as
    part of a flattened axis, or as several axes. An axis of one rank is shared if an axis of one rank on the data mesh
    has its name. A second call with equal arguments returns the same result.

    Args:
        param_mesh: the parameter's mesh.
        data_mesh: the data-parallel axes: the same root mesh, or another slice of it. A mesh from another root works if
            one of the roots holds all ranks of both, and all slices of one lie in the same way on the other.

    Raises:
        ValueError: two device types; a mesh without the calling rank; an axis partly on the data mesh; meshes without a
            common root, or that do not cross.
    """
    made = _made_with(data_mesh)
    key = (param_mesh, data_mesh)
    if key not in made:
        made[key] = _spmd_mesh(param_mesh, data_mesh)
    return made[key]


def split_world(device_type: str, shard_size: int) -> DeviceMesh:
    """Return the mesh of all ranks with the axes "replicate" and "shard", shards on consecutive ranks.

        split_world("cpu", 4)  # with 8 ranks: replicate=2, shard=4; the shards of one copy are on ranks 0 to 3

    Every rank must call it, in the same order as other calls that make groups. Groups of the same ranks are made once
    per lifetime of torch.distributed.

    Args:
        device_type: "cpu", "cuda", "npu".
        shard_size: ranks that a parameter is split over.

    Raises:
        ValueError: shard_size does not divide the number of ranks.
    """
    world = dist.group.WORLD
    assert world is not None, "the callers check that torch.distributed is initialized"
    with _LOCK:
        made = _WORLD_MESHES.setdefault(world, WeakValueDictionary())
        mesh = made.get((device_type, shard_size))
    if mesh is None:
        mesh = _split(np.arange(dist.get_world_size()), shard_size, device_type, None, ())
        with _LOCK:
            made[device_type, shard_size] = mesh
    return mesh


def split_replicated(param_mesh: DeviceMesh, replicated: Sequence[int], shard_size: int) -> SpmdMesh:
    """Return the mesh that splits a parameter further, over axes of its mesh along which it is replicated.

        root = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        split_replicated(root, (0,), 2)  # mesh: tp=2, replicate=2, shard=2; kept: (1,), shared: (0,)

    The ranks along the replicated axes, the last axis fastest, are cut into runs of `shard_size`, the shard groups.
    Every rank of the root of `param_mesh` must call it, with its slice, in the same order as other calls that make
    groups. Existing groups are reused. A second call with equal arguments returns the same result.

    Args:
        param_mesh: the parameter's mesh.
        replicated: indices of the axes along which the parameter is replicated, in mesh order.
        shard_size: ranks that split each part of the parameter.

    Raises:
        ValueError: shard_size does not divide the number of ranks along those axes; a mesh without the calling rank.
    """
    made = _made_with(param_mesh)
    shared = tuple(replicated)
    key = (param_mesh, shared, shard_size)
    if key not in made:
        check_member("cannot split parameters further", param_mesh, "the parameters' mesh")
        kept = tuple(axis for axis in range(param_mesh.ndim) if axis not in shared)
        sizes = [param_mesh.size(axis) for axis in kept]
        cube = _ranks(param_mesh).transpose(*kept, *shared).reshape(*sizes, -1)
        mesh = _split(cube, shard_size, param_mesh.device_type, param_mesh, kept)
        made[key] = SpmdMesh(mesh, kept, shared)
    return made[key]


def divisor(shard_size: int, rows: int, domain: int) -> int:
    """Return the number of ranks that split a parameter: the largest divisor of `rows` and `domain` up to the limit.

    >>> divisor(-1, rows=12, domain=8), divisor(8, rows=6, domain=4), divisor(4, rows=7, domain=8)
    (4, 2, 1)

    Args:
        shard_size: most ranks, at least 1; -1 and more than `domain` mean all.
        rows: the size of dim 0.
        domain: number of ranks that hold the same data.
    """
    most = domain if shard_size == -1 else min(shard_size, domain)
    common = math.gcd(rows, domain)
    return next(size for size in range(min(most, common), 0, -1) if common % size == 0)


# Construction of an SPMD mesh


_TOGETHER = "cannot put a parameter's mesh and the data mesh together"


def _spmd_mesh(param_mesh: DeviceMesh, data_mesh: DeviceMesh) -> SpmdMesh:
    asked, seen = _TOGETHER, _both(param_mesh, data_mesh)
    if param_mesh.device_type != data_mesh.device_type:
        blame = f"one is of {param_mesh.device_type!r}, the other of {data_mesh.device_type!r}"
        raise InvalidValue(asked, blame, seen, "slices of one mesh for both")
    check_member(asked, param_mesh, "the parameter's mesh")
    check_member(asked, data_mesh, "the data mesh")
    param, data = _ranks(param_mesh), _ranks(data_mesh)
    shared = tuple(axis for axis in range(param.ndim) if _is_shared(param_mesh, data_mesh, axis, param, data))
    kept = tuple(axis for axis in range(param.ndim) if axis not in shared)
    if not kept:
        return SpmdMesh(data_mesh, kept, shared)
    own = _line(param, *kept)
    ranks = _cross(own, data, param_mesh, data_mesh)
    names = [*(_name(param_mesh, axis) for axis in kept), *(_name(data_mesh, axis) for axis in range(data.ndim))]
    groups = [*(param_mesh.get_group(axis) for axis in kept), *(data_mesh.get_group(a) for a in range(data.ndim))]
    return SpmdMesh(_mesh(ranks, names, groups, data_mesh.device_type), kept, shared)


def _is_shared(param_mesh: DeviceMesh, data_mesh: DeviceMesh, axis: int, param: Ranks, data: Ranks) -> bool:
    """Return True if the ranks of an axis of the parameter's mesh are on the data mesh."""
    line = _line(param, axis)
    if len(line) == 1:  # the calling rank, which is on both: the name decides
        names, name = data_mesh.mesh_dim_names or (), _name(param_mesh, axis)
        return name is not None and name in names and data.shape[names.index(name)] == 1
    common = int(_among(line, data).sum())
    if 1 < common < len(line):
        called = _name(param_mesh, axis) or f"axis {axis}"
        blame = f"of the {len(line)} ranks along {called!r} of the parameter's mesh, {common} are on the data mesh"
        hint = f"a data mesh with all of {called!r}, if need be along an axis that replicates, or with none of it"
        raise InvalidValue(_TOGETHER, blame, _both(param_mesh, data_mesh), hint)
    return common > 1


def _cross(own: Ranks, data: Ranks, param_mesh: DeviceMesh, data_mesh: DeviceMesh) -> Ranks:
    """Return the ranks of the product of two slices of a mesh that cross at the calling rank.

    Along every axis of the root, at most one of the two slices moves away from the calling rank. So the coordinates of
    rank (i, j) are the sum of the coordinates of the slices' ranks i and j, minus the calling rank's.
    """
    asked, seen = _TOGETHER, _both(param_mesh, data_mesh)
    roots = [_ranks(_root_of(data_mesh))]
    other = _root_of(param_mesh)
    if other is not _root_of(data_mesh) and not _same(_ranks(other), roots[0]):
        roots.append(_ranks(other))
    whole = next((root for root in roots if _holds(root, own) and _holds(root, data)), None)
    if whole is None:
        blame = "they are no slices of one mesh, and neither's root holds the ranks of both"
        raise InvalidValue(asked, blame, seen, "the root mesh that has the axes of both, or slices of it")
    moved = _moved(whole, own, data)
    inside = all(((at >= 0) & (at < size)).all() for at, size in zip(moved, whole.shape, strict=True))
    ranks = whole[tuple(moved)] if inside else None
    if ranks is None or int(np.bincount(ranks.ravel()).max()) > 1:
        blame = "their axes do not cross: some ranks are along both"
        raise InvalidValue(asked, blame, seen, "two slices, without a common axis, of one mesh")
    for root in roots:
        # If the other root has these ranks, it must give equal coordinates, or other ranks' slices would differ.
        if root is not whole and _holds(root, ranks) and not _same(_at(root, ranks), _moved(root, own, data)):
            blame = "they are slices of two meshes, which number the ranks differently"
            raise InvalidValue(asked, blame, seen, "slices of one mesh for both")
    return ranks


def _split(
    cube: Ranks, shard_size: int, device_type: str, mesh: DeviceMesh | None, kept: tuple[int, ...]
) -> DeviceMesh:
    """Return the mesh that cuts the last axis of `cube` in two; the axes before it are axes `kept` of `mesh`."""
    domain = cube.shape[-1]
    if shard_size < 1 or domain % shard_size:
        blame = f"shard_size does not divide the {domain} ranks that hold the same data"
        seen = f"shard_size: {shard_size}   mesh: {f'{domain} ranks' if mesh is None else describe_mesh(mesh)}"
        hint = f"shard_size={divisor(max(shard_size, 1), domain, domain)}"
        raise InvalidValue(f"cannot split a parameter over {shard_size} ranks", blame, seen, hint)
    ranks = cube.reshape(*cube.shape[:-1], domain // shard_size, shard_size)
    shard = _group(_line(ranks, -1), "shard", mesh)
    replicate = _group(_line(ranks, -2), "replicate", mesh)
    names: list[str | None] = ["replicate", "shard"]
    groups = [replicate, shard]
    if mesh is not None:
        names = [*(_name(mesh, axis) for axis in kept), *names]
        groups = [*(mesh.get_group(axis) for axis in kept), *groups]
    return _mesh(ranks, names, groups, device_type)


def _group(ranks: Ranks, name: str, mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """Return the group of some ranks: an axis of the mesh, else a group that is made once for these ranks."""
    wanted = tuple(sorted(ranks.tolist()))
    if mesh is not None:
        for axis in range(mesh.ndim):
            if mesh.size(axis) == len(wanted):
                group = mesh.get_group(axis)
                if tuple(sorted(dist.get_process_group_ranks(group))) == wanted:
                    return group
    return group_of(wanted, (name,))


def _mesh(ranks: Ranks, names: Sequence[str | None], groups: list[dist.ProcessGroup], device_type: str) -> DeviceMesh:
    with _disable_current_modes():  # ranks must be real numbers, even under a fake tensor mode
        tensor = torch.from_numpy(np.ascontiguousarray(ranks, dtype=np.int32))
        return DeviceMesh.from_group(groups, device_type, mesh=tensor, mesh_dim_names=_distinct(names))


# Meshes as arrays of ranks


class _MadeMeshes(OrderedDict[Any, SpmdMesh]):
    """Cached SPMD meshes by their arguments, kept at the root mesh; copies and pickles of the root drop them."""

    def __reduce__(self) -> Any:
        return (OrderedDict, ())


def _made_with(mesh: DeviceMesh) -> _MadeMeshes:
    # Slices are temporary, and equal slices must get the same SPMD mesh. The root lives as long as any slice, and each
    # rank has another root.
    return _root_of(mesh).__dict__.setdefault("_hyper_parallel_spmd_meshes", _MadeMeshes())


def _root_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that a mesh was sliced from, or the mesh itself. torch keeps it in a private attribute."""
    root = getattr(mesh, "_root_mesh", None)
    return mesh if root is None else root


def _ranks(mesh: DeviceMesh) -> Ranks:
    with _disable_current_modes():
        return mesh.mesh.numpy().astype(np.int64)


def _line(ranks: Ranks, *axes: int) -> Ranks:
    """Return the ranks along some axes, in mesh order, through the calling rank."""
    place: list[Any] = [int(at[0]) for at in np.nonzero(ranks == dist.get_rank())]
    for axis in axes:
        place[axis] = slice(None)
    return ranks[tuple(place)]


def _among(ranks: Ranks, others: Ranks) -> npt.NDArray[np.bool_]:
    """Return a mask of the ranks that are among the others."""
    present = np.zeros(1 + max(int(ranks.max()), int(others.max())), dtype=np.bool_)
    present[others.ravel()] = True
    return present[ranks]


def _holds(root: Ranks, ranks: Ranks) -> bool:
    return bool(_among(ranks, root).all())


def _same(left: Ranks, right: Ranks) -> bool:
    return left.shape == right.shape and bool((left == right).all())


def _at(root: Ranks, ranks: Ranks) -> Ranks:
    """Return the coordinates of ranks on a root mesh, axis by axis."""
    position = np.zeros(int(root.max()) + 1, dtype=np.int64)
    position[root.ravel()] = np.arange(root.size)
    return np.stack(np.unravel_index(position[ranks], root.shape))


def _moved(root: Ranks, own: Ranks, data: Ranks) -> Ranks:
    here = _at(root, np.array(dist.get_rank()))
    mine, theirs = _at(root, own), _at(root, data)
    across = mine.reshape(*mine.shape, *(1 for _ in range(data.ndim)))
    down = theirs.reshape(len(theirs), *(1 for _ in range(own.ndim)), *data.shape)
    return across + down - here.reshape(len(here), *(1 for _ in range(own.ndim + data.ndim)))


# Names and errors


def _name(mesh: DeviceMesh, axis: int) -> str | None:
    return mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else None


def _distinct(names: Sequence[str | None]) -> tuple[str, ...]:
    """Invent missing names, and change later names that are taken.

    >>> _distinct(["tp", None, "tp"])
    ('tp', 'axis_1', 'tp_2')
    """
    given = [f"axis_{index}" if name is None else name for index, name in enumerate(names)]
    taken: list[str] = []
    for index, name in enumerate(given):
        others = {*taken, *given[index + 1 :]} if name in taken or names[index] is None else set()
        choice, number = name, index
        while choice in others:
            choice, number = f"{name}_{number}", number + 1
        taken.append(choice)
    return tuple(taken)


def _both(param_mesh: DeviceMesh, data_mesh: DeviceMesh) -> str:
    return f"parameter's mesh: {describe_mesh(param_mesh)}   data mesh: {describe_mesh(data_mesh)}"
