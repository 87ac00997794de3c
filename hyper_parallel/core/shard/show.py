"""Tables of the ranks that hold each part of tensors, layouts, meshes, plans and models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich.console import RenderableType
from rich.text import Text
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.checks import check, check_shape
from hyper_parallel.core.common.errors import InvalidValue, class_name, readable_bytes
from hyper_parallel.core.common.tables import View, display, fold, plain_table
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.ownership import count_parts
from hyper_parallel.core.mesh.device_mesh import MeshAxes, axes_of, compact_ranks, describe_ranks
from hyper_parallel.core.redistribute.plan import Plan
from hyper_parallel.core.redistribute.show import plan_view, shape_words
from hyper_parallel.core.shard.sharding_plan import ShardingPlan
from hyper_parallel.core.shard.spelling import describe

_MOST_PARTS, _MOST_ROWS = 32, 60  # most rows of a table
_LEFT = 99  # left-aligned columns: all
_HUES = ("cyan", "magenta", "green", "yellow", "blue", "red")
_CAN_BE_SHOWN = (
    "a DTensor, a Layout, a DeviceMesh, a model, a ShardingPlan, or a plan of "
    "hyper_parallel.core.redistribute; of a plain tensor, hp.distribute_tensor(x, layout)"
)


def show(x: Any, shape: Sequence[int] | None = None) -> None:
    """Print the ranks that hold each part: with colours in a terminal, as an HTML table in a notebook.

        hp.show(x)  # a DTensor: the ranks that hold each block of rows and columns
        hp.show(layout, (4096, 1024))  # the same without a tensor, and without ranks
        hp.show(model)  # the layout of each parameter, and its bytes per rank

    It communicates nothing and reads no values. It therefore works on one rank alone, on meta tensors, and without
    torch.distributed. Each calling rank prints.

    Args:
        x: a DTensor, a `Layout`, a DeviceMesh, a model (its DTensors), a `ShardingPlan`, or a redistribution's plan.
        shape: full sizes, in elements, for a `Layout`; None: parts are shown by number.

    Raises:
        TypeError: any other type of x; a shape that is no sequence of ints.
        ValueError: a layout that does not fit the shape; a shape for an x with a shape; a DTensor whose placements
            a `Layout` cannot express.
    """
    display(view(x, shape))


def view(x: Any, shape: Sequence[int] | None = None) -> View:
    """Return the output of `show`: `str(view)` is plain text, and a notebook shows it as HTML.

    >>> print(view(Layout((2, 2), ("dp", "tp"))("dp", partial={"tp": "sum"}), (5, 3)))
    5 x 3 on 4 ranks: (dp); tp=sum
    axis  ranks
    dp        2  split dim 0
    tp        2  hold the parts of a sum that is still to be taken
    <BLANKLINE>
    ranks  dim 0  tp: sum    holds
    0      0:3    1 of 2     3 x 3
    1      0:3    2 of 2     3 x 3
    2      3:5    1 of 2     2 x 3
    3      3:5    2 of 2     2 x 3

    Arguments and errors are the same as for `show`.
    """
    asked = "cannot show who holds what"
    check(asked, ("DTensor", Layout, "mesh", "module", ShardingPlan, Plan), _CAN_BE_SHOWN, x=x)
    if shape is not None:
        if not isinstance(x, Layout) or not x.is_assigned:
            blame = "a shape goes with a layout; what has one of its own, or is a mesh, takes none"
            raise InvalidValue(asked, blame, f"x: {type(x).__name__}   shape: {shape!r}", "hp.show(x)")
        shape = check_shape(shape)
    if isinstance(x, DTensor):
        return _tensor_view(x)
    if isinstance(x, Layout):
        return _layout_view(x, shape) if x.is_assigned else _mesh_view(x.axes)
    if isinstance(x, DeviceMesh):
        return _mesh_view(axes_of(x))
    if isinstance(x, nn.Module):
        return _model_view(x)
    return _sharding_plan_view(x) if isinstance(x, ShardingPlan) else _redistribution_view(x)


# -- one tensor --------------------------------------------------------------------------------------------------------


def _tensor_view(x: DTensor) -> View:
    layout, local = Layout.of(x), tuple(x._local_tensor.shape)
    dtype = str(x.dtype).removeprefix("torch.")
    parts = _layout_view(layout, tuple(x.shape), x.dtype.itemsize, f"{dtype} DTensor of ").renderables
    here = _calling_rank(layout.axes)
    if here is None:
        return View(*parts)
    declared = layout.local_shape(x.shape, here)
    if local == declared:
        return View(*parts)
    blame = f"rank {here} holds {shape_words(local)}, where its layout says {shape_words(declared)}"
    return View(*parts, Text(blame, style="bold red"))


def _layout_view(layout: Layout, shape: tuple[int, ...] | None, itemsize: int = 0, what: str = "") -> View:
    """Return the axes of a layout and its parts, with the ranks that hold each."""
    count, word = len(layout.rank_list), describe(layout)
    ranks = f"{count:,} rank{'s' * (count > 1)}"
    if shape is None:
        title = f"{ranks}: {word}"
    else:
        size = f", {readable_bytes(np.prod(shape, dtype=float) * itemsize)}" if itemsize else ""
        title = f"{what}{shape_words(shape)}{size} on {ranks}: {word}"
    ndim = _least_dims(layout) if shape is None else len(shape)
    parts = _parts_table(layout, ndim, shape, itemsize)
    return View(Text(title, style="bold"), _axes_table(layout, ndim), Text(), *parts)


def _least_dims(layout: Layout) -> int:
    """Return the dims of the smallest tensor that a layout fits."""
    if layout.alias_placements is not None:
        return len(layout.alias_placements)
    dims = [placement.dim for placement in layout.placements or () if hasattr(placement, "dim")]
    if min(dims, default=0) < 0:
        blame = "it counts a dim from the last one, and without a shape the number of dims is not known"
        raise InvalidValue("cannot show who holds what", blame, f"layout: {layout}", "hp.show(layout, (8, 4))")
    return max(dims, default=-1) + 1


def _axes_table(layout: Layout, ndim: int) -> RenderableType:
    """Return a table of the role of each mesh axis."""
    table = plain_table("axis", "ranks", "")
    table.columns[-1].justify = "left"
    of_axis: dict[int, str] = {}
    for dim, axes in enumerate(layout.splits(ndim)):
        for place, axis in enumerate(axes):
            outer = ", each part of " + " and ".join(layout.alias_name[one] for one in axes[:place]) if place else ""
            of_axis[axis] = f"split dim {dim}{outer}"
    for axis, (name, size) in enumerate(zip(layout.alias_name, layout.mesh_shape, strict=True)):
        kind = layout.partial.get(name)
        pending = f"hold the parts of {'an' if kind == 'avg' else 'a'} {kind} that is still to be taken"
        table.add_row(name, f"{size:,}", of_axis.get(axis) or (pending if kind else "hold the same"))
    return table


class _Holders(NamedTuple):
    """The ranks that hold the same part.

    Attributes:
        ranks: sorted.
        start: start of the part in each dim.
        stop: end of the part in each dim.
        terms: index of the pending copy, per axis with a pending reduction.
    """

    ranks: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    terms: tuple[int, ...]


def _holders(layout: Layout, shape: tuple[int, ...]) -> list[_Holders]:
    """Return the parts of a tensor with the ranks that hold each, the lowest rank first."""
    axes, slices = layout.axes, layout.slices(shape)
    pending = [axes.index(name) for name in layout.partial]
    places = np.indices(axes.sizes).reshape(len(axes.sizes), -1).T[:, pending]
    ranks = np.asarray(axes.ranks)
    keys = np.concatenate([slices.reshape(len(ranks), -1), places], axis=1)
    distinct, owner = np.unique(keys, axis=0, return_inverse=True)
    order = np.lexsort((ranks, owner.ravel()))
    members = np.split(ranks[order], np.cumsum(np.bincount(owner.ravel(), minlength=len(distinct)))[:-1])
    ndim = len(shape)
    found = [
        _Holders(tuple(who.tolist()), tuple(key[: 2 * ndim : 2]), tuple(key[1 : 2 * ndim : 2]), tuple(key[2 * ndim :]))
        for key, who in zip(distinct.tolist(), members, strict=True)
    ]
    return sorted(found, key=lambda one: one.ranks[0])


def _parts_table(layout: Layout, ndim: int, shape: tuple[int, ...] | None, itemsize: int) -> Iterator[RenderableType]:
    """Return a row for each part: its ranks, start, stop and size."""
    splits = layout.splits(ndim)
    numbered = tuple(count_parts(layout.mesh_shape, axes) for axes in splits)
    parts = _holders(layout, numbered if shape is None else shape)
    dims = [dim for dim, axes in enumerate(splits) if axes]
    sized = [] if shape is None else ["holds", *(["bytes"] if itemsize else [])]
    heads = [f"{name}: {kind}" for name, kind in layout.partial.items()]
    table = plain_table("ranks", *(f"dim {dim}" for dim in dims), *heads, *sized, "", left=_LEFT)
    here = _calling_rank(layout.axes)
    mine = next((at for at, part in enumerate(parts) if here in part.ranks), None)
    hues = {place: hue for hue, place in enumerate(dict.fromkeys((part.start, part.stop) for part in parts))}
    terms = [layout.mesh_shape[layout.axes.index(name)] for name in layout.partial]
    for row in fold(len(parts), _MOST_PARTS, mine):
        if row is None:
            table.add_row("...")
            continue
        part = parts[row]
        lengths = [stop - start for start, stop in zip(part.start, part.stop, strict=True)]
        where = [
            f"{part.start[dim] + 1} of {numbered[dim]}" if shape is None else _span(part.start[dim], part.stop[dim])
            for dim in dims
        ]
        held = [shape_words(lengths), readable_bytes(float(np.prod(lengths, dtype=float)) * itemsize)][: len(sized)]
        summands = [f"{term + 1} of {count}" for term, count in zip(part.terms, terms, strict=True)]
        marked = f"<- rank {here}" if row == mine else ""
        style = _HUES[hues[part.start, part.stop] % len(_HUES)] if len(hues) > 1 else ""
        table.add_row(_ranks(part.ranks), *where, *summands, *held, marked, style=style)
    yield table
    if len(parts) > _MOST_PARTS:
        yield Text(f"{len(parts):,} parts in all")


def _span(start: int, stop: int) -> str:
    return "nothing" if start == stop else f"{start}:{stop}"


def _ranks(ranks: tuple[int, ...]) -> str:
    return describe_ranks(compact_ranks(ranks))


def _calling_rank(axes: MeshAxes) -> int | None:
    """Return the calling rank; None without torch.distributed or outside of the mesh."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    rank = dist.get_rank()
    return rank if rank in axes.ranks else None


