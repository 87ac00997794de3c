"""Reduction of gradients, from unsharded ones to those of shards: pack, reduce_scatter, all_reduce, apply.

`GradientReducer` packs and issues; a `Reduction` is one under way; a `FusedAllReduce` is one all_reduce over
the replicate axis for the shards of several units.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.core.fully_shard.bucket import Bucket
from hyper_parallel.core.fully_shard.comm import (
    GroupLog,
    Pending,
    all_reduce,
    reduce_each,
    reduce_scatter,
    reduce_scatter_each,
)
from hyper_parallel.core.fully_shard.param import ManagedParam
from hyper_parallel.core.fully_shard.utils import UnitOptions

# -- all_reduces that take what several reductions leave, of adjacent units --------------------------------------------

Sum = tuple[DeviceMesh, tuple[int, ...]]
"""A mesh and its axes over which gradients are still to be added up."""

# Reductions of adjacent units share an all_reduce up to this size: large enough for the latency not to count, small
# enough for the rest of backward to overlap with it.
FUSED_BYTES = 16 * 2**20
ALIGNMENT = 512  # bytes; what allocators and copy engines like


class FusedAllReduce:
    """One all_reduce for the shards of several reductions, of adjacent units.

    Reduce_scatters write straight into its buffer. It starts once it takes no more shards and all are there.
    """

    def __init__(self, group: dist.ProcessGroup, numel: int, like: torch.Tensor) -> None:
        self.group = group
        self.buffer = torch.empty(numel, dtype=like.dtype, device=like.device)
        self.filled = 0
        self.closed = False
        self._members = 0
        self._ready = 0
        self._work: Pending | None = None

    def take(self, numel: int) -> torch.Tensor | None:
        """A slice of `numel` elements; None when the buffer has no room for it."""
        step = ALIGNMENT // self.buffer.element_size()
        start = -(-self.filled // step) * step
        if self.closed or start + numel > self.buffer.numel():
            return None
        # Nobody reads the gaps, but they are summed: old values in this memory may be NaN, at which nccl stops if
        # asked to look for such (TORCH_NCCL_NAN_CHECK).
        self.buffer[self.filled : start].zero_()
        self.filled = start + numel
        self._members += 1
        return self.buffer[start : self.filled]

    def arrived(self) -> None:
        """One more shard is in its place."""
        self._ready += 1
        self._start()

    def close(self) -> None:
        """Take no more shards."""
        self.closed = True
        self._start()

    def _start(self) -> None:
        if self.closed and self._ready == self._members and self._work is None:
            self._work = all_reduce(self.buffer[: self.filled], self.group)

    def drop(self) -> None:
        """Wait for what is under way; take no more shards."""
        self.closed = True
        if self._work is not None:
            self._work.wait()

    def wait(self) -> None:
        """Have all shards reduced."""
        self.close()
        assert self._work is not None, "all reduce_scatters are through"
        self._work.wait()


class FusedAllReduces:
    """The all_reduces of a backward that take shards of several units.

    Args:
        total: Bytes that all units together leave, so that no buffer is larger.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._open: dict[Any, FusedAllReduce] = {}

    def place(self, group: dist.ProcessGroup, numel: int, like: torch.Tensor) -> tuple[FusedAllReduce, torch.Tensor]:
        """Find or make the all_reduce that takes `numel` elements like those of `like`, and the place in it."""
        key = (group, like.dtype, like.device)
        current = self._open.get(key)
        place = None if current is None else current.take(numel)
        if place is None:
            if current is not None:
                current.close()
            least = min(self.total, FUSED_BYTES) // like.element_size()
            current = self._open[key] = FusedAllReduce(group, max(numel, least), like)
            place = current.take(numel)
        assert current is not None
        assert place is not None
        return current, place

    def close(self) -> None:
        """Nothing more comes: start what has not."""
        for current in self._open.values():
            current.close()
        self._open = {}


# -- a reduction under way: between its first collective and the gradients of the shards -------------------------------


@dataclass(frozen=True)
class Finish:
    """What is still to be done to a reduced gradient.

    Attributes:
        options: The unit's, as they were when its backward ended; calls may have changed them since.
        scale: Factor that is still to be applied.
        partial: Sums of earlier backwards that wait for this all_reduce.
    """

    options: UnitOptions
    scale: float
    partial: torch.Tensor | None


