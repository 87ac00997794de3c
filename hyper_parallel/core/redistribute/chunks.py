"""Redistribution in chunks, so that communication overlaps with computation.

A sharded module all-gathers its argument, computes row by row, and reduce-scatters its result. Cut along the rows, the
same bytes are communicated during the matrix products, not before and after them (Wang et al. 2023, "Overlap
communication with dependent computation via decomposition in large deep learning models", ASPLOS):

    forward    start all gathers -> [wait for gather i, compute i, start reduction i] for each i -> wait for reductions
    backward   the same for gradients, from the last chunk to the first

Each transfer has one autograd operation at its start and one at its end. They are linked by a placeholder of the right
shape without memory, so that no code can read data before it arrives.

    x -> _Cut -> _Landed -> function -> _Sent -> _Joined -> result
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyper_parallel.core.common.torch_compat import calls_compiled, runs_eagerly
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.ownership import count_parts
from hyper_parallel.core.redistribute.execute import Working, drive, start
from hyper_parallel.core.redistribute.plan import plan_here


@dataclass(frozen=True)
class Chunks:
    """The cut, and the layouts before, within and after the computation, all on one mesh.

    Attributes:
        count: chunks, at most. Fewer if a rank's rows do not divide evenly; 1 if ranks have different numbers of rows.
        dim: dim over which the argument is gathered and the result is scattered; never the last dim.
        split: layout of the argument and of the result, split over `dim`.
        gathered: layout of the argument inside the function.
        gathered_grad: layout of the gradient of the gathered argument.
        pending: layout of the function's return value.
        along: the dim to cut along, up to `dim`; None: the first that divides evenly.
    """

    count: int
    dim: int
    split: Layout
    gathered: Layout
    gathered_grad: Layout
    pending: Layout
    along: int | None = None

    def fitting(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the dim to cut an argument of these sizes along, and the number of chunks.

        Dims before `dim` are tried first, e.g. the batch dim. Cut there, a chunk is contiguous in memory, and a gather
        over `dim` has fewer rows to reorder.
        """
        splits = self.split.splits(len(shape))
        for dim in range(self.dim + 1) if self.along is None else (self.along,):
            own, rest = divmod(shape[dim], count_parts(self.split.mesh_shape, splits[dim]))
            for count in () if rest else range(min(self.count, own), 1, -1):
                if own % count == 0:
                    return dim, count
        return self.dim, 1


@calls_compiled
def in_chunks(function: Callable[[Tensor], Tensor], x: Tensor, shape: Sequence[int], chunks: Chunks) -> Tensor:
    """Apply a function to this rank's shard, with its communication cut into chunks; e.g. for sequence parallelism.

    Both passes redistribute from `split` to `gathered` before the function, and from `pending` to `split` after it,
    each cut into chunks. There are no second derivatives.

    Args:
        function: the computation. A row of its result may depend on the same row of its argument only; with `along`,
            on the same position along that dim.
        x: this rank's shard.
        shape: the full argument's sizes.
        chunks: the cut, and all layouts.

    Returns:
        This rank's shard of the result, whose sizes are the argument's except for the last.
    """
    entry, exit_, count = _passages(shape, chunks)
    try:
        leaving = []
        for number, chunk in enumerate(_apply(_Cut, x, entry, count)):
            leaving.append(_apply(_Sent, function(_apply(_Landed, chunk, entry, number)), exit_, number))
        return cast(Tensor, _apply(_Joined, exit_, *leaving))
    finally:  # a checkpoint may stop recomputing early; pending transfers keep their memory until they land
        _settle(entry, exit_)


@runs_eagerly
def _passages(shape: Sequence[int], chunks: Chunks) -> tuple[_Passage, _Passage, int]:
    """Make the passages at entry and exit of a call, and return them with the number of chunks."""
    rows, (dim, count) = [*shape], chunks.fitting(shape)
    rows[dim] //= count
    entry = _Passage(dim, (chunks.split, chunks.gathered), (chunks.gathered_grad, chunks.split), rows)
    back = chunks.split, chunks.pending.reset_partial()
    return entry, _Passage(dim, (chunks.pending, chunks.split), back, rows), count


