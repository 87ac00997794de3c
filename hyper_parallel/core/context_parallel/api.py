"""Context parallelism for a model: the object that knows a rank's tokens and computes attention over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.checks import check
from hyper_parallel.core.common.errors import InvalidType, InvalidValue
from hyper_parallel.core.common.groups import all_gather_single, group_of
from hyper_parallel.core.common.torch_compat import autocast_dtype, runs_eagerly
from hyper_parallel.core.context_parallel.attention import AttentionCall, Ring, ring_attention, to_heads, to_sequence
from hyper_parallel.core.context_parallel.flex import BlockStates, Flex, ScoreMod, example_score
from hyper_parallel.core.context_parallel.index import SequenceSplit, shared_heads
from hyper_parallel.core.mesh.device_mesh import axes_of, check_member

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class ContextParallel:
    """One rank's view of sequences that are split over the ranks of a mesh axis.

        cp = ContextParallel(mesh["cp"], ulysses_degree=2)
        tokens, targets = cp.split(tokens), cp.split(targets)
        out = cp.attend(q, k, v)                               # of this rank's tokens, over all ranks' keys

    Neighbouring ranks, `ulysses_degree` of them, exchange heads for tokens by an all_to_all; among these groups keys
    and values travel around a ring of `ring_degree` ranks. Either may be one. See `SequenceSplit` for who holds what.

    Communication: none but for making process groups, the first time, which all ranks of the mesh must take part in.

    Args:
        mesh: a mesh of one axis, such as mesh["cp"].
        ulysses_degree: how many ranks share heads; must divide the axis, and the query heads of a rank. Default: all.
        balance: give ring ranks two intervals each, so that all have as much to compute in causal attention.

    Raises:
        TypeError: no DeviceMesh.
        ValueError: a mesh of several axes, or without the calling rank; a degree that does not divide the axis.
    """

    def __init__(self, mesh: DeviceMesh, ulysses_degree: int | None = None, balance: bool = True) -> None:
        self._mesh = _check_mesh(mesh)
        self.sequence = split_over(mesh.size(), ulysses_degree, balance)
        self.rank: int = mesh.get_local_rank()
        ranks, name = axes_of(mesh).ranks, axes_of(mesh).names[0]
        members = tuple(int(rank) for rank in ranks)
        part, slot = self.sequence.place(self.rank)
        ulysses = self.sequence.ulysses
        self._all = mesh.get_group()
        self._heads = self._group(members[part * ulysses : (part + 1) * ulysses], f"{name}_ulysses")
        around = members[slot::ulysses]
        self._ring = Ring(self._group(around, f"{name}_ring"), around, part, self.sequence)

    def _group(self, ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
        """Return the group of some ranks of the mesh; a rank by itself never communicates, and gets that of all."""
        return self._all if len(ranks) in (1, self.size) else group_of(ranks, (name,))

    @property
    def size(self) -> int:
        """How many ranks share a sequence."""
        return self.sequence.size

    @property
    def ulysses_degree(self) -> int:
        """How many neighbouring ranks share heads."""
        return self.sequence.ulysses

    @property
    def ring_degree(self) -> int:
        """How many ranks keys and values travel around."""
        return self.sequence.ring

    @property
    def multiple(self) -> int:
        """What the length of a whole sequence must be a multiple of."""
        return self.sequence.multiple

    def positions(self, seq_local: int) -> Tensor:
        """Return where this rank's tokens stand in the whole sequence: (seq_local,) of int64, on the mesh's devices.

        Args:
            seq_local: how many tokens this rank has.

        Raises:
            ValueError: ranks cannot have so many each.
        """
        seq = _check_local_length(self.sequence, seq_local) * self.size
        found = [torch.arange(*ends, device=self._mesh.device_type) for ends in self.sequence.intervals(self.rank, seq)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def split(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's tokens of a full tensor that all ranks have: tokens, targets, ids of documents.

        Targets are cut as tokens are, so shift them by one before.

        Args:
            x: any plain tensor.
            dim: the sequence; its size must be a multiple of `multiple`.

        Raises:
            TypeError: not a plain tensor.
            ValueError: no such dim, or a size that cannot be split.
        """
        x, dim = _check_whole(self.sequence, x, dim)
        ends = self.sequence.intervals(self.rank, x.shape[dim])
        found = [x.narrow(dim, start, stop - start) for start, stop in ends]
        return found[0].contiguous() if len(found) == 1 else torch.cat(found, dim)

    @runs_eagerly
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = True, documents: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the attention of this rank's queries to the keys of all ranks: (batch, heads, seq_local, head_dim).

        Scores and sums are kept in float32, of float64 in float64. Under autocast the tensors are cast as
        `scaled_dot_product_attention` casts them.

        Communication, of U Ulysses ranks and R ring ranks, in each direction: two all_to_alls, of which each rank sends
        (U - 1) / U of its queries, keys and values, and of its output; and R - 1 times keys and values of the heads
        that it then has. Backward sends gradients of keys and values as often, in the dtype of sums, in addition.

        Args:
            q: (batch, heads, seq_local, head_dim), this rank's heads under tensor parallelism.
            k: (batch, key and value heads, seq_local, head_dim); query head i uses head i // (heads / these). Where
                Ulysses ranks cannot share them evenly, they are repeated as little as it takes.
            v: as `k`.
            is_causal: positions see no later ones.
            documents: ids (batch, seq_local) of packed documents; tokens see their own document only.
            scale: of the scores; default 1 / sqrt(head_dim).

        Raises:
            TypeError: DTensors, or dtypes that do not go together.
            ValueError: shapes that do not go together, heads that the Ulysses ranks cannot share, a bad length.
        """
        _check_kinds(q, k, v, is_causal, scale)
        q, k, v = _autocast(q, k, v)
        _check_attention(self.sequence, q, k, v, documents)
        degree, ids = self.ulysses_degree, self._all_documents(documents)
        q, k, v = self._to_heads(q, k, v)
        scale = _default_scale(q.shape[-1]) if scale is None else scale
        if is_causal and scale <= 0:  # torch's kernel hides scores before it scales them: -inf becomes NaN, or inf
            q, scale = q * scale, 1.0
        if self.ring_degree > 1:
            out = ring_attention(q, k, v, AttentionCall(self._ring, is_causal, scale, ids))
        else:
            out = _attention(q, k, v, is_causal, scale, None if ids is None else ids[0])
        return to_sequence(out, self._heads, degree) if degree > 1 else out

    @runs_eagerly
    def flex_attention(
        self, q: Tensor, k: Tensor, v: Tensor, score_mod: ScoreMod | None = None, block_mask: BlockMask | None = None,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return what `torch.nn.attention.flex_attention` returns of whole sequences: this rank's tokens of it.

            window = create_block_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < 256), None, None, seq, seq)
            out = cp.flex_attention(q, k, v, block_mask=window)

        The mask and `score_mod` are those of one device, made alike on every rank: positions, and tensors that they
        look up, are of the whole sequence. Nothing is computed of tiles that the mask leaves out; those that are seen
        wholly go through the device's fused kernel; of others, and with `score_mod`, products compute the scores, some
        rows at a time. A query that sees nothing gets zeros. The host waits for the mask's tensors, once a call.

        Communication: as `attend` has it, whatever the mask leaves out.

        Args:
            q: (batch, heads, seq_local, head_dim), as in `attend`.
            k: (batch, key and value heads, seq_local, head_dim).
            v: as `k`.
            score_mod: gives the score of a score and the numbers of its batch, head, query and key. Heads are counted
                among those of `q`. Its gradient goes to the scores, and not to tensors that it looks up.
            block_mask: of a sequence of seq_local * ranks. Positions hidden in a tile are those of its `mask_mod`.
            scale: of the scores, before `score_mod`; default 1 / sqrt(head_dim).
            enable_gqa: whether there may be fewer key heads than query heads.

        Raises:
            TypeError: as `attend`; a mask that is no BlockMask.
            ValueError: as `attend`; a mask of another length, batch or number of heads; key heads without
                `enable_gqa`; a `score_mod` that looks up tensors that want gradients.
        """
        _check_kinds(q, k, v, is_causal=False, scale=scale)
        q, k, v = _autocast(q, k, v)
        _check_attention(self.sequence, q, k, v, None)
        _check_flex(self.sequence, q, k, score_mod, block_mask, enable_gqa)
        degree, heads = self.ulysses_degree, q.shape[1]
        q, k, v = self._to_heads(q, k, v)
        first = self.sequence.place(self.rank)[1] * (heads // degree)
        mine = slice(first, first + heads // degree)
        numbers = torch.arange(mine.start, mine.stop, device=q.device)
        blocks = None if block_mask is None else BlockStates.of(block_mask).of_heads(mine)
        mask_mod = None if block_mask is None else block_mask.mask_mod
        flex = Flex(score_mod, mask_mod, blocks, numbers, numbers[:0], numbers[:0])
        scale = _default_scale(q.shape[-1]) if scale is None else scale
        out = ring_attention(q, k, v, AttentionCall(self._ring, False, scale, None, flex))
        return to_sequence(out, self._heads, degree) if degree > 1 else out

    def _to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Exchange tokens for heads among Ulysses ranks, where there are several."""
        degree = self.ulysses_degree
        if degree == 1:
            return q, k, v
        times = shared_heads(k.shape[1], degree)
        k, v = (x if times == 1 else x.repeat_interleave(times, dim=1) for x in (k, v))
        return to_heads((q, k, v), self._heads, degree)

    def _all_documents(self, documents: Tensor | None) -> Tensor | None:
        """Return the ids of all parts, (ring, batch, tokens of a part): one all_gather."""
        if documents is None or self.size == 1:
            return documents if documents is None else documents.unsqueeze(0)
        gathered = documents.new_empty(self.size * documents.numel())  # gloo wants rows, or none at all
        all_gather_single(gathered, documents.flatten(), group=self._all)
        by_rank = gathered.view(self.ring_degree, self.ulysses_degree, *documents.shape)
        return by_rank.movedim(1, 2).flatten(2, 3)

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """Return the object itself: a copied model communicates in the same groups."""
        return self

    def __repr__(self) -> str:
        return f"ContextParallel({axes_of(self._mesh)}, ulysses_degree={self.ulysses_degree}, rank={self.rank})"


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast casts what goes into `scaled_dot_product_attention`."""
    dtype = autocast_dtype(tensors[0].device.type)
    if dtype is None:
        return tensors
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, documents: Tensor | None) -> Tensor:
    """Attend where all keys are here."""
    mask: Tensor | None = None
    if documents is not None:
        mask = documents[:, None, :, None] == documents[:, None, None, :]
        if is_causal:
            mask, is_causal = mask.tril(), False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def context_parallel(
    model: nn.Module, mesh: DeviceMesh, ulysses_degree: int | None = None, balance: bool = True
) -> ContextParallel:
    """Let a model attend over all ranks of a mesh axis, each of which is then given its tokens of every sequence.

        cp = context_parallel(model, mesh["cp"])
        logits = model(cp.split(tokens))                       # of this rank's tokens
        loss = cross_entropy(logits, cp.split(targets), reduction="sum") / number_of_targets
        loss.backward()                                        # gradients are to be summed over the ranks

    It sets `positions` of the model, and `attend` of every module in it that has such an attribute; for a Llama of this
    library, or any model with these two hooks. Call it after `shard_module`, before `fully_shard` and `torch.compile`.

    Args:
        model: the model, or a stage of it.
        mesh: as in `ContextParallel`.
        ulysses_degree: as in `ContextParallel`.
        balance: as in `ContextParallel`.

    Raises:
        TypeError: no mesh, or a model without the two hooks.
        ValueError: as `ContextParallel`.
    """
    asked = "cannot make the model attend over several ranks"
    attentions = [module for module in model.modules() if "attend" in vars(module)]
    if not hasattr(model, "positions") or not attentions:
        missing = [] if hasattr(model, "positions") else ["attribute 'positions' of the model"]
        missing += [] if attentions else ["attribute 'attend' of its attention modules"]
        hint = "a Llama of hyper_parallel.models, or call ContextParallel.attend and .positions in your model"
        raise InvalidType(asked, f"no {', no '.join(missing)}", f"model: {type(model).__name__}", hint)
    found = ContextParallel(mesh, ulysses_degree, balance)
    model.positions = found.positions  # type: ignore[assignment]
    for module in attentions:
        module.attend = found.attend  # type: ignore[assignment]
    return found


# -- what is wrong with a call, before any communication --------------------------------------------------------------


def _check_mesh(mesh: object) -> DeviceMesh:
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
        raise InvalidValue(asked, blame, seen, f"mesh[{name!r}]")
    if list(axes.ranks) != sorted(axes.ranks):
        blame = "the ranks of the mesh are not in increasing order, and process groups have no other"
        raise InvalidValue(asked, blame, seen, "the axis of a mesh from init_device_mesh")
    check_member(asked, mesh)
    return mesh


def split_over(size: int, ulysses_degree: object, balance: object) -> SequenceSplit:
    """Return how a sequence is split over some ranks.

    Raises:
        TypeError: a balance that is no bool.
        ValueError: a degree that does not divide the number of ranks.
    """
    asked = f"cannot split sequences over {size} rank{'s' * (size != 1)}"
    works = [degree for degree in range(1, size + 1) if size % degree == 0]
    seen, hint = f"ulysses_degree: {ulysses_degree!r}   ranks: {size}", f"ulysses_degree = one of {works}"
    check(asked, "bool", balance=balance)
    degree: Any = size if ulysses_degree is None else ulysses_degree
    if degree not in works:
        raise InvalidValue(asked, "ulysses_degree does not divide the number of ranks", seen, hint)
    return SequenceSplit(size // degree, degree, bool(balance))


def _check_local_length(split: SequenceSplit, seq_local: Any) -> int:
    """Return how many tokens a rank has, if a sequence can be split into such parts.

    Raises:
        ValueError: below one, or odd where ranks hold two intervals.
    """
    asked, seen = "cannot tell the positions of a rank's tokens", f"tokens on this rank: {seq_local!r}   {_said(split)}"
    hint = f"sequences whose length is a multiple of {split.multiple}, cut by ContextParallel.split"
    if seq_local < 1 or seq_local * split.size % split.multiple:
        blame = "there are none" if seq_local < 1 else "a rank holds two intervals of one length, so an even number"
        raise InvalidValue(asked, blame, seen, hint)
    return seq_local


def _check_whole(split: SequenceSplit, x: Any, dim: int) -> tuple[Tensor, int]:
    """Return a tensor that can be split over the sequence, and the dim from 0.

    Raises:
        TypeError: not a plain tensor.
        ValueError: no such dim, or a length that cannot be split.
    """
    asked = f"cannot split dim {dim!r} over the sequence"
    check(asked, "plain tensor", x=x)
    seen = f"shape: {tuple(x.shape)}   {_said(split)}"
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise InvalidValue(asked, f"a tensor of {x.ndim} dims has no such dim", seen, "dim=1 of (batch, seq)")
    length, multiple = x.shape[dim], split.multiple
    if length % multiple or not length:
        blame = f"its size {length} is not a multiple of {multiple}"
        below, above = length // multiple * multiple, (length // multiple + 1) * multiple
        fits = f"{below} or {above}" if below else f"{above}"
        raise InvalidValue(asked, blame, seen, f"a length of {fits}, padded with targets of -100")
    return x, dim % x.ndim


def _check_heads(split: SequenceSplit, heads: int, kv_heads: int) -> None:
    """Refuse query heads that the ranks cannot share.

    Raises:
        ValueError: they do not divide.
    """
    if heads % split.ulysses:
        works = [d for d in range(1, split.size + 1) if split.size % d == 0 and heads % d == 0]
        asked = f"cannot share {heads} query heads among {split.ulysses} ranks"
        seen = f"heads of this rank: {heads} of queries, {kv_heads} of keys   {_said(split)}"
        raise InvalidValue(asked, "ulysses_degree must divide them", seen, f"ulysses_degree = one of {works}")


def _check_kinds(q: object, k: object, v: object, is_causal: object, scale: object) -> None:
    """Refuse arguments of another kind: a DTensor, for one."""
    check("cannot attend", "plain tensor", q=q, k=k, v=v)
    check("cannot attend", "bool", is_causal=is_causal)
    check("cannot attend", "float | None", scale=scale)


def _check_attention(split: SequenceSplit, q: Tensor, k: Tensor, v: Tensor, documents: object) -> None:
    """Refuse what is no attention, or none that can be split.

    Raises:
        TypeError: dtypes that do not go together, or documents that are no numbers.
        ValueError: shapes that do not go together, heads that cannot be shared, a length that cannot be.
    """
    asked, hint = "cannot attend", "q (batch, heads, seq, head_dim); k and v too, with heads that divide those of q"
    seen = f"shapes: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 4 or k.shape != v.shape or k.ndim != 4:
        raise InvalidValue(asked, "q needs four dims, and k and v the same four", seen, hint)
    if (q.shape[0], q.shape[2], q.shape[3]) != (k.shape[0], k.shape[2], k.shape[3]):
        blame = "q and k differ in batch, tokens or head_dim, and every rank needs queries and keys of the same tokens"
        raise InvalidValue(asked, blame, seen, hint)
    if not k.shape[1] or not q.shape[1] or q.shape[1] % k.shape[1]:
        blame = f"{q.shape[1]} query heads cannot share {k.shape[1]} key and value heads evenly"
        raise InvalidValue(asked, blame, seen, hint)
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
        seen = f"dtypes: q {q.dtype}, k {k.dtype}, v {v.dtype}"
        raise InvalidType(asked, "q, k and v must be of one floating dtype", seen, "k.to(q.dtype)")
    _check_heads(split, q.shape[1], k.shape[1])
    _check_local_length(split, q.shape[2])
    if documents is not None:
        _check_documents(asked, documents, (q.shape[0], q.shape[2]))


def _check_documents(asked: str, documents: Any, shape: Sequence[int]) -> None:
    hint = "cp.split(ids), where ids (batch, seq) numbers the document of every token"
    check(asked, "plain tensor", documents=documents)
    seen = f"documents: {tuple(documents.shape)} of {documents.dtype}   tokens of this rank: {tuple(shape)}"
    if documents.dtype.is_floating_point or documents.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise InvalidType(asked, "documents must be whole numbers", seen, hint)
    if tuple(documents.shape) != tuple(shape):
        raise InvalidValue(asked, "documents must have an id for each token of this rank", seen, hint)


def _check_flex(
    split: SequenceSplit, q: Tensor, k: Tensor, score_mod: Any, block_mask: Any, enable_gqa: object
) -> None:
    """Refuse a mask that is not one of the whole sequence, and scores that learn.

    Raises:
        TypeError: a mask that is no BlockMask, an `enable_gqa` that is no bool.
        ValueError: sizes that do not go together; a `score_mod` that looks up tensors that want gradients.
    """
    asked = "cannot attend by FlexAttention"
    check(asked, "bool", enable_gqa=enable_gqa)
    if q.shape[1] != k.shape[1] and not enable_gqa:
        blame, seen = "q and k have different numbers of heads", f"heads: q {q.shape[1]}, k {k.shape[1]}"
        raise InvalidValue(asked, blame, seen, "enable_gqa=True, as in torch's flex_attention")
    if score_mod is not None:
        score = example_score(score_mod, q.device)
        if not isinstance(score, Tensor):
            blame, hint = "score_mod must return a tensor", "lambda score, b, h, q_idx, kv_idx: score * 2"
            raise InvalidType(asked, blame, f"it returned: {type(score).__name__}", hint)
        if score.requires_grad:
            blame = "score_mod looks up tensors that want gradients, which they would not get"
            raise InvalidValue(asked, blame, f"score_mod: {score_mod}", "score_mod of tensor.detach()")
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
        raise InvalidValue(asked, "block_mask must be of the whole sequence of all ranks", seen, hint)


def _default_scale(head_dim: int) -> float:
    """Return what scores are multiplied by (Vaswani et al. 2017, section 3.2.1)."""
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0


def _said(split: SequenceSplit) -> str:
    return f"ranks: {split.ring} of the ring x {split.ulysses} of Ulysses"
