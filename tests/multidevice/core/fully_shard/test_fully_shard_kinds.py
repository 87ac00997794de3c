"""fully_shard and every kind of parameter: against the same model on one device, in float64 where it is reduced.

A parameter may be plain (and then split along any dim, or replicated), a DTensor that keeps its layout, or a DTensor
that is split further. Here also: what changes how parameters are kept and reduced, but must not change any number.
"""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from fsdp2_kit import Net, full, loss_of, sgd
from rounding_kit import results, shorter
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from units_kit import assert_near, gradients, mesh_of, values

import sim
from hyper_parallel.core.fully_shard import reduce as reduce_file
from hyper_parallel.core.fully_shard.api import fully_shard
from hyper_parallel.core.fully_shard.unit import unit_of
from hyper_parallel.core.fully_shard.utils import CPUOffloadPolicy, FullyShardParamMode, MixedPrecisionPolicy

pytestmark = pytest.mark.tier("test")

NO_GLOO = ("sim", "gpu", "npu")
MODES = FullyShardParamMode
EPS, EPS_SINGLE = torch.finfo(torch.float64).eps, torch.finfo(torch.float32).eps

# -- the comparison ------------------------------------------------------------------------------------------------


def build(ctx, make, dtype=None):
    """The same model on every rank, and once more for one device."""
    torch.manual_seed(0)
    model = make().to(ctx.device, dtype or ctx.float_dtype)
    return model, copy.deepcopy(model)


def data(ctx, step=0, part=None, rows=4, width=5):
    """`rows` inputs for each of the parts: those of one, `(index, count)`, or of all."""
    index, count = part
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(count * rows, width, generator=generator, dtype=torch.float64).to(ctx.device, ctx.float_dtype)
    return x if index is None else x[index * rows : (index + 1) * rows]


def units_in(model):
    return list(dict.fromkeys(unit_of(m) for m in model.modules() if unit_of(m) is not None))


def managed(model):
    return [param for unit in units_in(model) for bucket in unit.buckets for param in bucket.params]


def placements_of(model):
    """How and along which dim each parameter is managed, by name."""
    found = {id(p.sharded): (p.placement.mode, p.placement.shard_dim) for p in managed(model)}
    return {name: found.get(id(parameter)) for name, parameter in model.named_parameters()}


def assert_freed(model):
    for unit in units_in(model):
        for bucket in unit.buckets:
            assert not bucket.gathered
            assert bucket.post_forward_shard is None
            assert bucket.aliased or bucket.unsharded_buffer.untyped_storage().nbytes() == 0
        for bucket in unit.buckets:
            for param in bucket.params:
                assert isinstance(param.sharded, DTensor)
                assert all(getattr(slot.module, slot.name) is param.sharded for slot in param.slots), param.name
                assert param.unsharded.grad is None


def alone(make=Net, dtype=torch.float32, make_optimizer=sgd):
    torch.manual_seed(0)
    model, ctx = make().to(dtype), sim.RankTest(0, 4, "sim", torch.device("cpu"))
    loss = lambda step: loss_of(model, data(ctx, step, (None, 4)).to(dtype))  # noqa: E731
    return results(*train(model, loss, make_optimizer=make_optimizer))


ALONE_IN_SHORT = partial(alone, dtype=torch.float16)


assert_close = partial(assert_near, alone=alone, eps=EPS)  # batch, widths and layers multiply to less than 4096


def assert_equal(ours, theirs):
    assert list(ours) == list(theirs)
    for name, wanted in theirs.items():
        assert (ours[name] is None) == (wanted is None), name
        assert wanted is None or torch.equal(ours[name], wanted), name


def train(model, loss, steps=3, clip=None, make_optimizer=sgd):
    """Losses, the last gradients and the final parameters."""
    optimizer = make_optimizer(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(step)
        value.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(value.detach())
        assert_freed(model)
    return losses, gradients(model), values(model)


def check(
    ctx,
    model,
    plain,
    *,
    loss=loss_of,
    parts=None,
    part=None,
    scale=1.0,
    losses="mean",
    clip=None,
    eps=None,
    alone=alone,
):
    """Three steps on all ranks are three steps on one device with all data.

    Args:
        loss: Of the sharded model and its inputs.
        parts: Into how many parts the data is split; None: as many as there are ranks.
        part: The own one.
        scale: Factor on the sharded model's loss.
        losses: "mean": the ranks' losses average to that of one device; "sum": they add up to it; "same": each is it.
        clip: Clip gradients by that norm.
        eps: Of the coarsest dtype computed in.
        alone: What to measure the rounding on where there is no float64.
    """
    parts = ctx.world_size if parts is None else parts
    part = ctx.rank if part is None else part
    ours = train(model, lambda step: loss(model, data(ctx, step, (part, parts))) * scale, clip=clip)
    theirs = train(plain, lambda step: loss_of(plain, data(ctx, step, (None, parts))), clip=clip)
    bound = {"alone": alone} if eps is None else {"alone": alone, "eps": eps, "summands": 64}
    for got, wanted in zip(ours[0], theirs[0], strict=True):
        if losses != "same":
            dist.all_reduce(got)
            got = got / (scale * ctx.world_size) if losses == "mean" else got
        assert_close({"loss": got}, {"loss": wanted}, **bound)
    assert_close(ours[1], theirs[1], **bound)
    assert_close(ours[2], theirs[2], **bound)


def check_gradients(ctx, model, plain, *, numbers=(0,), tell=lambda micro: None, part=None, loss=loss_of, factor=1):
    """After some micro-batches, gradients are those of one device, which has the data of all ranks."""
    part = (ctx.rank, ctx.world_size) if part is None else part
    for micro, number in enumerate(numbers):
        tell(micro)
        loss(model, data(ctx, number, part)).backward()
        (loss_of(plain, data(ctx, number, (None, part[1]))) * factor).backward()
    assert_close(gradients(model), gradients(plain))


def wrap_blocks(model, wrap=fully_shard, **options):
    for block in model.blocks:
        wrap(block, **options)
    return wrap(model, **options)


# -- plain parameters, split along any dim ---------------------------------------------------------------------------


def dim_one(parameter):
    return Shard(1) if parameter.dim() > 1 else None


def last_dim(parameter):
    return Shard(-1)


def longest_dim(parameter):
    return Shard(max(range(parameter.dim()), key=lambda dim: parameter.shape[dim]))


PLACEMENTS = (dim_one, last_dim, longest_dim)


def local_shape(shape, dim, index, count):
    """By torch.chunk, of which empty parts are left out."""
    parts = torch.empty(shape, device="meta").chunk(count, dim)
    return parts[index].shape if index < len(parts) else torch.Size((*shape[:dim], 0, *shape[dim + 1 :]))


def check_placements(ctx, shape, placement):
    mesh = mesh_of(ctx, *shape)
    model, plain = build(ctx, Net)
    wrap_blocks(model, mesh=mesh, shard_placement_fn=placement)
    for (name, ours), parameter in zip(model.named_parameters(), plain.parameters(), strict=True):
        dim = (placement(parameter) or Shard(0)).dim % parameter.dim()
        assert ours.placements == (*[Replicate()] * (len(shape) - 1), Shard(dim)), name
        index, count = mesh.get_coordinate()[-1], shape[-1]
        assert ours.to_local().shape == local_shape(parameter.shape, dim, index, count), name
        assert torch.equal(ours.full_tensor(), parameter), name
    check(ctx, model, plain)


@pytest.mark.tier("test", each=3)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 4), (4, 1)])
@sim.ranks(4, backends=NO_GLOO)
def test_split_along_any_dim(ctx, shape, placement):
    check_placements(ctx, shape, placement)


