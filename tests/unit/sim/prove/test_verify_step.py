"""Step functions that are proved: accumulation, fused weights, pipelines by hand and torch's, orders of tokens."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from zoo_kit import (
    Dropping,
    Enter,
    Gather,
    Leave,
    Tied,
    average,
    draw,
    made_of,
    proved_step,
    right,
    rounding,
    rows,
    squared,
    with_averages,
)

import sim
from hyper_parallel import fully_shard, hsdp
from hyper_parallel.core.dtensor.layout import Layout
from sim.prove.steps.compare import LoopComparison
from sim.prove.steps.watch import LoopRecord, RecordedStep

pytestmark = pytest.mark.tier("test")

WIDTH, HEADS, LENGTH, ROWS = 8, 4, 8, 4


def batch(rows=ROWS, length=LENGTH):
    ids = torch.randint(0, 16, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


def attended(q, k, v, seen=None):
    """Let heads of queries attend to those of keys and values, of which there may be fewer: causally, or as is seen."""
    q, k, v = (each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (q, k, v))
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Attention in which `group` heads of queries share one of keys and values."""

    group = 1

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH // each) for each in (1, self.group, self.group))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.o(attended(self.q(x), self.k(x), self.v(x)))


@made_of(lambda: {"norm": nn.LayerNorm(WIDTH), "attn": Attention(), "mlp": nn.Linear(WIDTH, WIDTH)})
def block_model(self, x):
    x = x + self.attn(self.norm(x))
    return x + torch.tanh(self.mlp(x))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(16, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(block_model() for _ in range(2))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, ids):
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def step(model, batch):
    loss = loss_of(model(batch[0]), batch[1])
    loss.backward()
    return loss


averaged = with_averages(step)


def verify(mesh, model=Gpt, parallelize=None, **options):
    options = {"step": step, "batch": batch(), **options}
    return proved_step(parallelize, model, options.pop("batch"), mesh, **options)


def test_a_step_changes_what_the_step_before_has_left():
    steps = [RecordedStep(updates={"w": torch.tensor([value])}) for value in (3.0, 4.0)]
    loops = LoopComparison(LoopRecord({"w": torch.tensor([1.0])}, steps=steps), [], [], Layout((1,), ("dp",)), {})
    assert [loops.changes(number) for number in (0, 1)] == [{"w": 2.0}, {"w": 1.0}]


def test_a_fault_in_backward_is_named_where_the_loss_is_scaled():
    def rank_step(model, batch, by=2.0**40):
        twice = model.blocks[0].mlp.register_full_backward_hook(lambda module, grads, _: (grads[0] * 2,))
        loss = loss_of(model(batch[0]), batch[1])
        (loss * by).backward()
        twice.remove()
        average(model)
        for parameter in model.parameters():
            parameter.grad /= by
        return loss.detach()

    report = verify("dp=3", batch=batch(rows=6), rank_step=rank_step)
    assert report.first.place == "the gradient of blocks.0.mlp.input"
    assert report.first.sentence == "every part is 2 times what it should be"


# -- gradients that the user averages, in less precision -------------------------------------------------------------


def low(model, batch, op=dist.ReduceOp.AVG, dtype=torch.bfloat16):
    """Autocast, and gradients that are reduced in 16 bits."""
    with torch.autocast("cpu", dtype):
        loss = loss_of(model(batch[0]).float(), batch[1])
    loss.backward()
    for parameter in model.parameters() if dist.is_initialized() else ():
        grad = parameter.grad.to(dtype)
        dist.all_reduce(grad, op=op)
        parameter.grad.copy_(grad)
    return loss


def compressed(model, mesh, share=True):
    """DDP whose buckets travel in bfloat16."""

    def reduced(state, bucket):
        grad = bucket.buffer().to(torch.bfloat16)
        grad /= dist.get_world_size() if share else 1
        future = dist.all_reduce(grad, async_op=True).get_future()
        return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    model = nn.parallel.DistributedDataParallel(model)
    model.register_comm_hook(None, reduced)
    return model


def scaled(model, batch, average=True):
    """Losses that a GradScaler scales."""
    scaler, optimizer = torch.amp.GradScaler("cpu", growth_interval=1), torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(model(batch[0]).float(), batch[1])
    scaler.scale(loss).backward()
    for parameter in model.parameters() if average and dist.is_initialized() else ():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**17
    optimizer.zero_grad()
    return loss


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_mixed_precision_is_right_in_any_form(dtype):
    for options in (
        {"step": low},
        {"rank_step": partial(low, dtype=torch.float16)},
        {"parallelize": compressed},
        {"step": scaled},
    ):
        right(verify("dp=2", dtype=dtype, **options))


@pytest.mark.tier("full")
def test_faults_in_mixed_precision_are_found():
    scale = "2 times what it should be"
    for options, words in (
        ({"step": partial(low, op=dist.ReduceOp.SUM)}, scale),
        ({"parallelize": partial(compressed, share=False)}, scale),
        ({"step": scaled, "rank_step": partial(scaled, average=False)}, "parts of an average over dp"),
    ):
        first = verify("dp=2", **options).first
        assert first.kind == "gradient"
        assert words in first.sentence


@pytest.mark.parametrize(("options", "ok"), [({}, True), ({"ranks": (1,)}, False), ({"off": 1e-11}, False)])
def test_what_a_step_chooses_near_a_tie_is_free(options, ok):
    x = draw(2, 3, 16)
    report = sim.verify_step(squared, Tied, x, "tp=2", parallelize=partial(rounding, **options), steps=2)
    assert report.ok == ok, str(report)
    assert ok == any("topk of the model" in note for note in report.notes), report.notes


# -- parameters that are renamed, fused, or split by a constructor of their own ----------------------------------------


