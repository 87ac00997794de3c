"""Proofs that were once silent, or said what is not so: vacuous ones, wrong blame, and right models called wrong."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from zoo_kit import Enter, Leave, Net, axis, draw, tokens

import sim
from sim.prove import faults
from sim.prove.record import ModuleRecorder
from sim.prove.report import Report, ReportRow
from sim.prove.runs import converted

X = draw(4, 16)
ROWS = {"input_layouts": [("dp", "None")]}


def verify(model, parallelize, mesh="tp=2", inputs=(X,), **options):
    return sim.verify_plan(model, inputs, mesh, parallelize=parallelize, **{"optimizer_fn": None, **options})


def nothing(model, mesh):
    """Leave the model as it is."""


def lm_loss(logits, ids):
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Two(nn.Module):
    """Two layers, and between them one that is often split."""

    def __init__(self, finish=lambda y: y):
        super().__init__()
        self.inp, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.finish = finish

    def forward(self, x):
        return self.finish(self.down(torch.relu(self.up(self.inp(x)))))


# -- proofs of nothing -------------------------------------------------------------------------------------------------


def test_nan_on_one_device_proves_nothing():
    with pytest.raises(ValueError, match=r"one device computes nan, first seen in down\.output"):
        verify(lambda: Two().apply(_spoil), nothing)


def _spoil(module):
    if getattr(module, "in_features", 0) == 32:
        nn.init.constant_(module.bias, float("nan"))


@pytest.mark.parametrize(
    ("finish", "seen"), [(lambda y: (each for each in y), "a generator"), (lambda y: None, "a NoneType")]
)
def test_a_model_in_whose_output_no_tensor_is_seen(finish, seen):
    with pytest.raises(TypeError, match=f"no tensors are seen in what the model returned, {seen}"):
        verify(lambda: Two(finish), nothing)


def test_a_report_says_that_there_were_no_gradients():
    note = "no gradients were compared, as nothing that the model returns can be differentiated"
    unused = "nothing uses the axis tp: the ranks along it all compute the same"
    chosen = verify(lambda: Two(lambda y: y.argmax(-1)), nothing, steps=1)
    assert chosen.notes == (note, unused)
    detached = verify(Two, nothing, steps=1, loss_fn=lambda y, x: y.detach().sum())
    assert detached.notes == ("no gradients were compared, as the loss cannot be differentiated", unused)
    for report in (chosen, detached):
        assert (report.ok, [row.place for row in report.not_proved]) == (False, ["weights"])
        assert str(report).startswith("it is not proved that")
    assert verify(Two, nothing).notes[-1] == unused  # the one before it names units that relu cuts off
    frozen = verify(lambda: Two().requires_grad_(False), nothing, steps=1, loss_fn=lambda y, x: y.sum())
    assert (frozen.ok, frozen.notes) == (True, (unused,))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_an_output_in_another_container_is_not_proved(is_frozen):
    def packed(model, mesh):
        model.forward = lambda x: (Two.forward(model, x), None)

    report = verify(lambda: Two().requires_grad_(not is_frozen), packed, steps=1)
    assert (report.ok, [row.place for row in report.not_proved]) == (False, ["weights"]), str(report)


# -- complex numbers ---------------------------------------------------------------------------------------------------


class Turned(nn.Module):
    """Turns pairs of numbers by a complex table."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.register_buffer("turns", torch.polar(torch.ones(4, 2), torch.arange(8.0).view(4, 2)))

    def forward(self, x):
        pairs = torch.view_as_complex(self.up(x).view(4, -1, 2, 2))  # heads of two pairs
        return self.finish(pairs * self.turns[:, None])

    def finish(self, pairs):
        return torch.view_as_real(pairs).flatten(1)


def test_complex_buffers_keep_their_imaginary_parts():
    assert converted(Turned(), torch.float64).turns.dtype == torch.complex128
    assert converted(Turned(), torch.float32).turns.imag.abs().max() > 0.5
    colwise = {"up": ColwiseParallel()}
    assert verify(Turned, lambda m, mesh: parallelize_module(m, mesh, colwise)).ok

    def turned_back(model, mesh):
        model.turns = model.turns.conj()

    assert not verify(Turned, turned_back).ok