@runs_eagerly
def _apply(operation: type[torch.autograd.Function], *args: Any) -> Any:
    return operation.apply(*args)


@runs_eagerly
def _settle(*passages: _Passage) -> None:
    for passage in passages:
        passage.settle()


class _Travelling(NamedTuple):
    """A chunk in transit: its pending collective and the remaining steps, or the result if no bytes move."""

    working: Working
    first: dist.Work | None
    result: Tensor | None

    def land(self) -> Tensor:
        if self.first is None:
            return cast(Tensor, self.result)
        self.first.wait()
        return drive(self.working)


class _Passage:
    """The redistributions of one call's chunks at its entry or its exit, and of their gradients.

    Args:
        dim: the dim that is cut.
        way: layouts of a chunk before and after it moves.
        back: layouts of its gradient before and after it moves.
        shape: sizes of the full tensor that consists of one chunk of every rank.
    """

    def __init__(self, dim: int, way: tuple[Layout, Layout], back: tuple[Layout, Layout], shape: Sequence[int]) -> None:
        self.dim, self.ways, self.shape = dim, (way, back), torch.Size(shape)
        self._flights: dict[tuple[int, bool], _Travelling] = {}

    def start(self, number: int, part: Tensor, *, back: bool) -> Tensor:
        """Send a chunk, and return a placeholder for it until it arrives."""
        src, dst = self.ways[back]
        mesh = src.mesh
        assert mesh is not None, "the callers see to a mesh"
        working = start(plan_here(src, dst, self.shape, part.dtype, mesh), part, mesh)
        try:
            self._flights[number, back] = _Travelling(working, next(working), None)
        except StopIteration as end:  # this rank takes no part in the exchange
            self._flights[number, back] = _Travelling(working, None, end.value)
        _, arrives = self.ways[False]  # autograd asks for a gradient of the same shape
        return part.new_empty(()).expand(arrives.local_shape(self.shape))

    def land(self, number: int, *, back: bool) -> Tensor:
        """Wait for a chunk and return it."""
        return self._flights.pop((number, back)).land()

    def settle(self) -> None:
        """Wait for chunks that the forward pass has sent and never used."""
        for key in [key for key in self._flights if not key[1]]:
            self._flights.pop(key).land()


class _Cut(torch.autograd.Function):
    """Sends the chunks of an argument; its backward receives their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passage: _Passage, count: int) -> tuple[Tensor, ...]:
        ctx.passage, ctx.count = passage, count
        return tuple([passage.start(i, part, back=False) for i, part in enumerate(x.chunk(count, passage.dim))])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *places: Tensor) -> tuple[Tensor, None, None]:
        passage: _Passage = ctx.passage
        return _joined([passage.land(i, back=True) for i in range(ctx.count)], passage.dim), None, None


class _Landed(torch.autograd.Function):
    """Receives a chunk of an argument; its backward sends the gradient."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, passage: _Passage, number: int) -> Tensor:
        ctx.passage, ctx.number = passage, number
        return passage.land(number, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.passage.start(ctx.number, grad, back=True), None, None


class _Sent(torch.autograd.Function):
    """Sends a chunk of a result; its backward receives the gradient."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, passage: _Passage, number: int) -> Tensor:
        ctx.passage, ctx.number = passage, number
        passage.shape = torch.Size((*passage.shape[:-1], result.shape[-1]))  # the function may change the last size
        return passage.start(number, result, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, place: Tensor) -> tuple[Tensor, None, None]:
        return ctx.passage.land(ctx.number, back=True), None, None


class _Joined(torch.autograd.Function):
    """Receives the chunks of a result; its backward sends their gradients."""

    @staticmethod
    def forward(ctx: Any, passage: _Passage, *places: Tensor) -> Tensor:
        ctx.passage, ctx.count = passage, len(places)
        return _joined([passage.land(i, back=False) for i in range(len(places))], passage.dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        passage: _Passage = ctx.passage
        parts = grad.chunk(ctx.count, passage.dim)
        last_first = [passage.start(i, parts[i], back=True) for i in reversed(range(ctx.count))]
        return None, *reversed(last_first)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)  # cat would copy a single part
