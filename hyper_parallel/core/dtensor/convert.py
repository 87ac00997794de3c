"""Layouts to and from torch: placements and the mesh of a DTensor, and the layout of a DTensor.

A DTensor can say less than a layout. Where several axes split one dim against mesh order, torch writes strided shards;
they are right when the split is even, and torch contradicts itself when it is not. Then the same tensor is carried on a
mesh whose axes run in split order, made from the same process groups, on which every split is plain.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.checks import check_shape
from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.dtensor import shards, strided
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.forms import write_alias
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement
from hyper_parallel.core.dtensor.torch_form import is_strided
from hyper_parallel.core.mesh.axes import MeshAxes
from hyper_parallel.core.mesh.device_mesh import axes_of, reorder_axes


def to_placements(layout: Layout, global_shape: Sequence[int]) -> tuple[Placement, ...]:
    """Return torch's placements for a tensor of this shape on the layout's own mesh.

    >>> layout = Layout((2, 4), ("dp", "tp"))
    >>> to_placements(layout("dp", "tp"), (5, 7))
    (Shard(dim=0), Shard(dim=1))
    >>> to_placements(layout(("tp", "dp")), (16,))
    (_StridedShard(dim=0, sf=4), Shard(dim=0))

    Args:
        layout: a layout with an assignment.
        global_shape: the whole tensor's sizes, in elements.

    Raises:
        TypeError: a size that is no int.
        ValueError: several kinds of reduction pending; a dim of a size that does not divide evenly, split against mesh
            order; more entries than dims.
    """
    shape = check_shape(global_shape, f"layout: {layout}")
    resolved = _check_reductions(layout).placement_to_tensor_map(len(shape))
    for dim, axes in _uneven(resolved, shape):
        raise _uneven_error(resolved, shape, dim, axes, "cannot make a DTensor of this shape")
    placements = resolved.placements
    assert placements is not None, "a layout with a tensor map has placements"
    return placements


def to_torch(layout: Layout, global_shape: Sequence[int]) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return the mesh and the placements of a DTensor with this layout; nothing is communicated.

    The mesh is the layout's own, unless an uneven split runs against its order: then it is one of the same ranks and
    process groups with its axes in split order, and all shards are plain. Equal arguments give equal meshes.

    Args:
        layout: a layout with an assignment and a mesh.
        global_shape: the whole tensor's sizes, in elements.

    Raises:
        TypeError: a size that is no int.
        ValueError: no mesh; several kinds of reduction pending; more entries than dims; an uneven split against mesh
            order on a mesh that the calling rank is not on.
    """
    shape = check_shape(global_shape, f"layout: {layout}")
    resolved = _check_reductions(layout).placement_to_tensor_map(len(shape))
    mesh = layout.mesh
    if mesh is None:
        hint = "Layout.from_device_mesh(mesh)(...), or layout.with_mesh(mesh)"
        blame = "the layout was made without a DeviceMesh"
        raise ValueError(explain("cannot make a DTensor", blame, f"layout: {layout}", hint))
    for dim, axes in _uneven(resolved, shape):
        plain = in_split_order(resolved, len(shape))
        if mesh.get_coordinate() is None:
            raise _uneven_error(resolved, shape, dim, axes, "cannot make a DTensor off the mesh")
        return reorder_axes(mesh, plain.alias_name), to_placements(plain, shape)
    return mesh, to_placements(resolved, shape)


def in_split_order(layout: Layout, ndim: int) -> Layout:
    """Return the layout that gives every rank the same part, on a mesh whose axes run in split order.

    >>> layout = Layout((3, 2), ("dp", "tp"))(("tp", "dp"), "None")
    >>> in_split_order(layout, 2)
    Layout((2, 3), ('tp', 'dp'), (0, 2, 4, 1, 3, 5))(('tp', 'dp'), 'None')

    A layout that is in order already is returned as it is. The result has no `mesh`; see `to_torch` for one that has.

    Args:
        layout: a layout with an assignment.
        ndim: dims of the tensor.

    Raises:
        ValueError: no assignment yet, more entries than ndim.
    """
    splits = layout.splits(ndim)
    order = strided.split_order(len(layout.mesh_shape), splits)
    if order == tuple(range(len(order))):
        return layout
    sizes, names, ranks = layout.mesh_shape, layout.alias_name, layout.rank_list
    moved = [ranks[position] for position in shards.reordered_positions(sizes, order)]
    mesh = Layout([sizes[axis] for axis in order], [names[axis] for axis in order], moved)
    resolved = layout.placement_to_tensor_map(ndim).alias_placements
    assert resolved is not None, "a layout with a tensor map has alias placements"
    return mesh(*resolved, partial=layout.partial)


