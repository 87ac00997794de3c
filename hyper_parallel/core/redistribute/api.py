"""The verbs on torch's DTensor that keep it one: `redistribute` and `distribute_tensor`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, cast, overload

import torch
import torch.distributed.tensor as torch_tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.checks import check, check_int
from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.common.torch_compat import runs_eagerly
from hyper_parallel.core.dtensor.convert import in_split_order, to_placements, to_torch
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Partial, Placement, Shard
from hyper_parallel.core.dtensor.placements import is_strided
from hyper_parallel.core.mesh.device_mesh import axes_of, reorder_axes
from hyper_parallel.core.redistribute.arguments import LayoutLike, check_dtensor, read_layout
from hyper_parallel.core.redistribute.cost import Topology, default_topology
from hyper_parallel.core.redistribute.execute import Working, drive, start
from hyper_parallel.core.redistribute.plan import TooTight, plan
from hyper_parallel.core.redistribute.transition import LINEAR

Terms = tuple[Topology | None, int | None]
"""The topology and the limit of memory that a redistribution was asked for with."""


@overload
def redistribute(
    x: torch.Tensor,
    layout: LayoutLike | None = None,
    placements: Sequence[Any] | None = None,
    *,
    async_op: Literal[False] = False,
    topology: Topology | None = None,
    max_extra_bytes: int | None = None,
) -> DTensor: ...


@overload
def redistribute(
    x: torch.Tensor,
    layout: LayoutLike | None = None,
    placements: Sequence[Any] | None = None,
    *,
    async_op: Literal[True],
    topology: Topology | None = None,
    max_extra_bytes: int | None = None,
) -> PendingRedistribute: ...


@runs_eagerly
def redistribute(
    x: torch.Tensor,
    layout: LayoutLike | None = None,
    placements: Sequence[Any] | None = None,
    *,
    async_op: bool = False,
    topology: Topology | None = None,
    max_extra_bytes: int | None = None,
) -> DTensor | PendingRedistribute:
    """Return the same tensor in another layout; all ranks of both meshes call it.

        y = redistribute(x, layout)
        y = redistribute(x, ("None", "tp"))  # on the mesh of x
        y = redistribute(x, mesh, [Shard(0), Replicate()])

    Forward: the cheapest plan on the topology, see `plan`. Backward: likewise, on the same terms, from the gradient's
    layout to that of x; where x has copies to reduce, every rank along them gets the whole gradient, unless it arrives
    as copies itself. What torch's views have left split in strided parts, torch gathers first; and it reduces what its
    norms have left pending.

    Args:
        x: a DTensor, of any shape.
        layout: where it should be; its mesh may be another one.
        placements: beside a mesh, torch's placements or alias entries.
        async_op: return at once, with the first collective under way; `wait()` on what is returned gives the DTensor.
            Until then x is being read and must not be changed.
        topology: what the plan is priced on. Default: by the type of device.
        max_extra_bytes: see `plan`. Where no plan for the gradient meets it, the one that needs the least memory does.

    Returns:
        A DTensor; x itself if it is in that layout already and no gradient is recorded. With `async_op`, a
        `PendingRedistribute`.

    Raises:
        TypeError: x is no DTensor, layout no layout.
        ValueError: a layout that does not fit, a rank on neither mesh, a slice of a mesh that the other mesh reaches
            beyond, a limit that no plan meets.
    """
    asked = "cannot redistribute"
    flag: object = async_op
    if not isinstance(flag, bool):  # in sight, as this is called for every tensor
        check(asked, "bool", async_op=async_op)
    x = check_dtensor(asked, x)
    mesh = x.device_mesh
    if layout is mesh and _is_where_it_should_be(x, placements, async_op, topology, max_extra_bytes):
        return _Unmoved.apply(x) if torch.is_grad_enabled() and x.requires_grad else x
    target = read_layout(asked, layout, placements, mesh)
    if target.mesh is not mesh:
        _check_slices(asked, mesh, target)
    shape = x.shape
    names, wanted = torch_form(target, shape)
    is_there = names is None and target.mesh is mesh and x.placements == wanted and mesh.get_coordinate() is not None
    if is_there and max_extra_bytes is None and topology is None:
        # With a gradient to come, where that goes is still to be seen to.
        result = _Unmoved.apply(x) if torch.is_grad_enabled() and x.requires_grad else x
        return PendingRedistribute(x, None, target, result) if async_op else result
    x = _readable(x)
    src = Layout.of(x)
    on = topology if topology is not None else default_topology(mesh.device_type)
    steps = plan(src, target, shape, x.dtype, on, max_extra_bytes=max_extra_bytes)
    with torch.no_grad():
        working = start(steps, local_tensor(x), _mesh_for_groups(src, target))
    pending = PendingRedistribute(x, working, target, terms=(topology, max_extra_bytes))
    return pending if async_op else pending.wait()


def _is_where_it_should_be(x: DTensor, placements: Sequence[Any] | None, *options: Any) -> bool:
    """Return whether there is nothing to do but to hand x back, seen from its placements alone."""
    return (
        isinstance(placements, (tuple, list))
        and x.placements == tuple(placements)
        and not any(option is not None and option is not False for option in options)
        and x.device_mesh.get_coordinate() is not None
    )


def _readable(x: DTensor) -> DTensor:
    """Return x, by torch reduced and gathered where no layout says what its parts are.

    That is what torch's norms leave behind, of which powers are to be added up, and its embeddings of split tables; and
    its views that merge two split dims into one: their parts are strided.
    """
    whole = torch_tensor.Replicate()
    kinds = [placement.is_partial() and type(placement) is not Partial for placement in x.placements]
    if any(kinds):
        reduced = [whole if kind else placement for kind, placement in zip(kinds, x.placements, strict=True)]
        x = x.redistribute(x.device_mesh, reduced)
    if not any(is_strided(placement) for placement in x.placements):
        return x
    try:
        Layout.of(x)
    except ValueError:
        split = [getattr(placement, "dim", None) for placement in x.placements]
        dims = {dim for dim, placement in zip(split, x.placements, strict=True) if is_strided(placement)}
        if any(x.size(dim) % x.device_mesh.size() for dim in dims if dim is not None):
            raise  # of uneven parts torch loses rows
        gathered = [whole if dim in dims else placement for dim, placement in zip(split, x.placements, strict=True)]
        return x.redistribute(x.device_mesh, gathered)
    return x


def _check_slices(asked: str, mesh: DeviceMesh, target: Layout) -> None:
    """Refuse to leave or to enter a slice of a larger mesh: elsewhere in that the same code has another slice in hand,
    so that the ranks of one would wait for those of the other, which do something else."""
    to = target.mesh
    assert to is not None, "read_layout sees to a mesh"
    for name, part, other in (("the mesh of x", mesh, to), ("the mesh of layout", to, mesh)):
        whole = getattr(part, "_root_mesh", None)
        own = axes_of(part).ranks
        if whole is None or whole.size() == len(own) or {*axes_of(other).ranks} <= {*own}:
            continue
        blame = f"{name} is a slice, of which ranks elsewhere have another, and the other mesh reaches beyond it"
        seen = f"mesh of x: {axes_of(mesh)}   layout: {target}   sliced from: {axes_of(whole)}"
        hint = "both layouts on the mesh that was sliced, 'None' or pending over its other axes"
        raise ValueError(explain(asked, blame, seen, hint))


class PendingRedistribute:
    """A redistribution under way.

    The first collective was started when it was made; `wait` starts those after it. All ranks wait in the same order.
    """

    def __init__(
        self,
        x: DTensor,
        working: Working | None,
        target: Layout,
        result: DTensor | None = None,
        terms: Terms = (None, None),
    ) -> None:
        self._x = x
        self._terms = terms
        self._target = target
        self._result = result
        self._working = working
        self._first: Any = None
        self._local: torch.Tensor | None = None
        if working is not None:
            with torch.no_grad():
                try:
                    self._first = next(working)
                except StopIteration as end:
                    self._local = end.value

    @runs_eagerly
    def wait(self) -> DTensor:
        """Return the DTensor, once all that is left to do is done."""
        if self._result is None:
            if self._local is None:
                assert self._working is not None, "either there is a result or something works on it"
                with torch.no_grad():
                    self._first.wait()
                    self._local = drive(self._working)
            self._result = _link(self._x, self._local, self._target, self._terms)
            self._working = self._first = self._local = None
        return self._result


@runs_eagerly
def distribute_tensor(
    tensor: torch.Tensor,
    layout: LayoutLike,
    placements: Sequence[Any] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Return a DTensor of which every rank holds its part of a whole tensor.

        x = distribute_tensor(torch.randn(8, 8), layout)

    Forward: parts are scattered, and replicas broadcast, from one rank; with `src_data_rank=None` nothing is
    communicated, and where a rank holds all of it, it is the tensor's own memory. The result is a leaf, as torch's is.

    Args:
        tensor: the whole tensor, of the same shape on every rank; a leaf.
        layout: where its parts go; a reduction that is pending there is prepared without communication.
        placements: beside a mesh, torch's placements or alias entries.
        src_data_rank: whose tensor counts: of the rank with this index along every axis, as in torch; None: every
            rank's own.

    Raises:
        TypeError: no tensor, or a DTensor.
        ValueError: a tensor that was computed from one that wants a gradient, as the result would not be linked to it;
            a layout without a mesh, or that does not fit; a `src_data_rank` that some axis does not have.
    """
    asked = "cannot distribute a tensor"
    _check_whole(asked, tensor)
    target = read_layout(asked, layout, placements, None)
    _check_source(asked, src_data_rank, target)
    mesh, shape = target.mesh, tuple(tensor.shape)
    assert mesh is not None, "read_layout sees to a mesh"
    torch_form(target, shape)  # a layout that no DTensor can have is found out before anything is sent
    whole = target.reset_partial()
    plain = in_split_order(whole, len(shape))
    ordered = mesh if plain is whole else reorder_axes(mesh, plain.alias_name)
    split = to_placements(plain, shape)
    with torch.no_grad():
        given = tensor.detach()
        if src_data_rank is not None and not isinstance(split[0], Shard):
            given = given.clone(memory_format=torch.contiguous_format)  # torch would broadcast into the caller's
        parts = torch_tensor.distribute_tensor(given, ordered, split, src_data_rank=src_data_rank)
        on_mesh = mesh.get_coordinate() is not None
        result = build(parts.to_local(), whole if on_mesh else target, shape)
        if on_mesh and target.is_partial():
            result = redistribute(result, target)
    result.requires_grad_(tensor.requires_grad)
    return result


