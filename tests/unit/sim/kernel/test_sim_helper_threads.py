"""Threads that ranks start: they are the rank's, take turns, and are gone when the world is."""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import gc
import importlib
import multiprocessing
import os
import queue
import re
import shutil
import socket
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.thread import BrokenThreadPool
from multiprocessing.pool import Pool, ThreadPool
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

import sim
from sim.kernel import threads, waiting
from sim.kernel.threads import collector_paused
from sim.patches import locks

pytestmark = pytest.mark.sim


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert threads.busy_threads() == 0
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        if thread.name == "QueueFeederThread":  # multiprocessing's own, which nobody joins
            thread.join(10)
    assert [thread.name for thread in left if thread.is_alive() and not thread.name.startswith("sim-worker")] == []


# -- a helper is its rank's --------------------------------------------------------------------------------------


def test_a_helper_communicates_as_its_rank():
    def body() -> tuple[float, int, str]:
        seen: list[tuple[float, int, str]] = []

        def work() -> None:
            dist.all_reduce(x := torch.tensor([float(dist.get_rank())]))
            seen.append((x.item(), dist.get_rank(), os.environ["RANK"]))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return seen[0]

    with sim.world(3) as world:
        assert world.run(body) == [(3.0, rank, str(rank)) for rank in range(3)]
        assert sorted(event.rank for event in world.trace.events) == [0, 1, 2]


def test_a_helper_draws_from_its_ranks_generators():
    def drawn(helped: bool) -> list[float]:
        torch.manual_seed(dist.get_rank())
        numbers = [torch.rand(1).item()]
        if helped:
            thread = threading.Thread(target=lambda: numbers.append(torch.rand(1).item()))
            thread.start()
            dist.barrier()
            thread.join()
        else:
            numbers.append(torch.rand(1).item())
        return [*numbers, torch.rand(1).item()]

    assert sim.run(drawn, 3, args=(True,)) == sim.run(drawn, 3, args=(False,))


def test_grad_mode_and_intraop_threads_of_a_helper():
    def body() -> tuple[bool, int]:
        with torch.no_grad(), ThreadPoolExecutor(1) as pool:
            grad = pool.submit(torch.is_grad_enabled).result()
            return grad, pool.submit(torch.get_num_threads).result()

    assert sim.run(body, 2, intraop_threads=3) == [(True, 3)] * 2


@sim.ranks(2, backends=("sim",))
def test_groups_that_another_thread_of_the_rank_made(ctx):
    go = threading.Event()
    meshes = []

    def work() -> float:
        go.wait()
        x = distribute_tensor(torch.ones(4), meshes[0], [Shard(0)])
        meshes.append(init_device_mesh("cpu", (2,), mesh_dim_names=("of_the_helper",)))
        return x.redistribute(meshes[0], [Replicate()]).to_local().sum().item()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        meshes.append(init_device_mesh("cpu", (2,), mesh_dim_names=("of_the_rank",)))
        go.set()
        total = done.result()
    y = distribute_tensor(torch.ones(6), meshes[1], [Shard(0)])
    assert [total, y.redistribute(meshes[1], [Replicate()]).to_local().sum().item()] == [4.0, 6.0]


@sim.ranks(3, backends=("sim",))
def test_backward_on_a_helper(ctx):
    weight = torch.ones(1, requires_grad=True)

    def step() -> None:
        (weight * dist.get_rank()).backward()
        dist.all_reduce(weight.grad)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(step).result()
    assert weight.grad.item() == 3.0


# -- where it gives its turn up ----------------------------------------------------------------------------------


def prefetched(start) -> list[int]:
    """What a loader hands to its rank, which communicates between two pieces."""
    pieces: queue.Queue = queue.Queue(maxsize=2)

    def load() -> None:
        for piece in range(5):
            pieces.put(piece)
        pieces.put(None)

    start(load)
    seen = []
    while (piece := pieces.get()) is not None:
        seen.append(piece)
        dist.barrier()
    return seen


def test_a_bounded_queue():
    def with_thread(load) -> None:
        threading.Thread(target=load, daemon=True).start()

    assert sim.run(prefetched, 3, args=(with_thread,)) == [list(range(5))] * 3


