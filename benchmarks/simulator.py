"""The simulator beside torch's threaded group, LocalTensorMode and bare threads that only take turns.

Protocol: the contestants of a row take turns in one process, in blocks, the order drawn anew each time, timed from
barrier to barrier, the slowest rank counts; a figure is the median over the blocks. Each row has a process of its own,
bound to one core unless it says otherwise.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import sim
from benchmarks.toy import batch, build, step

BLOCKS = 9
Seconds = dict[str, list[float]]


# -- contestants: each calls a function on n ranks and returns what rank 0 returns -----------------------------------


def on_ours(ranks: int, fn: Callable[[], Any]) -> Any:
    return sim.run(fn, ranks, intraop_threads=torch.get_num_threads())[0]


def on_threaded(ranks: int, fn: Callable[[], Any]) -> Any:
    """Run fn on torch's threaded group, as its MultiThreadedTestCase does."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    results: dict[int, Any] = {}
    store = dist.HashStore()

    def main(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
        with torch.autograd.set_multithreading_enabled(False):
            results[rank] = fn()
        dist.destroy_process_group()

    isolate: Any = torch._C._distributed_c10d  # torch does not declare all of it
    isolate._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threaded._uninstall_threaded_pg()
        isolate._set_thread_isolation_mode(False)
    return results[0]


@contextmanager
def _fake_group(ranks: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def local_tensor_all_reduce(ranks: int, elements: int, calls: int) -> float:
    """Seconds of one all_reduce under LocalTensorMode, whose ranks run as one program."""
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

    with _fake_group(ranks), LocalTensorMode(ranks):
        x = LocalTensor({rank: torch.ones(elements) for rank in range(ranks)})
        dist.all_reduce(x)
        start = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(x)
        return (time.perf_counter() - start) / calls


def turns_all_reduce(ranks: int, elements: int, calls: int) -> float:
    """Seconds of one all_reduce of bare threads that hand on one lock each: what taking turns costs at least."""
    locks = [threading.Lock() for _ in range(ranks)]
    data = [torch.ones(elements) for _ in range(ranks)]
    took: list[float] = []
    for lock in locks:
        lock.acquire()

    def main(rank: int) -> None:
        after = locks[(rank + 1) % ranks]
        for call in range(calls + 1):
            locks[rank].acquire()
            if rank == 0 and call in (1, calls):
                took.append(time.perf_counter())
            if rank == ranks - 1:
                total = data[0]
                for x in data[1:]:
                    total.add_(x)
                for x in data[1:]:
                    x.copy_(total)
            after.release()

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    locks[0].release()
    for thread in threads:
        thread.join()
    return (took[1] - took[0]) / (calls - 1)


def _all_reduce(elements: int, calls: int) -> float:
    x = torch.ones(elements)
    dist.all_reduce(x)
    return _slowest(lambda: dist.all_reduce(x), calls)


def _slowest(call: Callable[[], Any], calls: int) -> float:
    """Seconds of one call, from barrier to barrier, on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    dist.barrier()
    took = torch.tensor([(time.perf_counter() - start) / calls])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def _in_turns(contestants: dict[str, Callable[[], float]], blocks: int = BLOCKS) -> Seconds:
    draw, seconds = random.Random(0), {name: list[float]() for name in contestants}
    for block in range(blocks + 1):
        for name in draw.sample(sorted(contestants), len(contestants)):
            took = contestants[name]()
            if block:
                seconds[name].append(took)
    return seconds


# -- rows ------------------------------------------------------------------------------------------------------------


def all_reduce_row(ranks: int, elements: int, threads: int) -> Seconds:
    _bind(threads)
    calls = max(20, min(40, 2_000 // ranks)) if elements == 1 else 10  # so that the barriers are a small part
    return _in_turns(
        {
            "ours": lambda: on_ours(ranks, lambda: _all_reduce(elements, calls)),
            "threaded": lambda: on_threaded(ranks, lambda: _all_reduce(elements, calls)),
            "local tensor": lambda: local_tensor_all_reduce(ranks, elements, calls if ranks <= 8 else 1),
            "turns": lambda: turns_all_reduce(ranks, elements, calls),
        },
        BLOCKS if elements == 1 else 5,
    )


def start_row(ranks: int, mesh: tuple[int, ...] | None, reduce: bool, contestants: Sequence[str]) -> Seconds:
    """Seconds to start ranks, to make a mesh, to reduce once and to end."""
    _bind(1)

    def work() -> None:
        if mesh is not None:
            init_device_mesh("cpu", mesh, mesh_dim_names=tuple("abcde"[: len(mesh)]))
        if reduce:
            dist.all_reduce(torch.ones(1))

    def timed(on: Callable[[int, Callable[[], Any]], Any]) -> float:
        start = time.perf_counter()
        on(ranks, work)
        return time.perf_counter() - start

    ways = {"ours": lambda: timed(on_ours), "threaded": lambda: timed(on_threaded)}
    return _in_turns({name: ways[name] for name in contestants}, 9 if ranks <= 64 else 2)


def _steps(engine: str, sequences: int, length: int, blocks: int, steps: int) -> list[float]:
    """Seconds of a step of one engine, of each block of steps after the first; the slowest rank's."""
    ranks = dist.get_world_size()
    model, optimizer = build(engine, init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",)))
    tokens = batch(dist.get_rank(), sequences, length)
    return [_slowest(lambda: step(model, optimizer, tokens), steps) for _ in range(1 + blocks)][1:]


def step_row(ranks: int, sequences: int, length: int) -> Seconds:
    """Seconds of a training step: each engine on simulated ranks, FSDP2 on the threaded group, one rank on no group."""
    _bind(1)
    blocks, steps = (2, 2) if ranks <= 8 else (1, 1)
    seconds: Seconds = {}
    for _ in range(5 if ranks <= 8 else 2):
        for name, on, engine in (
            ("ours", on_ours, "ours"),
            ("plain", on_ours, "plain"),
            ("FSDP2 on sim", on_ours, "fsdp2"),
            ("FSDP2 threaded", on_threaded, "fsdp2"),
            ("one rank", _on_one, "ours"),
        ):
            found = on(ranks, partial(_steps, engine, sequences, length, blocks, steps))
            seconds.setdefault(name, []).extend(found)
    return seconds


def _on_one(ranks: int, fn: Callable[[], Any]) -> Any:
    with _fake_group(ranks):
        return fn()


def memory_row(ranks: int) -> float:
    """Peak resident memory, in bytes, of a world that reduces, exchanges unevenly and trains one step."""
    _bind(1)

    def work() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.all_reduce(torch.ones(1))
        gives = [(rank + other) % 3 for other in range(size)]
        received = torch.empty(sum(gives))  # what others give to this rank is what it gives to them
        dist.all_to_all_single(received, torch.ones(sum(gives)), gives, gives)
        from torch import nn

        from hyper_parallel import fully_shard

        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()

    on_ours(ranks, work)
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def _bind(threads: int) -> None:
    torch.set_num_threads(threads)
    if threads == 1:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def _apart(row: Callable[..., Any], *args: Any) -> Any:
    """Call row in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as pool:
        return pool.submit(row, *args).result()


# -- tables ----------------------------------------------------------------------------------------------------------


def reduce_table() -> str:
    """all_reduce, beside the other ways to have ranks in one process."""
    lines = [
        "| all_reduce | ours, ms | aim | threaded, ms | LocalTensorMode, ms | bare threads, ms | ours / threaded |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    rows = [(8, 1, 1, 0.3), (64, 1, 1, 2.5), (256, 1, 1, 12.0), (64, 1 << 18, 1, 24.0), (64, 1 << 18, 2, 16.0)]
    for ranks, elements, threads, aim in rows:
        found = {name: _median(times) for name, times in _apart(all_reduce_row, ranks, elements, threads).items()}
        what = "1 float" if elements == 1 else f"1 MB, {threads} intra-op thread{'s' if threads > 1 else ''}"
        cells = [f"{found[name] * 1e3:.2f}" for name in ("threaded", "local tensor", "turns")]
        ratio = found["ours"] / found["threaded"]
        lines.append(
            f"| {what}, {ranks} ranks | {found['ours'] * 1e3:.2f} | {aim} | {' | '.join(cells)} | {ratio:.2f} |"
        )
    return "\n".join(lines)


def start_table() -> str:
    """Starting and ending worlds, and the memory of a large one."""
    lines = ["| start and end a world | ours | aim | threaded | ours / threaded |", "|---|--:|--:|--:|--:|"]
    rows: list[tuple[str, int, tuple[int, ...] | None, bool, str]] = [
        ("8 ranks, mesh (2, 4)", 8, (2, 4), False, "10 ms"),
        ("1,024 ranks, one all_reduce", 1024, None, True, "1 s"),
        ("1,024 ranks, mesh (16, 8, 8), one all_reduce", 1024, (16, 8, 8), True, "3 s"),
    ]
    for what, ranks, mesh, reduce, aim in rows:
        if ranks <= 64:
            found = _apart(start_row, ranks, mesh, reduce, ("ours", "threaded"))
        else:  # a thousand threads that all want to run get nowhere on one core
            found = _apart(start_row, ranks, mesh, reduce, ("ours",))
        ours = _median(found["ours"])
        theirs, ratio = "-", "-"
        if "threaded" in found:
            other = _median(found["threaded"])
            theirs, ratio = _time(other), f"{ours / other:.2f}"
        lines.append(f"| {what} | {_time(ours)} | {aim} | {theirs} | {ratio} |")
    used = _apart(memory_row, 1024)
    lines += ["", f"1,024 ranks that reduce, exchange unevenly and train a step of two layers: {used / 2**30:.1f} GiB."]
    return "\n".join(lines)


def step_table() -> str:
    """Training steps over the plain compute of all ranks."""
    lines = [
        "| step of the toy | plain, ms | ours / plain | aim | FSDP2 on sim / plain | FSDP2, threaded / plain | "
        "ours / ranks x one rank | aim |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for ranks, sequences, length, aim in ((8, 4, 128, 1.3), (64, 4, 128, 1.6)):
        found = {name: _median(times) for name, times in _apart(step_row, ranks, sequences, length).items()}
        over = [found[name] / found["plain"] for name in ("ours", "FSDP2 on sim", "FSDP2 threaded")]
        lines.append(
            f"| {ranks} ranks, {sequences} x {length} tokens | {found['plain'] * 1e3:.0f} | {over[0]:.2f} | {aim} | "
            f"{over[1]:.2f} | {over[2]:.2f} | {found['ours'] / found['one rank'] / ranks:.2f} | 1.10 |"
        )
    return "\n".join(lines)


def _median(times: list[float]) -> float:
    return float(np.median(times)) if times else math.nan


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
