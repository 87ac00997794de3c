"""Redistribution plans: the steps from one layout to another, and their costs.

`plan` prices about a dozen candidates (`candidates`) on a machine and keeps the cheapest. It uses global facts only, so
that every rank derives the same plan. Plans are cached, since `plan` is a pure function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.checks import check_shape, read_int
from hyper_parallel.core.common.errors import HyperParallelError, readable_bytes
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.machine.description import Machine, find_machine
from hyper_parallel.core.redistribute import cost
from hyper_parallel.core.redistribute.candidates import candidates
from hyper_parallel.core.redistribute.holdings import Counts, Located, extent
from hyper_parallel.core.redistribute.steps import Step, price, with_kept
from hyper_parallel.core.redistribute.transition import Transition, read
from hyper_parallel.platform import get_platform


@dataclass(frozen=True, eq=False)
class Plan:
    """The steps from one layout of a tensor to another.

    Attributes:
        src: the source layout, without a DeviceMesh, for display.
        dst: the target layout, without a DeviceMesh, for display.
        global_shape: the tensor's sizes, in elements.
        dtype: the tensor's dtype.
        machine: the machine that priced the plan; None: priced by bytes alone.
        ranks: the participating ranks, in the order of the byte lists: of the mesh, or of both, sorted.
        steps: in order; empty if every rank holds what it needs.
        before: the source part of each rank.
        after: the result part of each rank.
    """

    src: Layout
    dst: Layout
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    machine: Machine | None
    ranks: range | tuple[int, ...]
    steps: tuple[Step, ...]
    before: Located
    after: Located

    @cached_property
    def recv_bytes(self) -> Counts:
        """Bytes that each rank receives, one number per rank."""
        return _total([step.recv_bytes for step in self.steps], len(self.ranks))

    @cached_property
    def send_bytes(self) -> Counts:
        """Bytes that each rank sends, one number per rank."""
        return _total([step.send_bytes for step in self.steps], len(self.ranks))

    @property
    def num_collectives(self) -> int:
        """Largest number of collectives that a rank issues; an exchange in rounds counts once per round."""
        issued = np.zeros(len(self.ranks), dtype=np.int64)
        for step in self.steps:
            if step.communicates:
                issued[step.takes_part()] += step.rounds
        return int(issued.max(initial=0))

    @property
    def peak_extra_bytes(self) -> int:
        """Peak bytes per rank beyond its source and result parts."""
        return max((step.peak_extra_bytes for step in self.steps), default=0)

    @property
    def seconds(self) -> float:
        """Modelled seconds on the plan's machine."""
        return sum(step.seconds for step in self.steps)

    def __str__(self) -> str:
        title = f"{self.src} -> {self.dst}, {tuple(self.global_shape)} {str(self.dtype).removeprefix('torch.')}"
        if not self.steps:
            return f"{title}\nnothing to do"
        from hyper_parallel.core.common.tables import as_text, plain_table  # imports rich, which training does not need

        table = plain_table("step", "over", "ranks", "receives", "sends", "extra", "us", left=2)
        for step in self.steps:
            moved = (int(step.recv_bytes.max(initial=0)), int(step.send_bytes.max(initial=0)), step.peak_extra_bytes)
            kind = step.kind + (f" x{step.rounds}" if step.rounds > 1 else "")
            place = (kind, "+".join(step.axes) or "-", str(step.group_size))
            table.add_row(*place, *map(readable_bytes, moved), f"{step.seconds * 1e6:.1f}")
        return f"{title}\n{as_text(table, 10_000)}"