class Reduction:
    """One reducer's reduction under way; `advance` takes it a step further without running ahead."""

    def __init__(
        self,
        owner: GradientReducer,
        params: list[ManagedParam],
        starts: list[int],
        used: list[bool],
        work: Pending,
        finish: Finish,
        fused: FusedAllReduce | None,
    ) -> None:
        self.owner = owner
        self._params = params
        self._starts = starts
        self._used = used
        self._work = work
        self._finish = finish
        self._fused = fused
        self._shard: torch.Tensor | None = None  # once the reduce_scatter is through
        self._to_reduce = list(owner.replicas)
        self.done = False

    def receive(self) -> None:
        """Wait for the first collective, and apply the gradients if there is no other one to come."""
        # A second collective is not issued here: that of this unit goes behind the reduce_scatter of the next one, in
        # `advance`, once this one is issued. Applied at once if there is none: the buffer goes before the next is made.
        if self._shard is None and (self._to_reduce or self._fused is not None):
            self._work.wait()
        else:
            self.advance()

    def advance(self) -> None:
        """Once the collective under way is through, issue the next, or apply the gradients if there was none to come.

        Does not wait for the last all_reduce: what comes after it can wait until the end of backward.
        """
        if self.done or (self._shard is not None and (self._fused is not None or not self._to_reduce)):
            return
        owner = self.owner
        first = self._shard is None  # partial sums are added once, before the first all_reduce of them
        shard = self._shard = self._work.wait()
        if first and owner.keep_or_add(shard, self._finish.options, self._finish.partial):
            self.done = True
            return
        if self._fused is not None:
            self._fused.arrived()
        elif self._to_reduce:
            self._work = all_reduce(shard, self._to_reduce.pop(0))
        else:
            self._apply(shard)

    def finish(self) -> None:
        """Wait for whatever is still under way, and apply the gradients."""
        while not self.done and (self._shard is None or (self._to_reduce and self._fused is None)):
            self.advance()
        if self.done:
            return
        if self._fused is not None:
            self._fused.wait()
            assert self._shard is not None
            self._apply(self._shard)
        else:
            self._apply(self._work.wait())

    def drop(self) -> None:
        """Wait for what is under way, which still writes to its buffers, and forget it."""
        if not self.done:
            # Waited for although nobody wants it: freed under way, its buffers would go to the next backward, and the
            # collective write into these.
            self._work.wait()
            if self._fused is not None:
                self._fused.drop()
            if self._shard is None and self._finish.partial is not None:
                self.owner.partial = self._finish.partial  # as it was before the backward that failed
            self.done = True

    def _apply(self, shard: torch.Tensor) -> None:
        self.done = True
        owner, end = self.owner, self._starts[-1]
        used = self._used
        # Flags that were added up say whether any rank has used a parameter; reading them waits for the device. Where
        # this rank has used all of them, nobody needs to look.
        if not all(used) and not isinstance(shard, FakeTensor):  # without values, others are taken to be like this one
            used = [count > 0 for count in shard[end:].real.tolist()]
        if self._finish.scale != 1.0:
            shard[:end].mul_(self._finish.scale)
        if self._finish.options.reduced_hook is not None:
            self._finish.options.reduced_hook(shard[:end])
        if self._finish.options.show_sums:
            owner.show(shard, used, waiting=False)
        if self._finish.options.show_sums:
            shard = shard.clone()  # what is shown is not what optimizers change
        # One conversion of the buffer per dtype, not one per parameter.
        dtypes = [self._result_dtype(param) for param in self._params]
        shards = {dtype: shard.to(dtype) for dtype in dict.fromkeys(dtypes)}
        # Gradients are views of the buffer that was reduced, as in FSDP2: no copy, but one that is kept keeps all.
        first = owner.scatter is not None and not owner.bucket.storage.on_host
        for param, start, anybody, dtype in zip(self._params, self._starts, used, dtypes, strict=False):
            shard = shards[dtype]
            if not anybody or (first and param.receive_first(shard, start)):
                continue
            if owner.scatter is None:
                unsharded = shard[start : start + param.numel].view(param.shape)
                param.receive(param.shard_of(unsharded).reshape(-1))
            else:
                param.receive(shard[start : start + param.local_numel])

    def _result_dtype(self, param: ManagedParam) -> torch.dtype:
        """In which dtype a parameter wants its gradient."""
        own = param.local.dtype
        in_fp32 = self._finish.options.mp_policy.apply_grad_on_fp32_main_grad and own.is_floating_point
        return torch.float32 if in_fp32 else own


