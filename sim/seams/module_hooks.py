"""The hooks that torch keeps for all modules and optimizers of a process, exchanged when another rank runs on.

``register_module_forward_pre_hook`` and its family, and what stands on them (``ModTracker``, ``CommDebugMode``), take
every module that is called for one of the process. The dictionaries stay what they are, since handles and compiled
functions refer to them; their contents are the running rank's.
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


class Hooks(NamedTuple):
    """The contents of torch's tables."""

    tables: tuple[dict[int, Any], ...]
    full: bool | None


def leave_hooks() -> Hooks | None:
    """Take the hooks out of torch's tables; None if there are none."""
    full = _modules._global_is_full_backward_hook
    if full is None and not any(_TABLES):
        return None
    hooks = Hooks(tuple([dict(table) for table in _TABLES]), full)
    for table in _TABLES:
        table.clear()
    setattr(_modules, _FULL, None)
    return hooks


def enter_hooks(hooks: Hooks | None) -> None:
    """Put into torch's tables, which are empty, what :func:`leave_hooks` has returned."""
    if hooks is None:
        return
    for table, own in zip(_TABLES, hooks.tables, strict=True):
        table.update(own)
    setattr(_modules, _FULL, hooks.full)
