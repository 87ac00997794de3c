"""Reference values for plans: lower bounds of received bytes, and the bytes and time of torch's own plan."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.common.checks import check, check_shape
from hyper_parallel.core.dtensor import ownership
from hyper_parallel.core.dtensor.convert import to_placements
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement, Shard
from hyper_parallel.core.machine.description import Machine, find_machine
from hyper_parallel.core.redistribute import cost
from hyper_parallel.core.redistribute.holdings import Counts
from hyper_parallel.core.redistribute.transition import LayoutSide, MeshTransition, Transition, on_one_mesh, read

NO_PLANNER = "this torch has no planner to ask"
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

Bytes = npt.NDArray[np.int64]
_Move = tuple[int, Placement, Placement]
"""The axis, and what it does to the tensor before and after."""


def lower_bound(src: Layout, dst: Layout, global_shape: Sequence[int], dtype: torch.dtype) -> npt.NDArray[Any]:
    """Return a lower bound of the bytes that each rank must receive to redistribute a tensor.

    >>> mesh = Layout((2, 2), ("dp", "tp"))
    >>> lower_bound(mesh("dp"), mesh("tp"), (8,), torch.float32).tolist()  # dp 0, tp 1 lacks elements 4 to 7
    [0, 16, 16, 0]

    Without pending reductions the bound is exact for every rank: the elements that it needs and does not hold. With
    n pending copies of an element that d ranks need, n - 1 transfers reduce it at one rank, and d more distribute it.
    One transfer fewer is enough if a rank that needs the element holds a copy of it. Then only the sum over all ranks
    is a bound, and each rank gets an equal share of it (a float). Receivers reduce; switches do not.

    Args:
        src: the current layout.
        dst: the target layout.
        global_shape: the full tensor's sizes, in elements.
        dtype: the tensor's dtype.

    Returns:
        Bytes per rank of the mesh; for two meshes, per rank of both, sorted.

    Raises:
        TypeError, ValueError: as `plan`.
    """
    transition = read("cannot bound a redistribution", src, dst, global_shape, dtype)
    task = on_one_mesh(transition)
    if task is None:
        return _between_meshes(transition)
    if not task.reduces:
        target = task.target
        both = target.overlaps(task.source)
        return ((target.counts() - both) * task.itemsize).ravel()
    total = _transfers(task) * task.itemsize
    ranks = len(task.ranks)
    return np.full(ranks, total / ranks)


def _transfers(task: MeshTransition) -> int:
    """Return the least number of element transfers over all ranks, if copies are reduced on the way."""
    copies = task.ways(task.reduces)
    elements = int(np.prod(task.shape)) * task.ways(task.keeps)
    replicas = [a for a in task.live if a not in task.wanted_axes and a not in task.opens]
    needed_by = task.ways(replicas)
    return elements * (copies - 1 + needed_by) - _met(task)


def _met(task: MeshTransition) -> int:
    """Count the elements of which a rank that needs them also holds a copy."""
    source, result = task.source, task.result
    both = source.overlaps(result)
    free = [a for a in task.live if a not in task.wanted_axes and a not in task.split_axes]
    return int(both.sum()) // task.ways(free)


def _between_meshes(transition: Transition) -> npt.NDArray[Any]:
    """Count on a coarse grid, whose cells lie between the edges of all parts of both layouts."""
    before, after, ranks = transition.before, transition.after, transition.ranks
    cells, sizes = _cells(before, after)
    copies = before.ways(before.pending)
    have, need = _held(before, cells), _held(after, cells)
    first = _first_only(after)
    if copies == 1:
        result = []
        for rank in ranks:
            wanted = need.get(rank) if rank in first else None
            mine = have.get(rank)
            if wanted is None:
                result.append(0)
            else:
                missing = wanted if mine is None else wanted & ~mine
                result.append(int(sizes[missing].sum()) * transition.itemsize)
        return np.array(result, dtype=np.int64)
    wanted_by = sum(need[rank].astype(np.int64) for rank in need if rank in first)
    met = sum((have[rank] & need[rank]).astype(np.int64) for rank in have if rank in need and rank in first)
    total = int((sizes * (copies - 1 + wanted_by - (np.asarray(met) > 0))).sum()) * transition.itemsize
    return np.full(len(ranks), total / len(ranks))


def _first_only(side: LayoutSide) -> set[int]:
    """Return the ranks at coordinate 0 of the pending axes; the others receive no data."""
    mesh = np.asarray(side.ranks).reshape(side.sizes)
    index = tuple(slice(0, 1) if axis in side.pending else slice(None) for axis in range(len(side.sizes)))
    return set(mesh[index].ravel().tolist())


def _cells(before: LayoutSide, after: LayoutSide) -> tuple[list[Counts], Counts]:
    """Return the first index of each cell per dim, and the number of elements of every cell."""
    starts, lengths = [], []
    slices = [_slices(side) for side in (before, after)]
    for dim, size in enumerate(before.shape):
        edges = np.unique(np.concatenate([part[:, dim].ravel() for part in slices] + [np.array([0, size])]))
        starts.append(edges[:-1] if len(edges) > 1 else np.zeros(0, dtype=np.int64))
        lengths.append(np.diff(edges))
    sizes = lengths[0]
    for more in lengths[1:]:
        sizes = np.multiply.outer(sizes, more)
    return starts, sizes


def _slices(side: LayoutSide) -> Counts:
    parts = [side.held.holding.part(at) for at in np.ndindex(*side.sizes)]
    return np.array([[pieces[0] if pieces else (0, 0) for pieces in part] for part in parts], dtype=np.int64)


def _held(side: LayoutSide, starts: list[Counts]) -> dict[int, npt.NDArray[np.bool_]]:
    held = {}
    for rank, part in zip(side.ranks, _slices(side), strict=True):
        mask = np.ones((), dtype=bool)
        for dim, (start, stop) in enumerate(part):
            mask = np.logical_and.outer(mask, (starts[dim] >= start) & (starts[dim] < stop))
        held[rank] = mask
    return held


# -- torch's plan ------------------------------------------------------------------------------------------------------
# Our own plans use none of this. torch's planner is private and changes between versions. For a version without a
# usable planner, `torch_plan` returns no steps and the reason in `refused`.


@dataclass(frozen=True, eq=False)
class TorchStep:
    """One of torch's steps, over one axis.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all"; "slice" and "copy" communicate nothing.
        axis: the axis of its groups.
        group_size: ranks along that axis.
        recv_bytes: bytes that each rank receives, in mesh position order.
        peak_extra_bytes: estimated peak bytes per rank beyond the plan's source and result.
        seconds: modelled time on the machine, local copies by torch included.
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
        """Bytes that each rank sends; equal to `recv_bytes`, because torch pads all pieces of a group to one size."""
        return self.recv_bytes


