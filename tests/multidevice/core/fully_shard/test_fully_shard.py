"""fully_shard against the same model on one device, and against torch's own fully_shard (FSDP2).

One device is compared in float64 where the backend reduces that, so that the rounding bound is far below any real
difference. With FSDP2 the comparison is bitwise on simulated ranks, where both add in rank order.
"""

import contextlib
import copy
import gc
import weakref
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from fsdp2_kit import Net
from rounding_kit import results, shorter
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from units_kit import (
    assert_as_one_device,
    assert_freed,
    assert_near,
    full,
    gradients,
    inputs,
    mesh_of,
    values,
    wrap_nested,
)

import sim
from hyper_parallel.core.fully_shard.api import HSDPModule, fully_shard
from hyper_parallel.core.fully_shard.unit import unit_of
from hyper_parallel.core.fully_shard.utils import MixedPrecisionPolicy

pytestmark = pytest.mark.tier("test")

NO_GLOO = ("sim", "gpu", "npu")


def net(ctx, dtype=None):
    torch.manual_seed(0)
    return Net(hidden=11, out=3).to(dtype or ctx.float_dtype).to(ctx.device)  # odd sizes


def data(ctx, step=0, dtype=None, rank=None, per_rank=4):
    return inputs(ctx, 100 + step, (per_rank, 5), rank, dtype)


def loss_of(model, x):
    return model(x).square().mean()


def alone():
    ctx = sim.RankTest(0, 4, "sim", torch.device("cpu"))
    return results(*train(ctx, net(ctx, torch.float32), dtype=torch.float32))


assert_close = partial(assert_near, alone=alone)  # batch, widths and layers multiply to less than 4096


def train(ctx, model, steps=3, rank=None, dtype=None, lr=0.1):
    """Losses, the last gradients and the final parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, data(ctx, step, dtype, rank))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, gradients(model), values(model)


def check_against_one_device(ctx, model, plain, **options):
    assert_as_one_device(ctx, train(ctx, model, rank=ctx.rank, **options), train(ctx, plain, **options), assert_close)


# -- training, on every mesh and nesting ---------------------------------------------------------------------------


@pytest.mark.tier("full")
@sim.ranks(1, backends=NO_GLOO)
def test_a_single_rank(ctx):
    for mesh in (mesh_of(ctx), mesh_of(ctx, 1, 1)):
        for keep in (True, False):
            model = wrap_nested(net(ctx), mesh=mesh, reshard_after_forward=keep)
            check_against_one_device(ctx, model, net(ctx))
            assert_freed(model)


# -- parameters of every kind --------------------------------------------------------------------------------------


class Slotted(nn.Linear):
    __slots__ = ("extra",)

    def __setattr__(self, name, value):
        if name == "weight":
            self.__dict__["sets"] = self.__dict__.get("sets", 0) + 1
        super().__setattr__(name, value)


@sim.ranks(2, backends=("sim",))
def test_slots_own_setattr_and_attributes_of_parameters(ctx):
    model = Slotted(5, 3)
    model.extra = "kept"
    model.weight.no_decay = True
    fully_shard(model, mesh=mesh_of(ctx))
    model(torch.ones(2, 5)).sum().backward()
    assert isinstance(model, Slotted)
    assert isinstance(model, HSDPModule)
    assert type(model).__name__ == "HSDPSlotted"
    assert repr(model).startswith("HSDPSlotted(in_features=5")
    assert model.extra == "kept"
    assert model.sets >= 4  # made, sharded, unsharded, sharded again
    assert model.weight.no_decay
    twin = copy.deepcopy(model)
    assert type(twin) is type(model)
    with pytest.raises(TypeError, match=r"cannot copy or pickle a Slotted"):
        copy.copy(model)


# -- which gradients there are -------------------------------------------------------------------------------------


def check_one_step(ctx, model, plain, step=0):
    loss_of(model, data(ctx, step, rank=ctx.rank)).backward()
    loss_of(plain, data(ctx, step)).backward()
    assert_close(gradients(model), gradients(plain))


@sim.ranks(2, backends=NO_GLOO)
def test_requires_grad_of_a_gathered_parameter_stays_when_it_is_freed(ctx):
    class Freezes(nn.Linear):
        freeze = False

        def forward(self, x):
            if self.freeze:
                self.weight.requires_grad_(False)
            return super().forward(x)

    model = nn.Sequential(Freezes(5, 5), nn.Linear(5, 5)).to(ctx.device, ctx.float_dtype)
    for part in (*model, model):
        fully_shard(part, mesh=mesh_of(ctx))
    weight, bias = model[0].weight, model[1].bias
    model[1].unshard()
    model[1].bias.requires_grad_(False)
    model[1].weight.requires_grad_(False)
    model[1].reshard()
    model[1].weight.requires_grad_(True)  # of the sharded one, as ever
    model[0].freeze = True
    for frozen in (True, False):
        model.zero_grad()
        model(data(ctx, rank=ctx.rank)).sum().backward()
        assert (weight.grad is None, bias.grad is None) == (frozen, frozen)
        assert model[1].weight.grad is not None
        assert (weight.requires_grad, bias.requires_grad) == (not frozen, not frozen)
        model[0].freeze = False
        for param in (weight, bias):
            param.requires_grad_(True)


class Tree(nn.Module):
    """Calls itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(5) * 0.7 + 0.1)

    def forward(self, x, depth):
        if depth:
            x = self(x, depth - 1) + torch.tanh(self(x * 0.5, depth - 1))
        return torch.tanh(x @ self.weight)


