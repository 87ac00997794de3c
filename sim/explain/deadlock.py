"""The text of a deadlock: who waits where for whom, why that never ends, and what to try."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from sim.comm.group import Message, Network, Slot
from sim.comm.process_group import SimWork
from sim.comm.store import RankStore, WaitedKey
from sim.explain.errors import Deadlock, ranks_phrase, table
from sim.explain.lines import user_line
from sim.explain.mismatch import being_handled, call_row, tensor_text
from sim.kernel.threads import collector_paused
from sim.kernel.waiting import RankThread, Waitable
from sim.patches.locks import OURS, where

_SAME_ORDER = "let all ranks of a group call the same operations in the same order"


class _Ring(NamedTuple):
    """The ranks that hold each other up.

    Attributes:
        kind: `circle`: each waits for the next, the last for the first. `finished`, `asks`: the last one has
            finished, or asks again and again. `nobody`: each waits for what no rank is to do.
        ranks: In the order in which they wait for each other.
    """

    kind: str
    ranks: tuple[int, ...]


def deadlock(network: Network) -> Deadlock:
    """Describe a world in which no rank can run."""
    threads = network.scheduler.ranks
    if network.scheduler.helpers:
        threads = sorted([*threads, *network.scheduler.helpers], key=lambda thread: thread.rank)
    rows = [_row(thread) for thread in threads]
    waits_for: dict[int, list[int]] = {}
    for thread in threads:
        if thread.waiting is not None:
            missing = thread.waiting.missing()
            if missing or not thread.name:  # a rank that waits for its helper thread waits for whom that waits for
                waits_for[thread.rank] = [*waits_for.get(thread.rank, []), *missing]
    finished = {thread.rank for thread in network.scheduler.ranks if thread.finished}
    ring, because = _why(waits_for, finished)
    size = len(network.scheduler.ranks)
    handled = being_handled(network)
    return handled.chained(
        Deadlock(
            f"no rank can run: {size - len(finished)} of {size} ranks wait, and none of them can go on\n"
            f"{table(rows)}\n"
            f"{handled.lines}"
            f"  because: {because}\n"
            f"  try: {handled.advice or _advice(network, threads, ring)}\n"
            f"  replay: {network.replay}"
        )
    )


def _row(thread: RankThread) -> tuple[str, str, str, str]:
    name = f"rank {thread.rank}" + (f", thread {thread.name!r}" if thread.name else "")
    if thread.waiting is None:
        if thread.finished:
            return (name, "has finished", "", "")
        asked, line = _question(thread)
        return (name, f"asks again and again, in vain: {asked}", "", line)
    missing = thread.waiting.missing()
    whom = f"for {ranks_phrase(missing)}" if missing else ""
    line = thread.waiting.line_of(thread.rank) or where(thread)[1]
    return (name, f"waits in {thread.waiting.describe()}", whom, line)


def _question(thread: RankThread) -> tuple[str, str]:
    """What a thread asks in a loop ("Work.is_completed of ..."), and the user's line."""
    with collector_paused():
        frame = sys._current_frames().get(thread.ident)
    asked = "something"
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        name, found = frame.f_code.co_name, frame.f_locals
        owner = found.get("self")
        if isinstance(owner, SimWork):
            asked = f"Work.{name} of {owner.describe()}"
        elif isinstance(owner, RankStore):
            keys = found.get("keys", [found.get("key")])
            asked = f"Store.{name} of {', '.join(map(repr, keys))}"
        elif name == "sleep" and owner is None:
            asked = "time.sleep"
        elif name == "wait_for_file":
            asked = found.get("asked", asked)
        frame = frame.f_back
    return asked, user_line(frame)


