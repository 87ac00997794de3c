"""Virtual time: what moves a rank's clock, what an operation takes, and that the interleaving does not matter."""

from __future__ import annotations

import fcntl
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st
from machine_kit import Made, machine

import sim
from hyper_parallel.core.machine import Load, find_machine
from hyper_parallel.core.machine.links import NodeSpread, collective_seconds, message_seconds
from sim.comm.process_group import moved_by_all_reduce
from sim.kernel import clock, scheduler

pytestmark = [pytest.mark.sim, pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")]


def one_second(op: str, load: Load) -> float:
    return 1.0


def ran(body, world_size=4, **options):
    with sim.world(world_size, **options) as world:
        world.run(body)
    return world


def test_nothing_takes_time_unless_asked():
    world = ran(lambda: (dist.barrier(), dist.all_reduce(torch.ones(3))))
    assert world.now == 0.0
    assert {(event.issued, event.start, event.end) for event in world.trace.events} == {(0.0, 0.0, 0.0)}


def test_a_collective_starts_when_the_last_member_has_come():
    def body() -> None:
        sim.advance(dist.get_rank())
        dist.barrier()
        sim.advance(0.5)

    for seed in range(5):
        world = ran(body, cost=one_second, seed=seed)
        assert [world.clock(rank) for rank in range(4)] == [4.5] * 4
        assert [(e.issued, e.start, e.end) for e in world.trace.events] == [(float(r), 3.0, 4.0) for r in range(4)]


def test_computing_overlaps_what_is_in_flight():
    def body() -> None:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        sim.advance(0.75)
        work.wait()

    assert ran(body, cost=one_second).now == 1.0
    assert ran(body, cost=lambda op, load: 0.5).now == 0.75


def test_a_group_does_one_thing_at_a_time_and_groups_do_not_wait_for_each_other():
    def body() -> None:
        other = dist.new_group([0, 1])
        for work in [dist.all_reduce(torch.ones(3), group=g, async_op=True) for g in (None, None, other)]:
            work.wait()

    world = ran(body, 2, cost=one_second)
    spans = [(e.start, e.end) for e in world.trace.of_rank(0) if e.op == "all_reduce"]
    assert spans == [(0.0, 1.0), (1.0, 2.0), (0.0, 1.0)]


def test_messages():
    def body() -> None:
        rank = dist.get_rank()
        sim.advance(rank)
        dist.send(torch.ones(3), rank + 1) if rank % 2 == 0 else dist.recv(torch.ones(3), rank - 1)

    for seed in range(5):
        world = ran(body, cost=one_second, seed=seed)
        assert [world.clock(rank) for rank in range(4)] == [2.0, 2.0, 4.0, 4.0]


def test_a_message_is_priced_by_its_bytes_and_the_oldest_one_is_received_first():
    def body() -> list[float]:
        rank, dtypes = dist.get_rank(), {1: torch.float64, 2: torch.float32}
        for sender in (2, 1):
            if rank == sender:
                sent = dist.isend(torch.full((1000,), float(rank), dtype=torch.float32), 0)
            dist.barrier()
        if rank:
            sent.wait()
            dist.send(torch.zeros(1000, dtype=dtypes[rank]), 0)
            return []
        first, second = torch.zeros(1000), torch.zeros(1000)
        sources = [dist.recv(each) for each in (first, second)]
        for sender, dtype in dtypes.items():
            dist.recv(torch.zeros(1000, dtype=dtype), sender)
        return [*sources, first[0].item(), second[0].item()]

    with sim.world(3, machine=machine("a byte in each second", Made(0.0, 0.0, 1.0))) as world:
        assert world.run(body)[0] == [2, 1, 2.0, 1.0]
    received = [event.end - event.start for event in world.trace.of_rank(0) if event.op == "recv"]
    assert received == [4000.0, 4000.0, 8000.0, 4000.0]


def test_all_reduces_move_twice_the_data_but_for_one_rank():
    for size, ranks in ((10, 4), (7, 3), (2, 5), (8, 1)):
        moved = [moved_by_all_reduce(size, ranks, member) for member in range(ranks)]
        assert sum(moved) == 2 * (ranks - 1) * size
        assert max(moved) - min(moved) <= max(ranks - 2, 0)


def test_operations_that_are_waited_for_together_are_completed_when_all_are():
    def body() -> None:
        rank, one = dist.get_rank(), torch.ones(1)
        if rank:
            dist.barrier() if rank == 2 else dist.send(one, 0)
            dist.send(one, 0) if rank == 2 else dist.barrier()
            return
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as both:
            for sender in (1, 2):
                dist.irecv(torch.zeros(1), sender)
        (work,) = both.works
        assert not any(work.is_completed() for _ in range(9)), "rank 2 sends behind the barrier"
        dist.barrier()
        work.wait()
        assert work.is_completed()

    sim.run(body, 3)


def test_a_loop_that_asks_until_it_is_done_ends_when_that_is():
    def body() -> int:
        work, asked = dist.barrier(async_op=True), 0
        while not work.is_completed():
            asked += 1
            sim.advance(0.3)
        return asked

    with sim.world(2, cost=one_second) as world:
        assert min(world.run(body)) == 4, "at 0.3, 0.6, 0.9 and 1.2 s, unless the other rank comes late"
        world.run(lambda: ask(dist.barrier(async_op=True)))
        assert world.clock(0) == world.trace.of_rank(0)[-1].end


def ask(work) -> None:
    while not work.is_completed():
        pass


def test_clocks_go_on_from_run_to_run():
    with sim.world(2, cost=one_second) as world:
        world.run(dist.barrier)
        world.run(dist.barrier)
        assert (world.clock(0), world.now) == (2.0, 2.0)
    assert world.now == 2.0


@pytest.mark.tier("test")
def test_the_prices_of_a_machine():
    def body() -> None:
        dist.all_reduce(torch.ones(1 << 20))
        dist.broadcast(torch.ones(1 << 20), src=0)
        if dist.get_rank() in (0, 8):
            x = torch.ones(1 << 20)
            dist.send(x, 8) if dist.get_rank() == 0 else dist.recv(x, 0)

    on, size, spread = find_machine("h100-sxm"), 4 << 20, NodeSpread(ranks=16, nodes=2, most=8)
    for on_what in ("h100-sxm", on):
        reduce, broadcast, message = ran(body, 16, machine=on_what).trace.of_rank(0)
        found = [event.end - event.start for event in (reduce, broadcast, message)]
        assert found == pytest.approx(
            [
                collective_seconds(on.prices, "all_reduce", size, spread)[0],
                collective_seconds(on.prices, "broadcast", size, spread)[0],
                message_seconds(on.prices, size, same_node=False)[0],
            ]
        )
    far = on.with_figures(node__devices=1)
    assert ran(dist.barrier, 2, machine=far).now > ran(dist.barrier, 2, machine=on).now > 0.0
    assert ran(dist.barrier, 1, machine=on).now == 0.0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"machine": "h1000"}, ValueError, "cannot find the hardware 'h1000'"),
        ({"machine": 3}, TypeError, "hardware is a int, not a name, a path or a Machine"),
        ({"cost": 3}, TypeError, "cost is an int, not something to call or None"),
    ],
)
def test_a_bad_option(options, error, message):
    with pytest.raises(error, match=message) as caught:
        sim.world(2, **options)
    assert "try:" in str(caught.value)


