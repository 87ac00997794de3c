"""Small models and hand-written collectives for the zoos of right and of broken parallel models."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import sim

WIDTH, VOCAB = 16, 24


def draw(*shape, seed=0):
    """Normal numbers that depend on the seed only."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(rows=4, length=6, vocab=VOCAB, seed=0):
    """Ids of tokens."""
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def made_of(parts):
    """Return a decorator that makes a class of modules of its forward.

    >>> @made_of(lambda: {"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
    ... def narrow(self, x):
    ...     return self.down(self.up(x).relu())
    >>> narrow()(torch.ones(2, 4)).shape
    torch.Size([2, 4])

    Args:
        parts: called with what a module is made with, returns what it has, by name; tensors are buffers.
    """

    def make(forward):
        def init(self, *args, **options):
            nn.Module.__init__(self)
            for name, part in parts(*args, **options).items():
                is_buffer = isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter)
                self.register_buffer(name, part) if is_buffer else setattr(self, name, part)

        return type(forward.__name__, (nn.Module,), {"__init__": init, "forward": forward, "__doc__": forward.__doc__})

    return make


# -- models ------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention of grouped heads; `enter` and `leave` are where hand-written parallel code has collectives."""

    def __init__(self, width=WIDTH, heads=4, kv_heads=2, bias=True):
        super().__init__()
        self.size = width // heads
        self.q = nn.Linear(width, heads * self.size, bias=bias)
        self.k = nn.Linear(width, kv_heads * self.size, bias=bias)
        self.v = nn.Linear(width, kv_heads * self.size, bias=bias)
        self.o = nn.Linear(heads * self.size, width, bias=bias)

    def forward(self, x):
        x = self.enter(x)
        batch, length, _ = x.shape
        q, k, v = (each(x).view(batch, length, -1, self.size).transpose(1, 2) for each in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        scores = q @ k.transpose(-1, -2) / self.size**0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, -1e30).softmax(-1)
        return self.leave(self.o((weights @ v).transpose(1, 2).reshape(batch, length, -1)))

    def enter(self, x):
        return x

    def leave(self, y):
        return y


class Mlp(nn.Module):
    """A feed-forward with the same hooks."""

    def __init__(self, width=WIDTH, inner=2 * WIDTH, bias=True, dropout=0.0):
        super().__init__()
        self.up = nn.Linear(width, inner, bias=bias)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x):
        return self.leave(self.down(self.drop(F.gelu(self.up(self.enter(x))))))

    def enter(self, x):
        return x

    def leave(self, y):
        return y


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added back after."""

    def __init__(self, width=WIDTH, heads=4, kv_heads=2, inner=2 * WIDTH, bias=True, dropout=0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, kv_heads, bias)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, inner, bias, dropout)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Net(nn.Module):
    """A language model: ids in, logits out."""

    def __init__(self, blocks=2, *, vocab=VOCAB, width=WIDTH, tied=False, **options):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, **options) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# -- steps of one's own ------------------------------------------------------------------------------------------------


def squared(model, batch):
    loss = model(*batch if isinstance(batch, tuple) else (batch,)).square().mean()
    loss.backward()
    return loss


def with_averages(step):
    """A step after which all ranks have the mean of their gradients."""

    def averaged(model, batch):
        loss = step(model, batch)
        average(model)
        return loss

    return averaged


def rows(batch, mesh):
    """This rank's rows of a tensor, or of each of several."""
    if isinstance(batch, tuple):
        return tuple(rows(each, mesh) for each in batch)
    return batch.chunk(mesh.size())[mesh.get_rank()]


def average(model):
    """Give all ranks the mean of their gradients; on one device there is nothing to do."""
    for parameter in model.parameters() if dist.is_initialized() else ():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def proved_plan(parallelize, model, inputs, mesh="dp=2", **options):
    """Prove a plan; along dp, each rank has its rows of all inputs."""
    if "dp" in mesh and isinstance(inputs, tuple):
        options = {"input_layouts": [("dp",)] * len(inputs), **options}
    return sim.verify_plan(model, inputs, mesh, parallelize=parallelize, **options)


def proved_step(parallelize, model, batch, mesh="dp=2", step=squared, **options):
    """Prove a step; along dp, each rank has its rows of the batch."""
    options = {"shard_batch": rows if "dp" in mesh else None, **options}
    return sim.verify_step(step, model, batch, mesh, parallelize=parallelize, **options)


def same(x):
    return x


def ddp(model, mesh=None, **options):
    return nn.parallel.DistributedDataParallel(model, **options)


def right(report):
    """Return a report, which proves the program."""
    assert report.ok, str(report)
    return report


# -- collectives for code on local tensors -----------------------------------------------------------------------------


