"""Published rows as jobs, and what outcomes of a validation say."""

import gzip
import json
import math
import statistics
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fit_mesh import SPREADS, fit_spreads, spreads_text
from benchmarks.published import predict
from benchmarks.published.compare import (
    Compared,
    Outcome,
    Prediction,
    known,
    outcome_of,
    publication,
    read_outcomes,
    run,
    seen_in,
    wanted,
    write_outcomes,
)
from benchmarks.published.gpt import GPTSpec, gpt_tiny
from benchmarks.published.lifetimes import allocate_as_fsdp2, free_after_last_use
from benchmarks.published.megatron import MegatronConventions, expose_weights, slide_window
from benchmarks.published.page import fitted, ordered_pairs, page, summary
from benchmarks.published.predict import figures_of, load_figures, prediction_of, runs_seen
from benchmarks.published.rows import Case, Skipped, case_of, is_held_out, measured, read_rows
from benchmarks.published.step import PublishedRecipe
from benchmarks.published.zero import broadcast_weights, fetch_weights, reduce_whole_gradients
from benchmarks.published.zoo import MLAConfig
from hyper_parallel.core.machine.description import find_machine
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from sim.mesh.cost import Pricing
from sim.mesh.estimate import Z80, Quantity, estimate_job, memory_of, price, step_spread
from sim.mesh.job import Job
from sim.mesh.memory import replay_memory
from sim.mesh.models import find_model
from sim.mesh.program import Alloc, Comm, CommGroup, Free, HostWait, Op, Program, Segment, Wait
from sim.mesh.recipe import Recipe
from sim.mesh.tracing.trace import trace

GIB = 2**30
DOCS = Path(__file__).resolve().parents[4] / "docs" / "generated"
ROWS = {row["id"]: row for row in read_rows()}


def case(name):
    found = case_of(ROWS[name])
    assert isinstance(found, Case), found
    return found


def test_every_row_that_states_enough_can_be_said():
    said = [case_of(row) for row in wanted(ROWS.values())]
    assert len(said) == 570
    assert not [one for one in said if isinstance(one, Skipped)]


def test_a_torchtitan_row():
    it = case("m0063")
    assert it.recipe.describe() == (
        "bf16 over fp32 weights, gradients reduced in fp32; ZeRO-2; alternate checkpointing; adamw; "
        "norm eager; loss eager; conventions fsdp2 root"
    )
    assert (it.batch, it.seq_len, it.hardware, it.attention_kernel) == (1, 8192, "h100-96gb-500w", "flash2")
    assert it.model.num_parameters() == 8_030_261_248
    assert it.measured.memory == pytest.approx(62.18 * GIB)
    assert (it.measured.tokens_per_second, it.measured.memory_kind, it.network) == (5763, "reserved", None)


def test_what_changed_in_a_framework_at_a_date():
    assert (case("m0079").recipe.norm, case("m0081").recipe.norm) == ("eager", "fused")


@pytest.mark.parametrize(
    ("name", "date", "kernel"),
    [
        ("m0717", "2024-07", "flash2"),
        ("m0717", "2024-07-11", "flash3"),
        ("m0717", "2025-03", "flash3"),
        ("m0717", "2023", "flash1"),
        ("m0063", "2023-07-17", "flash2"),
        ("m0063", "2025-12", "flash2"),
        ("m1012", "2023-11", "flash1"),
    ],
)
def test_no_run_has_a_kernel_of_attention_that_is_younger(name, date, kernel):
    found = case_of(ROWS[name] | {"date": date})
    assert isinstance(found, Case)
    assert found.attention_kernel == kernel


def test_what_torchtitan_compiles_and_keeps():
    assert (case("m0104").recipe.loss, case("m0109").recipe.loss) == ("compiled", "eager")  # with compile, without
    assert case("m0069").recipe.loss == "eager"  # before the loss was compiled with the model
    assert case("m0098").recipe.checkpointing == "selective"  # graph_trainer keeps all matrix products
    assert case("m0142").recipe.checkpointing == "alternate"


def test_a_megatron_deepspeed_row_with_a_pipeline():
    it = case("m0394")
    assert (it.dims.tp, it.dims.pp, it.dims.dp_shard, it.dims.dp_replicate) == (8, 12, 4, 1)
    recipe = it.recipe
    dtypes = recipe.precision.param_dtype, recipe.precision.reduce_dtype
    assert (recipe.zero, *dtypes, recipe.attention) == (1, "bf16", "bf16", "math"), "its fp16 takes as long and as much"
    assert (recipe.checkpointing, recipe.train.accumulate, recipe.parallel.schedule) == ("full", 256, "1f1b")
    assert not recipe.sequence_parallel
    assert recipe.conventions == MegatronConventions(scatter_gather=True, blocking_messages=True)
    assert it.model.vocab_size % (128 * 8) == 0
    assert it.model.embedding_norm
    assert it.measured.memory_kind == "device"


def test_optimizer_state_shared_by_groups_within_the_data_parallel_ranks():
    it = case("m1021")
    assert (it.dims.dp_replicate, it.dims.dp_shard, it.recipe.zero) == (4, 8, 1)


def test_recomputation_of_attention_alone_depends_on_how_it_is_computed():
    assert case("m0509").recipe.attention == "math-recomputed"
    assert case("m0776").recipe.attention == "flash"
    assert {case(name).recipe.checkpointing for name in ("m0509", "m0776")} == {"none"}


