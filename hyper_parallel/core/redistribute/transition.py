"""The transition between two layouts of one mesh, read once, as index arithmetic.

Two meshes of the same ranks are cut into axes that both have in common; axes that nodes cut are cut there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.ownership import Splits
from hyper_parallel.core.redistribute.holdings import Counts, Holding, coordinate

LINEAR = frozenset({"sum", "avg"})


@dataclass(frozen=True)
class Transition:
    """From which layout to which, on one mesh.

    Axes are indices from the left. Axes of size 1 take no part. Every axis has one role at the source: it splits a dim
    (`split_axes`), copies are to be reduced over it (`reduces`), copies stay as they are over it (`keeps`), or the
    ranks along it hold the same (`copy_axes`).

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
        alike = tuple(axis for axis in self.opens if axis not in self.split_axes)
        held = self.result.restricted(self.src, apart)
        return Holding(held.sizes, held.shape, held.splits, held.combs, None, alike)

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
    def copy_axes(self) -> tuple[int, ...]:
        """Axes along which ranks hold the same at the source."""
        return tuple(a for a in self.live if a not in self.split_axes and a not in self.reduces)

    def ways(self, axes: Iterable[int]) -> int:
        """Return how many ranks there are along some axes together."""
        return math.prod(self.sizes[axis] for axis in axes)

    def along(self, counts: Counts, axes: Iterable[int]) -> Counts:
        """Return, on every rank, the sum over the ranks along some axes."""
        return np.broadcast_to(counts.sum(axis=tuple(axes), keepdims=True), self.sizes)


# -- what is refused ---------------------------------------------------------------------------------------------------


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


# -- layouts, read -----------------------------------------------------------------------------------------------------


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


# -- smaller axes: those that two meshes have in common, or that nodes cut the axes into -------------------------------


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


def _array(ranks: range | tuple[int, ...]) -> Counts:
    return np.arange(ranks.start, ranks.stop, ranks.step) if isinstance(ranks, range) else np.asarray(ranks)


# -- nodes below a mesh: intra-node and inter-node axes ----------------------------------------------------------------


class Nodes:
    """The nodes of a mesh.

    >>> nodes = Nodes(range(8), (2, 4), 4)
    >>> nodes.crosses((0,)), nodes.crosses((1,)), nodes.near_axes((0, 1))
    (True, False, (1,))

    Args:
        ranks: the rank at each mesh position, last axis fastest.
        sizes: ranks along each axis.
        ranks_per_node: rank r sits on node r // ranks_per_node; None: all on one.
    """

    def __init__(self, ranks: range | tuple[int, ...], sizes: Sequence[int], ranks_per_node: int | None) -> None:
        self._ranks = ranks
        self._sizes = tuple(sizes)
        self._node: Counts | None = None
        if ranks_per_node is not None:
            node = _array(ranks).reshape(self._sizes) // ranks_per_node
            self._node = node if (node != node.flat[0]).any() else None
        self._inside = self._along_nodes()
        self._shared: dict[tuple[int, ...], int] = {}

    def _along_nodes(self) -> frozenset[int] | None:
        """Return the axes along which nodes do not change, if every other axis leads to another node; else None."""
        if self._node is None:
            return frozenset(range(len(self._sizes)))
        axes = [axis for axis in range(len(self._sizes)) if (self._node == self._node.take([0], axis=axis)).all()]
        others = math.prod(size for axis, size in enumerate(self._sizes) if axis not in axes)
        return frozenset(axes) if len(np.unique(self._node)) == others else None

    def share(self, axes: Iterable[int]) -> int:
        """Return how many ranks of a group over these axes share a node, at least."""
        chosen = tuple(sorted(axes))
        if self._inside is not None:
            return math.prod(self._sizes[axis] for axis in chosen if axis in self._inside)
        if chosen not in self._shared:
            self._shared[chosen] = self._share(chosen)
        return self._shared[chosen]

    def _share(self, axes: tuple[int, ...]) -> int:
        size = math.prod(self._sizes[axis] for axis in axes)
        if self._node is None or not axes:
            return size
        rows = np.moveaxis(self._node, axes, range(-len(axes), 0)).reshape(-1, size)
        ordered = np.sort(rows, axis=1)
        return math.ceil(size / (1 + int((ordered[:, 1:] != ordered[:, :-1]).sum(axis=1).max(initial=0))))

    def crosses(self, axes: Iterable[int]) -> bool:
        """Return whether groups over these axes reach over several nodes."""
        chosen = tuple(sorted(axes))
        return self.share(chosen) < math.prod(self._sizes[axis] for axis in chosen)

    def near_axes(self, axes: Iterable[int]) -> tuple[int, ...]:
        """Return those axes whose ranks share a node: as many as go together, inner ones first."""
        near: tuple[int, ...] = ()
        for axis in sorted(axes, reverse=True):
            if self._node is None or not self.crosses((*near, axis)):
                near = (*near, axis)
        return tuple(sorted(near))

    def cut(self, axis: int) -> int:
        """Return how many neighbours along an axis always share a node, if nodes cut the axis into equal pieces.

        >>> Nodes(range(8), (8,), 4).cut(0), Nodes(range(8), (2, 4), 4).cut(0), Nodes(range(8), (2, 4), 4).cut(1)
        (4, 1, 4)
        """
        size = self._sizes[axis]
        if self._node is None:
            return size
        for near in range(size, 1, -1):
            if size % near == 0:
                pieces = self._node.reshape(*self._sizes[:axis], size // near, near, *self._sizes[axis + 1 :])
                if (pieces == pieces.take([0], axis=axis + 1)).all():
                    return near
        return 1

    def place(self, axes: Sequence[int]) -> Counts:
        """Return, on every rank, its place among the sorted ranks of its group over some axes."""
        if isinstance(self._ranks, range) and self._ranks.step > 0:
            return coordinate(self._sizes, sorted(axes))
        ranks = _array(self._ranks).reshape(self._sizes)
        last = range(-len(axes), 0)
        moved = np.moveaxis(ranks, axes, last)
        order = moved.reshape(-1, math.prod(self._sizes[axis] for axis in axes)).argsort(axis=1).argsort(axis=1)
        return np.moveaxis(order.reshape(moved.shape), last, axes)
