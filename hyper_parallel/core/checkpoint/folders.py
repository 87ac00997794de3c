"""Folders that are there as a whole or not at all: written beside their place, renamed into it, renamed away first.

Beside a checkpoint `name` may lie, hidden: `.name.saving-<attempt>`, which nobody has finished; `.name.replaced-...`,
a complete one that another is about to take the place of; `.name.deleted-...`, on its way out.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hyper_parallel.core.checkpoint.record import NAME

__all__ = ["clean", "is_complete", "place", "put_in_place", "remove"]

_SAVING, _REPLACED, _DELETED = ".saving-", ".replaced-", ".deleted-"


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


def remove(folder: Path) -> None:
    """Take away a checkpoint; what is left if this is interrupted is none any more."""
    gone = folder.with_name(f".{folder.name}{_DELETED}{os.urandom(4).hex()}")
    os.rename(folder, gone)
    sync_folder(folder.parent)
    shutil.rmtree(gone, ignore_errors=True)


def found(folder: Path) -> Path | None:
    """Return where the checkpoint of that name is: there, or beside it if a replacement was interrupted; else None."""
    if is_complete(folder):
        return folder
    return next((path for path in _beside(folder, _REPLACED) if is_complete(path)), None)


def clean(folder: Path) -> None:
    """Finish or take back what interrupted saves of a folder have left; nobody may be saving it."""
    for path in _beside(folder, _REPLACED):
        if is_complete(folder) or not is_complete(path):
            _discard(path)
        elif not folder.exists():
            os.rename(path, folder)
            sync_folder(folder.parent)
    for path in [*_beside(folder, _SAVING), *_beside(folder, _DELETED)]:
        shutil.rmtree(path, ignore_errors=True)


def saved_names(root: Path) -> list[str]:
    """Return the names of everything in a folder that is a checkpoint or has been left of one, sorted."""
    names = []
    for name in os.listdir(root) if root.is_dir() else []:
        kinds = [kind for kind in (_SAVING, _REPLACED, _DELETED) if kind in name]
        names.append(name[1:].partition(kinds[0])[0] if name.startswith(".") and kinds else name)
    return sorted(dict.fromkeys(names))


def _discard(path: Path) -> None:
    """Delete a complete checkpoint: first it stops being one."""
    if is_complete(path):
        os.unlink(path / NAME)
    shutil.rmtree(path, ignore_errors=True)


def _beside(folder: Path, kind: str) -> list[Path]:
    if not folder.parent.is_dir():
        return []
    start = f".{folder.name}{kind}"
    return [folder.with_name(name) for name in sorted(os.listdir(folder.parent)) if name.startswith(start)]
