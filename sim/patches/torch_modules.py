"""State that torch keeps for all modules of a process, and its own modules that are imported lazily.

Hooks on all modules and optimizers are exchanged when another rank runs on. `register_module_forward_pre_hook` and
its family, and what stands on them (`ModTracker`, `CommDebugMode`), take every module that is called for one of the
process. The dictionaries stay what they are, since handles and compiled functions refer to them; their contents are the
running rank's. Only the library's own hooks stay in place: it registers them once, when some rank first imports it, and
they serve all ranks.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer

from sim.kernel.context import current_context, this_thread
from sim.patches.locks import exchange

__all__ = ["MODULE_PATCHES", "Hooks", "end_profile", "enter_hooks", "leave_hooks"]

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
    """Put into torch's tables what `leave_hooks` has returned."""
    if hooks is None:
        return
    for table, own in zip(_TABLES, hooks.tables, strict=True):
        table.update(own)
    setattr(_modules, _FULL, hooks.full)


# -- modules of torch that are imported lazily ---------------------------------------------------------------------
#
# They are imported once for all ranks, as if no rank ran. Defaults such as `torch.distributed.nn`'s
# `group=group.WORLD` are worked out at the import. On a rank that would be the rank's own group; outside of ranks it
# is None, which means the default group of whoever calls.


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
    """Let `loader` execute its module once while the thread counts as no rank's."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # the class's own is back
        context, this_thread.context = this_thread.context, None
        try:
            execute(module)
        finally:
            this_thread.context = context

    loader.exec_module = exec_module


def _torch_imports(host: object) -> Callable[[], None]:
    """A module of torch that a rank imports first is not the rank's: its defaults hold no group."""
    finder = _TorchFinder()
    place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
    sys.meta_path.insert(place, finder)
    return lambda: sys.meta_path.remove(finder)


def _active_ddp(host: object) -> Callable[[], None]:
    """Which DDP module's forward runs is known per rank: torch has one place for all, and ranks take turns in forward.

    `torch.compile` asks for it. Since torch 2.13 a forward puts back what it found there, which was another rank's.
    """
    owner = DistributedDataParallel
    inside, ask = vars(owner)["_inside_ddp_forward"], vars(owner)["_get_active_ddp_module"]
    active = threading.local()

    @contextmanager
    @torch._disable_dynamo(recursive=False)
    def inside_forward(self: Any) -> Iterator[None]:
        if current_context() is None:
            with inside(self):
                yield
            return
        before, active.module = getattr(active, "module", None), self
        try:
            yield
        finally:
            active.module = before

    def active_module(cls: type) -> Any:
        return ask.__get__(None, cls)() if current_context() is None else getattr(active, "module", None)

    return exchange(
        [(owner, "_inside_ddp_forward", inside_forward), (owner, "_get_active_ddp_module", classmethod(active_module))]
    )


# -- the profiler --------------------------------------------------------------------------------------------------


class _NoRecords:
    """What torch's profiler has recorded of a rank that began while another one was being profiled: nothing."""

    def events(self) -> list[Any]:
        """Return no operations."""
        return []

    experimental_event_tree = trace_activities = events

    def trace_start_ns(self) -> int:
        """Return the time 0."""
        return 0

    def save(self, path: str) -> None:
        """Write a trace without events."""
        Path(path).write_text('{"traceEvents": []}\n')


def _profiler(host: object) -> Callable[[], None]:
    """One rank is profiled at a time: torch's profiler is one for the process, and crashes if two end it.

    It records the operations of the thread that has begun it. For a rank that begins meanwhile it stays without events.
    """
    profiler: Any = torch.autograd.profiler
    enable, disable = profiler._enable_profiler, profiler._disable_profiler
    owners: list[Any] = [None] if profiler._is_profiler_enabled else []  # None: the process itself
    others: list[Any] = []

    def begin(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def begin_on_rank(*args: Any, **options: Any) -> None:
            asking = current_context()
            if asking not in others and (not owners or owners[0] is asking):
                owners[:] = [asking]
                original(*args, **options)
            elif asking not in others:
                others.append(asking)
                who = "the process" if owners[0] is None else f"rank {owners[0].rank}"
                whose = "this profile" if asking is None else f"the profile of rank {asking.rank}"
                warnings.warn(f"{whose} stays empty: torch profiles {who} already, and one at a time", stacklevel=2)

        return begin_on_rank

    def end() -> Any:
        asking = current_context()
        if asking in others:
            others.remove(asking)
            return _NoRecords()
        if owners and owners[0] is asking:
            owners.clear()
        return disable()

    return exchange(
        [
            (profiler, "_prepare_profiler", begin(profiler._prepare_profiler)),
            (profiler, "_enable_profiler", begin(enable)),
            (profiler, "_disable_profiler", end),
        ]
    )


def end_profile() -> None:
    """End a profile that a rank has left running: it would be on its thread for the next one."""
    if torch.autograd._profiler_enabled():
        torch.autograd.profiler._disable_profiler()


def _empty_memory(host: object) -> Callable[[], None]:
    """What `Module.to_empty` gives memory is full of NaN, or of the largest integers: what nobody fills shows."""
    original = torch.nn.Module.to_empty

    @functools.wraps(original)
    def to_empty(self: torch.nn.Module, *, device: Any, recurse: bool = True) -> torch.nn.Module:
        if current_context() is None:
            return original(self, device=device, recurse=recurse)
        return self._apply(lambda tensor: _poisoned(torch.empty_like(tensor, device=device)), recurse=recurse)

    return exchange([(torch.nn.Module, "to_empty", to_empty)])


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    if type(local) in (torch.Tensor, torch.nn.Parameter) and not local.is_meta:
        dtype, value = local.dtype, float("nan")
        if not (dtype.is_floating_point or dtype.is_complex):
            value = 1 if dtype is torch.bool else torch.iinfo(dtype).max
        # No operation of the program's. A dtype of four bits has no fill, and no NaN.
        with torch.no_grad(), torch._C._DisableTorchDispatch(), suppress(NotImplementedError):
            local.fill_(value)
    return tensor


MODULE_PATCHES = (_active_ddp, _torch_imports, _profiler, _empty_memory)
"""What is changed of torch's modules."""