class FusedAttention(nn.Module):
    """Splits itself by heads, and has q, k and v in one weight."""

    def __init__(self, attention, group):
        super().__init__()
        size, rank = group.size(), group.rank()
        parts = [getattr(attention, name) for name in "qkv"]
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH // size, dtype=torch.float64)
        with torch.no_grad():
            self.qkv.weight.copy_(torch.cat([part.weight.chunk(size)[rank] for part in parts]))
            self.qkv.bias.copy_(torch.cat([part.bias.chunk(size)[rank] for part in parts]))
        self.out = nn.Linear(WIDTH // size, WIDTH, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.out.weight.copy_(attention.o.weight.chunk(size, 1)[rank])
        self.group = group

    def forward(self, x):
        return Leave.apply(self.out(attended(*self.qkv(Enter.apply(x, self.group)).chunk(3, -1))), self.group)


def fused(model, mesh):
    for block in model.blocks:
        block.attn = FusedAttention(block.attn, mesh.get_group("tp"))


@pytest.mark.parametrize(
    "names",
    [
        None,
        {
            **{
                f"blocks.*.attn.qkv.{kind}": [f"blocks.*.attn.{each}.{kind}" for each in "qkv"]
                for kind in ("weight", "bias")
            },
            "blocks.*.attn.out.weight": "blocks.*.attn.o.weight",
        },
    ],
    ids=["by values", "by a map"],
)
def test_fused_and_renamed_weights_are_right(names):
    report = right(verify("tp=2", parallelize=fused, names=names))
    compared = {(row.kind, row.module) for row in report.rows}
    assert {("gradient", "blocks.1.attn.k"), ("update", "blocks.0.attn.o"), ("forward", "blocks.0.attn.o")} <= compared
    assert any("blocks.0.attn.qkv.weight is" in note for note in report.notes) == (names is None)


class FusedInOrder(Attention):
    """One weight for all of q, then all of k and v."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * WIDTH // self.group)
        del self.q, self.k, self.v

    def forward(self, x):
        return self.o(attended(*self.qkv(x).split([WIDTH, WIDTH // self.group, WIDTH // self.group], -1)))


class InTurns(nn.Module):
    """Megatron's order: the queries of each group, its keys and its values, and so on."""

    def __init__(self, attention, group, turned=lambda weight: weight):
        super().__init__()
        rank, size, heads = group.rank(), group.size(), HEADS // attention.group
        self.parted = (WIDTH // HEADS * attention.group, WIDTH // HEADS, WIDTH // HEADS)
        held = attention.state_dict()
        self.qkv = nn.Linear(1, 1)
        for kind in ("weight", "bias"):
            if f"qkv.{kind}" in held:
                parts = held[f"qkv.{kind}"].split([heads * each for each in self.parted])
            else:
                parts = [held[f"{each}.{kind}"] for each in "qkv"]
            turns = [each for parts in zip(*(part.chunk(heads) for part in parts), strict=True) for each in parts]
            setattr(self.qkv, kind, nn.Parameter(turned(torch.cat(turns).chunk(size)[rank].clone())))
        self.o = nn.Linear(WIDTH // size, WIDTH, bias=False)
        self.o.weight = nn.Parameter(held["o.weight"].chunk(size, 1)[rank].clone())
        self.group_of_ranks, self.group = group, attention.group

    def forward(self, x):
        given = self.qkv(Enter.apply(x, self.group_of_ranks)).unflatten(-1, (-1, sum(self.parted)))
        y = self.o(attended(*(part.flatten(-2) for part in given.split(self.parted, -1))))
        return Leave.apply(y, self.group_of_ranks)


def grouped(kind, group=2):
    def make():
        model = Gpt()
        for block in model.blocks:
            block.attn = type(kind.__name__, (kind,), {"group": group})()
        return model

    return make


def in_turns(model, mesh, **options):
    for block in model.blocks:
        block.attn = InTurns(block.attn, mesh.get_group(), **options)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("kind", [Attention, FusedInOrder])
@pytest.mark.parametrize("mesh", ["tp=1", "tp=2"])
def test_weights_whose_heads_take_turns_are_right(kind, group, mesh):
    report = right(verify(mesh, grouped(kind, group), parallelize=in_turns, steps=2))
    assert {row.verdict for row in report.rows if row.kind in ("parameter", "gradient", "update")} <= {
        "exact",
        "rounding",
    }
    said = [note for note in report.notes if "blocks.0.attn.qkv.weight is" in note]
    if kind is FusedInOrder:
        assert not said
        assert any(f"blocks.0.attn.qkv.weight has its rows by {2 * group} rows" in note for note in report.notes)
    elif (mesh, group) == ("tp=2", 2):  # one group of heads a rank: nothing takes turns
        assert "q.weight + blocks.0.attn.k.weight" in said[0]
    else:
        assert f"q.weight by {2 * group} rows in turn + " in said[0], said


@pytest.mark.parametrize("kind", [Attention, FusedInOrder])
def test_heads_that_take_turns_in_the_weight_and_not_in_forward(kind):
    def plain(model, mesh):
        in_turns(model, mesh)
        for block in model.blocks:
            block.attn.forward = partial(FusedInOrder.forward, block.attn)

    report = verify("tp=1", grouped(kind), parallelize=plain)
    at = ("attn.o", "input") if kind is Attention else ("attn.qkv", "output")
    assert (report.first.module, report.first.tensor) == (f"blocks.0.{at[0]}", at[1]), report.first


def test_rows_in_an_order_that_is_no_turn_are_no_names():
    def mixed(weight):
        return weight[torch.randperm(len(weight), generator=torch.Generator().manual_seed(1))]

    first = verify("tp=1", grouped(Attention), parallelize=partial(in_turns, turned=mixed)).first
    assert (first.kind, first.place) == ("parameter", "blocks.0.attn.q.weight"), first


@pytest.mark.tier("full")
def test_a_weight_that_no_rank_has():
    def without(model, mesh):
        model.head = nn.Linear(WIDTH, 16, dtype=torch.float64)

    report = verify("tp=2", parallelize=without)
    assert (report.first.kind, report.first.place) == ("parameter", "head.weight")


# -- constructors that draw their own part of the weights --------------------------------------------------------------


class Column(nn.Linear):
    """This rank's part of what comes out."""

    def __init__(self, width, out, group, bias=True):
        with torch.random.fork_rng():
            torch.manual_seed(group.rank())
            super().__init__(width, out // group.size(), bias)
        self.group = group

    def forward(self, x):
        return super().forward(Enter.apply(x, self.group))


class Row(nn.Module):
    """This rank's part of what goes in."""

    def __init__(self, width, out, group, leave=True):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(group.rank())
            self.weight = nn.Parameter(nn.Linear(width // group.size(), out).weight.detach())
        self.bias = nn.Parameter(torch.zeros(out))
        self.group, self.leave = group, leave

    def forward(self, x):
        y = F.linear(x, self.weight)
        return (Leave.apply(y, self.group) if self.leave else y) + self.bias


class Gated(nn.Module):
    """A gated feed-forward whose gate and up are one weight."""

    def __init__(self):
        super().__init__()
        self.norm, self.both, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        gate, up = self.both(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class OwnGated(Gated):
    """The same, whose constructor splits by itself."""

    def __init__(self, group, leave=True, unequal=False):
        nn.Module.__init__(self)
        self.norm = nn.LayerNorm(WIDTH)
        self.both, self.down = Column(WIDTH, 4 * WIDTH, group), Row(2 * WIDTH, WIDTH, group, leave)
        if unequal:
            nn.init.normal_(self.norm.weight, generator=torch.Generator().manual_seed(dist.get_rank()))


class OwnAttention(nn.Module):
    """`FusedAttention` that takes no weights of another, under other names."""

    def __init__(self, group):
        super().__init__()
        self.in_proj, self.out = Column(WIDTH, 3 * WIDTH, group), nn.Linear(WIDTH // group.size(), WIDTH, bias=False)
        self.group = group

    def forward(self, x):
        return Leave.apply(self.out(attended(*self.in_proj(x).chunk(3, -1))), self.group)


class OwnGpt(Gpt):
    def __init__(self, group):
        super().__init__()
        for block in self.blocks:
            block.attn = OwnAttention(group)


def gated():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Gated(), Gated())


def own_gated(model, mesh, **options):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(OwnGated(mesh.get_group("tp"), **options) for _ in range(2)))


def some(model, mesh, **options):
    for at in (1, 2):
        model[at] = OwnGated(mesh.get_group("tp"), **options)


def verify_gated(mesh="tp=2", parallelize=own_gated, **options):
    return sim.verify_step(squared, gated, draw(ROWS, WIDTH), mesh, parallelize=parallelize, **options)


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize(("mesh", "parallelize"), [("tp=2", own_gated), ("tp=2", some), ("dp=2,tp=2", own_gated)])
def test_constructors_that_draw_their_own_part_are_right(mesh, parallelize):
    report = right(verify_gated(mesh, parallelize))
    (note,) = [note for note in report.notes if "draw these by themselves" in note]
    assert "1.both.weight (tp, -), each of 2 fused ones" in note
    assert "1.down.weight (-, tp)" in note
    assert ("0.weight" in note) is (parallelize is own_gated)
    assert {("gradient", "1.both"), ("update", "2.down"), ("parameter", "0")} <= {
        (row.kind, row.module) for row in report.rows
    }


@pytest.mark.tier("full")
def test_weights_of_other_names_that_the_ranks_draw_are_matched_in_order():
    options = {"parallelize": lambda model, mesh: OwnGpt(mesh.get_group())}
    report = right(verify("tp=2", **options))
    assert any("blocks.0.attn.in_proj.weight (tp, -)" in note for note in report.notes), report.notes
    parts = {
        f"blocks.*.attn.in_proj.{kind}": [f"blocks.*.attn.{each}.{kind}" for each in "qkv"]
        for kind in ("weight", "bias")
    }
    names = {**parts, "blocks.*.attn.out.weight": "blocks.*.attn.o.weight"}
    assert verify("tp=2", names=names, **options).ok


def test_placements_of_what_the_ranks_draw():
    def square(model, mesh):
        group = mesh.get_group("tp")
        return nn.Sequential(Column(WIDTH, 2 * WIDTH, group), Row(2 * WIDTH, WIDTH, group))

    def model():
        return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))

    def take(mesh, **names):
        names = {name.replace("_", "."): value for name, value in names.items()}
        return sim.verify_step(squared, model, draw(ROWS, WIDTH), mesh, parallelize=square, names=names)

    said = take(
        "dp=2,tp=2",
        **{"0_weight": ("0.weight", Replicate(), Shard(0)), "1_weight": ("1.weight", Replicate(), Shard(1))},
    )
    assert said.ok, said
    with pytest.raises(ValueError, match="has 1 placements for the axes dp, tp"):
        take("dp=2,tp=2", **{"0_weight": ("0.weight", Shard(0))})


@pytest.mark.tier("full")
@pytest.mark.parametrize("parallelize", [own_gated, some])
def test_faults_of_constructors_that_draw_their_own_part(parallelize):
    first = verify_gated(parallelize=partial(parallelize, leave=False)).first
    assert (first.module, first.tensor) == ("1.down", "output"), first
    assert "the reference plus 1.down.bias once more: each of the 2 ranks adds it" in first.sentence


@pytest.mark.tier("full")
def test_what_ranks_should_draw_alike():
    first = verify_gated(parallelize=partial(own_gated, unequal=True)).first
    assert (first.kind, first.place) == ("parameter", "1.norm.weight")
    assert first.sentence == "ranks along tp draw it differently, and should hold the same"


def drawn_by_rank(wrap, seed, rank_step=None, **options):
    def drawn(model, seed):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape))  # the same in any dtype
        return model

    def model():
        return drawn(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), 0)

    def parallelize(model, mesh):
        return wrap(drawn(model, seed(mesh.get_rank())), mesh)

    options |= {"parallelize": parallelize, "rank_step": rank_step}
    return sim.verify_step(squared, model, draw(4, 4), "dp=2", **options)


def split_by_torch(model, mesh):
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh, plan, src_data_rank=None)


