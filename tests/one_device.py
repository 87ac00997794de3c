"""A late device that ranks share as if it was a real one, with all streams and events as late as they may be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from sim.late.device import LateDevice, as_device
from sim.late.memory import RaceReport
from sim.late.module import MODULE
from sim.late.queue import LateQueue
from sim.late.shared import SharedDevice
from sim.observers.races import Races
from sim.world import World, WorldOptions


class OnOneLateDevice(World):
    """Ranks that share one late device as if it was a real one.

    Attributes:
        looks: Whether the device itself raises where nothing orders two accesses.
    """

    looks = False

    def _make_devices(self, races: Races | None) -> LateQueue:
        queue = LateQueue(self.options.seed, as_device)
        looks = RaceReport(self.scheduler.fail, lambda: self.replay) if self.looks else None
        one = LateDevice(0, queue, looks)
        for context in self.contexts:
            context.late = one
        self._share("npu", races)
        for context in self.contexts:
            context.shared.attach = partial(_attach, context.shared, one)
        return queue


def _attach(device: SharedDevice, one: LateDevice, module: Any) -> None:
    """A real module's functions answer on any thread, these on a rank's only."""
    answers = {name: partial(MODULE[name], one) for name in MODULE}
    answers["memory_stats_as_nested_dict"] = lambda: nested(answers["memory_stats"]())
    SharedDevice.attach(device, SimpleNamespace(**answers))
    device.module = module
    if device.shadow is not None:
        device.shadow.is_pinned = one.is_pinned


def nested(stats: dict[str, int]) -> dict[str, Any]:
    """The counts of an allocator as torch has them before they get long names."""
    found: dict[str, Any] = {}
    for name, value in stats.items():
        what, pool, of = name.split(".")
        found.setdefault(what, {}).setdefault(pool, {})[of] = value
    return found


def shared(
    body: Callable[..., Any], ranks: int = 2, *, args: tuple[Any, ...] = (), looks: bool = False, **options: Any
) -> list[Any]:
    """Run a function on ranks that share the device; see `OnOneLateDevice` and `sim.run`."""
    kind = type("OnOneLateDevice", (OnOneLateDevice,), {"looks": looks})
    with kind(ranks, WorldOptions(device="npu", **options)) as world:
        return world.run(body, args)
