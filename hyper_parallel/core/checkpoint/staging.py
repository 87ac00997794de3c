"""Copies on the host of what is to be saved, so that training can go on and change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from hyper_parallel.core.checkpoint.shards import LocalShard
from hyper_parallel.platform import get_platform

__all__ = ["Staging"]


class Staging:
    """Host memory for the shards of one rank; every save uses the same again.

    On an accelerator the copies are queued behind the work that is there already, into pinned memory: the host goes on
    at once, and the device is busy with them for as long as they take.
    """

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def copy(self, shards: Mapping[str, LocalShard]) -> tuple[dict[str, LocalShard], Callable[[], None]]:
        """Copy the shards that this rank is to write; call the second of the results before reading the first.

        Whatever an earlier call has returned is overwritten.
        """
        mine = {name: shard for name, shard in shards.items() if shard.writes and shard.is_there}
        kept = {name: self._fitting(name, shard.local) for name, shard in mine.items()}
        self._memory = kept  # and what is not needed any more is given back
        devices = dict.fromkeys(shard.local.device.type for shard in mine.values())
        with torch.no_grad():
            for name, shard in mine.items():
                kept[name].copy_(shard.local, non_blocking=True)
        events = []
        for device in devices:
            if (platform := get_platform(device)).has_streams:
                event = platform.new_event()
                event.record()
                events.append(event)

        def wait() -> None:
            for event in events:
                event.synchronize()

        return {name: replace(shard, local=kept[name]) for name, shard in mine.items()}, wait

    def _fitting(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Return the memory that has been used under a name, if it fits, or new memory."""
        old = self._memory.pop(name, None)
        if old is not None and old.shape == local.shape and old.dtype == local.dtype:
            return old
        pinned = local.device.type != "cpu" and get_platform(local.device.type).supports_pinned_memory
        return torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)
