"""Text as bytes or as a tokenizer's ids, and batches that do not depend on how many ranks read them.

The text is cut into windows of `seq_len` tokens. Sample number `i` of a seed is always the same one of them. An epoch
is as many samples as there are windows: it has each of them once, in an order of its own. A step of a run uses the next
`batch_size` samples, and rank r of n that read different ones takes the r-th contiguous n-th of them. So 1, 2 or 64
ranks train on exactly the same global batches, and a run that goes on needs to know one number: how many samples it has
used.
"""

from __future__ import annotations

import base64
import fnmatch
import io
import itertools
import json
import os
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from hyper_parallel.core.common.checks import check, read_int
from hyper_parallel.core.common.errors import InvalidType, InvalidValue, explain
from hyper_parallel.models.chat_template import ChatTemplate
from hyper_parallel.models.hf_folder import check_normalizers, load_by_transformers
from hyper_parallel.trainer.config import Config, DataConfig

Tokens = npt.NDArray[np.uint8] | npt.NDArray[np.int32]

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
    """Text as token ids: one part to train on, one held back, split by document so that none is in both.

    Args:
        train: ids to train on; -1 - id for those that are read, and do not count as targets.
        valid: ids held back, likewise.
        documents: how many were read: files, or records of files.
        source: where they came from, for people.
        has_bytes: whether tokens are the bytes of the text.
        is_cut: whether reading stopped at `max_bytes`.
    """

    train: Tokens
    valid: Tokens
    documents: int
    source: str
    has_bytes: bool = True
    is_cut: bool = False

    def targets(self) -> int:
        """Return how many of the tokens to train on count as targets."""
        return int((self.train >= 0).sum())

    def content(self) -> dict[str, Any]:
        """Return the size and checksum of the text to train on, by which a run that goes on knows it."""
        return {"tokens": self.train.size, "crc32": f"{zlib.crc32(self.train.data):08x}"}

    def largest(self) -> int:
        """Return the largest id."""
        parts = self.train, self.valid
        return max(max(int(part.max(initial=0)), -1 - int(part.min(initial=0))) for part in parts)


def windows_that_count(text: Tokens, seq_len: int) -> npt.NDArray[np.int64]:
    """Return the numbers of a text's windows of `seq_len` tokens that have a target: in a longer prompt, none has."""
    count = (text.size - 1) // seq_len
    counts = text[1 : count * seq_len + 1].reshape(count, seq_len) >= 0
    return np.flatnonzero(counts.any(axis=1))


def load_corpus(data: DataConfig | None = None) -> Corpus:
    """Read documents in sorted order, up to about `max_bytes`; every tenth one is held back for validation.

    >>> load_corpus(DataConfig(max_bytes=200_000)).source
    'the Python standard library'

    A document is a text file, or a record of a .jsonl or .parquet file. Every rank reads the same ones in the same
    order. The result is kept for the next call with the same arguments.

    Args:
        data: where the text is, and what makes tokens of it. A single text file is split by position instead: its last
            tenth is held back.

    Raises:
        ValueError: the path is missing, holds too little text, a compressed file, or records without text; the
            tokenizer cannot be loaded, or has no template for a conversation.
    """
    data = data or DataConfig()
    root = Path(sysconfig.get_paths()["stdlib"]) if data.path is None else Path(os.path.expanduser(data.path))
    try:  # what is drawn afterwards is not part of what is read
        return _read_corpus(root.absolute(), replace(data, ignored=0.0))
    except OSError as error:
        hint = "files that can be read, or another [data] path or pattern"
        raise InvalidValue(f"cannot read the text at '{root}'", "a file fails", f"seen: {error}", hint) from None


