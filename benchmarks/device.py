"""`make gpu`, `make npu`: everything that only a device can tell, measured by one command within eight minutes.

    python -m benchmarks.device [part ...] [--device cuda | npu | cpu] [--small] [--out FOLDER] [--minutes M] [--write]

It needs one device, this repository and no network. Each part is a process of its own with a limit in seconds: one
that raises, crashes or is cut off leaves the rows that it has found by then, and its error. FOLDER gets `device.json`
(conditions, and by part its rows, seconds and error), `device.md` (the tables of it) and `device.svg` (predicted beside
measured); `--write` puts the tables into docs/benchmarks.md as well.

Ranks of a world share the device (`sim.world(n, device=...)`); one rank of the backend has it alone. `--small` is for
tests, on the CPU or on the late device: the same code on sizes that take no time, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import platform as machine
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import sim
from benchmarks import TOLD, attention, experts, mesh_here, redistribute
from benchmarks.engine import Protocol, Result, contest, engines, timed
from benchmarks.toy import Shape, batch, build, step
from hyper_parallel.core.common.drawing import blank_figure
from hyper_parallel.core.machine.description import Machine, find_machine, machine_of_device
from hyper_parallel.models.llama import LlamaConfig
from hyper_parallel.platform import PlatformUnavailableError, get_platform
from hyper_parallel.platform.accelerator import torch_npu_is_installed
from hyper_parallel.trainer.config import ParallelConfig, PrecisionConfig
from sim.mesh.pricing.measure import measure

ROOT = Path(__file__).resolve().parent.parent
RANKS = 8
Row = dict[str, Any]
Found = tuple[str, Row]
"""A row of a table, and the table's name."""


@dataclass(frozen=True)
class Place:
    """Where it is measured.

    Attributes:
        device: `cuda`, `npu`, or `cpu`.
        small: On sizes that take no time.
    """

    device: str
    small: bool = False

    @property
    def of_world(self) -> str | None:
        """The device of a world's ranks; None: the CPU."""
        return None if self.device == "cpu" else self.device

    @property
    def ranks(self) -> int:
        """Those of a world."""
        return 2 if self.small else RANKS

    def world(self, ranks: int | None = None) -> sim.World:
        """Ranks that share the device, on one processor: one of them runs at a time, and hands on sooner there."""
        core = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        return sim.world(ranks or self.ranks, device=self.of_world, pin=core)

    @property
    def alone(self) -> Place:
        """Where one rank of a backend runs: where an npu is a late one, on the CPU."""
        late = self.device == "npu" and not torch_npu_is_installed()
        return Place("cpu", self.small) if late else self


