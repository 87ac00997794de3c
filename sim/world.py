"""A world of N simulated ranks in this process: `sim.run` in steps, with its trace.

The one place where kernel, communication, observers, patches and texts are put together.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import TracebackType
from typing import Any, TypedDict

import torch
from typing_extensions import Unpack

from hyper_parallel.core.common.checks import check_choice, check_least, read_int
from hyper_parallel.core.common.errors import InvalidType, InvalidValue
from hyper_parallel.core.common.tables import as_html
from hyper_parallel.core.common.torch_compat import clear_sharding_caches
from hyper_parallel.core.machine.description import Machine
from hyper_parallel.platform import PlatformUnavailableError, get_platform
from hyper_parallel.platform.accelerator import torch_npu_is_installed
from sim.comm.group import Network
from sim.comm.observer import TraceRecorder, forget, observe
from sim.comm.pricing import CommPricing, Cost
from sim.comm.store import SharedStore
from sim.explain import deadlock, mismatch
from sim.explain.callables import check_call, check_result
from sim.explain.errors import RankLost, RankStopped, SimError, exit_status, rank_failed
from sim.explain.failure import device_hint, exit_hint
from sim.kernel import threads
from sim.kernel.context import current_rank, this_thread
from sim.kernel.scheduler import Scheduler
from sim.kernel.waiting import RankThread
from sim.late.communication import CommunicatingDevice, LateCommunication
from sim.late.device import LateDevice, as_device
from sim.late.memory import RaceReport
from sim.late.queue import LateQueue
from sim.late.shadow import Shadow
from sim.late.shared import SharedDevice
from sim.observers.captured import CapturedObjects, watch_captured
from sim.observers.faults.hooks import Faults
from sim.observers.faults.plan import Fault
from sim.observers.partials import Partials
from sim.observers.races import Races
from sim.observers.replicas import Replicas
from sim.patches import install, rank_thread
from sim.patches.devices import KINDS, has_named
from sim.patches.dtensor import thread_has_caches
from sim.patches.process_groups import new_c10d_state
from sim.patches.rank import Host, RankContext, copy_of_filters, enter_filters, forget_settings, leave_filters
from sim.patches.torch_modules import enter_hooks, leave_hooks
from sim.script.packages import SharedReferences, check_own
from sim.trace import Trace

__all__ = ["MAX_RANKS", "Checks", "Options", "World", "WorldOptions", "check_options", "run", "show_options", "world"]

MAX_RANKS = 65_536
_numbers = itertools.count()
_PAST = {"alive": "begun already", "running": "begun already", "ended": "ended"}
_NOT_ALIVE = {"new": "has not begun", "running": "runs something already", "ended": "has ended"}


class Checks(TypedDict, total=False):
    """The machine and the checks of a world; also keyword arguments of `sim.ranks`."""

    machine: str | Machine | None
    check_races: bool
    check_replicas: bool
    check_identity: bool


class Options(Checks, total=False):
    """The keyword arguments of `world` and `run`, for editors and type checkers; `WorldOptions` says what each does."""

    seed: int
    init: bool
    intraop_threads: int | None
    pin: int | None
    cost: Cost | None
    schedule: Sequence[int] | None
    faults: Sequence[Fault]
    device: str | None
    map_device: str | None
    backend: str | None
    own: Sequence[str]
    keep_events: int | None


@dataclass(frozen=True)
class WorldOptions:
    """How a world is to be; its fields are the keys of `Options`.

    Args:
        seed: Fixes the interleaving of the ranks and their initial random state.
        init: Make the default process group before the first function runs. A first `init_process_group` of the
            function itself is then accepted and does nothing. False: the function has to do it, as in a script.
        intraop_threads: Threads torch uses inside of one operation; None leaves torch's setting. One makes
            results independent of the machine's number of cores.
        pin: Processor to bind the rank threads to; since one runs at a time, switching gets cheaper. Linux only.
        machine: The ranks' machine: a name (`hyper-parallel hardware`), a file, or a `core.machine.Machine`.
            Redistributions are planned for it, and communication takes virtual time by its prices. None:
            plans are those of an unnamed machine of one node, and communication takes no time.
        cost: Seconds of an operation (`all_reduce`, ..., `send`) and a
            `hyper_parallel.core.machine.Load`, in place of the machine's prices.
        check_races: Look at every operation of every rank, and raise `sim.InFlightBufferRace` where one
            touches a buffer that an operation in flight reads or writes. Takes about twice the time.
        check_replicas: Compare copies that layouts say are equal, at each step of an optimizer and each
            `DTensor.from_local`, and raise `sim.ReplicaMismatch` where they differ, or where a part of a sum
            is used as if it were the sum. Takes two to three times the time.
        check_identity: Raise `sim.CollectiveMismatch` where ranks agree on a collective and not on what it is for: an
            engine for sharded parameters gathers another unit on each, say; or on a message, and not on which turn of
            a pipeline it is. False where ranks mean the same by other names.
        schedule: The interleaving itself, in place of the seed's: each time that several ranks can run, which of them
            does, counted from 0 in the order in which they became able to (and over again from 0 past the last). Where
            it ends, ranks take turns. `sim.strategies.interleavings()` draws these, and shrinks them.
        faults: What goes wrong, and when: `sim.faults.Kill(2, at=3)`, `Freeze`, `Slow`, `SlowLink`,
            `Corrupt`, `Drop`.
        device: `"meta"`: tensors are made without data unless a device is given; operations and collectives check
            and work out dtypes and shapes, and to read a value raises torch's error. `"cuda"`: all ranks share this
            machine's first GPU, each with streams, random numbers and counts of memory of its own. `"npu"`: the same on
            an Ascend device; without torch_npu each rank has a simulated accelerator of that name, whose streams run
            late, in an order drawn from the seed. None: the CPU, as ever.
        map_device: `"cuda"` or `"npu"`: what names this device gets the CPU, as with `--map-device`.
        backend: `"hccl"`, `"nccl"` or `"gloo"`: the default group reports this name, and every group of that name
            refuses to reduce the dtypes, and by the reduce ops, that the real backend refuses. `"gloo"` also refuses
            to gather, scatter and broadcast the dtypes that the real one does not. It takes no part in anything else.
            None: `"sim"`, which refuses nothing.
        own: Installed packages of which each rank gets a copy, because they keep the state of a process; besides
            those that are known to do so (accelerate, hydra, lightning, wandb, absl ...).
        keep_events: How many events of each rank the trace keeps, some 600 bytes each; None: all. Its counts and sums
            are of all events in any case.

    Raises:
        TypeError: A seed, a number of threads or events, or a choice in a schedule that is not an int.
        ValueError: A negative choice in a schedule, a number of threads below 1, a processor that this process may not
            use, an unknown device or backend, a number of events below 0.
    """

    seed: int = 0
    init: bool = True
    intraop_threads: int | None = 1
    pin: int | None = None
    machine: str | Machine | None = None
    cost: Cost | None = None
    check_races: bool = False
    check_replicas: bool = False
    check_identity: bool = True
    schedule: Sequence[int] | None = None
    faults: Sequence[Fault] = ()
    device: str | None = None
    map_device: str | None = None
    backend: str | None = None
    own: Sequence[str] = ()
    keep_events: int | None = 10_000

    def __post_init__(self) -> None:
        asked, hint = "cannot make a world", "schedule=[0, 2, 1]: which rank, each time that several can run"
        for place, choice in enumerate(self.schedule or ()):
            read_int(asked, f"schedule[{place}]", choice, 0, hint)
        read_int(asked, "seed", self.seed, hint="seed=0", most=float("inf"))
        check_least(asked, 1, intraop_threads=self.intraop_threads)
        check_least(asked, 0, keep_events=self.keep_events)
        _check_pin(asked, self.pin)
        if self.device is not None:
            hint = "'meta' for tensors without data, or map_device='cuda', which puts on the CPU what names that device"
            check_choice(asked, "device", self.device, ("cpu", "meta", *KINDS), hint)
        if self.device in KINDS and self.map_device is not None:
            seen = f"device: {self.device!r}   map_device: {self.map_device!r}"
            raise InvalidValue(asked, "it has devices of its own, of which none is mapped", seen, "one of them")
        if self.map_device is not None:
            check_choice(asked, "map_device", self.map_device, KINDS)
        if self.backend is not None:
            check_choice(asked, "backend", self.backend, ("hccl", "nccl", "gloo"))


class World:
    """N ranks that live until the `with` block ends; made by `world`.

    Attributes:
        world_size: Number of ranks.
        options: How it is to be.
        scheduler: Lets its ranks run.
        trace: The ranks' communication so far.
        network: What they share to communicate.
        host: What they share of the process.
        contexts: What each of them has of its own.
        faults: Its faults, and when they happen.
    """

    def __init__(self, world_size: int, options: WorldOptions) -> None:
        self.world_size = world_size
        self.options = options
        pricing, references = CommPricing(options.machine, options.cost), SharedReferences(check_own(options.own))
        schedule = None if options.schedule is None else iter(tuple(options.schedule))
        self.scheduler = self._new_scheduler(schedule)
        self.trace = self._new_trace()
        self.network = Network(
            self.scheduler,
            world_size,
            trace=self.trace,
            store=self._new_store(),
            pricing=pricing,
            backend=options.backend or "sim",
            explain=mismatch,
            replay=_replay_of(world_size, options),
        )
        self.network.check_identity = options.check_identity
        self._captured: CapturedObjects | None = None  # what ranks share without meaning to, while they run
        self._runs = 0
        self._workers: list[threads.Worker] = []
        self._cached: set[int] = set()  # ranks on whose threads torch has cached something about this world
        self._life = "new"  # then "alive", "running" and "alive" in turns, "ended"
        races = Races(self.network) if options.check_races else None
        partials = Partials(self.network) if options.check_replicas else None
        self.replicas = Replicas(self.network, by_itself=options.check_replicas)
        self.host = Host(
            next(_numbers),
            self.network,
            references,
            self.replicas,
            partials,
            device=options.device,
            map_device=options.map_device,
            intraop_threads=options.intraop_threads,
            machine=pricing.machine,
        )
        self.host.watching = [each.watching for each in (races, partials) if each is not None]
        base = {k: v for k, v in os.environb.items() if not k.startswith(b"TORCHELASTIC_")}
        self.contexts = [self._new_context(rank, base | self._torchrun_variables(rank)) for rank in self._living()]
        self.host.contexts = self.contexts
        self.network.endpoints = list(self.contexts)
        self._queue = self._make_devices(races)
        for observer in (TraceRecorder(self.network), races, partials):
            if observer is not None:
                observe(self.network, observer)
        self.faults = Faults(self.network, options.seed)
        self.faults.add(*options.faults)

    def _make_devices(self, races: Races | None) -> LateQueue | None:
        """Give the ranks the device that they are to have: parts of a real one, or each a late one."""
        kind = self.options.device
        if kind == "npu" and not torch_npu_is_installed():
            return self._make_late(races)
        if kind in KINDS:
            try:
                get_platform(kind)
            except PlatformUnavailableError as missing:
                asked, blame = "cannot make a world", str(missing).partition(": ")[2].partition(";")[0]
                hint = f"map_device={kind!r} (--map-device), which puts on the CPU what names that device"
                raise InvalidValue(asked, blame, f"device: {kind!r}", hint) from missing
            if has_named("npu"):  # for torch's engine that is the accelerator now: it would end in an assertion
                blame = "torch has been told of a simulated npu, and backward on another device no longer works"
                seen = f"device: {kind!r}   npu: named by an earlier device='npu' or map_device='npu' in this process"
                hint = "a process of its own, in which no world has had an npu"
                raise InvalidValue("cannot make a world", blame, seen, hint)
            self._share(kind, races)
        return None

    def _share(self, kind: str, races: Races | None) -> None:
        """Give each rank its part of a device, and where somebody looks for races, its shadow."""
        queue, devices = LateQueue(self.options.seed), {}
        for context in self.contexts:
            seed = _seed_of(self.options.seed, context.rank)
            context.shared = devices[context.rank] = shared = SharedDevice(context.rank, kind, seed)
            if races is not None:
                shared.shadow = shadow = Shadow(context.rank, kind, shared.current_stream, queue, self._report())
                shadow.flights = flights = races.of_rank(context.rank)
                flights.apart, flights.follow = kind, shadow.follow
        self._carry_out_on(devices)

    def _report(self) -> RaceReport:
        return RaceReport(self.scheduler.fail, lambda: self.network.replay)

    def _make_late(self, races: Races | None) -> LateQueue:
        """Give each rank a device whose work is late."""
        queue, report = LateQueue(self.options.seed, as_device), None if races is None else self._report()
        devices = {}
        for context in self.contexts:
            context.late = devices[context.rank] = LateDevice(context.rank, queue, report)
            if races is not None:
                context.late.flights = flights = races.of_rank(context.rank)
                flights.apart = "npu"
        self._carry_out_on(devices)
        return queue

    def _carry_out_on(self, devices: Mapping[int, CommunicatingDevice]) -> None:
        """Let devices carry out what ranks communicate."""
        self.network.devices = communication = LateCommunication(devices)
        for context in self.contexts:
            devices[context.rank].join = partial(communication.join, context)
        observe(self.network, communication)

    # What a world of which not every rank is run does in another way.

    def _living(self) -> Sequence[int]:
        return range(self.world_size)

    def _new_store(self) -> SharedStore:
        return SharedStore(self.scheduler)

    def _new_trace(self) -> Trace:
        return Trace(self.world_size, self.options.keep_events)

    def _new_context(self, rank: int, environment: dict[bytes, bytes]) -> RankContext:
        seed = _seed_of(self.options.seed, rank)
        return RankContext(rank, self.host, new_c10d_state(), environment, seed)

    def _new_scheduler(self, schedule: Any) -> Scheduler:
        return Scheduler(
            self.options.seed,
            leave=RankContext.leave,
            enter=RankContext.enter,
            stuck=self._stuck,
            clocks=[0.0] * self.world_size,
            schedule=schedule,
        )

    def _torchrun_variables(self, rank: int) -> dict[bytes, bytes]:
        size = str(self.world_size)
        variables = {
            "RANK": str(rank),
            **_places(rank, size, one_device_each=self.options.device in KINDS),
            "WORLD_SIZE": size,
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": size,
            "MASTER_ADDR": "sim",
            "MASTER_PORT": "29500",
            "TORCH_FR_BUFFER_SIZE": "0",  # torch 2.15's flight recorder knows one rank per process
        }
        return {os.fsencode(name): os.fsencode(value) for name, value in variables.items()}

    # -- life --------------------------------------------------------------------------------------------------

    @property
    def replay(self) -> str:
        """The call that runs the same again, as errors name it."""
        return self.network.replay

    @replay.setter
    def replay(self, call: str) -> None:
        self.network.replay = call

    def clock(self, rank: int) -> float:
        """The virtual clock of a rank, in seconds; it goes on from one run to the next."""
        return self.scheduler.clocks[rank]

    @property
    def now(self) -> float:
        """The latest of the ranks' virtual clocks, in seconds."""
        return max(self.scheduler.clocks)

    def __repr__(self) -> str:
        return f"{self._line()}, {self.trace!r})"

    def _repr_html_(self) -> str:
        return as_html(f"{self._line()})") + self.trace._repr_html_()

    def _line(self) -> str:
        """Say what is special about it, as a call that is still open."""
        told = [(each.name, getattr(self.options, each.name), each.default) for each in fields(self.options)]
        changed = "".join(f", {name}={reprlib.repr(value)}" for name, value, default in told if value != default)
        return f"{type(self).__name__}({self.world_size:,} ranks, {self._life}{changed}"

    def __enter__(self) -> World:
        if self._life != "new":
            raise SimError(f"this world has {_PAST[self._life]}\n  try: make a new one: with sim.world(...) as w")
        install.install(self.host)
        try:
            self._workers = threads.lease(len(self.contexts))
        except BaseException:
            install.uninstall(self.host)
            raise
        self._life = "alive"
        clear_sharding_caches()  # past groups of real processes: they cannot be freed in a process that a rank forks
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._life = "ended"
        try:
            install.uninstall(self.host)
        finally:
            caching = [self._workers[rank] for rank in sorted(self._cached) if not self._workers[rank].busy]
            threads.call_on(caching, clear_sharding_caches)
            threads.release(self._workers)
            self.network.close()
            self._workers, self.contexts, self.host.contexts = [], [], []
            self.network.store = SharedStore(self.scheduler)
            self.scheduler.restart(0)

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank and return the results in rank order.

        `args` are the same objects for every rank, as they are for threads. A world runs as many functions as
        you like, one after the other; process groups and random state go on from where the last one left them.

        A rank may end with `sys.exit()`; its result is then None, as is that of one that a fault has killed or
        frozen. An exit with another status is a failure.

        Raises:
            RankFailed: A rank raised; also an instance of the raised exception's class, which is its cause. A
                `sim.RankLost` that no rank has caught is one of these, too.
            CollectiveMismatch: The ranks called different collectives.
            Deadlock: No rank could run any more, or an operation was left that not all ranks had joined.
            TypeError: `fn` is not callable, or `args` or `kwargs` are not what a call needs.
            SimError: The world does not run now: called from a rank, or outside of the `with` block.
            KeyboardInterrupt: Ctrl-C. Every rank ends at its next operation; a second Ctrl-C does not wait for that.
        """
        keywords = check_call(fn, args, kwargs, self.world_size)
        if current_rank() is not None:
            raise SimError("a rank cannot start ranks of its own\n  try: call sim.run outside of a rank's function")
        if self._life != "alive":
            raise SimError(f"this world {_NOT_ALIVE[self._life]}\n  try: call world.run inside of its 'with' block")
        self._life = "running"
        self._runs += 1
        scheduler = self.scheduler
        scheduler.restart(self.options.seed * 1_000_003 + self._runs)
        self.network.stores.clear()
        self.network.stepped.clear()
        self.host.references.forward_closure(fn)
        process_rng, process_filters = torch.default_generator.get_state(), leave_filters()
        process_hooks = leave_hooks()
        for context in self.contexts:
            context.filters, context.hooks = copy_of_filters(), process_hooks
        self.host.process_threads = torch.get_num_threads()
        watch = self._captured = watch_captured(fn, args, keywords) if self.world_size > 1 else None
        if watch is not None:
            observe(self.network, watch, first=True)
        try:
            if self._queue is not None:
                self._queue.restart(self.options.seed * 1_000_003 + self._runs)
            scheduler.run(self._workers, list(self.contexts), lambda rank: self._rank_main(rank, fn, args, keywords))
        finally:
            self._life, self._captured = "alive", None
            if self._queue is not None and scheduler.fatal is None:
                self._queue.drain()
            if watch is not None:
                forget(self.network, watch)
                watch.end()
            torch.default_generator.set_state(process_rng)
            enter_filters(process_filters)
            leave_hooks()
            enter_hooks(process_hooks)
            forget_settings(self.host)
            torch.set_num_threads(self.host.process_threads)  # a rank's setting is also that of threads yet to come
            groups = self.network.groups.values()
            slots = [slot for group in groups for slot in group.slots.values()]
            messages = [message for group in groups for message in group.unmatched()]
            slots = [slot for slot in slots if not self.faults.losses.excuse(slot)]
            messages = [message for message in messages if not self.faults.losses.excuse(message)]
            self.faults.flips.clear()
            for group in groups:
                group.forget_unfinished()
            self.replicas.clear()
            results = [rank.result for rank in scheduler.ranks]
            scheduler.ranks = []  # their results and errors belong to the caller now
        self._raise_failure(scheduler, watch)
        disagreement = mismatch.group_mismatch(self.network, at_end=True) or mismatch.unequal_steps(self.network)
        if disagreement is not None:
            raise disagreement
        if watch is not None:
            watch.check()
        if slots or messages:
            raise deadlock.never_completed(self.network, slots, messages)
        return results

    def _raise_failure(self, scheduler: Scheduler, watch: CapturedObjects | None) -> None:
        fatal, scheduler.fatal = scheduler.fatal, None
        if fatal is None:
            return
        if isinstance(fatal, RankStopped):  # it ended threads that ranks had left behind
            return
        found = isinstance(fatal, (SimError, KeyboardInterrupt)) and not isinstance(fatal, RankLost)
        if found or scheduler.failed_rank is None:
            raise fatal
        hint = ""
        if self.contexts[0].view is None and isinstance(fatal, Exception):  # a script learns of its own options
            hint = device_hint(fatal, self.host.map_device, "sim.run(..., map_device='{}')", "a rank")
            hint += "" if watch is None else watch.hint(scheduler.failed_rank)
        elif isinstance(fatal, SystemExit):
            hint = exit_hint(fatal)
        raise rank_failed(scheduler.failed_rank, fatal, self.replay, hint) from fatal

    def _rank_main(self, rank: RankThread, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        context: RankContext = rank.context
        if context.rank in self.faults.losses.by_rank:
            return None  # lost in an earlier run
        this_thread.context = context
        processors = None
        try:
            if self.options.pin is not None:
                processors = os.sched_getaffinity(0)
                os.sched_setaffinity(0, {self.options.pin})
            torch.set_num_threads(self.host.intraop_threads or self.host.process_threads)
            rank_thread.enter_rank(context)
            if self.options.init and not context.has_joined:
                rank_thread.join_default_group(context)
            torch.set_grad_enabled(True)
            with rank_thread.modes(context):
                return check_result(fn(*args, **kwargs), fn)
        except SystemExit as end:
            if exit_status(end) == 0:
                return None
            raise
        finally:
            for ended in self.network.ended:
                ended(context)
            rank_thread.leave_rank()
            if rank_thread.thread_is_altered():
                self._workers[rank.rank].reusable = False
            if thread_has_caches():
                self._cached.add(rank.rank)
            if processors is not None:
                os.sched_setaffinity(0, processors)
            this_thread.context = None

    def _stuck(self) -> SimError:
        for group in self.network.groups.values():
            for slot in group.slots.values():
                if slot.mismatch:
                    return mismatch.collective_mismatch(self.network, slot, None)
        return mismatch.group_mismatch(self.network) or deadlock.deadlock(self.network)


def _seed_of(seed: int, rank: int) -> int:
    return ((seed << 20) + rank) % 2**63


def _places(rank: int, size: str, *, one_device_each: bool) -> dict[str, str]:
    """Which rank it is of its node: one of a single node, or each a node with one device."""
    if one_device_each:
        return {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": size}
    return {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}


def _replay_of(world_size: int, options: WorldOptions) -> str:
    more = "" if options.schedule is None else f", schedule={list(options.schedule)}"
    more += "" if options.device is None else f", device={options.device!r}"
    more += "" if options.backend is None else f", backend={options.backend!r}"
    return f"sim.run(..., world_size={world_size}, seed={options.seed}{more})"


def _check_pin(asked: str, pin: int | None) -> None:
    if pin is not None:
        usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if pin not in usable:
            seen = f"processors: {', '.join(map(str, usable)) or 'none: this system cannot bind threads'}"
            raise InvalidValue(asked, f"ranks cannot be pinned to processor {pin!r}", seen, "pin=None")


def check_options(asked: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise TypeError, with the options that are spelled alike, if one is given that is not known."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known) or ["one of these"]
            seen = f"options: {', '.join(known)}"
            raise InvalidType(asked, f"there is no option {name!r}", seen, " or ".join(near))


def world(world_size: int, **options: Unpack[Options]) -> World:
    """Make a world of `world_size` ranks, for use in a `with` statement.

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
        **options: Those of `WorldOptions`: `seed`, `machine`, `check_races`, `faults` ...

    Raises:
        ValueError: A world size out of range, an unknown machine, a package that cannot be copied, and
            what `WorldOptions` refuses.
        TypeError: A world size that is no int, a machine, a cost or a fault that is none, or an option that there is
            not.
    """
    asked = "cannot make a world"
    size = read_int(asked, "world_size", world_size, 1, "sim.run(fn, world_size=8)", MAX_RANKS)
    check_options(asked, options, [each.name for each in fields(WorldOptions)])
    return World(size, WorldOptions(**options))


def run(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[Options],
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on each of `world_size` simulated ranks; return the results in rank order.

    >>> import torch.distributed as dist
    >>> run(dist.get_rank, world_size=3)
    [0, 1, 2]

    Arguments and errors are those of `world` and `World.run`.
    """
    made = world(world_size, **options)
    check_call(fn, args, kwargs, world_size)
    with made as w:
        return w.run(fn, args, kwargs)


def show_options(fn: Callable[..., Any], kind: type) -> None:
    """Let `inspect.signature`, and so `help`, show the keys of `kind` in place of `fn`'s `**options`."""
    signature = inspect.signature(fn)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = inspect.signature(WorldOptions).parameters
    shown = [each.replace(kind=each.KEYWORD_ONLY) for name, each in options.items() if name in kind.__annotations__]
    fn.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]


show_options(world, Options)
show_options(run, Options)
