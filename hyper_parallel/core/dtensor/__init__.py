"""Layouts: the shard of a tensor that each rank holds.

layout.py     Layout: the value, in alias form or in placement form
axes.py       the mesh as a value: axis names, sizes, ranks
shards.py     who owns which slice: pure arithmetic, for one rank or for all
strided.py    the order of several axes on one dim, as torch writes it
forms.py      reads and writes alias entries, placements, pending reductions
serial.py     tensor maps and dicts
convert.py    layouts to and from DTensors
mesh.py       torch's DeviceMesh: read, flattened, re-ordered
messages.py   the four parts of an error message
dtensor.py, placement_types.py   torch's own types
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
