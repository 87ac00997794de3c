"""The parameters of one `fully_shard` call: gathered, shown, freed and reduced as its modules' hooks say.

`ShardedState` says where the parameters are; a `_GatherRecord` what the last gather was for, a `ForwardCall` (of
`hooks`) what one call of a module has used, a `_BackwardRecord` how far the backward under way has come. The hooks are
named in the order of time, as FSDP2's: `pre_forward`, `post_forward`, `pre_backward`, `post_backward`,
`finalize_backward`.

Hooks on outputs run `pre_backward`, and a node in the autograd graph behind the inputs runs `post_backward`. A unit
none of whose inputs needs a gradient has no such node: its gradients are reduced at the end of the root's backward.
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
    """Where the data of a unit's parameters is; what its modules show says `Unit.shows_unsharded`.

    The two differ on purpose: between forward and backward of the root, and where parameters are kept for the next
    forward, modules already show the shards to optimizers while the unsharded data stays.
    """

    SHARDED = auto()  # in the shards alone
    POST_FORWARD_SHARDED = auto()  # and once more over the smaller post-forward mesh, for a cheaper second gather
    UNSHARDING = auto()  # a gather has been issued
    UNSHARDED = auto()  # in the unsharded parameters as well


class StepControl(Enum):
    """Who decides when parameters are gathered and gradients reduced."""

    HOOKS = auto()  # forward and backward
    UNSHARDED_FOR_STEP = auto()  # the caller, for both: forward and backward leave the parameters alone
    DEFERRED_SYNC = auto()  # the caller, for the reduction; parameters come and go with each forward


@dataclass(slots=True)
class _GatherRecord:
    """What the last gather was for, and how long its result may be used.

    Attributes:
        works: The gathers under way, one per bucket.
        version: Of the shards that were gathered.
        forward_number: Of the schedule's forward for which they were gathered; for one to come, when asked by the user.
        may_change: Whether gradients were there at the gather, or have come since: an optimizer may step, and foreach
            operations by hand leave no trace in the versions.
        by_user: Gathered by `unshard()`, for as many forwards without gradients as come.
        kept_after_backward: Left by a backward, until the shards change.
        reduced: Whether gradients have been reduced since the gather.
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
    """How far one backward has come in a unit.

    Attributes:
        number: The schedule's number of the backward; -1: no pre-backward since the last one ended.
        under_way: After pre-backward, and gradients not yet collected.
        open_calls: Forward calls between their pre-backward and their post-backward.
    """

    number: int = -1
    under_way: bool = False
    open_calls: int = 0


@dataclass
class _Wrapping:
    """How a unit was made, for copies of it.

    Attributes:
        original_classes: Of its modules, by identity.
        options: As they were before any method changed them.
        post_forward_mesh: As it was.
        storage: As the unit's buckets were given it.
        grouping: Which parameters communicate together.
        ignored: Parameters that the call ignored.
        forward_methods: Other methods that run as forward does, by module.
        copy: What `copy.deepcopy` of a module does.
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
    """Return a decorator of a unit's method, which then runs in a range of that name in profiles."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @wraps(method)
        def ranged(*args: P.args, **options: P.kwargs) -> R:
            unit: Any = args[0]
            with record_function(name, unit.fqn):
                return method(*args, **options)

        return ranged

    return decorate


