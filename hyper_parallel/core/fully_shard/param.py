"""One managed parameter: its shard, its unsharded form, and which of the two its modules show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hyper_parallel.core.common.errors import InvalidState, InvalidValue
from hyper_parallel.core.common.torch_compat import ADDS_UP, note_replaced
from hyper_parallel.core.fully_shard.placement import ParameterPlacement
from hyper_parallel.core.mesh.device_mesh import OwnerMesh
from hyper_parallel.core.redistribute.api import redistribute


@dataclass(frozen=True)
class ParamSlot:
    """One place where a parameter is registered: `module._parameters[name]`. Tied weights have several."""

    module: nn.Module
    name: str

    def show(self, parameter: nn.Parameter) -> None:
        """Register `parameter` here."""
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.name] = parameter  # the same, cheaper
        else:  # the module wants to know: recurrent ones keep a second list of their weights
            setattr(self.module, self.name, parameter)

    def keep_in_place(self) -> None:
        """Keep a recurrent module from moving its weights to memory of its own, where cuDNN is faster with them.

        It does so in each forward in which its weights are other ones, and what is gathered later would not get there.
        """
        if isinstance(self.module, nn.RNNBase):
            self.module.flatten_parameters = _stay  # type: ignore[method-assign]


def _stay() -> None:
    """Weights stay where they are."""


def dtensor_like(local: torch.Tensor, model: DTensor) -> DTensor:
    """A DTensor over `local` with the layout and global shape of `model`; no autograd, no checks.

    `DTensor.from_local` does the same in ten times the time, which a step would pay once per parameter.
    """
    # What DTensor(...) does after __new__ concerns torch.export alone, and takes twice as long as this.
    made: DTensor = DTensor.__new__(DTensor, local, model._spec, requires_grad=False)
    return made


def _dtensor_where(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """A DTensor over `local` where that is: `DTensor.from_local` would move what is offloaded to the mesh's device."""
    on_mesh = local.device.type in (mesh.device_type, "meta")
    given = local if on_mesh else torch.empty_like(local, device="meta")
    made = DTensor.from_local(given, mesh, placements, run_check=False, shape=shape, stride=stride)
    return made if on_mesh else dtensor_like(local, made)


def _mesh_of(placement: ParameterPlacement) -> DeviceMesh:
    return placement.mesh if placement.owner is None else OwnerMesh(placement.mesh, placement.owner)


def _storage_of(tensor: torch.Tensor) -> Any:
    """The storage that torch keeps for a tensor below Python; that of a DTensor has no memory."""
    return torch.Tensor.untyped_storage(tensor)  # not by its attribute: four times the time, for a DTensor


