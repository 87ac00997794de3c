"""Compilers, data workers and offload of a script, which an estimate goes without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed import fsdp
from torch.utils.data import DataLoader

from hyper_parallel.core.fully_shard.policy import CPUOffloadPolicy

__all__ = ["without_compiler_and_workers", "without_offload"]


@contextmanager
def without_compiler_and_workers(on_change: Callable[[str], None]) -> Iterator[None]:
    """Run what is compiled as it is written, and load data in the rank that asks for it.

    A compiler would make graphs of operations on tensors without data, in which no module and no line of the script is
    left. A worker is a fork of this process, whose ranks it would have as well.

    Args:
        on_change: called at each call that is answered otherwise than the script asks, with how, in words.
    """
    compile_, get_iterator = torch.compile, DataLoader._get_iterator
    with ExitStack() as stack:
        stack.callback(setattr, torch, "compile", compile_)
        stack.callback(setattr, DataLoader, "_get_iterator", get_iterator)
        is_eager = False

        def compile_nothing(*args: Any, **options: Any) -> Any:
            nonlocal is_eager
            if not is_eager:  # not before: it imports the compiler, which takes seconds
                is_eager = True
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            on_change("torch.compile: taken as eager, nothing is fused")
            return compile_(*args, **options)

        def load_here(loader: Any) -> Any:
            workers, timeout = loader.num_workers, loader.timeout
            if not workers:
                return get_iterator(loader)
            on_change(f"DataLoader: its {workers} workers are not started, the rank loads the data")
            loader.num_workers = loader.timeout = 0
            try:
                return get_iterator(loader)
            finally:
                loader.num_workers, loader.timeout = workers, timeout

        torch.compile = compile_nothing
        DataLoader._get_iterator = load_here  # type: ignore[method-assign, assignment]
        yield


@contextmanager
def without_offload(on_change: Callable[[str], None]) -> Iterator[None]:
    """Say of each policy of offload that what it keeps on the host counts as the device's here: both are one CPU.

    Args:
        on_change: as above.
    """
    with ExitStack() as stack:
        for policy in (CPUOffloadPolicy, fsdp.CPUOffloadPolicy):
            stack.callback(setattr, policy, "__init__", policy.__init__)
            policy.__init__ = _noticed(policy.__init__, on_change)  # type: ignore[method-assign]
        yield


def _noticed(init: Callable[..., None], on_change: Callable[[str], None]) -> Callable[..., None]:
    def init_policy(policy: Any, *args: Any, **options: Any) -> None:
        init(policy, *args, **options)
        on_change("CPUOffloadPolicy: taken as no offload, all is on the device and nothing is copied")

    return init_policy
