"""Spellings of a layout: alias entries, reductions by axis name, tensor maps, dicts, and torch's placements.

Placements, one per axis, are read and written, and refused if torch contradicts itself about them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.tensor import placement_types as torch_types

from hyper_parallel.core.common.checks import check_int, read_int
from hyper_parallel.core.common.errors import InvalidType, InvalidValue, nearest
from hyper_parallel.core.dtensor.ownership import Spec, Specs, Splits, count_parts, is_even, to_splits
from hyper_parallel.core.dtensor.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.core.mesh.device_mesh import MeshAxes, describe_ranks, unknown_axis

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
            raise InvalidValue("cannot read a layout", blame, given, '"None" for a dim that is not split')
        order = []
        for name in names:
            axis = _read_axis(axes, name, dim, entry, given)
            if axis in used:
                blame = f"axis {name!r} already splits dim {used[axis]}"
                seen, hint = f"{given}   mesh: {axes}", '"None" in one of the two places'
                raise InvalidValue(f"cannot split dim {dim} over {name!r}", blame, seen, hint)
            used[axis] = dim
            order.append(axis)
        splits.append(tuple(order))
    return tuple(splits)


def _read_axis(axes: MeshAxes, name: object, dim: int, entry: object, given: str) -> int:
    asked = f"cannot split dim {dim} over {name!r}"
    if name is None or name == "None":
        blame = '"None" is no axis, so it cannot be one of several'
        loose = ", ".join(repr(part) for part in entry) if isinstance(entry, tuple | list) else ""
        raise InvalidValue(asked, blame, given, f"one entry per dim, without the inner brackets: ({loose})")
    if not isinstance(name, str):
        blame = f"an entry is an axis name, a tuple of names, or None, not a {type(name).__name__}"
        raise InvalidType(asked, blame, given, f'layout({axes.names[0]!r}, "None")')
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
        entries: the splits of the dims, in brackets.
        reductions: the pending reduction of each axis, or None.
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
    """Read `partial={"tp": "sum"}` into one reduction per axis, in addition to reductions of placements.

    >>> read_reductions(MeshAxes((2, 4), ("dp", "tp"), range(8)), {"tp": "sum"}, (None, None), (None, None))
    (None, 'sum')

    Args:
        axes: the mesh.
        partial: axis name -> "sum", "avg", "max", "min" or "prod"; None for nothing pending.
        specs: the dim and split factor of each axis.
        base: the reductions already known.

    Raises:
        ValueError: an axis that does not exist, that splits a dim too, or that is given two reductions; a reduction
            that does not exist.
    """
    if partial is None:
        return base
    given = f"partial: {partial!r}"
    result = list(base)
    for name, word in partial.items():
        asked = f"cannot leave a reduction pending over {name!r}"
        if name not in axes.names:
            raise unknown_axis(asked, name, axes, given)
        axis, seen = axes.index(name), f"{given}   mesh: {axes}"
        spec = specs[axis]
        if spec is not None:
            blame = f"axis {name!r} already splits dim {spec[0]}"
            raise InvalidValue(asked, blame, seen, f"{name!r} in one of the two places only")
        reduction = _read_reduction(axes, name, word, given)
        if result[axis] not in (None, reduction):
            blame = f"axis {name!r} has {result[axis]!r} pending by its placement and {reduction!r} by partial="
            raise InvalidValue(asked, blame, seen, "one of the two")
        result[axis] = reduction
    return tuple(result)


def _read_reduction(axes: MeshAxes, name: str, word: Any, given: str) -> str:
    """Return one of REDUCTIONS for a word, torch's "product" included.

    >>> _read_reduction(MeshAxes((2,), ("tp",), range(2)), "tp", "product", "")
    'prod'

    Raises:
        ValueError: no reduction has that name.
    """
    asked, seen = f"cannot leave a reduction pending over {name!r}", f"{given}   mesh: {axes}"
    hint = "one of " + ", ".join(map(repr, REDUCTIONS))
    if word == "product":
        return "prod"
    if word not in REDUCTIONS:
        raise InvalidValue(asked, f"no reduction is called {word!r}", seen, hint)
    return word


# -- tensor maps, whose axes are counted from the right, and dicts -----------------------------------------------------


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
        TypeError: an entry that is no int.
        ValueError: an axis out of range.
    """
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
        TypeError: an entry that is neither None nor a pair of ints.
        ValueError: a number of entries that is not the number of axes.
    """
    asked, seen = "cannot read a layout", f"placements: {placements!r}   mesh: {axes}"
    hint = "per axis None or (dim, split factor)"
    specs: list[Spec | None] = []
    for entry in placements:
        pair = tuple(check_int(item) for item in entry) if _is_list(entry) else ()
        if entry is None:
            specs.append(None)
        elif len(pair) == 2 and pair[0] is not None and pair[1] is not None and pair[1] > 0:
            specs.append((pair[0], pair[1]))
        else:
            raise InvalidType(asked, f"entry {len(specs)} of placements is {entry!r}", seen, hint)
    if len(specs) != len(axes.names):
        blame = f"placements has {len(specs)} entries for {len(axes.names)} axes"
        raise InvalidValue(asked, blame, seen, f"one for each of {', '.join(axes.names)}")
    return tuple(specs)


def read_dict(data: Any) -> Mapping[str, Any]:
    """Return data if it has the keys that `to_dict` writes.

    Raises:
        ValueError: a key that is missing or unknown.
    """
    asked = "cannot read a layout from a dict"
    seen = f"keys: {', '.join(map(str, data))}"
    for key in REQUIRED:
        if key not in data:
            raise InvalidValue(asked, f"key {key!r} is missing", seen, f"a dict with {' and '.join(REQUIRED)}")
    for key in data:
        if key not in REQUIRED + OPTIONAL:
            raise InvalidValue(asked, f"key {key!r} is unknown", seen, nearest(key, REQUIRED + OPTIONAL))
    return data


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _axis_name(axes: MeshAxes, item: object, dim: int, tensor_map: object) -> str:
    asked, seen = f"cannot split dim {dim} over axis {item!r}", f"tensor_map: {tensor_map!r}   mesh: {axes}"
    count = len(axes.names)
    hint = f"0 ({axes.names[-1]}) to {count - 1} ({axes.names[0]}), counted from the right, or -1"
    axis = read_int(asked, "an entry of the tensor map", item, hint=hint)
    if not 0 <= axis < count:
        raise InvalidValue(asked, f"the mesh has {count} axes", seen, hint)
    return axes.names[count - 1 - axis]


# torch's strided shard is private, and some versions derive it from Shard, so test for it first.
STRIDED: Any = getattr(torch_types, "_StridedShard", None) or getattr(torch_types, "StridedShard", None)


def is_strided(placement: object) -> bool:
    """Return True if a placement is torch's strided shard, whose parts are not contiguous in the dim."""
    return STRIDED is not None and isinstance(placement, STRIDED)


