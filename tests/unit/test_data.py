"""Text and batches: the same on every machine layout, and nothing held back leaks into training."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from hyper_parallel.trainer.data import (
    IGNORED,
    VALID_EVERY,
    _mix,
    check_length,
    load_corpus,
    rank_part,
    samples,
    shuffled,
    valid_samples,
)

TEXT = np.arange(5_000, dtype=np.int64).astype(np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty files that each hold one letter, in two folders, and one file that does not match."""
    for number in range(20):
        file = tmp_path / ("b" if number < 10 else "a") / f"{number:02}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(chr(ord("A") + number) * 50)
    (tmp_path / "a" / "notes.txt").write_text("z" * 50)
    return tmp_path


def test_files_are_read_in_sorted_order_and_split_whole(folder: Path) -> None:
    corpus = load_corpus(str(folder))
    # a/10.py ... a/19.py, then b/00.py ... b/09.py; every tenth one is held back.
    assert bytes(corpus.train).decode() == "".join(letter * 50 for letter in "KLMNOPQRSABCDEFGHI")
    assert bytes(corpus.valid).decode() == "T" * 50 + "J" * 50
    assert corpus.files == 20


def test_reading_stops_at_max_bytes(folder: Path) -> None:
    assert load_corpus(str(folder), max_bytes=501).files == 11


def test_a_pattern_chooses_files(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"found 1 file\(s\) that match '\*.txt'.*at least 10 are needed"):
        load_corpus(str(folder), pattern="*.txt")


def test_one_file_is_split_by_position(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(bytes(TEXT[:100]))
    corpus = load_corpus(str(file))
    assert np.array_equal(corpus.train, TEXT[:90])
    assert np.array_equal(corpus.valid, TEXT[90:100])


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no text at '.*nowhere': no such file or folder\n  try: another \[data\] path"
    ):
        load_corpus(str(tmp_path / "nowhere"))


def test_the_standard_library_is_python_text() -> None:
    corpus = load_corpus(max_bytes=600_000)
    assert corpus.files >= VALID_EVERY
    assert 600_000 <= corpus.train.size + corpus.valid.size < 1_500_000
    for part in (corpus.train, corpus.valid):
        assert b"def " in bytes(part)
        assert b"import " in bytes(part)
    assert load_corpus(max_bytes=600_000) is corpus, "ranks of one process share the text"


def test_the_hash_is_that_of_plain_integers() -> None:
    def oracle(index: int, seed: int) -> int:
        z = (index * 0x9E3779B97F4A7C15 + seed * 0xD1B54A32D192ED03 + 1) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    indices = [0, 1, 2, 1_000, 2**40]
    for seed in (0, 1, 2**70):
        assert _mix(np.array(indices, dtype=np.uint64), seed).tolist() == [oracle(i, seed) for i in indices]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 6, 12])
def test_every_number_of_ranks_reads_the_same_global_batch(dp_size: int) -> None:
    step, batch, seq = 3, 12, 7
    parts = [samples(TEXT, rank_part(step * batch, batch, rank, dp_size), seq, seed=5) for rank in range(dp_size)]
    inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
    whole_inputs, whole_targets = samples(TEXT, range(36, 48), seq, seed=5)
    assert torch.equal(inputs, whole_inputs)
    assert torch.equal(targets, whole_targets)


def test_targets_are_the_next_bytes() -> None:
    inputs, targets = samples(TEXT, range(6), 9, seed=0)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (6, 9)
    assert torch.equal((inputs + 1) % 256, targets), "the text counts upwards"


