"""verify_plan: silent where a parallel model is right, and at the place where it is wrong otherwise."""

from __future__ import annotations

import functools
import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from zoo_kit import Enter, Leave, Mlp, axis, ddp, draw, made_of, right, rows, same, split_mlp, squared, take

import sim
from hyper_parallel import checkpoint_blocks, fully_shard
from hyper_parallel.core.shard.sharding_plan import ShardingPlan
from hyper_parallel.platform.cpu import CpuPlatform
from sim.prove import faults
from sim.prove.runs import converted
from sim.prove.steps.watch import LoopWatch

pytestmark = pytest.mark.tier("test")

STYLES = {"up": ColwiseParallel, "down": RowwiseParallel}
X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))


@made_of(lambda dropout=0.0: {"norm": nn.LayerNorm(8), "mlp": Mlp(8, 16, dropout=dropout)})
def block(self, x):
    """Norm and a feed-forward, added back."""
    return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self, blocks=2, dropout=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(block(dropout) for _ in range(blocks))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Finished(Net):
    """A function of what a net returns."""

    def __init__(self, finish):
        super().__init__()
        self.finish = finish

    def forward(self, x):
        return self.finish(super().forward(x))


def split(model, mesh, *, enter=True, leave=True, only=None):
    """Megatron by hand on plain tensors, with any of its parts left out."""
    for index, block in enumerate(model.blocks):
        split_mlp(block.mlp, *axis(mesh))
        if only in (None, index):
            block.mlp.enter = block.mlp.enter if enter else same
            block.mlp.leave = block.mlp.leave if leave else same


def tensor_parallel(model, mesh):
    plan = {f"blocks.{at}.mlp.{name}": style() for at in range(2) for name, style in STYLES.items()}
    parallelize_module(model, mesh["tp"] if mesh.ndim > 1 else mesh, plan)


def verify(parallelize=tensor_parallel, mesh="tp=2", model=Net, inputs=(X,), **options):
    report = sim.verify_plan(model, inputs, mesh, parallelize=parallelize, **options)
    assert all(len(line) <= 120 for line in report.table(verbose=True).splitlines())
    assert (report.first is None) == report.ok
    return report


def nothing(model, mesh):
    """Leave the model as it is."""


def place(report):
    assert not report.ok, str(report)
    return report.first.kind, report.first.module, report.first.tensor


# -- right models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_torch_styles_are_right(dtype):
    report = right(verify(dtype=dtype))
    kinds = {row.kind for row in report.rows}
    assert kinds == {"parameter", "forward", "gradient", "update"}
    assert {row.verdict for row in report.rows} <= {"exact", "rounding"}
    assert "rounding" in {row.verdict for row in report.rows}


def test_hand_written_code_is_right_and_its_sums_are_said_to_be_pending():
    report = right(verify(split))
    pending = [row for row in report.rows if row.verdict == "pending" and row.kind == "forward"]
    assert {row.module for row in pending} == {"blocks.0.mlp.down", "blocks.1.mlp.down"}
    assert all("parts of a sum over tp" in row.sentence for row in pending)


def fsdp(model, mesh):
    for block in model.blocks:
        fsdp2(block, mesh=mesh)
    fsdp2(model, mesh=mesh)


# -- wrong models --------------------------------------------------------------------------------------------------


def test_a_bias_of_which_every_rank_holds_a_share():
    """Forward and its gradients are right; but each share takes the whole step, so that their sum goes twice as far."""

    def shared(model, mesh):
        split(model, mesh)
        for block in model.blocks:
            del block.mlp.down.forward
            block.mlp.down.bias.data.div_(mesh.size())

    report = verify(shared, optimizer_fn=lambda p: torch.optim.SGD(p, lr=0.1))
    assert place(report) == ("update", "blocks.0.mlp.down", "bias")
    assert "each rank holds a share of it" in report.first.sentence


