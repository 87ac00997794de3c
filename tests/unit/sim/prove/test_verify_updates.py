"""Faults of an optimizer alone, which the wide bounds of gradients that are zero but for rounding would hide."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from zoo_kit import ddp, draw, made_of, proved_plan, proved_step, squared, with_averages

import sim
from sim.prove.steps.updates import UpdateReplay, UpdateStarts

pytestmark = pytest.mark.tier("test")

WIDTH = 4


@made_of(lambda: {"score": nn.Linear(WIDTH, 2), "head": nn.Linear(WIDTH, WIDTH)})
def pooling(self, x):
    """Rows weighed by a softmax, to which the bias of the scores adds nothing: its gradient is rounding."""
    return self.head((self.score(x).softmax(1).mean(-1, keepdim=True) * x).sum(1))


def on_ranks():
    return dist.is_initialized()


def on_the_last():
    return dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1


def grouped(params, kind=torch.optim.AdamW, **of_score_bias):
    """An optimizer with a group for the bias of the scores, which steps by the sign of a gradient of rounding."""
    (bias,) = (each for each in params if each.shape[0] == 2 and each.dim() == 1)
    rest = [each for each in params if each is not bias]
    return kind([{"params": rest}, {"params": [bias], **of_score_bias}], lr=1e-3, eps=1e-30)


def other_rate(params):
    return grouped(params, lr=2e-3 if on_the_last() else 1e-3)


def no_decay(params):
    return grouped(params, weight_decay=0.0 if on_ranks() else 0.01)


def lost_state(params):
    """A rank's first moment is lost after the first step."""
    made = grouped(params)
    if on_the_last():
        made.register_step_post_hook(lambda *_: made.state[made.param_groups[1]["params"][0]]["exp_avg"].zero_())
    return made


class Twice(torch.optim.AdamW):
    """Moves the parameters of the last group twice as far, on ranks."""

    def step(self, closure=None):
        (bias,) = self.param_groups[-1]["params"]
        before = bias.detach().clone()
        super().step(closure)
        if on_ranks():
            bias.data.add_(bias.data - before)


def twice(params):
    return grouped(params, Twice if on_ranks() else torch.optim.AdamW)


def fused(params):
    return grouped(params, fused=on_ranks(), foreach=False)


def one_by_one(params):
    return grouped(params, foreach=not on_ranks())


def by_plan(optimizer_fn, wrap=ddp, **options):
    options |= {"loss_fn": lambda output, x: output.square().mean(), "optimizer_fn": optimizer_fn}
    return proved_plan(wrap, pooling, (draw(4, 3, WIDTH),), **options)


def by_step(optimizer_fn, **options):
    options |= {"rank_step": with_averages(squared), "optimizer_fn": optimizer_fn}
    return proved_step(None, pooling, draw(4, 3, WIDTH), **options)


FAULTS = [
    (other_rate, "rank 1 steps with lr=0.002, one device with lr=0.001", 1),
    (no_decay, "ranks 0-1 step with weight_decay=0.0, one device with weight_decay=0.01", 1),
    (lost_state, "rank 1 makes another update of it than one device would", 2),
    (twice, "ranks 0-1 move it 2 times as far as one device would", 1),
]


@pytest.mark.parametrize("proved", [by_plan, by_step])
@pytest.mark.parametrize(("fault", "words", "number"), FAULTS)
def test_a_fault_of_the_optimizer_alone_is_found(proved, fault, words, number):
    report = proved(fault, steps=2)
    first = report.first
    assert first is not None, report
    after = ("bias", f"bias after step {number}") if proved is by_plan else (f"bias of step {number}",)
    assert (first.kind, first.module) == ("update", "score"), first
    assert first.tensor in after
    assert first.sentence == f"{words}, from the same gradient"
    assert "options and state" in first.suggestion


@pytest.mark.parametrize("proved", [by_plan, by_step])
@pytest.mark.parametrize("right", [grouped, fused, one_by_one])
def test_right_optimizers_are_right(proved, right):
    report = proved(right, steps=3)
    assert report.bug is None, report
    assert {row.verdict for row in report.rows if row.kind == "update"} <= {"exact", "rounding"}


