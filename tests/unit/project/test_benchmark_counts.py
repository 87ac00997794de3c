"""The benchmarks count right: memory, communication and intervals of cases that are worked out by hand."""

import math
import threading
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

import sim
from benchmarks import dims, shard
from benchmarks.engine import Protocol, Result
from benchmarks.engine_counts import CASES, Traffic, activations, held, one_rank, watch_memory
from benchmarks.toy import OptimizerOfPart
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.config import ParallelConfig
from hyper_parallel.trainer.loop import Trainer

pytestmark = pytest.mark.sim


def test_memory_is_that_of_what_is_live():
    with watch_memory() as memory:
        kept = torch.empty(1000)  # 4,000 bytes
        with record_function("phase: build"):
            dropped = torch.empty(500, dtype=torch.float64)  # 8,000 at most
            del dropped
            view = kept[:10]  # takes nothing
        with record_function("phase: after"):
            view.zero_()
    assert (memory.at_start("build"), memory.peak("build")) == (4000, 8000)
    assert (memory.at_start("after"), memory.peak("after")) == (4000, 4000)


def test_memory_of_a_resized_storage_is_its_size_of_the_moment():
    with watch_memory() as memory:
        full = torch.empty(1000)
        with record_function("phase: whole"):
            full.untyped_storage().resize_(0)
        with record_function("phase: freed"):
            torch.empty(30)
        with record_function("phase: again"):
            full.untyped_storage().resize_(4000)
    assert [memory.at_start(phase) for phase in ("whole", "freed", "again")] == [4000, 0, 0]
    assert [memory.peak(phase) for phase in ("whole", "freed", "again")] == [4000, 120, 4000]


def test_memory_does_not_shrink_by_what_was_there_before():
    with watch_memory():
        before = torch.empty(1000)  # the allocator goes on knowing its size
    with watch_memory() as memory:
        kept = torch.empty(10)
        with record_function("phase: release"):
            del before
        with record_function("phase: after"):
            kept.zero_()
    assert memory.at_start("release") == memory.at_start("after") == memory.peak("after") == 40


def test_memory_that_another_thread_releases_is_seen():
    with watch_memory() as memory:
        held = [torch.empty(1000)]
        releases = threading.Thread(target=held.clear)
        releases.start()
        releases.join()
        with record_function("phase: after"):
            torch.empty(10)
    assert [live for _, live in memory.live] == [4000, 40, 0]


def test_copies_that_a_process_group_makes_are_told_apart():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with watch_memory() as memory:
            tensor, into = torch.ones(1000), torch.empty(1000)
            with record_function("phase: collectives"):
                dist.reduce_scatter_tensor(into, tensor)
                dist.all_gather_into_tensor(into, tensor)
    finally:
        dist.destroy_process_group()
    seen = [(live, copies) for (_, live), copies in zip(memory.live, memory.copies, strict=True)]
    assert max(live for live, _ in seen) >= 12_000  # such as a clone of the input
    assert max(copies for _, copies in seen) >= 4000
    assert max(live - copies for live, copies in seen) == 8000


def test_memory_of_a_backward_is_seen():
    x, weight = torch.ones(10, 20), torch.ones(20, 30, requires_grad=True)
    with watch_memory() as memory:
        with record_function("phase: forward"):
            y = x @ weight  # 1,200 bytes; x and weight were there before
        with record_function("phase: backward"):
            y.backward(torch.ones(10, 30))
        with record_function("phase: after"):
            torch.empty(1)
    assert memory.peak("forward") == memory.at_start("backward") == 1200
    assert memory.at_start("after") == 1200 + 20 * 30 * 4  # y and the gradient
    assert memory.peak("backward") >= 1200 + 10 * 30 * 4 + 20 * 30 * 4


@pytest.mark.tier("test")
def test_what_an_unwrapped_model_holds_is_worked_out():
    elements = 256 * 256 * 2 + 4 * 12 * 256 * 256 + 9 * 2 * 256
    plain = held("plain", CASES[0], 1, 8)
    assert plain.resting == pytest.approx(3 * 4 * elements, abs=2000)  # parameters, two moments, counts of steps
    assert plain.peak >= 4 * 4 * elements
    logits = 8 * 256 * 4
    assert logits < activations(CASES[0], 1, 8) < plain.peak - plain.resting


@pytest.mark.tier("test")
def test_a_sharded_model_rests_at_its_part():
    elements = 256 * 256 * 2 + 4 * 12 * 256 * 256 + 9 * 2 * 256
    assert held("ours", CASES[0], 1, 8).resting == pytest.approx(3 * 4 * elements / 8, rel=0.01)


