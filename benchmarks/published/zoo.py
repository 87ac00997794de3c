"""Attention, norms and models of published runs that hyper_parallel does not train with itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel.core.expert_parallel.api import expert_parallel
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.shard.api import shard_module
from hyper_parallel.core.shard.sharding_plan import ShardingPlan
from hyper_parallel.models.llama import Block
from hyper_parallel.models.moe import MoEBlock, MoEConfig, MoELlama
from hyper_parallel.models.moe_plan import moe_plan, parallelize_moe
from hyper_parallel.models.plans import MeshLike, Streams, add_entries, llama_plan
from sim.mesh.models import LlamaSpec

__all__ = [
    "EagerRMSNorm",
    "FusedAttention",
    "LatentAttention",
    "MLAConfig",
    "MLALlama",
    "MLASpec",
    "MathAttention",
    "deepseek_v3",
    "dropped",
    "mla_plan",
    "use_kernels",
]

# Other ways to compute attention and norms than one kernel each, for runs that did so ---------------------------------


ModuleT = TypeVar("ModuleT", bound=nn.Module)


def dropped(x: Tensor, probability: float, training: bool) -> Tensor:
    """Zero elements at random, by one kernel that keeps a mask of one byte each, as on accelerators."""
    if not probability or not training:
        return x
    out: Tensor = torch.native_dropout(x, probability, True)[0]
    return out


@dataclass
class FusedAttention:
    """Causal attention in one kernel, with scores nowhere in memory; calls as `hyper_parallel.models.llama.Attend`.

    Args:
        dropout: probability that a weight is zeroed, in training. Accelerators do that in the kernel; torch's CPU makes
            all scores for it.
    """

    dropout: float = 0.0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attend; `bias`, (heads, 1, keys), is added to the scores."""
        dropout = self.dropout if torch.is_grad_enabled() else 0.0
        if bias is None:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=True)
        mask = _causal(q.shape[-2], k.shape[-2], q) + bias.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=True)


@dataclass
class MathAttention:
    """Causal attention by two matrix products and a softmax, whose result is kept for backward.

    >>> q, k, v = torch.randn(3, 2, 4, 16, 8).unbind()
    >>> torch.allclose(MathAttention()(q, k, v), FusedAttention()(q, k, v), atol=1e-5)
    True

    Per score: 2 bytes for the softmax, and with dropout 1 for its mask and 2 for what it leaves, as in Korthikanti et
    al. 2022, section 4.1, where mask and softmax are one kernel. Here the mask is added within the matrix product.

    Args:
        dropout: probability that a weight is zeroed, in training.
        recomputed: keep none of that, and make it again in backward.
    """

    dropout: float = 0.0
    recomputed: bool = False
    _mask: Tensor | None = field(default=None, repr=False, compare=False)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attend; `bias`, (heads, 1, keys), is added to the scores."""
        if self.recomputed and torch.is_grad_enabled():
            made: Tensor = checkpoint(self._compute, q, k, v, bias, use_reentrant=False)
            return made
        return self._compute(q, k, v, bias)

    def _compute(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        batch, heads, queries, size = q.shape
        copies = heads // k.shape[1]
        if copies > 1:
            k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
        q, k, v = (x.reshape(batch * heads, x.shape[2], size) for x in (q, k, v))
        mask = self._kept_mask(queries, k.shape[1], q)
        scale = 1 / math.sqrt(size)
        if bias is None:
            scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale)
        else:
            scores = torch.baddbmm(bias.to(q.dtype).repeat(batch, 1, 1), q, k.transpose(1, 2), alpha=scale)
            scores = scores.add_(mask)  # in place: no backward asks for what was there
        weights = dropped(scores.softmax(-1), self.dropout, torch.is_grad_enabled())
        return torch.bmm(weights, v).view(batch, heads, queries, size)

    def _kept_mask(self, queries: int, keys: int, like: Tensor) -> Tensor:
        kept = self._mask
        if kept is None or kept.shape != (queries, keys) or kept.dtype != like.dtype or kept.device != like.device:
            kept = self._mask = _causal(queries, keys, like)
        return kept


def _causal(queries: int, keys: int, like: Tensor) -> Tensor:
    return torch.full((queries, keys), -math.inf, dtype=like.dtype, device=like.device).triu(1)


class EagerRMSNorm(nn.Module):
    """RMSNorm as one kernel for each operation, on a float32 copy of what comes in, as models write it in Python.

    >>> x = torch.randn(3, 8)
    >>> torch.allclose(EagerRMSNorm(8)(x), nn.RMSNorm(8, eps=1e-5)(x), atol=1e-6)
    True

    Args:
        size: of the last dim.
        eps: added to the mean square.
    """

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., size) to the same shape."""
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def use_kernels(model: ModuleT, recipe: Any) -> ModuleT:
    """Let the attention and the norms of a model be computed as a recipe says, in place, before it is split.

    Args:
        model: what has an attribute `attend` is attention, see `hyper_parallel.models.llama.Attention`.
        recipe: a `PublishedRecipe`.
    """
    shared: dict[float, MathAttention] = {}
    for module in list(model.modules()):
        if callable(getattr(module, "attend", None)):
            dropout = float(getattr(module, "attention_dropout", 0.0))
            if recipe.attention != "flash":
                made = MathAttention(dropout, recipe.attention == "math-recomputed")
                module.__dict__["attend"] = shared.setdefault(dropout, made)
        for name, child in list(module.named_children()):
            if recipe.norm == "eager" and isinstance(child, nn.RMSNorm):
                eager = EagerRMSNorm(child.normalized_shape[-1], child.eps or 1e-6)
                eager.weight = child.weight
                module._modules[name] = eager
    return model


