"""Loading a checkpoint: everything is checked first, then each rank copies the ranges it needs."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import planner as torch_planner
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from hyper_parallel.core.checkpoint.errors import CheckpointError
from hyper_parallel.core.checkpoint.files import DTYPES, HEADER, checksums, open_plain
from hyper_parallel.core.checkpoint.record import NAME, Box, CheckpointMetadata, FileEntry, TensorEntry
from hyper_parallel.core.checkpoint.shards import key_in_file
from hyper_parallel.core.common.torch_compat import flat_bytes

_PIECE = 2**19  # bytes that are read at once where they cannot be read into their place: they stay in a core's cache


# As in `writer`, plans are made from our own boxes; which saved box overlaps which wanted one is torch's to say.


class LoadPlanner(DefaultLoadPlanner):
    """Plans a load into `LocalShard`s."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take the shards to fill, by name, and what the checkpoint has."""
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Ask for the overlap of each shard with each saved box."""
        assert self.metadata is not None, "the driver reads it first"
        items: list[ReadItem] = []
        for name, shard in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata), "all entries are tensors"
            if shard.local.numel() == 0:
                continue
            if shard.shape:
                wanted = [ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes))]
                items += create_read_items_for_chunk_list(name, saved, wanted)
            else:
                none = torch.Size()
                index = MetadataIndex(name, none, 0)
                items.append(ReadItem(LoadItemType.TENSOR, index, none, index, none, none))
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the shard that is to be filled."""
        return self.state_dict[index.fqn].local


def _metadata_of(entries: Mapping[str, TensorEntry]) -> Metadata:
    """Return what torch's planners know of a checkpoint."""
    return Metadata(
        {
            key: TensorStorageMetadata(
                TensorProperties(dtype=entry.dtype),
                torch.Size(entry.shape),
                [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in entry.boxes],
            )
            for key, entry in entries.items()
        }
    )


class Reader(StorageReader):
    """Reads tensors of one checkpoint, whose files have been checked."""

    def __init__(self, folder: Path, record: CheckpointMetadata) -> None:
        self._folder = folder
        self._record = record

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a reader is for one checkpoint."""

    def read_metadata(self) -> Metadata:
        """Return what the record says of the tensors."""
        return _metadata_of(self._record.by_key)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the record has been read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Never stand in for torch's own."""
        return False

    def read_data(self, plan: LoadPlan, planner: torch_planner.LoadPlanner) -> Future[None]:
        """Copy each range to where it is wanted, file by file, in the order of their bytes."""
        reads: list[tuple[int, int, int, tuple[int, ...], ReadItem]] = []
        for item in plan.items:
            box = self._record.by_key[item.storage_index.fqn].boxes[item.storage_index.index or 0]
            reads.append((box.file, box.at, len(reads), box.sizes, item))
        reads.sort(key=lambda read: read[:3])
        buffer = torch.empty(_PIECE, dtype=torch.uint8)
        for number, of_file in groupby(reads, key=lambda read: read[0]):
            path = self._folder / self._record.files[number].name
            try:
                with open(open_plain(path), "rb") as file:
                    for _, at, _, sizes, item in of_file:
                        target = planner.resolve_tensor(item)
                        _copy_range(file.fileno(), at, sizes, item.storage_offsets, item.lengths, target, buffer)
                        planner.commit_tensor(item, target)
            except OSError as error:
                blame = f"{path.name!r} was sound a moment ago, and cannot be read now"
                seen = f"{error.strerror or error}: {path}; some tensors may have been filled already"
                asked = f"cannot load the checkpoint {self._folder}"
                raise CheckpointError(asked, blame, seen, "to load again, or an older checkpoint") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _copy_range(
    file: int,
    at: int,
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    target: torch.Tensor,
    buffer: torch.Tensor,
) -> None:
    """Copy part of a box of a file into a tensor of that part's shape and the file's dtype.

    Args:
        file: an open file.
        at: where the box begins, in bytes.
        sizes: of the box, which lies in row order.
        offsets: where the part begins in the box, per dim.
        lengths: of the part, per dim.
        target: what to fill.
        buffer: bytes for what does not go to its place at once; at least one element.
    """
    if not sizes:
        sizes, offsets, lengths, target = (1,), (0,), (1,), target.view(1)
    row = math.prod(sizes[1:]) * target.dtype.itemsize
    begin = at + offsets[0] * row
    full = tuple(lengths[1:]) == tuple(sizes[1:])
    is_plain = target.is_contiguous() and not (target.is_conj() or target.is_neg())
    if full and target.device.type == "cpu" and is_plain:
        _read_into(file, begin, target)
    elif row <= len(buffer):
        step = len(buffer) // row
        for first in range(0, lengths[0], step):
            count = min(step, lengths[0] - first)
            rows = buffer[: count * row].view(target.dtype).view(count, *sizes[1:])
            _read_into(file, begin + first * row, rows)
            for dim in range(1, len(sizes)):
                rows = rows.narrow(dim, offsets[dim], lengths[dim])
            target.narrow(0, first, count).copy_(rows)
    else:
        for index in range(lengths[0]):
            _copy_range(file, begin + index * row, sizes[1:], offsets[1:], lengths[1:], target[index], buffer)


