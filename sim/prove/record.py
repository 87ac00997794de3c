"""Models and their tensors: names, copies, layouts that DTensors declare, and what the caller declares of others."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hyper_parallel.core.common.errors import InvalidType, InvalidValue, nearest
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.ownership import mesh_lines
from hyper_parallel.core.shard.sharding_plan import Reading, ShardingPlan, read_plan
from hyper_parallel.core.shard.spelling import LayoutTree, leaves, read_layouts
from hyper_parallel.platform import get_platform

_INNER = {  # what a wrapper calls the module that it wraps, by the wrapper's class
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "OffloadedBlock": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}


def declared_of(axes: AxesOf | None, tensor: torch.Tensor) -> tuple[Layout | None, tuple[str, ...]]:
    """Return the layout that a DTensor declares, and the axes that it speaks of; None of a plain tensor."""
    return axes.declared(tensor) if axes is not None and isinstance(tensor, DTensor) else (None, ())


class AxesOf:
    """Reads layouts of DTensors on any mesh as layouts on the one mesh of all ranks.

    A DTensor may live on a slice of the mesh, on axes that were flattened, or on a mesh without names: an axis is
    recognised by the ranks along it.

    Args:
        mesh: the mesh of all ranks.
        rank: the rank that reads.
    """

    def __init__(self, mesh: Layout, rank: int) -> None:
        self.mesh, self.rank = mesh, rank
        names = mesh.alias_name
        self._by_ranks: dict[tuple[int, ...], tuple[str, ...]] = {}
        for number in range(len(names) + 1):
            for chosen in itertools.combinations(names, number):
                self._by_ranks.setdefault(ranks_along(mesh, chosen, rank), chosen)
        self._single = tuple(name for name, size in zip(names, mesh.mesh_shape, strict=True) if size == 1)
        self._cache: dict[Layout, tuple[Layout | None, tuple[str, ...]]] = {}

    def declared(self, tensor: DTensor) -> tuple[Layout | None, tuple[str, ...]]:
        """Return the layout on the whole mesh, replicated where nothing is said, and the axes that it speaks of."""
        try:
            layout = Layout.of(tensor)
        except ValueError:  # a masked partial, a strided shard that comes from a view
            return None, ()
        found = self._cache.get(layout)
        if found is None:
            found = self._cache[layout] = self._read(layout)
        return found

    def _read(self, layout: Layout) -> tuple[Layout | None, tuple[str, ...]]:
        axes: dict[str, tuple[str, ...]] = {}
        for name in layout.alias_name:
            if self.rank not in layout.rank_list:
                return None, ()
            chosen = self._by_ranks.get(ranks_along(layout, (name,), self.rank))
            if chosen is None:
                return None, ()
            axes[name] = chosen
        entries = []
        for entry in layout.alias_placements or ():
            split = (entry,) if isinstance(entry, str) else entry
            entries.append(tuple(part for name in split for part in axes.get(name, ())) or None)
        while entries and entries[-1] is None:  # equal layouts differ in how many of these they have
            entries.pop()
        partial = {part: kind for name, kind in layout.partial.items() for part in axes[name]}
        spoken = {part for chosen in axes.values() for part in chosen}
        known = tuple(name for name in self.mesh.alias_name if name in spoken or name in self._single)
        return self.mesh(*entries, partial=partial), known


def ranks_along(mesh: Layout, axes: Sequence[str], rank: int) -> tuple[int, ...]:
    """Return the ranks that differ from one only along some axes of a mesh, in mesh order.

    >>> ranks_along(Layout((2, 3), ("dp", "tp")), ("tp",), 4), ranks_along(Layout((2, 3), ("dp", "tp")), ("dp",), 4)
    ((3, 4, 5), (1, 4))
    """
    rows = mesh_lines(mesh.mesh_shape, [at for at, name in enumerate(mesh.alias_name) if name in axes])
    (row,) = rows[(rows == mesh.axes.position(rank)).any(1)].tolist()
    return tuple(mesh.axes.ranks[position] for position in row)


def spread_layout(layout: Layout, known: Sequence[str]) -> str:
    """Write a declared layout, with the axes that it does not speak of.

    >>> spread_layout(Layout((2, 2), ("dp", "tp"))("tp"), ("tp",))
    '(tp), nothing said of dp'
    """
    text = str(layout).partition(" on ")[0]
    silent = [name for name in layout.alias_name if name not in known]
    return f"{text}, nothing said of {', '.join(silent)}" if silent else text


# -- models ------------------------------------------------------------------------------------------------------------


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's modules by name, without the wrappers around them; one under several names has the first."""
    found: dict[str, nn.Module] = {}
    known: set[int] = set()
    for path, module in _walk(model, ""):
        if id(module) not in known:
            known.add(id(module))
            found[path] = module
    return found


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by name, shared ones under each of their names."""
    return {
        f"{path}.{name}" if path else name: parameter
        for path, module in _walk(model, "")
        for name, parameter in module._parameters.items()
        if parameter is not None
    }


def named_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's buffers that have values, by name."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in _walk(model, "")
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta
    }


def _walk(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    inner = next((_INNER[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in _INNER), None)
    if inner is not None:
        yield from _walk(getattr(module, inner), path)
        return
    yield path, module
    for name, child in module.named_children():
        yield from _walk(child, f"{path}.{name}" if path else name)


def argument_names(module: nn.Module) -> list[str]:
    """Return the names of the positional arguments of a module's forward."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def tensors_in(value: Any, way: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested containers, each with the way to it.

    >>> [way for way, _ in tensors_in({"a": [torch.ones(1), 2], "b": torch.ones(1)})]
    ['.a.0', '.b']
    """
    if isinstance(value, torch.Tensor):
        yield way, value
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield from tensors_in(entry, f"{way}.{name}")
    elif isinstance(value, (tuple, list)):
        for index, entry in enumerate(value):
            yield from tensors_in(entry, f"{way}.{index}")
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from tensors_in(getattr(value, part.name), f"{way}.{part.name}")


def mapped(value: Any, change: Callable[[torch.Tensor, str], Any], way: str = "") -> Any:
    """Return nested containers with something else in place of each tensor; `change` is called with the way to it, too.

    >>> mapped({"a": [torch.ones(1), 2]}, lambda tensor, way: way)
    {'a': ['a.0', 2]}
    """
    if isinstance(value, torch.Tensor):
        return change(value, way)
    if isinstance(value, Mapping):
        return {name: mapped(each, change, f"{way}.{name}".strip(".")) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [mapped(each, change, f"{way}.{at}".strip(".")) for at, each in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def own_views(value: Any, views: dict[int, torch.Tensor], *, quick: bool = False) -> Any:
    """Return arguments with a view in place of each tensor that is differentiated.

    So the gradient of a module's input is what this module gives to it. Others that have the same input on one device
    may have another tensor on a rank, such as one that was converted for each of them.

    Args:
        value: arguments, in containers.
        views: those that are made already, by the id of the tensor.
        quick: past the modes of dispatch, where none of them follows tensors.
    """
    if isinstance(value, torch.Tensor):
        if not value.requires_grad or isinstance(value, nn.Parameter):
            return value
        if id(value) not in views:
            with _past_modes(value) if quick else nullcontext():
                views[id(value)] = view = value.view_as(value)
            view.__dict__.update(
                value.__dict__
            )  # what a module has written on it, such as which part of a tensor it is
        return views[id(value)]
    if type(value) in (tuple, list):
        return type(value)(own_views(entry, views, quick=quick) for entry in value)
    if type(value) is dict:
        return {key: own_views(entry, views, quick=quick) for key, entry in value.items()}
    return value


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rank's own part of a tensor, waited for, without history; complex numbers as pairs."""
    found = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    wait = getattr(found, "wait", None)  # what an asynchronous collective will deliver
    found = wait() if wait is not None else found
    found = found.detach()
    found = found.to_dense() if found.is_sparse else found
    return torch.view_as_real(found.resolve_conj()) if found.is_complex() else found  # compared as pairs


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the rank's own part of a tensor, see `local_of`, on the host, past the modes that look at ops.

    They would take most of the time of it, and a copy is none of the program's operations.
    """
    own = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if own.dtype not in _AS_IT_IS or own.is_sparse:
        return _on_host(local_of(tensor))
    with _past_modes(own):
        return _on_host(local_of(own))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor; from another device behind what computes it, so that the host does not wait and hide a race."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def settle(device: torch.device | str) -> None:
    """Wait for copies of what is on a device, which may be read then."""
    kind = torch.device(device).type
    if kind != "cpu":
        get_platform(kind).synchronize()


def _past_modes(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Let no mode of dispatch see what is done with a plain tensor; others need it, and get no such context."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
    return torch._C._ExcludeDispatchKeyGuard(_MODES) if is_plain else nullcontext()


_AS_IT_IS = (torch.float64, torch.int64, torch.bool)  # dtypes that no mode converts
_MODES = torch._C.DispatchKeySet(torch._C.DispatchKey.Python) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.PythonTLSSnapshot
)


# -- what the caller declares about plain tensors ----------------------------------------------------------------------


@dataclass(frozen=True)
class Declarations:
    """What somebody said about plain tensors, by path; DTensors speak for themselves."""

    inputs: Mapping[str, LayoutTree] = field(default_factory=dict)
    outputs: Mapping[str, LayoutTree] = field(default_factory=dict)
    parameters: Mapping[str, Layout] = field(default_factory=dict)

    def of(self, path: str, side: str, name: str, title: str) -> Layout | None:
        """Return the layout of a plain tensor at a boundary.

        Args:
            path: of the module.
            side: "input" or "output".
            name: the argument's position or name, and the way to the tensor inside of it; "" for a lone output.
            title: the same as a person says it.
        """
        tree = (self.inputs if side == "input" else self.outputs).get(path)
        ways = name.lstrip(".").split(".") if name else []
        names = title.lstrip(".").split(".") if title else []
        if isinstance(tree, Layout):  # of the first argument, or of all there is in the only result
            return tree if side == "output" or name == "0" else None
        for place, (way, name) in enumerate(zip(ways, names, strict=False)):
            if isinstance(tree, Mapping):
                tree = tree.get(name, tree.get(way)) if place == 0 else tree.get(way)
            elif isinstance(tree, tuple):
                tree = tree[int(way)] if way.isdecimal() and int(way) < len(tree) else None
        return tree if isinstance(tree, Layout) else None


def named_inputs(asked: str, model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Return inputs by the names of the model's arguments."""
    if isinstance(inputs, Mapping):
        odd = [name for name in inputs if not isinstance(name, str)]
        if odd:
            raise InvalidType(asked, f"{odd[0]!r} is no argument name", f"inputs: {list(inputs)}", "a dict by name")
        return dict(inputs)
    if not isinstance(inputs, (tuple, list)):
        blame = f"inputs is a {type(inputs).__name__}, not a tuple of arguments or a dict by name"
        raise InvalidType(asked, blame, "inputs: the full arguments of the model", "(x,), with the comma")
    names = argument_names(model)
    return {names[at] if at < len(names) else f"argument {at}": value for at, value in enumerate(inputs)}


