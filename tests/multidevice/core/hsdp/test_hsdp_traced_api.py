"""`hsdp(..., use_eager_hook=False)`, as users call it, against one device; and its cells among those with hooks."""

import copy
import gc
import weakref

import pytest
import torch
from rounding_kit import is_late, is_stand_in, results, shorter
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from units_kit import assert_as_one_device, assert_near, compiled, full, gradients, inputs, values

import sim
from hyper_parallel.core.fully_shard.api import fully_shard
from hyper_parallel.core.fully_shard.clip import clip_grad_norm_, get_total_norm
from hyper_parallel.core.fully_shard.unit import unit_of
from hyper_parallel.core.hsdp.api import HSDPCell, hsdp, hsdp_sync_stream

pytestmark = pytest.mark.tier("test")

NO_GLOO = ("sim", "gpu", "npu")
LEVELS = ("level1", "level2", "level3")
WIDTH, PER_RANK = 8, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH, bias=False)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))

    def forward(self, x):
        return x + self.shift + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A scalar, rows that 2 but not 4 ranks share (6), and a frozen parameter."""

    def __init__(self, blocks=2):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.linspace(0, 1, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, x):
        x = x * self.scale + self.frozen
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(ctx, dtype=None, blocks=2):
    torch.manual_seed(0)
    return Net(blocks).to(ctx.device, dtype or ctx.float_dtype)


def wrap(model, **options):
    """Wrap the blocks, then the whole."""
    for block in model.blocks:
        hsdp(block, use_eager_hook=False, **options)
    return hsdp(model, use_eager_hook=False, **options)


def batch(ctx, step=0, rank=None, dtype=None):
    return inputs(ctx, step, (PER_RANK, WIDTH), rank, dtype)


def alone():
    ctx = sim.RankTest(0, 4, "sim", torch.device("cpu"))
    return results(*train(ctx, net(ctx, torch.float32), dtype=torch.float32))


def assert_close(ours, theirs, scale=1.0):
    scaled = {name: wanted if wanted is None else wanted * scale for name, wanted in theirs.items()}
    assert_near(ours, scaled, alone)


def train(ctx, model, *, call=None, rank=None, micros=1, steps=2, dtype=None):
    """Losses, the last step's gradients, the parameters at the end."""
    call = model if call is None else call
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        model.zero_grad() if rank is None else model.zero_grads()
        for micro in range(micros):
            if rank is not None:
                model.set_requires_grad_sync(micro == micros - 1)
            loss = call(batch(ctx, 10 * step + micro, rank, dtype)).square().mean() / micros
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    return losses, gradients(model), values(model)


def check(ctx, model, wanted, **options):
    assert_as_one_device(ctx, train(ctx, model, rank=ctx.rank, **options), wanted, assert_close)


def backward(ctx, model, step=0, call=None):
    (model if call is None else call)(batch(ctx, step, ctx.rank)).square().mean().backward()


# -- training ------------------------------------------------------------------------------------------------------

WAYS = [
    {"threshold": 0},
    {"threshold": 1, "shard_size": 2},  # up.weight and down.weight are of 1,024 bytes
    {"threshold": 0, "shard_size": 3, "comm_async": True, "comm_fusion": True, "bucket_size": 1},
    {"threshold": 64},
]


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("level", LEVELS)
@sim.ranks(4, backends=NO_GLOO)
def test_one_device_on_four_ranks(ctx, level):
    wanted = train(ctx, net(ctx), micros=3)
    for way in WAYS:
        for flag in (False, True):
            model = wrap(net(ctx), optimizer_level=level, enable_grad_accumulation=flag, **way)
            check(ctx, model, wanted, micros=3)
            assert all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.tier("full")
@sim.ranks(2)
def test_one_device_on_two_ranks(ctx):
    wanted = train(ctx, net(ctx), micros=2)
    for level in LEVELS:
        check(ctx, wrap(net(ctx), threshold=0, optimizer_level=level), wanted, micros=2)
    model = wrap(net(ctx), threshold=0, optimizer_level="level3")
    check(ctx, model, wanted, micros=2, call=compiled(ctx, model, "aot_eager"))
    held = model.state_dict()
    other = wrap(net(ctx), threshold=1)
    other.load_state_dict(held)
    assert_close(values(other), values(model))


