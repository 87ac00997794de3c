"""Any pipeline of any stages, some without a layer, trains as on one device: losses and gradients of two steps.

Everything is float64, so that the bound on rounding lies far below any real difference.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import sim
from hyper_parallel import MixedPrecisionPolicy, fully_shard, init_device_mesh
from hyper_parallel.core.pipeline import SCHEDULES, Pipeline, clip_grad_norm, stage_slices

pytestmark = pytest.mark.sim


WIDTH, STEPS = 3, 2


class Layer(nn.Module):
    """Takes two tensors and returns two; `kind` says how they mix."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.scale = nn.Linear(WIDTH, 5), nn.Parameter(torch.ones(WIDTH))
        self.down = nn.Linear(5, WIDTH, bias=False)
        if kind == "frozen":
            self.up.requires_grad_(False)

    def compute(self, x, y):
        x = x + self.down(torch.tanh(self.up(x))) * self.scale
        return (y, x) if self.kind == "swap" else (x, y + x.mean(1, keepdim=True)) if self.kind == "mix" else (x, y)

    def forward(self, x, y):
        return checkpoint(self.compute, x, y, use_reentrant=False) if self.kind == "again" else self.compute(x, y)


class Stage(nn.Module):
    """Some of the layers; the first stage makes a pair of its input, the last one a number per row."""

    def __init__(self, kinds, part) -> None:
        super().__init__()
        self.part = part
        self.gain = nn.Parameter(torch.ones(()))  # without any parameter a stage would take the norm for a float32
        self.table = nn.Embedding(7, WIDTH) if part.is_first else None
        self.layers = nn.ModuleDict({str(index): Layer(kinds[index]) for index in part.layers})
        self.head = nn.Linear(WIDTH, 1) if part.is_last else None

    def forward(self, *given):
        if self.table is not None:
            given = (self.table(given[0]), self.table(given[0] % 3) * 0.5)
        for layer in self.layers.values():
            given = layer(*given)
        given = (given[0] * self.gain, given[1])
        return given if self.head is None else self.head(given[0] + given[1]).squeeze(1)


def fill(model: nn.Module) -> None:
    """Give every parameter values that depend on its name alone."""
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(ord(letter) * place for place, letter in enumerate(name, 1)))
        param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64)


class Case(NamedTuple):
    schedule: str
    ranks: int
    each: int
    micro_batches: int
    rows: int
    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    data: int
    wrapped: str
    keep: bool


@st.composite
def cases(draw):
    """Shrinks towards gpipe on one rank, a micro-batch of a row, no layers and no data parallelism."""
    schedule = draw(st.sampled_from([name for name, kind in SCHEDULES.items() if kind.is_available]))
    kind = SCHEDULES[schedule]
    ranks = draw(st.integers(1, 3))
    each = draw(st.integers(1, 3)) if kind.is_multi and kind.style == "loop" else kind.stages_per_rank
    sizes = draw(st.lists(st.integers(0, 2), min_size=ranks * each, max_size=ranks * each))
    kinds = draw(
        st.lists(st.sampled_from(["plain", "swap", "mix", "frozen", "again"]), min_size=sum(sizes), max_size=sum(sizes))
    )
    counts = []
    for count in range(1, 9):
        try:
            kind.check_micro_batches(count, ranks, ranks * each)
        except ValueError:
            continue
        counts.append(count)
    micro_batches = draw(st.sampled_from(counts)) if counts else ranks * each
    data = draw(st.integers(1, 2))
    wrapped = draw(st.sampled_from(["no", "stage", "layers", "both"])) if data == 1 else "both"
    keep = kind.splits_backward or draw(st.booleans())
    rows = draw(st.integers(1, 2))
    return Case(schedule, ranks, each, micro_batches, rows, tuple(kinds), tuple(sizes), data, wrapped, keep)


def batch(case: Case):
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 7, (case.data * case.micro_batches * case.rows,), generator=generator)
    return tokens, torch.randn(len(tokens), generator=generator, dtype=torch.float64)


def loss_of(output, target):
    return (output - target).square().sum()


def parts_of(case: Case, rank: int):
    return stage_slices(len(case.kinds), case.schedule, rank, case.ranks, stages_per_rank=case.each, sizes=case.sizes)


def alone(case: Case):
    stages = [Stage(case.kinds, part) for rank in range(case.ranks) for part in parts_of(case, rank)]
    model = nn.Sequential(*sorted(stages, key=lambda stage: stage.part.index))
    for stage in model:
        fill(stage)
    tokens, target = batch(case)
    found = []
    for _ in range(STEPS):
        given = (tokens,)
        for stage in model:
            output = stage(*given)
            given = output
        loss = loss_of(output, target)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        found.append((loss.item(), norm.item(), gradients(model)))
        change(model)
    return found


def gradients(stages):
    grads = {(stage.part.index, name): param.grad for stage in stages for name, param in stage.named_parameters()}
    return {
        at: grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
        for at, grad in grads.items()
        if grad is not None
    }


@torch.no_grad()
def change(stages):
    for stage in stages:
        for param in stage.parameters():
            if param.grad is not None:
                param.sub_(0.5 * param.grad)
        stage.zero_grad()


def wrap(stage: Stage, how: str, mesh) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    units = list(stage.layers.values()) if how in ("layers", "both") else []
    for unit in [*units, *([stage] if how in ("stage", "both") else [])]:
        fully_shard(unit, mesh=mesh, mp_policy=policy).set_reduce_op_type("sum")


def by_pipeline(case: Case):
    mesh = init_device_mesh("cpu", (case.ranks, case.data), mesh_dim_names=("pp", "dp"))
    stages = [Stage(case.kinds, part) for part in parts_of(case, mesh["pp"].get_local_rank())]
    for stage in stages:
        fill(stage)
        wrap(stage, case.wrapped, mesh["dp"])
    run = Pipeline(stages, mesh["pp"], case.schedule, case.micro_batches, loss_of, keep_gathered=case.keep)
    tokens, target = (full.chunk(case.data)[mesh["dp"].get_local_rank()] for full in batch(case))
    found = []
    for _ in range(STEPS):
        loss = run.step(tokens, target)
        dist.all_reduce(loss)
        norm = clip_grad_norm(stages, 0.1, run.group)
        found.append((loss.item(), norm.item(), gradients(stages)))
        change(stages)
    return found


@pytest.mark.tier("full")
@given(cases())
def test_a_pipeline_trains_as_one_device(case):
    expected = alone(case)
    outcomes = sim.run(by_pipeline, world_size=case.ranks * case.data, args=(case,))
    for step, (loss, norm, grads) in enumerate(expected):
        seen = {}
        for outcome in outcomes:
            assert outcome[step][0] == pytest.approx(loss, rel=1e-9)
            assert outcome[step][1] == pytest.approx(norm, rel=1e-9)
            seen.update(outcome[step][2])
        assert seen.keys() == grads.keys()
        for at, grad in grads.items():
            torch.testing.assert_close(seen[at], grad, rtol=1e-8, atol=1e-10, msg=lambda text, at=at: f"{at}: {text}")
