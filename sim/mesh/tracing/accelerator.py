"""Kernels that accelerators have and torch's CPU lacks, for tensors without values.

The same call is another set of operations on a CPU, and keeps other tensors for backward:

| call | CPU | accelerator |
|---|---|---|
| `rms_norm` | eight operations; keeps three float32 copies | one; keeps its input and one number per row |
| `dropout` | draws into a mask of the input's dtype | `native_dropout`; the mask is of bool |
| `scaled_dot_product_attention` with dropout | all scores are made and kept | as without dropout: none are |

(ATen/native/layer_norm.cpp `rms_norm_symint`, Dropout.cpp `is_fused_kernel_acceptable`, transformers/sdp_utils_cpp.cpp
`check_dropout`; and the same for torch 2.11 to 2.15.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

__all__ = ["AcceleratorKernels"]


class AcceleratorKernels(TorchFunctionMode):
    """A mode in which tensors without values are computed with as on an accelerator.

        with AcceleratorKernels():
            loss = model(tokens).sum()
            loss.backward()

    Norms that are written out in Python stay so.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kernels: dict[Any, Callable[..., Any]] = {
            F.dropout: _dropout,
            torch.dropout: _dropout,
            F.scaled_dot_product_attention: _attention,
            F.rms_norm: _rms_norm,
            torch.rms_norm: _rms_norm,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the accelerator's kernel, if there is one for this call."""
        kernel = self._kernels.get(func)
        if kernel is not None and args and type(args[0]) is FakeTensor:
            return kernel(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


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