def _why(waits_for: dict[int, list[int]], finished: set[int]) -> tuple[_Ring, str]:
    """Follow who waits for whom: either it comes back to a rank, or it ends at one that does not wait for any."""
    if not waits_for:
        return _Ring("asks", ()), "what a rank asks for in a loop never comes"
    path: list[int] = []
    rank = min(waits_for)
    while rank in waits_for and rank not in path:
        path.append(rank)
        blockers = waits_for[rank]
        if not blockers:
            ranks = [rank for rank, missing in sorted(waits_for.items()) if not missing]
            verb = "waits" if len(ranks) == 1 else "wait"
            what = f"{ranks_phrase(ranks)} {verb} for something that no rank is about to do"
            return _Ring("nobody", tuple(ranks)), what
        ended = [blocker for blocker in blockers if blocker in finished]
        rank = ended[0] if ended else blockers[0]
    if rank in path:
        ring = path[path.index(rank) :]
        if len(ring) == 1:
            return _Ring("circle", tuple(ring)), f"rank {rank} waits for itself"
        arrows = " -> ".join(f"rank {r}" for r in [*ring, rank])
        return _Ring("circle", tuple(ring)), f"{arrows} (each waits for the next)"
    has_finished = rank in finished
    end = "which has finished" if has_finished else "which asks again and again for what never comes"
    arrows = " -> ".join(f"rank {r}" for r in [*path, rank])
    return _Ring("finished" if has_finished else "asks", (*path, rank)), f"{arrows}, {end}"


def never_completed(network: Network, slots: list[Slot], messages: list[Message]) -> Deadlock:
    """Describe operations that were issued, never waited for, and never joined by all ranks."""
    if not slots:
        return _never_met(network, messages)
    slot = min(slots, key=lambda s: (s.group.ranks, s.seq))
    rows = [call_row(rank, call, slot) for rank, call in zip(slot.group.ranks, slot.calls, strict=True)]
    more = f" (and {len(slots) - 1} more)" if len(slots) > 1 else ""
    return Deadlock(
        f"all ranks have finished, but {slot.describe()} was never called by "
        f"{ranks_phrase(slot.missing())}{more}\n"
        f"{table(rows)}\n"
        "  try: call it on every rank of the group, and wait for the work that an async operation returns\n"
        f"  replay: {network.replay}"
    )


def _never_met(network: Network, messages: list[Message]) -> Deadlock:
    """Describe sends without a receive and receives without a send that nobody waited for."""
    rows = [
        (f"rank {message.group.ranks[message.member]}", message.describe(), tensor_text(message), message.line)
        for message in sorted(messages, key=lambda m: (m.group.ranks[m.member], m.group.name, m.seq))
    ]
    return Deadlock(
        "all ranks have finished, but not every send has met its recv\n"
        f"{table(rows)}\n"
        "  try: pair each send with a recv of the same group and tag, and wait for the work isend and irecv return\n"
        f"  replay: {network.replay}"
    )


# -- advice, by the cause -------------------------------------------------------------------------------------------


def _advice(network: Network, threads: Sequence[RankThread], ring: _Ring) -> str:
    """What may help the ranks that wait for each other."""
    waiting = [t.waiting for t in threads if t.waiting is not None and t.rank in ring.ranks]
    messages = [what for what in waiting if isinstance(what, Message)]
    return (
        next((found for message in messages if (found := _near_miss(network, message))), "")
        or (_of_circle(waiting, messages) if ring.kind == "circle" else "")
        or (_of_finished(waiting, ring) if ring.kind == "finished" else "")
        or (_of_nobody(network, waiting) if ring.kind == "nobody" else "")
        or ("let another rank do what the loop asks for, or end the loop" if ring.kind == "asks" else "")
        or _SAME_ORDER
    )


def _near_miss(network: Network, message: Message) -> str:
    """A message that would fit if it had another tag, group or receiver."""
    own, ranks = message.group.ranks[message.member], message.group.ranks
    if message.missing() == [own]:
        return f"let rank {own} {message.who_waits} to or from another rank: what it has itself needs no message"
    for group in network.groups.values():
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


def _of_finished(waiting: list[Waitable], ring: _Ring) -> str:
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


def _of_nobody(network: Network, waiting: list[Waitable]) -> str:
    for what in waiting:
        if isinstance(what, WaitedKey):
            near = difflib.get_close_matches(what.name, sorted(network.store.data), n=1, cutoff=0.75)
            also = f"; the store has {near[0]!r}" if near else ""
            return f"let a rank set {what.name!r} in the store{also}"
    for what in waiting:
        call = what.describe()
        for name, remedy in _GOES_ON:
            if call.endswith(name):
                return f"{remedy} that {call} waits for, on another thread of the same rank, or give it a timeout"
    return "let another thread of the rank do what it waits for, or wait with a timeout" if waiting else ""
