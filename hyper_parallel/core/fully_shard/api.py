"""`fully_shard`: shard a module's parameters, and gather them around its forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import FSDPModule, UnshardHandle
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy
from torch.distributed.tensor import DTensor

from hyper_parallel.core.common.checks import check, read_int
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.common.groups import group_of
from hyper_parallel.core.fully_shard.bucket import Storage
from hyper_parallel.core.fully_shard.build import (
    FoundParameter,
    Grouping,
    check_parameters,
    copy_wrapped,
    find_parameters,
    install,
    is_dtensor,
    make_unit,
    move_buffers,
    move_plain,
    nested_placements,
    root_modules,
)
from hyper_parallel.core.fully_shard.module import (
    HSDPModule,
    register_forward_method,
    register_fsdp_forward_method,
    share_comm_ctx,
    state,
    wrapped_class,
)
from hyper_parallel.core.fully_shard.placement import (
    DataParallelMesh,
    Owner,
    ParameterPlacement,
    PlacementFn,
    common_spmd_mesh,
    data_axes,
    kept_placement,
    plain_placement,
    platform_of,
    refuse_fusion,
    resolve_mesh,
    unified_placement,
    unpackable,
    whole_parameters,
)
from hyper_parallel.core.fully_shard.schedule import hsdp_sync_stream
from hyper_parallel.core.fully_shard.state_dict import get_model_state_dict, load_state_dict
from hyper_parallel.core.fully_shard.utils import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnitOptions,
)
from hyper_parallel.platform import Platform

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "HSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Owner",
    "UnshardHandle",
    "fully_shard",
    "get_model_state_dict",
    "hsdp_sync_stream",
    "load_state_dict",
    "register_forward_method",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "whole_parameters",
]

T = TypeVar("T", bound="nn.Module | Sequence[nn.Module]")


def fully_shard(
    module: T,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    replicate_params: Iterable[nn.Parameter] | None = None,
    comm_fusion: bool = False,
    comm_fusion_zero_copy: bool | None = None,
) -> T:
    """Shard the parameters of `module` over a mesh, in place, and return `module`.

    Wrap inner modules first, then the whole model: each call makes one *unit*, whose parameters are gathered
    together before its forward and backward and freed after it. Parameters become DTensors.

    ::

        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    A unit may be called in any way and return containers or dataclasses of tensors. Every rank must run the same units
    in the same order, in forward and in backward. A rank may skip a unit's own computation and return its input, or the
    output of a nested unit. Scalars have no dim to shard and are replicated. A parameter with FSDP2's tensor extension
    (`fsdp_pre_all_gather`, `fsdp_post_all_gather`) is gathered as the tensors that the extension returns.

    If each rank's loss is a mean over its own equal-sized batch, the loss that gradients belong to is the global mean.
    A unit with a DTensor among its parameters sums gradients instead, so the loss must already be divided by the
    number of data-parallel ranks. A root with units of both kinds has to choose:
    see `HSDPModule.set_reduce_op_type`. FSDP2 averages in both cases.

    Communication per step for a unit of N bytes on n ranks: two all_gathers and one reduce_scatter. In each a rank
    receives N (n - 1) / n. The root, and units with `reshard_after_forward=False`, need only one all_gather. A 2-D mesh
    adds one all_reduce of N / n over the replicate axis. Replicated parameters: one all_reduce.

    Args:
        module: A module, or a list of modules that form one unit. Nested units keep their own parameters.
        mesh: 1-D: shard over it. 2-D: the first axis replicates, the second shards. None: plain parameters are sharded
            over all ranks, DTensors keep their layout. With a mesh, DTensors are also sharded over it; their mesh and
            this one must be slices of one mesh.
        reshard_after_forward: Free the unsharded parameters after forward. False: keep them until backward is done. An
            int: keep them sharded over that many ranks, which must divide the shard axis, for a cheaper second gather.
            None: True. The root keeps them in any case, because backward starts with it.
        shard_placement_fn: Maps a parameter to `Shard(dim)`, None (dim 0) or `Owner(rank)`. The owner, a rank of the
            shard axis, has the whole parameter and its gradient, the others nothing; `whole_parameters` assigns owners.
            Sizes need not divide evenly.
        mp_policy: Dtypes of gather, computation and reduction. torch's class is accepted.
        offload_policy: `CPUOffloadPolicy()` keeps shards, gradients and the optimizer's state on the host. torch's
            class is accepted.
        ignored_params: Parameters to leave alone: not sharded, moved or reduced. One set can serve all calls, because
            parameters of other units have no effect here.
        dp_mesh_dims: The data-parallel axes of `mesh`, which is then the SPMD mesh of the DTensor parameters.
            As in FSDP2, gradients are averaged over them. Without `shard` all parameters are replicated.
        replicate_params: Parameters to replicate; their gradients are all_reduced. One set can serve all calls, too.
        comm_fusion: Require one all_gather and one reduce_scatter per unit and dtype, and let all_reduces over the
            replicate axis combine several units. A parameter that cannot be packed is an error. False: parameters are
            packed where possible, because one collective per parameter would be slower.
        comm_fusion_zero_copy: Keep the shards of a unit in one buffer, which the gather reads directly. None: same as
            `comm_fusion`. The sharded parameters are then views, which optimizers must accept (e.g. torch's).
    Raises:
        ValueError: `module` is wrapped already, or shares a parameter with another unit; a flag of the wrong kind; a
            mesh without one or two axes; a parameter that cannot be sharded.
        TypeError: `ignored_params` or `replicate_params` contains an object that is not a parameter.
    """
    roots = root_modules(module, "fully_shard")
    mp_policy, offload_policy = _own_mixed_precision(mp_policy), _own_offload(offload_policy)
    reshard_after_forward = True if reshard_after_forward is None else reshard_after_forward
    asked = "fully_shard cannot split a module"
    check(asked, OffloadPolicy, "offload_policy=CPUOffloadPolicy()", InvalidValue, offload_policy=offload_policy)
    check(asked, "bool", "", InvalidValue, comm_fusion=comm_fusion)
    check(asked, "bool | None", "", InvalidValue, comm_fusion_zero_copy=comm_fusion_zero_copy)
    if not isinstance(reshard_after_forward, bool):
        hint = "reshard_after_forward=True, or the number of ranks to keep parameters split over"
        reshard_after_forward = read_int(
            asked, "reshard_after_forward", reshard_after_forward, 1, hint, error=InvalidValue
        )
    if comm_fusion_zero_copy and not comm_fusion:
        blame = "comm_fusion_zero_copy=True is about fused communication"
        raise InvalidValue(asked, blame, "comm_fusion: False", "comm_fusion=True")
    ignored, replicated = check_parameters(ignored_params, replicate_params)
    found = find_parameters(roots, ignored, "fully_shard")
    if dp_mesh_dims is not None:
        mesh = data_axes(mesh, dp_mesh_dims)
        replicated |= {id(item.parameter) for item in found if not dp_mesh_dims.shard_names}
    if comm_fusion:
        for item in found:
            if (reason := unpackable(item.parameter)) is not None:
                refuse_fusion(item.name, reason)
    data, platform = _data_mesh(mesh, found)
    placed = _placed(roots, found, mesh, data, shard_placement_fn, replicated, fused=comm_fusion)
    for item, placement in placed:
        if comm_fusion and placement.owner is not None:
            refuse_fusion(item.name, "one rank holds all of it, and what is fused has shards of one size")
    smaller = _post_forward_mesh(reshard_after_forward, data)
    options = UnitOptions(
        mp_policy,
        reshard_after_forward=reshard_after_forward is True or reshard_after_forward > 1,
        average=dp_mesh_dims is not None or not any(map(is_dtensor, found)),
        fuse_all_reduces=comm_fusion,
    )
    storage = Storage(
        platform,
        on_host=isinstance(offload_policy, CPUOffloadPolicy),
        pinned=isinstance(offload_policy, CPUOffloadPolicy) and offload_policy.pin_memory,
        flat=comm_fusion if comm_fusion_zero_copy is None else comm_fusion_zero_copy,
    )
    move_buffers(roots, platform)
    unit = make_unit(roots, placed, storage, options, Grouping())
    unit.use_post_forward_mesh(smaller)
    unit.wrapping.post_forward_mesh = smaller
    unit.wrapping.ignored = [parameter for root in roots for parameter in root.parameters() if id(parameter) in ignored]
    install(unit, placed, wrapped_class, "fully_shard")
    unit.wrapping.copy = copy_wrapped
    return module


def _own_mixed_precision(policy: Any) -> Any:
    """Convert torch's policy to ours; return any other object unchanged."""
    if not isinstance(policy, TorchMixedPrecisionPolicy):
        return policy
    return MixedPrecisionPolicy(
        policy.param_dtype, policy.reduce_dtype, policy.output_dtype, cast_forward_inputs=policy.cast_forward_inputs
    )


def _own_offload(policy: Any) -> Any:
    """Convert torch's policy to ours, and None to no offload; return any other object unchanged."""
    if isinstance(policy, TorchCPUOffloadPolicy):
        return CPUOffloadPolicy(pin_memory=policy.pin_memory)
    return OffloadPolicy() if policy is None or isinstance(policy, TorchOffloadPolicy) else policy


def _data_mesh(mesh: DeviceMesh | None, found: list[FoundParameter]) -> tuple[DataParallelMesh | None, Platform]:
    """Return the mesh to shard over (None: all parameters are DTensors that keep their layout), and its device."""
    plain = [item for item in found if not is_dtensor(item)]
    if mesh is None and found and not plain:
        kept = found[0].parameter
        assert isinstance(kept, DTensor)
        return None, platform_of(kept.device_mesh)
    data = resolve_mesh(mesh, {item.parameter.device.type for item in plain})
    return data, data.platform


def _placed(
    roots: list[nn.Module],
    found: list[FoundParameter],
    mesh: DeviceMesh | None,
    data: DataParallelMesh | None,
    placement_fn: PlacementFn | None,
    replicated: set[int],
    *,
    fused: bool,
) -> list[tuple[FoundParameter, ParameterPlacement]]:
    placements: dict[int, ParameterPlacement] = {}
    for item in found:
        parameter = item.parameter
        if isinstance(parameter, DTensor):
            if mesh is None or data is None:
                placements[id(parameter)] = kept_placement(parameter, item.name, fused=fused)
            else:
                keep = id(parameter) in replicated
                placements[id(parameter)] = unified_placement(parameter, item.name, data, placement_fn, replicate=keep)
    spmd_mesh = None
    if mesh is not None and data is not None:
        spmd_mesh = common_spmd_mesh([*placements.values(), *nested_placements(roots)], data)
    if spmd_mesh is not None and data is not None:
        move_plain(roots, data, spmd_mesh)
    for item in found:
        if id(item.parameter) not in placements:
            assert data is not None
            keep = id(item.parameter) in replicated
            placements[id(item.parameter)] = plain_placement(
                item.parameter, item.name, data, placement_fn, spmd_mesh, replicate=keep
            )
    return [(item, placements[id(item.parameter)]) for item in found]


def _post_forward_mesh(size: bool | int, data: DataParallelMesh | None) -> tuple[dist.ProcessGroup, int] | None:
    """Return the group that holds the parameters between forward and backward, and this rank's index in it."""
    if isinstance(size, bool):
        return None
    ranks = 1 if data is None else data.shard_size
    if ranks % size:
        divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        asked, blame = f"fully_shard cannot use reshard_after_forward={size}", "it does not divide the shard axis"
        raise InvalidValue(asked, blame, f"seen: a shard axis of {ranks} ranks", f"one of {divisors}")
    if data is None or size in (1, ranks):
        return None
    members = dist.get_process_group_ranks(data.shard_group)
    start = data.shard_rank // size * size
    return group_of(tuple(members[start : start + size]), ("shard",)), data.shard_rank % size


fully_shard.state = state  # type: ignore[attr-defined]  # as in torch: a module's state, None if it was not wrapped
