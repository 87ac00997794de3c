"""Autocast on a late device: operations that compute in the short dtype, in float32, or in the widest they get.

torch has such kernels for its own devices, and others bring theirs. The lists are those of GPUs, of
`ATen/autocast_mode.h` in torch 2.13. A weight is cast for each use, where torch keeps the first cast of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from sim.ops import tensors_of

_SHORT = """
_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
scaled_dot_product_attention
"""
_FLOAT32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa
"""
# As those, but by their argument `dtype`, unless that is given.
_RESULT_FLOAT32 = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
_KEY = "AutocastPrivateUse1"


def register_autocast() -> list[torch.library.Library]:
    """Make these the kernels of autocast, for good; returns what they live as long as."""
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, _KEY)
    kernels = ((_SHORT, _short), (_FLOAT32, _float32), (_RESULT_FLOAT32, _result_float32), (_WIDEST, _widest))
    for names, kernel in kernels:
        for name in names.split():
            packet, _, overload = name.partition(".")
            aten.impl(name, partial(kernel, getattr(getattr(torch.ops.aten, packet), overload or "default")), _KEY)
    return [everything, aten]


def _short(op: Any, *args: Any, **kwargs: Any) -> Any:
    return _called(op, torch.get_autocast_dtype("npu"), args, kwargs)


def _float32(op: Any, *args: Any, **kwargs: Any) -> Any:
    return _called(op, torch.float32, args, kwargs)


def _result_float32(op: Any, *args: Any, **kwargs: Any) -> Any:
    names = [argument.name for argument in op._schema.arguments[: len(args)]]
    asked = kwargs.get("dtype", args[names.index("dtype")] if "dtype" in names else None)
    if asked is None and _is_cast(args[0]):
        place = next((place for place, name in enumerate(names) if name == "dtype"), None)
        if place is None:
            kwargs["dtype"] = torch.float32
        else:
            args = (*args[:place], torch.float32, *args[place + 1 :])
    return _called(op, None, args, kwargs)


def _widest(op: Any, *args: Any, **kwargs: Any) -> Any:
    widest: torch.dtype | None = None
    for each in tensors_of((args, kwargs)):
        if _is_cast(each):
            widest = each.dtype if widest is None else torch.promote_types(widest, each.dtype)
    return _called(op, widest, args, kwargs)


def _called(op: Any, dtype: torch.dtype | None, args: Any, kwargs: Any) -> Any:
    """Call an operation without autocast, with tensors of a dtype; None: of what they have."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))
    with torch._C._ExcludeDispatchKeyGuard(keys):
        return op(*(_cast(each, dtype) for each in args), **{name: _cast(each, dtype) for name, each in kwargs.items()})


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast(each, dtype) for each in value]
    return value.to(dtype) if dtype is not None and _is_cast(value) else value


def _is_cast(value: Any) -> bool:
    """Whether autocast touches it: a floating tensor of the device, but none of float64."""
    if not isinstance(value, torch.Tensor) or value.device.type != "npu":
        return False
    return value.is_floating_point() and value.dtype is not torch.float64