@sim.ranks(3, backends=("sim",))
def test_an_executor_that_nobody_shuts_down(ctx):
    assert prefetched(ThreadPoolExecutor(2).submit) == list(range(5))


def test_every_way_to_wait():
    def body() -> list[object]:
        seen: list[object] = []
        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(lambda i=i: (dist.barrier(), i)[1]) for i in range(1)]
            seen.append([each.result() for each in concurrent.futures.as_completed(futures)])
            seen.append(len(concurrent.futures.wait([pool.submit(time.sleep, 1) for _ in range(2)]).done))
            seen.append(list(pool.map(abs, [-1, 2])))
            asked = pool.submit(dist.barrier)
            while not asked.done():
                pass
            event, condition, semaphore = threading.Event(), threading.Condition(), threading.Semaphore(0)
            barrier, tasks, simple = threading.Barrier(2), queue.Queue(), queue.SimpleQueue()

            def other() -> None:
                dist.barrier()
                event.set()
                with condition:
                    condition.notify()
                semaphore.release()
                barrier.wait()
                tasks.get()
                dist.barrier()
                tasks.task_done()
                simple.put("simple")

            with condition:
                pool.submit(other)
                condition.wait()
            seen += [event.wait(), semaphore.acquire(), barrier.wait() in (0, 1)]
            tasks.put(1)
            tasks.join()
            seen.append(simple.get())
        return seen

    for seed in range(3):
        assert sim.run(body, 2, seed=seed) == [[[0], 2, [1, 2], True, True, True, "simple"]] * 2


@pytest.mark.parametrize("name", ["Lock", "RLock"])
@sim.ranks(2, backends=("sim",))
def test_a_lock_that_is_held_while_others_run(ctx, name):
    """Looked up on the rank, since only what a rank makes is seen."""
    lock, order = getattr(threading, name)(), []

    def work() -> None:
        with lock:
            order.append("helper")

    with lock:
        thread = threading.Thread(target=work)
        thread.start()
        dist.barrier()
        assert not thread.join(timeout=1.0), "it waits for the lock"
        assert thread.is_alive()
        order.append("rank")
    thread.join()
    assert not thread.is_alive()
    assert order == ["rank", "helper"]


def test_a_lock_works_without_ranks_too():
    lock = sim.run(lambda: threading.Lock(), 1)[0]  # noqa: PLW0108 - looked up on the rank
    assert isinstance(lock, locks.Lock)
    with lock:
        assert lock.locked()
        assert not lock.acquire(False)
        assert not lock.acquire(timeout=0.001)
        thread = threading.Thread(target=lock.acquire)
        thread.start()
    thread.join()
    assert repr(lock).startswith("<locked sim.locks.Lock")
    with pytest.raises(ValueError, match="timeout"):
        lock.acquire(False, 1.0)


@sim.ranks(2, backends=("sim",))
def test_a_loop_that_asks_whether_a_thread_is_alive(ctx):
    thread = threading.Thread(target=dist.barrier)
    thread.start()
    while thread.is_alive():
        pass
    assert not thread.is_alive()


def test_timeouts_are_in_virtual_time():
    def body() -> list[object]:
        seen: list[object] = []
        thread = threading.Thread(target=time.sleep, args=(100.0,))
        thread.start()
        thread.join(30.0)
        seen.append(thread.is_alive())
        for wait in (
            lambda: queue.Queue().get(timeout=5.0),
            lambda: queue.SimpleQueue().get(timeout=5.0),
            lambda: concurrent.futures.Future().result(timeout=5.0),
            lambda: next(concurrent.futures.as_completed([concurrent.futures.Future()], timeout=5.0)),
        ):
            with pytest.raises((queue.Empty, TimeoutError, concurrent.futures.TimeoutError)):
                wait()
        seen.append(threading.Event().wait(5.0))
        seen.append(threading.Semaphore(0).acquire(timeout=5.0))
        condition = threading.Condition()
        with condition:
            seen.append(condition.wait_for(lambda: False, timeout=5.0))
        thread.join()
        return seen

    with sim.world(2) as world:
        assert world.run(body) == [[True, False, False, False]] * 2
        assert [world.clock(rank) for rank in range(2)] == [100.0, 100.0]


