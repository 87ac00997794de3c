"""A redistribution drawn as text for people: both layouts in words, our steps, the steps of torch, and their costs."""

from __future__ import annotations

import functools
import io
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.checks import check, check_shape
from hyper_parallel.core.dtensor import ownership
from hyper_parallel.core.dtensor.convert import to_placements
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement, Shard
from hyper_parallel.core.redistribute import cost
from hyper_parallel.core.redistribute.bounds import lower_bound
from hyper_parallel.core.redistribute.cost import BYTES_ONLY, Topology
from hyper_parallel.core.redistribute.plan import Plan

__all__ = ["TorchPlan", "TorchStep", "torch_plan"]

NO_PLANNER = "this torch has no planner to ask"
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

Bytes = npt.NDArray[np.int64]
_Move = tuple[int, Placement, Placement]
"""The axis, and what it does to the tensor before and after."""


# -- the plan of torch -------------------------------------------------------------------------------------------------
# Nothing here is used by our own plans. torch's planner is private and moves between versions: a version whose planner
# cannot be asked gives a plan that says so, and no steps.


@dataclass(frozen=True, eq=False)
class TorchStep:
    """One of torch's steps, over one axis.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all"; "slice" and "copy" communicate nothing.
        axis: the axis it runs over.
        group_size: ranks along that axis.
        recv_bytes: bytes that each rank receives, in mesh position order.
        peak_extra_bytes: an estimate of the most that a rank holds meanwhile besides the plan's source and result.
        seconds: its time on the topology, what torch copies within a rank included.
    """

    kind: str
    axis: str
    group_size: int
    recv_bytes: Bytes
    peak_extra_bytes: int
    seconds: float

    @property
    def axes(self) -> tuple[str, ...]:
        """The axis, as in the steps of our own plans."""
        return (self.axis,)

    @property
    def send_bytes(self) -> Bytes:
        """Bytes that each rank sends: as many as it receives, as all pieces of a group are padded to one size."""
        return self.recv_bytes


@dataclass(frozen=True, eq=False)
class TorchPlan:
    """The steps that torch takes from one layout to another, or why it takes none.

    Attributes:
        ranks: the ranks of the mesh, in mesh position order.
        steps: in order; axes of one rank need none.
        refused: why torch refuses, None if it does not.
    """

    ranks: tuple[int, ...]
    steps: tuple[TorchStep, ...] = ()
    refused: str | None = None

    @property
    def recv_bytes(self) -> Bytes:
        """Bytes that each rank receives, in mesh position order; 0 everywhere if torch refuses."""
        return sum((step.recv_bytes for step in self.steps), np.zeros(len(self.ranks), dtype=np.int64))

    @property
    def send_bytes(self) -> Bytes:
        """Bytes that each rank sends: as many as it receives."""
        return self.recv_bytes

    @property
    def num_collectives(self) -> int:
        """Steps that communicate."""
        return sum(step.kind in COLLECTIVES for step in self.steps)

    @property
    def peak_extra_bytes(self) -> int:
        """An estimate of the most that a rank holds at any time besides its part of the source and of the result."""
        return max((step.peak_extra_bytes for step in self.steps), default=0)

    @property
    def seconds(self) -> float:
        """The modelled time on the topology."""
        return sum(step.seconds for step in self.steps)


