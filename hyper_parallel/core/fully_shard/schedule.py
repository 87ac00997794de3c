"""The step that all units of one root share: their order, the backward and the reductions under way.

A unit's life in one training step::

    pre_forward        gather (or take what was prefetched), start the next unit's gather
    post_forward       free
    pre_backward       gather again, start the gather of the next unit in backward
    post_backward      free, pack gradients, start their reduction
    finalize_backward  finish reductions in the order they were issued, free what is still unsharded
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from hyper_parallel.core.common.errors import InvalidState, class_name
from hyper_parallel.core.common.torch_compat import record_function
from hyper_parallel.core.fully_shard.bucket import Bucket, CopyStreams
from hyper_parallel.core.fully_shard.comm import GroupLog
from hyper_parallel.core.fully_shard.reduce import FusedAllReduces, GradientReducer, Reduction
from hyper_parallel.core.fully_shard.utils import UnitOptions
from hyper_parallel.platform import Platform


class _ScheduledUnit(Protocol):
    """What a schedule asks of its units; these know the schedule, so the arrow between the two goes one way."""

    modules: list[nn.Module]
    buckets: list[Bucket]
    reducers: list[GradientReducer]
    options: UnitOptions
    platform: Platform
    number: dict[GroupLog, int]
    identity: tuple[int, bool]

    def pre_root_forward(self) -> None:
        """The root's forward starts."""

    def post_root_forward(self) -> None:
        """The root's forward is through."""

    def show_shards(self) -> None:
        """Let the modules see the sharded parameters."""

    def finalize_backward(self) -> None:
        """The root's backward is through."""

    def abandon_backward(self) -> None:
        """The backward under way has failed."""

    def is_resharded(self) -> bool:
        """Whether all is resharded that has to be after backward."""


U = TypeVar("U", bound=_ScheduledUnit)


