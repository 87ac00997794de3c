"""Mistakes that every rank makes and that fail before anything moves: refused on every backend that notices.

The simulator's own messages are tested in `tests/unit`; here it is that it raises where a real backend does, and
what it raises: a ValueError, TypeError or RuntimeError.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from conformance_kit import HOST, same, values, zero_list, zeros

import sim

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

REFUSALS = (ValueError, TypeError, RuntimeError)


def mistakes(ctx) -> dict:
    n, rank = ctx.world_size, ctx.rank
    after, x, full = (rank + 1) % n, values(ctx, rank, 2), values(ctx, rank, 2 * n)
    other = dist.new_group(list(range(n)))
    return {
        # lists of the wrong length
        "all_gather: short list": lambda: dist.all_gather(zero_list(ctx, 2)[1:], x),
        "reduce_scatter: short list": lambda: dist.reduce_scatter(zeros(ctx, 2), [x] * (n - 1)),
        "all_to_all: short lists": lambda: dist.all_to_all(zero_list(ctx, 2)[1:], [x] * (n - 1)),
        "gather: short list": lambda: dist.gather(x, zero_list(ctx, 2)[1:], rank),
        "scatter: short list": lambda: dist.scatter(zeros(ctx, 2), [x] * (n - 1), rank),
        # sizes
        "all_gather: larger outputs": lambda: dist.all_gather(zero_list(ctx, 3), x),
        "all_gather_into_tensor: size": lambda: dist.all_gather_into_tensor(zeros(ctx, 2 * n - 1), x),
        "reduce_scatter_tensor: size": lambda: dist.reduce_scatter_tensor(zeros(ctx, 2), values(ctx, rank, 2 * n + 1)),
        "reduce_scatter: larger inputs": lambda: dist.reduce_scatter(zeros(ctx, 2), [values(ctx, rank, 3)] * n),
        "gather: larger outputs": lambda: dist.gather(x, zero_list(ctx, 3), rank),
        "scatter: larger inputs": lambda: dist.scatter(zeros(ctx, 2), [values(ctx, rank, 3)] * n, rank),
        "all_to_all_single: not divisible": lambda: dist.all_to_all_single(zeros(ctx, n + 1), values(ctx, rank, n + 1)),
        "all_to_all_single: of a scalar": lambda: dist.all_to_all_single(zeros(ctx), values(ctx, rank)),
        "all_to_all_single: too few splits": lambda: dist.all_to_all_single(
            zeros(ctx, n), values(ctx, rank, n), [1] * n, [1, n - 1]
        ),
        "all_to_all_single: splits that add up to more": lambda: dist.all_to_all_single(
            zeros(ctx, n), values(ctx, rank, n), [1] * n, [1] * (n - 1) + [2]
        ),
        "funcol.all_to_all_single: too few splits": lambda: funcol.wait_tensor(
            funcol.all_to_all_single(values(ctx, rank, n), [1] * n, [1, n - 1], dist.group.WORLD)
        ),
        "all_gather_coalesced: short list": lambda: dist.all_gather_coalesced([[zeros(ctx, 2)]] * (n - 1), [x]),
        "all_gather_coalesced: size": lambda: dist.all_gather_coalesced([[zeros(ctx, 3)]] * n, [x]),
        # dtypes
        "all_gather: dtype": lambda: dist.all_gather(zero_list(ctx, 2, dtype=torch.int64), x),
        "all_gather_into_tensor: dtype": lambda: dist.all_gather_into_tensor(zeros(ctx, 2 * n, dtype=torch.int64), x),
        "reduce_scatter: dtype": lambda: dist.reduce_scatter(zeros(ctx, 2, dtype=torch.int64), [x] * n),
        "reduce_scatter_tensor: dtype": lambda: dist.reduce_scatter_tensor(zeros(ctx, 2, dtype=torch.int64), full),
        "gather: dtype": lambda: dist.gather(x, zero_list(ctx, 2, dtype=torch.int64), rank),
        "scatter: dtype": lambda: dist.scatter(zeros(ctx, 2, dtype=torch.int64), [x] * n, rank),
        "all_to_all_single: dtype": lambda: dist.all_to_all_single(zeros(ctx, 2 * n, dtype=torch.int64), full),
        "all_to_all: mixed dtypes": lambda: dist.all_to_all(zero_list(ctx, 2), [x] * (n - 1) + [x.double()]),
        "all_reduce_coalesced: mixed dtypes": lambda: dist.all_reduce_coalesced([x, x.double()]),
        "all_reduce: complex MAX": lambda: dist.all_reduce(x.to(torch.complex64), dist.ReduceOp.MAX),
        # roots and peers
        "broadcast: no such rank": lambda: dist.broadcast(x, n + 4),
        "broadcast: no such rank of the group": lambda: dist.broadcast(x, group_src=n + 4),
        "reduce: no such rank": lambda: dist.reduce(x, n + 4),
        "gather: no such rank": lambda: dist.gather(x, None, n + 4),
        "broadcast_object_list: no such rank": lambda: dist.broadcast_object_list([1], n + 4),
        "broadcast: two roots": lambda: dist.broadcast(x, 1, group_src=1),
        "broadcast: no root": lambda: dist.broadcast(x),
        "send: to oneself": lambda: dist.send(x, rank),
        "gather: no list at the root": lambda: dist.gather(x, None, rank),
        "gather: a list elsewhere": lambda: dist.gather(x, zero_list(ctx, 2), after),
        "scatter: no list at the root": lambda: dist.scatter(zeros(ctx, 2), None, rank),
        "scatter: a list elsewhere": lambda: dist.scatter(zeros(ctx, 2), [x] * n, after),
        "gather_object: no list at the root": lambda: dist.gather_object(1, None, rank),
        "scatter_object_list: nowhere to put it": lambda: dist.scatter_object_list([], [1] * n, 0),
        # what is no tensor, reduce op, group or operation
        "all_reduce: a list": lambda: dist.all_reduce([1, 2]),
        "all_reduce: a name": lambda: dist.all_reduce(x, "sum"),
        "funcol.all_reduce: an unknown name": lambda: funcol.all_reduce(x, "total", dist.group.WORLD),
        "broadcast: a list": lambda: dist.broadcast([x], 0),
        "isend: a list": lambda: dist.isend([x], after),
        "P2POp: a collective": lambda: dist.P2POp(dist.all_reduce, x, after),
        "batch_isend_irecv: a number": lambda: dist.batch_isend_irecv([1]),
        # groups
        "new_group: no such rank": lambda: dist.new_group([0, n + 4]),
        "new_group: too many ranks": lambda: dist.new_group(list(range(n + 1))),
        "new_subgroups: not divisible": lambda: dist.new_subgroups(n - 1),
        "new_subgroups: overlapping": lambda: dist.new_subgroups_by_enumeration([[0, 1], [1, 2]]),
        "get_rank: of no group": lambda: dist.get_rank("default"),
        "init_device_mesh: too large": lambda: dist.init_device_mesh(ctx.device_type, (n + 2,)),
        "shrink_group": lambda: dist.shrink_group([n - 1], group=other),
    }


@sim.ranks(3, backends=HOST)
def test_mistakes_that_are_refused(ctx):
    """Where nccl and hccl look is up to them; a call that they let pass would hang, so they have no part in it."""
    for name, call in mistakes(ctx).items():
        # torch 2.15 looks for dim 0 of a scalar on its way to gloo
        kinds = (*REFUSALS, IndexError) if ctx.backend == "gloo" and "scalar" in name else REFUSALS
        with pytest.raises(kinds) as refused:
            call()
        assert str(refused.value), name
    total = values(ctx, ctx.rank, 2)
    dist.all_reduce(total)  # and nobody has got out of step
    same(total, sum(values(ctx, rank, 2) for rank in range(ctx.world_size)))


@sim.ranks(2, backends=("sim",))
def test_tensors_with_gaps(ctx):
    """nccl refuses them; gloo writes into the elements between."""
    x = values(ctx, ctx.rank, 4, 4)
    column, stretched = x[:, 1:3], x[:1].expand(3, 4)
    other = 1 - ctx.rank
    calls = {
        "all_reduce": lambda: dist.all_reduce(column),
        "reduce": lambda: dist.reduce(column, 0),
        "broadcast": lambda: dist.broadcast(stretched, 0),
        "send": lambda: dist.send(column, other),
        "recv": lambda: dist.recv(column, other),
    }
    for op, call in calls.items():
        with pytest.raises(ValueError, match=f"{op}: a tensor of shape .* does not fill its memory without gaps"):
            call()
    with pytest.raises(ValueError, match="recv: a tensor of shape"):
        dist.recv(column)
    same(x, values(ctx, ctx.rank, 4, 4))
    dist.all_reduce(x[1:3])  # whole rows lie side by side
    dist.all_reduce(x.t())
