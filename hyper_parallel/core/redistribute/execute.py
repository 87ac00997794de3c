"""Carrying out a plan on one rank: pack, exchange, unpack, reduce."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.dtensor.messages import explain
from hyper_parallel.core.redistribute.exchange import Piece, Program, program
from hyper_parallel.core.redistribute.groups import group_of
from hyper_parallel.core.redistribute.holdings import Part, boxes, length
from hyper_parallel.core.redistribute.plan import Plan
from hyper_parallel.core.redistribute.steps import Step

Working = Generator[dist.Work, None, torch.Tensor]
"""Yields each collective as soon as it is under way; the caller waits for it. Returns the result."""

# torch 2.13 renamed these two; the old names warn there, the new ones do not exist before.
_all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# What every backend moves as it is; anything else travels as bytes.
_WIRE = frozenset({torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64})


def execute(plan: Plan, local: torch.Tensor | None, *, mesh: DeviceMesh | None = None) -> torch.Tensor:
    """Carry out a plan on the calling rank; all ranks of the plan call it.

    Args:
        plan: what to do.
        local: the rank's part of the source; None or an empty tensor on a rank that is only on the destination's mesh.
        mesh: a DeviceMesh whose process groups may be used where they fit; others are made and kept.

    Returns:
        The rank's part of the result, `local` itself when there is nothing to do; an empty tensor on a rank that is
        only on the source's mesh.

    Raises:
        TypeError: `local` has another dtype than the plan.
        ValueError: `local` has another shape than the plan gives this rank, or the rank is on neither mesh.
    """
    return drive(start(plan, local, mesh))


def drive(working: Working) -> torch.Tensor:
    """Run to the end, waiting for each collective."""
    try:
        while True:
            next(working).wait()
    except StopIteration as end:
        return end.value


def start(plan: Plan, local: torch.Tensor | None, mesh: DeviceMesh | None = None) -> Working:
    """Check the arguments, and return what `drive` runs; see `execute`."""
    if not plan.steps and local is not None and local.dtype == plan.dtype:
        rank = dist.get_rank() if dist.is_initialized() else plan.ranks[0]
    else:
        rank = _check_rank(plan)
    local = _check_local(plan, local, rank)
    return _run(plan, local, rank, mesh)


def _run(plan: Plan, local: torch.Tensor, rank: int, mesh: DeviceMesh | None) -> Working:
    scalar = not plan.global_shape
    held = local.reshape(1) if scalar and local.numel() else local
    for step in plan.steps:
        if not step.communicates:
            if rank in step.after.ranks:
                held = _fill(step, held, rank) if step.kind == "copy" else _slice(step, held, rank)
        elif step.group_axes is None or rank in step.before.ranks:
            group = group_of(step.group_of(rank), step.axes, mesh)
            held = yield from _collective(step, held, rank, group)
    if not held.numel():  # nothing arrived in no shape in particular
        return _empty(plan, held, rank)
    if plan.steps and rank not in plan.dst.rank_list:
        return held.new_empty(0)
    return held.reshape(()) if scalar else held


def _empty(plan: Plan, held: torch.Tensor, rank: int) -> torch.Tensor:
    if rank not in plan.dst.rank_list:
        return held if held.shape == (0,) else held.new_empty(0)
    shape = plan.dst.local_shape(plan.global_shape, rank)
    return held if held.shape == shape else held.new_empty(shape)


# -- one step --------------------------------------------------------------------------------------------------------


def _collective(step: Step, held: torch.Tensor, rank: int, group: dist.ProcessGroup) -> Working:
    if step.kind == "all_reduce":
        return (yield from _all_reduce(step, held, group))
    if step.rounds == 1:
        work = program(step, rank)
        if step.kind == "all_gather" and _is_even(step):
            return (yield from _all_gather(work, held, group))
        if work.copies > 1 and work.copies == len(work.group):
            return (yield from _reduce_scatter(step, work, held, group))
    return (yield from _exchange(step, held, rank, group))


def _all_reduce(step: Step, held: torch.Tensor, group: dist.ProcessGroup) -> Working:
    result = held.clone(memory_format=torch.contiguous_format)
    yield dist.all_reduce(result, _reduce_op(step.reduction), group=group, async_op=True)
    return _averaged(result, math.prod(step.before.holding.sizes[axis] for axis in step.reduces), step.reduction)


def _all_gather(work: Program, held: torch.Tensor, group: dist.ProcessGroup) -> Working:
    """Gather parts of one size; where they lie in the result in the order of the ranks, nothing is unpacked."""
    assert work.need is not None, "members of a group over axes are on the mesh"
    flat = held.contiguous().view(-1)
    gathered = held.new_empty(len(work.group) * flat.numel())
    yield _all_gather_single(gathered, flat, group=group, async_op=True)
    shape = _shape(work.need)
    pieces = sorted((*work.receives, *work.own), key=lambda piece: piece.peer)
    if _lie_in_order(pieces, work.need):
        return gathered.view(shape)
    result = held.new_empty(shape)
    for piece, source in zip(pieces, gathered.split(flat.numel()), strict=True):
        _unpack(result, work.need, piece.part, source)
    return result


def _reduce_scatter(step: Step, work: Program, held: torch.Tensor, group: dist.ProcessGroup) -> Working:
    """Reduce copies that the members of the group hold, one each, into the part that each one keeps."""
    assert work.need is not None, "members of a group over axes are on the mesh"
    assert work.have is not None
    sizes, mine = [0] * len(work.group), math.prod(_shape(work.need))
    for piece in (*work.sends, *work.own):
        sizes[piece.peer] = piece.volume
    packed = _pack(held, work.have, sorted((*work.sends, *work.own), key=lambda piece: piece.peer))
    shape, ways = _shape(work.need), len(work.group)
    if _is_even(step) and dist.get_backend(group) != "gloo":
        result = held.new_empty(mine)
        yield _reduce_scatter_single(result, packed, _reduce_op(step.reduction), group=group, async_op=True)
        return _averaged(result, ways, step.reduction).view(shape)
    # On gloo an exchange and a local sum take half the time of its reduce_scatter, and uneven parts need it anyway.
    rows = held.new_empty(ways * mine)
    yield _all_to_all(rows, packed, [mine] * ways, sizes, group)
    return _reduce(rows.view(ways, *shape), step.reduction)


def _exchange(step: Step, held: torch.Tensor, rank: int, group: dist.ProcessGroup) -> Working:
    """Exchange parts, in rounds if memory asks for it, and reduce the copies of each round."""
    whole = step.after.part_of(rank)
    result = held.new_empty(_shape(whole) if whole is not None else 0)
    for index in range(step.rounds):
        work = program(step, rank, index)
        packed = _pack(held, work.have, work.sends)
        sends, receives = [0] * len(work.group), [0] * len(work.group)
        for piece in work.sends:
            sends[piece.peer] = piece.volume
        for piece in work.receives:
            receives[piece.peer] = piece.volume
        arrived = held.new_empty(sum(receives))
        yield _all_to_all(arrived, packed, receives, sends, group)
        del packed
        parts = arrived.split([piece.volume for piece in work.receives])
        if work.copies == 1:
            for piece, source in zip(work.receives, parts, strict=True):
                _unpack(result, work.need, piece.part, source)
            for piece in work.own:
                _move(held, work.have, result, work.need, piece.part)
        elif work.need is not None and all(work.need):
            rows = held.new_empty((work.copies, *_shape(work.need)))
            for piece, source in zip(work.receives, parts, strict=True):
                _unpack(rows[piece.copy], work.need, piece.part, source)
            for piece in work.own:
                _move(held, work.have, rows[piece.copy], work.need, piece.part)
            _unpack(result, whole, work.need, _reduce(rows, step.reduction).view(-1))
    return result


def _slice(step: Step, held: torch.Tensor, rank: int) -> torch.Tensor:
    have, need = step.before.part_of(rank), step.after.part_of(rank)
    assert need is not None, "the rank is on the mesh"
    if have == need:
        return held
    result = held.new_empty(_shape(need))
    if all(need):
        _move(held, have, result, need, need)
    return result


def _fill(step: Step, held: torch.Tensor, rank: int) -> torch.Tensor:
    have, need, fill = step.before.part_of(rank), step.after.part_of(rank), step.fill
    assert need is not None, "the rank is on the mesh"
    assert fill is not None, "a copy says how it fills"
    result = torch.full(_shape(need), _neutral(fill.value, held.dtype), dtype=held.dtype, device=held.device)
    if have is not None and all(have):
        own = held
        if fill.times != 1:
            own = own * fill.times
        if fill.over != 1:
            own = _averaged(own.clone(), fill.over, "avg")
        _move(own, have, result, need, have)
    return result


# -- packing ---------------------------------------------------------------------------------------------------------


def _shape(part: Part) -> tuple[int, ...]:
    return tuple(map(length, part))


def _index(part: Part | None, box: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    """Return where a box lies in the tensor that holds a part: the part's intervals, one after the other."""
    assert part is not None, "the rank holds what it packs"
    found = []
    for intervals, (start, stop) in zip(part, box, strict=True):
        before = 0
        for low, high in intervals:
            if low <= start < high:
                found.append(slice(before + start - low, before + stop - low))
                break
            before += high - low
    return tuple(found)


