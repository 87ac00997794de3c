"""Each rank's own modules: `__main__` and user code where it runs a script, and some installed packages.

User code is what Python finds in the script's folder, and anywhere else on `sys.path` but in the standard library
and among installed packages. `packages.py` names the packages. The rest (torch, numpy, `hyper_parallel` itself)
is there once for all ranks.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from functools import lru_cache
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder, SourceFileLoader
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from sim.kernel.context import current_context
from sim.script.packages import SharedReferences

_OURS = sys.modules["sim"]
_INSTALLED = {"site-packages", "dist-packages"}


class OwnModules:
    """The entries of `sys.modules` that one rank does not share.

    Args:
        references: To the packages of which it has a copy.

    Attributes:
        main: Its `__main__` if it runs a script; then user code is its own, too.
        has_sim: Whether `sim` is a module of the user's, and not this package.
        folder: Of the script.
    """

    def __init__(self, references: SharedReferences) -> None:
        self.names: dict[str, None] = {}  # in the order of import
        self.locks: dict[str, Any] = {}
        self.main: ModuleType | None = None
        self.has_sim = False
        self.folder = ""
        self._references = references
        self._held: dict[str, ModuleType] = {}
        self._entered = 0  # how many modules there were when its turn began
        self._known = 0  # how many modules there were when shared ones were last looked through

    def enter(self) -> None:
        """Put them into `sys.modules`."""
        if self.main is not None:
            sys.modules["__main__"] = self.main
        if self.has_sim:
            sys.modules.pop("sim", None)
        sys.modules.update(self._held)
        self._entered = len(sys.modules)

    def leave(self) -> None:
        """Take them out of `sys.modules`; `__main__` stays until another one takes its place."""
        if self.main is not None:
            self.main = sys.modules["__main__"]
            if len(sys.modules) > self._entered:
                self._adopt(len(sys.modules) - self._entered)
        if not self.names and not self.has_sim:
            return
        self._held = {name: sys.modules.pop(name) for name in self.names if name in sys.modules}
        if self.has_sim:
            sys.modules["sim"] = _OURS
        if len(sys.modules) != self._known:
            packages = {name: module for name, module in self._held.items() if self._references.covers(name)}
            self._references.forward(packages)
            self._known = len(sys.modules)

    def _adopt(self, newest: int) -> None:
        """Let modules be its own that the script has put into `sys.modules` itself, as for plug-ins from files.

        Args:
            newest: Entries to look at.
        """
        for name in reversed(list(islice(reversed(sys.modules), newest))):  # what a module is part of comes first
            spec = getattr(sys.modules[name], "__spec__", None)
            if isinstance(spec, ModuleSpec):
                is_own = belongs_to_the_user(spec, self.folder)
            else:  # made by hand, as stand-ins are, or None, which forbids an import
                file, parent = getattr(sys.modules[name], "__file__", None), name.rpartition(".")[0]
                is_own = not parent or parent in self.names
                is_own = is_own and (not isinstance(file, str) or _is_users_file(os.path.abspath(file), self.folder))
            if is_own and name not in self.names:
                self.names[name] = None

    def takes(self, spec: ModuleSpec, folder: str) -> bool:
        """Whether a module that the rank imports becomes its own. Compiled ones do not: they cannot be copied."""
        if self._references.covers(spec.name):
            return not isinstance(spec.loader, ExtensionFileLoader)
        return self.main is not None and belongs_to_the_user(spec, folder)

    def holds(self, name: str) -> bool:
        """Whether `name` is, or may turn out to be, a module of this rank alone."""
        top = name.partition(".")[0]
        return top in self.names or self._references.covers(name) or (self.main is not None and top not in sys.modules)


def _of_this_rank() -> OwnModules | None:
    context = current_context()
    return None if context is None else context.modules


class RankFinder:
    """Finds what `PathFinder` finds, and notes which modules are the calling rank's own.

    Args:
        folder: The script's.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that a rank imports; None outside of ranks, and for parts of shared packages."""
        own = _of_this_rank()
        parent = fullname.rpartition(".")[0]
        if own is None or (parent and parent not in own.names):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and own.takes(spec, self._folder):
            own.names[fullname] = None
        return spec


class RankLocks(dict[str, Any]):
    """Python's locks by module name; a rank that waits for others while it imports blocks nobody else's import."""

    def __init__(self, shared: dict[str, Any]) -> None:
        super().__init__()
        self.shared = shared

    def _of(self, name: str) -> dict[str, Any]:
        own = _of_this_rank()
        return own.locks if own is not None and own.holds(name) else self.shared

    def __getitem__(self, name: str) -> Any:
        found = self.get(name)
        if found is None:
            raise KeyError(name)
        return found

    def __setitem__(self, name: str, lock: Any) -> None:
        self._of(name)[name] = lock

    def __delitem__(self, name: str) -> None:
        del self._of(name)[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The lock of `name`, for the calling rank."""
        return self._of(name).get(name, default)


def find_module(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """The spec of what `python -m name` runs, found without importing anything; None if there is no such source.

    >>> find_module("json.tool", sys.path).name, find_module("json", sys.path)  # json has no __main__
    ('json.tool', None)
    """
    spec, within, known = None, list(path), ""
    for part in name.split("."):
        known = f"{known}.{part}" if known else part
        spec = PathFinder.find_spec(known, within)
        if spec is None:
            return None
        within = list(spec.submodule_search_locations or ())
    if within:
        spec = PathFinder.find_spec(f"{name}.__main__", within)
    return spec if spec is not None and isinstance(spec.loader, SourceFileLoader) else None


def belongs_to_the_user(spec: ModuleSpec, folder: str) -> bool:
    """Whether a module is user code, of which each rank has a copy. Compiled modules are not: they cannot be copied.

    >>> import importlib.util
    >>> belongs_to_the_user(importlib.util.find_spec("json"), "/home/me"), belongs_to_the_user(
    ...     ModuleSpec("helper", None, origin="/home/me/helper.py"), "/home/me")
    (False, True)
    """
    if isinstance(spec.loader, ExtensionFileLoader):
        return False
    where = [spec.origin] if spec.origin is not None else list(spec.submodule_search_locations or ())
    return bool(where) and all(_is_users_file(os.path.abspath(file), folder) for file in where)


@lru_cache(maxsize=4096)
def _is_users_file(file: str, folder: str) -> bool:
    if file.startswith(folder.rstrip(os.sep) + os.sep):
        return _INSTALLED.isdisjoint(Path(file[len(folder) :]).parts)  # a virtual environment beside the script
    return not file.startswith(_library_folders()) and _INSTALLED.isdisjoint(Path(file).parts)


@lru_cache(maxsize=1)
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).resolve().parent.parent)]
    return tuple(os.path.abspath(folder) + os.sep for folder in folders)
