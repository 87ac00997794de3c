"""Spellings of layouts in a plan: one layout for a tensor, or several by position or by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Union

from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.spelling import is_placement
from hyper_parallel.core.mesh.device_mesh import axes_of

LayoutTree = Union[Layout, None, tuple["LayoutTree", ...], Mapping[str, "LayoutTree"]]  # noqa: UP007
"""A layout for one tensor, None to leave it alone, a tuple for several by position, a dict for several by name."""


def read_layouts(asked: str, value: object, mesh: DeviceMesh | Layout) -> LayoutTree:
    """Read layouts in the spellings of plans.

    >>> mesh = Layout((2, 4), ("dp", "tp"))
    >>> read_layouts("", ("dp", "None"), mesh)  # a tuple of names: one layout
    Layout((2, 4), ('dp', 'tp'))('dp', 'None')
    >>> read_layouts("", [("dp", "None"), None], mesh)  # a list: several by position
    (Layout((2, 4), ('dp', 'tp'))('dp', 'None'), None)
    >>> read_layouts("", {"x": ("dp",)}, mesh)
    {'x': Layout((2, 4), ('dp', 'tp'))('dp')}

    Args:
        asked: the start of an error message, "cannot ...".
        value: one layout (a non-empty tuple of placements, or of names, "None", None and tuples of names; a `Layout`),
            a list of them (or a tuple of tuples of placements, or of Layouts), or a dict by name, nested as the
            value of the argument.
        mesh: the mesh of the names; a `Layout` without an assignment is accepted.

    Returns:
        A layout with an assignment, on the mesh; a tuple; or a dict.

    Raises:
        ValueError: any other value; layouts on another mesh; axes that do not exist or are used twice.
    """
    base = mesh if isinstance(mesh, Layout) else Layout.from_device_mesh(mesh)
    if value is None:
        return None
    if isinstance(value, Mapping):
        return _read_names(asked, value, base)
    if isinstance(value, list) or (isinstance(value, tuple) and any(map(_is_layout, value))):
        if not value:
            blame = "it is empty"
            raise InvalidValue(asked, blame, f"given: {value!r}", _example(base))
        return tuple(_read_entry(asked, entry, base, value) for entry in value)
    try:
        return read_layout(asked, value, base)
    except ValueError as error:
        if not isinstance(value, tuple) or len(value) < 2 or not all(isinstance(entry, tuple) for entry in value):
            raise
        raise InvalidValue(f"{error}; {list(value)!r}, a list, for several layouts") from None


def read_layout(asked: str, value: object, mesh: DeviceMesh | Layout) -> Layout:
    """Read one layout in the spellings of plans.

    >>> read_layout("", (("dp", "tp"), None), Layout((2, 4), ("dp", "tp")))
    Layout((2, 4), ('dp', 'tp'))(('dp', 'tp'), 'None')

    Args:
        asked: the start of an error message, "cannot ...".
        value: a non-empty tuple of placements, or of names, "None", None and tuples of names; or a `Layout`.
        mesh: the mesh of the names; a `Layout` without an assignment is accepted.

    Raises:
        ValueError: any other value; a layout on another mesh; axes that do not exist or are used twice.
    """
    base = mesh if isinstance(mesh, Layout) else Layout.from_device_mesh(mesh)
    seen = f"given: {value!r}   mesh: {base._axes}"
    if isinstance(value, Layout):
        return _on_mesh(asked, value, base)
    if not isinstance(value, tuple):
        raise InvalidValue(asked, _what_it_is(value), seen, _example(base))
    if not value:
        raise InvalidValue(asked, "() is no layout: it has no entries", seen, _example(base))
    placed = [is_placement(entry) for entry in value]
    if any(placed) and not all(placed):
        blame = f"placements and axis names are mixed ({value[placed.index(False)]!r} is no placement)"
        raise InvalidValue(asked, blame, seen, _example(base))
    if any(map(_is_layout, value)):
        blame = "it holds several layouts, and there is one tensor"
        raise InvalidValue(asked, blame, seen, _example(base))
    try:
        return base(*value)
    except TypeError as error:  # an entry of another type
        raise InvalidValue(asked, _first_line(error), seen, _example(base)) from None
    except ValueError as error:
        raise InvalidValue(_within(asked, error)) from None


def leaves(tree: LayoutTree) -> Iterator[Layout]:
    """Yield the layouts of a tree, first to last.

    >>> layout = Layout((2,), ("tp",))("tp")
    >>> len(list(leaves((layout, None, {"x": layout}))))
    2
    """
    if isinstance(tree, Layout):
        yield tree
    elif isinstance(tree, Mapping):
        for entry in tree.values():
            yield from leaves(entry)
    elif tree is not None:
        for entry in tree:
            yield from leaves(entry)


def describe(tree: LayoutTree) -> str:
    """Format a tree of layouts for messages.

    >>> layout = Layout((2,), ("tp",))("tp", "None")
    >>> describe((layout, None))
    '[(tp, -), None]'
    """
    if isinstance(tree, Layout):
        pending = ", ".join(f"{name}={kind}" for name, kind in tree.partial.items())
        return tree._short() + (f"; {pending}" if pending else "")
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{name}: {describe(entry)}" for name, entry in tree.items()) + "}"
    return "None" if tree is None else f"[{', '.join(map(describe, tree))}]"


def map_tree(tree: LayoutTree, function: Callable[[Layout], Any]) -> Any:
    """Apply a function to the layouts of a tree."""
    if isinstance(tree, Layout):
        return function(tree)
    if isinstance(tree, Mapping):
        return {name: map_tree(entry, function) for name, entry in tree.items()}
    return None if tree is None else tuple(map_tree(entry, function) for entry in tree)


def _read_names(asked: str, value: Mapping[Any, Any], base: Layout) -> dict[str, LayoutTree]:
    for name in value:
        if not isinstance(name, str):
            blame = f"a name is a str, and {name!r} is a {type(name).__name__}"
            raise InvalidValue(asked, blame, f"given: {value!r}", _named_example(base))
    if not value:
        raise InvalidValue(asked, "it is empty", f"given: {value!r}", _named_example(base))
    return {name: read_layouts(f"{asked} ({name!r})", entry, base) for name, entry in value.items()}


def _read_entry(asked: str, entry: object, base: Layout, whole: Sequence[object]) -> LayoutTree:
    if isinstance(entry, str) or is_placement(entry):
        blame = f"a list holds one layout per tensor, and {entry!r} is one entry of a layout"
        hint = f"{tuple(whole)!r} for one layout, [{tuple(whole)!r}] for one in a list"
        raise InvalidValue(asked, blame, f"given: {whole!r}", hint)
    return read_layouts(asked, entry, base)


def _is_layout(entry: object) -> bool:
    """Return True if an entry of a tuple is a whole layout; a tuple of names is the split of one dim."""
    return isinstance(entry, (Layout, Mapping)) or (isinstance(entry, (tuple, list)) and any(map(is_placement, entry)))


def _on_mesh(asked: str, layout: Layout, base: Layout) -> Layout:
    seen = f"layout: {layout}   mesh: {base._axes}"
    if layout._specs is None:
        raise InvalidValue(asked, "the layout is a mesh without an assignment", seen, _example(base))
    if layout._axes != base._axes:
        blame = "the layout is for another mesh"
        raise InvalidValue(asked, blame, seen, "a layout on the mesh given, or names, which are read on it")
    return layout if base.mesh is None else layout.with_mesh(base.mesh)


def _what_it_is(value: object) -> str:
    if isinstance(value, str) or is_placement(value):
        return f"{value!r} is one entry, and a layout is a tuple of them: ({value!r},)"
    return f"a {type(value).__name__} is no layout"


def _example(base: Layout) -> str:
    return f'("{base.alias_name[0]}", "None"), one entry per dim; or one placement per axis'


def _named_example(base: Layout) -> str:
    return f'{{"x": ("{base.alias_name[0]}", "None")}}, a layout for each name'


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0].split(": ", 1)[-1]


def _within(asked: str, error: Exception) -> str:
    """Prefix a message, which already has its four parts, with the failed request."""
    first, _, rest = str(error).partition("\n")
    return f"{asked}: {first}\n{rest}"


def layout_on(mesh: DeviceMesh) -> Layout:
    """Return the layout of a mesh without an assignment."""
    return Layout._make(axes_of(mesh), mesh=mesh)
