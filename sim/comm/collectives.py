"""The data movement of each collective, and nothing else.

Every function here gets the calls of all ranks of one group, in rank order, and moves the data in one go. A
reduction adds in rank order, so its result does not depend on who arrived first, and it is computed once and
handed out. Large tensors on the CPU are worked off in pieces that stay in the processor's cache.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sim.comm.identity import Identity
from sim.explain.errors import ranks_phrase

_MANY = 32  # ranks from which on n * n copies of small parts cost more than anything else
_NAMED = 4  # pairs of ranks that an error names
_LOOKED_AT = 8  # tensors of a list whose memory is looked at: a look costs as much as a small copy
_SMALL = 8 * 1024  # elements of a part under which it is not worth a view of its own
_PIECE = 32 * 1024  # elements worked on at a time, 128 KiB of fp32: a fraction of a core's L2 cache


class Contract(NamedTuple):
    """What all ranks of a group must agree on for their calls to be one collective."""

    op: str
    reduce_op: str = "-"
    root: int | None = None
    dtype: str = "-"
    shape: str = "-"


class Problem(NamedTuple):
    """What does not fit together although the contracts agree, and what to try.

    Attributes:
        what: Says it, given the global ranks of the group's members.
        hint: What to try.
        blamed: The members that are to blame; empty where that is not clear.
    """

    what: Callable[[Sequence[int]], str]
    hint: str
    blamed: tuple[int, ...] = ()


class MemoryGone(Exception):
    """A tensor has lost its memory, as by `untyped_storage().resize_(0)`: to touch it would end the process."""

    def __init__(self, member: int, tensor: torch.Tensor) -> None:
        self.member = member
        dtype, found = str(tensor.dtype).removeprefix("torch."), tensor.untyped_storage().nbytes()
        self.what = f"{dtype} {list(tensor.shape)} takes {tensor.nbytes:,} bytes, and its storage has {found:,}"


class Call:
    """One rank's call of a collective: the contract it assumes, its tensors, and where it came from.

    Attributes:
        axis: The name under which the rank knows the group: the axis of a mesh, say.
        digest: The fingerprint of what it gives, where an observer makes one.
        identity: What it is for, if an engine issues it; None: nobody knows.
        line: The user's source line.
    """

    __slots__ = (
        "axis",
        "contract",
        "digest",
        "factor",
        "identity",
        "inputs",
        "line",
        "outputs",
        "recv_bytes",
        "send_bytes",
        "splits",
    )

    def __init__(
        self,
        contract: Contract,
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
        *,
        factor: Any = None,
        splits: tuple[Sequence[int], Sequence[int]] | None = None,
        send_bytes: int = 0,
        recv_bytes: int = 0,
    ) -> None:
        self.contract = contract
        self.inputs = inputs
        self.outputs = outputs
        self.factor = factor  # of PREMUL_SUM
        self.splits = splits  # rows sent to and received from each rank (all_to_all)
        self.send_bytes = send_bytes
        self.recv_bytes = recv_bytes
        self.identity: Identity | None = None
        self.line = self.axis = self.digest = ""


_OP_NAMES = {
    int(getattr(dist.ReduceOp.RedOpType, name)): name
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
}


def reduce_op_name(op: Any) -> tuple[str, Any]:
    """The name of a `ReduceOp`, and the factor of a PREMUL_SUM (else None).

    >>> reduce_op_name(dist.ReduceOp.SUM)
    ('SUM', None)
    """
    if op == dist.ReduceOp.SUM:  # by far the most frequent
        return "SUM", None
    kind = getattr(op, "op", op)
    name = _OP_NAMES.get(int(kind)) or str(kind)
    if name == "PREMUL_SUM":
        return name, op.__getstate__()[1]
    return name, None


def execute(calls: list[Call]) -> Problem | None:
    """Carry out one collective for all ranks; returns what does not fit together, or None."""
    for call in calls:
        if _has_no_data(call):
            return _on_meta(calls)
    for member, call in enumerate(calls):
        check_memory(member, call.outputs)
        if call.inputs is not call.outputs:
            check_memory(member, call.inputs)
    problem = _same_memory(calls)
    if problem is None:
        with torch.inference_mode():
            problem = _EXECUTE[calls[0].contract.op](calls)
    return problem


def _of_two(first: int, second: int, ranks: Sequence[int]) -> str:
    return f"ranks {ranks[first]} and {ranks[second]} write into the same tensor"


def _has_no_data(call: Call) -> bool:
    outputs, inputs = call.outputs, call.inputs
    return bool((outputs and outputs[0].is_meta) or (inputs and inputs[0].is_meta))


def _on_meta(calls: list[Call]) -> Problem | None:
    """Nothing moves between tensors without data; what has to fit together has to do so all the same."""
    lack = [member for member, call in enumerate(calls) if _has_no_data(call)]
    have = [member for member in range(len(calls)) if member not in lack]
    if have:
        data = _device_of(calls[have[0]])
        fewer = () if len(lack) == len(have) else tuple(lack if len(lack) < len(have) else have)
        return Problem(
            lambda ranks: (
                f"device (meta on {ranks_phrase(ranks[m] for m in lack)}, {data} on "
                f"{ranks_phrase(ranks[m] for m in have)})"
            ),
            "let all ranks have tensors on meta, or all of them tensors with data",
            fewer,
        )
    if calls[0].contract.op == "all_to_all":
        return _all_to_all(calls)
    return None


def _device_of(call: Call) -> str:
    return str((*call.outputs, *call.inputs)[0].device)


def _same_memory(calls: list[Call]) -> Problem | None:
    """Ranks have memory of their own; here they share a process, so a tensor can get to several of them."""
    seen: dict[int, int] = {}
    for member, call in enumerate(calls):
        if call.outputs and type(call.outputs[0]) in _PLAIN and call.outputs[0].layout is torch.strided:
            address = call.outputs[0].data_ptr()  # 0 for empty and for meta tensors
            if address and seen.setdefault(address, member) != member:
                return Problem(
                    partial(_of_two, seen[address], member),
                    "make the tensor on each rank, inside of the function: args and globals are shared by all ranks",
                )
    return None


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def check_memory(member: int, tensors: Sequence[torch.Tensor]) -> None:
    """Raise `MemoryGone` for a tensor of `member` that has lost its memory since it was handed over."""
    for tensor in tensors[:_LOOKED_AT]:
        if type(tensor) in _PLAIN and tensor.layout is torch.strided:
            has = tensor.untyped_storage().nbytes()
            if has < tensor.nbytes and has < _reach(tensor) * tensor.element_size():
                raise MemoryGone(member, tensor)


def _reach(tensor: torch.Tensor) -> int:
    """The elements from the first to the last; some may share memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


