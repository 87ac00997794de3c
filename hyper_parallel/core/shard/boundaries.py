"""Redistribution of arguments and results to the layouts of a plan, at module boundaries."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, NamedTuple

import torch
import torch.distributed.tensor as torch_tensor
from torch.distributed.tensor.placement_types import Partial
from torch.utils._pytree import tree_map_only

from hyper_parallel.core.common.errors import InvalidValue, nearest
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.redistribute.api import from_local, redistribute
from hyper_parallel.core.redistribute.gradients import unmoved
from hyper_parallel.core.shard.spelling import LayoutTree, describe


class ArgumentLayout(NamedTuple):
    """The position of an argument in a call, and its layouts.

    Attributes:
        index: index among the positional arguments; None for a keyword-only argument.
        name: keyword; None for a positional-only argument.
        tree: the layout of the argument, or a tree of layouts for a container.
    """

    index: int | None  # type: ignore[assignment]
    name: str | None
    tree: LayoutTree


@dataclass(frozen=True)
class Arguments:
    """The arguments that a function accepts.

    Attributes:
        positional: names of arguments that can be given by position, in order; None for positional-only ones.
        by_name: names of arguments that can be given by name.
        any_number: True if it accepts `*args`.
        any_name: True if it accepts `**kwargs`.
        written: the signature without annotations, for messages.
        unnamed: names of positional-only arguments in the signature.
    """

    positional: tuple[str | None, ...]
    by_name: tuple[str, ...]
    any_number: bool
    any_name: bool
    written: str
    unnamed: tuple[str, ...] = ()

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Arguments:
        """Read the signature of a function; without a signature, any arguments are accepted."""
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return cls((), (), True, True, "(*args, **kwargs)")
        positional: list[str | None] = []
        names: list[str] = []
        kinds = {each.kind for each in signature.parameters.values()}
        for each in signature.parameters.values():
            if each.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
                positional.append(each.name if each.kind is Parameter.POSITIONAL_OR_KEYWORD else None)
            if each.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
                names.append(each.name)
        bare = signature.replace(
            parameters=[each.replace(annotation=Parameter.empty) for each in signature.parameters.values()],
            return_annotation=inspect.Signature.empty,
        )
        any_number, any_name = Parameter.VAR_POSITIONAL in kinds, Parameter.VAR_KEYWORD in kinds
        unnamed = tuple(each.name for each in signature.parameters.values() if each.kind is Parameter.POSITIONAL_ONLY)
        return cls(tuple(positional), tuple(names), any_number, any_name, str(bare), unnamed)

    def places(self, asked: str, tree: LayoutTree) -> list[ArgumentLayout]:
        """Return the positions of the arguments that have layouts in a plan.

        >>> layout = Layout((2,), ("tp",))("tp")
        >>> def forward(x, mask=None, *, scale=1.0): ...
        >>> [place[:2] for place in Arguments.of(forward).places("", (layout, layout))]
        [(0, 'x'), (1, 'mask')]
        >>> [place[:2] for place in Arguments.of(forward).places("", {"mask": layout, "scale": None})]
        [(1, 'mask')]

        Args:
            asked: the start of an error message, "cannot ...".
            tree: the layouts; a single layout is for the first argument.

        Raises:
            ValueError: more layouts than arguments, a name that the signature does not have.
        """
        if isinstance(tree, Mapping):
            found = [self._named(asked, name, entry) for name, entry in tree.items()]
        else:
            entries = (tree,) if isinstance(tree, Layout) else tree or ()
            if len(entries) > len(self.positional) and not self.any_number:
                blame = f"there are more layouts ({len(entries)}) than arguments by position ({len(self.positional)})"
                hint = "at most one layout per argument, or a dict by name"
                raise InvalidValue(asked, blame, f"layouts: {describe(tree)}   signature: {self.written}", hint)
            names = [*self.positional, *[None] * len(entries)]
            found = [ArgumentLayout(index, names[index], entry) for index, entry in enumerate(entries)]
        return [place for place in found if place.tree is not None]

    def _named(self, asked: str, name: str, entry: LayoutTree) -> ArgumentLayout:
        if name in self.by_name:
            return ArgumentLayout(self.positional.index(name) if name in self.positional else None, name, entry)
        if not self.any_name:
            blame = f"the signature has no argument {name!r}"
            hint = nearest(name, self.by_name) if self.by_name else "a list of layouts by position"
            if name in self.unnamed:
                blame = f"argument {name!r} is given by position only"
                hint = f"a list of layouts by position, that of {name!r} at index {self.unnamed.index(name)}"
            raise InvalidValue(asked, blame, f"signature: {self.written}", hint)
        return ArgumentLayout(None, name, entry)


# -- redistribution at the boundaries of modules -----------------------------------------------------------------------


Move = Callable[[Any, Layout], Any]
"""What is done with one value and its layout."""


class Inputs:
    """Redistributes the arguments of a call to the layouts of a plan.

    Args:
        where: the module or function, for messages.
        tree: the layouts.
        arguments: the arguments that it accepts.
        wrap: take plain tensors as local shards.
    """

    def __init__(self, where: str, tree: LayoutTree, arguments: Arguments, *, wrap: bool) -> None:
        self.where, self.tree = where, tree
        self.places = arguments.places(f"cannot lay out the inputs of {where}", tree)
        self.names = [f"input {place.name or place.index!r} of {where}" for place in self.places]
        self.move: Move = _redistributed_or_wrapped if wrap else _redistributed

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments in their layouts."""
        values, named = list(args), kwargs
        for place, what in zip(self.places, self.names, strict=True):
            if place.index is not None and place.index < len(values):
                values[place.index] = spread(what, values[place.index], place.tree, self.move)
            elif place.name is not None and place.name in named:
                named = {**named, place.name: spread(what, named[place.name], place.tree, self.move)}
            elif place.name is None:
                self._refuse(place, len(values))
        return tuple(values), named

    def _refuse(self, place: ArgumentLayout, number: int) -> None:
        blame = f"there are more layouts than arguments: {number} were given"
        seen = f"layouts: {describe(self.tree)}"
        asked = f"cannot lay out the inputs of {self.where}"
        raise InvalidValue(asked, blame, seen, f"{number} layouts, or {(place.index or 0) + 1} arguments")


