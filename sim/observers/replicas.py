"""Comparison of the copies of a tensor that its layout says are equal: every rank's is in this process.

The ranks of a mesh meet at a point of the program; whoever comes last looks at all local tensors and compares those
that differ in nothing but their place along the axes with `Replicate()`. No operation of `torch.distributed` takes
part: nothing enters the trace, and no virtual time passes. A rank that does not come is a deadlock like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hyper_parallel.core.common.checks import check_least
from sim.comm.endpoint import Endpoint
from sim.comm.group import Network, without_modes
from sim.explain.errors import ReplicaMismatch
from sim.explain.lines import user_line
from sim.kernel.context import current_context
from sim.kernel.waiting import Waitable
from sim.observers.copies import GRADIENT, Copy, disagreement, first_failure
from sim.observers.spread import Leaf, leaves, named, of_optimizer, spread_of, spread_of_group

__all__ = ["Meeting", "Replicas", "check_at_steps", "check_replicas", "check_when_made"]


class Meeting(Waitable):
    """One point at which the ranks of a mesh compare what they hold; ready once all have come.

    Attributes:
        ranks: Who has to come, sorted.
        brought: By rank that has come, what it holds, by name.
        lines: By rank that has come, the user's line.
    """

    __slots__ = ("brought", "lines", "number", "ranks")

    def __init__(self, ranks: tuple[int, ...], number: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.number = number
        self.brought: dict[int, dict[str, Copy]] = {}
        self.lines: dict[int, str] = {}

    def describe(self) -> str:
        """Say what is being waited for."""
        return f"comparison #{self.number} of replicas"

    @property
    def is_full(self) -> bool:
        """Whether all ranks have come."""
        return len(self.brought) == len(self.ranks)

    def missing(self) -> list[int]:
        """Name the ranks that have not come."""
        return [rank for rank in self.ranks if rank not in self.brought]

    def line_of(self, rank: int) -> str:
        """Name the user's line in which `rank` has come."""
        return self.lines.get(rank, "")


class Replicas:
    """The meetings of a world that not all of their ranks have come to, and how many each rank has been to.

    Args:
        network: Of the world, which copies that differ end.
        by_itself: Whether copies are compared at each optimizer step, too, and wherever a DTensor is made.
    """

    def __init__(self, network: Network, *, by_itself: bool) -> None:
        self.network = network
        self.by_itself = by_itself
        self._open: dict[tuple[tuple[int, ...], int], Meeting] = {}
        self._been: dict[tuple[tuple[int, ...], int], int] = {}

    def join(self, ranks: tuple[int, ...], rank: int, copies: dict[str, Copy], line: str) -> Meeting:
        """Enter what `rank` holds into its next meeting with `ranks`."""
        number = self._been.get((ranks, rank), 0)
        self._been[ranks, rank] = number + 1
        meeting = self._open.setdefault((ranks, number), Meeting(ranks, number))
        meeting.brought[rank] = copies
        meeting.lines[rank] = line
        if meeting.is_full:
            del self._open[ranks, number]
        return meeting

    def clear(self) -> None:
        """Forget all: a run has ended."""
        self._open.clear()
        self._been.clear()


