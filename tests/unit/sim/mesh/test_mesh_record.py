"""Records of operations, memory, communication and streams."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from hyper_parallel import get_platform
from sim.mesh.program import Alloc, Await, Comm, EventRecord, Free, HostWait, Op, Place, Wait
from sim.mesh.tracing.kinds import having
from sim.mesh.tracing.lone import LoneWorld
from sim.mesh.tracing.record import Recorder


def record(body: Any, world_size: int = 8, rank: int = 3, meanwhile: Any = None) -> tuple[list[Any], Recorder, Any]:
    """The events of a body on a rank that lives alone."""
    recorder = Recorder()

    def on_rank() -> tuple[Any, list[Any]]:
        made = meanwhile() if meanwhile is not None else None
        with recorder.recording():
            result = body(made) if meanwhile is not None else body()
            return result, recorder.cut()

    with LoneWorld(world_size, rank, recorder) as world:
        result, events = world.run_alone(on_rank)
    return events, recorder, result


def only(events: list[Any], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


# -- operations --------------------------------------------------------------------------------------------------------


def test_a_product_with_its_shape_flops_and_bytes():
    events, _, _ = record(lambda: torch.ones(4, 8, dtype=torch.bfloat16) @ torch.ones(8, 2, dtype=torch.bfloat16))
    (product,) = [op for op in only(events, Op) if op.kind == "matmul"]
    assert product.name == "aten.mm"
    assert (product.flops, product.shape, product.dtype) == (2 * 4 * 8 * 2, (1, 4, 2, 8), "bfloat16")
    assert [touch.bytes for touch in product.reads] == [4 * 8 * 2, 8 * 2 * 2]
    assert [touch.bytes for touch in product.writes] == [4 * 2 * 2]


def test_each_part_of_a_block_that_a_list_has_counts():
    def body() -> None:
        parts, others = torch.ones(4, 8).unbind(), [torch.ones(8) for _ in range(4)]
        torch._foreach_mul_(parts, 2.0)
        torch._foreach_copy_(parts, others)
        torch._foreach_norm(parts)
        steps = [torch.ones(()) for _ in range(4)]
        rates = {"lr": 1.0, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
        torch._fused_adamw_(parts, others, others, others, [], steps, amsgrad=False, maximize=False, **rates)

    events, _, _ = record(body)
    moved = {op.name: op.bytes for op in only(events, Op) if "_f" in op.name}
    whole = 4 * 8 * 4
    assert moved["aten._foreach_mul_"] == 2 * whole, "read and written"
    assert moved["aten._foreach_copy_"] == 2 * whole, "what is overwritten is not read"
    assert moved["aten._foreach_norm"] == whole + 4 * 4
    assert moved["aten._fused_adamw_"] == 4 * whole + 4 * 4, "here gradients are moments too; only these are written"


def test_a_scatter_moves_what_its_indices_say():
    def body() -> None:
        torch.ones(16, 1024).scatter_(1, torch.zeros(16, 1, dtype=torch.int64), -1.0)

    events, _, _ = record(body)
    (op,) = [op for op in only(events, Op) if op.name == "aten.scatter_"]
    assert op.bytes == 16 * (4 + 8 + 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("one", "other", "ends"),
    [
        ((32, 64), (8, 64, 128), True),
        ((8, 16, 64), (64, 32), True),
        ((16, 32), (32, 64), True),
        ((8, 16, 64), (8, 64, 32), False),
    ],
    ids=["rows", "columns", "inner", "batch"],
)
def test_products_by_groups_in_every_dtype_that_kernels_take(
    one: tuple[int, ...], other: tuple[int, ...], ends: bool, dtype: torch.dtype
) -> None:
    """torch's fake one takes bf16 alone; experts of transformers are such products in the model's dtype."""

    def body() -> torch.Tensor:
        groups = torch.ones(8, dtype=torch.int32) if ends else None
        return torch._grouped_mm(torch.zeros(one, dtype=dtype), torch.zeros(other, dtype=dtype), offs=groups)

    offs = torch.arange(4, 36, 4, dtype=torch.int32) if ends else None
    real = torch._grouped_mm(torch.zeros(one, dtype=dtype), torch.zeros(other, dtype=dtype), offs=offs)
    events, _, made = record(body)
    (product,) = [op for op in only(events, Op) if op.kind == "matmul"]
    assert (made.shape, made.dtype, made.stride()) == (real.shape, real.dtype, real.stride())
    assert [touch.bytes for touch in product.writes] == [real.numel() * dtype.itemsize]


def test_views_are_no_kernels_and_take_no_memory():
    def body() -> Any:
        x = torch.empty(4, 6)
        return x.view(6, 4).t()[1:].unsqueeze(0).expand(3, -1, -1), x.detach(), x.chunk(2)

    events, _, _ = record(body)
    assert not only(events, Op)
    assert [event.bytes for event in only(events, Alloc)] == [96]


def test_what_is_expanded_counts_once():
    events, _, _ = record(lambda: torch.empty(1, 8).expand(1000, 8) + torch.empty(1000, 8))
    (added,) = only(events, Op)
    assert [touch.bytes for touch in added.reads] == [32, 32_000]


def test_in_place_writes_to_what_is_there():
    def body() -> Any:
        x = torch.zeros(16)
        return x.add_(1.0)

    events, _, _ = record(body)
    zeros, added = only(events, Op)
    assert len(only(events, Alloc)) == 1
    assert {touch.block for touch in added.writes} == {touch.block for touch in zeros.writes}
    assert {touch.block for touch in added.reads} == {touch.block for touch in zeros.writes}


def test_what_is_overwritten_is_not_read():
    events, _, _ = record(lambda: torch.empty(16).copy_(torch.empty(16)))
    (copied,) = only(events, Op)
    assert {touch.block for touch in copied.reads}.isdisjoint({touch.block for touch in copied.writes})


def test_backward_is_recorded_as_well():
    def body() -> None:
        weight = torch.ones(3, 3, requires_grad=True)
        (torch.ones(2, 3) @ weight).sum().backward()

    events, _, _ = record(body)
    assert [op.shape for op in only(events, Op) if op.kind == "matmul"] == [(1, 2, 3, 3), (1, 3, 3, 2)]


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_block_lives_as_long_as_its_tensors():
    def body() -> torch.Tensor:
        x = torch.ones(256)
        y = x[1:]
        del x
        z = y * 2
        del y
        return z

    events, _, _ = record(body)
    recorded = [event for event in events if not isinstance(event, Op)]
    assert [type(event).__name__ for event in recorded] == ["Alloc", "Alloc", "Free"]
    assert recorded[2].block == recorded[0].block


def test_every_block_is_given_back_once_and_after_it_was_taken():
    def body() -> None:
        layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
        for _ in range(2):
            layers(torch.ones(2, 8)).relu().sum().backward()
            for parameter in layers.parameters():
                parameter.grad = None

    events, recorder, _ = record(body)
    taken: set[int] = set()
    given: set[int] = set()
    for event in events:
        if isinstance(event, Alloc):
            assert event.block not in taken
            assert recorder.sizes[event.block] == event.bytes
            taken.add(event.block)
        elif isinstance(event, Free):
            assert event.block in taken - given
            given.add(event.block)
        elif isinstance(event, Op):
            assert {touch.block for touch in (*event.reads, *event.writes)} <= taken - given
    assert given == taken  # nothing is left


def test_a_storage_that_is_resized_to_nothing_and_back():
    def body() -> torch.Tensor:
        x = torch.empty(64)
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(256)
        return x

    events, _, _ = record(body)
    recorded = [type(event).__name__ for event in events]
    assert recorded == ["Alloc", "Free", "Alloc"]
    assert events[0].block != events[2].block
    assert [events[0].bytes, events[2].bytes] == [256, 256]


# -- communication -----------------------------------------------------------------------------------------------------


def test_a_collective_and_who_waits_for_it():
    def body() -> None:
        whole = torch.empty(8 * 4)
        work = dist.all_gather_into_tensor(whole, torch.ones(4), async_op=True)
        torch.ones(2)
        work.wait()

    events, recorder, _ = record(body)
    (sent,) = only(events, Comm)
    (wait,) = only(events, Wait)
    assert (sent.op, sent.size, sent.moved, sent.dtype) == ("all_gather", 128, 7 * 16, "float32")
    assert recorder.groups[sent.group].axis == "world"
    assert tuple(recorder.groups[sent.group].ranks) == tuple(range(8))
    assert wait.handle == sent.handle
    names = [event.name if isinstance(event, Op) else type(event).__name__ for event in events]
    assert names.index("Comm") < max(i for i, name in enumerate(names) if name == "aten.ones") < names.index("Wait")


def test_waiting_twice_is_waiting_once():
    def body() -> None:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        work.wait()
        work.wait()

    assert len(only(record(body)[0], Wait)) == 1


def test_messages_know_their_peer():
    def body() -> None:
        dist.send(torch.ones(3), 5)
        dist.recv(torch.empty(2), 6)

    events, recorder, _ = record(body)
    assert [(sent.op, sent.peer, sent.size) for sent in only(events, Comm)] == [("send", 5, 12), ("recv", 6, 8)]
    assert [tuple(recorder.groups[sent.group].ranks) for sent in only(events, Comm)] == [(3, 5), (3, 6)]


def test_groups_are_told_by_their_axis():
    def body(mesh: Any) -> None:
        for axis in ("dp", "tp", "dp"):
            dist.all_reduce(torch.ones(4), group=mesh.get_group(axis))

    events, recorder, _ = record(body, meanwhile=lambda: init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp")))
    assert [recorder.groups[sent.group].axis for sent in only(events, Comm)] == ["dp", "tp", "dp"]
    assert len(recorder.groups) == 2


def test_functional_collectives_are_not_lost():
    """Under fake tensors alone, torch's functional collectives never reach the process group."""

    def body(mesh: Any) -> tuple[int, ...]:
        x = torch.ones(4, 2)
        reduced = functional.all_reduce(x, "sum", (mesh, 0))
        gathered = functional.all_gather_tensor(x, 0, (mesh, 1))
        scattered = functional.reduce_scatter_tensor(gathered, "sum", 0, (mesh, 1))
        return tuple((reduced + scattered).shape)

    events, recorder, shape = record(
        body, meanwhile=lambda: init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    )
    assert shape == (4, 2)
    found = [(sent.op, recorder.groups[sent.group].axis, sent.size) for sent in only(events, Comm)]
    assert found == [("all_reduce", "dp", 32), ("all_gather", "tp", 64), ("reduce_scatter", "tp", 64)]
    assert len(only(events, Wait)) == 3


