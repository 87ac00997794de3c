"""Shapes and dtypes between pipeline stages, found by one forward of one micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.core.pipeline.boundary import Boundary, Meta

__all__ = ["find_boundaries"]


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
        stages: of this rank, by their numbers; their parameters are whole.
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
