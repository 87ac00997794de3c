"""The shape of a tensor that ranks hold parts of: they tell each other, and nothing is guessed."""

from __future__ import annotations

import numpy as np
import torch

from hyper_parallel.core.dtensor import shards
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.messages import explain
from hyper_parallel.core.dtensor.numbers import gather_numbers
from hyper_parallel.core.redistribute.eager import runs_eagerly
from hyper_parallel.core.redistribute.groups import group_of

_MOST_DIMS = 32


@runs_eagerly
def agreed_shape(asked: str, local: torch.Tensor, layout: Layout) -> tuple[int, ...]:
    """Return the global shape of which every rank's part is one in a layout; all ranks of the mesh call it.

    Communication: one all_gather of 33 integers per rank.

    Args:
        asked: the start of an error message, "cannot ...".
        local: this rank's part.
        layout: which part that is, with a mesh.

    Raises:
        ValueError: no shape has these parts, as when a dim is split into others than `torch.chunk` would make.
    """
    ranks = tuple(layout.rank_list)
    parts = _all_shapes(local, layout)
    splits = layout.splits(local.dim())
    blame = None
    shape: tuple[int, ...] = ()
    if len({len(part) for part in parts}) > 1:
        blame = "the parts have different numbers of dims"
    else:
        shape = tuple(_whole(dim, chain, parts, layout) for dim, chain in enumerate(splits))
        wrong = [r for r, part in zip(ranks, parts, strict=True) if layout.local_shape(shape, r) != part]
        if wrong:
            expected = layout.local_shape(shape, wrong[0])
            blame = f"the parts add up to {shape}, of which rank {wrong[0]} would have {expected}"
    if blame is not None:
        lines = "\n  ".join(f"rank {rank}: {part}" for rank, part in zip(ranks, parts, strict=True))
        hint = "a layout that the parts have, with dims split as torch.chunk does it"
        raise ValueError(explain(asked, blame, f"layout: {layout}\n  {lines}", hint))
    return shape


def _whole(dim: int, chain: tuple[int, ...], parts: list[tuple[int, ...]], layout: Layout) -> int:
    """Return the size of a dim: the sum over the ranks along the axes that split it."""
    sizes = np.array([part[dim] for part in parts]).reshape(layout.mesh_shape)
    along = tuple(slice(None) if axis in chain else 0 for axis in range(len(layout.mesh_shape)))
    return int(sizes[along].sum()) if shards.count_parts(layout.mesh_shape, chain) > 1 else int(sizes.flat[0])


def _all_shapes(local: torch.Tensor, layout: Layout) -> list[tuple[int, ...]]:
    """Return the shape of every rank's part, in the order of the layout's ranks."""
    mesh = layout.mesh
    assert mesh is not None, "the callers see to a mesh"
    ranks = tuple(sorted(layout.rank_list))
    mine = [local.dim(), *local.shape, *[0] * (_MOST_DIMS - local.dim())]
    device = "cpu" if mesh.device_type == "cpu" else local.device  # not meta: its values are read
    rows = dict(zip(ranks, gather_numbers(mine, group_of(ranks, layout.alias_name, mesh), device), strict=True))
    return [tuple(rows[rank][1 : 1 + rows[rank][0]]) for rank in layout.rank_list]
