"""Functional collectives (what DTensor and torch.compile use) and torch.distributed.nn: values and gradients."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dnn
from conformance_kit import HOST, all_values, next_and_previous, same, same_list, values, zero_list, zeros
from torch.distributed.device_mesh import init_device_mesh

import sim

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*deprecated:FutureWarning", "ignore:.*not differentiable.*", "ignore:.*autograd kernel was not registered"
)


def done(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor, once the operation is over."""
    return funcol.wait_tensor(tensor) + 0


@sim.ranks(3)
def test_values(ctx):
    n, rank, group = ctx.world_size, ctx.rank, dist.group.WORLD
    x, whole = values(ctx, rank, 2 * n, 3), all_values(ctx, 2 * n, 3)
    for op, wanted in (("sum", whole.sum(0)), ("max", whole.amax(0)), ("min", whole.amin(0))):
        same(done(funcol.all_reduce(x, op, group)), wanted)
        same(done(funcol.reduce_scatter_tensor(x, op, 0, group)), wanted.chunk(n)[rank])
    torch.testing.assert_close(done(funcol.all_reduce(x, "avg", group)), whole.mean(0))
    same(done(funcol.all_gather_tensor(x, 0, group)), whole.reshape(-1, 3))
    same(done(funcol.all_gather_tensor(x, 1, group)), torch.cat(list(whole), dim=1))
    square = values(ctx, rank, 2, n)
    same(done(funcol.reduce_scatter_tensor(square, "sum", 1, group)), all_values(ctx, 2, n).sum(0).chunk(n, 1)[rank])
    same(done(funcol.broadcast(x, 1, group)), whole[1])
    same(done(funcol.all_to_all_single(x, None, None, group)), torch.cat([part.chunk(n)[rank] for part in whole]))
    same(x, values(ctx, rank, 2 * n, 3))
    table = [[1, 0, 2], [3, 1, 0], [0, 0, 4]]  # rows from which rank to which
    send, receive = table[rank], [row[rank] for row in table]
    found = funcol.all_to_all_single(values(ctx, rank, sum(send), 2), receive, send, group)
    pieces = [values(ctx, s, sum(table[s]), 2).split(table[s])[rank] for s in range(n)]
    same(done(found), torch.cat(pieces))
    _, before = next_and_previous(ctx)
    same(done(funcol.permute_tensor(values(ctx, rank, 4), [1, 2, 0], group)), values(ctx, before, 4))


@sim.ranks(2)
def test_coalesced(ctx):
    n, rank, group = ctx.world_size, ctx.rank, dist.group.WORLD
    x, whole = values(ctx, rank, 2 * n, 3), all_values(ctx, 2 * n, 3)
    found = funcol.all_reduce_coalesced([x, x * 2], "sum", group)
    same_list([done(t) for t in found], [whole.sum(0), whole.sum(0) * 2])
    found = funcol.all_gather_into_tensor_coalesced([x, values(ctx, rank, 1)], group)
    same_list([done(t) for t in found], [whole.reshape(-1, 3), all_values(ctx, 1).flatten()])
    found = funcol.reduce_scatter_tensor_coalesced([x, values(ctx, rank, 3, n)], "sum", [0, 1], group)
    same_list(
        [done(t) for t in found], [whole.sum(0).chunk(n)[rank], all_values(ctx, 3, n).sum(0).chunk(n, dim=1)[rank]]
    )


