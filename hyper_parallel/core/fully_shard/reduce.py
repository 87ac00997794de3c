"""From the gradients of whole parameters to those of parts: pack, reduce_scatter, all_reduce, apply."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.core.fully_shard.bucket import Bucket
from hyper_parallel.core.fully_shard.comm import Pending, reduce_scatter, reduce_scatter_each
from hyper_parallel.core.fully_shard.param import ManagedParam
from hyper_parallel.core.fully_shard.reduction import Finish, ReduceOptions, Reduction
from hyper_parallel.core.fully_shard.shares import ALIGNMENT, Shares

__all__ = ["GradientReducer"]


class GradientReducer:
    """Collects the gradients of some parameters of a bucket and reduces them together.

    The buffer that is sent has one row per receiving rank: its part of each parameter's gradient, then one flag
    per parameter that says whether this rank has used it. A parameter that some ranks have used gets the sum
    over those; one that no rank has used keeps no gradient, as on a single device.

    Args:
        bucket: Whose parameters.
        params: Which of them.
        scatter: The ranks among which the sum is split; None: every rank gets all of it.
        replicas: Groups to reduce over after that, one after the other.
        ranks: Over how many ranks gradients are added up in all.
        scatters_by_exchange: How a reduce_scatter is done: see :func:`comm.reduce_scatter`.
        sends_each: Whether one operation may take gradients from where they are, instead of a packed buffer.
    """

    def __init__(
        self,
        bucket: Bucket,
        params: list[ManagedParam],
        *,
        scatter: dist.ProcessGroup | None,
        replicas: tuple[dist.ProcessGroup, ...],
        ranks: int,
        scatters_by_exchange: bool,
        sends_each: bool,
    ) -> None:
        self.bucket = bucket
        self.params = params
        self.scatter = scatter
        self.rows = 1 if scatter is None else scatter.size()
        self.replicas = tuple(group for group in replicas if group.size() > 1)
        self.ranks = ranks
        self.scatters_by_exchange = scatters_by_exchange
        self.sends_each = sends_each and scatter is not None and self.rows > 1
        self.held: list[torch.Tensor | None] | None = None  # gradients that wait for a reduction, flat and whole
        self._given: set[int] = set()  # which of these autograd adds to just now
        self.partial: torch.Tensor | None = None  # reduced over the shard axis, not yet over the replicate axis
        self._plan_for: list[ManagedParam] = []
        self._starts: list[int] = [0]
        self._sizes: list[int] = []
        self._ones: torch.Tensor | None = None

    def _plan(self) -> list[ManagedParam]:
        """The parameters that take part, and where; frozen ones do not."""
        trainable = [param for param in self.params if param.unsharded.requires_grad]
        if trainable != self._plan_for:
            if self.held is not None or self.partial is not None:
                raise RuntimeError(
                    "requires_grad of a parameter changed while gradients wait to be reduced\n"
                    f"  unit of: {self.bucket.params[0].name}\n"
                    "  try: change it after a backward with gradient sync, or call zero_grad() first"
                )
            self._plan_for = trainable
            self._starts = [0, *accumulate(self._width(param) for param in trainable)]
            self._sizes = [*(self._width(param) for param in trainable), len(trainable)]
        return trainable

    def _width(self, param: ManagedParam) -> int:
        """Elements of a parameter in one row."""
        return param.numel if self.scatter is None else param.chunk

    def bytes_left(self, reduce_dtype: torch.dtype | None) -> int:
        """Bytes that a reduce_scatter leaves to be reduced over replicas, at most."""
        elements = sum(map(self._width, self.params)) + len(self.params)
        return elements * self._dtype(reduce_dtype).itemsize + ALIGNMENT

    def has_gradients(self) -> bool:
        """Whether a whole parameter holds a gradient."""
        return any(param.unsharded.grad is not None for param in self.params)

    def collect(self, dtype: torch.dtype | None, *, keep: bool, mean: bool) -> None:
        """Take the gradients of the whole parameters over; adds to what is held already.

        A rank that has no gradient at all takes part in the reduction with zeros: others may have one.

        Args:
            dtype: Of the communication; None: that of the computation.
            keep: They have to wait for further backwards: in ``dtype``, or at least fp32.
            mean: They are averaged over the ranks, not added up.
        """
        params = self._plan()
        if not params:
            return
        if self.held is None:
            self.held = [None] * len(params)
        self._given = set()
        for index, param in enumerate(params):
            gradient = param.take_gradient(self._dtype(dtype), mean=mean)
            if gradient is None:
                continue
            held = self.held[index]
            if held is not None:
                held.add_(gradient)
            else:
                self.held[index] = gradient.to(self._keeping_dtype(dtype)) if keep else gradient

    def _dtype(self, reduce_dtype: torch.dtype | None) -> torch.dtype:
        """Dtype of the communication; the policy speaks of real floating-point gradients only."""
        own = self.bucket.compute_dtype
        return reduce_dtype if reduce_dtype is not None and own.is_floating_point else own

    def is_due(self, all_reduce: bool) -> bool:
        """Whether something waits that a synchronised backward must take along, even if it finds nothing new."""
        return self.held is not None or (all_reduce and self.partial is not None)

    def reduce(self, options: ReduceOptions, shares: Shares) -> Reduction | None:
        """Start to reduce what was collected; None when there is nothing."""
        if self.held is None:
            return None
        held, self.held = self.held, None
        params, width = self._plan_for, self._starts[-1] + len(self._plan_for)
        used = [options.zeros or gradient is not None for gradient in held]
        dtype = self._dtype(options.dtype)
        scale = options.factor / (options.divide_by or (self.ranks if options.average else 1))
        # fp16 could overflow in the sum, so it is scaled before; everything else after, on the smaller tensor.
        early = dtype == torch.float16
        if early:
            for gradient in held:
                if gradient is not None:
                    gradient.mul_(scale)
        like = torch.empty(0, dtype=dtype, device=self.bucket.compute_device)
        shared = place = None
        if options.share and options.all_reduce and len(self.replicas) == 1:
            shared, place = shares.place(self.replicas[0], width, like)
        if self.scatter is None:
            work = Pending(None, self._packed(held, used, like if place is None else place))
        elif options.reduce_scatter_with is not None and self.rows > 1:
            work = self._reduce_scatter_with(options.reduce_scatter_with, held, used, like, place)
        elif self.sends_each and all(param.straight for param in params):
            sources = [*self._padded(held, dtype), self._flags(used, like)]
            place = like.new_empty(width) if place is None else place
            work = reduce_scatter_each(place.split(self._sizes), sources, self.scatter, place)
            del sources
        else:
            buffer = self._packed(held, used, like)
            work = reduce_scatter(buffer, self.scatter, by_all_to_all=self.scatters_by_exchange, out=place)
        finish = Finish(options, 1.0 if early else scale, self._take_partial(options))
        return Reduction(self, params, self._starts, used, work, finish, shared)

    def _reduce_scatter_with(
        self, comm: Any, held: list[torch.Tensor | None], used: list[bool], like: torch.Tensor, place: Any
    ) -> Pending:
        """The same by a ``ReduceScatter`` of torch."""
        width = self._starts[-1] + len(held)
        kind = {"dtype": like.dtype, "device": like.device}
        sent = self._packed(held, used, comm.allocate((self.rows * width,), **kind))
        own = comm.allocate((width,), **kind) if place is None else place
        work = comm(output_tensor=own, input_tensor=sent, group=self.scatter, op=dist.ReduceOp.SUM, async_op=True)
        return Pending(work, own, keep=(sent,))

    def _padded(self, held: list[torch.Tensor | None], dtype: torch.dtype) -> list[torch.Tensor]:
        """What is sent of each parameter: its gradient where it is, padded if it has to be, or zeros."""
        sources: list[torch.Tensor] = []
        for index, param in enumerate(self._plan_for):
            gradient, numel = held[index], self.rows * param.chunk
            held[index] = None
            if gradient is None or gradient.numel() != numel or gradient.dtype != dtype:
                padded = torch.empty(numel, dtype=dtype, device=self.bucket.compute_device)
                filled = 0
                if gradient is not None:
                    filled = gradient.numel()
                    padded[:filled].copy_(gradient)
                padded[filled:].zero_()
                gradient = padded
            sources.append(gradient)
        return sources

    def _packed(self, held: list[torch.Tensor | None], used: list[bool], place: torch.Tensor) -> torch.Tensor:
        """All gradients in one buffer, row by row, and behind them the flags; made unless ``place`` is one."""
        width = self._starts[-1] + len(held)
        buffer = place if place.numel() else place.new_empty(self.rows * width)
        rows = buffer.view(self.rows, width)
        for index, (param, start) in enumerate(zip(self._plan_for, self._starts, strict=False)):
            gradient, held[index] = held[index], None  # its memory goes as soon as it is packed
            columns = rows[:, start : start + self._width(param)]
            if gradient is None:
                columns.zero_()
            elif self.scatter is None:
                columns[0].copy_(gradient)
            else:
                if columns.numel() > gradient.numel():
                    _zero_padding(param, columns)
                for part, where in param.rows_of(gradient, columns):
                    where.copy_(part)
        flags = rows[:, self._starts[-1] :]
        if all(used):
            flags.fill_(1.0)
        else:
            flags.copy_(torch.tensor(used, dtype=buffer.dtype))
        return buffer

    def _flags(self, used: list[bool], like: torch.Tensor) -> torch.Tensor:
        """One flag per parameter for each receiving rank: whether this rank has used it."""
        if not all(used):
            return torch.tensor(used, dtype=like.dtype, device=like.device).repeat(self.rows)
        if self._ones is None or self._ones.numel() != self.rows * len(used) or self._ones.dtype != like.dtype:
            self._ones = torch.ones(self.rows * len(used), dtype=like.dtype, device=like.device)
        return self._ones

    def _take_partial(self, options: ReduceOptions) -> torch.Tensor | None:
        """What has waited for the replicate axis and goes along now."""
        if not options.all_reduce:
            return None
        partial, self.partial = self.partial, None
        return partial

    def hold_or_add(self, part: torch.Tensor, options: ReduceOptions, waited: torch.Tensor | None) -> bool:
        """Add what has waited for the replicate axis to ``part``; or keep all of it waiting, and return True."""
        if not options.all_reduce and (self.replicas or options.show):
            if self.partial is None:
                self.partial = part.to(self._keeping_dtype(options.dtype))
            else:
                self.partial.add_(part)
            if options.show:
                used = [count > 0 for count in self.partial[self._starts[-1] :].real.tolist()]
                self.show(self.partial, used, waiting=True)
            return True
        if waited is not None:
            part.copy_(waited.add_(part))
        return False

    def _keeping_dtype(self, reduce_dtype: torch.dtype | None) -> torch.dtype:
        dtype = self._dtype(reduce_dtype)
        return dtype if reduce_dtype is not None else torch.promote_types(dtype, torch.float32)

    def keeps_in_another_dtype(self, reduce_dtype: torch.dtype | None) -> bool:
        """Whether gradients that wait are kept in another dtype than autograd adds them up in."""
        return self._keeping_dtype(reduce_dtype) != self.bucket.compute_dtype

    def show_pending(self) -> None:
        """Show the gradients that wait for their first communication as ``acc_grad``; every rank its own."""
        if self.held is None or self.scatter is not None:
            return
        for param, gradient in zip(self._plan_for, self.held, strict=True):
            if gradient is not None:
                param.show_sum(gradient, whole=True, waiting=True)

    def show(self, flat: torch.Tensor, used: list[bool], *, waiting: bool) -> None:
        """Show what has added up, of the parameters that were used, as ``acc_grad``."""
        for param, start, shown in zip(self._plan_for, self._starts, used, strict=False):
            if shown:
                numel = param.numel if self.scatter is None else param.local_numel
                param.show_sum(flat[start : start + numel], whole=self.scatter is None, waiting=waiting)

    def give_back(self) -> None:
        """Before a backward: let autograd add to what waits, where it can, so that no second copy is made."""
        if self.held is None:
            return
        for index, (param, gradient) in enumerate(zip(self._plan_for, self.held, strict=True)):
            if gradient is not None and param.accumulate_onto(gradient):
                self.held[index] = None
                self._given.add(index)

    def forget_new(self) -> None:
        """Drop what a backward that failed has brought; what was added to earlier gradients stays, as in torch."""
        for index in sorted(self._given):
            if self.held is not None:
                self.held[index] = self._plan_for[index].take_gradient()
        self._given = set()
        for param in self.params:
            param.unsharded.grad = None

    def clear(self) -> None:
        """Drop gradients that wait."""
        self.held = self.partial = None
        self._given = set()


def _zero_padding(param: ManagedParam, columns: torch.Tensor) -> None:
    if param.straight:
        full, rest = divmod(param.numel, param.chunk) if param.chunk else (0, 0)
        if rest:
            columns[full, rest:].zero_()
        columns[full + (1 if rest else 0) :].zero_()
        return
    columns.zero_()
