"""Kinds of operations, and the fused regions that running operations belong to."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from sim.ops import named_arguments

# Fused regions: the kernel that a running operation belongs to, where several are one ---------------------------------


class _ThreadRegions(threading.local):
    region = 0
    regions = 0
    recomputes = False
    traces = False


_now = _ThreadRegions()


def region() -> int:
    """Return the number of the kernel that a compiler would make of what is running; 0: it is not compiled.

    Each run of a graph has other numbers than those before it.
    """
    return _now.region


def recomputes() -> bool:
    """Tell whether the running graph, of a backward, is at an operation that its forward has done before."""
    return _now.recomputes


def traces() -> bool:
    """Tell whether a graph is being traced: then modules are called, and nothing is computed."""
    return _now.traces


@contextmanager
def one_kernel() -> Iterator[None]:
    """Take what is computed in the block as one kernel, as if it was compiled, or written by hand."""
    with being(region=take_numbers(1)):
        yield


def being(**values: Any) -> AbstractContextManager[None]:
    """Let what this module tells be something else, until the end of the block."""
    return having(_now, **values)


@contextmanager
def having(holder: Any, **values: Any) -> Iterator[None]:
    """Let attributes of an object or a class have other values, until the end of the block."""
    before = {name: getattr(holder, name) for name in values}
    for name, value in values.items():
        setattr(holder, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)


def take_numbers(count: int) -> int:
    """Return the first of some numbers that no kernel has had."""
    first = _now.regions + 1
    _now.regions += count
    return first


def enter(number: int, again: bool) -> None:
    """Say that the next operation is of a kernel, and whether it was done before."""
    _now.region, _now.recomputes = number, again


# The op kind of each of torch's operations, looked up once per operation and overload ---------------------------------


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MATMULS = _words(
    """
    mm addmm bmm baddbmm addbmm addmv mv dot _scaled_mm _grouped_mm _int_mm linear convolution _convolution
    convolution_backward cudnn_convolution mkldnn_convolution addr convolution_overrideable _slow_conv2d_forward
    mkldnn_linear
    """
)
_ATTENTIONS = _words(
    """
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable npu_fusion_attention _flash_attention_forward
    _efficient_attention_forward
    """
)
_ATTENTION_BACKWARDS = _words(
    """
    _scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_fused_attention_overrideable_backward npu_fusion_attention_grad _flash_attention_backward
    _efficient_attention_backward
    """
)
_RANDOM = _words(
    """
    bernoulli bernoulli_ native_dropout normal_ uniform_ rand randn rand_like randn_like randint randperm
    exponential_ random_ normal multinomial randint_like _fused_dropout log_normal_ geometric_ cauchy_ poisson
    rrelu_with_noise
    """
)
_OPTIMIZERS = frozenset(
    {"_fused_adamw_", "_fused_adam_", "_fused_sgd_", "_fused_adagrad_", "_fused_adamw", "_fused_adam", "_fused_sgd"}
)
_HOST = _words(
    """
    empty empty_like empty_strided new_empty new_empty_strided empty_permuted _unsafe_view lift_fresh lift detach_
    resize_ set_ is_same_size _version device size stride sym_size sym_stride sym_numel sym_storage_offset
    is_contiguous _has_same_storage_numel unsqueeze_ squeeze_ transpose_ t_ as_strided_ record_stream
    _debug_has_internal_overlap _to_functional_tensor is_pinned _local_scalar_dense item equal _assert_async
    _foreach_empty
    """
)
_MEMORY = _words(
    # Copies and fills
    """
    copy_ _to_copy clone contiguous cat stack fill_ zero_ zeros ones full zeros_like ones_like full_like new_zeros
    new_ones new_full scalar_tensor arange iota eye linspace split_with_sizes_copy _chunk_cat chunk_cat repeat
    repeat_interleave constant_pad_nd flip roll tril triu tril_ triu_ unfold_copy select_backward slice_backward
    unfold_backward copy index_fill_ index_fill select_scatter slice_scatter diagonal_backward pad as_strided_copy
    _pin_memory tril_indices triu_indices lerp_ _reshape_copy view_copy logspace embedding_renorm_
    """
    # By index
    """
    index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put index_select index_add index_add_
    index_copy index_copy_ index_reduce_ gather gather_backward scatter scatter_ scatter_add scatter_add_
    scatter_reduce scatter_reduce_ masked_fill masked_fill_ masked_scatter masked_scatter_ masked_select nonzero
    take put_ embedding where embedding_dense_backward _embedding_bag _embedding_bag_forward_only one_hot
    take_along_dim searchsorted bucketize
    """
    # Reductions, scans, orders
    """
    sum mean amax amin aminmax max min prod any all argmax argmin var std var_mean std_mean norm linalg_vector_norm
    logsumexp cumsum cumprod cumsum_ logcumsumexp _fft_r2c _fft_c2c _fft_c2r view_as_real_copy view_as_complex_copy
    sort argsort topk kthvalue median unique _unique2 unique_dim bincount histc count_nonzero nansum cummax cummin
    mode _weight_norm_interface _weight_norm_interface_backward
    """
    # Norms, softmaxes, losses
    """
    native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward native_dropout_backward
    native_batch_norm native_batch_norm_backward native_group_norm native_group_norm_backward
    _native_batch_norm_legit cudnn_batch_norm cudnn_batch_norm_backward batch_norm_backward _batch_norm_with_update
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax nll_loss_forward
    nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss mse_loss_backward _masked_softmax
    binary_cross_entropy binary_cross_entropy_backward smooth_l1_loss smooth_l1_loss_backward kl_div
    """
    # Element by element, though torch does not tag it
    """
    floor_divide rsub polar complex log_sigmoid_backward fill true_divide conj_physical
    """
    # Activations that torch does not tag
    """
    gelu gelu_backward silu silu_backward relu relu_ threshold_backward sigmoid_backward tanh_backward
    hardtanh_backward leaky_relu_backward elu_backward softplus_backward glu glu_backward hardswish_backward
    mish_backward prelu _prelu_kernel _prelu_kernel_backward log_sigmoid_forward
    """
    # Pooling and resizing
    """
    max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d
    _adaptive_avg_pool2d_backward upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d
    upsample_bilinear2d_backward im2col col2im pixel_shuffle pixel_unshuffle max_pool2d avg_pool1d
    _amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_
    """
)
_READS_ONLY_ITS_OUTPUT = frozenset(
    {"embedding", "index", "_unsafe_index", "index_select", "gather", "take", "masked_select", "take_along_dim"}
)


def kind_of(func: Any) -> str:
    """Return the kind of an operation's kernel, see `sim.mesh.program.Op`; `unknown` where there is none.

    >>> kind_of(torch.ops.aten.mm.default), kind_of(torch.ops.aten.view.default), kind_of(torch.ops.aten.add.Tensor)
    ('matmul', 'host', 'memory')

    Args:
        func: an overload, as `__torch_dispatch__` gets it.
    """
    name = func._schema.name.rpartition("::")[2]
    if name in _MATMULS:
        return "matmul"
    if name in _ATTENTIONS:
        return "attention"
    if name in _ATTENTION_BACKWARDS:
        return "attention_backward"
    if name in _OPTIMIZERS:
        return "optimizer"
    if name in _RANDOM:
        return "random"
    if name in _HOST or getattr(func, "is_view", False):
        return "host"
    if name in _MEMORY or name.removesuffix("_") in _MEMORY or name.startswith("_foreach_"):
        return "memory"
    tags = getattr(func, "tags", ())
    if torch.Tag.pointwise in tags or getattr(torch.Tag, "reduction", None) in tags:
        return "memory"
    return "unknown"


def memory_kind(func: Any, args: Sequence[Any], given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> str:
    """Return the kind of a kernel that is bounded by what it moves, by how its operands lie in memory.

    torch's elementwise kernels take several elements at a time where all operands lie alike and without gaps
    (`memory`). Else, and where they make elements larger, they take one by one (`scalar`). Those that are broadcast, or
    have gaps, and are converted on the way, and `cat` of inner dims, are of a general form that is slower (`general`).

    >>> x, row, rows = torch.ones(4, 6), torch.ones(6), torch.ones(4, 9)[:, :6]
    >>> others = {"alike": x, "half": x.bfloat16(), "row": row, "half a row": row.bfloat16(), "gaps": rows}
    >>> add = torch.ops.aten.add.Tensor
    >>> {name: memory_kind(add, (x, other), [x, other], [x]) for name, other in others.items()}
    {'alike': 'memory', 'half': 'scalar', 'row': 'scalar', 'half a row': 'general', 'gaps': 'scalar'}
    """
    name = func._schema.name.rpartition("::")[2]
    if name == "cat":
        dim = args[1] if len(args) > 1 else 0
        return "memory" if all(size == 1 for size in results[0].shape[: dim % results[0].dim()]) else "general"
    if not results or not (torch.Tag.pointwise in getattr(func, "tags", ()) or name in _CONVERTS):
        return "memory"
    out, wanted = results[0], _steps(results[0])
    operands = [each for each in (*given, *results) if each.dim() and each.numel() > 1]
    lie_alike = _is_dense(out) and all(_steps(each) == wanted for each in operands)
    if lie_alike:
        return "scalar" if any(each.dtype.itemsize < out.dtype.itemsize for each in operands) else "memory"
    return "scalar" if all(each.dtype == out.dtype for each in operands) else "general"


_CONVERTS = frozenset({"copy_", "_to_copy"})


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """The size and stride of each dim that is one."""
    return [pair for pair in zip(tensor.shape, tensor.stride(), strict=True) if pair[0] != 1]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie without gaps, in whatever order."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 == tensor.numel()


_REPORTED = {
    "matmul": "matrix products",
    "attention": "attention",
    "attention_backward": "attention",
    "random": "random numbers",
    "optimizer": "optimizer",
    "fused": "fused operations",
}
_COPIES = _words(
    """
    copy_ _to_copy clone cat stack fill_ zero_ zeros zeros_like split_with_sizes_copy _chunk_cat constant_pad_nd
    repeat new_zeros ones_like full _foreach_copy_ _foreach_zero_
    """
)


def reported_kind(kind: str, name: str) -> str:
    """Return the kind by which a step's seconds are reported: finer than that of the kernel, which prices go by.

    >>> reported_kind("memory", "aten.native_layer_norm"), reported_kind("memory", "aten::_log_softmax")
    ('norms', 'softmax and loss')
    >>> reported_kind("attention_backward", "aten._flash_attention_backward"), reported_kind("memory", "aten.mul")
    ('attention', 'pointwise and reductions')
    """
    if kind in _REPORTED:
        return _REPORTED[kind]
    short = name.replace("::", ".").rpartition(".")[2]
    if any(word in short for word in ("layer_norm", "rms_norm", "batch_norm", "group_norm")):
        return "norms"
    if any(word in short for word in ("softmax", "nll_loss", "cross_entropy")):
        return "softmax and loss"
    if short in _COPIES:
        return "copies"
    return "embedding" if "embedding" in short else "pointwise and reductions"


def reads_only_its_output(func: Any) -> bool:
    """Tell whether an operation reads as much as it returns of its first argument, such as rows of a table."""
    return func._schema.name.rpartition("::")[2] in _READS_ONLY_ITS_OUTPUT


def count_flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Count floating-point operations as `torch.utils.flop_counter` does: of an attention the whole square.

    Attention is counted here: torch 2.11 has no count where several heads share their keys, and none has all kernels.
    """
    name = func._schema.name.rpartition("::")[2]
    if name in _ATTENTIONS or name in _ATTENTION_BACKWARDS:
        batch, heads, _, queries, keys, size, *_ = attention_shape(func, args, kwargs)
        backward = name in _ATTENTION_BACKWARDS
        value = args[3 if backward and not name.startswith("npu") else 2]
        products = 3 * size + 2 * value.shape[-1] if backward else size + value.shape[-1]
        return int(2 * batch * heads * queries * keys * products)
    count = flop_registry.get(func._overloadpacket)
    if count is not None:
        return int(count(*args, **kwargs, out_val=out))
    if name == "_grouped_mm":  # each row, column or element of the inner dim belongs to one group
        a, b = args[:2]
        return int(2 * (a[0] if a.dim() == 3 and b.dim() == 2 else a).numel() * b.shape[-1])
    return 0


