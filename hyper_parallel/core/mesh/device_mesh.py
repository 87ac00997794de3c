"""Meshes as values: axis names, axis sizes and the rank at each position; and torch's DeviceMesh, read as a value.

A value has no process group. This module also flattens and re-orders a DeviceMesh.
"""

import math
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from hyper_parallel.core.common.checks import check, check_listed, read_int
from hyper_parallel.core.common.errors import InvalidValue, nearest
from hyper_parallel.core.common.groups import forget_past_groups

Ranks = range | tuple[int, ...]


class MeshAxes:
    """Names, sizes and ranks of a mesh's axes; immutable, and cheap to compare even for 100,000 ranks.

    >>> axes = MeshAxes((2, 4), ("dp", "tp"), range(8))
    >>> axes.index("tp"), axes.position(5), axes.coordinates(5), str(axes)
    (1, 5, (1, 1), 'dp=2, tp=4')

    All layouts called from one mesh share an instance, because its hash is computed once. `check_axes` checks the
    arguments.

    Args:
        sizes: ranks along each axis.
        names: one name per axis.
        ranks: the rank at each mesh position, last axis fastest; evenly spaced ranks are kept as a `range`.
    """

    __slots__ = ("_hash", "names", "ranks", "sizes")

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    ranks: Ranks

    def __init__(self, sizes: tuple[int, ...], names: tuple[str, ...], ranks: Ranks) -> None:
        self.sizes = sizes
        self.names = names
        self.ranks = ranks
        self._hash = hash((sizes, names, ranks))

    @property
    def has_default_ranks(self) -> bool:
        """True if position and rank are the same number."""
        return self.ranks == range(len(self.ranks))

    def index(self, name: str) -> int:
        """Return the axis index of a name that is known to exist."""
        return self.names.index(name)

    def position(self, rank: int) -> int:
        """Return the position of a rank on the mesh, last axis fastest.

        >>> MeshAxes((2,), ("dp",), range(4, 8, 2)).position(6)
        1

        Raises:
            ValueError: the rank is not on the mesh.
        """
        try:
            return self.ranks.index(rank)
        except ValueError:
            seen = f"mesh: {self}   ranks: {describe_ranks(self.ranks)}"
            hint = f"rank={self.ranks[0]}, or a mesh that holds rank {rank}"
            asked = f"cannot find rank {rank} on the mesh"
            raise InvalidValue(asked, "rank is not one of its ranks", seen, hint) from None

    def coordinates(self, position: int) -> tuple[int, ...]:
        """Return the coordinate along each axis of a mesh position."""
        coordinates = []
        for size in reversed(self.sizes):
            position, coordinate = divmod(position, size)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, MeshAxes):
            return NotImplemented
        mine, theirs = (self._hash, self.sizes, self.names), (other._hash, other.sizes, other.names)
        return mine == theirs and self.ranks == other.ranks

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type["MeshAxes"], tuple[tuple[int, ...], tuple[str, ...], Ranks]]:
        return (MeshAxes, (self.sizes, self.names, self.ranks))  # str hashes differ between processes

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


def check_axes(shape: Any, names: Any, rank_list: Any = None) -> MeshAxes:
    """Check a user's arguments for a mesh, and return it as a value.

    >>> str(check_axes((2, 4), ("dp", "tp")))
    'dp=2, tp=4'

    Args:
        shape: ranks along each axis, each at least 1.
        names: one name per axis.
        rank_list: the rank at each position, last axis fastest; None means 0, 1, 2, ...

    Raises:
        TypeError: not sequences, a size or rank that is no int, a name that is no str.
        ValueError: no axes, a size below 1, a name that is "" or "None" or repeated, lengths that differ, ranks of the
            wrong number, repeated or negative.
    """
    asked = "cannot make a Layout"
    seen = f"shape: {shape!r}   names: {names!r}"
    check(asked, "sequence", 'names=("dp", "tp")', names=names)
    sizes, labels = tuple(shape), tuple(names)
    if len(sizes) != len(labels):
        blame = f"names has {len(labels)} entries and shape has {len(sizes)}"
        raise InvalidValue(asked, blame, seen, "one name per axis")
    if not sizes:
        raise InvalidValue(asked, "shape has no axes", seen, 'one axis of size 1: Layout((1,), ("dp",))')
    for index, name in enumerate(labels):
        check(asked, "str", f"a name such as {'axis' + str(index)!r}", **{f"the name of axis {index}": name})
        if name in ("", "None"):
            blame = f"{name!r}, given for axis {index}, cannot be an axis name"
            raise InvalidValue(asked, blame, seen, 'a name such as "dp"; "None" means a dim that is not split')
        if name in labels[:index]:
            blame = f"axis name {name!r} is given to axes {labels.index(name)} and {index}"
            raise InvalidValue(asked, blame, seen, "a different name for each axis")
    checked = tuple(
        read_int(asked, f"the size of axis {name!r}", size, 1, f"{name}=1, or a mesh without {name!r}")
        for size, name in zip(sizes, labels, strict=True)
    )
    check_listed(asked, **{"number of ranks": math.prod(checked)})
    return MeshAxes(checked, labels, _check_ranks(asked, rank_list, math.prod(checked), seen))