@sim.ranks(2)
def test_a_module_that_calls_itself(ctx):
    for root in (True, False):
        plain = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).to(ctx.float_dtype)
        torch.manual_seed(0)
        tree = Tree().to(ctx.device, ctx.float_dtype)
        for p in plain.parameters():
            nn.init.normal_(p)
        model, other = copy.deepcopy(plain).to(ctx.device), copy.deepcopy(tree)
        fully_shard(tree, mesh=mesh_of(ctx))
        if root:
            fully_shard(model, mesh=mesh_of(ctx))
        for _ in range(2):
            tree(model(data(ctx, rank=ctx.rank)), 2).square().mean().backward()
            other(plain.to(ctx.device)(data(ctx)), 2).square().mean().backward()
        assert_close(gradients(tree), gradients(other))
        if root:
            assert_close(gradients(model), gradients(plain))
        assert_freed(tree)


@dataclass
class Output:
    logits: torch.Tensor
    extra: dict


class Fancy(nn.Module):
    """Keyword arguments, containers, outputs that are views or the parameter itself, and an input it does not use."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 4)
        self.pos = nn.Parameter(torch.randn(6, 4))

    def forward(self, x, *, options, unused=None, as_dataclass=False):
        y = self.lin(x) * options["factor"] + options["more"][0]
        extra = {"pos": self.pos[:2], "all": self.pos, "pair": (y[0], y)}
        return Output(y, {"pair": y.sum(), "all": self.pos}) if as_dataclass else (y, extra, None, "text")


@sim.ranks(2)
def test_inputs_and_outputs_of_any_form(ctx):
    torch.manual_seed(0)
    plain = Fancy().to(ctx.device, ctx.float_dtype)
    model = copy.deepcopy(plain)
    before = nn.Linear(5, 5).to(ctx.device, ctx.float_dtype)
    fully_shard(model, mesh=mesh_of(ctx))
    for module in (model, plain):
        for as_dataclass in (False, True):
            x = torch.ones(3, 5, dtype=ctx.float_dtype, device=ctx.device, requires_grad=True)
            more = [torch.ones(4, dtype=ctx.float_dtype, device=ctx.device, requires_grad=True)]
            unused = before(x)
            out = module(x, options={"factor": 2.0, "more": more}, unused=unused, as_dataclass=as_dataclass)
            if as_dataclass:
                (out.logits.square().mean() + out.extra["pair"] + out.extra["all"].sum()).backward()
            else:
                assert out[2:] == (None, "text")
                (out[0] @ out[1]["pos"].t()).sum().backward(retain_graph=True)
                (out[1]["pair"][0].sum() + out[1]["all"].sum()).backward()
            assert more[0].grad is not None
            assert before.weight.grad is None  # an input that nobody used
    assert_close(gradients(model), gradients(plain))
    assert_freed(model)
    with torch.no_grad():
        pos = model(torch.ones(1, 5, dtype=ctx.float_dtype, device=ctx.device), options={"factor": 1, "more": [0]})[1]
    assert torch.equal(pos["all"], plain.pos)
    assert torch.equal(pos["pos"], plain.pos[:2])


@sim.ranks(2, backends=("sim",))
def test_an_input_given_twice_is_one_object_for_the_module(ctx):
    class Same(nn.Linear):
        def forward(self, a, b, c):
            assert a is b
            assert c is not a
            return super().forward(a + b * c)

    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        model = fully_shard(Same(5, 3), mesh=mesh_of(ctx), mp_policy=policy)
        x = torch.ones(2, 5, requires_grad=True)
        model(x, x, x * 2).sum().backward()
        assert x.grad is not None


@sim.ranks(2, backends=("sim",))
def test_dropout_draws_what_it_draws_without_the_engine(ctx):
    plain = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 5), nn.Dropout(0.5))
    model = copy.deepcopy(plain)
    wrapped = fully_shard(model, mesh=mesh_of(ctx))
    outputs = []
    for module in (wrapped, plain):
        for p in plain.parameters():
            p.requires_grad_()
        torch.manual_seed(7)
        outputs.append(module(torch.ones(4, 5)))
        outputs.append(torch.rand(3))
    assert torch.equal(outputs[0] == 0, outputs[2] == 0)
    assert torch.equal(outputs[1], outputs[3])


# -- gradient accumulation -----------------------------------------------------------------------------------------


@sim.ranks(8, backends=NO_GLOO)
def test_the_all_reduces_of_a_replicated_parameter_can_wait(ctx):
    """It has two groups to reduce over, one after the other; what waited is added before the first, once."""
    mesh = init_device_mesh(ctx.device_type, (2, 2, 2), mesh_dim_names=("copy", "replicate", "shard"))
    part = ctx.rank % 4  # ranks 4 to 7 train a copy of their own
    model, plain = net(ctx), net(ctx)
    vectors = [p for p in model.parameters() if p.dim() == 1]
    fully_shard(model, mesh=mesh["replicate", "shard"], replicate_params=vectors)
    assert any(len(reducer.replicas) == 2 for reducer in unit_of(model).reducers)
    for micro in range(3):
        model.set_requires_all_reduce(micro == 2)
        loss_of(model, data(ctx, micro, rank=part)).backward()
        loss_of(plain, data(ctx, micro)[:16]).backward()
        assert micro == 2 or all(p.grad is None for p in model.parameters())
    assert_close(gradients(model), gradients(plain))


@pytest.mark.tier("full")
@sim.ranks(2)
def test_pending_gradients_are_kept_in_fp32_or_better(ctx):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = wrap_nested(net(ctx, torch.float32), mesh=mesh_of(ctx), mp_policy=policy)
    twin = wrap_nested(net(ctx, torch.float32), mesh=mesh_of(ctx), mp_policy=policy)
    once = net(ctx, torch.float32)
    wrap_nested(once, fsdp2, mesh=mesh_of(ctx), mp_policy=TorchPolicy(torch.bfloat16, torch.float32))
    count = 64
    for micro in range(count):
        for module in (model, once):
            module.set_requires_gradient_sync(micro == count - 1)
            loss_of(module, data(ctx, 0, torch.float32, ctx.rank)).backward()
    loss_of(twin, data(ctx, 0, torch.float32, ctx.rank)).backward()
    exact = {name: grad * count for name, grad in gradients(twin).items()}
    assert_close(gradients(model), exact, summands=count, alone=None)  # bf16 would stop growing at 256 times a summand
    assert_close(gradients(once), exact, summands=count, alone=None)
    double = wrap_nested(net(ctx), mesh=mesh_of(ctx))
    double.set_requires_gradient_sync(False)
    loss_of(double, data(ctx, rank=ctx.rank)).backward()
    assert {g.dtype for r in unit_of(double).reducers for g in r.pending if g is not None} == {ctx.float_dtype}
    for dtype, wanted in ((None, torch.float32), (torch.bfloat16, torch.bfloat16)):
        low = fully_shard(
            net(ctx, torch.float32),
            mesh=mesh_of(ctx),
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype),
        )
        low.set_requires_gradient_sync(False)
        loss_of(low, data(ctx, 0, torch.float32, ctx.rank)).backward()
        assert {g.dtype for r in unit_of(low).reducers for g in r.pending if g is not None} == {wanted}


@sim.ranks(2, backends=NO_GLOO)
def test_fp16_gradients_are_scaled_before_they_could_overflow(ctx):
    for sync_first in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 3, bias=False).to(ctx.device)
        fully_shard(model, mesh=mesh_of(ctx), mp_policy=MixedPrecisionPolicy(torch.float16, output_dtype=torch.float32))
        model.set_requires_gradient_sync(sync_first)
        (model(torch.full((1, 4), 40000.0, device=ctx.device)) * 0.75).sum().backward()
        if not sync_first:
            model.set_requires_gradient_sync(True)
            (model(torch.full((1, 4), 40000.0, device=ctx.device)) * 0.75).sum().backward()
        wanted = torch.full((3, 4), 30000.0 * (1 if sync_first else 2), device=ctx.device)
        assert torch.equal(full(model.weight.grad), wanted)


# -- when parameters are unsharded ---------------------------------------------------------------------------------


@sim.ranks(2)
def test_unshard_by_hand_gathers_again_what_has_changed(ctx):
    model, plain = wrap_nested(net(ctx), mesh=mesh_of(ctx)), net(ctx)
    model.unshard()
    with torch.no_grad():
        for p in (*model.blocks[0].parameters(), *unit_shards(model)):
            p.mul_(2)
        for p in (*plain.blocks[0].parameters(), plain.scale, *plain.embed.parameters(), *plain.head.parameters()):
            p.mul_(2)
    model.unshard()
    assert_close({"head": model.head.weight.detach()}, {"head": plain.head.weight.detach()})
    assert_close({"y": model(data(ctx))}, {"y": plain(data(ctx))})
    model.reshard()


def unit_shards(module):
    return [param.sharded for bucket in unit_of(module).buckets for param in bucket.params]


@sim.ranks(2, backends=("sim",))
def test_a_root_of_several_modules_of_which_one_runs_alone(ctx):
    model, plain = net(ctx), net(ctx)
    fully_shard(model.blocks[0].up, mesh=mesh_of(ctx))
    fully_shard([model.blocks[0], model.blocks[1]], mesh=mesh_of(ctx))
    x = torch.ones(2, 7, dtype=torch.float64)
    for _ in range(4):
        model.blocks[0](x).square().mean().backward()
        plain.blocks[0](x).square().mean().backward()
        with torch.no_grad():
            for _ in range(3):
                model.blocks[0](x)
        assert all(isinstance(p, DTensor) for p in model.blocks[0].parameters())
    schedule = unit_of(model.blocks[0]).schedule
    assert len(schedule._pre_forwards) <= len(schedule.units)  # the record starts anew with every forward
    assert_close(gradients(model.blocks[0]), gradients(plain.blocks[0]))


# -- errors in the middle ------------------------------------------------------------------------------------------


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("backward fails")


def break_forward(model, x):
    def fail(*_):
        raise ArithmeticError("forward fails")

    handle = model.blocks[1].up.register_forward_hook(fail)
    try:
        model(x)
    finally:
        handle.remove()


def break_backward(model, x):
    handle = model.blocks[1].up.register_forward_hook(lambda m, a, y: Failing.apply(y))
    loss = loss_of(model, x)
    handle.remove()
    loss.backward()


@pytest.mark.tier("full")
@sim.ranks(2)
def test_training_goes_on_after_an_error(ctx):
    for failure in (break_forward, break_backward):
        for keep in (True, False):
            model, plain = net(ctx), net(ctx)
            fully_shard([model.blocks[0], model.blocks[1]], mesh=mesh_of(ctx), reshard_after_forward=keep)
            fully_shard(model, mesh=mesh_of(ctx), reshard_after_forward=keep)
            for _ in range(2):
                with pytest.raises(ArithmeticError):
                    failure(model, data(ctx, rank=ctx.rank))
                assert all(isinstance(p, DTensor) for p in model.parameters())
                with torch.no_grad():
                    for p, q in zip(unit_shards(model.blocks[0]), unit_shards(model), strict=False):
                        p.mul_(0.5), q.mul_(0.5)
                        p.mul_(2.0), q.mul_(2.0)
                check_against_one_device(ctx, model, plain)
                assert_freed(model)


@sim.ranks(2, backends=NO_GLOO)
def test_nothing_unsharded_is_left_of_a_backward_that_failed(ctx):
    """The failing block is unsharded when its backward raises; the next call frees it, and gathers it anew."""
    for keep in (True, False):
        model, plain = net(ctx), net(ctx)
        wrap_nested(model, mesh=mesh_of(ctx), reshard_after_forward=keep)
        with pytest.raises(ArithmeticError):
            break_backward(model, data(ctx, rank=ctx.rank))
        with torch.no_grad():
            for p in (*model.parameters(), *plain.parameters()):
                p.mul_(0.5)  # as a checkpoint of an earlier step does
            blocks, model.blocks = model.blocks, nn.ModuleList([])
            model(data(ctx, rank=ctx.rank))  # does not come to the blocks
            model.blocks = blocks
        if keep:
            assert_freed(model)
        else:
            assert not any(unit_of(block).is_unsharded for block in blocks)
        check_against_one_device(ctx, model, plain)


@sim.ranks(2, backends=NO_GLOO)
def test_another_backward_right_after_a_failed_one(ctx):
    for forward_first in (True, False):
        model, plain = wrap_nested(net(ctx), mesh=mesh_of(ctx)), net(ctx)
        loss = loss_of(model, data(ctx, rank=ctx.rank)) if forward_first else None
        with pytest.raises(ArithmeticError):
            break_backward(model, data(ctx, rank=ctx.rank))
        for p in model.parameters():
            p.grad = None  # as an optimizer's zero_grad does
        if loss is None:
            loss = loss_of(model, data(ctx, rank=ctx.rank))
        loss.backward()
        loss_of(plain, data(ctx)).backward()
        assert_close(gradients(model), gradients(plain))
        assert_freed(model)


@sim.ranks(2, backends=NO_GLOO)
def test_a_backward_inside_of_a_forward(ctx):
    class Energy(Net):
        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                (force,) = torch.autograd.grad(super().forward(x).square().sum(), [x])
            return super().forward(x + force)

    torch.manual_seed(0)
    plain = Energy().to(ctx.device, ctx.float_dtype)
    model = wrap_nested(copy.deepcopy(plain), mesh=mesh_of(ctx))
    for _ in range(2):
        with torch.no_grad():
            assert_close({"y": model(data(ctx))}, {"y": plain(data(ctx))})
        check_one_step(ctx, model, plain)
        assert_freed(model)


# -- dtypes --------------------------------------------------------------------------------------------------------


@sim.ranks(2)
def test_the_dtype_of_a_wrapped_module_can_change(ctx):
    torch.manual_seed(0)
    short = shorter(ctx.float_dtype)
    model = nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 7)).to(ctx.device, short)  # rank 1 has nothing of the first
    plain = copy.deepcopy(model).to(ctx.float_dtype)
    for layer in model:
        fully_shard(layer, mesh=mesh_of(ctx))
    fully_shard(model, mesh=mesh_of(ctx))
    with torch.no_grad():
        model(data(ctx, dtype=short))
    model.to(ctx.float_dtype)
    with torch.inference_mode():
        assert model(data(ctx)).dtype == ctx.float_dtype
    model[1].unshard()
    assert torch.equal(model[1].weight, plain[1].weight)
    model[1].reshard()
    check_against_one_device(ctx, model, plain)
    bf16_linear = nn.Linear(5, 3).to(ctx.device, torch.bfloat16)
    held = fully_shard(bf16_linear, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    held.float()
    assert held(torch.ones(1, 5, device=ctx.device)).dtype == torch.bfloat16


# -- state dicts ---------------------------------------------------------------------------------------------------


@sim.ranks(2, backends=NO_GLOO)
def test_state_dicts_of_what_shows_whole_parameters_have_shards(ctx):
    """`test_sharded_state_dict.py` loads values of any layout."""
    model, plain = wrap_nested(net(ctx), mesh=mesh_of(ctx)), net(ctx).state_dict()
    model.unshard()
    model.blocks[1].unshard()
    for module, prefix in ((model, ""), (model.blocks[1].up, "blocks.1.up."), (model.head, "head.")):
        for name, value in module.state_dict().items():
            assert isinstance(value, DTensor), name
            assert torch.equal(value.full_tensor(), plain[prefix + name])
    with pytest.warns(UserWarning, match="values are copied"):
        model.load_state_dict({name: value + 1 for name, value in plain.items()}, assign=True)
    assert torch.equal(model.head.weight.full_tensor(), plain["head.weight"] + 1)


# -- what it costs -------------------------------------------------------------------------------------------------


def counted(shape, wrap, steps):
    """Collectives and received bytes of rank 0 in the last of a few steps."""
    ranks = torch.Size(shape).numel()

    def setup():
        ctx = sim.RankTest(dist.get_rank(), ranks, "sim", torch.device("cpu"))
        model = net(ctx, torch.float32)
        keep = wrap is fully_shard or None  # FSDP2's default for the root is what ours does
        for block in model.blocks:
            wrap(block, mesh=mesh_of(ctx, *shape), reshard_after_forward=True)
        return ctx, wrap(model, mesh=mesh_of(ctx, *shape), reshard_after_forward=keep)

    def one_step(models):
        ctx, model = models[dist.get_rank()]
        loss_of(model, data(ctx, 0, torch.float32, ctx.rank)).backward()

    with sim.world(ranks) as world:
        models = world.run(setup)
        for _ in range(steps):
            world.trace.clear()
            world.run(one_step, (models,))
        events = world.trace.of_rank(0)
    return [event.op for event in events], {op: world.trace.bytes(op=op, rank=0) for op in {e.op for e in events}}


@pytest.mark.sim
@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 4), (4, 1)])
def test_no_more_collectives_than_fsdp2(shape):
    for step in (1, 2):  # the first step does not know the order yet
        ours, our_bytes = counted(shape, fully_shard, step)
        theirs, their_bytes = counted(shape, fsdp2, step)
        assert len(ours) <= len(theirs), (ours, theirs)
        for op, size in our_bytes.items():
            flags = 0 if op == "all_gather" else 4 * 5 * 4 * torch.Size(shape).numel()  # 4 units, 5 parameters, fp32
            assert size <= their_bytes[op] + flags, op
    gathers = 0 if shape[-1] == 1 else 1 + 2 * 3  # once for the root, twice for every block
    reductions = [op for op in ours if op != "all_gather"]
    assert ours.count("all_gather") == gathers
    assert len(reductions) == 4 * ((shape[-1] > 1) + (len(shape) == 2 and shape[0] > 1))
    if shape == (2, 2):  # a reduce_scatter does not wait behind the all_reduce of the unit before
        assert reductions == ["reduce_scatter", *["reduce_scatter", "all_reduce"] * 3, "all_reduce"]


@sim.ranks(2, backends=NO_GLOO)
def test_nothing_survives_a_step(ctx):
    model = wrap_nested(net(ctx), mesh=mesh_of(ctx))
    for _ in range(2):
        x = data(ctx, rank=ctx.rank).requires_grad_()
        loss = loss_of(model, x)
        loss.backward()
        watched = [weakref.ref(x), weakref.ref(loss)]
        model.zero_grad()
        del x, loss
        gc.collect()
        assert [ref() for ref in watched] == [None, None]
        assert_freed(model)
        for unit in unit_of(model).schedule.units:
            assert all(r.pending is None and r.partial is None for r in unit.reducers)
            assert all(p.unsharded.grad is None for bucket in unit.buckets for p in bucket.params)
        assert unit_of(model).schedule.reductions == []
    alive = weakref.ref(unit_of(model))
    del model, unit, _
    gc.collect()
    assert alive() is None


@sim.ranks(2, backends=NO_GLOO)
def test_units_are_freed_and_reduced_while_backward_goes_on(ctx):
    model = wrap_nested(net(ctx), mesh=mesh_of(ctx))
    later = [unit_of(block) for block in model.blocks[1:]]
    seen = []

    def look(gradient):
        schedule = unit_of(model).schedule
        seen.append(([unit.is_unsharded for unit in later], len(schedule.reductions)))

    model.blocks[0].register_forward_hook(lambda m, args, y: args[0].register_hook(look) and None)
    for _ in range(2):
        loss_of(model, data(ctx, rank=ctx.rank)).backward()
    assert [gathered for gathered, _ in seen] == [[False, False]] * 2
    assert all(reductions > 0 for _, reductions in seen)


@sim.ranks(2, backends=NO_GLOO)
def test_second_derivatives_are_refused(ctx):
    model = wrap_nested(net(ctx), mesh=mesh_of(ctx))
    with pytest.raises(RuntimeError, match=r"create_graph=True went through a fully_shard unit\n  unit: Net"):
        torch.autograd.grad(loss_of(model, x := data(ctx, rank=ctx.rank).requires_grad_()), [x], create_graph=True)
    model.zero_grad()
    check_one_step(ctx, model, net(ctx))


@pytest.mark.parametrize("late", [True, False])
@sim.ranks(2, backends=NO_GLOO)
def test_results_that_forward_does_not_return_never_give_a_wrong_gradient(ctx, late):
    class Aside(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.aside = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x):
            y = self.up(x)
            self.loss = (self.up(y) if late else self.aside(x)).square().mean()
            return y

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Aside() for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.mean() * 0 + sum(layer.loss for layer in self.layers)

    for options in ({}, {"comm_fusion": True}):
        torch.manual_seed(0)
        model = Stack().to(ctx.device, ctx.float_dtype)
        plain = copy.deepcopy(model)
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh_of(ctx), **options)
        plain(data(ctx)).backward()
        refused = r"did not return\n  unit: Aside.*\n  try: return|out of bounds for storage of size 0|was given back"
        for _ in range(2):
            with contextlib.suppress(NoError), pytest.raises(RuntimeError, match=refused):  # noqa: PT012
                model(data(ctx, rank=ctx.rank)).backward()
                assert_close(gradients(model), gradients(plain))  # never a wrong gradient
                assert not late
                raise NoError
            model.zero_grad()


@sim.ranks(2, backends=NO_GLOO)
def test_a_unit_that_returns_nothing_and_keeps_its_result_says_so_in_backward(ctx):
    """Of freed memory the product of a gradient and a weight ended the process, before any check."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 13), nn.Linear(13, 8, bias=False)

        def forward(self, x):
            self.kept = self.down(torch.tanh(self.up(x)))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = Keeps(), nn.Linear(8, 8)

        def forward(self, x):
            self.inner(x)
            return self.head(self.inner.kept)

    model = Outer().to(ctx.device, ctx.float_dtype)
    fully_shard(model.inner, mesh=mesh_of(ctx))
    fully_shard(model, mesh=mesh_of(ctx))
    x = torch.ones(2, 8, device=ctx.device, dtype=ctx.float_dtype)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a tensor that its forward did not return"):
            model(x).sum().backward()
    model(x)
    with torch.no_grad():
        model(x)
    assert model.inner._hyper_parallel_unit.is_resharded()


