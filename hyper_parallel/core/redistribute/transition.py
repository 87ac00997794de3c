"""The transition between two layouts, read once into axes, ranks, sizes and splits as tuples of ints.

Below `api`, only `read` uses a `Layout`. Two meshes of the same ranks are refined to their common sub-axes. An axis
that reaches over several nodes is cut at the node boundaries.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hyper_parallel.core.common.checks import check, check_shape
from hyper_parallel.core.common.errors import InvalidType, InvalidValue
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.ownership import Splits
from hyper_parallel.core.redistribute.cost import Nodes
from hyper_parallel.core.redistribute.holdings import Counts, Holding, Located

LINEAR = frozenset({"sum", "avg"})


@dataclass(frozen=True)
class LayoutSide:
    """One layout of a tensor. Axes are indices from the left.

    Attributes:
        sizes: ranks along each axis.
        names: the axes' names; sub-axes of one axis all have its name.
        ranks: the rank at each position, last axis fastest.
        shape: the tensor's sizes; (1,) for a scalar.
        splits: per dim the axes that split it, outer first, without axes of size 1.
        pending: the axes of size > 1 with pending copies, all of one kind.
        reduction: the kind of the pending reduction; None without one.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    ranks: range | tuple[int, ...]
    shape: tuple[int, ...]
    splits: Splits
    pending: tuple[int, ...] = ()
    reduction: str | None = None

    @property
    def held(self) -> Located:
        """The part of each rank; for pending copies, its own copy."""
        return Located(Holding(self.sizes, self.shape, self.splits), self.ranks)

    @property
    def needed(self) -> Located:
        """The part that each rank needs; along pending axes only the first rank needs one."""
        return Located(replace(self.held.holding, first=self.pending), self.ranks)

    @property
    def live(self) -> tuple[int, ...]:
        """The axes of size > 1."""
        return tuple(axis for axis, size in enumerate(self.sizes) if size > 1)

    @property
    def reduced(self) -> LayoutSide:
        """The same layout without pending copies."""
        return replace(self, pending=(), reduction=None)

    def ways(self, axes: Iterable[int]) -> int:
        """Return the number of ranks along some axes together."""
        return math.prod(self.sizes[axis] for axis in axes)

    def is_on_mesh_of(self, other: LayoutSide) -> bool:
        """Return True if both lie on one mesh, with the same axes and ranks."""
        return (self.sizes, self.names, self.ranks) == (other.sizes, other.names, other.ranks)


