"""Numbers of estimates as people read them."""

from __future__ import annotations

from typing import Any

__all__ = ["gib", "interval", "per_second", "percent", "seconds"]

GIB = 2**30


def gib(amount: float) -> str:
    """Write bytes.

    >>> gib(85_899_345_920), gib(5_242_880), gib(512)
    ('80.0 GiB', '5.0 MiB', '512 B')
    """
    if amount >= 0.1 * GIB:
        return f"{amount / GIB:,.1f} GiB"
    if amount >= 0.1 * 2**20:
        return f"{amount / 2**20:,.1f} MiB"
    return f"{amount / 1024:,.1f} KiB" if amount >= 1024 else f"{amount:.0f} B"


def seconds(amount: float) -> str:
    """Write a time with three digits.

    >>> seconds(12.3456), seconds(0.0456), seconds(7.2e-5), seconds(123.4)
    ('12.3 s', '45.6 ms', '72.0 us', '123 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if amount >= 0.9995 * size:
            return f"{_three_digits(amount / size)} {unit}"
    return f"{_three_digits(amount / 1e-6)} us"


def per_second(amount: float) -> str:
    """Write a rate.

    >>> per_second(5432.1), per_second(54.321), per_second(0.5)
    ('5,432', '54.3', '0.500')
    """
    return _three_digits(amount)


def percent(part: float) -> str:
    """Write a share.

    >>> percent(0.4567), percent(0.0123)
    ('46 %', '1.2 %')
    """
    return f"{100 * part:.0f} %" if abs(part) >= 0.0995 else f"{100 * part:.1f} %"


def interval(quantity: Any, write: Any = seconds) -> str:
    """Write the 80 % interval of a quantity, the unit once.

    >>> from types import SimpleNamespace
    >>> interval(SimpleNamespace(low=11.2, high=13.9)), interval(SimpleNamespace(low=0.9, high=1.2))
    ('11.2 to 13.9 s', '900 ms to 1.20 s')
    """
    low, high = write(quantity.low), write(quantity.high)
    number, _, unit = low.partition(" ")
    return f"{number} to {high}" if unit and high.endswith(" " + unit) else f"{low} to {high}"


def _three_digits(amount: float) -> str:
    if amount >= 99.95:
        return f"{amount:,.0f}"
    return f"{amount:.1f}" if amount >= 9.995 else f"{amount:.2f}" if amount >= 0.9995 else f"{amount:.3f}"
