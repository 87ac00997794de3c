"""Seconds of collectives: an alpha-beta model by operation, size and the group's spread over nodes.

A ring sends (n-1)/n of the buffer through every rank, an all_reduce twice that. Between nodes, all members of a group
on a node use their adapters at once, as NCCL's rings do. So a group with r ranks per node has r adapters. With one rank
per node it has one, because the axis's other groups use the others (Thakur et al., 2005; NCCL, src/graph/tuning.cc).

    t = base + hops + moving * (1 + (ramp / moving) ** power),   moving = wire / bandwidth

The last factor is the loss of bandwidth to chunks, protocols and filling the pipe, for messages of finite size. Over
many nodes an all_reduce is a tree, which forwards small messages at once and large ones in chunks; the model takes the
faster of the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

COLLECTIVES = MappingProxyType(
    {
        "all_gather": "gather",
        "all_gather_single": "gather",
        "all_gather_into_tensor": "gather",
        "all_gather_coalesced": "gather",
        "reduce_scatter": "gather",
        "reduce_scatter_single": "gather",
        "reduce_scatter_tensor": "gather",
        "reduce_scatter_coalesced": "gather",
        "all_reduce": "reduce",
        "all_reduce_coalesced": "reduce",
        "all_to_all": "exchange",
        "all_to_all_single": "exchange",
        "broadcast": "one",
        "reduce": "one",
        "scatter": "gather",
        "gather": "gather",
        "barrier": "sync",
    }
)
"""How each operation moves data: it is priced as others of its pattern."""

_PAT_DOUBLING_US, _PAT_RANK_US, _PAT_SHARE = 4.0, 2.8, 0.75
"""NCCL's own model of its parallel aggregated trees (src/graph/tuning.cc, since 2.23): what each doubling of the ranks
costs (14 us of the network over 3.5), what each rank costs all the same, and their part of a ring's bandwidth. They are
for groups with one rank on each node alone (`ncclPatEnable`): those with more go around rings."""

_CHUNK = 4 * 2**20 / 8
"""Bytes that a rank on the way of a broadcast receives before it sends them on, of each channel: NCCL's buffer of 4 MiB
in 8 steps, one a chunk (DEFAULT_BUFFSIZE of src/init.cc, NCCL_STEPS of src/include/devcomm.h, BROADCAST_CHUNKSTEPS of
src/include/collectives.h, 2.9.9). A channel is taken to have one device's share of the adapters."""

_CURVE_OF = MappingProxyType(
    {"gather": "all_gather", "reduce": "all_reduce", "exchange": "all_to_all", "one": "broadcast"}
)


class NodeSpread(NamedTuple):
    """The spread of a group over nodes.

    Attributes:
        ranks: ranks of the group.
        nodes: nodes with ranks of the group.
        most: ranks on the node with most of them.
    """

    ranks: int
    nodes: int
    most: int

    @property
    def outside(self) -> float:
        """Share of an even exchange that a rank of the emptiest node sends to other nodes.

        That node has at most the mean number of ranks over all nodes except the fullest.
        """
        fewest = (self.ranks - self.most) // (self.nodes - 1) if self.nodes > 1 else self.ranks
        return (self.ranks - fewest) / max(self.ranks - 1, 1)


def spread_of(ranks: Sequence[int], devices_per_node: int) -> NodeSpread:
    """Count the nodes of a group, since launchers number ranks node by node.

    >>> spread_of(range(0, 64, 8), 8), spread_of(range(16), 8)
    (NodeSpread(ranks=8, nodes=8, most=1), NodeSpread(ranks=16, nodes=2, most=8))
    """
    counts: dict[int, int] = {}
    for rank in ranks:
        node = rank // devices_per_node
        counts[node] = counts.get(node, 0) + 1
    return NodeSpread(len(ranks), max(len(counts), 1), max(counts.values(), default=1))


