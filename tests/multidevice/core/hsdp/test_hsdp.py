"""hsdp against the same model on one device, which sees the batches of all ranks: in float64 where it is reduced."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from rounding_kit import results
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from units_kit import Block, assert_as_one_device, assert_freed, assert_near, full, gradients, inputs, values

import sim
from hyper_parallel import full_tensor
from hyper_parallel.core.fully_shard.api import fully_shard
from hyper_parallel.core.hsdp.api import HSDPCell, hsdp, hsdp_sync_stream

pytestmark = pytest.mark.tier("test")

NO_GLOO = ("sim", "gpu", "npu")
LEVELS = ("level1", "level2", "level3")
WIDTH, PER_RANK = 16, 4


class Net(nn.Module):
    """Rows that 2 and 4 ranks share (24, 16), that only 2 do (6), and a scalar."""

    def __init__(self, call=None):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList(Block(WIDTH, 24) for _ in range(3))
        self.head = nn.Linear(WIDTH, 6)
        self.call = call  # how the blocks are called

    def forward(self, x):
        x = x * self.scale
        for block in self.blocks:
            x = block(x) if self.call is None else self.call(block, x)
        return self.head(x)


def net(ctx, dtype=None, **options):
    torch.manual_seed(0)
    return Net(**options).to(ctx.device, dtype or ctx.float_dtype)


def wrap(model, **options):
    """Wrap the blocks, then the whole."""
    for block in model.blocks:
        hsdp(block, **options)
    return hsdp(model, **options)


def batch(ctx, step=0, micro=0, rank=None, dtype=None):
    return inputs(ctx, 10 * step + micro, (PER_RANK, WIDTH), rank, dtype)


def alone():
    ctx = sim.RankTest(0, 4, "sim", torch.device("cpu"))
    return results(*train(ctx, net(ctx, torch.float32), dtype=torch.float32))


assert_close = partial(assert_near, alone=alone, summands=2**16)


def train(ctx, model, *, rank=None, steps=3, micros=1, sync=lambda: None, between=None, dtype=None):
    """Losses, the last step's gradients, the parameters at the end."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micros):
            if rank is not None:
                model.set_requires_grad_sync(micro == micros - 1)
            loss = model(batch(ctx, step, micro, rank, dtype)).square().mean() / micros
            loss.backward()
            losses.append(loss.detach())
        sync()
        optimizer.step()
        if between is not None:
            between(model)
    return losses, gradients(model), values(model)


def check_against_one_device(ctx, model, plain, **options):
    wanted = train(ctx, plain, **{**options, "sync": lambda: None})
    assert_as_one_device(ctx, train(ctx, model, rank=ctx.rank, **options), wanted, assert_close)


# -- the whole -----------------------------------------------------------------------------------------------------

WAYS = [
    {"threshold": 0},
    {"threshold": 1, "shard_size": 2, "comm_fusion": True},
    {"threshold": 0, "shard_size": 2, "comm_fusion": True, "bucket_size": 1},
    {"threshold": 3, "comm_fusion": True, "bucket_size": 0, "comm_async": True},
    {"threshold": 0, "shard_size": 3, "comm_async": True},
    {"threshold": 1, "shard_size": 1, "comm_fusion": True, "comm_async": True},
    {"threshold": 0, "shard_size": 64, "reduce_dtype": torch.float64, "comm_fusion": True},
]


def check_ways(ctx, ways, level, accumulate):
    micros, flag = accumulate
    for way in ways:
        if "reduce_dtype" in way:
            way = {**way, "reduce_dtype": ctx.float_dtype}
        model = wrap(net(ctx), optimizer_level=level, enable_grad_accumulation=flag, **way)
        sync = hsdp_sync_stream if way.get("comm_async") else lambda: None
        check_against_one_device(ctx, model, net(ctx), micros=micros, sync=sync)
        assert_freed(model)