# A Llama with experts whose attention is latent, as DeepSeek's (arXiv:2405.04434, section 2.1; arXiv:2412.19437) ------
#
# Queries, and keys and values, are made of narrow vectors; positions turn a part of each head, which all keys share.
# Training makes whole heads of it: what is saved is what inference keeps in its cache.


@dataclass(frozen=True)
class MLAConfig(MoEConfig):
    """The shape of a Llama with experts and latent attention: arguments as for `MoEConfig`, and these.

    >>> config = MLAConfig(num_hidden_layers=2)
    >>> with torch.device("meta"):
    ...     model = MLALlama(config)
    >>> config.num_parameters() == sum(param.numel() for param in model.parameters())
    True

    Args:
        query_rank: width of the vector that queries are made of; 0: they are made of the residual stream.
        latent_rank: width of the vector that keys and values are made of.
        plain_size: of a query's or key's head, what positions leave alone.
        turned_size: of it, what positions turn.
        value_size: of a value's head.
    """

    query_rank: int = 0
    latent_rank: int = 32
    plain_size: int = 16
    turned_size: int = 8
    value_size: int = 16

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        object.__setattr__(self, "head_size", self.turned_size)  # what the tables of positions are made for
        super().__post_init__()

    @property
    def qk_size(self) -> int:
        """Size of a head of queries and keys."""
        return self.plain_size + self.turned_size

    @property
    def attention_matrices(self) -> int:
        """Weights of the matrices of one attention."""
        d, heads = self.hidden_size, self.num_attention_heads
        queries = (d + heads * self.qk_size) * self.query_rank if self.query_rank else d * heads * self.qk_size
        latent = d * (self.latent_rank + self.turned_size)
        whole = self.latent_rank * heads * (self.plain_size + self.value_size)
        return queries + latent + whole + heads * self.value_size * d

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of forward and backward per token: 6 for each weight of a matrix, and attention in full."""
        d = self.hidden_size
        norms = self.num_hidden_layers * (2 * d + self.query_rank + self.latent_rank) + d
        table = 0 if self.tie_embeddings else self.vocab_size * d
        sizes = self.num_attention_heads * (self.qk_size + self.value_size)
        matrices = self.num_active_parameters() - norms - table
        return 6.0 * (matrices + self.num_hidden_layers * sizes * seq_len)

    def _count(self, experts: int) -> int:
        usual = 4 * self.hidden_size * self.num_attention_heads * self.head_dim
        own = self.attention_matrices + self.query_rank + self.latent_rank
        return super()._count(experts) + self.num_hidden_layers * (own - usual)


class LatentAttention(nn.Module):
    """Causal attention with narrow vectors between the residual stream and the heads.

    Attributes:
        attend: what happens between the projections. Values are padded to the size of keys for it.
    """

    def __init__(self, config: MLAConfig) -> None:
        super().__init__()
        d, heads, eps = config.hidden_size, config.num_attention_heads, config.norm_eps
        self.plain, self.turned, self.value = config.plain_size, config.turned_size, config.value_size
        self.latent = config.latent_rank
        self.wq_down: nn.Linear | None = None
        self.q_norm: nn.RMSNorm | None = None
        if config.query_rank:
            self.wq_down = nn.Linear(d, config.query_rank, bias=False)
            self.q_norm = nn.RMSNorm(config.query_rank, eps=eps)
        self.wq = nn.Linear(config.query_rank or d, heads * config.qk_size, bias=False)
        self.wkv_down = nn.Linear(d, self.latent + self.turned, bias=False)
        self.kv_norm = nn.RMSNorm(self.latent, eps=eps)
        self.wkv = nn.Linear(self.latent, heads * (self.plain + self.value), bias=False)
        self.wo = nn.Linear(heads * self.value, d, bias=False)
        self.attend: Callable[..., Tensor] = FusedAttention()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map x (batch, seq, hidden) to the same shape."""
        narrow = x if self.wq_down is None or self.q_norm is None else self.q_norm(self.wq_down(x))
        q = self.wq(narrow).unflatten(-1, (-1, self.plain + self.turned)).transpose(1, 2)
        q_plain, q_turned = q.split((self.plain, self.turned), dim=-1)
        latent, k_turned = self.wkv_down(x).split((self.latent, self.turned), dim=-1)
        kv = self.wkv(self.kv_norm(latent)).unflatten(-1, (-1, self.plain + self.value)).transpose(1, 2)
        k_plain, v = kv.split((self.plain, self.value), dim=-1)
        k_turned = _rotate(k_turned.unsqueeze(1), cos, sin).expand(-1, k_plain.shape[1], -1, -1)
        q = torch.cat((q_plain, _rotate(q_turned, cos, sin)), dim=-1)
        k = torch.cat((k_plain, k_turned), dim=-1)
        out = self.attend(q, k, F.pad(v, (0, self.plain + self.turned - self.value)))[..., : self.value]
        return self.wo(out.transpose(1, 2).flatten(2))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class MLALlama(MoELlama):
    """The language model; everything that is said of `MoELlama` holds.

    >>> MLALlama.build(MLAConfig())(torch.zeros(2, 16, dtype=torch.long)).shape
    torch.Size([2, 16, 256])
    """

    config: MLAConfig

    def build_block(self, index: int) -> nn.Module:
        """Make layer number `index`."""
        block = Block(self.config) if self.config.is_dense(index) else MoEBlock(self.config)
        block.attention = LatentAttention(self.config)  # type: ignore[assignment]
        return block


