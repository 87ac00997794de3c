"""Fault descriptions: values that are checked when made and print as the code that makes them."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from typing import TypeAlias

from sim.explain.errors import ranks_phrase

__all__ = [
    "At",
    "AtTime",
    "Corrupt",
    "Drop",
    "Fault",
    "Freeze",
    "Kill",
    "Slow",
    "SlowLink",
    "at_time",
    "check_ranks",
]


@dataclass(frozen=True)
class AtTime:
    """A moment of virtual time, made by `at_time`."""

    seconds: float

    def __post_init__(self) -> None:
        seconds = self.seconds
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
            raise ValueError(
                f"cannot use {seconds!r} as a moment of virtual time\n  seconds: a number from 0 up\n"
                "  try: sim.at_time(0.5)"
            )

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
        _check_rank(self, "rank", self.rank)

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
        if isinstance(self.bits, bool) or not isinstance(self.bits, int) or self.bits < 1:
            raise ValueError(f"{_what(self)}: cannot flip {self.bits!r} bits\n  bits: an int from 1 up\n  try: bits=1")
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
            _check_rank(self, name, getattr(self, name))
        if len(set(self.involved())) == 1:
            raise ValueError(
                f"{_what(self)}: both ends are rank {self.involved()[0]}\n  {', '.join(names)}: two different ranks\n"
                f"  try: sim.faults.{_what(self)}(0, 1, ...)"
            )

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


# -- checks ------------------------------------------------------------------------------------------------------


def _what(fault: Fault) -> str:
    return type(fault).__name__


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_rank(fault: Fault, name: str, rank: object) -> None:
    if not _is_whole(rank, 0):
        raise ValueError(f"{_what(fault)}: there is no rank {rank!r}\n  {name}: an int from 0 up\n  try: {name}=0")


def _check_factor(fault: Fault, factor: object) -> None:
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        raise ValueError(
            f"{_what(fault)}: nothing can take {factor!r} times as long\n  factor: a number above 0\n  try: factor=2.0"
        )


def _check_at(fault: Fault, at: object) -> None:
    if isinstance(at, AtTime) or _is_whole(at, 0) or (isinstance(at, str) and at):
        return
    if isinstance(at, float) and 0 < at < 1:
        return
    if isinstance(at, tuple) and len(at) == 2 and isinstance(at[0], str) and at[0] and _is_whole(at[1], 0):
        return
    raise ValueError(
        f"{_what(fault)}: nothing happens at {at!r}\n"
        "  at: an operation's number (an int from 0 up), a region's name, (name, number), sim.at_time(seconds), or a "
        "probability (a float between 0 and 1)\n"
        "  try: at=3, at='backward', at=0.01"
    )


def check_ranks(fault: object, world_size: int) -> None:
    """Refuse what is no fault, and a fault of a rank that a world of this size does not have."""
    if not isinstance(fault, Fault):
        raise TypeError(
            f"cannot use {fault!r} as a fault\n  faults: sim.faults.Kill, Freeze, Slow, SlowLink, Corrupt or Drop\n"
            "  try: faults=[sim.faults.Kill(1, at=3)]"
        )
    unknown = [rank for rank in fault.involved() if rank >= world_size]
    if unknown:
        raise ValueError(
            f"{fault!r} cannot happen: there is no {ranks_phrase(unknown)}\n"
            f"  world: ranks 0 to {world_size - 1}\n  try: one of the world's ranks, or a larger world_size"
        )
