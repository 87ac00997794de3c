"""Who sends what to whom in one step, worked out on each rank for itself from global facts.

A rank receives what it needs from the ranks that have it. Where several have it each gives an even share, and the order
in which they are asked differs from one receiver to the next, so that nobody gives the larger shares to all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hyper_parallel.core.redistribute.holdings import Counts, Part, divide, meet, volume
from hyper_parallel.core.redistribute.steps import Step

Key = tuple[int, Part]
"""Which copy (0 when there are none to reduce) of which part."""


@dataclass(frozen=True)
class Piece:
    """A part that moves, or stays.

    Attributes:
        peer: place in the group of the rank at the other end.
        copy: which of the copies to reduce it belongs to, 0 when there are none.
        part: the elements.
        volume: their number.
    """

    peer: int
    copy: int
    part: Part
    volume: int


@dataclass(frozen=True)
class Program:
    """What one rank does in one exchange.

    Attributes:
        group: the ranks, sorted.
        me: the own place in the group.
        copies: how many copies are reduced; 1: none.
        have: what the rank holds before; None: it is not on that mesh.
        need: what it holds after, likewise.
        sends: in the order of the peers; the order within a peer is that in which it receives.
        receives: likewise.
        own: what it takes from itself.
    """

    group: tuple[int, ...]
    me: int
    copies: int
    have: Part | None
    need: Part | None
    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]
    own: tuple[Piece, ...]


@lru_cache(maxsize=4096)
def program(step: Step, rank: int, round_: int = 0) -> Program:
    """Return what a rank does in a step that exchanges parts, or in one of its rounds."""
    group = step.group_of(rank)
    view = _view(step, group, round_ if step.reduces else 0)
    me = group.index(rank)
    sends = [piece for peer in range(len(group)) for piece in view.between(me, peer)]
    receives = list(view.received(me))
    own = list(view.kept(me))
    if not step.reduces:
        sends, receives = _in_round(sends, step.rounds, round_), _in_round(receives, step.rounds, round_)
        own = own if round_ == 0 else []
    return Program(group, me, view.copies, view.have[me], view.need[me], tuple(sends), tuple(receives), tuple(own))


def count_sent(step: Step) -> Counts:
    """Return the bytes that each of the plan's ranks sends in a step, by going through all pieces."""
    sent = dict.fromkeys(step.ranks, 0)
    done: set[int] = set()
    for rank in step.ranks:
        if rank in done:
            continue
        group = step.group_of(rank)
        done.update(group)
        view = _view(step, group, 0)
        for me, member in enumerate(group):
            pieces = (piece for peer in range(len(group)) for piece in view.between(me, peer))
            sent[member] = sum(piece.volume for piece in pieces) * step.itemsize
    return np.array([sent[rank] for rank in step.ranks], dtype=np.int64)


def _in_round(pieces: list[Piece], rounds: int, index: int) -> list[Piece]:
    if rounds == 1:
        return pieces
    found = []
    for piece in pieces:
        part = divide(piece.part, rounds, index)
        if part is not None:
            found.append(Piece(piece.peer, piece.copy, part, volume(part)))
    return found


class _View:
    """One group of a step: what each member has and needs, and who else has the same.

    Rounds divide the pieces of an exchange, but of a reduction what is needed: all copies of an element come together.
    """

    def __init__(self, step: Step, group: tuple[int, ...], round_: int) -> None:
        self.copies = 1
        for axis in step.reduces:
            self.copies *= step.before.holding.sizes[axis]
        self.paired = step.kind == "permute"
        self.have: list[Part | None] = [step.before.part_of(rank) for rank in group]
        self.need: list[Part | None] = [step.after.part_of(rank) for rank in group]
        if step.reduces and step.rounds > 1:
            self.need = [None if part is None else divide(part, step.rounds, round_) for part in self.need]
        self.keys: list[Key | None] = []
        self.owners: dict[Key, list[int]] = {}
        for member, (rank, part) in enumerate(zip(group, self.have, strict=True)):
            if part is None or not all(part):
                self.keys.append(None)
                continue
            key = (_copy(step, rank), part)
            self.keys.append(key)
            self.owners.setdefault(key, []).append(member)
        self.matches = {key: self._match(key) for key in self.owners} if self.paired else {}

    def between(self, sender: int, receiver: int) -> Iterator[Piece]:
        """Yield what one member sends to another, as either of them sees it."""
        key, need = self.keys[sender], self.need[receiver]
        if sender == receiver or key is None or need is None or self.keys[receiver] == key:
            return
        part = meet(need, key[1])
        if part is None:
            return
        owners = self.owners[key]
        if self.paired:
            if self.matches[key].get(receiver) != sender:
                return
        elif len(owners) > 1:
            share = (owners.index(sender) + receiver) % len(owners)
            part = divide(part, len(owners), share)
            if part is None:
                return
        # Between two ranks there is one piece at most, so that the other end needs no name for it.
        yield Piece(receiver, key[0], part, volume(part))

    def received(self, receiver: int) -> Iterator[Piece]:
        """Yield what a member receives."""
        for sender in range(len(self.keys)):
            for piece in self.between(sender, receiver):
                yield Piece(sender, piece.copy, piece.part, piece.volume)

    def kept(self, member: int) -> Iterator[Piece]:
        """Yield what a member has itself of what it needs."""
        key, need = self.keys[member], self.need[member]
        if key is not None and need is not None:
            part = meet(need, key[1])
            if part is not None:
                yield Piece(member, key[0], part, volume(part))

    def _match(self, key: Key) -> dict[int, int]:
        """Match each member that lacks a part with one that has it."""
        lacking = [
            member
            for member, need in enumerate(self.need)
            if need is not None and self.keys[member] != key and meet(need, key[1]) is not None
        ]
        return dict(zip(lacking, self.owners[key], strict=False))


def _copy(step: Step, rank: int) -> int:
    """Return which of the copies a rank holds: its joint coordinate on the axes that are reduced."""
    coordinates = step.before.coordinates(rank)
    assert coordinates is not None, "a rank with a part is on the mesh"
    joint = 0
    for axis in step.reduces:
        joint = joint * step.before.holding.sizes[axis] + coordinates[axis]
    return joint


@lru_cache(maxsize=512)
def _view(step: Step, group: tuple[int, ...], round_: int) -> _View:
    return _View(step, group, round_)