@dataclass(frozen=True)
class Transition:
    """A source and a destination layout, on one mesh or on two.

    Attributes:
        before: the source.
        after: the destination.
        itemsize: bytes per element.
        exact: True for ints and bools, because dividing rounds them.
        scalar: True if the tensor has no dims.
    """

    before: LayoutSide
    after: LayoutSide
    itemsize: int
    exact: bool
    scalar: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's sizes; at least one dim."""
        return self.before.shape

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of both meshes, sorted."""
        return tuple(sorted({*self.before.ranks, *self.after.ranks}))


@dataclass(frozen=True)
class MeshTransition:
    """A transition on one mesh, whose axes may be sub-axes of the layouts' axes.

    Axes are indices from the left. Axes of size 1 take no part. Every axis has one role at the source: it splits a dim
    (`split_axes`), its copies are reduced (`reduces`), its copies stay pending (`keeps`), or its ranks hold the same
    elements (`replica_axes`).

    Attributes:
        sizes: ranks along each axis.
        names: the axes' names.
        ranks: the rank at each position, last axis fastest.
        shape: the tensor's sizes; (1,) for a scalar.
        src: splits at the source, per dim, outer first.
        dst: splits at the destination.
        reduces: axes pending at the source only.
        reduction: kind of reduction over `reduces`; None without such axes.
        keeps: axes pending at both.
        opens: axes pending at the destination only.
        opening: kind of reduction over `opens`; None without such axes.
        times: factor of kept copies, e.g. to turn a pending sum into an average.
        over: divisor of kept copies.
        itemsize: bytes per element.
        at_once: True if copies must be reduced in one step, because an average of ints may be rounded only once.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    ranks: range | tuple[int, ...]
    shape: tuple[int, ...]
    src: Splits
    dst: Splits
    reduces: tuple[int, ...]
    reduction: str | None
    keeps: tuple[int, ...]
    opens: tuple[int, ...]
    opening: str | None
    times: int
    over: int
    itemsize: int
    at_once: bool = False

    @property
    def source(self) -> Holding:
        """The part of each rank at the start, ignoring pending copies."""
        return Holding(self.sizes, self.shape, self.src)

    @property
    def result(self) -> Holding:
        """The part of each rank at the end."""
        return Holding(self.sizes, self.shape, self.dst)

    @cached_property
    def target(self) -> Holding:
        """The part that each rank needs from others: the result, with each element of opening copies at one rank only.

        If the ranks along an opening axis hold different parts, each contributes its own. If they hold the same, the
        first rank contributes it.
        """
        if not self.opens:
            return self.result
        apart = [axis for axis in self.opens if axis in self.split_axes]
        replicas = tuple(axis for axis in self.opens if axis not in self.split_axes)
        held = self.result.restricted(self.src, apart)
        return Holding(held.sizes, held.shape, held.splits, held.combs, None, replicas)

    @property
    def live(self) -> tuple[int, ...]:
        """The axes of size > 1 over which data may move."""
        return tuple(axis for axis, size in enumerate(self.sizes) if size > 1 and axis not in self.keeps)

    @cached_property
    def split_axes(self) -> frozenset[int]:
        """Axes that split a dim at the source."""
        return frozenset(axis for chain in self.src for axis in chain)

    @cached_property
    def wanted_axes(self) -> frozenset[int]:
        """Axes that split a dim at the destination."""
        return frozenset(axis for chain in self.dst for axis in chain)

    @cached_property
    def replica_axes(self) -> tuple[int, ...]:
        """Axes along which ranks hold the same elements at the source."""
        return tuple(a for a in self.live if a not in self.split_axes and a not in self.reduces)

    def ways(self, axes: Iterable[int]) -> int:
        """Return the number of ranks along some axes together."""
        return math.prod(self.sizes[axis] for axis in axes)

    def along(self, counts: Counts, axes: Iterable[int]) -> Counts:
        """Sum counts, for every rank, over the ranks along some axes."""
        return np.broadcast_to(counts.sum(axis=tuple(axes), keepdims=True), self.sizes)


# -- reading layouts ---------------------------------------------------------------------------------------------------


def read(asked: str, src: Layout, dst: Layout, global_shape: Any, dtype: Any) -> Transition:
    """Read two layouts, and refuse those that do not fit the tensor.

    >>> mesh = Layout((2, 4), ("dp", "tp"))
    >>> found = read("cannot plan", mesh("dp", "tp"), mesh(("tp", "dp")), (8, 8), torch.float32)
    >>> found.before.sizes, found.before.splits, found.after.splits
    ((2, 4), ((0,), (1,)), ((1, 0), ()))

    Args:
        asked: the start of an error message, "cannot ...".
        src: the source layout.
        dst: the target layout.
        global_shape: the full tensor's sizes, in elements.
        dtype: the tensor's dtype.

    Raises:
        TypeError: a size that is no int, a wrong `dtype`, or one that torch cannot reduce as requested.
        ValueError: a layout without an assignment, or that does not fit the shape, or with several kinds of pending
            reductions; a tensor whose bytes over all ranks exceed 64 bits.
    """
    shape = check_shape(global_shape)
    seen = f"from: {src}   to: {dst}   global_shape: {shape}"
    before, after = (_read_side(asked, name, layout, shape, seen) for name, layout in (("src", src), ("dst", dst)))
    check(asked, "dtype", dtype=dtype)
    _check_reductions(asked, before, after, dtype, seen)
    _check_countable(asked, before, after, seen)
    exact = not (dtype.is_floating_point or dtype.is_complex)
    return Transition(before, after, dtype.itemsize, exact, scalar=not shape)


def _read_side(asked: str, name: str, layout: Layout, shape: tuple[int, ...], seen: str) -> LayoutSide:
    splits, partial, axes = layout.splits(len(shape)), layout.partial, layout.axes
    kinds = list(dict.fromkeys(partial.values()))
    if len(kinds) > 1:
        pending = ", ".join(f"{kind} over {axis!r}" for axis, kind in partial.items())
        blame = f"{name} has {pending} pending, and the order in which to take them is nowhere said"
        hint = f"one kind, such as partial={dict.fromkeys(partial, kinds[0])!r}"
        raise InvalidValue(asked, blame, seen, hint)
    real = tuple(tuple(axis for axis in chain if axes.sizes[axis] > 1) for chain in splits)
    over = tuple(axis for axis in map(axes.index, partial) if axes.sizes[axis] > 1)
    kind = kinds[0] if over else None
    return LayoutSide(axes.sizes, axes.names, axes.ranks, shape or (1,), real if shape else ((),), over, kind)


