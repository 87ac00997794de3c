"""Random numbers of one device, put in on the ranks: masks are compared, and right programs stay right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import sim
from hyper_parallel import fully_shard

ROWS, WIDTH = 4, 8
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    """A branch that is dropped and added; `how` says what the ranks do otherwise."""

    def __init__(self, p=0.5, preserve_rng_state=None):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.p, self.preserve, self.how = p, preserve_rng_state, Residual.right

    def forward(self, x):
        if self.preserve is None:
            return self.how(self, x)
        return checkpoint(lambda x: self.how(self, x), x, use_reentrant=False, preserve_rng_state=self.preserve)

    def branch(self, x):
        return self.layer(self.norm(x))

    def right(self, x):
        return x + F.dropout(self.branch(x), self.p)


def data_parallel(how=Residual.right, wrap=DistributedDataParallel, **changes):
    def parallelize(model, mesh):
        for name, value in {"how": how, **changes}.items():
            setattr(model[0], name, value)
        return wrap(model)

    return parallelize


def verify(model, mesh="dp=2", **options):
    if "dp" in mesh:
        options = {"input_layouts": [("dp", "None")], **options}
    return sim.verify_plan(model, (X,), mesh, optimizer_fn=None, **options)


def residual(parallelize, **options):
    return verify(lambda: nn.Sequential(Residual(**options), nn.Linear(WIDTH, 4)), parallelize=parallelize)


def is_right(report):
    assert report.ok, report
    assert not [note for note in report.notes if "random numbers" in note], report.notes


def is_wrong(report, module="0"):
    assert not report.ok, report
    assert (report.first.module, report.first.tensor[-20:]) == (module, " with random numbers"), report
    assert report.first.sentence.startswith("it is right with means in the place of random numbers, and wrong with")


@pytest.mark.parametrize("preserve", [None, True])
@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_masks_of_shards_of_a_batch_are_right(wrap, preserve):
    is_right(residual(data_parallel(wrap=wrap), preserve_rng_state=preserve))


def on_the_input(self, x):
    return F.dropout(x, self.p) + self.branch(x)


def on_the_sum(self, x):
    return F.dropout(x + self.branch(x), self.p)


@pytest.mark.parametrize("preserve", [None, True])
@pytest.mark.parametrize(("how", "tensor"), [(on_the_input, "the model's input"), (on_the_sum, "0.output")])
def test_a_mask_on_another_tensor_is_found(how, tensor, preserve):
    report = residual(data_parallel(how), preserve_rng_state=preserve)
    is_wrong(report)
    assert report.first.place == "0.output with random numbers"
    assert f"those of 0 (bernoulli) are put on {tensor}" in report.first.sentence


def test_masks_that_are_scaled_otherwise_are_found():
    is_wrong(residual(data_parallel(p=0.3)))


class Drawn(torch.autograd.Function):
    """Dropout that draws its mask again in backward, from a state of the generator."""

    @staticmethod
    def forward(ctx, x, shift):
        ctx.state, ctx.shift = torch.get_rng_state(), shift
        return x * torch.empty_like(x).bernoulli_(0.5) * 2

    @staticmethod
    def backward(ctx, grad):
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.state)
            torch.rand(ctx.shift)
            return grad * torch.empty_like(grad).bernoulli_(0.5) * 2, None


@pytest.mark.parametrize("shift", [0, 3])
def test_masks_that_a_function_draws_again_by_itself(shift):
    def drawn(self, x, shift=0):
        return x + Drawn.apply(self.branch(x), shift)

    class Redrawing(Residual):
        right = drawn

        def __init__(self):
            super().__init__()
            self.how = drawn

    parallelize = data_parallel(lambda self, x: drawn(self, x, shift))
    report = verify(lambda: nn.Sequential(Redrawing(), nn.Linear(WIDTH, 4)), parallelize=parallelize)
    if shift:
        assert not report.ok, report
        assert (report.first.kind, report.first.tensor[-20:]) == ("gradient", " with random numbers")
    else:
        is_right(report)


def commuting(self, x):
    return torch.relu(F.dropout(self.branch(x), self.p))


def test_what_commutes_with_a_mask_is_right():
    class Relu(Residual):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU()
            self.how = lambda self, x: F.dropout(self.act(self.branch(x)), self.p)

    model = lambda: nn.Sequential(Relu(), nn.Linear(WIDTH, 4))  # noqa: E731
    assert verify(model, parallelize=data_parallel(commuting)).ok


def test_draws_in_another_order_are_told_by_what_they_are_put_on():
    def both(self, x):
        return F.dropout(x, 0.5) + F.dropout(self.branch(x), 0.5)

    def turned(self, x):
        branch = F.dropout(self.branch(x), 0.5)
        return F.dropout(x, 0.5) + branch

    class Both(Residual):
        def __init__(self):
            super().__init__()
            self.how = both

    model = lambda: nn.Sequential(Both(), nn.Linear(WIDTH, 4))  # noqa: E731
    is_right(verify(model, parallelize=data_parallel(turned)))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), F.dropout

    def forward(self, x):
        return self.down(self.kind(torch.tanh(self.up(x)), 0.5))


@pytest.mark.parametrize("local", [False, True])
def test_masks_of_activations_that_are_split_over_tp(local):
    def split(model, mesh):
        torch.manual_seed(7 + (mesh.get_local_rank() if local else 0))
        return parallelize_module(
            model, mesh, {"up": ColwiseParallel(use_local_output=local), "down": RowwiseParallel()}
        )

    report = verify(Mlp, "tp=2", parallelize=split)
    is_right(report)
    assert any(row.verdict == "rounding" for row in report.rows)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_part_of_a_mask_of_the_full_tensor(wrong):
    def split(model, mesh):
        rank = mesh.get_local_rank()

        def kind(x, p):
            numbers = torch.empty(ROWS, 2 * WIDTH, dtype=x.dtype).bernoulli_(1 - p)
            start = ((1 - rank) if wrong else rank) * WIDTH
            return x * numbers[:, start : start + WIDTH] / (1 - p)

        model.kind = kind
        return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    report = verify(Mlp, "tp=2", parallelize=split)
    if wrong:
        assert not report.ok, report
        assert report.first.tensor.endswith("with random numbers"), report
    else:
        is_right(report)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x.view(ROWS // 2 if len(x) == ROWS else 1, 2, WIDTH)).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).flatten(0, 1)


def test_masks_of_attention_and_of_whole_rows():
    class Rows(nn.Module):
        def forward(self, x):
            return x * x.new_empty(len(x), 1).bernoulli_(0.5) + torch.randn_like(x).mul(0.1)

    report = verify(
        lambda: nn.Sequential(Attention(), Rows()), parallelize=lambda model, mesh: DistributedDataParallel(model)
    )
    is_right(report)


def test_what_cannot_be_shared_stays_at_its_mean():
    def tripled(self, x):
        return x + F.dropout(self.branch(x) * 3, self.p) / 3  # no tensor that one device has

    report = residual(data_parallel(tripled))
    assert report.ok, report
    said = "random numbers of 0 (bernoulli) are taken at their mean: nothing tells which part of those of one device"
    assert any(note.startswith(said) for note in report.notes), report.notes


def test_a_model_that_draws_more_where_its_values_are_others():
    class Routed(nn.Module):
        def forward(self, x):
            x = F.dropout(x, 0.5)
            return x + F.dropout(x[x[:, 0] != 0], 0.5).sum()

    report = verify(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Routed()), "tp=2", parallelize=lambda model, mesh: model
    )
    assert report.ok, report
    assert "random numbers are taken at their mean, as others are drawn where they are not" in report.notes


def test_a_proof_without_random_numbers_takes_no_further_step(monkeypatch):
    import sim.prove.verify as verify_module

    def never(*given):
        raise AssertionError

    monkeypatch.setattr(verify_module, "shared_draws", never)
    assert residual(data_parallel(), p=0.0).ok


@pytest.mark.parametrize("wrong", [False, True])
def test_masks_of_tokens_in_zig_zag(wrong):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.drop, self.chosen = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), None

        def forward(self, x):
            x = x if self.chosen is None else x[:, self.chosen]
            y = self.first(x)
            return x + self.drop(y) if self.chosen is None or not wrong else self.drop(x) + y

    def zig_zag(model, mesh):
        rank = mesh.get_local_rank()
        torch.manual_seed(7 + rank)
        model[0].chosen = torch.cat([torch.arange(8).chunk(4)[at] for at in (rank, 3 - rank)])
        return DistributedDataParallel(model)

    x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(0))
    options = {"parallelize": zig_zag, "loss_fn": lambda output, x: output.square().mean(), "optimizer_fn": None}
    report = sim.verify_plan(lambda: nn.Sequential(Tokens(), nn.Linear(WIDTH, 4)), (x,), "cp=2", **options)
    if wrong:
        assert not report.ok, report
        assert report.first.tensor.endswith("with random numbers"), report
    else:
        is_right(report)