class Images(nn.Module):
    """Parameters of four, three, two and one dims."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, (2, 3))
        self.mix = nn.Parameter(torch.randn(3, 7, 5))
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        x = F.pad(x.unsqueeze(1).unsqueeze(1).expand(-1, 1, 3, -1), (1, 1))  # [n, 1, 3, 7]
        h = torch.tanh(self.conv(x)).sum(2)  # [n, 3, 5]
        return self.head(torch.einsum("nci,cki->ni", h, self.mix))


@sim.ranks(3, backends=NO_GLOO)
def test_split_along_the_dims_of_a_convolution(ctx):
    for dim in range(4):
        model, plain = build(ctx, Images)
        fully_shard(model, mesh=mesh_of(ctx), shard_placement_fn=lambda p, d=dim: Shard(min(d, p.dim() - 1)))
        assert model.conv.weight.placements == (Shard(dim),)
        check(ctx, model, plain)


# -- plain parameters of every kind ------------------------------------------------------------------------------------


class Kinds(nn.Module):
    """Without dims, with memory in another order, of several dtypes, tied, frozen, without elements."""

    def __init__(self, wide):
        super().__init__()
        self.wide, self.short = wide, shorter(wide)
        self.gain = nn.Parameter(torch.tensor(1.5, dtype=wide))
        self.still = nn.Parameter(torch.tensor(0.5, dtype=wide), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(6, 5, dtype=wide).t() / 4)
        self.permuted = nn.Parameter(torch.randn(3, 6, 2, dtype=wide).permute(2, 0, 1) / 4)
        self.every_other = nn.Parameter(torch.randn(12, dtype=wide)[::2])
        self.single = nn.Linear(6, 6).to(self.short)
        self.single_gain = nn.Parameter(torch.tensor(0.75, dtype=self.short))
        self.phase = nn.Parameter(torch.randn(3, 2, dtype=wide.to_complex()) / 4)
        self.turn = nn.Parameter(torch.tensor(1 + 2j, dtype=wide.to_complex()))
        self.count = nn.Parameter(torch.arange(7), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0, 3, dtype=wide))
        self.head = nn.Linear(6, 3, bias=False).to(wide)
        self.tied = nn.Linear(6, 3).to(wide)
        self.tied.weight = self.head.weight
        self.never = nn.Parameter(torch.ones(2, dtype=wide))

    def forward(self, x):
        h = x @ self.turned * self.gain * self.still
        h = h + (self.single(h.to(self.short)) * self.single_gain).to(self.wide)
        h = h * self.permuted.sum((0, 1)) + self.every_other + self.nothing.sum()
        h = h * (self.phase.sum() * self.turn).real + self.count.sum() * 0.01
        return self.head(torch.tanh(h)) + self.tied(torch.tanh(h))


def kinds_alone():
    torch.manual_seed(0)
    model, ctx = Kinds(torch.float32), sim.RankTest(0, 4, "sim", torch.device("cpu"))
    return results(*train(model, lambda step: loss_of(model, data(ctx, step, (None, 4)).float())))


def check_kinds(ctx, mesh, **options):
    torch.manual_seed(0)
    model = Kinds(ctx.float_dtype).to(ctx.device)
    plain = copy.deepcopy(model)
    fully_shard(model, mesh=mesh, **options)
    assert model.tied.weight is model.head.weight
    assert not any(p.is_contiguous() for p in (plain.turned, plain.permuted))
    assert_equal(values(model), values(plain))
    data_axes = mesh.ndim
    assert model.gain.placements == model.turn.placements == (Replicate(),) * data_axes
    assert placements_of(model)["gain"] == (MODES.LOCAL_PARAM, None)
    check(ctx, model, plain, eps=EPS_SINGLE, alone=kinds_alone)
    assert model.tied.weight is model.head.weight
    assert model.never.grad is None
    assert model.still.grad is None


@sim.ranks(2)
def test_parameters_of_every_kind(ctx):
    for shape in ((2,), (2, 1), (1, 2)):
        check_kinds(ctx, mesh_of(ctx, *shape))
    check_kinds(ctx, mesh_of(ctx), shard_placement_fn=lambda p: Shard(-1))
    check_kinds(ctx, mesh_of(ctx), comm_fusion=True)
    check_kinds(ctx, mesh_of(ctx), mp_policy=MixedPrecisionPolicy(reduce_dtype=ctx.float_dtype))
    if ctx.device_type == "cpu":  # what is offloaded would be gathered to be compared, which hccl and nccl do not
        check_kinds(ctx, mesh_of(ctx), offload_policy=CPUOffloadPolicy())


@sim.ranks(4, backends=NO_GLOO)
def test_parameters_of_every_kind_over_two_axes(ctx):
    check_kinds(ctx, mesh_of(ctx, 2, 2))
    check_kinds(ctx, mesh_of(ctx, 2, 2), comm_fusion=True, shard_placement_fn=longest_dim)


# -- plain parameters that are replicated ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"comm_fusion": True}, {"offload_policy": CPUOffloadPolicy()}])
@sim.ranks(4, backends=("sim",))
def test_whole_parameters_in_another_dtype(ctx, options):
    policy = MixedPrecisionPolicy(torch.float32, torch.float64)
    for shape in ((4,), (2, 2)):
        model, plain = build(ctx, Net)
        kept = [model.scale, model.head.weight]
        mesh = mesh_of(ctx, *shape)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, **options)
        fully_shard(model, mesh=mesh, replicate_params=kept, mp_policy=policy, **options)
        check(ctx, model, plain, eps=EPS_SINGLE)
        assert {p.dtype for p in model.parameters()} == {torch.float64}


@pytest.mark.sim
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_whole_parameters_take_one_all_reduce_over_all_ranks(shape):
    def step():
        model = nn.Sequential(nn.Linear(5, 3), nn.Tanh())
        mesh = init_device_mesh("cpu", shape)
        fully_shard(model, mesh=mesh, replicate_params=list(model.parameters()))
        for _ in range(2):
            model(torch.ones(2, 5)).sum().backward()
        return model[0].bias.grad.placements

    with sim.world(4) as world:
        assert world.run(step) == [(Replicate(),) * len(shape)] * 4
        events = world.trace.of_rank(0)
    assert [(event.op, len(event.group)) for event in events] == [("all_reduce", 4)] * 2


@sim.ranks(2, backends=NO_GLOO)
def test_ignoring_wins_over_keeping_whole(ctx):
    model, plain = build(ctx, Net)
    scale, weight = model.scale, model.head.weight
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of(ctx))
    fully_shard(model, mesh=mesh_of(ctx), ignored_params=[scale], replicate_params=[scale, weight])
    assert model.scale is scale
    assert type(scale) is nn.Parameter
    assert placements_of(model)["scale"] is None
    assert model.head.weight.placements == (Replicate(),)
    loss_of(model, data(ctx, part=(ctx.rank, 2))).backward()
    own = copy.deepcopy(plain)
    loss_of(own, data(ctx, part=(ctx.rank, 2))).backward()
    assert_close({"scale": scale.grad}, {"scale": own.scale.grad})  # of this rank's data alone
    loss_of(plain, data(ctx, part=(None, 2))).backward()
    assert_close({"w": model.head.weight.grad.full_tensor()}, {"w": plain.head.weight.grad})


# -- DTensors that keep their layout -----------------------------------------------------------------------------------


class Layers(nn.Module):
    """Two layers and a scale, to be laid out over (dp, tp)."""

    def __init__(self, hidden=6):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5))
        self.up = nn.Parameter(torch.randn(hidden, 5))
        self.down = nn.Parameter(torch.randn(3, hidden))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return F.linear(torch.tanh(F.linear(x * self.scale, self.up)), self.down) + self.bias


LAYOUT = {
    "scale": (Replicate(), Replicate()),
    "up": (Replicate(), Shard(0)),
    "down": (Replicate(), Shard(1)),
    "bias": (Replicate(), Replicate()),
}


class Global(Layers):
    """Computes with DTensors all the way; `placement`: of its inputs over dp."""

    def forward(self, x):
        x = DTensor.from_local(x, self.mesh, [self.placement, Replicate()], run_check=False)
        return super().forward(x).redistribute(placements=[self.placement, Replicate()])


def global_loss(model, x):
    return model(x).square().mean().full_tensor()


class Local(Layers):
    """Computes with this rank's parts, and adds up over tp by itself; `explicit`: says what its gradients are."""

    def local(self, parameter):
        if not self.explicit:
            return parameter.to_local()
        return parameter.to_local(grad_placements=[Partial() if p.is_replicate() else p for p in parameter.placements])

    def forward(self, x):
        h = torch.tanh(F.linear(x * self.local(self.scale), self.local(self.up)))
        part = F.linear(h, self.local(self.down))
        rows = [Shard(0)] * (self.mesh.ndim - 1)
        y = DTensor.from_local(part, self.mesh, [*rows, Partial()], run_check=False)
        y = y.redistribute(placements=[*rows, Replicate()]).to_local(grad_placements=[*rows, Partial()])
        return y + self.local(self.bias)