def _pack(held: torch.Tensor, have: Part | None, pieces: Sequence[Piece]) -> torch.Tensor:
    """Return the pieces one after the other, without copying where they lie so already."""
    total = sum(piece.volume for piece in pieces)
    if have is not None and held.is_contiguous() and total == held.numel() and _lie_in_order(pieces, have):
        return held.view(-1)
    packed, at = held.new_empty(total), 0
    for piece in pieces:
        for box in boxes(piece.part):
            source = held[_index(have, box)]
            packed[at : at + source.numel()].view(source.shape).copy_(source)
            at += source.numel()
    return packed


def _unpack(result: torch.Tensor, need: Part | None, part: Part, source: torch.Tensor) -> None:
    """Put elements that arrived one after the other where they belong."""
    at = 0
    for box in boxes(part):
        target = result[_index(need, box)]
        target.copy_(source[at : at + target.numel()].view(target.shape))
        at += target.numel()


def _move(held: torch.Tensor, have: Part | None, result: torch.Tensor, need: Part | None, part: Part) -> None:
    for box in boxes(part):
        result[_index(need, box)].copy_(held[_index(have, box)])


def _lie_in_order(pieces: Sequence[Piece], whole: Part) -> bool:
    """Return whether the pieces, one after the other, are the rows of the whole in memory order."""
    cut = next((dim for dim, intervals in enumerate(whole) if length(intervals) != 1), 0)
    at = 0
    for piece in pieces:
        if any(piece.part[dim] != whole[dim] for dim in range(len(whole)) if dim != cut):
            return False
        index = _index_of(whole[cut], piece.part[cut][0][0])
        if index != at or len(piece.part[cut]) != 1:
            return False
        at += length(piece.part[cut])
    return at == length(whole[cut])