def is_placement(entry: object) -> bool:
    """Return True if an entry is one of torch's placements, or such a class, e.g. `Replicate` for `Replicate()`."""
    return isinstance(entry, Placement) or (isinstance(entry, type) and issubclass(entry, Placement))


def read_placements(axes: MeshAxes, placements: Sequence[object]) -> tuple[Specs, Reductions]:
    """Read one torch placement per axis into the split and the pending reduction of each axis.

    >>> read_placements(MeshAxes((2, 4), ("dp", "tp"), range(8)), (Shard(-1), Partial("product")))
    (((-1, 1), None), (None, 'prod'))

    Args:
        axes: the mesh.
        placements: torch's placements, one per axis.

    Raises:
        TypeError: a placement class that was not called, such as Replicate for Replicate().
        ValueError: alias entries among placements, a number of placements that is not the number of axes, or a
            placement that a layout cannot express.
    """
    given = f"placements: {tuple(placements)!r}   mesh: {axes}"
    asked = "cannot read a layout from placements"
    for place, entry in enumerate(placements):
        if isinstance(entry, type) and issubclass(entry, Placement):
            raise InvalidType(asked, f"entry {place} is the class {entry.__name__}", given, f"{entry.__name__}()")
        if not isinstance(entry, Placement):
            blame = f"entry {place}, {entry!r}, is no placement, and the two forms do not mix"
            raise InvalidValue(asked, blame, given, "names only (one per dim) or placements only (one per axis)")
    if len(placements) != len(axes.names):
        blame = f"there are {len(placements)} placements for {len(axes.names)} axes"
        raise InvalidValue(asked, blame, given, f"one for each of {', '.join(axes.names)}")
    specs: list[Spec | None] = []
    reductions: list[str | None] = []
    for name, size, placement in zip(axes.names, axes.sizes, placements, strict=True):
        spec, reduction = None, None
        if STRIDED is not None and isinstance(placement, STRIDED):
            spec = (int(placement.dim), int(placement.split_factor) if size > 1 else 1)
        elif isinstance(placement, Shard):
            spec = (int(placement.dim), 1)
        elif type(placement) is Partial:
            reduction = _read_reduction(axes, name, placement.reduce_op, f"placements: {tuple(placements)!r}")
        elif not isinstance(placement, Replicate):
            blame = f"{placement!r} on axis {name!r} carries more than a layout can say"
            raise InvalidValue(asked, blame, given, "x.redistribute(...), torch's own, first")
        specs.append(spec)
        reductions.append(reduction)
    return tuple(specs), tuple(reductions)


