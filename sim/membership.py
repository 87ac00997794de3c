"""Finds groups that ranks have made under one number, but of different ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.errors import CollectiveMismatch, ranks_phrase, short_ranks_phrase, table
from sim.handling import being_handled

if TYPE_CHECKING:
    from sim.process_group import SimProcessGroup
    from sim.world import World

__all__ = ["group_mismatch"]


def group_mismatch(world: World) -> CollectiveMismatch | None:
    """The error for a group on whose members the ranks do not agree, if there is one.

    torch numbers the groups that a rank is told of, whether it is in them or not, and the k-th one must be the same
    everywhere. Those that ranks make with ``use_local_synchronization`` are named by their members instead.
    """
    made: dict[tuple[int, int, str], dict[int, SimProcessGroup]] = {}  # torch begins to count anew with a default group
    for context in world.contexts:
        if context.rank not in world.faults.losses.by_rank:
            for group, name in context.c10d.pg_names.items():
                made.setdefault((context.generation, context.inits, name), {})[context.rank] = group
    for (*_, name), groups in sorted(made.items(), key=lambda item: (len(item[0][2]), item[0])):
        if name.isdigit() and _overlap_and_differ(groups):
            return _error(world, name, groups)
    return None


def _overlap_and_differ(groups: dict[int, SimProcessGroup]) -> bool:
    members = list(dict.fromkeys(group.members for group in groups.values()))
    return sum(map(len, members)) > len({rank for ranks in members for rank in ranks})


def _error(world: World, name: str, groups: dict[int, SimProcessGroup]) -> CollectiveMismatch:
    by_members: dict[tuple[int, ...], list[int]] = {}
    for rank, group in sorted(groups.items()):
        by_members.setdefault(group.members, []).append(rank)
    usual = max(by_members.values(), key=len)
    is_clear = [len(ranks) for ranks in by_members.values()].count(len(usual)) == 1
    concerned = sorted({rank for members in by_members for rank in members})
    rows, marked = [], []
    for index, rank in enumerate(concerned):
        if rank not in groups:
            rows.append((f"rank {rank}", "is not in its group of that number", "", ""))
            continue
        group = groups[rank]
        axis = f"axis {group.group_desc.removeprefix('mesh_')!r}" if group.group_desc.startswith("mesh_") else ""
        rows.append((f"rank {rank}", f"of {short_ranks_phrase(group.members)}", axis, group.line))
        if is_clear and rank not in usual:
            marked.append(index)
    differs = ", ".join(f"{short_ranks_phrase(m)} on {ranks_phrase(who)}" for m, who in by_members.items())
    handled = being_handled(world)
    return handled.chained(
        CollectiveMismatch(
            f"the ranks do not agree on the members of the group that they made as number {name}\n"
            f"{table(rows, marked=marked)}\n"
            f"{handled.lines}"
            f"  differs: group ({differs})\n"
            "  try: let every rank make the same groups and meshes, of the same ranks, in the same order\n"
            f"  replay: {world.replay}"
        )
    )
