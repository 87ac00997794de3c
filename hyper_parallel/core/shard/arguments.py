"""Which argument of a call a layout in a plan is for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.messages import explain, nearest
from hyper_parallel.core.shard.spelling import LayoutTree, describe


class Place(NamedTuple):
    """Where an argument is found in a call, and what its layouts are.

    Attributes:
        index: among the positional arguments; None for one that is only given by name.
        name: None for one that is only given by position.
        tree: its layout, or those of what it holds.
    """

    index: int | None  # type: ignore[assignment]
    name: str | None
    tree: LayoutTree


@dataclass(frozen=True)
class Arguments:
    """What a function can be called with.

    Attributes:
        positional: names of arguments that can be given by position, in order; None where they have only a position.
        by_name: names of arguments that can be given by name.
        any_number: whether it takes `*args`.
        any_name: whether it takes `**kwargs`.
        written: the signature as a person reads it.
        unnamed: names that the signature has for arguments that can be given by position only.
    """

    positional: tuple[str | None, ...]
    by_name: tuple[str, ...]
    any_number: bool
    any_name: bool
    written: str
    unnamed: tuple[str, ...] = ()

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Arguments:
        """Read the signature of a function; one that has none takes anything."""
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

    def places(self, asked: str, tree: LayoutTree) -> list[Place]:
        """Return where the arguments are that a plan has layouts for.

        >>> layout = Layout((2,), ("tp",))("tp")
        >>> def forward(x, mask=None, *, scale=1.0): ...
        >>> [place[:2] for place in Arguments.of(forward).places("", (layout, layout))]
        [(0, 'x'), (1, 'mask')]
        >>> [place[:2] for place in Arguments.of(forward).places("", {"mask": layout, "scale": None})]
        [(1, 'mask')]

        Args:
            asked: the start of an error message, "cannot ...".
            tree: one layout is for the first argument.

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
                raise ValueError(explain(asked, blame, f"layouts: {describe(tree)}   signature: {self.written}", hint))
            names = [*self.positional, *[None] * len(entries)]
            found = [Place(index, names[index], entry) for index, entry in enumerate(entries)]
        return [place for place in found if place.tree is not None]

    def _named(self, asked: str, name: str, entry: LayoutTree) -> Place:
        if name in self.by_name:
            return Place(self.positional.index(name) if name in self.positional else None, name, entry)
        if not self.any_name:
            blame = f"the signature has no argument {name!r}"
            hint = nearest(name, self.by_name) if self.by_name else "a list of layouts by position"
            if name in self.unnamed:
                blame = f"argument {name!r} is given by position only"
                hint = f"a list of layouts by position, that of {name!r} at index {self.unnamed.index(name)}"
            raise ValueError(explain(asked, blame, f"signature: {self.written}", hint))
        return Place(None, name, entry)