def torch_plan(
    src: Layout,
    dst: Layout,
    global_shape: Sequence[int],
    dtype: torch.dtype,
    topology: Topology | None = None,
    *,
    device_type: str = "cuda",
) -> TorchPlan:
    """Return what torch's `DTensor.redistribute` would do; no process group is needed and nothing is communicated.

    >>> mesh = Layout((2, 4), ("dp", "tp"))
    >>> plan = torch_plan(mesh("tp", "None"), mesh("None", ("dp", "tp")), (16, 16), torch.float32)
    >>> [(step.kind, step.axis, int(step.recv_bytes.max())) for step in plan.steps]
    [('all_gather', 'tp', 768), ('slice', 'dp', 0), ('slice', 'tp', 0)]
    >>> torch_plan(mesh(), mesh(partial={"tp": "sum"}), (16, 16), torch.float32).refused
    "torch does not redistribute to Partial: sum over 'tp' would be new"

    Bytes are those of direct exchange, padding included: torch pads the parts of an uneven dim to the largest one. The
    plan is that of a mesh whose axes the user has not flattened. Ordered splits are planned by torch's min-cost
    planner, which looks at how many devices the host has: there the answer can differ from one machine to another.

    Args:
        src: where the tensor is.
        dst: where it should be.
        global_shape: the whole tensor's sizes, in elements.
        dtype: the tensor's.
        topology: what the steps are priced on; None: bytes only.
        device_type: on "cpu" torch gathers and chunks where it otherwise exchanges.

    Raises:
        TypeError: a size that is no int, or another argument of another kind.
        ValueError: a layout without an assignment, or that a tensor of this shape cannot have.
    """
    asked = "cannot plan as torch does"
    check(asked, Layout, src=src, dst=dst)
    check(asked, "dtype", dtype=dtype)
    if topology is not None:
        check(asked, Topology, topology=topology)
    check(asked, "str", device_type=device_type)
    shape = check_shape(global_shape, f"src: {src}   dst: {dst}")
    splits = src.splits(len(shape))
    dst.splits(len(shape))
    refused = _refusal(src, dst)
    if refused is not None:
        return TorchPlan(src.rank_list, refused=refused)
    try:
        before, after = _placements(src, shape), _placements(dst, shape)
    except ValueError as error:  # a split that a layout can say and placements cannot
        return TorchPlan(src.rank_list, refused=str(error).splitlines()[0])
    moves = _ask(src.mesh_shape, before, after, shape, dtype, device_type)
    if isinstance(moves, str):
        return TorchPlan(src.rank_list, refused=moves)
    counter = _Counter(src, shape, dtype.itemsize, topology or BYTES_ONLY, device_type == "cpu")
    return TorchPlan(src.rank_list, tuple(counter.steps(splits, moves)))


def _refusal(src: Layout, dst: Layout) -> str | None:
    """Return why torch's public `redistribute` refuses before it plans."""
    if (src.mesh_shape, src.alias_name, src.rank_list) != (dst.mesh_shape, dst.alias_name, dst.rank_list):
        return "torch does not redistribute from one mesh to another"
    kinds = list(dict.fromkeys(src.partial.values()))
    if len(kinds) > 1 and not {"sum", "avg"}.issuperset(kinds):
        return f"torch does not mix kinds of Partial: {' and '.join(kinds)}"
    for name, reduction in dst.partial.items():
        if src.partial.get(name) != reduction and not (reduction == "sum" and _is_plain_split(src, name)):
            return f"torch does not redistribute to Partial: {reduction} over {name!r} would be new"
    return None


def _is_plain_split(src: Layout, name: str) -> bool:
    """Return whether an axis splits a dim in a way that this torch can turn into a pending sum."""
    placements = src.placements
    assert placements is not None, "a layout with splits has placements"
    return isinstance(placements[src.alias_name.index(name)], Shard) and hasattr(Shard, "_to_partial_tensor")


def _placements(layout: Layout, shape: tuple[int, ...]) -> tuple[Placement, ...]:
    """Return torch's placements, with a mix of pending sums and averages too, which torch allows in a source."""
    to_placements(layout.reset_partial(), shape)  # raises for what torch cannot say
    placements = layout.placement_to_tensor_map(len(shape)).placements
    assert placements is not None, "a layout with a tensor map has placements"
    return placements


# -- asking torch ------------------------------------------------------------------------------------------------------


def _ask(
    sizes: tuple[int, ...],
    before: tuple[Placement, ...],
    after: tuple[Placement, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device_type: str,
) -> tuple[_Move, ...] | str:
    """Return torch's moves, or why there are none."""
    if before == after:
        return ()
    try:
        from torch.distributed.tensor import _redistribute
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        mesh = _planning_mesh(sizes, device_type)
        meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype)
        now, then = DTensorSpec(mesh, before, tensor_meta=meta), DTensorSpec(mesh, after, tensor_meta=meta)
        try:
            # Keywords, so that another signature is noticed.
            infos: Any = _redistribute._gen_transform_infos_non_cached(src_spec=now, dst_spec=then)
            return tuple((info.mesh_dim, *info.src_dst_placements) for info in infos)
        finally:
            _forget(_redistribute, mesh, meta)
    except (ImportError, AttributeError, TypeError):
        return NO_PLANNER
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        return f"torch's planner fails: {type(error).__name__}: {error}"


