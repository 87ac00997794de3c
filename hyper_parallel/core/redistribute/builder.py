"""Steps between two holdings of one mesh: the collective, its axes, and its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from hyper_parallel.core.dtensor.ownership import split_points
from hyper_parallel.core.machine.description import Machine
from hyper_parallel.core.machine.links import NodeSpread
from hyper_parallel.core.redistribute import cost
from hyper_parallel.core.redistribute.holdings import Counts, Holding, Located, coordinate, edges
from hyper_parallel.core.redistribute.steps import Fill, Kind, Step
from hyper_parallel.core.redistribute.transition import MeshTransition


class Builder:
    """Builds the steps of one transition, and prices them on one machine.

    Args:
        task: the transition.
        on: the machine; None: price by bytes alone.
    """

    def __init__(self, task: MeshTransition, on: Machine | None) -> None:
        self.task = task
        self.on = on
        self.nodes = cost.Nodes(task.ranks, task.sizes, cost.ranks_per_node(on))

    # -- steps without communication -----------------------------------------------------------------------------------

    def local(self, before: Holding, after: Holding) -> list[Step]:
        """Slice each rank's part to the elements that it needs; no step if it needs all of them."""
        if _same(before, after):
            return []
        return [self._step("slice", (), before, after, _zeros(self.task), copied=after.counts())]

    def fill(self, before: Holding, after: Holding, fill: Fill) -> Step:
        """Turn each rank's part into pending copies, or rescale pending copies."""
        return self._step("copy", (), before, after, _zeros(self.task), copied=after.counts(), fill=fill)

    # -- reductions ----------------------------------------------------------------------------------------------------

    def all_reduce(self, held: Holding, axes: Sequence[int]) -> Step:
        """Reduce copies over some axes; every rank gets the result."""
        ways = self.task.ways(axes)
        total = held.counts() * self.task.itemsize
        place = self.nodes.place(axes)
        own = total * (place + 1) // ways - total * place // ways  # this rank's share after the reduce_scatter half
        moved = total + (ways - 2) * own
        return self._step("all_reduce", axes, held, held, moved, sent=moved, reduces=axes)

    def reduce_into(self, before: Holding, after: Holding, axes: Sequence[int]) -> Step:
        """Reduce copies over some axes; each rank along them keeps a disjoint part of the result."""
        ways = self.task.ways(axes)
        own = after.counts() * self.task.itemsize
        return self._step(
            "reduce_scatter", axes, before, after, (ways - 1) * own, sent=self.task.along(own, axes) - own,
            copied=before.counts(), reduces=axes,
        )  # fmt: skip

    # -- exchanges -----------------------------------------------------------------------------------------------------

    def exchange(
        self, before: Holding, after: Holding, axes: Sequence[int], *, replicas: Iterable[int] = (),
        reduces: Sequence[int] = (), inside: bool = False,
    ) -> Step | None:  # fmt: skip
        """Send each rank the elements that it needs and lacks; None if no rank lacks any.

        Args:
            before: elements held before the step.
            after: elements needed after it; each rank finds all of them along `axes`.
            axes: axes of the groups that exchange.
            replicas: the subset of `axes` along which ranks hold the same elements before.
            reduces: the subset of `axes` along which copies are reduced.
            inside: True if each rank needs all elements that it holds before; saves counting the overlap.
        """
        task = self.task
        copies = task.ways(reduces)
        need, have = after.counts(), before.counts()
        both = have if inside else before.overlaps(after)
        missing = copies * need - both
        if not missing.any():
            return None
        sent, exact = self._sent(before, after, axes, tuple(replicas), reduces, both)
        estimate = missing if sent is None else sent
        kind: Kind = "reduce_scatter" if reduces else "all_to_all"
        if not reduces and task.ways(replicas) == 1 and (task.along(have, axes) == need).all():
            kind = "all_gather"
        inter_node = self._between_nodes(before, after, axes, replicas, reduces, missing, both)
        known = sent * task.itemsize if exact and sent is not None else None
        copied = missing + estimate
        if kind == "all_gather" and before.even:
            copied = np.zeros_like(need) if _gathers_rows(task, before, axes) else need
        return self._step(
            kind, axes, before, after, missing * task.itemsize, sent=known, estimate=estimate, copied=copied,
            inter_node=inter_node, reduces=reduces,
        )  # fmt: skip

    def permute(self, before: Holding, after: Holding, axes: Sequence[int], replicas: Sequence[int]) -> Step | None:
        """Move complete parts, at most one to and from each rank; None if single parts do not suffice.

        Both holdings are plain. Ranks that lack a part are matched, in order, with ranks that hold it.
        """
        task = self.task
        if after.counts().max() > before.counts().max():
            return None
        need_at, single = _blocks(before, after)
        if not single:
            return None
        have_at, _ = _blocks(before, before)
        lacking = (need_at != have_at) | (before.counts() == 0)
        lacking &= after.counts() > 0
        cosets = coordinate(task.sizes, [axis for axis in range(len(task.sizes)) if axis not in axes])
        place = cosets * (int(max(need_at.max(), have_at.max())) + 1)
        wanted, owned = (place + need_at)[lacking], (place + have_at)[before.counts() > 0]
        which, index = np.unique(np.concatenate([wanted, owned]), return_inverse=True)
        asked = np.bincount(index[: len(wanted)], minlength=len(which))
        if (asked > np.bincount(index[len(wanted) :], minlength=len(which))).any():
            return None
        missing = np.where(lacking, after.counts(), 0)
        received = missing * task.itemsize
        return self._step("permute", axes, before, after, received, estimate=missing, copied=missing)

    def _sent(
        self, before: Holding, after: Holding, axes: Sequence[int], replicas: Sequence[int], reduces: Sequence[int],
        both: Counts,
    ) -> tuple[Counts | None, bool]:  # fmt: skip
        """Return the elements that each rank sends, rounded up, and True if exact; None: enumeration is needed.

        If the target is not a plain layout, they are an upper bound.
        """
        task, owners = self.task, self.task.ways(replicas)
        if not after.plain:
            apart = {axis for dim in range(len(after.shape)) for axis in after.axes_of(dim)} | set(after.first)
            asked = before.counts() * task.ways(axis for axis in axes if axis not in apart)
            return -(-np.maximum(asked - both, 0) // owners), False
        wanted = task.wanted_axes if after == task.result else frozenset(a for chain in after.splits for a in chain)
        copies = task.ways(axis for axis in axes if axis not in wanted)
        if not before.plain:
            return (None, False) if reduces else (-(-(before.counts() * copies - both) // owners), owners == 1)
        asked = before.restricted(after.splits, [axis for axis in wanted if axis not in axes]).counts() * copies
        apart = {axis for axis in wanted if axis not in replicas}
        same = task.ways(axis for axis in replicas if axis not in wanted)
        own = before.restricted(after.splits, sorted(apart)).counts() * same
        return -(-(asked - own) // owners), owners == 1

    def _between_nodes(
        self, before: Holding, after: Holding, axes: Sequence[int], replicas: Iterable[int], reduces: Sequence[int],
        missing: Counts, both: Counts,
    ) -> Counts | None:  # fmt: skip
        """Return elements received from other nodes per rank; None if no axes span exactly the ranks of a node."""
        task, group, intra_node = self.task, self.nodes.spread(axes), self.nodes.intra_node_axes(axes)
        if group.nodes == 1 or not before.plain or task.ways(intra_node) != group.most:
            return None
        outer = [axis for axis in axes if axis not in intra_node]
        node = Holding(task.sizes, task.shape, ((),) * len(task.shape)).restricted(before.splits, outer)
        at_hand = after.overlaps(node) * task.ways(axis for axis in reduces if axis in intra_node)
        spread = task.ways(axis for axis in replicas if axis in outer)
        return np.maximum(missing - (at_hand - both) // spread, 0)

    # -- the step itself -----------------------------------------------------------------------------------------------

    def _step(
        self, kind: Kind, axes: Sequence[int], before: Holding, after: Holding, received: Counts, *,
        sent: Counts | None = None, estimate: Counts | None = None, copied: Counts | None = None,
        inter_node: Counts | None = None, reduces: Sequence[int] = (), fill: Fill | None = None,
    ) -> Step:  # fmt: skip
        """Make a step and price it.

        Args:
            received, sent: bytes per rank.
            estimate: elements that each rank sends, if only enumeration would give the exact number.
            copied, inter_node: elements per rank; `inter_node` None: an even exchange's share crosses nodes.
        """
        task, size = self.task, self.task.itemsize
        chosen = tuple(sorted(axes))
        priced = kind if _is_ring(kind, before, after, axes, reduces) else "all_to_all"
        given = max(_most(sent), _most(estimate) * size)
        moved = max(_most(received), given)
        spread = self.nodes.spread(chosen)
        if kind == "permute":
            spread = NodeSpread(2, 1, 2) if spread.nodes == 1 else NodeSpread(2, 2, 1)
        crossing = None
        if inter_node is not None:
            crossing = min(_most(inter_node) * size, moved)
            if after.plain:  # sent bytes cross nodes in the same proportion as received bytes
                everything = int(np.broadcast_to(received, task.sizes).sum())
                between = int(np.broadcast_to(inter_node, task.sizes).sum()) * size
                crossing = max(crossing, given * min(between, everything) // everything)
        load = cost.Load.of(spread, moved, _most(copied) * size, crossing)
        if sent is None and not chosen:
            sent = received
        return Step(
            kind=kind,
            axes=tuple(dict.fromkeys(task.names[axis] for axis in chosen)),
            group_size=task.ways(chosen),
            recv_bytes=_flat(received, task),
            seconds=cost.seconds(priced, load, self.on),
            before=Located(before, task.ranks),
            after=Located(after, task.ranks),
            itemsize=size,
            ranks=task.ranks,
            group_axes=chosen,
            reduces=tuple(sorted(reduces)),
            reduction=task.reduction if reduces else None,
            fill=fill,
            known_send_bytes=None if sent is None else _flat(sent, task),
            estimated_send_bytes=None if estimate is None else _flat(estimate * size, task),
            load=load if chosen else None,
        )


def _most(counts: Counts | None) -> int:
    return 0 if counts is None else int(counts.max())


def _flat(counts: Counts, task: MeshTransition) -> Counts:
    full = np.ascontiguousarray(np.broadcast_to(counts, task.sizes)).reshape(-1)
    full.flags.writeable = False
    return full


def _zeros(task: MeshTransition) -> Counts:
    return np.zeros((1,) * len(task.sizes), dtype=np.int64)


def _is_ring(
    kind: Kind, before: Holding, after: Holding, axes: Sequence[int], reduces: Sequence[int]
) -> bool:  # fmt: skip
    """Return True if the backend's collective of that name can run the step; otherwise it runs as an exchange.

    Collectives take parts of equal size only, e.g. not the parts of 7 rows over 2 ranks.
    """
    if kind == "reduce_scatter":
        return after.even and set(axes) == set(reduces)
    return before.even if kind == "all_gather" else True


def _gathers_rows(task: MeshTransition, before: Holding, axes: Sequence[int]) -> bool:
    """Return True if gathered parts, in rank order, are already the rows of the result in order."""
    outer = next((dim for dim, size in enumerate(task.shape) if size > 1), 0)
    chain = before.splits[outer]
    return isinstance(task.ranks, range) and before.share is None and chain[-len(axes) :] == tuple(sorted(axes))


def _same(left: Holding, right: Holding) -> bool:
    """Return True if every rank holds the same elements in both."""
    if left == right:
        return True
    both = left.overlaps(right)
    return bool((both == left.counts()).all() and (both == right.counts()).all())


@lru_cache(maxsize=256)
def _blocks(blocks: Holding, held: Holding) -> tuple[Counts, bool]:
    """Return, for each rank, the index of the block of `blocks` that contains its block of `held`.

    Also return True if a single block always contains it. The index of a rank without elements is meaningless.
    """
    number, single = np.zeros((1,) * len(held.sizes), dtype=np.int64), True
    some = held.counts() > 0
    for dim, chain in enumerate(blocks.splits):
        if not chain:
            continue
        begin, end = split_points(held.shape[dim], held.sizes, chain)
        bounds = begin[end > begin]  # sorted
        start, stop = edges(held.shape[dim], held.sizes, held.splits[dim])
        first = np.searchsorted(bounds, start, side="right")
        last = np.searchsorted(bounds, stop - 1, side="right")
        single = single and not ((first != last) & some).any()
        number = number * (len(bounds) + 1) + first
    return np.broadcast_to(number, held.sizes), single