def test_complex_outputs_are_compared_within_rounding():
    class Waves(Turned):
        def finish(self, pairs):
            return torch.fft.fft(pairs.flatten(1))

    assert verify(Waves, nothing).ok
    report = verify(Waves, lambda m, mesh: m.register_forward_hook(lambda a, b, y: y * 1j) and None)
    assert report.first.place == "the model's output"


# -- blame and hints ---------------------------------------------------------------------------------------------------


def test_shards_of_an_axis_that_leave_out_the_axis_of_the_data():
    def wrap(model, mesh):
        for block in model.blocks:
            fully_shard(block, mesh=mesh["tp"])
        fully_shard(model, mesh=mesh["tp"])

    report = verify(Net, wrap, "dp=2,tp=2", (tokens(),), loss_fn=lm_loss, **ROWS)
    assert (report.first.kind, report.first.module) == ("gradient", "embed")
    assert "over dp: nothing adds up the gradients" in report.first.sentence
    assert report.first.error > report.first.bound


def test_input_layouts_are_not_proposed_where_the_ranks_hold_parts():
    both = {"up": ColwiseParallel(), "down": ColwiseParallel()}
    first = verify(Two, lambda m, mesh: parallelize_module(m, mesh, both)).first
    assert (first.module, first.tensor, first.suggestion) == ("down", "input", "declare ('None', 'tp')")


def test_input_layouts_are_one_of_the_ways_where_the_ranks_hold_the_whole():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, x):
            return self.out(self.norm(x))

    plan = {"norm": SequenceParallel(sequence_dim=0, use_local_output=True)}
    first = verify(Normed, lambda m, mesh: parallelize_module(m, mesh, plan)).first
    assert first.place == "norm.input"
    assert first.suggestion.startswith("declare ('None', 'None'); or split it before; or give each rank its part")


@pytest.mark.parametrize("styled", [True, False], ids=["styles", "by hand"])
def test_a_rank_that_raises_says_what_it_was_given_in_parts(styled):
    def forgetful(model, mesh):
        if styled:
            return parallelize_module(model, mesh, {"up": ColwiseParallel()})
        rank = mesh.get_local_rank()
        model.up.weight = nn.Parameter(model.up.weight.detach().chunk(2)[rank].clone())
        model.up.bias = nn.Parameter(model.up.bias.detach().chunk(2)[rank].clone())
        return model

    with pytest.raises(sim.RankFailed, match=r"down\.input: \(4, 16\) of \(4, 32\)") as caught:
        verify(Two, forgetful)
    assert "was in module 'down', forward" in str(caught.value)


# -- experts -----------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Each token goes through the expert that a router chooses; a rank may have some of them only."""

    def __init__(self):
        super().__init__()
        self.inp, self.router = nn.Linear(16, 16), nn.Linear(16, 4, bias=False)
        self.each = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.mine = range(4)

    def forward(self, x):
        x = self.inp(x)
        weights, chosen = self.router(x).softmax(-1).max(-1)
        x, weights = self.enter(x), self.enter(weights)
        y = torch.zeros_like(x)
        for expert in self.mine:
            rows = (chosen == expert).nonzero()[:, 0]
            y = y.index_add(0, rows, self.each[expert](x[rows]) * weights[rows, None])
        return self.leave(y)

    def enter(self, x):
        return x

    def leave(self, y):
        return y


def own_experts(model, mesh, change=lambda expert: None):
    rank, size, group = axis(mesh, "ep")
    model.mine = range(rank * 4 // size, (rank + 1) * 4 // size)
    for expert in range(4):
        if expert not in model.mine:
            model.each[expert] = None
    model.enter, model.leave = lambda x: Enter.apply(x, group), lambda y: Leave.apply(y, group)
    change(model.each[model.mine[0]])


def test_experts_that_only_their_ranks_have_are_right():
    report = verify(Experts, own_experts, "ep=2", (draw(12, 16),), optimizer_fn=True)
    assert report.ok, report
    assert "each.0 on rank 0, each.1 on rank 0, each.2 on rank 1, each.3 on rank 1" in report.notes[-1]
    compared = {row.place for row in report.rows if row.kind in ("gradient", "update")}
    assert {"the gradient of each.0.weight", "each.3.weight"} <= compared


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda expert: expert.weight.register_hook(lambda grad: grad / 2), "gradient", "rank 0 alone has it"),
        (lambda expert: nn.init.ones_(expert.weight), "parameter", "rank 0 alone has it, and not with its values"),
    ],
    ids=["gradient", "values"],
)
def test_what_is_wrong_with_experts_that_only_their_ranks_have(change, kind, words):
    report = verify(Experts, lambda m, mesh: own_experts(m, mesh, change), "ep=2", (draw(12, 16),))
    assert (report.first.kind, report.first.module, report.first.tensor) == (kind, "each.0", "weight")
    assert words in report.first.sentence


