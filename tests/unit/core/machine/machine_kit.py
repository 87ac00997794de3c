"""Machines whose prices can be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from hyper_parallel.core.machine.description import Machine, one_node


class Made(NamedTuple):
    """Links whose collectives take `latency + per_rank * hops` seconds and their bytes by `bandwidth`."""

    latency: float
    per_rank: float
    bandwidth: float


_OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send")


def machine(
    name: str, near: Made, far: Made | None = None, per_node: int | None = None, memory: float = math.inf
) -> Machine:
    """Return a machine of these links: within a node and between nodes, of `per_node` ranks; None: one node."""
    far = far or near
    near_us, far_us = near.latency * 1e6, far.latency * 1e6
    link: dict[str, object] = {"efficiency": 1.0, "pair_loss": 0.0, "ramp_us": 0.0, "grade": "assumed"}
    link |= {"base_us": near_us, "hop_us": near.per_rank * 1e6}
    fabric = {"efficiency": 1.0, "exchange": 1.0, "message": 1.0, "small_share": 1.0, "ramp_us": 0.0}
    fabric |= dict.fromkeys(("base_us", "message_us"), far_us)
    fabric |= dict.fromkeys(("hop_us", "peer_us", "tree_us", "small_tree_us"), far.per_rank * 1e6)
    made = one_node().with_figures(
        intra__bandwidth=near.bandwidth, inter__bandwidth=far.bandwidth, device__bandwidth=memory
    )
    if per_node is not None:
        made = made.with_figures(node__devices=per_node)
    return replace(made, name=name, curves={"links": dict.fromkeys(_OPS, link), "fabric": fabric})
