"""Two layouts on a mesh of smaller axes: those that two meshes have in common, or that nodes cut the axes into."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.redistribute.nodes import Nodes

Pair = tuple[Layout, Layout, tuple[str, ...]]
"""Two layouts of one mesh, and per axis of it the name of the axis that it is a piece of."""


def on_common_mesh(src: Layout, dst: Layout, shape: tuple[int, ...]) -> Pair | None:
    """Write two layouts of the same ranks on one mesh, whose axes are pieces of the axes of both.

    >>> mesh, flat = Layout((2, 4), ("dp", "tp")), Layout((8,), ("all",))
    >>> pair = on_common_mesh(mesh("tp"), flat("all"), (16,))
    >>> pair[1].mesh_shape, pair[2]
    ((2, 4), ('dp', 'tp'))

    Returns:
        The layouts and the names of the source's axes, or None when there is no such mesh.
    """
    if src._axes.ranks != dst._axes.ranks:
        return None
    strides = sorted({*_strides(src.mesh_shape), *_strides(dst.mesh_shape)})
    if any(large % small for small, large in itertools.pairwise(strides)):
        return None
    places = strides[:-1][::-1] or [1]  # the stride of each small axis
    sizes = [large // small for small, large in itertools.pairwise(strides)][::-1] or [1]
    pieces = [_pieces_between(layout, places) for layout in (src, dst)]
    pair = _write(src, dst, sizes, pieces, shape)
    if pair is None:
        return None
    owners = [name for name, mine in zip(src.alias_name, pieces[0], strict=True) for _ in mine]
    return (*pair, tuple(owners) or src.alias_name[:1])


def cut_at_nodes(src: Layout, dst: Layout, names: tuple[str, ...], shape: tuple[int, ...], ranks_per_node: int) -> Pair:
    """Cut each axis of two layouts of one mesh in two, so that along the inner piece all ranks share a node.

    Where nodes do not cut an axis into equal pieces, or the tensor does not divide evenly, nothing is cut.
    """
    sizes = src.mesh_shape
    nodes = Nodes(src._axes.ranks, sizes, ranks_per_node)
    near = [nodes.cut(axis) for axis in range(len(sizes))]
    cut = [axis for axis, size in enumerate(sizes) if 1 < near[axis] < size]
    if not cut:
        return src, dst, names
    smaller: list[int] = []
    owners: list[str] = []
    pieces: list[tuple[int, ...]] = []
    for axis, size in enumerate(sizes):
        mine = [size // near[axis], near[axis]] if axis in cut else [size]
        pieces.append(tuple(range(len(smaller), len(smaller) + len(mine))))
        smaller += mine
        owners += [names[axis]] * len(mine)
    pair = _write(src, dst, smaller, [pieces, pieces], shape)
    return (*pair, tuple(owners)) if pair is not None else (src, dst, names)


def _strides(sizes: Sequence[int]) -> list[int]:
    """Return the stride of each axis, and the number of all ranks.

    >>> _strides((2, 4))
    [1, 4, 8]
    """
    found = [1]
    for size in reversed(sizes):
        found.append(found[-1] * size)
    return found


def _pieces_between(layout: Layout, places: Sequence[int]) -> list[tuple[int, ...]]:
    """Return, per axis of a layout, the small axes that it consists of, told by their strides."""
    sizes = layout.mesh_shape
    strides = reversed(_strides(sizes)[:-1])
    return [
        tuple(index for index, place in enumerate(places) if stride <= place < stride * size)
        for size, stride in zip(sizes, strides, strict=True)
    ]


def _write(
    src: Layout, dst: Layout, sizes: Sequence[int], pieces: Sequence[Sequence[tuple[int, ...]]], shape: tuple[int, ...]
) -> tuple[Layout, Layout] | None:
    """Write both layouts on a mesh of these sizes, or return None if the tensor does not divide evenly."""
    mesh = Layout(sizes, [f"piece{index}" for index in range(len(sizes))], src._axes.ranks)
    first, second = (_in_pieces(layout, mesh, mine, shape) for layout, mine in zip((src, dst), pieces, strict=True))
    return None if first is None or second is None else (first, second)


def _in_pieces(
    layout: Layout, mesh: Layout, pieces: Sequence[tuple[int, ...]], shape: tuple[int, ...]
) -> Layout | None:
    """Write a layout on the mesh of pieces; None where cutting an axis in two would split a dim otherwise."""
    names, entries = mesh.alias_name, []
    for size, chain in zip(shape, layout.splits(len(shape)), strict=True):
        cut = any(len(pieces[axis]) > 1 for axis in chain)
        if cut and size % math.prod(layout.mesh_shape[axis] for axis in chain):
            return None
        entries.append(tuple(names[piece] for axis in chain for piece in pieces[axis]) or None)
    pending = [(kind, pieces[layout.alias_name.index(axis)]) for axis, kind in layout.partial.items()]
    return mesh(*entries, partial={names[piece]: kind for kind, mine in pending for piece in mine})