@dataclass(frozen=True)
class Links:
    """The links of a group.

    Attributes:
        intra: bytes per second between a device and its node.
        mesh: True if each pair of devices in a node has a separate link; False for a switch.
        devices: devices per node.
        in_switch: bytes per second of an all_reduce's buffer that the switch computes; None: it computes none.
        in_switch_from: ranks from which the switch computes all_reduces.
        inter: bytes per second of a device's share of the adapters.
        taper: share of `inter` lost at each doubling of the nodes.
        curves: curves of the links within a node, by operation.
        fabric: curve of the network.
        trees: True if the library gathers and scatters along trees for groups with one rank per node, as NCCL does
            since 2.23 (PAT).
    """

    intra: float
    mesh: bool
    devices: int
    in_switch: float | None
    in_switch_from: float
    inter: float
    taper: float
    curves: Mapping[str, Mapping[str, Any]]
    fabric: Mapping[str, Any]
    trees: bool = False

    def curve(self, op: str) -> Mapping[str, Any]:
        """Return the curve of an operation within a node."""
        pattern = COLLECTIVES[op]
        for name in (
            op,
            op.removesuffix("_single").removesuffix("_coalesced"),
            _CURVE_OF.get(pattern, ""),
            "all_gather",
        ):
            if name in self.curves:
                return self.curves[name]
        raise KeyError(op)

    def within(self, op: str, ranks: int) -> float:
        """Return the bandwidth of a ring, or of all links of a mesh, of `ranks` ranks in a node."""
        curve = self.curve(op)
        if self.mesh:  # a rank uses only its links to members of its group
            share = min(1.0, (ranks - 1) / max(self.devices - 1, 1))
            return self.intra * share * float(curve["efficiency"])
        return self.intra * float(curve["efficiency"]) * (1 - float(curve.get("pair_loss", 0)) / ranks)

    def between(self, spread: NodeSpread, share: str = "efficiency") -> float:
        """Return the bandwidth between nodes of one rank of the group."""
        left = (1 - self.taper) ** max(0.0, math.log2(spread.nodes) - 1)
        return self.inter * float(self.fabric[share]) * left


class Load(NamedTuple):
    """Bytes that the busiest rank of a collective moves.

    Attributes:
        ranks: ranks in the group.
        per_node: ranks on the node with most of them; all ranks if the group is within one node.
        moved: the larger of sent and received.
        inter_node: the part of `moved` that crosses nodes if each rank communicates with each directly.
        copied: bytes packed and unpacked in memory.
        nodes: nodes of the group; 0: as few as possible.
    """

    ranks: int
    per_node: int
    moved: int
    inter_node: float
    copied: int
    nodes: int = 0

    @classmethod
    def of(cls, spread: NodeSpread, moved: int, copied: int = 0, inter_node: float | None = None) -> Load:
        """Return the load of a group with this spread; without `inter_node`, `spread.outside` of the moved bytes."""
        between = moved * spread.outside if inter_node is None else inter_node
        return cls(spread.ranks, spread.most, moved, between, copied, spread.nodes)


def load_seconds(links: Links, op: str, load: Load) -> float:
    """Return the seconds of a collective, or of a message (`send`, `permute`), with known bytes.

    Args:
        links: the links that it uses.
        op: one of `COLLECTIVES`, or a message.
        load: its bytes; copies in memory are not counted.
    """
    n, pattern = load.ranks, COLLECTIVES.get(op)
    if n == 1:
        return 0.0
    if pattern is None:
        return message_seconds(links, load.moved, same_node=load.per_node == n)[0]
    size = load.moved if pattern == "one" else load.moved * n / ((n - 1) * (2 if pattern == "reduce" else 1))
    spread = NodeSpread(n, load.nodes or math.ceil(n / load.per_node), load.per_node)
    return collective_seconds(links, op, size, spread, load.moved, load.inter_node)[0]


