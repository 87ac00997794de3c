"""Fault descriptions: values that are checked when made and print as the code that makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TypeAlias

from hyper_parallel.core.common.checks import check_above, check_int, check_least, read_int
from hyper_parallel.core.common.errors import InvalidValue
from sim.explain.errors import ranks_phrase


@dataclass(frozen=True)
class AtTime:
    """A moment of virtual time, made by `at_time`."""

    seconds: float

    def __post_init__(self) -> None:
        asked = "cannot name a moment of virtual time"
        check_least(asked, 0, seconds=self.seconds)

    def __repr__(self) -> str:
        return f"sim.at_time({self.seconds!r})"


def at_time(seconds: float) -> AtTime:
    """The first operation that a rank begins at this virtual time or later, for the `at` of a fault.

    >>> Kill(2, at=at_time(0.5))
    sim.faults.Kill(2, at=sim.at_time(0.5))
    """
    return AtTime(seconds)


At: TypeAlias = "int | float | str | tuple[str, int] | AtTime"


@dataclass(frozen=True, repr=False)
class Fault:
    """Base class of all faults; `repr` gives the expression that makes the same one."""

    def __repr__(self) -> str:
        given = [
            repr(getattr(self, f.name)) if f.default is MISSING else f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
        ]
        return f"sim.faults.{type(self).__name__}({', '.join(given)})"

    def involved(self) -> tuple[int, ...]:
        """The ranks that the fault names."""
        raise AssertionError("each kind of fault has its own")


@dataclass(frozen=True, repr=False)
class _RankFault(Fault):
    rank: int

    def __post_init__(self) -> None:
        read_int(_asked(self), "rank", self.rank, 0)

    def involved(self) -> tuple[int, ...]:
        return (self.rank,)


@dataclass(frozen=True, repr=False)
class Kill(_RankFault):
    """The rank ends as if its process had died: others never hear of it again.

    >>> Kill(2, at=3)
    sim.faults.Kill(2, at=3)

    Args:
        rank: Which one.
        at: When: before the rank's n-th operation (an int, from 0, since the fault was added; collectives, sends and
            receives count), before the first operation inside of `sim.region(name)` (a str) or the n-th one there
            (`(name, n)`), before the first one at a virtual time (`sim.at_time`), or before each one with a
            probability (a float). Default 0: before its first operation.
    """

    at: At = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_at(self, self.at)


@dataclass(frozen=True, repr=False)
class Freeze(_RankFault):
    """The rank stays alive and never goes on. `at` is that of `Kill`; default 0, its first operation."""

    at: At = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_at(self, self.at)


@dataclass(frozen=True, repr=False)
class Corrupt(_RankFault):
    """Some bits of what the rank gives to an operation arrive flipped; its own tensors stay as they are.

    Args:
        rank: Whose data.
        bits: How many different bits; which ones is drawn from the world's seed.
        at: As for `Kill`, of which it takes the first operation to which the rank gives data. A probability
            goes for each operation: it can happen many times.
    """

    bits: int = 1
    at: At = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        read_int(_asked(self), "bits", self.bits, 1)
        _check_at(self, self.at)


@dataclass(frozen=True, repr=False)
class Slow(_RankFault):
    """The rank's `sim.advance` and `time.sleep` take `factor` times as long."""

    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_factor(self, self.factor)


@dataclass(frozen=True, repr=False)
class _OfTwoRanks(Fault):
    def __post_init__(self) -> None:
        names = [f.name for f in fields(self)][:2]
        for name in names:
            read_int(_asked(self), name, getattr(self, name), 0)
        if len(set(self.involved())) == 1:
            hint = f"sim.faults.{type(self).__name__}(0, 1, ...)"
            raise InvalidValue(_asked(self), "it takes two different ranks", f"seen: {self!r}", hint)

    def involved(self) -> tuple[int, ...]:
        one, other = (getattr(self, f.name) for f in fields(self)[:2])
        return (one, other)


@dataclass(frozen=True, repr=False)
class SlowLink(_OfTwoRanks):
    """Communication in which both ranks take part takes `factor` times as long, where it takes time at all."""

    a: int
    b: int
    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_factor(self, self.factor)


@dataclass(frozen=True, repr=False)
class Drop(_OfTwoRanks):
    """A message is lost: its send completes, its receive does not.

    Args:
        sender: Who sends it.
        receiver: To whom.
        at: As for `Kill`, of the messages from one to the other. A probability goes for each message.
    """

    sender: int
    receiver: int
    at: At = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_at(self, self.at)


FAULT_KINDS: tuple[type[Fault], ...] = (Kill, Freeze, Slow, SlowLink, Corrupt, Drop)
"""What can go wrong in a world."""


# -- checks ------------------------------------------------------------------------------------------------------


def _asked(fault: Fault) -> str:
    return f"cannot make a fault {type(fault).__name__}"


def _is_count(value: object) -> bool:
    number = check_int(value)
    return number is not None and number >= 0


def _check_factor(fault: Fault, factor: float) -> None:
    check_above(_asked(fault), 0, "factor=2.0", factor=factor)


def _check_at(fault: Fault, at: object) -> None:
    if isinstance(at, AtTime) or _is_count(at) or (isinstance(at, str) and at):
        return
    if isinstance(at, float) and 0 < at < 1:
        return
    if isinstance(at, tuple) and len(at) == 2 and isinstance(at[0], str) and at[0] and _is_count(at[1]):
        return
    blame = (
        "at is none of an operation's number (from 0), a region's name, (name, number), sim.at_time(seconds), or a "
        "probability (a float between 0 and 1)"
    )
    raise InvalidValue(_asked(fault), blame, f"at: {at!r}", "at=3, at='backward', at=0.01")


def check_kinds(asked: str, kinds: Sequence[type[Fault]]) -> None:
    """Refuse what is no kind of fault, and no kind at all."""
    if not kinds or not set(kinds) <= set(FAULT_KINDS):
        known = ", ".join(f"sim.faults.{kind.__name__}" for kind in FAULT_KINDS)
        raise InvalidValue(
            asked, f"kinds: {list(kinds)!r} are no kinds of fault", f"known: {known}", "[sim.faults.Kill]"
        )


def check_ranks(fault: Fault, world_size: int) -> None:
    """Refuse a fault of a rank that a world of this size does not have."""
    unknown = [rank for rank in fault.involved() if rank >= world_size]
    if unknown:
        blame, hint = f"there is no {ranks_phrase(unknown)}", "one of the world's ranks, or a larger world_size"
        raise InvalidValue(f"cannot inject {fault!r}", blame, f"world: ranks 0 to {world_size - 1}", hint)
