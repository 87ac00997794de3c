"""The parameters of one ``fully_shard`` call: gathered, shown, freed and reduced as its modules' hooks say.

Hooks on outputs say when backward reaches a unit, and a node in the autograd graph behind its inputs says when
backward has left it. A unit none of whose inputs needs a gradient is finished at the end of the root's backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.core.common.torch_compat import runs_eagerly
from hyper_parallel.core.fully_shard.bucket import Bucket, NoDataError
from hyper_parallel.core.fully_shard.comm import Pending
from hyper_parallel.core.fully_shard.hooks import (
    Pass,
    cast,
    copy_aliases,
    give_back,
    mark_inputs,
    tensors_in,
    watch_outputs,
)
from hyper_parallel.core.fully_shard.policy import UnitOptions
from hyper_parallel.core.fully_shard.reduce import GradientReducer, ReduceOptions
from hyper_parallel.core.fully_shard.schedule import Schedule, Structure
from hyper_parallel.platform import Platform

__all__ = [
    "Unit",
    "is_wrapped",
    "nested_traced_units",
    "nested_units",
    "traced_unit_of",
    "unit_of",
]


@dataclass
class Counts:
    """How often a unit has been through each of its states.

    Attributes:
        forwards: Forwards of its modules, without recomputations.
        recomputations: Forwards inside of a backward, that activation checkpointing repeats.
        backwards: Backwards that have reached it.
        finishes: How often its gradients were finished: at least once per backward that reached it.
    """

    forwards: int = 0
    recomputations: int = 0
    backwards: int = 0
    finishes: int = 0


class Unit:
    """The parameters of one call of ``fully_shard`` or ``hsdp``, and the modules whose forward they serve."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        buckets: list[Bucket],
        reducers: list[GradientReducer],
        platform: Platform,
        options: UnitOptions,
    ) -> None:
        self.modules = list(modules)
        self.buckets = buckets
        self.reducers = reducers
        self.platform = platform
        self.options = options
        self.counts = Counts()
        self.forward_prefetch: list[Unit] | None = None
        self.backward_prefetch: list[Unit] | None = None
        self.schedule: Schedule[Unit] | None = None
        self.is_last_backward = True  # until there is a schedule to ask
        self.is_root = False
        self.place_in_forward = -1
        self.place_in_backward = -1
        self._gathers: list[Pending] | None = None  # under way, one per bucket
        self._showing_wholes = False
        self._gathered_version: tuple[tuple[int, ...], ...] = ()
        self._gathered_in = -1  # number of the forward of the schedule for which they were gathered
        self._by_hand = False  # gathered by the user, for as many forwards without gradients as come
        self._kept = False  # after a backward, until the parameters change
        self._passes: list[weakref.ref[Pass]] = []  # forwards whose graph may still be there
        self._may_change = False  # gradients were there when they were gathered, or have come since
        self._to_run: set[int] = set()  # modules of the unit whose forward is still to come
        self._running: list[Pass | None] = []  # calls of the modules, one inside the other; None: a recomputation
        self._in_backward = False  # reached by the backward under way, and not finished
        self._reached = 0  # passes that this backward has reached and not left
        self._ahead = 0  # passes that no backward has left since the last end of one
        self.held = False  # whole until `reduce_now` or `release`: forward and backward leave that alone
        self.defers = False  # gradients wait for `reduce_now`, whatever the options say
        self.ignored: list[nn.Parameter] = []  # by the call that made the unit
        self.forward_methods: dict[int, list[str]] = {}  # other methods that run as forward does, by module
        self.original_classes = {id(module): type(module) for module in self.modules}
        self.storage: Any = None  # and the next: as ``make_unit`` was given them
        self.grouping: Any = None
        self.copied_by: Callable[[nn.Module, dict[int, Any]], nn.Module] | None = None
        self._structure = Structure(self.modules)
        self._reached_in = -1  # number of the last backward that reached the unit
        self._asked_for = False  # by ``unshard``, until ``reshard``
        self.wait_for: Any = None  # an event, before the next forward gathers
        for bucket in self.buckets:
            for param in bucket.params:
                param.on_gradient = self._check_reached
                param.watch()
        for module in self.modules:
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after_forward, always_call=True)  # also when forward raises

    @property
    def forward_hooks(self) -> tuple[Any, Any]:
        """What runs before and after the forward of each of the modules."""
        return self._before_forward, self._after_forward

    # -- gather and free -----------------------------------------------------------------------------------------

    @property
    def gathered(self) -> bool:
        """Whether the whole parameters have their data."""
        return all(bucket.gathered for bucket in self.buckets)

    def start_gather(self, *, in_backward: bool = False) -> None:
        """Start to gather the shards as they are now, unless that is done or under way.

        Foreach operations by hand leave no trace in a DTensor's version, which optimizers' steps do. So what an earlier
        forward has left is used again only if its backward is still to come and nobody had gradients to step with, or
        if the user has asked to keep it after backward.

        Args:
            in_backward: It is for the backward of what the last gather was for.
        """
        try:
            if True in [bucket.was_replaced() for bucket in self.buckets]:  # each has to look
                self.reshard()
                for bucket in self.buckets:
                    bucket.take_over()
        except NoDataError:
            raise self._no_data_error() from None
        version = tuple(bucket.version for bucket in self.buckets)
        if version != self._gathered_version:
            if self._gathers is not None or self.gathered:
                self._free()  # kept since before the shards changed
            self._drop_pieces()
        number = -1 if self.schedule is None else self.schedule.forward_number
        is_left_over = not in_backward and self._gathered_in not in (number, number + 1)  # the latter: by hand
        if is_left_over and (self._gathers is not None or self.gathered) and not self._is_still_good():
            self._free()
            self._drop_pieces()
        if self._gathers is None and not self.gathered:
            self._gathers = [bucket.start_gather() for bucket in self.buckets]
            self._gathered_version = version
            self._gathered_in = number
            self._may_change = self._holds_gradients()
            self._kept = False

    def gather_by_hand(self) -> None:
        """Start to gather for the forward to come."""
        left_over = self._gathers is not None or self.gathered
        if left_over and not self._kept and (self._may_change or self._holds_gradients()):
            self._free()
        self.start_gather()
        self._by_hand = self._asked_for = True
        self._gathered_in = 0 if self.schedule is None else self.schedule.forward_number + 1

    def reshard_by_hand(self) -> None:
        """Free, and let no backward of a pipeline gather again."""
        self._asked_for = False
        self.reshard()

    def show_for_split_backward(self) -> None:
        """Show what is gathered, or was asked for, to who computes gradients of inputs and of weights apart.

        Only while backwards neither reduce nor free nor end: what torch's pipelines say before each of them.
        """
        options, schedule = self.options, self.schedule
        if schedule is None or schedule.is_last_backward or options.reshard_after_backward:
            return
        if not options.requires_gradient_sync and (self._asked_for or self.gathered):
            self.unshard(in_backward=True)

    def _is_still_good(self) -> bool:
        """Whether what an earlier forward has left can be used by another one."""
        if self._kept:
            return True
        if self._may_change or self._holds_gradients():
            return False
        if self._by_hand and not torch.is_grad_enabled():
            return True
        return any(reference() is not None for reference in self._passes)

    def _no_data_error(self) -> RuntimeError:
        roots = (self.schedule.units[0] if self.schedule is not None else self).modules
        names = [name for root in roots for name, parameter in root.named_parameters() if parameter.is_meta]
        return RuntimeError(
            f"parameters are still on the meta device when they are first gathered: {', '.join(names)}\n"
            "  seen: no data to gather\n"
            "  try: model.to_empty(device=...) and then initialise them, or load a checkpoint, before training"
        )

    def finish_gather(self, *, keep_pieces: bool = False) -> None:
        """Have the whole parameters, and let the modules see them."""
        self._receive(keep_pieces=keep_pieces)
        if not self._showing_wholes:
            self._showing_wholes = True
            for bucket in self.buckets:
                bucket.show_wholes()

    def _holds_gradients(self) -> bool:
        """Whether an optimizer would change a parameter."""
        return any(param.reduced_gradient is not None for bucket in self.buckets for param in bucket.params)

    def unshard(self, *, keep_pieces: bool = False, in_backward: bool = False) -> None:
        """Gather and show; ``keep_pieces``: and keep the part that a smaller world asks of this rank for backward."""
        self.start_gather(in_backward=in_backward)
        self.finish_gather(keep_pieces=keep_pieces)

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

    def _receive(self, *, keep_pieces: bool = False) -> None:
        if self._gathers is not None:
            gathers, self._gathers = self._gathers, None
            for bucket, gather in zip(self.buckets, gathers, strict=True):
                bucket.finish_gather(gather.wait(), keep_piece=keep_pieces)

    @property
    def splits_gradients(self) -> bool:
        """Whether some gradients are split over a shard axis."""
        return any(reducer.scatter is not None for reducer in self.reducers)

    @property
    def adds_over_ranks(self) -> bool:
        """Whether there are gradients to be reduced over several ranks."""
        return any(r.ranks > 1 and any(p.sharded.requires_grad for p in r.params) for r in self.reducers)

    def use_smaller_world(self, world: tuple[dist.ProcessGroup, int] | None) -> None:
        """Between forward and backward, keep the parameters split over that group, as its member number so-and-so."""
        for bucket in self.buckets:
            bucket.keep_pieces = None if bucket.group is None else world
            bucket.piece = None

    def _drop_pieces(self) -> None:
        for bucket in self.buckets:
            bucket.piece = None

    def _free(self) -> None:
        self._by_hand = False
        self._receive()  # a prefetch that nobody used
        for bucket in self.buckets:
            if bucket.gathered:
                bucket.free()

    # -- forward -------------------------------------------------------------------------------------------------

    @runs_eagerly
    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.held:
            return self._before_held_forward(args, kwargs)
        schedule = self.schedule or self._become_root()
        schedule.forget_failed_backward()
        recomputing = self._in_backward and schedule.in_backward
        if recomputing:
            self.unshard(in_backward=True)  # which does nothing more, unless backward itself needs no parameters
        elif self._running:
            self.unshard(in_backward=True)  # the module calls itself
        else:
            self._enter_forward(module, schedule)
        args, kwargs = self._count_and_cast(args, kwargs)
        a_pass = None if recomputing else Pass(self)
        if a_pass is not None:
            a_pass.version = self._gathered_version
        if a_pass is not None and torch.is_grad_enabled():
            args, kwargs = mark_inputs(a_pass, args, kwargs)
        self._running.append(a_pass)
        return args, kwargs

    def _count_and_cast(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch._C._current_graph_task_id() != -1:  # autograd is running a backward, in which forwards are repeated
            self.counts.recomputations += 1
        else:
            self.counts.forwards += 1
        policy = self.options.mp_policy
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = cast((args, kwargs), policy.param_dtype)
        return args, kwargs

    def _before_held_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.finish_gather()
        return self._count_and_cast(args, kwargs)

    def call(self, module: nn.Module, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of one of the unit's modules as if it were its forward."""
        args, kwargs = self._before_forward(module, args, kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            output = self._after_forward(module, args, output)
        return output

    def _enter_forward(self, module: nn.Module, schedule: Schedule[Unit]) -> None:
        first = id(module) not in self._to_run or len(self._to_run) == len(self.modules)
        if first:
            self._to_run = {id(m) for m in self.modules}
            if self.is_root:
                self._structure.check(self._known_parameters)
                schedule.begin_forward()
                if self.wait_for is not None:
                    self.platform.current_stream().wait_event(self.wait_for)
                    self.wait_for = None
            elif not schedule.in_forward and not schedule.in_backward:
                schedule.forward_number += 1  # the unit runs on its own
        self.unshard(keep_pieces=torch.is_grad_enabled(), in_backward=schedule.in_backward)
        if first and not schedule.in_backward:
            schedule.enters(self)
            for unit in schedule.next_forward(self) if self.forward_prefetch is None else self.forward_prefetch:
                unit.start_gather()

    def _known_parameters(self) -> Iterator[nn.Parameter]:
        """All parameters below the root that somebody sees to."""
        for child in (child for module in self.modules for child in module.modules()):
            unit, traced = unit_of(child), traced_unit_of(child)
            if unit is not None:
                yield from unit.ignored
                for param in (param for bucket in unit.buckets for param in bucket.params):
                    yield param.sharded
                    yield param.unsharded
            if traced is not None:
                yield from (param.parameter for param in traced.params)

    @runs_eagerly
    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.held:
            dtype = self.options.mp_policy.output_dtype
            return copy_aliases(output if dtype is None else cast(output, dtype), self._owns_memory_of)
        if not self._running:
            return output  # the hook before forward has raised
        a_pass = self._running.pop()
        if a_pass is not None and a_pass.lent:
            give_back(a_pass)
        if self.options.mp_policy.output_dtype is not None:
            output = cast(output, self.options.mp_policy.output_dtype)
        if a_pass is None:
            return output  # a recomputation inside of this unit's backward, which needs the parameters next
        schedule = self.schedule
        assert schedule is not None
        output = copy_aliases(output, self._owns_memory_of)
        differentiable = [t for t in tensors_in(output) if t.requires_grad and not t.is_leaf]
        if differentiable and not torch.is_grad_enabled():  # those that it has made; others it has passed through
            given = {id(tensor) for tensor in tensors_in(args)}
            differentiable = [t for t in differentiable if id(t) not in given]
        if differentiable:
            watch_outputs(a_pass, differentiable)
            if differentiable and not schedule.in_backward:
                self._ahead += 1
                self._passes = [reference for reference in self._passes if reference() is not None]
                self._passes.append(weakref.ref(a_pass))
        if not self._running:
            self._to_run.discard(id(module))
            if self._to_run:
                self.show_shards()  # the other modules of the unit need the data, or never run
            else:
                self._leave_forward(schedule, with_backward=bool(differentiable))
        return output

    def interrupted(self) -> None:
        """A forward of the unit was cut short by what is no ``Exception``, for which torch calls no hooks."""
        self._running.clear()
        self._to_run.clear()
        self.show_shards()

    def _leave_forward(self, schedule: Schedule[Unit], *, with_backward: bool) -> None:
        schedule.leaves(self)
        for bucket in self.buckets:
            bucket.check_untouched()
        if not with_backward:
            self._drop_pieces()
        keeps = not self.options.reshard_after_forward or self.is_root or schedule.in_backward
        if (with_backward and keeps) or (self._by_hand and not torch.is_grad_enabled()):
            self.show_shards()  # backward starts with the root's parameters, or will soon be here: keep their data
        else:
            self.reshard()
        if self.is_root:
            schedule.end_forward()

    def _owns_memory_of(self, tensor: torch.Tensor) -> bool:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return False
        pointer = tensor.untyped_storage().data_ptr()
        return pointer != 0 and any(bucket.owns_memory_of(pointer) for bucket in self.buckets)

    def begin_step(self) -> None:
        """The root's forward starts; an earlier one may have been cut short by an interrupt."""
        if not self.is_root:
            self._to_run.clear()
            self._running.clear()

    def end_root_forward(self) -> None:
        """The root's forward is through: no module shows whole parameters, no prefetch was in vain."""
        if self._gathers is not None or (self._showing_wholes and self.options.reshard_after_forward):
            self.reshard()
        else:
            self.show_shards()

    def _become_root(self) -> Schedule[Unit]:
        """The first unit whose forward runs is the root of all units below it; so far they may have had their own."""
        units = list(dict.fromkeys(u for m in self.modules for child in m.modules() if (u := unit_of(child))))
        earlier = list(dict.fromkeys(u.schedule for u in units if u.schedule is not None))
        for schedule in earlier:
            schedule.forget_failed_backward()
            if schedule.in_backward:
                raise RuntimeError(
                    f"the forward of {type(self.modules[0]).__name__} ran inside of a backward of modules in it\n"
                    f"  seen: its first forward, in the backward of {type(schedule.units[0].modules[0]).__name__}\n"
                    "  try: run the whole model's forward once before"
                )
        _check_one_way(self.modules[0], units)
        merged = Schedule(list(dict.fromkeys([*units, *(u for schedule in earlier for u in schedule.units)])))
        merged.is_last_backward = self.is_last_backward
        for schedule in earlier:
            merged.take_over(schedule)
        for unit in merged.units:
            unit.schedule = merged
        for unit in units:
            unit.is_root = unit is self
        return merged

    # -- backward ------------------------------------------------------------------------------------------------

    @runs_eagerly
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
        self.counts.backwards += 1
        self._reached_in = number
        if not self._in_backward:
            self._in_backward = True
            if self.options.unshard_in_backward:
                self.unshard(in_backward=True)
            if a_pass.version != self._gathered_version:
                raise RuntimeError(
                    "a parameter was changed between a forward and its backward\n"
                    f"  unit: {type(self.modules[0]).__name__}; seen: an in-place change, such as an optimizer's step\n"
                    "  try: all backwards of a forward before the step"
                )
            for reducer in self.reducers:
                reducer.give_back()
            for unit in schedule.next_backward(self) if self.backward_prefetch is None else self.backward_prefetch:
                # In its first backward a unit is not gathered ahead: if something uses its parameters before it is
                # reached, their memory is still empty, and torch says so.
                if unit.counts.backwards > 0 and unit.options.unshard_in_backward:
                    unit.start_gather(in_backward=True)

    def _check_reached(self, gradient: torch.Tensor) -> None:
        """A gradient of a whole parameter arrives: it was computed from freed memory if nothing told of backward."""
        del gradient
        schedule = self.schedule
        if (
            self.held
            or self._running
            or self._showing_wholes
            or (schedule is not None and schedule.in_backward_number == self._reached_in)
        ):
            return
        raise RuntimeError(
            "backward went into a unit through a tensor that its forward did not return\n"
            f"  unit: {type(self.modules[0]).__name__}; seen: a gradient of its parameters, which are freed by now\n"
            "  try: return the tensor from forward, in any container or dataclass, instead of keeping it elsewhere "
            "(such as self.aux_loss)"
        )

    @runs_eagerly
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
        if any(reducer.has_gradients() for reducer in self.reducers):
            return True
        return self._syncs and any(r.is_due(self.options.requires_all_reduce) for r in self.reducers)

    @property
    def _syncs(self) -> bool:
        """Whether the end of a backward reduces gradients."""
        return self.options.requires_gradient_sync and not self.defers

    def _finish_backward(self, schedule: Schedule[Unit]) -> None:
        self._in_backward = False
        self.counts.finishes += 1
        options = self.options
        with torch.no_grad():
            self._let_go()  # before gradients are packed, which takes memory again
            schedule.receive_reductions()
            for reducer in self.reducers:
                reducer.collect(options.mp_policy.reduce_dtype, keep=not self._syncs, mean=options.average)
            self._may_change |= self._syncs
            if not self._syncs:
                schedule.advance_reductions()
                if options.show_sums:
                    for reducer in self.reducers:
                        reducer.show_pending()
                return
            how = self._reduce_options()
            started = [reducer.reduce(how, schedule.shares) for reducer in self.reducers]
            schedule.advance_reductions()  # behind these: on links that they share, the first ones are waited for first
            for reduction in started:
                if reduction is not None:
                    schedule.add(reduction)

    def _let_go(self) -> None:
        """Backward needs the whole parameters no more; a forward in whose middle it ran still does."""
        if self._running:
            return
        self._drop_pieces()
        if self.options.reshard_after_backward:
            self.reshard()
        else:
            self._kept = True
            self.show_shards()

    def is_resharded(self) -> bool:
        """Whether the modules show sharded parameters and, unless asked to keep them, no whole parameter has data."""
        if self._running:
            return True  # the backward ran inside of a forward, which still needs them
        if not self.options.reshard_after_backward:
            return not self._showing_wholes
        return not self._showing_wholes and self._gathers is None and not any(b.gathered for b in self.buckets)

    def _reduce_options(self) -> ReduceOptions:
        options = self.options
        return ReduceOptions(
            average=options.average,
            factor=options.gradient_scale,
            all_reduce=options.requires_all_reduce,
            dtype=options.mp_policy.reduce_dtype,
            result_dtype=torch.float32 if options.mp_policy.apply_grad_on_fp32_main_grad else None,
            share=options.share_all_reduces,
            show=options.show_sums,
            divide_by=options.divide_by,
            hook=options.reduced_hook,
            reduce_scatter_with=options.reduce_scatter_with,
            zeros=options.zeros,
        )

    # -- whole for many forwards and backwards, in any order, for who asks for the reduction himself ----------------

    def prepared_units(self) -> list[Unit]:
        """This unit and all below it, in module order, with a schedule."""
        schedule = self.schedule or self._become_root()
        schedule.forget_failed_backward()
        self._structure.check(self._known_parameters)
        below = schedule.units
        if below[0] is not self:  # it has run as a part of a larger root
            below = [u for m in self.modules for child in m.modules() if (u := unit_of(child)) is not None]
        return list(dict.fromkeys(below))

    def groups(self) -> list[dist.ProcessGroup]:
        """The groups over which parameters are gathered and gradients reduced."""
        found: list[dist.ProcessGroup | None] = [bucket.group for bucket in self.buckets]
        for reducer in self.reducers:
            found += [reducer.scatter, *reducer.replicas]
        return list(dict.fromkeys(group for group in found if group is not None))

    def become_held(self) -> None:
        """Start to gather, and leave the parameters whole until :meth:`reduce_now` or :meth:`release`."""
        self.start_gather()
        self.held = True

    @property
    def has_wider_sums(self) -> bool:
        """Whether gradients that wait are kept in another dtype than autograd adds them up in."""
        return any(r.keeps_in_another_dtype(self.options.mp_policy.reduce_dtype) for r in self.reducers)

    def keep_gradients(self) -> None:
        """After a micro-batch: add its gradients up in the dtype of the reduction, where that is another one."""
        dtype = self.options.mp_policy.reduce_dtype
        with torch.no_grad():
            for reducer in self.reducers:
                if reducer.keeps_in_another_dtype(dtype):
                    reducer.collect(dtype, keep=True, mean=self.options.average)

    def reduce_now(self) -> None:
        """Free the whole parameters and start to reduce all gradients, as the end of a backward would."""
        schedule = self.schedule
        assert schedule is not None
        self.held = self.defers = False
        self._finish_backward(schedule)

    def release(self, *, failed: bool) -> None:
        """Free the whole parameters, without a reduction; after a failure gradients that wait are dropped."""
        if failed:
            self.clear_waiting()
        if self.held or failed:
            self.reshard()
        self.held = self.defers = False

    def abandon_backward(self) -> None:
        """Drop the state of a backward that ended with an error."""
        self._in_backward = False
        self._reached = self._ahead = 0
        for reducer in self.reducers:
            reducer.forget_new()
        if not self._running:
            self._to_run.clear()
            self.reshard()

    def clear_waiting(self) -> None:
        """Forget gradients that wait for a reduction."""
        for reducer in self.reducers:
            reducer.clear()
            for param in reducer.params:
                param.unsharded.grad = None

    def clear_gradients(self, *, set_to_none: bool) -> None:
        """Forget gradients, also those that wait for a reduction."""
        if self.schedule is not None:
            self.schedule.finish_reductions()
        for reducer in self.reducers:
            reducer.clear()
        for bucket in self.buckets:
            for param in bucket.params:
                param.clear_gradient(set_to_none=set_to_none)


def _check_one_way(root: nn.Module, units: list[Unit]) -> None:
    """Make sure that all units average gradients, or all add them up, where nobody has said what they should do.

    Raises:
        ValueError: No factor of the loss is right for both.
    """
    silent = [unit for unit in units if not unit.options.chose_reduction and unit.adds_over_ranks]
    average, add = ([unit for unit in silent if unit.options.average is way] for way in (True, False))
    if average and add:
        names = {module: name for name, module in root.named_modules()}
        one, other = (f"{names[m]!r}" if names[m] else "the root" for m in (average[0].modules[0], add[0].modules[0]))
        raise ValueError(
            f"cannot train {type(root).__name__}: some of its units average gradients over ranks, others add them up, "
            "so that no factor of the loss is right for both\n"
            f"  seen: {one} averages, the default of plain parameters; {other} adds up, that of DTensors\n"
            "  try: set_reduce_op_type('avg') on the root, which sets all, for a loss that is each rank's mean (FSDP2 "
            "does so); or 'sum', for a loss that is each rank's share; or for each unit what it does now"
        )


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that ``module`` was wrapped as, or None."""
    return module.__dict__.get("_hyper_parallel_unit")


def traced_unit_of(module: nn.Module) -> Any:
    """The unit that ``module`` was wrapped as for ``torch.compile`` to trace, without hooks, or None."""
    return module.__dict__.get("_hyper_parallel_traced_unit")


def is_wrapped(module: nn.Module) -> bool:
    """Whether ``module`` was wrapped, in either way."""
    return unit_of(module) is not None or traced_unit_of(module) is not None


def nested_units(module: nn.Module) -> Iterator[Unit]:
    """All units in ``module`` and its submodules, each once, in module order."""
    seen: list[Unit] = []
    for child in module.modules():
        unit = unit_of(child)
        if unit is not None and unit not in seen:
            seen.append(unit)
            yield unit


def nested_traced_units(module: Any) -> list[Any]:
    """The units in ``module`` that were made for ``torch.compile`` to trace, in module order."""
    return [unit for child in module.modules() if (unit := traced_unit_of(child)) is not None]
