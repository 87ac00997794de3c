"""Checks of context-parallel calls, made before any communication."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.checks import check
from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.context_parallel.flex import example_score
from hyper_parallel.core.context_parallel.index import SequenceSplit
from hyper_parallel.core.mesh.device_mesh import axes_of, check_member


def check_mesh(mesh: object) -> DeviceMesh:
    """Return a mesh that context parallelism can run on.

    Raises:
        TypeError: not a DeviceMesh.
        ValueError: it has several axes, its ranks are out of order, or the calling rank is not on it.
    """
    axes, asked = axes_of(mesh), "cannot set up context parallelism"
    assert isinstance(mesh, DeviceMesh)
    seen = f"mesh: {axes}   ranks: {list(axes.ranks)}"
    if mesh.ndim != 1:
        blame = f"the mesh has {mesh.ndim} axes, and a sequence is split over one"
        name = "cp" if "cp" in axes.names else axes.names[-1]
        raise ValueError(explain(asked, blame, seen, f"mesh[{name!r}]"))
    if list(axes.ranks) != sorted(axes.ranks):
        blame = "the ranks of the mesh are not in increasing order, and process groups have no other"
        raise ValueError(explain(asked, blame, seen, "the axis of a mesh from init_device_mesh"))
    check_member(asked, mesh)
    return mesh


def split_over(size: int, ulysses_degree: object, balance: object) -> SequenceSplit:
    """Return how a sequence is split over some ranks.

    Raises:
        TypeError: a degree that is no int, a balance that is no bool.
        ValueError: a degree that does not divide the number of ranks.
    """
    asked = f"cannot split sequences over {size} rank{'s' * (size != 1)}"
    works = [degree for degree in range(1, size + 1) if size % degree == 0]
    seen, hint = f"ulysses_degree: {ulysses_degree!r}   ranks: {size}", f"ulysses_degree = one of {works}"
    check(asked, "int | None", ulysses_degree=ulysses_degree)
    check(asked, "bool", balance=balance)
    degree: Any = size if ulysses_degree is None else ulysses_degree
    if degree not in works:
        raise ValueError(explain(asked, "ulysses_degree does not divide the number of ranks", seen, hint))
    return SequenceSplit(size // degree, degree, bool(balance))


def check_local_length(split: SequenceSplit, seq_local: Any) -> int:
    """Return how many tokens a rank has, if a sequence can be split into such parts.

    Raises:
        TypeError: not an int.
        ValueError: below one, or odd where ranks hold two intervals.
    """
    asked, seen = "cannot tell the positions of a rank's tokens", f"tokens on this rank: {seq_local!r}   {_said(split)}"
    hint = f"sequences whose length is a multiple of {split.multiple}, cut by ContextParallel.split"
    check(asked, "int", seq_local=seq_local)
    if seq_local < 1 or seq_local * split.size % split.multiple:
        blame = "there are none" if seq_local < 1 else "a rank holds two intervals of one length, so an even number"
        raise ValueError(explain(asked, blame, seen, hint))
    return seq_local


def check_whole(split: SequenceSplit, x: Any, dim: int) -> tuple[Tensor, int]:
    """Return a tensor that can be split over the sequence, and the dim from 0.

    Raises:
        TypeError: not a plain tensor.
        ValueError: no such dim, or a length that cannot be split.
    """
    asked = f"cannot split dim {dim!r} over the sequence"
    check(asked, "plain tensor", x=x)
    seen = f"shape: {tuple(x.shape)}   {_said(split)}"
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise ValueError(explain(asked, f"a tensor of {x.ndim} dims has no such dim", seen, "dim=1 of (batch, seq)"))
    length, multiple = x.shape[dim], split.multiple
    if length % multiple or not length:
        blame = f"its size {length} is not a multiple of {multiple}"
        below, above = length // multiple * multiple, (length // multiple + 1) * multiple
        fits = f"{below} or {above}" if below else f"{above}"
        raise ValueError(explain(asked, blame, seen, f"a length of {fits}, padded with targets of -100"))
    return x, dim % x.ndim


def check_heads(split: SequenceSplit, heads: int, kv_heads: int) -> None:
    """Refuse query heads that the ranks cannot share.

    Raises:
        ValueError: they do not divide.
    """
    if heads % split.ulysses:
        works = [d for d in range(1, split.size + 1) if split.size % d == 0 and heads % d == 0]
        asked = f"cannot share {heads} query heads among {split.ulysses} ranks"
        seen = f"heads of this rank: {heads} of queries, {kv_heads} of keys   {_said(split)}"
        raise ValueError(explain(asked, "ulysses_degree must divide them", seen, f"ulysses_degree = one of {works}"))


def check_kinds(q: object, k: object, v: object, is_causal: object, scale: object) -> None:
    """Refuse arguments of another kind: a DTensor, for one."""
    check("cannot attend", "plain tensor", q=q, k=k, v=v)
    check("cannot attend", "bool", is_causal=is_causal)
    check("cannot attend", "float | None", scale=scale)


def check_attention(split: SequenceSplit, q: Tensor, k: Tensor, v: Tensor, documents: object) -> None:
    """Refuse what is no attention, or none that can be split.

    Raises:
        TypeError: dtypes that do not go together, or documents that are no numbers.
        ValueError: shapes that do not go together, heads that cannot be shared, a length that cannot be.
    """
    asked, hint = "cannot attend", "q (batch, heads, seq, head_dim); k and v too, with heads that divide those of q"
    seen = f"shapes: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 4 or k.shape != v.shape or k.ndim != 4:
        raise ValueError(explain(asked, "q needs four dims, and k and v the same four", seen, hint))
    if (q.shape[0], q.shape[2], q.shape[3]) != (k.shape[0], k.shape[2], k.shape[3]):
        blame = "q and k differ in batch, tokens or head_dim, and every rank needs queries and keys of the same tokens"
        raise ValueError(explain(asked, blame, seen, hint))
    if not k.shape[1] or not q.shape[1] or q.shape[1] % k.shape[1]:
        blame = f"{q.shape[1]} query heads cannot share {k.shape[1]} key and value heads evenly"
        raise ValueError(explain(asked, blame, seen, hint))
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
        seen = f"dtypes: q {q.dtype}, k {k.dtype}, v {v.dtype}"
        raise TypeError(explain(asked, "q, k and v must be of one floating dtype", seen, "k.to(q.dtype)"))
    check_heads(split, q.shape[1], k.shape[1])
    check_local_length(split, q.shape[2])
    if documents is not None:
        _check_documents(asked, documents, (q.shape[0], q.shape[2]))


def _check_documents(asked: str, documents: Any, shape: Sequence[int]) -> None:
    hint = "cp.split(ids), where ids (batch, seq) numbers the document of every token"
    check(asked, "plain tensor", documents=documents)
    seen = f"documents: {tuple(documents.shape)} of {documents.dtype}   tokens of this rank: {tuple(shape)}"
    if documents.dtype.is_floating_point or documents.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise TypeError(explain(asked, "documents must be whole numbers", seen, hint))
    if tuple(documents.shape) != tuple(shape):
        raise ValueError(explain(asked, "documents must have an id for each token of this rank", seen, hint))


def check_flex(split: SequenceSplit, q: Tensor, k: Tensor, score_mod: Any, block_mask: Any, enable_gqa: object) -> None:
    """Refuse a mask that is not one of the whole sequence, and scores that learn.

    Raises:
        TypeError: a mask that is no BlockMask, a `score_mod` that is no function, an `enable_gqa` that is no bool.
        ValueError: sizes that do not go together; a `score_mod` that looks up tensors that want gradients.
    """
    asked = "cannot attend by FlexAttention"
    check(asked, "bool", enable_gqa=enable_gqa)
    if q.shape[1] != k.shape[1] and not enable_gqa:
        blame, seen = "q and k have different numbers of heads", f"heads: q {q.shape[1]}, k {k.shape[1]}"
        raise ValueError(explain(asked, blame, seen, "enable_gqa=True, as in torch's flex_attention"))
    if score_mod is not None:
        check(asked, "callable", score_mod=score_mod)
        score = example_score(score_mod, q.device)
        if not isinstance(score, Tensor):
            blame, hint = "score_mod must return a tensor", "lambda score, b, h, q_idx, kv_idx: score * 2"
            raise TypeError(explain(asked, blame, f"it returned: {type(score).__name__}", hint))
        if score.requires_grad:
            blame = "score_mod looks up tensors that want gradients, which they would not get"
            raise ValueError(explain(asked, blame, f"score_mod: {score_mod}", "score_mod of tensor.detach()"))
    if block_mask is None:
        return
    from torch.nn.attention.flex_attention import BlockMask  # takes long to import, and few need it

    check(asked, BlockMask, block_mask=block_mask)
    batch, heads, *_ = block_mask.shape
    seq = q.shape[2] * split.size
    lengths = tuple(int(length) for length in block_mask.seq_lengths)
    if lengths != (seq, seq) or batch not in (1, q.shape[0]) or heads not in (1, q.shape[1]):
        seen = f"block_mask: batch {batch}, heads {heads}, lengths {lengths}   q of this rank: {tuple(q.shape)}"
        hint = f"create_block_mask(mask_mod, None or {q.shape[0]}, None or {q.shape[1]}, {seq}, {seq})"
        raise ValueError(explain(asked, "block_mask must be of the whole sequence of all ranks", seen, hint))


def default_scale(head_dim: int) -> float:
    """Return what scores are multiplied by (Vaswani et al. 2017, section 3.2.1)."""
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0


def _said(split: SequenceSplit) -> str:
    return f"ranks: {split.ring} of the ring x {split.ulysses} of Ulysses"
