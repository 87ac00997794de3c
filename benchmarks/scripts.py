"""Estimates of torchrun scripts beside the scripts themselves, at a small size, on this machine's CPU.

- *estimate*: seconds on the processor of `python -m sim estimate`, Python's start and torch's import included.
- *predicted*: the most that tensors of rank 0 take in the recorded steps.
- *allocated*: the same by torch's CPU allocator, in real processes that communicate by gloo. Of several runs the least:
  in the others gloo's threads release tensors later. Where data says how many rows a rank gets, the mean of all ranks.
- *gloo's copies*: by how much the most that is allocated rises with what gloo takes for itself.
- *collectives*: whether the operations, groups, bytes and dtypes of the recorded steps are, in this order, those of the
  same steps on simulated ranks, which have values.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import resource
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import record_function

from benchmarks.engine_counts import Memory, watch_memory
from hyper_parallel.core.machine.description import find_machine
from sim.kernel.context import current_rank
from sim.mesh.memory import replay_memory
from sim.mesh.replay.allocator import AllocatorRules
from sim.script.estimate import RecordedScript, record_script
from sim.script.launch import execute_script, prepare_views, read_script, script_folder_first
from sim.script.options import Launch
from sim.world import world

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES, NANO_GPT = ROOT / "examples" / "torch_scripts", ROOT / "tests/unit/sim/script/scripts_nano_gpt.py"
HARDWARE, WARMUP, STEPS = "laptop-cpu", 1, 2
RUNS = 3


class ScriptCase(NamedTuple):
    """A script, its ranks and arguments, and whether the bytes of its collectives follow from the script alone."""

    path: Path
    ranks: int
    arguments: tuple[str, ...] = ()
    bytes_are_known: bool = True


CASES = (
    ScriptCase(EXAMPLES / "ddp.py", 4),
    ScriptCase(EXAMPLES / "fsdp2.py", 4),
    ScriptCase(EXAMPLES / "tensor_parallel.py", 4),
    ScriptCase(EXAMPLES / "pipeline.py", 3),
    ScriptCase(EXAMPLES / "moe.py", 4, bytes_are_known=False),
    ScriptCase(EXAMPLES / "checkpoint.py", 4),
    ScriptCase(NANO_GPT, 2),
    ScriptCase(EXAMPLES / "ddp.py", 4, ("--width", "512")),
    ScriptCase(EXAMPLES / "fsdp2.py", 4, ("--width", "256")),
    ScriptCase(EXAMPLES / "tensor_parallel.py", 4, ("--width", "256")),
    ScriptCase(EXAMPLES / "pipeline.py", 3, ("--width", "512")),
    ScriptCase(EXAMPLES / "moe.py", 4, ("--width", "128", "--tokens", "512"), bytes_are_known=False),
    ScriptCase(EXAMPLES / "checkpoint.py", 4, ("--width", "1024")),
)


# -- recorded ----------------------------------------------------------------------------------------------------------


def record(
    script: Path,
    nproc: int = 4,
    *,
    rank: int = 0,
    warmup: int = WARMUP,
    steps: int = STEPS,
    arguments: tuple[str, ...] = (),
    hardware: str = HARDWARE,
) -> RecordedScript:
    """Record the steps of a script on one rank, and on those that it sends messages to.

    Args:
        script: which.
        nproc: ranks of its world.
        rank: that is recorded.
        warmup: steps that are left out.
        steps: that are recorded.
        arguments: of the script.
        hardware: that it is recorded for.
    """
    launch = Launch(str(script), arguments=arguments, nproc=nproc, show=())
    source = read_script(launch)
    assert source is not None
    recorded = record_script(launch, source, find_machine(hardware), (rank,), warmup, steps)
    assert isinstance(recorded, RecordedScript)
    return recorded


def predicted_bytes(recorded: RecordedScript) -> int:
    """Return the most that tensors of the first recorded rank take, counted as the CPU's allocator does."""
    memory = replay_memory(recorded.programs[0], AllocatorRules(caching=False, round_to=1))
    assert not memory.unmatched
    return memory.peak_allocated