def test_a_parameter_that_a_rank_lacks_where_it_calls_the_module():
    def biased_on_one(model, mesh):
        if mesh.get_local_rank() == 1:
            model.down.bias = None

    report = verify(lambda: Two().apply(_unbiased), biased_on_one)
    assert (report.first.kind, report.first.place) == ("parameter", "down.bias")
    assert report.first.sentence == "rank 1 has no such parameter"


def _unbiased(module):
    if getattr(module, "bias", None) is not None:
        nn.init.zeros_(module.bias)


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "changed", "error", "message"),
    [
        (lambda: nn.LazyLinear(4), {}, ValueError, "parameters of the model have no shape yet: weight, bias"),
        (Two, {"optimizer_fn": lambda params: None}, TypeError, "optimizer_fn returned no optimizer"),
        (Two, {"seed": "1"}, TypeError, "seed is a str"),
        (
            Two,
            {"inputs": (draw(4, 8),)},
            ValueError,
            r"the model raises RuntimeError on one device: .*\n  in module 'inp'",
        ),
        (Two, {"inputs": (X, X)}, ValueError, "the model raises TypeError on one device: .* positional argument"),
    ],
)
def test_messages(model, changed, error, message):
    with pytest.raises(error, match=message):
        verify(model, nothing, **changed)


def test_a_row_split_layer_is_right_still():
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    assert verify(Two, lambda m, mesh: parallelize_module(m, mesh, styles), optimizer_fn=True).ok


def test_a_model_that_computes_in_float32_within_has_the_bounds_of_float64():
    def model():
        return Two(lambda y: y.float().softmax(-1).to(y.dtype))

    report = verify(model, nothing)
    assert report.ok
    assert max(row.bound for row in report.rows) < 1e-11
    off = verify(model, lambda m, mesh: m.up.register_forward_hook(lambda a, b, y: y + 1e-9) and None)
    assert off.first.place == "up.output"


def test_proofs_leave_no_tensors_behind():
    def alive():
        gc.collect()
        return sum(type(each) is ModuleRecorder for each in gc.get_objects())

    before = alive()
    assert verify(Two, nothing).ok
    assert not verify(Two, lambda m, mesh: m.up.register_forward_hook(lambda a, b, y: y * 2) and None).ok
    assert alive() == before


# -- no failing diagnosis loses the report -----------------------------------------------------------------------------


def _uneven():
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 3))


def _uneven_with_fault(model, mesh):
    with torch.no_grad():
        model[0].weight.mul_(1 + 0.5 * mesh.get_local_rank())
    return fully_shard(model, mesh=mesh)


def test_uneven_shards_with_a_fault_are_reported():
    report = verify(_uneven, _uneven_with_fault, "dp=2", inputs=(draw(4, 7),))
    assert report.first.place == "0.weight"
    assert verify(_uneven, lambda model, mesh: fully_shard(model, mesh=mesh), "dp=2", inputs=(draw(4, 7),)).ok


def test_a_diagnosis_that_fails_leaves_the_place(monkeypatch):
    def fails(evidence, splits):
        raise RuntimeError("of its own")

    monkeypatch.setattr(faults, "_CHECKS", (fails,))
    with pytest.warns(UserWarning, match=r"'fails' failed, and was left out: RuntimeError\('of its own'\)"):
        report = verify(_uneven, _uneven_with_fault, "dp=2", inputs=(draw(4, 7),))
    assert report.first.place == "0.weight"


