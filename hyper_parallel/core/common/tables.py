"""Tables for people: coloured in a terminal, HTML in a notebook, plain text as a str."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from html import escape
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table

_WIDTH, _NO_LIMIT = 120, 100_000  # columns
_CELL = "padding: 1px 10px 1px 0; text-align: "


class View(Group):
    """Lines and tables, one below the other: `rich.print` shows their colours, `print` plain text, a notebook HTML."""

    def __str__(self) -> str:
        return as_text(self, _console(file=io.StringIO(), width=_NO_LIMIT).measure(self).maximum)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(self)


def plain_table(*columns: str, left: int = 1) -> Table:
    """Return a table without lines; the columns after the first `left` are of numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at < left else "right", no_wrap=True)
    return table


def as_text(view: RenderableType, width: int = _WIDTH) -> str:
    """Return what rich would print, without colours, and without spaces at the ends of lines."""
    out = io.StringIO()
    _console(file=out, width=width, color_system=None).print(view)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def as_html(view: Any) -> str:
    """Return lines and tables as HTML that needs no style sheet.

    >>> as_html("4 < 5")
    '<div style="white-space: pre">4 &lt; 5</div>'

    Args:
        view: a rich `Text`, `Table`, or `Group` of these; a str is a text without markup.
    """
    if isinstance(view, Group):
        return "\n".join(map(as_html, view.renderables))
    if isinstance(view, Table):
        return _table_html(view)
    return f'<div style="white-space: pre">{_inline(view)}</div>'


def display(view: View) -> None:
    """Show a view where the caller is: as HTML in a notebook, with colours in a terminal, plain in a file.

    A table that is wider than the terminal is printed whole, and the terminal breaks its lines.
    """
    python = sys.modules.get("IPython")
    shell = python.get_ipython() if python is not None else None
    if python is not None and hasattr(shell, "kernel"):
        python.display.display(view)
        return
    console = _console(file=sys.stdout)
    needed = _console(file=io.StringIO(), width=_NO_LIMIT).measure(view).maximum
    console.width = max(console.width, needed)
    with console.capture() as captured:
        console.print(view)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def fold(count: int, most: int, keep: int | None = None) -> Iterator[int | None]:
    """Yield which of `count` rows to show: all, or the first ones and the last one; None where rows are left out.

    >>> list(fold(3, 4)), list(fold(100, 4)), list(fold(100, 4, keep=50))
    ([0, 1, 2], [0, 1, 2, None, 99], [0, 1, 2, None, 50, None, 99])

    Args:
        count: rows there are.
        most: rows to show.
        keep: a row to show in any case.
    """
    shown = sorted(
        {*range(min(count, most if count <= most else most - 1)), count - 1, *([] if keep is None else [keep])}
    )
    before = -1
    for row in shown if count else []:
        if row > before + 1:
            yield None
        yield row
        before = row


def _console(**options: Any) -> Console:
    return Console(highlight=False, markup=False, emoji=False, force_jupyter=False, **options)


def _table_html(table: Table) -> str:
    justify = [column.justify if column.justify in ("right", "center") else "left" for column in table.columns]
    columns = [list(column.cells) for column in table.columns]
    lines = ['<table style="border-collapse: collapse">']
    if table.show_header:
        heads = [
            f'<th style="{_CELL}{side}">{_inline(column.header)}</th>'
            for column, side in zip(table.columns, justify, strict=True)
        ]
        lines.append(f"<tr>{''.join(heads)}</tr>")
    for at, row in enumerate(table.rows):
        cells = [
            f'<td style="{_CELL}{side}">{_inline(column[at])}</td>'
            for column, side in zip(columns, justify, strict=True)
        ]
        css = _css(row.style)
        lines.append(f"<tr{f' style={css!r}' if css else ''}>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</table>"])


def _inline(text: Any) -> str:
    """Return a text with its styles; a str has none."""
    if isinstance(text, str):
        return escape(text)
    parts = ((part, _css(style)) for part, style, _ in text.render(_console(file=io.StringIO())))
    inner = "".join(f'<span style="{css}">{escape(part)}</span>' if css else escape(part) for part, css in parts)
    css = _css(text.style)
    return f'<span style="{css}">{inner}</span>' if css else inner


def _css(style: str | Style | None) -> str:
    if not style:
        return ""
    found = Style.parse(style) if isinstance(style, str) else style
    return found.get_html_style()
