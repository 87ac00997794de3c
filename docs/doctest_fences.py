"""Doctests of docstrings as fenced code, for the reference pages of the site.

A docstring shows its examples as `>>> ...` between paragraphs, which Markdown would read as quotes in quotes.
"""

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^( *)(?:>>>|\.\.\.)(?: |$)")
_ROLE = re.compile(r":(?:meth|class|func|attr|mod|data):`~?([^`]+)`")


def fenced(text: str) -> str:
    """Return a docstring with each run of doctest lines, and their output, in a fence of its own."""
    lines: list[str] = []
    margin: str | None = None  # of the fence that is open
    for line in text.splitlines():
        example = _EXAMPLE.match(line)
        if example and margin is None:
            margin = example[1]
            lines.append(f"{margin}```pycon")
        elif margin is not None and not line.strip():
            lines.append(f"{margin}```")
            margin = None
        lines.append(line)
    if margin is not None:
        lines.append(f"{margin}```")
    return "\n".join(lines)


class DoctestFences(Extension):
    """Rewrites every docstring that is collected."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Fence the examples of one object."""
        if obj.docstring:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = fenced(re.sub(r"::$", ":", re.sub(r"^ *::$", "", text, flags=re.M), flags=re.M))