@lru_cache(maxsize=4)
def _read_corpus(root: Path, data: DataConfig) -> Corpus:
    if not root.exists():
        asked, hint = f"no text at '{root}'", "another [data] path, or leave it out"
        raise InvalidValue(asked, "no such file or folder", f"path: {root}", hint)
    if not (root.is_file() or root.is_dir()):  # a pipe could be read once, and may never answer
        asked, hint = f"cannot read the text at '{root}'", "a file with what comes out of it"
        raise InvalidValue(asked, "it is neither a file nor a folder", f"path: {root}", hint)
    has_bytes, encode = data.tokenizer is None, _encoder(data.tokenizer)
    if root.is_file() and root.suffix not in _RECORDS:
        content = _start_of(root, data.max_bytes + 1)
        text = encode(_Text([_Span(content[: data.max_bytes], True)]))
        cut = text.size - text.size // VALID_EVERY
        return Corpus(text[:cut], text[cut:], 1, str(root), has_bytes, len(content) > data.max_bytes)
    parts: tuple[list[Tokens], list[Tokens]] = ([], [])
    size = count = 0
    for document in _documents(root, data):
        parts[count % VALID_EVERY == VALID_EVERY - 1].append(encode(document))
        size, count = size + len(document.content()), count + 1
        if size >= data.max_bytes:
            break
    if not parts[1]:
        found = f"{count} record(s)" if root.is_file() else f"{count} file(s) that match '{data.pattern}'"
        blame = f"at least {VALID_EVERY} are needed, one in {VALID_EVERY} is held back for validation"
        there = {file.suffix for file in root.rglob("*") if file.is_file()} if root.is_dir() else set[str]()
        other = (f"*{suffix}" for suffix in (*_RECORDS, ".txt", ".md") if suffix in there)
        pattern = next((each for each in other if each != data.pattern), None)
        hint = "another [data] path or pattern, or more text"
        hint = f"[data] pattern = '{pattern}' (--data-pattern)" if pattern else hint
        raise InvalidValue(f"found {found} in '{root}'", blame, f"path: {root}", hint)
    train, valid = (cast("Tokens", np.concatenate(part)) for part in parts)
    source = "the Python standard library" if data.path is None else str(root)
    return Corpus(train, valid, count, source, has_bytes, size >= data.max_bytes)


