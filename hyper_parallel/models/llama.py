"""A small Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Read it top to bottom. The model knows nothing about ranks. A parallelism changes three things from outside:
`Attention.attend` (context parallelism computes it over all ranks), `Llama.positions` (which positions the tokens of
this rank have), and `Llama.keep` (a pipeline stage keeps only some of the layers).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyper_parallel.core.common.checks import (
    check,
    check_above,
    check_elements,
    check_fields,
    check_least,
    check_listed,
)
from hyper_parallel.core.common.errors import InvalidValue

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama.

    >>> LlamaConfig(hidden_size=256, num_attention_heads=8, num_key_value_heads=2).head_dim
    32

    Args:
        vocab_size: number of different tokens; 256 for bytes.
        hidden_size: width of the residual stream.
        intermediate_size: width of the SwiGLU feed-forward.
        num_hidden_layers: number of blocks.
        num_attention_heads: query heads; must divide hidden_size into an even head size.
        num_key_value_heads: key and value heads; must divide num_attention_heads.
        max_seq_len: longest sequence, in tokens.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square in RMSNorm.
        init_std: standard deviation of fresh weights; what writes to the residual stream gets it over sqrt(2 * layers).
        tie_embeddings: use the embedding as the output head.
        head_size: size of one attention head; None: hidden_size / num_attention_heads.
        qk_norm: normalise queries and keys, head by head, before positions turn them.
        rope_factor: what slow rotary frequencies are divided by, for sequences longer than in pre-training, as in
            Llama 3.1; 1: none are.
        rope_low_freq_factor: frequencies that turn less often than this in `rope_original_seq_len` tokens are slow.
        rope_high_freq_factor: those that turn more often stay as they are; what is between the two is mixed.
        rope_original_seq_len: the longest sequence of pre-training, in tokens.

    Raises:
        TypeError: a value of another kind.
        ValueError: a size below one, a number out of its bounds, more than can be counted, or head counts that do not
            divide.
    """

    vocab_size: int = 256
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_seq_len: int = 256
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    init_std: float = 0.05
    tie_embeddings: bool = False
    head_size: int | None = None
    qk_norm: bool = False
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_seq_len: int = 8192

    def __post_init__(self) -> None:
        asked = "cannot describe a Llama"
        check_fields(asked, self)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_seq_len",
        ):
            check_least(asked, 1, **{name: getattr(self, name)})
        for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
            check_listed(asked, **{name: getattr(self, name)})
        check_least(asked, 0, norm_eps=self.norm_eps, init_std=self.init_std)
        check_least(asked, 1, rope_factor=self.rope_factor, rope_original_seq_len=self.rope_original_seq_len)
        check_above(asked, 0, "rope_theta=10_000.0", rope_theta=self.rope_theta)
        low, high = self.rope_low_freq_factor, self.rope_high_freq_factor
        if not 0 < low < high < math.inf:
            blame, seen = "rope_low_freq_factor must be above 0 and below rope_high_freq_factor", f"{low} and {high}"
            raise InvalidValue(asked, blame, f"they are: {seen}", "1.0 and 4.0")
        widths = ("vocab_size", "hidden_size", "intermediate_size", "head_size", "num_hidden_layers")
        sizes = {name: size for name in widths if (size := getattr(self, name)) is not None}
        check_elements(asked, "its parameters", self.num_parameters(), **sizes)
        check_elements(asked, "the rotary tables", self.max_seq_len * self.head_dim, max_seq_len=self.max_seq_len)
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if self.head_size is not None and (self.head_size < 2 or self.head_size % 2):
            seen, hint = f"head_size: {self.head_size}", f"head_size={max(2, self.head_size + self.head_size % 2)}"
            raise InvalidValue(asked, "rotary positions turn pairs, so head_size is even", seen, hint)
        if self.head_size is None and self.hidden_size % (2 * heads):
            even = 2 * heads * math.ceil(self.hidden_size / 2 / heads)
            blame = f"hidden_size does not split into {heads} heads of an even size, as rotary positions turn pairs"
            seen = f"hidden_size: {self.hidden_size}   num_attention_heads: {heads}"
            raise InvalidValue(asked, blame, seen, f"hidden_size={even}")
        if heads % kv_heads:
            fits = [n for n in range(1, heads + 1) if heads % n == 0]
            blame = f"num_key_value_heads={kv_heads} cannot be shared among num_attention_heads={heads} evenly"
            seen = f"num_attention_heads: {heads}   num_key_value_heads: {kv_heads}"
            raise InvalidValue(asked, blame, seen, f"num_key_value_heads = one of {fits}")

    @property
    def head_dim(self) -> int:
        """Size of one attention head.

        >>> LlamaConfig(hidden_size=128, num_attention_heads=4, head_size=64).head_dim
        64
        """
        return self.head_size or self.hidden_size // self.num_attention_heads

    def num_parameters(self) -> int:
        """Count the parameters without building the model.

        >>> LlamaConfig().num_parameters()
        853120
        """
        d, kv = self.hidden_size, self.num_key_value_heads * self.head_dim
        attention = 2 * d * self.num_attention_heads * self.head_dim + 2 * d * kv + 2 * self.head_dim * self.qk_norm
        block = 2 * d + attention + 3 * d * self.intermediate_size
        head = 0 if self.tie_embeddings else self.vocab_size * d
        return self.vocab_size * d + self.num_hidden_layers * block + d + head


