"""One rank's end of the network: its state of torch.distributed, its store, and the names of its groups."""

from __future__ import annotations

from typing import Any

from sim.comm.group import Network
from sim.comm.store import RankStore
from sim.explain.errors import ranks_phrase
from sim.kernel.context import Context

__all__ = ["Endpoint"]


class Endpoint(Context):
    """What a rank has of its own to communicate.

    Attributes:
        network: What it shares with the other ranks.
        c10d: Its `torch.distributed` state (the default group, all groups by name ...).
        store: Its handle of the network's store.
        axis_names: The mesh axes whose groups go by another name, by group.
        joined_by_world: The world made the default group, so one `init_process_group` does nothing.
        has_joined: The world has made it, whatever became of it since.
        inits: How often it has made its default group.
        members: The ranks of its default group, once ranks that were left have made that anew; None: all.
        generation: Counts those new default groups.
        regions: The names of the regions (`sim.region`) that it is in.
    """

    def __init__(self, rank: int, network: Network, c10d: Any) -> None:
        super().__init__(rank, network.scheduler)
        self.network = network
        self.c10d = c10d
        self.store = RankStore(network.store)  # kept here: torch's own references keep only its C++ half alive
        self.axis_names: dict[str, str] = {}
        self.joined_by_world = self.has_joined = False
        self.inits = 0
        self.members: tuple[int, ...] | None = None
        self.generation = 0
        self.regions: list[str] = []

    @property
    def place(self) -> tuple[int, int]:
        """Its rank in its default group, and how many ranks that has."""
        if self.members is None:
            return self.rank, self.network.world_size
        return self.members.index(self.rank), len(self.members)

    def axis_of(self, group_name: str, description: str, ranks: tuple[int, ...]) -> str:
        """The name a group is reported under: its mesh axis if a mesh made it, `world`, or its ranks."""
        if group_name in self.axis_names:
            return self.axis_names[group_name]
        if description.startswith("mesh_"):
            return description.removeprefix("mesh_")
        if description == "default_pg":
            return "world"
        if description in ("", "undefined"):
            return f"{group_name[:8]}: {ranks_phrase(ranks)}"
        return description
