"""Fused regions: the kernel that a running operation belongs to, where several are one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["one_kernel", "recomputes", "region", "traces"]


class _ThreadRegions(threading.local):
    region = 0
    regions = 0
    recomputes = False
    traces = False


_now = _ThreadRegions()


def region() -> int:
    """Return the number of the kernel that a compiler would make of what is running; 0: it is not compiled.

    Each run of a graph has other numbers than those before it.
    """
    return _now.region


def recomputes() -> bool:
    """Tell whether the running graph, of a backward, is at an operation that its forward has done before."""
    return _now.recomputes


def traces() -> bool:
    """Tell whether a graph is being traced: then modules are called, and nothing is computed."""
    return _now.traces


@contextmanager
def one_kernel() -> Iterator[None]:
    """Take what is computed in the block as one kernel, as if it was compiled, or written by hand."""
    with being(region=take_numbers(1)):
        yield


@contextmanager
def being(**values: Any) -> Iterator[None]:
    """Let what this module tells be something else, until the end of the block."""
    before = {name: getattr(_now, name) for name in values}
    for name, value in values.items():
        setattr(_now, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(_now, name, value)


def take_numbers(count: int) -> int:
    """Return the first of some numbers that no kernel has had."""
    first = _now.regions + 1
    _now.regions += count
    return first


def enter(number: int, again: bool) -> None:
    """Say that the next operation is of a kernel, and whether it was done before."""
    _now.region, _now.recomputes = number, again
