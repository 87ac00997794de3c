"""Random programs of streams and events on the late device: right in every order, and a race where one is possible."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sim
from sim.late.switch import why_not

pytestmark = [pytest.mark.sim, pytest.mark.skipif(bool(why_not()), reason=why_not())]

STREAMS, BUFFERS = 3, 3


@dataclass(frozen=True)
class Step:
    """`buffer[target] += factor * buffer[source]`, on a stream, after the earlier steps in `waits`."""

    stream: int
    target: int
    source: int
    factor: int
    waits: tuple[int, ...]


def conflict(a: Step, b: Step) -> bool:
    return a.target in (b.target, b.source) or b.target == a.source


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    """Programs in which some steps do not wait for what they should."""
    steps: list[Step] = []
    for _ in range(draw(st.integers(2, 7))):
        stream, target, source = (draw(st.integers(0, n - 1)) for n in (STREAMS, BUFFERS, BUFFERS))
        step = Step(stream, target, source, draw(st.integers(1, 3)), ())
        needed = [i for i, before in enumerate(steps) if before.stream != stream and conflict(before, step)]
        dropped = draw(st.sets(st.sampled_from(needed), max_size=1)) if needed else set()
        steps.append(Step(stream, target, source, step.factor, tuple(i for i in needed if i not in dropped)))
    return steps


def has_race(steps: list[Step]) -> bool:
    """By the definition: two steps touch one buffer, one of them writes, and no chain of waits leads to the later."""
    before: list[set[int]] = []
    for i, step in enumerate(steps):
        direct = {*step.waits, *(j for j in range(i) if steps[j].stream == step.stream)}
        before.append(direct.union(*(before[j] for j in direct)))
    return any(conflict(steps[i], steps[j]) and i not in before[j] for i, j in combinations(range(len(steps)), 2))


def in_order(steps: list[Step]) -> list[float]:
    values = [float(1 + i) for i in range(BUFFERS)]
    for step in steps:
        values[step.target] += step.factor * values[step.source]
    return values


def on_streams(steps: list[Step]) -> list[float]:
    buffers = [torch.full((4,), float(1 + i), device="npu") for i in range(BUFFERS)]
    torch.npu.synchronize()
    streams = [torch.npu.Stream() for _ in range(STREAMS)]
    events = []
    for step in steps:
        for i in step.waits:
            streams[step.stream].wait_event(events[i])
        with torch.npu.stream(streams[step.stream]):
            buffers[step.target].add_(buffers[step.source], alpha=step.factor)
        events.append(streams[step.stream].record_event())
    torch.npu.synchronize()
    return [buffer[0].item() for buffer in buffers]


@given(programs(), st.integers(0, 2**16))
def test_right_for_every_seed_or_a_race(steps, seed):
    if has_race(steps):
        with pytest.raises(sim.InFlightBufferRace):
            sim.run(on_streams, 1, (steps,), device="npu", seed=seed, check_races=True)
    else:
        assert sim.run(on_streams, 1, (steps,), device="npu", seed=seed, check_races=True) == [in_order(steps)]


def test_some_seed_gives_a_wrong_number_where_there_is_a_race():
    steps = [Step(0, 0, 1, 2, ()), Step(1, 2, 0, 1, ())]
    results = [sim.run(on_streams, 1, (steps,), device="npu", seed=seed)[0] for seed in range(8)]
    assert in_order(steps) in results
    assert any(each != in_order(steps) for each in results)
