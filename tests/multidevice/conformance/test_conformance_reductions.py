"""all_reduce, reduce and reduce_scatter: every reduce op, dtype and form, on every backend against one formula."""

import pytest
import torch
import torch.distributed as dist
from conformance_kit import HOST, NOT_GLOO, all_values, same, same_list, values, zeros
from torch.distributed import ReduceOp

import sim

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]
ALL = [*FLOATS, *INTEGERS, torch.int16, torch.complex64, torch.complex128]
BY_HAND = {
    ReduceOp.SUM: lambda x: x.sum(0),
    ReduceOp.PRODUCT: lambda x: x.prod(0),
    ReduceOp.MIN: lambda x: x.amin(0),
    ReduceOp.MAX: lambda x: x.amax(0),
}
BITWISE = {ReduceOp.BAND: torch.bitwise_and, ReduceOp.BOR: torch.bitwise_or, ReduceOp.BXOR: torch.bitwise_xor}


def folded(combine, stacked: torch.Tensor) -> torch.Tensor:
    total = stacked[0]
    for part in stacked[1:]:
        total = combine(total, part)
    return total


def is_taken(ctx, collective: str, dtype: torch.dtype, op: ReduceOp) -> bool:
    """Whether the backend reduces this, as its platform says; where it says no, the call has to raise.

    Where a device's backend looks, and what it leaves behind, is up to it, so it is not asked.
    """
    if ctx.reductions.takes(dtype, op.name, collective):
        return True
    if ctx.device_type == "cpu":
        x, out = torch.ones(2 * ctx.world_size, dtype=dtype), torch.ones(2, dtype=dtype)
        # In a group of its own: gloo raises before its worker thread takes the call off the group's list, and a barrier
        # over the same group, such as that at the end of a body, raises once more what it finds there.
        group = dist.new_group()
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            dist.all_reduce(x, op, group) if collective == "all_reduce" else dist.reduce_scatter_tensor(
                out, x, op, group
            )
    return False


def few(full: torch.Tensor) -> torch.Tensor:
    """Numbers of which three multiply to what fits into a byte."""
    return full if full.is_complex() else full.clamp(max=5)


@pytest.mark.tier("test")
@sim.ranks(3)
def test_all_reduce_of_every_dtype(ctx):
    for op, by_hand in BY_HAND.items():
        for dtype in ALL:
            if is_taken(ctx, "all_reduce", dtype, op):
                x = few(values(ctx, ctx.rank, 4, 3, dtype=dtype))
                dist.all_reduce(x, op)
                same(x, by_hand(few(all_values(ctx, 4, 3, dtype=dtype))).to(dtype))


@sim.ranks(3, backends=HOST)
def test_all_reduce_of_bits_and_truths(ctx):
    for op, combine in BITWISE.items():
        for dtype in [*INTEGERS, torch.bool]:
            assert ctx.reductions.takes(dtype, op.name)
            x = values(ctx, ctx.rank, 5, dtype=dtype)
            dist.all_reduce(x, op)
            same(x, folded(combine, all_values(ctx, 5, dtype=dtype)))
    for op, by_hand in ((ReduceOp.SUM, torch.any), (ReduceOp.MAX, torch.any), (ReduceOp.PRODUCT, torch.all)):
        x = values(ctx, ctx.rank, 5, dtype=torch.bool)
        dist.all_reduce(x, op)
        same(x, by_hand(all_values(ctx, 5, dtype=torch.bool), dim=0))


@pytest.mark.tier("test")
@sim.ranks(3)
def test_all_reduce_averages(ctx):
    for dtype in FLOATS:
        if is_taken(ctx, "all_reduce", dtype, ReduceOp.AVG):
            x = values(ctx, ctx.rank, 6, dtype=dtype)
            dist.all_reduce(x, ReduceOp.AVG)
            torch.testing.assert_close(x, all_values(ctx, 6, dtype=dtype).mean(0))
    for dtype in INTEGERS[1:]:  # NCCL truncates towards zero
        if is_taken(ctx, "all_reduce", dtype, ReduceOp.AVG):
            x = values(ctx, ctx.rank, 6, dtype=dtype) - 4
            dist.all_reduce(x, ReduceOp.AVG)
            total = (all_values(ctx, 6, dtype=dtype) - 4).sum(0, dtype=dtype)
            assert ((total < 0) & (total.fmod(ctx.world_size) != 0)).any(), total
            same(x, total.div(ctx.world_size, rounding_mode="trunc"))


