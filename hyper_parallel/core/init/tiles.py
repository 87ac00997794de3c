"""Tiles of a tensor, each with random numbers of its own.

A tile's numbers depend on the seed, the tensor's name, how often it was drawn before and the tile's place in the
unsharded tensor, so a rank draws the tiles that its shard overlaps, and no others.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

__all__ = ["Region", "digest", "normal", "tiles", "truncated", "uniform"]

Region = tuple[slice, ...]
"""A slice for each dim of the unsharded tensor."""

# 16 rows of 1024: the edges of a shard cost little, of rows that 1,000 ranks share and of columns that 16 do. Numpy and
# torch compute so few elements in one thread, and of one number of them always in the same way.
_ELEMENTS, _LAST = 2**14, 2**10


def tiles(shape: Sequence[int], region: Region) -> Iterator[Region]:
    """Return the tiles of a tensor that overlap a region.

    >>> list(tiles((40, 3000), (slice(16, 32), slice(0, 1000))))
    [(slice(16, 32, None), slice(0, 1024, None))]
    """
    if any(part.start >= part.stop for part in region):
        return
    edges: list[int] = []
    for size in reversed(shape):
        left = _ELEMENTS // math.prod(edges) if edges else _LAST
        edges.insert(0, max(1, min(size, left)))
    starts = [range(part.start // edge * edge, part.stop, edge) for part, edge in zip(region, edges, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(slice(a, min(a + edge, size)) for a, edge, size in zip(corner, edges, shape, strict=True))


def digest(*values: object) -> int:
    """Return 128 bits that depend on some values."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:16], "little")


def normal(tile: torch.Tensor, key: int, mean: float = 0.0, std: float = 1.0) -> None:
    """Draw a tile from the normal distribution.

    Args:
        tile: where to.
        key: 128 bits, for one tile and one draw.
        mean: of the distribution.
        std: of the distribution.
    """
    kind = np.float64 if tile.dtype == torch.float64 else np.float32
    values = _generator(key).standard_normal(tile.numel(), kind) * kind(std) + kind(mean)
    tile.copy_(torch.from_numpy(values).view(tile.shape))


def uniform(tile: torch.Tensor, key: int, low: float = 0.0, high: float = 1.0) -> None:
    """Draw a tile from [low, high)."""
    values = _generator(key).random(tile.numel()) * (high - low) + low
    tile.copy_(torch.from_numpy(values).view(tile.shape))
    if low < high:  # rounding may have reached the end, which is not in it
        ends = torch.tensor([high, low], dtype=tile.dtype, device="cpu")
        tile.clamp_(max=torch.nextafter(ends[0], ends[1]))


def truncated(tile: torch.Tensor, key: int, mean: float, std: float, low: float, high: float) -> None:
    """Draw a tile from the part of a normal distribution that lies between two bounds, by the inverse of its CDF."""
    first, last, step = (low - mean) / std, (high - mean) / std, std
    if first + last > 0:  # near 0 a probability has digits that it lacks near 1
        first, last, step = -last, -first, -std
    least, most = (0.5 * math.erfc(-x / math.sqrt(2)) for x in (first, last))
    chance = torch.from_numpy(_generator(key).random(tile.numel()) * (most - least) + least).view(tile.shape)
    tile.copy_(torch.special.ndtri(chance).mul_(step).add_(mean).clamp_(low, high))


def _generator(key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=key))
