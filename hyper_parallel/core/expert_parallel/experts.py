"""Experts: the order of tokens, their exchange between ranks, and the layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hyper_parallel.core.common.checks import check, check_least
from hyper_parallel.core.common.torch_compat import runs_eagerly
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.redistribute.api import to_local

__all__ = [
    "Copies",
    "CountRows",
    "RowFlight",
    "GroupedExperts",
    "Loads",
    "NodeGroups",
    "Order",
    "Sent",
    "SentToNodes",
    "SharedGroup",
    "copied",
    "count_rows",
    "exchange_counts",
    "exchange_rows",
    "restored",
    "sorted_copies",
    "sorted_rows",
    "summed",
]


# Rows that go from every rank of a group to every other one, as many as each has for it -------------------------------


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
    rows: torch.Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    group: dist.ProcessGroup,
    experts: GroupedExperts | None = None,
) -> torch.Tensor:
    """Send each rank of a group its rows, and return what they send here, in the order of ranks.

    Args:
        rows: (sum of sent, ...), those for rank 0 first.
        sent: how many rows are for each rank; any may be 0.
        received: how many come from each.
        group: the ranks.
        experts: the layer, which simulated ranks compare.

    Communication: forward one all_to_all, backward one the other way, of gradients.
    """
    flight = RowFlight(sent, received, group, experts)
    return flight.arrived(flight.start(rows))


class RowFlight:
    """Rows on their way between the ranks of a group, so that a device computes in the meantime.

    Args:
        sent: how many rows are for each rank.
        received: how many come from each.
        group: the ranks.
        experts: the layer that they go to; None: unknown.
    """

    def __init__(
        self,
        sent: Sequence[int],
        received: Sequence[int],
        group: dist.ProcessGroup,
        experts: GroupedExperts | None = None,
    ) -> None:
        self.sent, self.received, self.group, self.experts = tuple(sent), tuple(received), group, experts
        self.work: dist.Work | None = None
        self.grad: tuple[Tensor, RowFlight] | None = None  # on its way back

    def start(self, rows: Tensor) -> Tensor:
        """Send the rows; returns those that come, whose values nobody may look at before `arrived`."""
        there: Tensor = _Start.apply(rows, self)
        return there

    def arrived(self, there: Tensor, *after: Tensor) -> Tensor:
        """Return the rows that have come.

        Args:
            there: what `start` has returned.
            after: tensors whose gradients count as complete only after those of the rows; they get none from here.
        """
        rows: Tensor = _Arrive.apply(there, self, *after)
        return rows

    def wait(self) -> None:
        """Let what is computed from now on wait for the rows."""
        assert self.work is not None, "start comes first"
        self.work.wait()
        self.work = None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: RowFlight) -> Tensor:
        ctx.flight = flight
        there = rows.new_empty((sum(flight.received), *rows.shape[1:]))
        into, out_of = list(flight.received), list(flight.sent)
        flight.work = dist.all_to_all_single(there, rows.contiguous(), into, out_of, group=flight.group, async_op=True)
        return there

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # `grad` has the shape of what has arrived; `_Arrive` has sent it back, before it passed it on.
        (there, back), ctx.flight.grad = ctx.flight.grad, None
        return back.arrived(there), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, there: Tensor, flight: RowFlight, *after: Tensor) -> Tensor:
        ctx.flight, ctx.after = flight, len(after)
        flight.wait()
        return there.view_as(there)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flight: RowFlight = ctx.flight
        back = RowFlight(flight.received, flight.sent, flight.group, flight.experts)
        flight.grad = back.start(grad), back
        return grad, None, *[None] * ctx.after


# Rows in the order of the experts that they go to, and back -----------------------------------------------------------


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
        return cls(places, back, _counted(bins_of_rows, bins))


def _counted(bins_of_rows: torch.Tensor, bins: int) -> torch.Tensor:
    """Return how many rows each bin has; rows may have several, in any shape."""
    bins_of_rows = bins_of_rows.flatten()
    counts = torch.zeros(bins, dtype=torch.int64, device=bins_of_rows.device)
    return counts.scatter_add_(0, bins_of_rows, torch.ones_like(bins_of_rows))


def sorted_rows(rows: torch.Tensor, order: Order) -> torch.Tensor:
    """Return rows in an order."""
    return cast(torch.Tensor, _RowMove.apply(rows, order.places, order.back, 1))


def sorted_copies(rows: torch.Tensor, order: Order, copies: int) -> torch.Tensor:
    """Return so many copies of each row, next to each other, in an order of these."""
    return cast(torch.Tensor, _RowMove.apply(rows, order.places, order.back, copies))


def restored(rows: torch.Tensor, order: Order) -> torch.Tensor:
    """Return rows that are in an order as they were before it."""
    return cast(torch.Tensor, _RowMove.apply(rows, order.back, order.places, 1))


class _RowMove(torch.autograd.Function):
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


# Rows that go to some of many bins, and what comes back of them -------------------------------------------------------


class Copies(NamedTuple):
    """Copies of rows, as many of each as it has bins, in the order of bins; within a bin they are in the order of rows.

    >>> copies = Copies.by(torch.tensor([[2, 0], [3, 0], [1, 3]]), bins=3, total=4)  # 3 is no bin
    >>> copies.rows.tolist(), copies.slots.tolist()
    ([0, 1, 2, 0], [1, 3, 4, 0])
    >>> copies.places.tolist(), copies.starts.tolist()
    ([3, 0, 1, 2], [0, 2, 3])

    Attributes:
        rows: which row each copy is of.
        slots: in which place among the bins of all rows, one row after the other, its bin is named.
        places: of the copies by row: at which place each one is.
        starts: where those of each row begin in `places`.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    places: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def by(cls, bins_of_rows: torch.Tensor, bins: int, total: int) -> Copies:
        """Copy rows to their bins.

        Args:
            bins_of_rows: int64 (rows, n): numbers of bins; what is not below `bins` is none.
            bins: how many there are.
            total: how many of these numbers are bins. The host has to know.
        """
        slots = bins_of_rows.flatten().argsort(stable=True)[:total]
        each = (bins_of_rows < bins).sum(1)
        return cls(slots // max(bins_of_rows.shape[1], 1), slots, slots.argsort(), each.cumsum(0) - each)


def copied(rows: torch.Tensor, copies: Copies) -> torch.Tensor:
    """Return the copies of rows; a row's gradient is the sum of theirs."""
    return cast(torch.Tensor, _Copy.apply(rows, copies))


def summed(copies_of_rows: torch.Tensor, copies: Copies) -> torch.Tensor:
    """Return for each row the sum of its copies; of none it is 0."""
    return cast(torch.Tensor, _RowSum.apply(copies_of_rows, copies))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, copies: Copies) -> torch.Tensor:
        ctx.copies = copies
        return rows.index_select(0, copies.rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return summed(grad, ctx.copies), None


class _RowSum(torch.autograd.Function):
    """Sums by torch's embedding bag: in one kernel that adds up in the order of copies, in float32 for narrower dtypes.
    Adding by index would add in any order on a GPU."""

    @staticmethod
    def forward(ctx: Any, copies_of_rows: torch.Tensor, copies: Copies) -> torch.Tensor:
        ctx.copies = copies
        return torch.embedding_bag(copies_of_rows.detach(), copies.places, copies.starts)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return copied(grad, ctx.copies), None


# Many feed-forwards as three tensors, each applied to the tokens that are routed to it; no token is dropped -----------


@dataclass(frozen=True)
class SharedGroup:
    """A process group that copies of a model share."""

    group: dist.ProcessGroup

    def __deepcopy__(self, memo: Any) -> SharedGroup:
        return self


@dataclass(frozen=True)
class NodeGroups:
    """The ranks that experts are split over, as they lie on several nodes, equally many on each.

    Attributes:
        between: one rank of each node, those at the same place on theirs.
        within: the ranks of this node; None: it has one.
    """

    between: SharedGroup
    within: SharedGroup | None


class Loads(NamedTuple):
    """How many rows go where; the first two are empty where all experts are here.

    Attributes:
        sent: to each of the ranks that the experts are split over; with `NodeGroups` to each node.
        received: from each of them.
        each: to each expert of this rank.
        passed: with `NodeGroups`, to each rank of this node, of the rows that have come to it.
        taken: from each of them.
    """

    sent: list[int]
    received: list[int]
    each: list[int]
    passed: Sequence[int] = ()
    taken: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class Sent:
    """Tokens on their way to the ranks that have their experts.

    Attributes:
        order: of the copies of this rank's tokens, by expert.
        come: how many rows come from each rank for each expert of this one, on the device.
        loads: how many rows go where.
        flight: the exchange.
        rows: those that come.
    """

    order: Order
    come: Tensor
    loads: Loads
    flight: RowFlight
    rows: Tensor


@dataclass(frozen=True, eq=False)
class SentToNodes:
    """Tokens on their way to the nodes that have their experts.

    Attributes:
        copies: of this rank's tokens, by node.
        come: how many rows come from each rank of this node for each expert of this one, on the device.
        loads: how many rows go where.
        marks: the exchange of experts.
        experts: of the rows that come, int32 (rows, experts per token): numbers among those of this node, or their
            count for one that is on another node.
        flight: the exchange of rows.
        rows: those that come.
    """

    copies: Copies
    come: Tensor
    loads: Loads
    marks: RowFlight
    experts: Tensor
    flight: RowFlight
    rows: Tensor


CountRows = Callable[["GroupedExperts", Tensor, Tensor, Tensor | None], Loads]
"""The experts, those that each token has chosen, the rows of this rank by (rank, expert), or by expert where all are
here, and the rows that come by (rank, own expert), None where all are here -> how many. With `NodeGroups` the third is
a line of the rows to each node, from each node, and to each rank of this one, and the last has the ranks of this one.
"""


def count_rows(experts: GroupedExperts, chosen: Tensor, to: Tensor, come: Tensor | None) -> Loads:
    """Read counts from the device: the one place that waits for it."""
    if come is None:
        return Loads([], [], to.tolist())
    is_line = experts.nodes is not None
    numbers = torch.cat((to if is_line else to.sum(1), come.sum(1), come.sum(0))).tolist()
    ranks, own = come.shape
    each, taken = numbers[-own:], numbers[-own - ranks : -own]
    if not is_line:
        return Loads(numbers[:ranks], taken, each)
    nodes = (len(to) - ranks) // 2
    return Loads(numbers[:nodes], numbers[nodes : 2 * nodes], each, numbers[2 * nodes : -own - ranks], taken)


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
        fqn: its name in the model that `expert_parallel` was given.
        nodes: how these lie on nodes, each of which gets a token once; None: each expert gets it from its rank.
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
        self.nodes: NodeGroups | None = None
        self.fqn = ""
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

    def send(self, x: Tensor, chosen: Tensor) -> Sent | SentToNodes | None:
        """Send tokens to the ranks that have their experts, and do not wait for those that come.

            sent = experts.send(x, chosen)
            shared = shared_experts(x)  # while tokens are on their way; in backward as well
            out = experts(x, chosen, weights, sent) + shared

        Args:
            x: as for `forward`.
            chosen: as there.

        Returns:
            What `forward` takes; None where all experts are here.

        Communication: one all_to_all of counts, which the host waits for, and one of tokens. With `nodes` one of counts
        in the node as well, and one of the numbers of tokens' experts; tokens go between nodes only.
        """
        if self.exchange is None:
            return None
        return self._send(x, chosen) if self.nodes is None else self._send_to_nodes(x, chosen, self.nodes)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, sent: Sent | SentToNodes | None = None) -> Tensor:
        """Return for each token the sum of what its experts make of it, times their weights.

        Args:
            x: (..., hidden_size); any number of tokens, also none.
            chosen: which experts a token goes to, int64 (..., experts per token).
            weights: of these, as `chosen`.
            sent: what `send` has returned for x, if it was called before; it is good for one call.

        Communication with experts split over n ranks: forward one all_to_all of counts and two of tokens (there and
        back), each (n - 1) / n of tokens * experts per token * hidden_size elements where the load is even; backward
        two of gradients. Nothing is computed during them, except between `send` and this call.

        With `nodes` a token goes to each node that has some of its experts once, to the rank at this one's place there,
        which passes it on to the ranks of its experts, adds up what they return, and sends back one row. So an
        all_to_all between nodes and one within them stand for each of those of tokens and gradients; one of weights
        is between nodes as well, with one of their gradients in backward. What a node returns is rounded to the dtype
        of x, in which it travels; the sum over experts and that over nodes are computed in that of the weights.
        """
        return self._run(x, chosen, weights, sent)

    @runs_eagerly
    def _send(self, x: Tensor, chosen: Tensor) -> Sent:
        assert self.exchange is not None, "the caller looks"
        group = self.exchange.group
        order = Order.by(chosen.flatten(), self.num_experts)
        to = order.counts.view(group.size(), -1)
        come = exchange_counts(to, group)
        loads = self.count_rows(self, chosen, to, come)
        flight = RowFlight(loads.sent, loads.received, group, self)
        rows = sorted_copies(x.flatten(0, -2), order, chosen.shape[-1])
        return Sent(order, come, loads, flight, flight.start(rows))

    @runs_eagerly
    def _send_to_nodes(self, x: Tensor, chosen: Tensor, nodes: NodeGroups) -> SentToNodes:
        between, within = nodes.between.group, nodes.within
        count, ranks = between.size(), 1 if within is None else within.group.size()
        per_node, chosen = self.num_experts // between.size(), chosen.flatten(0, -2)
        node = chosen // per_node
        again = (node.unsqueeze(2) == node.unsqueeze(1)).tril(-1).any(2)  # an earlier expert is on this node, too
        node = node.masked_fill(again, count)
        to = torch.cat((_counted(node, count + 1)[:-1, None], _counted(chosen, self.num_experts).view(count, -1)), 1)
        come = exchange_counts(to, between)
        passed = come[:, 1:].sum(0).view(ranks, -1)
        taken = passed if within is None else exchange_counts(passed, within.group)
        loads = self.count_rows(self, chosen, torch.cat((to[:, 0], come[:, 0], passed.sum(1))), taken)
        copies = Copies.by(node, count, sum(loads.sent))
        first = node.flatten().index_select(0, copies.slots).unsqueeze(1) * per_node
        experts = chosen.index_select(0, copies.rows) - first
        experts = experts.masked_fill((experts < 0) | (experts > per_node), per_node).to(torch.int32)
        marks, flight = (RowFlight(loads.sent, loads.received, between, self) for _ in range(2))
        experts = marks.start(experts)
        return SentToNodes(copies, taken, loads, marks, experts, flight, flight.start(copied(x.flatten(0, -2), copies)))

    @runs_eagerly
    def _run(self, x: Tensor, chosen: Tensor, weights: Tensor, sent: Sent | SentToNodes | None = None) -> Tensor:
        sent = sent or self.send(x, chosen)
        if isinstance(sent, SentToNodes):
            return self._on_nodes(sent, x, weights)
        if sent is None:
            order = Order.by(chosen.flatten(), self.num_experts)
            rows = sorted_copies(x.flatten(0, -2), order, chosen.shape[-1])
            out = self._here(rows, order.counts, lambda: self.count_rows(self, chosen, order.counts, None).each)
        else:
            order, out = sent.order, self._elsewhere(sent, x)
        out = restored(out, order).view(*chosen.shape, x.shape[-1])
        return (out * weights.unsqueeze(-1)).sum(-2).to(x.dtype)

    def _elsewhere(self, tokens: Sent, x: Tensor) -> Tensor:
        """Let the ranks that have the experts compute, and return their rows in the order in which they were sent.

        Args:
            tokens: on their way.
            x: what they are copies of, in the dtype to compute in. Who shards the experts' weights further takes its
                gradients to be complete once that of x is.
        """
        sent, received, each = tokens.loads[:3]
        arrived = tokens.flight.arrived(tokens.rows, x).to(x.dtype)
        return exchange_rows(self._for_ranks(arrived, tokens.come, each), received, sent, tokens.flight.group, self)

    def _on_nodes(self, tokens: SentToNodes, x: Tensor, weights: Tensor) -> Tensor:
        """Let the nodes that have the experts compute, and return for each token the sum of what they make of it.

        Args:
            tokens: on their way.
            x: as for `_elsewhere`.
            weights: as for `forward`.
        """
        assert self.nodes is not None, "they were sent to nodes"
        flight, loads = tokens.flight, tokens.loads
        sent, received = loads.sent, loads.received
        weights = exchange_rows(copied(weights.flatten(0, -2), tokens.copies), sent, received, flight.group, self)
        experts = tokens.marks.arrived(tokens.experts).long()
        arrived = flight.arrived(tokens.rows, x).to(x.dtype)
        copies = Copies.by(experts, tokens.come.numel(), sum(loads.passed))
        rows, within = copied(arrived, copies), self.nodes.within
        if within is None:
            out = self._here(rows, tokens.come[0], lambda: loads.each)
        else:
            rows = exchange_rows(rows, loads.passed, loads.taken, within.group, self)
            out = self._for_ranks(rows, tokens.come, loads.each)
            out = exchange_rows(out, loads.taken, loads.passed, within.group, self)
        out = summed(out * weights.flatten().index_select(0, copies.slots).unsqueeze(-1), copies)
        out = exchange_rows(out.to(x.dtype), received, sent, flight.group, self)
        return summed(out, tokens.copies).view(x.shape)

    def _for_ranks(self, rows: Tensor, come: Tensor, each: list[int]) -> Tensor:
        """Compute this rank's experts on rows that come from ranks, and return what is for each in the same order.

        Args:
            rows: from the first rank for each expert, then from the second.
            come: how many of each, (ranks, own experts).
            each: to each expert.
        """
        ranks, own = come.shape
        expert = torch.arange(own, device=rows.device).repeat(ranks)
        order = Order.by(expert.repeat_interleave(come.flatten(), output_size=len(rows)), own)
        return restored(self._here(sorted_rows(rows, order), order.counts, lambda: each), order)

    def _here(self, rows: Tensor, counts: Tensor, read: Callable[[], list[int]]) -> Tensor:
        """Compute this rank's experts, on rows in the order of experts.

        One that has got no rows computes on none, so that all weights get gradients, on every rank: who shards them
        further waits for these.

        Args:
            rows: of all experts.
            counts: how many each has, on the device, which grouped products read there.
            read: returns the same on the host, for products of one expert after the other.
        """
        weights = [_own_part(weight) for weight in (self.w1, self.w2, self.w3)]
        if _can_group(rows, weights):
            return grouped(rows, counts, *weights)
        return one_by_one(rows, read(), *weights)


