"""Measurement of this machine, and the hardware description that is fitted to it.

`measure()` starts processes that work at the same time, as training does: each computes matmuls, attention and
streams on its share of the cores (or on a GPU or NPU), and they communicate. On a CPU they also train tiny models, see
`measure_steps`. The curves are fitted as those of the published tables are, and the errors of the fits are kept beside
them.

Where a process has one core, its time is that of the thread on the processor, so that a machine with other work on it
is measured as if it was idle. Communication has to be timed by the clock: of that the shortest time counts. Beside it
is kept how much of that time a process, with gloo's threads, was on the processor: more than all, if on two cores.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hyper_parallel.core.common.checks import check_int, read_int
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.machine.description import Machine
from hyper_parallel.platform import get_platform
from sim.mesh.pricing.measure_fit import OPS, Sample, fit_hardware
from sim.mesh.pricing.measure_steps import step_samples, timed_steps
from sim.ops import Level, OnOperations, Proceed

_HEADS = 2
_ATTENTIONS = ((64, 64, True), (128, 64, True), (256, 64, True), (256, 64, False), (512, 64, True), (256, 128, True))
_MATMULS = tuple((m, n, k) for m in (32, 128, 512) for n in (64, 256, 1024) for k in (64, 256, 1024))


def measure(
    processes: int = 2,
    device: str | None = None,
    seconds: float = 0.02,
    *,
    threads: int | None = None,
    steps: bool = True,
) -> Machine:
    """Measure this machine.

    Args:
        processes: that share it: of a CPU its cores, of GPUs or NPUs one each.
        device: `cpu`, `cuda` or `npu`; None: `cuda` where there are as many.
        seconds: that each figure is taken over, at least.
        threads: of each process on a CPU; None: its share of the cores.
        steps: whether to measure training steps of tiny models, too, on a CPU.

    Raises:
        ValueError: no processes, or more than there are cores, GPUs or NPUs.
    """
    count = check_int(processes)
    asked = f"cannot measure this machine with {processes!r} processes"
    if device is None:
        device = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= (count or 1) else "cpu"
    most = os.cpu_count() or 1 if device == "cpu" else get_platform(device).device_count()
    if count is None or not 1 <= count <= most:
        unit = {"cpu": "cores", "cuda": "GPUs", "npu": "NPUs"}[device]
        raise InvalidValue(asked, f"processes is not from 1 to the number of {unit}", f"{unit}: {most}", f"{most}")
    if threads is not None:
        read_int(asked, "threads", threads, 1, most=os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (count, device, seconds, folder, threads, steps and device == "cpu"), nprocs=count)
        results = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(count)]
    samples = merged_samples([result["samples"] for result in results])
    if steps and device == "cpu":
        samples += step_samples([result["steps"] for result in results], count)
    return fit_hardware(samples, results[0]["machine"], count)


def merged_samples(results: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Return one sample for those of all processes: the shortest time, and the mean of what gloo's threads were busy.

    >>> merged_samples([[{"what": "collective", "seconds": 2.0, "busy": 1.2}], [{"seconds": 1.0, "busy": 0.8}]])
    [{'what': 'collective', 'seconds': 1.0, 'busy': 1.0}]

    Args:
        results: samples of each process, in the same order.
    """
    merged = []
    for alike in zip(*results, strict=True):
        merged.append({**alike[0], "seconds": min(sample["seconds"] for sample in alike)})
        if "busy" in alike[0]:
            merged[-1]["busy"] = statistics.fmean([sample["busy"] for sample in alike])
    return merged


# -- in each process -------------------------------------------------------------------------------------------------


def _work(rank: int, count: int, device: str, seconds: float, folder: str, threads: int | None, steps: bool) -> None:
    if device == "cpu":
        torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // count))
    else:
        get_platform(device).set_device(rank)
    backend = get_platform(device).backend
    store = dist.FileStore(str(Path(folder, "store")), count)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    clock = _Clock(device, seconds)
    samples = [*_matmuls(clock), *_streams(clock), *_attentions(clock), *_small_operations(clock)]
    if count > 1:
        samples += _collectives(clock, rank, count)
    trained = timed_steps(rank, count, folder) if steps else []
    text = json.dumps({"samples": samples, "steps": trained, "machine": _machine(device, count)})
    Path(folder, f"{rank}.json").write_text(text)
    dist.destroy_process_group()


