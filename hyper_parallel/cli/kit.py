"""Exit codes, consoles and error reports shared by the commands of `hyper-parallel`."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.text import Text

from hyper_parallel.core.common.errors import InvalidValue, explain

USER_ERROR, FAILURE, INTERRUPTED = 2, 1, 130
DOES_NOT_FIT = 3
LOST_FOLDER = 73  # EX_CANTCREAT in sysexits.h
NOT_SAVED = 74  # EX_IOERR in sysexits.h; the watchdog's is 70
WIDTH = 170  # columns of the widest tables
_LET_FIRST_SAY_S = 5.0
_NOT_WRITTEN = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE))  # which reading does not raise


def option(help: str, *names: str, panel: str | None = None, **rest: Any) -> Any:
    """Return an option of a command for `Annotated`: its help comes first, then names other than the parameter's."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **rest)


@contextmanager
def mistakes_as_messages() -> Iterator[None]:
    """Turn a mistake in what was asked into one message and exit code 2, and too little memory into 1."""
    try:
        yield
    except Exception as error:
        if say_if_memory_lacks(error):
            raise typer.Exit(FAILURE) from None
        if not _is_in_what_was_asked(error):
            raise
        say_error(str(error))
        raise typer.Exit(USER_ERROR) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM interrupt the block as Ctrl-C does: batch systems send it some time before they kill."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def say_if_memory_lacks(error: BaseException) -> bool:
    """Print that the host has no more memory, if that is the error, and return whether it is.

    Python and numpy have an error of their own for that, and torch has not.
    """
    is_torchs = isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    if not is_torchs and not isinstance(error, MemoryError):
        return False
    first = (str(error).splitlines() or [type(error).__name__])[0]
    blame = "the memory of this machine is too small for the sizes that were asked for"
    say_error(explain("cannot go on", blame, f"seen: {first}", "smaller sizes"))
    return True


def is_of_output(error: BaseException | None) -> bool:
    """Tell whether something could not be written to a stream, as where its disk is full or its reader has gone."""
    return isinstance(error, OSError) and error.filename is None and error.errno in _NOT_WRITTEN


@contextmanager
def output_written() -> Iterator[None]:
    """Write out what a command has printed; where that cannot be done, say so in one message and exit with code 1.

    A reader that has read enough, as `head`, gets no message.
    """
    if sys.stdout is None:  # it was closed before the start
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  for the process's life
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may have letters that it cannot write
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if not is_of_output(error):
            raise
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with suppress(OSError):
                stream.flush()
                continue
            with suppress(OSError, ValueError):  # Python would try once more at exit, and fail
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if error.errno != errno.EPIPE:
            with suppress(OSError):
                seen, hint = f"seen: {error}", "another place for the output, or room on its disk"
                say_error(explain("cannot write the output", str(error.strerror).lower(), seen, hint))
        raise SystemExit(FAILURE) from None


def _is_in_what_was_asked(error: Exception) -> bool:
    if isinstance(error, (TypeError, OSError)):  # the latter of a folder that cannot be written, say
        return "\n  try: " in str(error)  # otherwise a mistake of ours
    if isinstance(error, ValueError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    from hyper_parallel.core.checkpoint.errors import CheckpointError
    from hyper_parallel.platform import PlatformUnavailableError

    return isinstance(error, (PlatformUnavailableError, CheckpointError))


def say_error(text: str) -> None:
    """Print what all ranks of this machine have found, once: another machine may lack what this one has."""
    rank = os.environ.get("RANK", "0")
    if os.environ.get("LOCAL_RANK", rank) == "0":
        which = "" if rank == "0" else f" rank {rank}:"
        stderr_console().print(f"[red]error:[/red]{which} {escape(text)}")
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(_LET_FIRST_SAY_S)  # torchrun kills all ranks as soon as one has ended


def is_first_rank() -> bool:
    """Tell whether this process is the rank that speaks for all."""
    return os.environ.get("RANK", "0") == "0"


def stdout_console() -> Console:
    """Write to the real stdout from the first rank; the others stay silent."""
    quiet = not is_first_rank()
    return Console(file=sys.stdout, quiet=quiet, highlight=False, markup=False, emoji=False, soft_wrap=True)


def stderr_console() -> Console:
    """Write to stderr."""
    return Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)


def print_wide(view: RenderableType, width: int = WIDTH) -> None:
    """Print tables to stdout as wide as they are, without the spaces that fill their last columns.

    A terminal with fewer columns than `width` breaks lines, and nothing is left out.
    """
    console = stdout_console()
    console.width = max(console.width, width)
    with console.capture() as captured:
        console.print(view)
    console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Show in a terminal that something is going on."""
    console = stderr_console()
    if not console.is_terminal:
        yield
        return
    with console.status(Text(what)):
        yield


def check_can_write(path: Path | None) -> None:
    """Raise ValueError where a file cannot be written, and make its folder; None is none."""
    if path is None:
        return
    if os.path.isdir(path):  # of pathlib's, a name that is too long raises
        raise InvalidValue(f"cannot write '{path}'", "it is a folder", f"file: {path}", f"{path / 'out.json'}")
    there = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not there.is_dir():
        raise InvalidValue(f"cannot write '{path}'", f"'{there}' is no folder", f"file: {path}", "another path")
    try:  # permissions do not tell: nobody can write in /proc, say
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        blame = error.strerror or str(error)
        raise InvalidValue(f"cannot write '{path}'", blame, f"file: {path}", "another path") from None


def check_can_draw(path: Path | None) -> None:
    """Raise ValueError where a picture cannot be drawn and written: before minutes of work; None is none."""
    check_can_write(path)
    if path is None:
        return
    from hyper_parallel.core.common.drawing import blank_figure

    if blank_figure(path, 1, 1) is None:
        blame, seen = "matplotlib is not installed", "missing: the extra 'plot' of hyper_parallel"
        raise InvalidValue(f"cannot draw '{path}'", blame, seen, "pip install 'hyper_parallel[plot]'")
