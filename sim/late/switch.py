"""The name npu in torch: registered once for the process, and alive on the ranks of a world with late devices."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor._random import OffsetBasedRNGTracker, logger

from sim.explain.errors import SimError
from sim.kernel.context import current_context
from sim.late import kernels
from sim.late.autocast import register_autocast
from sim.late.device import LateDevice
from sim.late.fused import FUSED
from sim.late.module import MEMORY, MODULE, LateEvent, LateStream
from sim.late.shadow import EVENT, STREAM, Shadow
from sim.late.shared import SHARED, SharedDevice
from sim.ops import Level, OnFunctions, Proceed
from sim.patches.devices import device_module, has_named, importable
from sim.patches.locks import exchange
from sim.patches.rank import Host, Undo


class LateMode(OnFunctions):
    """What torch asks of the hooks of an accelerator's C++ half, which this one lacks: pinned memory, and copies.

    Args:
        device: Of the rank.
    """

    order = Level.LATE

    def __init__(self, device: LateDevice) -> None:
        self._device = device

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        """Answer for the device, or let torch do so."""
        if func is torch.Tensor.pin_memory:
            return args[0] if self._device.is_pinned(args[0]) else self._device.pin(args[0].clone())
        if func is torch.Tensor.is_pinned:
            return args[0].device.type == "cpu" and self._device.is_pinned(args[0])
        if kwargs.get("pin_memory"):
            return self._device.pin(proceed(*args, **{**kwargs, "pin_memory": False}))
        return proceed(*args, **kwargs)


# -- once for the process ----------------------------------------------------------------------------------------------


def why_not() -> str:
    """Why this torch cannot have such a device; empty if it can."""
    if not hasattr(getattr(torch._C, "_acc", None), "create_empty_tensor"):
        return f"torch {torch.__version__} has no torch._C._acc.create_empty_tensor, as torch 2.13 has"
    if hasattr(torch, "npu") and not has_named("npu"):
        return "torch_npu is loaded in this process, and has the name npu"
    return ""


def _register() -> Any:
    """Register the device, unless it is; returns its module."""
    if reason := why_not():
        raise SimError(f"cannot make a world with device='npu'\n  seen: {reason}\n  try: map_device='npu'")
    module: Any = device_module("npu")
    if not hasattr(module, "kernels"):
        acc = torch._C._acc

        class Hooks(acc.PrivateUse1Hooks):
            """What torch asks whether there is such a device: on ranks that have one, there is."""

            def is_available(self) -> bool:
                return _has_device()

            def has_primary_context(self, device_index: int) -> bool:
                return _has_device()

            def is_built(self) -> bool:
                return True

        class Guard(acc.DeviceGuard):
            """There is one device, and its streams are known above torch.

            torch asks for the type also while an exception leaves a hook of autograd. With that pending, what Python
            answers would be an error, and an error there ends the process. So it is dropped first; `_may_raise` has it.
            """

            type_ = _clear_and_answer()

        acc.register_python_privateuseone_hook(Hooks())
        acc.register_python_privateuseone_device_guard(Guard())
        module.kernels = [*kernels.register(), *register_autocast()]
    return module


def _clear_and_answer() -> Any:
    """A function of C's that drops a pending exception, and answers which type of device this is."""
    function = ctypes.PYFUNCTYPE(None)(("PyErr_Clear", ctypes.pythonapi))
    function.restype = lambda _: torch._C._autograd.DeviceType.PrivateUse1
    return function


