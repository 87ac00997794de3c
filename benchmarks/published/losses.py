"""Cross-entropy as training programs compute it: what of the logits each way keeps, and for how long.

Bytes per logit at the worst moment, of bfloat16 logits that nobody else holds on to (tests count them):

| kind | bytes | as |
|---|---|---|
| `library` | 8 | `vocab_parallel_cross_entropy` of the logits as they are, as the trainer computes it |
| `eager` | 12 | `F.cross_entropy(logits.float(), ...)`: log-softmax, its gradient, and that of the float32 copy |
| `eager`, classes split | 16 | torch's `loss_parallel`, with numbers per row communicated |
| `in-place` | 10 | Megatron-LM's vocabulary-parallel loss: a float32 copy, and one buffer for the rest |
| `chunked` | 6.5 | as `eager`, an eighth of the rows at a time |
| `compiled` | 4 | `eager` under `torch.compile`: nothing in float32 is written |
| `fuse_head` | under 1 | head and loss of some rows at a time, gradients at once (Liger, arXiv:2410.10989) |
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.shard.entry_exit import enter, leave
from hyper_parallel.core.shard.loss import Logits, target_places, vocab_parallel_cross_entropy
from sim.mesh.tracing.compiled import CompiledLike
from sim.mesh.tracing.kinds import having, running

__all__ = ["KINDS", "Loss", "fuse_head"]

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_CHUNKS = 8  # of rows, as in torchtune's CEWithChunkedOutputLoss


class Loss:
    """The mean cross-entropy of logits, computed in one of the ways above.

    >>> round(Loss("eager")(torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.long)).item(), 4)
    2.0794

    Args:
        kind: "library", "eager", "in-place", "chunked" or "compiled".
    """

    def __init__(self, kind: str = "eager") -> None:
        self.kind, self._whole, self._split = kind, *KINDS[kind]

    @classmethod
    def of(cls, recipe: Any) -> Loss:
        """Return the loss of a `PublishedRecipe`: engines of whole weights come with the one that works in place.

        "eager-kept" is "eager": that someone else holds on to the logits is not the loss's doing.
        """
        kind = "eager" if recipe.loss == "eager-kept" else recipe.loss
        return cls("in-place" if kind == "eager" and recipe.zero <= 1 else kind)

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean over rows.

        Args:
            logits: (batch, seq, vocab); a DTensor where tensor parallelism splits the vocabulary. Losses (batch, seq),
                where `fuse_head` has made them: their mean is returned.
            targets: ids (batch, seq).

        Communication: of a split vocabulary, a maximum and two sums per row.
        """
        if logits.dim() == targets.dim():
            return logits.mean()
        return self._split(logits, targets) if isinstance(logits, DTensor) else self._whole(logits, targets)