class Outputs:
    """Redistributes the results of a call to the layouts of a plan.

    Args:
        where: the module or function, for messages.
        tree: the layouts.
    """

    def __init__(self, where: str, tree: LayoutTree) -> None:
        self.what, self.tree = f"output of {where}", tree

    def __call__(self, result: Any) -> Any:
        """Return the result in its layouts, in the same kind of container."""
        return spread(self.what, result, self.tree, _redistributed)


def spread(what: str, value: Any, tree: LayoutTree, move: Move) -> Any:
    """Apply `move` to a value, or to the entries of a container that have layouts.

    Args:
        what: the value, for messages.
        value: a tensor or another leaf; for a tuple of layouts a list or tuple, for a dict of layouts a mapping.
        tree: the layouts.
        move: function of a leaf and its layout.

    Raises:
        ValueError: layouts and value are nested differently; a layout does not fit.
    """
    if tree is None or value is None:
        return value
    if isinstance(tree, Layout):
        if isinstance(value, (list, tuple, Mapping)):
            raise _unlike(what, value, tree)
        try:
            return move(value, tree)
        except ValueError as error:
            raise InvalidValue(_inside(what, error)) from error
    if isinstance(tree, Mapping):
        return _spread_names(what, value, tree, move)
    if not isinstance(value, (list, tuple)) or len(value) != len(tree):
        raise _unlike(what, value, tree)
    entries = [
        spread(f"entry {i} of {what}", each, part, move) for i, (each, part) in enumerate(zip(value, tree, strict=True))
    ]
    return remade(value, entries)


def remade(like: Any, entries: list[Any]) -> Any:
    """Make a list, tuple or named tuple of the type of `like` with other entries.

    >>> remade((1, 2), [3, 4])
    (3, 4)
    """
    make = getattr(type(like), "_make", type(like))
    return make(entries)


def _spread_names(what: str, value: Any, tree: Mapping[str, LayoutTree], move: Move) -> Any:
    if not isinstance(value, Mapping) or any(name not in value for name in tree):
        raise _unlike(what, value, tree)
    changed: Any = copy.copy(value)
    for name, part in tree.items():
        new = spread(f"entry {name!r} of {what}", value[name], part, move)
        if new is not value[name]:
            changed[name] = new
    return changed


def _unlike(what: str, value: Any, tree: LayoutTree) -> ValueError:
    """Return the error for a value that is nested differently from its layouts."""
    if isinstance(value, Mapping):
        is_there, hint = f"a {type(value).__name__} of {', '.join(map(repr, value))}", "a dict of layouts by its names"
    elif isinstance(value, (list, tuple)):
        is_there, hint = f"a {type(value).__name__} of {len(value)}", f"a list of {len(value)} layouts"
    else:
        is_there, hint = f"a {type(value).__name__}", "one layout"
    asked, blame = f"cannot lay out the {what}", f"it is {is_there}, and the layouts are for something else"
    return InvalidValue(asked, blame, f"layouts: {describe(tree)}", hint)


def _inside(what: str, error: ValueError) -> str:
    first, _, rest = str(error).partition("\n")
    return f"cannot lay out the {what}: {first}\n{rest}" if rest else f"cannot lay out the {what}: {first}"


# -- moves of one tensor ---------------------------------------------------------------------------------------------


def _redistributed(x: Any, layout: Layout) -> Any:
    if not isinstance(x, DTensor):
        return x
    if any(type(placement) is not Partial and isinstance(placement, Partial) for placement in x.placements):
        return by_torch(x, layout)
    return redistribute(x, layout)


def _redistributed_or_wrapped(x: Any, layout: Layout) -> Any:
    if isinstance(x, torch.Tensor) and not isinstance(x, DTensor):
        # The shape of a replicated tensor is known; for a split one, `from_local` asks the ranks.
        global_shape = None if any(layout.splits(x.dim())) else tuple(x.shape)
        try:
            return from_local(x, layout, shape=global_shape)
        except ValueError as error:
            hint = "try: from_local(x, layout, shape=...) before the call, which says what they are shards of"
            raise InvalidValue(str(error).replace("try: shape=(...), the full tensor's", hint)) from None
    return _redistributed(x, layout)


def by_torch(x: DTensor, layout: Layout) -> DTensor:
    """Let torch do reductions that no layout can express, e.g. of the masked shards of a split embedding."""
    if layout.mesh is x.device_mesh and layout.placements is not None:
        # Its gradient may have pending sums, which torch cannot redistribute to that odd reduction.
        return unmoved(x.redistribute(x.device_mesh, layout.placements))
    reduced = [torch_tensor.Replicate() if placement.is_partial() else placement for placement in x.placements]
    return redistribute(x.redistribute(x.device_mesh, reduced), layout)


def localized(result: Any) -> Any:
    """Replace DTensors by this rank's shards, in containers of any depth.

    Ranks with equal shards are assumed to continue with equal computations, so that their gradients are one gradient.
    """
    return tree_map_only(DTensor, _local_shard, result)


def _local_shard(x: DTensor) -> torch.Tensor:
    reduced = [torch_tensor.Replicate() if placement.is_partial() else placement for placement in x.placements]
    return x.to_local(grad_placements=reduced)