def test_every_second_layer_is_half_of_the_layers():
    recipe = case("m0038").recipe
    assert (recipe.checkpointing, recipe.activations.first) == ("full", 16)


def test_experts_over_ranks_of_two_axes_are_noted():
    it = case("m0922")
    assert (it.dims.expert_axes, it.dims.expert_ranks, it.dims.tp, it.dims.world_size) == (("ep", "tp"), 32, 2, 256)
    assert "experts over 32 ranks" in it.notes[0]
    assert case("m1161").dims.expert_axes == ("ep",), "Megatron-LM folded later"


def test_what_splits_within_an_expert_is_megatrons_default_or_nothing():
    assert (case("m0786").dims.ep, case("m0786").dims.tp, case("m0786").dims.etp) == (2, 4, 4)
    assert (case("m0924").dims.expert_ranks, case("m0924").dims.tp, case("m0924").dims.etp) == (8, 2, 1)


def test_a_row_of_blackwell_takes_attention_that_has_figures_there():
    it = case("m1234")
    assert (it.hardware, it.attention_kernel, it.framework) == ("b200", "cudnn", "megatron-core-plain")
    assert (it.dims.tp, it.dims.dp_shard, it.recipe.zero, it.recipe.train.accumulate) == (2, 4, 1, 4)
    recipe = it.recipe
    assert (recipe.tp_overlap, recipe.overlap_grad_reduce, recipe.overlap_param_gather) == (False, False, False)
    assert it.measured.tokens_per_second == pytest.approx(16 * 4096 / 8 / 0.7255)
    assert is_held_out(ROWS["m1234"])
    assert not is_held_out(ROWS["m1231"])
    assert case("m0717").attention_kernel == "flash3"


def test_a_row_with_latent_attention_whose_recipe_is_public():
    it = case("m0897")
    model = it.model
    assert isinstance(model, MLAConfig)
    assert (model.query_rank, model.latent_rank, model.qk_size, model.value_size) == (0, 512, 192, 128)
    assert model.num_parameters() == pytest.approx(15.96e9, rel=1e-3)  # Moonlight-16B-A3B's model card: 16B
    assert (it.recipe.precision.moments_dtype, it.recipe.tp_overlap, it.recipe.parallel.reshard_inputs) == (
        "bf16",
        False,
        True,
    )
    assert (case("m0889").recipe.precision.moments_dtype, case("m0889").recipe.tp_overlap) == ("fp32", True)
    assert case("m0828").model.query_rank == 1536


@pytest.mark.tier("test")
def test_what_a_run_in_float8_keeps_and_when_its_memory_was_read():
    """Megatron-Bridge prints the peak once, after its first iteration, whose update makes the moments."""
    it = case("m0891")
    assert (it.recipe.conventions.float8_weights, it.recipe.conventions.gradient_copies) == (True, True)
    assert not case("m0897").recipe.conventions.gradient_copies, "a precision-aware optimizer reads them as they are"
    assert it.measured.memory_kind == "first iteration"
    gathers = {name: case(name).recipe.conventions for name in ("m0756", "m0043", "m0042", "m0070")}
    assert [said.float8_gathers for said in gathers.values()] == [True, True, False, False], "tensorwise alone"
    assert [case(name).recipe.float8 for name in gathers] == ["tensorwise", "tensorwise", "", "rowwise"]
    assert [name for name, said in gathers.items() if said.float8_casts_once and said.float8_experts] == ["m0756"]
    job = Job(
        find_model("llama-tiny"), ParallelDims(dp_shard=2, world_size=2), 2, 16, PublishedRecipe().having(level=1)
    )
    figure = estimate_job(job, "h100-sxm")
    kinds = {kind: value for kind, (value, _, _) in prediction_of(0.0, figure).memory.items()}
    (memory,) = figure.memory.classes
    moments = memory.by_category["optimizer"] * 2 // 3
    assert memory.persistent > kinds["allocated"] - moments, "the update, not backward"
    assert kinds["first iteration"] == memory.persistent


@pytest.mark.tier("test")
def test_weights_of_mindspore_are_split_and_gathered_while_nothing_is_computed():
    """Its parallel optimizer saves slices of the weights; their gathers are steps of the step's graph."""
    it = case("m1215")
    assert (it.recipe.zero, it.recipe.conventions) == (2, MegatronConventions(exposed_weights=True))
    job = Job(
        find_model("llama-tiny"),
        ParallelDims(dp_shard=2, world_size=2),
        1,
        16,
        PublishedRecipe().having(reshard_after_forward=False, graphs=True),
    )
    (plain,) = trace(job)
    changed = expose_weights(plain)
    assert changed.order == plain.order
    for key, segment in plain.segments.items():
        comms = [event for event in segment.events if isinstance(event, Comm)]
        events = changed.segments[key].events
        assert len(events) == len(segment.events) + len(comms)
        found = [at for at, event in enumerate(events) if isinstance(event, Comm)]
        assert [events[at] for at in found] == [comm._replace(stream=0) for comm in comms]
        assert all(events[at + 1] == Wait(events[at].handle, 0) for at in found)
    hardware = find_machine("h100-sxm")
    before, after = (price([program], job, hardware).time.step.value for program in (plain, changed))
    assert after > before


def comms(program, *ops):
    events = [event for segment, _ in program.segments_in_order() for event in segment.events]
    return [event for event in events if isinstance(event, Comm) and event.op in ops]


