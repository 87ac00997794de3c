"""Process groups over any set of ranks, made when first needed and kept for as long as the default group lives."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
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
        found = _existing(ranks, axes, mesh) or _new(ranks, axes)
        assert isinstance(found, dist.ProcessGroup), "the calling rank is one of the group's"
        if found is not world:  # a table that holds its own key is never freed
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


def _new(ranks: tuple[int, ...], axes: Sequence[str]) -> dist.ProcessGroup | None:
    """Make a group without the ranks outside of it."""
    if dist.get_backend() != "fake":  # there nobody else exists to agree with
        _agree_on_count(ranks)
    return dist.new_group(list(ranks), use_local_synchronization=True, group_desc="mesh_" + "+".join(axes))


def _agree_on_count(ranks: tuple[int, ...]) -> None:
    """Bring all members to the same number of groups.

    torch names a group that only its members make after its ranks and the number of groups that the process has. Ranks
    that have made different numbers before, as those of two meshes have, would wait for each other under different
    names, for ever. So the members compare, through the store, and those that have fewer make up for it with groups of
    their own.
    """
    store, mine = c10d._get_default_store(), len(c10d._world.pg_names)
    key = "hyper_parallel/" + "_".join(map(str, ranks))
    turn = (store.add(f"{key}/arrived", 1) - 1) // len(ranks)  # a store may outlive the groups made with it
    rank = dist.get_rank()
    store.set(f"{key}/{turn}/{rank}", str(mine))
    if rank == ranks[0]:
        counts = [int(store.get(f"{key}/{turn}/{member}")) for member in ranks]
        store.set(f"{key}/{turn}/most", str(max(counts)))
    for _ in range(int(store.get(f"{key}/{turn}/most")) - mine):
        dist.new_group([rank], use_local_synchronization=True, group_desc="hyper_parallel filler")