def zero(params):
    kind = ZeroRedundancyOptimizer if on_ranks() else None
    return kind(params, torch.optim.AdamW, lr=1e-3) if kind else torch.optim.AdamW(params, lr=1e-3)


def test_states_that_are_sharded_over_the_ranks_are_right():
    for proved in (by_plan, by_step):
        report = proved(zero, steps=3)
        assert report.ok, report


@pytest.mark.parametrize("fault", [True, False])
def test_states_of_another_ranks_shard(fault):
    def swapped(params):
        made = torch.optim.AdamW(params, lr=1e-3)

        def swap(*_):
            for state in made.state.values() if fault and on_ranks() else ():
                mine = state["exp_avg"].to_local()
                both = [torch.empty_like(mine) for _ in range(2)]
                dist.all_gather(both, mine)
                mine.copy_(both[1 - dist.get_rank()])

        made.register_step_post_hook(swap) if on_ranks() else None
        return made

    def wrap(model, mesh):
        return fully_shard(model, mesh=mesh)

    report = by_plan(swapped, wrap, steps=2)
    assert report.ok != fault, report
    if fault:
        assert (report.first.kind, "after step 2" in report.first.tensor) == ("update", True), report


SCRIPT = """
import torch, torch.distributed as dist
torch.manual_seed(0)
layers = torch.nn.ModuleDict({"score": torch.nn.Linear(4, 2), "head": torch.nn.Linear(4, 4)})
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers
    def forward(self, x):
        return layers["head"]((layers["score"](x).softmax(1).mean(-1, keepdim=True) * x).sum(1))
model = Model()
rank = dist.get_rank() if dist.is_initialized() else 0
bias = layers["score"].bias
rest = [each for each in model.parameters() if each is not bias]
groups = [{"params": rest}, {"params": [bias], "lr": RATE}]
optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-30)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
for batch in torch.randn(2, 4, 3, 4):
    if dist.is_initialized():
        batch = batch.chunk(2)[rank]
    loss = model(batch).square().mean()
    loss.backward()
    for each in model.parameters() if dist.is_initialized() else ():
        dist.all_reduce(each.grad, op=dist.ReduceOp.AVG)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
"""


@pytest.mark.parametrize(("rate", "said"), [("1e-3", ""), ("1e-3 * (1 + rank)", "rank 1 steps with lr=0.002")])
def test_the_optimizer_of_a_script(tmp_path, rate, said):
    (tmp_path / "one.py").write_text(SCRIPT.replace("RATE", "1e-3"))
    started = SCRIPT.replace("RATE", rate).replace(
        "torch.manual_seed(0)", "dist.init_process_group(); torch.manual_seed(0)"
    )
    (tmp_path / "ranks.py").write_text(started)
    report = sim.verify(f"{tmp_path}/ranks.py", 2, reference=f"{tmp_path}/one.py")
    assert (report.first is None) == (not said), report
    if said:
        assert report.first.place == "layers.score.bias of step 1"
        assert said in report.first.sentence


def test_a_replay_needs_all_steps_of_an_optimizer():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    replay, late, again = UpdateReplay(), UpdateReplay(), []
    for number in range(3):
        weight.grad = torch.tensor([1.0, float(number)])
        starts, gradients = UpdateStarts.of(optimizer, {"weight": weight}), {"weight": weight.grad.clone()}
        optimizer.step()
        again.append(replay.step(starts.rules, starts.values, gradients)["weight"])
        assert torch.equal(again[-1], weight.detach())
        if number:  # it does not know the momentum
            assert late.step(starts.rules, starts.values, gradients) == {}


def test_what_hooks_do_is_not_taken_again():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    assert UpdateStarts.of(optimizer, {"weight": weight}).rules
    optimizer.register_step_pre_hook(lambda *_: None)
    assert not UpdateStarts.of(optimizer, {"weight": weight}).rules
