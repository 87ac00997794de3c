"""Weights that are gathered inside of forward, against the same model on one device; under torch.compile, too."""

import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from rounding_kit import is_late, is_stand_in, results
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from units_kit import Block, assert_as_one_device, assert_near, compiled, full, gradients, inputs, mesh_of, values

import sim
from hyper_parallel.core.fully_shard.api import fully_shard
from hyper_parallel.core.fully_shard.bucket import Storage
from hyper_parallel.core.fully_shard.build import Grouping, find_parameters
from hyper_parallel.core.fully_shard.placement import DataParallelMesh, plain_placement
from hyper_parallel.core.fully_shard.utils import MixedPrecisionPolicy, OptimizerLevel, UnitOptions
from hyper_parallel.core.hsdp.api import hsdp
from hyper_parallel.core.hsdp.compiled import install
from hyper_parallel.platform import get_platform

pytestmark = pytest.mark.tier("full")

LEVELS = tuple(OptimizerLevel)
LEVEL1, LEVEL2, LEVEL3 = LEVELS
NO_GLOO = ("sim", "gpu", "npu")


class Net(nn.Module):
    """`head` shares its weight with `embed`; `scale` and biases stay whole; `shift` is frozen."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.shift = nn.Parameter(torch.linspace(-1, 1, 8), requires_grad=False)
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(8, 16)])
        self.head = nn.Linear(8, 8)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x) * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(ctx, dtype=None, make=Net):
    torch.manual_seed(0)
    return make().to(ctx.device, dtype or ctx.float_dtype)


def data(ctx, step=0, rank=None, dtype=None, per_rank=2):
    return inputs(ctx, 100 + step, (per_rank, 8), rank, dtype)


class AxisByAxis(DataParallelMesh):
    """Gradients are all_reduced over one axis after the other, as where the mesh does not take all ranks."""

    @property
    def domain_groups(self):
        return (self.shard_group,) if self.replicate_group is None else (self.shard_group, self.replicate_group)


def wrap(cell, mesh, level, *, threshold=8, grad_scale=1.0, accumulate=False, reduce_dtype=None, kind=AxisByAxis):
    """Split the parameters of `cell` over the last axis of `mesh`; those of fewer elements stay unsharded."""
    platform = get_platform(mesh.device_type)
    data = kind.of(mesh, platform, mesh.ndim)
    placed = []
    for item in find_parameters([cell], set(), "hsdp"):
        splits = item.parameter.numel() >= threshold and item.parameter.shape[0] % data.shard_size == 0
        placed.append((item, plain_placement(item.parameter, item.name, data, None, None, replicate=not splits)))
    options = UnitOptions(
        MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
        reshard_after_forward=level is LEVEL3,
        gradient_scale=grad_scale,
        show_sums=accumulate,
    )
    return install(cell, placed, Storage(platform), options, Grouping(unsharded_gradients=level is LEVEL1))


def train(ctx, model, call=None, rank=None, steps=2, dtype=None):
    call = model if call is None else call
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = call(data(ctx, step, rank, dtype)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, gradients(model), values(model)


def alone():
    ctx = sim.RankTest(0, 4, "sim", torch.device("cpu"))
    return results(*train(ctx, net(ctx, torch.float32), dtype=torch.float32))


assert_close = partial(assert_near, alone=alone, summands=1024)


def check_against_one_device(ctx, model, call, wanted):
    assert_as_one_device(ctx, train(ctx, model, call, rank=ctx.rank), wanted, assert_close)


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize(
    ("level", "backend"), [(LEVEL1, "eager"), (LEVEL2, "aot_eager"), (LEVEL3, "aot_eager"), (LEVEL3, "eager")]
)
@sim.ranks(2)
def test_one_device(ctx, level, backend):
    model = net(ctx)
    wrap(model, mesh_of(ctx), level)
    check_against_one_device(ctx, model, compiled(ctx, model, backend), train(ctx, net(ctx)))


@sim.ranks(4, backends=NO_GLOO)
def test_a_graph_over_a_replicate_axis(ctx):
    model = net(ctx)
    wrap(model, mesh_of(ctx, 2, 2), LEVEL2)
    check_against_one_device(ctx, model, compiled(ctx, model, "aot_eager"), train(ctx, net(ctx)))


def nested(model, mesh):
    """A unit per block, and one of another level of the rest."""
    for block in model.blocks:
        wrap(block, mesh, LEVEL3)
    return wrap(model, mesh, LEVEL1)


@sim.ranks(2, backends=NO_GLOO)
def test_units_inside_of_units(ctx):
    wanted = train(ctx, net(ctx))
    for backend in (None, "aot_eager"):
        model = net(ctx)
        nested(model, mesh_of(ctx))
        check_against_one_device(ctx, model, compiled(ctx, model, backend), wanted)
    model = net(ctx)  # graphs of blocks, within a forward that runs as it is
    nested(model, mesh_of(ctx))
    torch._dynamo.reset()
    for block in () if is_stand_in(ctx) else model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    check_against_one_device(ctx, model, model, wanted)


@sim.ranks(2, backends=("sim",))
def test_a_graph_inside_of_a_unit(ctx):
    """Of one module of a unit whose forward runs as it is."""
    wanted = train(ctx, net(ctx))
    model = net(ctx)
    wrap(model, mesh_of(ctx), LEVEL3)
    torch._dynamo.reset()
    model.blocks[0].compile(backend="aot_eager", fullgraph=True)
    check_against_one_device(ctx, model, model, wanted)


@sim.ranks(2, backends=("sim",))
def test_the_bits_of_the_engine(ctx):
    """The sums run in the same order. (Of tied weights, a graph adds up the gradients after their reduction.)"""

    def untied():
        made = Net()
        made.head = nn.Linear(8, 8)
        return made

    model = net(ctx, torch.float32, untied)
    fully_shard(model, mesh=mesh_of(ctx))
    wanted = train(ctx, model, rank=ctx.rank, dtype=torch.float32)
    for level in LEVELS:
        for backend in (None, "aot_eager") if level is LEVEL1 else (None,):
            model = net(ctx, torch.float32, untied)
            wrap(model, mesh_of(ctx), level)
            got = train(ctx, model, compiled(ctx, model, backend), rank=ctx.rank, dtype=torch.float32)
            assert got[0] == wanted[0]
            for ours, theirs in zip(got[1:], wanted[1:], strict=True):
                for name, value in theirs.items():
                    same = ours[name] is None if value is None else torch.equal(ours[name], value)
                    assert same, (level, backend, name)


# -- graphs -----------------------------------------------------------------------------------------------------------


@sim.ranks(2)
def test_no_graph_breaks(ctx):
    if is_late(ctx):
        pytest.skip("torch takes no graph while races are looked for")
    x = data(ctx, 0, ctx.rank)
    model = net(ctx)
    nested(model, mesh_of(ctx))
    torch._dynamo.reset()
    report = torch._dynamo.explain(model)(x)
    assert (report.graph_count, report.graph_break_count) == (1, 0), report
    torch._dynamo.reset()
    model = net(ctx)
    fully_shard(model, mesh=mesh_of(ctx))  # with hooks that swap the parameters
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        torch.compile(model, backend="eager", fullgraph=True)(x)


@pytest.mark.sim
def test_one_graph_serves_all_steps_and_all_blocks_that_are_alike_but_not_both_ranks():
    graphs = []

    def body(level):
        def backend(graph, inputs):
            graphs.append(dist.get_rank())
            return graph.forward

        ctx = sim_context()
        model = net(ctx, make=lambda: nn.Sequential(*[Block(8, 16) for _ in range(4)]))
        for block in model:
            wrap(block, mesh_of(ctx), level)
            block.compile(backend=backend, fullgraph=True)
        for step in range(3):
            x = data(ctx, step, ctx.rank).requires_grad_()  # so that the first block is no exception
            model(x).square().mean().backward()

    torch._dynamo.reset()
    sim.run(body, 2, (LEVEL1,))  # where the rank is part of the graph: it says which rows are its own
    assert sorted(graphs) == [0, 1]


def sim_context():
    """What a body of `sim.ranks` is given, for functions that `sim.run` runs."""
    return sim.RankTest(dist.get_rank(), dist.get_world_size(), "sim", torch.device("cpu"))


def backward_of(losses):
    losses[dist.get_rank()].backward()


def communicated(level, backend, shape):
    """Collectives of rank 0 in one forward and in its backward, by kind."""

    def build():
        ctx = sim_context()
        model = net(ctx)
        wrap(model, mesh_of(ctx, *shape), level)
        return ctx, model, compiled(ctx, model, backend)

    def forward(state):
        ctx, _, call = state[dist.get_rank()]
        return call(data(ctx, 0, ctx.rank)).square().mean()

    def counts(events):
        kinds = [event.op for event in events]
        return {kind: kinds.count(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")}

    with sim.world(shape[0] * shape[1]) as world:
        state = world.run(build)
        seen = len(world.trace.of_rank(0))
        losses = world.run(forward, (state,))
        after = len(world.trace.of_rank(0))
        world.run(backward_of, (losses,))
        events = world.trace.of_rank(0)
        return counts(events[seen:after]), counts(events[after:])


# Of 10 parameters, 9 are split, and the frozen one of these has no gradient. In a graph the tied one is gathered once
# per use (and the two found to be one by AOTAutograd) and reduced once per use. Backward at level3 needs the
# weights of norm, up, down and head again, once each, and the norm's bias, which autograd saves, too.
@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize(
    ("level", "backend", "shape", "again", "scattered", "reduced"),
    [
        (LEVEL1, None, (2, 2), 0, 0, 18),
        (LEVEL2, None, (2, 2), 0, 8, 10),
        (LEVEL3, None, (2, 2), 5, 8, 10),
        (LEVEL3, "aot_eager", (1, 2), 5, 9, 1),
        (LEVEL3, "eager", (1, 2), 0, 9, 1),  # this backend keeps what autograd saves
    ],
)
@pytest.mark.sim
def test_collectives(level, backend, shape, again, scattered, reduced):
    forward, backward = communicated(level, backend, shape)
    assert forward == {"all_gather": 10 if backend == "eager" else 9, "reduce_scatter": 0, "all_reduce": 0}
    if torch.__version__ >= "2.15" and backend == "aot_eager":
        again -= 1  # its LayerNorm does not need the bias any more
    assert backward == {"all_gather": again, "reduce_scatter": scattered, "all_reduce": reduced}


@pytest.mark.tier("test")
@sim.ranks(2, backends=NO_GLOO)
def test_level3_keeps_no_whole(ctx):
    for level, kept in ((LEVEL2, True), (LEVEL3, False)):
        model = net(ctx)
        wrap(model, mesh_of(ctx), level)
        seen = []
        watch = lambda module, *_, seen=seen: seen.append(StorageWeakRef(module.weight.untyped_storage()))  # noqa: E731
        model.blocks[0].up.register_forward_hook(watch)
        loss = model(data(ctx, 0, ctx.rank)).square().mean()
        assert seen[0].expired() != kept
        loss.backward()
        assert seen[0].expired()


# -- what else runs a forward -----------------------------------------------------------------------------------------


class Checkpointed(Net):
    """The part between embed and head is computed again in backward."""

    def forward(self, x):
        x = self.embed(x) * self.scale + self.shift
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@pytest.mark.tier("deep")
@sim.ranks(2, backends=NO_GLOO)
def test_activation_checkpointing_in_a_graph(ctx):
    wanted = train(ctx, net(ctx))
    for wrapping in (nested, lambda m, mesh: wrap(m, mesh, LEVEL2)):
        model = net(ctx, make=Checkpointed)
        wrapping(model, mesh_of(ctx))
        check_against_one_device(ctx, model, compiled(ctx, model, "aot_eager"), wanted)


class Sections(Net):
    """Sections of the cell's own code are computed again in backward."""

    def __init__(self, reentrant=False):
        super().__init__()
        self.reentrant = reentrant
        self.weight = nn.Parameter(torch.eye(8) + 0.1)

    def section(self, x):
        return torch.tanh(x @ self.weight) @ self.weight + self.shift

    def forward(self, x):
        x = self.embed(x) * self.scale
        for _ in range(2):
            x = checkpoint(self.section, x, use_reentrant=self.reentrant)
        return self.head(self.blocks[0](x))


