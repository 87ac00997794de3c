"""Modules whose own code computes on local tensors: results, gradients per axis, and what happens when it raises."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from rounding_kit import largest, measured
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import sim
from hyper_parallel import DTensor, checkpoint_blocks, distribute_tensor, full_tensor, fully_shard
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.api import ShardingPlan, shard_module

pytestmark = pytest.mark.tier("test")

TOLERANCE = 1e-12


def grid(ctx):
    return init_device_mesh(ctx.device_type, (2, 2), mesh_dim_names=("dp", "tp"))


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def placed(x, mesh, *entries):
    return distribute_tensor(x.to(mesh.device_type), Layout.from_device_mesh(mesh)(*entries)).requires_grad_()


def full(tensor):
    return full_tensor(tensor.detach()).cpu() if isinstance(tensor, DTensor) else tensor.detach().cpu()


def same(got, wanted, what="", tolerance=TOLERANCE):
    got, wanted = full(got), full(wanted)
    assert got.shape == wanted.shape, what
    # Relative to the largest: how a product rounds is up to the processor.
    limit = tolerance * max(1.0, wanted.abs().max().item()) if wanted.numel() else 0.0
    assert not got.numel() or (got - wanted).abs().max().item() <= limit, (what, got, wanted)


class Weighted(nn.Module):
    """x @ weight.T * scale, on whatever is in its attributes."""

    def __init__(self, rows=3, columns=5):
        super().__init__()
        self.weight = nn.Parameter(numbers(rows, columns))
        self.scale = nn.Parameter(numbers(1, seed=1))
        self.seen, self.fail = [], False

    def forward(self, x):
        self.seen = [x, self.weight, self.scale]
        if self.fail:
            raise ArithmeticError("inside")
        return (x @ self.weight.t()) * self.scale


# layouts of x, of the weight, of what the code returns, and the axes along which each gradient is added up
SUM = {"tp": "sum"}
KINDS = [
    # x               weight          the code returns
    ((None,), (None,), {"": ("None",)}),  # every rank the same
    (("dp",), (None,), {"": ("dp",)}),  # rows of the batch
    ((("dp", "tp"),), (None,), {"": (("dp", "tp"),)}),
    ((None,), ("tp",), {"": ("None", "tp")}),  # columns of the result
    (("dp",), ("tp",), {"": ("dp", "tp")}),
    ((None,), (("tp", "dp"),), {"": ("None", ("tp", "dp"))}),
    ((None, "tp"), (None, "tp"), {"": (Replicate(), Partial())}),  # shares of a sum
    (("dp", "tp"), (None, "tp"), {"": (Shard(0), Partial())}),
    ((None, ("dp", "tp")), (None, ("dp", "tp")), {"": (Partial(), Partial())}),
    ((None, "tp"), ("dp", "tp"), {"": (Shard(-1), Partial())}),
]


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("even", [False, True])
@sim.ranks(4, backends=("sim",))
def test_gradients_along_every_axis(ctx, even):
    mesh = grid(ctx)
    rows, columns, batch = (4, 8, 4) if even else (3, 5, 7)
    value = numbers(batch, columns, seed=2)
    for x_layout, weight_layout, produced in KINDS:
        for wanted in (None, ("None",), ("tp", "dp")):
            what = f"{x_layout} {weight_layout} {produced} {wanted}"
            alone, net = Weighted(rows, columns), Weighted(rows, columns)
            given = ShardingPlan(
                plan={"weight": weight_layout, "scale": ("None",)},
                input_plan={"input": x_layout},
                output_plan=None if wanted is None else {"output": wanted},
                local_plan=produced,
            )
            shard_module(net, mesh, given)
            reference = value.clone().requires_grad_()
            # An uneven split against the order of the mesh lives on a mesh of its own, which plain layouts do not.
            x = placed(value, mesh, "tp" if even else None)
            expected, found = alone(reference), net(x)
            assert isinstance(found, DTensor), what
            if wanted is not None:
                assert Layout.of(found) == Layout.from_device_mesh(mesh)(*wanted), what
            assert all(type(part) is not DTensor for part in net.seen), what
            same(found, expected, what)
            for _ in range(2):  # gradients add up
                (alone(reference).sin()).sum().backward()
                net(x).redistribute(placements=[Replicate()] * 2).sin().sum().backward()
            same(x.grad, reference.grad, what)
            for name in ("weight", "scale"):
                param = net.get_parameter(name)
                assert isinstance(param, DTensor)
                assert (param.grad.placements, param.grad.device_mesh) == (param.placements, param.device_mesh), what
                same(param.grad, alone.get_parameter(name).grad, f"{what} {name}")


@pytest.mark.tier("full")
@sim.ranks(4)
def test_a_block_that_is_split_by_columns_and_then_by_rows(ctx):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.RMSNorm(6), nn.Linear(6, 10), nn.Linear(10, 6, bias=False)
            self.register_buffer("scale", torch.full((6,), 0.5))

        def forward(self, x):
            return self.down(nn.functional.silu(self.up(self.norm(x)))) * self.scale

    torch.manual_seed(0)
    alone = nn.Sequential(Block(), Block()).to(ctx.float_dtype)
    net = nn.Sequential(Block(), Block()).to(ctx.float_dtype)
    net.load_state_dict(alone.state_dict())
    mesh = grid(ctx)
    given = ShardingPlan(
        plan={"*.up.*": ("tp",), "*.down.weight": ("None", "tp"), "*.norm.weight": ("None",)},
        input_plan={"*.input": ("dp", "None")},
        output_plan={"*.output": ("dp", "tp")},  # activations between blocks: one reduce_scatter, one all_gather
        local_plan={"*": (Shard(0), Partial())},
    )
    net = shard_module(net.to(ctx.device), mesh, given)
    value = numbers(4, 7, 6, seed=3, dtype=ctx.float_dtype)  # 7 is odd
    x, reference = placed(value, mesh, "dp", "tp"), value.clone().requires_grad_()
    tolerance = tolerance_of(value)
    for step in range(2):
        found, expected = net(x), alone(reference)
        assert found.placements == (Shard(0), Shard(1))
        same(found, expected, tolerance=tolerance)
        found.square().mean().backward()
        expected.square().mean().backward()
        for name, param in alone.named_parameters():
            same(net.get_parameter(name).grad, param.grad, f"step {step} {name}", tolerance)
            assert net.get_parameter(name).grad.placements == net.get_parameter(name).placements
        same(x.grad, reference.grad, tolerance=tolerance)


@sim.ranks(4, backends=("sim",))
def test_several_results(ctx):
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(numbers(4, 6))

        def forward(self, x, *, factor=1.0):
            y = x @ self.weight.t() * factor
            return {"y": y, "rest": [y * 2, None, "text"], "plain": y.sum(), "count": 3}

    mesh = grid(ctx)
    alone, net = Several(), Several()
    shard_module(
        net,
        mesh,
        ShardingPlan(
            plan={"weight": ("tp", "None")},
            input_plan={"input": {"x": ("dp",)}},
            output_plan={"output": {"rest": [("None", "None"), None, None]}},
            local_plan={"": {"y": ("dp", "tp"), "rest": [("dp", "tp"), ("dp", "tp"), ("dp", "tp")]}},
        ),
    )
    value = numbers(5, 6)
    found, expected = net(x=placed(value, mesh), factor=0.5), alone(value, factor=0.5)
    assert (type(found), found["count"], found["rest"][1:]) == (dict, 3, [None, "text"])
    assert type(found["plain"]) is torch.Tensor  # what no layout is given for stays this rank's own
    assert found["y"].placements == (Shard(0), Shard(1))
    assert found["rest"][0].placements == (Replicate(), Replicate())
    same(found["y"], expected["y"])
    same(found["rest"][0], expected["rest"][0])
    (found["y"].sum() + found["rest"][0].square().sum()).backward()
    (expected["y"].sum() + expected["rest"][0].square().sum()).backward()
    same(net.weight.grad, alone.weight.grad)


@sim.ranks(4, backends=("sim",))
def test_what_is_raised_inside_leaves_the_parameters_as_they_were(ctx):
    mesh = grid(ctx)
    net = Weighted()
    given = ShardingPlan(plan={"weight": ("tp",), "scale": ("None",)}, local_plan={"": ("dp", "tp")})
    given.input_plan = {"input": ("dp", "None")}
    shard_module(net, mesh, given)
    before, x = dict(net.named_parameters()), placed(numbers(4, 5), mesh)
    expected = full(net(x))
    for error, wrong in ((ArithmeticError, x), (ValueError, placed(numbers(4), mesh))):  # inside, and on the way in
        net.fail = error is ArithmeticError
        with pytest.raises(error):
            net(wrong)
        assert all(isinstance(param, DTensor) for param in net.parameters())
        assert net.weight is before["weight"]
        assert net.scale is before["scale"]
        assert not {"weight", "scale"} & set(vars(net))
        net.fail = False
        same(net(x), expected)


@pytest.mark.parametrize("further", [False, True])
@sim.ranks(4, backends=("sim",))
def test_a_trained_parameter_without_a_layout_where_ranks_do_shares(ctx, further):
    mesh = grid(ctx)
    planned = mesh["tp"] if further else mesh
    share = (Partial(),) if further else (Shard(0), Partial())
    given = ShardingPlan(
        plan={"weight": ("None", "tp")},
        input_plan={"input": ("None" if further else "dp", "tp")},
        output_plan={"output": ("None",)},
        local_plan={"": share},
    )
    net = shard_module(Weighted().double(), planned, given)
    if further:
        fully_shard(net, mesh=mesh["dp"])
    x = distribute_tensor(numbers(4, 5, seed=2), planned, ("None",))
    with pytest.raises(ValueError, match=r"(?s)'scale' has no layout, and over .*'tp' its gradients.*try: a layout"):
        net(x)
    assert type(net.weight) is not torch.Tensor  # no part stands in front of a parameter
    with torch.no_grad():
        net(x)
    net.scale.requires_grad_(False)
    net(x)


@sim.ranks(4, backends=("sim",))
def test_a_trained_parameter_without_a_layout_where_ranks_repeat_the_work(ctx):
    mesh, value = grid(ctx)["tp"], numbers(4, 5, seed=2)
    alone, net = Weighted(), shard_module(Weighted(), mesh, ShardingPlan(local_plan={"": ("None",)}))
    alone(value).square().mean().backward()
    net(distribute_tensor(value, mesh, ("None",))).square().mean().backward()
    for name, param in alone.named_parameters():
        same(net.get_parameter(name).grad, param.grad, name)


@dataclass
class Result:
    value: torch.Tensor


class InADataclass(Weighted):
    def forward(self, x):
        return Result(super().forward(x))


@sim.ranks(4, backends=("sim",))
def test_a_result_that_is_no_tensor_is_not_handed_on_as_a_part(ctx):
    given = ShardingPlan(plan={"weight": ("None", "tp"), "scale": ("None",)}, local_plan={"": (Shard(0), Partial())})
    net = shard_module(InADataclass(), grid(ctx), given)
    with pytest.raises(ValueError, match=r"it is a Result, not a tensor\n.*\n  try: a tensor, or a list"):
        net(placed(numbers(4, 5), grid(ctx), "dp", "tp"))


@sim.ranks(4, backends=("sim",))
def test_checkpoints_frozen_parameters_and_evaluation(ctx):
    mesh = grid(ctx)
    given = ShardingPlan(
        plan={"weight": ("tp",), "scale": ("None",)}, input_plan={"input": ("dp",)}, local_plan={"": ("dp", "tp")}
    )
    value = numbers(4, 5)
    for reentrant in (False, True):
        alone, net = Weighted(4), shard_module(Weighted(4), mesh, given)
        x, reference = placed(value, mesh), value.clone().requires_grad_()
        checkpoint(net, x, use_reentrant=reentrant).square().sum().backward()
        alone(reference).square().sum().backward()
        same(x.grad, reference.grad)
        for name, param in alone.named_parameters():
            same(net.get_parameter(name).grad, param.grad)
        assert not {"weight", "scale"} & set(vars(net))
    net = shard_module(Weighted(4), mesh, given)
    net.weight.requires_grad_(False)
    net(x).square().sum().backward()
    assert net.weight.grad is None
    same(net.scale.grad, alone.scale.grad)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = net(x)
        assert not found.requires_grad
        same(found, alone(value))


class Sections(nn.Module):
    """Sections of its code are computed again in backward, one of them a block of its own."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant, self.fail = reentrant, False
        self.weight = nn.Parameter(numbers(5, 5, seed=1))
        self.frozen = nn.Parameter(numbers(5, 5, seed=2), requires_grad=False)
        self.blocks = nn.ModuleList([Weighted(5, 5)])

    def section(self, x):
        assert not isinstance(self.weight, DTensor)
        if self.fail and torch._C._current_graph_task_id() != -1:
            raise ArithmeticError("in backward")
        return torch.tanh(x @ self.weight) + torch.tanh(x @ self.frozen) * x

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.section, x, use_reentrant=self.reentrant)
        return self.blocks[0](x)