def write_placements(specs: Specs, reductions: Reductions) -> tuple[Placement, ...]:
    """Return torch's placements, one per axis.

    >>> write_placements(((0, 1), None, None), (None, "prod", None))
    (Shard(dim=0), Partial(product), Replicate())
    """
    placements: list[Placement] = []
    for spec, reduction in zip(specs, reductions, strict=True):
        if reduction is not None:
            placements.append(Partial("product" if reduction == "prod" else reduction))
        elif spec is None:
            placements.append(Replicate())
        else:
            placements.append(Shard(spec[0]) if spec[1] == 1 else STRIDED(spec[0], split_factor=spec[1]))
    return tuple(placements)


def source(specs: Specs, reductions: Reductions) -> str:
    """Return placements as source text, because torch's repr of a Partial is no valid source.

    >>> source(((0, 4), (0, 1), None), (None, None, "prod"))
    "_StridedShard(0, split_factor=4), Shard(0), Partial('product')"
    """
    words = []
    for spec, reduction in zip(specs, reductions, strict=True):
        if reduction is not None:
            words.append(f"Partial({('product' if reduction == 'prod' else reduction)!r})")
        elif spec is None:
            words.append("Replicate()")
        else:
            words.append(f"Shard({spec[0]})" if spec[1] == 1 else f"_StridedShard({spec[0]}, split_factor={spec[1]})")
    return ", ".join(words)


def resolve(axes: MeshAxes, specs: Specs, ndim: int) -> Splits:
    """Return, per dim of an ndim-D tensor, the axes that split it, outer first.

    >>> resolve(MeshAxes((2, 4), ("dp", "tp"), range(8)), ((-1, 4), (1, 1)), ndim=2)
    ((), (1, 0))

    Raises:
        ValueError: a dim out of range, or a split factor that no order of the axes gives.
    """
    positive = list(specs)
    for axis, spec in enumerate(specs):
        if spec is None:
            continue
        dim = spec[0] + ndim if spec[0] < 0 else spec[0]
        if not 0 <= dim < ndim:
            asked, blame = f"cannot split dim {spec[0]} over {axes.names[axis]!r}", f"the tensor has ndim {ndim}"
            hint = f"a dim from {-ndim} to {ndim - 1}" if ndim else "Replicate(); 0 dims cannot be split"
            raise InvalidValue(asked, blame, _seen(axes, specs), hint)
        positive[axis] = (dim, spec[1])
    splits = to_splits(axes.sizes, tuple(positive), ndim)
    if isinstance(splits, int):
        spec = specs[splits]
        blame = f"no order of the axes gives {axes.names[splits]!r} the split factor {spec[1] if spec else 1}"
        hint = "a split factor that is the product of later axes on the same dim, or the alias form"
        raise InvalidValue("cannot read strided placements", blame, _seen(axes, specs), hint)
    return splits


