"""A rank that lives alone: what it communicates is checked, recorded and over at once; values there are none."""

from __future__ import annotations

import gc
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives_kit import every_collective
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import sim
from hyper_parallel import fully_shard, get_platform
from sim.mesh.tracing.lone import MAX_LONE_RANKS, Listener, LoneWorld

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")


def alone(body: Any, world_size: int = 8, rank: int = 3, listener: Listener | None = None) -> Any:
    """What the body returns, on tensors without values, and the rank's events."""

    def on_rank() -> Any:
        with FakeTensorMode():
            return body()

    with LoneWorld(world_size, rank, listener) as world:
        return world.run_alone(on_rank), world.trace.of_rank(rank)


# -- who it is ---------------------------------------------------------------------------------------------------------


def test_the_rank_knows_its_place():
    def body() -> tuple[Any, ...]:
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        groups = [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in ("dp", "tp")]
        return dist.get_rank(), dist.get_world_size(), mesh.get_coordinate(), groups, get_platform().backend

    with LoneWorld(8, 5) as world:
        rank, size, coordinate, groups, backend = world.run_alone(body)
    assert (rank, size, tuple(coordinate)) == (5, 8, (2, 1))
    assert groups == [[1, 3, 5, 7], [4, 5]]
    assert backend == "sim"


def test_a_world_runs_as_often_as_one_likes_and_goes_on_from_where_it_was():
    with LoneWorld(4, 2) as world:
        world.run_alone(dist.barrier)
        world.run_alone(dist.barrier)
        assert [event.seq for event in world.trace.of_rank(2)] == [0, 1]


def test_nothing_is_left_behind():
    alone(lambda: dist.all_reduce(torch.ones(2)))
    assert not dist.is_initialized()
    assert sim.run(dist.get_world_size, 2) == [2, 2]
    assert float(torch.ones(1)) == 1.0


# -- every operation ---------------------------------------------------------------------------------------------------


FACTS = ("op", "axis", "group", "seq", "send_bytes", "recv_bytes", "dtype", "reduce_op", "root", "peer")


@pytest.mark.sim
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_collective_and_message_is_that_of_the_real_world(rank):
    with sim.world(3) as world:
        shapes = world.run(every_collective)[rank]
        wanted = [[getattr(event, name) for name in FACTS] for event in world.trace.of_rank(rank)]
    found, events = alone(every_collective, 3, rank)
    assert found == shapes
    assert [[getattr(event, name) for name in FACTS] for event in events] == wanted


def test_a_message_needs_nobody_at_the_other_end():
    def body() -> tuple[int, ...]:
        dist.send(torch.ones(3), 5)
        dist.recv(got := torch.empty(2, dtype=torch.bfloat16), 6)
        dist.recv(torch.empty(1))  # from anybody: from the one before it
        return tuple(got.shape)

    shape, events = alone(body)
    assert shape == (2,)
    assert [(event.op, event.peer, event.send_bytes, event.recv_bytes) for event in events] == [
        ("send", 5, 12, 0),
        ("recv", 6, 0, 4),
        ("recv", 2, 0, 4),
    ]


def test_batches_of_messages():
    def body() -> None:
        operations = [dist.P2POp(dist.isend, torch.ones(2), 1), dist.P2POp(dist.irecv, torch.empty(2), 7)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    _, events = alone(body)
    assert [(event.op, event.peer) for event in events] == [("send", 1), ("recv", 7)]


def test_groups_that_only_some_ranks_make():
    def body() -> tuple[int, int]:
        group = dist.new_group([1, 3, 5], use_local_synchronization=True)
        dist.all_reduce(torch.ones(2), group=group)
        other = dist.new_group([0, 2])  # without this rank
        return group.size(), dist.get_rank(group) if other == dist.GroupMember.NON_GROUP_MEMBER else -1

    found, events = alone(body)
    assert found == (3, 1)
    assert [event.group for event in events] == [(1, 3, 5)]


# -- no values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read", [lambda x: x.item(), lambda x: x.tolist(), lambda x: bool(x > 0), float, int, lambda x: x.nonzero()]
)
def test_a_value_cannot_be_read(read):
    def body() -> None:
        dist.all_reduce(x := torch.ones(()))
        read(x)

    with pytest.raises((DataDependentOutputException, RuntimeError)) as found:
        alone(body)
    assert "aten." in str(found.value) or "fake" in str(found.value).lower()


