"""Logging and warnings of ranks: each has its own warning filters, and what is shown names its rank.

What has been shown at a line already is not each rank's own: Python notes that in the module's `__warningregistry__`,
a plain dict that is read before any filter.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

from sim.kernel.context import current_context

__all__ = ["MESSAGE_PATCHES", "copy_of_filters", "enter_filters", "leave_filters"]

Undo = Callable[[], None]
Filters = tuple[Any, Any, Any]
_warnings: Any = warnings  # parts of it are unknown to its stubs


def leave_filters() -> Filters:
    """What `warnings.catch_warnings` saves and restores, as it is now."""
    return _warnings.filters, _warnings.showwarning, _warnings._showwarnmsg_impl


def enter_filters(filters: Filters) -> None:
    """Put back what `leave_filters` has returned.

    Two ranks that each wait for the other inside of a `with warnings.catch_warnings()` would else leave it in the
    wrong order, and the filters of one of them would stay.
    """
    _warnings.filters, _warnings.showwarning, _warnings._showwarnmsg_impl = filters


def copy_of_filters() -> Filters:
    """The filters of the process, for a rank to change."""
    filters, *rest = leave_filters()
    return (list(filters), *rest)


def _prefixed(text: str) -> str:
    """`text` with the calling rank before each line; as it is where no rank calls, or a script's.

    The output streams of a script's ranks do that.
    """
    context = current_context()
    if context is None or context.view is not None:
        return text
    return "".join(f"[rank {context.rank}] {line}" for line in text.splitlines(keepends=True))


def _warning_prefix(host: object) -> Undo:
    """A warning that is shown says which rank it comes from; one that is recorded stays as it is."""
    original = warnings.formatwarning

    def formatwarning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        text = original(message, category, filename, lineno, line)
        logged = getattr(logging, "_warnings_showwarning", None) is not None  # then the log's own prefix is enough
        return text if logged else _prefixed(text)

    warnings.formatwarning = formatwarning

    def undo() -> None:
        warnings.formatwarning = original

    return undo


def _logging_prefix(host: object) -> Undo:
    """What a handler writes of a record says which rank it comes from; the record itself stays as it is."""
    original = logging.Handler.format

    def format(self: logging.Handler, record: logging.LogRecord) -> str:
        return _prefixed(original(self, record))

    logging.Handler.format = format  # type: ignore[method-assign]

    def undo() -> None:
        logging.Handler.format = original  # type: ignore[method-assign]

    return undo


MESSAGE_PATCHES: tuple[Callable[[object], Undo], ...] = (_warning_prefix, _logging_prefix)
