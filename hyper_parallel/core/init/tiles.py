"""Tiles of numbers by counter, and the tensors that are filled with them."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

# Tiles of a tensor, each with random numbers of its own ---------------------------------------------------------------
#
# A tile's numbers depend on the seed, the tensor's name, how often it was drawn before and the tile's place in the
# unsharded tensor, so a rank draws the tiles that its shard overlaps, and no others.

Region = tuple[slice, ...]
"""A slice for each dim of the unsharded tensor."""

# 16 rows of 1024: the edges of a shard cost little, of rows that 1,000 ranks share and of columns that 16 do. Numpy and
# torch compute so few elements in one thread, and of one number of them always in the same way.
_ELEMENTS, _LAST = 2**14, 2**10

# What one thread computes at a time, and what one copy to a device takes: about so many elements. For fewer than the
# second number, which take one thread some 20 ms, no others are started.
_BLOCK, _ENOUGH = 2**18, 2**20


def tiles(shape: Sequence[int], region: Region) -> Iterator[Region]:
    """Return the tiles of a tensor that overlap a region.

    >>> list(tiles((40, 3000), (slice(16, 32), slice(0, 1000))))
    [(slice(16, 32, None), slice(0, 1024, None))]
    """
    edges = _edges(shape)
    for corner in _corners(region, edges, edges):
        yield tuple(slice(a, min(a + edge, size)) for a, edge, size in zip(corner, edges, shape, strict=True))


def _blocks(shape: Sequence[int], region: Region) -> Iterator[Region]:
    """Cut a region into boxes of about `_BLOCK` elements, none of which cuts a tile inside the region."""
    edges = _edges(shape)
    steps = list(edges)
    for dim in reversed(range(len(shape))):
        across = -(-region[dim].stop // edges[dim]) - region[dim].start // edges[dim]
        steps[dim] *= max(1, min(across, _BLOCK // math.prod(steps)))
    for corner in _corners(region, edges, steps):
        boxes = zip(corner, steps, region, strict=True)
        yield tuple(slice(max(a, part.start), min(a + step, part.stop)) for a, step, part in boxes)


def _edges(shape: Sequence[int]) -> list[int]:
    edges: list[int] = []
    for size in reversed(shape):
        left = _ELEMENTS // math.prod(edges) if edges else _LAST
        edges.insert(0, max(1, min(size, left)))
    return edges


def _corners(region: Region, edges: Sequence[int], steps: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Where boxes begin that overlap a region: at its first tile, and so many elements on."""
    if any(part.start >= part.stop for part in region):
        return iter(())
    zipped = zip(region, edges, steps, strict=True)
    return itertools.product(*(range(part.start // edge * edge, part.stop, step) for part, edge, step in zipped))


def digest(*values: object) -> int:
    """Return 128 bits that depend on some values."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:16], "little")


class Numbers:
    """Random numbers by key: numpy's Philox, begun anew with each key. For one thread."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(0)  # one for each key would take longer than the numbers of a small tile
        self._generator, self._state = np.random.Generator(self._bits), self._bits.state

    def begin(self, key: int) -> np.random.Generator:
        """Return the generator at the first number of a key of 128 bits, as a new one would be."""
        self._state["state"]["key"] = np.array([key % 2**64, key >> 64], np.uint64)
        self._bits.state = self._state
        return self._generator


def normal(tile: torch.Tensor, numbers: np.random.Generator, mean: float = 0.0, std: float = 1.0) -> None:
    """Draw a tile from the normal distribution: the same float32 numbers for every dtype, up to its rounding.

    Args:
        tile: where to; contiguous, on the CPU.
        numbers: at the first number of a key, for one tile and one draw.
        mean: of the distribution.
        std: of the distribution.
    """
    kind = np.float64 if tile.dtype == torch.float64 else np.float32
    # numpy draws other numbers in float64; a float64 reference must start from what is trained in float32.
    drawn = tile.numpy().reshape(-1) if tile.dtype == torch.float32 else np.empty(tile.numel(), np.float32)
    values = numbers.standard_normal(dtype=np.float32, out=drawn).astype(kind, copy=False)
    values *= kind(std)
    values += kind(mean)
    if tile.dtype != torch.float32:
        tile.copy_(torch.from_numpy(values).view(tile.shape))


def uniform(tile: torch.Tensor, numbers: np.random.Generator, low: float = 0.0, high: float = 1.0) -> None:
    """Draw a tile from [low, high)."""
    tile.copy_(torch.from_numpy(_between(numbers, tile.numel(), low, high)).view(tile.shape))
    if low < high:  # rounding may have reached the end, which is not in it
        ends = torch.tensor([high, low], dtype=tile.dtype, device="cpu")
        tile.clamp_(max=torch.nextafter(ends[0], ends[1]))


def truncated(
    tile: torch.Tensor, numbers: np.random.Generator, mean: float, std: float, low: float, high: float
) -> None:
    """Draw a tile from the part of a normal distribution that lies between two bounds, by the inverse of its CDF."""
    first, last, step = (low - mean) / std, (high - mean) / std, std
    if first + last > 0:  # near 0 a probability has digits that it lacks near 1
        first, last, step = -last, -first, -std
    least, most = (0.5 * math.erfc(-x / math.sqrt(2)) for x in (first, last))
    chance = torch.from_numpy(_between(numbers, tile.numel(), least, most)).view(tile.shape)
    tile.copy_(torch.special.ndtri(chance, out=chance).mul_(step).add_(mean).clamp_(low, high))


def _between(numbers: np.random.Generator, count: int, low: float, high: float) -> np.ndarray[Any, np.dtype[Any]]:
    values = numbers.random(count)
    values *= high - low
    values += low
    return values


# A parameter or buffer that is being filled: writes that can be done tile by tile, and its unsharded values -----------

Write = Callable[[torch.Tensor, np.random.Generator], object]  # computes a tile in place


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

    def discard(self) -> None:
        """Forget all values: each element is about to get another one."""
        if self.locked:
            return
        self._writes, self._covered, self._stored = [], False, False
        if self.unsharded is None:
            self.begin()
            self.unsharded = torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device="cpu")

    def store(self, local: torch.Tensor) -> None:
        """Take this rank's shard of values that all ranks have."""
        if self.locked:
            return
        self.local.copy_(local)
        self._writes, self._covered, self._stored = [], False, True
        self.filled, self.unsharded = True, None

    def unshard(self) -> torch.Tensor | None:
        """Return the unsharded values on the CPU, to read and to write; None if only other ranks have them."""
        if self.unsharded is None:
            lost = self.sharded and not self._covered and (self._stored or not self.fresh)
            if lost and not self.locked:
                return None
            self.begin()
            self.unsharded = torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device="cpu")
            everything = tuple(slice(0, size) for size in self.tensor.shape)
            _carry_out(self.blocks(self.unsharded, everything), _threads(self.tensor.numel()))
        return self.unsharded

    def reshard(self) -> None:
        """Keep this rank's shard of the unsharded values, if there are any."""
        unsharded, self.unsharded, self._begun = self.unsharded, None, False
        if unsharded is None or self.locked:
            return
        self.local.copy_(unsharded[self.region])
        may_be_nan = unsharded.is_floating_point() or unsharded.is_complex()
        self.filled = self.filled or not (may_be_nan and bool(unsharded.isnan().any()))
        self._writes, self._covered, self._stored = [], False, True

    def flushed(self) -> Iterator[_Block]:
        """Return blocks that carry out all writes that are still pending."""
        if self._writes:
            yield from self.blocks(self.local, self.region)
        self._writes, self._covered, self._stored = [], False, True

    def blocks(self, into: torch.Tensor, region: Region) -> Iterator[_Block]:
        """Return the blocks of a region that `into` gets; on a device each has memory on the host for itself."""
        own, writes = self.local, tuple(self._writes)
        for box in _blocks(self.tensor.shape, region):
            before, held = None, _overlap(box, self.region)
            if not self._covered:
                has_some = all(part.start < part.stop for part in held)
                before = own[_within(held, self.region)].cpu() if has_some else torch.empty(0, device="cpu")
            target = into[_within(box, region)]
            host = target if target.device.type == "cpu" else torch.empty(target.shape, dtype=into.dtype, device="cpu")
            yield _Block(self, writes, box, target, host, before, held)


def flush(targets: Sequence[FillTarget], threads: int | None = None) -> None:
    """Carry out all writes that are pending.

    Args:
        targets: of which.
        threads: how many compute. Default: as many as there are CPUs for this process.
    """
    in_memory: dict[int, list[FillTarget]] = {}
    for target in targets:
        in_memory.setdefault(target.local.untyped_storage()._cdata, []).append(target)
    for apart in itertools.zip_longest(*in_memory.values()):  # one tensor of those that share memory
        chosen = [target for target in apart if target is not None]
        blocks = (block for target in chosen for block in target.flushed())
        _carry_out(blocks, threads or _threads(sum(target.local.numel() for target in chosen)))


@dataclass(frozen=True, eq=False)
class _Block:
    """A box of a tensor that a thread computes tile by tile.

    Tiles are computed in full, so that the ends of a shard change nothing.

    Args:
        target: the tensor.
        writes: to carry out, each with its number.
        box: the elements, none of whose tiles is in another block.
        into: what gets them, on its device.
        host: the same memory, or, of a device, some on the host.
        before: what this rank has of the box before the writes, on the CPU; None: they set every element.
        held: where that lies; an end before its start, where it is nothing.
    """

    target: FillTarget
    writes: Sequence[tuple[Write, int]]
    box: Region
    into: torch.Tensor
    host: torch.Tensor
    before: torch.Tensor | None
    held: Region

    @torch.no_grad()  # of the calling thread, whichever that is
    def compute(self) -> None:
        """Compute the tiles, on the host."""
        numbers, values, dtype = Numbers(), torch.empty(0, device="cpu"), self.host.dtype
        for tile in tiles(self.target.tensor.shape, self.box):
            size = tuple(part.stop - part.start for part in tile)
            if values.shape != size or values.dtype != dtype:
                values = torch.empty(size, dtype=dtype, device="cpu")
            self._begin(values, tile)
            for write, number in self.writes:
                key = digest(self.target.seed, self.target.name, number, [part.start for part in tile])
                write(values, numbers.begin(key))
            wanted = _overlap(tile, self.box)
            drawn = values if wanted == tile else values[_within(wanted, tile)]
            self.host[_within(wanted, self.box)].copy_(drawn)

    def _begin(self, values: torch.Tensor, tile: Region) -> None:
        """Set a tile to what was there, and to no value where this rank has none."""
        if self.before is None:
            return
        values.fill_(float("nan") if values.is_floating_point() or values.is_complex() else 0)
        held = _overlap(tile, self.held)
        if all(part.start < part.stop for part in held):
            values[_within(held, tile)] = self.before[_within(held, self.held)]

    def store(self) -> None:
        """Copy them to the device; for the thread whose stream that is."""
        if self.host is not self.into:
            self.into.copy_(self.host)


def _carry_out(blocks: Iterable[_Block], threads: int) -> None:
    """Compute and store blocks; of those on a device, few are on the host at a time."""
    if threads == 1:
        for block in blocks:
            block.compute()
            block.store()
        return
    with ThreadPoolExecutor(threads, "hyper_parallel.init") as pool:
        running: deque[tuple[_Block, Future[None]]] = deque()
        for block in blocks:
            running.append((block, pool.submit(block.compute)))
            if len(running) == 2 * threads:
                _finish(*running.popleft())
        while running:
            _finish(*running.popleft())


def _finish(block: _Block, computed: Future[None]) -> None:
    computed.result()
    block.store()


def _threads(elements: int) -> int:
    """How many threads compute so many elements: this process's share of the CPUs that it may run on."""
    if elements < _ENOUGH or threading.current_thread() is not threading.main_thread():
        return 1  # a rank that is itself a thread, beside others, has no CPUs of its own
    has_affinity = hasattr(os, "sched_getaffinity")
    cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, cpus // _processes())


def _processes() -> int:
    """How many processes torchrun has started on this machine."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(said)) if said.isdecimal() else 1


def _overlap(one: Region, other: Region) -> Region:
    return tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))


def _within(part: Region, outer: Region) -> Region:
    """A region as slices of another one that it lies in."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(part, outer, strict=True))
