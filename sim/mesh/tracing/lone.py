"""A world in which one rank lives: it runs the real program, and what the others would send has shapes but no values.

The rank's collectives and messages are checked, recorded and over at once. All its tensors are torch's fake ones, on
the CPU: they have shapes and dtypes, take no memory, and whoever wants to read a value gets torch's error. So a world
of 100,000 ranks costs what one rank's Python code costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hyper_parallel.core.common.checks import MOST_LISTED, read_int
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.machine.description import Machine
from hyper_parallel.core.redistribute.plan import Plan
from hyper_parallel.platform.attention import AttentionKernel, host_attention
from hyper_parallel.platform.cpu import HostEvent, HostStream
from sim.comm.collectives import Call
from sim.comm.group import Endpoint, Group, Message, Slot
from sim.comm.observer import Observer, observe
from sim.comm.store import SharedStore
from sim.comm.trace import Event, Span
from sim.explain.errors import RankFailed
from sim.kernel.context import current_rank
from sim.kernel.scheduler import Scheduler
from sim.kernel.waiting import Waitable
from sim.patches.rank import SimPlatform
from sim.trace import Trace
from sim.world import World, WorldOptions

MAX_LONE_RANKS = MOST_LISTED


class Listener:
    """Told of what the rank communicates, as it does.

    Attributes:
        has_host: whether the rank's device has a host with other memory, to which it copies.
        machine: for plans of redistributions; None: an unnamed one of one node.
    """

    has_host = False
    machine: Machine | None = None

    def copy_to_device(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool) -> None:
        """The rank copies from its host to its device."""

    def copy_to_host(self, source: torch.Tensor, *, pinned: bool, wait: bool) -> torch.Tensor:
        """The rank copies from its device to its host."""
        raise NotImplementedError

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> AttentionKernel | None:
        """The rank asks for the fused attention of its device; None: it has none for such tensors."""
        del causal, scale
        return host_attention(q, k, v)

    def on_plan(self, plan: Plan, limit: int | None) -> None:
        """A redistribution begins, with its limit of memory."""

    def on_collective(self, call: Call, axis: str, ranks: tuple[int, ...], waitable: Waitable) -> None:
        """A collective has been issued."""

    def on_message(
        self, tensor: torch.Tensor, axis: str, pair: tuple[int, int], waitable: Waitable, *, sending: bool
    ) -> None:
        """A send or receive has been issued; `pair` is this rank and the other one."""

    def on_delivery(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """A message of another rank has arrived."""

    def on_wait(self, waitable: Waitable) -> None:
        """The rank waits for one of these."""

    def new_stream(self, priority: int = 0) -> Any:
        """The rank asks for a stream of its device."""
        del priority
        return HostStream()

    def current_stream(self) -> Any:
        """The rank asks for the stream that its operations are queued on."""
        return HostStream()

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """The rank's operations of a block are queued on `stream`."""
        return nullcontext(stream)

    def new_event(self) -> Any:
        """The rank asks for an event of its device."""
        return HostEvent()


class _LonePlatform(SimPlatform):
    """A device with streams, whose work the listener follows; its memory is that of tensors without values."""

    def __init__(self, listener: Listener) -> None:
        super().__init__(stands_for="cuda", machine=listener.machine)
        self._listener = listener
        asked = "copy_to_device copy_to_host attention on_plan new_stream current_stream use_stream new_event"
        for name in asked.split():  # the listener answers as it is asked
            setattr(self, name, getattr(listener, name))

    @property
    def has_streams(self) -> bool:
        """True: what is recorded here is what runs on a device that has them."""
        return True

    @property
    def has_own_memory(self) -> bool:
        """Whether the listener tells it from the host's."""
        return self._listener.has_host

    @property
    def supports_pinned_memory(self) -> bool:
        """True, where there is a host."""
        return self._listener.has_host


