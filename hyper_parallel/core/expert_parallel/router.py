"""Router, and what keeps the loads of experts even."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.checks import check, check_least
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.common.torch_compat import runs_eagerly
from hyper_parallel.core.expert_parallel.experts import SharedGroup

__all__ = ["SCORES", "Router", "Routing", "routers_of", "set_aux_scale", "take_aux", "update_expert_bias"]


# The router: top-k choice of experts per token, and the bias that balances their loads --------------------------------

SCORES = ("sigmoid", "softmax")

_SMALLEST_SUM = 1e-20


class Routing(NamedTuple):
    """Where tokens go.

    Attributes:
        chosen: the experts of each token, int64 (batch, seq, experts per token).
        weights: of these, as `chosen`.
    """

    chosen: Tensor
    weights: Tensor


class Router(nn.Module):
    """Chooses for each token the experts with the largest scores.

    >>> router = Router(num_experts=8, hidden_size=16, experts_per_token=2)
    >>> chosen, weights = router(torch.randn(3, 5, 16))
    >>> chosen.shape, weights.sum(-1).allclose(torch.ones(3, 5))
    (torch.Size([3, 5, 2]), True)

    Scores, chosen experts and weights are float32, or float64 for float64 tokens. The choice is by score plus `bias`,
    the weights by score alone. Two things keep the loads even, both after DeepSeek-V3 (arXiv:2412.19437, 2.1.2):

    * The bias, which `update_expert_bias` lifts after each step where an expert had fewer tokens than the mean, and
      lowers where more (arXiv:2408.15664).
    * An auxiliary loss of each sequence, the sum over experts of f_i P_i: f_i is the number of the sequence's T tokens
      that chose expert i times experts / (experts per token * T), P_i the mean of the token's share of expert i in the
      sum of its scores. No gradient goes through f_i, so the loss is a sum over tokens: each rank adds the terms of its
      own, for any split of sequences, and only f needs the whole sequence. (f_i counts what was chosen, bias included.)

    The loss is not returned: the weights pass its gradient on, in backward. There tokens are counted, too: so neither
    evaluation nor a forward that is computed again, as with activation checkpointing, counts.

    Args:
        num_experts: how many there are.
        hidden_size: width of a token.
        experts_per_token: how many each token chooses.
        score: "sigmoid" or "softmax".
        norm_weights: divide the weights of a token by their sum.
        routed_scale: multiplies the weights.
        bias_update_rate: of `update_expert_bias`; 0 leaves the bias alone.
        aux_loss_weight: of the auxiliary loss; 0 leaves it out.

    Attributes:
        weight: (num_experts, hidden_size).
        bias: (num_experts), a buffer, equal on all ranks.
        counts: tokens of each expert since the last update, an int64 buffer that is not saved.
        aux_sum: the auxiliary losses of all sequences since `take_aux`, this rank's terms; not saved.
        last_aux: those of the last forward; None before, and where there is none.
        aux_scale: multiplies the sum over sequences. None: 1 / batch, for the mean over the sequences here.
        sequence_ranks: groups over which sequences are split.
        token_ranks: of these, groups that the caller of `update_expert_bias` does not know of.
        copies: number of ranks that route the same tokens, of which each adds a share of the loss.

    Raises:
        TypeError: an argument of another kind.
        ValueError: no such kind of score, a width below 1, more experts per token than there are.
    """

    bias: Tensor
    counts: Tensor
    aux_sum: Tensor

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        experts_per_token: int,
        *,
        score: str = "sigmoid",
        norm_weights: bool = True,
        routed_scale: float = 1.0,
        bias_update_rate: float = 1e-3,
        aux_loss_weight: float = 1e-3,
    ) -> None:
        super().__init__()
        sizes = {"num_experts": num_experts, "hidden_size": hidden_size, "experts_per_token": experts_per_token}
        rates = {"routed_scale": routed_scale, "bias_update_rate": bias_update_rate, "aux_loss_weight": aux_loss_weight}
        check("cannot route", "int", **sizes)
        check("cannot route", "float", **rates)
        check("cannot route", "bool", norm_weights=norm_weights)
        check_least("cannot route", 1, hidden_size=hidden_size)
        if score not in SCORES:
            seen = f"score: {score!r}"
            raise InvalidValue("cannot route", "there is no such kind of score", seen, 'score="sigmoid"')
        if not 1 <= experts_per_token <= num_experts:
            blame = f"a token cannot choose {experts_per_token} of {num_experts} experts"
            seen = f"experts_per_token: {experts_per_token}   num_experts: {num_experts}"
            raise InvalidValue("cannot route", blame, seen, f"experts_per_token from 1 to {num_experts}")
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.score, self.norm_weights, self.routed_scale = score, norm_weights, routed_scale
        self.bias_update_rate, self.aux_loss_weight = bias_update_rate, aux_loss_weight
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.register_buffer("bias", torch.zeros(num_experts))
        self.register_buffer("counts", torch.zeros(num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("aux_sum", torch.zeros(()), persistent=False)
        self.last_aux: Tensor | None = None
        self.aux_scale: float | None = None
        self.sequence_ranks: tuple[SharedGroup, ...] = ()
        self.token_ranks: tuple[SharedGroup, ...] = ()
        self.copies = 1
        self.reset_parameters()

    def extra_repr(self) -> str:
        """Say what a token chooses."""
        return f"{self.num_experts}, experts_per_token={self.experts_per_token}, score={self.score}"

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight, and forget what was counted."""
        self.weight.normal_(0.0, self.weight.shape[-1] ** -0.5)
        self.reset_balance()

    @torch.no_grad()
    def reset_balance(self) -> None:
        """Zero bias and counts."""
        for buffer in (self.bias, self.counts, self.aux_sum):
            buffer.zero_()

    def forward(self, x: Tensor) -> Routing:
        """Return the experts of each token of x (batch, seq, hidden), and their weights.

        Communication: with an auxiliary loss, in training, for each axis that splits sequences one all_reduce of
        (batch, experts) counts; backward none.
        """
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(dtype), self.weight.to(dtype))
            scores = logits.sigmoid() if self.score == "sigmoid" else logits.softmax(-1)
            chosen = (scores.detach() + self.bias).topk(self.experts_per_token, dim=-1).indices
            weights = scores.gather(-1, chosen)
            if self.norm_weights:
                weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST_SUM)
            weights = weights * self.routed_scale
            if self.training and torch.is_grad_enabled():
                weights = self._balanced(scores, chosen, weights)
        return Routing(chosen, weights)

    @runs_eagerly
    def _balanced(self, scores: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weights, with what is to happen in backward."""
        counts = scores.new_zeros((len(chosen), self.num_experts), dtype=torch.int64)
        counts.scatter_add_(1, chosen.flatten(1), torch.ones_like(chosen.flatten(1)))
        own = counts.sum(0)
        aux = None
        if self.aux_loss_weight:
            for ranks in self.sequence_ranks:
                dist.all_reduce(counts, group=ranks.group)
            aux = self._aux(scores, counts)
            self.last_aux = aux.detach()
        return cast(Tensor, _Balance.apply(weights, aux, self, own, self._scale(len(chosen))))

    def _aux(self, scores: Tensor, counts: Tensor) -> Tensor:
        """Return the sum, over sequences, of the terms of the tokens that are here.

        Args:
            scores: (batch, seq, experts).
            counts: (batch, experts), of whole sequences.
        """
        length = (counts.sum(1, keepdim=True) // self.experts_per_token).clamp(min=1).to(scores.dtype)
        frequency = counts * (self.num_experts / self.experts_per_token) / length
        shares = scores / (scores.sum(-1, keepdim=True) + _SMALLEST_SUM) if self.score == "sigmoid" else scores
        return (frequency / length * shares.sum(1)).sum() / self.copies

    def _scale(self, batch: int) -> float:
        scale = 1 / max(batch, 1) if self.aux_scale is None else self.aux_scale
        return self.aux_loss_weight * scale


class _Balance(torch.autograd.Function):
    """Passes weights on; backward adds the gradient of the auxiliary loss, and counts."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, aux: Tensor | None, router: Router, counts: Tensor, scale: float) -> Tensor:
        ctx.router, ctx.counts, ctx.scale = router, counts, scale
        ctx.aux = None if aux is None else aux.detach()
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        router, aux = ctx.router, ctx.aux
        with torch.no_grad():
            router.counts.add_(ctx.counts)
            if aux is not None:
                router.aux_sum.add_(aux)
        return grad, None if aux is None else torch.full_like(aux, ctx.scale), None, None, None


# Load balance of experts in a training loop ---------------------------------------------------------------------------


def routers_of(model: nn.Module) -> Iterator[tuple[str, Router]]:
    """Yield the routers of a model with their names, in its order."""
    for name, module in model.named_modules():
        if isinstance(module, Router):
            yield name, module


def set_aux_scale(model: nn.Module, scale: float | None) -> None:
    """Say what the auxiliary losses of sequences are multiplied by, beside their weight.

        set_aux_scale(model, 1 / sequences_in_the_global_batch)

    With gradients that are added up over ranks and micro-batches, this makes the total loss the mean cross-entropy plus
    the weight times the mean over all sequences of the layers' auxiliary losses.

    Args:
        model: with routers.
        scale: None: 1 / the sequences that a router sees at a time.

    Raises:
        TypeError: an argument of another kind, as for the functions below.
    """
    check("cannot scale auxiliary losses", "float | None", scale=scale)
    for _, router in routers_of(model):
        router.aux_scale = scale


def take_aux(model: nn.Module) -> dict[str, Tensor]:
    """Return, and forget, the auxiliary losses since the last call, by name of the router.

    Each is the sum over the sequences that were trained on, of this rank's terms: over all ranks with different tokens
    (or shares of the work on the same) they add up to the sum over all sequences.

    Args:
        model: with routers.
    """
    taken = {}
    for name, router in routers_of(model):
        taken[name] = router.aux_sum.clone()
        router.aux_sum.zero_()
    return taken


@torch.no_grad()
def update_expert_bias(
    model: nn.Module, groups: Iterable[dist.ProcessGroup | DeviceMesh] = (), *, forget: bool = False
) -> None:
    """Lift the bias of experts that had fewer tokens than the mean, lower that of others, and count anew.

        optimizer.step()
        update_expert_bias(model, [mesh["dp_shard"], mesh["ep"], mesh["cp"]])

    bias += rate * sign(mean - count), as arXiv:2408.15664, algorithm 1. The counts are those of all backward passes
    since the last update, on all ranks with different tokens.

    Args:
        model: with routers. Of a pipeline stage, its own.
        groups: groups, or meshes of one axis, over which ranks have different rows or parts of sequences: all axes but
            tp and pp; one for several axes, or one for each, but none twice. What splits sequences only between a
            router and its experts, as tp does where no expert is split, `expert_parallel` has noted.
        forget: only count anew, after a step that was not taken.

    Communication: per group one all_reduce of (layers, experts) counts; to forget, none.
    """
    check("cannot update the bias of experts", "bool", forget=forget)
    check("cannot update the bias of experts", "list", groups=groups)  # ranks would reduce over a set in any order
    for number, group in enumerate(groups):
        if not isinstance(group, DeviceMesh):
            check("cannot update the bias of experts", "group", **{f"groups[{number}]": group})
    found = [router for _, router in routers_of(model)]
    if not found:
        return
    if forget:
        for router in found:
            router.counts.zero_()
        return
    for experts in sorted({router.num_experts for router in found}):
        _update([router for router in found if router.num_experts == experts], list(groups))


def _update(routers: list[Router], groups: list[dist.ProcessGroup | DeviceMesh]) -> None:
    counts = torch.stack([router.counts for router in routers])
    over = [group.get_group() if isinstance(group, DeviceMesh) else group for group in groups]
    over += [ranks.group for ranks in routers[0].token_ranks]
    for group in over:
        dist.all_reduce(counts, group=group)
    less = torch.sign(counts.sum(1, keepdim=True) - counts * counts.shape[1])  # of mean - count, in whole numbers
    for router, direction in zip(routers, less, strict=True):
        router.bias.add_(direction * router.bias_update_rate)
        router.counts.zero_()
