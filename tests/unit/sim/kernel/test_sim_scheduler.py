"""The interleaving: fixed by the seed, one rank at a time, and nothing is left behind however a world ends."""

from __future__ import annotations

import _thread
import gc
import os
import signal
import subprocess
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import sim
from sim.kernel import threads, watchdog
from sim.kernel.scheduler import Scheduler
from sim.kernel.waiting import Waitable

pytestmark = pytest.mark.sim


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert threads.busy_threads() == 0
    assert sim.run(lambda: 1, 2) == [1, 1], "a new world must start"


def interleaving(seed: int, world_size: int = 4) -> list[int]:
    """Who ran, in order: every rank notes itself before and after each of three collectives."""
    order: list[int] = []

    def body() -> None:
        for _ in range(3):
            order.append(dist.get_rank())
            dist.barrier()
            order.append(dist.get_rank())

    sim.run(body, world_size, seed=seed)
    return order


def test_a_seed_fixes_the_interleaving():
    for seed in range(5):
        assert interleaving(seed) == interleaving(seed)


def test_seeds_differ():
    orders = {tuple(interleaving(seed)) for seed in range(10)}
    assert len(orders) >= 9


def test_every_rank_takes_part_in_every_step():
    order = interleaving(3)
    assert sorted(order) == sorted([0, 1, 2, 3] * 6)
    assert sorted(order[:4]) == [0, 1, 2, 3], "nobody passes the first barrier before all are there"


def test_runs_of_one_world_are_interleaved_differently_and_replayable():
    def orders() -> list[list[int]]:
        with sim.world(4, seed=7) as world:
            seen = []
            for _ in range(4):
                order: list[int] = []
                world.run(lambda order=order: (order.append(dist.get_rank()), dist.barrier()))
                seen.append(order)
            return seen

    first = orders()
    assert first == orders()
    assert len({tuple(order) for order in first}) > 1


def test_one_rank_runs_at_a_time():
    running, most = [], []

    def body() -> None:
        for _ in range(20):
            running.append(1)
            most.append(len(running))
            sum(range(2_000))  # the interpreter may switch threads here, the scheduler does not
            running.pop()
            dist.barrier()

    sim.run(body, 4)
    assert set(most) == {1}


def test_a_loop_that_asks_lets_the_others_run():
    def body() -> float:
        x = torch.ones(1)
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():
            pass
        return x.item()

    for seed in range(3):
        assert sim.run(body, 4, seed=seed) == [4.0] * 4


# -- what is left after a world --------------------------------------------------------------------------------


def raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("bad")
    dist.barrier()


def skip_on_one() -> None:
    if dist.get_rank() != 1:
        dist.barrier()


def catch_everything() -> None:
    for _ in range(10_000):
        try:
            if dist.get_rank() == 1:
                return
            dist.barrier()
        except Exception:
            continue


def catch_after_failure() -> None:
    if dist.get_rank() == 0:
        raise KeyError("x")
    while True:
        try:
            dist.all_reduce(torch.ones(1))
        except Exception:
            continue


def end_at_once() -> None:
    raise SystemExit(3)


def interrupt_the_launcher() -> None:
    if dist.get_rank() == 0:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    while True:
        dist.barrier()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (raise_on_one, ValueError),
        (skip_on_one, sim.Deadlock),
        (lambda: dist.all_reduce(torch.ones(1 + dist.get_rank())), sim.CollectiveMismatch),
        (catch_everything, sim.Deadlock),
        (catch_after_failure, KeyError),
        (end_at_once, sim.RankFailed),
        (interrupt_the_launcher, KeyboardInterrupt),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.usefixtures("interruptible")
def test_no_thread_stays_busy(body, error, seed):
    with pytest.raises(error):
        sim.run(body, 4, seed=seed)
    assert threads.busy_threads() == 0


@pytest.mark.tier("test")
def test_a_rank_that_does_not_join_is_a_deadlock():
    def body() -> None:
        os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
        if os.environ["RANK"] != "2":
            dist.init_process_group("gloo")  # torch catches RuntimeError in there, and waits again

    with pytest.raises(sim.Deadlock, match=r"in vain: Store.add of 'default_pg/store_based_barrier_key:0'"):
        sim.run(body, 3, init=False)  # torch waits for 10 s, and looks whether others have joined, and waits again


def test_a_keyboard_interrupt_on_a_rank_stays_one():
    def body() -> None:
        if dist.get_rank() == 1:
            raise KeyboardInterrupt
        dist.barrier()

    with pytest.raises(KeyboardInterrupt):
        sim.run(body, 2)


