"""Redistribution in chunks: while one chunk is computed on, others travel.

A module that is split over ranks gathers its argument and reduces its result, and between the two it computes row by
row. Cut along the rows, the same bytes travel beside the matrix products in place of before and after them (Wang et al.
2023, "Overlap communication with dependent computation via decomposition in large deep learning models", ASPLOS):

    forward    start all gathers -> [wait for gather i, compute i, start reduction i] for each i -> wait for reductions
    backward   the same of gradients, from the last chunk to the first

Autograd sees an operation at each end of a journey. Between the two stands a tensor of the right shape without memory,
so that nobody can read what has not arrived.

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
    """What is cut, and the layouts before, within and after the computation, all on one mesh.

    Attributes:
        count: chunks, at most: fewer where the rows of a rank cannot be cut evenly, one where ranks have uneven rows.
        dim: over which the argument is gathered and the result is scattered, and not the last one.
        split: of the argument and of the result, split over `dim`.
        gathered: of the argument as the function gets it.
        gathered_grad: of the gradient of that.
        pending: of what the function returns.
        along: the one dim to cut along, up to `dim`; None: whichever can be cut evenly.
    """

    count: int
    dim: int
    split: Layout
    gathered: Layout
    gathered_grad: Layout
    pending: Layout
    along: int | None = None

    def fitting(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the dim to cut an argument with these sizes along, and the number of chunks.

        A dim before `dim` comes first, as that of the sequences of a batch: cut along it, a chunk lies in one piece of
        memory, and a gather over `dim` has fewer rows to put in order.
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
    """Return this rank's shard of what a function makes of a tensor, both of them split over the rows.

    Communication: that of a redistribution from `split` to `gathered` before the function, and from `pending` to
    `split` after it, both ways, each cut into chunks. There are no second derivatives.

    Args:
        function: what is computed; a row of its result depends on the same row of its argument alone, or with `along`
            on the same place along that dim.
        x: this rank's shard.
        shape: the full argument's sizes.
        chunks: how both are cut.

    Returns:
        A shard of a tensor with the sizes of the argument, but for the last one.
    """
    entry, exit_, count = _passages(shape, chunks)
    try:
        leaving = []
        for number, chunk in enumerate(_apply(_Cut, x, entry, count)):
            leaving.append(_apply(_Sent, function(_apply(_Landed, chunk, entry, number)), exit_, number))
        return cast(Tensor, _apply(_Joined, exit_, *leaving))
    finally:  # a checkpoint may end the second computation early: what is under way keeps its memory until it is there
        _settle(entry, exit_)


@runs_eagerly
def _passages(shape: Sequence[int], chunks: Chunks) -> tuple[_Passage, _Passage, int]:
    """Return both ends of a call, and the number of chunks."""
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
    """A chunk that travels: the collective under way and what comes after it, or the result where nothing travels."""

    working: Working
    first: dist.Work | None
    result: Tensor | None

    def land(self) -> Tensor:
        if self.first is None:
            return cast(Tensor, self.result)
        self.first.wait()
        return drive(self.working)


class _Passage:
    """The redistributions of the chunks of one call at one end of it, and those of their gradients.

    Args:
        dim: that is cut.
        way: the layouts that chunks leave and arrive in.
        back: the layouts that their gradients leave and arrive in.
        shape: of the full tensor of which a chunk of each rank is a shard.
    """

    def __init__(self, dim: int, way: tuple[Layout, Layout], back: tuple[Layout, Layout], shape: Sequence[int]) -> None:
        self.dim, self.ways, self.shape = dim, (way, back), torch.Size(shape)
        self._flights: dict[tuple[int, bool], _Travelling] = {}

    def start(self, number: int, part: Tensor, *, back: bool) -> Tensor:
        """Send a chunk, and return what stands in its place until it has arrived."""
        src, dst = self.ways[back]
        mesh = src.mesh
        assert mesh is not None, "the callers see to a mesh"
        working = start(plan_here(src, dst, self.shape, part.dtype, mesh), part, mesh)
        try:
            self._flights[number, back] = _Travelling(working, next(working), None)
        except StopIteration as end:  # an exchange in which this rank has no part
            self._flights[number, back] = _Travelling(working, None, end.value)
        _, arrives = self.ways[False]  # autograd asks for a gradient of the same shape
        return part.new_empty(()).expand(arrives.local_shape(self.shape))

    def land(self, number: int, *, back: bool) -> Tensor:
        """Return a chunk once it has arrived."""
        return self._flights.pop((number, back)).land()

    def settle(self) -> None:
        """Wait for what nobody has asked for on its way there."""
        for key in [key for key in self._flights if not key[1]]:
            self._flights.pop(key).land()


class _Cut(torch.autograd.Function):
    """Where the chunks of an argument leave, and their gradients arrive."""

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
    """Where a chunk of an argument arrives, and its gradient leaves."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, passage: _Passage, number: int) -> Tensor:
        ctx.passage, ctx.number = passage, number
        return passage.land(number, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.passage.start(ctx.number, grad, back=True), None, None


class _Sent(torch.autograd.Function):
    """Where a chunk of a result leaves, and its gradient arrives."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, passage: _Passage, number: int) -> Tensor:
        ctx.passage, ctx.number = passage, number
        passage.shape = torch.Size((*passage.shape[:-1], result.shape[-1]))  # the width may be another
        return passage.start(number, result, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, place: Tensor) -> tuple[Tensor, None, None]:
        return ctx.passage.land(ctx.number, back=True), None, None


class _Joined(torch.autograd.Function):
    """Where the chunks of a result arrive, and their gradients leave."""

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
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)  # which copies one, too
