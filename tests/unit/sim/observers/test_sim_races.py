"""`check_races`: what a rank does with a buffer while an operation on it is in flight."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import sim

pytestmark = [pytest.mark.sim, pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")]


def race(body, world_size=2) -> str:
    """The text of the race in `body`, which is no race unless somebody looks."""
    sim.run(body, world_size)
    with pytest.raises(sim.InFlightBufferRace) as caught:
        sim.run(body, world_size, check_races=True)
    return str(caught.value)


def in_flight(touch):
    """A body that touches the input or the output of an all_gather before its wait."""

    def body() -> None:
        given, out = torch.ones(4), torch.zeros(8)
        work = dist.all_gather_into_tensor(out, given, async_op=True)
        touch(given, out)
        work.wait()

    return body


def in_hook(touch) -> None:
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: None if touch() else grad)
    x.sum().backward()


BAD = {
    "read the output as a list, in a hook of backward": lambda given, out: in_hook(out.tolist),
    "write the input": lambda given, out: given.add_(1),
    "write the input, a view": lambda given, out: given.view(2, 2)[1].zero_(),
    "write the input through .data": lambda given, out: given.data.mul_(2),
    "write the input by out=": lambda given, out: torch.add(out.new_ones(4), 1, out=given),
    "assign to an element": lambda given, out: given.__setitem__(0, 5.0),
    "copy into the input": lambda given, out: given.copy_(torch.zeros(4)),
    "read the output": lambda given, out: out.sum(),
    "read the output, a view": lambda given, out: out[5:] * 2,
    "read one value of the output": lambda given, out: out[0].item(),
    "write the output": lambda given, out: out.zero_(),
    "read the output as a list": lambda given, out: out.tolist(),
    "read the output as an array": lambda given, out: out.numpy(),
    "print the output": lambda given, out: repr(out),
    "format the output": lambda given, out: f"{out} {out[0]:.2f}",
    "print a view of the output": lambda given, out: str(out[2:].detach()),
    "give the output to another operation": lambda given, out: dist.all_reduce(out),
    "receive into the input": lambda given, out: dist.broadcast(given, src=0, async_op=dist.get_rank() == 9),
}
FINE = {
    "read the input in a hook": lambda given, out: in_hook(given.tolist),
    "read the input": lambda given, out: given.sum().item() + (given * 2)[0],
    "print the input": lambda given, out: f"{given} {given.tolist()}",
    "views of the output": lambda given, out: (out.view(2, 4), out[3:], out.t(), out.detach(), out.split(2)),
    "the output's shape": lambda given, out: (out.shape, out.numel(), torch.empty_like(out), out.new_zeros(3)),
    "other tensors": lambda given, out: torch.ones(8).add_(1).sum().item(),
    "another operation on the input": lambda given, out: dist.all_gather([torch.ones(4)] * 2, given),
}


@pytest.mark.parametrize("touch", BAD.values(), ids=BAD.keys())
def test_what_races(touch):
    text = race(in_flight(touch))
    assert "a buffer that all_gather #0 of group 'world'" in text
    assert "issued:  test_sim_races.py:" in text
    assert "try: wait for the work" in text


@pytest.mark.parametrize("touch", FINE.values(), ids=FINE.keys())
def test_what_does_not(touch):
    sim.run(in_flight(touch), 2, check_races=True)


def test_the_message():
    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = torch.ones(3)
        dist.all_reduce(x, group=mesh.get_group("tp"))
        work = dist.all_reduce(x, group=mesh.get_group("tp"), async_op=True)
        if dist.get_rank() == 3:
            x.mul_(2)
        work.wait()

    with pytest.raises(sim.InFlightBufferRace) as caught:
        sim.run(body, 4, check_races=True)
    line = body.__code__.co_firstlineno
    assert str(caught.value) == (
        "rank 3 writes a buffer that all_reduce #1 of group 'tp: ranks 2-3' writes and that it has not waited for\n"
        f"  issued:  test_sim_races.py:{line + 4} in body\n"
        f"  touched: test_sim_races.py:{line + 6} in body, by aten.mul_ on float32 [3]\n"
        "  try: wait for the work that the operation returned first\n"
        "  replay: sim.run(..., world_size=4, seed=0)"
    )


def test_the_line_of_an_operation_that_torch_has_deprecated():
    def body() -> None:
        dist.all_gather_into_tensor(torch.zeros(2), torch.zeros(1))

    with sim.world(2) as world:
        world.run(body)
    assert world.trace.events[0].line == f"test_sim_races.py:{body.__code__.co_firstlineno + 1} in body"


@pytest.mark.parametrize("end", ["wait", "poll", "synchronize", "future"])
@sim.ranks(2, backends=("sim",), check_races=True)
def test_after_the_wait_all_is_fine(ctx, end):
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    if end == "poll":
        while not work.is_completed():
            pass
    elif end == "future":
        work.get_future()
    else:
        getattr(work, end)()
    assert x.add_(1).sum().item() == 12.0


def test_roots_and_senders_only_read():
    def body(touch) -> None:
        rank, x = dist.get_rank(), torch.ones(4)
        works = [dist.broadcast(x, src=0, async_op=True)] if rank == 0 else []
        touch(x) if rank == 0 else dist.broadcast(torch.ones(4), src=0)
        y = torch.ones(4)
        works.append(dist.isend(y, 1) if rank == 0 else dist.irecv(y, 0))
        touch(y) if rank == 0 else None
        for work in works:
            work.wait()

    sim.run(body, 2, (lambda x: x.sum(),), check_races=True)
    with pytest.raises(sim.InFlightBufferRace, match=r"broadcast #0 .*reads"):
        sim.run(body, 2, (lambda x: x.zero_(),), check_races=True)


def test_messages():
    def body(touch_sender) -> None:
        rank, x = dist.get_rank(), torch.ones(4)
        ops = [dist.P2POp(dist.isend, x, 1) if rank == 0 else dist.P2POp(dist.irecv, x, 0)]
        works = dist.batch_isend_irecv(ops)
        if touch_sender and rank == 0:
            x.zero_()
        if not touch_sender and rank == 1:
            x.sum()
        for work in works:
            work.wait()
        x.zero_()

    with pytest.raises(
        sim.InFlightBufferRace, match=r"rank 0 writes a buffer that send #0 to rank 1 in group 'world' reads"
    ):
        sim.run(body, 2, (True,), check_races=True)
    with pytest.raises(sim.InFlightBufferRace, match=r"rank 1 reads a buffer that recv #0 from rank 0 .* writes"):
        sim.run(body, 2, (False,), check_races=True)


def test_parts_of_one_storage_are_told_apart():
    def body(own, other) -> None:
        full = torch.zeros(6, 4)
        part = own(full)
        work = dist.all_gather([part, torch.zeros(part.shape)], torch.zeros(part.shape), async_op=True)
        other(full).add_(1)
        work.wait()

    top, rest, left, right = (lambda w: w[:3]), (lambda w: w[3:]), (lambda w: w[:, :2]), (lambda w: w[:, 2:])
    for own, other in [(top, rest), (left, right), (rest, top), (lambda w: w[0, ::2], lambda w: w[0, 1::2])]:
        sim.run(body, 2, (own, other), check_races=True)
    for own, other in [(top, left), (left, lambda w: w[:, 1:]), (right, rest), (top, lambda w: w.view(-1)[11:])]:
        with pytest.raises(sim.InFlightBufferRace):
            sim.run(body, 2, (own, other), check_races=True)
    bytes_of = lambda w: w.view(torch.uint8)[:, 8:]  # noqa: E731 - the right half, as another dtype
    sim.run(body, 2, (left, bytes_of), check_races=True)
    with pytest.raises(sim.InFlightBufferRace):
        sim.run(body, 2, (right, bytes_of), check_races=True)


@sim.ranks(2, backends=("sim",), check_races=True)
def test_in_flight_memory_is_not_taken_for_that_of_a_tensor_that_came_later(ctx):
    for _ in range(20):
        work = dist.all_reduce(torch.ones(100), async_op=True)  # nobody else holds the tensor
        torch.ones(100).add_(1)
        work.wait()


@pytest.mark.tier("test")
@sim.ranks(4, backends=("sim",), check_races=True)
def test_code_that_waits_as_it_should(ctx):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    replicated = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(replicated(torch.ones(2, 8))).sum().backward()
        optimizer.step()
    x = functional.all_reduce(torch.ones(3), "sum", mesh) * 2
    full = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])
    assert x.sum().item() + full.redistribute(mesh, [Replicate()]).to_local().sum().item() == 69.0


def test_the_next_run_starts_with_nothing_in_flight():
    kept = []

    def leaves() -> None:
        x = torch.ones(3)
        kept.append((x, dist.all_reduce(x, async_op=True)))

    with sim.world(2, check_races=True) as world:
        world.run(leaves)
        world.run(lambda: kept[dist.get_rank()][0].sum().item())