@pytest.mark.tier("test")
@pytest.mark.parametrize("reentrant", [False, True])
@sim.ranks(2, backends=NO_GLOO)
def test_checkpoints_around_sections_of_a_cell(ctx, reentrant):
    wanted = train(ctx, net(ctx, make=Sections))
    for level in LEVELS:
        model = net(ctx, make=lambda: Sections(reentrant))
        wrap(model, mesh_of(ctx), level)
        check_against_one_device(ctx, model, model, wanted)
        seen = []
        model.scale.register_post_accumulate_grad_hook(
            lambda p, m=model, s=seen: s.append(m.weight is m._parameters["weight"])
        )
        model(data(ctx, 0, ctx.rank)).sum().backward()
        assert seen
        assert all(seen)  # hooks of users see the shard


@pytest.mark.tier("test")
@sim.ranks(2, backends=NO_GLOO)
def test_activation_checkpointing_still_saves_memory(ctx):
    """The hooks of level3 do not stand in the way of those that checkpoint an activation."""
    model = net(ctx)
    wrap(model, mesh_of(ctx), LEVEL3)
    kept = []
    model.blocks[0].up.register_forward_hook(lambda m, args, out: kept.append(weakref.ref(out)))
    out = checkpoint(model, data(ctx, 0, ctx.rank), use_reentrant=False)
    assert kept[0]() is None
    out.sum().backward()
    assert len(kept) == 2  # computed twice