def local_loss(model, x):
    """This rank's share: all ranks' shares add up to the mean over all data."""
    return model(x).square().mean() / dist.get_world_size()


def lay_out(ctx, kind, mesh, hidden=6):
    model, plain = build(ctx, lambda: kind(hidden))
    plain.__class__ = Layers
    model.mesh = mesh
    for name, placements in LAYOUT.items():
        parameter, placements = getattr(model, name), [*[Replicate()] * (mesh.ndim - 2), *placements]
        setattr(model, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))
    return model, plain


def check_computing_with_dtensors(ctx, mesh, wrap, hidden=6, check_home=lambda model: None, further=False):
    """`further`: split over dp. Then, as ever in torch, `to_local` takes gradients to be the same on all of tp."""
    dp = mesh.get_local_rank("dp")
    for placement in (Shard(0), Replicate()):
        model, plain = lay_out(ctx, Global, mesh, hidden)
        model.placement = placement
        wrap(model)
        check_home(model)
        parts = 2 if placement.is_shard() else 1
        check(ctx, model, plain, loss=global_loss, parts=parts, part=dp if parts == 2 else 0, losses="same")
    for explicit in (True,) if further else (True, False):
        model, plain = lay_out(ctx, Local, mesh, hidden)
        model.explicit = explicit
        wrap(model)
        check_home(model)
        check(ctx, model, plain, loss=local_loss, parts=2, part=dp, losses="sum")


@pytest.mark.tier("full")
@sim.ranks(4, backends=NO_GLOO)
def test_dtensors_that_keep_their_layout(ctx):
    mesh = mesh_of(ctx, 2, 2, names=("dp", "tp"))

    def kept(model):
        for name, placements in LAYOUT.items():
            parameter = getattr(model, name)
            assert (parameter.device_mesh, parameter.placements) == (mesh, placements)
        assert set(placements_of(model).values()) == {(MODES.DTENSOR_COMPAT, None)}

    check_computing_with_dtensors(ctx, mesh, fully_shard, check_home=kept)
    check_computing_with_dtensors(ctx, mesh, lambda model: fully_shard(model, reshard_after_forward=False))


@pytest.mark.sim
def test_kept_dtensors_communicate_their_gradients_only():
    def step():
        ctx = sim.RankTest(dist.get_rank(), 4, "sim", torch.device("cpu"))
        mesh = mesh_of(ctx, 2, 2, names=("dp", "tp"))
        weight = DTensor.from_local(torch.ones(2, 3), mesh, [Replicate(), Shard(0)], run_check=False)
        model = OfLocal(nn.Parameter(weight))
        fully_shard(model)
        model(torch.ones(2, 3)).sum().backward()
        return model.w.grad.placements, model.w.grad.to_local().tolist()

    with sim.world(4) as world:
        results = world.run(step)
        events = world.trace.of_rank(0)
    assert results == [((Replicate(), Shard(0)), [[4.0] * 3] * 2)] * 4  # a sum over dp
    assert [(event.op, event.group) for event in events] == [("all_reduce", (0, 2))]