SPLITTING = {
    "fully_shard": (lambda model, mesh: fully_shard(model, mesh=mesh), rows, "'0.weight' along axis 'dp'"),
    "fsdp2": (lambda model, mesh: fsdp2(model, mesh=mesh), rows, "'weight' along axis 'dp'"),
    "hsdp": (lambda model, mesh: hsdp(model), rows, "'0.weight' along axis 'shard'"),
    "tensor parallel": (split_by_torch, None, "'the tensor given to distribute_tensor' along axis 'dp'"),
}


@pytest.mark.parametrize("kind", SPLITTING)
def test_weights_drawn_by_each_ranks_own_seed_are_named(kind):
    wrap, rows, copies = SPLITTING[kind]
    assert drawn_by_rank(wrap, lambda rank: 0, shard_batch=rows).ok
    first = drawn_by_rank(wrap, lambda rank: rank, shard_batch=rows).first
    assert (first.kind, first.place) == ("parameter", "0.weight")
    assert first.sentence == f"weights differ by rank before they are split: the copies of {copies} differ"
    assert first.suggestion == "one seed for what they hold alike, or a broadcast"


def test_copies_of_weights_drawn_by_each_ranks_own_seed_are_named():
    options = {"shard_batch": rows, "rank_step": with_averages(squared)}
    assert drawn_by_rank(lambda model, mesh: model, lambda rank: 0, **options).ok
    first = drawn_by_rank(lambda model, mesh: model, lambda rank: rank, **options).first
    assert (first.kind, first.place) == ("parameter", "0.weight")
    assert first.sentence == "rank 1 (dp=1) is wrong, and the other one holds what it should"
    assert first.suggestion == "one seed for what they hold alike, or a broadcast"
    ddp = drawn_by_rank(lambda model, mesh: DistributedDataParallel(model), lambda rank: rank, shard_batch=rows)
    assert ddp.ok  # it broadcasts rank 0's


@pytest.mark.parametrize("wrong", [lambda weight: weight * 1.5, lambda weight: weight.flip(0)])
def test_weights_that_are_copied_wrongly_are_not_drawn(wrong):
    def copied(model, mesh):
        group, parts = mesh.get_group("tp"), model[1].both
        rank = group.rank()
        both = Column(WIDTH, 4 * WIDTH, group)
        for kind in ("weight", "bias"):
            part = torch.cat([each.chunk(2)[rank] for each in getattr(parts, kind).detach().chunk(2)])
            setattr(both, kind, nn.Parameter(wrong(part)))
        down = Row(2 * WIDTH, WIDTH, group)
        down.weight = nn.Parameter(model[1].down.weight.detach().chunk(2, 1)[rank].clone())
        down.bias = model[1].down.bias
        model[1].both, model[1].down = both, down

    first = verify_gated(parallelize=copied).first
    assert (first.kind, first.module) == ("parameter", "1.both"), first