def matmul_shape(func: Any, args: Any, out: Any) -> tuple[int, ...]:
    """Return (batch, m, n, k) of a product; of a convolution, those of the product it amounts to; else ()."""
    name = func._schema.name.rpartition("::")[2]
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    first = out[0] if isinstance(out, (tuple, list)) else out
    if name in ("mm", "_scaled_mm", "_int_mm"):
        return (1, tensors[0].shape[0], tensors[1].shape[1], tensors[0].shape[1])
    if name == "addmm":
        return (1, tensors[1].shape[0], tensors[2].shape[1], tensors[1].shape[1])
    if name in ("bmm", "baddbmm"):
        a, b = tensors[-2:]
        return (a.shape[0], a.shape[1], b.shape[2], a.shape[2])
    if name == "_grouped_mm":
        a, b = tensors[:2]
        groups = b.shape[0] if b.dim() == 3 else max(1, a.shape[0] if a.dim() == 3 else 1)
        return (groups, a.shape[-2] // (groups if a.dim() == 2 else 1), b.shape[-1], a.shape[-1])
    if name in ("convolution", "_convolution", "cudnn_convolution", "convolution_overrideable", "mkldnn_convolution"):
        weight = tensors[1]
        places = first.numel() // max(first.shape[1], 1)
        return (1, places, weight.shape[0], weight.numel() // max(weight.shape[0], 1))
    if name == "convolution_backward":
        grad, _, weight = tensors[:3]
        places = grad.numel() // max(grad.shape[1], 1)
        return (2, places, weight.shape[0], weight.numel() // max(weight.shape[0], 1))
    return ()


def attention_shape(func: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
    """Return (batch, heads, kv_heads, queries, keys, head_dim, is_causal) of an attention or its backward."""
    name = func._schema.name.rpartition("::")[2]
    grad_first = name in _ATTENTION_BACKWARDS and not name.startswith("npu")
    q, k = (args[1], args[2]) if grad_first else (args[0], args[1])
    # Of an NPU's every mode but the first has a causal mask, as here nobody gives another one.
    given = named_arguments(func, args, kwargs)
    is_causal = kwargs.get("sparse_mode", 0) != 0 if name.startswith("npu") else given.get("is_causal")
    if "flash_attention_forward" in name or ("flash_attention_backward" in name and "product" not in name):
        batch, queries, heads, size = q.shape if q.dim() == 4 else (1, *q.shape)
        keys, kv_heads = (k.shape[1], k.shape[2]) if k.dim() == 4 else k.shape[:2]
    else:
        batch, heads, queries, size = q.shape
        kv_heads, keys = k.shape[1], k.shape[2]
    return (batch, heads, kv_heads, queries, keys, size, int(bool(is_causal)))