def test_an_interrupt_before_the_first_rank_runs(monkeypatch):
    start = Scheduler._start
    calls = []

    def interrupted(self):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        start(self)

    monkeypatch.setattr(Scheduler, "_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sim.run(dist.barrier, 4)
    assert len(calls) == 2
    assert threads.busy_threads() == 0


def test_an_error_in_the_diagnosis_does_not_hang(monkeypatch):
    def broken(world):
        raise RuntimeError("the report is broken")

    monkeypatch.setattr("sim.explain.deadlock.deadlock", broken)
    with pytest.raises(RuntimeError, match="the report is broken"):
        sim.run(skip_on_one, 3)


@pytest.mark.tier("test")
def test_fifty_worlds_need_no_more_threads_than_one():
    sim.run(dist.barrier, 6)
    before = threading.active_count()
    for seed in range(50):
        sim.run(dist.barrier, 6, seed=seed)
    assert threading.active_count() == before


@pytest.mark.parametrize("first", [0, 1])
@sim.ranks(2, backends=("sim",))
def test_what_one_rank_still_waits_for_keeps_no_other_ranks_tensors(ctx, first):
    rank = dist.get_rank()
    if rank != first:
        dist.recv(torch.empty(1), first)
    given, gathered = torch.ones(4), torch.empty(8)
    work = dist.all_gather_into_tensor(gathered, given, async_op=True)
    if rank == first:
        dist.send(torch.ones(1), 1 - first)
        work.wait()
        tensors = weakref.ref(given), weakref.ref(gathered)
        del work, given, gathered
    dist.barrier()
    is_freed = rank != first or all(tensor() is None for tensor in tensors)
    dist.barrier()  # the other rank has its work until here
    assert is_freed


def test_a_world_frees_what_its_ranks_held():
    def body() -> list[weakref.ref]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
        y = (x + x).redistribute(mesh, [Replicate(), Shard(0)])
        loose = DTensor.from_local(torch.ones(2), mesh, [Replicate(), Replicate()])
        dist.all_reduce(plain := torch.ones(2))
        return [weakref.ref(thing) for thing in (mesh, x, y, loose, plain)]

    world = sim.world(4)
    with world:
        refs = [ref for found in world.run(body) for ref in found]
        refs += [weakref.ref(context) for context in world.contexts]
    refs.append(weakref.ref(world))
    del world
    gc.collect()
    assert [ref() for ref in refs if ref() is not None] == []


def test_what_a_rank_switched_on_for_its_thread_does_not_reach_the_next_world():
    def body() -> None:
        torch.set_default_device("meta")
        torch.set_autocast_enabled("cpu", True)
        torch.set_grad_enabled(False)

    sim.run(body, 2)

    def packs() -> None:
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x).__enter__()

    sim.run(packs, 2)

    def seen() -> tuple[str, bool, bool, bool]:
        saved = torch.ones(1, requires_grad=True).exp().grad_fn._raw_saved_result
        modes = torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()
        return str(torch.ones(1).device), *modes, saved.unpack_hook is None

    assert sim.run(seen, 2) == [("cpu", False, True, True)] * 2


def test_intraop_threads_are_the_ranks_own():
    before = torch.get_num_threads()
    assert sim.run(torch.get_num_threads, 2, intraop_threads=3) == [3, 3]
    assert torch.get_num_threads() == before
    assert sim.run(torch.get_num_threads, 2, intraop_threads=None) == [before] * 2
    fresh: list[int] = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert fresh == [before]


# -- threads ----------------------------------------------------------------------------------------------------


def test_a_thread_that_cannot_start_takes_the_world_down_cleanly(monkeypatch):
    class Full(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads.threading, "Thread", Full)
    with pytest.raises(sim.SimError, match=r"cannot start 500 ranks: the system gives \d+ threads and no more"):
        sim.run(dist.barrier, 500)


def test_a_busy_or_altered_worker_does_not_go_back_to_the_pool():
    worker = threads.lease(1)[0]
    worker.reusable = False
    threads.release([worker])
    worker.thread.join(10)
    assert not worker.thread.is_alive()
    stopped = []
    busy = SimpleNamespace(reusable=True, busy=True, stop=lambda: stopped.append(True))
    threads.release([busy])
    again = threads.lease(2)
    assert worker not in again
    assert busy not in again
    assert stopped == [True]
    threads.release(again)


