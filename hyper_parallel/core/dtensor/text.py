"""Meshes, layouts and shapes as typed on a command line; errors point at the place of the mistake."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from hyper_parallel.core.common.errors import InvalidValue, nearest
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.spelling import REDUCTIONS

NOT_SPLIT = ("None", "-")
"""How the entry of a dim that is not split is spelled."""

_RESERVED = re.compile(r"[\s,;+>()=]")  # separators, which axis names cannot contain
_BRACKETS = "brackets in pairs, or none"
_NUMBER = re.compile(r"[0-9]+(_[0-9]+)*")

Span = tuple[int, int]
"""Where a piece of the text starts and stops."""


def parse_mesh(text: str) -> Layout:
    """Read a mesh as a `Layout` without an assignment, on ranks 0, 1, 2, ...

    >>> parse_mesh("dp=2,tp=4")
    Layout((2, 4), ('dp', 'tp'))

    Args:
        text: names and sizes of the axes, the last one fastest.

    Raises:
        ValueError: no axes, an axis without name or size, a name given twice, a size below 1.
    """
    source = _Spelling(text, "cannot read a mesh", "form: dp=2,tp=4")
    sizes: dict[str, int] = {}
    for span in source.pieces((0, len(text)), ","):
        name_at, size_at = source.assignment(span, default="2")
        name = source.at(name_at)
        if name in NOT_SPLIT or name in sizes or _RESERVED.search(name):
            blame = f"axis name {name!r} is given twice" if name in sizes else f"{name!r} cannot be an axis name"
            free = next(other for other in ("dp", "tp", "cp", "pp") if other not in sizes)
            raise source.mistake(name_at, blame, f"another name, such as {free!r}")
        sizes[name] = source.number(size_at, least=1, hint=f"{name}=2")
    return Layout(tuple(sizes.values()), tuple(sizes))


def parse_shape(text: str) -> tuple[int, ...]:
    """Read the sizes of a tensor, in elements.

    >>> parse_shape("4096,1024"), parse_shape("4_096x1024"), parse_shape("(5,)"), parse_shape("")
    ((4096, 1024), (4096, 1024), (5,), ())

    Args:
        text: sizes with "," or "x" between them, also in brackets; empty for a scalar.

    Raises:
        ValueError: a size that is missing, negative or no whole number.
    """
    source = _Spelling(text, "cannot read a shape", "form: 4096,1024 or 4096x1024")
    start, stop = source.trim((0, len(text)))
    if text[start:stop][:1] + text[start:stop][-1:] in ("()", "[]"):
        start, stop = source.trim((start + 1, stop - 1))
        stop -= text[start:stop].endswith(",")  # as in Python's tuple of one
    if start == stop:
        return ()
    spans = source.pieces((start, stop), ",xX")
    return tuple(source.number(span, least=0, hint="sizes such as 4096,1024") for span in spans)


def parse_dtype(text: str) -> torch.dtype:
    """Read a dtype by torch's name or by its short name, e.g. "bf16".

    >>> parse_dtype("float32"), parse_dtype("torch.bfloat16"), parse_dtype("fp16")
    (torch.float32, torch.bfloat16, torch.float16)

    Args:
        text: the name, with or without "torch.".

    Raises:
        ValueError: an unknown name.
    """
    source = _Spelling(text, "cannot read a dtype", "form: float32 or bf16")
    span = source.trim((0, len(text)))
    name = re.sub(r"^(bf|fp)(16|32|64)$", _long_name, source.at(span).removeprefix("torch."))
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        known = [word for word, value in vars(torch).items() if isinstance(value, torch.dtype) and word in str(value)]
        raise source.mistake(span, f"no dtype is called {source.at(span)!r}", nearest(name, known))
    return found


def parse_layout(mesh: Layout, text: str) -> Layout:
    """Read a layout on a mesh.

    >>> mesh = parse_mesh("dp=2,tp=4")
    >>> parse_layout(mesh, "dp,None") == mesh("dp", "None")
    True
    >>> parse_layout(mesh, "-,tp+dp")  # several axes on one dim, outer first; or (tp,dp)
    Layout((2, 4), ('dp', 'tp'))('None', ('tp', 'dp'))
    >>> parse_layout(mesh, "dp,None; tp=sum")  # reductions still to be taken come after a semicolon
    Layout((2, 4), ('dp', 'tp'))('dp', 'None', partial={'tp': 'sum'})
    >>> parse_layout(mesh, "")  # everything replicated
    Layout((2, 4), ('dp', 'tp'))()

    Args:
        mesh: a `Layout`; its assignment, if any, is ignored.
        text: one entry per dim.

    Raises:
        ValueError: an axis that does not exist or is used twice, an empty entry, brackets that do not match, a
            reduction that does not exist.
    """
    axes = ", ".join(f"{name}={size}" for name, size in zip(mesh.alias_name, mesh.mesh_shape, strict=True))
    source = _Spelling(text, "cannot read a layout", f"mesh: {axes}")
    parts = source.pieces((0, len(text)), ";")
    if len(parts) > 2:
        raise source.mistake((parts[2][0] - 1, parts[2][0]), "a second semicolon", '"," between reductions')
    reader = _Reader(source, mesh.alias_name, {})
    spans = source.pieces(parts[0], ",") if source.at(parts[0]) else []
    entries = [reader.entry(span, dim) for dim, span in enumerate(spans)]
    partial = dict(reader.reduction(span) for span in source.pieces(parts[1], ",")) if len(parts) == 2 else {}
    return mesh(*entries, partial=partial)


def write_layout(layout: Layout) -> str:
    """Write a layout so that `parse_layout` reads it back.

    >>> mesh = Layout((2, 4, 2), ("dp", "tp", "cp"))
    >>> write_layout(mesh(("tp", "dp"), "None", partial={"cp": "sum"}))
    'tp+dp,None; cp=sum'

    Args:
        layout: a layout in alias form, on axes whose names hold no blanks and none of ",;+>()=".

    Raises:
        ValueError: a layout in placement form or without an assignment.
    """
    entries = layout.alias_placements
    if entries is None:
        hint = "layout.placement_to_tensor_map(tensor.ndim)"
        raise InvalidValue("cannot write a layout", "it has no alias form", f"layout: {layout}", hint)
    words = ",".join(entry if isinstance(entry, str) else "+".join(entry) for entry in entries)
    pending = ", ".join(f"{name}={kind}" for name, kind in layout.partial.items())
    return f"{words}; {pending}" if pending else words


@dataclass(frozen=True)
class _Reader:
    """Reader of a layout's parts; `used` maps each axis to its use so far."""

    source: "_Spelling"
    names: tuple[str, ...]
    used: dict[str, str]

    def entry(self, span: Span, dim: int) -> tuple[str, ...] | None:
        """Read the entry of a dim: the axes that split it, None for none."""
        source, word = self.source, self.source.at(span)
        if word in NOT_SPLIT:
            return None
        if "=" in word:
            start = source.text.rindex(",", 0, span[0]) if dim else span[0]
            fixed = f"{source.text[:start].strip()}; {word}"
            raise source.mistake(span, "reductions come after a semicolon", repr(fixed))
        inner = (span[0] + 1, span[1] - 1) if word.startswith("(") and word.endswith(")") else span
        return tuple(self._axis(at, f"dim {dim}") for at in source.pieces(inner, ",+>" if inner != span else "+>"))

    def reduction(self, span: Span) -> tuple[str, str]:
        """Read the pending reduction of an axis."""
        name_at, kind_at = self.source.assignment(span, default="sum")
        name, kind = self._axis(name_at, "a pending reduction"), self.source.at(kind_at)
        if kind not in REDUCTIONS:
            raise self.source.mistake(kind_at, f"no reduction is called {kind!r}", nearest(kind, REDUCTIONS))
        return name, kind

    def _axis(self, span: Span, use: str) -> str:
        source, name = self.source, self.source.at(span)
        if not name:
            raise source.mistake(span, f"{use} has an empty entry", '"-" for a dim that is not split, else an axis')
        if name in NOT_SPLIT:
            blame = f"{name!r} is no axis, so it cannot be one of several, and cannot be pending"
            raise source.mistake(span, blame, "one entry per dim, without brackets around all of them")
        if "(" in name or ")" in name:
            hint = "(dp,tp) for one dim that two axes split, and no brackets around all dims"
            raise source.mistake(span, f"brackets within {use}", hint)
        if name not in self.names:
            raise source.mistake(span, f"no axis is called {name!r}", nearest(name, self.names))
        if name in self.used:
            blame = f"axis {name!r} is used for {self.used[name]} already"
            raise source.mistake(span, blame, f"{name!r} in one of the two places only")
        self.used[name] = use
        return name


