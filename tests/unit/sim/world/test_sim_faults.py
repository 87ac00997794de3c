"""Faults: what each of them does to the rank that it strikes and to the others, and the errors that these get."""

from __future__ import annotations

import datetime
import os
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import sim
from hyper_parallel import fully_shard
from sim.faults import Corrupt, Drop, Freeze, Kill, Slow, SlowLink
from sim.kernel import scheduler, threads
from sim.kernel.context import current_context
from sim.observers.faults import losses

pytestmark = [pytest.mark.sim, pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert threads.busy_threads() == 0


def ran(body, world_size=3, faults=(), **options):
    """The world and the results."""
    with sim.world(world_size, faults=faults, **options) as world:
        return world, world.run(body)


def text_of(error: object) -> str:
    return re.sub(r"test_sim_faults\.py:\d+", "test_sim_faults.py:*", str(error))


def sums(count=3):
    def body() -> list[float] | str:
        found = []
        for _ in range(count):
            x = torch.tensor([float(dist.get_rank())])
            try:
                dist.all_reduce(x)
            except sim.RankLost as error:
                return text_of(error)
            found.append(x.item())
        return found

    return body


# -- values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        Kill(2, at=3),
        Freeze(0, at=("step 3", 1)),
        Kill(1, at="backward"),
        Kill(1, at=sim.at_time(0.25)),
        Corrupt(1, bits=3, at=0.01),
        Slow(0, 2.5),
        SlowLink(0, 1, 10.0),
        Drop(1, 0, at=4),
    ],
)
def test_a_fault_prints_as_what_makes_it(fault):
    assert eval(repr(fault), {"sim": sim}) == fault


