"""Meta mode: tensors have shapes and dtypes and no data, and nothing makes data up."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from collectives_kit import every_collective
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import sim
from hyper_parallel import fully_shard, get_platform

pytestmark = [pytest.mark.sim, pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")]


def test_tensors_are_made_without_data_unless_told_otherwise():
    def body() -> list[str]:
        devices = [
            str(torch.ones(2).device),
            str(nn.Linear(2, 2).weight.device),
            str(torch.ones(2, device="cpu").device),
        ]
        thread = threading.Thread(target=lambda: devices.append(str(torch.ones(2).device)))
        thread.start()
        thread.join()
        return devices

    assert sim.run(body, 2, device="meta") == [["meta", "meta", "cpu", "meta"]] * 2
    assert sim.run(body, 2) == [["cpu"] * 4] * 2
    assert sim.run(body, 2, device="cpu") == [["cpu"] * 4] * 2
    assert str(torch.ones(1).device) == "cpu"


def test_every_collective_leaves_meta_tensors():
    for rank, seen in enumerate(sim.run(every_collective, 3, device="meta")):
        assert {device for device, _ in seen} == {"meta"}
        assert seen[-2][1] == ((1 + rank) * 3, 2)


def test_the_trace_is_that_of_real_tensors():
    traces = []
    for device in (None, "meta"):
        with sim.world(3, device=device) as world:
            world.run(every_collective)
            traces.append([(e.rank, e.op, e.send_bytes, e.recv_bytes, e.input_shapes) for e in world.trace.in_order()])
    assert traces[0] == traces[1]


def test_a_tensor_that_no_memory_could_hold():
    def body() -> int:
        x = torch.empty(1 << 40)
        dist.all_reduce(x)
        return x.numel()

    with sim.world(4, machine="h100-sxm", device="meta") as world:
        assert world.run(body) == [1 << 40] * 4
        assert world.now > 1.0


def test_object_collectives_carry_values():
    def body() -> tuple:
        rank, size = dist.get_rank(), dist.get_world_size()
        objects: list = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        box = [rank]
        dist.broadcast_object_list(box, 1)
        mine: list = [None]
        dist.scatter_object_list(mine, list("abc") if rank == 0 else None, src=0)
        return [o["rank"] for o in objects], box, mine

    assert sim.run(body, 3, device="meta") == [([0, 1, 2], [1], [letter]) for letter in "abc"]


def test_a_value_cannot_be_read():
    with pytest.raises(RuntimeError, match="cannot be called on meta tensors"):
        sim.run(lambda: torch.ones(1).item(), 2, device="meta")


# -- what is checked all the same --------------------------------------------------------------------------------


def test_different_sizes():
    with pytest.raises(sim.CollectiveMismatch, match=r"differs: size \(\[2\] on rank 0, \[3\] on rank 1\)"):
        sim.run(lambda: dist.all_reduce(torch.ones(2 + dist.get_rank())), 2, device="meta")


def test_uneven_splits_that_do_not_fit():
    def body() -> None:
        dist.all_to_all_single(torch.empty(2), torch.ones(3), [1, 1], [1, 2])

    with pytest.raises(sim.CollectiveMismatch, match="sends 2 elements to rank 1, which expects 1 from it"):
        sim.run(body, 2, device="meta")


def test_tensors_with_data_and_without():
    def body() -> None:
        dist.all_reduce(torch.ones(2, device="meta" if dist.get_rank() == 1 else "cpu"))

    with pytest.raises(sim.CollectiveMismatch) as found:
        sim.run(body, 3)
    assert "differs: device (meta on rank 1, cpu on ranks 0, 2)" in str(found.value)
    assert "try: let all ranks have tensors on meta, or all of them tensors with data" in str(found.value)


def test_a_message_with_data_and_without():
    def body() -> None:
        if dist.get_rank() == 0:
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(torch.ones(2, device="cpu"), 0)

    with pytest.raises(sim.CollectiveMismatch) as found:
        sim.run(body, 2, device="meta")
    assert "rank 0  send #0  float32 [2] on meta" in str(found.value)
    assert "try: receive into a tensor of the device that is sent" in str(found.value)


@pytest.mark.parametrize("device", ["gpu", "tpu", 3])
def test_a_device_that_is_none(device):
    with pytest.raises(ValueError, match="cannot make a world: there is no kind of device") as found:
        sim.run(dist.barrier, 2, device=device)
    assert "map_device='cuda', which puts on the CPU" in str(found.value)


# -- training ----------------------------------------------------------------------------------------------------

# Before torch 2.13, Adam counts its steps on the default device, here meta, and reads the count.
OPTIMIZER = torch.optim.AdamW if torch.__version__ >= "2.13" else torch.optim.SGD


def test_a_dtensor_step():
    def body() -> tuple:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        weight = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
        optimizer = OPTIMIZER([weight], lr=0.1)
        x = distribute_tensor(torch.ones(3, 6), mesh, [Replicate()])
        (x @ weight).sum().backward()
        optimizer.step()
        full = weight.full_tensor()
        return full.device.type, list(full.shape), weight.grad.to_local().device.type

    assert sim.run(body, 2, device="meta") == [("meta", [6, 4], "meta")] * 2


def step_of_fully_shard() -> tuple:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = OPTIMIZER(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(torch.ones(3, 8)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    kinds = {parameter.to_local().device.type for parameter in model.parameters()}
    return loss.device.type, kinds, get_platform().device().type


@pytest.mark.tier("test")
def test_a_fully_sharded_step_communicates_as_with_data():
    traces = []
    for device in ("cpu", "meta"):
        with sim.world(4, device=device) as world:
            assert world.run(step_of_fully_shard) == [(device, {device}, device)] * 4
            traces.append([(e.rank, e.op, e.send_bytes, e.recv_bytes) for e in world.trace.in_order()])
    assert traces[0] == traces[1]
    assert traces[0]
