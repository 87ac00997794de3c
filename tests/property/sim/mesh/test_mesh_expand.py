"""A deep stage made of the recording of a shallow one is the recording of the deep one, event by event.

And ranks of which one stands for all do the same, each in its place; those that stand for themselves do not.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mesh_kit import in_real_numbers
from mesh_programs import renumbered, sent_by_program, standing_bytes, updated
from mesh_training import steps_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import sim
from benchmarks.published.step import PublishedRecipe
from hyper_parallel.core.fully_shard.api import fully_shard
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.pipeline import SCHEDULES
from hyper_parallel.models.llama import LlamaConfig
from hyper_parallel.models.moe import MoEConfig
from hyper_parallel.trainer.config import Config, OptimizerConfig, ParallelConfig, TrainConfig
from sim.mesh import Custom
from sim.mesh.job import Job
from sim.mesh.models import find_model
from sim.mesh.program import Comm
from sim.mesh.recipe import Recipe
from sim.mesh.tracing.stitch import EDGE, kept_layers
from sim.mesh.tracing.trace import trace

pytestmark = pytest.mark.sim

few = settings(max_examples=max(settings.default.max_examples // 50, 1))

DENSE = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 4, "expert_intermediate_size": 8, "experts_per_token": 2}

DEGREES: tuple[dict[str, int], ...] = (
    {"dp_shard": 2},
    {"tp": 2},
    {"cp": 2},
    {"dp_replicate": 2, "dp_shard": 2},
    {"pp": 2},
    {"pp": 2, "dp_shard": 2},
    {"dp_shard": 2, "tp": 2},
)


def dims_of(degrees: dict[str, int]) -> ParallelDims:
    size = 1
    for degree in degrees.values():
        size *= degree
    return ParallelDims(**degrees, world_size=size)


def job_of(layers: int, degrees: dict[str, int], experts: int | None = None, batch: int = 4, **recipe: Any) -> Job:
    """A job of a tiny model; `experts`: how many of its layers are dense."""
    config = LlamaConfig(**DENSE, num_hidden_layers=layers)
    if experts is not None:
        config = MoEConfig(**DENSE, **EXPERTS, num_hidden_layers=layers, num_dense_layers=experts)
    zero = recipe.pop("zero", 3)
    recipe = {"accumulate": batch if "pp" in degrees else 1, "reshard_after_forward": zero == 3, **recipe}
    others = {"level": zero} if zero < 2 else {}
    kind = PublishedRecipe if others or "sequence_parallel" in recipe else Recipe
    return Job(find_model(config), dims_of(degrees), batch=batch, seq_len=8, recipe=kind().having(**recipe, **others))


def assert_the_same(job: Job) -> None:
    expanded, whole = trace(job), trace(job, every_layer=True)
    assert len(expanded) == len(whole)
    for one, other in zip(expanded, whole, strict=True):
        found, wanted = renumbered(one), renumbered(other)
        for number, (event, expected) in enumerate(zip(found, wanted, strict=False)):
            assert event == expected, f"event {number} of {len(wanted)}: {event} and not {expected}"
        assert len(found) == len(wanted)
        assert updated(one) == updated(other)
        assert one.order == other.order


# A layer more than is kept, more often than several: recording all of them takes most of the time.
DEEP = st.sampled_from([2 * EDGE + 1, 2 * EDGE + 2, 2 * EDGE + 1, 2 * EDGE + 1, 2 * EDGE + 3])


@pytest.mark.tier("full")
@few
@given(
    DEEP,
    st.sampled_from(DEGREES),
    st.sampled_from([1, 2, 1, 1, 2, 4]),
    st.sampled_from([3, 2]),
    st.sampled_from(["none", "full", "selective"]),
    st.sampled_from(["bf16", "fp32"]),
)
def test_a_deep_llama_from_a_few_of_its_layers(layers, degrees, parts, zero, checkpointing, dtype):
    if "pp" in degrees:
        layers, parts = 2 * layers, max(parts, 2)
    job = job_of(layers, degrees, accumulate=parts, zero=zero, checkpointing=checkpointing, param_dtype=dtype)
    assert_the_same(job)


LATER = [("zero-bubble", "dp_shard", "bf16"), ("1f1b", "dp_shard", "bf16"), ("zero-bubble", "tp", "fp32")]


@pytest.mark.tier("full", each=3)
@pytest.mark.parametrize(("schedule", "axis", "dtype"), [case for case in LATER if SCHEDULES[case[0]].is_available])
def test_deep_stages_that_reduce_or_get_gradients_of_weights_late(schedule, axis, dtype):
    options = {"schedule": schedule, "stages_per_rank": 1, "param_dtype": dtype}
    assert_the_same(job_of(2 * (2 * EDGE + 1), {"pp": 2, axis: 2}, batch=2, accumulate=2, **options))


@pytest.mark.tier("full")
@few
@given(
    DEEP,
    st.sampled_from([0, 1, 0, 2, 1, 3]),
    st.sampled_from([{"ep": 2}, {"dp_shard": 2}, {"ep": 2, "tp": 2}, {"ep": 2, "dp_shard": 2}]),
    st.sampled_from(["none", "full"]),
)
def test_a_deep_model_with_experts_from_a_few_of_its_layers(layers, dense, degrees, checkpointing):
    assert_the_same(job_of(layers + dense, degrees, experts=dense, checkpointing=checkpointing))


@pytest.mark.tier("full", each=3)
@pytest.mark.parametrize("zero", [1, 0])
@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, {"pp": 2, "dp_shard": 2}])
def test_whole_weights_of_all_layers_are_there(zero, degrees):
    """Flat buffers are as long as all layers need, and all of them is reduced and gathered."""
    job = job_of((2 * EDGE + 1) * degrees.get("pp", 1), degrees, zero=zero, accumulate=2)
    for one, other in zip(trace(job), trace(job, every_layer=True), strict=True):
        assert standing_bytes(one) == standing_bytes(other)
        assert sum(sent.size for sent in sent_by_program(one)) == sum(sent.size for sent in sent_by_program(other))


@given(st.lists(st.sampled_from("ab"), max_size=40), st.integers(0, 9))
def test_layers_that_are_kept(kinds, first):
    """In order, with both ends of each run of one kind, and at most six of the run that is cut."""
    layers = range(first, first + len(kinds))
    kept = kept_layers(layers, kinds)
    assert kept == sorted(set(kept))
    assert set(kept) <= set(layers)
    left_out = sorted(set(layers) - set(kept))
    if left_out:
        assert left_out == list(range(left_out[0], left_out[-1] + 1)), "one gap"
        around = [kinds[layer - first] for layer in range(left_out[0] - EDGE, left_out[-1] + EDGE + 1)]
        assert len(set(around)) == 1, "of layers of one kind, as far as the engine reaches"
    runs = [len(list(run)) for _, run in itertools.groupby(kinds)]
    assert bool(left_out) == (max(runs, default=0) > 2 * EDGE)


@pytest.mark.tier("full")
def test_a_difference_in_a_middle_layer_is_noticed(monkeypatch):
    """The comparison sees one layer that computes something else."""
    job = job_of(2 * EDGE + 1, {"dp_shard": 2})
    programs = trace(job)
    wanted = renumbered(programs[0])
    other = trace(dataclasses.replace(job, recipe=Recipe().having(checkpointing="full first 5")))
    assert renumbered(other[0]) != wanted
    segment = programs[0].segments["forward", 0, "only"]
    del segment.events[len(segment.events) // 2]
    assert renumbered(programs[0]) != wanted


@dataclasses.dataclass(frozen=True)
class At(Job):
    """A job recorded on another rank of each class: so many ranks of the mesh further on."""

    further: int = 0

    def rank_of_stage_rank(self, pp_rank: int) -> int:
        return super().rank_of_stage_rank(pp_rank) + self.further


def said(job: Job, further: int) -> list[list[Any]]:
    values = {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
    return [renumbered(program, ranks=False) for program in trace(At(**values, further=further))]


ALIKE: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "experts": ({"ep": 2, "dp_shard": 2}, {}),
    "dp": ({"dp_shard": 4}, {}),
    "replicated": ({"dp_replicate": 2, "dp_shard": 2}, {}),
    "tp": ({"tp": 2, "dp_shard": 2}, {}),
    "tp, whole sequences": ({"tp": 2}, {"sequence_parallel": False}),
    "pp": ({"pp": 2, "dp_shard": 2}, {}),
    "pp and tp": ({"pp": 2, "tp": 2}, {}),
    "zero 1": ({"dp_shard": 4}, {"level": 1}),
}


@pytest.mark.tier("test", each=3)
@pytest.mark.parametrize("name", ALIKE)
def test_ranks_of_a_class_do_the_same(name):
    degrees, recipe = ALIKE[name]
    job = job_of(2, degrees, experts=0 if name == "experts" else None, **recipe)
    classes = job.dims.world_size // job.dims.pp
    first = said(job, 0)
    for further in range(1, classes):
        for one, other in zip(said(job, further), first, strict=True):
            assert one == other, f"{further} ranks further on"


def test_every_stage_that_stands_for_itself_does_something_else():
    job = job_of(4, {"pp": 4}, batch=4)
    programs = [renumbered(program, ranks=False) for program in trace(job)]
    for one, other in itertools.combinations(programs, 2):
        assert one != other


def test_programs_count_all_ranks():
    for degrees in DEGREES[3::2]:
        job = job_of(2, degrees)
        programs = trace(job)
        assert sum(program.like for program in programs) == job.dims.world_size
        assert len(programs) == job.dims.pp


HELD: tuple[dict[str, int], ...] = (
    {"dp_shard": 5},
    {"dp_shard": 3, "dp_replicate": 2},
    {"dp_shard": 3, "tp": 2},
    {"dp_shard": 3, "cp": 2},
    {"pp": 2, "dp_shard": 3},
    {"dp_shard": 3, "ep": 2},
)


def assert_held(job: Job, real: list[list[tuple[str, int]]]) -> None:
    """Assert that programs count the ranks that hold as much of each weight, given what every rank really holds."""
    programs = trace(job)
    count = len(real) // len(programs)
    for stage, program in enumerate(programs):
        ranks = real[stage * count :][:count]
        own = ranks[program.rank - stage * count]
        assert program.like == ranks.count(own)
        bytes_ = Counter(sum(size for _, size in each) for each in ranks)
        assert dict(program.held) == (bytes_ if len(bytes_) > 1 else {})
        if program.held:
            assert program.held[0][0] == sum(size for _, size in own)
        if len(programs) == 1:  # one place is recorded of all stages
            assert sum(size for _, size in own) == max(bytes_)


@pytest.mark.tier("full")
@few
@given(
    st.tuples(st.sampled_from([24, 28]), st.sampled_from([258, 260]), st.integers(1, 7)),
    st.sampled_from(HELD),
    st.booleans(),
)
@example((28, 258, 7), {"dp_shard": 5}, False)
@example((24, 260, 3), {"dp_shard": 4, "tp": 2}, True)
def test_ranks_that_hold_other_amounts_are_not_alike(sizes, degrees, muon):
    width, vocab, layers = sizes
    dims = dims_of(degrees)
    shape = DENSE | {"intermediate_size": width, "vocab_size": vocab, "num_hidden_layers": layers + dims.pp}
    model = MoEConfig(**shape, **EXPERTS, num_dense_layers=1) if dims.ep > 1 else LlamaConfig(**shape)
    config = Config(
        train=TrainConfig(model="moe" if dims.ep > 1 else "llama", batch_size=dims.batch_ranks * dims.pp, seq_len=12),
        parallel=ParallelConfig(**degrees, whole_parameters=muon),
        optimizer=OptimizerConfig(muon=muon),
    )
    config = dataclasses.replace(config, model=model)
    seen = in_real_numbers(steps_of(config, dims.world_size, steps=0, counts_flops=False), dims.world_size)
    held = [[(name, 4 * math.prod(local)) for name, (_, local, *_) in rank.result.made] for rank in seen]
    assert_held(Job.of_run(config, dims.world_size), held)


def test_ranks_without_any_row_are_counted_and_communicate_all_the_same():
    """Of three rows over eight ranks five have none; the collectives are those of the others, padding and all."""
    linear = Custom(lambda: nn.Linear(64, 3), lambda batch, seq_len: torch.zeros(batch, seq_len, 64))
    dims = ParallelDims(dp_shard=8, world_size=8)
    job = Job(find_model(linear), dims, batch=1, seq_len=4)

    def body() -> list[tuple[str, int]]:
        model = fully_shard(nn.Linear(64, 3), mesh=init_device_mesh("cpu", (8,)))
        return [(name, 4 * param.to_local().numel()) for name, param in model.named_parameters()]

    assert_held(job, sim.run(body, 8))
    assert trace(job)[0].held == ((260, 3), (0, 5))
    assert said(job, 7)[0] != said(job, 0)[0]
    sizes = [
        [
            (event.op, event.size)
            for segment in program.segments.values()
            for event in segment.events
            if isinstance(event, Comm)
        ]
        for program in (trace(job)[0], trace(At(**vars(job), further=7))[0])
    ]
    assert sizes[0] == sizes[1]
    assert ("all_gather", 2 * 8 * 65) in sizes[0]
