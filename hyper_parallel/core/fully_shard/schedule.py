"""State shared by the units of one root in a step: their order, the backward and the reductions under way.

A unit's life in one training step::

    before forward    gather (or take what was prefetched), start the next unit's gather
    after forward     free
    before backward   gather again, start the gather of the unit that backward reaches next
    after backward    pack gradients, start their reduction, free
    end of backward   what is left: finish reductions in the order they were issued, free
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.autograd import Variable

from hyper_parallel.core.fully_shard.reduction import Reduction
from hyper_parallel.core.fully_shard.shares import Shares
from hyper_parallel.core.fully_shard.waiting import remember

if TYPE_CHECKING:
    from hyper_parallel.core.fully_shard.unit import Unit

__all__ = ["Schedule"]


class Schedule:
    """The common state of the units of one root.

    Attributes:
        units: All units below the root, in module order; the root's is the first.
        forward_order: Units in the order in which the last complete forward of the root entered them.
        backward_order: The same units, in the reverse of the order in which that forward left them.
        reductions: Reductions under way, in issue order.
        is_last_backward: False keeps the end of a backward from finishing anything (several backwards per step).
        shares: The all_reduces that reductions of several units share.
        forward_number: Of the forward of the root under way, or of the last one.
        backward_number: Of the backward under way, or of the last one.
    """

    def __init__(self, units: list[Unit]) -> None:
        self.units = units
        self.forward_order: list[Unit] = []
        self.backward_order: list[Unit] = []
        self.reductions: list[Reduction] = []
        self.shares = Shares(self._bytes_left())
        self.is_last_backward = True
        self.backward_number = 0
        self.forward_number = 0
        self._recording = False  # the root's forward is running
        self._entered: list[Unit] = []
        self._left: list[Unit] = []
        self._ending: weakref.ref[Callable[[], None]] | None = None  # what autograd calls when backward is through

    def _bytes_left(self) -> int:
        return sum(r.bytes_left(u.options.mp_policy.reduce_dtype) for u in self.units for r in u.reducers)

    def take_over(self, other: Schedule) -> None:
        """Go on with what is under way in another schedule, whose units are among these."""
        self.reductions += other.reductions
        other.reductions = []
        other.shares.close()
        self.backward_number = max(self.backward_number, other.backward_number)
        self.forward_number = max(self.forward_number, other.forward_number) + 1
        self.is_last_backward = self.is_last_backward and other.is_last_backward

    # -- order ---------------------------------------------------------------------------------------------------

    def next_forward(self, unit: Unit) -> list[Unit]:
        """The unit that forward enters after ``unit``, if the last forward is a guide."""
        return _neighbour(self.forward_order, unit.place_in_forward, unit)

    def next_backward(self, unit: Unit) -> list[Unit]:
        """The unit that backward reaches after ``unit``, likewise."""
        return _neighbour(self.backward_order, unit.place_in_backward, unit)

    def begin_forward(self) -> None:
        """The root's forward starts: record the order anew."""
        self.forward_number += 1
        if any(unit.options.finish_late for unit in self.units):
            self.finish_reductions()  # nobody has asked for them since the last backward
        self._recording = not self.in_backward
        self._entered, self._left = [], []
        for unit in self.units:
            unit.begin_step()

    def enters(self, unit: Unit) -> None:
        """Forward enters ``unit``."""
        if self._recording:
            self._entered.append(unit)

    def leaves(self, unit: Unit) -> None:
        """Forward leaves ``unit``."""
        if self._recording:
            self._left.append(unit)

    def end_forward(self) -> None:
        """The root's forward is through."""
        if not self._recording:
            return
        self._recording = False
        self._left.reverse()
        if self._entered != self.forward_order or self._left != self.backward_order:
            self.forward_order, self.backward_order = self._entered, self._left
            for place, unit in enumerate(self.forward_order):
                unit.place_in_forward = place
            for place, unit in enumerate(self.backward_order):
                unit.place_in_backward = place
        for unit in self.units:
            unit.end_root_forward()

    # -- backward ------------------------------------------------------------------------------------------------

    @property
    def in_forward(self) -> bool:
        """Whether the root's forward is running."""
        return self._recording

    @property
    def in_backward(self) -> bool:
        """Whether a backward is under way."""
        return self._ending is not None

    @property
    def in_backward_number(self) -> int:
        """The number of the backward under way; -2: there is none."""
        return self.backward_number if self._ending is not None else -2

    def begin_backward(self) -> None:
        """The first unit of a backward is reached: arrange for its end."""
        self.forget_failed_backward()
        if self._ending is not None:
            return

        def end() -> None:
            self._end_backward()

        # Autograd alone keeps `end` alive: if it dies without a call, the backward has failed.
        self._ending = weakref.ref(end, self._backward_failed)
        self.backward_number += 1
        Variable._execution_engine.queue_callback(end)

    def _backward_failed(self, _: object) -> None:
        """What may be done at once: whoever looks for parameters now finds shards. The rest waits for the next pass."""
        for unit in self.units:
            unit.show_shards()

    def forget_failed_backward(self) -> None:
        """If the last backward ended with an error, drop what it had begun."""
        if self._ending is None or self._ending() is not None:
            return
        self._ending = None
        reductions, self.reductions = self.reductions, []
        for reduction in reductions:  # the user may have zeroed the gradients since
            reduction.drop()
        self.shares = Shares(self.shares.total)
        for unit in self.units:
            unit.abandon_backward()

    def _end_backward(self) -> None:
        """Backward is through: reduce what is left, apply all gradients, free all units."""
        self._ending = None
        for unit in reversed(self.units):
            unit.end_of_backward()
        if self.is_last_backward:
            if any(unit.options.finish_late for unit in self.units):
                remember(self)
            else:
                self.finish_reductions()
        for unit in self.units:
            assert unit.is_resharded(), f"whole parameters outlive backward: {type(unit.modules[0]).__name__}"

    # -- reductions ----------------------------------------------------------------------------------------------

    def add(self, reduction: Reduction) -> None:
        """Queue a reduction behind those under way."""
        self.reductions.append(reduction)

    def receive_reductions(self) -> None:
        """Wait for the collectives under way: their buffers go before the next unit's are made."""
        for earlier in self.reductions:
            earlier.receive()

    def advance_reductions(self) -> None:
        """Take the reductions under way a step further."""
        for earlier in self.reductions:
            earlier.advance()
        self.reductions = [earlier for earlier in self.reductions if not earlier.done]

    def finish_reductions(self) -> None:
        """Wait for the reductions under way and apply their gradients."""
        reductions, self.reductions = self.reductions, []
        for reduction in reductions:
            reduction.advance()
        self.shares.close()
        for reduction in reductions:
            reduction.finish()
        if any(bucket.storage.on_host for unit in self.units for bucket in unit.buckets):
            self.units[0].platform.current_stream().synchronize()  # the host reads gradients next


def _neighbour(order: list[Unit], place: int, unit: Unit) -> list[Unit]:
    if 0 <= place < len(order) - 1 and order[place] is unit:
        return [order[place + 1]]
    return []