def test_a_dropout_mask_that_differs_where_it_should_be_the_same():
    class Dropped(Net):
        def __init__(self):
            super().__init__()
            self.last = nn.Dropout(0.5)

        def forward(self, x):
            return self.last(super().forward(x))

    def seeded(model, mesh):
        split(model, mesh)
        torch.manual_seed(7 + mesh.get_local_rank())

    report = verify(seeded, model=Dropped)
    assert place(report)[:2] == ("random", "last")
    assert "draws different numbers on ranks 0-1, which hold the same over tp" in report.first.sentence


@pytest.mark.parametrize("wrap", [fsdp, ddp])
def test_dropout_in_data_parallel_models_is_right(wrap):
    report = right(verify(wrap, "dp=2", model=lambda: Net(dropout=0.5), input_layouts=[("dp",)]))
    assert any(row.kind == "random" for row in report.rows)


def test_dropout_that_draws_from_its_own_generator_on_shards_is_right():
    def seeded(model, mesh):
        split(model, mesh)
        torch.manual_seed(7 + mesh.get_local_rank())

    right(verify(seeded, model=lambda: Net(dropout=0.5)))


def test_declared_plain_tensors_are_held_to_their_word():
    truth = {
        "blocks.*.mlp.up.output": ("None", "None", "tp"),
        "blocks.*.mlp.up.weight": ("tp", "None"),
        "output": ("None",),
    }
    assert verify(split, declared=truth).ok
    report = verify(split, declared={**truth, "blocks.1.mlp.up.output": ("None", "tp", "None")})
    assert place(report) == ("forward", "blocks.1.mlp.up", "output")
    assert report.first.declared == "(-, tp, -)"
    assert report.first.found == "(-, -, tp)"
    assert "('None', 'None', 'tp')" in report.first.suggestion


def test_a_rank_that_raises_names_its_module():
    def broken(model, mesh):
        def forward(x):
            if dist.get_rank() == 1:
                raise RuntimeError("out of memory")
            return x

        model.blocks[1].mlp.drop.forward = forward

    with pytest.raises(RuntimeError, match=r"out of memory(.|\n)*rank 1 was in module 'blocks.1.mlp.drop', forward"):
        verify(broken)


def test_a_parameter_that_is_lost():
    def lose(model, mesh):
        model.head.bias = None

    report = verify(lose, declared={"head.weight": ("None", "None")})
    assert place(report) == ("parameter", "head", "bias")
    assert "no parameter of that name" in report.first.sentence


def test_a_parameter_that_a_rank_lacks_where_it_calls_the_module():
    def unbiased(module):
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)

    def biased_on_one(model, mesh):
        if mesh.get_local_rank() == 1:
            model.blocks[1].mlp.down.bias = None

    report = verify(biased_on_one, model=lambda: Net().apply(unbiased), optimizer_fn=None)
    assert place(report) == ("parameter", "blocks.1.mlp.down", "bias")
    assert report.first.sentence == "rank 1 has no such parameter"


@pytest.mark.parametrize("styled", [True, False], ids=["styles", "by hand"])
def test_a_rank_that_raises_says_what_it_was_given_in_parts(styled):
    def forgetful(model, mesh):
        if styled:
            parallelize_module(model, mesh, {"blocks.0.mlp.up": ColwiseParallel()})
            return
        for name in ("weight", "bias"):
            take(model.blocks[0].mlp.up, name, 0, mesh.get_local_rank(), 2)

    with pytest.raises(sim.RankFailed, match=r"blocks\.0\.mlp\.down\.input: \(4, 6, 8\) of \(4, 6, 16\)") as caught:
        verify(forgetful, optimizer_fn=None)
    assert "was in module 'blocks.0.mlp.down', forward" in str(caught.value)


def uneven():
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 3))


def uneven_with_fault(model, mesh):
    with torch.no_grad():
        model[0].weight.mul_(1 + 0.5 * mesh.get_local_rank())
    return fsdp2(model, mesh=mesh)


def test_uneven_shards_with_a_fault_are_reported():
    report = verify(uneven_with_fault, "dp=2", uneven, (draw(4, 7),), optimizer_fn=None)
    assert report.first.place == "0.weight"
    assert verify(lambda model, mesh: fsdp2(model, mesh=mesh), "dp=2", uneven, (draw(4, 7),), optimizer_fn=None).ok


