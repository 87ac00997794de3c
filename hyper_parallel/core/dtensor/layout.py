"""Layouts: values that map each rank to its part of a tensor."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.checks import check, check_shape, read_int
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.dtensor import ownership, spelling
from hyper_parallel.core.dtensor.placement_types import Placement
from hyper_parallel.core.mesh.device_mesh import MeshAxes, axes_of, check_axes


class Layout:
    """The part of a tensor that each rank of a mesh holds: axis names and numbers only, never a process group.

    >>> layout = Layout((2, 4), ("dp", "tp"))  # a mesh, without an assignment yet
    >>> a = layout("dp", "None")  # alias form, one entry per dim: dim 0 is split over dp
    >>> a.local_shape((6, 5), rank=7), a.local_slice((6, 5), rank=7)
    ((3, 5), (slice(3, 6, None), slice(0, 5, None)))
    >>> layout(("tp", "dp"), "None")  # dim 0 split over tp, then each part over dp
    Layout((2, 4), ('dp', 'tp'))(('tp', 'dp'), 'None')
    >>> from hyper_parallel.core.dtensor.placement_types import Replicate, Shard
    >>> layout(Shard(0), Replicate()) == a  # placement form, one of torch's placements per axis
    True
    >>> layout("None", "None", partial={"tp": "sum"}).partial  # a sum over tp is pending
    {'tp': 'sum'}
    >>> layout().repeat_num()  # everything replicated
    8

    A layout never changes; methods return new ones. Two layouts are equal if they lie on the same mesh (names, sizes,
    ranks) and place every tensor that fits both in the same way, whatever their form. Trailing "None" entries and the
    position of an axis of size 1 on a dim do not count. A negative `Shard` dim depends on the tensor, so it equals only
    itself until `placement_to_tensor_map(ndim)` resolves it. A mesh without an assignment is not equal to `layout()`.
    `mesh` takes no part in equality, hash or pickling. Equal layouts can differ in their spelling (e.g.
    `alias_placements`, `tensor_map`): caches of the spelling need `placement_to_tensor_map(ndim)` and ndim as key.

    Dims beyond the entries are not split. More entries than dims are an error wherever a shape or ndim is given.

    Args:
        shape: ranks along each axis, each at least 1.
        names: one name per axis.
        rank_list: the rank at each mesh position, last axis fastest. Default: 0, 1, 2, ...

    Raises:
        TypeError: a size or rank that is no int, a name that is no str, a value that is no sequence.
        ValueError: no axes, a size below 1, a name that is "" or "None" or repeated, names and shape of different
            length, ranks of the wrong number, repeated or negative.
    """

    __slots__ = ("_axes", "_hash", "_mesh", "_partial", "_specs", "_splits")

    _axes: MeshAxes
    _splits: ownership.Splits | None  # alias form: per dim, the axes that split it, outer first
    _specs: ownership.Specs | None  # both forms: per axis, its dim; None without an assignment
    _partial: spelling.Reductions
    _mesh: DeviceMesh | None
    _hash: int

    def __init__(self, shape: Sequence[int], names: Sequence[str], rank_list: Sequence[int] | None = None) -> None:
        self._fill(check_axes(shape, names, rank_list))

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> "Layout":
        """Return the layout of torch's DeviceMesh, without an assignment; its `mesh` is the DeviceMesh.

        A mesh without names gets the axis names "axis0", "axis1", ...

        Args:
            mesh: the mesh, or a slice of one (then the layout lies on this rank's slice).

        Raises:
            TypeError: not a DeviceMesh.
            ValueError: an axis name that a layout cannot have.
        """
        return cls._make(axes_of(mesh), mesh=mesh)

    @classmethod
    def from_entries(cls, mesh: DeviceMesh, entries: tuple[Any, ...]) -> "Layout":
        """Return `Layout.from_device_mesh(mesh)(*entries)`; equal entries are read once.

        Raises:
            TypeError: entries that cannot be hashed, e.g. a list; also as for a call of a layout.
            ValueError: as for a call of a layout.
        """
        known = _read_entries(axes_of(mesh), entries)
        return cls._make(known._axes, known._splits, known._specs, known._partial, mesh)

    @classmethod
    def of(cls, x: Any) -> "Layout":
        """Return the layout of a DTensor, in alias form with one entry per dim, without communication.

            layout = Layout.of(x)
            layout.alias_placements, layout.mesh

        Args:
            x: a DTensor; on a mesh without names, its axes are called "axis0", "axis1", ...

        Raises:
            TypeError: not a DTensor.
            ValueError: a placement that a layout cannot express: a strided shard from a view or of an uneven size;
                a masked or bitwise partial.
        """
        check("cannot read a layout", "DTensor", x=x)
        return cls.of_spec(x._spec)

    @classmethod
    def of_spec(cls, spec: Any) -> "Layout":
        """Return the layout of DTensors with this DTensorSpec, as `of` does."""
        known = _read_spec(axes_of(spec.mesh), spec.placements, getattr(spec, "shard_order", None), spec.shape)
        return cls._make(known._axes, known._splits, known._specs, known._partial, spec.mesh)

    def __call__(self, *entries: Any, partial: Mapping[str, str] | None = None) -> "Layout":
        """Return the layout on the same mesh with this assignment, which replaces any other.

        >>> layout = Layout((2, 4), ("dp", "tp"))
        >>> layout(("dp", "tp"))  # a 1-D tensor split over dp, then tp
        Layout((2, 4), ('dp', 'tp'))(('dp', 'tp'))

        Args:
            entries: one per dim: an axis name, a tuple of names (outer first), or "None" or None; or one of torch's
                placements per axis, also as one tuple. Without entries everything is replicated.
            partial: pending reductions: axis name -> "sum", "avg", "max", "min" or "prod".

        Raises:
            TypeError: an entry of another type.
            ValueError: an axis that does not exist, is used twice, or both splits and is partial; the two forms mixed;
                a number of placements that is not the number of axes; a reduction that does not exist.
        """
        if len(entries) == 1 and isinstance(entries[0], tuple | list) and any(map(spelling.is_placement, entries[0])):
            entries = tuple(entries[0])
        axes, splits = self._axes, None
        reductions: spelling.Reductions = (None,) * len(axes.sizes)
        if any(map(spelling.is_placement, entries)):
            specs, reductions = spelling.read_placements(axes, entries)
            if all(spec is None or spec[0] >= 0 for spec in specs):  # refuses an impossible order at once
                spelling.resolve(axes, specs, max((spec[0] + 1 for spec in specs if spec), default=0))
        else:
            splits = spelling.read_alias(axes, entries)
            specs = ownership.to_specs(axes.sizes, splits)
        return self._with(splits, specs, spelling.read_reductions(axes, partial, specs, reductions))

    @property
    def axes(self) -> MeshAxes:
        """The mesh as a value: its axes and its ranks."""
        return self._axes

    @property
    def is_assigned(self) -> bool:
        """True if it assigns tensors to ranks; False for a mesh only."""
        return self._specs is not None

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Ranks along each axis."""
        return self._axes.sizes

    @property
    def alias_name(self) -> tuple[str, ...]:
        """The axis names."""
        return self._axes.names

    @property
    def rank_list(self) -> tuple[int, ...]:
        """The rank at each mesh position, last axis fastest."""
        return tuple(self._axes.ranks)

    @property
    def mesh(self) -> DeviceMesh | None:
        """torch's DeviceMesh, if the layout was made from one; pickling drops it."""
        return self._mesh

    @property
    def alias_placements(self) -> tuple[str | tuple[str, ...], ...] | None:
        """One entry per dim: "None", an axis name or a tuple of names; None before an assignment in alias form.

        >>> Layout((2, 4), ("dp", "tp"))(("tp", "dp"), None).alias_placements
        (('tp', 'dp'), 'None')
        """
        return None if self._splits is None else spelling.write_alias(self._axes, self._splits)

    @property
    def placements(self) -> tuple[Placement, ...] | None:
        """torch's placements, one per axis; None before an assignment.

        >>> Layout((2, 4), ("dp", "tp"))("tp", "None", partial={"dp": "prod"}).placements
        (Partial(product), Shard(dim=0))

        A dim split against mesh order gives torch's strided shards, which are right for even splits.
        `convert.to_placements` also checks for uneven splits and for other limits of a DTensor.
        """
        return None if self._specs is None else spelling.write_placements(self._specs, self._partial)

    @property
    def tensor_map(self) -> tuple[int | tuple[int, ...], ...] | None:
        """Axis that splits each dim, counted from the right; None before an assignment in alias form.

        >>> Layout((2, 2, 4), ("pp", "dp", "tp"))("tp", "None", ("pp", "dp")).tensor_map
        (0, -1, (2, 1))

        The last axis is 0. A dim that is not split has -1. A dim split by several axes has a tuple, outer first.
        """
        return None if self._splits is None else spelling.to_tensor_map(len(self._axes.sizes), self._splits)

    def placement_to_tensor_map(self, ndim: int) -> "Layout":
        """Return the same layout in alias form for tensors of ndim dims, with `tensor_map` filled in.

        >>> from hyper_parallel.core.dtensor.placement_types import Replicate, Shard
        >>> Layout((2, 4), ("dp", "tp"))(Shard(-1), Replicate()).placement_to_tensor_map(2).tensor_map
        (-1, 1)

        Args:
            ndim: dims of the tensor; further dims of a layout in alias form get "None".

        Raises:
            TypeError: ndim is no int.
            ValueError: no assignment yet, more entries than ndim, a `Shard` dim out of range.
        """
        splits = self.splits(ndim)
        return self._with(splits, ownership.to_specs(self._axes.sizes, splits), self._partial)

    def tensor_map_to_placement(self) -> "Layout":
        """Return the same layout in placement form, the inverse of `placement_to_tensor_map`.

        >>> Layout((2, 4), ("dp", "tp"))("tp", "None").tensor_map_to_placement()
        Layout((2, 4), ('dp', 'tp'))(Replicate(), Shard(0))

        Raises:
            ValueError: no assignment yet.
        """
        return self._with(None, self._assigned("write placements"), self._partial)

    @property
    def partial(self) -> dict[str, str]:
        """Pending reductions: axis name -> "sum", "avg", "max", "min" or "prod", in mesh order."""
        pairs = zip(self._axes.names, self._partial, strict=True)
        return {name: reduction for name, reduction in pairs if reduction is not None}

    def is_partial(self) -> bool:
        """Return True if any reduction is pending."""
        return any(self._partial)

    def reset_partial(self) -> "Layout":
        """Return the same layout without pending reductions.

        >>> Layout((2, 4), ("dp", "tp"))("dp", partial={"tp": "sum"}).reset_partial()
        Layout((2, 4), ('dp', 'tp'))('dp')
        """
        return self._with(self._splits, self._specs, (None,) * len(self._partial))

    def repeat_num(self) -> int:
        """Return the number of ranks with the same data: the product of the axes that neither split nor are partial.

        >>> Layout((2, 3, 4), ("pp", "dp", "tp"))("tp", partial={"pp": "sum"}).repeat_num()
        3

        Raises:
            ValueError: no assignment yet.
        """
        rows = zip(self._axes.sizes, self._assigned("count replicas"), self._partial, strict=True)
        return math.prod(size for size, spec, reduction in rows if spec is None and reduction is None)

    def splits(self, ndim: int) -> ownership.Splits:
        """Return, per dim of an ndim-D tensor, the axes that split it as indices from the left, outer first.

        >>> Layout((2, 4), ("dp", "tp"))(("tp", "dp")).splits(3)
        ((1, 0), (), ())

        Args:
            ndim: dims of the tensor.

        Raises:
            TypeError: ndim is no int.
            ValueError: no assignment yet, more entries than ndim, a `Shard` dim out of range.
        """
        specs = self._assigned("place a tensor")
        ndim = read_int("cannot place a tensor", "ndim", ndim, 0, "ndim=tensor.ndim")
        if self._splits is None:
            return spelling.resolve(self._axes, specs, ndim)
        if len(self._splits) > ndim:
            entry = spelling.write_alias(self._axes, self._splits)[ndim]
            said = "not split" if entry == "None" else repr(entry)  # a command line may spell it "-"
            blame = f"entry {ndim}, {said}, is for a dim that a tensor of ndim {ndim} does not have"
            raise InvalidValue("cannot place a tensor", blame, self._describe(), "one entry per dim at most")
        return self._splits + ((),) * (ndim - len(self._splits))

    def local_shape(self, global_shape: Sequence[int], rank: int | None = None) -> tuple[int, ...]:
        """Return the shape of a rank's part.

        >>> layout = Layout((4,), ("dp",))("dp", "None")
        >>> [layout.local_shape((5, 3), rank) for rank in range(4)]  # ceil(5 / 4) = 2 rows, then what is left
        [(2, 3), (2, 3), (1, 3), (0, 3)]

        Args:
            global_shape: the full tensor's sizes, in elements.
            rank: a rank on the mesh. Default: the calling rank.

        Raises:
            TypeError: a size or rank that is no int.
            ValueError: no assignment yet, more entries than dims, a negative size, a rank outside of the mesh, no rank
                given and no process group.
        """
        return tuple(part.stop - part.start for part in self.local_slice(global_shape, rank))

    def local_slice(self, global_shape: Sequence[int], rank: int | None = None) -> tuple[slice, ...]:
        """Return a rank's part as one `slice` per dim, e.g. for `full[layout.local_slice(shape)]`.

        >>> Layout((2, 2), ("dp", "tp"))(("tp", "dp")).local_slice((8,), rank=1)  # dp 0, tp 1
        (slice(4, 6, None),)

        An empty part starts and stops at the end of the part that it was split from. Arguments and errors are the
        same as for `local_shape`.
        """
        shape = check_shape(global_shape)
        splits = self.splits(len(shape))
        position = self._axes.position(self._read_rank(rank))
        return ownership.one_slice(shape, self._axes.sizes, splits, self._axes.coordinates(position))

    def _read_rank(self, rank: int | None) -> int:
        asked, hint = "cannot tell which shard a rank holds", f"rank={self._axes.ranks[0]}"
        if rank is not None:
            return read_int(asked, "rank", rank, hint=hint)
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank()
        blame = "no rank was given and torch.distributed is not initialized"
        raise InvalidValue(asked, blame, self._describe(), hint)

    def slices(self, global_shape: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return start and stop of every dim on every rank, as an array of ranks x dims x 2.

        >>> Layout((2, 2), ("dp", "tp"))("dp", "tp").slices((4, 3)).tolist()
        [[[0, 2], [0, 2]], [[0, 2], [2, 3]], [[2, 4], [0, 2]], [[2, 4], [2, 3]]]

        Row i belongs to rank `rank_list[i]`. 100,000 ranks take milliseconds.

        Args:
            global_shape: the full tensor's sizes, in elements.

        Raises:
            TypeError: a size that is no int.
            ValueError: no assignment yet, more entries than dims, a negative size.
        """
        shape = check_shape(global_shape)
        return ownership.all_slices(shape, self._axes.sizes, self.splits(len(shape)))

    def with_mesh(self, mesh: DeviceMesh | None) -> "Layout":
        """Return the same layout with this DeviceMesh as its `mesh`, e.g. after unpickling; None: without one.

        Raises:
            TypeError: not a DeviceMesh.
            ValueError: the mesh has other names, sizes or ranks.
        """
        if mesh is not None and axes_of(mesh) != self._axes:
            seen = f"{self._describe()}   given: {Layout._make(axes_of(mesh))}"
            blame = "mesh has other axes or ranks than the layout"
            raise InvalidValue("cannot put a layout on a mesh", blame, seen, "the mesh that it was made for")
        return self._make(self._axes, self._splits, self._specs, self._partial, mesh)

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as plain tuples, ints and strings; `from_dict` reads it back, also after JSON.

        >>> Layout((2,), ("dp",))("dp", "None").to_dict()
        {'mesh_shape': (2,), 'tensor_map': (0, -1), 'alias_name': ('dp',), 'rank_list': (0, 1), 'partial': {}}

        A layout in placement form has no tensor map; it adds "placements", per axis the dim and torch's split factor.
        """
        result: dict[str, Any] = {
            "mesh_shape": self.mesh_shape,
            "tensor_map": self.tensor_map,
            "alias_name": self.alias_name,
            "rank_list": self.rank_list,
            "partial": self.partial,
        }
        return {**result, "placements": self._specs} if self._splits is None and self._specs is not None else result

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Layout":
        """Read a layout from the dict of `to_dict`.

        >>> layout = Layout((2, 4), ("dp", "tp"))(("tp", "dp"), "None")
        >>> Layout.from_dict(layout.to_dict()) == layout
        True

        Args:
            data: "mesh_shape" and "alias_name"; "tensor_map", "rank_list" and "partial" may be left out.

        Raises:
            TypeError: a value of the wrong type.
            ValueError: a key that is missing or unknown, or a value that makes no layout.
        """
        fields = spelling.read_dict(data)
        mesh = cls(fields["mesh_shape"], fields["alias_name"], fields.get("rank_list"))
        partial = fields.get("partial")
        if fields.get("placements") is not None:
            specs = spelling.read_specs(mesh._axes, fields["placements"])
            return mesh(*spelling.write_placements(specs, mesh._partial), partial=partial)
        if fields.get("tensor_map") is None:
            return mesh
        return mesh(*spelling.read_tensor_map(mesh._axes, fields["tensor_map"]), partial=partial)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        mine, theirs = (self._hash, self._specs, self._partial), (other._hash, other._specs, other._partial)
        return mine == theirs and self._axes == other._axes

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        ranks = "" if self._axes.has_default_ranks else f", {self._axes.ranks!r}"
        head = f"Layout({self.mesh_shape!r}, {self.alias_name!r}{ranks})"
        if self._specs is None:
            return head
        if self._splits is None:
            return f"{head}({spelling.source(self._specs, self._partial)})"
        words = [repr(entry) for entry in spelling.write_alias(self._axes, self._splits)]
        words += [f"partial={self.partial!r}"] if self.is_partial() else []
        return f"{head}({', '.join(words)})"

    def __str__(self) -> str:
        return spelling.describe(self._axes, self._short(), self._partial)

    def __setattr__(self, name: str, value: object) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}: a Layout never changes")

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}: a Layout never changes")

    def __copy__(self) -> "Layout":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Layout":
        return self

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (Layout._make, (self._axes, self._splits, self._specs, self._partial))

    @classmethod
    def _make(
        cls,
        axes: MeshAxes,
        splits: ownership.Splits | None = None,
        specs: ownership.Specs | None = None,
        partial: spelling.Reductions | None = None,
        mesh: DeviceMesh | None = None,
    ) -> "Layout":
        layout = cls.__new__(cls)
        layout._fill(axes, splits, specs, partial, mesh)
        return layout

    def _fill(
        self,
        axes: MeshAxes,
        splits: ownership.Splits | None = None,
        specs: ownership.Specs | None = None,
        partial: spelling.Reductions | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        partial = partial or (None,) * len(axes.sizes)
        values = {"_axes": axes, "_splits": splits, "_specs": specs, "_partial": partial, "_mesh": mesh}
        for name, value in {**values, "_hash": hash((axes, specs, partial))}.items():
            object.__setattr__(self, name, value)

    def _with(
        self, splits: ownership.Splits | None, specs: ownership.Specs | None, partial: spelling.Reductions
    ) -> "Layout":
        return self._make(self._axes, splits, specs, partial, self._mesh)

    def _assigned(self, what: str) -> ownership.Specs:
        if self._specs is None:
            asked, blame = f"cannot {what}", "the layout is a mesh without an assignment"
            hint = f'layout("{self.alias_name[0]}", "None"), or layout() for everything replicated'
            raise InvalidValue(asked, blame, self._describe(), hint)
        return self._specs

    def _describe(self) -> str:
        return f"layout: {self._short()}   mesh: {self._axes}"

    def _short(self) -> str:
        if self._specs is None:
            return "(no assignment)"
        if self._splits is None:
            return f"({spelling.source(self._specs, (None,) * len(self._specs))})"
        return spelling.describe_entries(self._axes, self._splits)


@lru_cache(maxsize=4096)
def _read_spec(
    axes: MeshAxes, given: tuple[Placement, ...], order: Sequence[tuple[int, Sequence[int]]] | None, shape: Any
) -> Layout:
    """Read placements into a layout without a DeviceMesh, because the cache would keep the mesh alive."""
    splits, reductions = spelling.read_dtensor(axes, given, order, shape)
    return Layout._make(axes, splits, ownership.to_specs(axes.sizes, splits), reductions)


@lru_cache(maxsize=4096)
def _read_entries(axes: MeshAxes, entries: tuple[Any, ...]) -> Layout:
    """Read entries into a layout without a DeviceMesh, because the cache would keep the mesh alive."""
    return Layout._make(axes)(*entries)
