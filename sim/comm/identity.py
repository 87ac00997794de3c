"""Identities of collectives: whose parameters they move and what for, and whether the members of a group agree.

Names say whether ranks gather the same unit, but two models have the same names. So the objects that issue collectives
are introduced to their counterparts on the other ranks at the first collective of theirs, and belong together from
then on. Of objects of one name those that a rank has made earlier belong to those that the others have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ReferenceType, ref


class Identity:
    """What a rank's collectives of one purpose, of one object, in one group, are for.

    Attributes:
        text: Names it, alike on all ranks of the group.
        made: Number of the object among those of its rank, in the order in which they were made; 0: unknown.
        peers: The one of each member, once they have met.
    """

    __slots__ = ("made", "peers", "text")

    def __init__(self, text: str, made: int = 0) -> None:
        self.text = text
        self.made = made
        self.peers: tuple[Identity, ...] | None = None


def agree(one: Identity | None, other: Identity | None) -> bool:
    """Return True if two members of a group mean the same collective, as far as is known before they are introduced."""
    if one is other:
        return True
    if one is None or other is None:
        return False
    return one.peers is other.peers and (one.peers is not None or one.text == other.text)


class Identities:
    """The identities of the collectives in one group."""

    def __init__(self) -> None:
        # By member, purpose and the owner's id; with the owner, since an id is used again. A dictionary of weak keys
        # does the same in several times the time, which each collective would pay.
        self._known: dict[tuple[int, str, int], tuple[ReferenceType[Any] | None, Identity]] = {}
        self._met: dict[str, list[tuple[Identity, ...]]] = {}

    def of(self, member: int, issuer: tuple[str, Any, Callable[[Any], str], Callable[[Any], int]]) -> Identity:
        """Return that of a member's collective, given who issues it (an `Issuer`)."""
        purpose, owner, what, made = issuer
        key = member, purpose, id(owner)
        found = self._known.get(key)
        if found is not None and (found[0] is None or found[0]() is owner):
            return found[1]
        if owner is None:
            self._known[key] = None, Identity(purpose)
        else:
            self._known[key] = ref(owner), Identity(f"{purpose} {what(owner)}", made(owner))
        return self._known[key][1]

    def introduce(self, identities: Sequence[Any]) -> bool:
        """Let identities that agree belong together; False if the members have made their objects in another order."""
        peers = tuple(identities)
        earlier = self._met.setdefault(peers[0].text, [])
        if any(_crossed(peers, others) for others in earlier):
            return False
        earlier.append(peers)
        for identity in peers:
            identity.peers = peers
        return True

    def number(self, identity: Identity, member: int) -> int:
        """Return the place of a member's object among those of its name, by the order in which they were made."""
        known = {peers[member].made for peers in self._met.get(identity.text, ())} | {identity.made}
        return sorted(known).index(identity.made) + 1


def _crossed(some: Sequence[Identity], others: Sequence[Identity]) -> bool:
    """Return True if some members have made the first before the second, and others after it."""
    orders = {(a.made > b.made) - (a.made < b.made) for a, b in zip(some, others, strict=True) if a.made and b.made}
    return {-1, 1} <= orders