class ManagedParam:
    """A parameter as the engine keeps it.

    *Unsharded* means: not split over the shard axis. For a parameter that is split over other axes too, such as those
    of tensor parallelism, it is what those leave of it. Along `shard_dim` shards follow `torch.chunk`: of size
    `ceil(size / ranks)`, the last ones smaller or empty. Communication uses equal shards of `chunk` elements: what
    is beyond the end is padding. A parameter with an owner is not split: its only shard is the owner's.

    Attributes:
        name: Full name in the module that was wrapped.
        slots: Where it is registered.
        attributes: What users have attached to the parameter, for the sharded and the unsharded one to keep.
        placement: Where it lives.
        mesh: Of the sharded one: the placement's or, of a parameter with an owner, its owner's part of that.
        shape: Shape of the unsharded one.
        chunk: Elements of one padded shard; of a parameter with an owner, those of the calling rank's.
        local_shape: Shape of this rank's shard, without padding.
        contiguous_on_dim_0: Whether the padded shards, one after the other, are the unsharded value: nothing lies
            before the split dim.
        sharded: The parameter that optimizers and state dicts see: a DTensor.
        unsharded: The unsharded parameter, that forward and backward see; its storage is empty while resharded.
    """

    def __init__(
        self, name: str, slots: list[ParamSlot], unsharded: nn.Parameter, placement: ParameterPlacement
    ) -> None:
        self.name = name
        self.slots = slots
        # What a tensor consists of is no attribute of users: one with an extension, or a fake one, which would go on
        # saying that it is on meta, where it was made, after `to_empty` has put its twin elsewhere.
        own = (*unsharded.detach().__dict__, "_is_param")
        self.attributes = {name: value for name, value in unsharded.__dict__.items() if name not in own}
        self.placement = placement
        self.mesh = _mesh_of(placement)
        self.shape = unsharded._local_tensor.shape if isinstance(unsharded, DTensor) else unsharded.shape
        self.numel = self.shape.numel()
        self.ranks = placement.shard_size
        if placement.shard_dim is None:
            self.dim, self.before, self.size, self.after = 0, 1, 1, self.numel
        else:
            self.dim = placement.shard_dim
            self.before, self.size = prod(self.shape[: self.dim]), self.shape[self.dim]
            self.after = prod(self.shape[self.dim + 1 :])
        self.rows = -(-self.size // self.ranks)
        self.chunk = self.before * self.rows * self.after
        if placement.owner is not None:  # one shard, which is not padded, and nothing elsewhere
            self.rows, self.chunk = self.size, self.numel if placement.is_held else 0
        self.contiguous_on_dim_0 = self.before == 1
        first, last = self.range_of(placement.shard_rank)
        self.first, self.length = first, last - first
        self.local_shape = self.shape
        if placement.shard_dim is not None:
            self.local_shape = torch.Size((*self.shape[: self.dim], last - first, *self.shape[self.dim + 1 :]))
        if not placement.is_held:
            self.local_shape = torch.Size((0,))  # what torch gives a rank that is not on a DTensor's mesh
        self.local_numel = self.local_shape.numel()
        self.local_stride = tuple(prod(self.local_shape[i + 1 :]) for i in range(len(self.local_shape)))
        self.target = "grad"  # the attribute of `sharded` that reduced gradients are added to
        self.on_gradient: Callable[[torch.Tensor], None] | None = None  # called with each gradient of the unsharded one
        self.pinned = False  # whether gradients go to page-locked memory
        self.to_host: Callable[..., torch.Tensor] | None = None  # makes copies on the host, if the shard is kept there
        self.sharded: nn.Parameter
        self.unsharded: nn.Parameter
        self.shown_trainable = False  # whether the unsharded one was to be trained when modules last began to show it
        self.made_version = 0  # of the latter; in-place changes count it up
        self._view_spec: Any = None

    @property
    def is_uneven(self) -> bool:
        """Whether the last ranks have smaller shards than the first."""
        return self.size != self.ranks * self.rows

    def range_of(self, rank: int) -> tuple[int, int]:
        """First and last (exclusive) index along the split dim of one rank's shard."""
        if self.placement.owner is not None:
            return (0, self.size) if rank == self.placement.owner else (self.size, self.size)
        first = min(self.rows * rank, self.size)
        return first, min(first + self.rows, self.size)

    def shard_of(self, unsharded: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a unsharded value, as a view."""
        if not self.placement.is_held:
            return unsharded.new_empty(0)
        return unsharded if self.placement.shard_dim is None else unsharded.narrow(self.dim, self.first, self.length)

    def rows_of(self, unsharded: torch.Tensor, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of views, equal in shape, of an unsharded value and of its padded shards; together they cover it.

        Args:
            unsharded: 1-D, contiguous; `numel` elements, or with padding at the end where `contiguous_on_dim_0`.
            rows: 2-D, one row of `chunk` elements per rank; rows may have any stride.
        """
        if self.numel == 0:
            return
        if self.contiguous_on_dim_0:
            full, rest = divmod(self.numel, self.chunk)
            yield unsharded[: full * self.chunk].view(full, self.chunk), rows[:full]
            if rest:
                yield unsharded[full * self.chunk : self.numel], rows[full, :rest]
            return
        blocks = unsharded[: self.numel].view(self.before, self.size, self.after)
        if self.size == self.ranks * self.rows:
            shape = (self.before, self.rows, self.after)
            yield blocks.unflatten(1, (self.ranks, self.rows)).transpose(0, 1), rows.unflatten(1, shape)
            return
        for rank in range(self.ranks):
            first, last = self.range_of(rank)
            if first < last:
                shape = (self.before, last - first, self.after)
                yield blocks[:, first:last], rows[rank, : shape[0] * shape[1] * shape[2]].view(shape)

    # -- the tensors that users see ----------------------------------------------------------------------------------

    def make_sharded(self, local: torch.Tensor, unsharded: nn.Parameter) -> None:
        """Make the sharded parameter over `local`, this rank's shard of `unsharded`."""
        shape = unsharded.shape  # the global one: of a DTensor too
        stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        dtensor = _dtensor_where(local, self.mesh, self.placement.placements, shape, stride)
        self.sharded = nn.Parameter(dtensor, requires_grad=unsharded.requires_grad)
        self.sharded.__dict__.update(self.attributes)
        note_replaced(unsharded, self.name, "fully_shard or hsdp")
        if self.placement.view_mesh is not None:
            view = DTensor.from_local(
                cast(DTensor, unsharded)._local_tensor.detach(),
                self.placement.view_mesh,
                self.placement.view_placements,
                run_check=False,
                shape=shape,
                stride=stride,
            )
            self._view_spec = view._spec

    def make_unsharded(self, unsharded: torch.Tensor) -> None:
        """Make the unsharded parameter over `unsharded`, a tensor of shape `shape`."""
        data: torch.Tensor = unsharded
        if self._view_spec is not None:
            data = DTensor(unsharded, self._spec_for(unsharded), requires_grad=False)
        # Made once, and filled again by each gather: autograd has saved this very tensor, and leaves its gradient here.
        self.unsharded = nn.Parameter(data, requires_grad=self.sharded.requires_grad)
        self.unsharded.__dict__.update(self.attributes)
        # Modules show it after `unshard()`: an optimizer that is made then has parameters that the model gathers anew.
        note_replaced(self.unsharded, self.name, "reshard()")
        self.made_version = self.unsharded._version
        self.shown_trainable = self.unsharded.requires_grad
        self.watch()
        if self._view_spec is not None:
            self.unsharded.__dict__[ADDS_UP] = True
        if self._view_spec is not None and self.placement.reduced_axes:
            # Code on local tensors has one gradient per rank, to be added up: not the same on all, as torch assumes.
            self.unsharded.to_local = self._to_local  # type: ignore[attr-defined]

    def watch(self) -> None:
        """Have `on_gradient` called."""
        if self.on_gradient is not None and self.unsharded.requires_grad:
            self.unsharded.register_hook(self.on_gradient)

    def _spec_for(self, unsharded: torch.Tensor) -> Any:
        spec = self._view_spec
        if spec.tensor_meta is not None and spec.tensor_meta.dtype != unsharded.dtype:
            model = DTensor.from_local(
                unsharded, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
            )
            return model._spec
        return spec

    def _to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        if grad_placements is None:
            grad_placements = self._summands
        return DTensor.to_local(self.unsharded, grad_placements=grad_placements)  # type: ignore[arg-type]

    @property
    def _summands(self) -> list[Placement]:
        """The layout of gradients that, added up over `reduced_axes`, give that of the parameter."""
        axes = self.placement.reduced_axes
        return [Partial() if axis in axes else p for axis, p in enumerate(self.placement.view_placements)]

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard, as the sharded parameter holds it now."""
        existing = self.sharded._local_tensor  # type: ignore[attr-defined]
        assert isinstance(existing, torch.Tensor)
        return existing

    @property
    def address(self) -> int:
        """Where this rank's shard is in memory; 0 where there is none, as on meta and under a fake tensor mode."""
        local = self.local
        return local.data_ptr() if type(local) is torch.Tensor else 0

    def note_storages(self) -> None:
        """Note which storages the two parameters have, which `parameter.data = value` exchanges."""
        self._storages = (self.local, _storage_of(self.sharded), self.unsharded, _storage_of(self.unsharded))

    def was_assigned(self, *, gathered: bool) -> bool:
        """Return True if somebody has assigned `.data` of the sharded parameter, or of the unsharded one if `gathered`.

        `module.to` and `swap_tensors` exchange the shard itself, which is no mistake.
        """
        local, sharded, unsharded, storage = self._storages
        if local is self.local and sharded._cdata != _storage_of(self.sharded)._cdata:
            return True
        return gathered and unsharded is self.unsharded and storage._cdata != _storage_of(unsharded)._cdata

    def show(self, parameter: nn.Parameter) -> None:
        """Register `parameter` on the modules."""
        for slot in self.slots:
            slot.show(parameter)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def take_gradient(self, dtype: torch.dtype | None = None, *, mean: bool = False) -> torch.Tensor | None:
        """The gradient of the unsharded parameter, flat, for the engine to reduce; the parameter has it no more.

        Args:
            dtype: Of the sum over axes that are not the engine's, such as those of tensor parallelism; None: its own.
            mean: The engine averages it over the ranks.

        Raises:
            RuntimeError: It is sparse.
        """
        gradient = self.unsharded.grad
        if gradient is None:
            return None
        self.unsharded.grad = None  # the reducer's alone now: the next backward must not add to what is being sent
        if isinstance(gradient, DTensor):
            gradient = self._summand(gradient, dtype, mean)
        if gradient.layout is not torch.strided:
            asked, blame = "fully_shard cannot reduce gradients", f"the gradient of {self.name!r} is sparse"
            hint = "nn.Embedding(sparse=False), or pass the parameter in ignored_params"
            raise InvalidState(asked, blame, f"seen: {gradient.layout}", hint)
        is_wrapper: bool = is_traceable_wrapper_subclass(gradient)
        if is_wrapper:  # as that of a parameter of this kind may be
            gradient = torch.empty(self.shape, dtype=gradient.dtype, device=gradient.device).copy_(gradient.detach())
        return gradient.detach().reshape(-1)

    def take_summand(self) -> torch.Tensor:
        """The same of a gradient that has a `pending_sum`, which is left to who takes it."""
        gradient: Any = self.unsharded.grad
        self.unsharded.grad = None
        local = gradient._local_tensor
        wait = getattr(local, "wait", None)
        return (local if wait is None else wait()).detach().reshape(-1)

    def accumulate_onto(self, flat: torch.Tensor) -> bool:
        """Let autograd add the next gradient to `flat`, if it can: it is a plain tensor of the same dtype."""
        unsharded = self.unsharded
        is_wrapper: bool = is_traceable_wrapper_subclass(unsharded)
        if is_wrapper or unsharded.grad is not None or flat.dtype != unsharded.dtype:
            return False
        unsharded.grad = flat.view(self.shape)
        return True

    def _wanted(self, gradient: DTensor, mean: bool) -> list[Placement]:
        """The placements of what this rank adds to the sum over `reduced_axes`."""
        wanted = self._summands
        if mean:
            pairs = zip(wanted, gradient.placements, strict=True)
            wanted = [(Replicate() if has.is_shard() else has) if want.is_partial() else want for want, has in pairs]
        return wanted

    def pending_sum(self, *, mean: bool) -> tuple[DeviceMesh, tuple[int, ...]] | None:
        """The mesh and its axes over which nothing but a sum is pending in the gradient; None: something else, or none.

        Such are the gradients of norms over tensor parallelism's axis, where the sequence is split.
        """
        gradient = self.unsharded.grad
        if not isinstance(gradient, DTensor):
            return None
        pairs = list(zip(gradient.placements, self._wanted(gradient, mean), strict=True))
        axes = tuple(axis for axis, (has, wanted) in enumerate(pairs) if has != wanted)
        sums = all(pairs[axis] == (Partial(), Replicate()) for axis in axes)
        return (gradient.device_mesh, axes) if axes and sums else None

    def _summand(self, gradient: DTensor, dtype: torch.dtype | None, mean: bool) -> torch.Tensor:
        """What this rank adds to the sum over `reduced_axes`.

        A gradient that is the same on all counts once in a sum. It is its own mean, to which each rank adds its copy;
        as in FSDP2, also where these are no copies.
        """
        wanted = self._wanted(gradient, mean)
        if list(gradient.placements) != wanted:
            # Sums that autograd leaves pending on the DTensor's own mesh, such as those of norms under sequence
            # parallelism, are added up in the dtype of the reduction as well, not in that of the computation.
            if dtype is not None and any(p.is_partial() for p in gradient.placements):
                gradient = DTensor.from_local(
                    gradient._local_tensor.to(dtype),
                    gradient.device_mesh,
                    gradient.placements,
                    run_check=False,
                    shape=gradient.shape,
                    stride=gradient.stride(),
                )
            gradient = redistribute(gradient.detach(), self.placement.view_mesh, wanted)
        local = gradient._local_tensor
        wait = getattr(local, "wait", None)  # a functional collective that nobody has waited for
        return wait() if wait is not None else local

    def receive_first(self, flat: torch.Tensor, start: int) -> bool:
        """Take the gradient at `start` of a flat buffer if it is the first and nobody wants to hear of it."""
        sharded: Any = self.sharded
        if self.target != "grad" or sharded.grad is not None or sharded._backward_hooks or self._has_hooks:
            return False
        local = flat.as_strided(self.local_shape, self.local_stride, flat.storage_offset() + start)
        sharded.grad = dtensor_like(local, sharded)
        return True

    def receive(self, shard: torch.Tensor) -> None:
        """Add `shard`, this rank's shard of the reduced gradient, flat, to the sharded parameter's gradient."""
        existing = getattr(self.sharded, self.target, None)
        local = shard.view(self.local_shape)
        if self.sharded._backward_hooks:  # what autograd would do, were the gradient its own
            given: Any = self.laid_out(local)
            for hook in tuple(self.sharded._backward_hooks.values()):
                changed = hook(given)
                given = given if changed is None else changed
            local = given._local_tensor
        if self.to_host is not None:
            # Not later where the host reads it right away: to add it to an earlier gradient, or in a hook.
            later = self.pinned and existing is None and not self._has_hooks
            local = self.to_host(local, wait=not later)
        if existing is None:
            setattr(self.sharded, self.target, self.laid_out(local))
        else:
            if existing.placements != self.placement.placements:  # of DTensor operations on the sharded one itself
                existing = redistribute(existing.detach(), self.mesh, self.placement.placements)
                setattr(self.sharded, self.target, existing)
            existing._local_tensor.add_(local)
        hooks = getattr(self.sharded, "_post_accumulate_grad_hooks", None)
        for hook in tuple(hooks.values()) if hooks else ():
            hook(self.sharded)  # last, as autograd does: an optimizer in backward steps here, and clears the gradient

    def show_sum(self, flat: torch.Tensor, *, unsharded: bool, waiting: bool) -> None:
        """Show an accumulated gradient as `acc_grad`: a DTensor that says over which axes it is still to be added up.

        Args:
            flat: The unsharded one's, or this rank's shard of it.
            unsharded: Which of the two.
            waiting: Whether it waits for the replicate axis (an unsharded one: for every data axis).
        """
        placement = self.placement
        placements = list(placement.placements)
        axes = placement.reduced_axes
        if placement.data is not None:
            axes = tuple(range(len(placements) - placement.data.axes, len(placements)))
        for axis in axes:
            if unsharded or not placements[axis].is_shard():
                placements[axis] = Partial() if waiting else Replicate()
        model: Any = self.sharded
        local = flat.view(self.shape if unsharded else self.local_shape)
        self.sharded.acc_grad = _dtensor_where(  # type: ignore[attr-defined]
            local, self.mesh, placements, model.shape, model.stride()
        )

    def laid_out(self, local: torch.Tensor) -> DTensor:
        """`local`, of any dtype, as a DTensor laid out as the sharded parameter is."""
        model: Any = self.sharded
        if local.dtype == model.dtype:
            return dtensor_like(local, model)
        return self._laid_out(local)

    @property
    def _has_hooks(self) -> bool:
        return bool(getattr(self.sharded, "_post_accumulate_grad_hooks", None))

    @property
    def reduced_gradient(self) -> torch.Tensor | None:
        """The gradient that an optimizer finds."""
        found: torch.Tensor | None = getattr(self.sharded, self.target, None)
        return found

    def move_to(self, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
        """Say the same of the sharded parameter on another mesh; the object and its values stay."""
        self.placement = replace(self.placement, mesh=mesh, placements=placements)
        self.mesh = _mesh_of(self.placement)
        model: Any = self.sharded
        for existing in (model, model.grad):
            if existing is not None:
                existing._spec = self._laid_out(existing._local_tensor)._spec

    def _laid_out(self, local: torch.Tensor) -> DTensor:
        model: Any = self.sharded
        return _dtensor_where(local, self.mesh, self.placement.placements, model.shape, model.stride())

    def clear_gradient(self, *, set_to_none: bool) -> None:
        """Drop the gradients of the sharded and the unsharded parameter, or zero the former's."""
        self.unsharded.grad = None
        if getattr(self.sharded, "acc_grad", None) is not None:
            self.sharded.acc_grad = None  # type: ignore[attr-defined]
        for name in dict.fromkeys(("grad", self.target)):
            existing = getattr(self.sharded, name, None)
            if existing is None:
                continue
            if set_to_none:
                setattr(self.sharded, name, None)
            else:
                existing._local_tensor.zero_()


def _count_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Count up the versions of the sharded parameters that a step changes: a foreach or fused one does not.

    Without it nobody could tell unsharded parameters that were kept after backward from those of the next step. Before
    and after the step: gradients may come in its closure, and some optimizers clear them. A parameter with an owner
    counts as changed on all ranks, although the owner alone has a gradient: all ranks gather it anew, or none does.
    """
    changed = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if hasattr(parameter, "_hyper_parallel_unit_name")
        and (
            parameter.grad is not None
            or getattr(parameter, "main_grad", None) is not None
            or isinstance(getattr(parameter, "device_mesh", None), OwnerMesh)
        )
    ]
    if changed:
        increment_version(changed)


_FUSED = (torch.optim.SGD, torch.optim.Adagrad)
_INSTEAD = MappingProxyType({torch.optim.Adafactor: "torch.optim.AdamW", torch.optim.Rprop: "torch.optim.RMSprop"})


def _refuse_lacking(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse optimizers of torch that cannot step over shards, in our words: torch names an operator of its own.

    Raises:
        ValueError: Adafactor, Rprop, fused SGD or Adagrad; LBFGS over shards of several sizes.
    """
    kind = type(optimizer)
    if kind not in (*_FUSED, *_INSTEAD, torch.optim.LBFGS):
        return
    for group in optimizer.param_groups:
        fused = kind in _FUSED
        if fused and not group.get("fused"):
            continue
        for parameter in group["params"]:
            name = getattr(parameter, "_hyper_parallel_unit_name", None)
            if name is None or not isinstance(parameter, DTensor) or not parameter.requires_grad:
                continue
            shards = prod(parameter.device_mesh.size(i) for i, p in enumerate(parameter.placements) if p.is_shard())
            is_even = parameter._local_tensor.numel() * shards == parameter.numel()
            if not fused and (
                not any(p.is_shard() for p in parameter.placements) or (is_even and kind not in _INSTEAD)
            ):
                continue
            title = f"{kind.__name__}{'(fused=True)' if fused else ''}"
            uneven = "uneven " if kind is torch.optim.LBFGS else ""
            blame = f"torch cannot step over the {uneven}shards of parameter {name!r} with it"
            seen = f"shape: {tuple(parameter.shape)}   placements: {parameter.placements} over {shards} ranks"
            hint = _INSTEAD.get(kind, "fused=False" if fused else f"sizes of dim 0 that {shards} divides, or AdamW")
            raise InvalidValue(f"cannot step with {title}", blame, seen, hint)


def _drop_old_state(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Drop the state of parameters that other ranks own.

    torch's `set_state_dict` gives it to all ranks, and the owner alone brings it up to date: the next checkpoint would
    take the number of steps from either. With a gradient, which the same function sets, it is needed there.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            mesh = getattr(parameter, "device_mesh", None)
            if isinstance(mesh, OwnerMesh) and parameter.grad is None and mesh.get_coordinate() is None:
                optimizer.state.pop(parameter, None)


register_optimizer_step_pre_hook(_refuse_lacking)
register_optimizer_step_pre_hook(_count_step)
register_optimizer_step_post_hook(_count_step)
register_optimizer_step_post_hook(_drop_old_state)