@pytest.mark.tier("test")
@pytest.mark.sim
@pytest.mark.parametrize("held", [shard.contest, shard.contest_with_sequence])
def test_contestants_of_tensor_parallelism_compute_the_same_and_are_timed(held):
    protocol = Protocol(shard.CONTESTANTS, steps=1, blocks=1, warmup=0)
    for seconds in sim.run(held, 2, (2, 8, protocol)):
        assert {name: len(blocks) for name, blocks in seconds.items()} == {"hand": 1, "ours": 1, "torch": 1}


def test_the_rank_of_a_still_world_is_not_taken_for_one_of_gloo():
    with one_rank(8):
        assert (dist.get_world_size(), get_platform("cpu").backend) == (8, "fake")
    assert get_platform("cpu").backend == "gloo"
    assert not dist.is_initialized()


def test_traffic_is_of_the_rank_with_the_most():
    def talk():
        rank = dist.get_rank()
        dist.all_gather(list(torch.empty(4, 3)), torch.ones(3))
        for _ in range(2):
            dist.all_reduce(torch.ones(8))
        if rank < 2:
            dist.broadcast(torch.ones(5), src=0, group=pairs[rank])

    pairs = {}

    def make_groups():
        pairs[dist.get_rank()] = dist.new_group([0, 1])

    with sim.world(4) as world:
        world.run(make_groups)
        world.trace.clear()
        world.run(talk)
    found = Traffic.of(world.trace)
    assert found.operations == {"all_gather": 1, "all_reduce": 2, "broadcast": 1}
    each = 3 * 12 + 2 * 2 * 32 * 3 // 4  # 12 bytes to and from three others; 2 N (n - 1) / n for each all_reduce
    assert found.sent == found.received == each + 20  # rank 0 gives 20 bytes more, rank 1 gets them


def test_overhead_is_a_ratio_of_differences():
    seconds = {"plain": [1.0, 1.0, 9.0], "ours": [2.0, 2.0, 11.0], "fsdp2": [5.0, 5.0, 17.0]}
    result = Result("sim", 8, "1x32", seconds)
    assert result.ratio("ours", "fsdp2")[0] == 0.4
    value, low, high = result.overhead("ours", "fsdp2")
    assert value == low == high == 0.25  # in each block (2 - 1) / (5 - 1) or (11 - 9) / (17 - 9): drawn in pairs
    assert math.isclose(result.overhead("ours", "fsdp2", "ours")[0], 0.0)


def test_an_optimizer_of_a_part_updates_that_part():
    model = nn.Linear(3, 3, bias=False)
    before = model.weight.detach().clone().view(-1)
    optimizer = OptimizerOfPart(model, 4)  # 3 of 9 elements
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    changed = model.weight.detach().view(-1) != before
    assert changed.tolist() == [True] * 3 + [False] * 6
    assert model.weight.grad is None


@pytest.mark.tier("test")
def test_what_ranks_hold_in_a_step_and_after_it_is_counted():
    run = dims.run_of(32, ParallelConfig(dp_shard=2), accumulate=2)
    run = replace(run, train=replace(run.train, batch_size=4, seq_len=8))
    run = replace(run, model=replace(run.model, num_hidden_layers=1))
    kept, taken = [], Trainer.step

    def keeping(trainer):
        kept.append(torch.ones(1000, device="npu"))
        return taken(trainer)

    with mock.patch.object(Trainer, "step", keeping):
        found = dims.footprint(run, 2)
    gradients = 4 * run.model.num_parameters()
    assert all(gradients <= each < gradients + 1000 for each in found.gradients)  # unsharded, until the last one
    assert all(0 <= each - 2 * 4000 < 1000 for each in found.left)  # what is kept here, and some numbers
    assert found.between_nodes() == 0 < found.microseconds()  # one node


def test_bytes_between_nodes_are_those_to_ranks_on_others():
    def talk():
        rank = dist.get_rank()
        dist.all_gather(list(torch.empty(8, 3)), torch.ones(3))
        if rank in (0, 4):
            other = torch.ones(5)
            dist.send(other, 4) if rank == 0 else dist.recv(other, 0)

    with sim.world(8) as world:
        world.run(talk)
    assert dims.Footprint([], [], [], [], [], [], world.trace).between_nodes() == 8 * 4 * 12 + 20
