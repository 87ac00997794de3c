"""Folders that are complete or not there at all, and the lease of the one run that may write them.

A folder is written under another name and then renamed; before it is deleted, it is renamed again. Beside a checkpoint
`name` there may be hidden folders: `.name.saving-<attempt>`, a save that is not complete; `.name.replaced-...`, a
complete checkpoint that another one is about to replace; `.name.deleted-...`, one that is being deleted.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import shutil
import socket
import time
import weakref
from _thread import allocate_lock, start_new_thread
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hyper_parallel.core.checkpoint.errors import CheckpointError, LeaseLostError
from hyper_parallel.core.checkpoint.record import NAME

_SAVING, _REPLACED, _DELETED = ".saving-", ".replaced-", ".deleted-"
_UNDONE = "undone-"


def place(folder: Path, attempt: str) -> Path:
    """Return where an attempt to save a folder writes.

    >>> place(Path("runs/step-00000100"), "1f").as_posix()
    'runs/.step-00000100.saving-1f'
    """
    return folder.with_name(f".{folder.name}{_SAVING}{attempt}")


def is_complete(folder: Path) -> bool:
    """Whether a folder is a checkpoint; that its files are sound is found out when it is loaded."""
    return (folder / NAME).is_file()


def sync_folder(folder: Path) -> None:
    """Bring to the disk which names there are in a folder."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, and bring their names to the disk.

    Raises:
        OSError: it cannot be made; a link that leads nowhere is named, where the system says "File exists".
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        at = Path(error.filename)
        why = f"{at} is a link to {os.readlink(at)}, where nothing is" if at.is_symlink() else f"{at} is no folder"
        raise OSError(errno.ENOTDIR, why) from None
    for path in missing:
        with suppress(PermissionError):  # of a folder that others own, names may not be read
            sync_folder(path.parent)


def put_in_place(attempt: Path, folder: Path) -> None:
    """Give an attempt its name, for good: from here on it is the checkpoint."""
    replaced = None
    if is_complete(folder):
        replaced = folder.with_name(f".{folder.name}{_REPLACED}{attempt.name.rpartition('-')[2]}")
        os.rename(folder, replaced)  # until the next line, `found` and `clean` take this one for the checkpoint
    try:
        os.rename(attempt, folder)
    except OSError:
        if replaced is not None:
            os.rename(replaced, folder)
        raise
    sync_folder(folder.parent)
    if replaced is not None:
        _discard(replaced)


def set_aside(folder: Path) -> None:
    """Rename a checkpoint, so that it is none of its root any more; it can still be loaded by its path."""
    aside, number = folder.with_name(f"{_UNDONE}{folder.name}"), 1
    while os.path.lexists(aside):
        number += 1
        aside = folder.with_name(f"{_UNDONE}{folder.name}-{number}")
    os.rename(folder, aside)
    sync_folder(folder.parent)


def remove(folder: Path) -> None:
    """Delete a checkpoint, or a link to one; if this is interrupted, the rest is no checkpoint any more."""
    gone = folder.with_name(f".{folder.name}{_DELETED}{os.urandom(4).hex()}")
    os.rename(folder, gone)
    sync_folder(folder.parent)
    _delete(gone)


def found(folder: Path) -> Path | None:
    """Return where the checkpoint of that name is: there, or beside it if a replacement was interrupted; else None."""
    if is_complete(folder):
        return folder
    return next((path for path in _beside(folder, _REPLACED) if is_complete(path) and not path.is_symlink()), None)


def clean(folder: Path) -> None:
    """Complete or undo interrupted saves of a folder; nobody may be saving it."""
    for path in _beside(folder, _REPLACED):
        if is_complete(folder) or not is_complete(path) or path.is_symlink():
            _discard(path)
        elif not folder.exists():
            os.rename(path, folder)
            sync_folder(folder.parent)
    for path in [*_beside(folder, _SAVING), *_beside(folder, _DELETED)]:
        _delete(path)


