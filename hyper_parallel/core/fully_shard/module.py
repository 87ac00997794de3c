"""The methods that a wrapped module gains, and the state of it that torch's own tools look for.

A wrapped module is a `torch.distributed.fsdp.FSDPModule`. The engine overrides every method of that class, since
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
    """The unit of a wrapped module.

    Raises:
        ValueError: It was never wrapped, or for `torch.compile` to trace.
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
    """All units in a wrapped module and its submodules.

    Raises:
        ValueError: It was never wrapped.
    """
    if not isinstance(module, nn.Module) or not is_wrapped(module):
        needed_unit(module)  # which says so
    return nested_units(module)


def _own_traced(module: Any) -> list[Any]:
    traced = traced_unit_of(module) if isinstance(module, nn.Module) else None
    return [] if traced is None else [traced]


def reached_units(module: Any, method: str, recurse: bool) -> Iterable[Unit]:
    """The units that a method is about: all nested ones, or the module's own.

    Raises:
        ValueError: It was never wrapped, or `recurse` is no bool.
    """
    check_flags(method, recurse=recurse)
    if recurse:
        return needed_units(module)
    return [] if _own_traced(module) else [needed_unit(module)]


def check_flags(method: str, **flags: Any) -> None:
    """Refuse flags of a method that are not True or False.

    Raises:
        ValueError: The first that is not.
    """
    check(f"{method} cannot use its flags", "bool", "", InvalidValue, **flags)


def _refuse_owners(asked: str, unit: Unit, comm: Any) -> None:
    owned = [param.name for param in unit.params if param.placement.owner is not None]
    if comm is not None and owned:
        blame = f"one rank holds all of parameter {owned[0]!r}, and what torch's protocol moves has shards of one size"
        hint = "Shard(0) or None for it in shard_placement_fn"
        raise InvalidValue(asked, blame, f"seen: a {type(comm).__name__}", hint)


def _gathered_buckets(unit: Unit) -> Iterator[tuple[Any, Any]]:
    """Yield the buckets of a unit that an all_gather gathers, with their groups."""
    for bucket in unit.buckets:
        if bucket.group is not None and bucket.ranks > 1 and bucket.params[0].placement.owner is None:
            yield bucket, bucket.group


def prefetched_units(method: str, kind: type[ManagedModule], by: str, **argument: Any) -> list[Unit] | None:
    """The units of wrapped modules that a method is given; one for `torch.compile` to trace gathers by its graph.

    Raises:
        ValueError: No list and not None, or one of the modules was not wrapped, by the API of `kind`.
    """
    asked = f"{method} cannot use its argument"
    check(asked, "list | None", "[model.layers[1]]", InvalidValue, **argument)  # of a set each rank has its own order
    (modules,) = argument.values()
    if modules is None:
        return None
    for index, module in enumerate(modules):
        if not isinstance(module, kind) or not is_wrapped(module):  # type: ignore[arg-type]
            blame = f"item {index}, a {class_name(module)}, was not wrapped by {by}"
            raise InvalidValue(asked, blame, f"seen: {len(modules)} items", f"{by}(that_module) first")
    return [unit for module in modules if (unit := unit_of(module)) is not None]


# -- steps by request: unsharded for the step, deferred sync -----------------------------------------------------------

# A pipeline runs forwards and backwards of several micro-batches in an order of its own, and some schedules compute the
# gradients of inputs and of weights apart, through none of the hooks that tell a unit where backward is. So a step is
# put between two calls, and the hooks stay out of it:
#
#     hold_parameters(stage)   # one gather per unit
#     ...                      # forwards and backwards, in any order
#     reduce_gradients(stage)  # free the unsharded parameters, one reduction per unit

UnitCallback = Callable[[Unit], object]
"""Called with each unit before anything is done with it."""