# -- bounds that are too wide prove nothing ----------------------------------------------------------------------------


class Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x / 2
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Counted(nn.Module):
    """Grouped products of counted tokens, and an auxiliary loss of shares and probabilities."""

    group = None

    def __init__(self):
        super().__init__()
        self.router, self.weight = nn.Linear(8, 4, bias=False), nn.Parameter(torch.randn(4, 8, 8) / 3)

    def forward(self, x):
        chances = self.router(x).softmax(-1)
        best, ids = chances.topk(2, -1)
        order = ids.flatten().argsort(stable=True)
        counts = torch.histc(ids.flatten().float(), bins=4, min=0, max=3)
        ends = counts.cumsum(0).to(torch.int32)
        made = torch._grouped_mm(x.repeat_interleave(2, 0)[order], self.weight, offs=ends)
        made = torch.zeros_like(made).index_copy(0, order, made).view(-1, 2, 8)
        share, chance = counts / ids.numel(), chances.mean(0)
        if self.group is not None:
            share, chance = Mean.apply(share, self.group), Mean.apply(chance, self.group)
        return (made * best[..., None]).sum(1).square().mean() + 0.04 * (share * chance).sum()


@pytest.mark.parametrize("is_local", [False, True], ids=["of all tokens", "of local tokens"])
def test_an_auxiliary_loss_of_local_tokens_is_found(is_local):
    def parallel(model, mesh):
        model.group = None if is_local else mesh.get_group()
        return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())

    report = verify(Counted, parallel, "dp=2", inputs=(draw(24, 8),), **ROWS)
    assert report.ok is not is_local
    if is_local:
        assert report.first.tensor == "output"
        assert report.first.bound < 1e-7 < 1e-3 < report.first.error


class Tied(nn.Module):
    """Two scores that rounding alone tells apart, and a large difference by which is chosen."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        scores = self.up(x)
        return torch.where(scores * 3 / 3 > scores, 1.0, -1.0).to(x.dtype) * scores


def test_a_bound_that_is_as_large_as_the_values_proves_nothing():
    report = verify(Tied, nothing, inputs=(draw(64, 8),))
    assert report.bug is None
    assert not report.ok
    assert report.first is report.not_proved[0]
    assert report.first.place == "the model's output"
    assert str(report).startswith("it is not proved that the model on tp=2 computes")
    with pytest.raises(AssertionError, match="it is not proved that"):
        report.raise_if_bug()


class Flipped(Tied):
    """The scores themselves, with gradients whose signs rounding decides."""

    def forward(self, x):
        scores = self.up(x)
        return scores.detach() + torch.where(scores * 3 / 3 > scores, 1.0, -1.0) * (scores - scores.detach())


def by_ddp(model, mesh):
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())


def test_a_gradient_of_a_mean_over_ranks_has_a_bound_that_is_told():
    """Gradients of activations are twice those of one device here, and so are their bounds."""
    options = {"loss_fn": lambda output, x: output.mean(), **ROWS}
    report = verify(Flipped, by_ddp, "dp=2", (draw(64, 8),), **options)
    assert any(note.startswith("gradients of activations are 2 times") for note in report.notes)
    assert "the gradient of up.output" in {row.place for row in report.not_proved}, str(report)


class Rescaled(nn.Module):
    """A bias whose gradient is zero but for rounding."""

    def __init__(self):
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 2)

    def forward(self, x):
        return self.out(self.norm(self.inp(x)))


def test_what_a_second_step_leaves_open_is_told():
    def signed(parameters):
        return torch.optim.AdamW(parameters, lr=0.1, eps=1e-30)

    report = verify(Rescaled, nothing, inputs=(draw(12, 8),), optimizer_fn=signed)
    assert report.ok, str(report)
    assert any("is compared, but for inp.output in step 2" in note for note in report.notes), report.notes


class Heads(nn.Module):
    """Two heads that are made alike, so that their outputs have the same values."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 4)])
        self.heads[1].load_state_dict(self.heads[0].state_dict())
        self.order = [0, 1]

    def forward(self, x):
        return tuple(self.heads[at](x) for at in self.order)