class Schedule(Generic[U]):
    """The common state of the units of one root.

    Attributes:
        units: All units below the root, in module order; the root's is the first.
        reductions: Reductions under way, in issue order.
        is_last_backward: False keeps the end of a backward from finishing anything (several backwards per step).
        fused_all_reduces: The all_reduces that several units' reductions share.
        forward_number: Of the forward of the root under way, or of the last one.
        backward_number: Of the backward under way, or of the last one.
    """

    def __init__(self, units: list[U]) -> None:
        self.units = units
        self.reductions: list[Reduction] = []
        self.fused_all_reduces = FusedAllReduces(self._all_reduce_bytes())
        self.is_last_backward = True
        self.backward_number = 0
        self.forward_number = 0
        self.in_forward = False  # of the root, which records the order; not one inside of a backward
        self._pre_forwards: list[U] = []
        self._post_forwards: list[U] = []
        self._forward_order: list[U] = []
        self._backward_order: list[U] = []
        self._next_in_forward: dict[U, list[U]] = {}
        self._next_in_backward: dict[U, list[U]] = {}
        self._ending: weakref.ref[Callable[[], None]] | None = None  # what autograd calls when backward is through
        self._copies = self._one_pair_of_copy_streams()
        self._logs: list[GroupLog] | None = None  # once ranks have compared their units
        self._is_first_forward = True

    def _one_pair_of_copy_streams(self) -> CopyStreams | None:
        storages = [bucket.storage for unit in self.units for bucket in unit.buckets if bucket.storage.apart]
        if not storages:
            return None
        known = list(dict.fromkeys(storage.copies for storage in storages if storage.copies is not None))
        copies, *others = known or [CopyStreams(storages[0].platform)]
        for other in others:  # of units that ran by themselves before
            other.finish()
        for storage in storages:
            storage.copies = copies
        return copies

    def _all_reduce_bytes(self) -> int:
        return sum(r.all_reduce_bytes(u.options.mp_policy.reduce_dtype) for u in self.units for r in u.reducers)

    def take_over(self, other: Schedule[U]) -> None:
        """Go on with what is under way in another schedule, whose units are among these."""
        self.reductions += other.reductions
        other.reductions = []
        other.fused_all_reduces.close()
        self.backward_number = max(self.backward_number, other.backward_number)
        self.forward_number = max(self.forward_number, other.forward_number) + 1
        self.is_last_backward = self.is_last_backward and other.is_last_backward

    # -- identity: ranks have the same units, and gather and reduce them in one order -----------------------------

    def name_units(self) -> None:
        """Give each bucket an identity and a key, by the path of its unit and by which of the models this is."""
        root = self.units[0]
        paths = {module: name for top in root.modules for name, module in top.named_modules()}
        # Of two models whose modules have the same names, one was wrapped before the other, whatever the order inside.
        numbers: dict[GroupLog, int] = {}
        for unit in self.units:
            for log, number in unit.number.items():
                numbers[log] = max(number, numbers.get(log, 0))
        model = class_name(root.modules[0])
        for place, unit in enumerate(self.units):
            names = [paths[module] for module in unit.modules if module in paths]
            for bucket in unit.buckets:
                own_names = not root.identity[1]
                bucket.name_unit(f"unit {place}" if own_names or not names else names[0], has_own_names=own_names)
                over = [log for reducer in unit.reducers if reducer.bucket is bucket for log in reducer.logs]
                for log in over if bucket.log is None else (bucket.log, *over):
                    number = 0 if own_names else numbers[log]
                    key = crc32(f"{number} {bucket.identity}".encode()).to_bytes(4, "big")
                    bucket.keys[log] = key, f"{bucket.identity} of {model}, wrapped as unit {number} over these ranks"

    def compare_units(self) -> None:
        """Before the first collective: make sure that the ranks of each group have the same units.

        Communication: one all_reduce of two numbers for each group.

        Raises:
            ValueError: They have not.
        """
        if self._logs is not None:
            return
        root = self.units[0]
        keys: dict[GroupLog, list[tuple[bytes, str]]] = {}
        for bucket in (bucket for unit in self.units for bucket in unit.buckets):
            for log, key in bucket.keys.items():
                keys.setdefault(log, []).append(key)
        # In one order on all ranks, also where their units are not.
        logs = sorted(keys, key=lambda log: log.ranks)
        for log in logs if root.identity[0] else ():
            log.compare_units(f"cannot run {class_name(root.modules[0])}", keys[log], root.platform)
        self._logs = logs

    def _compare_after_forward(self) -> None:
        """Compare what ranks have gathered and reduced, after the first forward of a step and each without gradients.

        Here, as wrong outputs may make backward wait for ever. Not where nothing was gathered: a rank may be the only
        one in this forward, on parameters that were unsharded by hand.

        Communication: one all_reduce of two numbers for each group.

        Raises:
            RuntimeError: They differ.
        """
        root, is_first = self.units[0], self._is_first_forward
        self._is_first_forward = False
        for log in self._logs or ():
            if log.gathered and (is_first or log.step_ended or not torch.is_grad_enabled()):
                log.step_ended = False
                log.compare(root.platform, root.identity[0])
            if is_first:
                log.check()

    def compare_reductions(self, *, also_gathers: bool = False) -> None:
        """Compare what ranks have reduced, over groups over which nothing is gathered; or over all groups.

        Communication: one all_reduce of two numbers for each group.

        Raises:
            RuntimeError: They differ.
        """
        root = self.units[0]
        for log in self._logs or ():
            if log.due and (also_gathers or not log.gathers):
                log.compare(root.platform, root.identity[0])

    # -- forward, and its order ----------------------------------------------------------------------------------

    def next_in_forward(self, unit: U) -> Sequence[U]:
        """The unit whose pre-forward followed that of `unit` in the last complete forward of the root, or none."""
        return self._next_in_forward.get(unit, ())

    def next_in_backward(self, unit: U) -> Sequence[U]:
        """The unit whose pre-backward follows that of `unit`, or none: post-forwards of the last forward in reverse.

        Not its pre-forwards in reverse: a unit around others has its pre-forward before theirs and its post-forward
        after theirs, and its pre-backward comes first.
        """
        return self._next_in_backward.get(unit, ())

    def pre_forward(self) -> None:
        """The root's forward starts: record the order anew."""
        self.forward_number += 1
        if any(unit.options.leave_pending for unit in self.units):
            self.finish_reductions()  # nobody has asked for them since the last backward
        for log in self._logs or ():
            log.check()
            log.gathered = False
        self.in_forward = not self.in_backward
        self._pre_forwards, self._post_forwards = [], []
        for unit in self.units:
            unit.pre_root_forward()

    def count_forward(self) -> None:
        """A unit below the root runs on its own, and cannot use what was gathered for earlier forwards."""
        self.forward_number += 1

    def note_pre_forward(self, unit: U) -> None:
        """Record that forward has come to `unit`."""
        if self.in_forward:
            self._pre_forwards.append(unit)

    def note_post_forward(self, unit: U) -> None:
        """Record that the forward of `unit` is through."""
        if self.in_forward:
            self._post_forwards.append(unit)

    def post_forward(self, *, raised: bool) -> None:
        """The root's forward is through, or has raised, which other ranks do not know of."""
        if not self.in_forward:
            return
        self.in_forward = False
        self._post_forwards.reverse()
        # Taken anew from each forward, as branches may differ from step to step. FSDP2 looks at the order for backward
        # alone; forward prefetches what is asked for explicitly.
        if self._pre_forwards != self._forward_order or self._post_forwards != self._backward_order:
            self._forward_order, self._backward_order = self._pre_forwards, self._post_forwards
            self._next_in_forward = followers(self._pre_forwards)
            self._next_in_backward = followers(self._post_forwards)
        for unit in self.units:
            unit.post_root_forward()
        if not raised:
            self._compare_after_forward()

    # -- backward ------------------------------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Whether a backward is under way."""
        return self._ending is not None

    @property
    def in_backward_number(self) -> int:
        """The number of the backward under way; -2: there is none."""
        return self.backward_number if self._ending is not None else -2

    def pre_backward(self) -> None:
        """A backward has come to a unit: if it is the first one, arrange for the end."""
        self.forget_failed_backward()
        if self._ending is not None:
            return

        def end() -> None:
            self._finalize_backward()

        # Autograd alone keeps `end` alive: if it dies without a call, the backward has failed.
        self._ending = weakref.ref(end, self._backward_failed)
        self.backward_number += 1
        # Possible only from within a backward. Autograd calls it when all gradients have been accumulated, also those
        # of units that no node behind their inputs has finished.
        Variable._execution_engine.queue_callback(end)

    def _backward_failed(self, _: object) -> None:
        """What may be done at once: whoever looks for parameters now finds shards. The rest waits for the next call."""
        for unit in self.units:
            unit.show_shards()

    def forget_failed_backward(self) -> None:
        """If the last backward ended with an error, drop what it had begun."""
        if self._ending is None or self._ending() is not None:
            return
        self._ending = None
        self.drop_reductions()
        for unit in self.units:
            unit.abandon_backward()

    def drop_reductions(self) -> None:
        """Forget the reductions under way, of a step that has failed: the user may have zeroed the gradients since."""
        reductions, self.reductions = self.reductions, []
        for reduction in reductions:
            reduction.drop()
        self.fused_all_reduces = FusedAllReduces(self.fused_all_reduces.total)

    def _finalize_backward(self) -> None:
        """Backward is through: reduce what is still pending, apply all gradients, free all units."""
        self._ending = None  # first: should a reduction raise, the next forward is in no backward
        # Units none of whose inputs needs a gradient have had no post-backward: there is no node to run it. Their
        # reductions are issued in one order on all ranks, whenever their gradients have come.
        with record_function("FSDP::root_post_backward_callback"):
            for unit in reversed(self.units):
                unit.finalize_backward()
            if self.is_last_backward:
                if any(unit.options.leave_pending for unit in self.units):
                    note_pending_reductions(self)
                else:
                    self.finish_reductions()
        for unit in self.units:
            assert unit.is_resharded(), f"unsharded parameters outlive backward: {class_name(unit.modules[0])}"

    # -- reductions ----------------------------------------------------------------------------------------------

    def add(self, reduction: Reduction) -> None:
        """Queue a reduction behind those under way."""
        self.reductions.append(reduction)

    def receive_reductions(self) -> None:
        """Wait for the collectives under way: their buffers go before the next unit's are made."""
        for earlier in self.reductions:
            earlier.receive()

    def advance_reductions(self) -> None:
        """Take the reductions under way a step further, in issue order, which is the same on all ranks."""
        for earlier in self.reductions:
            earlier.advance()
        self.reductions = [earlier for earlier in self.reductions if not earlier.done]

    def finish_each(self, before: Callable[[Any], object]) -> None:
        """Take each reduction under way a step further, and say before whose it is."""
        for reduction in self.reductions:
            before(reduction.owner)
            reduction.advance()

    def finish_reductions(self) -> None:
        """Wait for the reductions under way and apply their gradients."""
        reductions, self.reductions = self.reductions, []  # first: a wait raises where a peer has died, but only once
        # All second collectives are issued before one is waited for, so that they overlap; in one order on all ranks.
        for reduction in reductions:
            reduction.advance()
        self.fused_all_reduces.close()
        for reduction in reductions:
            reduction.finish()
        if self._copies is not None:
            self._copies.finish()
        self.compare_reductions()


