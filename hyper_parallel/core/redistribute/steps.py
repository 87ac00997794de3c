"""Steps of a plan as data, and each rank's sends, receives and copies in a step.

Each rank derives all transfers from global facts. A rank receives each needed element from a rank that holds it. If
several hold it, each of them sends an even share. Shares may differ by an element, so the order of senders differs
between receivers; otherwise one rank would send the larger share to all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from hyper_parallel.core.machine.description import Machine
from hyper_parallel.core.redistribute.cost import Load
from hyper_parallel.core.redistribute.holdings import (
    Counts,
    Intervals,
    Located,
    Part,
    boxes,
    cut,
    divide,
    length,
    meet,
    volume,
)

Kind = Literal["slice", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute", "copy"]
COLLECTIVES = frozenset({"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"})

_MANY_PAIRS = 2**17  # pairs of a rank and a member of its group


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a plan.

    Attributes:
        kind: "slice" and "copy" communicate nothing; a "permute" is an all_to_all in which each rank sends to, and
            receives from, at most one other.
        axes: names of the axes of its groups, in mesh order; () for a local step; between two meshes, of both.
        group_size: ranks that take part in it together.
        recv_bytes: bytes that each rank receives, in the order of the plan's ranks.
        seconds: modelled time on the plan's machine.
        load: the input of that model; None for a local step.
        before: the parts of all ranks before the step.
        after: the parts of all ranks after the step.
        group_axes: the axes of its groups as indices; None: all of the plan's ranks are one group.
        reduces: the axes over which copies are reduced, as indices.
        reduction: "sum", "avg", "max", "min" or "prod" over `reduces`; None without them.
        rounds: number of exchanges that the step is cut into, to limit memory.
        fill: for a "copy": the construction of its result, see `Fill`.
        known_send_bytes: exact bytes that each rank sends; None: only enumerating all pieces would give them.
        estimated_send_bytes: estimate of the same, for exchanges of many ranks; None: no estimate.
        kept_bytes: bytes of earlier or later steps that a rank holds meanwhile, source and result excluded.
    """

    kind: Kind
    axes: tuple[str, ...]
    group_size: int
    recv_bytes: Counts
    seconds: float
    before: Located
    after: Located
    itemsize: int
    ranks: range | tuple[int, ...]
    group_axes: tuple[int, ...] | None = ()
    reduces: tuple[int, ...] = ()
    reduction: str | None = None
    rounds: int = 1
    fill: Fill | None = None
    known_send_bytes: Counts | None = None
    estimated_send_bytes: Counts | None = None
    load: Load | None = None
    kept_bytes: int = 0

    @property
    def communicates(self) -> bool:
        """True if ranks exchange data."""
        return self.kind in COLLECTIVES

    @cached_property
    def send_bytes(self) -> Counts:
        """Bytes that each rank sends, in the order of the plan's ranks.

        They are exact, except for exchanges of so many ranks that enumerating all pieces would take seconds. Then they
        count as if the holders of an element shared its sending evenly.
        """
        if self.known_send_bytes is not None:
            return self.known_send_bytes
        if self.estimated_send_bytes is not None and len(self.ranks) * self.group_size > _MANY_PAIRS:
            return self.estimated_send_bytes
        if self.group_axes is None or self.ranks == self.before.ranks:
            return count_sent(self)
        own = dict(zip(self.before.ranks, count_sent(replace(self, ranks=self.before.ranks)).tolist(), strict=True))
        return np.array([own.get(rank, 0) for rank in self.ranks], dtype=np.int64)

    @property
    def sent_most(self) -> int:
        """Estimate of the most bytes that a rank sends, without enumerating all pieces."""
        counts = self.estimated_send_bytes if self.known_send_bytes is None else self.known_send_bytes
        return 0 if counts is None else int(counts.max())

    @cached_property
    def peak_extra_bytes(self) -> int:
        """Peak bytes per rank during the step beyond the plan's source and result."""
        return self.kept_bytes + buffers(self)

    def takes_part(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the plan's ranks that take part: all of them, except in a step on one of two meshes."""
        if self.group_axes is None or self.ranks == self.before.ranks:
            return np.ones(len(self.ranks), dtype=bool)
        return np.isin(np.asarray(self.ranks), np.asarray(self.before.ranks))

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Return the sorted ranks of a rank's group."""
        if self.group_axes is None:
            return tuple(sorted(self.ranks))
        coordinates = self.before.coordinates(rank)
        assert coordinates is not None, "a group over axes is asked for on the mesh only"
        sizes = self.before.holding.sizes
        grid = np.arange(len(self.before.ranks)).reshape(sizes)
        index = tuple(slice(None) if axis in self.group_axes else at for axis, at in enumerate(coordinates))
        return tuple(sorted(self.before.ranks[position] for position in grid[index].ravel().tolist()))


@dataclass(frozen=True)
class Fill:
    """Arithmetic of a "copy", which makes pending copies of parts or rescales them, e.g. from "sum" to "avg".

    Attributes:
        value: the reduction whose neutral element fills the elements that other ranks contribute.
        times: factor of the rank's own elements.
        over: divisor of the rank's own elements.
    """

    value: str = "sum"
    times: int = 1
    over: int = 1


def price(steps: Sequence[Step], on: Machine | None) -> tuple[float, ...]:
    """Return the sort key of a candidate, smaller is better: bytes first without a machine, time first with one."""
    received = sum(int(step.recv_bytes.sum()) for step in steps)
    count = sum(step.rounds for step in steps if step.communicates)
    time = float(f"{sum(step.seconds for step in steps):.9g}")  # rounded, so that equal candidates tie
    return (received, count, time) if on is None else (time, received, count)


def with_kept(steps: Sequence[Step]) -> list[Step]:
    """Fill in `kept_bytes` of a candidate's steps: a tensor between two steps is held during both."""
    held = [int(step.after.holding.counts().max(initial=0)) * step.itemsize for step in steps[:-1]]
    return [replace(step, kept_bytes=a + b) for step, a, b in zip(steps, [0, *held], [*held, 0])]  # noqa: B905


# -- transfers between ranks -------------------------------------------------------------------------------------------


Key = tuple[int, Part]
"""Which copy (0 when there are none to reduce) of which part."""


@dataclass(frozen=True)
class ExchangedPart:
    """A part that is sent, received, or kept.

    Attributes:
        peer: index in the group of the rank at the other end.
        copy: index of its pending copy; 0 without a reduction.
        part: the elements.
        volume: the number of elements.
    """

    peer: int
    copy: int
    part: Part
    volume: int


@dataclass(frozen=True)
class RankExchange:
    """The sends, receives and local copies of one rank in one exchange.

    Attributes:
        group: the ranks, sorted.
        me: this rank's index in the group.
        copies: number of copies that are reduced; 1: no reduction.
        have: the rank's part before; None: the rank is not on that mesh.
        need: the rank's part after; None: the rank is not on that mesh.
        sends: pieces by peer, in the order in which each peer receives them.
        receives: pieces by peer.
        own: pieces that the rank takes from its own part.
    """

    group: tuple[int, ...]
    me: int
    copies: int
    have: Part | None
    need: Part | None
    sends: tuple[ExchangedPart, ...]
    receives: tuple[ExchangedPart, ...]
    own: tuple[ExchangedPart, ...]


@lru_cache(maxsize=4096)
def program(step: Step, rank: int, round_: int = 0) -> RankExchange:
    """Return a rank's transfers in a step that exchanges parts, or in one of its rounds."""
    group = step.group_of(rank)
    view = _view(step, group, round_ if step.reduces else 0)
    me = group.index(rank)
    sends = [piece for peer in range(len(group)) for piece in view.between(me, peer)]
    receives = list(view.received(me))
    own = list(view.kept(me))
    if not step.reduces:
        sends, receives = _in_round(sends, step.rounds, round_), _in_round(receives, step.rounds, round_)
        own = own if round_ == 0 else []
    return RankExchange(group, me, view.copies, view.have[me], view.need[me], tuple(sends), tuple(receives), tuple(own))


def count_sent(step: Step) -> Counts:
    """Count the bytes that each of the plan's ranks sends in a step, by enumerating all pieces."""
    sent = dict.fromkeys(step.ranks, 0)
    done: set[int] = set()
    for rank in step.ranks:
        if rank in done:
            continue
        group = step.group_of(rank)
        done.update(group)
        view = _view(step, group, 0)
        for me, member in enumerate(group):
            pieces = (piece for peer in range(len(group)) for piece in view.between(me, peer))
            sent[member] = sum(piece.volume for piece in pieces) * step.itemsize
    return np.array([sent[rank] for rank in step.ranks], dtype=np.int64)


def _in_round(pieces: list[ExchangedPart], rounds: int, index: int) -> list[ExchangedPart]:
    if rounds == 1:
        return pieces
    found = []
    for piece in pieces:
        part = divide(piece.part, rounds, index)
        if part is not None:
            found.append(ExchangedPart(piece.peer, piece.copy, part, volume(part)))
    return found


class _View:
    """One group of a step: the parts that each member has and needs, and the members with equal parts.

    Rounds cut the pieces of an exchange. In a reduction they cut the needed parts, so that copies stay together.
    """

    def __init__(self, step: Step, group: tuple[int, ...], round_: int) -> None:
        self.copies = 1
        for axis in step.reduces:
            self.copies *= step.before.holding.sizes[axis]
        self.paired = step.kind == "permute"
        self.have: list[Part | None] = [step.before.part_of(rank) for rank in group]
        self.need: list[Part | None] = [step.after.part_of(rank) for rank in group]
        if step.reduces and step.rounds > 1:
            self.need = [None if part is None else divide(part, step.rounds, round_) for part in self.need]
        self.keys: list[Key | None] = []
        self.owners: dict[Key, list[int]] = {}
        for member, (rank, part) in enumerate(zip(group, self.have, strict=True)):
            if part is None or not all(part):
                self.keys.append(None)
                continue
            key = (_copy(step, rank), part)
            self.keys.append(key)
            self.owners.setdefault(key, []).append(member)
        self.matches = {key: self._match(key) for key in self.owners} if self.paired else {}

    def between(self, sender: int, receiver: int) -> Iterator[ExchangedPart]:
        """Yield the piece that one member sends to another; both ends compute the same."""
        key, need = self.keys[sender], self.need[receiver]
        if sender == receiver or key is None or need is None or self.keys[receiver] == key:
            return
        part = meet(need, key[1])
        if part is None:
            return
        owners = self.owners[key]
        if self.paired:
            if self.matches[key].get(receiver) != sender:
                return
        elif len(owners) > 1:
            share = (owners.index(sender) + receiver) % len(owners)
            part = divide(part, len(owners), share)
            if part is None:
                return
        # At most one piece moves between two ranks, so that the receiver needs no name for it.
        yield ExchangedPart(receiver, key[0], part, volume(part))

    def received(self, receiver: int) -> Iterator[ExchangedPart]:
        """Yield the pieces that a member receives."""
        for sender in range(len(self.keys)):
            for piece in self.between(sender, receiver):
                yield ExchangedPart(sender, piece.copy, piece.part, piece.volume)

    def kept(self, member: int) -> Iterator[ExchangedPart]:
        """Yield the needed pieces that a member already holds."""
        key, need = self.keys[member], self.need[member]
        if key is not None and need is not None:
            part = meet(need, key[1])
            if part is not None:
                yield ExchangedPart(member, key[0], part, volume(part))

    def _match(self, key: Key) -> dict[int, int]:
        """Match each member that lacks a part with one member that holds it."""
        lacking = [
            member
            for member, need in enumerate(self.need)
            if need is not None and self.keys[member] != key and meet(need, key[1]) is not None
        ]
        return dict(zip(lacking, self.owners[key], strict=False))


def _copy(step: Step, rank: int) -> int:
    """Return the index of the copy that a rank holds: its joint coordinate on the reduced axes."""
    coordinates = step.before.coordinates(rank)
    assert coordinates is not None, "a rank with a part is on the mesh"
    joint = 0
    for axis in step.reduces:
        joint = joint * step.before.holding.sizes[axis] + coordinates[axis]
    return joint


@lru_cache(maxsize=512)
def _view(step: Step, group: tuple[int, ...], round_: int) -> _View:
    return _View(step, group, round_)


# -- copies in the memory of one rank ----------------------------------------------------------------------------------


Index = tuple[slice, ...]


@dataclass(frozen=True)
class BufferBox:
    """A box of a tensor, and its place in a flat buffer. Each piece is a contiguous tensor within the buffer.

    Attributes:
        index: the box in the tensor.
        start: offset of the piece in the buffer, in elements.
        stop: end of the piece in the buffer, in elements.
        shape: shape of the piece.
        within: the box in the piece; None: the whole piece.
        copy: index of the pending copy that the piece belongs to; 0 without a reduction.
    """

    index: Index
    start: int
    stop: int
    shape: tuple[int, ...]
    within: Index | None
    copy: int

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the box as a view of a buffer."""
        piece = buffer[self.start : self.stop].view(self.shape)
        return piece if self.within is None else piece[self.within]


@dataclass(frozen=True)
class Moves:
    """Buffers and copies of one rank in one exchange, or in one round of it.

    Attributes:
        group: the ranks, sorted.
        sends: elements for each member of the group, in the send buffer.
        receives: elements from each member.
        pack: boxes to copy to the send buffer; None: a contiguous held tensor is the send buffer.
        pack_anyway: boxes to copy to the send buffer if the held tensor is not contiguous.
        unpack: boxes to copy from the receive buffer; None: the receive buffer is the result.
        join: dim along which the received pieces concatenate to the result; None: copy box by box.
        own: boxes copied from the held tensor to the result: target, source, index of the copy.
        copies: number of copies that are reduced; 1: no reduction.
        need: shape of one round's result.
        target: place of one round's result in the whole result; None: it is the whole.
        even: True if all members send parts of one size, which is not 0.
    """

    group: tuple[int, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    pack: tuple[BufferBox, ...] | None
    pack_anyway: tuple[BufferBox, ...]
    unpack: tuple[BufferBox, ...] | None
    join: int | None
    own: tuple[tuple[Index, Index, int], ...]
    copies: int
    need: tuple[int, ...]
    target: Index | None
    even: bool


@lru_cache(maxsize=8192)
def moves(step: Step, rank: int, round_: int = 0) -> Moves:
    """Return a rank's copies, sends and receives in one round of a step."""
    work = program(step, rank, round_)
    whole, size = step.after.part_of(rank), len(work.group)
    sends, receives, own = list(work.sends), list(work.receives), list(work.own)
    gather = step.kind == "all_gather" and step.rounds == 1 and _is_even(step)
    scatter = work.copies == size > 1 and step.rounds == 1
    if gather or scatter or (work.copies == 1 and step.rounds == 1 and len(own) == 1 and _travels(work, own[0])):
        # The rank's own piece moves through the buffers, too, so that one of them is the tensor itself.
        sends, receives, own = _by_peer(sends + own), _by_peer(receives + own), []
    pack = _places(sends, work.have)
    unpack = _places(receives, work.need)
    join = None if scatter or work.copies > 1 else _joined(receives, own, work.need)
    return Moves(
        group=work.group,
        sends=_splits(sends, size),
        receives=_splits(receives, size),
        pack=None if _in_order(sends, work.have) else pack,
        pack_anyway=pack,
        unpack=None if step.rounds == 1 == work.copies and not own and _in_order(receives, work.need) else unpack,
        join=join,
        own=tuple(
            (index_of(work.need, box), index_of(work.have, box), piece.copy)
            for piece in own
            for box in boxes(piece.part)
        ),
        copies=work.copies,
        need=shape_of(work.need) if work.need is not None else (0,),
        target=_target(whole, work.need),
        even=gather or (scatter and _is_even(step)),
    )


@lru_cache(maxsize=8192)
def local_moves(step: Step, rank: int) -> tuple[tuple[int, ...], tuple[tuple[Index, Index], ...]]:
    """Return the shape of a rank's result in a local step, and the boxes to copy as (target, source)."""
    have, need = step.before.part_of(rank), step.after.part_of(rank)
    assert need is not None, "the rank is on the mesh"
    kept = need if step.kind == "slice" else have
    if kept is None or not all(kept):
        return shape_of(need), ()
    return shape_of(need), tuple((index_of(need, box), index_of(have, box)) for box in boxes(kept))


def shape_of(part: Part) -> tuple[int, ...]:
    """Return the shape of the tensor that holds a part, with the part's intervals joined in every dim."""
    return tuple(map(length, part))


def index_of(part: Part | None, box: Sequence[tuple[int, int]]) -> Index:
    """Return the index of a box in the tensor that holds a part; the box lies in one interval of every dim."""
    assert part is not None, "a rank holds what it packs"
    found = []
    for intervals, (start, stop) in zip(part, box, strict=True):
        first = _offset(intervals, start)
        found.append(slice(first, first + stop - start))
    return tuple(found)


def _offset(intervals: Intervals, start: int) -> int:
    before = 0
    for low, high in intervals:
        if low <= start < high:
            return before + start - low
        before += high - low
    raise AssertionError(f"{start} is not in {intervals}")


def _places(pieces: Iterable[ExchangedPart], holder: Part | None) -> tuple[BufferBox, ...]:
    found, at = [], 0
    for piece in pieces:
        shape, all_boxes = shape_of(piece.part), boxes(piece.part)
        for box in all_boxes:
            within = index_of(piece.part, box) if len(all_boxes) > 1 else None
            found.append(BufferBox(index_of(holder, box), at, at + piece.volume, shape, within, piece.copy))
        at += piece.volume
    return tuple(found)


def _splits(pieces: Iterable[ExchangedPart], size: int) -> tuple[int, ...]:
    splits = [0] * size
    for piece in pieces:
        splits[piece.peer] += piece.volume
    return tuple(splits)


def _by_peer(pieces: Iterable[ExchangedPart]) -> list[ExchangedPart]:
    return sorted(pieces, key=lambda piece: piece.peer)


def _travels(work: RankExchange, own: ExchangedPart) -> bool:
    """Return True if the sent or the received pieces, including the own piece, are already in memory order."""
    return _in_order(_by_peer([*work.sends, own]), work.have) or _in_order(_by_peer([*work.receives, own]), work.need)


def _in_order(pieces: Sequence[ExchangedPart], whole: Part | None) -> bool:
    """Return True if the pieces, one after the other, are the whole in memory order: all of its outermost dim."""
    if whole is None or not pieces:
        return False
    outer = next((dim for dim, intervals in enumerate(whole) if length(intervals) != 1), 0)
    return _along(pieces, whole, outer)


def _joined(pieces: Sequence[ExchangedPart], own: Sequence[ExchangedPart], whole: Part | None) -> int | None:
    """Return the dim along which received pieces, without an own piece, concatenate to the whole; else None."""
    if whole is None or own or len(pieces) < 2:
        return None
    return next((dim for dim in range(len(whole)) if _along(pieces, whole, dim)), None)


def _along(pieces: Sequence[ExchangedPart], whole: Part, dim: int) -> bool:
    at = 0
    for piece in pieces:
        if any(piece.part[other] != whole[other] for other in range(len(whole)) if other != dim):
            return False
        count = length(piece.part[dim])
        if piece.part[dim] != cut(whole[dim], at, count):
            return False
        at += count
    return at == length(whole[dim])


def _target(whole: Part | None, need: Part | None) -> Index | None:
    """Return the place of one round's result in the whole result; None if it is the whole."""
    if whole is None or need is None or whole == need or not all(need):
        return None
    return tuple(
        slice(_offset(mine, part[0][0]), _offset(mine, part[0][0]) + length(part))
        for mine, part in zip(whole, need, strict=True)
    )


def _is_even(step: Step) -> bool:
    return (step.before if step.kind == "all_gather" else step.after).holding.even


# -- the buffers of a step ---------------------------------------------------------------------------------------------
# For few ranks, buffer sizes are exact: the maximum over all ranks' moves. For many ranks, that would take too long, so
# they are bounded from above by the busiest rank's bytes. Both use global facts, so all ranks find the same number.
# Tensors are assumed to be contiguous, because others are copied first.


_MOST_READ_PAIRS = 2**12  # pairs of a rank and a group member; reading more takes too long
_MOST_READ_RANKS = 256  # reading more takes too long


def buffers(step: Step) -> int:
    """Return the peak bytes of buffers of a rank in a step, over all of its rounds."""
    if step.kind == "slice" or step.kind == "all_reduce":
        return 0
    if step.kind == "copy":
        return _scaled(step)
    if len(step.ranks) > _MOST_READ_RANKS or len(step.ranks) * step.group_size > _MOST_READ_PAIRS:
        return step.itemsize * _at_most(step)
    ranks = step.ranks if step.group_axes is None else step.before.ranks
    # The first round has the largest pieces.
    return step.itemsize * max(_of_one(step, moves(step, rank)) for rank in ranks)


def _scaled(step: Step) -> int:
    """Return the bytes of the scaled copies from which a "copy" makes its result."""
    fill = step.fill
    assert fill is not None, "a copy says how it fills"
    return ((fill.times != 1) + (fill.over != 1)) * _most(step.before.holding.counts()) * step.itemsize


def _of_one(step: Step, work: Moves) -> int:
    """Return the peak elements in one rank's buffers, which live as long as in `execute`."""
    packed = 0 if work.pack is None else sum(work.sends)
    arrived, result = sum(work.receives), math.prod(work.need)
    if step.kind == "all_gather" and work.even:
        return 0 if work.unpack is None else arrived
    if work.copies > 1 and work.copies == len(work.group) and step.rounds == 1:
        return packed + arrived
    if step.rounds > 1:
        return max(packed + arrived, arrived + (work.copies + 1) * result if work.copies > 1 else 0)
    if work.copies > 1:
        return max(packed + arrived - result, arrived + work.copies * result)
    return packed if work.unpack is None else max(packed + arrived - result, arrived)


# -- upper bounds ----------------------------------------------------------------------------------------------------


def _at_most(step: Step) -> int:
    """Return an upper bound of the elements in any rank's buffers."""
    need, have = _most(step.after.holding.counts()), _most(step.before.holding.counts())
    received = _most(step.recv_bytes) // step.itemsize
    sent = min(_most(step.estimated_send_bytes) // step.itemsize + _uncut(step, have), have * step.group_size)
    copies = math.prod(step.before.holding.sizes[axis] for axis in step.reduces)
    if copies > 1:
        return _reducing(step, copies, have, need, sent, received)
    if step.rounds > 1:
        return min(sent, sent // step.rounds + _uncut(step, sent)) + min(
            received, received // step.rounds + _uncut(step, received)
        )
    return max(need, sent + max(received, min(need, have)))


def _reducing(step: Step, copies: int, have: int, need: int, sent: int, received: int) -> int:
    """Bound a step that reduces. Its rounds cut the needed parts, and all copies of an element arrive in one round."""
    if step.rounds > 1:
        need = min(need, need // step.rounds + _uncut(step, need, 1))
        sent, received = min(sent, step.group_size * need), min(received, copies * need)
        return max(received + sent + need, received + (copies + 1) * need)
    return copies * need + max(have, sent, received)


def _uncut(step: Step, total: int, pieces: int = 0) -> int:
    """Bound the elements that a round may have, or an owner may send, above an even share of `total`.

    A piece is cut along its longest dim, into shares that differ by at most one row. With d dims, a row of a piece of
    v elements has at most v ** (1 - 1 / d) elements. Their sum is largest if all pieces have one size.
    """
    number, dims = pieces or step.group_size, len(step.after.holding.shape)
    return math.ceil(number * (total / number) ** (1 - 1 / dims))


def _most(counts: Counts | None) -> int:
    return 0 if counts is None else int(counts.max(initial=0))