@pytest.mark.parametrize("swaps", [False, True])
def test_swapped_outputs_of_the_same_values_are_found_by_their_gradients(swaps):
    def parallel(model, mesh):
        model.order = [1, 0] if swaps else [0, 1]

    report = verify(Heads, parallel)
    assert report.ok is not swaps, str(report)
    if swaps:
        assert report.first.place.startswith("the gradient of heads."), report.first


@pytest.mark.parametrize("kind", ["parameter", "buffer", "forward", "random", "gradient", "update"])
def test_a_report_that_is_not_ok_has_a_first_row(kind):
    fine = [ReportRow("", "x", kind, verdict=verdict) for verdict in ("exact", "rounding", "pending", "private")]
    open_, wrong = (ReportRow("", "y", kind, verdict=verdict) for verdict in ("not proved", "bug"))
    for rows, first in [(fine, None), ([*fine, open_], open_), ([open_, *fine, wrong], wrong), ([wrong, open_], wrong)]:
        report = Report(tuple(rows), "dp=2")
        assert report.first is first
        assert report.ok is (first is None)
        assert first is None or str(first) in str(report).replace("\n  ", "\n")


# -- buffers that a step changes ---------------------------------------------------------------------------------------


class Averaged(nn.Module):
    """A layer with a moving average of its weight, taken when the step before it has changed the weight."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(16, 4)
        self.register_buffer("average", self.inp.weight.detach().clone())
        self.inp.weight.register_post_accumulate_grad_hook(self.follow)
        self.active = True

    def follow(self, weight):
        if self.active:
            self.average.lerp_(weight.detach() - weight.grad, 0.5)

    def forward(self, x):
        return self.inp(x)


@pytest.mark.parametrize("everywhere", [True, False])
def test_buffers_are_compared_after_the_step(everywhere):
    def alone(model, mesh):
        model.active = everywhere or mesh.get_local_rank() == 0

    report = verify(Averaged, alone, optimizer_fn=True)
    assert report.ok is everywhere, str(report)
    rows = {row.tensor: row.verdict for row in report.rows if row.kind == "buffer"}
    assert rows.keys() >= {"average", "average after step 1"}
    if not everywhere:
        assert report.first.place == "average after step 1"


class Counting(nn.Module):
    """Counts rows in forward, by their sign, and keeps a table that nobody changes."""

    def __init__(self, norm=None):
        super().__init__()
        self.inp, self.norm = nn.Linear(16, 4), norm or nn.Identity()
        self.register_buffer("counts", torch.zeros(2))
        self.register_buffer("begin", torch.zeros(1))
        self.reduces = False

    def forward(self, x):
        if torch.is_grad_enabled():
            counts = torch.bincount((x.detach().sum(-1) > 0).long(), minlength=2).to(self.counts.dtype)
            if self.reduces:
                dist.all_reduce(counts)
            self.counts += counts
        return self.norm((self.inp(x)[:, :, None] + x.view(-1, 4, 4)).sin()).tanh().sum(-1)


def averaged(model, mesh, reduces=True, begin=0):
    model.reduces, model.begin.data = reduces, model.begin + begin * mesh.get_rank()
    return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)


def counted(norm=lambda: None, **options):
    how = {"input_layouts": [("dp",)], "loss_fn": lambda y, x: y.square().mean()}
    return verify(lambda: Counting(norm()), partial(averaged, **options), mesh="dp=2", **how)


def test_counts_of_each_rank_s_own_rows_are_a_bug():
    assert counted().ok, str(counted())
    wrong = counted(reduces=False)
    assert (wrong.first.place, wrong.first.kind) == ("counts after forward", "buffer")
    assert "parts of a sum over dp" in wrong.first.sentence


def test_what_ranks_make_for_themselves_and_nobody_changes_is_private():
    report = counted(begin=1)
    assert report.ok, str(report)
    assert "the ranks' own, which no step changes: begin" in report.notes


def test_statistics_of_each_rank_s_own_rows_are_private():
    report = counted(lambda: nn.InstanceNorm1d(4, track_running_stats=True))
    assert report.ok, str(report)
    assert {row.verdict for row in report.rows if row.tensor == "running_mean after forward"} == {"private"}
    assert "of each rank's own rows, as nothing synchronises them: the buffers of norm" in report.notes
