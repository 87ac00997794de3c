"""What a process group does, on every arm alike: each result is compared with the value computed locally.

Where a backend lacks something, the body says so and leaves out that arm, and nothing else.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh

import sim


def values(ctx, rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What ``rank`` brings along: small whole numbers, exact in every dtype, different on every rank."""
    count = int(torch.Size(shape).numel())
    return ((torch.arange(count) * 3 + rank * 5 + 1) % 7 + 1).to(dtype).reshape(shape).to(ctx.device)


def all_values(ctx, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([values(ctx, rank, *shape, dtype=dtype) for rank in range(ctx.world_size)])


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@sim.ranks(3)
def test_all_reduce_ops_and_dtypes(ctx):
    by_op = {
        ReduceOp.SUM: lambda x: x.sum(0),
        ReduceOp.PRODUCT: lambda x: x.prod(0),
        ReduceOp.MIN: lambda x: x.amin(0),
        ReduceOp.MAX: lambda x: x.amax(0),
    }
    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
    for op, by_hand in by_op.items():
        for dtype in dtypes:
            x = values(ctx, ctx.rank, 4, 3, dtype=dtype)
            dist.all_reduce(x, op)
            same(x, by_hand(all_values(ctx, 4, 3, dtype=dtype)).to(dtype))
    if ctx.arm in ("sim", "gloo"):  # bitwise reductions are not among nccl's
        for op, combine in (
            (ReduceOp.BAND, torch.bitwise_and),
            (ReduceOp.BOR, torch.bitwise_or),
            (ReduceOp.BXOR, torch.bitwise_xor),
        ):
            x, wanted = values(ctx, ctx.rank, 5, dtype=torch.int32), values(ctx, 0, 5, dtype=torch.int32)
            dist.all_reduce(x, op)
            for rank in range(1, ctx.world_size):
                wanted = combine(wanted, values(ctx, rank, 5, dtype=torch.int32))
            same(x, wanted)
    if ctx.arm in ("sim", "gpu"):  # gloo has neither, hccl has no PREMUL_SUM
        x = values(ctx, ctx.rank, 6)
        dist.all_reduce(x, ReduceOp.AVG)
        torch.testing.assert_close(x, all_values(ctx, 6).mean(0))
        x = values(ctx, ctx.rank, 6)
        dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
        same(x, (all_values(ctx, 6) * 0.5).sum(0))
    x = torch.complex(values(ctx, ctx.rank, 3), values(ctx, ctx.rank + 1, 3))
    dist.all_reduce(x)
    ranks = range(ctx.world_size)
    same(x, sum(torch.complex(values(ctx, rank, 3), values(ctx, rank + 1, 3)) for rank in ranks))
    large = values(ctx, ctx.rank, 100_003)
    dist.all_reduce(large)
    same(large, all_values(ctx, 100_003).sum(0))


@sim.ranks(3)
def test_all_gather(ctx):
    n = ctx.world_size
    x, wanted = values(ctx, ctx.rank, 2, 3), all_values(ctx, 2, 3)
    parts = [torch.zeros_like(x) for _ in range(n)]
    dist.all_gather(parts, x)
    same(torch.stack(parts), wanted)
    whole = torch.zeros(2 * n, 3, device=ctx.device)
    dist.group.WORLD._allgather_base(whole, x).wait()
    same(whole, wanted.reshape(2 * n, 3))
    if ctx.arm != "gloo":  # gloo's output is laid end to end, and its parts are of one size
        stacked = torch.zeros(n, 2, 3, device=ctx.device)
        dist.group.WORLD._allgather_base(stacked, x).wait()
        same(stacked, wanted)
        parts = [torch.zeros(rank + 1, device=ctx.device) for rank in range(n)]
        dist.all_gather(parts, values(ctx, ctx.rank, ctx.rank + 1))
        for rank, part in enumerate(parts):
            same(part, values(ctx, rank, rank + 1))
    empty = torch.zeros(0, device=ctx.device)
    dist.group.WORLD._allgather_base(torch.zeros(0, device=ctx.device), empty).wait()
    if ctx.arm == "sim":  # data movement needs no arithmetic
        x8 = values(ctx, ctx.rank, 4).to(torch.float8_e4m3fn)
        parts = [torch.empty_like(x8) for _ in range(n)]
        dist.all_gather(parts, x8)
        same(torch.stack([part.float() for part in parts]), all_values(ctx, 4))


@sim.ranks(3)
def test_reduce_scatter(ctx):
    n = ctx.world_size
    wanted = all_values(ctx, 2 * n, 3).sum(0).chunk(n)[ctx.rank]
    out = torch.zeros(2, 3, device=ctx.device)
    x = values(ctx, ctx.rank, 2 * n, 3)
    dist.group.WORLD._reduce_scatter_base(out, x).wait()
    same(out, wanted)
    same(x, values(ctx, ctx.rank, 2 * n, 3))
    out = torch.zeros(2, 3, device=ctx.device)
    dist.reduce_scatter(out, list(x.chunk(n)))
    same(out, wanted)
    if ctx.arm != "gloo":  # gloo's parts are of one size, and it has no AVG
        out = torch.zeros(ctx.rank + 1, device=ctx.device)
        dist.reduce_scatter(out, [values(ctx, ctx.rank, rank + 1) for rank in range(n)], ReduceOp.MAX)
        same(out, all_values(ctx, ctx.rank + 1).amax(0))
        out = torch.zeros(2, 3, device=ctx.device)
        dist.group.WORLD._reduce_scatter_base(out, x, avg_options()).wait()
        torch.testing.assert_close(out, all_values(ctx, 2 * n, 3).mean(0).chunk(n)[ctx.rank])
    if ctx.arm == "sim":  # the output is a part of the input, as FSDP has it
        x = values(ctx, ctx.rank, 2 * n, 3)
        dist.group.WORLD._reduce_scatter_base(x.chunk(n)[ctx.rank], x).wait()
        same(x.chunk(n)[ctx.rank], wanted)


def avg_options():
    options = dist.ReduceScatterOptions()
    options.reduceOp = ReduceOp.AVG
    return options


@sim.ranks(3)
def test_all_to_all(ctx):
    n, rank = ctx.world_size, ctx.rank
    x = values(ctx, rank, 2 * n, 2)
    out = torch.zeros_like(x)
    dist.all_to_all_single(out, x)
    same(out, torch.cat([values(ctx, source, 2 * n, 2).chunk(n)[rank] for source in range(n)]))
    # Rank r sends r + t rows to rank t.
    send, receive = [rank + target for target in range(n)], [source + rank for source in range(n)]
    x, out = values(ctx, rank, sum(send), 2), torch.zeros(sum(receive), 2, device=ctx.device)
    dist.all_to_all_single(out, x, receive, send)
    pieces = [values(ctx, s, sum(s + t for t in range(n)), 2).split([s + t for t in range(n)])[rank] for s in range(n)]
    same(out, torch.cat(pieces))
    if ctx.arm != "gloo":  # gloo has no lists here
        into = [torch.zeros(source + rank, 2, device=ctx.device) for source in range(n)]
        dist.all_to_all(into, list(x.split(send)))
        same(torch.cat(into), torch.cat(pieces))


@sim.ranks(3)
def test_rooted(ctx):
    n, rank, root = ctx.world_size, ctx.rank, 1
    x = values(ctx, rank, 3)
    dist.broadcast(x, root)
    same(x, values(ctx, root, 3))
    x = values(ctx, rank, 3)
    dist.reduce(x, root)
    if rank == root:
        same(x, all_values(ctx, 3).sum(0))
    elif ctx.arm == "sim":  # elsewhere undefined
        same(x, values(ctx, rank, 3))
    x = values(ctx, rank, 3)
    out = torch.zeros(3, device=ctx.device)
    dist.scatter(out, [values(ctx, root, 3) + target for target in range(n)] if rank == root else None, root)
    same(out, values(ctx, root, 3) + rank)
    into = [torch.zeros(3, device=ctx.device) for _ in range(n)] if rank == root else None
    dist.gather(x, into, root)
    if into is not None:
        same(torch.stack(into), all_values(ctx, 3))
    dist.barrier()


@sim.ranks(3)
def test_point_to_point(ctx):
    n, rank = ctx.world_size, ctx.rank
    after, before = (rank + 1) % n, (rank - 1) % n
    into = torch.zeros(4, device=ctx.device)
    works = [dist.isend(values(ctx, rank, 4), after), dist.irecv(into, before)]
    for work in works:
        work.wait()
    same(into, values(ctx, before, 4))
    first, second = torch.zeros(2, device=ctx.device), torch.zeros(2, device=ctx.device)
    ops = [
        dist.P2POp(dist.irecv, first, before),
        dist.P2POp(dist.isend, values(ctx, rank, 2), after),
        dist.P2POp(dist.irecv, second, before),
        dist.P2POp(dist.isend, values(ctx, rank, 2) * 10, after),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(first, values(ctx, before, 2))
    same(second, values(ctx, before, 2) * 10)
    if rank == 0:
        dist.send(values(ctx, 0, 5), 1)
    elif rank == 1:
        into = torch.zeros(5, device=ctx.device)
        assert dist.recv(into, 0) == 0
        same(into, values(ctx, 0, 5))
    if ctx.arm in ("sim", "gloo"):  # tags, and receiving from anybody
        if rank == 0:
            dist.isend(torch.ones(1), 1, tag=1).wait()
            dist.isend(torch.ones(1) * 2, 1, tag=2).wait()
        elif rank == 1:
            tagged = [torch.zeros(1), torch.zeros(1)]
            works = [dist.irecv(tagged[1], 0, tag=2), dist.irecv(tagged[0], 0, tag=1)]
            for work in works:
                work.wait()
            assert [t.item() for t in tagged] == [1, 2]
        dist.barrier()
        if rank == 0:
            sources = []
            for _ in range(n - 1):
                into = torch.zeros(3)
                sources.append(dist.recv(into))
                same(into, values(ctx, sources[-1], 3))
            assert sorted(sources) == [1, 2]
        else:
            dist.send(values(ctx, rank, 3), 0)


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@sim.ranks(2)
def test_async_and_coalesced(ctx):
    n = ctx.world_size
    tensors = [values(ctx, ctx.rank, size) for size in (2, 5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed()
    for tensor, size in zip(tensors, (2, 5), strict=True):
        same(tensor, all_values(ctx, size).sum(0))
    x = values(ctx, ctx.rank, 3)
    future = dist.all_reduce(x, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    same(doubled.wait(), all_values(ctx, 3).sum(0) * 2)
    if ctx.arm != "gloo":  # which cannot coalesce
        tensors = [values(ctx, ctx.rank, 2), values(ctx, ctx.rank, 4)]
        with dist._coalescing_manager(device=ctx.device, async_ops=True) as together:
            for tensor in tensors:
                dist.all_reduce(tensor)
        together.wait()
        for tensor in tensors:
            same(tensor, all_values(ctx, *tensor.shape).sum(0))
        gathered = [torch.zeros(n * size, device=ctx.device) for size in (2, 3)]
        with dist._coalescing_manager(device=ctx.device, async_ops=True) as together:
            for out, size in zip(gathered, (2, 3), strict=True):
                dist.all_gather_into_tensor(out, values(ctx, ctx.rank, size))
        together.wait()
        scattered = [torch.zeros(size, device=ctx.device) for size in (2, 3)]
        with dist._coalescing_manager(device=ctx.device, async_ops=True) as together:
            for out, size in zip(scattered, (2, 3), strict=True):
                dist.reduce_scatter_tensor(out, values(ctx, ctx.rank, n * size))
        together.wait()
        for size, whole, part in zip((2, 3), gathered, scattered, strict=True):
            same(whole, all_values(ctx, size).flatten())
            same(part, all_values(ctx, n * size).sum(0).chunk(n)[ctx.rank])


@sim.ranks(3)
def test_objects(ctx):
    n, rank = ctx.world_size, ctx.rank
    mine = {"rank": rank, "text": "x" * (rank + 1)}
    every = [{"rank": r, "text": "x" * (r + 1)} for r in range(n)]
    found: list = [None] * n
    dist.all_gather_object(found, mine)
    assert found == every
    sent = [mine, rank] if rank == 2 else [None, None]
    dist.broadcast_object_list(sent, 2)
    assert sent == [every[2], 2]
    into: list | None = [None] * n if rank == 1 else None
    dist.gather_object(mine, into, 1)
    assert into == (every if rank == 1 else None)
    one: list = [None]
    dist.scatter_object_list(one, every if rank == 0 else None, 0)
    assert one == [mine]


@sim.ranks(4)
def test_groups(ctx):
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[ctx.rank // 2]
    members = dist.get_process_group_ranks(mine)
    assert members == [ctx.rank // 2 * 2, ctx.rank // 2 * 2 + 1]
    x = values(ctx, ctx.rank, 3)
    dist.all_reduce(x, group=mine)
    same(x, sum(values(ctx, member, 3) for member in members))
    assert dist.get_rank(halves[1 - ctx.rank // 2]) == -1
    x = values(ctx, ctx.rank, 3)
    dist.broadcast(x, members[1], group=mine)
    same(x, values(ctx, members[1], 3))
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    for axis, others in (("dp", [ctx.rank % 2, ctx.rank % 2 + 2]), ("tp", members)):
        x = values(ctx, ctx.rank, 3)
        dist.all_reduce(x, group=mesh.get_group(axis))
        same(x, sum(values(ctx, member, 3) for member in others))
    mine, _ = dist.new_subgroups_by_enumeration([[3, 0], [1, 2]])
    x = values(ctx, ctx.rank, 2)
    dist.all_reduce(x, group=mine)
    same(x, values(ctx, ctx.rank, 2) + values(ctx, 3 - ctx.rank, 2))
    dist.destroy_process_group(mine)
    dist.barrier()


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@sim.ranks(2)
def test_functional(ctx):
    n, group = ctx.world_size, dist.group.WORLD
    x = values(ctx, ctx.rank, 2 * n, 3)
    whole = all_values(ctx, 2 * n, 3)
    same(funcol.all_reduce(x, "sum", group) + 0, whole.sum(0))
    same(x, values(ctx, ctx.rank, 2 * n, 3))
    same(funcol.all_gather_tensor(x, 0, group) + 0, whole.reshape(-1, 3))
    same(funcol.all_gather_tensor(x, 1, group) + 0, torch.cat(list(whole), dim=1))
    same(funcol.reduce_scatter_tensor(x, "sum", 0, group) + 0, whole.sum(0).chunk(n)[ctx.rank])
    same(funcol.broadcast(x, 1, group) + 0, whole[1])
    same(
        funcol.all_to_all_single(x, None, None, group) + 0,
        torch.cat([part.chunk(n)[ctx.rank] for part in whole]),
    )
    many = funcol.all_reduce_coalesced([x, x * 2], "sum", group)
    same(many[0] + 0, whole.sum(0))
    same(many[1] + 0, whole.sum(0) * 2)


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@sim.ranks(2)
def test_functional_autograd(ctx):
    n, group = ctx.world_size, dist.group.WORLD
    x = values(ctx, ctx.rank, 2, 3).requires_grad_()
    whole = funcol.all_gather_tensor_autograd(x, 0, group)
    weight = values(ctx, ctx.rank + 1, 2 * n, 3)
    (whole * weight).sum().backward()
    weights = torch.stack([values(ctx, rank + 1, 2 * n, 3) for rank in range(n)])
    same(x.grad, weights.sum(0).chunk(n)[ctx.rank])
    x = values(ctx, ctx.rank, 2 * n, 3).requires_grad_()
    part = funcol.reduce_scatter_tensor_autograd(x, "sum", 0, group)
    weight = values(ctx, ctx.rank + 1, 2, 3)
    (part * weight).sum().backward()
    same(x.grad, torch.cat([values(ctx, rank + 1, 2, 3) for rank in range(n)]))
    x = values(ctx, ctx.rank, 2 * n, 3).requires_grad_()
    out = funcol.all_to_all_single_autograd(x, [2] * n, [2] * n, group)
    (out * (ctx.rank + 1)).sum().backward()
    same(x.grad, torch.cat([torch.full((2, 3), rank + 1.0, device=ctx.device) for rank in range(n)]))
