"""A search over ways to train: what is enumerated, what is cut off and why, in which order, and what is said of it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mesh_fakes import fake_estimate, quantity
from torch import nn

from benchmarks.published.gpt import GPTConfig, GPTSpec, gpt_tiny
from benchmarks.published.step import PublishedRecipe
from hyper_parallel.core.machine.description import find_machine
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.core.pipeline.schedules import find_schedule
from hyper_parallel.models.llama import LlamaConfig
from hyper_parallel.models.moe import MoEConfig
from sim.mesh.cost import Pricing, UnknownOperation
from sim.mesh.estimate import estimate
from sim.mesh.job import Job
from sim.mesh.models import find_model
from sim.mesh.program import Comm, CommGroup
from sim.mesh.recipe import Recipe
from sim.mesh.searching.bounds import (
    even_memory,
    even_time,
    guess_memory,
    guess_seconds,
    least_memory,
    message_seconds,
    rates_of,
)
from sim.mesh.searching.budget import NoPolicyFits, fit_job
from sim.mesh.searching.candidates import divisors, enumerate_candidates
from sim.mesh.searching.explore import Exploration, NothingFits
from sim.mesh.searching.floors import Floor, Floors, least_time, least_turns
from sim.mesh.searching.ranking import Found, chance_faster, limit_of, search_dict
from sim.mesh.searching.search import search
from sim.mesh.searching.space import Candidate, Rejected, Shape, Space, default_recipes, owners_of, shape_of
from sim.mesh.spec import Custom, ModelSpec

GIB = 2**30
H100_BYTES = find_machine("h100-sxm").memory_bytes
H100 = rates_of(find_machine("h100-sxm"))


def space(model: Any = "llama3-8b", devices: int = 64, batch: int = 128, seq_len: int = 8192, **rest: Any) -> Space:
    rest = {"recipes": default_recipes(), "devices_per_node": 8, **rest}
    return Space(shape_of(find_model(model), seq_len), devices, global_batch=batch, seq_len=seq_len, **rest)


def find(*arguments: Any, **options: Any) -> Any:
    return search(*arguments, **{"estimator": fake_estimate, "seq_len": 8192, "tp_chunks": (), **options})


# Candidates


@pytest.mark.parametrize("number", [1, 2, 12, 49, 97, 16384])
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


@pytest.mark.tier("full")
def test_every_candidate_is_one_that_the_trainer_accepts() -> None:
    config = MoEConfig(num_hidden_layers=8, num_experts=16, num_attention_heads=8, num_key_value_heads=4)
    where = space(config)
    found = [entry for entry in enumerate_candidates(where) if isinstance(entry, Candidate)]
    assert len(set(found)) == len(found) > 100
    for candidate in found:
        dims = candidate.dims
        dims.validate_against_model(SimpleNamespace(config=config), 8192)
        assert candidate.batch * dims.batch_ranks == 128
        assert dims.world_size == 64
        assert candidate.batch % candidate.parts == 0
        assert dims.tp <= 4, "key and value heads"
    for axis in ("tp", "pp", "ep", "cp", "dp_shard", "dp_replicate"):
        assert len({getattr(candidate.dims, axis) for candidate in found}) > 1, f"no choice of {axis}"
    assert {(c.dims.tp, c.dims.etp) for c in found if c.dims.ep > 1} >= {(2, 1), (2, 2)}
    assert {(c.dims.tp, c.dims.etp, c.dims.ep) for c in found if c.dims.fold_experts} >= {
        (2, 1, 1),
        (2, 1, 2),
        (4, 1, 4),
    }
    assert all(c.dims.expert_ranks > c.dims.ep for c in found if c.dims.fold_experts)
    assert {c.recipe.parallel.schedule for c in found if c.dims.pp > 1} == {"1f1b", "interleaved"}


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("per_token", "devices_per_node", "asked", "expected"),
    [
        (8, 8, None, {1: None, 8: None, 16: 8, 32: 8}),
        (2, 8, None, {8: None, 16: 8, 32: None}),  # of 4 nodes a token goes to 1.75, and to 2 experts
        (1, 8, None, {16: None, 32: None}),
        (2, 8, 8, {8: None, 16: 8, 32: 8}),
        (8, 12, None, {8: None, 16: None, 32: None}),  # not equally many on each node
        (8, 8, 4, {4: None, 8: 4, 16: 4}),
    ],
)
def test_tokens_go_to_each_node_once_where_that_saves_rows(
    per_token: int, devices_per_node: int, asked: int | None, expected: dict[int, int | None]
) -> None:
    model = MoEConfig(num_experts=32, experts_per_token=per_token)
    where = space(
        model,
        devices=64,
        batch=64,
        fixed={"tp": 1, "cp": 1, "pp": 1},
        devices_per_node=devices_per_node,
        recipes=[Recipe().having(ranks_per_node=asked)],
    )
    found = [entry for entry in enumerate_candidates(where) if isinstance(entry, Candidate)]
    for ep, on_nodes in expected.items():
        assert {one.recipe.parallel.ranks_per_node for one in found if one.dims.ep == ep} == {on_nodes}
    once = next((one for one in found if one.recipe.parallel.ranks_per_node), None)
    if once is not None and asked in (None, devices_per_node):
        assert "tokens once to each node" in str(once)
        each = dataclasses.replace(once, recipe=once.recipe.having(ranks_per_node=None))
        assert guess_seconds(where.shape, once, 8192, H100) < guess_seconds(where.shape, each, 8192, H100)


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("where", "reason", "detail"),
    [
        ({}, "tp beyond a node", "tp=16 ranks would not fit into a node of 8"),
        (
            {"model": LlamaConfig(num_key_value_heads=2)},
            "tp does not divide the model",
            "2 key and value heads cannot be",
        ),
        ({"batch": 96}, "the batch does not split", "96 sequences over 64 data-parallel ranks"),
        ({"batch": 8}, "more data-parallel ranks than sequences", "8 sequences over 64 data-parallel ranks"),
        ({}, "the pipeline cannot run", "'1f1b' needs at least as many micro-batches as stages"),
        ({"seq_len": 8196}, "the sequence does not split", "8196 tokens are no multiple of 8"),
        (
            {"fixed": {"cp": 4, "ulysses_degree": 3}},
            "the sequence does not split",
            "ulysses_degree=3 does not divide cp=4, or the heads of tp=1",
        ),
        (
            {"devices": 192, "fixed": {"cp": 3, "ulysses_degree": 3}},
            "the sequence does not split",
            "ulysses_degree=3 does not divide cp=3, or the heads of tp=1",
        ),
    ],
)
def test_what_is_no_candidate_has_a_reason(where: dict[str, Any], reason: str, detail: str) -> None:
    rejected = [entry for entry in enumerate_candidates(space(**where)) if isinstance(entry, Rejected)]
    assert any(entry.reason == reason and detail in entry.detail for entry in rejected), {
        (entry.reason, entry.detail) for entry in rejected
    }


def test_what_is_fixed_stays() -> None:
    fixed = {"tp": 4, "pp": 2, "dp_replicate": 2}
    found = [entry for entry in enumerate_candidates(space(fixed=fixed)) if isinstance(entry, Candidate)]
    assert found
    assert {(c.dims.tp, c.dims.pp, c.dims.dp_replicate) for c in found} == {(4, 2, 2)}


def test_a_model_without_plan_or_stages_is_only_sharded() -> None:
    where = space()
    alone = dataclasses.replace(where, shape=dataclasses.replace(where.shape, splits=False, has_stages=False))
    found = [entry for entry in enumerate_candidates(alone) if isinstance(entry, Candidate)]
    assert {(c.dims.tp, c.dims.pp) for c in found} == {(1, 1)}


def test_layers_are_also_placed_unevenly() -> None:
    where = space(fixed={"pp": 4, "tp": 1, "cp": 1}, recipes=(Recipe(),), accumulate=8)
    sizes = {c.layers_per_stage for c in enumerate_candidates(where) if isinstance(c, Candidate)}
    assert None in sizes
    uneven = [counts for counts in sizes if counts is not None]
    assert all(sum(counts) == 32 for counts in uneven)
    assert {len(counts) for counts in uneven} == {4, 8, 16}, "one, two and four stages on each rank"
    shape = shape_of(find_model("llama3-8b"), 8192)
    assert even_time(shape, 4) == (8, 9, 9, 6), "the head of llama3-8b is 2.4 layers"
    piped = Candidate(ParallelDims(pp=4, dp_shard=16, world_size=64), Recipe().having(accumulate=8), 8)
    first, second, third, _ = even_memory(shape, piped, 8192)
    assert first < second < third, "the first one keeps four micro-batches"
    assert "layers 8,9,9,6" in dataclasses.replace(piped, layers_per_stage=(8, 9, 9, 6)).how


def test_candidates_are_told_in_one_line() -> None:
    dims = ParallelDims(dp_replicate=2, dp_shard=2, cp=2, pp=2, ulysses_degree=1, world_size=16)
    candidate = Candidate(dims, Recipe().having(checkpointing="full", accumulate=4), batch=8)
    assert str(candidate) == "dp_replicate=2 dp_shard=2 pp=2 cp=2 (ring); ZeRO-3, full ckpt, 1f1b of 4 x 2"


# Bounds


def test_the_bound_of_memory_of_a_model_alone() -> None:
    """Llama3-8B in fp32 with AdamW takes 12 bytes for each parameter, 4 for its gradient, and what a batch needs."""
    spec = find_model("llama3-8b")
    shape = shape_of(spec, 8192)
    recipe = Recipe().having(param_dtype="fp32", checkpointing="full")
    activations = 32 * 8192 * 4096 * 4 + 8192 * 128_256 * 4
    whole = Candidate(ParallelDims(), recipe, 1)
    assert least_memory(shape, whole, 8192) == 16 * spec.num_parameters, "gradients come as activations go"
    cut = Candidate(ParallelDims(), recipe.having(accumulate=2), 2)
    assert least_memory(shape, cut, 8192) == 16 * spec.num_parameters + activations


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"checkpointing": "full"}, {"checkpointing": "selective"}),
        ({"checkpointing": "selective"}, {"checkpointing": "none"}),
        ({"reshard_after_forward": True}, {"reshard_after_forward": False}),
        ({"accumulate": 4}, {"accumulate": 2}),
        ({"master_dtype": "bf16"}, {"master_dtype": "fp32"}),
        ({"muon": True}, {"muon": False}),
    ],
)
def test_what_keeps_less_has_the_smaller_bound(less: dict[str, Any], more: dict[str, Any]) -> None:
    shape, dims = shape_of(find_model("llama3-8b"), 8192), ParallelDims(dp_shard=8, tp=2, world_size=16)
    bounds = [least_memory(shape, Candidate(dims, Recipe().having(**choice), 4), 8192) for choice in (less, more)]
    assert bounds[0] < bounds[1]
    own = dataclasses.replace(shape, own_optimizer=True)  # which may keep nothing
    assert least_memory(own, Candidate(dims, Recipe().having(**less), 4), 8192) < bounds[0]


def test_more_ranks_along_any_axis_of_the_model_have_the_smaller_bound() -> None:
    shape = shape_of(find_model("llama3-8b"), 8192)
    alone = least_memory(shape, Candidate(ParallelDims(), Recipe(), 8), 8192)
    for axis in ("tp", "pp", "cp", "dp_shard"):
        dims = ParallelDims(**{axis: 4}, world_size=4)
        assert least_memory(shape, Candidate(dims, Recipe(), 8), 8192) < alone, axis


def test_a_pipeline_keeps_no_more_micro_batches_than_it_has_stages_unless_it_runs_all_forwards_first() -> None:
    shape, dims = shape_of(find_model("llama3-8b"), 8192), ParallelDims(pp=4, world_size=4)
    kept = {
        (schedule, parts): least_memory(
            shape, Candidate(dims, Recipe().having(accumulate=parts, schedule=schedule), parts), 8192
        )
        for schedule in ("1f1b", "gpipe")
        for parts in (4, 8)
    }
    assert kept["1f1b", 8] == kept["1f1b", 4] == kept["gpipe", 4] < kept["gpipe", 8]


@pytest.mark.tier("test")
def test_experts_are_bounded_apart() -> None:
    shape = shape_of(find_model("mixtral-8x7b"), 4096)
    assert 0.9 < shape.expert_parameters / shape.parameters < 1
    split = least_memory(shape, Candidate(ParallelDims(ep=8, world_size=8), Recipe(), 1), 4096)
    sharded = least_memory(shape, Candidate(ParallelDims(dp_shard=8, world_size=8), Recipe(), 1), 4096)
    assert split == pytest.approx(sharded, rel=0.01)


def test_the_guess_of_time_knows_bubbles_and_recomputation() -> None:
    shape = shape_of(find_model("llama3-8b"), 8192)

    def guess(dims: ParallelDims, **recipe: Any) -> float:
        return guess_seconds(shape, Candidate(dims, Recipe().having(**recipe), 16), 8192, H100)

    pipeline, node = ParallelDims(pp=4, world_size=4), ParallelDims(dp_shard=8, world_size=8)
    assert guess(pipeline, accumulate=16) < guess(pipeline, accumulate=4)
    assert guess(pipeline, accumulate=4, schedule="interleaved") < guess(pipeline, accumulate=4)
    assert guess(node) < guess(node, checkpointing="full") < 1.4 * guess(node)
    assert guess(ParallelDims(dp_shard=32, world_size=32), accumulate=16) > guess(node, accumulate=16)


def test_the_guess_of_a_pipeline_knows_its_fullest_rank_and_its_messages() -> None:
    """The head is as long as 2.4 layers, and 8 stages on each rank send 8 times as often."""
    shape, dims = shape_of(find_model("llama3-8b"), 8192), ParallelDims(pp=2, dp_shard=32, world_size=64)

    def guess(layers: tuple[int, ...] | None, stages: int) -> float:
        recipe = Recipe().having(accumulate=4, schedule="interleaved", stages_per_rank=stages)
        return guess_seconds(shape, Candidate(dims, recipe, 4, layers), 8192, H100)

    assert guess(even_time(shape, 4), 2) < 0.97 * guess((8,) * 4, 2)
    bubbles = (1 + 1 / (4 * 8)) / (1 + 1 / (4 * 2))
    assert guess((2,) * 16, 8) > 1.02 * bubbles * guess((8,) * 4, 2), "messages take some of what the bubble gives"


@pytest.mark.parametrize("layers", [None, (6, 2), (1, 1, 3, 3), (1, 1, 5, 1)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "looped-bfs"])
def test_the_guess_of_a_pipeline_waits_as_its_schedule_does(schedule: str, layers: tuple[int, ...] | None) -> None:
    """Where nothing but compute takes time: fewer micro-batches than ranks, and rounds of more of them, too.

    What a schedule takes is counted in layers, which take as long as all of its micro-batches on one device.
    """
    shape = Shape(8, 1024, 4096, 8, 8, 128, vocab=0, parameters=10**8, flops_per_token=6e8)
    machine = dataclasses.replace(H100, inside=math.inf, between=math.inf)
    several = schedule in ("interleaved", "looped-bfs")
    counts = (1, 2, 4) if several and layers is None else (1,)
    tried = set()
    for ranks, each, parts in itertools.product((2, 4, 8), counts, (1, 2, 3, 6, 8, 9)):
        recipe = Recipe().having(schedule=schedule, accumulate=parts, stages_per_rank=each if several else None)
        one = Candidate(ParallelDims(pp=ranks, world_size=ranks), recipe, parts, layers)
        sizes = [8 / ranks / each] * ranks * each if layers is None else layers
        if len(sizes) != ranks * each or ranks * each > 8:
            continue
        with contextlib.suppress(ValueError):
            find_schedule(schedule).check_micro_batches(parts, ranks, ranks * each)
            alone = dataclasses.replace(one, dims=ParallelDims(), layers_per_stage=None)
            waits = guess_seconds(shape, one, 1024, machine) / guess_seconds(shape, alone, 1024, machine)
            assert waits * 8 * parts == pytest.approx(least_time(one, sizes, [0.0] * len(sizes), 0.0)), one
            tried.add(parts < ranks)
    assert True in tried or schedule == "1f1b"


@pytest.mark.parametrize(
    ("degrees", "speed"), [({"pp": 2, "dp_shard": 8}, "between"), ({"pp": 4, "dp_shard": 4}, "inside")]
)
def test_a_message_is_as_fast_as_between_the_nearest_stages(degrees: dict[str, int], speed: str) -> None:
    """Of 16 ranks, 4 stages have two on each node: a bound takes the messages between these."""
    shape = shape_of(find_model("llama3-8b"), 8192)
    candidate = Candidate(ParallelDims(**degrees, world_size=16), Recipe().having(accumulate=4), 8)
    assert message_seconds(shape, candidate, 8192, H100) == 2 * 8192 * 4096 * 2 / getattr(H100, speed)


def test_the_guess_knows_which_rank_has_the_last_stage() -> None:
    """The stages of zbv lie in a V: the first rank has the first stage and the last, with the head."""
    shape, dims = shape_of(find_model("llama3-8b"), 8192), ParallelDims(pp=2, world_size=2)

    def guess(layers: tuple[int, ...]) -> float:
        recipe = Recipe().having(accumulate=4, schedule="zbv", stages_per_rank=2)
        return guess_seconds(shape, Candidate(dims, recipe, 4, layers), 8192, H100)

    assert guess((2, 13, 4, 13)) < guess((8, 8, 8, 8))


def test_gradients_that_are_reduced_in_each_micro_batch_are_not_guessed_to_be_whole() -> None:
    shape, dims = shape_of(find_model("llama3-8b"), 8192), ParallelDims(dp_shard=8, world_size=8)
    guesses = [
        guess_memory(shape, Candidate(dims, Recipe().having(accumulate=8, reduce_each=each), 8), 8192)
        for each in (True, False)
    ]
    assert guesses[1] - guesses[0] == pytest.approx(4 * shape.parameters * 7 / 8), "instead of an eighth of them"
    assert guesses[0] < H100_BYTES, "it fits, as an estimate says"


def test_the_guess_of_weights_over_nodes_has_the_adapters_of_all_their_devices() -> None:
    shape = shape_of(find_model("llama3-8b"), 8192)

    def guess(shards: int) -> float:
        candidate = Candidate(ParallelDims(dp_shard=shards, world_size=shards), Recipe(), 1)
        return guess_seconds(shape, candidate, 2048, H100)  # so few tokens that compute does not hide the weights

    assert guess(8) < guess(64) < 1.3 * guess(8)


def test_the_guess_of_zero_3_gathers_weights_twice_in_each_micro_batch() -> None:
    shape, dims = shape_of(find_model("llama3-8b"), 8192), ParallelDims(dp_shard=8, world_size=8)

    def guess(zero: int, parts: int) -> float:  # of so few tokens that compute does not hide the weights
        return guess_seconds(
            shape,
            Candidate(dims, Recipe().having(reshard_after_forward=zero == 3, accumulate=parts), parts),
            64 // parts,
            H100,
        )

    once = guess(3, 1) - guess(2, 1)
    assert once > 0
    assert guess(3, 4) - guess(2, 4) == pytest.approx(7 * once, rel=0.1), "8 gathers and not 1; and before, 2"


@pytest.mark.tier("test")
@given(
    hardware=st.sampled_from(("h100-sxm", "a100-80gb", "b200", "ascend-910b", "ascend-910c-superpod")),
    op=st.sampled_from(("all_gather", "reduce_scatter", "all_reduce", "all_to_all")),
    size=st.integers(1, 2**34),
    ranks=st.integers(2, 600),
    stride=st.sampled_from((1, 2, 3, 4, 6, 8, 16, 24)),
)
def test_guesses_price_a_collective_as_estimates_do(hardware: str, op: str, size: int, ranks: int, stride: int) -> None:
    """How the group lies on the nodes is counted in the one, and follows from numbers in the other."""
    device = find_machine(hardware)
    group = CommGroup("dp_shard", range(0, ranks * stride, stride))
    price = Pricing(device).comm(Comm(op, 0, size, 0, "bfloat16", 0, 0, 0), group)
    assert rates_of(device).collective(op, size, ranks, stride) == price.seconds


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize(
    ("model", "degrees", "batch", "recipe"),
    [
        ("llama-tiny", {"dp_shard": 4}, 2, {}),
        ("llama-tiny", {"dp_shard": 2, "tp": 2}, 2, {"checkpointing": "full", "reshard_after_forward": False}),
        ("llama-tiny", {"dp_shard": 2, "tp": 2}, 4, {"rank": 4}),
        ("llama-tiny", {"pp": 2, "dp_shard": 2}, 4, {"checkpointing": "selective", "accumulate": 4}),
        (gpt_tiny(), {"dp_shard": 2, "dp_replicate": 2}, 2, {"accumulate": 2}),
        ("moe-tiny", {"dp_shard": 2, "ep": 2}, 2, {}),
    ],
)
def test_no_estimate_needs_less_than_the_bound(
    model: str | ModelSpec, degrees: dict[str, int], batch: int, recipe: dict[str, Any]
) -> None:
    dims = ParallelDims(**degrees, world_size=4)
    # The bound is of tensors; models this small need less than the workspaces.
    hardware = find_machine("h100-sxm").with_figures(device__workspace=0)
    found = estimate(model, dims, batch, 128, hardware, Recipe().having(**recipe))
    bound = least_memory(shape_of(find_model(model), 128), Candidate(dims, Recipe().having(**recipe), batch), 128)
    assert 0.2 * found.memory.peak < bound <= found.memory.peak


@pytest.mark.tier("test")
def test_what_fits_leaves_room_for_the_context_of_the_device() -> None:
    memory = estimate("llama-tiny", ParallelDims(dp_shard=2, world_size=2), 2, 128, "h100-sxm", Recipe()).memory
    most = max(one.peak_reserved + one.context_bytes for one in memory.classes)
    assert most > max(one.peak_reserved for one in memory.classes)
    assert (memory.fits(most), memory.fits(most - 1)) == (True, False)


_SIZES = {"vocab_size": 32_000, "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16}
_GUESSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "gated": (LlamaConfig(**_SIZES, num_key_value_heads=4, intermediate_size=5632), {}),
    "not gated": (
        GPTSpec("gpt", GPTConfig(**_SIZES, activation="squared-relu", max_seq_len=4096)),
        {"reduce_dtype": "bf16"},
    ),
}


@pytest.mark.tier("full", each=4)
@pytest.mark.parametrize("name", _GUESSED)
@pytest.mark.parametrize("seed", range(2))
def test_the_guess_of_memory_is_near_an_estimate_and_the_bound_below(name: str, seed: int) -> None:
    model, changes = _GUESSED[name]
    recipes = [one.having(**changes) for one in default_recipes() if not one.activations.offload]
    where = space(model, 8, 16, 4096, recipes=tuple(dict.fromkeys(recipes)), fixed={"pp": 1, "cp": 1})
    found = [one for one in enumerate_candidates(where) if isinstance(one, Candidate) and one.parts <= 2]
    one = random.Random(seed).choice(found)
    peak = estimate(model, one.dims, one.batch, 4096, "h100-sxm", one.recipe).memory.peak
    assert least_memory(where.shape, one, 4096) <= peak, one
    assert guess_memory(where.shape, one, 4096) == pytest.approx(peak, rel=0.2), one


@pytest.mark.tier("full", each=4)
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_the_guess_of_a_pipeline_knows_that_gradients_wait_for_its_last_micro_batch(zero: int, schedule: str) -> None:
    model = LlamaConfig(**_SIZES, num_key_value_heads=4, intermediate_size=5632)
    dims = ParallelDims(pp=2, dp_shard=4, world_size=8)
    recipe = Recipe().having(accumulate=4, schedule=schedule, reshard_after_forward=zero == 3)
    peak = estimate(model, dims, 4, 1024, "h100-sxm", recipe).memory.peak
    guessed = guess_memory(shape_of(find_model(model), 1024), Candidate(dims, recipe, 4), 1024)
    assert guessed == pytest.approx(peak, rel=0.1), "without them it is 0.82 of it"


@pytest.mark.tier("full")
def test_gradients_of_a_stage_that_is_through_do_not_wait_for_the_others() -> None:
    """With fewer micro-batches than two for each rank, a stage is through before the one before it begins backward."""
    model = LlamaConfig(**{**_SIZES, "vocab_size": 2000}, num_key_value_heads=4, intermediate_size=5632)
    dims, peaks, guesses = ParallelDims(pp=2, dp_shard=4, world_size=8), [], []
    for parts in (3, 4):
        recipe = Recipe().having(accumulate=parts, schedule="interleaved", checkpointing="full")
        peaks.append(estimate(model, dims, parts, 512, "h100-sxm", recipe).memory.peak)
        guesses.append(guess_memory(shape_of(find_model(model), 512), Candidate(dims, recipe, parts), 512))
    assert guesses[1] - guesses[0] == pytest.approx(peaks[1] - peaks[0], rel=0.3)
    assert peaks[1] - peaks[0] > 0.1 * peaks[0]


_EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_intermediate_size": 2048}
_MOE = MoEConfig(**_SIZES, **_EXPERTS, num_key_value_heads=4, intermediate_size=5632)


@pytest.mark.tier("full", each=12)
@pytest.mark.parametrize(
    ("model", "degrees", "batch", "recipe", "layers"),
    [
        ("not gated", {"dp_shard": 4}, 8, {"checkpointing": "alternate"}, None),
        ("not gated", {"tp": 4}, 8, {"checkpointing": "alternate"}, None),
        ("no bias", {"dp_shard": 4}, 8, {"checkpointing": "alternate"}, None),
        ("gated", {"dp_shard": 4}, 8, {"checkpointing": "alternate every 2"}, None),
        ("gated", {"tp": 4}, 8, {"checkpointing": "selective"}, None),
        ("gated", {"tp": 4}, 8, {"checkpointing": "alternate"}, None),
        ("gated", {"dp_shard": 4}, 4, {"norm": "eager"}, None),
        ("gated", {"pp": 2, "tp": 2}, 4, {"checkpointing": "full", "accumulate": 4}, None),
        ("gated", {"pp": 2, "dp_shard": 2}, 8, {"accumulate": 4}, (3, 1)),
        ("gated", {"pp": 2}, 3, {"schedule": "interleaved", "checkpointing": "selective", "accumulate": 3}, None),
        ("experts", {"ep": 4}, 4, {}, None),
        ("experts", {"ep": 4}, 4, {"checkpointing": "selective"}, None),
    ],
)
def test_the_guess_of_memory_knows_what_blocks_keep(
    model: str, degrees: dict[str, int], batch: int, recipe: dict[str, Any], layers: tuple[int, ...] | None
) -> None:
    no_bias, biased = (GPTSpec("gpt", GPTConfig(**_SIZES, bias=bias, max_seq_len=4096)) for bias in (False, True))
    config = {"no bias": no_bias, "experts": _MOE, "not gated": biased}.get(model, _GUESSED["gated"][0])
    dims, how = ParallelDims(**degrees, world_size=math.prod(degrees.values())), Recipe().having(**recipe)
    rest = {} if layers is None else {"layers_per_stage": layers}
    peak = estimate(config, dims, batch, 4096, "h100-sxm", how, **rest).memory.peak
    guessed = guess_memory(shape_of(find_model(config), 4096), Candidate(dims, how, batch, layers), 4096)
    assert guessed == pytest.approx(peak, rel=0.065)


def test_sums_that_wait_for_replicas_are_bounded_in_the_dtype_of_the_reduction() -> None:
    """Between micro-batches; an estimate of 16 billion parameters has 0.94 of a bound that takes them for float32."""
    spec = find_model("llama3-8b")
    shape, dims = shape_of(spec, 8192), ParallelDims(dp_replicate=2, dp_shard=2, world_size=4)
    recipe = Recipe().having(accumulate=2, reduce_each=True)
    bounds = [
        least_memory(shape, Candidate(dims, recipe.having(reduce_dtype=dtype), 2), 8192) for dtype in ("fp32", "bf16")
    ]
    assert bounds[0] - bounds[1] == 2 * spec.num_parameters / 2


# The search


@pytest.mark.tier("test")
def test_a_module_of_ones_own_is_searched() -> None:
    mlp = Custom(lambda: nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)), lambda b, s: torch.zeros(b, s, 64))
    result = find(mlp, "h100-sxm", 8, 16, seq_len=32, limit=3)
    assert {(c.dims.tp, c.dims.pp) for c in (entry.candidate for entry in result.found)} == {(1, 1)}
    assert result.title.startswith("custom on 8 x h100-sxm")


@pytest.mark.tier("full")
def test_the_ranking_is_by_speed_and_has_all_that_was_estimated() -> None:
    asked: list[Candidate] = []

    def counting(**given: Any) -> Any:
        asked.append(Candidate(given["dims"], given["recipe"], given["batch"]))
        return fake_estimate(**given)

    shown: list[tuple[int, int, str]] = []
    result = find(
        "llama3-8b", "h100-sxm", 64, 128, estimator=counting, limit=12, progress=lambda *now: shown.append(now)
    )
    assert len(asked) == len(set(asked)) == 12
    assert {entry.candidate for entry in (*result.found, *result.too_large)} == set(asked)
    assert [entry.seconds for entry in result.found] == sorted(entry.seconds for entry in result.found)
    assert all(entry.estimate.memory.fits() for entry in result.found)
    assert result.complete
    assert result.best is result.found[0]
    assert shown[0] == (0, 12, str(asked[0]))
    assert shown[-1] == (12, 12, "")
    assert "does not fit" in result.reasons or not result.too_large


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("factors", "chosen", "tried"),
    [
        ({2: 0.95, 4: 0.93}, 4, {2, 4}),
        ({2: 0.95, 4: 0.96}, 2, {2, 4}),
        ({2: 1.01, 4: 0.90}, 1, {2}),  # more chunks are tried where fewer have paid
        ({2: 1.0}, 1, {2}),  # as of a model without feed-forwards that are split
    ],
)
def test_the_fastest_is_tried_in_chunks(factors: dict[int, float], chosen: int, tried: set[int]) -> None:
    asked: list[Recipe] = []

    def chunked(**given: Any) -> Any:
        asked.append(given["recipe"])
        made = fake_estimate(**given)
        made.time.step = quantity(made.time.step.value * factors.get(given["recipe"].parallel.tp_chunks, 1.0))
        return made

    result = find(
        "llama3-8b", "h100-sxm", 64, 128, estimator=chunked, limit=6, tp_chunks=tuple(factors), fixed={"tp": 4}
    )
    assert result.best.candidate.recipe.parallel.tp_chunks == chosen
    assert {one.parallel.tp_chunks for one in asked} == {1} | tried
    assert sum(one.parallel.tp_chunks == 1 for one in asked) == 6, "chunks come on top of the limit"
    assert sum(one.parallel.tp_chunks > 1 for one in asked) <= 2 * len(tried)
    in_chunks = [entry for entry in result.found if entry.candidate.recipe.parallel.tp_chunks > 1]
    assert bool(in_chunks) == (chosen > 1), "what chunks make slower is not in the ranking"
    assert chosen == 1 or f"{chosen} tp chunks" in str(result)


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize(
    "options",
    [
        {"fixed": {"tp": 1}},
        {"fixed": {"tp": 4}, "recipes": [PublishedRecipe().having(sequence_parallel=False)]},
        {"fixed": {"tp": 4}, "tp_chunks": ()},
    ],
)
def test_chunks_are_tried_where_they_can_hide_something(options: dict[str, Any]) -> None:
    asked: list[Recipe] = []

    def remembering(**given: Any) -> Any:
        asked.append(given["recipe"])
        return fake_estimate(**given)

    find("llama3-8b", "h100-sxm", 64, 128, **{"estimator": remembering, "limit": 4, "tp_chunks": (2, 4), **options})
    assert {one.parallel.tp_chunks for one in asked} == {1}
    asked.clear()
    find("llama3-8b", "h100-sxm", 64, 128, estimator=remembering, limit=4, tp_chunks=(3,), fixed={"tp": 4})
    assert {one.parallel.tp_chunks for one in asked} == {1, 3}


@pytest.mark.tier("full")
def test_the_plain_layouts_come_first() -> None:
    asked: list[Candidate] = []

    def counting(**given: Any) -> Any:
        asked.append(Candidate(given["dims"], given["recipe"], given["batch"]))
        return fake_estimate(**given)

    result = find("llama3-8b", "h100-sxm", 64, 128, estimator=counting, limit=7)
    assert {(one.dims.pp, one.dims.cp, one.dims.ep) for one in asked} == {(1, 1, 1)}
    assert any(one.dims.dp_replicate == one.dims.dp_shard == 8 for one in (*asked, *result.slower)), "sharded in a node"
    alone = {one.recipe.checkpointing for one in (*asked, *result.slower) if one.dims.tp == 1}
    assert alone == {"none", "selective", "alternate", "full"}, "or less recomputation fits"
    assert {one.dims.tp for one in asked} > {1}


@pytest.mark.tier("full")
def test_one_of_each_plain_kind_is_estimated_unless_none_can_be_the_best() -> None:
    """Where the best of a kind is slower than another for sure, the next one of that kind takes its place."""
    asked: list[Candidate] = []

    def counting(**given: Any) -> Any:
        asked.append(Candidate(given["dims"], given["recipe"], given["batch"]))
        return fake_estimate(**given)

    def kinds(candidates: Iterable[Candidate]) -> set[str]:
        return {one.recipe.checkpointing for one in candidates if one.dims.batch_ranks == one.dims.world_size}

    for devices, batch in ((8, 64), (16, 64), (64, 128)):
        asked.clear()
        result = find("llama3-8b", "h100-sxm", devices, batch, estimator=counting, limit=10)
        assert kinds(result.left_out) <= kinds(asked)


def test_a_small_space_is_searched_whole() -> None:
    recipes = (Recipe().having(checkpointing="full"), Recipe())
    result = find("llama3-8b", "h100-sxm", 8, 8, recipes=recipes, fixed={"cp": 1, "pp": 1}, limit=1000)
    assert not result.left_out
    names = {(c.dims.tp, c.recipe.checkpointing) for c in (entry.candidate for entry in result.found)}
    assert names >= {(1, "none"), (8, "none")}
    assert (4, "full") in {(c.dims.tp, c.recipe.checkpointing) for c in result.slower}, "less fits"
    assert result.gain == 0
    assert "of which none can be faster than the best and fit" in str(result)


@pytest.mark.tier("test")
def test_the_best_is_found_early() -> None:
    """The guess is off by another factor for each degree of tp; what is estimated corrects it."""
    wrong = {1: 3.0, 2: 1.0, 4: 0.6, 8: 1.2}

    def biased(**given: Any) -> Any:
        found, factor = fake_estimate(**given), wrong[given["dims"].tp]
        found.time.step = quantity(found.time.step.value * factor)
        return found

    options: dict[str, Any] = {"estimator": biased, "fixed": {"pp": 1, "cp": 1}}
    some = find("llama3-8b", "h100-sxm", 64, 128, **options, limit=30)
    assert len(some.left_out) > 100
    everything = find("llama3-8b", "h100-sxm", 64, 128, **options, limit=100_000)
    assert some.best.seconds <= 1.05 * everything.best.seconds
    assert not everything.left_out


def test_what_needs_more_than_what_does_not_fit_is_not_estimated() -> None:
    def large(**given: Any) -> Any:
        return fake_estimate(**given, scale=1.5 if given["recipe"].checkpointing == "full" else 40.0)

    result = find("llama3-8b", "h100-sxm", 8, 8, estimator=large, fixed={"pp": 1, "cp": 1}, limit=1000)
    hopeless = [entry for entry in result.rejected if entry.reason == "cannot fit (less does not)"]
    assert hopeless
    assert all(entry.candidate and entry.candidate.recipe.checkpointing != "full" for entry in hopeless)
    assert "needs more than" in hopeless[0].detail
    assert {entry.candidate.recipe.checkpointing for entry in result.found} == {"full"}


@pytest.mark.parametrize(
    "recipes",
    [
        [Recipe().having(checkpointing="full"), Recipe().having(checkpointing="full first 16")],
        [PublishedRecipe().having(level=0), PublishedRecipe().having(reshard_after_forward=True)],
        [
            PublishedRecipe().having(level=1, overlap_grad_reduce=False),
            PublishedRecipe().having(reshard_after_forward=False),
        ],
    ],
    ids=["some layers", "replicated", "state sharded"],
)
@pytest.mark.parametrize("scale", [0.1, 40.0], ids=["all fit", "none fits"])
def test_what_cannot_be_compared_is_estimated(recipes: list[Recipe], scale: float) -> None:
    """Neither of them keeps or computes only more than the other, so that none says anything of the other."""
    asked = []

    def counting(**given: Any) -> Any:
        asked.append(given["recipe"])
        return fake_estimate(**given, scale=scale)

    options: dict[str, Any] = {"estimator": counting, "recipes": recipes, "fixed": {"tp": 1, "pp": 1, "cp": 1}}
    with contextlib.suppress(NothingFits):
        find("llama3-8b", "h100-sxm", 8, 8, memory_limit=10.0**13 if scale < 1 else 10.0**12, **options)
    assert {one.having(accumulate=1) for one in asked} == set(recipes)


def test_more_stages_are_tried_where_the_bubble_matters() -> None:
    found = [c for c in enumerate_candidates(space(fixed={"tp": 4, "cp": 1})) if isinstance(c, Candidate)]
    stages = {one.recipe.parallel.stages_per_rank for one in found}
    assert stages == {None, 4, 8}
    deep = [one for one in found if one.recipe.parallel.stages_per_rank == 8]
    assert {one.dims.pp for one in deep} == {2, 4}, "32 layers"
    assert all((one.dims.pp - 1) / (one.parts * 4) > 0.02 for one in deep)
    assert "interleaved x 8 of " in deep[0].how
    few = [c for c in enumerate_candidates(space(fixed={"tp": 4, "cp": 1, "pp": 2})) if isinstance(c, Candidate)]
    assert {one.parts for one in few if one.recipe.parallel.stages_per_rank == 8} < {one.parts for one in few}


def test_micro_batches_of_any_size_up_to_eight() -> None:
    options: dict[str, Any] = {"devices": 8, "batch": 24, "fixed": {"tp": 1, "pp": 1, "cp": 1, "dp_shard": 1}}
    few = {one.parts for one in enumerate_candidates(space(**options)) if isinstance(one, Candidate)}
    assert few == {3, 1}, "three sequences on each rank"
    options["batch"] = 8 * 60
    more = {60 // one.parts for one in enumerate_candidates(space(**options)) if isinstance(one, Candidate)}
    assert more == {1, 2, 3, 4, 5, 6, 60}
    for count, found in ((7, set()), (12, {12})):
        asked = {
            one.parts for one in enumerate_candidates(space(**options, accumulate=count)) if type(one) is Candidate
        }
        assert asked == found, "60 sequences are no 7 equal micro-batches"


def test_the_guess_prefers_micro_batches_of_more_tokens() -> None:
    shape, dims = shape_of(find_model("llama3-8b"), 2048), ParallelDims(dp_shard=8, world_size=8)
    guesses = [
        guess_seconds(
            shape, Candidate(dims, Recipe().having(accumulate=8 // size, reshard_after_forward=False), 8), 2048, H100
        )
        for size in (1, 2, 4, 8)
    ]
    assert guesses == sorted(guesses, reverse=True)
    assert guesses[0] > 1.1 * guesses[-1]


def test_inputs_are_gathered_again_where_blocks_keep_them() -> None:
    found = [c for c in enumerate_candidates(space(fixed={"pp": 1, "cp": 1})) if isinstance(c, Candidate)]
    again = [one for one in found if one.recipe.parallel.reshard_inputs]
    assert {one.dims.tp for one in again} == {2, 4, 8}
    assert {one.recipe.checkpointing for one in again} == {"none"}, "the others compute what they gather again"
    assert again[0].how.endswith("inputs gathered again")
    shape = shape_of(find_model("llama3-8b"), 8192)
    kept = [dataclasses.replace(one, recipe=one.recipe.having(reshard_inputs=False)) for one in again]
    for one, other in zip(again, kept, strict=True):
        assert guess_memory(shape, one, 8192) < guess_memory(shape, other, 8192)
        assert guess_seconds(shape, one, 8192, H100) > guess_seconds(shape, other, 8192, H100)


@pytest.mark.tier("test")
def test_each_checkpointing_of_the_trainer_is_tried() -> None:
    found = [entry for entry in enumerate_candidates(space()) if isinstance(entry, Candidate)]
    levels = {"none", "selective", "alternate", "full", "offload", "full offload"}
    assert {one.recipe.checkpointing for one in found} == levels


def test_offload_is_tried_where_nothing_else_fits() -> None:
    levels = ("none", "full", "offload", "full offload")
    recipes = [Recipe().having(checkpointing=level) for level in levels]
    dims = ParallelDims(dp_shard=8, world_size=8)
    needs = [fake_estimate("llama3-8b", dims, 32, 8192, "h100-sxm", one).memory.reserved + 2**30 for one in recipes]
    assert needs[2] == needs[3] < needs[1] < needs[0]
    for limit, fitting in ((needs[1], {"full"}), (needs[1] - 1, {"offload", "full offload"})):
        result = find("llama3-8b", "h100-sxm", 8, 256, limit, recipes=recipes, fixed={"dp_shard": 8}, accumulate=1)
        assert {one.candidate.recipe.checkpointing for one in result.found} == fitting, "either may be faster"
    with pytest.raises(NothingFits, match=r"closest: dp_shard=8; ZeRO-3, (full )?offload ckpt"):
        find("llama3-8b", "h100-sxm", 8, 256, needs[3] - 1, recipes=recipes, fixed={"dp_shard": 8}, accumulate=1)


@pytest.mark.parametrize(
    ("reserved", "on_host", "said"),
    [
        (9, 0, "9.0 GiB, 1.0 GiB too much"),
        (9, 9, "9.0 GiB, 1.0 GiB too much"),
        (8, 5, "5.0 GiB on the host, where a device's share is 4.0 GiB"),
        (8, 4, "8.0 GiB beside what torch does not count"),
    ],
)
def test_what_does_not_fit_says_where(reserved: int, on_host: int, said: str) -> None:
    classes = [SimpleNamespace(host_bytes=on_host * 2**30), SimpleNamespace(host_bytes=0)]
    memory = SimpleNamespace(reserved=reserved * 2**30, host_limit=4 * 2**30, classes=classes)
    entry = Found(Candidate(ParallelDims(), Recipe(), 1), SimpleNamespace(memory=memory))
    assert entry.excess(8 * 2**30) == said


@pytest.mark.tier("full")
def test_degrees_that_are_none_are_rejected_once() -> None:
    seen = Exploration(space(), H100, 1.0, None, "with offload in a second turn")
    with pytest.raises(NothingFits):
        seen.run(lambda candidate: None, lambda *_: None)
    reasons = Counter(entry for entry in seen.rejected if entry.candidate is None)
    assert reasons
    assert set(reasons.values()) == {1}


def test_the_guess_knows_the_link_to_the_host() -> None:
    def guess(level: str, link: float) -> float:
        candidate = Candidate(ParallelDims(tp=8, world_size=8), Recipe().having(checkpointing=level), 1)
        machine = dataclasses.replace(H100, link=link)
        return guess_seconds(shape_of(find_model("llama3-8b"), 8192), candidate, 8192, machine)

    for level, same in (("offload", "none"), ("full offload", "full")):
        assert guess(level, 1e12) == guess(same, 1e12), "a fast link is hidden by what is computed"
        assert guess(level, 1e8) > guess(same, 1e8)
    assert guess("full offload", 1e8) < guess("offload", 1e8), "of what is computed again, inputs alone are moved"


@pytest.mark.tier("full")
def test_an_interrupted_search_returns_the_best_so_far() -> None:
    calls = itertools.count()

    def interrupted(**given: Any) -> Any:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return fake_estimate(**given)

    result = find("llama3-8b", "h100-sxm", 64, 128, estimator=interrupted)
    assert not result.complete
    assert len(result.found) + len(result.too_large) == 5
    assert "the search was interrupted: this is the best so far" in str(result)


@pytest.mark.tier("full")
def test_what_the_trainer_refuses_is_rejected_with_its_words() -> None:
    def picky(**given: Any) -> Any:
        if given["dims"].tp > 1:
            raise ValueError("cannot split this: it is odd\n  seen: 3\n  try: 4")
        return fake_estimate(**given)

    result = find("llama3-8b", "h100-sxm", 64, 128, estimator=picky, limit=100)
    refused = [entry for entry in result.rejected if entry.reason == "the trainer refuses it"]
    assert {entry.detail for entry in refused} == {"cannot split this: it is odd"}


@pytest.mark.tier("full", each=4)
@pytest.mark.parametrize(
    ("degrees", "batch", "recipe"),
    [
        ({"dp_shard": 4}, 4, {"accumulate": 2}),
        ({"pp": 2, "tp": 2}, 4, {"checkpointing": "full", "accumulate": 4}),
        (
            {"dp_shard": 2, "cp": 2, "ulysses_degree": 2},
            4,
            {"checkpointing": "selective", "reshard_after_forward": False, "accumulate": 1},
        ),
        ({"dp_shard": 2, "dp_replicate": 2}, 4, {"checkpointing": "full", "accumulate": 2, "reduce_each": True}),
        ({"tp": 2, "dp_shard": 2}, 4, {"checkpointing": "alternate"}),
        ({"tp": 2, "dp_shard": 2}, 4, {"checkpointing": "full", "rank": 4}),
        ({"pp": 2, "dp_shard": 2}, 4, {"checkpointing": "selective", "accumulate": 4, "layers": (3, 1)}),
        ({"pp": 2, "dp_shard": 2}, 4, {"schedule": "interleaved", "accumulate": 4, "layers": (1, 1, 1, 1)}),
        ({"pp": 2, "dp_shard": 2}, 4, {"schedule": "zero-bubble", "accumulate": 4}),
    ],
)
def test_no_estimate_is_below_its_floors(degrees: dict[str, int], batch: int, recipe: dict[str, Any]) -> None:
    model, dims = find_model("llama-tiny"), ParallelDims(**degrees, world_size=4)
    hardware = find_machine("h100-sxm").with_figures(device__bandwidth=1e10)  # or the host takes more than any floor
    recipe = dict(recipe)
    layers = recipe.pop("layers", None)
    candidate = Candidate(dims, Recipe().having(**recipe), batch, layers)
    found = estimate(model, dims, batch, 128, hardware, candidate.recipe, layers_per_stage=layers)
    floors = Floors(model, shape_of(model, 128), hardware, 128)
    first, *finer = floors.seconds(candidate)
    assert list(floors.seconds(candidate, known_only=True)) == [first, *finer]
    assert first == floors.arithmetic(candidate) < min(finer)
    last = finer[-2:] if dims.pp > 1 else finer[-1:]  # the one of the micro-batch's own size
    assert max(finer) <= max(last) * 1.001
    assert 0.2 * found.timeline.step < max(finer) <= found.timeline.step
    floors.learn(candidate, found.programs)
    assert max(finer) <= max(floors.seconds(candidate)) <= found.timeline.step
    assert 0 < floors.bytes(candidate) <= found.memory.peak


@pytest.mark.tier("full")
def test_a_floor_knows_what_an_estimate_has_computed_again() -> None:
    """Another way to shard computes the same again: what one estimate had is no longer bounded."""
    model, ways = find_model("llama-tiny"), ({"dp_shard": 4}, {"dp_replicate": 4})
    hardware = find_machine("h100-sxm").with_figures(device__bandwidth=1e10)  # or the host takes more than any floor
    recipe = Recipe().having(checkpointing="full", accumulate=1)
    one, other = (Candidate(ParallelDims(**degrees, world_size=4), recipe, 4) for degrees in ways)
    floors = Floors(model, shape_of(model, 128), hardware, 128)
    before = max(floors.seconds(other))
    floors.learn(one, estimate(model, one.dims, 4, 128, hardware, recipe).programs)
    after = max(floors.seconds(other))
    assert before < after <= estimate(model, other.dims, 4, 128, hardware, recipe).timeline.step


@pytest.mark.parametrize(
    ("schedule", "each", "forward", "message", "seconds"),
    [
        ("gpipe", None, [1, 1], 0.0, 3 * (3 + 1)),  # three micro-batches, and one more to fill and to drain
        ("1f1b", None, [1, 1], 0.0, 3 * (3 + 1)),
        ("1f1b", None, [1, 1], 0.5, 3 * (3 + 1) + 4 * 0.5),  # of which the middle one goes forth and back in between
        ("1f1b", None, [1, 3], 0.0, 3 * 3 * 3 + 3),  # the last rank never waits but for the first
        ("1f1b", None, [3, 1], 0.0, 3 * 3 * 3),  # its second forward is longer than the way back
        ("interleaved", 2, [1, 1, 1, 1], 0.0, 3 * (2 * 2 + 1)),  # of two micro-batches
        ("zero-bubble", 1, [1, 3], 0.0, 3 * 3 * 3),
    ],
)
def test_the_least_time_of_a_schedule(
    schedule: str, each: int | None, forward: list[float], message: float, seconds: float
) -> None:
    """Backward takes twice as long as forward."""
    parts = 2 if schedule == "interleaved" else 3
    recipe = Recipe().having(schedule=schedule, accumulate=parts, stages_per_rank=each)
    candidate = Candidate(ParallelDims(pp=2, world_size=2), recipe, parts)
    assert least_time(candidate, forward, [2 * one for one in forward], message) == pytest.approx(seconds)


@pytest.mark.tier("test")
@given(
    data=st.data(), schedule=st.sampled_from(("gpipe", "1f1b", "interleaved", "zero-bubble")), parts=st.integers(1, 6)
)
def test_no_way_to_cut_a_model_into_stages_is_below_the_least(data: Any, schedule: str, parts: int) -> None:
    ranks = data.draw(st.integers(2, 4))
    parts *= ranks if schedule == "interleaved" else 1
    candidate = Candidate(
        ParallelDims(pp=ranks, world_size=ranks), Recipe().having(schedule=schedule, accumulate=parts), parts
    )
    stages = len(owners_of(candidate))
    weights = data.draw(st.lists(st.floats(0, 10), min_size=stages, max_size=stages).filter(any))
    least = least_turns(candidate) * 3 * sum(weights)
    assert least <= 1.0001 * least_time(candidate, weights, [2 * each for each in weights], 0.0)


@pytest.mark.parametrize(
    ("pp", "schedule", "parts", "turns"),
    [(1, "1f1b", 3, 3), (4, "1f1b", 1, 1), (2, "1f1b", 2, 4 / 3), (2, "interleaved", 4, 2), (2, "zero-bubble", 4, 2)],
)
def test_the_least_of_a_pipeline(pp: int, schedule: str, parts: int, turns: float) -> None:
    """Of two micro-batches on two ranks, the first one computes 2/3 of each, and the second one waits for 1/3."""
    candidate = Candidate(
        ParallelDims(pp=pp, world_size=pp), Recipe().having(schedule=schedule, accumulate=parts), parts
    )
    assert least_turns(candidate) == pytest.approx(turns)


def test_a_schedule_of_many_micro_batches_is_not_played() -> None:
    """The fullest rank's computing is the least in any case, and costs neither time nor memory to know."""
    dims = ParallelDims(pp=2, world_size=2)
    least = [
        least_time(Candidate(dims, Recipe().having(accumulate=parts), parts), [1, 2], [2, 4], 0.0) / parts
        for parts in (8, 512, 4096)
    ]
    assert least[0] > least[1] > least[2] == 6


