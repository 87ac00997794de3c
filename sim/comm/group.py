"""The meeting points of ranks: a network, its groups, and the operations on which the members of a group meet.

The ranks of a world share one `Network`, those of a process group one `Group`. The k-th call of every
member must be the same collective; the last one to arrive carries it out for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch.utils import _python_dispatch as dispatch

from sim.comm.collectives import Call, Contract, MemoryGone, Problem, check_memory, execute
from sim.comm.identity import Identities, Identity, agree
from sim.comm.pricing import CommPricing
from sim.comm.store import RankStore, SharedStore, Stores
from sim.comm.trace import EventLog, Span
from sim.explain.errors import ranks_phrase, short_ranks_phrase
from sim.explain.lines import user_line
from sim.kernel.context import Context
from sim.kernel.scheduler import Scheduler
from sim.kernel.waiting import Lost, Waitable

Done = TypeVar("Done")


class Slot(Waitable):
    """One collective in the making: the calls that have arrived so far, and when the last one did."""

    __slots__ = ("arrived", "calls", "contract", "group", "identity", "latest", "mismatch", "seq", "span", "strangers")

    def __init__(self, group: Group, seq: int) -> None:
        super().__init__()
        self.group = group
        self.seq = seq
        self.calls: list[Call | None] = [None] * len(group.ranks)
        self.arrived = 0
        self.contract: Contract | None = None  # of the first that has come
        self.identity: Identity | None = None  # likewise
        self.latest = 0.0
        self.mismatch = False
        self.strangers = False  # members agree on the operation, and mean another one
        self.span = Span()

    def describe(self) -> str:
        """Name the operation and its group."""
        op = self.contract.op if self.contract else "collective"
        return f"{op} #{self.seq} of group {self.group.title!r}"

    def missing(self) -> list[int]:
        """Name the ranks that have not come."""
        return [rank for rank, call in zip(self.group.ranks, self.calls, strict=True) if call is None]

    def line_of(self, rank: int) -> str:
        """Name the user's line in which `rank` has called it."""
        call = self.calls[self.group.ranks.index(rank)]
        return call.line if call is not None else ""


