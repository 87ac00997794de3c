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
    r"""Stream of a rank that writes whole lines behind `prefix`; all other attributes are the real stream's.

    >>> import io
    >>> out = io.StringIO()
    >>> first, second = RankStream(out, "[rank 0] "), RankStream(out, "[rank 1] ")
    >>> _ = first.write("a"), second.write("b\nc\n"), first.write("d\n")
    >>> out.getvalue().splitlines()
    ['[rank 1] b', '[rank 1] c', '[rank 0] ad']

    Args:
        real: Stream that receives the lines; None drops them.
        prefix: Text before each line. Empty: text passes through unbuffered.
        like: Stream that serves all other attributes; None: `real`.
    """

    def __init__(self, real: Any, prefix: str, *, like: Any = None) -> None:
        self._real = real
        self._prefix = prefix
        self._like = real if like is None else like
        self._begun = ""  # the unfinished line

    def write(self, text: str) -> int:
        """Write the whole lines of `text`; keep an unfinished line for later."""
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
        """Flush the real stream; of unfinished lines only a progress bar is shown."""
        if self._real is None:
            return
        if "\r" in self._begun:
            self._real.write(f"\r{self._prefix}{_last_state(self._begun)}")
        self._real.flush()

    def finish(self) -> None:
        """End an unfinished last line, because the rank writes no more."""
        if self._begun:
            self.write("\n")
        self.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._like, name)


def _last_state(line: str) -> str:
    """Return the text after the last carriage return, e.g. the last state of a progress bar."""
    return line.rstrip("\r").rpartition("\r")[2]


# The process state of each rank: `__main__`, `sys.argv`, streams  ------------------------------------------------
#
# Only worlds that run a script (`python -m sim run`) have these. They are exchanged when ranks take turns.

# Attributes exchanged: scripts assign to these, or change the object in place.
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
    (builtins, "print"),  # scripts replace it so that only rank 0 prints
    (logging, "root"),
    (logging.Logger, "root"),
    (logging.Logger, "manager"),
    (logging, "_loggerClass"),
    (logging, "_logRecordFactory"),
    (multiprocessing_context._default_context, "_actual_context"),  # changed by set_start_method
)


class ProcessView:
    """Process state of one rank's script.

    Attributes:
        streams: The rank's `sys.stdout` and `sys.stderr`.
        at_exit: Calls that the rank has registered with `atexit`.
        signals: Signal handlers of the rank, called for signals that it sends to itself.
        thread: The thread that executes the script; None before it starts.
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
        """Install the rank's state before its turn."""
        for (owner, name), value in zip(SLOTS, self._values, strict=True):
            setattr(owner, name, value)

    def leave(self) -> None:
        """Save the rank's state after its turn."""
        self._values = [getattr(owner, name) for owner, name in SLOTS]

    def run_hook(self, error: BaseException) -> None:
        """Call the script's own `sys.excepthook`, if it has set one, with the error that ends the rank.

        Args:
            error: exception that the script has raised; `SystemExit` calls no hook.
        """
        if sys.excepthook is self._own_hook or isinstance(error, SystemExit):
            return
        try:
            sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)  # without `exec`
        except SimError:
            raise
        except Exception:
            print("Error in sys.excepthook:", file=sys.stderr)
            traceback.print_exc()

    def run_exit_calls(self) -> None:
        """Run the rank's `atexit` calls, the last one first.

        Errors in them are printed and ignored, as in Python, unless they end the world.
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
    """Handler of the process's root logger that passes records to the handlers of the running rank."""

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the record to the running rank's root logger, or to the last resort if it has no handlers."""
        if logging.root.handlers:
            logging.root.callHandlers(record)
        elif logging.lastResort is not None and record.levelno >= logging.lastResort.level:
            logging.lastResort.handle(record)
