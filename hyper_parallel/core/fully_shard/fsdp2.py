"""The methods of torch's FSDP2 on a wrapped module, and the state of it that torch's own tools look for.

A wrapped module is a ``torch.distributed.fsdp.FSDPModule``. Every method of that class is one of the engine's here, so
that none of torch's looks for parameters where there are none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.fsdp import FSDPModule, UnshardHandle
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from hyper_parallel.core.common.checks import check, check_modules
from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.fully_shard.held import reduce_gradients
from hyper_parallel.core.fully_shard.unit import Unit, is_wrapped, traced_unit_of, unit_of

__all__ = [
    "FSDP2Methods",
    "State",
    "nested_traced_units",
    "nested_units",
    "needed_unit",
    "needed_units",
    "reached_units",
    "register_state",
    "share_comm_ctx",
    "state",
]


class FSDP2Methods(FSDPModule):
    """The methods of FSDP2; what ``fully_shard`` has to add to them stands at its end."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a module of the original class: a slice of a wrapped container is a plain container."""
        original: Any = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    # -- gradients -----------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(
        self,
        requires_gradient_sync: bool | None = None,
        *,
        recurse: bool = True,
        requires_grad_sync: bool | None = None,
    ) -> None:
        """False: no communication in backward, gradients are kept; the next backward with True adds them.

        On two axes it decides about both, as in torch: call :meth:`set_requires_all_reduce` after it.

        Args:
            requires_gradient_sync: Whether to reduce.
            recurse: Nested; False: this unit only.
            requires_grad_sync: Another name of the first.
        """
        check("set_requires_gradient_sync cannot use its flags", "bool | None", requires_grad_sync=requires_grad_sync)
        flag = requires_grad_sync if requires_gradient_sync is None else requires_gradient_sync
        _check_flag("set_requires_gradient_sync", flag, "requires_gradient_sync")
        for unit in reached_units(self, "set_requires_gradient_sync", recurse):
            unit.options.requires_gradient_sync = unit.options.requires_all_reduce = bool(flag)
        for traced in nested_traced_units(self) if recurse else _own_traced(self):
            traced.set_requires_grad_sync(flag)
        self._show_gathered()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: reduce over the shard axis only; the replicate axis follows in the next backward with True."""
        _check_flag("set_requires_all_reduce", requires_all_reduce, "requires_all_reduce")
        for unit in reached_units(self, "set_requires_all_reduce", recurse):
            unit.options.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: the end of this backward leaves reductions under way (several backwards per step). For the root."""
        _check_flag("set_is_last_backward", is_last_backward, "is_last_backward")
        unit = needed_unit(self)
        unit.is_last_backward = is_last_backward
        if unit.schedule is not None:
            unit.schedule.is_last_backward = is_last_backward
        self._show_gathered()

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this unit's gradients over the ranks by ``factor``, instead of the mean or the sum.

        1.0: add them up. What :meth:`set_gradient_scaling_factor` says is still multiplied by.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            raise ValueError(
                explain(
                    f"set_gradient_divide_factor cannot use {factor!r}",
                    "gradients are divided by it",
                    "expected: a number greater than 0",
                    "set_gradient_divide_factor(1.0), which adds gradients up",
                )
            )
        options = needed_unit(self).options
        options.divide_by, options.chose_reduction = float(factor), True

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The same as :meth:`set_gradient_divide_factor`, by its older name."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call ``hook`` with this unit's reduced gradients, flat and padded as FSDP2's, before they are applied.

        It changes them in place, and may communicate: all ranks call it in one order. Called once for each dtype and
        group of ranks; after the all_reduce on two axes. The mean has been taken.

        Args:
            hook: What is called.
            stream: Without effect: it runs on the current stream.
        """
        del stream
        if not callable(hook):
            raise _no_function("set_all_reduce_hook", hook, "lambda reduced: dist.all_reduce(reduced, group=group)")
        needed_unit(self).options.reduced_hook = hook

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather this unit's parameters with ``comm``, an ``AllGather`` of torch: it allocates and communicates."""
        _check_comm("set_custom_all_gather", comm)
        for bucket in needed_unit(self).buckets:
            bucket.all_gather_with = comm

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce this unit's gradients with ``comm``, a ``ReduceScatter`` of torch; its ``op`` is always ``SUM``."""
        _check_comm("set_custom_reduce_scatter", comm)
        needed_unit(self).options.reduce_scatter_with = comm

    # -- when parameters are whole -------------------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether the whole parameters are freed after forward; replaces an int given when wrapping."""
        _check_flag("set_reshard_after_forward", reshard_after_forward, "reshard_after_forward")
        for unit in reached_units(self, "set_reshard_after_forward", recurse):
            unit.options.reshard_after_forward = reshard_after_forward
            unit.use_smaller_world(None)

    def set_reshard_after_backward(self, reshard_after_backward: bool, recurse: bool = True) -> None:
        """Whether the whole parameters are freed after backward; False keeps them until an optimizer has stepped."""
        _check_flag("set_reshard_after_backward", reshard_after_backward, "reshard_after_backward")
        for unit in reached_units(self, "set_reshard_after_backward", recurse):
            unit.options.reshard_after_backward = reshard_after_backward
        self._show_gathered()

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: backward of this unit needs no parameters (an embedding's does not), and none are gathered."""
        _check_flag("set_unshard_in_backward", unshard_in_backward, "unshard_in_backward")
        needed_unit(self).options.unshard_in_backward = unshard_in_backward

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """True: a parameter that no rank has used gets zeros as its gradient; False, the default: it gets none.

        A rank that has not used a parameter takes part with zeros in either case. Those of cells that were wrapped
        with ``use_eager_hook=False`` get none.
        """
        name = "set_reduce_scatter_unused_params"
        _check_flag(name, reduce_scatter_unused_params, "reduce_scatter_unused_params")
        for unit in reached_units(self, name, recurse):
            unit.options.zeros = reduce_scatter_unused_params

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """Gather these units' parameters while this unit's forward computes (default: the unit that came next)."""
        needed_unit(self).forward_prefetch = _units_of("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """Gather these units' parameters while this unit's backward computes (default: the one that came before)."""
        needed_unit(self).backward_prefetch = _units_of("set_modules_to_backward_prefetch", modules)

    def set_post_optim_event(self, event: Any) -> None:
        """Let the gathers of the next forward wait for ``event``, recorded after an optimizer's step on its own stream.

        For the root. Without it they wait for what the current stream holds. It is used once.
        """
        needed_unit(self).wait_for = event

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters now, for the next forward; with ``async_op`` returns a handle to wait on.

        Forwards without gradients (an evaluation, generation) use them until ``reshard()`` or the next training step.

        What is gathered already is gathered again if the parameters have changed since. A change through ``.data``, or
        by a foreach operation without gradients, leaves no trace: call ``reshard()`` after one. What is written into
        whole parameters is lost when they are freed.
        """
        _check_flag("unshard", async_op, "async_op")
        unit = needed_unit(self)
        unit.gather_by_hand()
        if async_op:
            return _Gather(unit)
        unit.finish_gather()
        return None

    def reshard(self) -> None:
        """Free this unit's whole parameters now."""
        if not _own_traced(self):
            needed_unit(self).reshard_by_hand()

    def reset_iter_state(self) -> None:
        """After a forward or backward that failed: free whole parameters, drop what it did and gradients that wait.

        For the root. Without it the next forward goes on with the gradients that earlier micro-batches have left.
        """
        unit = needed_unit(self)
        if unit.schedule is not None and not unit.is_root:
            raise RuntimeError(
                explain(
                    f"reset_iter_state cannot start at a {type(self).__name__}",
                    "it is a unit inside of another one",
                    f"seen: the root is a {type(unit.schedule.units[0].modules[0]).__name__}",
                    "call it on the root",
                )
            )
        if unit.schedule is not None:
            unit.schedule.forget_failed_backward()
        for nested in needed_units(self):
            nested.interrupted()
            nested.abandon_backward()
            nested.clear_waiting()

    # -- what the engine does anyway, or has no use for ----------------------------------------------------------

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Without effect: communication always adds up, and factors are applied after it."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Without effect: a buffer is freed when its reduction is through, and none is waited for."""

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Without effect: gathers and reductions go over the groups of the mesh."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Without effect: buffers come from torch's allocator; see :meth:`set_custom_all_gather`."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Without effect: buffers come from torch's allocator; see :meth:`set_custom_all_gather`."""

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Without effect: gathers are always asynchronous."""

    # -- what torch's own tools call -----------------------------------------------------------------------------

    def _get_fsdp_state(self) -> Any:
        needed_unit(self)
        return state(self)  # type: ignore[arg-type]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for unit in nested_units(self):  # type: ignore[arg-type]
            unit.reshard()  # what ``to`` and ``half`` convert are the sharded parameters
        return super(FSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]

    def _show_gathered(self) -> None:
        """While a pipeline of torch runs backwards, let it find the parameters that its forwards have used.

        It says so before each backward, by three flags; it may then ask for the gradients of inputs and of weights
        apart, and looks for the weights among ``parameters()``.
        """
        for unit in nested_units(self):  # type: ignore[arg-type]
            unit.show_for_split_backward()


class _Gather(UnshardHandle):
    """A gather under way."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Wait until the whole parameters are there; further calls do nothing."""
        if self._unit is not None:
            self._unit.unshard()
            self._unit = None


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


class ParamGroup:
    """A unit as torch's tools see a parameter group of FSDP2.

    Attributes:
        post_backward: Called by torch's pipelines once all gradients are there; :class:`State` reduces them then.
        pre_backward: Never called.
    """

    __slots__ = ("_unit", "post_backward", "pre_backward")

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self.pre_backward: Callable[..., None] = _nothing
        self.post_backward: Callable[..., None] = _nothing

    @property
    def fsdp_params(self) -> list[Any]:
        """Sharded and whole parameters, by torch's names."""
        params = [param for bucket in self._unit.buckets for param in bucket.params]
        return [
            SimpleNamespace(sharded_param=p.sharded, unsharded_param=p.unsharded, _unsharded_param=p.unsharded)
            for p in params
        ]


class StateContext:
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
    """The state of a unit, where FSDP2 keeps its own: ``fully_shard.state(module)``.

    It has what torch's pipelines, its memory tracker and its checkpoints ask for; nothing can be set but by methods of
    the module.

    Attributes:
        unit: The engine's unit.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self._fsdp_param_groups = [ParamGroup(unit)]
        self._state_ctx = StateContext(self)
        self._modules = tuple(unit.modules)
        self._device = unit.platform.device()
        self._mp_policy = unit.options.mp_policy
        self._pre_forward, self._post_forward = unit.forward_hooks
        self._pre_forward_hook_handle = Hook(self._modules, self._pre_forward)
        self._post_forward_hook_handle = Hook(self._modules, self._post_forward)

    @property
    def _fsdp_param_group(self) -> ParamGroup | None:
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
        registry = module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())
        registry["fully_shard"] = RegistryItem()


def state(module: nn.Module) -> Any:
    """The state of a wrapped module, None of any other; see :class:`State`."""
    return torch_fully_shard.state(module)  # type: ignore[attr-defined]


def share_comm_ctx(modules: Sequence[Any]) -> None:
    """Without effect: units of several roots communicate over the groups of their meshes, on the backend's streams.

    Raises:
        ValueError: One of the modules was never wrapped.
    """
    for module in check_modules("cannot share communication", "modules", modules):
        needed_unit(module)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


# -- units below a module --------------------------------------------------------------------------------------------


def needed_unit(module: Any) -> Unit:
    """The unit of a wrapped module.

    Raises:
        ValueError: It was never wrapped, or for ``torch.compile`` to trace.
    """
    unit = unit_of(module) if isinstance(module, nn.Module) else None
    if unit is None and _own_traced(module):
        raise ValueError(
            f"{type(module).__name__} has no communication of its own to change: it was wrapped for torch.compile to "
            "trace\n"
            "  seen: hsdp(..., use_eager_hook=False), where gathers and reductions are part of the graph\n"
            "  try: hsdp(cell, ..., use_eager_hook=True)"
        )
    if unit is None:
        raise ValueError(
            f"{type(module).__name__} has no parameters of its own to manage: it was never wrapped\n"
            "  try: fully_shard(module, mesh=mesh) first"
        )
    return unit


def nested_units(module: nn.Module) -> Iterator[Unit]:
    """All units in ``module`` and its submodules, each once, in module order."""
    seen: list[Unit] = []
    for child in module.modules():
        unit = unit_of(child)
        if unit is not None and unit not in seen:
            seen.append(unit)
            yield unit


def nested_traced_units(module: Any) -> list[Any]:
    """The units in ``module`` that were made for ``torch.compile`` to trace, in module order."""
    return [unit for child in module.modules() if (unit := traced_unit_of(child)) is not None]


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
        ValueError: It was never wrapped, or ``recurse`` is no bool.
    """
    _check_flag(method, recurse, "recurse")
    if recurse:
        return needed_units(module)
    return [] if _own_traced(module) else [needed_unit(module)]


def _check_flag(method: str, flag: Any, name: str) -> None:
    if not isinstance(flag, bool):
        raise ValueError(f"{method} cannot use {flag!r} as its {name}\n  expected: True or False\n  try: True")


def _check_comm(method: str, comm: Any) -> None:
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise _no_function(method, comm, "an object of a subclass of torch's AllGather or ReduceScatter")


def _no_function(method: str, given: Any, hint: str) -> ValueError:
    return ValueError(
        explain(f"{method} cannot use {given!r}", "it is called", f"seen: a {type(given).__name__}", hint)
    )


def _units_of(method: str, modules: Any) -> list[Unit]:
    if not isinstance(modules, (list, tuple)):
        raise ValueError(
            f"{method} cannot use {modules!r}\n  expected: a list of wrapped modules\n  try: [model.layers[1]]"
        )
    units = []
    for index, module in enumerate(modules):
        if _own_traced(module):
            continue  # it gathers where its graph says
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            raise ValueError(
                f"{method}: item {index} is a {type(module).__name__}, which was never wrapped\n"
                "  expected: modules that fully_shard has wrapped\n"
                "  try: fully_shard(that_module) first"
            )
        units.append(unit)
    return units
