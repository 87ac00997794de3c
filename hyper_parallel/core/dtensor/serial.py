"""A layout as plain data: tensor maps (axes counted from the right) and the dict of `Layout.to_dict`."""

from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.core.common.checks import check_int
from hyper_parallel.core.common.errors import explain, nearest
from hyper_parallel.core.dtensor.shards import Splits
from hyper_parallel.core.dtensor.strided import Spec, Specs
from hyper_parallel.core.mesh.axes import MeshAxes

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


def read_tensor_map(axes: MeshAxes, tensor_map: object) -> tuple[Any, ...]:
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
    if not _is_list(tensor_map):
        blame = f"tensor_map is a {type(tensor_map).__name__}"
        hint = "one entry per dim, such as (1, -1)"
        raise TypeError(explain("cannot read a layout", blame, f"tensor_map: {tensor_map!r}", hint))
    entries: list[Any] = []
    for dim, entry in enumerate(tensor_map):  # type: ignore[arg-type, var-annotated]
        if _is_list(entry):
            entries.append(tuple(_axis_name(axes, item, dim, tensor_map) for item in entry))
        else:
            entries.append("None" if entry == -1 else _axis_name(axes, entry, dim, tensor_map))
    return tuple(entries)


def read_specs(axes: MeshAxes, placements: object) -> Specs:
    """Read the "placements" of `to_dict`: per axis None, or the dim it splits and torch's split factor.

    >>> read_specs(MeshAxes((2, 4), ("dp", "tp"), range(8)), [[-1, 1], None])
    ((-1, 1), None)

    Raises:
        TypeError: not a sequence of None and pairs of ints.
        ValueError: a number of entries that is not the number of axes.
    """
    asked, seen = "cannot read a layout", f"placements: {placements!r}   mesh: {axes}"
    hint = "per axis None or (dim, split factor)"
    if not _is_list(placements):
        raise TypeError(explain(asked, f"placements is a {type(placements).__name__}", seen, hint))
    specs: list[Spec | None] = []
    for entry in placements:  # type: ignore[attr-defined]
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


def read_dict(data: object) -> Mapping[str, Any]:
    """Return data if it has the keys that `to_dict` writes.

    Raises:
        TypeError: not a mapping.
        ValueError: a key that is missing or unknown.
    """
    asked = "cannot read a layout from a dict"
    if not isinstance(data, Mapping):
        raise TypeError(explain(asked, f"data is a {type(data).__name__}", f"data: {data!r}", "layout.to_dict()"))
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
    axis = check_int(item)
    if axis is None:
        raise TypeError(explain(asked, f"a tensor map holds ints, not {type(item).__name__}", seen, hint))
    if not 0 <= axis < count:
        raise ValueError(explain(asked, f"the mesh has {count} axes", seen, hint))
    return axes.names[count - 1 - axis]
