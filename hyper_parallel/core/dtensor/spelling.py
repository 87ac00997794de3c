"""Spellings of a layout: alias entries, reductions by axis name, tensor maps, and the dict of `Layout.to_dict`."""

from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.core.common.checks import check, check_int, read_int
from hyper_parallel.core.common.errors import explain, nearest
from hyper_parallel.core.dtensor.ownership import Spec, Specs, Splits
from hyper_parallel.core.mesh.axes import MeshAxes, describe_ranks, unknown_axis

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


def describe(axes: MeshAxes, entries: str, reductions: Reductions) -> str:
    """Return a layout in one readable line.

    >>> describe(MeshAxes((2, 4), ("dp", "tp"), range(8)), "(-, tp)", ("sum", None))
    '(-, tp) pending sum over dp on dp=2, tp=4'

    Args:
        axes: the mesh.
        entries: what its axes do to the dims, in brackets.
        reductions: what is pending on each axis.
    """
    ranks = "" if axes.has_default_ranks else f" (ranks {describe_ranks(axes.ranks)})"
    pairs = zip(axes.names, reductions, strict=True)
    pending = ", ".join(f"{reduction} over {name}" for name, reduction in pairs if reduction is not None)
    return f"{entries}{' pending ' + pending if pending else ''} on {axes}{ranks}"


def describe_entries(axes: MeshAxes, splits: Splits) -> str:
    """Return the entry of each dim in a few characters.

    >>> describe_entries(MeshAxes((2, 4), ("dp", "tp"), range(8)), ((1, 0), ()))
    '(tp>dp, -)'
    """
    return f"({', '.join('>'.join(axes.names[axis] for axis in chain) or '-' for chain in splits)})"


def read_reductions(axes: MeshAxes, partial: Any, specs: Specs, base: Reductions) -> Reductions:
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
    check("cannot read a layout", "mapping", f'partial={{{axes.names[-1]!r}: "sum"}}', partial=partial)
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


def read_reduction(axes: MeshAxes, name: str, word: Any, given: str) -> str:
    """Return one of REDUCTIONS for a word, torch's "product" included.

    >>> read_reduction(MeshAxes((2,), ("tp",), range(2)), "tp", "product", "")
    'prod'

    Raises:
        TypeError: the word is no str.
        ValueError: no reduction has that name.
    """
    asked, seen = f"cannot leave a reduction pending over {name!r}", f"{given}   mesh: {axes}"
    hint = "one of " + ", ".join(map(repr, REDUCTIONS))
    check(asked, "str", hint, **{f"the reduction over {name!r}": word})
    if word == "product":
        return "prod"
    if word not in REDUCTIONS:
        raise ValueError(explain(asked, f"no reduction is called {word!r}", seen, hint))
    return word


# -- plain data: tensor maps, whose axes are counted from the right, and dicts -----------------------------------------


REQUIRED = ("mesh_shape", "alias_name")
OPTIONAL = ("tensor_map", "rank_list", "partial", "placements")


def to_tensor_map(count: int, splits: Splits) -> tuple[int | tuple[int, ...], ...]:
    """Return, per dim, the axis that splits it counted from the right, -1 for none, a tuple for several.

    >>> to_tensor_map(3, ((2,), (), (0, 1)))
    (0, -1, (2, 1))

    Args:
        count: number of axes.
        splits: per dim, the axes that split it as indices from the left, outer first.
    """
    turned = [tuple(count - 1 - axis for axis in axes) for axes in splits]
    return tuple(-1 if not axes else axes[0] if len(axes) == 1 else axes for axes in turned)


def read_tensor_map(axes: MeshAxes, tensor_map: Any) -> tuple[Any, ...]:
    """Read a tensor map, of tuples or of lists, into alias entries.

    >>> read_tensor_map(MeshAxes((2, 4), ("dp", "tp"), range(8)), [-1, [0, 1]])
    ('None', ('tp', 'dp'))

    Args:
        axes: the mesh.
        tensor_map: per dim an axis from the right, -1, or a sequence of axes.

    Raises:
        TypeError: not a sequence of ints and sequences of ints.
        ValueError: an axis out of range.
    """
    check("cannot read a layout", "list", "tensor_map=(1, -1), one entry per dim", tensor_map=tensor_map)
    entries: list[Any] = []
    for dim, entry in enumerate(tensor_map):
        if _is_list(entry):
            entries.append(tuple(_axis_name(axes, item, dim, tensor_map) for item in entry))
        else:
            entries.append("None" if entry == -1 else _axis_name(axes, entry, dim, tensor_map))
    return tuple(entries)


def read_specs(axes: MeshAxes, placements: Any) -> Specs:
    """Read the "placements" of `to_dict`: per axis None, or the dim it splits and torch's split factor.

    >>> read_specs(MeshAxes((2, 4), ("dp", "tp"), range(8)), [[-1, 1], None])
    ((-1, 1), None)

    Raises:
        TypeError: not a sequence of None and pairs of ints.
        ValueError: a number of entries that is not the number of axes.
    """
    asked, seen = "cannot read a layout", f"placements: {placements!r}   mesh: {axes}"
    hint = "per axis None or (dim, split factor)"
    check(asked, "list", hint, placements=placements)
    specs: list[Spec | None] = []
    for entry in placements:
        pair = tuple(check_int(item) for item in entry) if _is_list(entry) else ()
        if entry is None:
            specs.append(None)
        elif len(pair) == 2 and pair[0] is not None and pair[1] is not None and pair[1] > 0:
            specs.append((pair[0], pair[1]))
        else:
            raise TypeError(explain(asked, f"entry {len(specs)} of placements is {entry!r}", seen, hint))
    if len(specs) != len(axes.names):
        blame = f"placements has {len(specs)} entries for {len(axes.names)} axes"
        raise ValueError(explain(asked, blame, seen, f"one for each of {', '.join(axes.names)}"))
    return tuple(specs)


def read_dict(data: Any) -> Mapping[str, Any]:
    """Return data if it has the keys that `to_dict` writes.

    Raises:
        TypeError: not a mapping.
        ValueError: a key that is missing or unknown.
    """
    asked = "cannot read a layout from a dict"
    check(asked, "mapping", "layout.to_dict()", data=data)
    seen = f"keys: {', '.join(map(str, data))}"
    for key in REQUIRED:
        if key not in data:
            raise ValueError(explain(asked, f"key {key!r} is missing", seen, f"a dict with {' and '.join(REQUIRED)}"))
    for key in data:
        if key not in REQUIRED + OPTIONAL:
            raise ValueError(explain(asked, f"key {key!r} is unknown", seen, nearest(key, REQUIRED + OPTIONAL)))
    return data


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _axis_name(axes: MeshAxes, item: object, dim: int, tensor_map: object) -> str:
    asked, seen = f"cannot split dim {dim} over axis {item!r}", f"tensor_map: {tensor_map!r}   mesh: {axes}"
    count = len(axes.names)
    hint = f"0 ({axes.names[-1]}) to {count - 1} ({axes.names[0]}), counted from the right, or -1"
    axis = read_int(asked, "an entry of the tensor map", item, hint=hint)
    if not 0 <= axis < count:
        raise ValueError(explain(asked, f"the mesh has {count} axes", seen, hint))
    return axes.names[count - 1 - axis]
