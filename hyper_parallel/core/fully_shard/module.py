"""The methods that a wrapped module gains."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from hyper_parallel.core.common.checks import check
from hyper_parallel.core.fully_shard.fsdp2 import (
    FSDP2Methods,
    needed_unit,
    needed_units,
    nested_traced_units,
    reached_units,
)
from hyper_parallel.core.fully_shard.state_dict import load_into
from hyper_parallel.core.fully_shard.unit import Unit, is_wrapped, unit_of

__all__ = [
    "HSDPModule",
    "ManagedModule",
    "register_forward_method",
    "register_fsdp_forward_method",
    "show_shards_in_state_dicts",
    "wrapped_class",
]


class ManagedModule(FSDP2Methods):
    """What both faces of the engine give a wrapped module: FSDP2's methods, and these.

    "Nested" means: this unit and all units in its submodules. Methods raise ``ValueError`` for an argument of the wrong
    kind, and when called on a module that was never wrapped.
    """

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, also those that wait for a reduction. Nested."""
        for unit in needed_units(self):
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
        units = reached_units(self, "set_reduce_op_type", recurse)
        if op == "sum" and recurse and nested_traced_units(self):
            raise ValueError(
                "set_reduce_op_type cannot reach a cell that was wrapped with use_eager_hook=False\n"
                "  seen: its average is part of its graph\n"
                "  try: use_eager_hook=True, or recurse=False on each of the other units"
            )
        for unit in units:
            options = unit.options
            options.average, options.divide_by, options.chose_reduction = op == "avg", None, True

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
        except Exception:
            raise
        except BaseException:  # Ctrl-C, for one; for exceptions torch calls the hooks
            unit = unit_of(self)  # type: ignore[arg-type]
            if unit is not None:
                unit.interrupted()
            raise

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
        for unit in needed_units(self):
            unit.options.gradient_scale = float(factor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a module with the same units over the same groups, values of its own, and no gradients."""
        unit = unit_of(self)  # type: ignore[arg-type]
        if unit is None or unit.copied_by is None:
            return self.__reduce_ex__(2)
        return unit.copied_by(self, memo)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"cannot copy or pickle a {type(self).__name__}: its parameters are parts that belong to running groups\n"
            "  seen: copy.copy, pickle or torch.save of the module itself, or copy.deepcopy of a traced one\n"
            "  try: its state_dict(), copy.deepcopy, or copy the module before it is wrapped"
        )


class HSDPModule(ManagedModule):
    """Mixed into the class of every module that :func:`fully_shard` has wrapped."""


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
    unit = needed_unit(module)
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
    unit.forward_methods.setdefault(id(module), []).append(name)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """As :func:`register_forward_method`, by FSDP2's name; a module that was never wrapped is left alone."""
    check("cannot register a method", "module", module=module)
    check("cannot register a method", "str", method_name=method_name)
    if is_wrapped(module):
        register_forward_method(module, method_name)


@functools.cache
def wrapped_class(original: Any, mixin: Any = HSDPModule) -> Any:
    """The class ``HSDP<Original>`` that a wrapped module gets; one per original class and face."""
    return type(f"HSDP{original.__name__}", (mixin, original), {"__module__": original.__module__})


def show_shards_in_state_dicts(unit: Unit, owner: nn.Module) -> None:
    """State dicts of ``owner`` save and load its sharded parameters, whatever the state of the unit."""

    # Copies of a module get hooks of their own unit.
    def before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        unit.reshard()

    def before_load(module: nn.Module, *args: Any) -> None:
        unit.reshard()

    before_save.is_of_a_unit = before_load.is_of_a_unit = True  # type: ignore[attr-defined]
    owner.register_state_dict_pre_hook(before_save)
    owner.register_load_state_dict_pre_hook(before_load)