class Unit:
    """The parameters of one call of `fully_shard` or `hsdp`, and the modules whose forward they serve."""

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
        self.wait_for: Any = None  # an event, before the next forward gathers
        self.schedule: Schedule[Unit] | None = None
        self.is_last_backward = True  # until there is a schedule to ask
        self.is_root = False
        self.number: dict[GroupLog, int] = {}  # of each group, whose how-manieth unit it is
        self.identity = (1, True)  # of a root: at how many steps ranks compare, and whether names count
        self.post_forward_mesh: tuple[dist.ProcessGroup, int] | None = None
        self.state = ShardedState.SHARDED
        self.shows_unsharded = False
        self.control = StepControl.HOOKS
        self.backward = _BackwardRecord()
        self.was_in_backward = False  # at any time
        self._gather = _GatherRecord()
        self._asked_for = False  # by `unshard()`, until `reshard()`
        self._was_reduced = False  # since `zero_grad()` of the module
        self._calls: list[ForwardCall | None] = []  # running, one inside the other; None: a recomputation
        self._modules_to_run: set[int] = set()  # of a unit of several: whose forward is still to come
        self._calls_ahead = 0  # forward calls without a post-backward since the last end of a backward
        self._past_calls: list[weakref.ref[ForwardCall]] = []  # whose graph may still be there
        self._structure = Structure(self.modules)
        self._log()
        for param in self.params:
            param.on_gradient = self._check_pre_backward
            param.watch()
        for module in self.modules:
            # Around the hooks that users have registered before: these see what the module sees, not shards.
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            # Also when forward raises: modules would go on to show unsharded parameters, which an optimizer or a state
            # dict would take for the shards.
            module.register_forward_hook(self.post_forward, always_call=True)

    def _log(self) -> None:
        """Let the logs of groups know of this unit, for ranks to compare what they do."""
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
        """The path of the unit's first module from the root; "" for the root, and before its first forward."""
        return self.buckets[0].unit_name if self.buckets else ""

    @property
    def is_unsharded(self) -> bool:
        """Whether the unsharded parameters have their data."""
        return self.state is ShardedState.UNSHARDED

    @property
    def _has_data(self) -> bool:
        """Whether the unsharded parameters have their data, or will once the gather under way is through."""
        return self.state is ShardedState.UNSHARDED or self.state is ShardedState.UNSHARDING

    def start_gather(self, *, in_backward: bool = False) -> None:
        """Start to gather the shards as they are now, unless that is done or under way.

        What was gathered for an earlier forward is used again only if its backward is still to come and nobody had
        gradients to step with, or if the user has asked to keep it after backward.

        Args:
            in_backward: It is for the backward of what the last gather was for.
        """
        if not in_backward:
            self.check_assigned()
        try:
            # A list, not `any`: each bucket has to look. One that had not would register the old shards again below,
            # over those that the user has put there, and say nothing.
            if True in [bucket.was_replaced() for bucket in self.buckets]:
                self.reshard()
                for bucket in self.buckets:
                    bucket.take_over()
        except NoDataError:
            raise self._no_data_error() from None
        version = tuple(bucket.version for bucket in self.buckets)
        number = -1 if self.schedule is None else self.schedule.forward_number
        gather = self._gather
        # FSDP2 gathers nothing while it is unsharded. But what is there may have been kept (by `unshard()`, after
        # backward, for a backward to come), or prefetched for a forward that never came, and an optimizer may have
        # stepped since: stale weights would be silent.
        has_data = self._has_data
        # number + 1: gathered by hand, for the forward that comes next.
        is_left_over = has_data and not in_backward and gather.forward_number not in (number, number + 1)
        if version != gather.version or (is_left_over and not self._is_still_good()):
            if has_data:
                self._free()
            self._drop_post_forward_shards()  # they are as old as what was gathered
        if self.state is ShardedState.SHARDED or self.state is ShardedState.POST_FORWARD_SHARDED:
            # All of them before the first is waited for. No stream of the engine's own, but for shards that are copied
            # from the host: collectives start behind what the current stream holds, such as an optimizer's step, and
            # run on the process group's stream.
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
        """Start to gather for the forward to come."""
        gather = self._gather
        if self._has_data and not gather.kept_after_backward and (gather.may_change or self._holds_gradients()):
            self._free()
        self.start_gather()
        # After it, as a gather begins a new record. The number is that of the forward to come: this one takes what it
        # finds, the one after it does not.
        self._asked_for = True
        self._gather.by_user = True
        self._gather.forward_number = 0 if self.schedule is None else self.schedule.forward_number + 1

    def reshard_by_hand(self) -> None:
        """Free, and let no backward of a pipeline gather again."""
        self.check_assigned()
        self._asked_for = False
        self.reshard()

    def check_assigned(self) -> None:
        """Make sure that no parameter was assigned to in a way that has no effect."""
        for bucket in self.buckets:
            bucket.check_assigned()

    def show_for_split_backward(self) -> None:
        """Show what is gathered, or was asked for, to who computes gradients of inputs and of weights apart.

        Only while backwards neither reduce nor free nor end: what torch's pipelines say before each of them.
        """
        options, schedule = self.options, self.schedule
        if schedule is None or schedule.is_last_backward or options.reshard_after_backward:
            return
        if not options.requires_gradient_sync and (self._asked_for or self.is_unsharded):
            self.unshard(in_backward=True)

    def _is_still_good(self) -> bool:
        """Whether what was gathered for an earlier forward can be used by another one.

        Steps of optimizers count the versions up, but foreach operations by hand do not count up a DTensor's. So
        where there are gradients to step with, what was gathered is not used again.
        """
        gather = self._gather
        if gather.kept_after_backward:
            # Where code skips parameters without a gradient, or steps in a hook on it, the owner alone has changed its
            # parameter: only that gradients were reduced is known to all ranks, and all of them gather or none.
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
        """Have the unsharded parameters, and let the modules see them."""
        self._receive(keep_post_forward_shards=keep_post_forward_shards)
        if not self.shows_unsharded:
            self.shows_unsharded = True
            for bucket in self.buckets:
                bucket.show_unsharded()

    @property
    def _has_owners(self) -> bool:
        return any(reducer.owned for reducer in self.reducers)

    def _holds_gradients(self) -> bool:
        """Whether an optimizer would change a parameter.

        Of one with an owner, ranks cannot see the gradient: there is one once gradients were reduced, for all that they
        know.
        """
        if self._has_owners and self._was_reduced:
            return True
        return any(
            param.placement.owner is None and param.reduced_gradient is not None
            for bucket in self.buckets
            for param in bucket.params
        )

    def unshard(self, *, keep_post_forward_shards: bool = False, in_backward: bool = False) -> None:
        """Gather and show; and, if asked to, keep for backward what the post-forward mesh asks of this rank."""
        self.start_gather(in_backward=in_backward)
        self.finish_gather(keep_post_forward_shards=keep_post_forward_shards)

    def show_shards(self) -> None:
        """Let the modules see the sharded parameters; the gathered data stays."""
        if self.shows_unsharded:
            self.shows_unsharded = False
            for bucket in self.buckets:
                bucket.show_shards()

    def reshard(self) -> None:
        """Free the unsharded parameters and let the modules see the shards."""
        self.show_shards()  # first: to free waits for a prefetch that nobody used, and raises where a peer has died
        self._free()

    def _receive(self, *, keep_post_forward_shards: bool = False) -> None:
        if self.state is ShardedState.UNSHARDING:
            works, self._gather.works = self._gather.works, []
            # Until all is there: a wait raises where a peer has died, and what is not there must be gathered again.
            self.state = ShardedState.SHARDED
            with record_function("FSDP::all_gather_copy_out", self.fqn):
                for bucket, work in zip(self.buckets, works, strict=True):
                    bucket.finish_gather(work.wait(), keep_post_forward_shard=keep_post_forward_shards)
            self.state = ShardedState.UNSHARDED

    def use_post_forward_mesh(self, mesh: tuple[dist.ProcessGroup, int] | None) -> None:
        """Between forward and backward, keep the parameters split over that group, as its member number so-and-so."""
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
        self._receive()  # a prefetch that nobody used: its collective still writes to the buffer
        for bucket in self.buckets:
            if bucket.gathered:
                bucket.free()
        self.state = ShardedState.SHARDED
        if self.post_forward_mesh is not None and any(b.post_forward_shard is not None for b in self.buckets):
            self.state = ShardedState.POST_FORWARD_SHARDED

    @property
    def splits_gradients(self) -> bool:
        """Whether some gradients are split over a shard axis."""
        return any(reducer.scatter is not None for reducer in self.reducers)

    @property
    def adds_over_ranks(self) -> bool:
        """Whether there are gradients to be reduced over several ranks."""
        return any(r.ranks > 1 and any(p.sharded.requires_grad for p in r.params) for r in self.reducers)

    # -- forward -------------------------------------------------------------------------------------------------

    @runs_eagerly
    @_in_range("FSDP::pre_forward")
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather, unless that was done ahead, and arrange to hear of the backward of this call."""
        if self.control is StepControl.UNSHARDED_FOR_STEP:
            self.finish_gather()
            return self._cast_inputs(args, kwargs)
        schedule = self.schedule or self._become_root()
        # Before anything is read: after a backward that raised, `under_way` is still set, and this forward would be
        # taken for a recomputation inside of it, which nothing ever frees.
        schedule.forget_failed_backward()
        recomputing = self.backward.under_way and schedule.in_backward
        if recomputing:
            self.unshard(in_backward=True)  # which does nothing more, unless backward itself needs no parameters
        elif self._calls:
            self.unshard(in_backward=True)  # the module calls itself
        else:
            self._enter_forward(module, schedule)
        args, kwargs = self._cast_inputs(args, kwargs)
        # A recomputation by activation checkpointing belongs to the backward under way: it has no backward of its own
        # to wait for, and would free the parameters that the backward around it needs.
        call = None if recomputing else ForwardCall(self)
        if call is not None:
            call.version = self._gather.version
            if torch.is_grad_enabled():
                args, kwargs = mark_inputs(call, args, kwargs)
        self._calls.append(call)  # last: if anything above raises, `post_forward` finds no call and leaves all alone
        return args, kwargs

    def _cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        policy = self.options.mp_policy
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = cast((args, kwargs), policy.param_dtype)
        return args, kwargs

    def run_as_forward(self, module: nn.Module, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of one of the unit's modules as if it were its forward."""
        args, kwargs = self.pre_forward(module, args, kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            output = self.post_forward(module, args, output)
        return output

    def _enter_forward(self, module: nn.Module, schedule: Schedule[Unit]) -> None:
        # Of several modules, the first to run gathers for all and the last one frees. One that runs again before all
        # have run begins anew: some of them may never run.
        first = id(module) not in self._modules_to_run or len(self._modules_to_run) == len(self.modules)
        if first:
            self._modules_to_run = {id(m) for m in self.modules}
            if self.is_root:
                self._structure.check(self._known_parameters)
                schedule.pre_forward()
                if self.wait_for is not None:
                    # On the current stream, behind which all gathers start: this one and those that are prefetched.
                    self.platform.current_stream().wait_event(self.wait_for)
                    self.wait_for = None
            elif not schedule.in_forward and not schedule.in_backward:
                schedule.count_forward()  # the unit runs on its own
        self.unshard(keep_post_forward_shards=torch.is_grad_enabled(), in_backward=schedule.in_backward)
        # Only now the next units: their gathers queue up behind this one's, which forward is waiting for. A forward
        # inside of a backward (activation checkpointing) records no order and gathers nothing ahead: the order there is
        # that of backward, and forward's next unit is one that backward has freed already.
        if first and not schedule.in_backward:
            schedule.note_pre_forward(self)
            for unit in schedule.next_in_forward(self) if self.forward_prefetch is None else self.forward_prefetch:
                unit.start_gather()

    def _known_parameters(self) -> Iterator[nn.Parameter]:
        """All parameters below the root that somebody sees to."""
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
        """Watch the outputs for backward, and free the parameters, unless backward will soon be here."""
        if self.control is StepControl.UNSHARDED_FOR_STEP:
            dtype = self.options.mp_policy.output_dtype
            return copy_aliases(output if dtype is None else cast(output, dtype), self._owns_memory_of)
        if not self._calls:
            return output  # the hook before forward has raised
        call = self._calls.pop()
        if call is not None and call.replaced:
            restore_containers(call)  # before what may raise: these lists are the caller's
        if self.options.mp_policy.output_dtype is not None:
            output = cast(output, self.options.mp_policy.output_dtype)
        if call is None:
            return output  # a recomputation inside of this unit's backward, which needs the parameters next
        schedule = self.schedule
        assert schedule is not None
        # An output that is a parameter, or a view of one, would lose its memory when the unit reshards.
        output = copy_aliases(output, self._owns_memory_of)
        differentiable = [t for t in tensors_in(output) if t.requires_grad and not t.is_leaf]
        if differentiable and not torch.is_grad_enabled():  # those that it has made; others it has passed through
            given = {id(tensor) for tensor in tensors_in(args)}
            differentiable = [t for t in differentiable if id(t) not in given]
        if differentiable:
            watch_outputs(call, differentiable)
            # None inside of a backward: checkpointing recomputes units there before their pre-backward, only for what
            # they save, and these calls have no post-backward. The unit would wait for them until backward ends.
            if not schedule.in_backward:
                self._calls_ahead += 1
                # The hooks on the outputs keep a call alive: a weak reference that is dead says that its graph is gone
                # without a backward, and with it the need for what was gathered.
                self._past_calls = [reference for reference in self._past_calls if reference() is not None]
                self._past_calls.append(weakref.ref(call))
        if not self._calls:
            self._modules_to_run.discard(id(module))
            if self._modules_to_run:
                self.show_shards()  # the other modules of the unit need the data, or never run
            else:
                raised = output is None and sys.exc_info()[0] is not None
                hides = output is None and not raised
                self._leave_forward(schedule, with_backward=bool(differentiable), hides=hides, raised=raised)
        if self.buckets:
            refuse_lazy(module, output)
        return output

    def interrupted(self) -> None:
        """A forward of the unit was cut short by what is no `Exception`, for which torch calls no hooks."""
        self._calls.clear()
        self._modules_to_run.clear()
        self.show_shards()

    def _leave_forward(self, schedule: Schedule[Unit], *, with_backward: bool, hides: bool, raised: bool) -> None:
        schedule.note_post_forward(self)
        for bucket in self.buckets:
            bucket.check_untouched()  # while the data is there: once freed, what forward has written is lost
        if not with_backward:
            self._drop_post_forward_shards()
        # In a backward that recomputes this forward the unit is what comes next: freed, it would be gathered once more.
        keeps = not self.options.reshard_after_forward or self.is_root or schedule.in_backward
        # A module that returns None may have kept its result: of freed memory, whose products end the process, backward
        # would not come to the parameters' own check, which says what is wrong.
        hides = hides and torch.is_grad_enabled() and any(p.unsharded.requires_grad for p in self.params)
        if (with_backward and keeps) or hides or (self._gather.by_user and not torch.is_grad_enabled()):
            # Backward starts with the root's parameters, or will soon be here: their data stays. The modules show
            # shards all the same: an optimizer that is made now, after an evaluation, would train copies else.
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
        """The root's forward starts; an earlier one may have been cut short by an interrupt."""
        if not self.is_root:
            self._modules_to_run.clear()
            self._calls.clear()

    def post_root_forward(self) -> None:
        """The root's forward is through: no module shows unsharded parameters, no prefetch was in vain."""
        # Units that were prefetched by the recorded order, and that this forward has not run: their buffers would stay
        # until a forward runs them.
        was_in_vain = self.state is ShardedState.UNSHARDING
        if was_in_vain or (self.shows_unsharded and self.options.reshard_after_forward):
            self.reshard()
        else:
            self.show_shards()

    def _become_root(self) -> Schedule[Unit]:
        """The first unit whose forward runs is the root of all units below it; so far they may have had their own."""
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
        # A submodule may have run alone before, for an evaluation or to find out shapes, and have become a root: what
        # it has under way goes on in the larger schedule. FSDP2 raises an error there.
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
        """Backward is about to use an output of `call`: gather again, and the unit that it reaches next ahead."""
        if torch.is_grad_enabled():
            blame = "backward with create_graph=True went through a fully_shard unit"
            hint = "create_graph=False, or leave the modules that need second derivatives unwrapped"
            raise self._error("run backward", blame, "its parameters are freed when backward leaves it", hint)
        schedule = self.schedule
        assert schedule is not None
        schedule.pre_backward()
        number = schedule.backward_number
        if number in (call.pre_backward_in, call.post_backward_in):
            return  # another output of the call, or one that backward comes to after the post-backward
        call.pre_backward_in = number
        backward = self.backward
        if backward.number != number:
            backward = self.backward = _BackwardRecord(number)
        backward.open_calls += 1
        self.was_in_backward = True
        if backward.under_way:
            return  # another call of the unit: the parameters are there
        backward.under_way = True
        if self.options.unshard_in_backward:
            self.unshard(in_backward=True)
        # After the gather, which takes the version of the shards as they are. Autograd's own check sees nothing: the
        # unsharded parameters are filled through `.data`, so that their version counters stand still.
        if call.version != self._gather.version:
            blame, hint = "a parameter was changed between a forward and its backward", "all backwards before the step"
            raise self._error("run backward", blame, "seen: an in-place change, such as an optimizer's step", hint)
        for reducer in self.reducers:
            reducer.restore_pending()
        for unit in schedule.next_in_backward(self) if self.backward_prefetch is None else self.backward_prefetch:
            # In its first backward a unit is not gathered ahead: if something uses its parameters before its
            # pre-backward, their memory is still empty, and torch says so.
            if unit.was_in_backward and unit.options.unshard_in_backward:
                unit.start_gather(in_backward=True)

    def _check_pre_backward(self, gradient: torch.Tensor) -> None:
        """A gradient of an unsharded parameter arrives: from freed memory, if no hook has announced backward."""
        del gradient
        if self.control is StepControl.UNSHARDED_FOR_STEP or self._calls or self.shows_unsharded:
            return
        schedule = self.schedule
        if schedule is not None and schedule.in_backward_number == self.backward.number:
            return  # after the unit's post-backward: autograd accumulates when it likes
        blame = "backward went into a unit through a tensor that its forward did not return"
        hint = "return the tensor from forward, in any container or dataclass, and keep none in such as self.aux_loss"
        raise self._error("run backward", blame, "seen: a gradient of its parameters, which are freed by now", hint)

    def _error(self, what: str, blame: str, seen: str, hint: str) -> RuntimeError:
        return InvalidState(f"cannot {what}", blame, f"unit: {class_name(self.modules[0])}; {seen}", hint)

    @runs_eagerly
    def post_backward(self, call: ForwardCall) -> None:
        """Backward has computed the gradients of the inputs of `call`: if it was the last one, free and reduce."""
        schedule = self.schedule
        assert schedule is not None
        schedule.pre_backward()
        if call.pre_backward_in == schedule.backward_number:
            self.backward.open_calls -= 1
        call.post_backward_in = schedule.backward_number
        # retain_graph=True: a call has several post-backwards. Below 0, the unit would only be reduced at the very end.
        self._calls_ahead = max(self._calls_ahead - 1, 0)
        # Of several forward calls before one backward, all share the parameters and their gradients: while one of them
        # is still to be differentiated, freeing would gather again, and reducing would communicate twice.
        if self._calls_ahead == 0 and self.backward.open_calls == 0:
            self._reshard_and_reduce(schedule)

    def finalize_backward(self) -> None:
        """The root's backward is through: finish what was not finished on the way."""
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
        """Whether there is something to reduce: from now, or kept by an earlier backward and due now."""
        if any(reducer.has_gradients() for reducer in self.reducers):
            return True
        return self._syncs and any(r.is_due(self.options.requires_all_reduce) for r in self.reducers)

    @property
    def _syncs(self) -> bool:
        """Whether the end of a backward reduces gradients."""
        return self.options.requires_gradient_sync and self.control is not StepControl.DEFERRED_SYNC

    def _reshard_and_reduce(self, schedule: Schedule[Unit], *, in_place: bool = False) -> None:
        self.backward.under_way = False
        # The order is that of memory, and of the wire. Freed before packed: the peak is one of the two, not both.
        # Received before packed: what the unit before has sent goes back to the allocator, and comes again as this
        # unit's buffer. In FSDP2 a reduce_scatter's input waits for the next post_backward in the same way.
        with torch.no_grad():  # `reduce_now` is called from outside of a backward
            self._reshard_after_backward()
            self._reduce(schedule, in_place=in_place)

    @_in_range("FSDP::post_backward_reduce")
    def _reduce(self, schedule: Schedule[Unit], *, in_place: bool) -> None:
        options = self.options
        # In place there is no buffer whose memory the next one could get. A wait would only hold up what this stream
        # computes next, such as the backward of the rank's next stage.
        if not in_place:
            schedule.receive_reductions()
        for reducer in self.reducers:
            reducer.collect(options.mp_policy.reduce_dtype, keep=not self._syncs, mean=options.average)
        # Gradients are on their way: an optimizer may step before the next forward, and what was kept be stale.
        self._gather.may_change |= self._syncs
        if not self._syncs:
            schedule.advance_reductions()  # those of units that do sync go on
            if options.show_sums:
                for reducer in self.reducers:
                    reducer.show_pending()
            return
        self._gather.reduced = self._was_reduced = True
        how = replace(options)  # for the next backward they may change while this reduction is under way
        schedule.compare_units()
        started = [reducer.reduce(how, schedule.fused_all_reduces, in_place=in_place) for reducer in self.reducers]
        # The all_reduces of the units before go behind these reduce_scatters: on links that both share, the first
        # one issued is through first, and what the next unit waits for is the reduce_scatter alone. In virtual time
        # that was never slower, and up to 2.6 % of a step faster.
        if not in_place:
            schedule.advance_reductions()
        for reduction in started:
            if reduction is not None:
                schedule.add(reduction)
                for log in reduction.owner.logs:
                    log.note("reduction", *reduction.owner.bucket.keys[log])

    @_in_range("FSDP::post_backward_reshard")
    def _reshard_after_backward(self) -> None:
        """Backward needs the unsharded parameters no more; a forward in whose middle it ran still does."""
        if self._calls:
            return
        self._drop_post_forward_shards()
        if self.options.reshard_after_backward:
            self.reshard()
        else:
            self._gather.kept_after_backward = True
            self.show_shards()

    def is_resharded(self) -> bool:
        """Whether the modules show shards and, unless asked to keep them, no unsharded parameter has data."""
        if self._calls:
            return True  # the backward ran inside of a forward, which still needs them
        if not self.options.reshard_after_backward:
            return not self.shows_unsharded
        return not self.shows_unsharded and self.state is ShardedState.SHARDED

    # -- steps by request: unsharded for many forwards and backwards, in any order ---------------------------------

    def prepared_units(self) -> list[Unit]:
        """This unit and all below it, in module order, with a schedule."""
        schedule = self.schedule or self._become_root()
        schedule.forget_failed_backward()
        self._structure.check(self._known_parameters)
        below = schedule.units
        if below[0] is not self:  # it has run inside of a larger root
            return nested_units(*self.modules)
        return list(below)

    def groups(self) -> list[dist.ProcessGroup]:
        """The groups over which parameters are gathered and gradients reduced."""
        found: list[dist.ProcessGroup | None] = [bucket.group for bucket in self.buckets]
        for reducer in self.reducers:
            found += [reducer.scatter, *reducer.replicas]
        return list(dict.fromkeys(group for group in found if group is not None))

    def unshard_for_step(self) -> None:
        """Start to gather, and leave the parameters unsharded until `reduce_now` or `release`."""
        self.start_gather()
        self.control = StepControl.UNSHARDED_FOR_STEP

    def defer_sync(self) -> None:
        """Let gradients wait for `reduce_now`, whatever the options say."""
        self.control = StepControl.DEFERRED_SYNC

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

    @property
    def can_send_in_place(self) -> bool:
        """Whether gradients that wait can be sent from where they are, and nothing is issued behind their reduction."""
        return all(reducer.can_send_in_place(self.options) for reducer in self.reducers)

    def reduce_in_backward(self, *, in_place: bool) -> None:
        """Start to reduce gradients that have all come; the parameters stay until `free_after_step`.

        What backward still computes may need them, such as the gradient of an input by a weight that is frozen.

        Args:
            in_place: Send gradients from where they are, and wait for no reduction before; see `can_send_in_place`.
        """
        schedule = self.schedule
        assert schedule is not None
        with torch.no_grad():
            self._reduce(schedule, in_place=in_place)

    def free_after_step(self) -> None:
        """After `reduce_in_backward`: free the unsharded parameters, and reduce gradients that have come since."""
        if any(reducer.has_gradients() for reducer in self.reducers):
            self.reduce_now()
            return
        self.control = StepControl.HOOKS
        self.backward.under_way = False
        self._reshard_after_backward()

    def reduce_now(self, *, in_place: bool = False) -> None:
        """Free the unsharded parameters and start to reduce all gradients, as the end of a backward would.

        Args:
            in_place: As in `reduce_in_backward`.
        """
        schedule = self.schedule
        assert schedule is not None
        self.control = StepControl.HOOKS  # first: a deferred sync would only collect
        self._reshard_and_reduce(schedule, in_place=in_place)

    def release(self, *, failed: bool) -> None:
        """Free the unsharded parameters, without a reduction; after a failure gradients that wait are dropped."""
        if failed:
            self.clear_pending()
        if failed or self.control is StepControl.UNSHARDED_FOR_STEP:
            self.reshard()
        self.control = StepControl.HOOKS

    # -- what has failed, and what is cleared ------------------------------------------------------------------------

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
        """Forget gradients that wait for a reduction."""
        for reducer in self.reducers:
            reducer.clear()
            for param in reducer.params:
                param.unsharded.grad = None

    def clear_gradients(self, *, set_to_none: bool) -> None:
        """Forget gradients, also those that wait for a reduction."""
        if self.schedule is not None:
            # Reductions that go on by comm_async or set_is_last_backward(False) would arrive after the zeros.
            self.schedule.finish_reductions()
        self._was_reduced = self._was_reduced and not set_to_none
        for reducer in self.reducers:
            reducer.clear()
        for param in self.params:
            param.clear_gradient(set_to_none=set_to_none)


def _check_one_way(root: nn.Module, units: list[Unit]) -> None:
    """Make sure that all units average gradients, or all add them up, where nobody has said what they should do.

    Units of plain parameters average by default, units with DTensors add up: a warning was all that said so once.

    Raises:
        ValueError: No factor of the loss is right for both.
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
    """The unit that `module` was wrapped as, or None."""
    return module.__dict__.get("_hyper_parallel_unit")


def traced_unit_of(module: nn.Module) -> Any:
    """The unit that `module` was wrapped as for `torch.compile` to trace, without hooks, or None."""
    return module.__dict__.get("_hyper_parallel_traced_unit")


def is_wrapped(module: nn.Module) -> bool:
    """Whether `module` was wrapped, in either way."""
    return unit_of(module) is not None or traced_unit_of(module) is not None


def nested_units(*modules: nn.Module) -> list[Unit]:
    """All units in `modules` and their submodules, each once, in module order."""
    found = (unit_of(child) for module in modules for child in module.modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def nested_traced_units(module: Any) -> list[Any]:
    """The units in `module` that were made for `torch.compile` to trace, in module order."""
    return [unit for child in module.modules() if (unit := traced_unit_of(child)) is not None]
