"""Choices near a tie in later steps, and in scripts: free on all ranks alike, and a bug where they are not."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from zoo_kit import Tied, draw, made_of, rounding, squared

import sim

pytestmark = pytest.mark.tier("test")

X = draw(4, 3, 16)
CASES = [({}, True), ({"ranks": (1,)}, False), ({"off": 1e-11}, False)]


class Frozen(Tied):
    """Experts whose scores stay equal, as the gate is not trained."""

    def __init__(self):
        super().__init__()
        self.gate.requires_grad_(False)


def late(model, mesh, **options):
    """Score in another order of sums from the second step on."""
    first = model.take
    rounding(model, mesh, **options)
    second, calls = model.take, []

    def take(scores):
        calls.append(scores)
        return (first if len(calls) == 1 else second)(scores)

    model.take = take


@pytest.mark.parametrize(("options", "ok"), CASES)
@pytest.mark.parametrize("steps", [None, 2])
def test_what_a_later_step_of_a_plan_chooses_near_a_tie_is_free(options, ok, steps):
    report = sim.verify_plan(Frozen, (X,), "tp=2", parallelize=partial(late, **options), steps=steps)
    assert report.ok == ok, report
    assert ok == any("topk of the model, candidates lie" in note for note in report.notes), report.notes
    if not ok:
        assert (report.first.module, report.first.tensor) == ("", "output in step 2"), report.first


@pytest.mark.parametrize(("options", "ok"), CASES)
def test_what_a_later_step_of_ones_own_chooses_near_a_tie_is_free(options, ok):
    report = sim.verify_step(squared, Frozen, X, "tp=2", parallelize=partial(late, **options), steps=2)
    assert report.ok == ok, report
    assert ok == any("topk of the model, candidates lie" in note for note in report.notes), report.notes


@pytest.mark.parametrize("off", [1e-15, 1e-11])
def test_what_a_stage_of_a_pipeline_chooses_near_a_tie_is_free(off):
    """The ranks of the other stage choose nothing."""

    @made_of(lambda: {"first": nn.Linear(16, 16), "last": Frozen()})
    def two(self, x):
        return self.last(self.first(x))

    def stage(model, mesh):
        delattr(model, "first" if mesh.get_local_rank() else "last")
        return model

    def staged(model, batch):
        if dist.get_rank() == 0:
            sent = model.first(batch)
            dist.send(sent.detach(), 1)
            grad = torch.empty_like(sent)
            dist.recv(grad, 1)
            return sent.backward(grad)
        own, turn = model.last.take, torch.tensor([0, 1, 2, 0], dtype=torch.float64)
        model.last.take = lambda scores: own(scores * (1 + off * turn))
        got = torch.empty_like(batch)
        dist.recv(got, 0)
        loss = model.last(got.requires_grad_()).square().mean()
        model.last.take = own
        loss.backward()
        dist.send(got.grad, 0)
        return loss

    report = sim.verify_step(squared, two, X, "pp=2", parallelize=stage, rank_step=staged, steps=2)
    assert report.ok == (off == 1e-15), report
    assert report.ok == any("topk of last, candidates lie" in note for note in report.notes), report.notes


SCRIPT = """
import torch, torch.distributed as dist
from test_verify_choices import Frozen, X, late
torch.manual_seed(0)
model = Frozen().double()
if RANKS:
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    late(model, mesh, **OPTIONS)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(X).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("options", "ok"), CASES)
def test_what_a_script_chooses_near_a_tie_is_free(tmp_path, options, ok):
    for name, ranks in (("one.py", "False"), ("ranks.py", "True")):
        (tmp_path / name).write_text(SCRIPT.replace("RANKS", ranks).replace("OPTIONS", repr(options)))
    report = sim.verify(f"{tmp_path}/ranks.py", 2, reference=f"{tmp_path}/one.py")
    assert report.ok == ok, report
    assert ok == any("topk of the model, candidates lie" in note for note in report.notes), report.notes
