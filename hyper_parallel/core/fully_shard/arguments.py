"""Argument checks of ``fully_shard`` and ``hsdp``, made before anything is changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.fully_shard.param import has_extension
from hyper_parallel.core.fully_shard.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from hyper_parallel.core.fully_shard.unit import is_wrapped

__all__ = [
    "PlacementFn",
    "check_fusion",
    "check_modules",
    "check_parameter",
    "check_parameters",
    "check_policies",
    "check_reshard",
    "check_same_data",
    "shard_dim",
]

PlacementFn = Callable[[nn.Parameter], Any]


def check_modules(module: Any, face: str) -> list[nn.Module]:
    """Check the first argument; of a list, keep the modules that no other one contains.

    Raises:
        ValueError: Not a module, an empty list, a module that is wrapped already or has no forward of its own.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            f"{face} cannot wrap inside of torch.inference_mode(): parameters made there cannot be trained\n"
            "  seen: inference mode is on\n"
            "  try: wrap before, and run the forward in inference mode"
        )
    given = list(module) if isinstance(module, (list, tuple)) else [module]
    if not given:
        raise ValueError(f"{face} got an empty list\n  expected: at least one module\n  try: {face}(model)")
    for index, item in enumerate(given):
        if not isinstance(item, nn.Module):
            where = f"item {index} of the list" if isinstance(module, (list, tuple)) else "its argument"
            raise ValueError(
                f"{face} takes modules, but {where} is a {type(item).__name__}: {item!r}\n  try: {face}(model)"
            )
    inside = {id(child) for item in given for child in item.modules() if child is not item}
    roots = [item for item in dict.fromkeys(given) if id(item) not in inside]
    for root in roots:
        if is_wrapped(root):
            raise ValueError(
                f"{type(root).__name__} is wrapped already\n"
                f"  seen: a second {face} of the same module\n"
                "  try: wrap each module once, by one of fully_shard and hsdp, inner modules first"
            )
        if getattr(root.forward, "__func__", None) is nn.Module.forward:
            raise ValueError(
                f"{type(root).__name__} has no forward of its own, before which its parameters could be gathered\n"
                "  seen: a container, whose modules are called one by one\n"
                f"  try: {face} each module in it, or the module that contains it"
            )
    return roots


def check_parameters(
    ignored_params: Iterable[nn.Parameter] | None,
    replicate_params: Iterable[nn.Parameter] | None,
    roots: Sequence[nn.Module],
) -> tuple[set[int], set[int]]:
    """Identities of the parameters to leave alone and of those to keep whole; the former win.

    Raises:
        ValueError: An ignored one that is no parameter; one to keep whole that is not in the module, or that a unit
            inside has split.
        TypeError: One to keep whole that is no parameter.
    """
    ignored = _listed("ignored_params", ignored_params)
    for item in ignored:
        if not isinstance(item, nn.Parameter):
            raise ValueError(
                f"fully_shard cannot ignore a {type(item).__name__}\n"
                "  expected: ignored_params of nn.Parameter\n"
                "  try: ignored_params=[model.scale]"
            )
    whole = _listed("replicate_params", replicate_params)
    names = {id(p): name for root in roots for name, p in root.named_parameters(remove_duplicate=False)}
    for item in whole:
        if not isinstance(item, nn.Parameter):
            raise TypeError(
                f"fully_shard cannot keep a {type(item).__name__} whole on every rank\n"
                "  expected: replicate_params of nn.Parameter\n"
                "  try: replicate_params=[model.norm.weight]"
            )
        if id(item) not in names:
            raise ValueError(
                f"fully_shard cannot keep a parameter of shape {tuple(item.shape)} whole: it is not in the module\n"
                f"  seen: {len(names)} parameters in {', '.join(type(root).__name__ for root in roots)}\n"
                "  try: replicate_params of this module's own, such as [model.norm.weight]"
            )
        if managed_name(item) is not None and id(item) not in {id(i) for i in ignored}:
            raise ValueError(
                f"fully_shard cannot keep {names[id(item)]!r} whole: a unit inside the module manages it already\n"
                f"  seen: {managed_name(item)!r} there\n"
                "  try: pass replicate_params to the call that wraps that unit"
            )
    return {id(item) for item in ignored}, {id(item) for item in whole}


def _listed(name: str, given: Any) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, torch.Tensor) or not isinstance(given, Iterable):
        raise (ValueError if name == "ignored_params" else TypeError)(
            explain(
                f"fully_shard cannot use a {type(given).__name__} as {name}",
                "it takes several parameters",
                f"expected: a set or list of nn.Parameter, or None; got {type(given).__name__}",
                f"{name}=[model.norm.weight]",
            )
        )
    return list(given)


