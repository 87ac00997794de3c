"""Fused attention kernels of devices, called below `scaled_dot_product_attention`, which keeps the log-sums to itself.

Every kernel takes and returns the same: queries, keys and values (batch, heads, tokens, head_dim), and of each query
the log of the sum of exponentials of its scores, (batch, heads, queries). The layouts of torch's operators were read in
torch 2.13 (`torch/_meta_registrations.py`), that of `npu_fusion_attention` in public code that calls it and in its
documentation. None of them has run on a device here.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

_aten = torch.ops.aten


class AttentionKernel(ABC):
    """One fused attention, and the matching gradient.

    Attributes:
        shares_heads: whether a key head may serve several query heads; else they are repeated for it.
        head_dim_multiple: what the head size must be a multiple of; else it is padded with zeros, which add nothing.
        most_causal: how many tokens a causal block had better have at most; None: any number.
    """

    shares_heads = False
    head_dim_multiple = 1
    most_causal: int | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Return the output, in the dtype of the queries, and its log-sum-exp.

        Args:
            q: (batch, heads, queries, head_dim).
            k: (batch, key and value heads, keys, head_dim); query head i uses head i // (heads / these).
            v: as `k`.
            causal: query i sees keys up to i.
            scale: of the scores.
        """
        k, v = (self._repeated(x, q.shape[1]) for x in (k, v))
        out, lse = self._forward(self._padded(q), self._padded(k), self._padded(v), causal, scale)
        return out[..., : q.shape[-1]], lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values.

        Args:
            grad: the gradient of `out`.
            q: as in `forward`.
            k: as in `forward`.
            v: as in `forward`.
            out: of these queries, over all keys there are, of which `k` may be some.
            lse: likewise.
            causal: as in `forward`.
            scale: as in `forward`.
        """
        heads, size = k.shape[1], q.shape[-1]
        k, v = (self._repeated(x, q.shape[1]) for x in (k, v))
        grad, q, k, v, out = (self._padded(x) for x in (grad, q, k, v, out))
        of_q, of_k, of_v = (x[..., :size] for x in self._backward(grad, q, k, v, out, lse, causal, scale))
        return of_q, _summed(of_k, heads), _summed(of_v, heads)

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Call the operator."""

    @abstractmethod
    def _backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Call its backward operator."""

    def _repeated(self, x: Tensor, heads: int) -> Tensor:
        alike = self.shares_heads or x.shape[1] == heads
        return x if alike else x.repeat_interleave(heads // x.shape[1], dim=1)

    def _padded(self, x: Tensor) -> Tensor:
        missing = -x.shape[-1] % self.head_dim_multiple
        return F.pad(x, (0, missing)) if missing else x


def _summed(grad: Tensor, heads: int) -> Tensor:
    """Sum over the query heads of each key head, in float32 at least."""
    if grad.shape[1] == heads:
        return grad
    dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    return grad.unflatten(1, (heads, -1)).sum(2, dtype=dtype)


# -- the host ----------------------------------------------------------------------------------------------------------


class HostAttention(AttentionKernel):
    """torch's fused attention on the CPU, of any floating dtype.

    It computes 512 keys at a time, also those that a causal mask hides, and fewer than 192 queries far slower
    (`aten/src/ATen/native/cpu/FlashAttentionKernel.cpp`).
    """

    most_causal = 2 * 192

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse

    def _backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        op = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        of_q, of_k, of_v = op(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
        return of_q, of_k, of_v


def host_attention(q: Tensor, k: Tensor, v: Tensor) -> AttentionKernel | None:
    """Return the kernel for tensors on the host, None if there is none for such."""
    fits = all(x.device.type == "cpu" and x.numel() and x.stride(-1) == 1 for x in (q, k, v))
    return HostAttention() if fits else None


# -- GPUs --------------------------------------------------------------------------------------------------------------


class FlashAttention(AttentionKernel):
    """FlashAttention (Dao et al. 2022) as torch has it for GPUs: float16 and bfloat16; log-sums (batch, heads, seq)."""

    shares_heads = True
    head_dim_multiple = 8

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse

    def _backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Without dropout the state of the random numbers is not read; only its dtype and its device must be right.
        state = (q.new_zeros(2, dtype=torch.uint64), q.new_zeros((), dtype=torch.uint64))
        sizes = (None, None, q.shape[2], k.shape[2])  # no sequences of several lengths
        op = _aten._scaled_dot_product_flash_attention_backward
        of_q, of_k, of_v = op(
            grad, q, k, v, out, lse.contiguous(), *sizes, 0.0, causal, *state, scale=scale
        )  # fmt: skip
        return of_q, of_k, of_v


class EfficientAttention(AttentionKernel):
    """Memory-efficient attention (Rabe and Staats 2021) as torch has it for GPUs: float32 too.

    Its log-sums are padded to a multiple of 32 queries, with infinity: such a query gives its keys no weight.
    """

    _ALIGNED = 32

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        op = _aten._scaled_dot_product_efficient_attention
        out, lse, *_ = op(q, k, v, None, True, 0.0, causal, scale=scale)
        return out, lse[:, :, : q.shape[2]]

    def _backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        missing = 0 if torch.version.hip else -lse.shape[2] % self._ALIGNED
        lse = F.pad(lse, (0, missing), value=torch.inf).contiguous()
        state = (q.new_zeros((), dtype=torch.int64), q.new_zeros((), dtype=torch.int64))
        wanted = [True, True, True, False]
        op = _aten._scaled_dot_product_efficient_attention_backward
        of_q, of_k, of_v, _ = op(grad, q, k, v, None, out, lse, *state, 0.0, wanted, causal, scale=scale)
        return of_q, of_k, of_v


class CudnnAttention(AttentionKernel):
    """cuDNN's attention: float16 and bfloat16; log-sums (batch, heads, seq, 1), or without the last dim."""

    shares_heads = True

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        op = _aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = op(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return out, lse.reshape(q.shape[:3])

    def _backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse = lse.contiguous()
        lse = lse.unsqueeze(-1) if _cudnn_dims() == 4 else lse
        state = (q.new_zeros((), dtype=torch.int64), q.new_zeros((), dtype=torch.int64))
        sizes = (None, None, q.shape[2], k.shape[2])
        op = _aten._scaled_dot_product_cudnn_attention_backward
        of_q, of_k, of_v = op(grad, q, k, v, out, lse, *state, None, *sizes, 0.0, causal, scale=scale)
        return of_q, of_k, of_v


@cache
def _cudnn_dims() -> int:
    """How many dims this torch's cuDNN log-sums have, as torch.compile is told."""
    one = torch.empty(1, 1, 8, 8, device="meta", dtype=torch.float16)
    lse: Tensor = _aten._scaled_dot_product_cudnn_attention(one, one, one, None, True)[1]
    return lse.ndim


_OF_GPUS: Mapping[int, type[AttentionKernel]] = MappingProxyType(
    {
        SDPBackend.FLASH_ATTENTION.value: FlashAttention,
        SDPBackend.EFFICIENT_ATTENTION.value: EfficientAttention,
        SDPBackend.CUDNN_ATTENTION.value: CudnnAttention,
    }
)


def gpu_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> AttentionKernel | None:
    """Return the kernel that `scaled_dot_product_attention` would take, None if it would take none.

    It is torch that chooses, by device, dtype and sizes; within `torch.nn.attention.sdpa_kernel`, of what that allows.
    """
    if not all(x.numel() for x in (q, k, v)):
        return None
    shared = q.shape[1] != k.shape[1]
    kind = _OF_GPUS.get(torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=shared))
    if kind is None and shared:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        kind = _OF_GPUS.get(torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale))
        # With a head of its own for each, some kernel works; only one that repeats heads by itself gets them so.
        kind = kind if kind is EfficientAttention else None
    return None if kind is None else kind()


