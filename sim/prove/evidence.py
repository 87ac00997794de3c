"""Local tensors and the full tensor, checked once and ready to be compared under any layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hyper_parallel.core.common.errors import InvalidType, InvalidValue
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.ownership import Splits, all_slices, mesh_lines
from hyper_parallel.core.dtensor.text import parse_mesh
from hyper_parallel.core.machine import find_machine
from hyper_parallel.platform.accelerator import CudaPlatform, NpuPlatform

all_boxes = lru_cache(maxsize=1024)(all_slices)  # the same few shapes are tried under the same splits over and over


def combine(kind: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Take one step of a reduction; an average is a sum, divided later."""
    if kind in ("sum", "avg"):
        return left + right
    if kind == "prod":
        return left * right
    return torch.maximum(left, right) if kind == "max" else torch.minimum(left, right)


def divided(total: torch.Tensor, divisor: int) -> torch.Tensor:
    """Divide a sum, exactly where whole numbers divide without a rest."""
    if divisor == 1:
        return total
    if not (total.is_floating_point() or total.is_complex()) and not bool((total % divisor).any()):
        return total // divisor
    return total / divisor


def gap(part: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Return |part - want| elementwise: 0 where both are NaN or the same infinity, inf where one of them is."""
    work = torch.promote_types(_narrow(part.dtype), _narrow(want.dtype))
    if not (work.is_floating_point or work.is_complex):
        unequal = part != want
        off = (part.to(torch.float64) - want.to(torch.float64)).abs()
        return torch.where(unequal, off.clamp(min=1.0), 0.0)
    part, want = part.to(work), want.to(work)
    off = (part - want).abs()
    if off.numel() and not math.isfinite(float(off.max())):
        same = (part == want) | (part.isnan() & want.isnan())
        off = torch.where(same, torch.zeros_like(off), torch.where(off.isnan(), math.inf, off))
    return off


def machine_words(machine: object, ranks: int) -> list[str]:
    """Say that plans are those of one node, where no machine is named and none of the usual ones has so many ranks."""
    usual = (find_machine(kind.usual_machine).devices_per_node for kind in (CudaPlatform, NpuPlatform))
    note = "redistributions are planned for one unnamed node; machine= or --hardware names what the ranks stand for"
    return [note] if machine is None and ranks > max(usual) else []


@cache
def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of one rounding to nearest in a dtype; 0 for whole numbers and booleans.

    >>> unit_roundoff(torch.float32) == 2**-24, unit_roundoff(torch.bfloat16) == 2**-8, unit_roundoff(torch.int32)
    (True, True, 0.0)
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return torch.finfo(dtype).eps / 2


def top(off: torch.Tensor) -> float:
    """Return the largest of some differences; 0 of none."""
    return float(off.max()) if off.numel() else 0.0


def ratio_of(error: float, limit: float) -> float:
    """Return error / limit, where 0 / 0 is 0.

    >>> ratio_of(1.0, 4.0), ratio_of(0.0, 0.0), ratio_of(1.0, 0.0)
    (0.25, 0.0, inf)
    """
    if error <= limit:  # also 0 / 0 and inf / inf
        return error / limit if 0 < limit < math.inf else 0.0
    return error / limit if limit else math.inf


def ratios(off: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Return off / limit elementwise, where 0 / 0 is 0."""
    return torch.where(off == 0, 0.0, off.to(torch.float64) / limit)


def magnitude(tensor: torch.Tensor) -> float:
    """Return the largest finite |element|; 0 of none."""
    if not tensor.numel():
        return 0.0
    if tensor.is_floating_point():
        size = float(torch.linalg.vector_norm(tensor, math.inf))  # in one pass, which copies nothing
    else:
        size = float((tensor.abs() if tensor.dtype != torch.bool else tensor.to(torch.uint8)).max())
    if math.isfinite(size):
        return size
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def largest(full: torch.Tensor) -> float:
    """Return the magnitude of what rounding can move; 0 of whole numbers and booleans."""
    return magnitude(full) if full.is_floating_point() else 0.0


def _narrow(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which differences are taken: half precision would round them."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return torch.complex64 if dtype == torch.complex32 else dtype


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which reductions are taken, so that they add no rounding of their own."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


Parts: TypeAlias = Mapping[int, torch.Tensor] | Sequence[torch.Tensor]
Mesh: TypeAlias = Layout | DeviceMesh | Mapping[str, int] | str
Bound: TypeAlias = float | torch.Tensor | None
Pending: TypeAlias = tuple[tuple[int, str], ...]
"""Axes with a reduction still to be taken, in mesh order: axis index and the reduction."""

Worst: TypeAlias = tuple[float, float, int]
"""The worst difference, the worst ratio to the bound, and the mesh position that has it."""

_SAFETY = 8
"""What the default bound leaves room for besides the roundings that it counts."""


# -- local tensors and the full one ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Evidence:
    """What the ranks hold and the full tensor, read once and ready to be compared in many ways."""

    mesh: Layout
    parts: list[torch.Tensor]  # by mesh position, last axis fastest
    full: torch.Tensor
    bound: float | torch.Tensor | None
    unit: float = field(default=0.0)  # unit roundoff of what is compared; 0 for whole numbers, which must agree exactly

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks along each axis."""
        return self.mesh.mesh_shape

    @property
    def names(self) -> tuple[str, ...]:
        """The axis names."""
        return self.mesh.alias_name

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank at each mesh position."""
        return self.mesh.rank_list

    @property
    def exact(self) -> bool:
        """Whether every difference counts, as it does for whole numbers and booleans."""
        return self.unit == 0

    @cached_property
    def size(self) -> float:
        """The largest finite magnitude in the full tensor."""
        return magnitude(self.full)

    @cached_property
    def part_sizes(self) -> list[float]:
        """The largest finite magnitude in each part."""
        return [magnitude(part) for part in self.parts]

    def groups(self, pending: Pending) -> npt.NDArray[np.int64]:
        """Mesh positions, one row per result of the pending reductions."""
        return mesh_lines(self.sizes, [axis for axis, _ in pending])

    def divisor(self, pending: Pending) -> int:
        """By how much the sum of the copies is divided: the size of the axes that an average is pending over."""
        return math.prod(self.sizes[axis] for axis, kind in pending if kind == "avg")

    def limit(self, pending: Pending) -> float | torch.Tensor:
        """The bound for parts that are compared after these reductions."""
        if self.exact:
            return 0.0
        if self.bound is not None:
            return self.bound
        groups, size = self.groups(pending), self.size
        if any(kind in ("sum", "avg") for _, kind in pending):
            sums = [sum(self.part_sizes[position] for position in group) for group in groups.tolist()]
            size = max(size, max(sums) / self.divisor(pending))
        tiny = torch.finfo(torch.float32).tiny if self.unit > 2**-53 else torch.finfo(torch.float64).tiny
        return max(_SAFETY * (groups.shape[1] + 1) * self.unit * size, tiny)

    def reduced(self, group: Sequence[int], pending: Pending) -> torch.Tensor:
        """Take the pending reductions over the parts at these positions, in float64."""
        first = self.parts[group[0]]
        if not pending:
            return first
        dtype = wide(first.dtype)
        total = first.to(dtype)
        kind = pending[0][1]
        for position in group[1:]:
            total = combine(kind, total, self.parts[position].to(dtype))
        return divided(total, self.divisor(pending))

    def box(self, boxes: npt.NDArray[np.int64], position: int) -> tuple[slice, ...]:
        """The part of the full tensor that belongs to a mesh position."""
        return tuple(slice(start, stop) for start, stop in boxes[position].tolist())

    def worst(self, splits: Splits, pending: Pending, stop: bool = False) -> Worst:
        """Compare all parts, which have the right shapes: worst difference, worst ratio, and its mesh position.

        With `stop`, no part is compared after one that does not fit.
        """
        boxes, limit = all_boxes(self.full.shape, self.sizes, splits), self.limit(pending)
        error, ratio, where = 0.0, 0.0, 0
        for group in self.groups(pending).tolist():
            box = self.box(boxes, group[0])
            off = gap(self.reduced(group, pending), self.full[box])
            found = top(off)
            against = ratio_of(found, limit) if not isinstance(limit, torch.Tensor) else top(ratios(off, limit[box]))
            error = max(error, found)
            if against > ratio:
                ratio, where = against, group[0]
            if stop and ratio > 1:
                break
        return error, ratio, where


# -- reading what the caller gave --------------------------------------------------------------------------------------


def read(asked: str, locals: Parts, reference: torch.Tensor, mesh: Mesh, bound: Bound) -> Evidence:
    """Check everything a caller can get wrong, and return it ready to be compared.

    Raises:
        TypeError, ValueError: as `infer_layout` says.
    """
    layout = read_mesh(asked, mesh)
    full = _tensor(asked, reference, "reference")
    if isinstance(reference, DTensor):
        blame = "reference is a DTensor, and should be the full tensor"
        raise InvalidType(asked, blame, f"reference: {tuple(reference.shape)}", "reference.full_tensor()")
    parts = [_part(asked, locals, rank, layout) for rank in layout.rank_list]
    unit = max(unit_roundoff(part.dtype) for part in (full, *parts))
    return Evidence(layout, parts, full, _bound(asked, bound, full), unit)


def read_mesh(asked: str, mesh: object) -> Layout:
    """Return a mesh as a `Layout`.

    >>> read_mesh("cannot do it", {"dp": 2, "tp": 4}) == read_mesh("cannot do it", "dp=2,tp=4")
    True

    Raises:
        TypeError: a value that is no mesh.
        ValueError: text or sizes that make none.
    """
    if isinstance(mesh, Layout):
        return mesh
    if isinstance(mesh, str):
        return parse_mesh(mesh)
    if isinstance(mesh, Mapping):
        return Layout(tuple(mesh.values()), tuple(mesh))
    if isinstance(mesh, DeviceMesh):
        return Layout.from_device_mesh(mesh)
    blame = f"mesh is a {type(mesh).__name__}"
    raise InvalidType(asked, blame, f"mesh: {mesh!r}", '{"dp": 2, "tp": 4}, a Layout or a DeviceMesh')


def _part(asked: str, locals: Any, rank: int, layout: Layout) -> torch.Tensor:
    if isinstance(locals, torch.Tensor) or not isinstance(locals, (Mapping, Sequence)):
        blame = f"locals is a {type(locals).__name__}, not one tensor per rank"
        raise InvalidType(asked, blame, f"mesh: {layout}", "what sim.run returned, or {rank: tensor}")
    try:
        part = locals[rank]
    except (KeyError, IndexError):
        held = f"{len(locals)} tensors for {len(layout.rank_list)} ranks"
        blame = f"locals has none for rank {rank} of the mesh"
        raise InvalidValue(asked, blame, f"locals: {held}   mesh: {layout}", "one tensor per rank") from None
    return _tensor(asked, part, f"locals[{rank}]")


def _tensor(asked: str, value: object, name: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        blame = f"{name} is a {type(value).__name__}, not a tensor"
        raise InvalidType(asked, blame, f"{name}: {str(value)[:60]}", "torch.as_tensor(value)")
    tensor: torch.Tensor = value._local_tensor if isinstance(value, DTensor) else value
    tensor = tensor.detach()
    if tensor.is_meta:
        raise InvalidValue(asked, f"{name} is on meta and has no values", f"{name}: {value.shape}", "cpu")
    tensor = tensor.cpu() if tensor.device.type != "cpu" else tensor
    return tensor.to(torch.float32) if tensor.dtype.is_floating_point and tensor.element_size() == 1 else tensor


def _bound(asked: str, bound: Any, full: torch.Tensor) -> float | torch.Tensor | None:
    if bound is None:
        return None
    limit = torch.as_tensor(bound, dtype=torch.float64).detach()
    if not bool((limit >= 0).all()):
        hint = "bound.abs(), or bound=0.0 for exact equality"
        raise InvalidValue(asked, "bound is negative or NaN", f"bound: {str(bound)[:60]}", hint)
    return limit.expand(full.shape) if limit.dim() else float(limit)