# -- reductions ------------------------------------------------------------------------------------------------

_IN_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "SUM": torch.Tensor.add_,
    "AVG": torch.Tensor.add_,
    "PREMUL_SUM": torch.Tensor.add_,
    "PRODUCT": torch.Tensor.mul_,
    "MIN": lambda acc, x: torch.minimum(acc, x, out=acc),
    "MAX": lambda acc, x: torch.maximum(acc, x, out=acc),
    "BAND": torch.Tensor.bitwise_and_,
    "BOR": torch.Tensor.bitwise_or_,
    "BXOR": torch.Tensor.bitwise_xor_,
}


@lru_cache(maxsize=256)
def computes(dtype: torch.dtype, op: str) -> bool:
    """Tell whether torch has a reduction for numbers of this dtype on the CPU; tried once."""
    try:
        acc, other = torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=dtype)
        _accumulate(acc, [acc, other], op, [1.0, 1.0])
    except (RuntimeError, KeyError):  # the latter of a reduce op that there is not
        return False
    return True


def _accumulate(acc: torch.Tensor, parts: Sequence[torch.Tensor], op: str, factors: Sequence[Any]) -> None:
    """`acc = parts[0] op parts[1] op ...`, in that order; `acc` may be `parts[0]` itself."""
    if acc is not parts[0]:
        acc.copy_(parts[0])
    if op == "PREMUL_SUM":
        acc.mul_(factors[0])
        for part, factor in zip(parts[1:], factors[1:], strict=True):
            acc.add_(part * factor)
        return
    combine = _IN_PLACE[op]
    for part in parts[1:]:
        combine(acc, part)
    if op == "AVG":
        if acc.is_floating_point() or acc.is_complex():
            acc.div_(len(parts))
        else:  # as NCCL does, the one backend that averages ints
            acc.div_(len(parts), rounding_mode="trunc")