@sim.ranks(2, backends=("sim",))
def test_a_timer(ctx):
    order: list[str] = []
    timer = threading.Timer(2.0, order.append, args=("later",))
    timer.start()
    time.sleep(1.0)
    order.append("sooner")
    timer.join()
    assert order == ["sooner", "later"]


# -- determinism -------------------------------------------------------------------------------------------------


@pytest.mark.tier("test")
def test_a_seed_fixes_the_interleaving_of_helpers():
    def interleaving(seed: int) -> list[tuple[int, str]]:
        order: list[tuple[int, str]] = []

        def body() -> None:
            rank = dist.get_rank()

            def work(name: str) -> None:
                for _ in range(3):
                    order.append((rank, name))
                    time.sleep(0)

            with ThreadPoolExecutor(2) as pool:
                list(pool.map(work, "ab"))
            order.append((rank, "rank"))

        sim.run(body, 3, seed=seed)
        return order

    for seed in range(3):
        assert interleaving(seed) == interleaving(seed)
    assert len({tuple(interleaving(seed)) for seed in range(5)}) > 1


def test_what_goes_through_a_set_of_futures_does_so_in_one_order():
    def order(pad: int) -> list[list[int]]:
        keep: list[object] = []

        def body() -> list[int]:
            with ThreadPoolExecutor(2) as pool:
                futures = []
                for number in range(30):
                    keep.append(bytearray(pad * number))  # they lie elsewhere in memory
                    futures.append(pool.submit(int, number))
                concurrent.futures.wait(futures)
                return [future.result() for future in concurrent.futures.as_completed(futures)]

        return sim.run(body, 2)

    assert order(1) == order(777)


def test_an_idle_executor_says_nothing_when_the_world_ends(capfd):
    def body() -> None:
        pool = ThreadPoolExecutor(1)
        pool.submit(int).result()
        dist.barrier()
        if dist.get_rank() == 0:
            dist.barrier()

    with pytest.raises(sim.Deadlock):
        sim.run(body, 2)
    assert "Exception in worker" not in "".join(capfd.readouterr())


# -- how it ends -------------------------------------------------------------------------------------------------


def test_a_thread_that_is_not_joined_is_waited_for():
    done: list[int] = []

    def body() -> None:
        def late() -> None:
            time.sleep(1.0)
            dist.barrier()
            done.append(dist.get_rank())

        threading.Thread(target=late).start()

    sim.run(body, 3)
    assert sorted(done) == [0, 1, 2]


def test_a_daemon_is_ended():
    ended: list[int] = []

    def body() -> None:
        begun = threading.Event()

        def beat() -> None:
            begun.set()
            try:
                while True:
                    time.sleep(1.0)
            finally:
                ended.append(dist.get_rank())

        threading.Thread(target=beat, daemon=True).start()
        begun.wait()
        dist.barrier()

    sim.run(body, 3)
    assert sorted(ended) == [0, 1, 2]


def test_a_rank_that_raises_ends_the_helpers(capfd):
    def body() -> None:
        pool = ThreadPoolExecutor(2)
        pool.submit(dist.barrier)
        threading.Thread(target=queue.Queue().get).start()
        if dist.get_rank() == 1:
            raise ValueError("bad")
        dist.barrier()

    with pytest.raises(ValueError, match="rank 1 raised ValueError: bad"):
        sim.run(body, 3)
    assert capfd.readouterr().err == ""


def test_what_a_thread_raises_is_reported_and_the_rank_goes_on(capfd):
    def body() -> int:
        thread = threading.Thread(target=lambda: int("bad"), name="of the rank")
        thread.start()
        thread.join()
        return dist.get_rank()

    hook, seen = threading.excepthook, []
    threading.excepthook = lambda hooked: seen.append((hooked.exc_type, hooked.thread.name))
    try:
        assert sim.run(body, 2) == [0, 1]
    finally:
        threading.excepthook = hook
    assert seen == [(ValueError, "of the rank")] * 2


def test_what_a_future_raises_reaches_the_rank():
    def body() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(int, "bad").result()

    with pytest.raises(ValueError, match=r"rank \d raised ValueError: invalid literal"):
        sim.run(body, 2)


