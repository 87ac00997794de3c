"""The rank that the calling thread runs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.world import RankContext

__all__ = ["current_context", "current_rank", "this_thread"]


class _ThisThread(threading.local):
    context: RankContext | None = None


this_thread = _ThisThread()


def current_context() -> RankContext | None:
    """The rank that the calling thread runs, or None outside of any world."""
    return this_thread.context


def current_rank() -> int | None:
    """The simulated rank of the calling thread, or None outside of any world.

    >>> current_rank() is None
    True
    """
    context = this_thread.context
    return None if context is None else context.rank