def plan(
    src: Layout,
    dst: Layout,
    global_shape: Sequence[int],
    dtype: torch.dtype,
    machine: str | Machine | None = None,
    *,
    max_extra_bytes: int | None = None,
) -> Plan:
    """Return the cheapest steps from one layout to another, without communication.

    >>> mesh = Layout((2, 4), ("dp", "tp"))
    >>> gather = plan(mesh("dp", "tp"), mesh(), (8, 8), torch.float32)
    >>> [(step.kind, step.axes) for step in gather.steps], gather.recv_bytes.tolist()
    ([('all_gather', ('dp', 'tp'))], [224, 224, 224, 224, 224, 224, 224, 224])
    >>> plan(mesh(), mesh("dp", "tp"), (8, 8), torch.float32).num_collectives  # a slice of what is there
    0

    Without a machine, the plan moves the fewest bytes possible; see `lower_bound`. With a machine, it takes the least
    modelled time, e.g. small tensors in fewer steps, and fewer bytes over slow links.

    Args:
        src: the current layout.
        dst: the target layout; its mesh may be another one.
        global_shape: the full tensor's sizes, in elements.
        dtype: the tensor's dtype.
        machine: a description, or its name or file, see `find_machine`; None: the fewest bytes.
        max_extra_bytes: limit of bytes per rank beyond its source and result parts. Larger exchanges are cut into
            rounds. None: no limit.

    Raises:
        TypeError: a shape, dtype, machine or limit of the wrong type.
        ValueError: a layout without an assignment, or that does not fit the shape; several kinds of reduction pending;
            a limit that no plan meets; an unknown machine.
    """
    on = None if machine is None else find_machine(machine)  # cached by contents, because the file may change
    if not _is_hashable((src, dst, global_shape, dtype, max_extra_bytes)):  # a list as shape, or a wrong type
        _check(src, dst, global_shape, dtype, max_extra_bytes)
        global_shape = check_shape(global_shape)
    return _cached(src, dst, global_shape, dtype, on, max_extra_bytes)


_MACHINE = "_hyper_parallel_machine"


def plan_for(mesh: DeviceMesh, machine: Machine) -> None:
    """Set the machine that prices redistributions on a mesh and its slices, the same on all ranks."""
    setattr(mesh, _MACHINE, machine)


def plan_here(
    src: Layout,
    dst: Layout,
    shape: Sequence[int],
    dtype: torch.dtype,
    mesh: DeviceMesh,
    machine: str | Machine | None = None,
    limit: int | None = None,
) -> Plan:
    """Plan a redistribution on this rank; the default machine is the mesh's, see `plan_for`, or the platform's."""
    if machine is not None:
        return plan(src, dst, shape, dtype, machine, max_extra_bytes=limit)
    platform, root = get_platform(mesh.device_type), getattr(mesh, "_root_mesh", None) or mesh
    found = plan(src, dst, shape, dtype, getattr(root, _MACHINE, None) or platform.machine(), max_extra_bytes=limit)
    platform.on_plan(found, limit)
    return found


def _is_hashable(key: object) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


@lru_cache(maxsize=4096)
def _cached(
    src: Layout, dst: Layout, shape: Sequence[int], dtype: torch.dtype, on: Machine | None, max_extra_bytes: int | None
) -> Plan:
    transition = _check(src, dst, shape, dtype, max_extra_bytes)
    shape = tuple(shape)
    ranks, ways = candidates(transition, on)
    # Equal layouts share a cache entry, so the plan shows one spelling, not the first caller's.
    src, dst = (layout.with_mesh(None).placement_to_tensor_map(len(shape)) for layout in (src, dst))
    if max_extra_bytes is None:
        best = min(ways, key=lambda steps: price(steps, on))
    else:
        best = cheapest_within(max_extra_bytes, ways, on, f"from: {src}   to: {dst}   global_shape: {shape}")
    steps = tuple(with_kept(best))
    for step in steps:  # the cached plan is shared by all callers
        step.recv_bytes.setflags(write=False)
    return Plan(src, dst, shape, dtype, on, ranks, steps, transition.before.held, transition.after.held)