@sim.ranks(3, backends=("sim", "gpu"))
def test_all_reduce_after_a_factor(ctx):
    """PREMUL_SUM is nccl's alone."""
    x = values(ctx, ctx.rank, 6)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    same(x, (all_values(ctx, 6) * 0.5).sum(0))
    x = values(ctx, ctx.rank, 6)
    dist.all_reduce(x, dist._make_nccl_premul_sum(torch.tensor([float(ctx.rank + 1)], device=ctx.device)))
    same(x, sum(values(ctx, rank, 6) * (rank + 1) for rank in range(ctx.world_size)))


@sim.ranks(3)
def test_all_reduce_of_every_shape(ctx):
    for shape in ((), (1,), (0,), (3, 0, 2), (100_003,)):
        x = values(ctx, ctx.rank, *shape)
        dist.all_reduce(x)
        same(x, all_values(ctx, *shape).sum(0))
    x = values(ctx, ctx.rank, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    dist.all_reduce(x)
    same(x, all_values(ctx, 2, 3, 4, 5).sum(0))
    if ctx.backend in HOST:  # nccl wants dim 0 to be the outermost
        x = values(ctx, ctx.rank, 4, 3).t()
        dist.all_reduce(x)
        same(x, all_values(ctx, 4, 3).sum(0).t())


@sim.ranks(3)
def test_all_reduce_of_rounded_numbers(ctx):
    """Each backend adds in an order of its own; all are within the error bound of a sum of n numbers."""
    n = ctx.world_size
    brought = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(n)]
    x = brought[ctx.rank].clone().to(ctx.device)
    dist.all_reduce(x)
    exact = torch.stack(brought).double().sum(0)
    bound = (n - 1) * torch.finfo(torch.float32).eps * torch.stack(brought).double().abs().sum(0)
    assert ((x.cpu().double() - exact).abs() <= bound).all()
    everywhere = [torch.zeros_like(x) for _ in range(n)]
    dist.all_gather(everywhere, x)
    same_list(everywhere, [x] * n)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@sim.ranks(3, backends=HOST)
def test_all_reduce_of_sparse_tensors(ctx):
    def brought(rank: int) -> torch.Tensor:
        return torch.sparse_coo_tensor(torch.tensor([[rank, 3]]), torch.tensor([1.0, rank + 2.0]), (5,))

    x = brought(ctx.rank)
    dist.all_reduce(x)
    assert x.is_sparse
    same(x.to_dense(), sum(brought(rank).to_dense() for rank in range(ctx.world_size)))
    with pytest.raises((ValueError, RuntimeError)):
        dist.all_reduce(brought(ctx.rank), ReduceOp.MAX)


@sim.ranks(3)
def test_reduce(ctx):
    for root in range(ctx.world_size):
        for op, by_hand in BY_HAND.items():
            x = values(ctx, ctx.rank, 3, 2)
            dist.reduce(x, root, op)
            if ctx.rank == root:
                same(x, by_hand(all_values(ctx, 3, 2)))
            elif ctx.backend == "sim":  # on real backends, anything may be there now
                same(x, values(ctx, ctx.rank, 3, 2))
    for shape in ((), (0,)):
        x = values(ctx, ctx.rank, *shape)
        dist.reduce(x, 0)
        if ctx.rank == 0:
            same(x, all_values(ctx, *shape).sum(0))


