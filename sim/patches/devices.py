"""`--map-device cuda`: what a script asks for on that device is done on the CPU.

Mapped are device arguments of torch's functions (`"cuda"`, `torch.device("cuda", 1)`, a bare index in `.to`),
`.cuda()`, meshes, `DistributedDataParallel(device_ids=...)`, `torch.autocast`, `torch.load(map_location=...)`,
`torch.Stream`, `torch.Event`, `torch.nn.SyncBatchNorm` with its kernels, from `torch.cuda` what `ANSWERS` and `CLASSES`
have, and from `torch.accelerator` what `ACCELERATOR_ANSWERS` has. Other functions that torch documents there say that
they are not mapped. A tensor's own `device` stays `cpu`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.parallel import DistributedDataParallel

from hyper_parallel import platform
from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.machine.description import one_node
from hyper_parallel.platform import Platform
from hyper_parallel.platform.accelerator import CudaPlatform, NpuPlatform
from sim.explain.errors import SimError
from sim.kernel.context import current_context
from sim.ops import Level, OnFunctions, Proceed
from sim.patches.locks import exchange
from sim.patches.rank import Host, RankContext, Undo

__all__ = [
    "ACCELERATOR_ANSWERS",
    "ANSWERS",
    "CLASSES",
    "DEVICE_PATCHES",
    "KINDS",
    "MapDevice",
    "answer",
    "device_module",
    "documented",
    "has_named",
    "importable",
    "mapped",
]

KINDS = ("cuda", "npu")


def mapped(device: Any, kind: str) -> Any:
    """`device`, or the CPU where it means a device of `kind`.

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


