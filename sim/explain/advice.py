"""Advice against a deadlock, by its cause."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sim.comm.group import Message, Slot
from sim.comm.store import WaitedKey

if TYPE_CHECKING:
    from sim.kernel.scheduler import RankThread, Waitable
    from sim.world import World

__all__ = ["Ring", "advice"]

SAME_ORDER = "let all ranks of a group call the same operations in the same order"


class Ring(NamedTuple):
    """The ranks that hold each other up.

    Attributes:
        kind: ``circle``: each waits for the next, the last for the first. ``finished``, ``asks``: the last one has
            finished, or asks again and again. ``nobody``: each waits for what no rank is to do.
        ranks: In the order in which they wait for each other.
    """

    kind: str
    ranks: tuple[int, ...]


def advice(world: World, threads: Sequence[RankThread], ring: Ring) -> str:
    """What may help the ranks that wait for each other."""
    waiting = [t.waiting for t in threads if t.waiting is not None and t.rank in ring.ranks]
    messages = [what for what in waiting if isinstance(what, Message)]
    return (
        next((found for message in messages if (found := _near_miss(world, message))), "")
        or (_of_circle(waiting, messages) if ring.kind == "circle" else "")
        or (_of_finished(waiting, ring) if ring.kind == "finished" else "")
        or (_of_nobody(world, waiting) if ring.kind == "nobody" else "")
        or ("let another rank do what the loop asks for, or end the loop" if ring.kind == "asks" else "")
        or SAME_ORDER
    )


def _near_miss(world: World, message: Message) -> str:
    """A message that would fit if it had another tag, group or receiver."""
    own, ranks = message.group.ranks[message.member], message.group.ranks
    if message.missing() == [own]:
        return f"let rank {own} {message.who_waits} to or from another rank: what it has itself needs no message"
    for group in world.groups.values():
        for other in group.unmatched():
            if other.who_waits == message.who_waits or ranks[message.receiver] != group.ranks[other.receiver]:
                continue
            senders = [m.group.ranks[m.sender] for m in (message, other) if m.sender is not None]
            if len(set(senders)) > 1:
                continue
            pair = (message, other) if message.who_waits == "send" else (other, message)
            sends, receives = (
                f"rank {m.group.ranks[m.member]} {verb}" for m, verb in zip(pair, ("sends", "receives"), strict=True)
            )
            if group is not message.group:
                first, second = [m.group.title for m in pair]
                return f"use one group on both sides: {sends} in {first!r}, {receives} in {second!r}"
            return f"give both sides one tag: {sends} with tag {pair[0].tag}, {receives} with tag {pair[1].tag}"
    return ""


def _of_circle(waiting: list[Waitable], messages: list[Message]) -> str:
    if waiting and len(messages) == len(waiting):
        kinds = {message.who_waits for message in messages}
        if kinds == {"recv"}:
            return "let one of them send before it receives, or use dist.isend or dist.batch_isend_irecv"
        if kinds == {"send"}:
            return "let one of them receive before it sends, or use dist.isend or dist.batch_isend_irecv"
        return "let the ranks send and receive in an order that fits, or use dist.batch_isend_irecv"
    groups = {what.group.name: what.group.title for what in waiting if isinstance(what, Slot)}
    if len(groups) > 1:
        names = " and ".join(map(repr, sorted(groups.values())))
        return f"let all ranks use the groups {names} in the same order"
    return ""


def _of_finished(waiting: list[Waitable], ring: Ring) -> str:
    last, before = ring.ranks[-1], ring.ranks[-2]
    for what in waiting:
        if isinstance(what, Slot) and last in what.missing():
            return f"let rank {last} call {what.describe()}, too, or let no rank of the group call it"
        if isinstance(what, Message) and what.missing() == [last] and what.group.ranks[what.member] == before:
            verb = "receive" if what.who_waits == "send" else "send"
            return f"let rank {last} {verb} what rank {before} waits for before it ends"
    return ""


# What lets a thread go on that waits in such a call of Python's.
_GOES_ON = (
    ("Lock.acquire", "release the lock"),
    ("RLock.acquire", "release the lock"),
    ("Semaphore.acquire", "release the semaphore"),
    ("Thread.join", "let the thread end"),
    ("Queue.get", "put something into the queue"),
    ("Queue.put", "get something out of the queue"),
    ("Event.wait", "set the event"),
    ("Condition.wait", "notify the condition"),
    ("Barrier.wait", "let all threads come to the barrier"),
    ("Future.result", "let the function of the future return"),
)


def _of_nobody(world: World, waiting: list[Waitable]) -> str:
    for what in waiting:
        if isinstance(what, WaitedKey):
            near = difflib.get_close_matches(what.name, sorted(world.store.data), n=1, cutoff=0.75)
            also = f"; the store has {near[0]!r}" if near else ""
            return f"let a rank set {what.name!r} in the store{also}"
    for what in waiting:
        call = what.describe()
        for name, remedy in _GOES_ON:
            if call.endswith(name):
                return f"{remedy} that {call} waits for, on another thread of the same rank, or give it a timeout"
    return "let another thread of the rank do what it waits for, or wait with a timeout" if waiting else ""