def _may_raise(register: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.register_hook` and its like, for hooks whose exceptions are kept until backward returns."""

    def registers(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
        context = current_context()
        device: LateDevice | None = None if context is None else context.late
        return register(self, hook if device is None or type(hook) is _KeptHook else _KeptHook(device, hook))

    return registers


class _KeptHook:
    """A hook that is taken for the one that it calls, and whose exception the device keeps until backward returns."""

    def __init__(self, device: LateDevice, hook: Any) -> None:
        self._device, self._hook = device, hook

    def __call__(self, *args: Any) -> Any:
        try:
            return self._hook(*args)
        except BaseException as error:
            self._device.raised = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hook, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._hook)


def _may_raise_in_unpack(init: Callable[..., None]) -> Callable[..., None]:
    """`saved_tensors_hooks.__init__`, the same of what unpacks."""

    def begins(self: Any, pack_hook: Callable[..., Any], unpack_hook: Callable[..., Any]) -> None:
        context = current_context()
        device: LateDevice | None = None if context is None else context.late
        init(self, pack_hook, unpack_hook if device is None else _KeptHook(device, unpack_hook))

    return begins


def _may_raise_in_function(apply: Callable[..., Any]) -> Callable[..., Any]:
    """`apply` of the backward of `torch.autograd.Function`, the same."""

    def applies(self: Any, *args: Any) -> Any:
        context = current_context()
        device: LateDevice | None = None if context is None else context.late
        return apply(self, *args) if device is None else _KeptHook(device, apply)(self, *args)

    return applies


def _runs_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Backward that raises what a hook has raised."""

    def run(*args: Any, **options: Any) -> Any:
        context = current_context()
        device: LateDevice | None = None if context is None else context.late
        if device is None:
            return original(*args, **options)
        device.raised = None
        try:
            return original(*args, **options)
        except SystemError:
            raised, device.raised = device.raised, None
            if raised is None:
                raise
            raise raised from None

    return run


def _has_device() -> bool:
    context = current_context()
    return context is not None and context.late is not None


# -- while a world is alive --------------------------------------------------------------------------------------------


def _of_rank(name: str, original: Any, replies: Mapping[str, Callable[..., Any]] = MODULE) -> Callable[..., Any]:
    """`replies[name]` for ranks that have a device, and the original for all others."""
    reply = replies[name]

    def function(*args: Any, **options: Any) -> Any:
        context = current_context()
        if context is None or context.late is None:
            return original(*args, **options)
        return reply(context.late, *args, **options)

    function.__name__ = name
    return function


def _late_device(host: Host) -> Undo:
    """With `device="npu"`, torch answers as if each rank had an npu, and its storages have memory there."""
    if not any(each.late is not None for each in host.contexts):
        return lambda: None
    module = _register()
    replacements: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        replacements.append((owner, name, value))

    for name in MODULE:
        put(module, name, _of_rank(name, getattr(module, name, lambda *args, **options: None)))
        if hasattr(torch.accelerator, name):
            put(torch.accelerator, name, _of_rank(name, getattr(torch.accelerator, name)))
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        put(torch.Tensor, name, _may_raise(getattr(torch.Tensor, name)))
    hooks = torch.autograd.graph.saved_tensors_hooks
    put(hooks, "__init__", _may_raise_in_unpack(hooks.__init__))
    backward = torch.autograd.function.BackwardCFunction
    for name in ("apply", "apply_boxed"):
        if hasattr(backward, name):
            put(backward, name, _may_raise_in_function(getattr(backward, name)))
    put(torch.autograd, "_engine_run_backward", _runs_backward(torch.autograd._engine_run_backward))
    functions = {name: _of_rank(name, lambda *args, **options: None, MEMORY) for name in MEMORY}
    put(module, "memory", SimpleNamespace(**functions))
    put(module, "Stream", LateStream)
    put(module, "Event", LateEvent)
    put(OffsetBasedRNGTracker, "__init__", _begins_to_draw(OffsetBasedRNGTracker.__init__))
    put(OffsetBasedRNGTracker, "_distribute_region", _draws(OffsetBasedRNGTracker._distribute_region))
    put(torch.UntypedStorage, "resize_", _resizes(torch.UntypedStorage.resize_))
    put(torch.UntypedStorage, "clone", _clones(torch.UntypedStorage.clone))
    put(torch.UntypedStorage, "to", _moves(torch.UntypedStorage.to))
    put(torch.UntypedStorage, "nbytes", _sized(torch.UntypedStorage.nbytes))
    put(torch.UntypedStorage, "size", _sized(torch.UntypedStorage.size))
    put(torch.UntypedStorage, "data_ptr", _points(torch.UntypedStorage.data_ptr))

    restore = exchange(replacements)
    forget_package = importable("npu")
    for name in FUSED:
        setattr(sys.modules["torch_npu"], name, getattr(torch.ops.npu, name))

    def undo() -> None:
        forget_package()
        restore()

    return undo


def _begins_to_draw(original: Callable[..., None]) -> Callable[..., None]:
    """torch's tracker of random operations takes rank 0's state, and compares it byte by byte: a wait for each here."""

    @functools.wraps(original)
    def init(self: Any, device_mesh: Any, run_state_sync: bool = True) -> None:
        is_here = _has_device()
        original(self, device_mesh, run_state_sync and not is_here)
        if run_state_sync and is_here:
            own = torch.get_rng_state()
            state = own.to("npu")
            dist.broadcast(state, 0)
            torch.set_rng_state(state.cpu())
            if not torch.equal(own, torch.get_rng_state()):
                logger.warning(
                    "DTensor gives this rank the random state of rank 0: call torch.manual_seed on every rank."
                )

    return init


def _draws(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch's region around a random operation on a DTensor, from the host's generator, whose state has no offset.

    A tensor that is the same on all ranks draws what a plain tensor would. Each other shard draws from a seed of its
    own, made from the state before. After the operation all ranks have the same state again.
    """

    @functools.wraps(original)
    @contextlib.contextmanager
    def region(self: Any, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
        if not _has_device():
            with original(self, spec, generator):
                yield
            return
        default, source = torch.default_generator, generator or torch.default_generator
        kept, state = default.get_state(), source.get_state()
        if spec.is_sharded():
            seed = int.from_bytes(hashlib.sha256(state.numpy().tobytes()).digest()[:7], "big")
            after = default.manual_seed(seed).get_state()
            default.manual_seed(seed + 1 + self._compute_rng_offsets(spec)[0])
        else:
            after = None
            default.set_state(state)
        try:
            yield
        finally:
            after = default.get_state() if after is None else after
            default.set_state(kept)
            source.set_state(after)

    return region


def _device_of(storage: torch.UntypedStorage) -> LateDevice | None:
    """The device that a storage is on; None if that is none of these."""
    context = current_context()
    device: LateDevice | None = None if context is None else context.late
    return device if device is not None and device.memory.has(storage) else None


def _resizes(original: Callable[..., Any]) -> Callable[..., Any]:
    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        device = _device_of(self)
        return original(self, size) if device is None else device.resize(self, size)

    return resize_


def _clones(original: Callable[..., Any]) -> Callable[..., Any]:
    def clone(self: torch.UntypedStorage) -> Any:
        return original(self) if _device_of(self) is None else _whole(self, "npu").clone().untyped_storage()

    return clone


def _moves(original: Callable[..., Any]) -> Callable[..., Any]:
    """`UntypedStorage.to`, as `torch.load` calls it: torch's own makes storages, which it cannot on this device."""

    def to(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> Any:
        if _has_device() and (self.device.type, torch.device(device).type) == ("cpu", "npu"):
            return _whole(self, "cpu").to(device, non_blocking=non_blocking).untyped_storage()
        return original(self, device=device, non_blocking=non_blocking)

    return to


def _whole(storage: torch.UntypedStorage, device: str) -> torch.Tensor:
    """The bytes of a storage."""
    whole: Any = torch.empty(0, dtype=torch.uint8, device=device)
    found: torch.Tensor = whole.set_(storage, 0, (storage.nbytes(),), (1,))
    return found


def _sized(original: Callable[..., int]) -> Callable[..., int]:
    def nbytes(self: torch.UntypedStorage) -> int:
        device = _device_of(self)
        return original(self) if device is None else device.memory.size_of(self)

    return nbytes


def _points(original: Callable[..., int]) -> Callable[..., int]:
    def data_ptr(self: torch.UntypedStorage) -> int:
        device = _device_of(self)
        return original(self) if device is None else device.memory.address_of(self)

    return data_ptr


# -- the same, of a real device ----------------------------------------------------------------------------------------


def _of_shared(name: str, original: Any) -> Callable[..., Any]:
    """`SHARED[name]` for ranks that share a device, and the original for all others."""
    reply = SHARED[name]

    def function(*args: Any, **options: Any) -> Any:
        context = current_context()
        device: SharedDevice | None = None if context is None else context.shared
        if device is None:
            return original(*args, **options)
        return reply(device, *args, *options.values())

    function.__name__ = name
    return function


def _shared_device(host: Host) -> Undo:
    """With a real device, torch answers on each rank as if it had one of its own."""
    devices: list[SharedDevice] = [each.shared for each in host.contexts if each.shared is not None]
    if not devices:
        return lambda: None
    module: Any = torch.get_device_module(devices[0].kind)
    for device in devices:
        device.attach(module)
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, by: Callable[[str, Any], Any]) -> None:
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, by(name, getattr(owner, name)))

    for name in SHARED:
        for owner in (module, torch.accelerator):
            if hasattr(owner, name):
                replace(owner, name, _of_shared)
    if devices[0].shadow is not None:
        for owner, told in ((module.Event, EVENT), (module.Stream, STREAM)):
            for name, enter in told.items():
                replace(owner, name, partial(_entered, enter))
        replace(module, "set_stream", partial(_entered, lambda shadow, found, *args: shadow.moved()))
        replace(module, "stream", _goes_to)
        replace(torch.UntypedStorage, "resize_", _gives_back)
        replace(torch.autograd, "_engine_run_backward", _returns)

    def undo() -> None:
        for owner, name, original in reversed(replaced):
            setattr(owner, name, original)

    return undo


def _shadow() -> Shadow | None:
    """That of the calling rank's part of a device; None where it has none, or where that enters things itself."""
    context = current_context()
    device: SharedDevice | None = None if context is None else context.shared
    shadow = None if device is None else device.shadow
    return None if shadow is None or shadow.is_blind else shadow


def _entered(enter: Callable[..., None], name: str, original: Any) -> Callable[..., Any]:
    """A function of a device, which the rank's shadow is told of with what it returns and what it was given."""

    def function(*args: Any, **options: Any) -> Any:
        found = original(*args, **options)
        if (shadow := _shadow()) is not None:
            enter(shadow, found, *args, *options.values())
        return found

    function.__name__ = name
    return function


def _goes_to(name: str, original: Any) -> Callable[..., Any]:
    """`torch.cuda.stream`: Python makes another stream current, and the one before again."""

    @contextlib.contextmanager
    def goes(stream: Any) -> Iterator[Any]:
        with original(stream) as found:
            if (shadow := _shadow()) is not None:
                shadow.moved()
            yield found
        if shadow is not None:
            shadow.moved()

    return goes


def _gives_back(name: str, original: Any) -> Callable[..., Any]:
    """`UntypedStorage.resize_`, which gives memory back, or asks for other one."""

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        if (shadow := _shadow()) is not None and self.device.type == shadow.kind and size != self.nbytes():
            shadow.memory.release(self._cdata)
        return original(self, size)

    return resize_


def _returns(name: str, original: Any) -> Callable[..., Any]:
    """Backward, behind whose streams the current one is when it returns."""

    def run(*args: Any, **options: Any) -> Any:
        found = original(*args, **options)
        if (shadow := _shadow()) is not None:
            shadow.backward_returned()
        return found

    return run


LATE_PATCHES = (_late_device, _shared_device)
"""What torch answers on ranks that have a late device, and on those that share a real one."""
