"""Propagation of a lost rank or message: connected peers fail at once, others when their timeout expires.

A process that has died is noticed by those it is connected to: their operations with it fail. One that is frozen, or
a message that never comes, looks like a slow one until the timeout. The timeout is virtual: it passes as soon as no
rank can go on before.
"""

from __future__ import annotations

import os
from functools import partial
from typing import NoReturn

from hyper_parallel.core.common.errors import InvalidValue
from sim.comm.collectives import Call
from sim.comm.group import Endpoint, Group, Message, Network, Slot
from sim.comm.observer import Observer
from sim.explain.errors import RankLost, RankStopped, ranks_phrase
from sim.kernel.waiting import RankThread, Waitable
from sim.observers.faults.triggers import Happening

__all__ = ["DETECTION_S", "TIMEOUT_S", "Losses", "Reform"]

_ASKED = "cannot init_process_group"

DETECTION_S = 1.0  # until a rank knows that another one is dead; so waits that are older than that time out first
TIMEOUT_S = 1800.0  # of what belongs to no group; torch's own default
_MAX_TIMEOUTS = 10_000
_OF_POLLING = 100  # so many count as spent where ranks only asked again and again


class Frozen(Waitable):
    """What a frozen rank waits for."""

    __slots__ = ()

    def describe(self) -> str:
        return "the state in which it was frozen"