class Enter(torch.autograd.Function):
    """Forward nothing, backward an all_reduce: before weights that are split by what comes out."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    """Forward an all_reduce, backward nothing: after weights that are split by what goes in."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Gather(torch.autograd.Function):
    """Forward an all_gather along a dim, backward a reduce_scatter: before split weights, from a split sequence."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()].clone(), None, None


class Collect(torch.autograd.Function):
    """Forward an all_gather along a dim, backward this rank's part: for what all ranks use alike afterwards."""

    forward = Gather.forward

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()].clone(), None, None


class Scatter(torch.autograd.Function):
    """Forward a reduce_scatter along a dim, backward an all_gather: after split weights, to a split sequence."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x.chunk(group.size(), dim)[group.rank()].clone()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(ctx.group.size())]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts, ctx.dim), None, None


def summed(x, group=None):
    """The sum over the ranks of a group, without history."""
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def take(module, name, dim, rank, size):
    """Replace a parameter by this rank's part of it."""
    whole = getattr(module, name)
    if whole is not None:
        setattr(module, name, nn.Parameter(whole.detach().chunk(size, dim)[rank].clone(), whole.requires_grad))


def share(module, size, group):
    """Let each rank add 1/size of a Linear's bias, which all hold whole: what follows is a sum over the ranks."""
    if module.bias is not None:
        module.forward = lambda x: F.linear(x, module.weight, Enter.apply(module.bias, group) / size)


def axis(mesh, name="tp"):
    """One axis of a mesh: rank along it, size, group."""
    mesh = mesh[name] if mesh.ndim > 1 else mesh
    return mesh.get_local_rank(), mesh.size(), mesh.get_group()


def split_part(part, firsts, last, rank, size, group):
    """Split a module by hand: some weights by what comes out, the last one by what goes in; a collective each way."""
    for first in firsts:
        take(first, "weight", 0, rank, size)
        take(first, "bias", 0, rank, size)
    take(last, "weight", 1, rank, size)
    share(last, size, group)
    part.enter, part.leave = lambda x: Enter.apply(x, group), lambda y: Leave.apply(y, group)


def split_mlp(mlp, rank, size, group):
    split_part(mlp, (mlp.up,), mlp.down, rank, size, group)


def split_block(block, rank, size, group):
    """Megatron by hand: heads and inner width split, two collectives each way."""
    split_part(block.attn, (block.attn.q, block.attn.k, block.attn.v), block.attn.o, rank, size, group)
    split_mlp(block.mlp, rank, size, group)


class Pair(nn.Module):
    """Two layers on the rows of `given`."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, labels):
        return self.second(torch.tanh(self.first(x)))


def given(ignored=0):
    """Eight rows of six numbers, and a label of each; some of them are -100."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 6, (8,), generator=generator)
    labels[:ignored] = -100
    return torch.randn(8, 6, generator=generator), labels


class Dropping(nn.Module):
    """A layer and its dropout, computed again in backward, with the generator restored or not."""

    def __init__(self, width, functional=False, **options):
        super().__init__()
        self.layer, self.drop, self.functional = nn.Linear(width, width), nn.Dropout(0.5), functional
        self.options = {"use_reentrant": False, **options}

    def forward(self, x):
        return checkpoint(self.inner, x, **self.options)

    def inner(self, x):
        x = torch.tanh(self.layer(x))
        return F.dropout(x, 0.5) if self.functional else self.drop(x)


class Tied(nn.Module):
    """Experts, three of which have the same score but for rounding."""

    def __init__(self, take=lambda scores: scores.topk(2, -1).indices):
        super().__init__()
        self.mlp, self.gate = Mlp(), nn.Linear(WIDTH, 4, bias=False)
        self.gate.weight.data[1:3] = self.gate.weight.data[0]
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.take = take

    def forward(self, x):
        x = self.mlp(x)
        scores = self.gate(x)
        chosen = self.take(scores)
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen).sigmoid())
        return sum(weights[..., at, None] * each(x) for at, each in enumerate(self.experts))


def rounding(model, mesh, off=1e-15, ranks=(0, 1)):
    """Split the Mlp of a `Tied`, and let some ranks score in another order of sums, or much too differently."""
    rank, size, group = axis(mesh)
    split_mlp(model.mlp, rank, size, group)
    if rank in ranks:
        own, turn = model.take, torch.tensor([0, 1, 2, 0], dtype=torch.float64)
        model.take = lambda scores: own(scores * (1 + off * turn))


def megatron(model, mesh):
    """Split all blocks of a Net."""
    for block in model.blocks:
        split_block(block, *axis(mesh))


def rank_of():
    """This rank, 0 on one device."""
    return dist.get_rank() if dist.is_initialized() else 0