def test_a_floor_knows_what_each_checkpointing_computes_again() -> None:
    floor = Floor(seconds=10.0, products=3.0, matmuls=2.0, moves=1.0, activations=0, logits=0)
    dims = ParallelDims(dp_shard=4, world_size=4)
    levels = ("none", "selective", "alternate", "full")
    again = [floor.again(Candidate(dims, Recipe().having(checkpointing=level), 1)) for level in levels]
    assert again == sorted(again)
    assert len(set(again)) == 4
    assert again[0] == 0


@pytest.mark.tier("full")
def test_what_cannot_be_faster_is_looked_at_and_not_estimated() -> None:
    """The best is the one that is found by estimating all."""
    options: dict[str, Any] = {"seq_len": 128, "fixed": {"cp": 1, "pp": 1, "tp": 1}, "recipes": [Recipe()]}
    bounded = search("llama-tiny", "a100-80gb", 4, 16, **options)
    everything = search("llama-tiny", "a100-80gb", 4, 16, **options, estimator=estimate)
    assert len(bounded.found) < len(everything.found)
    assert bounded.best.seconds == everything.best.seconds
    looked_at = {entry.candidate for entry in (*bounded.found, *bounded.too_large)} | set(bounded.slower)
    assert {entry.candidate for entry in everything.found} <= looked_at
    stopped = search("llama-tiny", "a100-80gb", 4, 16, **options, limit=1)
    assert stopped.left_out
    assert stopped.gain is not None
    assert everything.best.seconds >= stopped.best.seconds * (1 - stopped.gain)


