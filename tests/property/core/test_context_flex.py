"""FlexAttention over any number of ranks is that of one device: output and gradients, for any mask and score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from attention_kit import blocks_by
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention, noop_mask

import sim
from hyper_parallel.core.context_parallel import ContextParallel, SequenceSplit
from hyper_parallel.core.context_parallel.flex import BlockStates
from sim.late.switch import why_not

pytestmark = [pytest.mark.sim, pytest.mark.filterwarnings("ignore:flex_attention called without")]

DOCUMENTS = torch.randint(0, 3, (2, 64), generator=torch.Generator().manual_seed(1))
MASKS: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "causal": lambda b, h, q, kv: q >= kv,
    "window": lambda b, h, q, kv: (q >= kv) & (q - kv < 5),
    "around": lambda b, h, q, kv: (q - kv).abs() <= 3,
    "documents": lambda b, h, q, kv: (q >= kv) & (DOCUMENTS.to(q.device)[b, q] == DOCUMENTS.to(q.device)[b, kv]),
    "heads": lambda b, h, q, kv: (q >= kv) & (q - kv <= 2 * h),
    "late": lambda b, h, q, kv: kv > q + 2,  # of which the last queries see nothing
}
SCORES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "alibi": lambda score, b, h, q, kv: score - 0.1 * (h + 1) * (q - kv).abs(),
    "capped": lambda score, b, h, q, kv: 2 * torch.tanh(score / 2),
    "masked": lambda score, b, h, q, kv: torch.where((q + kv) % 3 == b, score * 2, -torch.inf),
    "constant": lambda score, b, h, q, kv: 0.01 * (q - kv).to(score.dtype),
}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 6e-2}


class Case(NamedTuple):
    split: SequenceSplit
    heads: tuple[int, int]
    tokens: int
    mask: str
    score: str
    tile: int
    whole: bool  # a mask for each of batch and heads, not one for all where that is enough
    dtype: torch.dtype
    kernel: str = "host"

    @property
    def seq(self) -> int:
        return self.tokens * self.split.multiple


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Shrinks towards one rank, and attention without a mask."""
    ring, ulysses = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (4, 1), (2, 4)]))
    split = SequenceSplit(ring, ulysses, draw(st.booleans()))
    return Case(
        split,
        draw(st.sampled_from([(ulysses, 1), (2 * ulysses, 2), (2 * ulysses, 2 * ulysses)])),
        draw(st.integers(1, max(1, 24 // split.multiple))),
        draw(st.sampled_from(sorted(MASKS))),
        draw(st.sampled_from(sorted(SCORES))),
        draw(st.sampled_from([4, 8, 128])),
        draw(st.booleans()),
        draw(st.sampled_from(list(TOLERANCE))),
        draw(st.sampled_from(["host", "products"])),
    )


def tensors(case: Case) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(case.seq)
    numbers = (case.heads[0], case.heads[1], case.heads[1], case.heads[0])
    return [torch.randn(2, number, case.seq, 4, generator=generator).to(case.dtype) for number in numbers]


def mask_of(case: Case, device: str = "cpu") -> BlockMask | None:
    function = MASKS[case.mask]
    if function is None:
        return None
    batch = 2 if case.whole or case.mask == "documents" else None
    heads = case.heads[0] if case.whole or case.mask == "heads" else None
    return create_block_mask(function, batch, heads, case.seq, case.seq, device=device, BLOCK_SIZE=case.tile)


def alone(case: Case) -> list[torch.Tensor]:
    """The formulas, in float64: the output, and gradients by autograd."""
    q, k, v, grad = (x.double().requires_grad_() for x in tensors(case))
    each = case.heads[0] // case.heads[1]
    scores = q @ k.repeat_interleave(each, dim=1).mT / 2
    score, mask = SCORES[case.score], MASKS[case.mask]
    if score is not None:
        b, h, i, j = torch.meshgrid(*(torch.arange(size) for size in scores.shape), indexing="ij")
        scores = score(scores, b, h, i, j)
    seen = create_mask(mask or noop_mask, 2, case.heads[0], case.seq, case.seq, device="cpu")
    scores = scores.masked_fill(~seen, -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    out = weights @ v.repeat_interleave(each, dim=1)
    grads = torch.autograd.grad(out, (q, k, v), grad, materialize_grads=True)
    return [out.detach(), *grads]


def parts(case: Case, device: str) -> list[torch.Tensor]:
    """Compute on the calling rank: its tokens of the output and of the gradients."""
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    cp = ContextParallel(mesh, case.split.ulysses, case.split.balance)
    q, k, v, grad = (cp.split(x.to(device), dim=2).requires_grad_() for x in tensors(case))
    mask = mask_of(case)
    mask = None if mask is None else mask.to(device)
    out = cp.flex_attention(q, k, v, SCORES[case.score], mask, enable_gqa=True)
    out.backward(grad)
    return [x.detach().cpu() for x in (out, q.grad, k.grad, v.grad)]


def check(case: Case, device: str = "cpu") -> None:
    with blocks_by(case.kernel):
        found = sim.run(parts, case.split.size, (case, device), device=None if device == "cpu" else device)
    for rank, of_rank in enumerate(found):
        held = torch.cat([torch.arange(*ends) for ends in case.split.intervals(rank, case.seq)])
        for name, mine, full in zip(("out", "q", "k", "v"), of_rank, alone(case), strict=True):
            assert mine.dtype == case.dtype
            bound = TOLERANCE[case.dtype]
            torch.testing.assert_close(
                mine.double(), full[:, :, held], rtol=bound, atol=bound * max(1.0, full.abs().max().item()), msg=name
            )


@settings(max_examples=max(1, round(0.3 * settings.default.max_examples)))
@given(cases())
@example(Case(SequenceSplit(2), (2, 1), 8, "late", "none", 4, False, torch.float64))
@example(Case(SequenceSplit(2, 2), (4, 2), 3, "heads", "alibi", 128, False, torch.float64))
@example(Case(SequenceSplit(4), (2, 2), 5, "causal", "none", 2, True, torch.bfloat16, "flash"))
@example(Case(SequenceSplit(1, 2), (2, 2), 9, "documents", "masked", 4, False, torch.float32))
def test_flex_attention_over_ranks_is_that_of_one_device(case: Case) -> None:
    check(case)


@pytest.mark.tier("test", each=2)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(("mask", "score"), [("window", "none"), ("documents", "capped"), ("none", "alibi")])
def test_on_a_late_device(mask: str, score: str) -> None:
    check(Case(SequenceSplit(2), (2, 1), 6, mask, score, 4, False, torch.float32), "npu")


@pytest.mark.tier("test", each=3)
@pytest.mark.parametrize("mask", MASKS)
def test_torch_computes_the_same(mask: str) -> None:
    """The formulas of `alone` are torch's; on the CPU it has no gradient."""
    case = Case(SequenceSplit(1), (4, 2), 24, mask, "alibi", 8, False, torch.float64)
    found = flex_attention(*tensors(case)[:3], SCORES["alibi"], mask_of(case), enable_gqa=True)
    torch.testing.assert_close(found, alone(case)[0])


def test_another_mask_would_be_noticed() -> None:
    case = Case(SequenceSplit(2), (2, 2), 8, "window", "none", 4, False, torch.float64)
    with pytest.raises(AssertionError):
        _compare_with_another(case)


def _compare_with_another(case: Case) -> None:
    found = sim.run(parts, 2, (case._replace(mask="causal"), "cpu"))
    held = torch.cat([torch.arange(*ends) for ends in case.split.intervals(0, case.seq)])
    torch.testing.assert_close(found[0][0], alone(case)[0][:, :, held])


def test_states_of_tiles_that_are_no_squares_are_those_of_their_scores():
    states = torch.tensor([[[[0, 1, 2], [2, 0, 1]]]], dtype=torch.int8)
    seen = BlockStates(states, states, (4, 2)).seen(torch.arange(8), torch.arange(6))
    assert torch.equal(seen, states.repeat_interleave(4, 2).repeat_interleave(2, 3))


# -- what is left out --------------------------------------------------------------------------------------------------


@given(
    mask=st.sampled_from([name for name in sorted(MASKS) if name != "none"]),
    tile=st.sampled_from([1, 2, 4, 16]),
    length=st.integers(1, 40),
    ends=st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.integers(0, 40)),
)
def test_pieces_are_what_the_tiles_say(mask: str, tile: int, length: int, ends: tuple[int, ...]) -> None:
    """Each position that is seen is in one piece, wholly seen pieces hide nothing, and empty tiles are in none."""
    q0, q1, k0, k1 = (min(end, length) for end in ends)
    queries, keys = (min(q0, q1), max(q0, q1)), (min(k0, k1), max(k0, k1))
    assume(q0 != q1 and k0 != k1)
    blocks = BlockStates.of(create_block_mask(MASKS[mask], 2, 2, length, length, device="cpu", BLOCK_SIZE=tile))
    seen = create_mask(MASKS[mask], 2, 2, length, length, device="cpu")
    times = torch.zeros(length, length, dtype=torch.int64)
    for piece in blocks.pieces(queries, keys):
        rows, columns = slice(*piece.queries), slice(*piece.keys)
        assert times[rows, columns].numel() > 0
        times[rows, columns] += 1
        assert not piece.seen or bool(seen[:, :, rows, columns].all())
    asked = torch.zeros_like(times)
    asked[slice(*queries), slice(*keys)] = 1
    assert bool((times <= asked).all())
    assert bool((times[seen.any(0).any(0) & (asked == 1)] == 1).all())


def test_a_window_costs_what_it_shows() -> None:
    """Of a sequence of 64 tiles and a window of one, a rank computes a small part."""
    mask = create_block_mask(MASKS["window"], None, None, 512, 512, device="cpu", BLOCK_SIZE=8)
    pieces = list(BlockStates.of(mask).pieces((0, 512), (0, 512)))
    computed = sum((p.queries[1] - p.queries[0]) * (p.keys[1] - p.keys[0]) for p in pieces)
    assert 512 * 5 < computed < 512 * 512 / 6


def test_tiles_alone_can_hide() -> None:
    """A mask made of tiles has no function, and its partial tiles are seen wholly, as in torch's kernel."""
    counts, indices = torch.tensor([[[1, 2]]]), torch.tensor([[[[0, 1], [0, 1]]]])
    mask = BlockMask.from_kv_blocks(counts.int(), indices.int(), BLOCK_SIZE=4, seq_lengths=(8, 8))

    def body() -> torch.Tensor:
        cp = ContextParallel(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), 1, balance=False)
        q, k, v, _ = (cp.split(x, dim=2) for x in full)
        return cp.flex_attention(q, k, v, block_mask=mask)

    full = tensors(Case(SequenceSplit(2), (1, 1), 2, "none", "none", 4, False, torch.float64))
    hidden = torch.ones(8, 8, dtype=torch.bool)
    hidden[:4, 4:] = False
    expected = torch.nn.functional.scaled_dot_product_attention(*full[:3], attn_mask=hidden)
    torch.testing.assert_close(torch.cat(sim.run(body, 2), dim=2), expected)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"block_mask": "causal"}, "block_mask"),
        ({"enable_gqa": False}, "enable_gqa=True"),
        ({"block_mask": create_block_mask(noop_mask, None, None, 8, 8, device="cpu")}, "None or 4, 16, 16"),
        ({"block_mask": create_block_mask(noop_mask, None, 3, 16, 16, device="cpu")}, "heads 3"),
        ({"score_mod": lambda s, b, h, q, kv: s * torch.ones(1, requires_grad=True)[0]}, "tensor.detach"),
    ],
)
def test_wrong_arguments_are_refused_on_every_rank(options: dict[str, Any], error: str) -> None:
    def body() -> str:
        cp = ContextParallel(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), 1)
        q, k = torch.ones(1, 4, 8, 4), torch.ones(1, 2, 8, 4)
        with pytest.raises((TypeError, ValueError)) as caught:
            cp.flex_attention(q, k, k, **{"enable_gqa": True, **options})
        return str(caught.value)

    with sim.world(2) as world:
        texts = world.run(body)
        assert not world.trace.events
    assert texts[0] == texts[1]
    assert error in texts[0]
    assert texts[0].startswith("cannot attend by FlexAttention")
    assert "\n  try: " in texts[0]
