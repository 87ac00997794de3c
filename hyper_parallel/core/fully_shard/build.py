"""Construction of a unit from modules and the placements of their parameters, and copies of units."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parameter import is_lazy

from hyper_parallel.core.common.checks import check
from hyper_parallel.core.common.errors import InvalidState, InvalidType, InvalidValue, class_name
from hyper_parallel.core.common.torch_compat import refuse_lost
from hyper_parallel.core.fully_shard.bucket import Bucket, ExtensionBucket, OwnedBucket, Storage, computed_in
from hyper_parallel.core.fully_shard.module import register_forward_method, register_state, show_shards_in_state_dicts
from hyper_parallel.core.fully_shard.param import ManagedParam, ParamSlot
from hyper_parallel.core.fully_shard.placement import DataParallelMesh, ParameterPlacement, has_extension, unpackable
from hyper_parallel.core.fully_shard.reduce import GradientReducer
from hyper_parallel.core.fully_shard.unit import Unit, is_wrapped, nested_traced_units, nested_units, unit_of
from hyper_parallel.core.fully_shard.utils import MixedPrecisionPolicy, UnitOptions
from hyper_parallel.platform import Platform

# -- checks of arguments, before anything is changed -------------------------------------------------------------------


def root_modules(module: Any, api: str) -> list[nn.Module]:
    """Check the first argument; of a list, return the modules that no other one contains.

    Raises:
        ValueError: An empty list, a module that is wrapped already or has no forward of its own.
    """
    asked = f"{api} cannot wrap its argument"
    if torch.is_inference_mode_enabled():
        blame, hint = "parameters made there cannot be trained", "wrap before, and run the forward in inference mode"
        asked = f"{api} cannot wrap inside of torch.inference_mode()"
        raise InvalidValue(asked, blame, "seen: inference mode is on", hint)
    given = list(module) if isinstance(module, (list, tuple)) else [module]
    if not given:
        raise InvalidValue(asked, "the list is empty", f"seen: {module!r}", f"{api}(model)")
    inside = {id(child) for item in given for child in item.modules() if child is not item}
    roots = [item for item in dict.fromkeys(given) if id(item) not in inside]
    for root in roots:
        asked = f"{api} cannot wrap a {class_name(root)}"
        if is_wrapped(root):
            seen = f"seen: a second {api} of the same module"
            hint = "wrap each module once, by one of fully_shard and hsdp, inner modules first"
            raise InvalidValue(asked, "it is wrapped already", seen, hint)
        if getattr(root.forward, "__func__", None) is nn.Module.forward:
            blame = "it has no forward of its own, before which its parameters could be gathered"
            seen = "seen: a container, whose modules are called one by one"
            raise InvalidValue(asked, blame, seen, f"{api} each module in it, or the module that contains it")
    return roots


def check_parameters(
    ignored_params: Iterable[nn.Parameter] | None, replicate_params: Iterable[nn.Parameter] | None
) -> tuple[set[int], set[int]]:
    """Identities of the parameters to leave alone and of those to replicate; the former win.

    Both may name parameters of other units, so that one set goes to all calls.

    Raises:
        ValueError: One to replicate that a unit has split.
        TypeError: One that is no parameter.
    """
    ignored = {id(item) for item in _listed("ignore", "ignored_params", ignored_params)}
    replicated = _listed("replicate", "replicate_params", replicate_params)
    for item in replicated:
        if id(item) not in ignored and getattr(item, "_hyper_parallel_is_split", False):
            asked = f"fully_shard cannot replicate {_managed_name(item)!r}"
            blame, seen = "a unit has split it already", f"seen: shape {tuple(item.shape)}"
            raise InvalidValue(asked, blame, seen, "pass replicate_params to the call that wraps that unit, too")
    return ignored, {id(item) for item in replicated}


def _listed(verb: str, name: str, given: Iterable[nn.Parameter] | None) -> list[nn.Parameter]:
    parameters = [] if given is None else list(given)
    for index, item in enumerate(parameters):  # what is no parameter would be split, and nobody would hear of it
        hint = f"{name}=[model.norm.weight]"
        check(f"fully_shard cannot {verb} parameters", nn.Parameter, hint, **{f"item {index} of {name}": item})
    return parameters


def _managed_name(parameter: nn.Parameter) -> str | None:
    """The name under which a unit manages a parameter (the original or the sharded one), or None."""
    name: str | None = getattr(parameter, "_hyper_parallel_unit_name", None)
    return name


def _check_same_data(parameters: list[tuple[nn.Parameter, str]]) -> None:
    """Either all parameters of a unit are on the meta device or none.

    Raises:
        ValueError: Some are.
    """
    on_meta = [name for parameter, name in parameters if parameter.is_meta]
    if on_meta and len(on_meta) < len(parameters):
        asked, blame = "cannot make a unit", "some of its parameters are on the meta device, others have data"
        hint = "make the whole module on meta, or none of it; or pass the former in ignored_params"
        raise InvalidValue(asked, blame, f"on meta: {', '.join(on_meta)}", hint)


def _check_parameter(parameter: nn.Parameter, name: str, api: str) -> None:
    """Check that a parameter can be managed.

    Raises:
        ValueError: Another unit manages it; it has no shape yet, a gradient, hooks that would be lost; it is of a kind
            whose shards are no tensors of their own.
    """
    asked = f"{api} cannot manage parameter {name!r}"
    owner = _managed_name(parameter)
    if owner is not None:
        blame = f"it is the same as {owner!r}, which another unit already manages"
        seen = "seen: one tensor in two units, whose gradients would drift apart"
        hint = f"inner modules before the one that contains them; of two modules that share it, {_together(api)}"
        raise InvalidValue(asked, blame, seen, hint)
    hint = f"run it once, on any rank's input, before {api}"
    if is_lazy(parameter):
        raise InvalidValue(asked, "it has no shape yet", "seen: a lazy module that has not run", hint)
    refuse_lost(asked, parameter, api)
    if api == "fully_shard" and _is_extended(parameter, asked):
        return
    reason = unpackable(parameter)
    if reason is not None:
        seen = f"seen: {type(parameter).__name__}, {parameter.layout}"
        raise InvalidValue(asked, reason, seen, "a plain tensor, or pass it in ignored_params")


def _is_extended(parameter: nn.Parameter, asked: str) -> bool:
    """Whether a parameter has FSDP2's tensor extension, in a form that can be used."""
    local: Any = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    kind = type(local).__name__
    found = [method for method in ("fsdp_pre_all_gather", "fsdp_post_all_gather") if hasattr(local, method)]
    if not found:
        return False
    if len(found) == 1:
        blame = f"it has {found[0]} alone, which needs the other one of the two"
        hint = "both fsdp_pre_all_gather and fsdp_post_all_gather, or pass it in ignored_params"
        raise InvalidValue(asked, blame, f"seen: a {kind}", hint)
    signature = inspect.signature(local.fsdp_pre_all_gather)
    if len(signature.parameters) not in (1, 5):
        blame = "its fsdp_pre_all_gather does not take what it is called with"
        hint = "(self, mesh), or (self, mesh, outer_size, outer_stride, module, mp_policy)"
        raise InvalidValue(asked, blame, f"seen: {kind}.fsdp_pre_all_gather{signature}", hint)
    # Tried on no rows at all, now and on every rank: a class that one of these operations drops would show at the first
    # gather, and on some ranks alone where shards are uneven.
    with torch.no_grad():
        shard = local.detach()
        shard = shard.narrow(0, 0, 0).new_zeros((0, *shard.shape[1:])) if shard.dim() else shard
    if not has_extension(shard):
        seen = f"seen: a {kind}, whose detach(), narrow() or new_zeros() is a {type(shard).__name__}"
        hint = "a __torch_dispatch__ that keeps the class for detach, slice, new_zeros, view, copy_ and _to_copy"
        raise InvalidValue(asked, "shards of it have lost fsdp_pre_all_gather", seen, hint)
    return True


