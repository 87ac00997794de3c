"""The transition between two layouts, read once: axes, ranks, sizes and splits as tuples of ints.

Below `api`, only `read` uses a `Layout`. If two meshes have the same ranks, both are refined to the sub-axes that they
have in common. An axis that reaches over several nodes is split where the nodes end.
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
        shape: the tensor's sizes; a scalar is taken as one element in one dim.
        splits: per dim the axes that split it, outer first, without axes of one rank.
        pending: the axes, of more than one rank, over which copies are to be reduced; the same kind over all of them.
        reduction: that kind; None without such axes.
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
        """What each rank holds, of copies to reduce its own."""
        return Located(Holding(self.sizes, self.shape, self.splits), self.ranks)

    @property
    def needed(self) -> Located:
        """What each rank needs: of copies that are made, the first rank along these axes has it all."""
        return Located(replace(self.held.holding, first=self.pending), self.ranks)

    @property
    def live(self) -> tuple[int, ...]:
        """The axes of more than one rank."""
        return tuple(axis for axis, size in enumerate(self.sizes) if size > 1)

    @property
    def reduced(self) -> LayoutSide:
        """The same without copies to reduce."""
        return replace(self, pending=(), reduction=None)

    def ways(self, axes: Iterable[int]) -> int:
        """Return how many ranks there are along some axes together."""
        return math.prod(self.sizes[axis] for axis in axes)

    def is_on_mesh_of(self, other: LayoutSide) -> bool:
        """Return whether both lie on one mesh: the same axes and ranks."""
        return (self.sizes, self.names, self.ranks) == (other.sizes, other.names, other.ranks)


@dataclass(frozen=True)
class Transition:
    """From which layout to which, on one mesh or on two.

    Attributes:
        before: the source.
        after: the destination.
        itemsize: bytes per element.
        exact: whether elements are ints or bools, which are rounded when divided.
        scalar: whether the tensor has no dims.
    """

    before: LayoutSide
    after: LayoutSide
    itemsize: int
    exact: bool
    scalar: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's sizes, at least one."""
        return self.before.shape

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of both meshes, sorted."""
        return tuple(sorted({*self.before.ranks, *self.after.ranks}))


@dataclass(frozen=True)
class MeshTransition:
    """A transition on one mesh, whose axes may be smaller than those of the layouts.

    Axes are indices from the left. Axes of size 1 take no part. Every axis has one role at the source: it splits a dim
    (`split_axes`), copies are to be reduced over it (`reduces`), copies stay as they are over it (`keeps`), or the
    ranks along it hold the same (`replica_axes`).

    Attributes:
        sizes: ranks along each axis.
        names: the axes' names.
        ranks: the rank at each position.
        shape: the tensor's sizes; a scalar is taken as one element in one dim.
        src: splits at the source, per dim, outer first.
        dst: splits at the destination.
        reduces: axes pending at the source, and no longer at the destination.
        reduction: by what; None without such axes.
        keeps: axes pending at both.
        opens: axes pending at the destination only.
        opening: by what; None without such axes.
        times: kept copies are multiplied by this, to turn one linear reduction into the other,
        over: and divided by this.
        itemsize: bytes per element.
        at_once: copies are to be reduced in one step: an average of ints is rounded, once.
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
        """What each rank holds at the start, copies to reduce aside."""
        return Holding(self.sizes, self.shape, self.src)

    @property
    def result(self) -> Holding:
        """What each rank holds in the end."""
        return Holding(self.sizes, self.shape, self.dst)

    @cached_property
    def target(self) -> Holding:
        """What each rank needs from the others: the result, but of copies that open, each element at one of them.

        Where the ranks along an opening axis hold different parts, each contributes its own; where they hold the same,
        the first does.
        """
        if not self.opens:
            return self.result
        apart = [axis for axis in self.opens if axis in self.split_axes]
        replicas = tuple(axis for axis in self.opens if axis not in self.split_axes)
        held = self.result.restricted(self.src, apart)
        return Holding(held.sizes, held.shape, held.splits, held.combs, None, replicas)

    @property
    def live(self) -> tuple[int, ...]:
        """The axes of more than one rank over which anything may move."""
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
        """Axes along which ranks hold the same at the source."""
        return tuple(a for a in self.live if a not in self.split_axes and a not in self.reduces)

    def ways(self, axes: Iterable[int]) -> int:
        """Return how many ranks there are along some axes together."""
        return math.prod(self.sizes[axis] for axis in axes)

    def along(self, counts: Counts, axes: Iterable[int]) -> Counts:
        """Return, on every rank, the sum over the ranks along some axes."""
        return np.broadcast_to(counts.sum(axis=tuple(axes), keepdims=True), self.sizes)