# -- pipelines ---------------------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """Half of the model, under the names of the whole one."""

    def __init__(self, model, rank):
        super().__init__()
        self.first = rank == 0
        if self.first:
            self.embed, self.place = model.embed, model.place
        else:
            self.head = model.head
        self.blocks = nn.ModuleDict({str(rank): model.blocks[rank]})

    def forward(self, x):
        if self.first:
            x = self.embed(x) + self.place(torch.arange(x.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        return x if self.first else self.head(x)


def staged(model, mesh):
    return Stage(model, mesh.get_local_rank("pp"))


def by_hand(received=lambda grad: grad):
    """Two micro-batches forward, then backward, over sends and receives."""

    def take(stage, batch):
        kept, total = [], 0.0
        for ids, labels in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            if stage.first:
                y = stage(ids)
                dist.send(y.detach(), 1)
                kept.append((None, y))
            else:
                x = torch.empty(*ids.shape, WIDTH, dtype=torch.float64)
                dist.recv(x, 0)
                loss = loss_of(stage(x.requires_grad_()), labels) / 2
                kept.append((x, loss))
                total = total + loss.detach()
        for x, y in kept:
            if stage.first:
                grad = torch.empty_like(y)
                dist.recv(grad, 1)
                y.backward(received(grad))
            else:
                y.backward()
                dist.send(x.grad, 0)
        return None if stage.first else total

    return take


def test_a_pipeline_by_hand_is_right():
    report = right(verify("pp=2", parallelize=staged, rank_step=by_hand()))
    compared = {(row.kind, row.module) for row in report.rows}
    assert {
        ("forward", "blocks.0.attn"),
        ("forward", "blocks.1.attn"),
        ("gradient", "embed"),
        ("update", "head"),
    } <= compared


def test_a_pipeline_that_scales_what_it_receives():
    report = verify("pp=2", parallelize=staged, rank_step=by_hand(received=lambda grad: grad / 2))
    assert report.first.place == "the gradient of blocks.0.output"
    assert "1/2 of what it should be" in report.first.sentence


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize("scales", [True, False])
def test_schedules_of_torch(kind, scales):
    def scheduled(model, mesh):
        rank = mesh.get_local_rank("pp")
        stage = PipelineStage(Stage(model, rank), rank, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        return kind(stage, 2, loss_fn=loss_of, scale_grads=scales)

    def take(schedule, batch):
        losses = []
        if dist.get_rank():
            schedule.step(target=batch[1], losses=losses)
            return torch.stack(losses).mean()
        return schedule.step(batch[0])

    report = verify("pp=2", parallelize=scheduled, rank_step=take)
    if scales:
        assert report.ok, str(report)
    else:
        assert report.first.place == "the gradient of head.bias", str(report)


# -- context parallelism: the ranks hold tokens in an order of their own -----------------------------------------------


def zigzag(batch, mesh):
    """Each rank has a piece from the front and one from the back."""
    size, rank = mesh.size(), mesh.get_rank()
    both = [each.chunk(2 * size, 1) for each in batch]
    return tuple(torch.cat([pieces[rank], pieces[2 * size - 1 - rank]], 1) for pieces in both)


def interleaved(batch, mesh):
    return tuple(each[:, mesh.get_rank() :: mesh.size()] for each in batch)


class ContextAttention(nn.Module):
    def __init__(self, attention, places):
        super().__init__()
        self.q, self.k, self.v, self.o = attention.q, attention.k, attention.v, attention.o
        self.places = places

    def forward(self, x):
        k, v = (Gather.apply(each(x), 1, dist.group.WORLD) for each in (self.k, self.v))
        seen = self.places[dist.get_rank()][:, None] >= torch.cat(self.places)
        return self.o(attended(self.q(x), k, v, seen))


def contextual(cut, shifted=False):
    """Context parallelism over tokens that `cut` gives out."""

    def parallelize(model, mesh):
        numbers = (torch.arange(LENGTH)[None],)
        at = [SimpleNamespace(size=mesh.size, get_rank=partial(int, rank)) for rank in range(mesh.size())]
        places = [cut(numbers, each)[0][0] for each in at]
        for block in model.blocks:
            block.attn = ContextAttention(block.attn, places)
        mine = places[mesh.get_rank()]
        own = torch.arange(len(mine)) if shifted else mine

        def forward(ids):
            x = model.embed(ids) + model.place(own)
            for block in model.blocks:
                x = block(x)
            return model.head(x)

        model.forward = forward

    return parallelize


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("cut", [zigzag, interleaved])
def test_context_parallelism_in_any_order_is_right(cut):
    report = right(verify("cp=2", parallelize=contextual(cut), rank_step=averaged, shard_batch=cut))
    verdicts = {
        row.verdict for row in report.rows if row.module in ("embed", "blocks.0", "head") and row.tensor == "output"
    }
    assert verdicts <= {"exact", "rounding"}, report.table(verbose=True)


@pytest.mark.tier("full", each=2)
@pytest.mark.parametrize("cut", [zigzag, interleaved])
def test_positions_that_every_rank_counts_from_0(cut):
    report = verify("cp=2", parallelize=contextual(cut, shifted=True), rank_step=averaged, shard_batch=cut)
    assert (report.first.module, report.first.tensor) == ("place", "input"), str(report)


# -- the inputs of a second step ---------------------------------------------------------------------------------------


@made_of(lambda picky=False: {"attn": Attention(), "keeps": True, "doubles": False, "picky": picky, "kept": None})
def masked(self, x, mask, offset):
    """Attends where a mask says, and adds an offset that is given."""
    if self.picky and not mask.all():
        raise ValueError("no masks, please\nat all")
    seen = mask[:, None, None] if self.keeps else torch.ones_like(mask)[:, None, None]
    y = attended(self.attn.q(x), self.attn.k(x), self.attn.v(x), seen)
    return self.attn.o(y) + offset * (2 if self.doubles else 1)


def verify_masked(kind=None, **options):
    def model():
        return masked(picky=kind == "picky")

    def wrong(model, mesh):
        model.keeps, model.doubles = kind != "keeps", kind == "doubles"

    def stale(model, batch):
        if kind == "stale":
            model.kept = batch = model.kept or batch
        return with_averages(squared)(model, batch)

    x, offset = draw(ROWS, LENGTH, WIDTH), torch.zeros(ROWS, LENGTH, WIDTH)
    inputs = (x, torch.ones(ROWS, LENGTH, dtype=torch.bool), offset)
    options = {"shard_batch": rows, "parallelize": wrong, "rank_step": stale, **options}
    return sim.verify_step(squared, model, inputs, "dp=2", **options)


def test_a_second_step_has_other_inputs():
    report = right(verify_masked())
    expected = "a second step (rows in another order, input 1 masks ends of rows, input 2 moved) is compared"
    assert expected in report.notes
    assert {("gradient", "weight"), ("gradient", "weight of step 2")} <= {(row.kind, row.tensor) for row in report.rows}


@pytest.mark.parametrize(
    ("kind", "place"), [("keeps", "attn.o.input"), ("doubles", "the model's output"), ("stale", "the model's input.1")]
)
def test_faults_that_only_other_inputs_show(kind, place):
    first = verify_masked(kind).first
    assert place in first.place, first
    assert first.tensor.endswith("of step 2")
    assert verify_masked(kind, steps=1).ok


def test_inputs_that_a_program_does_not_take():
    report = right(verify_masked("picky"))
    assert report.notes[-1] == (
        "a second step (rows in another order, input 1 masks ends of rows, input 2 moved) was not compared: "
        "ValueError: no masks, please"
    )
    assert not any("of step" in row.tensor for row in report.rows)


def counted(ids, kind):
    """What counts of a batch of ids: all of it, or as much of each row."""
    if kind == "mask":
        return torch.ones_like(ids)
    if kind == "lengths":
        return torch.full((len(ids),), ids.shape[1])
    if kind == "labels":
        return torch.where(torch.arange(ids.shape[1]) < 2, -100, ids)
    return (torch.arange(ids.shape[1]) < 4).expand_as(ids)


def keeps(ids, counts, kind):
    if kind == "lengths":
        return torch.arange(ids.shape[1]) < counts[:, None]
    return counts != -100 if kind == "labels" else counts.bool()


@pytest.mark.parametrize("kind", ["mask", "lengths", "labels", "same"])
@pytest.mark.parametrize("of_means", [False, True])
def test_rows_that_count_differently_on_the_ranks(kind, of_means):
    def step(model, batch):
        kept = keeps(*batch, kind)
        losses = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten(), reduction="none")
        total, count = (losses * kept.flatten()).sum(), kept.sum()
        if dist.is_initialized() and not of_means:
            dist.all_reduce(count)
        loss = total / count
        loss.backward()
        op = dist.ReduceOp.AVG if of_means else dist.ReduceOp.SUM
        for parameter in model.parameters() if dist.is_initialized() else ():
            dist.all_reduce(parameter.grad, op=op)
        return loss

    ids = batch()[0]
    given = (ids, counted(ids, kind))
    report = sim.verify_step(step, Gpt, given, "dp=2", shard_batch=rows)
    if of_means:
        assert report.first.tensor.endswith("step 2"), report
        assert sim.verify_step(step, Gpt, given, "dp=2", shard_batch=rows, steps=1).ok
    else:
        words = {"mask": "masks ends of rows", "lengths": "is shorter in some rows", "labels": "has more -100"}
        note = f"rows in another order, input 1 {words.get(kind, 'masks more of the last row')}"
        assert report.ok, report
        assert report.notes[0] == f"a second step ({note}) is compared"


@pytest.mark.parametrize("wrong", [False, True])
def test_a_mask_that_only_one_rank_ignores(wrong):
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(int(ids.max()) + 1, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.ignores = False

        def forward(self, input_ids, attention_mask):
            mask = torch.ones_like(attention_mask) if self.ignores else attention_mask
            return self.head((self.embed(input_ids) * mask[..., None]).sum(1))

    def parallel(model, mesh):
        model.ignores = wrong and mesh.get_rank() == 0
        return nn.parallel.DistributedDataParallel(model)

    ids = batch()[0]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"parallelize": parallel, "input_layouts": dict.fromkeys(inputs, ("dp", "None"))}
    report = sim.verify_plan(Pooled, inputs, "dp=2", **options)
    assert report.ok is not wrong, report
    if wrong:
        assert report.first.place == "head.input in step 2"
    types = {**inputs, "attention_mask": torch.zeros_like(ids)}
    noted = sim.verify_plan(Pooled, types, "dp=2", **options)
    assert "a fault may hide behind input attention_mask: of one value" in noted.notes


# -- weights that other optimizers change, buffers, and what is not compared -------------------------------------------


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def by_itself(model, batch, optimizer=sgd):
    loss = step(model, batch)
    optimizer(model.parameters()).step()
    model.zero_grad()
    return loss.detach()


def flat(model, batch, op=dist.ReduceOp.AVG, updated=(0, 1), optimizer=sgd):
    """The optimizer steps over a flat copy of the weights, as in ZeRO-1 by hand."""
    loss, held = step(model, batch), list(model.parameters())
    copy = nn.Parameter(torch.cat([each.detach().flatten() for each in held]))
    copy.grad = torch.cat([each.grad.flatten() for each in held])
    if op is not None and dist.is_initialized():
        dist.all_reduce(copy.grad, op=op)
    if optimizer is None:  # no optimizer of torch's
        copy.data -= 0.1 * copy.grad
    else:
        optimizer([copy]).step()
    for each, new in zip(held, copy.detach().split([each.numel() for each in held]), strict=True):
        if not dist.is_initialized() or dist.get_rank() in updated:
            each.data.copy_(new.view_as(each))
    model.zero_grad()
    return loss.detach()


def copies(rank_step, **options):
    options = {"step": by_itself, "optimizer_fn": None, **options}
    return verify("dp=2", rank_step=rank_step, **options)


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("rank_step", [flat, partial(flat, optimizer=None)])
def test_an_optimizer_over_copies_is_proved_by_the_weights(rank_step, steps):
    report = right(copies(rank_step, steps=steps, step=by_itself if steps else flat))
    assert {row.verdict for row in report.rows if row.kind == "update"} == {"exact", "rounding"}
    assert any("weights after the step are compared, and not the gradients" in note for note in report.notes)


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize(
    "options",
    [{"op": None}, {"op": dist.ReduceOp.SUM}, {"updated": (0,)}, {"updated": ()}, {"op": None, "optimizer": None}],
)
def test_faults_of_an_optimizer_over_copies(options, steps):
    report = copies(partial(flat, **options), steps=steps)
    assert (report.first.verdict, report.first.kind) == ("bug", "update"), str(report)
    assert not any("are right" in note for note in report.notes)


@pytest.mark.tier("full")
def test_an_adam_over_copies_moves_what_is_zero_but_for_rounding():
    adam = {"optimizer": partial(torch.optim.AdamW, lr=1e-2)}  # of the bias of k, the gradient is zero
    right(copies(partial(flat, **adam), step=partial(by_itself, **adam), steps=1))
    wrong = copies(partial(flat, op=None, **adam), step=partial(by_itself, **adam), steps=1)
    assert (wrong.first.verdict, wrong.first.kind) == ("bug", "update")


def test_a_step_that_trains_nothing_is_not_proved():
    def looks(model, batch):
        with torch.no_grad():
            return loss_of(model(batch[0]), batch[1])

    for steps in (None, 2):
        report = verify("dp=2", step=looks, steps=steps)
        assert (report.ok, [row.place for row in report.not_proved]) == (False, ["weights"])
        assert str(report).startswith("it is not proved that the model on dp=2 computes")
        assert report.not_proved[0].sentence == "no gradient and no update was compared"
    frozen = {"step": looks, "model": lambda: Gpt().requires_grad_(False)}
    assert verify("dp=2", **frozen).ok  # there is nothing to train


@pytest.mark.parametrize("has_loss", [True, False])
def test_a_wrong_forward_of_a_model_without_training_is_no_private_matter(has_loss):
    def looks(model, batch, factor=1.0):
        loss = (model(batch[0]) * factor).square().mean()
        return loss if has_loss else None

    def off(model, mesh):
        model.head.register_forward_hook(lambda module, args, output: output * 1.5)

    report = verify("dp=2", step=looks, model=lambda: Gpt().requires_grad_(False), parallelize=off)
    assert report.first.place == "the model's output", str(report)


def test_a_loss_that_no_rank_returns_is_said():
    def silent(model, batch):
        with torch.no_grad():
            outputs = model(batch[0])
        grads = torch.autograd.grad(loss_of(model(batch[0]), batch[1]), list(model.parameters()))
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            dist.all_reduce(grad, op=dist.ReduceOp.AVG)
            parameter.grad = grad
        del outputs

    report = right(verify("dp=2", rank_step=silent, steps=1))
    assert "the loss is not compared, as no rank has differentiated or returned one" in report.notes


class Averaged(nn.Module):
    """With a moving average of its weights, a count of tokens by expert, and a table that nobody changes."""

    def __init__(self):
        super().__init__()
        self.inner = Gpt()
        self.register_buffer("average", self.inner.head.weight.detach().clone())
        self.register_buffer("counts", torch.zeros(16))
        self.register_buffer("begin", torch.zeros(1))

    def forward(self, ids):
        return self.inner(ids)


def averaging(model, batch, fault=""):
    loss, parallel = step(model, batch), dist.is_initialized()
    average(model)
    sgd(model.parameters()).step()
    if fault != "average" or dist.get_rank() == 0:
        model.average.lerp_(model.inner.head.weight.detach(), 0.1)
    held = model._buffers.get("counts", model._buffers.get("tally"))
    counts = torch.bincount(batch[0].flatten(), minlength=16).to(held.dtype)
    if parallel and fault != "counts":
        dist.all_reduce(counts)
    held += counts
    return loss


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize(
    ("fault", "words"), [("", ""), ("average", "rank 1 (dp=1) is wrong"), ("counts", "parts of a sum over dp")]
)
def test_buffers_that_a_step_changes(fault, words, steps):
    rank_step = partial(averaging, fault=fault)
    report = copies(rank_step, step=averaging, model=Averaged, steps=steps)
    if not fault:
        assert report.ok, str(report)
        return
    assert report.first.place == (f"{fault} of step 1" if steps else fault)
    assert (report.first.kind, report.first.verdict) == ("buffer", "bug")
    assert words in report.first.sentence


def test_buffers_of_the_ranks_own_that_nobody_changes():
    def own(model, mesh):
        model.begin += mesh.get_rank()

    report = right(copies(averaging, step=averaging, model=Averaged, parallelize=own))
    assert {row.verdict for row in report.rows if row.tensor.startswith("begin")} == {"private"}
    assert "the ranks' own, which no step changes: begin" in report.notes


def test_a_buffer_that_changes_and_that_no_rank_has_is_not_proved():
    def renamed(model, mesh):
        model.register_buffer("tally", model._buffers.pop("counts"))

    report = copies(averaging, step=averaging, model=Averaged, parallelize=renamed)
    assert [row.place for row in report.not_proved] == ["counts", "counts of step 2"], str(report)
    assert report.first.sentence == "one device changes it, and no rank has a buffer of that name"


@made_of(lambda norm: {"embed": nn.Embedding(16, WIDTH), "norm": norm, "head": nn.Linear(WIDTH, 16)})
def normed(self, ids):
    return self.head(self.norm(self.embed(ids).mT).mT)


class Kept(nn.InstanceNorm1d):
    """Its forward may synchronise what it keeps."""

    def forward(self, x):
        return super().forward(x)


def reduced(model, batch, parts=1, fault=False):
    losses = [step(model, tuple(each.chunk(parts)[at] for each in batch)) / parts for at in range(parts)]
    for parameter in model.parameters():
        parameter.grad /= parts
        if dist.is_initialized():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    if fault and dist.get_rank():
        model.norm.running_mean += 0.1
    return sum(losses)


@pytest.mark.parametrize(
    ("norm", "parts", "ok"),
    [
        (lambda: nn.InstanceNorm1d(WIDTH, track_running_stats=True), 1, True),  # which normalises each row by itself
        (lambda: Kept(WIDTH, track_running_stats=True), 1, False),
        (lambda: nn.BatchNorm1d(WIDTH), 2, True),  # one device takes the rows of each rank by themselves
    ],
)
def test_statistics_of_own_rows_are_private(norm, parts, ok):
    one = partial(reduced, parts=parts)
    report = verify("dp=2", step=one, model=lambda: normed(norm()), rank_step=reduced, steps=1)
    assert report.ok is ok, str(report)
    statistics = [row for row in report.rows if row.tensor == "running_mean"]
    assert [row.verdict for row in statistics] == ["private" if ok else "bug"]
    said = [note for note in report.notes if note.startswith("of each rank's own rows, as nothing synchronises them: ")]
    assert [("norm.running_mean" in note) for note in said] == [True] * ok


class OnCpu(nn.SyncBatchNorm):
    """With the same rows on all ranks there is nothing to synchronise."""

    def forward(self, x):
        self.num_batches_tracked += 1
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True)


@pytest.mark.parametrize("fault", [False, True])
def test_statistics_that_are_synchronised_are_compared(fault):
    def synchronised(model, mesh):
        norm = OnCpu(WIDTH, dtype=torch.float64)
        norm.load_state_dict(model.norm.state_dict())
        model.norm = norm

    how = {
        "step": reduced,
        "rank_step": partial(reduced, fault=fault),
        "parallelize": synchronised,
        "shard_batch": None,
    }
    report = verify("dp=2", model=lambda: normed(nn.BatchNorm1d(WIDTH)), steps=1, **how)
    assert report.ok is not fault, str(report)
    if fault:
        assert (report.first.place, report.first.kind) == ("norm.running_mean", "buffer")


# -- how sure a proof is -----------------------------------------------------------------------------------------------


def by_a_sign(model, batch):
    """Rounding decides the sign of zero, and that the direction of all gradients."""
    total = sum(parameter.square().sum() for parameter in model.parameters())
    noise = sum(parameter.sum() for parameter in model.parameters())
    again = sum(parameter.sum() for parameter in reversed(list(model.parameters())))
    loss = total * torch.sign(noise - again).detach()
    loss.backward()
    return total


@pytest.mark.parametrize(
    "step", [by_a_sign, lambda model, batch: sum(each.square().sum() for each in model.parameters())]
)
def test_what_rounding_decides_is_not_proved(step):
    report = sim.verify_step(step, lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), torch.zeros(2), "dp=2")
    assert report.bug is None
    assert report.ok is (step is not by_a_sign)
    assert report.first is (None if report.ok else report.not_proved[0])
    assert {row.kind for row in report.not_proved} == (set() if report.ok else {"gradient"})


