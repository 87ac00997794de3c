"""The fused attention of torch_npu on a late device: its operators, by plain products.

Arguments, results and their layouts are those of `torch_npu.npu_fusion_attention` and `npu_fusion_attention_grad`, of
which this has what attention without dropout takes: the layout BNSD, no mask, or the one that stands for any causal
mask. Anything else is refused.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["COMPUTED", "FUSED", "define"]

FUSED = ("npu_fusion_attention", "npu_fusion_attention_grad")
"""The operators, by the names that torch_npu gives its functions, too."""

COMPUTED = ("_fusion_attention", "_fusion_attention_grad")
"""What these call, which returns tensors only."""

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
    library.impl("npu_fusion_attention", _fused, "CompositeExplicitAutograd")
    library.impl("npu_fusion_attention_grad", _fused_gradients, "CompositeExplicitAutograd")
    return library


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
