"""One forward call of a unit, and the autograd hooks that run its pre-backward and post-backward."""

from __future__ import annotations

import copy
import dataclasses
import linecache
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, ValuesView
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hyper_parallel.core.common.errors import InvalidState, InvalidType, class_name


class _CallListener(Protocol):
    """What a forward call reports to: its unit."""

    def pre_backward(self, call: ForwardCall) -> None:
        """Backward is about to use an output of this call."""

    def post_backward(self, call: ForwardCall) -> None:
        """Backward has computed the gradients of this call's inputs."""


class ForwardCall:
    """One call of a unit's module.

    Attributes:
        pre_backward_in: Number of the last backward whose pre-backward of this call has run; -1: none has.
        post_backward_in: Number of the last backward whose post-backward of this call has run; -1: none has.
        version: Of the shards whose values it has used.
        replaced: The caller's own tensors of lists and dictionaries in which the module sees marked ones.
        around: Calls of other units that have returned an output of this one as it was, the innermost first.
        given: Identities of the caller's tensors whose views the module sees, valid until its forward is through.
    """

    __slots__ = (
        "__weakref__",
        "around",
        "given",
        "listener",
        "post_backward_in",
        "pre_backward_in",
        "replaced",
        "version",
    )

    def __init__(self, listener: _CallListener) -> None:
        self.listener = listener
        self.pre_backward_in = -1
        self.post_backward_in = -1
        self.version: object = None
        self.replaced: list[Any] = []
        self.around: list[ForwardCall] = []
        self.given: set[int] = set()

    def pre_backward(self, *gradients: Any) -> None:
        """The hook on outputs; it does not change their gradients."""
        del gradients
        # The units around are first, although their hooks on the same tensor come later: on a rank where they return
        # a tensor of their own, their pre-backward is the first, and all ranks must gather in one order. Otherwise
        # units of equal size get each other's values, and others hang.
        for outer in reversed(self.around):
            outer.pre_backward()
        self.listener.pre_backward(self)