class Losses(Observer):
    """The ranks and messages that a world has lost.

    Attributes:
        by_rank: What happened to each rank that was killed or frozen.
        dropped: What happened to messages.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self.by_rank: dict[int, Happening] = {}
        self.dropped: list[Happening] = []
        self._killed: set[int] = set()
        self._timeouts = 0

    # -- losing ------------------------------------------------------------------------------------------------

    def kill(self, happening: Happening) -> NoReturn:
        """End the running rank; whoever waits for it, now or later, gets `sim.RankLost`."""
        self.by_rank[happening.rank] = happening
        self._killed.add(happening.rank)
        for group in self._network.groups.values():
            self.made(group)
        self._network.scheduler.end_threads_of(happening.rank)
        raise RankStopped(happening.describe())

    def freeze(self, happening: Happening) -> NoReturn:
        """Let the running rank wait until all others have ended, then end it."""
        self.by_rank[happening.rank] = happening
        self.hang()

    def hang(self) -> NoReturn:
        """Let the running thread of a frozen rank wait, too."""
        me = self._network.scheduler.running
        assert me is not None, "faults happen on ranks"
        me.notified = True  # whatever ends the world: it does not come back to learn of it
        self._network.scheduler.block(Frozen())
        raise AssertionError("a frozen rank cannot go on")

    def made(self, group: Group) -> None:
        """Let the operations of `group` fail if a member has died."""
        if self._killed.isdisjoint(group.ranks):
            return
        group.lost = self._peer_lost
        scheduler = self._network.scheduler
        for slot in group.slots.values():
            if slot.lost is None:
                scheduler.lose(slot, self._peer_lost, scheduler.now)
        for message in group.unmatched():
            self.note_message(message)

    def issued(self, endpoint: Endpoint, what: Slot | Message, call: Call | None) -> None:
        """Let a message fail that nobody can meet."""
        if isinstance(what, Message) and not what.met and not what.dropped:
            self.note_message(what)

    def note_message(self, message: Message) -> None:
        """Let a waiting message fail if nobody who is alive can meet it, or if its own rank has died."""
        if _own_rank(message) not in self._killed and not self._killed.issuperset(message.missing()):
            return
        scheduler = self._network.scheduler
        message.group.withdraw(message)
        scheduler.lose(message, self._peer_lost, scheduler.now)

    def excuse(self, left: Slot | Message) -> bool:
        """Whether an operation that was left over when all ranks had ended could not have been completed."""
        return left.lost is not None or self._is_in_vain(left)

    # -- timeouts ----------------------------------------------------------------------------------------------

    def rescue(self, until: float | None, polling: bool) -> bool:
        """No rank can go on, because of what was lost: let the wait end whose time is up first.

        Args:
            until: When the first of those that sleep wakes up; None: nobody sleeps.
            polling: Whether ranks ask again and again for what does not happen.

        Returns:
            Whether a rank can go on now.
        """
        if (not self.by_rank and not self.dropped) or self._timeouts > _MAX_TIMEOUTS:
            return False
        rescued = self._rescue(until, polling)
        if rescued:
            self._timeouts += _OF_POLLING if polling else 1
        return rescued

    def _rescue(self, until: float | None, polling: bool) -> bool:
        scheduler = self._network.scheduler
        threads = [thread for thread in (*scheduler.ranks, *scheduler.helpers) if not thread.finished]
        waiting = [(thread, thread.waiting) for thread in threads if thread.waiting is not None]
        here = [(thread, what) for thread, what in waiting if _may_time_out(what)]
        if any(getattr(what, "mismatch", False) for _, what in here):
            return False
        if here:
            # Of those whose time is up at once, first who waits for what is lost; they may then come to the others.
            in_vain = {what: self._is_in_vain(what) for _, what in here}
            at, _, _, what = min(
                (
                    (scheduler.clocks[thread.rank] + _timeout_of(what), not in_vain[what], thread.since, what)
                    for thread, what in here
                ),
                key=lambda found: found[:3],
            )
            if until is not None and at > until:
                return False
            self._time_out(what, at)
            return True
        if not any(self._is_left(thread) for thread in threads):
            return self._release([what for _, what in waiting if isinstance(what, Frozen) and what.lost is None])
        return polling and self._time_out_all()

    def _is_in_vain(self, what: Waitable) -> bool:
        return getattr(what, "dropped", False) or any(rank in self.by_rank for rank in what.missing())

    def _time_out(self, what: Waitable, at: float) -> None:
        if isinstance(what, Message):
            what.group.withdraw(what)
        waiters = tuple(rank.rank for rank in what.waiters)
        self._network.scheduler.lose(what, partial(self._timed_out, waiters), at)

    def _time_out_all(self) -> bool:
        """Time out every operation that somebody has begun: no rank waits, they only look whether it is over."""
        begun: list[Slot | Message] = []
        for group in self._network.groups.values():
            begun += [slot for slot in group.slots.values() if slot.lost is None]
            begun += [message for message in group.unmatched() if not message.dropped]
        for what in begun:
            self._time_out(what, self._network.scheduler.now + what.group.timeout)
        return bool(begun)

    def _is_left(self, thread: RankThread) -> bool:
        """Whether a thread will do something yet, or its process would wait for it: not if its rank is frozen."""
        what = thread.waiting
        idles = thread.daemon or (what is not None and not what.is_global and thread.alarm is None)
        return thread.rank not in self.by_rank and not (thread.name and idles)

    def _release(self, frozen: list[Frozen]) -> bool:
        """Only frozen ranks are left: end them."""
        for what in frozen:
            self._network.scheduler.lose(what, self._never, 0.0)
        return bool(frozen)

    def _never(self, what: Waitable, rank: int) -> RankStopped:
        self._network.scheduler.end_threads_of(rank)
        return RankStopped(self.by_rank[rank].describe())

    # -- what the others learn --------------------------------------------------------------------------------

    def _peer_lost(self, what: Waitable, rank: int) -> BaseException:
        clocks = self._network.scheduler.clocks
        clocks[rank] += DETECTION_S
        members = _members_of(what)
        dead = [r for r in sorted(self._killed) if r in members]
        return RankLost(
            f"rank {rank} cannot complete {what.describe()}{_line(what, rank)}: {ranks_phrase(dead)} "
            f"{'is' if len(dead) == 1 else 'are'} dead\n"
            + "".join(f"  {self.by_rank[r].describe()}\n" for r in dead)
            + f"  try: {self._hint()}",
            tuple(sorted(self.by_rank)),
        )

    def _timed_out(self, waiters: tuple[int, ...], what: Waitable, rank: int) -> BaseException:
        missing = what.missing()
        whom = f" for {ranks_phrase(missing)}" if missing else ""
        waited = f"{_timeout_of(what):g} virtual seconds"
        if rank in waiters:
            found = f"has waited {waited}{whom} at"
        else:
            found = f"cannot complete, since others have waited {waited}{whom} and given up:"
        happened = [*(self.by_rank[r] for r in sorted(self.by_rank)), *self.dropped]
        return RankLost(
            f"rank {rank} {found} {what.describe()}{_line(what, rank)}\n"
            + "".join(f"  {each.describe()}\n" for each in happened)
            + f"  try: {self._hint()}",
            tuple(sorted(self.by_rank)),
        )

    def _hint(self) -> str:
        network = self._network
        left = [rank for rank in range(network.world_size) if rank not in self.by_rank]
        if len(left) == network.world_size:
            return "except sim.RankLost, and send it again"
        whom = str(left) if len(left) <= 8 and all(c.members is None for c in network.endpoints) else "those left"
        return f"except sim.RankLost, and go on in dist.new_group({whom}, use_local_synchronization=True)"


def _line(what: Waitable, rank: int) -> str:
    line = what.line_of(rank)
    return f" ({line})" if line else ""


def _may_time_out(what: Waitable) -> bool:
    return what.is_global and not (what.ready or what.lost is not None or isinstance(what, Frozen))


def _own_rank(message: Message) -> int:
    own = message.sender if message.who_waits == "send" else message.receiver
    assert own is not None
    return message.group.ranks[own]


def _members_of(what: Waitable) -> list[int]:
    return what.missing() if hasattr(what, "who_waits") else list(what.group.ranks)  # type: ignore[attr-defined]


def _timeout_of(what: Waitable) -> float:
    group: Group | None = getattr(what, "group", None)
    return TIMEOUT_S if group is None else group.timeout


# -- a default group made anew, of the ranks that are left, under new ranks and a smaller world_size -----------------


class Gathering(Waitable):
    """Ranks that wait in `init_process_group` until there are as many as the new world is to have."""

    __slots__ = ("generation", "members", "size")

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.members: dict[int, int] = {}  # from the rank that each has chosen to the one it is in this world
        self.generation = 0

    def describe(self) -> str:
        return f"init_process_group of {self.size} ranks, where {len(self.members)} have come"


class Reform:
    """Where the ranks of a world meet; one gathering per size."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._gatherings: dict[int, Gathering] = {}
        self._made = 0

    def join(self, endpoint: Endpoint, rank: int, size: int) -> None:
        """Wait until `size` ranks have come; the calling one is `rank` among them. -1: the environment says so.

        Raises:
            ValueError: No rank of a world that can be, or one that another rank has chosen.
            RankLost: Not enough have come.
        """
        rank = int(os.environ["RANK"]) if rank == -1 else rank
        size = int(os.environ["WORLD_SIZE"]) if size == -1 else size
        began = self._network.world_size
        if not 0 <= rank < size <= began:
            hint = "rank=survivors.index(sim.current_rank()), world_size=len(survivors)"
            seen = f"seen: rank {rank} of {size}, and the world began with {began}"
            raise InvalidValue(_ASKED, "ranks that are left are numbered from 0", seen, hint)
        gathering = self._gatherings.setdefault(size, Gathering(size))
        taken = gathering.members.setdefault(rank, endpoint.rank)
        if taken != endpoint.rank:
            hint = "rank=survivors.index(sim.current_rank()), with the same survivors on each of them"
            seen = f"seen: simulated ranks {taken} and {endpoint.rank}"
            raise InvalidValue(_ASKED, f"two ranks ask to be rank {rank} of {size}", seen, hint)
        if len(gathering.members) == size:
            self._made += 1
            gathering.generation = self._made
            del self._gatherings[size]
            self._network.scheduler.complete(gathering)
        try:
            self._network.scheduler.block(gathering)
        except BaseException:
            if self._gatherings.get(size) is gathering:
                del self._gatherings[size]
            raise
        endpoint.members = tuple(gathering.members[each] for each in range(size))
        endpoint.generation = gathering.generation
