"""Process groups over any set of ranks, made when first needed and kept for as long as the default group lives."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Guards the table below, and is held for no longer than a look into it; it is no state of a rank, but a lock.
_LOCK = threading.Lock()

# Groups by ranks, of each default process group: every rank has a default group of its own, so this holds
# no state of a rank that another one could see. A process group takes no attributes, hence a table beside it; all
# access is under the lock.
_GROUPS = WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]()


def group_of(ranks: tuple[int, ...], axes: Sequence[str], mesh: DeviceMesh | None = None) -> dist.ProcessGroup:
    """Return the process group of some ranks, which must all ask for it the first time, in the same order.

    The group of a mesh's axis is used where there is one, and the default group for all ranks; otherwise a new one is
    made, without the ranks outside.

    Args:
        ranks: global ranks, sorted, the calling one among them.
        axes: the axes they lie along, for a new group's name.
        mesh: a mesh that may have the group.
    """
    world = dist.group.WORLD
    assert world is not None, "the callers check that torch.distributed is initialized"
    with _LOCK:
        known = _GROUPS.setdefault(world, {})
        found = known.get(ranks)
    if found is None:
        found = _existing(ranks, axes, mesh) or dist.new_group(
            list(ranks), use_local_synchronization=True, group_desc="mesh_" + "+".join(axes)
        )
        assert isinstance(found, dist.ProcessGroup), "the calling rank is one of the group's"
        with _LOCK:
            known[ranks] = found
    return found


def _existing(ranks: tuple[int, ...], axes: Sequence[str], mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    if mesh is not None and len(axes) == 1 and mesh.mesh_dim_names and axes[0] in mesh.mesh_dim_names:
        group = mesh.get_group(axes[0])
        if tuple(dist.get_process_group_ranks(group)) == ranks:
            return group
    world = dist.group.WORLD
    return world if world is not None and len(ranks) == dist.get_world_size() else None
