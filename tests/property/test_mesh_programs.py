"""Programs of the simulator against the trainer's own steps in the real world: communication, memory, FLOPs.

The trainer builds its model, its pipeline and its optimizer by its own functions; the simulator records one rank of
each kind, without values. 10 examples by default; 400 with --hypothesis-profile=deep.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from mesh_kit import Seen, in_real_numbers
from mesh_programs import (
    Sent,
    bytes_before_update,
    flops_of,
    sent_by_program,
    sent_in_reality,
    standing_bytes,
    step_of,
)
from mesh_training import steps_of
from training_kit import MODELS, SEQ, Arrangement, Problem, arrangements

from hyper_parallel.trainer.config import Config, ParallelConfig
from sim.mesh.job import Job
from sim.mesh.program import Program
from sim.mesh.recipe import Routing
from sim.mesh.tracing.trace import trace

pytestmark = pytest.mark.sim

some = settings(
    max_examples=max(settings.default.max_examples // 20, 1),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def config_of(model: str, parallel: dict[str, Any], accumulate: int = 1) -> Config:
    config = MODELS[model]
    return replace(config, train=replace(config.train, accumulate=accumulate), parallel=ParallelConfig(**parallel))


def check(config: Config, world_size: int, routing: Routing | None = None) -> None:
    """Compare every rank of the world with the program that stands for it."""
    config = replace(config, model=replace(config.model, max_seq_len=SEQ))  # tables just as long as the sequences
    job = Job.of_run(config, world_size, routing=routing)
    programs = trace(job)
    seen = in_real_numbers(steps_of(config, world_size, routing=routing, numbers=False), world_size, stands_for="cuda")
    for place, program in enumerate(programs):
        compare(job, program, seen[job.rank_of_stage_rank(place)])
        # The others of its class do the same among other ranks; with experts, some have got more rows.
        for rank in range(place, world_size, job.dims.pp) if routing is None else ():
            assert_alike(sent_in_reality(job, step_of(seen[rank], 1)), sent_by_program(program), devices=False)
            assert seen[rank].result.memory == seen[place].result.memory


def compare(job: Any, program: Program, seen: Seen) -> None:
    assert_alike(sent_in_reality(job, step_of(seen, 1)), sent_by_program(program))
    assert flops_of(program) == seen.result.flops[1]
    memory, standing = seen.result.memory, standing_bytes(program)
    assert standing["parameters"] == memory["parameters"]
    assert standing["optimizer"] == memory["optimizer"]
    assert bytes_before_update(program, "gradients") == memory["gradients"]


def assert_alike(real: list[Sent], said: list[Sent], *, devices: bool = True) -> None:
    """Assert that events are the same in the same order: all collectives, and the messages to and from each neighbour.

    A rank posts the sends and receives of one turn of its schedule together, in whatever order.
    """
    found, wanted = in_order(said, devices), in_order(real, devices)
    assert list(found) == list(wanted)
    for key, events in wanted.items():
        for number, (one, other) in enumerate(zip(events, found[key], strict=False)):
            assert other == one, f"{key} {number} of a step"
        assert len(found[key]) == len(events)


def in_order(events: list[Sent], devices: bool) -> dict[Any, list[Any]]:
    lines: dict[Any, list[Any]] = {"collective": []}
    for each in events:
        key = "collective" if each.peer is None else (each.op, each.peer if devices else None)
        lines.setdefault(key, []).append(each if devices else (*each[:2], len(each.devices), *each[4:]))
    return dict(sorted(lines.items(), key=str))


EACH: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "one rank": ("dense", 1, {"param_dtype": "bf16"}, 1),
    "two ranks": ("dense", 2, {}, 1),
    "half replicated": ("dense", 4, {"dp_replicate": 2}, 1),
    "tensor parallel": ("dense", 2, {"tp": 2}, 1),
    "ring": ("dense", 2, {"cp": 2, "ulysses_degree": 1}, 1),
    "ulysses": ("dense", 2, {"cp": 2, "ulysses_degree": 2}, 1),
    "bf16, computed again": ("dense", 4, {"tp": 2, "param_dtype": "bf16", "checkpointing": "full"}, 1),
    "several micro-batches": ("dense", 2, {"param_dtype": "bf16"}, 4),
    "kept gathered": (
        "dense",
        2,
        {"param_dtype": "bf16", "checkpointing": "selective", "reshard_after_forward": False},
        2,
    ),
    "tied": ("dense, tied, tokens ignored", 4, {"tp": 2}, 2),
    "experts": ("experts", 4, {"ep": 2}, 1),
    "experts, not split": ("experts", 2, {}, 1),
    "experts and tp": ("experts", 4, {"ep": 2, "tp": 2}, 1),
    "whole experts and tp": ("experts", 4, {"ep": 2, "tp": 2, "etp": 1}, 1),
    "experts and cp": ("experts", 4, {"ep": 2, "cp": 2}, 1),
    "pipeline": ("dense", 2, {"pp": 2}, 4),
    "pipeline, gpipe": ("dense", 2, {"pp": 2, "schedule": "gpipe"}, 4),
    "pipeline and tp": ("dense", 4, {"pp": 2, "tp": 2}, 4),
    "pipeline and dp": ("dense", 4, {"pp": 2, "param_dtype": "bf16"}, 4),
    "pipeline, interleaved": ("dense", 2, {"pp": 2, "schedule": "interleaved", "layers_per_stage": "0,1,1,0"}, 4),
}


@pytest.mark.parametrize("name", EACH)
def test_each_dimension(name):
    model, size, parallel, accumulate = EACH[name]
    check(config_of(model, parallel, accumulate), size, Routing.zipf(1.0) if "expert" in model else None)


def is_programmed(found: Arrangement) -> bool:
    """Whether it is compared here: `fully_shard`, and one stage on each rank of a pipeline."""
    parallel = found.parallel
    return found.world_size <= 8 and parallel.engine != "hsdp" and parallel.schedule in ("1f1b", "gpipe")


@some
@given(st.sampled_from(["dense", "dense, tied, tokens ignored"]), st.sampled_from(["fp32", "bf16"]), st.data())
def test_drawn_ranks_of_a_llama(model, precision, data):
    problem = Problem(model, precision)
    found = data.draw(arrangements(problem).filter(is_programmed))
    assume(not (found.parallel.pp > 1 and MODELS[model].model.tie_embeddings))  # what is tied is summed another way
    event(f"pp {found.parallel.pp} tp {found.parallel.tp} cp {found.parallel.cp}")
    check(found.of(problem), found.world_size)


@some
@given(st.sampled_from(["fp32", "bf16"]), st.sampled_from([Routing(), Routing.zipf(1.0)]), st.data())
def test_drawn_ranks_with_experts(precision, routing, data):
    problem = Problem("experts", precision)
    found = data.draw(arrangements(problem).filter(is_programmed))
    check(found.of(problem), found.world_size, routing)
