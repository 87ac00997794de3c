"""Clipping over many ranks against torch's own on one device, which has the full gradients."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sim
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.spelling import STRIDED
from hyper_parallel.core.fully_shard.api import fully_shard
from hyper_parallel.core.fully_shard.clip import clip_grad_norm_, get_total_norm
from hyper_parallel.core.fully_shard.utils import MixedPrecisionPolicy
from hyper_parallel.core.redistribute.api import distribute_tensor as distribute

NO_GLOO = ("sim", "gpu", "npu")
NORMS = (1.0, 2.0, math.inf, 3.0)


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameter(full, mesh, placements, *, grad=True):
    """A parameter on a mesh, and its gradient, of which every rank knows the whole."""
    param = nn.Parameter(distribute_tensor(torch.zeros_like(full), mesh, placements, src_data_rank=None))
    if grad:
        param.grad = distribute_tensor(full, mesh, placements, src_data_rank=None)
    return param


def whole_of(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def on_one_device(wholes, max_norm, p):
    """The norm and the clipped gradients of torch, in float64."""
    params = [nn.Parameter(torch.zeros(full.shape, dtype=torch.float64)) for full in wholes]
    for param, full in zip(params, wholes, strict=True):
        param.grad = full.cpu().double()
    return nn.utils.clip_grad_norm_(params, max_norm, p), [param.grad for param in params]


def assert_same_bits(norm):
    """Every rank has the same number, to the last bit."""
    assert type(norm) is torch.Tensor
    assert norm.shape == ()
    parts = [torch.empty(1, dtype=norm.dtype, device=norm.device) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, norm.view(1))
    assert len({part.item().hex() for part in parts}) == 1, parts


def assert_clips(params, wholes, max_norm, p, **options):
    """Clip, and compare with one device; `wholes` are the gradients of those that have one."""
    expected, clipped = on_one_device(wholes, max_norm, p)
    alone = get_total_norm(params, p, **options)
    norm = clip_grad_norm_(params, max_norm, p, **options)
    assert_same_bits(norm)
    assert torch.equal(norm, alone)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5), p
    with_gradient = [param for param in params if param.grad is not None]
    for param, wanted in zip(with_gradient, clipped, strict=True):
        torch.testing.assert_close(whole_of(param.grad).cpu().double(), wanted, rtol=1e-5, atol=1e-7)


def strided(param, mesh):
    """The same parameter as torch writes it on a mesh whose second axis splits first."""
    written = {"shape": param.shape, "stride": param.stride()}
    placements = [STRIDED(0, split_factor=2), Shard(0)]
    parts = [
        DTensor.from_local(x.to_local().detach().clone(), mesh, placements, **written) for x in (param, param.grad)
    ]
    result = nn.Parameter(parts[0])
    result.grad = parts[1]
    return result


def mixed(ctx):
    """Parameters on meshes of one and two axes, slices, no mesh at all; and the gradients, in their order."""
    square = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh(ctx.device_type, (4,), mesh_dim_names=("all",))
    long = init_device_mesh(ctx.device_type, (1, 4, 1), mesh_dim_names=("a", "b", "c"))
    wholes = [3.0 * values(3, 5, seed=seed).to(ctx.device) for seed in range(10)]
    params = [
        parameter(wholes[0], square, [Shard(0), Shard(1)]),
        parameter(wholes[1], square, [Replicate(), Shard(0)]),
        parameter(wholes[2], square, [Shard(1), Replicate()]),
        parameter(wholes[3], square, [Replicate(), Replicate()]),
        parameter(wholes[4], square, [Shard(0), Shard(0)]),  # a rank holds nothing
        parameter(wholes[5], square["tp"], [Shard(0)]),
        parameter(wholes[6], line, [Shard(0)]),
        parameter(wholes[7], long, [Shard(0), Shard(1), Shard(0)]),
        nn.Parameter(distribute(torch.zeros_like(wholes[8]), Layout.from_device_mesh(square)(("tp", "dp"), None))),
        nn.Parameter(torch.zeros_like(wholes[9])),
    ]
    params[8].grad = distribute(wholes[8], params[8].device_mesh, params[8].placements)
    params[9].grad = wholes[9].clone()
    params.append(strided(params[8], square))
    wholes.append(wholes[8])
    return square, params, wholes


@pytest.mark.tier("full")
@sim.ranks(4)
def test_parameters_on_a_mix_of_meshes(ctx):
    for p in NORMS:
        for max_norm, foreach in ((1.0, None), (1e6, False), (math.inf, True)):
            square, params, wholes = mixed(ctx)
            params.insert(2, parameter(wholes[0], square, [Shard(0), Shard(0)], grad=False))
            params.append(nn.Parameter(torch.zeros(2, device=ctx.device)))
            assert_clips(params, wholes, max_norm, p, foreach=foreach)


@pytest.mark.tier("test")
@sim.ranks(4, backends=NO_GLOO)
def test_a_pending_gradient_is_that_of_the_sum(ctx):
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    full = values(5, 3).to(ctx.device)
    for p in NORMS:
        for held, op, placements in (
            (Replicate(), "sum", [Replicate(), Replicate()]),
            (Replicate(), "avg", [Replicate(), Shard(0)]),
            (Shard(1), "sum", [Shard(1), Shard(0)]),
            (Replicate(), "sum", [Shard(0), Replicate()]),  # copies beside a sharded parameter
        ):
            param = parameter(full, mesh, placements, grad=False)
            mine = distribute_tensor(full, mesh, [held, Replicate()], src_data_rank=None).to_local()
            share = (0.25, 0.75) if op == "sum" else (-1.0, 3.0)
            mine = mine * share[mesh.get_local_rank("tp")]
            grad = DTensor.from_local(mine, mesh, [held, Partial(op)], shape=full.shape, stride=full.stride())
            param.grad = grad
            assert_clips([param], [full], 0.5, p)
            assert param.grad is grad, "scaled in place, and still pending"
            assert param.grad.placements[1] == Partial(op)


@pytest.mark.tier("test")
@sim.ranks(4)
def test_ranks_without_gradients_take_part(ctx):
    """Nothing waits, and where the copies of a gradient are there on no rank that holds them, it is 0."""
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    full = values(4, 4).to(ctx.device)
    for p in (2.0, math.inf):
        for with_gradient in ((0,), (3,), (0, 3), (1, 2, 3), ()):
            has = ctx.rank in with_gradient
            params = [
                parameter(full, mesh, [Shard(0), Shard(1)], grad=has),
                parameter(full, mesh, [Shard(1), Shard(1)], grad=False),
                parameter(full, mesh["dp"], [Shard(0)], grad=False),
            ]
            norm = clip_grad_norm_(params, 1.0, p)
            assert_same_bits(norm)
            blocks = [full[2 * (r // 2) :, 2 * (r % 2) :][:2, :2].reshape(-1) for r in with_gradient]
            expected = torch.linalg.vector_norm(torch.cat(blocks), p).item() if blocks else 0.0
            assert norm.item() == pytest.approx(expected, rel=1e-5)
            assert has == (params[0].grad is not None)


@pytest.mark.tier("test")
@sim.ranks(4)
def test_nan_and_inf_reach_every_rank(ctx):
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    for p in NORMS:
        for bad in (math.nan, math.inf):
            for row in (0, 3):  # of another rank each
                full = values(4, 2).to(ctx.device)
                full[row, 1] = bad
                param = parameter(full, mesh, [Shard(0), Shard(0)])
                norm = get_total_norm(param, p)
                assert norm.isnan() if math.isnan(bad) else norm == math.inf, (p, bad, norm)
                with pytest.raises(
                    RuntimeError, match=r"cannot clip gradients: the norm of order .* is (nan|inf), and"
                ):
                    clip_grad_norm_(param, 1.0, p, error_if_nonfinite=True)
                assert torch.equal(param.grad.full_tensor()[1:3], full[1:3]), "left as it was"


class Net(nn.Module):
    """Odd sizes, one row for more ranks than that, and a part that is not used."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.up = nn.Linear(5, 7)
        self.unused = nn.Linear(3, 3)
        self.down = nn.Linear(7, 3, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x) * self.scale))