class Turned(nn.Module):
    """A complex parameter, of which autograd keeps a conjugated view for backward."""

    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, x):
        return (x + 1j * x.flip(0)) @ self.phase.conj().T


@sim.ranks(2, backends=NO_GLOO)
def test_a_conjugated_view_is_gathered_again_as_one(ctx):
    """Backward multiplies by what was kept: by its conjugate, the gradient of x would be another one."""
    for level in LEVELS:
        torch.manual_seed(0)
        plain = Turned().to(ctx.device)
        dtype = torch.float32 if level == "level2" else None  # for what is not complex
        options = {"threshold": 0, "optimizer_level": level, "reduce_dtype": dtype}
        model = hsdp(copy.deepcopy(plain), use_eager_hook=False, **options)
        for step in range(2):
            found = []
            for m in (plain, model):
                x = batch(ctx, step, dtype=torch.float32).requires_grad_()
                torch.view_as_real(m(x)).square().mean().backward()
                found.append({"x": x.grad, **gradients(m)})
            for name, wanted in found[0].items():
                torch.testing.assert_close(found[1][name], wanted, msg=f"{level}: {name}")


@sim.ranks(1, backends=NO_GLOO)
def test_a_single_rank(ctx):
    wanted = train(ctx, net(ctx), micros=2)
    for level in LEVELS:
        check(ctx, wrap(net(ctx), threshold=0, optimizer_level=level), wanted, micros=2)


@sim.ranks(4, backends=NO_GLOO)
def test_effective_shard_sizes(ctx):
    model = net(ctx, torch.float64)  # which gives the bytes; nothing is reduced
    model.blocks[0].up.weight.hsdp_shard_size = 4
    wrap(model, threshold=1, shard_size=2)
    sizes = {name: p.hsdp_effective_shard_size for name, p in model.named_parameters()}
    assert sizes.pop("blocks.0.up.weight") == 4
    split = {name for name, size in sizes.items() if size == 2}
    assert split == {"blocks.0.down.weight", "blocks.1.up.weight", "blocks.1.down.weight"}
    assert set(sizes.values()) == {1, 2}
    weight = model.blocks[1].up.weight
    assert weight.placements == (Replicate(), Shard(0))
    assert weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
    unsharded, part = full(weight.detach()), 16 // 2
    assert torch.equal(weight.to_local(), unsharded[ctx.rank % 2 * part :][:part])


@sim.ranks(2, backends=NO_GLOO)
def test_grad_scale(ctx):
    plain = net(ctx)
    plain(batch(ctx)).square().mean().backward()
    for level in LEVELS:
        for flag in (False, True):
            model = wrap(net(ctx), threshold=0, grad_scale=0.25, optimizer_level=level, enable_grad_accumulation=flag)
            backward(ctx, model)
            assert_close(gradients(model), gradients(plain), 0.25)
            if flag:
                assert_close({"acc": full(model.head.weight.acc_grad)}, {"acc": plain.head.weight.grad}, 0.25)


@sim.ranks(2, backends=NO_GLOO)
def test_gradients_in_half_precision_are_scaled_before_the_sum(ctx):
    model = hsdp(nn.Linear(4, 4, bias=False).to(ctx.device, torch.float16), threshold=0, use_eager_hook=False)
    (model(torch.full((1, 4), 200.0, device=ctx.device).half()) * 200).sum().backward()
    assert full(model.weight.grad).eq(40_000).all(), "the sum of two is above the largest number, 65,504"


