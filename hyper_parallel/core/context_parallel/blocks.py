"""Attention of some queries to some keys, with what it takes to join such blocks: the log of each query's sum.

The softmax over keys in several blocks is that of each block, weighted by its share of the sum of exponentials (online
softmax: Milakov and Gimelshein 2018; Rabe and Staats 2021). The gradient of a block needs the sum over all blocks only,
and so is computed for each one by itself (FlashAttention: Dao et al. 2022, appendix B).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hyper_parallel.core.context_parallel import kernels

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
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    scale: float
    documents: tuple[Tensor, Tensor] | None = None

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the output, shaped as the queries, and the log-sum-exp of each query's scores (batch, heads, queries).

        A query that sees no key gets zeros, and minus infinity.
        """
        if self._has_kernel():
            return kernels.forward(self.q, self.k, self.v, self.causal, self.scale)
        return self._by_hand()

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values.

        Args:
            grad: the gradient of `out`.
            out: of these queries, over all blocks.
            lse: of these queries, over all blocks.
        """
        if self._has_kernel():
            return kernels.backward(grad, self.q, self.k, self.v, out, lse, self.causal, self.scale)
        return self._gradients_by_hand(grad, out, lse)

    def _has_kernel(self) -> bool:
        return self.documents is None and kernels.has_kernel(self.q, self.k, self.v)

    # -- matrix products and nothing else: any device, any dtype -----------------------------------------------------

    def _by_hand(self) -> tuple[Tensor, Tensor]:
        dtype = accumulator(self.q.dtype)
        values = self.v.to(dtype)
        outs, sums = [], []
        for rows, scores in self._scores():
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
        for rows, scores in self._scores():
            weights = (scores - self._together(lse.unsqueeze(-1), rows)).exp_()
            grad_out = self._together(grad, rows).to(dtype)
            grad_v += weights.mT @ grad_out
            grad_scores = weights.mul_(grad_out @ values.mT - self._together(mean, rows)).mul_(self.scale)
            grad_q.append(self._apart(grad_scores @ keys, rows))
            grad_k += grad_scores.mT @ self._together(self.q, rows).to(dtype)
        return torch.cat(grad_q, dim=2), grad_k, grad_v

    def _scores(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield scores of some queries at a time: (batch, kv heads, query heads of each * queries, keys)."""
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
            yield rows, scores

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
        return x[:, :, rows].unflatten(1, (self.k.shape[1], -1)).flatten(2, 3)

    def _apart(self, x: Tensor, rows: slice) -> Tensor:
        return x.unflatten(2, (-1, rows.stop - rows.start)).flatten(1, 2)


@dataclass
class Joined:
    """The outputs of the blocks so far, as one softmax over all their keys.

    Attributes:
        out: (batch, heads, queries, head_dim), in the dtype that sums are kept in.
        lse: log-sum-exp of the scores, (batch, heads, queries).
    """

    out: Tensor
    lse: Tensor

    def add(self, out: Tensor, lse: Tensor, first: int) -> None:
        """Add a block of further keys that the queries from number `first` on see."""
        so_far = self.lse[:, :, first:]
        total = torch.logaddexp(so_far, lse)
        before, new = ((part - total).exp().unsqueeze(-1) for part in (so_far, lse))
        self.out[:, :, first:].mul_(before).add_(new * out)
        so_far.copy_(total)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of a dtype are kept: float64 of float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
