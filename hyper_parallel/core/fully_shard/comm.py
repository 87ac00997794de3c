"""The collectives of the engine, each with the lowering that is fastest on its backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from hyper_parallel.core.common.groups import all_gather_single, on_wire, reduce_scatter_single
from hyper_parallel.platform import Event


class Pending:
    """A collective under way: `wait` makes its result usable on the current stream and returns it."""

    def __init__(
        self,
        work: dist.Work | list[dist.Work] | None,
        result: torch.Tensor,
        finish: Callable[[], None] | None = None,
        keep: Sequence[torch.Tensor] = (),
    ) -> None:
        self._works = work if isinstance(work, list) else [] if work is None else [work]
        self._keep = keep  # read until it is through: the allocator must not hand their memory to others
        self._result = result
        self._finish = finish
        self._event: Event | None = None

    def behind(self, event: Event) -> Pending:
        """Let `wait` also wait for an event of the stream that this was issued on; returns itself."""
        self._event = None if self._works else event  # a collective has begun behind that stream
        return self

    def wait(self) -> torch.Tensor:
        """Wait, once; further calls return at once."""
        for work in self._works:
            work.wait()  # on a device: the current stream waits, the host goes on
        # A work keeps its tensors alive, and what has to be added up is added up once.
        self._works = []
        self._keep = ()
        if self._event is not None:
            self._event.wait()
            self._event = None
        if self._finish is not None:
            self._finish()
            self._finish = None
        return self._result


def all_gather(target: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Gather `source` of every rank into `target`, rank after rank.

    Args:
        target: 1-D, `group.size() * source.numel()` elements.
        source: 1-D.
        group: The ranks.
    """
    if group.size() == 1:
        target.copy_(source)
        return Pending(None, target)
    return Pending(all_gather_single(target, source, group=group, async_op=True), target)


def reduce_scatter(
    source: torch.Tensor, group: dist.ProcessGroup, *, by_all_to_all: bool, out: torch.Tensor | None = None
) -> Pending:
    """Sum `source` over the ranks and keep the own shard; the sum runs in rank order where the backend's does.

    Args:
        source: 1-D, `group.size()` equal shards.
        group: The ranks.
        by_all_to_all: Exchange the shards and add locally. The same bytes; on gloo about half the time (4 MB on 2
            processes: 3.4 instead of 7.0 ms), and always in rank order, hence the same bits in each run.
        out: 1-D, where the own shard goes; None: a new tensor.
    """
    size = group.size()
    if size == 1:
        return Pending(None, source if out is None else out.copy_(source))
    result = source.new_empty(source.numel() // size) if out is None else out
    if by_all_to_all:
        received = torch.empty_like(source)
        work = dist.all_to_all_single(received, source, group=group, async_op=True)
        rows = received.view(size, -1)

        def add() -> None:
            if size == 2:
                torch.add(rows[0], rows[1], out=result)
            else:
                torch.sum(rows, dim=0, out=result)

        return Pending(work, result, add)
    own, sent = _real([result, source])
    return Pending(reduce_scatter_single(own, sent, group=group, async_op=True), result)


def all_gather_each(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], group: dist.ProcessGroup, result: torch.Tensor
) -> Pending:
    """Gather each of `sources` into its own target, in one operation: nothing has to be packed or copied out.

    Args:
        targets: 1-D, each `group.size()` times as long as its source; rank after rank.
        sources: 1-D, contiguous; lengths and order are the same on all ranks, and the dtype is one.
        group: The ranks. nccl, hccl and simulated ranks do this without a copy; gloo packs by itself, off this thread.
        result: What `wait` returns: the buffer of which the targets are views.
    """
    targets, sources = (list(map(on_wire, _real(tensors))) for tensors in (targets, sources))
    if group.size() == 1:
        torch._foreach_copy_(targets, sources)
        return Pending(None, result)
    # On the group, as `dist` has no public function for several tensors. asyncOp: without it nccl gathers on the
    # current stream, and nothing overlaps.
    options = c10d.AllgatherOptions()
    options.asyncOp = True
    return Pending(group.allgather_into_tensor_coalesced(targets, sources, options), result, keep=sources)


