"""Entry and exit of modules that compute on local tensors: `enter` takes the local shard, `leave` wraps one.

Each fuses a redistribution with a `to_local` or `from_local`, with one communication forward and one backward. For
example, the gradient of a gathered input is reduce-scattered to the input's shards. Separate steps would all-reduce
it and then drop most of the result.

    forward    enter: x -> target, take the shard         leave: the shards in produced -> target
    backward   enter: shards in grad_layout -> as x       leave: the gradient -> as the shards, of sums in full

Callers check layouts and shapes once, because an entry or exit without communication takes only microseconds.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_leaves

from hyper_parallel.core.common.errors import InvalidState, InvalidValue
from hyper_parallel.core.common.groups import gather_numbers, group_of
from hyper_parallel.core.common.torch_compat import has_saved_tensors_hooks, is_set_to, runs_eagerly
from hyper_parallel.core.dtensor.convert import build, contiguous_stride, device_of, stride_like, torch_form
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.ownership import count_parts
from hyper_parallel.core.dtensor.placement_types import Partial, Placement, Replicate
from hyper_parallel.core.dtensor.spelling import is_strided
from hyper_parallel.core.redistribute.api import redistribute
from hyper_parallel.core.redistribute.execute import drive, start
from hyper_parallel.core.redistribute.gradients import FromLocal, back_to, cotangents, refuse_ambiguous
from hyper_parallel.core.redistribute.plan import plan_here


@runs_eagerly
def enter(x: DTensor, target: Layout, grad_layout: Layout | None = None) -> torch.Tensor:
    """Redistribute a DTensor and return this rank's shard as a plain tensor.

        shard = enter(x, layout())  # gathered
        shard = enter(x, layout(), layout(partial={"tp": "sum"}))  # and over tp, gradients add up

    Forward: as `redistribute`; without communication if x is already in that layout, and the shard then shares its
    memory. Backward: one redistribution from `grad_layout` to the layout of x; for pending x, to the full gradient.

    Args:
        x: a DTensor.
        target: the layout to take the shard of, with a mesh.
        grad_layout: layout of the shards' gradients: split as `target`, and pending where they add up. None: as the
            shards; backward then refuses axes over which ranks hold the same elements, as `to_local` does.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return cast(torch.Tensor, _Enter.apply(x, target, grad_layout, _hands_gradients_on(x)))
    shard = _shard_of(x, target)
    return shard.detach() if shard.requires_grad else shard  # torch's own shards may require a gradient


