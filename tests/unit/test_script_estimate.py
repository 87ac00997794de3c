"""Estimates of torchrun scripts: what is recorded of a script is what it does on simulated ranks, and on a real CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from sim.mesh.hardware import find_hardware
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


def test_tokens_are_routed_evenly_where_their_experts_depend_on_data() -> None:
    script = EXAMPLES / "moe.py"
    events = told(record(script).events[0])
    real = simulated(script, 4, 0)
    assert [(event[0], event[1], event[4:]) for event in events] == [(each[0], each[1], each[4:]) for each in real]
    routed = {(sent, got) for op, _, sent, got, dtype, *_ in events if op == "all_to_all" and dtype == "float32"}
    assert routed == {(9 * 8 * 4, 9 * 8 * 4)}  # 3 of 12 tokens to each of 4 experts, whose own stay
