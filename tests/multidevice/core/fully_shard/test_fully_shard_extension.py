"""Parameters with FSDP2's tensor extension, compared with FSDP2 on the same model."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import sim
from hyper_parallel import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

pytestmark = pytest.mark.tier("test")

aten = torch.ops.aten
KEPT = {aten.detach, aten.empty_like, aten.new_zeros, aten.slice, aten.split, aten.copy_, aten.view, aten.as_strided}
KEPT |= {aten._to_copy, aten.clone}


class Weight8(torch.Tensor):
    """A weight that travels as float8 numbers with one scale, and computes in its own dtype or `param_dtype`."""

    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass
        return made(cls, held.shape, strides=held.stride(), dtype=held.dtype, device=held.device)

    def __init__(self, held):
        self.held = held

    def __tensor_flatten__(self):
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, outer_size, outer_stride):
        return Weight8(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(cls, lambda t: t.held, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, cls, out) if func.overloadpacket in KEPT else out

    def fsdp_pre_all_gather(self, mesh):
        scale = self.held.new_zeros(()) if self.held.numel() == 0 else self.held.abs().max() / 448
        dist.all_reduce(scale, dist.ReduceOp.MAX, group=mesh.get_group())
        return ((self.held / scale).to(torch.float8_e4m3fn),), scale

    def fsdp_post_all_gather(self, outputs, scale, param_dtype, *, out=None):
        (eights,) = outputs
        full = eights.to(param_dtype) * scale.to(param_dtype)
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                (out._local_tensor if isinstance(out, DTensor) else out).copy_(full)
            return None
        return full, (full,)


class Padding8(Weight8):
    """The same; it pads by itself, as FSDP2 asks for."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert isinstance(module, nn.Linear)
        assert torch.empty(outer_size).stride() == outer_stride
        (eights,), scale = super().fsdp_pre_all_gather(mesh)
        padded = torch.zeros(-(-outer_size[0] // mesh.size()), *outer_size[1:]).to(eights.dtype)
        padded[: len(eights)] = eights
        return (padded,), (scale, outer_size[0])

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        scale, rows = metadata
        return super().fsdp_post_all_gather((outputs[0][:rows],), scale, param_dtype, out=out)


class Pair(TwoTensor):
    """Two tensors, of which both are gathered, and both compute."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.a, self.b.to(torch.float64)), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        assert metadata is None
        a, b = (tensor.to(param_dtype) for tensor in outputs)
        if out is not None:
            with torch.no_grad():
                out.a.copy_(a)  # which may be in its memory already
                out.b.copy_(b)
            return None
        return Pair(a, b), (*outputs, a, b)


def net(kind, sizes=(6, 8, 8, 4)):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b, bias=kind is not Pair) for a, b in pairwise(sizes)))
    for layer in model:
        held = layer.weight.detach()
        layer.weight = nn.Parameter(Pair(held, held.clone()) if kind is Pair else kind(held))
    return model


def wrap_net(wrap, kind, sizes=(6, 8, 8, 4), **options):
    model = net(kind, sizes)
    wrap(model[1], **options)
    return wrap(model, **options)


def train(model, rank, steps=3, foreach=True):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)
    losses = []
    for step in range(steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x).float().square().mean()
        loss.backward()
        losses.append(loss.a.item() if isinstance(loss, TwoTensor) else loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def held_bytes(group):
    weights = [param.unsharded_param for param in group.fsdp_params if param.unsharded_param.dim() == 2]
    held = pytree.tree_map_only(Pair, lambda pair: (pair.a, pair.b), weights)
    return sum(tensor.untyped_storage().nbytes() for tensor in pytree.tree_leaves(held))


@pytest.mark.parametrize("kind", [Weight8, Pair])
@sim.ranks(2, backends=("sim", "gloo"))
def test_the_same_losses_as_fsdp2(ctx, kind):
    ours, theirs = (wrap_net(wrap, kind) for wrap in (fully_shard, fsdp.fully_shard))
    ours(torch.ones(1, 6))
    inside, root = (ours.get_submodule(name)._get_fsdp_state()._fsdp_param_group for name in ("1", ""))
    assert held_bytes(inside) == 0
    assert held_bytes(root) == (8 * 6 + 4 * 8) * 4 * (1 + (kind is Pair))  # kept for backward
    losses = train(ours, ctx.rank)
    assert losses == train(theirs, ctx.rank)
    assert len(set(losses)) == 3
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert isinstance(own, DTensor)
        assert type(own._local_tensor) is type(other._local_tensor)
        assert own.placements == (Shard(0),)


@pytest.mark.parametrize("kind", [Weight8, Padding8])
@sim.ranks(4, backends=("sim",))
def test_shards_of_different_sizes(ctx, kind):
    """FSDP2 leaves the padding to the extension; here both forms will do."""
    sizes = (6, 7, 5, 1)  # of 1, one rank alone has anything
    losses = train(wrap_net(fully_shard, kind, sizes), ctx.rank)
    assert losses == train(wrap_net(fsdp.fully_shard, Padding8, sizes), ctx.rank)


def test_one_byte_per_element_is_gathered():
    def gathered(kind):
        with sim.world(2) as world:

            def body():
                model = fully_shard(nn.Linear(6, 8, bias=False))
                if kind is not None:
                    model = nn.Linear(6, 8, bias=False)
                    model.weight = nn.Parameter(kind(model.weight.detach()))
                    fully_shard(model)
                train(model, dist.get_rank(), steps=1)

            world.run(body)
            sizes = [world.trace.bytes(op=op, rank=0) for op in {e.op for e in world.trace.events} if "gather" in op]
            return sum(sizes)

    assert (gathered(None), gathered(Weight8)) == (4 * 24, 24)  # of the other rank's half of the elements


@pytest.mark.tier("test", each=3)
@pytest.mark.parametrize(
    "options",
    [
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    ],
    ids=["offload", "keep", "smaller world", "bfloat16"],
)
@pytest.mark.parametrize("kind", [Weight8, Pair])
@sim.ranks(4, backends=("sim",))
def test_options(ctx, kind, options):
    ours = train(wrap_net(fully_shard, kind, **options), ctx.rank, foreach=False)
    if "reshard_after_forward" in options:  # FSDP2 does not take a smaller mesh with an extension
        options = {}
    theirs = wrap_net(fsdp.fully_shard, kind, **options)
    assert ours == train(theirs, ctx.rank, foreach=False)


@sim.ranks(4, backends=("sim",))
def test_replicas_a_copy_a_state_dict_and_an_evaluation_first(ctx):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    expected = train(wrap_net(fsdp.fully_shard, Weight8, mesh=mesh), ctx.rank)
    model = wrap_net(fully_shard, Weight8, mesh=mesh)
    with torch.inference_mode():
        model(torch.ones(1, 6))
    twin, values = copy.deepcopy(model), {k: v.clone() for k, v in model.state_dict().items()}
    assert train(model, ctx.rank) == expected
    assert train(twin, ctx.rank) == expected
    model.load_state_dict(values)
    assert train(model, ctx.rank) == expected
    full = net(Weight8)
    fully_shard(full, mesh=mesh, replicate_params=list(full.parameters()))
    assert train(full, ctx.rank) == pytest.approx(expected, rel=1e-5)  # one sum over all ranks


@pytest.mark.parametrize("kind", [Weight8, Pair])
@sim.ranks(2, backends=("sim",))
def test_gradients_that_wait(ctx, kind):
    """Micro-batches without communication add up as they do in FSDP2."""

    def run(wrap):
        model = wrap_net(wrap, kind)
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            out = model(torch.full((2, 6), float(step + ctx.rank)))
            out.float().square().mean().backward()
        return [param.grad.full_tensor() for param in model.parameters()]

    for own, other in zip(run(fully_shard), run(fsdp.fully_shard), strict=True):
        assert type(own) is torch.Tensor
        torch.testing.assert_close(own, other)


@sim.ranks(4, backends=("sim",))
def test_tensor_parallel(ctx):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def run(wrap):
        model = net(Weight8, (6, 8))
        full = distribute_tensor(model[0].weight.held, mesh["tp"], [Shard(0)])
        local = DTensor.from_local(Weight8(full.to_local()), mesh["tp"], [Shard(0)], run_check=False)
        model[0].weight = nn.Parameter(local)
        model[0].bias = nn.Parameter(distribute_tensor(model[0].bias.detach(), mesh["tp"], [Shard(0)]))
        wrap(model, mesh=mesh["dp"])
        if wrap is fully_shard:
            model.set_reduce_op_type("avg")
        losses = []
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank()))
            x = DTensor.from_local(x, mesh["tp"], [Replicate()], run_check=False)
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.full_tensor().item())
            with torch.no_grad():
                for param in model.parameters():
                    param._local_tensor.sub_(param.grad._local_tensor)
            model.zero_grad()
        return losses

    losses = run(fully_shard)
    assert losses == run(fsdp.fully_shard)
    assert len(set(losses)) == 3


@sim.ranks(2, backends=("sim",))
def test_made_on_meta(ctx):
    with torch.device("meta"):
        model = nn.Linear(6, 8)
    model.weight = nn.Parameter(Weight8(model.weight.detach()))
    fully_shard(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    assert torch.equal(model(torch.ones(1, 6)), torch.full((1, 8), 7.0))
    with torch.no_grad():
        model.weight.fill_(2.0)  # by hand
    assert torch.equal(model(torch.ones(1, 6)), torch.full((1, 8), 13.0))


@sim.ranks(2, backends=("sim",))
def test_what_cannot_be_gathered(ctx):
    class Scaled(Weight8):
        def fsdp_pre_all_gather(self, mesh):
            return (self.held, self.held.abs().sum(1)), None

    class Changing(Weight8):
        def fsdp_pre_all_gather(self, mesh):
            self.calls = getattr(self, "calls", 0) + 1
            return (self.held.to(torch.float64 if self.calls > 1 else torch.float32),), torch.ones(())

    class Half(Weight8):
        def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
            return outputs[0][:2], ()

    x = torch.ones(1, 6)
    with pytest.raises(RuntimeError, match=r"of another shape than its shard's\n  shape: \(3, 6\) over 2.*\n  try: "):
        fully_shard(net(Scaled, (6, 3)))(x)
    with pytest.raises(RuntimeError, match=r"is not of the shape of the parameter\n  seen: \(2, 6\), exp.*\n  try: "):
        fully_shard(net(Half, (6, 4)))(x)
    model = fully_shard(net(Changing, (6, 4)))
    with torch.no_grad():
        model(x)
        with pytest.raises(RuntimeError, match=r"gives other tensors than the first time.*\n  seen: .*\n  try: "):
            model(x)


# -- drawn meshes, shapes and recipes ----------------------------------------------------------------------------------


class ByRow8(Weight8):
    """A scale for each row, which travels beside the numbers."""

    def fsdp_pre_all_gather(self, mesh):
        scale = self.held.abs().amax(1, keepdim=True) / 448
        return ((self.held / scale).to(torch.float8_e4m3fn), scale), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        eights, scales = outputs
        scales = scales.repeat_interleave(len(eights) // len(scales), 0)
        return super().fsdp_post_all_gather((eights,), scales, param_dtype, out=out)


class ByShard8(ByRow8):
    """A scale for each rank's shard, which no rank asks the others for."""

    def fsdp_pre_all_gather(self, mesh):
        scale = self.held.abs().max().reshape(1, 1) / 448
        return ((self.held / scale).to(torch.float8_e4m3fn), scale), None


RECIPES = {"tensor": Weight8, "row": ByRow8, "shard": ByShard8}


class Case(NamedTuple):
    """Shrinks towards one rank that gathers a small weight by one scale."""

    recipe: str
    replicate: int
    shard: int
    tp: int
    rows: int
    columns: int
    dtype: torch.dtype
    keep: bool
    compiled: bool = False

    def scaled_alone(self, weight):
        """The parts of a weight of which each has a scale; ranks of tp gather by themselves."""
        if self.recipe == "row":
            return weight.split(1)
        chunks = weight.chunk(self.tp)
        return chunks if self.recipe == "tensor" else [part for each in chunks for part in each.chunk(self.shard)]

    def in_float8(self, weight):
        """What a weight is in float8, and how far from it that may be: half a step of its three bits, or the least."""
        rounded, bounds = [], []
        for part in self.scaled_alone(weight):
            scale = part.abs().max() / 448
            rounded.append((part / scale).to(torch.float8_e4m3fn).to(self.dtype) * scale.to(self.dtype))
            bounds.append(part.abs() * 2**-4 + scale * 2**-10 + 3 * part.abs() * torch.finfo(self.dtype).eps)
        return torch.cat(rounded), torch.cat(bounds)


@st.composite
def cases(draw):
    recipe = draw(st.sampled_from(tuple(RECIPES)))
    meshes = ((1, 1, 1), (1, 2, 1), (1, 3, 1), (1, 4, 1), (2, 2, 1), (1, 1, 2), (1, 2, 2), (1, 3, 2))
    replicate, shard, tp = draw(st.sampled_from(meshes))
    rows = draw(st.integers(1, 9)) * (1 if recipe == "tensor" and tp == 1 else shard * tp)  # scales need even shards
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16)))
    return Case(recipe, replicate, shard, tp, rows, draw(st.integers(1, 7)), dtype, draw(st.booleans()))


