"""The simulated device: the host's memory, with the backend ``sim``, or the one that the world stands for."""

from __future__ import annotations

import torch

from hyper_parallel.platform import Platform
from hyper_parallel.platform.cpu import CpuPlatform
from sim.kernel.context import current_context

__all__ = ["SimPlatform", "provide"]


class SimPlatform(CpuPlatform):
    """What ``hyper_parallel.get_platform()`` answers on a simulated rank."""

    def __init__(self, where: str | None = None, stands_for: str | None = None, backend: str = "sim") -> None:
        self.backend = backend
        self._where = where
        self._stands_for = stands_for

    def device(self, index: int | None = None) -> torch.device:
        """The host; in meta mode, where there is no data, the device meta."""
        return super().device(index) if self._where is None else torch.device(self._where)

    @property
    def prefers_large_messages(self) -> bool:
        """Whether this stands for a device that does: what runs there is what is tried here."""
        return self._stands_for is not None

    def name(self) -> str:
        """Return "simulated rank"."""
        return "simulated rank"


def provide(device_type: str | None) -> Platform | None:
    """The simulated device for a rank that asks for the default, ``cpu``, or what is mapped to it; else None."""
    context = current_context()
    if context is None or device_type not in (None, "cpu", context.world.map_device):
        return None
    return context.world.platform()
