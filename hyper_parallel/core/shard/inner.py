"""Local tensors that go from one module to the next, inside of a module that computes on local tensors itself.

They stay plain tensors. What a module with a `local_plan` of its own returns carries a mark of its layout, for the next
such module whose input is declared: the communication between two layouts is then one operation of autograd from part
to part, and no DTensor is made. The gradient of what carries a mark lies as it does: whole where ranks hold the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.redistribute.eager import runs_eagerly
from hyper_parallel.core.shard.crossing import _moved, _ready, enter, leave

__all__ = ["Mark", "cross", "mark_of", "marked"]

_NAME = "_hyper_parallel_layout"


class Mark(NamedTuple):
    """What a plain tensor is a part of: a layout and the whole tensor's sizes, in elements."""

    layout: Layout
    shape: torch.Size


def mark_of(part: torch.Tensor) -> Mark | None:
    """Return the mark of a plain tensor; what an operation returns has none."""
    return cast("Mark | None", part.__dict__.get(_NAME))


def marked(part: torch.Tensor, layout: Layout, shape: torch.Size) -> torch.Tensor:
    """Mark a plain tensor, and return it."""
    part.__dict__[_NAME] = Mark(layout, shape)
    return part


@runs_eagerly
def cross(part: torch.Tensor, mark: Mark, target: Layout, grad_layout: Layout | None) -> torch.Tensor:
    """Return this rank's part in another layout.

    Forward: as `redistribute`. Backward: one redistribution, from `grad_layout` to the layout of the part; where
    that is a copy to reduce, to the whole gradient.

    Args:
        part: this rank's part.
        mark: what it is a part of.
        target: the layout wanted.
        grad_layout: how gradients of what is returned lie; None: as that.
    """
    given = grad_layout or target.reset_partial()
    if mark.layout == target and not given.is_partial():
        return part
    if torch.is_grad_enabled() and part.requires_grad:
        if any(kind not in (None, "sum") for kind in mark.layout._partial):
            return enter(leave(part, mark.layout, mark.shape), target, given)
        return cast(torch.Tensor, _Cross.apply(part, mark, target, given))
    return _moved(_ready(part), mark.layout, target, mark.shape)


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, mark: Mark, target: Layout, given: Layout) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark, ctx.given = mark, given
        held = _ready(part.detach())
        moved = _moved(held, mark.layout, target, mark.shape)
        return part.view_as(part) if moved is held else moved

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None
        layout, shape = ctx.mark
        if torch.is_grad_enabled():  # someone differentiates what happens here
            return cross(grad, Mark(ctx.given, shape), layout.reset_partial(), None), None, None, None
        return _moved(_ready(grad), ctx.given, layout.reset_partial(), shape), None, None, None