class NoError(Exception):
    """Backward has given the right gradients."""


@sim.ranks(2, backends=NO_GLOO)
def test_lists_and_dictionaries_that_modules_fill_are_the_callers(ctx):
    class Fills(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.aside = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x, found, state):
            state["mean"] = state["mean"] + self.aside(state["x"]).mean()
            y = self.up(x)
            found.append(y.square().mean())
            return y, found, state

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Fills() for _ in range(3))

        def forward(self, x):
            found, state = [], {"x": x.requires_grad_(), "mean": x.mean()}
            given = state["x"]
            for layer in self.layers:
                x, _, _ = layer(x, found, state)
            assert state["x"] is given
            return x.mean() + sum(found) + state["mean"]

    torch.manual_seed(0)
    model = Stack().to(ctx.device, ctx.float_dtype)
    plain = copy.deepcopy(model)
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh_of(ctx))
    for _ in range(2):
        for net_, rank in ((model, ctx.rank), (plain, None)):
            net_(data(ctx, rank=rank)).backward()
        assert_close(gradients(model), gradients(plain))
    assert_freed(model)


@sim.ranks(2, backends=NO_GLOO)
def test_an_interrupt_leaves_no_trace(ctx):
    model, plain = wrap_nested(net(ctx), mesh=mesh_of(ctx)), net(ctx)

    def stop(*_):
        raise KeyboardInterrupt

    for place in (model.blocks[1].up, model.blocks[2], model.head):
        for hook in (place.register_forward_pre_hook, place.register_forward_hook):
            handle = hook(stop)
            with pytest.raises(KeyboardInterrupt):
                loss_of(model, data(ctx, rank=ctx.rank))
            handle.remove()
            assert all(isinstance(p, DTensor) for p in model.parameters())
    check_against_one_device(ctx, model, plain)
    assert_freed(model)


