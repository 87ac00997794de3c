"""A parameter or buffer that is being filled: writes that can be done tile by tile, and its unsharded values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from hyper_parallel.core.init.tiles import Region, digest, tiles

__all__ = ["FillTarget"]

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
        locked: whether writing is left to another module, the one under whose name it comes first.
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
        """Carry out what is left to write."""
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