@pytest.mark.tier("full", each=8)
@pytest.mark.parametrize("accumulate", [(3, True), (2, False)], ids=str)
@pytest.mark.parametrize("level", LEVELS)
@sim.ranks(4, backends=NO_GLOO)
def test_one_device_on_four_ranks(ctx, level, accumulate):
    check_ways(ctx, WAYS, level, accumulate)


@pytest.mark.tier("full")
@sim.ranks(2)
def test_one_device_on_two_ranks(ctx):
    check_ways(ctx, WAYS[1:4], "level1", (2, True))
    check_ways(ctx, WAYS[2:4], "level2", (2, True))
    check_ways(ctx, WAYS[:1], "level3", (1, False))


@pytest.mark.parametrize("level", LEVELS)
@sim.ranks(1, backends=NO_GLOO)
def test_a_single_rank(ctx, level):
    check_ways(ctx, WAYS[:4], level, (2, True))


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("level", LEVELS)
@sim.ranks(6, backends=("sim",))
def test_six_ranks_in_parts_of_two_and_three(ctx, level):
    check_ways(ctx, [{"threshold": 0, "shard_size": 3}, {"threshold": 0, "shard_size": 2}], level, (2, True))


# -- who holds what ------------------------------------------------------------------------------------------------


def sizes(ctx, rows, shard_size, own=None, columns=3):
    """The effective shard size of one weight, checked against what the ranks hold."""
    model = nn.Linear(columns, rows, bias=False).to(ctx.device)
    if own is not None:
        model.weight.hsdp_shard_size = own
    full = model.weight.detach().clone()
    dist.broadcast(full, src=0)
    model.weight.data.copy_(full)
    hsdp(model, shard_size=shard_size, threshold=0)
    weight, size = model.weight, model.weight.hsdp_effective_shard_size
    part = rows // size
    first = ctx.rank % size * part  # parts are on consecutive ranks, and begin again after the last
    assert torch.equal(weight.to_local(), full[first : first + part])
    if size > 1:
        wanted = torch.arange(ctx.world_size).view(-1, size)
        assert torch.equal(weight.device_mesh.mesh, wanted.to(weight.device_mesh.mesh))
        assert weight.placements == (Replicate(), Shard(0))
        assert weight.device_mesh.mesh_dim_names == ("replicate", "shard")
    assert torch.equal(weight.full_tensor(), full)
    return size


@sim.ranks(4)
def test_shard_sizes_and_which_ranks_hold_which_part(ctx):
    asked = (-1, 1, 2, 3, 4, 9)
    assert [sizes(ctx, 8, size) for size in asked] == [4, 1, 2, 2, 4, 4]
    assert [sizes(ctx, 6, size) for size in asked] == [2, 1, 2, 2, 2, 2]
    assert [sizes(ctx, 5, size) for size in asked] == [1] * 6
    assert [sizes(ctx, 8, 2, own) for own in asked] == [4, 1, 2, 2, 4, 4]
    assert [sizes(ctx, 8, 1, 4), sizes(ctx, 8, 4, 1), sizes(ctx, 6, 1, -1)] == [4, 1, 2]


@sim.ranks(6, backends=("sim",))
def test_shard_sizes_on_six_ranks(ctx):
    assert [sizes(ctx, 12, size) for size in (-1, 5, 4, 3, 2)] == [6, 3, 3, 3, 2]
    assert [sizes(ctx, 9, size) for size in (-1, 2, 3)] == [3, 1, 3]
    assert [sizes(ctx, 4, size) for size in (-1, 6)] == [2, 2]