# -- streams -----------------------------------------------------------------------------------------------------------


def test_operations_are_on_the_stream_that_is_used():
    def body() -> None:
        platform = get_platform()
        side = platform.new_stream()
        x = torch.ones(4)
        ready = platform.new_event()
        ready.record(platform.current_stream())
        with platform.use_stream(side):
            side.wait_event(ready)
            x + 1
        platform.current_stream().wait_stream(side)
        side.synchronize()

    events, _, _ = record(body)
    ones, added = only(events, Op)
    assert ones.stream == 0
    assert added.stream != 0
    first, second = only(events, EventRecord)
    assert (first.stream, second.stream) == (0, added.stream)
    assert only(events, Await) == [Await(first.event, added.stream), Await(second.event, 0)]
    assert only(events, HostWait) == [HostWait(added.stream)]


def test_an_event_that_was_never_recorded_is_not_waited_for():
    def body() -> None:
        platform = get_platform()
        platform.current_stream().wait_event(platform.new_event())

    assert record(body)[0] == []


# -- places ------------------------------------------------------------------------------------------------------------


def test_events_have_the_place_that_was_set():
    recorder = Recorder()

    def body() -> list[Any]:
        with recorder.recording():
            torch.ones(2)
            recorder.place = Place("forward", 3, "mlp")
            dist.all_reduce(torch.ones(2))
            recorder.place = Place("build")
            torch.ones(2)
            return recorder.cut()

    with LoneWorld(2, 0, recorder) as world:
        events = world.run_alone(body)
    places = [recorder.places[event.place] for event in events if isinstance(event, (Op, Comm))]
    assert [place for place, _ in itertools.groupby(places)] == [
        Place("build"),
        Place("forward", 3, "mlp"),
        Place("build"),
    ]
    assert len(recorder.places) == 2


def test_while_it_is_asleep_only_memory_is_followed():
    recorder = Recorder()

    def body() -> list[Any]:
        with recorder.recording(), having(recorder, asleep=True):
            dist.all_reduce(torch.ones(2))
            return recorder.cut()

    with LoneWorld(2, 0, recorder) as world:
        assert {type(event) for event in world.run_alone(body)} == {Alloc, Free}
