"""Clipping of gradients by their norm over all parameters, on any mix of meshes.

Ranks hold different shards of a gradient along the axes that shard its parameter, and copies along all others. So the
norm to the power of p is a sum over the sharding axes' groups, and over nothing else. Which groups those are is read
from the parameters, never from the gradients: a rank without gradients takes part too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate

from hyper_parallel.core.common.checks import check
from hyper_parallel.core.common.errors import InvalidState, InvalidType, InvalidValue
from hyper_parallel.core.common.torch_compat import record_function, replaced_by
from hyper_parallel.core.fully_shard.comm import GroupLog
from hyper_parallel.core.fully_shard.schedule import check_logs, hsdp_sync_stream, log_of
from hyper_parallel.core.mesh.device_mesh import mesh_among
from hyper_parallel.core.redistribute.api import redistribute
from hyper_parallel.platform import get_platform

_WIDER = MappingProxyType(
    {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
)


_DOUBLE = (torch.float64, torch.complex128)


_Key = tuple[str, tuple[int, ...]]


"""What tells groups apart: the type of device that they move, and their ranks."""


class _Parameter(NamedTuple):
    """A parameter and its gradient, as one rank sees them."""

    name: str
    param: torch.Tensor
    grad: torch.Tensor | None
    axes: tuple[_Key, ...]  # the groups over which the shards of the gradient differ


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    stage_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Scale all gradients down, in place, so that their norm taken together is at most `max_norm`.

        >>> weight = nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_(weight, max_norm=1.0)
        tensor(5.)
        >>> weight.grad
        tensor([0.6000, 0.8000])

    As `torch.nn.utils.clip_grad_norm_`, whose arguments it takes, but parameters may lie on different meshes or on
    none. Every rank calls it with the same parameters, with gradients or without. The gradients are multiplied by
    `min(1, max_norm / (norm + 1e-6))`, and left alone where `max_norm` is inf. The gradient of a parameter whose
    `grad` is None is its `main_grad`, if it has one; an `acc_grad` of `hsdp` is not looked at and not scaled.

    Communication: see `get_total_norm`; the scaling needs none.

    Args:
        parameters: a module, a parameter, or parameters: DTensors, plain tensors. One that comes twice counts once.
        max_norm: from 0 up, inf for no limit.
        norm_type: the p of the norm, above 0; `inf` or `"inf"` for the largest absolute value.
        error_if_nonfinite: raise where the norm is inf or NaN. Looks at the norm's value, so that the host waits.
        foreach: False for one kernel per gradient in place of a few for all of them.
        stage_group: see `get_total_norm`.

    Returns:
        The norm before, as `get_total_norm`.

    Raises:
        TypeError, ValueError: as `get_total_norm`; also for a `max_norm` that is no number, NaN or negative. All of
            them are raised before any communication of its own.
        RuntimeError: the norm is not finite, with `error_if_nonfinite`; no gradient has been changed. Or ranks have
            gathered or reduced different units together.
    """
    asked = "cannot clip gradients"
    limit = _limit(asked, max_norm)
    p = _options(asked, norm_type, error_if_nonfinite, foreach, stage_group)
    hsdp_sync_stream()
    with record_function("clip_grad_norm_"):
        found, groups = _read(asked, parameters)
        total = _norm_of(found, groups, p, foreach, stage_group)
        _check_finite(asked, total, p, error_if_nonfinite)
        if limit < math.inf:
            _scale([_local(x.grad) for x in found if x.grad is not None], limit, total, foreach)
    check_logs()  # before an optimizer steps; last, as a device still has all of the above to do
    return total