@pytest.mark.tier("full")
def test_what_limits_the_best() -> None:
    result = find("llama3-8b", "h100-sxm", 64, 128, limit=20)
    limit = limit_of(result)
    assert limit.by == next(iter(limit.shares)) == max(limit.shares, key=lambda name: limit.shares[name])
    assert limit.text in " ".join(str(result).split())
    assert search_dict(result)["limited_by"]["by"] == limit.by
    waiting = dataclasses.replace(result, too_large=())
    waiting.best.estimate.time.exposed = {"tp": quantity(0.9 * result.best.seconds)}
    assert limit_of(waiting).by == "communication on tp"
    faster = dataclasses.replace(result.best, estimate=fake_estimate(**given_of(result.best.candidate)))
    faster.estimate.time.step = quantity(0.01 * result.best.seconds)
    short = limit_of(dataclasses.replace(result, too_large=(faster,)))
    assert short.by == "memory"
    assert "more memory, " in short.text


def given_of(candidate: Candidate) -> dict[str, Any]:
    where = {"model": "llama3-8b", "seq_len": 8192, "hardware": "h100-sxm"}
    return {**where, "dims": candidate.dims, "batch": candidate.batch, "recipe": candidate.recipe}


@pytest.mark.tier("full")
def test_an_operation_without_a_price_ends_the_search() -> None:
    def unknown(**given: Any) -> Any:
        raise UnknownOperation("cannot price aten.frobnicate")

    with pytest.raises(UnknownOperation, match="frobnicate"):
        find("llama3-8b", "h100-sxm", 64, 128, estimator=unknown)