def _index_of(intervals: Sequence[tuple[int, int]], start: int) -> int:
    before = 0
    for low, high in intervals:
        if low <= start < high:
            return before + start - low
        before += high - low
    return -1


def _is_even(step: Step) -> bool:
    """Return whether all ranks bring parts of one size, and not an empty one."""
    counts = step.before.holding.counts() if step.kind == "all_gather" else step.after.holding.counts()
    return bool(counts.flat[0] and (counts == counts.flat[0]).all())


# -- the backend's calls ---------------------------------------------------------------------------------------------


def _all_to_all(
    arrived: torch.Tensor, packed: torch.Tensor, receives: list[int], sends: list[int], group: dist.ProcessGroup
) -> dist.Work:
    if packed.dtype not in _WIRE:
        size = packed.element_size()
        arrived, packed = arrived.view(torch.uint8), packed.view(torch.uint8)
        receives, sends = [count * size for count in receives], [count * size for count in sends]
    work = dist.all_to_all_single(arrived, packed, receives, sends, group=group, async_op=True)
    assert work is not None, "an asynchronous call gives work to wait for"
    return work


def _reduce_op(reduction: str | None) -> Any:
    """Return torch's operation; an average is a sum, divided afterwards, as not every backend has one."""
    ops = dist.ReduceOp
    return {"max": ops.MAX, "min": ops.MIN, "prod": ops.PRODUCT}.get(reduction or "sum", ops.SUM)