@sim.ranks(2, backends=("sim",))
def test_a_thread_that_is_started_twice_and_one_that_joins_itself(ctx):
    said: list[str] = []

    def work() -> None:
        with pytest.raises(RuntimeError) as found:
            threading.current_thread().join()
        said.append(str(found.value))

    thread = threading.Thread(target=work)
    thread.start()
    with pytest.raises(RuntimeError) as found:
        thread.start()
    said.append(str(found.value))
    thread.join()
    assert said == ["threads can only be started once", "cannot join current thread"]


# -- what is said ------------------------------------------------------------------------------------------------


def one_helper_skips() -> None:
    pieces: queue.Queue = queue.Queue()

    def load() -> None:
        if dist.get_rank() == 0:
            dist.barrier()
        pieces.put(1)

    threading.Thread(target=load, name="loader").start()
    pieces.get()
    if dist.get_rank() == 1:
        pieces.get()


def test_a_deadlock_names_the_thread():
    with pytest.raises(sim.Deadlock) as found:
        sim.run(one_helper_skips, 2)
    lines = [line.rpartition("  ")[0].rstrip() for line in str(found.value).splitlines()[1:4]]
    assert lines == [
        "  rank 0                   waits in Queue.get",
        "  rank 0, thread 'loader'  waits in barrier #0 of group 'world'  for rank 1",
        "  rank 1                   waits in Queue.get",
    ]
    assert "test_sim_helper_threads.py" in str(found.value).splitlines()[1]
    assert "because: rank 1 waits for something that no rank is about to do" in str(found.value)


@pytest.mark.parametrize(
    ("wait", "named"),
    [
        (lambda: threading.Event().wait(), "Event.wait"),
        (lambda: concurrent.futures.Future().result(), "Future.result"),
        (lambda: queue.SimpleQueue().get(), "SimpleQueue.get"),
        (lambda: threading.Semaphore(0).acquire(), "Semaphore.acquire"),
        (lambda: [lock := threading.Lock(), lock.acquire(), lock.acquire()], "Lock.acquire"),
    ],
)
def test_what_a_rank_waits_in(wait, named):
    with pytest.raises(sim.Deadlock, match=f"rank 0 +waits in {named} +test_sim_helper_threads.py"):
        sim.run(wait, 1)


def test_a_rank_that_joins_a_thread_which_waits():
    def body() -> None:
        thread = threading.Thread(target=threading.Event().wait, name="idle", daemon=True)
        thread.start()
        thread.join()

    with pytest.raises(sim.Deadlock, match=r"rank 0, thread 'idle' +waits in Event.wait") as found:
        sim.run(body, 1)
    assert "waits in Thread.join" in str(found.value)


def test_a_helper_that_waits_for_other_ranks_at_the_end_is_a_deadlock():
    def body() -> None:
        if dist.get_rank() == 0:
            threading.Thread(target=dist.barrier, name="late").start()

    with pytest.raises(sim.Deadlock, match=r"rank 0, thread 'late' +waits in barrier #0"):
        sim.run(body, 2)


# -- modes of a rank ---------------------------------------------------------------------------------------------


def test_a_helper_that_touches_a_buffer_in_flight():
    def body() -> None:
        work = dist.all_reduce(x := torch.ones(2), async_op=True)
        thread = threading.Thread(target=x.sum)
        thread.start()
        thread.join()
        work.wait()

    with pytest.raises(sim.InFlightBufferRace, match="reads a buffer that all_reduce #0 of group 'world' writes"):
        sim.run(body, 2, check_races=True)


def test_devices_are_mapped_on_a_helper():
    def body() -> str:
        with ThreadPoolExecutor(1) as pool:
            return str(pool.submit(lambda: torch.ones(1, device="cuda").device).result())

    assert sim.run(body, 2, map_device="cuda") == ["cpu"] * 2


# -- other processes ---------------------------------------------------------------------------------------------


