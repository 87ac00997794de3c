"""The reducer of `DistributedDataParallel` in Python: torch's own, in C++, copies data and refuses tensors without.

It makes the same buckets, in the same order, and issues the same collectives: gradients are copied into a bucket as
they come, each bucket is reduced when it is full and those before it are, and backward ends when all are there. After
the first backward the buckets are made anew, in the order in which gradients have come; rank 0 says which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as bindings
from torch.nn.parallel import distributed as ddp

from sim.patches.locks import exchange


class _FlatGradients:
    """Gradients that are reduced together.

    Attributes:
        params: numbers of its parameters.
        flat: their gradients, one behind the other.
        views: of each parameter's gradient in `flat`.
        missing: parameters whose gradients have not come yet.
        work: that reduces it.
    """

    def __init__(self, params: Sequence[int], all_params: Sequence[torch.Tensor]) -> None:
        self.params = list(params)
        first = all_params[self.params[0]]
        sizes = [all_params[number].numel() for number in self.params]
        self.flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        parts = self.flat.split(sizes)
        self.views = [part.view(all_params[number].shape) for part, number in zip(parts, self.params, strict=True)]
        self.missing = len(self.params)
        self.work: Any = None


class Reducer:
    """Reduces gradients over ranks as they come; its arguments and methods are those of torch's."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        bucket_indices: Sequence[Sequence[int]],
        per_bucket_size_limits: Sequence[int],
        process_group: Any,
        expect_sparse_gradients: Sequence[bool] = (),
        bucket_bytes_cap: int = 25 << 20,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        param_to_name_mapping: Any = None,
        first_bucket_bytes_cap: int = 1 << 20,
        skip_all_reduce_unused_params: bool = False,
        use_python_reducer: bool = False,
        bucket_size_limits_for_rebuilding: Sequence[int] = (),
        *more: Any,
    ) -> None:
        del per_bucket_size_limits, expect_sparse_gradients, param_to_name_mapping, use_python_reducer, more
        self._params = list(params)
        self._group = process_group
        self._limits = list(bucket_size_limits_for_rebuilding) or [first_bucket_bytes_cap, bucket_bytes_cap]
        self._finds_unused = find_unused_parameters
        self._skips_unused = skip_all_reduce_unused_params
        self._as_views = gradient_as_bucket_view
        self._static = False
        self._hook: tuple[Any, Callable[..., Any]] | None = None
        self._arrived: list[int] = []
        self._is_rebuilt = False
        self._expects = False
        self._used: set[int] = set()
        self._next = 0
        self._buckets: list[_FlatGradients] = []
        self._at: dict[int, tuple[_FlatGradients, int]] = {}
        self._make_buckets(bucket_indices)
        self._handles = [
            param.register_post_accumulate_grad_hook(self._gradient_hook(number))
            for number, param in enumerate(self._params)
        ]

    def _make_buckets(self, indices: Sequence[Sequence[int]]) -> None:
        self._buckets, self._at = [], {}  # the old ones go before the new ones come
        self._buckets = [_FlatGradients(params, self._params) for params in indices]
        self._at = {n: (b, i) for b in self._buckets for i, n in enumerate(b.params)}

    def _gradient_hook(self, number: int) -> Callable[[torch.Tensor], None]:
        def arrived(param: torch.Tensor) -> None:
            del param
            self._autograd_hook(number)

        return arrived

    # -- what DistributedDataParallel calls, in the order of a step ------------------------------------------------

    def prepare_for_forward(self) -> None:
        """Do nothing: torch's counts iterations here."""

    def _rebuild_buckets(self) -> bool:
        """Make the buckets anew after the first backward, in the order in which gradients came."""
        if self._is_rebuilt or not self._arrived or (self._finds_unused and not self._static):
            return False
        params = [self._params[number] for number in self._arrived]
        indices, _ = bindings._compute_bucket_assignment_by_size(params, self._limits, [], self._arrived)
        self._broadcast_indices(indices)
        self._make_buckets(indices)
        self._is_rebuilt = True
        return True

    def _broadcast_indices(self, indices: Sequence[Sequence[int]]) -> None:
        flat = [number for params in indices for number in params]
        for numbers in ([*flat, len(indices)], [len(params) for params in indices]):
            options = dist.BroadcastOptions()
            self._group.broadcast([torch.tensor(numbers, dtype=torch.int32)], options).wait()

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Expect gradients; of parameters that the outputs do not depend on there are none."""
        self._expects = True
        self._next = 0
        self._used = set(range(len(self._params)))
        for bucket in self._buckets:
            bucket.missing, bucket.work = len(bucket.params), None
        if self._finds_unused and not self._static:
            self._used = self._reached_from(outputs)
            for number in range(len(self._params)):
                if number not in self._used:
                    self._ready(number)

    def _reached_from(self, outputs: Sequence[torch.Tensor]) -> set[int]:
        numbers = {id(param): number for number, param in enumerate(self._params)}
        nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
        seen = set(nodes)
        found = set()
        while nodes:
            node: Any = nodes.pop()
            number = numbers.get(id(getattr(node, "variable", None)))
            if number is not None:
                found.add(number)
            for after, _ in node.next_functions:
                if after is not None and after not in seen:
                    seen.add(after)
                    nodes.append(after)
        return found

    def _autograd_hook(self, number: int) -> None:
        """Take the gradient of a parameter that backward is done with."""
        if not self._expects:  # no_sync
            return
        if not self._is_rebuilt:
            self._arrived.append(number)
        self._ready(number)

    def _ready(self, number: int) -> None:
        bucket, at = self._at[number]
        grad, view = self._params[number].grad, bucket.views[at]
        with torch.no_grad():
            if grad is None or number not in self._used:
                view.zero_()
            elif self._hook is None:
                torch.mul(grad, 1.0 / self._group.size(), out=view)
            elif grad is not view:
                view.copy_(grad)
            if self._as_views and grad is not None and number in self._used:
                self._params[number].grad = view
        bucket.missing -= 1
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._reduce(self._buckets[self._next])
            self._next += 1
        if self._next == len(self._buckets):
            self._expects = False
            torch.autograd.Variable._execution_engine.queue_callback(self._finalize)

    def _reduce(self, bucket: _FlatGradients) -> None:
        if self._hook is None:
            bucket.work = self._group.allreduce([bucket.flat], dist.AllreduceOptions())
            return
        state, hook = self._hook
        bucket.work = hook(state, _HookArgument(bucket, self._buckets, self._params))

    def _finalize(self) -> None:
        """Wait for all buckets; gradients are what they have."""
        if self._finds_unused and not self._static and not self._skips_unused:
            used = torch.zeros(len(self._params), dtype=torch.int32)
            self._group.allreduce([used], dist.AllreduceOptions()).wait()
        for bucket in self._buckets:
            result = bucket.work.wait()
            if self._hook is not None:
                bucket.flat.copy_(result[0] if isinstance(result, (list, tuple)) else result)
            for number, view in zip(bucket.params, bucket.views, strict=True):
                grad = self._params[number].grad
                if grad is not None and grad is not view:
                    with torch.no_grad():
                        grad.copy_(view)

    # -- what is set on it ------------------------------------------------------------------------------------------

    def _set_static_graph(self) -> None:
        self._static = True

    def _remove_autograd_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        del use_static_world_size
        work.wait()

    def _get_local_used_map(self) -> torch.Tensor:
        return torch.ones(len(self._params), dtype=torch.int32)

    def _nothing(self, *args: Any, **options: Any) -> None:
        """Do nothing: this says something to torch's logger, or about mixed precision."""

    set_logger = _set_optimizer_in_backward = _set_mixed_precision_param_dtype = _nothing
    _set_ddp_runtime_logging_sample_rate = _check_reducer_finalized = _reset_state = _nothing
    _push_all_rebuilt_params = _install_post_backward_futures = _nothing

    def set_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Let `hook` reduce the buckets."""
        self._hook = (state, hook)


class _HookArgument:
    """What a communication hook gets of a bucket."""

    def __init__(self, bucket: _FlatGradients, buckets: list[_FlatGradients], params: list[torch.Tensor]) -> None:
        self._bucket, self._buckets, self._params = bucket, buckets, params

    def buffer(self) -> torch.Tensor:
        """Return the flat gradients."""
        return self._bucket.flat

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Put others in their place."""
        self._bucket.flat = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients, each as a view."""
        return list(self._bucket.views)

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters that they are of."""
        return [self._params[number] for number in self._bucket.params]

    def index(self) -> int:
        """Return the number of the bucket."""
        return self._buckets.index(self._bucket)

    def is_last(self) -> bool:
        """Tell whether no other one comes after it."""
        return self._bucket is self._buckets[-1]


