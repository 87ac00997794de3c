"""All_reduces that take what several reductions leave, of adjacent units."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.core.fully_shard.comm import Pending, all_reduce

__all__ = ["ALIGNMENT", "SharedAllReduce", "Shares"]

# Reductions of adjacent units share an all_reduce up to this size: large enough for the latency not to count, small
# enough for the rest of backward to overlap with it.
SHARED_BYTES = 16 * 2**20
ALIGNMENT = 512  # bytes; what allocators and copy engines like


class SharedAllReduce:
    """One all_reduce for the parts that several reductions leave, of adjacent units.

    Reduce_scatters write straight into its buffer. It starts once it takes no more parts and all are there.
    """

    def __init__(self, group: dist.ProcessGroup, numel: int, like: torch.Tensor) -> None:
        self.group = group
        self.buffer = torch.empty(numel, dtype=like.dtype, device=like.device)
        self.filled = 0
        self.closed = False
        self._members = 0
        self._ready = 0
        self._work: Pending | None = None

    def take(self, numel: int) -> torch.Tensor | None:
        """A place of ``numel`` elements; None when there is none left."""
        step = ALIGNMENT // self.buffer.element_size()
        start = -(-self.filled // step) * step
        if self.closed or start + numel > self.buffer.numel():
            return None
        self.buffer[self.filled : start].zero_()
        self.filled = start + numel
        self._members += 1
        return self.buffer[start : self.filled]

    def arrived(self) -> None:
        """One more part is in its place."""
        self._ready += 1
        self._start()

    def close(self) -> None:
        """Take no more parts."""
        self.closed = True
        self._start()

    def _start(self) -> None:
        if self.closed and self._ready == self._members and self._work is None:
            self._work = all_reduce(self.buffer[: self.filled], self.group)

    def drop(self) -> None:
        """Wait for what is under way; take no more parts."""
        self.closed = True
        if self._work is not None:
            self._work.wait()

    def wait(self) -> None:
        """Have all parts reduced."""
        self.close()
        assert self._work is not None, "all reduce_scatters are through"
        self._work.wait()


class Shares:
    """The all_reduces of a backward that take parts of several units.

    Args:
        total: Bytes that all units together leave, so that no buffer is larger.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._open: dict[Any, SharedAllReduce] = {}

    def place(self, group: dist.ProcessGroup, numel: int, like: torch.Tensor) -> tuple[SharedAllReduce, torch.Tensor]:
        """Find or make the all_reduce that takes ``numel`` elements like those of ``like``, and the place in it."""
        key = (group, like.dtype, like.device)
        current = self._open.get(key)
        place = None if current is None else current.take(numel)
        if place is None:
            if current is not None:
                current.close()
            least = min(self.total, SHARED_BYTES) // like.element_size()
            current = self._open[key] = SharedAllReduce(group, max(numel, least), like)
            place = current.take(numel)
        assert current is not None
        assert place is not None
        return current, place

    def close(self) -> None:
        """Nothing more comes: start what has not."""
        for current in self._open.values():
            current.close()
        self._open = {}
