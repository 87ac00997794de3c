"""Searches as tables, and how far they are."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from sim.mesh.report import as_text, estimate_dict, gib, interval, number, per_second, percent, plain_table, seconds

__all__ = ["SearchBar", "search_dict", "search_text", "search_view"]


def search_text(result: Any, most: int = 10) -> str:
    """Return the tables of a search as text.

    Args:
        result: what `sim.mesh.search` has returned.
        most: rows of the ranking.
    """
    return as_text(search_view(result, most), width=170)


def search_view(result: Any, most: int = 10) -> Group:
    """Return the tables of a search, to be printed by rich.

    Args:
        result: what `sim.mesh.search` has returned.
        most: rows of the ranking.
    """
    views: list[RenderableType] = [Text(f"{result.title}; {gib(result.limit_bytes)} on a device"), Text()]
    views += [Text("Fastest first", style="bold"), _ranking(result, most)]
    if len(result.found) > most:
        views.append(Text(f"... and {len(result.found) - most} more that fit"))
    views += [Text(), Text("Neither in memory nor in time beaten by another one", style="bold"), _front(result)]
    views += [Text(), Text("Not in the ranking", style="bold"), _reasons(result)]
    if not result.complete:
        views.append(Text("the search was interrupted: this is the best so far"))
    return Group(*views)


def _ranking(result: Any, most: int) -> Table:
    table = plain_table(
        "", "degrees", "recipe", "tokens/s/device", "80 % interval", "step", "MFU", "reserved", "really faster", left=3
    )
    for at, one in enumerate(result.found[:most], start=1):
        rate, time = one.estimate.time.tokens_per_second_per_device, one.estimate.time
        table.add_row(
            str(at),
            one.candidate.degrees,
            one.candidate.how,
            per_second(rate.value),
            interval(rate, per_second),
            seconds(time.step.value),
            percent(number(time.mfu)),
            gib(one.bytes),
            "" if one.chance is None else percent(one.chance),
        )
    return table


def _front(result: Any) -> Table:
    table = _table_of_words(2, "reserved", "step", "degrees", "recipe", "")
    inside = {id(one.estimate) for one in result.found}
    for one in result.pareto:
        note = "" if id(one.estimate) in inside else "does not fit"
        table.add_row(gib(one.bytes), seconds(one.seconds), one.candidate.degrees, one.candidate.how, note)
    return table


def _reasons(result: Any) -> Table:
    table = _table_of_words(1, "", "reason", "for example")
    examples = {entry.reason: f"{entry.what}: {entry.detail}" for entry in reversed(result.rejected)}
    if result.too_large:
        closest = result.too_large[0]
        over = gib(closest.bytes - result.limit_bytes)
        examples["does not fit"] = f"{closest.candidate}: {gib(closest.bytes)}, {over} too much"
        if closest.bytes <= result.limit_bytes:
            examples["does not fit"] = f"{closest.candidate}: {gib(closest.bytes)} beside what torch does not count"
    for reason, count in result.reasons.items():
        table.add_row(f"{count:,}", reason, examples[reason])
    if result.left_out:
        table.add_row(f"{len(result.left_out):,}", "less promising", f"{result.left_out[0]}: not estimated")
    return table


def search_dict(result: Any) -> dict[str, Any]:
    """Return a search as data for JSON.

    Args:
        result: what `sim.mesh.search` has returned.
    """

    def one(entry: Any) -> dict[str, Any]:
        return {**estimate_dict(entry.estimate), "how": entry.candidate.how, "chance_faster": entry.chance}

    return {
        "title": result.title,
        "limit_bytes": result.limit_bytes,
        "complete": result.complete,
        "found": [one(entry) for entry in result.found],
        "too_large": [one(entry) for entry in result.too_large],
        "rejected": [{"what": entry.what, "reason": entry.reason, "detail": entry.detail} for entry in result.rejected],
        "left_out": [str(candidate) for candidate in result.left_out],
    }


class SearchBar:
    """A context that shows how far a search is; pass its `on_estimate` as `progress`.

    In a terminal it is a bar; elsewhere a line for every tenth part.

    Args:
        console: where to draw.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._told = -1
        self._bar = Progress(
            TextColumn("estimates"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)

    def on_estimate(self, done: int, total: int, now: str) -> None:
        """Show one more estimate."""
        if self.console.is_terminal:
            self._bar.update(self._task, completed=done, total=total, description=now)
        elif done * 10 // max(total, 1) > self._told:
            self._told = done * 10 // max(total, 1)
            self.console.print(f"estimates: {done} of {total}")

    def __enter__(self) -> SearchBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def _table_of_words(numbers: int, *columns: str) -> Table:
    """A table of a few columns of numbers, and of words that may take several lines in the last one."""
    table = plain_table(*columns, left=0)
    for column in table.columns[numbers:]:
        column.justify = "left"
    table.columns[-1].no_wrap = False
    return table
