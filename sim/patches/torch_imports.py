"""Modules of torch that are imported lazily: imported once for all ranks, as if no rank ran.

Defaults such as ``torch.distributed.nn``'s ``group=group.WORLD`` are worked out at the import. On a rank that would be
the rank's own group; outside of ranks it is None, which means the default group of whoever calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sim.kernel.context import this_thread

if TYPE_CHECKING:
    from sim.world import World

__all__ = ["IMPORT_SEAMS"]


class _TorchFinder:
    """Finds torch's own modules for ranks."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of torch that a rank imports; None for all others."""
        if this_thread.context is None or not fullname.startswith("torch."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            _run_outside_of_ranks(spec.loader)
        return spec


def _run_outside_of_ranks(loader: Any) -> None:
    """Let ``loader`` execute its module once while the thread counts as no rank's."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # the class's own is back
        context, this_thread.context = this_thread.context, None
        try:
            execute(module)
        finally:
            this_thread.context = context

    loader.exec_module = exec_module


def _torch_imports(world: World) -> Callable[[], None]:
    """A module of torch that a rank imports first is not the rank's: its defaults hold no group."""
    finder = _TorchFinder()
    place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
    sys.meta_path.insert(place, finder)
    return lambda: sys.meta_path.remove(finder)


IMPORT_SEAMS: tuple[Callable[[World], Callable[[], None]], ...] = (_torch_imports,)
"""What of Python's imports is changed for torch; the list of all seams is in ``sim/torch_seams.py``."""
