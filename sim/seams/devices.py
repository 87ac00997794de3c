"""``--map-device cuda``: what a script asks for on that device is done on the CPU.

Mapped are device arguments of torch's functions (``"cuda"``, ``torch.device("cuda", 1)``, a bare index in ``.to``),
``.cuda()``, meshes, ``DistributedDataParallel(device_ids=...)``, ``torch.autocast``, ``torch.load(map_location=...)``,
and from ``torch.cuda`` what :data:`ANSWERS` and :data:`CLASSES` have. A tensor's own ``device`` stays ``cpu``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from sim.world import RankContext

__all__ = ["ANSWERS", "CLASSES", "KINDS", "MapDevice", "answer", "device_module", "mapped"]

KINDS = ("cuda", "npu")


def mapped(device: Any, kind: str) -> Any:
    """``device``, or the CPU where it means a device of ``kind``.

    >>> mapped(torch.device("cuda", 1), "cuda"), mapped("cuda:1", "cuda"), mapped("meta", "cuda")
    (device(type='cpu'), 'cpu', 'meta')
    """
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == kind else device
    if isinstance(device, str):
        return "cpu" if device == kind or device.startswith(f"{kind}:") else device
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device("cpu")
    return device


class MapDevice(TorchFunctionMode):
    """While it is on, torch's functions called on this thread put on the CPU what should go to ``kind``.

    >>> with MapDevice("cuda"):
    ...     torch.zeros(2, device="cuda:1").cuda().device
    device(type='cpu')
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind
        tensor = torch.Tensor
        self._moves = {tensor.cuda, getattr(tensor, "npu", tensor.cuda), tensor.pin_memory}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` with devices of the kind exchanged."""
        options = dict(kwargs or {})
        if func in self._moves:
            return args[0]
        if "device" in options:
            options["device"] = mapped(options["device"], self._kind)
        if options.get("pin_memory"):
            options["pin_memory"] = False
        if func is torch.Tensor.to:
            args = (args[0], *(mapped(arg, self._kind) for arg in args[1:2]), *args[2:])
        elif any(isinstance(arg, torch.device) for arg in args):
            args = tuple(mapped(arg, self._kind) if isinstance(arg, torch.device) else arg for arg in args)
        return func(*args, **options)


class Stream:
    """A stream of a mapped device, where everything is done when it is called."""

    device_index = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        del args, options

    def query(self) -> bool:
        """Everything is done."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """An event, already there."""
        return event or Event()

    def synchronize(self, *args: Any) -> None:
        """Nothing to wait for."""

    wait_event = wait_stream = synchronize

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to leave."""


class Event(Stream):
    """An event of a mapped device: it has happened."""

    record = wait = Stream.synchronize

    def elapsed_time(self, end: Any) -> float:
        """No time passes on a simulated device."""
        del end
        return 0.0


def _nothing(*args: Any, **options: Any) -> None:
    del args, options


def _zero(*args: Any, **options: Any) -> int:
    del args, options
    return 0


def _set_device(context: RankContext, device: Any) -> None:
    index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
    size = context.world.world_size
    if index is not None and not 0 <= int(index) < size:
        raise ValueError(
            f"rank {context.rank} asked for device {device}, but {size} simulated ranks have {size} devices\n"
            f"  device: 0 to {size - 1}\n  try: set_device(int(os.environ['LOCAL_RANK']))"
        )
    context.device_index = int(index or 0)


@contextlib.contextmanager
def _use_device(context: RankContext, device: Any) -> Iterator[None]:
    before = context.device_index
    if device is not None and device != -1:
        _set_device(context, device)
    try:
        yield
    finally:
        context.device_index = before


def _device_name(context: RankContext, device: Any = None) -> str:
    return f"simulated {context.world.map_device}"


# What torch.cuda (torch.npu) answers on a rank; each function gets the rank's context first.
ANSWERS: dict[str, Callable[..., Any]] = {
    "is_available": lambda context: True,
    "device_count": lambda context: context.world.world_size,
    "current_device": lambda context: context.device_index,
    "set_device": _set_device,
    "device": _use_device,
    "get_device_name": _device_name,
    "is_bf16_supported": lambda context, *args, **options: True,
    "current_stream": lambda context, *args, **options: Stream(),
    "default_stream": lambda context, *args, **options: Stream(),
    "stream": lambda context, stream=None: contextlib.nullcontext(stream),
    **dict.fromkeys(
        ("synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "manual_seed", "manual_seed_all"),
        _nothing,
    ),
    **dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
        _zero,
    ),
}

# Classes stay classes: torch's own code has them in annotations.
CLASSES = {"Stream": Stream, "Event": Event}

# torch's own code goes by what the machine really has.
_FOR_THE_SCRIPT_ONLY = ("is_available", "device_count", "current_device")


def answer(name: str, original: Any, context_of: Callable[[], RankContext | None]) -> Callable[..., Any]:
    """The function that stands in for ``torch.cuda.<name>``: on ranks what ``ANSWERS`` says, else the original."""

    def function(*args: Any, **options: Any) -> Any:
        context = context_of()
        asked_by = str(sys._getframe(1).f_globals.get("__name__", ""))
        inside = name in _FOR_THE_SCRIPT_ONLY and asked_by.partition(".")[0] == "torch"
        if context is None or inside:
            return original(*args, **options)
        return ANSWERS[name](context, *args, **options)

    if callable(original) and not isinstance(original, type):
        functools.update_wrapper(function, original)
    return function


def device_module(kind: str) -> ModuleType:
    """``torch.cuda`` or ``torch.npu``; without torch_npu an empty one, and the device's name made known to torch."""
    found = getattr(torch, kind, None)
    if found is None:
        found = ModuleType(f"torch.{kind}")
        found.__dict__.update(dict.fromkeys(ANSWERS, _nothing), is_available=lambda: False, device_count=lambda: 0)
        torch.utils.rename_privateuse1_backend(kind)  # for good: torch has no way back
        torch._C._get_accelerator = lambda *args: torch.device("cpu")  # its own now raises
        torch._register_device_module(kind, found)
        torch.Tensor.npu = torch.Tensor.cuda  # type: ignore[attr-defined] # the mode sees either and maps it
        torch.nn.Module.npu = torch.nn.Module.cuda  # type: ignore[attr-defined]
        package = ModuleType("torch_npu")
        package.__spec__ = ModuleSpec("torch_npu", None)
        sys.modules.setdefault("torch_npu", package)
    module: ModuleType = found
    return module
