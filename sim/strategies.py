"""Hypothesis strategies for meshes, layouts, degrees, faults ...; the only file of the package that needs hypothesis.

Arguments are checked when a strategy is made, not when it first draws. Every strategy says what it shrinks towards, so
that a failing example is the simplest one: one rank, size-1 dims, everything replicated.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

try:
    from hypothesis import strategies as st
except ImportError as missing:
    raise ImportError(
        "sim.strategies needs hypothesis, which is not installed\n  try: pip install 'hyper_parallel[test]'"
    ) from missing

from hyper_parallel.core.common.checks import check_choice, read_int
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.ownership import count_parts
from hyper_parallel.core.dtensor.spelling import REDUCTIONS
from hyper_parallel.core.mesh.parallel_dims import ParallelDims
from sim.observers.faults.plan import (
    FAULT_KINDS,
    Corrupt,
    Drop,
    Fault,
    Freeze,
    Kill,
    Slow,
    SlowLink,
    at_time,
    check_kinds,
)

AXIS_NAMES = ("dp", "tp", "cp", "pp", "ep", "a", "b", "c")
"""Names of drawn axes, in mesh order."""

TELLING_SIZES = (1, 0, 2, 3, 5, 7, 11, 13, 4, 6, 8, 12)
"""Sizes that find mistakes: one, none, primes, which rarely divide evenly, and a few that often do."""

_ASKED = "cannot make a strategy"


class LayoutPair(NamedTuple):
    """Two layouts of one tensor on one mesh, and the tensor's shape."""

    src: Layout
    dst: Layout
    shape: tuple[int, ...]


def meshes(
    max_ranks: int = 64, max_axes: int = 4, *, min_axes: int = 1, min_size: int = 1
) -> st.SearchStrategy[Layout]:
    """Draw a mesh: a `Layout` without an assignment, named as in `AXIS_NAMES`, on ranks 0, 1, 2, ...

    Shrinks towards `Layout((1,), ("dp",))`: fewer axes, then smaller ones.

    Args:
        max_ranks: most ranks that the mesh may have.
        max_axes: most axes, 8 at most.
        min_axes: fewest axes.
        min_size: smallest axis; 2 leaves out axes of one rank.

    Raises:
        TypeError: an argument that is no int.
        ValueError: bounds that no mesh fits.
    """
    read_int(_ASKED, "max_ranks", max_ranks, 1)
    read_int(_ASKED, "min_size", min_size, 1)
    read_int(_ASKED, "min_axes", min_axes, 1)
    read_int(_ASKED, "max_axes", max_axes, min_axes, most=len(AXIS_NAMES))
    if min_size**min_axes > max_ranks:
        blame, seen = f"{min_axes} axes of {min_size} ranks are more than max_ranks", f"max_ranks: {max_ranks}"
        raise InvalidValue(_ASKED, blame, seen, f"max_ranks={min_size**min_axes}")

    return _meshes(max_ranks, max_axes, min_axes, min_size)


@st.composite
def _meshes(draw: st.DrawFn, max_ranks: int, max_axes: int, min_axes: int, min_size: int) -> Layout:
    count = draw(st.integers(min_axes, max_axes))
    room = max_ranks
    sizes: list[int] = []
    while len(sizes) < count:
        kept = max(0, min_axes - len(sizes) - 1)  # axes that must still fit after this one
        most = room // min_size**kept
        if most < min_size:
            break  # no room for another axis, and there are enough
        few = st.integers(min_size, min(most, max(4, min_size)))  # so that one large axis does not use all the room
        sizes.append(draw(few | st.integers(min_size, most)))
        room //= sizes[-1]
    return Layout(tuple(sizes), AXIS_NAMES[: len(sizes)])


