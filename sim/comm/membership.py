"""The groups that ranks have made, by number: those of one number must be of the same ranks everywhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.explain.errors import CollectiveMismatch, ranks_phrase, short_ranks_phrase, table
from sim.explain.handling import being_handled
from sim.explain.lines import user_line

if TYPE_CHECKING:
    from sim.world import World

__all__ = ["GroupsMade", "group_mismatch"]

# The rank's default group (how often the ranks that were left, and how often it, had made one), and the group's number.
Key = tuple[int, int, int]


class _Asked(NamedTuple):
    """What a rank has asked for.

    Attributes:
        members: The ranks of the group, in the numbering of the default group.
        axis: The axis of a mesh that the group is for; empty for other groups.
        line: The user's.
    """

    members: tuple[int, ...]
    axis: str
    line: str


def _has_several(asked: _Asked) -> bool:
    return len(asked.members) > 1


class GroupsMade:
    """What the ranks of a world have asked for.

    torch numbers the groups that a rank is told of, whether it is in them or not, and makes them when all ranks have
    come; simulated ranks do not wait there. Groups made with ``use_local_synchronization`` have no number.

    Attributes:
        others: By group, and rank, what is not what the first rank has asked for.
    """

    def __init__(self) -> None:
        self.others: dict[Key, dict[int, _Asked]] = {}
        self.known: dict[Key, tuple[int, list[int], dict[str, Any]]] = {}  # of how many ranks, which, and how
        self._first: dict[Key, _Asked] = {}
        self._members: dict[tuple[Key, int], _Asked] = {}
        self._most = 1024  # members, until those of groups that all ranks have made are forgotten

    def note(self, key: Key, rank: int, members: Iterable[int], description: str) -> None:
        """Note that ``rank``, which is in it, or is the first or of another mind, has made a group of ``members``."""
        axis = description.removeprefix("mesh_") if description.startswith("mesh_") else ""
        asked = _Asked(tuple(sorted(members)), axis, user_line())
        self._members[key, rank] = asked
        if self._first.setdefault(key, asked).members != asked.members:
            self.others.setdefault(key, {})[rank] = asked

    def forget_before(self, key: Key | None) -> None:
        """Forget groups before ``key``, which all ranks have made and agree on: a long run may make many."""
        if key is None or len(self._members) < self._most:
            return
        self._first = {k: asked for k, asked in self._first.items() if k >= key or k in self.others}
        self._members = {of: asked for of, asked in self._members.items() if of[0] in self._first}
        self.known = {k: how for k, how in self.known.items() if k in self._first}
        self._most = max(1024, 2 * len(self._members))

    def differing(self) -> list[Key]:
        """The groups on whose members ranks differ; where each has one member only, nobody waits for another."""
        return [
            key for key, others in self.others.items() if any(map(_has_several, (self._first[key], *others.values())))
        ]

    def of(self, key: Key, rank: int) -> _Asked:
        """What ``rank`` has asked for, which has made the group; who is not in it has asked for what the first has."""
        return self._members.get((key, rank)) or self._first[key]._replace(line="")


def made_by_rank(world: World) -> dict[int, Key]:
    """The number of the next group, by rank; without ranks that are lost, or have no default group."""
    return {
        context.rank: (context.generation, context.inits, context.c10d.group_count)
        for context in world.contexts
        if context.rank not in world.faults.losses.by_rank and context.c10d.default_pg is not None
    }


def group_mismatch(world: World, *, at_end: bool = False) -> CollectiveMismatch | None:
    """The error for a group on whose members the ranks do not agree, if there is one.

    Args:
        world: The world.
        at_end: Whether all ranks have come to the end of their function, so that a group may be missing, too.
    """
    made = made_by_rank(world)
    keys = world.groups_made.differing()
    if at_end and not world.faults.losses.by_rank:
        keys += [fewest for fewest in made.values() if any(fewest[:2] == m[:2] and fewest < m for m in made.values())]
    if not keys:
        return None
    key = min(keys)
    by_rank = {rank: key < counted for rank, counted in made.items() if counted[:2] == key[:2]}
    return _error(world, key, by_rank, at_end)


def _error(world: World, key: Key, made: dict[int, bool], at_end: bool) -> CollectiveMismatch:
    by_members: dict[tuple[int, ...], list[int]] = {}
    asked = {rank: world.groups_made.of(key, rank) for rank, has in made.items() if has}
    for rank, found in asked.items():
        by_members.setdefault(found.members, []).append(rank)
    missing = [rank for rank, has in made.items() if not has] if at_end else []
    parts = [*by_members.values(), *([missing] if missing else [])]
    usual = max(parts, key=len)
    is_clear = [len(ranks) for ranks in parts].count(len(usual)) == 1
    rows: list[tuple[str, ...]] = []
    marked: list[int] = []
    for rank in sorted((*asked, *missing)):
        if is_clear and rank not in usual:
            marked.append(len(rows))
        if rank in missing:
            rows.append((f"rank {rank}", "has not made it", "", ""))
            continue
        found = asked[rank]
        axis = f"axis {found.axis!r}" if found.axis else ""
        rows.append((f"rank {rank}", f"of {short_ranks_phrase(found.members)}", axis, found.line))
    differs = [f"{short_ranks_phrase(m)} on {ranks_phrase(who)}" for m, who in by_members.items()]
    differs += [f"none on {ranks_phrase(missing)}"] if missing else []
    handled = being_handled(world)
    return handled.chained(
        CollectiveMismatch(
            f"the ranks do not agree on the members of the group that they made as number {key[2]}\n"
            f"{table(rows, marked=marked)}\n"
            f"{handled.lines}"
            f"  differs: group ({', '.join(differs)})\n"
            "  try: let every rank make the same groups and meshes, of the same ranks, in the same order\n"
            f"  replay: {world.replay}"
        )
    )
