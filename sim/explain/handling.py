"""Exceptions that ranks were handling when a mismatch was found.

A rank that raises and communicates on its way out, in a `finally` say, leads to a deadlock or a mismatch, of which
its own exception is the likely cause.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

from sim.explain.errors import RankStopped, SimError, ranks_phrase, said
from sim.explain.lines import raised_at
from sim.kernel.scheduler import Scheduler

__all__ = ["Handled", "being_handled"]

_SHOWN = 5
Error = TypeVar("Error", bound=SimError)


class Handled:
    """What the ranks of a world handle now: looked at when an error is built, and never before.

    Attributes:
        lines: One line for each exception, with who handles it; empty where nobody handles any.
        cause: The one that the fewest ranks handle; None where nobody handles any.
        advice: What to try; empty where nobody handles any, or all ranks handle the same.
    """

    def __init__(self, found: dict[str, tuple[list[int], BaseException]], size: int) -> None:
        none: tuple[list[int], BaseException | None] = ([], None)
        ranks, self.cause = min(found.values(), key=lambda entry: len(entry[0]), default=none)
        self.advice = ""
        if self.cause is not None and not isinstance(self.cause, SimError) and len(set(ranks)) < size:
            self.advice = (
                f"look at the {type(self.cause).__name__} of {ranks_phrase(ranks)} first; what is called in 'finally' "
                "or 'except' has to be called by all ranks"
            )
        shown = [
            f"  {ranks_phrase(ranks)} {'is' if len(set(ranks)) == 1 else 'are'} handling {text}\n"
            for text, (ranks, _) in found.items()
        ]
        more = f"  and {len(shown) - _SHOWN} more exceptions are being handled\n" if len(shown) > _SHOWN else ""
        self.lines = "".join(shown[:_SHOWN]) + more

    def chained(self, error: Error) -> Error:
        """Let `error` have come from the cause."""
        if self.cause is not None:
            error.__cause__ = self.cause
        return error


def being_handled(scheduler: Scheduler, world_size: int) -> Handled:
    """Ask every thread of every rank for the exception in whose `except` or `finally` it is.

    Those that never left a library, such as torch's or the simulator's own, are nobody's concern.
    """
    found: dict[str, tuple[list[int], BaseException]] = {}
    current: dict[int, Any] = sys._current_exceptions()
    for thread in sorted((*scheduler.ranks, *scheduler.helpers), key=lambda thread: thread.rank):
        error = current.get(thread.ident) if not thread.finished else None
        if isinstance(error, tuple):  # Python 3.10 and 3.11: as sys.exc_info() has it
            error = error[1]
        if error is None or isinstance(error, RankStopped):
            continue
        line = raised_at(error)
        if line:
            found.setdefault(f"{said(error)}  {line}", ([], error))[0].append(thread.rank)
    return Handled(found, world_size)