def test_a_loss_that_rounding_decides_is_not_proved():
    def step(model, batch):
        total = sum(each.square().sum() for each in model.parameters())
        total.backward()
        sums = [each.detach().sum() for each in model.parameters()]
        return total.detach() * torch.sign(sum(sums) - sum(reversed(sums)))

    report = sim.verify_step(step, lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), torch.zeros(2), "dp=2")
    assert [row.tensor for row in report.not_proved] == ["loss"], str(report)
    assert report.first.place == "the model's loss"
    assert not report.ok


@pytest.mark.tier("full")
def test_faults_that_are_put_in_are_found():
    found = verify("tp=2", parallelize=fused).sensitivity(most=12)
    assert len(found.rows) == 12 < found.possible
    assert not found.missed, str(found)
    assert {"missing reduction", "one rank"} <= {row.kind for row in found.rows if row.outcome == "found"}


def test_a_reduce_scatter_that_forgets_to_add_up_is_put_in():
    options = {"shard_batch": rows, "parallelize": lambda model, mesh: fully_shard(model, mesh=mesh)}
    found = sim.verify_step(squared, lambda: nn.Linear(4, 4), draw(4, 4), "dp=2", **options).sensitivity()
    kinds = {row.kind: row.outcome for row in found.rows if row.place.startswith("reduce_scatter")}
    assert kinds["missing reduction"] == "found", found


