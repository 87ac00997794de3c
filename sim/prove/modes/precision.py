"""Mixed precision in a proof: what a program computes in fewer bits, computed in the dtype of the proof."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from sim.ops import Level, OnOperations, Proceed
from sim.prove.bound import AtenCall, rounding_of
from sim.prove.record import tensors_in

_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # in the order of their precision
_PAIRS = {torch.complex32: torch.float16, torch.complex64: torch.float32}

_aten = torch.ops.aten
_CAST = _aten._to_copy.default

_ENGINES = ("torch.distributed.", "hyper_parallel.core.")

_AS_THEY_ARE = (_aten.view.dtype, _aten.set_.source_Storage, _aten.set_.source_Storage_storage_offset)
"""Ops that read memory as it lies."""


class WidePrecision(OnOperations):
    """Compute in one dtype what asks for a narrower one; a context manager.

    >>> x = torch.full((2,), 1 / 3, dtype=torch.float64)
    >>> with WidePrecision(torch.float64) as mode:
    ...     y = x.to(torch.bfloat16) * 3
    >>> y, mode.narrowed
    (tensor([1., 1.], dtype=torch.float64), {torch.bfloat16})

    So FSDP2's `param_dtype` and `reduce_dtype`, casts, `autocast`, and norms that compute in float32 round nothing
    away, and a proof of mixed precision is as sharp as any. Fewer than 16 bits stay what they are.

    A module's own forward may cast by hand, outside of `autocast`, and compute with the result. That is a part of the
    model, and the models of both sides should do so: `by_hand` has the module and the dtype.

    Args:
        dtype: what is computed in instead.
        where: returns the path of the module that is running, None outside of modules.
    """

    order = Level.PRECISION

    def __init__(self, dtype: torch.dtype, where: Callable[[], str | None] = lambda: None) -> None:
        self._where = where
        self._cast = WeakTensorKeyDictionary()  # by hand, and nothing was computed from it yet
        self.by_hand: dict[str, torch.dtype] = {}
        at = _REAL.index(dtype) if dtype in _REAL else 0
        self._wide: dict[torch.dtype, torch.dtype] = dict.fromkeys(_REAL[:at], dtype)
        self._wide |= {pair: dtype.to_complex() for pair, real in _PAIRS.items() if real in self._wide}
        self.narrowed: set[torch.dtype] = set()

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        """Carry out an operation in the wide dtype."""
        named = kwargs
        if not self._wide or func in _AS_THEY_ARE or func.namespace not in ("aten", "prims"):
            return proceed(*args, **named)
        asked = [value for value in (*args, *named.values()) if isinstance(value, torch.dtype) and value in self._wide]
        if asked:
            args = tuple(self._dtype(value) for value in args)
            named = {name: self._dtype(value) for name, value in named.items()}
            self.narrowed.update(asked)
        path = self._where()
        if path is None or torch._C._current_graph_task_id() != -1:  # backward
            return self._run(func, args, named, proceed)
        marks = self._marks((args, named))
        result = self._run(func, args, named, proceed)
        self._follow(path, func, asked, (args, named), marks, result)
        return result

    def _run(self, func: OpOverload, args: tuple[Any, ...], named: Mapping[str, Any], proceed: Proceed) -> Any:
        scaler = _OF_SCALERS.get(func)
        if scaler is not None:
            return scaler(*args, **named)
        if func.is_view or func._schema.is_mutable:
            return proceed(*args, **named)
        named = {name: self._widened(value) for name, value in named.items()}
        return self._widened(proceed(*(self._widened(value) for value in args), **named))

    def _marks(self, given: Any) -> list[torch.dtype]:
        """Return what tensors were cast to by hand, unless they have other values since, such as a collective's."""
        found = [(tensor, self._cast.get(tensor)) for _, tensor in tensors_in(given)] if self._cast else []
        return [mark[0] for tensor, mark in found if mark is not None and torch.equal(tensor, mark[1])]

    def _follow(
        self,
        path: str,
        func: OpOverload,
        asked: Sequence[torch.dtype],
        given: Any,
        marks: Sequence[torch.dtype],
        result: Any,
    ) -> None:
        """Follow what was cast by hand until something is computed from it; what is only sent is of the ranks alone."""
        if func is _CAST:
            low = [dtype for dtype in asked if dtype.itemsize == 2]
            marks = low if low and not _is_autocast() and not _is_of_an_engine() else []
        elif marks and rounding_of(func, _call(func, *given)) is not None:
            self.by_hand.setdefault(path, marks[0])
            return
        for _, tensor in tensors_in(result) if marks else ():
            self._cast[tensor] = marks[0], tensor.detach().clone()

    def _dtype(self, value: Any) -> Any:
        return self._wide.get(value, value) if isinstance(value, torch.dtype) else value

    def _widened(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._widened(each) for each in value)
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.dtype not in self._wide:
            return value
        return value.to(self._wide[value.dtype])


def _call(func: OpOverload, args: tuple[Any, ...], named: Mapping[str, Any]) -> AtenCall:
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    return AtenCall(func._schema.name.partition("::")[2].rstrip("_"), {**given, **named})


def _is_autocast() -> bool:
    """Whether autocast is on; while it casts it says that it is off."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1


def _is_of_an_engine() -> bool:
    """Whether code of torch.distributed, or of the library, has called for an op, as its mixed precision does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_ENGINES):
            return True
        if not f"{module}.".startswith(("torch.", "sim.")):  # neither torch's own code nor a mode
            return False
        frame = frame.f_back
    return False


def narrow_words(modes: Iterable[WidePrecision], dtype: torch.dtype) -> list[str]:
    """Say which 16 bits were computed in more."""
    asked = {each for mode in modes for each in mode.narrowed if each.itemsize == 2}
    names = " and ".join(sorted(str(each).removeprefix("torch.") for each in asked))
    wide = str(dtype).removeprefix("torch.")
    return [f"computed in {wide} where the program says {names}, whose rounding is not compared"] if names else []


# -- what a `GradScaler` does, for which torch's kernels want float32 --------------------------------------------------


def _unscale(gradients: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
    """Unscale gradients, and find those that are not finite."""
    for gradient in gradients:
        if not bool(gradient.isfinite().all()):
            found.fill_(1.0)
        gradient.mul_(inverse)


def _update_scale(
    scale: torch.Tensor, tracker: torch.Tensor, found: torch.Tensor, growth: float, backoff: float, interval: int
) -> torch.Tensor:
    """Lower the scale where something was not finite, raise it after so many steps in which all was."""
    if float(found):
        scale.mul_(backoff)
        tracker.zero_()
    elif int(tracker) + 1 == interval:
        if math.isfinite(float(scale) * growth):
            scale.mul_(growth)
        tracker.zero_()
    else:
        tracker.add_(1)
    return scale


_OF_SCALERS: Mapping[Any, Callable[..., Any]] = {
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    _aten._amp_update_scale_.default: _update_scale,
}