def followers(order: Sequence[U]) -> dict[U, list[U]]:
    """The unit after each one in an order, none after the last; of one that is there twice, after its last place."""
    return {unit: list(order[place + 1 : place + 2]) for place, unit in enumerate(order)}


# -- parameters that come into a model after it was wrapped, which no unit knows of ------------------------------------


class Structure:
    """The modules below a root, as they were when all parameters in them were known.

    Args:
        roots: The modules of the root's unit.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = roots
        self._seen: list[tuple[dict[str, Any], tuple[Any, ...], dict[str, Any], int]] = []

    def check(self, known: Callable[[], Iterable[nn.Parameter]]) -> None:
        """Make sure, if a module or a parameter has come or gone, that every parameter is known.

        Args:
            known: Gives the parameters that are managed or were ignored.

        Raises:
            RuntimeError: One that needs a gradient is not: each rank would train its own copy.
        """
        if self._seen and not self._has_changed():
            return
        identities = {id(parameter) for parameter in known()}
        for root in self._roots:
            unmanaged = [
                name
                for name, parameter in root.named_parameters()
                if parameter.requires_grad and not isinstance(parameter, DTensor) and id(parameter) not in identities
            ]
            if unmanaged:
                blame = f"parameters came into {class_name(root)} after it was wrapped: {', '.join(unmanaged)}"
                seen = "seen: no unit reduces their gradients, so every rank would train its own copy"
                hint = "add them before wrapping, wrap the module that brings them, or pass them in ignored_params"
                raise InvalidState("cannot run forward", blame, seen, hint)
            self._check_buffers(root)
        modules = dict.fromkeys(module for root in self._roots for module in root.modules())
        self._seen = [
            (module._modules, tuple(module._modules.values()), module._parameters, len(module._parameters))
            for module in modules
        ]

    def _check_buffers(self, root: nn.Module) -> None:
        on_meta = [name for name, buffer in root.named_buffers() if buffer.is_meta]
        if on_meta and not all(parameter.is_meta for parameter in root.parameters()):
            blame = f"buffers of {class_name(root)} are still on the meta device: {', '.join(on_meta)}"
            seen = "seen: parameters with values, beside buffers without"
            hint = "init_parameters(model, seed), or module.buffer = values; buffers outside of state_dict too"
            raise InvalidState("cannot run forward", blame, seen, hint)

    def _has_changed(self) -> bool:
        return any(
            len(parameters) != count or (children and tuple(children.values()) != before)
            for children, before, parameters, count in self._seen
        )


# -- pending reductions: those that go on after the end of backward, until somebody asks for their gradients -----------

# Guards the table below; it is no state of a rank, but a lock.
_LOCK = threading.Lock()

# Schedules with reductions under way, oldest first, of each default process group: every rank has one of its own, so
# this holds no state of a rank that another could see. A process group takes no attributes, hence a table beside it;
# all access is under the lock.
_SCHEDULES = WeakKeyDictionary[dist.ProcessGroup, "list[weakref.ref[Any]]"]()

# Logs of groups, by the group's name, of each default process group: likewise no state of a rank that another could
# see, and all access is under the lock.
_LOGS = WeakKeyDictionary[dist.ProcessGroup, dict[str, GroupLog]]()


def log_of(group: dist.ProcessGroup | None) -> GroupLog | None:
    """The log of a group of several ranks, which all units over it share; None of any other."""
    world = dist.group.WORLD
    if group is None or world is None or group.size() == 1:
        return None
    with _LOCK:
        return _LOGS.setdefault(world, {}).setdefault(group.group_name, GroupLog(group))


def check_logs() -> None:
    """Read what the last comparisons of the calling rank have found.

    Raises:
        RuntimeError: Ranks have gathered or reduced different units together.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is not None:
        with _LOCK:
            logs = list(_LOGS.get(world, {}).values())
        for log in logs:
            log.check()


