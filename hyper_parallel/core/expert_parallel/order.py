"""Rows in the order of the experts that they go to, and back."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch

__all__ = ["Order", "restored", "sorted_copies", "sorted_rows"]


class Order(NamedTuple):
    """An order of rows by the bins that they belong to; within a bin they stay as they were.

    >>> order = Order.by(torch.tensor([2, 0, 2, 1]), bins=4)
    >>> order.places.tolist(), order.back.tolist(), order.counts.tolist()
    ([1, 3, 0, 2], [2, 0, 3, 1], [1, 1, 2, 0])

    Attributes:
        places: which row comes at each place.
        back: at which place each row is.
        counts: how many rows each bin has.
    """

    places: torch.Tensor
    back: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def by(cls, bins_of_rows: torch.Tensor, bins: int) -> Order:
        """Sort rows by their bins, given as numbers below `bins`."""
        places = bins_of_rows.argsort(stable=True)
        back = torch.empty_like(places)
        back[places] = torch.arange(len(places), device=places.device)
        counts = torch.zeros(bins, dtype=torch.int64, device=places.device)
        return cls(places, back, counts.scatter_add_(0, bins_of_rows, torch.ones_like(bins_of_rows)))


def sorted_rows(rows: torch.Tensor, order: Order) -> torch.Tensor:
    """Return rows in an order."""
    return cast(torch.Tensor, _Move.apply(rows, order.places, order.back, 1))


def sorted_copies(rows: torch.Tensor, order: Order, copies: int) -> torch.Tensor:
    """Return so many copies of each row, next to each other, in an order of these."""
    return cast(torch.Tensor, _Move.apply(rows, order.places, order.back, copies))


def restored(rows: torch.Tensor, order: Order) -> torch.Tensor:
    """Return rows that are in an order as they were before it."""
    return cast(torch.Tensor, _Move.apply(rows, order.back, order.places, 1))


class _Move(torch.autograd.Function):
    """Rows by index. Each is used a known number of times, so gradients are gathered as well, in the same order on
    every device, where torch's own index would scatter them."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor, back: torch.Tensor, copies: int) -> torch.Tensor:
        ctx.back, ctx.copies = back, copies
        return rows.index_select(0, places if copies == 1 else places // copies)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        there = grad.index_select(0, ctx.back)
        if ctx.copies > 1:
            there = there.view(len(there) // ctx.copies, ctx.copies, *there.shape[1:]).sum(1)
        return there, None, None, None
