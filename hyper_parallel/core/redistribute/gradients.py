"""Redistributions and local tensors that pass gradients on.

The gradients of a local tensor on several ranks may be one gradient, computed by each of them, or partial sums. The
tensor itself does not know which. torch assumes the former and, if that is wrong, trains on a wrong gradient without
an error. Here the caller declares one of them, or the backward pass raises ValueError.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed.tensor as torch_tensor
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.common.torch_compat import is_set_to, runs_eagerly
from hyper_parallel.core.dtensor.convert import build, local_tensor, on_mesh_device, torch_form
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Partial
from hyper_parallel.core.dtensor.spelling import is_strided
from hyper_parallel.core.machine.description import Machine
from hyper_parallel.core.mesh.device_mesh import axes_of
from hyper_parallel.core.redistribute.execute import Working, drive, start
from hyper_parallel.core.redistribute.plan import TooTight, plan_here
from hyper_parallel.core.redistribute.transition import LINEAR

Terms = tuple[str | Machine | None, int | None]
"""The machine and the limit of memory that a redistribution was asked for with."""

ANY: Terms = (None, None)


# -- a DTensor in another layout ---------------------------------------------------------------------------------------


def moved(x: DTensor, target: Layout, terms: Terms = ANY) -> DTensor:
    """Redistribute x to a layout on a DeviceMesh; arguments are already checked."""
    return unmoved(x) if _is_there(x, target, terms) else _started(x, target, terms).wait()


def moving(x: DTensor, target: Layout, terms: Terms = ANY) -> PendingRedistribute:
    """Start to redistribute x, and return after the first collective is issued."""
    if _is_there(x, target, terms):
        return PendingRedistribute(x, None, target, unmoved(x))
    return _started(x, target, terms)


def unmoved(x: DTensor) -> DTensor:
    """Return x itself; if it requires a gradient, the gradient is redistributed to the layout of x."""
    return _Unmoved.apply(x) if torch.is_grad_enabled() and x.requires_grad else x


def _is_there(x: DTensor, target: Layout, terms: Terms) -> bool:
    """Return True if x is in that layout already and no machine or memory limit was given."""
    mesh = x.device_mesh
    if target.mesh is not mesh:
        _check_slices("cannot redistribute", mesh, target)
        return False
    names, wanted = torch_form(target, x.shape)
    return names is None and x.placements == wanted and terms == ANY and mesh.get_coordinate() is not None


def _started(x: DTensor, target: Layout, terms: Terms) -> PendingRedistribute:
    x = _readable(x)
    src = Layout.of(x)
    machine, limit = terms
    steps = plan_here(src, target, x.shape, x.dtype, x.device_mesh, machine, limit)
    with torch.no_grad():
        working = start(steps, on_mesh_device(local_tensor(x), x.device_mesh), _mesh_for_groups(src, target))
    return PendingRedistribute(x, working, target, terms=terms)


def _mesh_for_groups(src: Layout, target: Layout) -> DeviceMesh | None:
    return src.mesh if src.mesh is not None and src.mesh.get_coordinate() is not None else target.mesh


def _readable(x: DTensor) -> DTensor:
    """Return x in placements that a layout can express; torch reduces and gathers the others.

    Examples are torch's norms (pending sums of powers), embeddings with split tables, and views that merge two split
    dims into one, because their parts are strided.
    """
    replicate = torch_tensor.Replicate()
    kinds = [placement.is_partial() and type(placement) is not Partial for placement in x.placements]
    if any(kinds):
        reduced = [replicate if kind else placement for kind, placement in zip(kinds, x.placements, strict=True)]
        x = x.redistribute(x.device_mesh, reduced)
    if not any(is_strided(placement) for placement in x.placements):
        return x
    try:
        Layout.of(x)
    except ValueError:
        split = [getattr(placement, "dim", None) for placement in x.placements]
        dims = {dim for dim, placement in zip(split, x.placements, strict=True) if is_strided(placement)}
        if any(x.size(dim) % x.device_mesh.size() for dim in dims if dim is not None):
            raise  # torch loses rows of uneven strided parts
        gathered = [replicate if dim in dims else placement for dim, placement in zip(split, x.placements, strict=True)]
        return x.redistribute(x.device_mesh, gathered)
    return x


def _check_slices(asked: str, mesh: DeviceMesh, target: Layout) -> None:
    """Refuse to move into or out of a slice of a larger mesh, because ranks of other slices run the same code there.
    Ranks of one slice would then wait for ranks of another, which issue other collectives."""
    to = target.mesh
    assert to is not None, "read_layout sees to a mesh"
    for name, part, other in (("the mesh of x", mesh, to), ("the mesh of layout", to, mesh)):
        root = getattr(part, "_root_mesh", None)
        own = axes_of(part).ranks
        if root is None or root.size() == len(own) or {*axes_of(other).ranks} <= {*own}:
            continue
        blame = f"{name} is a slice, of which ranks elsewhere have another, and the other mesh reaches beyond it"
        seen = f"mesh of x: {axes_of(mesh)}   layout: {target}   sliced from: {axes_of(root)}"
        hint = "both layouts on the mesh that was sliced, 'None' or pending over its other axes"
        raise InvalidValue(asked, blame, seen, hint)


class PendingRedistribute:
    """A redistribution under way, e.g. `redistribute(x, layout, async_op=True)`.

    Its creation starts the first collective; `wait` starts the others. All ranks must wait in the same order.
    """

    def __init__(
        self, x: DTensor, working: Working | None, target: Layout, result: DTensor | None = None, terms: Terms = ANY
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
        """Complete the redistribution and return the DTensor."""
        if self._result is None:
            if self._local is None:
                assert self._working is not None, "either there is a result or something works on it"
                with torch.no_grad():
                    self._first.wait()
                    self._local = drive(self._working)
            self._result = _link(self._x, self._local, self._target, self._terms)
            self._working = self._first = self._local = None
        return self._result


# -- gradients -------------------------------------------------------------------------------------------------------


def _link(x: DTensor, local: torch.Tensor, target: Layout, terms: Terms) -> DTensor:
    if torch.is_grad_enabled() and x.requires_grad:
        return _Redistributed.apply(x, local, target, terms)
    return build(local, target, x.shape)


def gradient_layout(src: Layout, grad: Layout) -> Layout:
    """Return the layout for the gradient of a tensor in layout `src`: as the tensor, with the full gradient per copy.
    Pending sums of the gradient stay pending along axes where the tensor has pending copies."""
    if not src.is_partial():
        return src
    same = src.axes == grad.axes
    kept = {name: kind for name, kind in grad.partial.items() if same and kind in LINEAR and name in src.partial}
    entries = src.placement_to_tensor_map(len(src.tensor_map or ())).alias_placements or ()
    return src(*entries, partial=kept)


@runs_eagerly
def back_to(grad: DTensor, layout: Layout, terms: Terms = ANY) -> DTensor:
    """Redistribute a gradient into memory that no other tensor shares, because scaling one of two gradients in place
    would scale the other."""
    try:
        result = moved(grad, layout, terms)
    except TooTight as error:  # the limit fits forward but not backward: use the smallest limit that does
        result = moved(grad, layout, (terms[0], error.least))
    with torch.no_grad():
        shared = result is not grad and is_set_to(local_tensor(result), local_tensor(grad))
    return cast(DTensor, result.clone()) if shared else result


class _Redistributed(torch.autograd.Function):
    """Links a redistributed part to its source DTensor."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, local: torch.Tensor, target: Layout, terms: Terms) -> DTensor:
        ctx.src, ctx.terms = Layout.of(x), terms
        return build(local, target, x.shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None, None, None]:
        return back_to(grad, gradient_layout(ctx.src, Layout.of(grad)), ctx.terms), None, None, None


