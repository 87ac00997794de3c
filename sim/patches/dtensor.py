"""Patches of DTensor: its propagation of shardings, its boundary, its dispatch per rank, and torch's caches by mesh."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _collective_utils, _redistribute, _utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

from hyper_parallel.core.dtensor.spelling import STRIDED
from hyper_parallel.core.fully_shard.param import ManagedParam
from sim.kernel.context import current_context
from sim.observers import replicas
from sim.patches.locks import exchange
from sim.patches.rank import Host, Undo, use_op_handlers

__all__ = ["DTENSOR_PATCHES", "thread_has_caches"]


def _caches(host: Host) -> Undo:
    """torch's process-wide caches by mesh are cleared when the world, and with it the meshes, has ended."""

    def undo() -> None:
        for cached in (
            getattr(_redistribute, "_gen_transform_infos", None),
            getattr(_collective_utils.MeshTopoInfo, "build_from_mesh", None),
        ):
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()
        clear = getattr(_redistribute, "clear_redistribute_planner_cache", None)
        if clear is not None:
            clear()

    return undo


def _dtensor_boundary(host: Host) -> Undo:
    """With `check_replicas`, what enters and leaves DTensors, or is split by an engine, is compared and followed."""
    partials = host.partials
    if partials is None:
        return lambda: None
    from_local, to_local = DTensor.from_local, DTensor.to_local
    made = staticmethod(replicas.check_when_made(from_local))
    split_by_torch, split, shard = FSDPParam._init_sharded_param, ManagedParam.__init__, Shard._shard_tensor

    def compare_and_split(param: Any, weight: Any, *args: Any, **options: Any) -> Any:
        mesh_info = args[-1] if hasattr(args[-1], "mesh") else param.mesh_info  # an attribute before torch 2.12
        replicas.check_when_split(param._module_info.param_name, weight, mesh_info.mesh)
        return split_by_torch(param, weight, *args, **options)

    def compare_and_manage(param: Any, name: str, slots: Any, weight: Any, placement: Any) -> None:
        if placement.data is not None:
            replicas.check_when_split(name, weight, placement.data.mesh)
        split(param, name, slots, weight, placement)

    def compare_and_shard(
        placement: Any, tensor: Any, mesh: Any, mesh_dim: int, src_data_rank: int | None = 0, *args: Any
    ) -> Any:
        if src_data_rank is None:
            replicas.check_when_split("the tensor given to distribute_tensor", tensor, mesh.get_group(mesh_dim))
        return shard(placement, tensor, mesh, mesh_dim, src_data_rank, *args)

    return exchange(
        [
            (DTensor, "from_local", made),
            (Shard, "_shard_tensor", compare_and_shard),
            (DTensor, "to_local", partials.follow_when_taken(to_local)),
            (FSDPParam, "_init_sharded_param", compare_and_split),
            (ManagedParam, "__init__", compare_and_manage),
        ]
    )


def _fsdp2_paths(host: Host) -> Undo:
    """A unit of FSDP2 notes its path in the outermost wrapped module: a layer moved later has another."""
    init = FSDPState.init

    def init_and_note(state: FSDPState, modules: Any, *args: Any, **options: Any) -> None:
        for path, module in ((path, module) for top in modules for path, module in top.named_modules()):
            nested: Any = _get_module_fsdp_state(module)
            if nested is not None:
                nested.path_when_wrapped = path
        init(state, modules, *args, **options)

    return exchange([(FSDPState, "init", init_and_note)])


def _loss_parallel(host: Host) -> Undo:
    """`loss_parallel` is the calling rank's own; torch enters its operators into the one table of the process."""
    from torch.distributed.tensor.parallel import loss

    dispatcher = DTensor._op_dispatcher
    plain = dispatcher._custom_op_handlers
    enable, disable = loss._enable_custom_loss_ops, loss._disable_custom_loss_ops

    def enable_on_rank() -> None:
        context = current_context()
        if context is None:
            enable()
            return
        context.op_handlers = {**dispatcher._custom_op_handlers, **loss.customized_loss_ops}
        use_op_handlers(context)

    def disable_on_rank() -> None:
        context = current_context()
        if context is None:
            disable()
            return
        context.op_handlers = None
        dispatcher._custom_op_handlers = plain

    host.op_handlers = plain
    loss._enable_custom_loss_ops, loss._disable_custom_loss_ops = enable_on_rank, disable_on_rank

    def undo() -> None:
        loss._enable_custom_loss_ops, loss._disable_custom_loss_ops = enable, disable
        dispatcher._custom_op_handlers = plain

    return undo


