"""Sequence positions held by each rank, the visibility between them, and what attention moves, without tensors.

A ring rank's *part* is what it works on in the ring; the ranks of its Ulysses group hold a slice of the part each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from hyper_parallel.core.common.checks import check, check_fields, check_least

_ASKED = "cannot split a sequence"


class Visible(NamedTuple):
    """The queries of one part that see something of another part, and what they see, counted from the parts' starts.

    Attributes:
        first_query: these and all later queries see keys.
        num_keys: the first so many keys are seen.
        causal: query i sees keys up to i only; such a block has as many queries as keys. Else all see all.
    """

    first_query: int
    num_keys: int
    causal: bool


@dataclass(frozen=True)
class SequenceSplit:
    """How a sequence is cut over the ranks of a context-parallel axis.

    >>> SequenceSplit(ring=2).intervals(0, 16), SequenceSplit(ring=2).intervals(1, 16)
    (((0, 4), (12, 16)), ((4, 8), (8, 12)))
    >>> SequenceSplit(ring=2, ulysses=2).intervals(1, 16)
    ((12, 16),)

    In causal attention late positions see more than early ones. So with `balance` a sequence is cut into 2 * ring
    pieces, and ring rank r holds pieces r and 2 * ring - 1 - r: all have the same to compute (the "zigzag" of Llama 3,
    Llama Team 2024, section 3.3.2). Without, ring rank r holds the r-th interval. Within a part the Ulysses ranks,
    which are neighbours, hold slices in order.

    Args:
        ring: ranks that keys and values travel around.
        ulysses: ranks that share the heads of a part.
        balance: cut in two intervals that even out causal attention.

    Raises:
        TypeError: an argument of another kind, here and in the methods.
        ValueError: fewer than one rank.
    """

    ring: int = 1
    ulysses: int = 1
    balance: bool = True

    def __post_init__(self) -> None:
        check_fields(_ASKED, self)
        check_least(_ASKED, 1, ring=self.ring, ulysses=self.ulysses)

    @property
    def size(self) -> int:
        """How many ranks share a sequence."""
        return self.ring * self.ulysses

    @property
    def zigzag(self) -> bool:
        """Whether a part is two intervals."""
        return self.balance and self.ring > 1

    @property
    def multiple(self) -> int:
        """What the length of a sequence must be a multiple of.

        >>> [SequenceSplit(4).multiple, SequenceSplit(4, balance=False).multiple, SequenceSplit(2, 2).multiple]
        [8, 4, 4]
        >>> SequenceSplit(2, 3).multiple
        12
        """
        odd = self.zigzag and self.ulysses % 2
        return self.size * (2 if odd else 1)

    def place(self, rank: int) -> tuple[int, int]:
        """Return which part a rank works on, and which slice of it the rank holds.

        >>> SequenceSplit(ring=2, ulysses=3).place(4)
        (1, 1)
        """
        check(_ASKED, "int", rank=rank)
        return divmod(rank, self.ulysses)

    def part(self, ring_rank: int, seq: int) -> tuple[tuple[int, int], ...]:
        """Return the intervals [start, stop) of the part of a ring rank, in the order in which they lie there."""
        check(_ASKED, "int", ring_rank=ring_rank, seq=seq)
        if not self.zigzag:
            length = seq // self.ring
            return ((ring_rank * length, (ring_rank + 1) * length),)
        piece, late = seq // (2 * self.ring), 2 * self.ring - 1 - ring_rank
        return ((ring_rank * piece, (ring_rank + 1) * piece), (late * piece, (late + 1) * piece))

    def intervals(self, rank: int, seq: int) -> tuple[tuple[int, int], ...]:
        """Return the intervals [start, stop) of positions that a rank holds, in the order in which it holds them.

        Args:
            rank: place on the context-parallel axis.
            seq: length of the whole sequence, in tokens; divisible by `multiple`.
        """
        check(_ASKED, "int", seq=seq)
        ring_rank, slot = self.place(rank)
        length = seq // self.size
        found, offset = [], -slot * length  # of what is left of the part, from the start of the slice
        for start, stop in self.part(ring_rank, seq):
            low, high = max(offset, 0), min(offset + stop - start, length)
            if low < high:
                found.append((start + low - offset, start + high - offset))
            offset += stop - start
        return tuple(found)

    def visible(self, query_rank: int, key_rank: int, length: int, causal: bool) -> Visible | None:
        """Return what the queries of a ring rank's part see of the keys of another one's, None for nothing.

        >>> split = SequenceSplit(ring=4)
        >>> split.visible(1, 1, 8, causal=True), split.visible(1, 0, 8, causal=True)
        (Visible(first_query=0, num_keys=8, causal=True), Visible(first_query=0, num_keys=4, causal=False))
        >>> split.visible(1, 2, 8, causal=True)
        Visible(first_query=4, num_keys=8, causal=False)

        Args:
            query_rank: ring rank whose queries they are.
            key_rank: ring rank whose keys they are.
            length: tokens of a part.
            causal: positions see no later ones.
        """
        check(_ASKED, "int", query_rank=query_rank, key_rank=key_rank, length=length)
        check(_ASKED, "bool", causal=causal)
        if not causal:
            return Visible(0, length, causal=False)
        if query_rank == key_rank:
            return Visible(0, length, causal=True)
        if self.zigzag:
            # The first half of an earlier rank's part is before all of this one's, its second half after it; of a later
            # rank's part both halves lie between this one's two.
            earlier = key_rank < query_rank
            return Visible(0, length // 2, causal=False) if earlier else Visible(length // 2, length, causal=False)
        return Visible(0, length, causal=False) if key_rank < query_rank else None


class Gaps:
    """The tokens of a sum that nothing has been written to yet: what comes first is copied there, the rest is added.

    >>> gaps = Gaps(8)
    >>> gaps.fill(slice(2, 6))
    [(slice(2, 6, None), slice(0, 4, None), True)]
    >>> for here, there, is_first in gaps.fill(slice(4, 8)):
    ...     print(here.start, here.stop, there.start, there.stop, is_first)
    4 6 0 2 False
    6 8 2 4 True
    >>> gaps.left
    [(0, 2)]

    Args:
        tokens: of the sum.

    Attributes:
        left: intervals [start, stop).
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.left = [(0, tokens)] if tokens else []

    def fill(self, where: slice) -> list[tuple[slice, slice, bool]]:
        """Return where a part goes, piece by piece: places in the sum and in the part, and whether nothing is there.

        Args:
            where: place of the part in the sum.
        """
        start, stop, _ = where.indices(self._tokens)
        if not self.left:
            return [(slice(start, stop), slice(0, stop - start), False)]
        ends = [end for gap in self.left for end in gap if start < end < stop]
        found = [
            (slice(low, high), slice(low - start, high - start), any(a <= low < b for a, b in self.left))
            for low, high in pairwise(sorted({start, stop, *ends}))
        ]
        cut = [piece for a, b in self.left for piece in ((a, min(b, start)), (max(a, stop), b))]
        self.left = [(a, b) for a, b in cut if a < b]
        return found


