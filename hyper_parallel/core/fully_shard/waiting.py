"""Reductions that the end of backward has left under way, until somebody asks for their gradients."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

if TYPE_CHECKING:
    from hyper_parallel.core.fully_shard.schedule import Schedule

__all__ = ["hsdp_sync_stream", "remember"]

# Guards the table below; it is no state of a rank, but a lock.
_LOCK = threading.Lock()

# Schedules with reductions under way, oldest first, of each default process group: every rank has one of its own, so
# this holds no state of a rank that another could see. A process group takes no attributes, hence a table beside it;
# all access is under the lock.
_SCHEDULES = WeakKeyDictionary[dist.ProcessGroup, "list[weakref.ref[Any]]"]()


def remember(schedule: Schedule) -> None:
    """Note that ``schedule`` has reductions under way."""
    world = dist.group.WORLD
    if world is None:
        return
    with _LOCK:
        known = _SCHEDULES.setdefault(world, [])
        if not any(reference() is schedule for reference in known):
            known.append(weakref.ref(schedule))


def hsdp_sync_stream() -> None:
    """Wait until every asynchronous reduction of the calling rank has been applied; nothing pending: do nothing.

    ::

        loss.backward()
        hsdp_sync_stream()  # with hsdp(..., comm_async=True), before gradients are read
        optimizer.step()

    Communication: what the reductions still have to do; every rank calls it at the same place.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        return
    with _LOCK:
        waiting = _SCHEDULES.pop(world, [])
    for reference in waiting:
        schedule = reference()
        if schedule is not None:
            schedule.finish_reductions()