# -- meshes ------------------------------------------------------------------------------------------------------------


def _mesh_view(axes: MeshAxes) -> View:
    """Return the ranks of a mesh: a row for each position along all axes but the last."""
    *outer, last = axes.names
    rows, columns = len(axes.ranks) // axes.sizes[-1], axes.sizes[-1]
    table = plain_table(*outer, f"ranks along {last}", "", left=_LEFT)
    here = _calling_rank(axes)
    mine = None if here is None else axes.position(here) // columns
    for row in fold(rows, _MOST_PARTS, mine):
        if row is None:
            table.add_row("...")
            continue
        at = axes.coordinates(row * columns)[:-1]
        ranks = tuple(axes.ranks[row * columns : (row + 1) * columns])
        marked = f"<- rank {here}" if row == mine else ""
        style = _HUES[row % len(_HUES)] if rows > 1 else ""
        table.add_row(*map(str, at), describe_ranks(compact_ranks(ranks)), marked, style=style)
    return View(Text(f"mesh of {len(axes.ranks):,} ranks: {axes}", style="bold"), table)


# -- models ------------------------------------------------------------------------------------------------------------


class _TensorRow(NamedTuple):
    """The row of a tensor in a model's table, without its name; equal for the same tensor of similar layers."""

    shape: str
    dtype: str
    layout: str
    copies: str
    full: float
    most: float
    least: float
    mine: float
    style: str