@pytest.mark.tier("full")
def test_a_fault_that_changes_nothing_counts_as_neither():
    def idle(model, batch):
        loss = step(model, batch)
        dist.all_reduce(torch.zeros(3))
        return loss

    found = verify("tp=2", rank_step=idle).sensitivity(most=4)
    assert {row.outcome for row in found.rows if row.place.startswith("all_reduce")} == {"none"}


@made_of(lambda: {"score": nn.Linear(WIDTH, 1), "head": nn.Linear(WIDTH, WIDTH, bias=False)})
def pooling(self, x):
    """Tokens weighed by a softmax, to which the bias of the scores adds nothing."""
    return self.head((self.score(x).softmax(1) * x).sum(1))


def test_twice_a_gradient_that_is_zero_but_for_rounding_is_no_fault():
    found = sim.verify_step(squared, pooling, torch.randn(2, 3, WIDTH), "dp=2").sensitivity()
    outcomes = {(row.place, row.kind): row.outcome for row in found.rows}
    assert outcomes["gradient of score.bias", "wrong scale"] == "none", found
    assert outcomes["gradient of score.weight", "wrong scale"] == "found"
    assert not found.missed


@pytest.mark.tier("full")
def test_a_report_that_is_wrong_already_has_no_sensitivity():
    report = verify("dp=2")
    with pytest.raises(ValueError, match="the program is wrong already"):
        report.sensitivity()