class _Clock:
    """Times functions on a device, while the other processes do the same."""

    def __init__(self, device: str, seconds: float) -> None:
        self.device, self.seconds = device, seconds

    def done(self) -> None:
        get_platform(self.device).synchronize()

    def time(self, fn: Callable[[], object], *, together: bool = False, repeats: int = 15) -> float:
        """Return the lower quartile of the time of a call; on a CPU of collectives the shortest.

        Not the shortest of what a thread does alone: caches and clocks that are at their best for milliseconds are not
        for minutes.

        Args:
            fn: what is called.
            together: whether all processes must call it as often, as collectives need.
            repeats: times that it is timed.
        """
        now = time.perf_counter if together or self.device != "cpu" or torch.get_num_threads() > 1 else time.thread_time
        fn()
        self.done()
        begin = now()
        fn()
        self.done()
        once = max(now() - begin, 1e-7)
        if together:  # the slowest says how often
            slowest = torch.tensor([once], device=self.device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            once = slowest.item()
        times = max(1, math.ceil(self.seconds / repeats / once))
        repeats = min(repeats, 4 if once > self.seconds else max(3, round(self.seconds / 1e-3)))
        dist.barrier()
        taken = []
        for _ in range(repeats):
            begin = now()
            for _ in range(times):
                fn()
            self.done()
            taken.append((now() - begin) / times)
        return min(taken) if together and self.device == "cpu" else statistics.quantiles(taken, n=4)[0]


def _matmuls(clock: _Clock) -> list[Sample]:
    samples = []
    dtypes = [torch.float32, torch.bfloat16] + ([torch.float16] if clock.device != "cpu" else [])
    large = [(4096, 4096, 4096), (8192, 4096, 4096)] if clock.device != "cpu" else [(1024, 1024, 1024)]
    for dtype in dtypes:
        rate = math.inf
        for m, n, k in (*_MATMULS, *large):
            if 2 * m * n * k / rate > 10 * clock.seconds:  # a dtype that the device only emulates
                continue
            a = torch.randn(m, k, dtype=dtype, device=clock.device)
            b = torch.randn(k, n, dtype=dtype, device=clock.device)
            out = torch.empty(m, n, dtype=dtype, device=clock.device)
            took = clock.time(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))  # type: ignore[misc]
            samples.append({"what": "matmul", "dtype": str(dtype), "shape": [1, m, n, k], "seconds": took})
            # The slowest process says what is worth measuring, so that all measure the same.
            slowest = torch.tensor([2 * m * n * k / took / 2], device=clock.device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MIN)
            rate = slowest.item() if m * n * k >= 2**21 else rate
    return samples


def _streams(clock: _Clock) -> list[Sample]:
    samples = []
    scale = 16 if clock.device != "cpu" else 1
    for elements in (2**12, 2**14, 2**16, 2**18, 2**20, 2**21, 2**23 * scale):
        x, y = (torch.randn(elements, device=clock.device) for _ in range(2))
        out = torch.empty_like(x)
        took = clock.time(lambda x=x, y=y, out=out: torch.add(x, y, out=out))  # type: ignore[misc]
        samples.append({"what": "stream", "bytes": 12 * elements, "seconds": took})
    x = torch.empty(2**18 * scale, device=clock.device)
    took = clock.time(lambda: x.bernoulli_(0.5))
    samples.append({"what": "random", "bytes": 4 * x.numel(), "seconds": took})
    weight = torch.randn(2**21 * scale, device=clock.device, requires_grad=True)
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    took = clock.time(optimizer.step)
    samples.append({"what": "optimizer", "bytes": 28 * weight.numel(), "seconds": took})
    return samples