def learn(case, model, change=lambda x: x):
    """Take a step; return the weight that forward had, as it makes it of unit vectors."""
    with torch.no_grad():
        used = change(model(torch.eye(case.columns, dtype=case.dtype)).t())
    count = case.columns + 1  # one row more: torch does not compile DTensors with gradients after none of one shape
    x = torch.linspace(-1, 1, count * case.columns).view(count, case.columns).to(case.dtype)
    change(model(x)).float().square().mean().backward()
    return used


def on_ranks(case):
    """The weights of some steps, in float8 as forward had them, and as they are trained."""
    mesh = init_device_mesh("cpu", (case.replicate, case.shard, case.tp), mesh_dim_names=("replicate", "shard", "tp"))
    torch.manual_seed(0)
    model = nn.Linear(case.columns, case.rows, bias=False)
    local = RECIPES[case.recipe](model.weight.detach().chunk(case.tp)[mesh["tp"].get_local_rank()].clone())
    model.weight = nn.Parameter(DTensor.from_local(local, mesh["tp"], [Shard(0)]) if case.tp > 1 else local)
    if case.tp > 1:
        inputs = lambda module, args: DTensor.from_local(args[0], mesh["tp"], [Replicate()], run_check=False)  # noqa: E731
        model.register_forward_pre_hook(inputs)
        model.register_forward_hook(lambda module, args, out: out.full_tensor())
    policy = MixedPrecisionPolicy(param_dtype=case.dtype, reduce_dtype=torch.float32)
    axes = ("replicate", "shard") if case.replicate > 1 else ("shard",)
    fully_shard(model, mesh=mesh[axes], mp_policy=policy, reshard_after_forward=not case.keep)
    model.set_reduce_op_type("avg")
    if case.compiled:
        model.compile(backend="aot_eager")
    order = torch.arange(dist.get_world_size()).view(case.replicate, case.shard, case.tp)[0].t().flatten()
    found = []
    for _ in range(3):
        held = [None] * dist.get_world_size()
        dist.all_gather_object(held, model.weight._local_tensor.held.clone())
        found.append((learn(case, model), torch.cat([held[rank] for rank in order.tolist()])))
        with torch.no_grad():
            model.weight._local_tensor.sub_(model.weight.grad._local_tensor * 0.25)
        model.zero_grad()
    return found


