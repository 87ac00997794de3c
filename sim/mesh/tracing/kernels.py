"""Kernels of accelerators that torch's CPU lacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from hyper_parallel.platform.attention import (
    AttentionKernel,
    CudnnAttention,
    EfficientAttention,
    FlashAttention,
    host_attention,
    npu_attention,
)
from sim.late import fused

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


class AcceleratorKernels(TorchFunctionMode):
    """A mode in which tensors without values are computed with as on an accelerator.

        with AcceleratorKernels():
            loss = model(tokens).sum()
            loss.backward()

    Norms that are written out in Python stay so.

    Args:
        norms: False: `rms_norm` stays the operations of a CPU.
    """

    def __init__(self, *, norms: bool = True) -> None:
        super().__init__()
        self._kernels: dict[Any, Callable[..., Any]] = {
            F.dropout: _dropout,
            torch.dropout: _dropout,
            F.scaled_dot_product_attention: _attention,
        }
        if norms:
            self._kernels |= {F.rms_norm: _rms_norm, torch.rms_norm: _rms_norm}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the accelerator's kernel, if there is one for this call."""
        runs = _BACKWARDS.get(func)
        run = None if runs is None else runs(*args, **(kwargs or {}))
        if run is not None:
            with self:
                found = run()
            return found if func is torch.autograd.grad else None
        kernel = self._kernels.get(func)
        if kernel is not None and args and type(args[0]) is FakeTensor:
            return kernel(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


# -- backward in the mode ----------------------------------------------------------------------------------------------
#
# Torch leaves function modes before it runs a backward. What a checkpoint computes once more is to be the same, so that
# its engine is called here, with the arguments that torch would call it with.

_engine = torch.autograd.graph._engine_run_backward


def _of_tensor(
    tensor: torch.Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> Callable[[], Any]:
    return _of_tensors((tensor,), None if gradient is None else (gradient,), retain_graph, create_graph, inputs=inputs)


def _of_tensors(
    tensors: Any,
    grads: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
    grad_tensors: Any = None,
) -> Callable[[], Any]:
    outputs = _as_tuple(tensors)
    given = next((each for each in (grads, grad_tensors, grad_variables) if each is not None), None)
    keep = create_graph if retain_graph is None else retain_graph
    asked = outputs, _grads_of(outputs, given), keep, create_graph, _as_tuple(inputs)
    return partial(_engine, *asked, allow_unreachable=True, accumulate_grad=True)


def _of_grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Callable[[], Any] | None:
    del only_inputs
    if is_grads_batched or materialize_grads:
        return None
    starts = _as_tuple(outputs)
    keep = create_graph if retain_graph is None else retain_graph
    asked = starts, _grads_of(starts, grad_outputs), keep, create_graph, _as_tuple(inputs)
    return partial(_engine, *asked, allow_unreachable=bool(allow_unused), accumulate_grad=False)


_BACKWARDS: MappingProxyType[Any, Callable[..., Callable[[], Any] | None]] = MappingProxyType(
    {torch.Tensor.backward: _of_tensor, torch.autograd.backward: _of_tensors, torch.autograd.grad: _of_grad}
)


def _as_tuple(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, torch.Tensor) else tuple(given)


def _grads_of(outputs: tuple[Any, ...], given: Any) -> tuple[Any, ...]:
    known = (given,) if isinstance(given, torch.Tensor) else given or (None,) * len(outputs)
    return tuple(
        torch.ones_like(output) if grad is None and getattr(output, "requires_grad", False) else grad
        for output, grad in zip(outputs, known, strict=True)
    )


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