@pytest.mark.tier("full")
def test_no_other_one_beats_what_is_on_the_front() -> None:
    result = find("llama3-8b", "h100-sxm", 64, 128, limit=60)
    everything = [*result.found, *result.too_large]
    for one in result.pareto:
        assert not any(other.bytes < one.bytes and other.seconds < one.seconds for other in everything)
    assert min(entry.bytes for entry in everything) == result.pareto[0].bytes
    assert min(entry.seconds for entry in everything) == result.pareto[-1].seconds


# How sure the order is


def estimate_of(step: float, compute: float, tp: float, spread: float = 0.1) -> Any:
    time = SimpleNamespace(
        step=quantity(step),
        compute=quantity(compute, spread),
        exposed={"tp": quantity(tp, spread)},
        bubble=quantity(0.0),
        host=quantity(0.0),
    )
    return SimpleNamespace(time=time)


def test_an_error_that_both_share_does_not_make_their_order_unsure() -> None:
    fast, slow = estimate_of(10, 9.9, 0.1, spread=0.5), estimate_of(11, 10.9, 0.1, spread=0.5)
    other = estimate_of(11, 5.0, 6.0, spread=0.5)
    assert chance_faster(fast, slow) > 0.9
    assert 0.5 < chance_faster(fast, other) < 0.7
    assert chance_faster(fast, fast) == pytest.approx(0.5)
    assert chance_faster(slow, fast) == pytest.approx(1 - chance_faster(fast, slow))


