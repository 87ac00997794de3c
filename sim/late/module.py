"""The functions, streams and events of `torch.npu` on a rank with a late device, by the names that torch_npu has."""

from __future__ import annotations

import contextlib
import os
import pickle
import stat
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from sim.kernel.context import current_context
from sim.late.device import LateDevice, late_device
from sim.late.queue import LateTask

_TOTAL = 64 << 30  # bytes of a device, as an Ascend 910B has them; what is used is the host's


class LateStream(torch.Stream):
    """A stream of a late device: work on it runs in order, and late."""

    def __new__(cls, device: Any = None, priority: int = 0, **options: Any) -> LateStream:
        """Make a new stream, or with `stream_id` name one that there is."""
        del device, priority
        number = options.get("stream_id")
        if number is None:
            number = late_device("torch.npu.Stream").new_stream()
        kind = int(torch._C._autograd.DeviceType.PrivateUse1.value)
        return super().__new__(cls, stream_id=number, device_index=0, device_type=kind)

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        """Nothing more: the device has it."""

    @property
    def _device(self) -> LateDevice:
        return late_device("torch.npu.Stream")

    def wait_stream(self, stream: torch.Stream) -> None:
        """Let later work on this stream come after what was issued to the other so far."""
        device = self._device
        device.wait_for(device.stream(self.stream_id), device.stream(stream.stream_id).tail)

    def wait_event(self, event: Any) -> None:
        """Let later work on this stream come after what the event marks."""
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        """Let an event, a new one by default, mark what was issued so far; returns it."""
        event = LateEvent() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all that was issued has run."""
        return _is_done(self._device, self._device.stream(self.stream_id).tail)

    def synchronize(self) -> None:
        """Let the host wait for all that was issued."""
        self._device.finish(self._device.stream(self.stream_id).tail)

    def __enter__(self) -> LateStream:
        device = self._device
        self.__dict__.setdefault("_before", []).append(device.current)
        device.current = device.stream(self.stream_id)
        return self

    def __exit__(self, *error: object) -> None:
        self._device.current = self.__dict__["_before"].pop()


class LateEvent:
    """An event of a late device.

    Args:
        enable_timing: Accepted: no time passes.
    """

    def __init__(self, enable_timing: bool = False, *more: Any, **options: Any) -> None:
        del enable_timing, more, options
        self._marked: LateTask | None = None

    def record(self, stream: torch.Stream | None = None) -> None:
        """Mark what was issued to a stream, by default the current one, so far."""
        device = late_device("torch.npu.Event")
        self._marked = (device.current if stream is None else device.stream(stream.stream_id)).tail

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Let later work on a stream, by default the current one, come after what is marked."""
        device = late_device("torch.npu.Event")
        device.wait_for(device.current if stream is None else device.stream(stream.stream_id), self._marked)

    def query(self) -> bool:
        """Whether what is marked has run."""
        return _is_done(late_device("torch.npu.Event"), self._marked)

    def synchronize(self) -> None:
        """Let the host wait for what is marked."""
        late_device("torch.npu.Event").finish(self._marked)

    def elapsed_time(self, end: Any) -> float:
        """No time passes on this device."""
        del end
        return 0.0


def _is_done(device: LateDevice, task: LateTask | None) -> bool:
    """Whether a task has run; a program that asks until it has lets it run."""
    if task is not None and not task.done:
        current_context().scheduler.poll()
        device.advance()
    if task is not None and task.done:
        device.finish(task)
    return task is None or task.done


def _named(device: LateDevice) -> LateStream:
    return LateStream(stream_id=device.number_of(device.current))


@contextlib.contextmanager
def _stream(device: LateDevice, stream: Any) -> Iterator[Any]:
    before = device.current
    if stream is not None:
        device.current = device.stream(stream.stream_id)
    try:
        yield stream
    finally:
        device.current = before


def _set_stream(device: LateDevice, stream: Any) -> None:
    if stream is not None:  # torch_npu: then it does nothing
        device.current = device.stream(stream.stream_id)