def test_a_diagnosis_that_fails_leaves_the_place(monkeypatch):
    def fails(evidence, splits):
        raise RuntimeError("of its own")

    monkeypatch.setattr(faults, "_CHECKS", (fails,))
    with pytest.warns(UserWarning, match=r"'fails' failed, and was left out: RuntimeError\('of its own'\)"):
        report = verify(uneven_with_fault, "dp=2", uneven, (draw(4, 7),), optimizer_fn=None)
    assert report.first.place == "0.weight"


class Heads(nn.Module):
    """Two heads that are made alike, so that their outputs have the same values."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])
        self.heads[1].load_state_dict(self.heads[0].state_dict())
        self.order = [0, 1]

    def forward(self, x):
        return tuple(self.heads[at](x) for at in self.order)


@pytest.mark.parametrize("swaps", [False, True])
def test_swapped_outputs_of_the_same_values_are_found_by_their_gradients(swaps):
    def parallel(model, mesh):
        model.order = [1, 0] if swaps else [0, 1]

    report = verify(parallel, model=Heads, inputs=(X[0],), optimizer_fn=None)
    assert report.ok is not swaps, str(report)
    if swaps:
        assert report.first.place.startswith("the gradient of heads."), report.first


@made_of(lambda: {"heads": 4, "qkv": nn.Linear(8, 24, bias=False), "out": nn.Linear(8, 8, bias=False), "leave": same})
def qkv_attention(self, x):
    q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, 2)).permute(2, 0, 3, 1, 4)
    return self.leave(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


def fused(model, mesh, blocks=True, factor=1.0):
    rank, group = mesh.get_local_rank(), mesh.get_group()
    if blocks:
        whole = model.qkv.weight.detach().unflatten(0, (3, 8))
        model.qkv.weight = nn.Parameter(whole.chunk(2, 1)[rank].flatten(0, 1).clone())
    else:
        take(model.qkv, "weight", 0, rank, 2)
    take(model.out, "weight", 1, rank, 2)
    model.heads = 2
    model.leave = lambda y: Leave.apply(y, group)
    if factor != 1:
        model.qkv.weight.register_hook(lambda grad: grad * factor)


def test_fused_weights_are_right_when_each_of_them_is_split():
    report = right(verify(fused, model=qkv_attention))
    held = [row for row in report.rows if row.module == "qkv" and row.tensor == "weight"]
    assert [row.kind for row in held] == ["parameter", "gradient", "update"]
    assert held[0].verdict == "private"
    assert any("fused weights" in note for note in report.notes)


def test_fused_weights_that_are_split_as_if_they_were_one():
    report = verify(lambda m, mesh: fused(m, mesh, blocks=False), model=qkv_attention)
    assert place(report) == ("forward", "out", "input")


def test_gradients_are_compared_in_the_order_in_which_fused_weights_are_held():
    report = verify(lambda m, mesh: fused(m, mesh, factor=1 + 1e-9), model=qkv_attention)
    assert place(report) == ("gradient", "qkv", "weight")


def test_experts_that_get_other_tokens_on_each_rank_are_right():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(8, 3, bias=False)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.head = nn.Linear(8, 8)

        def forward(self, x):
            x = x.flatten(0, 1)
            weight, index = self.gate(x).softmax(-1).topk(1, -1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = (index[:, 0] == number).nonzero()[:, 0]
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows])
            return self.head(out)

    report = right(verify(ddp, "dp=2", Experts, (X,), input_layouts=[("dp",)], seed=1))
    assert any(row.verdict == "private" and row.module.startswith("experts") for row in report.rows)


@pytest.mark.tier("full")
def test_inputs_by_name_outputs_in_containers_and_losses_of_the_model():
    @made_of(lambda: {"net": Net()})
    def named(self, x, *, target=None, scale=1):
        y = self.net(x) * scale
        return {"y": y, "parts": [y.tanh(), y.mean()]} if target is None else F.mse_loss(y, target)

    target = torch.zeros(4, 6, 5)
    for inputs in ({"x": X, "scale": 2}, {"x": X, "target": target, "scale": 2}):
        layouts = {name: ("dp",) for name in inputs if name != "scale"}
        right(verify(ddp, "dp=2", named, inputs, input_layouts=layouts))
    assert place(verify(lambda m, mesh: None, "dp=2", named, inputs, input_layouts=layouts))[0] == "gradient"


def test_faults_are_found_in_float32_too():
    report = verify(lambda m, mesh: split(m, mesh, enter=False, only=1), dtype=torch.float32)
    assert place(report) == ("gradient", "blocks.1.mlp.up", "input")
    with pytest.raises(AssertionError, match=r"blocks\.1\.mlp\.up"):
        report.raise_if_bug()


# -- plans -----------------------------------------------------------------------------------------------------------

PLAN = {
    "blocks.*.mlp.up.weight": ("tp", "None"),
    "blocks.*.mlp.up.bias": ("tp",),
    "blocks.*.mlp.down.weight": ("None", "tp"),
}
WHOLE = {"**.norm.weight", "**.norm.bias", "**.down.bias", "head.*"}
STREAM = ("dp", "None", "None")


@pytest.mark.tier("full")
def test_rows_given_to_a_plan_that_takes_them_for_one_rank_s_part():
    plan = ShardingPlan(
        plan={**PLAN, **dict.fromkeys(WHOLE, ("None",))}, input_plan={"input": STREAM}, wrap_inputs=True
    )
    assert sim.verify_plan(Net, (X,), "dp=2,tp=2", plan).ok
    report = sim.verify_plan(Net, (X,), "dp=2,tp=2", plan, input_layouts=[(None,)])
    assert place(report)[:2] == ("forward", "")
    assert "the ranks take it for parts of a tensor of shape (8, 6, 8)" in report.first.sentence


# -- what is asked for wrongly ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"parallelize": None}, ValueError, "neither of plan and parallelize is given"),
        ({"model": Net()}, TypeError, "has to make a new model at each call"),
        ({"model": functools.cache(Net)}, ValueError, "returned the same model twice"),
        ({"model": lambda: 3}, TypeError, "model_fn returned a int"),
        ({"inputs": X}, TypeError, "with the comma"),
        ({"inputs": {"y": X}, "input_layouts": {"x": ("tp",)}}, ValueError, "there is no input 'x'"),
        ({"input_layouts": [("tp",), ("tp",)]}, ValueError, "2 layouts for 1 inputs"),
        ({"input_layouts": [("dp",)]}, ValueError, "dp"),
        ({"input_layouts": [("None",) * 3 + ("tp",)]}, ValueError, "does not fit a tensor of shape"),
        ({"declared": {"blocks.7.output": ("tp",)}}, ValueError, "blocks"),
        ({"dtype": torch.int64}, TypeError, "dtype is no floating-point dtype"),
        ({"steps": 0}, ValueError, "steps"),
        ({"mesh": "tp"}, ValueError, "tp"),
        ({"model": lambda: nn.LazyLinear(4)}, ValueError, "parameters of the model have no shape yet: weight, bias"),
        ({"optimizer_fn": lambda params: None}, TypeError, "optimizer_fn returned no optimizer"),
        (
            {"inputs": (draw(4, 6, 7),)},
            ValueError,
            r"the model raises RuntimeError on one device: .*\n  in module 'blocks.0.norm'",
        ),
        ({"inputs": (X, X)}, ValueError, "the model raises TypeError on one device: .* positional argument"),
    ],
)
def test_bad_arguments(options, kind, text):
    with pytest.raises(kind, match=text) as caught:
        verify(**options)
    assert str(caught.value).count("\n") >= 2


def test_a_model_that_is_made_differently_each_time():
    calls = []

    def moody():
        model = Net()
        calls.append(1)
        model.head.weight.data.add_(len(calls))
        return model

    with pytest.raises(ValueError, match=r"made different models from one seed: parameter 'head.weight' differs"):
        verify(model=moody)


def test_a_deadlock_says_where_the_ranks_were():
    def skipping(model, mesh):
        split(model, mesh)
        leave = model.blocks[1].mlp.leave
        model.blocks[1].mlp.leave = lambda y: leave(y) if mesh.get_local_rank() else y

    with pytest.raises(sim.Deadlock, match=r"rank 1 was in module 'blocks.1.mlp', forward"):
        verify(skipping)


def test_a_graph_that_is_cut():
    def cut(model, mesh):
        split(model, mesh)
        leave = model.blocks[1].mlp.leave
        model.blocks[1].mlp.leave = lambda y: leave(y.detach())

    report = verify(cut)
    assert place(report) == ("gradient", "blocks.1.mlp", "output")
    assert "no rank computes it" in report.first.sentence


def test_a_forward_that_stops_is_reported_up_to_there_if_something_was_wrong_before():
    def stopping(model, mesh):
        split(model, mesh, leave=False, only=0)
        model.head.forward = lambda x: x @ torch.zeros(7, 7)

    report = verify(stopping)
    assert place(report) == ("forward", "blocks.0.mlp.down", "output")
    assert any("the ranks have stopped: rank" in note and "module 'head', forward" in note for note in report.notes)


@pytest.mark.tier("full")
def test_an_axis_that_nothing_uses_is_named():
    report = right(verify(lambda model, mesh: tensor_parallel(model, mesh["tp"]), mesh="spare=2,tp=2"))
    second, unused = report.notes
    assert second == "a second step (rows in another order) is compared"
    assert unused == "nothing uses the axis spare: the ranks along it all compute the same"
    assert verify(mesh="tp=2").notes == (second,)


# -- activations that are computed again, or wait on the host ----------------------------------------------------------


@pytest.fixture
def moved(monkeypatch):
    """Let the CPU be a device with memory of its own, so that activations are moved; which copies come back."""
    copies, copy = [], CpuPlatform.copy_to_device

    def counted(self, tensor, source, **options):
        copies.append(tensor.numel())
        copy(self, tensor, source, **options)

    monkeypatch.setattr(CpuPlatform, "has_own_memory", True)
    monkeypatch.setattr(CpuPlatform, "copy_to_device", counted)
    return copies


def kept_by(policy, model, mesh):
    checkpoint_blocks(model, policy)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("policy", ["selective", "offload", "full offload"])
def test_what_blocks_keep_for_backward_changes_nothing(policy, moved):
    right(sim.verify_plan(lambda: Net(2), (X,), "dp=2", parallelize=partial(kept_by, policy)))
    options = {"parallelize": partial(kept_by, policy), "shard_batch": rows}
    right(sim.verify_step(squared, lambda: Net(2), X, "dp=2", **options))
    assert bool(moved) == ("offload" in policy)


@pytest.mark.parametrize("policy", ["offload", "full offload"])
def test_a_wrong_block_is_named_without_its_wrappers(policy):
    def wrong(model, mesh):
        model.blocks[1].register_forward_hook(lambda module, args, output: output * 1.01)
        kept_by(policy, model, mesh)

    report = sim.verify_plan(lambda: Net(2), (X,), "dp=2", parallelize=wrong)
    assert (report.first.module, report.first.kind) == ("blocks.1", "forward"), report


@pytest.mark.tier("full")
@pytest.mark.usefixtures("moved")
def test_what_is_overwritten_on_the_host_is_found(monkeypatch):
    monkeypatch.setattr(CpuPlatform, "copy_to_device", lambda self, tensor, source, **options: tensor.zero_())
    report = sim.verify_plan(lambda: Net(2), (X,), "dp=2", parallelize=partial(kept_by, "offload"))
    assert "gradient" in report.first.kind, report
    options = {"parallelize": partial(kept_by, "offload"), "shard_batch": rows}
    assert not sim.verify_step(squared, lambda: Net(2), X, "dp=2", **options).ok


# -- proofs of nothing -------------------------------------------------------------------------------------------------


def test_nan_on_one_device_proves_nothing():
    def spoil(module):
        if getattr(module, "in_features", 0) == 16:
            nn.init.constant_(module.bias, float("nan"))

    with pytest.raises(ValueError, match=r"one device computes nan, first seen in blocks\.0\.mlp\.down\.output"):
        verify(nothing, model=lambda: Net().apply(spoil))


@pytest.mark.parametrize(
    ("finish", "seen"), [(lambda y: (each for each in y), "a generator"), (lambda y: None, "a NoneType")]
)
def test_a_model_in_whose_output_no_tensor_is_seen(finish, seen):
    with pytest.raises(TypeError, match=f"no tensors are seen in what the model returned, {seen}"):
        verify(nothing, model=lambda: Finished(finish))


def test_a_report_says_that_there_were_no_gradients():
    options = {"steps": 1, "optimizer_fn": None}
    note = "no gradients were compared, as nothing that the model returns can be differentiated"
    unused = "nothing uses the axis tp: the ranks along it all compute the same"
    chosen = verify(nothing, model=lambda: Finished(lambda y: y.argmax(-1)), **options)
    assert chosen.notes == (note, unused)
    detached = verify(nothing, loss_fn=lambda y, x: y.detach().sum(), **options)
    assert detached.notes == ("no gradients were compared, as the loss cannot be differentiated", unused)
    for report in (chosen, detached):
        assert (report.ok, [row.place for row in report.not_proved]) == (False, ["weights"])
        assert str(report).startswith("it is not proved that")
    frozen = verify(nothing, model=lambda: Net().requires_grad_(False), loss_fn=lambda y, x: y.sum(), **options)
    assert (frozen.ok, frozen.notes) == (True, (unused,))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_an_output_in_another_container_is_not_proved(is_frozen):
    def packed(model, mesh):
        model.forward = lambda x: (Net.forward(model, x), None)

    report = verify(packed, model=lambda: Net().requires_grad_(not is_frozen), steps=1, optimizer_fn=None)
    assert (report.ok, [row.place for row in report.not_proved]) == (False, ["weights"]), str(report)


def test_a_model_that_computes_in_float32_within_has_the_bounds_of_float64():
    def model():
        return Finished(lambda y: y.float().softmax(-1).to(y.dtype))

    def wrong(model, mesh):
        model.blocks[0].mlp.up.register_forward_hook(lambda module, args, output: output + 1e-9)

    report = right(verify(nothing, model=model, optimizer_fn=None))
    assert max(row.bound for row in report.rows) < 1e-11
    off = verify(wrong, model=model, optimizer_fn=None)
    assert off.first.place == "blocks.0.mlp.up.output"


class Near(nn.Module):
    """Two scores that rounding alone tells apart, and a large difference by which is chosen."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        scores = self.up(x)
        return torch.where(scores * 3 / 3 > scores, 1.0, -1.0).to(x.dtype) * scores


