"""A Llama whose feed-forwards are mixtures of experts, after DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).

Everything but the feed-forward is the Llama's. A router sends each token to some of many small experts, shared experts
see every token, and what they return is added up. No token is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor, nn

from hyper_parallel.core.common.checks import (
    check_choice,
    check_elements,
    check_fields,
    check_least,
    check_listed,
    read_int,
)
from hyper_parallel.core.expert_parallel.experts import GroupedExperts
from hyper_parallel.core.expert_parallel.router import SCORES, Router
from hyper_parallel.models.llama import Block, FeedForward, Llama, LlamaConfig


@dataclass(frozen=True)
class ExpertsConfig:
    """The shape of the feed-forward of a model with experts.

    Args:
        num_experts: experts of a layer.
        experts_per_token: how many of them each token goes to.
        num_shared_experts: experts that all tokens go to; they are computed as one of their joint width.
        expert_intermediate_size: width of the SwiGLU feed-forward of one expert.
        num_dense_layers: how many layers, the first ones, have a dense feed-forward of `intermediate_size` instead.
        score: "sigmoid" or "softmax": how the router's logits become scores.
        norm_weights: divide the weights of a token's experts by their sum.
        routed_scale: multiplies the weights.
        bias_update_rate: of the bias that balances loads without a loss; 0: off. See `update_expert_bias`.
        aux_loss_weight: of the loss that balances loads within a sequence; 0: off. See `Router`.

    Raises:
        TypeError: a value of another kind.
        ValueError: sizes below their least, more experts per token than there are, no such score.
    """

    num_experts: int = 8
    experts_per_token: int = 2
    num_shared_experts: int = 1
    expert_intermediate_size: int = 96
    num_dense_layers: int = 0
    score: str = "sigmoid"
    norm_weights: bool = True
    routed_scale: float = 1.0
    bias_update_rate: float = 1e-3
    aux_loss_weight: float = 1e-3

    def __post_init__(self) -> None:
        asked = "cannot describe a mixture of experts"
        check_fields(asked, self)
        for least, names in (
            (1, ("num_experts", "experts_per_token", "expert_intermediate_size")),
            (0, ("num_shared_experts", "num_dense_layers", "routed_scale", "bias_update_rate", "aux_loss_weight")),
        ):
            check_least(asked, least, **{name: getattr(self, name) for name in names})
        check_listed(asked, num_experts=self.num_experts)
        asked_of = f"cannot send each token to some of num_experts={self.num_experts}"
        read_int(asked_of, "experts_per_token", self.experts_per_token, 1, most=self.num_experts)
        check_choice(asked, "score", self.score, SCORES)

    @property
    def shared_intermediate_size(self) -> int:
        """Joint width of the shared experts."""
        return self.num_shared_experts * self.expert_intermediate_size

    @property
    def active_intermediate_size(self) -> int:
        """Joint width of the experts that compute a token, the shared ones among them."""
        return (self.experts_per_token + self.num_shared_experts) * self.expert_intermediate_size

    def is_dense(self, layer: int) -> bool:
        """Tell whether the layer with this number has a dense feed-forward."""
        return layer < self.num_dense_layers


@dataclass(frozen=True)
class MoEConfig(ExpertsConfig, LlamaConfig):
    """The shape of a Llama with experts: the arguments are those of `LlamaConfig`, then those of `ExpertsConfig`.

    >>> config = MoEConfig(num_experts=16, experts_per_token=2)
    >>> config.num_parameters(), config.num_active_parameters()
    (2778240, 713856)

    Raises:
        ValueError: as for both; more dense layers than there are layers.
    """

    def __post_init__(self) -> None:
        LlamaConfig.__post_init__(self)
        ExpertsConfig.__post_init__(self)
        asked = f"cannot make some of num_hidden_layers={self.num_hidden_layers} dense"
        read_int(asked, "num_dense_layers", self.num_dense_layers, 0, most=self.num_hidden_layers)
        sizes = {
            name: getattr(self, name) for name in ("expert_intermediate_size", "num_experts", "num_shared_experts")
        }
        check_elements("cannot describe a mixture of experts", "its parameters", self.num_parameters(), **sizes)

    def num_parameters(self) -> int:
        """Count the parameters without building the model."""
        return self._count(self.num_experts)

    def num_active_parameters(self) -> int:
        """Count the parameters that one token uses: of the experts, only those that it goes to."""
        return self._count(self.experts_per_token)

    def _count(self, experts: int) -> int:
        d = self.hidden_size
        mixture = self.num_experts * d + 3 * d * (experts + self.num_shared_experts) * self.expert_intermediate_size
        layers = self.num_hidden_layers - self.num_dense_layers
        return super().num_parameters() + layers * (mixture - 3 * d * self.intermediate_size)


class MixtureOfExperts(nn.Module):
    """The feed-forward of a layer: what a token's experts return, weighted, plus what the shared ones do.

    Attributes:
        router: chooses the experts; its `aux_scale` and `last_aux` are about the auxiliary loss.
        experts: all experts.
        shared: the shared ones; None: there are none.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.router = Router(
            config.num_experts,
            config.hidden_size,
            config.experts_per_token,
            score=config.score,
            norm_weights=config.norm_weights,
            routed_scale=config.routed_scale,
            bias_update_rate=config.bias_update_rate,
            aux_loss_weight=config.aux_loss_weight,
        )
        self.experts = GroupedExperts(config.num_experts, config.hidden_size, config.expert_intermediate_size)
        self.shared: FeedForward | None = None
        if config.num_shared_experts:
            self.shared = FeedForward(replace(config, intermediate_size=config.shared_intermediate_size))

    def forward(self, x: Tensor) -> Tensor:
        """Map x (batch, seq, hidden) to the same shape."""
        chosen, weights = self.router(x)
        if self.shared is None:
            return cast(Tensor, self.experts(x, chosen, weights))
        sent = self.experts.send(x, chosen)
        shared = self.shared(x)  # while tokens are on their way
        return cast(Tensor, self.experts(x, chosen, weights, sent) + shared)


class MoEBlock(Block):
    """One layer with a mixture of experts."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config)
        self.mlp = MixtureOfExperts(config)  # type: ignore[assignment]


class MoELlama(Llama):
    """The language model: token ids (batch, seq) in, logits (batch, seq, vocab_size) out.

    >>> import torch
    >>> model = MoELlama.build(MoEConfig(num_dense_layers=1), seed=0)
    >>> model(torch.zeros(2, 16, dtype=torch.long)).shape
    torch.Size([2, 16, 256])
    >>> [type(layer.mlp).__name__ for layer in model.layers]
    ['FeedForward', 'MixtureOfExperts', 'MixtureOfExperts', 'MixtureOfExperts']

    Everything that is said of `Llama` holds: `keep`, `positions`, `build`, building on the meta device. In training,
    call `update_expert_bias` after each step of the optimizer.
    """

    config: MoEConfig
    residual_weights = (*Llama.residual_weights, "experts.w2", "shared.w2.weight")

    def build_block(self, index: int) -> nn.Module:
        """Make layer number `index`."""
        return Block(self.config) if self.config.is_dense(index) else MoEBlock(self.config)

    def _fill(self, draw: Callable[[Tensor, float], Tensor]) -> None:
        super()._fill(draw)
        for module in self.modules():
            if isinstance(module, Router):
                module.reset_balance()