# -- NPUs --------------------------------------------------------------------------------------------------------------


class NpuAttention(AttentionKernel):
    """torch_npu's `npu_fusion_attention`: float16, bfloat16 and float32.

    It returns of each query the largest score m and the sum s of exponentials below it, (batch, heads, queries, 8),
    eight times the same. Their log-sum is m + log(s); the gradient is given that as the largest, and a sum of one.

    Args:
        operators: what has both operators; None: torch_npu.
    """

    shares_heads = True
    _TIMES = 8
    _MASK = 2048  # rows and columns of the mask that stands for any causal one
    _CAUSAL = 2  # the mode of a causal mask that begins at the first query and the first key

    def __init__(self, operators: Any = None) -> None:
        self._operators = sys.modules["torch_npu"] if operators is None else operators

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (x.contiguous() for x in (q, k, v))
        op = self._operators.npu_fusion_attention
        out, largest, total, *_ = op(q, k, v, q.shape[1], "BNSD", scale=scale, **self._mask(q, causal))
        return out, largest[..., 0] + total[..., 0].log()

    def _backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, grad, out = (x.contiguous() for x in (q, k, v, grad, out))
        largest = lse.unsqueeze(-1).expand(*lse.shape, self._TIMES).contiguous()
        total = torch.ones_like(largest)
        found = self._operators.npu_fusion_attention_grad(
            q, k, v, grad, q.shape[1], "BNSD", softmax_max=largest, softmax_sum=total, attention_in=out,
            scale_value=scale, **self._mask(q, causal),
        )  # fmt: skip
        of_q, of_k, of_v, *_ = found
        return of_q, of_k, of_v

    def _mask(self, q: Tensor, causal: bool) -> dict[str, Any]:
        if not causal:
            return {}
        hidden = torch.ones(self._MASK, self._MASK, dtype=torch.bool, device=q.device).triu_(1)
        return {"atten_mask": hidden, "sparse_mode": self._CAUSAL}


_LARGEST_HEAD = 512
_DTYPES_OF_NPUS = (torch.float16, torch.bfloat16, torch.float32)


def npu_attention(q: Tensor, k: Tensor, v: Tensor, operators: Any = None) -> AttentionKernel | None:
    """Return the kernel for tensors on an NPU, None if torch_npu, or what stands for it, has none for such."""
    source = sys.modules.get("torch_npu") if operators is None else operators
    has = all(hasattr(source, name) for name in ("npu_fusion_attention", "npu_fusion_attention_grad"))
    fits = q.dtype in _DTYPES_OF_NPUS and 0 < q.shape[-1] <= _LARGEST_HEAD and all(x.numel() for x in (q, k, v))
    return NpuAttention(source) if has and fits else None


def attention_operators() -> frozenset[Any]:
    """Return the forward operators of fused attention that this process has, of all devices."""
    names = (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",  # of devices that torch itself has none for
    )
    found = {getattr(_aten, name).default for name in names}
    fusion = getattr(torch.ops.npu, "npu_fusion_attention", None)  # there once torch_npu is imported
    return frozenset(found if fusion is None else found | {fusion.default})
