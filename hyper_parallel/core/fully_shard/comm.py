"""The three collectives of the engine, each with the lowering that is fastest on its backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Pending", "all_gather", "all_reduce", "reduce_scatter"]

# torch 2.13 renamed these two; the old names warn there, the new ones do not exist before.
_all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective under way: ``wait`` makes its result usable on the current stream and returns it."""

    def __init__(self, work: dist.Work | None, result: torch.Tensor, finish: Callable[[], None] | None = None) -> None:
        self._work = work
        self._result = result
        self._finish = finish

    def wait(self) -> torch.Tensor:
        """Wait, once; further calls return at once."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._finish is not None:
            self._finish()
            self._finish = None
        return self._result


def all_gather(target: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Gather ``source`` of every rank into ``target``, rank after rank.

    Args:
        target: 1-D, ``group.size() * source.numel()`` elements.
        source: 1-D.
        group: The ranks.
    """
    if group.size() == 1:
        target.copy_(source)
        return Pending(None, target)
    return Pending(_all_gather_single(target, source, group=group, async_op=True), target)


def reduce_scatter(source: torch.Tensor, group: dist.ProcessGroup, *, by_all_to_all: bool) -> Pending:
    """Sum ``source`` over the ranks and keep the own part; the sum runs in rank order where the backend's does.

    Args:
        source: 1-D, ``group.size()`` equal parts.
        group: The ranks.
        by_all_to_all: Exchange the parts and add locally. The same bytes; on gloo about half the time, and
            always in rank order.
    """
    size = group.size()
    if size == 1:
        return Pending(None, source)
    if by_all_to_all:
        received = torch.empty_like(source)
        work = dist.all_to_all_single(received, source, group=group, async_op=True)
        result = source.new_empty(source.numel() // size)
        rows = received.view(size, -1)

        def add() -> None:
            if size == 2:
                torch.add(rows[0], rows[1], out=result)
            else:
                torch.sum(rows, dim=0, out=result)

        return Pending(work, result, add)
    result = source.new_empty(source.numel() // size)
    return Pending(_reduce_scatter_single(result, source, group=group, async_op=True), result)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Sum ``tensor`` over the ranks, in place."""
    if group.size() == 1:
        return Pending(None, tensor)
    return Pending(dist.all_reduce(tensor, group=group, async_op=True), tensor)
