"""The calls that save and load tensors of any layout."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.core.checkpoint import folders
from hyper_parallel.core.checkpoint.errors import CheckpointError, Peers, failure_of
from hyper_parallel.core.checkpoint.files import to_json
from hyper_parallel.core.checkpoint.record import CheckpointMetadata, read_record
from hyper_parallel.core.checkpoint.shards import LocalShard, shards_of
from hyper_parallel.core.common.checks import check
from hyper_parallel.core.common.errors import InvalidValue, nearest
from hyper_parallel.core.common.torch_compat import record_function

__all__ = ["load_checkpoint", "read_metadata", "save_checkpoint"]

Folder = str | os.PathLike[str]
Tensors = Mapping[str, torch.Tensor]


def save_checkpoint(
    folder: Folder,
    tensors: Tensors,
    extra: Any = None,
    *,
    per_rank: Tensors | None = None,
    step: int | None = None,
    replace: bool = False,
    process_group: dist.ProcessGroup | None = None,
    on_stage: Callable[[str], None] | None = None,
) -> None:
    """Write tensors into a new folder, which is there when all is written and safe, or not at all.

        save_checkpoint("runs/step-00000100", {"w": w}, {"lr": 0.1}, per_rank={"rng": torch.get_rng_state()}, step=100)

    All ranks of the group call it, each with what it has: other names on other ranks (pipeline stages), DTensors on any
    meshes. What several ranks have is written once.

    Communication: some gathers of small objects; no tensor data.

    Args:
        folder: where to; its parent is made if need be.
        tensors: by name, without "|"; plain tensors are equal on all ranks that have them, or refused.
        extra: what is no tensor, from rank 0: None, numbers, strings, and lists, tuples and dicts of such.
        per_rank: plain tensors that each rank has for itself, as the states of random generators.
        step: a number to find in `read_metadata`.
        replace: take the place of a checkpoint that is there, which stays until the new one is complete.
        process_group: the ranks that save; None: all.
        on_stage: called with the name of each stage that this rank comes to, for tests and progress: "begin", "data"
            before each tensor, "sync", and on rank 0 "record", "commit", "committed".

    Raises:
        ValueError: something that a checkpoint cannot hold, `folder` is there already, the ranks' shards do not make up
            full tensors, or ranks have different values of a plain tensor.
        TypeError: a value that is no tensor, or an argument of another kind.
        CheckpointError: the files could not be written; on all ranks, and all of them are removed.
    """
    peers = Peers.of(process_group)
    path = Path()
    shards: dict[str, LocalShard] = {}
    text, failure = "null", None
    try:
        asked = "cannot save a checkpoint"
        check(asked, "int | None", step=step)
        check(asked, "bool", replace=replace)
        check(asked, "callable | None", on_stage=on_stage)
        path = Path(folder)
        shards = shards_of(_cannot_save(path), tensors, per_rank, peers.rank, peers.global_rank)
        text = to_json(extra) if peers.rank == 0 else text
    except Exception as error:
        failure = error
    write(path, shards, text, peers, step=step, replace=replace, failure=failure, on_stage=on_stage)


def write(
    folder: Path,
    shards: Mapping[str, LocalShard],
    extra: str,
    peers: Peers,
    *,
    step: int | None = None,
    replace: bool = False,
    failure: Exception | None = None,
    on_stage: Callable[[str], None] | None = None,
    run: str | None = None,
) -> None:
    """Write shards, and say so to all if this rank cannot; see `save_checkpoint`.

    With `run`, which rank 0 alone knows, a checkpoint of another run is not replaced.
    """
    from hyper_parallel.core.checkpoint.writer import SavePlanner, Writer  # torch's checkpoints take time to import

    on_stage = (lambda _: None) if on_stage is None else on_stage
    attempt = ""
    if peers.rank == 0 and failure is None:
        try:
            attempt = _begin(folder, replace, run)
        except Exception as error:
            failure = error
    try:
        everyone = peers.agree(failure, (attempt, step))
        attempt = everyone[0][0]
        steps = [f"step {of_rank}" for _, of_rank in everyone]
        if unlike := _unlike(steps):
            blame, hint = "the ranks are at different steps", "the same step on every rank"
            raise InvalidValue(_cannot_save(folder), blame, unlike, hint)
        place = folders.place(folder, attempt)
        on_stage("begin")
        planner = SavePlanner(_cannot_save(folder))
        writer = Writer(folder, place, attempt, rank=peers.rank, step=step, extra=extra, on_stage=on_stage, run=run)
        with record_function("checkpoint::save"):
            _drive_save(dict(shards), planner, writer, peers)
    except Exception:
        if peers.rank == 0 and attempt:
            shutil.rmtree(folders.place(folder, attempt), ignore_errors=True)
        raise


def run_of(folder: Path) -> str | None:
    """Return which run has saved a checkpoint; None if it does not say."""
    try:
        return read_record(folder).run
    except CheckpointError:
        return None


def _cannot_save(folder: Path) -> str:
    return f"cannot save the checkpoint {folder}"


def _begin(folder: Path, replace: bool, run: str | None) -> str:
    """Delete the folders of failed attempts, and make one for this attempt; rank 0 alone does this."""
    from hyper_parallel.core.checkpoint.writer import cannot_write

    asked = _cannot_save(folder)
    attempt = os.urandom(6).hex()
    place = folders.place(folder, attempt)
    try:
        if run is None:  # of a run, the folder is there, or the lease is lost with it
            folders.make_folder(folder.parent)
        folders.clean(folder)
        if folders.is_complete(folder):
            if not replace:
                raise InvalidValue(asked, "it is there already", f"folder: {folder}", "replace=True")
            if run is not None and (other := run_of(folder)) not in (None, run):
                blame, seen = "another run has saved it, and this one has not gone on from there", f"run: {other}"
                raise CheckpointError(asked, blame, seen, "another folder, or Checkpointer.load(...) first")
        elif os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir() or any(folder.iterdir())):
            blame, hint = "something else has that name", "a name that is free"
            kind = InvalidValue if run is None else CheckpointError  # of a run, which it should not end
            raise kind(asked, blame, f"there is: {folder}", hint)
        place.mkdir()
    except OSError as error:
        raise cannot_write(folder, place, error, 0, 0) from error
    return attempt


def _drive_save(shards: dict[str, LocalShard], planner: Any, writer: Any, peers: Peers) -> None:
    from torch.distributed import checkpoint as dcp

    if peers.distributed:
        try:
            dcp.save(shards, storage_writer=writer, planner=planner, process_group=peers.group)
        except dcp.CheckpointException as error:  # not an Exception
            raise failure_of(error.failures) from error
        return
    planner.set_up_planner(shards, is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    writer.finish(metadata, [writer.write_data(plans[0], planner).value()])


def load_checkpoint(
    folder: Folder,
    tensors: Tensors,
    *,
    per_rank: Tensors | None = None,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Any:
    """Fill tensors in place with what a checkpoint has under their names, and return its `extra`.

        extra = load_checkpoint("runs/step-00000100", {"w": w})

    Ranks, meshes and layouts need not be those that saved it. All ranks of the group call it, each with what it has.
    The files that are needed are read and checked before any tensor changes; only the ranges that a rank needs are
    copied. Nothing is ever unpickled.

    Communication: some gathers of small objects; no tensor data.

    Args:
        folder: of the checkpoint.
        tensors: by name; plain ones get all of the tensor, DTensors their shard.
        per_rank: by name; plain tensors that get what the rank of the same number saved; only by as many ranks as have
            saved them, which `read_metadata(folder).world_size` says.
        strict: raise if the checkpoint has tensors that no rank asks for, or lacks some, or if another number of ranks
            asks for `per_rank`; else those are left alone, and ranks that were not there keep theirs.
        process_group: the ranks that load; None: all.

    Raises:
        ValueError: a name, shape or dtype that the checkpoint does not have.
        TypeError: a value that is no tensor, or an argument of another kind.
        CheckpointError: it is not complete, or a file is missing, damaged or not its own. All errors are the same on
            all ranks.
    """
    return load(folder, tensors, per_rank=per_rank, strict=strict, process_group=process_group).extra


def load(
    folder: Folder,
    tensors: Tensors,
    *,
    per_rank: Tensors | None = None,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> CheckpointMetadata:
    """Load, and return all that the checkpoint says of itself; see `load_checkpoint`."""
    from hyper_parallel.core.checkpoint.reader import LoadPlanner, Reader, check_files

    peers = Peers.of(process_group)
    path, asked = Path(), "cannot load a checkpoint"
    failure, mine, shards, record = None, None, {}, None
    try:
        check(asked, "bool", strict=strict)
        path, asked = Path(folder), f"cannot load the checkpoint {folder}"
        record = read_record(path)
        shards = shards_of(asked, tensors, per_rank, peers.rank, peers.global_rank)
        shards = _that_fit(asked, shards, record, per_rank or {}, peers.size, strict)
        mine = record.attempt, list(shards)
    except Exception as error:
        failure = error
    everyone = peers.agree(failure, mine)
    assert record is not None, "or this rank had failed"
    if unlike := _unlike([attempt for attempt, _ in everyone]):
        blame, hint = "not all ranks see the same one there", "a folder on a file system that all ranks share"
        raise CheckpointError(asked, blame, unlike, hint)
    wanted = list(dict.fromkeys(key for _, keys in everyone for key in keys))
    if strict:
        _check_all_wanted(asked, wanted, record)
    peers.agree(check_files(path, record, wanted, peers.rank, peers.size))
    with torch.no_grad(), record_function("checkpoint::load"):
        _drive_load(shards, LoadPlanner(), Reader(path, record), peers)
    return record


def _that_fit(
    asked: str, shards: dict[str, LocalShard], record: CheckpointMetadata, per_rank: Tensors, size: int, strict: bool
) -> dict[str, LocalShard]:
    """Return the shards that the checkpoint has."""
    if strict and per_rank and record.world_size != size:
        blame = f"each of {record.world_size} ranks has saved its own {next(iter(per_rank))!r}, and {size} load it"
        hint = f"{record.world_size} ranks; or no per_rank, with new values; or strict=False: new ranks keep theirs"
        raise InvalidValue(asked, blame, f"per_rank: {', '.join(per_rank)[:200]}", hint)
    if strict and (lacking := [key for key in shards if key not in record.by_key]):
        blame = f"it has no {lacking[0]!r}" + (f", nor {len(lacking) - 1} others" if len(lacking) > 1 else "")
        seen = "missing: " + ", ".join(map(repr, lacking[:10])) + (", ..." if len(lacking) > 10 else "")
        near = nearest(lacking[0], list(record.by_key)[:2000]) if record.by_key else "another checkpoint"
        raise InvalidValue(asked, blame, seen, f"{near[:200]}, or strict=False to leave those alone")
    for key, shard in shards.items():
        if any(size > 1 and stride == 0 for size, stride in zip(shard.sizes, shard.local.stride(), strict=True)):
            blame, seen = f"several elements of {key!r} are one in memory", f"strides: {shard.local.stride()}"
            raise InvalidValue(asked, blame, seen, "a tensor that has not been expanded: its clone()")
        entry = record.by_key.get(key)
        if entry is not None and (entry.shape, entry.dtype) != (shard.shape, shard.dtype):
            what = "shape" if entry.shape != shard.shape else "dtype"
            blame = f"{key!r} has another {what}"
            seen = f"saved: {entry.shape} {entry.dtype}   to be filled: {shard.shape} {shard.dtype}"
            hint = (
                "the model that was saved" if what == "shape" else f"a tensor of {entry.dtype}, then .to({shard.dtype})"
            )
            raise InvalidValue(asked, blame, seen, hint)
    return {key: shard for key, shard in shards.items() if key in record.by_key}


def _unlike(values: list[str]) -> str:
    """Return a line for each rank if ranks have different values, else nothing."""
    lines = [f"rank {rank}: {value}" for rank, value in enumerate(values)]
    return "\n  ".join(lines) if len(set(values)) > 1 else ""


def _check_all_wanted(asked: str, wanted: list[str], record: CheckpointMetadata) -> None:
    asked_for = set(wanted)
    unused = [name for name in record.tensors if name not in asked_for]
    if unused:
        blame = f"no rank asks for {unused[0]!r}" + (f", nor for {len(unused) - 1} others" if len(unused) > 1 else "")
        seen = "only in the checkpoint: " + ", ".join(map(repr, unused[:10])) + (", ..." if len(unused) > 10 else "")
        raise InvalidValue(asked, blame, seen, "strict=False to load a part of it")


def _drive_load(shards: dict[str, LocalShard], planner: Any, reader: Any, peers: Peers) -> None:
    from torch.distributed import checkpoint as dcp

    if peers.distributed:
        try:
            dcp.load(shards, storage_reader=reader, planner=planner, process_group=peers.group)
        except dcp.CheckpointException as error:
            raise failure_of(error.failures) from error
        return
    planner.set_up_planner(shards, reader.read_metadata(), is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner)


def read_metadata(folder: Folder) -> CheckpointMetadata:
    """Read what a checkpoint says of itself: names, shapes and dtypes, `step`, `extra`; no tensors, no communication.

        read_metadata("runs/step-00000100").tensors["w"].shape

    Raises:
        CheckpointError: it is not complete, or its record is damaged.
    """
    return read_record(Path(folder))
