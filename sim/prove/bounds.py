"""How far rounding can move each tensor of a proof: what perturbed runs on one device showed, and a floor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sim.prove.bound import SAFETY
from sim.prove.fits import gap, unit_roundoff
from sim.prove.sides import Side

__all__ = ["Bounds", "largest"]

_FEW = 8.0  # roundings that any tensor is granted, in units of its largest element
_STEP = 16.0  # those of an optimizer's step; Adam's chain from gradient to parameter has 12


class Bounds:
    """How far rounding can move each tensor: what perturbed runs on one device showed, and a floor.

    Args:
        base: the plain run.
        perturbed: the others.
        dtype: what the ranks compute in.
    """

    def __init__(self, base: Side, perturbed: Sequence[Side], dtype: torch.dtype) -> None:
        self._unit = unit_roundoff(dtype)
        self._moves: dict[Any, float] = {}
        self._sizes: dict[int, float] = {}
        others = [dict(_tensors(side)) for side in perturbed]
        seen: dict[tuple[int, ...], float] = {}  # one tensor may stand at several boundaries
        for name, tensor in _tensors(base):
            again = [other[name] for other in others if name in other]
            key = (id(tensor), *map(id, again))
            if key not in seen:
                seen[key] = max((_furthest(other, tensor) for other in again), default=0.0)
            self._moves[name] = seen[key]

    def of(self, name: Any, whole: torch.Tensor) -> float:
        """Return the bound for one tensor."""
        size = self._sizes.get(id(whole))
        if size is None:
            size = self._sizes[id(whole)] = largest(whole)
        tiny = torch.finfo(torch.float64).tiny
        few = _STEP * (name[1] + 1) if name[0] == "update" else _FEW
        return max(SAFETY * self._moves.get(name, 0.0), few * self._unit * size, tiny)


def _tensors(side: Side) -> Iterator[tuple[Any, torch.Tensor]]:
    for key, entry in side.recorder.entries.items():
        yield ("value", key), entry.value
        if entry.grad is not None:
            yield ("grad", key), entry.grad
    if side.loss is not None:
        yield "loss", side.loss.detach()
    for name, grad in side.gradients.items():
        if grad is not None:
            yield ("gradient", name), grad
    for name, tensor in side.changed_buffers.items():
        yield ("changed buffer", name), tensor
    for step, update in enumerate(side.updates):
        for name, tensor in update.items():
            yield ("update", step, name), tensor


def _furthest(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape or not one.numel() or not one.is_floating_point():
        return 0.0
    move = float((one - other).abs_().max())
    if not math.isfinite(move):
        move = float(gap(one, other).max())
    return move if math.isfinite(move) else 0.0


def largest(whole: torch.Tensor) -> float:
    """Return the largest finite magnitude."""
    if not whole.numel() or not whole.is_floating_point():
        return 0.0
    size = float(torch.linalg.vector_norm(whole, math.inf))
    if math.isfinite(size):
        return size
    finite = whole[whole.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