def trained(ctx, wrap=None):
    """A model after one backward pass, of the same loss on every rank."""
    torch.manual_seed(0)
    model = Net().to(ctx.device)
    if wrap is not None:
        wrap(model)
    model(5.0 * values(4, 5).to(ctx.device)).square().sum().backward()
    return model


@pytest.mark.tier("full")
@sim.ranks(4)
def test_fully_sharded_models(ctx):
    wholes = [param.grad for param in trained(ctx).parameters() if param.grad is not None]
    for shape in ((4,), (2, 2), (1, 4), (4, 1)):
        mesh = init_device_mesh(ctx.device_type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])

        def wrap(model, mesh=mesh):
            fully_shard(model.up, mesh=mesh)
            fully_shard(model, mesh=mesh)

        for p in NORMS[:3]:
            model = trained(ctx, wrap)
            norm = clip_grad_norm_(model, 0.25, p)
            expected, clipped = on_one_device(wholes, 0.25, p)
            assert_same_bits(norm)
            assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            grads = [grad for grad in grads if grad.full_tensor().abs().sum() > 0]  # of unused ones zeros are fine
            for grad, wanted in zip(grads, clipped, strict=True):
                torch.testing.assert_close(grad.full_tensor().cpu().double(), wanted, rtol=1e-4, atol=1e-6)


