"""A world of N simulated ranks in this process: ``sim.run`` in steps, with its trace."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch

from hyper_parallel.core.redistribute.cost import Topology
from sim.comm import membership
from sim.comm.collectives import Call, MemoryGone, Problem
from sim.comm.group import Group, Message, Slot
from sim.comm.process_group import SimProcessGroup
from sim.comm.store import RankStore, SharedStore
from sim.comm.trace import Event
from sim.explain import deadlock as stuck
from sim.explain import mismatch as report
from sim.explain.callables import check_call, check_result
from sim.explain.errors import RankLost, RankStopped, SimError, rank_failed, ranks_phrase
from sim.explain.lines import user_line
from sim.faults import Fault
from sim.kernel import threads
from sim.kernel.clock import CommPricing, Cost
from sim.kernel.context import current_rank, this_thread
from sim.kernel.scheduler import RankThread, Scheduler
from sim.observers import captured, partials, races, replicas
from sim.observers.faults.hooks import Faults
from sim.patches import torch_seams
from sim.patches.devices import KINDS, MapDevice
from sim.patches.messages import copy_of_filters, enter_filters, leave_filters
from sim.patches.module_hooks import Hooks, enter_hooks, leave_hooks
from sim.patches.platform import SimPlatform
from sim.patches.process import Generators
from sim.script.failure import device_hint, exit_hint
from sim.script.modules import OwnModules
from sim.script.packages import SharedReferences, check_own
from sim.script.process_view import ProcessView
from sim.trace import Trace

__all__ = ["RankContext", "World", "run", "world"]

MAX_RANKS = 65_536
_numbers = itertools.count()
_PAST = {"alive": "begun already", "running": "begun already", "ended": "ended"}
_NOT_ALIVE = {"new": "has not begun", "running": "runs something already", "ended": "has ended"}


class RankContext:
    """Everything that belongs to one simulated rank and would be process-wide in a real one.

    Attributes:
        rank: Global rank.
        world: The world it lives in.
        environment: Its ``os.environ``: torchrun's variables over a copy of the process's own (bytes, as
            ``os.environ`` keeps them).
        rng_state: State of torch's default CPU generator while the rank does not run.
        c10d: Its ``torch.distributed`` state (the default group, all groups by name ...).
        generators: Its default generators of ``random`` and numpy.
        filters: Its warning filters while it does not run; each run begins with the process's.
        hooks: Its hooks on all modules and optimizers while it does not run; each run begins with the process's.
        modules: The modules that it does not share.
        view: Its ``sys.argv``, output streams and so on, if it runs a script.
        device_index: What it has made its current device, where devices are mapped to the CPU.
        faults: Asked before each of its operations; None in a world without faults.
        regions: The names of the regions (:func:`sim.region`) that it is in.
        members: The ranks of its default group, once ranks that were left have made that anew; None: all.
        generation: Counts those new default groups.
    """

    def __init__(self, world: World, rank: int, environment: dict[bytes, bytes]) -> None:
        self.world = world
        self.rank = rank
        self.environment = environment
        self.c10d = torch_seams.new_c10d_state()
        self.store = RankStore(world.store)  # kept here: torch's own references keep only its C++ half alive
        self.axis_names: dict[str, str] = {}
        self.flights = races.Flights(world, rank) if world.check_races else None
        self.partials = partials.Partials(world, rank) if world.check_replicas else None
        self.joined_by_world = False  # the world made the default group, so one init_process_group is a no-op
        self.has_joined = False  # the world has made it, whatever became of it since
        seed = ((world.seed << 20) + rank) % 2**63
        self.rng_state = torch.Generator().manual_seed(seed).get_state()
        self.generators = Generators(seed)
        self.filters = copy_of_filters()
        self.hooks: Hooks | None = None
        self.op_handlers: Any = None  # how DTensors are dispatched while it is inside of loss_parallel
        self.modules = OwnModules(world.references)
        self.view: ProcessView | None = None
        self.device_index = 0
        self.faults: Faults | None = None
        self.regions: list[str] = []
        self.members: tuple[int, ...] | None = None
        self.generation = 0
        self.inits = 0  # how often it has made its default group

    @property
    def place(self) -> tuple[int, int]:
        """Its rank in its default group, and how many ranks that has."""
        if self.members is None:
            return self.rank, self.world.world_size
        return self.members.index(self.rank), len(self.members)

    def check_caller(self) -> None:
        """Refuse a thread that is not one of this rank's: it does not hold the turn."""
        running = self.world.scheduler.running
        if running is None or running.ident != threading.get_ident() or running.context is not self:
            raise SimError(
                f"a thread that is not one of rank {self.rank}'s used one of its process groups\n"
                f"  seen: thread {threading.current_thread().name!r}\n"
                "  try: communicate from the thread that runs the rank's function, or from a threading.Thread that it "
                "starts"
            )

    def axis_of(self, group_name: str, description: str, ranks: tuple[int, ...]) -> str:
        """The name a group is reported under: its mesh axis if a mesh made it, ``world``, or its ranks."""
        if group_name in self.axis_names:
            return self.axis_names[group_name]
        if description.startswith("mesh_"):
            return description.removeprefix("mesh_")
        if description == "default_pg":
            return "world"
        if description in ("", "undefined"):
            return f"{group_name[:8]}: {ranks_phrase(ranks)}"
        return description

    def record(self, call: Call, axis: str, slot: Slot) -> None:
        """Enter a collective into the world's trace."""
        if self.world.captured is not None:
            self.world.captured.note_outputs(call.outputs, slot)
        contract, group, trace = call.contract, slot.group, self.world.trace
        shapes = _shapes(call.inputs)
        trace.add(
            Event(
                self.rank,
                contract.op,
                axis,
                group.ranks,
                slot.seq,
                call.send_bytes,
                call.recv_bytes,
                contract.dtype,
                call.line,
                reduce_op="" if contract.reduce_op == "-" else contract.reduce_op,
                root=None if contract.root is None else group.ranks[contract.root],
                input_shapes=shapes,
                output_shapes=shapes if call.outputs is call.inputs else _shapes(call.outputs),
                process_group=group.name,
                members=group.ranks,
                order=trace.next_order(),
                issued=self.world.scheduler.now,
                span=slot.span,
                digest=self._digest(call, group),
            )
        )

    def _digest(self, call: Call, group: Group) -> str:
        """The fingerprint of what the rank gives; a broadcast's root has no inputs of its own."""
        if self.world.digest is None:
            return ""
        contract = call.contract
        broadcasts = contract.op == "broadcast" and contract.root == group.ranks.index(self.rank)
        return self.world.digest(call.outputs if broadcasts else call.inputs)

    def record_message(self, message: Message, axis: str) -> None:
        """Enter one side of a point-to-point transfer into the trace."""
        size = message.tensor.numel() * message.tensor.element_size()
        sending = message.who_waits == "send"
        dtype = str(message.tensor.dtype).removeprefix("torch.")
        members = message.group.ranks
        # A receive from anybody that comes before its send does not know yet from whom.
        pair = tuple(members[end] for end in (message.sender, message.receiver) if end is not None)
        peer = message.receiver if sending else message.sender
        shape, trace = tuple(message.tensor.shape), self.world.trace
        trace.add(
            Event(
                self.rank,
                message.who_waits,
                axis,
                pair,
                -1,
                size if sending else 0,
                0 if sending else size,
                dtype,
                message.line,
                peer=None if peer is None else members[peer],
                input_shapes=(shape,) if sending else (),
                output_shapes=() if sending else (shape,),
                process_group=message.group.name,
                members=members,
                order=trace.next_order(),
                issued=message.issued,
                span=message.span,
                digest=self.world.digest([message.tensor]) if sending and self.world.digest is not None else "",
            )
        )