@pytest.mark.tier("test")
def test_gradients_are_all_reduced_by_all_a_bucket_at_a_time():
    """InternEvo's buckets of whole gradients: none above its limit but for a gradient that is larger by itself."""
    assert case("m1063").recipe.conventions == MegatronConventions(owned_weights=True)
    dims = ParallelDims(dp_replicate=2, dp_shard=2, world_size=4)
    (plain,) = trace(
        Job(find_model("llama-tiny"), dims, 2, 16, PublishedRecipe().having(level=1, accumulate=2, reduce_dtype="bf16"))
    )
    changed = reduce_whole_gradients(plain)
    streams = {event.stream for s in plain.segments.values() for event in s.events if isinstance(event, Op)}
    gradients, reductions = comms(plain, "reduce_scatter"), comms(changed, "all_reduce")
    assert (len(reductions), comms(changed, "reduce_scatter")) == (1, [])  # all of a small model fit
    assert reductions[0] not in [e for s, _ in changed.segments_in_order() if s.name == "backward" for e in s.events]

    for bucket in (1, 20_000, 10**9):
        changed = reduce_whole_gradients(plain, bucket)
        reductions = comms(changed, "all_reduce")
        assert sum(one.size for one in reductions) == sum(one.size for one in gradients)
        assert {tuple(changed.groups[one.group].ranks) for one in reductions} == {(0, 1, 2, 3)}
        assert all(one.moved == 2 * (one.size - one.size // 4) for one in reductions)
        largest = max(one.size for one in gradients)
        assert all(one.size <= max(2 * bucket, largest) for one in reductions)
        if bucket == 1:
            assert [one.size for one in reductions] == [one.size for one in gradients]
        for segment, _ in changed.segments_in_order():
            for at, event in enumerate(segment.events):
                if event in reductions:  # the host waits, and what puts the bucket together is queued beside backward
                    wait, copy = segment.events[at - 2 : at]
                    assert wait == HostWait(None)
                    assert isinstance(copy, Op)
                    assert (copy.stream, copy.reads[0].bytes) == (event.stream, event.size)
                    assert event.stream not in streams


@pytest.mark.tier("full")
def test_owners_broadcast_the_weights_that_they_have_updated():
    dims = ParallelDims(dp_shard=8, world_size=8)
    (plain,) = trace(
        Job(find_model("llama-tiny"), dims, 1, 16, PublishedRecipe().having(level=1, overlap_param_gather=False))
    )
    changed = broadcast_weights(plain)
    gathers, sent = comms(plain, "all_gather"), comms(changed, "broadcast")
    assert comms(changed, "all_gather") == []
    assert 1 < len(sent) <= 8
    assert sum(one.size for one in sent) == sum(one.size for one in gathers)
    assert max(one.size for one in sent) >= max(one.size for one in gathers)  # a weight has one owner
    ((key, _),) = [one for one in changed.order if one[0][0] == "optimizer"]
    events = changed.segments[key].events
    assert not any(isinstance(event, Op) for event in events[events.index(sent[0]) :]), "after the whole update"
    assert events[-len(sent) :] == [Wait(one.handle, 0) for one in sent]
    waited = [event.handle for event in events if isinstance(event, Wait)]
    assert not {one.handle for one in gathers} & set(waited)
    (alone,) = trace(Job(find_model("llama-tiny"), ParallelDims(), 1, 16, PublishedRecipe().having(level=1)))
    assert reduce_whole_gradients(broadcast_weights(alone)) is alone


@pytest.mark.tier("test")
def test_more_ranks_than_weights_leave_some_without():
    dims = ParallelDims(dp_shard=512, world_size=512)
    (plain,) = trace(Job(find_model("llama-tiny"), dims, 1, 16, PublishedRecipe().having(level=1)))
    assert len(comms(broadcast_weights(plain), "broadcast")) == len(comms(plain, "all_gather"))


@pytest.mark.tier("full")
def test_modules_fetch_their_weights_and_the_host_waits_for_them():
    """DeepSpeed 0.3.13: of four weights of a block, backward finds the last one as recomputation has left it."""
    assert case("m0533").recipe.conventions == MegatronConventions(fetched_weights=True)
    dims, ranks = ParallelDims(dp_shard=384, world_size=384), 384
    model = GPTSpec("gpt", replace(gpt_tiny().config, dropout=0.1))
    job = Job(
        model,
        dims,
        3,
        32,
        PublishedRecipe().having(reshard_after_forward=True, checkpointing="full", norm="fused", attention="math"),
    )
    (plain,) = trace(job)
    weights = {64 * 192: 8 + 4, 64 * 64: 8 + 4, 64 * 256: 2 * 8 + 4, 64 * 512: 1 + 1}  # of 4 blocks; backward's last
    for live in (10**9, 0):
        changed = fetch_weights(plain, small=1, live=live)
        events = [event for segment, _ in changed.segments_in_order() for event in segment.events]
        gathers, reductions = comms(changed, "all_gather"), comms(changed, "all_reduce")
        sizes = [one.size // 2 for one in gathers]
        assert {size: sizes.count(size) for size in weights} == weights
        assert len(gathers) == sum(weights.values())
        assert sum(one.size for one in reductions) == 2 * (4 * (64 * (192 + 64 + 2 * 256)) + 64 * 512) + 4  # the loss
        assert comms(changed, "reduce_scatter") == []
        came = issued = products = 0
        ahead = set()
        for at, event in enumerate(events):
            if event == HostWait(None):
                came = issued
            elif isinstance(event, Comm) and event.op == "all_gather":
                issued += 1
                wait, parts = events[at - 2 : at]
                assert wait == HostWait(None)
                assert (parts.kind, parts.shape, events[at + 1]) == ("host", (ranks,), parts)
            elif isinstance(event, Op) and event.kind == "matmul" and event.shape[0] == 1:
                products += 1
                ahead.add(issued - came)
        assert products == 4 * (4 + 4 + 8) + 1 + 2
        assert ahead == ({0, 1} if live else {0}), "the next one at most, and only beside a small one"
        before, after = (price([one], job, find_machine("a100-80gb")).time.step.value for one in (plain, changed))
        assert after > before
    host = [event for event in events if isinstance(event, Op) and event.kind == "host" and event.shape]
    pricing = Pricing(find_machine("a100-80gb"))
    assert pricing.host_seconds(host[0]) == ranks * pricing.host_seconds(host[0]._replace(shape=()))


@pytest.mark.tier("test")
def test_a_sliding_window_is_as_much_work_as_the_pairs_that_are_seen():
    assert case("m1166").recipe.conventions.window == 4096
    assert case("m1167").recipe.conventions is None
    assert "its sliding window is not modelled" in case("m0856").notes  # in every second layer
    job = Job(find_model("llama-tiny"), ParallelDims(), 1, 64, Recipe())
    (plain,) = trace(job)

    def attention(program):
        events = [event for segment in program.segments.values() for event in segment.events]
        return [event for event in events if isinstance(event, Op) and event.kind.startswith("attention")]

    found = attention(slide_window(plain, 16))
    pairs = sum(min(token + 1, 16) for token in range(64))
    for before, after in zip(attention(plain), found, strict=True):
        *heads, queries, keys, size, causal = after.shape
        assert (*heads, size) == (*before.shape[:3], before.shape[5])
        assert (queries, causal) == (64, 0)
        assert queries * keys == pytest.approx(pairs, abs=queries / 2)
        assert after.flops == pytest.approx(before.flops * pairs / (64 * 65 / 2), rel=1e-3)
    assert found
    assert slide_window(plain, 64) == plain


def test_a_row_is_told_from_others_by_the_commit_it_was_published_with():
    parts, root = MegatronConventions(fsdp2="parts"), MegatronConventions(fsdp2="root")
    assert case("m0105").recipe.conventions == replace(parts, gathers_heads=True)  # before the gather was removed
    assert case("m0140").recipe.conventions == replace(parts, graph="model", exposed_weights=True)
    assert case("m0096").recipe.conventions == replace(parts, graph="model", exposed_weights=True)
    assert case("m0093").recipe.conventions == replace(parts, graph="model")  # the same commit's other trainer
    assert case("m0098").recipe.conventions == replace(parts, graph="step")
    assert case("m0090").recipe.conventions == parts
    assert case("m0063").recipe.conventions == root
    assert {name: case(name).allocator for name in ("m0045", "m0063", "m0889")} == {
        "m0045": "caching",
        "m0063": "expandable",
        "m0889": "caching",
    }


def test_a_run_that_its_code_refuses_is_checkpointed_as_it_allows():
    for name in ("m0084", "m0085", "m0086"):
        assert case(name).recipe.checkpointing == "full"
        assert any("code of its commit" in note for note in case(name).notes)
    assert case("m0081").recipe.checkpointing == "alternate"


@cache
def sharded():
    """A step of a small model on eight ranks, and its job."""
    model = replace(find_model("llama-tiny").config, vocab_size=4096)
    job = Job(
        find_model(model),
        ParallelDims(dp_shard=8, world_size=8),
        2,
        64,
        PublishedRecipe().having(loss="eager", checkpointing="alternate"),
    )
    (program,) = trace(job)
    return job, program


def by_stream(program):
    """The most that is allocated of each stream's blocks, and whether all blocks that are freed were there."""
    streams = {e.block: e.stream for s in program.segments.values() for e in s.events if isinstance(e, Alloc)}
    most, live, now = dict.fromkeys(streams.values(), 0), {}, dict.fromkeys(streams.values(), 0)
    for key in [key for key in program.segments if key[0] == "build"] + [key for key, _ in program.order]:
        for event in program.segments[key].events:
            if isinstance(event, Alloc):
                assert event.block not in live
                live[event.block] = event.bytes
                now[event.stream] += event.bytes
                most[event.stream] = max(most[event.stream], now[event.stream])
            elif isinstance(event, Free) and event.block in live:
                now[streams[event.block]] -= live.pop(event.block)
    return most


@pytest.mark.tier("full")
def test_memory_of_fsdp2_is_on_three_streams():
    """As torch's engine: reduced gradients, what is gathered (two units at a time), and the rest."""
    job, plain = sharded()
    assert set(by_stream(plain)) == {0}
    config, made = job.model.config, allocate_as_fsdp2(plain)
    most = by_stream(made)
    gathers, reductions = sorted(most)[1:]
    assert most[reductions] == pytest.approx(4 * config.num_parameters() / 8, rel=0.01)
    embedding = 2 * config.vocab_size * config.hidden_size
    block = 2 * config.num_parameters() / config.num_hidden_layers - 2 * embedding / config.num_hidden_layers
    assert most[gathers] == pytest.approx(2 * embedding + block * 9 / 8, rel=0.02)
    split = by_stream(allocate_as_fsdp2(plain, embedding=embedding))
    assert split[gathers] == pytest.approx(most[gathers] - embedding, rel=0.02)
    for program in (made, allocate_as_fsdp2(plain, embedding=embedding), allocate_as_fsdp2(plain, keeps_last=True)):
        found = replay_memory(program)
        assert found.unmatched == 0
        assert found.persistent == replay_memory(plain).persistent
        for key, segment in plain.segments.items():
            timed = [event for event in segment.events if not isinstance(event, Alloc | Free)]
            assert [e for e in program.segments[key].events if not isinstance(e, Alloc | Free)] == timed
    kept = replay_memory(allocate_as_fsdp2(plain, keeps_last=True), None)
    assert kept.peak_allocated - replay_memory(made, None).peak_allocated == pytest.approx(block, rel=0.02)


@pytest.mark.tier("full")
def test_a_program_that_gathers_nothing_stays_as_it_is():
    """As one of tensor parallelism alone, or one on a single device: the floors of a search are recorded so."""
    for degrees in ({}, {"tp": 2}):
        dims = ParallelDims(**degrees, world_size=degrees.get("tp", 1))
        (plain,) = trace(Job(find_model("llama-tiny"), dims, 2, 128, Recipe()))
        assert allocate_as_fsdp2(plain, embedding=1024, keeps_last=True) is plain


@pytest.mark.tier("test")
def test_a_graph_lets_go_of_what_nothing_reads_any_more():
    """The brute-force twin: at no event is a block there that no operation to come touches."""
    _, plain = sharded()
    changed = free_after_last_use(plain, with_loss=True)
    events = [e for key, _ in changed.order if key[0] in ("forward", "backward") for e in changed.segments[key].events]
    before = [e for key, _ in plain.order if key[0] in ("forward", "backward") for e in plain.segments[key].events]
    last = {t.block: at for at, e in enumerate(events) if isinstance(e, Op) for t in (*e.reads, *e.writes)}
    freed = {e.block: at for at, e in enumerate(events) if isinstance(e, Free)}
    taken = {e.block: at for at, e in enumerate(events) if isinstance(e, Alloc)}
    held = {b: events[last[b] + 1 : at] for b, at in freed.items() if last.get(b, -1) > taken.get(b, 10**9)}
    late = [b for b, between in held.items() if any(isinstance(e, Op) for e in between)]
    of_comms = [b for b in late if any(isinstance(e, Comm | Wait) for e in held[b])]
    assert late == of_comms, "but for what communication reads"
    assert all(at < freed.get(block, 10**9) for block, at in last.items()), "nothing is touched when it is gone"
    assert {e.block for e in events if isinstance(e, Free)} == {e.block for e in before if isinstance(e, Free)}
    assert [e for e in events if not isinstance(e, Alloc | Free)] == [
        e for e in before if not isinstance(e, Alloc | Free)
    ]
    loss = {block for block, name in plain.categories.items() if name == "logits"}
    model = free_after_last_use(plain)
    for block in loss:
        assert lives(model, block) == lives(plain, block), "the loss is no part of it"
    assert sum(lives(changed, block) for block in loss) < sum(lives(plain, block) for block in loss)
    assert sum(lives(model, block) for block in freed) < sum(lives(plain, block) for block in freed)


def lives(program, block):
    """How many operations of a step a block is there for."""
    count, inside = 0, False
    for key, _ in program.order:
        for event in program.segments[key].events:
            if isinstance(event, Alloc | Free) and event.block == block:
                inside = isinstance(event, Alloc)
            count += inside and isinstance(event, Op)
    return count


def test_an_allocator_whose_segments_grow_reserves_less():
    one, two = 100 * 2**20, 200 * 2**20
    key, events = ("forward", 0, "only"), [Alloc(1, one, 0), Free(1), Alloc(2, two, 0), Free(2)]
    program = Program(0, 1, 1, segments={key: Segment(*key, events)}, order=[(key, 0)])
    hardware = find_machine("h100-sxm")
    caching, growing = (
        memory_of([program], replace(hardware, allocator=name), {}).reserved for name in ("caching", "expandable")
    )
    assert (caching, growing) == (one + two, two)


def test_which_part_of_the_blocks_is_checkpointed_comes_from_published_utilizations():
    layers = {
        name: (case(name).recipe.activations.first, ROWS[name]["n_layers"]) for name in ("m1083", "m1085", "m1088")
    }
    assert layers == {"m1083": (12, 40), "m1085": (45, 48), "m1088": (69, 80)}
    for name, hfu, mfu in (("m1083", (0.69, 0.46), (0.61, 0.43)), ("m1085", (0.74, 0.49), (0.55, 0.38))):
        share = 3 * sum(a / b - 1 for a, b in zip(hfu, mfu, strict=True)) / 2
        kept, of = layers[name]
        assert kept / of == pytest.approx(share, abs=0.03)


def test_what_the_scripts_of_rows_say_of_attention_and_experts():
    """MindSpeed-LLM at 773a9c6b: heads split over ranks of cp, latent attention, experts that all tokens go to."""
    assert [case(name).dims.ulysses_degree for name in ("m1122", "m1124", "m1161")] == [8, 1, 4]
    lite = case("m1175").model
    assert isinstance(lite, MLAConfig)
    assert (lite.num_shared_experts, lite.num_dense_layers, lite.query_rank) == (2, 1, 0)
    assert lite.num_parameters() == pytest.approx(15.7e9, rel=0.01)  # DeepSeek-V2-Lite's model card
    assert case("m1161").model.num_parameters() == pytest.approx(57.4e9, rel=0.01)  # Qwen2-57B-A14B's
    large = case("m1199")  # of MindFormers: experts have room for twice the tokens, and compute as many
    assert large.model.num_parameters() == pytest.approx(236e9, rel=0.01)  # DeepSeek-V2's
    assert (large.model.experts_per_token, large.dims.etp, large.allocator) == (
        2 * ROWS["m1199"]["top_k"],
        8,
        "expandable",
    )


def test_micro_batches_of_a_pipeline_that_runs_several_times():
    assert case("m1221").recipe.train.accumulate == 8 * 32  # of two sequences each
    assert case("m0891").recipe.train.accumulate == 16


def test_without_sequence_parallelism_there_is_nothing_to_gather_again():
    assert not case_of({**ROWS["m0889"], "sp": False}).recipe.parallel.reshard_inputs


def test_a_framework_that_nothing_is_known_of_is_a_plain_one():
    found = case_of({**ROWS["m0063"], "framework": "somebody's"})
    assert (found.framework, found.recipe.conventions, found.recipe.norm) == ("unknown", None, "fused")
    assert "nothing is known of its framework; taken as a plain one" in found.notes


def test_what_dispatches_operations():
    assert case("m0111").recipe.host == "dtensor"  # torchtitan, tp without compile
    assert case("m0096").recipe.host == "eager"  # a graph of plain tensors
    assert case("m0093").recipe.host == "eager"  # the same, compiled
    assert case("m0063").recipe.host == "eager"  # torchtitan without tp: FSDP2 computes on plain tensors


@pytest.mark.tier("test")
def test_intervals_know_what_was_seen():
    figures, outcomes = load_figures(), kept_outcomes()
    assert runs_seen() == seen_in(outcomes)

    def spread(kernels=("dense",), known=figures, **changes):
        found = case_of({**ROWS["m0063"], **changes})
        family = hardware_family(found)
        return step_spread(figures_of(found, known).of(find_machine(found.hardware), "estimate", family), kernels)

    strange = figures.replace({"estimate.blackwell.seen": {}})
    assert spread() < spread(framework="somebody's") == spread(hw_device="B200")
    assert spread(hw_device="B200") < spread(hw_device="B200", known=strange)
    assert spread(["experts"]) > spread(framework="somebody's"), "of torchtitan only dense ones are known"


@pytest.mark.tier("test")
@given(st.data())
def test_less_evidence_never_narrows_an_interval(data):
    spreads = load_figures().section("estimate", "default")["spread"]
    counts = st.integers(0, 30)
    seen = {kind: data.draw(counts, kind) for kind in spreads}
    own = {kind: data.draw(st.integers(0, most), f"own {kind}") for kind, most in seen.items()}
    kernels = data.draw(st.lists(st.sampled_from(sorted(spreads)), min_size=1, unique=True), "kernels")
    fewer = {kind: data.draw(st.integers(0, most), f"fewer {kind}") for kind, most in seen.items()}
    less = {kind: min(own[kind], data.draw(st.integers(0, most), f"less {kind}")) for kind, most in fewer.items()}

    def step(own, seen, kernels=kernels):
        general = {"spread": spreads, "framework": own, "seen": seen}
        return Quantity.spread_by(2.0, step_spread(general, kernels), "calibrated")

    known, unsure = step(own, seen), step(less, fewer)
    assert unsure.low <= known.low < known.value == 2 < known.high <= unsure.high
    assert step(own, seen, [*kernels, "experts"]).high >= known.high


def test_the_spreads_are_what_the_command_writes():
    outcomes = kept_outcomes()
    assert spreads_text(outcomes) == SPREADS.read_text(encoding="utf-8")
    widths = fit_spreads(outcomes)
    inside = {}
    for one in known(outcomes):
        if not one.outcome.is_held_out:
            most = Z80 * math.hypot(widths[one.kernels][one.level].width, one.outcome.prices)
            cell = inside.setdefault((one.kernels, one.level), {})
            cell.setdefault(publication(one.outcome.source), []).append(abs(one.error) <= most)
    for cell, found in inside.items():
        assert statistics.fmean(statistics.fmean(each) for each in found.values()) >= 0.8, cell


@pytest.mark.tier("test")
def test_intervals_of_memory_know_what_was_seen():
    figures = load_figures()

    def spread(row):
        found = case_of(row)
        hardware = find_machine(found.hardware)
        return memory_of([], hardware, figures_of(found, figures).of(hardware, "estimate", hardware.family)).spread

    kept = [case_of(ROWS[one.id]) for one in kept_outcomes() if one.memory and not one.is_held_out]
    seen = {(found.framework, hardware_family(found)) for found in kept}
    for one in kept_outcomes():
        if one.memory is not None:  # what no fit has seen is wider, and nothing else is
            found = case_of(ROWS[one.id])
            pair = (found.framework, hardware_family(found))
            assert (spread(ROWS[one.id]) > 0.1) == (pair not in seen), one.id
    row = ROWS["m0063"]
    assert spread(row) < spread({**row, "hw_device": "A100 SXM4 80GB"}) < spread({**row, "hw_device": "B200"})
    assert spread({**row, "framework": "somebody's"}) == spread({**row, "hw_device": "B200"})
    a100, ascend = (find_machine(name) for name in ("a100-80gb", "ascend-910b"))
    known, unknown = (memory_of([], one, figures.of(one, "estimate", one.family)).spread for one in (a100, ascend))
    assert 0 < 2 * known < unknown


@pytest.mark.tier("test")
def test_a_step_on_a_device_never_seen_and_with_experts_is_less_sure():
    job = Job(find_model("llama-tiny"), ParallelDims(), 1, 16, Recipe())
    programs = trace(job)
    h100 = find_machine("h100-sxm")
    seen, unseen = (price(programs, job, one).time.step for one in (h100, replace(h100, family="rubin")))
    moe = Job(find_model("moe-tiny"), ParallelDims(), 1, 16, Recipe())  # the same step, as if it was of experts
    experts = price(programs, moe, find_machine("h100-sxm")).time.step
    assert experts.value == seen.value
    above = [one.high / one.value - 1 for one in (seen, experts, unseen)]
    assert min(above[1:]) > 1.5 * above[0] > 0


def hardware_family(found):
    return find_machine(found.hardware).family


def test_a_device_that_is_not_known_is_skipped_with_the_reason():
    row = ROWS["m0063"]
    assert "no description of the device 'TPU v5'" in case_of({**row, "hw_device": "TPU v5"}).reason
    assert "the row lacks hidden" in case_of({**row, "hidden": None}).reason
    assert "schedule ZB-1p" in case_of({**ROWS["m0944"], "vocab": 50304}).reason


def test_degrees_that_do_not_fit_are_skipped():
    assert "degrees" in case_of({**ROWS["m0063"], "tp": 3}).reason


def test_what_cannot_be_predicted_is_no_truth():
    assert measured(ROWS["m0102"]).memory is None
    assert measured({**ROWS["m0102"], "predict_mem": True, "predict_time": True}).tokens_per_second == 7522
    assert measured(ROWS["m0112"]).is_oom


def test_step_time_becomes_tokens_per_second_of_a_device():
    row = ROWS["m0824"]
    assert measured(row).tokens_per_second == pytest.approx(64 * 4096 / 16 / 2.746)


def test_a_third_of_the_rows_is_held_out_by_whole_groups():
    rows = wanted(ROWS.values())
    for key in ("predict_time", "predict_mem"):
        some = [row for row in rows if row.get(key)]
        assert 1 / 3 < sum(map(is_held_out, some)) / len(some) < 1 / 2
    qwen = [is_held_out(row) for row in rows if row["model"] == "qwen3-32b"]
    assert all(qwen)
    assert qwen


def test_rows_are_read_from_lists_lines_and_gzip(tmp_path):
    rows = [ROWS["m0061"], ROWS["m0062"]]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "lines.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    for name in ("list.json", "lines.json", "lines.gz"):
        assert read_rows(tmp_path / name) == rows


def test_a_file_that_holds_no_rows_is_refused(tmp_path):
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"cannot read published rows from .*a.json: a row is an object with an 'id'"):
        read_rows(tmp_path / "a.json")
    with pytest.raises(ValueError, match="it is no such file"):
        read_rows(tmp_path / "b.json")


# Outcomes


def half(one: Case) -> Prediction:
    """Predict half of every truth, and 1 GiB."""
    speed = (one.measured.tokens_per_second or 2) / 2
    memory = dict.fromkeys(("allocated", "reserved", "device", "first step"), (GIB, 0.5 * GIB, 2.0 * GIB))
    return Prediction((speed, 0.9 * speed, 2.1 * speed), memory, True)


def refuse(one: Case) -> Prediction:
    raise ValueError("no price for aten.frobnicate\n  op: ...")


def test_an_outcome_compares_what_was_measured():
    it = outcome_of(ROWS["m0063"], half)
    assert (it.speed.error, it.speed.is_inside, it.memory.is_inside) == (-0.5, True, False)
    assert it.memory.truth == pytest.approx(62.18)
    assert it.text == "8x H100 SXM 96GB HBM2e, llama3-8b, seq 8192, batch 8 by 1, selective"


def test_a_failure_is_a_reason_and_not_the_end():
    it = outcome_of(ROWS["m0063"], refuse)
    assert it.speed is None
    assert it.reason.startswith("ValueError: no price for aten.frobnicate (test_mesh_validation.py:")


def test_outcomes_survive_a_file(tmp_path):
    outcomes = list(run([ROWS["m0063"], ROWS["m0394"]], half, processes=1))
    write_outcomes(outcomes, tmp_path / "out.jsonl")
    again = read_outcomes(tmp_path / "out.jsonl")
    assert [one.id for one in again] == ["m0063", "m0394"]
    assert again[0].speed.predicted == pytest.approx(outcomes[0].speed.predicted, rel=1e-4)


def test_summaries():
    errors = [Compared(100, 100 * (1 + error), 95, 105) for error in (0.01, -0.02, 0.1, -0.3)]
    it = summary(errors)
    assert (it.count, it.median, it.p90, it.worst, it.inside) == pytest.approx((4, 0.06, 0.3, 0.3, 1.0))
    assert summary([]) is None


def outcome(truth: float, predicted: float, group: str = "a") -> Outcome:
    return Outcome("m1", "s", group, "t", False, Compared(truth, predicted, 0, 1))


@pytest.mark.tier("full")
def test_maxima_that_torchtitan_kept_for_float8():
    """Of each product, |x| of its input and of its gathered weight, in bfloat16."""
    spec, recipe = find_model("llama-tiny"), PublishedRecipe().having(float8="tensorwise", checkpointing="selective")
    config, tokens = spec.config, 512
    held = {}
    for keeps in (False, True):
        job = Job(spec, ParallelDims(), 1, tokens, replace(recipe, conventions=MegatronConventions(keeps_maxima=keeps)))
        (program,) = trace(job)
        held[keeps] = replay_memory(program, None).by_category["activations"]
    d, f, kv = config.hidden_size, config.intermediate_size, config.num_key_value_heads * config.head_dim
    weights, inputs = 2 * d * d + 2 * d * kv + 3 * d * f, 6 * d + f
    assert held[True] - held[False] == pytest.approx(2 * (weights + tokens * inputs) * spec.num_layers, rel=0.02)
    assert case("m0077").recipe.conventions.keeps_maxima
    assert not case("m0079").recipe.conventions.keeps_maxima


def test_only_pairs_of_a_group_that_differ_are_asked_to_be_in_order():
    assert ordered_pairs([outcome(100, 1), outcome(104, 2)]) == (0, 0)
    assert ordered_pairs([outcome(100, 1), outcome(120, 2), outcome(90, 3, "b")]) == (1, 1)
    assert ordered_pairs([outcome(100, 2), outcome(120, 1)]) == (0, 1)
    assert ordered_pairs([outcome(100, 2), outcome(120, 2)]) == (0, 1), "alike is in no order, whichever comes first"


def test_the_page_tells_held_out_and_calibration_apart():
    outcomes = list(run([ROWS[name] for name in ("m0063", "m0104", "m0112")], half, processes=1))
    text = page(outcomes, "python -m benchmarks.published")
    assert "| Throughput, held out | 1 | 50.0% |" in text
    assert "| Throughput, calibration | 1 | 50.0% |" in text
    assert "| m0104* | 8x H100" in text
    assert "Of 1 published runs that were out of memory, 0 are predicted not to fit" in text


# The page that is kept


def kept_outcomes() -> list[Outcome]:
    return read_outcomes(DOCS / "validation.jsonl")


def test_the_page_is_that_of_the_outcomes_beside_it():
    text = page(kept_outcomes(), "python -m benchmarks.published --write docs/generated/validation.md", fitted())
    assert (DOCS / "validation.md").read_text(encoding="utf-8") == text


def test_held_out_rows_are_within_what_is_claimed():
    held = [one for one in kept_outcomes() if one.is_held_out]
    assert len(held) > 200
    assert not [one for one in kept_outcomes() if one.reason], "every row that states enough has a prediction"
    speed = summary([one.speed for one in held if one.speed])
    memory = summary([one.memory for one in held if one.memory])
    right, count = ordered_pairs(held)
    assert speed.median < 0.10
    assert memory.median < 0.07
    # 9 of 10 is the aim, which pipelines miss: 9 of 31 runs of vTrain's 39.1B model, which make up half of all pairs,
    # took 1.1 to 1.6 times what is predicted, for reasons that are not published.
    assert right / count > 0.8
    right, count = ordered_pairs([one for one in held if ", pp" not in one.text])
    assert count > 200
    assert right / count > 0.9


def test_which_rows_are_held_out_is_as_when_the_page_was_written():
    assert all(one.is_held_out == is_held_out(ROWS[one.id]) for one in kept_outcomes())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m0062", "m0256", "m0277", "m0816"])
def test_a_few_rows_stay_where_they_were(name):
    from benchmarks.published.predict import Simulator

    kept = next(one for one in kept_outcomes() if one.id == name)
    now = outcome_of(ROWS[name], Simulator())
    assert now.reason == ""
    assert now.speed.predicted == pytest.approx(kept.speed.predicted, rel=0.02)
    if kept.memory is not None:
        assert now.memory.predicted == pytest.approx(kept.memory.predicted, rel=0.02)


@pytest.mark.tier("full")
def test_traces_are_kept_as_text_and_come_back_as_they_were(tmp_path, monkeypatch):
    published = case("m0062")
    dims = ParallelDims(dp_shard=2, pp=2, world_size=4)
    programs = trace(Job(find_model("llama-tiny"), dims, 8, 64, Recipe().having(accumulate=8)))
    programs[0].groups.append(CommGroup("world", range(0, 100_000, 2)))
    traced = []
    monkeypatch.setattr(predict, "trace", lambda job: traced.append(job) or programs)
    assert predict.programs_of(published, tmp_path) is programs
    again = predict.programs_of(published, tmp_path)
    assert again == programs
    assert again is not programs
    for key, segment in programs[0].segments.items():  # tuples of the same fields are equal
        assert [type(one) for one in again[0].segments[key].events] == [type(one) for one in segment.events]
    assert again[0].groups[-1].ranks == range(0, 100_000, 2)
    assert len(traced) == 1
    (kept,) = tmp_path.iterdir()
    for broken in ("", "[]", "{}", '{"rank": 1}', kept.read_text()[:-100], "\x00"):
        kept.write_text(broken)
        assert predict.programs_of(published, tmp_path) == programs
    assert kept.read_text().count("\n") == len(programs)
