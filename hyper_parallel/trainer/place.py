"""The calling rank's place in the world: from torchrun's environment, or alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from hyper_parallel.core.common.groups import init_process_group
from hyper_parallel.platform import Platform


@dataclass(frozen=True)
class RankPlace:
    """Which rank this is, and of how many.

    Args:
        rank: number in the world.
        local_rank: number on its machine, which is also its device.
        world_size: ranks in the world.
        local_world_size: ranks on this machine.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def current(cls) -> RankPlace:
        """Ask the process group of torch.distributed, where there is one; else read torchrun's environment.

        Raises:
            ValueError: there is no process group, and as `from_environment`.
        """
        if not dist.is_initialized():
            return cls.from_environment()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return cls(rank, _number("LOCAL_RANK", rank), world_size, _number("LOCAL_WORLD_SIZE", world_size))

    @classmethod
    def from_environment(cls) -> RankPlace:
        """Read RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, as torchrun sets them; none set means one rank.

        Raises:
            ValueError: one of them is no number, or only some of them are set; with more than one rank,
                MASTER_ADDR and MASTER_PORT belong to them.
        """
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        found = {name: os.environ[name] for name in (*names, "LOCAL_WORLD_SIZE") if name in os.environ}
        seen = ", ".join(f"{name}={value}" for name, value in found.items())
        if not all(value.isdigit() for value in found.values()):
            raise ValueError(f"cannot read torchrun's environment: not all numbers in {seen}")
        if not any(name in found for name in names):
            return cls()
        missing = [name for name in names if name not in found]
        if found.get("WORLD_SIZE", "1") != "1":
            missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(
                f"cannot read torchrun's environment: {' and '.join(missing)} not set, but {seen}\n"
                "  try: start the ranks with torchrun, or unset all of them for one rank"
            )
        world_size = int(found["WORLD_SIZE"])
        return cls(
            int(found["RANK"]), int(found["LOCAL_RANK"]), world_size, int(found.get("LOCAL_WORLD_SIZE", world_size))
        )


def _number(name: str, otherwise: int) -> int:
    """Read a number that whoever made the process group may have set or not."""
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else otherwise


@contextmanager
def process_group(platform: Platform, place: RankPlace) -> Iterator[None]:
    """Hold torch.distributed's process group for the block; one that is there already is used and left alone.

    Args:
        platform: says which backend: gloo, nccl or hccl.
        place: the calling rank; alone in its world it needs no rendezvous.
    """
    if dist.is_initialized():
        yield
        return
    if place.world_size == 1:
        dist.init_process_group(platform.backend, store=HashStore(), rank=0, world_size=1)
    else:
        init_process_group(platform.backend)
    try:
        yield
        # Nobody leaves while others still communicate: rank 0 holds the store, and a gloo thread that lets go of
        # its last tensor while the interpreter shuts down aborts the process.
        dist.barrier()
    finally:
        dist.destroy_process_group()