class _LoneTrace(Trace):
    """The events of the ranks that live; the others have none."""

    def __init__(self, world_size: int, living: Sequence[int]) -> None:
        super().__init__(len(living))
        self._size, self._rows = world_size, {rank: row for row, rank in enumerate(living)}

    @property
    def world_size(self) -> int:
        return self._size

    def add(self, event: Event) -> None:
        self._by_rank[self._rows[event.rank]].append(event)

    def of_rank(self, rank: int) -> list[Event]:
        self._checked_rank(rank)
        return list(self._by_rank[self._rows[rank]]) if rank in self._rows else []

    def count(self, rank: int) -> int:
        return len(self.of_rank(rank))


class _LoneSlot(Slot):
    """A collective that needs nobody else."""

    def __init__(self, group: Group, seq: int, call: Call) -> None:
        Waitable.__init__(self)
        self.group, self.seq, self.contract = group, seq, call.contract
        self.calls = [call]
        self.arrived = len(group.ranks)
        self.latest, self.mismatch, self.span = 0.0, False, Span(0.0, 0.0)


class _LoneGroup(Group):
    """A group of which one member is there."""

    def enter(self, member: int, call: Call) -> Slot:
        seq = self.next_seq[member]
        self.next_seq[member] = seq + 1
        return _LoneSlot(self, seq, call)

    def carry_out(self, slot: Slot) -> None:
        for tensor in (*slot.calls[0].inputs, *slot.calls[0].outputs) if slot.calls[0] is not None else ():
            self._check(tensor, slot.describe())
        slot.calls = []  # the tensors are the rank's own again
        self.network.scheduler.complete(slot, 0.0)

    def meet(self, message: Message) -> Message | None:
        if message.sender is None:  # from anybody: from the member before this one
            message.sender = (message.receiver - 1) % len(self.ranks)
        self._check(message.tensor, message.describe())
        message.span = Span(0.0, 0.0)
        self.network.scheduler.complete(message, 0.0)
        return None

    def _check(self, tensor: torch.Tensor, what: str) -> None:
        if not isinstance(tensor, FakeTensor) and not tensor.is_meta and tensor.numel():
            blame = "it moves values, and the ranks that it would get them from do not live"
            seen = f"tensor: {tensor.dtype}, {tuple(tensor.shape)}, not a fake one"
            hint = "tensors made under the FakeTensorMode of this world, or sim.world(...), in which all ranks live"
            raise InvalidValue(f"cannot carry out {what}", blame, seen, hint)

    def forget_unfinished(self) -> None:
        self.slots.clear()


class _AlikeGroup(_LoneGroup):
    """A group of which some members are there: their messages meet, and each has its collectives for itself.

    Listeners say what small tensors get.
    """

    deliver: Callable[[torch.Tensor, torch.Tensor], None]
    """Moves what is sent."""

    def meet(self, message: Message) -> Message | None:
        """Let a message meet that of a member who is there; the others' come at once."""
        living = {endpoint.rank for endpoint in self.network.endpoints}
        sending = message.who_waits == "send"
        partner = message.receiver if sending else message.sender
        if len(living) == 1 or partner is None or self.ranks[partner] not in living:
            return super().meet(message)
        other = Group.meet(self, message)
        if other is not None:
            source, target = (message, other) if sending else (other, message)
            self.deliver(source.tensor, target.tensor)
            message.span = other.span = Span(0.0, 0.0)
            self.network.scheduler.complete(other, 0.0)
            self.network.scheduler.complete(message, 0.0)
        return None

    def _check(self, tensor: torch.Tensor, what: str) -> None:
        """Let tensors have values."""