def _averaged(total: torch.Tensor, ways: int, reduction: str | None) -> torch.Tensor:
    """Divide a sum by the number of copies when an average is wanted, in place; ints round down."""
    if reduction != "avg":
        return total
    exact = total.is_floating_point() or total.is_complex()
    return total.div_(ways) if exact else total.div_(ways, rounding_mode="floor")


def _reduce(rows: torch.Tensor, reduction: str | None) -> torch.Tensor:
    """Reduce copies, stacked in dim 0, in their order."""
    if reduction == "max":
        return rows.amax(0)
    if reduction == "min":
        return rows.amin(0)
    if reduction == "prod":
        return rows.prod(0, dtype=rows.dtype)
    total = rows[0] + rows[1] if len(rows) == 2 else rows.sum(0, dtype=rows.dtype)
    return _averaged(total, len(rows), reduction)


def _neutral(reduction: str, dtype: torch.dtype) -> Any:
    """Return what changes nothing when reduced with."""
    if reduction == "prod":
        return 1
    if reduction not in ("max", "min"):
        return 0
    low = reduction == "max"
    if dtype == torch.bool:
        return not low
    if dtype.is_floating_point:
        return -math.inf if low else math.inf
    limits = torch.iinfo(dtype)
    return limits.min if low else limits.max


# -- what can go wrong -----------------------------------------------------------------------------------------------


def _check_rank(plan: Plan) -> int:
    if not (dist.is_available() and dist.is_initialized()):
        asked, blame = "cannot execute a plan", "torch.distributed is not initialized"
        seen = f"from: {plan.src}   to: {plan.dst}"
        raise ValueError(explain(asked, blame, seen, "torchrun, or sim.run(function, world_size=8)"))
    rank = dist.get_rank()
    if rank not in plan.ranks:
        asked = f"cannot redistribute on rank {rank}"
        blame = "the rank is neither on the mesh that the tensor is on nor on the one it goes to"
        seen = f"from: {plan.src}   to: {plan.dst}"
        raise ValueError(explain(asked, blame, seen, f"call it on ranks {_listed(plan.ranks)} only"))
    return rank


def _check_local(plan: Plan, local: torch.Tensor | None, rank: int) -> torch.Tensor:
    seen = f"global_shape: {plan.global_shape}   layout: {plan.src}"
    if rank not in plan.src.rank_list:
        if local is None:
            from hyper_parallel.platform import get_platform

            return torch.empty(0, dtype=plan.dtype, device=get_platform().device())
        return local
    asked = f"cannot redistribute rank {rank}'s part"
    if not isinstance(local, torch.Tensor):
        blame = f"local is a {type(local).__name__}, not a tensor"
        raise TypeError(explain(asked, blame, seen, "the rank's part of the source"))
    expected = plan.src.local_shape(plan.global_shape, rank)
    if tuple(local.shape) != expected:
        blame = f"local has shape {tuple(local.shape)}, and the layout gives this rank {expected}"
        raise ValueError(explain(asked, blame, seen, "the global shape and the layout that the tensor really has"))
    if local.dtype != plan.dtype:
        blame = f"local has dtype {local.dtype}, and the plan is for {plan.dtype}"
        raise TypeError(explain(asked, blame, seen, f"plan(..., dtype={local.dtype})"))
    return local


def _listed(ranks: Sequence[int]) -> str:
    from hyper_parallel.core.dtensor.axes import describe_ranks

    return describe_ranks(tuple(ranks))
