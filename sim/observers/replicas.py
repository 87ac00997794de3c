"""Comparison of the copies of a tensor that its layout says are equal: every rank's is in this process.

The ranks of a mesh meet at a point of the program; whoever comes last looks at all local tensors and compares those
that differ in nothing but their place along the axes with `Replicate()`. No operation of `torch.distributed` takes
part: nothing enters the trace, and no virtual time passes. A rank that does not come is a deadlock like any other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hyper_parallel.core.common.checks import check_least
from hyper_parallel.core.common.torch_compat import flat_bytes
from hyper_parallel.core.dtensor.ownership import mesh_lines
from sim.comm.group import Endpoint, Network, without_modes
from sim.explain.errors import ReplicaMismatch, ranks_phrase, table
from sim.explain.lines import user_line
from sim.kernel.context import current_context
from sim.kernel.waiting import Waitable
from sim.observers.spread import Leaf, leaves, named, of_optimizer, spread_of, spread_of_group


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
    *things: Any, group: dist.ProcessGroup | DeviceMesh | None = None, rtol: float = 0.0, atol: float = 0.0
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
    replicas: Replicas, endpoint: Endpoint, tensors: Mapping[str, Leaf], tolerance: tuple[float, float] = (0.0, 0.0)
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
    """Note who steps, and, where a world asks for it, compare what an optimizer has; returns how to undo that."""

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        context = current_context()
        if context is not None:
            _note_step(context, optimizer)
        context = _own_thread()
        if context is not None:
            _compare(context.replicas, context, named(list(of_optimizer(optimizer))))

    return register_optimizer_step_pre_hook(before_step).remove


def _note_step(context: Any, optimizer: torch.optim.Optimizer) -> None:
    """Note that a rank steps parameters of which others have shards or copies; those with an owner are its own."""
    params = [param for group in optimizer.param_groups for param in group["params"] if isinstance(param, DTensor)]
    for param in {param.device_mesh: param for param in params}.values():
        how = spread_of(param)
        if how is not None and len(how.ranks) > 1:
            stepped = context.replicas.network.stepped.setdefault(tuple(sorted(how.ranks)), {})
            if context.rank not in stepped:
                stepped[context.rank] = user_line()


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


def check_when_split(name: str, weight: torch.Tensor, mesh: DeviceMesh | dist.ProcessGroup) -> None:
    """Compare a weight that is about to be split over a mesh or a group.

    E.g. each rank has drawn it from a seed of its own. Once it is split nobody can tell: each rank has another part, of
    another weight.
    """
    context = _own_thread()
    if context is not None:
        whole = weight._local_tensor if isinstance(weight, DTensor) else weight
        _compare(context.replicas, context, {name: Leaf(name, whole, spread_of_group(context, mesh))})


# -- which copies differ, and where ------------------------------------------------------------------------------------


class Copy(NamedTuple):
    """What one rank holds of a tensor.

    Attributes:
        local: Its part.
        shape: Of the full tensor.
        ranks: Of the mesh, in mesh order, last axis fastest.
        sizes: Ranks along each axis.
        names: Of the axes.
        replicated: Per axis, whether the ranks along it hold equal copies.
        layout: How a person would write that.
        tolerance: rtol and atol; zeros compare the bits.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    replicated: tuple[bool, ...]
    layout: str
    tolerance: tuple[float, float]


GRADIENT = "the gradient that to_local passes back"
"""The name of a DTensor that is made in a backward pass."""

Brought = Mapping[int, Mapping[str, Copy]]


