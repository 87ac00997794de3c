"""Methods that a wrapped module gains, and the per-module state that torch's own tools look up.

A wrapped module is a `torch.distributed.fsdp.FSDPModule`. The engine overrides every method of that class, because
torch's own would look for parameter groups that do not exist here.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.fsdp import FSDPModule, UnshardHandle
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from hyper_parallel.core.common.checks import check, check_above, check_choice, list_modules
from hyper_parallel.core.common.errors import InvalidState, InvalidType, InvalidValue, class_name
from hyper_parallel.core.common.torch_compat import note_empty, runs_eagerly
from hyper_parallel.core.fully_shard.hooks import explain_mixed
from hyper_parallel.core.fully_shard.schedule import note_pending_reductions
from hyper_parallel.core.fully_shard.state_dict import load_into
from hyper_parallel.core.fully_shard.unit import (
    StepControl,
    Unit,
    is_wrapped,
    nested_traced_units,
    nested_units,
    traced_unit_of,
    unit_of,
)

SYMMETRIC = ("cuda",)
"""Devices whose memory can be symmetric."""

# -- units below a module --------------------------------------------------------------------------------------------


def needed_unit(module: Any) -> Unit:
    """Return the unit of a wrapped module.

    Raises:
        ValueError: The module was never wrapped, or was wrapped for `torch.compile` to trace.
    """
    unit = unit_of(module) if isinstance(module, nn.Module) else None
    asked = f"cannot change how a {class_name(module)} communicates"
    if unit is None and _own_traced(module):
        refuse_traced(asked, module)
    if unit is None:
        hint = "fully_shard(module, mesh=mesh) or hsdp(module) first"
        raise InvalidValue(asked, "it was never wrapped", "seen: a module without a unit of its own", hint)
    return unit


def needed_units(module: Any) -> Iterable[Unit]:
    """Return all units in a wrapped module and its submodules.

    Raises:
        ValueError: The module was never wrapped.
    """
    if not isinstance(module, nn.Module) or not is_wrapped(module):
        needed_unit(module)  # raises the error
    return nested_units(module)


def _own_traced(module: Any) -> list[Any]:
    traced = traced_unit_of(module) if isinstance(module, nn.Module) else None
    return [] if traced is None else [traced]


def reached_units(module: Any, method: str, recurse: bool) -> Iterable[Unit]:
    """Return the units that a method applies to: all nested ones, or only the module's.

    Raises:
        ValueError: The module was never wrapped, or `recurse` is not a bool.
    """
    check_flags(method, recurse=recurse)
    if recurse:
        return needed_units(module)
    return [] if _own_traced(module) else [needed_unit(module)]


def check_flags(method: str, **flags: Any) -> None:
    """Reject flags of a method that are not True or False.

    Raises:
        ValueError: The message names the first invalid flag.
    """
    check(f"{method} cannot use its flags", "bool", "", InvalidValue, **flags)


def _refuse_owners(asked: str, unit: Unit, comm: Any) -> None:
    owned = [param.name for param in unit.params if param.placement.owner is not None]
    if comm is not None and owned:
        blame = f"one rank holds all of parameter {owned[0]!r}, and what torch's protocol moves has shards of one size"
        hint = "Shard(0) or None for it in shard_placement_fn"
        raise InvalidValue(asked, blame, f"seen: a {type(comm).__name__}", hint)


def _gathered_buckets(unit: Unit) -> Iterator[tuple[Any, Any]]:
    """Yield each all-gathered bucket of a unit and its group; buckets with owners are broadcast instead."""
    for bucket in unit.buckets:
        if bucket.group is not None and bucket.ranks > 1 and bucket.params[0].placement.owner is None:
            yield bucket, bucket.group


def prefetched_units(method: str, kind: type[ManagedModule], by: str, **argument: Any) -> list[Unit] | None:
    """Return the units of the modules to prefetch, without traced ones, because their graph contains the gather.

    Raises:
        ValueError: The argument is neither a list nor None, or a module was not wrapped by the API of `kind`.
    """
    asked = f"{method} cannot use its argument"
    check(asked, "list | None", "[model.layers[1]]", InvalidValue, **argument)  # a set's order differs between ranks
    (modules,) = argument.values()
    if modules is None:
        return None
    for index, module in enumerate(modules):
        if not isinstance(module, kind) or not is_wrapped(module):  # type: ignore[arg-type]
            blame = f"item {index}, a {class_name(module)}, was not wrapped by {by}"
            raise InvalidValue(asked, blame, f"seen: {len(modules)} items", f"{by}(that_module) first")
    return [unit for module in modules if (unit := unit_of(module)) is not None]


# -- steps by request: unsharded for the step, deferred sync -----------------------------------------------------------

# A pipeline interleaves forwards and backwards of several micro-batches. Some schedules compute the gradients of inputs
# and of weights separately, which triggers none of the hooks that detect backward. Such a step is bracketed by two
# calls, and the hooks do nothing in between:
#
#     hold_parameters(stage)   # one gather per unit
#     ...                      # forwards and backwards, in any order
#     reduce_gradients(stage)  # free the unsharded parameters, one reduction per unit

UnitCallback = Callable[[Unit], object]
"""Called with each unit before anything is done with it."""


def hold_parameters(module: nn.Module, *, keep: bool = True, before: UnitCallback | None = None) -> None:
    """Gather all parameters in `module`, and leave them unsharded until `reduce_gradients` or `release_parameters`.

    Forwards in between cast inputs and outputs by the policy and do nothing else. Gradients accumulate in the unsharded
    parameters without communication, e.g. from `backward`, or from `torch.autograd.grad` and an assignment.

    Communication: one all_gather per unit, all started here.

    Args:
        module: Module that contains units of `fully_shard` or `hsdp`; without any, the call does nothing.
        keep: False: gather and free in each forward and backward as usual, and defer only the reductions. Each
            backward must then be a full one.
        before: Called with each unit before it is gathered.

    Raises:
        ValueError: A unit was wrapped for `torch.compile` to trace; its communication is part of its graph.
        RuntimeError: The parameters are already unsharded for a step.
    """
    refuse_traced("cannot reduce gradients when asked", module)
    units = [unit for root in _roots(module) for unit in root.prepared_units()]
    busy = next((unit for unit in units if unit.control is not StepControl.HOOKS), None)
    if busy is not None:
        name = class_name(busy.modules[0])
        hint = "reduce_gradients(module), or release_parameters(module), once per hold_parameters(module)"
        raise InvalidState(
            "cannot hold parameters", "they are unsharded for a step already", f"seen: unit {name}", hint
        )
    for unit in units:  # a second loop: an error half way would leave some units unsharded for good
        if before is not None:
            before(unit)
        if keep:
            unit.unshard_for_step()
        else:
            unit.defer_sync()


def units_with_wider_sums(module: nn.Module) -> list[Unit]:
    """Return the units, unsharded for the step, whose reduce dtype differs from the dtype autograd accumulates in.

    Call `unit.keep_gradients()` on them after each micro-batch to accumulate in that dtype; no communication.

    Args:
        module: Module whose parameters are unsharded for the step.
    """
    units = [unit for root in _roots(module) for unit in root.prepared_units()]
    return [unit for unit in units if unit.control is StepControl.UNSHARDED_FOR_STEP and unit.has_wider_sums]


def reduce_gradients(module: nn.Module, *, before: UnitCallback | None = None) -> None:
    """Reduce all pending gradients in `module` into `param.grad` of the sharded parameters, as backward's end does.

    Pending are gradients of parameters that are unsharded for the step, which are freed, and gradients of backwards
    without gradient sync. After `set_requires_gradient_sync(False)` all of them stay pending. A rank that has no
    gradients contributes zeros.

    Communication: one reduction per unit, as in `fully_shard`; every rank has to call this at the same point.

    Args:
        module: Module that contains units of `fully_shard` or `hsdp`, or none.
        before: Called with each unit before its gradients are reduced.

    Raises:
        ValueError: A unit was wrapped for `torch.compile` to trace.
        RuntimeError: A forward changed an unsharded parameter in place.
    """
    reductions = StepReductions(module, before=before)
    reductions.start()
    reductions.finish()


class StepReductions:
    """End-of-step reductions, one per unit, in the same order on all ranks however gradients arrive.

    `reduce_gradients` runs all of them at once. A pipeline starts them in the last backward of a stage::

        with reductions.in_backward():  # start a unit's reduction once it and earlier units have all gradients
            loss.backward()
        reductions.start()              # units that still miss a gradient
        ...                             # other stages
        reductions.finish()

    The order is module order backwards. It does not depend on which gradients arrive, or when: on a rank that did
    not use some parameter, the reductions from its unit on start at the end.

    Args:
        module: Module that contains units of `fully_shard` or `hsdp`, or none.
        before: Called with each unit before its gradients are reduced.
        in_place: Send gradients from their own memory if all units can. No reduction is waited for before `finish`,
            and gradients stay until then. False: each is packed into the memory of the previous one, after a wait.

    Raises:
        ValueError: A unit was wrapped for `torch.compile` to trace.
    """

    def __init__(self, module: nn.Module, *, before: UnitCallback | None = None, in_place: bool = False) -> None:
        refuse_traced("cannot reduce gradients when asked", module)
        self._before = before
        self._groups = [root.prepared_units() for root in _roots(module)]
        self._waiting = [unit for units in reversed(self._groups) for unit in reversed(units)]
        # In place for some units only would not help, because the others wait for all reductions before theirs.
        self._in_place = in_place and all(unit.can_send_in_place for unit in self._waiting)
        self._reduced: list[Unit] = []  # reductions started, parameters not yet freed
        self._missing: dict[Unit, set[int]] = {}
        self._owners: dict[int, Unit] = {}

    @property
    def is_started(self) -> bool:
        """True once `start` has been called."""
        return not self._waiting and not self._reduced

    @contextmanager
    def in_backward(self, *, forward_order: bool = False) -> Iterator[None]:
        """Reduce gradients of parameters that are unsharded for the step as soon as the block has computed them.

        Args:
            forward_order: Gradients arrive in forward order, the root's last, on all ranks.

        Raises:
            RuntimeError: A forward changed an unsharded parameter in place.
        """
        _check_untouched(self._waiting)
        if forward_order:
            self._waiting = [unit for root, *below in self._groups for unit in (*below, root)]
        handles: list[Any] = []
        for unit in self._waiting:
            # Units under `HOOKS` are gathered and freed by their own hooks, which collect gradients elsewhere.
            if unit.control is not StepControl.UNSHARDED_FOR_STEP:
                break
            params = [param.unsharded for param in unit.params if param.unsharded.requires_grad]
            self._missing[unit] = {id(param) for param in params}
            self._owners.update((id(param), unit) for param in params)
            handles += [param.register_post_accumulate_grad_hook(self.arrived) for param in params]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._missing, self._owners = {}, {}

    @runs_eagerly
    def arrived(self, param: torch.Tensor) -> None:
        """Record that a gradient of an unsharded parameter is complete, and start the reductions that waited for it."""
        unit = self._owners.get(id(param))
        if unit is None:
            return
        self._missing[unit].discard(id(param))
        while self._waiting and not self._missing.get(self._waiting[0], True):
            ready = self._waiting.pop(0)
            self._reduced.append(ready)
            if self._before is not None:
                self._before(ready)
            ready.reduce_in_backward(in_place=self._in_place)

    def start(self) -> None:
        """Start the remaining reductions, and free all parameters.

        Raises:
            RuntimeError: A forward changed an unsharded parameter in place.
        """
        _check_untouched(self._waiting)
        reduced, self._reduced = self._reduced, []
        for unit in reduced:
            unit.free_after_step()
        waiting, self._waiting = self._waiting, []
        for unit in waiting:
            if self._before is not None:
                self._before(unit)
            unit.reduce_now(in_place=self._in_place)

    def _say_whose(self, units: list[Unit], reducer: Any) -> None:
        assert self._before is not None
        self._before(next(unit for unit in units if reducer in unit.reducers))

    def finish(self) -> None:
        """Wait for all reductions and apply the gradients, except for reductions that may continue after the step."""
        for units in self._groups:
            schedule = units[0].schedule
            assert schedule is not None
            if self._before is not None and self._in_place:  # reductions in place are first waited for here
                with torch.no_grad():
                    schedule.finish_each(functools.partial(self._say_whose, units))
            if any(unit.options.leave_pending for unit in units):
                note_pending_reductions(schedule)
            else:
                with torch.no_grad():
                    schedule.finish_reductions()
            schedule.compare_reductions(also_gathers=True)  # forwards between the two calls have not compared


def _check_untouched(units: Iterable[Unit]) -> None:
    for bucket in (bucket for unit in units for bucket in unit.buckets):
        if bucket.gathered:
            bucket.check_untouched()


def release_parameters(module: nn.Module, *, failed: bool = False) -> None:
    """Free the parameters that are unsharded for a step in `module`, without a reduction; no communication.

    Args:
        module: Module that contains units, or none.
        failed: Drop all pending gradients, e.g. after a step that ended with an error.
    """
    for root in _roots(module):
        units = root.prepared_units()
        if failed and root.schedule is not None:
            root.schedule.drop_reductions()
        for unit in units:
            unit.release(failed=failed)


def _roots(module: nn.Module) -> Iterator[Unit]:
    """Yield the outermost units in `module`, each once, in module order."""
    found: list[Unit] = []

    def visit(child: nn.Module) -> None:
        unit = unit_of(child)
        if unit is None:
            for below in child.children():
                visit(below)
        elif unit not in found:
            found.append(unit)

    visit(module)
    yield from found


def refuse_traced(asked: str, module: nn.Module, hint: str = "hsdp(cell, ..., use_eager_hook=True)") -> None:
    """Reject a call that cannot affect a cell whose communication is part of its graph.

    Raises:
        ValueError: The module contains such a cell.
    """
    for name, child in module.named_modules():
        if traced_unit_of(child) is not None:
            blame = f"{name or class_name(child)!r} was wrapped for torch.compile to trace"
            seen = "seen: hsdp(..., use_eager_hook=False), whose communication is part of its graph"
            raise InvalidValue(asked, blame, seen, hint)


def _slots(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the dict and name of each parameter and buffer of a module and its submodules."""
    for child in module.modules():
        for tensors in (child._parameters, child._buffers):
            yield from ((tensors, name) for name, tensor in tensors.items() if tensor is not None)