class MapDevice(OnFunctions):
    """While it is on, torch's functions called on this thread put on the CPU what should go to `kind`.

    >>> with MapDevice("cuda"):
    ...     torch.zeros(2, device="cuda:1").cuda().device
    device(type='cpu')
    """

    order = Level.MAPPED_DEVICE

    def __init__(self, kind: str) -> None:
        self._kind = kind
        tensor = torch.Tensor
        self._moves = {tensor.cuda, getattr(tensor, "npu", tensor.cuda), tensor.pin_memory}

    def handle(self, func: Any, types: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        """Call `func` with devices of the kind exchanged."""
        if func in self._moves:
            return args[0]
        if func is torch.device and len(args) == 1 and isinstance(args[0], int):
            return func(self._kind, args[0])  # an index alone is one of the accelerator
        options = dict(kwargs)
        if func is torch.nn.functional.scaled_dot_product_attention and isinstance(
            (*args, *options.values())[0], DTensor
        ):
            return _attention(*args, **options)
        if "device" in options:
            options["device"] = mapped(options["device"], self._kind)
        if options.get("pin_memory"):
            options["pin_memory"] = False
        if func is torch.Tensor.to:
            args = (args[0], *(mapped(arg, self._kind) for arg in args[1:2]), *args[2:])
        elif any(isinstance(arg, torch.device) for arg in args):
            args = tuple(mapped(arg, self._kind) if isinstance(arg, torch.device) else arg for arg in args)
        return proceed(*args, **options)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Any:
    """Attention of DTensors in operations that DTensors know: those of devices know one that the CPU does not have."""
    mask = attn_mask
    if is_causal and isinstance(query, DTensor):
        rows, columns = query.shape[-2], key.shape[-2]
        whole = torch.full((rows, columns), -torch.inf, dtype=query.dtype).triu(1)
        mask = DTensor.from_local(whole, query.device_mesh, [Replicate()] * query.device_mesh.ndim, run_check=False)
    return torch._scaled_dot_product_attention_math(query, key, value, mask, dropout_p, False, **more)[0]


class MappedStream:
    """A stream of a mapped device, where everything is done when it is called."""

    device_index = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        del args, options

    def query(self) -> bool:
        """Everything is done."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """An event, already there."""
        return event or MappedEvent()

    def synchronize(self, *args: Any, **options: Any) -> None:
        """Nothing to wait for."""

    wait_event = wait_stream = synchronize

    def __enter__(self) -> MappedStream:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to leave."""


class MappedEvent(MappedStream):
    """An event of a mapped device: it has happened."""

    record = wait = MappedStream.synchronize

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
    size = context.network.world_size
    if index is not None and not 0 <= int(index) < size:
        blame = f"{size} simulated ranks have {size} devices, 0 to {size - 1}"
        seen = f"device: {device}, asked for by rank {context.rank}"
        raise InvalidValue("cannot set the device", blame, seen, "set_device(int(os.environ['LOCAL_RANK']))")
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
    return f"simulated {context.host.map_device}"


_MEMORY = 80 << 30  # bytes of a simulated device; what is really used is the host's


def _properties(context: RankContext, device: Any = None) -> SimpleNamespace:
    major, minor = _CAPABILITY
    return SimpleNamespace(
        name=_device_name(context), major=major, minor=minor, total_memory=_MEMORY, multi_processor_count=128
    )


_CAPABILITY = (9, 0)


def _always(value: Any) -> Callable[..., Any]:
    return lambda context, *args, **options: value


def _rng_state(context: RankContext, device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()  # there is one generator, the CPU's


def _set_rng_state(context: RankContext, state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


_OF_BOTH: dict[str, Callable[..., Any]] = {
    "is_available": _always(True),
    "device_count": lambda context: context.network.world_size,
    "current_stream": lambda context, *args, **options: MappedStream(),
    "get_device_capability": _always(_CAPABILITY),
    "memory_stats": lambda context, *args, **options: defaultdict(int),
    **dict.fromkeys(
        ("synchronize", "empty_cache", "set_stream", "reset_peak_memory_stats", "reset_accumulated_memory_stats"),
        _nothing,
    ),
    **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), _zero),
}

# What torch.cuda (torch.npu) answers on a rank; each function gets the rank's context first.
ANSWERS: dict[str, Callable[..., Any]] = {
    **_OF_BOTH,
    "current_device": lambda context: context.device_index,
    "set_device": _set_device,
    "device": _use_device,
    "device_of": lambda context, tensor: contextlib.nullcontext(),
    "get_device_name": _device_name,
    "get_device_properties": _properties,
    "mem_get_info": _always((_MEMORY, _MEMORY)),
    "memory_summary": _always("a simulated device: the memory is the host's"),
    "is_bf16_supported": _always(True),
    "is_tf32_supported": _always(True),
    "is_initialized": _always(True),
    "is_current_stream_capturing": _always(False),
    "can_device_access_peer": _always(True),
    "graph_pool_handle": _always((0, 0)),
    "default_stream": lambda context, *args, **options: MappedStream(),
    "stream": lambda context, stream=None: contextlib.nullcontext(stream),
    "get_rng_state": _rng_state,
    "set_rng_state": _set_rng_state,
    "get_rng_state_all": lambda context: [_rng_state(context)],
    "set_rng_state_all": lambda context, states: _set_rng_state(context, *states[:1]),
    "initial_seed": lambda context: torch.initial_seed(),
    **dict.fromkeys(("init", "ipc_collect", "manual_seed", "manual_seed_all"), _nothing),
    **dict.fromkeys(("set_per_process_memory_fraction", "reset_max_memory_allocated"), _nothing),
    **dict.fromkeys(("memory_cached", "max_memory_cached", "device_memory_used"), _zero),
}

# What torch.accelerator answers.
ACCELERATOR_ANSWERS: dict[str, Callable[..., Any]] = {
    **_OF_BOTH,
    "current_accelerator": lambda context, check_available=False: torch.device(context.host.map_device),
    "device_index": _use_device,
    "get_memory_info": _always((_MEMORY, _MEMORY)),
    "empty_host_cache": _nothing,
    **dict.fromkeys(("current_device_index", "current_device_idx"), lambda context: context.device_index),
    **dict.fromkeys(("set_device_index", "set_device_idx"), _set_device),
}

# Classes stay classes: torch's own code has them in annotations.
CLASSES = {"Stream": MappedStream, "Event": MappedEvent}

# torch's own code goes by what the machine really has. Of the accelerator it gets streams: DDP makes some for itself.
_FOR_THE_SCRIPT_ONLY = (
    "is_available",
    "device_count",
    "current_device",
    "is_initialized",
    "is_current_stream_capturing",
)
_STREAMS = ("current_stream", "set_stream", "synchronize")


def answer(
    name: str,
    original: Any,
    context_of: Callable[[], RankContext | None],
    answers: Mapping[str, Callable[..., Any]] = ANSWERS,
    title: str = "",
) -> Callable[..., Any]:
    """The function that stands in for `torch.cuda.<name>`: on ranks what `answers` says, else the original.

    Where `answers` says nothing, user code gets an error, and torch's own code the original.
    """
    reply = answers.get(name)
    for_all = name in _STREAMS if answers is ACCELERATOR_ANSWERS else name not in _FOR_THE_SCRIPT_ONLY
    for_the_script_only = reply is None or not for_all

    def function(*args: Any, **options: Any) -> Any:
        context = context_of()
        if context is None:
            return original(*args, **options)
        if for_the_script_only:
            asked_by = str(sys._getframe(1).f_globals.get("__name__", ""))
            if asked_by.partition(".")[0] == "torch":
                return original(*args, **options)
        if reply is None:
            raise _not_mapped(context, title)
        return reply(context, *args, **options)

    if callable(original) and not isinstance(original, type):
        functools.update_wrapper(function, original)
    return function


def _not_mapped(context: RankContext, name: str) -> SimError:
    kind = context.host.map_device
    return SimError(
        f"rank {context.rank} called {name}, which is not among what is mapped from {kind} to the CPU\n"
        f"  mapped: docs/sim.md has the list\n"
        f"  try: to leave it out where the device is simulated: torch.cuda.get_device_name() is 'simulated {kind}'"
    )


def documented(module: ModuleType) -> list[str]:
    """The functions that torch lists in a module's `__all__`."""
    return [
        name
        for name in getattr(module, "__all__", ())
        if callable(getattr(module, name, None)) and not isinstance(getattr(module, name), type)
    ]


def device_module(kind: str) -> ModuleType:
    """`torch.cuda` or `torch.npu`; without torch_npu an empty one, and the device's name made known to torch."""
    found = getattr(torch, kind, None)
    if found is None:
        found = ModuleType(f"torch.{kind}")
        found.__dict__.update(dict.fromkeys(ANSWERS, _nothing), is_available=lambda: False, device_count=lambda: 0)
        found.__dict__.update(simulated=True, _is_in_bad_fork=lambda: False)  # without it, `torch.manual_seed` warns
        torch.utils.rename_privateuse1_backend(kind)  # for good: torch has no way back
        torch._C._get_accelerator = _accelerator  # its own now raises
        torch._register_device_module(kind, found)
        torch.utils.generate_methods_for_privateuse1_backend()
    module: ModuleType = found
    return module


def has_named(kind: str) -> bool:
    """Whether this process has made the name of a device known to torch that is not there: for good."""
    return hasattr(getattr(torch, kind, None), "simulated")


def importable(kind: str) -> Undo:
    """Let a script import torch_npu where that is not installed; returns how to undo it."""
    if kind != "npu" or "torch_npu" in sys.modules:
        return lambda: None
    package = sys.modules["torch_npu"] = ModuleType("torch_npu")
    package.__spec__ = ModuleSpec("torch_npu", None)

    def undo() -> None:
        sys.modules.pop("torch_npu", None)

    return undo


def _accelerator(*args: Any) -> torch.device:
    """What torch is to take for the machine's accelerator once it knows the name npu."""
    context = current_context()
    return torch.device("cpu" if context is None or context.late is None else "npu")


# -- the patches ---------------------------------------------------------------------------------------------------


def _provide(device_type: str | None) -> Platform | None:
    """The simulated device for a rank that asks for the default, `cpu`, or what is mapped to it; else None."""
    context = current_context()
    if context is not None and (context.late is not None or context.shared is not None):
        if device_type not in (None, context.host.device):
            return None  # the others are what they are on a machine
        device: Platform = CudaPlatform() if context.host.device == "cuda" else NpuPlatform()
        device.compares_collectives = True
        device.machine = lambda: context.host.machine or one_node()  # type: ignore[method-assign]
        return device
    if context is None or device_type not in (None, "cpu", context.host.map_device):
        return None
    found: Platform = context.host.platform()
    return found


def _device_guard(host: Host) -> Undo:
    """A CUDA build without a GPU (torch 2.11) crashes when DTensor sets up its device guard off the main thread."""
    name = "_ensureCUDADeviceGuardSet"
    original = getattr(torch._C, name, None)
    if original is None or torch.cuda.is_available():
        return lambda: None
    setattr(torch._C, name, lambda: None)
    return lambda: setattr(torch._C, name, original)


def _platform(host: Host) -> Undo:
    """`hyper_parallel.get_platform` answers with the simulator's device on a rank's thread."""
    platform.register_provider(_provide)
    return lambda: platform.unregister_provider(_provide)


def _mapped_device(host: Host) -> Undo:
    """With `--map-device`, torch answers as if each rank had a device; what names it gets the CPU."""
    kind = host.map_device
    if kind is None:
        return lambda: None
    module = device_module(kind)
    replacements: list[tuple[Any, str, Any]] = [(module, name, made) for name, made in CLASSES.items()]
    for owner, answers in ((module, ANSWERS), (torch.accelerator, ACCELERATOR_ANSWERS)):
        for name in dict.fromkeys((*answers, *documented(owner))):
            if owner is module or hasattr(owner, name):
                title = f"{owner.__name__}.{name}"
                original = getattr(owner, name, None)
                replacements.append((owner, name, answer(name, original, current_context, answers, title)))
    ddp, scaler = DistributedDataParallel, torch.amp.GradScaler
    replacements += [
        (ddp, "__init__", _without_device_ids(ddp.__init__)),
        (torch.autocast, "__init__", _on_cpu(torch.autocast.__init__, kind, "device_type")),
        (scaler, "__init__", _on_cpu(scaler.__init__, kind, "device", default="cpu")),
        (torch.nn.Module, "to", _on_cpu(torch.nn.Module.to, kind, "device")),
        (torch, "load", _loads_on_cpu(torch.load, kind)),
        *((torch, name, made) for name, made in CLASSES.items()),
        (torch.nn.SyncBatchNorm, "forward", _synchronized(torch.nn.SyncBatchNorm.forward)),
        (ddp, "_passing_sync_batchnorm_handle", _nothing),  # which refuses such layers on the CPU
    ]
    restore, forget_package, forget_kernels = exchange(replacements), importable(kind), _batch_norm_on_cpu()

    def undo() -> None:
        forget_kernels()
        forget_package()
        restore()

    return undo


# -- torch.nn.SyncBatchNorm: the layer refuses the CPU, and torch has its kernels for devices alone ------------------


def _synchronized(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`SyncBatchNorm.forward`, which on ranks goes by the group and not by the device."""

    @functools.wraps(original)
    def forward(self: torch.nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
        if current_context() is None or not self.training or not torch.distributed.is_initialized():
            return original(self, input)
        group = self.process_group or torch.distributed.group.WORLD
        size = torch.distributed.get_world_size(group)
        if size == 1:
            return BatchNorm.forward(self, input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        momentum, running = self.momentum or 0.0, (None, None)
        if self.track_running_stats:
            running = self.running_mean, self.running_var
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1 / self.num_batches_tracked.item()
        return SyncBatchNorm.apply(input, self.weight, self.bias, *running, self.eps, momentum, group, size)

    return forward


def _wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype in which statistics are kept."""
    return x if x.dtype == torch.float64 else x.float()


def _sums(x: torch.Tensor) -> torch.Tensor:
    """The sums over all dims but the channels'."""
    return x.transpose(0, 1).flatten(1).sum(1)


def _by_channel(value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return value.view(-1, *[1] * (x.dim() - 2))


def _statistics(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    variance, mean = torch.var_mean(_wide(x).transpose(0, 1).flatten(1), 1, correction=0)
    return mean, (variance + eps).rsqrt()


def _of_all(
    x: torch.Tensor,
    means: torch.Tensor,
    inverses: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and inverse deviation of all ranks' batches from those of each; the running ones move towards them."""
    weights = (counts / counts.sum()).to(means.dtype)[:, None]
    mean = (weights * means).sum(0)
    variance = (weights * (inverses**-2 - eps + (means - mean) ** 2)).sum(0)
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        unbiased = variance * (counts.sum() / (counts.sum() - 1))
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return mean, (variance + eps).rsqrt()


def _normalized(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    scale = inverse if weight is None else inverse * weight
    result = (_wide(x) - _by_channel(mean, x)) * _by_channel(scale, x)
    return (result if bias is None else result + _by_channel(bias, x)).to(x.dtype)


def _gradient_sums(
    gradient: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    weight: torch.Tensor | None,
    *asked: bool,
) -> tuple[torch.Tensor, ...]:
    """The sums of a gradient, and of it times what lies above the mean; the gradients of weight and bias."""
    dtype = mean.dtype if weight is None else weight.dtype
    sums, products = _sums(_wide(gradient)), _sums(_wide(gradient) * (_wide(x) - _by_channel(mean, x)))
    return sums, products, (products * inverse).to(dtype), sums.to(dtype)


def _gradient_of_input(
    gradient: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    weight: torch.Tensor | None,
    sums: torch.Tensor,
    products: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    above = (_wide(x) - _by_channel(mean, x)) * _by_channel(inverse**2 * products / counts.sum(), x)
    scale = inverse if weight is None else inverse * weight
    return ((_wide(gradient) - _by_channel(sums / counts.sum(), x) - above) * _by_channel(scale, x)).to(x.dtype)


_BATCH_NORM: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": _statistics,
    "batch_norm_gather_stats_with_counts": _of_all,
    "batch_norm_elemt": _normalized,
    "batch_norm_backward_reduce": _gradient_sums,
    "batch_norm_backward_elemt": _gradient_of_input,
}


def _batch_norm_on_cpu() -> Undo:
    """Give the CPU the kernels of SyncBatchNorm that it lacks."""
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in _BATCH_NORM.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CPU"):
            library.impl(name, kernel, "CPU")
    return library._destroy


def _backward_modes(host: Host) -> Undo:
    """What backward calls (hooks, layers that are computed again) runs on the rank's thread, in its modes.

    While a mode of functions handles one, torch switches it off, and `Tensor.backward` is such a function. Torch has
    threads for the backward of a device, which would be no rank's; `torch.inference_mode(False)` switches them on.
    """
    original = torch.autograd._engine_run_backward

    def run(*args: Any, **options: Any) -> Any:
        context = current_context()
        if context is None:
            return original(*args, **options)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            for mode in () if torch._C._len_torch_function_stack() else context.function_modes:
                stack.enter_context(mode)
            return original(*args, **options)

    return exchange([(torch.autograd, "_engine_run_backward", run)])


def _without_device_ids(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *rest: Any, **more: Any
    ) -> None:
        if current_context() is not None:
            device_ids = output_device = None
        original(self, module, device_ids, output_device, *rest, **more)

    return init


def _on_cpu(original: Callable[..., Any], kind: str, name: str, default: str | None = None) -> Callable[..., Any]:
    """`original` with its first argument, a device called `name`, exchanged, or `default` if not given."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **options: Any) -> Any:
        if current_context() is not None:
            if args:
                args = (mapped(args[0], kind), *args[1:])
            elif name in options or default is not None:
                options[name] = mapped(options.get(name, default), kind)
        return original(self, *args, **options)

    return method


def _loads_on_cpu(original: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *rest: Any, **more: Any) -> Any:
        if current_context() is not None and isinstance(map_location, dict):
            map_location = {mapped(k, kind): mapped(v, kind) for k, v in map_location.items()}
        elif current_context() is not None:
            map_location = mapped(map_location, kind)
        return original(f, map_location, *rest, **more)

    return load


DEVICE_PATCHES = (_device_guard, _platform, _mapped_device, _backward_modes)
"""What torch and the library answer on ranks that ask for devices."""