# What is wrong in what was asked


def message(*arguments: Any, error: type[Exception] = ValueError, **options: Any) -> str:
    with pytest.raises(error) as caught:
        find(*arguments, **options)
    return str(caught.value)


@pytest.mark.tier("test")
def test_nothing_fits_says_what_comes_closest() -> None:
    shown = message("llama3-405b", "h100-sxm", 16, 16)
    assert shown.startswith(
        "cannot train llama3-405b on 16 x h100-sxm, 16 x 8,192 tokens: nothing fits into 79.1 GiB\n"
    )
    assert "\n  closest: " in shown
    assert " needs at least 378.0 GiB, 298.9 GiB too much\n" in shown, "16 bytes for each parameter, over 16 devices"
    assert "x cannot fit (bound)" in shown
    assert shown.endswith("\n  try: about 80 devices, or shorter sequences")


@pytest.mark.tier("test")
def test_nothing_fits_after_estimates() -> None:
    shown = message(
        "llama3-8b", "h100-sxm", 8, 8, estimator=lambda **given: fake_estimate(**given, scale=100.0), limit=3
    )
    assert " is estimated to need " in shown
    assert "\n  estimated: 3   not estimated: " in shown
    assert "\n  try: limit=6, as " in shown


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"global_batch": 7, "fixed": {"pp": 1}, "num_devices": 256},
            "cannot train llama3-8b on 256 x h100-sxm, 7 x 8,192 tokens: no degrees can be placed",
        ),
        ({"num_devices": 0}, "cannot search: num_devices must be at least 1\n  num_devices: 0\n  try: num_devices=64"),
        ({"memory_limit": -1.0}, "cannot search: a memory limit must be above 0\n  memory_limit: -1.0"),
        ({"fixed": {"pt": 2}}, "cannot search: there is no degree 'pt'\n  fixed: {'pt': 2}\n  try: 'tp'"),
        (
            {"fixed": {"tp": 3}},
            "cannot search: tp=3 does not divide the devices\n  num_devices: 64\n  try: tp one of 1,",
        ),
        ({"hardware": "h100-smx"}, "cannot find the hardware 'h100-smx': nothing has that name"),
        ({"model": "lama3-8b"}, "cannot find the model: there is no model 'lama3-8b'"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], expected: str) -> None:
    given = {"model": "llama3-8b", "hardware": "h100-sxm", "num_devices": 64, "global_batch": 128, **options}
    assert message(**given).startswith(expected)