def on_one_device(case):
    """The same of a plain weight that is rounded before each use."""
    torch.manual_seed(0)
    weight, found = nn.Linear(case.columns, case.rows, bias=False).weight.detach(), []
    for _ in range(3):
        rounded = case.in_float8(weight)[0].requires_grad_()
        found.append((learn(case, lambda x, rounded=rounded: nn.functional.linear(x, rounded)), weight))
        weight = weight - rounded.grad.float() * 0.25
    return found


@pytest.mark.tier("full")
@pytest.mark.sim
@settings(max_examples=max(settings.default.max_examples // 4, 1))
@given(cases())
@example(Case("tensor", 1, 2, 1, 6, 4, torch.float32, False, compiled=True))
@example(Case("row", 1, 2, 2, 4, 4, torch.bfloat16, True, compiled=True))
def test_float8_weights_are_those_of_one_device_in_any_mesh(case):
    event(f"{case.recipe}, {'tp' if case.tp > 1 else 'no tp'}")
    alone = on_one_device(case)
    for found in sim.run(on_ranks, case.replicate * case.shard * case.tp, (case,)):
        for (used, held), (_, expected) in zip(found, alone, strict=True):
            rounded, bound = case.in_float8(held)
            assert torch.equal(used, rounded), "the same scales: the same bits"
            assert bool(((used.float() - held).abs() <= bound).all())
            if case.tp == 1 and case.shard != 3:  # a mean over 2 or 4 equal gradients is exact
                assert torch.equal(held, expected)
            else:  # a gradient that is rounded otherwise may move a weight to the next number of float8
                torch.testing.assert_close(held, expected, rtol=2**-3, atol=2**-3 * float(expected.abs().max()))