@pytest.mark.tier("test")
@sim.ranks(3)
def test_reduce_scatter(ctx):
    n = ctx.world_size
    for op, by_hand in BY_HAND.items():
        for dtype in FLOATS:
            if not is_taken(ctx, "reduce_scatter", dtype, op):
                continue
            wanted = by_hand(few(all_values(ctx, 2 * n, 3, dtype=dtype))).to(dtype).chunk(n)[ctx.rank]
            x, out = few(values(ctx, ctx.rank, 2 * n, 3, dtype=dtype)), zeros(ctx, 2, 3, dtype=dtype)
            dist.reduce_scatter_tensor(out, x, op)
            same(out, wanted)
            same(x, few(values(ctx, ctx.rank, 2 * n, 3, dtype=dtype)))
            out = zeros(ctx, 2, 3, dtype=dtype)
            dist.reduce_scatter(out, list(x.chunk(n)), op)
            same(out, wanted)
    out = zeros(ctx, 2)
    dist.reduce_scatter_tensor(out, values(ctx, ctx.rank, 2 * n), ReduceOp.AVG)
    torch.testing.assert_close(out, all_values(ctx, 2 * n).mean(0).chunk(n)[ctx.rank])
    dist.reduce_scatter_tensor(zeros(ctx, 0, 2), zeros(ctx, 0, 2))
    out = zeros(ctx)
    dist.reduce_scatter(out, [values(ctx, ctx.rank) for _ in range(n)])
    same(out, all_values(ctx).sum(0))
    if hasattr(dist, "reduce_scatter_single"):  # the newer name
        out = zeros(ctx, 2)
        dist.reduce_scatter_single(out, values(ctx, ctx.rank, 2 * n))
        same(out, all_values(ctx, 2 * n).sum(0).chunk(n)[ctx.rank])


@sim.ranks(3, backends=NOT_GLOO)
def test_reduce_scatter_of_uneven_parts(ctx):
    n = ctx.world_size
    out = zeros(ctx, ctx.rank + 1)
    dist.reduce_scatter(out, [values(ctx, ctx.rank, rank + 1) for rank in range(n)], ReduceOp.MAX)
    same(out, all_values(ctx, ctx.rank + 1).amax(0))
    stacked, out = values(ctx, ctx.rank, n, 2, 3), zeros(ctx, 2, 3)  # gloo wants the parts end to end
    dist.reduce_scatter_tensor(out, stacked)
    same(out, all_values(ctx, n, 2, 3).sum(0)[ctx.rank])


@sim.ranks(3, backends=("sim", "gpu"))
def test_reduce_scatter_into_the_own_part_of_the_input(ctx):
    """As FSDP has it."""
    n = ctx.world_size
    x = values(ctx, ctx.rank, 2 * n, 3)
    dist.reduce_scatter_tensor(x.chunk(n)[ctx.rank], x)
    same(x.chunk(n)[ctx.rank], all_values(ctx, 2 * n, 3).sum(0).chunk(n)[ctx.rank])


@sim.ranks(3)
def test_under_the_older_names(ctx):
    n, group = ctx.world_size, dist.group.WORLD
    options = dist.ReduceScatterOptions()
    options.reduceOp = ReduceOp.MAX
    out = zeros(ctx, 2)
    group._reduce_scatter_base(out, values(ctx, ctx.rank, 2 * n), options).wait()
    same(out, all_values(ctx, 2 * n).amax(0).chunk(n)[ctx.rank])
    group._allgather_base(full := zeros(ctx, 2 * n), values(ctx, ctx.rank, 2)).wait()
    same(full, all_values(ctx, 2).flatten())
    group.alltoall_base(out := zeros(ctx, n), values(ctx, ctx.rank, n), [], []).wait()
    same(out, all_values(ctx, n)[:, ctx.rank])
    group.allgather_into_tensor_coalesced([full := zeros(ctx, 2 * n)], [values(ctx, ctx.rank, 2)]).wait()
    same(full, all_values(ctx, 2).flatten())
    group.reduce_scatter_tensor_coalesced([out := zeros(ctx, 2)], [values(ctx, ctx.rank, 2 * n)]).wait()
    same(out, all_values(ctx, 2 * n).sum(0).chunk(n)[ctx.rank])