def _check_whole(asked: str, tensor: object) -> None:
    seen = f"tensor: {type(tensor)!r}"
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
        blame = f"tensor is a {type(tensor).__name__}, not a plain tensor"
        hint = "redistribute(x, layout) for a DTensor, torch.as_tensor(...) for numbers"
        raise TypeError(explain(asked, blame, seen, hint))
    if not tensor.is_leaf:
        blame = "tensor was computed from one that wants a gradient, and the result, a leaf, would not pass one on"
        hint = "tensor.detach(), or from_local(tensor, layout()) and redistribute, which pass gradients on"
        raise ValueError(explain(asked, blame, f"{seen}   grad_fn: {type(tensor.grad_fn).__name__}", hint))


def _check_source(asked: str, src_data_rank: int | None, target: Layout) -> None:
    if src_data_rank is None:
        return
    index, least = check_int(src_data_rank), min(target.mesh_shape)
    seen = f"src_data_rank: {src_data_rank!r}   layout: {target}"
    if index is None:
        blame = f"src_data_rank is a {type(src_data_rank).__name__}, not an int"
        raise TypeError(explain(asked, blame, seen, "0, or None for every rank's own"))
    if not 0 <= index < least:
        small = target.alias_name[target.mesh_shape.index(least)]
        blame = f"src_data_rank {index} is an index along every axis, and axis {small!r} has {least} ranks"
        raise ValueError(explain(asked, blame, seen, f"0 to {least - 1}, or None for every rank's own"))


