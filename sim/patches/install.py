"""All patches of torch and Python while a world is alive, and the world for which they are in place.

Each patch is a small function that makes one change and returns how to undo it; `tests/unit/sim/patches` has a test per
patch that fails when torch moves it. Outside of a rank's thread every patch answers what torch itself would
have answered.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.explain.errors import SimError
from sim.kernel.context import current_context
from sim.late.switch import LATE_PATCHES
from sim.patches.devices import DEVICE_PATCHES
from sim.patches.dtensor import DTENSOR_PATCHES
from sim.patches.helper_threads import HELPER_PATCHES
from sim.patches.locks import EVENT_LOOP_PATCHES, LOCK_PATCHES
from sim.patches.operators import OPERATOR_PATCHES
from sim.patches.process import PROCESS_PATCHES
from sim.patches.process_groups import PROCESS_GROUP_PATCHES
from sim.patches.rank import MESSAGE_PATCHES, Host, Undo
from sim.patches.settings import SETTING_PATCHES
from sim.patches.torch_modules import MODULE_PATCHES

PATCHES: tuple[Callable[[Host], Undo], ...] = (
    *PROCESS_GROUP_PATCHES,
    *DTENSOR_PATCHES,
    *DEVICE_PATCHES,
    *LATE_PATCHES,
    *PROCESS_PATCHES,
    *MODULE_PATCHES,
    *OPERATOR_PATCHES,
    *SETTING_PATCHES,
    *MESSAGE_PATCHES,
    *LOCK_PATCHES,
    *HELPER_PATCHES,
    *EVENT_LOOP_PATCHES,
)

# One world at a time: the patches are changes to the process.
_alive: list[tuple[Host, list[Undo]]] = []


def is_alive(host: Host) -> bool:
    """Whether `host` is the one whose patches are in place."""
    return bool(_alive) and _alive[0][0] is host


def install(host: Host) -> None:
    """Put all patches in place for `host`."""
    if current_context() is not None:
        raise SimError("a rank cannot start ranks of its own\n  try: call sim.run outside of a rank's function")
    if _alive:
        raise SimError(
            "a world cannot begin while another one is alive\n"
            f"  alive: a world of {_alive[0][0].network.world_size} ranks\n"
            "  try: leave its 'with' block first"
        )
    undos: list[Undo] = []
    _alive.append((host, undos))
    try:
        for patch in PATCHES:
            undos.append(patch(host))
    except BaseException:
        uninstall(host)
        raise


def uninstall(host: Host) -> None:
    """Undo all patches, the last one first."""
    if not is_alive(host):
        return
    _, undos = _alive[0]
    try:
        while undos:
            undos.pop()()
    finally:
        if undos:  # one of them raised: undo the others all the same
            uninstall(host)
        else:
            _alive.clear()
