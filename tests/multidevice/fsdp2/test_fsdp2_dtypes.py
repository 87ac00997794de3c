"""fully_shard against FSDP2: dtypes of parameters, of computation, of reduction, of inputs and outputs.

Without a reduce_dtype, torch 2.15 adds bf16 gradients up in fp32, and earlier ones in bf16; such behaviours are
compared within rounding.
"""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from fsdp2_kit import Block, Net, Theme, loss_of, on_processes
from torch import nn

import sim

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    pytest.mark.tier("test"),
]

THEME = Theme()
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def trained(run, dtype, *, data=None, blocks=None, steps=2, mesh=None, **policy):
    """A net in `dtype` under a policy; `blocks`: another policy for the blocks."""
    model = run.net(dtype)
    options = {} if mesh is None else {"mesh": mesh}
    inner = blocks or {name: value for name, value in policy.items() if name != "output_dtype"}
    for block in model.blocks:
        run.wrap(block, mp_policy=run.policy(**inner), **options)
    run.wrap(model, mp_policy=run.policy(**policy), **options)
    run.train(model, lambda step: loss_of(model, run.batch(step).to(data or dtype)).float(), steps=steps)
    run.facts["parameters"] = {name: (p.dtype, p.grad.dtype) for name, p in model.named_parameters()}
    with torch.no_grad():
        run.facts["output"] = model(run.batch().to(data or dtype)).dtype


# -- the parameters' own dtype -------------------------------------------------------------------------------------


@THEME.behaviour(dtype=FP32)
def in_fp32(run):
    trained(run, FP32)


@THEME.behaviour(exact=False, one=False, dtype=BF16)
def in_bf16(run):
    trained(run, BF16)


@THEME.behaviour(exact=False, one=False, dtype=FP16)
def in_fp16(run):
    trained(run, FP16)


class Two(nn.Module):
    """Computes in fp32, within it in fp64 (if the backend reduces that), and back."""

    def __init__(self, dtype):
        super().__init__()
        self.narrow = nn.Linear(5, 7)
        self.wide = nn.Linear(7, 3).to(dtype)
        self.scale = nn.Parameter(torch.ones(3, dtype=BF16))

    def forward(self, x):
        return self.wide(torch.tanh(self.narrow(x)).to(self.wide.weight.dtype)).float() * self.scale.float()


@THEME.behaviour(dtype=BF16, without_fsdp2="one dtype for all parameters of a unit that train: AssertionError")
def several_dtypes_in_a_unit(run):
    model = run.build_as_made(lambda: Two(run.dtype))
    run.train(run.wrap(model), lambda step: loss_of(model, run.batch(step).float()))
    assert [p.dtype for p in model.parameters()] == [BF16, FP32, FP32, run.dtype, run.dtype]


@THEME.behaviour(dtype=BF16)
def a_unit_for_each_dtype(run):
    model = run.build_as_made(lambda: Two(run.dtype))
    run.wrap(model.narrow)
    run.wrap(model.wide)
    run.wrap(model, mp_policy=run.policy(reduce_dtype=FP32))
    run.train(model, lambda step: loss_of(model, run.batch(step).float()))
    assert [p.dtype for p in model.parameters()] == [BF16, FP32, FP32, run.dtype, run.dtype]


# Where FSDP2 cannot reduce complex64, ours is compared with one device in test_fully_shard_kinds.py.
@THEME.behaviour(dtype=FP32, reduces=torch.complex64)
def complex_parameters(run):
    class Phases(nn.Module):
        def __init__(self):
            super().__init__()
            self.phase = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))

        def forward(self, x):
            return torch.view_as_real(x.to(torch.complex64) @ self.phase)

    model = run.build_as_made(Phases)
    run.train(run.wrap(model), lambda step: loss_of(model, run.batch(step).float()))