NOT_AT = (
    "at is none of an operation's number (from 0), a region's name, (name, number), sim.at_time(seconds), or a "
    "probability (a float between 0 and 1)\n  at: {!r}\n  try: at=3, at='backward', at=0.01"
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Kill(-1), "cannot make a fault Kill: rank must be at least 0\n  rank: -1\n  try: rank=0"),
        (lambda: Kill(0, at=-1), f"cannot make a fault Kill: {NOT_AT.format(-1)}"),
        (lambda: Kill(0, at=1.0), f"cannot make a fault Kill: {NOT_AT.format(1.0)}"),
        (lambda: Freeze(0, at=0.0), f"cannot make a fault Freeze: {NOT_AT.format(0.0)}"),
        (lambda: Drop(0, 1, at=""), f"cannot make a fault Drop: {NOT_AT.format('')}"),
        (lambda: Corrupt(0, at=("step", -1)), f"cannot make a fault Corrupt: {NOT_AT.format(('step', -1))}"),
        (lambda: Kill(0, at=None), f"cannot make a fault Kill: {NOT_AT.format(None)}"),
        (lambda: Corrupt(0, bits=0), "cannot make a fault Corrupt: bits must be at least 1\n  bits: 0\n  try: bits=1"),
        (
            lambda: Slow(0, 0),
            "cannot make a fault Slow: factor must be a finite number above 0\n  factor: 0\n  try: factor=2.0",
        ),
        (
            lambda: SlowLink(0, 1, float("inf")),
            "cannot make a fault SlowLink: factor must be a finite number above 0\n  factor: inf\n  try: factor=2.0",
        ),
        (
            lambda: Drop(1, 1),
            "cannot make a fault Drop: it takes two different ranks\n  seen: sim.faults.Drop(1, 1, at=0)\n"
            "  try: sim.faults.Drop(0, 1, ...)",
        ),
        (
            lambda: sim.at_time(-1),
            "cannot name a moment of virtual time: seconds must be a finite number of at least 0\n"
            "  seconds: -1\n  try: seconds=0",
        ),
        (
            lambda: sim.world(2, faults=[Kill(2)]),
            "cannot inject sim.faults.Kill(2, at=0): there is no rank 2\n"
            "  world: ranks 0 to 1\n  try: one of the world's ranks, or a larger world_size",
        ),
        (
            lambda: sim.run(dist.barrier, 2, faults=[SlowLink(0, 5, 2.0)]),
            "cannot inject sim.faults.SlowLink(0, 5, 2.0): there is no rank 5\n"
            "  world: ranks 0 to 1\n  try: one of the world's ranks, or a larger world_size",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == message


def test_a_rank_of_another_kind_is_refused():
    with pytest.raises(TypeError) as caught:
        Freeze(True)
    assert str(caught.value) == "cannot make a fault Freeze: rank is a bool, not an int\n  rank: True\n  try: rank=1"


def test_the_verbs_of_a_world_add_the_values():
    with sim.world(3) as world:
        world.faults.kill(2, at=3)
        world.faults.freeze(1, at="backward")
        world.faults.slow(0, 2.0)
        world.faults.slow_link(0, 1, 3.0)
        world.faults.corrupt(1, 2, at=0.5)
        world.faults.drop(0, 1)
        assert world.faults.plan == (
            Kill(2, at=3),
            Freeze(1, at="backward"),
            Slow(0, 2.0),
            SlowLink(0, 1, 3.0),
            Corrupt(1, bits=2, at=0.5),
            Drop(0, 1, at=0),
        )
        assert world.faults.pending == list(world.faults.plan)
        assert world.replay == f"sim.run(..., world_size=3, seed=0, faults={list(world.faults.plan)!r})"


def test_how_the_log_reads():
    def body() -> None:
        x = torch.ones(1)
        sim.advance(1.0)
        dist.all_reduce(x)
        if dist.get_rank() == 0:
            dist.isend(x, 1)
        dist.barrier()

    plan = [Slow(0, 2.0), SlowLink(0, 1, 2.5), Corrupt(0, bits=2), Drop(0, 1), Freeze(0, at=2), Kill(1, at=1)]
    with sim.world(2, faults=plan, cost=lambda op, load: 1.0) as world:
        assert world.run(body) == [None, None]
    assert sorted(text_of(each.describe()) for each in world.faults.log) == [
        "rank 0 gave data with 2 flipped bits at its operation 0, all_reduce of group 'world', "
        "test_sim_faults.py:* in body",
        "rank 0 took 2 times as long from advance on, test_sim_faults.py:* in body",
        "rank 0 was frozen at its operation 2, barrier of group 'world', test_sim_faults.py:* in body",
        "rank 1 was killed at its operation 1, barrier of group 'world', test_sim_faults.py:* in body",
        "the message of rank 0 to rank 1 was lost at its operation 1, send of group 'world', "
        "test_sim_faults.py:* in body",
        "what ranks 0-1 share took 2.5 times as long from all_reduce on, test_sim_faults.py:* in body",
    ]
    assert world.faults.pending == []


# -- kill ------------------------------------------------------------------------------------------------------


def test_a_killed_rank_returns_nothing_and_the_others_raise():
    world, results = ran(sums(), faults=[Kill(1, at=2)])
    refusal = (
        "rank {} cannot complete all_reduce #2 of group 'world' (test_sim_faults.py:* in body): rank 1 is dead\n"
        "  rank 1 was killed at its operation 2, all_reduce of group 'world', test_sim_faults.py:* in body\n"
        "  try: except sim.RankLost, and go on in dist.new_group([0, 2], use_local_synchronization=True)"
    )
    assert results == [refusal.format(0), None, refusal.format(2)]
    (happening,) = world.faults.log
    assert happening[:5] == (Kill(1, at=2), 1, 2, "all_reduce", "world")
    assert happening.line.endswith("in body")
    assert world.faults.pending == []


def test_nobody_caught_it():
    with pytest.raises(sim.RankLost) as caught:
        sim.run(dist.barrier, 3, seed=7, faults=[Kill(1)])
    failure = caught.value
    assert isinstance(failure, sim.RankFailed)
    assert isinstance(failure, dist.DistBackendError)
    assert isinstance(failure.__cause__, sim.RankLost)
    assert failure.ranks == (1,)
    assert str(failure).startswith(f"rank {failure.rank} raised RankLost: rank {failure.rank} cannot complete barrier")
    assert "rank 1 was killed at its operation 0, barrier of group 'world'" in str(failure)
    assert str(failure).endswith("\n  replay: sim.run(..., world_size=3, seed=7, faults=[sim.faults.Kill(1, at=0)])")


def test_a_fault_past_the_end_stays_pending():
    world, results = ran(sums(), faults=[Kill(1, at=99)])
    assert results == [[3.0] * 3] * 3
    assert world.faults.pending == [Kill(1, at=99)]
    assert world.faults.log == []


def test_all_ranks_can_be_killed():
    assert ran(sums(), faults=[Kill(rank) for rank in range(3)])[1] == [None, None, None]


def test_what_a_dead_rank_still_does_reaches_nobody():
    seen = []

    def body() -> object:
        store = dist.distributed_c10d._get_default_store()
        try:
            dist.barrier()
        except sim.RankLost:
            return store.check(["key"])
        finally:
            if dist.get_rank() == 1:
                for act in (dist.barrier, lambda: store.set("key", "x"), lambda: time.sleep(1)):
                    with pytest.raises(BaseException) as caught:
                        act()
                    seen.append(isinstance(caught.value, Exception))
        return None

    assert ran(body, faults=[Kill(1)])[1] == [False, None, False]
    assert seen == [False] * 3


def test_a_dead_rank_that_catches_everything_is_dead_all_the_same():
    def body() -> str:
        try:
            dist.barrier()
        except BaseException:
            return "alive"
        return "?"

    assert ran(body, faults=[Kill(1)])[1] == ["alive", None, "alive"]


def test_a_dead_rank_cannot_end_the_world():
    def body() -> str:
        try:
            dist.barrier()
        except sim.RankLost:
            return "alive"
        except BaseException as end:
            raise ValueError("as it unwinds") from end
        return "?"

    assert ran(body, faults=[Kill(1)])[1] == ["alive", None, "alive"]


def test_an_operation_that_the_dead_rank_had_begun_is_lost_too():
    def body() -> bool:
        work = dist.all_reduce(torch.ones(1), async_op=True) if dist.get_rank() == 1 else None
        if work is None:
            store = dist.distributed_c10d._get_default_store()
            store.wait(["begun"])
            time.sleep(1)  # until rank 1 is dead
            work = dist.all_reduce(torch.ones(1), async_op=True)
        else:
            dist.distributed_c10d._get_default_store().set("begun", "")
            dist.barrier()
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), sim.RankLost)
        with pytest.raises(sim.RankLost, match="rank 1 is dead"):
            work.wait()
        return True

    assert ran(body, faults=[Kill(1, at=1)])[1] == [True, None, True]


