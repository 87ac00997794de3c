"""Layouts, read as what a plan needs to know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.messages import explain
from hyper_parallel.core.dtensor.shards import Splits
from hyper_parallel.core.redistribute.pieces import cut_at_nodes, on_common_mesh
from hyper_parallel.core.redistribute.transition import LINEAR, Transition


def check_layout(asked: str, name: str, layout: object, shape: tuple[int, ...], seen: str) -> Layout:
    """Return a layout, or refuse what is none, has no assignment, does not fit the shape, or mixes kinds of reduction.

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
    return layout


def check_dtype(asked: str, dtype: object) -> torch.dtype:
    """Return a dtype, or refuse what is none.

    Raises:
        TypeError: with four parts.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    blame = f"dtype is a {type(dtype).__name__}, not a torch.dtype"
    named = getattr(torch, str(getattr(dtype, "__name__", dtype)), None)
    hint = str(named) if isinstance(named, torch.dtype) else "torch.float32"
    raise TypeError(explain(asked, blame, f"dtype: {dtype!r}", hint))


def check_countable(asked: str, src: Layout, dst: Layout, shape: Sequence[int], seen: str) -> None:
    """Refuse a tensor so large that the bytes of all ranks together are no 64-bit integer.

    Raises:
        ValueError: with four parts.
    """
    ranks = len(src.rank_list) + len(dst.rank_list)
    if math.prod(shape) * _MOST_BYTES * ranks >= 2**63:
        blame = f"{math.prod(shape):,} elements are more than {len(src.rank_list)} ranks' bytes can be counted for"
        raise ValueError(explain(asked, blame, seen, "a tensor of fewer elements"))


_MOST_BYTES = 16  # of an element: complex128

# Integers that torch stores and does not add; likewise floats of one byte.
_NO_ARITHMETIC = frozenset({torch.uint16, torch.uint32, torch.uint64})


def check_reductions(asked: str, src: Layout, dst: Layout, dtype: torch.dtype, seen: str) -> None:
    """Refuse to take, or to make, pending copies of a dtype that torch cannot reduce.

    Raises:
        TypeError: with four parts.
    """
    for layout, other in ((src, dst), (dst, src)):
        for axis, kind in layout.partial.items():
            stays = src._axes == dst._axes and other.partial.get(axis) == kind
            why = None if stays or layout.mesh_shape[layout.alias_name.index(axis)] == 1 else _no_reduction(kind, dtype)
            if why is not None:
                hint = "a tensor of another dtype, such as x.to(torch.float32)"
                raise TypeError(explain(asked, f"{kind} is pending over {axis!r}, and {why}", seen, hint))


def _no_reduction(kind: str, dtype: torch.dtype) -> str | None:
    """Return why copies of a dtype cannot be reduced; None: they can."""
    if dtype in _NO_ARITHMETIC or (dtype.is_floating_point and dtype.itemsize == 1):
        return f"torch does not compute with {dtype}"
    if dtype.is_complex and kind not in LINEAR:
        return f"torch.distributed has no {kind} of {dtype}"
    return f"there is no average of {dtype}" if dtype == torch.bool and kind == "avg" else None


def task_of(
    src: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype, ranks_per_node: int | None
) -> Transition | None:
    """Return the transition for tensors of some dtype; see `transition_of`."""
    exact = not (dtype.is_floating_point or dtype.is_complex)
    task = transition_of(src, dst, shape, dtype.itemsize, ranks_per_node, exact=exact)
    return replace(task, at_once=True) if task is not None and exact and task.reduction == "avg" else task


def transition_of(
    src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, ranks_per_node: int | None = None, *,
    exact: bool = False,
) -> Transition | None:  # fmt: skip
    """Return the transition between two layouts of one mesh, or None when they lie on meshes that do not agree.

    With `exact`, a pending average does not become a pending sum by dividing the copies, as ints would be rounded.

    Two meshes of the same ranks in the same order agree when their axes can be cut into the same smaller ones, and the
    tensor divides evenly where that matters. Axes that nodes cut are cut likewise, where that is possible.
    """
    names = src.alias_name
    if not (src.mesh_shape == dst.mesh_shape and names == dst.alias_name and src._axes.ranks == dst._axes.ranks):
        common = on_common_mesh(src, dst, shape)
        if common is None:
            return None
        src, dst, names = common
    if ranks_per_node is not None:
        src, dst, names = cut_at_nodes(src, dst, names, shape, ranks_per_node)
    sizes = src.mesh_shape
    before = _pending(src)
    after = _pending(dst)
    keeps, times, over = [], 1, 1
    for axis in before:
        old, new = before[axis], after.get(axis)
        if new is not None and (old == new or ({old, new} <= LINEAR and not (exact and old == "avg"))):
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