@dataclass(frozen=True, eq=False)
class TorchPlan:
    """Steps of torch from one layout to another, or the reason why torch refuses.

    Attributes:
        ranks: the ranks of the mesh, in mesh position order.
        steps: in order; axes of size 1 need none.
        refused: the reason why torch refuses; None if it plans.
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
        """Bytes that each rank sends; equal to `recv_bytes`."""
        return self.recv_bytes

    @property
    def num_collectives(self) -> int:
        """Number of steps that communicate."""
        return sum(step.kind in COLLECTIVES for step in self.steps)

    @property
    def peak_extra_bytes(self) -> int:
        """Estimated peak bytes per rank beyond its source and result."""
        return max((step.peak_extra_bytes for step in self.steps), default=0)

    @property
    def seconds(self) -> float:
        """Modelled seconds on the machine."""
        return sum(step.seconds for step in self.steps)


def torch_plan(
    src: Layout,
    dst: Layout,
    global_shape: Sequence[int],
    dtype: torch.dtype,
    machine: str | Machine | None = None,
    *,
    device_type: str = "cuda",
) -> TorchPlan:
    """Plan as torch's `DTensor.redistribute` does, without a process group and without communication.

    >>> mesh = Layout((2, 4), ("dp", "tp"))
    >>> plan = torch_plan(mesh("tp", "None"), mesh("None", ("dp", "tp")), (16, 16), torch.float32)
    >>> [(step.kind, step.axis, int(step.recv_bytes.max())) for step in plan.steps]
    [('all_gather', 'tp', 768), ('slice', 'dp', 0), ('slice', 'tp', 0)]
    >>> torch_plan(mesh(), mesh(partial={"tp": "sum"}), (16, 16), torch.float32).refused
    "torch does not redistribute to Partial: sum over 'tp' would be new"

    Bytes are for direct exchange and include padding, because torch pads the parts of an uneven dim to the largest.
    The mesh counts as one whose axes the user has not flattened. torch's min-cost planner plans ordered splits. It
    reads the number of devices of the host, so that its plan can differ between machines.

    Args:
        src: the current layout.
        dst: the target layout.
        global_shape: the full tensor's sizes, in elements.
        dtype: the tensor's dtype.
        machine: the machine that prices the steps, as a description, name or file; None: bytes only, seconds are 0.
        device_type: on "cpu" torch gathers and chunks where it otherwise exchanges.

    Raises:
        TypeError: a size that is no int, or another argument of the wrong type.
        ValueError: a layout without an assignment, or that a tensor of this shape cannot have; an unknown machine.
    """
    asked = "cannot plan as torch does"
    check(asked, "dtype", dtype=dtype)
    check(asked, "str", device_type=device_type)
    on = None if machine is None else find_machine(machine)
    shape = check_shape(global_shape)
    splits = src.splits(len(shape))
    dst.splits(len(shape))
    refused = _refusal(src, dst)
    if refused is not None:
        return TorchPlan(src.rank_list, refused=refused)
    try:
        before, after = _placements(src, shape), _placements(dst, shape)
    except ValueError as error:  # a split that placements cannot express
        return TorchPlan(src.rank_list, refused=str(error).splitlines()[0])
    moves = _ask(src.mesh_shape, before, after, shape, dtype, device_type)
    if isinstance(moves, str):
        return TorchPlan(src.rank_list, refused=moves)
    counter = _Counter(src, shape, dtype.itemsize, on, device_type == "cpu")
    return TorchPlan(src.rank_list, tuple(counter.steps(splits, moves)))


def _refusal(src: Layout, dst: Layout) -> str | None:
    """Return the reason why torch's public `redistribute` refuses before it plans, or None."""
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
    """Return True if an axis splits a dim in a way that this torch can turn into a pending sum."""
    placements = src.placements
    assert placements is not None, "a layout with splits has placements"
    return isinstance(placements[src.alias_name.index(name)], Shard) and hasattr(Shard, "_to_partial_tensor")


