"""Positions of each rank, and what they see of another part: against masks drawn position by position."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from hyper_parallel.core.context_parallel import SequenceSplit

pytestmark = pytest.mark.sim

SPLITS = [
    SequenceSplit(ring, ulysses, balance)
    for ring, ulysses, balance in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4), (True, False))
]


def positions(intervals: tuple[tuple[int, int], ...]) -> np.ndarray:
    return np.concatenate([np.arange(start, stop) for start, stop in intervals])


def test_ranks_hold_every_position_once_and_all_as_many() -> None:
    for split, pieces in itertools.product(SPLITS, (1, 2, 5)):
        seq = pieces * split.multiple
        held = [positions(split.intervals(rank, seq)) for rank in range(split.size)]
        assert sorted(np.concatenate(held)) == list(range(seq))
        assert {len(own) for own in held} == {seq // split.size}
        for ring_rank in range(split.ring):
            ranks = [rank for rank in range(split.size) if split.place(rank)[0] == ring_rank]
            assert ranks == list(range(ranks[0], ranks[0] + split.ulysses)), "Ulysses ranks are neighbours"
            part = np.concatenate([held[rank] for rank in ranks])
            assert part.tolist() == positions(split.part(ring_rank, seq)).tolist()


def test_no_smaller_multiple_would_do() -> None:
    """All ranks get as many tokens, and where parts are two intervals these are of one length."""
    for split in SPLITS:
        pieces = 2 * split.ring if split.zigzag else split.ring
        fits = next(seq for seq in itertools.count(1) if seq % pieces == 0 and seq % split.size == 0)
        assert split.multiple == fits


def test_what_is_visible_is_what_a_mask_says() -> None:
    for split, causal in itertools.product(SPLITS, (True, False)):
        seq = 2 * split.multiple
        length = seq // split.ring
        parts = [positions(split.part(rank, seq)) for rank in range(split.ring)]
        for mine, theirs in itertools.product(range(split.ring), repeat=2):
            expected = parts[mine][:, None] >= parts[theirs] if causal else np.ones((length, length), dtype=bool)
            found = np.zeros_like(expected)
            seen = split.visible(mine, theirs, length, causal)
            if seen is not None:
                block = np.ones((length - seen.first_query, seen.num_keys), dtype=bool)
                found[seen.first_query :, : seen.num_keys] = np.tril(block) if seen.causal else block
                assert block.any(), "a block that nobody sees is to be skipped"
                assert not seen.causal or block.shape[0] == block.shape[1]
            assert (found == expected).all(), (mine, theirs)


def scores_per_rank(split: SequenceSplit, seq: int) -> list[int]:
    """How many scores each ring rank computes in causal attention."""
    full = np.tril(np.ones((seq, seq), dtype=int))
    return [int(full[positions(split.part(rank, seq))].sum()) for rank in range(split.ring)]


@pytest.mark.parametrize("ring", [2, 3, 8])
def test_balance_gives_all_ranks_the_same_to_compute(ring: int) -> None:
    seq = 4 * ring
    assert len(set(scores_per_rank(SequenceSplit(ring), seq))) == 1
    uneven = scores_per_rank(SequenceSplit(ring, balance=False), seq)
    assert uneven == sorted(uneven)
    assert uneven[-1] > 1.3 * math.fsum(uneven) / ring
