"""Local tensors and DTensors: `from_local`, `to_local` and `full_tensor`, which say what becomes of gradients.

A local tensor does not say whether its gradients on several ranks are one gradient, computed alike on all of them, or
shares of one, still to be added. Where torch takes the first for granted, a wrong guess trains on a wrong gradient, and
nothing tells. Here the caller says it, or the backward pass is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from hyper_parallel.core.common.checks import check_shape
from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.common.groups import gather_numbers, group_of
from hyper_parallel.core.common.torch_compat import runs_eagerly
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.ownership import count_parts
from hyper_parallel.core.redistribute.api import back_to, build, gradient_layout, local_tensor, redistribute, torch_form
from hyper_parallel.core.redistribute.arguments import LayoutLike, check_dtensor, read_layout

_MOST_DIMS = 32
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@runs_eagerly
def from_local(
    local: torch.Tensor,
    layout: LayoutLike,
    placements: Sequence[Any] | None = None,
    *,
    shape: Sequence[int] | None = None,
    grad_layout: LayoutLike | None = None,
) -> DTensor:
    """Return the DTensor of which every rank gives its part.

        x = from_local(part, layout, shape=(7, 4))
        x = from_local(part, mesh, [Shard(0), Replicate()], shape=(7, 4))

    Forward: no communication with `shape`. Without it, the ranks of the mesh tell each other the shapes and dtypes of
    their parts, and parts that differ are refused on all of them: what they belong to is not guessed. Backward: the
    gradient is redistributed to `grad_layout`, and each rank takes its part.

    Args:
        local: this rank's part, which is not copied.
        layout: which part that is.
        placements: beside a mesh, torch's placements or alias entries.
        shape: the whole tensor's sizes, in elements.
        grad_layout: which part of the gradient a rank gets. Default: that of its part; the whole where ranks hold the
            same, or pending sums; 1/n of it for a pending average over n ranks. For a pending max, min or prod it
            depends on the copies of all ranks, and the backward pass is refused.

    Raises:
        TypeError: local is no plain tensor; layout no layout.
        ValueError: a part of another shape than the layout gives this rank; parts of different shapes without `shape`.
    """
    asked = "cannot make a DTensor from local parts"
    if not isinstance(local, torch.Tensor) or isinstance(local, DTensor):
        blame = f"local is a {type(local).__name__}, not a plain tensor"
        hint = "redistribute(local, layout) for a DTensor, torch.as_tensor(...) for numbers"
        raise TypeError(explain(asked, blame, f"local: {type(local)!r}", hint))
    target = read_layout(asked, layout, placements, None)
    wanted = (
        None if grad_layout is None else read_layout(f"{asked} with this grad_layout", grad_layout, None, target.mesh)
    )
    sizes = tuple(local.shape) if shape is None else check_shape(shape, f"layout: {target}")
    for given in (target, wanted or target):
        torch_form(given, sizes)  # what no shape makes right is said before an exchange
    whole = _agreed_shape(asked, local, target) if shape is None else sizes
    _check_part(asked, local, target, whole)
    return FromLocal.apply(local, target, whole, read_grad_layout(asked, wanted, target, whole))


@runs_eagerly
def to_local(x: torch.Tensor, *, grad_layout: LayoutLike | None = None) -> torch.Tensor:
    """Return this rank's part of a DTensor, as a plain tensor that shares its memory.

        part = to_local(x)  # x is split over every axis, or no gradient is wanted
        part = to_local(x, grad_layout=Layout.of(x))  # ranks that hold the same compute the same
        part = to_local(x, grad_layout=layout("dp", "None", partial={"tp": "sum"}))  # over tp, gradients add up

    Forward: no communication. Backward: the gradients of the parts are one tensor in `grad_layout`, which is
    redistributed to the layout of x. Along axes that split x a part's gradient is a part of the gradient. Along axes
    over which ranks hold the same, or copies to reduce, only the caller knows; without `grad_layout` the backward pass
    is refused there.

    Args:
        x: a DTensor.
        grad_layout: the layout of the gradient of what is returned; entries are for the mesh of x.

    Raises:
        TypeError: x is no DTensor.
        ValueError: a layout that does not fit; in the backward pass, gradients that could mean two things.
    """
    asked = "cannot take the local part"
    x = check_dtensor(asked, x)
    wanted = None if grad_layout is None else read_grad_layout(asked, grad_layout, Layout.of(x), x.shape)
    return take_part(x, wanted, "to_local")


@runs_eagerly
def full_tensor(x: torch.Tensor, *, grad_layout: LayoutLike | None = None) -> torch.Tensor:
    """Return the whole tensor on every rank of its mesh, all pending reductions taken.

        whole = full_tensor(x)  # a plain tensor of the shape of x

    Forward: one all_gather, or all_reduce, where that does. Backward: as for `to_local`, and likewise refused unless
    `grad_layout` says whether the gradients of the ranks are the same or are to be added.

    Args:
        x: a DTensor.
        grad_layout: the layout of the gradient, see `to_local`; entries are for the mesh of x.

    Raises:
        TypeError: x is no DTensor.
        ValueError: a `grad_layout` that does not fit; in the backward pass, gradients that could mean two things.
    """
    asked = "cannot gather the full tensor"
    x = check_dtensor(asked, x)
    whole = Layout.from_device_mesh(x.device_mesh)()
    wanted = read_grad_layout(asked, grad_layout, whole, x.shape)
    return take_part(redistribute(x, whole), wanted, "full_tensor")


def take_part(x: DTensor, grad_layout: Layout | None, verb: str) -> torch.Tensor:
    """Return this rank's part of a DTensor for a verb that has checked its arguments."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _ToLocal.apply(x, Layout.of(x), grad_layout, verb)
    with torch.no_grad():
        local = local_tensor(x)
    return local.detach() if local.requires_grad else local  # torch's own parts may want a gradient