def test_a_count_must_be_whole() -> None:
    shown = message("llama3-8b", "h100-sxm", 64.0, 128, error=TypeError)
    assert shown == "cannot search: num_devices is a float, not an int\n  num_devices: 64.0\n  try: num_devices=64"


# Activation policies by a budget of memory

KINDS = ("none", "selective", "alternate", "full", "full offload", "offload")
BYTES = {"none": 100.0, "selective": 70.0, "alternate": 55.0, "full": 30.0, "full offload": 25.0, "offload": 20.0}
SECONDS = {"none": 10.0, "selective": 11.0, "alternate": 12.0, "full": 13.5, "full offload": 13.5, "offload": 30.0}


def straight(bend: float = 0.0, seconds: dict[str, float] | None = None) -> Any:
    """An estimator whose memory and time are straight in the number of blocks, or memory bends."""
    slow = seconds or SECONDS

    def estimator(job: Job, hardware: Any) -> Any:
        recipe, most = job.recipe, job.model.num_layers
        part = (most if recipe.activations.first is None else recipe.activations.first) / most
        part = 0.0 if recipe.checkpointing == "none" else part
        saved = (BYTES["none"] - BYTES[recipe.checkpointing]) * (part + bend * part * (1 - part))
        one = SimpleNamespace(peak_reserved=int(100 * (BYTES["none"] - saved)), context_bytes=10, host_bytes=0)
        memory = SimpleNamespace(
            classes=[one], fullest=one, fits=lambda limit: one.peak_reserved + one.context_bytes <= limit
        )
        time = SimpleNamespace(
            step=quantity(slow["none"] + part * (slow[recipe.checkpointing] - slow["none"]), grade="assumed")
        )
        return SimpleNamespace(recipe=recipe, memory=memory, time=time)

    return estimator