def compact_ranks(ranks: tuple[int, ...]) -> Ranks:
    """Return evenly spaced ranks as a `range`, which compares and hashes in constant time; others unchanged.

    >>> compact_ranks((4, 6, 8)), compact_ranks((7,)), compact_ranks((0, 1, 3))
    (range(4, 10, 2), range(7, 8), (0, 1, 3))
    """
    if len(ranks) == 1:
        return range(ranks[0], ranks[0] + 1)
    step = ranks[1] - ranks[0]
    if step == 0:
        return ranks
    even = range(ranks[0], ranks[0] + step * len(ranks), step)
    return even if tuple(even) == ranks else ranks


def describe_ranks(ranks: Ranks) -> str:
    """Format ranks in a few characters, however many there are.

    >>> describe_ranks(range(8, 16)), describe_ranks((0, 1, 4, 5)), describe_ranks(range(0, 1000, 8))
    ('8..15', '0, 1, 4, 5', '0, 8, ... 992 (125 ranks)')
    """
    if isinstance(ranks, range) and ranks.step == 1 and len(ranks) > 2:
        return f"{ranks[0]}..{ranks[-1]}"
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)} ranks)"


def unknown_axis(asked: str, name: object, axes: MeshAxes, given: str) -> ValueError:
    """Return the error for an unknown axis name, with the nearest known name."""
    seen = f"{given}   mesh: {axes}"
    return InvalidValue(asked, f"no axis is called {name!r}", seen, nearest(name, axes.names))


def _check_ranks(asked: str, rank_list: Any, count: int, seen: str) -> Ranks:
    if rank_list is None:
        return range(count)
    hint = f"rank_list=range({count})"
    if isinstance(rank_list, range) and len(rank_list) == count and min(rank_list) >= 0:
        return rank_list  # fast path for 100,000 ranks, as a range has no repeats
    ranks = [read_int(asked, f"rank_list[{index}]", rank, 0, hint) for index, rank in enumerate(rank_list)]
    if len(ranks) != count:
        blame = f"rank_list has {len(ranks)} ranks and the mesh has {count} places"
        raise InvalidValue(asked, blame, seen, hint)
    if len(set(ranks)) != count:
        once: set[int] = set()
        twice = next(rank for rank in ranks if rank in once or once.add(rank))  # type: ignore[func-returns-value]
        blame = f"rank_list holds rank {twice} more than once"
        raise InvalidValue(asked, blame, seen, hint)
    return compact_ranks(tuple(ranks))


# Guards the table below; a lock is no state of a rank.
_LOCK = threading.Lock()

# Results of `axes_of`, which is a pure function of an immutable mesh, so this is no state of a rank. Weak, because a
# mesh must not outlive its process groups. All access is under the lock.
_AXES = WeakKeyDictionary[DeviceMesh, MeshAxes]()


def axes_of(mesh: Any) -> MeshAxes:
    """Read names, sizes and ranks of a DeviceMesh; a mesh without names gets "axis0", "axis1", ...

    Raises:
        TypeError: not a DeviceMesh.
        ValueError: an axis name that a layout cannot have.
    """
    if not isinstance(mesh, DeviceMesh):
        hint = 'init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")), or Layout((2, 4), ("dp", "tp"))'
        check("cannot read a mesh", "mesh", hint, mesh=mesh)
    forget_past_groups()
    with _LOCK:
        known = _AXES.get(mesh)
    if known is not None:
        return known
    names = mesh.mesh_dim_names or tuple(f"axis{index}" for index in range(mesh.ndim))
    with _disable_current_modes():  # ranks must be real numbers, even under a fake tensor mode
        ranks = mesh.mesh.flatten().tolist()
    axes = check_axes(tuple(mesh.shape), tuple(names), ranks)
    with _LOCK:
        return _AXES.setdefault(mesh, axes)


class OwnerMesh(DeviceMesh):
    """Mesh of the ranks at one place along the last axis of another mesh, of the same axes; only they hold a tensor.

        OwnerMesh(init_device_mesh("cpu", (4,)), 2)  # rank 2 has the whole tensor, the other ranks have none of it

    A DTensor on it has an empty local tensor on all other ranks, as in torch on ranks outside of a mesh. No process
    group is made, and nothing is communicated.

    Args:
        among: The other mesh. Facts for all of its ranks, e.g. the place of the whole tensor, refer to this mesh.
        owner: The place along its last axis.
    """

    def __init__(self, among: DeviceMesh, owner: int) -> None:
        with _disable_current_modes():  # ranks must be real numbers, even under a fake tensor mode
            ranks = among.mesh[..., owner : owner + 1].contiguous()
            super().__init__(among.device_type, ranks, mesh_dim_names=among.mesh_dim_names, _init_backend=False)
        self.among = among
        self.owner = owner

    def __eq__(self, other: object) -> bool:
        # Unequal to a plain mesh of these ranks, because torch caches layouts by mesh and would return the plain one.
        return isinstance(other, OwnerMesh) and self.among == other.among and super().__eq__(other)

    def __hash__(self) -> int:
        return super().__hash__()