@sim.ranks(2, backends=NO_GLOO)
def test_graphs_without_gradient_and_several_before_one_backward(ctx):
    plain = net(ctx)
    (plain(data(ctx, 0)).square().mean() + plain(data(ctx, 1)).square().mean()).backward()
    model = net(ctx)
    wrap(model, mesh_of(ctx), LEVEL3)
    call = compiled(ctx, model, "aot_eager")
    first = call(data(ctx, 0, ctx.rank))
    with torch.no_grad():
        again = call(data(ctx, 0, ctx.rank))
    assert_close({"": again}, {"": first.detach()})
    assert not again.requires_grad
    (first.square().mean() + call(data(ctx, 1, ctx.rank)).square().mean()).backward()
    assert_close(gradients(model), {name: p.grad for name, p in plain.named_parameters()})


@pytest.mark.tier("test")
@sim.ranks(2, backends=NO_GLOO)
def test_what_others_see_of_a_module(ctx):
    model, plain = net(ctx), net(ctx)
    wrap(model, mesh_of(ctx), LEVEL3)
    assert repr(model) == repr(plain)
    assert isinstance(model.head, nn.Linear)
    assert list(model.state_dict()) == list(plain.state_dict())
    registered = dict(model.named_parameters(remove_duplicate=False))
    assert list(registered) == [name for name, _ in plain.named_parameters(remove_duplicate=False)]
    assert model.head.weight is model.embed.weight is registered["embed.weight"]
    assert isinstance(model.head.weight, DTensor)
    twin = net(ctx)
    wrap(twin, mesh_of(ctx), LEVEL3)
    x = data(ctx, 0, ctx.rank)
    with torch.no_grad():
        twin.head.bias.add_(1.0)
        assert_close({"": twin(x)}, {"": model(x) + 1.0})
        model.load_state_dict(twin.state_dict())
        assert torch.equal(twin(x), model(x))
        wholes = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
        zero = torch.func.functional_call(model, wholes, (x,))
        assert torch.equal(zero, torch.zeros_like(zero))
    model.head.bias = None
    model(x)
    del model.blocks[0].up.bias
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'bias'"):
        _ = model.blocks[0].up.bias


