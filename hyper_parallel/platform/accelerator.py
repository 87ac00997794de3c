"""The common part of cuda and npu: everything that torch's device modules spell alike."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from hyper_parallel.platform.base import Event, MemoryStats, Platform, Stream

__all__ = ["AcceleratorPlatform"]


class AcceleratorPlatform(Platform):
    """A device that torch reaches through a device module, `torch.cuda` or the `torch.npu` that torch_npu registers.

    It goes through `torch.get_device_module`, as FSDP2 and DeviceMesh do, and not through `torch.accelerator`: the
    latter speaks for one accelerator per process, and its memory functions need an allocator interface that torch_npu
    2.11 does not have. All names used here were checked in torch 2.11 to 2.15 and in torch_npu 2.11 to 2.14.
    """

    def __init__(self) -> None:
        self._module: Any = torch.get_device_module(self.device_type)

    def name(self) -> str:
        """Return the device's name for people, such as "NVIDIA H200"."""
        return str(self._module.get_device_name())

    def is_available(self) -> bool:
        """Tell whether at least one such device can be used now."""
        return bool(self._module.is_available())

    def device_count(self) -> int:
        """Return how many devices of this kind the process sees."""
        return int(self._module.device_count())

    def device(self, index: int | None = None) -> torch.device:
        """Return the `torch.device` number `index` (None: the calling rank's current one)."""
        return torch.device(self.device_type, self._module.current_device() if index is None else index)

    def set_device(self, index: int) -> None:
        """Make device number `index` the calling rank's current one.

        Raises:
            ValueError: there is no device with that number.
        """
        count = self.device_count()
        if not 0 <= index < count:
            raise ValueError(
                f"cannot select {self.device_type} device {index}: this process sees {count} of them\n"
                f"  index={index}   numbers that exist: {f'0 to {count - 1}' if count else 'none'}\n"
                f"  try: no more ranks per node than devices (torchrun --nproc-per-node {max(count, 1)}), "
                "and pass the local rank, not the global one"
            )
        self._module.set_device(index)

    def synchronize(self) -> None:
        """Block the host until all work queued on the current device is done."""
        self._module.synchronize()

    @property
    def has_streams(self) -> bool:
        """True: work on different streams can overlap."""
        return True

    def new_stream(self, priority: int = 0) -> Stream:
        """Return a new stream on the current device; lower numbers are more urgent, 0 is the normal priority."""
        stream: Stream = self._module.Stream(priority=priority)
        return stream

    def current_stream(self) -> Stream:
        """Return the stream that the calling rank's operations are queued on."""
        stream: Stream = self._module.current_stream()
        return stream

    def use_stream(self, stream: Stream) -> AbstractContextManager[Any]:
        """Return a context in which the calling rank's operations are queued on `stream`."""
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def new_event(self) -> Event:
        """Return a new event, not yet recorded on any stream."""
        event: Event = self._module.Event()
        return event

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the memory of `tensor` from being reused before the work queued so far on `stream` is done."""
        tensor.record_stream(stream)  # type: ignore[arg-type]  # a Stream here is the device module's own

    def memory_stats(self) -> MemoryStats:
        """Return what the caching allocator of the current device counts, in bytes."""
        module = self._module
        return MemoryStats(
            allocated=module.memory_allocated(),
            reserved=module.memory_reserved(),
            peak_allocated=module.max_memory_allocated(),
            peak_reserved=module.max_memory_reserved(),
        )

    def reset_peak_memory(self) -> None:
        """Start the peaks of `memory_stats` afresh from the current use."""
        self._module.reset_peak_memory_stats()

    def total_memory(self) -> int:
        """Return the size of the current device's memory in bytes."""
        _free, total = self._module.mem_get_info()
        return int(total)

    def empty_cache(self) -> None:
        """Give memory that the allocator holds but no tensor uses back to the device."""
        self._module.empty_cache()

    @property
    def supports_pinned_memory(self) -> bool:
        """True: copies from and to pinned host memory are asynchronous."""
        return True