def read_grad_layout(asked: str, grad_layout: LayoutLike | None, layout: Layout, shape: Sequence[int]) -> Layout | None:
    """Return the layout of the gradient of parts, every one of which has to be the gradient of one part of `layout`.

    Raises:
        TypeError: no layout.
        ValueError: one that does not fit, or that gives a rank another part than `layout` does.
    """
    if grad_layout is None:
        return None
    wanted = read_layout(f"{asked} with this grad_layout", grad_layout, None, layout.mesh)
    torch_form(wanted, shape)
    seen, hint = f"layout: {layout}   grad_layout: {wanted}", "the same splits, and partial={...} where gradients add"
    if sorted(wanted.rank_list) != sorted(layout.rank_list):
        raise ValueError(explain(asked, "grad_layout lies on other ranks than the parts", seen, hint))
    if wanted._axes == layout._axes and wanted.splits(len(shape)) == layout.splits(len(shape)):
        return wanted
    expected, got = (which.slices(shape)[np.argsort(which.rank_list)] for which in (layout, wanted))
    differ = (expected != got).any((1, 2))
    if differ.any():
        row = int(differ.argmax())
        rank = sorted(layout.rank_list)[row]
        blame = f"grad_layout gives rank {rank} {_ranges(got[row])}, and its part is {_ranges(expected[row])}"
        raise ValueError(explain(asked, blame, seen, hint))
    return wanted


def _ranges(part: npt.NDArray[np.int64]) -> str:
    """Return a part as one writes it.

    >>> _ranges(np.array([[0, 3], [2, 4]]))
    '[0:3, 2:4]'
    """
    return f"[{', '.join(f'{start}:{stop}' for start, stop in part.tolist())}]"