class TwoCalls(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inner = Sections(reentrant)

    def forward(self, x):
        x = x * 2
        return self.inner(self.inner(x)) + self.inner(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("fsdp", [False, True])
@sim.ranks(2, backends=("sim",))
def test_checkpoints_around_sections_of_the_code(ctx, fsdp, reentrant):
    mesh = init_device_mesh(ctx.device_type, (2,), mesh_dim_names=("dp",))
    alone, net = TwoCalls(reentrant), TwoCalls(reentrant)
    names = [name for name, _ in net.named_parameters()]
    shard_module(
        net,
        mesh,
        ShardingPlan(
            plan=dict.fromkeys(names, ("None",)), input_plan={"input": ("dp",)}, local_plan={"inner": ("dp",)}
        ),
    )
    for model in (alone, net):
        checkpoint_blocks(model.inner, "full")
    if fsdp:
        fully_shard(net.inner)
    seen = []
    if not reentrant:  # whose sections have backwards of their own, in which they need the shards
        net.inner.weight.register_post_accumulate_grad_hook(lambda p: seen.append(net.inner.weight is p))
    for step in range(2):
        value = numbers(4, 5, seed=step)
        x, reference = placed(value, mesh, "dp"), value.clone().requires_grad_()
        for model, given in ((alone, reference), (net, x)):
            model.zero_grad()
            model(given).square().sum().backward()
        same(x.grad, reference.grad)
        for name, param in alone.inner.named_parameters():
            if param.requires_grad:
                same(net.inner.get_parameter(name).grad, param.grad, name, 1e-9)
        assert not {"weight", "frozen"} & set(vars(net.inner))
    assert all(seen)
    net.inner.fail = True
    with pytest.raises(ArithmeticError):
        net(placed(numbers(4, 5), mesh, "dp")).square().sum().backward()
    net.inner.fail = False
    net.zero_grad()
    net(placed(value, mesh, "dp")).square().sum().backward()  # of this forward, not of the one that has failed
    same(net.inner.weight.grad, alone.inner.weight.grad, "weight", 1e-9)
    assert not {"weight", "frozen"} & set(vars(net.inner))


@pytest.mark.tier("full")
@sim.ranks(2, backends=("sim",))
def test_compile_may_break_the_graph_and_changes_nothing(ctx):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    given = ShardingPlan(plan={"*": ("None",)}, input_plan={"input": ("dp",)}, local_plan={"": ("dp",)})
    net, alone, value = shard_module(Weighted(), mesh, given), Weighted(), numbers(4, 5)
    net.compile(backend="eager")
    found = net(placed(value, mesh))
    same(found, alone(value))
    found.sum().backward()
    alone(value).sum().backward()
    same(net.weight.grad, alone.weight.grad)


@sim.ranks(4, backends=("sim",))
def test_plain_arguments_are_this_ranks_parts(ctx):
    mesh = grid(ctx)
    net = shard_module(Weighted(), mesh, ShardingPlan(plan={"*": ("None",)}, local_plan={"": ("dp",)}))
    part = torch.full((2, 5), 1.0 + ctx.rank // 2, dtype=torch.float64, requires_grad=True)
    found = net(part)
    assert found.shape == (4, 3)
    alone = Weighted()
    value = torch.cat([torch.full((2, 5), 1.0), torch.full((2, 5), 2.0)]).double()
    same(found, alone(value))
    found.sum().backward()
    alone(value).sum().backward()
    same(net.weight.grad, alone.weight.grad)
    assert part.grad.shape == (2, 5)


@sim.ranks(2, backends=("sim",))
def test_parts_that_look_alike_on_some_ranks_only(ctx):
    """Of 7 and of 8 rows, rank 0 holds 4: it cannot tell by itself whether the whole has changed."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    net = shard_module(Weighted(), mesh, ShardingPlan(plan={"*": ("None",)}, local_plan={"": ("dp",)}))
    for rows in (7, 8, 7, 0, 8):
        assert net(numbers(rows, 5).tensor_split([(rows + 1) // 2])[ctx.rank]).shape == (rows, 3)


@sim.ranks(2, backends=("sim",))
def test_a_part_that_holds_nothing_gets_the_shape_of_its_place(ctx):
    """From rows to columns of one element nothing moves, and rank 1's part of no rows is one of no columns."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    given = ShardingPlan(
        plan={"*": ("None",)},
        input_plan={"input": ("tp",)},
        output_plan={"output": ("None", "tp")},
        local_plan={"": ("tp",)},
    )
    net, alone, value = shard_module(Weighted(1, 5), mesh, given), Weighted(1, 5), numbers(1, 5)
    found = net(placed(value, mesh))
    assert found.to_local().shape == ((1, 1) if ctx.rank == 0 else (1, 0))
    same(found, alone(value))
    found.sin().sum().backward()
    alone(value).sin().sum().backward()
    same(net.weight.grad, alone.weight.grad)


@sim.ranks(4, backends=("sim",))
def test_the_gradient_of_a_wrapped_argument(ctx):
    """A plain tensor that is taken as a part, of what ranks do shares with, gets the sum of their gradients."""
    mesh = grid(ctx)
    given = ShardingPlan(
        plan={"weight": ("tp",), "scale": ("None",)},
        input_plan={"input": ("dp",)},
        local_plan={"": ("dp", "tp")},
        wrap_inputs=True,
    )
    net, alone, value = shard_module(Weighted(), mesh, given), Weighted(), numbers(3, 5)
    layout = Layout.from_device_mesh(mesh)("dp")
    part = sim.scatter_full(value, layout).clone().requires_grad_()
    reference = value.clone().requires_grad_()
    for _ in range(2):
        net(part).sin().sum().backward()
        alone(reference).sin().sum().backward()
    same(part.grad, sim.scatter_full(reference.grad, layout))
    same(net.weight.grad, alone.weight.grad)


class Inner(nn.Module):
    """A block on local tensors, with modules in it that have a plan of their own."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(4), nn.Linear(4, 6), nn.Linear(6, 4, bias=False)

    def forward(self, x):
        self.seen = x
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@sim.ranks(4, backends=("sim",))
def test_local_code_inside_of_local_code(ctx):
    mesh = grid(ctx)
    torch.manual_seed(0)
    alone, value = nn.Sequential(Inner(), Inner()).double(), numbers(4, 5, 4)
    between, gathered = ("dp", "tp"), ("dp",)  # the rows between blocks are split over tp, too: 5 is odd
    given = ShardingPlan(
        plan={"*.norm.weight": ("None",), "*.up.*": ("tp",), "*.down.weight": ("None", "tp")},
        input_plan={"*.input": between, "*.norm.input": between, "*.up.input": gathered},
        output_plan={"*.down.output": between},
        local_plan={"*": between, "*.norm": between, "*.up": ("dp", "None", "tp"), "*.down": (Shard(0), Partial())},
        wrap_inputs=True,  # what a block hands to its norm is that part
    )
    net = nn.Sequential(Inner(), Inner()).double()
    net.load_state_dict(alone.state_dict())
    shard_module(net, mesh, given)
    x, reference = placed(value, mesh, *between), value.clone().requires_grad_()
    for _ in range(2):
        found, expected = net(x), alone(reference)
        assert found.placements == (Shard(0), Shard(1))
        assert all(type(block.seen) is torch.Tensor for block in net)
        same(found, expected)
        found.sin().sum().backward()
        expected.sin().sum().backward()
    same(x.grad, reference.grad)
    for name, param in alone.named_parameters():
        same(net.get_parameter(name).grad, param.grad, name)
    given.wrap_inputs = False
    again = shard_module(nn.Sequential(Inner(), Inner()).double(), mesh, given)
    with pytest.raises(ValueError, match="nothing says which shard of the full tensor it is"):
        again(x)
    assert all(isinstance(param, DTensor) for param in again.parameters())
    same(net(x), alone(value))


@sim.ranks(4, backends=("sim",))
def test_an_embedding_that_is_split_over_its_vocabulary(ctx):
    mesh = grid(ctx)
    given = ShardingPlan(
        plan={"weight": ("tp",)},
        input_plan={"input": ("dp",)},
        output_plan={"output": ("dp", "tp")},
        local_plan={"": (Shard(0), Partial())},
    )
    torch.manual_seed(0)
    alone, net = nn.Embedding(7, 4, padding_idx=2).double(), nn.Embedding(7, 4, padding_idx=2).double()
    net.load_state_dict(alone.state_dict())
    shard_module(net, mesh, given)
    tokens = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 6, 2]])
    found, expected = net(distribute_tensor(tokens, mesh, ())), alone(tokens)
    same(found, expected)
    found.sin().sum().backward()
    expected.sin().sum().backward()
    same(net.weight.grad, alone.weight.grad)
    assert net.padding_idx == 2


@sim.ranks(4, backends=("sim",))
def test_a_unit_of_fully_shard_inside_of_local_code_is_refused(ctx):
    mesh = grid(ctx)
    given = ShardingPlan(plan={"norm.weight": ("None",), "up.*": ("tp",)}, local_plan={"": (Partial(),)})
    net = shard_module(Inner().double(), mesh["tp"], given)
    fully_shard(net.up, mesh=mesh["dp"])
    with pytest.raises(ValueError, match="fully_shard has 'up' in it"):
        net(placed(numbers(4, 5, 4), mesh["tp"]))
    assert not {"weight", "bias"} & set(vars(net.norm))


def tolerance_of(*wanted):
    return TOLERANCE if wanted[0].dtype is torch.float64 else measured(in_float32) * max(1.0, largest(wanted))


def two(dtype=torch.float64):
    return nn.Sequential(Weighted(5, 5), Weighted(3, 5)).to(dtype)


def in_float32():
    """Training on one device, of which the rounding is measured where there is no float64."""
    net, value, gradients = two(torch.float32), numbers(6, 5, dtype=torch.float32), {}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        net(value).square().mean().backward()
        gradients |= {f"{name} {step}": param.grad.clone() for name, param in net.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return gradients


@sim.ranks(4)
def test_fully_shard_around_local_code(ctx):
    mesh = grid(ctx)
    data, tp = mesh["dp"], mesh["tp"]
    alone, net = two(ctx.float_dtype), two(ctx.float_dtype).to(ctx.device)
    given = ShardingPlan(
        plan={"0.weight": ("tp",), "1.weight": ("None", "tp"), "*.scale": ("None",)},
        input_plan={"0.input": ("None",), "1.input": ("None", "tp")},
        output_plan={"1.output": ("None",)},
        local_plan={"0": ("None", "tp"), "1": (Partial(),)},
    )
    shard_module(net, tp, given)
    for unit in (*net, net):
        fully_shard(unit, mesh=data)
    value = numbers(6, 5, dtype=ctx.float_dtype)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, alone)]
    for _ in range(2):
        part = value.chunk(2)[data.get_local_rank()].contiguous()
        (net(placed(part, tp)).square().mean() / 2).backward()
        alone(value).square().mean().backward()
        for name, param in alone.named_parameters():
            same(net.get_parameter(name).grad, param.grad, name, tolerance_of(param.grad))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, param in alone.named_parameters():
        same(net.get_parameter(name), param, name, tolerance_of(param))


@sim.ranks(4, backends=("sim",))
def test_the_gradient_of_a_pending_maximum_is_refused(ctx):
    """The first axis of the mesh is named, in whatever order the plan has them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    own = Layout.from_device_mesh(mesh)
    net = torch.nn.Sequential(Weighted(), Weighted(5, 5))
    given = ShardingPlan(
        plan={"*.*": ("None",)}, local_plan={"0": own(partial={"tp": "max", "dp": "max"}), "1": ("None",)}
    )
    x = distribute_tensor(numbers(4, 5), mesh, (), src_data_rank=None)
    with pytest.raises(ValueError, match="cannot take a shard for a gradient: max over 'dp' is pending"):
        shard_module(net, mesh, given, src_data_rank=None)(x)


def test_what_is_sent():
    """Shapes are exchanged once for all equal calls; a pending sum goes to its target in one reduce_scatter."""

    def body(sizes):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        given = ShardingPlan(
            plan={"weight": ("None", "tp"), "scale": ("None",)},
            input_plan={"input": ("None", "tp")},
            output_plan={"output": ("tp",)},
            local_plan={"": (Partial(),)},
        )
        net = shard_module(Weighted(4, 6), mesh, given, src_data_rank=None)
        for size in sizes:
            x = distribute_tensor(numbers(size, 6), mesh, ("None", "tp"), src_data_rank=None)
            dist.barrier()
            with sim.region(f"forward of {size}"):
                found = net(x)
            same(found, Weighted(4, 6)(numbers(size, 6)))

    with sim.world(2) as world:
        world.run(body, args=([4],))
        sent = [event.op for event in world.trace.events if event.op not in ("barrier",) and event.rank == 0]
        assert sent.count("reduce_scatter") == 1, sent
        assert "all_reduce" not in sent


def test_shapes_are_agreed_on_once():
    def body(sizes):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        given = ShardingPlan(plan={"*": ("None",)}, input_plan={"input": ("dp",)}, local_plan={"": ("dp",)})
        net = shard_module(Weighted(), mesh, given, src_data_rank=None)
        for size in sizes:
            x = distribute_tensor(numbers(size, 5), mesh, ("dp",), src_data_rank=None)
            assert net(x).shape == (size, 3)

    gathers = []
    for sizes in ([7], [7, 7, 7], [7, 4, 7, 4]):
        with sim.world(2) as world:
            world.run(body, args=(sizes,))
            gathers.append(sum("gather" in event.op for event in world.trace.events if event.rank == 0))
    assert gathers == [1, 1, 2]


class LastOnly(nn.Linear):
    def forward(self, x, last=False, kind=None):
        y = super().forward(x)
        return y[:, -1:] if last or kind == "last" else y


@sim.ranks(4, backends=("sim",))
def test_results_whose_shape_depends_on_a_flag(ctx):
    given = ShardingPlan(plan={"*": ("None",)}, local_plan={"": ("dp", "None")})
    net = shard_module(LastOnly(8, 8).double(), grid(ctx), given)
    x = placed(numbers(6, 8), grid(ctx), "dp")
    calls = [{}, {"last": True}, {"kind": "last"}, {"kind": "all"}, {"last": False}]
    assert [tuple(net(x, **call).shape) for call in calls] == [(6, 8), (6, 1), (6, 1), (6, 8), (6, 8)]