def collective_seconds(
    links: Links, op: str, size: float, spread: NodeSpread, moved: float | None = None, crossing: float | None = None
) -> tuple[float, str]:
    """Return the seconds of a collective, and its bound: `latency`, `link` or `network`.

    Args:
        links: the links that it uses.
        op: one of `COLLECTIVES`.
        size: bytes of the full buffer, as nccl-tests counts.
        spread: the group's spread over nodes.
        moved: bytes that the busiest rank sends or receives, for uneven exchanges; None: as `size` implies.
        crossing: bytes of an exchange that cross nodes; None: `spread.outside` of all.
    """
    pattern, n = COLLECTIVES[op], spread.ranks
    curve, fabric = links.curve(op), links.fabric
    times = 2 if pattern == "reduce" else 1
    wire = {"one": size, "sync": 0.0}.get(pattern, times * size * (n - 1) / n)
    if pattern == "exchange" and moved:
        wire = max(wire, moved)
    inside = spread.most > 1
    within = links.within(op, spread.most) if inside else math.inf
    switched = pattern == "reduce" and links.in_switch is not None and spread.most >= links.in_switch_from
    if switched:
        switch = links.curves.get("all_reduce_in_switch", {})
        rate = (links.in_switch or 0.0) * float(switch.get("efficiency", 1.0))
        within = max(within, rate * 2 * (n - 1) / n)
        curve = switch or curve
    if spread.nodes == 1:
        base = float(curve["base_us"]) + float(curve.get("hop_us", 0)) * (n - 1)
        return _seconds(base * 1e-6, wire, within, curve, "link")
    adapter = links.between(spread, "exchange" if pattern == "exchange" else "efficiency")
    if pattern == "exchange":
        outside = spread.outside if crossing is None else crossing / wire if wire else 0.0
        across = adapter / outside if outside else math.inf
        within = within / (1 - outside) if outside < 1 and inside else math.inf
    elif pattern == "reduce" and spread.nodes == 2:  # two nodes exchange halves: each sends the buffer once
        across = adapter * spread.most * 2 * (n - 1) / n
    else:
        across = adapter * spread.most
    hop = float(curve.get("hop_us", 0)) * (spread.most - 1)
    base, rate = float(fabric["base_us"]), min(within, across)
    bound = "network" if across <= within else "link"
    if pattern == "reduce":
        doublings = math.log2(spread.nodes) - 1
        large = _seconds((base + hop + float(fabric["tree_us"]) * doublings) * 1e-6, wire, rate, fabric, bound)
        quick = (base + hop + float(fabric["small_tree_us"]) * doublings) * 1e-6
        return min(large, _seconds(quick, wire, rate * float(fabric["small_share"]), {}, bound))
    if pattern == "exchange":
        hops = float(fabric["peer_us"]) * (n - 1)
    else:
        hops = float(fabric["hop_us"]) * (spread.nodes - 1) + hop * spread.nodes
    if pattern == "one":  # along a chain, a chunk at a time
        hops += 1e6 * (spread.nodes - 1) * min(size / spread.most, _CHUNK) / adapter
    if pattern == "gather" and links.trees and not inside:
        steps = _PAT_DOUBLING_US * math.log2(spread.nodes) + _PAT_RANK_US * n
        along_tree = _seconds((base + steps) * 1e-6, wire, rate * _PAT_SHARE, fabric, bound)
        return min(along_tree, _seconds((base + hops) * 1e-6, wire, rate, fabric, bound))
    return _seconds((base + hops) * 1e-6, wire, rate, fabric, bound)


def message_seconds(links: Links, size: float, *, same_node: bool) -> tuple[float, str]:
    """Return the seconds of a message between two ranks, and its bound."""
    if same_node:
        curve = links.curves.get("send", links.curve("all_gather"))
        rate = links.intra / max(links.devices - 1, 1) if links.mesh else links.intra
        return _seconds(float(curve["base_us"]) * 1e-6, size, rate * float(curve["efficiency"]), curve, "link")
    rate = links.inter * float(links.fabric["message"])
    return _seconds(float(links.fabric["message_us"]) * 1e-6, size, rate, links.fabric, "network")


def _seconds(base: float, wire: float, rate: float, curve: Mapping[str, Any], bound: str) -> tuple[float, str]:
    moving = wire / rate
    if moving:
        moving *= 1 + (float(curve.get("ramp_us", 0)) * 1e-6 / moving) ** float(curve.get("power", 1))
    return base + moving, "latency" if base > moving else bound