def _read_into(file: int, at: int, target: torch.Tensor) -> None:
    view = flat_bytes(target).numpy().data
    done = 0
    while done < len(view):
        got = os.preadv(file, [view[done : done + 2**30]], at + done)
        if got == 0:
            raise OSError(errno.EIO, "it has become shorter")
        done += got


# -- checks ----------------------------------------------------------------------------------------------------------


def check_files(
    folder: Path, record: CheckpointMetadata, keys: Collection[str], rank: int = 0, size: int = 1
) -> CheckpointError | None:
    """Read a rank's share of the blocks in which some tensors lie, and return what is wrong with the first bad file.

    All blocks are looked at once among all ranks: a rank's own reads come from the cache of its host then.

    Args:
        folder: of the checkpoint.
        record: its record.
        keys: the tensors that any rank needs.
        rank: this rank.
        size: number of ranks.
    """
    runs = list(_needed(record, keys))
    total = sum(last - first for _, first, last in runs)
    skip, left = total * rank // size, total * (rank + 1) // size - total * rank // size
    asked = f"cannot load the checkpoint {folder}"
    described: dict[int, list[tuple[str, TensorEntry, Box]]] = {}
    for key, entry, box in _boxes(record):
        described.setdefault(box.file, []).append((key, entry, box))
    checked: dict[int, CheckpointError | None] = {}
    for number, first, last in runs:
        here = min(left, max(0, last - first - skip))
        begin = first + min(skip, last - first)
        skip -= begin - first
        left -= here
        file = record.files[number]
        if number not in checked:
            checked[number] = _size_error(asked, folder, file) if here or rank == number % size else None
            if rank == number % size and checked[number] is None:
                checked[number] = _header_error(asked, folder / file.name, record.attempt, described[number])
        if error := checked[number] or _block_error(asked, folder, record, file, begin, begin + here):
            return error
    return None


