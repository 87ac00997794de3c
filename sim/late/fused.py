"""Fused operators of accelerators that the CPU lacks, for a late device: attention, and the gradient of `rms_norm`.

`scaled_dot_product_attention` is one kernel there, as on accelerators, wherever one on the CPU computes it; else it is
torch's products. `torch_npu.npu_fusion_attention` and `npu_fusion_attention_grad` are there by plain products, with the
arguments, results and layouts that they have, and what attention without dropout takes of them: the layout BNSD, no
mask, or the one that stands for any causal mask. Anything else is refused.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.experimental import register_sharding
from torch.nn.attention import SDPBackend, sdpa_kernel

_ATEN = torch.ops.aten

ATTENTION = _ATEN._scaled_dot_product_flash_attention_for_cpu.default
"""What computes attention on the host: the output, and of each query the log-sum of its scores."""

ATTENTION_GRAD = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
"""The matching gradient."""

FUSED = ("npu_fusion_attention", "npu_fusion_attention_grad")
"""The operators, by the names that torch_npu gives its functions, too."""

COMPUTED = ("_fusion_attention", "_fusion_attention_grad", "_rms_norm_grad")
"""What these call, and what `rms_norm` does, which returns tensors only."""

_MASK, _TIMES, _CAUSAL = 2048, 8, 2
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_OPTIONS = (
    "float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, "
    "int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, "
    "bool gen_mask_parallel=True, bool sync=False"
)
_SCHEMAS = (
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, *, Tensor? pse=None, "
    f"Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, int, int, int)",
    "npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout, *, "
    "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? softmax_max=None, "
    "Tensor? softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, float scale_value=1., "
    f"int seed=0, int offset=0, int numels=0, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    "_fusion_attention(Tensor query, Tensor key, Tensor value, bool causal, float scale) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, Tensor largest, Tensor total, "
    "Tensor out, bool causal, float scale) -> (Tensor, Tensor, Tensor, Tensor)",
    "_rms_norm_grad(Tensor grad, Tensor x, SymInt[] shape, Tensor rstd, Tensor? weight) -> (Tensor, Tensor)",
)


@cache
def define() -> torch.library.Library:
    """Make the operators known to torch, once for the process; returns what they live as long as."""
    library = torch.library.Library("npu", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    for key in ("CPU", "Meta"):
        library.impl("_fusion_attention", _attention, key)
        library.impl("_fusion_attention_grad", _gradients, key)
        library.impl("_rms_norm_grad", _rms_norm_grad, key)
    library.impl("npu_fusion_attention", _fused, "CompositeExplicitAutograd")
    library.impl("npu_fusion_attention_grad", _fused_gradients, "CompositeExplicitAutograd")
    return library


# -- torch's -----------------------------------------------------------------------------------------------------------


def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention` as an accelerator has it, above autograd.

    Args:
        q: (batch, heads, queries, head_dim).
        k: (batch, key and value heads, keys, head_dim).
        v: as `k`.
        attn_mask: of bool, what is seen; else what is added to the scores.
        dropout_p: probability that a weight is zeroed.
        is_causal: query i sees keys up to i.
        scale: of the scores; None: 1 / sqrt(head_dim).
        enable_gqa: there may be fewer key heads than query heads.
    """
    if dropout_p or not _is_fused(q, k, v, attn_mask, enable_gqa):
        plain = _ATEN.scaled_dot_product_attention.default
        out: Tensor = plain.decompose(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return out
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
    fused = _ATEN._scaled_dot_product_fused_attention_overrideable
    out, *_ = fused(q, k, v, attn_mask, dropout_p, is_causal, False, scale=scale)
    return out


def _is_fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shares_heads: bool) -> bool:
    """Whether one kernel computes it: as on the CPU (`sdp_utils_cpp.cpp`), but no accelerator has one for float64."""
    if not (torch.backends.cuda.flash_sdp_enabled() or torch._C._get_overrideable_sdp_enabled()):
        return False
    if any(x.dim() != 4 or not x.numel() or x.stride(-1) != 1 or x.dtype != q.dtype for x in (q, k, v)):
        return False
    if q.dtype not in _DTYPES or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        return False
    if q.shape[1] != k.shape[1] and not (shares_heads and q.shape[1] % k.shape[1] == 0 and _heads_may_be_shared()):
        return False
    return mask is None or _may_be_added(mask, q, k.shape[2])


def _may_be_added(mask: Tensor, q: Tensor, keys: int) -> bool:
    """Whether the kernel takes a mask: one without a gradient, whose dims are those of the scores, or 1."""
    scores = (*q.shape[:3], keys)
    alike = all(size in (1, wanted) for size, wanted in zip(mask.shape[::-1], scores[::-1], strict=False))
    return alike and mask.dim() in (2, 4) and mask.dtype in (torch.bool, q.dtype) and not mask.requires_grad


@cache
def _heads_may_be_shared() -> bool:
    """Whether this torch's kernel for the CPU computes with fewer key heads than query heads."""
    q, k = (torch.empty(1, heads, 1, 8, device="cpu") for heads in (2, 1))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch._fused_sdp_choice(q, k, k, enable_gqa=True) == SDPBackend.FLASH_ATTENTION.value


def split_attention() -> None:
    """Tell torch how DTensors may be split in it, as it knows of the kernels of GPUs: by batches, or by heads."""
    _heads_may_be_shared()  # as long as no mode is on
    fused = _ATEN._scaled_dot_product_fused_attention_overrideable
    backward = _ATEN._scaled_dot_product_fused_attention_overrideable_backward
    register_sharding(fused.default)(partial(_placements, fused.default, ("output", "logsumexp")))
    grads = ("grad_query", "grad_key", "grad_value")
    register_sharding(backward.default)(partial(_placements, backward.default, grads))


