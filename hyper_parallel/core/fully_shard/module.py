"""The methods that a wrapped module gains."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from hyper_parallel.core.fully_shard.state_dict import load_into
from hyper_parallel.core.fully_shard.unit import Unit, is_wrapped, traced_unit_of, unit_of

__all__ = [
    "HSDPModule",
    "ManagedModule",
    "nested_traced_units",
    "UnshardHandle",
    "nested_units",
    "register_forward_method",
    "show_shards_in_state_dicts",
    "wrapped_class",
]


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns: a gather under way."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Wait until the whole parameters are there; further calls do nothing."""
        if self._unit is not None:
            self._unit.unshard()
            self._unit = None


class ManagedModule:
    """What both faces of the engine give a wrapped module: gradients that are all cleared, values of any layout."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, also those that wait for a reduction. Nested."""
        for unit in _nested(self):
            unit.clear_gradients(set_to_none=set_to_none)
        for traced in nested_traced_units(self):
            traced.zero_grads()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def set_reduce_op_type(self, reduce_op_type: str, *, recurse: bool = True) -> None:
        """``"avg"`` or ``"sum"``; case and blanks do not matter. Nested; ``recurse=False``: this unit only.

        The default is ``"avg"`` where a unit manages only plain parameters, else ``"sum"``: then the loss must already
        be divided by the number of data-parallel ranks. A root with units of both kinds must be told.
        """
        op = reduce_op_type.strip().lower() if isinstance(reduce_op_type, str) else reduce_op_type
        if op not in ("avg", "sum"):
            raise ValueError(
                f"set_reduce_op_type cannot use {reduce_op_type!r}\n  expected: 'avg' or 'sum'\n  try: 'avg'"
            )
        units = _reach(self, "set_reduce_op_type", recurse)
        if op == "sum" and recurse and nested_traced_units(self):
            raise ValueError(
                "set_reduce_op_type cannot reach a cell that was wrapped with use_eager_hook=False\n"
                "  seen: its average is part of its graph\n"
                "  try: use_eager_hook=True, or recurse=False on each of the other units"
            )
        for unit in units:
            unit.options.average, unit.options.chose_reduction = op == "avg", True

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
            RuntimeError: ``strict`` and keys are missing or unexpected; both are listed, sorted.
        """
        for unit in _nested(self):
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
        except Exception:
            raise
        except BaseException:  # Ctrl-C, for one; for exceptions torch calls the hooks
            unit = unit_of(self)  # type: ignore[arg-type]
            if unit is not None:
                unit.interrupted()
            raise

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for unit in nested_units(self):  # type: ignore[arg-type]
            unit.reshard()  # what ``to`` and ``half`` convert are the sharded parameters
        return super()._apply(fn, recurse)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"cannot copy or pickle a {type(self).__name__}: its parameters are parts that belong to running groups\n"
            "  seen: copy.deepcopy, copy.copy, pickle or torch.save of the module itself\n"
            "  try: its state_dict(), or copy the module before it is wrapped"
        )


class HSDPModule(ManagedModule):
    """Mixed into the class of every module that :func:`fully_shard` has wrapped.

    "Nested" below means: this unit and all units in its submodules. Methods raise ``ValueError`` for an argument
    of the wrong kind, and when called on a module that was never wrapped.
    """

    # -- gradients -----------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, flag: bool) -> None:
        """False: no communication in backward, gradients are kept; the next backward with True adds them. Nested."""
        _check_flag("set_requires_gradient_sync", flag)
        for unit in _nested(self):
            unit.options.requires_gradient_sync = flag
        for traced in nested_traced_units(self):
            traced.set_requires_grad_sync(flag)

    def set_requires_all_reduce(self, flag: bool, *, recurse: bool = True) -> None:
        """False: reduce over the shard axis only; the replicate axis follows in the next backward with True."""
        _check_flag("set_requires_all_reduce", flag)
        for unit in _reach(self, "set_requires_all_reduce", recurse):
            unit.options.requires_all_reduce = flag

    def set_is_last_backward(self, flag: bool) -> None:
        """False: the end of this backward leaves reductions under way (several backwards per step). For the root."""
        _check_flag("set_is_last_backward", flag)
        unit = _unit(self)
        unit.is_last_backward = flag
        if unit.schedule is not None:
            unit.schedule.is_last_backward = flag

    def set_gradient_scaling_factor(self, factor: float) -> None:
        """Multiply reduced gradients by ``factor``, also those that wait by then. Nested."""
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            raise ValueError(f"set_gradient_scaling_factor cannot use {factor!r}\n  expected: a float\n  try: 0.5")
        if nested_traced_units(self):
            raise ValueError(
                "set_gradient_scaling_factor cannot reach a cell that was wrapped with use_eager_hook=False\n"
                "  seen: its factor is part of its graph\n"
                "  try: hsdp(cell, grad_scale=..., use_eager_hook=False)"
            )
        for unit in _nested(self):
            unit.options.gradient_scale = float(factor)

    # -- when parameters are whole -------------------------------------------------------------------------------

    def set_reshard_after_forward(self, flag: bool, recurse: bool = True) -> None:
        """Whether the whole parameters are freed after forward; replaces an int given when wrapping."""
        _check_flag("set_reshard_after_forward", flag)
        for unit in _reach(self, "set_reshard_after_forward", recurse):
            unit.options.reshard_after_forward = flag
            unit.use_smaller_world(None)

    def set_reshard_after_backward(self, flag: bool, recurse: bool = True) -> None:
        """Whether the whole parameters are freed after backward; False keeps them until an optimizer has stepped."""
        _check_flag("set_reshard_after_backward", flag)
        for unit in _reach(self, "set_reshard_after_backward", recurse):
            unit.options.reshard_after_backward = flag

    def set_modules_to_forward_prefetch(self, modules: Sequence[HSDPModule]) -> None:
        """Gather these units' parameters while this unit's forward computes (default: the unit that came next)."""
        _unit(self).forward_prefetch = _units_of("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[HSDPModule]) -> None:
        """Gather these units' parameters while this unit's backward computes (default: the one that came before)."""
        _unit(self).backward_prefetch = _units_of("set_modules_to_backward_prefetch", modules)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters now, for the next forward; with ``async_op`` returns a handle to wait on.

        Forwards without gradients (an evaluation, generation) use them until ``reshard()`` or the next training step.

        What is gathered already is gathered again if the parameters have changed since. A change through ``.data``, or
        by a foreach operation without gradients, leaves no trace: call ``reshard()`` after one. What is written into
        whole parameters is lost when they are freed.
        """
        _check_flag("unshard", async_op, "async_op")
        unit = _unit(self)
        if async_op:
            unit.gather_by_hand()
            return UnshardHandle(unit)
        unit.gather_by_hand()
        unit.finish_gather()
        return None

    def reshard(self) -> None:
        """Free this unit's whole parameters now."""
        _unit(self).reshard()


