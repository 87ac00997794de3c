"""Broken models, written by hand on local tensors: what Megatron-like code gets wrong between its collectives."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from zoo_case import Case, found, register, says
from zoo_kit import (
    WIDTH,
    Collect,
    Enter,
    Gather,
    Leave,
    Net,
    Scatter,
    Tied,
    axis,
    draw,
    made_of,
    megatron,
    rounding,
    same,
    split_block,
    summed,
    take,
    tokens,
)

CASES: list[Case] = []
case = register(CASES)
fault = partial(case, on=megatron)


# -- tensor parallelism ------------------------------------------------------------------------------------------------


@fault("no reduction after a row-split weight")
@found("forward", "blocks.0.mlp.down", "output", "parts of a sum over tp", "nothing reduced it", hint="all_reduce")
def _(model, mesh):
    model.blocks[0].mlp.leave = same


@fault("an operation of one's own that forgets its all_reduce in backward")
@found("gradient", "blocks.1.mlp.up", "input", "parts of a sum over tp", "nothing reduced it", hint="all_reduce")
def _(model, mesh):
    model.blocks[1].mlp.enter = same


@fault("a bias that every rank adds before the reduction")
@found("forward", "blocks.1.mlp.down", "output", "a bias that each of the 2 ranks adds", "after the reduction")
def _(model, mesh):
    down = model.blocks[1].mlp.down
    down.forward = lambda x: F.linear(x, down.weight, Enter.apply(down.bias, axis(mesh)[2]))


@case("a residual that every rank adds before the reduction")
@found("forward", "blocks.0", "output")
@says(
    "the reference plus the input of blocks.0.norm2 once more",
    "each of the 2 ranks along 'tp' adds it; add it once, after the reduction",
)
def _(model, mesh, broken):
    megatron(model, mesh)
    block, (_, _, group) = model.blocks[0], axis(mesh)

    def forward(x):
        x = x + block.attn(block.norm1(x))
        y = block.mlp(block.norm2(x))
        return Leave.apply(x + y, group) if broken else x + Leave.apply(y, group)

    block.mlp.leave = same
    block.forward = forward


@case("an all_reduce over the wrong group", mesh="dp=2,tp=2", options={"input_layouts": [("dp", "None")]})
@found("forward", "blocks.0.mlp.down", "output", "parts of a sum over tp", "nothing reduced it", hint="over tp")
def _(model, mesh, broken):
    megatron(model, mesh)
    group, rows = mesh["dp" if broken else "tp"].get_group(), mesh["dp"].get_group()
    model.blocks[0].mlp.leave = lambda y: Leave.apply(y, group)
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: summed(grad, rows))


@fault("a sum that is taken twice")
@found("forward", "blocks.1.attn", "output", "2 times what it should be", "counted once per rank of 'tp'")
def _(model, mesh):
    attn, leave = model.blocks[1].attn, model.blocks[1].attn.leave
    attn.leave = lambda y: leave(leave(y))


@fault("a sum that is divided by the number of ranks")
@found("forward", "blocks.1.attn", "output", "1/2 of what it should be", "averaged once too often over 'tp'")
def _(model, mesh):
    attn, leave = model.blocks[1].attn, model.blocks[1].attn.leave
    attn.leave = lambda y: leave(y) / 2


@fault("gradients that are scaled by 1/tp twice")
@found("gradient", "blocks.0.attn.o", "weight", "1/2 of what it should be")
def _(model, mesh):
    model.blocks[0].attn.o.weight.register_hook(lambda grad: grad / 2)


@case("grouped keys and values that go to the wrong heads", mesh="tp=4", model=lambda: Net(bias=False))
@found("parameter", "blocks.0.attn.k", "weight")
@says("dim 0 is held in 2 pieces", "ranks 0, 2 hold piece 0; ranks 1, 3 hold piece 1")
def _(model, mesh, broken):
    rank, size, group = axis(mesh)
    for block in model.blocks:
        k, v = block.attn.k, block.attn.v
        whole = [each.weight.detach().unflatten(0, (2, -1)) for each in (k, v)]
        split_block(block, rank, size, group)
        mine = rank % 2 if broken and block is model.blocks[0] else rank // 2
        for each, weight in zip((k, v), whole, strict=True):
            each.weight = nn.Parameter(weight[mine].clone())
            pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            each.weight.register_hook(lambda grad, pair=pairs[rank // 2]: summed(grad, pair))


@fault("initial weights from one seed on every shard")
@found("parameter", "blocks.0.mlp.up", "weight")
@says("hold the same values where each should hold its own part", "the same random seed on every shard?")
def _(model, mesh):
    torch.manual_seed(1)
    nn.init.normal_(model.blocks[0].mlp.up.weight)


@case("a dropout mask that is the same on shards that must differ", model=lambda: Net(dropout=0.5))
@found("random", "blocks.0.mlp.drop", "bernoulli")
@says("draws the same numbers on ranks 0-1, which hold different parts over tp", hint="a seed that differs along tp")
def _(model, mesh, broken):
    megatron(model, mesh)
    for index, block in enumerate(model.blocks):
        if not (broken and index == 0):
            seeded(block.mlp.drop, 100 + axis(mesh)[0])


def seeded(module, seed):
    """Draw a module's random numbers from a seed of its own."""
    plain = module.forward

    def forward(x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return plain(x)

    module.forward = forward


@case("shards that were loaded in another order", mesh="tp=4", model=lambda: Net(kv_heads=4))
@found("parameter", "blocks.1.mlp.up", "weight", "the parts of the ranks along 'tp' are in another order: (3, 2, 1, 0)")
def _(model, mesh, broken):
    whole = model.blocks[1].mlp.up.weight.detach().clone()
    megatron(model, mesh)
    if broken:
        model.blocks[1].mlp.up.weight = nn.Parameter(whole.chunk(4)[3 - axis(mesh)[0]].clone())


@made_of(lambda: {"both": nn.Linear(WIDTH, 4 * WIDTH, bias=False), "down": nn.Linear(2 * WIDTH, WIDTH, bias=False)})
def gated(self, x):
    """A feed-forward whose gate and value are one weight."""
    gate, value = self.both(x).chunk(2, -1)
    return self.down(F.silu(gate) * value)


@case("a fused gate and value that are split in one piece", model=gated, inputs=(draw(4, 6, WIDTH),))
@found("forward", "down", "input", "no layout explains", hint="computed from both.output, which is right")
def _(model, mesh, broken):
    rank, size, group = axis(mesh)
    weight = model.both.weight.detach()
    if broken:
        take(model.both, "weight", 0, rank, size)
    else:
        model.both.weight = nn.Parameter(torch.cat([part.chunk(size)[rank] for part in weight.chunk(2)]))
    take(model.down, "weight", 1, rank, size)
    plain = model.down.forward
    model.down.forward = lambda y: Leave.apply(plain(y), group)


# -- vocabulary --------------------------------------------------------------------------------------------------------


def split_vocabulary(model, mesh, *, masked=True, tied=False, joined=None):
    """Split embedding and head by tokens; `joined` puts the logits together."""
    rank, size, group = axis(mesh)
    take(model.embed, "weight", 0, rank, size)
    if tied:
        model.head.weight = model.embed.weight
    else:
        take(model.head, "weight", 0, rank, size)
    count = model.embed.weight.shape[0]

    def embed(ids):
        mine = (ids // count == rank)[..., None]
        rows = F.embedding(ids % count, model.embed.weight)
        return Leave.apply(rows * mine if masked else rows, group)

    head, join = model.head.forward, joined or (lambda y: Collect.apply(y, -1, group))
    model.embed.forward = embed
    model.head.forward = lambda x: join(head(Enter.apply(x, group)))


@case("a split embedding that looks up other ranks' tokens")
@found("forward", "embed", "output")
@says("all ranks hold the same, and it is wrong", hint="computed from embed.input, which is right")
def _(model, mesh, broken):
    split_vocabulary(model, mesh, masked=not broken)


@case("tied weights that are split apart", model=lambda: Net(tied=True))
@found("parameter", "head", "weight")
@says("one tensor with embed.weight on one device", hint="tie head.weight to embed.weight again")
def _(model, mesh, broken):
    split_vocabulary(model, mesh, tied=not broken)


@case("logits that are gathered in reversed rank order")
@found("forward", "head", "output", "another order: (1, 0)")
def _(model, mesh, broken):
    _, _, group = axis(mesh)

    def joined(y):
        y = Collect.apply(y, -1, group)
        return torch.cat(y.chunk(2, -1)[::-1], -1) if broken else y

    split_vocabulary(model, mesh, joined=joined)


class Loss(nn.Module):
    """Cross-entropy with smoothed labels: of the whole logits here, of this rank's part of the vocabulary there."""

    smoothing = 0.1

    def forward(self, logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=self.smoothing)


@made_of(lambda: {"head": nn.Linear(WIDTH, 24, bias=False), "loss": Loss()})
def trained(self, x, targets):
    """A head and its loss."""
    return self.loss(self.head(x), targets)


def split_loss(model, mesh, *, largest=True, sums=True, whole_count=True):
    """Split head and loss by tokens, as Megatron does, with any of its three parts left out."""
    rank, size, group = axis(mesh)
    take(model.head, "weight", 0, rank, size)
    head = model.head.forward
    model.head.forward = lambda x: head(Enter.apply(x, group))
    count = model.head.weight.shape[0]

    def loss(logits, targets):
        most = logits.detach().amax(-1, keepdim=True)
        if largest:
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        logits = logits - most
        total = logits.exp().sum(-1)
        total = Leave.apply(total, group) if sums else total
        mine = targets // count == rank
        hit = logits.gather(-1, (targets % count)[..., None])[..., 0] * mine
        hit = Leave.apply(hit, group)
        mean = Leave.apply(logits.sum(-1), group) / (count * size if whole_count else count)
        part = model.loss.smoothing
        return (total.log() - (1 - part) * hit - part * mean).mean()

    model.loss.forward = loss


TRAINED = {
    "hint": "computed from loss.input.logits, which is right",
    "model": trained,
    "inputs": (draw(4, 6, WIDTH), tokens()),
}


@case("a softmax with the largest of this rank's logits only", **TRAINED)
@found("forward", "loss", "output", "it is wrong")
def _(model, mesh, broken):
    split_loss(model, mesh, largest=not broken)


@case("a softmax over this rank's logits only", **TRAINED)
@found("forward", "loss", "output", "the ranks along 'tp' should hold the same and do not")
def _(model, mesh, broken):
    split_loss(model, mesh, sums=not broken)


@case("label smoothing over this rank's vocabulary only", **TRAINED)
@found("forward", "loss", "output", "it is wrong")
def _(model, mesh, broken):
    split_loss(model, mesh, whole_count=not broken)


# -- sequences that are split ------------------------------------------------------------------------------------------


def sequence_parallel(model, mesh, *, reduced=lambda name: True):
    """Split everything between the split modules over the sequence."""
    group = axis(mesh)[2]
    megatron(model, mesh)
    for block in model.blocks:
        for part in (block.attn, block.mlp):
            part.enter = lambda x: Gather.apply(x, 1, group)
            part.leave = lambda y: Scatter.apply(y, 1, group)
    first, last = model.blocks[0].forward, model.norm.forward
    model.blocks[0].forward = lambda x: first(Cut.apply(x, 1, group))
    model.norm.forward = lambda x: Collect.apply(last(x), 1, group)
    for name, parameter in model.named_parameters():
        if "norm" in name and reduced(name):
            parameter.register_hook(lambda grad: summed(grad, group))


class Cut(torch.autograd.Function):
    """Forward this rank's part along a dim, backward an all_gather."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return x.chunk(group.size(), dim)[group.rank()].clone()

    backward = Scatter.backward


@case("the gradient of a norm on a split sequence that nobody adds up")
@found("gradient", "blocks.1.norm2", "weight")
@says("parts of a sum over tp: nothing adds up the gradients", hint="all_reduce of gradients over tp")
def _(model, mesh, broken):
    sequence_parallel(model, mesh, reduced=lambda name: not (broken and name == "blocks.1.norm2.weight"))


@case("an all_gather whose backward keeps this rank's part without adding the others'", on=sequence_parallel)
@found("gradient", "blocks.1.mlp.up", "input", "parts of a sum over tp")
def _(model, mesh):
    group = axis(mesh)[2]
    model.blocks[1].mlp.enter = lambda x: Collect.apply(x, 1, group)


@case("an all_gather along the wrong dim", on=sequence_parallel)
@found("forward", "blocks.1.attn.q", "input")
@says("gathered over 'tp' along dim 0 instead of dim 1", hint="computed from blocks.1.attn.input.x, which is right")
def _(model, mesh):
    group = axis(mesh)[2]
    model.blocks[1].attn.enter = lambda x: Gather.apply(x, 0, group)
    model.blocks[1].attn.leave = lambda y: Scatter.apply(y, 0, group)


class Rotary(nn.Module):
    """Turns pairs of numbers by an angle that grows with the position."""

    first = 0

    def forward(self, x):
        angle = (self.first + torch.arange(x.shape[1], dtype=x.dtype))[:, None] / 10.0 ** torch.arange(x.shape[2] // 2)
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack(
            [even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1
        ).flatten(-2)


@made_of(
    lambda: {
        "first": 0,
        "rotary": Rotary(),
        "qkv": nn.Linear(WIDTH, 3 * WIDTH),
        "out": nn.Linear(WIDTH, WIDTH),
        "gathered": same,
    }
)
def ring(self, x):
    """One head of causal attention over a sequence that may be split."""
    q, k, v = self.qkv(x).chunk(3, -1)
    q, k = self.rotary(q), self.rotary(k)
    k, v = self.gathered(k), self.gathered(v)
    rows = self.first + torch.arange(q.shape[1])
    future = rows[:, None] < torch.arange(k.shape[1])
    weights = (q @ k.transpose(1, 2) / 4).masked_fill(future, -1e30).softmax(-1)
    return self.out(weights @ v)


def context_parallel(model, mesh, *, turned=True, masked=True, gather=Gather):
    rank, _, group = axis(mesh, "cp")
    model.rotary.first = 4 * rank if turned else 0
    model.first = 4 * rank if masked else 0
    model.gathered = lambda x: gather.apply(x, 1, group)
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: summed(grad, group))


class Twice(Gather):
    """Counts a gradient once per rank."""

    @staticmethod
    def backward(ctx, grad):
        return Gather.backward(ctx, grad * ctx.group.size())


SEQUENCE = {
    "model": ring,
    "inputs": (draw(2, 8, WIDTH),),
    "mesh": "cp=2",
    "options": {"input_layouts": [("None", "cp")]},
}


@case("rotary positions that start at 0 on every part of the sequence", **SEQUENCE)
@found("forward", "rotary", "output", "rank 1 (cp=1) is wrong, and the other one holds what it should")
def _(model, mesh, broken):
    context_parallel(model, mesh, turned=not broken)


@case("a causal mask of positions within the part of the sequence", **SEQUENCE)
@found("forward", "out", "input", "rank 1 (cp=1) is wrong, and the other one holds what it should")
def _(model, mesh, broken):
    context_parallel(model, mesh, masked=not broken)


@case("gathered keys and values whose gradients stay on their rank", **SEQUENCE)
@found("gradient", "rotary", "output", "rank 0 (cp=0) is wrong, and the other one holds what it should")
def _(model, mesh, broken):
    context_parallel(model, mesh, gather=Collect if broken else Gather)


@case("gathered keys and values whose gradients are counted once per rank", **SEQUENCE)
@found("gradient", "rotary", "output", "2 times what it should be: counted once per rank of 'cp'")
def _(model, mesh, broken):
    context_parallel(model, mesh, gather=Twice if broken else Gather)


# -- others ------------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Each token goes to one of four experts."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.weight = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)

    def forward(self, x):
        share, chosen = self.router(x).softmax(-1).max(-1)
        return share[..., None] * self.experts(x, chosen)

    def experts(self, x, chosen):
        return sum((chosen == expert)[..., None] * (x @ weight) for expert, weight in enumerate(self.weight))


@made_of(lambda: {"first": nn.Linear(WIDTH, WIDTH), "moe": Experts(), "last": nn.Linear(WIDTH, WIDTH)})
def routed(self, x):
    """Experts between two layers."""
    return self.last(x + self.moe(self.first(x).tanh()))


@case("tokens that go to experts by their number on the rank", mesh="ep=2", model=routed, inputs=(draw(4, 6, WIDTH),))
@found("forward", "moe", "output")
@says("all ranks hold the same, and it is wrong", hint="computed from moe.router.output, which is right")
def _(model, mesh, broken):
    rank, size, group = axis(mesh, "ep")
    take(model.moe, "weight", 0, rank, size)
    first = 0 if broken else 2 * rank

    def experts(x, chosen):
        x = Enter.apply(x, group)
        mine = enumerate(model.moe.weight, first)
        return Leave.apply(sum((chosen == expert)[..., None] * (x @ weight) for expert, weight in mine), group)

    model.moe.experts = experts


@case("one rank that breaks ties otherwise than the others", model=Tied, inputs=(draw(4, 6, WIDTH),))
@found("forward", "", "output", "rank 1 (tp=1) is wrong")
def _(model, mesh, broken):
    rounding(model, mesh, ranks=(1,) if broken else (0, 1))


@case("a choice between candidates that are further apart than rounding", model=Tied, inputs=(draw(4, 6, WIDTH),))
@found("forward", "", "output", "all ranks hold the same, and it is wrong")
def _(model, mesh, broken):
    rounding(model, mesh, off=1e-11 if broken else 1e-15)


@fault("a cast to bfloat16 on one path only")
@found("forward", "blocks.1.mlp.up", "output")
@says("computed it in bfloat16 or cast to it by hand, and one device did not", hint="autocast")
def _(model, mesh):
    up = model.blocks[1].mlp.up
    up.forward = lambda x: F.linear(x.bfloat16(), up.weight.bfloat16(), up.bias.bfloat16()).to(x.dtype)


@case(
    "weights cut over two axes in the wrong order",
    mesh="dp=2,tp=2",
    model=lambda: nn.Linear(WIDTH, 8, bias=False),
    inputs=(draw(4, WIDTH),),
    options={"declared": {"weight": (("dp", "tp"), "None")}},
)
@found("parameter", "", "weight", "declared (dp>tp, -), but the ranks hold (tp>dp, -)", hint="(('tp', 'dp'), 'None')")
def _(model, mesh, broken):
    dp, tp = mesh["dp"], mesh["tp"]
    here = (dp.get_local_rank(), tp.get_local_rank())
    take(model, "weight", 0, here[0] + 2 * here[1] if broken else 2 * here[0] + here[1], 4)

    def forward(x):
        return F.linear(x, Collect.apply(Collect.apply(model.weight, 0, tp.get_group()), 0, dp.get_group()))

    model.forward = forward