class OfLocal(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = w

    def forward(self, x):
        return x @ self.w.to_local().t()


class Both(nn.Module):
    """DTensors of two layouts, and plain parameters, in one unit."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 7)
        self.kept = nn.Parameter(torch.randn(7))
        self.cut = nn.Parameter(torch.randn(6, 7))
        self.blocks = nn.ModuleList([nn.Linear(6, 6)])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        kept, cut = self.kept, self.cut
        if isinstance(kept, DTensor):
            kept = kept.to_local()
            cut = cut.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        h = torch.tanh(F.linear(self.embed(x) * kept, cut))
        return self.head(self.blocks[0](h))


@sim.ranks(4, backends=NO_GLOO)
def test_dtensors_and_plain_parameters_without_a_mesh(ctx):
    model, plain = build(ctx, Both)
    mesh = mesh_of(ctx)
    for name, placement in (("kept", Replicate()), ("cut", Shard(0))):
        setattr(model, name, nn.Parameter(distribute_tensor(getattr(model, name).detach(), mesh, [placement])))
    fully_shard(model)
    assert placements_of(model)["kept"] == placements_of(model)["cut"] == (MODES.DTENSOR_COMPAT, None)
    assert placements_of(model)["head.weight"] == (MODES.LOCAL_PARAM, 0)
    assert model.head.weight.placements == (Shard(0),)
    check(ctx, model, plain, scale=1 / 4)  # a DTensor among them: gradients are added up


# -- DTensors that are split further -----------------------------------------------------------------------------------


class Attentive(nn.Module):
    """Layers to split by columns and rows, and plain ones around them."""

    def __init__(self, hidden=6):
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.blocks = nn.ModuleList(Feed(hidden) for _ in range(2))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        x = self.norm(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Feed(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(5, hidden), nn.Linear(hidden, 5)
        self.wrapper = None

    def forward(self, x):
        return self.inner(x) if self.wrapper is None else self.wrapper(self.inner, x)

    def inner(self, x):
        return self.down(torch.tanh(self.up(x)))


def tensor_parallel(ctx, mesh, hidden=6, wrapper=None):
    model, plain = build(ctx, lambda: Attentive(hidden))
    for block in model.blocks:
        block.wrapper = wrapper
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    return model, plain


def check_tensor_parallel(ctx, mesh, over, *, clip=None, hidden=6, wrapper=None, **options):
    """As one unit, whose gradients are added up; and as several, all averaging."""
    parts = mesh.size() // mesh["tp"].size()
    part = ctx.rank // mesh["tp"].size()
    model, plain = tensor_parallel(ctx, mesh, hidden, wrapper)
    fully_shard(model, mesh=over, **options)
    check(ctx, model, plain, parts=parts, part=part, scale=1 / parts, clip=clip)
    model, plain = tensor_parallel(ctx, mesh, hidden, wrapper)
    wrap_blocks(model, mesh=over, **options)
    for unit in (*model.blocks, model):
        unit.set_reduce_op_type("avg")
    assert_equal(values(model), values(plain))
    check(ctx, model, plain, parts=parts, part=part, clip=clip)
    return model


@pytest.mark.tier("full")
@sim.ranks(4)
def test_tensor_parallel_parameters_are_split_further(ctx, tmp_path):
    mesh = mesh_of(ctx, 2, 2, names=("dp", "tp"))
    for hidden in (6, 7, 1, 3):  # even in tp, but not in dp; in neither; fewer rows than ranks
        model = check_tensor_parallel(ctx, mesh, mesh["dp"], hidden=hidden, clip=0.05)
        kinds = {name: mode for name, (mode, _) in placements_of(model).items()}
        assert kinds["blocks.0.up.weight"] == kinds["blocks.1.down.bias"] == MODES.DTENSOR_UNIFIED
        assert kinds["head.weight"] == kinds["norm.bias"] == MODES.LOCAL_PARAM
        meshes = {p.device_mesh for p in model.blocks.parameters()}
        assert len(meshes) == 1
        assert {p.device_mesh for p in model.parameters()} == meshes  # one mesh for all of a root
        assert meshes.pop().mesh_dim_names == ("tp", "dp")
        assert model.blocks[0].up.weight.placements == (Shard(0), Shard(0))
        assert model.blocks[0].down.weight.placements == (Shard(1), Shard(0))
        assert model.head.weight.placements == (Replicate(), Shard(0))
    check_checkpoint(ctx, model, mesh, tmp_path)


def check_checkpoint(ctx, model, mesh, folder):
    """A distributed checkpoint comes back as it was; onto another mesh without tensor parallelism, too."""
    wanted = values(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    assert_equal(values(model), wanted)
    other, plain = build(ctx, lambda: Attentive(3))
    wrap_blocks(other, mesh=mesh_of(ctx), shard_placement_fn=last_dim)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    assert_equal(values(other), wanted)
    plain.load_state_dict(wanted)
    check(ctx, other, plain)


@sim.ranks(4, backends=("sim",))
def test_one_mesh_for_all_whatever_is_wrapped_first(ctx):
    mesh = mesh_of(ctx, 2, 2, names=("dp", "tp"))
    model, plain = tensor_parallel(ctx, mesh)
    fully_shard(model.head, mesh=mesh["dp"])  # plain parameters only, and nothing yet that says where they will be
    wrap_blocks(model, mesh=mesh["dp"])
    for unit in (model.head, *model.blocks, model):
        unit.set_reduce_op_type("avg")
    assert {p.device_mesh.mesh_dim_names for p in model.parameters()} == {("tp", "dp")}
    check(ctx, model, plain, parts=2, part=ctx.rank // 2, clip=0.05)


@pytest.mark.tier("test", each=3)
@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"comm_fusion": True},
        {"shard_placement_fn": dim_one},
        {"shard_placement_fn": last_dim, "comm_fusion": True},
        {"offload_policy": CPUOffloadPolicy()},
        {"wrapper": lambda f, x: checkpoint(f, x, use_reentrant=False)},
    ],
)
@sim.ranks(4, backends=("sim",))
def test_tensor_parallel_with(ctx, options):
    mesh = mesh_of(ctx, 2, 2, names=("dp", "tp"))
    check_tensor_parallel(ctx, mesh, mesh["dp"], hidden=7, **options)


@pytest.mark.tier("full")
@sim.ranks(8, backends=NO_GLOO)
def test_tensor_parallel_kept_over_fewer_ranks_between_forward_and_backward(ctx):
    mesh = mesh_of(ctx, 4, 2, names=("dp", "tp"))
    check_tensor_parallel(ctx, mesh, mesh["dp"], hidden=7, reshard_after_forward=2)


@pytest.mark.tier("full")
@sim.ranks(4, backends=NO_GLOO)
def test_dtensors_on_the_whole_mesh_are_split_over_a_slice_of_it(ctx):
    mesh = mesh_of(ctx, 2, 2, names=("dp", "tp"))

    def unified(model):
        assert {mode for mode, _ in placements_of(model).values()} == {MODES.DTENSOR_UNIFIED}
        assert model.up.device_mesh.mesh_dim_names == ("tp", "dp")
        assert model.up.placements == (Shard(0), Shard(0))
        assert model.bias.placements == (Replicate(), Shard(0))

    for hidden in (6, 7):
        wrap = {"mesh": mesh["dp"]}
        check_computing_with_dtensors(ctx, mesh, lambda m, w=wrap: fully_shard(m, **w), hidden, unified, further=True)


@sim.ranks(4, backends=NO_GLOO)
def test_dtensors_that_are_kept_whole_over_the_data_axis(ctx):
    mesh = mesh_of(ctx, 2, 2, names=("dp", "tp"))

    def wrap(model):
        fully_shard(model, mesh=mesh["dp"], replicate_params=[model.up, model.bias])

    def kept(model):
        assert model.up.placements == (Shard(0), Replicate())
        assert model.down.placements == (Shard(1), Shard(0))
        assert model.bias.placements == (Replicate(), Replicate())

    check_computing_with_dtensors(ctx, mesh, wrap, check_home=kept, further=True)


class OneLayer(nn.Module):
    """Uses what this rank has of its weights, all of it if they are replicated."""

    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return F.linear(x, *(p.to_local() if isinstance(p, DTensor) else p for p in (self.w, self.b)))


@sim.ranks(4, backends=NO_GLOO)
def test_replicated_dtensors_are_split_over_their_own_mesh(ctx):
    mesh = mesh_of(ctx, names=("dp",))
    for over, placements in ((mesh, (Shard(0),)), (mesh_of(ctx, 2, 2), (Replicate(), Shard(0)))):
        model, plain = build(ctx, OneLayer)
        for name in ("w", "b"):
            replicated = distribute_tensor(getattr(model, name).detach(), mesh, [Replicate()])
            setattr(model, name, nn.Parameter(replicated))
        fully_shard(model, mesh=over)
        assert model.w.placements == placements
        check(ctx, model, plain, scale=1 / 4)


@sim.ranks(8, backends=NO_GLOO)
def test_dtensors_on_three_axes_are_split_over_two_of_them(ctx):
    mesh = mesh_of(ctx, 2, 2, 2, names=("replicate", "dp", "tp"))
    for over in (mesh["replicate", "dp"], None):
        model, plain = local_layers(ctx, mesh, over)
        check(ctx, model, plain, loss=local_loss, parts=4, part=ctx.rank // 2, losses="sum")


def local_layers(ctx, mesh, over, hidden=7, **options):
    """A `Local` that is wrapped, and the same on one device."""
    model, plain = lay_out(ctx, Local, mesh, hidden)
    model.explicit = True
    fully_shard(model, mesh=over, **options)
    return model, plain


@pytest.mark.parametrize("further", [True, False])
@sim.ranks(4, backends=NO_GLOO)
def test_dtensors_in_short_dtypes(ctx, further):
    mesh = mesh_of(ctx, 2, 2, names=("dp", "tp"))
    wide, short = ctx.float_dtype, shorter(ctx.float_dtype)
    policy = MixedPrecisionPolicy(short, wide, output_dtype=wide)
    model, plain = local_layers(ctx, mesh, mesh["dp"] if further else None, mp_policy=policy)
    seen = []
    model.register_forward_pre_hook(lambda m, args: seen.append((m.up.dtype, args[0].dtype)))
    part = mesh.get_local_rank("dp")
    check(ctx, model, plain, loss=local_loss, parts=2, part=part, losses="sum", eps=EPS_SINGLE, alone=ALONE_IN_SHORT)
    assert set(seen) == {(short, short)}
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {wide}


@pytest.mark.parametrize("further", [True, False])
@sim.ranks(4, backends=NO_GLOO)
def test_dtensors_while_accumulating_and_with_hooks(ctx, further):
    mesh = mesh_of(ctx, 2, 2, names=("dp", "tp"))
    over, part = mesh["dp"] if further else None, (mesh.get_local_rank("dp"), 2)
    for method in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        model, plain = local_layers(ctx, mesh, over)
        for module in (model, plain):
            module.down.requires_grad_(False)
        seen = []
        for name, parameter in model.named_parameters():
            if name != "down":
                parameter.register_hook(lambda gradient: gradient * 2)
                parameter.register_post_accumulate_grad_hook(
                    lambda p, n=name, seen=seen: seen.append((n, p.grad.placements))
                )
        for step in range(2):
            tell = lambda micro, m=model, method=method: (getattr(m, method)(micro == 2), assert_freed(m))  # noqa: E731
            numbers = range(10 * step, 10 * step + 3)
            check_gradients(ctx, model, plain, numbers=numbers, tell=tell, part=part, loss=local_loss, factor=2)
            assert_freed(model)
            model.zero_grad(), plain.zero_grad()
        assert dict(seen) == {name: p.placements for name, p in model.named_parameters() if name != "down"}


@sim.ranks(4, backends=NO_GLOO)
def test_dtensors_loaded_and_converted(ctx):
    mesh = mesh_of(ctx, 2, 2, names=("dp", "tp"))
    part = mesh.get_local_rank("dp")
    for over in (None, mesh["dp"]):
        model, plain = local_layers(ctx, mesh, over)
        twice = {name: value * 2 for name, value in plain.state_dict().items()}
        model.load_state_dict(twice), plain.load_state_dict(twice)
        check(ctx, model, plain, loss=local_loss, parts=2, part=part, losses="sum")
        short = shorter(ctx.float_dtype)
        model.to(short), plain.to(short)
        with torch.inference_mode():
            assert model(data(ctx, 0, (part, 2)).to(short)).dtype == short
        model.to(ctx.float_dtype), plain.to(ctx.float_dtype)
        check(ctx, model, plain, loss=local_loss, parts=2, part=part, losses="sum")


@pytest.mark.parametrize("options", [{}, {"comm_fusion": True}, {"offload_policy": CPUOffloadPolicy()}])
@sim.ranks(4, backends=("sim",))
def test_tensor_parallel_from_meta_over_empty_to_trained(ctx, options):
    mesh = mesh_of(ctx, 2, 2, names=("dp", "tp"))
    _, plain = build(ctx, lambda: Attentive(7))
    with torch.device("meta"):
        model = Attentive(7).double()
    for block in model.blocks:
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    wrap_blocks(model, mesh=mesh["dp"], **options)
    model.to_empty(device=ctx.device)
    model.load_state_dict(plain.state_dict())
    for unit in (*model.blocks, model):
        unit.set_reduce_op_type("avg")
    check(ctx, model, plain, parts=2, part=ctx.rank // 2)


class Choice(nn.Module):
    """Not every rank uses `b`, none uses `c`; `gain` has no dim."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(3, 5)) for _ in range(3))
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x, both):
        a, b, gain = (p.to_local() if isinstance(p, DTensor) else p for p in (self.a, self.b, self.gain))
        y = F.linear(x, a) * gain
        return y + F.linear(x, b) if both else y