@sim.ranks(2, backends=NO_GLOO)
def test_changes_without_a_trace_between_forwards(ctx):
    def change(module):
        with torch.no_grad():
            torch._foreach_mul_(list(module.parameters()), 0.5)

    for reshard in (True, False):
        model, plain = wrap_nested(net(ctx), mesh=mesh_of(ctx), reshard_after_forward=reshard), net(ctx)
        for module, rank in ((model, ctx.rank), (plain, None)):
            with torch.no_grad():
                module(data(ctx, rank=rank))
            change(module)
            module(data(ctx, rank=rank)).detach()
            change(module)
        check_against_one_device(ctx, model, plain)


@sim.ranks(2, backends=NO_GLOO)
def test_conversion_of_a_model_that_shows_whole_parameters(ctx):
    model = wrap_nested(net(ctx, shorter(ctx.float_dtype)), mesh=mesh_of(ctx))
    model.unshard()
    model.blocks[0].unshard()
    model.to(ctx.float_dtype)
    check_against_one_device(ctx, model, net(ctx, shorter(ctx.float_dtype)).to(ctx.float_dtype))


@sim.ranks(2, backends=NO_GLOO)
def test_whole_parameters_that_forward_changes_are_an_error(ctx):
    table = fully_shard(nn.Embedding(4, 3, max_norm=1.0).to(ctx.device), mesh=mesh_of(ctx))
    with pytest.raises(RuntimeError, match=r"forward changed the parameter 'weight' in place.*\n.*max_norm.*\n  try: "):
        table(torch.arange(4, device=ctx.device))


