"""Models with a plan train as they do on one device: values, gradients, and what users do with a model."""

import copy
import tempfile
from collections import OrderedDict, namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rounding_kit import measured
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import sim
from hyper_parallel import DTensor, clip_grad_norm_, distribute_tensor, full_tensor, fully_shard, redistribute
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.hsdp.api import hsdp
from hyper_parallel.core.shard.api import ShardingPlan, shard_module

pytestmark = pytest.mark.tier("test")

BATCH, TIME, WIDTH, WIDE, OUT = 8, 6, 8, 12, 5
TOLERANCE = 1e-12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, OUT)
        self.recompute = False

    def forward(self, x):
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return self.head(x)


def model(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    made = Model().double()
    for param in made.parameters():
        param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64) / param.shape[-1] ** 0.5
    return made.to(dtype)


def batch(dtype=torch.float64):
    drawn = torch.randn(BATCH, TIME, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return drawn.to(dtype)


WEIGHTS = {
    "**.norm.weight": ("None",),
    "**.up.weight": ("tp", "None"),
    "**.up.bias": ("tp",),
    "**.down.weight": ("None", "tp"),
    "**.down.bias": ("None",),
    "head.*": ("tp",),
}


def plan(act=("dp",), **fields):
    """Columns, then rows; activations between the blocks as `act` says."""
    full = (act[0], "None", "None")
    return ShardingPlan(
        plan=WEIGHTS,
        input_plan={"input": act, "blocks.*.up.input": full, "head.input": full},
        output_plan={"blocks.*.output": act, "output": full},
        **fields,
    )


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def full(tensor):
    return full_tensor(tensor.detach()).cpu() if isinstance(tensor, DTensor) else tensor.detach().cpu()


def train(net, x, steps=3, optimizer=sgd, factor=1.0, accumulate=1):
    """Losses and the last gradients."""
    made, losses = optimizer(net.parameters()), []
    for _ in range(steps):
        made.zero_grad()
        for _ in range(accumulate):
            loss = net(x).square().mean() * (factor / accumulate)
            loss.backward()
            losses.append(full(loss).item())
        made.step()
    return losses, {name: full(param.grad) for name, param in net.named_parameters()}


def in_float32():
    """Training on one device, of which the rounding is measured where there is no float64."""
    net = model(torch.float32)
    losses, gradients = train(net, batch(torch.float32))
    return {"losses": torch.tensor(losses), **gradients}


def tolerance_of(dtype):
    """Of numbers of about 1."""
    return TOLERANCE if dtype is torch.float64 else measured(in_float32)


def same(got, wanted, tolerance=TOLERANCE):
    assert (full(got) - full(wanted)).abs().max().item() <= tolerance, (got, wanted)


def same_training(net, x, alone=None, **options):
    """Train, and compare with one device; return the losses of both."""
    alone = model(x.dtype) if alone is None else alone
    reference = train(alone, batch(x.dtype), **{**options, "factor": 1.0})
    found = train(net, x, **options)
    for name, param in alone.named_parameters():
        same(found[1][name] * 1.0, reference[1][name], tolerance_of(x.dtype))
        same(net.get_parameter(name), param, tolerance_of(x.dtype))
    return found[0], reference[0]


def placed(x, mesh, entries):
    return distribute_tensor(x.to(mesh.device_type), Layout.from_device_mesh(mesh)(*entries))


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.tier("full")
@sim.ranks(4)
def test_a_model_trains_as_on_one_device(ctx):
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    for act in (("dp",), ("dp", "tp"), ("None",), (("dp", "tp"),), ("tp", "dp")):
        given = plan(act)
        if act[0] in ("tp", ("dp", "tp")):  # such activations are split over what splits the weights: gather them first
            given.input_plan.update({"blocks.*.input": act, "blocks.*.up.input": ("None",), "head.input": ("None",)})
            given.output_plan["output"] = ("None",)
        net = shard_module(model(ctx.float_dtype).to(ctx.device), mesh, given)
        ours, alone = same_training(net, placed(batch(ctx.float_dtype), mesh, act))
        assert torch.allclose(torch.tensor(ours), torch.tensor(alone), rtol=0, atol=tolerance_of(ctx.float_dtype))
        for param in net.parameters():
            assert param.grad.placements == param.placements  # also of those that are whole: reduced as they arrive
            assert param.grad.device_mesh == param.device_mesh


@pytest.mark.tier("full")
@sim.ranks(4)
def test_gradients_of_whole_parameters_arrive_reduced_and_add_up(ctx):
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    net, alone = shard_module(model(ctx.float_dtype).to(ctx.device), mesh, plan(("dp", "tp"))), model(ctx.float_dtype)
    x = placed(batch(ctx.float_dtype), mesh, ("dp", "tp"))
    for times in (1, 2, 3):  # without zero_grad in between
        net(x).square().mean().backward()
        alone(batch(ctx.float_dtype)).square().mean().backward()
        norm = net.blocks[0].norm.weight
        assert norm.placements == norm.grad.placements == (Replicate(), Replicate()), times
        for name, param in alone.named_parameters():
            same(net.get_parameter(name).grad, param.grad, tolerance_of(ctx.float_dtype))
    first = norm.grad.to_local().clone()
    dist.broadcast(first, src=0)
    assert torch.equal(first, norm.grad.to_local())  # the same to the last bit


OPTIMIZERS = {
    "SGD": sgd,
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3, foreach=False),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3, fused=True),
}


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("name", OPTIMIZERS)
@sim.ranks(4, backends=("sim",))
def test_optimizers(ctx, name):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = placed(batch(), mesh, ("dp",))
    same_training(shard_module(model(), mesh, plan()), x, optimizer=OPTIMIZERS[name], accumulate=2)


