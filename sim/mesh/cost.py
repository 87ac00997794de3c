"""Prices: seconds of each operation and communication of a program on a hardware.

>>> from hyper_parallel.core.machine.description import find_machine
>>> from sim.mesh.program import Op
>>> pricing = Pricing(find_machine("h100-sxm"))
>>> matmul = Op("aten.mm", "matmul", 2 * 4096**3, (), (), "bfloat16", (1, 4096, 4096, 4096), 0, 0)
>>> price = pricing.op(matmul)
>>> 150e-6 < price.seconds < 200e-6, price.grade, price.bound
(True, 'calibrated', 'compute')

An operation of a kind without a price raises `UnknownOperation`, because a silent zero would hide its cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.core.common.errors import HyperParallelError, InvalidValue
from hyper_parallel.core.machine.calibration import Calibration, load_calibration
from hyper_parallel.core.machine.description import Machine
from hyper_parallel.core.machine.file import GRADES
from hyper_parallel.core.machine.links import COLLECTIVES, NodeSpread, collective_seconds, message_seconds, spread_of
from sim.mesh.pricing.compute_cost import Price, attention_seconds, matmul_seconds, stream_seconds
from sim.mesh.program import HOST_COPIES, MEMORY_KINDS, Comm, CommGroup, Event, Op, Place

_ITEM = {"bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4, "fp64": 8, "fp8": 1}
_OWN_SHARES = {"softmax": "softmax", "_foreach_": "several", "norm_backward": "norm_backward", "_norm": "norm"}
_STREAMED = dict.fromkeys(MEMORY_KINDS, "stream") | {name: name for name in ("random", "optimizer", "fused")}


class UnknownOperation(HyperParallelError, ValueError):
    """Raised for an operation or communication without a price."""


def weakest(*grades: str) -> str:
    """Return the weakest of the given evidence grades.

    >>> weakest("measured", "assumed", "datasheet")
    'assumed'
    """
    return max(grades, key=GRADES.index)


def _of_curve(curve: str, figure: str) -> str:
    """Return the grade of a share of a device's figure; a share measured or fitted may rest on a datasheet's figure."""
    if curve == figure == "measured" or figure == "assumed":
        return figure
    return "calibrated" if curve in ("measured", "calibrated") else weakest(curve, figure)


def ring_kernel_of(hardware: Machine, calibration: Calibration | None = None) -> str:
    """Return the fused attention that computes the blocks of a ring on a hardware, see `Job`."""
    if hardware.family == "cpu":
        return "cpu"
    if hardware.backend == "hccl":
        return "npu"
    curves = (calibration or load_calibration()).of(hardware, "attention", hardware.family)
    return "cudnn" if curves.get("default") == "cudnn" else "flash"


class Pricing:
    """Seconds of operations and communication on a hardware.

    Args:
        hardware: the hardware to price for.
        calibration: figures of kernels and links; None: the figures in `hyper_parallel/core/machine/data`.
        attention: attention kernels where a program does not name them: `flash1`, `flash2`, `flash3`, `cudnn`;
            None: torch's choice on the device.
        graphs: the host replays captured graphs, instead of issuing each operation.
        tp_overlap: communication along `tp` is cut into chunks that overlap with matmuls. Only a share of its seconds
            counts; `hidden` of `[overlap]` is the rest.
        posts_early: a pipeline's receives are issued before the receiver's earlier computation, so that a message
            starts as soon as it is sent. Else a receive follows the earlier work of the receiver.
        host: dispatch of operations: "eager" for plain tensors, or "dtensor", which costs several times as much.
    """

    def __init__(
        self,
        hardware: Machine,
        calibration: Calibration | None = None,
        *,
        attention: str | None = None,
        graphs: bool = False,
        tp_overlap: bool = False,
        posts_early: bool = False,
        host: str = "eager",
    ) -> None:
        self.posts_early = posts_early
        self.hardware = hardware
        self.calibration = calibration or load_calibration()
        overlap = self.calibration.of(hardware, "overlap", hardware.family)
        self._tp_counted = 1.0 - float(overlap.get("hidden", 0.0)) if tp_overlap else 1.0
        self._matmul = self.calibration.of(hardware, "matmul", hardware.family)
        self._memory = self.calibration.of(hardware, "memory", hardware.family)
        self._attention = self.calibration.of(hardware, "attention", hardware.family)
        self._kernels = attention or str(self._attention.get("default", "flash2"))
        self._check_kernels(self._kernels)
        self._offload = self.calibration.of(hardware, "offload")
        self.links = hardware.links_with(self.calibration)
        figures = self.calibration.of(hardware, "host")
        each = float(figures["dtensor"]) if host == "dtensor" else 1.0
        plain = self._host(figures, "op")
        self._op_seconds = float(figures["graphs_us"]) * 1e-6 if graphs else plain * each
        # Overhead of a dispatch mode per operation, in forward and in recomputation.
        watched = (float(figures["watched"]), float(figures["watched_again"]))
        self._watched_seconds = (0.0, 0.0) if graphs else tuple([plain * (times - 1) for times in watched])
        self._comm_seconds = float(figures["graphs_us"]) * 1e-6 if graphs else self._host(figures, "collective")
        self._prices: dict[Any, Price] = {}
        self._spreads: dict[int, tuple[Sequence[int], NodeSpread]] = {}

    def _host(self, section: Mapping[str, Any], name: str) -> float:
        own = self.hardware.value(f"host.{name}")
        return float(section[f"{name}_us"]) * 1e-6 if f"{name}_us" in section else own

    # -- operations -------------------------------------------------------------------------------------------------

    def op(self, op: Op) -> Price:
        """Return the price of an operation, e.g. of a bf16 matmul `Price(1.8e-4, "calibrated", "compute")`.

        Raises:
            UnknownOperation: its kind has no price; the message names the operation.
        """
        name, kind, flops, _, _, dtype, shape, _, _ = op
        moved = 0 if kind in ("attention", "attention_backward", "host") else op.bytes
        key = (name, kind, flops, shape, dtype, moved)
        price = self._prices.get(key)
        if price is None:
            price = self._prices[key] = self._price(op, moved)
        return price

    def _price(self, op: Op, moved: int) -> Price:
        if op.kind == "host":
            return Price(0.0, "measured", "host")
        if op.kind == "on_host":
            return self._host_price(moved)
        if op.kind == "matmul" and op.shape:
            return self._matmul_price(op.shape, op.dtype, op.flops, moved)
        if op.kind in ("attention", "attention_backward") and op.shape:
            return self._attention_price(op)
        if op.kind in _STREAMED:
            curve = self._memory
            share = _STREAMED[op.kind]
            if op.kind == "memory":
                share = next((own for word, own in _OWN_SHARES.items() if word in op.name and own in curve), share)
            seconds, bound = stream_seconds(curve, moved, self.hardware.memory_bandwidth, share)
            if op.kind in curve and op.shape:  # rate in elements per second, regardless of the element size
                seconds = max(seconds, float(curve["floor_us"]) * 1e-6 + op.shape[0] / (1e9 * float(curve[op.kind])))
            grade = _of_curve(curve["grade"], self.hardware.grade("device.bandwidth"))
            if op.flops:  # a kernel is no faster than its arithmetic
                arithmetic = op.flops / (self._matmul["cap"] * self.hardware.peak(op.dtype))
                seconds, bound = (arithmetic, "compute") if arithmetic > seconds else (seconds, bound)
            return Price(seconds, grade, bound, float(curve.get("spread", 0)))
        if op.flops and op.kind in ("matmul", "attention", "attention_backward"):  # shape unknown: a plain roofline
            cap = self._matmul["cap"] * float(self._matmul.get("sustained", 1))
            arithmetic = op.flops / (cap * self.hardware.peak(op.dtype))
            memory = op.bytes / (self._memory["stream"] * self.hardware.memory_bandwidth)
            seconds = self._matmul["floor_us"] * 1e-6 + max(arithmetic, memory)
            return Price(seconds, "assumed", "compute" if arithmetic > memory else "memory", 0.3)
        asked = f"cannot price the operation {op.name!r}"
        blame = f"its kind is {op.kind!r}, which says neither how much it computes nor what it moves"
        seen = f"dtype: {op.dtype}   reads and writes: {op.bytes} bytes"
        hint = "give it a kind in sim/mesh/data/operations.toml, or build the model of operations that have one"
        raise UnknownOperation(asked, blame, seen, hint)

    def _host_price(self, moved: int) -> Price:
        """Return the price of an operation on the host, bound by `host.bandwidth`, a device's share of host memory."""
        bandwidth = self.hardware.value("host.bandwidth", float(self._offload["bandwidth_gbytes_s"]) * 1e9)
        seconds = moved / (float(self._offload["stream"]) * bandwidth)
        return Price(seconds, "assumed", "host", float(self._offload["spread"]))

    def _copy_price(self, comm: Comm) -> Price:
        """Return the price of a copy between host and device, at a share of the bandwidth of their link."""
        figures, hardware = self._offload, self.hardware
        link = hardware.value("host.link", float(figures["link_gbytes_s"]) * 1e9)
        pageable = comm.op.endswith("_pageable")
        seconds = float(figures["latency_us"]) * 1e-6
        seconds += comm.size / (float(figures["pageable" if pageable else "pinned"]) * link)
        grade = "assumed" if pageable else _of_curve(figures["grade"], hardware.grade("host.link"))
        return Price(seconds, grade, "link", float(figures["spread" if pageable else "pinned_spread"]))

    def _matmul_price(self, shape: tuple[int, ...], dtype: str, flops: int, moved: int) -> Price:
        hardware, curve = self.hardware, self._matmul
        name = hardware.computed_as(dtype)
        if name in curve:
            curve = {**curve, **curve[name]}
        peak, bandwidth = hardware.peak(dtype), hardware.memory_bandwidth
        seconds, bound = matmul_seconds(curve, shape, peak, hardware.cores, _ITEM[name], bandwidth)
        batch, m, n, k = shape
        if moved:  # operands may be broadcast, or read in another dtype
            memory = moved / (curve["stream"] * bandwidth) + curve["floor_us"] * 1e-6
            seconds, bound = (memory, "memory") if memory > seconds * 1.5 else (seconds, bound)
        if flops > 2.2 * batch * m * n * k:  # two products in one operation, as in a convolution's backward
            seconds *= flops / (2.0 * batch * m * n * k)
        grade = _of_curve(curve["grade"], hardware.grade(f"peak.{name}"))
        return Price(seconds, grade, bound, float(curve.get("spread", 0)))

    def _attention_price(self, op: Op) -> Price:
        kernels = "cudnn" if "cudnn" in op.name and "cudnn" in self._attention else self._kernels
        curve = {**self._attention, **self._attention[kernels]}
        peak = self.hardware.peak(op.dtype)
        sustained = float(curve.get("sustained", self._matmul.get("sustained", 1)))
        backward = op.kind == "attention_backward"
        seconds, bound = attention_seconds(curve, op.shape, peak, backward=backward, sustained=sustained)
        grade = _of_curve(curve["grade"], self.hardware.grade(f"peak.{self.hardware.computed_as(op.dtype)}"))
        return Price(seconds, grade, bound, float(curve.get("spread", 0)))

    def _check_kernels(self, kernels: str) -> None:
        known = [name for name, value in self._attention.items() if isinstance(value, Mapping)]
        if kernels not in known:
            asked = f"cannot price attention of {kernels!r} kernels on {self.hardware.name}"
            raise InvalidValue(asked, "it has no figures of them", f"known: {', '.join(known)}", repr(known[0]))

    # -- communication ----------------------------------------------------------------------------------------------

    def comm(self, comm: Comm, group: CommGroup, sharing: float = 1.0, *, rank: int | None = None) -> Price:
        """Return the price of a communication.

        Args:
            comm: the communication.
            group: ranks that take part.
            sharing: number of communications of other axes that share its links, itself included.
            rank: rank that recorded it, to find if a message's peer is on the same node; None: unknown.

        Raises:
            UnknownOperation: the communication has no price.
        """
        if comm.op in HOST_COPIES:
            return self._copy_price(comm)
        if comm.op in ("send", "recv", "isend", "irecv"):
            same = self._same_node(rank, comm.peer)
            spread = NodeSpread(2, 1, 2) if same else NodeSpread(2, 2, 1)
            key: Any = (comm.op, comm.size, same, sharing)
        elif comm.op in COLLECTIVES:
            spread, same = self._spread(group.ranks), False
            key = (comm.op, comm.size, comm.moved, comm.messages, spread, sharing)
        else:
            asked = f"cannot price the communication {comm.op!r}"
            seen = f"group: {group.axis} of {len(group.ranks)} ranks   {comm.size} bytes"
            raise UnknownOperation(asked, "it has none", seen, f"one of {', '.join(COLLECTIVES)}, send, recv")
        price = self._prices.get(key)
        if price is None:
            price = self._prices[key] = self._comm_price(comm, spread, same, sharing)
        if self._tp_counted != 1.0 and group.axis == "tp":
            return price._replace(seconds=price.seconds * self._tp_counted)
        return price

    def _comm_price(self, comm: Comm, spread: NodeSpread, same: bool, sharing: float) -> Price:
        links, hardware = self.links, self.hardware
        if comm.op not in COLLECTIVES:
            seconds, bound = message_seconds(links, comm.size * sharing, same_node=same)
            curve = links.curves.get("send", links.curve("all_gather")) if same else self.links.fabric
        elif spread.ranks == 1:  # a local copy
            seconds, bound = stream_seconds(self._memory, 2.0 * comm.size, hardware.memory_bandwidth)
            curve = self._memory
        else:
            pattern = COLLECTIVES[comm.op]
            moved = comm.moved * sharing if pattern == "exchange" else None
            op, even = comm.op, comm.size - comm.size / spread.ranks
            if pattern == "gather" and comm.messages == spread.ranks and abs(comm.moved - even) > spread.ranks:
                op = "broadcast"  # nccl broadcasts each tensor of an uneven list, one after another in one launch
            seconds, bound = collective_seconds(links, op, comm.size * sharing, spread, moved)
            curve = links.curve(comm.op) if spread.nodes == 1 else self.links.fabric
        if comm.messages > 1:
            seconds += (comm.messages - 1) * float(self.links.fabric.get("each_message_us", 0)) * 1e-6
        grade = _of_curve(curve["grade"], hardware.grade("intra.bandwidth" if spread.nodes == 1 else "inter.bandwidth"))
        return Price(seconds, grade, bound, float(curve.get("spread", 0)))

    def _same_node(self, rank: int | None, peer: int | None) -> bool:
        if rank is None or peer is None:
            return self.hardware.devices_per_node > 8  # on a SuperPoD all ranks are neighbours
        return spread_of((rank, peer), self.hardware.devices_per_node).nodes == 1

    def _spread(self, ranks: Sequence[int]) -> NodeSpread:
        known = self._spreads.get(id(ranks))
        if known is None or known[0] is not ranks:
            known = (ranks, spread_of(ranks, self.hardware.devices_per_node))
            self._spreads[id(ranks)] = known
        return known[1]

    @property
    def overlap_slowdown(self) -> float:
        """Factor by which a concurrent communication slows down kernels, because it takes cores and bandwidth.

        A CPU prices communication and computation in one queue (`work_seconds`). There it is 1 plus the share of a
        communication's time that the processor spends on it.
        """
        return float(self.calibration.of(self.hardware, "overlap", self.hardware.family).get("slowdown", 1.0))

    def work_seconds(self, comm: Comm, group: CommGroup) -> float:
        """Return the seconds of a communication on the computing processor: 0, except on a CPU.

        Between nodes, count those of the same communication within a node: waiting for a slow network is idle time.
        """
        if not self.is_synchronous or comm.op in HOST_COPIES:
            return 0.0
        message = comm.op not in COLLECTIVES
        ranks = 2 if message else len(group.ranks)
        within = self._comm_price(comm, NodeSpread(ranks, 1, ranks), message, 1.0)
        return (self.overlap_slowdown - 1.0) * within.seconds

    def crosses_nodes(self, group: CommGroup) -> bool:
        """Return True if a group spans more than one node; such groups share links."""
        return self._spread(group.ranks).nodes > 1

    # -- host -------------------------------------------------------------------------------------------------------

    @property
    def is_synchronous(self) -> bool:
        """Return True if the host itself computes, so that its own time adds to the kernels' time."""
        return self.hardware.family == "cpu"

    def host_seconds(self, event: Event, place: Place | None = None) -> float:
        """Return the host's seconds to issue an event; waits and allocations cost almost nothing."""
        if isinstance(event, Op):
            each = self._op_seconds
            if place is not None and place.watched:
                each += self._watched_seconds[place.recomputes]
            return each * (event.shape[0] if event.kind == "host" and event.shape else 1)
        if isinstance(event, Comm):
            return self._op_seconds if event.op in HOST_COPIES else self._comm_seconds
        return 0.0