class Logger:
    """Logs nothing."""

    def __init__(self, reducer: Any) -> None:
        del reducer

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: None


def _broadcast_coalesced(
    process_group: Any, tensors: Sequence[torch.Tensor], buffer_size: int, src: int = 0, *more: Any
) -> None:
    """Broadcast tensors in flat buffers of at most `buffer_size` bytes, as torch's does."""
    del more
    if not tensors:
        return
    indices, _ = bindings._compute_bucket_assignment_by_size(list(tensors), [buffer_size])
    options = dist.BroadcastOptions()
    options.rootRank = src
    for numbers in indices:
        chosen = [tensors[number] for number in numbers]
        flat = torch.cat([tensor.reshape(-1) for tensor in chosen])
        process_group.broadcast([flat], options).wait()
        for tensor, part in zip(chosen, flat.split([tensor.numel() for tensor in chosen]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _register_comm_hook(reducer: Reducer, state: Any, hook: Callable[..., Any]) -> None:
    reducer.set_hook(state, hook)


@contextmanager
def python_reducer() -> Any:
    """Let `DistributedDataParallel` have this reducer."""
    standing_in = {
        "Reducer": Reducer,
        "Logger": Logger,
        "_verify_params_across_processes": lambda *args: None,
        "_broadcast_coalesced": _broadcast_coalesced,
        "_register_comm_hook": _register_comm_hook,
    }
    undo = exchange([(ddp.dist, name, value) for name, value in standing_in.items()])
    try:
        yield
    finally:
        undo()
