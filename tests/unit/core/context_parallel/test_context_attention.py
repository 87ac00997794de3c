"""The parts of attention over ranks: blocks with and without a kernel, what is sent and when, autocast, compile."""

from __future__ import annotations

import copy
import itertools
import math
import random
import weakref
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import sim
from hyper_parallel.core.context_parallel import (
    ContextParallel,
    SequenceSplit,
    attention,
    attention_traffic,
    context_parallel,
)
from hyper_parallel.core.context_parallel.attention import AttentionBlock, Joined, Ring, RingShift, TokenSum, triangle
from hyper_parallel.models import Llama, LlamaConfig
from hyper_parallel.platform.attention import HostAttention

pytestmark = pytest.mark.sim

BATCH, HEADS, KV_HEADS, SEQ, HEAD_DIM = 2, 4, 2, 16, 8


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (normal(BATCH, number, SEQ, HEAD_DIM, seed=seed, dtype=dtype) for seed, number in enumerate(heads))
    return q, k, v


def cp_of(degree: int | None = None, balance: bool = True) -> ContextParallel:
    return ContextParallel(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)), degree, balance)


# -- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows_at_a_time", [1, 3, SEQ])
def test_products_and_kernel_agree(monkeypatch: pytest.MonkeyPatch, causal: bool, rows_at_a_time: int) -> None:
    monkeypatch.setattr(attention, "MAX_SCORES", rows_at_a_time * BATCH * HEADS * SEQ)
    block = AttentionBlock(*qkv(), causal, 0.3)
    assert attention.fused(block.q, block.k, block.v, causal, 0.3) is not None
    out, lse = block.forward()
    grads = block.backward(normal(*block.q.shape, seed=5), out, lse)
    with monkeypatch.context() as patched:
        patched.setattr(attention, "fused", lambda *_: None)
        by_hand = block.forward()
        grads_by_hand = block.backward(normal(*block.q.shape, seed=5), out, lse)
    for found, expected in zip((*by_hand, *grads_by_hand), (out, lse, *grads), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_few_rows_at_a_time_bound_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_SCORES", 2 * BATCH * HEADS * SEQ)
    block = AttentionBlock(*qkv(), False, 1.0, (torch.zeros(BATCH, SEQ), torch.zeros(BATCH, SEQ)))
    sizes = [scores.numel() for _, scores, _ in block._scores()]
    assert sizes == [attention.MAX_SCORES] * (SEQ // 2)


def test_a_query_that_sees_nothing_gets_zeros_and_changes_nothing() -> None:
    q, k, v = qkv()
    ids = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    out, lse = AttentionBlock(q, k, v, False, 1.0, (ids, ids + 1)).forward()
    assert torch.equal(out, torch.zeros_like(q))
    assert (lse == -torch.inf).all()
    joined = Joined(*AttentionBlock(q, k, v, True, 1.0).forward())
    before = joined.out.clone()
    joined.add(out, lse, slice(None))
    assert torch.equal(joined.out, before)


def test_keys_in_two_blocks_are_one_softmax() -> None:
    q, k, v = qkv()
    joined = Joined(*AttentionBlock(q, k[:, :, :5], v[:, :, :5], False, 0.5).forward())
    joined.add(*AttentionBlock(q, k[:, :, 5:], v[:, :, 5:], False, 0.5).forward(), slice(None))
    out, lse = AttentionBlock(q, k, v, False, 0.5).forward()
    torch.testing.assert_close(joined.out, out)
    torch.testing.assert_close(joined.lse, lse)


@pytest.mark.parametrize("later", [False, True])
def test_a_nan_stays(later: bool) -> None:
    q, k, v = (x[:, :2] for x in qkv())
    k[..., SEQ // 2 * later, 0] = torch.nan
    found = Joined.none(q)
    for keys, values in zip(k.chunk(2, dim=2), v.chunk(2, dim=2), strict=True):
        found.add(*AttentionBlock(q, keys, values, False, 1.0).forward(), slice(None))
    assert found.out.isnan().all()


@pytest.mark.parametrize("seed", range(20))
def test_a_sum_of_parts_wherever_they_lie(seed: int) -> None:
    """The first part of a token is copied over what was in memory, later ones are added; others' tokens stay zero."""
    draw = random.Random(seed)
    like, begun = torch.full((1, 1, 9, 2), 7.0, dtype=torch.float64), draw.random() < 0.3
    into = like.clone() if begun or draw.random() < 0.5 else None
    found, expected = TokenSum(like, into, begun=begun), like.clone() if begun else torch.zeros_like(like)
    for number in range(draw.randint(0, 4)):
        start = draw.randint(0, 8)
        where = draw.choice([slice(start, draw.randint(start + 1, 9)), slice(None)])
        part = torch.full_like(expected[:, :, where], number + 1)
        expected[:, :, where] += part
        found.add(part, where)
    assert torch.equal(found.result(), expected)


def test_a_part_of_all_tokens_becomes_the_sum() -> None:
    part = torch.ones(1, 1, 4, 2)
    found = TokenSum(part)
    found.add(part, slice(None))
    assert found.result() is part


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_queries_that_no_block_has_get_zeros(order: tuple[int, int]) -> None:
    q, k, v = qkv()
    blocks = [(AttentionBlock(q[:, :, rows], k, v, False, 1.0).forward(), rows) for rows in (slice(0, 5), slice(2, 7))]
    found = Joined.none(q)
    found.out.fill_(torch.nan)
    for number in order:
        (out, lse), rows = blocks[number]
        found.add(out, lse, rows)
    found.finish()
    out, lse = AttentionBlock(q, k, v, False, 1.0).forward()
    torch.testing.assert_close(found.out[:, :, :7], out[:, :, :7])
    assert (found.out[:, :, 7:] == 0).all()
    assert (found.lse[:, :, 7:] == -torch.inf).all()
    twice = torch.full_like(lse[:, :, 2:5], math.log(2))  # the same keys once more
    torch.testing.assert_close(found.lse[:, :, 2:5], lse[:, :, 2:5] + twice)


def test_what_is_transposed_before_attention_is_transposed_back_without_a_copy() -> None:
    def body() -> bool:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv())
        return cp_of(1).attend(q, k, v).transpose(1, 2).is_contiguous()

    assert all(sim.run(body, 2))


def test_a_block_is_let_go_once_it_has_left() -> None:
    """Before memory is taken for the next one: no rank holds more than two."""

    class Counts(Ring):
        def send(self, x: torch.Tensor) -> RingShift:
            alive.setdefault(self.rank, []).append(sum(each() is not None for each in seen[self.rank]))
            return super().send(x)

    def body() -> None:
        ranks = tuple(range(dist.get_world_size()))
        ring = Counts(dist.group.WORLD, ranks, dist.get_rank(), SequenceSplit(len(ranks)))
        for _, x in ring.travel(torch.full((3,), float(ring.rank))):
            seen[ring.rank].append(weakref.ref(x))
            del x

    seen: dict[int, list[Any]] = defaultdict(list)
    alive: dict[int, list[int]] = {}
    sim.run(body, 4)
    assert [alive[rank] for rank in range(4)] == [[0, 0, 0]] * 4, "of those before the one that is sent"


def test_a_triangle_in_blocks_is_what_tokens_see() -> None:
    for tokens, limit in itertools.product((1, 2, 7, 12, 33), (1, 2, 3, 5, 8, 40)):
        seen = torch.zeros(tokens, tokens, dtype=torch.int)
        for rows, columns, causal in triangle(0, tokens, limit):
            assert not causal or (rows == columns and rows.stop - rows.start <= limit)
            block = torch.ones_like(seen[rows, columns])
            seen[rows, columns] += block.tril() if causal else block
        assert seen.equal(torch.ones_like(seen).tril())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_ring_of_small_causal_blocks_is_one_attention(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    monkeypatch.setattr(HostAttention, "most_causal", 3)
    q, k, v = (x.requires_grad_() for x in qkv())
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(expected, (q, k, v), normal(*expected.shape, seed=7))

    def body() -> None:
        cp = cp_of(1)
        own = [cp.split(x.detach(), dim=2).requires_grad_() for x in (q, k, v)]
        out = cp.attend(*own)
        torch.testing.assert_close(out, cp.split(expected.detach(), dim=2), rtol=1e-12, atol=1e-12)
        out.backward(cp.split(normal(*expected.shape, seed=7), dim=2))
        for x, grad in zip(own, grads, strict=True):
            torch.testing.assert_close(x.grad, cp.split(grad, dim=2), rtol=1e-12, atol=1e-12)

    sim.run(body, ranks)


@pytest.mark.parametrize(
    "documents", [None, torch.zeros(BATCH, SEQ // 2, dtype=torch.int64)], ids=["kernel", "products"]
)
def test_large_scores_do_not_overflow(documents: torch.Tensor | None) -> None:
    q, k, v = (x * 1e3 for x in qkv(torch.float32))

    def body() -> torch.Tensor:
        cp = cp_of(1)
        return cp.attend(*(cp.split(x, dim=2) for x in (q, k, v)), documents=documents)

    full = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True)
    for rank, found in enumerate(sim.run(body, world_size=2)):
        held = torch.cat([torch.arange(*ends) for ends in SequenceSplit(2).intervals(rank, SEQ)])
        torch.testing.assert_close(found, full[:, :, held].float(), rtol=1e-2, atol=1.0)  # of values around 1e3


# -- what is sent, and when ------------------------------------------------------------------------------------------


def traced(world_size: int, degree: int, dtype: torch.dtype, *, backward: bool, documents: bool = False) -> sim.Trace:
    def body() -> None:
        cp = cp_of(degree)
        q, k, v = (cp.split(x, dim=2).requires_grad_() for x in qkv(dtype))
        ids = torch.zeros(BATCH, SEQ // world_size, dtype=torch.int32) if documents else None
        out = cp.attend(q, k, v, documents=ids)
        if backward:
            out.sum().backward()

    with sim.world(world_size) as world:
        world.run(body)
        return world.trace


def test_a_ring_sends_keys_and_values_once_less_than_it_has_ranks() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for ranks in (2, 4):
            keys_and_values = 2 * BATCH * KV_HEADS * (SEQ // ranks) * HEAD_DIM
            forward = (ranks - 1) * keys_and_values * dtype.itemsize
            trace = traced(ranks, 1, dtype, backward=False)
            assert [trace.bytes(op="recv", rank=rank) for rank in range(ranks)] == [forward] * ranks
            trace = traced(ranks, 1, dtype, backward=True)
            gradients = (ranks - 1) * keys_and_values * 4
            assert [trace.bytes(op="recv", rank=rank) for rank in range(ranks)] == [2 * forward + gradients] * ranks
            assert trace.bytes(op="all_to_all") == 0
            neighbours = {(event.rank, event.peer) for event in trace.events if event.op == "send"}
            assert neighbours == {(rank, (rank + 1) % ranks) for rank in range(ranks)}


def test_ulysses_sends_all_but_what_stays() -> None:
    ranks = 4
    heads = HEADS + 2 * 4  # of queries; of keys and values, repeated until the four ranks can share them
    token_bytes = BATCH * (SEQ // ranks) * HEAD_DIM * 4
    forward = token_bytes * (heads + HEADS) * (ranks - 1) // ranks
    trace = traced(ranks, ranks, torch.float32, backward=False)
    assert [trace.bytes(op="all_to_all", rank=rank) for rank in range(ranks)] == [forward] * ranks
    assert [event.op for event in trace.of_rank(0) if event.recv_bytes] == ["all_to_all"] * 2
    trace = traced(ranks, ranks, torch.float32, backward=True)
    assert [trace.bytes(op="all_to_all", rank=rank) for rank in range(ranks)] == [2 * forward] * ranks
    assert trace.bytes(op="recv") == 0


def test_both_send_what_each_sends() -> None:
    trace = traced(4, 2, torch.float32, backward=False)
    token_bytes = BATCH * HEAD_DIM * 4
    exchanged = token_bytes * (SEQ // 4) * (HEADS + 2 * KV_HEADS + HEADS) // 2
    around = token_bytes * (SEQ // 2) * (2 * KV_HEADS // 2)
    for rank in range(4):
        assert trace.bytes(op="all_to_all", rank=rank) == exchanged
        assert trace.bytes(op="recv", rank=rank) == around
    assert {event.members for event in trace.events if event.op == "all_to_all"} == {(0, 1), (2, 3)}
    assert {event.members for event in trace.events if event.op == "send"} == {(0, 2), (1, 3)}


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (2, 1), (1, 2), (3, 1), (1, 4), (2, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (4, 1), (12, 3)])
def test_the_traffic_is_what_the_cost_says(
    ring: int, ulysses: int, dtype: torch.dtype, heads: int, kv_heads: int
) -> None:
    split = SequenceSplit(ring, ulysses)
    seq = 2 * split.multiple

    def body() -> None:
        cp = cp_of(ulysses)
        full = (normal(1, number, seq, 5, dtype=dtype) for number in (heads, kv_heads, kv_heads))
        q, k, v = (cp.split(x, dim=2).requires_grad_() for x in full)
        cp.attend(q, k, v).sum().backward()

    with sim.world(split.size) as world:
        world.run(body)
    cost = attention_traffic(
        split, seq=seq, heads=heads, kv_heads=kv_heads, head_dim=5, batch=1, itemsize=dtype.itemsize
    )
    for rank in range(split.size):
        assert world.trace.bytes(op="all_to_all", rank=rank) == 2 * cost.exchanged
        assert world.trace.bytes(op="recv", rank=rank) == cost.around + cost.around_backward
        assert world.trace.bytes(rank=rank) == cost.total


def test_documents_cost_one_all_gather_of_ids() -> None:
    trace = traced(4, 2, torch.float32, backward=True, documents=True)
    assert trace.bytes(op="all_gather", rank=0) == 3 * BATCH * (SEQ // 4) * 4


def test_one_rank_communicates_nothing_and_computes_what_torch_does() -> None:
    def body() -> None:
        found, expected = qkv(torch.bfloat16), qkv(torch.bfloat16)
        assert torch.equal(
            cp_of().attend(*found), F.scaled_dot_product_attention(*expected, is_causal=True, enable_gqa=True)
        )

    with sim.world(1) as world:
        world.run(body)
        assert not world.trace.events


def test_keys_are_on_their_way_before_they_are_used() -> None:
    def body() -> tuple[list[int], list[int]]:
        ranks = tuple(range(dist.get_world_size()))
        ring = Ring(dist.group.WORLD, ranks, dist.get_rank(), SequenceSplit(len(ranks)))
        sent, sources = [], []
        for source, x in ring.travel(torch.full((3,), float(ring.rank))):
            assert x.tolist() == [source] * 3
            sources.append(source)
            sent.append(sum(event.op == "send" for event in world.trace.of_rank(ring.rank)))
        return sources, sent

    with sim.world(4) as world:
        found = world.run(body)
    for rank, (sources, sent) in enumerate(found):
        assert sources == [(rank - step) % 4 for step in range(4)], "the own first, then those before"
        assert sent == [1, 2, 3, 3], "each has been sent on when it is used, but for the last"


@pytest.mark.parametrize("degree", [1, 2, 4])
@sim.ranks(4, backends=("sim",), check_races=True)
def test_no_buffer_is_touched_while_it_travels(ctx, degree: int) -> None:
    cp = cp_of(degree)
    q, k, v = (cp.split(x, dim=2).requires_grad_() for x in qkv())
    cp.attend(q, k, v, documents=torch.zeros(BATCH, SEQ // 4, dtype=torch.int64)).sum().backward()
    cp.attend(q, k, v).sum().backward()


@pytest.mark.tier("test")
def test_any_interleaving_gives_the_same_bits() -> None:
    def body() -> list[torch.Tensor]:
        cp = cp_of(2)
        q, k, v = (cp.split(x, dim=2).requires_grad_() for x in qkv(torch.float32))
        out = cp.attend(q, k, v)
        out.square().sum().backward()
        return [out.detach(), q.grad, k.grad, v.grad]

    first = sim.run(body, world_size=8, seed=0)
    for seed in (1, 2):
        for mine, others in zip(first, sim.run(body, world_size=8, seed=seed), strict=True):
            assert all(torch.equal(*pair) for pair in zip(mine, others, strict=True))


# -- with the rest of torch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [1, 2])
@sim.ranks(2, backends=("sim",))
def test_autocast_casts_as_torch_does(ctx, degree: int) -> None:
    cp = cp_of(degree)
    q, k, v = (cp.split(x, dim=2).requires_grad_() for x in qkv(torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        out = cp.attend(q, k.bfloat16(), v, documents=torch.zeros(BATCH, SEQ // 2, dtype=torch.int64))
        out.sum().backward()
    low = [x.bfloat16() for x in (q, k, v)]
    expected = cp.attend(*low, documents=torch.zeros(BATCH, SEQ // 2, dtype=torch.int64))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected), "sums must be kept in float32 under autocast too"
    assert q.grad.dtype == k.grad.dtype == torch.float32


def test_sums_are_kept_in_float32() -> None:
    """Rounding of each block's output to bfloat16 apart, more blocks are no less precise."""
    full = F.scaled_dot_product_attention(*(x.double() for x in qkv(torch.bfloat16)), is_causal=True, enable_gqa=True)

    def body() -> float:
        cp = cp_of(1)
        ids = torch.zeros(BATCH, SEQ // 8, dtype=torch.int64)
        found = cp.attend(*(cp.split(x, dim=2) for x in qkv(torch.bfloat16)), documents=ids)
        return (found.double() - cp.split(full, dim=2)).abs().div(cp.split(full, dim=2).abs()).max().item()

    assert max(sim.run(body, world_size=8)) <= torch.finfo(torch.bfloat16).eps / 2 * 1.01, "one rounding, at the end"


@sim.ranks(2, backends=("sim",))
def test_a_copied_model_uses_the_same_groups(ctx) -> None:
    model = Llama.build(LlamaConfig(num_hidden_layers=1, max_seq_len=16))
    cp = context_parallel(model, init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    tokens = cp.split(torch.arange(16).unsqueeze(0))
    assert torch.equal(copy.deepcopy(model)(tokens), model(tokens))
    assert repr(cp) == f"ContextParallel(cp=2, ulysses_degree=2, rank={dist.get_rank()})"


@pytest.mark.tier("test")
def test_attention_between_compiled_graphs(tmp_path) -> None:
    """torch.compile runs it as it is; positions are traced."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        cp = cp_of()

        def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return cp.attend(q * 2, k, v) * cp.positions(q.shape[2])[:, None]

        torch._dynamo.reset()
        assert torch.equal(torch.compile(function, backend="eager")(*qkv()), function(*qkv()))
    finally:
        torch._dynamo.reset()
        dist.destroy_process_group()


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_adding_to_some_tokens_takes_a_view_and_an_addition():
    total, part = TokenSum(torch.zeros(1, 1, 8, 2), torch.zeros(1, 1, 8, 2), begun=True), torch.ones(1, 1, 8, 2)
    some = part[:, :, 4:]
    with Counted() as counted:
        total.add(part, slice(0, 8))
        total.add(some, slice(4, 8))
    assert counted.names == ["add_", "slice", "add_"]
    assert total.result().sum() == 4 * 2 + 8 * 2
