"""Messages between stages: in shards that ranks along tp send and gather, and with a host that waits for them."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.published.gpt import gpt_tiny
from benchmarks.published.megatron import (
    MegatronConventions,
    cast_weights_once,
    copy_gradients,
    copy_to_nodes,
    gather_float8,
    gather_heads,
    keep_float8_weights,
    multiply_experts_in_float8,
)
from benchmarks.published.step import PublishedRecipe
from hyper_parallel import ParallelDims
from hyper_parallel.core.machine.calibration import load_calibration
from hyper_parallel.core.machine.description import find_machine
from sim.mesh.cost import Pricing
from sim.mesh.job import Job
from sim.mesh.memory import replay_memory
from sim.mesh.models import find_model
from sim.mesh.program import Alloc, Comm, Free, HostWait, Op, Wait
from sim.mesh.recipe import Recipe
from sim.mesh.replay.timeline import replay_time
from sim.mesh.tracing.trace import trace

pytestmark = pytest.mark.tier("full")

SCATTER_GATHER = MegatronConventions(scatter_gather=True)
BLOCKING = MegatronConventions(blocking_messages=True)
SIZE = 2 * 64 * 64 * 4  # a micro-batch of 2 sequences of 64 tokens, 64 wide, in float32


def programs(model, tp, **options):
    recipe = PublishedRecipe().having(param_dtype="fp32", accumulate=2, level=1, **options)
    return trace(Job(find_model(model), ParallelDims(tp=tp, pp=2, world_size=2 * tp), 4, 64, recipe))


def comms(model, tp, **options):
    """Communication of the first and the last stage, by op and axis."""
    found = []
    for program in programs(model, tp, **options):
        events = [event for segment, _ in program.segments_in_order() for event in segment.events]
        said = [e for e in events if isinstance(e, Comm) and program.places[e.place].phase != "optimizer"]
        found.append([(e.op, program.groups[e.group].axis, e.size) for e in said])
    return found


def messages(stage):
    return [size for op, axis, size in stage if axis == "pp" and op in ("send", "recv")]


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("model", [gpt_tiny(), "llama-tiny"], ids=["gpt-tiny", "llama-tiny"])
def test_each_rank_sends_a_part_and_gathers_what_it_gets(model):
    plain = comms(model, 2, sequence_parallel=False)
    parts = comms(model, 2, sequence_parallel=False, conventions=SCATTER_GATHER)
    for before, after in zip(plain, parts, strict=True):
        assert messages(before) == [SIZE] * 4, "two micro-batches, there and back"
        assert messages(after) == [SIZE // 2] * 4
        more = [one for one in after if one == ("all_gather", "tp", SIZE)]
        fewer = [one for one in before if one == ("all_gather", "tp", SIZE)]
        assert len(more) == len(fewer) + 2, "one for each message that comes in"


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True)])
def test_where_ranks_do_not_have_the_same_nothing_changes(tp, sequence_parallel):
    plain = comms("llama-tiny", tp, sequence_parallel=sequence_parallel)
    assert comms("llama-tiny", tp, sequence_parallel=sequence_parallel, conventions=SCATTER_GATHER) == plain


def test_a_host_that_waits_for_messages():
    plain, waits = programs(gpt_tiny(), 1), programs(gpt_tiny(), 1, conventions=BLOCKING)
    for before, after in zip(plain, waits, strict=True):
        events = [event for segment, _ in after.segments_in_order() for event in segment.events]
        got = {e.handle for e in events if isinstance(e, Comm) and e.op == "recv"}
        behind = [b for a, b in itertools.pairwise(events) if isinstance(a, Wait) and a.handle in got]
        assert behind.count(HostWait(None)) == 2, "one for each micro-batch"
        others = [event for event in events if event != HostWait(None)]
        assert others == [e for segment, _ in before.segments_in_order() for e in segment.events if e != HostWait(None)]


@pytest.mark.tier("test")
def test_a_host_that_waits_issues_late_what_the_device_could_have_begun():
    slow = load_calibration().replace({"host.op_us": 100.0})
    hardware = find_machine("a100-80gb")
    plain, waits = programs(gpt_tiny(), 1), programs(gpt_tiny(), 1, conventions=BLOCKING)
    fast = load_calibration().replace({"host.op_us": 0.0, "host.collective_us": 0.0})
    assert replay_time(waits, Pricing(hardware, slow)).step > 1.2 * replay_time(plain, Pricing(hardware, slow)).step
    free = [replay_time(some, Pricing(hardware, fast)).step for some in (plain, waits)]
    assert free[0] == pytest.approx(free[1])


def test_ranks_along_tp_share_what_goes_to_experts():
    dims = ParallelDims(dp_shard=1, ep=2, tp=2, etp=2, world_size=4)

    def exchanged(**options):
        recipe = PublishedRecipe().having(param_dtype="fp32", level=1, **options)
        (program,) = trace(Job(find_model("moe-tiny"), dims, 2, 64, recipe))
        events = [event for segment, _ in program.segments_in_order() for event in segment.events]
        said = [e for e in events if isinstance(e, Comm) and not e.dtype.startswith("int")]
        waited = {event.handle for event in events if isinstance(event, Wait)}
        assert len({e.handle for e in said}) == len(said), "no handle names two"
        assert waited >= {e.handle for e in said if e.op == "all_to_all"}
        return [(e.op, program.groups[e.group].axis, e.size, e.moved) for e in said if program.places[e.place].layer]

    plain, split = exchanged(), exchanged(conventions=MegatronConventions(split_dispatch=True))
    before = [(size, moved) for op, axis, size, moved in plain if (op, axis) == ("all_to_all", "ep")]
    after = [(size, moved) for op, axis, size, moved in split if (op, axis) == ("all_to_all", "ep")]
    assert after == [(size // 2, moved // 2) for size, moved in before]
    assert len(before) == 3 * 2 * 2, "three layers with experts: there and back, in forward and backward"
    ops = [op for op, *_ in split]
    exchanges = [place for place, op in enumerate(ops) if op == "all_to_all"]
    around = [ops[place - 1] if number % 2 else ops[place + 1] for number, place in enumerate(exchanges)]
    assert around == ["all_gather", "reduce_scatter"] * 6
    whole = [size for op, axis, size, _ in split if axis == "tp"]
    assert sum(whole) == sum(size for op, axis, size, _ in plain if axis == "tp") + sum(size for size, _ in before)


@pytest.mark.tier("test")
@pytest.mark.parametrize(("ranks", "part"), [(range(16), None), (range(8), 1.0), (range(4, 12), None)])
def test_a_token_goes_once_to_each_node_of_its_experts(ranks, part):
    dims = ParallelDims(dp_shard=1, ep=2, world_size=2)
    (program,) = trace(Job(find_model("moe-tiny"), dims, 2, 64, PublishedRecipe().having(level=1)))
    experts, each = 16, 3
    groups = [group._replace(ranks=tuple(ranks)) if group.axis == "ep" else group for group in program.groups]
    after = copy_to_nodes(replace(program, groups=groups), experts, each)
    place = np.repeat([rank // 8 for rank in ranks], experts // len(ranks)) if part is None else np.zeros(experts)
    nodes = [len({place[expert] for expert in chosen}) for chosen in itertools.combinations(range(experts), each)]
    part = float(np.mean(nodes)) / each if part is None else part

    def exchanges(some):
        events = [event for segment, _ in some.segments_in_order() for event in segment.events]
        said = [e for e in events if isinstance(e, Comm) and e.op == "all_to_all" and not e.dtype.startswith("int")]
        return [(e.size, e.moved) for e in said], [e for e in events if e not in said]

    before, others = exchanges(program)
    assert before
    assert exchanges(after) == ([(int(part * size), int(part * moved)) for size, moved in before], others)


def test_metrics_compute_the_loss_again_after_each_forward():
    def ops(**options):
        job = Job(
            find_model(gpt_tiny()),
            ParallelDims(),
            4,
            64,
            PublishedRecipe().having(accumulate=2, loss="compiled", **options),
        )
        (program,) = trace(job)
        said = [(key[0], e) for key, _ in program.order for e in program.segments[key].events if isinstance(e, Op)]
        return said, job.model.config.vocab_size

    (plain, vocabulary), (metered, _) = ops(), ops(conventions=MegatronConventions(loss_metrics=2))
    more = [op for phase, op in metered if phase == "forward" and "_log_softmax" in op.name]
    assert len(metered) - len(plain) == 2 * len(more) == 2 * 2 * 2, "a copy and a softmax, twice in two micro-batches"
    logits = 2 * 64 * vocabulary
    assert sum(op.bytes for _, op in metered) - sum(op.bytes for _, op in plain) == 4 * logits * (2 + 4 + 4 + 4)


@pytest.mark.parametrize(("checkpointing", "times"), [("none", 1), ("full", 2)])
def test_queries_and_keys_of_all_heads_are_turned_on_every_rank(checkpointing, times):
    """As DTensor does, counted with torch 2.13 over a fake group, against norms that keep queries and keys split."""
    config = replace(find_model("llama-tiny").config, qk_norm=True, num_hidden_layers=2)
    queries, keys, tp = config.num_attention_heads, config.num_key_value_heads, 2
    recipe = Recipe().having(checkpointing=checkpointing)
    job = Job(find_model(config), ParallelDims(tp=tp, world_size=tp), 2, 64, recipe)
    (plain,) = trace(job)
    changed = gather_heads(plain)

    def events(program, kind):
        return [e for key, _ in program.order for e in program.segments[key].events if isinstance(e, kind)]

    def gathered(program):
        return sorted(
            e.size for e in events(program, Comm) if e.op == "all_gather" and program.groups[e.group].axis == "tp"
        )

    head = 2 * 64 * (config.hidden_size // queries) * 2  # bytes of a head of 2 sequences of 64 tokens, in bf16
    layers = times * config.num_hidden_layers
    assert gathered(changed) == sorted(gathered(plain) + [queries * head, keys * head] * layers)
    waits = {e.handle for e in events(changed, Wait)}
    assert all(e.handle in waits for e in events(changed, Comm))

    both, split = (queries + keys) * head, (queries + keys) * head // tp
    more = 2 * both  # parts are copied together: read and written
    more += (both - split) * (2 + 2 + 3 + 2 * 0.5 + 2)  # twice mul, add, neg of a half, cat
    more += (keys + queries) * head  # keys are repeated for each query head
    more += 2 * 2 * queries * head // tp  # and each rank's heads are copied out of queries and keys
    cosines = 2 * (tp - 1) * 2 * 64 * (config.hidden_size // queries) * 2  # read by mul, taken to grow with the rest
    added = sum(op.bytes for op in events(changed, Op)) - sum(op.bytes for op in events(plain, Op))
    assert added == layers * (more + cosines)
    is_backward = [op for op in events(changed, Op) if op.kind == "attention_backward"]
    assert is_backward == [op for op in events(plain, Op) if op.kind == "attention_backward"]


def test_heads_are_gathered_along_tp_alone():
    (alone,) = trace(Job(find_model("llama-tiny"), ParallelDims(), 2, 64, Recipe()))
    assert gather_heads(alone) is alone


def taken(program, name):
    """Blocks that segments of a name take, by number, with their sizes."""
    said = [e for key, segment in program.segments.items() if key[0] == name for e in segment.events]
    return {e.block: e.bytes for e in said if isinstance(e, Alloc)}


def first_of_pipeline():
    dims, recipe = ParallelDims(dp_shard=2, pp=2, world_size=4), PublishedRecipe().having(level=1, accumulate=4)
    recipe = recipe.having(reduce_dtype="bf16", float8="tensorwise", compile=True)
    job = Job(find_model("llama-tiny"), dims, 4, 64, recipe)
    return trace(job)[0], job.model.config


def test_weights_kept_in_float8_are_not_made_for_each_micro_batch():
    """The first of two stages has two micro-batches under way: two copies of its linear layers, now none."""
    plain, config = first_of_pipeline()
    changed = keep_float8_weights(plain)
    before, after = (replay_memory(program, None) for program in (plain, changed))
    gone = taken(plain, "forward").keys() - taken(changed, "forward").keys()
    forwards = [segment.events for key, segment in plain.segments.items() if key[0] == "forward"]
    narrow, wide = config.hidden_size * config.hidden_size, config.hidden_size * config.intermediate_size
    for events in forwards:
        freed = {e.block for e in events if isinstance(e, Free)}
        sizes = [e.bytes for e in events if isinstance(e, Alloc) and e.block in gone - freed and e.bytes > 4]
        assert sorted(sizes) == sorted([narrow // 2] * 4 + [narrow] * 4 + [wide] * 6), "one of each is for backward"
    saved = before.by_category["activations"] - after.by_category["activations"]
    assert saved == pytest.approx(2 * sum(sizes), rel=0.02)
    assert (after.persistent, after.unmatched) == (before.persistent, 0)
    for key, segment in plain.segments.items():
        timed = [event for event in segment.events if not isinstance(event, Alloc | Free)]
        assert [e for e in changed.segments[key].events if not isinstance(e, Alloc | Free)] == timed


def split_at_products(segment):
    """The operations that multiply in float8, and the others."""
    ops = [event for event in segment.events if isinstance(event, Op)]
    return [op for op in ops if op.name == "aten._scaled_mm"], [op for op in ops if op.name != "aten._scaled_mm"]


@pytest.mark.tier("test")
def test_weights_are_cast_in_the_first_forward_alone():
    plain, config = first_of_pipeline()
    changed = cast_weights_once(plain)
    layers = config.num_hidden_layers // 2  # of a stage
    narrow, wide = config.hidden_size * config.hidden_size, config.hidden_size * config.intermediate_size
    weights = sorted([narrow // 2] * 2 * layers + [narrow] * 2 * layers + [wide] * 3 * layers)
    for key, segment in plain.segments.items():
        (products, before), (same, after) = split_at_products(segment), split_at_products(changed.segments[key])
        assert products == same
        gone = [op for op in before if op not in after]
        sizes = sorted(max(touch.bytes for touch in op.writes) for op in gone)
        assert sizes == (weights if key[0] == "forward" and key[2] != "first" else []), key


def along_tp(program):
    events = [event for segment, _ in program.segments_in_order() for event in segment.events]
    return [e for e in events if isinstance(e, Comm) and program.groups[e.group].axis == "tp"]


def test_what_products_in_float8_read_is_gathered_in_float8():
    """Two gathers of a block in forward, and two of gradients; the head's and the embedding's stay in bfloat16."""
    recipe = PublishedRecipe().having(level=1, reduce_dtype="bf16", float8="tensorwise", compile=True)
    job = Job(find_model("llama-tiny"), ParallelDims(tp=2, world_size=2), 2, 64, recipe)
    (plain,) = trace(job)
    changed = gather_float8(plain)
    pairs = list(zip(along_tp(plain), along_tp(changed), strict=True))
    narrow = [(old, new) for old, new in pairs if new != old]
    assert len(narrow) == 4 * job.model.config.num_hidden_layers
    for old, new in narrow:
        halves = {"size": old.size // 2, "moved": old.moved // 2, "dtype": "float8_e4m3fn"}
        assert (old.op, new) == ("all_gather", old._replace(**halves))
    assert [old.op for old, new in pairs if new == old].count("all_gather") == 2
    for key, segment in plain.segments.items():
        (products, before), (same, after) = split_at_products(segment), split_at_products(changed.segments[key])
        assert products == same
        gathers = [e for e in changed.segments[key].events if isinstance(e, Comm) and e.dtype.startswith("float8")]
        assert len(after) - len(before) == len(gathers), "each rank casts its part"
    (other,) = trace(replace(job, recipe=replace(recipe, float8="")))
    assert gather_float8(other) == other, "without float8 nothing is cast"


def test_experts_multiply_in_float8_what_is_cast_once():
    """Three products of an expert read two inputs in forward; in backward, gradients of three outputs come to these."""
    (plain,) = trace(
        Job(
            find_model("moe-tiny"),
            ParallelDims(),
            2,
            64,
            PublishedRecipe().having(level=1, float8="tensorwise", compile=True),
        )
    )
    changed = multiply_experts_in_float8(plain)
    counts = {}
    for key, segment in plain.segments.items():
        (before, after) = ([e for e in one.events if isinstance(e, Op)] for one in (segment, changed.segments[key]))
        grouped = [op for op in before if op.name == "aten._grouped_mm"]
        new = [op for op in after if op.name == "aten._grouped_mm"]
        assert [(op.shape, op.flops) for op in new] == [(op.shape, op.flops) for op in grouped]
        assert all(op.dtype == "float8_e4m3fn" for op in new)
        reads = [(old.reads, op.reads) for old, op in zip(grouped, new, strict=True)]
        assert all(b.bytes in (a.bytes, a.bytes // 2) for old, op in reads for a, b in zip(old, op, strict=True))
        counts[key[0]] = (len(grouped), len(after) - len(before))
    products = counts["forward"][0]
    assert products
    assert counts["forward"] == (products, products * 2 // 3)
    assert counts["backward"] == (2 * products, products)


@pytest.mark.tier("test")
def test_gradients_are_copied_before_the_first_weight_is_updated():
    plain, _ = first_of_pipeline()
    changed = copy_gradients(plain)
    copies = taken(plain, "optimizer")
    replayed = replay_memory(changed, None)
    (key,) = [key for key in plain.segments if key[0] == "optimizer"]
    frees = [event.block for event in changed.segments[key].events[-len(copies) :]]
    assert sorted(frees) == sorted(copies), "they live to the end"
    whole = replayed.persistent + sum(-(-size // 512) * 512 for size in copies.values())
    assert max(sum(p.totals) for p in replayed.curve if p.position == len(changed.order) - 1) == whole
    assert replayed.unmatched == 0
    wide = PublishedRecipe().having(level=1, reduce_dtype="fp32")
    (other,) = trace(Job(find_model("llama-tiny"), ParallelDims(dp_shard=2, world_size=2), 2, 64, wide))
    assert copy_gradients(other) is other, "gradients that add up in float32 are used as they are"


def test_receives_that_are_issued_early_hide_messages():
    hardware, figures = find_machine("h100-sxm"), load_calibration().replace({"host.op_us": 0.0})
    recipe = PublishedRecipe().having(param_dtype="fp32", accumulate=8, level=1, schedule="interleaved")
    dims = ParallelDims(pp=2, world_size=2)
    made = trace(Job(find_model("llama-tiny"), dims, 8, 64, recipe))
    early = Pricing(hardware, figures, **recipe.pricing)
    assert early.posts_early
    one, other = (replay_time(made, pricing) for pricing in (early, Pricing(hardware, figures)))
    assert other.step - one.step > 0.4 * one.slowest.communication["pp"]
    for late in (
        Recipe().having(schedule="1f1b"),
        Recipe().having(schedule="gpipe"),
        PublishedRecipe().having(schedule="zbv", conventions=BLOCKING),
    ):
        assert not late.pricing["posts_early"]
    assert Recipe().having(schedule="zbv").pricing["posts_early"]