def _attentions(clock: _Clock) -> list[Sample]:
    samples = []
    dtype = torch.bfloat16 if clock.device != "cpu" else torch.float32
    attend = torch.nn.functional.scaled_dot_product_attention
    for length, size, causal in _ATTENTIONS:
        shape = (1, _HEADS, length, size)
        q, k, v = (torch.randn(shape, dtype=dtype, device=clock.device, requires_grad=True) for _ in range(3))
        with torch.no_grad():
            forward = clock.time(lambda q=q, k=k, v=v, c=causal: attend(q, k, v, is_causal=c))  # type: ignore[misc]
        out = attend(q, k, v, is_causal=causal)
        grad = torch.randn_like(out)
        both = (q, k, v)
        backward = clock.time(
            lambda out=out, both=both, grad=grad: torch.autograd.grad(out, both, grad, retain_graph=True)  # type: ignore[misc]
        )
        full = [1, _HEADS, _HEADS, length, length, size, int(causal)]
        for what, took in (("attention", forward), ("attention_backward", backward)):
            samples.append({"what": what, "dtype": str(dtype), "shape": full, "seconds": took})
    return samples


class _Counting(OnOperations):
    """Counts the operations that are kernels, as far as a model of tiny tensors has them."""

    order, count = Level.COUNT, 0

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        self.count += not getattr(func, "is_view", False)
        return proceed(*args, **kwargs)


def _small_operations(clock: _Clock) -> list[Sample]:
    """Time what an operation costs however little it computes, in the forward and backward of a model."""
    width = 8
    layers = [torch.nn.Linear(width, width), torch.nn.LayerNorm(width), torch.nn.SiLU(), torch.nn.Linear(width, width)]
    model = torch.nn.Sequential(*layers * 4).to(clock.device)
    x = torch.randn(4, width, device=clock.device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        (model(x) * 0.5).sum().backward()

    with _Counting() as counting:
        step()
    took = clock.time(step)
    return [{"what": "operation", "seconds": took / counting.count}]


def _collectives(clock: _Clock, rank: int, count: int) -> list[Sample]:
    samples = []
    scale = 16 if clock.device != "cpu" else 1
    for op in OPS:
        for size in (2**10, 2**14, 2**17, 2**20, 2**22 * scale, 2**24 * scale):
            call, calls = _collective(op, size, rank, count, clock.device), [0]

            def counted(call: Callable[[], object] = call, calls: list[int] = calls) -> None:
                calls[0] += 1
                call()

            begin = time.process_time()
            took = clock.time(counted, together=True, repeats=9)
            busy = (time.process_time() - begin) / calls[0] / took  # of all threads, so it can exceed 1
            found = {"what": "collective", "op": op, "size": size, "ranks": count, "seconds": took, "busy": busy}
            samples.append(found)
    begin = time.perf_counter()
    works = []
    small = torch.zeros(2, device=clock.device)
    for _ in range(50):
        works.append(dist.all_reduce(small, async_op=True))
    issued = (time.perf_counter() - begin) / 50
    for work in works:
        work.wait()
    return [*samples, {"what": "issue", "seconds": issued}]


def _collective(op: str, size: int, rank: int, count: int, device: str) -> Callable[[], object]:
    elements = size // 4 // count * count
    whole = torch.randn(elements, device=device)
    part = torch.randn(elements // count, device=device)
    other = torch.empty_like(whole)
    if op == "all_gather":
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return lambda: gather(whole, part)
    if op == "reduce_scatter":
        reduce = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        return lambda: reduce(part, whole)
    if op == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if op == "all_to_all":
        return lambda: dist.all_to_all_single(other, whole)
    if op == "broadcast":
        return lambda: dist.broadcast(whole, 0)

    def message() -> None:
        if rank == 0:
            dist.send(whole, 1)
        elif rank == 1:
            dist.recv(whole, 0)

    return message


def cpu_name() -> str:
    """Return the name of this machine's processor, with which the title of its description begins."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def _machine(device: str, count: int) -> dict[str, Any]:
    if device != "cpu":
        module: Any = torch.get_device_module(device)
        properties = module.get_device_properties(module.current_device())
        cores = getattr(properties, "multi_processor_count", None) or getattr(properties, "cube_core_num", 1)
        return {"device": device, "title": properties.name, "memory": properties.total_memory, "cores": cores}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"device": "cpu", "title": cpu_name(), "memory": memory // count, "cores": torch.get_num_threads()}