# -- wrapped modules ---------------------------------------------------------------------------------------------------


class ManagedModule(FSDPModule):
    """Base of both wrapped-module APIs: FSDP2's methods and HyperParallel's additions.

    It is an `FSDPModule` because clients test for that class and skip other modules: one that therefore never set its
    divide factor trained with a quarter of the gradient.

    "Nested" means: this unit and all units in its submodules. Methods raise `ValueError` for an argument of the wrong
    kind, and for a module that was never wrapped.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the original class, e.g. because a slice of a wrapped container is a plain container."""
        original: Any = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)  # explicitly, because Python only calls it for instances of `cls`
        return made

    # -- HyperParallel's own methods -----------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, including pending ones. Nested."""
        for unit in needed_units(self):
            unit.clear_gradients(set_to_none=set_to_none)
        for traced in nested_traced_units(self):
            traced.zero_grads(set_to_none=set_to_none)
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def set_reduce_op_type(self, reduce_op_type: str | None, *, recurse: bool = True) -> None:
        """Set the reduction to `"avg"` or `"sum"`; case and blanks do not matter. Nested.

        None, the default: `"avg"` if a unit manages only plain parameters, else `"sum"`, for which the loss must be
        divided by the number of data-parallel ranks. A root with units of both kinds requires a choice.
        `recurse=False`: this unit only.
        """
        op = reduce_op_type.strip().lower() if isinstance(reduce_op_type, str) else reduce_op_type
        if op is not None:
            check_choice("cannot set how gradients are reduced", "reduce_op_type", op, ("avg", "sum"))
        units = reached_units(self, "set_reduce_op_type", recurse)
        if op == "sum" and recurse:
            hint = "use_eager_hook=True, or recurse=False on each of the other units"
            refuse_traced("set_reduce_op_type cannot reach all cells", self, hint)  # type: ignore[arg-type]
        for unit in units:
            options = unit.options
            options.average = unit.wrapping.options.average if op is None else op == "avg"
            options.divide_by, options.chose_reduction = None, op is not None

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load values into the sharded parameters and the buffers; the caller's dict is not changed.

        A value may be a DTensor (resharded if its layout differs), a plain tensor of the local shape, or a plain
        tensor of the global shape.

        Args:
            state_dict: Values by full name.
            strict: Raise for missing and for unexpected keys.
            assign: Not possible for sharded parameters: warns and copies instead.

        Raises:
            ValueError: A value has another shape or is not a tensor.
            RuntimeError: `strict` and keys are missing or unexpected; both are listed, sorted.
        """
        check("load_state_dict cannot read its flags", "bool", strict=strict, assign=assign)
        for unit in needed_units(self):
            unit.reshard()
        parent: Any = super()

        def load(values: dict[str, Any]) -> Any:
            return parent.load_state_dict(values, strict=False)

        assert isinstance(self, nn.Module)
        return load_into(self, state_dict, load, strict=strict, assign=assign)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; after an interrupt, clean up its unit."""
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except Exception as error:
            units = nested_units(self)  # type: ignore[arg-type]
            below = (unit for unit in units if unit is not unit_of(self))  # type: ignore[arg-type]
            explain_mixed(self, error, {id(p.sharded) for unit in below for p in unit.params})  # type: ignore[arg-type]
            raise
        except BaseException:  # e.g. Ctrl-C; torch runs the always-called hooks for `Exception` only
            unit = unit_of(self)  # type: ignore[arg-type]
            if unit is not None:
                unit.interrupted()
            raise

    def set_gradient_scaling_factor(self, factor: float | torch.Tensor | None) -> None:
        """Multiply reduced gradients by `factor`, including pending ones. Nested.

        Args:
            factor: A tensor of one element is read now. None: the factor when wrapped (`hsdp`'s `grad_scale`) or 1.
        """
        if isinstance(factor, torch.Tensor) and factor.numel() == 1 and not factor.is_complex():
            factor = float(factor)
        asked, hint = "set_gradient_scaling_factor cannot use its argument", "0.5, a tensor of one real number, or None"
        check(asked, "float | None", hint, InvalidValue, factor=factor)
        hint = "hsdp(cell, grad_scale=..., use_eager_hook=False)"
        refuse_traced("set_gradient_scaling_factor cannot reach all cells", self, hint)  # type: ignore[arg-type]
        for unit in needed_units(self):
            unit.options.gradient_scale = unit.wrapping.options.gradient_scale if factor is None else float(factor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a module with the same units over the same groups, copied values, and no gradients."""
        unit = unit_of(self)  # type: ignore[arg-type]
        if unit is None or unit.wrapping.copy is None:
            return self.__reduce_ex__(2)
        return unit.wrapping.copy(self, memo)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        blame = "its parameters are shards that belong to running groups"
        seen = "seen: copy.copy, pickle or torch.save of the module itself, or copy.deepcopy of a traced one"
        hint = "its state_dict(), copy.deepcopy, or copy the module before it is wrapped"
        raise InvalidType(f"cannot copy or pickle a {class_name(self)}", blame, seen, hint)

    # -- gradients -----------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(
        self,
        requires_gradient_sync: bool | None = None,
        *,
        recurse: bool = True,
        requires_grad_sync: bool | None = None,
    ) -> None:
        """Set whether backward reduces gradients; False keeps them, and the next backward with True adds them.

        On two axes it sets both, as in torch: call `set_requires_all_reduce` after it.

        Args:
            requires_gradient_sync: True to reduce; e.g. False for all micro-batches of a step except the last.
            recurse: Nested; False: this unit only.
            requires_grad_sync: Alias of `requires_gradient_sync`.
        """
        check("set_requires_gradient_sync cannot use its flags", "bool | None", requires_grad_sync=requires_grad_sync)
        flag = requires_grad_sync if requires_gradient_sync is None else requires_gradient_sync
        check_flags("set_requires_gradient_sync", requires_gradient_sync=flag)
        for unit in reached_units(self, "set_requires_gradient_sync", recurse):
            unit.options.requires_gradient_sync = unit.options.requires_all_reduce = bool(flag)
        together = nested_traced_units(self) if recurse else _own_traced(self)
        for traced in together[:1]:
            traced.set_requires_grad_sync(flag, together)
        self._show_gathered()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces over the replicate axis; False defers it to the next backward with True."""
        check_flags("set_requires_all_reduce", requires_all_reduce=requires_all_reduce)
        for unit in reached_units(self, "set_requires_all_reduce", recurse):
            unit.options.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether backward waits for reductions; False for all but the last of several backwards. For the root."""
        check_flags("set_is_last_backward", is_last_backward=is_last_backward)
        unit = needed_unit(self)
        unit.is_last_backward = is_last_backward
        if unit.schedule is not None:
            unit.schedule.is_last_backward = is_last_backward
        self._show_gathered()

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divide the sum of this unit's gradients over the ranks by `factor`, overriding the mean or the sum.

        E.g. 1.0 sums, None restores the default. `set_gradient_scaling_factor` is applied in addition.
        """
        asked, hint = "cannot divide gradients", "set_gradient_divide_factor(1.0), which adds gradients up"
        if factor is not None:
            check_above(asked, 0, hint, factor=factor)
        needed_unit(self).options.divide_by = None if factor is None else float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float | None) -> None:
        """Call `set_gradient_divide_factor`, under FSDP2's older name."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None] | None, *, stream: Any = None) -> None:
        """Call `hook` with this unit's reduced gradients, flat and padded as in FSDP2, before they are applied.

        The hook changes them in place, and may communicate, because all ranks call it in the same order. It is called
        once per dtype and group of ranks, after the mean, and on two axes after the all_reduce.

        Args:
            hook: Callable on the flat gradients; None removes it.
            stream: No effect: the hook runs on the current stream.
        """
        del stream
        hint = "lambda reduced: dist.all_reduce(reduced, group=group)"
        check("cannot call a hook with reduced gradients", "callable | None", hint, InvalidValue, hook=hook)
        needed_unit(self).options.reduced_hook = hook

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather this unit's parameters with `comm`, a torch `AllGather` that also allocates; None: the default."""
        _refuse_owners("cannot gather parameters", needed_unit(self), comm)
        for bucket in needed_unit(self).buckets:
            bucket.all_gather_with = comm

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce this unit's gradients with `comm`, a torch `ReduceScatter` whose `op` is `SUM`; None: the default."""
        _refuse_owners("cannot reduce gradients", needed_unit(self), comm)
        needed_unit(self).options.reduce_scatter_with = comm

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Let the process group's backend allocate this unit's communication buffers, if it can (e.g. nccl).

        Overrides `set_custom_all_gather` and `set_custom_reduce_scatter`. Parameters with owners are not affected.
        """
        check_flags("set_allocate_memory_from_process_group_for_comm", enable=enable)
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

        unit = needed_unit(self)
        unit.options.reduce_scatter_with = None
        for bucket, group in _gathered_buckets(unit):
            bucket.all_gather_with = None
            if enable and group._get_backend(bucket.compute_device).supports_tensor_alloc(bucket.compute_device):
                bucket.all_gather_with = collectives.ProcessGroupAllocAllGather(group)
                if not any(param.placement.owner is not None for param in unit.params):
                    unit.options.reduce_scatter_with = collectives.ProcessGroupAllocReduceScatter(group)

    def set_symm_mem_for_comm(self, backend: Any = "NCCL") -> None:
        """Gather this unit's parameters in symmetric memory, overriding `set_custom_all_gather`; on GPUs only.

        Reductions are unchanged. A backend of None turns it off.
        """
        for bucket, group in _gathered_buckets(needed_unit(self)):
            if backend is None:
                bucket.all_gather_with = None
            elif bucket.compute_device.type in SYMMETRIC:
                from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

                bucket.all_gather_with = collectives.SymmMemAllGather(group, backend)

    # -- agreement between ranks -----------------------------------------------------------------------------------

    def set_check_identity(self, check_identity: bool | int = True, *, names: bool = True) -> None:
        """Make ranks compare their units, gathers and reductions. For the root, on all ranks.

        A difference raises an error on every rank of the group, which names the first unit that differs. Units are
        compared before the root first communicates. Gathers and reductions are compared after the first forward of each
        step, after each forward without gradients, and with the norm of `clip_grad_norm_` and `get_total_norm`.

        Communication: one all_reduce of 16 bytes per step and group; 256 bytes more in the all_reduce of the norm.

        Args:
            check_identity: False: never. A number: the interval in steps, e.g. 10 for each 10th step.
            names: False: names of modules and parameters may differ between ranks, e.g. if only some have an adapter.
                Shapes, dtypes and order are compared in any case.
        """
        asked, hint = "cannot choose when ranks compare their units", "set_check_identity(10), at each 10th step"
        check(asked, "bool | int", hint, InvalidValue, check_identity=check_identity)
        check(asked, "bool", hint, InvalidValue, names=names)
        if check_identity is not False:
            check_above(asked, 0, hint, check_identity=check_identity)
        unit = needed_unit(self)
        unit.identity = int(check_identity), names
        if unit.schedule is not None and unit.is_root:
            unit.schedule.name_units()

    # -- gathering and freeing -------------------------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool | None, recurse: bool = True) -> None:
        """Set whether forward's end frees the unsharded parameters; None restores the setting made when wrapping."""
        asked = "set_reshard_after_forward cannot use its flags"
        check(asked, "bool | None", "", InvalidValue, reshard_after_forward=reshard_after_forward)
        for unit in reached_units(self, "set_reshard_after_forward", recurse):
            wrapping, as_wrapped = unit.wrapping, reshard_after_forward is None
            unit.options.reshard_after_forward = (
                wrapping.options.reshard_after_forward if reshard_after_forward is None else reshard_after_forward
            )
            unit.use_post_forward_mesh(wrapping.post_forward_mesh if as_wrapped else None)

    def set_reshard_after_backward(self, reshard_after_backward: bool, recurse: bool = True) -> None:
        """Set whether backward's end frees unsharded parameters; False keeps them until an optimizer has stepped."""
        check_flags("set_reshard_after_backward", reshard_after_backward=reshard_after_backward)
        for unit in reached_units(self, "set_reshard_after_backward", recurse):
            unit.options.reshard_after_backward = reshard_after_backward
        self._show_gathered()

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward gathers this unit; False e.g. for an embedding, whose backward needs no parameters."""
        check_flags("set_unshard_in_backward", unshard_in_backward=unshard_in_backward)
        needed_unit(self).options.unshard_in_backward = unshard_in_backward

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether a parameter that no rank used gets a gradient of zeros; False, the default: it gets none.

        A rank that did not use a parameter contributes zeros in either case. Parameters of cells that were wrapped
        with `use_eager_hook=False` get none.
        """
        name = "set_reduce_scatter_unused_params"
        check_flags(name, reduce_scatter_unused_params=reduce_scatter_unused_params)
        for unit in reached_units(self, name, recurse):
            unit.options.zeros = reduce_scatter_unused_params

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any] | None) -> None:
        """Gather these units during this unit's forward; None: the unit that followed in the recorded order."""
        units = prefetched_units("set_modules_to_forward_prefetch", ManagedModule, "fully_shard", modules=modules)
        needed_unit(self).forward_prefetch = units

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any] | None) -> None:
        """Gather these units during this unit's backward; None: the unit that preceded it in the forward order."""
        units = prefetched_units("set_modules_to_backward_prefetch", ManagedModule, "fully_shard", modules=modules)
        needed_unit(self).backward_prefetch = units

    def set_post_optim_event(self, event: Any) -> None:
        """Make the gathers of the next forward wait for `event`, e.g. recorded after an optimizer step on its stream.

        For the root. Without an event they wait for all work on the current stream. Each event is used once.
        """
        needed_unit(self).wait_for = event

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters now, for the next forward; with `async_op` return a handle to wait on.

        Forwards without gradients (e.g. evaluation, generation) use them until `reshard()` or the next training step.

        They are gathered again if the shards have changed since. A change through `.data`, or by a foreach operation
        without gradients, is not detected: call `reshard()` after one. Writes to unsharded parameters are lost when
        they are freed.
        """
        check_flags("unshard", async_op=async_op)
        unit = needed_unit(self)
        unit.gather_by_hand()
        if async_op:
            return _Gather(unit)
        unit.finish_gather()
        return None

    def reshard(self) -> None:
        """Free this unit's unsharded parameters now."""
        if not _own_traced(self):
            needed_unit(self).reshard_by_hand()

    def reset_iter_state(self) -> None:
        """Reset after a failed forward or backward: free unsharded parameters, drop new and pending gradients.

        For the root. Without this call the next forward keeps the gradients of earlier micro-batches.
        """
        unit = needed_unit(self)
        if unit.schedule is not None and not unit.is_root:
            asked, blame = f"reset_iter_state cannot start at a {class_name(self)}", "it is a unit inside of another"
            seen = f"seen: the root is a {class_name(unit.schedule.units[0].modules[0])}"
            raise InvalidState(asked, blame, seen, "call it on the root")
        if unit.schedule is not None:
            unit.schedule.forget_failed_backward()
        for nested in needed_units(self):
            nested.interrupted()
            nested.abandon_backward()
            nested.clear_pending()

    # -- FSDP2 methods without effect here -----------------------------------------------------------------------

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Do nothing: communication always sums, and factors are applied after it."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Do nothing: each buffer is freed when its reduction is complete, so there is no limit to wait for."""

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Do nothing: gathers and reductions use the groups of the mesh."""

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing: gathers are always asynchronous."""

    # -- private methods that torch's own tools call ---------------------------------------------------------------

    def _get_fsdp_state(self) -> Any:
        needed_unit(self)
        return state(self)  # type: ignore[arg-type]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for unit in nested_units(self):  # type: ignore[arg-type]
            unit.reshard()  # `to` and `half` have to convert the sharded parameters
        on_meta = [slot for slot in _slots(self) if slot[0][slot[1]].is_meta]  # type: ignore[arg-type]
        applied = super(FSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]
        for tensors, name in on_meta:
            if not tensors[name].is_meta:
                note_empty(tensors[name])
        for traced in _own_traced(self):
            traced.follow()  # so that the next trace finds leaves of the new dtype
        return applied

    def _show_gathered(self) -> None:
        """Show a torch pipeline the parameters that its forwards used, while its backwards run.

        Such a pipeline sets three flags before each backward. It may then compute the gradients of inputs and of
        weights separately, and looks for the weights among `parameters()`.
        """
        for unit in nested_units(self):  # type: ignore[arg-type]
            unit.show_for_split_backward()