def hold_parameters(module: nn.Module, *, keep: bool = True, before: UnitCallback | None = None) -> None:
    """Gather all parameters in `module`, and leave them unsharded until `reduce_gradients` or `release_parameters`.

    Forwards meanwhile cast inputs and outputs as the policy says and do nothing else. Gradients add up in the unsharded
    parameters without communication, whoever computes them: `backward`, or `torch.autograd.grad` and an assignment.

    Communication: one all_gather per unit, all of them started here.

    Args:
        module: with units of `fully_shard` or `hsdp` in it, or none: then this does nothing.
        keep: False: gather and free in each forward and backward as ever, and let only the reductions wait; a
            backward must then be a full one.
        before: called with each unit before it is gathered.

    Raises:
        ValueError: a unit for `torch.compile` to trace, whose communication is part of its graph.
        RuntimeError: they are unsharded for a step already.
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
    for unit in units:  # all checked before: an error half way would leave some unsharded for good
        if before is not None:
            before(unit)
        if keep:
            unit.unshard_for_step()
        else:
            unit.defer_sync()


def units_with_wider_sums(module: nn.Module) -> list[Unit]:
    """Return the units, unsharded for the step, that reduce gradients in another dtype than autograd adds them up in.

    After each micro-batch `unit.keep_gradients()` adds theirs up in that dtype; no communication.

    Args:
        module: whose parameters are unsharded for the step.
    """
    units = [unit for root in _roots(module) for unit in root.prepared_units()]
    return [unit for unit in units if unit.control is StepControl.UNSHARDED_FOR_STEP and unit.has_wider_sums]


def reduce_gradients(module: nn.Module, *, before: UnitCallback | None = None) -> None:
    """Reduce all gradients that wait in `module`, in `param.grad` of the sharded parameters, as a backward's end would.

    What waits are gradients of parameters that are unsharded for the step, which are freed, and those of backwards
    without gradient sync. With `set_requires_gradient_sync(False)` all of them go on waiting. A rank that has no
    gradients takes part with zeros.

    Communication: one reduction per unit, as `fully_shard` says; every rank calls this at the same place.

    Args:
        module: with units of `fully_shard` or `hsdp` in it, or none.
        before: called with each unit before its gradients are reduced.

    Raises:
        ValueError: a unit for `torch.compile` to trace.
        RuntimeError: forward changed an unsharded parameter in place.
    """
    reductions = StepReductions(module, before=before)
    reductions.start()
    reductions.finish()


class StepReductions:
    """The reductions at the end of a step: one of each unit, in one order on all ranks, whenever gradients come.

    `reduce_gradients` does all of it at once. A pipeline does it in the last backward of a stage::

        with reductions.in_backward():  # a unit's reduction starts behind the last gradient of it and of those before
            loss.backward()
        reductions.start()              # those of units that have waited for a gradient that never came
        ...                             # other stages
        reductions.finish()

    The order is that of module order backwards. It does not depend on which gradients come, and when: on a rank that
    has not used some parameter, the reductions from its unit on start at the end.

    Args:
        module: with units of `fully_shard` or `hsdp` in it, or none.
        before: called with each unit before its gradients are reduced.
        in_place: send gradients from where they are, if all units can: no reduction is waited for before `finish`, and
            gradients stay until then. Else each is packed in the memory of the one before, which is waited for.

    Raises:
        ValueError: a unit for `torch.compile` to trace.
    """

    def __init__(self, module: nn.Module, *, before: UnitCallback | None = None, in_place: bool = False) -> None:
        refuse_traced("cannot reduce gradients when asked", module)
        self._before = before
        self._groups = [root.prepared_units() for root in _roots(module)]
        self._waiting = [unit for units in reversed(self._groups) for unit in reversed(units)]
        # Of some units alone it would not help: the others wait for all reductions before theirs.
        self._in_place = in_place and all(unit.can_send_in_place for unit in self._waiting)
        self._reduced: list[Unit] = []  # while their parameters stay
        self._missing: dict[Unit, set[int]] = {}
        self._owners: dict[int, Unit] = {}

    @property
    def is_started(self) -> bool:
        """Whether `start` has been called."""
        return not self._waiting and not self._reduced

    @contextmanager
    def in_backward(self, *, forward_order: bool = False) -> Iterator[None]:
        """Reduce the gradients of parameters that are unsharded for the step as soon as the block has computed them.

        Args:
            forward_order: gradients come in the order of forward, those of the root last, on all ranks.

        Raises:
            RuntimeError: forward changed an unsharded parameter in place.
        """
        _check_untouched(self._waiting)
        if forward_order:
            self._waiting = [unit for root, *below in self._groups for unit in (*below, root)]
        handles: list[Any] = []
        for unit in self._waiting:
            # Those of other units come and go with hooks of their own, which collect gradients elsewhere.
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
        """The gradient of an unsharded parameter is complete: start the reductions that have waited for it."""
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
        """Start the reductions that have not been started, and free all parameters.

        Raises:
            RuntimeError: forward changed an unsharded parameter in place.
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
        """Wait for all reductions, and apply the gradients; those that may go on after the step do."""
        for units in self._groups:
            schedule = units[0].schedule
            assert schedule is not None
            if self._before is not None and self._in_place:  # here they are waited for, unit by unit
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
    """Free the unsharded parameters of a step in `module`, without a reduction; no communication.

    Args:
        module: with units in it, or none.
        failed: drop all gradients that wait, as after a step that ended with an error.
    """
    for root in _roots(module):
        units = root.prepared_units()
        if failed and root.schedule is not None:
            root.schedule.drop_reductions()
        for unit in units:
            unit.release(failed=failed)