def _eager(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def _chunked(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    parts = zip(logits.flatten(0, -2).chunk(_CHUNKS), targets.flatten().chunk(_CHUNKS), strict=True)
    losses = [F.cross_entropy(part.float(), own, reduction="sum") for part, own in parts]
    return torch.stack(losses).sum() / targets.numel()


def _in_place(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if not isinstance(logits, DTensor):
        return vocab_parallel_cross_entropy(logits.float(), targets)
    where = Logits.of(logits)
    wide = enter(logits, where.logits, where.logits).float()
    return vocab_parallel_cross_entropy(leave(wide, where.logits, logits.shape), targets)


def _compiled() -> Function:
    function: Function = CompiledLike(_eager)
    return function


def _eager_split(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    assert isinstance(logits, DTensor), "the caller looks"
    where = Logits.of(logits)
    own = enter(logits, where.logits, where.logits)
    return _SplitLosses.apply(own.flatten(0, -2).float(), targets.flatten(), where, targets.shape).mean()


def _compiled_split(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    assert isinstance(logits, DTensor), "the caller looks"
    where = Logits.of(logits)
    own = enter(logits, where.logits, where.logits)
    return _SplitKernels.apply(own.flatten(0, -2), targets.flatten(), where, targets.shape).mean()


class _SplitLosses(torch.autograd.Function):
    """One loss per row, with the tensors that `torch.distributed.tensor.parallel.loss_parallel` makes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, targets: torch.Tensor, where: Logits, rows: torch.Size) -> torch.Tensor:
        top = where.over_classes(x.amax(-1).view(rows), "max").view(-1, 1)
        shifted = x - top
        total = where.over_classes(shifted.exp().sum(-1).view(rows), "sum").view(-1, 1)
        result = shifted - total.log()
        del shifted
        place, mine = target_places(targets, where.first, x.shape[-1])
        found = torch.where(mine, result.gather(-1, place).squeeze(-1), torch.zeros_like(total).squeeze(-1))
        ctx.save_for_backward(result, place, mine)
        return -where.over_classes(found.view(rows), "sum")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        result, place, mine = ctx.saved_tensors
        at_target = torch.zeros_like(result)
        at_target.scatter_(-1, place, -mine.unsqueeze(-1).to(result.dtype))
        return (at_target + result.exp()) * grad.reshape(-1, 1), None, None, None


def one_kernel() -> AbstractContextManager[None]:
    """Take what is computed in the block as one kernel, as if it was compiled, or written by hand."""
    return having(running, region=running.take(1))


class _SplitKernels(torch.autograd.Function):
    """One loss per row, by one kernel between two communications, and one in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, targets: torch.Tensor, where: Logits, rows: torch.Size) -> torch.Tensor:
        top = where.over_classes(x.amax(-1).float().view(rows), "max").view(-1, 1)
        with one_kernel():
            shifted = x.float() - top
            place, mine = target_places(targets, where.first, x.shape[-1])
            found = torch.where(mine, shifted.gather(-1, place).squeeze(-1), torch.zeros_like(top).squeeze(-1))
            both = torch.stack([shifted.exp().sum(-1), found]).view(2, *rows)
            del shifted, found
        both = where.over_classes(both, "sum")
        spread = both[0].log()
        ctx.save_for_backward(x, top, spread, place, mine)
        return spread - both[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        x, top, spread, place, mine = ctx.saved_tensors
        with one_kernel():
            wide = (x.float() - top - spread.reshape(-1, 1)).exp()
            wide = wide.scatter_add(-1, place, -mine.unsqueeze(-1).float())
            result = (wide * grad.reshape(-1, 1)).to(x.dtype)
            del wide
        return result, None, None, None


KINDS: dict[str, tuple[Function, Function]] = {
    "library": (vocab_parallel_cross_entropy, vocab_parallel_cross_entropy),
    "eager": (_eager, _eager_split),
    "in-place": (_in_place, _in_place),
    "chunked": (_chunked, _eager_split),
    "compiled": (_compiled(), _compiled_split),
}
"""How the loss of whole logits is computed, and that of logits whose classes are split."""


# -- head and loss in one --------------------------------------------------------------------------------------------


def fuse_head(model: nn.Module, chunk: int | None = None) -> None:
    """Let a model return a loss for each row, for which its head is computed for a few rows at a time.

        fuse_head(model)
        loss = Loss()(model(tokens), targets)

    For each chunk the logits, their gradient in their place, and what it adds to the gradients of the head's input and
    weight are computed at once, in forward; backward scales these. All logits are never in memory. The targets do not
    matter to what is computed where nothing has values: they are zeros.

    Args:
        model: its attribute `head` is changed in place; a stage of a pipeline without one is left as it is.
        chunk: rows at a time. Default: rows over vocabulary / width, to the next power of two, as Liger kernels do.

    Raises:
        ValueError: the head is no linear layer, or tensor parallelism splits it.
    """
    head = getattr(model, "head", None)
    if head is None and "head" in dir(model):
        return
    asked = "cannot compute head and loss as one"
    if not isinstance(head, nn.Linear):
        blame = "the model has no linear layer named head"
        raise InvalidValue(asked, blame, f"head: {type(head).__name__}", "PublishedRecipe(fused_loss=False)")
    if isinstance(head.weight, DTensor):
        blame = "tensor parallelism splits the head's classes over ranks"
        raise InvalidValue(
            asked, blame, f"tp: {head.weight.device_mesh.size()} ranks", "PublishedRecipe(fused_loss=False)"
        )
    head.forward = functools.partial(_head_losses, head, chunk)  # type: ignore[method-assign]


def _head_losses(head: nn.Linear, chunk: int | None, hidden: torch.Tensor) -> torch.Tensor:
    rows = hidden.flatten(0, -2)
    if chunk is None:
        share = math.ceil(head.out_features / head.in_features)
        chunk = 2 ** math.ceil(math.log2(max(1, math.ceil(rows.shape[0] / share))))
    losses: torch.Tensor = _HeadLosses.apply(rows, head.weight, head.bias, chunk)
    return losses.view(hidden.shape[:-1])


class _HeadLosses(torch.autograd.Function):
    """One loss per row of the head's input; the gradients are those of their mean."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chunk: int
    ) -> torch.Tensor:
        grad_rows, grad_weight = torch.empty_like(rows), torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        losses = []
        for start in range(0, rows.shape[0], chunk):
            part = rows[start : start + chunk]
            logits = torch.mm(part, weight.t()) if bias is None else torch.addmm(bias, part, weight.t())
            with one_kernel():  # as it is written by hand
                wide = logits.float()
                spread = wide.logsumexp(-1, keepdim=True)
                losses.append((spread - wide[:, :1]).squeeze(-1))
                logits.copy_((wide - spread).exp() / rows.shape[0])
                logits[:, :1].sub_(1 / rows.shape[0])
                del wide, spread
            torch.mm(logits, weight, out=grad_rows[start : start + chunk])
            torch.addmm(grad_weight, logits.t(), part, out=grad_weight)
            if grad_bias is not None:
                grad_bias.add_(logits.sum(0))
            del logits
        ctx.save_for_backward(*[each for each in (grad_rows, grad_weight, grad_bias) if each is not None])
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The gradient of the mean is the same for each row: scaled by what it is apart from that.
        scale = grad[0] * grad.numel()
        given = [each.mul_(scale.to(each.dtype)) for each in ctx.saved_tensors]
        return (*given, *[None] * (4 - len(given)))
