"""GPT in the variants that published runs of Megatron, MPT, BLOOM and Nemotron have.

Positions are learned, rotary, or a bias of the scores (ALiBi); the feed-forward is GELU, squared ReLU, or gated. The
names of its parts and its hooks (`attend`, `positions`, `keep`) are those of `hyper_parallel.models.Llama`, so what
arranges a Llama on ranks arranges this as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.published.zoo import FusedAttention, dropped
from hyper_parallel.core.shard.sharding_plan import ShardingPlan
from hyper_parallel.models.llama import Positions
from hyper_parallel.models.plans import MeshLike, Streams, add_entries, check_heads, reshard_gathered
from sim.mesh.models import short_count
from sim.mesh.recipe import Recipe
from sim.mesh.spec import ModelSpec

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["GPT", "GPTConfig", "GPTSpec", "gpt3_175b", "gpt_plan", "gpt_tiny"]


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    >>> GPTConfig(hidden_size=64, num_attention_heads=4).intermediate
    256

    Args:
        vocab_size: number of different tokens, as padded.
        hidden_size: width of the residual stream.
        num_hidden_layers: number of blocks.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads; None: as many.
        intermediate_size: width of the feed-forward; None: 4 * hidden_size.
        head_size: of one head; None: hidden_size / num_attention_heads.
        max_seq_len: longest sequence, the length of learned positions.
        positions: "learned", "rotary" or "alibi".
        activation: "gelu", "squared-relu" or "swiglu", which is gated, with a third matrix.
        bias: linear layers and LayerNorms have biases.
        dropout: of the embedding and of what is added to the residual stream.
        attention_dropout: of the attention's weights.
        tie_embeddings: use the embedding as the output head.
        embedding_norm: normalise the embedding, as BLOOM does.
        norm_eps: of norms.
    """

    vocab_size: int = 512
    hidden_size: int = 64
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    head_size: int | None = None
    max_seq_len: int = 256
    positions: str = "learned"
    activation: str = "gelu"
    bias: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    tie_embeddings: bool = True
    embedding_norm: bool = False
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.head_size or self.hidden_size // self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def intermediate(self) -> int:
        """Width of the feed-forward."""
        return self.intermediate_size or 4 * self.hidden_size

    @property
    def joins_qkv(self) -> bool:
        """Whether one matrix makes queries, keys and values."""
        return True

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward has a third matrix."""
        return self.activation == "swiglu"

    def num_parameters(self) -> int:
        """Count the parameters without building the model.

        >>> with torch.device("meta"):
        ...     model = GPT(GPTConfig())
        >>> GPTConfig().num_parameters() == sum(param.numel() for param in model.parameters())
        True
        """
        d, f, size = self.hidden_size, self.intermediate, self.head_dim
        q, qkv = self.num_attention_heads * size, (self.num_attention_heads + 2 * self.kv_heads) * size
        wide = f * (2 if self.is_gated else 1)
        norm = d * (2 if self.bias else 1)
        block = d * (qkv + q + wide + f) + 2 * norm + (qkv + wide + 2 * d) * self.bias
        ends = self.vocab_size * d * (1 if self.tie_embeddings else 2) + norm * (1 + self.embedding_norm)
        return self.num_hidden_layers * block + ends + self.max_seq_len * d * (self.positions == "learned")

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of forward and backward per token: 6 for each weight of a matrix, and attention in full.

        >>> config = GPTConfig(num_hidden_layers=2, vocab_size=100)
        >>> config.flops_per_token(10) == 6 * (2 * 12 * 64**2 + 100 * 64) + 12 * 2 * 64 * 10
        True
        """
        d, q, size = self.hidden_size, self.num_attention_heads * self.head_dim, self.head_dim
        block = d * (2 * q + 2 * self.kv_heads * size + self.intermediate * (3 if self.is_gated else 2))
        attention = 12 * self.num_hidden_layers * q * seq_len
        return 6.0 * (self.num_hidden_layers * block + self.vocab_size * d) + attention


def _norm(config: GPTConfig) -> nn.Module:
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.bias)


