"""Boundaries between stages: shapes and dtypes of what is sent, found by a probe forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.core.common.errors import InvalidType, InvalidValue
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.entry_exit import enter, leave

__all__ = ["Boundary", "Meta", "find_boundaries", "memory_of", "plain_loss"]


# Tensors sent between pipeline stages: plain ones, the local shard where modules work on DTensors ---------------------
#
# Between the modules of a tensor-parallel model values are DTensors, such as a residual stream that is split over the
# sequence. Ranks at the same place along the other axes hold the same shard on every stage. So a stage sends its
# shard as it is, and the next stage makes a DTensor of it again, on its own mesh.


@dataclass(frozen=True)
class Meta:
    """What is known of a tensor between two stages before it is there.

    Attributes:
        shape: of a rank's shard.
        dtype: its dtype.
        global_shape: that of the DTensor that it is a shard of; None for a plain tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    global_shape: tuple[int, ...] | None = None

    @property
    def wants_gradient(self) -> bool:
        """Whether it can have a gradient."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def on_meta(self) -> torch.Tensor:
        """A tensor like it, without data."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.wants_gradient)

    def zeros(self, device: torch.device) -> torch.Tensor:
        """A tensor like it, of zeros, which wants a gradient if it can have one."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device, requires_grad=self.wants_gradient)

    def __str__(self) -> str:
        shard = "" if self.global_shape is None else f", a shard of {self.global_shape}"
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}{shard}"


class Boundary:
    """How values pass from a stage to the next.

    Args:
        layout: of the DTensors between stages, on a mesh of this rank; None: plain tensors. A sequence: one for each
            tensor, where a stage returns several.

    Raises:
        TypeError: neither.
        ValueError: a layout without a mesh, without an assignment, or with a reduction pending.
    """

    def __init__(self, layout: Layout | Sequence[Layout | None] | None) -> None:
        self.layout = layout
        for one in (layout,) if isinstance(layout, Layout) or layout is None else layout:
            _check_layout(layout, one)

    def layouts(self, count: int) -> list[Layout | None]:
        """The layout of each of `count` tensors."""
        if isinstance(self.layout, Layout) or self.layout is None:
            return [self.layout] * count
        return list(self.layout)

    def outgoing(self, stage: int, output: Any) -> tuple[torch.Tensor, ...]:
        """Return what a stage sends: contiguous shards.

        Raises:
            TypeError: it returned something else than a tensor or a tuple of tensors.
            ValueError: a DTensor where a plain tensor was to be, or the other way round; more or fewer tensors.
        """
        asked = f"cannot send what stage {stage} returned"
        values = tuple(output) if isinstance(output, (tuple, list)) else (output,)
        if not all(isinstance(value, torch.Tensor) for value in values):
            kinds = ", ".join(type(value).__name__ for value in values)
            raise InvalidType(asked, "only tensors can go to the next stage", f"returned: {kinds}", "a tensor")
        layouts = self.layouts(len(values))
        if len(layouts) != len(values):
            seen = f"tensors: {len(values)}   layouts: {len(layouts)}"
            raise InvalidValue(asked, "there must be a layout for each tensor", seen, "one layout for all")
        return tuple(_part(asked, value, layout) for value, layout in zip(values, layouts, strict=True))

    def metas(self, output: Any, shards: Sequence[torch.Tensor]) -> tuple[Meta, ...]:
        """Return what there is to know about what was sent, given what the stage returned."""
        values = tuple(output) if isinstance(output, (tuple, list)) else (output,)
        return tuple(
            Meta(tuple(shard.shape), shard.dtype, tuple(value.shape) if isinstance(value, DTensor) else None)
            for value, shard in zip(values, shards, strict=True)
        )

    def incoming(self, shards: Sequence[torch.Tensor], metas: Sequence[Meta]) -> tuple[torch.Tensor, ...]:
        """Return what a stage is given, of the shards that have come."""
        layouts = self.layouts(len(shards))
        passed = tuple(_Contiguous.apply(shard) if shard.requires_grad else shard for shard in shards)
        return tuple(
            shard if layout is None or meta.global_shape is None else leave(shard, layout, meta.global_shape)
            for shard, layout, meta in zip(passed, layouts, metas, strict=True)
        )


class _Contiguous(torch.autograd.Function):
    """The identity; its gradient is as what is sent has to be."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return memory_of(gradient)


def memory_of(x: torch.Tensor) -> torch.Tensor:
    """Return what can be sent: the elements side by side, none of them to be conjugated or negated when it is read."""
    return x.resolve_conj().resolve_neg().contiguous()