def _all_reduce(calls: list[Call]) -> None:
    op, factors = calls[0].contract.reduce_op, [call.factor for call in calls]
    for tensors in zip(*(call.outputs for call in calls), strict=True):
        whole = [t.data for t in tensors]
        if whole[0].is_sparse:
            _sum_sparse(tensors)
        elif whole[0].numel() > _PIECE and all(t.is_contiguous() for t in whole):
            flat = [t.view(-1) for t in whole]
            for pieces in zip(*map(_in_pieces, flat), strict=True):
                _accumulate(pieces[0], pieces, op, factors)
                for other in pieces[1:]:
                    other.copy_(pieces[0])
        else:
            _accumulate(whole[0], whole, op, factors)
            for other in whole[1:]:
                other.copy_(whole[0])


def _in_pieces(flat: torch.Tensor) -> Sequence[torch.Tensor]:
    """What is worked on at a time: on a device all of it, as each piece would be a kernel."""
    return flat.split(_PIECE) if flat.device.type == "cpu" else (flat,)


def _sum_sparse(tensors: Sequence[torch.Tensor]) -> None:
    total = tensors[0].coalesce()
    for other in tensors[1:]:
        total = total + other
    total = total.coalesce()
    for out in tensors:  # itself: what is behind its .data has entries of its own
        out.copy_(total)


def _reduce(calls: list[Call]) -> None:
    root = calls[0].contract.root
    assert root is not None
    out, parts = calls[root].outputs[0].data, [call.inputs[0].data for call in calls]
    acc = parts[0].clone()
    _accumulate(acc, [acc, *parts[1:]], calls[0].contract.reduce_op, [call.factor for call in calls])
    out.copy_(acc)


def _reduce_scatter(calls: list[Call]) -> None:
    """Each rank's inputs are one tensor per receiving rank, or one that is cut evenly (or several, coalesced)."""
    op, factors = calls[0].contract.reduce_op, [call.factor for call in calls]
    if len(calls[0].outputs) > 1:
        all_outputs, all_inputs = [_flat(call.outputs) for call in calls], [_flat(call.inputs) for call in calls]
        for outputs, inputs in zip(zip(*all_outputs, strict=True), zip(*all_inputs, strict=True), strict=True):
            _reduce_and_scatter(outputs, inputs, op, factors)
        return
    if _has_small_parts(calls):
        _reduce_and_cut(calls, op, factors)
        return
    cut = [_cut(call.inputs, len(calls)) for call in calls]
    for member, call in enumerate(calls):
        out = call.outputs[0].data
        parts = [pieces[member] for pieces in cut]
        if _share_memory(out, parts[member]):
            acc = parts[0].reshape(-1).clone()
            _accumulate(acc, [acc, *(p.reshape(-1) for p in parts[1:])], op, factors)
            out.view(-1).copy_(acc)
        elif out.is_contiguous() and all(p.is_contiguous() for p in parts):
            flat, flat_parts = out.view(-1), [p.view(-1) for p in parts]
            for pieces in zip(_in_pieces(flat), *map(_in_pieces, flat_parts), strict=True):
                _accumulate(pieces[0], pieces[1:], op, factors)
        else:
            _accumulate(out, [p.reshape(out.shape) for p in parts], op, factors)


def _flat(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t.data if t.dim() == 1 else t.data.view(-1) for t in tensors]


def _reduce_and_scatter(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: str, factors: Sequence[Any]
) -> None:
    """The tensors of one place in a coalesced call, all flat: an output and an input of each rank."""
    size = len(outputs)
    if outputs[0].numel() < _SMALL or any(map(_share_memory, outputs, inputs)):
        whole = inputs[0].clone()
        _accumulate(whole, [whole, *inputs[1:]], op, factors)
        torch._foreach_copy_(list(outputs), whole.chunk(size))
        return
    for out, *parts in zip(outputs, *(tensor.chunk(size) for tensor in inputs), strict=True):
        _accumulate(out, parts, op, factors)


