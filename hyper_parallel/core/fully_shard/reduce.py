"""From the gradients of whole parameters to the gradients of shards: pack, reduce_scatter, all_reduce, apply."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from hyper_parallel.core.fully_shard.bucket import Bucket
from hyper_parallel.core.fully_shard.comm import Pending, all_reduce, reduce_scatter
from hyper_parallel.core.fully_shard.param import ShardedParam

__all__ = ["GradientReducer", "ReduceOptions", "Reduction"]


@dataclass(frozen=True)
class ReduceOptions:
    """How a unit's gradients are reduced, decided when its backward ends.

    Attributes:
        scale: Factor on the reduced gradients: 1 / ranks for "avg", times the user's.
        all_reduce: Whether to finish with the all_reduce over the replicate axis.
        dtype: Dtype of the communication; None: that of the computation.
    """

    scale: float
    all_reduce: bool
    dtype: torch.dtype | None


class GradientReducer:
    """Collects the gradients of one bucket and reduces them.

    The buffer that is sent has one row per receiving rank: its part of each parameter's gradient, then one flag
    per parameter that says whether this rank has used it. A parameter that some ranks have used gets the sum
    over those; one that no rank has used keeps no gradient, as on a single device.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.ranks = bucket.mesh.shard_size
        self.pending: torch.Tensor | None = None  # packed gradients that wait for a reduction
        self.partial: torch.Tensor | None = None  # reduced over the shard axis, not yet over the replicate axis
        self._used: list[bool] = []  # by this rank, in what is pending
        self._plan_for: list[ShardedParam] = []
        self._starts: list[int] = [0]

    def _plan(self) -> list[ShardedParam]:
        """The parameters that take part, and where; frozen ones do not."""
        trainable = [param for param in self.bucket.params if param.unsharded.requires_grad]
        if trainable != self._plan_for:
            if self.pending is not None or self.partial is not None:
                raise RuntimeError(
                    "requires_grad of a parameter changed while gradients wait to be reduced\n"
                    f"  unit of: {self.bucket.params[0].name}\n"
                    "  try: change it after a backward with gradient sync, or call zero_grad() first"
                )
            self._plan_for = trainable
            self._starts = [0, *accumulate(param.chunk for param in trainable)]
        return trainable

    def collect(self, dtype: torch.dtype | None, *, keep: bool) -> None:
        """Move the gradients of the whole parameters into the buffer; adds to what is pending there.

        A rank that has no gradient at all takes part with zeros: others may have one.

        Args:
            dtype: Of the communication; None: that of the computation.
            keep: The buffer has to wait for further backwards: in ``dtype``, or at least fp32.
        """
        params = self._plan()
        if not params:
            return
        width = self._starts[-1] + len(params)
        wholes = self.bucket.wholes
        wanted = self._dtype(dtype)
        if keep and dtype is None:
            wanted = torch.promote_types(wanted, torch.float32)
        adding = self.pending is not None
        if self.pending is None:
            self.pending = torch.empty(self.ranks * width, dtype=wanted, device=wholes.device)
            self._used = [False] * len(params)
        rows = self.pending.view(self.ranks, width)
        for index, (param, start) in enumerate(zip(params, self._starts, strict=False)):
            gradient = param.unsharded.grad
            columns = rows[:, start : start + param.chunk]
            if gradient is not None:
                if gradient.layout is not torch.strided:
                    raise RuntimeError(
                        f"the gradient of {param.name!r} is sparse, which fully_shard cannot reduce\n"
                        f"  seen: {gradient.layout}\n"
                        "  try: nn.Embedding(sparse=False), or pass the parameter in ignored_params"
                    )
                _put(columns, gradient.detach().reshape(-1), adding)
                self._used[index] = True
                param.unsharded.grad = None
            elif not adding:
                columns.zero_()

    def _dtype(self, reduce_dtype: torch.dtype | None) -> torch.dtype:
        """Dtype of the communication; the policy speaks of real floating-point gradients only."""
        own = self.bucket.wholes.dtype
        return reduce_dtype if reduce_dtype is not None and own.is_floating_point else own

    def is_due(self, all_reduce: bool) -> bool:
        """Whether something waits that a synchronised backward must take along, even if it finds nothing new."""
        return self.pending is not None or (all_reduce and self.partial is not None)

    def reduce(self, options: ReduceOptions, *, by_all_to_all: bool) -> Reduction | None:
        """Start to reduce what was collected; None when there is nothing."""
        buffer = self.pending
        if buffer is None:
            return None
        dtype = self._dtype(options.dtype)
        # fp16 could overflow in the sum, so it is scaled before; everything else after, on the smaller tensor.
        early = dtype == torch.float16
        if early:
            buffer.mul_(options.scale)
        buffer = buffer.to(dtype)
        params, width = self._plan_for, self._starts[-1] + len(self._plan_for)
        flags = buffer.view(self.ranks, width)[:, self._starts[-1] :]
        if all(self._used):
            flags.fill_(1.0)
        else:
            flags.copy_(torch.tensor(self._used, dtype=buffer.dtype))
        used, self.pending, self._used = self._used, None, []
        work = reduce_scatter(buffer, self.bucket.mesh.shard_group, by_all_to_all=by_all_to_all)
        return Reduction(self, params, self._starts, used, work, options, scaled=early)

    def clear(self) -> None:
        """Drop gradients that wait."""
        self.pending = self.partial = None
        self._used = []