def mesh_among(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh whose ranks share a tensor on `mesh`: `among` of an `OwnerMesh`, else `mesh` itself."""
    return mesh.among if isinstance(mesh, OwnerMesh) else mesh


def describe_mesh(mesh: DeviceMesh) -> str:
    """Format the names and sizes of a mesh's axes for messages."""
    names = mesh.mesh_dim_names or [f"axis {index}" for index in range(mesh.ndim)]
    return ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))


def check_member(asked: str, mesh: DeviceMesh, which: str = "the mesh") -> None:
    """Refuse a mesh without the calling rank.

    Args:
        asked: the start of an error message, "cannot ...".
        mesh: the mesh.
        which: name of the mesh in the message, e.g. "the data mesh".

    Raises:
        ValueError: the calling rank is not on the mesh.
    """
    if mesh.get_coordinate() is None:
        with _disable_current_modes():
            seen = (
                f"mesh: {describe_mesh(mesh)}   ranks: {mesh.mesh.flatten().tolist()}   calling rank: {dist.get_rank()}"
            )
        blame, hint = f"the calling rank is not on {which}", "call it on the mesh's ranks only"
        raise InvalidValue(asked, blame, seen, hint)


def check_ascending(asked: str, mesh: DeviceMesh) -> None:
    """Refuse a mesh whose ranks do not ascend along some axis.

    A process group sorts its ranks. Over such an axis, torch would scatter and gather in rank order, but a rank takes
    its shard by its position on the mesh.

    Args:
        asked: the start of an error message, "cannot ...".
        mesh: the mesh.

    Raises:
        ValueError: ranks do not ascend along some axis.
    """
    axes = axes_of(mesh)
    if isinstance(axes.ranks, range) and axes.ranks.step > 0:
        return
    ranks = np.array(axes.ranks).reshape(axes.sizes)
    for axis, name in enumerate(axes.names):
        if (np.diff(ranks, axis=axis) < 0).any():
            blame = f"ranks along axis {name!r} have to ascend, as a process group has no other order"
            hint = "a mesh whose rows and columns ascend, as init_device_mesh makes them"
            raise InvalidValue(asked, blame, f"mesh: {axes}   ranks: {describe_ranks(axes.ranks)}", hint)


def flatten_axes(mesh: DeviceMesh, names: Sequence[str], name: str) -> DeviceMesh:
    """Return the 1-D mesh over several axes of a mesh, under a new name; a second call returns the same mesh.

        dp = flatten_axes(mesh, ("dp_replicate", "dp_shard"), "dp")

    The first call makes a process group, so every rank must make it. torch's redistribute then merges steps over
    these axes and loses rows of dims that do not divide evenly; `hyper_parallel.redistribute` does not.

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
    check(asked, "str", "name='dp'", name=name)
    for part in names:
        if part not in axes.names:
            raise unknown_axis(asked, part, axes, f"names: {names!r}")
    chosen = tuple(names)
    in_order = tuple(part for part in axes.names if part in chosen)
    if not chosen or chosen != in_order:
        blame = "names must hold each axis once, in mesh order" if chosen else "names is empty"
        raise InvalidValue(asked, blame, seen, repr(in_order or axes.names))
    if mesh.mesh_dim_names is None:
        raise InvalidValue(asked, "the mesh has no axis names", seen, "init_device_mesh(..., mesh_dim_names=...)")
    part_mesh = mesh if chosen == axes.names else mesh[chosen]
    try:
        return part_mesh._flatten(name)
    except (ValueError, RuntimeError) as error:
        blame = f"the name {name!r} is taken, by an axis or by other axes flattened before"
        raise InvalidValue(asked, blame, seen, f"another name, such as {'_'.join(chosen)!r}") from error


def reorder_axes(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Return a mesh of the same ranks and process groups with its axes in another order, without communication.

    Two calls with the same arguments return equal meshes.

    Args:
        mesh: a mesh with named axes that contains the calling rank.
        names: all axis names of the mesh, in the new order.

    Raises:
        ValueError: the calling rank is not on the mesh, or names are not exactly its axes.
    """
    axes = axes_of(mesh)
    asked, seen = "cannot re-order the axes of a mesh", f"names: {tuple(names)!r}   mesh: {axes}"
    if sorted(names) != sorted(axes.names):
        raise InvalidValue(asked, "names must hold each axis of the mesh once", seen, repr(axes.names))
    if tuple(names) == axes.names:
        return mesh
    check_member(asked, mesh)
    order = [axes.index(name) for name in names]
    groups = [mesh.get_group(axis) for axis in order]
    with _disable_current_modes():
        ranks = mesh.mesh.permute(order).contiguous()
        return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=tuple(names))