def test_groups_without_the_dead_rank_go_on():
    def body() -> float:
        group = dist.new_group([0, 1])
        x = torch.ones(1)
        for _ in range(3):
            if dist.get_rank() < 2:
                dist.all_reduce(x, group=group)
            else:
                dist.barrier()
        return x.item()

    assert ran(body, faults=[Kill(2)])[1] == [8.0, 8.0, None]


def test_messages_to_and_from_a_dead_rank():
    def body() -> list[str]:
        found = []
        x = torch.ones(1)
        if dist.get_rank() == 1:
            dist.barrier()
        for act in (lambda: dist.send(x, 1), lambda: dist.recv(x, 1)):
            with pytest.raises(sim.RankLost) as caught:
                act()
            found.append(text_of(caught.value).splitlines()[0])
        return found

    line = "(test_sim_faults.py:* in <lambda>)"
    refusal = [
        f"rank 0 cannot complete send #0 to rank 1 in group 'world' {line}: rank 1 is dead",
        f"rank 0 cannot complete recv #1 from rank 1 in group 'world' {line}: rank 1 is dead",
    ]
    assert ran(body, world_size=2, faults=[Kill(1)])[1] == [refusal, None]


def test_what_the_dead_have_sent_and_nobody_received_is_lost():
    def body() -> float:
        x = torch.zeros(1)
        if dist.get_rank() == 1:
            dist.isend(torch.ones(1), 0)
            dist.barrier()
        time.sleep(1)
        with pytest.raises(sim.RankLost):
            dist.recv(x, 1)
        return x.item()

    assert ran(body, world_size=2, faults=[Kill(1, at=1)])[1] == [0.0, None]


def test_what_comes_after_a_timeout_goes_to_the_next_receive():
    def body() -> list[float]:
        late, x, y = dist.new_group([1, 2]), torch.zeros(1), torch.zeros(1)
        if dist.get_rank() == 0:
            with pytest.raises(sim.RankLost):
                dist.recv(x, 1)
            dist.recv(y, 1)
        else:
            sim.advance(100.0)
            with pytest.raises(sim.RankLost):
                dist.barrier(group=late)
            dist.send(torch.ones(1), 0)
        return [x.item(), y.item()]

    world, results = ran(body, faults=[Freeze(2)])
    assert results == [[0.0, 1.0], [0.0, 0.0], None]
    assert [world.clock(rank) for rank in range(2)] == [1900.0, 1900.0]


def test_a_group_with_a_dead_rank_that_is_made_later():
    def body() -> float:
        for _ in range(3):
            with pytest.raises(sim.RankLost, match="rank 1 is dead"):
                dist.barrier(group=dist.new_group([0, 1, 2]))
        return 0.0

    world, results = ran(body, faults=[Kill(1)])
    assert results == [0.0, None, 0.0]
    assert world.now == 3.0


def test_a_message_that_nobody_met_is_no_deadlock():
    def body() -> None:
        if dist.get_rank() == 0:
            dist.irecv(torch.zeros(1), 1)
        else:
            dist.send(torch.zeros(1), 0)

    assert ran(body, world_size=2, faults=[Kill(1)])[1] == [None, None]


def test_a_receive_from_anybody_waits_while_somebody_is_left():
    def body() -> object:
        x = torch.zeros(1)
        if dist.get_rank() == 0:
            sender = dist.recv(x)
            with pytest.raises(sim.RankLost):
                dist.recv(x)
            return sender
        if dist.get_rank() == 2:
            time.sleep(1)
            dist.send(x, 0)
        dist.send(x, 0)
        return None

    assert ran(body, faults=[Kill(1), Kill(2, at=1)])[1] == [2, None, None]


def test_a_key_that_the_dead_rank_should_have_set():
    def body() -> str:
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            dist.barrier()
            store.set("key", "x")
        with pytest.raises(sim.RankLost) as caught:
            store.get("key")
        return text_of(caught.value)

    world, results = ran(body, world_size=2, faults=[Kill(1)])
    assert re.sub(r"key '.*/key'", "key 'key'", results[0]) == (
        "rank 0 has waited 1800 virtual seconds at key 'key' of the store\n"
        "  rank 1 was killed at its operation 0, barrier of group 'world', test_sim_faults.py:* in body\n"
        "  try: except sim.RankLost, and go on in dist.new_group([0], use_local_synchronization=True)"
    )
    assert world.now == 1800.0


