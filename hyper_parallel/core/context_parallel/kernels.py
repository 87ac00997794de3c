"""torch's fused attention on the CPU, called below `scaled_dot_product_attention`, which keeps the log-sums to itself.

It never allocates all scores, takes any floating dtype, needs as many key heads as query heads, and has no mask for
documents.
"""

from __future__ import annotations

import torch
from torch import Tensor


def has_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Tell whether there is a fused kernel for such tensors."""
    return q.device.type == "cpu" and all(x.numel() and x.stride(-1) == 1 for x in (q, k, v))


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output, in the dtype of the queries, and its log-sum-exp; shapes as in `Block`."""
    k, v = (_repeated(x, q.shape[1]) for x in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, given output and log-sum-exp over all blocks."""
    heads = k.shape[1]
    k, v = (_repeated(x, q.shape[1]) for x in (k, v))
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grad_q, grad_k, grad_v = op(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
    return grad_q, _summed(grad_k, heads), _summed(grad_v, heads)


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _summed(grad: Tensor, heads: int) -> Tensor:
    """Sum over the query heads of each key head, in float32 at least."""
    if grad.shape[1] == heads:
        return grad
    dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    return grad.unflatten(1, (heads, -1)).sum(2, dtype=dtype)
