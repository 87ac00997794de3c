"""How an ATen op rounds: not at all, once per element, or once per term of the sums that it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

__all__ = ["Op", "Rounding", "rounding_of"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ONCE = _words(
    "add sub rsub mul div true_divide sqrt rsqrt reciprocal exp exp2 log log2 tanh sigmoid sin cos pow square"
)
"""Elementwise ops whose result is the exact one, rounded (to a few units at most)."""

_EXACT = _words(
    """
    _foreach_copy _local_scalar_dense _reshape_alias _to_copy _unsafe_view abs alias amax amin arange argmax argmin
    argsort as_strided as_strided_scatter bitwise_and bitwise_not bitwise_or bucketize cat ceil clamp clamp_max
    clamp_min clone complex conj constant_pad_nd contiguous copy copysign detach diag_embed diagonal_scatter embedding
    empty_like eq equal erase fill flip floor full_like gather ge glu_jvp gt hardtanh hardtanh_backward heaviside index
    index_copy index_fill index_select isfinite isinf isnan isneginf isposinf kthvalue le lift lift_fresh logical_and
    logical_not logical_or logical_xor lt masked_fill masked_scatter masked_select max max_pool2d_with_indices
    max_pool2d_with_indices_backward maximum median min minimum mode nan_to_num narrow_copy ne neg new_empty
    new_empty_strided new_full new_ones new_zeros nonzero ones_like permute_copy relu repeat repeat_interleave resize
    roll round scalar_tensor searchsorted select_backward select_scatter set sgn sign signbit slice_backward
    slice_scatter sort split_copy split_with_sizes_copy stack take t_copy threshold threshold_backward topk
    transpose_copy tril triu trunc unique_consecutive unsafe_split unsafe_split_with_sizes view_copy where zero
    zeros_like
    """
)
"""Ops that move, choose or compare numbers, or change their sign, and round nothing."""

_CONTRACTIONS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "linear", "matmul", "inner"), 0),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addbmm", "_addmm_activation"), 1),
}
"""Matrix products, and which argument's last dim is summed over."""

_ALONG_DIM = _words(
    """
    sum nansum mean prod var std var_mean std_mean norm linalg_vector_norm logsumexp cumsum cumprod logcumsumexp
    _softmax_backward_data _log_softmax_backward_data
    """
)

_SOFTMAX = _words("_softmax _log_softmax _safe_softmax")

_INDEXED = _words(
    """
    index_add scatter_add scatter_reduce index_reduce embedding_dense_backward _embedding_bag
    _embedding_bag_dense_backward index_put _index_put_impl _unsafe_index_put
    """
)


class Op(NamedTuple):
    """One call of an ATen op: its plain name and its arguments by name."""

    name: str
    arguments: Mapping[str, Any]

    def tensors(self) -> list[torch.Tensor]:
        """All tensor arguments, those in lists too."""
        found: list[torch.Tensor] = []
        for value in self.arguments.values():
            values = value if isinstance(value, (list, tuple)) else (value,)
            found += [each for each in values if isinstance(each, torch.Tensor)]
        return found

    def tensor(self, place: int) -> torch.Tensor:
        """The tensor argument at a place."""
        return self.tensors()[place]


class Rounding(NamedTuple):
    """By how many units a call may change its inputs and its results, and be as right as the real op."""

    inputs: float
    results: float


def rounding_of(function: OpOverload, op: Op) -> Rounding | None:
    """Return how a call rounds, or None if it does not.

    >>> a = torch.ones(3, 5)
    >>> rounding_of(torch.ops.aten.mm.default, Op("mm", {"self": a, "mat2": a.t()}))
    Rounding(inputs=5, results=2)
    >>> rounding_of(torch.ops.aten.relu.default, Op("relu", {"self": a})) is None
    True

    A computed sum of n terms is the exact sum of terms that were changed by at most n units each, and so are matrix
    products, norms and means (Higham 2002, "Accuracy and Stability of Numerical Algorithms", ch. 3 and 4); basic
    arithmetic gives the exact result changed by one unit (ch. 2). Two stand for one, because a change by less than a
    unit can be rounded away.

    Args:
        function: the op.
        op: the call.
    """
    name = op.name
    if name in ("index_put", "_index_put_impl", "_unsafe_index_put") and not op.arguments.get("accumulate"):
        return None
    if name == "scatter" and not op.arguments.get("reduce"):
        return None
    if name in _EXACT or function.is_view:
        return None
    if name in _SOFTMAX:  # each exponential is right; the sum that divides them all need not be
        return Rounding(2, max(2, _along_dim(op)))
    terms = _terms(op)
    if terms is not None:
        return Rounding(max(2, terms), 2)
    if torch.Tag.nondeterministic_seeded in function.tags:
        return None
    if name in _ONCE and op.arguments.get("alpha", 1) == 1:
        return Rounding(0, 2)
    if torch.Tag.pointwise in function.tags:
        return Rounding(2, 2)
    return Rounding(max((size for tensor in op.tensors() for size in tensor.shape), default=2), 2)


def _terms(op: Op) -> int | None:
    """How many terms the sums have that a call takes; None for an op that is not known to take any."""
    name = op.name
    if name in _CONTRACTIONS:
        left = op.tensor(_CONTRACTIONS[name])
        batch = left.shape[0] if name == "addbmm" else 1
        return batch * left.shape[-1] if left.ndim else 1
    if name in _ALONG_DIM:
        return _along_dim(op)
    if "scaled_dot_product" in name or "flash_attention" in name or "efficient_attention" in name:
        found = [each for each in op.tensors() if each.ndim >= 3]
        return max(each.shape[-1] + each.shape[-2] for each in found)
    if name in _INDEXED:
        return _indices(op)
    shape = op.arguments.get("normalized_shape")
    if shape is not None:  # the gradients of weight and bias are sums over everything but the normalized dims
        row = math.prod(shape)
        return max(row, _largest(op) // max(row, 1)) if "backward" in name else row
    measure: Callable[[Op], int] | None = _MEASURES.get(name)
    return measure(op) if measure else None


def _along_dim(op: Op) -> int:
    whole = op.tensor(0)
    dims = op.arguments.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or not whole.ndim or not isinstance(dims, Sequence) or isinstance(dims, str):
        return _largest(op)
    return math.prod(whole.shape[dim] for dim in dims)


def _indices(op: Op) -> int:
    numbers = [each for each in op.tensors() if not (each.is_floating_point() or each.is_complex())]
    return max((each.numel() for each in numbers), default=1)


def _largest(op: Op) -> int:
    return max((each.numel() for each in op.tensors()), default=1)


def _convolution(op: Op) -> int:
    return max(1, math.prod(op.tensor(1).shape[1:]))


def _convolution_backward(op: Op) -> int:
    grad, weight = op.arguments["grad_output"], op.arguments["weight"]
    return max(grad.numel() // max(1, grad.shape[1]), weight.numel())


_MEASURES: Mapping[str, Callable[[Op], int]] = {
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _indices),  # one term per target
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(
        _words("""
        mse_loss binary_cross_entropy smooth_l1_loss huber_loss kl_div
        native_batch_norm _native_batch_norm_legit native_batch_norm_backward native_group_norm
        native_group_norm_backward _batch_norm_with_update batch_norm_backward trace linalg_cross
        """),
        _largest,
    ),
}
