"""Cost of a step: an alpha-beta model, on topologies that are data.

A collective takes a fixed latency, a little more per rank, and the bytes of its busiest rank over the bandwidth of the
slowest link they cross (Hockney, "The communication challenge for MPP", 1994; Thakur et al., "Optimization of
collective communication operations in MPICH", 2005). Two classes of link are distinguished: within a node and between.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from hyper_parallel.core.common.checks import check, check_fields, check_least
from hyper_parallel.core.common.errors import explain, nearest
from hyper_parallel.core.redistribute.holdings import Counts, coordinate

_LINK = "Link(2e-5, 1e-6, 25e9)"


@dataclass(frozen=True)
class Link:
    """A class of links, as one rank sees it.

    Attributes:
        latency: seconds that a collective takes before the first byte.
        per_rank: seconds more for each further rank of the group.
        bandwidth: bytes per second that a rank can send, and at the same time receive.
    """

    latency: float
    per_rank: float
    bandwidth: float

    def __post_init__(self) -> None:
        asked = "cannot describe a link"
        check_fields(asked, self)
        if not (0 <= self.latency < math.inf and 0 <= self.per_rank < math.inf and self.bandwidth > 0):
            blame = "it needs finite latencies, in seconds, from 0 up and a bandwidth, in bytes per second, above 0"
            raise ValueError(explain(asked, blame, repr(self), _LINK))


@dataclass(frozen=True)
class Topology:
    """Where ranks sit and what links them.

    >>> topology("h100").ranks_per_node
    8

    Attributes:
        name: what it is called.
        intra: links within a node.
        inter: links between nodes; None when there is one node only.
        ranks_per_node: rank r sits on node r // ranks_per_node; None: all ranks on one node.
        memory_bandwidth: bytes per second that a rank's memory reads or writes, for packing and unpacking.
        multi_rail: whether a gather or reduction over several nodes uses the links of all members of a node at once,
            as NCCL's rings do; otherwise all its bytes go at the pace of one link between nodes.
    """

    name: str
    intra: Link
    inter: Link | None = None
    ranks_per_node: int | None = None
    memory_bandwidth: float = math.inf
    multi_rail: bool = False

    def __post_init__(self) -> None:
        asked = f"cannot describe the topology {self.name!r}"
        check_fields(asked, self)
        check(asked, Link, _LINK, intra=self.intra)
        check(asked, (Link, "None"), _LINK, inter=self.inter)
        if (self.inter is None) != (self.ranks_per_node is None):
            seen = f"inter: {self.inter!r}   ranks_per_node: {self.ranks_per_node!r}"
            hint = f"inter={_LINK}, ranks_per_node=8"
            raise ValueError(explain(asked, "inter and ranks_per_node go together", seen, hint))
        check_least(asked, 1, ranks_per_node=self.ranks_per_node)
        if not self.memory_bandwidth > 0:
            seen = f"memory_bandwidth: {self.memory_bandwidth!r}"
            raise ValueError(explain(asked, "memory_bandwidth is not a number above 0", seen, "memory_bandwidth=2e12"))

    @property
    def counts_bytes_only(self) -> bool:
        """Whether no link has a latency: then the fewest bytes win, and of such plans the one that is over first."""
        return all(link is None or link.latency == link.per_rank == 0 for link in (self.intra, self.inter))


BYTES_ONLY = Topology("bytes", Link(0.0, 0.0, 1e9))
"""One node, no latency, 1 GB/s: the plan with the fewest bytes; its seconds are the bytes of the busiest rank."""

# Bandwidths: measured bus bandwidth of large collectives, per rank and direction. Latencies: the time of a collective
# of 8 bytes to 32 KiB. Where no measurement was found, the figure is marked as an estimate.
_TOPOLOGIES = MappingProxyType(
    {
        # 8 x H100 SXM: 12.9 us for 8 bytes, 69 us over two nodes (nccl-tests, AWS p5); 361 GB/s for a ring all_gather
        # and reduce_scatter over NVLink 4 (stas00/ml-engineering, network); 8 x 400 Gbit/s, 92 % of it attained.
        "h100": Topology("h100", Link(13e-6, 1e-6, 360e9), Link(69e-6, 1e-6, 46e9), 8, 2.6e12, multi_rail=True),
        # 8 x A100 SXM: 44 us for 32 KiB, 230 GB/s over NVLink 3 (stas00/ml-engineering, vTrain traces); 160 us over two
        # nodes (nccl-tests, AWS p4de); DGX A100: 8 x 200 Gbit/s, 192 GB/s a node measured.
        "a100": Topology("a100", Link(40e-6, 1e-6, 230e9), Link(160e-6, 1e-6, 24e9), 8, 1.6e12, multi_rail=True),
        # 8 x Ascend 910B: 19.3 GB/s per pair written over HCCS, full mesh of 7 peers; 22.6 GB/s over 200 Gbit/s RoCE
        # (CANN HIXL benchmark). Latencies: estimates.
        "ascend-910b": Topology("ascend-910b", Link(30e-6, 2e-6, 135e9), Link(60e-6, 2e-6, 22.6e9), 8, 1.2e12),
        # gloo over loopback, 2 and 4 processes on 2 cores: `python -m benchmarks links`. Memory: an estimate.
        "laptop": Topology("laptop", Link(0.0, 350e-6, 0.9e9), memory_bandwidth=8e9),
    }
)


def topology(name: str, ranks_per_node: int | None = None) -> Topology:
    """Return a topology by name: "h100", "a100", "ascend-910b" or "laptop"; or "bytes", which has no latency.

    Args:
        name: which.
        ranks_per_node: ranks on a node, where it is not the usual number.

    Raises:
        ValueError: an unknown name, nodes for a topology that has one only, fewer than 1 rank per node.
    """
    known = {**_TOPOLOGIES, BYTES_ONLY.name: BYTES_ONLY}
    if not isinstance(name, str) or name not in known:
        asked, blame = f"cannot find a topology called {name!r}", "there is none of that name"
        raise ValueError(explain(asked, blame, f"known: {', '.join(known)}", nearest(name, known)))
    found = known[name]
    if ranks_per_node is None:
        return found
    if found.inter is None:
        blame, seen = f"{name!r} has one node only", f"ranks_per_node: {ranks_per_node!r}"
        raise ValueError(explain("cannot set the ranks per node", blame, seen, f"topology({name!r})"))
    return replace(found, ranks_per_node=ranks_per_node)


def default_topology(device_type: str) -> Topology:
    """Return the topology that `redistribute` plans for when none is given, by type of device."""
    return topology({"cuda": "h100", "npu": "ascend-910b"}.get(device_type, "laptop"))


class Load(NamedTuple):
    """What the busiest rank of a collective moves, in bytes.

    Attributes:
        ranks: ranks in the group.
        per_node: of them, how many share a node; all of them when the group is within one.
        moved: the larger of sent and received.
        inter_node: of `moved`, what goes between nodes when each rank talks to each directly.
        copied: what is packed and unpacked in memory.
    """

    ranks: int
    per_node: int
    moved: int
    inter_node: int
    copied: int


_RINGS = frozenset({"all_gather", "reduce_scatter", "all_reduce"})


def seconds(kind: str, load: Load, on: Topology) -> float:
    """Return the modelled time of one step.

    >>> gather = Load(ranks=8, per_node=8, moved=7 * 2**20, inter_node=0, copied=0)
    >>> round(seconds("all_gather", gather, topology("h100")) * 1e6)  # microseconds
    40

    Args:
        kind: the kind of step.
        load: what it moves.
        on: the topology.
    """
    local = 2 * load.copied / on.memory_bandwidth  # read and written
    return local + latency(load, on) + _moving(kind, load, on)


def latency(load: Load, on: Topology) -> float:
    """Return the part of the time that a collective takes however little it moves."""
    if load.ranks == 1:
        return 0.0
    link = on.intra if on.inter is None or load.per_node == load.ranks else on.inter
    return link.latency + link.per_rank * (load.ranks - 1)


def _moving(kind: str, load: Load, on: Topology) -> float:
    """Return the part of the time that grows with the bytes moved."""
    intra, inter = on.intra, on.inter
    if inter is None or load.per_node == load.ranks:
        return load.moved / intra.bandwidth
    if kind not in _RINGS:
        return max((load.moved - load.inter_node) / intra.bandwidth, load.inter_node / inter.bandwidth)
    if not on.multi_rail:
        return load.moved / inter.bandwidth
    crossing = load.moved * (load.ranks - load.per_node) / (load.ranks - 1) / load.per_node
    return max(load.moved / intra.bandwidth, crossing / inter.bandwidth)


# -- nodes below a mesh: intra-node and inter-node axes ----------------------------------------------------------------


class Nodes:
    """The nodes of a mesh.

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
        self._shared: dict[tuple[int, ...], int] = {}

    def _along_nodes(self) -> frozenset[int] | None:
        """Return the axes along which nodes do not change, if every other axis leads to another node; else None."""
        if self._node is None:
            return frozenset(range(len(self._sizes)))
        axes = [axis for axis in range(len(self._sizes)) if (self._node == self._node.take([0], axis=axis)).all()]
        others = math.prod(size for axis, size in enumerate(self._sizes) if axis not in axes)
        return frozenset(axes) if len(np.unique(self._node)) == others else None

    def share(self, axes: Iterable[int]) -> int:
        """Return how many ranks of a group over these axes share a node, at least."""
        chosen = tuple(sorted(axes))
        if self._inside is not None:
            return math.prod(self._sizes[axis] for axis in chosen if axis in self._inside)
        if chosen not in self._shared:
            self._shared[chosen] = self._share(chosen)
        return self._shared[chosen]

    def _share(self, axes: tuple[int, ...]) -> int:
        size = math.prod(self._sizes[axis] for axis in axes)
        if self._node is None or not axes:
            return size
        rows = np.moveaxis(self._node, axes, range(-len(axes), 0)).reshape(-1, size)
        ordered = np.sort(rows, axis=1)
        return math.ceil(size / (1 + int((ordered[:, 1:] != ordered[:, :-1]).sum(axis=1).max(initial=0))))

    def spans_nodes(self, axes: Iterable[int]) -> bool:
        """Return whether groups over these axes reach over several nodes."""
        chosen = tuple(sorted(axes))
        return self.share(chosen) < math.prod(self._sizes[axis] for axis in chosen)

    def intra_node_axes(self, axes: Iterable[int]) -> tuple[int, ...]:
        """Return those axes whose ranks share a node: as many as go together, inner ones first."""
        found: tuple[int, ...] = ()
        for axis in sorted(axes, reverse=True):
            if self._node is None or not self.spans_nodes((*found, axis)):
                found = (*found, axis)
        return tuple(sorted(found))

    def cut(self, axis: int) -> int:
        """Return how many neighbours along an axis always share a node, if nodes cut the axis into equal parts.

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
        """Return, on every rank, its place among the sorted ranks of its group over some axes."""
        if isinstance(self._ranks, range) and self._ranks.step > 0:
            return coordinate(self._sizes, sorted(axes))
        ranks = _array(self._ranks).reshape(self._sizes)
        last = range(-len(axes), 0)
        moved = np.moveaxis(ranks, axes, last)
        order = moved.reshape(-1, math.prod(self._sizes[axis] for axis in axes)).argsort(axis=1).argsort(axis=1)
        return np.moveaxis(order.reshape(moved.shape), last, axes)


def _array(ranks: range | tuple[int, ...]) -> Counts:
    return np.arange(ranks.start, ranks.stop, ranks.step) if isinstance(ranks, range) else np.asarray(ranks)