def test_a_mismatch_after_a_fault_is_a_mismatch():
    def body() -> None:
        try:
            dist.barrier()
        except sim.RankLost:
            group = dist.new_group([0, 2, 3])
            if dist.get_rank() == 0:
                dist.barrier(group=group)
            elif dist.get_rank() == 2:
                dist.all_reduce(torch.ones(1), group=group)

    with pytest.raises(sim.CollectiveMismatch, match=r"faults=\[sim.faults.Kill\(1, at=0\)\]\)$"):
        sim.run(body, 4, faults=[Kill(1)])


@pytest.mark.tier("test")
def test_who_retries_for_ever_is_stopped(monkeypatch):
    monkeypatch.setattr(losses, "_MAX_TIMEOUTS", 500)
    monkeypatch.setattr(scheduler, "_MAX_IDLE_POLLS", 500)

    def body() -> None:
        while True:
            try:
                dist.barrier()
            except sim.RankLost:
                continue

    for fault in (Kill(1), Freeze(1)):
        with pytest.raises(sim.Deadlock):
            sim.run(body, 2, faults=[fault])


def test_the_dead_stay_dead_and_added_faults_count_from_then_on():
    with sim.world(3) as world:
        assert world.run(sums(2)) == [[3.0, 3.0]] * 3
        world.faults.kill(1, at=1)
        results = world.run(sums(2))
        assert [type(result) for result in results] == [str, type(None), str]
        assert world.faults.log[0].number == 3  # of all its operations
        assert world.run(dist.get_rank) == [0, None, 2]


def test_ddp_dtensor_and_sharded_parameters_pass_it_on():
    def data_parallel() -> None:
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        with sim.region("backward"):
            model(torch.ones(2, 4)).sum().backward()

    def tensor_parallel() -> None:
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.ones(6), mesh, [Shard(0)])
        with sim.region("backward"):
            x.redistribute(mesh, [Replicate()]).to_local()

    def sharded() -> None:
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        model = fully_shard(torch.nn.Linear(6, 6), mesh=mesh)
        with sim.region("backward"):
            model(torch.ones(2, 6)).sum().backward()

    for body in (data_parallel, tensor_parallel, sharded):
        with pytest.raises(sim.RankLost, match="rank 1 was killed"):
            sim.run(body, 3, faults=[Kill(1, at="backward")])


def test_a_kill_takes_all_threads_of_the_rank():
    after = []

    def body() -> None:
        never, rank = threading.Event(), dist.get_rank()

        def helper() -> None:
            never.wait()
            after.append(rank)

        thread = threading.Thread(target=helper)
        thread.start()
        time.sleep(1)
        if rank == 1:
            dist.barrier()
        never.set()
        thread.join()

    ran(body, world_size=2, faults=[Kill(1)])
    assert after == [0]


def test_a_kill_in_a_helper_thread_ends_the_rank():
    def body() -> str:
        def helper() -> None:
            with pytest.raises(sim.RankLost):
                dist.barrier()

        thread = threading.Thread(target=helper)
        thread.start()
        thread.join()
        return "joined"

    assert ran(body, world_size=2, faults=[Kill(1)])[1] == ["joined", None]


def test_a_kill_in_a_helper_thread_ends_what_waits_for_it():
    def body() -> None:
        done = threading.Event()

        def helper() -> None:
            if dist.get_rank() == 1:
                dist.barrier()
            done.set()

        threading.Thread(target=helper).start()
        done.wait()

    assert ran(body, world_size=2, faults=[Kill(1)])[1] == [None, None]


# -- when ------------------------------------------------------------------------------------------------------


def in_regions() -> None:
    for _ in range(2):
        with sim.region("outer"):
            for _ in range(2):
                dist.barrier()
                with sim.region("inner"):
                    dist.barrier()


@pytest.mark.parametrize(
    ("at", "number"),
    [(0, 0), (5, 5), ("outer", 0), ("inner", 1), (("inner", 2), 5), (("outer", 7), 7), ("other", None)],
)
def test_regions_and_numbers(at, number):
    world = sim.world(2, faults=[Kill(1, at=at)])
    with world:
        if number is None:
            assert world.run(in_regions) == [None, None]
            assert world.faults.pending == [Kill(1, at=at)]
            return
        with pytest.raises(sim.RankLost):
            world.run(in_regions)
    assert [each.number for each in world.faults.log] == [number]


def test_a_region_is_nothing_without_ranks():
    with sim.region("backward"):
        assert sim.current_rank() is None


@sim.ranks(2, backends=("sim",))
def test_a_region_ends_with_its_block(ctx):
    with pytest.raises(ValueError), sim.region("a"):
        raise ValueError
    assert list(current_context().regions) == []


