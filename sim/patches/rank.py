"""The process that hosts the ranks of a world, and what a rank has of its own that a real one has as a process."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from hyper_parallel.core.machine.description import Machine
from hyper_parallel.platform.cpu import CpuPlatform
from sim.comm.group import Endpoint, Network
from sim.kernel.context import current_context
from sim.late.device import LateDevice
from sim.late.shared import SharedDevice
from sim.observers.partials import Partials
from sim.observers.replicas import Replicas
from sim.ops import Subscriber
from sim.patches.locks import exchange
from sim.patches.torch_modules import Hooks, enter_hooks, leave_hooks
from sim.script.modules import OwnModules
from sim.script.output import ProcessView
from sim.script.packages import SharedReferences

Undo = Callable[[], None]


class SimPlatform(CpuPlatform):
    """What `hyper_parallel.get_platform()` answers on a simulated rank."""

    compares_collectives = True

    def __init__(
        self,
        where: str | None = None,
        stands_for: str | None = None,
        backend: str = "sim",
        machine: Machine | None = None,
    ) -> None:
        self.backend = backend
        self._machine = machine
        self._where = where
        self._stands_for = stands_for

    def device(self, index: int | None = None) -> torch.device:
        """The host; in meta mode, where there is no data, the device meta."""
        return super().device(index) if self._where is None else torch.device(self._where)

    @property
    def prefers_large_messages(self) -> bool:
        """Whether this stands for a device that does: what runs there is what is tried here."""
        return self._stands_for is not None

    @property
    def gathers_uneven(self) -> bool:
        """Whether this stands for a device that does, likewise."""
        return self._stands_for == "cuda"

    def machine(self) -> Machine:
        """Return the machine that the world was made with."""
        return self._machine or super().machine()

    def name(self) -> str:
        """Return "simulated rank"."""
        return "simulated rank"


class Generators:
    """One rank's default generators of `random` and of numpy, made when they are first used.

    >>> Generators(7).python.random() == random.Random(7).random()
    True
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @cached_property
    def python(self) -> random.Random:
        """What `random.random()` and the others draw from."""
        return random.Random(self._seed)

    @cached_property
    def numpy(self) -> np.random.RandomState:
        """What `np.random.rand()` and the others draw from."""
        return np.random.RandomState(np.random.MT19937(self._seed))


