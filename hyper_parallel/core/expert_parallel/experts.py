"""Many feed-forwards as three tensors, each applied to the tokens that are routed to it; no token is dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hyper_parallel.core.common.checks import check, check_least
from hyper_parallel.core.common.torch_compat import runs_eagerly
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.expert_parallel.exchange import exchange_counts, exchange_rows
from hyper_parallel.core.expert_parallel.order import Order, restored, sorted_copies, sorted_rows
from hyper_parallel.core.redistribute.api import to_local

__all__ = ["CountRows", "GroupedExperts", "Loads", "SharedGroup", "count_rows"]


@dataclass(frozen=True)
class SharedGroup:
    """A process group that copies of a model share."""

    group: dist.ProcessGroup

    def __deepcopy__(self, memo: Any) -> SharedGroup:
        return self


class Loads(NamedTuple):
    """How many rows go where; the first two are empty where all experts are here.

    Attributes:
        sent: to each of the ranks that the experts are split over.
        received: from each of them.
        each: to each expert of this rank.
    """

    sent: list[int]
    received: list[int]
    each: list[int]


CountRows = Callable[["GroupedExperts", Tensor, Tensor, Tensor | None], Loads]
"""The experts, those that each token has chosen, the rows of this rank by (rank, expert), or by expert where all are
here, and the rows that come by (rank, own expert), None where all are here -> how many."""


def count_rows(experts: GroupedExperts, chosen: Tensor, to: Tensor, come: Tensor | None) -> Loads:
    """Read counts from the device: the one place that waits for it."""
    if come is None:
        return Loads([], [], to.tolist())
    numbers = torch.cat((to.sum(1), come.sum(1), come.sum(0))).tolist()
    ranks = len(come)
    return Loads(numbers[:ranks], numbers[ranks : 2 * ranks], numbers[2 * ranks :])


class GroupedExperts(nn.Module):
    """Experts, each a SwiGLU feed-forward: `w2[e](silu(w1[e] x) * w3[e] x)`.

    >>> experts = GroupedExperts(num_experts=4, hidden_size=8, inner_size=6)
    >>> chosen, weights = torch.tensor([[[0, 3], [3, 1], [0, 1]]]), torch.full((1, 3, 2), 0.5)
    >>> experts(torch.randn(1, 3, 8), chosen, weights).shape
    torch.Size([1, 3, 8])

    `expert_parallel` splits the experts over ranks.

    Args:
        num_experts: how many.
        hidden_size: width of a token.
        inner_size: width inside of one expert.

    Raises:
        TypeError: a size that is no int.
        ValueError: one below 1.

    Attributes:
        w1: (num_experts, inner_size, hidden_size).
        w2: (num_experts, hidden_size, inner_size).
        w3: as `w1`.
        exchange: the ranks that the experts are split over; None: all are here.
        count_rows: says how many rows go where; it reads that from the device unless it is replaced, as a simulation
            does whose tensors have no values.
    """

    def __init__(self, num_experts: int, hidden_size: int, inner_size: int) -> None:
        asked, sizes = "cannot make experts", {"num_experts": num_experts, "hidden_size": hidden_size}
        sizes |= {"inner_size": inner_size}
        check(asked, "int", **sizes)
        check_least(asked, 1, **sizes)
        super().__init__()
        self.num_experts, self.hidden_size, self.inner_size = num_experts, hidden_size, inner_size
        self.w1 = nn.Parameter(torch.empty(num_experts, inner_size, hidden_size))
        self.w2 = nn.Parameter(torch.empty(num_experts, hidden_size, inner_size))
        self.w3 = nn.Parameter(torch.empty(num_experts, inner_size, hidden_size))
        self.exchange: SharedGroup | None = None
        self.count_rows: CountRows = count_rows
        self.reset_parameters()

    def extra_repr(self) -> str:
        """Say the sizes."""
        return f"{self.num_experts}, hidden_size={self.hidden_size}, inner_size={self.inner_size}"

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weights with the variance that keeps a token's."""
        for weight in (self.w1, self.w2, self.w3):
            weight.normal_(0.0, weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return for each token the sum of what its experts make of it, times their weights.

        Args:
            x: (..., hidden_size); any number of tokens, also none.
            chosen: which experts a token goes to, int64 (..., experts per token).
            weights: of these, as `chosen`.

        Communication with experts split over n ranks: forward one all_to_all of counts and two of tokens (there and
        back), each (n - 1) / n of tokens * experts per token * hidden_size elements where the load is even; backward
        two of gradients.
        """
        return self._run(x, chosen, weights)

    @runs_eagerly
    def _run(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order = Order.by(chosen.flatten(), self.num_experts)
        rows = sorted_copies(x.flatten(0, -2), order, chosen.shape[-1])
        if self.exchange is None:
            out = self._here(rows, self.count_rows(self, chosen, order.counts, None).each)
        else:
            out = self._elsewhere(rows, chosen, order.counts)
        out = restored(out, order).view(*chosen.shape, x.shape[-1])
        return (out * weights.unsqueeze(-1)).sum(-2).to(x.dtype)

    def _elsewhere(self, rows: Tensor, chosen: Tensor, counts: Tensor) -> Tensor:
        """Let the ranks that have the experts compute, on rows in the order of experts."""
        assert self.exchange is not None, "the caller looks"
        group = self.exchange.group
        to = counts.view(group.size(), -1)
        come = exchange_counts(to, group)
        sent, received, each = self.count_rows(self, chosen, to, come)
        ranks, own = come.shape
        arrived = exchange_rows(rows, sent, received, group)
        expert = torch.arange(own, device=rows.device).repeat(ranks)
        expert = expert.repeat_interleave(come.flatten(), output_size=sum(received))
        order = Order.by(expert, own)
        out = restored(self._here(sorted_rows(arrived, order), each), order)
        return exchange_rows(out, received, sent, group)

    def _here(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Compute this rank's experts, on rows in the order of experts.

        One that has got no rows computes on none, so that all weights get gradients, on every rank: who shards them
        further waits for these.
        """
        w1, w2, w3 = (_own_part(weight).unbind() for weight in (self.w1, self.w2, self.w3))
        parts = rows.split(counts)
        return torch.cat(
            [
                F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down)
                for part, gate, down, up in zip(parts, w1, w2, w3, strict=True)
            ]
        )


def _own_part(weight: Tensor) -> Tensor:
    """Return this rank's part of a parameter. Ranks that hold the same part have computed on tokens of their own."""
    if not isinstance(weight, DTensor):
        return weight
    layout = Layout.of(weight)
    split = {layout.alias_name[axis] for chain in layout.splits(weight.dim()) for axis in chain}
    whole = {name: "sum" for name in layout.alias_name if name not in split}
    return to_local(weight, grad_layout=layout(*(layout.alias_placements or ()), partial=whole) if whole else None)
