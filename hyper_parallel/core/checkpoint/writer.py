"""Writer of a checkpoint: the plan of who writes what, copies of the tensors, and the files."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import planner as torch_planner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from hyper_parallel.core.checkpoint.errors import CheckpointError
from hyper_parallel.core.checkpoint.files import BLOCK, BlockWriter, bytes_of, header_of
from hyper_parallel.core.checkpoint.folders import put_in_place, sync_folder
from hyper_parallel.core.checkpoint.record import NAME, Box, FileEntry, TensorEntry, to_text
from hyper_parallel.core.checkpoint.shards import LocalShard, key_in_file
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.platform import get_platform

# Who writes what: a plan of torch.distributed.checkpoint --------------------------------------------------------------
#
# torch computes the box of a DTensor for even splits in mesh order; for others it contradicts itself. So plans are made
# from the boxes of our own layouts. All else is torch's: that replicas are written once, and completeness.


class SavePlanner(DefaultSavePlanner):
    """Plans a save of `LocalShard`s."""

    def __init__(self, asked: str) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._asked = asked

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Take the shards, by name."""
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Offer to write what this rank has, unless it knows that another does."""
        shards: Mapping[str, LocalShard] = self.state_dict
        self._offered = [_write_item(name, shard) for name, shard in shards.items() if shard.writes and shard.is_there]
        return SavePlan(self._offered)

    def copies(self, plan: SavePlan) -> list[WriteItem]:
        """Return what this rank has offered and is not to write: another rank writes its copy."""
        mine = {_place(item.index) for item in plan.items}
        return [item for item in self._offered if _place(item.index) not in mine]

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Let each box be written once, and check that they make up the tensors."""
        self._check_alike(all_plans)
        try:
            plans, metadata = super().create_global_plan(all_plans)
        except ValueError as error:
            blame = "the shards that the ranks have do not make up full tensors"
            hint = "save from all ranks of every mesh that the tensors lie on"
            raise InvalidValue(self._asked, blame, str(error), hint) from None
        return plans, metadata

    def _check_alike(self, all_plans: list[SavePlan]) -> None:
        first: dict[str, tuple[int, Any]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                data = item.tensor_data
                assert data is not None, "all items are tensors"
                kind = (tuple(data.size), data.properties.dtype)
                other, known = first.setdefault(item.index.fqn, (rank, kind))
                if known != kind:
                    blame = f"{item.index.fqn!r} is not the same tensor on all ranks"
                    seen = f"rank {other}: {known[0]} {known[1]}\n  rank {rank}: {kind[0]} {kind[1]}"
                    hint = "a DTensor, a name of its own for each, or per_rank"
                    raise InvalidValue(self._asked, blame, seen, hint)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Return what is to be written."""
        return self.state_dict[write_item.index.fqn].local


def _place(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


def _write_item(name: str, shard: LocalShard) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=shard.dtype), torch.Size(shard.shape))
    return WriteItem(MetadataIndex(name, shard.offsets), WriteItemType.SHARD, tensor_data=data)


# Copies on the host of what is to be saved, so that training can go on and change it ----------------------------------


class Staging:
    """Host memory for the shards of one rank; every save uses the same again.

    On an accelerator the copies are queued behind the work that is there already, into pinned memory: the host goes on
    at once, and the device is busy with them for as long as they take.
    """

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def copy(self, shards: Mapping[str, LocalShard]) -> tuple[dict[str, LocalShard], Callable[[], None]]:
        """Copy the shards that this rank is to write; call the second of the results before reading the first.

        Whatever an earlier call has returned is overwritten.
        """
        mine = {name: shard for name, shard in shards.items() if shard.writes and shard.is_there}
        kept = {name: self._fitting(name, shard.local) for name, shard in mine.items()}
        self._memory = kept  # and what is not needed any more is released
        devices = dict.fromkeys(shard.local.device.type for shard in mine.values())
        with torch.no_grad():
            for name, shard in mine.items():
                kept[name].copy_(shard.local, non_blocking=True)
        events = []
        for device in devices:
            if (platform := get_platform(device)).has_streams:
                event = platform.new_event()
                event.record()
                events.append(event)

        def wait() -> None:
            for event in events:
                event.synchronize()

        return {name: replace(shard, local=kept[name]) for name, shard in mine.items()}, wait

    def _fitting(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Return the memory that has been used under a name, if it fits, or new memory."""
        old = self._memory.pop(name, None)
        if old is not None and old.shape == local.shape and old.dtype == local.dtype:
            return old
        pinned = local.device.type != "cpu" and get_platform(local.device.type).supports_pinned_memory
        return torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)


# Writing a checkpoint: one data file per rank, then the record, then the rename ---------------------------------------

Stage = Callable[[str], None]