@pytest.mark.tier("test")
def test_a_pool_of_processes_next_to_a_helper():
    """What other processes answer comes from threads that take no turns."""

    def body() -> list[object]:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
            alone = processes.submit(abs, -dist.get_rank()).result()
            with ThreadPoolExecutor(1) as pool:
                dist.barrier()
                both = pool.submit(lambda: processes.submit(abs, -3).result()).result()
            return [alone, both]

    assert sim.run(body, 2) == [[0, 3], [1, 3]]


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", ["multiprocess", "billiard", "loky", "joblib.externals.loky"])
def test_others_versions_of_multiprocessing(name, tmp_path, monkeypatch):
    """datasets, celery and joblib bring their own: here Python's, under their name."""
    folder = tmp_path.joinpath("site-packages", *name.split("."))
    shutil.copytree(Path(multiprocessing.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for package in folder.relative_to(tmp_path).parents[:-2]:
        tmp_path.joinpath(package, "__init__.py").touch()
    for file in folder.glob("*.py"):
        file.write_text(re.sub(r"(?<!_)\bmultiprocessing\b", name, file.read_text()))
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))

    def body() -> list[int]:
        context = importlib.import_module(name).get_context("fork")
        with context.Pool(1) as pool:
            found = pool.map(abs, [-dist.get_rank(), -5])
            pool.close()
            pool.join()
        dist.barrier()
        return found

    assert sim.run(body, 2) == [[0, 5], [1, 5]]
    for module in [each for each in sys.modules if each.startswith(name.partition(".")[0])]:
        monkeypatch.delitem(sys.modules, module)