@made_of(lambda: {"qkv": nn.Linear(WIDTH, 3 * WIDTH), "out": nn.Linear(WIDTH, WIDTH)})
def documents(self, x, lengths):
    """Let the tokens of each document attend to those before them in it."""
    return self.out(torch.cat([attended(*each[None].chunk(3, -1))[0] for each in self.qkv(x).split(lengths)]))


def sum_of_squares(model, batch):
    loss = model(batch["x"], batch["lengths"].tolist()).square().sum() / 16
    loss.backward()
    return loss


def whole_documents(batch, mesh):
    """Give the first rank the first document, and the second rank the others."""
    first, lengths = int(batch["lengths"][0]), batch["lengths"]
    if mesh.get_rank() == 0:
        return {"x": batch["x"][:first], "lengths": lengths[:1]}
    return {"x": batch["x"][first:], "lengths": lengths[1:]}


def prove_documents(parallelize=None):
    def added(model, batch):
        loss = sum_of_squares(model, batch)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return loss

    given = {"x": draw(16, WIDTH), "lengths": torch.tensor([3, 8, 5])}
    options = {"rank_step": added, "shard_batch": whole_documents}
    return sim.verify_step(sum_of_squares, documents, given, "dp=2", parallelize=parallelize, **options)


def test_documents_of_different_lengths_are_right():
    right(prove_documents())


def test_tokens_that_see_another_document_are_found_where_they_do():
    def leaking(model, mesh):
        model.forward = lambda x, lengths: type(model).forward(model, x, [len(x)])

    report = prove_documents(leaking)
    assert report.first.place == "out.input", report
    assert report.first.sentence == "rank 1 (dp=1) is wrong, and the other one holds what it should"
    assert "computed from qkv.output, which is right" in report.first.suggestion


@pytest.mark.parametrize(
    ("weight", "fill", "place", "sentence"),
    [
        ("unused", torch.zeros_like, "unused.weight", "one device has no gradient of it, and the ranks one of zeros"),
        ("unused", torch.ones_like, "the gradient of unused.weight", "only ranks 0-1 have one"),
        ("used", lambda weight: None, "the gradient of used.weight", "no rank has one, and one device has"),
    ],
)
def test_a_gradient_that_one_side_lacks(weight, fill, place, sentence):
    def model():
        found = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("used", "unused")})
        found.forward = found["used"].forward
        return found

    def changed(model, batch):
        loss, held = squared(model, batch), model[weight].weight
        held.grad = fill(held)
        return loss

    report = sim.verify_step(squared, model, draw(ROWS, WIDTH), "dp=2", rank_step=changed)
    assert (report.first.place, report.first.sentence.partition(":")[0]) == (place, sentence), report


@made_of(lambda: {"first": nn.Linear(WIDTH, WIDTH), "up": nn.Linear(WIDTH, 16), "down": nn.Linear(16, WIDTH)})
def narrowing(self, x):
    return self.down(F.gelu(self.up(self.first(x))))


def half_up(model, mesh, *, first=1.0):
    """Split `up` and forget `down`, which takes all of what `up` returns; `first` times the weight of the first."""
    for name in ("weight", "bias"):
        part = getattr(model.up, name).detach().chunk(2)[mesh.get_rank()].clone()
        setattr(model.up, name, nn.Parameter(part))
    model.first.register_forward_hook(lambda module, args, out: out * first)


