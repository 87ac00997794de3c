"""Activations on the host: what autograd saves in a block goes there while the next one computes, and comes back.

For blocks 1 to n, C the stream that computes and O that of the copies; each arrow is a wait::

    forward    C: block 1    block 2    block 3
               O:         -> to host 1  to host 2
    memory                          -> free 1 -> free 2
    backward   C:            block 3 -> block 2 -> block 1
               O:            to device 2  to device 1

Block n is not copied: no block computes after it, and backward begins with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hyper_parallel.core.common.torch_compat import calls_compiled, runs_eagerly
from hyper_parallel.platform import Event, Platform, Stream, get_platform

_SMALLEST = 512  # bytes: an allocator rounds up to it, so that less is not worth a copy
_BREAKS = (
    "activations go to the host between two blocks: compile without fullgraph=True, or each block before it is wrapped"
)


class _SavedMemory:
    """The memory of tensors that autograd has saved: all of a storage, on the device, on the host, or on both.

    Args:
        tensor: all of it, flat, on the device.

    Attributes:
        tensor: None: it is on the host alone.
        host: a copy there; None: there is none.
        arrival: what has to be waited for before `tensor` is used.
        version: of the tensor when it was left, to tell of changes in place; None: it has not been.
        stays: it belongs to parameters or buffers, whose memory is somebody else's.
    """

    __slots__ = ("__weakref__", "arrival", "host", "stays", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.host: torch.Tensor | None = None
        self.arrival: Event | None = None
        self.version: int | None = None
        self.stays = False


class _SavedTensor(NamedTuple):
    """A saved tensor as a part of its memory."""

    memory: _SavedMemory
    owner: _BlockActivations
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    version: int


class _SavedSubclass(NamedTuple):
    """A saved tensor that consists of others, such as a DTensor."""

    kind: Any
    inner: dict[str, Any]
    context: Any
    size: Any
    stride: Any


class _BlockActivations:
    """What one forward of a block has saved.

    Autograd alone keeps the memory: a node of the graph that is done drops what it has saved, on the device and on the
    host.

    Args:
        before: that of the block which computed before; backward comes to it next.

    Attributes:
        memories: of what was saved, by identity.
        sent: comes after the copies to the host; None: none is under way.
        entered: backward has come here.
    """

    def __init__(self, before: _BlockActivations | None) -> None:
        self.before = None if before is None else weakref.ref(before)
        self.memories: dict[int, weakref.ref[_SavedMemory]] = {}
        self.sent: Event | None = None
        self.entered = False

    def alive(self) -> Iterator[_SavedMemory]:
        """Yield what backward still needs, and what may be moved."""
        for reference in self.memories.values():
            memory = reference()
            if memory is not None and not memory.stays:
                yield memory


class ActivationOffload:
    """Moves what the blocks of a model save between their device and the host, on a stream of its own.

    A copy of the model has its own.
    """

    def __init__(self) -> None:
        self._stream: Stream | None = None
        self._last: _BlockActivations | None = None
        self._known: dict[tuple[int, torch.dtype], weakref.ref[_SavedMemory]] = {}

    def __reduce__(self) -> Any:
        return type(self), ()

    @property
    def has_moved(self) -> bool:
        """Whether anything has been on the host."""
        return self._stream is not None

    @calls_compiled
    def run(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the forward of a block, and move what the block before it has saved to the host meanwhile."""
        begun = self._begin()
        if begun is None:
            return block(*args, **kwargs)
        own, hooks = begun
        try:
            with hooks:
                return block(*args, **kwargs)
        finally:
            self._end(block, own)

    @runs_eagerly
    def _begin(self) -> tuple[_BlockActivations, saved_tensors_hooks] | None:
        platform = get_platform()
        if not (torch.is_grad_enabled() and platform.has_own_memory):
            return None
        own = _BlockActivations(self._last)
        if self._last is not None:
            self._send(self._last, platform)
        self._last = own
        return own, saved_tensors_hooks(lambda tensor: self._pack(tensor, own, platform), self._unpack)

    @runs_eagerly
    def _end(self, block: nn.Module, own: _BlockActivations) -> None:
        _find_weights(block, own)
        before = None if own.before is None else own.before()
        if before is not None:
            self._leave(before, own, get_platform())

    # -- forward -------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Any, own: _BlockActivations, platform: Platform) -> Any:
        if not isinstance(tensor, torch.Tensor):  # the mesh of a DTensor
            return tensor
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.wait()
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            inner = {name: self._pack(getattr(tensor, name), own, platform) for name in names}
            return _SavedSubclass(type(tensor), inner, context, tensor.size(), tensor.stride())
        is_weight = tensor.is_leaf and tensor.requires_grad
        plain = tensor.detach()
        if is_weight or not _is_movable(plain, platform):
            return plain
        memory = self._memory_of(plain, own)
        return _SavedTensor(
            memory, own, tuple(plain.size()), tuple(plain.stride()), int(plain.storage_offset()), plain._version
        )

    def _memory_of(self, tensor: torch.Tensor, own: _BlockActivations) -> _SavedMemory:
        """Find the memory of a tensor, which several may be saved in: it is moved once."""
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor.dtype
        known = self._known.get(key)
        memory = None if known is None else known()
        # Of one that has left the device, the address may be somebody else's by now.
        if memory is None or memory.tensor is None or memory.tensor.untyped_storage()._cdata != storage._cdata:
            flat = tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
            memory = _SavedMemory(flat)
            self._known[key] = weakref.ref(memory)
        own.memories[id(memory)] = self._known[key]
        return memory

    def _send(self, group: _BlockActivations, platform: Platform) -> None:
        """Issue the copies to the host."""
        self._known = {}
        memories = [m for m in group.alive() if m.tensor is not None and m.host is None]
        if not memories:
            return
        with self._copying(platform) as stream:
            for memory in memories:
                assert memory.tensor is not None
                pinned = platform.supports_pinned_memory
                memory.host = platform.copy_to_host(memory.tensor, pinned=pinned, wait=False)
        group.sent = stream.record_event()

    def _leave(self, group: _BlockActivations, latest: _BlockActivations, platform: Platform) -> None:
        """Give the memory on the device back, which is used again behind what computes: that waits for the copies."""
        if group.sent is not None:
            platform.current_stream().wait_event(group.sent)
            group.sent = None
        used = {id(memory) for memory in latest.alive()}  # as an output is that the next block has for its input
        for memory in group.alive():
            if memory.host is not None and memory.tensor is not None and id(memory) not in used:
                memory.version = memory.tensor._version
                memory.tensor = None

    # -- backward ------------------------------------------------------------------------------------------------

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, _SavedSubclass):
            inner = {name: self._unpack(each) for name, each in saved.inner.items()}
            made: torch.Tensor = saved.kind.__tensor_unflatten__(inner, saved.context, saved.size, saved.stride)
            return made
        if not isinstance(saved, _SavedTensor):
            plain: torch.Tensor = saved
            return plain
        memory = saved.memory
        if not memory.stays:
            self._enter(saved.owner)
        if memory.tensor is None:  # the block that saved it has been entered before, by another graph of its memory
            self._bring(saved.owner, get_platform())
        assert memory.tensor is not None
        if memory.arrival is not None:
            get_platform().current_stream().wait_event(memory.arrival)
            memory.arrival = None
        if saved.version != (memory.tensor._version if memory.version is None else memory.version):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation\n"
                f"  seen: {memory.tensor.dtype} {list(saved.size)}, saved in a block whose activations are offloaded\n"
                "  try: an operation that is not in place, or clone() before it"
            )
        return memory.tensor.as_strided(saved.size, saved.stride, saved.offset)

    def _enter(self, group: _BlockActivations) -> None:
        """Backward has come to a block: have what it needs, and get what the block before it has saved ahead."""
        if group.entered:
            return
        group.entered = True
        platform = get_platform()
        self._bring(group, platform)
        before = None if group.before is None else group.before()
        if before is not None and not before.entered:
            self._bring(before, platform)

    def _bring(self, group: _BlockActivations, platform: Platform) -> None:
        """Issue the copies to the device."""
        memories = [memory for memory in group.alive() if memory.tensor is None]
        if not memories:
            return
        for memory in memories:
            host = memory.host
            assert host is not None
            memory.tensor = torch.empty(host.shape, dtype=host.dtype, device=platform.device())
        with self._copying(platform) as stream:
            for memory in memories:
                assert memory.tensor is not None
                assert memory.host is not None
                platform.copy_to_device(memory.tensor, memory.host, pinned=platform.supports_pinned_memory)
        arrival = stream.record_event()
        for memory in memories:
            memory.arrival = arrival

    @contextmanager
    def _copying(self, platform: Platform) -> Iterator[Stream]:
        """Queue what the block issues on the stream of the copies, behind what computes so far."""
        if self._stream is None:
            self._stream = platform.new_stream()
        self._stream.wait_stream(platform.current_stream())
        with platform.use_stream(self._stream):
            yield self._stream