def _roots(module: nn.Module) -> Iterator[Unit]:
    """The units in `module` that are in no other one, each once, in module order."""
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
    """Refuse what cannot reach a cell whose communication is part of its graph.

    Raises:
        ValueError: There is one in the module.
    """
    for name, child in module.named_modules():
        if traced_unit_of(child) is not None:
            blame = f"{name or class_name(child)!r} was wrapped for torch.compile to trace"
            seen = "seen: hsdp(..., use_eager_hook=False), whose communication is part of its graph"
            raise InvalidValue(asked, blame, seen, hint)


def _slots(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Where a module and its submodules keep their parameters and buffers."""
    for child in module.modules():
        for tensors in (child._parameters, child._buffers):
            yield from ((tensors, name) for name, tensor in tensors.items() if tensor is not None)


# -- wrapped modules ---------------------------------------------------------------------------------------------------


class ManagedModule(FSDPModule):
    """What both APIs of the engine give a wrapped module: FSDP2's methods, and those of HyperParallel.

    It is an `FSDPModule`, because clients ask for that class and skip what is none: one that never set its divide
    factor trained with a quarter of the gradient.

    "Nested" means: this unit and all units in its submodules. Methods raise `ValueError` for an argument of the wrong
    kind, and when called on a module that was never wrapped.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the original class: a slice of a wrapped container is a plain container."""
        original: Any = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)  # by hand: Python calls it for instances of `cls` alone
        return made

    # -- HyperParallel's own methods -----------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, also those that wait for a reduction. Nested."""
        for unit in needed_units(self):
            unit.clear_gradients(set_to_none=set_to_none)
        for traced in nested_traced_units(self):
            traced.zero_grads(set_to_none=set_to_none)
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def set_reduce_op_type(self, reduce_op_type: str | None, *, recurse: bool = True) -> None:
        """`"avg"` or `"sum"`; case and blanks do not matter. Nested; `recurse=False`: this unit only.

        None, the default: `"avg"` where a unit manages only plain parameters, else `"sum"`, and the loss must already
        be divided by the number of data-parallel ranks. A root with units of both kinds has to choose.
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

        A value may be a DTensor (resharded when laid out otherwise), a plain tensor of the local shape, or one of
        the global shape.

        Args:
            state_dict: Values by full name.
            strict: Raise for missing and for unexpected keys.
            assign: Not possible for sharded parameters: warns, and copies.

        Raises:
            ValueError: A value of another shape, or no tensor at all.
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
        """Call the module; if it is interrupted, let its unit know."""
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except Exception as error:
            units = nested_units(self)  # type: ignore[arg-type]
            below = (unit for unit in units if unit is not unit_of(self))  # type: ignore[arg-type]
            explain_mixed(self, error, {id(p.sharded) for unit in below for p in unit.params})  # type: ignore[arg-type]
            raise
        except BaseException:  # Ctrl-C, for one; for exceptions torch calls the hooks
            unit = unit_of(self)  # type: ignore[arg-type]
            if unit is not None:
                unit.interrupted()
            raise

    def set_gradient_scaling_factor(self, factor: float | torch.Tensor | None) -> None:
        """Multiply reduced gradients by `factor`, also those that wait by then. Nested.

        Args:
            factor: A tensor of one element is read now. None: as when wrapped, `hsdp`'s `grad_scale` or 1.
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
        """Return a module with the same units over the same groups, values of its own, and no gradients."""
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
        """False: no communication in backward, gradients are kept; the next backward with True adds them.

        On two axes it decides about both, as in torch: call `set_requires_all_reduce` after it.

        Args:
            requires_gradient_sync: Whether to reduce.
            recurse: Nested; False: this unit only.
            requires_grad_sync: Another name of the first.
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
        """False: reduce over the shard axis only; the replicate axis follows in the next backward with True."""
        check_flags("set_requires_all_reduce", requires_all_reduce=requires_all_reduce)
        for unit in reached_units(self, "set_requires_all_reduce", recurse):
            unit.options.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: the end of this backward leaves reductions under way (several backwards per step). For the root."""
        check_flags("set_is_last_backward", is_last_backward=is_last_backward)
        unit = needed_unit(self)
        unit.is_last_backward = is_last_backward
        if unit.schedule is not None:
            unit.schedule.is_last_backward = is_last_backward
        self._show_gathered()

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divide the sum of this unit's gradients over the ranks by `factor`, instead of the mean or the sum.

        1.0: add them up. None: the mean or the sum again. `set_gradient_scaling_factor` is a factor beside it.
        """
        asked, hint = "cannot divide gradients", "set_gradient_divide_factor(1.0), which adds gradients up"
        if factor is not None:
            check_above(asked, 0, hint, factor=factor)
        needed_unit(self).options.divide_by = None if factor is None else float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float | None) -> None:
        """The same as `set_gradient_divide_factor`, by its older name."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None] | None, *, stream: Any = None) -> None:
        """Call `hook` with this unit's reduced gradients, flat and padded as FSDP2's, before they are applied.

        It changes them in place, and may communicate: all ranks call it in one order. Called once for each dtype and
        group of ranks; after the all_reduce on two axes. The mean has been taken.

        Args:
            hook: What is called; None: nothing any more.
            stream: Without effect: it runs on the current stream.
        """
        del stream
        hint = "lambda reduced: dist.all_reduce(reduced, group=group)"
        check("cannot call a hook with reduced gradients", "callable | None", hint, InvalidValue, hook=hook)
        needed_unit(self).options.reduced_hook = hook

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather this unit's parameters with `comm`, an `AllGather` of torch that allocates, too; None: as before."""
        _refuse_owners("cannot gather parameters", needed_unit(self), comm)
        for bucket in needed_unit(self).buckets:
            bucket.all_gather_with = comm

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce this unit's gradients with `comm`, a `ReduceScatter` of torch whose `op` is `SUM`; None: as before."""
        _refuse_owners("cannot reduce gradients", needed_unit(self), comm)
        needed_unit(self).options.reduce_scatter_with = comm

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Let the backend of the process group allocate what this unit communicates with, if it can (nccl's can).

        In place of `set_custom_all_gather` and `set_custom_reduce_scatter`. Parameters with owners are left alone.
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
        """Gather this unit's parameters in symmetric memory, in place of `set_custom_all_gather`; on GPUs only.

        Gradients are reduced as they were. A backend of None: no longer.
        """
        for bucket, group in _gathered_buckets(needed_unit(self)):
            if backend is None:
                bucket.all_gather_with = None
            elif bucket.compute_device.type in SYMMETRIC:
                from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

                bucket.all_gather_with = collectives.SymmMemAllGather(group, backend)

    # -- whether ranks agree ---------------------------------------------------------------------------------------

    def set_check_identity(self, check_identity: bool | int = True, *, names: bool = True) -> None:
        """Let ranks compare their units, and which of them they gather and reduce together. For the root, on all ranks.

        What differs is an error on every rank of the group, with the first unit that does. Units are compared before
        the root first communicates; what is gathered and reduced after the first forward of each step, after each
        forward without gradients, and with the norm of `clip_grad_norm_` and `get_total_norm`.

        Communication: one all_reduce of 16 bytes a step for each group; 256 bytes more in the all_reduce of the norm.

        Args:
            check_identity: False: never; a number: at so many steps, in place of each.
            names: False: ranks may have other names for modules and parameters, as where only some have an adapter;
                shapes, dtypes and order are compared all the same.
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

    # -- when parameters are unsharded ----------------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool | None, recurse: bool = True) -> None:
        """Whether the unsharded parameters are freed after forward; replaces what wrapping said. None: that again."""
        asked = "set_reshard_after_forward cannot use its flags"
        check(asked, "bool | None", "", InvalidValue, reshard_after_forward=reshard_after_forward)
        for unit in reached_units(self, "set_reshard_after_forward", recurse):
            wrapping, as_wrapped = unit.wrapping, reshard_after_forward is None
            unit.options.reshard_after_forward = (
                wrapping.options.reshard_after_forward if reshard_after_forward is None else reshard_after_forward
            )
            unit.use_post_forward_mesh(wrapping.post_forward_mesh if as_wrapped else None)

    def set_reshard_after_backward(self, reshard_after_backward: bool, recurse: bool = True) -> None:
        """Whether unsharded parameters are freed after backward; False keeps them until an optimizer has stepped."""
        check_flags("set_reshard_after_backward", reshard_after_backward=reshard_after_backward)
        for unit in reached_units(self, "set_reshard_after_backward", recurse):
            unit.options.reshard_after_backward = reshard_after_backward
        self._show_gathered()

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: backward of this unit needs no parameters (an embedding's does not), and none are gathered."""
        check_flags("set_unshard_in_backward", unshard_in_backward=unshard_in_backward)
        needed_unit(self).options.unshard_in_backward = unshard_in_backward

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """True: a parameter that no rank has used gets zeros as its gradient; False, the default: it gets none.

        A rank that has not used a parameter takes part with zeros in either case. Those of cells that were wrapped
        with `use_eager_hook=False` get none.
        """
        name = "set_reduce_scatter_unused_params"
        check_flags(name, reduce_scatter_unused_params=reduce_scatter_unused_params)
        for unit in reached_units(self, name, recurse):
            unit.options.zeros = reduce_scatter_unused_params

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any] | None) -> None:
        """Gather these units' parameters while this unit's forward computes (None: the unit that came next)."""
        units = prefetched_units("set_modules_to_forward_prefetch", ManagedModule, "fully_shard", modules=modules)
        needed_unit(self).forward_prefetch = units

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any] | None) -> None:
        """Gather these units' parameters while this unit's backward computes (None: the one that came before)."""
        units = prefetched_units("set_modules_to_backward_prefetch", ManagedModule, "fully_shard", modules=modules)
        needed_unit(self).backward_prefetch = units

    def set_post_optim_event(self, event: Any) -> None:
        """Let the gathers of the next forward wait for `event`, recorded after an optimizer's step on its own stream.

        For the root. Without it they wait for what the current stream holds. It is used once.
        """
        needed_unit(self).wait_for = event

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters now, for the next forward; with `async_op` returns a handle to wait on.

        Forwards without gradients (an evaluation, generation) use them until `reshard()` or the next training step.

        What is gathered already is gathered again if the parameters have changed since. A change through `.data`, or
        by a foreach operation without gradients, leaves no trace: call `reshard()` after one. What is written into
        unsharded parameters is lost when they are freed.
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
        """After a forward or backward that failed: free unsharded parameters, drop what it did and gradients that wait.

        For the root. Without it the next forward goes on with the gradients of earlier micro-batches.
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

    # -- what the engine does anyway, or has no use for ----------------------------------------------------------

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Without effect: communication always adds up, and factors are applied after it."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Without effect: a buffer is freed when its reduction is through, and none is waited for."""

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Without effect: gathers and reductions go over the groups of the mesh."""

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Without effect: gathers are always asynchronous."""

    # -- what torch's own tools call -----------------------------------------------------------------------------

    def _get_fsdp_state(self) -> Any:
        needed_unit(self)
        return state(self)  # type: ignore[arg-type]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for unit in nested_units(self):  # type: ignore[arg-type]
            unit.reshard()  # what `to` and `half` convert are the sharded parameters
        on_meta = [slot for slot in _slots(self) if slot[0][slot[1]].is_meta]  # type: ignore[arg-type]
        applied = super(FSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]
        for tensors, name in on_meta:
            if not tensors[name].is_meta:
                note_empty(tensors[name])
        for traced in _own_traced(self):
            traced.follow()  # a graph that is traced next finds leaves of the new dtype
        return applied

    def _show_gathered(self) -> None:
        """While a pipeline of torch runs backwards, let it find the parameters that its forwards have used.

        It says so before each backward, by three flags; it may then ask for the gradients of inputs and of weights
        apart, and looks for the weights among `parameters()`.
        """
        for unit in nested_units(self):  # type: ignore[arg-type]
            unit.show_for_split_backward()


