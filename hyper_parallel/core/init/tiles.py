"""Tiles of numbers by counter, and the tensors that are filled with them."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.distributed.tensor import DTensor

__all__ = [
    "FillTarget",
    "Region",
    "digest",
    "normal",
    "tiles",
    "truncated",
    "uniform",
]


# Tiles of a tensor, each with random numbers of its own ---------------------------------------------------------------
#
# A tile's numbers depend on the seed, the tensor's name, how often it was drawn before and the tile's place in the
# unsharded tensor, so a rank draws the tiles that its shard overlaps, and no others.

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
    """Draw a tile from the normal distribution: the same float32 numbers for every dtype, up to its rounding.

    Args:
        tile: where to.
        key: 128 bits, for one tile and one draw.
        mean: of the distribution.
        std: of the distribution.
    """
    kind = np.float64 if tile.dtype == torch.float64 else np.float32
    # numpy draws other numbers in float64; a float64 reference must start from what is trained in float32.
    values = _generator(key).standard_normal(tile.numel(), np.float32).astype(kind, copy=False) * kind(std) + kind(mean)
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


# A parameter or buffer that is being filled: writes that can be done tile by tile, and its unsharded values -----------

Write = Callable[[torch.Tensor, int], object]  # computes a tile in place; the int is a key for random numbers


@dataclass(eq=False)
class FillTarget:
    """A parameter or buffer of the model, and what has been written to it so far.

    Args:
        name: its first name in the model.
        tensor: itself.
        region: the elements that this rank holds.
        seed: of all draws.
        sharded: whether some rank holds less than all of it: the same answer on every rank.
        fresh: whether it was on meta, so that what nobody writes is no value.
        locked: whether another module writes it: the one under whose name it comes first.
        filled: whether every element got a value: the same answer on every rank.
        unsharded: its values on the CPU, while a module does with them what no tile can do alone.
    """

    name: str
    tensor: torch.Tensor
    region: Region
    seed: int
    sharded: bool = False
    fresh: bool = False
    locked: bool = False
    filled: bool = False
    unsharded: torch.Tensor | None = None
    _writes: list[tuple[Write, int]] = field(default_factory=list)  # not yet carried out, each with its number
    _covered: bool = False  # whether the first of them sets every element
    _stored: bool = False  # whether this rank's shard has values that the writes do not give
    _begun: bool = False
    _count: int = 0

    @property
    def local(self) -> torch.Tensor:
        """What this rank holds of it, without autograd."""
        return self.tensor._local_tensor if isinstance(self.tensor, DTensor) else self.tensor.detach()

    def write(self, write: Write, covers: bool) -> None:
        """Note a write; one that sets every element makes those before it void, as parents fill after their children.

        Args:
            write: what to do with each tile.
            covers: whether it gives every element a value, whatever was there.
        """
        if self.locked:
            return
        if covers:
            self._writes, self._covered, self.filled = [], True, True
        self._writes.append((write, self._count))
        self._count += 1

    def begin(self) -> None:
        """Start a stream of torch's numbers, where a module first does with the tensor what no tile can do alone."""
        if not self._begun:  # by name, for pipeline stages: they lack modules that drew before on other ranks
            torch.default_generator.manual_seed(digest(self.seed, self.name, self._count) % 2**63)
            self._begun, self._count = True, self._count + 1

    def unshard(self) -> torch.Tensor | None:
        """Return the unsharded values on the CPU, to read and to write; None if only other ranks have them."""
        if self.unsharded is None:
            lost = self.sharded and not self._covered and (self._stored or not self.fresh)
            if lost and not self.locked:
                return None
            self.begin()
            self.unsharded = torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device="cpu")
            self._carry_out(self.unsharded, tuple(slice(0, size) for size in self.tensor.shape))
        return self.unsharded

    def reshard(self) -> None:
        """Keep this rank's shard of the unsharded values, if there are any."""
        unsharded, self.unsharded, self._begun = self.unsharded, None, False
        if unsharded is None or self.locked:
            return
        self.local.copy_(unsharded[self.region])
        self.filled = self.filled or not (unsharded.is_floating_point() and bool(unsharded.isnan().any()))
        self._writes, self._covered, self._stored = [], False, True

    def flush(self) -> None:
        """Carry out all writes that are still pending."""
        if self._writes:
            self._carry_out(self.local, self.region)
        self._writes, self._covered, self._stored = [], False, True

    def _carry_out(self, into: torch.Tensor, region: Region) -> None:
        """Compute a region tile by tile; tiles are computed in full, so that the ends of a shard change nothing."""
        own, shape = self.local, self.tensor.shape
        for tile in tiles(shape, region):
            values = torch.empty([part.stop - part.start for part in tile], dtype=into.dtype, device="cpu")
            if not self._covered:
                values.fill_(float("nan") if values.is_floating_point() or values.is_complex() else 0)
                held = _overlap(tile, self.region)
                if all(part.start < part.stop for part in held):
                    values[_within(held, tile)] = own[_within(held, self.region)].cpu()
            for write, number in self._writes:
                write(values, digest(self.seed, self.name, number, [part.start for part in tile]))
            wanted = _overlap(tile, region)
            into[_within(wanted, region)] = values[_within(wanted, tile)].to(into.device)


def _overlap(one: Region, other: Region) -> Region:
    return tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))


def _within(part: Region, outer: Region) -> Region:
    """A region as slices of another one that it lies in."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(part, outer, strict=True))
