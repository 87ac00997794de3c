"""A unit: the parameters of one `fully_shard` call, gathered, shown, freed and reduced by the hooks of its modules.

`ShardedState` is the location of the parameters' data. A `_GatherRecord` describes the last gather, a `ForwardCall` (in
`hooks`) one call of a module, and a `_BackwardRecord` the progress of the current backward. Hooks are named in
chronological order, as in FSDP2: `pre_forward`, `post_forward`, `pre_backward`, `post_backward`, `finalize_backward`.

Hooks on outputs run `pre_backward`, and a node in the autograd graph behind the inputs runs `post_backward`. A unit
has no such node if none of its inputs needs a gradient: its gradients are reduced at the end of the root's backward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.core.common.errors import InvalidState, InvalidValue, class_name
from hyper_parallel.core.common.torch_compat import P, R, record_function, runs_eagerly
from hyper_parallel.core.fully_shard.bucket import Bucket, NoDataError
from hyper_parallel.core.fully_shard.comm import UNNAMED, GroupLog, Pending
from hyper_parallel.core.fully_shard.hooks import (
    ForwardCall,
    cast,
    copy_aliases,
    mark_inputs,
    refuse_lazy,
    restore_containers,
    tensors_in,
    watch_outputs,
)
from hyper_parallel.core.fully_shard.param import ManagedParam
from hyper_parallel.core.fully_shard.reduce import GradientReducer
from hyper_parallel.core.fully_shard.schedule import Schedule, Structure, log_of
from hyper_parallel.core.fully_shard.utils import UnitOptions
from hyper_parallel.platform import Platform


class ShardedState(Enum):
    """Location of the data of a unit's parameters; `Unit.shows_unsharded` is which parameters its modules show.

    The two differ on purpose. Between forward and backward of the root, and while parameters are kept for the next
    forward, modules already show the shards to optimizers although the unsharded data stays.
    """

    SHARDED = auto()  # only in the shards
    POST_FORWARD_SHARDED = auto()  # also sharded over the smaller post-forward mesh, for a cheaper second gather
    UNSHARDING = auto()  # a gather is under way
    UNSHARDED = auto()  # also in the unsharded parameters


class StepControl(Enum):
    """Source of the decisions when to gather parameters and reduce gradients."""

    HOOKS = auto()  # forward and backward hooks
    UNSHARDED_FOR_STEP = auto()  # the caller decides both: forward and backward leave the parameters alone
    DEFERRED_SYNC = auto()  # the caller decides the reduction; each forward still gathers and frees


@dataclass(slots=True)
class _GatherRecord:
    """Purpose of the last gather, and the conditions under which its result may be reused.

    Attributes:
        works: The gathers under way, one per bucket.
        version: Version of the shards that were gathered.
        forward_number: The schedule's forward that they were gathered for; the next one after `unshard()`.
        may_change: True if there have been gradients at or since the gather. An optimizer may then step, and manual
            foreach operations do not change the versions.
        by_user: Gathered by `unshard()`, for any number of forwards without gradients.
        kept_after_backward: Kept by a backward, until the shards change.
        reduced: True if gradients have been reduced since the gather.
    """

    works: list[Pending] = field(default_factory=list)
    version: tuple[tuple[int, ...], ...] = ()
    forward_number: int = -1
    may_change: bool = False
    by_user: bool = False
    kept_after_backward: bool = False
    reduced: bool = False


@dataclass(slots=True)
class _BackwardRecord:
    """Progress of one backward in a unit.

    Attributes:
        number: The schedule's number of the backward; -1: no pre-backward since the last one ended.
        under_way: True between pre-backward and the collection of gradients.
        open_calls: Number of forward calls between their pre-backward and their post-backward.
    """

    number: int = -1
    under_way: bool = False
    open_calls: int = 0


@dataclass
class _Wrapping:
    """Arguments that a unit was made with, for copies of it.

    Attributes:
        original_classes: Class of each module before wrapping, by its id.
        options: Options before any method changed them.
        post_forward_mesh: Post-forward mesh when wrapped; None: no smaller mesh.
        storage: Storage that was passed to the unit's buckets.
        grouping: Which parameters communicate together.
        ignored: Parameters that the call ignored.
        forward_methods: Other methods that run as forward does, by module id.
        copy: Implementation of `copy.deepcopy` for a module; None: refuse.
    """

    original_classes: dict[int, type]
    options: UnitOptions
    post_forward_mesh: tuple[dist.ProcessGroup, int] | None = None
    storage: Any = None
    grouping: Any = None
    ignored: list[nn.Parameter] = field(default_factory=list)
    forward_methods: dict[int, list[str]] = field(default_factory=dict)
    copy: Callable[[nn.Module, dict[int, Any]], nn.Module] | None = None


def _in_range(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that runs a unit's method inside a profiler range of that name."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def ranged(*args: P.args, **options: P.kwargs) -> R:
            unit: Any = args[0]
            with record_function(name, unit.fqn):
                return method(*args, **options)

        return ranged

    return decorate


class Unit:
    """Parameters of one call of `fully_shard` or `hsdp`, and the modules whose forward uses them."""

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
        self.wrapping = _Wrapping({id(module): type(module) for module in self.modules}, replace(options))
        self.forward_prefetch: list[Unit] | None = None
        self.backward_prefetch: list[Unit] | None = None
        self.wait_for: Any = None  # event that the next forward's gathers wait for
        self.schedule: Schedule[Unit] | None = None
        self.is_last_backward = True  # used until there is a schedule
        self.is_root = False
        self.number: dict[GroupLog, int] = {}  # 1-based index of this unit among the units of each group
        self.identity = (1, True)  # root only: interval in steps at which ranks compare, and whether names must match
        self.post_forward_mesh: tuple[dist.ProcessGroup, int] | None = None
        self.state = ShardedState.SHARDED
        self.shows_unsharded = False
        self.control = StepControl.HOOKS
        self.backward = _BackwardRecord()
        self.was_in_backward = False  # ever
        self._gather = _GatherRecord()
        self._asked_for = False  # True from `unshard()` to `reshard()`
        self._was_reduced = False  # since `zero_grad()` of the module
        self._calls: list[ForwardCall | None] = []  # stack of running forward calls; None: a recomputation
        self._modules_to_run: set[int] = set()  # modules of the unit whose forward has not run yet
        self._calls_ahead = 0  # forward calls without a post-backward since the last end of a backward
        self._past_calls: list[weakref.ref[ForwardCall]] = []  # forward calls whose graph may still exist
        self._structure = Structure(self.modules)
        self._log()
        for param in self.params:
            param.on_gradient = self._check_pre_backward
            param.watch()
        for module in self.modules:
            # Outside of hooks that users registered before, so that these see the module's view and not shards.
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            # Also if forward raises: otherwise modules would still show unsharded parameters, which an optimizer or a
            # state dict would mistake for the shards.
            module.register_forward_hook(self.post_forward, always_call=True)

    def _log(self) -> None:
        """Register this unit in the logs of its groups, which ranks compare."""
        if self.platform.compares_collectives:
            return
        for bucket in self.buckets:
            bucket.log = log_of(bucket.group)
        for reducer in self.reducers:
            groups = [group for group in (reducer.scatter, *reducer.replicas) if group is not None]
            reducer.logs = [log for group in dict.fromkeys(groups) if (log := log_of(group)) is not None]
        logs = [bucket.log for bucket in self.buckets] + [log for reducer in self.reducers for log in reducer.logs]
        for log in dict.fromkeys(log for log in logs if log is not None):
            log.units += 1
            self.number[log] = log.units

    # -- gather and free -----------------------------------------------------------------------------------------

    @property
    def params(self) -> list[ManagedParam]:
        """The parameters of all buckets."""
        return [param for bucket in self.buckets for param in bucket.params]

    @property
    def fqn(self) -> str:
        """Path of the unit's first module from the root; "" for the root, and before its first forward."""
        return self.buckets[0].unit_name if self.buckets else ""

    @property
    def is_unsharded(self) -> bool:
        """True if the unsharded parameters have their data."""
        return self.state is ShardedState.UNSHARDED

    @property
    def _has_data(self) -> bool:
        """True if the unsharded parameters have their data, or a gather is under way."""
        return self.state is ShardedState.UNSHARDED or self.state is ShardedState.UNSHARDING

    def start_gather(self, *, in_backward: bool = False) -> None:
        """Start to gather the current shards, unless they are gathered or being gathered.

        The result for an earlier forward is reused only in two cases. Either its backward is still ahead and there were
        no gradients to step with, or the user has asked to keep it after backward.

        Args:
            in_backward: The gather serves the backward of the last gather's forward.
        """
        if not in_backward:
            self.check_assigned()
        try:
            # A list, not `any`: each bucket has to check. A bucket that did not would register the old shards again
            # below, and silently drop the ones that the user has put there.
            if True in [bucket.was_replaced() for bucket in self.buckets]:
                self.reshard()
                for bucket in self.buckets:
                    bucket.take_over()
        except NoDataError:
            raise self._no_data_error() from None
        version = tuple(bucket.version for bucket in self.buckets)
        number = -1 if self.schedule is None else self.schedule.forward_number
        gather = self._gather
        # FSDP2 gathers nothing while the unit is unsharded. Here the data may have been kept (by `unshard()`, after
        # backward, for a later backward), or prefetched for a forward that never ran. An optimizer may have stepped
        # since, and stale weights would be silent.
        has_data = self._has_data
        # number + 1: gathered by hand, for the next forward.
        is_left_over = has_data and not in_backward and gather.forward_number not in (number, number + 1)
        if version != gather.version or (is_left_over and not self._is_still_good()):
            if has_data:
                self._free()
            self._drop_post_forward_shards()  # as stale as the unsharded parameters
        if self.state is ShardedState.SHARDED or self.state is ShardedState.POST_FORWARD_SHARDED:
            # All buckets start before the first wait. The engine has no stream except for copies of shards from the
            # host: collectives start after all work on the current stream, e.g. an optimizer's step, and run on the
            # process group's stream.
            self._note_gather()
            with record_function("FSDP::all_gather", self.fqn):
                works = [bucket.storage.gather(bucket.start_gather) for bucket in self.buckets]
            self._gather = _GatherRecord(works, version, number, self._holds_gradients())
            self.state = ShardedState.UNSHARDING

    def _note_gather(self) -> None:
        logged = [bucket for bucket in self.buckets if bucket.log is not None]
        if logged and self.schedule is not None:
            self.schedule.compare_units()
        for bucket in logged:
            assert bucket.log is not None
            bucket.log.note("gather", *bucket.keys.get(bucket.log, UNNAMED))

    def gather_by_hand(self) -> None:
        """Start to gather for the next forward."""
        gather = self._gather
        if self._has_data and not gather.kept_after_backward and (gather.may_change or self._holds_gradients()):
            self._free()
        self.start_gather()
        # Set afterwards, because a gather begins a new record. The number is the next forward's: this forward reuses
        # the data, the one after it does not.
        self._asked_for = True
        self._gather.by_user = True
        self._gather.forward_number = 0 if self.schedule is None else self.schedule.forward_number + 1

    def reshard_by_hand(self) -> None:
        """Free the parameters, and prevent a pipeline's backward from gathering them again."""
        self.check_assigned()
        self._asked_for = False
        self.reshard()

    def check_assigned(self) -> None:
        """Raise if a parameter was assigned to in a way that has no effect."""
        for bucket in self.buckets:
            bucket.check_assigned()

    def show_for_split_backward(self) -> None:
        """Show the gathered or requested parameters to a pipeline that splits input and weight gradients.

        Only while backwards neither reduce, free nor end: the flags that torch's pipelines set before each backward.
        """
        options, schedule = self.options, self.schedule
        if schedule is None or schedule.is_last_backward or options.reshard_after_backward:
            return
        if not options.requires_gradient_sync and (self._asked_for or self.is_unsharded):
            self.unshard(in_backward=True)

    def _is_still_good(self) -> bool:
        """Return True if another forward can use the parameters that were gathered for an earlier one.

        Optimizer steps increment the versions, but manual foreach operations do not increment a DTensor's. So the
        parameters are not reused where there are gradients to step with.
        """
        gather = self._gather
        if gather.kept_after_backward:
            # If user code skips parameters without a gradient, or steps in a hook on it, only the owner has changed its
            # parameter. All ranks know only that gradients were reduced, and all of them must gather or none.
            return not (gather.reduced and self._has_owners)
        if gather.may_change or self._holds_gradients():
            return False
        if gather.by_user and not torch.is_grad_enabled():
            return True
        return any(reference() is not None for reference in self._past_calls)

    def _no_data_error(self) -> InvalidState:
        roots = (self.schedule.units[0] if self.schedule is not None else self).modules
        names = [name for root in roots for name, parameter in root.named_parameters() if parameter.is_meta]
        return InvalidState(
            f"parameters are still on the meta device when they are first gathered: {', '.join(names)}\n"
            "  seen: no data to gather\n"
            "  try: model.to_empty(device=...) and then initialise them, or load a checkpoint, before training"
        )

    def finish_gather(self, *, keep_post_forward_shards: bool = False) -> None:
        """Wait for the unsharded parameters, and show them in the modules."""
        self._receive(keep_post_forward_shards=keep_post_forward_shards)
        if not self.shows_unsharded:
            self.shows_unsharded = True
            for bucket in self.buckets:
                bucket.show_unsharded()

    @property
    def _has_owners(self) -> bool:
        return any(reducer.owned for reducer in self.reducers)

    def _holds_gradients(self) -> bool:
        """Return True if an optimizer would change a parameter.

        Other ranks cannot see the gradient of a parameter with an owner. They assume one once gradients were reduced.
        """
        if self._has_owners and self._was_reduced:
            return True
        return any(
            param.placement.owner is None and param.reduced_gradient is not None
            for bucket in self.buckets
            for param in bucket.params
        )

    def unshard(self, *, keep_post_forward_shards: bool = False, in_backward: bool = False) -> None:
        """Gather and show the parameters; if asked to, keep this rank's shard over the post-forward mesh."""
        self.start_gather(in_backward=in_backward)
        self.finish_gather(keep_post_forward_shards=keep_post_forward_shards)

    def show_shards(self) -> None:
        """Show the sharded parameters in the modules; the gathered data stays."""
        if self.shows_unsharded:
            self.shows_unsharded = False
            for bucket in self.buckets:
                bucket.show_shards()

    def reshard(self) -> None:
        """Free the unsharded parameters and show the shards in the modules."""
        self.show_shards()  # first, because freeing waits for an unused prefetch and raises if a peer has died
        self._free()

    def _receive(self, *, keep_post_forward_shards: bool = False) -> None:
        if self.state is ShardedState.UNSHARDING:
            works, self._gather.works = self._gather.works, []
            # SHARDED until all is received: a wait raises if a peer has died, and missing data must be gathered again.
            self.state = ShardedState.SHARDED
            with record_function("FSDP::all_gather_copy_out", self.fqn):
                for bucket, work in zip(self.buckets, works, strict=True):
                    bucket.finish_gather(work.wait(), keep_post_forward_shard=keep_post_forward_shards)
            self.state = ShardedState.UNSHARDED

    def use_post_forward_mesh(self, mesh: tuple[dist.ProcessGroup, int] | None) -> None:
        """Keep post-forward shards over `mesh[0]`, in which this rank has index `mesh[1]`; None: keep none."""
        self.post_forward_mesh = mesh
        for bucket in self.buckets:
            bucket.post_forward_mesh = None if bucket.group is None else mesh
        self._drop_post_forward_shards()

    def _drop_post_forward_shards(self) -> None:
        for bucket in self.buckets:
            bucket.post_forward_shard = None
        if self.state is ShardedState.POST_FORWARD_SHARDED:
            self.state = ShardedState.SHARDED

    def _free(self) -> None:
        self._gather.by_user = False
        self._receive()  # an unused prefetch, whose collective still writes to the buffer
        for bucket in self.buckets:
            if bucket.gathered:
                bucket.free()
        self.state = ShardedState.SHARDED
        if self.post_forward_mesh is not None and any(b.post_forward_shard is not None for b in self.buckets):
            self.state = ShardedState.POST_FORWARD_SHARDED

    @property
    def splits_gradients(self) -> bool:
        """True if some gradients are sharded over a shard axis."""
        return any(reducer.scatter is not None for reducer in self.reducers)

    @property
    def adds_over_ranks(self) -> bool:
        """True if there are gradients to reduce over several ranks."""
        return any(r.ranks > 1 and any(p.sharded.requires_grad for p in r.params) for r in self.reducers)

    # -- forward -------------------------------------------------------------------------------------------------

    @runs_eagerly
    @_in_range("FSDP::pre_forward")
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather unless prefetched, cast inputs, and register the hooks for this call's backward."""
        if self.control is StepControl.UNSHARDED_FOR_STEP:
            self.finish_gather()
            return self._cast_inputs(args, kwargs)
        schedule = self.schedule or self._become_root()
        # Before any state is read: after a backward that raised, `under_way` is still set, and this forward would be
        # taken for a recomputation inside of it, whose parameters are never freed.
        schedule.forget_failed_backward()
        recomputing = self.backward.under_way and schedule.in_backward
        if recomputing:
            self.unshard(in_backward=True)  # a no-op, unless backward itself needs no parameters
        elif self._calls:
            self.unshard(in_backward=True)  # the module calls itself
        else:
            self._enter_forward(module, schedule)
        args, kwargs = self._cast_inputs(args, kwargs)
        # A recomputation by activation checkpointing belongs to the backward under way. It has no backward to wait
        # for, and would free the parameters that the enclosing backward needs.
        call = None if recomputing else ForwardCall(self)
        if call is not None:
            call.version = self._gather.version
            if torch.is_grad_enabled():
                args, kwargs = mark_inputs(call, args, kwargs)
        self._calls.append(call)  # last: if anything above raises, `post_forward` finds no call and does nothing
        return args, kwargs

    def _cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        policy = self.options.mp_policy
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = cast((args, kwargs), policy.param_dtype)
        return args, kwargs

    def run_as_forward(self, module: nn.Module, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of one of the unit's modules as if it were the forward."""
        args, kwargs = self.pre_forward(module, args, kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            output = self.post_forward(module, args, output)
        return output

    def _enter_forward(self, module: nn.Module, schedule: Schedule[Unit]) -> None:
        # Of several modules, the first to run gathers for all and the last one frees. A module that runs again before
        # all have run starts over, because some of them may never run.
        first = id(module) not in self._modules_to_run or len(self._modules_to_run) == len(self.modules)
        if first:
            self._modules_to_run = {id(m) for m in self.modules}
            if self.is_root:
                self._structure.check(self._known_parameters)
                schedule.pre_forward()
                if self.wait_for is not None:
                    # On the current stream, which all gathers start after: this one and prefetched ones.
                    self.platform.current_stream().wait_event(self.wait_for)
                    self.wait_for = None
            elif not schedule.in_forward and not schedule.in_backward:
                schedule.count_forward()  # the unit runs on its own
        self.unshard(keep_post_forward_shards=torch.is_grad_enabled(), in_backward=schedule.in_backward)
        # The next units only now, so that their gathers queue up behind the one that forward is waiting for. A forward
        # inside of a backward (activation checkpointing) records no order and prefetches nothing: units run there in
        # backward's order, and forward's next unit has already been freed by backward.
        if first and not schedule.in_backward:
            schedule.note_pre_forward(self)
            for unit in schedule.next_in_forward(self) if self.forward_prefetch is None else self.forward_prefetch:
                unit.start_gather()

    def _known_parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter under the root that is managed or listed in `ignored_params`."""
        for child in (child for module in self.modules for child in module.modules()):
            unit, traced = unit_of(child), traced_unit_of(child)
            if unit is not None:
                yield from unit.wrapping.ignored
                for param in unit.params:
                    yield param.sharded
                    yield param.unsharded
            if traced is not None:
                yield from (param.sharded for param in traced.params)

    @runs_eagerly
    @_in_range("FSDP::post_forward")
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Register backward hooks on the outputs, and free the parameters unless backward needs them soon."""
        if self.control is StepControl.UNSHARDED_FOR_STEP:
            dtype = self.options.mp_policy.output_dtype
            return copy_aliases(output if dtype is None else cast(output, dtype), self._owns_memory_of)
        if not self._calls:
            return output  # `pre_forward` has raised
        call = self._calls.pop()
        if call is not None and call.replaced:
            restore_containers(call)  # before code that may raise, because these lists are the caller's
        if self.options.mp_policy.output_dtype is not None:
            output = cast(output, self.options.mp_policy.output_dtype)
        if call is None:
            return output  # a recomputation inside of this unit's backward, which needs the parameters next
        schedule = self.schedule
        assert schedule is not None
        # The module may return a parameter or a view of one, which would lose its memory when the unit reshards.
        output = copy_aliases(output, self._owns_memory_of)
        differentiable = [t for t in tensors_in(output) if t.requires_grad and not t.is_leaf]
        if differentiable and not torch.is_grad_enabled():  # count new tensors, not inputs that were passed through
            given = {id(tensor) for tensor in tensors_in(args)}
            differentiable = [t for t in differentiable if id(t) not in given]
        if differentiable:
            watch_outputs(call, differentiable)
            # Skipped inside of a backward. Checkpointing recomputes units there before their pre-backward, only for the
            # tensors they save. Such calls have no post-backward, so the unit would wait for them until backward ends.
            if not schedule.in_backward:
                self._calls_ahead += 1
                # The hooks on the outputs keep a call alive. A dead weak reference therefore means that its graph was
                # dropped without a backward, and the gathered parameters are no longer needed for it.
                self._past_calls = [reference for reference in self._past_calls if reference() is not None]
                self._past_calls.append(weakref.ref(call))
        if not self._calls:
            self._modules_to_run.discard(id(module))
            if self._modules_to_run:
                self.show_shards()  # other modules of the unit may still need the data
            else:
                raised = output is None and sys.exc_info()[0] is not None
                hides = output is None and not raised
                self._leave_forward(schedule, with_backward=bool(differentiable), hides=hides, raised=raised)
        if self.buckets:
            refuse_lazy(module, output)
        return output

    def interrupted(self) -> None:
        """Clean up after a forward that ended with a non-`Exception` (e.g. Ctrl-C), for which torch calls no hooks."""
        self._calls.clear()
        self._modules_to_run.clear()
        self.show_shards()

    def _leave_forward(self, schedule: Schedule[Unit], *, with_backward: bool, hides: bool, raised: bool) -> None:
        schedule.note_post_forward(self)
        for bucket in self.buckets:
            bucket.check_untouched()  # before the free, with which in-place changes by forward are lost
        if not with_backward:
            self._drop_post_forward_shards()
        # In a backward that recomputes this forward, the unit is used next: if freed, it would be gathered once more.
        keeps = not self.options.reshard_after_forward or self.is_root or schedule.in_backward
        # A module that returns None may have stored its result elsewhere, and without the data products with freed
        # memory crash the process before the parameters' own check in backward can report the error.
        hides = hides and torch.is_grad_enabled() and any(p.unsharded.requires_grad for p in self.params)
        if (with_backward and keeps) or hides or (self._gather.by_user and not torch.is_grad_enabled()):
            # The data stays, because backward starts with the root or runs soon. The modules show shards all the same:
            # otherwise an optimizer made now, e.g. after an evaluation, would train copies.
            self.show_shards()
        else:
            self.reshard()
        if self.is_root:
            schedule.post_forward(raised=raised)

    def _owns_memory_of(self, tensor: torch.Tensor) -> bool:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return False
        pointer = tensor.untyped_storage().data_ptr()
        return pointer != 0 and any(bucket.owns_memory_of(pointer) for bucket in self.buckets)

    def pre_root_forward(self) -> None:
        """Reset this unit when the root's forward starts, because an interrupt may have cut short an earlier one."""
        if not self.is_root:
            self._modules_to_run.clear()
            self._calls.clear()

    def post_root_forward(self) -> None:
        """Root post-forward: show the shards, and free prefetches that no unit used."""
        # Units that were prefetched by the recorded order, but that this forward did not run: their buffers would stay
        # until a forward runs them.
        was_in_vain = self.state is ShardedState.UNSHARDING
        if was_in_vain or (self.shows_unsharded and self.options.reshard_after_forward):
            self.reshard()
        else:
            self.show_shards()

    def _become_root(self) -> Schedule[Unit]:
        """Make this unit, the first whose forward runs, the root of all units below it, and merge their schedules."""
        units = nested_units(*self.modules)
        earlier = list(dict.fromkeys(u.schedule for u in units if u.schedule is not None))
        for schedule in earlier:
            schedule.forget_failed_backward()
            if schedule.in_backward:
                blame = f"the forward of {class_name(self.modules[0])} ran inside of a backward of modules in it"
                seen = f"seen: its first forward, in the backward of {class_name(schedule.units[0].modules[0])}"
                hint = "run the whole model's forward once before"
                raise InvalidState("cannot make it the root", blame, seen, hint)
        _check_one_way(self.modules[0], units)
        # A submodule may have run alone before, e.g. for an evaluation or to find shapes, and have become a root. Its
        # work under way continues in the merged schedule. FSDP2 raises an error in this case.
        merged = Schedule(list(dict.fromkeys([*units, *(u for schedule in earlier for u in schedule.units)])))
        merged.is_last_backward = self.is_last_backward
        for schedule in earlier:
            merged.take_over(schedule)
        for unit in merged.units:
            unit.schedule = merged
        for unit in units:
            unit.is_root = unit is self
        merged.name_units()
        return merged

    # -- backward ------------------------------------------------------------------------------------------------

    @runs_eagerly
    @_in_range("FSDP::pre_backward")
    def pre_backward(self, call: ForwardCall) -> None:
        """Gather the parameters before backward uses an output of `call`, and prefetch the next unit in backward."""
        if torch.is_grad_enabled():
            blame = "backward with create_graph=True went through a fully_shard unit"
            hint = "create_graph=False, or leave the modules that need second derivatives unwrapped"
            raise self._error("run backward", blame, "its parameters are freed when backward leaves it", hint)
        schedule = self.schedule
        assert schedule is not None
        schedule.pre_backward()
        number = schedule.backward_number
        if number in (call.pre_backward_in, call.post_backward_in):
            return  # another output of the call, or an output that backward reaches after the post-backward
        call.pre_backward_in = number
        backward = self.backward
        if backward.number != number:
            backward = self.backward = _BackwardRecord(number)
        backward.open_calls += 1
        self.was_in_backward = True
        if backward.under_way:
            return  # another call of the unit has gathered already
        backward.under_way = True
        if self.options.unshard_in_backward:
            self.unshard(in_backward=True)
        # After the gather, which records the current version of the shards. Autograd's own check detects nothing,
        # because unsharded parameters are filled through `.data` and their version counters do not change.
        if call.version != self._gather.version:
            blame, hint = "a parameter was changed between a forward and its backward", "all backwards before the step"
            raise self._error("run backward", blame, "seen: an in-place change, such as an optimizer's step", hint)
        for reducer in self.reducers:
            reducer.restore_pending()
        for unit in schedule.next_in_backward(self) if self.backward_prefetch is None else self.backward_prefetch:
            # A unit is not prefetched for its first backward: if an operation uses its parameters before the unit's
            # pre-backward, their memory is still empty, and torch raises an error.
            if unit.was_in_backward and unit.options.unshard_in_backward:
                unit.start_gather(in_backward=True)

    def _check_pre_backward(self, gradient: torch.Tensor) -> None:
        """Raise if a gradient arrives for freed parameters, because no hook has announced the unit's backward."""
        del gradient
        if self.control is StepControl.UNSHARDED_FOR_STEP or self._calls or self.shows_unsharded:
            return
        schedule = self.schedule
        if schedule is not None and schedule.in_backward_number == self.backward.number:
            return  # after the unit's post-backward: autograd may accumulate later
        blame = "backward went into a unit through a tensor that its forward did not return"
        hint = "return the tensor from forward, in any container or dataclass, and keep none in such as self.aux_loss"
        raise self._error("run backward", blame, "seen: a gradient of its parameters, which are freed by now", hint)

    def _error(self, what: str, blame: str, seen: str, hint: str) -> RuntimeError:
        return InvalidState(f"cannot {what}", blame, f"unit: {class_name(self.modules[0])}; {seen}", hint)

    @runs_eagerly
    def post_backward(self, call: ForwardCall) -> None:
        """Handle the input gradients of `call`: after the unit's last call, free the parameters and reduce."""
        schedule = self.schedule
        assert schedule is not None
        schedule.pre_backward()
        if call.pre_backward_in == schedule.backward_number:
            self.backward.open_calls -= 1
        call.post_backward_in = schedule.backward_number
        # retain_graph=True: a call has several post-backwards. Below 0, the unit would be reduced only at the very end.
        self._calls_ahead = max(self._calls_ahead - 1, 0)
        # Several forward calls before one backward share the parameters and their gradients. While one of them is still
        # to be differentiated, freeing would cause another gather, and reducing would communicate twice.
        if self._calls_ahead == 0 and self.backward.open_calls == 0:
            self._reshard_and_reduce(schedule)

    def finalize_backward(self) -> None:
        """Complete the unit after the root's backward: reshard, and reduce the remaining gradients."""
        schedule = self.schedule
        assert schedule is not None
        if self.backward.under_way or self._has_gradients():
            self._reshard_and_reduce(schedule)
        else:
            self._reshard_after_backward()
        self.backward = _BackwardRecord()
        self._calls_ahead = 0
        if not self._calls:
            self._modules_to_run.clear()

    def _has_gradients(self) -> bool:
        """Return True if there are gradients to reduce: new ones, or ones an earlier backward kept and that are due."""
        if any(reducer.has_gradients() for reducer in self.reducers):
            return True
        return self._syncs and any(r.is_due(self.options.requires_all_reduce) for r in self.reducers)

    @property
    def _syncs(self) -> bool:
        """True if the end of a backward reduces gradients."""
        return self.options.requires_gradient_sync and self.control is not StepControl.DEFERRED_SYNC

    def _reshard_and_reduce(self, schedule: Schedule[Unit], *, in_place: bool = False) -> None:
        self.backward.under_way = False
        # The order matters for memory and communication. Freed before packed: the peak is one of the two, not both.
        # Received before packed: the memory that the previous unit sent from returns to the allocator and is reused for
        # this unit's buffer. In FSDP2 a reduce_scatter's input waits for the next post_backward in the same way.
        with torch.no_grad():  # `reduce_now` is called from outside of a backward
            self._reshard_after_backward()
            self._reduce(schedule, in_place=in_place)

    @_in_range("FSDP::post_backward_reduce")
    def _reduce(self, schedule: Schedule[Unit], *, in_place: bool) -> None:
        options = self.options
        # In place there is no buffer whose memory could be reused. A wait would only delay the next computation on this
        # stream, e.g. the backward of the rank's next stage.
        if not in_place:
            schedule.receive_reductions()
        for reducer in self.reducers:
            reducer.collect(options.mp_policy.reduce_dtype, keep=not self._syncs, mean=options.average)
        # Gradients will arrive: an optimizer may step before the next forward and make the kept parameters stale.
        self._gather.may_change |= self._syncs
        if not self._syncs:
            schedule.advance_reductions()  # reductions of units that do sync continue
            if options.show_sums:
                for reducer in self.reducers:
                    reducer.show_pending()
            return
        self._gather.reduced = self._was_reduced = True
        how = replace(options)  # a copy, because they may change for the next backward while this reduction runs
        schedule.compare_units()
        started = [reducer.reduce(how, schedule.fused_all_reduces, in_place=in_place) for reducer in self.reducers]
        # The all_reduces of previous units are issued after these reduce_scatters. On shared links the first issued
        # finishes first, and the next unit waits for the reduce_scatter only. In virtual time this order was never
        # slower, and up to 2.6 % of a step faster.
        if not in_place:
            schedule.advance_reductions()
        for reduction in started:
            if reduction is not None:
                schedule.add(reduction)
                for log in reduction.owner.logs:
                    log.note("reduction", *reduction.owner.bucket.keys[log])

    @_in_range("FSDP::post_backward_reshard")
    def _reshard_after_backward(self) -> None:
        """Free the unsharded parameters after backward, unless it ran inside of a forward that still needs them."""
        if self._calls:
            return
        self._drop_post_forward_shards()
        if self.options.reshard_after_backward:
            self.reshard()
        else:
            self._gather.kept_after_backward = True
            self.show_shards()

    def is_resharded(self) -> bool:
        """Return True if modules show shards and, unless they are to be kept, no unsharded parameter has data."""
        if self._calls:
            return True  # the backward ran inside of a forward, which still needs the parameters
        if not self.options.reshard_after_backward:
            return not self.shows_unsharded
        return not self.shows_unsharded and self.state is ShardedState.SHARDED

    # -- steps by request: unsharded for many forwards and backwards, in any order ---------------------------------

    def prepared_units(self) -> list[Unit]:
        """Return this unit and all units below it, in module order, after making sure that they have a schedule."""
        schedule = self.schedule or self._become_root()
        schedule.forget_failed_backward()
        self._structure.check(self._known_parameters)
        below = schedule.units
        if below[0] is not self:  # the unit has run inside of a larger root
            return nested_units(*self.modules)
        return list(below)

    def groups(self) -> list[dist.ProcessGroup]:
        """List the groups over which parameters are gathered and gradients reduced."""
        found: list[dist.ProcessGroup | None] = [bucket.group for bucket in self.buckets]
        for reducer in self.reducers:
            found += [reducer.scatter, *reducer.replicas]
        return list(dict.fromkeys(group for group in found if group is not None))

    def unshard_for_step(self) -> None:
        """Start to gather, and leave the parameters unsharded until `reduce_now` or `release`."""
        self.start_gather()
        self.control = StepControl.UNSHARDED_FOR_STEP

    def defer_sync(self) -> None:
        """Defer reductions to `reduce_now`, regardless of the options."""
        self.control = StepControl.DEFERRED_SYNC

    @property
    def has_wider_sums(self) -> bool:
        """True if pending gradients are kept in a dtype other than the one autograd accumulates in."""
        return any(r.keeps_in_another_dtype(self.options.mp_policy.reduce_dtype) for r in self.reducers)

    def keep_gradients(self) -> None:
        """After a micro-batch, accumulate its gradients in the reduce dtype where autograd uses another dtype."""
        dtype = self.options.mp_policy.reduce_dtype
        with torch.no_grad():
            for reducer in self.reducers:
                if reducer.keeps_in_another_dtype(dtype):
                    reducer.collect(dtype, keep=True, mean=self.options.average)

    @property
    def can_send_in_place(self) -> bool:
        """True if gradients can be sent from their own memory, and no collective is issued after their reduction."""
        return all(reducer.can_send_in_place(self.options) for reducer in self.reducers)

    def reduce_in_backward(self, *, in_place: bool) -> None:
        """Start to reduce gradients that are all complete; the parameters stay until `free_after_step`.

        The rest of backward may still need them, e.g. for the gradient of an input through a frozen weight.

        Args:
            in_place: Send gradients from their own memory, without waiting for earlier reductions; see
                `can_send_in_place`.
        """
        schedule = self.schedule
        assert schedule is not None
        with torch.no_grad():
            self._reduce(schedule, in_place=in_place)

    def free_after_step(self) -> None:
        """After `reduce_in_backward`, free the unsharded parameters, and reduce gradients that arrived since."""
        if any(reducer.has_gradients() for reducer in self.reducers):
            self.reduce_now()
            return
        self.control = StepControl.HOOKS
        self.backward.under_way = False
        self._reshard_after_backward()

    def reduce_now(self, *, in_place: bool = False) -> None:
        """Free the unsharded parameters and start to reduce all gradients, as the end of a backward would.

        Args:
            in_place: Same as in `reduce_in_backward`.
        """
        schedule = self.schedule
        assert schedule is not None
        self.control = StepControl.HOOKS  # first, because a deferred sync would only collect
        self._reshard_and_reduce(schedule, in_place=in_place)

    def release(self, *, failed: bool) -> None:
        """Free the unsharded parameters without a reduction; after a failure drop pending gradients."""
        if failed:
            self.clear_pending()
        if failed or self.control is StepControl.UNSHARDED_FOR_STEP:
            self.reshard()
        self.control = StepControl.HOOKS

    # -- cleanup after failures --------------------------------------------------------------------------------------

    def abandon_backward(self) -> None:
        """Drop the state of a backward that ended with an error."""
        self.backward = _BackwardRecord()
        self._calls_ahead = 0
        for reducer in self.reducers:
            reducer.forget_new()
        if not self._calls:
            self._modules_to_run.clear()
            self.reshard()

    def clear_pending(self) -> None:
        """Drop gradients that wait for a reduction."""
        for reducer in self.reducers:
            reducer.clear()
            for param in reducer.params:
                param.unsharded.grad = None

    def clear_gradients(self, *, set_to_none: bool) -> None:
        """Clear all gradients, including pending ones."""
        if self.schedule is not None:
            # Reductions that continue due to comm_async or set_is_last_backward(False) would arrive after the zeros.
            self.schedule.finish_reductions()
        self._was_reduced = self._was_reduced and not set_to_none
        for reducer in self.reducers:
            reducer.clear()
        for param in self.params:
            param.clear_gradient(set_to_none=set_to_none)


def _check_one_way(root: nn.Module, units: list[Unit]) -> None:
    """Raise if some units average gradients and others sum them, unless the user has chosen for each.

    Units of plain parameters average by default, units with DTensors sum. This mix used to cause only a warning.

    Raises:
        ValueError: No factor of the loss is right for both kinds of units.
    """
    chosen = [unit for unit in units if unit.options.chose_reduction or unit.options.divide_by is not None]
    silent = [unit for unit in units if unit not in chosen and unit.adds_over_ranks]
    average, add = ([unit for unit in silent if unit.options.average is way] for way in (True, False))
    if average and add:
        names = {module: name for name, module in root.named_modules()}
        one, other = (f"{names[m]!r}" if names[m] else "the root" for m in (average[0].modules[0], add[0].modules[0]))
        blame = (
            "some of its units average gradients over ranks, others add them up, and no factor of the loss fits both"
        )
        seen = f"seen: {one} averages, the default of plain parameters; {other} adds up, that of DTensors"
        hint = (
            "set_reduce_op_type('avg') on the root, which sets all, for a loss that is each rank's mean (FSDP2 does "
            "so); or 'sum', for a loss that is each rank's share; or for each unit what it does now"
        )
        raise InvalidValue(f"cannot train {class_name(root)}", blame, seen, hint)


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that `module` was wrapped as, or None."""
    return module.__dict__.get("_hyper_parallel_unit")


def traced_unit_of(module: nn.Module) -> Any:
    """Return the unit that `module` was wrapped as for `torch.compile` to trace, without hooks, or None."""
    return module.__dict__.get("_hyper_parallel_traced_unit")


def is_wrapped(module: nn.Module) -> bool:
    """Return True if `module` was wrapped, in either way."""
    return unit_of(module) is not None or traced_unit_of(module) is not None


def nested_units(*modules: nn.Module) -> list[Unit]:
    """Return all units in `modules` and their submodules, each once, in module order."""
    found = (unit_of(child) for module in modules for child in module.modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def nested_traced_units(module: Any) -> list[Any]:
    """Return the units in `module` that were made for `torch.compile` to trace, in module order."""
    return [unit for child in module.modules() if (unit := traced_unit_of(child)) is not None]