@pytest.mark.tier("full")
@sim.ranks(4, backends=NO_GLOO)
def test_what_adds_up_is_shown(ctx):
    plain = net(ctx)
    for micro in range(2):
        backward_all(ctx, plain, micro)
    for level in LEVELS:
        model = wrap(net(ctx), threshold=0, shard_size=2, optimizer_level=level, enable_grad_accumulation=True)
        weight = model.blocks[0].up.weight
        for _ in range(2):  # the second time after zero_grads
            for micro in range(2):
                model.set_requires_grad_sync(micro == 1)
                backward(ctx, model, micro)
                waits = Partial() if micro == 0 else Replicate()
                assert weight.acc_grad.placements == (waits, waits if level == "level1" else Shard(0))
                assert (weight.grad is None) == (micro == 0)
            assert_close({"acc": full(weight.acc_grad)}, {"acc": plain.blocks[0].up.weight.grad})
            assert_close(gradients(model), gradients(plain))
            model.zero_grads()
            assert all(p.grad is None and getattr(p, "acc_grad", None) is None for p in model.parameters())
        model.set_requires_grad_sync(False)
        backward(ctx, model, 5)
        model.zero_grads()  # what waits, too
        model.set_requires_grad_sync(True)
        for micro in range(2):
            backward(ctx, model, micro)
        assert_close(gradients(model), gradients(plain))


@pytest.mark.tier("full")
@sim.ranks(2, backends=NO_GLOO)
def test_hooks_of_parameters_run_once_per_synced_step(ctx):
    for level in LEVELS:
        for flag in (False, True):
            plain = net(ctx)
            model = wrap(net(ctx), threshold=0, optimizer_level=level, enable_grad_accumulation=flag)
            seen = []
            for m in (plain, model):
                m.head.weight.register_hook(lambda gradient: 2 * gradient)
            model.head.weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(full(p.grad)))
            for micro in range(4):
                model.set_requires_grad_sync(micro != 1)
                backward(ctx, model, micro)
                backward_all(ctx, plain, micro)
                assert len(seen) == (1, 1, 2, 3)[micro]
            assert_close({"grad": seen[-1]}, {"grad": plain.head.weight.grad})
            assert_close(gradients(model), gradients(plain))


@sim.ranks(2, backends=NO_GLOO)
def test_a_model_that_nobody_uses_is_freed(ctx):
    for flag in (False, True):
        model = wrap(net(ctx), threshold=0, enable_grad_accumulation=flag)
        backward(ctx, model)
        seen = [weakref.ref(x) for x in (model, model.blocks[0], *model.parameters())]
        assert None not in [reference() for reference in seen]
        del model
        gc.collect()
        assert [reference() for reference in seen] == [None] * len(seen)


def backward_all(ctx, model, step=0):
    model(batch(ctx, step)).square().mean().backward()


# -- torch.compile -------------------------------------------------------------------------------------------------


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("level", LEVELS)
@sim.ranks(2, backends=NO_GLOO)
def test_one_graph_of_a_cell_and_of_the_whole(ctx, level):
    # Both backends trace the same graph. AOTAutograd, which takes most of the time, gets each graph once: that of the
    # whole at each level, and that of a cell at the level that repeats gathers in backward.
    one, two = (train(ctx, net(ctx, blocks=blocks), micros=2) for blocks in (1, 2))
    model = wrap(net(ctx, blocks=1), threshold=0, optimizer_level=level)
    check(ctx, model, one, micros=2, call=compiled(ctx, model, "aot_eager"))
    model = wrap(net(ctx, blocks=2), threshold=0, optimizer_level=level)
    torch._dynamo.reset()
    for block in () if is_stand_in(ctx) else model.blocks:
        block.compile(backend="aot_eager" if level == LEVELS[-1] else "eager", fullgraph=True)
    check(ctx, model, two, micros=2)


@pytest.mark.tier("full")
@sim.ranks(2, backends=NO_GLOO)
def test_hooks_break_the_graph_and_the_other_form_does_not(ctx):
    if is_late(ctx):
        pytest.skip("torch takes no graph while races are looked for")
    x = batch(ctx, 0, ctx.rank)
    for traced in (True, False):
        model = net(ctx)
        hsdp(model.blocks[0], threshold=0, use_eager_hook=not traced)
        torch._dynamo.reset()
        call = torch.compile(model.blocks[0], backend="eager", fullgraph=True)
        if traced:
            call(x).sum().backward()
            report = torch._dynamo.explain(model.blocks[0])(x)
            assert (report.graph_count, report.graph_break_count) == (1, 0), report
        else:
            with pytest.raises(torch._dynamo.exc.TorchDynamoException):
                call(x)
    torch._dynamo.reset()