@runs_eagerly
def leave(local: torch.Tensor, produced: Layout, shape: Sequence[int], target: Layout | None = None) -> DTensor:
    """Wrap the shards of all ranks as a DTensor, and redistribute it.

        y = leave(shard, layout("dp", partial={"tp": "sum"}), (8, 4), layout("dp", "tp"))  # one reduce_scatter

    Forward: as `redistribute`; without `target` no communication. Backward: one redistribution of the gradient to the
    layout of the shards. Replicas and pending sums get the full gradient on every rank. A pending average over n
    ranks gets 1/n of it. The gradient of a pending max, min or prod is refused.

    Args:
        local: this rank's shard; not copied.
        produced: the layout of the shards, with a mesh.
        shape: the full tensor's sizes, in elements.
        target: the layout of the result. Default: `produced`.

    Raises:
        ValueError: a shard of another shape than `produced` gives this rank.
    """
    global_shape = torch.Size(shape)
    _check_shard(local, produced, global_shape)
    to = produced if target is None else target
    if not (torch.is_grad_enabled() and local.requires_grad):
        return wrapped(local_redistributed(waited_for(local.detach()), produced, to, global_shape), to, global_shape)
    if any(kind not in (None, "sum") for kind in produced._partial):
        return redistribute(FromLocal.apply(local, produced, global_shape, None), to)
    return cast(DTensor, _Leave.apply(local, produced, global_shape, to))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, target: Layout, grad_layout: Layout | None, hand_on: bool) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.target, ctx.grad_layout, ctx.hand_on = x._spec, target, grad_layout, hand_on
        shard = _shard_of(x, target)
        return shard.view_as(shard)  # a view, because autograd sets attributes on the result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[DTensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None
        spec, target, given, shape = ctx.spec, ctx.target, ctx.grad_layout, ctx.spec.shape
        if given is None:
            refuse_ambiguous(target, shape, "to_local")
            given = target
        src = target if _is_there(spec.mesh, spec.placements, target, shape) else _source(spec)
        to = src.reset_partial() if src.is_partial() else src
        grad = waited_for(grad)
        if torch.is_grad_enabled():  # second derivatives are recorded
            if not given.is_partial():
                grad = grad.clone(memory_format=torch.contiguous_format)
            full = FromLocal.apply(grad, given, shape, given.reset_partial())
            return redistribute(full, to), None, None, None
        moved = local_redistributed(grad, given, to, shape)
        if moved is grad and not ctx.hand_on:
            moved = grad.clone(memory_format=torch.contiguous_format)
        return wrapped(moved, to, shape), None, None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, produced: Layout, shape: torch.Size, target: Layout) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.produced = produced
        held = waited_for(local.detach())
        moved = local_redistributed(held, produced, target, shape)
        return wrapped(moved, target, shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None
        produced: Layout = ctx.produced
        to = produced.reset_partial() if produced.is_partial() else produced
        if torch.is_grad_enabled():
            return enter(back_to(grad, to), to, cotangents(produced, grad.dim())), None, None, None
        return _shard_of(grad, to), None, None, None


# Autograd node of `leave`. A DTensor with this `grad_fn` passes on the very tensor of its shard's gradient.
_LEFT: type = _Leave._backward_cls


def _hands_gradients_on(x: DTensor) -> bool:
    """Return True if the gradient of x may share the tensor of its shard's gradient.

    Two leaves could receive that tensor, each in its own DTensor. autograd would not see the shared memory; in-place
    clipping would scale it twice. If x comes from `leave`, the tensor leaves the DTensor again, and autograd knows its
    other users.
    """
    return isinstance(x.grad_fn, _LEFT)


# -- shards ----------------------------------------------------------------------------------------------------------


def waited_for(local: torch.Tensor) -> torch.Tensor:
    """Wait for the communication of a local tensor, and return it."""
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _is_there(mesh: DeviceMesh, placements: tuple[Placement, ...], target: Layout, shape: torch.Size) -> bool:
    """Return True if a DTensor already has the placements of a layout; a fast path."""
    names, wanted = torch_form(target, shape)
    return target.mesh is mesh and placements == wanted and names is None and mesh.get_coordinate() is not None


def _shard_of(x: DTensor, target: Layout) -> torch.Tensor:
    """Return this rank's shard of x in a layout, without recording gradients."""
    mesh, placements, shape = x.device_mesh, x.placements, x.shape
    if _is_there(mesh, placements, target, shape):
        return waited_for(x._local_tensor)
    if any(map(_is_odd, placements)):
        with torch.no_grad():
            return _shard_of(x.redistribute(mesh, _whole_where_odd(placements)), target)
    if target.mesh is not mesh or any(map(is_strided, placements)):  # only `redistribute` checks or reads these
        with torch.no_grad():
            return waited_for(redistribute(x, target)._local_tensor)
    return local_redistributed(waited_for(x._local_tensor).detach(), Layout.of_spec(x._spec), target, shape)


def _is_odd(placement: Placement) -> bool:
    """Return True for a pending reduction that no layout expresses, e.g. the masked shards of a row-split embedding."""
    return type(placement) is not Partial and placement.is_partial()


def _whole_where_odd(placements: Sequence[Placement]) -> list[Placement]:
    return [Replicate() if _is_odd(placement) else placement for placement in placements]


def _source(spec: DTensorSpec) -> Layout:
    """Return the layout for the gradient of a DTensor with this spec, before its pending reductions are dropped."""
    if any(map(_is_odd, spec.placements)):
        mesh = Layout.from_device_mesh(spec.mesh)
        return mesh(*_whole_where_odd(spec.placements)).placement_to_tensor_map(len(spec.shape))
    return Layout.of_spec(spec)


def local_redistributed(local: torch.Tensor, src: Layout, dst: Layout, shape: torch.Size) -> torch.Tensor:
    """Redistribute this rank's shard; return `local` itself or a tensor with separate memory."""
    if src is dst or (src == dst and src.mesh is dst.mesh):
        return local
    mesh = src.mesh
    assert mesh is not None, "the callers see to a mesh"
    if dst.mesh is not mesh:
        with torch.no_grad():
            shard = waited_for(redistribute(build(local, src, shape), dst)._local_tensor)
        return local if is_set_to(shard, local) else shard
    steps = plan_here(src, dst, shape, local.dtype, mesh)
    if not steps.steps and local.numel():
        return local
    return drive(start(steps, local, mesh))  # even without steps, because an empty shard may change its shape


@lru_cache(maxsize=4096)
def shard_shape(layout: Layout, shape: torch.Size, rank: int) -> tuple[int, ...] | None:
    """Return the shape of a rank's shard; None for a rank outside the mesh."""
    return layout.local_shape(shape, rank) if rank in layout.rank_list else None


def _check_shard(local: torch.Tensor, produced: Layout, shape: torch.Size) -> None:
    rank = dist.get_rank()
    expected = shard_shape(produced, shape, rank)
    if expected is not None and tuple(local.shape) != expected:
        asked = "cannot make a DTensor from local shards"
        blame = f"rank {rank}'s shard has shape {tuple(local.shape)}, and the layout gives it {expected}"
        seen = f"shape: {tuple(shape)}   layout: {produced}"
        raise InvalidValue(asked, blame, seen, "the shape of the full tensor, and the layout it really has")


# -- DTensors --------------------------------------------------------------------------------------------------------


def wrapped(local: torch.Tensor, layout: Layout, shape: torch.Size) -> DTensor:
    """Wrap a rank's shard as a DTensor without a gradient, as `build` does, in a tenth of the time."""
    names, placements = torch_form(layout, shape)
    mesh = layout.mesh
    assert mesh is not None, "the callers see to a mesh"
    if names is not None or any(map(is_strided, placements)) or mesh.get_coordinate() is None:
        with torch.no_grad():
            return build(local, layout, shape)
    stride = _dense(shape) if local.is_contiguous() else stride_like(local, shape)
    spec = object.__new__(DTensorSpec)
    spec.__dict__.update(_spec_fields(placements, shape, stride, local.dtype))
    spec.__dict__["mesh"] = mesh
    return DTensor(local, spec, requires_grad=False)


@lru_cache(maxsize=4096)
def _dense(shape: torch.Size) -> tuple[int, ...]:
    return contiguous_stride(shape)


@lru_cache(maxsize=4096)
def _spec_fields(
    placements: tuple[Placement, ...], shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a DTensorSpec, on any mesh; cached, because making them dominates the time of an exit."""
    spec = DTensorSpec(cast(Any, None), placements, tensor_meta=TensorMeta(shape, stride, dtype))
    return tuple(vars(spec).items())


# -- the global shape of shards: exchanged between ranks, never guessed ------------------------------------------------


_MOST_DIMS = 32


@runs_eagerly
def agreed_shape(asked: str, local: torch.Tensor, layout: Layout) -> tuple[int, ...]:
    """Compute the global shape from every rank's shard in a layout; all ranks of the mesh call it.

    Communication: one all_gather of 33 integers per rank.

    Args:
        asked: the start of an error message, "cannot ...".
        local: this rank's shard.
        layout: the layout of the shards, with a mesh.

    Raises:
        ValueError: no shape has these shards, e.g. because a dim is not split as `torch.chunk` splits it.
    """
    ranks = tuple(layout.rank_list)
    shards = _all_shapes(local, layout)
    splits = layout.splits(local.dim())
    blame = None
    shape: tuple[int, ...] = ()
    if len({len(shard) for shard in shards}) > 1:
        blame = "the shards have different numbers of dims"
    else:
        shape = tuple(_whole(dim, chain, shards, layout) for dim, chain in enumerate(splits))
        wrong = [r for r, shard in zip(ranks, shards, strict=True) if layout.local_shape(shape, r) != shard]
        if wrong:
            expected = layout.local_shape(shape, wrong[0])
            blame = f"the shards add up to {shape}, of which rank {wrong[0]} would have {expected}"
    if blame is not None:
        lines = "\n  ".join(f"rank {rank}: {shard}" for rank, shard in zip(ranks, shards, strict=True))
        hint = "a layout that the shards have, with dims split as torch.chunk does it"
        raise InvalidValue(asked, blame, f"layout: {layout}\n  {lines}", hint)
    return shape


def _whole(dim: int, chain: tuple[int, ...], shards: list[tuple[int, ...]], layout: Layout) -> int:
    """Return the size of a dim: the sum over the ranks along the axes that split it."""
    sizes = np.array([shard[dim] for shard in shards]).reshape(layout.mesh_shape)
    along = tuple(slice(None) if axis in chain else 0 for axis in range(len(layout.mesh_shape)))
    return int(sizes[along].sum()) if count_parts(layout.mesh_shape, chain) > 1 else int(sizes.flat[0])


def _all_shapes(local: torch.Tensor, layout: Layout) -> list[tuple[int, ...]]:
    """Gather the shape of every rank's shard, in the order of the layout's ranks."""
    mesh = layout.mesh
    assert mesh is not None, "the callers see to a mesh"
    ranks = tuple(sorted(layout.rank_list))
    mine = [local.dim(), *local.shape, *[0] * (_MOST_DIMS - local.dim())]
    device = device_of(local, mesh)  # not meta, because its values are read
    rows = dict(zip(ranks, gather_numbers(mine, group_of(ranks, layout.alias_name, mesh), device), strict=True))
    return [tuple(rows[rank][1 : 1 + rows[rank][0]]) for rank in layout.rank_list]


# -- from one local module to the next, inside of a third --------------------------------------------------------------
# The results of such a module stay plain tensors and carry a mark of their layout, for the next module with a declared
# input. The communication between two layouts is then one autograd operation from shard to shard, without a DTensor.
# The gradient of a marked tensor has the layout of the tensor, with the full gradient for each pending copy.


_NAME = "_hyper_parallel_layout"


class LayoutMark(NamedTuple):
    """The layout of a plain tensor's shard, and the full tensor's sizes in elements."""

    layout: Layout
    shape: torch.Size


def mark_of(shard: torch.Tensor) -> LayoutMark | None:
    """Return the mark of a plain tensor; None for results of operations, which carry no mark."""
    return cast("LayoutMark | None", shard.__dict__.get(_NAME))


def marked(shard: torch.Tensor, layout: Layout, shape: torch.Size) -> torch.Tensor:
    """Mark a plain tensor, and return it."""
    shard.__dict__[_NAME] = LayoutMark(layout, shape)
    return shard


@runs_eagerly
def cross(shard: torch.Tensor, mark: LayoutMark, target: Layout, grad_layout: Layout | None) -> torch.Tensor:
    """Redistribute this rank's marked shard to another layout.

    Forward: as `redistribute`. Backward: one redistribution from `grad_layout` to the layout of the shard; for pending
    copies, to the full gradient.

    Args:
        shard: this rank's shard.
        mark: the layout of the shard, and the full sizes.
        target: the layout of the result.
        grad_layout: layout of the result's gradients; None: as the result.
    """
    given = grad_layout or target.reset_partial()
    if mark.layout == target and not given.is_partial():
        return shard
    if torch.is_grad_enabled() and shard.requires_grad:
        if any(kind not in (None, "sum") for kind in mark.layout._partial):
            return enter(leave(shard, mark.layout, mark.shape), target, given)
        return cast(torch.Tensor, _Cross.apply(shard, mark, target, given))
    return local_redistributed(waited_for(shard), mark.layout, target, mark.shape)


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, mark: LayoutMark, target: Layout, given: Layout) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark, ctx.given = mark, given
        held = waited_for(shard.detach())
        moved = local_redistributed(held, mark.layout, target, mark.shape)
        return shard.view_as(shard) if moved is held else moved

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None
        layout, shape = ctx.mark
        if torch.is_grad_enabled():  # second derivatives are recorded
            return cross(grad, LayoutMark(ctx.given, shape), layout.reset_partial(), None), None, None, None
        return local_redistributed(waited_for(grad), ctx.given, layout.reset_partial(), shape), None, None, None


# -- inputs that backward gathers again --------------------------------------------------------------------------------
# With sequence parallelism, the gathered input of a split module takes the most memory per rank, because only it is not
# split over tp. autograd keeps its shard in its place (Korthikanti et al. 2022, section 4.2.2).
#
#     forward    gather -> the module's operations; autograd saves the shard in place of the gathered input
#     backward   gradient of the output arrives: start the gather -> gradients of the module's last operations
#                -> the first use of the input waits for the gather, the others share it


class _Regather:
    """A gathered input whose shard autograd keeps in its place.

    Args:
        where: the module, for messages.
        gathered: the input as passed to the module.
        held: the shard before the gather.
        src: the layout of `held`.
        dst: the layout of `gathered`.
        shape: the full tensor's sizes.
    """

    def __init__(
        self, where: str, gathered: torch.Tensor, held: torch.Tensor, src: Layout, dst: Layout, shape: torch.Size
    ) -> None:
        self._where, self._held, self._version = where, held, held._version
        self._src, self._dst, self._shape = src, dst, shape
        self._form = gathered.stride(), gathered.storage_offset()
        self._uses = self._left = 0
        self._working: Any = None
        self._first: dist.Work | None = None
        self._result: torch.Tensor | None = None

    def use(self) -> _Regather:
        """Count one more saved tensor that backward will unpack."""
        self._uses += 1
        self._left += 1
        return self

    def start(self) -> None:
        """Start the gather, unless it is under way or complete."""
        if not self._uses or self._working is not None or self._result is not None:
            return
        if self._held._version != self._version:
            asked = f"cannot gather an input of {self._where} again"
            blame = "its shard was changed in place after the forward that gathered it"
            seen = f"shard: {tuple(self._held.shape)}, version {self._held._version}, was {self._version}"
            raise InvalidState(asked, blame, seen, "no in-place change, or a plan without reshard_inputs")
        mesh = self._src.mesh
        assert mesh is not None, "noted with a mesh"
        steps = plan_here(self._src, self._dst, self._shape, self._held.dtype, mesh)
        with torch.no_grad():
            self._working = start(steps, self._held, mesh)
            try:
                self._first = next(self._working)
            except StopIteration as end:  # this rank takes no part in the exchange
                self._result = end.value

    def take(self) -> torch.Tensor:
        """Return the gathered input to one of its uses; the last use frees it."""
        self.start()
        if self._first is not None:
            with torch.no_grad():
                self._first.wait()
                self._result = drive(self._working)
        self._working = self._first = None
        result = self._result
        assert result is not None, "gathered just now, or for an earlier use"
        assert (result.stride(), result.storage_offset()) == self._form, "the same plan gives the same memory format"
        self._left -= 1
        if not self._left:  # gather again if a retained graph has a second backward
            self._result, self._left = None, self._uses
        return result


def _gathers(src: Layout, dst: Layout) -> bool:
    """Return True if some axis no longer splits, by layouts, because shards may be empty or whole on some ranks."""
    specs = zip(src.mesh_shape, src._specs or (), dst._specs or (), strict=True)
    return any(size > 1 and before is not None and after is None for size, before, after in specs)


class _SavedView(NamedTuple):
    """A saved tensor as a view of the memory of a gathered input."""

    regather: _Regather
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _GatheredInput(NamedTuple):
    """A gathered input during forward. Holding it keeps its memory from being reused."""

    gathered: torch.Tensor
    version: int
    regather: _Regather


class ReshardedInputs:
    """The gathered inputs of one module call that autograd does not keep.

    Args:
        where: the module, for messages.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._noted: dict[int, _GatheredInput] = {}
        self._hooks: saved_tensors_hooks | None = None

    @classmethod
    def of(cls, where: str) -> ReshardedInputs | None:
        """Return an instance for a new call; None without gradients, or if other hooks decide about saved tensors.

        In a checkpoint, recomputing gathers again anyway. With offloading, saved tensors take no device memory.

        Args:
            where: the module, for messages.
        """
        return cls(where) if torch.is_grad_enabled() and not has_saved_tensors_hooks() else None

    def note(self, gathered: torch.Tensor, x: torch.Tensor, target: Layout) -> None:
        """Note an input, if it was gathered.

        Args:
            gathered: the input as passed to the module.
            x: its source, a DTensor or a marked tensor.
            target: the layout of `gathered`.
        """
        if isinstance(x, DTensor):
            if any(map(is_strided, x.placements)) or any(map(_is_odd, x.placements)):
                return
            held, src, shape = waited_for(x._local_tensor), Layout.of_spec(x._spec), x.shape
        else:
            mark = mark_of(x)
            assert mark is not None, "it was crossed by its mark"
            held, (src, shape) = waited_for(x), mark
        if src.mesh is target.mesh and not src.is_partial() and _gathers(src, target):
            regather = _Regather(self._where, gathered, held.detach(), src, target, shape)
            self._noted[gathered.untyped_storage()._cdata] = _GatheredInput(gathered, gathered._version, regather)

    def begin(self) -> None:
        """Start to replace saved tensors that are views of gathered inputs."""
        if self._noted:
            self._hooks = saved_tensors_hooks(self._pack, _unpack)
            self._hooks.__enter__()

    def end(self, result: Any) -> None:
        """Stop replacing saved tensors, and let the gradient of a result start the gathers.

        Args:
            result: the module's return value; None if it has raised.
        """
        if self._hooks is None:
            return
        self._hooks.__exit__(None, None, None)
        # Weak, because the hook lives as long as the graph, possibly longer than the saved tensors.
        gathers = [weakref.ref(noted.regather) for noted in self._noted.values()]
        self._noted.clear()

        def start_all(grad: torch.Tensor) -> None:
            for each in gathers:
                regather = each()
                if regather is not None:
                    regather.start()

        outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]
        if outputs:
            outputs[0].register_hook(start_all)

    def _pack(self, saved: torch.Tensor) -> Any:
        if isinstance(saved, (DTensor, AsyncCollectiveTensor)):  # wrappers without memory
            return saved
        noted = self._noted.get(saved.untyped_storage()._cdata)
        if noted is None or noted.gathered.dtype != saved.dtype or saved.is_conj() or saved.is_neg():
            return saved
        if noted.gathered._version != noted.version:  # changed in place since the gather
            return saved
        return _SavedView(noted.regather.use(), saved.size(), saved.stride(), saved.storage_offset())


def _unpack(packed: Any) -> torch.Tensor:
    if not isinstance(packed, _SavedView):
        return packed
    return packed.regather.take().as_strided(packed.size, packed.stride, packed.offset)