@dataclass(frozen=True)
class _Spelling:
    """A text, with the request and the context for error messages."""

    text: str
    asked: str
    context: str

    def at(self, span: Span) -> str:
        """Return a piece of the text."""
        return self.text[span[0] : span[1]]

    def trim(self, span: Span) -> Span:
        """Shrink a span by the blanks at its ends."""
        piece = self.at(span)
        start = span[0] + len(piece) - len(piece.lstrip())
        return start, max(start, span[0] + len(piece.rstrip()))

    def pieces(self, span: Span, separators: str) -> list[Span]:
        """Cut a span at separators outside of brackets, and trim the pieces."""
        cuts = [span[0] - 1, *self._cuts(span, separators), span[1]]
        return [self.trim((before + 1, after)) for before, after in pairwise(cuts)]

    def assignment(self, span: Span, default: str) -> tuple[Span, Span]:
        """Return the spans of name and value in `name=value`."""
        parts, word = self.pieces(span, "="), self.at(span)
        start = re.match(r"[\w.]*", word)
        hint = f"{(start and start[0]) or 'dp'}={default}"
        if not word:
            raise self.mistake(span, "an entry is empty", hint)
        if len(parts) != 2:
            raise self.mistake(span, f"{word!r} has {'no' if len(parts) == 1 else 'more than one'} '='", hint)
        if not self.at(parts[0]):
            raise self.mistake(span, f"{word!r} has no name before '='", f"dp{word}")
        return parts[0], parts[1]

    def number(self, span: Span, least: int, hint: str) -> int:
        """Read a whole number of at least `least`."""
        word = self.at(span)
        if not word:
            raise self.mistake(span, "a size is missing", hint)
        if not _NUMBER.fullmatch(word) or int(word) < least:
            raise self.mistake(span, f"{word!r} is no whole number from {least} up", hint)
        return int(word)

    def mistake(self, span: Span, blame: str, hint: str) -> ValueError:
        """Return an error whose second line is the text and whose third line marks the span."""
        line = re.sub(r"\s", " ", self.text)  # a tab or a line break would move the marks
        marks = " " * span[0] + "^" * max(1, span[1] - span[0])
        return InvalidValue(self.asked, blame, f"{line}\n  {marks}\n  {self.context}", hint)

    def _cuts(self, span: Span, separators: str) -> Iterator[int]:
        opened: list[int] = []
        for place in range(*span):
            letter = self.text[place]
            if letter == "(":
                opened.append(place)
            elif letter == ")" and not opened:
                raise self.mistake((place, place + 1), "a bracket closes that was never opened", _BRACKETS)
            elif letter == ")":
                opened.pop()
            elif letter in separators and not opened:
                yield place
        if opened:
            place = opened[-1]
            raise self.mistake((place, place + 1), "a bracket opens and never closes", _BRACKETS)


def _long_name(match: re.Match[str]) -> str:
    return {"bf": "bfloat", "fp": "float"}[match[1]] + match[2]