def test_a_moment_of_virtual_time():
    def body() -> None:
        for _ in range(4):
            sim.advance(0.5)
            dist.barrier()

    world = sim.world(2, faults=[Kill(1, at=sim.at_time(1.2))])
    with world, pytest.raises(sim.RankLost):
        world.run(body)
    assert [(each.number, each.time) for each in world.faults.log] == [(2, 1.5)]


@pytest.mark.tier("test")
def test_a_probability_follows_the_seed():
    def when(seed: int) -> int:
        world = sim.world(2, seed=seed, faults=[Kill(1, at=0.1)])
        with world, pytest.raises(sim.RankLost):
            world.run(lambda: [dist.barrier() for _ in range(500)])
        return world.faults.log[0].number

    numbers = [when(seed) for seed in range(20)]
    assert numbers == [when(seed) for seed in range(20)]
    assert len(set(numbers)) > 5
    assert 3 < sum(numbers) / 20 < 30


def test_what_may_happen_again_does():
    def body() -> None:
        for _ in range(200):
            dist.all_reduce(torch.zeros(1, dtype=torch.int32))

    world, _ = ran(body, world_size=2, faults=[Corrupt(1, at=0.2)])
    assert 20 < len(world.faults.log) < 60
    assert len({each.flips for each in world.faults.log}) > 5


# -- freeze ----------------------------------------------------------------------------------------------------


def test_who_waits_for_a_frozen_rank_times_out():
    world, results = ran(sums(), faults=[Freeze(1, at=1)])
    refusal = (
        "rank {} has waited 1800 virtual seconds for rank 1 at all_reduce #1 of group 'world' "
        "(test_sim_faults.py:* in body)\n"
        "  rank 1 was frozen at its operation 1, all_reduce of group 'world', test_sim_faults.py:* in body\n"
        "  try: except sim.RankLost, and go on in dist.new_group([0, 2], use_local_synchronization=True)"
    )
    assert results == [refusal.format(0), None, refusal.format(2)]
    assert [world.clock(rank) for rank in range(3)] == [1800.0, 0.0, 1800.0]


def test_who_does_not_wait_finishes():
    def body() -> str:
        if dist.get_rank() == 1:
            dist.barrier()
        return "done"

    world, results = ran(body, faults=[Freeze(1)])
    assert results == ["done", None, "done"]
    assert world.now == 0.0


def test_the_timeout_is_the_groups():
    def body() -> None:
        dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=60))
        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=5))
        for each in (group, None):
            with pytest.raises(sim.RankLost):
                dist.barrier(group=each)

    world, _ = ran(body, world_size=2, faults=[Freeze(1)])
    assert world.clock(0) == 65.0


def test_sleepers_wake_up_before_others_time_out():
    def body() -> float:
        if dist.get_rank() == 2:
            time.sleep(100)
            dist.send(torch.ones(1), 0)
        elif dist.get_rank() == 0:
            dist.recv(torch.ones(1), 2)
        with pytest.raises(sim.RankLost):
            dist.barrier()
        return 0.0

    world, results = ran(body, faults=[Freeze(1)])
    assert results == [0.0, None, 0.0]
    assert [world.clock(0), world.clock(2)] == [1900.0, 1900.0]


def test_others_time_out_while_somebody_sleeps_on_and_on():
    def body() -> int:
        beats = 0
        if dist.get_rank() == 2:
            store = dist.distributed_c10d._get_default_store()
            while not store.check(["over"]):
                time.sleep(60)
                beats += 1
            return beats
        with pytest.raises(sim.RankLost):
            dist.barrier()
        dist.distributed_c10d._get_default_store().set("over", "")
        return beats

    assert ran(body, faults=[Freeze(1)])[1] == [0, None, 30]


@pytest.mark.tier("test")
def test_any_number_of_short_sleeps_comes_before_a_timeout():
    def body() -> None:
        if dist.get_rank() == 2:
            for _ in range(20_000):
                time.sleep(0.1)
        else:
            with pytest.raises(sim.RankLost, match="rank 0 has waited 1800 virtual seconds"):
                dist.barrier()

    world, results = ran(body, faults=[Freeze(1)])
    assert results == [None] * 3
    assert world.clock(0) == 1800.0


@pytest.mark.tier("test")
def test_who_asks_again_and_again_is_told_as_well():
    def body() -> bool:
        work = dist.barrier(async_op=True)
        while not work.is_completed():
            pass
        with pytest.raises(sim.RankLost, match="others have waited 1800 virtual seconds for rank 1 and given up"):
            work.wait()
        return True

    assert ran(body, faults=[Freeze(1)])[1] == [True, None, True]


def test_a_frozen_rank_does_not_hear_of_an_error():
    heard = []

    def body() -> None:
        try:
            dist.barrier()
        except Exception:
            heard.append(dist.get_rank())
            raise ValueError("gave up") from None

    with pytest.raises(ValueError, match="gave up"):
        sim.run(body, 2, faults=[Freeze(1)])
    assert heard == [0]


