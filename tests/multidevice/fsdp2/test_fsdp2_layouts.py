"""fully_shard against FSDP2: meshes, placements, uneven sizes, tensor parallelism, parameters that stay unsharded."""

from itertools import count

import pytest
import torch
import torch.distributed as dist
from fsdp2_kit import Even, Net, Theme, loss_of, on_processes, sgd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import sim

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    pytest.mark.tier("test"),
]

THEME = Theme()


def laid_out(model):
    """What every rank can say of the shards: placements, and the shapes of its parts."""
    return {name: (p.placements, tuple(p.to_local().shape)) for name, p in model.named_parameters()}


# -- meshes --------------------------------------------------------------------------------------------------------


@THEME.behaviour(4)
def one_axis_of_four_ranks(run):
    model = run.nested()
    run.layouts["layout"] = None if run.alone else laid_out(model)
    run.train(model)


@THEME.behaviour(4)
def two_by_two(run):
    model = run.nested(mesh=run.mesh(2, 2))
    run.layouts["layout"] = None if run.alone else laid_out(model)
    run.train(model)


@THEME.behaviour()
def axes_of_one_rank(run):
    for shape in ((1, 2), (2, 1)):
        model = run.nested(mesh=run.mesh(*shape))
        run.layouts[f"layout {shape}"] = None if run.alone else laid_out(model)
        run.backward(loss_of(model, run.batch()))
        run.note_model(model, f"on {shape}")


@THEME.behaviour()
def the_default_mesh(run):
    model = run.net()
    for block in model.blocks:
        run.wrap(block, **({} if run.alone else {"mesh": None}))
    run.wrap(model, **({} if run.alone else {"mesh": None}))
    run.layouts["layout"] = None if run.alone else laid_out(model)
    run.train(model)


@THEME.behaviour(4, without_hsdp="mesh")
def a_slice_of_a_larger_mesh(run):
    """Two pairs of ranks that train apart, each over its half of a mesh with other axes."""
    model = run.net()
    mesh = run.mesh(2, 2, names=("other", "fsdp"))
    run.wrap_blocks(model, mesh=mesh["fsdp"])
    run.layouts["layout"] = None if run.alone else laid_out(model)
    index = run.ctx.rank % 2
    run.train(model, lambda step: loss_of(model, run.batch(step, part=(index, 2))))


@THEME.behaviour(4)
def two_axes_of_a_mesh_of_three(run):
    mesh = run.mesh(2, 1, 2, names=("replicate", "other", "shard"))
    run.train(run.nested(mesh=mesh["replicate", "shard"]))


@THEME.behaviour(4)
def units_over_different_meshes(run):
    """As experts are: some units over all ranks, others replicated."""
    model = run.net()
    run.wrap(model.blocks[0], mesh=run.mesh(2, 2))
    run.wrap(model.blocks[1], mesh=run.mesh(4))
    run.wrap(model.blocks[2], mesh=run.mesh(1, 4))
    run.train(run.wrap(model, mesh=run.mesh(4)))


@THEME.behaviour(4, without_fsdp2="a 2-D mesh without names: AssertionError")
def a_mesh_without_names(run):
    run.train(run.nested(**({} if run.alone else {"mesh": init_device_mesh(run.ctx.device_type, (2, 2))})))


# -- sizes and dims ------------------------------------------------------------------------------------------------


@THEME.behaviour(3, exact=False)
def three_ranks(run):
    """No size is a multiple of three, and no quotient is exact."""
    model = run.nested()
    run.layouts["layout"] = None if run.alone else laid_out(model)
    run.train(model)


@THEME.behaviour(4)
def fewer_rows_than_ranks(run):
    model = run.build(lambda: nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 2, bias=False), nn.Linear(2, 3)))
    for layer in model:
        run.wrap(layer)
    run.wrap(model)
    run.layouts["layout"] = None if run.alone else laid_out(model)
    run.train(model)