def _placements(op: Any, split: tuple[str, ...], *args: Any, **options: Any) -> list[tuple[list[Any], list[Any]]]:
    """Placements of results, some of which are split, and of arguments; with a bias, all ranks compute all."""
    given = {argument.name: each for argument, each in zip(op._schema.arguments, args, strict=False)}
    are_tensors = [isinstance(each, DTensorSpec) for each in args]
    ways = (Replicate(), Shard(0), Shard(1)) if given.get("attn_bias") is None else (Replicate(),)
    return [
        (
            [how if result.name in split else None for result in op._schema.returns],
            [how if is_tensor else None for is_tensor in are_tensors],
        )
        for how in ways
    ]


def _rms_norm_grad(
    grad: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight; of y = r * x * weight, with 1 / r the root of the mean of squares."""
    dims = list(range(x.dim() - len(shape), x.dim()))
    wide, normed = grad.to(rstd.dtype), x * rstd
    of_normed = wide if weight is None else wide * weight
    of_x = (of_normed - normed * (normed * of_normed).sum(dims, keepdim=True) / math.prod(shape)) * rstd
    of_weight = (wide * normed).flatten(0, dims[0] - 1).sum(0) if dims[0] else wide * normed
    return of_x.to(x.dtype), of_weight.to(x.dtype)


# -- torch_npu's -------------------------------------------------------------------------------------------------------


def _fused(
    q: Tensor, k: Tensor, v: Tensor, head_num: int, input_layout: str, *, atten_mask: Any = None, scale: float = 1.0,
    **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    causal = _checked((q, k, v), head_num, input_layout, atten_mask, options)
    return (*torch.ops.npu._fusion_attention(q, k, v, causal, scale), 0, 0, 0)


def _fused_gradients(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor, head_num: int, input_layout: str, *, atten_mask: Any = None,
    softmax_max: Any = None, softmax_sum: Any = None, attention_in: Any = None, scale_value: float = 1.0,
    seed: int = 0, offset: int = 0, numels: int = 0, **options: Any,
) -> Any:  # fmt: skip
    del seed, offset, numels  # of dropout
    causal = _checked((q, k, v, dy, attention_in), head_num, input_layout, atten_mask, options)
    sums = (*q.shape[:3], _TIMES)
    for name, found in (("softmax_max", softmax_max), ("softmax_sum", softmax_sum)):
        if found is None or found.shape != sums or found.dtype != torch.float32 or not found.is_contiguous():
            raise RuntimeError(f"npu_fusion_attention_grad: {name} must be {sums}, contiguous, of float32")
    return torch.ops.npu._fusion_attention_grad(
        q, k, v, dy, softmax_max, softmax_sum, attention_in, causal, scale_value
    )  # fmt: skip


def _checked(tensors: Any, head_num: int, input_layout: str, mask: Any, options: dict[str, Any]) -> bool:
    """Refuse what this has not; returns whether attention is causal."""
    q, k, v, *_ = tensors
    mode = options.pop("sparse_mode", 0)
    given = {name: value for name, value in options.items() if value not in (None, False)}
    usual = {"keep_prob": 1.0, "pre_tockens": 2147483647, "next_tockens": 2147483647, "inner_precise": 0}
    usual |= {"gen_mask_parallel": True}
    unknown = [name for name, value in given.items() if usual.get(name) != value]
    if input_layout != "BNSD" or unknown or (mask is None) != (mode == 0) or mode not in (0, _CAUSAL):
        seen = f"input_layout={input_layout!r}, sparse_mode={mode}, and {unknown}"
        raise NotImplementedError(f"a simulated npu has no npu_fusion_attention with {seen}")
    if head_num != q.shape[1] or q.shape[1] % k.shape[1] or k.shape != v.shape:
        raise RuntimeError(f"npu_fusion_attention: {head_num} heads, of {tuple(q.shape)} and {tuple(k.shape)}")
    if mask is not None and (mask.shape != (_MASK, _MASK) or mask.dtype != torch.bool):
        raise RuntimeError(f"npu_fusion_attention: sparse_mode 2 needs a mask ({_MASK}, {_MASK}) of bool")
    if any(each.dtype not in _DTYPES or each.dtype != q.dtype or not each.is_contiguous() for each in tensors):
        raise RuntimeError(f"npu_fusion_attention: tensors must be contiguous, of one dtype of {_DTYPES}")
    return mask is not None


def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    scores = _scores(q, k, causal, scale)
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    out = (weights / total) @ _each(v, q)
    sums = (x.expand(*x.shape[:3], _TIMES).contiguous() for x in (largest, total))
    return out.to(q.dtype), *sums, q.new_empty(0)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor, largest: Tensor, total: Tensor, out: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    weights = (_scores(q, k, causal, scale) - largest[..., :1]).exp() / total[..., :1]
    grad = dy.float()
    mean = (grad * out.float()).sum(-1, keepdim=True)
    of_scores = weights * (grad @ _each(v, q).mT - mean) * scale
    of_keys = (of_scores.mT @ q.float(), weights.mT @ grad)
    of_k, of_v = (x.unflatten(1, (k.shape[1], -1)).sum(2).to(q.dtype) for x in of_keys)
    return (of_scores @ _each(k, q)).to(q.dtype), of_k, of_v, q.new_empty(0)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = q.float() @ _each(k, q).mT * scale
    if not causal:
        return scores
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu_(1)
    return scores.masked_fill_(hidden, -torch.inf)


def _each(x: Tensor, q: Tensor) -> Tensor:
    """One key or value head for each query head, in the dtype that the device computes in."""
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], dim=1)