@functools.lru_cache(maxsize=64)
def _planning_mesh(sizes: tuple[int, ...], device_type: str) -> DeviceMesh:
    """Return a mesh without process groups, seen from its first rank; no user's mesh has its axis names."""
    known = device_type if hasattr(torch, device_type) else "cuda"  # the planner counts that device on the host
    ranks = torch.arange(int(np.prod(sizes)), device="cpu").reshape(sizes)
    names = tuple(f"_planned_{axis}" for axis in range(len(sizes)))
    return DeviceMesh(known, ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


def _forget(module: Any, mesh: DeviceMesh, meta: Any) -> None:
    """Take our planner out of torch's process-wide cache: planners remember what they were asked before."""
    cache = getattr(module, "_planner_cache", None)
    if isinstance(cache, dict):
        cache.pop((weakref.ref(mesh), meta), None)


# -- counting ----------------------------------------------------------------------------------------------------------


class _Load(NamedTuple):
    """What one move makes of a tensor; per rank, in elements.

    Attributes:
        kind: the kind of step.
        received: what a rank receives; of an all_reduce, what is reduced.
        buffers: what it holds meanwhile besides input and output.
        copied: what it copies in its own memory.
    """

    kind: str
    received: Bytes
    buffers: Bytes
    copied: Bytes


@dataclass(frozen=True)
class _Counter:
    """Follows the parts of all ranks from move to move."""

    mesh: Layout
    shape: tuple[int, ...]
    itemsize: int
    topology: Topology
    on_cpu: bool

    def steps(self, splits: ownership.Splits, moves: Sequence[_Move]) -> Iterator[TorchStep]:
        """Yield the step of every move; axes of one rank are passed over, as torch does."""
        now = [list(axes) for axes in splits]
        real = [move for move in moves if self.mesh.mesh_shape[move[0]] > 1]
        for index, (axis, before, after) in enumerate(real):
            held = self._held(now) if index > 0 else None
            for axes in now:
                if axis in axes:
                    axes.remove(axis)
            # Without the axis: what its ranks hold together, which is what torch pads and cuts.
            load = _load(self._held(now), self.mesh.mesh_shape[axis], before, after, on_cpu=self.on_cpu)
            if (dim := _dim(after)) is not None:
                now[dim].append(axis)
            extra = load.buffers
            extra = extra if held is None else extra + held.prod(axis=1)  # the result of the move before
            extra = extra if index == len(real) - 1 else extra + self._held(now).prod(axis=1)
            yield self._step(axis, load, extra)

    def _held(self, splits: Sequence[Sequence[int]]) -> Bytes:
        """Return the sizes of every rank's part, as an array of ranks x dims."""
        parts = ownership.all_slices(self.shape, self.mesh.mesh_shape, tuple(map(tuple, splits)))
        return (parts[..., 1] - parts[..., 0]).reshape(len(parts), len(self.shape))

    def _step(self, axis: int, load: _Load, extra: Bytes) -> TorchStep:
        size = self.mesh.mesh_shape[axis]
        received = load.received * self.itemsize
        if load.kind == "all_reduce":  # a reduce_scatter into parts as equal as can be, and an all_gather of them
            place = np.indices(self.mesh.mesh_shape)[axis].ravel()
            own = received * (place + 1) // size - received * place // size
            received = received + (size - 2) * own
        received.setflags(write=False)
        moved, intra_node = int(received.max()), self._ranks_per_node(axis)
        inter_node = moved * (size - intra_node) // (size - 1)
        group = size if load.kind in COLLECTIVES else 1
        priced = cost.Load(group, min(intra_node, group), moved, inter_node, int(load.copied.max()) * self.itemsize)
        seconds = cost.seconds(load.kind, priced, self.topology)
        peak = int(extra.max()) * self.itemsize
        return TorchStep(load.kind, self.mesh.alias_name[axis], size, received, peak, seconds)

    def _ranks_per_node(self, axis: int) -> int:
        """Return how many ranks along an axis share a node, at least."""
        size, per_node = self.mesh.mesh_shape[axis], self.topology.ranks_per_node
        if per_node is None:
            return size
        nodes = np.array(self.mesh.rank_list).reshape(self.mesh.mesh_shape) // per_node
        rows = np.sort(np.moveaxis(nodes, axis, -1).reshape(-1, size), axis=1)
        return math.ceil(size / int((np.diff(rows, axis=1) != 0).sum(axis=1).max() + 1))


def _load(whole: Bytes, size: int, before: Placement, after: Placement, *, on_cpu: bool) -> _Load:
    """Return what a move over `size` ranks takes, given what they hold together.

    Args:
        whole: per rank, the sizes of what its group holds, as an array of ranks x dims.
        size: ranks in each group.
        before: what the axis does to the tensor.
        after: what it does next.
        on_cpu: whether an exchange is a gather.
    """
    old, new = _dim(before), _dim(after)
    total, nothing = whole.prod(axis=1), np.zeros(len(whole), dtype=np.int64)
    if before.is_partial() and after.is_replicate():
        return _Load("all_reduce", total, nothing, total)
    if old is not None and new is not None:
        block = _piece(whole, size, old, new)
        if on_cpu:
            return _Load("all_gather", (size - 1) * size * block, size * size * block, size * size * block)
        return _Load("all_to_all", (size - 1) * block, 2 * size * block, 2 * size * block)
    dim = old if old is not None else new
    if dim is None or before.is_replicate():
        result = total if dim is None else _piece(whole, size, dim)
        return _Load("copy" if dim is None else "slice", nothing, nothing, result)
    if after.is_partial():
        return _Load("copy", nothing, nothing, total)
    piece = _piece(whole, size, dim)
    uneven = whole[:, dim] % size != 0
    packed = np.where(uneven | (dim != 0), size * piece, 0)  # torch communicates along dim 0, all pieces of one size
    if before.is_partial():
        return _Load("reduce_scatter", (size - 1) * piece, packed, packed)
    padded = np.where(uneven, piece, 0)
    return _Load("all_gather", (size - 1) * piece, packed + padded, packed + padded)


def _piece(whole: Bytes, size: int, *dims: int) -> Bytes:
    """Return per rank the elements of the largest piece when each of these dims is cut into `size`."""
    pieces = whole.copy()
    for dim in dims:
        pieces[:, dim] = -(-pieces[:, dim] // size)
    return pieces.prod(axis=1)


def _dim(placement: Placement) -> int | None:
    """Return the dim that a placement splits; torch's strided shard is not always a `Shard`."""
    return getattr(placement, "dim", None)


_LOCAL = ("slice", "copy")
_WIDTH = 200  # of the console that tables are drawn on: wide enough that no cell is ever folded
_RIGHT = ("ranks", "received per rank", "sent per rank", "extra memory", "time")


class Movement(Protocol):
    """What bytes, memory and time have in common for a step and for a whole plan, ours and torch's."""

    @property
    def recv_bytes(self) -> npt.NDArray[Any]: ...
    @property
    def send_bytes(self) -> npt.NDArray[Any]: ...
    @property
    def peak_extra_bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...


class StepLike(Movement, Protocol):
    """A step of our plan or of torch's."""

    @property
    def kind(self) -> str: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def group_size(self) -> int: ...


class Drawn(Movement, Protocol):
    """Our plan or torch's."""

    @property
    def steps(self) -> Sequence[StepLike]: ...
    @property
    def num_collectives(self) -> int: ...


def show(plan: Plan, *, device_type: str = "cuda", steps_only: bool = False) -> str:
    """Return a plan as text, with torch's plan for the same transition below it.

    >>> from hyper_parallel.core.redistribute.plan import plan
    >>> mesh = Layout((2, 2), ("dp", "tp"))
    >>> print(show(plan(mesh("tp", "None"), mesh(("dp", "tp"), "None"), (8, 8), torch.float32)).splitlines()[-1])
    received per rank on average: ours 32 B, torch 128 B, least possible 32 B; torch / ours: 4.00

    Times are shown if the plan was made for a topology that has latencies.

    Args:
        plan: what `plan` returned.
        device_type: what torch would run on; on "cpu" it gathers where it otherwise exchanges.
        steps_only: leave out everything but our steps.
    """
    timed = not plan.topology.counts_bytes_only
    ours = _draw(plan, timed=timed)
    if steps_only:
        return ours
    on = f", {_node(plan)}" if timed else ""
    theirs = torch_plan(
        plan.src, plan.dst, plan.global_shape, plan.dtype, plan.topology if timed else None, device_type=device_type
    )
    text = f"refuses: {theirs.refused}" if theirs.refused is not None else _draw(theirs, timed=timed)
    parts = [
        "\n".join(_layouts(plan)),
        f"hyper_parallel{on}\n{ours}",
        f"torch {torch.__version__}\n{text}",
        _comparison(plan, theirs, lower_bound(plan.src, plan.dst, plan.global_shape, plan.dtype)),
    ]
    return "\n\n".join(parts)


def readable(count: float) -> str:
    """Write a number of bytes for people.

    >>> readable(0), readable(1_023), readable(12_582_912), readable(1.5)
    ('0 B', '1023 B', '12.0 MiB', '1.5 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" or count != int(count) else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} TiB"


# -- tables ------------------------------------------------------------------------------------------------------------


def _draw(plan: Drawn, *, timed: bool) -> str:
    """Return a table of the steps, without blanks at the ends of lines."""
    if not plan.steps:
        return "nothing to do"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="none")
    for name in ("step", "kind", "axes", *_RIGHT[: len(_RIGHT) - (not timed)]):
        table.add_column(name, justify="right" if name in _RIGHT else "left", no_wrap=True)
    for number, step in enumerate(plan.steps, start=1):
        ranks = "-" if step.kind in _LOCAL else str(step.group_size)
        table.add_row(str(number), _kind(step), "+".join(step.axes) or "-", ranks, *_amounts(step, timed=timed))
    count = plan.num_collectives
    table.add_row("total", f"{count} collective{'' if count == 1 else 's'}", "", "", *_amounts(plan, timed=timed))
    out = io.StringIO()
    Console(file=out, width=_WIDTH, color_system=None, markup=False, highlight=False, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _kind(step: StepLike) -> str:
    rounds = getattr(step, "rounds", 1)
    return f"{step.kind} x{rounds}" if rounds > 1 else step.kind


def _amounts(moves: Movement, *, timed: bool) -> Iterator[str]:
    yield _spread(moves.recv_bytes)
    yield _spread(moves.send_bytes)
    yield readable(moves.peak_extra_bytes)
    if timed:
        yield f"{moves.seconds * 1e6:,.1f} us"


def _spread(counts: npt.NDArray[Any]) -> str:
    """Return the most that a rank moves and, if another moves less, the least."""
    most, least = counts.max(), counts.min()
    return readable(most) if most == least else f"{readable(most)} (min {readable(least)})"


# -- words -------------------------------------------------------------------------------------------------------------


def _layouts(plan: Plan) -> Iterator[str]:
    shape, size = plan.global_shape, math.prod(plan.global_shape) * plan.dtype.itemsize
    yield f"{str(plan.dtype).removeprefix('torch.')} tensor of {_shape(shape)}, {readable(size)}"
    for word, layout in (("from", plan.src), ("to", plan.dst)):
        yield f"{word:<4}  {layout}"
        yield f"      {'; '.join(_words(layout, len(shape)))}"
        ranks = layout.rank_list[:: len(layout.rank_list) - 1] if len(layout.rank_list) > 1 else layout.rank_list
        held = [(rank, layout.local_shape(shape, rank)) for rank in ranks]
        yield "      " + ", ".join(
            f"rank {rank} holds {_shape(local)} ({readable(math.prod(local) * plan.dtype.itemsize)})"
            for rank, local in held
        )


def _words(layout: Layout, ndim: int) -> Iterator[str]:
    """Say what a layout does to each dim, and how many ranks hold the same."""
    names = layout.alias_name
    for dim, axes in enumerate(layout.splits(ndim)):
        if axes:
            yield f"dim {dim} is split over {', then '.join(names[axis] for axis in axes)}"
    for name, kind in layout.partial.items():
        yield f"{'an' if kind == 'avg' else 'a'} {kind} over {name} is still to be taken"
    copies = layout.repeat_num()
    if copies == len(layout.rank_list):
        yield "every rank holds all of it"
    else:
        yield f"{copies} ranks hold each part" if copies > 1 else "no two ranks hold the same"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "no dims"


def _node(plan: Plan) -> str:
    on = plan.topology
    nodes = "one node" if on.ranks_per_node is None else f"{on.ranks_per_node} ranks per node"
    return f"times modelled for {on.name}, {nodes}"


def _comparison(plan: Plan, theirs: TorchPlan, least: npt.NDArray[Any]) -> str:
    """Return the last line: bytes received by ours, by torch, at least, and how many times ours torch receives."""
    counts = [plan.recv_bytes, least] if theirs.refused is not None else [plan.recv_bytes, theirs.recv_bytes, least]
    alike = all(count.min() == count.max() for count in counts)
    ours, theirs_mean, bound = float(plan.recv_bytes.mean()), float(theirs.recv_bytes.mean()), float(least.mean())
    if theirs.refused is not None:
        said, ratio = "torch refuses", "-"
    else:
        said = f"torch {readable(theirs_mean)}"
        ratio = f"{theirs_mean / ours:.2f}" if ours else "-" if not theirs_mean else "infinite"
    head = "received per rank" if alike else "received per rank on average"
    return f"{head}: ours {readable(ours)}, {said}, least possible {readable(bound)}; torch / ours: {ratio}"
