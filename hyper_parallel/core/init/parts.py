"""A rank's part of a tensor, which looks like the whole tensor while the model is being filled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hyper_parallel.core.common.errors import explain
from hyper_parallel.core.init.random import Stream, Words

__all__ = ["Box", "Cut", "Home", "Part", "Refused", "row_major"]


class Refused(Exception):
    """What cannot be done on parts: the operation, why, and the tensor that stands in the way.

    Args:
        name: of torch's operation.
        why: one clause.
        tensor: if one is to blame.
    """

    def __init__(self, name: str, why: str, tensor: Any = None) -> None:
        super().__init__(name, why, tensor)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor whose last dim is the fastest, in elements.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@dataclass(frozen=True)
class Cut:
    """What splits a dim over ranks, and which of its places a view shows.

    Args:
        axes: names and sizes of the axes, outer first.
        size: of the dim of the parameter.
        first: the place there that comes first in the view.
        step: from one to the next.
    """

    axes: tuple[tuple[str, int], ...]
    size: int
    first: int = 0
    step: int = 1

    def slice(self, first: int, step: int) -> Cut:
        """Return the cut of a slice of the view."""
        return replace(self, first=self.first + first * self.step, step=self.step * step)


@dataclass(frozen=True)
class Box:
    """Which elements of a tensor a rank holds, and where the tensor lies in the one that it is a view of.

    Args:
        shape: the whole tensor's sizes, in elements.
        start: per dim, the first element that this rank holds.
        size: per dim, how many it holds.
        offset: row-major index of the tensor's first element in the tensor that it is a view of.
        strides: per dim, the step between neighbours there.
        cuts: per dim, what splits it over ranks, None for nothing; equal only where all ranks hold equal parts.
        missing: places along split dims, for a view that only the ranks hold that have these places.
        held: whether this rank is one that holds it.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    cuts: tuple[Cut | None, ...]
    missing: tuple[Cut, ...] = ()
    held: bool = True

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a tensor that each rank holds whole."""
        sizes = tuple(shape)
        return cls(sizes, (0,) * len(sizes), sizes, 0, row_major(sizes), (None,) * len(sizes))

    @property
    def is_split(self) -> bool:
        """Whether some rank holds less than the whole: the same answer on all ranks."""
        return bool(self.missing) or any(cut is not None for cut in self.cuts)

    def as_own(self) -> Box:
        """Return the box of a new tensor of this shape, of which each rank holds the same elements."""
        return replace(self, offset=0, strides=row_major(self.shape))

    def index(self, first: int, last: int) -> Words:
        """Return the row-major index, in the tensor that this is a view of, of elements first to last of the part."""
        flat = np.arange(first, last, dtype=np.int64)
        result = np.full(last - first, self.offset, dtype=np.int64)
        for dim in range(len(self.shape) - 1, 0, -1):
            flat, place = np.divmod(flat, max(self.size[dim], 1))
            result += (place + self.start[dim]) * self.strides[dim]
        if self.shape:
            result += (flat + self.start[0]) * self.strides[0]
        return result.astype(np.uint64)

    def select(self, dim: int, index: int) -> Box:
        """Return the box of `x.select(dim, index)`."""
        rest = [other for other in range(len(self.shape)) if other != dim]
        box = replace(self.permute(rest), offset=self.offset + index * self.strides[dim])
        cut = self.cuts[dim]
        if cut is None:
            return box
        inside = self.start[dim] <= index < self.start[dim] + self.size[dim]
        return replace(box, missing=(*self.missing, cut.slice(index, 1)), held=self.held and inside)

    def slice(self, dim: int, first: int, last: int, step: int) -> Box:
        """Return the box of `x[first:last:step]` along dim, for 0 <= first <= last <= size and step >= 1."""
        count = -(-(last - first) // step)
        begin, end = self.start[dim], self.start[dim] + self.size[dim]
        low = min(max(0, -(-(begin - first) // step)), count)
        high = min(max(low, -(-(end - first) // step)), count)
        old = self.cuts[dim]
        cut = None if old is None else old.slice(first, step)
        changed = {"shape": count, "start": low, "size": high - low, "strides": self.strides[dim] * step, "cuts": cut}
        values: dict[str, Any] = {name: _with(getattr(self, name), dim, value) for name, value in changed.items()}
        return replace(self, **values, offset=self.offset + first * self.strides[dim])

    def permute(self, dims: Sequence[int]) -> Box:
        """Return the box of `x.permute(dims)`; dims that are left out are dropped."""
        names = ("shape", "start", "size", "strides", "cuts")
        values: dict[str, Any] = {name: tuple(getattr(self, name)[dim] for dim in dims) for name in names}
        return replace(self, **values)

    def unsqueeze(self, dim: int) -> Box:
        """Return the box of `x.unsqueeze(dim)`."""
        new = {"shape": 1, "start": 0, "size": 1, "strides": 0, "cuts": None}
        values: dict[str, Any] = {
            name: (*getattr(self, name)[:dim], new[name], *getattr(self, name)[dim:]) for name in new
        }
        return replace(self, **values)


def _with(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


@dataclass(eq=False)
class Home:
    """A parameter or buffer of the model: what has been written to it so far.

    Args:
        name: its first name in the model.
        tensor: itself.
        box: the part of it that this rank holds.
        stream: its draws.
        fresh: whether it was on meta, so that what nobody writes is no value.
        locked: whether writing is left to another module, the one under whose name it comes first.
        pending: the last write, if it covers all and nobody has asked for the values since.
    """

    name: str
    tensor: torch.Tensor
    box: Box
    stream: Stream
    fresh: bool = False
    locked: bool = False
    pending: Any = None
    _regions: dict[tuple[Any, ...], int] = field(default_factory=dict)

    @property
    def local(self) -> torch.Tensor:
        """What this rank holds of it, without autograd."""
        return self.tensor._local_tensor if isinstance(self.tensor, DTensor) else self.tensor.detach()

    def mark(self, box: Box) -> None:
        """Note that some elements got a value."""
        self._regions[box.offset, box.shape, box.strides] = math.prod(box.shape)

    @property
    def is_filled(self) -> bool:
        """Whether the places written to are as many as it has elements: the same answer on all ranks."""
        return sum(self._regions.values()) >= math.prod(self.box.shape)

    def flush(self) -> None:
        """Carry out the last write."""
        write, self.pending = self.pending, None
        if write is not None:
            write()


class Part(torch.Tensor):
    """A tensor of the whole shape over the part of it that this rank holds; only the filling mode computes with it.

    Args:
        local: what this rank holds of it; None where it holds nothing of a single element.
        like: dtype and device for that case.
        box: which part that is.
        stream: the draws of this tensor or of the one that it is a view of.
        home: the parameter or buffer that it is a view of; None for a temporary tensor.
    """

    local: torch.Tensor | None
    box: Box
    stream: Stream
    home: Home | None

    @staticmethod
    def __new__(
        cls, local: torch.Tensor | None, like: torch.Tensor, box: Box, stream: Stream, home: Home | None = None
    ) -> Part:
        """Make the part, without memory of its own."""
        part: Part = torch.Tensor._make_wrapper_subclass(cls, box.shape, dtype=like.dtype, device=like.device)
        part.local, part.box, part.stream, part.home = local, box, stream, home
        return part

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse: a part means something only while the model is being filled."""
        asked, blame = (
            f"cannot compute {func}",
            "a tensor that was made while init_parameters filled a model is used after",
        )
        raise RuntimeError(explain(asked, blame, "seen: a Part", "keep values, not temporary tensors, in a module"))

    @property
    def is_all(self) -> bool:
        """Whether this shows all of a parameter, and not a view of it."""
        return self.home is not None and self.box == self.home.box

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"Part(shape={self.box.shape}, start={self.box.start}, size={self.box.size}, stream={self.stream.name!r})"
        )