class _Unmoved(torch.autograd.Function):
    """Links a DTensor to itself, so that its gradient arrives in its layout."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> DTensor:
        ctx.spec = x._spec
        return DTensor(x._local_tensor, x._spec, requires_grad=x.requires_grad)  # as torch's own redistribute does

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> DTensor:
        return back_to(grad, gradient_layout(Layout.of_spec(ctx.spec), Layout.of(grad)))


# -- local tensors -----------------------------------------------------------------------------------------------------


def take_part(x: DTensor, grad_layout: Layout | None, verb: str) -> torch.Tensor:
    """Return this rank's part of a DTensor; `verb` names the caller in errors."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _ToLocal.apply(x, Layout.of(x), grad_layout, verb)
    with torch.no_grad():
        local = local_tensor(x)
    return local.detach() if local.requires_grad else local  # torch's own parts may require a gradient


class FromLocal(torch.autograd.Function):
    """Makes a DTensor of local tensors; backward gives each rank the gradient of its part."""

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
            raise InvalidValue(asked, blame, f"layout: {layout}", hint)
        part = take_part(back_to(grad, layout.reset_partial()), cotangents(layout, grad.dim()), "from_local")
        return part / over if kinds == {"avg"} else part, None, None, None


def cotangents(layout: Layout, ndim: int, kept: tuple[str, ...] = ()) -> Layout | None:
    """Return the layout of second-order gradients: replicated where the parts are, pending sums where each rank holds a
    pending copy. Reductions in `kept` stay pending under their own kind. None if no gradient is recorded."""
    if not torch.is_grad_enabled():
        return None
    entries = layout.placement_to_tensor_map(ndim).alias_placements or ()
    kinds = {name: kind if kind in kept else "sum" for name, kind in layout.partial.items()}
    return layout(*entries, partial=kinds)


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
        if not _pending(given)[1]:  # without a reduction the result would share the memory of `grad`
            grad = grad.clone(memory_format=torch.contiguous_format)
        full = FromLocal.apply(grad, given, ctx.shape, given.reset_partial())
        return moved(full, gradient_layout(src, given.reset_partial())), None, None, None


def refuse_ambiguous(src: Layout, shape: torch.Size, verb: str) -> None:
    """Raise ValueError if several ranks hold gradients of the same element, since they may be equal or partial sums."""
    split = {src.alias_name[axis] for chain in src.splits(len(shape)) for axis in chain}
    pairs = zip(src.alias_name, src.mesh_shape, strict=True)
    loose = [name for name, size in pairs if size > 1 and name not in split]
    if loose:
        names = ", ".join(map(repr, loose))
        asked = f"cannot pass a gradient back through {verb}"
        blame = (
            f"over {names} ranks hold the same or copies to reduce; their gradients could be one gradient, computed "
            "by each rank, or partial sums to be added"
        )
        entries = src.placement_to_tensor_map(len(shape)).alias_placements or ()
        add = ", ".join([*map(repr, entries), f"partial={dict.fromkeys(loose, 'sum')!r}"])
        hint = f"{verb}(x, grad_layout={entries!r}) if equal; Layout.of(x)({add}) if partial; x.detach() if neither"
        raise InvalidValue(asked, blame, f"{'x' if verb == 'to_local' else 'result'}: {src}", hint)


def _pending(layout: Layout) -> tuple[int, set[str]]:
    """Return the number of pending copies, and the kinds of reduction."""
    sizes = dict(zip(layout.alias_name, layout.mesh_shape, strict=True))
    live = {name: kind for name, kind in layout.partial.items() if sizes[name] > 1}
    return math.prod(sizes[name] for name in live), set(live.values())
