"""The texts of what the simulator finds: one line per rank, sorted by rank, the minority marked."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from sim.collectives import Call, Contract, Problem
from sim.errors import CollectiveMismatch, Deadlock, SimError, ranks_phrase, table
from sim.seams.locks import where

if TYPE_CHECKING:
    from sim.group import Message, Slot
    from sim.world import World

__all__ = ["cannot_carry_out", "collective_mismatch", "deadlock", "line_of", "message_mismatch", "never_completed"]


def collective_mismatch(world: World, slot: Slot, problem: Problem | None) -> CollectiveMismatch:
    """Describe a collective on which the ranks of a group do not agree."""
    ranks = slot.group.ranks
    present = [(rank, call) for rank, call in zip(ranks, slot.calls, strict=True) if call is not None]
    hint = "let every rank of the group call the same operation, with the same arguments, in the same order"
    majority = None
    if problem is None:
        majority = Counter(call.contract for _, call in present).most_common(1)[0][0]
        differs = _differences(present)
    else:
        differs, hint = [problem.what], problem.hint
    rows, marked = [], []
    for index, (rank, call) in enumerate(zip(ranks, slot.calls, strict=True)):
        rows.append(_row(rank, call, slot))
        if call is not None and majority is not None and call.contract != majority:
            marked.append(index)
    return CollectiveMismatch(
        f"the ranks of group {slot.group.label!r} do not agree on its operation #{slot.seq}\n"
        f"{table(rows, marked=marked)}\n"
        f"  differs: {'; '.join(differs)}\n"
        f"  try: {hint}\n"
        f"  replay: {world.replay}"
    )


def cannot_carry_out(world: World, slot: Slot, cause: Exception) -> SimError:
    """Describe a collective on which all ranks agree, but which torch cannot compute."""
    rows = [_row(rank, call, slot) for rank, call in zip(slot.group.ranks, slot.calls, strict=True)]
    return SimError(
        f"{slot.describe()} cannot be computed\n"
        f"{table(rows)}\n"
        f"  because: {type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}\n"
        "  try: a dtype and a reduce op that torch can compute on the CPU\n"
        f"  replay: {world.replay}"
    )


def _row(rank: int, call: Call | None, slot: Slot) -> tuple[str, ...]:
    if call is None:
        return (f"rank {rank}", "has not called it", "", "", "", "")
    contract = call.contract
    root = "" if contract.root is None else f"root={slot.group.ranks[contract.root]}"
    reduce_op = "" if contract.reduce_op == "-" else contract.reduce_op
    data = " ".join(part for part in (contract.dtype, contract.shape) if part != "-")
    if call.splits is not None:
        data += f" send={call.splits[0]} recv={call.splits[1]}"
    return (f"rank {rank}", contract.op, reduce_op, root, data, call.line)


_WORDS = {"op": "operation", "reduce_op": "reduce op", "root": "root", "dtype": "dtype", "shape": "size"}


def _differences(present: list[tuple[int, Call]]) -> list[str]:
    found = []
    usual = Counter(call.contract.op for _, call in present).most_common(1)[0][0]
    for field in Contract._fields:
        by_value: dict[object, list[int]] = {}
        for rank, call in present:
            if field != "op" and call.contract.op != usual:
                continue  # another operation differs in more than its arguments
            by_value.setdefault(getattr(call.contract, field), []).append(rank)
        if len(by_value) > 1:
            values = ", ".join(f"{value} on {ranks_phrase(who)}" for value, who in by_value.items())
            found.append(f"{_WORDS[field]} ({values})")
    return found


def message_mismatch(world: World, source: Message, target: Message) -> CollectiveMismatch:
    """Describe a send and a receive of different dtype or size."""
    ranks = source.group.ranks
    assert source.sender is not None
    sender, receiver = ranks[source.sender], ranks[target.receiver]
    what = "device" if source.tensor.is_meta != target.tensor.is_meta else "dtype and size"
    rows = [
        (f"rank {rank}", message.who_waits, _tensor(message), message.line)
        for rank, message in sorted([(sender, source), (receiver, target)], key=lambda row: row[0])
    ]
    return CollectiveMismatch(
        f"a send from rank {sender} does not fit the recv on rank {receiver} "
        f"(group {source.group.label!r})\n"
        f"{table(rows)}\n"
        f"  try: receive into a tensor of the {what} that is sent\n"
        f"  replay: {world.replay}"
    )


def _tensor(message: Message) -> str:
    device = " on meta" if message.tensor.is_meta else ""
    return f"{str(message.tensor.dtype).removeprefix('torch.')} {list(message.tensor.shape)}{device}"


def deadlock(world: World) -> Deadlock:
    """Describe a world in which no rank can run."""
    rows: list[tuple[str, str, str, str]] = []
    waits_for: dict[int, list[int]] = {}
    finished = set()
    threads = world.scheduler.ranks
    if world.scheduler.helpers:
        threads = sorted([*threads, *world.scheduler.helpers], key=lambda thread: thread.rank)
    for rank in threads:
        name = f"rank {rank.rank}" + (f", thread {rank.name!r}" if rank.name else "")
        if rank.waiting is None:
            if rank.finished:
                finished.add(rank.rank)
            rows.append((name, "has finished" if rank.finished else "asks again and again, in vain", "", ""))
            continue
        missing = rank.waiting.missing()
        if missing or not rank.name:  # a rank that waits for its helper thread waits for whom that waits for
            waits_for[rank.rank] = [*waits_for.get(rank.rank, []), *missing]
        whom = f"for {ranks_phrase(missing)}" if missing else ""
        line = line_of(rank.rank, rank.waiting) if rank.waiting.is_global else where(rank)[1]
        rows.append((name, f"waits in {rank.waiting.describe()}", whom, line))
    size = len(world.scheduler.ranks)
    return Deadlock(
        f"no rank can run: {size - len(finished)} of {size} ranks wait, and none of them can go on\n"
        f"{table(rows)}\n"
        f"  because: {_cycle(waits_for, finished)}\n"
        "  try: let all ranks of a group call the same operations in the same order\n"
        f"  replay: {world.replay}"
    )


def line_of(rank: int, waiting: object) -> str:
    """The user's line that ``rank`` waits in; empty where none is known."""
    from sim.checks.replicas import Meeting
    from sim.group import Message, Slot

    if isinstance(waiting, Slot):
        call = waiting.calls[waiting.group.ranks.index(rank)]
        return call.line if call is not None else ""
    if isinstance(waiting, Meeting):
        return waiting.lines.get(rank, "")
    return waiting.line if isinstance(waiting, Message) else ""


