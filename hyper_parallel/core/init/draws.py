"""torch's in-place draws, by counter and block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from hyper_parallel.core.init import random
from hyper_parallel.core.init.parts import Box, Refused
from hyper_parallel.core.init.random import Draw, Words

__all__ = ["BLOCK", "DRAWS", "maker", "write"]

BLOCK = 2**14  # elements at a time; a float64 array of them stays in a core's cache

Maker = Callable[[Words], torch.Tensor]  # the values at some places


def maker(name: str, given: Mapping[str, Any], draw: Draw, dtype: torch.dtype) -> Maker:
    """Return what makes the values of a draw from places.

    Numbers are made in float64 and rounded to the dtype.

    Args:
        name: of torch's operation: one of `DRAWS`.
        given: its arguments by name, such as "mean" and "std".
        draw: which draw it is.
        dtype: of the tensor.

    Raises:
        Refused: a distribution without a definition by counter.
    """
    if name not in DRAWS:
        raise Refused(name, "no numbers by counter are defined for it")
    if isinstance(given.get("p"), torch.Tensor):
        raise Refused(name, "its probabilities are a tensor")
    if dtype.is_complex:
        raise Refused(name, "no complex numbers by counter are defined")
    make = DRAWS[name](given, draw, dtype)
    return lambda index: make(index).to(dtype)


def _normal(given: Mapping[str, Any], draw: Draw, dtype: torch.dtype) -> Maker:
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    return lambda index: torch.from_numpy(random.normal(draw, index) * std + mean)


def _uniform(given: Mapping[str, Any], draw: Draw, dtype: torch.dtype) -> Maker:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    ends = torch.tensor([high, low], dtype=dtype, device="cpu")
    largest = torch.nextafter(ends[0], ends[1])

    def make(index: Words) -> torch.Tensor:
        values = torch.from_numpy(random.uniform(draw, index) * (high - low) + low).to(dtype)
        return values.clamp_(max=largest) if low < high else values  # rounding may reach the end, which is not in it

    return make


def _bernoulli(given: Mapping[str, Any], draw: Draw, dtype: torch.dtype) -> Maker:
    chance = given.get("p", 0.5)
    return lambda index: torch.from_numpy(random.uniform(draw, index) < chance)


def _exponential(given: Mapping[str, Any], draw: Draw, dtype: torch.dtype) -> Maker:
    rate = given.get("lambd", 1.0)
    return lambda index: torch.from_numpy(random.exponential(draw, index) / rate)


def _integers(given: Mapping[str, Any], draw: Draw, dtype: torch.dtype) -> Maker:
    low, high = given.get("from"), given.get("to")
    low = 0 if low is None else low
    top = _top(dtype) if high is None else high
    return lambda index: torch.from_numpy(random.integers(draw, index, low, top))


def _top(dtype: torch.dtype) -> int:
    """One more than the largest number that `random_` draws without a range."""
    if dtype == torch.bool:
        return 2
    if dtype.is_floating_point:
        return 1 + int(2 ** (1 - round(math.log2(torch.finfo(dtype).eps))))
    return min(torch.iinfo(dtype).max, 2**63 - 2) + 1


def write(local: torch.Tensor, box: Box, make: Maker) -> None:
    """Fill a rank's part of a tensor; costs the memory of a block, for a part that is not contiguous its own.

    Args:
        local: the part.
        box: which part it is.
        make: from `maker`.
    """
    dense = local if local.is_contiguous() else torch.empty(local.shape, dtype=local.dtype, device=local.device)
    flat = dense.view(-1)
    for first in range(0, flat.numel(), BLOCK):
        last = min(first + BLOCK, flat.numel())
        flat[first:last].copy_(make(box.index(first, last)))
    if dense is not local:
        local.copy_(dense)


DRAWS: Mapping[str, Callable[[Mapping[str, Any], Draw, torch.dtype], Maker]] = MappingProxyType(
    {
        "normal_": _normal,
        "uniform_": _uniform,
        "bernoulli_": _bernoulli,
        "exponential_": _exponential,
        "random_": _integers,
    }
)
