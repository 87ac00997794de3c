"""The text of a deadlock: who waits where for whom, why that never ends, and what to try."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from sim.comm.group import Message, Slot
from sim.comm.process_group import SimWork
from sim.comm.store import RankStore
from sim.explain.advice import Ring, advice
from sim.explain.errors import Deadlock, ranks_phrase, table
from sim.explain.handling import being_handled
from sim.explain.lines import user_line
from sim.explain.mismatch import call_row, tensor_text
from sim.observers.replicas import Meeting
from sim.patches.locks import OURS, where

if TYPE_CHECKING:
    from sim.kernel.scheduler import RankThread, Waitable
    from sim.world import World

__all__ = ["deadlock", "line_of", "never_completed"]


def deadlock(world: World) -> Deadlock:
    """Describe a world in which no rank can run."""
    threads = world.scheduler.ranks
    if world.scheduler.helpers:
        threads = sorted([*threads, *world.scheduler.helpers], key=lambda thread: thread.rank)
    rows = [_row(thread) for thread in threads]
    waits_for: dict[int, list[int]] = {}
    for thread in threads:
        if thread.waiting is not None:
            missing = thread.waiting.missing()
            if missing or not thread.name:  # a rank that waits for its helper thread waits for whom that waits for
                waits_for[thread.rank] = [*waits_for.get(thread.rank, []), *missing]
    finished = {thread.rank for thread in world.scheduler.ranks if thread.finished}
    ring, because = _why(waits_for, finished)
    size = len(world.scheduler.ranks)
    handled = being_handled(world)
    return handled.chained(
        Deadlock(
            f"no rank can run: {size - len(finished)} of {size} ranks wait, and none of them can go on\n"
            f"{table(rows)}\n"
            f"{handled.lines}"
            f"  because: {because}\n"
            f"  try: {handled.advice or advice(world, threads, ring)}\n"
            f"  replay: {world.replay}"
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
    line = line_of(thread.rank, thread.waiting) or where(thread)[1]
    return (name, f"waits in {thread.waiting.describe()}", whom, line)


def line_of(rank: int, waiting: Waitable) -> str:
    """The user's line that ``rank`` waits in; empty where none is known."""
    if isinstance(waiting, Slot):
        call = waiting.calls[waiting.group.ranks.index(rank)]
        return call.line if call is not None else ""
    if isinstance(waiting, Meeting):
        return waiting.lines.get(rank, "")
    return waiting.line if isinstance(waiting, Message) else ""


def _question(thread: RankThread) -> tuple[str, str]:
    """What a thread asks in a loop ("Work.is_completed of ..."), and the user's line."""
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
        frame = frame.f_back
    return asked, user_line(frame)


def _why(waits_for: dict[int, list[int]], finished: set[int]) -> tuple[Ring, str]:
    """Follow who waits for whom: either it comes back to a rank, or it ends at one that does not wait for any."""
    if not waits_for:
        return Ring("asks", ()), "what a rank asks for in a loop never comes"
    path: list[int] = []
    rank = min(waits_for)
    while rank in waits_for and rank not in path:
        path.append(rank)
        blockers = waits_for[rank]
        if not blockers:
            ranks = [rank for rank, missing in sorted(waits_for.items()) if not missing]
            verb = "waits" if len(ranks) == 1 else "wait"
            what = f"{ranks_phrase(ranks)} {verb} for something that no rank is about to do"
            return Ring("nobody", tuple(ranks)), what
        ended = [blocker for blocker in blockers if blocker in finished]
        rank = ended[0] if ended else blockers[0]
    if rank in path:
        ring = path[path.index(rank) :]
        if len(ring) == 1:
            return Ring("circle", tuple(ring)), f"rank {rank} waits for itself"
        arrows = " -> ".join(f"rank {r}" for r in [*ring, rank])
        return Ring("circle", tuple(ring)), f"{arrows} (each waits for the next)"
    has_finished = rank in finished
    end = "which has finished" if has_finished else "which asks again and again for what never comes"
    arrows = " -> ".join(f"rank {r}" for r in [*path, rank])
    return Ring("finished" if has_finished else "asks", (*path, rank)), f"{arrows}, {end}"


def never_completed(world: World, slots: list[Slot], messages: list[Message]) -> Deadlock:
    """Describe operations that were issued, never waited for, and never joined by all ranks."""
    if not slots:
        return _never_met(world, messages)
    slot = min(slots, key=lambda s: (s.group.ranks, s.seq))
    rows = [call_row(rank, call, slot) for rank, call in zip(slot.group.ranks, slot.calls, strict=True)]
    more = f" (and {len(slots) - 1} more)" if len(slots) > 1 else ""
    return Deadlock(
        f"all ranks have finished, but {slot.describe()} was never called by "
        f"{ranks_phrase(slot.missing())}{more}\n"
        f"{table(rows)}\n"
        "  try: call it on every rank of the group, and wait for the work that an async operation returns\n"
        f"  replay: {world.replay}"
    )


def _never_met(world: World, messages: list[Message]) -> Deadlock:
    """Describe sends without a receive and receives without a send that nobody waited for."""
    rows = [
        (f"rank {message.group.ranks[message.member]}", message.describe(), tensor_text(message), message.line)
        for message in sorted(messages, key=lambda m: (m.group.ranks[m.member], m.group.name, m.seq))
    ]
    return Deadlock(
        "all ranks have finished, but not every send has met its recv\n"
        f"{table(rows)}\n"
        "  try: pair each send with a recv of the same group and tag, and wait for the work isend and irecv return\n"
        f"  replay: {world.replay}"
    )