def one_by_one(rows: Tensor, counts: Sequence[int], w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """Return what each expert makes of its rows, by products of its own.

    Args:
        rows: (sum of counts, hidden_size), in the order of experts.
        counts: how many rows each expert has; any may be 0.
        w1: (experts, inner_size, hidden_size).
        w2: (experts, hidden_size, inner_size).
        w3: as `w1`.
    """
    each = zip(rows.split(list(counts)), w1, w2, w3, strict=True)
    return torch.cat(
        [F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down) for part, gate, down, up in each]
    )


def grouped(rows: Tensor, counts: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """Return the same as `one_by_one` in three products, grouped by expert; the host need not know the counts.

    Args:
        rows: as there, in bfloat16, like the weights.
        counts: int64, on the device.
        w1, w2, w3: as there; sizes are multiples of 8, as torch's kernels want rows of whole 16 bytes.
    """
    ends = counts.cumsum(0, dtype=torch.int32)
    gate, up = (F.grouped_mm(rows, weight.mT, offs=ends) for weight in (w1, w3))
    return F.grouped_mm(F.silu(gate) * up, w2.mT, offs=ends)


def _can_group(rows: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether torch has grouped products for these on every device: of bfloat16, in rows of whole 16 bytes."""
    is_known = hasattr(F, "grouped_mm") and all(x.dtype == torch.bfloat16 for x in (rows, *weights))
    return is_known and all(size % 8 == 0 for size in weights[0].shape[1:])


def _own_part(weight: Tensor) -> Tensor:
    """Return this rank's shard of a parameter. Ranks that hold the same shard have computed on tokens of their own."""
    if not isinstance(weight, DTensor):
        return weight
    layout = Layout.of(weight)
    split = {layout.alias_name[axis] for chain in layout.splits(weight.dim()) for axis in chain}
    pending = {name: "sum" for name in layout.alias_name if name not in split}
    return to_local(weight, grad_layout=layout(*(layout.alias_placements or ()), partial=pending) if pending else None)
