"""Values of tensors without data: those that a script can know, and stand-ins for those that depend on data.

A script that looks at a value (`loss.item()`, `if found_nan:`, `sampler.tolist()`) gets one. What follows from numbers
in the script itself, such as a counter of steps or a permutation of indices, is right: each small tensor of that kind
carries its value along. What depends on data has a stand-in: 1 for floats, 0 for ints, True for `all`, else False.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only

from hyper_parallel.core.common.checks import MOST_LISTED
from sim.ops import tensors_of, written_tensors

MOST_ELEMENTS = MOST_LISTED
"""Elements of the largest tensor whose value is followed: a mesh lists the ranks of a world."""

_VALUE, _IS_STAND_IN = "_sim_value", "_sim_stands_in"
_SOURCES = frozenset(
    {"arange", "zeros", "ones", "full", "scalar_tensor", "eye", "linspace", "logspace", "randperm", "randint"}
    | {"tril_indices", "triu_indices", "lift_fresh"}
)
_KEPT = frozenset({"_amp_foreach_non_finite_check_and_unscale_"})  # no gradient is taken to be infinite


class Values:
    """Follows the values of small tensors through operations.

    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> with FakeTensorMode():
    ...     loss = torch.empty(3, 4)
    >>> Values().of(loss) is None
    True
    """

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor's value; None: nobody knows it."""
        if isinstance(tensor, FakeTensor):
            return getattr(tensor, _VALUE, None)
        return tensor if tensor.numel() <= MOST_ELEMENTS and type(tensor) is torch.Tensor else None

    def is_stand_in(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor's value depends on data, so that what is known of it is a stand-in."""
        return self.of(tensor) is None or getattr(tensor, _IS_STAND_IN, False)

    def set(self, tensor: torch.Tensor, value: torch.Tensor, *, stands_in: bool) -> None:
        """Say what a tensor without data is to be taken for."""
        if isinstance(tensor, FakeTensor):
            setattr(tensor, _VALUE, value)
            setattr(tensor, _IS_STAND_IN, stands_in)

    def stand_in(self, tensor: torch.Tensor, truth: bool = False) -> torch.Tensor:
        """Return what is taken for a value that depends on data."""
        with no_dispatch():
            number = 1 if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 0
            return torch.full(tuple(tensor.shape), truth if tensor.dtype is torch.bool else number, dtype=tensor.dtype)

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Work out the values of an operation's results, where those of its arguments are known."""
        given, results = tensors_of((args, kwargs)), tensors_of((out,))
        known = [tensor for tensor in given if self.of(tensor) is not None]
        is_factory = not given and results and results[0].numel() <= MOST_ELEMENTS
        if not known and not is_factory and all(tensor.dim() for tensor in results):
            return
        name = func._schema.name.rpartition("::")[2]
        if not given:
            if name in _SOURCES or (name == "empty" and out.numel() == 1):
                self._compute(func, args, kwargs, results, stands_in=False)
        elif len(known) == len(given):
            stands_in = any(self.is_stand_in(tensor) for tensor in given)
            self._compute(func, args, kwargs, results, stands_in=stands_in)
        else:
            self._stand_in(func, name, args, kwargs, results)

    def _compute(self, func: Any, args: Any, kwargs: Any, results: Sequence[torch.Tensor], *, stands_in: bool) -> None:
        """Do the operation with the values."""
        if any(tensor.numel() > MOST_ELEMENTS for tensor in results):
            return
        with no_dispatch():
            name = func._schema.name.rpartition("::")[2]
            known_args, known_kwargs = tree_map_only(torch.Tensor, self.of, (args, kwargs))
            try:
                found = tensors_of((func(*known_args, **known_kwargs),))
            except (RuntimeError, ValueError, IndexError, NotImplementedError):  # of stand-ins: no sizes, say
                found = [self.stand_in(tensor) for tensor in results]
                stands_in = True
        if name.startswith("empty"):
            for value in found:
                value.zero_()
        for tensor, value in zip(results, found, strict=False):
            if value.shape == tensor.shape:
                self.set(tensor, value, stands_in=stands_in)
        for tensor in written_tensors(func, args, kwargs) if stands_in else ():
            if self.of(tensor) is not None and isinstance(tensor, FakeTensor):
                setattr(tensor, _IS_STAND_IN, True)

    def _stand_in(self, func: Any, name: str, args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> None:
        """Let what depends on data have its stand-in."""
        for tensor in written_tensors(func, args, kwargs):
            value = self.of(tensor)
            if value is None or not isinstance(tensor, FakeTensor):
                continue
            if name not in _KEPT:
                with no_dispatch():
                    value.copy_(self.stand_in(tensor))
            setattr(tensor, _IS_STAND_IN, True)
        for tensor in results:
            if not tensor.dim() and self.of(tensor) is None:
                self.set(tensor, self.stand_in(tensor, truth=name == "all"), stands_in=True)
