"""Bytes that context-parallel attention moves, from sizes alone; `ContextParallel.attend` sends exactly these."""

from __future__ import annotations

from typing import NamedTuple

from hyper_parallel.core.common.checks import check, check_least
from hyper_parallel.core.context_parallel.attention import shared_heads
from hyper_parallel.core.context_parallel.index import SequenceSplit


class AttentionTraffic(NamedTuple):
    """Bytes that each rank receives in one attention, and sends, by what carries them.

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
    check(asked, SequenceSplit, split=split)
    check(asked, "int", **sizes)
    check_least(asked, 1, **sizes)
    per_head = batch * (seq // split.size) * head_dim * itemsize  # of this rank's tokens
    kv_heads *= shared_heads(kv_heads, split.ulysses)
    exchanged = per_head * (2 * heads + 2 * kv_heads) // split.ulysses * (split.ulysses - 1)
    around = (split.ring - 1) * per_head * 2 * kv_heads  # as many tokens more as heads less, by Ulysses
    sums = max(itemsize, 4)  # gradients travel in the dtype of sums
    return AttentionTraffic(exchanged, around, around + around // itemsize * sums)
