"""Layouts: the part of a tensor that each rank holds.

    text, convert -> layout -> spelling -> ownership
    layout, convert -> core.mesh -> core.common

ownership       the slice of each rank: arithmetic on ints, for one rank or for all
spelling        readers and writers of alias entries, reductions, tensor maps, dicts and torch's placements
layout          `Layout`, the value
convert         the placements and the mesh of a DTensor with a layout
text            meshes and layouts as typed on a command line
dtensor, placement_types    torch's types, under the paths of the existing library
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
