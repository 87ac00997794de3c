"""What a program does in memory on one rank, worked out once: which elements go where in which buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from hyper_parallel.core.redistribute.exchange import Piece, Program, program
from hyper_parallel.core.redistribute.holdings import Intervals, Part, boxes, cut, length
from hyper_parallel.core.redistribute.steps import Step

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Place:
    """A box of a tensor, and where it lies in a flat buffer, in which every piece is a tensor of its own.

    Attributes:
        index: the box in the tensor.
        start: where the piece starts in the buffer.
        stop: where it ends.
        shape: of the piece.
        within: the box in the piece; None: it is all of it.
        copy: which of the copies to reduce the piece belongs to.
    """

    index: Index
    start: int
    stop: int
    shape: tuple[int, ...]
    within: Index | None
    copy: int

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the box in a buffer."""
        piece = buffer[self.start : self.stop].view(self.shape)
        return piece if self.within is None else piece[self.within]


@dataclass(frozen=True)
class Moves:
    """One exchange, or one round of it, on one rank.

    Attributes:
        group: the ranks, sorted.
        sends: elements for each member of the group, in the buffer that is sent.
        receives: elements from each member.
        pack: what is copied to the buffer that is sent; None: it is the held tensor, if that is contiguous.
        pack_anyway: likewise, when it is not contiguous.
        unpack: what is copied from the buffer that arrives; None: it is the result.
        join: the dim along which what arrives, with the own piece at its place, makes up the result; None: copy by box.
        own: boxes copied from the held tensor to the result: where to, where from, of which copy.
        copies: how many copies are reduced; 1: none.
        need: shape of what one round yields.
        target: where that lies in the result of all rounds.
        even: all members bring parts of one size, which is not 0.
    """

    group: tuple[int, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    pack: tuple[Place, ...] | None
    pack_anyway: tuple[Place, ...]
    unpack: tuple[Place, ...] | None
    join: int | None
    own: tuple[tuple[Index, Index, int], ...]
    copies: int
    need: tuple[int, ...]
    target: Index | None
    even: bool


@lru_cache(maxsize=8192)
def moves(step: Step, rank: int, round_: int = 0) -> Moves:
    """Work out what a rank copies, sends and receives in one round of a step."""
    work = program(step, rank, round_)
    whole, size = step.after.part_of(rank), len(work.group)
    sends, receives, own = list(work.sends), list(work.receives), list(work.own)
    gather = step.kind == "all_gather" and step.rounds == 1 and _is_even(step)
    scatter = work.copies == size > 1 and step.rounds == 1
    if gather or scatter or (work.copies == 1 and step.rounds == 1 and len(own) == 1 and _travels(work, own[0])):
        # Then the own piece goes through the buffers too, and one of them is the tensor itself.
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
    """Return the shape of what a rank keeps in a step without communication, and the boxes to copy: to, from."""
    have, need = step.before.part_of(rank), step.after.part_of(rank)
    assert need is not None, "the rank is on the mesh"
    kept = need if step.kind == "slice" else have
    if kept is None or not all(kept):
        return shape_of(need), ()
    return shape_of(need), tuple((index_of(need, box), index_of(have, box)) for box in boxes(kept))


def shape_of(part: Part) -> tuple[int, ...]:
    """Return the shape of the tensor that holds a part: the part's intervals, one after the other in every dim."""
    return tuple(map(length, part))


def index_of(part: Part | None, box: Sequence[tuple[int, int]]) -> Index:
    """Return where a box lies in the tensor that holds a part; the box is within one interval of every dim."""
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


def _places(pieces: Iterable[Piece], holder: Part | None) -> tuple[Place, ...]:
    found, at = [], 0
    for piece in pieces:
        shape, all_boxes = shape_of(piece.part), boxes(piece.part)
        for box in all_boxes:
            within = index_of(piece.part, box) if len(all_boxes) > 1 else None
            found.append(Place(index_of(holder, box), at, at + piece.volume, shape, within, piece.copy))
        at += piece.volume
    return tuple(found)


def _splits(pieces: Iterable[Piece], size: int) -> tuple[int, ...]:
    splits = [0] * size
    for piece in pieces:
        splits[piece.peer] += piece.volume
    return tuple(splits)


def _by_peer(pieces: Iterable[Piece]) -> list[Piece]:
    return sorted(pieces, key=lambda piece: piece.peer)


def _travels(work: Program, own: Piece) -> bool:
    """Return whether with the own piece among them, what is sent or what arrives lies in order already."""
    return _in_order(_by_peer([*work.sends, own]), work.have) or _in_order(_by_peer([*work.receives, own]), work.need)


def _in_order(pieces: Sequence[Piece], whole: Part | None) -> bool:
    """Return whether the pieces, one after the other, are the whole in memory order: all of its outermost dim."""
    if whole is None or not pieces:
        return False
    outer = next((dim for dim, intervals in enumerate(whole) if length(intervals) != 1), 0)
    return _along(pieces, whole, outer)


def _joined(pieces: Sequence[Piece], own: Sequence[Piece], whole: Part | None) -> int | None:
    """Return the dim along which pieces that arrive, with nothing of one's own, are the whole in order; else None."""
    if whole is None or own or len(pieces) < 2:
        return None
    return next((dim for dim in range(len(whole)) if _along(pieces, whole, dim)), None)


def _along(pieces: Sequence[Piece], whole: Part, dim: int) -> bool:
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
    """Return where what one round yields lies in the result; None when it is the result."""
    if whole is None or need is None or whole == need or not all(need):
        return None
    return tuple(
        slice(_offset(mine, part[0][0]), _offset(mine, part[0][0]) + length(part))
        for mine, part in zip(whole, need, strict=True)
    )


def _is_even(step: Step) -> bool:
    return (step.before if step.kind == "all_gather" else step.after).holding.even
