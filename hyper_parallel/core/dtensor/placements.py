"""Placements of torch, one per axis: read, written, and refused where torch contradicts itself."""

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import placement_types as torch_types

from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.dtensor.ownership import Spec, Specs, Splits, count_parts, is_even, to_splits
from hyper_parallel.core.dtensor.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.core.dtensor.spelling import Reductions, describe, describe_entries, read_reduction
from hyper_parallel.core.mesh.axes import MeshAxes

# torch keeps its strided shard private, and some versions derive it from Shard: look for it first.
STRIDED: Any = getattr(torch_types, "_StridedShard", None) or getattr(torch_types, "StridedShard", None)


def is_strided(placement: object) -> bool:
    """Return whether a placement is torch's shard of parts that do not lie side by side."""
    return STRIDED is not None and isinstance(placement, STRIDED)


def is_placement(entry: object) -> bool:
    """Return whether an entry is one of torch's placements, or such a class that was never called."""
    return isinstance(entry, Placement) or (isinstance(entry, type) and issubclass(entry, Placement))


def read_placements(axes: MeshAxes, placements: Sequence[object]) -> tuple[Specs, Reductions]:
    """Read one torch placement per axis into what each axis splits and what is pending on it.

    >>> read_placements(MeshAxes((2, 4), ("dp", "tp"), range(8)), (Shard(-1), Partial("product")))
    (((-1, 1), None), (None, 'prod'))

    Args:
        axes: the mesh.
        placements: torch's placements, one per axis.

    Raises:
        TypeError: a placement class that was not called, such as Replicate for Replicate().
        ValueError: alias entries among placements, a number of placements that is not the number of axes, or a
            placement that carries more than a layout can say.
    """
    given = f"placements: {tuple(placements)!r}   mesh: {axes}"
    asked = "cannot read a layout from placements"
    for place, entry in enumerate(placements):
        if isinstance(entry, type) and issubclass(entry, Placement):
            raise TypeError(
                explain(asked, f"entry {place} is the class {entry.__name__}", given, f"{entry.__name__}()")
            )
        if not isinstance(entry, Placement):
            blame = f"entry {place}, {entry!r}, is no placement, and the two forms do not mix"
            raise ValueError(explain(asked, blame, given, "names only (one per dim) or placements only (one per axis)"))
    if len(placements) != len(axes.names):
        blame = f"there are {len(placements)} placements for {len(axes.names)} axes"
        raise ValueError(explain(asked, blame, given, f"one for each of {', '.join(axes.names)}"))
    specs: list[Spec | None] = []
    reductions: list[str | None] = []
    for name, size, placement in zip(axes.names, axes.sizes, placements, strict=True):
        spec, reduction = None, None
        if STRIDED is not None and isinstance(placement, STRIDED):
            spec = (int(placement.dim), int(placement.split_factor) if size > 1 else 1)
        elif isinstance(placement, Shard):
            spec = (int(placement.dim), 1)
        elif type(placement) is Partial:
            reduction = read_reduction(axes, name, placement.reduce_op, f"placements: {tuple(placements)!r}")
        elif not isinstance(placement, Replicate):
            blame = f"{placement!r} on axis {name!r} carries more than a layout can say"
            raise ValueError(explain(asked, blame, given, "x.redistribute(...), torch's own, first"))
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
    """Return placements as source text; torch's own repr of a Partial does not paste back.

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
            raise ValueError(explain(asked, blame, _seen(axes, specs), hint))
        positive[axis] = (dim, spec[1])
    splits = to_splits(axes.sizes, tuple(positive), ndim)
    if isinstance(splits, int):
        spec = specs[splits]
        blame = f"no order of the axes gives {axes.names[splits]!r} the split factor {spec[1] if spec else 1}"
        hint = "a split factor that is the product of later axes on the same dim, or the alias form"
        raise ValueError(explain("cannot read strided placements", blame, _seen(axes, specs), hint))
    return splits


def _seen(axes: MeshAxes, specs: Specs) -> str:
    """Return the line of an error message that shows placements and their mesh."""
    return f"placements: ({source(specs, (None,) * len(specs))})   mesh: {axes}"


# -- DTensors ----------------------------------------------------------------------------------------------------------
# Where several axes split one dim against mesh order, torch writes strided shards; they are right when the split is
# even, and torch contradicts itself when it is not.


def read_dtensor(
    axes: MeshAxes,
    placements: Sequence[object],
    order: Sequence[tuple[int, Sequence[int]]] | None,
    shape: Sequence[int],
) -> tuple[Splits, Reductions]:
    """Return, for a DTensor, the axes that split each dim, outer first, and what is pending on each axis.

    Args:
        axes: its mesh.
        placements: torch's placements, one per axis.
        order: the order that newer versions of torch keep beside plain placements: a dim, and its axes.
        shape: the full tensor's sizes, in elements.

    Raises:
        ValueError: a placement that a layout cannot say: a strided shard that comes from a view, or of an uneven size;
            a masked or bitwise partial.
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
    raise ValueError(explain(asked, blame, seen, hint))


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