@THEME.behaviour(dtype=FP32)
def frozen_parameters_of_another_dtype(run):
    class Tuned(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(5, 7).to(BF16).requires_grad_(False)
            self.add = nn.Linear(5, 7)

        def forward(self, x):
            return self.base(x.to(BF16)).float() + self.add(x)

    model = run.build_as_made(Tuned)
    run.wrap(model.base)
    run.train(run.wrap(model), lambda step: loss_of(model, run.batch(step).float()))


@THEME.behaviour(dtype=FP32)
def the_dtype_changes_after_wrapping(run):
    model = run.net(FP64)
    run.wrap_blocks(model)
    model.float()
    run.train(model, lambda step: loss_of(model, run.batch(step).float()))
    run.facts["dtypes"] = {p.dtype for p in model.parameters()}


@THEME.behaviour(
    dtype=BF16, without_fsdp2="has no such option: gradients are in the parameters' dtype", without_hsdp="mp_policy"
)
def main_gradients_in_fp32(run):
    model = run.net(BF16)
    run.wrap_blocks(model, **({} if run.alone else {"mp_policy": run.policy(apply_grad_on_fp32_main_grad=True)}))
    for step in range(2):
        run.backward(loss_of(model, run.batch(step).to(BF16)))
    for name, parameter in model.named_parameters():
        if run.alone:
            run.note(name, parameter.grad)
        else:
            assert parameter.grad is None
            assert parameter.main_grad.dtype == FP32
            run.note(name, parameter.main_grad)


# -- the dtypes of a policy ----------------------------------------------------------------------------------------


@THEME.behaviour(one=False, dtype=BF16, without_hsdp="mp_policy")
def compute_in_bf16_reduce_in_fp32(run):
    trained(run, FP32, param_dtype=BF16, reduce_dtype=FP32)


@THEME.behaviour(one=False, dtype=FP16, without_hsdp="mp_policy")
def compute_in_fp16_reduce_in_fp32(run):
    trained(run, FP32, param_dtype=FP16, reduce_dtype=FP32)


@THEME.behaviour(exact=False, one=False, dtype=BF16, without_hsdp="mp_policy")
def compute_and_reduce_in_bf16(run):
    trained(run, FP32, param_dtype=BF16)


@THEME.behaviour(one=False, dtype=BF16)
def reduce_in_bf16(run):
    trained(run, FP32, reduce_dtype=BF16)


@THEME.behaviour(one=False, dtype=FP16)
def reduce_in_fp16(run):
    trained(run, FP32, reduce_dtype=FP16)


@THEME.behaviour(dtype=FP32, reduces=FP64)
def reduce_in_fp64(run):
    trained(run, FP32, reduce_dtype=FP64)


@THEME.behaviour(one=False, dtype=BF16)
def parameters_in_bf16_reduce_in_fp32(run):
    trained(run, BF16, reduce_dtype=FP32)


@THEME.behaviour(4, one=False, dtype=BF16, without_hsdp="mp_policy")
def reduce_in_bf16_over_both_axes(run):
    trained(run, FP32, param_dtype=BF16, reduce_dtype=FP32, mesh=run.mesh(2, 2))


@THEME.behaviour(one=False, dtype=BF16, without_hsdp="mp_policy")
def outputs_in_another_dtype(run):
    trained(run, FP32, param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32)


@THEME.behaviour(one=False, dtype=BF16, without_hsdp="mp_policy")
def inputs_are_not_cast(run):
    trained(run, FP32, data=BF16, param_dtype=BF16, reduce_dtype=FP32, cast_forward_inputs=False)


@THEME.behaviour(one=False, dtype=BF16, without_hsdp="mp_policy")
def blocks_under_another_policy_than_the_root(run):
    blocks = {"param_dtype": BF16, "reduce_dtype": FP32, "output_dtype": FP32}
    trained(run, FP32, blocks=blocks, param_dtype=FP32, reduce_dtype=FP32)


@THEME.behaviour(one=False, dtype=BF16, without_hsdp="mp_policy")
def norms_in_fp32_inside_of_bf16_blocks(run):
    model = run.net(FP32)
    for block in model.blocks:
        run.wrap(block.norm, mp_policy=run.policy(FP32, FP32, output_dtype=BF16))
        run.wrap(block, mp_policy=run.policy(BF16, FP32))
    run.wrap(model, mp_policy=run.policy(BF16, FP32, output_dtype=FP32))
    run.train(model, lambda step: loss_of(model, run.batch(step).float()))


@THEME.behaviour(one=False, dtype=BF16, without_hsdp="mp_policy")
def only_inner_layers_under_a_policy(run):
    model = run.net(FP32)
    for block in model.blocks:
        run.wrap(block.up, mp_policy=run.policy(BF16, FP32, output_dtype=FP32))
    run.train(run.wrap(model), lambda step: loss_of(model, run.batch(step).float()))


class Batch(NamedTuple):
    x: torch.Tensor
    index: torch.Tensor


class Gathers(Block):
    """Notes the dtypes that it sees."""

    def __init__(self):
        super().__init__(5)
        self.embed = nn.Embedding(4, 5)
        self.register_buffer("shift", torch.full((5,), 0.5))
        self.seen = []

    def forward(self, batch, *, options):
        self.seen.append([batch.x.dtype, batch.index.dtype, options["more"][0].dtype, self.shift.dtype])
        return {"y": super().forward(batch.x + options["more"][0] + self.embed(batch.index) + self.shift.to(batch.x))}


@THEME.behaviour(one=False, dtype=BF16, without_hsdp="mp_policy")
def casts_reach_into_containers_and_leave_integers(run):
    model = run.build(Gathers, FP32)
    run.wrap(model, mp_policy=run.policy(BF16, FP32, output_dtype=FP32))

    def loss(step):
        x = run.batch(step).float()
        batch = Batch(x, (x[:, 0].abs() * 3).long() % 4)
        return model(batch, options={"more": [torch.ones(5, device=run.ctx.device)]})["y"].square().mean()

    run.train(model, loss)
    run.facts["seen"] = model.seen
    assert model.seen[0] == [BF16, torch.int64, BF16, FP32]


@dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    index: torch.Tensor


@dataclass
class State:
    pairs: list[Pair]
    label: str = "state"


class Stateful(Gathers):
    def forward(self, state, *, again):
        more = {"more": [again["state"].pairs[0].x]}
        y = super().forward(state.pairs[0], options=more)["y"]
        return State([Pair(y, state.pairs[0].index)], state.label)


KNOWS_DATACLASSES = torch.__version__ >= (2, 13)


@THEME.behaviour(
    one=not KNOWS_DATACLASSES,
    dtype=BF16,
    without_fsdp2="" if KNOWS_DATACLASSES else "does not look into dataclasses",
    without_hsdp="mp_policy",
)
def casts_reach_into_dataclasses(run):
    model = run.build(Stateful, FP32)
    run.wrap(model, mp_policy=run.policy(BF16, FP32, output_dtype=FP64))

    def loss(step):
        x = run.batch(step).float()
        state = State([Pair(x, (x[:, 0].abs() * 3).long() % 4)], "mine")
        out = model(state, again={"state": state})
        assert state.pairs[0].x is x
        run.facts[f"out {step}"] = (type(out), out.label, out.pairs[0].x.dtype, out.pairs[0].index.dtype)
        return out.pairs[0].x.float().square().mean()

    run.train(model, loss)
    run.facts["seen"] = model.seen
    if not run.alone:
        assert model.seen[0] == [BF16, torch.int64, BF16, FP32]
        assert run.facts["out 0"][1:] == ("mine", FP64, torch.int64)


@THEME.behaviour(one=False, dtype=BF16, without_hsdp="mp_policy")
def casts_of_inputs_that_need_gradients(run):
    model = run.net(FP32)
    run.wrap_blocks(model, mp_policy=run.policy(BF16, FP32))
    x = run.batch().float().requires_grad_()
    run.train(model, lambda step: loss_of(model, x))
    run.facts["input gradient"] = x.grad.dtype


@THEME.behaviour(one=False, dtype=BF16, without_hsdp="mp_policy")
def low_precision_over_several_micro_batches(run):
    model = run.net(FP32)
    run.wrap_blocks(model, mp_policy=run.policy(BF16, FP32))

    def loss(step):
        for micro in range(3):
            run.tell(model, "set_requires_gradient_sync", False)
            run.backward(loss_of(model, run.batch(10 * step + micro).float()))
        run.tell(model, "set_requires_gradient_sync", True)
        return loss_of(model, run.batch(10 * step + 5).float())

    run.train(model, loss)


@THEME.behaviour(one=False, dtype=BF16)
def autocast_around_a_sharded_model(run):
    model = run.net(FP32)
    run.wrap_blocks(model)

    def loss(step):
        with torch.autocast(run.ctx.device_type, dtype=BF16):
            y = model(run.batch(step).float())
        run.facts[f"output {step}"] = y.dtype
        return y.float().square().mean()

    run.train(model, loss)


@THEME.behaviour(one=False, dtype=FP16, without_hsdp="mp_policy")
def loss_scaling_in_fp16(run):
    """As a GradScaler does it: the gradients come scaled, and are divided after the reduction."""
    model = run.net(FP32)
    run.wrap_blocks(model, mp_policy=run.policy(FP16, FP32))
    for step in range(2):
        model.zero_grad()
        run.backward(loss_of(model, run.batch(step).float()).float() * 1024.0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1 / 1024.0)
    run.note_model(model)


@THEME.behaviour(one=False, dtype=BF16, without_hsdp="mp_policy")
def unsharded_weights_have_the_compute_dtype(run):
    model = run.build(Net, FP32)
    run.wrap_blocks(model, mp_policy=run.policy(BF16, FP32))
    run.tell(model.blocks[0], "unshard")
    run.facts["unsharded"] = [(p.dtype, type(p), tuple(p.shape)) for p in model.blocks[0].parameters()]
    run.note("up", model.blocks[0].up.weight)
    run.tell(model.blocks[0], "reshard")
    run.facts["parts"] = [(p.dtype, tuple(p.shape)) for p in model.blocks[0].parameters()]


# -- the tests -----------------------------------------------------------------------------------------------------


@THEME.contestants(2)
@sim.ranks(2, backends=("sim",))
def test_dtypes(ctx, name, contestant):
    THEME.check(ctx, name, contestant)


@THEME.contestants(4)
@sim.ranks(4, backends=("sim",))
def test_dtypes_on_four_ranks(ctx, name, contestant):
    THEME.check(ctx, name, contestant)


@on_processes()
@sim.ranks(2, backends=("gloo", "gpu", "npu"))
def test_dtypes_on_processes(ctx, contestant):
    THEME.check_all(ctx, 2, contestant)
