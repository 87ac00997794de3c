"""Output of ranks, and each rank's view of its process."""

from __future__ import annotations

import builtins
import logging
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import context as multiprocessing_context
from typing import Any

from sim.explain.errors import SimError

# A rank's `sys.stdout` and `sys.stderr`: lines with a prefix, or nothing ------------------------------------------


class RankStream:
    r"""Writes whole lines, each behind `prefix`; everything else is the real stream's.

    >>> import io
    >>> out = io.StringIO()
    >>> first, second = RankStream(out, "[rank 0] "), RankStream(out, "[rank 1] ")
    >>> _ = first.write("a"), second.write("b\nc\n"), first.write("d\n")
    >>> out.getvalue().splitlines()
    ['[rank 1] b', '[rank 1] c', '[rank 0] ad']

    Args:
        real: Where the lines go; None drops them.
        prefix: Put before each line. Empty: what is written passes through as it comes.
        like: The stream that answers everything else, `real` if not given.
    """

    def __init__(self, real: Any, prefix: str, *, like: Any = None) -> None:
        self._real = real
        self._prefix = prefix
        self._like = real if like is None else like
        self._begun = ""  # of a line that has not ended

    def write(self, text: str) -> int:
        """Write `text`; a line that has not ended waits for its end."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if self._real is None:
            return len(text)
        if not self._prefix:
            self._real.write(text)
            return len(text)
        *lines, self._begun = (self._begun + text).split("\n")
        if lines:
            self._real.write("".join(f"{self._prefix}{line}\n" for line in map(_last_state, lines)))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of `lines`."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the real stream. A progress bar shows its state; any other unfinished line goes on waiting."""
        if self._real is None:
            return
        if "\r" in self._begun:
            self._real.write(f"\r{self._prefix}{_last_state(self._begun)}")
        self._real.flush()

    def finish(self) -> None:
        """End the last line if the rank has not: it writes no more."""
        if self._begun:
            self.write("\n")
        self.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._like, name)


def _last_state(line: str) -> str:
    """What a terminal shows of a line in which a progress bar has gone back to the start again and again."""
    return line.rstrip("\r").rpartition("\r")[2]


# The process as a script sees and changes it, one copy per rank: `__main__`, `sys.argv`, streams  -----------------
#
# A world has these only where it runs a script (`python -m sim run`). They are exchanged when ranks take turns.

# What is exchanged: scripts assign to these, or change the object that is there.
SLOTS: tuple[tuple[Any, str], ...] = (
    (sys, "argv"),
    (sys, "path"),
    (sys, "stdout"),
    (sys, "stderr"),
    (sys, "stdin"),
    (sys, "excepthook"),
    (sys, "unraisablehook"),
    (sys, "displayhook"),
    (threading, "excepthook"),
    (tempfile, "tempdir"),
    (builtins, "print"),  # "only rank 0 prints" is often written by replacing it
    (logging, "root"),
    (logging.Logger, "root"),
    (logging.Logger, "manager"),
    (logging, "_loggerClass"),
    (logging, "_logRecordFactory"),
    (multiprocessing_context._default_context, "_actual_context"),  # set_start_method
)


class ProcessView:
    """One rank's process as its script sees it.

    Attributes:
        streams: Its `sys.stdout` and `sys.stderr`.
        at_exit: What it has registered with `atexit`.
        signals: The signal handlers it has set, which are called for what the rank sends itself.
        thread: The one that executes the script.
    """

    def __init__(self, argv: Sequence[str], path: Sequence[str], stdout: RankStream, stderr: RankStream) -> None:
        self.streams = (stdout, stderr)
        self.at_exit: list[Callable[[], Any]] = []
        self.signals: dict[int, Any] = {}
        self.thread: threading.Thread | None = None
        self._own_hook = sys.excepthook
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

    def run_hook(self, error: BaseException) -> None:
        """Call the `sys.excepthook` that the script has set with what ends the rank, as Python does.

        Args:
            error: what has come out of the script.
        """
        if sys.excepthook is self._own_hook or isinstance(error, SystemExit):
            return
        try:
            sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)  # less `exec`
        except SimError:
            raise
        except Exception:
            print("Error in sys.excepthook:", file=sys.stderr)
            traceback.print_exc()

    def run_exit_calls(self) -> None:
        """Call what the rank has registered with `atexit`, the last one first.

        What one of them raises is shown and changes nothing else, as in Python, unless it ends the world.
        """
        while self.at_exit:
            call = self.at_exit.pop()
            try:
                call()
            except SimError:
                raise
            except (Exception, SystemExit):
                print(f"Exception ignored in atexit callback: {getattr(call, 'func', call)}", file=sys.stderr)
                traceback.print_exc()


class ForwardToRank(logging.Handler):
    """On the process's root logger: hands what libraries log on a rank to that rank's handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        """Let the running rank's root logger have the record, or the error output if nobody wants it."""
        if logging.root.handlers:
            logging.root.callHandlers(record)
        elif logging.lastResort is not None and record.levelno >= logging.lastResort.level:
            logging.lastResort.handle(record)