def check_replicas(
    *things: Any,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """Compare the copies that ranks hold of the same data; call it at the same point on every rank.

    Along axes with `Replicate()` the local tensors of a DTensor have to be equal, bit for bit unless a tolerance is
    given (NaN equals NaN). Outside of a simulated world it does nothing.

    >>> import sim
    >>> from torch.distributed.tensor import Replicate, init_device_mesh
    >>> def body() -> None:
    ...     mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     x = DTensor.from_local(torch.tensor([1.0, float(dist.get_rank())]), mesh, [Replicate()])
    ...     check_replicas({"x": x})
    >>> try:
    ...     sim.run(body, world_size=2)
    ... except sim.ReplicaMismatch as error:
    ...     print(str(error).splitlines()[0])
    the copies of 'x' along axis 'tp' differ

    Args:
        things: DTensors; modules (parameters, buffers and gradients) and optimizers (parameters and gradients); and
            lists, tuples and mappings of these. What a `DistributedDataParallel` reduces is compared over its own
            process group; its buffers, which only its next forward pass makes equal, are not.
        group: Process group or mesh all of whose ranks hold equal copies of each plain tensor. None: plain tensors
            are refused, and so are modules and optimizers with nothing but plain tensors; next to DTensors, or next
            to a `DistributedDataParallel`, those of a module or an optimizer are passed over.
        rtol: Largest difference allowed, relative to the most frequent copy's value.
        atol: Largest difference allowed, absolute.

    Communication: none that the trace or the clocks show; the ranks of each mesh wait for each other.

    Not compared: values that cannot be read (meta), and parts along axes with `Shard` or `Partial`.

    Raises:
        ReplicaMismatch: Copies differ, or the ranks do not agree on what they hold; the same on all ranks.
        Deadlock: A rank of the mesh does not come.
        TypeError: A thing that is none of these, or a plain tensor, module or optimizer without a group.
        ValueError: A negative tolerance.
    """
    context = current_context()
    if context is None:
        return
    check_least("cannot compare the copies", 0, rtol=rtol, atol=atol)
    spread = None if group is None else spread_of_group(context, group)
    _compare(context.replicas, context, named(list(leaves(context, things, spread))), (rtol, atol))


# -- the meeting ---------------------------------------------------------------------------------------------------


def _compare(
    replicas: Replicas,
    endpoint: Endpoint,
    tensors: Mapping[str, Leaf],
    tolerance: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Meet the ranks of every mesh that these tensors are on; plain ones count whose spread is known."""
    endpoint.check_caller()
    scheduler = endpoint.scheduler
    if scheduler.fatal is not None:
        raise scheduler.end_of_rank()
    together: dict[tuple[int, ...], dict[str, Copy]] = {}
    for name, (_, tensor, spread) in tensors.items():
        how = spread_of(tensor) if isinstance(tensor, DTensor) else spread
        if how is None or not any(how.replicated):
            continue
        local = _local(tensor)
        shape = tuple(tensor.shape)
        copy = Copy(local, shape, how.ranks, how.sizes, how.names, how.replicated, how.layout, tolerance)
        together.setdefault(tuple(sorted(how.ranks)), {})[name] = copy
    line = user_line()
    meetings = [replicas.join(ranks, endpoint.rank, copies, line) for ranks, copies in together.items()]
    for meeting in meetings:
        if meeting.is_full:
            _hold(replicas.network, meeting)
    for meeting in meetings:
        scheduler.block(meeting)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    wait = getattr(local, "wait", None)  # the result of a functional collective that nobody has waited for
    local = wait() if wait is not None else local
    # Of a device, as it is in the order of the rank's stream: who compares is on another rank's.
    return local if local.device.type in ("cpu", "meta") else local.detach().cpu()


def _hold(network: Network, meeting: Meeting) -> None:
    """Compare what all ranks have brought, on the thread of the one that came last."""
    found = disagreement(meeting.brought) or without_modes(lambda: first_failure(meeting.brought))
    if found is not None:
        error = ReplicaMismatch(found.text(meeting.lines, network.replay))
        network.scheduler.fail(error)
        raise error
    meeting.brought = {rank: {} for rank in meeting.ranks}  # the tensors are the ranks' own again
    network.scheduler.complete(meeting, 0.0)  # at no time at all: no clock moves


# -- chosen by the world ---------------------------------------------------------------------------------------------


def _own_thread() -> Any:
    """The calling rank's context, on the rank's own thread: a helper's steps may come in another order on each rank."""
    context = current_context()
    if context is None or not context.replicas.by_itself:
        return None
    running = context.scheduler.running
    own = running is not None and running.ident == threading.get_ident() and not running.name
    return context if own else None


def check_at_steps() -> Callable[[], None]:
    """Compare the parameters and gradients of every optimizer before each of its steps; returns how to undo that."""

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        context = _own_thread()
        if context is not None:
            _compare(context.replicas, context, named(list(of_optimizer(optimizer))))

    return register_optimizer_step_pre_hook(before_step).remove


def check_when_made(original: Callable[..., DTensor]) -> Callable[..., DTensor]:
    """`DTensor.from_local` that compares the copies it is given."""

    def from_local(*args: Any, **options: Any) -> DTensor:
        made = original(*args, **options)
        context = _own_thread()
        if context is not None:
            in_backward = torch._C._current_graph_task_id() != -1
            name = GRADIENT if in_backward else "the tensor given to from_local"
            _compare(context.replicas, context, {name: Leaf(name, made)})
        return made

    return from_local
