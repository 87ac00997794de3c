"""The report of a proof, tensor by tensor, with the first place where a parallel model errs."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from rich.text import Text

from hyper_parallel.core.common.checks import read_int
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.common.tables import View, as_html, fold, plain_table

_WIDTH = 120
_HEAD = ("tensor", "kind", "declared", "found", "error", "bound", "verdict")
_INPUT = re.compile("put (?!of step|in step|with random)")  # "input x"
_WRONG, _MOST_SHOWN = ("bug", "not proved"), 20
_LIMITS = (56, 9, 30, 30, 8, 8, 10)  # how wide a column may get, in letters

Verdict: TypeAlias = str


@dataclass(frozen=True)
class ReportRow:
    """One tensor that was compared.

    Args:
        module: path of the module, or of the one that holds the parameter; "" is the model.
        tensor: "input x", "output", or the name of a parameter or buffer.
        kind: "parameter", "buffer" (as they were made; "size after forward" is a buffer after the first forward,
            "size after step 1" after a step), "forward", "random", "gradient" or "update".
        declared: the layout that it should have; "" where nobody said.
        found: the layout that explains what the ranks hold; "" where none does.
        error: worst |difference| from the full tensor on one device, in that layout.
        bound: what rounding can make of it.
        ratio: error / bound at the worst element; rounding explains the difference up to 1.
        verdict: "exact", "rounding", "pending" (parts of a sum that was taken later), "private" (no layout explains
            it, and what was computed from it is right; a parameter in an order of its own; a buffer that is a rank's
            own), "skipped" (some ranks did not compute it), "not proved" (within a bound so wide that a fault could
            hide below it, or there was nothing to compare) or "bug".
        sentence: what is the matter, in words.
        suggestion: what would be true or right.
    """

    module: str
    tensor: str
    kind: str
    declared: str = ""
    found: str = ""
    error: float = 0.0
    bound: float = 0.0
    ratio: float = 0.0
    verdict: Verdict = "exact"
    sentence: str = ""
    suggestion: str = ""

    @property
    def place(self) -> str:
        """The tensor with its module, for messages.

        >>> ReportRow("mlp", "input x", "forward").place, ReportRow("mlp", "output in step 2", "forward").place
        ('mlp.input.x', 'mlp.output in step 2')
        """
        prefix = "the gradient of " if self.kind == "gradient" else ""
        joint = "." if self.module else "the model's " if self.kind in ("forward", "gradient") else ""
        return f"{prefix}{self.module}{joint}{_INPUT.sub('put.', self.tensor)}"

    def __str__(self) -> str:
        about = self.place if self.kind == "gradient" else f"{self.kind}: {self.place}"
        layouts = [f"declared: {self.declared}" if self.declared else "", f"found: {self.found}" if self.found else ""]
        numbers = f"error: {self.error:.2e}   bound: {self.bound:.2e}   ratio: {self.ratio:.2g}"
        lines = [f"{about}: {self.sentence}" if self.sentence else about]
        lines.append("  " + "   ".join(part for part in [*layouts, numbers] if part))
        lines += [f"  try: {self.suggestion}"] if self.suggestion else []
        return "\n".join(_wrapped(line, _WIDTH - 2) for line in lines)


@dataclass(frozen=True)
class MutantRow:
    """A fault that was put into the program.

    Args:
        kind: "missing reduction", "twice", "wrong scale", "wrong part", "wrong order" or "one rank".
        place: the operation, with its axis and line; or the parameter.
        outcome: "found", "missed", or "none" where it changes nothing, such as a sum of zeros that is missing.
        said: what the report said first.
    """

    kind: str
    place: str
    outcome: str
    said: str = ""


@dataclass(frozen=True)
class Sensitivity:
    """Which faults of a list, put into this very program, its proof finds.

    Args:
        rows: one per fault.
        possible: how many there are, of which `rows` may be some.
    """

    rows: tuple[MutantRow, ...]
    possible: int

    @property
    def missed(self) -> tuple[MutantRow, ...]:
        """The faults that change something and are not found."""
        return tuple(row for row in self.rows if row.outcome == "missed")

    def __str__(self) -> str:
        counts: dict[str, Counter[str]] = {}
        for row in self.rows:
            counts.setdefault(row.kind, Counter())[row.outcome] += 1
        lines = [f"{len(self.rows)} of {self.possible} faults were put in", f"{'fault':20} found  missed  no effect"]
        lines += [f"{kind:20} {n['found']:5}  {n['missed']:6}  {n['none']:9}" for kind, n in counts.items()]
        lines += [f"missed: {row.kind}, {row.place}" for row in self.missed]
        return "\n".join(_wrapped(line, _WIDTH) for line in lines)

    def __repr__(self) -> str:
        return f"Sensitivity({len(self.rows)} of {self.possible} faults put in, {len(self.missed)} missed)"

    def _repr_html_(self) -> str:
        table = plain_table("fault", "place", "outcome", "said", left=4)
        for row in self.rows:
            table.add_row(row.kind, row.place, row.outcome, row.said, style="red" if row.outcome == "missed" else "")
        return as_html(View(Text(repr(self), style="bold"), table))


@dataclass(frozen=True)
class Report:
    """The outcome of `sim.verify_plan`; printing it shows the first divergence and what surrounds it.

    Args:
        rows: every tensor that was compared, in the order in which things happen.
        mesh: the axes, such as "dp=2, tp=4".
        notes: what was not compared, and why.
        mutants: proves again with faults put in, as many at most; see `sensitivity`.
    """

    rows: tuple[ReportRow, ...]
    mesh: str
    notes: tuple[str, ...] = ()
    mutants: Callable[[int], Sensitivity] | None = field(default=None, compare=False, repr=False)

    @property
    def ok(self) -> bool:
        """Whether the ranks compute what one device computes, and that is proved of every tensor compared."""
        return self.first is None

    @property
    def first(self) -> ReportRow | None:
        """The row to look at first: the first that is wrong, else the first that is not proved; None if `ok`."""
        return self.bug or next(iter(self.not_proved), None)

    @property
    def bug(self) -> ReportRow | None:
        """The first row that is wrong; None if none is, though some may be not proved."""
        return next((row for row in self.rows if row.verdict == "bug"), None)

    @property
    def not_proved(self) -> tuple[ReportRow, ...]:
        """The tensors whose bounds are too wide to prove anything."""
        return tuple(row for row in self.rows if row.verdict == "not proved")

    def table(self, verbose: bool = False) -> str:
        """Return the report as text, at most 120 letters wide.

        Args:
            verbose: one line for every tensor; else those that are right are only counted.
        """
        lines = [self._headline()]
        if self.first is not None:
            lines += ["", textwrap.indent(str(self.first), "  "), ""]
        shown = [row for row in self.rows if verbose or row.verdict in _WRONG]
        if not verbose:
            shown = shown[:_MOST_SHOWN]
        if shown:
            lines += _table(shown)
            left = sum(row.verdict in _WRONG for row in self.rows) - len(shown)
            if not verbose and left > 0:
                lines.append(f"... and {left} more that are wrong" + (" or not proved" if self.not_proved else ""))
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(_wrapped(line, _WIDTH) for text in lines for line in text.split("\n"))

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"Report({self._headline()})"

    def _repr_html_(self) -> str:
        wrong = [row for row in self.rows if row.verdict in _WRONG]
        table = plain_table(*_HEAD, left=4)
        for at in fold(len(self.rows), _MOST_SHOWN) if not wrong else range(len(wrong[:_MOST_SHOWN])):
            row = None if at is None else (wrong or self.rows)[at]
            cells = ("...",) if row is None else _cells(row)
            table.add_row(*cells, style="red" if row in wrong else "")
        first = [] if self.first is None else [Text(str(self.first), style="red")]
        more = [Text(f"... and {len(wrong) - _MOST_SHOWN} more")] if len(wrong) > _MOST_SHOWN else []
        notes = [Text(f"note: {note}") for note in self.notes]
        return as_html(View(Text(self._headline(), style="bold"), *first, table, *more, *notes))

    def raise_if_bug(self) -> Report:
        """Return the report, if all is well.

        Raises:
            AssertionError: it is not, or not proved; the message is the report.
        """
        if not self.ok:
            raise AssertionError(self.table())
        return self

    def sensitivity(self, most: int = 60) -> Sensitivity:
        """Put faults into this very program, prove it again with each, and return which are found.

        Each line that communicates has a reduction that is missing, taken twice or scaled, a part or an order that is
        another rank's, and one rank alone that does so; a few parameters and gradients are wrong, too.

        Args:
            most: how many faults, evenly chosen from all.

        Raises:
            ValueError: something is wrong already, or the report is of no program that can be run again.
        """
        asked = "cannot say how sensitive the proof is"
        read_int(asked, "most", most, 1)
        if self.bug is not None or self.mutants is None:
            blame = "the program is wrong already" if self.bug is not None else "this report is of one run"
            raise InvalidValue(asked, blame, self._headline(), "a report of verify_plan or verify_step that is ok")
        return self.mutants(most)

    def _headline(self) -> str:
        verdicts = Counter(row.verdict for row in self.rows)
        counts = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.most_common())
        worst = max((row.ratio for row in self.rows if row.verdict == "rounding"), default=0.0)
        if self.ok:
            said = f"{counts} of {len(self.rows)} tensors"
            said += f"; the worst rounding is {worst:.2g} of its bound" if worst else ""
            return f"the model on {self.mesh} computes what it computes on one device: {said}"
        if self.bug is None:
            return f"it is not proved that the model on {self.mesh} computes what it computes on one device ({counts})"
        return f"the model on {self.mesh} does not compute what it computes on one device ({counts})"


def _wrapped(line: str, width: int) -> str:
    """Break a line that is too long; what follows is indented.

    >>> print(_wrapped("one two three", 9))
    one two
        three
    """
    if len(line) <= width:
        return line
    indent = line[: len(line) - len(line.lstrip())] + "    "
    return "\n".join(textwrap.wrap(line, width, subsequent_indent=indent))


def _table(rows: list[ReportRow]) -> list[str]:
    cells = [_HEAD, *(_cells(row) for row in rows)]
    widths = [min(limit, max(len(row[at]) for row in cells)) for at, limit in enumerate(_LIMITS)]
    while sum(widths) + 2 * (len(widths) - 1) > _WIDTH:
        widest = max((0, 2, 3), key=lambda at: widths[at])
        widths[widest] -= 1
    lines = ("  ".join(_cut(cell, size).ljust(size) for cell, size in zip(row, widths, strict=True)) for row in cells)
    return [line.rstrip() for line in lines]


def _cells(row: ReportRow) -> tuple[str, ...]:
    where = f"{row.module}.{row.tensor}" if row.module else row.tensor
    layouts = (text.replace(" pending ", " ") for text in (row.declared, row.found))
    return (where, row.kind, *layouts, f"{row.error:.1e}", f"{row.bound:.1e}", row.verdict)


def _cut(text: str, width: int) -> str:
    """Shorten a text, of which the end says most.

    >>> _cut("layers.0.attention.wq", 12)
    '...ention.wq'
    """
    return text if len(text) <= width else f"...{text[len(text) - width + 3 :]}"