@sim.ranks(2)
def test_under_the_newer_names(ctx):
    if not hasattr(funcol, "all_gather_single"):
        pytest.skip("this torch does not have them yet")
    n, rank, group = ctx.world_size, ctx.rank, dist.group.WORLD
    x, whole = values(ctx, rank, 2 * n, 3), all_values(ctx, 2 * n, 3)
    same(done(funcol.all_gather_single(x, 1, group)), torch.cat(list(whole), dim=1))
    same(done(funcol.reduce_scatter_single(x, "max", 0, group)), whole.amax(0).chunk(n)[rank])
    same(done(funcol.all_gather_single_coalesced([x], group)[0]), whole.reshape(-1, 3))
    same(done(funcol.reduce_scatter_single_coalesced([x], "sum", [0], group)[0]), whole.sum(0).chunk(n)[rank])
    x.requires_grad_()
    (funcol.all_gather_single_autograd(x, 0, group) * (rank + 1)).sum().backward()
    same(x.grad, torch.full_like(x, sum(r + 1.0 for r in range(n))).detach())
    x.grad = None
    (funcol.reduce_scatter_single_autograd(x, "sum", 0, group) * (rank + 1)).sum().backward()
    same(x.grad, torch.cat([torch.full((2, 3), r + 1.0, device=ctx.device) for r in range(n)]))