class _EndOfBackward(torch.autograd.Function):
    """The identity; its backward runs when the gradients of all of a unit's inputs are there."""

    @staticmethod
    def forward(ctx: Any, call: ForwardCall, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        # An input that the unit does not use gets no gradient, not one of zeros, as on a single device.
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: ForwardCall = ctx.call
        call.listener.post_backward(call)
        return (None, *gradients)


def mark_inputs(
    call: ForwardCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put a node behind the inputs that runs when backward has computed their gradients: the unit's post-backward.

    A tensor that is given twice stays one object, which modules may test for (attention does). Lists and dictionaries
    stay the caller's, and get their own tensors back when the call is through.
    """
    if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):  # as most are, and much cheaper
        if not args[0].requires_grad:
            return args, kwargs
        return _marked(call, args[0]), kwargs
    leaves, spec = tree_flatten((args, kwargs))
    inputs = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
    if not inputs:
        return args, kwargs
    marked = dict(zip(inputs, _marked(call, *inputs.values()), strict=True))
    del leaves, spec  # torch's flatten leaves a cycle that would keep the inputs until the garbage collector runs

    def mark(tensor: torch.Tensor) -> torch.Tensor:
        return marked.get(id(tensor), tensor)

    undo = call.replaced
    new_args = tuple(_replaced(argument, mark, undo) for argument in args)
    return new_args, {name: _replaced(argument, mark, undo) for name, argument in kwargs.items()}


def _marked(call: ForwardCall, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    marked: tuple[torch.Tensor, ...] = tuple(_EndOfBackward.apply(call, *inputs))
    call.given = {id(tensor._base) for tensor in marked}
    return marked


def restore_containers(call: ForwardCall) -> None:
    """Put the caller's own tensors back into its lists and dictionaries, where the marked ones are still in them."""
    for container, key, own, marked in reversed(call.replaced):
        if type(container) is dict:
            if container.get(key) is marked:
                container[key] = own
            continue
        for index, item in enumerate(container):
            if item is marked:
                container[index] = own
    call.replaced = []


def _replaced(tree: Any, replace: Callable[[Any], Any], undo: list[Any] | None = None) -> Any:
    """`tree` with its tensors replaced; a container in which nothing is replaced stays the caller's own object.

    Modules may fill a list or a dictionary that they are given, and the caller looks into it afterwards: so with
    `undo` these are changed in place, and what has to be put back is noted there.
    """
    if isinstance(tree, torch.Tensor):
        return replace(tree)
    if undo is not None and type(tree) in (list, dict):
        for key, child in list(enumerate(tree) if type(tree) is list else tree.items()):
            new = _replaced(child, replace, undo)
            if new is not child:
                tree[key] = new
                undo.append((tree, key, child, new))
        return tree
    # One level. By identity: torch's flatten leaves a cycle with this function, which must not hold the tensors.
    own = id(tree)
    children, spec = tree_flatten(tree, is_leaf=lambda node: id(node) != own)
    if len(children) == 1 and children[0] is tree:  # no container
        return _replaced_fields(tree, replace, undo) if dataclasses.is_dataclass(tree) else tree
    replaced = [_replaced(child, replace, undo) for child in children]
    if all(new is old for new, old in zip(replaced, children, strict=True)):
        return tree
    return tree_unflatten(replaced, spec)


def _replaced_fields(tree: Any, replace: Callable[[Any], Any], undo: list[Any] | None) -> Any:
    """A copy of a dataclass with its fields' tensors replaced; what `__post_init__` did is not done again."""
    if isinstance(tree, (type, nn.Module)):
        return tree
    names = [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
    replaced = {name: _replaced(getattr(tree, name), replace, undo) for name in names}
    changed = {name: new for name, new in replaced.items() if new is not getattr(tree, name)}
    if not changed:
        return tree
    made = copy.copy(tree)
    for name, new in changed.items():
        if tree.__dataclass_params__.frozen:
            object.__setattr__(made, name, new)
        else:
            setattr(made, name, new)
    return made


def watch_outputs(call: ForwardCall, tensors: list[torch.Tensor]) -> None:
    """Run the call's pre-backward before backward uses any of `tensors`, which require gradients and are no leaves."""
    for tensor in tensors:
        # Autograd calls the hooks of one tensor in the order in which they came. So if a nested unit has returned this
        # very tensor, its pre-backward would come before that of the unit around it.
        for hook in (tensor._backward_hooks or {}).values():
            inner = getattr(hook, "__self__", None)
            if isinstance(inner, ForwardCall) and inner is not call:
                inner.around.append(call)
        tensor.register_hook(call.pre_backward)
        # A hook on a view is lost when the view is modified in place: autograd then gives it a new history. The
        # base of a view of an input is outside of the unit: backward comes to it after post-backward, or without one.
        base = tensor._base if tensor._is_view() else None
        if base is not None and base.grad_fn is not None and id(base) not in call.given:
            base.grad_fn.register_prehook(call.pre_backward)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors of a nest of containers, dataclasses and plain objects."""
    if isinstance(tree, torch.Tensor):
        yield tree
        return
    yield from _found(tree, set())


def _found(tree: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    for leaf in tree_flatten(tree)[0]:
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif id(leaf) not in seen and (inside := _inside(leaf)):
            seen.add(id(leaf))
            yield from _found(inside, seen)


def _inside(leaf: Any) -> list[Any]:
    """What an object that torch does not know as a container holds."""
    if leaf is None or isinstance(leaf, (str, bytes, int, float, complex, type, nn.Module)) or callable(leaf):
        return []
    if dataclasses.is_dataclass(leaf):
        return [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
    if isinstance(leaf, Mapping):
        return list(leaf.values())
    if isinstance(leaf, (list, tuple, set, frozenset, ValuesView)):
        return list(leaf)
    return list(getattr(leaf, "__dict__", {}).values())


def refuse_lazy(module: nn.Module, output: Any) -> None:
    """Refuse a forward whose code is yet to run, with shards.

    Args:
        module: of a unit.
        output: what its forward has returned.

    Raises:
        TypeError: a generator or a coroutine.
    """
    if isinstance(output, (GeneratorType, CoroutineType, AsyncGeneratorType)):
        asked, blame = "cannot run forward", "it returns code that runs later, when its parameters are shards again"
        seen = f"unit: {class_name(module)}; seen: a {type(output).__name__}"
        raise InvalidType(asked, blame, seen, "return list(...) of what it yields")


def explain_mixed(module: nn.Module, error: Exception, below: set[int]) -> None:
    """Explain torch's error about plain tensors beside DTensors, if code has used a parameter outside of its unit.

    Torch names an operator only. The parameter is a variable of the code that failed, or its line says `.head.weight`.

    Args:
        module: whose forward has failed.
        error: with which.
        below: the identities of the sharded parameters of units inside of it.

    Raises:
        RuntimeError: such a parameter was found.
    """
    if "got mixed torch.Tensor and DTensor" not in str(error):
        return
    names = {id(parameter): name for name, parameter in module.named_parameters() if id(parameter) in below}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame, line in reversed(list(zip(frames, traceback.extract_tb(error.__traceback__), strict=True))):
        name = _name_used(frame, line, names)
        if name is None:
            continue
        asked, owner = "cannot run forward", name.rpartition(".")[0]
        blame = f"parameter {name!r} is used outside of the forward of its unit, where it is a shard"
        seen = f"unit: {class_name(module.get_submodule(owner))}; seen: {line.filename}:{line.lineno}, in {line.name}"
        hint = f"call the module {owner!r}; or do not wrap it on its own, so that the unit that uses it gathers it"
        raise InvalidState(asked, blame, seen, hint) from error


def _name_used(frame: FrameType, line: traceback.FrameSummary, names: Mapping[int, str]) -> str | None:
    """Return the name of a parameter that the code of a frame uses, or None; `names` are by identity."""
    values = list(frame.f_locals.values())
    found = next((names[id(value)] for value in values if id(value) in names), None)
    first = line.lineno or 0
    last = getattr(line, "end_lineno", None) or first  # from Python 3.11 on
    code = "".join(linecache.getline(line.filename, number) for number in range(first, last + 1))
    code = re.sub(r"\[(\w+)\]", r".\1", code)  # self.layers[0].weight
    for module in (value for value in values if found is None and isinstance(value, nn.Module)):
        own = ((name, names[id(p)]) for name, p in module.named_parameters() if id(p) in names)
        found = next((full for name, full in own if re.search(rf"\.{re.escape(name)}\b", code)), None)
    return found


def copy_aliases(tree: Any, is_alias: Callable[[torch.Tensor], bool]) -> Any:
    """Copy the tensors of which `is_alias` says that their memory will not outlive the forward call."""
    if not any(is_alias(tensor) for tensor in tensors_in(tree)):
        return tree
    return _replaced(tree, lambda tensor: tensor.clone() if is_alias(tensor) else tensor)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Cast floating-point tensors, in containers and dataclasses; one that is there twice stays one object."""
    done: dict[int, torch.Tensor] = {}

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        if id(tensor) not in done:
            done[id(tensor)] = tensor.to(dtype)
        return done[id(tensor)]

    return _replaced(tree, convert)
