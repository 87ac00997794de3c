"""Losses and layers that see all rows: right on ranks that share them, and said truly where a rank sees its own."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zoo_kit import Collect, Gather, Leave, Pair, ddp, draw, given, made_of, proved_plan, proved_step

pytestmark = pytest.mark.tier("test")

ROWS, WIDTH, EXPERTS = 8, 6, 2
UNTRUE = ("parts of a", "optimizer", "averaged once too often", "counted once per rank")


def on_ranks():
    return dist.is_initialized()


def added(values):
    return Leave.apply(values, None) if on_ranks() else values


def itself(values):
    return values


# -- losses ------------------------------------------------------------------------------------------------------------


def dice(output, x, labels, all_of=added):
    """One minus twice the overlap by both sizes, sums over all rows."""
    hit = F.one_hot(labels.clamp(0), WIDTH).to(output.dtype)
    chances = output.softmax(-1)
    overlap, sizes = all_of(torch.stack([(chances * hit).sum(), chances.square().sum() + hit.sum()]))
    return 1 - 2 * overlap / sizes


def grpo(output, x, labels, all_of=added):
    """Rewards less the mean of their group, by its deviation, of the tokens that count."""
    chosen = output.log_softmax(-1).gather(-1, labels.clamp(0)[:, None]).squeeze(-1)
    reward, counted = torch.sin(3 * x.sum(-1)), (labels >= 0).to(output.dtype)
    count, sums, squares = all_of(torch.stack([torch.ones_like(reward), reward, reward.square()]).sum(1).detach())
    better = (reward - sums / count) / (squares / count - (sums / count).square()).sqrt()
    return added(-(better * chosen * counted).sum()) / all_of(counted.sum().detach())


def ignoring(output, x, labels, all_of=added):
    """The mean over the labels that are not -100."""
    lost = F.cross_entropy(output, labels, ignore_index=-100, reduction="sum")
    return all_of(lost) / all_of((labels >= 0).sum().to(lost.dtype))


def clip(output, x, labels, all_of=added, gather=Gather):
    """Each row beside all others, both ways."""
    theirs, outputs, first = x, output, 0
    if on_ranks() and all_of is added:
        theirs, outputs = (gather.apply(each, 0, dist.group.WORLD) for each in (x, output))
        first = dist.get_rank() * len(x)
    own = torch.arange(len(x)) + first
    pairs = (output @ theirs.T, x @ outputs.T)
    return all_of(sum(F.cross_entropy(each, own, reduction="sum") for each in pairs)) / len(theirs)


LOSSES = [dice, grpo, ignoring, clip]


def summed(model, mesh):
    """Gradients are added up, as each rank has that of its rows in a loss of all."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad))


def plan(loss_of, parallelize, **options):
    return proved_plan(parallelize, Pair, given(3), loss_fn=loss_of, **options)


def step(loss_of, parallelize, **options):
    def take(model, batch):
        loss = loss_of(model(*batch), *batch)
        loss.backward()
        return loss

    return proved_step(parallelize, Pair, given(3), step=take, **options)


@pytest.mark.parametrize("prove", [plan, step])
@pytest.mark.parametrize("loss_of", LOSSES)
@pytest.mark.parametrize("parallelize", [summed, ddp])
def test_losses_of_a_ranks_own_rows_are_no_means(prove, loss_of, parallelize):
    def own(*args):
        return loss_of(*args, all_of=itself if on_ranks() else added)

    report = prove(own, parallelize)
    assert report.first.place == "the model's loss", report
    assert report.first.sentence.startswith("neither the mean nor the sum of the ranks' losses is that of"), report
    if prove is plan:
        share = "its share of the labels that are not -100"
        assert (share in report.first.suggestion) == (loss_of is ignoring), report.first


@pytest.mark.parametrize("prove", [plan, step])
@pytest.mark.parametrize("loss_of", LOSSES)
def test_losses_of_all_rows_are_right_where_their_gradients_are_added_up(prove, loss_of):
    report = prove(loss_of, summed)
    assert report.ok, report
    report = prove(loss_of, ddp)
    assert report.first.kind == "gradient", report
    assert report.first.tensor in ("weight", "bias"), report.first
    assert "1/2 of what it should be: averaged once too often over 'dp'" in report.first.sentence, report.first