def _placements(layout: Layout, shape: tuple[int, ...]) -> tuple[Placement, ...]:
    """Return torch's placements; they may mix pending sums and averages, which torch allows in a source."""
    to_placements(layout.reset_partial(), shape)  # raises if placements cannot express the splits
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
    """Return torch's moves, or the reason why there are none."""
    if before == after:
        return ()
    try:
        from torch.distributed.tensor import _redistribute
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        mesh = _planning_mesh(sizes, device_type)
        meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype)
        now, then = DTensorSpec(mesh, before, tensor_meta=meta), DTensorSpec(mesh, after, tensor_meta=meta)
        try:
            # Keywords, so that a changed signature raises TypeError.
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
    """Return a mesh without process groups, seen from its first rank. Its axis names collide with no user's mesh."""
    known = device_type if hasattr(torch, device_type) else "cuda"  # the planner counts this type on the host
    ranks = torch.arange(int(np.prod(sizes)), device="cpu").reshape(sizes)
    names = tuple(f"_planned_{axis}" for axis in range(len(sizes)))
    return DeviceMesh(known, ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


def _forget(module: Any, mesh: DeviceMesh, meta: Any) -> None:
    """Remove our planner from torch's process-wide cache, because planners keep state of earlier calls."""
    cache = getattr(module, "_planner_cache", None)
    if isinstance(cache, dict):
        cache.pop((weakref.ref(mesh), meta), None)


# -- counting ----------------------------------------------------------------------------------------------------------


class _Load(NamedTuple):
    """Load of one move; per rank, in elements.

    Attributes:
        kind: the kind of step.
        received: elements that a rank receives; for an all_reduce, elements to reduce.
        buffers: elements in buffers besides input and output.
        copied: elements copied within a rank's memory.
    """

    kind: str
    received: Bytes
    buffers: Bytes
    copied: Bytes


@dataclass(frozen=True)
class _Counter:
    """Tracks the parts of all ranks from move to move, and counts bytes."""

    mesh: Layout
    shape: tuple[int, ...]
    itemsize: int
    machine: Machine | None
    on_cpu: bool

    def steps(self, splits: ownership.Splits, moves: Sequence[_Move]) -> Iterator[TorchStep]:
        """Yield the step of every move; axes of size 1 are skipped, as in torch."""
        now = [list(axes) for axes in splits]
        real = [move for move in moves if self.mesh.mesh_shape[move[0]] > 1]
        for index, (axis, before, after) in enumerate(real):
            held = self._held(now) if index > 0 else None
            for axes in now:
                if axis in axes:
                    axes.remove(axis)
            # Parts without the axis are the data of a whole group, which torch pads and cuts.
            load = _load(self._held(now), self.mesh.mesh_shape[axis], before, after, on_cpu=self.on_cpu)
            if (dim := _dim(after)) is not None:
                now[dim].append(axis)
            extra = load.buffers
            extra = extra if held is None else extra + held.prod(axis=1)  # the input, which the previous move made
            extra = extra if index == len(real) - 1 else extra + self._held(now).prod(axis=1)
            yield self._step(axis, load, extra)

    def _held(self, splits: Sequence[Sequence[int]]) -> Bytes:
        """Return the shape of every rank's part, as an array of ranks x dims."""
        parts = ownership.all_slices(self.shape, self.mesh.mesh_shape, tuple(map(tuple, splits)))
        return (parts[..., 1] - parts[..., 0]).reshape(len(parts), len(self.shape))

    def _step(self, axis: int, load: _Load, extra: Bytes) -> TorchStep:
        size = self.mesh.mesh_shape[axis]
        received = load.received * self.itemsize
        if load.kind == "all_reduce":  # modelled as a reduce_scatter into near-equal parts, then an all_gather
            place = np.indices(self.mesh.mesh_shape)[axis].ravel()
            own = received * (place + 1) // size - received * place // size
            received = received + (size - 2) * own
        received.setflags(write=False)
        nodes = cost.Nodes(self.mesh.rank_list, self.mesh.mesh_shape, cost.ranks_per_node(self.machine))
        spread = nodes.spread((axis,) if load.kind in COLLECTIVES else ())
        priced = cost.Load.of(spread, int(received.max()), int(load.copied.max()) * self.itemsize)
        seconds = cost.seconds(load.kind, priced, self.machine)
        peak = int(extra.max()) * self.itemsize
        return TorchStep(load.kind, self.mesh.alias_name[axis], size, received, peak, seconds)


def _load(group_sizes: Bytes, size: int, before: Placement, after: Placement, *, on_cpu: bool) -> _Load:
    """Count the elements that one move over `size` ranks receives, buffers and copies.

    Args:
        group_sizes: per rank, the shape of its group's joint part, as an array of ranks x dims.
        size: ranks in each group.
        before: placement along the axis before the move.
        after: placement along the axis after the move.
        on_cpu: True if torch gathers and chunks in place of an all_to_all.
    """
    old, new = _dim(before), _dim(after)
    total, nothing = group_sizes.prod(axis=1), np.zeros(len(group_sizes), dtype=np.int64)
    if before.is_partial() and after.is_replicate():
        return _Load("all_reduce", total, nothing, total)
    if old is not None and new is not None:
        block = _piece(group_sizes, size, old, new)
        if on_cpu:
            return _Load("all_gather", (size - 1) * size * block, size * size * block, size * size * block)
        return _Load("all_to_all", (size - 1) * block, 2 * size * block, 2 * size * block)
    dim = old if old is not None else new
    if dim is None or before.is_replicate():
        result = total if dim is None else _piece(group_sizes, size, dim)
        return _Load("copy" if dim is None else "slice", nothing, nothing, result)
    if after.is_partial():
        return _Load("copy", nothing, nothing, total)
    piece = _piece(group_sizes, size, dim)
    uneven = group_sizes[:, dim] % size != 0
    packed = np.where(uneven | (dim != 0), size * piece, 0)  # torch communicates along dim 0, in pieces of one size
    if before.is_partial():
        return _Load("reduce_scatter", (size - 1) * piece, packed, packed)
    padded = np.where(uneven, piece, 0)
    return _Load("all_gather", (size - 1) * piece, packed + padded, packed + padded)


def _piece(group_sizes: Bytes, size: int, *dims: int) -> Bytes:
    """Return, per rank, the elements of the largest piece if each of these dims is cut into `size` pieces."""
    pieces = group_sizes.copy()
    for dim in dims:
        pieces[:, dim] = -(-pieces[:, dim] // size)
    return pieces.prod(axis=1)


def _dim(placement: Placement) -> int | None:
    """Return the dim that a placement splits, by attribute, because torch's strided shard is not always a `Shard`."""
    return getattr(placement, "dim", None)
