"""A rank's ``sys.stdout`` and ``sys.stderr``: lines with a prefix, or nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["RankStream"]


class RankStream:
    r"""Writes whole lines, each behind ``prefix``; everything else is the real stream's.

    >>> import io
    >>> out = io.StringIO()
    >>> first, second = RankStream(out, "[rank 0] "), RankStream(out, "[rank 1] ")
    >>> _ = first.write("a"), second.write("b\nc\n"), first.write("d\n")
    >>> out.getvalue().splitlines()
    ['[rank 1] b', '[rank 1] c', '[rank 0] ad']

    Args:
        real: Where the lines go; None drops them.
        prefix: Put before each line. Empty: what is written passes through as it comes.
        like: The stream that answers everything else, ``real`` if not given.
    """

    def __init__(self, real: Any, prefix: str, *, like: Any = None) -> None:
        self._real = real
        self._prefix = prefix
        self._like = real if like is None else like
        self._begun = ""  # of a line that has not ended

    def write(self, text: str) -> int:
        """Write ``text``; a line that has not ended waits for its end."""
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
        """Write each of ``lines``."""
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