def one_by_one(model, batch):
    """Take the rows one by one."""
    for row in batch.split(1):
        loss = squared(model, row) / len(batch)
    return loss


@pytest.mark.parametrize("rank_step", [squared, one_by_one])
def test_a_rank_that_fails_says_in_which_module_and_what_that_was_given(rank_step):
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        sim.verify_step(squared, narrowing, draw(2, WIDTH), "tp=2", parallelize=half_up, rank_step=rank_step)
    assert isinstance(caught.value, sim.RankFailed)
    rows = 2 if rank_step is squared else 1
    assert str(caught.value).splitlines()[2:] == [
        f"  rank {caught.value.rank} was in module 'down', forward",
        "    weight: (8, 16)",
        "    bias: (8,)",
        f"    down.input: ({rows}, 8) of (2, 16)" + ", found (-, tp)" * (rows == 2),
    ]


def test_what_was_wrong_before_a_rank_failed_is_reported():
    parallelize = partial(half_up, first=2.0)
    report = sim.verify_step(squared, narrowing, draw(2, WIDTH), "tp=2", parallelize=parallelize)
    assert report.first.place == "up.input", report
    assert report.first.sentence.startswith("every part is 2 times what it should be")
    (note,) = [note for note in report.notes if "stopped" in note]
    assert "cannot be multiplied" in note
    assert note.endswith("was in module 'down', forward")


def test_ranks_that_wait_for_each_other_say_where_each_is():
    def alone(model, mesh):
        if mesh.get_rank() == 0:
            model.down.register_forward_pre_hook(lambda module, args: dist.all_reduce(args[0].detach().clone()))

    with pytest.raises(sim.Deadlock) as caught:
        sim.verify_step(squared, narrowing, draw(2, WIDTH), "tp=2", parallelize=alone)
    assert "  rank 0 was in module 'down', forward\n" in str(caught.value)
    assert "  rank 1 was in no module, forward" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"model": Gpt()}, TypeError, "model_fn is a Gpt, not a function"),
        ({"names": {"head.wieght": "head.weight"}}, sim.RankFailed, ""),
        ({"dtype": torch.int64}, TypeError, "no floating-point dtype"),
        ({"steps": 0}, ValueError, "steps"),
    ],
)
def test_bad_arguments(options, kind, text):
    if kind is sim.RankFailed:
        kind, text = ValueError, "no rank has a parameter 'head.wieght'"
    with pytest.raises(kind, match=text):
        verify("dp=2", **options)


def recomputed(first, second, functional=False, **options):
    def model():
        layers = [Dropping(WIDTH, functional, preserve_rng_state=restored) for restored in (first, second)]
        return nn.Sequential(*layers, nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))

    options = {"rank_step": with_averages(squared), **options}
    return sim.verify_step(squared, model, draw(ROWS, WIDTH), "dp=2", shard_batch=rows, optimizer_fn=None, **options)


@pytest.mark.parametrize("steps", [1, 2])
def test_masks_that_are_drawn_again_alike_are_right(steps):
    right(recomputed(True, True, steps=steps))


@pytest.mark.parametrize(
    ("first", "second", "functional", "module"),
    [(False, True, False, "0.drop"), (True, False, False, "1.drop"), (True, False, True, "1")],
)
def test_masks_that_are_drawn_again_otherwise_are_found_where_they_are(first, second, functional, module):
    report = recomputed(first, second, functional)
    assert (report.first.module, report.first.kind) == (module, "random"), report
    expected = "backward computes it again with other random numbers, on one device and ranks 0-1"
    assert report.first.sentence == expected
    assert "preserve_rng_state=True" in report.first.suggestion


def test_masks_that_only_one_rank_draws_otherwise_are_found():
    def forgetful(model, mesh):
        model[1].options["preserve_rng_state"] = dist.get_rank() == 0

    report = recomputed(True, True, parallelize=forgetful)
    assert report.first.sentence == "backward computes it again with other random numbers, on rank 1", report
    assert report.first.module == "1.drop"


@pytest.mark.parametrize("restored", [True, False])
def test_a_checkpoint_around_the_whole_model(restored):
    def step(model, batch):
        out = checkpoint(lambda x: F.dropout(model(x), 0.5), batch, use_reentrant=False, preserve_rng_state=restored)
        return out.square().mean()

    x = draw(ROWS, WIDTH)
    report = sim.verify_step(step, lambda: nn.Linear(WIDTH, WIDTH), x, "dp=2", optimizer_fn=None)
    assert any(row.kind == "random" for row in report.rows) != restored, report


# -- what to try -------------------------------------------------------------------------------------------------------


def two_layers():
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))


def swapped(model, batch, mesh):
    loss = with_averages(squared)(model, batch)
    assert mesh.mesh_dim_names == ("dp",)
    model[0].weight.grad, model[2].weight.grad = model[2].weight.grad, model[0].weight.grad
    return loss


def with_own_adam(*, renewed):
    def stepped(model, batch):
        loss = squared(model, batch)
        average(model)
        if renewed or "adam" not in model.__dict__:
            model.__dict__["adam"] = torch.optim.Adam(model.parameters(), lr=0.1)
        model.__dict__["adam"].step()
        return loss

    return stepped


REMEDIES = {
    "swapped gradients": (
        {"rank_step": swapped},
        "the gradient of 2.weight",
        "it is the gradient of 0.weight",
        "the order in which gradients are put into buffers",
    ),
    "an optimizer that is not restored": (
        {"step": with_own_adam(renewed=False), "rank_step": with_own_adam(renewed=True), "steps": 2},
        "0.weight of step 2",
        "ranks 0-1 step with no state of the steps before, one device with it",
        "its gradient is right: look at what the optimizer does on each rank",
    ),
    "means of unequal parts": (
        {"batch": draw(3, 4)},
        "the model's loss",
        "neither the mean nor the sum of the ranks' losses is that of the whole batch",
        "weigh each rank's loss by its share of the rows",
    ),
}


def test_a_step_with_a_spare_argument_gets_no_mesh():
    def averaged(model, batch, scale=1.0):
        return with_averages(squared)(model, batch * scale)

    right(sim.verify_step(squared, two_layers, draw(4, 4), "dp=2", rank_step=averaged, shard_batch=rows, steps=1))


@pytest.mark.parametrize("name", REMEDIES)
def test_what_a_report_says_to_try(name):
    asked, place, sentence, hint = REMEDIES[name]
    asked = {"step": squared, "batch": draw(4, 4), "rank_step": with_averages(squared), "steps": 1, **asked}
    report = sim.verify_step(model_fn=two_layers, mesh_shape="dp=2", shard_batch=rows, **asked)
    first = report.first
    assert (first.place, sentence in first.sentence, hint in first.suggestion) == (place, True, True), str(report)
