"""The record of a checkpoint, `checkpoint.json`: what is in it and where; without it a folder is no checkpoint."""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.core.checkpoint.errors import CheckpointError
from hyper_parallel.core.checkpoint.files import DTYPES, decoded, open_plain
from hyper_parallel.core.checkpoint.shards import BETWEEN

NAME = "checkpoint.json"
VERSION = 1
_BEGIN = '{"format": "hyper_parallel checkpoint", "version": %d, "crc32": "%08x", "content":\n'
_END = "\n}\n"
_MOST_SPLIT = 12  # dims of a tensor; a mesh of so many axes of two ranks has 4096


@dataclass(frozen=True)
class Box:
    """Part of a tensor as it lies in a file: `at` is the place of its first byte in file number `file`."""

    file: int
    at: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint: its dtype, its global shape, and the boxes that make it up."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...] = ()


@dataclass(frozen=True)
class FileEntry:
    """A data file: its size in bytes and the checksum (CRC-32) of each block of it."""

    name: str
    size: int
    crcs: tuple[int, ...]


@dataclass(frozen=True)
class CheckpointMetadata:
    """What a checkpoint says of itself.

    Attributes:
        step: the number it was saved under, if any.
        world_size: ranks that saved it.
        extra: the values that are no tensors.
        tensors: the tensors by name.
        per_rank: the tensors that each rank had for itself, by name, then by rank.
        files: the data files.
        attempt: what tells it from other checkpoints with the same names in them.
        block: bytes under one checksum.
        run: the training that saved it, however often it was started; None if it was saved on its own.
    """

    step: int | None
    world_size: int
    extra: Any
    tensors: Mapping[str, TensorEntry]
    per_rank: Mapping[str, Mapping[int, TensorEntry]]
    files: tuple[FileEntry, ...]
    attempt: str
    block: int
    by_key: Mapping[str, TensorEntry] = field(repr=False, default_factory=dict)
    run: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.size for file in self.files)


def to_text(
    *,
    attempt: str,
    step: int | None,
    world_size: int,
    block: int,
    extra: str,
    entries: Mapping[str, TensorEntry],
    files: tuple[FileEntry, ...],
    run: str | None = None,
) -> str:
    """Return the text of a record; `extra` is JSON already, `entries` are by the keys that the data files use."""
    content = {
        "attempt": attempt,
        "run": run,
        "step": step,
        "world_size": world_size,
        "block": block,
        "files": [{"name": file.name, "bytes": file.size, "crc32": file.crcs} for file in files],
        "tensors": {
            key: {
                "dtype": str(entry.dtype).removeprefix("torch."),
                "shape": entry.shape,
                "boxes": [[box.file, box.at, box.offsets, box.sizes] for box in entry.boxes],
            }
            for key, entry in entries.items()
        },
    }
    text = f'{json.dumps(content)[:-1]}, "extra": {extra}}}'
    return _BEGIN % (VERSION, zlib.crc32(text.encode())) + text + _END


