"""Linear layers that multiply in float8, scaled anew for each tensor and call (torchao's "tensorwise", "dynamic")."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

__all__ = ["use_float8"]

# What such a layer does beside its product, in the order of torchao's `Float8Linear`, which keeps no float8 for
# backward:
#
#     forward     cast(x), cast(w)                         y = x8 @ w8.T     keeps x and w as they came
#     backward    cast(grad), cast(w), cast(x)             x.grad = grad8 @ w8, w.grad = grad8.T @ x8
#     cast(t)     s = 448 / max |t|;  t8 = (t * s) as float8, once along rows and once along columns where needed
#
# Operation by operation a cast writes |t|, t in float32, its product with s, and that clamped: 14 bytes per element
# beside the one of t8, by kernels of their own. Compiled it is two kernels: the maximum, and one that reads t and
# writes t8. That is why a float8 model that is not compiled takes more memory and time than the same one in bfloat16.
#
# torchao's "rowwise" has a scale for each row of x and of w in forward. In backward what a product adds up over is
# another dim, so that grad, w and x are scaled anew, for each column: a maximum over rows is no kernel that can write
# t8 as well, so that t is read once more. Products of backward are those of one scale, as the ones of rows are slow
# where they add up exactly (pytorch/ao, pull request 1325), and kernels of their own scale what they return. That of
# forward scales by itself, and takes as long as both (pull request 2185): it is recorded as these.

_MULTIPLE = 16  # of both sizes of a weight: what float8 products take
_LEAST = 1e-12  # that a maximum is taken to be


def use_float8(block: nn.Module, *, rowwise: bool = False) -> int:
    """Let the linear layers of a block multiply in float8, in place; returns how many do.

    >>> block = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 3))
    >>> use_float8(block)
    1

    Layers with a size that is no multiple of 16 stay as they are. What goes in and comes out keeps its dtype, as do
    weights, which are gathered as ever.

    Args:
        block: before it is compiled or put into a checkpoint; a model's head is left alone by giving its blocks.
        rowwise: with a scale for each row, and in backward for each column, in place of one for each tensor.
    """
    product = _RowwiseProduct if rowwise else _Product
    count = 0
    for module in block.modules():
        if type(module) is nn.Linear and module.in_features % _MULTIPLE == module.out_features % _MULTIPLE == 0:
            module.forward = functools.partial(_linear, module, product)  # type: ignore[method-assign]
            count += 1
    return count


def _linear(module: nn.Linear, product: type[torch.autograd.Function], x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out: torch.Tensor = product.apply(rows, module.weight)
    out = out if module.bias is None else out + module.bias
    return out.view(*x.shape[:-1], out.shape[-1])


class _Product(torch.autograd.Function):
    """x @ w.T, each of the three products in float8."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply(_cast(x), _cast(weight), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        grad8, scale = _cast(grad, torch.float8_e5m2)
        weight8, weight_scale = _cast(weight)
        grad_x = _multiply((grad8, scale), (weight8.t().contiguous(), weight_scale), grad.dtype)
        del weight8
        x8, x_scale = _cast(x)
        grad_weight = _multiply((grad8.t().contiguous(), scale), (x8.t().contiguous(), x_scale), grad.dtype)
        return grad_x, grad_weight


class _RowwiseProduct(torch.autograd.Function):
    """The same, with scales for rows in forward and for columns in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        weight8, scale = _cast(weight, dim=1)
        return _multiply_and_scale(_cast(x, dim=1), (weight8, scale.t()), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        grad_rows, (weight8, weight_scale) = _cast(grad, dim=1), _cast(weight, dim=0)
        grad_x = _multiply_and_scale(grad_rows, (weight8.t().contiguous(), weight_scale), grad.dtype)
        del grad_rows, weight8
        (grad8, scale), (x8, x_scale) = _cast(grad, dim=0), _cast(x, dim=0)
        grad8, x8 = grad8.t().contiguous(), x8.t().contiguous()
        return grad_x, _multiply_and_scale((grad8, scale.t()), (x8, x_scale), grad.dtype)


def _cast(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, dim: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor in float8, and what its elements are to be multiplied by; `dim`: over which a scale is one."""
    most = torch.finfo(dtype).max
    largest = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = most / largest.float().clamp(min=_LEAST)
    return (x.float() * scale).clamp(-most, most).to(dtype), scale.reciprocal()


def _multiply(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Return a @ b.T; both lie along what is summed over, as float8 products want it."""
    return torch._scaled_mm(a[0], b[0].t(), a[1], b[1], out_dtype=dtype)


def _multiply_and_scale(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """The same with what rows of the result, and what columns of it, are to be multiplied by."""
    one = torch.ones((), device=a[0].device)
    return (_multiply((a[0], one), (b[0], one), dtype) * (a[1] * b[1])).to(dtype)
