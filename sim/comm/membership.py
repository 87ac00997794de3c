"""The groups that ranks have made, by number: those of one number must be of the same ranks everywhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from sim.explain.lines import user_line

__all__ = ["GroupsMade", "Key"]

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

    torch numbers the groups that a rank learns of, whether it is in them or not, and makes them when all ranks have
    come; simulated ranks do not wait there. Groups made with `use_local_synchronization` have no number.

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
        """Note that `rank`, which is in it, or is the first or of another mind, has made a group of `members`."""
        axis = description.removeprefix("mesh_") if description.startswith("mesh_") else ""
        asked = _Asked(tuple(sorted(members)), axis, user_line())
        self._members[key, rank] = asked
        if self._first.setdefault(key, asked).members != asked.members:
            self.others.setdefault(key, {})[rank] = asked

    def forget_before(self, key: Key | None) -> None:
        """Forget groups before `key`, which all ranks have made and agree on: a long run may make many."""
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
        """What `rank` has asked for, which has made the group; who is not in it has asked for what the first has."""
        return self._members.get((key, rank)) or self._first[key]._replace(line="")
