"""Fits the few figures of a curve to times: coordinate descent on the relative error, which outliers do not rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["Measurement", "descend", "errors", "loss_of", "quantile", "spread_in", "summary"]


class Measurement(NamedTuple):
    """A measured time, and how to predict it.

    Attributes:
        id: of the row.
        seconds: measured.
        predict: returns the seconds that some figures give.
        size: bytes that are communicated, where that matters.
    """

    id: str
    seconds: float
    predict: Callable[[Mapping[str, float]], float]
    size: float = 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of the values does not exceed; of none: not a number.

    >>> quantile([4.0, 1.0, 2.0], 0.5)
    2.0
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


def errors(rows: Sequence[Measurement], figures: Mapping[str, float]) -> list[float]:
    """Return log(predicted / measured) of each row."""
    return [math.log(row.predict(figures) / row.seconds) for row in rows]


def summary(rows: Sequence[Measurement], figures: Mapping[str, float]) -> tuple[float, float, float]:
    """Return median, 90th percentile and worst of |predicted / measured - 1|."""
    off = [abs(math.expm1(error)) for error in errors(rows, figures)]
    return quantile(off, 0.5), quantile(off, 0.9), max(off, default=math.nan)


def spread_in(rows: Sequence[Measurement], figures: Mapping[str, float]) -> float:
    """Return the standard deviation of the logarithm that has as many rows within 80 % as the rows do."""
    return round(quantile([abs(error) for error in errors(rows, figures)], 0.8) / 1.2816, 3)


def loss_of(rows: Sequence[Measurement], figures: Mapping[str, float]) -> float:
    """Return what a fit makes small: the mean of |log(predicted / measured)|, and half its 90th percentile."""
    off = [abs(error) for error in errors(rows, figures)]
    return sum(off) / len(off) + 0.5 * quantile(off, 0.9)


def descend(
    rows: Sequence[Measurement], start: Mapping[str, float], free: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    """Improve the free figures one after the other, each within its bounds; returns all, to three digits.

    >>> rows = [Measurement("", 2e-6 * size, lambda figures, size=size: figures["each"] * size) for size in (1, 2, 3)]
    >>> descend(rows, {"each": 1e-6, "other": 1.0}, {"each": (1e-9, 1.0)})
    {'each': 2e-06, 'other': 1.0}

    Args:
        rows: to fit to.
        start: all figures.
        free: lowest and highest value of those that are fitted.
    """
    best, least = dict(start), loss_of(rows, start)
    step = 0.3
    while step > 0.004:
        better = False
        for name, (low, high) in free.items():
            for factor in (1 + step, 1 / (1 + step)):
                tried = {**best, name: min(high, max(low, best[name] * factor))}
                now = loss_of(rows, tried)
                if now < least - 1e-6:
                    best, least, better = tried, now, True
        step = step if better else step / 2
    return {name: float(f"{value:.3g}") for name, value in best.items()}