def saved_names(root: Path) -> list[str]:
    """Return the names of all checkpoints in a folder, and of remains of some, sorted."""
    names = []
    for name in os.listdir(root) if root.is_dir() else []:
        kinds = [kind for kind in (_SAVING, _REPLACED, _DELETED) if kind in name]
        names.append(name[1:].partition(kinds[0])[0] if name.startswith(".") and kinds else name)
    return sorted(dict.fromkeys(names))


def _discard(path: Path) -> None:
    """Delete a complete checkpoint: first it stops being one. Of a link, delete the link."""
    with suppress(OSError):  # a link cannot be opened like this, nor be changed into one meanwhile
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.unlink(NAME, dir_fd=opened)
        finally:
            os.close(opened)
    _delete(path)


def _delete(path: Path) -> None:
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)  # follows no links, either


def _beside(folder: Path, kind: str) -> list[Path]:
    if not folder.parent.is_dir():
        return []
    start = f".{folder.name}{kind}"
    return [folder.with_name(name) for name in sorted(os.listdir(folder.parent)) if name.startswith(start)]


# -- whose they are --------------------------------------------------------------------------------------------------

LEASE = ".lease.json"
"""Name of the file in a root that says which run writes there."""

_RENEW_S, _STALE_S = 10.0, 60.0
_SAY_S = 5.0  # longer waits are told
_LOOKS, _LOOK_EVERY_S = 10, 0.5  # file systems of several hosts show new names late


