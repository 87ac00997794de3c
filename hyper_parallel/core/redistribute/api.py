"""Functions on torch's DTensor: `redistribute`, `distribute_tensor`, `from_local`, `to_local` and `full_tensor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.checks import check, check_shape, read_int
from hyper_parallel.core.common.errors import InvalidType, InvalidValue
from hyper_parallel.core.common.groups import gather_numbers, group_of, on_wire
from hyper_parallel.core.common.torch_compat import runs_eagerly
from hyper_parallel.core.dtensor.convert import build, device_of, in_split_order, to_placements, torch_form
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.ownership import count_parts
from hyper_parallel.core.dtensor.placement_types import Placement, Shard
from hyper_parallel.core.machine.description import Machine
from hyper_parallel.core.mesh.device_mesh import axes_of, check_ascending, mesh_among, reorder_axes
from hyper_parallel.core.redistribute.gradients import FromLocal, PendingRedistribute, moved, moving, take_part, unmoved

LayoutLike = Layout | DeviceMesh | Sequence[Any]
"""A `Layout`; a `DeviceMesh`, with placements beside it; or placements or alias entries, where a mesh is known."""


@overload
def redistribute(
    x: torch.Tensor,
    layout: LayoutLike | None = None,
    placements: Sequence[Any] | None = None,
    *,
    async_op: Literal[False] = False,
    machine: str | Machine | None = None,
    max_extra_bytes: int | None = None,
) -> DTensor: ...


@overload
def redistribute(
    x: torch.Tensor,
    layout: LayoutLike | None = None,
    placements: Sequence[Any] | None = None,
    *,
    async_op: Literal[True],
    machine: str | Machine | None = None,
    max_extra_bytes: int | None = None,
) -> PendingRedistribute: ...


@runs_eagerly
def redistribute(
    x: torch.Tensor,
    layout: LayoutLike | None = None,
    placements: Sequence[Any] | None = None,
    *,
    async_op: bool = False,
    machine: str | Machine | None = None,
    max_extra_bytes: int | None = None,
) -> DTensor | PendingRedistribute:
    """Move a DTensor to another layout, e.g. from a shard per rank to replicas. All ranks of both meshes call it.

        y = redistribute(x, layout)
        y = redistribute(x, ("None", "tp"))  # on the mesh of x
        y = redistribute(x, mesh, [Shard(0), Replicate()])

    Forward executes the cheapest plan on the machine, see `plan`. Backward executes the cheapest plan from the
    gradient's layout to the layout of x. Along axes where x has a pending sum, every rank gets the full gradient,
    unless the gradient has a pending sum there, too. torch first gathers strided shards and reduces pending norms.

    Args:
        x: a DTensor, of any shape.
        layout: the target layout; its mesh may be another one.
        placements: beside a mesh, torch's placements or alias entries.
        async_op: return a `PendingRedistribute` after the first collective is issued; its `wait()` gives the DTensor.
            Do not change x before `wait()` returns, because x is still being read.
        machine: the machine that prices the plan, as a description or its name. None: the usual machine of the
            device's kind; on simulated ranks `machine` of the world.
        max_extra_bytes: see `plan`. If no plan for the gradient meets it, the plan with the least memory is used.

    Returns:
        A DTensor; x itself if it is in that layout already and no gradient is recorded. With `async_op`, a
        `PendingRedistribute`.

    Raises:
        TypeError: x is no DTensor, layout no layout.
        ValueError: a layout that does not fit; a rank on neither mesh; a slice of a mesh, if the other mesh has
            ranks outside of it; a limit that no plan meets.
    """
    asked = "cannot redistribute"
    flag: object = async_op
    if not isinstance(flag, bool):  # inline, because every redistribution passes here
        check(asked, "bool", async_op=async_op)
    x = check_dtensor(asked, x)
    mesh = x.device_mesh
    if layout is mesh and _is_where_it_should_be(x, placements, async_op, machine, max_extra_bytes):
        return unmoved(x)
    target, terms = read_layout(asked, layout, placements, mesh), (machine, max_extra_bytes)
    return moving(x, target, terms) if async_op else moved(x, target, terms)


def _is_where_it_should_be(x: DTensor, placements: Sequence[Any] | None, *options: Any) -> bool:
    """Return True if x has these placements already and no option asks for more; a fast path without a Layout."""
    return (
        isinstance(placements, (tuple, list))
        and x.placements == tuple(placements)
        and not any(option is not None and option is not False for option in options)
        and x.device_mesh.get_coordinate() is not None
    )


@runs_eagerly
def distribute_tensor(
    tensor: torch.Tensor, layout: LayoutLike, placements: Sequence[Any] | None = None, *, src_data_rank: int | None = 0
) -> DTensor:
    """Shard or replicate a full tensor over a mesh, and return the DTensor.

        x = distribute_tensor(torch.randn(8, 8), layout)

    Forward scatters parts and broadcasts replicas from one rank. `src_data_rank=None` communicates nothing, and a
    rank that holds the whole tensor shares the memory of its argument. The result is a leaf, as in torch.

    Args:
        tensor: the full tensor, of the same shape on every rank; a leaf.
        layout: the target layout; pending reductions are prepared without communication.
        placements: beside a mesh, torch's placements or alias entries.
        src_data_rank: index, along every axis, of the rank whose tensor is used, as in torch. None: each rank uses its
            own tensor.

    Raises:
        TypeError: no tensor, or a DTensor.
        ValueError: a tensor computed from one that requires a gradient, because the result would not be linked to it;
            a layout without a mesh, or that does not fit; a mesh whose ranks do not ascend along some axis;
            a `src_data_rank` outside of some axis.
    """
    asked = "cannot distribute a tensor"
    _check_whole(asked, tensor)
    target = read_layout(asked, layout, placements, None)
    _check_source(asked, src_data_rank, target)
    mesh, shape = target.mesh, tuple(tensor.shape)
    assert mesh is not None, "read_layout sees to a mesh"
    check_ascending(asked, mesh)
    torch_form(target, shape)  # refuses layouts that no DTensor can have, before anything is sent
    reduced = target.reset_partial()
    plain = in_split_order(reduced, len(shape))
    ordered = mesh if plain is reduced else reorder_axes(mesh, plain.alias_name)
    split = to_placements(plain, shape)
    with torch.no_grad():
        given = tensor.detach()
        if src_data_rank is not None:  # backends read raw memory and ignore conj and neg bits
            given = on_wire(given.resolve_conj().resolve_neg())
            if not isinstance(split[0], Shard):
                given = given.clone(memory_format=torch.contiguous_format)  # torch would broadcast into the caller's
        parts = torch_tensor.distribute_tensor(given, ordered, split, src_data_rank=src_data_rank).to_local()
        on_mesh = mesh.get_coordinate() is not None
        parts = parts if parts.dtype == tensor.dtype else parts.view(tensor.dtype)
        result = build(parts, reduced if on_mesh else target, shape)
        if on_mesh and target.is_partial():
            result = moved(result, target)
    result.requires_grad_(tensor.requires_grad)
    return result


def _check_whole(asked: str, tensor: Any) -> None:
    check(asked, "plain tensor", _PLAIN, tensor=tensor)
    if not tensor.is_leaf:
        blame = "tensor was computed from one that wants a gradient, and the result, a leaf, would not pass one on"
        hint = "tensor.detach(), or from_local(tensor, layout()) and redistribute, which pass gradients on"
        raise InvalidValue(asked, blame, f"grad_fn: {type(tensor.grad_fn).__name__}", hint)


def _check_source(asked: str, src_data_rank: int | None, target: Layout) -> None:
    if src_data_rank is None:
        return
    index, least = read_int(asked, "src_data_rank", src_data_rank, hint=_SOURCES), min(target.mesh_shape)
    seen = f"src_data_rank: {src_data_rank!r}   layout: {target}"
    if not 0 <= index < least:
        small = target.alias_name[target.mesh_shape.index(least)]
        blame = f"src_data_rank {index} is an index along every axis, and axis {small!r} has {least} ranks"
        raise InvalidValue(asked, blame, seen, f"0 to {least - 1}, or None for every rank's own")


@runs_eagerly
def from_local(
    local: torch.Tensor,
    layout: LayoutLike,
    placements: Sequence[Any] | None = None,
    *,
    shape: Sequence[int] | None = None,
    grad_layout: LayoutLike | None = None,
) -> DTensor:
    """Make a DTensor from the part of each rank, without copying it.

        x = from_local(part, layout, shape=(7, 4))
        x = from_local(part, mesh, [Shard(0), Replicate()], shape=(7, 4))

    Forward communicates nothing if `shape` is given. Otherwise the ranks exchange the shapes and dtypes of their parts,
    and all ranks refuse parts that differ, because the full shape would be a guess. Backward redistributes the
    gradient to `grad_layout`, and each rank takes its part.

    Args:
        local: this rank's part; not copied.
        layout: the layout of the parts.
        placements: beside a mesh, torch's placements or alias entries.
        shape: the full tensor's sizes, in elements.
        grad_layout: layout of each rank's gradient. Default: as the parts; the full gradient for replicas and
            pending sums; 1/n of it for a pending average over n ranks. For a pending max, min or prod it depends
            on the copies of all ranks, so that backward raises ValueError.

    Raises:
        TypeError: local is no plain tensor; layout no layout.
        ValueError: a part of another shape than the layout gives this rank; parts of different shapes without `shape`.
    """
    asked = "cannot make a DTensor from local parts"
    check(asked, "plain tensor", _PLAIN, local=local)
    target = read_layout(asked, layout, placements, None)
    wanted = (
        None if grad_layout is None else read_layout(f"{asked} with this grad_layout", grad_layout, None, target.mesh)
    )
    sizes = tuple(local.shape) if shape is None else check_shape(shape)
    for given in (target, wanted or target):
        torch_form(given, sizes)  # refuses layouts that fit no shape before any exchange
    global_shape = _agreed_shape(asked, local, target) if shape is None else sizes
    _check_part(asked, local, target, global_shape)
    return FromLocal.apply(local, target, global_shape, read_grad_layout(asked, wanted, target, global_shape))


@runs_eagerly
def to_local(x: torch.Tensor, *, grad_layout: LayoutLike | None = None) -> torch.Tensor:
    """Return this rank's part of a DTensor as a plain tensor, which shares its memory.

        part = to_local(x)  # x is split over every axis, or no gradient is wanted
        part = to_local(x, grad_layout=Layout.of(x))  # ranks that hold the same compute the same
        part = to_local(x, grad_layout=layout("dp", "None", partial={"tp": "sum"}))  # over tp, gradients add up

    Forward communicates nothing. Backward redistributes the gradients of the parts from `grad_layout` to the layout of
    x. Along axes that split x, the gradient of a part is a part of the gradient. Along replicated or pending axes, the
    gradients may be equal or partial sums, and only the caller knows. Without `grad_layout`, backward refuses them.

    Args:
        x: a DTensor.
        grad_layout: the layout of the returned part's gradient; entries are for the mesh of x.

    Raises:
        TypeError: x is no DTensor.
        ValueError: a layout that does not fit; in backward, gradients that are ambiguous without `grad_layout`.
    """
    asked = "cannot take the local part"
    x = check_dtensor(asked, x)
    wanted = None if grad_layout is None else read_grad_layout(asked, grad_layout, Layout.of(x), x.shape)
    return take_part(x, wanted, "to_local")


@runs_eagerly
def full_tensor(x: torch.Tensor, *, grad_layout: LayoutLike | None = None) -> torch.Tensor:
    """Return the full tensor on every rank of its mesh, with pending reductions done; for an `OwnerMesh`, on all ranks.

        full = full_tensor(x)  # a plain tensor of the shape of x

    Forward runs one all_gather or all_reduce where that suffices. Backward follows `to_local`: without `grad_layout` it
    refuses, because the ranks' gradients could be equal or partial sums.

    Args:
        x: a DTensor.
        grad_layout: the layout of the gradient, see `to_local`; entries are for the mesh of x.

    Raises:
        TypeError: x is no DTensor.
        ValueError: a `grad_layout` that does not fit; in backward, gradients that are ambiguous without it.
    """
    asked = "cannot gather the full tensor"
    x = check_dtensor(asked, x)
    replicated = Layout.from_device_mesh(mesh_among(x.device_mesh))()
    wanted = read_grad_layout(asked, grad_layout, replicated, x.shape)
    return take_part(moved(x, replicated), wanted, "full_tensor")


# -- reading arguments -----------------------------------------------------------------------------------------------


_PLAIN = "redistribute(x, layout) for a DTensor, torch.as_tensor(...) for numbers"
_DTENSOR = "distribute_tensor(x, layout) for a full tensor, from_local(x, layout) for this rank's shard"
_SOURCES = "0, or None for every rank's own"
_EXAMPLE = 'Layout.from_device_mesh(mesh)("dp", "None")'


def read_layout(
    asked: str, given: LayoutLike | None, placements: Sequence[Any] | None, known: DeviceMesh | None
) -> Layout:
    """Return a layout with an assignment and a DeviceMesh.

    Args:
        asked: the start of an error message, "cannot ...".
        given: the caller's `layout` argument.
        placements: torch's placements or alias entries, beside a mesh.
        known: the mesh of the tensor at hand, if it has one.

    Raises:
        TypeError: `given` is neither a layout, a mesh nor entries.
        ValueError: no assignment, no mesh, placements beside a layout that has some, ranks that do not exist.
    """
    if isinstance(given, Layout):
        return _read_assigned(asked, given, placements, known)
    mesh = given if isinstance(given, DeviceMesh) else known
    entries: Any = placements if given is None or given is mesh else given
    seen = f"layout: {given!r}   placements: {placements!r}{_shown(known)}"
    if entries is None and mesh is not None and mesh is given:
        blame, first = "a mesh alone does not say where the tensor goes", Layout.from_device_mesh(mesh).alias_name[0]
        raise InvalidValue(asked, blame, seen, f'placements=("{first}", "None"), or torch\'s, one per axis')
    _check_entries(asked, "placements" if entries is placements else "layout", entries, seen)
    if entries is given and placements is not None:
        blame = "entries were given twice, as layout and as placements"
        raise InvalidValue(asked, blame, seen, "one of the two")
    if mesh is None:
        blame = "entries do not say which mesh they are for"
        raise InvalidValue(asked, blame, seen, f"a mesh before them, or {_EXAMPLE}")
    try:
        return Layout.from_entries(mesh, tuple(entries))
    except TypeError:  # a list as an entry, or a mistake; the call below names the mistake
        return Layout.from_device_mesh(mesh)(*entries)


def _read_assigned(asked: str, given: Layout, placements: Sequence[Any] | None, known: DeviceMesh | None) -> Layout:
    if placements is not None:
        seen = f"layout: {given}   placements: {placements!r}"
        if given.is_assigned:
            blame = "both a layout with an assignment and placements were given"
            raise InvalidValue(asked, blame, seen, "one of the two")
        _check_entries(asked, "placements", placements, seen)
        given = given(*placements)
    if not given.is_assigned:
        first = given.alias_name[0]
        blame, hint = "the layout is a mesh without an assignment", f'layout("{first}", "None")'
        raise InvalidValue(asked, blame, f"layout: {given}", f"{hint}, or layout() for everything replicated")
    return given if given.mesh is not None else _on_known_mesh(asked, given, known)


def _check_entries(asked: str, name: str, entries: object, seen: str) -> None:
    if isinstance(entries, Sequence) and not isinstance(entries, str):
        return
    blame, hint = f"{name} is a {type(entries).__name__}, not a layout or a sequence of entries", _EXAMPLE
    if entries is None:
        blame = "no layout was given"
    elif isinstance(entries, str):
        hint = f"({entries!r},), one entry per dim"
    elif isinstance(entries, Layout):
        blame, hint = "a layout was given beside a mesh", "the layout alone, which is for a mesh of its own"
    elif isinstance(entries, Placement):
        hint = f"[{entries!r}, ...], one placement per axis"
    raise InvalidType(asked, blame, seen, hint)


def _shown(known: DeviceMesh | None) -> str:
    return "" if known is None else f"   mesh of the tensor: {axes_of(known)}"


def _on_known_mesh(asked: str, layout: Layout, known: DeviceMesh | None) -> Layout:
    blame, seen = "the layout was made without a DeviceMesh", f"layout: {layout}{_shown(known)}"
    if known is not None:
        if axes_of(known) == layout.axes:
            return layout.with_mesh(known)
        blame += ", and the mesh of the tensor is not the one it is for"
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else None
    if world is not None and max(layout.rank_list) >= world:
        blame = f"the layout is for ranks up to {max(layout.rank_list)}, and there are {world} ranks"
        raise InvalidValue(asked, blame, seen, f"a mesh of at most {world} ranks")
    raise InvalidValue(asked, blame, seen, "Layout.from_device_mesh(mesh)(...), or layout.with_mesh(mesh)")


def check_dtensor(asked: str, x: Any) -> DTensor:
    """Return x if it is a DTensor, else raise.

    Raises:
        TypeError: x is no DTensor.
    """
    if not isinstance(x, DTensor):  # inline, because every redistribution passes here
        check(asked, "DTensor", _DTENSOR, x=x)
    return x


def read_grad_layout(asked: str, grad_layout: LayoutLike | None, layout: Layout, shape: Sequence[int]) -> Layout | None:
    """Read the layout of gradients, each of which must belong to the part of `layout` on the same rank.

    Raises:
        TypeError: no layout.
        ValueError: a layout that does not fit, or that gives a rank another part than `layout` does.
    """
    if grad_layout is None:
        return None
    wanted = read_layout(f"{asked} with this grad_layout", grad_layout, None, layout.mesh)
    torch_form(wanted, tuple(shape))
    seen, hint = f"layout: {layout}   grad_layout: {wanted}", "the same splits, and partial={...} where gradients add"
    if sorted(wanted.rank_list) != sorted(layout.rank_list):
        raise InvalidValue(asked, "grad_layout lies on other ranks than the parts", seen, hint)
    if wanted.axes == layout.axes and wanted.splits(len(shape)) == layout.splits(len(shape)):
        return wanted
    expected, got = (which.slices(shape)[np.argsort(which.rank_list)] for which in (layout, wanted))
    differ = (expected != got).any((1, 2))
    if differ.any():
        row = int(differ.argmax())
        rank = sorted(layout.rank_list)[row]
        blame = f"grad_layout gives rank {rank} {_ranges(got[row])}, and its part is {_ranges(expected[row])}"
        raise InvalidValue(asked, blame, seen, hint)
    return wanted


def _ranges(part: npt.NDArray[np.int64]) -> str:
    """Format a part as slices.

    >>> _ranges(np.array([[0, 3], [2, 4]]))
    '[0:3, 2:4]'
    """
    return f"[{', '.join(f'{start}:{stop}' for start, stop in part.tolist())}]"


# -- shapes ----------------------------------------------------------------------------------------------------------


_MOST_DIMS = 32
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def _check_part(asked: str, local: torch.Tensor, layout: Layout, shape: tuple[int, ...]) -> None:
    rank = dist.get_rank()
    if rank not in layout.rank_list:
        return
    expected = layout.local_shape(shape, rank)
    if tuple(local.shape) != expected:
        blame = f"rank {rank}'s part has shape {tuple(local.shape)}, and the layout gives it {expected}"
        seen = f"shape: {shape}   layout: {layout}"
        raise InvalidValue(asked, blame, seen, "the global shape, and parts as layout.local_slice(shape) cuts them")


def _agreed_shape(asked: str, local: torch.Tensor, layout: Layout) -> tuple[int, ...]:
    """Compute the global shape from the local one. All parts must have the same shape and dtype."""
    splits = layout.splits(local.dim())
    parts = [count_parts(layout.mesh_shape, chain) for chain in splits]
    ranks = tuple(sorted(layout.rank_list))
    if dist.get_rank() not in ranks:
        blame, seen = "this rank is not on the mesh, so its part says nothing", f"layout: {layout}"
        raise InvalidValue(asked, blame, seen, "shape=(...)")
    if len(ranks) > 1:
        _check_alike(asked, layout, ranks, _all_parts(local, ranks, layout))
    return tuple(size * count for size, count in zip(local.shape, parts, strict=True))


def _check_alike(asked: str, layout: Layout, ranks: tuple[int, ...], parts: list[tuple[tuple[int, ...], str]]) -> None:
    hints = {"shapes": "shape=(...), the full tensor's", "dtypes": "parts of one dtype"}
    for (which, hint), found in zip(hints.items(), zip(*parts, strict=True), strict=True):
        if len(set(found)) > 1:
            lines = "\n  ".join(f"rank {rank}: {each}" for rank, each in zip(ranks, found, strict=True))
            blame = f"the parts have different {which}, and the shape of the full tensor is not guessed"
            raise InvalidValue(asked, blame, f"layout: {layout}\n  {lines}", hint)


def _all_parts(local: torch.Tensor, ranks: tuple[int, ...], layout: Layout) -> list[tuple[tuple[int, ...], str]]:
    """Gather shape and dtype of every rank's part over the mesh."""
    mesh = layout.mesh
    assert mesh is not None, "read_layout sees to a mesh"
    mine = [local.dim(), *local.shape, *[0] * (_MOST_DIMS - local.dim()), _DTYPES.index(local.dtype)]
    rows = gather_numbers(mine, group_of(ranks, layout.alias_name, mesh), device_of(local, mesh))
    return [(tuple(row[1 : 1 + row[0]]), str(_DTYPES[row[-1]]).removeprefix("torch.")) for row in rows]