_MOST_BYTES = 16  # per element, for complex128


def _check_countable(asked: str, before: LayoutSide, after: LayoutSide, seen: str) -> None:
    """Refuse a tensor whose bytes over all ranks exceed a 64-bit integer."""
    elements = math.prod(before.shape)
    if elements * _MOST_BYTES * (len(before.ranks) + len(after.ranks)) >= 2**63:
        blame = f"{elements:,} elements are more than {len(before.ranks)} ranks' bytes can be counted for"
        raise InvalidValue(asked, blame, seen, "a tensor of fewer elements")


# torch stores these ints but cannot add them; the same is true of one-byte floats.
_NO_ARITHMETIC = frozenset({torch.uint16, torch.uint32, torch.uint64})


def _check_reductions(asked: str, before: LayoutSide, after: LayoutSide, dtype: torch.dtype, seen: str) -> None:
    """Refuse to reduce, or to make, pending copies of a dtype that torch cannot reduce."""
    stay = before.is_on_mesh_of(after) and before.reduction == after.reduction
    for side, other in ((before, after), (after, before)):
        why = None if side.reduction is None else _no_reduction(side.reduction, dtype)
        moved = [axis for axis in side.pending if not (stay and axis in other.pending)]
        if why is not None and moved:
            blame = f"{side.reduction} is pending over {side.names[moved[0]]!r}, and {why}"
            raise InvalidType(asked, blame, seen, "a tensor of another dtype, such as x.to(torch.float32)")


def _no_reduction(kind: str, dtype: torch.dtype) -> str | None:
    """Return the reason why copies of a dtype cannot be reduced; None: they can."""
    if dtype in _NO_ARITHMETIC or (dtype.is_floating_point and dtype.itemsize == 1):
        return f"torch does not compute with {dtype}"
    if dtype.is_complex and kind not in LINEAR:
        return f"torch.distributed has no {kind} of {dtype}"
    if kind != "avg" or dtype.is_floating_point or dtype.is_complex or dtype.itemsize >= 4:
        return None
    return f"there is no average of {dtype}" if dtype == torch.bool else f"sums of {dtype} soon exceed its range"


# -- on one mesh -------------------------------------------------------------------------------------------------------


def on_one_mesh(transition: Transition, ranks_per_node: int | None = None) -> MeshTransition | None:
    """Return a transition with a role for every axis; None if the layouts' meshes do not agree.

    Two meshes of the same ranks in the same order agree if their axes can be cut into common sub-axes, and if dims that
    split over a cut axis divide evenly. Axes that cross nodes are cut at the node boundaries if possible.
    """
    pair: tuple[LayoutSide, LayoutSide] | None = (transition.before, transition.after)
    if not transition.before.is_on_mesh_of(transition.after):
        pair = on_common_mesh(transition.before, transition.after)
    if pair is None:
        return None
    before, after = pair if ranks_per_node is None else cut_at_nodes(*pair, ranks_per_node)
    old, new = before.reduction, after.reduction
    # An average of ints cannot become a sum by dividing the copies, because that would round them.
    stay = old == new or ({old, new} <= LINEAR and not (transition.exact and old == "avg"))
    keeps = tuple(axis for axis in before.pending if axis in after.pending) if stay else ()
    reduces = tuple(axis for axis in before.pending if axis not in keeps)
    opens = tuple(axis for axis in after.pending if axis not in keeps)
    return MeshTransition(
        sizes=before.sizes,
        names=before.names,
        ranks=before.ranks,
        shape=before.shape,
        src=before.splits,
        dst=after.splits,
        reduces=reduces,
        reduction=old if reduces else None,
        keeps=keeps,
        opens=opens,
        opening=new if opens else None,
        times=before.ways(keeps) if (old, new) == ("sum", "avg") else 1,
        over=before.ways(keeps) if (old, new) == ("avg", "sum") else 1,
        itemsize=transition.itemsize,
        at_once=transition.exact and bool(reduces) and old == "avg",
    )