class Message(Waitable):
    """One side of a point-to-point transfer; ready once the other side has come.

    Attributes:
        sender: Member of the group; None while a receive from anybody has not met its send.
        receiver: Member of the group.
        number: Counts the messages of a group, so that the oldest one that fits is taken.
        seq: Number of the send or receive among those of its rank in the group.
        issued: The virtual clock of the rank at the call.
        axis: The name under which the rank knows the group.
        digest: The fingerprint of what is sent, where an observer makes one.
        met: The other side has come.
        purpose: Says what it is for, e.g. which turn of a pipeline; "": nobody knows.
        span: When the transfer runs; one for both sides once they have met.
        dropped: A fault loses it, or what it should have received.
    """

    __slots__ = (
        "axis",
        "digest",
        "dropped",
        "group",
        "issued",
        "line",
        "met",
        "number",
        "purpose",
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
        self.line = self.axis = self.digest = self.purpose = ""
        self.dropped = self.met = False
        self.issued = group.network.scheduler.now
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

    def line_of(self, rank: int) -> str:
        """Name the user's line."""
        return self.line


class Group:
    """What the ranks of one process group share.

    Args:
        network: Of its ranks; None once their world has ended.
        name: torch's name of the group.
        ranks: The global ranks, in group order.
    """

    def __init__(self, network: Network | None, name: str, ranks: tuple[int, ...]) -> None:
        self._network = network
        self.name = name
        self.ranks = ranks
        self.label = f"{name} ({len(ranks)} ranks)"
        self.slots: dict[int, Slot] = {}
        self.identities = Identities()
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
    def network(self) -> Network:
        """The network of its ranks."""
        assert self._network is not None, "only the group of an ended world has none"
        return self._network

    @property
    def title(self) -> str:
        """What messages call it: by its ranks, too, where other groups may go by its name.

        That is so for an axis of a mesh, which has one group for each place along the other axes.
        """
        network, ranks = self._network, self.ranks
        label = self.label
        is_whole = network is None or len(ranks) == network.world_size
        if is_whole or label == "world" or f": {ranks_phrase(ranks)}" in label:
            return label
        return f"{label}: {short_ranks_phrase(ranks)}"

    def enter(self, member: int, call: Call) -> Slot:
        """Enter `member`'s next call."""
        seq = self.next_seq[member]
        self.next_seq[member] = seq + 1
        slot = self.slots.get(seq)
        if slot is None:
            slot = self.slots[seq] = Slot(self, seq)
            slot.contract, slot.lost = call.contract, self.lost
            slot.identity = call.identity
        else:
            if call.contract != slot.contract:
                slot.mismatch = True
            if call.identity is not slot.identity and not agree(call.identity, slot.identity):
                slot.strangers = True
        slot.calls[member] = call
        slot.arrived += 1
        slot.latest = max(slot.latest, self.network.scheduler.now)
        return slot

    def meet(self, message: Message) -> Message | None:
        """The oldest waiting message that fits `message`, or None; then `message` waits."""
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
        message.met = other.met = True
        message.span = other.span
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
        """Drop what had not completed when a run ended, and let all ranks go on with one sequence number."""
        self.slots.clear()
        self.sends.clear()
        self.recvs.clear()
        self.next_seq = [max(self.next_seq)] * len(self.ranks)

    def carry_out(self, slot: Slot) -> None:
        """Do what all members have called."""
        network = self.network
        calls = [call for call in slot.calls if call is not None]
        if network.groups_made.others and len(self.ranks) == len(network.endpoints):
            slot.mismatch = True  # all ranks meet, and have made groups that do not go together
        if slot.identity is not None and slot.identity.peers is None and not slot.mismatch and not slot.strangers:
            slot.strangers = not self.identities.introduce([call.identity for call in calls])
        try:
            run = network.execute
            if network.devices is not None:
                run = partial(network.devices.carry_out, run=network.execute)
            problem = None if slot.mismatch or slot.strangers else without_modes(partial(run, calls))
        except Exception as cause:
            failure = network.explain.cannot_carry_out(network, slot, cause)
            network.scheduler.fail(failure)
            raise failure from cause
        if slot.mismatch or slot.strangers or problem is not None:
            error = network.explain.collective_mismatch(network, slot, problem)
            network.scheduler.fail(error)
            raise error
        del self.slots[slot.seq]
        start = max(slot.latest, self.busy_until)
        self.busy_until = end = start + network.pricing.of_collective(calls, self.ranks)
        for completed in network.completed:
            completed(slot, start, end)
        slot.calls = []  # the tensors are the ranks' own again
        network.scheduler.complete(slot, end)


class Explanations(Protocol):
    """The texts of what does not fit together; the simulator's are in `sim.explain.mismatch`."""

    def collective_mismatch(self, network: Network, slot: Slot, problem: Problem | None) -> Exception:
        """The error for a collective on which the ranks do not agree."""

    def cannot_carry_out(self, network: Network, slot: Slot, cause: Exception) -> Exception:
        """The error for a collective that the ranks agree on and that torch cannot compute."""

    def message_mismatch(self, network: Network, source: Message, target: Message) -> Exception:
        """The error for a send and a receive that do not fit together."""

    def message_without_memory(
        self, network: Network, source: Message, target: Message, cause: MemoryGone
    ) -> Exception:
        """The error for a send and a receive of which one has no memory left."""

    def not_reduced(self, backend: str, op: str, reduce_op: str, tensor: torch.Tensor, group: str) -> Exception:
        """The error for a reduction that the backend refuses for which the network stands."""

    def not_moved(self, backend: str, op: str, tensor: torch.Tensor, group: str) -> Exception:
        """The error for a tensor that this backend does not send as it is."""


class Devices(Protocol):
    """Devices of the ranks that carry out later what is communicated.

    Attributes:
        kind: The type of their tensors.
    """

    kind: str

    def carry_out(self, calls: list[Call], run: Callable[[list[Call]], Problem | None]) -> Problem | None:
        """Issue a collective that all members have called; returns what does not fit together."""

    def deliver(self, source: Message, target: Message, run: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Issue a transfer of which both sides have come."""


class Network:
    """What the ranks of a world share to communicate.

    Args:
        scheduler: Lets the ranks run.
        world_size: Number of ranks.
        trace: Of what they communicate.
        store: Their key-value store.
        pricing: What communication costs in virtual time.
        backend: The name of the default group: `sim`, or the backend whose reductions it imitates.
        explain: Makes the errors.
        replay: The call that runs the same again.

    Attributes:
        endpoints: The ranks that are run.
        stores: That ranks make themselves.
        groups: By torch's name, ranks and generation of the default group.
        groups_made: Of which ranks they have made their groups.
        lost: The ranks that faults have killed or frozen.
        check_identity: Whether members of a group have to mean the same by a collective.
        stepped: By the ranks that share parameters, which of them have begun an optimizer's step, and in which line.
        execute: Carries out a collective.
        devices: On which it does so later; None: at once, on the host.
        rejoin: Lets a rank join a default group that is made anew, as this rank of so many; None: nobody can be lost.
        issuing, issued, completed, waited, made, ended: What observers are called with; see `observer.Observer`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        world_size: int,
        *,
        trace: EventLog,
        store: SharedStore,
        pricing: CommPricing,
        backend: str,
        explain: Explanations,
        replay: str,
    ) -> None:
        self.scheduler = scheduler
        self.world_size = world_size
        self.trace = trace
        self.store = store
        self.stores = Stores(scheduler)
        self.pricing = pricing
        self.backend = backend
        self.explain = explain
        self.replay = replay
        self.check_identity = True
        self.group_type: type[Group] = Group
        self.endpoints: list[Any] = []
        self.groups: dict[tuple[str, tuple[int, ...], int], Group] = {}
        self.groups_made = GroupsMade()
        self.lost: Mapping[int, object] = {}
        self.stepped: dict[tuple[int, ...], dict[int, str]] = {}
        self.execute: Callable[[list[Call]], Problem | None] = execute
        self.devices: Devices | None = None
        self.rejoin: Callable[[Any, int, int], None] | None = None
        self.issuing: tuple[Callable[..., None], ...] = ()
        self.issued: tuple[Callable[..., None], ...] = ()
        self.completed: tuple[Callable[..., None], ...] = ()
        self.waited: tuple[Callable[..., None], ...] = ()
        self.made: tuple[Callable[..., None], ...] = ()
        self.ended: tuple[Callable[..., None], ...] = ()
        self._ends: dict[Group, list[Any]] = {}  # the members' process groups

    def group(self, name: str, ranks: tuple[int, ...], generation: int) -> Group:
        """Return the group of these ranks; the first that asks for it makes it."""
        key = (name, ranks, generation)
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = self.group_type(self, name, ranks)
            for made in self.made:
                made(group)
        return group

    def join(self, group: Group, member: int, process_group: Any) -> None:
        """Note a member's process group, to be ended with the network."""
        group.left.discard(member)
        self._ends.setdefault(group, []).append(process_group)

    def leave(self, group: Group, member: int) -> None:
        """Forget a group once all of its members have destroyed it, so that a long run may make many."""
        group.left.add(member)
        if len(group.left) < len(group.ranks) or group.slots or any(group.unmatched()):
            return
        self.groups = {key: other for key, other in self.groups.items() if other is not group}
        for process_group in self._ends.pop(group, ()):
            process_group.end()
        self.groups_made.forget_before(min(counted) if (counted := self.groups_by_rank().values()) else None)

    def groups_by_rank(self) -> dict[int, tuple[int, int, int]]:
        """The number of the next group, by rank; without ranks that are lost, or have no default group."""
        return {
            end.rank: (end.generation, end.inits, end.c10d.group_count - end.c10d.alone)
            for end in self.endpoints
            if end.rank not in self.lost and end.c10d.default_pg is not None
        }

    def close(self) -> None:
        """End all process groups: who still holds one does not hold the world."""
        for process_groups in self._ends.values():
            for process_group in process_groups:
                process_group.end()
        self._ends = {}
        self.groups.clear()
        self.endpoints = []
        self.issuing = self.issued = self.completed = self.waited = self.made = self.ended = ()


def without_modes(run: Callable[[], Done]) -> Done:
    """Keep the dispatch modes of the rank that happens to arrive last away from all ranks' data."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        with dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            return run()
    return run()


def strangers(source: Message, target: Message) -> bool:
    """Return True if a send and a receive are known to be for different things."""
    return source.purpose != target.purpose and "" not in (source.purpose, target.purpose)


def deliver(network: Network, source: Message, target: Message) -> float:
    """Move the data; returns the virtual time at which that is over."""
    give, take = source.tensor, target.tensor
    differs = give.dtype != take.dtype or give.numel() != take.numel() or give.is_meta != take.is_meta
    if differs or strangers(source, target):
        error = network.explain.message_mismatch(network, source, target)
        network.scheduler.fail(error)
        raise error
    assert source.sender is not None
    try:
        check_memory(source.sender, [give])
        check_memory(target.receiver, [take])
    except MemoryGone as cause:
        gone = network.explain.message_without_memory(network, source, target, cause)
        network.scheduler.fail(gone)
        raise gone from None
    if network.devices is None:
        _copy(give, take)
    else:
        network.devices.deliver(source, target, _copy)
    ranks, start = source.group.ranks, max(source.issued, target.issued)
    took = network.pricing.of_message(ranks[source.sender], ranks[source.receiver], give.numel() * give.element_size())
    for completed in network.completed:
        completed(source, start, start + took)
    return start + took


def _copy(give: torch.Tensor, take: torch.Tensor) -> None:
    with torch.inference_mode():
        take.data.copy_(give.data.reshape(take.shape))


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
        self.places: dict[Key, dict[int, int]] = {}  # of the ranks within it, as torch keeps them
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
        self.places = {k: places for k, places in self.places.items() if k in self._first}
        self._most = max(1024, 2 * len(self._members))

    def differing(self) -> list[Key]:
        """The groups on whose members ranks differ; where each has one member only, nobody waits for another."""
        return [
            key for key, others in self.others.items() if any(map(_has_several, (self._first[key], *others.values())))
        ]

    def of(self, key: Key, rank: int) -> _Asked:
        """What `rank` has asked for, which has made the group; who is not in it has asked for what the first has."""
        return self._members.get((key, rank)) or self._first[key]._replace(line="")


class Endpoint(Context):
    """What a rank has of its own to communicate.

    Attributes:
        network: What it shares with the other ranks.
        c10d: Its `torch.distributed` state (the default group, all groups by name ...).
        store: Its handle of the network's store.
        own_stores: Those it has made itself.
        axis_names: The mesh axes whose groups go by another name, by group.
        joined_by_world: The world made the default group, so one `init_process_group` does nothing.
        has_joined: The world has made it, whatever became of it since.
        inits: How often it has made its default group.
        members: The ranks of its default group, once ranks that were left have made that anew; None: all.
        generation: Counts those new default groups.
        regions: The names of the regions (`sim.region`) that it is in.
    """

    def __init__(self, rank: int, network: Network, c10d: Any) -> None:
        super().__init__(rank, network.scheduler)
        self.network = network
        self.c10d = c10d
        self.store = RankStore(network.store)  # kept here: torch's own references keep only its C++ half alive
        self.own_stores: list[RankStore] = []
        self.axis_names: dict[str, str] = {}
        self.joined_by_world = self.has_joined = False
        self.inits = 0
        self.members: tuple[int, ...] | None = None
        self.generation = 0
        self.regions: list[str] = []

    @property
    def place(self) -> tuple[int, int]:
        """Its rank in its default group, and how many ranks that has."""
        if self.members is None:
            return self.rank, self.network.world_size
        return self.members.index(self.rank), len(self.members)

    def axis_of(self, group_name: str, description: str, ranks: tuple[int, ...]) -> str:
        """The name a group is reported under: its mesh axis if a mesh made it, `world`, or its ranks."""
        if group_name in self.axis_names:
            return self.axis_names[group_name]
        if description.startswith("mesh_"):
            return description.removeprefix("mesh_")
        if description == "default_pg":
            return "world"
        if description in ("", "undefined"):
            return f"{group_name[:8]}: {ranks_phrase(ranks)}"
        return description