class Squares(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index * index


@pytest.mark.tier("test")
def test_workers_that_load_next_to_a_helper():
    def body() -> list[int]:
        batches: queue.Queue = queue.Queue(2)

        def load() -> None:
            for batch in DataLoader(Squares(), batch_size=2, num_workers=1):
                batches.put(batch.tolist())
            batches.put([])

        with ThreadPoolExecutor(1) as pool:
            pool.submit(load)
            seen: list[int] = []
            while batch := batches.get():
                seen += batch
                dist.barrier()
            return seen

    assert sim.run(body, 2) == [[0, 1, 4, 9, 16, 25]] * 2


def ask_in_threads(answer) -> list[object]:
    """What threads, made in every way, find when asked; some are started by another thread of the rank."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(answer()))
    timer = threading.Timer(0.5, lambda: found.append(answer()))
    for each in (thread, timer):
        each.start()
        each.join()
    ended = queue.SimpleQueue()
    _thread.start_new_thread(lambda *args, **named: ended.put(answer()), (1,), {"named": 2})
    found.append(ended.get())

    async def main() -> list[object]:
        loop = asyncio.get_running_loop()
        return [await asyncio.to_thread(answer), await loop.run_in_executor(None, answer)]

    with ThreadPoolExecutor(1) as pool, ThreadPool(1) as other:
        within = pool.submit(lambda: ThreadPoolExecutor(1).submit(answer).result())
        mapped = other.map_async(lambda _: answer(), [1, 2])
        return [*found, pool.submit(answer).result(), within.result(), *mapped.get(), *asyncio.run(main())]


@pytest.mark.tier("test")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_thread_is_its_ranks_also_while_workers_load(workers):
    def body() -> list[object]:
        found = []
        for batch in DataLoader(Squares(), batch_size=3, num_workers=workers):
            found += ask_in_threads(lambda: (dist.get_rank(), dist.is_initialized(), os.environ["RANK"]))
            dist.all_reduce(batch)
        return found

    answers = sim.run(body, 2)
    assert [set(each) for each in answers] == [{(rank, True, str(rank))} for rank in range(2)]
    assert [len(each) for each in answers] == [2 * 9] * 2


@pytest.mark.tier("test")
def test_what_other_processes_call_back_is_their_ranks():
    """It runs on a thread that takes no turns: it learns who it is, may start threads, and must not communicate."""

    def body() -> list[object]:
        found: queue.Queue = queue.Queue()

        def answer(_: object) -> None:
            thread = threading.Thread(target=lambda: [found.put(dist.get_rank()), dist.barrier()])
            thread.start()
            time.sleep(0.01)
            try:
                dist.all_reduce(torch.ones(1))
            except sim.SimError as error:
                found.put(str(error).partition("\n")[0])

        context = multiprocessing.get_context("fork")
        with context.Pool(1) as pool, ProcessPoolExecutor(1, mp_context=context) as processes:
            pool.apply_async(abs, [-1], callback=answer)
            seen = [found.get(), found.get()]
            processes.submit(abs, -1).add_done_callback(answer)
            return sorted([*seen, found.get(), found.get()], key=str)

    refused = "a thread that takes no turns with rank {0}'s used one of the rank's process groups"
    assert sim.run(body, 2) == [[rank, rank, refused.format(rank), refused.format(rank)] for rank in range(2)]


@pytest.mark.tier("test")
@pytest.mark.parametrize("workers", [0, 1])
def test_an_executor_of_all_ranks_works_for_the_rank_that_submits(workers):
    shared, made = ThreadPoolExecutor(1), []

    def body(again: bool) -> list[object]:
        rank = dist.get_rank()
        if rank == 0 and not again:
            made.append(ThreadPoolExecutor(1))
            made[0].submit(int).result()
        dist.barrier()

        def work() -> list[object]:
            dist.all_reduce(x := torch.ones(1))
            return [dist.get_rank(), os.environ["RANK"], x.item()]

        found = []
        for _ in DataLoader(Squares(), batch_size=3, num_workers=workers):
            found += [pool.submit(work).result() for pool in (shared, made[0])]
            found += made[0].map(lambda _: dist.get_rank(), range(2))
        if not again and rank == 1:
            shared.shutdown()
            with pytest.raises(RuntimeError, match="after shutdown"):
                shared.submit(work)
        return found

    with sim.world(2) as world:
        for again in (False, True):
            assert world.run(body, (again,)) == [[*[[rank, str(rank), 2.0]] * 2, rank, rank] * 2 for rank in range(2)]
    assert shared.submit(lambda: 3).result() == 3, "the process has its own threads"
    shared.shutdown()
    with pytest.raises(BrokenThreadPool, match="the simulated rank that made this pool has ended"):
        made[0].submit(int)


def test_a_pool_of_threads_that_another_has_made():
    def body() -> None:
        if dist.get_rank() == 0:
            made.append(ThreadPool(1))
            assert made[-1].map(abs, [-1]) == [1]
        dist.barrier()
        if dist.get_rank() == 1:
            made[-1].map(abs, [-1])

    made = []
    with pytest.raises(sim.SimError, match=r"rank 1 cannot give work.*\n  seen: .* made by rank 0\n"):
        sim.run(body, 2)
    outside = ThreadPool(1)
    with pytest.raises(sim.SimError, match=r"rank . cannot .*\n  seen: .* made by the process, not by a rank\n"):
        sim.run(lambda: outside.map(abs, [-1]), 2)
    assert outside.map(abs, [-1]) == [1]
    outside.close()
    outside.join()  # the end of a `with` block does not wait for the threads


def test_a_pool_that_makes_a_thread_when_its_rank_has_ended(monkeypatch):
    """Its handler takes the end of the worker for an accident: the new one waited for a turn for ever."""

    def late(context: object, process: object, size: int, workers: list[threading.Thread], *rest: object) -> None:
        while workers and workers[0].exitcode is None:
            time.sleep(0.001)
        maintain(context, process, size, workers, *rest)
        made.extend(workers)

    def body() -> None:
        pools.append(ThreadPool(1))
        pools[-1].map(abs, [-1])

    pools, made, maintain = [], [], Pool._maintain_pool
    monkeypatch.setattr(Pool, "_maintain_pool", late)
    sim.run(body, 1)
    assert [thread.is_alive() for thread in made] == [False]


@pytest.mark.tier("test")
@pytest.mark.parametrize("pool", [ThreadPoolExecutor, ThreadPool])
def test_a_deadlock_of_threads_while_a_worker_lives(pool, monkeypatch):
    monkeypatch.setattr(waiting, "_IDLE_S", 0.3)  # s, for what another process may yet do

    def body() -> None:
        for _ in DataLoader(Squares(), batch_size=3, num_workers=1):
            with pool(1) as threads:
                list(threads.map(lambda _: dist.barrier() if dist.get_rank() == 0 else None, [1]))

    with pytest.raises(sim.Deadlock, match=r"rank 0, thread '.*' +waits in barrier #0 of group 'world'"):
        sim.run(body, 2)


class Pinned:
    """A batch with a method of its own, which the loader's pinning thread calls."""

    def __init__(self, items: list[int]) -> None:
        self.items, self.by = items, ""

    def pin_memory(self) -> Pinned:
        self.by = f"{dist.get_rank()} {os.environ['RANK']} {threading.current_thread() is threading.main_thread()}"
        return self


@pytest.mark.tier("test")
def test_a_pinning_thread_is_its_ranks(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)

    def body() -> list[str]:
        loader = DataLoader(Squares(), batch_size=3, num_workers=1, pin_memory=True, collate_fn=Pinned)
        seen = []
        for batch in loader:
            dist.barrier()
            seen += [batch.by, *ask_in_threads(dist.get_rank)]
        return seen

    assert sim.run(body, 2) == [[f"{rank} {rank} False", *[rank] * 9] * 2 for rank in range(2)]


class Asleep(Squares):
    def __getitem__(self, index: int) -> str:
        time.sleep(0.001)
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(os.environ["RANK"]))
        thread.start()
        thread.join()
        return found[0]