# -- cells in cells ------------------------------------------------------------------------------------------------


def roots(ctx):
    """Models of two traced cells: in an hsdp root with hooks, and in a fully_shard root."""
    mesh = init_device_mesh(ctx.device_type, (ctx.world_size,))
    for level in LEVELS:
        for api in ("hsdp", "fully_shard"):
            model = net(ctx)
            for block in model.blocks:
                hsdp(block, threshold=0, optimizer_level=level, use_eager_hook=False)
            if api == "hsdp":
                hsdp(model, threshold=0, optimizer_level=level)
                sync = model.set_requires_grad_sync
            else:
                fully_shard(model, mesh=mesh)
                sync = model.set_requires_gradient_sync
            yield model, sync


@pytest.mark.tier("full")
@sim.ranks(2, backends=NO_GLOO)
def test_traced_cells_in_roots_with_hooks(ctx):
    for model, sync in roots(ctx):
        own = {param.name for bucket in unit_of(model).buckets for param in bucket.params}
        assert own == {"scale", "frozen", "head.weight", "head.bias"}
        with pytest.raises(ValueError, match=r"set_reduce_op_type cannot reach .*\n  seen: .*use_eager_hook=False"):
            model.set_reduce_op_type("sum")
        model.set_reduce_op_type("avg")
        plain = net(ctx)
        for step in range(2):
            for micro in range(3):
                sync(micro == 2)
                backward(ctx, model, micro + 3 * step)
                backward_all(ctx, plain, micro + 3 * step)
                inner = model.blocks[0].up.weight
                assert (inner.grad is None) == (model.head.weight.grad is None) == (micro < 2)
            hsdp_sync_stream()
            assert_close(gradients(model), gradients(plain))
            norms = [clip_grad_norm_(m, 0.5) for m in (model, plain)]
            assert_close({"norm": norms[0]}, {"norm": norms[1]})
            for m in (model, plain):
                torch.optim.SGD(m.parameters(), lr=0.1).step()
                m.zero_grad()
            assert all(p.grad is None for p in model.parameters())
        sync(False)
        backward(ctx, model, 7)
        model.zero_grad()  # what waits, too
        sync(True)
        backward(ctx, model, 8)
        backward_all(ctx, plain, 8)
        assert_close(gradients(model), gradients(plain))
        assert_close(values(model), values(plain))


@sim.ranks(2, backends=NO_GLOO)
def test_clipping_waits_for_gradients_under_way(ctx):
    for norm in (clip_grad_norm_, lambda m, *_: get_total_norm(m)):
        plain, model = net(ctx), net(ctx)
        hsdp(model.blocks[0], threshold=0, use_eager_hook=False)
        hsdp(model, threshold=0, comm_async=True)
        backward(ctx, model)
        backward_all(ctx, plain)
        assert model.head.weight.grad is None
        assert_close({"norm": norm(model, 0.5)}, {"norm": norm(plain, 0.5)})
        assert_close(gradients(model), gradients(plain))


@sim.ranks(2, backends=NO_GLOO)
def test_cells_with_hooks_in_a_traced_root(ctx):
    wanted = train(ctx, net(ctx), micros=2)
    for level in LEVELS:
        for inner in (True, False):
            model = net(ctx)
            hsdp(model.blocks[0], threshold=0, optimizer_level=level)
            hsdp(model.blocks[1], threshold=0, optimizer_level="level3", use_eager_hook=inner)
            hsdp(model, threshold=0, optimizer_level=level, use_eager_hook=False)
            check(ctx, model, wanted, micros=2)


