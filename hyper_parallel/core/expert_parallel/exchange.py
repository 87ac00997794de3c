"""Rows that go from every rank of a group to every other one, as many as each has for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

__all__ = ["exchange_counts", "exchange_rows"]


def exchange_counts(counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Tell the ranks of a group how many rows each of them gets.

    Args:
        counts: int64 (ranks, bins): row r is for rank r.
        group: the ranks.

    Returns:
        (ranks, bins): row r is from rank r.

    Communication: forward one all_to_all of a few numbers; backward none.
    """
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    return received


def exchange_rows(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send each rank of a group its rows, and return what they send here, in the order of ranks.

    Args:
        rows: (sum of sent, ...), those for rank 0 first.
        sent: how many rows are for each rank; any may be 0.
        received: how many come from each.
        group: the ranks.

    Communication: forward one all_to_all, backward one the other way, of gradients.
    """
    return cast(torch.Tensor, _Exchange.apply(rows, tuple(sent), tuple(received), group))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        there = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(there, rows.contiguous(), list(received), list(sent), group=group)
        return there

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return exchange_rows(grad, ctx.received, ctx.sent, ctx.group), None, None, None
