"""Byte-level text without a download, and batches that do not depend on how many ranks read them.

The text is cut into windows of `seq_len` tokens. Sample number `i` of a seed is always the same one of them. An epoch
is as many samples as there are windows: it has each of them once, in an order of its own. A step of a run uses the next
`batch_size` samples, and rank r of n that read different ones takes the r-th contiguous n-th of them. So 1, 2 or 64
ranks train on exactly the same global batches, and a run that goes on needs to know one number: how many samples it has
used.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hyper_parallel.core.common.errors import explain

Bytes = npt.NDArray[np.uint8]

# Parts of the standard library that are tables, tests or generated rather than text a person wrote.
_LEFT_OUT = frozenset(
    {
        *("__pycache__", "dist-packages", "site-packages"),
        *("idlelib", "lib2to3", "turtledemo", "test", "tests"),
        *("encodings", "pydoc_data"),
    }
)
VALID_EVERY = 10
_ROUNDS = 6  # of the network that shuffles; few windows need more than the usual four

IGNORED = -100
"""The target of a token that does not count."""


@dataclass(frozen=True)
class Corpus:
    """Text as bytes: one part to train on, one held back, split by file so that no file is in both.

    Args:
        train: bytes to train on.
        valid: bytes held back.
        files: how many files were read.
        source: where they came from, for people.
    """

    train: Bytes
    valid: Bytes
    files: int
    source: str


def load_corpus(path: str | None = None, pattern: str = "*.py", max_bytes: int = 4_000_000) -> Corpus:
    """Read text files in sorted order, up to about `max_bytes`; every tenth file is held back for validation.

    >>> load_corpus(max_bytes=200_000).source
    'the Python standard library'

    Every rank reads the same files in the same order. The result is kept for the next call with the same arguments.

    Args:
        path: a folder (searched with its subfolders) or one file; None means the Python standard library. A single
            file is split by position instead: its last tenth is held back.
        pattern: which files of the folder.
        max_bytes: stop adding files once this many bytes are read.

    Raises:
        ValueError: the path is missing, or holds too little text.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if path is None else Path(path).expanduser()
    return _read_corpus(root.absolute(), pattern, max_bytes, stdlib=path is None)


@lru_cache(maxsize=4)
def _read_corpus(root: Path, pattern: str, max_bytes: int, stdlib: bool) -> Corpus:
    if not root.exists():
        raise ValueError(f"no text at '{root}': no such file or folder\n  try: another [data] path, or leave it out")
    if root.is_file():
        text = np.frombuffer(root.read_bytes()[:max_bytes], dtype=np.uint8)
        cut = text.size - text.size // VALID_EVERY
        return Corpus(text[:cut], text[cut:], 1, str(root))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = count = 0
    for file in sorted(root.rglob(pattern), key=lambda f: f.relative_to(root).parts):
        if size >= max_bytes:
            break
        if not file.is_file() or (stdlib and _LEFT_OUT.intersection(file.relative_to(root).parts)):
            continue
        text_bytes = file.read_bytes()
        parts[count % VALID_EVERY == VALID_EVERY - 1].append(text_bytes)
        size, count = size + len(text_bytes), count + 1
    if not parts[1]:
        raise ValueError(
            f"found {count} file(s) that match '{pattern}' in '{root}'; "
            f"at least {VALID_EVERY} are needed, one in {VALID_EVERY} is held back for validation\n"
            "  try: another [data] path or pattern, or one large file"
        )
    train, valid = (np.frombuffer(b"".join(part), dtype=np.uint8) for part in parts)
    return Corpus(train, valid, count, "the Python standard library" if stdlib else str(root))


