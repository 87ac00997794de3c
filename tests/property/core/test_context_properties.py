"""Attention over any number of ranks, split any way, is that of one device: outputs and all gradients.

The bound is computed from the dtype: what a few roundings of each quantity can do, with all terms taken as positive.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from attention_kit import blocks_by
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import sim
from hyper_parallel.core.context_parallel import ContextParallel, SequenceSplit

pytestmark = pytest.mark.sim


ROUNDINGS = 16  # of inputs, weights, each block's output, and their sums, on both sides


class Case(NamedTuple):
    split: SequenceSplit
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    seq: int
    causal: bool
    documents: bool
    dtype: torch.dtype
    seed: int
    kernel: str = "host"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Shrinks towards one rank, one row, one head, and float64."""
    ring, ulysses = draw(
        st.sampled_from([(r, u) for u in (1, 2, 3, 4, 8) for r in (1, 2, 3, 4, 5, 8, 16) if r * u <= 16])
    )
    split = SequenceSplit(ring, ulysses, draw(st.booleans()))
    kv_heads = draw(st.integers(1, 4))
    shared = draw(st.integers(1, 4))
    # The fewest query heads that key heads and ranks share evenly, or twice as many.
    heads = next(n for n in range(kv_heads * shared, 1000, kv_heads) if n % ulysses == 0)
    return Case(
        split,
        draw(st.integers(0, 2)),
        heads,
        kv_heads,
        draw(st.sampled_from([1, 2, 5, 8])),
        split.multiple * draw(st.integers(1, max(1, 48 // split.multiple))),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])),
        draw(st.integers(0, 99)),
        draw(st.sampled_from(["host", "products", "flash", "efficient", "cudnn"])),
    )


class Tensors(NamedTuple):
    """Queries, keys, values, the gradient of the output, and the documents of one device."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor
    documents: torch.Tensor


def tensors(case: Case) -> Tensors:
    generator = torch.Generator().manual_seed(case.seed)
    shapes = [(case.batch, heads, case.seq, case.head_dim) for heads in (case.heads, case.kv_heads, case.kv_heads)]
    drawn = [torch.randn(shape, generator=generator).to(case.dtype) for shape in (*shapes, shapes[0])]
    return Tensors(*drawn, torch.randint(0, 3, (case.batch, case.seq), generator=generator))


def twin(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return output and gradients of q, k, v in float64, by the formulas; and how far rounding can move each."""
    q, k, v, grad, documents = tensors(case)
    each = case.heads // case.kv_heads
    q, k, v, grad = q.double(), *(x.double().repeat_interleave(each, dim=1) for x in (k, v)), grad.double()
    scale = case.head_dim**-0.5
    at = torch.arange(case.seq)
    seen = (at[:, None] >= at) if case.causal else torch.ones(case.seq, case.seq, dtype=torch.bool)
    seen = seen.expand(case.batch, 1, -1, -1)
    if case.documents:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None])
    weights = (q @ k.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1)

    def passes(q, k, v, grad, sign):
        of_weights, mean = grad @ v.mT, (grad * (weights @ v)).sum(-1, keepdim=True)
        of_scores = weights * (of_weights + sign * mean) * scale
        of_k, of_v = of_scores.mT @ q, weights.mT @ grad
        shared = [x.unflatten(1, (case.kv_heads, each)).sum(2) for x in (of_k, of_v)]
        return [weights @ v, of_scores @ k, *shared]

    values = passes(q, k, v, grad, -1.0)
    sizes = passes(*(x.abs() for x in (q, k, v, grad)), 1.0)
    # Weights are off by the rounding of their scores; and below the smallest normal number by an absolute amount.
    largest = (q.abs() @ k.abs().mT * scale).amax().item() if q.numel() else 0.0
    info = torch.finfo(case.dtype)
    bound = ROUNDINGS * info.eps * (1 + largest)
    least = ROUNDINGS * info.smallest_normal * info.eps * case.seq * (1 + largest)
    return values, [bound * size + least for size in sizes]


def parts(case: Case) -> list[torch.Tensor]:
    """Compute on the calling rank: its part of the output and of the gradients."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    cp = ContextParallel(mesh, case.split.ulysses, case.split.balance)
    assert cp.sequence == case.split
    *full, documents = tensors(case)
    q, k, v, grad = (cp.split(x, dim=2).requires_grad_(number < 3) for number, x in enumerate(full))
    ids = cp.split(documents) if case.documents else None
    out = cp.attend(q, k, v, is_causal=case.causal, documents=ids)
    out.backward(grad)
    assert torch.equal(cp.positions(out.shape[2]), cp.split(torch.arange(case.seq), dim=0))
    return [out.detach(), q.grad, k.grad, v.grad]


@pytest.mark.tier("full")
@given(cases())
@example(Case(SequenceSplit(4), 1, 2, 1, 8, 16, True, False, torch.float64, 0))
@example(Case(SequenceSplit(2, 2), 2, 4, 2, 8, 16, True, True, torch.float64, 0))
@example(Case(SequenceSplit(1, 4), 2, 4, 2, 8, 16, True, False, torch.float64, 0))
@example(Case(SequenceSplit(3, 2, balance=False), 1, 6, 3, 5, 12, True, False, torch.bfloat16, 0))
@example(Case(SequenceSplit(2), 1, 4, 2, 5, 12, True, False, torch.bfloat16, 0, "flash"))
@example(Case(SequenceSplit(2), 1, 4, 2, 5, 12, True, False, torch.float32, 0, "efficient"))
@example(Case(SequenceSplit(2), 1, 4, 2, 5, 12, True, False, torch.float16, 0, "cudnn"))
def test_attention_over_ranks_is_that_of_one_device(case: Case) -> None:
    expected, bounds = twin(case)
    with blocks_by(case.kernel):
        found = sim.run(parts, case.split.size, (case,))
    for rank, of_rank in enumerate(found):
        held = torch.cat([torch.arange(*ends) for ends in case.split.intervals(rank, case.seq)])
        for name, mine, full, bound in zip(("out", "q", "k", "v"), of_rank, expected, bounds, strict=True):
            assert mine.dtype == case.dtype
            excess = (mine.double() - full[:, :, held]).abs() - bound[:, :, held]
            assert (excess <= 0).all(), f"{name} of rank {rank}: {excess.max().item():.3g} beyond the bound"