def read_record(folder: Path) -> CheckpointMetadata:
    """Read and check the record of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged, or of another version of this library.
    """
    asked = f"cannot load the checkpoint {folder}"
    path = folder / NAME
    try:
        with open(open_plain(path), "rb") as file:
            raw = file.read()
    except OSError as error:
        blame = f"it has no readable {NAME}, which is written when all else is complete"
        there = sorted(entry.name for entry in folder.iterdir())[:8] if folder.is_dir() else "no such folder"
        seen = f"{error.strerror or error}: {path}\n  there is: {there}"
        raise CheckpointError(asked, blame, seen, "Checkpointer(root).latest()") from None
    try:
        whole = json.loads(raw)
        format_, version, crc = whole["format"], whole["version"], whole["crc32"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(asked, path, f"it is no such record: {type(error).__name__}: {error}") from None
    if format_ != "hyper_parallel checkpoint" or version != VERSION:
        blame = f"{NAME} is of format {format_!r}, version {version!r}"
        seen = f"this library reads version {VERSION}: {path}"
        raise CheckpointError(asked, blame, seen, "the version of hyper_parallel that wrote it")
    text = raw.decode("ascii", "replace")
    content = text[text.find("\n") + 1 : -len(_END)]
    if _BEGIN % (VERSION, zlib.crc32(content.encode())) + content + _END != text:
        raise _damaged(asked, path, f"its checksum is {zlib.crc32(content.encode()):08x}, and should be {crc}")
    try:
        return _parsed(json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(asked, path, f"it lacks something: {type(error).__name__}: {error}") from None


def _parsed(content: dict[str, Any]) -> CheckpointMetadata:
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    entries = {
        key: TensorEntry(
            dtypes[entry["dtype"]],
            tuple(entry["shape"]),
            tuple(Box(file, at, tuple(offsets), tuple(sizes)) for file, at, offsets, sizes in entry["boxes"]),
        )
        for key, entry in content["tensors"].items()
    }
    tensors: dict[str, TensorEntry] = {}
    per_rank: dict[str, dict[int, TensorEntry]] = {}
    for key, entry in entries.items():
        name, between, rank = key.partition(BETWEEN)
        if between:
            per_rank.setdefault(name, {})[int(rank.removeprefix("rank "))] = entry
        else:
            tensors[name] = entry
    files = tuple(FileEntry(_name(file["name"]), file["bytes"], tuple(file["crc32"])) for file in content["files"])
    _check_files(files, content["block"], content["world_size"])
    for key, entry in entries.items():
        _check_boxes(key, entry, files)
    _check_bytes(entries)
    run, step, attempt = content.get("run"), content["step"], content["attempt"]
    if type(attempt) is not str or type(run) not in (str, type(None)) or type(step) not in (int, type(None)):
        raise ValueError(f"attempt {attempt!r} of run {run!r} at step {step!r}")
    return CheckpointMetadata(
        step=step,
        world_size=content["world_size"],
        extra=decoded(content["extra"]),
        tensors=tensors,
        per_rank=per_rank,
        files=files,
        attempt=attempt,
        block=content["block"],
        by_key=entries,
        run=run,
    )


def _check_files(files: tuple[FileEntry, ...], block: Any, world_size: Any) -> None:
    for name, value in (("block", block), ("world_size", world_size)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}")
    if len({file.name for file in files}) != len(files):
        raise ValueError("two files of the same name")
    for file in files:
        if not _are_counts((file.size, *file.crcs)) or len(file.crcs) != -(-file.size // block):
            raise ValueError(f"{len(file.crcs)} checksums for the {file.size!r} bytes of {file.name!r}")


def _check_boxes(key: str, entry: TensorEntry, files: tuple[FileEntry, ...]) -> None:
    """Loading would silently keep the old values of elements that no box covers."""
    if not _are_counts(entry.shape):
        raise ValueError(f"{key!r} is {entry.shape}")
    for box in entry.boxes:
        if not _are_counts((box.file, box.at, *box.offsets, *box.sizes)):
            raise ValueError(f"{key!r} has a box {box}")
        ends = tuple(map(sum, zip(box.offsets, box.sizes, strict=True)))
        if len(ends) != len(entry.shape) or any(end > size for end, size in zip(ends, entry.shape, strict=True)):
            raise ValueError(f"{key!r} is {entry.shape}, with a box {box}")
        last = box.at + math.prod(box.sizes) * entry.dtype.itemsize
        if box.file >= len(files) or last > files[box.file].size:
            raise ValueError(f"{key!r} ends at byte {last} of file {box.file}")
    if not _cover(entry):
        raise ValueError(f"the boxes of {key!r} are not all of {entry.shape}, each element once")


def _cover(entry: TensorEntry) -> bool:
    """Whether the boxes are disjoint and cover a tensor.

    They have as many elements, and of all corners only those of the tensor are there an odd number of times: then each
    element is in an odd number of boxes, and since there are no more elements in the boxes than in all, in one.
    """
    if sum(math.prod(box.sizes) for box in entry.boxes) != math.prod(entry.shape):
        return False
    boxes = [box for box in entry.boxes if math.prod(box.sizes)]
    if len(boxes) < 2:
        return True
    split = [dim for dim, size in enumerate(entry.shape) if any(box.sizes[dim] != size for box in boxes)]
    if len(split) > _MOST_SPLIT:
        return False
    odd: set[tuple[int, ...]] = set()
    for box in boxes:
        odd ^= set(itertools.product(*((box.offsets[dim], box.offsets[dim] + box.sizes[dim]) for dim in split)))
    return odd == set(itertools.product(*((0, entry.shape[dim]) for dim in split)))


def _check_bytes(entries: Mapping[str, TensorEntry]) -> None:
    """No two boxes have the same bytes."""
    spans = sorted(
        (box.file, box.at, box.at + math.prod(box.sizes) * entry.dtype.itemsize, key)
        for key, entry in entries.items()
        for box in entry.boxes
        if math.prod(box.sizes)
    )
    for (file, _, end, key), (other_file, at, _, other) in itertools.pairwise(spans):
        if file == other_file and at < end:
            raise ValueError(f"{key!r} and {other!r} have the same bytes of file {file}")


def _are_counts(values: tuple[Any, ...]) -> bool:
    return all(type(value) is int and 0 <= value < 2**63 for value in values)


def _name(name: str) -> str:
    """A record that was not written here must not lead out of its folder."""
    if Path(name).name != name or name in ("", ".."):
        raise ValueError(f"a file called {name!r}")
    return name


def _damaged(asked: str, path: Path, why: str) -> CheckpointError:
    return CheckpointError(asked, f"{NAME} is damaged", f"{path}: {why}", "an older checkpoint")