def _check(src: Layout, dst: Layout, global_shape: object, dtype: object, max_extra_bytes: object) -> Transition:
    asked = "cannot plan a redistribution"
    transition = read(asked, src, dst, global_shape, dtype)
    if max_extra_bytes is not None:
        read_int(asked, "max_extra_bytes", max_extra_bytes, 0, "max_extra_bytes=2**28, or None")
    return transition


def _total(counts: Sequence[Counts], ranks: int) -> Counts:
    total = np.zeros(ranks, dtype=np.int64)
    for count in counts:
        total += count
    total.setflags(write=False)
    return total


# -- limited memory: exchanges cut into rounds until their buffers fit -------------------------------------------------


class TooTight(HyperParallelError, ValueError):
    """Error for a memory limit that no plan meets.

    Attributes:
        least: the smallest limit that some plan meets, in bytes.
    """

    def __init__(self, *parts: str, least: int = 0) -> None:
        super().__init__(*parts)
        self.least = least


def cheapest_within(limit: int, ways: Sequence[Sequence[Step]], on: Machine | None, seen: str) -> list[Step]:
    """Return the cheapest candidate within a memory limit, its exchanges cut into as many rounds as necessary.

    Args:
        limit: limit of bytes per rank beyond its source and result parts.
        ways: the candidates.
        on: the machine; None: price by bytes alone.
        seen: the line of the error message that shows the request.

    Raises:
        ValueError: no candidate does; the message has the smallest limit that one meets.
    """
    best: list[Step] | None = None
    least = []
    for steps in sorted(ways, key=lambda way: price(way, on)):
        if best is not None and price(best, on) <= price(steps, on):  # cutting into rounds never lowers a price
            break
        fitted = [_fit(step, limit, on) for step in with_kept(steps)]
        most = max((step.peak_extra_bytes for step in fitted), default=0)
        least.append(most)
        if most <= limit and (best is None or price(fitted, on) < price(best, on)):
            best = fitted
    if best is None:
        asked = f"cannot redistribute within max_extra_bytes={limit}"
        blame = "even in the smallest rounds, every plan takes more"
        raise TooTight(asked, blame, seen, f"max_extra_bytes={min(least)}", least=min(least))
    return best


def _fit(step: Step, limit: int, on: Machine | None) -> Step:
    """Cut the step into the fewest rounds that keep it within a limit; if none do, into those with the least memory."""
    if step.peak_extra_bytes <= limit or not step.communicates or step.kind == "all_reduce":
        return step
    held = step.after.holding
    most = max(int(extent(held, dim).max(initial=1)) for dim in range(len(held.shape)))  # every piece is then one row
    finest = _cut(step, most, on)
    if finest.peak_extra_bytes > limit:
        return min(step, finest, key=lambda cut: cut.peak_extra_bytes)
    received = int(step.recv_bytes.max(initial=0))
    for rounds in _numbers(most):
        if rounds * limit >= received:
            cut = _cut(step, rounds, on)
            if cut.peak_extra_bytes <= limit:
                return cut
    return finest


def _cut(step: Step, rounds: int, on: Machine | None) -> Step:
    """Cut the step into rounds. Each round adds a latency; together they move the same bytes.

    Rounds run as exchanges, which pack their pieces and cross nodes from rank to rank, without the help of a ring.
    """
    load = step.load
    assert load is not None, "only what communicates is cut"
    load = load._replace(copied=max(load.copied, int(step.recv_bytes.max()) + step.sent_most))
    once = max(step.seconds, cost.seconds("all_to_all", load, on))
    return replace(step, rounds=rounds, seconds=once + (rounds - 1) * cost.latency("all_to_all", load, on))


def _numbers(most: int) -> Iterator[int]:
    """Yield the numbers of rounds to try.

    >>> list(_numbers(30))
    [2, 3, 4, 6, 8, 12, 16, 24]
    """
    rounds = 2
    while rounds < most:
        yield rounds
        rounds = rounds * 3 // 2 if rounds & (rounds - 1) == 0 else rounds * 4 // 3
