"""Functional collectives (what DTensor and torch.compile use) and torch.distributed.nn: values and gradients."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dnn
from conformance_kit import HOST, all_values, next_and_previous, same, same_list, values, zero_list, zeros
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import sim

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*deprecated:FutureWarning", "ignore:.*not differentiable.*", "ignore:.*autograd kernel was not registered"
)


def done(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor, once the operation is over."""
    return funcol.wait_tensor(tensor) + 0


@pytest.mark.tier("test")
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


@pytest.mark.tier("test")
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


@pytest.mark.tier("test")
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


@sim.ranks(2, backends=("sim",))
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
    """The gradient of `x` where rank r weights what it got by r + 1."""
    x.grad = None
    whole = torch.stack(list(result)) if isinstance(result, (tuple, list)) else result
    (whole * (ctx.rank + 1)).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.tier("test")
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


@sim.ranks(2, backends=HOST)
def test_an_unwaited_result_waits_when_it_is_used(ctx):
    x = values(ctx, ctx.rank, 3)
    y = funcol.all_reduce(x, "sum", dist.group.WORLD)
    assert isinstance(y, funcol.AsyncCollectiveTensor)
    same((y * 2).relu(), all_values(ctx, 3).sum(0) * 2)


class Given:
    """What a rank brings along to an operator, and what all ranks together do."""

    def __init__(self, ctx) -> None:
        self.ctx, self.n, self.rank = ctx, ctx.world_size, ctx.rank
        self.group, self.name = dist.group.WORLD, dist.group.WORLD.group_name
        self.to, self.source = next_and_previous(ctx)
        self.x, self.whole = values(ctx, self.rank, 2 * self.n, 3), all_values(ctx, 2 * self.n, 3)
        self.total, self.gathered = self.whole.sum(0), self.whole.reshape(-1, 3)
        self.own = self.total.chunk(self.n)[self.rank]  # of a reduce_scatter
        self.parts = torch.cat([part.chunk(self.n)[self.rank] for part in self.whole])  # by an all_to_all

    def room(self, rows: int) -> torch.Tensor:
        return zeros(self.ctx, rows, 3)

    def rooms(self) -> list[torch.Tensor]:
        return zero_list(self.ctx, 2 * self.n, 3)


def exchanged(g, sent: torch.Tensor, received: torch.Tensor):
    if g.ctx.backend == "sim":  # on gloo, waiting for what has been sent does not end
        native.wait_tensor(sent)
    return [received], [g.whole[g.source]]


# By operator of the namespace: what it gives a rank, and what that should be.
FUNCTIONAL = {
    "wait_tensor": lambda op, g: ([op(native.all_reduce(g.x, "sum", g.name))], [g.total]),
    "_wrap_tensor_autograd": lambda op, g: ([op(native.all_reduce(g.x, "sum", g.name))], [g.total]),
    "all_reduce": lambda op, g: ([op(g.x, "max", g.name)], [g.whole.amax(0)]),
    "all_reduce_": lambda op, g: ([op(g.x, "min", g.name)], [g.whole.amin(0)]),
    "all_reduce_coalesced": lambda op, g: (op([g.x, g.x * 2], "sum", g.name), [g.total, g.total * 2]),
    "all_reduce_coalesced_": lambda op, g: (op([g.x, g.x * 2], "sum", g.name), [g.total, g.total * 2]),
    "broadcast": lambda op, g: ([op(g.x, 1, g.name)], [g.whole[1]]),
    "broadcast_": lambda op, g: ([op(g.x, 1, g.name)], [g.whole[1]]),
    "all_gather_into_tensor": lambda op, g: ([op(g.x, g.n, g.name)], [g.gathered]),
    "all_gather_into_tensor_out": lambda op, g: ([op(g.x, g.n, g.name, out=g.room(2 * g.n * g.n))], [g.gathered]),
    "all_gather_into_tensor_coalesced": lambda op, g: (
        op([g.x, g.x[:1] * 2], g.n, g.name),
        [g.gathered, g.whole[:, 0] * 2],
    ),
    "reduce_scatter_tensor": lambda op, g: ([op(g.x, "sum", g.n, g.name)], [g.own]),
    "reduce_scatter_tensor_out": lambda op, g: ([op(g.x, "sum", g.n, g.name, out=g.room(2))], [g.own]),
    "reduce_scatter_tensor_coalesced": lambda op, g: (op([g.x, g.x * 2], "sum", g.n, g.name), [g.own, g.own * 2]),
    "all_to_all_single": lambda op, g: ([op(g.x, [2] * g.n, [2] * g.n, g.name)], [g.parts]),
    "isend": lambda op, g: exchanged(g, op(g.x, g.to, 0, g.name), native.irecv(g.room(2 * g.n), g.source, 0, g.name)),
    "irecv": lambda op, g: exchanged(g, native.isend(g.x, g.to, 0, g.name), op(g.room(2 * g.n), g.source, 0, g.name)),
    "batch_p2p_ops": lambda op, g: exchanged(
        g, *op(["isend", "irecv"], [g.to, g.source], [0, 0], [g.x, g.room(2 * g.n)], g.name)
    ),
}
native = torch.ops._c10d_functional