@sim.ranks(4, backends=NO_GLOO)
def test_only_what_is_strictly_smaller_than_the_threshold_stays_whole(ctx):
    def split(shape, threshold, dtype=torch.float32, own=None):
        model = nn.Linear(1, 1, bias=False)
        model.weight = nn.Parameter(torch.ones(shape, dtype=dtype, device=ctx.device))
        if own is not None:
            model.weight.hsdp_shard_size = own
        hsdp(model, threshold=threshold)
        return model.weight.hsdp_effective_shard_size

    assert split((16, 16), 1) == 4  # 1,024 bytes
    assert split((16, 16), 2) == 1
    assert split((4, 63), 1) == 1  # 1,008 bytes
    assert split((16, 8), 1, torch.float64) == 4
    assert split((16, 16), 1, torch.bfloat16) == 1
    assert split((128, 128), 64) == 4
    assert split((128, 127), 64) == 1
    assert split((4,), 0) == 4
    assert split((), 0) == 1
    assert split((16, 15), 1, own=2) == 1  # an attribute says into how many parts, not whether it is large
    default = hsdp(nn.Linear(128, 128).to(ctx.device))
    assert default.weight.hsdp_effective_shard_size == 4
    assert default.bias.hsdp_effective_shard_size == 1


class TensorParallel(nn.Module):
    """Weights that are DTensors on a mesh of dp and tp, for inputs that are split over dp."""

    def __init__(self, mesh, hidden, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
        self.wholes = {"up": draw(hidden, 8), "down": draw(4, hidden), "gain": draw(4)}
        for name, placement in (("up", Shard(0)), ("down", Shard(1)), ("gain", Replicate())):
            value = self.wholes[name]
            if mesh is not None:
                value = value.to(mesh.device_type) if mesh.device_type != "cpu" else value
                value = distribute_tensor(value, mesh, [Replicate(), placement], src_data_rank=None)
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x):
        hidden = torch.tanh(nn.functional.linear(x, self.up))
        return nn.functional.linear(hidden, self.down) * self.gain


def check_tensor_parallel(ctx, shape, hidden, expected):
    mesh = init_device_mesh(ctx.device_type, shape, mesh_dim_names=("dp", "tp"))
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(2), dtype=ctx.float_dtype).to(ctx.device)
    plain = TensorParallel(None, hidden, ctx.float_dtype).to(ctx.device)
    plain(x).square().mean().backward()
    for level in LEVELS:
        for flag in (False, True):
            model = TensorParallel(mesh, hidden, ctx.float_dtype)
            hsdp(model, threshold=0, optimizer_level=level, enable_grad_accumulation=flag)
            assert {n: p.hsdp_effective_shard_size for n, p in model.named_parameters()} == expected
            assert_close(values(model), {name: value.to(ctx.device) for name, value in model.wholes.items()})
            for micro in (1, 2):  # half of the gradient each
                model.set_requires_grad_sync(micro == 2)
                inputs = distribute_tensor(x, mesh, [Shard(0), Replicate()], src_data_rank=None)
                (model(inputs).square().mean() / 2).backward()
            assert_close(gradients(model), gradients(plain))
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            optimizer.step()
            assert_close(values(model), {name: p.detach() - p.grad for name, p in plain.named_parameters()})


@sim.ranks(4, backends=NO_GLOO)
def test_tensor_parallel_weights_are_split_further(ctx):
    check_tensor_parallel(ctx, (2, 2), 8, {"up": 2, "down": 2, "gain": 4})


@pytest.mark.tier("full")
@sim.ranks(4, backends=NO_GLOO)
def test_uneven_tensor_parallel_weights(ctx):
    """7 rows are 4 and 3, 5 are 3 and 2: one tp rank could split its part and the other could not, so neither does."""
    for hidden in (7, 5):
        check_tensor_parallel(ctx, (2, 2), hidden, {"up": 1, "down": 2, "gain": 4})


@pytest.mark.tier("full")
@sim.ranks(8, backends=("sim",))
def test_tensor_parallel_ranks_without_a_part(ctx):
    """6 rows are 2, 2, 2 and none."""
    check_tensor_parallel(ctx, (2, 4), 6, {"up": 2, "down": 2, "gain": 4})


