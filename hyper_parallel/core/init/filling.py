"""The mode under which modules fill their tensors: random numbers by counter, everything else on the rank's part."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.init.draws import maker, write
from hyper_parallel.core.init.elementwise import compute, is_elementwise, locals_of
from hyper_parallel.core.init.parts import Box, Home, Part, Refused
from hyper_parallel.core.init.random import Stream
from hyper_parallel.core.init.views import VIEWS, turn_whole, view_of_whole

__all__ = ["Filling"]

_SETTING = frozenset({"fill_", "zero_", "copy_"})  # these give elements a value whatever they were
_LIKE = frozenset({"empty_like", "zeros_like", "ones_like", "full_like"})
_NEW = frozenset({"new_empty", "new_zeros", "new_ones", "new_full"})


class Filling(TorchDispatchMode):
    """Run code that fills tensors so that every rank gets its slice of the same whole ones.

    Args:
        seed: of all draws.
        homes: the parameters and buffers of the model, with memory.
    """

    def __init__(self, seed: int, homes: Sequence[Home]) -> None:
        super().__init__()
        self._seed = seed
        self._where = ""
        self._loose = Stream(seed, "")  # of tensors that belong to no parameter
        self._homes = {id(home.tensor): home for home in homes}
        self._storages = {_storage(home.local): home for home in homes if home.local.numel()}

    def enter(self, path: str, kind: str) -> None:
        """Note which module is filled next: its path and class."""
        self._where = f"{path or 'the model'} ({kind})"
        self._loose = Stream(self._seed, f"{path}:")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take over an operation; the mode is off meanwhile."""
        try:
            return self._take_over(func, args, kwargs or {})
        except Refused as refused:
            raise self._error(refused) from None

    def _take_over(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        found: list[Part] = []

        def part_of(value: Any) -> Any:
            part = self._part_of(value) if isinstance(value, torch.Tensor) else None
            if part is None:
                return value
            found.append(part)
            return part

        own_args, own_kwargs = tree_map(part_of, (args, kwargs))
        sets = name in _SETTING or (is_random and func._schema.is_mutable)
        covered = found[0] if found and sets and found[0] is own_args[0] else None
        for part in found:
            if part.home is not None and not (part is covered and part.is_all):
                part.home.flush()
        if covered is not None and covered.home is not None and covered.is_all and not covered.home.locked:
            covered.home.pending = None  # a module often fills again what its children have just filled
        if is_random:
            return self._random(func, name, args, own_args, own_kwargs)
        if not found:
            return func(*args, **kwargs)
        result = self._compute(func, name, own_args, own_kwargs, found)
        return args[0] if func._schema.is_mutable and args and result is own_args[0] else result

    # -- which tensors -------------------------------------------------------------------------------------------------

    def _part_of(self, tensor: torch.Tensor) -> Part | None:
        """A tensor as a part; None for one that does not belong to the model."""
        if isinstance(tensor, Part):
            return tensor
        home = self._homes.get(id(tensor))
        if home is not None:
            return Part(home.local, home.local, home.box, home.stream, home)
        if isinstance(tensor, DTensor):
            raise Refused("compute", "there is a DTensor that is no parameter or buffer of the model", tensor)
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta or not tensor.numel():
            return None
        home = self._storages.get(_storage(tensor)) if tensor.layout == torch.strided else None
        if home is None:
            return None
        if isinstance(home.tensor, DTensor):
            raise Refused("compute", f"there is a local part of {home.name!r}, taken out of its DTensor", tensor)
        if _geometry(tensor) != _geometry(home.local):  # what `parameter.data` gives is the same
            raise Refused("compute", f"there is a view of {home.name!r} that was taken before", tensor)
        return Part(tensor, tensor, home.box, home.stream, home)

    # -- random numbers ------------------------------------------------------------------------------------------------

    def _random(self, func: Any, name: str, args: Any, own_args: Any, kwargs: dict[str, Any]) -> Any:
        given = _by_name(func, own_args, kwargs)
        target = given.get("self")
        if given.get("generator") is not None:
            if isinstance(target, Part):
                raise Refused(name, "it draws from a generator, which knows no parts", target)
            return func(*args, **kwargs)  # its own numbers, the same on every rank
        options = {key: kwargs[key] for key in ("dtype", "device") if kwargs.get(key) is not None}
        if name in ("rand_like", "randn_like") and isinstance(target, Part):
            like = self._like(torch.ops.aten.empty_like.default, (target,), options)
            return self._fill(like, "uniform_" if name == "rand_like" else "normal_", {})
        if name in ("rand", "randn", "rand_like", "randn_like"):
            made = torch.empty(target.shape if isinstance(target, torch.Tensor) else given["size"], **options)
            return self._fill(made, "uniform_" if name.startswith("rand_") or name == "rand" else "normal_", {})
        if name == "randint":
            made = torch.empty(given["size"], **{"dtype": torch.int64, **options})
            return self._fill(made, "random_", {"from": given.get("low"), "to": given["high"]})
        if name == "randperm":
            words = self._loose.next().words(np.arange(given["n"], dtype=np.uint64))[0]
            return torch.from_numpy(np.argsort(words, kind="stable")).to(**options)
        if not func._schema.is_mutable or not isinstance(target, torch.Tensor):
            raise Refused(name, "no numbers by counter are defined for it", target)
        self._fill(target, name, given)
        return args[0]

    def _fill(self, target: torch.Tensor, name: str, given: Mapping[str, Any]) -> torch.Tensor:
        """Draw a tensor anew: a part, or one that every rank has whole."""
        if not isinstance(target, Part):
            if not target.is_meta:
                write(target, Box.whole(target.shape), maker(name, given, self._loose.next(), target.dtype))
            return target
        home, local, box = target.home, target.local, target.box
        if home is not None and home.locked:
            return target
        make = maker(name, given, target.stream.next(), target.dtype)
        if home is not None:
            home.mark(box)
        if local is None or not box.held:
            return target
        if home is not None and target.is_all:
            home.pending = lambda: write(local, box, make)
        else:
            write(local, box, make)
        return target

    # -- everything else -----------------------------------------------------------------------------------------------

    def _compute(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], found: list[Part]) -> Any:
        first = found[0]
        if name in VIEWS and args[0] is first:
            return VIEWS[name](first, *args[1:], **kwargs)
        if name in _LIKE or (name in _NEW and tuple(args[1]) == first.box.shape):
            return self._like(func, args, kwargs)
        if name in _NEW and not args[1]:
            return func(torch.empty(0, dtype=first.dtype, device=first.device), *args[1:], **kwargs)
        if name in ("any", "all") and len(args) == 1 and first.dtype == torch.bool and first.home is None:
            # For loops that draw until all are accepted: what other ranks still draw does not change this rank's.
            return torch.tensor(name == "all") if first.local is None else func(first.local)
        given = _by_name(func, args, kwargs)
        outputs = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        writes = [given[key] for key in outputs if isinstance(given.get(key), Part)]
        if any(part.home is not None and part.home.locked for part in writes):
            return writes[0]
        if name == "eye" and writes:
            result = _eye(first)
        elif is_elementwise(func):
            result = compute(func, args, kwargs, found)
        else:
            result = self._on_wholes(func, name, args, kwargs, found)
            result = writes[0] if writes else result
        for part in writes:
            if part.home is not None and (name in _SETTING or not is_elementwise(func)):
                part.home.mark(part.box)
        return result

    def _on_wholes(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], found: list[Part]) -> Any:
        split = next((part for part in found if part.box.is_split), None)
        if split is not None:
            raise Refused(name, "it needs elements that other ranks hold", split)
        if func.is_view:
            return view_of_whole(func, args, kwargs, found[0])
        if torch.Tag.inplace_view in func.tags:
            if found[0].home is not None:
                raise Refused(name, "it changes the shape of a parameter", found[0])
            return turn_whole(func, args, kwargs, found[0])
        return func(*locals_of(args), **locals_of(kwargs))

    def _like(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Part:
        """A temporary tensor of a part's shape, of which each rank holds the same elements."""
        part: Part = args[0]
        local = torch.empty(0, dtype=part.dtype, device=part.device) if part.local is None else part.local
        rest = (local.shape, *args[2:]) if func.overloadpacket.__name__ in _NEW else args[1:]
        made = func(local, *rest, **kwargs)
        return Part(None if part.local is None else made, made, part.box.as_own(), part.stream.child())

    def _error(self, refused: Refused) -> ValueError:
        name, why, tensor = refused.args
        function = _function_of_torch()
        name = name if function in (None, name) else f"{function} ({name})"
        home = getattr(tensor, "home", None)
        what = "a temporary tensor" if home is None else f"{home.name!r}"
        if isinstance(tensor, torch.Tensor):
            what += f" of shape {tuple(tensor.shape)}"
        if isinstance(tensor, Part) and tensor.box.is_split:
            what += f", of which this rank holds {tensor.box.size}"
        asked, blame = f"cannot fill {self._where} shard by shard", f"{name}: {why}"
        hint = (
            "normal_, uniform_ or trunc_normal_ instead, with init_fn=...; or a replicated parameter, split afterwards"
        )
        return ValueError(explain(asked, blame, f"seen: {what}", hint))


def _function_of_torch() -> str | None:
    """The function of `torch.nn.init` that has been called, if any."""
    found: str | None = None
    frame: Any = sys._getframe()
    while frame is not None:
        found = frame.f_code.co_name if frame.f_globals.get("__name__") == nn.init.__name__ else found
        frame = frame.f_back
    return found


def _eye(part: Part) -> Part:
    if part.local is not None:
        rows, columns = (torch.arange(at, at + n) for at, n in zip(part.box.start, part.box.size, strict=True))
        part.local.copy_(rows[:, None] == columns)
    return part


def _by_name(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, with their defaults."""
    arguments = func._schema.arguments
    result = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    result.update(zip((argument.name for argument in arguments), args, strict=False))
    return {**result, **kwargs}


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
