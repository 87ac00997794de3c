"""The device interface of the library: one small class, the same for every kind of device, and what backends take.

Code outside this folder never names a vendor. It asks `get_platform()` for a `Platform` and works with streams, events
and memory statistics through it. On a device without streams (the CPU) the same calls do nothing, so callers need no
branch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch

from hyper_parallel.core.common.checks import check
from hyper_parallel.core.machine.description import Machine, one_node
from hyper_parallel.platform.attention import AttentionKernel

__all__ = [
    "Event",
    "MemoryStats",
    "Platform",
    "PlatformType",
    "PlatformUnavailableError",
    "Reductions",
    "Stream",
    "reductions_of",
]


@dataclass(frozen=True)
class Reductions:
    """What a backend reduces, and what it moves.

    >>> hccl = reductions_of("hccl")
    >>> hccl.takes(torch.float32), hccl.takes(torch.float64), hccl.takes(torch.bfloat16, "PRODUCT")
    (True, False, False)
    >>> reductions_of("gloo").moves(torch.int16), hccl.moves(torch.int16)
    (False, True)

    Attributes:
        dtypes: by the name of the `ReduceOp`, such as "SUM"; an op that is missing is refused.
        lacking: by collective, dtypes that it refuses although others take them.
        moved: dtypes of tensors that go to other ranks as they are, but for `broadcast`, which takes complex numbers
            too; None where nothing is ruled out.
    """

    dtypes: Mapping[str, frozenset[torch.dtype]]
    lacking: Mapping[str, frozenset[torch.dtype]] = field(default_factory=dict)
    moved: frozenset[torch.dtype] | None = None

    def takes(self, dtype: torch.dtype, reduce_op: str = "SUM", collective: str = "all_reduce") -> bool:
        """Tell whether a collective ("all_reduce", "reduce" or "reduce_scatter") reduces a dtype by a reduce op."""
        return dtype in self.dtypes.get(reduce_op, ()) and dtype not in self.lacking.get(collective, ())

    def moves(self, dtype: torch.dtype, collective: str = "all_gather") -> bool:
        """Tell whether a collective that does not reduce, such as "scatter" or "all_to_all", takes a dtype."""
        return self.moved is None or dtype in self.moved or (collective == "broadcast" and dtype.is_complex)

    @property
    def widest_float(self) -> torch.dtype:
        """float64 where it can be added up, else float32."""
        return torch.float64 if self.takes(torch.float64) else torch.float32


# The dtypes and reduce ops of each backend's all_reduce, reduce and reduce_scatter. gloo and nccl: torch 2.11 to 2.15;
# what gloo moves: 2.13.
# hccl: torch_npu 2.11 to 2.14 and CANN 8 and 9 on Atlas A2 and A3. (Ascend 950 also reduces float64, inside of one
# node; that is left out here.)
def _table(names: str, dtypes: frozenset[torch.dtype]) -> dict[str, frozenset[torch.dtype]]:
    return dict.fromkeys(names.split(), dtypes)


_SHORT = frozenset((torch.float16, torch.bfloat16, torch.float32))
_FLOATS = _SHORT | {torch.float64}
_COMPLEX = frozenset((torch.complex64, torch.complex128))  # sent as pairs of real numbers
_BYTES = frozenset((torch.uint8, torch.bool))
_INTS = frozenset((torch.int8, torch.int32, torch.int64))

_ANY = Reductions(
    _table("SUM", _FLOATS | _COMPLEX | _INTS | {torch.int16} | _BYTES)
    | _table("PRODUCT MIN MAX", _FLOATS | _INTS | {torch.int16} | _BYTES)
    | _table("AVG", _FLOATS | _COMPLEX | _INTS | {torch.int16, torch.uint8})
    | _table("BAND BOR BXOR", _INTS | {torch.int16} | _BYTES)
    | _table("PREMUL_SUM", _FLOATS)
)

_BY_BACKEND: Mapping[str, Reductions] = MappingProxyType(
    {
        "gloo": Reductions(
            _table("SUM", _FLOATS | _COMPLEX | {torch.complex32} | _INTS | _BYTES)
            | _table("PRODUCT MIN MAX", _FLOATS | _INTS | _BYTES)
            | _table("AVG", _FLOATS | _COMPLEX)
            | _table("BAND BOR BXOR", _INTS | _BYTES),
            moved=_FLOATS | _INTS | _BYTES,
        ),
        "nccl": Reductions(
            _table("SUM", _FLOATS | _COMPLEX | _INTS | _BYTES)
            | _table("PRODUCT MIN MAX", _FLOATS | _INTS | _BYTES)
            | _table("AVG", _FLOATS | _COMPLEX | _INTS | {torch.uint8})
            | _table("PREMUL_SUM", _FLOATS),
            {"reduce_scatter": _COMPLEX},
        ),
        # HCCL itself has SUM, PRODUCT, MIN and MAX. torch_npu adds up and divides for AVG, multiplies first for
        # PREMUL_SUM, and casts bytes to int32 and back, but not for reduce_scatter.
        "hccl": Reductions(
            _table("SUM", _SHORT | {torch.complex64} | _INTS | {torch.int16} | _BYTES)
            | _table("MIN MAX", _SHORT | _INTS | {torch.int16} | _BYTES)
            | _table("PRODUCT", _SHORT - {torch.bfloat16} | _INTS | _BYTES)
            | _table("AVG", _SHORT | {torch.complex64})
            | _table("PREMUL_SUM", _SHORT),
            {"reduce": _COMPLEX, "reduce_scatter": _COMPLEX | _BYTES},
        ),
    }
)


def reductions_of(backend: str) -> Reductions:
    """Return what a backend reduces; of one that is not known here, nothing is ruled out.

    >>> reductions_of("gloo").takes(torch.int16), reductions_of("mine").takes(torch.int16)
    (False, True)

    Args:
        backend: its name in `torch.distributed`, such as "hccl".

    Raises:
        TypeError: no str.
    """
    check("cannot tell what a backend reduces", "str", backend=backend)
    return _BY_BACKEND.get(backend, _ANY)


class PlatformType(Enum):
    """The framework of a platform; users of the existing library ask for it. There is one."""

    PYTORCH = "pytorch"


class PlatformUnavailableError(RuntimeError):
    """The device type exists, but this machine or this installation cannot use it."""


class Event(Protocol):
    """A mark in a stream that other streams, or the host, can wait for."""

    def record(self, stream: Any = None) -> None:
        """Mark the work queued so far on `stream` (None: the current one)."""

    def wait(self, stream: Any = None) -> None:
        """Make later work on `stream` (None: the current one) wait for the mark; the host does not wait."""

    def query(self) -> bool:
        """Tell whether the marked work is done, without waiting."""

    def synchronize(self) -> None:
        """Block the host until the marked work is done."""


class Stream(Protocol):
    """A queue of device work that runs in order."""

    def wait_event(self, event: Any) -> None:
        """Make later work on this stream wait for `event`; the host does not wait."""

    def wait_stream(self, stream: Any) -> None:
        """Make later work on this stream wait for everything queued so far on `stream`."""

    def record_event(self, event: Any = None) -> Any:
        """Record `event` (None: a new one) on this stream and return it."""

    def query(self) -> bool:
        """Tell whether all queued work is done, without waiting."""

    def synchronize(self) -> None:
        """Block the host until all queued work is done."""


@dataclass(frozen=True)
class MemoryStats:
    """Bytes of device memory in use now and at the highest point since the last `reset_peak_memory`.

    `allocated` is what live tensors occupy, `reserved` what the caching allocator holds for them.

    >>> MemoryStats(allocated=3, reserved=4, peak_allocated=5, peak_reserved=6).peak_reserved
    6
    """

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int


class Platform(ABC):
    """One kind of device as seen by the calling rank.

    A platform holds no state of its own: two calls of `get_platform` may return two objects, and many ranks may share
    one. `device_type` is torch's name for the device ("cpu", "cuda", "npu"); `backend` is the name of the
    `torch.distributed` backend that moves its tensors ("gloo", "nccl", "hccl"). `compares_collectives` says that ranks
    compare what each collective is for as they issue it, as simulated ones do, so that the engine need not afterwards.
    """

    device_type: str
    backend: str
    compares_collectives = False

    @abstractmethod
    def name(self) -> str:
        """Return the device's name for people, such as "NVIDIA H200"."""

    def machine(self) -> Machine:
        """Return the machine that redistributions are planned for, alike on all ranks; by default an unnamed one."""
        return one_node()

    def on_plan(self, plan: Any, limit: int | None) -> None:
        """Note a plan for `machine` that begins, and its limit of memory; a recorder of steps overrides it."""
        del plan, limit

    @abstractmethod
    def is_available(self) -> bool:
        """Tell whether at least one such device can be used now."""

    @abstractmethod
    def device_count(self) -> int:
        """Return how many devices of this kind the process sees."""

    @abstractmethod
    def device(self, index: int | None = None) -> torch.device:
        """Return the `torch.device` number `index` (None: the calling rank's current one)."""

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Make device number `index` the calling rank's current one."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until all work queued on the current device is done."""

    @property
    @abstractmethod
    def has_streams(self) -> bool:
        """Whether work on different streams can overlap; False where streams and events do nothing."""

    @property
    def reductions(self) -> Reductions:
        """The dtypes and reduce ops that the backend reduces."""
        return reductions_of(self.backend)

    @property
    def prefers_large_messages(self) -> bool:
        """Whether one large message is worth packing for; else many tensors may go as they are in one operation."""
        return self.has_streams

    @property
    def gathers_uneven(self) -> bool:
        """Whether an all_gather and a reduce_scatter of lists of uneven tensors are one launch.

        nccl's are. gloo refuses them, and torch_npu makes one operation of each tensor, for each of which it waits.
        """
        return self.backend == "nccl"

    @abstractmethod
    def new_stream(self, priority: int = 0) -> Stream:
        """Return a new stream on the current device; lower numbers are more urgent, 0 is the normal priority."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream that the calling rank's operations are queued on."""

    @abstractmethod
    def use_stream(self, stream: Stream) -> AbstractContextManager[Any]:
        """Return a context in which the calling rank's operations are queued on `stream`."""

    @abstractmethod
    def new_event(self) -> Event:
        """Return a new event, not yet recorded on any stream."""

    @abstractmethod
    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the memory of `tensor` from being reused before the work queued so far on `stream` is done."""

    @abstractmethod
    def memory_stats(self) -> MemoryStats:
        """Return the memory statistics of the current device, in bytes."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Start the peaks of `memory_stats` afresh from the current use."""

    @abstractmethod
    def total_memory(self) -> int:
        """Return the size of the current device's memory in bytes."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give memory that the allocator holds but no tensor uses back to the device."""

    def recorded_memory(self, path: Path) -> AbstractContextManager[Any]:
        """Return a context that writes each allocation of its block, and the lines that made it, to a file at its end.

        https://docs.pytorch.org/memory_viz draws the file. It is written after an error, too, such as that of memory
        running out.

        Args:
            path: of the file; its folder is made.

        Raises:
            PlatformUnavailableError: the device has no allocator that could say.
        """
        raise PlatformUnavailableError(f"cannot record memory: {self.name()} has no allocator that counts tensors")

    def flight_recording(self) -> bytes | None:
        """Return the last collectives of this process, pickled as torch's analyser reads them (`torchfrtrace`).

        None where torch has no recorder for this backend, or there were none.
        """
        return None

    @property
    @abstractmethod
    def supports_pinned_memory(self) -> bool:
        """Whether pinned host memory makes copies between host and device asynchronous."""

    @property
    def has_own_memory(self) -> bool:
        """Whether the device's memory is not the host's, so that what goes from one to the other is copied."""
        return self.device_type != "cpu"

    def copy_to_device(self, target: torch.Tensor, source: torch.Tensor, *, pinned: bool) -> None:
        """Copy `source`, which is on the host, to `target` on the device, on the current stream.

        Args:
            target: where to.
            source: of the same shape.
            pinned: whether `source` is page-locked: then the host goes on while the device reads.
        """
        del pinned  # torch sees it
        target.copy_(source, non_blocking=True)

    def copy_to_host(self, source: torch.Tensor, *, pinned: bool, wait: bool) -> torch.Tensor:
        """Return a copy on the host of `source`, which is on the device; it is made on the current stream.

        Args:
            source: what to copy.
            pinned: whether the copy is page-locked.
            wait: whether the host waits for it; else, if it is pinned, the caller has to.
        """
        copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pinned)
        return copy.copy_(source, non_blocking=not wait)

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> AttentionKernel | None:
        """Return the fused attention that returns log-sums, for such tensors of this device; None: there is none.

        Args:
            q: (batch, heads, queries, head_dim).
            k: (batch, key and value heads, keys, head_dim).
            v: as `k`.
            causal: query i sees keys up to i.
            scale: of the scores.
        """
        del q, k, v, causal, scale
        return None

    def manual_seed(self, seed: int) -> None:
        """Seed torch's default generators, the host's and every device's, with `seed`."""
        torch.manual_seed(seed)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(device_type={self.device_type!r}, backend={self.backend!r})"