@pytest.mark.tier("test")
@sim.ranks(2, backends=("sim",))
def test_a_worker_sleeps_and_its_threads_are_its_ranks(ctx):
    assert list(DataLoader(Asleep(), batch_size=None, num_workers=1)) == [["0"] * 6, ["1"] * 6][ctx.rank]


def test_a_thread_that_no_rank_has_started_is_refused():
    """Whether it works for a rank, and for which, cannot be known."""

    def give(work) -> object:
        tasks.put(work)
        return answers.get()

    def serve() -> None:
        while (work := tasks.get()) is not None:
            try:
                answers.put(work())
            except sim.SimError as error:
                answers.put(str(error))

    tasks, answers = queue.SimpleQueue(), queue.SimpleQueue()  # of C: ranks wait for them in real time
    thread = threading.Thread(target=serve, name="outside", daemon=True)
    thread.start()
    asked = [dist.is_initialized, dist.get_rank, dist.barrier]
    found = sim.run(lambda: [give(work) for work in asked], 2)
    refused = "torch.distributed was asked on a thread of which it is not known whose it is\n  seen: thread 'outside', "
    assert all(answer.startswith(refused) for answers in found for answer in answers)
    assert give(dist.is_initialized) is False, "no ranks run"
    tasks.put(None)
    thread.join()


def test_an_event_that_a_thread_from_outside_sets():
    """Nobody else can run, and what comes from outside has come."""

    def body() -> bool:
        event = threading.Event()
        outside.append(event)
        set_it.release()
        is_set.acquire()
        return event.wait()

    outside: list[threading.Event] = []
    set_it, is_set = threading.Lock(), threading.Lock()
    set_it.acquire()
    is_set.acquire()

    def set_one() -> None:
        set_it.acquire()
        outside[0].set()
        is_set.release()

    thread = threading.Thread(target=set_one)
    thread.start()
    assert sim.run(body, 1) == [True]
    thread.join()


# -- event loops -------------------------------------------------------------------------------------------------


def run_async(main, world_size: int = 2, **options) -> tuple[list[object], float]:
    """What each rank's coroutine returned, and the virtual time when all had."""
    with sim.world(world_size, **options) as world:
        return world.run(lambda: asyncio.run(main())), world.now


def test_an_event_loop_waits_for_what_a_thread_does():
    async def main() -> int:
        return await asyncio.to_thread(lambda: 5)

    assert run_async(main) == ([5, 5], 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_threads_of_an_event_loop_communicate(seed):
    async def main() -> list[object]:
        def work() -> float:
            time.sleep(2.0)
            dist.all_reduce(x := torch.ones(1))
            return x.item()

        return await asyncio.gather(asyncio.to_thread(work), asyncio.sleep(1.0, "slept"))

    assert run_async(main, 3, seed=seed) == ([[3.0, "slept"]] * 3, 2.0)


def test_event_loops_are_in_virtual_time():
    async def main() -> list[float]:
        loop, ends = asyncio.get_running_loop(), []
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(10))
        ends.append(loop.time())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 5)
        ends.append(loop.time())
        time.sleep(1.0)
        return [*ends, loop.time()]

    assert run_async(main) == ([[3600.0, 3605.0, 3606.0]] * 2, 3606.0)


