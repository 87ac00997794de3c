"""Works and futures, barriers, coalesced forms and the numbering of operations."""

import datetime

import pytest
import torch
import torch.distributed as dist
from conformance_kit import HOST, NOT_GLOO, all_values, next_and_previous, same, same_list, values, zero_list, zeros

import sim

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")


@sim.ranks(3)
def test_every_collective_can_be_waited_for_later(ctx):
    n, rank = ctx.world_size, ctx.rank
    reduced, sent, summed = values(ctx, rank, 3), values(ctx, rank, 3), values(ctx, rank, 3)
    parts, full, scattered, listed = zero_list(ctx, 2), zeros(ctx, 2 * n), zeros(ctx, 2), zeros(ctx, 2)
    into = zero_list(ctx, 2) if rank == 1 else None
    out, exchanged = zeros(ctx, 2), zeros(ctx, n)
    works = [
        dist.all_reduce(reduced, async_op=True),
        dist.broadcast(sent, 1, async_op=True),
        dist.reduce(summed, 0, async_op=True),
        dist.all_gather(parts, values(ctx, rank, 2), async_op=True),
        dist.all_gather_into_tensor(full, values(ctx, rank, 2), async_op=True),
        dist.reduce_scatter_tensor(scattered, values(ctx, rank, 2 * n), async_op=True),
        dist.reduce_scatter(listed, list(values(ctx, rank, 2 * n).chunk(n)), async_op=True),
        dist.gather(values(ctx, rank, 2), into, 1, async_op=True),
        dist.scatter(out, [values(ctx, to, 2) for to in range(n)] if rank == 2 else None, 2, async_op=True),
        dist.all_to_all_single(exchanged, values(ctx, rank, n), async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in reversed(works):
        work.wait()
        if ctx.backend != "gloo":  # which does not say it of all of them
            assert work.is_completed()
        if ctx.backend in HOST:
            assert work.is_success()
        if ctx.backend == "sim":  # torch 2.11 cannot hand over what gloo says
            assert work.exception() is None
        work.synchronize()
    same(reduced, all_values(ctx, 3).sum(0))
    same(sent, values(ctx, 1, 3))
    if rank == 0:
        same(summed, all_values(ctx, 3).sum(0))
    same_list(parts, all_values(ctx, 2))
    same(full, all_values(ctx, 2).flatten())
    for found in (scattered, listed):
        same(found, all_values(ctx, 2 * n).sum(0).chunk(n)[rank])
    if into is not None:
        same_list(into, all_values(ctx, 2))
    same(out, values(ctx, rank, 2))
    same(exchanged, all_values(ctx, n)[:, rank])


@sim.ranks(2)
def test_asking_until_it_is_done(ctx):
    x = values(ctx, ctx.rank, 3)
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    work.wait()
    same(x, all_values(ctx, 3).sum(0))


@sim.ranks(2)
def test_futures(ctx):
    wanted = all_values(ctx, 3).sum(0)
    x = values(ctx, ctx.rank, 3)
    future = dist.all_reduce(x, async_op=True).get_future()
    same(future.then(lambda done: done.value()[0] * 2).wait(), wanted * 2)
    assert future.done()
    same(future.value()[0], wanted)
    x = values(ctx, ctx.rank, 3)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    if ctx.backend in HOST:
        same(work.result()[0], wanted)
    if ctx.backend == "gloo":  # which has no future for a message
        return
    into = zeros(ctx, 2)
    ops = [dist.P2POp(dist.isend, values(ctx, ctx.rank, 2), 1 - ctx.rank), dist.P2POp(dist.irecv, into, 1 - ctx.rank)]
    torch.futures.wait_all([work.get_future() for work in dist.batch_isend_irecv(ops)])
    same(into, values(ctx, 1 - ctx.rank, 2))


@sim.ranks(2, backends=HOST)
def test_only_a_receive_has_a_source(ctx):
    with pytest.raises(RuntimeError, match="source"):
        dist.all_reduce(values(ctx, ctx.rank, 1), async_op=True)._source_rank()
    sent = dist.isend(values(ctx, ctx.rank, 1), 1 - ctx.rank)
    with pytest.raises(RuntimeError, match="source"):
        sent._source_rank()
    received = dist.irecv(zeros(ctx, 1), 1 - ctx.rank)
    received.wait()
    sent.wait()
    assert received._source_rank() == 1 - ctx.rank


@sim.ranks(3)
def test_barriers(ctx):
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.barrier(group=dist.new_group([0, 1, 2]))


@sim.ranks(3, backends=HOST)
def test_monitored_barrier(ctx):
    group = dist.new_group(backend="gloo")
    dist.monitored_barrier(group)
    dist.monitored_barrier(group, timeout=datetime.timedelta(seconds=30), wait_all_ranks=True)
    with pytest.raises(TypeError, match="timedelta"):
        dist.monitored_barrier(group, timeout="soon")


@sim.ranks(3)
def test_coalesced_by_name(ctx):
    tensors = [values(ctx, ctx.rank, 2), values(ctx, ctx.rank, 5)]
    dist.all_reduce_coalesced(tensors)
    same_list(tensors, [all_values(ctx, 2).sum(0), all_values(ctx, 5).sum(0)])
    tensors = [values(ctx, ctx.rank, 2), values(ctx, ctx.rank, 5)]
    dist.all_reduce_coalesced(tensors, dist.ReduceOp.MAX, async_op=True).wait()
    same_list(tensors, [all_values(ctx, 2).amax(0), all_values(ctx, 5).amax(0)])
    if ctx.backend not in HOST:  # nccl and hccl have no lists of lists
        return
    found = [[zeros(ctx, 2), zeros(ctx, 3, 2)] for _ in range(ctx.world_size)]  # one list for each rank
    dist.all_gather_coalesced(found, [values(ctx, ctx.rank, 2), values(ctx, ctx.rank, 3, 2)])
    for rank, (small, large) in enumerate(found):
        same(small, values(ctx, rank, 2))
        same(large, values(ctx, rank, 3, 2))


def coalesce(ctx, **options) -> None:
    """all_reduce, all_gather and reduce_scatter, two each, as torch's coalescing manager puts them together."""
    n = ctx.world_size
    tensors = [values(ctx, ctx.rank, 2), values(ctx, ctx.rank, 4)]
    with dist._coalescing_manager(async_ops=True, **options) as together:
        for tensor in tensors:
            dist.all_reduce(tensor)
    together.wait()
    same_list(tensors, [all_values(ctx, 2).sum(0), all_values(ctx, 4).sum(0)])
    gathered = [zeros(ctx, n * size) for size in (2, 3)]
    with dist._coalescing_manager(async_ops=True, **options) as together:
        for out, size in zip(gathered, (2, 3), strict=True):
            dist.all_gather_into_tensor(out, values(ctx, ctx.rank, size))
    together.wait()
    scattered = [zeros(ctx, size) for size in (2, 3)]
    with dist._coalescing_manager(async_ops=True, **options) as together:
        for out, size in zip(scattered, (2, 3), strict=True):
            dist.reduce_scatter_tensor(out, values(ctx, ctx.rank, n * size))
    together.wait()
    for size, full, part in zip((2, 3), gathered, scattered, strict=True):
        same(full, all_values(ctx, size).flatten())
        same(part, all_values(ctx, n * size).sum(0).chunk(n)[ctx.rank])


@sim.ranks(2)
def test_coalescing_manager(ctx):
    coalesce(ctx)
    tensors = [values(ctx, ctx.rank, 2), values(ctx, ctx.rank, 4)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    same_list(tensors, [all_values(ctx, 2).sum(0), all_values(ctx, 4).sum(0)])


@sim.ranks(2, backends=NOT_GLOO)
def test_coalescing_manager_of_a_device(ctx):
    """gloo cannot start a group of calls; with nccl, these may also be messages."""
    coalesce(ctx, device=ctx.device)
    after, before = next_and_previous(ctx)
    into = zeros(ctx, 3)
    with dist._coalescing_manager(device=ctx.device, async_ops=True) as together:
        dist.isend(values(ctx, ctx.rank, 3), after)
        dist.irecv(into, before)
    together.wait()
    same(into, values(ctx, before, 3))


@sim.ranks(2)
def test_operations_are_numbered(ctx):
    group = dist.group.WORLD
    first = group._get_sequence_number_for_group()
    dist.all_reduce(values(ctx, ctx.rank, 2))
    dist.broadcast(values(ctx, ctx.rank, 2), 0)
    assert group._get_sequence_number_for_group() == first + 2
    other = dist.new_group([0, 1])
    before = other._get_sequence_number_for_group()
    dist.all_reduce(values(ctx, ctx.rank, 2))
    assert other._get_sequence_number_for_group() == before
    dist.all_reduce(values(ctx, ctx.rank, 2), group=other)
    assert other._get_sequence_number_for_group() == before + 1
