"""The mode under which modules fill their tensors: shards tile by tile where that is possible, else unsharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from hyper_parallel.core.common.errors import InvalidValue
from hyper_parallel.core.init.tiles import FillTarget, Write, digest, normal, truncated, uniform

_DRAWS: Mapping[str, Callable[..., None]] = MappingProxyType({"normal_": normal, "uniform_": uniform})
_CONSTANTS = frozenset({"fill_", "zero_"})
_SETS_ALL = (
    _CONSTANTS
    | frozenset(_DRAWS)
    | {*("copy_", "random_", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_")}
)
"""What gives each element of its first argument a value, whatever was there."""
_SET_ALL_FIRST = "normal_, uniform_ or copy_ first, which set all of it, in the module that has it; or init_fn=..."
_SAME = frozenset({"alias", "detach", "lift_fresh"})  # `parameter.data` and `parameter.detach()`
_RANDOM = torch.Tag.nondeterministic_seeded
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class DefaultsToCpu(DeviceContext):
    """As `with torch.device("cpu")`, but not of what is written to a given tensor (`out=`), which may be elsewhere.

    Args:
        filling: what `parameter.data = values` is told to, as it is no operation that a dispatch mode sees.
    """

    def __init__(self, filling: Filling) -> None:
        super().__init__(torch.device("cpu"))
        self._filling = filling

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make it on the CPU, if it is made."""
        if func == _SET_DATA and self._filling.set_data(*args):
            return None
        if (kwargs or {}).get("out") is not None:
            return func(*args, **kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)


class Filling(TorchDispatchMode):
    """Run code that fills tensors so that every rank gets its shard of the same values.

    In-place draws and element-wise operations with numbers are noted and carried out tile by tile. For anything else,
    a parameter is unsharded on the CPU of every rank until the module is done with it.

    Args:
        seed: of all draws.
        targets: the parameters and buffers of the model, with memory.
    """

    def __init__(self, seed: int, targets: Sequence[FillTarget]) -> None:
        super().__init__()
        self._seed = seed
        self._where = ""
        self._begun: list[FillTarget] = []  # what the module at hand does with unsharded values
        self._by_id = {id(target.tensor): (target, target.tensor) for target in targets}
        self._by_storage = {_storage(target.local): target for target in targets if target.local.numel()}

    def fill(self, fill: Callable[[], object], path: str, kind: str) -> None:
        """Let a module fill its tensors.

        Args:
            fill: does it.
            path: of the module.
            kind: its class, for errors.
        """
        self._where = f"{path or 'the model'} ({kind})"
        torch.default_generator.manual_seed(digest(self._seed, path) % 2**63)
        with _truncated_by_tiles(), self:
            fill()
        for target in self._begun:
            target.reshard()
        self._begun.clear()

    def truncate(self, tensor: torch.Tensor, mean: float, std: float, low: float, high: float) -> bool:
        """Note a draw of `trunc_normal_`, whose loop needs all elements at once; False if it has to be done in full."""
        target = self._target(tensor)
        if target is None or target.unsharded is not None or not (std > 0 and low < high):
            return False
        target.write(lambda tile, numbers: truncated(tile, numbers, mean, std, low, high), covers=True)
        return True

    def set_data(self, tensor: torch.Tensor, values: torch.Tensor) -> bool:
        """Copy what becomes the `data` of a tensor of the model, which keeps its memory; False for another tensor.

        Args:
            tensor: whose data is set.
            values: to what.
        """
        known = self._by_id.get(id(tensor))
        if known is None:
            return False
        if (values.shape, values.dtype) != (tensor.shape, tensor.dtype):
            raise self._refusal(f"its data is set to values of shape {tuple(values.shape)} in {values.dtype}", known[0])
        if self._target(values) is not known[0]:
            tensor.copy_(values)
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take over an operation; the mode is off meanwhile."""
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        target = None if first is None else self._target(first)
        if target is not None and (name in _SAME or (name == "view" and tuple(args[1]) == tuple(args[0].shape))):
            same = func(*args, **kwargs)
            self._by_id[id(same)] = target, same  # kept, so that nothing else gets its id
            return same
        if target is not None and target.unsharded is None and _is_tilewise(func, name, args, kwargs):
            target.write(_write(func, name, args, kwargs), covers=name in _CONSTANTS or name in _DRAWS)
            return first
        if target is not None and torch.Tag.inplace_view in func.tags:
            raise self._refusal(f"{name} changes the shape of a parameter", target)
        if name == "copy_" and target is not None and isinstance(args[1], DTensor) and self._target(args[1]) is None:
            if _lies_alike(args[1], target.tensor):
                target.store(args[1]._local_tensor)
                return first
            args = args[0], self._whole(args[1], target), *args[2:]
        self._discard(target if name in _SETS_ALL else None, args, kwargs)
        own_args, own_kwargs = self._unsharded(name, args, kwargs)
        run = _drawn_on_cpu if _RANDOM in func.tags else _run
        result = run(func, own_args, own_kwargs)
        return first if own_args and result is own_args[0] else result

    def _target(self, tensor: torch.Tensor) -> FillTarget | None:
        """What a tensor of the model stands for; None for another one."""
        if id(tensor) in self._by_id:
            return self._by_id[id(tensor)][0]
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta or tensor.layout != torch.strided:
            return None
        target = self._by_storage.get(_storage(tensor)) if tensor.numel() else None
        if target is None:
            return None
        if isinstance(target.tensor, DTensor):
            raise self._refusal("it uses a local shard, taken out of its DTensor", target)
        if _geometry(tensor) != _geometry(target.local):  # what `parameter.data` gives is the same
            raise self._refusal("it uses a view that was taken before", target)
        return target

    def _discard(self, target: FillTarget | None, args: Any, kwargs: dict[str, Any]) -> None:
        """Forget the values of what an operation gives new ones: its first argument, or `out`; unless it reads them."""
        out, read = kwargs.get("out"), [*args[target is not None :], *kwargs.values()]
        if target is None and isinstance(out, torch.Tensor):
            target, read = self._target(out), [*args, *(value for value in kwargs.values() if value is not out)]
        tensors = [value for value in tree_leaves(read) if isinstance(value, torch.Tensor)]
        if target is not None and all(self._target(tensor) is not target for tensor in tensors):
            target.discard()

    def _whole(self, values: DTensor, target: FillTarget) -> torch.Tensor:
        """Return what every rank holds all of."""
        if any(not p.is_replicate() and values.device_mesh.size(axis) > 1 for axis, p in enumerate(values.placements)):
            blame = "it copies a DTensor that lies otherwise, elements of which other ranks hold"
            raise self._refusal(blame, target, "a plain tensor of all values, the same on all ranks")
        return values._local_tensor

    def _unsharded(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Arguments with plain tensors on the CPU for those that stand for the model's."""
        found = False

        def unsharded(value: Any) -> Any:
            nonlocal found
            target = self._target(value) if isinstance(value, torch.Tensor) else None
            if target is None:
                return value
            found = True
            self._begun.append(target)
            if name.endswith("_like") or name.startswith("new_"):  # of which no values are read
                target.begin()
                return torch.empty(value.shape, dtype=value.dtype, device="cpu")
            values = target.unshard()
            if values is None:
                raise self._refusal(f"{name} needs elements that other ranks hold", target)
            return values

        own_args, own_kwargs = tree_map(unsharded, (args, kwargs))
        if found and name != "copy_":  # modules make tables where their parameters are
            first = own_args[0]
            own_args = tree_map(lambda v: v.cpu() if isinstance(v, torch.Tensor) and v is not first else v, own_args)
        return own_args, own_kwargs

    def _refusal(self, blame: str, target: FillTarget, hint: str = _SET_ALL_FIRST) -> ValueError:
        seen = f"seen: {target.name!r} of shape {tuple(target.tensor.shape)}"
        return InvalidValue(f"cannot fill {self._where} shard by shard", blame, seen, hint)