class _Gather(UnshardHandle):
    """Handle of a gather under way."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Wait until the parameters are unsharded; further calls do nothing."""
        if self._unit is not None:
            self._unit.unshard()
            self._unit = None


class HSDPModule(ManagedModule):
    """Mixin in the class of every module that `fully_shard` has wrapped."""


def register_forward_method(module: nn.Module, name: str) -> None:
    """Run another method of a wrapped module as `forward` is run: on unsharded parameters, and with backward hooks.

        register_forward_method(model, "encode")
        model.encode(x).sum().backward()

    Communication: the same as the unit's forward and backward.

    Args:
        module: A wrapped module.
        name: Name of a method of the module.

    Raises:
        ValueError: The module was never wrapped, or has no such method.
    """
    unit = needed_unit(module)
    method = getattr(module, name, None) if isinstance(name, str) else None
    if not callable(method) or inspect.isgeneratorfunction(method):
        asked = f"cannot let {name!r} of a {class_name(module)} run as forward does"
        seen = "nothing of that name" if method is None else "a generator" if callable(method) else repr(method)
        hint = "the name of a method, such as 'encode'"
        raise InvalidValue(asked, "it is no method that returns a result", f"seen: {seen}", hint)

    @functools.wraps(method)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        return unit.run_as_forward(module, method, args, kwargs)

    setattr(module, name, gathered)
    unit.wrapping.forward_methods.setdefault(id(module), []).append(name)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Call `register_forward_method`, under FSDP2's name; ignore a module that was never wrapped."""
    check("cannot register a method", "module", module=module)
    if is_wrapped(module):
        register_forward_method(module, method_name)