class FromLocal(torch.autograd.Function):
    """A DTensor made of local tensors; backward gives each rank the gradient of its own."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, local: torch.Tensor, layout: Layout, shape: tuple[int, ...], grad_layout: Layout | None
    ) -> DTensor:
        ctx.layout, ctx.grad_layout = layout, grad_layout
        return build(local.view_as(local), layout, shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[torch.Tensor, None, None, None]:  # noqa: D102
        layout: Layout = ctx.layout
        if ctx.grad_layout is not None:
            there = back_to(grad, ctx.grad_layout)
            return take_part(there, cotangents(layout, grad.dim(), ("avg",)), "from_local"), None, None, None
        over, kinds = _pending(layout)
        if kinds - {"sum", "avg"}:
            asked = "cannot pass a gradient back through from_local"
            blame = f"copies pend {', '.join(sorted(kinds))}, and whose copy counts is known only when all are compared"
            hint = "redistribute with torch.no_grad(), a sum instead, or grad_layout=... for what you mean"
            raise ValueError(explain(asked, blame, f"layout: {layout}", hint))
        part = take_part(back_to(grad, layout.reset_partial()), cotangents(layout, grad.dim()), "from_local")
        return part / over if kinds == {"avg"} else part, None, None, None


def cotangents(layout: Layout, ndim: int, kept: tuple[str, ...] = ()) -> Layout | None:
    """Return how gradients of the gradients of parts lie, for second derivatives: as the parts, where ranks hold the
    same; to be added, where each holds a copy of its own, or as that is reduced, if it is one of the kinds kept."""
    if not torch.is_grad_enabled():
        return None
    entries = layout.placement_to_tensor_map(ndim).alias_placements or ()
    kinds = {name: kind if kind in kept else "sum" for name, kind in layout.partial.items()}
    return Layout._make(layout._axes, mesh=layout.mesh)(*entries, partial=kinds)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, src: Layout, grad_layout: Layout | None, verb: str) -> torch.Tensor:
        ctx.src, ctx.grad_layout, ctx.verb, ctx.shape = src, grad_layout, verb, x.shape
        local = local_tensor(x)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[DTensor, None, None, None]:
        src, given = ctx.src, ctx.grad_layout
        if given is None:
            refuse_ambiguous(src, ctx.shape, ctx.verb)
            given = src
        if not _pending(given)[1]:  # then nothing is added up, and the result would be in the memory of `grad`
            grad = grad.clone(memory_format=torch.contiguous_format)
        whole = FromLocal.apply(grad, given, ctx.shape, given.reset_partial())
        return redistribute(whole, gradient_layout(src, given.reset_partial())), None, None, None


def refuse_ambiguous(src: Layout, shape: torch.Size, verb: str) -> None:
    """Raise ValueError for a gradient of which several ranks have the same element: they may say different things."""
    split = {src.alias_name[axis] for chain in src.splits(len(shape)) for axis in chain}
    pairs = zip(src.alias_name, src.mesh_shape, strict=True)
    loose = [name for name, size in pairs if size > 1 and name not in split]
    if loose:
        names = ", ".join(map(repr, loose))
        asked = f"cannot pass a gradient back through {verb}"
        blame = (
            f"over {names} ranks hold the same or copies to reduce; their gradients could be one gradient, computed "
            "alike on all, or shares to be added"
        )
        entries = src.placement_to_tensor_map(len(shape)).alias_placements or ()
        add = ", ".join([*map(repr, entries), f"partial={dict.fromkeys(loose, 'sum')!r}"])
        hint = f"{verb}(x, grad_layout={entries!r}) if alike; Layout.of(x)({add}) if shares; x.detach() if neither"
        raise ValueError(explain(asked, blame, f"{'x' if verb == 'to_local' else 'result'}: {src}", hint))


def _pending(layout: Layout) -> tuple[int, set[str]]:
    """Return the number of copies that are pending, and the kinds of reduction."""
    live = {name: kind for name, kind in layout.partial.items() if layout.mesh_shape[layout._axes.index(name)] > 1}
    return math.prod(layout.mesh_shape[layout._axes.index(name)] for name in live), set(live.values())


# -- shapes ----------------------------------------------------------------------------------------------------------


def _check_part(asked: str, local: torch.Tensor, layout: Layout, shape: tuple[int, ...]) -> None:
    rank = dist.get_rank()
    if rank not in layout.rank_list:
        return
    expected = layout.local_shape(shape, rank)
    if tuple(local.shape) != expected:
        blame = f"rank {rank}'s part has shape {tuple(local.shape)}, and the layout gives it {expected}"
        seen = f"shape: {shape}   layout: {layout}"
        raise ValueError(
            explain(asked, blame, seen, "the global shape, and parts as layout.local_slice(shape) cuts them")
        )


def _agreed_shape(asked: str, local: torch.Tensor, layout: Layout) -> tuple[int, ...]:
    """Return the global shape, which all parts must be of one shape for."""
    splits = layout.splits(local.dim())
    parts = [count_parts(layout.mesh_shape, chain) for chain in splits]
    ranks = tuple(sorted(layout.rank_list))
    if dist.get_rank() not in ranks:
        blame, seen = "this rank is not on the mesh, so its part says nothing", f"layout: {layout}"
        raise ValueError(explain(asked, blame, seen, "shape=(...)"))
    if len(ranks) > 1:
        _check_alike(asked, layout, ranks, _all_parts(local, ranks, layout))
    return tuple(size * count for size, count in zip(local.shape, parts, strict=True))


def _check_alike(asked: str, layout: Layout, ranks: tuple[int, ...], parts: list[tuple[tuple[int, ...], str]]) -> None:
    hints = {"shapes": "shape=(...), the whole tensor's", "dtypes": "parts of one dtype"}
    for (which, hint), found in zip(hints.items(), zip(*parts, strict=True), strict=True):
        if len(set(found)) > 1:
            lines = "\n  ".join(f"rank {rank}: {each}" for rank, each in zip(ranks, found, strict=True))
            blame = f"the parts have different {which}, and which whole they are parts of is not guessed"
            raise ValueError(explain(asked, blame, f"layout: {layout}\n  {lines}", hint))


def _all_parts(local: torch.Tensor, ranks: tuple[int, ...], layout: Layout) -> list[tuple[tuple[int, ...], str]]:
    """Return shape and dtype of every rank's part, exchanged over the mesh."""
    mine = [local.dim(), *local.shape, *[0] * (_MOST_DIMS - local.dim()), _DTYPES.index(local.dtype)]
    rows = gather_numbers(mine, group_of(ranks, layout.alias_name, layout.mesh), local.device)
    return [(tuple(row[1 : 1 + row[0]]), str(_DTYPES[row[-1]]).removeprefix("torch.")) for row in rows]