_RECORDS = (".jsonl", ".parquet")
_BZIP2 = tuple(b"BZh%d" % level for level in range(1, 10))  # a text may well begin with BZh
_PACKED = (b"\x1f\x8b", *_BZIP2, b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")  # gzip, bzip2, xz, zstd, zip
_UTF16 = (b"\xff\xfe", b"\xfe\xff")  # as PowerShell writes what is redirected to a file


class _Span(NamedTuple):
    """Part of a document's text, and whether its tokens count as targets."""

    text: bytes
    counts: bool


class _Text(NamedTuple):
    """A document's text.

    Args:
        spans: its parts, in order.
        is_rendered: whether a template wrote it, with all its special tokens.
    """

    spans: list[_Span]
    is_rendered: bool = False

    def content(self) -> bytes:
        """Return the parts as one."""
        return b"".join(span.text for span in self.spans)


_Encode = Callable[[_Text], Tokens]


def _documents(root: Path, data: DataConfig) -> Iterator[_Text]:
    """Read the files of a folder, or the records of a file."""
    is_left_out = _LEFT_OUT if data.path is None else frozenset[str]()
    for file in _files(root, data.pattern, is_left_out) if root.is_dir() else iter([root]):
        if file.suffix in _RECORDS:
            for number, record in _records(file):
                yield _text(f"cannot read record {number} of {file}", record, data)
        else:
            yield _Text([_Span(_start_of(file, data.max_bytes), True)])


def _start_of(file: Path, size: int) -> bytes:
    """Read so many bytes of a file, and no more: it may be larger than memory."""
    with file.open("rb") as content:
        text = content.read(size)
    blame, hint = "it is compressed", "the file that comes out when it is unpacked"
    if text.startswith(_UTF16):
        blame, hint = "it is UTF-16", f"iconv -f UTF-16 -t UTF-8 {file.name}"
    if text.startswith((*_PACKED, *_UTF16)):
        raise InvalidValue(f"cannot read {file}", blame, f"its first bytes: {text[:6]!r}", hint)
    return text


def _files(folder: Path, pattern: str, left_out: frozenset[str]) -> Iterator[Path]:
    """Find files as `folder.rglob(pattern)`, by the parts of their paths in order, and look no further than is asked.

    A reader that stops at its first bytes would wait for a large folder, otherwise.
    """
    if pattern != Path(pattern).name or "**" in pattern:  # of several parts
        for file in sorted(folder.rglob(pattern), key=lambda f: f.relative_to(folder).parts):
            if file.is_file() and not left_out.intersection(file.relative_to(folder).parts):
                yield file
        return
    try:
        with os.scandir(folder) as found:
            entries = sorted((entry for entry in found if entry.name not in left_out), key=lambda entry: entry.name)
    except PermissionError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(folder / entry.name, pattern, left_out)
        elif fnmatch.fnmatch(entry.name, pattern) and entry.is_file():
            yield folder / entry.name


def _records(file: Path) -> Iterator[tuple[int, Any]]:
    """Read the records of a file, with their numbers from 1."""
    if file.suffix == ".jsonl":
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    if line.strip():
                        yield number, json.loads(line)
                except (ValueError, RecursionError) as error:  # the latter of brackets within brackets
                    hint = "one JSON object in each line"
                    asked, seen = f"cannot read record {number} of {file}", f"line: {line.strip()[:100]!r}"
                    raise InvalidValue(asked, f"it is no JSON: {error}", seen, hint) from None
        return
    try:
        from pyarrow import parquet
    except ImportError as error:
        hint = "pip install 'hyper_parallel[text]'"
        raise InvalidValue(f"cannot read {file}", "pyarrow is not installed", f"seen: {error}", hint) from None
    try:
        table = parquet.ParquetFile(file)
    except (ValueError, OSError) as error:
        hint = "another copy of it"
        raise InvalidValue(f"cannot read {file}", "it is no parquet file", f"seen: {error}", hint) from None
    records = (record for batch in table.iter_batches(batch_size=256) for record in batch.to_pylist())
    yield from enumerate(records, start=1)


def _text(asked: str, record: Any, data: DataConfig) -> _Text:
    """Return the text of a record: a conversation, a prompt with its completion, or plain text."""
    known = record if isinstance(record, dict) else {}
    if known.get("messages") is not None:
        return _conversation(asked, known["messages"], data)
    names = ("prompt", "completion") if "completion" in known else ("text",)
    texts = [known.get(name) for name in names]
    if not all(isinstance(text, str) for text in texts):
        blame = f"it has no text in {' and '.join(map(repr, names))}"
        seen = f"keys: {', '.join(map(str, known)) or type(record).__name__}"
        hint = (
            '{"text": "..."}, {"prompt": "...", "completion": "..."} or {"messages": [{"role": ..., "content": ...}]}'
        )
        raise InvalidValue(asked, blame, seen, hint)
    counts = [name != "prompt" or not data.mask_prompts for name in names]
    return _Text([_Span(_utf8(str(text)), each) for text, each in zip(texts, counts, strict=True)])


def _utf8(text: str) -> bytes:
    """Return the bytes of text; half a surrogate pair, which JSON may hold and UTF-8 may not, is a U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def _conversation(asked: str, messages: Any, data: DataConfig) -> _Text:
    """Write a conversation as the tokenizer's template has it; what the assistant says counts."""
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in messages
    ):
        blame, hint = "messages are objects with a role and content", '[{"role": "user", "content": "..."}, ...]'
        raise InvalidValue(asked, blame, f"messages: {messages!r}"[:200], hint)
    if data.tokenizer is None:
        blame, hint = "a conversation is written by a tokenizer's template", "[data] tokenizer (--tokenizer FOLDER)"
        raise InvalidValue(asked, blame, "messages, and no tokenizer", hint)
    template = load_template(data.tokenizer)

    def render(some: Any, **flags: Any) -> str:
        try:
            return template.render(some, **flags)
        except ValueError as error:  # templates raise errors of their own
            hint, seen = "a tokenizer with a chat template, and messages that it takes", f"messages: {messages!r}"[:200]
            raise InvalidValue(asked, f"its template fails: {error}", seen, hint) from None

    whole = render(messages)
    spans, done = list[_Span](), 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or not data.mask_prompts:
            continue
        before = render(messages[:index], add_generation_prompt=True)
        content = message["content"].strip()
        place = whole.find(content, len(before)) if whole.startswith(before) else -1
        if place < 0:
            blame = f"the template writes message {index} in another way once others follow"
            hint = "[data] mask_prompts = false, or a tokenizer with another template"
            raise InvalidValue(asked, blame, f"message: {message!r}"[:200], hint)
        alone = render(messages[: index + 1])
        if whole.startswith(alone) and alone.startswith(before):  # content may be in the mark: "end" in "<|end|>"
            end = len(alone)
        else:
            ending = alone[alone.rfind(content) + len(content) :]  # the mark that ends a turn
            end = place + len(content)
            end += len(ending) if whole.startswith(ending, end) else 0
        spans += [_Span(_utf8(whole[done : len(before)]), False), _Span(_utf8(whole[len(before) : end]), True)]
        done = end
    return _Text([*spans, _Span(_utf8(whole[done:]), not data.mask_prompts)], is_rendered=True)