def test_a_frozen_rank_does_not_hear_of_what_the_simulator_finds():
    heard = []

    def body() -> None:
        others = dist.new_group([0, 2])
        try:
            if dist.get_rank() == 1:
                dist.barrier()
            time.sleep(1)
            dist.barrier(group=others) if dist.get_rank() else dist.all_reduce(torch.ones(1), group=others)
        except sim.SimError:
            heard.append(dist.get_rank())
            raise

    with pytest.raises(sim.CollectiveMismatch):
        sim.run(body, 3, faults=[Freeze(1)])
    assert sorted(heard) == [0, 2]


def test_the_helper_threads_of_a_frozen_rank_say_nothing():
    def body() -> bool:
        def helper() -> None:
            time.sleep(10)
            dist.send(torch.ones(1), 0)

        if dist.get_rank() == 1:
            threading.Thread(target=helper).start()
            dist.barrier()
        with pytest.raises(sim.RankLost, match="rank 1 was frozen"):
            dist.recv(torch.ones(1), 1)
        return True

    assert ran(body, world_size=2, faults=[Freeze(1)])[1] == [True, None]


def test_the_helper_threads_of_a_frozen_rank_freeze_at_their_next_step():
    def body() -> None:
        def heart() -> None:
            while True:
                time.sleep(10)

        threading.Thread(target=heart, daemon=True).start()
        if dist.get_rank() == 1:
            dist.barrier()

    assert ran(body, world_size=2, faults=[Freeze(1)])[1] == [None, None]


@pytest.mark.tier("test")
def test_an_older_wait_times_out_before_a_newer_one():
    """Rank 0 waits for rank 1, which waits for a frozen one, and then for rank 0 in a new group: they meet there."""

    def body() -> float:
        first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
        rank, x = dist.get_rank(), torch.ones(1)
        with pytest.raises(sim.RankLost) as caught:
            dist.barrier(group=second if rank else first)
        assert caught.value.ranks == (2,)
        left = dist.new_group([0, 1])
        dist.all_reduce(x, group=left)
        return x.item()

    for fault in (Kill(2), Freeze(2)):
        for seed in range(30):
            assert ran(body, faults=[fault], seed=seed)[1] == [2.0, 2.0, None]


# -- going on without ------------------------------------------------------------------------------------------


def test_the_others_go_on_under_new_ranks():
    def body() -> tuple:
        me = dist.get_rank()
        try:
            dist.all_reduce(torch.ones(1))
        except sim.RankLost as error:
            left = [rank for rank in range(4) if rank not in error.ranks]
            dist.destroy_process_group()
            dist.init_process_group("nccl", rank=left.index(me), world_size=len(left))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        x = torch.tensor([float(me)])
        dist.all_reduce(x, group=mesh.get_group())
        part = dist.new_group([0, dist.get_world_size() - 1])
        y = torch.tensor([float(me)])
        if dist.get_rank() in (0, dist.get_world_size() - 1):
            dist.all_reduce(y, group=part)
        return dist.get_rank(), dist.get_world_size(), x.item(), y.item()

    world, results = ran(body, world_size=4, faults=[Kill(1)])
    assert results == [(0, 3, 5.0, 3.0), None, (1, 3, 5.0, 2.0), (2, 3, 5.0, 3.0)]
    assert {event.group for event in world.trace.events if event.axis == "dp"} == {(0, 2, 3)}


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [
        (
            lambda me: 0,
            2,
            "cannot init_process_group: two ranks ask to be rank 0 of 2\n  seen: simulated ranks {} and {}\n"
            "  try: rank=survivors.index(sim.current_rank()), with the same survivors on each of them",
        ),
        (
            lambda me: me,
            2,
            "cannot init_process_group: ranks that are left are numbered from 0\n"
            "  seen: rank 2 of 2, and the world began with 3\n"
            "  try: rank=survivors.index(sim.current_rank()), world_size=len(survivors)",
        ),
    ],
)
def test_new_ranks_that_do_not_fit(rank, size, message):
    def body() -> None:
        try:
            dist.barrier()
        except sim.RankLost:
            dist.destroy_process_group()
            dist.init_process_group("gloo", rank=rank(sim.current_rank()), world_size=size)

    with pytest.raises(ValueError) as caught:
        sim.run(body, 3, faults=[Kill(1)])
    text = str(caught.value.__cause__)
    assert text in (message.format(0, 2), message.format(2, 0))


def test_too_few_come():
    def body() -> str:
        os.environ.update(WORLD_SIZE="3")  # as it was
        try:
            dist.barrier()
        except sim.RankLost:
            dist.destroy_process_group()
        with pytest.raises(sim.RankLost) as caught:
            dist.init_process_group("gloo")
        return str(caught.value).splitlines()[0]

    assert ran(body, faults=[Kill(1)])[1][0] == (
        "rank 0 has waited 1800 virtual seconds at init_process_group of 3 ranks, where 2 have come"
    )