@THEME.behaviour(without_fsdp2="backward of a parameter without elements: RuntimeError of _chunk_cat")
def parameters_without_elements(run):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.none, self.thin = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(4, 0))
            self.one = nn.Parameter(torch.ones(1, 5))

        def forward(self, x):
            return x * self.one + self.none.sum() + self.thin.sum()

    for frozen in ((), ("one",), ("one", "thin")):
        model = run.build(Odd)
        for name in frozen:
            getattr(model, name).requires_grad_(False)
        run.wrap(model)
        run.train(model, when=f"but for {frozen}")


@THEME.behaviour(without_fsdp2="a parameter without a dim to split: ValueError")
def a_parameter_without_dims(run):
    class Scale(nn.Module):
        """A unit that gathers nothing."""

        def __init__(self):
            super().__init__()
            self.by, self.plus = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(0.3))

        def forward(self, x):
            return x * self.by + self.plus

    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(5, 3)
            self.temperature = nn.Parameter(torch.tensor(1.5))

        def forward(self, x):
            return super().forward(x) * self.temperature

    for options in ({}, {"reshard_after_forward": False}, {"comm_fusion": True}):
        model = run.build(lambda: nn.Sequential(Scaled(), nn.Linear(3, 3), Scale()))
        for unit in (model[0], model[2], model):
            run.wrap(unit, **options)
        run.train(model, when=f"with {options}")


@THEME.behaviour(without_fsdp2="a parameter whose memory is not in order: NotImplementedError")
def parameters_whose_memory_is_not_in_order(run):
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(7, 5).t())

        def forward(self, x):
            return x @ self.weight

    model = run.build(Turned)
    run.train(run.wrap(model))


@THEME.behaviour(4)
def convolutions_of_four_dims(run):
    model = run.build(lambda: nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 2)))
    run.wrap(model[0])
    run.train(run.wrap(model), lambda step: loss_of(model, run.batch(step, width=25).view(-1, 1, 5, 5)))


def last_dim(parameter):
    return Shard(parameter.dim() - 1)


@THEME.behaviour(4, without_hsdp="shard_placement_fn")
def split_along_the_last_dim(run):
    model = run.build(Even)
    run.wrap_blocks(model, shard_placement_fn=last_dim)
    run.layouts["layout"] = None if run.alone else laid_out(model)
    run.train(model, lambda step: loss_of(model, run.batch(step, width=8)))


@THEME.behaviour(4, without_hsdp="shard_placement_fn")
def split_along_the_last_dim_over_two_axes(run):
    model = run.build(Even)
    run.wrap_blocks(model, shard_placement_fn=last_dim, mesh=run.mesh(2, 2))
    run.layouts["layout"] = None if run.alone else laid_out(model)
    run.train(model, lambda step: loss_of(model, run.batch(step, width=8)))


@THEME.behaviour(without_hsdp="shard_placement_fn")
def split_along_different_dims(run):
    def choose(parameter):
        return Shard(1) if parameter.dim() == 2 and parameter.shape[0] == 16 else None

    model = run.build(Even)
    run.wrap_blocks(model, shard_placement_fn=choose)
    run.layouts["layout"] = None if run.alone else laid_out(model)
    run.train(model, lambda step: loss_of(model, run.batch(step, width=8)))


@THEME.behaviour(
    4,
    without_fsdp2="backward of a Shard(1) that was split over fewer ranks: IndexError",
    without_hsdp="shard_placement_fn",
)
def split_along_the_last_dim_and_over_fewer_ranks(run):
    model = run.build(Even)
    run.wrap_blocks(model, shard_placement_fn=last_dim, reshard_after_forward=2)
    run.train(model, lambda step: loss_of(model, run.batch(step, width=8)))


@THEME.behaviour(dtype=torch.bfloat16, one=False, without_hsdp="shard_placement_fn")
def split_along_the_last_dim_in_bf16(run):
    model = run.build(Even, torch.float32)
    run.wrap_blocks(model, shard_placement_fn=last_dim, mp_policy=run.policy(torch.bfloat16, torch.float32))
    run.train(model, lambda step: loss_of(model, run.batch(step, width=8).float()))