class Failure(NamedTuple):
    """What was found: a first line, a row per rank, which ranks are in the minority, further lines, and a hint."""

    what: str
    rows: dict[int, tuple[str, ...]]
    minority: frozenset[int]
    seen: tuple[str, ...]
    hint: str

    def text(self, lines: Mapping[int, str], replay: str) -> str:
        """The message, with every rank's line of the program."""
        ranks = sorted(self.rows)
        rows = [(f"rank {rank}", *self.rows[rank], lines[rank]) for rank in ranks]
        marked = [place for place, rank in enumerate(ranks) if rank in self.minority]
        more = "".join(f"  {line}\n" for line in self.seen)
        return f"{self.what}\n{table(rows, marked=marked)}\n{more}  try: {self.hint}\n  replay: {replay}"


# -- what the ranks say they hold ------------------------------------------------------------------------------------


def disagreement(brought: Brought) -> Failure | None:
    """The first tensor that the ranks describe differently, if there is one."""
    ranks = sorted(brought)
    names = dict.fromkeys(name for rank in ranks for name in brought[rank])
    for name in names:
        said = {rank: _description(brought[rank].get(name)) for rank in ranks}
        classes: dict[tuple[str, ...], list[int]] = {}
        for rank in ranks:
            classes.setdefault(said[rank], []).append(rank)
        if len(classes) > 1:
            usual = max(classes.values(), key=len)
            return Failure(
                f"the ranks do not agree on what {name!r} is",
                said,
                frozenset(ranks) - frozenset(usual),
                (),
                "compare the same tensors, in the same layout, on every rank of the mesh",
            )
    return None


def _description(copy: Copy | None) -> tuple[str, ...]:
    if copy is None:
        return ("brings no such tensor", "")
    return (f"{_dtype(copy.local)} {list(copy.shape)}", copy.layout)


# -- what they hold --------------------------------------------------------------------------------------------------


def first_failure(brought: Brought) -> Failure | None:
    """The first tensor whose copies differ, with the names of the others."""
    differing: list[str] = []
    failure: Failure | None = None
    for name in brought[min(brought)]:
        copies = {rank: mine[name] for rank, mine in brought.items()}
        found = _failure_of(name, copies)
        if found is not None:
            differing.append(name)
            failure = failure or found
    if failure is None or len(differing) == 1:
        return failure
    others = ", ".join(map(repr, differing[1:4])) + (", ..." if len(differing) > 4 else "")
    count = f"{len(differing) - 1} more tensor{'s' if len(differing) > 2 else ''}"
    return failure._replace(seen=(*failure.seen, f"also: {count}: {others}"))


def _failure_of(name: str, copies: Mapping[int, Copy]) -> Failure | None:
    like = next(iter(copies.values()))
    for ranks in _equal_by_layout(like):
        locals_ = [copies[rank].local.detach() for rank in ranks]
        if any(local.is_meta or isinstance(local, FakeTensor) for local in locals_):
            continue  # they have no values
        classes = _classes(locals_, like.tolerance)
        if max(classes) > 0:
            return _failure(name, like, ranks, locals_, classes)
    return None


def _equal_by_layout(copy: Copy) -> list[list[int]]:
    """The sets of ranks that hold equal copies: they differ in their place along replicated axes only."""
    return _lines(copy, [axis for axis, equal in enumerate(copy.replicated) if equal])


def _lines(copy: Copy, axes: Sequence[int]) -> list[list[int]]:
    """The sets of ranks that differ in their place along some axes only."""
    return [[copy.ranks[position] for position in line] for line in mesh_lines(copy.sizes, axes).tolist()]


def _classes(locals_: Sequence[torch.Tensor], tolerance: tuple[float, float]) -> list[int]:
    """Number the different copies, the most frequent one 0 (of several, the one that comes first)."""
    found: list[torch.Tensor] = []
    numbers: list[int] = []
    for local in locals_:
        same = (i for i, other in enumerate(found) if not _differs(local, other, tolerance).any())
        number = next(same, len(found))
        if number == len(found):
            found.append(local)
        numbers.append(number)
    order = sorted(range(len(found)), key=lambda number: (-numbers.count(number), number))
    return [order.index(number) for number in numbers]