def test_who_comes_late_is_waited_for_again():
    def body() -> tuple[int, float]:
        x = torch.ones(1)
        try:
            dist.barrier()
        except sim.RankLost:
            time.sleep(5000 if sim.current_rank() == 2 else 0)
        dist.destroy_process_group()
        for attempt in range(1, 10):
            try:
                dist.init_process_group("gloo", rank=(0, 2).index(sim.current_rank()), world_size=2)
            except sim.RankLost:
                continue
            dist.all_reduce(x)
            return attempt, x.item()
        return 10, 0.0

    assert ran(body, faults=[Kill(1)])[1] == [(3, 2.0), None, (1, 2.0)]


# -- slow ------------------------------------------------------------------------------------------------------


def test_a_slow_rank_takes_longer_to_compute():
    def body() -> None:
        sim.advance(1.0)
        time.sleep(0.5)
        dist.barrier()

    world, _ = ran(body, faults=[Slow(1, 4.0)])
    assert [world.clock(rank) for rank in range(3)] == [6.0] * 3
    assert world.trace.of_rank(1)[0].issued == 6.0
    assert world.trace.of_rank(0)[0].issued == 1.5
    (happening,) = world.faults.log
    assert (happening.rank, happening.number, happening.op) == (1, -1, "advance")


def test_a_slow_link_slows_what_both_take_part_in():
    def body() -> None:
        pair = dist.new_group([0, 2])
        if dist.get_rank() != 1:
            dist.barrier(group=pair)
        dist.barrier()
        if dist.get_rank() < 2:
            x = torch.ones(1)
            dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)

    def spans(*faults):
        world, _ = ran(body, faults=faults, cost=lambda op, load: 1.0)
        events = world.trace.of_rank(0)
        return [event.end - event.start for event in events], [each.op for each in world.faults.log]

    assert spans() == ([1.0, 1.0, 1.0], [])
    assert spans(SlowLink(0, 1, 5.0)) == ([1.0, 5.0, 5.0], ["barrier"])
    assert spans(SlowLink(2, 0, 5.0)) == ([5.0, 5.0, 1.0], ["barrier"])


def test_no_link_is_slow_where_communication_is_free():
    world, _ = ran(sums(), faults=[SlowLink(0, 1, 5.0)])
    assert world.now == 0.0
    assert world.faults.pending == [SlowLink(0, 1, 5.0)]


# -- corrupt ---------------------------------------------------------------------------------------------------