@pytest.mark.sim
def test_units_that_average_beside_units_that_add_up_are_refused():
    def rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        parallelize_module(model[0], mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
        for part in (model[0], model):
            fully_shard(part, mesh=mesh["dp"])
        return model

    def refused():
        model = rank()
        message = (
            r"cannot train Sequential: some of its units average .*, others add them up.*\n"
            r"  seen: the root averages, .*; '0' adds up, that of DTensors\n"
            r"  try: set_reduce_op_type\('avg'\) on the root"
        )
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                model(torch.ones(1, 4))

    def told(tell):
        model = rank()
        tell(model)
        model(torch.ones(1, 4)).sum().backward()

    with sim.world(4) as world:
        world.run(refused)
        made = {event.op for event in world.trace.events}
    assert "all_gather" not in made, "nothing has been gathered"
    for tell in (
        lambda model: model.set_reduce_op_type("sum"),
        lambda model: model.set_reduce_op_type("avg"),
        lambda model: [m.set_reduce_op_type(op, recurse=False) for m, op in ((model, "avg"), (model[0], "sum"))],
        lambda model: model[0].requires_grad_(False),
    ):
        sim.run(told, 4, (tell,))


@pytest.mark.parametrize("kind", ["replicate", "replicate_with_fsdp"])
@sim.ranks(2, backends=("sim", "gloo"))
def test_torch_replicates_what_is_around_units(ctx, kind):
    replicate = pytest.importorskip(f"torch.distributed._composable.{kind}").replicate
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3)).double()
    model = copy.deepcopy(plain)
    fully_shard(model[1], mesh=mesh_of(ctx))
    replicate(model)
    for step in range(2):
        loss_of(model, data(ctx, step, torch.float64, ctx.rank)).backward()
        loss_of(plain, data(ctx, step, torch.float64)).backward()
        assert_close(gradients(model), gradients(plain))
    assert_freed(model[1])