# Cached: modules of one class must share one wrapped class, because Dynamo's guards and wrap policies compare types.
@functools.cache
def wrapped_class(original: Any, mixin: Any = HSDPModule) -> Any:
    """Return the class `HSDP<Original>` of a wrapped module; there is one per original class and API."""
    members = {"__module__": original.__module__, "_hyper_parallel_original": original}  # see `class_name`
    return type(f"HSDP{original.__name__}", (mixin, original), members)


def show_shards_in_state_dicts(unit: Unit, owner: nn.Module) -> None:
    """Make state dicts of `owner` save and load its sharded parameters in any state of the unit."""

    # Marked as the unit's, because copies of a module keep only users' hooks and get hooks of the copied unit.
    def before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        unit.check_assigned()
        unit.reshard()

    def before_load(module: nn.Module, *args: Any) -> None:
        unit.reshard()

    before_save.is_of_a_unit = before_load.is_of_a_unit = True  # type: ignore[attr-defined]
    owner.register_state_dict_pre_hook(before_save)
    owner.register_load_state_dict_pre_hook(before_load)


# -- state that torch's tools look up ----------------------------------------------------------------------------------


class Hook:
    """Handle of an engine's forward hook, which torch's memory tracker removes to wrap the hook."""

    def __init__(self, modules: Iterable[nn.Module], hook: Any) -> None:
        self._modules, self._hook = modules, hook

    def remove(self) -> None:
        """Remove the hook from all modules of the unit."""
        for module in self._modules:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for number in [number for number, hook in hooks.items() if hook == self._hook]:
                    del hooks[number]