@pytest.mark.parametrize("further", [True, False])
@sim.ranks(4, backends=NO_GLOO)
def test_dtensors_that_only_some_ranks_use(ctx, further):
    mesh = mesh_of(ctx, names=("dp",))
    for sync in (True, False):
        model, plain = build(ctx, Choice)
        for name, parameter in list(model.named_parameters()):
            setattr(model, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
        fully_shard(model, mesh=mesh if further else None)
        for micro in range(2):
            model.set_requires_gradient_sync(sync or micro == 1)
            for module, ranks in ((model, [ctx.rank]), (plain, range(4))):
                for rank in ranks:
                    y = module(data(ctx, micro, (rank, 4)), both=rank == 2 and micro == 0)
                    (y.square().mean() / 4).backward()
        assert_close(gradients(model), gradients(plain))
        assert model.c.grad is None


# -- a smaller mesh between forward and backward ----------------------------------------------------------------------


def around(use_reentrant):
    return lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant)


class Stack(Net):
    """A `Net` whose blocks are called by `wrapper`."""

    wrapper = None

    def forward(self, x):
        x = self.embed(x) * self.scale
        for block in self.blocks:
            x = block(x) if self.wrapper is None else self.wrapper(block, x)
        return self.head(x)


WRAPPERS = {"": None, "checkpointed": around(False), "checkpointed, reentrant": around(True)}


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@sim.ranks(4, backends=NO_GLOO)
def test_resharding_to_fewer_ranks(ctx, wrapper):
    for size in (1, 2, 4):
        for options in ({}, {"comm_fusion": True}, {"shard_placement_fn": last_dim}):
            model, plain = build(ctx, Stack)
            model.wrapper = WRAPPERS[wrapper]
            wrap_blocks(model, mesh=mesh_of(ctx), reshard_after_forward=size, **options)
            check(ctx, model, plain)
            with torch.no_grad():
                assert_close({"y": model(data(ctx, part=(0, 4)))}, {"y": plain(data(ctx, part=(0, 4)))})
            assert size == 1 or not any(unit.is_unsharded for unit in units_in(model))