class Attention(nn.Module):
    """Causal attention; queries, keys and values are one matrix, whose rows are those of one key head after the other.

    Attributes:
        attend: what happens between the projections.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim, self.shared_by = config.head_dim, config.num_attention_heads // config.kv_heads
        self.attention_dropout = config.attention_dropout
        width = config.num_attention_heads * config.head_dim
        self.wqkv = nn.Linear(config.hidden_size, width + 2 * config.kv_heads * config.head_dim, bias=config.bias)
        self.wo = nn.Linear(width, config.hidden_size, bias=False)  # its bias is the block's
        self.attend: Callable[..., Tensor] = FusedAttention(config.attention_dropout)

    def forward(self, x: Tensor, *where: Tensor) -> Tensor:
        """Map x (batch, seq, hidden) to the same shape; see `GPT.where` for the positions."""
        # -1: under tensor parallelism a rank holds only some of the heads.
        groups = self.wqkv(x).unflatten(-1, (-1, self.shared_by + 2, self.head_dim))
        q, k, v = groups.split((self.shared_by, 1, 1), dim=3)
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (q, k, v))
        if len(where) == 2:
            q, k = (_rotate(part, *where) for part in (q, k))
        out = self.attend(q, k, v, where[0]) if len(where) == 1 else self.attend(q, k, v)
        return self.wo(out.transpose(1, 2).flatten(2))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class FeedForward(nn.Module):
    """w2(activation(w1 x)), or w2(activation(w1 x) * w3 x)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.w1 = nn.Linear(config.hidden_size, config.intermediate, bias=config.bias)
        self.w2 = nn.Linear(config.intermediate, config.hidden_size, bias=False)  # its bias is the block's
        self.w3: nn.Linear | None = None
        if config.is_gated:
            self.w3 = nn.Linear(config.hidden_size, config.intermediate, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (batch, seq, hidden) to the same shape."""
        inner = self.w1(x)
        if self.activation == "squared-relu":
            return self.w2(F.relu(inner).square())
        inner = F.silu(inner) if self.activation == "swiglu" else F.gelu(inner, approximate="tanh")
        return self.w2(inner if self.w3 is None else inner * self.w3(x))


class Block(nn.Module):
    """One layer. It adds the biases of what is split by columns itself: there each rank has only a share of a sum."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = FeedForward(config)
        self.attention_bias = nn.Parameter(torch.zeros(config.hidden_size)) if config.bias else None
        self.mlp_bias = nn.Parameter(torch.zeros(config.hidden_size)) if config.bias else None

    def reset_parameters(self) -> None:
        """Zero the biases."""
        for bias in (self.attention_bias, self.mlp_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor, *where: Tensor) -> Tensor:
        """Map x (batch, seq, hidden) to the same shape."""
        x = x + self._dropped(self.attention(self.attention_norm(x), *where), self.attention_bias)
        return x + self._dropped(self.mlp(self.mlp_norm(x)), self.mlp_bias)

    def _dropped(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return dropped(x if bias is None else x + bias, self.dropout, self.training)


class Dropout(nn.Module):
    """Zeroes elements at random, in training."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        """Map x to the same shape."""
        return dropped(x, self.probability, self.training)


class Places(nn.Module):
    """Learned positions: numbers of positions (1, seq) to (1, seq, hidden)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.max_seq_len, config.hidden_size))

    def reset_parameters(self) -> None:
        """Draw the weight."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, places: Tensor) -> Tensor:
        """Look positions up."""
        return F.embedding(places, self.weight)


class GPT(nn.Module):
    """The language model: token ids (batch, seq) in, logits (batch, seq, vocab_size) out.

    >>> GPT(GPTConfig())(torch.zeros(2, 16, dtype=torch.long)).shape
    torch.Size([2, 16, 512])

    Attributes:
        embed: the embedding; None in a stage of a pipeline that starts with a later layer, as `places`, `embed_norm`
            and `embed_dropout` are, which models without such do not have either.
        norm: before the head; None, as `head` is, in a stage that does not end the model.
        positions: where this rank's tokens stand in the sequence; None: all tokens are here, in order.
        heads: those of this rank, for ALiBi; all unless `gpt_plan` has split them.
    """

    cos: Tensor
    sin: Tensor
    slopes: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.positions: Positions | None = None
        self.heads = slice(None)
        self.embed: nn.Module | None = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places: nn.Module | None = Places(config) if config.positions == "learned" else None
        self.embed_norm: nn.Module | None = _norm(config) if config.embedding_norm else None
        self.embed_dropout: nn.Module | None = Dropout(config.dropout) if config.dropout else None
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm: nn.Module | None = _norm(config)
        head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            head.weight = self.embed.weight
        self.head: nn.Module | None = head
        self._make_tables()

    def _make_tables(self) -> None:
        config = self.config
        if config.positions == "rotary":
            pair = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
            angle = torch.outer(torch.arange(config.max_seq_len, dtype=torch.float32), 10_000.0**-pair).repeat(1, 2)
            self.register_buffer("cos", angle.cos(), persistent=False)
            self.register_buffer("sin", angle.sin(), persistent=False)
        if config.positions == "alibi":  # Press et al. 2022, section 3: slopes 2^(-8 i / heads)
            heads = config.num_attention_heads
            slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=torch.float32) / heads)
            self.register_buffer("slopes", slopes, persistent=False)

    def keep(self, layers: Container[int], *, embed: bool, head: bool) -> Self:
        """Drop, in place, everything but some layers, as `Llama.keep`.

        >>> stage = GPT(GPTConfig()).keep(range(2, 4), embed=False, head=True)
        >>> [name for name, _ in stage.named_children()]
        ['layers', 'norm', 'head']
        """
        for name in [name for name, _ in self.layers.named_children() if int(name) not in layers]:
            del self.layers._modules[name]  # `del self.layers[i]` would number those after it anew
        if not embed:
            self.embed = self.places = self.embed_norm = self.embed_dropout = None
        if not head:
            self.norm = self.head = None
        return self

    def where(self, seq: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return what attention gets of positions: cosines and sines; a bias of the scores; or nothing.

        Args:
            seq: tokens that this rank has.
            device: of the model.
        """
        kind = self.config.positions
        place: slice | Tensor = slice(seq) if self.positions is None else self.positions(seq)
        if kind == "rotary":
            return self.cos[place], self.sin[place]
        if kind == "alibi":
            # A softmax is blind to what all scores of a query share, so the bias is that of the key's place alone.
            return (self.slopes[self.heads, None, None] * torch.arange(seq, device=device),)
        return ()

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the next token at every position.

        Args:
            tokens: ids (batch, seq); activations (batch, seq, hidden) where there is no embedding.
        """
        x = tokens
        seq, device = tokens.shape[1], tokens.device
        if self.embed is not None:
            x = self.embed(tokens)
            if self.places is not None:
                place = torch.arange(seq, device=device) if self.positions is None else self.positions(seq)
                x = x + self.places(place.unsqueeze(0))
            for step in (self.embed_norm, self.embed_dropout):
                x = x if step is None else step(x)
        where = self.where(seq, device)
        for layer in self.layers:
            x = layer(x, *where)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def gpt_plan(
    model: GPT | GPTConfig,
    mesh: MeshLike,
    *,
    tp: str | None = "tp",
    dp: str | Sequence[str] | None = None,
    sequence_parallel: bool = True,
    reshard_inputs: bool = False,
    logits: str = "split",
) -> ShardingPlan:
    """Return the plan of a GPT for `shard_module`; see `hyper_parallel.models.plans.llama_plan`.

    >>> gpt_plan(GPTConfig(), {"tp": 2}).plan["layers.*.attention.wqkv.bias"]
    ('tp',)

    Args:
        model: the model, a stage of it, or its config. A model with ALiBi is passed which heads the calling rank has.
        mesh: names and sizes of the axes; for a model with ALiBi, the DeviceMesh.
        tp: the axis that splits heads, inner width and vocabulary.
        dp: the axes that split the batch. Default: all others.
        sequence_parallel: split the residual stream over the sequence, along tp.
        reshard_inputs: gather the inputs of split modules again in backward.
        logits: "split", "whole" or "local".

    Raises:
        ValueError: axes that do not exist, heads that the ranks along tp cannot share evenly.
    """
    asked = "cannot plan the GPT"
    config = model.config if isinstance(model, GPT) else model
    streams = Streams.on(asked, mesh, tp=tp, dp=dp, sequence_parallel=sequence_parallel)
    heads = {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.kv_heads}
    check_heads(asked, heads, streams)
    axis = streams.tp or "None"
    stage = model if isinstance(model, GPT) else None
    begins, ends = (stage.embed is not None, stage.head is not None) if stage else (True, True)
    plan = ShardingPlan(input_plan={"input": (streams.rows, "None") if begins else streams.residual}, wrap_inputs=True)
    if stage is not None and isinstance(mesh, DeviceMesh) and streams.degree > 1:
        own, here = config.num_attention_heads // streams.degree, mesh.get_local_rank(tp)
        stage.heads = slice(here * own, (here + 1) * own)
    if stage is None or len(stage.layers):
        _add_layers(plan, config, streams)
    if begins:
        streams.add_embedding(plan, "embed", split=True)
        if config.positions == "learned":
            _add_places(plan, streams)
        if config.embedding_norm:
            _add_norm(plan, config, streams, "embed_norm")
        if config.dropout:
            streams.add_along(plan, ("embed_dropout",))
    if ends:
        _add_norm(plan, config, streams, "norm")
        add_entries(plan, plan={"head.weight": (axis, "None")})
        streams.add_head(plan, "head", split=True, logits=logits)
    if reshard_inputs:
        reshard_gathered(asked, plan, streams)
    return plan


def _add_layers(plan: ShardingPlan, config: GPTConfig, streams: Streams) -> None:
    axis = streams.tp or "None"
    columns = ["attention.wqkv", "mlp.w1", *(["mlp.w3"] if config.is_gated else [])]
    weights = {f"layers.*.{name}.weight": (axis, "None") for name in columns}
    weights |= {f"layers.*.{name}.weight": ("None", axis) for name in ("attention.wo", "mlp.w2")}
    biases: dict[str, tuple[str, ...]] = {}
    if config.bias:
        biases = {f"layers.*.{name}.bias": (axis,) for name in columns}
        biases |= {f"layers.*.{name}": ("None",) for name in ("attention_bias", "mlp_bias")}
    add_entries(plan, plan={**weights, **biases})
    streams.add_along(plan, ("layers.*",))
    for path in ("layers.*.attention_norm", "layers.*.mlp_norm"):
        _add_norm(plan, config, streams, path)
    streams.add_shares(plan, "layers.*.attention", streams.whole)
    streams.add_shares(plan, "layers.*.mlp", streams.whole)


def _add_norm(plan: ShardingPlan, config: GPTConfig, streams: Streams, path: str) -> None:
    names = ("weight", "bias") if config.bias else ("weight",)
    add_entries(plan, plan={f"{path}.{name}": ("None",) for name in names})
    streams.add_along(plan, (path,))


def _add_places(plan: ShardingPlan, streams: Streams) -> None:
    """Every rank looks all positions up, and keeps those of its part of the sequence."""
    whole, part = ("None", "None", "None"), ("None", *streams.residual[1:])
    add_entries(
        plan,
        plan={"places.weight": ("None", "None")},
        input_plan={"places.input": ("None", "None")},
        local_plan={"places": whole},
        output_plan={"places.output": part},
    )


# Models of estimates: --model benchmarks.published.gpt:gpt3_175b


@dataclass(frozen=True)
class GPTSpec(ModelSpec):
    """A `GPT`, for `sim.mesh.estimate`."""

    name: str
    config: GPTConfig

    @classmethod
    def of(cls, config: GPTConfig) -> GPTSpec:
        """Return the model of a config, named by its size.

        >>> GPTSpec.of(GPTConfig()).name
        'gpt-0.2m'
        """
        return cls(f"gpt-{short_count(config.num_parameters())}", config)

    @property
    def family(self) -> str:
        """The kind of model."""
        return "gpt"

    def flops_per_token(self, seq_len: int) -> float:
        """Forward and backward, no recompute, attention in full."""
        return self.config.flops_per_token(seq_len)

    def build(
        self, seq_len: int, layers: Collection[int] | None = None, *, embed: bool = True, head: bool = True
    ) -> nn.Module:
        """Make the model, or a stage of it; see `ModelSpec.build`."""
        model = GPT(dataclasses.replace(self.config, max_seq_len=max(seq_len, self.config.max_seq_len)))
        return model.keep(range(self.num_layers) if layers is None else layers, embed=embed, head=head)

    def plan(self, module: nn.Module, mesh: MeshLike, recipe: Recipe | None = None) -> ShardingPlan:
        """Return the layouts of a model that `build` has made, on a mesh with an axis tp."""
        assert isinstance(module, GPT), "made by build"
        if recipe is None:
            return gpt_plan(module, mesh)
        options = recipe.parallel.split_options()
        del options["chunks"]  # its layers have none
        return gpt_plan(module, mesh, sequence_parallel=recipe.sequence_parallel, **options)


def gpt_tiny() -> GPTSpec:
    """A small one, made up for tests."""
    return GPTSpec("gpt-tiny", GPTConfig(vocab_size=512, hidden_size=64, num_hidden_layers=4, num_attention_heads=4))


def gpt3_175b() -> GPTSpec:
    """GPT-3 of 175 billion parameters (Brown et al. 2020, arXiv:2005.14165, table 2.1)."""
    shape: dict[str, Any] = {"num_hidden_layers": 96, "num_attention_heads": 96, "max_seq_len": 2048}
    return GPTSpec("gpt3-175b", GPTConfig(vocab_size=50_257, hidden_size=12_288, **shape))
