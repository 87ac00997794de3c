"""Any model, any of its modules wrapped with any options of hsdp, trains as on one device.

Everything is float64, so that the bound on rounding lies far below any real difference.
"""

import copy
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import sim
from hyper_parallel.core.hsdp.api import hsdp, hsdp_sync_stream

pytestmark = pytest.mark.sim


WIDTH, PER_RANK, STEPS = 8, 2, 2


class Block(nn.Module):
    """Keeps (batch, WIDTH) as it is. A hidden size of 16 makes weights of exactly 1 KB."""

    def __init__(self, hidden, *, norm, recompute, skipped):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.recompute, self.skipped = recompute, skipped

    def forward(self, x):
        if self.skipped:
            return x
        return checkpoint(self.compute, x, use_reentrant=False) if self.recompute else self.compute(x)

    def compute(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, blocks, rows, *, tied):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, WIDTH if tied else rows, bias=not tied)
        self.tail = nn.Linear(WIDTH, WIDTH, bias=False) if tied else nn.Identity()
        if tied:
            self.tail.weight = self.head.weight

    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.tail(self.head(x))


class Case(NamedTuple):
    """What hypothesis draws; shrinks towards one rank, one block, the root alone wrapped, level1."""

    model: nn.Module
    ranks: int
    cells: tuple[tuple[str, dict[str, Any]], ...]  # names, innermost first, with their options; the root is the last
    sizes: dict[str, int]  # attributes of parameters
    micros: int
    false_start: bool  # a micro-step that zero_grads takes back
    evaluate: bool  # between two steps
    seed: int


@st.composite
def blocks(draw):
    flags = {name: draw(st.booleans()) for name in ("norm", "recompute")}
    block = Block(draw(st.sampled_from([1, 2, 3, 6, 16, 18])), skipped=draw(st.integers(0, 7)) == 7, **flags)
    if draw(st.integers(0, 3)) == 3:
        block.up.requires_grad_(False)
    return block


@st.composite
def ways(draw):
    return {
        "shard_size": draw(st.sampled_from([-1, 1, 2, 3, 4, 8])),
        "threshold": draw(st.sampled_from([0, 1, 2])),
        "optimizer_level": draw(st.sampled_from(["level1", "level2", "level3"])),
        "enable_grad_accumulation": draw(st.booleans()),
        "reduce_dtype": draw(st.sampled_from([None, torch.float64])),
        "comm_async": draw(st.booleans()),
        "comm_fusion": draw(st.booleans()),
        "bucket_size": draw(st.sampled_from([-1, 0, 1, 2])),
    }


@st.composite
def cases(draw):
    model = Model(draw(st.lists(blocks(), min_size=1, max_size=3)), draw(st.integers(1, 6)), tied=draw(st.booleans()))
    names = [f"blocks.{index}{part}" for index in range(len(model.blocks)) for part in (".up", ".down", "")]
    chosen = [name for name in names if draw(st.booleans())]
    scale = draw(st.sampled_from([1.0, 0.5, -2.0]))
    root = draw(ways())
    alike = draw(st.booleans())
    every = [(name, root if alike else draw(ways())) for name in chosen]
    weights = [name for name, p in model.named_parameters() if p.dim()]
    attributed = draw(st.lists(st.sampled_from(weights), unique=True, max_size=2))
    return Case(
        model=model,
        ranks=draw(st.sampled_from([1, 2, 3, 4])),
        cells=tuple((name, {**way, "grad_scale": scale}) for name, way in [*every, ("", root)]),
        sizes={name: draw(st.sampled_from([-1, 1, 2, 3, 4, 8])) for name in attributed},
        micros=draw(st.sampled_from([1, 2, 3])),
        false_start=draw(st.booleans()),
        evaluate=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


def wrap(model, case):
    parameters = dict(model.named_parameters())
    for name, size in case.sizes.items():
        parameters[name].hsdp_shard_size = size
    for name, way in case.cells:
        hsdp(model.get_submodule(name), **way)


def batch(step, micro, ranks, rank=None):
    generator = torch.Generator().manual_seed(10 * step + micro)
    x = torch.randn(ranks * PER_RANK, WIDTH, generator=generator, dtype=torch.float64)
    return x if rank is None else x[rank * PER_RANK : (rank + 1) * PER_RANK]


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model, case, rank=None):
    """Losses of all micro-batches, the last step's gradients, the final parameters."""
    scale = case.cells[-1][1]["grad_scale"]
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.5)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        if case.false_start and rank is not None:
            model.set_requires_grad_sync(False)
            model(batch(9, 0, case.ranks, rank)).square().mean().backward()
            model.zero_grads()
        for micro in range(case.micros):
            if rank is not None:
                model.set_requires_grad_sync(micro == case.micros - 1)
            loss = model(batch(step, micro, case.ranks, rank)).square().mean() / case.micros
            loss.backward()
            losses.append(loss.detach())
        if rank is None:
            for parameter in trainable:
                parameter.grad = None if parameter.grad is None else parameter.grad * scale
        hsdp_sync_stream()
        optimizer.step()
        if case.evaluate:
            with torch.inference_mode():
                model(batch(step, 0, case.ranks, rank))
    gradients = {name: None if p.grad is None else full(p.grad) for name, p in model.named_parameters()}
    return losses, gradients, {name: full(p.detach()) for name, p in model.named_parameters()}


