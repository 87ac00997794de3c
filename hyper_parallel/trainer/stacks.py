"""Stacks of a process's threads, and the verdict on which rank keeps the others waiting."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary

from hyper_parallel.core.common.errors import explain

__all__ = ["RankReport", "all_stacks", "line_of", "lost_ranks", "report_of", "verdict"]

_LINES = 6  # of a stack in a verdict; the files have all
_ROWS = 16
_PASSED_OVER = ("torch/_ops.py", "torch/utils/_contextlib.py")  # they stand around calls into C++
_COMMUNICATES = ("torch/distributed/", "hyper_parallel/core/")


@dataclass(frozen=True)
class RankReport:
    """What a rank says of itself when a run is stuck.

    Args:
        rank: who.
        step: the step that it is in.
        beats: how often it has told of progress.
        seconds: since then.
        doing: what it was about.
        waits_in: the call in which it waits for other ranks, "" where it does not.
        lines: the innermost calls of its main thread, the last one last.
        failed: the error with which it ends, "" where there is none.
    """

    rank: int
    step: int
    beats: int
    seconds: float
    doing: str
    waits_in: str
    lines: tuple[str, ...]
    failed: str = ""


def all_stacks() -> str:
    """Return the stacks of all threads of this process, the main thread first, innermost calls last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        parts.append(f"thread {names.get(ident, 'unknown')!r}\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)


def report_of(rank: int, step: int, beats: int, seconds: float, doing: str, failed: str = "") -> RankReport:
    """Return the report of the calling process, with what the stacks of its threads say.

    Args:
        rank: this and the following: see `RankReport`.
        step: the step that it is in.
        beats: how often it has told of progress.
        seconds: since then.
        doing: what it was about.
        failed: the error with which it ends.
    """
    stacks = {ident: list(traceback.extract_stack(frame)) for ident, frame in sys._current_frames().items()}
    stacks.pop(threading.get_ident(), None)
    main = stacks.pop(threading.main_thread().ident or 0, [])
    waits_in = _waiting(main)
    if not waits_in and main and main[-1].name == "_engine_run_backward":
        # Backward of an accelerator runs on threads of its own, and their hooks communicate.
        waits_in = next(filter(None, map(_waiting, stacks.values())), "")
    return RankReport(rank, step, beats, seconds, doing, waits_in, tuple(map(_line, main[-_LINES:])), failed)


def _waiting(calls: Sequence[FrameSummary]) -> str:
    """Return the innermost call of a stack if it waits for other ranks, as far as Python shows that, else ""."""
    inner = next((call for call in reversed(calls) if not _is_in(call, _PASSED_OVER)), None)
    if inner is None:
        return ""
    # What waits for a device waits for the collectives that are queued there.
    waits = _is_in(inner, _COMMUNICATES) or inner.name == "synchronize" or ".item()" in (inner.line or "")
    return _line(inner) if waits else ""


def _is_in(call: FrameSummary, places: tuple[str, ...]) -> bool:
    path = Path(call.filename).as_posix()
    return any(f"/{place}" in path for place in places)


def _line(call: FrameSummary) -> str:
    parts = Path(call.filename).parts
    short = Path(*parts[parts.index("site-packages") + 1 :]) if "site-packages" in parts else call.filename
    return f"{short}:{call.lineno} in {call.name}"


# -- who is to blame -------------------------------------------------------------------------------------------------


def verdict(reports: Sequence[RankReport], world_size: int, folder: str | Path) -> str:
    """Say in four parts which ranks the others wait for.

    >>> waits = RankReport(0, 7, 8, 30.0, "", "torch/distributed/distributed_c10d.py:3029 in all_reduce", ())
    >>> hangs = RankReport(1, 7, 8, 30.0, "", "", ("train.py:5 in forward",))
    >>> print(verdict([waits, hangs], 2, "out/stuck"))
    cannot go on in step 7: rank 1 does not come to where the others wait for it
      rank 1, step 7, 30 s, in no communication:
        train.py:5 in forward
      rank 0, step 7, 30 s, waits in torch/distributed/distributed_c10d.py:3029 in all_reduce
      stacks of all threads: out/stuck/rank-*.txt
      try: out/stuck/rank-1.txt shows what it is about; a longer timeout where a step may take this long

    A rank that has failed is to blame first; then, one that does not answer; then, one in no communication, of those
    that are behind if there are any; then, those that are behind.

    Args:
        reports: of the ranks that have answered.
        world_size: of the run.
        folder: where the stacks are.
    """
    answered = {report.rank: report for report in sorted(reports, key=lambda report: report.rank)}
    silent = [rank for rank in range(world_size) if rank not in answered]
    step = min((report.step for report in reports), default=0)
    failed = [rank for rank, report in answered.items() if report.failed]
    asked, blamed = f"cannot go on in step {step}", failed + silent or _blamed(list(answered.values()))
    who = _ranks(blamed)
    one = len(blamed) == 1
    rows = [_row(answered[rank]) for rank in blamed if rank in answered]
    rows += [_row(report) for rank, report in answered.items() if rank not in blamed]
    if lost := lost_ranks(reports, world_size):
        blame = lost
        hint = "look whether the process is alive, and its machine; what a process that is but cannot run has printed"
    elif world_size == 1:
        blame, hint = "it makes no progress", f"{folder}/rank-0.txt; a longer timeout where a step may take this long"
    elif len(blamed) == world_size:
        blame = "all ranks wait, for each other or for a device" if all(map(_waits, reports)) else "no rank goes on"
        hint = (
            "compare what they wait in: hyper-parallel train --sim runs the same ranks, and names what does not match"
        )
    else:
        blame = f"{who} {'does' if one else 'do'} not come to where the others wait for {'it' if one else 'them'}"
        hint = f"{folder}/rank-{blamed[0]}.txt shows what it is about; a longer timeout where a step may take this long"
    more = [f"and {len(rows) - _ROWS} ranks more"] if len(rows) > _ROWS else []
    seen = "\n  ".join([*rows[:_ROWS], *more, f"stacks of all threads: {folder}/rank-*.txt"])
    return explain(asked, blame, seen, hint)


def lost_ranks(reports: Sequence[RankReport], world_size: int) -> str:
    """Say on one line which ranks have failed, and which do not answer; "" if there are none.

    >>> fails = RankReport(1, 7, 8, 0.1, "", "", (), "ValueError: no such file")
    >>> lost_ranks([fails, RankReport(2, 7, 8, 9.0, "", "", ())], 4)
    'rank 1 failed: ValueError: no such file; ranks 0, 3 do not answer'

    Args:
        reports: of the ranks that have answered.
        world_size: of the run.
    """
    failed = sorted((report.rank, report.failed) for report in reports if report.failed)
    found = [f"rank {rank} failed: {text}" for rank, text in failed[:1]]
    found += [f"{_ranks([rank for rank, _ in failed[1:]])} failed, too"] if len(failed) > 1 else []
    silent = sorted(set(range(world_size)) - {report.rank for report in reports})
    found += [f"{_ranks(silent)} {'does' if len(silent) == 1 else 'do'} not answer"] if silent else []
    return "; ".join(found)


def _blamed(reports: list[RankReport]) -> list[int]:
    """Return the ranks that the others wait for, all of them where nothing tells them apart."""
    least = min(report.beats for report in reports)
    behind = [report for report in reports if report.beats == least]
    busy = [report for report in behind if not _waits(report)] or [report for report in reports if not _waits(report)]
    return [report.rank for report in busy or behind]


def _waits(report: RankReport) -> bool:
    return bool(report.waits_in)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_ROWS])) + (", ..." if len(ranks) > _ROWS else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _row(report: RankReport) -> str:
    head = line_of(report)
    if report.waits_in or report.failed:
        return head
    return "\n    ".join([f"{head}:", *report.lines])


def line_of(report: RankReport) -> str:
    """Say on one line where a rank is.

    >>> line_of(RankReport(3, 7, 8, 30.0, "training", "", ("train.py:5 in forward",)))
    'rank 3, step 7 (training), 30 s, in no communication'

    Args:
        report: of the rank.
    """
    about = f" ({report.doing})" if report.doing else ""
    head = f"rank {report.rank}, step {report.step}{about}, {report.seconds:.0f} s"
    if report.failed:
        return f"{head}, failed: {report.failed}"
    return f"{head}, waits in {report.waits_in}" if report.waits_in else f"{head}, in no communication"