def _differs(a: torch.Tensor, b: torch.Tensor, tolerance: tuple[float, float]) -> torch.Tensor:
    """Which elements of `a` differ from those of `b`, flat."""
    if a.shape != b.shape:
        return torch.ones(max(a.numel(), b.numel(), 1), dtype=torch.bool)
    if not a.numel():
        return torch.zeros(0, dtype=torch.bool)
    a, b = (t.contiguous().view(-1) for t in (a, b))
    if any(tolerance):
        rtol, atol = tolerance
        wide = torch.complex128 if a.is_complex() else torch.float64
        return ~torch.isclose(a.to(wide), b.to(wide), rtol=rtol, atol=atol, equal_nan=True)
    bits = [flat_bytes(t).view(t.numel(), -1) for t in (a, b)]
    differ = (bits[0] != bits[1]).any(dim=1)
    if differ.any() and (a.is_floating_point() or a.is_complex()):
        wide = torch.complex128 if a.is_complex() else torch.float64
        differ &= ~(a.to(wide).isnan() & b.to(wide).isnan())
    return differ


def _failure(
    name: str, copy: Copy, ranks: list[int], locals_: Sequence[torch.Tensor], classes: Sequence[int]
) -> Failure:
    usual = locals_[classes.index(0)]
    odd = next(local for local, number in zip(locals_, classes, strict=True) if number)
    axes = _axes_to_blame(copy, dict(zip(ranks, classes, strict=True)))
    same_shape = all(local.shape == usual.shape for local in locals_)
    index = _first(_differs(odd, usual, copy.tolerance), usual) if same_shape else ()
    rows: dict[int, tuple[str, ...]] = {}
    for rank, local, number in zip(ranks, locals_, classes, strict=True):
        count = int(_differs(local, usual, copy.tolerance).sum()) if number and same_shape else 0
        much = f"{count} of {local.numel()} elements differ" if count else ""
        rows[rank] = (_value(local[index]) if same_shape else str(list(local.shape)), much)
    where = f"the values at {list(index)} of" if same_shape else "the shapes of"
    kind = f"{_dtype(usual)} {list(usual.shape)}" if same_shape else _dtype(usual)
    named = " and ".join(repr(axis) for axis in axes)
    return Failure(
        f"the copies of {name!r} along {'axis' if len(axes) == 1 else 'axes'} {named} differ",
        rows,
        frozenset(rank for rank, number in zip(ranks, classes, strict=True) if number),
        (f"seen: {where} the local tensors, {kind}", f"layout: {copy.layout}"),
        _hint(name, named, ranks),
    )


def _hint(name: str, axes: str, ranks: Sequence[int]) -> str:
    if name.endswith(".grad") or name == GRADIENT:
        return (
            f"reduce the gradient over {axes} before it is used: all_reduce it, or say grad_placements=[Partial()] "
            "where to_local() took the local tensor"
        )
    return (
        f"give {ranks_phrase(ranks)} the same data (one seed, or a broadcast), or say Partial() for the parts of a sum "
        "and redistribute"
    )


def _axes_to_blame(copy: Copy, classes: Mapping[int, int]) -> list[str]:
    """The axes along which neighbours hold different copies."""
    return [
        name
        for axis, name in enumerate(copy.names)
        if copy.replicated[axis]
        and any(len({classes[rank] for rank in line if rank in classes}) > 1 for line in _lines(copy, [axis]))
    ]


def _first(differ: torch.Tensor, like: torch.Tensor) -> tuple[int, ...]:
    place = int(differ.nonzero()[0])
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(place), like.shape)) if like.dim() else ()


def _value(element: torch.Tensor) -> str:
    """Write a value so that no two of them look alike."""
    if element.is_floating_point() and element.dtype != torch.float64:
        text = f"{element.item():.9g}"  # enough to tell any two of float32 apart
        return text if set(text) & set(".en") else f"{text}.0"
    return str(element.item())


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
