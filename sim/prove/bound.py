"""The rounding bound of a whole computation, measured and not guessed: the same run with every op off by its rounding.

    with Perturbed(seed=1):                     # Monte Carlo arithmetic
        loss = model(x).sum()
        loss.backward()

Each op of the run gets inputs and results that are changed, at random, by as much as the op's own rounding can. How
far the outcome moves is how far any other order of the same sums can move it: on other shards, other ranks, another
device. (Parker 1997, "Monte Carlo Arithmetic", UCLA CSD-970002; here with the worst-case sizes of Higham's backward
error bounds instead of one rounding per operation, for an op is a black box whose order of summation is unknown.)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.core.dtensor.messages import explain
from sim.prove.gaps import gap, unit_roundoff
from sim.prove.roundings import Op, rounding_of

__all__ = ["SAFETY", "Perturbed", "deviation"]

SAFETY = 16.0
"""Rounding bound = SAFETY x the largest move seen in three runs.

A move is a random number, and so is the rounding it stands for, with a standard deviation that is at least twice
smaller (results are changed by up to 2 units, not 1; terms of a sum by n units, not 1). For one number alone, such as
a loss, the largest of three moves is below 1/16 of the rounding in 2.5 of 100,000 cases, if both are normal; for a
tensor, of which the largest move of all elements counts, practically never.
"""

_MOST = 2.0**-4  # a change that is larger would no longer be a small one, whatever the sum's length says
_SHORTEST_NOISE = 1 << 16

T = TypeVar("T")


class Perturbed(TorchDispatchMode):
    """Run ATen ops with inputs and results changed at random by as much as their rounding can; a context manager.

    >>> x = torch.ones(4, dtype=torch.float64)
    >>> with Perturbed(u_floor=2**-24, seed=0):  # as if float64 had float32's roundings
    ...     moved = (x * 3 - 3).abs().max().item()
    >>> 0 < moved < 1e-6
    True

    Forward and backward (on CPU it runs on the calling thread), optimizer steps, in-place ops, `out=` and lists of
    tensors are covered. What only moves, chooses or compares numbers is exact and stays so, and so do random numbers,
    whole numbers and single-element counters with a whole value. Arguments are never changed, but for those that the
    op itself writes. An op known to take sums of n terms has its inputs changed by n units, a basic one its results by
    2, an unknown one its inputs by the size of its largest dim (`sim.prove.roundings`). Sums of 16-bit numbers are
    taken in float32, as kernels do, and rounded to 16 bits at the end.

    Plain tensors only: what other tensor types do inside is not seen.

    Args:
        u_floor: the least unit roundoff to assume; 2**-24 lets a float64 run show the roundings of a float32 one.
            Default: that of each tensor's own dtype.
        seed: draws the changes; the same seed and ops give the same ones.

    Raises:
        ValueError: u_floor is not between 0 and 1.
    """

    def __init__(self, u_floor: float | None = None, seed: int = 0) -> None:
        super().__init__()
        floor = 0.0 if u_floor is None else float(u_floor)
        if not 0 <= floor < 1:
            hint = "u_floor=2**-24, the unit roundoff of float32"
            raise ValueError(explain("cannot perturb a run", "u_floor is not in [0, 1)", f"u_floor: {u_floor}", hint))
        self._floor = floor
        self._draw = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._noise: dict[torch.dtype, torch.Tensor] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an op with its inputs and its results changed."""
        named = dict(kwargs or {})
        op, written = _read(func, args, named)
        rounding = rounding_of(func, op) if any(map(_is_real, op.tensors())) else None
        if rounding is None:
            return func(*args, **named)
        if rounding.inputs:
            changed = {
                name: value if name in written else self._inputs(value, rounding.inputs)
                for name, value in op.arguments.items()
            }
            args = tuple(changed[argument.name] for argument in func._schema.arguments[: len(args)])
            named = {name: changed[name] for name in named}
        result = func(*args, **named)
        for value in written.values():
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if _is_real(tensor) and not _is_counter(tensor):
                    tensor.copy_(self._moved(tensor, rounding.results))
        return result if written else self._results(result, rounding.results)

    def _inputs(self, value: Any, units: float) -> Any:
        """Change inputs; a tensor without dims may stand for a Python number, and those are exact."""
        if isinstance(value, (list, tuple)):
            return type(value)(self._inputs(each, units) for each in value)
        if not _is_real(value) or not value.ndim:
            return value
        # Kernels add up 16-bit numbers in float32; but parts of a sum that lie on several ranks are rounded to 16 bits.
        own, sums = unit_roundoff(value.dtype), unit_roundoff(torch.promote_types(value.dtype, torch.float32))
        return self._moved(value, max(units * max(sums, self._floor), own, self._floor), absolute=True)

    def _results(self, value: Any, units: float) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._results(each, units) for each in value)
        if not _is_real(value) or _is_counter(value):
            return value
        return self._moved(value, units)

    def _moved(self, tensor: torch.Tensor, units: float, absolute: bool = False) -> torch.Tensor:
        """Multiply each element by its own factor in [1 - eta, 1 + eta]."""
        unit = 1.0 if absolute else max(unit_roundoff(tensor.dtype), self._floor)
        noise, size = self._slice(tensor), min(units * unit, _MOST)
        if tensor.is_complex():
            moved = tensor * noise.mul(size).add_(1)
        else:  # in one pass
            moved = torch.addcmul(tensor, tensor, noise, value=size)
        if not tensor.numel() or torch.isfinite(moved.sum()):
            return moved
        return torch.where(moved.isfinite(), moved, tensor)  # the largest finite number, as in a mask, must stay finite

    def _slice(self, tensor: torch.Tensor) -> torch.Tensor:
        """Numbers in [-1, 1] in the shape of a tensor: a piece of one long row, from a random place."""
        real = tensor.dtype.to_real()
        count, row = tensor.numel(), self._noise.get(real)
        if row is None or len(row) < 2 * count:
            length = max(_SHORTEST_NOISE, 3 * count)
            row = torch.rand(length, generator=self._generator, dtype=torch.float64).mul_(2).sub_(1).to(real)
            self._noise[real] = row
        start = self._draw.randrange(len(row) - count + 1)
        return row[start : start + count].view(tensor.shape)