def _unit(module: Any) -> Unit:
    unit = unit_of(module) if isinstance(module, nn.Module) else None
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


def _nested(module: Any) -> Iterable[Unit]:
    if not isinstance(module, nn.Module) or not is_wrapped(module):
        _unit(module)  # which says so
    return nested_units(module)


def _reach(module: Any, method: str, recurse: bool) -> Iterable[Unit]:
    _check_flag(method, recurse, "recurse")
    return _nested(module) if recurse else [_unit(module)]


def _check_flag(method: str, flag: Any, name: str = "flag") -> None:
    if not isinstance(flag, bool):
        raise ValueError(f"{method} cannot use {flag!r} as its {name}\n  expected: True or False\n  try: True")


def _units_of(method: str, modules: Any) -> list[Unit]:
    if not isinstance(modules, (list, tuple)):
        raise ValueError(
            f"{method} cannot use {modules!r}\n  expected: a list of wrapped modules\n  try: [model.layers[1]]"
        )
    units = []
    for index, module in enumerate(modules):
        if isinstance(module, nn.Module) and traced_unit_of(module) is not None:
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


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let another method of a wrapped module run as ``forward`` does: on whole parameters, with backward seen to.

        register_forward_method(model, "encode")
        model.encode(x).sum().backward()

    Communication: that of the unit's forward and backward.

    Args:
        module: A wrapped module.
        name: Of one of its methods.

    Raises:
        ValueError: The module was never wrapped, or has no such method.
    """
    unit = _unit(module)
    method = getattr(module, name, None) if isinstance(name, str) else None
    if not callable(method) or inspect.isgeneratorfunction(method):
        raise ValueError(
            f"cannot let {name!r} of a {type(module).__name__} run as forward does: no method that returns a result\n"
            f"  seen: {'nothing of that name' if method is None else 'a generator' if callable(method) else method!r}\n"
            "  try: the name of a method, such as 'encode'"
        )

    @functools.wraps(method)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        return unit.call(module, method, args, kwargs)

    setattr(module, name, gathered)


@functools.cache
def wrapped_class(original: Any, mixin: Any = HSDPModule) -> Any:
    """The class ``HSDP<Original>`` that a wrapped module gets; one per original class and face."""
    return type(f"HSDP{original.__name__}", (mixin, original), {"__module__": original.__module__})


def show_shards_in_state_dicts(unit: Unit, owner: nn.Module) -> None:
    """State dicts of ``owner`` save and load its sharded parameters, whatever the state of the unit."""

    def before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        unit.reshard()

    def before_load(module: nn.Module, *args: Any) -> None:
        unit.reshard()

    owner.register_state_dict_pre_hook(before_save)
    owner.register_load_state_dict_pre_hook(before_load)
