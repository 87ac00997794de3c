"""The mesh of a program that declares none, found from the groups in which its ranks communicate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from hyper_parallel.core.dtensor.layout import Layout

__all__ = ["mesh_of_groups"]


def mesh_of_groups(size: int, groups: Iterable[tuple[str, tuple[int, ...]]]) -> Layout | None:
    """Return the mesh with the fewest axes of which each group is an axis, or several; None: there is none.

    >>> mesh_of_groups(4, [("dp", (0, 2)), ("dp", (1, 3)), ("1: ranks 2-3", (2, 3))])
    Layout((2, 2), ('dp', 'axis1'))
    >>> mesh_of_groups(4, [("", (0, 1)), ("", (1, 2))]) is None
    True

    Args:
        size: how many ranks there are.
        groups: what each group is called, and its ranks.
    """
    called: dict[frozenset[int], str] = {}
    for name, ranks in groups:
        known = called.setdefault(frozenset(ranks), "")
        called[frozenset(ranks)] = known or (name if name.isidentifier() and name != "world" else "")
    wanted = {ranks for ranks in called if 1 < len(ranks) < size}
    for shape in sorted(_factors(size), key=len):
        lines = {axes: _lines(shape, axes) for axes in _choices(len(shape))}
        if not wanted <= set().union(*lines.values()):
            continue
        names: list[str] = []
        for axis in range(len(shape)):
            name = next((called[line] for line in lines[axis,] if called.get(line)), "")
            fallback = "ranks" if len(shape) == 1 else f"axis{axis}"
            names.append(fallback if not name or name in names else name)
        return Layout(shape, tuple(names))
    return None


def _factors(size: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write a number as a product, in every order.

    >>> list(_factors(4))
    [(4,), (2, 2)]
    """
    yield (size,)
    for first in range(2, size // 2 + 1):
        if size % first == 0:
            yield from ((first, *rest) for rest in _factors(size // first))


def _choices(count: int) -> list[tuple[int, ...]]:
    return [axes for length in range(1, count + 1) for axes in itertools.combinations(range(count), length)]


def _lines(shape: tuple[int, ...], axes: tuple[int, ...]) -> set[frozenset[int]]:
    """Return the sets of ranks that differ in their places along some axes only."""
    places = itertools.product(*map(range, shape))
    found: dict[tuple[int, ...], set[int]] = {}
    for rank, place in zip(range(math.prod(shape)), places, strict=True):
        found.setdefault(tuple(at for axis, at in enumerate(place) if axis not in axes), set()).add(rank)
    return {frozenset(ranks) for ranks in found.values()}
