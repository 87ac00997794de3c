"""Execution of a plan on one rank: pack, exchange, unpack, reduce."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.checks import check
from hyper_parallel.core.common.errors import InvalidType, InvalidValue
from hyper_parallel.core.common.groups import all_gather_single, group_of, reduce_scatter_single
from hyper_parallel.core.common.torch_compat import flat_bytes, record_function
from hyper_parallel.core.mesh.device_mesh import describe_ranks, mesh_among
from hyper_parallel.core.redistribute.holdings import Located
from hyper_parallel.core.redistribute.plan import Plan
from hyper_parallel.core.redistribute.steps import BufferBox, Moves, Step, local_moves, moves, shape_of

Working = Generator[dist.Work, None, torch.Tensor]
"""Yields each collective as soon as it is under way; the caller waits for it. Returns the result."""

# Dtypes that every backend exchanges natively; others are sent as bytes.
_WIRE = frozenset({torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64})


def execute(plan: Plan, local: torch.Tensor | None, *, mesh: DeviceMesh | None = None) -> torch.Tensor:
    """Execute a plan on the calling rank; all ranks of the plan call it.

    No gradient is recorded, because `redistribute` records one.

    Args:
        plan: the plan to execute.
        local: the rank's part of the source; None or an empty tensor on a rank of the destination's mesh only.
        mesh: a DeviceMesh whose process groups are reused where they fit; other groups are created and kept.

    Returns:
        The rank's part of the result; `local` itself if there are no steps; an empty tensor on a rank of the source's
        mesh only.

    Raises:
        TypeError: `local` has another dtype than the plan.
        ValueError: `local` has another shape than the plan gives this rank, or the rank is on neither mesh.
    """
    with torch.no_grad():
        return drive(start(plan, local, mesh))


def drive(working: Working) -> torch.Tensor:
    """Run a redistribution to its end, waiting for each collective, and return the result."""
    with record_function("redistribute"):
        try:
            while True:
                next(working).wait()
        except StopIteration as end:
            return end.value


def start(plan: Plan, local: torch.Tensor | None, mesh: DeviceMesh | None = None) -> Working:
    """Check the arguments of `execute`, and return the generator for `drive`."""
    if not plan.steps and not dist.is_initialized():  # so that plans without steps need no process group
        rank = plan.ranks[0]
    else:
        rank = _check_rank(plan)
    local = _check_local(plan, local, rank, mesh)
    return _run(plan, local, rank, mesh)


def _run(plan: Plan, local: torch.Tensor, rank: int, mesh: DeviceMesh | None) -> Working:
    scalar = not plan.global_shape
    if plan.steps:  # backends read raw memory and ignore conj and neg bits
        local = local.resolve_conj().resolve_neg()
    held = local.reshape(1) if scalar and local.numel() else local
    for step in plan.steps:
        if not step.communicates:
            if rank in step.after.ranks:
                held = _fill(step, held, rank) if step.kind == "copy" else _slice(step, held, rank)
        elif step.group_axes is None or rank in step.before.ranks:
            held = yield from _collective(step, held, rank, mesh)
    if not held.numel():  # an empty buffer may have the wrong shape
        return _empty(plan, held, rank)
    if plan.steps and rank not in plan.after.ranks:
        return held.new_empty(0)
    return held.reshape(()) if scalar else held


def _empty(plan: Plan, held: torch.Tensor, rank: int) -> torch.Tensor:
    shape = _shape_at(plan, plan.after, rank)
    if shape is None:
        return held if held.shape == (0,) else held.new_empty(0)
    return held if held.shape == shape else held.new_empty(shape)


# -- one step --------------------------------------------------------------------------------------------------------


def _collective(step: Step, held: torch.Tensor, rank: int, mesh: DeviceMesh | None) -> Working:
    work = moves(step, rank)
    group = group_of(work.group, step.axes, None if mesh is None else mesh_among(mesh))
    if step.kind == "all_reduce":
        return (yield from _all_reduce(step, held, group))
    if step.kind == "all_gather" and work.even:
        return (yield from _all_gather(work, held, group))
    if work.copies > 1 and work.copies == len(work.group) and step.rounds == 1:
        return (yield from _reduce_scatter(step, work, held, group))
    if step.rounds == 1:
        return (yield from _exchange(step, work, held, group))
    return (yield from _in_rounds(step, held, rank, group))


def _all_reduce(step: Step, held: torch.Tensor, group: dist.ProcessGroup) -> Working:
    result = held.clone(memory_format=torch.contiguous_format)
    yield dist.all_reduce(result, _reduce_op(step.reduction), group=group, async_op=True)
    return _averaged(result, math.prod(step.before.holding.sizes[axis] for axis in step.reduces), step.reduction)


def _all_gather(work: Moves, held: torch.Tensor, group: dist.ProcessGroup) -> Working:
    """All-gather parts of equal size."""
    flat = held.contiguous().view(-1)
    gathered = held.new_empty(len(work.group) * flat.numel())
    yield all_gather_single(gathered, flat, group=group, async_op=True)
    return _unpacked(work, held, gathered)


def _reduce_scatter(step: Step, work: Moves, held: torch.Tensor, group: dist.ProcessGroup) -> Working:
    """Reduce the copies of the group's members, one each, into the part that each member keeps."""
    packed, ways = _packed(work, held), len(work.group)
    if work.even and dist.get_backend(group) != "gloo":
        result = held.new_empty(work.need)
        own, parts = result.view(-1), packed
        if packed.is_complex():  # as in torch's all_reduce, because nccl and hccl have no complex dtype
            own, parts = torch.view_as_real(own), torch.view_as_real(parts)
        yield reduce_scatter_single(own, parts, _reduce_op(step.reduction), group=group, async_op=True)
        return _averaged(result, ways, step.reduction)
    # gloo's reduce_scatter takes twice as long as an exchange and a local sum. Uneven parts need the exchange anyway.
    rows = held.new_empty((ways, *work.need))
    yield all_to_all(rows.view(-1), packed, work.receives, work.sends, group)
    return _reduce(rows, step.reduction)


