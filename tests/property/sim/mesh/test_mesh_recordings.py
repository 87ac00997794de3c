"""Derived recordings beside real ones, event by event and bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.core.machine import find_machine
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.models.llama import LlamaConfig
from hyper_parallel.models.moe import MoEConfig
from sim.mesh.job import Job, StagePart
from sim.mesh.models import find_model
from sim.mesh.recipe import Recipe
from sim.mesh.recordings.derive import Anchor, derive
from sim.mesh.recordings.library import Library, depends_on, recordings
from sim.mesh.tracing.stitch import Recording
from sim.mesh.tracing.trace import record_stage, trace

pytestmark = pytest.mark.sim

few = settings(max_examples=max(settings.default.max_examples // 25, 2))

MODEL = find_model(
    LlamaConfig(
        vocab_size=160,
        hidden_size=32,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
    )
)
FOUR = ((2, 2), (2, 4), (2, 8), (4, 2))
"""Sequences of a micro-batch, and shards, of the recordings that all others follow from."""
KINDS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "sharded": ({}, {}),
    "copies and tp": ({"dp_replicate": 2, "tp": 2}, {"reshard_after_forward": False}),
    "a pipeline": ({"pp": 2}, {"checkpointing": "full"}),
}


def job_of(kind: str, micro_batch: int, shards: int, copies: int = 2) -> Job:
    degrees, recipe = KINDS[kind]
    parts = 2
    degrees = {**degrees, "dp_shard": shards}
    if "dp_replicate" in degrees:
        degrees["dp_replicate"] = copies
    size = 1
    for degree in degrees.values():
        size *= degree
    dims = ParallelDims(**degrees, world_size=size)
    return Job(MODEL, dims, parts * micro_batch, 12, Recipe().having(accumulate=parts, **recipe))


def fresh(job: Job) -> tuple[StagePart, Recording]:
    part = job.stages()[-1]
    recordings.clear()
    return part, recorded(job, part)


def recorded(job: Job, part: StagePart) -> Recording:
    """The recording as it is kept: with ranks of the mesh, not of devices."""
    record_stage(job, part)
    kind = depends_on(job, part, list(part.layers))
    return recordings._kinds[kind][-1].recording


_ANCHORS: dict[str, list[Anchor]] = {}  # recorded once for all examples


def anchors_of(kind: str) -> list[Anchor]:
    if kind not in _ANCHORS:
        made = [(job, *fresh(job)) for job in (job_of(kind, *sizes) for sizes in FOUR)]
        _ANCHORS[kind] = [Anchor(job, part, tuple(part.layers), recording) for job, part, recording in made]
    return _ANCHORS[kind]


@pytest.mark.tier("full")
@few
@given(st.sampled_from(sorted(KINDS)), st.sampled_from([3, 4, 8, 5]), st.sampled_from([16, 4, 8]), st.integers(2, 5))
def test_what_follows_is_what_would_be_recorded(kind, micro_batch, shards, copies):
    job = job_of(kind, micro_batch, shards, copies)
    part, wanted = fresh(job)
    found = derive(anchors_of(kind), job, part, list(part.layers))
    assert found is not None
    for field in dataclasses.fields(Recording):
        assert getattr(found, field.name) == getattr(wanted, field.name), field.name


def test_shards_that_need_padding_are_recorded():
    job = job_of("sharded", 4, 3)
    part, _ = fresh(job)
    assert derive(anchors_of("sharded"), job, part, list(part.layers)) is None


def test_a_difference_that_is_no_number_is_noticed():
    first, second, third, last = anchors_of("sharded")
    segments = {
        key: [(layer, [event for event in events if type(event).__name__ != "Wait"]) for layer, events in chunks]
        for key, chunks in last.recording.segments.items()
    }
    odd = dataclasses.replace(last, recording=dataclasses.replace(last.recording, segments=segments))
    job = job_of("sharded", 8, 4)
    part = job.stages()[-1]
    assert derive([first, second, third, last], job, part, list(part.layers)) is not None
    assert derive([first, second, third, odd], job, part, list(part.layers)) is None


def test_experts_that_do_not_divide_over_ranks_do_not_follow_from_others():
    def kind(shards):
        job = Job(find_model("moe-tiny"), ParallelDims(dp_shard=shards, world_size=shards), 2, 16, Recipe())
        (part,) = job.stages()
        return depends_on(job, part, list(part.layers))

    assert kind(4) == kind(8) != kind(16) == kind(3)  # split on dim 0, and inside of each


def test_experts_on_nodes_follow_from_each_other():
    def job(copies: int) -> Job:
        dims = ParallelDims(dp_replicate=copies, dp_shard=2, ep=4, world_size=8 * copies)
        return Job(find_model(MoEConfig(num_hidden_layers=2)), dims, 1, 12, Recipe().having(ranks_per_node=2))

    part, recording = fresh(job(2))
    anchor = Anchor(job(2), part, tuple(part.layers), recording)
    part, wanted = fresh(job(3))
    found = derive([anchor], job(3), part, list(part.layers))
    assert found is not None
    assert (found.segments, found.groups) == (wanted.segments, wanted.groups)
    assert {("ep_nodes", (0, 2)), ("ep_node", (0, 1))} <= {(group.axis, group.ranks) for group in found.groups}


def test_a_recording_serves_the_machines_that_plan_alike():
    fast = find_machine("h100-sxm")
    slow = fast.with_figures(intra__bandwidth=1e6, inter__bandwidth=1e6)  # plans as the unnamed machine
    jobs = [dataclasses.replace(job_of("copies and tp", 2, 2), machine=machine) for machine in (None, fast, slow)]
    wanted = [fresh(job)[1] for job in jobs]
    assert wanted[0].segments == wanted[2].segments != wanted[1].segments
    recordings.clear()
    before = recordings.made
    for job, recording in zip(jobs * 2, wanted * 2, strict=True):
        assert record_stage(job, job.stages()[-1]).segments == recording.segments
    assert recordings.made == before + 2


def test_both_ranks_of_a_pipeline_follow_from_each_other():
    """Of many stages on two ranks one is recorded: the others send to the same two ranks as it, or back."""
    model = find_model("llama-tiny")
    recipe = Recipe().having(schedule="interleaved", accumulate=2)
    job = Job(model, ParallelDims(pp=2, dp_shard=2, world_size=4), 2, 16, recipe)
    _, one, other, _ = job.stages()
    assert (one.rank, other.rank) == (1, 0)
    recordings.clear()
    anchor = Anchor(job, one, tuple(one.layers), recorded(job, one))
    found = derive([anchor], job, other, list(other.layers))
    recordings.clear()
    assert found == recorded(job, other)


def test_a_library_records_once_and_forgets():
    recordings.clear()
    job = job_of("sharded", 2, 2)
    made = recordings.made
    first = trace(job)
    other = dataclasses.replace(job, ring_kernel="cudnn")  # which no ring is computed with
    again = trace(other)
    assert recordings.made == made + 1
    assert first == again
    assert trace(other)[0] is again[0]
    assert trace(job)[0] is not again[0], "the last step alone is kept"
    small, anchor = Library(most_events=10), anchors_of("sharded")[0]
    for other in anchors_of("sharded")[:2], anchors_of("a pipeline")[:2]:
        for one in other:
            small.get(one.job, one.part, one.kept, lambda one=one: one.recording)
    assert small.made == 4
    small.get(anchor.job, anchor.part, anchor.kept, lambda: anchor.recording)
    assert small.made == 5, "it was forgotten, as the last kind alone is more than there is room for"
