"""Estimates of torchrun scripts: what is recorded of a script is what it does on simulated ranks, and on a real CPU."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function

from sim.mesh.hardware import find_hardware
from sim.mesh.memory import replay_memory
from sim.mesh.replay.allocator import AllocatorRules
from sim.script.estimate import RecordedScript, main, record_script
from sim.script.launch import execute_script, prepare_views, read_script, script_folder_first
from sim.script.options import Launch
from sim.world import world

pytestmark = pytest.mark.filterwarnings("ignore")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "torch_scripts"


def record(script: Path, nproc: int = 4, *, rank: int = 0, warmup: int = 1, steps: int = 2, **more: Any) -> RecordedScript:
    launch = Launch(str(script), nproc=nproc, show=(), **more)
    source = read_script(launch)
    assert source is not None
    recorded = record_script(launch, source, find_hardware("laptop-cpu"), (rank,), warmup, steps)
    assert isinstance(recorded, RecordedScript)
    return recorded


def told(events: Any) -> list[tuple[Any, ...]]:
    return [(e.op, e.group, e.send_bytes, e.recv_bytes, e.dtype, e.reduce_op, e.peer) for e in events]


class _Enough(BaseException):
    pass


def simulated(script: Path, nproc: int, rank: int, warmup: int = 1, steps: int = 2) -> list[tuple[Any, ...]]:
    """What a rank communicates in the same steps of the script, on simulated ranks with real tensors."""
    launch = Launch(str(script), nproc=nproc, show=())
    source = read_script(launch)
    assert source is not None
    ranks = world(nproc, init=False, keep_events=None)
    marks: list[int] = []

    def on_rank(code: Any) -> None:
        from sim.kernel.context import current_rank

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


@pytest.mark.parametrize("name", ["fsdp2", "tensor_parallel", "ddp", "checkpoint"])
def test_collectives_of_the_steps_are_those_on_simulated_ranks(name: str) -> None:
    script = EXAMPLES / f"{name}.py"
    recorded = record(script)
    assert told(recorded.events[0]) == simulated(script, 4, 0)
    assert recorded.events[0]


@pytest.mark.parametrize("rank", [0, 2])
def test_ranks_that_send_messages_to_each_other_are_run_together(rank: int) -> None:
    script = EXAMPLES / "pipeline.py"
    recorded = record(script, 3, rank=rank)
    assert list(recorded.recorders) == [0, 1, 2]
    for each in range(3):
        assert told(recorded.events[each]) == simulated(script, 3, each)


def test_tokens_are_routed_evenly_where_their_experts_depend_on_data() -> None:
    script = EXAMPLES / "moe.py"
    events = told(record(script).events[0])
    real = simulated(script, 4, 0)
    assert [(event[0], event[1], event[4:]) for event in events] == [(each[0], each[1], each[4:]) for each in real]
    routed = {(sent, got) for op, _, sent, got, dtype, *_ in events if op == "all_to_all" and dtype == "float32"}
    assert routed == {(9 * 8 * 4, 9 * 8 * 4)}  # 3 of 12 tokens to each of 4 experts, whose own stay


NANO_GPT = Path(__file__).with_name("scripts_nano_gpt.py")


@pytest.mark.parametrize("warmup", [1, 2])
def test_buckets_of_ddp_are_torchs_before_and_after_they_are_made_anew(warmup: int) -> None:
    events = told(record(NANO_GPT, 2, warmup=warmup, steps=1).events[0])
    assert sum(event[0] == "all_reduce" for event in events) > 2
    assert events == simulated(NANO_GPT, 2, 0, warmup=warmup, steps=1)


def allocated_by_torch(script: Path, warmup: int, steps: int) -> int:
    """What torch's CPU allocator has given at most in those steps of a real run on one rank."""
    launch = Launch(str(script), nproc=1, show=())
    source = read_script(launch)
    assert source is not None
    ranks = world(1, init=False)
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def after(*args: Any) -> None:
        gc.collect()
        with record_function("a step is over"):
            pass

    def on_rank(code: Any) -> None:
        register_optimizer_step_post_hook(after)
        with profiler:
            execute_script(code, "")

    with script_folder_first(source.folder):
        prepare_views(ranks, launch, source)
        with ranks:
            ranks.run(on_rank, (source.code,))
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    done = in_use = peak = 0
    for event in events:
        if event.name() == "a step is over":
            done += 1
        elif event.name() == "[memory]":
            in_use += event.nbytes()
            if warmup <= done < warmup + steps:
                peak = max(peak, in_use)
    assert done >= warmup + steps
    return peak


@pytest.mark.parametrize("script", [EXAMPLES / "fsdp2.py", NANO_GPT], ids=lambda path: path.stem)
def test_memory_is_what_torchs_allocator_gives(script: Path) -> None:
    recorded = record(script, 1)
    memory = replay_memory(recorded.programs[0], AllocatorRules(caching=False, round_to=1))
    assert memory.peak_allocated == pytest.approx(allocated_by_torch(script, 1, 2), rel=0.02)
    assert not memory.unmatched