# By operator of the namespace: the gradient of its input where rank r weights what it gets by r + 1.
FUNCTIONAL_AUTOGRAD = {
    "all_gather_into_tensor": lambda op, g, x: (op(x, g.n, g.name), [sum(range(1, g.n + 1))] * g.n),
    "reduce_scatter_tensor": lambda op, g, x: (op(x, "sum", g.n, g.name), range(1, g.n + 1)),
    "all_to_all_single": lambda op, g, x: (op(x, [2] * g.n, [2] * g.n, g.name), range(1, g.n + 1)),
}


def into(tensors, call):
    """The tensors that a call has written to."""
    work = call(*tensors)
    if isinstance(work, dist.Work):
        work.wait()
    return tensors


def coalesced(g: Given, new: str, old: str, outputs, inputs):
    method = getattr(g.group, new if hasattr(dist.ProcessGroup, new) else old)
    return into(outputs, lambda *_: method(outputs, inputs))


def check_for_nan(g: Given):
    torch.ops.c10d.check_for_nan(g.x)
    with pytest.raises(RuntimeError, match="NaN"):
        torch.ops.c10d.check_for_nan(g.x * float("nan"))
    return [], []


def ring(g: Given, receive):
    sent = dist.isend(g.x, g.to)
    found = into([g.room(2 * g.n)], receive)
    sent.wait()
    return found, [g.whole[g.source]]


def from_anybody(g: Given):
    rooms = [g.room(2 * g.n) for _ in range(0 if g.rank else g.n - 1)]
    if g.rank:
        dist.send(g.x, 0)
    for room in rooms:
        into([room], lambda found: g.group.recv_anysource([found], 0))
    dist.barrier()  # what comes next may be sent to anybody, too
    return ([], []) if g.rank else ([sum(rooms)], [g.total - g.whole[0]])