class _ParamGroup:
    """View of a unit as a parameter group of FSDP2, for torch's tools.

    Attributes:
        post_backward: Called by torch's pipelines once all gradients are complete; `State` reduces them afterwards.
        pre_backward: Never called.
    """

    __slots__ = ("_unit", "post_backward", "pre_backward")

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self.pre_backward: Callable[..., None] = _nothing
        self.post_backward: Callable[..., None] = _nothing

    @property
    def fsdp_params(self) -> list[Any]:
        """List the sharded and unsharded parameters, under torch's names."""
        return [
            SimpleNamespace(sharded_param=p.sharded, unsharded_param=p.unsharded, _unsharded_param=p.unsharded)
            for p in self._unit.params
        ]


class _StateContext:
    """State that is shared by all units below one root."""

    def __init__(self, root: State) -> None:
        self._root = root

    @property
    def all_states(self) -> list[State]:
        """The state of each unit below the root."""
        unit = self._root.unit
        units = [unit] if unit.schedule is None else unit.schedule.units
        return [state(unit.modules[0]) for unit in units]

    @property
    def is_last_backward(self) -> bool:
        """True if the end of a backward applies gradients."""
        unit = self._root.unit
        return unit.is_last_backward if unit.schedule is None else unit.schedule.is_last_backward