@torch.no_grad()
def get_total_norm(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    stage_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the norm of the gradients of all parameters, as if they were one vector; each element counts once.

        >>> layer = nn.Linear(2, 1)
        >>> layer.weight.grad = torch.tensor([[3.0, -4.0]])
        >>> get_total_norm(layer), get_total_norm(layer, norm_type=1)
        (tensor(5.), tensor(7.))

    Unlike torch's function of that name it takes the parameters and not their gradients: they say where shards of a
    gradient lie on ranks that have no gradient. A gradient is in its parameter's layout or, in another one, is brought
    there first for the norm only, so that a pending sum is the norm of the sum; such a gradient must be there on all
    ranks of its mesh.

    Plain parameters, and the copies that a DTensor has along the axes that do not split it, are taken to have equal
    gradients on all ranks. A rank outside a parameter's mesh does not count it.

    Communication: one all_reduce for each process group along which any parameter is split, of a number per distinct
    set of such groups. Which they are depends on the parameters alone, so that no rank waits for one without gradients.
    Before that, `hsdp_sync_stream()` waits for gradients that are still being reduced. If units of `fully_shard` or
    `hsdp` have reduced any since ranks last compared, 64 numbers more say what each rank has gathered and reduced.

    Args:
        parameters: as for `clip_grad_norm_`.
        norm_type: as there.
        error_if_nonfinite: as there.
        foreach: as there.
        stage_group: ranks that hold other parameters, such as one rank of each stage of a pipeline; the norm is then
            over the parameters of all of them. One more all_reduce, of one number. Without it the norm is over the
            meshes of the parameters, and stages are the caller's to combine. A weight that two stages share
            counts twice.

    Returns:
        A plain tensor without dims on the device of the first parameter, the same on every rank; float64 if any
        parameter is, else float32. It overflows where the sum of the p-th powers does, as torch's for float32.

    Raises:
        TypeError: an argument of another type than above.
        ValueError: a `norm_type` of 0 or less, or NaN; a gradient that is sparse, or on another mesh than its
            parameter; parameters some of which are on meta.
        RuntimeError: the norm is not finite, with `error_if_nonfinite`; or ranks have gathered or reduced different
            units together.
    """
    asked = "cannot take the norm of gradients"
    p = _options(asked, norm_type, error_if_nonfinite, foreach, stage_group)
    hsdp_sync_stream()
    found, groups = _read(asked, parameters)
    total = _norm_of(found, groups, p, foreach, stage_group)
    _check_finite(asked, total, p, error_if_nonfinite)
    check_logs()
    return total


@torch.no_grad()
def clip_grads_with_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    """Scale all gradients down, in place, given their norm; it is the second half of `clip_grad_norm_`.

        >>> weight = nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grads_with_norm_(weight, max_norm=1.0, total_norm=torch.tensor(10.0))
        >>> weight.grad
        tensor([0.3000, 0.4000])

    Communication: none.

    Args:
        parameters: as for `clip_grad_norm_`.
        max_norm: as there.
        total_norm: a tensor without dims, as `get_total_norm` returns.
        foreach: as there.

    Raises:
        TypeError, ValueError: as `clip_grad_norm_`.
    """
    asked = "cannot clip gradients"
    limit = _limit(asked, max_norm)
    _options(asked, 2.0, False, foreach, None)
    if not isinstance(total_norm, torch.Tensor) or total_norm.numel() != 1:
        blame = f"total_norm must be a tensor of one element, not {type(total_norm).__name__}"
        hint = "total_norm=get_total_norm(parameters)"
        raise InvalidType(asked, blame, f"total_norm: {total_norm!r}", hint)
    hsdp_sync_stream()
    grads = [_local(x) for name, param in _named(asked, parameters) if (x := _gradient(asked, name, param)) is not None]
    if limit < math.inf:
        _scale(grads, limit, total_norm, foreach)


# -- what was given --------------------------------------------------------------------------------------------------


def _limit(asked: str, max_norm: float | torch.Tensor) -> float:
    limit = float(max_norm)
    if not limit >= 0.0:
        blame = f"max_norm must be 0 or more, not {limit}"
        raise InvalidValue(asked, blame, f"max_norm: {max_norm!r}", "max_norm=1.0, or max_norm=math.inf")
    return limit


def _options(asked: str, norm_type: Any, error_if_nonfinite: object, foreach: object, stage_group: object) -> float:
    """Check all arguments but the parameters, and return p."""
    p = float(norm_type)
    if not p > 0.0:
        blame = f"norm_type must be above 0, not {p}"
        raise InvalidValue(asked, blame, f"norm_type: {norm_type!r}", "norm_type=1.0, 2.0, or math.inf")
    check(asked, "bool", error_if_nonfinite=error_if_nonfinite)
    check(asked, "bool | None", "foreach=None", foreach=foreach)
    hint = 'stage_group=mesh.get_group("pp"), of which the calling rank is a member'
    check(asked, "group | None", hint, stage_group=stage_group)
    return p


def _read(asked: str, parameters: object) -> tuple[list[_Parameter], dict[_Key, dist.ProcessGroup]]:
    """Return the parameters, each once, and the groups along which any of them is split, by first need."""
    groups: dict[_Key, dist.ProcessGroup] = {}
    known: dict[tuple[int, int], _Key] = {}
    found = [
        _Parameter(name, param, _gradient(asked, name, param), _axes(param, groups, known))
        for name, param in _named(asked, parameters)
    ]
    on_meta = [x for x in found if x.param.is_meta]
    if on_meta and len(on_meta) < len(found):
        elsewhere = next(x for x in found if not x.param.is_meta)
        blame = f"{on_meta[0].name} is on meta, {elsewhere.name} is not"
        seen = f"{len(on_meta)} of {len(found)} parameters on meta, {elsewhere.name} on {elsewhere.param.device}"
        raise InvalidValue(asked, blame, seen, 'model.to_empty(device="cpu") and an initialization')
    return found, groups


def _named(asked: str, parameters: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(parameters, nn.Module):
        return [(f"parameter {name!r}", param) for name, param in parameters.named_parameters()]
    if isinstance(parameters, torch.Tensor):
        return [("the parameter", parameters)]
    hint = "clip_grad_norm_(model.parameters(), max_norm=1.0)"
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for number, param in enumerate(parameters):
        if not isinstance(param, torch.Tensor):  # asked here: there may be thousands, in every step
            check(asked, "tensor", hint, **{f"parameters[{number}]": param})
        named.setdefault(id(param), (f"parameter number {number}", param))
    return list(named.values())


def _gradient(asked: str, name: str, param: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient, or None, and check that it is one of this parameter."""
    if (by := replaced_by(param)) is not None:
        blame = f"{name} is not the one that has the gradient: {by} puts a sharded one in its place"
        raise InvalidValue(asked, blame, f"parameter: {_show(param)}", f"model.parameters() after {by}")
    attribute = "grad" if param.grad is not None else "main_grad"
    grad = getattr(param, attribute, None)
    if grad is None:
        return None
    fault = _fault(name, param, grad)
    if fault is not None:
        seen = f"parameter: {_show(param)}   {attribute}: {_show(grad)}"
        raise InvalidValue(asked, fault[0], seen, fault[1])
    return grad


def _fault(name: str, param: torch.Tensor, grad: torch.Tensor) -> tuple[str, str] | None:
    """Return why a gradient cannot be one of this parameter, and what to try; None if it can."""
    if grad.layout != torch.strided:
        return f"the gradient of {name} is sparse", "param.grad = param.grad.to_dense()"
    if not isinstance(grad, DTensor):
        if isinstance(param, DTensor) and grad.shape != param.to_local().shape:
            blame = f"the gradient of {name} is neither a DTensor nor of the shape of the rank's own shard"
            return blame, f"a tensor of shape {tuple(param.to_local().shape)}, or a DTensor"
        return None
    if not isinstance(param, DTensor):
        return f"the gradient of {name} is a DTensor and the parameter is none", "grad.full_tensor()"
    if grad.device_mesh != param.device_mesh:
        blame = f"the gradient of {name} lies on another mesh than the parameter"
        return blame, "redistribute(grad, param.device_mesh, param.placements)"
    if any(getattr(placement, "reduce_op", None) == "product" for placement in grad.placements):
        blame = f"the gradient of {name} is a pending product, of which each factor would be scaled"
        return blame, "redistribute(grad, param.device_mesh, param.placements)"
    return None


def _show(x: torch.Tensor) -> str:
    kind = f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
    return f"{kind} {x.placements} on {x.device_mesh}" if isinstance(x, DTensor) else f"{kind} plain"


def _axes(
    param: torch.Tensor, groups: dict[_Key, dist.ProcessGroup], known: dict[tuple[int, int], _Key]
) -> tuple[_Key, ...]:
    """Return the groups along which a parameter is split, sorted, and note new ones.

    Args:
        param: the parameter.
        groups: all groups so far.
        known: by mesh and axis, as it takes torch long to find a group.
    """
    if not isinstance(param, DTensor):
        return ()
    mesh, keys = mesh_among(param.device_mesh), set[_Key]()  # ranks that own none of it count 0
    if mesh.get_coordinate() is None:
        return ()
    for axis, placement in enumerate(param.placements):
        if placement.is_replicate() or placement.is_partial():
            continue
        place = (id(mesh), axis)
        if place not in known:
            group = mesh.get_group(axis)
            known[place] = (mesh.device_type, tuple(dist.get_process_group_ranks(group)))
            groups.setdefault(known[place], group)
        keys.add(known[place])
    return tuple(sorted(keys))


# -- the norm --------------------------------------------------------------------------------------------------------


def _norm_of(
    found: Sequence[_Parameter],
    groups: dict[_Key, dist.ProcessGroup],
    p: float,
    foreach: bool | None,
    stage_group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Return the norm over the shards of all ranks. What is added up on the way are p-th powers, or maxima."""
    if found:
        out_device = found[0].param.device
    else:
        out_device = torch.device("cpu") if stage_group is None else get_platform().device()
    dtype = torch.float64 if any(_is_double(x.param) for x in found) else torch.float32
    powers = _own_powers(found, p, foreach, dtype, out_device)
    # All ranks of a group are at it in the same order, which is that of the parameters.
    for key, group in groups.items():
        joined = [axes for axes in powers if key in axes]
        values = _reduce([powers[axes] for axes in joined], p, group, log_of(group))
        powers.update(zip(joined, values, strict=True))
    total = (
        _add(torch.stack([shard.to(out_device) for shard in powers.values()]), p)
        if powers
        else torch.zeros((), dtype=dtype, device=out_device)
    )
    if stage_group is not None:
        device = next((_device(key, out_device) for key in groups), out_device)
        total = _reduce([total.to(device)], p, stage_group)[0].to(out_device)
    return total if p == math.inf else total.pow(1.0 / p)


def _is_double(param: torch.Tensor) -> bool:
    # What a gradient will be in, gradient or not, lest two ranks bring different dtypes to a collective.
    wanted = getattr(param, "grad_dtype", None) if param.is_leaf else None
    return param.dtype in _DOUBLE or wanted in _DOUBLE


def _own_powers(
    found: Sequence[_Parameter], p: float, foreach: bool | None, dtype: torch.dtype, out_device: torch.device
) -> dict[tuple[_Key, ...], torch.Tensor]:
    """Return the p-th powers of the rank's own shards, added up for each set of groups that parameters are split along.

    Every set that any parameter has is there, 0 where this rank has nothing to add.
    """
    measured = [(x.axes, _own_part(x.param, x.grad)) for x in found if x.grad is not None]
    measured = [(axes, shard) for axes, shard in measured if shard.numel()]  # nothing has no largest element
    norms = _norms([shard for _, shard in measured], p, foreach)
    powers: dict[tuple[_Key, ...], torch.Tensor] = {}
    for axes in dict.fromkeys(x.axes for x in found):
        device = _device(axes[0], out_device) if axes else out_device
        own = [norm.to(device, dtype) for (of, _), norm in zip(measured, norms, strict=True) if of == axes]
        if own:
            stacked = torch.stack(own)
            powers[axes] = _add(stacked if p == math.inf else stacked.pow(p), p)
        else:
            powers[axes] = torch.zeros((), dtype=dtype, device=device)
    return powers


def _own_part(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the rank's shard of a gradient, in the layout of the parameter."""
    if isinstance(param, DTensor) and isinstance(grad, DTensor):
        wanted = [Replicate() if placement.is_partial() else placement for placement in param.placements]
        if grad.placements != tuple(wanted):
            grad = redistribute(grad, grad.device_mesh, wanted)
    return _local(grad)


def _local(grad: torch.Tensor) -> torch.Tensor:
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _device(key: _Key, out_device: torch.device) -> torch.device:
    """Return where a group's numbers must be: with offload the gradients are elsewhere. Meta stays on meta."""
    return out_device if out_device.type in (key[0], "meta") else get_platform(key[0]).device()


def _alike(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the places of the tensors of each device and dtype."""
    places: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault((tensor.device, tensor.dtype), []).append(place)
    return list(places.values())


def _norms(tensors: Sequence[torch.Tensor], p: float, foreach: bool | None) -> list[torch.Tensor]:
    """Return the norm of each tensor, in float32 or better."""
    norms: dict[int, torch.Tensor] = {}
    for places in _alike(tensors):
        tensors_of_dtype = [tensors[place] for place in places]
        dtype = _WIDER.get(tensors_of_dtype[0].dtype)
        if foreach is False:
            norms.update((place, torch.linalg.vector_norm(tensors[place], p, dtype=dtype)) for place in places)
        else:
            norms.update(zip(places, torch._foreach_norm(tensors_of_dtype, p, dtype=dtype), strict=True))
    return [norms[place] for place in range(len(tensors))]


def _add(powers: torch.Tensor, p: float) -> torch.Tensor:
    return powers.amax() if p == math.inf else powers.sum()


def _reduce(
    values: Sequence[torch.Tensor], p: float, group: dist.ProcessGroup, log: GroupLog | None = None
) -> list[torch.Tensor]:
    """Add up, or take the maxima of, each value over the ranks of a group; they compare their logs by the way."""
    joined, op = torch.stack(list(values)), dist.ReduceOp.SUM
    if p == math.inf:
        # The maximum of a NaN and a number is either, by backend: so NaNs travel as a row of their own.
        unknown = joined.isnan()
        joined, op = torch.cat([joined.masked_fill(unknown, 0.0), unknown.to(joined.dtype)]), dist.ReduceOp.MAX
    sent = joined if log is None else log.carried(joined)
    dist.all_reduce(sent, op=op, group=group)
    if log is not None and sent is not joined:
        sent = log.read_carried(get_platform(sent.device.type), joined.numel(), sent)
    if p < math.inf:
        return list(sent.unbind())
    rows = sent.view(2, -1)
    return list(rows[0].masked_fill(rows[1] > 0, math.nan).unbind())


def _check_finite(asked: str, total: torch.Tensor, p: float, error_if_nonfinite: bool) -> None:
    if not error_if_nonfinite or total.is_meta or bool(total.isfinite()):
        return
    blame = f"the norm of order {p} is {total.item()}, and error_if_nonfinite is set"
    hint = "a smaller learning rate or loss scale, or error_if_nonfinite=False and skip the step"
    raise InvalidState(asked, blame, f"norm: {total.item()}   norm_type: {p}", hint)


# -- the scaling -----------------------------------------------------------------------------------------------------


def _scale(grads: Sequence[torch.Tensor], limit: float, total: torch.Tensor, foreach: bool | None) -> None:
    """Multiply all gradients; on the device, without a look at the norm, for which the host would have to wait."""
    factor = (limit / (total + 1e-6)).clamp(max=1.0)
    for places in _alike(grads):
        same_device = [grads[place] for place in places]
        own = factor.to(same_device[0].device)
        if foreach is False:
            for grad in same_device:
                grad.mul_(own)
        else:
            torch._foreach_mul_(same_device, own)
