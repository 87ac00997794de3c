"""Broken data parallelism: DDP, FSDP2, fully_shard and hsdp, and losses, optimizers and buffers that do not fit."""

from __future__ import annotations

import warnings
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor
from zoo_case import Case, found, register, says
from zoo_kit import WIDTH, Net, axis, ddp, draw, made_of, megatron, same, summed, tokens

from hyper_parallel import fully_shard, hsdp
from hyper_parallel.core.fully_shard.utils import MixedPrecisionPolicy as Policy

CASES: list[Case] = []
case = register(CASES)

ROWS = {"input_layouts": [("dp", "None")]}
"""Ranks along dp have rows of their own."""


def mean(logits, ids):
    """The loss of a language model whose ids are its targets too."""
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


TRAINED = {"mesh": "dp=2", "options": {**ROWS, "loss_fn": mean}}


def unsynced(model, **options):
    """DDP that leaves buffers alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, **options)


def units(wrap, model, mesh):
    """Wrap each block, then the rest."""
    for block in model.blocks:
        wrap(block, mesh=mesh)
    return wrap(model, mesh=mesh)


# -- losses ------------------------------------------------------------------------------------------------------------


@case(
    "a loss that is divided by dp where gradients are averaged too",
    mesh="dp=2",
    varied=lambda broken: {
        "input_layouts": ROWS["input_layouts"],
        "loss_fn": lambda y, ids: mean(y, ids) / (dist.get_world_size() if broken and dist.is_initialized() else 1),
    },
)
@found("gradient", "embed", "weight", "1/2 of what it should be", "averaged once too often over 'dp'")
def _(model, mesh, broken):
    return ddp(model)


class Averaged(torch.autograd.Function):
    """The mean over all ranks; its gradient is added up over them, as torch.distributed.nn does."""

    @staticmethod
    def forward(ctx, x):
        return average(x)

    @staticmethod
    def backward(ctx, grad):
        return average(grad)


def undivided(model, mesh):
    for unit in (model, *model.blocks):
        unit.set_gradient_divide_factor(1.0)


case(
    "a loss that is averaged over dp, and gradients that are added up",
    mesh="dp=2",
    options={**ROWS, "loss_fn": lambda y, ids: Averaged.apply(mean(y, ids)) if dist.is_initialized() else mean(y, ids)},
    on=partial(units, fsdp2),
)(found("gradient", "head", "output", "2 times what it should be", "counted once per rank of 'dp'")(undivided))


def padded(broken):
    """Not all tokens count, and not as many on each rank."""

    def loss(logits, ids):
        lost = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), ignore_index=0, reduction="sum")
        count = (ids != 0).sum()
        ranks = 1
        if dist.is_initialized() and not broken:
            ranks = dist.get_world_size()
            dist.all_reduce(count)
        return lost * ranks / count

    return {**ROWS, "loss_fn": loss}


@case(
    "a mean of local means where ranks have different numbers of tokens",
    mesh="dp=2",
    inputs=(torch.cat([tokens(2), tokens(2) * torch.tensor([1, 0, 1, 0, 0, 0])]),),
    varied=padded,
)
@found("forward", "", "loss", "neither the mean nor the sum of the ranks' losses is that of the whole batch")
def _(model, mesh, broken):
    return ddp(model)


# -- gradients ---------------------------------------------------------------------------------------------------------


@case("a last backward without synchronisation", **TRAINED)
@found("gradient", "embed", "weight", "nothing adds up the gradients", hint="over dp")
def _(model, mesh, broken):
    model = ddp(model)
    model.require_backward_grad_sync = not broken
    return model


@case(
    "replicas of shards whose gradients are not reduced",
    mesh="replicate=2,shard=2",
    options={"input_layouts": [(("replicate", "shard"), "None")], "loss_fn": mean},
    on=partial(units, fsdp2),
)
@found("gradient", "blocks.1.norm1", "weight", "no rank has a gradient, and one device has")
def _(model, mesh):
    model.blocks[1].set_requires_all_reduce(False)


@case("shards along the axis on which the data is the same", mesh="dp=2,tp=2", options={**ROWS, "loss_fn": mean})
@found("gradient", "embed", "weight", "parts of an average over dp: nothing adds up the gradients", hint="over dp")
def _(model, mesh, broken):
    return units(fsdp2, model, mesh["tp" if broken else "dp"])


@case("a block that is in no unit, and whose gradients stay on their rank", **TRAINED)
@found("gradient", "blocks.1.norm2", "weight", "over dp")
def _(model, mesh, broken):
    norm = model.blocks[1].norm2
    ignored = list(norm.parameters()) if broken else []
    units(partial(fully_shard, ignored_params=ignored), model, mesh)


# -- mixed precision ---------------------------------------------------------------------------------------------------

BF16 = torch.bfloat16


def mixed(wrap, model, mesh):
    """Units that compute in bfloat16 and add up gradients in float32."""
    policy = (MixedPrecisionPolicy if wrap is fsdp2 else Policy)(param_dtype=BF16, reduce_dtype=torch.float32)
    units(partial(wrap, mp_policy=policy), model, mesh)


case("gradients of bfloat16 units that are added up, where a mean is meant", on=partial(mixed, fsdp2), **TRAINED)(
    found("gradient", "embed", "weight", "2 times what it should be")(undivided)
)


@case(
    "gradients of a bfloat16 unit on one rank that are a hundredth too large", on=partial(mixed, fully_shard), **TRAINED
)
@found("gradient", "blocks.1.norm1", "weight", "rank 1 (dp=1) is wrong")
def _(model, mesh):
    if dist.get_rank() == 1:
        for parameter in model.blocks[1].parameters():
            parameter.register_hook(lambda grad: grad * 1.01)


class Cast(Net):
    """A model under autocast."""

    def forward(self, ids):
        with torch.autocast("cpu", BF16):
            return super().forward(ids).float()


@case(
    "no reduction after a row-split weight, under autocast", model=Cast, options={"dtype": torch.float32}, on=megatron
)
@found("forward", "blocks.0.mlp.down", "output", "parts of a sum over tp", "nothing reduced it", hint="all_reduce")
def _(model, mesh):
    model.blocks[0].mlp.leave = lambda y: y


@case("a bfloat16 all_reduce that also divides")
@found("forward", "blocks.1.mlp", "output", "averaged once too often over 'tp'")
def _(model, mesh, broken):
    megatron(model, mesh)
    group, size = axis(mesh)[2], axis(mesh)[1]

    class Low(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return summed(y.to(BF16), group).to(y.dtype) / (size if broken else 1)

        @staticmethod
        def backward(ctx, grad):
            return grad

    model.blocks[1].mlp.leave = Low.apply


# -- optimizers --------------------------------------------------------------------------------------------------------


class Sgd(torch.optim.SGD):
    """Plain steps, with something before them."""

    def __init__(self, params, before):
        super().__init__(params, lr=0.1)
        self.before = before

    def step(self, closure=None):
        self.before([parameter for group in self.param_groups for parameter in group["params"]])
        super().step(closure)


def optimizer(before):
    """Options with steps that have something before them, broken or not."""
    return lambda broken: {
        **ROWS,
        "loss_fn": mean,
        "optimizer_fn": lambda params: Sgd(params, lambda ps: before(ps, broken)),
    }


def clip(params, broken):
    local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in params]
    square = sum(grad.square().sum() for grad in local)
    if dist.is_initialized() and not broken:
        dist.all_reduce(square)
    for grad in local:
        grad.mul_(0.1 / square.sqrt())


@case("gradients that are clipped by the norm of this rank's shards", mesh="dp=2", varied=optimizer(clip))
@found("update", "embed", "weight")
@says(
    "declared (dp, -), and rank 1 holds", "x the bound", hint="its gradient is right: look at what the optimizer does"
)
def _(model, mesh, broken):
    return units(fully_shard, model, mesh)


def decay(params, broken):
    if not broken or not dist.is_initialized() or dist.get_rank() == 0:
        for parameter in params:
            parameter.data.mul_(0.9)


@case("weight decay on one rank only", mesh="dp=2", varied=optimizer(decay))
@found("update", "embed", "weight")
@says(
    "rank 1 (dp=1) is wrong, and the other one holds what it should",
    hint="its gradient is right: look at what the optimizer does",
)
def _(model, mesh, broken):
    return ddp(model)


def skip(params, broken):
    if broken and dist.is_initialized() and dist.get_rank() == 1:
        for parameter in params:
            if parameter.shape == (WIDTH,):
                parameter.grad = None


@case("norm weights that are updated on one rank only", mesh="dp=2", varied=optimizer(skip))
@found("update", "blocks.0.norm1", "weight")
@says(
    "rank 1 (dp=1) is wrong, and the other one holds what it should",
    hint="its gradient is right: look at what the optimizer does",
)
def _(model, mesh, broken):
    return ddp(model)


class Masters(torch.optim.SGD):
    """Steps on copies that are written back to the parameters."""

    def __init__(self, params, back):
        self.own, self.back = list(params), back
        super().__init__([parameter.detach().clone().requires_grad_() for parameter in self.own], lr=0.1)

    def step(self, closure=None):
        copies = self.param_groups[0]["params"]
        for own, copy in zip(self.own, copies, strict=True):
            copy.grad = own.grad
        super().step(closure)
        for own, copy in zip(self.own, copies, strict=True):
            if self.back:
                own.data.copy_(copy.data)

    def zero_grad(self, set_to_none=True):
        for own in self.own:
            own.grad = None


@case(
    "a step on a copy of the weights that is never written back",
    mesh="dp=2",
    varied=lambda broken: {
        **ROWS,
        "loss_fn": mean,
        "optimizer_fn": lambda params: Masters(params, not (broken and dist.is_initialized())),
    },
)
@found("update", "embed", "weight", "no rank has changed it, one device has")
def _(model, mesh, broken):
    for block in model.blocks:
        hsdp(block, threshold=0)
    hsdp(model, threshold=0)


# -- what ranks hold and see -------------------------------------------------------------------------------------------


@case("the same rows on all ranks along dp", mesh="dp=2")
@found("forward", "", "input ids")
@says("the ranks along 'dp' hold the same values where each should hold its own part: all hold the first one's")
def _(model, mesh, broken):
    rank = 0 if broken else mesh.get_local_rank()
    model.register_forward_pre_hook(lambda module, args: args[0].chunk(2)[rank])
    for parameter in model.parameters():
        parameter.register_hook(summed)


@case("weights that one rank has loaded in another order", **TRAINED)
@found("parameter", "blocks.0.mlp.up", "weight", "rank 1 (dp=1)")
def _(model, mesh, broken):
    if broken and dist.get_rank() == 1:
        first, second = (block.mlp.up.weight for block in model.blocks)
        first.data, second.data = second.data.clone(), first.data.clone()
    return nn.parallel.DistributedDataParallel(model, init_sync=False)


@made_of(lambda: {"size": torch.ones(()), "all": same})
def scaled(self, x):
    """Divides by a running size of what it sees, as of the step before."""
    y = x / self.size.clone()
    with torch.no_grad():
        self.size.mul_(0.9).add_(0.1 * self.all(x.detach().abs().mean()))
    return y


@made_of(lambda: {"first": nn.Linear(WIDTH, WIDTH), "scale": scaled(), "last": nn.Linear(WIDTH, WIDTH)})
def buffered(self, x):
    """Two layers with a buffer between."""
    return self.last(self.scale(self.first(x)))


BUFFERED = {"mesh": "dp=2", "model": buffered, "inputs": (draw(4, WIDTH),)}


def average(x):
    return summed(x) / dist.get_world_size()


@case("a buffer that is not broadcast", options=ROWS, **BUFFERED)
@found("buffer", "scale", "size")
@says(
    "rank 1 (dp=1) is wrong, and the other one holds what it should",
    hint="a broadcast of it, or the same change on all ranks",
)
def _(model, mesh, broken):
    if broken and dist.get_rank() == 1:
        model.scale.size.fill_(1.5)
    model.scale.all = average
    return unsynced(model, init_sync=False)


@case("a replicated buffer that one rank changes in place", options=ROWS, **BUFFERED)
@found("buffer", "scale", "size after forward")
@says(
    "rank 1 (dp=1) is wrong, and the other one holds what it should",
    hint="a broadcast of it, or the same change on all ranks",
)
def _(model, mesh, broken):
    model.scale.all = average
    if broken and dist.get_rank() == 1:
        model.scale.register_forward_hook(lambda module, args, y: module.size.add_(1) and None)
    return unsynced(model)


@made_of(lambda: {"first": nn.Linear(WIDTH, WIDTH), "norm": nn.BatchNorm1d(WIDTH), "last": nn.Linear(WIDTH, WIDTH)})
def normed(self, x):
    """Two layers with batch norm between."""
    return self.last(self.norm(self.first(x)))


@case(
    "batch norm with the statistics of this rank's rows",
    mesh="dp=2",
    model=normed,
    inputs=(draw(8, WIDTH),),
    options=ROWS,
)
@found("forward", "norm", "output")
@says("each rank along dp normalises with the mean and the variance of its own rows, not of all", hint="SyncBatchNorm")
def _(model, mesh, broken):
    norm = model.norm

    def forward(x):
        middle = Averaged.apply(x.mean(0))
        spread = Averaged.apply((x - middle).square().mean(0))
        norm.running_mean.mul_(0.9).add_(0.1 * middle.detach())
        norm.running_var.mul_(0.9).add_(0.1 * spread.detach() * 8 / 7)
        norm.num_batches_tracked.add_(1)
        return (x - middle) / (spread + norm.eps).sqrt() * norm.weight + norm.bias

    if not broken:
        norm.forward = forward
    return unsynced(model)


# -- random numbers ----------------------------------------------------------------------------------------------------


@case(
    "a block that is computed again with other dropout masks", mesh="dp=2", model=lambda: Net(dropout=0.5), options=ROWS
)
@found("random", "blocks.1.drop", "bernoulli")
@says("backward computes it again with other random numbers, on ranks 0-1", hint="preserve_rng_state=True")
def _(model, mesh, broken):
    for index, block in enumerate(model.blocks):
        forgets = broken and index == 1
        model.blocks[index] = checkpoint_wrapper(block, preserve_rng_state=not forgets)
    return ddp(model)
