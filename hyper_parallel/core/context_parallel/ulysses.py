"""From a split sequence to split heads and back: an all_to_all (DeepSpeed-Ulysses: Jacobs et al. 2023)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class _AllToAll(torch.autograd.Function):
    """Slice i of dim 0 goes to rank i of a group, and what comes from rank i is slice i; backward is the same."""

    @staticmethod
    def forward(ctx: Any, slices: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(slices, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _exchanged(slices: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(slices, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, slices.contiguous(), group=group)
    return received


def to_heads(tensors: Sequence[Tensor], group: dist.ProcessGroup, degree: int) -> tuple[Tensor, ...]:
    """Give every rank of a group some of the heads, for all tokens of the group: one all_to_all, backward as well.

    Args:
        tensors: each (batch, heads, seq, head_dim); the heads of each must divide by `degree`.
        group: ranks that hold neighbouring slices of a sequence, in their order.
        degree: number of those ranks.

    Returns:
        For each tensor (batch, heads / degree, seq * degree, head_dim).
    """
    slices = torch.cat([x.unflatten(1, (degree, -1)).movedim(1, 0) for x in tensors], dim=2)
    received: Tensor = _AllToAll.apply(slices, group)  # (rank, batch, heads, seq, head_dim)
    joined = received.movedim(0, 2).flatten(2, 3)
    return joined.split([x.shape[1] // degree for x in tensors], dim=1)


def to_sequence(x: Tensor, group: dist.ProcessGroup, degree: int) -> Tensor:
    """Give every rank of a group its slice of the sequence back, with all heads: one all_to_all, backward as well.

    Args:
        x: (batch, heads / degree, seq * degree, head_dim).
        group: as in `to_heads`.
        degree: number of its ranks.

    Returns:
        (batch, heads, seq, head_dim).
    """
    received: Tensor = _AllToAll.apply(x.unflatten(2, (degree, -1)).movedim(2, 0), group)
    return received.movedim(0, 1).flatten(1, 2)


def shared_heads(heads: int, degree: int) -> int:
    """Return how often key and value heads must be repeated so that ranks can share them evenly.

    >>> shared_heads(8, 4), shared_heads(2, 8), shared_heads(6, 4)
    (1, 4, 2)

    This divides the number of query heads of each, wherever the query heads themselves can be shared.

    Args:
        heads: number of key and value heads.
        degree: number of ranks.
    """
    return degree // math.gcd(heads, degree)
