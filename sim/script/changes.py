"""Compilers, data workers and other ranks' shards, left out of a script's estimate, and offload's copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.utils.data import DataLoader

from sim.patches.locks import exchange


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

        stack.callback(exchange([(torch, "compile", compile_nothing), (DataLoader, "_get_iterator", load_here)]))
        yield


class Mover(Protocol):
    """What records copies between a rank's host and its device; see `sim.mesh.tracing.record.Recorder`.

    Attributes:
        has_host: whether their memory is not one.
        move: makes the copy of a tensor; its second argument: whether the host goes on meanwhile.
    """

    has_host: bool
    move: Callable[[torch.Tensor, bool], torch.Tensor] | None

    def copy_to_device(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool) -> None:
        """Copy `source` to `target`."""

    def copy_to_host(self, source: torch.Tensor, *, pinned: bool, wait: bool) -> torch.Tensor:
        """Return a copy."""


class OwnChunk:
    """What torch's FSDP2 takes of the chunks of a parameter, one for each rank: the first, and the rank's own.

    On 100,000 ranks all of them took minutes for each parameter.

    Args:
        tensor: the parameter.
        number: of chunks; those behind its end are empty.
        dim: that is split.
    """

    def __init__(self, tensor: torch.Tensor, number: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._each = -(-tensor.size(dim) // number)

    def __getitem__(self, index: int) -> torch.Tensor:
        start, size = index * self._each, self._tensor.size(self._dim)
        if start and start >= size:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._each, size - start))


@contextmanager
def recorded_fsdp(here: Callable[[], Mover]) -> Iterator[None]:
    """Let torch's FSDP2 copy what it offloads, and make no chunks of other ranks.

    Of tensors that are all on one CPU, `Tensor.to` makes no copy.

    Args:
        here: returns what records the rank that asks.
    """
    given: Any = FSDPParam.all_gather_inputs  # a property
    reduce = _fsdp_param_group.foreach_reduce

    def all_gather_inputs(param: FSDPParam) -> list[torch.Tensor]:
        mover = here()
        if not (param.offload_to_cpu and mover.has_host and param.sharded_state is ShardedState.SHARDED):
            return list(given.fget(param))

        def to_device(source: torch.Tensor, later: bool) -> torch.Tensor:
            del later  # always, but pageable memory is waited for
            target = torch.empty_like(source, memory_format=torch.contiguous_format)
            mover.copy_to_device(target, source, pinned=param.pin_memory)
            return target

        with _moving(mover, to_device):
            return list(given.fget(param))

    def foreach_reduce(fsdp_params: list[FSDPParam], *args: Any, **options: Any) -> Any:
        mover = here()
        if not (mover.has_host and any(param.offload_to_cpu for param in fsdp_params)):
            return reduce(fsdp_params, *args, **options)
        pinned = all(param.pin_memory for param in fsdp_params)
        with _moving(mover, lambda source, later: mover.copy_to_host(source, pinned=pinned, wait=not later)):
            return reduce(fsdp_params, *args, **options)

    undo = exchange(
        [
            (FSDPParam, "all_gather_inputs", property(all_gather_inputs)),
            (_fsdp_param_group, "foreach_reduce", foreach_reduce),
            (_fsdp_param, "_chunk_with_empty", OwnChunk),
        ]
    )
    try:
        yield
    finally:
        undo()


@contextmanager
def _moving(mover: Mover, move: Callable[[torch.Tensor, bool], torch.Tensor]) -> Iterator[None]:
    mover.move = move
    try:
        yield
    finally:
        mover.move = None
