"""The process as a script sees and changes it, one copy per rank: ``__main__``, ``sys.argv``, streams ...

A world has these only where it runs a script (``python -m sim run``). They are exchanged when ranks take turns.
"""

from __future__ import annotations

import builtins
import logging
import sys
from collections.abc import Callable, Sequence
from multiprocessing import context as multiprocessing_context
from typing import Any

from sim.script.output import RankStream

__all__ = ["SLOTS", "ForwardToRank", "ProcessView"]

# What is exchanged: scripts assign to these, or change the object that is there.
SLOTS: tuple[tuple[Any, str], ...] = (
    (sys, "argv"),
    (sys, "path"),
    (sys, "stdout"),
    (sys, "stderr"),
    (sys, "excepthook"),
    (builtins, "print"),  # "only rank 0 prints" is often written by replacing it
    (logging, "root"),
    (logging.Logger, "root"),
    (logging.Logger, "manager"),
    (multiprocessing_context._default_context, "_actual_context"),  # set_start_method
)


class ProcessView:
    """One rank's process as its script sees it.

    Attributes:
        streams: Its ``sys.stdout`` and ``sys.stderr``.
        at_exit: What it has registered with ``atexit``.
        signals: The signal handlers it has set, which nobody calls.
    """

    def __init__(self, argv: Sequence[str], path: Sequence[str], stdout: RankStream, stderr: RankStream) -> None:
        self.streams = (stdout, stderr)
        self.at_exit: list[Callable[[], Any]] = []
        self.signals: dict[int, Any] = {}
        root = logging.RootLogger(logging.WARNING)
        own: dict[str, Any] = {"argv": list(argv), "path": list(path), "stdout": stdout, "stderr": stderr, "root": root}
        own |= {"manager": logging.Manager(root), "_actual_context": None}
        self._values = [own.get(name, getattr(owner, name)) for owner, name in SLOTS]

    def enter(self) -> None:
        """Put the rank's copies in place: it is about to run."""
        for (owner, name), value in zip(SLOTS, self._values, strict=True):
            setattr(owner, name, value)

    def leave(self) -> None:
        """Keep what the rank has made of them: another one is about to run."""
        self._values = [getattr(owner, name) for owner, name in SLOTS]

    def run_exit_calls(self) -> None:
        """Call what the rank has registered with ``atexit``, the last one first."""
        while self.at_exit:
            self.at_exit.pop()()


class ForwardToRank(logging.Handler):
    """On the process's root logger: hands what libraries log on a rank to that rank's handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        """Let the running rank's root logger have the record, or the error output if nobody wants it."""
        if logging.root.handlers:
            logging.root.callHandlers(record)
        elif logging.lastResort is not None and record.levelno >= logging.lastResort.level:
            logging.lastResort.handle(record)