class Reduction:
    """One bucket's reduction under way; :meth:`advance` takes it a step further without running ahead."""

    def __init__(
        self,
        owner: GradientReducer,
        params: list[ShardedParam],
        starts: list[int],
        used: list[bool],
        work: Pending,
        options: ReduceOptions,
        *,
        scaled: bool,
    ) -> None:
        self._owner = owner
        self._params = params
        self._starts = starts
        self._used = used
        self._work = work
        self._options = options
        self._scaled = scaled
        self._over_replicas: Pending | None = None
        self.done = False

    def advance(self) -> None:
        """Once the reduce_scatter is through: issue the all_reduce, or apply the gradients if there is none."""
        if self.done or self._over_replicas is not None:
            return
        part = self._work.wait()
        owner, group = self._owner, self._owner.bucket.mesh.replicate_group
        if group is not None:
            if owner.partial is not None:
                part.add_(owner.partial)
                owner.partial = None
            if not self._options.all_reduce:
                owner.partial = part
                self.done = True
                return
            self._over_replicas = all_reduce(part, group)
            return
        self._apply(part)

    def finish(self) -> None:
        """Wait for whatever is left and apply the gradients."""
        self.advance()
        if self._over_replicas is not None and not self.done:
            self._apply(self._over_replicas.wait())

    def drop(self) -> None:
        """Wait for what is under way, which still writes to its buffers, and forget it."""
        if not self.done:
            (self._over_replicas or self._work).wait()
            self.done = True

    def _apply(self, part: torch.Tensor) -> None:
        self.done = True
        end = self._starts[-1]
        used = self._used if all(self._used) else [count > 0 for count in part[end:].real.tolist()]
        if not self._scaled and self._options.scale != 1.0:
            part[:end].mul_(self._options.scale)
        dtype = self._owner.bucket.shards.dtype
        if part.dtype != dtype:
            part = part.to(dtype)
        for param, start, anybody in zip(self._params, self._starts, used, strict=False):
            if anybody:
                param.add_gradient(part[start : start + param.local_numel])


def _put(columns: torch.Tensor, gradient: torch.Tensor, adding: bool) -> None:
    """Write (or add) a flat gradient into ``columns``, row by row; what is beyond its end is padding, zero."""
    ranks, chunk = columns.shape
    if chunk == 0:
        return
    if gradient.numel() == ranks * chunk:
        part = gradient.view(ranks, chunk)
        columns.add_(part) if adding else columns.copy_(part)
        return
    full, rest = divmod(gradient.numel(), chunk)
    pieces = [(columns[:full], gradient[: full * chunk].view(full, chunk))]
    if rest:
        pieces.append((columns[full, :rest], gradient[full * chunk :]))
    if not adding:
        if rest:
            columns[full, rest:].zero_()
        columns[full + (1 if rest else 0) :].zero_()
    for place, part in pieces:
        place.add_(part) if adding else place.copy_(part)