@sim.ranks(4, backends=("sim",))
def test_the_threshold_of_uneven_parts_is_that_of_the_largest(ctx):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for columns, largest, size in ((7, 1024, 2), (5, 768, 1)):
        model = nn.Linear(1, 1, bias=False)
        weight = distribute_tensor(torch.zeros(64, columns), mesh, [Replicate(), Shard(1)], src_data_rank=None)
        assert weight.to_local().numel() * 4 == (largest if ctx.rank % 2 == 0 else largest - 256)
        model.weight = nn.Parameter(weight)
        assert hsdp(model, threshold=1).weight.hsdp_effective_shard_size == size


# -- what a level means --------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Two cells of one weight each, 2,048 bytes; nothing of its own."""

    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList([nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)])

    def forward(self, x):
        return self.cells[1](torch.tanh(self.cells[0](x)))


def traffic(ranks, build, *, micros=1, steps=2):
    """What rank 0 communicates in the last of some steps: (operation, ranks, bytes received) in order."""

    def step(models):
        model = models[dist.get_rank()]
        for micro in range(micros):
            model.set_requires_grad_sync(micro == micros - 1)
            model(torch.ones(2, 16)).sum().backward()
        hsdp_sync_stream()

    with sim.world(ranks) as world:
        models = world.run(build)
        for _ in range(steps):
            world.trace.clear()
            world.run(step, (models,))
        return [(event.op, len(event.group), event.recv_bytes) for event in world.trace.of_rank(0)]


def told(events, flags=64):
    """Events without the bytes of the flags that go along with gradients."""
    return sorted((op, ranks, size - size % flags) for op, ranks, size in events)


