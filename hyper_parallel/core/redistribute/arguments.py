"""Layout arguments of the verbs: a `Layout`, a mesh and placements, or alias entries for a known mesh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement
from hyper_parallel.core.mesh.axes import MeshAxes
from hyper_parallel.core.mesh.device_mesh import axes_of

_EXAMPLE = 'Layout.from_device_mesh(mesh)("dp", "None")'

LayoutLike = Layout | DeviceMesh | Sequence[Any]
"""A `Layout`; a `DeviceMesh`, with placements beside it; or placements or alias entries, where a mesh is known."""


def read_layout(
    asked: str, given: LayoutLike | None, placements: Sequence[Any] | None, known: DeviceMesh | None
) -> Layout:
    """Return a layout with an assignment and a DeviceMesh.

    Args:
        asked: the start of an error message, "cannot ...".
        given: what the caller gave for the layout.
        placements: torch's placements or alias entries, beside a mesh.
        known: the mesh of the tensor at hand, if it has one.

    Raises:
        TypeError: something else.
        ValueError: no assignment, no mesh, placements beside a layout that has some, ranks that do not exist.
    """
    if isinstance(given, Layout):
        return _read_assigned(asked, given, placements, known)
    mesh = given if isinstance(given, DeviceMesh) else known
    entries: Any = placements if given is None or given is mesh else given
    seen = f"layout: {given!r}   placements: {placements!r}{_shown(known)}"
    if entries is None and mesh is not None and mesh is given:
        blame, first = "a mesh alone does not say where the tensor goes", Layout.from_device_mesh(mesh).alias_name[0]
        raise ValueError(explain(asked, blame, seen, f'placements=("{first}", "None"), or torch\'s, one per axis'))
    _check_entries(asked, "placements" if entries is placements else "layout", entries, seen)
    if entries is given and placements is not None:
        blame = "entries were given twice, as layout and as placements"
        raise ValueError(explain(asked, blame, seen, "one of the two"))
    if mesh is None:
        blame = "entries do not say which mesh they are for"
        raise ValueError(explain(asked, blame, seen, f"a mesh before them, or {_EXAMPLE}"))
    try:
        assigned = _assigned(axes_of(mesh), tuple(entries))
    except TypeError:  # a list among them, or a mistake, which is then named
        return Layout.from_device_mesh(mesh)(*entries)
    return Layout._make(assigned._axes, assigned._splits, assigned._specs, assigned._partial, mesh)


@lru_cache(maxsize=4096)
def _assigned(axes: MeshAxes, entries: tuple[Any, ...]) -> Layout:
    """Return the layout of some entries, without a mesh."""
    return Layout._make(axes)(*entries)


def _read_assigned(asked: str, given: Layout, placements: Sequence[Any] | None, known: DeviceMesh | None) -> Layout:
    if placements is not None:
        seen = f"layout: {given}   placements: {placements!r}"
        if given.placements is not None:
            blame = "both a layout with an assignment and placements were given"
            raise ValueError(explain(asked, blame, seen, "one of the two"))
        _check_entries(asked, "placements", placements, seen)
        given = given(*placements)
    if given._specs is None:
        first = given.alias_name[0]
        blame, hint = "the layout is a mesh without an assignment", f'layout("{first}", "None")'
        raise ValueError(explain(asked, blame, f"layout: {given}", f"{hint}, or layout() for everything replicated"))
    return given if given.mesh is not None else _on_known_mesh(asked, given, known)


def _check_entries(asked: str, name: str, entries: object, seen: str) -> None:
    if isinstance(entries, Sequence) and not isinstance(entries, str):
        return
    blame, hint = f"{name} is a {type(entries).__name__}, not a layout or a sequence of entries", _EXAMPLE
    if entries is None:
        blame = "no layout was given"
    elif isinstance(entries, str):
        hint = f"({entries!r},), one entry per dim"
    elif isinstance(entries, Layout):
        blame, hint = "a layout was given beside a mesh", "the layout alone, which is for a mesh of its own"
    elif isinstance(entries, Placement):
        hint = f"[{entries!r}, ...], one placement per axis"
    raise TypeError(explain(asked, blame, seen, hint))


def _shown(known: DeviceMesh | None) -> str:
    return "" if known is None else f"   mesh of the tensor: {axes_of(known)}"


def _on_known_mesh(asked: str, layout: Layout, known: DeviceMesh | None) -> Layout:
    blame, seen = "the layout was made without a DeviceMesh", f"layout: {layout}{_shown(known)}"
    if known is not None:
        if axes_of(known) == layout._axes:
            return layout.with_mesh(known)
        blame += ", and the mesh of the tensor is not the one it is for"
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else None
    if world is not None and max(layout.rank_list) >= world:
        blame = f"the layout is for ranks up to {max(layout.rank_list)}, and there are {world} ranks"
        raise ValueError(explain(asked, blame, seen, f"a mesh of at most {world} ranks"))
    raise ValueError(explain(asked, blame, seen, "Layout.from_device_mesh(mesh)(...), or layout.with_mesh(mesh)"))


def check_dtensor(asked: str, x: object) -> DTensor:
    """Return x, which is a DTensor.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(x, DTensor):
        blame = f"x is a {type(x).__name__}, not a DTensor"
        hint = "distribute_tensor(x, layout) for a whole tensor, from_local(x, layout) for this rank's part"
        raise TypeError(explain(asked, blame, f"x: {type(x)!r}", hint))
    return x
