"""Views of a rank's part, as torch takes them of the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from hyper_parallel.core.init.parts import Box, Part

__all__ = ["VIEWS", "turn_whole", "view_of_whole"]


def _view(part: Part, box: Box, local: torch.Tensor | None) -> Part:
    return Part(local, part, box, part.stream, part.home)


def _same(part: Part) -> Part:
    return _view(part, part.box, part.local)


def _dim(part: Part, dim: int, extra: int = 0) -> int:
    count = part.ndim + extra
    if not -max(count, 1) <= dim < max(count, 1):
        raise IndexError(f"Dimension out of range (expected to be in range of [{-count}, {count - 1}], but got {dim})")
    return dim % max(count, 1)


def _select(part: Part, dim: int, index: int) -> Part:
    dim = _dim(part, dim)
    size = part.box.shape[dim]
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of bounds for dimension {dim} with size {size}")
    box = part.box.select(dim, index % size)
    if part.local is None or not box.held:
        return _view(part, box, None)
    return _view(part, box, part.local.select(dim, index % size - part.box.start[dim]))


def _slice(part: Part, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Part:
    dim = _dim(part, dim)
    first, last, _ = slice(start, end).indices(part.box.shape[dim])
    box = part.box.slice(dim, first, max(first, last), step)
    if part.local is None:
        return _view(part, box, None)
    low = first + box.start[dim] * step - part.box.start[dim]
    rows = slice(low, low + (box.size[dim] - 1) * step + 1, step) if box.size[dim] else slice(0, 0)
    return _view(part, box, part.local[(slice(None),) * dim + (rows,)])


def _split(part: Part, sizes: int | Sequence[int], dim: int = 0) -> list[Part]:
    dim = _dim(part, dim)
    whole = part.box.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, whole - at) for at in range(0, whole, sizes)] or [0]
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [_slice(part, dim, end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _unbind(part: Part, dim: int = 0) -> list[Part]:
    return [_select(part, dim, index) for index in range(part.box.shape[_dim(part, dim)])]


def _permute(part: Part, dims: Sequence[int]) -> Part:
    order = [_dim(part, dim) for dim in dims]
    return _view(part, part.box.permute(order), None if part.local is None else part.local.permute(order))


def _transpose(part: Part, dim0: int, dim1: int) -> Part:
    order = list(range(part.ndim))
    a, b = _dim(part, dim0), _dim(part, dim1)
    order[a], order[b] = order[b], order[a]
    return _permute(part, order)


def _t(part: Part) -> Part:
    return _permute(part, range(part.ndim - 1, -1, -1))


def _unsqueeze(part: Part, dim: int) -> Part:
    dim = _dim(part, dim, 1)
    return _view(part, part.box.unsqueeze(dim), None if part.local is None else part.local.unsqueeze(dim))


VIEWS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "alias": _same,
        "detach": _same,
        "lift_fresh": _same,
        "select": _select,
        "slice": _slice,
        "split": _split,
        "split_with_sizes": _split,
        "unbind": _unbind,
        "permute": _permute,
        "transpose": _transpose,
        "t": _t,
        "unsqueeze": _unsqueeze,
    }
)


def view_of_whole(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], part: Part) -> Any:
    """Return any view of a part that is the whole tensor; its places are read off a twin without memory."""
    found, places = func(part.local, *args[1:], **kwargs), func(_twin(part), *args[1:], **kwargs)
    if isinstance(found, torch.Tensor):
        return _placed(part, found, places)
    return [_placed(part, one, place) for one, place in zip(found, places, strict=True)]


def turn_whole(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], part: Part) -> Part:
    """Make a part that is the whole tensor a view of itself, in place."""
    part.box = _placed(part, func(part.local, *args[1:], **kwargs), func(_twin(part), *args[1:], **kwargs)).box
    with no_dispatch():
        func(part, *args[1:], **kwargs)
    return part


def _twin(part: Part) -> torch.Tensor:
    """A tensor without memory whose offset and strides are the places of a part's elements."""
    box = part.box
    reach = box.offset + sum((size - 1) * step for size, step in zip(box.shape, box.strides, strict=True)) + 1
    twin = torch.empty(max(reach, 0) if math.prod(box.shape) else 0, device="meta")
    return twin.as_strided(box.shape, box.strides, box.offset if math.prod(box.shape) else 0)


def _placed(part: Part, local: torch.Tensor, place: torch.Tensor) -> Part:
    box = replace(Box.whole(place.shape), offset=int(place.storage_offset()), strides=tuple(place.stride()))
    return _view(part, box, local)
