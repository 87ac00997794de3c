"""Errors with four parts, and parts of their texts: close spellings, names of classes, numbers of bytes.

An error says what was asked, what is to blame, what was seen, and what to try.
"""

import difflib
from collections.abc import Iterable
from typing import overload


def explain(asked: str, blame: str, seen: str, hint: str) -> str:
    """Put the four parts of an error message into their fixed order.

    >>> print(explain("cannot split dim 0 over 'td'", "no axis has that name", "mesh: dp=2, tp=4", "'tp'"))
    cannot split dim 0 over 'td': no axis has that name
      mesh: dp=2, tp=4
      try: 'tp'

    Args:
        asked: what the caller wanted, as "cannot ...".
        blame: the argument or axis that stands in the way, and why.
        seen: what was given, enough to recognise it.
        hint: something that works.
    """
    return f"{asked}: {blame}\n  {seen}\n  try: {hint}"


class HyperParallelError(Exception):
    """Base class of the errors of hyper_parallel and of its simulator.

    Most have four parts. `raise InvalidValue(text)` takes a finished text, and leaves the four attributes empty. Two or
    three parts are a `TypeError`.

    >>> error = InvalidValue("cannot split dim 0 over 'td'", "no axis has that name", "mesh: dp=2, tp=4", "'tp'")
    >>> error.blame, error.hint, isinstance(error, ValueError)
    ('no axis has that name', "'tp'", True)

    Attributes:
        asked: what the caller wanted, as "cannot ...".
        blame: the argument or axis that stands in the way, and why.
        seen: what was given, enough to recognise it.
        hint: something that works.
    """

    __module__ = "hyper_parallel"  # tracebacks show it; it is where users import the class from
    asked = blame = seen = hint = ""

    @overload
    def __init__(self, text: str, /) -> None: ...

    @overload
    def __init__(self, asked: str, blame: str, seen: str, hint: str, /) -> None: ...

    def __init__(self, *parts: str) -> None:
        """Render the four parts into one text, which is all of `args`."""
        if len(parts) not in (1, 4):
            raise TypeError(f"{type(self).__name__} takes asked, blame, seen and hint, or one text: not {len(parts)}")
        self.args = parts  # not by super().__init__, which torch.compile cannot trace in an error
        if len(parts) == 4:
            self.args = (explain(*parts),)
            self.asked, self.blame, self.seen, self.hint = parts


class InvalidValue(HyperParallelError, ValueError):
    """A value, layout, plan or file that cannot be used; also a `ValueError`."""

    __module__ = "hyper_parallel"


class InvalidType(HyperParallelError, TypeError):
    """An argument of a kind that cannot be used; also a `TypeError`."""

    __module__ = "hyper_parallel"


class InvalidState(HyperParallelError, RuntimeError):
    """A call at the wrong time, or in an environment that lacks something; also a `RuntimeError`."""

    __module__ = "hyper_parallel"


def nearest(wrong: object, right: Iterable[str]) -> str:
    """Return the closest of the right spellings, quoted, or all of them when none is close.

    >>> nearest("replica", ("dp_replicate", "tp")), nearest("pd", ("tp", "dp"))
    ("'dp_replicate'", "'dp'")
    >>> nearest("x", ("dp", "tp"))
    "one of 'dp', 'tp'"

    Args:
        wrong: what was given.
        right: the spellings that would have worked.
    """
    names = list(dict.fromkeys(right))
    typed = str(wrong)

    def likeness(name: str) -> float:
        swapped = sorted(name) == sorted(typed)  # the right letters in the wrong order
        same_start = 0.1 * (name[:1] == typed[:1])
        return difflib.SequenceMatcher(None, typed, name).ratio() + swapped + same_start

    best = max(names, key=likeness)
    if likeness(best) >= 0.5:
        return repr(best)
    return "one of " + ", ".join(map(repr, names))


def class_name(value: object) -> str:
    """Return the name of a value's class; of a module in a sharding engine, the class that its user wrote.

    E.g. `fully_shard(nn.Linear(2, 2))` has the class `HSDPLinear`, which is in none of the user's files.
    """
    kind = type(value)
    return str(getattr(kind, "_hyper_parallel_original", kind).__name__)


def readable_bytes(count: float) -> str:
    """Write a number of bytes for people.

    >>> readable_bytes(0), readable_bytes(1_023), readable_bytes(12_582_912), readable_bytes(1.5)
    ('0 B', '1023 B', '12.0 MiB', '1.5 B')

    Args:
        count: bytes, or a mean of several numbers of bytes.
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" or count != int(count) else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} TiB"