def _optimizer_steps(host: Host) -> Undo:
    """Every optimizer notes who steps; with `check_replicas` it compares its parameters and gradients before."""
    return replicas.check_at_steps()


def thread_has_caches() -> bool:
    """Whether torch has cached on this thread how DTensors of this world's meshes are dispatched."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return False
    propagator = tensor.DTensor._op_dispatcher.sharding_propagator
    native = getattr(torch._C, "_get_DTensor_sharding_propagator_cache_stats", lambda: (0, 0))()
    return bool(propagator.propagate_op_sharding.cache_info().currsize or any(native))


# -- sharding propagation, done by one rank of a world for all of them --------------------------------------------
#
# Before the first call of an operator torch works out how its outputs are sharded: it runs the operator on fake
# tensors and prices what each sharding of the arguments would cost to reach. That takes milliseconds for a matrix
# product, and 15 seconds for an attention that has to be decomposed. torch keeps the result per thread, hence per
# rank. But ranks have to agree on it, or their collectives would not match. So the first rank's result is kept
# without its meshes, and each other rank gets a copy on its own meshes. So do the ranks of later worlds, as long as
# nobody changes the rules of operators: tests run one model in many worlds.
#
# What does depend on the rank is still worked out by each rank: sizes of uneven shards (`view` is called with local
# sizes), and placements with a state of their own (the mask of an embedding whose rows are sharded). Errors are not
# kept.
#
# Tried on torch 2.13.

_COMPUTE, _LOCAL_SHAPE = "propagate_op_sharding_non_cached", "_compute_local_shape_and_global_offset"


def _sharding_propagation(host: Host) -> Undo:
    """The sharding of an operator's outputs is worked out once, not once per rank."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    owner = type(propagator)
    if not hasattr(owner, _COMPUTE) or not hasattr(_utils, _LOCAL_SHAPE):
        return lambda: None  # torch has them elsewhere, so each rank works it out
    compute, local_shape = getattr(owner, _COMPUTE), getattr(_utils, _LOCAL_SHAPE)
    known, rules = _known_results(propagator), _rules(propagator, compute)
    known.follow(rules)
    # How many devices a host has is part of what communication costs.
    devices = host.network.world_size, host.device, host.map_device
    shared = _SharedResults(propagator, functools.partial(compute, propagator), known.results, devices)

    def propagate(self: Any, schema: Any) -> Any:
        return shared.propagate(schema) if self is propagator else compute(self, schema)

    put_back = exchange(
        [(owner, _COMPUTE, propagate), (_utils, _LOCAL_SHAPE, shared.noting_uneven_shards(local_shape))]
    )

    def undo() -> None:
        put_back()
        known.follow(_rules(propagator, compute))  # a rank may have changed one, for this world

    return undo


_MOST_KNOWN = 2048  # results; drawn shapes have no end
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (DTensorSpec, bool, int, float, complex, str, type(None), *_OF_TORCH)


class _KnownResults:
    """The results of this process that later worlds may use, while the rules that they follow from stay the same."""

    def __init__(self) -> None:
        self.results: dict[Any, Any] = {}
        self._rules: tuple[Any, ...] = ()

    def follow(self, rules: tuple[Any, ...]) -> None:
        """Forget results of other rules, and all if there are too many."""
        if rules != self._rules or len(self.results) > _MOST_KNOWN:
            self.results.clear()
        self._rules = rules


@functools.cache
def _known_results(propagator: Any) -> _KnownResults:
    """Those of torch's one propagator."""
    return _KnownResults()


def _rules(propagator: Any, compute: Callable[..., Any]) -> tuple[Any, ...]:
    """All that works results out: a user can register an operator's rule anew."""
    tables = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
    return compute, *(rule for name in tables for rule in getattr(propagator, name, {}).values())


class _Noted(threading.local):
    """How often the calling thread has asked for the rank's shard of an uneven split."""

    uneven = 0