@dataclass(frozen=True)
class Holder:
    """The process that has a lease.

    Attributes:
        run: the training, of which a process may be a later attempt.
        attempt: this attempt at it.
        host: name of the host, for people.
        machine: what tells processes apart that can see each other's numbers: one boot, and one container.
        pid: number of the process.
        started: when it began, by the system's own clock; another process may get its number.
        since: when it took the lease, in seconds since 1970.
        job: what only the store of its torchrun hands to its attempts; "" without one.
        restart: how often torchrun has restarted it.
    """

    run: str
    attempt: str
    host: str
    machine: str
    pid: int
    started: str
    since: float
    job: str
    restart: int

    @classmethod
    def here(cls, run: str | None, job: str = "") -> Holder:
        """Return the calling process as the holder of a new lease."""
        attempt, restart = os.urandom(6).hex(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        return cls(
            run=run or attempt,
            attempt=attempt,
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            started=_started(os.getpid()) or "",
            since=time.time(),
            job=job,
            restart=int(restart) if restart.isdecimal() else 0,
        )

    def has_ended(self, me: Holder) -> bool | None:
        """Whether it does not write any more, as `me` can tell; None if only time can tell."""
        if self.machine != me.machine:
            # torchrun ends all processes of an attempt before it begins the next. Its --rdzv-id is no proof: another
            # torchrun may have been given the same.
            return True if self.job and self.job == me.job and self.restart < me.restart else None
        started = _started(self.pid)
        return started is None or (bool(started and self.started) and started != self.started)


class Lease:
    """The right of one process to write the checkpoints under a root, until it is released.

    The file is renewed by its modification time, every 10 seconds, on a thread that no simulator schedules: other hosts
    look at real time, too. A holder that has ended on this machine, or that torchrun has ended, is replaced at once,
    any other when its file has not changed for 60 seconds, by the file system's own clock or while this process
    watched it. Before each write, the holder checks that it still holds the lease, and that the path still leads to
    `folder` (device and inode), which is kept open, so that its inode is given to no other one.
    """

    def __init__(self, root: Path, run: str | None = None, job: str = "") -> None:
        """Take the lease of a root, which is made if need be.

        Args:
            root: of the checkpoints.
            run: that this process goes on with; None: a new one.
            job: see `Holder`.

        Raises:
            CheckpointError: another process has it.
            OSError: the file cannot be written.
        """
        self._path, self._me = root / LEASE, Holder.here(run, job)
        make_folder(root)
        self._take()
        opened = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.folder = _identity(os.fstat(opened))
        running = allocate_lock()
        running.acquire()
        self._finalizer = weakref.finalize(self, _release, self._path, self._me, running, opened)
        # Imported by name, because a simulated world replaces the one in `_thread`: leases are renewed in real time.
        start_new_thread(_renew, (self._path, self._me.attempt, running))

    @property
    def run(self) -> str:
        """The training that this process is an attempt at."""
        return self._me.run

    @property
    def attempt(self) -> str:
        """What tells this lease from any other, for `is_seen`."""
        return self._me.attempt

    def go_on_with(self, run: str) -> None:
        """Say which training this process goes on with."""
        self._me = replace(self._me, run=run)
        fresh = self._path.with_name(f"{LEASE}.{self._me.attempt}")
        with suppress(OSError, CheckpointError):  # it is shown to people; whether it may be written, saves find out
            self.check()
            _create(fresh, self._me)
            os.replace(fresh, self._path)

    def check(self) -> None:
        """Make sure that this process still has the lease, and that the path still leads to the folder of it.

        Raises:
            LeaseLostError: it has not, as where the folder was unmounted, renamed or deleted.
            CheckpointError: this process has released it.
            OSError: the file cannot be read.
        """
        if not self._finalizer.alive:
            raise self._refusal("this run has released it", None, 0.0)
        self.check_folder(self.folder)
        found = _read(self._path)
        if found is None:
            raise self._refusal("its lease has been deleted", None, 0.0, LeaseLostError)
        if found[0] is None or found[0].attempt != self._me.attempt:
            blame = "another run has taken it over, which this one was too slow to prevent"
            raise self._refusal(blame, *found, LeaseLostError)

    def check_folder(self, began: str) -> None:
        """Raise LeaseLostError if the path leads to another folder now than `began`, a value of `folder`."""
        now = "no such folder"
        with suppress(FileNotFoundError, NotADirectoryError):
            now = _identity(os.stat(self._path.parent))
        if now != began:
            asked, blame = f"cannot save to {self._path.parent}", "this path leads to another folder than at the start"
            seen, hint = f"at the start: {began}\n  now: {now}", "to put it back, and to start the run again"
            raise LeaseLostError(asked, blame, seen, hint)

    def release(self) -> None:
        """Let others have it."""
        self._finalizer()

    def _take(self) -> None:
        first: tuple[Holder | None, float] | None = None
        # In seconds; a file that the system's clock puts into the future is no reason to wait more.
        watched = guarded = 0.0
        while not _create(self._path, self._me):
            found = _read(self._path)
            if found is None:
                continue
            first = first or found
            ended, left = None if found[0] is None else found[0].has_ended(self._me), 0.0
            if ended is None:
                left = _STALE_S - max(self._age(found[1]), watched if found == first else 0.0)
                ended = True if left <= 0 else None
            if ended:
                guarded = self._take_away(found, guarded)
            elif ended is None and found == first:
                if not watched and left > _SAY_S:
                    told = "waiting up to %.0f s to save to %s, which another run may use: %s"
                    who = self._described(*found)
                    logging.getLogger(__name__).warning(told, min(left, _STALE_S), self._path.parent, who)
                pause = min(1.0, left)
                _pause(pause)
                watched += pause
            else:
                gc.collect()  # a Checkpointer of this process that nobody refers to any more releases it
                if _read(self._path) is not None:
                    raise self._refusal("another run is using it", *found)

    def _take_away(self, found: tuple[Holder | None, float], waited: float) -> float:
        """Remove the lease of a holder that has ended, one process at a time: the next one may be there already.

        Return for how many seconds this has waited for another process that does the same.
        """
        guard = self._path.with_name(f"{LEASE}.taking")
        try:
            os.close(os.open(guard, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            if waited < _SAY_S <= waited + 0.01:
                told = "waiting up to %.0f s for another process to take over %s: %s"
                logging.getLogger(__name__).warning(told, _STALE_S, self._path, guard)
            _pause(0.01)
            with suppress(FileNotFoundError):
                if max(self._age(guard.lstat().st_mtime), waited) >= _STALE_S:  # killed between the lines below
                    os.unlink(guard)
            return waited + 0.01
        try:
            if _read(self._path) == found:
                os.unlink(self._path)
        finally:
            os.unlink(guard)
        return 0.0

    def _age(self, renewed: float) -> float:
        """Return seconds since a time that the file system has noted, by its own clock: hosts differ in theirs."""
        probe = self._path.with_name(f"{LEASE}.{self._me.attempt}.now")
        file = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            return os.fstat(file).st_mtime - renewed
        finally:
            os.close(file)
            os.unlink(probe)

    def _described(self, holder: Holder | None, renewed: float) -> str:
        if holder is None:
            return f"lease: {self._path}"
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(max(0.0, holder.since), 4e9)))
        who = f"run {holder.run} on host {holder.host!r}, process {holder.pid}, since {since}"
        return f"{who}, renewed {max(0.0, self._age(renewed)):.0f} s ago"

    def _refusal(
        self, blame: str, holder: Holder | None, renewed: float, kind: type[CheckpointError] = CheckpointError
    ) -> CheckpointError:
        hint = "another folder, or to wait until that run has ended"
        if holder is not None and holder.pid == os.getpid():
            hint = "close() of the Checkpointer that has it"
        return kind(f"cannot save to {self._path.parent}", blame, self._described(holder, renewed), hint)


def _identity(found: os.stat_result) -> str:
    return f"device {found.st_dev}, inode {found.st_ino}"


def is_seen(root: Path, attempt: str) -> bool:
    """Whether a rank finds the lease that another has taken: on a disk that they share, after some seconds at most."""
    for _ in range(_LOOKS):
        with suppress(OSError):
            found = _read(root / LEASE)
            if found is not None and found[0] is not None and found[0].attempt == attempt:
                return True
        _pause(_LOOK_EVERY_S)
    return False


def _create(path: Path, me: Holder) -> bool:
    """Write a lease where there is none; return whether there was none."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(file, json.dumps(asdict(me)).encode())
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(file)
    return True


def _read(path: Path) -> tuple[Holder | None, float] | None:
    """Return who has a lease, None if that is not readable, and when it was renewed; None if there is no lease."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        renewed = os.fstat(file).st_mtime
        written: Any = json.loads(os.read(file, 10_000))
        numbers = {"since": float(written["since"]), "pid": int(written["pid"]), "restart": int(written["restart"])}
        holder = Holder(**{**written, **numbers})
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):  # it is being written, or not one
        return None, renewed
    finally:
        os.close(file)
    return holder, renewed


def _renew(path: Path, attempt: str, running: Any) -> None:
    while not running.acquire(True, _RENEW_S):
        with suppress(OSError):
            found = _read(path)
            if found is not None and found[0] is not None and found[0].attempt == attempt:
                os.utime(path, follow_symlinks=False)


def _release(path: Path, me: Holder, running: Any, opened: int) -> None:
    if os.getpid() != me.pid:
        return  # in a process that the holder has forked
    running.release()
    os.close(opened)
    with suppress(OSError):
        found = _read(path)
        if found is not None and found[0] is not None and found[0].attempt == me.attempt:
            os.unlink(path)


def _pause(seconds: float) -> None:
    lock = allocate_lock()  # in real time, also on simulated ranks
    lock.acquire()
    lock.acquire(True, seconds)


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> str | None:
    """Return when a process of this machine began, "" if that cannot be known, None if there is none."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        pass  # another user's
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return None if fields[0] in ("Z", "X") else fields[19]