@sim.ranks(2, backends=NO_GLOO)
def test_prefetch_setters_take_traced_cells(ctx):
    plain = net(ctx)
    backward_all(ctx, plain)
    model = wrap(net(ctx), threshold=0)
    mixed = net(ctx)
    for index, block in enumerate(mixed.blocks):
        hsdp(block, threshold=0, use_eager_hook=index == 0)
    hsdp(mixed, threshold=0)
    for m in (model, mixed):
        for cell in (m, *m.blocks):
            assert isinstance(cell, HSDPCell)
            cell.set_forward_prefetch_cells(list(m.blocks))
            cell.set_backward_prefetch_cells(tuple(m.blocks))
        backward(ctx, m)
        assert_close(gradients(m), gradients(plain))
        with pytest.raises(ValueError, match="item 0, a Linear"):
            m.blocks[1].set_forward_prefetch_cells([m.head])
        with pytest.raises(ValueError, match=r"hsdp_cell_list is a .*, not a list"):
            m.blocks[1].set_backward_prefetch_cells(m.blocks[0])


# -- state ---------------------------------------------------------------------------------------------------------


@sim.ranks(2, backends=NO_GLOO)
def test_a_model_made_on_meta(ctx):
    plain = net(ctx)
    backward_all(ctx, plain)
    for flag in (False, True):
        for assign in (False, True):
            with torch.device("meta"):
                model = Net().to(ctx.float_dtype)
            wrap(model, threshold=0, enable_grad_accumulation=flag)
            if not assign:
                model.to_empty(device=ctx.device)
            model.load_state_dict(plain.state_dict(), assign=assign)
            backward(ctx, model)
            assert_close(gradients(model), gradients(plain))


@pytest.mark.tier("full")
@sim.ranks(2, backends=NO_GLOO)
def test_parameters_that_change_after_wrapping(ctx):
    """Their dtype, and one altogether."""
    for backend in (None, "aot_eager"):
        for flag in (False, True):
            short = shorter(ctx.float_dtype)
            plain = net(ctx, short, blocks=1).to(ctx.float_dtype)  # one: each is traced several times
            plain.head.weight = nn.Parameter(2 * plain.head.weight.detach())
            model = net(ctx, short, blocks=1)
            wrap(model, threshold=0, optimizer_level="level2", enable_grad_accumulation=flag)
            model.to(ctx.float_dtype)
            model.head.weight = nn.Parameter(2 * model.head.weight.detach())
            call = compiled(ctx, model, backend)
            for micro in range(3):
                model.set_requires_grad_sync(micro != 1)
                backward(ctx, model, micro, call)
                backward_all(ctx, plain, micro)
            assert_close(gradients(model), gradients(plain))


@pytest.mark.tier("full")
@sim.ranks(2, backends=("sim",))
def test_another_dtype_that_a_graph_would_round_is_an_error(ctx):
    for convert in (True, False):
        model = nn.Linear(WIDTH, WIDTH, bias=False).bfloat16()
        hsdp(model, threshold=0, enable_grad_accumulation=True, use_eager_hook=False)
        call = compiled(ctx, model, "eager")
        if convert:
            model.float()
        else:
            model.weight = nn.Parameter(model.weight.detach().float())
            with pytest.raises(RuntimeError, match="another dtype"):
                call(torch.full((1, WIDTH), 1 / 3))
            model.set_requires_grad_sync(True)
        call(torch.full((1, WIDTH), 1 / 3)).sum().backward()
        assert torch.equal(full(model.weight.grad), torch.full((WIDTH, WIDTH), 1 / 3))


@sim.ranks(2, backends=("gpu",))
def test_buffers_are_moved_to_the_device(ctx):
    cell = Block()
    for name in ("norm", "up", "down"):
        getattr(cell, name).to(ctx.device)
    hsdp(cell, use_eager_hook=False)
    assert cell.shift.device.type == ctx.device_type
    cell(batch(ctx, 0, ctx.rank, torch.float32)).sum().backward()


# -- what is refused -----------------------------------------------------------------------------------------------


