"""Cost of a step on a machine, and the position of a mesh on the nodes.

Without a machine, a step takes the bytes of its busiest rank at 1 GB/s, so that the plan with the fewest bytes wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from hyper_parallel.core.machine.description import Machine
from hyper_parallel.core.machine.links import Load, NodeSpread, load_seconds, spread_of
from hyper_parallel.core.redistribute.holdings import Counts, coordinate

__all__ = ["Load", "Nodes", "latency", "ranks_per_node", "seconds"]


def seconds(kind: str, load: Load, on: Machine | None) -> float:
    """Return the modelled seconds of one step: its collective, and packing and unpacking in memory.

    >>> from hyper_parallel.core.machine import find_machine
    >>> gather = Load(ranks=8, per_node=8, moved=7 * 2**20, inter_node=0, copied=0)
    >>> round(seconds("all_gather", gather, find_machine("h100-sxm")) * 1e6)  # microseconds
    57

    Args:
        kind: the kind of step.
        load: the bytes and ranks of the step.
        on: the machine; None: price by bytes alone.
    """
    if on is None:
        return load.moved / 1e9 if load.ranks > 1 else 0.0
    return 2 * load.copied / on.memory_bandwidth + load_seconds(on.prices, kind, load)


def ranks_per_node(on: Machine | None) -> int | None:
    """Return the number of ranks per node; None: all ranks share one."""
    return None if on is None else on.devices_per_node


def latency(kind: str, load: Load, on: Machine | None) -> float:
    """Return the seconds that a collective takes even without bytes."""
    return seconds(kind, load._replace(moved=0, inter_node=0, copied=0), on)


# -- intra-node and inter-node axes ------------------------------------------------------------------------------------


class Nodes:
    """The nodes on which the ranks of a mesh lie.

    >>> nodes = Nodes(range(8), (2, 4), 4)
    >>> nodes.spans_nodes((0,)), nodes.spans_nodes((1,)), nodes.intra_node_axes((0, 1))
    (True, False, (1,))

    Args:
        ranks: the rank at each mesh position, last axis fastest.
        sizes: ranks along each axis.
        ranks_per_node: rank r sits on node r // ranks_per_node; None: all on one.
    """

    def __init__(self, ranks: range | tuple[int, ...], sizes: Sequence[int], ranks_per_node: int | None) -> None:
        self._ranks = ranks
        self._sizes = tuple(sizes)
        self._node: Counts | None = None
        if ranks_per_node is not None:
            node = _array(ranks).reshape(self._sizes) // ranks_per_node
            self._node = node if (node != node.flat[0]).any() else None
        self._inside = self._along_nodes()
        self._spreads: dict[tuple[int, ...], NodeSpread] = {}

    def _along_nodes(self) -> frozenset[int] | None:
        """Return the axes that stay within a node, if every step along another axis changes the node; else None."""
        if self._node is None:
            return frozenset(range(len(self._sizes)))
        axes = [axis for axis in range(len(self._sizes)) if (self._node == self._node.take([0], axis=axis)).all()]
        others = math.prod(size for axis, size in enumerate(self._sizes) if axis not in axes)
        return frozenset(axes) if len(np.unique(self._node)) == others else None

    def spread(self, axes: Iterable[int]) -> NodeSpread:
        """Return the ranks and nodes of a group over these axes: of the group on most nodes, with fewest ranks on each.

        >>> Nodes(range(12), (12,), 8).spread((0,)), Nodes(range(12), (2, 6), 8).spread((1,))
        (NodeSpread(ranks=12, nodes=2, most=8), NodeSpread(ranks=6, nodes=2, most=4))
        """
        chosen = tuple(sorted(axes))
        if chosen not in self._spreads:
            self._spreads[chosen] = self._spread(chosen)
        return self._spreads[chosen]

    def _spread(self, axes: tuple[int, ...]) -> NodeSpread:
        size = math.prod(self._sizes[axis] for axis in axes)
        if self._inside is not None:
            most = math.prod(self._sizes[axis] for axis in axes if axis in self._inside)
            return NodeSpread(size, size // most, most)
        assert self._node is not None, "or nodes change along no axis"
        groups = np.unique(np.moveaxis(self._node, axes, range(-len(axes), 0)).reshape(-1, size), axis=0)
        spreads = [spread_of(group, 1) for group in groups.tolist()]
        return max(spreads, key=lambda spread: (spread.nodes, -spread.most))

    def spans_nodes(self, axes: Iterable[int]) -> bool:
        """Return True if groups over these axes reach over several nodes."""
        return self.spread(axes).nodes > 1

    def intra_node_axes(self, axes: Iterable[int]) -> tuple[int, ...]:
        """Return the axes whose ranks share a node together: as many as possible, inner ones first."""
        found: tuple[int, ...] = ()
        for axis in sorted(axes, reverse=True):
            if self._node is None or not self.spans_nodes((*found, axis)):
                found = (*found, axis)
        return tuple(sorted(found))

    def cut(self, axis: int) -> int:
        """Return the number of neighbours along an axis that always share a node; 1 if nodes cut it into unequal parts.

        >>> Nodes(range(8), (8,), 4).cut(0), Nodes(range(8), (2, 4), 4).cut(0), Nodes(range(8), (2, 4), 4).cut(1)
        (4, 1, 4)
        """
        size = self._sizes[axis]
        if self._node is None:
            return size
        for count in range(size, 1, -1):
            if size % count == 0:
                blocks = self._node.reshape(*self._sizes[:axis], size // count, count, *self._sizes[axis + 1 :])
                if (blocks == blocks.take([0], axis=axis + 1)).all():
                    return count
        return 1

    def place(self, axes: Sequence[int]) -> Counts:
        """Return, for every rank, its index among the sorted ranks of its group over some axes."""
        if isinstance(self._ranks, range) and self._ranks.step > 0:
            return coordinate(self._sizes, sorted(axes))
        ranks = _array(self._ranks).reshape(self._sizes)
        last = range(-len(axes), 0)
        moved = np.moveaxis(ranks, axes, last)
        order = moved.reshape(-1, math.prod(self._sizes[axis] for axis in axes)).argsort(axis=1).argsort(axis=1)
        return np.moveaxis(order.reshape(moved.shape), last, axes)


def _array(ranks: range | tuple[int, ...]) -> Counts:
    return np.arange(ranks.start, ranks.stop, ranks.step) if isinstance(ranks, range) else np.asarray(ranks)
