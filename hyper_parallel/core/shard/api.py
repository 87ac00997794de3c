"""Entry point of plans: `shard_module` applies a plan to a model.

torch's tensor-parallel styles are re-exported, because a model can combine them with a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from hyper_parallel.core.common.checks import check
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.common.torch_compat import note_replaced, refuse_lost
from hyper_parallel.core.dtensor.convert import build, torch_form
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.init.api import init_parameters
from hyper_parallel.core.mesh.device_mesh import axes_of, check_ascending
from hyper_parallel.core.redistribute.api import distribute_tensor, redistribute
from hyper_parallel.core.shard.boundaries import Arguments, Inputs, Outputs, localized
from hyper_parallel.core.shard.local import custom_shard
from hyper_parallel.core.shard.local_module import LocalModule
from hyper_parallel.core.shard.region import Region, is_unit
from hyper_parallel.core.shard.sharding_plan import Reading, ShardingPlan, names_of, read_plan
from hyper_parallel.core.shard.spelling import layout_on
from hyper_parallel.core.shard.value_and_grad import parallelize_value_and_grad

__all__ = [
    "ColwiseParallel",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "ShardingPlan",
    "custom_shard",
    "init_parameters",
    "parallelize_module",
    "parallelize_value_and_grad",
    "shard_module",
]

M = TypeVar("M", bound=Callable[..., Any])

_WATCHED = "_hyper_parallel_watched"


def shard_module(model: M, device_mesh: DeviceMesh, sharding_plan: ShardingPlan, *, src_data_rank: int | None = 0) -> M:
    """Give the parameters, inputs and outputs of a model the layouts of a plan.

        mesh = init_device_mesh("npu", (2, 4), mesh_dim_names=("dp", "tp"))
        plan = ShardingPlan(
            plan={"w1.weight": ("tp", "None"), "w2.weight": ("None", "tp")},
            output_plan={"output": ("dp", "None")},
        )
        model = shard_module(model, mesh, plan)  # before the optimizer is made
        y = model(distribute_tensor(x, Layout.from_device_mesh(mesh)("dp", "None")))

    Parameters named by the plan become DTensors; each gradient is redistributed to its parameter's layout when it
    arrives. DTensors are redistributed at the inputs and outputs of modules; other tensors pass unchanged. To shard
    parameters over a further axis, e.g. "dp", call `fully_shard` or `hsdp` with that axis afterwards.

    Communication now: one `distribute_tensor` per parameter (none with `src_data_rank=None` or on the meta device).
    Forward and backward of each step: the redistributions at module boundaries.

    Args:
        model: a module, changed in place; or a function, whose arguments are "input" and whose results are "output".
        device_mesh: the mesh of the plan's axis names, or a slice of it.
        sharding_plan: the layouts.
        src_data_rank: see `distribute_tensor`; None: each rank uses its own parameters, which must be equal.

    Returns:
        The module itself. For a function, a wrapper, or the function itself if the plan has no entry for it. On a mesh
        of one rank, the model unchanged.

    Raises:
        TypeError: no module or function, no mesh, a field of the plan of the wrong type.
        ValueError: a path, argument or axis that does not exist; a value that is no layout, or a layout that does not
            fit; parameters under `fully_shard` or on another mesh; parameters with a gradient or hooks, because those
            would be lost.
    """
    asked = "cannot shard the model"
    check(asked, "module | callable", "shard_module(model, mesh, plan)", model=model)
    check_ascending(asked, device_mesh)
    if not isinstance(model, nn.Module):
        return _shard_function(asked, model, device_mesh, sharding_plan)
    modules, parameters = names_of(model)
    reading = read_plan(asked, sharding_plan, device_mesh, modules, parameters)
    chosen = _check_parameters(asked, model, reading, device_mesh)
    boundaries = _boundaries(model, reading)
    if device_mesh.size() == 1:
        return model
    if chosen:
        model.register_forward_pre_hook(_Watch(_distribute(model, chosen, src_data_rank)))
    for module, attach in boundaries:
        attach(module)
    return model


# -- parameters ------------------------------------------------------------------------------------------------------


def _check_parameters(
    asked: str, model: nn.Module, reading: Reading, mesh: DeviceMesh
) -> list[tuple[nn.Parameter, list[str], Layout]]:
    """Return the parameters to distribute, each with all its names."""
    names: dict[int, list[str]] = {}
    params = dict(model.named_parameters(remove_duplicate=False))
    for name, param in params.items():
        names.setdefault(id(param), []).append(name)
    chosen: dict[int, tuple[nn.Parameter, list[str], Layout]] = {}
    for name, layout in reading.parameters.items():
        param, aliases = params[name], names[id(params[name])]
        known = chosen.get(id(param))
        if known is not None and known[2] != layout:
            other = next(alias for alias in aliases if alias in reading.parameters and alias != name)
            blame = f"{name!r} and {other!r} are one parameter, and the plan has two layouts for it"
            seen = f"{name}: {layout}   {other}: {reading.parameters[other]}"
            raise InvalidValue(asked, blame, seen, "the same layout for both, or one of them only")
        chosen[id(param)] = param, aliases, layout
        _check_parameter(asked, model, name, param, layout, mesh)
        refuse_lost(f"{asked}: parameter {name!r}", param, "shard_module")
    return list(chosen.values())


def _check_parameter(
    asked: str, model: nn.Module, name: str, param: nn.Parameter, layout: Layout, mesh: DeviceMesh
) -> None:
    path = name.rpartition(".")[0]
    above = [path[:end] for end in range(len(path) + 1) if end == len(path) or path[end] == "."]
    wrapped = next((each for each in ["", *above] if is_unit(model.get_submodule(each))), None)
    if wrapped is not None:
        blame = f"fully_shard or hsdp has parameter {name!r} already, with module {wrapped!r}"
        hint = "shard_module first, fully_shard after it"
        raise InvalidValue(asked, blame, f"layout: {layout}", hint)
    if isinstance(param, DTensor) and axes_of(param.device_mesh) != layout._axes:
        blame = f"parameter {name!r} is a DTensor on another mesh"
        seen = f"parameter: {param.placements} on {axes_of(param.device_mesh)}   layout: {layout}"
        raise InvalidValue(asked, blame, seen, "its mesh, or a model whose parameters are unsharded")
    try:
        torch_form(layout, param.shape)
    except ValueError as error:
        first, _, rest = str(error).partition("\n")
        raise InvalidValue(f"{asked}: parameter {name!r}: {first}\n{rest}") from None


def _distribute(
    model: nn.Module, chosen: list[tuple[nn.Parameter, list[str], Layout]], src_data_rank: int | None
) -> list[tuple[nn.Module, str]]:
    """Replace parameters, and return the modules and names that hold them."""
    places: list[tuple[nn.Module, str]] = []
    for param, names, layout in chosen:
        new = nn.Parameter(_distributed(param, layout, src_data_rank), requires_grad=param.requires_grad)
        new.__dict__.update(param.__dict__)  # attributes set by the model, e.g. weight-decay flags
        if new.requires_grad:
            _watch(new, layout)
        for name in names:
            path, _, last = name.rpartition(".")
            places.append((model.get_submodule(path), last))
            places[-1][0]._parameters[last] = new
        note_replaced(param, names[0], "shard_module")
    return places


def _distributed(param: nn.Parameter, layout: Layout, src_data_rank: int | None) -> DTensor:
    with torch.no_grad():
        if isinstance(param, DTensor):
            return redistribute(param.detach(), layout)
        if param.is_meta:
            return build(
                torch.empty(layout.local_shape(param.shape), device="meta", dtype=param.dtype), layout, param.shape
            )
        return distribute_tensor(param.detach(), layout, src_data_rank=src_data_rank)


class _GradientLayout:
    """Hook that redistributes a gradient to its parameter's layout, because torch leaves reductions pending."""

    is_made_anew = True  # `fully_shard` may drop this hook, because it redistributes gradients itself

    def __init__(self, param: Any, layout: Layout) -> None:
        self.layout, self.mesh, self.placements = layout, param.device_mesh, param.placements

    def __call__(self, grad: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(grad, DTensor):
            return None
        spec = grad._spec
        if spec.placements == self.placements and spec.mesh is self.mesh:
            return None
        return redistribute(grad, self.layout)  # differentiable, for second derivatives


class _Watch:
    """Forward pre-hook that gives a `_GradientLayout` to parameters without one: copied, cast, loaded or unfrozen ones.

    Args:
        places: modules with names of their parameters.
    """

    def __init__(self, places: list[tuple[nn.Module, str]]) -> None:
        self.places = places

    def __call__(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        bare: list[DTensor] = []
        for owner, name in self.places:
            param: Any = owner._parameters.get(name)
            if isinstance(param, DTensor) and param.requires_grad and param.is_leaf and not _is_watched(param):
                bare.append(param)
        if bare and not any(map(is_unit, model.modules())):  # a unit redistributes gradients itself
            for found in bare:
                _watch(found, Layout.of(found))


def _watch(param: torch.Tensor, layout: Layout) -> None:
    hooks: Any = param._backward_hooks
    if hooks:
        for key in [key for key, hook in hooks.items() if isinstance(hook, _GradientLayout)]:
            del hooks[key]
        param._backward_hooks = hooks  # swapping a tensor's memory, e.g. by a cast, disables its hooks
    param.register_hook(_GradientLayout(param, layout))
    param.__dict__[_WATCHED] = param._cdata


def _is_watched(param: torch.Tensor) -> bool:
    return param.__dict__.get(_WATCHED) == param._cdata and bool(param._backward_hooks)


# -- boundaries ------------------------------------------------------------------------------------------------------


def _boundaries(model: nn.Module, reading: Reading) -> list[tuple[nn.Module, Callable[[nn.Module], None]]]:
    """Return the modules with layouts at their boundary, each with the function that attaches the hooks."""
    found: list[tuple[nn.Module, Callable[[nn.Module], None]]] = []
    done: dict[int, str] = {}
    region = Region()
    region.paths.update((module, name) for name, module in model.named_modules() if name in reading.local)
    for name, module in model.named_modules(remove_duplicate=False):
        here = _said(reading, name)
        if all(each is None or each is False for each in here):
            continue
        if id(module) in done:
            first = done[id(module)]
            if here != _said(reading, first):
                blame = f"{name!r} and {first!r} are one module, and the plan says different things of it"
                raise InvalidValue("cannot shard the model", blame, f"modules: {first}, {name}", "one of the two")
            continue
        done[id(module)] = name
        found.append((module, _attachment(name, module, reading, region)))
    return found


def _said(reading: Reading, name: str) -> tuple[Any, ...]:
    """Return all entries of a plan for a module's boundary."""
    inputs, outputs, produced = (each.get(name) for each in (reading.inputs, reading.outputs, reading.local))
    return inputs, outputs, produced, name in reading.returned, name in reading.resharded, reading.chunks.get(name)


def _attachment(name: str, module: nn.Module, reading: Reading, region: Region) -> Callable[[nn.Module], None]:
    where = f"module {name!r}" if name else "the model"
    inputs, outputs, produced, returns, reshards, chunks = _said(reading, name)
    before = after = local = None
    if produced is not None:
        local = LocalModule(
            name, module, produced, inputs, outputs, region, wraps=reading.wrap_inputs, reshards=reshards, chunks=chunks
        )
    else:
        if inputs is not None:
            before = Inputs(where, inputs, Arguments.of(module.forward), wrap=reading.wrap_inputs)
        if outputs is not None:
            after = Outputs(where, outputs)

    def attach(module: nn.Module) -> None:
        if local is not None:
            if local.chunks is not None:
                module.forward = partial(local.in_chunks, module.forward)
            module.register_forward_pre_hook(local.before, with_kwargs=True)
            module.register_forward_hook(local.after, always_call=True)
        if before is not None:
            module.register_forward_pre_hook(lambda module, args, kwargs: before(args, kwargs), with_kwargs=True)
        if after is not None:
            module.register_forward_hook(lambda module, args, result: after(result))
        if returns:
            module.register_forward_hook(lambda module, args, result: localized(result))

    return attach


def _shard_function(asked: str, function: M, mesh: DeviceMesh, plan: ShardingPlan) -> M:
    name = getattr(function, "__qualname__", type(function).__name__)
    if isinstance(plan, ShardingPlan):
        for field in ("plan", "return_local_tensor", "local_plan", "reshard_inputs", "chunks"):
            if getattr(plan, field):
                blame = f"{name!r} is a function, which has no parameters or modules, and {field} is given"
                seen = f"{field}: {getattr(plan, field)!r}"
                raise InvalidValue(asked, blame, seen, 'input_plan={"input": ...} and output_plan={"output": ...}')
    reading = read_plan(asked, plan, layout_on(mesh), [""], {})
    inputs, outputs = reading.inputs.get(""), reading.outputs.get("")
    if inputs is None and outputs is None:
        return function
    where = f"function {name!r}"
    before = None if inputs is None else Inputs(where, inputs, Arguments.of(function), wrap=reading.wrap_inputs)
    after = None if outputs is None else Outputs(where, outputs)
    if mesh.size() == 1:
        return function

    @wraps(function)
    def sharded(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            args, kwargs = before(args, kwargs)
        result = function(*args, **kwargs)
        return result if after is None else after(result)

    return sharded  # type: ignore[return-value]
