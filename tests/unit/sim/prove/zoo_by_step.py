"""Training steps that are more than forward and backward, each right on ranks, and the faults that their authors make.

A step is called with a fault, "" for none; one device takes it without, and without communication.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from zoo_case import Program, add_program, fault
from zoo_kit import (
    Attention,
    Collect,
    Gather,
    Mlp,
    average,
    axis,
    draw,
    made_of,
    rank_of,
    same,
    split_part,
    squared,
    summed,
    take,
)

PROGRAMS: dict[str, Program] = {}
program = partial(add_program, PROGRAMS)
ROWS, WIDTH = 8, 4
X = draw(ROWS, WIDTH)
AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM


def parallel():
    return dist.is_initialized()


def mean(x):
    """The mean over the ranks."""
    return summed(x) / dist.get_world_size() if parallel() else x


def added(x):
    return summed(x) if parallel() else x


def on_last(fault, words):
    """Return True on the last rank of a program with such a fault."""
    return words in fault and rank_of() == 1


def tower(out=WIDTH):
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, out))


def nets(**widths):
    return lambda: nn.ModuleDict({name: tower(out) for name, out in widths.items()})


def flat(tensors):
    return torch.cat([each.detach().flatten() for each in tensors])


def put_back(whole, tensors):
    for each, part in zip(tensors, whole.split([each.numel() for each in tensors]), strict=True):
        each.data.copy_(part.view_as(each))


def sgd(module, lr=0.1):
    torch.optim.SGD(module.parameters(), lr=lr).step()
    module.zero_grad()


@program("micro-batches, weights that are clamped", tower, X)
@fault("losses that are added up whole", "forward", "the model's loss of step 1", "4 times what it should be")
@fault("another rate on the ranks", "update", "0.weight of step 1", "ranks 0-1 step with lr=0.2")
@fault("a bias that the optimizer forgets", "update", "2.bias of step 1")
@fault("weights that one rank does not clamp", "update", "2.weight of step 1", "rank 1 (dp=1) is wrong")
def _(model, batch, fault):
    parts, total = batch.chunk(2) if parallel() else [batch], 0.0
    for part in parts:
        loss = model(part).square().mean() / (1 if "whole" in fault else len(parts))
        loss.backward()
        total += loss.detach()
    average(model)
    named = model.named_parameters()
    held = [each for name, each in named if name != "2.bias" or "forgets" not in fault]
    torch.optim.SGD(held, lr=0.2 if "rate" in fault else 0.1).step()
    model.zero_grad()
    if not on_last(fault, "clamp"):
        model[2].weight.data.clamp_(-0.1, 0.1)
    return total


# -- gradients that change between backward and the optimizer ----------------------------------------------------------


def clip(module, most=0.05, over=same):
    norm = over(sum(each.grad.square().sum() for each in module.parameters())).sqrt()
    for each in module.parameters():
        each.grad *= (most / norm).clamp(max=1.0)


ADDED = "the gradients are off by 0.1 times the weights: by a decay or a penalty"


@program("a decay of weights in their gradients", tower, X, power=0)
@program("a sum of squares of weights in the loss", tower, X, power=2)
@program("a sum of sizes of weights in the loss", tower, X, power=1)
@fault("a decay that is added up", "gradient", "the gradient of 2.weight of", "2 times the decay of one device", of=0)
@fault("squares that are added up", "forward", "the model's loss of step 1", ADDED, of=2)
@fault("sizes that are added up", "forward", "the model's loss of step 1", "0.05 times the signs of the weights", of=1)
@fault(
    "a decay that ranks lack", "gradient", "the gradient of 2.weight of step 1", "lack the decay of one device", of=0
)
def _(model, batch, fault, power):
    """The losses of the ranks' rows are added up, and with them a part of what pulls weights to zero."""
    part = 0 if "lack" in fault else 1 if fault or not parallel() else 1 / 2
    loss = model(batch).square().sum() / (ROWS * WIDTH)
    for each in (model[0].weight, model[2].weight) if power else ():
        loss = loss + 0.05 * part * each.abs().pow(power).sum()
    loss.backward()
    for each in (model[0].weight, model[2].weight) if not power else ():
        each.grad += 0.1 * part * each.detach()
    summing(model)
    sgd(model)
    return loss


