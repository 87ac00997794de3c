"""verify_plan finds nothing wrong with any plan that is right, and any single fault in one at its place."""

import copy
import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_shard_module_properties import cases
from torch import nn

import sim
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.fully_shard.api import fully_shard
from hyper_parallel.core.shard.api import ShardingPlan, shard_module

pytestmark = pytest.mark.sim

some = settings(max_examples=max(1, settings.default.max_examples // 16))


def normal(model):
    """Give all parameters and buffers random values of order one, from torch's generator."""
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.normal_(tensor, std=1 / math.sqrt(tensor.shape[-1]) if tensor.dim() > 1 else 1.0)
    return model


@some
@given(cases())
def test_no_false_alarm(case):
    """What the other test finds equal to one device, the proof finds right."""
    fields = {**case.fields, "input_plan": {"input": case.start, **case.fields["input_plan"]}}
    report = sim.verify_plan(
        lambda: normal(copy.deepcopy(case.model)),
        (torch.randn(case.rows, case.width, generator=torch.Generator().manual_seed(case.seed)).requires_grad_(),),
        case.mesh,
        ShardingPlan(**fields, wrap_inputs=case.wrap),
        optimizer_fn=lambda params: torch.optim.SGD(params, lr=0.1),
        seed=case.seed,
        steps=case.steps,
    )
    assert report.ok, str(report)
    assert all(row.ratio < 0.5 for row in report.rows if row.verdict in ("exact", "rounding")), report.table(
        verbose=True
    )


# -- a fault ----------------------------------------------------------------------------------------------------------


class Shift(nn.Module):
    """Adds what it remembers."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("shift", torch.zeros(width))

    def forward(self, x):
        return x + self.shift


class Pair(nn.Module):
    """Two weights, of which one is split by what comes out, the other by what goes in."""

    def __init__(self, width, inner):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Faulty(NamedTuple):
    """What hypothesis draws; shrinks towards two ranks and one pair whose first weight is scaled on rank 0."""

    mesh: Layout
    kinds: list[str]
    width: int
    inner: int
    local: bool  # pairs compute on local tensors
    fault: str
    at: str  # the path of a parameter, module or buffer; for updates ""
    rank: int


@st.composite
def faults(draw):
    sizes = draw(st.sampled_from([(1, 2), (2, 2), (1, 3), (1, 4), (2, 3)]))
    mesh = Layout(sizes, ("dp", "tp"))
    kinds = draw(st.lists(st.sampled_from(["pair", "norm", "shift"]), min_size=1, max_size=3).filter(_has_pair))
    width, inner = draw(st.sampled_from([4, 6])), sizes[1] * draw(st.integers(1, 3))
    fault = draw(st.sampled_from(["scaled", "swapped", "update", "not reduced", "buffer"]))
    model = build(kinds, width, inner)
    places = {
        "scaled": [name for name, _ in model.named_parameters()],
        "swapped": [name for name, _ in model.named_parameters() if ".up." in name or ".down." in name],
        "update": [""],
        "not reduced": [name for name, _ in model.named_modules() if name.endswith("down")],
        "buffer": [name for name, _ in model.named_buffers()],
    }
    if not places[fault]:
        fault = "scaled"
    local = draw(st.booleans()) or fault == "not reduced"
    at, rank = draw(st.sampled_from(places[fault])), draw(st.integers(0, math.prod(sizes) - 1))
    return Faulty(mesh, kinds, width, inner, local, fault, at, rank)


def _has_pair(kinds):
    return "pair" in kinds


def build(kinds, width, inner):
    make = {"pair": lambda: Pair(width, inner), "norm": lambda: nn.LayerNorm(width), "shift": lambda: Shift(width)}
    return nn.Sequential(*(make[kind]() for kind in kinds))


def plan_of(case):
    """The right plan: inner width over tp, rows over dp."""
    whole, inner = ("dp", "None"), ("dp", "tp")
    fields: dict[str, Any] = {"plan": {}, "input_plan": {"input": whole}, "output_plan": {}, "local_plan": {}}
    for index, kind in enumerate(case.kinds):
        if kind == "pair":
            up, down = f"{index}.up", f"{index}.down"
            fields["plan"] |= {f"{up}.weight": ("tp", "None"), f"{up}.bias": ("tp",), f"{down}.weight": ("None", "tp")}
            fields["input_plan"] |= {f"{up}.input": whole, f"{down}.input": inner}
            fields["output_plan"][f"{down}.output"] = whole
            if case.local:
                fields["local_plan"] |= {up: inner, down: case.mesh("dp", partial={"tp": "sum"})}
            continue
        fields["input_plan"][f"{index}.input"] = fields["local_plan"][f"{index}"] = whole
        if kind == "norm":
            fields["plan"] |= {f"{index}.weight": ("None",), f"{index}.bias": ("None",)}
    return ShardingPlan(**fields, wrap_inputs=True)


def verify(case, faulty):
    """Verify a case with its fault, or without."""
    plan = plan_of(case)
    if faulty and case.fault == "not reduced":
        plan.local_plan[case.at] = case.mesh("dp")

    def parallel(model, mesh):
        if faulty and case.fault == "swapped":
            _swap(model.get_parameter(case.at), 1 if ".down." in case.at else 0, mesh["tp"].size())
        shard_module(model, mesh, plan)
        if faulty and case.rank == dist.get_rank():
            with torch.no_grad():
                if case.fault == "scaled":
                    model.get_parameter(case.at).to_local().mul_(1 + 1e-6)
                elif case.fault == "buffer":
                    model.get_buffer(case.at).mul_(1 + 1e-6)

    class Lazy(torch.optim.SGD):
        def step(self, closure=None):
            if not (faulty and case.fault == "update" and dist.is_initialized() and dist.get_rank() == case.rank):
                super().step(closure)

    generator = torch.Generator().manual_seed(case.rank)
    return sim.verify_plan(
        lambda: normal(build(case.kinds, case.width, case.inner)),
        (torch.randn(4, case.width, generator=generator),),
        case.mesh,
        parallelize=parallel,
        input_layouts=[("dp",)],
        optimizer_fn=lambda params: Lazy(params, lr=0.1),
    )


def _swap(parameter, dim, size):
    parts = parameter.detach().chunk(size, dim)
    parameter.data = torch.cat(parts[::-1], dim)


@some
@given(faults())
def test_a_fault_is_found_where_it_is(case):
    right = verify(case, faulty=False)
    assert right.ok, str(right)
    first = verify(case, faulty=True).first
    assert first is not None
    module, _, tensor = case.at.rpartition(".")
    if case.fault in ("scaled", "swapped"):
        assert (first.kind, first.module, first.tensor) == ("parameter", module, tensor)
    elif case.fault == "buffer":
        assert (first.module, first.kind) in ((module, "buffer"), (module, "forward"))
    elif case.fault == "not reduced":
        assert (first.kind, first.module, first.tensor) == ("forward", case.at, "output")
    else:
        model = build(case.kinds, case.width, case.inner)
        name = next(name for name, _ in model.named_parameters())
        assert (first.kind, first.module, first.tensor) == ("update", *name.rpartition(".")[::2])
        assert f"rank {case.rank}" in first.sentence, first.sentence


# -- experts that get as many rows of a rank as data decides, or none --------------------------------------------------


class Routed(nn.Module):
    """Rows that their first element sends to an expert each."""

    def __init__(self, width, experts, p):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Dropout(p)) for _ in range(experts))
        self.head = nn.Linear(width, width)

    def forward(self, x):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (x[:, 0].floor() == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]))
        return self.head(out)


def by_units(model, mesh):
    for expert in model.experts:
        fully_shard(expert, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_ddp(model, mesh):
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())


def squared(model, batch):
    loss = model(batch).square().mean()
    loss.backward()
    return loss


@st.composite
def routings(draw):
    """Which expert each row goes to, how many ranks have the rows, the engine, and the probability of dropout."""
    ranks, experts = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rows = ranks * draw(st.integers(1, 3))
    choice = draw(st.lists(st.integers(0, experts - 1), min_size=rows, max_size=rows))
    return choice, experts, ranks, draw(st.sampled_from([by_units, by_ddp])), draw(st.sampled_from([0.0, 0.5]))


@some
@given(routings(), st.booleans(), st.booleans())
@example(([0, 0, 1, 1], 2, 2, by_units, 0.0), True, False)
@example(([1, 0, 0, 2, 1, 0], 3, 3, by_ddp, 0.5), False, False)
def test_experts_with_any_number_of_rows(routing, is_plan, is_wrong):
    choice, experts, ranks, wrap, p = routing
    x = torch.rand(len(choice), 4, generator=torch.Generator().manual_seed(ranks)) / 2 + 0.25
    x[:, 0] += torch.tensor(choice)

    def parallel(model, mesh):
        if is_wrong and mesh.get_rank() == 0:
            model.experts[choice[0]].register_forward_hook(lambda module, given, output: output * 2)
        return wrap(model, mesh)

    if is_plan:
        report = sim.verify_plan(
            lambda: Routed(4, experts, p), (x,), f"dp={ranks}", parallelize=parallel, input_layouts=[("dp",)]
        )
    else:
        report = sim.verify_step(
            squared,
            lambda: Routed(4, experts, p),
            x,
            f"dp={ranks}",
            parallelize=parallel,
            shard_batch=lambda batch, mesh: batch.chunk(mesh.size())[mesh.get_rank()],
        )
    assert report.ok is not is_wrong, str(report)
