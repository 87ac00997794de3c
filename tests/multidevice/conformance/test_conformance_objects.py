"""Python objects instead of tensors."""

import pytest
import torch.distributed as dist

import sim


def thing(rank: int) -> dict:
    return {"rank": rank, "text": "x" * (rank * 40 + 1), "parts": [rank, None, (1.5, b"y")]}


@sim.ranks(3)
def test_all_gather_and_gather(ctx):
    n, rank = ctx.world_size, ctx.rank
    every = [thing(r) for r in range(n)]
    found: list = [None] * n
    dist.all_gather_object(found, thing(rank))
    assert found == every
    for root in range(n):
        into: list | None = [None] * n if rank == root else None
        dist.gather_object(thing(rank), into, root)
        assert into == (every if rank == root else None)


@sim.ranks(3)
def test_broadcast_and_scatter(ctx):
    n, rank = ctx.world_size, ctx.rank
    sent = [thing(2), "two", 3] if rank == 2 else [None] * 3
    dist.broadcast_object_list(sent, 2)
    assert sent == [thing(2), "two", 3]
    sent = [rank]
    dist.broadcast_object_list(sent, group_src=1)
    assert sent == [1]
    one: list = [None]
    dist.scatter_object_list(one, [thing(r) for r in range(n)] if rank == 0 else None, 0)
    assert one == [thing(rank)]


@sim.ranks(3)
def test_send_and_receive(ctx):
    if ctx.rank == 0:
        dist.send_object_list([thing(7), "b"], 2)
    elif ctx.rank == 2:
        into: list = [None, None]
        assert dist.recv_object_list(into, 0) == 0
        assert into == [thing(7), "b"]


@pytest.mark.tier("test")
@sim.ranks(4)
def test_inside_of_a_group(ctx):
    odd_and_even = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = odd_and_even[ctx.rank % 2]
    found: list = [None, None]
    dist.all_gather_object(found, ctx.rank, mine)
    assert found == [ctx.rank % 2, ctx.rank % 2 + 2]
    sent = [ctx.rank]
    dist.broadcast_object_list(sent, src=ctx.rank % 2 + 2, group=mine)
    assert sent == [ctx.rank % 2 + 2]
