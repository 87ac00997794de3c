"""`hsdp`: the engine of `fully_shard`, configured by size and level instead of by mesh and placement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hyper_parallel.core.common.checks import check, check_choice, check_int, read_int
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.fully_shard.bucket import Storage
from hyper_parallel.core.fully_shard.build import (
    FoundParameter,
    Grouping,
    copy_wrapped,
    find_parameters,
    install,
    is_dtensor,
    make_unit,
    move_buffers,
    refuse_gradients,
    root_modules,
)
from hyper_parallel.core.fully_shard.module import (
    ManagedModule,
    check_flags,
    needed_units,
    prefetched_units,
    wrapped_class,
)
from hyper_parallel.core.fully_shard.placement import (
    DataParallelMesh,
    ParameterPlacement,
    kept_placement,
    plain_placement,
)
from hyper_parallel.core.fully_shard.schedule import hsdp_sync_stream
from hyper_parallel.core.fully_shard.unit import nested_traced_units, nested_units, unit_of
from hyper_parallel.core.fully_shard.utils import FullyShardParamMode, MixedPrecisionPolicy, OptimizerLevel, UnitOptions
from hyper_parallel.core.hsdp.compiled import install as install_traced
from hyper_parallel.core.mesh.spmd_mesh import divisor, split_replicated, split_world
from hyper_parallel.platform import Platform, get_platform

__all__ = ["HSDPCell", "OptimizerLevel", "hsdp", "hsdp_sync_stream"]


class HSDPCell(ManagedModule):
    """Mixed into the class of every module that `hsdp` has wrapped.

    Methods raise `ValueError` for an argument of the wrong kind, and when called on a module that was never wrapped.
    """

    def set_requires_grad_sync(self, requires_grad_sync: bool) -> None:
        """Whether the next backwards end a cycle of accumulation: their gradients are reduced over all ranks.

        True at first. False: gradients add up. Without `enable_grad_accumulation` nothing is communicated, and each
        rank keeps its own unsharded gradients; with it, `param.acc_grad` shows what has added up, and at level2 and
        level3 gradients are reduce_scattered in every backward. `param.grad` gets the sum in the synced step.
        Reaches all nested cells.
        """
        check_flags("set_requires_grad_sync", requires_grad_sync=requires_grad_sync)
        needed_units(self)
        together = nested_traced_units(self)
        for traced in together[:1]:
            traced.set_requires_grad_sync(requires_grad_sync, together)
        for unit in nested_units(self):  # type: ignore[arg-type]
            if unit.options.show_sums and unit.splits_gradients:
                unit.options.requires_all_reduce = requires_grad_sync
            else:
                unit.options.requires_gradient_sync = requires_grad_sync

    def zero_grads(self) -> None:
        """Clear gradients and what adds up in `acc_grad`. Reaches all nested cells."""
        needed_units(self)
        self.zero_grad()

    def set_forward_prefetch_cells(self, hsdp_cell_list: Sequence[HSDPCell] | None) -> None:
        """Gather these cells' parameters while this one's forward computes (default: the cell that came next).

        An empty list: none; None: the default.
        """
        needed_units(self)
        chosen = prefetched_units("set_forward_prefetch_cells", HSDPCell, "hsdp", hsdp_cell_list=hsdp_cell_list)
        if (unit := unit_of(self)) is not None:  # type: ignore[arg-type] # a traced cell gathers where the graph says
            unit.forward_prefetch = chosen

    def set_backward_prefetch_cells(self, hsdp_cell_list: Sequence[HSDPCell] | None) -> None:
        """Gather these cells' parameters while this one's backward computes (default: the one that came before).

        An empty list: none; None: the default.
        """
        needed_units(self)
        chosen = prefetched_units("set_backward_prefetch_cells", HSDPCell, "hsdp", hsdp_cell_list=hsdp_cell_list)
        if (unit := unit_of(self)) is not None:  # type: ignore[arg-type] # a traced cell gathers where the graph says
            unit.backward_prefetch = chosen


M = TypeVar("M", bound=nn.Module)


def hsdp(
    cell: M,
    shard_size: int = -1,
    threshold: int = 64,
    optimizer_level: str | OptimizerLevel = "level1",
    enable_grad_accumulation: bool = False,
    use_eager_hook: bool = True,
    grad_scale: float = 1.0,
    reduce_dtype: torch.dtype | None = None,
    comm_async: bool = False,
    comm_fusion: bool = False,
    bucket_size: int = -1,
) -> M:
    """Split the large parameters of `cell` over the ranks that hold the same data; returns it, changed in place.

    Wrap inner cells first, then the whole model, as with `fully_shard`, whose engine this is::

        for block in model.blocks:
            hsdp(block, shard_size=8, optimizer_level="level3")
        hsdp(model, shard_size=8, optimizer_level="level3")

    Gradients are averaged over the data-parallel ranks; in a cell with a DTensor among its parameters they are added
    up, and the loss must already be divided by the number of these ranks. A plain parameter is the same data on all
    ranks, a DTensor along the axes on which it is replicated: with tensor parallelism, let all parameters be DTensors.

    Communication per step and parameter of N bytes over n ranks, s of which hold its shards: an all_gather of
    N (s - 1) / s received per rank, at level3 two (for the root one, as backward starts with it); then an all_reduce
    of N over all n (level1), or a reduce_scatter of N (s - 1) / s and an all_reduce of N / s over the n / s replicas
    (level2 and 3). For what is replicated: the all_reduce of N alone. Gathers take all parameters of a cell with one
    shard size and dtype at once; a DTensor's all_reduce over all n is one over s and one over n / s ranks.

    Parameters of several shard sizes are on several meshes: clip with `hyper_parallel.clip_grad_norm_`, as torch's
    needs one mesh.

    Args:
        cell: A module.
        shard_size: Ranks that a parameter is split over, at most; -1: all that hold the same data. What is used is the
            largest number up to it that divides both dim 0 and the number of data-parallel ranks. Shards are on
            consecutive ranks. A parameter's attribute `hsdp_shard_size` comes first; the outcome is its attribute
            `hsdp_effective_shard_size`.
        threshold: Kilobytes (1,024 bytes); parameters that are strictly smaller are replicated, of a DTensor those
            whose largest shard on any rank is.
        optimizer_level: "level1": parameters and optimizer state are split, gradients all_reduced. "level2": gradients
            are split too. "level3": gathered parameters are also freed after forward and gathered again for backward.
            The members of `OptimizerLevel` will do.
        enable_grad_accumulation: Show gradients as they add up over micro-steps as `param.acc_grad`, a DTensor in
            `reduce_dtype` or at least fp32: at level1 unsharded ones, each rank its own until the synced step; else
            shards, reduce_scattered in every micro-step and all_reduced over replicas at the synced step. Until then
            they are `Partial` sums, neither averaged nor scaled. See `HSDPCell.set_requires_grad_sync`.
        use_eager_hook: False: gather and reduce in a form that `torch.compile` traces without graph breaks, and that
            takes plain parameters only. Order and fusion of communication are then the compiler's: `comm_async`,
            `comm_fusion`, `bucket_size` and prefetching have no effect. A parameter is gathered where forward reads
            it as an attribute (`self.weight`; `parameters()` gives shards), so all ranks must read the same ones in
            the same order: a branch that they do not all take mixes up weights, which nothing notices.
        grad_scale: Factor on every gradient.
        reduce_dtype: Dtype in which gradients are reduced; None: that of the parameter.
        comm_async: The end of backward leaves reductions under way; call `hsdp_sync_stream()` before gradients are
            read.
        comm_fusion: Reduce gradients together, not one by one.
        bucket_size: Kilobytes of gradients that are reduced together, at most, unless one alone is larger; -1: all of
            a cell that have one shard size and dtype; 0: one by one. Of use with `comm_fusion` only.

    Raises:
        ValueError: An argument is not what is said above; the cell is wrapped already, or shares a parameter with
            another one; torch.distributed is not initialised.
    """
    roots = root_modules(cell, "hsdp")
    check(_ASKED, "module", "hsdp(model)", InvalidValue, cell=cell)  # no list of them
    if not isinstance(optimizer_level, OptimizerLevel):
        check_choice(_ASKED, "optimizer_level", optimizer_level, [level.value for level in OptimizerLevel])
    level = OptimizerLevel(optimizer_level)
    shard_size = _size("shard_size", shard_size, "shard_size=-1, which means all ranks")
    threshold = read_int(_ASKED, "threshold", threshold, 0, "threshold=64, in KB", error=InvalidValue)
    flags = {"enable_grad_accumulation": enable_grad_accumulation, "use_eager_hook": use_eager_hook}
    check_flags("hsdp", **flags, comm_async=comm_async, comm_fusion=comm_fusion)
    check(_ASKED, float, "grad_scale=1.0", InvalidValue, grad_scale=grad_scale)
    hint = "bucket_size=-1, or a size in KB"
    bucket_size = read_int(_ASKED, "bucket_size", bucket_size, -1, hint, error=InvalidValue)
    found = find_parameters(roots, set(), "hsdp")
    platform = _platform(found, cell)
    placed = _placed(found, platform, shard_size, threshold * 1024)
    if not use_eager_hook:
        _refuse_dtensors(found)
    options = UnitOptions(
        MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
        reshard_after_forward=level is OptimizerLevel.SHARD_OPT_GRAD_PARAM,
        average=not any(map(is_dtensor, found)),
        gradient_scale=grad_scale,
        show_sums=enable_grad_accumulation,
        leave_pending=comm_async,
    )
    grouping = Grouping(
        reduce_bytes=(bucket_size * 1024 if bucket_size > 0 else bucket_size) if comm_fusion else 0,
        unsharded_gradients=level is OptimizerLevel.SHARD_OPT,
    )
    move_buffers(roots, platform)
    for item, placement in placed:
        item.parameter._hyper_parallel_unit_name = item.name  # type: ignore[attr-defined]
        item.parameter.hsdp_effective_shard_size = placement.shard_size  # type: ignore[attr-defined]
    if use_eager_hook:
        unit = make_unit(roots, placed, Storage(platform), options, grouping)
        install(unit, placed, _cell_class, "hsdp")
        unit.wrapping.copy = copy_wrapped
    else:
        object.__setattr__(cell, "__class__", _cell_class(type(cell)))
        install_traced(cell, placed, Storage(platform), options, grouping)
        for item, _ in placed:
            refuse_gradients(item, "hsdp")
    return cell


def _cell_class(original: Any) -> Any:
    return wrapped_class(original, HSDPCell)


# -- arguments -------------------------------------------------------------------------------------------------------


_ASKED = "hsdp cannot wrap a cell"


def _size(name: str, value: Any, hint: str) -> int:
    return -1 if check_int(value) == -1 else read_int(_ASKED, name, value, 1, hint, error=InvalidValue)


# -- where parameters go ---------------------------------------------------------------------------------------------


def _platform(found: list[FoundParameter], cell: nn.Module) -> Platform:
    if not dist.is_initialized():
        blame, hint = "torch.distributed is not initialised", "torch.distributed.init_process_group() first"
        raise InvalidValue(_ASKED, blame, "seen: no default process group", hint)
    known = sorted({item.parameter.device.type for item in found} - {"meta"})
    if len(known) > 1:
        blame = "its parameters are on several devices"
        raise InvalidValue(_ASKED, blame, f"seen: {', '.join(known)}", "cell.to(device) first")
    nested = nested_units(cell)
    if not found and nested:
        return nested[0].platform
    return get_platform(known[0] if known else None)


def _placed(
    found: list[FoundParameter], platform: Platform, shard_size: int, threshold: int
) -> list[tuple[FoundParameter, ParameterPlacement]]:
    """Where each parameter goes; one data mesh per shard size, so that what can be gathered together is."""
    _check_alike(found)
    wanted = [_wanted(item, shard_size, threshold) for item in found]  # what is wrong is found before a group is made
    meshes: dict[DeviceMesh, DataParallelMesh] = {}
    world = dist.get_world_size()
    placed = []
    for item, (size, kept) in zip(found, wanted, strict=True):
        if kept is not None:
            assert isinstance(item.parameter, DTensor)
            placed.append((item, _split_further(item.parameter, kept, size, platform, meshes)))
            continue
        # Replicated ones go on the mesh of those that are split as asked: torch's functions want all of them on one.
        mesh = split_world(platform.device_type, size if size > 1 else divisor(shard_size, world, world))
        data = meshes.setdefault(mesh, DataParallelMesh.of(mesh, platform, 2))
        placed.append((item, plain_placement(item.parameter, item.name, data, None, None, replicate=size == 1)))
    return placed


def _check_alike(found: list[FoundParameter]) -> None:
    """Reject plain parameters next to sharded DTensors: the group to reduce their gradients over is ambiguous."""
    plain = [item.name for item in found if not is_dtensor(item)]
    for item in found:
        parameter = item.parameter
        if not plain or not isinstance(parameter, DTensor):
            continue
        mesh = parameter.device_mesh
        split = [axis for axis, p in enumerate(parameter.placements) if p.is_shard() and mesh.size(axis) > 1]
        if split:
            asked = "hsdp cannot manage plain parameters and split DTensors in one cell"
            blame = f"ranks with shards of {item.name!r} compute the same gradient of {plain[0]!r}, or they do not"
            seen = f"plain: {', '.join(plain)}   {item.name}: {parameter.placements}"
            hint = "distribute_tensor with Replicate() for the plain ones, or fully_shard(cell, mesh=data_mesh)"
            raise InvalidValue(asked, blame, seen, hint)


def _refuse_dtensors(found: list[FoundParameter]) -> None:
    """Refuse parameters whose modules are to see DTensors, before anything is done to any of them."""
    for item in found:
        if isinstance(item.parameter, DTensor):
            asked = f"hsdp cannot gather {item.name!r} in a way that torch.compile traces"
            blame = "it is a DTensor, and use_eager_hook=False takes plain parameters only"
            seen = f"seen: placements {item.parameter.placements}"
            raise InvalidValue(asked, blame, seen, "use_eager_hook=True for this cell")


def _wanted(item: FoundParameter, shard_size: int, threshold: int) -> tuple[int, ParameterPlacement | None]:
    """Over how many ranks a parameter is split; of a DTensor, also where it is if it is not split further."""
    parameter = item.parameter
    own = getattr(parameter, "hsdp_shard_size", None)
    if own is not None:
        own = _size(f"hsdp_shard_size of parameter {item.name!r}", own, f"{item.name}.hsdp_shard_size = 2")
    kept = None
    domain = dist.get_world_size()
    if isinstance(parameter, DTensor):
        kept = kept_placement(parameter, item.name, fused=False, api="hsdp")
        domain = math.prod(parameter.device_mesh.size(axis) for axis in kept.reduced_axes)
    rows, numel = _to_split(parameter)
    if parameter.dim() == 0 or numel * parameter.element_size() < threshold:
        return 1, kept
    return divisor(shard_size if own is None else own, rows, domain), kept


def _to_split(parameter: nn.Parameter) -> tuple[int, int]:
    """Common divisor of the sizes of dim 0 that ranks hold of it, and the elements of the largest shard.

    Shards of a DTensor that is split unevenly differ, but all ranks must decide the same.
    """
    sizes = [{size} for size in parameter.shape]
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                ranks = parameter.device_mesh.size(axis)
                sizes[placement.dim] = {rows for size in sizes[placement.dim] for rows in _chunks(size, ranks)}
    return math.gcd(*sizes[0]) if sizes else 1, math.prod(map(max, sizes))


def _chunks(size: int, ranks: int) -> set[int]:
    """The sizes, but 0, that `torch.chunk` makes of `size` for so many ranks."""
    most = -(-size // ranks)
    return {most, size % most or most} if most else {0}


def _split_further(
    parameter: DTensor,
    kept: ParameterPlacement,
    size: int,
    platform: Platform,
    meshes: dict[DeviceMesh, DataParallelMesh],
) -> ParameterPlacement:
    """Where a DTensor goes: split over the axes along which it is replicated, or, over one rank, where it is."""
    if size == 1:
        return kept
    spmd_mesh = split_replicated(parameter.device_mesh, kept.reduced_axes, size)
    data = meshes.setdefault(spmd_mesh.mesh, DataParallelMesh.of(spmd_mesh.mesh, platform, 2))
    placements: tuple[Placement, ...] = (
        *(parameter.placements[axis] for axis in spmd_mesh.kept),
        Replicate(),
        Shard(0),
    )
    return ParameterPlacement(
        FullyShardParamMode.DTENSOR_UNIFIED,
        spmd_mesh.mesh,
        placements,
        0,
        data,
        parameter.device_mesh,
        tuple(parameter.placements),
        spmd_mesh.shared,
    )