def assert_close(name, got, wanted):
    """Equal up to eps per addition: every value is a sum over batch, widths, blocks and steps, fewer than 2 ** 20.

    A layer norm divides by the spread of eight numbers, which magnifies a rounding error by up to another 2 ** 10.
    """
    assert (got is None) == (wanted is None), name
    if wanted is not None:
        bound = torch.finfo(torch.float64).eps * 2**30 * max(1.0, wanted.abs().max().item())
        assert (got - wanted).abs().max().item() <= bound, (name, got, wanted)


def parts_of(parameter, asked, threshold, ranks):
    """The naive twin: try all numbers of parts, the largest first."""
    if parameter.dim() == 0 or parameter.numel() * parameter.element_size() < threshold * 1024:
        return 1
    most = ranks if asked == -1 else min(asked, ranks)
    return next(n for n in range(most, 0, -1) if parameter.shape[0] % n == 0 and ranks % n == 0)


def check_parts(model, case, start):
    """Every parameter is split by the innermost cell around it, over consecutive ranks."""
    names = {id(p): name for name, p in start.named_parameters()}
    for name, parameter in model.named_parameters():
        way = next(way for cell, way in case.cells if cell == "" or name.startswith(f"{cell}."))
        original = start.get_parameter(name)
        asked = case.sizes.get(names[id(original)], way["shard_size"])
        parts = parts_of(original, asked, way["threshold"], case.ranks)
        assert parameter.hsdp_effective_shard_size == parts, name
        rows = original.shape[0] // parts if parts > 1 else None
        first = 0 if rows is None else dist.get_rank() % parts * rows
        held = original.detach() if rows is None else original.detach()[first : first + rows]
        assert torch.equal(parameter.to_local(), held), name


def on_rank(case, start, reference):
    model = copy.deepcopy(start)
    wrap(model, case)
    check_parts(model, case, start)
    losses, gradients, values = train(model, case, dist.get_rank())
    for got, wanted in zip(losses, reference[0], strict=True):
        dist.all_reduce(got)
        assert_close("loss", got / case.ranks, wanted)
    for got, wanted in ((gradients, reference[1]), (values, reference[2])):
        assert list(got) == list(wanted)
        for name in wanted:
            assert_close(name, got[name], wanted[name])
    model.zero_grads()
    assert all(getattr(p, name, None) is None for p in model.parameters() for name in ("grad", "acc_grad"))


@pytest.mark.tier("full")
@given(cases())
def test_any_cells_with_any_options_train_as_on_one_device(case):
    torch.manual_seed(case.seed)
    model = case.model.double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    reference = train(copy.deepcopy(model), case)
    sim.run(on_rank, case.ranks, (case, model, reference), seed=case.seed)