def test_only_a_ranks_threads_communicate():
    problems: list[Exception] = []
    done = [_thread.allocate_lock() for _ in range(2)]  # real ones, which hold the turn
    start_new_thread = _thread.start_new_thread

    def body() -> None:
        group = dist.group.WORLD
        pending = dist.irecv(torch.ones(1), (dist.get_rank() + 1) % 2)

        def misuse() -> None:
            for use in (group.barrier, pending.wait):
                try:
                    use()
                except Exception as error:
                    problems.append(error)
            finished.release()

        finished = done[dist.get_rank()]
        finished.acquire()
        start_new_thread(misuse, ())  # by the function from before the world: it is nobody's
        finished.acquire()
        dist.barrier()
        dist.send(torch.ones(1), (dist.get_rank() + 1) % 2)
        pending.wait()

    sim.run(body, 2)
    assert len(problems) == 4
    refused = {
        f"a thread that takes no turns with rank {rank}'s used one of the rank's process groups" for rank in (0, 1)
    }
    refused.add("a thread that is not a rank's own waited for other ranks")
    assert {str(problem).split("\n")[0] for problem in problems} == refused


def test_a_rank_that_blocks_unseen_is_named(monkeypatch, capfd):
    seen: list[tuple[str, str]] = []
    found = _thread.allocate_lock()  # a real one, which holds the turn
    found.acquire()
    report = watchdog.report

    def note(who: str, seconds: float, stack: str) -> None:
        seen.append((who, stack))
        report(who, seconds, stack)
        found.release()

    monkeypatch.setattr(watchdog, "LIMIT_S", 0.1)
    monkeypatch.setattr(watchdog, "report", note)

    def wait_for_no_rank() -> None:
        found.acquire(timeout=60)

    sim.run(lambda: wait_for_no_rank() if dist.get_rank() == 1 else None, 3)
    assert [who for who, _ in seen] == ["rank 1"]
    assert "in wait_for_no_rank" in seen[0][1]
    assert "not given up its turn, so that no other rank can run" in capfd.readouterr().err


@pytest.mark.parametrize("pipes", [{"stdout": subprocess.PIPE}, {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}])
def test_a_rank_that_waits_for_a_process_of_its_own_is_not_accused(monkeypatch, capfd, pipes):
    monkeypatch.setattr(watchdog, "LIMIT_S", 0.05)
    sim.run(lambda: subprocess.run(["sleep", "0.5"], check=True, **pipes) and None, 2)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(watchdog, "COMPUTES_S", 0.05)
    sim.run(lambda: subprocess.run(["sleep", "0.5"], check=True, **pipes) and None, 2)
    assert "not given up its turn" in capfd.readouterr().err


def test_a_scheduler_needs_no_torch():
    done: list[int] = []
    things = [Waitable(), Waitable()]
    scheduler = Scheduler(0, leave=lambda _: None, enter=lambda _: None, stuck=lambda: sim.Deadlock("stuck"))

    def body(rank):
        if rank.rank == 1:
            scheduler.complete(things[0])
        else:
            scheduler.block(things[0])
        done.append(rank.rank)

    workers = threads.lease(2)
    scheduler.run(workers, [None, None], body)
    threads.release(workers)
    assert done == [1, 0]


def test_who_waits_until_a_time_that_is_over_wakes_at_its_own_now():
    order: list[int] = []
    scheduler = Scheduler(0, leave=str, enter=str, stuck=lambda: sim.Deadlock("stuck"), clocks=[5.0, 0.0])

    def body(rank):
        if rank.rank == 0:
            assert not scheduler.wait(Waitable(), until=1.0)
        else:
            scheduler.sleep(3.0)
        order.append(rank.rank)

    workers = threads.lease(2)
    scheduler.run(workers, [None] * 2, body)
    threads.release(workers)
    assert (order, scheduler.clocks) == ([1, 0], [5.0, 3.0])


def test_a_schedule_is_asked_only_where_several_can_run():
    started: list[int] = []
    things = [Waitable() for _ in range(3)]
    scheduler = Scheduler(0, leave=str, enter=str, stuck=lambda: sim.Deadlock("stuck"), schedule=iter([2, 1, 1]))

    def body(rank):
        started.append(rank.rank)
        if rank.rank == 0:  # alone: the others wait for it
            for thing in things:
                scheduler.complete(thing)
        else:
            scheduler.block(things[rank.rank])
            started.append(rank.rank)

    workers = threads.lease(3)
    scheduler.run(workers, [None] * 3, body)
    threads.release(workers)
    assert started == [2, 1, 0, 2, 1]
