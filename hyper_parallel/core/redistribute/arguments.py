"""What a verb is told about a layout: a `Layout`, a mesh and placements, or alias entries for a mesh that is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.messages import explain

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
    if isinstance(given, Layout) and placements is None:
        if given.mesh is None:
            given = _on_known_mesh(asked, given, known)
        if given.placements is None:
            names = ", ".join(given.alias_name)
            blame = "the layout is a mesh without an assignment"
            hint = f'layout("{given.alias_name[0]}", "None"), or layout() for everything replicated'
            raise ValueError(explain(asked, blame, f"layout: {given}   axes: {names}", hint))
        return given
    mesh: object = given
    if given is None or (placements is None and _is_entries(given)):
        mesh, placements = known, placements if given is None else given  # type: ignore[assignment]
    if isinstance(mesh, Layout):
        blame = "both a layout with an assignment and placements were given"
        if mesh.placements is None:
            return read_layout(asked, mesh(*(placements or ())), None, known)
        raise ValueError(explain(asked, blame, f"layout: {mesh}   placements: {placements!r}", "one of the two"))
    if not isinstance(mesh, DeviceMesh):
        blame = f"layout is a {type(given).__name__}" if known is not None or given is not None else "no mesh is known"
        hint = 'Layout.from_device_mesh(mesh)("dp", "None"), or mesh and placements'
        raise TypeError(explain(asked, blame, f"layout: {given!r}   placements: {placements!r}", hint))
    if placements is None:
        blame, seen = "a mesh alone does not say where the tensor goes", f"layout: {mesh}"
        raise ValueError(explain(asked, blame, seen, 'placements=("dp", "None"), or [Shard(0), Replicate()]'))
    return Layout.from_device_mesh(mesh)(*placements)


def _is_entries(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str)


def _on_known_mesh(asked: str, layout: Layout, known: DeviceMesh | None) -> Layout:
    if known is not None:
        own = Layout.from_device_mesh(known)
        if own._axes == layout._axes:
            return layout.with_mesh(known)
        seen = f"layout: {layout}   mesh of the tensor: {own._axes}"
    else:
        seen = f"layout: {layout}"
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else None
    if world is not None and max(layout.rank_list) >= world:
        blame = f"the layout is for ranks up to {max(layout.rank_list)}, and there are {world} ranks"
        raise ValueError(explain(asked, blame, seen, f"a mesh of at most {world} ranks"))
    blame = "the layout was made without a DeviceMesh"
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
