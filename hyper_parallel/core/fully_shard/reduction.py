"""A reduction under way: what is left to do between its first collective and the gradients of the parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hyper_parallel.core.fully_shard.comm import Pending, all_reduce
from hyper_parallel.core.fully_shard.param import ManagedParam
from hyper_parallel.core.fully_shard.shares import SharedAllReduce

if TYPE_CHECKING:
    from hyper_parallel.core.fully_shard.reduce import GradientReducer

__all__ = ["Finish", "ReduceOptions", "Reduction"]


@dataclass(frozen=True)
class ReduceOptions:
    """How a unit's gradients are reduced, decided when its backward ends.

    Attributes:
        average: Whether to divide by the number of ranks.
        factor: The user's factor on the reduced gradients.
        all_reduce: Whether to finish with the all_reduce over the replicate axis.
        dtype: Dtype of the communication; None: that of the computation.
        result_dtype: Add reduced gradients up in that dtype; None: in the parameter's.
        share: Let reductions of adjacent units share an all_reduce.
        show: Show gradients that wait, and reduced ones, as ``param.acc_grad``.
        divide_by: Divide the sum by it instead of what ``average`` says.
        hook: Called with the reduced gradients, flat.
        reduce_scatter_with: What allocates and communicates instead of the engine.
        zeros: Give parameters that no rank has used zeros as their gradients.
    """

    average: bool
    factor: float
    all_reduce: bool
    dtype: torch.dtype | None
    result_dtype: torch.dtype | None = None
    share: bool = False
    show: bool = False
    divide_by: float | None = None
    hook: Callable[[torch.Tensor], None] | None = None
    reduce_scatter_with: Any = None
    zeros: bool = False


@dataclass(frozen=True)
class Finish:
    """What is left to do to a reduced gradient.

    Attributes:
        options: As the reduction was asked for.
        scale: Factor that is still to be applied.
        waited: What earlier backwards have left for this all_reduce.
    """

    options: ReduceOptions
    scale: float
    waited: torch.Tensor | None


class Reduction:
    """One reducer's reduction under way; :meth:`advance` takes it a step further without running ahead."""

    def __init__(
        self,
        owner: GradientReducer,
        params: list[ManagedParam],
        starts: list[int],
        used: list[bool],
        work: Pending,
        finish: Finish,
        shared: SharedAllReduce | None,
    ) -> None:
        self._owner = owner
        self._params = params
        self._starts = starts
        self._used = used
        self._work = work
        self._finish = finish
        self._shared = shared
        self._part: torch.Tensor | None = None  # once the reduce_scatter is through
        self._to_reduce = list(owner.replicas)
        self.done = False

    def receive(self) -> None:
        """Wait for the first collective, and apply the gradients if there is no other one to come."""
        if self._part is None and (self._to_reduce or self._shared is not None):
            self._work.wait()
        else:
            self.advance()

    def advance(self) -> None:
        """Once the collective under way is through, issue the next, or apply the gradients if there was none to come.

        The last all_reduce is left under way: what comes after it can wait until the end of backward.
        """
        if self.done or (self._part is not None and (self._shared is not None or not self._to_reduce)):
            return
        owner = self._owner
        first = self._part is None
        part = self._part = self._work.wait()
        if first and owner.hold_or_add(part, self._finish.options, self._finish.waited):
            self.done = True
            return
        if self._shared is not None:
            self._shared.arrived()
        elif self._to_reduce:
            self._work = all_reduce(part, self._to_reduce.pop(0))
        else:
            self._apply(part)

    def finish(self) -> None:
        """Wait for whatever is left and apply the gradients."""
        while not self.done and (self._part is None or (self._to_reduce and self._shared is None)):
            self.advance()
        if self.done:
            return
        if self._shared is not None:
            self._shared.wait()
            assert self._part is not None
            self._apply(self._part)
        else:
            self._apply(self._work.wait())

    def drop(self) -> None:
        """Wait for what is under way, which still writes to its buffers, and forget it."""
        if not self.done:
            self._work.wait()
            if self._shared is not None:
                self._shared.drop()
            if self._part is None and self._finish.waited is not None:
                self._owner.partial = self._finish.waited  # as it was before the backward that failed
            self.done = True

    def _apply(self, part: torch.Tensor) -> None:
        self.done = True
        owner, end = self._owner, self._starts[-1]
        used = self._used
        if not all(used) and not isinstance(part, FakeTensor):  # without values, others are taken to be like this one
            used = [count > 0 for count in part[end:].real.tolist()]
        if self._finish.scale != 1.0:
            part[:end].mul_(self._finish.scale)
        if self._finish.options.hook is not None:
            self._finish.options.hook(part[:end])
        if self._finish.options.show:
            owner.show(part, used, waiting=False)
        if self._finish.options.show:
            part = part.clone()  # what is shown is not what optimizers change
        dtypes = [self._result_dtype(param) for param in self._params]
        parts = {dtype: part.to(dtype) for dtype in dict.fromkeys(dtypes)}
        first = owner.scatter is not None and not owner.bucket.storage.on_host
        for param, start, anybody, dtype in zip(self._params, self._starts, used, dtypes, strict=False):
            part = parts[dtype]
            if not anybody or (first and param.receive_first(part, start)):
                continue
            if owner.scatter is None:
                whole = part[start : start + param.numel].view(param.shape)
                param.receive(param.part_of(whole).reshape(-1))
            else:
                param.receive(part[start : start + param.local_numel])

    def _result_dtype(self, param: ManagedParam) -> torch.dtype:
        """In which dtype a parameter wants its gradient."""
        wanted = self._finish.options.result_dtype
        own = param.local.dtype
        return own if wanted is None or not own.is_floating_point else wanted