def _mix(index: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """Hash counters into evenly spread 64-bit numbers (splitmix64's finaliser, Steele et al. 2014)."""
    z = index * np.uint64(0x9E3779B97F4A7C15) + np.uint64((seed * 0xD1B54A32D192ED03 + 1) % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def shuffled(index: npt.NDArray[np.uint64], count: int, seed: int) -> npt.NDArray[np.int64]:
    """Find which of `count` windows each sample is: every `count` samples are all windows, in an order drawn anew.

    >>> shuffled(np.arange(10, dtype=np.uint64), count=5, seed=0).tolist()
    [3, 1, 2, 4, 0, 0, 2, 1, 3, 4]

    No order is kept anywhere. A Feistel network (Luby and Rackoff 1988) permutes the least 4**k numbers that are
    enough. What it makes of a number, it permutes again until that is below `count` (Black and Rogaway 2002).

    Args:
        index: numbers of samples, from 0.
        count: windows.
        seed: of the orders.
    """
    epoch, place = index // np.uint64(count), index % np.uint64(count)
    bits = np.uint64(max(1, -(-(count - 1).bit_length() // 2)))
    mask = (np.uint64(1) << bits) - np.uint64(1)
    keys = [_mix(epoch * np.uint64(_ROUNDS) + np.uint64(number), seed) for number in range(_ROUNDS)]
    again = np.ones(place.shape, dtype=bool)
    while again.any():
        left, right = place[again] >> bits, place[again] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key[again], seed) & mask)
        place[again] = left << bits | right
        again = place >= np.uint64(count)
    return place.astype(np.int64)


def _cut(text: Bytes, starts: npt.NDArray[np.int64], seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    windows = text[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64)
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())


def check_length(text: Bytes, seq_len: int, part: str) -> None:
    """Raise ValueError when `text` cannot hold one sequence of `seq_len` tokens and the token after it."""
    if text.size < seq_len + 1:
        blame = f"it has {text.size} bytes, but one sequence takes seq_len + 1 = {seq_len + 1}"
        asked, hint = f"cannot use the {part} part of the text", "a smaller seq_len, or more text"
        raise ValueError(explain(asked, blame, f"seq_len: {seq_len}", hint))


def samples(
    text: Bytes, indices: range, seq_len: int, seed: int, ignored: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the samples with these global numbers out of the text, in the orders of `seed`.

    >>> text = np.arange(100, dtype=np.uint8)
    >>> inputs, targets = samples(text, range(8, 12), seq_len=5, seed=0)
    >>> inputs.shape, bool((targets == inputs + 1).all())
    (torch.Size([4, 5]), True)

    Args:
        text: bytes to cut from.
        indices: global sample numbers.
        seq_len: tokens per sample.
        seed: of the order of each epoch.
        ignored: share of the targets that are `IGNORED`, drawn for each token of each sample.

    Returns:
        Inputs and targets (len(indices), seq_len); targets are the inputs moved by one.
    """
    check_length(text, seq_len, "chosen")
    numbers = np.arange(indices.start, indices.stop, dtype=np.uint64)
    inputs, targets = _cut(text, shuffled(numbers, (text.size - 1) // seq_len, seed) * seq_len, seq_len)
    if ignored:
        tokens = np.arange(indices.start * seq_len, indices.stop * seq_len, dtype=np.uint64)
        out = _mix(tokens, seed + 1).astype(np.float64) < ignored * 2.0**64
        targets.masked_fill_(torch.from_numpy(out).view_as(targets), IGNORED)
    return inputs, targets


def rank_part(used: int, batch_size: int, rank: int, ranks: int) -> range:
    """Name the samples that one rank takes in one step.

    >>> rank_part(used=32, batch_size=16, rank=1, ranks=4)
    range(36, 40)

    Args:
        used: samples that the steps before this one have used, over all ranks.
        batch_size: sequences per step over all ranks; a multiple of `ranks`.
        rank: this rank's place among those that read different samples.
        ranks: how many of those there are.
    """
    assert batch_size % ranks == 0, "the config was checked before any rank started"
    local = batch_size // ranks
    first = used + rank * local
    return range(first, first + local)


def valid_samples(
    text: Bytes, count: int, seq_len: int, rank: int, ranks: int, multiple: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut this rank's part of `count` evenly spaced validation samples.

    Every rank gets the same number of sequences, because every rank must take part in every forward: what is more than
    `count` repeats the last sample, with targets that are all `IGNORED`.

    Args:
        text: bytes to cut from.
        count: samples over all ranks.
        seq_len: tokens per sample.
        rank: this rank's place among those that read different samples.
        ranks: how many of those there are.
        multiple: of which the number of a rank's sequences is one.

    Returns:
        Inputs and targets (n, seq_len).
    """
    check_length(text, seq_len, "validation")
    local = -(-count // (ranks * multiple)) * multiple
    index = np.arange(rank * local, (rank + 1) * local)
    starts = np.minimum(index, count - 1) * (text.size - seq_len - 1) // max(count - 1, 1)
    inputs, targets = _cut(text, starts.astype(np.int64), seq_len)
    targets[torch.from_numpy(index >= count)] = IGNORED
    return inputs, targets