def test_an_event_loop_on_a_helper():
    def body() -> int:
        async def work() -> int:
            await asyncio.sleep(4.0)
            return dist.get_rank()

        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        found = asyncio.run_coroutine_threadsafe(work(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        return found

    with sim.world(2) as world:
        assert world.run(body) == [0, 1]
        assert world.now == 4.0


def test_sockets_and_processes_of_an_event_loop():
    async def main() -> list[object]:
        one, other = [await asyncio.open_connection(sock=end) for end in socket.socketpair()]
        one[1].write(b"hello")
        seen = [await other[0].read(5), await asyncio.to_thread(lambda: 7), await asyncio.sleep(3.0)]
        one[1].close()
        other[1].close()
        echo = await asyncio.create_subprocess_exec("echo", "hi", stdout=asyncio.subprocess.PIPE)
        return [*seen, (await echo.communicate())[0]]

    assert run_async(main) == ([[b"hello", 7, None, b"hi\n"]] * 2, 3.0)


@pytest.mark.tier("test")
def test_a_pool_of_processes_of_an_event_loop():
    async def main() -> object:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
            return await asyncio.get_running_loop().run_in_executor(processes, abs, -3)

    assert run_async(main) == ([3, 3], 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_event_loops_of_ranks_that_are_stopped_or_lost(seed):
    async def main() -> str:
        if dist.get_rank() == 1 and fails:
            raise ValueError("no good")
        try:
            await asyncio.gather(asyncio.to_thread(lambda: [dist.barrier(), dist.barrier()]), asyncio.sleep(1.0))
        except sim.RankLost:
            return "others are lost"
        return "all is well"

    fails = False
    faults = [sim.faults.Kill(1, at=1)]
    assert run_async(main, 3, seed=seed, faults=faults)[0] == ["others are lost", None, "others are lost"]
    fails = True
    with pytest.raises(ValueError, match="rank 1 raised ValueError: no good"):
        run_async(main, 3, seed=seed)


def test_an_event_loop_that_waits_in_vain():
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(sim.Deadlock, match=r"rank 1 +waits in an asyncio event loop +test_sim_helper_threads.py"):
        run_async(main)


# -- what people run into ----------------------------------------------------------------------------------------


@pytest.mark.tier("test")
def test_async_save(tmp_path: Path):
    def body(folder: Path) -> list[float]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        group = dist.new_group(backend="gloo")
        state = {"x": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]), "step": 3}
        saving = dcp.async_save(
            state, checkpoint_id=folder, process_group=group, async_checkpointer_type=AsyncCheckpointerType.THREAD
        )
        for _ in range(3):
            dist.all_reduce(torch.ones(1))  # training goes on
        saving.result()
        loaded = {"x": distribute_tensor(torch.zeros(8), mesh, [Shard(0)]), "step": 0}
        dcp.load(loaded, checkpoint_id=folder, process_group=group)
        assert loaded["step"] == 3
        return loaded["x"].full_tensor().tolist()

    for seed in range(3):
        folder = tmp_path / str(seed)
        assert sim.run(body, 2, args=(folder,), seed=seed) == [list(range(8))] * 2


@sim.ranks(2, backends=("sim",))
def test_a_data_loader_in_the_rank(ctx):
    data = TensorDataset(torch.arange(8.0))
    total = torch.zeros(1)
    for (batch,) in DataLoader(data, batch_size=2, num_workers=0, shuffle=True):
        dist.all_reduce(batch)
        total += batch.sum()
    assert total.item() == 56.0


def test_where_threads_are_is_read_without_the_collector():
    """A finalizer that starts a thread there hangs CPython before 3.12.1: a deadlock was never told."""
    with collector_paused():
        assert not gc.isenabled()
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()
    root = Path(sim.__file__).parents[1]
    sources = [path for package in ("sim", "hyper_parallel") for path in (root / package).rglob("*.py")]
    bare = re.compile(r"^(?! *with collector_paused\(\):$|    try:$).*\n.*sys\._current_\w+\(\)", re.MULTILINE)
    assert len([path for path in sources if "sys._current_" in path.read_text()]) >= 6, "there is something to look at"
    assert [path.name for path in sources if bare.search(path.read_text())] == []


def test_a_finalizer_that_starts_a_thread_does_not_stop_a_diagnosis():
    class Closing:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()

    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(100):
            Closing()
            with collector_paused():
                sys._current_exceptions(), sys._current_frames()
    finally:
        gc.set_threshold(*before)
