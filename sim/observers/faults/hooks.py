"""Faults in virtual time: kill, freeze, slow, corrupt, drop, each at a moment that follows from the seed.

A fault is a value (`sim.faults.Kill(2, at=3)`), given to `sim.run` and `sim.world` or added by
`world.faults`. It happens on the thread of the rank that it strikes, when that is about to begin an operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import NamedTuple

import torch

from sim.comm.collectives import Call
from sim.comm.group import Endpoint, Group, Message, Network
from sim.comm.observer import Observer, observe
from sim.comm.pricing import CommPricing
from sim.explain.lines import user_line
from sim.observers.faults.losses import Losses, Reform
from sim.observers.faults.plan import At, Corrupt, Drop, Fault, Freeze, Kill, Slow, SlowLink, check_ranks
from sim.observers.faults.triggers import Flip, Happening, Trigger, draw_flips, execute_flipped, flipped, given_by

__all__ = ["Faults", "Operation"]


class Operation(NamedTuple):
    """What a rank is about to do."""

    op: str
    group: str
    line: str
    gives: Sequence[torch.Tensor]
    receiver: int | None = None


class Faults(Observer):
    """The faults of a world: `world.faults`.

    >>> import torch, torch.distributed as dist
    >>> import sim
    >>> def step() -> str:
    ...     try:
    ...         dist.all_reduce(torch.ones(1))
    ...     except sim.RankLost as error:
    ...         return f"without {error.ranks}"
    ...     return "all there"
    >>> with sim.world(3) as world:
    ...     world.faults.kill(1, at=0)
    ...     world.run(step)
    ['without (1,)', None, 'without (1,)']
    >>> [(each.rank, each.op) for each in world.faults.log], world.faults.pending
    ([(1, 'all_reduce')], [])

    Attributes:
        plan: All faults, in the order in which they were added.
        log: What has happened, in order.
        losses: The ranks and messages that are lost.
        reform: Where ranks meet that make the default group anew.
    """

    def __init__(self, network: Network, seed: int) -> None:
        self._network = network
        self._seed = seed
        self.plan: tuple[Fault, ...] = ()
        self.log: list[Happening] = []
        self.losses = Losses(network)
        self.reform = Reform(network)
        self.flips: dict[Call, tuple[Flip, ...]] = {}  # of the collectives under way
        self._triggers: list[Trigger] = []
        self._by_rank: list[list[Trigger]] = []
        self._begun: list[int] = []  # operations by rank
        self._pace: dict[int, list[Trigger]] = {}
        self._bare_replay = self._replay = network.replay

    # -- adding ------------------------------------------------------------------------------------------------

    def kill(self, rank: int, at: At = 0) -> None:
        """Let `rank` end as if its process had died; see `Kill`."""
        self.add(Kill(rank, at=at))

    def freeze(self, rank: int, at: At = 0) -> None:
        """Let `rank` hang for ever; see `Freeze`."""
        self.add(Freeze(rank, at=at))

    def slow(self, rank: int, factor: float) -> None:
        """Let `rank` compute for `factor` times as long; see `Slow`."""
        self.add(Slow(rank, factor))

    def slow_link(self, a: int, b: int, factor: float) -> None:
        """Let communication of `a` with `b` take `factor` times as long; see `SlowLink`."""
        self.add(SlowLink(a, b, factor))

    def corrupt(self, rank: int, bits: int = 1, at: At = 0) -> None:
        """Let bits flip in what `rank` gives to an operation; see `Corrupt`."""
        self.add(Corrupt(rank, bits=bits, at=at))

    def drop(self, sender: int, receiver: int, at: At = 0) -> None:
        """Lose a message from `sender` to `receiver`; see `Drop`."""
        self.add(Drop(sender, receiver, at=at))

    def add(self, *faults: Fault) -> None:
        """Add faults; operations count from now on.

        Raises:
            ValueError: A rank that the world does not have.
            TypeError: Something that is no fault.
        """
        network = self._network
        for fault in faults:
            check_ranks(fault, network.world_size)
        if faults and not self.plan:
            self._begin()
        for fault in faults:
            trigger = Trigger(fault, Random(f"{self._seed}, fault {len(self.plan)}"))
            self.plan += (fault,)
            self._triggers.append(trigger)
            if isinstance(fault, Slow):
                self._pace.setdefault(fault.rank, []).append(trigger)
            elif isinstance(fault, SlowLink):
                network.pricing = SlowedPricing(network.pricing, trigger, self)
            else:
                self._by_rank[fault.involved()[0]].append(trigger)
        if network.replay == self._replay and self.plan:
            self._replay = network.replay = f"{self._bare_replay[:-1]}, faults={list(self.plan)!r})"

    def _begin(self) -> None:
        """Let the ranks ask here before each operation: the first fault has come."""
        network = self._network
        self._by_rank = [[] for _ in range(network.world_size)]
        self._begun = [network.trace.count(rank) for rank in range(network.world_size)]
        network.scheduler.rescue = self.losses.rescue
        network.lost = self.losses.by_rank
        network.execute = partial(execute_flipped, flips=self.flips)
        network.rejoin = self.reform.join
        for endpoint in network.endpoints:
            endpoint.stretch = partial(self._stretch, endpoint.rank)
        observe(network, self)
        observe(network, self.losses)

    @property
    def pending(self) -> list[Fault]:
        """The faults that have not happened: their moment has not come, or never will."""
        return [trigger.fault for trigger in self._triggers if not trigger.happened]

    # -- what the ranks ask ------------------------------------------------------------------------------------

    def issuing(self, endpoint: Endpoint, group: Group, what: Call | Message) -> None:
        """Let happen what is due before a rank begins an operation; does not return if the rank is lost."""
        if isinstance(what, Call):
            gives = given_by(what, group.ranks.index(endpoint.rank))
            flips, _ = self._strike(endpoint, Operation(what.contract.op, group.label, what.line, gives))
            if flips:
                self.flips[what] = flips
            return
        sending = what.who_waits == "send"
        receiver = group.ranks[what.receiver] if sending else None
        operation = Operation(what.who_waits, group.label, what.line, [what.tensor] if sending else [], receiver)
        flips, what.dropped = self._strike(endpoint, operation)
        if flips:
            what.tensor = flipped([what.tensor], flips)[0]

    def _strike(self, endpoint: Endpoint, operation: Operation) -> tuple[tuple[Flip, ...], bool]:
        """Let happen what is due; returns the bits to flip, and whether the message is lost."""
        scheduler, rank = self._network.scheduler, endpoint.rank
        self._check_rank(rank)
        number = self._begun[rank]
        self._begun[rank] = number + 1
        flips: tuple[Flip, ...] = ()
        dropped = False
        for trigger in self._by_rank[rank]:
            fault = trigger.fault
            if isinstance(fault, Drop) and fault.receiver != operation.receiver:
                continue
            if (trigger.happened and not trigger.recurs) or not trigger.is_due(endpoint.regions, scheduler.now):
                continue
            found: tuple[Flip, ...] = ()
            if isinstance(fault, Corrupt):
                found = draw_flips(operation.gives, fault.bits, trigger.random)
                if not found:
                    continue  # it gives nothing here, maybe to the next one
            flips += found
            happening = self._note(trigger, rank, number, operation, found)
            if isinstance(fault, Kill):
                self.losses.kill(happening)
            if isinstance(fault, Freeze):
                self.losses.freeze(happening)
            if isinstance(fault, Drop) and not dropped:
                dropped = True
                self.losses.dropped.append(happening)
        return flips, dropped

    def _check_rank(self, rank: int) -> None:
        """Let no thread of a rank go on that is dead or frozen."""
        self._network.scheduler.check_alive()
        if rank in self.losses.by_rank:
            self.losses.hang()

    def _note(
        self, trigger: Trigger, rank: int, number: int, operation: Operation, flips: tuple[Flip, ...] = ()
    ) -> Happening:
        trigger.happened = True
        time = self._network.scheduler.now
        happening = Happening(trigger.fault, rank, number, operation.op, operation.group, operation.line, time, flips)
        self.log.append(happening)
        return happening

    def _stretch(self, rank: int, seconds: float, op: str) -> float:
        """How long `seconds` of a rank's own time take."""
        self._check_rank(rank)
        for trigger in self._pace.get(rank, ()):
            assert isinstance(trigger.fault, Slow)
            if not trigger.happened and seconds:
                self._note(trigger, rank, -1, Operation(op, "", user_line(), ()))
            seconds *= trigger.fault.factor
        return seconds

    def note_slow_link(self, trigger: Trigger, op: str) -> None:
        """Enter a slow link into the log when it is first used."""
        if not trigger.happened:
            self._note(trigger, trigger.fault.involved()[0], -1, Operation(op, "", user_line(), ()))


class SlowedPricing(CommPricing):
    """Pricing with one link that is slower than the machine's."""

    def __init__(self, base: CommPricing, trigger: Trigger, faults: Faults) -> None:
        self._base = base
        self._trigger = trigger
        self._faults = faults

    def of_collective(self, calls: Sequence[Call], ranks: tuple[int, ...]) -> float:
        return self._slowed(self._base.of_collective(calls, ranks), ranks, calls[0].contract.op)

    def of_message(self, sender: int, receiver: int, size: int) -> float:
        return self._slowed(self._base.of_message(sender, receiver, size), (sender, receiver), "send")

    def _slowed(self, seconds: float, ranks: tuple[int, ...], op: str) -> float:
        fault = self._trigger.fault
        assert isinstance(fault, SlowLink)
        if not seconds or fault.a not in ranks or fault.b not in ranks:
            return seconds
        self._faults.note_slow_link(self._trigger, op)
        return seconds * fault.factor