def _has_small_parts(calls: list[Call]) -> bool:
    """Whether n * n views, one for each part of each input, would cost more than what they hold."""
    return (
        all(
            len(call.inputs) == 1 and call.inputs[0].is_contiguous() and 0 < call.outputs[0].numel() < _PIECE
            for call in calls
        )
        and len(calls) > 1
    )


def _reduce_and_cut(calls: list[Call], op: str, factors: Sequence[Any]) -> None:
    """Reduce the inputs as a whole, in the same order, and then hand out the parts."""
    inputs = [call.inputs[0].data.view(-1) for call in calls]
    whole = torch.empty_like(inputs[0])
    for pieces in zip(_in_pieces(whole), *map(_in_pieces, inputs), strict=True):
        _accumulate(pieces[0], pieces[1:], op, factors)
    for call, part in zip(calls, whole.chunk(len(calls)), strict=True):
        out = call.outputs[0].data
        out.copy_(part.view(out.shape))


# -- movement --------------------------------------------------------------------------------------------------


def _broadcast(calls: list[Call]) -> None:
    root = calls[0].contract.root
    assert root is not None
    for index, source in enumerate(calls[root].outputs):
        for member, call in enumerate(calls):
            if member != root:
                call.outputs[index].data.copy_(source)


def _all_gather(calls: list[Call]) -> None:
    """Outputs are one tensor per rank, or one tensor that is cut evenly."""
    first = calls[0].outputs
    if len(calls[0].inputs) > 1:
        _gather_many(calls)
        return
    sources = [call.inputs[0].data for call in calls]
    if len(first) == 1 and len(calls) > 1 and all(call.outputs[0].is_contiguous() for call in calls):
        # Put the result together once, then hand it out whole: 2n copies, not n * n.
        whole = first[0].data.view(-1)
        for piece, source in zip(whole.chunk(len(calls)), sources, strict=True):
            piece.copy_(source.reshape(-1))
        for call in calls[1:]:
            call.outputs[0].data.view(-1).copy_(whole)
        return
    for call in calls:
        for out, source in zip(_cut(call.outputs, len(calls)), sources, strict=True):
            out.copy_(source.reshape(out.shape))


def _gather_many(calls: list[Call]) -> None:
    """A coalesced call: put each tensor together once, then hand all of them out."""
    first, *others = [_flat(call.outputs) for call in calls]
    for own, whole, sources in zip(
        calls[0].inputs, first, zip(*[_flat(call.inputs) for call in calls], strict=True), strict=True
    ):
        if _share_memory(whole, own):
            for piece, source in zip(whole.chunk(len(calls)), sources, strict=True):
                piece.copy_(source)
        else:
            torch.cat(sources, out=whole)
    for wholes in others:
        torch._foreach_copy_(wholes, first)


def _gather(calls: list[Call]) -> None:
    root = calls[0].contract.root
    assert root is not None
    for out, call in zip(calls[root].outputs, calls, strict=True):
        out.data.copy_(call.inputs[0].data)


def _scatter(calls: list[Call]) -> None:
    root = calls[0].contract.root
    assert root is not None
    for source, call in zip(calls[root].inputs, calls, strict=True):
        call.outputs[0].data.copy_(source.data)


def _all_to_all(calls: list[Call]) -> Problem | None:
    """Inputs and outputs are one tensor per rank, or one tensor that `splits` cuts by rows."""
    size = len(calls)
    if size > _MANY and _can_move_rows(calls):
        return _move_rows(calls)
    sent = [_cut(call.inputs, size, None if call.splits is None else call.splits[0]) for call in calls]
    received = [_cut(call.outputs, size, None if call.splits is None else call.splits[1]) for call in calls]
    unequal = [
        _Pair(source, target, sent[source][target].numel(), received[target][source].numel())
        for source in range(size)
        for target in range(size)
        if sent[source][target].numel() != received[target][source].numel()
    ]
    if unequal:
        return _unequal(unequal, calls)
    for target in range(size):
        for source in range(size):
            give, take = sent[source][target], received[target][source]
            if take.numel():
                take.copy_(give.reshape(take.shape))
    return None


class _Pair(NamedTuple):
    """Two members that do not agree on how many elements go from one to the other."""

    source: int
    target: int
    sent: int
    expected: int