def read_declared(
    asked: str, model: nn.Module, mesh: Layout, plan: ShardingPlan | None, declared: Any
) -> tuple[Reading | None, Declarations]:
    """Return a plan and what else was declared, read for a model."""
    modules = list(named_modules(model))
    parameters = {name: parameter.dim() for name, parameter in named_parameters(model).items()}
    reading = None if plan is None else read_plan(asked, plan, mesh, modules, parameters)
    parts: dict[str, dict[str, Any]] = {"input": {}, "output": {}, "parameter": {}}
    for key, value in (declared or {}).items():
        last = str(key).rpartition(".")[2]
        parts[last if last in ("input", "output") and key not in parameters else "parameter"][key] = value
    own = ShardingPlan(parts["parameter"], parts["input"], parts["output"])
    given = read_plan(f"{asked}: declared", own, mesh, modules, parameters)
    outputs = dict(given.outputs)
    if reading is not None:  # a plain tensor is a part of what the plan says, where the plan takes it out of a DTensor
        outputs = {**{path: tree for path, tree in reading.outputs.items() if path in reading.returned}, **outputs}
    return reading, Declarations(given.inputs, outputs, given.parameters)


def read_cuts(
    asked: str, mesh: Layout, values: Mapping[str, Any], given: Any, plan: ShardingPlan | None, reading: Reading | None
) -> tuple[dict[str, LayoutTree], list[str]]:
    """Return which part of each input a rank is given, and the inputs that are given as DTensors."""
    says = _by_name(asked, values, reading.inputs.get(""), "the plan's 'input'") if reading is not None else {}
    wrapped = list(says) if plan is not None and not plan.wrap_inputs else []
    if given is None:
        cuts = says
    else:
        here = f"{asked}: input_layouts"
        cuts = {**says, **_by_name(asked, values, read_layouts(here, given, mesh), "input_layouts")}
    for name, tree in cuts.items():
        for layout in leaves(tree):
            if layout.is_partial():
                blame = f"a reduction is pending in the layout of {name!r}, and inputs are full tensors"
                raise InvalidValue(f"{asked}: input_layouts", blame, f"layout: {layout}", "a split or nothing")
        if isinstance(tree, Layout) and isinstance(values[name], torch.Tensor):
            try:
                tree.splits(values[name].dim())
            except ValueError as error:
                blame = f"the layout of input {name!r} does not fit a tensor of shape {tuple(values[name].shape)}"
                raise InvalidValue(f"{asked}: input_layouts", blame, f"layout: {tree}", "one entry per dim") from error
    return cuts, wrapped


def _by_name(asked: str, values: Mapping[str, Any], tree: LayoutTree, what: str) -> dict[str, LayoutTree]:
    names = list(values)
    if tree is None:
        return {}
    if isinstance(tree, Layout):
        return {names[0]: tree} if names else {}
    if isinstance(tree, Mapping):
        unknown = [name for name in tree if name not in values]
        if unknown:
            blame = f"there is no input {unknown[0]!r} for {what}"
            raise InvalidValue(asked, blame, f"inputs: {', '.join(names)}", nearest(unknown[0], names))
        return {name: part for name, part in tree.items() if part is not None}
    if len(tree) > len(names):
        blame = f"{what} has {len(tree)} layouts for {len(names)} inputs"
        raise InvalidValue(asked, blame, f"inputs: {', '.join(names)}", "one layout, or None, per input")
    return {name: part for name, part in zip(names, tree, strict=False) if part is not None}