def _rope_tables(config: LlamaConfig, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (max_seq_len, head_dim); the angle of pair i at place p is p * theta^(-2i / head_dim)."""
    pair = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    position = torch.arange(config.max_seq_len, device=device, dtype=torch.float32)
    angle = torch.outer(position, _lowered(config.rope_theta**-pair, config)).repeat(1, 2)
    return angle.cos(), angle.sin()


def _lowered(frequency: Tensor, config: LlamaConfig) -> Tensor:
    """Lower rotary frequencies for longer sequences, as `apply_scaling` of github.com/meta-llama/llama-models does.

    What turns more than high times in `rope_original_seq_len` tokens stays, what turns less than low times is divided
    by `rope_factor`, and between the two a straight line in the number of turns mixes both.
    """
    if config.rope_factor == 1:
        return frequency
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns = config.rope_original_seq_len * frequency / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequency / config.rope_factor + kept * frequency


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + head_dim/2]) of x (batch, heads, seq, head_dim) by its angle (RoFormer, Su 2021)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries (batch, heads, seq, head_dim), keys and values with maybe fewer heads -> as the queries."""

Positions = Callable[[int], Tensor]
"""How many tokens this rank has -> their positions in the whole sequence, (seq,)."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to what is not later; query head i uses key and value head i // (heads / key and value heads).

    Args:
        q: (batch, heads, seq, head_dim).
        k: (batch, key and value heads, seq, head_dim).
        v: as `k`.
    """
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    """Causal grouped-query attention: several query heads share one key and value head.

    Attributes:
        attend: what happens between the projections; `causal_attention` unless it is replaced.
        q_norm: of each query head; None unless the config says `qk_norm`.
        k_norm: of each key head.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        size, kv_size = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.wq = nn.Linear(config.hidden_size, size, bias=False)
        self.wk = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.wv = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.wo = nn.Linear(size, config.hidden_size, bias=False)
        norms = (nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None for _ in range(2))
        self.q_norm, self.k_norm = norms
        self.attend: Attend = causal_attention

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map x (batch, seq, hidden) to the same shape."""
        # -1: under tensor parallelism a rank holds only some of the heads; and under data parallelism maybe no rows.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        return self.wo(self.attend(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (batch, seq, hidden) to the same shape."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each normalised before and added back after."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map x (batch, seq, hidden) to the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """The language model: token ids (batch, seq) in, logits (batch, seq, vocab_size) out.

    >>> model = Llama.build(LlamaConfig(), seed=0)
    >>> model(torch.zeros(2, 16, dtype=torch.long)).shape
    torch.Size([2, 16, 256])

    Built under `torch.device("meta")` it takes no memory. `to_empty` and `init_weights` make it real; so does
    `hyper_parallel.init_parameters`, also when its parameters are split over ranks by then.

    Attributes:
        embed: the embedding; None in a pipeline stage that starts with a later layer.
        norm: before the head; None, as `head` is, in a stage that does not end the model.
        head: the projection to the vocabulary.
        positions: where this rank's tokens stand in the sequence; None: all tokens are here, in order.
    """

    cos: Tensor
    sin: Tensor
    embed: nn.Embedding | None
    norm: nn.RMSNorm | None
    head: nn.Linear | None
    residual_weights: tuple[str, ...] = ("attention.wo.weight", "mlp.w2.weight")  # they write to the residual stream

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.positions: Positions | None = None
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.build_block(index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        cos, sin = _rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def build_block(self, index: int) -> nn.Module:
        """Make layer number `index`; a model whose blocks differ overrides this."""
        return Block(self.config)

    def keep(self, layers: Container[int], *, embed: bool, head: bool) -> Self:
        """Drop, in place, everything but some layers: the rest is one stage of a pipeline.

        >>> stage = Llama(LlamaConfig(num_hidden_layers=4)).keep(range(2, 4), embed=False, head=True)
        >>> [name for name, _ in stage.named_children()], [name for name, _ in stage.layers.named_children()]
        (['layers', 'norm', 'head'], ['2', '3'])

        Parameters keep the names that they have in the whole model. A stage without the embedding takes activations
        (batch, seq, hidden) in place of tokens; one without the head returns such.

        Args:
            layers: numbers of the layers to keep.
            embed: keep the embedding.
            head: keep the last norm and the head. Where head and embedding are one weight, and the embedding goes, the
                head keeps it under its own name, "head.weight".

        Raises:
            TypeError: an argument of another kind.
        """
        check("cannot keep a part of the model", "bool", embed=embed, head=head)
        for name in [name for name, _ in self.layers.named_children() if int(name) not in layers]:
            del self.layers._modules[name]  # `del self.layers[i]` would number those after it anew
        if not embed:
            self.embed = None
        if not head:
            self.norm = self.head = None
        return self

    @classmethod
    def build(cls, config: LlamaConfig, seed: int = 0, device: torch.device | str = "cpu") -> Llama:
        """Build the model with fresh weights that depend on `config` and `seed` only.

        Every rank that calls this holds the same weights, whatever the number of ranks: no broadcast is needed.

        Args:
            config: the shape.
            seed: of the weights.
            device: where the weights end up; they are drawn on the CPU, so all devices get the same.

        Raises:
            TypeError: an argument of another kind.
        """
        check("cannot build a Llama", "device", device=device)
        with torch.device("meta"):
            model = cls(config)
        model.to_empty(device=device)
        model.init_weights(seed)
        return model

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Fill all weights from `seed`, one parameter after the other: the same values on every device and rank.

        Args:
            seed: of the weights; torch's default generator is neither read nor moved.

        Raises:
            ValueError: the weights are already split over ranks; call this before `fully_shard`.
        """
        if any(isinstance(param, torch.distributed.tensor.DTensor) for param in self.parameters()):
            blame, hint = "these are sharded already", "model.init_weights(seed) first, fully_shard(model) after it"
            raise InvalidValue("cannot draw the weights", blame, "parameters: DTensors", hint)
        if self.config.tie_embeddings and self.head is not None and self.embed is not None:
            self.head.weight = self.embed.weight  # again: moving a model off the meta device unties it
        generator = torch.Generator("cpu").manual_seed(seed)
        self._fill(
            lambda param, std: param.copy_(
                torch.empty(param.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
            )
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill all weights in place, as `init_weights` distributes them: for `hyper_parallel.init_parameters`.

        That makes the draws the same for any split of the weights; called by itself this draws from torch's generator.
        """
        self._fill(lambda param, std: param.normal_(0.0, std))

    def _fill(self, draw: Callable[[Tensor, float], Tensor]) -> None:
        """Fill matrices by `draw`, given their standard deviation, one after the other, and the rest with constants."""
        residual_std = self.config.init_std / math.sqrt(2 * self.config.num_hidden_layers)
        for name, param in self.named_parameters():
            if ".lora." in name:
                continue  # an adapter fills itself
            if param.ndim == 1:
                param.fill_(1.0)
            else:
                is_residual = name.endswith(self.residual_weights)
                draw(param, residual_std if is_residual else self.config.init_std)
        cos, sin = _rope_tables(self.config)
        self.cos.copy_(cos)
        self.sin.copy_(sin)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the next token at every position.

        Args:
            tokens: ids (batch, seq), seq at most `config.max_seq_len`; activations (batch, seq, hidden) where there is
                no embedding.

        Returns:
            Logits (batch, seq, vocab_size); activations where there is no head.

        Raises:
            ValueError: seq is longer than `config.max_seq_len`.
        """
        seq = tokens.shape[1]
        if seq > self.config.max_seq_len:
            seen, hint = f"max_seq_len: {self.cos.shape[0]}", f"max_seq_len={seq} in the config, or shorter sequences"
            asked = f"cannot compute with a sequence of {seq} tokens"
            raise InvalidValue(asked, "the model was built for shorter ones", seen, hint)
        x = tokens if self.embed is None else self.embed(tokens)
        place: slice | Tensor = slice(seq) if self.positions is None else self.positions(seq)
        cos, sin = self.cos[place], self.sin[place]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))