@sim.ranks(4, backends=NO_GLOO)
def test_gradients_that_are_kept_in_fp32(ctx):
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(apply_grad_on_fp32_main_grad=True)
    model = fully_shard(nn.Linear(5, 7).bfloat16().to(ctx.device), mesh=mesh, mp_policy=policy)
    model(values(4, 5).bfloat16().to(ctx.device)).square().sum().backward()
    assert all(param.grad is None and param.main_grad.dtype == torch.float32 for param in model.parameters())
    wholes = [whole_of(param.main_grad) for param in model.parameters()]
    expected, clipped = on_one_device(wholes, 0.5, 2.0)
    norm = clip_grad_norm_(model, 0.5)
    assert_same_bits(norm)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    for param, wanted in zip(model.parameters(), clipped, strict=True):
        torch.testing.assert_close(whole_of(param.main_grad).cpu().double(), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.tier("test")
@sim.ranks(4, backends=NO_GLOO)
def test_tensor_parallel_within_data_parallel(ctx):
    """As torch lays it out: weights on both axes, the last bias whole on one, the scale on none."""
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))

    def model_of(*, parallel, shard=False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3), nn.LayerNorm(3)).to(ctx.device)
        if parallel:
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if shard:
            fsdp2(model[0], mesh=mesh["dp"])
            fsdp2(model[2], mesh=mesh["dp"])
        (model(values(4, 5).to(ctx.device)) * values(4, 3, seed=1).to(ctx.device)).sum().backward()
        return list(model.parameters())

    wholes = [param.grad for param in model_of(parallel=False)]
    for shard in (False, True):
        for p in NORMS[:3]:
            params = model_of(parallel=True, shard=shard)
            assert len({str(param.placements) for param in params if isinstance(param, DTensor)}) > 1
            norm = clip_grad_norm_(params, 0.25, p)
            expected, clipped = on_one_device(wholes, 0.25, p)
            assert_same_bits(norm)
            assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
            for param, wanted in zip(params, clipped, strict=True):
                torch.testing.assert_close(whole_of(param.grad).cpu().double(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.tier("test")
@sim.ranks(4, backends=NO_GLOO)
def test_on_one_mesh_it_is_torchs_own(ctx):
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    layouts = ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Replicate(), Replicate()])
    for p in NORMS[:3]:
        for max_norm in (0.0, 0.5, 1e6):
            pair = []
            for _ in range(2):
                pair.append([parameter(values(4, 6, seed=i).to(ctx.device), mesh, x) for i, x in enumerate(layouts)])
            ours, theirs = pair
            norm = clip_grad_norm_(ours, max_norm, p)
            expected = nn.utils.clip_grad_norm_(theirs, max_norm, p).full_tensor()
            torch.testing.assert_close(norm, expected)
            for our, their in zip(ours, theirs, strict=True):
                assert our.grad.placements == their.grad.placements
                torch.testing.assert_close(our.grad.to_local(), their.grad.to_local())