class _LoneStore(SharedStore):
    """What the others would put into it is what this rank has put last: they are taken to be like it."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._last = b"0"

    def put(self, key: str, value: bytes) -> None:
        self._last = value
        super().put(key, value)

    def until_set(self, key: str, seconds: float | None = None) -> None:
        del seconds
        self.data.setdefault(key, self._last)


class _Listening(Observer):
    """Passes on to the listener of a rank what it communicates."""

    def __init__(self, listeners: Mapping[int, Listener]) -> None:
        self._listeners = listeners

    def issued(self, endpoint: Endpoint, what: Slot | Message, call: Call | None) -> None:
        """Pass on an operation."""
        listener, ranks = self._listeners[endpoint.rank], what.group.ranks
        if call is not None:
            listener.on_collective(call, call.axis, ranks, what)
            return
        assert isinstance(what, Message)
        sending = what.who_waits == "send"
        member = what.receiver if sending else what.sender
        assert member is not None, "a group that is met alone says who sends"
        pair = (endpoint.rank, ranks[member])
        listener.on_message(what.tensor, what.axis, pair, what, sending=sending)


class LoneWorld(World):
    """A world of `world_size` ranks of which `rank` is run.

    >>> import torch, torch.distributed as dist
    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> def gather() -> tuple[int, ...]:
    ...     with FakeTensorMode():
    ...         whole = torch.empty(100_000 * 3)
    ...         dist.all_gather_into_tensor(whole, torch.empty(3))
    ...         return tuple(whole.shape)
    >>> with LoneWorld(100_000, rank=7) as world:
    ...     world.run_alone(gather)
    (300000,)
    >>> [(event.op, event.recv_bytes) for event in world.trace.of_rank(7)]
    [('all_gather', 1199988)]

    Args:
        world_size: ranks, up to 1,048,576.
        rank: the one that lives.
        listener: called with what it communicates.

    Raises:
        ValueError: No such world, or no such rank in it.
    """

    def __init__(self, world_size: int, rank: int, listener: Listener | None = None) -> None:
        asked = f"cannot let rank {rank!r} of {world_size!r} live alone"
        read_int(asked, "world_size", world_size, 1, "world_size=1024", MAX_LONE_RANKS, InvalidValue)
        read_int(asked, "rank", rank, 0, "rank=0", world_size - 1, InvalidValue)
        self._let_live(
            world_size,
            (rank,),
            {} if listener is None else {rank: listener},
            WorldOptions(keep_events=None, check_identity=False),
        )
        self.network.group_type = _LoneGroup

    def _let_live(
        self, world_size: int, ranks: Sequence[int], listeners: Mapping[int, Listener], options: WorldOptions
    ) -> None:
        self._alive, self._listeners = tuple(ranks), listeners
        super().__init__(world_size, options)
        if listeners:
            self.host.platform = lambda: _LonePlatform(self._here())
            observe(self.network, _Listening(listeners))

    def _here(self) -> Listener:
        """The listener of the rank that runs."""
        rank = current_rank()
        assert rank is not None, "only ranks are listened to"
        return self._listeners[rank]

    def __enter__(self) -> LoneWorld:
        super().__enter__()
        return self

    def _living(self) -> Sequence[int]:
        return self._alive

    def _new_store(self) -> SharedStore:
        return _LoneStore(self.scheduler)

    def _new_trace(self) -> Trace:
        return _LoneTrace(self.world_size, self._alive)

    def _new_scheduler(self, schedule: Any) -> Scheduler:
        scheduler = super()._new_scheduler(schedule)
        block = scheduler.block
        if self._listeners:

            def listened(waitable: Waitable) -> None:
                self._here().on_wait(waitable)
                block(waitable)

            scheduler.block = listened  # type: ignore[method-assign]
        return scheduler

    def run_alone(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call `fn(*args)` on the rank and return its result; what it raises comes out as it is."""
        try:
            return self.run(fn, args)[0]
        except RankFailed as failed:
            own = failed.__cause__ or failed
            raise own from own.__cause__


class FewRanksWorld(LoneWorld):
    """A world of `world_size` ranks of which a few are run, such as those of one pipeline.

    The messages of those that live meet. In a collective each of them is alone: the others are taken to give what it
    gives, and its listener says what small tensors get of that. Unlike in a `LoneWorld`, tensors may have values, and
    the default group is made by who runs.

    Args:
        world_size: ranks, up to 1,048,576.
        listeners: of the ranks that live.
        options: of the world.
    """

    def __init__(self, world_size: int, listeners: Mapping[int, Listener], options: WorldOptions) -> None:
        self._let_live(world_size, sorted(listeners), listeners, options)
        self.network.group_type = type("_MetGroup", (_AlikeGroup,), {"deliver": staticmethod(self._deliver)})

    def _deliver(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._here().on_delivery(source, target)
