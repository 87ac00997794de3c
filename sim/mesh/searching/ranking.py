"""Ranking of candidates, what limits the best, and the report of both."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hyper_parallel.core.common.tables import View, as_html, as_text, plain_table
from sim.mesh.report import estimate_dict, gib, interval, per_second, percent, seconds
from sim.mesh.searching.space import Candidate, Rejected

# Searches as tables, and how far they are -----------------------------------------------------------------------------


def search_view(result: Any, most: int = 10) -> View:
    """Return the tables of a search, to be printed by rich."""
    views: list[RenderableType] = [Text(f"{result.title}; {gib(result.limit_bytes)} on a device"), Text()]
    views += [Text("Fastest first", style="bold"), _ranking(result, most)]
    if len(result.found) > most:
        views.append(Text(f"... and {len(result.found) - most} more that fit"))
    views += [Text(), Text("Neither in memory nor in time beaten by another one", style="bold"), _front(result)]
    views += [Text(), Text("Not in the ranking", style="bold"), _reasons(result)]
    views += [Text(), Text(result.looked_at), Text(limit_of(result).text)]
    if not result.complete:
        views.append(Text("the search was interrupted: this is the best so far"))
    return View(*views)


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
            percent(time.mfu.value),
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
        examples["does not fit"] = f"{closest.candidate}: {closest.excess(result.limit_bytes)}"
    for reason, count in result.reasons.items():
        table.add_row(f"{count:,}", reason, examples[reason])
    if result.slower:
        table.add_row(f"{len(result.slower):,}", "slower than the best", f"{result.slower[0]}: by a bound")
    if result.left_out:
        table.add_row(f"{len(result.left_out):,}", "less promising", f"{result.left_out[0]}: not estimated")
    return table


def search_dict(result: Any) -> dict[str, Any]:
    """Return a search as data for JSON."""

    def one(entry: Any) -> dict[str, Any]:
        return {**estimate_dict(entry.estimate), "how": entry.candidate.how, "chance_faster": entry.chance}

    return {
        "title": result.title,
        "limit_bytes": result.limit_bytes,
        "complete": result.complete,
        "found": [one(entry) for entry in result.found],
        "too_large": [one(entry) for entry in result.too_large],
        "rejected": [{"what": entry.what, "reason": entry.reason, "detail": entry.detail} for entry in result.rejected],
        "slower": [str(candidate) for candidate in result.slower],
        "left_out": [str(candidate) for candidate in result.left_out],
        "gain_at_most": result.gain,
        "limited_by": limit_of(result)._asdict(),
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


# Results of a search: the ranking, the front of memory and time, and the confidence in the order ----------------------

_NINETY_PERCENT = 1.2815515655446004  # standard deviations: 80 % of a normal distribution lie within
_OWN_ERROR = 0.02  # assumed: relative error of a step that two candidates on the same hardware do not share


@dataclass(frozen=True)
class Found:
    """A candidate that fits.

    Attributes:
        candidate: the degrees and the recipe.
        estimate: of its memory and time.
        chance: probability that it is really faster than the next one in the ranking; None for the last.
    """

    candidate: Candidate
    estimate: Any
    chance: float | None = None

    @property
    def seconds(self) -> float:
        """Of a step."""
        return float(self.estimate.time.step.value)

    @property
    def bytes(self) -> float:
        """Of memory, on the fullest rank."""
        return float(self.estimate.memory.reserved)

    def excess(self, limit_bytes: float) -> str:
        """Return what it needs and why that does not fit, in words."""
        memory = self.estimate.memory
        on_host = max(one.host_bytes for one in memory.classes)
        if self.bytes > limit_bytes:
            return f"{gib(self.bytes)}, {gib(self.bytes - limit_bytes)} too much"
        if memory.host_limit is not None and on_host > memory.host_limit:
            return f"{gib(on_host)} on the host, where a device's share is {gib(memory.host_limit)}"
        return f"{gib(self.bytes)} beside what torch does not count"

    @property
    def tokens_per_second(self) -> float:
        """Of each device."""
        return float(self.estimate.time.tokens_per_second_per_device.value)


@dataclass(frozen=True)
class SearchResult:
    """The ranking, and what is not in it.

    Attributes:
        found: what fits, the fastest first.
        too_large: what was estimated and does not fit, the smallest first.
        rejected: what was not estimated because it cannot work or cannot fit, with the reason.
        left_out: what could have been estimated, and was not: the most promising first.
        limit_bytes: of memory.
        complete: False where the search was interrupted.
        title: what was searched.
        slower: what was looked at and cannot be faster than the best, by a bound: it was not estimated.
        gain: part of the best step that the fastest of those left out could save at most; 0: none is left out. None:
            nobody knows.
    """

    found: tuple[Found, ...]
    too_large: tuple[Found, ...]
    rejected: tuple[Rejected, ...]
    left_out: tuple[Candidate, ...]
    limit_bytes: float
    complete: bool
    title: str
    slower: tuple[Candidate, ...] = ()
    gain: float | None = 0.0

    @property
    def best(self) -> Found:
        """The fastest that fits."""
        return self.found[0]

    @property
    def looked_at(self) -> str:
        """How many candidates were estimated, how many were bounded, and what those left out could save."""
        estimated, bounded = len(self.found) + len(self.too_large), len(self.slower)
        bounded += sum(entry.candidate is not None and "cannot fit" in entry.reason for entry in self.rejected)
        text = f"looked at {estimated + bounded:,} candidates: {estimated:,} estimated, {bounded:,} bounded"
        if not self.left_out:
            return f"{text}, of which none can be faster than the best and fit"
        text += f"; {len(self.left_out):,} left out"
        if self.gain is None:
            return text
        return f"{text}, of which the best could be at most {percent(self.gain)} faster than the best found"

    @property
    def pareto(self) -> tuple[Found, ...]:
        """What is beaten by no other one in both memory and time, the smallest first."""
        front: list[Found] = []
        for entry in sorted((*self.found, *self.too_large), key=lambda one: (one.bytes, one.seconds)):
            if not front or entry.seconds < front[-1].seconds:
                front.append(entry)
        return tuple(front)

    @property
    def reasons(self) -> dict[str, int]:
        """How many were rejected for which reason, the most frequent first."""
        counts = Counter(entry.reason for entry in self.rejected)
        counts.update({"does not fit": len(self.too_large)} if self.too_large else {})
        return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))

    def __str__(self) -> str:
        return as_text(search_view(self), width=170)

    def __repr__(self) -> str:
        best = f", best: {self.best.candidate}, {seconds(self.best.seconds)} a step" if self.found else ""
        return f"SearchResult({self.title}: {len(self.found)} fit{best})"

    def _repr_html_(self) -> str:
        return as_html(search_view(self))


def chance_faster(first: Any, second: Any) -> float:
    """Return the probability that a step of the first estimate is really shorter than one of the second.

    What makes one estimate wrong mostly makes the other one wrong, too: matrix products that are slower than thought
    slow down both. So each term (compute, the communication of an axis, the bubble ...) counts by how much of it the
    two do not share; what is left is taken as independent.
    """
    ours, theirs = _terms(first.time), _terms(second.time)
    variance = 0.0
    for name in sorted({*ours, *theirs}):
        (value, spread), (other, other_spread) = ours.get(name, (0.0, 0.0)), theirs.get(name, (0.0, 0.0))
        variance += ((value - other) * max(spread, other_spread)) ** 2
    steps = float(first.time.step.value), float(second.time.step.value)
    variance += sum((_OWN_ERROR * step) ** 2 for step in steps)
    return 0.5 * (1 + math.erf((steps[1] - steps[0]) / math.sqrt(2 * variance)))


def _terms(time: Any) -> dict[str, tuple[float, float]]:
    """Value and relative standard deviation of what a step consists of."""
    named = {name: getattr(time, name) for name in ("compute", "bubble", "host")}
    named.update({f"exposed {axis}": quantity for axis, quantity in time.exposed.items()})
    return {
        name: (q.value, (q.high - q.low) / 2 / _NINETY_PERCENT / q.value) for name, q in named.items() if q.value > 0
    }


# Limits of the best: kernels, exposed communication, the bubble of the pipeline, or memory ----------------------------

_WORTH_A_WORD = 0.005  # of a step


class Limit(NamedTuple):
    """The largest loss of a step, and whether more memory would help.

    Attributes:
        by: `kernels`, `communication on AXIS`, `bubble`, `host` or `memory`.
        shares: of the step, by the same names; of memory, what the fastest that does not fit would save.
        text: one sentence.
    """

    by: str
    shares: dict[str, float]
    text: str


def limit_of(result: Any) -> Limit:
    """Return what limits the best of a search.

    Kernels lose what they are slower than the peak of the device, by the FLOPs of the model. What a step waits for is
    lost as a whole. Memory is the limit if what does not fit saves more than any of these loses.
    """
    best = result.best
    time, step = best.estimate.time, best.seconds
    shares = {f"communication on {axis}": quantity.value / step for axis, quantity in time.exposed.items()}
    shares["bubble"] = time.bubble.value / step
    shares["host"] = time.host.value / step
    shares["kernels"] = max(0.0, time.compute.value / step - time.mfu.value)
    faster = min(result.too_large, key=lambda one: one.seconds, default=None)
    saved = 0.0 if faster is None else 1 - faster.seconds / step
    if faster is not None and saved > 0:
        shares["memory"] = saved
    shares = dict(sorted(shares.items(), key=lambda item: -item[1]))
    by = next(iter(shares))
    losses = [
        f"{name} {percent(share)}" for name, share in shares.items() if share >= _WORTH_A_WORD and name != "memory"
    ]
    limited_by = {
        "kernels": "kernels, which reach less than the peak of the device",
        "bubble": "the bubble of its pipeline",
        "host": "the host, which issues operations too late",
        "memory": "memory",
    }.get(by, f"exposed {by}")
    text = f"The best is limited by {limited_by}; of its step is lost: {', '.join(losses) or 'nothing'}."
    if faster is not None and saved >= _WORTH_A_WORD:
        beside = max(one.context_bytes for one in faster.estimate.memory.classes)
        over = gib(faster.bytes + beside - result.limit_bytes)
        text += f" With {over} more memory, {faster.candidate} would be {percent(saved)} faster."
    return Limit(by, shares, text)