def _together(api: str) -> str:
    """How to wrap two modules that share a parameter."""
    one = "wrap both modules as one unit, fully_shard([a, b]), or " if api == "fully_shard" else ""
    return f"{one}wrap only the module that contains both"


# -- from modules to a unit --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FoundParameter:
    """A parameter to be managed.

    Attributes:
        parameter: As the module has it now.
        name: Its full name in the module that is wrapped.
        slots: Where it is registered; tied weights have several places.
    """

    parameter: nn.Parameter
    name: str
    slots: tuple[ParamSlot, ...]


@dataclass(frozen=True)
class Grouping:
    """Which parameters communicate together.

    Attributes:
        reduce_bytes: Gradients are reduced in buffers of at most so many bytes; -1: one buffer; 0: one each.
        unsharded_gradients: Reduce unsharded gradients on every rank, and take the own shard of the result.
    """

    reduce_bytes: int = -1
    unsharded_gradients: bool = False


def find_parameters(roots: list[nn.Module], ignored: set[int], api: str) -> list[FoundParameter]:
    """The parameters of this unit with their names and places, tied ones once, without those of nested units.

    Raises:
        ValueError: One cannot be managed; some are on the meta device and others are not.
    """
    found: dict[int, tuple[nn.Parameter, str, list[ParamSlot]]] = {}
    for path, owner in own_modules(roots):
        for name, parameter in owner._parameters.items():
            if parameter is None or id(parameter) in ignored:
                continue
            full_name = f"{path}{name}"
            _check_parameter(parameter, full_name, api)
            found.setdefault(id(parameter), (parameter, full_name, []))[2].append(ParamSlot(owner, name))
    _check_same_data([(parameter, name) for parameter, name, _ in found.values()])
    return [FoundParameter(parameter, name, tuple(slots)) for parameter, name, slots in found.values()]


