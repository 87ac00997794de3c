"""The ways to write a layout down in words: one alias entry per dim, and pending reductions by axis name."""

from collections.abc import Mapping, Sequence

from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.dtensor.shards import Splits
from hyper_parallel.core.dtensor.strided import Specs
from hyper_parallel.core.mesh.axes import MeshAxes, unknown_axis

REDUCTIONS = ("sum", "avg", "max", "min", "prod")
"""What a pending reduction can be; torch calls the last one "product"."""

Reductions = tuple[str | None, ...]
"""One per axis; None for an axis with nothing pending."""


def read_alias(axes: MeshAxes, entries: Sequence[object]) -> Splits:
    """Read one entry per tensor dim into the axes that split each dim, outer first.

    >>> read_alias(MeshAxes((2, 4), ("dp", "tp"), range(8)), (("tp", "dp"), "None"))
    ((1, 0), ())

    Args:
        axes: the mesh.
        entries: an axis name, a tuple of names, or "None" or None for a dim that is not split.

    Raises:
        TypeError: an entry that is none of these.
        ValueError: an axis that does not exist or is used twice, or an empty or nested "None".
    """
    given = f"layout: {tuple(entries)!r}"
    used: dict[int, int] = {}
    splits = []
    for dim, entry in enumerate(entries):
        names = entry if isinstance(entry, tuple | list) else () if entry is None or entry == "None" else (entry,)
        if isinstance(entry, tuple | list) and not entry:
            blame = f"the entry of dim {dim} is empty"
            raise ValueError(explain("cannot read a layout", blame, given, '"None" for a dim that is not split'))
        order = []
        for name in names:
            axis = _read_axis(axes, name, dim, entry, given)
            if axis in used:
                blame = f"axis {name!r} already splits dim {used[axis]}"
                seen, hint = f"{given}   mesh: {axes}", '"None" in one of the two places'
                raise ValueError(explain(f"cannot split dim {dim} over {name!r}", blame, seen, hint))
            used[axis] = dim
            order.append(axis)
        splits.append(tuple(order))
    return tuple(splits)


def _read_axis(axes: MeshAxes, name: object, dim: int, entry: object, given: str) -> int:
    asked = f"cannot split dim {dim} over {name!r}"
    if name is None or name == "None":
        blame = '"None" is no axis, so it cannot be one of several'
        loose = ", ".join(repr(part) for part in entry) if isinstance(entry, tuple | list) else ""
        raise ValueError(explain(asked, blame, given, f"one entry per dim, without the inner brackets: ({loose})"))
    if not isinstance(name, str):
        blame = f"an entry is an axis name, a tuple of names, or None, not a {type(name).__name__}"
        raise TypeError(explain(asked, blame, given, f'layout({axes.names[0]!r}, "None")'))
    if name not in axes.names:
        raise unknown_axis(asked, name, axes, given)
    return axes.index(name)


def write_alias(axes: MeshAxes, splits: Splits) -> tuple[str | tuple[str, ...], ...]:
    """Return one entry per tensor dim: "None", an axis name, or a tuple of names, outer first.

    >>> write_alias(MeshAxes((2, 4), ("dp", "tp"), range(8)), ((1, 0), ()))
    (('tp', 'dp'), 'None')
    """
    named = [tuple(axes.names[axis] for axis in order) for order in splits]
    return tuple("None" if not names else names[0] if len(names) == 1 else names for names in named)


def read_reductions(axes: MeshAxes, partial: object, specs: Specs, base: Reductions) -> Reductions:
    """Read `partial={"tp": "sum"}` into one reduction per axis, on top of those that placements gave.

    >>> read_reductions(MeshAxes((2, 4), ("dp", "tp"), range(8)), {"tp": "sum"}, (None, None), (None, None))
    (None, 'sum')

    Args:
        axes: the mesh.
        partial: axis name -> "sum", "avg", "max", "min" or "prod"; None for nothing pending.
        specs: what each axis splits.
        base: the reductions already known.

    Raises:
        TypeError: partial is no mapping, or a reduction is no str.
        ValueError: an axis that does not exist, that splits a dim too, or that is given two reductions; a reduction
            that does not exist.
    """
    if partial is None:
        return base
    given = f"partial: {partial!r}"
    if not isinstance(partial, Mapping):
        blame = f"partial must map axis names to reductions, not be a {type(partial).__name__}"
        raise TypeError(explain("cannot read a layout", blame, given, f'partial={{{axes.names[-1]!r}: "sum"}}'))
    result = list(base)
    for name, word in partial.items():
        asked = f"cannot leave a reduction pending over {name!r}"
        if name not in axes.names:
            raise unknown_axis(asked, name, axes, given)
        axis, seen = axes.index(name), f"{given}   mesh: {axes}"
        spec = specs[axis]
        if spec is not None:
            blame = f"axis {name!r} already splits dim {spec[0]}"
            raise ValueError(explain(asked, blame, seen, f"{name!r} in one of the two places only"))
        reduction = read_reduction(axes, name, word, given)
        if result[axis] not in (None, reduction):
            blame = f"axis {name!r} has {result[axis]!r} pending by its placement and {reduction!r} by partial="
            raise ValueError(explain(asked, blame, seen, "one of the two"))
        result[axis] = reduction
    return tuple(result)


def read_reduction(axes: MeshAxes, name: str, word: object, given: str) -> str:
    """Return one of REDUCTIONS for a word, torch's "product" included.

    >>> read_reduction(MeshAxes((2,), ("tp",), range(2)), "tp", "product", "")
    'prod'

    Raises:
        TypeError: the word is no str.
        ValueError: no reduction has that name.
    """
    asked, seen = f"cannot leave a reduction pending over {name!r}", f"{given}   mesh: {axes}"
    hint = "one of " + ", ".join(map(repr, REDUCTIONS))
    if not isinstance(word, str):
        blame = f"a reduction is a str, not a {type(word).__name__}"
        raise TypeError(explain(asked, blame, seen, hint))
    if word == "product":
        return "prod"
    if word not in REDUCTIONS:
        raise ValueError(explain(asked, f"no reduction is called {word!r}", seen, hint))
    return word
