"""send and receive, blocking and not, batched, with tags, from anybody, and to oneself's neighbours."""

import torch
import torch.distributed as dist
from conformance_kit import HOST, next_and_previous, same, values, zeros

import sim


@sim.ranks(3)
def test_around_a_ring(ctx):
    after, before = next_and_previous(ctx)
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.bool]
    if ctx.backend == "sim":
        dtypes += [torch.int16, torch.float8_e4m3fn]
    for dtype in dtypes:
        into = zeros(ctx, 4, dtype=dtype)
        ops = [
            dist.P2POp(dist.isend, values(ctx, ctx.rank, 4, dtype=dtype), after),
            dist.P2POp(dist.irecv, into, before),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        same(into, values(ctx, before, 4, dtype=dtype))
    into = zeros(ctx)
    works = [dist.isend(values(ctx, ctx.rank), after), dist.irecv(into, before)]
    for work in works:
        work.wait()
        assert work.is_completed()
    same(into, values(ctx, before))


@sim.ranks(2)
def test_several_messages_keep_their_order(ctx):
    other = 1 - ctx.rank
    into = [zeros(ctx, 2) for _ in range(3)]
    sends = [dist.P2POp(dist.isend, values(ctx, ctx.rank, 2) * (k + 1), other) for k in range(3)]
    for work in dist.batch_isend_irecv([*sends, *(dist.P2POp(dist.irecv, t, other) for t in into)]):
        work.wait()
    for k, tensor in enumerate(into):
        same(tensor, values(ctx, other, 2) * (k + 1))


@sim.ranks(3)
def test_blocking(ctx):
    """Along the line of ranks and back."""
    n, rank = ctx.world_size, ctx.rank
    x = values(ctx, 0, 5)
    if rank > 0:
        x = zeros(ctx, 5)
        assert dist.recv(x, rank - 1) == rank - 1
    if rank < n - 1:
        dist.send(x + 1, rank + 1)
        assert dist.recv(x, group_src=rank + 1) == rank + 1
    if rank > 0:
        dist.send(x, group_dst=rank - 1)
    same(x, values(ctx, 0, 5) + n - 1)


@sim.ranks(3, backends=HOST)
def test_tags_tell_messages_apart(ctx):
    if ctx.rank == 0:
        for work in [dist.isend(values(ctx, tag, 2), 1, tag=tag) for tag in (1, 2)]:
            work.wait()
    elif ctx.rank == 1:
        second, first = zeros(ctx, 2), zeros(ctx, 2)
        works = [dist.irecv(second, 0, tag=2), dist.irecv(first, 0, tag=1)]
        for work in works:
            work.wait()
        same(first, values(ctx, 1, 2))
        same(second, values(ctx, 2, 2))


@sim.ranks(4, backends=HOST)
def test_from_anybody(ctx):
    if ctx.rank:
        dist.send(values(ctx, ctx.rank, 3), 0, tag=4)
        return
    sources = []
    for blocking in (True, False, True):
        into = zeros(ctx, 3)
        if blocking:
            sources.append(dist.recv(into, tag=4))
        else:
            work = dist.irecv(into, tag=4)
            work.wait()
            sources.append(work._source_rank())
        same(into, values(ctx, sources[-1], 3))
    assert sorted(sources) == [1, 2, 3]


@sim.ranks(4)
def test_inside_of_a_group(ctx):
    """Global and group ranks name the same neighbours."""
    pairs = [dist.new_group([1, 0]), dist.new_group([2, 3])]
    mine = pairs[ctx.rank // 2]
    other = ctx.rank ^ 1
    into, again = zeros(ctx, 3), zeros(ctx, 3)
    ops = [
        dist.P2POp(dist.isend, values(ctx, ctx.rank, 3), other, mine),
        dist.P2POp(dist.irecv, into, other, mine),
        dist.P2POp(dist.isend, values(ctx, ctx.rank, 3) * 2, group=mine, group_peer=other % 2),
        dist.P2POp(dist.irecv, again, group=mine, group_peer=other % 2),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(into, values(ctx, other, 3))
    same(again, values(ctx, other, 3) * 2)


@sim.ranks(3, backends=("sim", "gpu"))
def test_empty_messages_and_to_oneself(ctx):
    """gloo waits for ever for both."""
    after, before = next_and_previous(ctx)
    into = zeros(ctx, 2)
    ops = [
        dist.P2POp(dist.isend, zeros(ctx, 0), after),
        dist.P2POp(dist.irecv, zeros(ctx, 0), before),
        dist.P2POp(dist.isend, values(ctx, ctx.rank, 2), ctx.rank),
        dist.P2POp(dist.irecv, into, ctx.rank),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(into, values(ctx, ctx.rank, 2))
