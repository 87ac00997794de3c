"""Sentences of a proof's report that are only said where the numbers bear them out."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from zoo_kit import (
    Dropping,
    Enter,
    Leave,
    Pair,
    ddp,
    given,
    made_of,
    proved_plan,
    proved_step,
    right,
    squared,
    take,
    with_averages,
)

import sim
from hyper_parallel.core.dtensor.layout import Layout
from sim.prove.judge import Judge, advised, within
from sim.prove.modes.choices import Choice, free_choices
from sim.prove.report import Report, ReportRow

pytestmark = pytest.mark.tier("test")

ROWS, WIDTH = 8, 6


def verify(parallelize=ddp, **options):
    options = {"loss_fn": lambda output, x, labels: F.cross_entropy(output, labels), **options}
    return proved_plan(parallelize, Pair, given(), **options)


def test_an_error_above_the_bound_is_wrong():
    assert [within(error, 1.0, "off").status for error in (0.5, 1.0, 1.5)] == ["right", "right", "wrong"]
    assert within(1.5, 1.0, "off").sentence == "off"


def test_ranks_that_alone_have_a_tensor_are_named():
    wrong, full = torch.tensor([2.0, 1.0, 4.0]), torch.tensor([1.0, 2.0, 3.0])
    for ranks, words in ((2, 3), "ranks 2-3 hold the same"), ((3,), "rank 3 alone has it"):
        judge = Judge(Layout((len(ranks),), ("dp",), rank_list=ranks), is_whole=False)
        assert judge.undeclared(dict.fromkeys(ranks, wrong), full, 1e-6).sentence.startswith(
            f"{words}, and it is wrong"
        )


def test_of_layouts_that_explain_the_parts_the_nearest_to_the_declaration_is_named():
    mesh = Layout((2, 2), ("dp", "tp"))
    full = torch.ones(4, 4)  # its halves may be split over either axis
    found = Judge(mesh).declared(
        dict.fromkeys(range(4), torch.ones(4, 2)), full, 1e-6, mesh("tp", "None"), ("dp", "tp")
    )
    assert found.sentence == "declared Shard(0) over tp, but the ranks hold dim 1 split over tp"


def test_a_loss_that_compares_rows_is_not_called_a_mean():
    report = verify(loss_fn=lambda output, x, labels: F.cross_entropy(output @ x.T, torch.arange(len(x))))
    assert report.first.tensor == "loss"
    assert "neither the mean nor the sum" in report.first.sentence
    assert "mean over unequal parts" not in report.first.suggestion
    assert "of its own data" in report.first.suggestion


# -- batch norms -------------------------------------------------------------------------------------------------------


@made_of(lambda: {"first": nn.Linear(WIDTH, WIDTH), "norm": nn.BatchNorm1d(WIDTH), "last": nn.Linear(WIDTH, 2)})
def normalised(self, x, labels):
    return self.last(self.norm(self.first(x)))


@pytest.mark.parametrize("fault", ["own rows", "no norm"])
def test_a_batch_norm_of_a_ranks_own_rows_in_a_step(fault):
    def without(model, mesh):
        model.norm.forward = lambda x: 2 * x * model.norm.weight + model.norm.bias

    parallelize = without if fault == "no norm" else None
    report = proved_step(parallelize, normalised, given(), rank_step=with_averages(squared))
    assert (report.first.module, report.first.tensor) == ("norm", "output"), report
    said = "each rank along dp normalises with the mean and the variance of its own rows, not of all"
    assert (report.first.sentence == said) == (fault == "own rows")
    assert ("SyncBatchNorm" in report.first.suggestion) == (fault == "own rows")


def test_a_fault_of_the_second_step_is_not_the_optimizers():
    def late(model, mesh):
        model, calls = DistributedDataParallel(model), []

        def scaled(grad):
            calls.append(grad)
            return grad * (2 if len(calls) > 1 else 1)

        model.module.first.weight.register_hook(scaled)
        return model

    report = verify(late, steps=2, optimizer_fn=lambda params: torch.optim.SGD(params, lr=0.1))
    assert (report.first.module, report.first.tensor) == ("first", "weight in step 2")
    assert report.first.kind == "gradient"
    assert "from the gradient of first.output, which is right" in report.first.suggestion


@pytest.mark.parametrize(
    ("fault", "kind", "where"),
    [
        ("forward", "forward", ("first", "output in step 2")),
        ("buffer", "buffer", ("", "count after forward in step 2")),
        ("update", "update", ("first", "weight after step 2")),
    ],
)
def test_a_fault_that_only_the_second_step_has_is_found_where_it_is(fault, kind, where):
    class Counting(Pair):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, *batch):
            self.count += 1
            return super().forward(*batch)

    def late(model, mesh):
        del mesh
        last = dist.get_rank() == 1

        def bent(module, args, output):
            return output * 1.5 if last and fault == "forward" and model.count == 2 else output

        def forgotten(module, args):
            model.count -= float(last and fault == "buffer" and model.count == 1)

        model.first.register_forward_hook(bent)
        model.register_forward_pre_hook(forgotten)
        return model

    def sgd(params):
        optimizer = torch.optim.SGD(params, lr=0.1)
        if fault == "update" and dist.is_initialized() and dist.get_rank() == 1:
            optimizer.register_step_post_hook(lambda opt, args, kwargs: opt.param_groups[0].update(lr=0.2))
        return optimizer

    report = sim.verify_plan(Counting, given(), "dp=2", parallelize=late, optimizer_fn=sgd, steps=2)
    assert (report.first.module, report.first.tensor) == where
    assert report.first.kind == kind


def test_a_right_program_is_proved_in_every_step():
    report = right(verify(steps=3))
    said = {row.tensor for row in report.rows}
    assert {"output in step 2", "output in step 3", "weight in step 3", "weight after step 3"} <= said


def test_an_optimizer_is_not_blamed_for_gradients_that_are_not_proved():
    update = ReportRow("router", "weight", "update", verdict="bug")
    gradient = ReportRow("router", "weight", "gradient", verdict="not proved")
    (advice,) = {row.suggestion for row in advised([gradient, update]) if row.kind == "update"}
    assert advice == "look at the gradient of router.weight first, which is not proved"
    assert "is right" not in advised([update])[0].suggestion
    right = ReportRow("router", "weight", "gradient", verdict="rounding")
    assert "its gradient is right" in advised([right, update])[1].suggestion


@pytest.mark.parametrize(
    ("model", "styles", "place", "advice"),
    [
        pytest.param(
            lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)),
            {"0": ColwiseParallel(), "2": ColwiseParallel()},
            "2.input",
            r"declare \('None', 'tp'\)$",
            id="not proposed where the ranks hold parts",
        ),
        pytest.param(
            lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)),
            {"0": SequenceParallel(sequence_dim=0, use_local_output=True)},
            "0.input",
            r"declare \('None', 'None'\); or split it before; or give each rank its part",
            id="one of the ways where they hold the whole",
        ),
    ],
)
def test_input_layouts_as_advice(model, styles, place, advice):
    def parallel(model, mesh):
        return parallelize_module(model, mesh, styles)

    first = proved_plan(parallel, model, (torch.randn(ROWS, WIDTH),), "tp=2", optimizer_fn=None).first
    assert first.place == place
    assert re.match(advice, first.suggestion)


@pytest.mark.parametrize("kind", ["parameter", "buffer", "forward", "random", "gradient", "update"])
def test_a_report_that_is_not_ok_has_a_first_row(kind):
    fine = [ReportRow("", "x", kind, verdict=verdict) for verdict in ("exact", "rounding", "pending", "private")]
    open_, wrong = (ReportRow("", "y", kind, verdict=verdict) for verdict in ("not proved", "bug"))
    for some, first in [(fine, None), ([*fine, open_], open_), ([open_, *fine, wrong], wrong), ([wrong, open_], wrong)]:
        report = Report(tuple(some), "dp=2")
        assert report.first is first
        assert report.ok is (first is None)
        assert first is None or str(first) in str(report).replace("\n  ", "\n")


def test_a_row_of_long_names_and_layouts_is_one_line():
    rows = [
        ReportRow("m" * 80, "weight", "parameter", "d" * 40, "f" * 40, verdict=each) for each in ("exact", "rounding")
    ]
    lines = Report(tuple(rows), "dp=2").table(verbose=True).splitlines()
    assert [len(line) <= 120 for line in lines] == [True] * 4, "a headline, titles of columns, and two rows"


# -- tokens in an order of their own -----------------------------------------------------------------------------------


@made_of(
    lambda: {"embed": nn.Embedding(30, WIDTH), "first": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)}
)
def tokens(self, ids):
    return self.second(torch.tanh(self.first(self.embed(ids))))


def zigzag(ids):
    pieces, rank = ids.chunk(4, 1), dist.get_rank()
    return torch.cat([pieces[rank], pieces[3 - rank]], 1)


def contextual(model, mesh, cut=zigzag, averages=True, doubled=False):
    whole = model.forward
    model.forward = lambda ids: whole(cut(ids))
    if doubled:
        model.first.register_forward_hook(lambda module, args, output: output + module.bias)
    for parameter in model.parameters() if averages else ():
        parameter.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad, op=dist.ReduceOp.AVG))


def verify_tokens(**options):
    ids = torch.randint(30, (2, 8), generator=torch.Generator().manual_seed(0))
    return proved_plan(
        partial(contextual, **options), tokens, (ids,), "cp=2", loss_fn=lambda out, ids: out.square().mean()
    )


def test_tokens_in_zig_zag_order_are_right():
    report = verify_tokens()
    assert report.first is None, str(report)
    assert any("held in another order" in note for note in report.notes)
    assert {row.verdict for row in report.rows if row.tensor == "output" and row.module} <= {"rounding", "exact"}


def test_a_fault_behind_tokens_in_zig_zag_order_is_named():
    report = verify_tokens(doubled=True)
    assert (report.first.module, report.first.tensor) == ("first", "output"), str(report)
    report = verify_tokens(averages=False)
    assert (report.first.kind, report.first.tensor) == ("gradient", "weight"), str(report)
    assert "parts of an average over cp" in report.first.sentence


def test_parts_that_are_swapped_are_no_order_of_their_own():
    report = verify_tokens(cut=lambda ids: ids.chunk(2, 1)[1 - dist.get_rank()])
    assert not any("held in another order" in note for note in report.notes)


class Gated(nn.Module):
    """A projection that starts at zero, as adaLN's gates and LoRA's B do."""

    def __init__(self, zero=True):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        if zero:
            nn.init.zeros_(self.down.weight)

    def forward(self, ids):
        x = self.embed(ids)
        return self.norm(x + self.down(torch.relu(self.up(x))))


def split_by_hand(model, mesh, reduce=True, anew=False):
    for owner, name, dim in ((model.up, "weight", 0), (model.up, "bias", 0), (model.down, "weight", 1)):
        take(owner, name, dim, mesh.get_local_rank(), 2)
    if reduce:
        model.up.register_forward_pre_hook(lambda module, args: (Enter.apply(args[0], None),))
        model.down.register_forward_hook(lambda module, args, output: Leave.apply(output, None))
    if anew:
        model.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)


def gated(**options):
    return proved_plan(partial(split_by_hand, **options), Gated, (IDS,), "tp=2")


IDS = torch.tensor([[0, 1, 5], [7, 1, 2]])


@pytest.mark.parametrize("anew", [False, True])
def test_a_fault_behind_zeros_is_found(anew):
    """Values that the ranks make by themselves, those of a norm, stay."""
    report = right(gated(anew=anew))
    unseen = "a fault may hide behind norm.bias, norm.weight: of one value, which ranks make anew"
    assert (report.notes[-1] == unseen) is anew
    assert "rows 3 to 4, 6, 8 to 11 of embed.weight were never looked up: a fault there is not seen" in report.notes
    wrong = gated(reduce=False, anew=anew)
    assert (wrong.first.module, wrong.first.tensor) == ("down", "output")
    assert anew or "parts of a sum over tp" in wrong.first.sentence


def test_a_fault_behind_ones_is_found():
    def scaled_once_more(model, mesh):
        split_by_hand(model, mesh)
        model.norm.weight.data.copy_(model.norm.weight.data.roll(mesh.get_local_rank()))

    report = proved_plan(scaled_once_more, Gated, (IDS,), "tp=2")
    assert (report.first.module, report.first.tensor) == ("norm", "weight")


def test_a_fault_behind_zeros_is_found_in_a_step_of_ones_own():
    report = right(proved_step(split_by_hand, Gated, IDS, "tp=2"))
    assert any("rows 3 to 4, 6, 8 to 11 of embed.weight were never looked up" in note for note in report.notes)
    assert not proved_step(partial(split_by_hand, reduce=False), Gated, IDS, "tp=2").ok


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_that_draws_other_masks_is_found(use_reentrant):
    x = torch.randn(ROWS, WIDTH, requires_grad=use_reentrant)

    def report(**options):
        return proved_plan(ddp, lambda: Dropping(WIDTH, use_reentrant=use_reentrant, **options), (x,))

    assert report().ok, report()
    wrong = report(preserve_rng_state=False)
    assert (wrong.first.module, wrong.first.kind) == ("drop", "random")
    expected = "backward computes it again with other random numbers, on one device and ranks 0-1"
    assert wrong.first.sentence == expected


class Later(Dropping):
    """Restores the generator in its first step only."""

    def forward(self, x):
        out = super().forward(x)
        self.options["preserve_rng_state"] = False
        return out


@pytest.mark.parametrize("steps", [1, 2])
def test_a_recomputation_that_draws_other_masks_in_the_second_step_is_found(steps):
    def model():
        return nn.Sequential(Dropping(WIDTH), Later(WIDTH))

    report = sim.verify_plan(model, (torch.randn(ROWS, WIDTH),), "dp=2", parallelize=ddp, steps=steps)
    assert report.ok == (steps == 1), report
    if steps == 2:
        assert (report.first.module, report.first.tensor) == ("1.drop", "bernoulli in step 2"), report


def test_a_mask_that_nothing_draws_again_is_not_the_one_that_differs():
    def model():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), Dropping(WIDTH, preserve_rng_state=False))

    x = torch.randn(ROWS, WIDTH)
    report = sim.verify_plan(model, (x,), "dp=2", parallelize=ddp)
    assert (report.first.module, report.first.kind) == ("2.drop", "random"), report


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_dropout_of_the_same_shape_before_a_checkpoint_is_not_to_blame(use_reentrant, step):
    def model():
        first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), Inline())
        return nn.Sequential(first, Inline(use_reentrant=use_reentrant), nn.Dropout(0.5))

    x = torch.randn(ROWS, WIDTH)
    if step:
        report = sim.verify_step(lambda model, x: model(x).square().mean(), model, x, "dp=2", steps=1)
    else:
        report = sim.verify_plan(model, (x,), "dp=2", parallelize=ddp)
    assert (report.first.kind, report.first.module.partition(".")[0]) == ("random", "1"), report


class Inline(nn.Module):
    """Drops without a module of its own, in a checkpoint or not."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, x):
        if self.options:
            return checkpoint(lambda x: F.dropout(torch.tanh(x), 0.5), x, preserve_rng_state=False, **self.options)
        return F.dropout(x, 0.5)


