"""The mesh as a value: axis names, axis sizes and which rank sits where, without any process group."""

import math
from typing import Any

from hyper_parallel.core.common.checks import check, read_int
from hyper_parallel.core.common.errors import explain, nearest

Ranks = range | tuple[int, ...]


class MeshAxes:
    """Names and sizes of a mesh's axes and the ranks on it; never changed, and cheap to compare at 100,000 ranks.

    >>> axes = MeshAxes((2, 4), ("dp", "tp"), range(8))
    >>> axes.index("tp"), axes.position(5), axes.coordinates(5), str(axes)
    (1, 5, (1, 1), 'dp=2, tp=4')

    One instance is shared by all layouts called from the same mesh; its hash is computed once. The arguments have
    been checked by `check_axes`.

    Args:
        sizes: ranks along each axis.
        names: one name per axis.
        ranks: the rank at each mesh position, last axis fastest; evenly spaced ranks are kept as a `range`.
    """

    __slots__ = ("_hash", "names", "ranks", "sizes")

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    ranks: Ranks

    def __init__(self, sizes: tuple[int, ...], names: tuple[str, ...], ranks: Ranks) -> None:
        self.sizes = sizes
        self.names = names
        self.ranks = ranks
        self._hash = hash((sizes, names, ranks))

    @property
    def has_default_ranks(self) -> bool:
        """Whether position and rank are the same number."""
        return self.ranks == range(len(self.ranks))

    def index(self, name: str) -> int:
        """Return the axis index of a name that is known to exist."""
        return self.names.index(name)

    def position(self, rank: int) -> int:
        """Return where a rank sits on the mesh, last axis fastest.

        >>> MeshAxes((2,), ("dp",), range(4, 8, 2)).position(6)
        1

        Raises:
            ValueError: the rank is not on the mesh.
        """
        try:
            return self.ranks.index(rank)
        except ValueError:
            seen = f"mesh: {self}   ranks: {describe_ranks(self.ranks)}"
            hint = f"rank={self.ranks[0]}, or a mesh that holds rank {rank}"
            asked = f"cannot find rank {rank} on the mesh"
            raise ValueError(explain(asked, "rank is not one of its ranks", seen, hint)) from None

    def coordinates(self, position: int) -> tuple[int, ...]:
        """Return the coordinate along each axis of a mesh position."""
        coordinates = []
        for size in reversed(self.sizes):
            position, coordinate = divmod(position, size)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, MeshAxes):
            return NotImplemented
        mine, theirs = (self._hash, self.sizes, self.names), (other._hash, other.sizes, other.names)
        return mine == theirs and self.ranks == other.ranks

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type["MeshAxes"], tuple[tuple[int, ...], tuple[str, ...], Ranks]]:
        return (MeshAxes, (self.sizes, self.names, self.ranks))  # the hash of a str differs between processes

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


def check_axes(shape: Any, names: Any, rank_list: Any = None) -> MeshAxes:
    """Check everything a user can get wrong about a mesh and return it as a value.

    >>> str(check_axes((2, 4), ("dp", "tp")))
    'dp=2, tp=4'

    Args:
        shape: ranks along each axis, each at least 1.
        names: one name per axis.
        rank_list: the rank at each position, last axis fastest; None means 0, 1, 2, ...

    Raises:
        TypeError: not sequences, a size or rank that is no int, a name that is no str.
        ValueError: no axes, a size below 1, a name that is "" or "None" or repeated, lengths that differ, ranks of the
            wrong number, repeated or negative.
    """
    asked = "cannot make a Layout"
    seen = f"shape: {shape!r}   names: {names!r}"
    check(asked, "sequence", shape=shape)
    check(asked, "sequence", 'names=("dp", "tp")', names=names)
    sizes, labels = tuple(shape), tuple(names)
    if len(sizes) != len(labels):
        blame = f"names has {len(labels)} entries and shape has {len(sizes)}"
        raise ValueError(explain(asked, blame, seen, "one name per axis"))
    if not sizes:
        raise ValueError(explain(asked, "shape has no axes", seen, 'one axis of size 1: Layout((1,), ("dp",))'))
    for index, name in enumerate(labels):
        check(asked, "str", f"a name such as {'axis' + str(index)!r}", **{f"the name of axis {index}": name})
        if name in ("", "None"):
            blame = f"{name!r}, given for axis {index}, cannot be an axis name"
            raise ValueError(explain(asked, blame, seen, 'a name such as "dp"; "None" means a dim that is not split'))
        if name in labels[:index]:
            blame = f"axis name {name!r} is given to axes {labels.index(name)} and {index}"
            raise ValueError(explain(asked, blame, seen, "a different name for each axis"))
    checked = tuple(
        read_int(asked, f"the size of axis {name!r}", size, 1, f"{name}=1, or a mesh without {name!r}")
        for size, name in zip(sizes, labels, strict=True)
    )
    return MeshAxes(checked, labels, _check_ranks(asked, rank_list, math.prod(checked), seen))


def compact_ranks(ranks: tuple[int, ...]) -> Ranks:
    """Return evenly spaced ranks as a `range`, which compares and hashes in constant time; others as they are.

    >>> compact_ranks((4, 6, 8)), compact_ranks((7,)), compact_ranks((0, 1, 3))
    (range(4, 10, 2), range(7, 8), (0, 1, 3))
    """
    if len(ranks) == 1:
        return range(ranks[0], ranks[0] + 1)
    step = ranks[1] - ranks[0]
    if step == 0:
        return ranks
    even = range(ranks[0], ranks[0] + step * len(ranks), step)
    return even if tuple(even) == ranks else ranks


def describe_ranks(ranks: Ranks) -> str:
    """Return ranks in a few characters however many there are.

    >>> describe_ranks(range(8, 16)), describe_ranks((0, 1, 4, 5)), describe_ranks(range(0, 1000, 8))
    ('8..15', '0, 1, 4, 5', '0, 8, ... 992 (125 ranks)')
    """
    if isinstance(ranks, range) and ranks.step == 1 and len(ranks) > 2:
        return f"{ranks[0]}..{ranks[-1]}"
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)} ranks)"


def unknown_axis(asked: str, name: object, axes: MeshAxes, given: str) -> ValueError:
    """Return the error for a name that no axis has, with the nearest name that one has."""
    seen = f"{given}   mesh: {axes}"
    return ValueError(explain(asked, f"no axis is called {name!r}", seen, nearest(name, axes.names)))


def _check_ranks(asked: str, rank_list: Any, count: int, seen: str) -> Ranks:
    if rank_list is None:
        return range(count)
    hint = f"rank_list=range({count})"
    check(asked, "sequence", hint, rank_list=rank_list)
    if isinstance(rank_list, range) and len(rank_list) == count and min(rank_list) >= 0:
        return rank_list  # the common case at 100,000 ranks; a range has no repeats
    ranks = [read_int(asked, f"rank_list[{index}]", rank, 0, hint) for index, rank in enumerate(rank_list)]
    if len(ranks) != count:
        blame = f"rank_list has {len(ranks)} ranks and the mesh has {count} places"
        raise ValueError(explain(asked, blame, seen, hint))
    if len(set(ranks)) != count:
        once: set[int] = set()
        twice = next(rank for rank in ranks if rank in once or once.add(rank))  # type: ignore[func-returns-value]
        blame = f"rank_list holds rank {twice} more than once"
        raise ValueError(explain(asked, blame, seen, hint))
    return compact_ranks(tuple(ranks))
