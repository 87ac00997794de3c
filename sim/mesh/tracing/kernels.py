"""Kernels of accelerators that torch's CPU lacks."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from hyper_parallel.platform.attention import (
    AttentionKernel,
    CudnnAttention,
    EfficientAttention,
    FlashAttention,
    host_attention,
    npu_attention,
)
from sim.kernel.context import current_context
from sim.late import fused
from sim.ops import Level, OnFunctions, Proceed

# Kernels that accelerators have and torch's CPU lacks, for tensors without values -------------------------------------
#
# The same call is another set of operations on a CPU, and keeps other tensors for backward:
#
# | call | CPU | accelerator |
# |---|---|---|
# | `rms_norm` | eight operations; keeps three float32 copies | one; keeps its input and one number per row |
# | `dropout` | draws into a mask of the input's dtype | `native_dropout`; the mask is of bool |
# | `scaled_dot_product_attention` with dropout | all scores are made and kept | as without dropout: none are |
#
# (ATen/native/layer_norm.cpp `rms_norm_symint`, Dropout.cpp `is_fused_kernel_acceptable`,
# transformers/sdp_utils_cpp.cpp `check_dropout`; and the same for torch 2.11 to 2.15.)


_BACKWARDS = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})


class AcceleratorKernels(OnFunctions):
    """Computes with tensors without values as on an accelerator; on a rank also what backward computes again.

        with AcceleratorKernels():
            loss = model(tokens).sum()
            loss.backward()

    Norms that are written out in Python stay so.

    Args:
        norms: False: `rms_norm` stays the operations of a CPU.
    """

    order = Level.KERNELS

    def __init__(self, *, norms: bool = True) -> None:
        self._kernels: dict[Any, Callable[..., Any]] = {
            F.dropout: _dropout,
            torch.dropout: _dropout,
            F.scaled_dot_product_attention: _attention,
        }
        if norms:
            self._kernels |= {F.rms_norm: _rms_norm, torch.rms_norm: _rms_norm}

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        """Call the accelerator's kernel, if there is one for this call."""
        if func in _BACKWARDS and (context := current_context()) is not None:
            # Torch leaves function modes before a backward, which has to compute the same again for a checkpoint.
            before = context.function_modes
            context.function_modes = [*before, *([self] if self not in before else [])]
            try:
                return proceed(*args, **kwargs)
            finally:
                context.function_modes = before
        kernel = self._kernels.get(func)
        if kernel is not None and args and type(args[0]) is FakeTensor:
            return kernel(*args, **kwargs)
        return proceed(*args, **kwargs)


def _rms_norm(
    x: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    if weight is None or weight.dtype != x.dtype:
        return torch.rms_norm(x, normalized_shape, weight, eps)  # several operations on accelerators as well
    return _fused_rms_norm(x, weight, torch.finfo(torch.float32).eps if eps is None else eps)[0]


@torch.library.custom_op("sim::_fused_rms_norm", mutates_args=())
def _fused_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    dims = list(range(x.dim() - weight.dim(), x.dim()))
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype), scale


@_fused_rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.shape[: x.dim() - weight.dim()]
    return torch.empty_like(x), x.new_empty((*rows, *[1] * weight.dim()), dtype=torch.float32)


@torch.library.custom_op("sim::_fused_rms_norm_backward", mutates_args=())
def _fused_rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dims = list(range(x.dim() - weight.dim(), x.dim()))
    normal = x.float() * scale
    scaled = grad.float() * weight
    grad_x = (scaled - normal * (scaled * normal).mean(dims, keepdim=True)) * scale
    grad_weight = grad.float() * normal
    if x.dim() > weight.dim():
        grad_weight = grad_weight.flatten(0, x.dim() - weight.dim() - 1).sum(0)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


@_fused_rms_norm_backward.register_fake
def _(
    grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, output[1])


def _rms_norm_backward(ctx: Any, grad: torch.Tensor, grad_scale: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
    x, weight, scale = ctx.saved_tensors
    return *_fused_rms_norm_backward(grad, x, scale, weight), None


_fused_rms_norm.register_autograd(_rms_norm_backward, setup_context=_keep)


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or not 0 < p < 1:
        return torch.dropout(x, p, training)
    return torch.native_dropout(x, p, True)[0]


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if len(args) > 1:
        args = (args[0], 0.0, *args[2:])
    else:
        kwargs = {**kwargs, "dropout_p": 0.0}
    return F.scaled_dot_product_attention(q, k, v, *args, **kwargs)


# The fused attention that a device computes the blocks of a ring with -------------------------------------------------

_LARGEST_HEADS = MappingProxyType({"flash": 256, "cudnn": 128})  # of bfloat16 and float16, with backward


def fused_attention(device: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionKernel | None:
    """Return the kernel that a device would compute a block with, for tensors without values; None: it has none.

    torch itself cannot be asked without a GPU. By its rules (ATen/native/transformers/cuda/sdp_utils.cpp, torch 2.13)
    FlashAttention and cuDNN's attention take halves, and memory-efficient attention takes float32 and larger heads.

    Args:
        device: see `Job.ring_kernel`.
        q: (batch, heads, queries, head_dim).
        k: (batch, key and value heads, keys, head_dim).
        v: as `k`.
    """
    if device == "cpu":
        return host_attention(q, k, v)
    if device == "npu":
        if not hasattr(torch.ops.npu, fused.FUSED[0]):  # else torch_npu is loaded
            fused.define()
        return npu_attention(q, k, v, torch.ops.npu)
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not all(x.numel() for x in (q, k, v)):
        return None
    size = q.shape[-1]
    if q.dtype == torch.float32 or size > _LARGEST_HEADS["flash"]:
        return EfficientAttention()
    by_cudnn = device == "cudnn" and size <= _LARGEST_HEADS["cudnn"] and size % 8 == 0
    return CudnnAttention() if by_cudnn else FlashAttention()
