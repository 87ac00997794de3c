"""Settings of the process that become each rank's own once some rank changes one: torch's, and the working folder.

A rank may wait for others inside of `with sdpa_kernel(...)`, or while it has set another default dtype. If ranks shared
these, they would end such blocks in the wrong order, and what one of them has set would stay. A setting that no rank
changes costs nothing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import _random
from torch.nn.utils import parametrize
from torch.utils import checkpoint

from sim.kernel.context import current_context
from sim.patches.locks import exchange
from sim.patches.rank import Host, RankContext, Setting, Undo

__all__ = ["SETTING_PATCHES"]


class _Changed(NamedTuple):
    """A function that changes a setting."""

    owner: Any
    name: str
    setting: Setting


def _variables(module: Any, *names: str) -> Setting:
    """Variables of a module that functions of it assign to."""

    def read() -> tuple[Any, ...]:
        return tuple(getattr(module, name) for name in names)

    def write(values: tuple[Any, ...]) -> None:
        for name, value in zip(names, values, strict=True):
            setattr(module, name, value)

    return Setting(read, write)


def _settings_of_torch() -> list[_Changed]:
    c: Any = torch._C
    pairs: dict[str, Callable[[], Any]] = {"_set_default_dtype": torch.get_default_dtype}
    pairs |= {"_set_float32_matmul_precision": torch.get_float32_matmul_precision}
    pairs |= {"_set_sdp_priority_order": c._get_sdp_priority_order}
    for kind in ("flash", "mem_efficient", "math", "cudnn", "overrideable"):
        pairs[f"_set_sdp_use_{kind}"] = getattr(c, f"_get_{kind}_sdp_enabled")
    changed = [_Changed(c, name, Setting(read, getattr(c, name))) for name, read in pairs.items()]

    determine, note_anomalies = c._set_deterministic_algorithms, torch.set_anomaly_enabled
    deterministic = Setting(
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: determine(value[0], warn_only=value[1]),
    )
    anomalies = Setting(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()), lambda value: note_anomalies(*value)
    )
    return [
        *changed,
        _Changed(c, "_set_deterministic_algorithms", deterministic),
        _Changed(torch, "set_anomaly_enabled", anomalies),
        _Changed(checkpoint, "set_checkpoint_early_stop", _variables(checkpoint, "_enable_checkpoint_early_stop")),
        _Changed(checkpoint, "set_checkpoint_debug_enabled", _variables(checkpoint, "_checkpoint_debug_enabled")),
        _Changed(_random.OffsetBasedRNGTracker, "__init__", _variables(_random, "_rng_tracker")),
        _Changed(parametrize, "cached", _variables(parametrize, "_cache_enabled", "_cache")),
    ]


def _working_folder() -> list[_Changed]:
    change = os.chdir

    def read() -> str | None:
        try:
            return os.getcwd()
        except FileNotFoundError:  # somebody has deleted it
            return None

    def write(folder: str | None) -> None:
        try:
            change(folder or os.sep)
        except FileNotFoundError:
            change(os.sep)

    setting = Setting(read, write)
    return [_Changed(os, name, setting) for name in ("chdir", "fchdir") if hasattr(os, name)]


def _settings(host: Host) -> Undo:
    """What a rank sets with one of these functions is its own until the run ends."""

    def on_rank(original: Callable[..., Any], setting: Setting) -> Callable[..., Any]:
        @functools.wraps(original)
        def change(*args: Any, **options: Any) -> Any:
            context: RankContext | None = current_context()
            if context is not None and os.getpid() == context.scheduler.pid:
                changed = context.host.settings  # torch.compile may keep this function, not the host
                if setting not in changed:
                    changed[setting] = setting.read()
            return original(*args, **options)

        return change

    changes = [*_settings_of_torch(), *_working_folder()]
    return exchange(
        [(each.owner, each.name, on_rank(getattr(each.owner, each.name), each.setting)) for each in changes]
    )


SETTING_PATCHES = (_settings,)
"""What makes settings each rank's own."""