@pytest.mark.parametrize("restored", [True, False])
def test_recomputations_of_dtensors_draw_the_same_masks(restored):
    def wrapped(model, mesh):
        styles = {"layer": ColwiseParallel(use_local_output=False), "last": RowwiseParallel()}
        model.options["preserve_rng_state"] = restored
        return parallelize_module(model, mesh, styles)

    class Two(Dropping):
        def __init__(self):
            super().__init__(WIDTH)
            self.last = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.last(super().forward(x))

    report = sim.verify_plan(Two, (torch.randn(ROWS, WIDTH),), "tp=2", parallelize=wrapped)
    assert report.ok == restored, report
    if not restored:
        assert report.first.sentence == "backward computes it again with other random numbers, on ranks 0-1"


def test_random_numbers_in_backward_alone_are_no_recomputation():
    def noisy(model, mesh):
        model = DistributedDataParallel(model)
        model.module.layer.register_full_backward_hook(
            lambda module, given, grad: (torch.rand(ROWS // 2, WIDTH) * 0 + given[0],)
        )
        return model

    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    right(proved_plan(noisy, partial(Dropping, WIDTH), (x,)))


def test_parts_of_what_one_device_chose_are_no_other_choice():
    given = torch.tensor([[3.0, 2.0, 2.0], [1.0, 4.0, 4.0]])

    def choice(rows, indices):
        return {("gate", "topk", 0): Choice(rows, torch.tensor(indices), 1, True)}

    mine, mesh = choice(given, [[0, 1], [1, 2]]), Layout((2,), ("dp",))
    same = [choice(given[:1], [[0, 1]]), choice(given[1:], [[1, 2]])]
    assert free_choices(mine, same, mesh, lambda key, rows: 1e-9) == {}
    other = [choice(given[:1], [[0, 2]]), choice(given[1:], [[1, 2]])]
    (found,) = free_choices(mine, other, mesh, lambda key, rows: 1e-9).values()
    assert found.tolist() == [[0, 2], [1, 2]]


class Routed(nn.Module):
    """Experts of which a mask's rows take one, and a layer that is frozen."""

    def __init__(self, keeps=True):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen, self.keeps = nn.Linear(WIDTH, WIDTH).requires_grad_(False), keeps

    def forward(self, x, mask):
        x = self.frozen(x)
        kept = torch.where(mask[..., None], self.experts[0](x), x) if self.keeps else self.experts[0](x)
        return kept if mask.all() else kept + self.experts[1](x)


ROUTED = (
    torch.randn(ROWS, 4, WIDTH, generator=torch.Generator().manual_seed(0)),
    torch.ones(ROWS, 4, dtype=torch.bool),
)


def routed(keeps=True, **options):
    def parallel(model, mesh):
        model.keeps = keeps

    return sim.verify_plan(Routed, ROUTED, "tp=2", parallelize=parallel, **options)


def test_experts_that_no_input_reaches_and_masks_of_one_value_are_named():
    step = sim.verify_step(squared, Routed, ROUTED, "tp=2", steps=1)
    for report in (routed(steps=1), step):
        assert report.ok, report
        assert "no input reaches experts.1 to experts.2: a fault there is not seen" in report.notes, report.notes
        assert report.notes[-1] == f"a fault may hide behind input {1 if report is step else 'mask'}: of one value"


def test_a_second_step_of_a_plan_has_other_inputs():
    report = right(routed())
    assert report.notes[0] == "a second step (rows in another order, input mask masks ends of rows) is compared"
    assert "no input reaches experts.2: a fault there is not seen" in report.notes
    first = routed(keeps=False).first
    assert (first.module, first.tensor) == ("", "output in step 2"), first
    assert routed(keeps=False, steps=1).ok