class _SharedResults:
    """The results of one world, by operator, arguments and kinds of meshes.

    Args:
        propagator: torch's.
        compute: Works a result out.
        known: Results for any world; new ones are added.
        devices: What those of this world have to have in common with others'.
    """

    def __init__(
        self, propagator: Any, compute: Callable[[Any], Any], known: dict[Any, Any], devices: tuple[Any, ...]
    ) -> None:
        self.propagator, self.compute = propagator, compute
        self.known, self.devices = known, devices
        self.results: dict[Any, Any] = {}  # whose arguments may be a world's own
        self.noted = _Noted()

    def propagate(self, schema: Any) -> Any:
        """The output sharding of `schema`, on the calling rank's meshes."""
        if current_context() is None or _are_we_tracing():
            return self.compute(schema)
        meshes: list[Any] = []
        try:
            key = self._key(schema, meshes)
            found = self.known.get(key) or self.results.get(key)
        except (_OfOneRank, TypeError):  # TypeError: an argument that has no hash
            return self.compute(schema)
        if found is not None:
            return _with_meshes(found, lambda kind: meshes[kind.position])
        before = self.noted.uneven
        result = self.compute(schema)
        if self.noted.uneven == before:
            self._keep(schema, result)
        return result

    def _keep(self, schema: Any, result: Any) -> None:
        meshes: list[Any] = []
        with suppress(_OfOneRank, TypeError):
            # The key anew: at an operator's first decomposition torch registers which arguments belong to it.
            key = self._key(schema, meshes)
            kept = self.known if _is_plain((schema.args_schema, schema.kwargs_schema)) else self.results
            kept[key] = _with_meshes(result, lambda mesh: _kind(mesh, meshes))

    def _key(self, schema: Any, meshes: list[Any]) -> tuple[Any, ...]:
        """`schema` as torch compares it, but for any rank; its meshes are added to `meshes`."""

        def added(mesh: Any) -> _MeshKind:
            if mesh not in meshes:
                meshes.append(mesh)
            return _kind(mesh, meshes)

        info = schema.schema_info or self.propagator.op_to_schema_info.get(schema.op)
        arguments, options = _with_meshes((schema.args_schema, schema.kwargs_schema), added)
        kinds = tuple(_kind(mesh, meshes) for mesh in meshes)
        return OpSchema(schema.op, arguments, options, info), kinds, self.devices

    def noting_uneven_shards(self, local_shape: Callable[..., Any]) -> Callable[..., Any]:
        """`local_shape`, from which propagation learns the size of the rank's shard."""

        @functools.wraps(local_shape)
        def noting(shape: Any, mesh_shape: Any, coordinate: Any, placements: Any, *rest: Any, **more: Any) -> Any:
            if not _splits_evenly(shape, mesh_shape, placements):
                self.noted.uneven += 1
            return local_shape(shape, mesh_shape, coordinate, placements, *rest, **more)

        return noting


class _OfOneRank(Exception):
    """Raised for what ranks cannot share."""


class _MeshKind(NamedTuple):
    """What a result depends on of a mesh: equal on all ranks of the mesh, and on all outside of it."""

    position: int  # among the meshes of one call
    shape: tuple[int, ...]
    device_type: str
    has_rank: bool


def _kind(mesh: Any, meshes: list[Any]) -> _MeshKind:
    if mesh not in meshes:
        raise _OfOneRank
    has_rank = mesh.get_coordinate() is not None
    return _MeshKind(meshes.index(mesh), tuple(mesh.shape), mesh.device_type, has_rank)


def _with_meshes(value: Any, swap: Callable[[Any], Any]) -> Any:
    """A copy of arguments or of a result, whose specs are on what `swap` returns for their meshes."""
    if isinstance(value, DTensorSpec):
        if any(type(placement) not in (Shard, Replicate, Partial, STRIDED) for placement in value.placements):
            raise _OfOneRank  # it may have a state
        spec = copy.copy(value)
        spec.mesh = swap(value.mesh)
        return spec
    if type(value) in (list, tuple):
        return type(value)(_with_meshes(each, swap) for each in value)
    if type(value) is dict:
        return {name: _with_meshes(each, swap) for name, each in value.items()}
    if isinstance(value, OpSchema):
        arguments, options = _with_meshes((value.args_schema, value.kwargs_schema), swap)
        return OpSchema(value.op, arguments, options, value.schema_info)
    if isinstance(value, OutputSharding):
        output, suggestion = _with_meshes((value.output_spec, value.redistribute_schema), swap)
        return dataclasses.replace(value, output_spec=output, redistribute_schema=suggestion)
    return value


def _is_plain(value: Any) -> bool:
    """Whether arguments are specs and constants only, and nothing that belongs to a world."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _splits_evenly(shape: Any, mesh_shape: Any, placements: Any) -> bool:
    """Whether the shards of all ranks have one shape."""
    sizes = list(shape)
    for ranks, placement in zip(mesh_shape, placements, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            if sizes[dim] % (ranks * getattr(placement, "split_factor", 1)):
                return False
            sizes[dim] //= ranks
    return True


DTENSOR_PATCHES = (_caches, _dtensor_boundary, _fsdp2_paths, _loss_parallel, _optimizer_steps, _sharding_propagation)
"""What of DTensor is changed."""