N = 16 * 32 * 4
PER_CELL = {  # on 4 ranks, of which 2 hold the parts of a weight
    "level1": [("all_gather", 2, N // 2), ("all_reduce", 4, 2 * N * 3 // 4)],
    "level2": [("all_gather", 2, N // 2), ("reduce_scatter", 2, N // 2), ("all_reduce", 2, 2 * N // 2 // 2)],
}
PER_CELL["level3"] = [PER_CELL["level2"][0], *PER_CELL["level2"]]


@pytest.mark.sim
@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_communication_of_a_step(level, fusion):
    def build():
        model = Chain()
        for cell in model.cells:
            hsdp(cell, shard_size=2, threshold=0, optimizer_level=level, comm_fusion=fusion)
        return hsdp(model, shard_size=2, threshold=0, optimizer_level=level, comm_fusion=fusion)

    assert told(traffic(4, build)) == sorted(PER_CELL[level] * 2)


@pytest.mark.sim
@pytest.mark.parametrize("level", LEVELS)
def test_communication_of_accumulation(level):
    def build(flag):
        def make():
            model = Chain()
            for module in (*model.cells, model):
                hsdp(module, shard_size=2, threshold=0, optimizer_level=level, enable_grad_accumulation=flag)
            return model

        return make

    gathers = [cost for cost in PER_CELL[level] if cost[0] == "all_gather"] * 2 * 3  # in each of three micro-steps
    once = [cost for cost in PER_CELL[level] if cost[0] != "all_gather"] * 2
    assert told(traffic(4, build(False), micros=3)) == sorted(gathers + once)
    more = [cost for cost in once if cost[0] == "reduce_scatter"] * 2
    assert told(traffic(4, build(True), micros=3)) == sorted(gathers + once + more)


class Four(nn.Module):
    """Four weights of 1 KB each."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.sim
@pytest.mark.parametrize(
    ("fusion", "bucket_size", "reductions"),
    [
        (False, -1, 4),
        (False, 0, 4),
        (False, 64, 4),
        (True, -1, 1),
        (True, 0, 4),
        (True, 1, 4),
        (True, 2, 2),
        (True, 3, 2),
        (True, 4, 1),
        (True, 64, 1),
    ],
)
@pytest.mark.parametrize("level", LEVELS)
def test_bucket_size(level, fusion, bucket_size, reductions):
    def build():
        options = {"shard_size": 2, "threshold": 0, "optimizer_level": level}
        return hsdp(Four(), comm_fusion=fusion, bucket_size=bucket_size, **options)

    ops = [op for op, _, _ in traffic(4, build)]
    assert ops.count("all_gather") == 1  # gathers are fused whatever is asked of gradients
    assert ops.count("all_reduce") == reductions
    assert ops.count("reduce_scatter") == (0 if level == "level1" else reductions)


@pytest.mark.sim
@pytest.mark.parametrize("level", LEVELS)
def test_what_one_rank_or_whole_parameters_communicate(level):
    assert traffic(1, lambda: hsdp(Chain(), threshold=0, optimizer_level=level)) == []
    for options in ({"shard_size": 1, "threshold": 0}, {"threshold": 64}):
        made = lambda options=options: hsdp(Chain(), optimizer_level=level, comm_fusion=True, **options)  # noqa: E731
        assert told(traffic(4, made)) == [("all_reduce", 4, 2 * 2 * N * 3 // 4)]


# -- accumulation --------------------------------------------------------------------------------------------------


def accumulating(ctx, level, **options):
    model = nn.Linear(4, 4, bias=False).to(ctx.device, ctx.float_dtype)
    options = {"shard_size": 2, "threshold": 0, "grad_scale": 0.5, **options}
    return hsdp(model, optimizer_level=level, enable_grad_accumulation=True, **options)


def micro_step(ctx, model, sync):
    """A gradient of rank + 1 in every element."""
    model.set_requires_grad_sync(sync)
    x = torch.full((1, 4), ctx.rank + 1.0, device=ctx.device, dtype=model.weight.dtype)
    model(x).sum().backward()
    hsdp_sync_stream()
    return model.weight.acc_grad


def elements(tensor):
    local = tensor.to_local()
    assert local.min() == local.max()
    return local[0, 0].item()


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
@sim.ranks(4, backends=NO_GLOO)
def test_acc_grad(ctx, level, dtype):
    for late in (False, True):
        check_acc_grad(ctx, level, dtype, accumulating(ctx, level, reduce_dtype=dtype, comm_async=late))


def check_acc_grad(ctx, level, dtype, model):
    pair = ctx.rank // 2  # ranks 0 and 1 hold the parts of one copy, with gradients 1 + 2; ranks 2 and 3, 3 + 4
    own = ctx.rank + 1.0 if level == "level1" else (3.0, 7.0)[pair]
    for cycle in range(3):
        for count in (1, 2):
            shown = micro_step(ctx, model, sync=False)
            assert shown.dtype == (dtype or ctx.float_dtype)
            assert shown.shape == (4, 4)
            assert shown.to_local().shape == ((4, 4) if level == "level1" else (2, 4))
            assert shown.placements == (Partial(), Partial() if level == "level1" else Shard(0))
            assert elements(shown) == count * own
            assert model.weight.grad is None
        shown = micro_step(ctx, model, sync=True)
        assert elements(shown) == 3 * 2.5 * 0.5  # three steps, averaged over ranks, scaled
        assert shown.dtype == (dtype or ctx.float_dtype)
        assert shown.placements == (Replicate(), Replicate() if level == "level1" else Shard(0))
        assert model.weight.grad.dtype == ctx.float_dtype
        assert model.weight.grad.placements == (Replicate(), Shard(0))
        assert elements(model.weight.grad) == 3 * 2.5 * 0.5
        if cycle == 0:
            model.zero_grads()
            assert model.weight.acc_grad is None
            assert model.weight.grad is None
        else:
            model.weight.grad = None  # as an optimizer does; the next cycle begins anew all the same


@sim.ranks(4, backends=NO_GLOO)
def test_acc_grad_of_half_precision_waits_in_fp32(ctx):
    for level in LEVELS:
        model = hsdp(
            nn.Linear(4, 4, bias=False).to(ctx.device, torch.bfloat16),
            shard_size=2,
            threshold=0,
            optimizer_level=level,
            enable_grad_accumulation=True,
        )
        waiting = micro_step(ctx, model, sync=False)
        assert waiting.dtype == torch.float32
        micro_step(ctx, model, sync=True)
        assert model.weight.grad.dtype == torch.bfloat16
        assert elements(model.weight.grad) == 2 * 2.5


@pytest.mark.parametrize("level", LEVELS)
@sim.ranks(4, backends=NO_GLOO)
def test_acc_grad_is_no_alias_of_grad(ctx, level):
    model = accumulating(ctx, level)
    micro_step(ctx, model, sync=False)
    shown = micro_step(ctx, model, sync=True)
    model.weight.grad.mul_(100)  # as clipping does
    assert elements(shown) == 2 * 2.5 * 0.5


@sim.ranks(4, backends=NO_GLOO)
def test_acc_grad_of_a_dtensor_that_keeps_its_layout(ctx):
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(4, 4, bias=False).to(ctx.device)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate(), Shard(0)]))
    hsdp(model, enable_grad_accumulation=True)
    model.set_requires_grad_sync(False)
    x = DTensor.from_local(torch.full((1, 4), ctx.rank // 2 + 1.0, device=ctx.device), mesh, [Shard(0), Replicate()])
    model(x).to_local().sum().backward()
    assert elements(model.weight.acc_grad) == ctx.rank // 2 + 1.0
    assert model.weight.acc_grad.placements == (Partial(), Shard(0))
    assert torch.equal(full(model.weight.acc_grad), torch.full((4, 4), 3.0, device=ctx.device))


@sim.ranks(2, backends=NO_GLOO)
def test_no_acc_grad_unless_asked_for(ctx):
    for level in LEVELS:
        model = hsdp(nn.Linear(4, 4).to(ctx.device), threshold=0, optimizer_level=level)
        for sync in (False, True):
            model.set_requires_grad_sync(sync)
            model(torch.ones(1, 4, device=ctx.device)).sum().backward()
            assert getattr(model.weight, "acc_grad", None) is None
            assert (model.weight.grad is None) == (not sync)


# -- asynchronous reductions ---------------------------------------------------------------------------------------


@pytest.mark.sim
def test_hsdp_sync_stream_without_anything_to_wait_for():
    assert not dist.is_initialized()
    hsdp_sync_stream()

    def rank():
        hsdp_sync_stream()
        model = hsdp(nn.Linear(4, 4), comm_async=True)
        hsdp_sync_stream()
        model(torch.ones(1, 4)).sum().backward()
        for _ in range(2):
            hsdp_sync_stream()
        return model.bias.grad is not None

    assert sim.run(rank, 2) == [True, True]


@pytest.mark.parametrize("level", LEVELS)
@sim.ranks(4, backends=NO_GLOO)
def test_hsdp_sync_stream(ctx, level):
    options = {"shard_size": 2, "threshold": 0, "optimizer_level": level, "comm_async": True}
    model, plain = wrap(net(ctx), **options), net(ctx)
    forgotten = wrap(net(ctx), **options)
    cleared = wrap(net(ctx), **options)
    for m, rank in ((plain, None), (model, ctx.rank), (forgotten, ctx.rank), (cleared, ctx.rank)):
        m(batch(ctx, rank=rank)).square().mean().backward()
    wanted = gradients(plain)
    for m in (model, forgotten, cleared):
        assert any(p.grad is None for p in m.parameters())  # still under way
    with torch.no_grad():
        forgotten(batch(ctx, rank=ctx.rank))
    assert_close(gradients(forgotten), wanted)
    cleared.zero_grads()
    hsdp_sync_stream()
    assert_close(gradients(model), wanted)
    assert all(p.grad is None for p in cleared.parameters())
    hsdp_sync_stream()
    assert_close(gradients(model), wanted)
    assert_close(gradients(forgotten), wanted)


@sim.ranks(2, backends=NO_GLOO)
def test_an_asynchronous_cell_below_a_root_that_is_not(ctx):
    for root in (hsdp, fully_shard):
        model, plain = net(ctx), net(ctx)
        hsdp(model.blocks[1], threshold=0, comm_async=True)
        root(model)
        model(batch(ctx, rank=ctx.rank)).square().mean().backward()
        plain(batch(ctx)).square().mean().backward()
        hsdp_sync_stream()
        assert_close(gradients(model), gradients(plain))


# -- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@sim.ranks(2, backends=NO_GLOO)
def test_grad_scale(ctx, level):
    for scale in (0.25, -2.0, 0.0):
        model, plain = wrap(net(ctx), threshold=1, optimizer_level=level, grad_scale=scale), net(ctx)
        model(batch(ctx, rank=ctx.rank)).square().mean().backward()
        plain(batch(ctx)).square().mean().backward()
        assert_close(gradients(model), {name: grad * scale for name, grad in gradients(plain).items()})


# -- with other APIs, levels and libraries -------------------------------------------------------------------------


@sim.ranks(4, backends=NO_GLOO)
def test_cells_and_units_in_one_model(ctx):
    def cells_in_a_unit(model):
        hsdp(model.blocks[0], threshold=0, optimizer_level="level1", shard_size=2)
        fully_shard(model.blocks[1])
        hsdp(model.blocks[2], threshold=0, optimizer_level="level3", comm_fusion=True)
        model.scale = nn.Parameter(model.scale.detach().view(1))
        return fully_shard(model)

    def units_in_a_cell(model):
        fully_shard(model.blocks[0])
        hsdp(model.blocks[1].up, threshold=0, optimizer_level="level2", enable_grad_accumulation=True)
        hsdp(model.blocks[1], threshold=0, optimizer_level="level1")
        return hsdp(model, threshold=0, optimizer_level="level2", enable_grad_accumulation=True, shard_size=2)

    for wrapping in (cells_in_a_unit, units_in_a_cell):
        model, plain = wrapping(net(ctx)), net(ctx)
        plain.scale = nn.Parameter(plain.scale.detach().view(model.scale.shape))
        if not isinstance(model, HSDPCell):
            model.set_requires_grad_sync = model.set_requires_gradient_sync
        check_against_one_device(ctx, model, plain, micros=2)
        assert all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.tier("full")
@sim.ranks(4, backends=NO_GLOO)
def test_a_model_made_on_meta(ctx):
    for level in LEVELS:
        with torch.device("meta"):
            model = Net().to(ctx.float_dtype)
        model.head.weight.no_decay = True
        wrap(model, threshold=0, shard_size=2, optimizer_level=level)
        assert model.head.weight.hsdp_effective_shard_size == 2
        with pytest.raises(RuntimeError, match=r"still on the meta device") as caught:
            model(batch(ctx, rank=ctx.rank))
        assert all(name in str(caught.value) for name in ("scale", "head.weight", "head.bias"))
        model.to_empty(device=ctx.device)
        assert not model.load_state_dict(net(ctx).state_dict()).missing_keys
        check_against_one_device(ctx, model, net(ctx))
        assert model.head.weight.hsdp_effective_shard_size == 2
        assert model.head.weight.no_decay


class Scaled(nn.Module):
    """Weights that were quantized, frozen, and a scale for each."""

    def __init__(self, dtype):
        super().__init__()
        self.quantized = nn.Parameter((torch.arange(32.0).view(8, 4) % 5).to(dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.full((8, 4), 0.5))

    def forward(self, x):
        return x @ (self.quantized.float() * self.scale).T


@sim.ranks(2)
def test_frozen_parameters_of_dtypes_that_backends_do_not_gather(ctx):
    mesh = init_device_mesh(ctx.device_type, (2,))
    x = torch.arange(16.0, device=ctx.device).view(4, 4) / 8
    for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn):
        alone = Scaled(dtype).to(ctx.device)
        alone(x).square().mean().backward()
        for wrap in (
            lambda m: fully_shard(m, mesh=mesh),
            lambda m: hsdp(m, threshold=0, optimizer_level="level3"),
            lambda m: hsdp(m, threshold=0, optimizer_level="level3", use_eager_hook=False),
        ):
            model = wrap(Scaled(dtype).to(ctx.device))
            model(x[2 * ctx.rank :][:2]).square().mean().backward()
            torch.testing.assert_close(full(model.scale.grad), alone.scale.grad)
            assert torch.equal(full_tensor(model.quantized).float(), alone.quantized.float())  # torch's own cannot


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("level", LEVELS)
@sim.ranks(4, backends=("sim",), check_replicas=True)
def test_what_a_layout_calls_a_copy_is_one(ctx, level):
    options = {"shard_size": 2, "optimizer_level": level, "enable_grad_accumulation": True}
    for way in ({"threshold": 0}, {"threshold": 1, "comm_fusion": True}):
        check_against_one_device(ctx, wrap(net(ctx), **options, **way), net(ctx), micros=2)


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("level", LEVELS)
@sim.ranks(4, backends=("sim",), check_races=True)
def test_nothing_is_used_while_it_is_communicated(ctx, level):
    options = {"shard_size": 2, "threshold": 0, "optimizer_level": level, "comm_async": True}
    for fusion in (False, True):
        model = wrap(net(ctx), comm_fusion=fusion, enable_grad_accumulation=fusion, **options)
        check_against_one_device(ctx, model, net(ctx), micros=2, sync=hsdp_sync_stream)


@sim.ranks(2, backends=NO_GLOO)
def test_a_cell_with_a_dtensor_adds_gradients_up(ctx):
    mesh = init_device_mesh(ctx.device_type, (2,))
    model = nn.Linear(4, 4).to(ctx.device)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()]))
    model.forward = lambda x: nn.functional.linear(x, model.weight.to_local(), model.bias)
    for threshold in (0, 64):
        other = copy.deepcopy(model)
        other.forward = lambda x, other=other: nn.functional.linear(x, other.weight.to_local(), other.bias)
        hsdp(other, threshold=threshold)
        assert other.weight.hsdp_effective_shard_size == (2 if threshold == 0 else 1)
        other(torch.full((1, 4), ctx.rank + 1.0, device=ctx.device)).sum().backward()
        assert torch.equal(full(other.weight.grad), torch.full((4, 4), 3.0, device=ctx.device))
        assert torch.equal(full(other.bias.grad), torch.full((4,), 2.0, device=ctx.device))


@sim.ranks(2, backends=("sim",))  # what it gathers is on the host
def test_a_cell_without_parameters_of_its_own(ctx):
    model = nn.Sequential(hsdp(nn.Linear(4, 4), threshold=0), nn.Tanh())
    model.register_buffer("steps", torch.zeros(1))
    assert hsdp(model) is model
    assert model.steps.device == model[0].weight.to_local().device  # where the cells inside are, not the accelerator
    model(torch.ones(1, 4)).sum().backward()
    assert model[0].weight.grad is not None


@sim.ranks(2, backends=NO_GLOO)
def test_the_class_of_a_cell(ctx):
    model = nn.Linear(4, 4).to(ctx.device)
    assert hsdp(model) is model
    assert isinstance(model, (nn.Linear, HSDPCell))
    assert type(model).__name__ == "HSDPLinear"
    assert type(model) is type(hsdp(nn.Linear(4, 4).to(ctx.device)))
    assert not isinstance(fully_shard(nn.Linear(4, 4).to(ctx.device)), HSDPCell)
    with pytest.raises(TypeError, match=r"cannot copy or pickle a Linear"):
        copy.copy(model)