def test_a_bound_that_is_as_large_as_the_values_proves_nothing():
    report = verify(nothing, model=Near, inputs=(draw(64, 8),))
    assert report.bug is None
    assert not report.ok
    assert report.first is report.not_proved[0]
    assert report.first.place == "the model's output"
    assert str(report).startswith("it is not proved that the model on tp=2 computes")
    with pytest.raises(AssertionError, match="it is not proved that"):
        report.raise_if_bug()


class Flipped(Near):
    """The scores themselves, with gradients whose signs rounding decides."""

    def forward(self, x):
        scores = self.up(x)
        return scores.detach() + torch.where(scores * 3 / 3 > scores, 1.0, -1.0) * (scores - scores.detach())


def test_a_gradient_of_a_mean_over_ranks_has_a_bound_that_is_told():
    """Gradients of activations are twice those of one device here, and so are their bounds."""
    options = {"loss_fn": lambda output, x: output.mean(), "input_layouts": [("dp", "None")], "optimizer_fn": None}
    report = verify(ddp, "dp=2", Flipped, (draw(64, 8),), **options)
    assert any(note.startswith("gradients of activations are 2 times") for note in report.notes)
    assert "the gradient of up.output" in {row.place for row in report.not_proved}, str(report)


@made_of(lambda: {"inp": nn.Linear(8, 8), "norm": nn.BatchNorm1d(8, affine=False), "out": nn.Linear(8, 2)})
def rescaled(self, x):
    """A bias whose gradient is zero but for rounding."""
    return self.out(self.norm(self.inp(x)))