def told(events: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return what must be the same of communication."""
    return [(e.op, e.group, e.send_bytes, e.recv_bytes, e.dtype, e.reduce_op, e.peer) for e in events]


# -- with values -------------------------------------------------------------------------------------------------------


def simulated(
    script: Path,
    nproc: int,
    rank: int = 0,
    warmup: int = WARMUP,
    steps: int = STEPS,
    arguments: tuple[str, ...] = (),
    map_device: str | None = None,
) -> list[tuple[Any, ...]]:
    """Return what a rank communicates in the same steps of a script, on simulated ranks with real tensors.

    Args:
        script: as the others: see `record`.
        nproc: see there.
        rank: see there.
        warmup: see there.
        steps: see there.
        arguments: see there.
        map_device: of the world.
    """
    launch = Launch(str(script), arguments=arguments, nproc=nproc, show=())
    source = read_script(launch)
    assert source is not None
    ranks = world(nproc, init=False, keep_events=None, map_device=map_device)
    marks: list[int] = []

    def on_rank(code: Any) -> None:
        def after(*args: Any) -> None:
            if current_rank() == rank:
                marks.append(ranks.trace.count(rank))

        register_optimizer_step_post_hook(after)
        execute_script(code, "")

    with script_folder_first(source.folder):
        views = prepare_views(ranks, launch, source)
        with ranks:
            ranks.run(on_rank, (source.code,))
        del views
        return told(ranks.trace.of_rank(rank)[marks[warmup - 1] : marks[warmup + steps - 1]])


@contextmanager
def watching_steps() -> Iterator[Memory]:
    """Watch torch's allocator while a script runs in this thread, and mark where its optimizer has made a step."""
    done = itertools.count(1)

    def mark(*args: Any) -> None:
        number = next(done)
        if number <= WARMUP + STEPS:
            gc.collect()  # what waits for Python's collector
        with record_function(f"phase: step {number} is over"):
            pass

    hook = register_optimizer_step_post_hook(mark)
    try:
        with watch_memory() as memory:
            yield memory
    finally:
        hook.remove()


class Peak(NamedTuple):
    """The most bytes in use in the recorded steps: of the script's tensors, and with gloo's copies of messages."""

    script: int
    in_all: int


def peak_of(memory: Memory, warmup: int = WARMUP, steps: int = STEPS) -> Peak:
    """Return the most bytes that were in use in the recorded steps.

    Args:
        memory: what `watching_steps` has seen.
        warmup: steps that are left out.
        steps: after them.
    """
    begin, end = (memory.phases[f"step {number} is over"][0] for number in (warmup, warmup + steps))
    seen = [
        (live, copies) for (when, live), copies in zip(memory.live, memory.copies, strict=True) if begin <= when < end
    ]
    return Peak(max(live - copies for live, copies in seen), max(live for live, _ in seen))


def allocated(case: ScriptCase, runs: int = RUNS) -> Peak:
    """Return what torch's allocator has given at most, of real processes.

    Args:
        case: the script that they run.
        runs: of which the one with the least is taken.
    """
    return min(_allocated_once(case) for _ in range(runs))


def _allocated_once(case: ScriptCase) -> Peak:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
        command += ["-m", "benchmarks.scripts", folder, str(case.path), *case.arguments]
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
        peaks = [Peak(*json.loads(Path(folder, str(rank)).read_text())) for rank in range(case.ranks)]
    if case.bytes_are_known:
        return peaks[0]
    return Peak(*(round(sum(sizes) / len(peaks)) for sizes in zip(*peaks, strict=True)))


def _watch(folder: str, script: str, *arguments: str) -> None:
    """Run a script as one of torchrun's processes, and write down what its rank has allocated."""
    rank, sys.argv = os.environ["RANK"], [script, *arguments]
    with watching_steps() as memory:
        runpy.run_path(script, run_name="__main__")
    Path(folder, rank).write_text(json.dumps(peak_of(memory)))


# -- the table ---------------------------------------------------------------------------------------------------------


def seconds_of_estimate(case: ScriptCase) -> float:
    """Return the seconds on the processor that the command takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "sim", "estimate", "--nproc", str(case.ranks), "--hardware", HARDWARE]
    subprocess.run([*command, str(case.path), *case.arguments], check=True, cwd=ROOT, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compared(case: ScriptCase, recorded: RecordedScript) -> str:
    """Say how the collectives of the recorded steps compare with those of simulated ranks."""
    mine, real = told(recorded.events[0]), simulated(case.path, case.ranks, arguments=case.arguments)
    if mine == real:
        return f"equal ({len(mine)})"
    if not case.bytes_are_known and [(e[0], e[1], e[4:]) for e in mine] == [(e[0], e[1], e[4:]) for e in real]:
        return f"equal but for the rows of each expert ({len(mine)})"
    return f"not equal ({len(mine)} and {len(real)})"


def table(cases: Iterable[ScriptCase] = CASES) -> str:
    """Return the estimates of scripts beside the scripts, as a Markdown table.

    Args:
        cases: which scripts.
    """
    lines = [
        "| script | ranks | estimate, s | predicted, KiB | allocated, KiB | predicted / allocated | gloo's copies, KiB "
        "| collectives |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for case in cases:
        recorded = record(case.path, case.ranks, arguments=case.arguments)
        predicted, peak = predicted_bytes(recorded), allocated(case)
        cells = [
            f"`{' '.join([str(case.path.relative_to(ROOT)), *case.arguments])}`",
            str(case.ranks),
            f"{seconds_of_estimate(case):.1f}",
            f"{predicted / 1024:,.1f}",
            f"{peak.script / 1024:,.1f}",
            f"{predicted / peak.script:.3f}",
            f"{(peak.in_all - peak.script) / 1024:,.1f}",
            compared(case, recorded),
        ]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    _watch(*sys.argv[1:])
