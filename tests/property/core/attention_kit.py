"""torch's fused attention of GPUs on the CPU: the operators' own names, schemas and layouts, computed by products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.core.context_parallel import attention
from hyper_parallel.core.context_parallel.attention import AttentionBlock
from hyper_parallel.platform.attention import (
    AttentionKernel,
    CudnnAttention,
    EfficientAttention,
    FlashAttention,
    HostAttention,
)

KERNELS: dict[str, tuple[AttentionKernel | None, tuple[torch.dtype, ...]]] = {
    "products": (None, (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    "host": (HostAttention(), (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    "flash": (FlashAttention(), (torch.bfloat16, torch.float16)),
    "efficient": (EfficientAttention(), (torch.float32, torch.bfloat16, torch.float16)),
    "cudnn": (CudnnAttention(), (torch.bfloat16, torch.float16)),
}
"""By name, and the dtypes that each takes."""


def _products(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = AttentionBlock(q, k, v, causal, scale)._by_hand()
    return out.to(q.dtype), lse


def _gradients(q, k, v, grad, out, lse, causal: bool, scale: float) -> tuple[Tensor, ...]:
    found = AttentionBlock(q, k, v, causal, scale)._gradients_by_hand(grad, out, lse)
    return tuple(each.to(q.dtype) for each in found)


def _check(q: Tensor, k: Tensor, *, of: str, multiple: int = 1) -> None:
    assert q.dtype in KERNELS[of][1], f"{of} does not take {q.dtype}"
    assert q.shape[-1] % multiple == 0, f"{of} takes heads of a multiple of {multiple}, not {q.shape[-1]}"
    assert of != "efficient" or q.shape[1] == k.shape[1], "efficient attention has no shared heads"


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    _check(q, k, of="flash", multiple=8)
    out, lse = _products(q, k, v, is_causal, scale)
    state = (torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64))
    return out, lse, None, None, q.shape[2], k.shape[2], *state, q.new_empty(0)


def flash_backward(
    grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None
):  # fmt: skip
    _check(q, k, of="flash", multiple=8)
    assert lse.shape == q.shape[:3]
    assert lse.is_contiguous()
    assert lse.dtype == torch.float32
    assert cum_q is None
    assert cum_k is None
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    assert (seed.shape, offset.shape, seed.dtype) == ((2,), (), torch.uint64)
    return _gradients(q, k, v, grad, out, lse, is_causal, scale)


def _rows(queries: int) -> int:
    return -(-queries // 32) * 32


def efficient(q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    _check(q, k, of="efficient")
    assert bias is None
    assert compute_log_sumexp
    out, lse = _products(q, k, v, is_causal, scale)
    lse = F.pad(lse, (0, _rows(q.shape[2]) - q.shape[2]), value=torch.inf)
    return out, lse, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def efficient_backward(
    grad, q, k, v, bias, out, lse, seed, offset, dropout_p, grad_input_mask, is_causal=False, *, scale=None
):  # fmt: skip
    _check(q, k, of="efficient")
    assert lse.shape == (*q.shape[:2], _rows(q.shape[2]))
    assert lse.is_contiguous()
    assert lse.dtype == torch.float32
    assert bool((lse[:, :, q.shape[2] :] == torch.inf).all())
    assert list(grad_input_mask) == [True, True, True, False]
    return *_gradients(q, k, v, grad, out, lse[:, :, : q.shape[2]], is_causal, scale), None


def cudnn(q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    _check(q, k, of="cudnn")
    assert bias is None
    assert compute_log_sumexp
    out, lse = _products(q, k, v, is_causal, scale)
    seed = torch.zeros((), dtype=torch.int64)
    return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], seed, seed.clone(), q.new_empty(0)


def cudnn_backward(
    grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, *, scale=None
):  # fmt: skip
    _check(q, k, of="cudnn")
    assert lse.shape == (*q.shape[:3], 1)
    assert lse.is_contiguous()
    assert lse.dtype == torch.float32
    assert bias is None
    assert cum_q is None
    assert cum_k is None
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    return _gradients(q, k, v, grad, out, lse.squeeze(-1), is_causal, scale)


STAND_INS: dict[str, Callable[..., object]] = {
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}


@contextmanager
def gpu_operators_on_the_cpu() -> Iterator[None]:
    """Give the operators kernels for the CPU while it lasts: calls go through torch's dispatcher and its schemas."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in STAND_INS.items():
        library.impl(name, function, "CPU")
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def blocks_by(name: str) -> Iterator[None]:
    """Let blocks of attention be computed by a kernel of `KERNELS` while it lasts, where it takes their dtype."""
    kernel, dtypes = KERNELS[name]
    before = attention.fused

    def fused(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> AttentionKernel | None:
        return kernel if q.dtype in dtypes and all(x.numel() for x in (q, k, v)) else None

    attention.fused = fused
    try:
        with nullcontext() if name in ("products", "host") else gpu_operators_on_the_cpu():
            yield
    finally:
        attention.fused = before