def plain_loss(loss: Any) -> torch.Tensor:
    """Return the loss of a micro-batch as a plain tensor without dims.

    >>> plain_loss(torch.ones(1, 1)).shape
    torch.Size([])

    A DTensor becomes the whole number, which all ranks of its mesh then have; pending sums are added up.

    Args:
        loss: what a loss function returned.

    Raises:
        TypeError: no tensor of one element.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        kind = f"a {type(loss).__name__}" + (f" of shape {tuple(loss.shape)}" if hasattr(loss, "shape") else "")
        hint = "loss_fn=lambda output, target: a tensor without dims, this micro-batch's share of the loss"
        raise InvalidType("cannot use the loss", f"loss_fn returned {kind}", f"loss: {loss!r}", hint)
    if isinstance(loss, DTensor):
        reduced = Layout.of(loss).reset_partial()
        loss = enter(loss, reduced, reduced)
    return loss.reshape(())


def _part(asked: str, value: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    if layout is None and isinstance(value, DTensor):
        seen = f"layout: {Layout.of(value)}   shape: {tuple(value.shape)}"
        hint = "Pipeline(..., boundary=layout), with the layout of the values between stages"
        raise InvalidValue(asked, "it is a DTensor, and no boundary was given", seen, hint)
    if layout is not None and not isinstance(value, DTensor):
        seen = f"boundary: {layout}   shape: {tuple(value.shape)}"
        hint = "boundary=None, or a stage whose last module returns a DTensor"
        raise InvalidValue(asked, "it is a plain tensor, and a boundary of DTensors was given", seen, hint)
    # Ranks that hold the same compute the same: their gradients are one gradient, and each sends all of it.
    shard = value if layout is None else enter(value, layout, layout)  # type: ignore[arg-type]
    return memory_of(shard)


def _check_layout(given: object, layout: Any) -> None:
    asked = "cannot pass values between stages"
    if layout is None:
        return
    hint = 'boundary=Layout.from_device_mesh(mesh["tp"])("None", "tp", "None")'
    if layout.mesh is None or layout.tensor_map is None or layout.is_partial():
        lacks = "has a reduction pending" if layout.is_partial() else "has no mesh"
        lacks = "has no entries for dims" if layout.tensor_map is None else lacks
        raise InvalidValue(asked, f"its layout {lacks}", f"boundary: {layout}", hint)


# Shapes and dtypes between pipeline stages, found by one forward of one micro-batch -----------------------------------


def find_boundaries(
    stages: Mapping[int, nn.Module],
    owners: Sequence[int],
    boundary: Boundary,
    inputs: tuple[torch.Tensor, ...],
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[tuple[Meta, ...]]:
    """Return what goes from each stage to the next; all ranks along the pipeline axis call this.

    One forward of every stage but the last, in model order: of the first stage on real inputs, of the others on zeros.
    It is as forwards of a step will be, with a graph for a backward that never comes, so that compiled layers are
    compiled once. Buffers and generators are as before it.

    Communication: that of the forwards, and one broadcast of an object per stage but the last.

    Args:
        stages: of this rank, by their numbers; their parameters are unsharded.
        owners: for each stage the place of its rank in the group.
        boundary: how values pass.
        inputs: one micro-batch of the first stage.
        group: the ranks along the pipeline axis.
        device: of this rank.
    """
    found: list[tuple[Meta, ...]] = []
    for stage, owner in enumerate(owners[:-1]):
        metas: list[Any] = [None]
        if stage in stages:
            given = inputs
            if stage > 0:
                zeros = [meta.zeros(device) for meta in found[-1]]
                given = boundary.incoming(zeros, found[-1])
            with torch.enable_grad(), _untouched(stages[stage], device):
                output = stages[stage](*given)
                metas[0] = boundary.metas(output, boundary.outgoing(stage, output))
        dist.broadcast_object_list(metas, src=dist.get_global_rank(group, owner), group=group, device=device)
        found.append(metas[0])
    return found


@contextmanager
def _untouched(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Leave generators and the buffers of a module as they are now."""
    places = [(child, name, buffer) for child in module.modules() for name, buffer in child._buffers.items()]
    values = [None if buffer is None else buffer.clone() for _, _, buffer in places]
    generators: dict[str, Any] = {"devices": []}
    if device.type != "cpu":
        generators = {"devices": [device], "device_type": device.type}
    with torch.random.fork_rng(**generators):
        yield
    with torch.no_grad():
        for (child, name, buffer), value in zip(places, values, strict=True):
            child._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.copy_(value)