@sim.ranks(4)
def test_over_an_axis_of_a_mesh(ctx):
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    x = values(ctx, ctx.rank, 3)
    column = [ctx.rank % 2, ctx.rank % 2 + 2]
    same(done(funcol.all_reduce(x, "sum", mesh["dp"])), all_values(ctx, 3, group=column).sum(0))
    row = [ctx.rank // 2 * 2, ctx.rank // 2 * 2 + 1]
    same(done(funcol.all_gather_tensor(x, 0, (mesh, 1))), all_values(ctx, 3, group=row).flatten())


@sim.ranks(2)
def test_in_place(ctx):
    """What torch.compile puts in the place of the usual calls."""
    n, rank = ctx.world_size, ctx.rank
    x, whole = values(ctx, rank, 2), zeros(ctx, 2 * n)
    funcol.all_gather_tensor_inplace(whole, x)
    same(whole, all_values(ctx, 2).flatten())
    part = zeros(ctx, 2)
    funcol.reduce_scatter_tensor_inplace(part, values(ctx, rank, 2 * n))
    same(part, all_values(ctx, 2 * n).sum(0).chunk(n)[rank])
    if hasattr(funcol, "reduce_scatter_inplace"):
        funcol.reduce_scatter_inplace(part := zeros(ctx, 2), list(values(ctx, rank, 2 * n).chunk(n)))
        same(part, all_values(ctx, 2 * n).sum(0).chunk(n)[rank])
    y = values(ctx, rank, 3)
    funcol.all_reduce_inplace(y)
    same(y, all_values(ctx, 3).sum(0))
    out = zeros(ctx, n)
    funcol.all_to_all_inplace(out, values(ctx, rank, n))
    same(out, all_values(ctx, n)[:, rank])
    parts = zero_list(ctx, 2)
    funcol.all_gather_inplace(parts, x)
    same_list(parts, all_values(ctx, 2))


@sim.ranks(2, arms=("sim",))
def test_messages(ctx):
    """On gloo, waiting for what has been sent does not end."""
    if not hasattr(funcol, "isend_inplace"):
        pytest.skip("this torch does not have them yet")
    other, x = 1 - ctx.rank, values(ctx, ctx.rank, 3)
    works = [funcol.isend_inplace(x, other), funcol.irecv_inplace(found := zeros(ctx, 3), other), x]
    for work in works:
        funcol.wait_tensor(work)
    same(found, values(ctx, other, 3))
    again = zeros(ctx, 3)
    works = funcol.batch_p2p_ops_inplace(["isend", "irecv"], [other] * 2, [0, 0], [x, again], dist.group.WORLD)
    for work in [*works, x]:
        funcol.wait_tensor(work)
    same(again, values(ctx, other, 3))


@sim.ranks(2)
def test_gradients(ctx):
    n, rank, group = ctx.world_size, ctx.rank, dist.group.WORLD
    x = values(ctx, rank, 2, 3).requires_grad_()
    (funcol.all_gather_tensor_autograd(x, 0, group) * values(ctx, rank + 1, 2 * n, 3)).sum().backward()
    weights = torch.stack([values(ctx, r + 1, 2 * n, 3) for r in range(n)])
    same(x.grad, weights.sum(0).chunk(n)[rank])
    x = values(ctx, rank, 2 * n, 3).requires_grad_()
    (funcol.reduce_scatter_tensor_autograd(x, "sum", 0, group) * values(ctx, rank + 1, 2, 3)).sum().backward()
    same(x.grad, torch.cat([values(ctx, r + 1, 2, 3) for r in range(n)]))
    x = values(ctx, rank, 2 * n, 3).requires_grad_()
    (funcol.all_to_all_single_autograd(x, [2] * n, [2] * n, group) * (rank + 1)).sum().backward()
    same(x.grad, torch.cat([torch.full((2, 3), r + 1.0, device=ctx.device) for r in range(n)]))
    if torch.__version__ < "2.13":  # all_reduce then had no gradient
        return
    x = values(ctx, rank, 3).requires_grad_()
    (funcol.all_reduce(x, "sum", group) * (rank + 1)).sum().backward()
    same(x.grad, torch.full((3,), sum(r + 1.0 for r in range(n)), device=ctx.device))


def gradient(ctx, result, x: torch.Tensor) -> torch.Tensor:
    """The gradient of ``x`` where rank r weights what it got by r + 1."""
    x.grad = None
    whole = torch.stack(list(result)) if isinstance(result, (tuple, list)) else result
    (whole * (ctx.rank + 1)).sum().backward()
    assert x.grad is not None
    return x.grad


@sim.ranks(3)
def test_differentiable_collectives(ctx):
    n, rank = ctx.world_size, ctx.rank
    weight = sum(range(1, n + 1))  # over all ranks
    x = values(ctx, rank, 3, 2).requires_grad_()
    ones = torch.ones_like(x).detach()
    y = dnn.all_reduce(x)
    same(y.detach(), all_values(ctx, 3, 2).sum(0))
    same(gradient(ctx, y, x), ones * weight)
    y = dnn.broadcast(x, 1)
    same(y.detach(), values(ctx, 1, 3, 2))
    same(gradient(ctx, y, x), ones * (weight if rank == 1 else 0))
    y = dnn.reduce(x, 1)
    if rank == 1:
        same(y.detach(), all_values(ctx, 3, 2).sum(0))
    same(gradient(ctx, y, x), ones * 2)
    y = dnn.gather(x, 1)
    if rank == 1:
        same_list([part.detach() for part in y], all_values(ctx, 3, 2))
    same(gradient(ctx, y, x), ones * 2)
    y = dnn.scatter([x * (to + 1) for to in range(n)], 1)
    same(y.detach(), values(ctx, 1, 3, 2) * (rank + 1))
    same(gradient(ctx, y, x), ones * (sum((to + 1) ** 2 for to in range(n)) if rank == 1 else 0))
    y = dnn.all_gather(x)
    same_list([part.detach() for part in y], all_values(ctx, 3, 2))
    same(gradient(ctx, y, x), ones * weight)
    y = dnn.reduce_scatter(zeros(ctx, 3, 2), [x * (to + 1) for to in range(n)])
    same(y.detach(), all_values(ctx, 3, 2).sum(0) * (rank + 1))
    same(gradient(ctx, y, x), ones * sum((to + 1) ** 2 for to in range(n)))
    y = dnn.all_to_all(zero_list(ctx, 3, 2), [x * (to + 1) for to in range(n)])
    same_list([part.detach() for part in y], all_values(ctx, 3, 2) * (rank + 1))
    same(gradient(ctx, y, x), ones * sum((to + 1) ** 2 for to in range(n)))
    y = dnn.all_to_all_single(zeros(ctx, 3, 2), x)
    same(y.detach(), all_values(ctx, 3, 2)[:, rank])
    same(gradient(ctx, y, x), ones * torch.arange(1.0, n + 1, device=ctx.device)[:, None])


@sim.ranks(2, arms=HOST)
def test_an_unwaited_result_waits_when_it_is_used(ctx):
    x = values(ctx, ctx.rank, 3)
    y = funcol.all_reduce(x, "sum", dist.group.WORLD)
    assert isinstance(y, funcol.AsyncCollectiveTensor)
    same((y * 2).relu(), all_values(ctx, 3).sum(0) * 2)