# -- layouts, read -----------------------------------------------------------------------------------------------------


def read(asked: str, src: Layout, dst: Layout, global_shape: Any, dtype: Any) -> Transition:
    """Read both layouts, and refuse what is none or what does not fit.

    >>> mesh = Layout((2, 4), ("dp", "tp"))
    >>> found = read("cannot plan", mesh("dp", "tp"), mesh(("tp", "dp")), (8, 8), torch.float32)
    >>> found.before.sizes, found.before.splits, found.after.splits
    ((2, 4), ((0,), (1,)), ((1, 0), ()))

    Args:
        asked: the start of an error message, "cannot ...".
        src: the layout that the tensor is in.
        dst: the layout that it is to be in.
        global_shape: the full tensor's sizes, in elements.
        dtype: its dtype.

    Raises:
        TypeError: a size that is no int, no dtype, or one that torch cannot reduce as asked.
        ValueError: a layout without an assignment, or that does not fit the shape, or that mixes kinds of reduction;
            more elements than can be counted.
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


_MOST_BYTES = 16  # of an element: complex128


def _check_countable(asked: str, before: LayoutSide, after: LayoutSide, seen: str) -> None:
    """Refuse a tensor so large that the bytes of all ranks together are no 64-bit integer."""
    elements = math.prod(before.shape)
    if elements * _MOST_BYTES * (len(before.ranks) + len(after.ranks)) >= 2**63:
        blame = f"{elements:,} elements are more than {len(before.ranks)} ranks' bytes can be counted for"
        raise InvalidValue(asked, blame, seen, "a tensor of fewer elements")


# Integers that torch stores and does not add; likewise floats of one byte.
_NO_ARITHMETIC = frozenset({torch.uint16, torch.uint32, torch.uint64})


def _check_reductions(asked: str, before: LayoutSide, after: LayoutSide, dtype: torch.dtype, seen: str) -> None:
    """Refuse to take, or to make, pending copies of a dtype that torch cannot reduce."""
    stay = before.is_on_mesh_of(after) and before.reduction == after.reduction
    for side, other in ((before, after), (after, before)):
        why = None if side.reduction is None else _no_reduction(side.reduction, dtype)
        moved = [axis for axis in side.pending if not (stay and axis in other.pending)]
        if why is not None and moved:
            blame = f"{side.reduction} is pending over {side.names[moved[0]]!r}, and {why}"
            raise InvalidType(asked, blame, seen, "a tensor of another dtype, such as x.to(torch.float32)")


def _no_reduction(kind: str, dtype: torch.dtype) -> str | None:
    """Return why copies of a dtype cannot be reduced; None: they can."""
    if dtype in _NO_ARITHMETIC or (dtype.is_floating_point and dtype.itemsize == 1):
        return f"torch does not compute with {dtype}"
    if dtype.is_complex and kind not in LINEAR:
        return f"torch.distributed has no {kind} of {dtype}"
    if kind != "avg" or dtype.is_floating_point or dtype.is_complex or dtype.itemsize >= 4:
        return None
    return f"there is no average of {dtype}" if dtype == torch.bool else f"sums of {dtype} soon exceed its range"


# -- on one mesh -------------------------------------------------------------------------------------------------------


def on_one_mesh(transition: Transition, ranks_per_node: int | None = None) -> MeshTransition | None:
    """Return a transition with a role for every axis, or None when its layouts lie on meshes that do not agree.

    Two meshes of the same ranks in the same order agree when their axes can be cut into the same smaller ones, and the
    tensor divides evenly where that matters. Axes that nodes cut are cut likewise, where that is possible.
    """
    pair: tuple[LayoutSide, LayoutSide] | None = (transition.before, transition.after)
    if not transition.before.is_on_mesh_of(transition.after):
        pair = on_common_mesh(transition.before, transition.after)
    if pair is None:
        return None
    before, after = pair if ranks_per_node is None else cut_at_nodes(*pair, ranks_per_node)
    old, new = before.reduction, after.reduction
    # An average of ints does not become a sum by dividing the copies, as that would round them.
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


# -- sub-axes: those that two meshes have in common, or that nodes cut an axis into ------------------------------------


def on_common_mesh(before: LayoutSide, after: LayoutSide) -> tuple[LayoutSide, LayoutSide] | None:
    """Write two layouts of the same ranks on one mesh, whose axes are sub-axes of those of both.

    >>> mesh, flat = Layout((2, 4), ("dp", "tp")), Layout((8,), ("all",))
    >>> found = read("cannot plan", mesh("tp"), flat("all"), (16,), torch.float32)
    >>> pair = on_common_mesh(found.before, found.after)
    >>> pair[1].sizes, pair[1].names, pair[1].splits
    ((2, 4), ('dp', 'tp'), ((0, 1),))

    Returns:
        The layouts, on axes with the names of the source's, or None when there is no such mesh.
    """
    if before.ranks != after.ranks:
        return None
    strides = sorted({*_strides(before.sizes), *_strides(after.sizes)})
    if any(large % small for small, large in itertools.pairwise(strides)):
        return None
    places = strides[:-1][::-1] or [1]  # the stride of each sub-axis
    sizes = tuple(large // small for small, large in itertools.pairwise(strides))[::-1] or (1,)
    sub_axes = [_sub_axes_of(side.sizes, places) for side in (before, after)]
    owners = tuple(name for name, mine in zip(before.names, sub_axes[0], strict=True) for _ in mine)
    names = owners or before.names[:1]
    first, second = (
        _on_sub_axes(side, sizes, names, mine) for side, mine in zip((before, after), sub_axes, strict=True)
    )
    return None if first is None or second is None else (first, second)


def cut_at_nodes(before: LayoutSide, after: LayoutSide, ranks_per_node: int) -> tuple[LayoutSide, LayoutSide]:
    """Cut each axis of two layouts of one mesh in two, so that along the inner one all ranks share a node.

    Where nodes do not cut an axis into equal parts, or the tensor does not divide evenly, nothing is cut.
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
    """Return the stride of each axis, and the number of all ranks.

    >>> _strides((2, 4))
    [1, 4, 8]
    """
    found = [1]
    for size in reversed(sizes):
        found.append(found[-1] * size)
    return found


def _sub_axes_of(sizes: Sequence[int], places: Sequence[int]) -> list[tuple[int, ...]]:
    """Return, per axis, the sub-axes that it consists of, found by their strides.

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
    """Write a layout on sub-axes; None where cutting an axis in two would split a dim otherwise."""
    for size, chain in zip(side.shape, side.splits, strict=True):
        if any(len(sub_axes[axis]) > 1 for axis in chain) and size % side.ways(chain):
            return None
    splits = tuple(tuple(sub_axis for axis in chain for sub_axis in sub_axes[axis]) for chain in side.splits)
    pending = tuple(sorted(sub_axis for axis in side.pending for sub_axis in sub_axes[axis]))
    return LayoutSide(sizes, names, side.ranks, side.shape, splits, pending, side.reduction)