@contextlib.contextmanager
def one_rank(place: Place) -> Iterator[None]:
    """Be the one rank of the device's own backend."""
    platform = get_platform(place.device)
    platform.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(platform.backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def found_or_error(row: Row, call: Callable[[], Row]) -> Row:
    """Add to a row what a call finds, or why it fails: what comes after it is measured all the same."""
    try:
        return row | call()
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {error}"[:200]}


def aim(what: str, measured: float | None, most: float) -> Iterator[Found]:
    """A row of the table of aims; none where the device does not tell."""
    if measured is not None:
        yield "aims", {"aim": f"{what}: at most {most:g}", "measured": measured, "met": _yes(measured <= most)}


def _yes(met: bool) -> str:
    return "yes" if met else "no"


# -- kernels ---------------------------------------------------------------------------------------------------------


class Kernels(NamedTuple):
    """What a device has done: kernels, copies (and fills), and the seconds of both together."""

    kernels: int
    copies: int
    seconds: float


def kernels_of(events: Iterable[Any]) -> Kernels:
    """Count a profiler's events that are a device's own."""
    kernels, copies, seconds = 0, 0, 0.0
    for event in events:
        if event.device_type.name == "CPU" or event.is_user_annotation:
            continue
        is_copy = event.name.startswith(("Memcpy", "Memset"))
        kernels, copies = kernels + (not is_copy), copies + is_copy
        seconds += event.time_range.elapsed_us() / 1e6
    return Kernels(kernels, copies, seconds)


def watched(call: Callable[[], object], device: str) -> Kernels | None:
    """What the device does during a call that all ranks make; None where torch's profiler cannot tell.

    Ranks of a world share a process, so their first one watches for all.
    """
    finish = get_platform(device).synchronize
    finish()
    dist.barrier()
    watcher = None
    if device == "cuda" and dist.get_rank() == 0:
        watcher = profile(activities=[ProfilerActivity.CUDA])
        watcher.__enter__()
    dist.barrier()
    call()
    finish()
    dist.barrier()
    if watcher is None:
        return None
    watcher.__exit__(None, None, None)
    return kernels_of(watcher.events() or ())


# -- parts: what the world and the backend do right ------------------------------------------------------------------


def collectives(place: Place) -> Iterator[Found]:
    """Each collective on one rank of the backend."""
    with one_rank(place.alone):
        yield from _of_one_rank(place.alone.device)


def conformance(place: Place) -> Iterator[Found]:
    """The bodies about collectives on ranks that share the device."""
    small = ["-k", "all_reduce_of_every_dtype or reduce_scatter_of_parts"] if place.small else []
    yield from _pytest(place, files_of("conformance", place), *small)


def bodies(place: Place) -> Iterator[Found]:
    """All other bodies of tests/multidevice on ranks that share the device."""
    yield from _pytest(place, files_of("bodies", place))


def files_of(part: str, place: Place) -> list[str]:
    """The files of tests that a part runs: no test is of two parts."""
    if place.small:
        room, name = ("conformance", "reductions") if part == "conformance" else ("fsdp2", "errors")
        return [f"tests/multidevice/{room}/test_{room}_{name}.py"]
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/multidevice").rglob("test_*.py"))
    return [file for file in files if ("test_conformance_" in file) == (part == "conformance")]


# The bodies that also are for ranks with a device each, with what their backend refuses.
_SELECTED = {
    "cpu": ["-m", "sim and not slow"],
    "cuda": ["-m", "gpu and not slow", "--sim-backend", "nccl", "--sim-device", "cuda"],
    "npu": ["-m", "npu and not slow", "--sim-backend", "hccl", "--sim-device", "npu"],
}
HANGS_AFTER = 40
"""Seconds after which a test is ended, with its process; xdist names it, and starts another one for the tests left."""


def _pytest(place: Place, files: Sequence[str], *options: str) -> Iterator[Found]:
    command = [sys.executable, "-m", "pytest", *_plugin(), "-p", "benchmarks", *files, *_SELECTED[place.device]]
    command += [*options, "-q", "-p", "no:cacheprovider", "--maxfail=60", "--continue-on-collection-errors"]
    command += ["-o", f"faulthandler_timeout={HANGS_AFTER}", "-o", "faulthandler_exit_on_timeout=true"]
    if importlib.util.find_spec("xdist"):
        several = 1 if place.small else max(1, min(10, (os.cpu_count() or 1) - 4))
        command += ["-n", str(several), "--max-worker-restart=60"]
    reading, writing = os.pipe()
    with tempfile.TemporaryFile("w+") as said:
        # Not those of a worker of xdist that runs this: pytest would take itself for one.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        environment[TOLD] = str(writing)
        running = subprocess.Popen(
            command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, env=environment, pass_fds=[writing]
        )
        os.close(writing)
        with os.fdopen(reading) as told:
            yield from outcomes(told)
        if (status := running.wait()) not in (0, 1):
            said.seek(0)
            raise RuntimeError(f"pytest has ended with {status}: {said.read()[-800:]}")


def _plugin() -> list[str]:
    """Name the library's plugin to pytest, which finds it by itself only where the library is installed."""
    known = {entry.value for entry in entry_points(group="pytest11")}
    return [] if (plugin := "hyper_parallel.pytest_plugin") in known else ["-p", plugin]


def outcomes(told: Iterable[str]) -> Iterator[Found]:
    """Count the outcomes of tests as they come, and name what has failed with the first line of why."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for line in told:
        outcome, name, why = json.loads(line)
        counts[outcome] += 1
        if outcome == "failed":
            yield "failed", {"failed": name, "why": why.partition("\n")[0][:200]}
        yield "tests", dict(counts)


_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)


def _of_one_rank(device: str) -> Iterator[Found]:
    """Each collective of one rank gives back what it is given; and a reduction is taken where the library says so."""
    reductions = get_platform(device).reductions
    for call in _calls_with(torch.zeros(1)):
        wrong, other, cases = [], [], 0
        collective, _, name = call.partition(" ")
        for dtype in _DTYPES:
            takes = name not in _OPS or reductions.takes(dtype, name, collective)
            if device == "cpu" and not takes:
                continue  # some of what gloo does not take ends the process
            x = torch.arange(1, 9, device=device).to(dtype)
            cases += 1
            out = torch.zeros_like(x)
            try:
                _calls_with(x)[call](out)
            except Exception:
                other += [f"{dtype}: refused"] if takes else []
                continue
            # Of one rank nccl copies for a reduce_scatter, and does not look at the op.
            other += [] if takes or collective == "reduce_scatter" else [f"{dtype}: taken"]
            if takes and not torch.equal(out, x):
                wrong.append(str(dtype))
        row = {"backend": dist.get_backend(), "collective": call, "cases": cases}
        said = {"wrong": wrong, "not as reductions_of says": other}
        yield "one rank", row | {name: "; ".join(cases) or "none" for name, cases in said.items()}


def _calls_with(x: torch.Tensor) -> dict[str, Callable[[torch.Tensor], Any]]:
    """By name, what writes `x` to what it is given, if there is one rank."""
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "broadcast": lambda out: (out.copy_(x), dist.broadcast(out, 0)),
        "all_gather": lambda out: dist.all_gather_into_tensor(out, x),
        "all_to_all": lambda out: dist.all_to_all_single(out, x),
        "all_gather, asynchronous": lambda out: dist.all_gather([out], x, async_op=True).wait(),
    }
    for name in _OPS:
        op = getattr(dist.ReduceOp, name)
        calls[f"all_reduce {name}"] = lambda out, op=op: (out.copy_(x), dist.all_reduce(out, op))  # type: ignore[misc]
        calls[f"reduce_scatter {name}"] = lambda out, op=op: dist.reduce_scatter_tensor(out, x, op)  # type: ignore[misc]
    return calls


# -- parts: beside torch ---------------------------------------------------------------------------------------------


def engine(place: Place) -> Iterator[Found]:
    """The training step of the engine beside FSDP2's, on ranks that share the device and on one rank alone."""
    with place.world() as world:
        yield from _engines(f"{place.ranks} ranks, one device", place, lambda call, *args: world.run(call, args)[0])
    with one_rank(place.alone):
        yield from _engines(f"one rank, {dist.get_backend()}", place.alone, lambda call, *args: call(*args))


def _engines(where: str, place: Place, run: Callable[..., Any]) -> Iterator[Found]:
    """Of each engine alone the time, the peak of the allocator and the kernels of a step; then all of them in turns."""
    shape = Shape(32, 1, 2) if place.small else Shape(2048, 4, 16)
    sequences, length = (1, 8) if place.small else (1, 1024)
    names = tuple(name for name in engines() if name != "part")
    blocks = {"steps": 1, "blocks": 2, "warmup": 1} if place.small else {"steps": 3, "blocks": 7, "warmup": 2}
    protocol = Protocol(names, device=place.device, shape=shape, bf16=not place.small, **blocks)
    alone: dict[str, Row] = {}
    for name in names:
        call = partial(run, _alone, name, protocol, sequences, length)
        alone[name] = found_or_error({"where": where, "engine": name}, call)
        yield "alone", alone[name]
    names = tuple(name for name in names if "error" not in alone[name])
    seconds = run(contest, sequences, length, replace(protocol, contestants=names))
    result = Result("device", 0, where, seconds)
    for name in names:
        row = {"where": where, "engine": name, "step, ms": result.median(name) * 1e3}
        row |= {f"over {other}": result.ratio(name, other)[0] for other in ("plain", "fsdp2") if other in names}
        yield "engine", row
    if not {"ours", "fsdp2"} <= set(names):
        return
    yield from aim(f"{where}: ours over FSDP2's step", result.ratio("ours", "fsdp2")[0], 0.97)
    ours, theirs = alone["ours"], alone["fsdp2"]
    if theirs["peak, MB"]:
        yield from aim(f"{where}: ours over FSDP2's peak", ours["peak, MB"] / theirs["peak, MB"], 1.0)
    if theirs["kernels"] is not None:
        for what in ("kernels", "copies"):
            yield from aim(f"{where}: {what} beyond FSDP2's", ours[what] - theirs[what], 0)


def _alone(name: str, protocol: Protocol, sequences: int, length: int) -> Row:
    platform = get_platform(protocol.device)
    some = torch.ones(8, 8, device=protocol.device, requires_grad=True)
    (some @ some).sum().backward()  # what libraries take for themselves
    for _ in range(2):  # garbage of all ranks counts where it is collected: before any of them is looked at
        dist.barrier()
        gc.collect()
    dist.barrier()
    before = platform.memory_stats().allocated
    mesh = init_device_mesh(protocol.device, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    model, optimizer = protocol.build(name, mesh)
    tokens = batch(dist.get_rank(), sequences, length).to(protocol.device)

    def once() -> object:
        return step(model, optimizer, tokens)

    timed(once, 2, protocol.device)
    platform.reset_peak_memory()
    seconds = timed(once, protocol.steps, protocol.device)
    # A CPU has no allocator to ask.
    peak = (platform.memory_stats().peak_allocated - before) / 1e6 if platform.has_streams else None
    kernels, copies, _ = watched(once, protocol.device) or (None, None, None)
    return {"step, ms": seconds * 1e3, "peak, MB": peak, "kernels": kernels, "copies": copies}


def redistributed(place: Place) -> Iterator[Found]:
    """Fifty pairs of layouts of 1 to 64 MB, beside torch's redistribution."""
    ranks = 4 if place.small else RANKS
    todo = redistribute.cases(ranks, 2 if place.small else redistribute.PAIRS)
    if place.small:
        todo = [redistribute.Case(each.sizes, (8, *each.shape[1:]), each.src, each.pending, each.dst) for each in todo]
    repeats = 1 if place.small else redistribute.REPEATS
    ratios = []
    with place.world(ranks) as world:
        for case in todo:
            row: Row = {"MB": case.megabytes, "mesh": str(case.sizes)}
            row = found_or_error(row, partial(_pair, world, [case], place.device, repeats))
            ratios += [] if "error" in row else [row["ours, ms"] / row["torch, ms"]]
            yield "pairs", row
    mean = statistics.geometric_mean(ratios)
    row = {"pairs": len(ratios), "ours / torch": mean, "median": statistics.median(ratios), "worst": max(ratios)}
    yield "redistribute", row
    yield from aim("redistribute over torch's time, mean of pairs", mean, 0.8)


def _pair(world: sim.World, *arguments: Any) -> Row:
    ((ours, theirs),) = world.run(redistribute.contest, arguments)[0]
    return {"ours, ms": ours * 1e3, "torch, ms": theirs * 1e3}


def ring(place: Place) -> Iterator[Found]:
    """Ring attention on ranks that share the device, beside SDPA of the whole sequence on the same device."""
    shapes = [(1, 32)] if place.small else [(1, 8192), (1, 32768)]
    for sequences, length in shapes:
        ranks = 2 if place.small else 4
        with place.world(ranks) as world:
            found = world.run(attention.beside_sdpa, (sequences, length, place.device, 1 if place.small else 5))[0]
        shape = {"ranks": ranks, "tokens": f"{sequences}x{length}"}
        yield "attention", {**shape, **{f"{name}, ms": seconds * 1e3 for name, seconds in found.items()}}


def expert(place: Place) -> Iterator[Found]:
    """Grouped products of experts beside a loop over them."""
    device = place.alone.device
    for shape in [(2, 32, 16, 16)] if place.small else [(8, 16384, 4096, 2048), (64, 16384, 2048, 1024)]:
        group, loop = experts.times_of(*shape, device, 1 if place.small else experts.BLOCKS)
        row = dict(zip(("experts", "rows", "hidden", "inner"), shape, strict=True))
        yield "experts", {**row, "grouped, ms": group, "one by one, ms": loop, "grouped / one by one": group / loop}


# -- parts: the world's price, the machine, and what is predicted of it ----------------------------------------------


def overhead(place: Place) -> Iterator[Found]:
    """What the world adds to the kernels of its ranks, with two layers of the 8B shape on each."""
    ranks = place.ranks
    with place.world(ranks) as world:
        seconds, kernels = world.run(_layers, (place,))[0]
    row: Row = {"ranks": ranks, "step, ms": seconds * 1e3}
    if kernels is not None:
        row |= {"kernels, ms": kernels.seconds * 1e3, "overhead": seconds / kernels.seconds - 1}
    yield "overhead", row
    yield from aim(f"the world's overhead over its kernels, {ranks} ranks", row.get("overhead"), 0.1)


def _layers(place: Place) -> tuple[float, Kernels | None]:
    shape = Shape(32, 1, 2) if place.small else Shape(4096, 2, 32)
    mesh = init_device_mesh(place.device, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    dtypes: dict[str, Any] = {} if place.small else {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    model, optimizer = build("ours", mesh, shape=shape, **dtypes)
    tokens = batch(dist.get_rank(), 1, 8 if place.small else 4096).to(place.device)

    def once() -> object:
        return step(model, optimizer, tokens)

    timed(once, 2, place.device)
    seconds = timed(once, 1 if place.small else 5, place.device)
    return seconds, watched(once, place.device)


def hardware(place: Place) -> Iterator[Found]:
    """The probes of `hyper-parallel hardware measure` on one device."""
    found = measure(1, place.alone.device, 1e-4 if place.small else 0.02, threads=1, steps=False)
    for name, figure in sorted(found.figures.items()):
        yield "hardware", {"figure": name, "value": figure.value, "unit": figure.unit, "source": figure.source}


_LLAMA_1B = LlamaConfig(128_256, 2048, 8192, 16, 32, 8, 4096, tie_embeddings=True)


def configurations(place: Place) -> list[mesh_here.Case]:
    """Ten runs of one device, 1B to 8B shapes; small ones are three."""
    if place.small:
        tiny = LlamaConfig(256, 32, 64, 2, 4, 2, 32)
        options: tuple[Row, ...] = ({}, {"checkpointing": "full"}, {"compile": True})
        return [_case(place, tiny, 2, 16, **each) for each in options]
    one = _LLAMA_1B
    three = LlamaConfig(128_256, 3072, 8192, 28, 24, 8, 4096, tie_embeddings=True)
    eight = LlamaConfig(128_256, 4096, 14_336, 10, 32, 8, 4096)  # the layers of 8B, as many as fit with fp32 weights
    return [  # what is most different first, and last what compiles for a minute, for a part that runs out of time
        _case(place, one, 2),
        _case(place, eight, 1),
        _case(place, three, 2, checkpointing="full"),
        _case(place, one, 2, checkpointing="selective"),
        _case(place, three, 1),
        _case(place, eight, 2, checkpointing="full"),
        _case(place, one, 4, checkpointing="full"),
        _case(place, one, 2, compile=True),
        _case(place, three, 1, compile=True),
        _case(place, one, 4, checkpointing="full", compile=True),
    ]


def _case(place: Place, model: LlamaConfig, sequences: int, length: int = 4096, **options: Any) -> mesh_here.Case:
    parallel, bf16 = ParallelConfig(**options), PrecisionConfig("bf16")
    return mesh_here.Case(parallel, model, sequences, length, device=place.device, precision=bf16)


def predicted(place: Place) -> Iterator[Found]:
    """Step time and memory of ten configurations as the simulator predicts them, beside what is measured."""
    described = _described(place)
    off: dict[str, list[float]] = {"time": [], "memory": []}
    # Small ones are compiled without a C++ compiler, which takes a minute.
    quick = patch.object(torch, "compile", partial(torch.compile, backend="aot_eager"))
    with one_rank(place.alone), quick if place.small else contextlib.nullcontext():
        for case in configurations(place.alone):
            row = found_or_error(_what(case), partial(_step_of, case, steps=1 if place.small else 4))
            gc.collect()
            get_platform(case.device).empty_cache()
            if "error" not in row:  # out of memory, say: the others are measured all the same
                row = found_or_error(row, partial(_beside, case, described, row))
            if "error" not in row:
                off["time"].append(abs(row["predicted / measured"] - 1))
                off["memory"] += [abs(row["predicted, MB"] / size - 1)] if (size := row["measured, MB"]) else []
            yield "predicted", row
    for what, most in (("time", 0.1), ("memory", 0.05)):
        median = statistics.median(off[what]) if off[what] else None
        yield from aim(f"median error of predicted {what}, {len(off[what])} runs", median, most)


def _described(place: Place) -> Machine:
    """The description by the device's name, else what is measured."""
    if place.small:
        return find_machine("laptop-cpu")
    return machine_of_device(get_platform(place.device).name()) or measure(1, place.device, steps=False)


def _what(case: mesh_here.Case) -> Row:
    model = case.model
    shape = f"{model.hidden_size} x {model.num_hidden_layers}"
    return {"hidden x layers": shape, "tokens": f"{case.sequences} x {case.length}", "how": str(case)}


def _step_of(case: mesh_here.Case, steps: int) -> Row:
    found = mesh_here.take_steps(case, steps, warmup=1 if steps == 1 else 2)
    return {"measured, ms": statistics.median(found["steps"]) * 1e3, "measured, MB": found["allocated"] / 1e6}


def _beside(case: mesh_here.Case, described: Machine, row: Row) -> Row:
    made = mesh_here.predict(case, described)
    milliseconds = made.time.step.value * 1e3
    return {
        "predicted, ms": milliseconds,
        "predicted / measured": milliseconds / row["measured, ms"],
        "predicted, MB": made.memory.peak / 1e6,
    }


PARTS: dict[str, tuple[Callable[[Place], Iterator[Found]], float]] = {
    "engine": (engine, 75),
    "predicted": (predicted, 110),
    "redistribute": (redistributed, 45),
    "overhead": (overhead, 30),
    "attention": (ring, 30),
    "experts": (expert, 30),
    "collectives": (collectives, 30),
    "conformance": (conformance, 60),
    "hardware": (hardware, 40),
    "bodies": (bodies, 150),
}
"""What is measured, in this order, each for so many seconds at most."""


# -- the command -----------------------------------------------------------------------------------------------------

Start = Callable[..., "subprocess.Popen[Any]"]


def measure_all(
    place: Place, parts: Sequence[str], out: Path, minutes: float = 8.0, start: Start = subprocess.Popen
) -> Row:
    """Measure parts one after the other, each in a process of its own, and write what is known after each.

    Args:
        place: Where.
        parts: Which, of `PARTS`.
        out: Folder of the files.
        minutes: For all together.
        start: Makes a process.
    """
    out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    found: Row = {"conditions": conditions(place), "parts": {}}
    for part in parts:
        limit = min(PARTS[part][1], minutes * 60 - (time.monotonic() - begin))
        found["parts"][part] = entry = _measured(place, part, limit, start)
        print(f"{part}: {entry['seconds']:.0f} s{', ' + entry['error'] if entry['error'] else ''}", flush=True)
        (out / "device.json").write_text(json.dumps(found, indent=1))
        (out / "device.md").write_text(text_of(found))
    draw(found, out / "device.svg")
    return found


def _measured(place: Place, part: str, limit: float, start: Start) -> Row:
    if limit <= 0:
        return {"seconds": 0.0, "error": "no time was left for it", "tables": {}}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder, "rows"), Path(folder, "log")
        small = ["--small"] * place.small
        command = [sys.executable, "-m", "benchmarks.device", part, "--device", place.device, *small]
        with log.open("w") as stream:
            process = start(
                [*command, "--rows", str(path)], cwd=ROOT, stdout=stream, stderr=stream, start_new_session=True
            )
            error = ""
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):  # and with it whatever it has started
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for its driver does not end
                    process.wait(10)
                error, status = f"cut off after {limit:g} s", 0
        lines = path.read_text().splitlines() if path.exists() else []
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    tables: dict[str, list[Row]] = {}
    for line in lines:
        with contextlib.suppress(ValueError):  # the last one may be cut off
            table, row = json.loads(line)
            tables[table] = [*(tables.get(table, []) if table != "tests" else []), row]  # of counts, the last
    for row in tables.pop("error", []):
        error = error or row["error"]
    if status and not error:
        error = f"it ended with status {status}: {said[-1] if said else 'without a word'}"
    return {"seconds": time.monotonic() - begin, "error": error, "tables": tables}


def _run_part(place: Place, part: str, path: Path) -> None:
    """Measure one part in this process; each row is in the file as soon as it is known."""
    with path.open("w") as file:

        def keep(table: str, row: Row) -> None:
            file.write(json.dumps([table, row]) + "\n")
            file.flush()

        try:
            for table, row in PARTS[part][0](place):
                keep(table, row)
        except Exception as error:
            traceback.print_exc()
            keep("error", {"error": f"{type(error).__name__}: {error}"[:1000]})


def conditions(place: Place) -> Row:
    """What the figures depend on."""
    found: Row = {
        "device": place.device,
        "small": place.small,
        "torch": torch.__version__,
        "python": machine.python_version(),
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }
    found["name"] = get_platform(place.alone.device).name()
    if place.device == "cuda":
        found["cuda"] = torch.version.cuda
    return found


def text_of(found: Row) -> str:
    """All tables, by part, with what has failed."""
    said = ", ".join(f"{name} {value}" for name, value in found["conditions"].items())
    blocks = [f"{said}."]
    for part, entry in found["parts"].items():
        blocks.append(f"### {part}")
        blocks += [f"Failed: {entry['error'].splitlines()[0]}"] if entry["error"] else []
        blocks += [table_of(rows) for rows in entry["tables"].values()]
    return "\n\n".join(blocks) + "\n"


def table_of(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table, a column for each key that any of them has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    right = [all(isinstance(row.get(name, 0), (int, float)) for row in rows) for name in names]
    lines = [f"| {' | '.join(names)} |", f"|{'|'.join('--:' if each else '---' for each in right)}|"]
    lines += [f"| {' | '.join(_cell(row.get(name)) for name in names)} |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def draw(found: Row, path: Path) -> None:
    """A picture of predicted beside measured, time and memory; none without matplotlib, or without rows."""
    rows = found["parts"].get("predicted", {}).get("tables", {}).get("predicted", [])
    rows = [row for row in rows if "error" not in row]
    figure = blank_figure(path, 10, 4.5) if rows else None
    if figure is None:
        return
    names = [f"{row['hidden x layers']}, {row['how']}" for row in rows]
    for place, unit in enumerate(("ms", "MB")):
        axes = figure.add_subplot(1, 2, place + 1)
        spots = range(len(rows))
        axes.barh([spot - 0.2 for spot in spots], [row[f"measured, {unit}"] for row in rows], 0.4, label="measured")
        axes.barh([spot + 0.2 for spot in spots], [row[f"predicted, {unit}"] for row in rows], 0.4, label="predicted")
        axes.set_yticks(list(spots), names if place == 0 else [""] * len(names), fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel({"ms": "ms of a step", "MB": "MB at the peak"}[unit])
    axes.legend()
    figure.savefig(os.fspath(path))


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line; returns 1 if a part has failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description="Measure one device.")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"which: {', '.join(PARTS)}; default: all")
    parser.add_argument("--device", choices=("cuda", "npu", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes that take no time, whose figures mean nothing")
    parser.add_argument("--out", type=Path, default=Path("out/device"), help="folder of device.json, .md and .svg")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all together")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/benchmarks.md")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # of a part's own process
    options = parser.parse_args(arguments)
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"no part is called {unknown[0]!r}; there are: {', '.join(PARTS)}")
    place = Place(options.device, options.small)
    if options.rows is not None:
        _run_part(place, options.parts[0], options.rows)
        return 0
    try:
        if not place.small or place.alone == place:  # a late npu is enough for small sizes
            get_platform(options.device)
    except PlatformUnavailableError as missing:
        parser.error(str(missing))
    found = measure_all(place, options.parts or list(PARTS), options.out, options.minutes)
    print(f"\n{text_of(found)}\nwrote {options.out}/device.json")
    if options.write:
        from benchmarks.__main__ import write_table

        write_table(f"device {options.device}", text_of(found))
    return int(any(entry["error"] for entry in found["parts"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
