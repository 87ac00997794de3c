"""Conversion of layouts to torch: placements and meshes of DTensors, and DTensors made of parts.

A DTensor can express less than a layout. If several axes split one dim against mesh order, torch uses strided shards.
They are right for even splits, but for uneven splits torch contradicts itself. Such a DTensor gets a mesh of the same
process groups with its axes in the order of the splits, because there `Shard` is enough.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.checks import check_shape
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.dtensor import ownership
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement
from hyper_parallel.core.dtensor.spelling import check_even, uneven_dim
from hyper_parallel.core.mesh.device_mesh import reorder_axes
from hyper_parallel.platform import get_platform

layout_of = Layout.of


def to_placements(layout: Layout, global_shape: Sequence[int]) -> tuple[Placement, ...]:
    """Return torch's placements for a tensor of this shape on the layout's own mesh.

    >>> layout = Layout((2, 4), ("dp", "tp"))
    >>> to_placements(layout("dp", "tp"), (5, 7))
    (Shard(dim=0), Shard(dim=1))
    >>> to_placements(layout(("tp", "dp")), (16,))
    (_StridedShard(dim=0, sf=4), Shard(dim=0))

    Args:
        layout: a layout with an assignment.
        global_shape: the full tensor's sizes, in elements.

    Raises:
        TypeError: a size that is no int.
        ValueError: several kinds of reduction pending; a dim of a size that does not divide evenly, split against mesh
            order; more entries than dims.
    """
    shape = check_shape(global_shape)
    resolved = _check_reductions(layout).placement_to_tensor_map(len(shape))
    _check_even("cannot make a DTensor of this shape", resolved, shape)
    placements = resolved.placements
    assert placements is not None, "a layout with a tensor map has placements"
    return placements


def to_torch(layout: Layout, global_shape: Sequence[int]) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return the mesh and the placements of a DTensor with this layout, without communication.

    The mesh is the layout's own, unless an uneven split runs against its order. Then it is a mesh of the same ranks and
    process groups with its axes in split order, and all shards are plain. Equal arguments give equal meshes.

    Args:
        layout: a layout with an assignment and a mesh.
        global_shape: the full tensor's sizes, in elements.

    Raises:
        TypeError: a size that is no int.
        ValueError: no mesh; several kinds of reduction pending; more entries than dims; an uneven split against mesh
            order on a mesh without the calling rank.
    """
    shape = check_shape(global_shape)
    resolved = _check_reductions(layout).placement_to_tensor_map(len(shape))
    mesh = layout.mesh
    if mesh is None:
        hint = "Layout.from_device_mesh(mesh)(...), or layout.with_mesh(mesh)"
        blame = "the layout was made without a DeviceMesh"
        raise InvalidValue("cannot make a DTensor", blame, f"layout: {layout}", hint)
    if uneven_dim(layout.mesh_shape, resolved.splits(len(shape)), shape) is not None:
        plain = in_split_order(resolved, len(shape))
        if mesh.get_coordinate() is None:
            _check_even("cannot make a DTensor off the mesh", resolved, shape)
        return reorder_axes(mesh, plain.alias_name), to_placements(plain, shape)
    return mesh, to_placements(resolved, shape)


def in_split_order(layout: Layout, ndim: int) -> Layout:
    """Return the layout that gives every rank the same part, on a mesh whose axes run in split order.

    >>> layout = Layout((3, 2), ("dp", "tp"))(("tp", "dp"), "None")
    >>> in_split_order(layout, 2)
    Layout((2, 3), ('tp', 'dp'), (0, 2, 4, 1, 3, 5))(('tp', 'dp'), 'None')

    A layout in split order is returned unchanged. The result has no `mesh`; `to_torch` returns one.

    Args:
        layout: a layout with an assignment.
        ndim: dims of the tensor.

    Raises:
        ValueError: no assignment yet, more entries than ndim.
    """
    splits = layout.splits(ndim)
    order = ownership.split_order(len(layout.mesh_shape), splits)
    if order == tuple(range(len(order))):
        return layout
    sizes, names, ranks = layout.mesh_shape, layout.alias_name, layout.rank_list
    moved = [ranks[position] for position in ownership.reordered_positions(sizes, order)]
    mesh = Layout([sizes[axis] for axis in order], [names[axis] for axis in order], moved)
    resolved = layout.placement_to_tensor_map(ndim).alias_placements
    assert resolved is not None, "a layout with a tensor map has alias placements"
    return mesh(*resolved, partial=layout.partial)