class State:
    """State of a unit, at the place where FSDP2 keeps its state: `fully_shard.state(module)`.

    It provides the attributes that torch's pipelines, memory tracker and checkpoints read. Settings change only through
    methods of the module.

    Attributes:
        unit: The engine's unit.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self._fsdp_param_groups = [_ParamGroup(unit)]
        self._state_ctx = _StateContext(self)
        self._modules = tuple(unit.modules)
        self._device = unit.platform.device()
        self._mp_policy = unit.options.mp_policy
        self._pre_forward, self._post_forward = unit.pre_forward, unit.post_forward
        self._pre_forward_hook_handle = Hook(self._modules, self._pre_forward)
        self._post_forward_hook_handle = Hook(self._modules, self._post_forward)

    @property
    def _fsdp_param_group(self) -> _ParamGroup | None:
        return self._fsdp_param_groups[0] if self.unit.buckets else None

    def _root_post_backward_final_callback(self) -> None:
        """Reduce the gradients of a pipeline stage once all are complete."""
        reduce_gradients(self.unit.modules[0])


def register_state(unit: Unit) -> None:
    """Store the unit's state under FSDP2's key, and mark the modules as wrapped in torch's registry."""
    made = State(unit)
    for module in unit.modules:
        states = module.__dict__.setdefault(STATE_KEY, OrderedDict())
        states[torch_fully_shard.__wrapped__] = made  # type: ignore[attr-defined]
        # torch's `replicate` reads its registry to find managed modules; otherwise it took units' DTensors as its own.
        registry = module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())
        registry["fully_shard"] = RegistryItem()


def state(module: nn.Module) -> Any:
    """Return the state of a wrapped module, or None for any other module; see `State`."""
    return torch_fully_shard.state(module)  # type: ignore[attr-defined]


def share_comm_ctx(modules: Sequence[Any]) -> None:
    """Do nothing: units of several roots communicate over the groups of their meshes, on the backend's streams.

    Raises:
        ValueError: One of the modules was never wrapped.
    """
    for module in list_modules(modules):
        needed_unit(module)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