def of_all(job: Job, estimator: Any, limit: int) -> Any:
    """The fastest of all kinds with all numbers of blocks; those with offload if no other one fits."""
    for kinds in (KINDS[:4], KINDS[4:]):
        counts = [None, *range(1, job.model.num_layers)]
        recipes = [
            job.recipe.having(checkpointing=kind if count is None or kind == "none" else f"{kind} first {count}")
            for kind in kinds
            for count in counts
        ]
        found = [estimator(dataclasses.replace(job, recipe=recipe), None) for recipe in recipes]
        if fitting := [one for one in found if one.memory.fits(limit)]:
            return min(fitting, key=lambda one: one.time.step.value)
    return None


@pytest.mark.tier("test")
@given(
    limit=st.integers(1500, 11_000),
    bend=st.sampled_from([0.0, 0.3, -0.3]),
    slow=st.permutations([10.5, 11.0, 12.0, 13.5]),
)
def test_a_budget_is_met_by_the_fastest_policy(limit: int, bend: float, slow: list[float]) -> None:
    seconds = {**SECONDS, **dict(zip(("selective", "alternate", "full"), slow, strict=False))}
    estimator, job = (
        straight(bend, seconds),
        Job(find_model(LlamaConfig(num_hidden_layers=8)), ParallelDims(), 1, 64, Recipe()),
    )
    best = of_all(job, estimator, limit)
    if best is None:
        with pytest.raises(NoPolicyFits, match=r"no activation policy needs less\n  offload needs .*\n  try: "):
            fit_job(job, "h100-sxm", limit, estimator)
        return
    found = fit_job(job, "h100-sxm", limit, estimator)
    assert found.memory.fits(limit)
    if not bend or best.recipe.checkpointing == "none":
        assert found.time.step.value == pytest.approx(best.time.step.value)
        assert str(found.recipe.activations) == str(best.recipe.activations)
    else:  # a straight line orders the kinds; within one, no fewer blocks fit
        fewer = (found.recipe.activations.first or job.model.num_layers) - 1
        recipe = found.recipe.having(checkpointing=f"{found.recipe.checkpointing} first {max(fewer, 1)}")
        assert not fewer or not estimator(dataclasses.replace(job, recipe=recipe), None).memory.fits(limit)


@pytest.mark.tier("test")
def test_a_budget_is_above_zero_and_a_kind_that_is_refused_is_left_out() -> None:
    job = Job(find_model(LlamaConfig(num_hidden_layers=8)), ParallelDims(), 1, 64, Recipe())
    with pytest.raises(ValueError, match=r"cannot fit activations: a memory limit must be above 0\n"):
        fit_job(job, "h100-sxm", 0, straight())

    def refusing(job: Job, hardware: Any) -> Any:
        if job.recipe.checkpointing in ("selective", "alternate"):
            raise ValueError("the schedule goes backward twice")
        return straight()(job, hardware)

    assert str(fit_job(job, "h100-sxm", 9_500, refusing).recipe.activations) == "full first 1"