def mla_plan(
    model: MLALlama | MLAConfig,
    mesh: MeshLike,
    *,
    tp: str | None = "tp",
    dp: str | Sequence[str] | None = None,
    etp: int | None = None,
    sequence_parallel: bool = True,
    reshard_inputs: bool = False,
) -> ShardingPlan:
    """Return the plan for `shard_module`, after `expert_parallel`; see `hyper_parallel.models.moe_plan`.

    Heads are split over tp; the narrow vectors are computed on all its ranks.
    """
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "reshard_inputs": reshard_inputs}
    plan = moe_plan(model, mesh, tp=tp, dp=dp, etp=etp, **options)
    config = model.config if isinstance(model, MLALlama) else model
    streams = Streams.on("cannot plan the latent attention", mesh, tp=tp, dp=dp, sequence_parallel=sequence_parallel)
    axis, at = streams.tp or "None", "layers.*.attention."
    if isinstance(model, MLALlama) and not len(model.layers):  # a stage may have none
        return plan
    plan.plan = {path: layout for path, layout in (plan.plan or {}).items() if not path.startswith(at)}
    narrow: tuple[str, ...] = ("wkv_down", *(["wq_down"] if config.query_rank else []))
    norms = ("kv_norm", *(["q_norm"] if config.query_rank else []))
    add_entries(
        plan,
        plan={
            **{f"{at}{name}.weight": (axis, "None") for name in ("wq", "wkv")},
            **{f"{at}{name}.weight": ("None", "None") for name in narrow},
            **{f"{at}{name}.weight": ("None",) for name in norms},
            f"{at}wo.weight": ("None", axis),
        },
    )
    return plan