def _encode_bytes(text: _Text) -> Tokens:
    if all(span.counts for span in text.spans):
        return np.frombuffer(text.content(), dtype=np.uint8)
    ids = np.frombuffer(text.content(), dtype=np.uint8).astype(np.int32)
    return _marked(ids, np.repeat([span.counts for span in text.spans], [len(span.text) for span in text.spans]))


def _encoder(folder: str | None) -> _Encode:
    """Return what makes ids of text; a document that no template wrote ends with a tokenizer's token for that."""
    if folder is None:
        return _encode_bytes
    tokenizer = load_tokenizer(folder)

    def encode(text: _Text) -> Tokens:
        parts = [span.text.decode(errors="replace") for span in text.spans]
        options = {"add_special_tokens": not text.is_rendered, "return_offsets_mapping": True, "verbose": False}
        found = tokenizer("".join(parts), **options)
        ids, places = found["input_ids"], [(start, max(start, end - 1)) for start, end in found["offset_mapping"]]
        if not text.is_rendered and tokenizer.eos_token_id is not None:
            has_end = ids[-1:] == [tokenizer.eos_token_id]  # of which some tokenizers say that it is at 0
            ids, places = ids if has_end else [*ids, tokenizer.eos_token_id], places[:-1] if has_end else places
            places = [*places, (sum(map(len, parts)),) * 2]
        # A token may begin in a prompt and end in what completes it, as " Paris" after "The capital is ".
        ends = np.cumsum([len(part) for part in parts])
        where = np.searchsorted(ends, np.array(places).reshape(-1, 2), side="right").clip(max=len(parts) - 1)
        counts = np.array([span.counts for span in text.spans])[where].any(axis=1)
        return _marked(np.array(ids, dtype=np.int32), counts)

    return encode


def _marked(ids: npt.NDArray[np.int32], counts: npt.NDArray[np.bool_]) -> Tokens:
    return np.where(counts, ids, -1 - ids).astype(np.int32)