# -- sub-axes: common to two meshes, or from cutting an axis at node boundaries ----------------------------------------


def on_common_mesh(before: LayoutSide, after: LayoutSide) -> tuple[LayoutSide, LayoutSide] | None:
    """Write two layouts of the same ranks on one mesh, whose axes are sub-axes of both meshes.

    >>> mesh, flat = Layout((2, 4), ("dp", "tp")), Layout((8,), ("all",))
    >>> found = read("cannot plan", mesh("tp"), flat("all"), (16,), torch.float32)
    >>> pair = on_common_mesh(found.before, found.after)
    >>> pair[1].sizes, pair[1].names, pair[1].splits
    ((2, 4), ('dp', 'tp'), ((0, 1),))

    Returns:
        Both layouts, on axes with the source's names; None if there is no such mesh.
    """
    if before.ranks != after.ranks:
        return None
    strides = sorted({*_strides(before.sizes), *_strides(after.sizes)})
    if any(large % small for small, large in itertools.pairwise(strides)):
        return None
    places = strides[:-1][::-1] or [1]  # stride of each sub-axis
    sizes = tuple(large // small for small, large in itertools.pairwise(strides))[::-1] or (1,)
    sub_axes = [_sub_axes_of(side.sizes, places) for side in (before, after)]
    owners = tuple(name for name, mine in zip(before.names, sub_axes[0], strict=True) for _ in mine)
    names = owners or before.names[:1]
    first, second = (
        _on_sub_axes(side, sizes, names, mine) for side, mine in zip((before, after), sub_axes, strict=True)
    )
    return None if first is None or second is None else (first, second)


def cut_at_nodes(before: LayoutSide, after: LayoutSide, ranks_per_node: int) -> tuple[LayoutSide, LayoutSide]:
    """Cut each axis of two layouts of one mesh in two, so that all ranks along the inner sub-axis share a node.

    Axes stay whole if nodes do not cut them into equal parts, or if the tensor does not divide evenly.
    """
    nodes = Nodes(before.ranks, before.sizes, ranks_per_node)
    inner = [nodes.cut(axis) for axis in range(len(before.sizes))]
    cut = [axis for axis, size in enumerate(before.sizes) if 1 < inner[axis] < size]
    if not cut:
        return before, after
    sizes: list[int] = []
    names: list[str] = []
    sub_axes: list[tuple[int, ...]] = []
    for axis, size in enumerate(before.sizes):
        mine = [size // inner[axis], inner[axis]] if axis in cut else [size]
        sub_axes.append(tuple(range(len(sizes), len(sizes) + len(mine))))
        sizes += mine
        names += [before.names[axis]] * len(mine)
    first, second = (_on_sub_axes(side, tuple(sizes), tuple(names), sub_axes) for side in (before, after))
    return (before, after) if first is None or second is None else (first, second)


def _strides(sizes: Sequence[int]) -> list[int]:
    """Return the stride of each axis, innermost first, then the number of ranks.

    >>> _strides((2, 4))
    [1, 4, 8]
    """
    found = [1]
    for size in reversed(sizes):
        found.append(found[-1] * size)
    return found


def _sub_axes_of(sizes: Sequence[int], places: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the sub-axes of each axis, found by their strides.

    >>> _sub_axes_of((2, 4), (4, 2, 1))
    [(0,), (1, 2)]
    """
    strides = reversed(_strides(sizes)[:-1])
    return [
        tuple(index for index, place in enumerate(places) if stride <= place < stride * size)
        for size, stride in zip(sizes, strides, strict=True)
    ]


def _on_sub_axes(
    side: LayoutSide, sizes: tuple[int, ...], names: tuple[str, ...], sub_axes: Sequence[tuple[int, ...]]
) -> LayoutSide | None:
    """Write a layout on sub-axes; None if cutting an axis in two would change the parts of a dim."""
    for size, chain in zip(side.shape, side.splits, strict=True):
        if any(len(sub_axes[axis]) > 1 for axis in chain) and size % side.ways(chain):
            return None
    splits = tuple(tuple(sub_axis for axis in chain for sub_axis in sub_axes[axis]) for chain in side.splits)
    pending = tuple(sorted(sub_axis for axis in side.pending for sub_axis in sub_axes[axis]))
    return LayoutSide(sizes, names, side.ranks, side.shape, splits, pending, side.reduction)