@program("a loss that is scaled", tower, X, most=1e6)
@program("a loss that is scaled, and clipping", tower, X, most=0.05)
@fault("a scale that stays", "gradient", "the gradient of 2.bias of step 1", "own by 0.001 after backward", of=1e6)
@fault("clipping before the scale", "gradient", "the gradient of 2.bias of step 1", "are 0.001 times", of=0.05)
def _(model, batch, fault, most):
    loss = model(batch).square().mean()
    (1000 * loss).backward()
    average(model)
    if "before" in fault:
        clip(model, most)
    for each in model.parameters() if "stays" not in fault else ():
        each.grad /= 1000
    if "before" not in fault:
        clip(model, most)
    sgd(model)
    return loss


@program("clipping by the norm of the mean", tower, X, most=0.05)
@program("clipping that not all need", tower, X, most=0.5)
@program("clipping by value", tower, X, most=0.02)
@fault("clipping before the mean", "gradient", "the gradient of 2.bias of step 1", "before they are reduced over 'dp'")
@fault("clipping before the sum", "gradient", "the gradient of 2.bias of step 1", "before they are reduced over 'dp'")
@fault("values before the mean", "gradient", "the gradient of 2.bias of step 1", "by value, to 0.02, before", of=0.02)
def _(model, batch, fault, most):
    loss = squared(model, batch)
    by_value = partial(nn.utils.clip_grad_value_, [*model.parameters()], most)
    limit = partial(clip, model, most) if most > 0.02 else by_value
    if fault:
        limit()
    (summing if "sum" in fault else average)(model)
    if not fault:
        limit()
    sgd(model)
    return loss


# -- ZeRO over flat buffers --------------------------------------------------------------------------------------------


@made_of(lambda name, *rows: {"net": (net := tower()), name: torch.zeros(*rows, flat(net.parameters()).numel())})
def beside(self, x):
    """A net, and a buffer as long as all its weights, of one row or several."""
    return self.net(x)


def halved(model, mesh, fault):
    model.momentum = model.momentum.chunk(2)[mesh.get_rank()].clone()


@program("ZeRO-1", partial(beside, "momentum"), X, parallelize=halved, stage=1)
@program("ZeRO-2", partial(beside, "momentum"), X, parallelize=halved, stage=2)
@fault("gradients of the rank's own rows", "update", "net.0.weight of step 1")
@fault("both ranks step over the first half", "update", "net.0.bias of step 1")
@fault("halves gathered in another order", "update", "net.0.weight of step 1")
@fault("weights that are not gathered", "update", "net.0.weight of step 1")
@fault("a momentum that one rank loses", "update", "net.0.bias of step 2")
def _(model, batch, fault, stage):
    held = list(model.net.parameters())
    loss = squared(model.net, batch)
    weights, grad = flat(held), flat([each.grad for each in held])
    at = 0 if "first half" in fault else rank_of()
    if parallel():
        whole, grad, weights = grad, grad.chunk(2)[at].clone(), weights.chunk(2)[at].clone()
        if "own rows" not in fault and (stage == 1 or "first half" in fault):
            grad = mean(whole).chunk(2)[at]
        elif "own rows" not in fault:
            dist.reduce_scatter_tensor(grad, whole, op=AVG)
    model.momentum.mul_(0 if on_last(fault, "loses") else 0.9).add_(grad)
    weights -= 0.1 * model.momentum
    if parallel():
        parts = [torch.empty_like(weights) for _ in range(2)]
        dist.all_gather(parts, weights)
        if "not gathered" in fault:
            parts = list(flat(held).chunk(2))
            parts[at] = weights
        weights = torch.cat(parts[::-1] if "another order" in fault else parts)
    put_back(weights, held)
    model.zero_grad()
    return loss