@pytest.mark.tier("full")
@sim.ranks(4, backends=("gloo",))
def test_groups_of_fewer_ranks_are_made_alike_on_all_processes(ctx):
    for shape, options in (((4,), {}), ((1, 4), {"comm_fusion": True})):
        model, plain = build(ctx, Net)
        wrap_blocks(model, mesh=mesh_of(ctx, *shape), reshard_after_forward=2, **options)
        check(ctx, model, plain)


class Again(nn.Module):
    """Calls one unit several times."""

    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x):
        x = self.embed(x)
        for _ in range(3):
            x = torch.tanh(self.block(x))
        return self.head(x)


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": 2},
        {"reshard_after_forward": 2, "comm_fusion": True, "shard_placement_fn": last_dim},
        {"comm_fusion": True, "offload_policy": CPUOffloadPolicy()},
    ],
)
@sim.ranks(4, backends=("sim",))
def test_units_that_run_several_times(ctx, options):
    model, plain = build(ctx, Again)
    fully_shard(model.block, mesh=mesh_of(ctx), **options)
    fully_shard(model, mesh=mesh_of(ctx), **options)
    check(ctx, model, plain)
    ours = [loss_of(model, data(ctx, step, (ctx.rank, 4))) for step in range(2)]  # two forwards, then two backwards
    theirs = [loss_of(plain, data(ctx, step, (None, 4))) for step in range(2)]
    for loss in (*ours, *theirs):
        loss.backward()
    assert_close(gradients(model), gradients(plain))
    assert_freed(model)


def gathers_of_a_step(world_size, shape, wrapper, reshard, before=lambda model: None):
    """Sizes of the groups of the all_gathers of a step: in forward, and in backward."""
    models = {}

    def setup():
        torch.manual_seed(0)
        model = Stack()
        model.wrapper = wrapper
        wrap_blocks(model, mesh=init_device_mesh("cpu", shape), reshard_after_forward=reshard)
        before(model)
        models[dist.get_rank()] = model
        loss_of(model, torch.ones(2, 5, requires_grad=True)).backward()  # learns the order

    def forward():
        return loss_of(models[dist.get_rank()], torch.ones(2, 5, requires_grad=True))

    def backward(losses):
        losses[dist.get_rank()].backward()

    sizes = []
    with sim.world(world_size) as world:
        world.run(setup)
        world.trace.clear()
        losses = world.run(forward)
        sizes.append([len(e.group) for e in world.trace.of_rank(0) if e.op == "all_gather"])
        world.trace.clear()
        world.run(backward, (losses,))
        sizes.append([len(e.group) for e in world.trace.of_rank(0) if e.op == "all_gather"])
    return sizes


@pytest.mark.sim
@pytest.mark.parametrize("wrapper", [None, around(False)])
def test_the_gathers_of_backward_are_over_fewer_ranks(wrapper):
    root_and_blocks, blocks = 4, 3  # the root's parameters are kept for backward, which begins with them
    assert gathers_of_a_step(4, (4,), wrapper, True) == [[4] * root_and_blocks, [4] * blocks]
    assert gathers_of_a_step(4, (4,), wrapper, 2) == [[4] * root_and_blocks, [2] * blocks]
    assert gathers_of_a_step(4, (4,), wrapper, 4) == [[4] * root_and_blocks, [4] * blocks]
    assert gathers_of_a_step(4, (4,), wrapper, 1) == [[4] * root_and_blocks, []]
    assert gathers_of_a_step(8, (2, 4), wrapper, 2) == [[4] * root_and_blocks, [2] * blocks]

    def back_to_all(model):
        model.set_reshard_after_forward(True)

    assert gathers_of_a_step(4, (4,), wrapper, 2, back_to_all) == [[4] * root_and_blocks, [4] * blocks]


# -- shards on the host ------------------------------------------------------------------------------------------------


# -- one buffer --------------------------------------------------------------------------------------------------------


def one_buffer(model):
    """Whether the parts of each unit lie in one block of memory."""
    for unit in units_in(model):
        for bucket in unit.buckets:
            pointers = {param.local.untyped_storage().data_ptr() for param in bucket.params if param.local_numel}
            if len(bucket.params) > 1 and len(pointers) > 1:
                return False
    return True


OPTIMIZERS = {
    "sgd": sgd,
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
}
ALONE = {name: partial(alone, make_optimizer=make) for name, make in OPTIMIZERS.items()}


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
@sim.ranks(2, backends=NO_GLOO)
def test_steps_are_seen_while_whole_parameters_are_kept(ctx, make_optimizer):
    """Optimizers that take many tensors at once leave no mark on each; every step must gather all the same."""
    for options in ({}, {"comm_fusion": True}):
        model, plain = build(ctx, Net)
        wrap_blocks(model, mesh=mesh_of(ctx), reshard_after_forward=False, **options)
        model.set_reshard_after_backward(False)
        optimizers = [OPTIMIZERS[make_optimizer](module) for module in (model, plain)]
        for step in range(3):
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                loss_of(model, data(ctx, 10 * step + micro, (ctx.rank, 2))).backward()
                loss_of(plain, data(ctx, 10 * step + micro, (None, 2))).backward()
            # AdamW divides by what may be tiny
            assert_close(gradients(model), gradients(plain), alone=ALONE[make_optimizer], eps=EPS_SINGLE, summands=16)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            x = data(ctx, part=(0, 2))
            assert_close({"y": model(x)}, {"y": plain(x)}, alone=ALONE[make_optimizer], eps=EPS_SINGLE, summands=16)


@sim.ranks(2)
def test_one_buffer_survives_what_users_do(ctx):
    model, plain = build(ctx, Net, shorter(ctx.float_dtype))
    wrap_blocks(model, mesh=mesh_of(ctx), comm_fusion=True)
    assert one_buffer(model)
    kept = dict(model.named_parameters())
    halved = {name: value / 2 for name, value in plain.state_dict().items()}  # large ones would amplify rounding
    model.load_state_dict(halved)
    plain.load_state_dict(halved)
    assert one_buffer(model)
    assert all(kept[name] is parameter for name, parameter in model.named_parameters())
    with torch.no_grad():
        for module in (model, plain):
            for parameter in module.parameters():
                parameter.add_(0.0625)
    assert_equal(values(model), values(plain))
    model.to(ctx.float_dtype), plain.to(ctx.float_dtype)
    with torch.no_grad():
        model(data(ctx, part=(0, 2)))  # parts that were replaced are taken over by the next gather
    assert one_buffer(model)
    check(ctx, model, plain)
    assert one_buffer(model)
    assert {p.dtype for p in model.parameters()} == {ctx.float_dtype}


