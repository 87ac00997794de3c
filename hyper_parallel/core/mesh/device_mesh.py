"""torch's DeviceMesh, read as a value, flattened, and re-ordered."""

import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from hyper_parallel.core.common.checks import check
from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.mesh.axes import MeshAxes, check_axes, unknown_axis

# Guards the table below; it is no state of a rank, but a lock.
_LOCK = threading.Lock()

# What `axes_of` once read from a mesh: a pure function of a mesh that never changes, so no state of a rank. Weak, so
# that no mesh outlives its process groups; all access is under the lock.
_AXES = WeakKeyDictionary[DeviceMesh, MeshAxes]()


def axes_of(mesh: Any) -> MeshAxes:
    """Return names, sizes and ranks of a DeviceMesh; a mesh without names gets "axis0", "axis1", ...

    Raises:
        TypeError: not a DeviceMesh.
        ValueError: an axis name that a layout cannot have.
    """
    if not isinstance(mesh, DeviceMesh):
        hint = 'init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")), or Layout((2, 4), ("dp", "tp"))'
        check("cannot read a mesh", "mesh", hint, mesh=mesh)
    with _LOCK:
        known = _AXES.get(mesh)
    if known is not None:
        return known
    names = mesh.mesh_dim_names or tuple(f"axis{index}" for index in range(mesh.ndim))
    with _disable_current_modes():  # the ranks are real numbers under a fake tensor mode too
        ranks = mesh.mesh.flatten().tolist()
    axes = check_axes(tuple(mesh.shape), tuple(names), ranks)
    with _LOCK:
        return _AXES.setdefault(mesh, axes)


class OwnerMesh(DeviceMesh):
    """The ranks at one place along the last axis of a mesh, which hold a tensor among them: a mesh of the same axes.

        OwnerMesh(init_device_mesh("cpu", (4,)), 2)  # rank 2 has all of a tensor, and the other ranks have none of it

    A DTensor on it has an empty local tensor on all other ranks, as torch has it where a rank is not on the mesh. No
    process group is made, and nothing is communicated.

    Args:
        among: The mesh. What is known of the tensor to its other ranks, such as where to find all of it, is said there.
        owner: The place along its last axis.
    """

    def __init__(self, among: DeviceMesh, owner: int) -> None:
        with _disable_current_modes():  # the ranks are real numbers under a fake tensor mode too
            ranks = among.mesh[..., owner : owner + 1].contiguous()
            super().__init__(among.device_type, ranks, mesh_dim_names=among.mesh_dim_names, _init_backend=False)
        self.among = among
        self.owner = owner

    def __eq__(self, other: object) -> bool:
        # Never equal to a plain mesh of these ranks: torch caches layouts by their mesh, and would give the plain one.
        return isinstance(other, OwnerMesh) and self.among == other.among and super().__eq__(other)

    def __hash__(self) -> int:
        return super().__hash__()


def mesh_among(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh whose ranks share a tensor on `mesh`: that of an `OwnerMesh`'s other ranks too, else `mesh`."""
    return mesh.among if isinstance(mesh, OwnerMesh) else mesh


def describe_mesh(mesh: DeviceMesh) -> str:
    """Return the names and sizes of a mesh's axes, for messages."""
    names = mesh.mesh_dim_names or [f"axis {index}" for index in range(mesh.ndim)]
    return ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))


def check_member(asked: str, mesh: DeviceMesh, which: str = "the mesh") -> None:
    """Refuse a mesh that the calling rank is not on.

    Args:
        asked: the start of an error message, "cannot ...".
        mesh: the mesh.
        which: what to call it.

    Raises:
        ValueError: it is not.
    """
    if mesh.get_coordinate() is None:
        with _disable_current_modes():
            seen = (
                f"mesh: {describe_mesh(mesh)}   ranks: {mesh.mesh.flatten().tolist()}   calling rank: {dist.get_rank()}"
            )
        blame, hint = f"the calling rank is not on {which}", "call it on the mesh's ranks only"
        raise ValueError(explain(asked, blame, seen, hint))


def flatten_axes(mesh: DeviceMesh, names: Sequence[str], name: str) -> DeviceMesh:
    """Return the 1-D mesh over several axes of a mesh, under a new name; the second call returns the first's mesh.

        dp = flatten_axes(mesh, ("dp_replicate", "dp_shard"), "dp")

    The first call makes a process group, so every rank must make it. torch's own redistribute then merges steps over
    these axes, which loses rows of dims that do not divide evenly; `hyper_parallel.redistribute` does not.

    Args:
        mesh: a mesh with named axes.
        names: the axes to flatten, in mesh order; they need not be neighbours.
        name: the name of the result's only axis.

    Raises:
        TypeError: not a DeviceMesh, names that are no sequence of str, a name that is no str.
        ValueError: an axis that does not exist or is given twice, axes out of mesh order, a name that is taken.
    """
    axes = axes_of(mesh)
    seen = f"names: {names!r}   name: {name!r}   mesh: {axes}"
    asked = f"cannot flatten axes into {name!r}"
    check(asked, "list", f"names={axes.names!r}", names=names)
    check(asked, "str", "name='dp'", name=name)
    for part in names:
        if part not in axes.names:
            raise unknown_axis(asked, part, axes, f"names: {names!r}")
    chosen = tuple(names)
    in_order = tuple(part for part in axes.names if part in chosen)
    if not chosen or chosen != in_order:
        blame = "names must hold each axis once, in mesh order" if chosen else "names is empty"
        raise ValueError(explain(asked, blame, seen, repr(in_order or axes.names)))
    if mesh.mesh_dim_names is None:
        raise ValueError(
            explain(asked, "the mesh has no axis names", seen, "init_device_mesh(..., mesh_dim_names=...)")
        )
    part_mesh = mesh if chosen == axes.names else mesh[chosen]
    try:
        return part_mesh._flatten(name)
    except (ValueError, RuntimeError) as error:
        blame = f"the name {name!r} is taken, by an axis or by other axes flattened before"
        raise ValueError(explain(asked, blame, seen, f"another name, such as {'_'.join(chosen)!r}")) from error


def reorder_axes(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Return a mesh of the same ranks and process groups with its axes in another order; nothing is communicated.

    Two calls with the same arguments return equal meshes.

    Args:
        mesh: a mesh with named axes that the calling rank is on.
        names: all axis names of the mesh, in the new order.

    Raises:
        ValueError: the calling rank is not on the mesh, or names are not exactly its axes.
    """
    axes = axes_of(mesh)
    asked, seen = "cannot re-order the axes of a mesh", f"names: {tuple(names)!r}   mesh: {axes}"
    if sorted(names) != sorted(axes.names):
        raise ValueError(explain(asked, "names must hold each axis of the mesh once", seen, repr(axes.names)))
    if tuple(names) == axes.names:
        return mesh
    check_member(asked, mesh)
    order = [axes.index(name) for name in names]
    groups = [mesh.get_group(axis) for axis in order]
    with _disable_current_modes():
        ranks = mesh.mesh.permute(order).contiguous()
        return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=tuple(names))