@sim.ranks(2, backends=NO_GLOO)
def test_a_forward_that_fails_leaves_parts(ctx):
    model = net(ctx)
    wrap(model, mesh_of(ctx), LEVEL3)
    x = data(ctx, 0, ctx.rank)
    for call in (model, compiled(ctx, model, "eager")):
        with pytest.raises((RuntimeError, torch._dynamo.exc.TorchRuntimeError)):
            call(x[:, :3])
        assert isinstance(model.head.weight, DTensor)
        call(x)


@pytest.mark.tier("test")
@sim.ranks(4, backends=NO_GLOO)
def test_parameters_where_the_engine_puts_them(ctx):
    wanted = train(ctx, net(ctx))
    mesh = mesh_of(ctx, 2, 2)
    model = net(ctx)
    wrap(model, mesh, LEVEL2, kind=DataParallelMesh)
    check_against_one_device(ctx, model, model, wanted)
    for axis in range(2):
        model = net(ctx)
        model.shift = nn.Parameter(distribute_tensor(model.shift.detach(), mesh, [Replicate()] * 2))
        before = list(model.parameters())
        with pytest.raises(ValueError, match=r"(?s)cannot gather 'shift'.*plain parameters only.*use_eager_hook=True"):
            hsdp(model, shard_size=2**axis, use_eager_hook=False)
        assert all(p is old for p, old in zip(model.parameters(), before, strict=True))


# -- dtypes, factors, accumulation ------------------------------------------------------------------------------------