def _seen(axes: MeshAxes, specs: Specs) -> str:
    """Return the line of an error message that shows placements and their mesh."""
    return f"placements: ({source(specs, (None,) * len(specs))})   mesh: {axes}"


# -- DTensors ----------------------------------------------------------------------------------------------------------
# If several axes split one dim against mesh order, torch uses strided shards. They are right for even splits, but for
# uneven splits torch contradicts itself.


def read_dtensor(
    axes: MeshAxes,
    placements: Sequence[object],
    order: Sequence[tuple[int, Sequence[int]]] | None,
    shape: Sequence[int],
) -> tuple[Splits, Reductions]:
    """Return, for a DTensor, the axes that split each dim, outer first, and the pending reduction of each axis.

    Args:
        axes: its mesh.
        placements: torch's placements, one per axis.
        order: axes per dim in split order, which newer versions of torch keep beside plain placements; or None.
        shape: the full tensor's sizes, in elements.

    Raises:
        ValueError: a placement that a layout cannot express: a strided shard from a view or of an uneven size; a
            masked or bitwise partial.
    """
    specs, reductions = read_placements(axes, placements)
    splits = list(resolve(axes, specs, len(shape)))
    if order and not any(map(is_strided, placements)):
        for dim, chain in order:
            splits[dim] = tuple(chain)
    found = tuple(splits)
    check_even("cannot read the layout of a DTensor", axes, found, reductions, shape)
    return found, reductions


def check_even(asked: str, axes: MeshAxes, splits: Splits, reductions: Reductions, shape: Sequence[int]) -> None:
    """Refuse a dim that is split unevenly and against mesh order.

    Raises:
        ValueError: with four parts.
    """
    dim = uneven_dim(axes.sizes, splits, shape)
    if dim is None:
        return
    chain, size = splits[dim], shape[dim]
    names = [axes.names[axis] for axis in chain]
    parts = count_parts(axes.sizes, chain)
    fits = [str(fit) for fit in (size // parts * parts, -(-size // parts) * parts) if fit]
    order = tuple(name for name in axes.names if name in names)
    product = " * ".join(f"{axes.names[axis]}={axes.sizes[axis]}" for axis in chain)
    blame = (
        f"dim {dim} (size {size}) is split over {' then '.join(map(repr, names))}, against the order of the mesh, "
        f"and {product} does not divide it; torch places such a split in two ways that differ"
    )
    layout = describe(axes, describe_entries(axes, splits), reductions)
    seen = f"global_shape: {tuple(shape)!r}   layout: {layout}"
    hint = f"size {' or '.join(fits)} for dim {dim}; {order!r} there; or a mesh with its axes in the order of the split"
    raise InvalidValue(asked, blame, seen, hint)


def uneven_dim(sizes: Sequence[int], splits: Splits, shape: Sequence[int]) -> int | None:
    """Return the first dim whose split is uneven and against mesh order, if any; axes of size 1 split nothing.

    >>> uneven_dim((2, 4), ((1, 0), ()), (12, 3)), uneven_dim((2, 4), ((0, 1), ()), (12, 3))
    (0, None)
    """
    for dim, chain in enumerate(splits):
        real = [axis for axis in chain if sizes[axis] > 1]
        if real != sorted(real) and not is_even(shape[dim], sizes, chain):
            return dim
    return None