def _exchange(step: Step, work: Moves, held: torch.Tensor, group: dist.ProcessGroup) -> Working:
    """Exchange parts, and reduce their copies."""
    packed = _packed(work, held)
    arrived = held.new_empty(sum(work.receives))
    yield all_to_all(arrived, packed, work.receives, work.sends, group)
    del packed
    return _unpacked(work, held, arrived) if work.copies == 1 else _reduced(step, work, held, arrived)


def _in_rounds(step: Step, held: torch.Tensor, rank: int, group: dist.ProcessGroup) -> Working:
    """Exchange parts in rounds, to keep the buffers small."""
    whole = step.after.part_of(rank)
    result = held.new_empty(shape_of(whole) if whole is not None else 0)
    for index in range(step.rounds):
        work = moves(step, rank, index)
        packed = _packed(work, held)
        arrived = held.new_empty(sum(work.receives))
        yield all_to_all(arrived, packed, work.receives, work.sends, group)
        del packed
        if work.copies == 1:
            _unpack(work, held, arrived, result)
        elif arrived.numel() or work.own:
            part = _reduced(step, work, held, arrived)
            (result if work.target is None else result[work.target]).copy_(part)
            del part
        del arrived
    return result


def _slice(step: Step, held: torch.Tensor, rank: int) -> torch.Tensor:
    shape, boxes = local_moves(step, rank)
    if len(boxes) == 1:
        return held[boxes[0][1]].clone(memory_format=torch.contiguous_format)
    result = held.new_empty(shape)
    for target, source in boxes:
        result[target].copy_(held[source])
    return result


def _fill(step: Step, held: torch.Tensor, rank: int) -> torch.Tensor:
    shape, boxes = local_moves(step, rank)
    fill = step.fill
    assert fill is not None, "a copy says how it fills"
    result = torch.full(shape, _neutral(fill.value, held.dtype), dtype=held.dtype, device=held.device)
    if boxes and fill.times != 1:
        held = held * fill.times
    if boxes and fill.over != 1:
        held = _averaged(held.clone(), fill.over, "avg")
    for target, source in boxes:
        result[target].copy_(held[source])
    return result


# -- packing ---------------------------------------------------------------------------------------------------------


def _packed(work: Moves, held: torch.Tensor) -> torch.Tensor:
    """Return the send buffer: the tensor itself if it is in the order of sending, else a packed copy."""
    if work.pack is None and held.is_contiguous():
        return held.view(-1)
    packed = held.new_empty(sum(work.sends))
    for place in work.pack_anyway:
        place.of(packed).copy_(held[place.index])
    return packed