class _Gather(UnshardHandle):
    """A gather under way."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Wait until the unsharded parameters are there; further calls do nothing."""
        if self._unit is not None:
            self._unit.unshard()
            self._unit = None


class HSDPModule(ManagedModule):
    """Mixed into the class of every module that `fully_shard` has wrapped."""


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let another method of a wrapped module run as `forward` does: on unsharded parameters, with backward seen to.

        register_forward_method(model, "encode")
        model.encode(x).sum().backward()

    Communication: that of the unit's forward and backward.

    Args:
        module: A wrapped module.
        name: Of one of its methods.

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
    """As `register_forward_method`, by FSDP2's name; a module that was never wrapped is left alone."""
    check("cannot register a method", "module", module=module)
    if is_wrapped(module):
        register_forward_method(module, method_name)


# Cached: modules of one class stay of one class, for who compares types (Dynamo's guards, wrap policies).
@functools.cache
def wrapped_class(original: Any, mixin: Any = HSDPModule) -> Any:
    """The class `HSDP<Original>` that a wrapped module gets; one per original class and API."""
    members = {"__module__": original.__module__, "_hyper_parallel_original": original}  # see `class_name`
    return type(f"HSDP{original.__name__}", (mixin, original), members)


def show_shards_in_state_dicts(unit: Unit, owner: nn.Module) -> None:
    """State dicts of `owner` save and load its sharded parameters, whatever the state of the unit."""

    # Copies of a module get hooks of their own unit.
    def before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        unit.check_assigned()
        unit.reshard()

    def before_load(module: nn.Module, *args: Any) -> None:
        unit.reshard()

    before_save.is_of_a_unit = before_load.is_of_a_unit = True  # type: ignore[attr-defined]
    owner.register_state_dict_pre_hook(before_save)
    owner.register_load_state_dict_pre_hook(before_load)


