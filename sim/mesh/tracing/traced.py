"""Graphs as `aot_function` traces them, run operation by operation, and what they take from modules."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensor

from sim.mesh.tracing.kernel_order import order_by_kernel
from sim.mesh.tracing.regions import being, enter, take_numbers, traces

__all__ = ["Graph", "fresh_callables", "likeness", "names_before", "shape_of", "standing_for", "tensor_places"]

_RNG_STATE = 16  # bytes of the state of an accelerator's generator
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_PLAIN = (int, float, str, bool, tuple, type(None), torch.dtype, torch.Size)


class Graph:
    """One half of what was traced.

    Args:
        module: a graph of functions, with `meta["val"]`.
        again: names of what a backward has from its forward.
    """

    _boxed_call = True  # it empties the list of its arguments, so that each is freed after its last use

    def __init__(self, module: fx.GraphModule, again: Collection[str]) -> None:
        for node in module.graph.nodes:
            node.meta["again"] = node.name in again
        graph = order_by_kernel(module.graph)
        self.kernels = 1 + max((node.meta.get("kernel", 0) for node in graph.nodes), default=0)
        self.runs = _Interpreter(fx.GraphModule(module, graph), garbage_collect_values=True)

    def __call__(self, args: list[Any]) -> Any:
        """Run it; without values while graphs are traced."""
        if traces() and any(isinstance(arg, FakeTensor) for arg in args):
            results = next(iter(reversed(self.runs.graph.nodes))).args[0]
            return [node.meta["val"] if isinstance(node, fx.Node) else node for node in results]
        self.runs.first = take_numbers(self.kernels)
        with being(region=0, recomputes=False):
            try:
                return self.runs.boxed_run(args)
            finally:
                self.runs.env = {}  # results belong to the caller alone


class _Interpreter(fx.Interpreter):
    first = 0  # the number of this run's first kernel

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "placeholder":
            enter(self.first + n.meta.get("kernel", 0), n.meta.get("again", False))
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        # What is done again starts from the generator's state of the first time. Without values, all are alike.
        if target in (run_and_save_rng_state, run_with_rng_state) and any(isinstance(arg, FakeTensor) for arg in args):
            if target is run_with_rng_state:
                return args[1](*args[2:], **kwargs)
            return torch.empty(_RNG_STATE, dtype=torch.uint8), args[0](*args[1:], **kwargs)
        return super().call_function(target, args, kwargs)


def names_before(joint: fx.GraphModule, outputs: int) -> set[str]:
    """Return the names of what the first outputs of a graph are made of."""
    (results,) = next(iter(reversed(joint.graph.nodes))).args
    found, todo = set[str](), [node for node in tuple(results)[:outputs] if isinstance(node, fx.Node)]
    while todo:
        node = todo.pop()
        if node.name not in found:
            found.add(node.name)
            todo.extend(node.all_input_nodes)
    return found


def tensor_places(module: nn.Module | None) -> Iterator[tuple[nn.Module, str]]:
    """Yield where a module and those in it have tensors: parameters, buffers, and plain attributes."""
    for each in [] if module is None else module.modules():
        attributes = [name for name, value in vars(each).items() if isinstance(value, torch.Tensor)]
        for name in dict.fromkeys((*each._parameters, *each._buffers, *attributes)):
            if getattr(each, name) is not None:
                yield each, name


def fresh_callables(module: nn.Module | None) -> tuple[list[tuple[Any, str]], list[Any]]:
    """Return where modules have callable objects, and copies of these that remember no tensors of other calls."""
    places, copies = [], []
    for each in [] if module is None else module.modules():
        for name, value in vars(each).items():
            if callable(value) and not isinstance(value, nn.Module) and hasattr(value, "__dict__"):
                own = {k: None if isinstance(v, torch.Tensor) else v for k, v in vars(value).items()}
                if own and not isinstance(value, (type, *_FUNCTIONS)):
                    fresh = copy.copy(value)
                    vars(fresh).update(own)
                    places.append((each, name))
                    copies.append(fresh)
    return places, copies


@contextmanager
def standing_for(places: Sequence[tuple[Any, str]], values: Sequence[Any]) -> Iterator[None]:
    """Put values in front of what modules have, until the end of the block."""
    before = [(vars(module), name, vars(module).get(name, standing_for)) for module, name in places]
    try:
        for (module, name), value in zip(places, values, strict=True):
            vars(module)[name] = value
        yield
    finally:
        for attributes, name, value in reversed(before):
            if value is standing_for:
                attributes.pop(name, None)
            else:
                attributes[name] = value


def likeness(module: nn.Module | None) -> Any:
    """Return what two modules have in common whose forwards do the same with tensors of the same shapes."""
    found = []
    for name, each in [] if module is None else module.named_modules():
        plain = tuple((k, v) for k, v in sorted(vars(each).items()) if isinstance(v, _PLAIN) and k[:1] != "_")
        calls = tuple((k, _called(v)) for k, v in sorted(vars(each).items()) if callable(v))
        found.append((name, type(each).__qualname__, repr(plain), calls))
    return tuple(found)


def _called(function: Any) -> str:
    if isinstance(function, functools.partial):
        return _called(function.func)
    named = function if isinstance(function, (types.FunctionType, types.MethodType)) else type(function)
    plain = (
        [] if named is function else [v for v in getattr(function, "__dict__", {}).items() if isinstance(v[1], _PLAIN)]
    )
    return f"{named.__module__}.{named.__qualname__} {plain}"


def shape_of(x: torch.Tensor) -> Any:
    """Return what a graph that is traced for a tensor depends on."""
    return (tuple(x.shape), x.stride(), x.dtype, x.device.type, x.requires_grad)
