"""asyncio on ranks: an event loop that has nothing to do lets the other threads of the world run.

A loop sleeps in a selector, which the scheduler does not see. While a world is alive, the loops that ranks and their
helper threads make get a selector that gives its turn up, and the virtual clock of their rank.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import threading
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Callable
from typing import Any

from sim.kernel.context import Context, current_context
from sim.kernel.scheduler import Scheduler
from sim.patches.locks import Local, exchange

__all__ = ["EVENT_LOOP_PATCHES", "RankSelector"]

_GRACE_S, _SLICE_S = 0.05, 0.002  # what comes from outside comes in real time


class _Wakening(Local):
    """A loop is given something to do: by a timer, or by another thread."""

    __slots__ = ()

    def describe(self) -> str:
        """Say what waits."""
        return "an asyncio event loop"


class RankSelector(selectors.DefaultSelector):
    """The selector of a loop that a rank has made.

    Args:
        context: The rank.
    """

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._wakening: tuple[Scheduler, _Wakening] | None = None

    @property
    def now(self) -> float:
        """The rank's virtual clock."""
        return self._context.scheduler.clocks[self._context.rank]

    def wake(self) -> None:
        """Let the loop run on; any thread may ask for that."""
        waits, self._wakening = self._wakening, None
        if waits is not None:
            scheduler, wakening = waits
            scheduler.wake(wakening)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready; if nothing is, others run until something is, or until `timeout` virtual seconds are over.

        Beside the loop's own end of a pipe, through which other threads wake it, there may be files and sockets, of
        which the scheduler learns nothing: they are looked at in real time.
        """
        scheduler = _scheduler_of_turn()
        if scheduler is None:
            return super().select(timeout)
        found = super().select(0)
        if found or (timeout is not None and timeout <= 0):
            return found
        is_outside = len(self.get_map()) > 1
        if timeout is None and is_outside:
            while not (found := super().select(_SLICE_S)):
                scheduler.poll()
            return found
        if timeout is None and not scheduler.may_wait():  # for another process: the seed goes on fixing who runs
            return super().select(None)
        if is_outside and (found := super().select(_GRACE_S)):
            return found
        wakening = _Wakening()
        self._wakening = scheduler, wakening
        try:
            scheduler.wait(wakening, None if timeout is None else scheduler.now + timeout)
        finally:
            self._wakening = None
        return super().select(0)


def _scheduler_of_turn() -> Scheduler | None:
    """The scheduler, if the calling thread is the one that it lets run."""
    context = current_context()
    if context is None or context.scheduler.pid != os.getpid():
        return None
    me = context.scheduler.running
    has_turn = me is not None and me.ident == threading.get_ident() and not me.by_itself
    return context.scheduler if has_turn else None


def _event_loops(host: object) -> Callable[[], None]:
    """An event loop that a rank makes waits in virtual time, and lets others run meanwhile."""
    init, write_to_self = BaseSelectorEventLoop.__init__, vars(BaseSelectorEventLoop)["_write_to_self"]
    time = asyncio.BaseEventLoop.time

    def init_on_rank(loop: Any, selector: Any = None) -> None:
        context = current_context()
        if selector is None and context is not None and _scheduler_of_turn() is not None:
            selector = RankSelector(context)
        init(loop, selector)

    def write_to_self_on_rank(loop: Any) -> None:
        write_to_self(loop)
        selector = loop._selector
        if isinstance(selector, RankSelector):
            selector.wake()

    def time_on_rank(loop: Any) -> float:
        selector = vars(loop).get("_selector")
        return selector.now if isinstance(selector, RankSelector) else time(loop)

    return exchange(
        [
            (BaseSelectorEventLoop, "__init__", init_on_rank),
            (BaseSelectorEventLoop, "_write_to_self", write_to_self_on_rank),
            (asyncio.BaseEventLoop, "time", time_on_rank),
        ]
    )


EVENT_LOOP_PATCHES = (_event_loops,)