# -- the state that torch's tools look for ---------------------------------------------------------------------------


class Hook:
    """A forward hook of the engine, which torch's memory tracker takes off to put its own around it."""

    def __init__(self, modules: Iterable[nn.Module], hook: Any) -> None:
        self._modules, self._hook = modules, hook

    def remove(self) -> None:
        """Take it off, of all modules of the unit."""
        for module in self._modules:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for number in [number for number, hook in hooks.items() if hook == self._hook]:
                    del hooks[number]


class _ParamGroup:
    """A unit as torch's tools see a parameter group of FSDP2.

    Attributes:
        post_backward: Called by torch's pipelines once all gradients are there; `State` reduces them then.
        pre_backward: Never called.
    """

    __slots__ = ("_unit", "post_backward", "pre_backward")

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self.pre_backward: Callable[..., None] = _nothing
        self.post_backward: Callable[..., None] = _nothing

    @property
    def fsdp_params(self) -> list[Any]:
        """Sharded and unsharded parameters, by torch's names."""
        return [
            SimpleNamespace(sharded_param=p.sharded, unsharded_param=p.unsharded, _unsharded_param=p.unsharded)
            for p in self._unit.params
        ]


class _StateContext:
    """What the states below one root share."""

    def __init__(self, root: State) -> None:
        self._root = root

    @property
    def all_states(self) -> list[State]:
        """The state of each unit of the root."""
        unit = self._root.unit
        units = [unit] if unit.schedule is None else unit.schedule.units
        return [state(unit.modules[0]) for unit in units]

    @property
    def is_last_backward(self) -> bool:
        """Whether the end of a backward applies gradients."""
        unit = self._root.unit
        return unit.is_last_backward if unit.schedule is None else unit.schedule.is_last_backward