@overload
def deviation(
    run: Callable[[], Mapping[str, torch.Tensor]],
    *,
    runs: int = ...,
    u_floor: float | None = ...,
    seed: int = ...,
    elementwise: Literal[False] = ...,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]: ...


@overload
def deviation(
    run: Callable[[], Mapping[str, torch.Tensor]],
    *,
    runs: int = ...,
    u_floor: float | None = ...,
    seed: int = ...,
    elementwise: Literal[True],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]: ...


def deviation(
    run: Callable[[], Mapping[str, torch.Tensor]],
    *,
    runs: int = 3,
    u_floor: float | None = None,
    seed: int = 0,
    elementwise: bool = False,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Run once plainly and a few times perturbed: the plain results, and how far each moved at most.

    >>> x = torch.linspace(0, 1, 1000)
    >>> base, moved = deviation(lambda: {"sum": x.sum()})
    >>> error = abs(base["sum"].double() - x.double().sum()).item()
    >>> error <= SAFETY * moved["sum"] < 1.0
    True

    SAFETY x the move bounds how far another order of the same computation can be off. Costs `runs` + 1 runs, the
    perturbed ones 2 to 5 times as long as the plain one. The default random generators start each run alike and are
    left as the plain run leaves them.

    Args:
        run: does the whole computation, from the same start each time, and returns the results by name.
        runs: how many perturbed runs.
        u_floor: as for `Perturbed`.
        seed: of the first perturbed run; the others count up.
        elementwise: return the largest move of each element, not of each tensor.

    Raises:
        ValueError: runs is below 1, or a run that returns other names or shapes than the first.
    """
    asked = "cannot measure a deviation"
    if runs < 1:
        raise ValueError(explain(asked, "runs is below 1", f"runs: {runs}", "runs=3"))
    start = torch.get_rng_state()
    base = {name: tensor.detach().clone() for name, tensor in run().items()}
    after = torch.get_rng_state()
    moved = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in base.items()}
    for index in range(runs):
        torch.set_rng_state(start)
        with Perturbed(u_floor, seed + index):
            again = {name: tensor.detach() for name, tensor in run().items()}
        for name in dict.fromkeys([*base, *again]):
            if name not in base or name not in again or base[name].shape != again[name].shape:
                seen = f"first run: {_shape(base, name)}   perturbed run: {_shape(again, name)}"
                raise ValueError(
                    explain(asked, f"the runs return different {name!r}", seen, "a run that repeats itself")
                )
            moved[name] = torch.maximum(moved[name], gap(again[name], base[name]).to(torch.float64))
    torch.set_rng_state(after)
    if elementwise:
        return base, moved
    return base, {name: float(move.max()) if move.numel() else 0.0 for name, move in moved.items()}


def _read(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Op, dict[str, Any]]:
    """Name the arguments of a call, and pick those that it writes."""
    schema = func._schema.arguments
    given = {**{each.name: value for each, value in zip(schema, args, strict=False)}, **kwargs}
    written = {
        each.name: given[each.name]
        for each in schema
        if each.alias_info is not None and each.alias_info.is_write and given.get(each.name) is not None
    }
    name = func._schema.name.partition("::")[2]
    plain = name if name.startswith("__") else name.removeprefix("_foreach_").rstrip("_")
    return Op(plain, given), written


def _is_real(value: Any) -> bool:
    """Whether this is a plain tensor that can be changed a little: no whole numbers, no fp8, none without values."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_meta:
        return False
    return value.is_complex() or (value.is_floating_point() and value.element_size() > 1)


def _is_counter(tensor: torch.Tensor) -> bool:
    """Whether this is one whole number, such as an optimizer's step count: those are exact."""
    if tensor.numel() != 1 or tensor.is_complex() or tensor.is_meta:
        return False
    return float(tensor).is_integer()


def _shape(tensors: Mapping[str, torch.Tensor], name: str) -> str:
    return str(tuple(tensors[name].shape)) if name in tensors else "nothing"