@sim.ranks(4, backends=NO_GLOO)
def test_parameters_that_are_frozen_now_and_then(ctx):
    for options in ({}, {"comm_fusion": True}):
        model, plain = build(ctx, Net)
        wrap_blocks(model, mesh=mesh_of(ctx, 2, 2), **options)
        for step in range(4):
            for module in (model, plain):
                module.head.weight.requires_grad_(step % 2 == 0)
                module.blocks[1].requires_grad_(step < 2)
                module.blocks[2].norm.requires_grad_(step != 1)
                module.zero_grad()
            check_gradients(ctx, model, plain, numbers=(step,))
            assert_freed(model)


def all_reduces(wrap, patch=None, **options):
    """Per rank and step, in backward: how many all_reduces; and the gradients."""

    def step():
        ctx = sim.RankTest(dist.get_rank(), 4, "sim", torch.device("cpu"))
        model, _ = build(ctx, Net, torch.float32)
        wrap_blocks(model, wrap, mesh=mesh_of(ctx, 2, 2), **options)
        loss_of(model, data(ctx, 0, (ctx.rank, 4)).float()).backward()
        return {name: p.grad.to_local() for name, p in model.named_parameters()}

    with sim.world(4) as world:
        found = world.run(step)
        return sum(event.op == "all_reduce" for event in world.trace.of_rank(0)), found


@pytest.mark.sim
def test_units_share_all_reduces_over_the_replicate_axis(monkeypatch):
    theirs, wanted = all_reduces(fsdp2)
    apart, _ = all_reduces(fully_shard)
    fused, got = all_reduces(fully_shard, comm_fusion=True)
    assert theirs == apart == 4  # one for each unit
    assert fused == 1  # all of this small model fits
    for ours, others in zip(got, wanted, strict=True):
        assert_equal(ours, others)
    monkeypatch.setattr(reduce_file, "FUSED_BYTES", 1100)  # room for two of them
    some, got = all_reduces(fully_shard, comm_fusion=True)
    assert some == 2
    for ours, others in zip(got, wanted, strict=True):
        assert_equal(ours, others)


@sim.ranks(4, backends=NO_GLOO)
def test_shared_all_reduces_while_accumulating(ctx):
    for method in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        model, plain = build(ctx, Net)
        for block in model.blocks:
            fully_shard(block, mesh=mesh_of(ctx, 2, 2), comm_fusion=True)
        fully_shard(model, mesh=mesh_of(ctx, 2, 2), comm_fusion=True, replicate_params=[model.scale])
        for step in range(2):
            tell = lambda micro, m=model, method=method: (getattr(m, method)(micro == 2), assert_freed(m))  # noqa: E731
            check_gradients(ctx, model, plain, numbers=range(10 * step, 10 * step + 3), tell=tell)
            assert_freed(model)
            model.zero_grad(), plain.zero_grad()


@sim.ranks(4, backends=NO_GLOO)
def test_shared_all_reduces_over_several_backwards_per_step(ctx):
    model, plain = build(ctx, Net)
    wrap_blocks(model, mesh=mesh_of(ctx, 2, 2), comm_fusion=True)
    for step in range(2):
        numbers = range(10 * step, 10 * step + 3)
        check_gradients(ctx, model, plain, numbers=numbers, tell=lambda micro: model.set_is_last_backward(micro == 2))
        model.zero_grad(), plain.zero_grad()


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("backward")


@sim.ranks(4, backends=NO_GLOO)
def test_shared_all_reduces_after_a_failed_backward(ctx):
    model, plain = build(ctx, Net)
    wrap_blocks(model, mesh=mesh_of(ctx, 2, 2), comm_fusion=True)
    for _ in range(2):
        handle = model.blocks[0].register_forward_hook(lambda m, args, y: Failing.apply(y))
        loss = loss_of(model, data(ctx, part=(ctx.rank, 4)))
        handle.remove()
        with pytest.raises(ArithmeticError):
            loss.backward()  # the reductions of the later blocks are under way
        model.zero_grad()
        check(ctx, model, plain)


# -- gradients in fp32 beside short parameters -------------------------------------------------------------------------


@sim.ranks(2)
def test_main_gradients(ctx):
    for shape in ((2,), (2, 1)):
        model, plain = build(ctx, Net, torch.float32)
        policy = MixedPrecisionPolicy(apply_grad_on_fp32_main_grad=True)
        wrap_blocks(model, mesh=mesh_of(ctx, *shape), mp_policy=policy)
        for micro in range(3):
            model.set_requires_gradient_sync(micro != 1)
            loss_of(model, data(ctx, micro, (ctx.rank, 2)).float()).backward()
            loss_of(plain, data(ctx, micro, (None, 2)).float()).backward()
            assert all(p.grad is None for p in model.parameters())
        for name, parameter in model.named_parameters():
            assert isinstance(parameter.main_grad, DTensor)
            assert parameter.main_grad.placements == parameter.placements
            assert parameter.main_grad.dtype == torch.float32
            wanted = plain.get_parameter(name).grad
            assert_close(
                {name: parameter.main_grad.full_tensor()}, {name: wanted}, eps=EPS_SINGLE, summands=64, alone=None
            )
        held = {name: p.main_grad for name, p in model.named_parameters()}
        model.zero_grad(set_to_none=False)
        assert all(p.main_grad is held[name] for name, p in model.named_parameters())
        assert not any(p.main_grad.full_tensor().any() for p in model.parameters())
        model.zero_grad()
        assert all(getattr(p, "main_grad", None) is None for p in model.parameters())


@sim.ranks(2, backends=NO_GLOO)
def test_main_gradients_add_up_in_fp32(ctx):
    """Of parameters in bf16, whose own gradients could not hold the sum."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, apply_grad_on_fp32_main_grad=True)
    model, _ = build(ctx, Net, torch.bfloat16)
    whole_one = [model.scale]
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of(ctx), mp_policy=policy)
    fully_shard(model, mesh=mesh_of(ctx), mp_policy=policy, replicate_params=whole_one)
    total = None
    for micro in range(4):
        model.zero_grad()
        loss_of(model, data(ctx, micro, (ctx.rank, 2)).bfloat16()).backward()
        alone = {name: p.main_grad.full_tensor().clone() for name, p in model.named_parameters()}
        total = alone if total is None else {name: total[name] + value for name, value in alone.items()}
    model.zero_grad()
    for micro in range(4):
        loss_of(model, data(ctx, micro, (ctx.rank, 2)).bfloat16()).backward()
    assert_equal({name: p.main_grad.full_tensor() for name, p in model.named_parameters()}, total)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in total.values())
    assert all(p.grad is None for p in model.parameters())


# -- mean or sum -------------------------------------------------------------------------------------------------------


@sim.ranks(2, backends=NO_GLOO)
def test_units_of_plain_parameters_average_and_one_can_be_told_to_add_up(ctx):
    def after(tell):
        model, plain = build(ctx, Net)
        wrap_blocks(model, mesh=mesh_of(ctx))
        tell(model)
        loss_of(model, data(ctx, part=(ctx.rank, 2))).backward()
        loss_of(plain, data(ctx, part=(None, 2))).backward()
        return gradients(model), gradients(plain)

    assert_close(*after(lambda model: None))
    assert_close(*after(lambda model: model.set_reduce_op_type(" AVG ")))
    for op, recurse in (("sum", True), ("Sum\n", False)):
        got, wanted = after(lambda model, op=op, recurse=recurse: model.set_reduce_op_type(op, recurse=recurse))
        assert_close(got, {n: g if n.startswith("blocks") and not recurse else 2 * g for n, g in wanted.items()})
    got, wanted = after(lambda model: model.blocks[1].set_reduce_op_type("sum"))
    assert_close(got, {n: 2 * g if n.startswith("blocks.1.") else g for n, g in wanted.items()})


class Scales(nn.Module):
    """A norm's weights under sequence parallelism: on every rank, whose gradients are those of its own tokens."""

    def __init__(self, mesh, pending):
        super().__init__()
        weight = torch.ones(4, device=mesh.device_type)
        self.weight = nn.Parameter(DTensor.from_local(weight, mesh, [Replicate()], run_check=False))
        self.pending = pending

    def forward(self, x):
        return x * self.weight.to_local(grad_placements=[self.pending])