@sim.ranks(4, backends=NO_GLOO)
def test_other_stages_count_where_they_are_named(ctx):
    """Two stages of two ranks: each has its own parameters, on its own mesh."""
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    wholes = [values(3, 2, seed=seed).to(ctx.device) for seed in range(2)]
    for p in NORMS:
        param = parameter(wholes[stage], mesh["dp"], [Shard(0)], grad=stage != 0 or p != 3.0)
        present = wholes if p != 3.0 else wholes[1:]
        own = get_total_norm(param, p)
        expected, clipped = on_one_device(present, 0.5, p)
        mine = torch.linalg.vector_norm(wholes[stage], p).item() if param.grad is not None else 0.0
        assert own.item() == pytest.approx(mine, rel=1e-5)
        norm = clip_grad_norm_(param, 0.5, p, stage_group=mesh.get_group("pp"))
        assert_same_bits(norm)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
        if param.grad is not None:
            wanted = clipped[stage if p != 3.0 else 0]
            torch.testing.assert_close(param.grad.full_tensor().cpu().double(), wanted, rtol=1e-5, atol=1e-7)


# -- what it costs ---------------------------------------------------------------------------------------------------


def all_reduces(make, world_size=4, **options):
    """What each rank's all_reduces of a clip were: axis and bytes."""

    def body():
        params = make()
        dist.barrier()
        clip_grad_norm_(params, 1.0, **options)

    with sim.world(world_size) as world:
        world.run(body)
        seen = [[] for _ in range(world_size)]
        for event in world.trace.events:
            if event.op == "all_reduce":
                seen[event.rank].append((event.op, event.axis, event.send_bytes))
    return seen


@pytest.mark.sim
def test_one_all_reduce_per_group_and_none_for_copies():
    def make(grads):
        def build():
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            params = []
            for number in range(12):
                placements = [
                    ([Shard(0)], [Replicate()])[number % 2][0],
                    ([Shard(1)], [Replicate()])[number // 2 % 2][0],
                ]
                params.append(parameter(values(4, 4), mesh, placements, grad=grads(number)))
            params += [parameter(values(4), mesh["dp"], [Shard(0)], grad=grads(0)), nn.Parameter(torch.ones(2))]
            return params

        return build

    # Of the two numbers that go over each axis, one is of the parameters that both axes split.
    expected = [[("all_reduce", "dp", 8), ("all_reduce", "tp", 8)]] * 4
    assert all_reduces(make(lambda number: True)) == expected
    assert all_reduces(make(lambda number: False)) == expected
    assert all_reduces(make(lambda number: (number + dist.get_rank()) % 3 == 0)) == expected
    assert all_reduces(lambda: [nn.Parameter(torch.ones(2))]) == [[]] * 4


@pytest.mark.sim
def test_an_axis_of_one_rank_takes_the_same_path():
    def build():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        return [parameter(values(4, 4), mesh, [Shard(0), Shard(0)])]

    assert all_reduces(build, 2) == [[("all_reduce", "dp", 0), ("all_reduce", "tp", 4)]] * 2


@pytest.mark.sim
def test_meta_tensors_need_no_values():
    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        param = parameter(values(4, 4), mesh, [Shard(0)])
        return clip_grad_norm_(param, 1.0, error_if_nonfinite=True).device.type

    assert sim.run(body, 2, device="meta") == ["meta", "meta"]
