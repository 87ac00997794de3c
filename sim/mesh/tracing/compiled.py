"""Blocks as a compiler computes them: what their forward keeps for backward, and what backward computes again."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from hyper_parallel.core.common.checks import check_choice
from hyper_parallel.platform import attention_operators
from sim.mesh.tracing.fusion import order_by_kernel
from sim.mesh.tracing.kinds import having, running

# Graphs as `aot_function` traces them, run operation by operation, and what they take from modules --------------------

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
        if running.traces and any(isinstance(arg, FakeTensor) for arg in args):
            results = next(iter(reversed(self.runs.graph.nodes))).args[0]
            return [node.meta["val"] if isinstance(node, fx.Node) else node for node in results]
        self.runs.first = running.take(self.kernels)
        with having(running, region=0, recomputes=False):
            try:
                return self.runs.boxed_run(args)
            finally:
                self.runs.env = {}  # results belong to the caller alone


class _Interpreter(fx.Interpreter):
    first = 0  # the number of this run's first kernel

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "placeholder":
            running.region, running.recomputes = self.first + n.meta.get("kernel", 0), n.meta.get("again", False)
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


# Blocks as a compiler computes them: what their forward keeps for backward, and what backward computes again ----------
#
# `torch.compile` traces a block forward and backward at once and cuts that graph in two where the fewest bytes cross
# (`min_cut_rematerialization_partition`). Here the same trace and the same cut are made, and the two graphs are then
# run operation by operation, so that whoever looks on sees them. No kernel is generated, but `running.region` numbers
# what would become one, and `sim.mesh.tracing.fusion` groups them and makes one of them in what was recorded.
#
# A graph is traced once for all blocks that are alike, in about a second.

_aten = torch.ops.aten

_PRODUCTS = frozenset(
    {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten._scaled_mm.default, *attention_operators()}
)
"""What selective checkpointing keeps."""

_ASKED, _POLICIES = ("cannot compile", "checkpointing"), ("none", "selective", "alternate", "full")
_MATRICES = frozenset({_aten.mm.default, _aten._scaled_mm.default})  # of which "alternate" keeps every other one
_UNTRACEABLE = (DataDependentOutputException, DynamicOutputShapeException)
_TENSOR = object()  # stands where a tensor was among arguments


def compile_block(block: nn.Module, checkpointing: str = "none", *, graphs: dict[Any, Any] | None = None) -> bool:
    """Let a block compute as if it was compiled: as a whole, or what lies between the places where it communicates.

    A block in whose modules tensor parallelism communicates is compiled in pieces, as are attention over several ranks
    and a mixture of experts, whose experts and router are left alone. Hooks of the block itself, which gather weights,
    stay outside of its graph.

    Args:
        block: changed in place, after tensor and context parallelism have been applied.
        checkpointing: "none", "selective", "alternate" or "full": see `CompiledLike`.
        graphs: what blocks that are alike share; a new dict for a new model.

    Returns:
        Whether checkpointing is part of the graph. False: the block is in pieces, and is to be put into a checkpoint
        from outside.

    Raises:
        ValueError: no such policy.
    """
    shared: dict[Any, Any] = {} if graphs is None else graphs
    if _is_one_graph(block):
        block.forward = CompiledLike(block, checkpointing, graphs=shared)
        return True
    check_choice(*_ASKED, checkpointing, _POLICIES)
    for child in block.children():
        compile_pieces(child, shared)
    return checkpointing == "none"


def compile_pieces(module: nn.Module, graphs: dict[Any, Any]) -> None:
    """Let a module compute as if what lies between the places where it communicates was compiled."""
    if _is_one_graph(module) or "attend" in vars(module):
        own = vars(module).get("forward")
        if isinstance(
            own, functools.partial
        ):  # of `in_chunks`, which communicates, and calls the module's code for each chunk
            (module.forward,) = own.args
            module.forward = functools.partial(own.func, CompiledLike(module, graphs=graphs))
        else:
            module.forward = CompiledLike(module, graphs=graphs)
        return
    for name, child in module.named_children():
        if name not in ("experts", "router"):  # inputs of another length in every step; counts that backward changes
            compile_pieces(child, graphs)


def _is_one_graph(module: nn.Module) -> bool:
    """Tell whether nothing in a module, but for its own hooks, communicates or depends on values."""
    for child in module.modules():
        if hasattr(child, "experts") or _crosses_ranks(vars(child).get("attend")):
            return False
        if child is not module and _has_hooks(child):
            return False
    return True


def _has_hooks(module: nn.Module) -> bool:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(str(getattr(hook, "__module__", "")).startswith("hyper_parallel.") for hook in hooks)


def _crosses_ranks(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("hyper_parallel.core.context_parallel")


class _Reached(Exception):
    """The traced function has come to what is left out; with its arguments."""


class CompiledLike:
    """A module's forward, or a function, run as the graphs that a compiler makes of it.

        block.forward = CompiledLike(block, checkpointing="selective")

    It communicates nothing. What cannot be traced, since shapes in it depend on values, is run as it is.

    Args:
        target: whose forward it is, or a function of tensors. An attribute `attend` of a module that computes over
            several ranks is left out, and called between two graphs.
        checkpointing: what backward computes again, by the policies that `torch.compile` is given by a checkpoint in
            the graph. "none": what costs less than keeping it. "selective": all but products of matrices and
            attention. "alternate": every other product as well. "full": all.
        graphs: what modules that are alike share.

    Raises:
        ValueError: no such policy.
    """

    def __init__(self, target: Any, checkpointing: str = "none", *, graphs: dict[Any, Any] | None = None) -> None:
        check_choice(*_ASKED, checkpointing, _POLICIES)
        self.module = target if isinstance(target, nn.Module) else None
        self.forward: Callable[..., Any] = target if self.module is None else target.forward
        self.checkpointing, self.graphs = checkpointing, {} if graphs is None else graphs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the function computes."""
        if running.traces:
            return self.forward(*args, **kwargs)
        seam: Any = None if self.module is None else vars(self.module).get("attend")
        try:
            if not _crosses_ranks(seam):
                return self._run("all", self.forward, args, kwargs)
            handed = self._run("before", self._until_seam, args, kwargs)
            return self._run("after", self._from_seam, (seam(*handed), args, kwargs), {})
        except _UNTRACEABLE:
            return self.forward(*args, **kwargs)

    def _until_seam(self, *args: Any, **kwargs: Any) -> Any:
        def reached(*handed: Any) -> Any:
            raise _Reached(*handed)

        with standing_for([(self.module, "attend")], [reached]):
            try:
                self.forward(*args, **kwargs)
            except _Reached as at:
                return at.args
        raise AssertionError("attention did not attend")

    def _from_seam(self, attended: Any, args: Any, kwargs: Any) -> Any:
        with standing_for([(self.module, "attend")], [lambda *handed: attended]):
            return self.forward(*args, **kwargs)  # what leads to the seam is not needed, and drops out of the graph

    def _run(self, part: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        places = list(tensor_places(self.module))
        own = [getattr(module, name) for module, name in places]
        leaves, tree = tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        key: tuple[Any, ...] = (part, self.checkpointing, str(tree), torch.is_grad_enabled(), likeness(self.module))
        key += (None if self.module is not None else self.forward,)
        key += tuple(shape_of(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in (*own, *leaves))
        if key not in self.graphs:

            def body(own: list[torch.Tensor], given: list[torch.Tensor]) -> Any:
                rest = iter(given)
                filled = [next(rest) if leaf is _TENSOR else leaf for leaf in kept]
                inner_args, inner_kwargs = tree_unflatten(filled, tree)
                with standing_for(places, own), standing_for(*fresh_callables(self.module)):
                    return function(*inner_args, **inner_kwargs)

            kept = [
                _TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
            ]  # no tensor outlives the call
            self.graphs[key] = self._trace(body, own, given)
        graph = self.graphs[key]
        if isinstance(graph, Exception):
            raise graph
        return graph(own, given)

    def _trace(self, body: Callable[..., Any], own: list[Any], given: list[Any]) -> Any:
        # Half a second of imports, for those that ask for a compiler.
        from torch._functorch.aot_autograd import aot_function
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table

        def cut(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
            forward = names_before(joint, num_fwd_outputs)
            again.update(forward)
            self._mark(joint, forward)
            return min_cut_rematerialization_partition(
                joint, inputs, compiler="inductor", num_fwd_outputs=num_fwd_outputs, **options
            )

        again = set[str]()
        graph = aot_function(
            body,
            fw_compiler=lambda module, inputs: Graph(module, frozenset()),
            bw_compiler=lambda module, inputs: Graph(module, again),
            inference_compiler=lambda module, inputs: Graph(module, frozenset()),
            partition_fn=cut,
            decompositions=select_decomp_table(),
        )
        try:
            # The first call traces; its result, without values, is thrown away. Those who look on see none of it.
            unpacked = torch.autograd.graph.saved_tensors_hooks(_same, _same)
            with having(running, traces=True), _disable_current_modes(), unpacked:
                graph(*_lookalikes(own, given))
        except _UNTRACEABLE as error:
            return error.with_traceback(None)
        return graph

    def _mark(self, joint: fx.GraphModule, forward: set[str]) -> None:
        """Say of the forward's operations what a checkpoint around them would say."""
        if self.checkpointing == "none":
            return
        products = 0
        for node in joint.graph.nodes:
            if node.op == "call_function" and node.name in forward:
                maker = node.args[0] if node.target is operator.getitem else node
                products += node.target in _MATRICES
                kept = self.checkpointing != "full" and maker.target in _PRODUCTS
                if self.checkpointing == "alternate" and node.target in _MATRICES:
                    kept = products % 2 == 1
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
                node.meta["ac_graph_id"] = 0


def _same(x: Any) -> Any:
    return x


def _lookalikes(*several: list[Any]) -> list[list[Any]]:
    """Return lists with others in the place of tensors without values, but the same where one stands several times.

    A graph keeps those that it was traced with, and with them what is recorded as their memory.
    """
    made: dict[int, torch.Tensor] = {}
    for x in itertools.chain(*several):
        if isinstance(x, FakeTensor) and id(x) not in made:
            with x.fake_mode:
                new = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            made[id(x)] = new.requires_grad_(x.requires_grad)
    return [[made.get(id(x), x) for x in tensors] for tensors in several]