def _unpacked(work: Moves, held: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
    """Return the result: the receive buffer itself if it is in order, else an unpacked copy."""
    if work.unpack is None:
        return arrived.view(work.need)
    if work.join is not None:
        return torch.cat([arrived[p.start : p.stop].view(p.shape) for p in _pieces(work.unpack)], work.join)
    result = held.new_empty(work.need)
    _unpack(work, held, arrived, result)
    return result


def _pieces(places: Sequence[BufferBox]) -> list[BufferBox]:
    """Return one box per piece."""
    return list({place.start: place for place in places}.values())


def _unpack(work: Moves, held: torch.Tensor, arrived: torch.Tensor, result: torch.Tensor) -> None:
    for place in work.unpack or ():
        result[place.index].copy_(place.of(arrived))
    for target, source, _ in work.own:
        result[target].copy_(held[source])


def _reduced(step: Step, work: Moves, held: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
    """Assemble the pieces of every copy, and reduce the copies in their order."""
    rows = held.new_empty((work.copies, *work.need))
    for place in work.unpack or ():
        rows[place.copy][place.index].copy_(place.of(arrived))
    for target, source, copy in work.own:
        rows[copy][target].copy_(held[source])
    return _reduce(rows, step.reduction)


# -- calls of the backend --------------------------------------------------------------------------------------------


def all_to_all(
    arrived: torch.Tensor, packed: torch.Tensor, receives: Sequence[int], sends: Sequence[int], group: dist.ProcessGroup
) -> dist.Work:
    """Start an exchange of parts of any dtype, and return the work to wait for. Dtypes outside `_WIRE` travel as bytes.

    Args:
        arrived: flat receive buffer, by rank of the group.
        packed: flat send buffer, by rank of the group.
        receives: elements from each rank.
        sends: elements to each rank.
        group: the ranks.
    """
    if packed.dtype not in _WIRE:
        size = packed.element_size()
        arrived, packed = flat_bytes(arrived), flat_bytes(packed)
        receives, sends = [count * size for count in receives], [count * size for count in sends]
    work = dist.all_to_all_single(arrived, packed, list(receives), list(sends), group=group, async_op=True)
    assert work is not None, "an asynchronous call gives work to wait for"
    return work


def _reduce_op(reduction: str | None) -> Any:
    """Return torch's operation. An average is a sum that is divided later, because not every backend has an average."""
    ops = dist.ReduceOp
    return {"max": ops.MAX, "min": ops.MIN, "prod": ops.PRODUCT}.get(reduction or "sum", ops.SUM)


def _averaged(total: torch.Tensor, ways: int, reduction: str | None) -> torch.Tensor:
    """Divide a sum in place by the number of copies if an average is wanted; ints round down."""
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
    """Return the neutral element of a reduction, e.g. -inf for "max" of floats."""
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


# -- errors ----------------------------------------------------------------------------------------------------------


def _check_rank(plan: Plan) -> int:
    if not (dist.is_available() and dist.is_initialized()):
        asked, blame = "cannot execute a plan", "torch.distributed is not initialized"
        seen = f"from: {plan.src}   to: {plan.dst}"
        raise InvalidValue(asked, blame, seen, "torchrun, or sim.run(function, world_size=8)")
    rank = dist.get_rank()
    if rank not in plan.ranks:
        asked = f"cannot redistribute on rank {rank}"
        blame = "the rank is neither on the mesh that the tensor is on nor on the one it goes to"
        seen = f"from: {plan.src}   to: {plan.dst}"
        raise InvalidValue(asked, blame, seen, f"call it on ranks {_listed(plan.ranks)} only")
    return rank


def _check_local(plan: Plan, local: torch.Tensor | None, rank: int, mesh: DeviceMesh | None) -> torch.Tensor:
    expected = _shape_at(plan, plan.before, rank)
    if isinstance(local, torch.Tensor) and local.dtype == plan.dtype and expected in (None, tuple(local.shape)):
        return local
    if expected is None and local is None:
        from hyper_parallel.platform import get_platform

        platform = get_platform(None if mesh is None else mesh.device_type)
        return torch.empty(0, dtype=plan.dtype, device=platform.device())
    asked, seen = f"cannot redistribute rank {rank}'s part", f"global_shape: {plan.global_shape}   layout: {plan.src}"
    check(asked, "tensor", "the rank's shard of the source", local=local)
    assert local is not None, "refused as no tensor"
    if local.dtype != plan.dtype:
        blame = f"local has dtype {local.dtype}, and the plan is for {plan.dtype}"
        raise InvalidType(asked, blame, seen, f"plan(..., dtype={local.dtype})")
    blame = f"local has shape {tuple(local.shape)}, and the layout gives this rank {expected}"
    raise InvalidValue(asked, blame, seen, "the global shape and the layout that the tensor really has")


@lru_cache(maxsize=8192)
def _shape_at(plan: Plan, at: Located, rank: int) -> tuple[int, ...] | None:
    """Return the shape of a rank's part at the source or the result; None for a rank outside that mesh."""
    part = at.part_of(rank)
    return None if part is None else shape_of(part)[: len(plan.global_shape)]


def _listed(ranks: Sequence[int]) -> str:
    return describe_ranks(tuple(ranks))
