"""Layouts, read as what a plan needs to know."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.messages import explain
from hyper_parallel.core.dtensor.shards import Splits
from hyper_parallel.core.redistribute.transition import LINEAR, Transition


def check_layout(asked: str, name: str, layout: object, shape: tuple[int, ...], seen: str) -> None:
    """Refuse what is no layout, has no assignment, does not fit the shape, or mixes kinds of reduction.

    Raises:
        TypeError, ValueError: with four parts.
    """
    if not isinstance(layout, Layout):
        blame = f"{name} is a {type(layout).__name__}, not a Layout"
        raise TypeError(explain(asked, blame, f"{name}: {layout!r}", 'Layout((2, 4), ("dp", "tp"))("dp", "None")'))
    layout.splits(len(shape))
    kinds = list(dict.fromkeys(layout.partial.values()))
    if len(kinds) > 1:
        pending = ", ".join(f"{kind} over {axis!r}" for axis, kind in layout.partial.items())
        blame = f"{name} has {pending} pending, and the order in which to take them is nowhere said"
        hint = f"one kind, such as partial={dict.fromkeys(layout.partial, kinds[0])!r}"
        raise ValueError(explain(asked, blame, seen, hint))


def transition_of(src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int) -> Transition | None:
    """Return the transition between two layouts of one mesh, or None when they lie on meshes that do not agree.

    Two meshes of the same ranks in the same order agree when their axes can be cut into the same smaller ones, and the
    tensor divides evenly where that matters.
    """
    if not (src.mesh_shape == dst.mesh_shape and src.alias_name == dst.alias_name and src.rank_list == dst.rank_list):
        pair = _on_common_mesh(src, dst, shape)
        if pair is None:
            return None
        src, dst = pair
    sizes, names = src.mesh_shape, src.alias_name
    before = _pending(src)
    after = _pending(dst)
    keeps, times, over = [], 1, 1
    for axis in before:
        old, new = before[axis], after.get(axis)
        if new is not None and (old == new or {old, new} <= LINEAR):
            keeps.append(axis)
            times *= sizes[axis] if (old, new) == ("sum", "avg") else 1
            over *= sizes[axis] if (old, new) == ("avg", "sum") else 1
    reduces = tuple(axis for axis in before if axis not in keeps)
    opens = tuple(axis for axis in after if axis not in keeps)
    full = shape or (1,)
    return Transition(
        sizes=sizes,
        names=names,
        ranks=src._axes.ranks,
        shape=full,
        src=_real(src, len(shape)) if shape else ((),),
        dst=_real(dst, len(shape)) if shape else ((),),
        reduces=reduces,
        reduction=before[reduces[0]] if reduces else None,
        keeps=tuple(keeps),
        opens=opens,
        opening=after[opens[0]] if opens else None,
        times=times,
        over=over,
        itemsize=itemsize,
    )


def _pending(layout: Layout) -> dict[int, str]:
    """Return the pending reductions by axis index, without axes of one rank."""
    names = layout.alias_name
    pending = {names.index(name): kind for name, kind in layout.partial.items()}
    return {axis: kind for axis, kind in pending.items() if layout.mesh_shape[axis] > 1}


def _real(layout: Layout, ndim: int) -> Splits:
    """Return the splits per dim, without axes of one rank."""
    sizes = layout.mesh_shape
    return tuple(tuple(axis for axis in chain if sizes[axis] > 1) for chain in layout.splits(ndim))


def _on_common_mesh(src: Layout, dst: Layout, shape: tuple[int, ...]) -> tuple[Layout, Layout] | None:
    """Write two layouts on one mesh whose axes are pieces of the axes of both, or return None."""
    if src.rank_list != dst.rank_list:
        return None
    strides = sorted({*_strides(src.mesh_shape), *_strides(dst.mesh_shape)})
    if any(large % small for small, large in itertools.pairwise(strides)):
        return None
    sizes = [large // small for small, large in itertools.pairwise(strides)][::-1] or [1]
    places = strides[:-1][::-1] or [1]  # the stride of each small axis
    mesh = Layout(sizes, [f"piece{index}" for index in range(len(sizes))], src.rank_list)
    pair = [_in_pieces(layout, mesh, places, shape) for layout in (src, dst)]
    return None if pair[0] is None or pair[1] is None else (pair[0], pair[1])


def _strides(sizes: Sequence[int]) -> list[int]:
    """Return the stride of each axis, and the number of all ranks.

    >>> _strides((2, 4))
    [1, 4, 8]
    """
    found = [1]
    for size in reversed(sizes):
        found.append(found[-1] * size)
    return found


def _in_pieces(layout: Layout, mesh: Layout, places: Sequence[int], shape: tuple[int, ...]) -> Layout | None:
    """Write a layout on the mesh of pieces; None where cutting an axis in two would split a dim otherwise."""
    sizes = layout.mesh_shape
    strides = list(reversed(_strides(sizes)[:-1]))
    pieces: list[tuple[str, ...]] = []
    for size, stride in zip(sizes, strides, strict=True):
        mine = [name for name, place in zip(mesh.alias_name, places, strict=True) if stride <= place < stride * size]
        pieces.append(tuple(mine))
    entries = []
    for dim, chain in enumerate(layout.splits(len(shape))):
        cut = any(len(pieces[axis]) > 1 for axis in chain)
        if cut and shape[dim] % math.prod(sizes[axis] for axis in chain):
            return None
        entries.append(tuple(name for axis in chain for name in pieces[axis]) or None)
    partial = {name: kind for axis, kind in layout.partial.items() for name in pieces[layout.alias_name.index(axis)]}
    return mesh(*entries, partial=partial)