def _cycle(waits_for: dict[int, list[int]], finished: set[int]) -> str:
    """Follow who waits for whom: either it comes back to a rank, or it ends at one that has finished."""
    if not waits_for:
        return "what a rank asks for in a loop never comes"
    path: list[int] = []
    rank = min(waits_for)
    while rank in waits_for and rank not in path:
        path.append(rank)
        blockers = waits_for[rank]
        if not blockers:
            return f"rank {rank} waits for something that no rank is about to do"
        ended = [blocker for blocker in blockers if blocker in finished]
        rank = ended[0] if ended else blockers[0]
    if rank in path:
        loop = [*path[path.index(rank) :], rank]
        return " -> ".join(f"rank {r}" for r in loop) + " (each waits for the next)"
    end = "which has finished" if rank in finished else "which asks again and again for what never comes"
    return " -> ".join(f"rank {r}" for r in [*path, rank]) + f", {end}"


def never_completed(world: World, slots: list[Slot], messages: list[Message]) -> Deadlock:
    """Describe operations that were issued, never waited for, and never joined by all ranks."""
    if not slots:
        return _never_met(world, messages)
    slot = min(slots, key=lambda s: (s.group.ranks, s.seq))
    rows = [_row(rank, call, slot) for rank, call in zip(slot.group.ranks, slot.calls, strict=True)]
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
    rows = []
    for message in messages:
        own = message.sender if message.who_waits == "send" else message.receiver
        assert own is not None
        rows.append((message.group.ranks[own], message.describe(), _tensor(message), message.line))
    rows.sort()
    return Deadlock(
        "all ranks have finished, but not every send has met its recv\n"
        f"{table([(f'rank {rank}', *rest) for rank, *rest in rows])}\n"
        "  try: pair each send with a recv of the same group and tag, and wait for the work isend and irecv return\n"
        f"  replay: {world.replay}"
    )
