"""The single steps between two holdings of one mesh: which collective, over which axes, how many bytes."""

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
    """Makes the steps of one transition, priced on one machine.

    Args:
        task: the transition.
        on: the machine; None: bytes count alone.
    """

    def __init__(self, task: MeshTransition, on: Machine | None) -> None:
        self.task = task
        self.on = on
        self.nodes = cost.Nodes(task.ranks, task.sizes, cost.ranks_per_node(on))

    # -- steps without communication -----------------------------------------------------------------------------------

    def local(self, before: Holding, after: Holding) -> list[Step]:
        """Keep of what a rank has what it needs; nothing when that is all of it."""
        if _same(before, after):
            return []
        return [self._step("slice", (), before, after, _zeros(self.task), copied=after.counts())]

    def fill(self, before: Holding, after: Holding, fill: Fill) -> Step:
        """Make pending copies of what each rank has, or rescale those there are."""
        return self._step("copy", (), before, after, _zeros(self.task), copied=after.counts(), fill=fill)

    # -- reductions ----------------------------------------------------------------------------------------------------

    def all_reduce(self, held: Holding, axes: Sequence[int]) -> Step:
        """Reduce copies over some axes; every rank gets the result."""
        ways = self.task.ways(axes)
        total = held.counts() * self.task.itemsize
        place = self.nodes.place(axes)
        own = total * (place + 1) // ways - total * place // ways  # of a reduce_scatter, before the all_gather
        moved = total + (ways - 2) * own
        return self._step("all_reduce", axes, held, held, moved, sent=moved, reduces=axes)

    def reduce_into(self, before: Holding, after: Holding, axes: Sequence[int]) -> Step:
        """Reduce copies over some axes into parts of what the ranks along them hold; no element twice among them."""
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
        """Move to each rank what it needs and does not have; None when that is nothing.

        Args:
            before: what the ranks hold.
            after: what they need; each finds all of it along `axes`.
            axes: over which ranks to exchange.
            replicas: those of `axes` along which ranks hold the same before.
            reduces: those of `axes` along which there are copies to reduce.
            inside: what a rank has before is all needed after.
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
        """Move complete parts, at most one to and from each rank; None when that does not do.

        Both holdings are plain. The ranks that lack a part are matched, in order, with the ranks that have it.
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
        """Return what each rank sends, in elements, rounded up, and whether that is exact; None: it takes enumeration.

        Where the target is more than a layout it is an upper bound.
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
        """Return what each rank receives from other nodes, in elements; None: no axes have all ranks of a node."""
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
            received, sent: in bytes.
            estimate: what is sent, in elements, where the exact number takes enumeration.
            copied, inter_node: in elements; what goes between nodes, None: its share of what is exchanged evenly.
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
            if after.plain:  # of what is given, then known, as much goes between nodes as of what is received
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
    """Return whether a step is carried out by the collective that it is named after; otherwise it is an exchange.

    Collectives take parts of one size only.
    """
    if kind == "reduce_scatter":
        return after.even and set(axes) == set(reduces)
    return before.even if kind == "all_gather" else True


def _gathers_rows(task: MeshTransition, before: Holding, axes: Sequence[int]) -> bool:
    """Return whether parts that arrive in the order of the ranks are the rows of the result, in order."""
    outer = next((dim for dim, size in enumerate(task.shape) if size > 1), 0)
    chain = before.splits[outer]
    return isinstance(task.ranks, range) and before.share is None and chain[-len(axes) :] == tuple(sorted(axes))


def _same(left: Holding, right: Holding) -> bool:
    """Return whether every rank holds the same in both."""
    if left == right:
        return True
    both = left.overlaps(right)
    return bool((both == left.counts()).all() and (both == right.counts()).all())


@lru_cache(maxsize=256)
def _blocks(blocks: Holding, held: Holding) -> tuple[Counts, bool]:
    """Number, on every rank, the block of one layout that that which it holds in another lies in; also whether
    one always does.

    Where a rank holds nothing the number means nothing.
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