@pytest.mark.tier("test")
@sim.ranks(2, backends=NO_GLOO)
def test_reduction_in_another_dtype(ctx):
    """Of one bf16 gradient per rank, added in fp32: rounded once, which is what one rank computes here by hand."""
    torch.manual_seed(0)
    for level in LEVELS:
        for backend in (None, "aot_eager") if level is LEVEL2 else (None,):
            model = nn.Linear(8, 8, bias=False).to(ctx.device, torch.bfloat16)
            wrap(model, mesh_of(ctx), level, reduce_dtype=torch.float32, grad_scale=3.0)
            compiled(ctx, model, backend)(data(ctx, 0, ctx.rank, torch.bfloat16)).float().sum().backward()
            parts = [data(ctx, 0, rank, torch.bfloat16).sum(0).expand(8, 8) for rank in range(2)]
            wanted = ((parts[0].float() + parts[1].float()) * 1.5).bfloat16()
            assert torch.equal(model.weight.grad.full_tensor(), wanted)


@sim.ranks(4, backends=NO_GLOO)
def test_accumulation_in_a_graph(ctx):
    """Three micro-steps, the third of which is synced, against their sum on one device; and once more after that."""
    plain = net(ctx)
    for step in range(3):
        plain(data(ctx, step)).square().mean().backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    model = net(ctx)
    unit = wrap(model, mesh_of(ctx, 2, 2), LEVEL2, accumulate=True)
    call = compiled(ctx, model, "aot_eager")
    for _ in range(2):
        for step in range(3):
            unit.set_requires_grad_sync(step == 2, [unit])
            call(data(ctx, step, ctx.rank)).square().mean().backward()
            assert (model.embed.weight.grad is None) == (step < 2)
            of_replicas = Partial() if step < 2 else Replicate()
            assert model.embed.weight.acc_grad.placements == (of_replicas, Shard(0))
        sums = {name: getattr(p, "acc_grad", None) for name, p in model.named_parameters()}
        assert_close({name: None if g is None else full(g) for name, g in sums.items()}, wanted)
        assert_close({n: None if p.grad is None else full(p.grad) for n, p in model.named_parameters()}, wanted)
        unit.zero_grads(set_to_none=True)
        assert model.embed.weight.grad is model.embed.weight.acc_grad is None


@sim.ranks(2, backends=NO_GLOO)
def test_backwards_of_a_graph_that_are_not_synced(ctx):
    plain = net(ctx)
    for step in range(3):
        plain(data(ctx, step)).square().mean().backward()
    model = net(ctx)
    unit = wrap(model, mesh_of(ctx), LEVEL1)
    call = compiled(ctx, model, "aot_eager")
    for step in range(3):
        unit.set_requires_grad_sync(step != 1, [unit])
        call(data(ctx, step, ctx.rank)).square().mean().backward()
    assert_close(gradients(model), {name: p.grad for name, p in plain.named_parameters()})
    assert not hasattr(model.embed.weight, "acc_grad")
    assert not unit.uses_sinks


@pytest.mark.tier("test")
@sim.ranks(2, backends=NO_GLOO)
def test_accumulation_in_another_dtype(ctx):
    """Small summands that bf16 would lose."""
    for level in LEVELS:
        model = nn.Linear(8, 8, bias=False).to(ctx.device, torch.bfloat16)
        unit = wrap(model, mesh_of(ctx), level, accumulate=True, reduce_dtype=torch.float32)
        for step, factor in enumerate((1.0, 2**-10, 2**-10)):
            unit.set_requires_grad_sync(step == 2, [unit])
            model(torch.full((1, 8), factor, device=ctx.device, dtype=torch.bfloat16)).sum().backward()
        wanted = torch.full((8, 8), 1 + 2 * 2**-10, device=ctx.device)
        assert torch.equal(full(model.weight.acc_grad), wanted), level


def accumulated(level, synced, accumulate=True):
    """Collectives of rank 0 in a backward that is synced, or not, of a mesh of two replicas of two parts."""

    def build():
        ctx = sim_context()
        model = net(ctx)
        unit = wrap(model, mesh_of(ctx, 2, 2), level, accumulate=accumulate)
        unit.set_requires_grad_sync(synced, [unit])
        return model(data(ctx, 0, ctx.rank)).square().mean()

    with sim.world(4) as world:
        losses = world.run(build)
        seen = len(world.trace.of_rank(0))
        world.run(backward_of, (losses,))
        kinds = [event.op for event in world.trace.of_rank(0)[seen:]]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


@pytest.mark.tier("test")
@pytest.mark.sim
def test_what_a_micro_step_communicates():
    assert accumulated(LEVEL1, False) == {}
    assert accumulated(LEVEL1, True) == {"all_reduce": 18}
    assert accumulated(LEVEL2, False) == {"reduce_scatter": 8}
    assert accumulated(LEVEL2, True) == {"reduce_scatter": 8, "all_reduce": 10}
    assert accumulated(LEVEL2, False, accumulate=False) == {}