def shapes(min_dims: int = 0, max_dims: int = 3, *, max_size: int = 16) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw a tensor's shape, rich in sizes 0, 1, primes and others that do not divide evenly.

    Shrinks towards `min_dims` dims of size 1.

    Args:
        min_dims: fewest dims.
        max_dims: most dims.
        max_size: largest size of a dim, in elements.

    Raises:
        TypeError: an argument that is no int.
        ValueError: a negative bound, or a maximum below its minimum.
    """
    read_int(_ASKED, "min_dims", min_dims, 0)
    read_int(_ASKED, "max_dims", max_dims, min_dims)
    read_int(_ASKED, "max_size", max_size, 1)
    telling = st.sampled_from([size for size in TELLING_SIZES if size <= max_size])
    return st.lists(telling | st.integers(0, max_size), min_size=min_dims, max_size=max_dims).map(tuple)


def layouts(
    mesh: Layout,
    shape: Sequence[int],
    *,
    ordered: bool = True,
    even: bool = False,
    partial: bool | Sequence[str] = False,
) -> st.SearchStrategy[Layout]:
    """Draw a layout, in alias form, of a tensor of this shape on this mesh.

    Shrinks towards everything replicated, and several axes on one dim towards mesh order.

    Args:
        mesh: a `Layout`; its assignment, if any, does not matter.
        shape: the tensor's sizes, in elements.
        ordered: also draw splits of one dim over several axes in an order that is not the mesh's.
        even: only splits into parts of equal size.
        partial: True, or reductions such as ("sum", "avg"): axes may have one of them pending, the same on all axes.

    Raises:
        TypeError: sizes that are no ints.
        ValueError: a negative size, or a reduction that does not exist.
    """
    for dim, size in enumerate(shape):
        read_int(_ASKED, f"shape[{dim}]", size, 0)
    kinds = REDUCTIONS if partial is True else tuple(partial or ())
    for kind in kinds:
        check_choice(_ASKED, "partial", kind, REDUCTIONS)
    return _layouts(mesh, shape, kinds, ordered, even)


@st.composite
def _layouts(
    draw: st.DrawFn, mesh: Layout, shape: Sequence[int], kinds: Sequence[str], ordered: bool, even: bool
) -> Layout:
    names, sizes = mesh.alias_name, mesh.mesh_shape
    splits: list[list[int]] = [[] for _ in shape]
    pending: dict[str, str] = {}
    kind = draw(st.sampled_from(kinds)) if kinds else None
    for axis, name in enumerate(names):
        dims = [
            dim for dim in range(len(shape)) if not even or shape[dim] % count_parts(sizes, [*splits[dim], axis]) == 0
        ]
        role = draw(st.integers(0, len(dims) + (kind is not None)))  # 0: replicated; then the dims; then partial
        if 0 < role <= len(dims):
            splits[dims[role - 1]].append(axis)
        elif role and kind is not None:
            pending[name] = kind
    if ordered:
        splits = [draw(st.permutations(axes)) if len(axes) > 1 else axes for axes in splits]
    entries = [tuple(names[axis] for axis in axes) or None for axes in splits]
    return mesh(*entries, partial=pending)


def layout_pairs(
    max_ranks: int = 64,
    max_axes: int = 4,
    *,
    max_dims: int = 3,
    max_size: int = 16,
    ordered: bool = True,
    even: bool = False,
    partial: bool | Sequence[str] = False,
) -> st.SearchStrategy[LayoutPair]:
    """Draw two layouts of one tensor on one mesh: where it is, and where it should be (never partial).

    Shrinks towards one rank, a scalar, both layouts replicated.

    Args:
        max_ranks: most ranks that the mesh may have.
        max_axes: most axes.
        max_dims: most dims of the tensor.
        max_size: largest size of a dim, in elements.
        ordered: as for `layouts`, for both.
        even: as for `layouts`, for both.
        partial: as for `layouts`, for the source.

    Raises:
        TypeError, ValueError: as `meshes`, `shapes` and `layouts`.
    """
    places = meshes(max_ranks, max_axes)
    tensors = shapes(0, max_dims, max_size=max_size)
    layouts(Layout((1,), ("dp",)), (), partial=partial)  # checks `partial` now

    return _layout_pairs(places, tensors, ordered, even, partial)


@st.composite
def _layout_pairs(
    draw: st.DrawFn,
    places: st.SearchStrategy[Layout],
    tensors: st.SearchStrategy[tuple[int, ...]],
    ordered: bool,
    even: bool,
    partial: bool | Sequence[str],
) -> LayoutPair:
    mesh, shape = draw(places), draw(tensors)
    src = draw(layouts(mesh, shape, ordered=ordered, even=even, partial=partial))
    return LayoutPair(src, draw(layouts(mesh, shape, ordered=ordered, even=even)), shape)


def interleavings(max_ranks: int = 8, max_turns: int = 32) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw who runs next, each time that several ranks can: what `sim.run` and `sim.world` take as `schedule`.

        @given(sim.strategies.interleavings())
        def test_any_order(schedule):
            assert sim.run(body, world_size=4, schedule=schedule) == [6.0] * 4

    Shrinks towards `()`, ranks that take turns, rank 0 first: fewer turns out of line, then ranks less far back in the
    line. A failing example is a list of numbers that replays the failure: `sim.run(..., schedule=[0, 2, 1])`.

    Args:
        max_ranks: ranks of the world that it is for; in a larger one, the last ranks in a long line never come first.
        max_turns: most turns that are drawn; in those that follow, the ranks take turns.

    Raises:
        TypeError: an argument that is no int.
        ValueError: fewer than 1 rank, or a negative number of turns.
    """
    read_int(_ASKED, "max_ranks", max_ranks, 1)
    read_int(_ASKED, "max_turns", max_turns, 0)
    places = st.integers(0, max_ranks - 1)
    few = st.lists(places, max_size=max_turns)
    # Hypothesis draws short lists; a fault that needs a long one is found among those that fill all turns.
    many = st.lists(places, min_size=max_turns, max_size=max_turns)
    return (few | many).map(_without_last_zeros)


def _without_last_zeros(places: Sequence[int]) -> tuple[int, ...]:
    """Leave out what a schedule does by itself where it ends."""
    kept = list(places)
    while kept and kept[-1] == 0:
        kept.pop()
    return tuple(kept)