@dataclass(frozen=True)
class MLASpec(LlamaSpec):
    """A `MLALlama`, for `sim.mesh.estimate`."""

    config: MLAConfig

    def flops_per_token(self, seq_len: int) -> float:
        """Forward and backward, no recompute, attention in full."""
        return self.config.flops_per_token(seq_len)

    def build(
        self, seq_len: int, layers: Collection[int] | None = None, *, embed: bool = True, head: bool = True
    ) -> nn.Module:
        """Make the model, or a stage of it; see `ModelSpec.build`."""
        whole = MLALlama(replace(self.config, max_seq_len=seq_len))
        return whole.keep(range(self.num_layers) if layers is None else layers, embed=embed, head=head)

    def split(self, module: nn.Module, dims: ParallelDims, recipe: Any) -> None:
        """Split tensors and experts over tp and ep, in place; see `ModelSpec.split`."""
        assert isinstance(module, MLALlama), "made by build"
        split_experts(module, dims, recipe)
        if dims.tp_enabled:
            mesh, along = dims.get_mesh("tp"), recipe.sequence_parallel
            said = {"sequence_parallel": along, **recipe.parallel.split_options()}
            del said["chunks"]  # its layers have none
            shard_module(module, mesh, mla_plan(module, mesh, etp=dims.etp if along else None, **said))


def split_experts(module: MoELlama, dims: ParallelDims, recipe: Any) -> None:
    """Split experts over the ranks of ep, in place."""
    if dims.ep_enabled:
        etp = dims.etp if dims.tp_enabled else None
        on_nodes = recipe.parallel.split_options(experts=True)["ranks_per_node"]
        expert_parallel(module, dims.build_mesh(), ep=dims.expert_axes, etp=etp, ranks_per_node=on_nodes)


def split_llama(module: Any, dims: ParallelDims, recipe: Any) -> None:
    """Split tensors and experts of a `Llama` or `MoELlama` over tp and ep, in place."""
    along, said = recipe.sequence_parallel, recipe.parallel.split_options(experts=isinstance(module, MoELlama))
    if not isinstance(module, MoELlama):
        if dims.tp_enabled:
            mesh = dims.get_mesh("tp")
            shard_module(module, mesh, llama_plan(module, mesh, sequence_parallel=along, **said))
    elif not along:
        split_experts(module, dims, recipe)
        if dims.tp_enabled:
            mesh = dims.get_mesh("tp")
            shard_module(module, mesh, moe_plan(module, mesh, sequence_parallel=False))
    elif dims.ep_enabled or dims.tp_enabled or dims.cp_enabled:
        said |= {"ep": dims.expert_axes, "etp": dims.etp if dims.tp_enabled else None}
        parallelize_moe(module, dims.build_mesh(), **said)


# --model benchmarks.published.zoo:deepseek_v3

_LATENT: dict[str, Any] = {"latent_rank": 512, "plain_size": 128, "turned_size": 64, "value_size": 128}


def deepseek_v3() -> MLASpec:
    """DeepSeek-V3 without the layer that predicts the token after the next (arXiv:2412.19437, section 4.2).

    Published are 671,026,419,200 parameters with the biases of the routers, 58 x 256, which are buffers here.
    """
    shape: dict[str, Any] = {"vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432}
    shape |= {"num_hidden_layers": 61, "num_attention_heads": 128, "max_seq_len": 4096, "num_experts": 256}
    shape |= {"experts_per_token": 8, "num_shared_experts": 1, "expert_intermediate_size": 2048}
    shape |= {"num_dense_layers": 3, "routed_scale": 2.5, "query_rank": 1536}
    return MLASpec("deepseek-v3", MLAConfig(**shape, **_LATENT))