def _model_view(model: nn.Module) -> View:
    """Return a row for each parameter and sharded buffer; similar layers share a row."""
    tensors: list[tuple[str, torch.Tensor]] = [*model.named_parameters()]
    tensors += [(name, buffer) for name, buffer in model.named_buffers() if isinstance(buffer, DTensor)]
    meshes = dict.fromkeys(axes_of(x.device_mesh) for _, x in tensors if isinstance(x, DTensor))
    many, rows = len(meshes) > 1, dict[tuple[str, _TensorRow], list[str]]()
    for name, tensor in tensors:
        rows.setdefault((re.sub(r"(?<![^.])\d+(?![^.])", "*", name), _held(tensor, many)), []).append(name)
    table = plain_table("parameter", "", "shape", "dtype", "layout", "copies", "full", "on a rank", left=5)
    for (pattern, held), names in list(rows.items())[:_MOST_ROWS]:
        each = f" (least {readable_bytes(held.least * len(names))})" if held.least != held.most else ""
        name, times = (pattern, f"x {len(names)}") if len(names) > 1 else (names[0], "")
        sizes = (readable_bytes(held.full * len(names)), readable_bytes(held.most * len(names)) + each)
        table.add_row(name, times, held.shape, held.dtype, held.layout, held.copies, *sizes, style=held.style)
    if len(rows) > _MOST_ROWS:
        table.add_row(f"... and {len(rows) - _MOST_ROWS} more rows")
    full, mine = (
        sum(getattr(held, field) * len(names) for (_, held), names in rows.items()) for field in ("full", "mine")
    )
    table.add_row("in all", f"{len(tensors):,}", "", "", "", "", readable_bytes(full), "", style="bold")
    numel = sum(tensor.numel() for _, tensor in tensors)
    on = "; ".join(f"{axes} ({len(axes.ranks):,} ranks)" for axes in meshes) or "no mesh: no parameter is a DTensor"
    title = f"{class_name(model)}: {numel:,} numbers in {len(tensors):,} tensors on {on}"
    return View(
        Text(title, style="bold"), table, Text(f"this process holds {readable_bytes(mine)} of {readable_bytes(full)}")
    )


