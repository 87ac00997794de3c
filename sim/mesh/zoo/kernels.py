"""Other ways to compute attention and norms than one kernel each, for runs that did so."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from sim.mesh.recipe import Recipe

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


def use_kernels(model: ModuleT, recipe: Recipe | None) -> ModuleT:
    """Let the attention and the norms of a model be computed as a recipe says, in place, before it is split.

    Args:
        model: what has an attribute `attend` is attention, see `hyper_parallel.models.llama.Attention`.
        recipe: None leaves the model as it is.
    """
    if recipe is None:
        return model
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
