"""Attention of every rank's queries to all ranks' keys, which travel around a ring (Liu, Zaharia and Abbeel 2023).

    step 0: own keys       step 1: those of the rank before       step 2: of the one before that ...

While a rank computes with what it has, that is already on its way to the next one. Backward the keys travel once more,
and the gradients of keys travel with them, one step behind, gathering each rank's share, until they are home.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyper_parallel.core.context_parallel.blocks import AttentionBlock, Joined, accumulator
from hyper_parallel.core.context_parallel.index import SequenceSplit


class Flight:
    """A tensor on its way to the next rank, and the previous rank's on its way here."""

    def __init__(self, sent: Tensor, group: dist.ProcessGroup, before: int, after: int) -> None:
        self._sent = sent  # must live until it has left
        self._received = torch.empty_like(sent)
        there = dist.P2POp(dist.isend, sent, after, group)
        back = dist.P2POp(dist.irecv, self._received, before, group)
        self._works = dist.batch_isend_irecv([there, back])

    def wait(self) -> Tensor:
        """Return what the previous rank sent."""
        for work in self._works:
            work.wait()
        return self._received


@dataclass(frozen=True)
class Ring:
    """The ring of one rank.

    Attributes:
        group: its ranks.
        ranks: they, by their global numbers, in the order of their parts.
        rank: this rank's place among them.
        split: how the sequence is cut.
    """

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    rank: int
    split: SequenceSplit

    def send(self, x: Tensor) -> Flight:
        """Send a contiguous tensor to the next rank, and receive the previous one's."""
        size = len(self.ranks)
        return Flight(x, self.group, self.ranks[(self.rank - 1) % size], self.ranks[(self.rank + 1) % size])

    def travel(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield every rank's tensor with that rank's place, beginning with the own one; each is sent on before that."""
        for step in range(len(self.ranks)):
            flight = self.send(x) if step + 1 < len(self.ranks) else None
            yield (self.rank - step) % len(self.ranks), x
            if flight is not None:
                x = flight.wait()


@dataclass(frozen=True)
class Task:
    """One attention: what all blocks have in common.

    Attributes:
        ring: who takes part.
        causal: positions see no later ones.
        scale: of the scores.
        documents: of every ring rank, ids (ring, batch, tokens).
    """

    ring: Ring
    causal: bool
    scale: float
    documents: Tensor | None

    def block(self, source: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, AttentionBlock] | None:
        """Return what queries see of the keys of ring rank `source`: the first query, the number of keys, the block."""
        seen = self.ring.split.visible(self.ring.rank, source, q.shape[2], self.causal)
        if seen is None:
            return None
        first, stop = seen.first_query, seen.num_keys
        ids = self.documents
        documents = None if ids is None else (ids[self.ring.rank, :, first:], ids[source, :, :stop])
        block = AttentionBlock(q[:, :, first:], k[:, :, :stop], v[:, :, :stop], seen.causal, self.scale, documents)
        return first, stop, block


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, task: Task) -> Tensor:
        dtype = accumulator(q.dtype)
        joined: Joined | None = None
        with _as_they_are(q.device):
            for source, (keys, values) in task.ring.travel(torch.stack((k, v))):
                found = task.block(source, q, keys, values)
                if found is None:
                    continue
                first, _, block = found
                out, lse = block.forward()
                if joined is None:  # its own keys come first, and of these every query sees itself at least
                    # Copies, for these are added to, and selective checkpointing keeps what the kernel has returned.
                    joined = Joined(out.to(dtype, copy=True), lse.clone(memory_format=torch.contiguous_format))
                else:
                    joined.add(out, lse, first)
        assert joined is not None, "every query sees itself"
        result = joined.out.to(q.dtype)
        ctx.task = task
        ctx.save_for_backward(q, k, v, result, joined.lse)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        with _as_they_are(q.device):
            grad_q, (grad_k, grad_v) = _gradients(ctx.task, q, k, v, out, lse, grad.contiguous())
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None


def _gradients(
    task: Task, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries, and of keys and values stacked, in the dtype that sums are kept in."""
    dtype = accumulator(q.dtype)
    grad_q = torch.zeros_like(q, dtype=dtype)
    own: Tensor | None = None
    flight: Flight | None = None
    for source, (keys, values) in task.ring.travel(torch.stack((k, v))):
        share = torch.zeros((2, *k.shape), dtype=dtype, device=k.device)
        found = task.block(source, q, keys, values)
        if found is not None:
            first, stop, block = found
            of_q, *of_keys = block.backward(grad[:, :, first:], out[:, :, first:], lse[:, :, first:])
            grad_q[:, :, first:] += of_q
            for total, part in zip(share, of_keys, strict=True):
                total[:, :, :stop] = part
        if own is None:
            own = share
        else:
            flight = task.ring.send(share if flight is None else share.add_(flight.wait()))
    assert own is not None, "the first block is this rank's own"
    return grad_q, own if flight is None else own.add_(flight.wait())


def _as_they_are(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which autocast leaves products alone: blocks choose their dtypes themselves."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()


def ring_attention(q: Tensor, k: Tensor, v: Tensor, task: Task) -> Tensor:
    """Return the attention of a part's queries to the keys of all parts.

    Communication, with R ring ranks: R - 1 times the keys and values forward; the same and R - 1 times their gradients,
    in float32 at least, backward.

    Args:
        q: (batch, heads, tokens of the part, head_dim).
        k: (batch, key and value heads, tokens of the part, head_dim).
        v: as `k`.
        task: who takes part, and what is seen.
    """
    result: Tensor = _RingAttention.apply(q, k, v, task)
    return result
