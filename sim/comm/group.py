"""The meeting point of a group's ranks: collectives by their number, messages by sender and receiver.

The ranks of a process group share one :class:`Group`. The k-th call of every member must be the same collective; the
last one to arrive carries it out for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from sim.comm.collectives import Call, MemoryGone, check_memory, execute
from sim.comm.trace import Span
from sim.explain.errors import ranks_phrase, short_ranks_phrase
from sim.kernel.scheduler import Lost, Waitable

if TYPE_CHECKING:
    from sim.world import World

__all__ = ["Group", "Message", "Slot", "deliver", "without_modes"]

Done = TypeVar("Done")


class Slot(Waitable):
    """One collective in the making: the calls that have arrived so far, and when the last one did."""

    __slots__ = ("arrived", "calls", "first", "group", "latest", "mismatch", "seq", "span")

    def __init__(self, group: Group, seq: int) -> None:
        super().__init__()
        self.group = group
        self.seq = seq
        self.calls: list[Call | None] = [None] * len(group.ranks)
        self.arrived = 0
        self.first: Call | None = None
        self.latest = 0.0
        self.mismatch = False
        self.span = Span()

    def describe(self) -> str:
        """Name the operation and its group."""
        op = self.first.contract.op if self.first else "collective"
        return f"{op} #{self.seq} of group {self.group.title!r}"

    def missing(self) -> list[int]:
        """Name the ranks that have not come."""
        return [rank for rank, call in zip(self.group.ranks, self.calls, strict=True) if call is None]


class Message(Waitable):
    """One side of a point-to-point transfer; ready once the other side has come.

    Attributes:
        sender: Member of the group; None while a receive from anybody has not met its send.
        receiver: Member of the group.
        number: Counts the messages of a group, so that the oldest one that fits is taken.
        seq: Number of the send or receive among those of its rank in the group.
        issued: The virtual clock of the rank at the call.
        span: When the transfer runs; one for both sides once they have met.
        dropped: A fault loses it, or what it should have received.
    """

    __slots__ = (
        "dropped",
        "group",
        "issued",
        "line",
        "number",
        "receiver",
        "sender",
        "seq",
        "span",
        "tag",
        "tensor",
        "who_waits",
    )

    def __init__(
        self, group: Group, sender: int | None, receiver: int, tag: int, tensor: torch.Tensor, sending: bool
    ) -> None:
        super().__init__()
        self.group = group
        self.sender = sender
        self.receiver = receiver
        self.tag = tag
        self.tensor = tensor
        self.who_waits = "send" if sending else "recv"
        self.line = ""
        self.dropped = False
        self.issued = group.world.scheduler.now
        self.span = Span()
        self.number = group.next_message = group.next_message + 1
        own = self.member
        self.seq = group.messages[own]
        group.messages[own] = self.seq + 1

    @property
    def member(self) -> int:
        """Whose side of the transfer this is."""
        own = self.sender if self.who_waits == "send" else self.receiver
        assert own is not None, "only a receive may not know its sender"
        return own

    def describe(self) -> str:
        """Name the operation and its group."""
        ranks = self.group.ranks
        if self.who_waits == "send":
            what = f"send #{self.seq} to rank {ranks[self.receiver]}"
        else:
            what = f"recv #{self.seq} from {'any rank' if self.sender is None else f'rank {ranks[self.sender]}'}"
        tag = f" with tag {self.tag}" if self.tag else ""
        return f"{what}{tag} in group {self.group.title!r}"

    def missing(self) -> list[int]:
        """Name the ranks that have not come."""
        ranks = self.group.ranks
        if self.who_waits == "send":
            return [ranks[self.receiver]]
        if self.sender is None:
            return [rank for rank in ranks if rank != ranks[self.receiver]]
        return [ranks[self.sender]]


class Group:
    """What the ranks of one process group share.

    Args:
        world: The world it lives in; None once it has ended.
        name: torch's name of the group.
        ranks: The global ranks, in group order.
    """

    def __init__(self, world: World | None, name: str, ranks: tuple[int, ...]) -> None:
        self._world = world
        self.name = name
        self.ranks = ranks
        self.label = f"{name} ({len(ranks)} ranks)"
        self.slots: dict[int, Slot] = {}
        self.next_seq = [0] * len(ranks)
        self.next_message = 0
        self.messages = [0] * len(ranks)  # by member: how many sends and receives it has begun
        self.busy_until = 0.0  # in virtual time: the collectives of a group run one after the other
        self.timeout = 1800.0  # in virtual seconds; matters only where a fault holds somebody up
        self.left: set[int] = set()  # the members that have destroyed it
        self.lost: Lost | None = None  # a member has died: what becomes of all further operations
        # Keyed by sender (None: anybody), receiver and tag; a key is there only while a message waits under it.
        self.sends: dict[tuple[int | None, int, int], deque[Message]] = {}
        self.recvs: dict[tuple[int | None, int, int], deque[Message]] = {}

    @property
    def world(self) -> World:
        """The world the group lives in."""
        assert self._world is not None, "only the group of an ended world has none"
        return self._world

    @property
    def title(self) -> str:
        """What messages call it: by its ranks, too, where other groups may go by its name.

        That is so for an axis of a mesh, which has one group for each place along the other axes.
        """
        world, ranks = self._world, self.ranks
        label = self.label
        if world is None or len(ranks) == world.world_size or label == "world" or f": {ranks_phrase(ranks)}" in label:
            return label
        return f"{label}: {short_ranks_phrase(ranks)}"

    def enter(self, member: int, call: Call) -> Slot:
        """Enter ``member``'s next call."""
        seq = self.next_seq[member]
        self.next_seq[member] = seq + 1
        slot = self.slots.get(seq)
        if slot is None:
            slot = self.slots[seq] = Slot(self, seq)
            slot.first, slot.lost = call, self.lost
        elif slot.first is not None and call.contract != slot.first.contract:
            slot.mismatch = True
        slot.calls[member] = call
        slot.arrived += 1
        slot.latest = max(slot.latest, self.world.scheduler.now)
        return slot

    def meet(self, message: Message) -> Message | None:
        """The oldest waiting message that fits ``message``, or None; then ``message`` waits."""
        sender, receiver, tag = message.sender, message.receiver, message.tag
        sending = message.who_waits == "send"
        theirs = self.recvs if sending else self.sends
        if sending:
            keys = [(sender, receiver, tag), (None, receiver, tag)]
        elif sender is None:
            keys = [(source, receiver, tag) for source in range(len(self.ranks))]
        else:
            keys = [(sender, receiver, tag)]
        waiting = [theirs[key] for key in keys if key in theirs]
        if not waiting:
            mine = self.sends if sending else self.recvs
            mine.setdefault((sender, receiver, tag), deque()).append(message)
            return None
        queue = min(waiting, key=lambda queue: queue[0].number)
        other = queue.popleft()
        if not queue:
            del theirs[other.sender, other.receiver, other.tag]
        source = message if sending else other
        message.sender = other.sender = source.sender
        return other

    def withdraw(self, message: Message) -> None:
        """Take a message back that waits, if it does: it will not be met any more."""
        waiting = self.sends if message.who_waits == "send" else self.recvs
        key = (message.sender, message.receiver, message.tag)
        if message in waiting.get(key, ()):
            waiting[key].remove(message)
            if not waiting[key]:
                del waiting[key]

    def unmatched(self) -> list[Message]:
        """The messages whose other side has not come."""
        return [m for waiting in (self.sends, self.recvs) for queue in waiting.values() for m in queue]

    def forget_unfinished(self) -> None:
        """Drop what was left over when a run ended, and number on alike on all ranks."""
        self.slots.clear()
        self.sends.clear()
        self.recvs.clear()
        self.next_seq = [max(self.next_seq)] * len(self.ranks)

    def carry_out(self, slot: Slot) -> None:
        """Do what all members have called."""
        world = self.world
        calls = [call for call in slot.calls if call is not None]
        carry = world.faults.execute if world.faults.flips else execute
        if world.groups_made.others and len(self.ranks) == len(world.contexts):
            slot.mismatch = True  # all ranks meet, and have made groups that do not go together
        try:
            problem = None if slot.mismatch else without_modes(partial(carry, calls))
        except Exception as cause:
            failure = world.execution_error(slot, cause)
            world.scheduler.fail(failure)
            raise failure from cause
        if slot.mismatch or problem is not None:
            error = world.mismatch_error(slot, problem)
            world.scheduler.fail(error)
            raise error
        del self.slots[slot.seq]
        slot.span.start = max(slot.latest, self.busy_until)
        slot.span.end = self.busy_until = slot.span.start + world.pricing.of_collective(calls, self.ranks)
        slot.calls = []  # the tensors are the ranks' own again
        world.scheduler.complete(slot, self.busy_until)


def without_modes(run: Callable[[], Done]) -> Done:
    """Keep the dispatch modes of the rank that happens to arrive last away from all ranks' data."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return run()
    return run()


def deliver(world: World, source: Message, target: Message) -> float:
    """Move the data; returns the virtual time at which that is over."""
    give, take = source.tensor, target.tensor
    if give.dtype != take.dtype or give.numel() != take.numel() or give.is_meta != take.is_meta:
        error = world.message_error(source, target)
        world.scheduler.fail(error)
        raise error
    assert source.sender is not None
    try:
        check_memory(source.sender, [give])
        check_memory(target.receiver, [take])
    except MemoryGone as cause:
        gone = world.memory_error(source, target, cause)
        world.scheduler.fail(gone)
        raise gone from None
    with torch.inference_mode():
        take.data.copy_(give.data.reshape(take.shape))
    ranks, span = source.group.ranks, source.span
    span.start = max(source.issued, target.issued)
    took = world.pricing.of_message(ranks[source.sender], ranks[source.receiver], give.numel() * give.element_size())
    span.end = span.start + took
    return span.end