def _set_device(device: LateDevice, index: Any) -> None:
    wanted = torch.device(index).index if isinstance(index, (str, torch.device)) else index
    if wanted not in (None, 0):
        raise RuntimeError(
            f"invalid device ordinal: {wanted}; each rank of this world has one device, npu:0, and LOCAL_RANK is 0"
        )


@contextlib.contextmanager
def _device(device: LateDevice, index: Any = None) -> Iterator[None]:
    _set_device(device, index)
    yield


def _stats(device: LateDevice, _: Any = None) -> OrderedDict[str, int]:
    memory = device.memory
    return OrderedDict(
        {
            "allocated_bytes.all.current": memory.allocated,
            "allocated_bytes.all.peak": memory.peak_allocated,
            "reserved_bytes.all.current": memory.reserved,
            "reserved_bytes.all.peak": memory.peak_reserved,
        }
    )


def _properties(device: LateDevice, _: Any = None) -> SimpleNamespace:
    return SimpleNamespace(name=_NAME, total_memory=_TOTAL, multi_processor_count=0)


_NAME = "simulated npu"


def _always(value: Any) -> Callable[..., Any]:
    return lambda device, *args, **options: value


# What torch.npu (and torch.accelerator, where it has the name) answers; each function gets the rank's device first.
MODULE: dict[str, Callable[..., Any]] = {
    "is_available": _always(True),
    "is_initialized": _always(True),
    "is_bf16_supported": _always(True),
    "is_current_stream_capturing": _always(False),
    "device_count": _always(1),
    "current_device": _always(0),
    "current_device_index": _always(0),
    "set_device": _set_device,
    "set_device_index": _set_device,
    "device": _device,
    "get_device_name": _always(_NAME),
    "get_device_properties": _properties,
    "get_amp_supported_dtype": lambda device: [torch.float16, torch.bfloat16],
    "init": _always(None),
    "current_stream": lambda device, _=None: _named(device),
    "default_stream": lambda device, _=None: LateStream(stream_id=0),
    "stream": _stream,
    "set_stream": _set_stream,
    "synchronize": lambda device, _=None: device.finish_all(),
    "memory_allocated": lambda device, _=None: device.memory.allocated,
    "memory_reserved": lambda device, _=None: device.memory.reserved,
    "max_memory_allocated": lambda device, _=None: device.memory.peak_allocated,
    "max_memory_reserved": lambda device, _=None: device.memory.peak_reserved,
    "memory_stats": _stats,
    "reset_peak_memory_stats": lambda device, _=None: device.memory.reset_peaks(),
    "empty_cache": lambda device: device.memory.empty_cache(),
    "mem_get_info": lambda device, _=None: (_TOTAL - device.memory.reserved, _TOTAL),
    "manual_seed": _always(None),  # it draws from the host's generator, so that it draws what the CPU draws
    "manual_seed_all": _always(None),
    "get_rng_state": lambda device, _=None: torch.get_rng_state(),
    "set_rng_state": lambda device, state, _=None: torch.set_rng_state(state),
    "_is_in_bad_fork": _always(False),
}


def _record_memory_history(
    device: LateDevice,
    enabled: str | None = "all",
    context: str | None = "all",
    stacks: str = "all",
    max_entries: int = sys.maxsize,
) -> None:
    del context, stacks
    device.memory.record(None if enabled is None else max_entries)


def _dump_snapshot(device: LateDevice, filename: str = "dump_snapshot.pickle") -> None:
    # As torch_npu opens it: not emptied, and for its owner to write only.
    with os.fdopen(os.open(filename, os.O_WRONLY | os.O_CREAT, stat.S_IWUSR), "wb") as file:
        pickle.dump(device.memory.snapshot(), file)


# What torch.npu.memory answers, likewise.
MEMORY: dict[str, Callable[..., Any]] = {
    **{name: MODULE[name] for name in MODULE if "memory" in name or name in ("empty_cache", "mem_get_info")},
    "_record_memory_history": _record_memory_history,
    "_snapshot": lambda device, _=None: device.memory.snapshot(),
    "_dump_snapshot": _dump_snapshot,
}