class OffloadedBlock(ActivationWrapper):
    """A block whose saved tensors wait on the host; names in state dicts are those of the block.

    Args:
        block: which.
        offload: what moves them, one for all blocks of a model.
    """

    def __init__(self, block: nn.Module, offload: ActivationOffload) -> None:
        super().__init__(block)
        self._offload = offload

    @property
    def has_moved(self) -> bool:
        """Whether anything of the model's blocks has been on the host."""
        return self._offload.has_moved

    @partial(calls_compiled, reason=_BREAKS)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the block returns."""
        return self._offload.run(self._checkpoint_wrapped_module, args, kwargs)


def _is_movable(tensor: torch.Tensor, platform: Platform) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == platform.device().type
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.untyped_storage().nbytes() >= _SMALLEST
    )


def _find_weights(block: nn.Module, group: _BlockActivations) -> None:
    """Let what a block has saved of its parameters and buffers stay where it is.

    Those of an engine that splits them are found as they are now, unsharded; or freed, with a storage that is empty
    and filled again in backward.
    """
    weights = (*block.parameters(), *block.buffers())
    standing = {part.untyped_storage()._cdata for tensor in weights for part in _plain_parts(tensor)}
    for memory in group.alive():
        assert memory.tensor is not None
        storage = memory.tensor.untyped_storage()
        memory.stays = storage._cdata in standing or not storage.nbytes()


def _plain_parts(tensor: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory of which one consists, such as the local tensor of a DTensor."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):  # and not the mesh of a DTensor
            yield from _plain_parts(part)