def test_what_is_received_has_no_values_either():
    def body() -> bool:
        dist.all_gather_into_tensor(whole := torch.empty(8), torch.ones(1))
        return isinstance(whole, FakeTensor) and isinstance(whole + 1, FakeTensor)

    assert alone(body)[0]


@pytest.mark.parametrize("what", ["collective", "message"])
def test_tensors_with_values_are_refused(what):
    def body() -> None:
        x = torch.ones(2)
        dist.all_reduce(x) if what == "collective" else dist.send(x, 1)

    with LoneWorld(4, 0) as world, pytest.raises(ValueError, match="it moves values") as found:
        world.run_alone(body)
    assert "tensor: torch.float32, (2,), not a fake one" in str(found.value)
    assert "try: tensors made under the FakeTensorMode of this world, or sim.world(...)" in str(found.value)


def test_meta_tensors_and_those_of_no_elements_are_taken():
    def body() -> list[str]:
        dist.all_reduce(torch.ones(2, device="meta"))
        dist.all_reduce(torch.ones(0))
        return []

    with LoneWorld(4, 0) as world:
        assert world.run_alone(body) == []
        assert [event.op for event in world.trace.of_rank(0)] == ["all_reduce"] * 2


def test_an_error_of_the_rank_comes_out_as_it_is():
    def body() -> None:
        raise KeyError("mine")

    with LoneWorld(4, 0) as world, pytest.raises(KeyError) as found:
        world.run_alone(body)
    assert type(found.value) is KeyError


def test_what_is_wrong_with_a_call_is_said_as_in_the_real_world():
    def body() -> None:
        dist.all_gather_into_tensor(torch.empty(7), torch.empty(2))

    with pytest.raises(ValueError, match=r"the output has 7 elements, expected 2 \* 8 ranks = 16"):
        alone(body)


# -- the arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, MAX_LONE_RANKS + 1, True, 2.0, "4", None])
def test_a_world_that_cannot_be(size):
    with pytest.raises(ValueError, match=r"cannot let rank 0 of .* live alone") as found:
        LoneWorld(size, 0)
    assert (f"must be from 1 to {MAX_LONE_RANKS}\n" if type(size) is int else ", not an int\n") in str(found.value)
    assert f"world_size: {size!r}" in str(found.value)
    assert "try: world_size=1024" in str(found.value)


@pytest.mark.parametrize("rank", [4, -1, True, 1.0, None])
def test_a_rank_that_is_not_in_it(rank):
    with pytest.raises(ValueError, match=r"rank (must be from 0 to 3|is (a \w+|None), not an int)\n") as found:
        LoneWorld(4, rank)
    assert f"rank: {rank!r}" in str(found.value)


# -- large worlds: counted, not timed ----------------------------------------------------------------------------------


def calls_of(body: Any, world_size: int) -> int:
    """Count the calls of this project's functions that a world takes, on the caller's thread and on the rank's."""
    count = 0

    def on_call(frame: Any, kind: str, argument: Any) -> None:
        nonlocal count
        count += kind == "call" and f"{os.sep}sim{os.sep}" in frame.f_code.co_filename

    @contextmanager
    def counted() -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(on_call)
        try:
            yield
        finally:
            sys.setprofile(before)

    def on_rank() -> None:
        with counted(), FakeTensorMode():
            body()

    gc.collect()
    gc.disable()  # what earlier tests have left is released before, or afterwards
    try:
        with counted(), LoneWorld(world_size, world_size - 1) as world:
            world.run_alone(on_rank)
    finally:
        gc.enable()
    return count


def some_collectives() -> None:
    x = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(x)
    dist.all_gather_into_tensor(torch.empty(4 * dist.get_world_size()), x)
    dist.send(x, 0)
    dist.barrier()


def test_a_world_of_100_000_ranks_costs_as_many_calls_as_one_of_100():
    calls_of(some_collectives, 10)  # whatever is worked out once
    calls = calls_of(some_collectives, 100)
    assert calls > 100
    assert calls_of(some_collectives, 100_000) == calls


@pytest.mark.tier("test")
def test_the_largest_world():
    def body() -> int:
        dist.all_reduce(x := torch.ones(3 * MAX_LONE_RANKS))
        return x.numel()

    found, events = alone(body, MAX_LONE_RANKS, MAX_LONE_RANKS - 1)
    assert found == 3 * MAX_LONE_RANKS
    assert len(events[0].group) == MAX_LONE_RANKS
    assert events[0].send_bytes == 2 * 12 * (MAX_LONE_RANKS - 1)


