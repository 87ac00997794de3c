"""Any tree of modules, wrapped anyhow, trains as on one device: losses, gradients and final parameters.

Everything is float64, so that the bound on rounding lies far below any real difference.
"""

import copy
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import sim
from hyper_parallel.core.fully_shard.api import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, whole_parameters
from hyper_parallel.core.fully_shard.unit import unit_of
from hyper_parallel.core.redistribute.api import full_tensor

pytestmark = pytest.mark.sim


WIDTH, VOCAB, PER_RANK, STEPS = 5, 7, 2, 3


class Node(nn.Module):
    """Keeps (batch, WIDTH) as it is; children run one after the other, `repeat` runs the first of them again.

    `last`: its own parameters come after those of the children. `skips`: every other rank leaves them out.
    """

    def __init__(self, kind, hidden, children=(), *, repeat=False, recompute=False, last=False, skips=False):
        super().__init__()
        self.kind, self.repeat, self.recompute, self.last, self.skips = kind, repeat, recompute, last, skips
        self.turn = 0
        self.layers = nn.ModuleList(children)
        if kind == "mlp":
            self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)
        elif kind == "norm":
            self.norm = nn.LayerNorm(WIDTH)
        elif kind == "table":
            self.table = nn.Embedding(hidden, WIDTH)
        elif kind == "scale":
            self.scale = nn.Parameter(torch.ones(() if hidden == 1 else (1,)))

    def extra_repr(self):
        return ", ".join(name for name in ("repeat", "recompute", "last", "skips") if getattr(self, name))

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=False) if self.recompute else self.compute(x)

    def compute(self, x):
        if not self.last:
            x = self.own(x)
        for layer in [*self.layers, *([self.layers[0]] if self.repeat and len(self.layers) else [])]:
            x = layer(x)
        return self.own(x) if self.last else x

    def own(self, x):
        if self.skips and self.turn % 2:
            return x
        if self.kind == "mlp":
            x = x + self.down(torch.tanh(self.up(x)))
        elif self.kind == "norm":
            x = self.norm(x)
        elif self.kind == "table":
            x = x + self.table((x.detach().abs().sum(1) * 10).long() % self.table.num_embeddings)
        elif self.kind == "scale":
            x = x * self.scale
        return x


class Model(nn.Module):
    def __init__(self, body, *, tied):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(VOCAB, WIDTH), body, nn.Linear(WIDTH, VOCAB)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


class Case(NamedTuple):
    """What hypothesis draws; shrinks towards one rank, one node, the root alone wrapped, SGD."""

    model: nn.Module
    wrapped: tuple[int, ...]  # which of the model's nodes, innermost first
    together: bool  # the first two siblings that can be become one unit
    shape: tuple[int, ...]
    reshard_forward: bool | int
    reshard_backward: bool
    split: str  # along dim 0 or, where there are several, the last dim; or not at all: each has an owner; or by blocks
    fusion: str
    whole: tuple[int, ...]  # which parameters, of the model's, are kept whole
    offload: bool
    stands_for: str | None  # the device whose way of sending is taken
    accumulate: int  # micro-batches per step
    defer: str  # what waits for the last one
    adam: bool
    evaluate: bool  # between two steps
    seed: int


@st.composite
def nodes(draw, depth, *, recomputed=False):
    kind = draw(st.sampled_from(["none", "mlp", "norm", "scale", "table"]))
    flags = {name: draw(st.booleans()) for name in ("repeat", "recompute", "last", "skips")}
    inside = recomputed or flags["recompute"]
    children = draw(st.lists(nodes(depth - 1, recomputed=inside), max_size=2)) if depth > 1 else []
    # What a rank leaves out decides when several modules are recomputed together, and with that, when units gather.
    flags["skips"] &= not recomputed and not (flags["recompute"] and children)
    node = Node(kind, draw(st.sampled_from([1, 3, 6])), children, **flags)
    frozen = draw(st.booleans()) and draw(st.booleans())
    for parameter in node.parameters(recurse=False) if not frozen else node.parameters():
        parameter.requires_grad_(not frozen)
    return node