def _needed(record: CheckpointMetadata, keys: Collection[str]) -> Iterator[tuple[int, int, int]]:
    """Yield file, first and last + 1 block of each run that is needed; those with the file's header always are."""
    headers: dict[int, int] = {}
    for _, _, box in _boxes(record):
        headers[box.file] = min(box.at, headers.get(box.file, box.at))
    blocks: dict[int, set[int]] = {}
    for key in keys:
        entry = record.by_key[key]
        for box in entry.boxes:
            end = box.at + math.prod(box.sizes) * entry.dtype.itemsize
            of_file = blocks.setdefault(box.file, set(range(-(-headers[box.file] // record.block))))
            of_file.update(range(box.at // record.block, -(-end // record.block)))
    for number in sorted(blocks):
        ordered = sorted(blocks[number])
        first = 0
        for place in range(1, len(ordered) + 1):
            if place == len(ordered) or ordered[place] != ordered[place - 1] + 1:
                yield number, ordered[first], ordered[place - 1] + 1
                first = place


def _size_error(asked: str, folder: Path, entry: FileEntry) -> CheckpointError | None:
    path = folder / entry.name
    try:
        with open(open_plain(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        return _unreadable(asked, "is missing or cannot be read", path, error)
    if size != entry.size:
        blame = f"{entry.name!r} is not as long as when it was written"
        seen = f"{size:,} bytes instead of {entry.size:,}: {path}"
        return CheckpointError(asked, blame, seen, "an older checkpoint")
    return None


def _unreadable(asked: str, why: str, path: Path, error: OSError) -> CheckpointError:
    seen = f"{error.strerror or error}: {path}"
    return CheckpointError(asked, f"{path.name!r} {why}", seen, "an older checkpoint")


def _boxes(record: CheckpointMetadata) -> Iterator[tuple[str, TensorEntry, Box]]:
    for key, entry in record.by_key.items():
        for box in entry.boxes:
            yield key, entry, box


def _header_error(
    asked: str, path: Path, attempt: str, described: Sequence[tuple[str, TensorEntry, Box]]
) -> CheckpointError | None:
    """Compare what the record says of the boxes in a file with what the file says of itself."""
    try:
        with open(open_plain(path), "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, os.fstat(file.fileno()).st_size)))
        wrong = [key for key, entry, box in described if not _is_described(header, key, entry, box, 8 + length)]
        if not wrong and header[HEADER]["attempt"] == attempt:
            return None
        blame = f"{path.name!r} does not have {wrong[0]!r} where {NAME} says" if wrong else ""
    except OSError as error:
        return _unreadable(asked, "cannot be read", path, error)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        blame = ""
    blame = blame or f"{path.name!r} {_what_is_wrong(path, attempt)}"
    return CheckpointError(asked, blame, f"file: {path}", "an older checkpoint")


def _is_described(header: Mapping[str, Any], key: str, entry: TensorEntry, box: Box, begin: int) -> bool:
    """Whether a header says the same of a box, which lies in the data, from byte `begin` on."""
    at = box.at - begin
    offsets = [at, at + math.prod(box.sizes) * entry.dtype.itemsize]
    described = {"dtype": DTYPES[entry.dtype], "shape": list(box.sizes), "data_offsets": offsets}
    return at >= 0 and header.get(key_in_file(key, entry.shape, box.offsets, box.sizes)) == described


def _block_error(
    asked: str, folder: Path, record: CheckpointMetadata, entry: FileEntry, first: int, last: int
) -> CheckpointError | None:
    if first == last:
        return None
    path, length = folder / entry.name, (last - first) * record.block
    try:
        with open(open_plain(path), "rb") as opened:
            file = opened.fileno()
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file, first * record.block, length, os.POSIX_FADV_SEQUENTIAL)
            for number, have, crc in checksums(file, first, last, record.block):
                if crc != entry.crcs[number]:
                    begin, should = number * record.block, entry.crcs[number]
                    blame = f"{entry.name!r} {_what_is_wrong(path, record.attempt)}"
                    where = f"bytes {begin:,} to {begin + have:,}"
                    seen = f"{where} have the checksum {crc:08x} instead of {should:08x}: {path}"
                    return CheckpointError(asked, blame, seen, "an older checkpoint")
    except OSError as error:
        return _unreadable(asked, "cannot be read", path, error)
    return None


def _what_is_wrong(path: Path, attempt: str) -> str:
    """Say of a file whose checksum is wrong what it seems to be; nothing in it is trusted, or unpickled."""
    try:
        with open(open_plain(path), "rb") as file:
            begin = file.read(8)
            header = json.loads(file.read(min(int.from_bytes(begin, "little"), 100_000_000)))
        of = header[HEADER]["attempt"]
    except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError, RecursionError):
        return "is damaged, or not a safetensors file"
    return "is damaged" if of == attempt else "belongs to another checkpoint"