def last_operations() -> list[str]:
    """Return the last gather or reduction over each group, e.g. `gather of layers.0`, for who looks at a stuck rank."""
    world = dist.group.WORLD if dist.is_initialized() else None
    with _LOCK:
        logs = [] if world is None else list(_LOGS.get(world, {}).values())
    return [re.split(r": | \w+ \[", log.last)[0] for log in logs if log.last]


def note_pending_reductions(schedule: Schedule[Any]) -> None:
    """Note that reductions of `schedule` go on after the end of a backward."""
    world = dist.group.WORLD
    if world is None:
        return
    with _LOCK:
        known = _SCHEDULES.setdefault(world, [])
        if not any(reference() is schedule for reference in known):
            known.append(weakref.ref(schedule))


def hsdp_sync_stream() -> None:
    """Wait until every asynchronous reduction of the calling rank has been applied; nothing pending: do nothing.

    ::

        loss.backward()
        hsdp_sync_stream()  # with hsdp(..., comm_async=True), before gradients are read
        optimizer.step()

    Communication: what the reductions still have to do; every rank calls it at the same place.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        return
    with _LOCK:
        pending = _SCHEDULES.pop(world, [])
    for reference in pending:
        schedule = reference()
        if schedule is not None:
            schedule.finish_reductions()