@st.composite
def cases(draw):
    model = Model(draw(nodes(3)), tied=draw(st.booleans()))
    count = sum(isinstance(module, Node) for module in model.modules())
    shape = draw(st.sampled_from([(1,), (2,), (3,), (1, 2), (2, 1), (2, 2), (4,)]))
    return Case(
        model=model,
        wrapped=tuple(sorted(draw(st.sets(st.integers(0, count - 1))))),
        together=draw(st.booleans()),
        shape=shape,
        reshard_forward=draw(st.sampled_from([True, False, *([2] if shape[-1] == 4 else [])])),
        reshard_backward=draw(st.booleans()),
        split=(split := draw(st.sampled_from(["dim 0", "last dim", "owners", "some owners", "blocks"]))),
        fusion=draw(st.sampled_from(["no", "in one buffer", "packed"])) if "dim" in split else "no",
        whole=tuple(sorted(draw(st.sets(st.integers(0, len(list(model.parameters())) - 1), max_size=3)))),
        offload=draw(st.booleans()),
        stands_for=draw(st.sampled_from([None, "cuda"])),
        accumulate=draw(st.sampled_from([1, 2])),
        defer=draw(st.sampled_from(["nothing", "sync", "all_reduce"])),
        adam=draw(st.booleans()),
        evaluate=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


def wrap(model, case, mesh):
    options = {"mesh": mesh, "reshard_after_forward": case.reshard_forward}
    if case.split == "last dim":
        options["shard_placement_fn"] = lambda p: Shard(p.dim() - 1) if p.dim() > 1 else None
    elif case.split != "dim 0":
        placement = whole_parameters(model, case.shape[-1], block=2 if case.split == "blocks" else None)
        some = case.split == "some owners"
        options["shard_placement_fn"] = lambda p: None if some and p.shape[-1] % 2 else placement(p)
    if case.fusion != "no":
        options |= {"comm_fusion": True, "comm_fusion_zero_copy": case.fusion == "in one buffer"}
    if case.offload:
        options["offload_policy"] = CPUOffloadPolicy()
    parameters = list(model.parameters())
    kept = [parameters[index] for index in case.whole]

    def wrap_unit(modules):
        inside = {id(p) for m in (modules if isinstance(modules, list) else [modules]) for p in m.parameters()}
        mine = [p for p in kept if id(p) in inside]
        kept[:] = [p for p in kept if id(p) not in inside]
        fully_shard(modules, replicate_params=mine, **options)

    inside_out = [module for module in reversed(list(model.modules())) if isinstance(module, Node)]
    chosen = [inside_out[index] for index in case.wrapped]
    if case.together:
        pair = next(
            (list(n.layers) for n in inside_out if len(n.layers) == 2 and not set(n.layers) & set(chosen)), None
        )
        if pair is not None and all(not set(node.modules()) & set(chosen) for node in pair):
            wrap_unit(pair)
    for node in chosen:
        wrap_unit(node)
    wrap_unit(model)
    model.set_reshard_after_backward(case.reshard_backward)


def batch(step, micro, ranks, rank):
    tokens = torch.randint(0, VOCAB, (ranks * PER_RANK,), generator=torch.Generator().manual_seed(10 * step + micro))
    return tokens[rank * PER_RANK : (rank + 1) * PER_RANK]


def take_turns(model, turn):
    for node in model.modules():
        if isinstance(node, Node):
            node.turn = turn


def train(model, case, ranks, rank=None):
    """Losses of all micro-batches, the last step's gradients, the final parameters; of one device for all ranks."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.01, eps=1e-3) if case.adam else torch.optim.SGD(trainable, lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(case.accumulate):
            if rank is not None:
                last = micro == case.accumulate - 1
                model.set_requires_gradient_sync(last or case.defer != "sync")
                model.set_requires_all_reduce(last or case.defer != "all_reduce")
            total = 0.0
            for part in range(ranks) if rank is None else [rank]:
                take_turns(model, part + step + micro)
                tokens = batch(step, micro, ranks, part)
                loss = nn.functional.cross_entropy(model(tokens), tokens) / case.accumulate
                (loss / ranks if rank is None else loss).backward()
                total += loss.detach()
            losses.append(total)
        optimizer.step()
        if case.evaluate:
            with torch.inference_mode():
                model(batch(step, 0, ranks, rank or 0))
    whole = lambda t: full_tensor(t) if isinstance(t, DTensor) else t  # noqa: E731
    gradients = {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in model.named_parameters()
        if is_here(p) or p.grad is not None
    }
    return losses, gradients, {name: whole(p.detach()) for name, p in model.named_parameters()}


def is_here(parameter):
    """Whether this rank is among those that hold a parameter."""
    return not isinstance(parameter, DTensor) or parameter.device_mesh.get_coordinate() is not None


def assert_close(name, got, wanted):
    """Equal up to eps per addition: every value is a sum over batch, widths, nodes and steps, fewer than 2 ** 20.

    A layer norm divides by the spread of five numbers and Adam by the root of the second moment plus 1e-3, which
    magnifies a rounding error by up to another 2 ** 10 each.
    """
    assert (got is None) == (wanted is None), name
    if wanted is not None:
        bound = torch.finfo(torch.float64).eps * 2**20 * 2**10 * max(1.0, wanted.abs().max().item())
        assert (got - wanted).abs().max().item() <= bound, (name, got, wanted)


def on_rank(case, start, reference):
    ranks = dist.get_world_size()
    names = ("replicate", "shard")[-len(case.shape) :]
    model = copy.deepcopy(start)
    wrap(model, case, init_device_mesh("cpu", case.shape, mesh_dim_names=names))
    losses, gradients, values = train(model, case, ranks, dist.get_rank())
    for got, wanted in zip(losses, reference[0], strict=True):
        dist.all_reduce(got)
        assert_close("loss", got, wanted)
    assert list(values) == list(reference[2])
    assert list(gradients) == [name for name, p in model.named_parameters() if is_here(p)]
    for got, wanted in ((gradients, reference[1]), (values, reference[2])):
        for name in got:
            assert_close(name, got[name], wanted[name])
    model.reshard()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    for unit in unit_of(model).schedule.units:
        if case.reshard_backward and not case.evaluate:
            assert all(bucket.unsharded_buffer.untyped_storage().nbytes() == 0 for bucket in unit.buckets)
        assert unit.is_resharded() or not case.reshard_backward or case.evaluate


@pytest.mark.tier("full")
@given(cases())
def test_any_tree_wrapped_anyhow_trains_as_on_one_device(case):
    torch.manual_seed(case.seed)
    model = case.model.double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    ranks = torch.Size(case.shape).numel()
    reference = train(copy.deepcopy(model), case, ranks)
    sim.run(on_rank, ranks, (case, model, reference), seed=case.seed, map_device=case.stands_for)


# -- sums that are pending over axes that are not the engine's --------------------------------------------------------


class Scales(nn.Module):
    """Scales whose gradient is pending over tp where the input is split over it, and whole where it is not."""

    def __init__(self, count):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.arange(1.0, WIDTH + 1) + n) for n in range(count)])

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        return x


@settings(max_examples=max(settings.default.max_examples // 5, 1))
@given(
    st.lists(st.sampled_from(["split", "whole"]), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from([None, torch.float32, torch.float64]),
    st.booleans(),
)
def test_sums_over_other_axes_wait_for_the_reduction(micro_batches, count, reduce_dtype, mean):
    """Gradients are those of one device, and where all are pending alike they are added up over tp once."""
    values = torch.arange(8.0 * WIDTH * len(micro_batches), dtype=torch.float64).sin()
    values = values.view(len(micro_batches), 2, 4, WIDTH)
    alone = Scales(count).double()
    for x in values:
        (alone(x.flatten(0, 1)).square().sum() / (2 if mean else 1)).backward()

    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        (dp, tp), model = mesh.get_coordinate(), Scales(count).double()
        for at, scale in enumerate(model.scales):
            model.scales[at] = nn.Parameter(DTensor.from_local(scale.detach(), mesh["tp"], [Replicate()]))
        fully_shard(model, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        model.set_reduce_op_type("avg" if mean else "sum")
        for number, kind in enumerate(micro_batches):
            model.set_requires_gradient_sync(number == len(micro_batches) - 1)
            x = values[number, dp].clone()
            splits = kind == "split"
            local = x.chunk(2)[tp] if splits else x
            x = DTensor.from_local(local, mesh["tp"], [Shard(0) if splits else Replicate()])
            full_tensor(model(x).square().sum(), grad_layout=()).backward()
        return [full_tensor(scale.grad) for scale in model.scales]

    with sim.world(4) as world:
        found = world.run(body)
        sums = [event for event in world.trace.of_rank(0) if (event.op, event.axis) == ("all_reduce", "tp")]
    bound = 1e-5 if reduce_dtype == torch.float32 else 1e-12
    for gradients in found:
        for gradient, scale in zip(gradients, alone.scales, strict=True):
            torch.testing.assert_close(gradient, scale.grad, rtol=bound, atol=bound * float(scale.grad.abs().max()))
    if len({*micro_batches}) == 1:
        shapes = [event.input_shapes[0] for event in sums if event.input_shapes[0] != (1,)]  # losses
        assert shapes == [(count * WIDTH,)] * (micro_batches[0] == "split")
