"""The hooks that torch keeps for all modules and optimizers of a process, exchanged when another rank runs on.

``register_module_forward_pre_hook`` and its family, and what stands on them (``ModTracker``, ``CommDebugMode``), take
every module that is called for one of the process. The dictionaries stay what they are, since handles and compiled
functions refer to them; their contents are the running rank's. Only the library's own hooks stay in place: it registers
them once, when some rank first imports it, and they serve all ranks.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.optim import optimizer

__all__ = ["Hooks", "enter_hooks", "leave_hooks"]

_modules: Any = torch.nn.modules.module
_FULL = "_global_is_full_backward_hook"  # whether the backward hooks are of the newer kind, once there is one
_TABLES: tuple[dict[int, Any], ...] = tuple(
    value
    for name, value in chain(sorted(vars(_modules).items()), sorted(vars(optimizer).items()))
    if name.startswith("_global_") and isinstance(value, dict)
)
_STAYING: tuple[dict[int, Any], ...] = tuple({} for _ in _TABLES)  # the library's own, by table


class Hooks(NamedTuple):
    """The contents of torch's tables, without what stays there."""

    tables: tuple[dict[int, Any], ...]
    full: bool | None


def leave_hooks() -> Hooks | None:
    """Take the hooks out of torch's tables; None if there are none to take."""
    full = _modules._global_is_full_backward_hook
    if full is None and not any(map(_has_more, _TABLES, _STAYING)):
        return None
    hooks = Hooks(tuple(map(_take_out, _TABLES, _STAYING)), full)
    setattr(_modules, _FULL, None)
    return hooks if full is not None or any(hooks.tables) else None


def _has_more(table: dict[int, Any], staying: dict[int, Any]) -> bool:
    return len(table) != len(staying)


def _take_out(table: dict[int, Any], staying: dict[int, Any]) -> dict[int, Any]:
    taken = dict(table)
    table.clear()
    staying.clear()
    for handle, hook in list(taken.items()):
        if (getattr(hook, "__module__", None) or "").startswith("hyper_parallel."):
            table[handle] = staying[handle] = taken.pop(handle)
    return taken


def enter_hooks(hooks: Hooks | None) -> None:
    """Put into torch's tables what :func:`leave_hooks` has returned."""
    if hooks is None:
        return
    for table, own in zip(_TABLES, hooks.tables, strict=True):
        table.update(own)
    setattr(_modules, _FULL, hooks.full)
