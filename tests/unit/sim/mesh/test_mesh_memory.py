"""Replay of memory: the allocator's rules, whose blocks are whose, and that what is left out changes nothing."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.published import predict
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from hyper_parallel.models.llama import Llama, LlamaConfig
from sim.mesh.job import Job
from sim.mesh.memory import ROUNDING, ClassMemory, replay_memory, with_workspaces
from sim.mesh.models import find_model
from sim.mesh.program import Alloc, Event, Free, Op, Place, Program, Segment
from sim.mesh.recipe import Recipe
from sim.mesh.replay.allocator import (
    CACHING,
    PLAIN,
    AllocatorRules,
    CachingAllocator,
    MemoryBlock,
    find_pattern,
)
from sim.mesh.tracing.trace import trace

MIB = 1 << 20
EXPANDABLE = AllocatorRules(expandable=True)


class TestAllocator:
    def test_sizes_are_rounded_to_512_bytes(self) -> None:
        allocator = CachingAllocator(CACHING)
        allocator.take(1, 0)
        allocator.take(513, 0)
        assert allocator.allocated == 512 + 1024

    @pytest.mark.parametrize(
        ("size", "segment"),
        [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB, 12), (33 * MIB + 1, 34)],
    )
    def test_segments_are_as_large_as_torch_takes_them(self, size: int, segment: int) -> None:
        allocator = CachingAllocator(CACHING)
        allocator.take(size, 0)
        assert allocator.reserved == segment * MIB

    def test_small_and_large_requests_do_not_share_segments(self) -> None:
        allocator = CachingAllocator(CACHING)
        allocator.take(MIB, 0)
        allocator.take(2 * MIB, 0)
        assert allocator.reserved == 22 * MIB

    def test_streams_do_not_share_segments(self) -> None:
        allocator = CachingAllocator(CACHING)
        allocator.give(allocator.take(4 * MIB, 0))
        allocator.take(4 * MIB, 1)
        assert allocator.reserved == 40 * MIB

    def test_the_smallest_block_that_fits_is_taken(self) -> None:
        allocator = CachingAllocator(CACHING)
        large, small = allocator.take(40 * MIB, 0), allocator.take(30 * MIB, 0)
        address = small.address
        allocator.give(large)
        allocator.give(small)
        assert allocator.take(29 * MIB + MIB // 2, 0).address == address

    def test_a_rest_of_at_most_one_mib_is_not_split_off_and_counts_as_allocated(self) -> None:
        allocator = CachingAllocator(CACHING)
        allocator.give(allocator.take(12 * MIB, 0))
        allocator.take(11 * MIB, 0)
        assert allocator.allocated == 12 * MIB
        allocator = CachingAllocator(CACHING)
        allocator.give(allocator.take(14 * MIB, 0))
        allocator.take(11 * MIB, 0)
        assert allocator.allocated == 11 * MIB

    def test_neighbours_that_are_free_are_joined(self) -> None:
        allocator = CachingAllocator(CACHING)
        blocks = [allocator.take(5 * MIB, 0) for _ in range(4)]
        assert allocator.reserved == 20 * MIB
        for block in (blocks[0], blocks[2], blocks[1], blocks[3]):
            allocator.give(block)
        allocator.take(20 * MIB, 0)
        assert allocator.reserved == 20 * MIB

    def test_cached_segments_go_back_before_the_limit_is_passed(self) -> None:
        allocator = CachingAllocator(AllocatorRules(limit=50 * MIB))
        allocator.give(allocator.take(30 * MIB, 0))
        allocator.take(40 * MIB, 0)
        assert (allocator.reserved, allocator.retries, allocator.missing) == (40 * MIB, 1, 0)
        allocator.take(20 * MIB, 0)
        assert allocator.missing == 10 * MIB

    def test_a_segment_in_use_does_not_go_back(self) -> None:
        allocator = CachingAllocator(AllocatorRules(limit=50 * MIB))
        first, second = allocator.take(15 * MIB, 0), allocator.take(3 * MIB, 0)
        allocator.give(first)
        allocator.release_cached()
        assert allocator.reserved == 20 * MIB
        allocator.give(second)
        allocator.release_cached()
        assert allocator.reserved == 0

    def test_expandable_segments_grow_instead_of_leaving_holes(self) -> None:
        sizes = [30 * MIB, 40 * MIB, 50 * MIB, 64 * MIB]
        reserved = []
        for rules in (CACHING, EXPANDABLE):
            allocator = CachingAllocator(rules)
            for size in sizes:
                allocator.give(allocator.take(size, 0))
            reserved.append(allocator.reserved)
        assert reserved == [sum(sizes), 80 * MIB]

    def test_expandable_segments_give_whole_pages_back(self) -> None:
        allocator = CachingAllocator(EXPANDABLE)
        first, second = allocator.take(50 * MIB, 0), allocator.take(50 * MIB, 0)
        allocator.give(first)
        allocator.release_cached()
        assert allocator.reserved == 60 * MIB  # pages 0 and 1 of five
        third = allocator.take(10 * MIB, 0)
        assert allocator.reserved == 60 * MIB
        for block in (second, third):
            allocator.give(block)
        allocator.release_cached()
        assert allocator.reserved == 0
        assert allocator.allocated == 0

    def test_without_caching_reserved_is_allocated(self) -> None:
        allocator = CachingAllocator(PLAIN)
        block = allocator.take(100, 0)
        assert (allocator.allocated, allocator.reserved) == (128, 128)
        allocator.give(block)
        assert allocator.reserved == 0


class _Range(NamedTuple):
    start: int
    end: int
    block: int  # -1: free


class NaiveAllocator:
    """The same rules on plain lists of ranges, searched from end to end."""

    def __init__(self) -> None:
        self.segments: dict[tuple[int, bool], list[list[_Range]]] = {}
        self.count = 0

    def take(self, size: int, stream: int) -> int:
        size = -(-size // 512) * 512
        small = size <= MIB
        pool = self.segments.setdefault((stream, small), [])
        free = [
            (r.end - r.start, n, r) for n, s in enumerate(pool) for r in s if r.block < 0 and r.end - r.start >= size
        ]
        if not free:
            length = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            pool.append([_Range(0, length, -1)])
            free = [(length, len(pool) - 1, pool[-1][0])]
        _, number, found = min(free, key=lambda one: (one[0], one[1], one[2].start))
        rest = found.end - found.start - size
        self.count += 1
        at = pool[number].index(found)
        if rest >= 512 if small else rest > MIB:
            middle = found.start + size
            pool[number][at : at + 1] = [_Range(found.start, middle, self.count), _Range(middle, found.end, -1)]
        else:
            pool[number][at] = found._replace(block=self.count)
        return self.count

    def give(self, block: int) -> None:
        for pool in self.segments.values():
            for segment in pool:
                for at, one in enumerate(segment):
                    if one.block == block:
                        segment[at] = one._replace(block=-1)
                joined: list[_Range] = []
                for one in segment:
                    if joined and joined[-1].block < 0 and one.block < 0:
                        joined[-1] = joined[-1]._replace(end=one.end)
                    else:
                        joined.append(one)
                segment[:] = joined

    @property
    def totals(self) -> tuple[int, int]:
        ranges = [one for pool in self.segments.values() for segment in pool for one in segment]
        return sum(r.end - r.start for r in ranges if r.block >= 0), sum(r.end - r.start for r in ranges)


@pytest.mark.parametrize("seed", range(30))
def test_the_allocator_does_what_its_rules_say(seed: int) -> None:
    draw = random.Random(seed)
    quick, naive = CachingAllocator(CACHING), NaiveAllocator()
    used: list[tuple[MemoryBlock, int]] = []
    for _ in range(150):
        if used and draw.random() < 0.45:
            block, number = used.pop(draw.randrange(len(used)))
            quick.give(block)
            naive.give(number)
        else:
            size = draw.choice([draw.randrange(1, 5000), draw.randrange(1, 3 * MIB), draw.randrange(1, 60 * MIB)])
            stream = draw.choice([0, 0, 0, 1])
            used.append((quick.take(size, stream), naive.take(size, stream)))
        assert (quick.allocated, quick.reserved) == naive.totals


@pytest.mark.parametrize("seed", range(20))
def test_expandable_segments_are_consistent_when_memory_is_short(seed: int) -> None:
    draw = random.Random(seed)
    allocator = CachingAllocator(AllocatorRules(expandable=True, limit=150 * MIB))
    used: list[MemoryBlock] = []
    for _ in range(300):
        if used and draw.random() < 0.5:
            allocator.give(used.pop(draw.randrange(len(used))))
        else:
            used.append(allocator.take(draw.choice([1000, 3 * MIB, draw.randrange(1, 30 * MIB)]), 0))
        assert allocator.allocated == sum(block.size for block in used)
        assert allocator.reserved >= allocator.allocated
        spans = sorted((block.address, block.address + block.size) for block in used)
        assert all(left[1] <= right[0] for left, right in pairwise(spans))
    for block in used:
        allocator.give(block)
    allocator.release_cached()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


REQUESTS = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([512, MIB, MIB + 1, 4 * MIB, 10 * MIB]), st.integers(1, 60 * MIB)),
        st.integers(0, 2),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=40,
)


@pytest.mark.tier("test")
@given(
    requests=REQUESTS,
    rules=st.sampled_from([CACHING, EXPANDABLE, PLAIN]),
    limit=st.one_of(st.none(), st.integers(MIB, 100 * MIB)),
)
@example([(4 * MIB, 0, 0), (4 * MIB, 0, 0), (30 * MIB, 0, 1)], CACHING, 40 * MIB)  # half a segment is free
def test_reserved_is_never_less_than_what_is_in_use(
    requests: list[tuple[int, int, int]], rules: AllocatorRules, limit: int | None
) -> None:
    """At no moment, whatever the limit: what is in use does not go back to the device.

    A request is its size, its stream, and how many of the oldest blocks are freed before it.
    """
    allocator = CachingAllocator(replace(rules, limit=limit))
    used: list[MemoryBlock] = []
    for size, stream, freed in requests:
        for block in used[:freed]:
            allocator.give(block)
        del used[:freed]
        used.append(allocator.take(size, stream))
        assert allocator.allocated == sum(block.size for block in used)
        assert allocator.peak_reserved >= allocator.reserved >= allocator.allocated
        if limit is not None and rules.caching:
            assert allocator.missing >= allocator.reserved - limit
        if rules is CACHING:  # all of it is there: what is in use, and what is free
            pieces = [each for each in allocator.state(lambda block: "used") if each != "segment"]
            sizes = {kind: sum(size for size, of in pieces if of == kind) for kind in ("used", "free")}
            assert sizes["used"] == allocator.allocated
            assert sum(sizes.values()) == allocator.reserved
    for block in used:
        allocator.give(block)
    allocator.release_cached()
    assert allocator.reserved == allocator.allocated == 0


# -- programs ---------------------------------------------------------------------------------------------------------

FORWARD, BACKWARD, OPTIMIZER = ("forward", 0, "steady"), ("backward", 0, "steady"), ("optimizer", -1, "only")


def program(
    forward: list[Event], backward: list[Event], optimizer: Sequence[Event] = (), batches: int = 1, ahead: int = 1
) -> Program:
    made = Program(0, 4, 4, places=[Place("forward", 3, "layers.3.mlp"), Place("backward", 3, "layers.3.mlp", True)])
    for key, events in ((FORWARD, forward), (BACKWARD, backward), (OPTIMIZER, optimizer)):
        made.segments[key] = Segment(*key, list(events))
    made.order = [(FORWARD, batch) for batch in range(min(ahead, batches))]
    for batch in range(batches):
        made.order.append((BACKWARD, batch))
        if batch + ahead < batches:
            made.order.append((FORWARD, batch + ahead))
    made.order.append((OPTIMIZER, -1))
    made.categories = {1: "activations", 2: "gradients", 3: "optimizer", 4: "workspace"}
    return made


def op(place: int) -> Op:
    return Op("aten.mm", "matmul", 1, (), (), "bfloat16", (), 0, place)


class TestReplay:
    def test_each_micro_batch_has_its_own_activations(self) -> None:
        made = program([Alloc(1, 30 * MIB, 0)], [Free(1)], batches=6, ahead=3)
        found = replay_memory(made)
        assert found.peak_allocated == 90 * MIB
        assert found.persistent == 0
        assert found.unmatched == 0

    def test_gradients_exist_once(self) -> None:
        made = program([Alloc(1, 30 * MIB, 0)], [Alloc(2, 10 * MIB, 0), Free(1)], [Free(2)], batches=4)
        found = replay_memory(made)
        assert found.by_category == {"activations": 30 * MIB, "gradients": 10 * MIB}

    def test_optimizer_state_is_taken_in_the_first_step_and_stays(self) -> None:
        made = program([Alloc(1, 30 * MIB, 0)], [Free(1)], [Alloc(3, 80 * MIB, 0)])
        found = replay_memory(made)
        assert found.first_allocated == 80 * MIB
        assert found.peak_allocated == 110 * MIB
        assert found.persistent == 80 * MIB

    def test_what_is_built_is_there_before_the_first_step(self) -> None:
        made = program([Alloc(1, 30 * MIB, 0)], [Free(1)])
        made.segments["build", -1, "only"] = Segment("build", -1, "only", [Alloc(9, 7 * MIB, 0)])
        made.categories[9] = "parameters"
        found = replay_memory(made)
        assert found.by_category == {"activations": 30 * MIB, "parameters": 7 * MIB}
        assert found.curve[0].totals[found.categories.index("parameters")] == 7 * MIB

    def test_each_thread_and_stream_with_products_has_a_workspace(self) -> None:
        beside = op(1)._replace(stream=7)
        made = program([op(0), op(0), Alloc(1, 30 * MIB, 0)], [op(1), beside, Free(1)], batches=3)
        plain, found = replay_memory(made), replay_memory(with_workspaces(made, 32 * MIB))
        assert found.by_category == {"workspace": 96 * MIB, "activations": 30 * MIB}
        assert (found.persistent, found.peak_reserved - plain.peak_reserved) == (96 * MIB, 96 * MIB)
        assert with_workspaces(made, 0) is made
        no_products = program([Alloc(1, 30 * MIB, 0)], [op(1)._replace(kind="memory"), Free(1)])
        assert with_workspaces(no_products, 32 * MIB) is no_products

    def test_the_peak_is_told_in_words(self) -> None:
        forward = [op(0), Alloc(1, 30 * MIB, 0)]
        backward = [Alloc(4, 5 * MIB, 0), op(1), Free(4), Free(1)]
        assert replay_memory(program(forward, backward)).at == "backward of layers.3.mlp (recomputed)"
        found = replay_memory(program(forward, backward, batches=4, ahead=2))
        assert found.at == "backward of layers.3.mlp (recomputed) of micro-batch 0"

    def test_what_blocks_are_too_large_is_a_category(self) -> None:
        forward = [Alloc(4, 12 * MIB, 0), Free(4), Alloc(1, 11 * MIB, 0)]
        found = replay_memory(program(forward, [Free(1)]))
        assert found.peak_allocated == 12 * MIB
        forward = [Alloc(4, 12 * MIB, 0), Free(4), Alloc(1, 11 * MIB, 0), Alloc(5, 30 * MIB, 0), Free(5)]
        found = replay_memory(program(forward, [Free(1)]))
        assert found.by_category[ROUNDING] == MIB
        assert sum(found.by_category.values()) == found.peak_allocated

    def test_fragments_are_reserved_beyond_what_is_allocated(self) -> None:
        found = replay_memory(program([Alloc(1, 3 * MIB, 0)], [Free(1)]))
        assert (found.peak_reserved, found.peak_allocated) == (20 * MIB, 3 * MIB)
        plain = replay_memory(program([Alloc(1, 3 * MIB, 0)], [Free(1)]), rules=None)
        assert plain.peak_reserved == plain.peak_allocated

    def test_blocks_without_bytes_are_nothing(self) -> None:
        found = replay_memory(program([Alloc(1, 0, 0)], [Free(1)]))
        assert (found.peak_allocated, found.unmatched) == (0, 0)

    def test_giving_back_what_is_not_there_is_counted(self) -> None:
        assert replay_memory(program([Free(1)], [])).unmatched == 1

    def test_what_is_on_the_host_takes_none_of_the_device(self) -> None:
        made = program([Alloc(1, 3 * MIB, 0)], [Free(1), Alloc(2, 5 * MIB, 0)], [Alloc(3, 7 * MIB, 0), Free(2)])
        everything = replay_memory(made)
        assert everything.on_host == {}
        made.on_host = frozenset({2, 3})
        found = replay_memory(made)
        assert found.on_host == {"optimizer": 7 * MIB, "gradients": 5 * MIB}
        assert found.host_bytes == 12 * MIB
        assert found.by_category == {"activations": 3 * MIB}
        assert everything.peak_allocated == 12 * MIB
        assert predict._read(json.loads(json.dumps(predict._as_data(made)))) == made

    def test_the_curve_has_the_peak(self) -> None:
        made = program([Alloc(1, 30 * MIB, 0)], [Alloc(4, 8 * MIB, 0), Free(4), Free(1)], batches=5, ahead=2)
        found = replay_memory(made)
        assert max(sum(point.totals) for point in found.curve) == found.peak_allocated
        assert [point.position for point in found.curve] == sorted(point.position for point in found.curve)


def drawn(seed: int) -> Program:
    """Stages with drawn blocks, in a long 1F1B order."""
    draw = random.Random(seed)
    block = 10
    forward: list[Event] = []
    backward: list[Event] = []
    kept: list[int] = []
    for _ in range(draw.randrange(5, 30)):
        block += 1
        size = draw.choice([300, 70_000, MIB, 3 * MIB, 8 * MIB + 5, 33 * MIB])
        forward.append(Alloc(block, size, draw.choice([0, 0, 1])))
        if draw.random() < 0.5:
            kept.append(block)
        else:
            forward.append(Free(block))
    for saved in reversed(kept):
        block += 1
        backward += [Alloc(block, draw.choice([500, 5 * MIB, 12 * MIB]), 0), Free(saved), Free(block)]
    backward.insert(draw.randrange(len(backward) + 1), Alloc(2, 40 * MIB, 0))
    return program(forward, backward, [Alloc(3, 80 * MIB, 0), Free(2)], batches=60, ahead=draw.randrange(1, 6))


def _same(left: ClassMemory, right: ClassMemory) -> None:
    for name in ("peak_allocated", "peak_reserved", "at", "by_category", "first_allocated", "first_reserved"):
        assert getattr(left, name) == getattr(right, name), name
    assert (left.persistent, left.retries, left.missing) == (right.persistent, right.retries, right.missing)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("rules", [CACHING, EXPANDABLE], ids=["caching", "expandable"])
def test_leaving_out_repetitions_changes_nothing(seed: int, rules: AllocatorRules) -> None:
    whole = replay_memory(drawn(seed), rules, cut=False)
    short = replay_memory(drawn(seed), rules)
    _same(short, whole)
    assert whole.skipped == 0
    assert short.curve[-1].totals == whole.curve[-1].totals


def test_most_of_a_long_schedule_is_left_out() -> None:
    made = program([Alloc(1, 30 * MIB, 0)], [Alloc(4, 8 * MIB, 0), Free(4), Free(1)], batches=500, ahead=4)
    assert replay_memory(made).skipped > 0.9 * replay_memory(made).blocks


@pytest.mark.parametrize("seed", range(10))
def test_when_memory_is_short_repetitions_are_left_out_as_well(seed: int) -> None:
    limit = int(0.97 * replay_memory(drawn(seed)).peak_reserved)
    rules = AllocatorRules(limit=limit)
    _same(replay_memory(drawn(seed), rules), replay_memory(drawn(seed), rules, cut=False))


@pytest.mark.parametrize("part", [0.5, 0.8, 0.97, None], ids=str)
@pytest.mark.parametrize("rules", [CACHING, EXPANDABLE, PLAIN], ids=["caching", "expandable", "plain"])
def test_at_least_what_is_in_use_is_reserved(rules: AllocatorRules, part: float | None) -> None:
    for seed in range(5):
        made = drawn(seed)
        # Large blocks that come and go within a segment, and one that is taken after them: cached memory goes back.
        made.segments[BACKWARD].events += [Alloc(4, 400 * MIB, 0), Free(4), Alloc(5, 401 * MIB, 1), Free(5)]
        limit = None if part is None else int(part * replay_memory(made, rules).peak_allocated)
        found = replay_memory(made, replace(rules, limit=limit))
        assert found.peak_reserved >= found.peak_allocated
        assert found.first_reserved >= found.first_allocated
        assert all(point.reserved >= sum(point.totals) for point in found.curve)
        if rules is PLAIN:
            assert found.peak_reserved == found.peak_allocated


def test_a_pattern_needs_three_repetitions() -> None:
    assert find_pattern([(FORWARD, 0), (BACKWARD, 0), (FORWARD, 1), (BACKWARD, 1)]) is None
    found = find_pattern([(key, batch) for batch in range(3) for key in (FORWARD, BACKWARD)])
    assert found is not None
    assert (found.start, found.end, found.length, found.shift) == (0, 6, 2, 1)


# -- what blocks are for -----------------------------------------------------------------------------------------------

SMALL = LlamaConfig(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.mark.tier("test", each=3)
@pytest.mark.parametrize("seq_len", [32, 64])
@pytest.mark.parametrize("tp", [1, 2])
def test_logits_and_gradients_of_as_many_bytes_are_told_apart(tp: int, seq_len: int) -> None:
    """A micro-batch has 64 or 128 tokens: gradients of head and embedding take a width of 64, in bf16 and in fp32."""
    dims, recipe = ParallelDims(tp=tp, world_size=tp), Recipe().having(accumulate=2)
    (program,) = trace(Job(find_model(SMALL), dims, batch=4, seq_len=seq_len, recipe=recipe))
    events = [(key, e) for key, segment in program.segments.items() for e in segment.events]
    freed = {e.block: key for key, e in events if isinstance(e, Free)}
    found: dict[str, Counter[tuple[str, str, int]]] = defaultdict(Counter)
    for (name, _, variant), e in events:
        if isinstance(e, Alloc) and name != "build" and variant == "first":
            name_after, _, variant_after = freed[e.block]
            after = name_after if variant_after == variant else "next micro-batch"
            found[program.categories[e.block]][name, after, e.bytes] += 1
    elements = 2 * seq_len * 320 // tp
    assert found["logits"] == {
        ("forward", "backward", 2 * elements): 1,
        ("forward", "forward", 4 * elements): 1,
        ("backward", "backward", 4 * elements): 1,
        ("backward", "backward", 2 * elements): 1,
    }
    weights = sum(weight.numel() for weight in Llama(SMALL).parameters())
    norms = 5 * 64  # which tp does not split
    waiting = sum(size * count for (_, after, size), count in found["gradients"].items() if after == "next micro-batch")
    assert waiting == 4 * ((weights - norms) // tp + norms), "in fp32, for the second micro-batch to be added to"
