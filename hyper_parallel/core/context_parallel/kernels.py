"""The choice of a fused attention for a block: below `scaled_dot_product_attention`, which keeps log-sums to itself."""

from __future__ import annotations

from torch import Tensor

from hyper_parallel.platform import AttentionKernel, PlatformUnavailableError, get_platform


def fused(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> AttentionKernel | None:
    """Return what the tensors' device computes such a block with; None: it has nothing for it, so products do.

    Args:
        q: (batch, heads, queries, head_dim).
        k: (batch, key and value heads, keys, head_dim).
        v: as `k`.
        causal: query i sees keys up to i.
        scale: of the scores.
    """
    if q.device.type == "meta":
        return None
    try:
        platform = get_platform(q.device.type)
    except (ValueError, PlatformUnavailableError):  # a device that nobody has registered, or one without values
        return None
    return platform.attention(q, k, v, causal, scale)
