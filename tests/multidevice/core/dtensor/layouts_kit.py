"""Layouts of every kind on a (dp, tp) mesh, and tensors in them: what tests of verbs and of local code go through."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from hyper_parallel import DTensor, Layout, distribute_tensor


def layout_of(ctx: Any, sizes: tuple[int, ...] = (2, 2), names: tuple[str, ...] = ("dp", "tp")) -> Layout:
    return Layout.from_device_mesh(init_device_mesh(ctx.device_type, sizes, mesh_dim_names=names))


def numbers(ctx: Any, *shape: int, least: int = -2) -> torch.Tensor:
    """Small whole numbers, the same on every rank, that float32 adds and multiplies exactly."""
    return (torch.arange(float(torch.Size(shape).numel()), device=ctx.device) % 7 + least).reshape(shape)


def leaf(full: torch.Tensor, layout: Layout) -> DTensor:
    return distribute_tensor(full.clone().requires_grad_(), layout)


def layouts(own: Layout) -> list[Layout]:
    return [
        own(),
        own("dp"),
        own("None", "tp"),
        own("tp", "dp"),
        own(("dp", "tp")),
        own(("tp", "dp")),
        own(partial={"tp": "sum"}),
        own("tp", partial={"dp": "sum"}),
        own(partial={"dp": "avg", "tp": "avg"}),
    ]