class Writer(StorageWriter):
    """Writes one checkpoint, once."""

    def __init__(
        self,
        folder: Path,
        place: Path,
        attempt: str,
        *,
        rank: int,
        step: int | None,
        extra: str,
        on_stage: Stage,
        run: str | None = None,
    ) -> None:
        self._folder, self._place, self._attempt, self._run = folder, place, attempt, run
        self._rank, self._step, self._extra = rank, step, extra
        self._on_stage, self._block = on_stage, BLOCK

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a writer is for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Leave the plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Never stand in for torch's own."""
        return False

    def write_data(self, plan: SavePlan, planner: torch_planner.SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, if it has anything to write, and take the checksums of copies that others write."""
        assert isinstance(planner, SavePlanner), "both are of one save"
        results = self._write(plan.items, planner) if plan.items else []
        for item in planner.copies(plan):
            crc = zlib.crc32(bytes_of(planner.resolve_data(item)))
            results.append(WriteResult(item.index, 0, (self._rank, None, None, crc)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, items: list[WriteItem], planner: torch_planner.SavePlanner) -> list[WriteResult]:
        items = sorted(items, key=lambda item: (-_dtype(item).itemsize, item.index.fqn, tuple(item.index.offset or ())))
        sizes = [_dtype(item).itemsize * _data(item).chunk.sizes.numel() for item in items]
        entries = [
            (_key(item), _dtype(item), tuple(_data(item).chunk.sizes), size)
            for item, size in zip(items, sizes, strict=True)
        ]
        header = header_of(entries, {"format": "pt", "attempt": self._attempt, "rank": str(self._rank)})
        path = self._place / f"data-{self._rank:05d}.safetensors"
        total = len(header) + sum(sizes)
        results: list[WriteResult] = []
        with _explained(self._folder, path, total) as opened:
            file = opened[0] = BlockWriter(path, self._block)
            file.write(memoryview(header))
            for item, size in zip(items, sizes, strict=True):
                self._on_stage("data")
                tensor, at = planner.resolve_data(item), file.size
                crc = file.write(bytes_of(tensor))  # type: ignore[arg-type] # all items are tensors
                results.append(WriteResult(item.index, size, (self._rank, at, None, crc)))
            assert file.size == total, "the header says how long the file is"
            self._on_stage("sync")
            file.finish()
        rank, at, _, crc = results[0].storage_data
        entry = FileEntry(path.name, total, tuple(file.crcs))
        return [replace(results[0], storage_data=(rank, at, entry, crc)), *results[1:]]  # the file's entry once

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the record, then let the folder be the checkpoint; the coordinator does this when all is written."""
        places, files = {}, {}
        crcs: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
        for result in (result for of_rank in results for result in of_rank):
            rank, at, file, crc = result.storage_data
            crcs.setdefault(_place(result.index), {})[rank] = crc
            if at is not None:
                places[_place(result.index)] = rank, at
            if file is not None:
                files[rank] = file
        _check_copies(f"cannot save the checkpoint {self._folder}", crcs)
        number = {rank: index for index, rank in enumerate(sorted(files))}
        entries = {}
        for key in sorted(metadata.state_dict_metadata):
            saved = metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata), "all entries are tensors"
            boxes = []
            for chunk in saved.chunks:
                rank, at = places[key, tuple(chunk.offsets)]
                boxes.append(Box(number[rank], at, tuple(chunk.offsets), tuple(chunk.sizes)))
            entries[key] = TensorEntry(saved.properties.dtype, tuple(saved.size), tuple(boxes))
        text = to_text(
            attempt=self._attempt,
            run=self._run,
            step=self._step,
            world_size=len(results),
            block=self._block,
            extra=self._extra,
            entries=entries,
            files=tuple(files[rank] for rank in sorted(files)),
        )
        self._on_stage("record")
        path = self._place / NAME
        with _explained(self._folder, path, len(text)) as opened:
            record = opened[0] = BlockWriter(path)
            record.write(memoryview(text.encode()))
            record.finish()
            sync_folder(self._place)
            self._on_stage("commit")
            put_in_place(self._place, self._folder)
        self._on_stage("committed")


def _check_copies(asked: str, crcs: Mapping[tuple[str, tuple[int, ...]], Mapping[int, int]]) -> None:
    """Refuse copies of a tensor that differ: each is written by another rank, and the checkpoint would be a mixture."""
    unlike = sorted(place for place, of_rank in crcs.items() if len(set(of_rank.values())) > 1)
    if not unlike:
        return
    (first, _), *others = unlike
    blame = f"{first!r} is not the same on all ranks that have it"
    of_rank = sorted(crcs[unlike[0]].items())
    seen = "checksums: " + ", ".join(f"rank {rank}: {crc:08x}" for rank, crc in of_rank[:8])
    seen += ", ..." * (len(of_rank) > 8)
    if others:
        seen += f"\n  also: {len(others)} more: " + ", ".join(repr(name) for name, _ in others[:8])
        seen += ", ..." * (len(others) > 8)
    hint = (
        f"per_rank={{{first!r}: ...}}, which keeps each rank's own; or dist.broadcast(...), to make them the same first"
    )
    raise InvalidValue(asked, blame, seen, hint)


@contextmanager
def _explained(folder: Path, path: Path, total: int) -> Iterator[list[BlockWriter | None]]:
    """Close what is put into the list, and say of an OSError what it was about."""
    opened: list[BlockWriter | None] = [None]
    try:
        yield opened
    except OSError as error:
        raise cannot_write(folder, path, error, opened[0].size if opened[0] else 0, total) from error
    finally:
        if opened[0] is not None:
            opened[0].close()


def cannot_write(folder: Path, path: Path, error: OSError, done: int, total: int) -> CheckpointError:
    """Return the error for a disk that does not take what it is given."""
    blame = f"{path.name!r} could not be written: {error.strerror or error}"
    seen = f"after {done:,} of {total:,} bytes: {path}"
    hint = "a folder that can be written to"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        hint = f"free space under {folder.parent}; checkpoints that were complete before still are"
    elif error.errno == errno.ENOENT and not os.path.isdir(path.parent):
        hint = "a folder on a file system that all ranks share"
    return CheckpointError(f"cannot save the checkpoint {folder}", blame, seen, hint)


def _data(item: WriteItem) -> Any:
    assert item.tensor_data is not None, "all items are tensors"
    return item.tensor_data


def _dtype(item: WriteItem) -> Any:
    return _data(item).properties.dtype


def _key(item: WriteItem) -> str:
    data = _data(item)
    return key_in_file(item.index.fqn, data.size, data.chunk.offsets, data.chunk.sizes)