def _check_reductions(layout: Layout) -> Layout:
    kinds = list(dict.fromkeys(layout.partial.values()))
    if len(kinds) > 1:
        pending = ", ".join(f"{kind} over {name!r}" for name, kind in layout.partial.items())
        blame = f"{pending} are pending, and torch keeps no order between kinds of reduction"
        hint = f"one kind, such as partial={dict.fromkeys(layout.partial, kinds[0])!r}, or reduce over one axis first"
        raise InvalidValue("cannot make a DTensor", blame, f"layout: {layout}", hint)
    return layout


def _check_even(asked: str, layout: Layout, shape: Sequence[int]) -> None:
    reductions = tuple(layout.partial.get(name) for name in layout.alias_name)
    check_even(asked, layout.axes, layout.splits(len(shape)), reductions, shape)


# -- DTensors of parts, and parts of DTensors --------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def torch_form(layout: Layout, shape: tuple[int, ...]) -> tuple[tuple[str, ...] | None, tuple[Placement, ...]]:
    """Return torch's placements for a layout, and their order of axes if it is not the mesh's."""
    plain = in_split_order(layout, len(shape))
    try:
        return None, to_placements(layout, shape)
    except ValueError:
        if plain is layout:
            raise
        return plain.alias_name, to_placements(plain, shape)


def build(local: torch.Tensor, layout: Layout, shape: Sequence[int]) -> DTensor:
    """Wrap a rank's part as a DTensor, without checks and without communication."""
    names, placements = torch_form(layout, tuple(shape))
    mesh = layout.mesh
    assert mesh is not None, "the layout has been given a mesh"
    if names is not None:
        mesh, placements = to_torch(layout, shape)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride_like(local, shape)
    )


def stride_like(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return strides for the full tensor in the memory format of a part: the same order of dims and the same gaps.

    torch decides by these strides, not the part's, whether a view is possible.
    """
    if local.is_contiguous() or local.dim() != len(shape):
        return contiguous_stride(shape)
    strides, behind = list(local.stride()), 1
    for dim in reversed(range(local.dim())):
        if local.size(dim) == 1:  # torch ignores the stride of a dim of size 1
            strides[dim] = behind
        behind = max(behind, strides[dim] * local.size(dim))
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    dense, part = (contiguous_stride([sizes[dim] for dim in order]) for sizes in (shape, local.shape))
    return tuple(-(-dense[order.index(dim)] * strides[dim] // part[order.index(dim)]) for dim in range(len(shape)))


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor whose last dim is the fastest.

    >>> contiguous_stride((4, 3, 2))
    (6, 2, 1)
    """
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def local_tensor(x: DTensor) -> torch.Tensor:
    """Return the local tensor of x, with its gradient, after its communication is complete."""
    local = x.to_local()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def on_mesh_device(local: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Move a local tensor to the device of its mesh's process groups, unless it is there or on meta.

    A shard may be kept on the host. On ranks outside of the mesh, torch puts results on the CPU, whatever the mesh's
    device. With nccl or hccl alone, an empty CPU tensor cannot even be received into.
    """
    if local.device.type in (mesh.device_type, "meta"):
        return local
    return local.to(device_of(local, mesh))


def device_of(local: torch.Tensor, mesh: DeviceMesh) -> torch.device:
    """Return the device on which a rank with this local tensor communicates over a mesh."""
    return local.device if local.device.type == mesh.device_type else get_platform(mesh.device_type).device()
