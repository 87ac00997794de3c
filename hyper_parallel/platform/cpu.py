"""The CPU: gloo, no streams, and the process's resident memory."""

from __future__ import annotations

import json
import os
import pickle
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from hyper_parallel.platform.attention import AttentionKernel, host_attention
from hyper_parallel.platform.platform import MemoryStats, Platform, Stream


class HostEvent:
    """An event on a device without streams: whatever it marks is already done.

    >>> event = HostEvent()
    >>> event.record()
    >>> event.query()
    True
    """

    def record(self, stream: Any = None) -> None:
        """Do nothing: the work before this call has run."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing: there is nothing left to wait for."""

    def query(self) -> bool:
        """Return True: the marked work is done."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


class HostStream:
    """A stream on a device without streams: work is done when the call that asks for it returns.

    >>> HostStream().record_event().query()
    True
    """

    def wait_event(self, event: Any) -> None:
        """Do nothing: what `event` marks is done."""

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: what `stream` was asked to do is done."""

    def record_event(self, event: Any = None) -> Any:
        """Return `event` (None: a new one), recorded."""
        return HostEvent() if event is None else event

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


class CpuPlatform(Platform):
    """The host itself, as one device; communication goes through gloo.

    Memory statistics are those of the whole process (its resident set): the CPU has no caching allocator to ask, so
    `allocated` equals `reserved`, and Python itself, loaded libraries and other ranks of the same process count too.

    >>> CpuPlatform().device(), CpuPlatform().backend
    (device(type='cpu'), 'gloo')
    """

    device_type = "cpu"
    backend = "gloo"

    def name(self) -> str:
        """Return the machine's architecture and number of cores, such as "CPU (x86_64, 8 cores)"."""
        return f"CPU ({platform.machine()}, {os.cpu_count()} cores)"

    def is_available(self) -> bool:
        """Return True."""
        return True

    def device_count(self) -> int:
        """Return 1: torch sees all cores as one device."""
        return 1

    def device(self, index: int | None = None) -> torch.device:
        """Return `torch.device("cpu")`, whatever the index: ranks of a node share the one host."""
        return torch.device("cpu")

    def set_device(self, index: int) -> None:
        """Do nothing: ranks of a node share the one host."""

    def synchronize(self) -> None:
        """Return at once: CPU operations are done when they return."""

    @property
    def has_streams(self) -> bool:
        """False: streams and events do nothing."""
        return False

    def new_stream(self, priority: int = 0) -> Stream:
        """Return a stream that does nothing."""
        return HostStream()

    def current_stream(self) -> Stream:
        """Return a stream that does nothing."""
        return HostStream()

    @contextmanager
    def use_stream(self, stream: Stream) -> Iterator[Stream]:
        """Return a context that changes nothing."""
        yield stream

    def new_event(self) -> HostEvent:
        """Return an event that is always done."""
        return HostEvent()

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Do nothing: no work is left that could still read `tensor`."""

    def memory_stats(self) -> MemoryStats:
        """Return the resident set of the process and its peak, in bytes.

        Read from /proc/self/status; where there is none (macOS), the peak from `getrusage` stands for both.
        """
        peak = _status_bytes("VmHWM") or _peak_from_getrusage()
        now = _status_bytes("VmRSS") or peak
        peak = max(now, peak)
        return MemoryStats(allocated=now, reserved=now, peak_allocated=peak, peak_reserved=peak)

    def reset_peak_memory(self) -> None:
        """Start the peak of the resident set afresh; where the system cannot, the peak stays that of the process."""
        try:
            Path("/proc/self/clear_refs").write_text("5")  # 5 resets VmHWM: man 5 proc_pid_clear_refs
        except OSError:
            return

    def total_memory(self) -> int:
        """Return the size of the host's physical memory in bytes (a container's limit is not looked at)."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def empty_cache(self) -> None:
        """Do nothing: the CPU allocator keeps no cache that torch could empty."""

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> AttentionKernel | None:
        """Return torch's fused attention on the CPU; None for empty tensors, and for rows that are apart in memory."""
        del causal, scale
        return host_attention(q, k, v)

    def flight_recording(self) -> bytes | None:
        """Return the last collectives of this process, with the names of their groups, which gloo leaves out.

        Where they were called stands in the stacks of a stuck run: the form that need not be unpickled has no lines.
        """
        dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
        if dump is None:
            return None
        found = json.loads(dump())
        if not found["entries"]:
            return None
        for entry in found["entries"]:
            entry.update(process_group=tuple(entry["process_group"]), frames=[])
        groups = {
            name: {"name": name, "desc": group.group_desc, "ranks": str(list(ranks))}
            for group, ranks in distributed_c10d._world.pg_group_ranks.items()
            if (name := distributed_c10d._world.pg_names.get(group)) is not None
        }
        return pickle.dumps({**found, "pg_config": groups})

    @property
    def supports_pinned_memory(self) -> bool:
        """False: there is no device to copy to."""
        return False


def available_memory() -> int | None:
    """Return the bytes this process may still take, or None where the system does not say."""
    found = [free] if (free := _status_bytes("MemAvailable", "/proc/meminfo")) else []
    limit, used = (_text(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdecimal() and used.isdecimal():  # of a container (cgroup v2)
        found.append(int(limit) - int(used))
    if found:
        return min(found)
    try:
        return CpuPlatform().total_memory()
    except (ValueError, OSError, AttributeError):  # not a POSIX system, or one that does not tell
        return None


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _status_bytes(field: str, path: str = "/proc/self/status") -> int:
    """Return a "kB" field of a file of the system in bytes, 0 where it is missing."""
    for line in _text(path).splitlines():
        key, _, value = line.partition(":")
        if key == field:
            return int(value.split()[0]) * 1024
    return 0


def _peak_from_getrusage() -> int:
    import resource  # not on every system, and not needed where /proc is

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kilobytes