@lru_cache(maxsize=4)
def load_tokenizer(folder: str) -> Any:
    """Load a tokenizer of transformers; nothing is fetched.

    Raise ValueError if `folder` has none, or one that cannot say where in the text its tokens are.
    """
    asked = f"cannot load the tokenizer {folder}"
    hint = "a folder that AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER) has written"
    check_normalizers(asked, Path(folder))
    tokenizer = load_by_transformers(asked, "AutoTokenizer", folder, hint)
    if not tokenizer.is_fast:
        blame = "it does not say where in the text its tokens are"
        raise InvalidValue(asked, blame, f"class: {type(tokenizer).__name__}", f"{hint}, with tokenizer.json")
    return tokenizer


@lru_cache(maxsize=4)
def load_template(folder: str) -> ChatTemplate:
    """Load the chat template of the tokenizer in a folder; raise ValueError as `load_tokenizer` does."""
    return ChatTemplate(load_tokenizer(folder))


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


def _cut(text: Tokens, starts: npt.NDArray[np.int64], seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    windows = text[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64)
    inputs, targets = windows[:, :-1], windows[:, 1:]
    inputs, targets = np.where(inputs < 0, -1 - inputs, inputs), np.where(targets < 0, IGNORED, targets)
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def check_length(text: Tokens, seq_len: int, part: str) -> None:
    """Raise ValueError when `text` cannot hold one sequence of `seq_len` tokens and the token after it."""
    if text.size < seq_len + 1:
        unit = "bytes" if text.dtype == np.uint8 else "tokens"
        blame = f"it has {text.size} {unit}, but one sequence takes seq_len + 1 = {seq_len + 1}"
        asked, hint = f"cannot use the {part} part of the text", "a smaller seq_len, or more text"
        raise InvalidValue(asked, blame, f"seq_len: {seq_len}", hint)


def samples(
    text: Tokens,
    indices: range,
    seq_len: int,
    seed: int,
    ignored: float = 0.0,
    windows: npt.NDArray[np.int64] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the samples with these global numbers out of the text, in the orders of `seed`.

    >>> text = np.arange(100, dtype=np.uint8)
    >>> inputs, targets = samples(text, range(8, 12), seq_len=5, seed=0)
    >>> inputs.shape, bool((targets == inputs + 1).all())
    (torch.Size([4, 5]), True)

    Args:
        text, indices: ids to cut from, see `Corpus`, and global sample numbers.
        seq_len, seed: tokens per sample, and the seed of the order of each epoch.
        ignored: share of the targets that are `IGNORED`, drawn for each token of each sample.
        windows: numbers of those to cut out; None: all.

    Returns:
        Inputs and targets (len(indices), seq_len); targets are the inputs moved by one.
    """
    check_length(text, seq_len, "chosen")
    numbers = np.arange(indices.start, indices.stop, dtype=np.uint64)
    places = shuffled(numbers, (text.size - 1) // seq_len if windows is None else len(windows), seed)
    inputs, targets = _cut(text, (places if windows is None else windows[places]) * seq_len, seq_len)
    if ignored:
        tokens = np.arange(indices.start * seq_len, indices.stop * seq_len, dtype=np.uint64)
        out = _mix(tokens, seed + 1).astype(np.float64) < ignored * 2.0**64
        targets.masked_fill_(torch.from_numpy(out).view_as(targets), IGNORED)
    return inputs, targets


def rank_part(used: int, batch_size: int, rank: int, ranks: int) -> range:
    """Name the samples that one rank takes in one step.

    >>> rank_part(used=32, batch_size=16, rank=1, ranks=4)
    range(36, 40)

    The steps before this one have `used` samples of all ranks. `rank` counts the `ranks` that read different samples,
    over which `batch_size` is split.
    """
    assert batch_size % ranks == 0, "the config was checked before any rank started"
    local = batch_size // ranks
    first = used + rank * local
    return range(first, first + local)


def valid_samples(
    text: Tokens, count: int, seq_len: int, rank: int, ranks: int, multiple: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut this rank's part of `count` evenly spaced validation samples: of a text with prompts, those with a target.

    Every rank gets the same number of sequences, because every rank must take part in every forward: what is more than
    `count` repeats the last sample, with targets that are all `IGNORED`.

    Return inputs and targets (n, seq_len), where n is a multiple of `multiple`; see also `samples` and `rank_part`.
    """
    check_length(text, seq_len, "validation")
    local = -(-count // (ranks * multiple)) * multiple
    index = np.arange(rank * local, (rank + 1) * local)
    windows = windows_that_count(text, seq_len)
    is_all = len(windows) == (text.size - 1) // seq_len
    last = text.size - seq_len - 1 if is_all else len(windows) - 1
    places = (np.minimum(index, count - 1) * last // max(count - 1, 1)).astype(np.int64)
    inputs, targets = _cut(text, places if is_all else windows[places] * seq_len, seq_len)
    targets[torch.from_numpy(index >= count)] = IGNORED
    return inputs, targets


class LoaderBatches:
    """Batches of all ranks together, from a loader such as torchdata's StatefulDataLoader; it begins anew at its end.

    Every rank has a loader of its own that returns the same batches, and takes its sequences of each. So a run goes on
    in the middle of the data whatever its degrees.

    Args:
        make: returns the loader. Its batches are pairs of inputs and targets, `IGNORED` where they do not count; or
            mappings of "input_ids" and "labels" as transformers has them, -100 where they do not count and not moved by
            one. Each int64 (batch_size, seq_len).
        batch_size: sequences of a batch.
        seq_len: tokens of a sequence.
        vocab_size: tokens that the model knows.

    Raises:
        TypeError: what `make` returns cannot be iterated over.
    """

    def __init__(self, make: Callable[[], Iterable[Any]], batch_size: int, seq_len: int, vocab_size: int) -> None:
        loader: Any = make()
        if not isinstance(loader, Iterable):
            hint, seen = "train(config, data=lambda: StatefulDataLoader(...))", f"returned: {type(loader).__name__}"
            raise InvalidType("cannot train on this data", "what data() returns has no batches", seen, hint)
        self.loader: Any = loader
        self.shape, self.vocab_size = (batch_size, seq_len), vocab_size
        self._batches: Iterator[Any] = iter(())

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets (batch_size, seq_len) of the next batch.

        Raises:
            ValueError: a batch of another form, with tokens that the model does not know, or no batch at all.
        """
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self.loader)
            batch = next(self._batches, None)
        if batch is None:
            hint = "a loader that can be iterated over again"
            raise InvalidValue("cannot train on this data", "the loader has no batch", f"{self.loader!r}", hint)
        asked, hint = "cannot train on this batch", f"(inputs, targets) or input_ids and labels, int64 {self.shape}"
        if isinstance(batch, Mapping):
            found = [batch.get("input_ids"), batch.get("labels", batch.get("input_ids"))]
        else:
            found = list(batch) if isinstance(batch, (tuple, list)) else [batch]
        if any(torch.is_tensor(x) and x.dim() and 0 < len(x) < self.shape[0] for x in found):
            hint += "; drop_last=True of a DataLoader leaves out a last batch that is smaller"
        seen = ", ".join(f"{tuple(x.shape)} {x.dtype}" if torch.is_tensor(x) else type(x).__name__ for x in found)
        if not all(torch.is_tensor(x) and x.dtype == torch.int64 and tuple(x.shape) == self.shape for x in found):
            raise InvalidValue(asked, "the loader returns batches of another form", f"seen: {seen}", hint)
        if len(found) != 2:
            raise InvalidValue(asked, "a batch is a pair", f"seen: {seen}", hint)
        inputs, targets = found
        if isinstance(batch, Mapping):
            mask = batch.get("attention_mask")
            if mask is not None and bool((mask[:, 1:] > mask[:, :-1]).any()):
                blame, hint = "sequences are padded on the left, where the model would read it", "padding_side='right'"
                raise InvalidValue(asked, blame, f"attention_mask: {mask[0].tolist()}"[:200], hint)
            if mask is not None and "labels" not in batch:
                targets = targets.masked_fill(mask == 0, IGNORED)  # padding is no text
            targets = torch.nn.functional.pad(targets[:, 1:], (0, 1), value=IGNORED)
        ids = torch.cat([inputs, targets.masked_fill(targets == IGNORED, 0)])
        least, most = int(ids.min()), int(ids.max())
        if least < 0 or most >= self.vocab_size:
            blame = f"it has token {least if least < 0 else most}, and model.vocab_size is {self.vocab_size}"
            raise InvalidValue(asked, blame, f"ids: {least} to {most}", f"ids from 0, targets also {IGNORED}")
        return inputs, targets

    def state(self) -> str | None:
        """Return the loader's state as text; None if it has no `state_dict`."""
        return state_text(self.loader.state_dict()) if hasattr(self.loader, "state_dict") else None

    def go_on(self, state: str | None, batches: int) -> None:
        """Go on after so many batches: by the loader's `state`, or by reading past them where that is None."""
        if state is not None and hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(state_from(state))
            return
        for _ in range(batches):
            self.next()


class RecordLoader:
    """Batches of records that are read as they are needed, for data larger than memory; begins anew at its end.

        def records():
            return RecordLoader(load_dataset("json", data_files="*.jsonl", split="train", streaming=True), config)

        train(config, data=records)

    Records are put one after the other and cut into windows, in the order in which they come, or in one that is drawn
    for each pass, and is the same whatever the ranks. A run that goes on takes the state of the records, where they
    have a `state_dict`, as those of `datasets` that stream; else it passes over those that were used.

    Args:
        records: can be iterated over more than once; each has a text, a completion or messages, as those of a file.
        config: the run: tokenizer, masks, the size of a batch, and the seed of the orders.
        shuffle: so many records at a time are put in another order: the first so many, then the next. A stream keeps
            them in memory; of a list, or a dataset with a length, only those are read that are due, and its length, or
            more, shuffles it as a whole. 0: the order in which they come.

    Raises:
        TypeError: records that cannot be iterated over; shuffle is no int.
        ValueError: the tokenizer cannot be loaded; when read, a record of another form.
    """

    def __init__(self, records: Iterable[Any], config: Config, *, shuffle: int = 0) -> None:
        asked, hint = "cannot read records", "a list of them, or a dataset of one split: split='train'"
        check(asked, "iterable", hint, records=records)
        read_int(asked, "shuffle", shuffle, 0)
        self.records: Any = records
        self.data, self.shape = config.data, config.batch_shape
        self._encode = _encoder(config.data.tokenizer)
        self._read, self._tokens = 0, list[Tokens]()  # records of this pass, and tokens that were in no batch yet
        self._knows_its_place = hasattr(records, "load_state_dict")
        self._begin = self._inner_state()
        self._before, self._after = self._begin, self._begin  # states of the records around the block that is read
        self._passes, self._seed, self._at_once = 0, config.seed_of(), shuffle or 1

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield inputs and targets (batch_size, seq_len), from where it is; without end, unless there is no record.

        Batches without a target, in the middle of a prompt that is longer, are left out.

        Raises:
            ValueError: a record of another form, or a pass in which no token counts as a target.
        """
        batch, seq_len = self.shape
        starts = np.arange(batch, dtype=np.int64) * seq_len
        has_some = True
        while has_some:
            has_some = has_targets = self._read > 0
            for record in self._remaining():
                has_some, self._read = True, self._read + 1
                text = _text(f"cannot read record {self._read} of the data", record, self.data)
                self._tokens.append(self._encode(text))
                has_targets = has_targets or bool((self._tokens[-1] >= 0).any())
                while sum(map(len, self._tokens)) > batch * seq_len:
                    tokens = cast("Tokens", np.concatenate(self._tokens))
                    self._tokens = [tokens[batch * seq_len :]]
                    if (tokens[1 : batch * seq_len + 1] >= 0).any():
                        yield _cut(tokens, starts, seq_len)
            if has_some and not has_targets:
                asked, blame = "cannot train on the records", "none of their tokens counts as a target"
                hint = "records with a completion, or mask_prompts = false"
                raise InvalidValue(asked, blame, f"records: {self._read}", hint)
            self._read, self._passes = 0, self._passes + 1
            if self._knows_its_place:  # datasets begins where it was loaded, whenever it is iterated over
                self._load(self._begin)

    def _remaining(self) -> Iterator[Any]:
        """Yield the records of this pass that are left, block by block."""
        size, block = self._at_once, self._read // self._at_once
        done = self._read % size
        is_indexed = hasattr(self.records, "__getitem__") and hasattr(self.records, "__len__")
        source: Iterator[Any] = iter(()) if is_indexed else iter(self.records)
        if not self._knows_its_place:  # else it begins where it was loaded
            source = itertools.islice(source, block * size, None)
        while True:
            some: Any = list(itertools.islice(source, size))
            # datasets does not know where it is between a state that is loaded and the first record after it.
            self._before, self._after = self._after, self._inner_state()
            if is_indexed:
                some = range(block * size, min((block + 1) * size, len(self.records)))
            if done >= len(some):
                return
            for place in self._order(block, len(some))[done:].tolist():
                yield self.records[some[place]] if is_indexed else some[place]
            block, done = block + 1, 0

    def _order(self, block: int, count: int) -> npt.NDArray[np.int64]:
        """Return the order of a block of records in this pass."""
        if self._at_once == 1:
            return np.arange(count)
        first = ((self._passes << 20) + block) * count
        return shuffled(np.arange(first, first + count, dtype=np.uint64), count, self._seed)

    def _load(self, state: Any) -> None:
        self.records.load_state_dict(state)
        self._before = self._after = state

    def _inner_state(self) -> Any:
        return self.records.state_dict() if self._knows_its_place else None

    def state_dict(self) -> dict[str, Any]:
        """Return where it is: in the records, and the tokens that were read and are in no batch yet."""
        left = np.concatenate([np.empty(0, dtype=np.int32), *self._tokens]).astype(np.int32)
        # Within a block its records are read again: which of them are due follows from their number.
        place = self._before if self._read % self._at_once else self._after
        order = [self._at_once, self._seed if self._at_once > 1 else 0]
        tokens = torch.from_numpy(left)
        return {"read": self._read, "passes": self._passes, "tokens": tokens, "records": place, "order": order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another one's `state_dict` was; raise ValueError for the state of something else."""
        asked = "cannot go on in the records"
        mine = self.state_dict()
        state = {"order": mine["order"], **state}  # those from before there was an order do not say
        if state.keys() != mine.keys() or not torch.is_tensor(state["tokens"]):
            hint = "what state_dict() of another RecordLoader returned"
            raise InvalidValue(asked, "the state is of something else", f"state: {state!r}"[:200], hint)
        if state["order"] != mine["order"]:
            then, now = (f"shuffle={size}, seed={seed}" for size, seed in (state["order"], mine["order"]))
            asked = "cannot go on in the order of before"
            blame = "it is another one, so that some records of this pass come again, and others not at all"
            warnings.warn(explain(asked, blame, f"then: {then}   now: {now}", then), stacklevel=2)
        self._read, self._passes, self._tokens = state["read"], state["passes"], [state["tokens"].numpy()]
        if state["records"] is not None:
            self._load(state["records"])


def state_text(state: Any) -> str:
    """Write a loader's or scheduler's state, of plain values and tensors, as text for a checkpoint.

    >>> state_from(state_text({"epoch": 1}))
    {'epoch': 1}
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def state_from(text: str) -> Any:
    """Read what `state_text` has written; no code of it is run."""
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
