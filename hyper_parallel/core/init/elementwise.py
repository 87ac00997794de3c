"""Element-wise operations on parts: each rank computes its elements, and gets what it would get of the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from hyper_parallel.core.init.draws import BLOCK
from hyper_parallel.core.init.parts import Box, Part, Refused

__all__ = ["compute", "is_elementwise", "locals_of"]

# fmt: off
# Results that IEEE 754 fixes, so it does not matter how many elements are computed together. Others are computed in
# blocks of one length: vector loops compute the last elements in another way than the rest.
_EXACT = frozenset({
    "fill_", "zero_", "copy_", "clone", "_to_copy", "neg", "neg_", "abs", "abs_", "sign", "mul", "mul_", "div", "div_",
    "clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "maximum", "minimum", "lt", "le", "gt",
    "ge", "eq", "ne", "where", "masked_fill", "masked_fill_", "sqrt", "sqrt_", "bitwise_or", "bitwise_and",
    "bitwise_xor", "bitwise_not", "logical_or", "logical_and", "logical_not", "logical_xor", "isnan", "isinf", "round",
    "round_", "floor", "floor_", "ceil", "ceil_", "trunc", "trunc_",
})
# fmt: on
_EXACT_UNLESS_SCALED = frozenset({"add", "add_", "sub", "sub_"})  # alpha * b may be fused with the addition
_UNTAGGED = frozenset({"fill_", "zero_", "copy_", "_to_copy", "masked_fill", "masked_fill_"})


def is_elementwise(func: Any) -> bool:
    """Return whether an operation of torch computes each element from those at the same place."""
    return torch.Tag.pointwise in func.tags or func.overloadpacket.__name__ in _UNTAGGED


def locals_of(values: Any) -> Any:
    """Return arguments with what this rank holds in place of parts."""
    return tree_map(lambda value: value.local if isinstance(value, Part) else value, values)


def compute(func: Any, args: Sequence[Any], kwargs: dict[str, Any], found: Sequence[Part]) -> Any:
    """Carry out an element-wise operation.

    Args:
        func: the operation.
        args: its arguments, with parts for some tensors.
        kwargs: the same.
        found: the parts among them, at least one.

    Returns:
        A part; for an operation in place, its first argument.

    Raises:
        Refused: tensors that are split in different ways.
    """
    name, in_place = func.overloadpacket.__name__, func._schema.is_mutable
    if "out" in kwargs:
        raise Refused(name, "it writes to out=", found[0])
    if in_place and not isinstance(args[0], Part):
        if any(part.box.is_split for part in found):
            raise Refused(name, "a tensor that every rank has whole would be computed from parts", found[0])
        return func(*locals_of(args), **locals_of(kwargs))
    on_meta = {**kwargs, "device": "meta"} if kwargs.get("device") is not None else kwargs
    whole = func(*_metas(args), **_metas(on_meta))
    if not isinstance(whole, torch.Tensor):
        raise Refused(name, "it has more than one result", found[0])
    box = args[0].box if in_place else _box_of_result(name, tuple(whole.shape), found)
    own_args, own_kwargs = tree_map(lambda value: _aligned(name, value, box, found[0].device), (list(args), kwargs))
    if not box.held or any(part.local is None for part in found):
        device = kwargs.get("device") or found[0].device
        like = torch.empty(0, dtype=whole.dtype, device=device)
        return args[0] if in_place else Part(None, like, box, found[0].stream.child())
    if name in _EXACT or (name in _EXACT_UNLESS_SCALED and kwargs.get("alpha", 1) == 1):
        result = func(*own_args, **own_kwargs)
    else:
        result = _in_blocks(func, own_args, own_kwargs, box.size, whole.dtype)
    return args[0] if in_place else Part(result, result, box, found[0].stream.child())


def _metas(values: Any) -> Any:
    """Arguments with the sizes of the whole tensors and without their memory."""

    def meta(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or (not value.ndim and not isinstance(value, Part)):
            return value  # a tensor without dims counts as a number when dtypes are found
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    return tree_map(meta, values)


def _box_of_result(name: str, shape: tuple[int, ...], found: Sequence[Part]) -> Box:
    """The part of a result that this rank computes: that of an operand of its shape, a split one if there is one."""
    fits = [part for part in found if part.box.shape == shape]
    split = [part for part in found if part.box.is_split]
    if not fits and split:
        raise Refused(name, "its result is larger than each of the tensors", split[0])
    chosen = next((part for part in fits if part.box.is_split), fits[0] if fits else None)
    return Box.whole(shape) if chosen is None else chosen.box.as_own()


def _aligned(name: str, value: Any, box: Box, device: torch.device) -> Any:
    """What this rank needs of an operand, for the part of the result that it computes."""
    if not isinstance(value, torch.Tensor):
        return value
    local = value.local if isinstance(value, Part) else value
    own = value.box if isinstance(value, Part) else Box.whole(value.shape)
    if own.missing not in ((), box.missing):
        raise Refused(name, "only some ranks hold one of its tensors", value)
    ahead = len(box.shape) - len(own.shape)
    for dim, size in enumerate(own.shape):
        cut, at = own.cuts[dim], dim + ahead
        if cut is not None and cut != box.cuts[at]:
            raise Refused(name, "its tensors are split in different ways", value)
        if cut is not None and (own.start[dim], own.size[dim]) != (box.start[at], box.size[at]):
            raise Refused(name, "its tensors are split over different ranks", value)
        if cut is None and size != 1 and box.cuts[at] is not None and local is not None:
            local = local.narrow(dim, box.start[at], box.size[at])
    # Modules make plain tensors on the CPU, wherever their parameters are.
    return local.to(device) if local is not None and own.shape and name != "copy_" else local


class _Operand:
    """Where a tensor stood among the arguments."""

    def __init__(self, tensor: torch.Tensor, size: Sequence[int]) -> None:
        self.flat = tensor.expand(*size).reshape(-1)

    def block(self, first: int, last: int) -> torch.Tensor:
        padded = torch.ones(BLOCK, dtype=self.flat.dtype, device=self.flat.device)
        padded[: last - first] = self.flat[first:last]
        return padded


def _in_blocks(func: Any, args: Any, kwargs: Any, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Compute with as many elements at a time whatever the size of the part."""
    if not size:
        return func(*args, **kwargs)

    def operand(value: Any) -> Any:
        return _Operand(value, size) if isinstance(value, torch.Tensor) and value.ndim else value

    operands = tree_map(operand, (args, kwargs))
    count, results = math.prod(size), []
    for first in range(0, max(count, 1), BLOCK):  # once for no elements, for the device
        last = min(first + BLOCK, count)

        def block(value: Any, first: int = first, last: int = last) -> Any:
            return value.block(first, last) if isinstance(value, _Operand) else value

        block_args, block_kwargs = tree_map(block, operands)
        results.append(func(*block_args, **block_kwargs)[: last - first])
    result = torch.cat(results).view(*size)
    return args[0].copy_(result) if func._schema.is_mutable else result