def _is_tilewise(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation changes each element of its first argument by what numbers and a draw say."""
    numbers = all(value is None or isinstance(value, (int, float)) for value in (*args[1:], *kwargs.values()))
    if not numbers or not func._schema.is_mutable or torch.Tag.inplace_view in func.tags:
        return False
    if _RANDOM in func.tags:
        return name in _DRAWS and args[0].is_floating_point()
    return torch.Tag.pointwise in func.tags or name in _CONSTANTS


def _write(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Write:
    func(torch.empty(0, dtype=args[0].dtype, device="cpu"), *args[1:], **kwargs)  # raises what torch does not allow
    if name not in _DRAWS:
        return lambda tile, numbers: func(tile, *args[1:], **kwargs)
    given = [*args[1:], *(value for word, value in kwargs.items() if word != "generator")]
    return lambda tile, numbers: _DRAWS[name](tile, numbers, *given)


def _lies_alike(values: DTensor, tensor: torch.Tensor) -> bool:
    """Whether each rank holds of both the same elements."""
    if not isinstance(tensor, DTensor) or values.shape != tensor.shape:
        return False
    return values.device_mesh == tensor.device_mesh and values.placements == tensor.placements


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _drawn_on_cpu(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation that draws, with the CPU's generator also for tensors that are elsewhere."""
    first = args[0] if args and isinstance(args[0], torch.Tensor) else None
    device = torch.device(kwargs.get("device") or ("cpu" if first is None else first.device))
    if device.type in ("cpu", "meta"):
        return func(*args, **kwargs)
    args = [value.cpu() if isinstance(value, torch.Tensor) else value for value in args]
    result = func(*args, **{**kwargs, **({"device": "cpu"} if "device" in kwargs else {})})
    return first.copy_(result) if func._schema.is_mutable and first is not None else result.to(device)


class _TruncatedByTiles:
    """`trunc_normal_` while ranks of this process fill models: it asks the mode of the calling thread first.

    One for all ranks, from the first that enters to the last that leaves: each with its own would wrap another's, and
    whoever leaves first could not take its own away.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.users = 0

    def __call__(self, tensor: Any, mean: float, std: float, a: float, b: float, generator: Any = None) -> Any:
        modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Filling)]
        if modes and generator is None and modes[-1].truncate(tensor, mean, std, a, b):
            return tensor
        return self.original(tensor, mean, std, a, b, generator=generator)


@contextmanager
def _truncated_by_tiles() -> Iterator[None]:
    """Have `trunc_normal_` replaced, and restore it when no rank fills a model any more."""
    used = getattr(nn.init, "_no_grad_trunc_normal_", None)  # whoever imported trunc_normal_ calls this one, too
    if used is None:  # then it runs on unsharded values: slower, and as right
        yield
        return
    if not isinstance(used, _TruncatedByTiles):
        used = nn.init._no_grad_trunc_normal_ = _TruncatedByTiles(used)
    used.users += 1
    try:
        yield
    finally:
        used.users -= 1
        if used.users == 0 and nn.init._no_grad_trunc_normal_ is used:
            nn.init._no_grad_trunc_normal_ = used.original


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    flags = tensor.is_conj(), tensor.is_neg()
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, flags


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