class Unshard(torch.autograd.Function):
    """Gather a flat parameter; backward scatters the mean of the gradients."""

    @staticmethod
    def forward(ctx, part, fault):
        ctx.fault, parts = fault, [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(parts, part)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        if ctx.fault == "gradients that keep this rank's part":
            return grad.chunk(2)[rank_of()].clone(), None
        part = torch.empty_like(grad[: len(grad) // 2])
        dist.reduce_scatter_tensor(part, grad, op=SUM if "added up" in ctx.fault else AVG)
        return part, None


class Unit(nn.Module):
    """A Linear whose weight and bias are one flat parameter, of which a rank has its half."""

    fault, held = "", None

    def __init__(self, out, inp):
        super().__init__()
        self.sizes, self.shape = [out * inp, out], (out, inp)
        self.flat = nn.Parameter(torch.randn(sum(self.sizes)) / inp)

    def forward(self, x):
        whole = Unshard.apply(self.flat, self.fault) if parallel() else self.flat
        if "stale" in self.fault:
            whole = self.held = whole if self.held is None else self.held.detach() + 0 * whole
        weight, bias = whole.split(self.sizes)
        return F.linear(x, weight.view(self.shape), bias)


def unsharded(model, mesh, fault):
    for unit in model[::2]:
        unit.flat, unit.fault = nn.Parameter(unit.flat.detach().chunk(2)[mesh.get_rank()].clone()), fault


def flattened(model, mesh, fault):
    for at in (0, 2):
        whole = flat(model[at].parameters())
        model[at] = Unit(*model[at].weight.shape)
        model[at].flat = nn.Parameter(whole.chunk(2)[mesh.get_rank()].clone())


@program("ZeRO-3 whose flat shards are of whole weights", tower, X, parallelize=flattened, faults={})
@program(
    "ZeRO-3 of flat weights", lambda: nn.Sequential(Unit(6, WIDTH), nn.Tanh(), Unit(WIDTH, 6)), X, parallelize=unsharded
)
@fault("gradients that keep this rank's part", "gradient", "the gradient of 2.flat of step 1")
@fault("gradients that are added up", "gradient", "the gradient of 2.flat of step 1", "2 times")
@fault("stale weights in the second step", "forward", "0.output of step 2")
def _(model, batch, fault):
    loss = squared(model, batch)
    sgd(model)
    return loss


@program("ZeRO-3 with clipping", lambda: Unit(6, WIDTH), X, parallelize=lambda *args: unsharded([args[0]], *args[1:]))
@fault("the norm of the rank's part", "gradient", "the gradient of the model's flat", "of its own parts, not of all")
def _(model, batch, fault):
    loss = squared(model, batch)
    clip(model, over=same if fault else added)
    sgd(model)
    return loss


# -- rows of the batch -------------------------------------------------------------------------------------------------


ALIKE = "ranks 0-1 have rows 0, 2 of the batch; no rank has rows 1, 3"
OTHERS = "rank 0 has rows 0, 2 of the batch; rank 1 has 2 rows of another step's batch; no rank has rows 1, 3"


@program("a sampler of rows", tower, X, mesh="ranks=2")
@fault("a sampler without the rank", "forward", "the model's input of step 1", ALIKE)
@fault("a sampler of another epoch", "forward", "the model's input of step 1", "and 1 row of another step's batch")
@fault("a sampler at another position", "forward", "the model's input of step 1", OTHERS)
def _(model, batch, fault):
    """The first half of a shuffled epoch, then the other one, each dealt to the ranks."""
    model.count = getattr(model, "count", -1) + 1
    order = torch.arange(len(batch)) * 3 % len(batch)
    half = (order.roll(2) if on_last(fault, "epoch") else order).chunk(2)[model.count % 2 - on_last(fault, "position")]
    loss = squared(model, batch[half[0 if "without" in fault else rank_of() :: 2 if parallel() else 1]])
    average(model)
    sgd(model)
    return loss


@program("a dict with a metric of unequal rows", tower, X[:7], result=lambda **each: each)
@program("a tuple with a metric of unequal rows", tower, X[:7], result=lambda loss, **each: (loss, *each.values()))
@fault("a mean of means", "forward", "the model's result", "all ranks hold the same, and it is wrong")
def _(model, batch, fault, result):
    """The losses of the ranks' rows are added up; the rate and the rows of each are its own."""
    error = model(batch).square().sum(-1)
    loss = error.sum() / 7
    loss.backward()
    summing(model)
    metric = mean(error.detach().mean()) if fault else added(error.detach().sum()) / added(torch.tensor(len(batch)))
    sgd(model)
    return result(loss=loss, error=metric, rate=0.1 * (1 + parallel()), rows=len(batch), own=error.detach().mean())


# -- weights that are split --------------------------------------------------------------------------------------------


def by_columns_and_rows(model, mesh, fault):
    split_part(model, (model.up,), model.down, *axis(mesh))
    if fault:
        del model.down.forward


BIASES = "'tp' is the reference plus down.bias once more: each of the 2 ranks adds it"


@program("tensor parallelism", partial(Mlp, WIDTH, 6), X, parallelize=by_columns_and_rows, mesh="tp=2")
@fault("a bias on each rank", "forward", "down.output of step 1", BIASES)
def _(model, batch, fault):
    loss = squared(model, batch)
    sgd(model)
    return loss


def by_heads(model, mesh, fault):
    """Split four heads over four ranks; two of them share a head of keys and values."""
    pairs = [dist.new_group([at, at + 1]) for at in (0, 2)]
    rank, size, group = axis(mesh)
    split_part(model, (model.q,), model.o, rank, size, group)
    for each in (model.k, model.v):
        take(each, "weight", 0, rank // 2, 2)
        take(each, "bias", 0, rank // 2, 2)
    model.held = [] if fault else [*model.k.parameters(), *model.v.parameters()]
    model.pair = pairs[rank // 2]


@program("shared heads of keys", Attention, draw(2, 3, 16), parallelize=by_heads, mesh="tp=4")
@fault("gradients of heads that are not added up", "gradient", "the gradient of", "the ranks that have the same part")
def _(model, batch, fault):
    loss = squared(model, batch)
    for each in model.held if parallel() else ():
        dist.all_reduce(each.grad, group=model.pair)
    sgd(model)
    return loss


# -- second models -----------------------------------------------------------------------------------------------------


class Followed(nn.Module):
    """A net and a copy of it, which follows."""

    def __init__(self):
        super().__init__()
        self.net = tower()
        self.copy = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("count", torch.zeros(()))

    def follow(self, rate, names=("0.weight", "0.bias", "2.weight", "2.bias")):
        for name, mine in self.copy.named_parameters():
            if name in names:
                mine.lerp_(self.net.get_parameter(name).detach(), rate)


@program("EMA", Followed, X)
@fault("an average on the first rank alone", "update", "copy.0.weight of step 1", "rank 1 (dp=1) is wrong")
@fault("an average of the weights before the step", "update", "copy.0.weight of step 1")
@fault("an average of the rank's own shard", "update", "copy.0.weight of step 1", "rank 1 (dp=1) is wrong")
def _(model, batch, fault):
    loss = squared(model.net, batch)
    average(model.net)
    if "before the step" in fault:
        model.follow(0.1)
    sgd(model.net)
    own = {"names": (("0.weight", "0.bias"), ("2.weight", "2.bias"))[rank_of()]} if "shard" in fault else {}
    if "before the step" not in fault and not on_last(fault, "alone"):
        model.follow(0.1, **own)
    return loss


@program("SWA", Followed, X)
@fault("a count of each rank", "buffer", "count of step 1", "rank 1 (dp=1) is wrong")
@fault("a step that one rank leaves out", "update", "copy.0.weight of step 2", "rank 1 (dp=1) is wrong")
def _(model, batch, fault):
    loss = squared(model.net, batch)
    average(model.net)
    sgd(model.net)
    if not (on_last(fault, "leaves out") and model.count == 1):
        model.follow(1 / (model.count + 2))
    model.count += 2 if on_last(fault, "count") else 1
    return loss


@program("a target network", Followed, X)
@fault("a target that one rank does not set", "update", "copy.0.weight of step 1", "rank 1 (dp=1) is wrong")
@fault("a target with gradients", "gradient", "the gradient of net.2.bias of step 1")
def _(model, batch, fault):
    aim = 1 + 0.9 * (model.net if "gradients" in fault else model.copy)(batch.roll(1, -1)).amax(-1)
    loss = F.mse_loss(model.net(batch).amax(-1), aim)
    loss.backward()
    average(model.net)
    sgd(model.net)
    if not on_last(fault, "does not set"):
        model.follow(1.0)
    return loss.detach()


# -- losses that see the rows of all ranks -----------------------------------------------------------------------------


@made_of(lambda: {"one": tower(), "other": tower(), "scale": nn.Parameter(torch.tensor(1.5))})
def towers(self, x):
    """Two views of a row, each through a tower of its own, and a temperature."""
    return F.normalize(self.one(x), dim=-1), F.normalize(self.other(x.sin()), dim=-1)


def contrasted(model, mine, theirs, first):
    """The sum of the losses of some rows beside all others."""
    return F.cross_entropy(model.scale.exp() * mine @ theirs.T, torch.arange(len(mine)) + first, reduction="sum")


def summing(module, op=SUM):
    for parameter in module.parameters() if parallel() else ():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=op)


@program("negatives gathered with their gradient", towers, X)
@fault("a gradient that stays on its rank", "gradient", "the gradient of the model's output.1 of step 1")
@fault("gradients that are averaged", "gradient", "the gradient of other.2.bias of step 1", "1/2")
@fault("own negatives", "forward", "the model's loss of step 1", "neither the mean nor the sum")
def _(model, batch, fault):
    mine, theirs = model(batch)
    first = rank_of() * len(mine)
    if parallel() and fault == "own negatives":
        first = 0
    elif parallel():
        theirs = (Collect if "stays" in fault else Gather).apply(theirs, 0, dist.group.WORLD)
    loss = contrasted(model, mine, theirs, first) / ROWS
    loss.backward()
    summing(model, AVG if "averaged" in fault else SUM)
    sgd(model)
    return loss


@program("negatives gathered without their gradient", towers, X)
@fault("rows that are not put back", "gradient", "the gradient of other.2.bias of step 1")
@fault("a gradient that counts once per rank", "gradient", "the gradient of other.2.bias of step 1", "2 times")
@fault("rows put back in another place", "forward", "the model's loss of step 1", "neither the mean nor")
def _(model, batch, fault):
    """Each rank has the loss of all rows, and the gradient of its own."""
    both = model(batch)
    if parallel():
        parts = [list(summed(F.pad(each.detach(), (0, 0, 4 * rank_of(), 4 - 4 * rank_of()))).split(4)) for each in both]
        for every, own in zip(parts, both, strict=True):
            if "not put back" not in fault or own is both[0]:
                every[1 - rank_of() if "another place" in fault else rank_of()] = own
        both = [torch.cat(every) for every in parts]
    loss = contrasted(model, *both, 0) / ROWS
    loss.backward()
    model.scale.grad /= 2 if parallel() else 1  # every rank has all of it
    if "once per rank" in fault:
        for parameter in (*model.one.parameters(), *model.other.parameters()):
            parameter.grad *= 2
    summing(model)
    sgd(model)
    return loss.detach()


CLASSES = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


@program("a triplet loss of the hardest rows", tower, (X, CLASSES))
@fault("the hardest of the rank's own rows", "forward", "the model's loss of step 1", "neither the mean nor the sum")
@fault("classes that are not gathered in the same order", "forward", "the model's loss of step 1")
@fault("a gradient of the gathered that is lost", "gradient", "the gradient of 2.output of step 1")
def _(model, batch, fault):
    mine, named = model(batch[0]), batch[1]
    every, names = mine, named
    if parallel() and "own rows" not in fault:
        every = Gather.apply(mine, 0, dist.group.WORLD)
        every = every.detach() if "lost" in fault else every
        names = Gather.apply(named, 0, dist.group.WORLD)
        names = names.view(2, -1).flip(0).flatten() if "order" in fault else names
    apart = (mine[:, None] - every).square().sum(-1)
    same = named[:, None] == names
    far, near = apart.masked_fill(~same, -1).amax(1), apart.masked_fill(same, 1e6).amin(1)
    loss = F.softplus(far - near).sum() / ROWS
    loss.backward()
    summing(model)
    sgd(model)
    return loss.detach()


# -- several models and optimizers -------------------------------------------------------------------------------------


def kept(model, make):
    """The optimizers of a model, made in its first step."""
    return model.__dict__.setdefault("optimizers", make())


@program("two optimizers", tower, X)
@fault("a second optimizer that one rank does not step", "update", "2.weight of step 1", "rank 1 (dp=1) is wrong")
@fault("a weight that both step", "update", "2.weight of step 1")
@fault("a rate of the second that one rank decays", "update", "2.weight of step 2", "rank 1 (dp=1) is wrong")
@fault("gradients that nobody clears", "gradient", "the gradient of 2.bias of step 2")
def _(model, batch, fault):
    late = [*(model.parameters() if "both" in fault else model[0].parameters())]
    body, head = kept(model, lambda: (torch.optim.SGD(late, lr=0.1), torch.optim.AdamW(model[2].parameters(), lr=1e-2)))
    loss = squared(model, batch)
    average(model)
    body.step()
    if not on_last(fault, "does not step"):
        head.step()
    if on_last(fault, "decays"):
        head.param_groups[0]["lr"] *= 0.5
    if "clears" not in fault:
        model.zero_grad()
    return loss


@program("a GAN", nets(maker=WIDTH, judge=1), (X, draw(ROWS, WIDTH, seed=1)))
@fault("a generator whose gradients are not averaged", "gradient", "the gradient of maker.2.bias", "nothing reduced it")
@fault("gradients of the first loss left in the second", "gradient", "the gradient of judge.2.bias")
@fault("a generator that the second loss trains", "gradient", "the gradient of maker.2.bias of step 1")
@fault("a discriminator with another rate", "update", "judge.0.weight", "rank 1 steps with lr=0.2")
@fault("another rate of the discriminator, in its first step", "update", "judge.0.weight of step 1", "lr=0.2")
def _(model, batch, fault):
    real, noise = batch
    maker, judge = model["maker"], model["judge"]
    made_by, judged_by = kept(model, lambda: [torch.optim.SGD(each.parameters(), lr=0.1) for each in (maker, judge)])
    if "rate" in fault and rank_of():
        judged_by.param_groups[0]["lr"] = 0.2
    first = F.softplus(-judge(maker(noise))).mean()
    first.backward()
    if "not averaged" not in fault:
        average(maker)
    made_by.step()
    (maker if "left" in fault else model).zero_grad()
    made = maker(noise) if "loss trains" in fault else maker(noise).detach()
    second = F.softplus(-judge(real)).mean() + F.softplus(judge(made)).mean()
    second.backward()
    average(judge)
    judged_by.step()
    if "loss trains" in fault:
        average(maker)
        made_by.step()
    model.zero_grad()
    return (first + second).detach()


@program("an actor and a critic", nets(actor=3, critic=1), (X, torch.arange(ROWS) % 3, draw(ROWS, seed=2)))
@fault("advantages by the rank's own mean", "forward", "the model's loss of step 1")
@fault("a critic that the policy's loss trains", "gradient", "the gradient of critic.2.output of step 1")
@fault(
    "a critic that one rank leaves as it is", "gradient", "the gradient of critic.2.bias of step 1", "rank 1 has none"
)
def _(model, batch, fault):
    state, action, reward = batch
    value = model["critic"](state)[:, 0]
    better = reward - (value if "trains" in fault else value.detach())
    sums = torch.stack([better.detach().sum(), better.detach().square().sum()])
    middle, square = (added(sums) if "own mean" not in fault else sums * (2 if parallel() else 1)) / ROWS
    better = (better - middle) / (square - middle.square()).sqrt()
    chance = model["actor"](state).log_softmax(-1).gather(-1, action[:, None])[:, 0]
    loss = F.mse_loss(value, reward) - (better * chance).mean()
    loss.backward()
    average(model)
    if on_last(fault, "leaves"):
        model["critic"].zero_grad()
    sgd(model)
    return loss.detach()


class Routed(nn.Module):
    """Rows go to the expert of the best score and bias; the bias follows the load."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("bias", torch.linspace(-0.1, 0.1, 3))
        self.load = None

    def forward(self, x):
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).argmax(-1)
        hit = F.one_hot(chosen, 3).to(x.dtype)
        self.load = hit.sum(0)
        return sum((hit * scores)[:, at, None] * expert(x) for at, expert in enumerate(self.experts))


@program("a bias of experts that follows their load", Routed, X)
@fault("the load of the rank's own rows", "buffer", "bias of step 1")
@fault("a bias that one rank does not change", "buffer", "bias of step 1", "rank 1 (dp=1) is wrong")
@fault("a bias with the other sign", "buffer", "bias of step 1")
def _(model, batch, fault):
    loss = squared(model, batch)
    average(model)
    sgd(model)
    load = model.load if "own rows" in fault else added(model.load)
    way = (load.mean() - load).sign()
    if not on_last(fault, "does not change"):
        model.bias += -0.1 * way if "other sign" in fault else 0.1 * way
    return loss


# -- what ranks send less of, or less often ----------------------------------------------------------------------------


def own_row(model, mesh, fault):
    """Keep this worker's row of what is not sent yet."""
    model.kept = model.kept[mesh.get_rank()][None].clone()


def largest(grad, count=9):
    """A gradient's largest elements."""
    return torch.zeros_like(grad).scatter(0, (at := grad.abs().topk(count).indices), grad[at])


@program("the largest gradients, the rest next time", partial(beside, "kept", 2), X, parallelize=own_row)
@fault("a rest that one rank forgets", "buffer", "kept of step 1", "rank 1 (dp=1)")
@fault("a rest that one rank does not add", "update", "net.0.weight of step 2")
@fault("the largest of the mean", "update", "net.0.weight of step 1")
@fault("the largest that are added up", "update", "net.0.weight of step 1")
def _(model, batch, fault):
    """One device is both workers, one after the other."""
    held, sent, losses = list(model.net.parameters()), [], []
    for part, kept in zip(batch.chunk(len(model.kept)), model.kept, strict=True):
        losses.append(squared(model.net, part))
        grad = flat([each.grad for each in held]) + (0 if on_last(fault, "does not add") else kept)
        model.zero_grad()
        sent.append(largest(mean(grad) if "mean" in fault else grad))
        kept.copy_(grad - sent[-1])
    if on_last(fault, "forgets"):
        model.kept.zero_()
    whole = mean(sum(sent) / len(sent)) * (2 if "added up" in fault else 1)
    put_back(flat(held) - 0.1 * whole, held)
    return sum(losses).detach() / len(losses)


class Workers(nn.Module):
    """The nets of two workers, who differ between rounds; where a round began; the momentum of the outer optimizer."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(2 * [tower()])
        self.nets[1] = copy.deepcopy(self.nets[0])
        self.register_buffer("start", flat(self.nets[0].parameters()))
        self.register_buffer("momentum", torch.zeros_like(self.start))
        self.count = 0


def own_net(model, mesh, fault):
    model.nets[1 - mesh.get_rank()] = None


def nesterov(model, new, forgets):
    change = model.start - new
    model.momentum.mul_(0 if forgets else 0.9).add_(change)
    return model.start - 0.7 * (change + 0.9 * model.momentum)


@program("local SGD", Workers, X, parallelize=own_net, outer=lambda model, new, forgets: new)
@program("DiLoCo", Workers, X, parallelize=own_net, outer=nesterov, steps=4)
@fault("gradients that are averaged", "gradient", "the gradient of nets.1.2.bias of step 1", "rank 1 holds")
@fault("a worker that steps further", "update", "nets.1.0.weight of step 1", "rank 1 steps with lr=0.2")
@fault("a worker that keeps its weights", "update", "nets.1.0.weight of step 2", "rank 1 alone has it, and it is wrong")
@fault("weights that are added up", "update", "nets.0.0.weight of step 2")
@fault("a momentum that one rank forgets", "update", "nets.1.0.weight of step 4", "rank 1 holds", of=nesterov)
def _(model, batch, fault, outer):
    """A step of each worker on its own rows, and after every second one the mean of both; one device has both."""
    nets = [each for each in model.nets if each is not None]
    losses = [squared(net, part) / len(nets) for net, part in zip(nets, batch.chunk(len(nets)), strict=True)]
    if "gradients" in fault:
        average(model)
    sgd(model, lr=0.2 if on_last(fault, "further") else 0.1)
    model.count += 1
    if model.count % 2 == 0:
        new = (added if "added up" in fault else mean)(sum(flat(net.parameters()) for net in nets) / len(nets))
        model.start = outer(model, new, on_last(fault, "forgets"))
        for net in nets if not on_last(fault, "keeps") else ():
            put_back(model.start, list(net.parameters()))
    return sum(losses).detach()


@program("local SGD, a round in one step", tower, X)
def _(net, batch, fault):
    """One device is both workers, one after the other."""
    held, parts, found = list(net.parameters()), [batch] if parallel() else batch.chunk(2), []
    start = flat(held)
    for part in parts:
        put_back(start, held)
        for _ in range(2):
            loss = squared(net, part)
            sgd(net)
        found.append(flat(held))
    put_back(mean(sum(found) / len(found)), held)
    return loss.detach()


NOT_PROVED = {
    "ZeRO-3 whose flat shards are of whole weights": "values are compared by shape, so that flat ones have no name",
    "local SGD, a round in one step": "a step that calls its model more often on one device is none of the ranks'",
}


# -- sizes that depend on data -----------------------------------------------------------------------------------------


@made_of(lambda: {
    "first": nn.Linear(WIDTH, WIDTH), "router": nn.Linear(WIDTH, 4, bias=False), "last": nn.Linear(WIDTH, WIDTH),
    "experts": nn.ModuleList(tower() for _ in range(4)),
})  # fmt: skip
def routed(self, x):
    return x


def exchanged(x, outs, ins):
    return all_to_all_single_autograd(x, outs, ins, dist.group.WORLD) if parallel() else x


@program("experts in a loop, each on a rank of its own", routed, X)
@fault("tokens that return to other rows", "forward", "last.input of step 1")
@fault("weights of other tokens", "forward", "last.input of step 1")
@fault("rows of the next expert", "forward", "experts.0.input of step 1")
@fault("experts whose gradients are added up", "gradient", "the gradient of experts.3.2.bias", "2 times what it should")
def _(model, batch, fault):
    ranks = dist.get_world_size() if parallel() else 1
    x = model.first(batch)
    weights, chosen = model.router(x).softmax(-1).topk(2)
    order, counts = chosen.flatten().argsort(stable=True), chosen.flatten().bincount(minlength=4)
    got = counts.clone()
    if parallel():
        dist.all_to_all_single(got, counts)
    ins, outs = (each.view(ranks, -1).sum(1).tolist() for each in (counts, got))
    held = exchanged(x[order // 2], outs, ins)
    which = torch.arange(4).remainder(4 // ranks).repeat_interleave(got)
    made, first = torch.zeros_like(held), rank_of() * 4 // ranks if parallel() else 0
    for at in range(4 // ranks):
        rows = (which == at).nonzero().flatten()
        expert = model.experts[first + at ^ ("next expert" in fault)]
        made = made.index_copy(0, rows, expert(held[rows]))
    back = exchanged(made, ins, outs)
    weights = weights.flatten() if "weights" in fault else weights.flatten()[order]
    places = order % len(x) if "other rows" in fault else order // 2
    out = model.last(torch.zeros_like(x).index_add(0, places, back * weights[:, None]))
    loss = out.square().mean()
    loss.backward()
    for name, each in model.named_parameters() if parallel() else ():
        each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        dist.all_reduce(each.grad, op=SUM if "experts" in name and "added up" in fault else AVG)
    sgd(model)
    return loss


@program("tokens that are dropped beyond a capacity", routed, X)
@fault("a capacity that counts the rows of all ranks", "forward", "experts.0.input of step 1")
@fault("tokens that are dropped from the other end", "forward", "experts.0.input of step 1")
def _(model, batch, fault):
    """Each expert takes one token of the rows of a rank."""
    x, most = model.first(batch), 2 if "all ranks" in fault else 1
    weights, chosen = model.router(x).softmax(-1).max(-1)
    out = torch.zeros_like(x)
    for at, expert in enumerate(model.experts):
        there = [each[chosen[each] == at] for each in torch.arange(len(x)).split(ROWS // 2)]
        rows = torch.cat([each[-most:] if "other end" in fault else each[:most] for each in there])
        out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
    loss = model.last(out).square().mean()
    loss.backward()
    average(model)
    sgd(model)
    return loss