def managed_name(parameter: nn.Parameter) -> str | None:
    """The name under which a unit manages a parameter (the original or the sharded one), or None."""
    name: str | None = getattr(parameter, "_hyper_parallel_unit_name", None)
    return name


def check_policies(mp_policy: Any, offload_policy: Any, comm_fusion: Any, zero_copy: Any) -> None:
    """Check what does not depend on the parameters.

    Raises:
        ValueError: Of another kind, or ``comm_fusion_zero_copy=True`` without ``comm_fusion``.
    """
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise ValueError(
            f"fully_shard cannot use {mp_policy!r} as mp_policy\n"
            f"  expected: hyper_parallel's MixedPrecisionPolicy; seen: one of {type(mp_policy).__module__}\n"
            "  try: mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        )
    if not isinstance(offload_policy, OffloadPolicy):
        raise ValueError(
            f"fully_shard cannot use {offload_policy!r} as offload_policy\n"
            f"  expected: hyper_parallel's OffloadPolicy; seen: one of {type(offload_policy).__module__}\n"
            f"  try: offload_policy={CPUOffloadPolicy()!r}"
        )
    for name, value, allowed in (
        ("comm_fusion", comm_fusion, (True, False)),
        ("comm_fusion_zero_copy", zero_copy, (True, False, None)),
    ):
        if not any(value is choice for choice in allowed):
            raise ValueError(
                f"fully_shard cannot use {value!r} as {name}\n"
                f"  expected: {', '.join(map(repr, allowed))}\n"
                f"  try: {name}=True"
            )
    if zero_copy and not comm_fusion:
        raise ValueError(
            "fully_shard cannot gather from one buffer: comm_fusion_zero_copy=True is about fused communication\n"
            "  seen: comm_fusion=False\n"
            "  try: comm_fusion=True"
        )


def check_reshard(reshard_after_forward: Any) -> None:
    """Check ``reshard_after_forward`` as far as the mesh does not matter.

    Raises:
        ValueError: Neither a bool nor a positive int.
    """
    if isinstance(reshard_after_forward, bool):
        return
    if not isinstance(reshard_after_forward, int) or reshard_after_forward < 1:
        raise ValueError(
            f"fully_shard cannot use {reshard_after_forward!r} as reshard_after_forward\n"
            "  expected: True, False, or the size of a smaller world, an int >= 1\n"
            "  try: reshard_after_forward=True"
        )


def check_same_data(parameters: list[tuple[nn.Parameter, str]]) -> None:
    """Either all parameters of a unit are on the meta device or none.

    Raises:
        ValueError: Some are.
    """
    on_meta = [name for parameter, name in parameters if parameter.is_meta]
    if on_meta and len(on_meta) < len(parameters):
        raise ValueError(
            f"some parameters of the unit are on the meta device, others have data\n"
            f"  on meta: {', '.join(on_meta)}\n"
            "  try: make the whole module on meta, or none of it; or pass the former in ignored_params"
        )


def check_parameter(parameter: nn.Parameter, name: str, face: str) -> None:
    """Check that a parameter can be managed.

    Raises:
        ValueError: Another unit manages it; it has no shape yet, a gradient, hooks that would be lost; it is of a kind
            whose parts are no tensors of their own.
    """
    owner = managed_name(parameter)
    if owner is not None:
        raise ValueError(
            f"parameter {name!r} is the same as {owner!r}, which another unit already manages\n"
            "  seen: one tensor in two units, whose gradients would drift apart\n"
            f"  try: inner modules before the one that contains them; of two modules that share it, {together(face)}"
        )
    if is_lazy(parameter):
        raise ValueError(
            f"parameter {name!r} has no shape yet\n"
            "  seen: a lazy module that has not run\n"
            f"  try: run it once, on any rank's input, before {face}"
        )
    if parameter.grad is not None:
        raise ValueError(
            f"parameter {name!r} has a gradient, which would be lost\n"
            f"  seen: a backward before {face}\n"
            "  try: model.zero_grad() first"
        )
    hooks = (parameter._backward_hooks or {}).values()
    lost = [hook for hook in hooks if not getattr(hook, "is_made_anew", False)]  # a unit sees to the layout itself
    if lost or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise ValueError(
            f"parameter {name!r} has hooks, which would be lost: the parameter is replaced by a sharded one\n"
            "  seen: register_hook or register_post_accumulate_grad_hook before wrapping\n"
            f"  try: register them on the parameter that the module has after {face}"
        )
    if face == "fully_shard" and _is_extended(parameter, name):
        return
    reason = unpackable(parameter)
    if reason is not None:
        raise ValueError(
            f"parameter {name!r} cannot be split: {reason}\n"
            f"  seen: {type(parameter).__name__}, {parameter.layout}\n"
            "  try: a plain tensor, or pass it in ignored_params"
        )


def _is_extended(parameter: nn.Parameter, name: str) -> bool:
    """Whether a parameter has FSDP2's tensor extension, in a form that can be used."""
    local: Any = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    found = [method for method in ("fsdp_pre_all_gather", "fsdp_post_all_gather") if hasattr(local, method)]
    if not found:
        return False
    if len(found) == 1:
        raise ValueError(
            f"parameter {name!r} cannot be split: it has {found[0]} alone, which needs the other one of the two\n"
            f"  seen: a {type(local).__name__}\n"
            "  try: both fsdp_pre_all_gather and fsdp_post_all_gather, or pass it in ignored_params"
        )
    signature = inspect.signature(local.fsdp_pre_all_gather)
    if len(signature.parameters) not in (1, 5):
        raise ValueError(
            f"parameter {name!r} cannot be split: its fsdp_pre_all_gather does not take what it is called with\n"
            f"  seen: {type(local).__name__}.fsdp_pre_all_gather{signature}\n"
            "  try: (self, mesh), or (self, mesh, outer_size, outer_stride, module, mp_policy)"
        )
    with torch.no_grad():
        part = local.detach()
        part = part.narrow(0, 0, 0).new_zeros((0, *part.shape[1:])) if part.dim() else part
    if not has_extension(part):
        raise ValueError(
            f"parameter {name!r} cannot be split: parts of it have lost fsdp_pre_all_gather\n"
            f"  seen: a {type(local).__name__}, whose detach(), narrow() or new_zeros() is a {type(part).__name__}\n"
            "  try: a __torch_dispatch__ that keeps the class for detach, slice, new_zeros, view, copy_ and _to_copy"
        )
    return True


def together(face: str) -> str:
    """How to wrap two modules that share a parameter."""
    one = "wrap both modules as one unit, fully_shard([a, b]), or " if face == "fully_shard" else ""
    return f"{one}wrap only the module that contains both"


def unpackable(parameter: nn.Parameter) -> str | None:
    """Why parts of a parameter cannot be copied as plain memory; None if they can."""
    local: Any = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    if local.layout is not torch.strided:
        return "it is sparse"
    if has_extension(local):
        return "it is gathered in its own way, by fsdp_pre_all_gather"
    if is_traceable_wrapper_subclass(local):
        return "it is a tensor subclass that holds its values in other tensors"
    return None


def check_fusion(name: str, reason: str) -> None:
    """Refuse ``comm_fusion`` for a parameter.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"comm_fusion cannot take parameter {name!r}: {reason}\n"
        "  seen: comm_fusion=True\n"
        "  try: comm_fusion=False, or pass it in replicate_params or ignored_params"
    )


def shard_dim(parameter: nn.Parameter, name: str, placement_fn: PlacementFn | None) -> int:
    """The dim to split, as ``shard_placement_fn`` says.

    Raises:
        ValueError: It returns something else than ``Shard(dim)`` or None, or a dim that the parameter lacks.
    """
    if placement_fn is None:
        return 0
    placement = placement_fn(parameter)
    if placement is None:
        return 0
    if type(placement) is not Shard:
        raise ValueError(
            f"shard_placement_fn returned {placement!r} for parameter {name!r}\n"
            "  expected: Shard(dim) of torch.distributed.tensor, or None for dim 0\n"
            "  try: lambda p: Shard(1) if p.dim() > 1 else None"
        )
    dims = parameter.dim()
    if not -dims <= placement.dim < dims:
        raise ValueError(
            f"shard_placement_fn returned {placement!r} for parameter {name!r}, which has no such dim\n"
            f"  seen: shape {tuple(parameter.shape)}\n"
            f"  try: a dim from 0 to {dims - 1}"
        )
    if placement.dim % dims and has_extension(parameter):
        raise ValueError(
            f"shard_placement_fn returned {placement!r} for parameter {name!r}, which has fsdp_pre_all_gather\n"
            "  expected: Shard(0): what it gathers is handed to fsdp_post_all_gather one below the other\n"
            "  try: Shard(0) or None for this parameter"
        )
    return placement.dim % dims