@pytest.mark.parametrize("prove", [plan, step])
def test_gathered_rows_whose_gradients_stay_on_their_rank(prove):
    """The loss is right, and backward forgets what other ranks' rows say of this rank's."""

    report = prove(partial(clip, gather=Collect), summed)
    assert report.first.kind == "gradient", report
    assert (report.first.module, report.first.tensor) in {("second", "output"), ("", "output")}, report.first
    assert not any(words in report.first.sentence for words in UNTRUE), report.first


# -- experts with a capacity -------------------------------------------------------------------------------------------


class Capacity(nn.Module):
    """The best expert of each row, which takes so many rows at most, in their order; and a loss that balances them."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.before, self.all_of, self.most = torch.zeros_like, itself, ROWS // EXPERTS - 1
        self.balance = None

    def forward(self, x):
        chances = self.router(x).softmax(-1)
        hit = F.one_hot(chances.argmax(-1), EXPERTS).to(x.dtype)
        place = (hit.cumsum(0) + self.before(hit.sum(0))) * hit
        kept = hit * (place <= self.most)
        used, likely, count = self.all_of(
            torch.cat([torch.stack([hit.sum(0), chances.sum(0)]), torch.full((1, EXPERTS), float(len(x)))])
        )
        self.balance = (used * likely).sum() / count[0] ** 2
        return sum((kept * chances)[:, at, None] * expert(x) for at, expert in enumerate(self.experts))


@made_of(lambda: {"first": nn.Linear(WIDTH, WIDTH), "moe": Capacity(), "last": nn.Linear(WIDTH, 2)})
def routed(self, x, labels):
    return self.last(x + self.moe(torch.tanh(self.first(x))))


def counted_before(counts):
    """What ranks before this one have counted; they hold the rows that come first."""
    every = [torch.empty_like(counts) for _ in range(dist.get_world_size())]
    dist.all_gather(every, counts)
    return sum(every[: dist.get_rank()], torch.zeros_like(counts))


def routing(fault):
    def parallelize(model, mesh):
        model.moe.before = torch.zeros_like if fault == "capacity" else counted_before
        model.moe.all_of = itself if fault == "balance" else added
        summed(model, mesh)

    def take(model, batch):
        loss = added(model(*batch).square().sum()) / ROWS + 0.1 * model.moe.balance
        loss.backward()
        return loss

    return proved_step(parallelize, routed, given(3), step=take)


@pytest.mark.parametrize(("fault", "place"), [(None, ""), ("capacity", "moe.output"), ("balance", "the model's loss")])
def test_experts_with_a_capacity_and_a_balance(fault, place):
    """AdamW steps; it is not to blame."""
    report = routing(fault)
    assert report.ok == (fault is None), report
    if fault:
        assert report.first.place.removesuffix(" of step 1") == place, report
        assert not any(words in report.first.sentence for words in UNTRUE), report.first


@made_of(
    lambda: {"group": None, "router": nn.Linear(8, 4, bias=False), "weight": nn.Parameter(torch.randn(4, 8, 8) / 3)}
)
def balanced(self, x):
    """Grouped products of counted tokens, and an auxiliary loss of shares and probabilities."""
    chances = self.router(x).softmax(-1)
    best, ids = chances.topk(2, -1)
    order = ids.flatten().argsort(stable=True)
    counts = torch.histc(ids.flatten().float(), bins=4, min=0, max=3)
    ends = counts.cumsum(0).to(torch.int32)
    made = torch._grouped_mm(x.repeat_interleave(2, 0)[order], self.weight, offs=ends)
    made = torch.zeros_like(made).index_copy(0, order, made).view(-1, 2, 8)
    share, chance = counts / ids.numel(), chances.mean(0)
    if self.group is not None:
        share, chance = (each + (added(each) / 2 - each).detach() for each in (share, chance))
    return (made * best[..., None]).sum(1).square().mean() + 0.04 * (share * chance).sum()


@pytest.mark.parametrize("is_local", [False, True], ids=["of all tokens", "of local tokens"])
def test_an_auxiliary_loss_of_local_tokens_is_found(is_local):
    def parallel(model, mesh):
        model.group = None if is_local else mesh.get_group()
        return DistributedDataParallel(model, process_group=mesh.get_group())

    report = proved_plan(parallel, balanced, (draw(24, 8),), optimizer_fn=None)
    assert report.ok is not is_local
    if is_local:
        assert report.first.tensor == "output"
        assert report.first.bound < 1e-7 < 1e-3 < report.first.error