def parallel_dims(max_ranks: int = 64, *, ranks: int | None = None) -> st.SearchStrategy[ParallelDims]:
    """Draw the parallel degrees of a run, valid and checked, for up to `max_ranks` ranks or for exactly `ranks`.

    Shrinks towards `ParallelDims()`, one rank; with `ranks`, towards all of them on `dp_shard`.

    Args:
        max_ranks: most ranks that the degrees may multiply to.
        ranks: their exact product, in place of `max_ranks`.

    Raises:
        TypeError: an argument that is no int.
        ValueError: fewer than 1 rank.
    """
    read_int(_ASKED, "max_ranks", max_ranks, 1)
    if ranks is not None:
        read_int(_ASKED, "ranks", ranks, 1)
    return _parallel_dims(max_ranks, ranks)


@st.composite
def _parallel_dims(draw: st.DrawFn, max_ranks: int, ranks: int | None) -> ParallelDims:
    # As many draws whatever comes out of them, or few large degrees would pass for simpler than many of 1.
    places = st.integers(0, 2**16)

    def one_of(options: Sequence[Any]) -> Any:
        return options[draw(places) % len(options)]

    degrees: dict[str, Any] = dict.fromkeys(("tp", "dp_replicate", "pp", "cp", "ep"), 1)
    room = max_ranks if ranks is None else ranks
    for axis in draw(st.permutations(tuple(degrees))):
        fitting = [size for size in range(1, room + 1) if ranks is None or room % size == 0]
        degrees[axis] = one_of(fitting)
        room //= degrees[axis]
    degrees["dp_shard"] = one_of(range(1, room + 1)) if ranks is None else room
    etp = one_of((1, degrees["tp"]))
    ulysses = one_of([None, *(d for d in range(1, degrees["cp"] + 1) if degrees["cp"] % d == 0)])
    return ParallelDims(**degrees, etp=etp, ulysses_degree=ulysses, world_size=math.prod(degrees.values()))


def fault_plans(
    world_size: int,
    *,
    max_faults: int = 3,
    kinds: Sequence[type[Fault]] = FAULT_KINDS,
    max_operations: int = 16,
    regions: Sequence[str] = (),
    survivors: int = 1,
) -> st.SearchStrategy[list[Fault]]:
    """Draw what goes wrong in a world: what `sim.run` and `sim.world` take as `faults`.

    Shrinks towards `[]`, then towards rank 0's first operation, and the kinds in their order.

    Args:
        world_size: ranks of the world.
        max_faults: most faults.
        kinds: classes of `sim.faults`; those that need two ranks are left out where there is one.
        max_operations: a fault happens before this one of a rank's operations, or never.
        regions: names of `sim.region` in which faults may happen, too.
        survivors: so many ranks are neither killed nor frozen.

    Raises:
        TypeError: an argument that is no int.
        ValueError: bounds that nothing fits, or something that is no kind of fault.
    """
    read_int(_ASKED, "world_size", world_size, 1)
    read_int(_ASKED, "max_faults", max_faults, 0)
    read_int(_ASKED, "max_operations", max_operations, 1)
    read_int(_ASKED, "survivors", survivors, 0, most=world_size)
    check_kinds(_ASKED, kinds)
    usable = [kind for kind in kinds if world_size > 1 or kind not in (SlowLink, Drop)]
    numbers = st.integers(0, max_operations - 1)
    when: st.SearchStrategy[Any] = numbers
    if regions:
        when = when | st.sampled_from(tuple(regions)) | st.tuples(st.sampled_from(tuple(regions)), numbers)
    when = when | st.sampled_from((0.01, 0.1, 0.5)) | st.sampled_from((0.0, 0.5, 2.0)).map(at_time)
    return _fault_plans(world_size, usable, when, max_faults, survivors)


@st.composite
def _fault_plans(
    draw: st.DrawFn,
    world_size: int,
    usable: Sequence[type[Fault]],
    when: st.SearchStrategy[Any],
    max_faults: int,
    survivors: int,
) -> list[Fault]:
    losable = draw(st.permutations(range(world_size)))[: world_size - survivors]
    each = _faults(world_size, usable, when, losable)
    faults = draw(st.lists(each, max_size=max_faults if usable else 0))  # of a list, hypothesis can take any out
    return [fault for fault in faults if fault is not None]


@st.composite
def _faults(
    draw: st.DrawFn,
    world_size: int,
    usable: Sequence[type[Fault]],
    when: st.SearchStrategy[Any],
    losable: Sequence[int],
) -> Fault | None:
    factors = st.sampled_from((2.0, 10.0, 0.5))
    kind = draw(st.sampled_from(usable))
    rank = draw(st.integers(0, world_size - 1))
    if kind in (SlowLink, Drop):
        other = draw(st.sampled_from([each for each in range(world_size) if each != rank]))
        return SlowLink(rank, other, draw(factors)) if kind is SlowLink else Drop(rank, other, at=draw(when))
    if kind is Slow:
        return Slow(rank, draw(factors))
    if kind is Corrupt:
        return Corrupt(rank, bits=draw(st.sampled_from((1, 2, 9))), at=draw(when))
    if rank not in losable:
        return None
    return Kill(rank, at=draw(when)) if kind is Kill else Freeze(rank, at=draw(when))