def test_only_one_rank_has_a_thread_a_store_and_an_environment():
    with LoneWorld(100_000, 99_999) as world:
        assert len(world.contexts) == 1
        assert len(world._workers) == 1
        assert world.contexts[0].environment[b"RANK"] == b"99999"
        assert world.contexts[0].environment[b"WORLD_SIZE"] == b"100000"


@pytest.mark.tier("test")
def test_a_mesh_and_an_engine_over_100_000_ranks():
    def body() -> tuple[Any, ...]:
        mesh = init_device_mesh("cpu", (12_500, 8), mesh_dim_names=("dp", "tp"))
        data = mesh["dp"]
        with FakeTensorMode():
            model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.Linear(4096, 64))
            for layer in model:
                fully_shard(layer, mesh=data)
            fully_shard(model, mesh=data)
            model(torch.ones(2, 64)).sum().backward()
            return tuple(model[0].weight.shape), tuple(model[0].weight.to_local().shape)

    with LoneWorld(100_000, 8) as world:
        assert world.run_alone(body) == ((4096, 64), (1, 64))
        events = world.trace.of_rank(8)
    assert {event.op for event in events} >= {"all_gather", "reduce_scatter"}
    assert all(len(event.group) == 12_500 and event.axis == "dp" for event in events)


# -- who listens -------------------------------------------------------------------------------------------------------


class Diary(Listener):
    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []
        self.waited: list[int] = []
        self.known: dict[int, int] = {}

    def on_collective(self, call: Any, axis: str, ranks: tuple[int, ...], waitable: Any) -> None:
        self.known[id(waitable)] = len(self.lines)
        self.lines.append((call.contract.op, axis, len(ranks)))

    def on_message(self, tensor: Any, axis: str, pair: Any, waitable: Any, *, sending: bool) -> None:
        self.known[id(waitable)] = len(self.lines)
        self.lines.append(("send" if sending else "recv", axis, pair))

    def on_wait(self, waitable: Any) -> None:
        self.waited.append(self.known[id(waitable)])


def test_a_listener_is_told_of_all_that_is_communicated_and_waited_for():
    def body() -> None:
        first = dist.all_reduce(torch.ones(2), async_op=True)
        second = dist.isend(torch.ones(2), 7)
        third = dist.irecv(torch.ones(2))
        third.wait()
        first.wait()
        second.wait()

    diary = Diary()
    _, events = alone(body, 8, 3, diary)
    assert diary.lines == [("all_reduce", "world", 8), ("send", "world", (3, 7)), ("recv", "world", (3, 2))]
    assert diary.waited == [2, 0, 1]
    assert [event.op for event in events] == ["all_reduce", "send", "recv"]


def test_with_a_listener_the_device_has_streams():
    def body() -> tuple[bool, bool]:
        platform = get_platform()
        with platform.use_stream(platform.new_stream()):
            platform.new_event().record(platform.current_stream())
        return platform.has_streams, platform.prefers_large_messages

    assert alone(body, listener=Listener())[0] == (True, True)
    assert alone(lambda: get_platform().has_streams)[0] is False


def test_a_listener_that_raises_ends_the_run():
    class Refuses(Listener):
        def on_collective(self, *args: Any) -> None:
            raise LookupError("no")

    with pytest.raises(LookupError, match="no"):
        alone(lambda: dist.all_reduce(torch.ones(1)), listener=Refuses())


# -- torch's own -------------------------------------------------------------------------------------------------------


def test_dtensors_and_their_gradients():
    def body() -> tuple[Any, ...]:
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
        with FakeTensorMode():
            weight = torch.nn.Parameter(distribute_tensor(torch.ones(16, 4), mesh, [Shard(0)], src_data_rank=None))
            out = torch.ones(3, 4) @ weight.to_local().t()
            out.sum().backward()
            return tuple(weight.shape), tuple(weight.to_local().shape), tuple(weight.grad.to_local().shape)

    with LoneWorld(8, 3) as world:
        assert world.run_alone(body) == ((16, 4), (2, 4), (2, 4))


def test_events_can_be_pickled():
    _, events = alone(some_collectives)
    assert pickle.loads(pickle.dumps(events)) == events