def reduce_scatter_each(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], group: dist.ProcessGroup, result: torch.Tensor
) -> Pending:
    """Sum each of `sources` over the ranks, in one operation, and keep the own shard of each.

    Args:
        targets: 1-D, where the own shards go.
        sources: 1-D, contiguous, `group.size()` times as long as their targets; the dtype is one.
        group: The ranks; see `all_gather_each`.
        result: What `wait` returns: the buffer of which the targets are views.
    """
    targets, sources = _real(targets), _real(sources)
    if group.size() == 1:
        torch._foreach_copy_(targets, sources)
        return Pending(None, result)
    options = c10d.ReduceScatterOptions()
    options.asyncOp = True
    return Pending(group.reduce_scatter_tensor_coalesced(targets, sources, options), result, keep=sources)


def broadcast_each(
    parts: Sequence[torch.Tensor], group: dist.ProcessGroup, result: torch.Tensor, *, at_once: bool
) -> Pending:
    """Give each rank's part to all ranks, in place: parts have any sizes, and nothing is padded, packed or copied out.

    Args:
        parts: 1-D, contiguous, one for each rank in turn, of the same sizes on all ranks. An empty one is not sent.
        group: The ranks.
        result: What `wait` returns: the buffer of which the parts are views, one after the other.
        at_once: In one launch, see `Platform.gathers_uneven`; else in one for each rank.
    """
    if at_once and group.size() > 1:
        parts = _real(parts)
        own = parts[dist.get_rank(group)]
        if _even(parts):  # of a list, nccl would gather these elsewhere, and copy them
            return Pending(all_gather_single(*_real([result, own]), group=group, async_op=True), result)
        return Pending(dist.all_gather(list(parts), own, group=group, async_op=True), result, keep=parts)
    return _from_or_to_each(partial(dist.broadcast, group=group, async_op=True), "group_src", parts, group, result)


def reduce_each(
    parts: Sequence[torch.Tensor], group: dist.ProcessGroup, result: torch.Tensor, *, at_once: bool
) -> Pending:
    """Sum each rank's part to that rank, in place; what the other ranks have of it is lost.

    Args:
        parts: As in `broadcast_each`.
        group: The ranks.
        result: What `wait` returns: the own part.
        at_once: As in `broadcast_each`.
    """
    if at_once and group.size() > 1:
        own, *sent = _real([result, *parts])
        return Pending(dist.reduce_scatter(own, sent, group=group, async_op=True), result, keep=sent)
    return _from_or_to_each(partial(dist.reduce, group=group, async_op=True), "group_dst", parts, group, result)


def _from_or_to_each(
    send: Callable[..., Any], root: str, parts: Sequence[torch.Tensor], group: dist.ProcessGroup, result: torch.Tensor
) -> Pending:
    if group.size() == 1:
        return Pending(None, result)
    works = [send(part, **{root: rank}) for rank, part in enumerate(_real(parts)) if part.numel()]
    return Pending(works, result, keep=parts)


def _even(parts: Sequence[torch.Tensor]) -> bool:
    return all(part.numel() == parts[0].numel() for part in parts)


def _real(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Complex tensors as pairs of real numbers, which is all that nccl and hccl know.

    Most of torch's own functions send them so; its reduce_scatter does not, and fails on devices, not on gloo.
    """
    return [torch.view_as_real(t).view(-1) if t.is_complex() else t for t in tensors]


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Sum `tensor` over the ranks, in place."""
    if group.size() == 1 or not tensor.numel():
        return Pending(None, tensor)
    return Pending(dist.all_reduce(tensor, group=group, async_op=True), tensor)
