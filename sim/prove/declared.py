"""What a caller says about plain tensors, and which part of each input a rank is given."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.messages import explain, nearest
from hyper_parallel.core.shard.sharding_plan import Reading, ShardingPlan, read_plan
from hyper_parallel.core.shard.spelling import LayoutTree, leaves, read_layouts
from sim.prove.record import Key, named_modules, named_parameters

__all__ = ["Declarations", "named_inputs", "read_cuts", "read_declared"]


@dataclass(frozen=True)
class Declarations:
    """What somebody said about plain tensors, by path; DTensors speak for themselves."""

    inputs: Mapping[str, LayoutTree] = field(default_factory=dict)
    outputs: Mapping[str, LayoutTree] = field(default_factory=dict)
    parameters: Mapping[str, Layout] = field(default_factory=dict)

    def of(self, key: Key, title: str) -> Layout | None:
        """Return the layout of a plain tensor at a boundary."""
        tree = (self.inputs if key.side == "input" else self.outputs).get(key.path)
        ways = key.name.lstrip(".").split(".") if key.name else []
        names = title.lstrip(".").split(".") if title else []
        if isinstance(tree, Layout):  # of the first argument, or of all there is in the only result
            return tree if key.side == "output" or key.name == "0" else None
        for place, (way, name) in enumerate(zip(ways, names, strict=False)):
            if isinstance(tree, Mapping):
                tree = tree.get(name, tree.get(way)) if place == 0 else tree.get(way)
            elif isinstance(tree, tuple):
                tree = tree[int(way)] if way.isdigit() and int(way) < len(tree) else None
        return tree if isinstance(tree, Layout) else None


def named_inputs(asked: str, model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Return inputs by the names of the model's arguments."""
    if isinstance(inputs, Mapping):
        odd = [name for name in inputs if not isinstance(name, str)]
        if odd:
            raise TypeError(
                explain(asked, f"{odd[0]!r} is no argument name", f"inputs: {list(inputs)}", "a dict by name")
            )
        return dict(inputs)
    if not isinstance(inputs, (tuple, list)):
        blame = f"inputs is a {type(inputs).__name__}, not a tuple of arguments or a dict by name"
        raise TypeError(explain(asked, blame, "inputs: the whole arguments of the model", "(x,), with the comma"))
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in kinds]
    return {names[at] if at < len(names) else f"argument {at}": value for at, value in enumerate(inputs)}


def read_declared(
    asked: str, model: nn.Module, mesh: Layout, plan: ShardingPlan | None, declared: Any
) -> tuple[Reading | None, Declarations]:
    """Return a plan and what else was declared, read for a model."""
    modules = list(named_modules(model))
    parameters = {name: parameter.dim() for name, parameter in named_parameters(model).items()}
    reading = None if plan is None else read_plan(asked, plan, mesh, modules, parameters)
    if declared is not None and not isinstance(declared, Mapping):
        blame = f"declared is a {type(declared).__name__}, not a dict"
        raise TypeError(explain(asked, blame, f"declared: {declared!r:.80}", '{"mlp.output": ("dp", "None")}'))
    parts: dict[str, dict[str, Any]] = {"input": {}, "output": {}, "parameter": {}}
    for key, value in (declared or {}).items():
        last = str(key).rpartition(".")[2]
        parts[last if last in ("input", "output") and key not in parameters else "parameter"][key] = value
    own = ShardingPlan(parts["parameter"], parts["input"], parts["output"])
    told = read_plan(f"{asked}: declared", own, mesh, modules, parameters)
    outputs = dict(told.outputs)
    if reading is not None:  # a plain tensor is a part of what the plan says, where the plan takes it out of a DTensor
        outputs = {**{path: tree for path, tree in reading.outputs.items() if path in reading.returned}, **outputs}
    return reading, Declarations(told.inputs, outputs, told.parameters)


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
                blame = f"a reduction is pending in the layout of {name!r}, and inputs are whole"
                raise ValueError(explain(f"{asked}: input_layouts", blame, f"layout: {layout}", "a split or nothing"))
        if isinstance(tree, Layout) and isinstance(values[name], torch.Tensor):
            try:
                tree.splits(values[name].dim())
            except ValueError as error:
                blame = f"the layout of input {name!r} does not fit a tensor of shape {tuple(values[name].shape)}"
                raise ValueError(
                    explain(f"{asked}: input_layouts", blame, f"layout: {tree}", "one entry per dim")
                ) from error
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
            raise ValueError(explain(asked, blame, f"inputs: {', '.join(names)}", nearest(unknown[0], names)))
        return {name: part for name, part in tree.items() if part is not None}
    if len(tree) > len(names):
        blame = f"{what} has {len(tree)} layouts for {len(names)} inputs"
        raise ValueError(explain(asked, blame, f"inputs: {', '.join(names)}", "one layout, or None, per input"))
    return {name: part for name, part in zip(names, tree, strict=False) if part is not None}
