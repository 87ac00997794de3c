"""The checkpoints of a training run: where they are, which is the last, how many are kept, and who writes them."""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from typing_extensions import Self

from hyper_parallel.core.checkpoint import folders
from hyper_parallel.core.checkpoint.api import Folder, Tensors, load_checkpoint, write
from hyper_parallel.core.checkpoint.errors import CheckpointError, Peers
from hyper_parallel.core.checkpoint.exact import to_json
from hyper_parallel.core.checkpoint.parts import Part, parts_of
from hyper_parallel.core.checkpoint.staging import Staging
from hyper_parallel.core.dtensor.messages import explain

__all__ = ["Checkpointer", "Saved"]

_NAME = re.compile(r"step-(\d{8,})")


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
    """Saves to, and loads from, the folders `step-00000100`, ... under a root; one run at a time uses a root.

        checkpointer = Checkpointer("runs/llama", keep_last=3, async_save=True)
        if checkpointer.latest() is not None:
            extra = checkpointer.load(tensors)
        ...
        checkpointer.save(step, tensors, {"step": step})  # every few hundred steps
        ...
        checkpointer.close()

    All ranks make one, and call `save`, `wait`, `load` and `close` in the same order. A save that fails for want of
    space, or because files cannot be written, does not end the run: it warns, and is told in `Saved.error`.

    With `async_save`, `save` copies the tensors to the host and returns; a thread writes the copies. The next `save`,
    and `latest`, `load` and `close`, wait for it first. Its failure is told by the next call. The copies take as much
    host memory as the rank writes; they are made anew only when shapes change.

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
        ValueError: `keep_last` is less than 1.
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
        if keep_last is not None and keep_last < 1:
            blame = f"keep_last={keep_last}, and there must be one to go back to"
            raise ValueError(explain("cannot make a Checkpointer", blame, f"root: {root}", "keep_last=1, or None: all"))
        self.root = Path(root)
        self.keep_last = keep_last
        self.async_save = async_save
        self._raises = on_error == "raise"
        self._on_stage = on_stage or (lambda _: None)
        self._own_group = process_group is None and dist.is_available() and dist.is_initialized()
        self._group = dist.new_group(backend="gloo", timeout=timeout) if self._own_group else process_group
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._ended: Saved | Exception | None = None

    # -- saving --------------------------------------------------------------------------------------------------

    def save(self, step: int, tensors: Tensors, extra: Any = None, *, per_rank: Tensors | None = None) -> Saved | None:
        """Save what `save_checkpoint` saves, as the checkpoint of a step; one that is there is replaced.

        Returns:
            How this save ended; with `async_save` how the one before ended, None if there was none or it has been told.

        Raises:
            ValueError, TypeError: as `save_checkpoint`; with `async_save` the next call raises it and does no more.
            CheckpointError: the save, or with `async_save` the one before, failed, and `on_error` is "raise".
        """
        before = self._told(self._join())
        peers = Peers.of(self._group)
        folder = self._folder(step)
        parts: Mapping[str, Part] = {}
        text, failure = "null", None
        ready: Callable[[], None] = _nothing
        try:
            parts = parts_of(f"cannot save step {step}", tensors, per_rank, peers.rank, peers.global_rank)
            text = to_json(extra) if peers.rank == 0 else text
            if self.async_save:
                parts, ready = self._staging.copy(parts)
        except Exception as error:
            failure = error

        def run() -> None:
            self._ended = self._write(step, folder, parts, text, peers, failure, ready)

        if self.async_save:
            self._thread = threading.Thread(target=run, name=f"checkpoint of step {step}")
            self._thread.start()
            return before
        run()
        return self._told(self._join())

    def wait(self) -> Saved | None:
        """Wait until nothing is being saved.

        Returns:
            How the last save ended; None if there was none or it has been told.

        Raises:
            As `save`.
        """
        return self._told(self._join())

    def close(self) -> Saved | None:
        """Wait as `wait` does, and give back memory and group; call it before the process group is destroyed."""
        try:
            return self.wait()
        finally:
            self._staging = Staging()
            if self._own_group and dist.is_initialized():
                self._own_group = False
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
        parts: Mapping[str, Part],
        text: str,
        peers: Peers,
        failure: Exception | None,
        ready: Callable[[], None],
    ) -> Saved | Exception:
        begin = time.perf_counter()
        try:
            failure = self._prepared(folder, peers, ready, failure)
            write(folder, parts, text, peers, step=step, replace=True, failure=failure, on_stage=self._on_stage)
            if peers.rank == 0:
                self._on_stage("prune")
                self._prune(folder)
            self._on_stage("done")
        except (RuntimeError, OSError) as error:
            if not isinstance(error, CheckpointError):  # of torch.distributed, when a rank has died
                asked, blame = f"cannot save the checkpoint {folder}", "the ranks could not talk to each other"
                hint = "a look at the other ranks; what was complete before still is"
                lost = CheckpointError(explain(asked, blame, f"{type(error).__name__}: {error}", hint))
                lost.__cause__ = error
                error = lost
            return error if self._raises else Saved(step, None, str(error), time.perf_counter() - begin)
        except Exception as error:  # a mistake of the caller's, or of ours: raised by who asks how the save ended
            return error
        return Saved(step, folder, None, time.perf_counter() - begin)

    def _prepared(
        self, folder: Path, peers: Peers, ready: Callable[[], None], failure: Exception | None
    ) -> Exception | None:
        """Get ready to write; return what has gone wrong: the others hear of it where they wait for this rank."""
        from hyper_parallel.core.checkpoint.writer import cannot_write  # torch's checkpoints take time to import

        try:
            ready()
            if peers.rank == 0:
                self._clean()
        except OSError as error:
            return failure or cannot_write(folder, self.root, error, 0, 0)
        except Exception as error:
            return failure or error
        return failure

    def _join(self) -> Saved | Exception | None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        ended, self._ended = self._ended, None
        return ended

    def _told(self, ended: Saved | Exception | None) -> Saved | None:
        if isinstance(ended, Exception):
            raise ended
        if ended is not None and ended.error is not None and Peers.of(self._group).rank == 0:
            warnings.warn(f"step {ended.step} has not been saved: {ended.error}", stacklevel=3)
        return ended

    def _clean(self) -> None:
        """Clear away what dead attempts at any step have left."""
        for name in folders.saved_names(self.root):
            if _NAME.fullmatch(name):
                folders.clean(self.root / name)

    def _prune(self, new: Path) -> None:
        if self.keep_last is None:
            return
        with suppress(OSError):  # whatever could not be deleted now is tried again after the next save
            others = [path for _, path in self._complete() if path != new]
            for path in others[max(0, self.keep_last - 1) :]:
                folders.remove(path)

    # -- loading -------------------------------------------------------------------------------------------------

    def latest(self) -> Path | None:
        """Return the folder of the complete checkpoint with the highest step; None if there is none.

        Waits until nothing is being saved.
        """
        ended = self._join()
        self._ended = ended  # still to be told
        return next((path for _, path in self._complete()), None)

    def load(
        self,
        tensors: Tensors,
        *,
        path: Folder | None = None,
        per_rank: Tensors | None = None,
        strict: bool = True,
    ) -> Any:
        """Load what `load_checkpoint` loads, from the latest checkpoint that rank 0 sees, or from another.

        Raises:
            CheckpointError: there is none; else as `load_checkpoint`.
        """
        self._ended = self._join()
        peers = Peers.of(self._group)
        if path is None:
            path = peers.agree(None, self.latest() if peers.rank == 0 else None)[0]
        if path is None:
            blame, hint = "there is no complete checkpoint", "latest() is not None first"
            raise CheckpointError(explain("cannot load the latest checkpoint", blame, f"root: {self.root}", hint))
        return load_checkpoint(path, tensors, per_rank=per_rank, strict=strict, process_group=self._group)

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


def _nothing() -> None:
    """Nothing to wait for."""