@THEME.behaviour(
    without_fsdp2="uneven sizes along a dim other than 0: NotImplementedError", without_hsdp="shard_placement_fn"
)
def split_unevenly_along_the_last_dim(run):
    run.train(run.nested(shard_placement_fn=last_dim))


# -- tensor parallelism --------------------------------------------------------------------------------------------


class Attentive(nn.Module):
    """Two layers to split by columns and rows, and norms between them."""

    def __init__(self, hidden=8):
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(5, hidden), "down": nn.Linear(hidden, 5)}) for _ in range(2)
        )
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        x = self.norm(x)
        for block in self.blocks:
            x = x + block["down"](torch.tanh(block["up"](x)))
        return self.head(x)


def tensor_parallel(run, hidden=8, shape=(2, 2), wrap=True, avg=True, **options):
    """tp inside, fsdp outside, over two axes of one mesh."""
    model = run.build(lambda: Attentive(hidden))
    if run.alone:
        return model
    names = ("dp", "tp") if len(shape) == 2 else ("replicate", "dp", "tp")
    mesh = run.mesh(*shape, names=names)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if wrap:
        over = mesh["dp"] if len(shape) == 2 else mesh["replicate", "dp"]
        units = [*(block[name] for block in model.blocks for name in ("up", "down")), model]
        for unit in units:
            run.wrap(unit, mesh=over, **options)
            if avg and run.ours:
                unit.set_reduce_op_type("avg")  # a unit with DTensors has "sum" as its default
    return model