# By operator of the namespace: what a call that ends in it gives a rank, and what that should be.
C10D = {
    "allreduce_": lambda g: (into([g.x], dist.all_reduce), [g.total]),
    "allreduce_coalesced_": lambda g: (
        into([g.x, g.x * 2], lambda *both: dist.all_reduce_coalesced(list(both))),
        [g.total, g.total * 2],
    ),
    "reduce_": lambda g: (into([g.x], lambda x: dist.reduce(x, 1))[: g.rank == 1], [g.total][: g.rank == 1]),
    "broadcast_": lambda g: (into([g.x], lambda x: dist.broadcast(x, 1)), [g.whole[1]]),
    "allgather_": lambda g: (into(g.rooms(), lambda *parts: dist.all_gather(list(parts), g.x)), g.whole),
    "_allgather_base_": lambda g: (
        into([g.room(2 * g.n * g.n)], lambda out: dist.all_gather_into_tensor(out, g.x)),
        [g.gathered],
    ),
    "allgather_coalesced_": lambda g: (
        into(g.rooms(), lambda *parts: dist.all_gather_coalesced([[part] for part in parts], [g.x])),
        g.whole,
    ),
    "allgather_into_tensor_coalesced_": lambda g: (
        coalesced(
            g,
            "all_gather_single_coalesced",
            "allgather_into_tensor_coalesced",
            [g.room(2 * g.n * g.n), g.room(g.n)],
            [g.x, g.x[:1]],
        ),
        [g.gathered, g.whole[:, 0]],
    ),
    "gather_": lambda g: (
        into(g.rooms(), lambda *parts: dist.gather(g.x, list(parts) if g.rank == 1 else None, 1)),
        g.whole if g.rank == 1 else g.rooms(),
    ),
    "scatter_": lambda g: (
        into([g.room(2)], lambda out: dist.scatter(out, list(g.x.chunk(g.n)) if g.rank == 1 else None, 1)),
        [g.whole[1].chunk(g.n)[g.rank]],
    ),
    "reduce_scatter_": lambda g: (
        into([g.room(2)], lambda out: dist.reduce_scatter(out, list(g.x.chunk(g.n)))),
        [g.own],
    ),
    "_reduce_scatter_base_": lambda g: (into([g.room(2)], lambda out: dist.reduce_scatter_tensor(out, g.x)), [g.own]),
    "reduce_scatter_tensor_coalesced_": lambda g: (
        coalesced(
            g,
            "reduce_scatter_single_coalesced",
            "reduce_scatter_tensor_coalesced",
            [g.room(2), g.room(2)],
            [g.x, g.x * 2],
        ),
        [g.own, g.own * 2],
    ),
    "alltoall_": lambda g: (
        [torch.cat(into(g.room(2 * g.n).chunk(g.n), lambda *out: dist.all_to_all(list(out), list(g.x.chunk(g.n)))))],
        [g.parts],
    ),
    "alltoall_base_": lambda g: (into([g.room(2 * g.n)], lambda out: dist.all_to_all_single(out, g.x)), [g.parts]),
    "barrier": lambda g: (into([], dist.barrier), []),
    "monitored_barrier_": lambda g: (into([], g.group.monitored_barrier), []),
    "send": lambda g: ring(g, lambda found: dist.irecv(found, g.source)),
    "recv_": lambda g: ring(g, lambda found: dist.recv(found, g.source)),
    "recv_any_source_": from_anybody,
    "check_for_nan": check_for_nan,
}
OPERATORS = {"_c10d_functional": FUNCTIONAL, "_c10d_functional_autograd": FUNCTIONAL_AUTOGRAD, "c10d": C10D}


def registered(space: str) -> list[str]:
    """The operators of a namespace that this torch has."""
    names = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    return sorted({name.partition(".")[0] for found, _, name in names if found == space})


class Seen(TorchDispatchMode):
    """Notes the operators of c10d that torch's dispatcher gets."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.tier("test")
@sim.ranks(3, backends=HOST)
def test_every_functional_operator_that_torch_registers(ctx):
    for name in registered("_c10d_functional"):
        found, wanted = FUNCTIONAL[name](getattr(native, name), Given(ctx))
        same_list([native.wait_tensor(t) for t in found], wanted)
    for name in registered("_c10d_functional_autograd"):
        g = Given(ctx)
        x = g.x.clone().requires_grad_()
        y, weights = FUNCTIONAL_AUTOGRAD[name](getattr(torch.ops._c10d_functional_autograd, name), g, x)
        found, wanted = FUNCTIONAL[name](getattr(native, name), g)
        same_list([native.wait_tensor(y).detach()], [native.wait_tensor(wanted[0])])
        (y * (ctx.rank + 1)).sum().backward()
        same(x.grad, torch.cat([torch.full((2, 3), float(weight), device=ctx.device) for weight in weights]))


@pytest.mark.tier("test")
@sim.ranks(3, backends=HOST)
def test_every_operator_of_c10d_that_torch_registers_alone_and_under_a_mode(ctx):
    for name in registered("c10d"):
        if name == "alltoall_" and ctx.backend == "gloo":
            continue  # gloo has none
        same_list(*C10D[name](Given(ctx)))
        with Seen() as seen:
            same_list(*C10D[name](Given(ctx)))
        assert name in (*seen.names, "check_for_nan") or (name == "recv_any_source_" and ctx.rank)


@sim.ranks(2, backends=HOST)
def test_comm_debug_mode_counts(ctx):
    x, whole = values(ctx, ctx.rank, 2), zeros(ctx, 4)
    with CommDebugMode() as counted:
        dist.all_reduce(x)
        dist.all_gather_into_tensor(whole, x)
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():
            pass
        funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD))
    names = {str(op): count for op, count in counted.get_comm_counts().items()}
    assert names == {"c10d.allreduce_": 2, "c10d._allgather_base_": 1, "c10d_functional.all_reduce": 1}
    same_list(whole.chunk(2), [all_values(ctx, 2).sum(0)] * 2)
    same(x, all_values(ctx, 2).sum(0) * 2)