def test_a_cost_that_is_none():
    for cost in (-1.0, float("nan"), "1", None):
        with pytest.raises((ValueError, TypeError), match=r"cannot let time pass: the cost of barrier (must be|is) "):
            ran(dist.barrier, cost=lambda op, load, cost=cost: cost)


def test_advance_takes_seconds_of_a_rank():
    for seconds_ in (-1, float("inf"), "1", True):
        said = "cannot let time pass: the time that a rank computes (must be|is) "
        with pytest.raises((ValueError, TypeError), match=said) as caught:
            ran(lambda seconds_=seconds_: sim.advance(seconds_))
        assert "try: 0.001, a millisecond" in str(caught.value)
    with pytest.raises(sim.SimError, match="the caller is not a simulated rank"):
        sim.advance(1.0)


# -- sleep -----------------------------------------------------------------------------------------------------


def test_who_sleeps_wakes_in_the_order_of_virtual_time():
    for seed in range(5):
        order: list[tuple[int, int]] = []

        def body(order=order) -> None:
            for turn in range(3):
                clock.sleep(1.0 + 0.1 * dist.get_rank())
                order.append((turn, dist.get_rank()))

        world = ran(body, seed=seed)
        assert order == [(turn, rank) for turn in range(3) for rank in range(4)]
        assert world.clock(3) == pytest.approx(3.9)


def test_a_loop_that_sleeps_until_something_has_happened():
    done: list[int] = []

    def body() -> None:
        if dist.get_rank() == 0:
            while not done:
                clock.sleep(0.1)
        else:
            clock.sleep(1.05)
            done.append(1)

    for seed in range(5):
        done.clear()
        assert ran(body, 2, seed=seed).clock(0) == pytest.approx(1.1)


def test_others_run_while_a_rank_sleeps():
    def body() -> list[str]:
        if dist.get_rank() == 0:
            clock.sleep(1e9)
        dist.barrier()
        return []

    assert ran(body).now == 1e9


def test_while_a_rank_asks_the_sleep_of_another_passes():
    def body() -> None:
        if dist.get_rank() == 0:
            clock.sleep(5.0)
            dist.barrier()
        else:
            ask(dist.barrier(async_op=True))

    assert [ran(body, 3, seed=seed).now for seed in range(3)] == [5.0] * 3