def _unequal(pairs: list[_Pair], calls: list[Call]) -> Problem:
    def what(ranks: Sequence[int]) -> str:
        named = [
            f"rank {ranks[pair.source]} sends {pair.sent} elements to rank {ranks[pair.target]}, which expects "
            f"{pair.expected} from it"
            for pair in pairs[:_NAMED]
        ]
        more = [f"and {len(pairs) - _NAMED} more such pairs"] if len(pairs) > _NAMED else []
        return "; ".join([*named, *more])

    if all(call.splits is not None for call in calls):
        hint = "let the output split of each rank be what the others' input splits send to it"
    else:
        hint = "let the outputs of each rank be of the sizes that the others' inputs for it have"
    return Problem(what, hint, _who_is_to_blame(pairs, calls))


def _who_is_to_blame(pairs: list[_Pair], calls: list[Call]) -> tuple[int, ...]:
    """The member that takes part in the most of the disagreements, if there is one such."""
    count = Counter(member for pair in pairs for member in {pair.source, pair.target})
    most = max(count.values())
    likely = sorted(member for member, times in count.items() if times == most)
    sizes = [sizes_of(call) for call in calls]
    usual, times = Counter(sizes).most_common(1)[0]
    if times == len(calls):  # all have made one mistake
        return ()
    if len(likely) > 1:  # of those, the one whose sizes are not what the others' are
        likely = [member for member in likely if times > 1 and sizes[member] != usual]
    return tuple(likely) if len(likely) == 1 and 2 * most >= len(pairs) else ()


def sizes_of(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How much an all_to_all sends to and receives from each rank: rows of one tensor, or elements of each."""
    if call.splits is not None:
        return tuple(call.splits[0]), tuple(call.splits[1])
    return tuple(tensor.numel() for tensor in call.inputs), tuple(tensor.numel() for tensor in call.outputs)


def _can_move_rows(calls: list[Call]) -> bool:
    """Whether all tensors are cut into rows of one kind, which torch can pick out."""
    first = calls[0].inputs[0]
    return "float8" not in str(first.dtype) and all(
        call.splits is not None
        and call.inputs[0].shape[1:] == call.outputs[0].shape[1:] == first.shape[1:]
        and not call.inputs[0].is_meta
        for call in calls
    )


def _move_rows(calls: list[Call]) -> Problem | None:
    """Among many ranks: one index over the rows of all inputs, instead of n * n copies."""
    splits = [call.splits for call in calls if call.splits is not None]
    sent = torch.tensor([list(rows) for rows, _ in splits])  # source, target
    expected = torch.tensor([list(rows) for _, rows in splits]).t()
    unequal = (sent != expected).nonzero()
    if len(unequal):
        width = math.prod(calls[0].inputs[0].shape[1:])
        pairs = [_Pair(s, t, int(sent[s, t]) * width, int(expected[s, t]) * width) for s, t in unequal.tolist()]
        return _unequal(pairs, calls)
    starts = (sent.flatten().cumsum(0) - sent.flatten()).view_as(sent)  # of each part, in the inputs one after another
    taken = sent.t().flatten()  # in the order of the outputs
    shift = starts.t().flatten() - (taken.cumsum(0) - taken)
    index = torch.arange(int(taken.sum())) + torch.repeat_interleave(shift, taken)
    given = torch.cat([call.inputs[0].data for call in calls])
    moved = given.index_select(0, index.to(given.device))
    for call, rows in zip(calls, moved.split([sum(rows) for _, rows in splits]), strict=True):
        call.outputs[0].data.copy_(rows)
    return None


def _barrier(calls: list[Call]) -> None:
    del calls


def _cut(tensors: Sequence[torch.Tensor], parts: int, splits: Sequence[int] | None = None) -> Sequence[torch.Tensor]:
    """One tensor per rank: the list as it is, or the single tensor cut along dim 0."""
    if splits is not None:
        return tensors[0].data.split(list(splits))
    if len(tensors) == parts and (parts > 1 or len(tensors) == 1):
        return [t.data for t in tensors]
    return tensors[0].data.view(-1).chunk(parts) if tensors[0].numel() else [tensors[0].data.view(-1)] * parts


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


_EXECUTE: dict[str, Callable[[list[Call]], Any]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}