def _held(x: torch.Tensor, many: bool) -> _TensorRow:
    full, dtype = float(x.numel() * x.element_size()), str(x.dtype).removeprefix("torch.")
    if not isinstance(x, DTensor):
        return _TensorRow(shape_words(x.shape), dtype, "plain tensor", "-", full, full, full, full, "dim")
    layout = Layout.of(x)
    slices = layout.slices(tuple(x.shape))
    sizes = np.prod(slices[..., 1] - slices[..., 0], axis=1, dtype=float) * x.element_size()
    mine = float(x._local_tensor.numel() * x.element_size())
    word = describe(layout) + (f" on {layout.axes}" if many else "")
    style = _HUES[2] if any(layout.splits(x.dim())) else ""
    shape = shape_words(x.shape)
    return _TensorRow(shape, dtype, word, f"{layout.repeat_num():,}", full, sizes.max(), sizes.min(), mine, style)


# -- plans -------------------------------------------------------------------------------------------------------------


def _sharding_plan_view(plan: ShardingPlan) -> View:
    """Return the entries of a model's plan as written."""
    kinds = {"plan": "parameter", "input_plan": "input", "output_plan": "output", "local_plan": "local code"}
    table = plain_table("path", "of", "layout", left=3)
    for field, kind in kinds.items():
        for path, value in (getattr(plan, field) or {}).items():
            table.add_row(path or '""', kind, "left alone" if value is None else _entry(value))
    settings = {field.name: getattr(plan, field.name) for field in fields(plan) if field.name not in kinds}
    notes = [Text(f"{name}: {value!r}") for name, value in settings.items() if value]
    count = table.row_count
    title = Text(f"ShardingPlan with {count} entr{'y' if count == 1 else 'ies'}", style="bold")
    return View(title, *([table] if count else []), *notes)


def _entry(value: object) -> str:
    """Format an entry of a plan: layouts in short form, other values by repr."""
    if isinstance(value, Layout):
        return describe(value) if value.is_assigned else str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_entry(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple) and any(isinstance(one, Layout) for one in value):
        return f"[{', '.join(map(_entry, value))}]"
    return repr(value)


def _redistribution_view(plan: Plan) -> View:
    """Return the steps of a redistribution, and the parts of all ranks before and after."""
    return View(*_before_and_after(plan))


def _before_and_after(plan: Plan) -> Iterator[RenderableType]:
    yield from plan_view(plan).renderables
    for word, layout in (("before", plan.src), ("after", plan.dst)):
        yield Text()
        yield from _layout_view(layout, plan.global_shape, plan.dtype.itemsize, f"{word}: ").renderables