def shared_heads(heads: int, degree: int) -> int:
    """Return how often key and value heads must be repeated so that ranks can share them evenly.

    >>> shared_heads(8, 4), shared_heads(2, 8), shared_heads(6, 4)
    (1, 4, 2)

    This divides the number of query heads of each, wherever the query heads themselves can be shared.

    Args:
        heads: number of key and value heads.
        degree: number of ranks.
    """
    return degree // math.gcd(heads, degree)


class AttentionTraffic(NamedTuple):
    """Bytes that each rank receives in one `ContextParallel.attend`, and sends, by what carries them.

    Attributes:
        exchanged: forward, by all_to_all among Ulysses ranks; backward moves as much.
        around: forward, from the previous rank of the ring.
        around_backward: the same once more, and gradients.
    """

    exchanged: int
    around: int
    around_backward: int

    @property
    def total(self) -> int:
        """Forward and backward together."""
        return 2 * self.exchanged + self.around + self.around_backward


def attention_traffic(
    split: SequenceSplit, *, seq: int, heads: int, kv_heads: int, head_dim: int, batch: int = 1, itemsize: int = 2
) -> AttentionTraffic:
    """Return what one attention moves, without documents (which cost an all_gather of their ids).

    >>> llama = dict(seq=131072, heads=32, kv_heads=8, head_dim=128)  # of 8 billion parameters, in bfloat16
    >>> [bytes_ >> 20 for bytes_ in attention_traffic(SequenceSplit(1, 8), **llama)]
    [280, 0, 0]
    >>> [bytes_ >> 20 for bytes_ in attention_traffic(SequenceSplit(8, 1), **llama)]
    [0, 448, 1344]

    Args:
        split: how the sequence is cut.
        seq: tokens of a whole sequence, a multiple of `split.multiple`.
        heads: query heads of a rank (under tensor parallelism: its own), a multiple of `split.ulysses`.
        kv_heads: key and value heads, likewise.
        head_dim: size of a head.
        batch: sequences.
        itemsize: bytes of an element.

    Raises:
        TypeError: an argument of another kind.
        ValueError: a size below one.
    """
    asked, sizes = "cannot count the traffic of an attention", {"seq": seq, "heads": heads, "kv_heads": kv_heads}
    sizes |= {"head_dim": head_dim, "batch": batch, "itemsize": itemsize}
    check(asked, "int", **sizes)
    check_least(asked, 1, **sizes)
    per_head = batch * (seq // split.size) * head_dim * itemsize  # of this rank's tokens
    kv_heads *= shared_heads(kv_heads, split.ulysses)
    exchanged = per_head * (2 * heads + 2 * kv_heads) // split.ulysses * (split.ulysses - 1)
    around = (split.ring - 1) * per_head * 2 * kv_heads  # as many tokens more as heads less, by Ulysses
    sums = max(itemsize, 4)  # gradients travel in the dtype of sums
    return AttentionTraffic(exchanged, around, around + around // itemsize * sums)