@pytest.mark.parametrize(("micros", "pending"), [(1, Partial()), (2, Partial()), (1, Partial("avg"))])
@sim.ranks(4)
def test_sums_over_tensor_parallel_ranks_are_in_reduce_dtype(ctx, micros, pending):
    mesh = mesh_of(ctx, 2, 2, names=("dp", "tp"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(Scales(mesh["tp"], pending), mesh=mesh["dp"], mp_policy=policy)
    own = torch.full((4,), 1.0 if ctx.rank % 2 else 2.0**-9, device=ctx.device)  # bfloat16 rounds the sum to 1
    for micro in range(micros):
        model.set_requires_gradient_sync(micro == micros - 1)
        model(own).sum().backward()
    parts = 2 if pending.reduce_op == "avg" else 1
    assert full(model.weight.grad).tolist() == [micros * 2 * (1.0 + 2.0**-9) / parts] * 4


# -- hooks of the user -------------------------------------------------------------------------------------------------


@sim.ranks(2)
def test_hooks_on_sharded_parameters(ctx):
    model, plain = build(ctx, Net)
    whole_one = [model.scale]
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of(ctx))
    fully_shard(model, mesh=mesh_of(ctx), replicate_params=whole_one)
    seen = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, n=name, seen=seen: seen.append((n, p.grad.placements)))
    doubled = ("scale", "head.weight", "blocks.1.up.weight")
    handles = [
        module.get_parameter(name).register_hook(lambda gradient: gradient * 2)
        for module in (model, plain)
        for name in doubled
    ]
    for count in (1, 2):
        check_gradients(ctx, model, plain)
        assert sorted(name for name, _ in seen) == sorted([name for name, _ in plain.named_parameters()] * count)
    placements = dict(seen)
    assert placements["scale"] == (Replicate(),)
    assert placements["head.weight"] == (Shard(0),)
    for handle in handles:
        handle.remove()
    model.zero_grad(), plain.zero_grad()
    check_gradients(ctx, model, plain)
    assert_freed(model)


# -- units on their own ------------------------------------------------------------------------------------------------


@pytest.mark.tier("full")
@sim.ranks(2)
def test_a_unit_that_ran_alone_before_its_root(ctx):
    for shape, options in (
        ((2,), {}),
        ((2,), {"reshard_after_forward": False}),
        ((2,), {"comm_fusion": True}),
        ((2, 1), {"comm_fusion": True}),  # with all_reduces that take several units
    ):
        model, plain = build(ctx, Net)
        wrap_blocks(model, mesh=mesh_of(ctx, *shape), **options)
        optimizers = [sgd(model), sgd(plain)]

        def alone(module, x):
            return module.blocks[1](module.blocks[0](x)).square().mean()

        for step, loss in enumerate((alone, alone, loss_of, loss_of, alone, loss_of)):
            width = 7 if loss is alone else 5
            for module, part in ((model, (ctx.rank, 2)), (plain, (None, 2))):
                loss(module, data(ctx, step, part, width=width)).backward()
            assert_close(gradients(model), gradients(plain))
            assert_freed(model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_close(values(model), values(plain))


@sim.ranks(2, backends=NO_GLOO)
def test_a_unit_that_ran_alone_without_gradients_or_whose_backward_is_to_come(ctx):
    model, plain = build(ctx, Net)
    wrap_blocks(model, mesh=mesh_of(ctx))
    losses = []
    for module, part in ((model, (ctx.rank, 2)), (plain, (None, 2))):
        with torch.no_grad():
            module.blocks[2](data(ctx, 0, part, width=7))
        early = module.blocks[0](data(ctx, 1, part, width=7)).square().mean()
        losses.append((early, loss_of(module, data(ctx, 2, part))))
    for early, late in losses:
        late.backward()
        early.backward()
    assert_close(gradients(model), gradients(plain))
    assert_freed(model)
    check(ctx, model, plain)


@sim.ranks(2, backends=("sim",))
def test_parameters_of_two_dtypes_that_are_replaced_at_once(ctx):
    """Both buckets take over what was put there, not the first one that finds something new."""
    unit = nn.Sequential(nn.Linear(4, 4), Double(), nn.Linear(4, 4, dtype=torch.float64))
    fully_shard(unit, mesh=mesh_of(ctx, 2))
    unit(torch.ones(2, 4)).sum().backward()
    unit.zero_grad()
    for layer in (unit[0], unit[2]):
        layer.weight = nn.Parameter(torch.zeros_like(layer.weight))
        layer.bias = nn.Parameter(torch.ones_like(layer.bias))
    assert torch.equal(unit(torch.ones(2, 4)), torch.ones(2, 4, dtype=torch.float64))
    assert all(p.full_tensor().unique().tolist() in ([0.0], [1.0]) for p in unit.parameters())


class Double(nn.Module):
    def forward(self, x):
        return x.double()


@sim.ranks(2, backends=("sim",))
def test_units_are_finished_where_backward_leaves_them(ctx):
    """Not at its end: also where activation checkpointing runs them again, and in the second backward of a graph."""
    for recompute in (False, True):
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        for layer in layers:
            fully_shard(layer, mesh=mesh_of(ctx, 2))
        model = Chain(layers, recompute)
        fully_shard(model, mesh=mesh_of(ctx, 2))
        loss = model(torch.ones(2, 4, requires_grad=True)).sum()
        late = []
        for unit in unit_of(model).schedule.units:

            def finalize(unit=unit, own=unit.finalize_backward, late=late):
                late.extend([unit] if unit.backward.under_way else [])
                own()

            unit.finalize_backward = finalize
        loss.backward(retain_graph=not recompute)
        if not recompute:
            loss.backward()
        assert late == []


class Chain(nn.Module):
    def __init__(self, layers, recompute):
        super().__init__()
        self.layers, self.recompute = layers, recompute

    def forward(self, x):
        both = lambda y: self.layers[1](self.layers[0](y))  # noqa: E731
        return self.layers[2](checkpoint(both, x, use_reentrant=False) if self.recompute else both(x))
