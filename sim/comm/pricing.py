"""Prices of communication in virtual time.

A collective starts when the last member of its group has come and the group's collective before it is over; it ends
when the cost function says so, and `wait` moves the clock of each member to that end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from hyper_parallel.core.common.checks import check
from hyper_parallel.core.machine.description import Machine, find_machine
from hyper_parallel.core.machine.links import Load, load_seconds, spread_of
from sim.comm.collectives import Call
from sim.kernel.clock import check_seconds

Cost = Callable[[str, Load], float]
_OF_ONE_COPY = {"broadcast": "recv_bytes", "reduce": "send_bytes"}  # a root does not send to each one itself


class CommPricing:
    """What communication costs in a world.

    >>> CommPricing(None).of_message(0, 1, 2**20)
    0.0
    >>> round(CommPricing("h100-sxm").of_message(0, 1, 2**20) * 1e6)  # microseconds
    21

    Args:
        on: The machine whose prices count, or its name or file; None: communication is free.
        cost: Seconds of an operation and a load, in place of the machine's prices.
    """

    def __init__(self, on: str | Machine | None, cost: Cost | None = None) -> None:
        self.machine = None if on is None else find_machine(on)
        asked = "cannot price the communication of a world"
        check(asked, "callable | None", "sim.world(8, cost=lambda op, load: 1e-6)", cost=cost)
        if cost is None and self.machine is not None:
            cost = partial(load_seconds, self.machine.prices)
        self._cost = cost
        self._per_node = 2**31 if self.machine is None else self.machine.devices_per_node

    def of_collective(self, calls: Sequence[Call], ranks: tuple[int, ...]) -> float:
        """Seconds of a collective that `ranks` have called."""
        if self._cost is None:
            return 0.0
        op = calls[0].contract.op
        if op in _OF_ONE_COPY:
            moved = max(getattr(call, _OF_ONE_COPY[op]) for call in calls)
        else:
            moved = max(max(call.send_bytes, call.recv_bytes) for call in calls)
        return self._checked(op, ranks, moved)

    def of_message(self, sender: int, receiver: int, size: int) -> float:
        """Seconds of a send of `size` bytes."""
        if self._cost is None or sender == receiver:
            return 0.0
        return self._checked("send", (sender, receiver), size)

    def _checked(self, op: str, ranks: tuple[int, ...], moved: int) -> float:
        assert self._cost is not None
        load = Load.of(spread_of(ranks, self._per_node), moved)
        return check_seconds(self._cost(op, load), f"the cost of {op}")