@sim.ranks(4, backends=("sim",))
def test_clipping_takes_the_norm_of_the_whole(ctx):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net, alone = shard_module(model(), mesh, plan()), model()
    (net(placed(batch(), mesh, ("dp",))) * 9).square().mean().backward()
    (alone(batch()) * 9).square().mean().backward()
    same(clip_grad_norm_(net.parameters(), 0.5), nn.utils.clip_grad_norm_(alone.parameters(), 0.5))
    for name, param in alone.named_parameters():
        same(net.get_parameter(name).grad, param.grad)


@pytest.mark.tier("full")
@sim.ranks(4, backends=("sim",))
def test_activation_checkpoints_and_evaluation(ctx):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = placed(batch(), mesh, ("dp",))
    net = shard_module(model(), mesh, plan())
    net.recompute = True
    same_training(net, x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            value = net(x)
            assert not value.requires_grad
            assert value.placements == (Shard(0), Replicate())
    reentrant = shard_module(model(), mesh, plan())
    for block in reentrant.blocks:
        block.up.forward = lambda x, up=block.up: checkpoint(
            lambda y: nn.functional.linear(y, up.weight, up.bias), x, use_reentrant=True
        )
    same_training(reentrant, x)


@pytest.mark.tier("full")
@sim.ranks(2, backends=("sim",))
def test_compile_may_break_the_graph_and_changes_nothing(ctx):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    net = shard_module(
        nn.Linear(4, 4).double(), mesh, ShardingPlan(plan={"*": ("None",)}, output_plan={"output": ("dp",)})
    )
    x = placed(torch.ones(4, 4, dtype=torch.float64), mesh, ("dp",))
    expected = net(x)
    net.compile(backend="eager")
    found = net(x)
    assert found.placements == expected.placements
    same(found, expected)
    found.sum().backward()
    assert net.weight.grad.placements == net.weight.placements


# -- with fully_shard, hsdp, and torch's styles ------------------------------------------------------------------------


@pytest.mark.tier("full")
@sim.ranks(8, backends=("sim",))
def test_fully_shard_after_it_on_two_and_three_axes(ctx):
    for shape, names in (((4, 2), ("dp_shard", "tp")), ((2, 2, 2), ("dp_replicate", "dp_shard", "tp"))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        data, tp = mesh[names[:-1]], mesh["tp"]
        for act, again in ((("None",), True), (("None", "tp"), False)):
            net = shard_module(model(), tp, plan(act))
            for unit in (*net.blocks, net):
                fully_shard(unit, mesh=data, reshard_after_forward=again)
            part = batch().chunk(4)[dist.get_rank() // 2]
            same_training(net, placed(part, tp, act), factor=1 / 4)  # units of DTensors add gradients up
            weight = net.blocks[0].down.weight
            assert set(weight.device_mesh.mesh_dim_names) == set(names)
            assert weight.to_local().numel() == WIDTH // (4 if len(shape) == 2 else 2) * WIDE // 2


@pytest.mark.tier("full")
@sim.ranks(4)
def test_fully_shard_after_it(ctx):
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    net = shard_module(model(ctx.float_dtype).to(ctx.device), mesh["tp"], plan(("None",)))
    for unit in (*net.blocks, net):
        fully_shard(unit, mesh=mesh["dp"])
    part = batch(ctx.float_dtype).chunk(2)[mesh["dp"].get_local_rank()]
    same_training(net, placed(part, mesh["tp"], ("None",)), factor=1 / 2)
    assert not any(param._backward_hooks for param in net.parameters()), "units see to gradients themselves"


@pytest.mark.tier("full")
@sim.ranks(8, backends=("sim",))
def test_hsdp_after_it(ctx):
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    for level in ("level1", "level2", "level3"):
        net = hsdp(shard_module(model(), mesh, plan()), shard_size=2, threshold=0, optimizer_level=level)
        same_training(net, placed(batch(), mesh, ("dp",)))


@pytest.mark.tier("full")
@sim.ranks(4, backends=("sim",))
def test_torch_styles_on_another_submodule(ctx):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"]
    styles = {
        "norm": SequenceParallel(use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    given = ShardingPlan(
        plan={name.replace("**", "blocks.0"): layout for name, layout in WEIGHTS.items()},
        input_plan={"input": ("None", "tp"), "blocks.0.up.input": ("None",), "head.input": ("None",)},
        output_plan={"blocks.*.output": ("None", "tp")},
    )
    for torch_first in (True, False):
        net = model()
        if torch_first:
            parallelize_module(net.blocks[1], tp, styles)
        shard_module(net, tp, given)
        if not torch_first:
            parallelize_module(net.blocks[1], tp, styles)
        for unit in (*net.blocks, net):
            fully_shard(unit, mesh=mesh["dp"])
        part = batch().chunk(2)[mesh["dp"].get_local_rank()]
        same_training(net, placed(part, tp, ("None", "tp")), factor=1 / 2)


@pytest.mark.tier("full")
@sim.ranks(4)
def test_state_dicts_and_distributed_checkpoints(ctx):
    folder = [tempfile.mkdtemp() if ctx.rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    net = shard_module(model(ctx.float_dtype).to(ctx.device), mesh, plan())
    x = placed(batch(ctx.float_dtype), mesh, ("dp",))
    train(net, x, steps=1)
    state = net.state_dict()
    assert list(state) == list(model().state_dict())
    assert all(isinstance(value, DTensor) for value in state.values())
    dcp.save(state, checkpoint_id=str(Path(folder[0]) / "model"))
    other = copy.deepcopy(model(ctx.float_dtype)).to(ctx.device)
    turned = ShardingPlan(plan={"**.weight": ("dp",), "**.bias": (("tp", "dp"),)})
    other = shard_module(other, mesh, turned)  # another plan
    loaded = other.state_dict()
    dcp.load(loaded, checkpoint_id=str(Path(folder[0]) / "model"))
    other.load_state_dict(loaded)
    for name, param in net.named_parameters():
        same(other.get_parameter(name), param)  # nothing has been computed
    again = shard_module(model(ctx.float_dtype).to(ctx.device), mesh, plan())
    again.load_state_dict(state)
    same(again(x), net(x))  # the same kernels


# -- parameters --------------------------------------------------------------------------------------------------------


@sim.ranks(4)
def test_parameters_become_dtensors_with_that_layout(ctx):
    mesh = init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    base = Layout.from_device_mesh(mesh)
    values = torch.arange(35, dtype=torch.float64).reshape(7, 5)
    for written, means in [
        (("tp", "None"), base("tp")),
        ((("dp", "tp"), "None"), base(("dp", "tp"))),
        ((("tp", "dp"), None), base(("tp", "dp"))),  # an order that torch has no placements for, when uneven
        ((Replicate(), Shard(-1)), base("None", "tp")),
        (("tp", "dp"), base("tp", "dp")),
        ((None, "None"), base()),
        (base("dp", "tp"), base("dp", "tp")),
    ]:
        net = nn.Linear(5, 7, device=ctx.device, dtype=torch.float64)
        net.weight.data.copy_(values)
        net.weight.is_decayed = False
        net.bias.requires_grad_(False)
        net.register_buffer("scale", torch.ones(3))
        buffer, bias = net.scale, net.bias
        assert shard_module(net, mesh, ShardingPlan(plan={"weight": written})) is net
        assert isinstance(net.weight, nn.Parameter)
        assert isinstance(net.weight, DTensor)
        if written != (("tp", "dp"), None):  # there the mesh has its axes in the order of the split
            assert Layout.of(net.weight) == means
        assert torch.equal(net.weight.to_local().detach().cpu(), sim.scatter_full(values, means))
        assert net.weight.is_decayed is False  # what was written on it stays
        assert net.weight.requires_grad
        assert net.bias is bias  # what the plan does not name stays as it is
        assert net.scale is buffer
        shard_module(net, mesh, ShardingPlan(plan={"bias": ("tp",)}))
        assert not net.bias.requires_grad
    shard_module(net, mesh, ShardingPlan(plan={"weight": ("None", "tp")}))  # once more: it is redistributed
    assert Layout.of(net.weight) == base("None", "tp")
    same(net.weight, values)


@sim.ranks(4, backends=("sim",))
def test_whose_values_count(ctx):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for source, value in ((0, 0.0), (None, float(ctx.rank))):
        net = nn.Linear(2, 4)
        nn.init.constant_(net.weight, ctx.rank)
        with sim.region("shard"):
            shard_module(net, mesh, ShardingPlan(plan={"weight": ("tp",)}), src_data_rank=source)
        assert torch.equal(net.weight.to_local(), torch.full((2, 2), value))


def test_nothing_is_sent_for_equal_or_meta_parameters():
    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with torch.device("meta"):
            net = Model()
        shard_module(net, mesh, plan())
        for name, param in net.named_parameters():
            assert param.is_meta, name
            assert isinstance(param, DTensor), name
        assert net.blocks[0].up.weight.shape == (WIDE, WIDTH)
        assert net.blocks[0].up.weight.to_local().shape == (WIDE // 2, WIDTH)
        shard_module(model(), mesh, plan(), src_data_rank=None)

    with sim.world(4) as world:
        world.run(body)
        assert world.trace.bytes() == 0


@sim.ranks(4, backends=("sim",))
def test_a_parameter_that_is_a_single_number(ctx):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Module()
    net.scale = nn.Parameter(torch.tensor(2.0))
    told = r"the 0 of parameter 'scale'\n.*\n  try: \(Replicate\(\), Replicate\(\)\), one per axis"
    with pytest.raises(ValueError, match=told):
        shard_module(net, mesh, ShardingPlan(plan={"scale": ("None",)}))
    shard_module(net, mesh, ShardingPlan(plan={"scale": (Replicate(), Replicate())}))
    assert isinstance(net.scale, DTensor)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.same = self.head  # a module under two names

    def forward(self, tokens):
        return self.same(self.embed(tokens))


@sim.ranks(4, backends=("sim",))
def test_tied_parameters_and_shared_modules_stay_so(ctx):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    tokens, alone = torch.arange(12).view(4, 3) * 5 % 12, Tied().double()
    alone(tokens).square().mean().backward()
    for name in ("embed.weight", "head.weight", "same.weight", "**.weight"):
        net = copy.deepcopy(alone)
        net.zero_grad()
        # The plan names the module once: its hooks are there once.
        given = ShardingPlan(
            plan={name: ("tp", "None")},
            input_plan={"input": ("dp",), "same.input": ("dp",)},
            output_plan={
                "embed.output": ("dp",),
                "head.output": ("dp", "None", "tp"),
                "same.output": ("dp", "None", "tp"),
            },
        )
        if name == "**.weight":
            given.input_plan["head.input"] = ("dp",)
        else:
            with pytest.raises(ValueError, match="are one module, and the plan says different things"):
                shard_module(net, mesh, given)
            given.input_plan["head.input"] = given.input_plan["same.input"]
        shard_module(net, mesh, given)
        assert net.head.weight is net.embed.weight
        assert net.same is net.head
        assert [key for key, _ in net.named_parameters()] == ["embed.weight"]
        assert len(net.head._forward_hooks) == 1
        net(placed(tokens, mesh, ("None",))).square().mean().backward()
        same(net.embed.weight.grad, alone.embed.weight.grad)
        assert net.embed.weight.grad.placements == net.embed.weight.placements


@pytest.mark.parametrize("target", [("None",), ("tp",)], ids=["gathered", "split"])
@sim.ranks(2, backends=("sim",))
def test_the_gradient_of_an_embedding_may_have_sums_pending(ctx, target):
    """That of a linear layer's input has, where its weight is split by rows and nothing says where the input goes."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    tokens = torch.arange(12).view(4, 3) * 5 % 12
    alone = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 6)).double()
    alone(tokens).square().mean().backward()
    net = copy.deepcopy(alone)
    net.zero_grad()
    given = {"0.weight": ("tp", "None"), "1.weight": ("tp", "None"), "1.bias": ("tp",)}
    given = ShardingPlan(plan=given, output_plan={"0.output": target, "output": ("None",)})
    shard_module(net, mesh, given)
    net(placed(tokens, mesh, ("None",))).square().mean().backward()
    for mine, wanted in zip(net.parameters(), alone.parameters(), strict=True):
        same(mine.grad, wanted.grad)


# -- inputs and outputs ------------------------------------------------------------------------------------------------


class Sees(nn.Module):
    """Remembers its arguments, and returns what it was told to make of the first."""

    def __init__(self, make=lambda x: x):
        super().__init__()
        self.make, self.seen = make, {}

    def forward(self, x, y=None, /, mask=None, *rest, scale=None, **names):
        self.seen = {"x": x, "y": y, "mask": mask, "rest": rest, "scale": scale, **names}
        return self.make(x)


ROWS, COLUMNS, WHOLE = ("dp", "None"), ("None", "tp"), ("None", "None")


def layouts_of(value):
    """What a container holds, with layouts in place of DTensors."""
    if isinstance(value, DTensor):
        return {WHOLE: "whole", ROWS: "rows", COLUMNS: "columns"}[Layout.of(value).alias_placements]
    if isinstance(value, torch.Tensor):
        return "plain"
    if isinstance(value, dict):
        return {key: layouts_of(entry) for key, entry in value.items()}
    return [layouts_of(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def grid(ctx=None):
    mesh = init_device_mesh("cpu" if ctx is None else ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    return mesh, placed(torch.arange(32.0).reshape(4, 8), mesh, ())


INPUTS = [
    (ROWS, lambda m, d, t: m(d, d), {"x": "rows", "y": "whole"}),
    ([ROWS], lambda m, d, t: m(d, d), {"x": "rows", "y": "whole"}),
    ([None, COLUMNS, ROWS], lambda m, d, t: m(d, d, mask=d), {"x": "whole", "y": "columns", "mask": "rows"}),
    ([None, None, ROWS], lambda m, d, t: m(d, d, d), {"mask": "rows"}),
    ([ROWS, None, COLUMNS], lambda m, d, t: m(d), {"x": "rows", "mask": None}),  # the default stays
    ([None, None, None, ROWS], lambda m, d, t: m(d, d, d, d, d), {"rest": ["rows", "whole"]}),
    ({"mask": ROWS, "scale": COLUMNS}, lambda m, d, t: m(d, d, d, scale=d), {"mask": "rows", "scale": "columns"}),
    ({"mask": ROWS, "scale": COLUMNS}, lambda m, d, t: m(d), {"mask": None, "scale": None}),
    ({"other": ROWS}, lambda m, d, t: m(d, other=d, more=d), {"other": "rows", "more": "whole"}),
    ([(Shard(0), Replicate()), None], lambda m, d, t: m(d, t), {"x": "rows", "y": "plain"}),
    (((Shard(0), Replicate()), (Replicate(), Shard(1))), lambda m, d, t: m(d, d), {"x": "rows", "y": "columns"}),
    (ROWS, lambda m, d, t: m(t, 3), {"x": "plain", "y": 3}),  # what is no DTensor passes
    ([[ROWS, None]], lambda m, d, t: m((d, d)), {"x": ["rows", "whole"]}),
    ({"mask": {"k": ROWS}}, lambda m, d, t: m(d, d, {"k": d, "l": d}), {"mask": {"k": "rows", "l": "whole"}}),
    ([ROWS, ROWS], lambda m, d, t: m(None, "y"), {"x": None, "y": "y"}),
]


@sim.ranks(4, backends=("sim",))
def test_arguments_are_redistributed(ctx):
    mesh, x = grid(ctx)
    for tree, call, expected in INPUTS:
        net = shard_module(Sees(), mesh, ShardingPlan(input_plan={"input": tree}))
        call(net, x, torch.ones(2, 2))
        found = {name: layouts_of(value) for name, value in net.seen.items()}
        assert {name: found[name] for name in expected} == expected, tree


@sim.ranks(4, backends=("sim",))
def test_wrap_inputs_takes_plain_tensors_as_local_parts(ctx):
    mesh, x = grid(ctx)
    part = torch.full((2, 8), float(ctx.rank // 2))
    given = ShardingPlan(input_plan={"input": {"mask": ROWS, "scale": ROWS}}, wrap_inputs=True)
    net = shard_module(Sees(), mesh, given)
    net(part, part, part, part, scale=part)
    assert layouts_of(net.seen) == {"x": "plain", "y": "plain", "mask": "rows", "rest": ["plain"], "scale": "rows"}
    same(net.seen["scale"], torch.cat([torch.zeros(2, 8), torch.ones(2, 8)]))
    net(x, None, x, scale=3)
    assert layouts_of(net.seen) == {"x": "whole", "y": None, "mask": "rows", "rest": [], "scale": 3}
    net = shard_module(Sees(), mesh, ShardingPlan(input_plan={"input": [ROWS, [ROWS]]}, wrap_inputs=True))
    leaf = part.clone().requires_grad_()
    net(leaf, [part])
    assert layouts_of(net.seen)["y"] == ["rows"]
    (net.seen["x"] * 3).sum().backward()
    assert torch.equal(leaf.grad, torch.full((2, 8), 3.0))


Pair = namedtuple("Pair", "a b")

OUTPUTS = [
    (ROWS, lambda x: x, DTensor, "rows"),
    ([ROWS, COLUMNS], lambda x: (x, x), tuple, ["rows", "columns"]),
    ([ROWS, None], lambda x: [x, x], list, ["rows", "whole"]),
    ((None, (Shard(0), Replicate())), lambda x: Pair(x, x), Pair, ["whole", "rows"]),
    ({"b": ROWS}, lambda x: {"a": x, "b": x}, dict, {"a": "whole", "b": "rows"}),
    ({"b": ROWS}, lambda x: OrderedDict(b=x, a=3), OrderedDict, {"b": "rows", "a": 3}),
    ([{"k": [ROWS]}, COLUMNS], lambda x: ({"k": (x,)}, x), tuple, [{"k": ["rows"]}, "columns"]),
    ([ROWS, ROWS, ROWS], lambda x: (None, 3, x.to_local()), tuple, [None, 3, "plain"]),
    (ROWS, lambda x: None, type(None), None),
    (ROWS, lambda x: "text", str, "text"),
    ([ROWS, ROWS], lambda x: None, type(None), None),
]


@sim.ranks(4, backends=("sim",))
def test_results_are_redistributed_and_containers_kept(ctx):
    mesh, x = grid(ctx)
    for tree, make, kind, expected in OUTPUTS:
        net = shard_module(Sees(make), mesh, ShardingPlan(output_plan={"output": tree}))
        found = net(x)
        assert type(found) is kind, tree
        assert layouts_of(found) == expected, tree
    # What a module keeps is not written into.
    kept = [x, x]
    shard_module(Sees(lambda x: kept), mesh, ShardingPlan(output_plan={"output": [ROWS, ROWS]}))(x)
    assert layouts_of(kept) == ["whole", "whole"]


@sim.ranks(4, backends=("sim",))
def test_local_tensors_are_returned_from_containers_of_any_depth(ctx):
    mesh, x = grid(ctx)
    deep = lambda x: {"a": [x, (x, None, 3)], "b": Pair(x, "c")}  # noqa: E731
    for paths, root in ((["inner"], False), (["*"], False), ([""], True)):
        net = nn.Sequential(OrderedDict(inner=Sees(deep)))
        shard_module(net, mesh, ShardingPlan(return_local_tensor=paths))
        found = net(redistribute(x, ROWS))
        assert layouts_of(found) == {"a": ["plain", ["plain", None, 3]], "b": ["plain", "c"]}
        assert found["a"][0].shape == (2, 8)
        assert bool(net._forward_hooks) is root
    # After the layout of output_plan; and its gradient is that of the ranks' same work.
    net = nn.Sequential(OrderedDict(inner=Sees()))
    shard_module(net, mesh, ShardingPlan(output_plan={"inner.output": COLUMNS}, return_local_tensor=["inner"]))
    leaf = x.detach().requires_grad_()
    part = net(leaf)
    assert type(part) is torch.Tensor
    assert part.shape == (4, 4)
    part.square().sum().backward()
    same(leaf.grad, 2 * x)


@sim.ranks(4, backends=("sim",))
def test_functions(ctx):
    mesh, x = grid(ctx)

    def add(x, /, y, *, k=None):
        """Adds."""
        return x + y, k

    given = ShardingPlan(input_plan={"input": [ROWS, ROWS]}, output_plan={"output": [COLUMNS, None]})
    made = shard_module(add, mesh, given)
    assert (made.__name__, made.__doc__, made.__wrapped__) == ("add", "Adds.", add)
    total, k = made(x, y=x, k=x)
    assert (layouts_of(total), layouts_of(k)) == ("columns", "whole")
    same(total, 2 * full(x))
    assert layouts_of(shard_module(torch.sin, mesh, ShardingPlan(input_plan={"input": ROWS}))(x)) == "rows"
    assert layouts_of(shard_module(lambda x: x, mesh, ShardingPlan(output_plan={"output": ROWS}))(x)) == "rows"
    named = ShardingPlan(input_plan={"input": {"k": ROWS}}, wrap_inputs=True)
    assert layouts_of(shard_module(add, mesh, named)(x, x, k=torch.ones(2, 8))[1]) == "rows"
    for nothing in (ShardingPlan(), ShardingPlan(plan={}, input_plan={"input": None}, return_local_tensor=[])):
        assert shard_module(add, mesh, nothing) is add


@sim.ranks(4, backends=("sim",))
def test_a_module_inside_of_another(ctx):
    """Hooks of a module come before and after those of what is inside; a second plan adds to the first."""
    mesh, x = grid(ctx)
    net = nn.Sequential(OrderedDict(outer=nn.Sequential(OrderedDict(inner=Sees()))))
    shard_module(
        net,
        mesh,
        ShardingPlan(
            input_plan={"input": ROWS, "outer.input": COLUMNS, "outer.inner.input": ROWS},
            output_plan={"outer.inner.output": COLUMNS, "output": ROWS},
        ),
    )
    assert layouts_of(net(x)) == "rows"
    assert layouts_of(net.outer.inner.seen["x"]) == "rows"
    assert layouts_of(net.outer(x)) == "columns"
    shard_module(net.outer, mesh, ShardingPlan(return_local_tensor=[""]))
    assert layouts_of(net.outer(x)) == "plain"
    assert layouts_of(net(x)) == "plain"  # what is no DTensor passes
