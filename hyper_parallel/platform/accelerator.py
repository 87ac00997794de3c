"""Accelerators: what CUDA and Ascend devices share, and what each has of its own."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C import _distributed_c10d

from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.machine.description import Machine, find_machine
from hyper_parallel.platform.attention import AttentionKernel, gpu_attention, npu_attention
from hyper_parallel.platform.platform import Event, MemoryStats, Platform, PlatformUnavailableError, Stream

_ALLOCATIONS = 100_000  # kept of a recording, the last ones: the last steps, in a file of some 100 MB

# The common part of cuda and npu: everything that torch's device modules spell the same -------------------------------


@functools.cache
def _usual(name: str) -> Machine:
    return find_machine(name)


class AcceleratorPlatform(Platform):
    """A device that torch reaches through a device module, `torch.cuda` or the `torch.npu` that torch_npu registers.

    It goes through `torch.get_device_module`, as FSDP2 and DeviceMesh do, and not through `torch.accelerator`: the
    latter speaks for one accelerator per process, and its memory functions need an allocator interface that torch_npu
    2.11 does not have. All names used here were checked in torch 2.11 to 2.15 and in torch_npu 2.11 to 2.14.
    """

    usual_machine: str

    def __init__(self) -> None:
        self._module: Any = torch.get_device_module(self.device_type)

    def name(self) -> str:
        """Return the device's name for people, such as "NVIDIA H200"."""
        return str(self._module.get_device_name())

    def machine(self) -> Machine:
        """Return the usual one of the kind: ranks whose devices have other names must not plan differently."""
        return _usual(self.usual_machine)

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
            asked, blame = f"cannot select {self.device_type} device {index}", f"this process sees {count} of them"
            seen = f"index: {index}   numbers that exist: {f'0 to {count - 1}' if count else 'none'}"
            hint = f"the local rank, and at most one rank per device (torchrun --nproc-per-node {max(count, 1)})"
            raise InvalidValue(asked, blame, seen, hint)
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

    @contextmanager
    def recorded_memory(self, path: Path) -> Iterator[None]:
        """Return a context that writes each allocation of its block, and the lines that made it, to a file at its end.

        Args:
            path: of the file; its folder is made.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # torch_npu writes over what is there, and leaves the rest of it behind
        self._module.memory._record_memory_history(max_entries=_ALLOCATIONS)
        try:
            yield
        finally:
            self._module.memory._dump_snapshot(str(path))
            path.chmod(path.stat().st_mode | 0o400)  # torch_npu makes a file that its owner may not read
            self._module.memory._record_memory_history(enabled=None)

    @property
    def supports_pinned_memory(self) -> bool:
        """True: copies from and to pinned host memory are asynchronous."""
        return True


# NVIDIA (and, through the same names, AMD) GPUs: nccl -----------------------------------------------------------------


class CudaPlatform(AcceleratorPlatform):
    """GPUs through `torch.cuda` and nccl.

    Raises:
        PlatformUnavailableError: this torch is a build without CUDA, or no GPU is usable.
    """

    device_type = "cuda"
    backend = "nccl"
    usual_machine = "h100-sxm"

    def __init__(self) -> None:
        if torch.version.cuda is None and torch.version.hip is None:
            raise PlatformUnavailableError(
                f"cannot use platform 'cuda': this torch ({torch.__version__}) is a build without CUDA; "
                "install a CUDA build of torch (https://pytorch.org/get-started/locally) on a machine with a GPU"
            )
        if not torch.cuda.is_available():
            raise PlatformUnavailableError(
                f"cannot use platform 'cuda': torch {torch.__version__} is built for CUDA but sees no usable GPU; "
                "check that nvidia-smi lists one, that the driver is new enough and that CUDA_VISIBLE_DEVICES does "
                "not hide it"
            )
        super().__init__()

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> AttentionKernel | None:
        """Return the kernel that torch itself would take; None if it would take none."""
        return gpu_attention(q, k, v, causal, scale)

    def flight_recording(self) -> bytes | None:
        """Return the last collectives of this process, pickled as torch's analyser reads them (`torchfrtrace`)."""
        recorder: Any = _distributed_c10d  # builds without CUDA do not have it
        return bytes(recorder._dump_nccl_trace())


# Ascend NPUs: hccl, through torch_npu, which is imported here, only when asked for, and nowhere else ------------------

_INSTALL = "pip install 'hyper_parallel[npu]' on a machine with the Ascend drivers and toolkit (CANN)"


class NpuPlatform(AcceleratorPlatform):
    """Ascend NPUs through torch_npu and hccl.

    Importing torch_npu renames torch's spare device slot ("privateuse1") to "npu", registers `torch.npu` as its device
    module and "hccl" as the `torch.distributed` backend of npu tensors; nothing else is needed.

    Raises:
        PlatformUnavailableError: torch_npu is not installed or cannot be imported, or no NPU is usable.
    """

    device_type = "npu"
    backend = "hccl"
    usual_machine = "ascend-910b"

    def __init__(self) -> None:
        _import_torch_npu()
        if not torch.get_device_module("npu").is_available():
            raise PlatformUnavailableError(
                "cannot use platform 'npu': torch_npu is installed but sees no usable NPU; check that npu-smi info "
                "lists one, that the environment script of the Ascend toolkit (CANN) was sourced and that "
                "ASCEND_RT_VISIBLE_DEVICES does not hide it"
            )
        super().__init__()

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> AttentionKernel | None:
        """Return `npu_fusion_attention`; None where torch_npu has it not, or not for such tensors."""
        del causal, scale
        return npu_attention(q, k, v)


def torch_npu_is_installed() -> bool:
    """Tell whether torch_npu could be imported, without importing it."""
    return "torch_npu" in sys.modules or importlib.util.find_spec("torch_npu") is not None


def _import_torch_npu() -> None:
    if not torch_npu_is_installed():
        raise PlatformUnavailableError(
            f"cannot use platform 'npu': the package torch_npu is not installed; try: {_INSTALL}"
        )
    try:
        importlib.import_module("torch_npu")
    except Exception as error:
        # Missing drivers show up as ImportError, OSError or RuntimeError, depending on which library is missing.
        reason = str(error).strip().splitlines()
        raise PlatformUnavailableError(
            "cannot use platform 'npu': torch_npu is installed but its import failed "
            f"({type(error).__name__}: {reason[0] if reason else 'no message'}); it needs the Ascend drivers and "
            f"toolkit (CANN) and the torch release it was built for, so try: {_INSTALL}"
        ) from error