def _shapes(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple(tensor.shape) for tensor in tensors])


class World:
    """N ranks that live until the ``with`` block ends; made by :func:`world`.

    Attributes:
        number: Counts the worlds of this process.
        world_size: Number of ranks.
        seed: Fixes the interleaving, and the ranks' initial random state.
        trace: What the ranks have communicated so far.
        pricing: What communication costs in virtual time.
        digest: Makes the fingerprint that the trace keeps of the data a rank gives; None: it keeps none.
        check_replicas: Whether it compares copies at each optimizer step, and follows what is partial.
        meetings: Where ranks compare their copies.
        groups_made: Of which ranks they have made their groups.
        faults: What goes wrong in it, and when.
        references: To the packages of which each rank has a copy.
        backend: The name of its default group: ``sim``, or the backend whose reductions it imitates.
    """

    def __init__(
        self,
        world_size: int,
        seed: int,
        *,
        init: bool,
        intraop_threads: int | None,
        pin: int | None,
        pricing: CommPricing | None = None,
        check_races: bool = False,
        check_replicas: bool = False,
        schedule: Sequence[int] | None = None,
        faults: Sequence[Fault] = (),
        backend: str | None = None,
        own: Sequence[str] = (),
        keep_events: int | None = None,
    ) -> None:
        self.references = SharedReferences(check_own(own))
        self.number = next(_numbers)  # different for every world of the process, unlike an id
        self.world_size = world_size
        self.seed = seed
        self._schedule = None if schedule is None else iter(tuple(schedule))
        self._keep_events = keep_events
        self.trace = self._new_trace()
        self.pricing = pricing or CommPricing(None)
        self.digest: Callable[[Sequence[torch.Tensor]], str] | None = None
        self.check_races = check_races
        self.check_replicas = check_replicas
        self.meetings = replicas.Meetings()
        self.captured: captured.CapturedObjects | None = None  # what ranks share without meaning to, while they run
        self._clocks = [0.0] * world_size
        self.groups: dict[tuple[str, tuple[int, ...], int], Group] = {}
        self.groups_made = membership.GroupsMade()
        self.store = self._new_store()
        self.scheduler: Scheduler = self._new_scheduler()
        more = "" if schedule is None else f", schedule={list(schedule)}"
        more += "" if backend is None else f", backend={backend!r}"
        self.replay = f"sim.run(..., world_size={world_size}, seed={seed}{more})"
        self.op_handlers: Any = None  # how DTensors are dispatched by ranks that are not inside of loss_parallel
        self.pid = os.getpid()
        self.folder = ""  # of the script that the ranks run, if they run one
        self.device: str | None = None  # where tensors are made, if not on the CPU
        self.map_device: str | None = None  # the kind of device whose place the CPU takes
        self.backend = backend or "sim"
        self._init = init
        self._intraop_threads = intraop_threads
        self._pin = pin
        self._runs = 0
        self._workers: list[threads.Worker] = []
        self._process_groups: dict[Group, list[SimProcessGroup]] = {}
        self._cached: set[int] = set()  # ranks on whose threads torch has cached something about this world
        self._process_threads = 1
        self._life = "new"  # then "alive", "running" and "alive" in turns, "ended"
        base = {k: v for k, v in os.environb.items() if not k.startswith(b"TORCHELASTIC_")}
        self.contexts = [self._new_context(rank, base | self._torchrun_variables(rank)) for rank in self._living()]
        self.faults = Faults(self)
        self.faults.add(*faults)

    # What a world of which not every rank is run does in another way.

    def _living(self) -> Sequence[int]:
        return range(self.world_size)

    def _new_store(self) -> SharedStore:
        return SharedStore(self)

    def _new_trace(self) -> Trace:
        return Trace(self.world_size, self._keep_events)

    def _new_context(self, rank: int, environment: dict[bytes, bytes]) -> RankContext:
        return RankContext(self, rank, environment)

    def _new_group(self, name: str, ranks: tuple[int, ...]) -> Group:
        return Group(self, name, ranks)

    def platform(self) -> SimPlatform:
        """What ranks are answered that ask for their device."""
        return SimPlatform(self.device, self.map_device, self.backend)

    def _torchrun_variables(self, rank: int) -> dict[bytes, bytes]:
        size = str(self.world_size)
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": size,
            "MASTER_ADDR": "sim",
            "MASTER_PORT": "29500",
            "TORCH_FR_BUFFER_SIZE": "0",  # torch 2.15's flight recorder knows one rank per process
        }
        return {os.fsencode(name): os.fsencode(value) for name, value in variables.items()}

    # -- life --------------------------------------------------------------------------------------------------

    def __enter__(self) -> World:
        if self._life != "new":
            raise SimError(f"this world has {_PAST[self._life]}\n  try: make a new one: with sim.world(...) as w")
        torch_seams.install(self)
        try:
            self._workers = threads.lease(len(self.contexts))
        except BaseException:
            torch_seams.uninstall(self)
            raise
        self._life = "alive"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._life = "ended"
        try:
            torch_seams.uninstall(self)
        finally:
            caching = [self._workers[rank] for rank in sorted(self._cached) if not self._workers[rank].busy]
            threads.call_on(caching, torch_seams.clear_thread_caches)
            threads.release(self._workers)
            for process_group in itertools.chain.from_iterable(self._process_groups.values()):
                process_group.end()  # who still holds a group does not hold the world
            self._workers, self.contexts, self._process_groups = [], [], {}
            self.groups.clear()
            self.store = SharedStore(self)
            self.scheduler = self._new_scheduler()

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank and return the results in rank order.

        ``args`` are the same objects for every rank, as they are for threads. A world runs as many functions as
        you like, one after the other; process groups and random state go on from where the last one left them.

        A rank may end with ``sys.exit()``; its result is then None, as is that of one that a fault has killed or
        frozen. An exit with another status is a failure.

        Raises:
            RankFailed: A rank raised; also an instance of the raised exception's class, which is its cause. A
                `sim.RankLost` that no rank has caught is one of these, too.
            CollectiveMismatch: The ranks called different collectives.
            Deadlock: No rank could run any more, or an operation was left that not all ranks had joined.
            TypeError: ``fn`` is not callable, or ``args`` or ``kwargs`` are not what a call needs.
            SimError: The world does not run now: called from a rank, or outside of the ``with`` block.
            KeyboardInterrupt: Ctrl-C. Every rank ends at its next operation; a second Ctrl-C does not wait for that.
        """
        keywords = check_call(fn, args, kwargs, self.world_size)
        if current_rank() is not None:
            raise SimError("a rank cannot start ranks of its own\n  try: call sim.run outside of a rank's function")
        if self._life != "alive":
            raise SimError(f"this world {_NOT_ALIVE[self._life]}\n  try: call world.run inside of its 'with' block")
        self._life = "running"
        self._runs += 1
        scheduler = self.scheduler = self._new_scheduler()
        self.references.forward_closure(fn)
        process_rng, process_filters = torch.default_generator.get_state(), leave_filters()
        process_hooks = leave_hooks()
        for context in self.contexts:
            context.filters, context.hooks = copy_of_filters(), process_hooks
        self._process_threads = torch.get_num_threads()
        watch = self.captured = captured.watch_captured(fn, args, keywords) if self.world_size > 1 else None
        try:
            scheduler.run(self._workers, list(self.contexts), lambda rank: self._rank_main(rank, fn, args, keywords))
        finally:
            self._life, self.captured = "alive", None
            if watch is not None:
                watch.end()
            torch.default_generator.set_state(process_rng)
            enter_filters(process_filters)
            leave_hooks()
            enter_hooks(process_hooks)
            torch.set_num_threads(self._process_threads)  # a rank's setting is also that of threads yet to come
            slots = [slot for group in self.groups.values() for slot in group.slots.values()]
            messages = [message for group in self.groups.values() for message in group.unmatched()]
            slots = [slot for slot in slots if not self.faults.losses.excuse(slot)]
            messages = [message for message in messages if not self.faults.losses.excuse(message)]
            self.faults.flips.clear()
            for group in self.groups.values():
                group.forget_unfinished()
            self.meetings.clear()
            results = [rank.result for rank in scheduler.ranks]
            scheduler.ranks = []  # their results and errors belong to the caller now
        self._raise_failure(scheduler, watch)
        mismatch = membership.group_mismatch(self, at_end=True)
        if mismatch is not None:
            raise mismatch
        if watch is not None:
            watch.check()
        if slots or messages:
            raise stuck.never_completed(self, slots, messages)
        return results

    def _raise_failure(self, scheduler: Scheduler, watch: captured.CapturedObjects | None) -> None:
        fatal, scheduler.fatal = scheduler.fatal, None
        if fatal is None:
            return
        if isinstance(fatal, RankStopped):  # it ended threads that ranks had left behind
            return
        found = isinstance(fatal, (SimError, KeyboardInterrupt)) and not isinstance(fatal, RankLost)
        if found or scheduler.failed_rank is None:
            raise fatal
        hint = ""
        if self.contexts[0].view is None and isinstance(fatal, Exception):  # a script is told about its own options
            hint = device_hint(fatal, self.map_device, "sim.run(..., map_device='{}')", "a rank")
            hint += "" if watch is None else watch.hint(scheduler.failed_rank)
        elif isinstance(fatal, SystemExit):
            hint = exit_hint(fatal)
        raise rank_failed(scheduler.failed_rank, fatal, self.replay, hint) from fatal

    def _new_scheduler(self) -> Scheduler:
        runs = getattr(self, "_runs", 0)
        scheduler = Scheduler(
            self.seed * 1_000_003 + runs,
            leave=_leave,
            enter=_enter,
            stuck=self._stuck,
            clocks=self._clocks,
            schedule=self._schedule,
        )
        if runs and self.faults.plan:
            scheduler.rescue = self.faults.losses.rescue
        return scheduler

    def clock(self, rank: int) -> float:
        """The virtual clock of a rank, in seconds; it goes on from one run to the next."""
        return self._clocks[rank]

    @property
    def now(self) -> float:
        """The latest of the ranks' virtual clocks, in seconds."""
        return max(self._clocks)

    def _rank_main(self, rank: RankThread, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        context: RankContext = rank.context
        if context.rank in self.faults.losses.by_rank:
            return None  # lost in an earlier run
        this_thread.context = context
        processors = None
        try:
            if self._pin is not None:
                processors = os.sched_getaffinity(0)
                os.sched_setaffinity(0, {self._pin})
            torch.set_num_threads(self._intraop_threads or self._process_threads)
            torch_seams.enter_rank(context)
            if self._init and not context.has_joined:
                torch_seams.join_default_group(context)
            torch.set_grad_enabled(True)
            with self._modes(context):
                return check_result(fn(*args, **kwargs), fn)
        except SystemExit as end:
            if end.code in (None, 0):
                return None
            raise
        finally:
            torch_seams.leave_rank(context)
            if torch_seams.thread_is_altered():
                self._workers[rank.rank].reusable = False
            if torch_seams.thread_has_caches():
                self._cached.add(rank.rank)
            if processors is not None:
                os.sched_setaffinity(0, processors)
            this_thread.context = None

    @contextmanager
    def _modes(self, context: RankContext, *, of_helper: bool = False) -> Iterator[None]:
        """The modes of torch that every thread of a rank has to be in."""
        with (
            MapDevice(self.map_device) if self.map_device is not None else nullcontext(),
            _making_on(self.device),
            races.watching(context.flights, until_the_end=not of_helper),
            partials.watching(context.partials, until_the_end=not of_helper),
        ):
            yield

    @contextmanager
    def on_helper_thread(self, helper: RankThread) -> Iterator[None]:
        """Make the calling thread, which has just begun, one of a rank's."""
        this_thread.context = helper.context
        helper.resumed = self.catch_up
        try:
            torch.set_num_threads(self._intraop_threads or self._process_threads)
            torch_seams.enter_rank(helper.context)
            with self._modes(helper.context, of_helper=True):
                yield
        finally:
            torch_seams.leave_rank(helper.context)
            this_thread.context = None

    def catch_up(self) -> None:
        """Let the calling thread know the groups that other threads of its rank have made."""
        if this_thread.context is not None:
            torch_seams.catch_up(this_thread.context)

    # -- what the process groups ask -----------------------------------------------------------------------------

    def process_group(self, context: RankContext, name: str, ranks: tuple[int, ...]) -> SimProcessGroup:
        """The calling rank's end of the group ``name`` over ``ranks``."""
        key = (name, ranks, context.generation)
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = self._new_group(name, ranks)
            if context.faults is not None:
                context.faults.losses.note_group(group)
        process_group = SimProcessGroup(context, group, ranks.index(context.rank))
        process_group.line = user_line()
        group.left.discard(ranks.index(context.rank))
        self._process_groups.setdefault(group, []).append(process_group)
        return process_group

    def leave(self, group: Group, member: int) -> None:
        """Let go of a group once all of its members have destroyed it, so that a long run may make many."""
        group.left.add(member)
        if len(group.left) < len(group.ranks) or group.slots or any(group.unmatched()):
            return
        self.groups = {key: other for key, other in self.groups.items() if other is not group}
        for process_group in self._process_groups.pop(group, ()):
            process_group.end()
        self.groups_made.forget_before(min(made) if (made := membership.made_by_rank(self).values()) else None)

    def mismatch_error(self, slot: Slot, problem: Problem | None) -> SimError:
        """The error for a collective on which the ranks do not agree."""
        return membership.group_mismatch(self) or report.collective_mismatch(self, slot, problem)

    def execution_error(self, slot: Slot, cause: Exception) -> SimError:
        """The error for a collective that the ranks agree on and that torch cannot compute."""
        return report.cannot_carry_out(self, slot, cause)

    def message_error(self, source: Message, target: Message) -> SimError:
        """The error for a send and a receive that do not fit together."""
        return report.message_mismatch(self, source, target)

    def memory_error(self, source: Message, target: Message, cause: MemoryGone) -> SimError:
        """The error for a send and a receive of which one has no memory left."""
        return report.message_without_memory(self, source, target, cause)

    def _stuck(self) -> SimError:
        for group in self.groups.values():
            for slot in group.slots.values():
                if slot.mismatch:
                    return self.mismatch_error(slot, None)
        return membership.group_mismatch(self) or stuck.deadlock(self)


def _check_schedule(schedule: Sequence[int]) -> None:
    listed = isinstance(schedule, Sequence) and not isinstance(schedule, (str, bytes))
    odd = [c for c in schedule if isinstance(c, bool) or not isinstance(c, int) or c < 0] if listed else [schedule]
    if odd:
        raise ValueError(
            f"cannot use {odd[0]!r} {'in' if listed else 'as'} the schedule of a world\n"
            "  schedule: ints from 0 up, one each time that several ranks can run\n"
            "  try: schedule=[0, 2, 1]"
        )


def _check_devices(device: str | None, map_device: str | None) -> None:
    if device not in (None, "cpu", "meta"):
        raise ValueError(
            f"cannot make the tensors of ranks on {device!r}\n"
            "  device: None (the CPU), 'cpu', or 'meta' for tensors without data\n"
            "  try: map_device='cuda', which puts on the CPU what names that device"
        )
    if map_device is not None and map_device not in KINDS:
        raise ValueError(
            f"cannot put on the CPU what names the device {map_device!r}\n"
            f"  map_device: one of {', '.join(KINDS)}, or None\n  try: map_device='cuda'"
        )


def _check_backend(backend: str | None) -> None:
    if backend is not None and backend not in ("hccl", "nccl", "gloo"):
        raise ValueError(
            f"cannot make a world with the backend {backend!r}\n"
            "  backend: 'hccl', 'nccl' or 'gloo', whose rules for reductions are known, or None\n"
            "  try: backend='hccl'"
        )


@contextmanager
def _making_on(device: str | None) -> Iterator[None]:
    """Let tensors be made on ``device`` on this thread, where nothing else is said."""
    if device is None:
        yield
        return
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def _leave(context: RankContext) -> None:
    context.rng_state = torch.default_generator.get_state()
    context.filters, context.hooks = leave_filters(), leave_hooks()
    if context.op_handlers is not None:
        torch_seams.use_op_handlers(context, leaving=True)
    if context.view is not None:
        context.view.leave()
    context.modules.leave()


def _enter(context: RankContext) -> None:
    torch.default_generator.set_state(context.rng_state)
    enter_filters(context.filters)
    enter_hooks(context.hooks)
    if context.op_handlers is not None:
        torch_seams.use_op_handlers(context)
    if context.view is not None:
        context.view.enter()
    context.modules.enter()


def world(
    world_size: int,
    *,
    seed: int = 0,
    init: bool = True,
    intraop_threads: int | None = 1,
    pin: int | None = None,
    topology: str | Topology | None = None,
    cost: Cost | None = None,
    check_races: bool = False,
    check_replicas: bool = False,
    schedule: Sequence[int] | None = None,
    faults: Sequence[Fault] = (),
    device: str | None = None,
    map_device: str | None = None,
    backend: str | None = None,
    own: Sequence[str] = (),
    keep_events: int | None = 10_000,
) -> World:
    """Make a world of ``world_size`` ranks, for use in a ``with`` statement.

    >>> import torch.distributed as dist
    >>> def total() -> float:
    ...     x = torch.tensor([float(dist.get_rank())])
    ...     dist.all_reduce(x)
    ...     return x.item()
    >>> with world(4) as w:
    ...     w.run(total)
    [6.0, 6.0, 6.0, 6.0]
    >>> w.trace.bytes(op="all_reduce", rank=0)
    6

    Args:
        world_size: Number of ranks, 1 to 65,536.
        seed: Fixes the interleaving of the ranks and their initial random state.
        init: Make the default process group before the first function runs. A first ``init_process_group`` of the
            function itself is then accepted and does nothing. False: the function has to do it, as in a script.
        intraop_threads: Threads torch uses inside of one operation; None leaves torch's setting. One makes
            results independent of the machine's number of cores.
        pin: Processor to bind the rank threads to; since one runs at a time, switching gets cheaper. Linux only.
        topology: What links the ranks, by name ("h100", "a100", "ascend-910b", "laptop") or as a
            :class:`~hyper_parallel.core.redistribute.cost.Topology`: communication takes virtual time by its model.
            None: it takes none.
        cost: Seconds of an operation (``all_reduce``, ..., ``send``) and a
            :class:`~hyper_parallel.core.redistribute.cost.Load`, in place of the topology's own model.
        check_races: Look at every operation of every rank, and raise :class:`~sim.InFlightBufferRace` where one
            touches a buffer that an operation in flight reads or writes. Takes about twice the time.
        check_replicas: Compare copies that layouts say are equal, at each step of an optimizer and each
            ``DTensor.from_local``, and raise :class:`~sim.ReplicaMismatch` where they differ, or where a part of a sum
            is used as if it were the sum. Takes two to three times the time.
        schedule: The interleaving itself, in place of the seed's: each time that several ranks can run, which of them
            does, counted from 0 in the order in which they became able to (and over again from 0 past the last). Where
            it ends, ranks take turns. ``sim.strategies.interleavings()`` draws these, and shrinks them.
        faults: What goes wrong, and when: ``sim.faults.Kill(2, at=3)``, ``Freeze``, ``Slow``, ``SlowLink``,
            ``Corrupt``, ``Drop``.
        device: ``"meta"``: tensors are made without data unless a device is given; operations and collectives check
            and work out dtypes and shapes, and to read a value raises torch's error. None: the CPU, as ever.
        map_device: ``"cuda"`` or ``"npu"``: what names this device gets the CPU, as with ``--map-device``.
        backend: ``"hccl"``, ``"nccl"`` or ``"gloo"``: the default group reports this name, and every group of that name
            refuses to reduce the dtypes, and by the reduce ops, that the real backend refuses; it takes no part in
            anything else. None: ``"sim"``, which refuses nothing.
        own: Installed packages of which each rank gets a copy, because they keep the state of a process; besides
            those that are known to do so (accelerate, hydra, lightning, wandb, absl ...).
        keep_events: How many events of each rank the trace keeps, some 600 bytes each; None: all. Its counts and sums
            are of all events in any case.

    Raises:
        ValueError: A world size that is not an int in range, a seed that is not an int, a schedule of anything but
            ints from 0 up, a number of threads below 1, a processor that this process may not use, an unknown
            topology, device or backend, a package that cannot be copied, a number of events below 0.
        TypeError: A topology, a cost or a fault that is none.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or not 1 <= world_size <= MAX_RANKS:
        raise ValueError(
            f"cannot make a world of {world_size!r} ranks\n"
            f"  world_size: an int from 1 to {MAX_RANKS:,}\n"
            "  try: sim.run(fn, world_size=8)"
        )
    if schedule is not None:
        _check_schedule(schedule)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"cannot use {seed!r} as a seed\n  seed: an int\n  try: seed=0")
    if intraop_threads is not None and (not isinstance(intraop_threads, int) or intraop_threads < 1):
        raise ValueError(
            f"cannot use {intraop_threads!r} threads inside of an operation\n"
            "  intraop_threads: an int >= 1, or None to leave torch's setting\n  try: intraop_threads=1"
        )
    if pin is not None:
        usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if pin not in usable:
            raise ValueError(
                f"cannot pin ranks to processor {pin!r}\n"
                f"  pin: one of {', '.join(map(str, usable)) or 'none: this system cannot bind threads'}\n"
                "  try: pin=None"
            )
    if keep_events is not None and (
        isinstance(keep_events, bool) or not isinstance(keep_events, int) or keep_events < 0
    ):
        raise ValueError(
            f"cannot keep {keep_events!r} events of each rank\n"
            "  keep_events: an int from 0 up, or None to keep all\n  try: keep_events=None"
        )
    _check_devices(device, map_device)
    _check_backend(backend)
    made = World(
        world_size,
        seed,
        init=init,
        intraop_threads=intraop_threads,
        pin=pin,
        pricing=CommPricing(topology, cost),
        check_races=check_races,
        check_replicas=check_replicas,
        schedule=schedule,
        faults=faults,
        backend=backend,
        own=own,
        keep_events=keep_events,
    )
    made.device, made.map_device = device, map_device
    return made


def run(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    init: bool = True,
    intraop_threads: int | None = 1,
    pin: int | None = None,
    topology: str | Topology | None = None,
    cost: Cost | None = None,
    check_races: bool = False,
    check_replicas: bool = False,
    schedule: Sequence[int] | None = None,
    faults: Sequence[Fault] = (),
    device: str | None = None,
    map_device: str | None = None,
    backend: str | None = None,
    own: Sequence[str] = (),
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on each of ``world_size`` simulated ranks; return the results in rank order.

    >>> import torch.distributed as dist
    >>> run(dist.get_rank, world_size=3)
    [0, 1, 2]

    Arguments and errors are those of :func:`world` and :meth:`World.run`.
    """
    made = world(
        world_size,
        seed=seed,
        init=init,
        intraop_threads=intraop_threads,
        pin=pin,
        topology=topology,
        cost=cost,
        check_races=check_races,
        check_replicas=check_replicas,
        schedule=schedule,
        faults=faults,
        device=device,
        map_device=map_device,
        backend=backend,
        own=own,
    )
    check_call(fn, args, kwargs, world_size)
    with made as w:
        return w.run(fn, args, kwargs)