class Setting(NamedTuple):
    """A setting of the process: how to read it, and how to set it to what was read."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


class Host:
    """The process that hosts the ranks of a world, as its patches see it.

    Args:
        number: Different for every world of the process, unlike an id.
        network: Of the ranks.
        references: To the packages of which each rank has a copy.
        replicas: Where ranks compare their copies.
        partials: Follows what is partial; None: nobody wants it.
        device: Where tensors are made, if not on the CPU.
        map_device: The kind of device whose place the CPU takes.
        intraop_threads: Threads that torch uses inside of one operation; None: as many as the process.
        machine: The ranks' machine, for plans of redistributions; None: an unnamed one.

    Attributes:
        contexts: The ranks that are run.
        folder: Of the script that the ranks run, if they run one.
        op_handlers: How DTensors are dispatched by ranks that are not inside of `loss_parallel`.
        settings: Those that some rank has changed, and what they were before.
        process_threads: Threads that torch used inside of one operation before the ranks began.
        watching: Make the subscribers that every thread of a rank has, besides those of its device.
        platform: Makes what ranks are answered that ask for their device.
    """

    def __init__(
        self,
        number: int,
        network: Network,
        references: SharedReferences,
        replicas: Replicas,
        partials: Partials | None,
        *,
        device: str | None,
        map_device: str | None,
        intraop_threads: int | None,
        machine: Machine | None,
    ) -> None:
        self.number = number
        self.network = network
        self.references = references
        self.replicas = replicas
        self.partials = partials
        self.device = device
        self.map_device = map_device
        self.intraop_threads = intraop_threads
        self.machine = machine
        self.contexts: list[RankContext] = []
        self.folder = ""
        self.op_handlers: Any = None
        self.settings: dict[Setting, Any] = {}
        self.process_threads = 1
        self.watching: Sequence[Callable[[Endpoint], Iterable[Subscriber]]] = ()
        self.platform: Callable[[], SimPlatform] = lambda: SimPlatform(
            device, self.map_device, network.backend, self.machine
        )


class RankContext(Endpoint):
    """Everything that belongs to one simulated rank and would be process-wide in a real one.

    Attributes:
        host: The process that it shares with the others.
        environment: Its `os.environ`: torchrun's variables over a copy of the process's own (bytes, as
            `os.environ` keeps them).
        rng_state: State of torch's default CPU generator while the rank does not run.
        generators: Its default generators of `random` and numpy.
        filters: Its warning filters while it does not run; each run begins with the process's.
        settings: What it has made of settings of the process, while it does not run.
        hooks: Its hooks on all modules and optimizers while it does not run; each run begins with the process's.
        op_handlers: How DTensors are dispatched while it is inside of `loss_parallel`.
        modules: The modules that it does not share.
        view: Its `sys.argv`, output streams and so on, if it runs a script.
        device_index: What it has made its current device, where devices are mapped to the CPU.
        late: Its device, in a world with `device="npu"` without torch_npu.
        shared: Its part of a real device, in a world with one.
        function_modes: The modes of torch's functions that its threads are in.
    """

    def __init__(self, rank: int, host: Host, c10d: Any, environment: dict[bytes, bytes], seed: int) -> None:
        super().__init__(rank, host.network, c10d)
        self.host = host
        self.environment = environment
        self.rng_state = torch.Generator().manual_seed(seed).get_state()
        self.generators = Generators(seed)
        self.filters = copy_of_filters()
        self.settings: dict[Setting, Any] = {}
        self.hooks: Hooks | None = None
        self.op_handlers: Any = None
        self.modules = OwnModules(host.references)
        self.view: ProcessView | None = None
        self.device_index = 0
        self.late: LateDevice | None = None
        self.shared: SharedDevice | None = None
        self.function_modes: list[TorchFunctionMode] = []

    @property
    def replicas(self) -> Replicas:
        """Where the ranks compare their copies."""
        return self.host.replicas

    def leave(self) -> None:
        """Keep what the rank has made of the process: another one is about to run."""
        if self.shared is not None:
            self.shared.leave()
        self.rng_state = torch.default_generator.get_state()
        self.filters, self.hooks = leave_filters(), leave_hooks()
        for setting in self.host.settings:
            self.settings[setting] = setting.read()
        if self.op_handlers is not None:
            use_op_handlers(self, leaving=True)
        if self.view is not None:
            self.view.leave()
        self.modules.leave()

    def enter(self) -> None:
        """Restore it: the rank is about to run on."""
        if self.shared is not None:
            self.shared.enter()
        torch.default_generator.set_state(self.rng_state)
        enter_filters(self.filters)
        enter_hooks(self.hooks)
        for setting, before in self.host.settings.items():
            setting.write(self.settings.get(setting, before))
        if self.op_handlers is not None:
            use_op_handlers(self)
        if self.view is not None:
            self.view.enter()
        self.modules.enter()


def forget_settings(host: Host) -> None:
    """Let the process have the settings that it had before its ranks ran."""
    for setting, before in host.settings.items():
        setting.write(before)
    host.settings.clear()
    for context in host.contexts:
        context.settings.clear()


def use_op_handlers(context: RankContext, *, leaving: bool = False) -> None:
    """Let DTensors be dispatched as this rank has asked for, or as the process does."""
    dispatcher = DTensor._op_dispatcher
    dispatcher._custom_op_handlers = context.host.op_handlers if leaving else context.op_handlers


Filters = tuple[Any, Any, Any]
_warnings: Any = warnings  # parts of it are unknown to its stubs


def leave_filters() -> Filters:
    """What `warnings.catch_warnings` saves and restores, as it is now."""
    return _warnings.filters, _warnings.showwarning, _warnings._showwarnmsg_impl


def enter_filters(filters: Filters) -> None:
    """Put back what `leave_filters` has returned.

    Two ranks that each wait for the other inside of a `with warnings.catch_warnings()` would else leave it in the
    wrong order, and the filters of one of them would stay.
    """
    _warnings.filters, _warnings.showwarning, _warnings._showwarnmsg_impl = filters


def copy_of_filters() -> Filters:
    """The filters of the process, for a rank to change."""
    filters, *rest = leave_filters()
    return (list(filters), *rest)


def _prefixed(text: str) -> str:
    """`text` with the calling rank before each line; as it is where no rank calls, or a script's.

    The output streams of a script's ranks do that.
    """
    context = current_context()
    if context is None or context.view is not None:
        return text
    return "".join(f"[rank {context.rank}] {line}" for line in text.splitlines(keepends=True))


def _warning_prefix(host: object) -> Undo:
    """A warning that is shown says which rank it comes from; one that is recorded stays as it is."""
    original = warnings.formatwarning

    def formatwarning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        text = original(message, category, filename, lineno, line)
        logged = getattr(logging, "_warnings_showwarning", None) is not None  # then the log's own prefix is enough
        return text if logged else _prefixed(text)

    return exchange([(warnings, "formatwarning", formatwarning)])


def _logging_prefix(host: object) -> Undo:
    """What a handler writes of a record says which rank it comes from; the record itself stays as it is."""
    original = logging.Handler.format

    def format(self: logging.Handler, record: logging.LogRecord) -> str:
        return _prefixed(original(self, record))

    return exchange([(logging.Handler, "format", format)])


MESSAGE_PATCHES: tuple[Callable[[object], Undo], ...] = (_warning_prefix, _logging_prefix)