# -- DTensors from parts ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _torch_form(layout: Layout, shape: torch.Size) -> tuple[tuple[str, ...] | None, tuple[Placement, ...]]:
    """Return the placements of a DTensor, and the order of axes that they are for if it is not the mesh's own."""
    plain = in_split_order(layout, len(shape))
    try:
        return None, to_placements(layout, shape)
    except ValueError:
        if plain is layout:
            raise
        return plain.alias_name, to_placements(plain, shape)


def torch_form(layout: Layout, shape: Sequence[int]) -> tuple[tuple[str, ...] | None, tuple[Placement, ...]]:
    """Return torch's placements for a layout, and the order of axes that they are for if it is not the mesh's own."""
    return _torch_form(layout, torch.Size(shape))


def build(local: torch.Tensor, layout: Layout, shape: Sequence[int]) -> DTensor:
    """Return a DTensor of a rank's part; nothing is checked and nothing communicated."""
    names, placements = torch_form(layout, shape)
    mesh = layout.mesh
    assert mesh is not None, "the layout has been given a mesh"
    if names is not None:
        mesh, placements = to_torch(layout, shape)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride_like(local, shape)
    )


def stride_like(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return strides of the whole tensor as those of a part are: dims in the same order, and gaps where it has gaps.

    torch asks them, and not the part's, whether a view will do.
    """
    if local.is_contiguous() or local.dim() != len(shape):
        return contiguous_stride(shape)
    strides, behind = list(local.stride()), 1
    for dim in reversed(range(local.dim())):
        if local.size(dim) == 1:  # then it may be anything
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
    """Return the local tensor of x, with its gradient, once its communication is complete."""
    local = x.to_local()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _mesh_for_groups(src: Layout, target: Layout) -> DeviceMesh | None:
    return src.mesh if src.mesh is not None and src.mesh.get_coordinate() is not None else target.mesh


# -- gradients -------------------------------------------------------------------------------------------------------


def _link(x: DTensor, local: torch.Tensor, target: Layout, terms: Terms) -> DTensor:
    if torch.is_grad_enabled() and x.requires_grad:
        return _Redistributed.apply(x, local, target, terms)
    return build(local, target, x.shape)


def gradient_layout(src: Layout, grad: Layout) -> Layout:
    """Return where the gradient of a tensor in layout `src` goes: as the tensor, each rank with the whole gradient of
    the copy it holds; sums that are pending already stay so along axes where the tensor's are."""
    if not src.is_partial():
        return src
    same = src._axes == grad._axes
    kept = {name: kind for name, kind in grad.partial.items() if same and kind in LINEAR and name in src.partial}
    entries = src.placement_to_tensor_map(len(src.tensor_map or ())).alias_placements or ()
    return Layout._make(src._axes, mesh=src.mesh)(*entries, partial=kept)


def back_to(grad: DTensor, layout: Layout, terms: Terms = (None, None)) -> DTensor:
    """Redistribute a gradient. It does not come back in the same memory as another tensor: two gradients that share
    memory would both be scaled when one is."""
    topology, limit = terms
    try:
        result = redistribute(grad, layout, topology=topology, max_extra_bytes=limit)
    except TooTight as error:  # the way there fits, but not the way back: with the least that does
        result = redistribute(grad, layout, topology=topology, max_extra_bytes=error.least)
    with torch.no_grad():
        shared = result is not grad and local_tensor(result).is_set_to(local_tensor(grad))
    return cast(DTensor, result.clone()) if shared else result


class _Redistributed(torch.autograd.Function):
    """Ties a redistributed part to the DTensor it came from."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, local: torch.Tensor, target: Layout, terms: Terms) -> DTensor:
        ctx.src, ctx.terms = Layout.of(x), terms
        return build(local, target, x.shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None, None, None]:
        return back_to(grad, gradient_layout(ctx.src, Layout.of(grad)), ctx.terms), None, None, None


class _Unmoved(torch.autograd.Function):
    """Ties a DTensor to itself, so that its gradient comes back in its layout."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> DTensor:
        ctx.spec = x._spec
        return DTensor(x._local_tensor, x._spec, requires_grad=x.requires_grad)  # as torch's own redistribute does

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> DTensor:
        return back_to(grad, gradient_layout(Layout.of_spec(ctx.spec), Layout.of(grad)))