def own_modules(roots: list[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The modules of this unit with the paths to them, without those that nested units contain."""
    # Not `named_modules()`, which goes on into units inside: their parameters would be in two units.
    seen: set[nn.Module] = set()
    own: list[tuple[str, nn.Module]] = []

    def walk(module: nn.Module, path: str) -> None:
        if module in seen:
            return
        seen.add(module)
        own.append((path, module))
        for name, child in module.named_children():
            if not is_wrapped(child):
                walk(child, f"{path}{name}.")

    for root in roots:
        walk(root, "")
    return own


def make_unit(
    roots: list[nn.Module],
    placed: Sequence[tuple[FoundParameter, ParameterPlacement]],
    storage: Storage,
    options: UnitOptions,
    grouping: Grouping,
) -> Unit:
    """Make the unit; modules show its sharded parameters, and leave them in place. Nothing else is changed."""
    for found, _ in placed:
        for slot in found.slots:
            slot.keep_in_place()
    buckets, reducers = make_buckets(placed, storage, options.mp_policy, grouping)
    unit = Unit(roots, buckets, reducers, storage.platform, options)
    unit.wrapping.storage, unit.wrapping.grouping = storage, grouping
    return unit


def make_buckets(
    placed: Sequence[tuple[FoundParameter, ParameterPlacement]],
    storage: Storage,
    mp_policy: MixedPrecisionPolicy,
    grouping: Grouping,
) -> tuple[list[Bucket], list[GradientReducer]]:
    """Shard parameters and let their modules show the shards: the buckets that they are in, and who reduces them."""
    platform = storage.platform
    # Replicated parameters are used where they are: a flat buffer would only be a second copy of them.
    not_flat = Storage(platform, on_host=storage.on_host, pinned=storage.pinned)
    groups: dict[Any, list[tuple[FoundParameter, ParameterPlacement]]] = {}
    for found, placement in placed:
        split = placement.shard_dim is not None
        dtype = found.parameter.dtype
        if not storage.flat:  # converted when they are packed
            dtype = computed_in(dtype, mp_policy.param_dtype)
        # What may share a message: the same ranks, one dtype, and one way to give what is gathered. By first use in
        # registration order, which is the same on all ranks.
        ranks = placement.data if split else placement.reduce_groups
        key = (split, ranks, dtype, has_extension(found.parameter), placement.owner is not None)
        groups.setdefault(key, []).append((found, placement))
    buckets: list[Bucket] = []
    reducers: list[GradientReducer] = []
    for (split, *_, extended, owned), members in groups.items():
        if owned:
            members = sorted(members, key=lambda member: member[1].owner or 0)
        params = []
        for found, placement in members:
            # Before `ManagedParam` copies the attributes: the sharded parameter carries the name on, by which optimizer
            # steps are counted, and a second wrap is refused.
            found.parameter._hyper_parallel_unit_name = found.name  # type: ignore[attr-defined]
            found.parameter._hyper_parallel_is_split = split  # type: ignore[attr-defined]
            params.append(ManagedParam(found.name, list(found.slots), found.parameter, placement))
        placement = members[0][1]
        values = [found.parameter for found, _ in members]
        group = placement.data.shard_group if split and placement.data is not None else None
        if extended:
            bucket: Bucket = ExtensionBucket(params, values, group, storage, mp_policy)
        elif owned:
            bucket = OwnedBucket(params, values, group, storage, mp_policy.param_dtype)
        else:
            bucket = Bucket(params, values, group, storage if split else not_flat, mp_policy.param_dtype)
        bucket.show_shards()  # now: an optimizer that is made before the first forward takes what modules show
        buckets.append(bucket)
        for some in _portions(params, grouping.reduce_bytes):
            reducers.append(
                _reducer(
                    bucket, some, placement, platform, unsharded_gradients=grouping.unsharded_gradients or not split
                )
            )
    target = "main_grad" if mp_policy.apply_grad_on_fp32_main_grad else "grad"
    for bucket in buckets:
        for param in bucket.params:
            param.target = target
    return buckets, reducers


def _portions(params: list[ManagedParam], limit: int) -> list[list[ManagedParam]]:
    """Cut a list of parameters where the bytes of their gradients reach `limit`; -1: nowhere."""
    if limit < 0:
        return [params]
    portions: list[list[ManagedParam]] = []
    size = 0
    for param in params:
        numel = param.numel * param.local.element_size()
        if not portions or size + numel > limit:
            portions.append([])
            size = 0
        portions[-1].append(param)
        size += numel
    return portions


def _reducer(
    bucket: Bucket,
    params: list[ManagedParam],
    placement: ParameterPlacement,
    platform: Platform,
    *,
    unsharded_gradients: bool,
) -> GradientReducer:
    scatter: dist.ProcessGroup | None = None
    replicas = placement.reduce_groups
    if placement.shard_dim is not None and placement.data is not None:
        data = placement.data
        if unsharded_gradients:
            replicas = data.domain_groups
        else:
            scatter = data.shard_group
            replicas = () if data.replicate_group is None else (data.replicate_group,)
    ranks = prod(group.size() for group in replicas) * (1 if scatter is None else scatter.size())
    return GradientReducer(
        bucket,
        params,
        scatter=scatter,
        replicas=replicas,
        ranks=ranks,
        scatters_by_exchange=platform.backend == "gloo",
        sends_each=platform.backend != "gloo" and not platform.prefers_large_messages,
    )


def install(
    unit: Unit, placed: Sequence[tuple[FoundParameter, ParameterPlacement]], make_class: Callable[[Any], Any], api: str
) -> None:
    """Give the modules their new class, and let state dicts and stale parameters know of the unit."""
    for root in unit.modules:
        # Past `__setattr__`, which modules override, to register or to refuse what they do not know.
        root.__dict__["_hyper_parallel_unit"] = unit
        object.__setattr__(root, "__class__", make_class(type(root)))
    for path, module in ((path, module) for root in unit.modules for path, module in root.named_modules()):
        for bucket in () if (nested := unit_of(module)) in (None, unit) else nested.buckets:
            bucket.path_when_wrapped = path
    register_state(unit)
    for owner in dict.fromkeys(slot.module for found, _ in placed for slot in found.slots):
        show_shards_in_state_dicts(unit, owner)
    for found, _ in placed:
        refuse_gradients(found, api)


def refuse_gradients(found: FoundParameter, api: str) -> None:
    """Let a gradient for the parameter as it was be an error: whoever still uses it trains a copy."""
    if not found.parameter.requires_grad:
        return
    name = found.name

    def refuse(gradient: torch.Tensor) -> None:
        del gradient
        blame = f"a gradient arrived for {name!r} as it was before {api} replaced it by a sharded parameter"
        seen = "seen: a module outside of the unit, or a variable, that still uses the old one"
        hint = f"if two modules share the weight, {_together(api)}"
        raise InvalidState("cannot reduce gradients", blame, seen, hint)

    found.parameter.register_hook(refuse)


def move_buffers(roots: list[nn.Module], platform: Platform) -> None:
    """Move the buffers of a unit's modules to its device; meta stays meta, one that several modules hold stays one."""
    device = platform.device()
    moved: dict[int, torch.Tensor] = {}
    for _, owner in own_modules(roots):
        for name, buffer in owner._buffers.items():
            if buffer is None or buffer.device.type in ("meta", device.type):
                continue
            if id(buffer) not in moved:
                moved[id(buffer)] = buffer.to(device)
            owner._buffers[name] = moved[id(buffer)]


def move_plain(roots: Iterable[nn.Module], data: DataParallelMesh, spmd_mesh: DeviceMesh) -> None:
    """Put plain parameters of units inside, that were wrapped before there was a spmd_mesh, onto it."""
    # Optimizers update many parameters at once, which torch does for DTensors of one mesh alone.
    for unit in nested_units(*roots):
        for param in unit.params:
            placement = param.placement
            if placement.data is not None and placement.data.mesh == data.mesh and placement.mesh == data.mesh:
                before = [Replicate() for _ in range(spmd_mesh.ndim - data.axes)]
                param.move_to(spmd_mesh, (*before, *placement.placements))


def nested_placements(roots: Iterable[nn.Module]) -> list[ParameterPlacement]:
    """The placements of the parameters of units inside these modules."""
    return [param.placement for unit in nested_units(*roots) for param in unit.params]


def is_dtensor(found: FoundParameter) -> bool:
    """Whether the parameter is a DTensor already."""
    return isinstance(found.parameter, DTensor)


# -- copies: the same units over the same groups, with values of their own ---------------------------------------------

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
OF_A_UNIT = ("_hyper_parallel_unit", STATE_KEY, REGISTRY_KEY)


def copy_wrapped(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """What `copy.deepcopy` of a wrapped module returns: without gradients, as torch copies parameters.

    Raises:
        TypeError: A unit for `torch.compile` to trace.
        ValueError: A unit has modules outside of this one.
    """
    units = nested_units(module)
    _check(module, units)
    for unit in units:
        unit.reshard()
    with _unwrapped(module, units) as stand_ins:
        made: nn.Module = copy.deepcopy(module, memo)
    copies: dict[int, Unit] = {}
    for unit in reversed(units):  # inner ones first
        copies[id(unit)] = _copy_unit(unit, stand_ins, memo)
    for unit in units:
        _copy_links(unit, copies)
    return made


def _check(module: nn.Module, units: list[Unit]) -> None:
    if nested_traced_units(module):
        blame, seen = "a cell in it was wrapped for torch.compile to trace", "seen: hsdp(..., use_eager_hook=False)"
        hint = "its state_dict(), or copy the module before it is wrapped"
        raise InvalidType(f"cannot copy a {class_name(module)}", blame, seen, hint)
    inside = set(module.modules())
    for unit in units:
        outside = [class_name(m) for m in (*unit.modules, *(s.module for s in _slots(unit))) if m not in inside]
        if outside:
            asked, blame = f"cannot copy a {class_name(module)} alone", "its unit has modules outside of it"
            seen = f"seen: {', '.join(dict.fromkeys(outside))}"
            raise InvalidValue(asked, blame, seen, "copy the module that contains them")


def _slots(unit: Unit) -> list[ParamSlot]:
    return [slot for param in unit.params for slot in param.slots]


@contextmanager
def _unwrapped(module: nn.Module, units: list[Unit]) -> Iterator[dict[int, nn.Parameter]]:
    """For a while, the module as it was before: no units, and parameters of the original shapes without data."""
    before = [(child, type(child), dict(child.__dict__), dict(child._parameters)) for child in module.modules()]
    stand_ins: dict[int, nn.Parameter] = {}
    try:
        for unit in units:
            for param in unit.params:
                empty = torch.empty(param.shape, dtype=param.local.dtype, device="meta")
                stand_ins[id(param)] = nn.Parameter(empty, requires_grad=param.sharded.requires_grad)
                for slot in param.slots:
                    slot.module._parameters[slot.name] = stand_ins[id(param)]
            for root in unit.modules:
                object.__setattr__(root, "__class__", unit.wrapping.original_classes[id(root)])
                # Of forward methods the instance has wrappers, which would gather the unit that is copied.
                for name in (*OF_A_UNIT, *unit.wrapping.forward_methods.get(id(root), ())):
                    root.__dict__.pop(name, None)
        for child, *_ in before:
            for name in HOOKS:
                child.__dict__[name] = OrderedDict(
                    (number, hook) for number, hook in child.__dict__[name].items() if not _is_of_a_unit(hook)
                )
        yield stand_ins
    finally:
        for child, kind, attributes, parameters in before:
            object.__setattr__(child, "__class__", kind)
            child.__dict__.clear()
            child.__dict__.update(attributes)
            child._parameters.update(parameters)


def _is_of_a_unit(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # torch wraps those on state dicts
    return isinstance(getattr(hook, "__self__", None), Unit) or getattr(hook, "is_of_a_unit", False)


def _copy_unit(unit: Unit, stand_ins: dict[int, nn.Parameter], memo: dict[int, Any]) -> Unit:
    params = unit.params
    placed: list[tuple[FoundParameter, ParameterPlacement]] = []
    device = unit.wrapping.storage.device
    for param in params:
        empty = memo[id(stand_ins[id(param)])]
        unsharded = nn.Parameter(empty.detach() if param.local.is_meta else torch.empty_like(empty, device=device))
        if has_extension(param.local):
            unsharded = nn.Parameter(param.local.detach().new_zeros(param.shape))
        unsharded.requires_grad_(empty.requires_grad)
        if param.placement.view_mesh is not None:
            unsharded = _as_dtensor(unsharded, param)
        unsharded.__dict__.update(copy.deepcopy(param.attributes | param.sharded.__dict__, memo))
        slots = tuple(ParamSlot(memo[id(slot.module)], slot.name) for slot in param.slots)
        placed.append((FoundParameter(unsharded, param.name, slots), param.placement))
    roots = [memo[id(root)] for root in unit.modules]
    made = make_unit(roots, placed, unit.wrapping.storage, replace(unit.options), unit.wrapping.grouping)
    for param, twin in zip(params, made.params, strict=True):  # the same keys, hence the same buckets
        memo[id(param.sharded)] = twin.sharded
        with torch.no_grad():
            twin.local.copy_(param.local)
    made.wrapping.ignored = [memo.get(id(parameter), parameter) for parameter in unit.wrapping.ignored]
    classes = {unit.wrapping.original_classes[id(root)]: type(root) for root in unit.modules}
    install(made, placed, classes.__getitem__, "fully_shard")
    made.wrapping.copy = copy_wrapped
    for root, twin in zip(unit.modules, roots, strict=True):
        for name in unit.wrapping.forward_methods.get(id(root), ()):
            register_forward_method(twin, name)
    return made


def _as_dtensor(unsharded: nn.Parameter, param: ManagedParam) -> nn.Parameter:
    model: Any = param.sharded
    assert param.placement.view_mesh is not None
    local = DTensor.from_local(
        unsharded.detach(),
        param.placement.view_mesh,
        param.placement.view_placements,
        run_check=False,
        shape=model.shape,
        stride=model.stride(),
    )
    return nn.Parameter(local, requires_grad=unsharded.requires_grad)


def _copy_links(unit: Unit, copies: dict[int, Unit]) -> None:
    """What units know of each other."""
    made = copies[id(unit)]
    for name in ("forward_prefetch", "backward_prefetch"):
        others = getattr(unit, name)
        if others is not None:
            setattr(made, name, [copies[id(other)] for other in others if id(other) in copies])
    made.use_post_forward_mesh(unit.post_forward_mesh)
    made.wrapping.options, made.wrapping.post_forward_mesh = unit.wrapping.options, unit.wrapping.post_forward_mesh
    made.is_last_backward = unit.is_last_backward if unit.schedule is None else unit.schedule.is_last_backward
    for bucket, twin in zip(unit.buckets, made.buckets, strict=True):
        twin.all_gather_with = bucket.all_gather_with