def with_part(run, model, tp=2, scale=1.0):
    count = run.ctx.world_size // tp
    return lambda step: loss_of(model, run.batch(step, part=(run.ctx.rank // tp, count))) * scale


@THEME.behaviour(4, without_hsdp="mesh")
def tensor_parallel_inside(run):
    model = tensor_parallel(run)
    if not run.alone:
        run.facts["local"] = {name: tuple(p.to_local().shape) for name, p in model.named_parameters()}
    run.train(model, with_part(run, model))


@THEME.behaviour(4, without_hsdp="mesh")
def tensor_parallel_with_uneven_parts(run):
    model = tensor_parallel(run, hidden=6)
    run.train(model, with_part(run, model))


@THEME.behaviour(4, without_hsdp="mesh")
def tensor_parallel_kept_after_forward(run):
    model = tensor_parallel(run, reshard_after_forward=False)
    run.train(model, with_part(run, model))


@THEME.behaviour(4, dtype=torch.bfloat16, one=False, without_hsdp="mesh")
def tensor_parallel_in_bf16(run):
    model = tensor_parallel(run, mp_policy=run.policy(torch.bfloat16, torch.float32))
    model.float()
    run.train(model, lambda step: loss_of(model, run.batch(step, part=(run.ctx.rank // 2, 2)).float()))


@THEME.behaviour(8, without_hsdp="mesh")
def tensor_parallel_inside_of_two_axes(run):
    model = tensor_parallel(run, shape=(2, 2, 2))
    run.train(model, with_part(run, model))


@THEME.behaviour(4, without_hsdp="mesh")
def tensor_parallel_while_accumulating(run):
    model = tensor_parallel(run)
    run.train(model, with_part(run, model), micros=2)


@THEME.behaviour(4, exact=False, without_hsdp="mesh")
def tensor_parallel_clipped(run):
    """By the norm of the tensor-parallel weights; torch cannot stack norms of DTensors on several meshes.

    Gradients and norms of parts are equal to the last bit. Torch adds the squares up along one axis of the mesh after
    the other, with a root between, and ours has these axes the other way round: so sums may round otherwise.
    """
    model = tensor_parallel(run)
    steps = count()

    def clip():
        run.note(f"norm {next(steps)}", nn.utils.clip_grad_norm_(model.blocks.parameters(), 0.05))

    run.train(model, with_part(run, model), before_step=clip)


@THEME.behaviour(4, without_hsdp="mesh")
def tensor_parallel_sums_by_default(run):
    """Ours adds up the gradients of units with DTensors, FSDP2 takes the mean: the loss is divided instead."""
    model = tensor_parallel(run, avg=False)
    if run.ours:
        model.set_reduce_op_type("sum", recurse=False)  # the root has plain parameters only
    count = run.ctx.world_size // 2
    divisor = count if run.ours else 1
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_of(model, run.batch(step, part=(run.ctx.rank // 2, count)))
        run.losses.append(loss.detach())
        (loss / divisor).backward()
        optimizer.step()
    run.note_model(model)


@THEME.behaviour(4, without_hsdp="mesh")
def sequence_parallel_inside(run):
    """The norm's weight is a replicated DTensor, whose gradient comes as parts of a sum."""
    model = tensor_parallel(run, wrap=False)
    if not run.alone:
        mesh = run.mesh(2, 2, names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"norm": SequenceParallel(sequence_dim=0)})
        run.wrap(model.norm, mesh=mesh["dp"])
        units = [*(block[name] for block in model.blocks for name in ("up", "down")), model.head]
        for unit in units:
            run.wrap(unit, mesh=mesh["dp"])
        if run.ours:
            for unit in (model.norm, *units):
                unit.set_reduce_op_type("avg")

    def loss(step):
        x = run.batch(step, part=(run.ctx.rank // 2, 2))
        if run.alone:
            return loss_of(model, x)
        y = model.norm(x.chunk(2)[run.ctx.rank % 2]).redistribute(placements=[Replicate()]).to_local()
        for block in model.blocks:
            y = y + block["down"](torch.tanh(block["up"](y)))
        return model.head(y).square().mean()

    run.train(model, loss)


# -- parameters that stay unsharded --------------------------------------------------------------------------------


def reduce_by_hand(run, *parameters):
    """What the user of FSDP2 has to do for parameters that it ignores."""
    for parameter in parameters if run.engine.name != "one device" else ():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(run.ctx.world_size)


@THEME.behaviour(without_hsdp="ignored_params")
def ignored_parameters(run):
    model = run.net()
    ignored = {model.scale, model.blocks[1].up.weight}
    run.wrap_blocks(model, ignored_params=ignored)
    assert ignored < set(model.parameters())
    run.train(model, before_step=lambda: reduce_by_hand(run, model.scale, model.blocks[1].up.weight))


@THEME.behaviour(without_hsdp="ignored_params")
def all_parameters_of_a_unit_are_ignored(run):
    model = run.net()
    ignored = set(model.blocks[1].parameters())
    run.wrap_blocks(model, ignored_params=ignored)
    run.train(model, before_step=lambda: reduce_by_hand(run, *model.blocks[1].parameters()))


def replicated(run, model, mesh):
    """`scale` and a norm stay unsharded: ours reduces them; for FSDP2 they are ignored, and reduced by hand."""
    name = "replicate_params" if run.ours else "ignored_params"
    for index, block in enumerate(model.blocks):
        run.wrap(block, mesh=mesh, **({name: set(block.norm.parameters())} if index == 1 else {}))
    run.wrap(model, mesh=mesh, **{name: {model.scale}})

    def by_hand():
        if run.engine.name == "FSDP2":
            reduce_by_hand(run, model.scale, *model.blocks[1].norm.parameters())

    return by_hand


def trained_with_replicas(run, mesh=None, **options):
    model = run.net()
    by_hand = replicated(run, model, mesh or run.mesh())
    run.train(model, before_step=by_hand, **options)
    return model


@THEME.behaviour(without_hsdp="replicate_params")
def replicated_parameters(run):
    model = trained_with_replicas(run)
    for name, parameter in model.named_parameters() if run.ours else ():
        whole = name in ("scale", "blocks.1.norm.weight", "blocks.1.norm.bias")
        assert parameter.placements == (Replicate() if whole else Shard(0),), name
        assert not whole or parameter.to_local().shape == parameter.shape, name


@THEME.behaviour(4, without_hsdp="replicate_params")
def replicated_parameters_over_two_axes(run):
    trained_with_replicas(run, run.mesh(2, 2))


@THEME.behaviour(without_hsdp="replicate_params")
def replicated_parameters_while_accumulating(run):
    trained_with_replicas(run, micros=3)


# -- where parameters are ------------------------------------------------------------------------------------------


def offloaded(run, model):
    """Options; and the model goes to the host."""
    if run.alone:
        return {}
    model.cpu()
    return {"offload_policy": run.engine.policies.CPUOffloadPolicy(pin_memory=run.ctx.device_type != "cpu")}


@THEME.behaviour(without_hsdp="offload_policy")
def shards_on_the_host(run):
    model = run.net()
    run.wrap_blocks(model, **offloaded(run, model))
    run.facts["devices"] = {p.device.type for p in model.parameters()} if not run.alone else None
    run.train(model, steps=3)
    run.facts["gradients"] = {p.grad.device.type for p in model.parameters()} if not run.alone else None


@THEME.behaviour(without_hsdp="offload_policy")
def shards_on_the_host_while_accumulating(run):
    model = run.net()
    run.train(run.wrap_blocks(model, **offloaded(run, model)), micros=3)


@THEME.behaviour(dtype=torch.bfloat16, one=False, without_hsdp="offload_policy")
def shards_on_the_host_in_bf16(run):
    model = run.net(torch.float32)
    run.wrap_blocks(model, mp_policy=run.policy(torch.bfloat16, torch.float32), **offloaded(run, model))
    run.train(model, lambda step: loss_of(model, run.batch(step).float()))


@THEME.behaviour()
def made_on_the_meta_device(run):
    with torch.device("meta"):
        model = Net().to(run.dtype)
    run.wrap_blocks(model)
    model.to_empty(device=run.ctx.device)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.fill_(0.1 * (index % 5) - 0.2)
    run.train(model)


# -- ways to communicate -------------------------------------------------------------------------------------------


def fused(run, **options):
    """Options that ours has and FSDP2 has not; the numbers are the same."""
    return options if run.ours else {}


@THEME.behaviour()
def one_collective_per_unit(run):
    run.train(run.nested(**fused(run, comm_fusion=True)))


@THEME.behaviour(without_hsdp="comm_fusion_zero_copy")
def one_collective_per_unit_with_copies(run):
    run.train(run.nested(**fused(run, comm_fusion=True, comm_fusion_zero_copy=False)))


@THEME.behaviour(4)
def one_collective_per_unit_over_two_axes(run):
    run.train(run.nested(mesh=run.mesh(2, 2), **fused(run, comm_fusion=True)))


# -- the tests -----------------------------------------------------------------------------------------------------


@THEME.contestants(2)
@sim.ranks(2, backends=("sim",))
def test_layouts(ctx, name, contestant):
    THEME.check(ctx, name, contestant)


@THEME.contestants(3)
@sim.ranks(3, backends=("sim",))
def test_layouts_on_three_ranks(ctx, name, contestant):
    THEME.check(ctx, name, contestant)


@THEME.contestants(4)
@sim.ranks(4, backends=("sim",))
def test_layouts_on_four_ranks(ctx, name, contestant):
    THEME.check(ctx, name, contestant)


@THEME.contestants(8, tier="full")
@sim.ranks(8, backends=("sim",))
def test_layouts_on_eight_ranks(ctx, name, contestant):
    THEME.check(ctx, name, contestant)


@on_processes("full")
@sim.ranks(2, backends=("gloo", "gpu", "npu"))
def test_layouts_on_processes(ctx, contestant):
    THEME.check_all(ctx, 2, contestant)


@on_processes()
@sim.ranks(4, backends=("gloo", "gpu", "npu"))
def test_layouts_on_four_processes(ctx, contestant):
    THEME.check_all(ctx, 4, contestant)
