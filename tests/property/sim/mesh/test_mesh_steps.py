"""Whole steps of the trainer on a rank that lives alone: every collective of the real world, in its order.

Each drawn example is compared on up to three of up to 16 ranks. Pipelines are in `test_mesh_programs`: a stage that
lives alone cannot ask the others for the shapes of what they send.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from mesh_kit import Seen, alone, assert_same, compare, in_real_numbers
from mesh_training import GivenRouting, only_steps
from mesh_training import steps_of as all_of_steps
from training_kit import MODELS, Arrangement, Problem, arrangements

from hyper_parallel.trainer.config import Config
from sim.mesh.recipe import Routing

pytestmark = pytest.mark.sim

some = settings(max_examples=max(settings.default.max_examples // 20, 1))

ROUTINGS = (Routing(), Routing.zipf(1.0), Routing().drawn(3), Routing.zipf(0.5).drawn(1))


def steps_of(config: Config, world_size: int, routing: Routing | None = None) -> Any:
    """The body of steps, without what `only_steps` leaves out of the comparison."""
    return all_of_steps(config, world_size, routing=routing, counts_flops=False)


def without_pipeline(problem: Problem) -> st.SearchStrategy[Arrangement]:
    return arrangements(problem).filter(lambda found: found.parallel.pp == 1)


def check(problem: Problem, arrangement: Arrangement, data: Any, routing: Routing | None = None) -> None:
    # Of more than four micro-batches all but the first and the last do the same.
    arrangement = arrangement._replace(accumulate=min(arrangement.accumulate, 4))
    config, size = arrangement.of(problem), arrangement.world_size
    limit = data.draw(st.sampled_from([1.0, 0.0]), label="largest norm of gradients; 0: any")
    config = config.with_changes("optimizer", {"max_grad_norm": limit})
    ranks = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=min(size, 2), max_size=3), label="ranks"))
    parallel = config.parallel
    for axis in ("dp_replicate", "cp", "tp", "ep"):
        if getattr(parallel, axis) > 1:
            event(axis)
    event(f"{parallel.engine}, {parallel.checkpointing}, {problem.precision}")
    compare(steps_of(config, size, routing=routing), size, ranks, part=only_steps)


@pytest.mark.tier("full")
@some
@given(st.sampled_from(["dense", "dense, tied, tokens ignored"]), st.sampled_from(["fp32", "bf16"]), st.data())
def test_a_step_of_a_llama_communicates_as_in_the_real_world(model, precision, data):
    problem = Problem(model, precision)
    check(problem, data.draw(without_pipeline(problem)), data)


@pytest.mark.tier("full")
@some
@given(
    st.sampled_from(["experts", "every expert", "experts in all layers, tied"]),
    st.sampled_from(["fp32", "bf16"]),
    st.sampled_from(ROUTINGS),
    st.data(),
)
def test_a_step_with_experts_communicates_as_in_the_real_world(model, precision, routing, data):
    """With values, tokens choose experts by the same counts that the rank without values is given."""
    problem = Problem(model, precision)
    check(problem, data.draw(without_pipeline(problem)), data, routing)


# -- each dimension by itself, on the first and the last rank ------------------------------------------------------

EACH = {
    "two ranks": ("dense", 2, {}),
    "replicated": ("dense", 4, {"dp_replicate": 4}),
    "half replicated": ("dense", 4, {"dp_replicate": 2}),
    "tensor parallel": ("dense", 2, {"tp": 2}),
    "gathered again": ("dense", 2, {"tp": 2, "reshard_inputs": True}),
    "in chunks": ("dense", 2, {"tp": 2, "tp_chunks": 2}),
    "ring": ("dense", 2, {"cp": 2, "ulysses_degree": 1}),
    "ulysses": ("dense", 2, {"cp": 2, "ulysses_degree": 2}),
    "bf16, computed again": ("dense", 4, {"tp": 2, "param_dtype": "bf16", "checkpointing": "full"}),
    "kept gathered": ("dense", 2, {"reshard_after_forward": False}),
    "reduced in each": ("dense", 2, {"reduce_each": True}),
    "hsdp": ("dense", 4, {"engine": "hsdp", "dp_replicate": 2, "checkpointing": "selective"}),
    "one rank, bf16": ("dense", 1, {"param_dtype": "bf16"}),
    "experts": ("experts", 4, {"ep": 2}),
    "experts, not split": ("experts", 2, {}),
    "experts and tp": ("experts", 4, {"ep": 2, "tp": 2}),
    "whole experts and tp": ("experts", 4, {"ep": 2, "tp": 2, "etp": 1}),
    "experts and cp": ("experts", 4, {"ep": 2, "cp": 2}),
    "experts over tp": ("experts", 4, {"ep": 2, "tp": 2, "etp": 1, "fold_experts": True}),
    "experts over cp": ("experts", 2, {"cp": 2, "fold_experts": True}),
    "experts on nodes": ("experts", 4, {"ep": 4, "ranks_per_node": 2}),
    "experts over tp, on nodes": (
        "experts",
        4,
        {"ep": 2, "tp": 2, "etp": 1, "fold_experts": True, "ranks_per_node": 2},
    ),
}


def config_of(model: str, parallel: dict[str, Any], accumulate: int = 1) -> Any:
    config = MODELS[model].with_changes("train", {"accumulate": accumulate})
    for key, value in parallel.items():
        config = config.with_changes("parallel" if hasattr(config.parallel, key) else "precision", {key: value})
    return config


@pytest.mark.tier("test", each=3)
@pytest.mark.parametrize("name", EACH)
def test_each_dimension(name):
    model, size, parallel = EACH[name]
    routing = GivenRouting.zipf(1.0) if "expert" in model else None
    config = config_of(model, parallel, accumulate=2 if "reduce_each" in parallel else 1)
    seen = compare(steps_of(config, size, routing=routing), size, sorted({0, size - 1}), part=only_steps)
    axes = {event.axis for rank in seen for event in rank.events}
    assert all(axis in axes for axis in ("tp", "cp", "ep") if parallel.get(axis, 1) > 1)


# -- the comparison notices ------------------------------------------------------------------------------------------


@cache
def seen_by_both() -> tuple[Seen, Seen]:
    body = steps_of(config_of("dense", {"tp": 2}), 4)
    return only_steps(in_real_numbers(body, 4)[1]), only_steps(alone(body, 4, 1))


def both() -> tuple[Seen, Seen]:
    """What a rank does in the real world and alone, for a test to put a fault in."""
    real, fake = seen_by_both()
    return real._replace(events=list(real.events)), fake._replace(events=list(fake.events))


def test_the_two_are_the_same_before_a_fault_is_put_in():
    real, fake = both()
    assert_same(real, fake)
    assert len(real.events) > 50


@pytest.mark.parametrize("number", [0, 7, 40, -1])
def test_an_event_left_out_is_noticed(number):
    real, fake = both()
    del fake.events[number]
    with pytest.raises(AssertionError, match=r"event \d+, |left out alone"):
        assert_same(real, fake)


@pytest.mark.parametrize("field", ["send_bytes", "recv_bytes"])
def test_other_bytes_are_noticed(field):
    real, fake = both()
    fake.events[13] = fake.events[13]._replace(**{field: getattr(fake.events[13], field) + 1})
    with pytest.raises(AssertionError, match=f"event 13, .*{field}: "):
        assert_same(real, fake)


@pytest.mark.parametrize(
    "other", [{"seq_len": 16}, {"reshard_after_forward": False}, {"param_dtype": "bf16"}, {"checkpointing": "full"}]
)
def test_another_run_is_noticed(other):
    """What differs in one setting only: sequences, resharding, precision, what is computed again."""
    real, _ = both()
    config = config_of("dense", {"tp": 2, **{key: value for key, value in other.items() if key != "seq_len"}})
    if "seq_len" in other:
        config = replace(config, train=replace(config.train, seq_len=other["seq_len"]))
    with pytest.raises(AssertionError):
        assert_same(real, only_steps(alone(steps_of(config, 4), 4, 1)))


def test_another_routing_is_noticed():
    config = config_of("experts", {"ep": 2})
    real = only_steps(in_real_numbers(steps_of(config, 4, routing=Routing.zipf(1.0)), 4)[0])
    assert_same(real, only_steps(alone(steps_of(config, 4, routing=Routing.zipf(1.0)), 4, 0)))
    with pytest.raises(AssertionError, match="all_to_all"):
        assert_same(real, only_steps(alone(steps_of(config, 4, routing=Routing()), 4, 0)))
