"""Errors of a simulated world, one class per kind of fault."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from hyper_parallel.core.common.errors import HyperParallelError


class SimError(HyperParallelError, RuntimeError):
    """Base class of the errors that the simulator itself raises."""


class CollectiveMismatch(SimError):
    """The ranks of a group called different operations where one collective was due.

    Attributes:
        meant: What the collective is for on which ranks, if these agree on all else; empty if not.
    """

    meant: str = ""


class Deadlock(SimError):
    """No rank can run: each waits for another one, or for one that has finished."""


class InFlightBufferRace(SimError):
    """A rank touched a buffer between the issue of an operation on it and its `wait`; see `check_races`."""


class NonDeterminism(SimError):
    """Two runs from one seed did not do the same, or runs from different seeds gave different results."""


class ReplicaMismatch(SimError):
    """Copies that a layout says are equal differ, or a part of a sum was used as if it were the sum."""


class RankFailed(SimError):
    """The function of one rank raised; the other ranks were stopped.

    The instance raised by `sim.run` is also an instance of the original exception's class, so
    `except ValueError` and `pytest.raises(ValueError)` work as on one device. The original is its
    `__cause__`.

    Attributes:
        rank: The rank that raised first.
    """

    rank: int = -1


class RankLost(SimError, dist.DistBackendError):
    """An operation cannot complete: a rank that takes part has died or hangs, or a message was lost.

    What a real job sees as a failed or timed-out operation, and so it is also a `torch.distributed.DistBackendError`.
    It comes from faults only (`sim.faults`); a rank may catch it and go on with the others.

    Attributes:
        ranks: The ranks that are dead or frozen by now, as `sim.current_rank()` counts them.
    """

    ranks: tuple[int, ...] = ()

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class RankStopped(BaseException):
    """Unwinds a rank because the world is ending; never seen outside of the world.

    A `BaseException`, so that `except Exception` in the user's code does not swallow it.
    """


def rank_failed(rank: int, error: BaseException, replay: str, hint: str = "") -> RankFailed:
    """Build the `RankFailed` for `error` on `rank`, as a subclass of the error's own class too.

    >>> failure = rank_failed(3, ValueError("bad"), "sim.run(f, world_size=4, seed=0)")
    >>> isinstance(failure, ValueError), failure.rank
    (True, 3)
    """
    message = f"rank {rank} {what_happened(error)}\n{hint}  replay: {replay}"
    failure = _as_its_own_class(error, message) if isinstance(error, Exception) else None
    if failure is None:
        failure = RankFailed(message)
    failure.__dict__["rank"] = rank
    return failure


def what_happened(error: BaseException) -> str:
    """What the rank has done from whose function `error` came.

    >>> what_happened(ValueError("bad")), what_happened(SystemExit(3))
    ('raised ValueError: bad', 'called sys.exit(3)')
    """
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r})"
    text = _text_of(error)
    return f"raised {type(error).__name__}: {text}" if text else f"raised {type(error).__name__}"


def exit_status(end: SystemExit) -> int:
    """What the shell would see of it.

    >>> [exit_status(SystemExit(code)) for code in (None, 3, 256, -1, 2**70, "no data")]
    [0, 3, 0, 255, 255, 1]
    """
    if isinstance(end.code, int):
        return end.code & 0xFF if -(2**63) <= end.code < 2**63 else 0xFF
    return 0 if end.code is None else 1


def said(error: BaseException) -> str:
    """The class of `error` and the first line of its text.

    >>> said(ValueError("bad\\nand worse")), said(KeyError())
    ('ValueError: bad', 'KeyError')
    """
    lines = _text_of(error).splitlines()
    first = lines[0] if lines else ""
    first = first if len(first) <= 200 else f"{first[:197]}..."
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"(its text cannot be shown: {type(broken).__name__} in __str__)"


def _as_its_own_class(error: Exception, message: str) -> RankFailed | None:
    """An object that is a RankFailed and of the error's class, with its attributes; None where that cannot be.

    The class's own constructors are passed by: they may want any number of arguments, of any kind.
    """
    original = type(error)
    builtin = next(base for base in original.__mro__ if base.__module__ == "builtins")
    try:
        kind: Any = _combined(original)  # type: ignore[arg-type]  # classes are hashable
        failure: Any = builtin.__new__(kind, message)
        failure.__dict__.update(getattr(error, "__dict__", {}))
        BaseException.__init__(failure, message)
        if isinstance(error, OSError):  # these are no entries of __dict__
            failure.errno, failure.strerror, failure.filename = error.errno, error.strerror, error.filename
    except (TypeError, AttributeError):  # memory layouts that do not combine, or a class that forbids subclasses
        return None
    result: RankFailed = failure
    return result


@functools.lru_cache(maxsize=256)
def _combined(original: type[Exception]) -> type:
    """One class for each: hypothesis, for one, takes failures of different classes for different failures."""
    shown = {"__module__": __name__, "__str__": _message_of, "__repr__": _repr_of, "__reduce__": _reduce}
    return type(f"RankFailed[{original.__name__}]", (RankFailed, original), shown)


def _message_of(failure: RankFailed) -> str:
    return str(failure.args[0])


def _repr_of(failure: RankFailed) -> str:
    return f"{type(failure).__name__}({failure.args[0]!r})"


def _reduce(failure: RankFailed) -> tuple[type[RankFailed], tuple[str], dict[str, int]]:
    """Pickle as a plain RankFailed: the combined class exists in this process only."""
    return RankFailed, (str(failure.args[0]),), {"rank": failure.rank}


def ranks_phrase(ranks: Iterable[int]) -> str:
    """Write a set of ranks for a person: `rank 3`, `ranks 0-3, 7`.

    >>> ranks_phrase([7, 0, 1, 2, 3])
    'ranks 0-3, 7'
    """
    ordered = sorted(set(ranks))
    if not ordered:
        return "no rank"
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    parts: list[str] = []
    start = previous = ordered[0]
    for rank in [*ordered[1:], None]:
        if rank is not None and rank == previous + 1:
            previous = rank
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        if rank is not None:
            start = previous = rank
    return "ranks " + ", ".join(parts)


def short_ranks_phrase(ranks: Sequence[int]) -> str:
    """As `ranks_phrase`, with the middle left out where that gets long.

    >>> short_ranks_phrase(range(0, 256, 8))
    'ranks 0, 8, ..., 248'
    """
    phrase = ranks_phrase(ranks)
    return phrase if len(phrase) <= 40 else f"ranks {ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"


_SINGLE = 16  # rows up to which each rank has a line of its own


def table(rows: Sequence[Sequence[str]], *, marked: Iterable[int] = ()) -> str:
    """Align rows of text in columns, one line each, with a `*` before the marked ones.

    Among many rows, ranks that say the same share a line.
    """
    marks = set(marked)
    if len(rows) > _SINGLE:
        rows, marks = _together(rows, marks)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for index, row in enumerate(rows):
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"{'*' if index in marks else ' '} {cells}".rstrip())
    return "\n".join(lines)


def _together(rows: Sequence[Sequence[str]], marks: set[int]) -> tuple[list[Sequence[str]], set[int]]:
    """One row for all ranks with equal rows, in the order of the first of each."""
    alike: dict[tuple[str, ...], list[int]] = {}  # "" and the cells of a rank, or a row that is of no rank
    for index, (first, *rest) in enumerate(rows):
        is_rank = first.removeprefix("rank ").isdecimal()
        apart = str(index in marks) if is_rank else str(index)
        alike.setdefault(("" if is_rank else first, *rest, apart), []).append(index)
    merged: list[Sequence[str]] = []
    for (first, *rest, _), found in alike.items():
        numbers = [int(rows[index][0].removeprefix("rank ")) for index in found if not first]
        merged.append((first or short_ranks_phrase(numbers), *rest))
    return merged, {place for place, found in enumerate(alike.values()) if found[0] in marks}