def layout_of(x: object) -> Layout:
    """Return the layout of a DTensor, in alias form with one entry per dim; nothing is communicated.

        layout = Layout.of(x)
        layout.alias_placements, layout.mesh

    Args:
        x: a DTensor; on a mesh without names, its axes are called "axis0", "axis1", ...

    Raises:
        TypeError: not a DTensor.
        ValueError: a placement that a layout cannot say: a strided shard that comes from a view, or of an uneven size;
            a masked or bitwise partial.
    """
    if not isinstance(x, DTensor):
        blame = f"x is a {type(x).__name__}, not a DTensor"
        raise TypeError(explain("cannot read a layout", blame, f"x: {type(x)!r}", "distribute_tensor(x, layout) first"))
    return layout_of_spec(x._spec)


def layout_of_spec(spec: Any) -> Layout:
    """Return the layout of the DTensors that have a spec of torch's."""
    layout = _read(axes_of(spec.mesh), spec.placements, getattr(spec, "shard_order", None), spec.shape)
    return Layout._make(layout._axes, layout._splits, layout._specs, layout._partial, spec.mesh)


@lru_cache(maxsize=4096)
def _read(
    axes: MeshAxes, placements: tuple[Placement, ...], order: Sequence[tuple[int, Sequence[int]]] | None, shape: Any
) -> Layout:
    """Return the layout that some placements mean, without a mesh."""
    layout = Layout._make(axes)(*placements).placement_to_tensor_map(len(shape))
    if order and not any(map(is_strided, placements)):
        layout = _in_shard_order(layout, order)
    for dim, chain in _uneven(layout, shape):
        raise _uneven_error(layout, shape, dim, chain, "cannot read the layout of a DTensor")
    return layout


def _check_reductions(layout: Layout) -> Layout:
    kinds = list(dict.fromkeys(layout.partial.values()))
    if len(kinds) > 1:
        pending = ", ".join(f"{kind} over {name!r}" for name, kind in layout.partial.items())
        blame = f"{pending} are pending, and torch keeps no order between kinds of reduction"
        hint = f"one kind, such as partial={dict.fromkeys(layout.partial, kinds[0])!r}, or reduce over one axis first"
        raise ValueError(explain("cannot make a DTensor", blame, f"layout: {layout}", hint))
    return layout


def _uneven(layout: Layout, global_shape: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Return the dims, with their axes, whose split is uneven and against mesh order; sizes of 1 split nothing."""
    found = []
    for dim, axes in enumerate(layout.splits(len(global_shape))):
        real = [axis for axis in axes if layout.mesh_shape[axis] > 1]
        if real != sorted(real) and not shards.is_even(global_shape[dim], layout.mesh_shape, axes):
            found.append((dim, axes))
    return found


def _uneven_error(
    layout: Layout, global_shape: Sequence[int], dim: int, axes: tuple[int, ...], asked: str
) -> ValueError:
    names = [layout.alias_name[axis] for axis in axes]
    size, parts = global_shape[dim], shards.count_parts(layout.mesh_shape, axes)
    fits = [str(fit) for fit in (size // parts * parts, -(-size // parts) * parts) if fit]
    order = tuple(name for name in layout.alias_name if name in names)
    product = " * ".join(f"{name}={layout.mesh_shape[axis]}" for name, axis in zip(names, axes, strict=True))
    blame = (
        f"dim {dim} (size {size}) is split over {' then '.join(map(repr, names))}, against the order of the mesh, "
        f"and {product} does not divide it; torch places such a split in two ways that differ"
    )
    seen = f"global_shape: {tuple(global_shape)!r}   layout: {layout}"
    hint = f"size {' or '.join(fits)} for dim {dim}; {order!r} there; or a mesh with its axes in the order of the split"
    return ValueError(explain(asked, blame, seen, hint))


def _in_shard_order(layout: Layout, order: Sequence[tuple[int, Sequence[int]]]) -> Layout:
    """Return a layout with the axes of each dim in the order that torch keeps beside plain placements."""
    splits = list(layout.splits(len(layout.tensor_map or ())))
    for dim, axes in order:
        splits[dim] = tuple(axes)
    entries = write_alias(layout._axes, tuple(splits))
    return layout(*entries, partial=layout.partial)