def test_what_a_second_step_leaves_open_is_told():
    def signed(parameters):
        return torch.optim.AdamW(parameters, lr=0.1, eps=1e-30)

    report = right(verify(nothing, model=rescaled, inputs=(draw(12, 8),), optimizer_fn=signed))
    assert any("is compared, but for inp.output in step 2" in note for note in report.notes), report.notes


def test_proofs_leave_no_tensors_behind():
    def alive():
        gc.collect()
        return sum(type(each) is LoopWatch for each in gc.get_objects())

    def doubled(model, mesh):
        model.head.register_forward_hook(lambda module, args, output: output * 2)

    before = alive()
    assert verify(nothing, optimizer_fn=None).ok
    assert not verify(doubled, optimizer_fn=None).ok
    assert alive() == before


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
    turned = {"model": Turned, "inputs": (draw(4, 16),), "optimizer_fn": None}
    colwise = {"up": ColwiseParallel()}
    assert verify(lambda m, mesh: parallelize_module(m, mesh, colwise), **turned).ok

    def turned_back(model, mesh):
        model.turns = model.turns.conj()

    assert not verify(turned_back, **turned).ok


def test_complex_outputs_are_compared_within_rounding():
    class Waves(Turned):
        def finish(self, pairs):
            return torch.fft.fft(pairs.flatten(1))

    assert verify(nothing, model=Waves, inputs=(draw(4, 16),), optimizer_fn=None).ok
    report = verify(
        lambda m, mesh: m.register_forward_hook(lambda a, b, y: y * 1j) and None, model=Waves, inputs=(draw(4, 16),)
    )
    assert report.first.place == "the model's output"


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
    rank, size, group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
    model.mine = range(rank * 4 // size, (rank + 1) * 4 // size)
    for expert in range(4):
        if expert not in model.mine:
            model.each[expert] = None
    model.enter, model.leave = lambda x: Enter.apply(x, group), lambda y: Leave.apply(y, group)
    change(model.each[model.mine[0]])


def test_experts_that_only_their_ranks_have_are_right():
    report = right(verify(own_experts, "ep=2", Experts, (draw(12, 16),), optimizer_fn=True))
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
    report = verify(lambda m, mesh: own_experts(m, mesh, change), "ep=2", Experts, (draw(12, 16),), optimizer_fn=None)
    assert (report.first.kind, report.first.module, report.first.tensor) == (kind, "each.0", "weight")
    assert words in report.first.sentence


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

    report = verify(alone, model=Averaged, inputs=(draw(4, 16),), optimizer_fn=True)
    assert report.ok is everywhere, str(report)
    rows = {row.tensor: row.verdict for row in report.rows if row.kind == "buffer"}
    assert rows.keys() >= {"average", "average after step 1"}
    if not everywhere:
        assert report.first.place == "average after step 1"


def test_a_buffer_that_nobody_changes_and_that_no_rank_has_is_told():
    def model():
        made = nn.Linear(16, 4)
        made.register_buffer("table", torch.ones(1))
        return made

    def without(model, mesh):
        del model.table

    report = right(verify(without, model=model, inputs=(draw(4, 16),), optimizer_fn=None))
    assert "not compared, as no rank has them: table" in report.notes


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
    how = {"input_layouts": [("dp",)], "loss_fn": lambda y, x: y.square().mean(), "optimizer_fn": None}
    return verify(partial(averaged, **options), "dp=2", lambda: Counting(norm()), (draw(4, 16),), **how)


def test_counts_of_each_rank_s_own_rows_are_a_bug():
    assert counted().ok, str(counted())
    wrong = counted(reduces=False)
    assert (wrong.first.place, wrong.first.kind) == ("counts after forward", "buffer")
    assert "parts of a sum over dp" in wrong.first.sentence


def test_what_ranks_make_for_themselves_and_nobody_changes_is_private():
    report = right(counted(begin=1))
    assert "the ranks' own, which no step changes: begin" in report.notes


def test_statistics_of_each_rank_s_own_rows_are_private():
    report = right(counted(lambda: nn.InstanceNorm1d(4, track_running_stats=True)))
    assert {row.verdict for row in report.rows if row.tensor == "running_mean after forward"} == {"private"}
    assert "of each rank's own rows, as nothing synchronises them: the buffers of norm" in report.notes