class State:
    """The state of a unit, where FSDP2 keeps its own: `fully_shard.state(module)`.

    It has what torch's pipelines, its memory tracker and its checkpoints ask for; nothing can be set but by methods of
    the module.

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
        """All gradients of a pipeline's stage are there: reduce them."""
        reduce_gradients(self.unit.modules[0])


def register_state(unit: Unit) -> None:
    """Put the state of a unit where FSDP2 has its own, and note in torch's registry that the modules are wrapped."""
    made = State(unit)
    for module in unit.modules:
        states = module.__dict__.setdefault(STATE_KEY, OrderedDict())
        states[torch_fully_shard.__wrapped__] = made  # type: ignore[attr-defined]
        # torch's `replicate` finds in its registry what is managed already; it took units' DTensors for its own else.
        registry = module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())
        registry["fully_shard"] = RegistryItem()


def state(module: nn.Module) -> Any:
    """The state of a wrapped module, None of any other; see `State`."""
    return torch_fully_shard.state(module)  # type: ignore[attr-defined]


def share_comm_ctx(modules: Sequence[Any]) -> None:
    """Without effect: units of several roots communicate over the groups of their meshes, on the backend's streams.

    Raises:
        ValueError: One of the modules was never wrapped.
    """
    for module in list_modules(modules):
        needed_unit(module)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
