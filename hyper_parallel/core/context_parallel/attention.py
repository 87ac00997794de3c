"""Attention over ranks: blocks and their merge, kernels, Ulysses and the ring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyper_parallel.core.context_parallel.flex import Flex, FlexPiece
from hyper_parallel.core.context_parallel.index import Gaps, SequenceSplit
from hyper_parallel.platform import AttentionKernel, PlatformUnavailableError, get_platform


def fused(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> AttentionKernel | None:
    """Return what the tensors' device computes such a block with; None: it has nothing for it, so products do.

    It is one below `scaled_dot_product_attention`, which keeps log-sums to itself.

    Args:
        q: (batch, heads, queries, head_dim).
        k: (batch, key and value heads, keys, head_dim).
        v: as `k`.
        causal: query i sees keys up to i.
        scale: of the scores.
    """
    if q.device.type == "meta":
        return None
    try:
        platform = get_platform(q.device.type)
    except (ValueError, PlatformUnavailableError):  # a device that nobody has registered, or one without values
        return None
    return platform.attention(q, k, v, causal, scale)


# Attention of some queries to some keys, with what it takes to join such blocks: the log of each query's sum ----------
#
# The softmax over keys in several blocks is that of each block, weighted by its share of the sum of exponentials
# (online softmax: Milakov and Gimelshein 2018; Rabe and Staats 2021). The gradient of a block needs the sum over all
# blocks only, and so is computed for each one by itself (FlashAttention: Dao et al. 2022, appendix B).

MAX_SCORES = 1 << 26
"""How many scores are computed at a time where no kernel does without keeping them."""


@dataclass(frozen=True)
class AttentionBlock:
    """Some queries and the keys that they see.

    Attributes:
        q: (batch, heads, queries, head_dim).
        k: (batch, key and value heads, keys, head_dim); query head i uses head i // (heads / key and value heads).
        v: as `k`.
        causal: query i sees keys up to i.
        scale: of the scores.
        documents: ids of queries (batch, queries) and keys (batch, keys); only those with equal ids see each other.
        flex: what else changes scores.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    scale: float
    documents: tuple[Tensor, Tensor] | None = None
    flex: Flex | None = None

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the output, shaped as the queries, and the log-sum-exp of each query's scores (batch, heads, queries).

        A query that sees no key gets zeros, and minus infinity.
        """
        kernel = self._kernel()
        if kernel is None:
            return self._by_hand()
        return kernel.forward(self.q, self.k, self.v, self.causal, self.scale)

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values.

        Args:
            grad: the gradient of `out`.
            out: of these queries, over all blocks.
            lse: of these queries, over all blocks.
        """
        kernel = self._kernel()
        if kernel is None:
            return self._gradients_by_hand(grad, out, lse)
        return kernel.backward(grad, self.q, self.k, self.v, out, lse, self.causal, self.scale)

    def _kernel(self) -> AttentionKernel | None:
        if self.documents is not None or self.flex is not None:
            return None
        return fused(self.q, self.k, self.v, self.causal, self.scale)

    # -- matrix products and nothing else: any device, any dtype -----------------------------------------------------

    def _by_hand(self) -> tuple[Tensor, Tensor]:
        dtype = accumulator(self.q.dtype)
        values = self.v.to(dtype)
        outs, sums = [], []
        for rows, scores, _ in self._scores():
            lse = scores.logsumexp(dim=-1, keepdim=True)
            weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)).exp_()
            outs.append(self._apart(weights @ values, rows))
            sums.append(self._apart(lse, rows).squeeze(-1))
        return torch.cat(outs, dim=2), torch.cat(sums, dim=2)

    def _gradients_by_hand(self, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dtype = accumulator(self.q.dtype)
        keys, values = self.k.to(dtype), self.v.to(dtype)
        # The gradient of a softmax's input is weight * (its gradient - mean of all gradients by weight).
        mean = (grad.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
        grad_q: list[Tensor] = []
        grad_k, grad_v = torch.zeros_like(keys), torch.zeros_like(values)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # of what sees nothing, in no block: no weight, not 0 / 0
        for rows, scores, plain in self._scores():
            weights = (scores - self._together(lse.unsqueeze(-1), rows)).exp_()
            grad_out = self._together(grad, rows).to(dtype)
            grad_v += weights.mT @ grad_out
            grad_scores = weights.mul_(grad_out @ values.mT - self._together(mean, rows))
            if self.flex is not None:
                through = self.flex.through(plain, rows, self._apart(grad_scores, rows))
                grad_scores = self._shared(through)
            grad_scores = grad_scores.mul_(self.scale)
            grad_q.append(self._apart(grad_scores @ keys, rows))
            grad_k += grad_scores.mT @ self._together(self.q, rows).to(dtype)
        return torch.cat(grad_q, dim=2), grad_k, grad_v

    def _scores(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield scores of some queries at a time: (batch, kv heads, query heads of each * queries, keys).

        With `flex`, and as they were before it, (batch, heads, queries, keys).
        """
        batch, heads, queries, _ = self.q.shape
        keys = self.k.to(accumulator(self.q.dtype)).mT
        step = max(1, MAX_SCORES // max(1, batch * heads * self.k.shape[2]))
        for start in range(0, queries, step):
            rows = slice(start, min(start + step, queries))
            scores = (self._together(self.q, rows).to(keys.dtype) @ keys).mul_(self.scale)
            hidden = self._hidden(rows)
            if hidden is not None:
                each = scores.unflatten(2, (heads // self.k.shape[1], -1))
                scores = each.masked_fill_(hidden, -torch.inf).flatten(2, 3)
            plain = scores
            if self.flex is not None:
                plain = self._apart(scores, rows)
                scores = self._shared(self.flex.applied(plain, rows))
            yield rows, scores, plain

    def _hidden(self, rows: slice) -> Tensor | None:
        """Return a mask of what queries do not see, for scores (batch, kv heads, heads of each, queries, keys)."""
        hidden: Tensor | None = None
        if self.causal:
            at = torch.arange(self.k.shape[2], device=self.q.device)
            hidden = at[rows, None] < at
        if self.documents is not None:
            of_queries, of_keys = self.documents
            foreign = (of_queries[:, rows, None] != of_keys[:, None])[:, None, None]
            hidden = foreign if hidden is None else hidden | foreign
        return hidden

    def _together(self, x: Tensor, rows: slice) -> Tensor:
        """Put the queries of all heads that share a key head into one dim: one product serves them all."""
        return self._shared(x[:, :, rows])

    def _shared(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.k.shape[1], -1)).flatten(2, 3)

    def _apart(self, x: Tensor, rows: slice) -> Tensor:
        return x.unflatten(2, (-1, rows.stop - rows.start)).flatten(1, 2)


def tokens(x: Tensor, where: slice) -> Tensor:
    """Return some tokens of a tensor (batch, heads, tokens ...).

    It is one operation of the host, or none for all of them; `x[:, :, where]` is three, and adding to that is seven.

    Args:
        x: the tensor.
        where: which tokens, without a step.
    """
    start, stop, _ = where.indices(x.shape[2])
    return x if stop - start == x.shape[2] else x.narrow(2, start, stop - start)


@dataclass
class Joined:
    """The outputs of the blocks so far, as one softmax over all their keys.

    Attributes:
        out: (batch, heads, queries, head_dim), in the dtype that sums are kept in.
        lse: log-sum-exp of the scores, (batch, heads, queries).
        gaps: queries that no block has been added for.
    """

    out: Tensor
    lse: Tensor
    gaps: Gaps = field(default_factory=partial(Gaps, 0))

    @classmethod
    def none(cls, q: Tensor) -> Joined:
        """Queries that no block has been added for."""
        dtype = accumulator(q.dtype)
        # Laid out as the queries are: what a model transposes before attention it transposes back without a copy.
        return cls(torch.empty_like(q, dtype=dtype), q.new_empty(q.shape[:3], dtype=dtype), Gaps(q.shape[2]))

    def add(self, out: Tensor, lse: Tensor, rows: slice) -> None:
        """Add a block of further keys that some of the queries see."""
        if not self.gaps.left:
            self._join(out, lse, tokens(self.out, rows), tokens(self.lse, rows))
            return
        for here, there, is_first in self.gaps.fill(rows):
            outs, sums = tokens(self.out, here), tokens(self.lse, here)
            if is_first:
                outs.copy_(tokens(out, there))
                sums.copy_(tokens(lse, there))
            else:
                self._join(tokens(out, there), tokens(lse, there), outs, sums)

    def _join(self, out: Tensor, lse: Tensor, outs: Tensor, sums: Tensor) -> None:
        # exp(lse) / (exp(sums) + exp(lse)). Who sees none of these keys gives them no weight: not that of inf - inf,
        # where nothing was seen before either. NaN of a score stays.
        share = torch.sigmoid(lse - sums.clamp(min=torch.finfo(sums.dtype).min)).unsqueeze(-1)
        outs.lerp_(out.to(outs.dtype), share)  # both in one pass over the outputs
        torch.logaddexp(sums, lse, out=sums)

    def finish(self) -> Joined:
        """Give queries without any block zeros, and return this."""
        for start, stop in self.gaps.left:
            tokens(self.out, slice(start, stop)).zero_()
            tokens(self.lse, slice(start, stop)).fill_(-torch.inf)
        return self


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of a dtype are kept: float64 of float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# From a split sequence to split heads and back: an all_to_all (DeepSpeed-Ulysses: Jacobs et al. 2023) -----------------


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


# Attention of every rank's queries to all ranks' keys, which travel around a ring (Liu, Zaharia and Abbeel 2023) ------
#
#     step 0: own keys       step 1: those of the rank before       step 2: of the one before that ...
#
# While a rank computes with what it has, that is already on its way to the next one. Backward the keys travel once
# more, and the gradients of keys travel with them, one step behind, gathering each rank's share, until they are home.


class RingShift:
    """A tensor on its way to the next rank, and the previous rank's on its way here."""

    def __init__(self, sent: Tensor, group: dist.ProcessGroup, before: int, after: int) -> None:
        received = torch.empty_like(sent)
        there = dist.P2POp(dist.isend, sent, after, group)
        back = dist.P2POp(dist.irecv, received, before, group)
        self._works = dist.batch_isend_irecv([there, back])
        self._tensors = [sent, received]  # the first must live until it has left, and no longer: it is a whole block

    def wait(self) -> Tensor:
        """Return what the previous rank sent; once."""
        for work in self._works:
            work.wait()
        received = self._tensors.pop()
        self._tensors.clear()
        self._works.clear()  # which hold them, too
        return received


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

    def send(self, x: Tensor) -> RingShift:
        """Send a contiguous tensor to the next rank, and receive the previous one's."""
        size = len(self.ranks)
        return RingShift(x, self.group, self.ranks[(self.rank - 1) % size], self.ranks[(self.rank + 1) % size])

    def travel(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield every rank's tensor with that rank's place, beginning with the own one; each is sent on before that."""
        for step in range(len(self.ranks)):
            flight = self.send(x) if step + 1 < len(self.ranks) else None
            yield (self.rank - step) % len(self.ranks), x
            if flight is not None:
                x = flight.wait()


@dataclass(frozen=True)
class AttentionCall:
    """One attention: what all blocks have in common.

    Attributes:
        ring: who takes part.
        causal: positions see no later ones.
        scale: of the scores.
        documents: of every ring rank, ids (ring, batch, tokens).
        flex: masks and changed scores, of the heads that this rank has; its positions are those of the whole sequence.
    """

    ring: Ring
    causal: bool
    scale: float
    documents: Tensor | None
    flex: Flex | None = None

    def blocks(self, source: int, q: Tensor, k: Tensor, v: Tensor) -> Iterator[VisibleBlock]:
        """Yield what queries see of the keys of ring rank `source`."""
        if self.flex is not None:
            yield from self._flex_blocks(self.flex, source, q, k, v)
            return
        seen = self.ring.split.visible(self.ring.rank, source, q.shape[2], self.causal)
        if seen is None:
            return
        first, stop = seen.first_query, seen.num_keys
        ids = self.documents
        documents = None if ids is None else (ids[self.ring.rank, :, first:], ids[source, :, :stop])
        if seen.causal and documents is None:
            kernel = fused(q, k, v, True, self.scale)
            limit = None if kernel is None else kernel.most_causal
            for rows, columns, causal in triangle(0, stop, limit or stop):
                parts = (tokens(q, rows), tokens(k, columns), tokens(v, columns))
                yield VisibleBlock(rows, columns, AttentionBlock(*parts, causal, self.scale))
            return
        rows, columns = slice(first, q.shape[2]), slice(0, stop)
        block = AttentionBlock(
            tokens(q, rows), tokens(k, columns), tokens(v, columns), seen.causal, self.scale, documents
        )
        yield VisibleBlock(rows, columns, block)

    def _flex_blocks(self, flex: Flex, source: int, q: Tensor, k: Tensor, v: Tensor) -> Iterator[VisibleBlock]:
        split = self.ring.split
        seq = q.shape[2] * split.ring
        for queries, before in _with_offsets(split.part(self.ring.rank, seq)):
            for keys, before_keys in _with_offsets(split.part(source, seq)):
                whole = (FlexPiece(queries, keys, seen=True),)
                for piece in whole if flex.blocks is None else flex.blocks.pieces(queries, keys):
                    rows, columns = (
                        slice(ends[0] + offset, ends[1] + offset)
                        for ends, offset in ((piece.queries, before), (piece.keys, before_keys))
                    )
                    change = flex.of(piece)
                    parts = (tokens(q, rows), tokens(k, columns), tokens(v, columns))
                    yield VisibleBlock(rows, columns, AttentionBlock(*parts, False, self.scale, flex=change))


class VisibleBlock(NamedTuple):
    """A block, and which of a part's queries and keys it has."""

    queries: slice
    keys: slice
    block: AttentionBlock


def triangle(start: int, stop: int, limit: int) -> Iterator[tuple[slice, slice, bool]]:
    """Yield what tokens see of each other as queries, keys, and whether only of those up to them.

    >>> for rows, columns, causal in triangle(0, 4, limit=2):
    ...     print(rows.start, rows.stop, columns.start, columns.stop, causal)
    0 2 0 2 True
    2 4 0 2 False
    2 4 2 4 True

    Args:
        start: the first token.
        stop: after the last one.
        limit: how many tokens a block may have of which only those up to them are seen.
    """
    if stop - start <= limit:
        yield slice(start, stop), slice(start, stop), True
        return
    middle = (start + stop) // 2
    yield from triangle(start, middle, limit)
    yield slice(middle, stop), slice(start, middle), False
    yield from triangle(middle, stop, limit)


def _with_offsets(intervals: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield intervals that lie one after the other in a part, and what to add to positions to get places there."""
    place = 0
    for start, stop in intervals:
        yield (start, stop), place - start
        place += stop - start


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, task: AttentionCall) -> Tensor:
        # The first block is copied, too: it is added to, and selective checkpointing keeps what a kernel has returned.
        joined, keys_and_values = Joined.none(q), torch.stack((k, v))
        with _as_they_are(q.device):
            for source, pair in task.ring.travel(keys_and_values):
                _attend(task, source, q, pair, joined)
                del pair  # before the next one is received
        result = joined.finish().out.to(q.dtype)
        ctx.task = task
        ctx.save_for_backward(q, keys_and_values, result, joined.lse)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, keys_and_values, out, lse = ctx.saved_tensors
        if grad.stride(-1) != 1 or 0 in grad.stride():  # one that was expanded, which kernels do not take
            grad = grad.contiguous()
        with _as_they_are(q.device):
            grads = _gradients(ctx.task, q, keys_and_values, out, lse, grad)
        grad_q, grad_k, grad_v = (each.to(q.dtype) for each in grads)
        return grad_q, grad_k, grad_v, None


def _attend(task: AttentionCall, source: int, q: Tensor, keys_and_values: Tensor, joined: Joined) -> None:
    """Add what queries see of the keys of ring rank `source`."""
    for rows, _, block in task.blocks(source, q, *keys_and_values):
        joined.add(*block.forward(), rows)


def _gradients(
    task: AttentionCall, q: Tensor, keys_and_values: Tensor, out: Tensor, lse: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, in the dtype that sums are kept in."""
    of_queries, flight = TokenSum(q), None
    own: list[KeyShare] = []
    for source, pair in task.ring.travel(keys_and_values):
        shares = _shares(task, source, q, pair, (grad, out, lse), of_queries)
        del pair  # before the next one is received
        if source == task.ring.rank:
            own = shares
        else:
            # What other ranks have added has come while these were computed, and goes on with these.
            flight = task.ring.send(_with_shares(flight, shares, keys_and_values))
        del shares
    of_keys, of_values = _with_shares(flight, own, keys_and_values)
    return of_queries.result(), of_keys, of_values


KeyShare = tuple[slice, list[Tensor]]
"""Gradients of some keys and of their values, and which these are."""


def _shares(
    task: AttentionCall,
    source: int,
    q: Tensor,
    keys_and_values: Tensor,
    result: tuple[Tensor, Tensor, Tensor],
    of_queries: TokenSum,
) -> list[KeyShare]:
    """Return the gradients of the keys of ring rank `source`, and add those of the queries that see them.

    Args:
        task: the attention.
        source: whose keys they are.
        q: the queries.
        keys_and_values: (2, batch, heads, tokens, head_dim).
        result: the gradient of the output, the output, and its log-sum-exp.
        of_queries: what is added to.
    """
    shares: list[KeyShare] = []
    for rows, columns, block in task.blocks(source, q, *keys_and_values):
        of_q, *of_keys = block.backward(*(tokens(x, rows) for x in result))
        of_queries.add(of_q, rows)
        same = next((parts for place, parts in shares if place == columns), None)
        if same is None or any(part.dtype != accumulator(q.dtype) for part in same):
            shares.append((columns, of_keys))
            continue
        for so_far, part in zip(same, of_keys, strict=True):  # of the same keys: they need no memory of their own
            so_far += part
    return shares


def _with_shares(flight: RingShift | None, shares: list[KeyShare], like: Tensor) -> Tensor:
    """Return what has come of the gradients of some keys and values, and a rank's shares.

    Args:
        flight: what brings the sum of others; None: nobody has begun one.
        shares: what is added.
        like: the keys and values, (2, batch, heads, tokens, head_dim).
    """
    dtype = accumulator(like.dtype)
    total = torch.empty_like(like, dtype=dtype) if flight is None else flight.wait()
    for place, into in enumerate(total):
        found = TokenSum(into, into, begun=flight is not None)
        for columns, parts in shares:
            found.add(parts[place], columns)
        found.result()
    return total


class TokenSum:
    """A sum of gradients of tokens, in the dtype that sums are kept in.

    Args:
        like: what they are gradients of, (batch, heads, tokens, head_dim).
        into: where the sum is written; None: the first part may become the sum.
        begun: whether there are gradients in it already.
    """

    def __init__(self, like: Tensor, into: Tensor | None = None, *, begun: bool = False) -> None:
        self._like, self._total = like, into
        self._gaps = Gaps(0 if begun else like.shape[2])

    def add(self, part: Tensor, where: slice) -> None:
        """Add gradients of the tokens at `where`, which nobody else has."""
        if self._total is None and part.shape == self._like.shape:
            self._total, self._gaps = part.to(accumulator(self._like.dtype)), Gaps(0)
            return
        total = self._made()
        if not self._gaps.left:
            tokens(total, where).add_(part)
            return
        for here, there, is_first in self._gaps.fill(where):
            if is_first:
                tokens(total, here).copy_(tokens(part, there))
            else:
                tokens(total, here).add_(tokens(part, there))

    def result(self) -> Tensor:
        """Return the sum; zeros of tokens without a part."""
        total = self._made()
        for start, stop in self._gaps.left:
            tokens(total, slice(start, stop)).zero_()
        return total

    def _made(self) -> Tensor:
        if self._total is None:
            self._total = torch.empty_like(self._like, dtype=accumulator(self._like.dtype))
        return self._total


def _as_they_are(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which autocast leaves products alone: blocks choose their dtypes themselves."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()


def ring_attention(q: Tensor, k: Tensor, v: Tensor, task: AttentionCall) -> Tensor:
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
