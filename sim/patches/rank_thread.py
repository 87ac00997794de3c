"""A rank's thread: what torch keeps per thread, and the modes that every thread of a rank has to be in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch.overrides import _get_current_function_mode_stack

from sim.kernel.context import this_thread
from sim.kernel.waiting import RankThread
from sim.late.switch import LateMode
from sim.patches.devices import MapDevice
from sim.patches.rank import RankContext
from sim.patches.torch_modules import end_profile

__all__ = [
    "catch_up",
    "enter_rank",
    "join_default_group",
    "leave_rank",
    "modes",
    "on_helper_thread",
    "thread_is_altered",
]


@contextmanager
def modes(context: RankContext) -> Iterator[None]:
    """The modes of torch that every thread of a rank has to be in."""
    host = context.host
    with ExitStack() as stack:
        if host.map_device is not None:
            stack.enter_context(MapDevice(host.map_device))
        if context.late is not None:
            stack.enter_context(LateMode(context.late))
        if context.shared is not None:
            stack.enter_context(context.shared.on_thread())
        elif context.late is None and host.device is not None:
            torch.set_default_device(host.device)
            stack.callback(torch.set_default_device, None)
        for watching in host.watching:
            for subscriber in watching(context):
                stack.enter_context(subscriber)
        context.function_modes = list(_get_current_function_mode_stack())
        yield


@contextmanager
def on_helper_thread(helper: RankThread) -> Iterator[None]:
    """Make the calling thread, which has just begun, one of a rank's."""
    context: RankContext = helper.context
    this_thread.context = context
    helper.resumed = catch_up
    try:
        torch.set_num_threads(context.host.intraop_threads or context.host.process_threads)
        enter_rank(context)
        with modes(context):
            yield
    finally:
        leave_rank()
        this_thread.context = None


def enter_rank(context: RankContext) -> None:
    """Make the rank's groups known by name on the thread that is about to run it, without autocast's cache.

    That is the process's: the first rank to leave an autocast empties it for all, so that others cast weights anew in
    their next forward, get gradients in another order, and reduce in another one.
    """
    torch.set_autocast_cache_enabled(False)
    for pg, name in context.c10d.pg_names.items():
        torch._C._distributed_c10d._register_process_group(name, pg)


def catch_up() -> None:
    """Let the calling thread know the groups that other threads of its rank have made."""
    context = this_thread.context
    if context is None:
        return
    bindings = torch._C._distributed_c10d
    for pg, name in context.c10d.pg_names.items():
        try:
            bindings._resolve_process_group(name)
        except RuntimeError:
            bindings._register_process_group(name, pg)


def leave_rank() -> None:
    """Forget the rank's group names on this thread, which goes back to the pool, and end what profiles it."""
    end_profile()
    torch.set_autocast_cache_enabled(True)
    torch._C._distributed_c10d._unregister_all_process_groups()


def thread_is_altered() -> bool:
    """Whether a rank has left a mode switched on that belongs to its thread and would reach the next rank on it."""
    return bool(
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch.is_inference_mode_enabled()
        or torch._C._is_any_autocast_enabled()
        or not torch._C._autograd._saved_tensors_hooks_is_enabled()
        # Before torch 2.13 a checkpointed forward that raises leaves its hooks on.
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )


def join_default_group(context: RankContext) -> None:
    """Make the rank's default group, as a launcher's script would have done."""
    dist.init_process_group(context.network.backend)
    context.joined_by_world = context.has_joined = True
