"""Lets ranks that are left make the default group anew, under new ranks and a smaller world size."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sim.kernel.scheduler import Waitable

if TYPE_CHECKING:
    from sim.world import RankContext, World

__all__ = ["Reform"]


class Gathering(Waitable):
    """Ranks that wait in ``init_process_group`` until there are as many as the new world is to have."""

    __slots__ = ("generation", "members", "size")

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.members: dict[int, int] = {}  # from the rank that each has chosen to the one it is in this world
        self.generation = 0

    def describe(self) -> str:
        return f"init_process_group of {self.size} ranks, where {len(self.members)} have come"


class Reform:
    """Where the ranks of a world meet; one gathering per size."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._gatherings: dict[int, Gathering] = {}
        self._made = 0

    def join(self, context: RankContext, rank: int, size: int) -> None:
        """Wait until ``size`` ranks have come; the calling one is ``rank`` among them. -1: the environment says so.

        Raises:
            ValueError: No rank of a world that can be, or one that another rank has chosen.
            RankLost: Not enough have come.
        """
        rank = int(os.environ["RANK"]) if rank == -1 else rank
        size = int(os.environ["WORLD_SIZE"]) if size == -1 else size
        whole = self._world.world_size
        if not 0 <= rank < size <= whole:
            raise ValueError(
                f"init_process_group was asked for rank {rank} of {size} by one of the {whole} simulated ranks\n"
                f"  rank, world_size: the ranks that are left, numbered from 0\n"
                "  try: rank=survivors.index(sim.current_rank()), world_size=len(survivors)"
            )
        gathering = self._gatherings.setdefault(size, Gathering(size))
        taken = gathering.members.setdefault(rank, context.rank)
        if taken != context.rank:
            raise ValueError(
                f"init_process_group was asked for rank {rank} of {size} by two ranks\n"
                f"  seen: simulated ranks {taken} and {context.rank}\n"
                "  try: rank=survivors.index(sim.current_rank()), with the same survivors on each of them"
            )
        if len(gathering.members) == size:
            self._made += 1
            gathering.generation = self._made
            del self._gatherings[size]
            self._world.scheduler.complete(gathering)
        try:
            self._world.scheduler.block(gathering)
        except BaseException:
            if self._gatherings.get(size) is gathering:
                del self._gatherings[size]
            raise
        context.members = tuple(gathering.members[each] for each in range(size))
        context.generation = gathering.generation
