"""broadcast, scatter, gather, all_gather and all_to_all: every form, dtype and shape, on every backend."""

import pytest
import torch
import torch.distributed as dist
from conformance_kit import HOST, NOT_GLOO, all_values, same, same_list, values, zero_list, zeros

import sim

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

EVERYWHERE = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
NARROW = [torch.int16, torch.float8_e4m3fn, torch.float8_e5m2]  # gloo has none of them


def dtypes(ctx) -> list[torch.dtype]:
    return EVERYWHERE if ctx.backend != "sim" else [*EVERYWHERE, *NARROW]


def moves_of(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> dict:
    """One call of each kind, in a group of its own: gloo raises once more for what it finds in a group's list."""
    full, of_root = torch.cat([x, x]), [[x, x]] if ctx.rank == 0 else []
    return {
        "broadcast": lambda: group.broadcast([x], dist.BroadcastOptions()),
        "scatter": lambda: group.scatter([x], of_root, dist.ScatterOptions()),
        "gather": lambda: group.gather(of_root, [x], dist.GatherOptions()),
        "all_gather": lambda: group.allgather([[x, x]], [x]),
        "all_to_all": lambda: group.alltoall_base(full.clone(), full, [], []),
    }


@sim.ranks(2, backends=HOST)
def test_every_dtype_is_moved_or_refused_as_the_platform_says(ctx):
    """At the process group itself, as `torch.distributed` sends complex numbers as pairs in some collectives only."""
    for dtype in [*EVERYWHERE, *NARROW, torch.uint16, torch.uint32, torch.uint64, torch.complex32]:
        calls = moves_of(ctx, torch.ones(2).to(dtype), dist.new_group())
        for name, call in calls.items():
            if ctx.reductions.moves(dtype, name):
                call().wait()
            else:
                with pytest.raises((TypeError, RuntimeError), match=r"Invalid scalar type|gloo does not move"):
                    call().wait()


@sim.ranks(3)
def test_broadcast(ctx):
    for root in range(ctx.world_size):
        for dtype in dtypes(ctx):
            x = values(ctx, ctx.rank, 3, 2, dtype=dtype)
            dist.broadcast(x, root)
            same(x, values(ctx, root, 3, 2, dtype=dtype))
    for shape in ((), (0,), (2, 0)):
        x = values(ctx, ctx.rank, *shape)
        dist.broadcast(x, group_src=1)
        same(x, values(ctx, 1, *shape))
    if ctx.backend in HOST:
        x = values(ctx, ctx.rank, 4, 3).t()
        dist.broadcast(x, 1)
        same(x, values(ctx, 1, 4, 3).t())


@sim.ranks(3)
def test_scatter(ctx):
    n, rank, root = ctx.world_size, ctx.rank, 1
    for dtype in dtypes(ctx):
        out = zeros(ctx, 2, 3, dtype=dtype)
        dist.scatter(out, [values(ctx, to, 2, 3, dtype=dtype) for to in range(n)] if rank == root else None, root)
        same(out, values(ctx, rank, 2, 3, dtype=dtype))
    for shape in ((), (0,)):
        out = zeros(ctx, *shape)
        dist.scatter(out, [values(ctx, to, *shape) for to in range(n)] if rank == root else None, root)
        same(out, values(ctx, rank, *shape))
    if ctx.backend == "sim":  # gloo moves the memory as it lies, so that the elements come out in another order
        out = zeros(ctx, 2, 3)
        dist.scatter(out, [values(ctx, to, 3, 2).t() for to in range(n)] if rank == root else None, root)
        same(out, values(ctx, rank, 3, 2).t())


@sim.ranks(3)
def test_gather(ctx):
    n, rank, root = ctx.world_size, ctx.rank, 2
    for dtype in dtypes(ctx):
        if ctx.backend == "gloo" and dtype.is_complex:  # not among what gloo gathers
            continue
        into = zero_list(ctx, 2, 3, dtype=dtype) if rank == root else None
        dist.gather(values(ctx, rank, 2, 3, dtype=dtype), into, root)
        if into is not None:
            same_list(into, all_values(ctx, 2, 3, dtype=dtype))
    for shape in ((), (0,)):
        into = zero_list(ctx, *shape) if rank == root else None
        dist.gather(values(ctx, rank, *shape), into, root)
        if into is not None:
            same_list(into, all_values(ctx, *shape))
    if ctx.backend in HOST:
        into = [zeros(ctx, 2, 3) for _ in range(n)] if rank == root else None
        dist.gather(values(ctx, rank, 3, 2).t(), into, root)
        if into is not None:
            same_list(into, [part.t() for part in all_values(ctx, 3, 2)])


@sim.ranks(3, backends=("sim",))
def test_gather_into_a_tensor(ctx):
    """Not on the real backends of all torch versions that are supported."""
    n, group, options = ctx.world_size, dist.group.WORLD, dist.GatherOptions()
    options.rootRank = 1
    for gather in (group.gather_single, group.gather_into_tensor):
        full = zeros(ctx, 2 * n, 3)
        gather(full, values(ctx, ctx.rank, 2, 3), options).wait()
        same(full, all_values(ctx, 2, 3).reshape(-1, 3) if ctx.rank == 1 else zeros(ctx, 2 * n, 3))
    for name in ("gather_single", "gather_into_tensor"):
        if hasattr(dist, name):
            full = zeros(ctx, 2 * n, 3) if ctx.rank == 1 else None
            getattr(dist, name)(values(ctx, ctx.rank, 2, 3), full, 1)
            if full is not None:
                same(full, all_values(ctx, 2, 3).reshape(-1, 3))


@pytest.mark.tier("test")
@sim.ranks(3)
def test_all_gather_into_a_list(ctx):
    for dtype in dtypes(ctx):
        parts = zero_list(ctx, 2, 3, dtype=dtype)
        dist.all_gather(parts, values(ctx, ctx.rank, 2, 3, dtype=dtype))
        same_list(parts, all_values(ctx, 2, 3, dtype=dtype))
    for shape in ((), (0,), (3, 0)):
        parts = zero_list(ctx, *shape)
        dist.all_gather(parts, values(ctx, ctx.rank, *shape))
        same_list(parts, all_values(ctx, *shape))
    if ctx.backend in HOST:
        parts = [zeros(ctx, 3, 2).t() for _ in range(ctx.world_size)]
        dist.all_gather(parts, values(ctx, ctx.rank, 3, 2).t())
        same_list(parts, [part.t() for part in all_values(ctx, 3, 2)])


@sim.ranks(3, backends=NOT_GLOO)
def test_all_gather_of_uneven_parts(ctx):
    """gloo wants parts of one size, and them end to end."""
    n = ctx.world_size
    parts = [zeros(ctx, rank + 1) for rank in range(n)]
    dist.all_gather(parts, values(ctx, ctx.rank, ctx.rank + 1))
    same_list(parts, [values(ctx, rank, rank + 1) for rank in range(n)])
    stacked = zeros(ctx, n, 2, 3)
    dist.all_gather_into_tensor(stacked, values(ctx, ctx.rank, 2, 3))
    same(stacked, all_values(ctx, 2, 3))
    flat = zeros(ctx, n)
    dist.all_gather_into_tensor(flat, values(ctx, ctx.rank))
    same(flat, all_values(ctx))


@sim.ranks(3)
def test_all_gather_into_a_tensor(ctx):
    n = ctx.world_size
    for dtype in dtypes(ctx):
        full = zeros(ctx, 2 * n, 3, dtype=dtype)
        dist.all_gather_into_tensor(full, values(ctx, ctx.rank, 2, 3, dtype=dtype))
        same(full, all_values(ctx, 2, 3, dtype=dtype).reshape(2 * n, 3))
    dist.all_gather_into_tensor(zeros(ctx, 0, 2), zeros(ctx, 0, 2))
    if ctx.backend in HOST:
        full = zeros(ctx, 2 * n, 3)
        dist.all_gather_into_tensor(full, values(ctx, ctx.rank, 3, 2).t())
        same(full, torch.cat([part.t() for part in all_values(ctx, 3, 2)]))
    if hasattr(dist, "all_gather_single"):  # the newer name
        full = zeros(ctx, 2 * n)
        dist.all_gather_single(full, values(ctx, ctx.rank, 2))
        same(full, all_values(ctx, 2).flatten())


@sim.ranks(3)
def test_all_to_all_evenly(ctx):
    n, rank = ctx.world_size, ctx.rank
    for dtype in dtypes(ctx):
        x = values(ctx, rank, 2 * n, 2, dtype=dtype)
        wanted = [values(ctx, source, 2 * n, 2, dtype=dtype).chunk(n)[rank] for source in range(n)]
        out = torch.zeros_like(x)
        dist.all_to_all_single(out, x)
        same(out, torch.cat(wanted))
        into = zero_list(ctx, 2, 2, dtype=dtype)
        if ctx.backend == "gloo" and torch.__version__ < "2.13":  # which then had no lists
            continue
        dist.all_to_all(into, list(x.chunk(n)))
        same_list(into, wanted)


@sim.ranks(3)
def test_all_to_all_unevenly(ctx):
    """By three tables of how many rows go from which rank to which: all different, mostly none, and none at all."""
    n, rank = ctx.world_size, ctx.rank
    for table in ([[1, 2, 3], [4, 0, 1], [2, 2, 5]], [[0, 1, 2], [3, 0, 0], [0, 0, 1]], [[0] * 3] * 3):
        send, receive = table[rank], [row[rank] for row in table]
        x, out = values(ctx, rank, sum(send), 2), zeros(ctx, sum(receive), 2)
        wanted = [values(ctx, s, sum(table[s]), 2).split(table[s])[rank] for s in range(n)]
        dist.all_to_all_single(out, x, receive, send)
        same(out, torch.cat(wanted))
        if ctx.backend != "gloo":  # its lists have parts of one size
            into = [zeros(ctx, count, 2) for count in receive]
            dist.all_to_all(into, list(x.split(send)))
            same_list(into, wanted)
    dist.all_to_all_single(zeros(ctx, 0, 2), zeros(ctx, 0, 2))
