"""The parameters of one ``fully_shard`` call: gathered, shown, freed and reduced as its modules' hooks say.

Hooks on outputs say when backward reaches a unit, and a node in the autograd graph behind its inputs says when
backward has left it. A unit none of whose inputs needs a gradient is finished at the end of the root's backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel.core.fully_shard.bucket import Bucket
from hyper_parallel.core.fully_shard.comm import Pending
from hyper_parallel.core.fully_shard.mesh import DataParallelMesh
from hyper_parallel.core.fully_shard.passes import (
    Pass,
    cast,
    copy_aliases,
    mark_inputs,
    tensors_in,
    watch_outputs,
)
from hyper_parallel.core.fully_shard.policy import MixedPrecisionPolicy
from hyper_parallel.core.fully_shard.reduce import GradientReducer, ReduceOptions
from hyper_parallel.core.fully_shard.schedule import Schedule

__all__ = ["Unit", "unit_of"]


class Unit:
    """The parameters of one ``fully_shard`` call, and the modules whose forward they serve."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        buckets: list[Bucket],
        mesh: DataParallelMesh,
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool,
    ) -> None:
        self.modules = list(modules)
        self.buckets = buckets
        self.reducers = [GradientReducer(bucket) for bucket in buckets]
        self.mesh = mesh
        self.mp_policy = mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.reduce_op = "avg"
        self.gradient_scale = 1.0
        self.forward_prefetch: list[Unit] | None = None
        self.backward_prefetch: list[Unit] | None = None
        self.schedule: Schedule | None = None
        self.is_last_backward = True  # until there is a schedule to ask
        self.is_root = False
        self.place_in_forward = -1
        self.place_in_backward = -1
        self._gathers: list[Pending] | None = None  # under way, one per bucket
        self._showing_wholes = False
        self._gathered_version = -1
        self._to_run: set[int] = set()  # modules of the unit whose forward is still to come
        self._running: list[Pass | None] = []  # calls of the modules, one inside the other; None: a recomputation
        self._in_backward = False  # reached by the backward under way, and not finished
        self._reached = 0  # passes that this backward has reached and not left
        self._ahead = 0  # passes that no backward has left since the last end of one
        for module in self.modules:
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after_forward, always_call=True)  # also when forward raises

    # -- gather and free -----------------------------------------------------------------------------------------

    @property
    def gathered(self) -> bool:
        """Whether the whole parameters have their data."""
        return all(bucket.gathered for bucket in self.buckets)

    def start_gather(self) -> None:
        """Start to gather the shards as they are now, unless that is done or under way."""
        if True in [bucket.was_replaced() for bucket in self.buckets]:  # each has to look
            self.reshard()
            for bucket in self.buckets:
                bucket.repack()
        version = sum(bucket.version for bucket in self.buckets)
        if version != self._gathered_version and (self._gathers is not None or self.gathered):
            self._free()  # kept since before the shards changed
        if self._gathers is None and not self.gathered:
            self._gathers = [bucket.start_gather() for bucket in self.buckets]
            self._gathered_version = version

    def finish_gather(self) -> None:
        """Have the whole parameters, and let the modules see them."""
        self._receive()
        if not self._showing_wholes:
            self._showing_wholes = True
            for bucket in self.buckets:
                bucket.show_wholes()

    def unshard(self) -> None:
        """Gather and show."""
        self.start_gather()
        self.finish_gather()

    def show_shards(self) -> None:
        """Let the modules see the sharded parameters; the gathered data stays."""
        if self._showing_wholes:
            self._showing_wholes = False
            for bucket in self.buckets:
                bucket.show_shards()

    def reshard(self) -> None:
        """Free the whole parameters and let the modules see the shards."""
        self.show_shards()
        self._free()

    def _receive(self) -> None:
        if self._gathers is not None:
            gathers, self._gathers = self._gathers, None
            for bucket, gather in zip(self.buckets, gathers, strict=True):
                bucket.finish_gather(gather.wait())

    def _free(self) -> None:
        self._receive()  # a prefetch that nobody used
        for bucket in self.buckets:
            if bucket.gathered:
                bucket.free()

    # -- forward -------------------------------------------------------------------------------------------------

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        schedule = self.schedule or self._become_root()
        schedule.forget_failed_backward()
        recomputing = self._in_backward and schedule.in_backward
        if recomputing:
            self.finish_gather()
        elif self._running:
            self.unshard()  # the module calls itself
        else:
            self._enter_forward(module, schedule)
        policy = self.mp_policy
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = cast((args, kwargs), policy.param_dtype)
        a_pass = None if recomputing else Pass(self)
        if a_pass is not None and torch.is_grad_enabled():
            args, kwargs = mark_inputs(a_pass, args, kwargs)
        self._running.append(a_pass)
        return args, kwargs

    def _enter_forward(self, module: nn.Module, schedule: Schedule) -> None:
        first = id(module) not in self._to_run or len(self._to_run) == len(self.modules)
        if first:
            self._to_run = {id(m) for m in self.modules}
            if self.is_root:
                schedule.begin_forward()
        self.unshard()
        if first and not schedule.in_backward:
            schedule.enters(self)
            for unit in schedule.next_forward(self) if self.forward_prefetch is None else self.forward_prefetch:
                unit.start_gather()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._running:
            return output  # the hook before forward has raised
        a_pass = self._running.pop()
        if self.mp_policy.output_dtype is not None:
            output = cast(output, self.mp_policy.output_dtype)
        if a_pass is None:
            return output  # a recomputation inside of this unit's backward, which needs the parameters next
        schedule = self.schedule
        assert schedule is not None
        output = copy_aliases(output, self._owns_memory_of)
        differentiable: list[torch.Tensor] = []
        if torch.is_grad_enabled():
            differentiable = [t for t in tensors_in(output) if t.requires_grad and not t.is_leaf]
            watch_outputs(a_pass, differentiable)
            if differentiable and not schedule.in_backward:
                self._ahead += 1
        if not self._running:
            self._to_run.discard(id(module))
            if self._to_run:
                self.show_shards()  # the other modules of the unit need the data, or never run
            else:
                self._leave_forward(schedule, with_backward=bool(differentiable))
        return output

    def _leave_forward(self, schedule: Schedule, *, with_backward: bool) -> None:
        schedule.leaves(self)
        if not self.reshard_after_forward or (with_backward and (self.is_root or schedule.in_backward)):
            self.show_shards()  # backward starts with the root's parameters, or will soon be here: keep their data
        else:
            self.reshard()
        if self.is_root:
            schedule.end_forward()

    def _owns_memory_of(self, tensor: torch.Tensor) -> bool:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return False
        pointer = tensor.untyped_storage().data_ptr()
        return pointer != 0 and any(pointer == bucket.wholes_pointer for bucket in self.buckets)

    def begin_step(self) -> None:
        """The root's forward starts; an earlier one may have been cut short by an interrupt."""
        if not self.is_root:
            self._to_run.clear()
            self._running.clear()

    def end_root_forward(self) -> None:
        """The root's forward is through: no module shows whole parameters, no prefetch was in vain."""
        if self._gathers is not None or (self._showing_wholes and self.reshard_after_forward):
            self.reshard()
        else:
            self.show_shards()

    def _become_root(self) -> Schedule:
        """The first unit whose forward runs is the root of all units below it."""
        units = list(dict.fromkeys(u for m in self.modules for child in m.modules() if (u := unit_of(child))))
        for unit in units:
            if unit.is_root:
                raise RuntimeError(
                    "a unit's forward ran on its own before that of the module that contains it\n"
                    f"  unit: {type(unit.modules[0]).__name__}   "
                    f"contained in: {type(self.modules[0]).__name__}\n"
                    "  try: run the whole model's forward first"
                )
        schedule = Schedule(units)
        schedule.is_last_backward = self.is_last_backward
        for unit in units:
            unit.schedule = schedule
        self.is_root = True
        return schedule

    # -- backward ------------------------------------------------------------------------------------------------

    def backward_reaches(self, a_pass: Pass) -> None:
        """Backward is about to use an output of ``a_pass``."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward with create_graph=True went through a fully_shard unit\n"
                f"  unit: {type(self.modules[0]).__name__}; its whole parameters are freed when backward leaves it\n"
                "  try: create_graph=False, or leave the modules that need second derivatives unwrapped"
            )
        schedule = self.schedule
        assert schedule is not None
        schedule.begin_backward()
        number = schedule.backward_number
        if number in (a_pass.reached_in, a_pass.left_in):
            return
        a_pass.reached_in = number
        self._reached += 1
        if not self._in_backward:
            self._in_backward = True
            self.unshard()
            for unit in schedule.next_backward(self) if self.backward_prefetch is None else self.backward_prefetch:
                unit.start_gather()

    def backward_left(self, a_pass: Pass) -> None:
        """Backward has computed the gradients of the inputs of ``a_pass``."""
        schedule = self.schedule
        assert schedule is not None
        schedule.begin_backward()
        if a_pass.reached_in == schedule.backward_number:
            self._reached -= 1
        a_pass.left_in = schedule.backward_number
        self._ahead = max(self._ahead - 1, 0)
        if self._ahead == 0 and self._reached == 0:  # otherwise other passes are still to be differentiated
            self._finish_backward(schedule)

    def end_of_backward(self) -> None:
        """The root's backward is through: finish what was not finished on the way."""
        schedule = self.schedule
        assert schedule is not None
        if self._in_backward or self._has_gradients():
            self._finish_backward(schedule)
        else:
            self._let_go()
        self._reached = self._ahead = 0
        if not self._running:
            self._to_run.clear()

    def _has_gradients(self) -> bool:
        """Whether there is something to reduce: from now, or kept by an earlier backward and due now."""
        if any(p.unsharded.grad is not None for bucket in self.buckets for p in bucket.params):
            return True
        return self.requires_gradient_sync and any(r.is_due(self.requires_all_reduce) for r in self.reducers)

    def _finish_backward(self, schedule: Schedule) -> None:
        self._in_backward = False
        with torch.no_grad():
            for reducer in self.reducers:
                reducer.collect(self.mp_policy.reduce_dtype, keep=not self.requires_gradient_sync)
            self._let_go()
            if not self.requires_gradient_sync:
                return
            options = self._reduce_options()
            by_all_to_all = self.mesh.platform.backend == "gloo"
            for reducer in self.reducers:
                reduction = reducer.reduce(options, by_all_to_all=by_all_to_all)
                if reduction is not None:
                    schedule.add(reduction)

    def _let_go(self) -> None:
        """Backward needs the whole parameters no more; a forward in whose middle it ran still does."""
        if self._running:
            return
        if self.reshard_after_backward:
            self.reshard()
        else:
            self.show_shards()

    def _reduce_options(self) -> ReduceOptions:
        scale = self.gradient_scale / (self.mesh.size if self.reduce_op == "avg" else 1)
        return ReduceOptions(scale, self.requires_all_reduce, self.mp_policy.reduce_dtype)

    def abandon_backward(self) -> None:
        """Drop the state of a backward that ended with an error."""
        self._in_backward = False
        self._reached = self._ahead = 0
        for bucket in self.buckets:
            for param in bucket.params:
                param.unsharded.grad = None
        if not self._running:
            self._to_run.clear()
            self.reshard()

    def clear_gradients(self, *, set_to_none: bool) -> None:
        """Forget gradients, also those that wait for a reduction."""
        if self.schedule is not None:
            self.schedule.finish_reductions()
        for reducer in self.reducers:
            reducer.clear()
        for bucket in self.buckets:
            for param in bucket.params:
                param.clear_gradient(set_to_none=set_to_none)


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that ``module`` was wrapped as, or None."""
    return module.__dict__.get("_hyper_parallel_unit")
