"""Differences, roundoffs and reductions of single tensors, taken so that they add no rounding of their own."""

from __future__ import annotations

import math

import torch

__all__ = ["combine", "divided", "gap", "magnitude", "ratio_of", "ratios", "top", "unit_roundoff", "wide"]


def combine(kind: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Take one step of a reduction; an average is a sum, divided later."""
    if kind in ("sum", "avg"):
        return left + right
    if kind == "prod":
        return left * right
    return torch.maximum(left, right) if kind == "max" else torch.minimum(left, right)


def divided(total: torch.Tensor, divisor: int) -> torch.Tensor:
    """Divide a sum, exactly where whole numbers divide without a rest."""
    if divisor == 1:
        return total
    if not (total.is_floating_point() or total.is_complex()) and not bool((total % divisor).any()):
        return total // divisor
    return total / divisor


def gap(part: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Return |part - want| elementwise: 0 where both are NaN or the same infinity, inf where one of them is."""
    work = torch.promote_types(_narrow(part.dtype), _narrow(want.dtype))
    if not (work.is_floating_point or work.is_complex):
        unequal = part != want
        off = (part.to(torch.float64) - want.to(torch.float64)).abs()
        return torch.where(unequal, off.clamp(min=1.0), 0.0)
    part, want = part.to(work), want.to(work)
    off = (part - want).abs()
    if off.numel() and not math.isfinite(float(off.max())):
        same = (part == want) | (part.isnan() & want.isnan())
        off = torch.where(same, torch.zeros_like(off), torch.where(off.isnan(), math.inf, off))
    return off


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of one rounding to nearest in a dtype; 0 for whole numbers and booleans.

    >>> unit_roundoff(torch.float32) == 2**-24, unit_roundoff(torch.bfloat16) == 2**-8, unit_roundoff(torch.int32)
    (True, True, 0.0)
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return torch.finfo(dtype).eps / 2


def top(off: torch.Tensor) -> float:
    """Return the largest of some differences; 0 of none."""
    return float(off.max()) if off.numel() else 0.0


def ratio_of(error: float, limit: float) -> float:
    """Return error / limit, where 0 / 0 is 0.

    >>> ratio_of(1.0, 4.0), ratio_of(0.0, 0.0), ratio_of(1.0, 0.0)
    (0.25, 0.0, inf)
    """
    if error <= limit:  # also 0 / 0 and inf / inf
        return error / limit if 0 < limit < math.inf else 0.0
    return error / limit if limit else math.inf


def ratios(off: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Return off / limit elementwise, where 0 / 0 is 0."""
    return torch.where(off == 0, 0.0, off.to(torch.float64) / limit)


def magnitude(tensor: torch.Tensor) -> float:
    """Return the largest finite |element|; 0 of none."""
    if not tensor.numel():
        return 0.0
    sizes = tensor.abs() if tensor.dtype != torch.bool else tensor.to(torch.uint8)
    top = float(sizes.max())
    if math.isfinite(top):
        return top
    finite = sizes[sizes.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _narrow(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which differences are taken: half precision would round them."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return torch.complex64 if dtype == torch.complex32 else dtype


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which reductions are taken, so that they add no rounding of their own."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64
