"""Layouts: the part of a tensor that each rank holds.

    text, convert -> layout -> spelling -> ownership
    layout, convert -> core.mesh -> core.common

ownership       who owns which slice: arithmetic on ints, for one rank or for all
spelling        alias entries, reductions, tensor maps, dicts and torch's placements, read and written
layout          `Layout`, the value
convert         a layout as the placements and the mesh of a DTensor
text            meshes and layouts as typed on a command line
dtensor, placement_types    torch's own types, under the paths that users know
"""

from hyper_parallel.core.dtensor.convert import in_split_order, layout_of, to_placements, to_torch
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Partial, Placement, Replicate, Shard
from hyper_parallel.core.mesh.device_mesh import flatten_axes, reorder_axes

__all__ = [
    "Layout",
    "flatten_axes",
    "reorder_axes",
    "in_split_order",
    "layout_of",
    "to_placements",
    "to_torch",
    "DTensor",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
]
