"""Parameters that the ranks hold in an order that no layout says, such as fused weights cut one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import torch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from sim.prove.fits import gap

__all__ = ["Order", "furthest", "order_of", "order_said"]

Order: TypeAlias = Mapping[int, torch.Tensor]
"""For each rank, where each of its elements is in the whole tensor, flattened."""


def order_of(parts: Mapping[int, torch.Tensor], whole: torch.Tensor) -> Order | None:
    """Return where each rank's elements come from, if all are elements of the whole tensor and none of it is missing.

    >>> whole = torch.tensor([1.0, 2.0, 3.0, 4.0])
    >>> order_of({0: torch.tensor([1.0, 3.0]), 1: torch.tensor([2.0, 4.0])}, whole)
    {0: tensor([0, 2]), 1: tensor([1, 3])}
    >>> order_of({0: torch.tensor([1.0, 3.0]), 1: torch.tensor([1.0, 3.0])}, whole) is None
    True

    Elements are recognised by their values, so these must be different from each other.
    """
    flat, order = whole.flatten().sort()
    if not flat.numel() or not bool((flat.diff() > 0).all()):
        return None
    found, covered = {}, torch.zeros(flat.numel(), dtype=torch.bool)
    for rank, part in parts.items():
        values = part.flatten().to(flat.dtype)
        places = torch.searchsorted(flat, values.contiguous()).clamp(max=flat.numel() - 1)
        if not torch.equal(flat[places], values):
            return None
        found[rank] = order[places]
        covered[found[rank]] = True
    return found if bool(covered.all()) else None


def order_said(tensor: torch.Tensor, rank: int) -> torch.Tensor | None:
    """Return where a rank's part of a DTensor is in the whole tensor, flattened, by its own mesh; None: unknown."""
    try:
        layout = Layout.of(tensor) if isinstance(tensor, DTensor) else None
    except ValueError:  # placements that no layout can say
        return None
    if layout is None or layout.is_partial() or rank not in layout.rank_list:
        return None
    places = torch.arange(tensor.numel()).reshape(tensor.shape)
    return places[layout.local_slice(tensor.shape, rank)].flatten()


def furthest(parts: Mapping[int, torch.Tensor], whole: torch.Tensor, order: Order) -> float:
    """Return the worst difference of parts from a whole tensor, taken in an order."""
    worst = 0.0
    for rank, part in parts.items():
        if part.numel() != order[rank].numel():
            return math.inf
        if part.numel():
            worst = max(worst, float(gap(part.flatten(), whole.flatten()[order[rank]]).max()))
    return worst