@sim.ranks(2, backends=NO_GLOO)
def test_wrapping_twice_is_refused(ctx):
    for first, second in (
        (lambda m: hsdp(m, use_eager_hook=False), hsdp),
        (lambda m: hsdp(m, use_eager_hook=False), lambda m: hsdp(m, use_eager_hook=False)),
        (lambda m: hsdp(m, use_eager_hook=False), fully_shard),
        (hsdp, lambda m: hsdp(m, use_eager_hook=False)),
        (fully_shard, lambda m: hsdp(m, use_eager_hook=False)),
    ):
        model = net(ctx)
        first(model)
        with pytest.raises(ValueError, match=r"(?s)wrapped already.*seen: .*try: "):
            second(model)
        backward(ctx, model)


@sim.ranks(4, backends=NO_GLOO)
def test_dtensors_are_refused_and_nothing_is_changed(ctx):
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    for placement in (Shard(0), Replicate()):
        model = nn.Linear(8, 8, bias=False).to(ctx.device)
        model.weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Replicate(), placement]))
        before = model.weight
        wanted = r"(?s)hsdp cannot gather 'weight'.*it is a DTensor.*seen: .*try: use_eager_hook=True"
        with pytest.raises(ValueError, match=wanted):
            hsdp(model, threshold=0, use_eager_hook=False)
        assert model.weight is before
        assert type(model) is nn.Linear
        hsdp(model, threshold=0)  # as the error says
        model(distribute_tensor(torch.ones(2, 8), mesh, [Replicate()] * 2)).sum().backward()
        assert torch.equal(full(model.weight.grad), torch.full((8, 8), 2.0, device=ctx.device))


@sim.ranks(4, backends=NO_GLOO)
def test_plain_parameters_beside_split_dtensors_are_refused(ctx):
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    for eager in (True, False):
        block = Block().to(ctx.device)
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        with pytest.raises(ValueError, match=r"(?s)plain parameters and split DTensors.*'up.weight'.*plain: .*try: "):
            hsdp(block, use_eager_hook=eager)
        assert type(block) is Block
        fully_shard(block, mesh=mesh["dp"])  # as the error says
        block(torch.ones(2, 8, device=ctx.device)).sum().backward()


@sim.ranks(2, backends=NO_GLOO)
def test_copies_are_refused(ctx):
    model = wrap(net(ctx), threshold=0)
    for item in (model, model.blocks[0]):
        for make in (copy.deepcopy, copy.copy):
            with pytest.raises(TypeError, match=r"(?s)cannot copy or pickle.*seen: .*try: its state_dict"):
                make(item)


@sim.ranks(2, backends=NO_GLOO)
def test_second_derivatives_are_those_of_inputs_only(ctx):
    def penalty(call, rank=None):
        x = batch(ctx, 0, rank).requires_grad_()
        (slope,) = torch.autograd.grad(call(x).pow(3).sum(), [x], create_graph=True)
        return slope.square().mean()

    plain, model = net(ctx), wrap(net(ctx), threshold=0)
    penalty(plain).backward()
    penalty(model, ctx.rank).backward()
    assert_close(gradients(model), gradients(plain))
    with pytest.raises(RuntimeError, match=r"(?s)cannot differentiate the gradients.*seen: create_graph=True.*try: "):
        torch.autograd.grad(model(batch(ctx, 0, ctx.rank)).sum(), list(model.parameters())[2:], create_graph=True)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.block.weight

    def forward(self, x):
        return self.head(torch.tanh(self.block(x)))


@sim.ranks(2, backends=NO_GLOO)
def test_a_weight_that_a_module_of_another_unit_shares(ctx):
    for wrap in (hsdp, lambda m: hsdp(m, use_eager_hook=False), fully_shard):
        model = Tied().to(ctx.device, ctx.float_dtype)
        hsdp(model.block, threshold=0, use_eager_hook=False)
        with pytest.raises(ValueError, match=r"(?s)'head.weight': it is the same as 'weight'.*seen: .*try: "):
            wrap(model)
        with pytest.raises(RuntimeError, match=r"(?s)a gradient arrived for 'weight'.*seen: .*try: "):
            backward(ctx, model)  # of a root that nobody has wrapped