def plainly_shuffled(index: int, count: int, seed: int) -> int:
    """The twin of `shuffled`, for one sample and in plain integers."""

    def mix(value: int) -> int:
        return int(_mix(np.array([value % 2**64], dtype=np.uint64), seed)[0])

    epoch, place = divmod(index, count)
    half = next(bits for bits in range(1, 32) if 4**bits >= count)
    while True:
        left, right = divmod(place, 2**half)
        for number in range(6):
            left, right = right, left ^ (mix(right ^ mix(epoch * 6 + number)) % 2**half)
        place = left * 2**half + right
        if place < count:
            return place


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 1_000])
def test_the_order_is_that_of_plain_integers(count: int) -> None:
    for first, seed in [(0, 0), (3 * count - 2, 7), (2**40, 2**70)]:
        numbers = range(first, first + 5)
        places = shuffled(np.array(numbers, dtype=np.uint64), count, seed)
        assert places.tolist() == [plainly_shuffled(number, count, seed) for number in numbers]


def test_every_epoch_has_every_window_once_in_an_order_of_its_own() -> None:
    ramp, windows = (np.arange(513) // 2).astype(np.uint8), 256  # the value tells the window
    orders = [
        samples(ramp, range(epoch * windows, (epoch + 1) * windows), 2, seed)[0][:, 0].tolist()
        for seed in (0, 1)
        for epoch in range(3)
    ]
    assert all(sorted(order) == list(range(windows)) for order in orders)
    for one, other in itertools.combinations([list(range(windows)), *orders], 2):
        alike = sum(left == right for left, right in zip(one, other, strict=True))
        follow = set(itertools.pairwise(one)) & set(itertools.pairwise(other))
        assert alike < 10, "about one of them is in the same place"
        assert len(follow) < 10


def test_every_order_of_a_few_windows_comes_up() -> None:
    orders = shuffled(np.arange(4 * 2_400, dtype=np.uint64), 4, seed=0).reshape(-1, 4)
    counts = Counter(tuple(order) for order in orders.tolist())
    assert len(counts) == 24
    assert 60 < min(counts.values()) <= max(counts.values()) < 140, "about 100 each"


@pytest.mark.parametrize("ignored", [0.0, 0.25])
def test_targets_are_left_out_alike_however_many_ranks_there_are(ignored: float) -> None:
    inputs, targets = samples(TEXT, range(64), 50, seed=3, ignored=ignored)
    parts = [samples(TEXT, range(first, first + 16), 50, seed=3, ignored=ignored) for first in range(0, 64, 16)]
    assert torch.equal(torch.cat([part[1] for part in parts]), targets)
    share = (targets == IGNORED).float().mean().item()
    assert abs(share - ignored) < 0.03
    assert torch.equal(targets[targets != IGNORED], ((inputs + 1) % 256)[targets != IGNORED])


@pytest.mark.parametrize("dp_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("count", [1, 6, 8])
@pytest.mark.parametrize("multiple", [1, 3])
def test_every_number_of_ranks_validates_on_the_same_samples(dp_size: int, count: int, multiple: int) -> None:
    parts = [valid_samples(TEXT, count, 10, rank, dp_size, multiple) for rank in range(dp_size)]
    lengths = {len(targets) for _, targets in parts}
    assert len(lengths) == 1, "each rank takes part in every forward"
    assert lengths.pop() % multiple == 0
    inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
    counted = (targets != IGNORED).all(dim=1)
    assert counted.sum() == count
    assert (targets[~counted] == IGNORED).all()
    alone = valid_samples(TEXT, count, 10, 0, 1)
    assert torch.equal(inputs[counted], alone[0])
    assert torch.equal(targets[counted], alone[1])


def test_validation_reaches_from_the_first_to_the_last_byte() -> None:
    inputs, targets = valid_samples(TEXT, 8, 10, 0, 1)
    assert inputs[0, 0] == TEXT[0]
    assert targets[-1, -1] == TEXT[-1]


def test_text_that_is_too_short_is_refused() -> None:
    check_length(TEXT[:11], 10, "training")
    message = (
        r"the training part of the text: it has 10 bytes, but one .* takes seq_len \+ 1 = 11\n.*\n  try: a smaller"
    )
    with pytest.raises(ValueError, match=message):
        check_length(TEXT[:10], 10, "training")
