"""The placement form: torch's placements, one per axis, read and written."""

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import placement_types as torch_types

from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.dtensor.forms import Reductions, read_reduction
from hyper_parallel.core.dtensor.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.core.dtensor.shards import Splits
from hyper_parallel.core.dtensor.strided import Spec, Specs, to_splits
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
            raise ValueError(explain(asked, blame, describe(axes, specs), hint))
        positive[axis] = (dim, spec[1])
    splits = to_splits(axes.sizes, tuple(positive), ndim)
    if isinstance(splits, int):
        spec = specs[splits]
        blame = f"no order of the axes gives {axes.names[splits]!r} the split factor {spec[1] if spec else 1}"
        hint = "a split factor that is the product of later axes on the same dim, or the alias form"
        raise ValueError(explain("cannot read strided placements", blame, describe(axes, specs), hint))
    return splits


def describe(axes: MeshAxes, specs: Specs) -> str:
    """Return the line of an error message that shows placements and their mesh."""
    return f"placements: ({source(specs, (None,) * len(specs))})   mesh: {axes}"