def outputs_of(op: str) -> list[torch.Tensor]:
    """What a rank holds after one collective of integers, and then its own data as it was given."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(size, dtype=torch.int32) + 10 * rank
    out = torch.zeros(size * size, dtype=torch.int32)
    if op == "all_gather":
        dist.all_gather_into_tensor(out, mine)
    elif op == "all_to_all":
        dist.all_to_all_single(out[:size], mine)
    elif op == "reduce_scatter":
        dist.reduce_scatter_tensor(out[:1], mine)
    elif op == "gather":
        dist.gather(mine, list(out.view(size, size)) if rank == 1 else None, 1)
    elif op == "scatter":
        dist.scatter(out[:1], list(mine.split(1)) if rank == 1 else None, 1)
    elif op == "reduce":
        given = mine.clone()
        dist.reduce(given, 0)
        out[:size] = given if rank == 0 else 0
    elif op == "send":
        if rank == 1:
            dist.send(mine, 0)
        elif rank == 0:
            dist.recv(out[:size], 1)
    return [out, mine]


@pytest.mark.parametrize("op", ["all_gather", "all_to_all", "reduce_scatter", "gather", "scatter", "reduce", "send"])
def test_bits_flip_on_the_way_and_not_in_the_ranks_own_data(op):
    _, plain = ran(lambda: outputs_of(op))
    world, corrupt = ran(lambda: outputs_of(op), faults=[Corrupt(1, bits=1)])
    assert [mine.tolist() for _, mine in corrupt] == [mine.tolist() for _, mine in plain]
    differing = [(out ^ was)[out != was] for (out, _), (was, _) in zip(corrupt, plain, strict=True)]
    found = torch.cat(differing)
    (happening,) = world.faults.log
    ((tensor, element, bit),) = happening.flips
    assert (happening.rank, happening.op) == (1, op)
    assert len(found) == (3 if op == "all_gather" else 1)
    assert 0 <= element < 3
    assert tensor == 0 or op == "scatter"
    if op not in ("reduce", "reduce_scatter"):  # where a carry can reach other bits
        assert {int(each) & 0xFFFFFFFF for each in found} == {1 << bit}


def test_a_broadcast_arrives_corrupt_at_the_others():
    def body() -> list[int]:
        x = torch.full((2,), 7, dtype=torch.uint8)
        dist.broadcast(x, 1)
        return x.tolist()

    results = ran(body, faults=[Corrupt(1, bits=16)])[1]
    assert results == [[0xFF ^ 7] * 2, [7, 7], [0xFF ^ 7] * 2]


def test_it_waits_for_an_operation_to_which_the_rank_gives_data():
    def body() -> None:
        dist.barrier()
        dist.broadcast(torch.ones(1), 0)
        dist.all_reduce(torch.ones(0))
        dist.all_reduce(torch.ones(1))

    world, _ = ran(body, faults=[Corrupt(1)])
    assert [each.number for each in world.faults.log] == [3]


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "bfloat16", "float16", "int8", "int64", "bool", "complex64", "float8_e4m3fn"]
)
def test_every_dtype_can_be_corrupted(dtype):
    dtype = getattr(torch, dtype)

    def body() -> list[int]:
        mine = torch.zeros(4, 3, dtype=dtype).t()[1]  # a view, neither dense nor at the start
        out = [torch.zeros(4, dtype=dtype) for _ in range(2)]
        dist.all_gather(out, mine.contiguous())
        return [int(each.view(torch.uint8).count_nonzero()) for each in out]

    world, results = ran(body, world_size=2, faults=[Corrupt(1)])
    assert results == [[0, 1], [0, 1]]
    assert world.faults.log[0].flips[0].bit < 8 * torch.zeros(1, dtype=dtype).element_size()


def test_different_bits_flip():
    def body() -> int:
        x = torch.zeros(5, dtype=torch.uint8)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return sum(int(value).bit_count() for value in x)

    for bits, flipped in ((1, 1), (7, 7), (1000, 40)):
        assert ran(body, world_size=2, faults=[Corrupt(1, bits=bits)])[1] == [flipped] * 2


def test_data_that_cannot_be_read_is_left_alone():
    def body() -> None:
        dist.all_reduce(torch.ones(3, device="meta"))

    assert ran(body, faults=[Corrupt(1)])[0].faults.pending == [Corrupt(1)]


# -- drop ------------------------------------------------------------------------------------------------------


def test_a_lost_message_is_never_received_and_the_next_ones_are():
    def body() -> list:
        if dist.get_rank() == 0:
            for value in range(3):
                dist.send(torch.tensor([value]), 1)
            return []
        got: list = []
        for _ in range(3):
            x = torch.zeros(1, dtype=torch.int64)
            try:
                dist.recv(x, 0)
            except sim.RankLost as error:
                got.append((error.ranks, text_of(error)))
            else:
                got.append(x.item())
        return got

    for seed in range(5):
        results = ran(body, world_size=2, seed=seed, faults=[Drop(0, 1, at=1)])[1]
        assert results == [
            [],
            [
                0,
                (
                    (),
                    "rank 1 has waited 1800 virtual seconds for rank 0 at recv #1 from rank 0 in group 'world' "
                    "(test_sim_faults.py:* in body)\n"
                    "  the message of rank 0 to rank 1 was lost at its operation 1, send of group 'world', "
                    "test_sim_faults.py:* in body\n"
                    "  try: except sim.RankLost, and send it again",
                ),
                2,
            ],
        ]


def test_only_messages_of_that_pair_are_counted():
    def body() -> None:
        x = torch.zeros(1)
        if dist.get_rank() == 0:
            for to in (2, 2, 1, 1):
                dist.send(x, to)
        else:
            dist.recv(x, 0)
            dist.recv(x, 0)

    world = sim.world(3, faults=[Drop(0, 1, at=1)])
    with world, pytest.raises(sim.RankLost):
        world.run(body)
    assert [each.number for each in world.faults.log] == [3]


def test_a_lost_message_that_nobody_waits_for():
    def body() -> None:
        if dist.get_rank() == 0:
            dist.isend(torch.zeros(1), 1).wait()
        else:
            dist.irecv(torch.zeros(1), 0)

    assert ran(body, world_size=2, faults=[Drop(0, 1)])[1] == [None, None]


# -- with the rest of the simulator ------------------------------------------------------------------------------


def test_buffers_of_a_lost_operation_may_be_used_again():
    def body() -> float:
        x = torch.ones(2)
        try:
            dist.all_reduce(x)
        except sim.RankLost:
            return x.add_(1).sum().item()
        return 0.0

    assert ran(body, faults=[Kill(1)], check_races=True)[1] == [4.0, None, 4.0]


def test_without_losses_a_deadlock_is_a_deadlock():
    def body() -> None:
        if dist.get_rank():
            dist.barrier()

    with pytest.raises(sim.Deadlock):
        sim.run(body, 2, faults=[Slow(0, 2.0), Corrupt(0, at=5), Kill(0, at=5)])


def test_an_operation_that_a_living_rank_never_joins_is_still_found():
    def body() -> None:
        group = dist.new_group([0, 1])
        if dist.get_rank() == 0:
            dist.barrier(group=group, async_op=True)
        if dist.get_rank() == 2:
            dist.barrier()

    with pytest.raises(sim.Deadlock, match="never called by rank 1"):
        sim.run(body, 3, faults=[Kill(2)])
