"""Texts of messages: the four parts of an error, spellings that are close, names of classes, numbers of bytes.

An error says what was asked, what is to blame, what was seen, and what to try.
"""

import difflib
from collections.abc import Iterable


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