@pytest.mark.tier("full")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.sim
def test_compiled_models_train_as_on_one_device(backend):
    def rank(inner):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, plain = Net().double(), Net().double()
        plain.load_state_dict(model.state_dict())
        wrap_nested(model, mesh=init_device_mesh("cpu", (2,)))
        if inner:
            for block in model.blocks:
                block.compile(backend=backend)
        else:
            model.compile(backend=backend)
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        loss_of(model, x[dist.get_rank() * 4 :][:4]).backward()
        loss_of(plain, x).backward()
        assert_close(gradients(model), gradients(plain))

    for inner in (True, False):
        sim.run(rank, 2, (inner,))


@sim.ranks(2, backends=NO_GLOO)
def test_inputs_go_without_the_garbage_collector(ctx):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for given in (lambda x: ((x,), {}), lambda x: ((), {"x": x})):
        model = fully_shard(net(ctx, torch.float32), mesh=mesh_of(ctx), mp_policy=policy)
        x = data(ctx, 0, torch.float32, ctx.rank).to(torch.bfloat16).requires_grad_()
        args, kwargs = given(x)
        gc.collect()
        gc.disable()
        try:
            model(*args, **kwargs).square().mean().backward()
            gone = weakref.ref(x)
            del x, args, kwargs
            assert gone() is None
        finally:
            gc.enable()