@pytest.mark.tier("full")
def test_sleeping_for_ever_is_a_deadlock():
    def body() -> None:
        while True:
            clock.sleep(1.0)

    with pytest.raises(sim.Deadlock, match="asks again and again, in vain"):
        ran(body, 1)


def test_a_failure_ends_a_sleep():
    def body() -> None:
        if dist.get_rank() == 0:
            raise KeyError("bad")
        clock.sleep(1.0)
        clock.sleep(1.0)

    with pytest.raises(KeyError, match="rank 0 raised"):
        ran(body)


def test_elsewhere_sleep_is_times(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(clock, "_sleep_for_real", slept.append)
    with sim.world(2) as world:
        time.sleep(0.5)
        world.run(lambda: time.sleep(30))
    assert slept == [0.5]
    assert world.now == 30.0


@pytest.mark.parametrize("held_s", [0.3, None])
def test_a_lock_file_that_another_process_has_is_waited_for(
    held_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those of caches; here a thread that is no rank has it."""
    monkeypatch.setattr(scheduler, "_MAX_IDLE_POLLS", 0.5)  # 50 sleeps in a row: of 50 ms each if they are real
    path = tmp_path / "lock"
    with path.open("w") as file:
        if held_s is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
            threading.Timer(held_s, fcntl.flock, (file, fcntl.LOCK_UN)).start()

        def wait() -> int:
            if held_s is None:  # what no other process will do stays a deadlock
                while not (tmp_path / "never").exists():
                    time.sleep(0.05)
            with FileLock(path):
                return dist.get_rank()

        if held_s is None:
            with pytest.raises(sim.Deadlock, match=r"in vain: time\.sleep"):
                sim.run(wait, 2)
        else:
            assert sim.run(wait, 2) == [0, 1]


@pytest.mark.tier("full")
@pytest.mark.parametrize("lock", [fcntl.flock, fcntl.lockf])
@given(
    held_s=st.lists(st.integers(0, 5), min_size=2, max_size=4),
    unlocks=st.booleans(),
    meets=st.booleans(),
    seed=st.integers(0, 99),
)
def test_one_rank_at_a_time_has_the_lock_of_a_file(tmp_path_factory, lock, held_s, unlocks, meets, seed):
    path, name = tmp_path_factory.mktemp("locks") / "file", lock.__name__
    inside: list[int] = []

    def body() -> None:
        rank = dist.get_rank()
        with path.open("w") as file:
            getattr(fcntl, name)(file, fcntl.LOCK_EX)
            assert not inside
            inside.append(rank)
            time.sleep(held_s[rank])
            if meets:
                dist.new_group([rank], use_local_synchronization=True).barrier().wait()
            inside.remove(rank)
            if unlocks:
                getattr(fcntl, name)(file, fcntl.LOCK_UN)
            else:
                file.close()
        dist.barrier()
        with path.open("w+") as file:
            getattr(fcntl, name)(file, fcntl.LOCK_SH)
            dist.barrier()

    with sim.world(len(held_s), seed=seed) as world:
        world.run(body)
    assert max(held_s) <= world.now <= sum(held_s)


def test_who_waits_for_the_lock_of_a_file_gets_it_when_the_other_one_is_done(tmp_path):
    def body() -> None:
        with (tmp_path / "file").open("w") as file:
            if dist.get_rank() == 0:
                fcntl.flock(file, fcntl.LOCK_EX)
            dist.barrier()
            if dist.get_rank() == 0:
                time.sleep(3)
            else:
                fcntl.flock(file, fcntl.LOCK_SH)

    world = ran(body)
    assert [world.clock(rank) for rank in range(4)] == [3.0] * 4


@pytest.mark.tier("test")
def test_file_locks_that_ranks_never_get(tmp_path):
    def crossed() -> None:
        names = ["a", "b"] if dist.get_rank() else ["b", "a"]
        with (tmp_path / names[0]).open("w") as first, (tmp_path / names[1]).open("w") as second:
            fcntl.flock(first, fcntl.LOCK_EX)
            dist.barrier()
            fcntl.flock(second, fcntl.LOCK_EX)

    def over_a_barrier() -> None:
        with (tmp_path / "a").open("w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            dist.barrier()

    with pytest.raises(sim.Deadlock, match=r"rank 0 .* in vain: fcntl\.flock of a file that rank 1 has locked .*py:"):
        sim.run(crossed, 2)
    with pytest.raises(sim.Deadlock, match=r"rank (.) .* in vain: fcntl\.lockf of a file that rank (?!\1). has locked"):
        sim.run(over_a_barrier, 2)


def test_the_end_of_another_process_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a timeout, Python asks for it again and again; torch's compiler starts such processes."""
    monkeypatch.setattr(scheduler, "_MAX_IDLE_POLLS", 0.3)
    ended = sim.run(lambda: subprocess.run(["sleep", "0.5"], timeout=60, check=False).returncode, 2)
    assert ended == [0, 0]
