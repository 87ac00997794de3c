"""A world from the outside: bad input, what a rank has for itself, the store, the trace, several runs in a row."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import init_process_group as imported_before_the_world
from torch.distributed.device_mesh import init_device_mesh

import sim
from hyper_parallel.platform import get_platform
from sim.comm import collectives
from sim.comm import trace as trace_module

pytestmark = pytest.mark.sim


# -- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, True, "8", 2.0, None, 65_537])
def test_a_world_size_that_is_none(size):
    kind = ValueError if type(size) is int else TypeError
    with pytest.raises(kind, match=rf"cannot make a world: world_size .*\n  world_size: {size!r}\n  try: sim.run"):
        sim.run(dist.get_rank, size)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"seed": "1"}, TypeError, "seed is a str, not an int"),
        ({"seed": True}, TypeError, "seed is a bool, not an int"),
        ({"intraop_threads": 0}, ValueError, "intraop_threads must be a finite number of at least 1"),
        ({"pin": 100_000}, ValueError, "ranks cannot be pinned to processor 100000"),
    ],
)
def test_a_bad_option(options, kind, message):
    with pytest.raises(kind, match=message) as caught:
        sim.run(dist.get_rank, 2, **options)
    assert "try:" in str(caught.value)


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "message"),
    [
        (3, (), None, "cannot run it on ranks: fn is an int"),
        (dist.get_rank, 5, None, "cannot pass arguments to get_rank: args is an int, not a list"),
        (dist.get_rank, "abc", None, "cannot pass arguments to get_rank: args is a str, not a list"),
        (dist.get_rank, (), 5, "cannot pass keyword arguments to get_rank: kwargs is an int"),
    ],
)
def test_what_cannot_be_called(fn, args, kwargs, message):
    with pytest.raises(TypeError, match=message) as caught:
        sim.run(fn, 2, args, kwargs)
    assert "try: sim.run(" in str(caught.value)
    with sim.world(2) as world, pytest.raises(TypeError, match=message):
        world.run(fn, args, kwargs)


def test_a_world_lives_once():
    world = sim.world(2)
    with pytest.raises(sim.SimError, match="this world has not begun"):
        world.run(dist.get_rank)
    with world:
        with pytest.raises(sim.SimError, match="this world has begun already"):
            world.__enter__()
        assert world.run(dist.get_rank) == [0, 1]
    with pytest.raises(sim.SimError, match="this world has ended"):
        world.run(dist.get_rank)
    with pytest.raises(sim.SimError, match="this world has ended"):
        world.__enter__()


def test_worlds_do_not_nest():
    with (
        sim.world(3),
        pytest.raises(sim.SimError, match="cannot begin while another one is alive\n  alive: a world of 3 ranks"),
    ):
        sim.run(dist.get_rank, 2)
    assert sim.run(dist.get_rank, 2) == [0, 1]


@pytest.mark.tier("test")
def test_a_world_lets_go_of_groups_that_all_members_have_destroyed():
    def some(rounds):
        for _ in range(rounds):
            group = dist.new_group([0, 1])
            if dist.get_rank() < 2:
                dist.all_reduce(torch.ones(2), group=group)
                dist.destroy_process_group(group)

    def half():
        dist.destroy_process_group(dist.new_group()) if dist.get_rank() else dist.new_group()

    with sim.world(3) as world:
        world.run(some, (600,))
        assert [ranks for _, ranks, _ in world.network.groups] == [(0, 1, 2)]
        assert len(world.network.groups_made.known) < 600
        with pytest.raises(
            sim.CollectiveMismatch, match=r"number 601\n.*of ranks 0-1 .*\n.*of ranks 0-1 .*\n.*of ranks 0, 2 "
        ):
            world.run(lambda: dist.new_group([0, 1] if dist.get_rank() < 2 else [0, 2]) and dist.barrier())
    with sim.world(3) as world:
        world.run(half)
        assert [ranks for _, ranks, _ in world.network.groups] == [(0, 1, 2)] * 2, "rank 0 may still use the second one"


def test_a_group_used_after_its_world():
    groups = sim.run(lambda: dist.group.WORLD, 2)
    with pytest.raises(sim.SimError, match="has ended"):
        groups[0].barrier()


def test_large_and_negative_seeds():
    for seed in (-5, 2**62, 2**80):
        assert sim.run(dist.get_rank, 2, seed=seed) == [0, 1]


def test_args_and_kwargs_reach_every_rank():
    assert sim.run(lambda a, *, b: (a, b, dist.get_rank()), 2, (1,), {"b": 2}) == [(1, 2, 0), (1, 2, 1)]


# -- what a rank has for itself --------------------------------------------------------------------------------


def draws(x: torch.Tensor) -> list[float]:
    values = []
    for _ in range(3):
        values += torch.nn.functional.dropout(x, 0.5).tolist() + torch.rand(2).tolist()
        dist.barrier()
    return values


@pytest.mark.tier("test")
def test_random_numbers_do_not_depend_on_the_interleaving():
    def body() -> list[float]:
        torch.manual_seed(dist.get_rank())
        return draws(torch.ones(8))

    first = sim.run(body, 4)
    assert all(sim.run(body, 4, seed=seed) == first for seed in range(30))
    torch.manual_seed(2)
    alone = []
    for _ in range(3):
        alone += torch.nn.functional.dropout(torch.ones(8), 0.5).tolist() + torch.rand(2).tolist()
    assert first[2] == alone, "the numbers are those of one process with that seed"


def test_the_process_keeps_its_random_state():
    torch.manual_seed(0)
    expected = torch.rand(3).tolist()
    torch.manual_seed(0)
    sim.run(lambda: torch.rand(5), 2)
    with pytest.raises(ValueError, match="bad"):
        sim.run(lambda: (torch.rand(5), int("bad")), 2)
    assert torch.rand(3).tolist() == expected


def c_environment(name: str) -> bytes | None:
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    return libc.getenv(name.encode())


def test_the_environment_is_the_ranks_own(monkeypatch):
    monkeypatch.setenv("SIM_TEST_OLD", "before")
    monkeypatch.delenv("SIM_TEST_NEW", raising=False)
    before = dict(os.environ)

    def body() -> tuple:
        rank = os.environ["RANK"]
        os.environ["SIM_TEST_NEW"] = f"new {rank}"
        os.environ["SIM_TEST_OLD"] = f"changed {rank}"
        if rank == "1":
            del os.environ["SIM_TEST_OLD"]
        dist.barrier()
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SIM_TEST_NEW", "SIM_TEST_OLD")
        return (
            tuple(os.environ.get(name) for name in names),
            "PATH" in os.environ,
            len(os.environ) == len(os.environ.copy()),
        )

    assert sim.run(body, 3) == [
        (("0", "0", "3", "3", "new 0", "changed 0"), True, True),
        (("1", "1", "3", "3", "new 1", None), True, True),
        (("2", "2", "3", "3", "new 2", "changed 2"), True, True),
    ]
    assert dict(os.environ) == before
    assert c_environment("SIM_TEST_OLD") == b"before"
    assert c_environment("SIM_TEST_NEW") is None


def test_torch_distributed_is_the_ranks_own():
    assert not dist.is_initialized()

    def body() -> tuple:
        if dist.get_rank() == 1:
            dist.destroy_process_group()
        return dist.is_initialized()

    assert sim.run(body, 3) == [True, False, True]
    assert not dist.is_initialized()
    assert sim.current_rank() is None
    assert sim.run(sim.current_rank, 2) == [0, 1]


def test_exception_hook_stays(monkeypatch):
    hook = sys.excepthook
    sim.run(lambda: dist.init_process_group("gloo"), 2, init=False)
    assert sys.excepthook is hook


def test_the_device_of_a_rank():
    def body() -> tuple:
        platform = get_platform()
        return platform.backend, platform.device_type, platform.name(), get_platform("cpu").backend

    assert sim.run(body, 2) == [("sim", "cpu", "simulated rank", "sim")] * 2
    assert get_platform("cpu").backend == "gloo"


# -- init_process_group ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", [True, False])
@pytest.mark.parametrize(
    ("asked", "reported"),
    [("nccl", "nccl"), ("hccl", "hccl"), ("gloo", "gloo"), (None, "sim"), ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl")],
)
@pytest.mark.filterwarnings("ignore:Attempted to get default timeout for nccl")
def test_any_backend_is_simulated_under_its_name(asked, reported, init):
    def body() -> tuple:
        dist.init_process_group(asked)
        group = dist.new_group([0, 1])
        dist.all_reduce(x := torch.ones(1))
        return dist.get_backend(), dist.get_backend(group), x.item(), dist.get_rank(), dist.get_world_size()

    assert sim.run(body, 2, init=init) == [(reported, reported, 2.0, rank, 2) for rank in range(2)]


@pytest.mark.parametrize("backend", ["gloo", "nccl", "hccl"])
def test_ddp_takes_groups_of_every_name(backend):
    def body() -> tuple[str, float]:
        layer = torch.nn.Linear(2, 1)
        net = torch.nn.parallel.DistributedDataParallel(layer)
        net(torch.ones(1, 2) * (dist.get_rank() + 1)).sum().backward()
        return dist.get_backend(), layer.weight.grad.sum().item()

    assert sim.run(body, 2, backend=backend) == [(backend, 3.0)] * 2


def test_a_backend_that_nobody_provides():
    with pytest.raises(ValueError, match="backend 'ncll' is one that nobody provides"):
        sim.run(lambda: dist.init_process_group("ncll"), 2)


@pytest.mark.parametrize("init", [True, False])
@pytest.mark.parametrize("call", [lambda: dist.init_process_group("mpi"), lambda: dist.new_group([0], backend="mpi")])
def test_mpi_is_refused(init, call):
    def body() -> None:
        if not init and call.__code__.co_names[1] == "new_group":
            dist.init_process_group("gloo")
        call()

    with pytest.raises(ValueError, match="'mpi' takes its ranks from mpirun, and not from torchrun or sim\n") as e:
        sim.run(body, 2, init=init)
    assert "mpi," not in str(e.value).split("known:")[1]
    assert "  try: backend='nccl', 'hccl' or 'gloo', or none" in str(e.value)


def test_the_first_init_process_group_is_accepted_and_the_second_is_torchs_error():
    sim.run(lambda: dist.init_process_group("gloo"), 2)
    with pytest.raises(ValueError, match="twice"):
        sim.run(lambda: (dist.init_process_group("gloo"), dist.init_process_group("gloo")), 2)


def test_init_process_group_imported_by_name_before_the_world():
    assert sim.run(lambda: (imported_before_the_world("gloo"), dist.get_backend())[1], 2) == ["gloo"] * 2


@pytest.mark.parametrize("init", [True, False])
@pytest.mark.parametrize(
    "identity", [{"rank": 0, "world_size": 2}, {"rank": 5, "world_size": 3}, {"rank": 2, "world_size": 3, "skip": 2}]
)
def test_a_wrong_rank_or_world_size_is_refused(identity, init):
    identity = {name: value for name, value in identity.items() if name != "skip"} | (
        {"rank": 1, "world_size": 3} if "skip" in identity else {}
    )
    with pytest.raises(ValueError, match=r"cannot init_process_group: this is rank \d of 3\n  seen: rank ") as caught:
        sim.run(lambda: dist.init_process_group("gloo", init_method="env://", **identity), 3, init=init)
    assert "try: leave out rank and world_size" in str(caught.value)


def test_a_script_that_says_who_it_is():
    def body() -> int:
        store = dist.HashStore()  # replaced: waiting in it would not give up the turn
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        dist.barrier()
        return dist.get_rank()

    assert sim.run(body, 3, init=False) == [0, 1, 2]


def test_a_group_over_a_tcp_store_of_the_script():
    def body() -> tuple[int, bytes, str, int, bool]:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.TCPStore("localhost", 29_501, size, is_master=rank == 0)  # waits for the others
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        if rank == 1:
            time.sleep(1)
            store.set("said", "hello")
        heard = store.get("said")
        return dist.get_rank(), heard, store.host, store.port, store.check(["never"])

    assert sim.run(body, 3, init=False) == [(rank, b"hello", "localhost", 29_501, False) for rank in range(3)]


def test_stores_of_a_rank_do_not_block_the_others(tmp_path):
    def body() -> list[bytes]:
        rank = dist.get_rank()
        served = dist.TCPStore("localhost", 29_501, is_master=rank == 2)  # a client may come before its server
        stores = [dist.FileStore(f"{tmp_path}/store", 3), dist.PrefixStore("mine", served), dist.HashStore()]
        for place, store in enumerate(stores):
            if rank == 0 or place == 2:
                time.sleep(1)
                store.set("key", f"of rank {rank}")
        return [store.get("key") for store in stores]

    for seed in range(3):
        results = sim.run(body, 3, seed=seed)
        assert results == [[b"of rank 0", b"of rank 0", f"of rank {rank}".encode()] for rank in range(3)]
    assert not os.listdir(tmp_path)


def test_a_wait_for_a_key_that_gives_up():
    def body() -> tuple[str, bytes, float]:
        store = dist.TCPStore("localhost", 29_501, is_master=dist.get_rank() == 0)
        with pytest.raises(dist.DistStoreError, match="wait timeout after 2000ms, keys: /key"):
            store.wait(["key"], timedelta(seconds=2))
        store.set_timeout(timedelta(seconds=3))
        with pytest.raises(dist.DistStoreError) as gave_up:
            store.get("key")
        if dist.get_rank() == 0:
            time.sleep(1)
            store.set("key", "value")
        value = store.get("key")
        time.sleep(10)  # an alarm that was left over would end this
        return str(gave_up.value), value, store.timeout.total_seconds()

    with sim.world(2) as world:
        assert world.run(body) == [("wait timeout after 3000ms, keys: /key", b"value", 3.0)] * 2
        assert world.now == pytest.approx(16)


@sim.ranks(2, backends=("sim",))
def test_queues_of_a_store(ctx):
    rank = dist.get_rank()
    store = dist.TCPStore("localhost", 29_501, is_master=rank == 0)
    if rank == 0:
        time.sleep(1)
        for value in ("first", b"second"):
            store.queue_push("work", value)
        store.queue_push("more", "third")
    taken = [store.queue_pop("work"), store.queue_pop("more")] if rank == 1 else []
    dist.barrier()
    with pytest.raises(dist.QueueEmptyError):
        store.queue_pop("more", False)
    store.set_timeout(timedelta(seconds=2))
    with pytest.raises(dist.DistStoreError, match="wait timeout after 2000ms, keys: /more"):
        store.queue_pop("more")
    assert (taken, store.queue_len("work")) == [([], 1), ([b"first", b"third"], 1)][ctx.rank]


def test_two_servers_on_one_port():
    with pytest.raises(dist.DistNetworkError, match=r"cannot listen: rank \d is the master of port 29501 already"):
        sim.run(lambda: dist.TCPStore("localhost", 29_501, is_master=True), 2)


def test_a_server_that_nobody_starts():
    with pytest.raises(sim.Deadlock, match="waits in TCPStore of port 29501 for its master"):
        sim.run(lambda: dist.TCPStore("localhost", 29_501), 2)
    with pytest.raises(dist.DistNetworkError, match="timed out after 1000ms while trying to connect to port 29501"):
        sim.run(lambda: dist.TCPStore("localhost", 29_501, timeout=timedelta(seconds=1)), 2)
    with pytest.raises(sim.Deadlock, match="key 'init/' of the store"):
        sim.run(lambda: dist.TCPStore("localhost", 29_501 + dist.get_rank(), 2, is_master=True), 2)


def test_a_value_that_no_store_takes():
    with pytest.raises(TypeError, match="cannot put a value into the store: it is 3, of type int"):
        sim.run(lambda: dist.HashStore().set("key", 3), 1)


@pytest.mark.parametrize(
    ("lack", "options", "error"),
    [
        ("RANK", {}, r"environment variable RANK expected, but not set"),
        ("WORLD_SIZE", {"rank": 0}, r"environment variable WORLD_SIZE expected, but not set"),
        ("MASTER_ADDR", {}, r"environment variable MASTER_ADDR expected, but not set"),
        ("", {"init_method": "foo://bar"}, r"No rendezvous handler for foo://"),
        ("", {"init_method": "file:///tmp/shared"}, r"rank parameter missing"),
    ],
)
def test_what_no_real_launch_would_accept(lack, options, error):
    def body() -> None:
        os.environ.pop(lack, None)
        dist.init_process_group("gloo", **options)

    with pytest.raises((ValueError, RuntimeError), match=error):
        sim.run(body, 1, init=False)


def test_a_rank_that_the_environment_says_wrongly():
    def body() -> None:
        os.environ["RANK"] = "1"
        dist.init_process_group("gloo")

    with pytest.raises(ValueError, match=r"this is rank 0 of 2\n  seen: rank 1 of 2"):
        sim.run(body, 2, init=False)


@sim.ranks(3, backends=("sim",))
def test_destroy_and_begin_again(ctx):
    dist.destroy_process_group()
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    dist.all_reduce(x := torch.ones(1))
    dist.destroy_process_group()
    assert (before, x.item(), dist.is_initialized()) == (False, 3.0, False)


# -- one run after the other -----------------------------------------------------------------------------------


def test_the_next_run_goes_on_where_the_last_one_left():
    def expected() -> list[float]:
        torch.manual_seed(5)
        return torch.rand(4).tolist()

    kept: dict[int, dist.ProcessGroup] = {}

    def first() -> list[float]:
        torch.manual_seed(5)
        kept[dist.get_rank()] = dist.new_group([0, 1])
        return torch.rand(2).tolist()

    def second() -> tuple[list[float], float]:
        x = torch.ones(1)
        if dist.get_rank() < 2:
            dist.all_reduce(x, group=kept[dist.get_rank()])
        return torch.rand(2).tolist(), x.item()

    with sim.world(3) as world:
        before = world.run(first)
        after = world.run(second)
        assert world.run(dist.get_rank) == [0, 1, 2]
    assert [a + b for a, (b, _) in zip(before, after, strict=True)] == [expected()] * 3
    assert [total for _, total in after] == [2.0, 2.0, 1.0]


def test_a_run_after_a_failed_one():
    def fail() -> None:
        if dist.get_rank() == 1:
            raise ValueError("bad")
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))

    def total() -> float:
        dist.all_reduce(x := torch.ones(1))
        return x.item()

    for seed in range(4):
        with sim.world(4, seed=seed) as world:
            with pytest.raises(ValueError, match="bad"):
                world.run(fail)
            with pytest.raises(sim.Deadlock):
                world.run(lambda: dist.get_rank() == 0 or dist.barrier())
            assert world.run(total) == [4.0] * 4


def test_init_false_stays_without_a_group_in_every_run():
    with sim.world(2, init=False) as world:
        assert world.run(dist.is_initialized) == [False, False]
        world.run(lambda: dist.init_process_group("gloo"))
        assert world.run(dist.is_initialized) == [True, True]


# -- the store -------------------------------------------------------------------------------------------------


def the_store():
    return dist.distributed_c10d._get_default_store()


def test_store_across_ranks():
    def body() -> tuple:
        store, rank = the_store(), dist.get_rank()
        if rank == 1:
            store.set("greeting", "hello")
        got = store.get("greeting")
        store.wait(["greeting"])
        sums = store.add("count", rank + 1)
        dist.barrier()
        first = store.compare_set("turn", "", f"rank {rank}")
        dist.barrier()
        again = store.compare_set("turn", "nobody", "x")
        return got, sums, store.add("count", 0), first == again, store.check(["greeting", "count"])

    for seed in range(4):
        results = sim.run(body, 3, seed=seed)
        assert [r[0] for r in results] == [b"hello"] * 3
        assert max(r[1] for r in results) == 6
        assert [r[2:] for r in results] == [(6, True, True)] * 3


@sim.ranks(2, backends=("sim",))
def test_store_under_prefixes(ctx):
    rank = dist.get_rank()
    mine, other = (dist.PrefixStore(f"p{r}", the_store()) for r in (rank, 1 - rank))
    mine.set("key", f"of {rank}")
    assert (other.get("key"), mine.delete_key("nothing"), mine.check(["nothing"])) == [
        (b"of 1", False, False),
        (b"of 0", False, False),
    ][ctx.rank]


def test_a_loop_that_asks_the_store_lets_the_others_set_it():
    def body() -> int:
        store = the_store()
        if dist.get_rank() == 0:
            dist.recv(torch.ones(1), 1)
            store.set("key", "x")
        else:
            dist.send(torch.ones(1), 0)
        while not store.check(["key"]):
            pass
        store.add("done", 1)
        while store.add("done", 0) < 2:
            pass
        return store.add("done", 0)

    for seed in range(3):
        assert sim.run(body, 2, seed=seed) == [2, 2]


# -- the trace -------------------------------------------------------------------------------------------------


def test_bytes_of_every_collective():
    n, rows, item = 4, 6, 4  # ranks, rows per rank, bytes of a float32
    own = rows * item

    def body() -> None:
        group = dist.group.WORLD
        mine, full = torch.ones(rows), torch.ones(rows * n)
        dist.all_reduce(mine)
        group._allgather_base(full, mine).wait()
        group._reduce_scatter_base(mine, full).wait()
        dist.all_to_all_single(torch.ones(rows * n), full)
        dist.broadcast(mine, 1)
        dist.reduce(mine, 1)
        dist.scatter(mine, list(full.clone().split(rows)) if dist.get_rank() == 1 else None, 1)
        dist.gather(mine, [torch.ones(rows) for _ in range(n)] if dist.get_rank() == 1 else None, 1)
        dist.barrier()
        rank = dist.get_rank()
        ops = [
            dist.P2POp(dist.isend, torch.ones(3), (rank + 1) % n),
            dist.P2POp(dist.irecv, torch.ones(3), (rank - 1) % n),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    with sim.world(n) as world:
        world.run(body)
    expected = {  # what a rank receives, then what it sends; rank 1 is the root
        "all_reduce": ([2 * (n - 1) * own // n] * n, [2 * (n - 1) * own // n] * n),
        "all_gather": ([(n - 1) * own] * n, [(n - 1) * own] * n),
        "reduce_scatter": ([(n - 1) * own] * n, [(n - 1) * own] * n),
        "all_to_all": ([(n - 1) * own] * n, [(n - 1) * own] * n),
        "broadcast": ([own, 0, own, own], [0, (n - 1) * own, 0, 0]),
        "reduce": ([0, (n - 1) * own, 0, 0], [own, 0, own, own]),
        "scatter": ([own, 0, own, own], [0, (n - 1) * own, 0, 0]),
        "gather": ([0, (n - 1) * own, 0, 0], [own, 0, own, own]),
        "barrier": ([0] * n, [0] * n),
        "send": ([0] * n, [3 * item] * n),
        "recv": ([3 * item] * n, [0] * n),
    }
    events = world.trace.events
    assert {event.op for event in events} == set(expected)
    for op, (received, sent) in expected.items():
        assert [world.trace.bytes(op=op, rank=rank) for rank in range(n)] == received, op
        assert [sum(e.send_bytes for e in events if (e.op, e.rank) == (op, r)) for r in range(n)] == sent, op
    assert world.trace.bytes() == sum(sum(received) for received, _ in expected.values())
    assert world.trace.bytes(axis="world", rank=0) == sum(received[0] for received, _ in expected.values())
    assert [e.seq for e in world.trace.of_rank(2)] == [*range(9), -1, -1]


def test_bytes_count_when_all_have_joined():
    with sim.world(2) as world:
        with pytest.raises(sim.Deadlock):
            world.run(lambda: dist.all_reduce(torch.ones(1000)) if dist.get_rank() == 0 else None)
        assert [event.completed for event in world.trace.events] == [False]
        with pytest.raises(sim.CollectiveMismatch):
            world.run(lambda: dist.all_reduce(torch.ones(3 + dist.get_rank())))
        with pytest.raises(sim.Deadlock):
            world.run(lambda: dist.recv(torch.ones(3), 1 - dist.get_rank()))
        assert len(world.trace.events) == 5
        assert world.trace.bytes() == 0
        assert world.trace.by_axis() == []
        world.run(lambda: dist.all_reduce(torch.ones(5)))
        assert world.trace.bytes() == 2 * 5 * 4
        assert [(row.op, row.count, row.bytes) for row in world.trace.by_axis()] == [("all_reduce", 1, 2 * 5 * 4)]
        assert [event.completed for event in world.trace.of_rank(1)] == [False, False, True]


def test_what_a_trace_is_asked_for_has_to_exist():
    def body() -> None:
        mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        dist.all_reduce(torch.ones(1), group=mesh.get_group("dp"))

    with sim.world(2) as world:
        assert world.trace.bytes(axis="world") == world.trace.bytes(op="all_to_all") == 0
        world.run(body)
    trace = world.trace
    assert trace.bytes(axis="dp") == 8
    assert trace.bytes(axis="tp") == trace.bytes(op="send") == 0, "they exist, though nothing was communicated"
    refused = {
        (lambda: trace.bytes(axis="ddp")): "no kind of axis 'ddp'\n  axis: 'ddp' .*\n  try: axis='dp'",
        (lambda: trace.bytes(op="allreduce")): "no kind of op 'allreduce'\n  op: 'allreduce'\n  try: op='all_reduce'",
        (lambda: trace.bytes(rank=2)): "rank must be from 0 to 1\n  rank: 2\n  try: rank=1",
        (lambda: trace.of_rank(-1)): "rank must be from 0 to 1\n  rank: -1\n  try: rank=0",
    }
    for ask, text in refused.items():
        with pytest.raises(ValueError, match=text + "$"):
            ask()
    trace.clear()
    assert trace.bytes(axis="dp") == 0


def test_the_operations_of_a_trace_are_those_of_the_simulator():
    assert set(trace_module.OPS) == {*collectives._EXECUTE, "send", "recv"}


def test_a_region_has_a_name():
    def body() -> None:
        with sim.region(3):
            dist.barrier()

    for call in (body, lambda: sim.run(body, 2)):
        with pytest.raises(
            TypeError, match=r"cannot name a region: name is an int, not a str\n  name: 3\n  try: with sim.region"
        ):
            call()


def test_uneven_bytes():
    def body() -> None:
        rank = dist.get_rank()
        send, receive = ([1, 2], [1, 3]) if rank == 0 else ([3, 4], [2, 4])
        dist.all_to_all_single(torch.ones(sum(receive), 5), torch.ones(sum(send), 5), receive, send)
        sizes = [2, 7]
        dist.all_gather([torch.ones(size, dtype=torch.bfloat16) for size in sizes], torch.ones(sizes[rank]).bfloat16())

    with sim.world(2) as world:
        world.run(body)
    assert [world.trace.bytes(op="all_to_all", rank=rank) for rank in range(2)] == [3 * 5 * 4, 2 * 5 * 4]
    assert [world.trace.bytes(op="all_gather", rank=rank) for rank in range(2)] == [7 * 2, 2 * 2]


def test_axis_names():
    def body() -> None:
        dist.all_reduce(torch.ones(1))  # before the mesh, whose only axis is the same group
        line = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        dist.all_reduce(torch.ones(1), group=line.get_group())
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        for axis in ("pp", "tp"):
            dist.all_reduce(torch.ones(1), group=grid.get_group(axis))
        flat = grid["pp", "tp"]._flatten("all")
        dist.all_reduce(torch.ones(1), group=flat.get_group())
        dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1, 2, 3]))
        dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1, 2, 3], group_desc="mine"))

    with sim.world(4) as world:
        world.run(body)
    axes = [event.axis for event in world.trace.of_rank(3) if event.op == "all_reduce"]
    assert axes[:5] == ["world", "dp", "pp", "tp", "all"]
    assert re.fullmatch(r"\w+: ranks 0-3", axes[5])
    assert axes[6:] == ["mine"]


def test_an_axis_over_all_ranks_of_a_larger_mesh():
    def body() -> None:
        mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
        dist.all_reduce(torch.ones(1), group=mesh["tp"].get_group())

    with sim.world(4) as world:
        world.run(body)
    assert {event.axis for event in world.trace.events if event.op == "all_reduce"} == {"tp"}


def test_summary():
    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for _ in range(3):
            dist.all_reduce(torch.ones(1000), group=mesh.get_group("tp"))
        dist.all_reduce(torch.ones(10), group=mesh.get_group("dp"))
        if dist.get_rank() < 2:
            peer = 1 - dist.get_rank()
            work = dist.isend(torch.ones(5), peer)
            dist.recv(torch.ones(5), peer)
            work.wait()

    with sim.world(4) as world:
        world.run(body)
        assert world.trace.summary() == (
            "axis   op          count  bytes received  most on one rank\n"
            "tp     all_reduce      6          48,000            12,000\n"
            "dp     all_reduce      2             160                40\n"
            "world  recv            2              40                20\n"
            "world  send            2               0                 0"
        )
        world.trace.clear()
        assert world.trace.events == []
        assert world.trace.summary() == "axis  op  count  bytes received  most on one rank"


def test_the_line_is_the_users():
    def body() -> int:
        line = sys._getframe().f_lineno + 1
        dist.all_reduce(torch.ones(1))
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        return line

    with sim.world(2) as world:
        line = world.run(body)[0]
    lines = [event.line for event in world.trace.of_rank(0)]
    assert lines[0] == f"test_sim_world.py:{line} in body"
    assert {text.rpartition(" in ")[2] for text in lines} == {"body"}
    assert lines[-1] == f"test_sim_world.py:{line + 2} in body"