# -- collecting and packing --------------------------------------------------------------------------------------------


class GradientReducer:
    """Collects the gradients of some parameters of a bucket and reduces them together.

    The buffer that is sent has one row per receiving rank: its shard of each parameter's gradient, then one flag
    per parameter that says whether this rank has used it. A parameter that some ranks have used gets the sum
    over those; one that no rank has used keeps no gradient, as on a single device.

    Args:
        bucket: Whose parameters.
        params: Which of them.
        scatter: The ranks among which the sum is split; None: every rank gets all of it.
        replicas: Groups to reduce over after that, one after the other.
        ranks: Over how many ranks gradients are added up in all.
        scatters_by_exchange: How a reduce_scatter is done: see `comm.reduce_scatter`.
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
        self.owned = params[0].placement.owner is not None
        self.rows = 1 if scatter is None else scatter.size()
        self.replicas = tuple(group for group in replicas if group.size() > 1)
        self.logs: list[GroupLog] = []  # of these groups
        self.ranks = ranks
        self.scatters_by_exchange = scatters_by_exchange
        self.sends_each = sends_each and scatter is not None and self.rows > 1
        self.pending: list[torch.Tensor | None] | None = None  # gradients that wait for a reduction, flat and unsharded
        self._given: set[int] = set()  # which of these autograd adds to just now
        self._sums: dict[int, Sum] = {}  # over which axes, not the engine's, some of these are still to be added up
        self.partial: torch.Tensor | None = None  # reduced over the shard axis, not yet over the replicate axis
        self._plan_for: list[ManagedParam] = []
        self._kept: list[ManagedParam] = []  # of these, whose sums this rank gets: all but those that others own
        self._starts: list[int] = [0]
        self._sizes: list[int] = []
        self._ones: torch.Tensor | None = None

    def _plan(self) -> list[ManagedParam]:
        """The parameters that take part, and where; frozen ones do not, unless they may have a gradient that waits.

        That follows from which were trainable since the last reduction, on all ranks alike, and not from gradients.
        """
        waits = self.pending is not None or self.partial is not None
        before, self._plan_for = (
            self._plan_for,
            [param for param in self.params if param.unsharded.requires_grad or (waits and param in self._plan_for)],
        )
        if before != self._plan_for:
            kept, starts = self._kept, self._starts
            self._kept = [param for param in self._plan_for if param.placement.is_held]
            self._starts = [0, *accumulate(self._width(param) for param in self._kept)]
            self._sizes = [*(self._width(param) for param in self._kept), len(self._kept)]
            self._move_waiting(before, kept, starts)
        return self._plan_for

    def _move_waiting(self, before: list[ManagedParam], kept: list[ManagedParam], starts: list[int]) -> None:
        """Bring what waits into the order of another plan: parameters were frozen or thawed between two backwards."""
        if self.pending is not None:
            pending = dict(zip(before, self.pending, strict=True))
            self.pending = [pending.get(param) for param in self._plan_for]
            self._sums = {self._plan_for.index(before[index]): over for index, over in self._sums.items()}
        if self.partial is not None:
            partial, self.partial = self.partial, self.partial.new_zeros(sum(self._sizes))
            for index, (param, start) in enumerate(zip(kept, starts, strict=False)):
                place, width = self._kept.index(param), self._width(param)
                self.partial[self._starts[place] :][:width].copy_(partial[start : start + width])
                self.partial[self._starts[-1] + place] = partial[starts[-1] + index]

    def _width(self, param: ManagedParam) -> int:
        """Elements of a parameter in one row."""
        return param.numel if self.scatter is None else param.chunk

    def all_reduce_bytes(self, reduce_dtype: torch.dtype | None) -> int:
        """Bytes of a reduce_scatter's result at most, which replicas then all_reduce."""
        elements = sum(map(self._width, self.params)) + len(self.params)
        return elements * self._dtype(reduce_dtype).itemsize + ALIGNMENT

    def has_gradients(self) -> bool:
        """Whether an unsharded parameter holds a gradient."""
        return any(param.unsharded.grad is not None for param in self.params)

    def collect(self, dtype: torch.dtype | None, *, keep: bool, mean: bool) -> None:
        """Take the gradients of the unsharded parameters over; adds to what is pending already.

        A rank that has no gradient at all takes part in the reduction with zeros: others may have one.

        Args:
            dtype: Of the communication; None: that of the computation.
            keep: They have to wait for further backwards: in `dtype`, or at least fp32.
            mean: They are averaged over the ranks, not added up.
        """
        params = self._plan()
        if not params:
            return
        if self.pending is None:
            self.pending = [None] * len(params)
        self._given = set()
        for index, param in enumerate(params):
            over = param.pending_sum(mean=mean)
            gradient = param.take_gradient(self._dtype(dtype), mean=mean) if over is None else param.take_summand()
            if gradient is None:
                continue
            if over != self._sums.get(index) and self.pending[index] is not None:
                # What autograd has left pending now and in an earlier backward is not the same, and cannot be added.
                if over is not None:
                    (gradient,), over = _add_up([gradient.to(self._dtype(dtype))], over), None
                self.add_up({index})
            pending = self.pending[index]
            if pending is not None:
                pending.add_(gradient)
                continue
            # Sums that are still to come are those of the dtype that the gradient has here.
            kept = self.keeping_dtype(dtype) if keep else self._dtype(dtype) if over is not None else gradient.dtype
            self.pending[index] = gradient.to(kept)
            if over is not None:
                self._sums[index] = over

    def add_up(self, indices: Collection[int] | None = None) -> None:
        """Add gradients that wait up over axes that are not the engine's: those of the same axes in one all_reduce.

        Once for all backwards that gradients have waited for.

        Args:
            indices: Of which parameters; None: of all.

        Communication: one all_reduce per axis of a mesh over which gradients are pending, and dtype.
        """
        together: dict[tuple[Any, torch.dtype], list[int]] = {}
        for index in sorted(self._sums) if indices is None else sorted(self._sums.keys() & set(indices)):
            over, gradient = self._sums.pop(index), None if self.pending is None else self.pending[index]
            if gradient is not None:
                together.setdefault((over, gradient.dtype), []).append(index)
        for (over, _), several in together.items():
            assert self.pending is not None, "there are gradients"
            gradients = [gradient for index in several if (gradient := self.pending[index]) is not None]
            for index, gradient in zip(several, _add_up(gradients, over), strict=True):
                self.pending[index] = gradient

    def _dtype(self, reduce_dtype: torch.dtype | None) -> torch.dtype:
        """Dtype of the communication; the policy speaks of real floating-point gradients only."""
        own = self.bucket.compute_dtype
        return reduce_dtype if reduce_dtype is not None and own.is_floating_point else own

    def is_due(self, all_reduce: bool) -> bool:
        """Whether something waits that a synchronised backward must take along, even if it finds nothing new."""
        return self.pending is not None or (all_reduce and self.partial is not None)

    def can_send_in_place(self, options: UnitOptions) -> bool:
        """Whether gradients that wait can be sent from where they are, and nothing is issued behind their reduction.

        They are in the dtype of the reduction, without padding.
        """
        if self.scatter is None or self.rows == 1 or self.owned or options.reduce_scatter_with is not None:
            return False
        if self.scatters_by_exchange or self.replicas or self.bucket.storage.apart:
            return False
        dtype = options.mp_policy.reduce_dtype
        return self.keeping_dtype(dtype) == self._dtype(dtype) and all(
            param.contiguous_on_dim_0 and param.numel == self.rows * param.chunk for param in self.params
        )

    def reduce(
        self, options: UnitOptions, fused_all_reduces: FusedAllReduces, *, in_place: bool = False
    ) -> Reduction | None:
        """Start to reduce what was collected; None when there is nothing.

        Args:
            options: How.
            fused_all_reduces: Those that several units share.
            in_place: Send gradients from where they are, see `can_send_in_place`.
        """
        # Nothing trainable, which is so on all ranks. A rank without gradients has a list of Nones, and takes part.
        if self.pending is None:
            return None
        self.add_up()
        pending, self.pending = self.pending, None
        params, width = self._plan_for, sum(self._sizes)
        used = [options.zeros or gradient is not None for gradient in pending]
        dtype = self._dtype(options.mp_policy.reduce_dtype)
        scale = self._scale(options)
        # fp16 could overflow in the sum, so it is scaled before; everything else after, on the smaller tensor.
        early = dtype == torch.float16
        if early:
            for gradient in pending:
                if gradient is not None:
                    gradient.mul_(scale)
        like = torch.empty(0, dtype=dtype, device=self.bucket.compute_device)
        # Before the reduce_scatter, which then writes into it: for the all_reduce nothing has to be put together.
        fused = place = None
        if options.fuse_all_reduces and options.requires_all_reduce and len(self.replicas) == 1:
            fused, place = fused_all_reduces.place(self.replicas[0], width, like)
        if self.scatter is None:
            work = Pending(None, self._packed(pending, used, like if place is None else place))
        elif self.owned:
            work = self._reduce_to_owners(pending, used, like.new_empty(width) if place is None else place)
        elif options.reduce_scatter_with is not None and self.rows > 1:
            work = self._reduce_scatter_with(options.reduce_scatter_with, pending, used, like, place)
        elif in_place or (self.sends_each and all(param.contiguous_on_dim_0 for param in params)):
            flags = like.new_ones(self.rows * len(used)) if in_place and all(used) else self._flags(used, like)
            sources = [*self._padded(pending, dtype), flags]
            place = like.new_empty(width) if place is None else place
            work = reduce_scatter_each(place.split(self._sizes), sources, self.scatter, place)
            del sources, flags  # from now on the collective alone keeps them
        else:
            buffer = self._packed(pending, used, like)
            work = reduce_scatter(buffer, self.scatter, by_all_to_all=self.scatters_by_exchange, out=place)
        finish = Finish(options, 1.0 if early else scale, self._take_partial(options))
        if self.owned:
            used = [flag for param, flag in zip(params, used, strict=True) if param.placement.is_held]
        return Reduction(self, self._kept, self._starts, used, work, finish, fused)

    def _scale(self, options: UnitOptions) -> float:
        return options.gradient_scale / (options.divide_by or (self.ranks if options.average else 1))

    def go_on(self, shard: torch.Tensor | None, options: UnitOptions) -> Reduction:
        """As `reduce`, for what a graph has reduced: this rank's shard of one parameter's sum over the shard axis.

        Args:
            shard: The result of a reduce_scatter; None: nothing new, only what waits for the replicate axis.
            options: How to reduce it.
        """
        params = self._plan()
        dtype = self.keeping_dtype(options.mp_policy.reduce_dtype)
        flat = torch.ones(self._starts[-1] + 1, dtype=dtype, device=self.bucket.compute_device)  # and a flag
        if shard is None:
            flat.zero_()
        else:
            flat[:-1].copy_(shard.reshape(-1))
        finish = Finish(options, self._scale(options), self._take_partial(options))
        return Reduction(self, params, self._starts, [shard is not None], Pending(None, flat), finish, None)

    def _reduce_scatter_with(
        self, comm: Any, pending: list[torch.Tensor | None], used: list[bool], like: torch.Tensor, place: Any
    ) -> Pending:
        """The same by a `ReduceScatter` of torch."""
        width = self._starts[-1] + len(pending)
        kind = {"dtype": like.dtype, "device": like.device}
        sent = self._packed(pending, used, comm.allocate((self.rows * width,), **kind))
        own = comm.allocate((width,), **kind) if place is None else place
        work = comm(output_tensor=own, input_tensor=sent, group=self.scatter, op=dist.ReduceOp.SUM, async_op=True)
        return Pending(work, own, keep=(sent,))

    def _reduce_to_owners(self, pending: list[torch.Tensor | None], used: list[bool], place: torch.Tensor) -> Pending:
        """The same for parameters with owners: each gets what it owns, and flags; `place` is for the own."""
        assert self.scatter is not None, "parameters with owners have a shard axis"
        owned: list[list[int]] = [[] for _ in range(self.rows)]
        for index, param in enumerate(self._plan_for):
            assert param.placement.owner is not None, "grouped by whether they have one"
            owned[param.placement.owner].append(index)
        parts = []
        for rank, indices in enumerate(owned):
            sizes = [*(self._plan_for[index].numel for index in indices), len(indices)]
            part = place if rank == self._plan_for[0].placement.shard_rank else place.new_empty(sum(sizes))
            *gradients, flags = part.split(sizes)
            for index, where in zip(indices, gradients, strict=True):
                gradient, pending[index] = pending[index], None  # its memory goes as soon as it is packed
                where.zero_() if gradient is None else where.copy_(gradient)
            _fill(flags, [used[index] for index in indices])
            parts.append(part)
        at_once = self.bucket.storage.platform.gathers_uneven
        return reduce_each(parts, self.scatter, place, at_once=at_once)

    def _padded(self, pending: list[torch.Tensor | None], dtype: torch.dtype) -> list[torch.Tensor]:
        """What is sent of each parameter: its gradient where it is, padded if it has to be, or zeros."""
        sources: list[torch.Tensor] = []
        for index, param in enumerate(self._plan_for):
            gradient, numel = pending[index], self.rows * param.chunk
            pending[index] = None
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

    def _packed(self, pending: list[torch.Tensor | None], used: list[bool], place: torch.Tensor) -> torch.Tensor:
        """All gradients in one buffer, row by row, and behind them the flags; made unless `place` is one."""
        width = self._starts[-1] + len(pending)
        buffer = place if place.numel() else place.new_empty(self.rows * width)
        rows = buffer.view(self.rows, width)
        if rows.device.type not in ("cpu", "meta") and self._pack_at_once(pending, used, rows):
            pending[:] = [None] * len(pending)
            return buffer
        for index, (param, start) in enumerate(zip(self._plan_for, self._starts, strict=False)):
            gradient, pending[index] = pending[index], None  # its memory goes as soon as it is packed
            columns = rows[:, start : start + self._width(param)]
            if gradient is None:
                columns.zero_()
            elif self.scatter is None:
                columns[0].copy_(gradient)
            else:
                if columns.numel() > gradient.numel():
                    _zero_padding(param, columns)
                for source, where in param.rows_of(gradient, columns):
                    where.copy_(source)
        _fill(rows[:, self._starts[-1] :], used)
        return buffer

    def _pack_at_once(self, pending: list[torch.Tensor | None], used: list[bool], rows: torch.Tensor) -> bool:
        """The same in one kernel, or a few, for devices; False, and nothing is done, where there is none for it.

        A launch for each parameter takes a host longer than what is launched takes a device.
        """
        gradients = [gradient for gradient in pending if gradient is not None and gradient.numel()]
        if not all(used) or len(gradients) < len(pending):
            return False
        if self.scatter is None:
            torch._foreach_copy_(list(rows[0, : self._starts[-1]].split(self._sizes[:-1])), gradients)
            rows[:, self._starts[-1] :].fill_(1.0)
            return True
        if len({gradient.dtype for gradient in gradients}) > 1 or not all(
            param.contiguous_on_dim_0 for param in self._plan_for
        ):
            return False
        matrices = [
            gradient.view(param.size, param.after) for param, gradient in zip(self._plan_for, gradients, strict=True)
        ]
        flags = self._flags(used, gradients[0].new_empty(0))
        torch._chunk_cat([*matrices, flags], dim=0, num_chunks=self.rows, out=rows)
        return True

    def _flags(self, used: list[bool], like: torch.Tensor) -> torch.Tensor:
        """One flag per parameter for each receiving rank: whether this rank has used it."""
        if not all(used):
            return torch.tensor(used, dtype=like.dtype, device=like.device).repeat(self.rows)
        if self._ones is None or self._ones.numel() != self.rows * len(used) or self._ones.dtype != like.dtype:
            self._ones = torch.ones(self.rows * len(used), dtype=like.dtype, device=like.device)
        return self._ones

    def _take_partial(self, options: UnitOptions) -> torch.Tensor | None:
        """What has waited for the replicate axis and goes along now."""
        if not options.requires_all_reduce:
            return None
        partial, self.partial = self.partial, None
        return partial

    def keep_or_add(self, shard: torch.Tensor, options: UnitOptions, partial: torch.Tensor | None) -> bool:
        """Add what has waited for the replicate axis to `shard`; or keep all of it waiting, and return True."""
        if not options.requires_all_reduce and (self.replicas or options.show_sums):
            if self.partial is None:
                self.partial = shard.to(self.keeping_dtype(options.mp_policy.reduce_dtype))
            else:
                self.partial.add_(shard)
            if options.show_sums:
                used = [count > 0 for count in self.partial[self._starts[-1] :].real.tolist()]
                self.show(self.partial, used, waiting=True)
            return True
        if partial is not None:
            shard.copy_(partial.add_(shard))
        return False

    def keeping_dtype(self, reduce_dtype: torch.dtype | None) -> torch.dtype:
        """Dtype of gradients that wait: that of their reduction if it was chosen, else at least fp32."""
        dtype = self._dtype(reduce_dtype)
        if reduce_dtype is not None:
            return dtype
        # torch promotes no float8.
        return torch.promote_types(dtype, torch.float32) if dtype.itemsize > 1 else torch.float32

    def keeps_in_another_dtype(self, reduce_dtype: torch.dtype | None) -> bool:
        """Whether gradients that wait are kept in another dtype than autograd adds them up in."""
        return self.keeping_dtype(reduce_dtype) != self.bucket.compute_dtype

    def show_pending(self) -> None:
        """Show the gradients that wait for their first communication as `acc_grad`; every rank its own."""
        if self.pending is None or self.scatter is not None:
            return
        self.add_up()
        for param, gradient in zip(self._plan_for, self.pending, strict=True):
            if gradient is not None:
                param.show_sum(gradient, unsharded=True, waiting=True)

    def show(self, flat: torch.Tensor, used: list[bool], *, waiting: bool) -> None:
        """Show what has added up, of the parameters that were used, as `acc_grad`."""
        for param, start, shown in zip(self._kept, self._starts, used, strict=False):
            if shown:
                numel = param.numel if self.scatter is None else param.local_numel
                param.show_sum(flat[start : start + numel], unsharded=self.scatter is None, waiting=waiting)

    def restore_pending(self) -> None:
        """Before a backward: let autograd add to what waits, where it can, so that no second copy is made."""
        if self.pending is None:
            return
        for index, (param, gradient) in enumerate(zip(self._plan_for, self.pending, strict=True)):
            if gradient is not None and param.accumulate_onto(gradient):
                self.pending[index] = None
                self._given.add(index)

    def forget_new(self) -> None:
        """Drop what a backward that failed has brought; what was added to earlier gradients stays, as in torch."""
        for index in sorted(self._given):
            if self.pending is not None:
                self.pending[index] = self._plan_for[index].take_gradient()
        self._given = set()
        for param in self.params:
            param.unsharded.grad = None

    def clear(self) -> None:
        """Drop gradients that wait."""
        self.pending = self.partial = None
        self._given, self._sums = set(), {}


def _add_up(gradients: list[torch.Tensor], over: Sum) -> Sequence[torch.Tensor]:
    """Return flat gradients of one dtype added up over some axes of a mesh."""
    flat = torch.cat(gradients)  # of one, too: somebody else may still need what autograd has taken for its gradient
    mesh, axes = over
    for axis in axes:
        all_reduce(flat, mesh.get_group(axis)).wait()
    return flat.split([gradient.numel() for gradient in gradients])


def _fill(flags: torch.Tensor, used: list[bool]) -> None:
    if all(used):
        flags.fill_(1.0)
    else:
        flags.copy_(torch.tensor(used, dtype=flags.dtype))


def _zero_padding(param: ManagedParam, columns: torch.Tensor) -> None:
    if param.contiguous_on_dim_0:
        full, rest = divmod(param.numel, param.chunk) if param.chunk else (0, 0)
        if rest:
            columns[full, rest:].zero_()
        columns[full + (1 if rest else 0) :].zero_()
        return
    columns.zero_()
