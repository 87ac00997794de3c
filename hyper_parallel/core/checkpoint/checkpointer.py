"""The checkpoints of a training run: where they are, which is the last, how many are kept, and who writes them."""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from typing_extensions import Self

from hyper_parallel.core.checkpoint import folders
from hyper_parallel.core.checkpoint.api import Folder, Tensors, load, run_of, write
from hyper_parallel.core.checkpoint.errors import CheckpointError, LeaseLostError, Peers
from hyper_parallel.core.checkpoint.files import to_json
from hyper_parallel.core.checkpoint.shards import LocalShard, shards_of
from hyper_parallel.core.checkpoint.writer import Staging, cannot_write
from hyper_parallel.core.common.checks import check, check_choice, check_least
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.common.groups import token_of_torchrun

_NAME = re.compile(r"step-(\d{8,})")
_SAY_S = 5.0  # longer waits are told


@dataclass(frozen=True)
class Saved:
    """How a save ended.

    Attributes:
        step: which it was.
        path: the folder, if it is there.
        error: why it is not, otherwise.
        seconds: how long it took, on this rank, in the background or not.
    """

    step: int
    path: Path | None
    error: str | None
    seconds: float


class Checkpointer:
    """Saves to, and loads from, the folders `step-00000100`, ... under a root; one run at a time saves to a root.

        checkpointer = Checkpointer("runs/llama", keep_last=3, async_save=True)
        checkpointer.acquire()
        if checkpointer.latest() is not None:
            extra = checkpointer.load(tensors)
        ...
        checkpointer.save(step, tensors, {"step": step})  # every few hundred steps
        ...
        checkpointer.close()

    All ranks make one, and call `save`, `wait`, `load` and `close` in the same order. A save that fails for want of
    space, or because files cannot be written, does not end the run: it warns, and is reported in `Saved.error`. A run
    that has lost its folder or its lease gets `LeaseLostError`, whatever `on_error` is: it could never save again.

    With `async_save`, `save` copies the tensors to the host and returns; a thread writes the copies. The next `save`,
    and `latest`, `load` and `close`, wait for it first. The next call reports its failure. The copies take as much
    host memory as the rank writes; they are made anew only when shapes change.

    Who saves has the lease of the root, from `acquire`, or else from the first `save`, until `close`, or until the
    process ends: any other is refused. Who only loads needs none. A run is known by what it has saved: a process that
    loads a checkpoint of the root goes on with its run, any other is a new run, which neither replaces nor deletes what
    an earlier one has left there.

    Communication: gathers of small objects, in a gloo group of its own.

    Args:
        root: the folder with the checkpoints of this run; made if need be.
        keep_last: how many checkpoints to keep, those of the highest steps; None: all. Older ones are deleted when a
            new one is complete; that one is never deleted.
        async_save: write in the background.
        on_error: "warn": go on when a save fails; "raise": raise CheckpointError.
        process_group: the ranks that save and load, for objects on the host; nothing else may use it if `async_save`.
            None: a new one of all ranks.
        timeout: how long ranks wait for each other, if a group is made; None: torch's default, 30 minutes.
        on_stage: see `save_checkpoint`; here also "prune", before old ones are deleted, and "done".

    Raises:
        TypeError: an argument of another kind.
        ValueError: `keep_last` is less than 1, no such `on_error`.
    """

    def __init__(
        self,
        root: Folder,
        *,
        keep_last: int | None = 3,
        async_save: bool = False,
        on_error: Literal["warn", "raise"] = "warn",
        process_group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        on_stage: Callable[[str], None] | None = None,
    ) -> None:
        asked = "cannot make a Checkpointer"
        check(asked, "int | None", keep_last=keep_last)
        check(asked, "bool", async_save=async_save)
        check_choice(asked, "on_error", on_error, ("warn", "raise"))
        check(asked, "group | None", process_group=process_group)
        check(asked, "callable | None", on_stage=on_stage)
        if keep_last is not None and keep_last < 1:
            blame = f"keep_last={keep_last}, and there must be one to go back to"
            raise InvalidValue(asked, blame, f"root: {root}", "keep_last=1, or None: all")
        self.root = Path(root)
        self.keep_last = keep_last
        self.async_save = async_save
        self._raises = on_error == "raise"
        self._on_stage = on_stage or (lambda _: None)
        self._own_group = process_group is None and dist.is_available() and dist.is_initialized()
        self._group = dist.new_group(backend="gloo", timeout=timeout) if self._own_group else process_group
        self._closed = False  # its own group is no more
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._ended: Saved | Exception | None = None
        self._acquired = False  # on every rank; rank 0 alone has the lease and knows the run
        self._lease: folders.Lease | None = None
        self._run: str | None = None
        self._back_to: int | None = None  # until the next checkpoint is there
        self._runs: dict[Path, str | None] = {}  # of the checkpoints that are there, as far as they have been asked

    # -- the lease -----------------------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Make sure that no other run saves to the root, from now until `close` or `release`.

        The lease of a process that has ended on this host, or of an earlier attempt of this torchrun on another one, is
        taken over at once; any other when it has not been renewed for 60 seconds, for which this waits.

        Raises:
            CheckpointError: another run is using the root, rank 0 cannot write there, or a rank does not see what
                rank 0 writes, as on disks that hosts do not share; on all ranks.
        """
        self._ended = self._join()
        if (failure := self._acquire()) is not None:
            raise failure

    def release(self) -> None:
        """Let other runs save to the root when nothing is being saved, without waiting for that as `close` does.

        For a run that has failed, where ranks could wait for each other for ever.
        """
        lease, self._lease, self._acquired = self._lease, None, False
        if lease is not None and (self._thread is None or not self._thread.is_alive()):
            lease.release()  # otherwise the thread has the last reference to it

    def _acquire(self) -> CheckpointError | None:
        """Take the lease; return why it cannot be written, and raise if another run has it."""
        if self._acquired:
            return None
        peers = self._peers()
        refusal, unwritable, attempt = None, None, ""
        if peers.rank == 0:
            try:
                self._lease = folders.Lease(self.root, self._run, token_of_torchrun())
                attempt, folder = self._lease.attempt, self._lease.folder
                began = token_of_torchrun(f"{socket.gethostname()}:{self.root.absolute()}", folder)
                self._lease.check_folder(began or folder)  # an earlier attempt has lost it
            except CheckpointError as error:
                refusal, self._lease = error, None
            except OSError as error:
                unwritable = str(cannot_write(self.root, self.root / folders.LEASE, error, 0, 0))
        unwritable, attempt = peers.agree(refusal, (unwritable, attempt))[0]
        if unwritable is not None:
            return CheckpointError(unwritable)
        self._check_shared(peers, attempt)
        self._acquired = True
        return None

    def _check_shared(self, peers: Peers, attempt: str) -> None:
        """Make sure that all ranks see what rank 0 has written into the root."""
        seen_by = peers.gather((folders.is_seen(self.root, attempt), socket.gethostname()))
        blind = [f"rank {rank} on host {host!r}" for rank, (sees, host) in enumerate(seen_by) if not sees]
        if blind:
            self.release()
            blame = f"{len(blind)} of {peers.size} ranks do not see the file {folders.LEASE} that rank 0 has written"
            seen = ", ".join(blind[:8]) + (", ..." if len(blind) > 8 else "") + f"; rank 0 is on host {seen_by[0][1]!r}"
            hint = "a folder on a file system that all ranks share"
            raise CheckpointError(f"cannot save to {self.root}", blame, seen, hint)

    # -- saving --------------------------------------------------------------------------------------------------

    def save(self, step: int, tensors: Tensors, extra: Any = None, *, per_rank: Tensors | None = None) -> Saved | None:
        """Save what `save_checkpoint` saves, as the checkpoint of a step; one that is there is replaced.

        Returns:
            How this save ended; with `async_save` how the one before ended, None if there was none or that has been
            returned.

        Raises:
            ValueError, TypeError: as `save_checkpoint`; with `async_save` the next call raises it and does no more.
            CheckpointError: the save, or with `async_save` the one before, failed, and `on_error` is "raise"; or
                another run has the lease of the root.
            LeaseLostError: the root is not the folder any more that it was, or this run has lost the lease.
        """
        before = self._returned(self._join())
        peers = self._peers()
        folder = self.root
        shards: Mapping[str, LocalShard] = {}
        text = "null"
        failure: Exception | None = self._acquire()
        ready: Callable[[], None] = _nothing
        try:
            check("cannot save a checkpoint", "int", step=step)
            check_least("cannot save a checkpoint", 0, step=step)
            folder = self._folder(step)
            shards = shards_of(f"cannot save step {step}", tensors, per_rank, peers.rank, peers.global_rank)
            text = to_json(extra) if peers.rank == 0 else text
            if self.async_save:
                shards, ready = self._staging.copy(shards)
        except Exception as error:
            failure = failure or error

        lease = self._lease

        def run() -> None:
            self._ended = self._write(step, folder, shards, text, peers, failure, ready, lease)

        if self.async_save:
            self._thread = threading.Thread(target=run, name=f"checkpoint of step {step}")
            self._thread.start()
            return before
        run()
        return self._returned(self._join())

    def wait(self) -> Saved | None:
        """Wait until nothing is being saved.

        Returns:
            How the last save ended; None if there was none or it has been returned.

        Raises:
            CheckpointError: the save has failed, and `on_error` is "raise".
        """
        return self._returned(self._join())

    def close(self) -> Saved | None:
        """Wait as `wait` does, and release memory, lease and group; before the process group is destroyed."""
        try:
            return self.wait()
        finally:
            self._staging = Staging()
            self.release()
            if self._own_group and dist.is_initialized():
                self._own_group, self._closed = False, True
                with suppress(ValueError):  # somebody has destroyed it already
                    dist.destroy_process_group(self._group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(
        self,
        step: int,
        folder: Path,
        shards: Mapping[str, LocalShard],
        text: str,
        peers: Peers,
        failure: Exception | None,
        ready: Callable[[], None],
        lease: folders.Lease | None,
    ) -> Saved | Exception:
        begin, run = time.perf_counter(), None if lease is None else lease.run

        def on_stage(name: str) -> None:
            self._on_stage(name)
            if name == "commit" and lease is not None:
                lease.check()  # from here to the rename nothing takes long
                self._set_aside(run)

        try:
            failure = self._prepared(folder, lease, ready, failure)
            write(folder, shards, text, peers, step=step, replace=True, failure=failure, on_stage=on_stage, run=run)
            if peers.rank == 0:
                self._runs[folder] = run
                self._on_stage("prune")
                self._prune(folder, run)
            self._on_stage("done")
        except (RuntimeError, OSError) as error:
            if not isinstance(error, CheckpointError):  # of torch.distributed, when a rank has died
                asked, blame = f"cannot save the checkpoint {folder}", "the ranks could not talk to each other"
                hint = "a look at the other ranks; what was complete before still is"
                lost = CheckpointError(asked, blame, f"{type(error).__name__}: {error}", hint)
                lost.__cause__ = error
                error = lost
            ends = self._raises or isinstance(error, LeaseLostError)
            return error if ends else Saved(step, None, str(error), time.perf_counter() - begin)
        except Exception as error:  # a mistake of the caller's, or of ours: raised by who asks how the save ended
            return error
        return Saved(step, folder, None, time.perf_counter() - begin)

    def _prepared(
        self, folder: Path, lease: folders.Lease | None, ready: Callable[[], None], failure: Exception | None
    ) -> Exception | None:
        """Get ready to write; return what has gone wrong: the others hear of it where they wait for this rank."""
        try:
            ready()
            if lease is not None:
                lease.check()
                self._clean()
        except OSError as error:
            return failure or cannot_write(folder, self.root, error, 0, 0)
        except Exception as error:
            return failure or error
        return failure

    def _join(self) -> Saved | Exception | None:
        if self._thread is not None:
            self._thread.join(_SAY_S)
            if self._thread.is_alive() and self._lease is not None:  # which rank 0 has
                logging.getLogger(__name__).warning("waiting for the %s in %s", self._thread.name, self.root)
            self._thread.join()
            self._thread = None
        ended, self._ended = self._ended, None
        return ended

    def _returned(self, ended: Saved | Exception | None) -> Saved | None:
        if isinstance(ended, Exception):
            raise ended
        if ended is not None and ended.error is not None and self._peers().rank == 0:
            warnings.warn(f"step {ended.step} has not been saved: {ended.error}", stacklevel=3)
        return ended

    def _clean(self) -> None:
        """Delete the folders of failed attempts at any step."""
        for name in folders.saved_names(self.root):
            if _NAME.fullmatch(name):
                folders.clean(self.root / name)

    def _prune(self, new: Path, run: str | None) -> None:
        if self.keep_last is None:
            return
        with suppress(OSError):  # whatever could not be deleted now is tried again after the next save
            others = [path for _, path in self._complete() if path != new and self._is_of(path, run)]
            for path in others[max(0, self.keep_last - 1) :]:
                folders.remove(path)

    def _set_aside(self, run: str | None) -> None:
        """Let the one that is about to get its name be the newest, if the run has gone back to an earlier step."""
        if self._back_to is not None:
            for step, path in self._complete():
                if step > self._back_to and self._is_of(path, run):
                    folders.set_aside(path)
            self._back_to = None

    def _is_of(self, path: Path, run: str | None) -> bool:
        if path not in self._runs:
            self._runs[path] = run_of(path)
        return self._runs[path] in (None, run)

    # -- loading -------------------------------------------------------------------------------------------------

    def latest(self) -> Path | None:
        """Return the folder of the complete checkpoint with the highest step; None if there is none.

        Waits until nothing is being saved.
        """
        return next(iter(self.complete()), None)

    def complete(self) -> list[Path]:
        """Return the folders of all complete checkpoints, that of the highest step first; waits as `latest` does."""
        self._ended = self._join()  # still to be returned
        return [path for _, path in self._complete()]

    def at(self, step: int) -> Path:
        """Return the folder of the complete checkpoint of a step.

        Raises:
            TypeError: no int.
            CheckpointError: there is none; it names those that there are.
        """
        check("cannot find a checkpoint", "int", step=step)  # the text "3" is none of them, and would look like one
        self._ended = self._join()  # still to be returned
        there = dict(self._complete())
        if step not in there:
            seen = "complete: " + (", ".join(f"step {one}" for one in sorted(there)) or "none")
            blame, hint = f"there is no complete checkpoint of step {step}", "one of those, or the latest"
            raise CheckpointError(f"cannot load step {step} of {self.root}", blame, seen, hint)
        return there[step]

    def load(
        self,
        tensors: Tensors,
        *,
        step: int | None = None,
        path: Folder | None = None,
        per_rank: Tensors | None = None,
        strict: bool = True,
    ) -> Any:
        """Load what `load_checkpoint` loads, from the latest checkpoint that rank 0 sees, or from another.

        If the latest one is damaged, this warns and goes back to the newest that is not, as with its `step`.

        Args:
            tensors: as for `load_checkpoint`.
            per_rank: likewise.
            strict: likewise.
            step: to go back to: when the next checkpoint of the run is complete, the newer ones are not of the run any
                more. They are renamed to `undone-step-00000300`, count for nothing, and are never deleted.
            path: of a checkpoint, to load it and leave the others alone.

        Raises:
            CheckpointError: there is none, or all are damaged; else as `load_checkpoint`.
            TypeError: a `step` that is no int; else as `load_checkpoint`.
            ValueError: both `step` and `path`; else as `load_checkpoint`.
        """
        if step is not None and path is not None:
            hint = "step, to go back to it, or path, to look at it"
            raise InvalidValue("cannot load two checkpoints", "both are given", f"{step=}, {path=}", hint)
        self._ended = self._join()
        peers = self._peers()
        paths: Sequence[Folder] = self._agreed_paths(peers, step) if path is None else [path]
        if not paths:
            blame, hint = "there is no complete checkpoint", "latest() is not None first"
            raise CheckpointError("cannot load the latest checkpoint", blame, f"root: {self.root}", hint)
        for chosen in paths:
            try:
                record = load(chosen, tensors, per_rank=per_rank, strict=strict, process_group=self._group)
            except CheckpointError as error:
                if chosen == paths[-1]:
                    raise
                warn_of_damage(Path(chosen), error, peers.rank)
            else:
                break
        if chosen != paths[0]:
            step = record.step
        if Path(chosen).absolute().parent == self.root.absolute() and record.run is not None:
            self._run = record.run
            if self._lease is not None:
                self._lease.go_on_with(record.run)
        self._back_to = step
        return record.extra

    def _agreed_paths(self, peers: Peers, step: int | None) -> list[Path]:
        """Return what rank 0 finds, the newest first."""
        failure, paths = None, list[Path]()
        if peers.rank == 0:
            try:
                paths = self.complete() if step is None else [self.at(step)]
            except CheckpointError as error:
                failure = error
        return peers.agree(failure, paths)[0]

    def _peers(self) -> Peers:
        if self._closed and dist.is_initialized():
            blame = "it has been closed, and with it the group that its ranks talk through"
            raise InvalidValue("cannot use this Checkpointer", blame, f"root: {self.root}", "another one")
        return Peers.of(self._group)

    def _folder(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def _complete(self) -> list[tuple[int, Path]]:
        """Return step and folder of the complete ones, the highest step first."""
        found = []
        for name in folders.saved_names(self.root):
            match = _NAME.fullmatch(name)
            path = folders.found(self.root / name) if match else None
            if match and path is not None:
                found.append((int(match[1]), path))
        return sorted(found, reverse=True)


def warn_of_damage(path: Path, error: CheckpointError, rank: int) -> None:
    """Say, on rank 0, that a checkpoint cannot be loaded and an older one is tried."""
    if rank == 0:
        warnings.warn(f"{path.name} cannot be loaded, and the one before is tried: {error}", stacklevel=3)


def _nothing() -> None:
    """Nothing to wait for."""
