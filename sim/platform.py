"""The simulated device: the host's memory, with the backend ``sim``."""

from __future__ import annotations

from hyper_parallel.platform import Platform
from hyper_parallel.platform.cpu import CpuPlatform

__all__ = ["SimPlatform", "provide"]


class SimPlatform(CpuPlatform):
    """What ``hyper_parallel.get_platform()`` answers on a simulated rank."""

    backend = "sim"

    def name(self) -> str:
        """Return "simulated rank"."""
        return "simulated rank"


def provide(device_type: str | None) -> Platform | None:
    """The simulated device for a rank that asks for the default, ``cpu``, or what is mapped to it; else None."""
    from sim.world import current_context

    context = current_context()
    if context is None or device_type not in (None, "cpu", context.world.map_device):
        return None
    return SimPlatform()
