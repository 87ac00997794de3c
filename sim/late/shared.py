"""A real device that the ranks of a world share: what each rank has of it that it would have of one of its own.

All of torch's calls that this takes are here, and are those that `torch.cuda` and `torch.npu` both have: `Stream`,
`Event`, `stream`, `current_stream`, `memory_stats` (as a nested dict, too, which is quicker),
`reset_peak_memory_stats`, `manual_seed`, `get_rng_state` and `set_rng_state`. Current streams belong to threads, in
torch's C++ too, and so to ranks. Streams are drawn from torch's pool of 32 for each priority; two ranks that get the
same one are ordered more than they would be on two devices, never less.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from sim.late.queue import Lane, LateTask
from sim.late.shadow import Shadow

_COUNTED = ("allocated", "reserved")
_MEMORY = ("memory_stats", "memory_stats_as_nested_dict", "reset_peak_memory_stats")
_RANDOM = ("manual_seed", "get_rng_state", "set_rng_state")


class Entered(NamedTuple):
    """An operation in the shadow of a device: its beginning and its end."""

    begins: LateTask
    ends: LateTask


class SharedEnd:
    """The end of an operation on a rank's side.

    Attributes:
        lane: The stream of its group.
        event: Recorded once it has been issued.
        issued: Whether it has: an event that was never recorded counts as done.
        tensors: Those that it uses, which live until the rank has waited, as with nccl.
        entered: The same in the rank's shadow; None: it has none.
    """

    __slots__ = ("entered", "event", "issued", "lane", "tensors")

    def __init__(self, lane: Any, event: Any, entered: Entered | None) -> None:
        self.lane = lane
        self.event = event
        self.entered = entered
        self.issued = False
        self.tensors: list[torch.Tensor] = []


class SharedDevice:
    """One rank's part of a device: a default stream, streams of groups, a random state, and its memory's counts.

    One rank runs at a time, so what the allocator has done during a rank's turns is what that rank has done.

    Args:
        rank: Whose.
        kind: `cuda` or `npu`.
        seed: Of its random numbers.

    Attributes:
        module: `torch.cuda` or `torch.npu`, once the world is alive.
        default: The stream that is current where no other is; None before the rank has run.
        shadow: What the rank has issued, where somebody looks for races.
        join: Waits until all ranks have joined what this one communicates.
    """

    def __init__(self, rank: int, kind: str, seed: int) -> None:
        self.rank = rank
        self.kind = kind
        self.module: Any = None
        self.default: Any = None
        self.shadow: Shadow | None = None
        self.join: Callable[[], None] = lambda: None
        self._lanes: dict[int, Lane] = {}  # of the shadow, by id of a group's stream
        self._seed = seed
        self._threads = 0  # of the rank, that are within `on_thread`
        self._random: torch.Tensor | None = None
        self._original: dict[str, Callable[..., Any]] = {}
        self._kept: list[SharedEnd] = []
        self._begun = dict.fromkeys(_COUNTED, 0)  # of all ranks, when the rank's turn began
        self._now = dict.fromkeys(_COUNTED, 0)
        self._peak = dict.fromkeys(_COUNTED, 0)

    def attach(self, module: Any) -> None:
        """Take the device's module, whose functions do not answer for ranks yet."""
        self.module = module
        self._original = {name: getattr(module, name) for name in (*_MEMORY, *_RANDOM, "synchronize")}

    def current_stream(self) -> Any:
        """The calling thread's stream."""
        return self.module.current_stream()

    @contextlib.contextmanager
    def _unseen(self) -> Iterator[None]:
        """Let streams and events be told what the shadow enters by itself."""
        with contextlib.nullcontext() if self.shadow is None else self.shadow.blind():
            yield

    # -- turns ---------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def on_thread(self) -> Iterator[None]:
        """Let a thread of the rank issue to the rank's own stream."""
        before = self.module.current_stream()
        if self.default is None:
            self.default = self.module.Stream()
            if self.shadow is not None:
                self.shadow.begin_on(self.default)
        self.default.wait_stream(before)  # what the caller has made for the rank
        self._threads += 1
        if self._threads == 1:
            self.enter()
        try:
            with self.module.stream(self.default):
                yield
        finally:
            self.leave()
            self._threads -= 1
            before.wait_stream(self.default)  # the caller reads what the rank returns

    def enter(self) -> None:
        """The rank is about to run: what happens from now on is its own."""
        if self._threads:
            self._begin_to_count()
            if self._random is None:
                self._original["manual_seed"](self._seed)
            else:
                self._original["set_rng_state"](self._random)

    def leave(self) -> None:
        """Another rank is about to run."""
        if self._threads:
            self._count()
            self._random = self._original["get_rng_state"]()

    # -- memory --------------------------------------------------------------------------------------------------------

    def _begin_to_count(self) -> None:
        self._original["reset_peak_memory_stats"]()
        self._begun = {what: current for what, current, _ in self._bytes()}

    def _bytes(self) -> Iterator[tuple[str, int, int]]:
        """By what is counted, the bytes of all ranks now, and at most since the rank's turn began."""
        stats = self._original["memory_stats_as_nested_dict"]()
        for what in _COUNTED:
            of_all = stats[f"{what}_bytes"]["all"]
            yield what, of_all["current"], of_all["peak"]

    def _count(self) -> None:
        for what, current, peak in self._bytes():
            self._peak[what] = max(self._peak[what], self._now[what] + peak - self._begun[what])
            self._now[what] += current - self._begun[what]

    def _recount(self) -> None:
        self._count()
        self._begin_to_count()

    def memory(self, what: str, *, peak: bool = False) -> int:
        """Bytes that the rank's tensors take (`allocated`), or that torch has taken from the device (`reserved`)."""
        self._recount()
        return (self._peak if peak else self._now)[what]

    def memory_stats(self) -> OrderedDict[str, Any]:
        """What torch's allocator counts, with these of the rank in place of the process's."""
        self._recount()
        stats = OrderedDict(self._original["memory_stats"]())
        for what in _COUNTED:
            stats[f"{what}_bytes.all.current"], stats[f"{what}_bytes.all.peak"] = self._now[what], self._peak[what]
        return stats

    def reset_peaks(self) -> None:
        """Start the peaks afresh."""
        self._recount()
        self._peak = dict(self._now)

    # -- communication -------------------------------------------------------------------------------------------------

    def finish_all(self) -> None:
        """Let the host wait for all that the rank has issued, and so for the ranks that have not joined it yet."""
        self.join()
        self._original["synchronize"]()
        if self.shadow is not None:
            self.shadow.finish_all()

    def lane_of_group(self, title: str) -> Any:
        """A stream for what a group communicates."""
        lane = self.module.Stream()
        if self.shadow is not None:
            self._lanes[id(lane)] = self.shadow.lane_of_group(title)
        return lane

    def begin(self, lane: Any, what: str) -> tuple[Any, SharedEnd]:
        """Mark what the rank has issued so far: an operation comes after it."""
        begins = self.module.Event()
        with self._unseen():
            begins.record(self.module.current_stream())
        entered = None if self.shadow is None else Entered(*self.shadow.begin(self._lanes[id(lane)], what))
        return begins, SharedEnd(lane, self.module.Event(), entered)

    def use(self, end: SharedEnd, lane: Any, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Keep the memory of what an operation uses until the rank has waited for it."""
        end.tensors = [*reads, *writes]
        self._kept.append(end)
        if self.shadow is not None and end.entered is not None:
            self.shadow.use(end.entered.ends, self._lanes[id(lane)], reads, writes)

    def reach(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself: the device is everybody's."""
        return tensor

    def move(self, sides: Sequence[Any], run: Callable[[], None]) -> None:
        """Carry out an operation behind the beginning of all sides, and mark its end for each.

        It is on the stream of the first member (of a message: of the sender), as all others of the group are: so they
        keep their order.
        """
        lane = sides[0].lane
        with contextlib.ExitStack() as stack:
            for side in sides:
                stack.enter_context(side.device._unseen())
            for side in sides:
                lane.wait_event(side.begins)
            with self.module.stream(lane):
                run()
            for side in sides:
                side.ends.event.record(lane)
                side.ends.issued = True
        if self.shadow is not None:
            self.shadow.move([side.ends.entered for side in sides], lambda: None)

    def wait(self, end: SharedEnd) -> None:
        """Let the current stream wait for the end of an operation.

        What it and those before it have used may be given back now: it is used again behind this wait.
        """
        with self._unseen():
            end.event.wait(self.module.current_stream())
        if self.shadow is not None and end.entered is not None:
            self.shadow.wait(end.entered.ends)
        if end in self._kept:
            before, after = self._kept[: self._kept.index(end)], self._kept[self._kept.index(end) + 1 :]
            self._kept = [each for each in before if each.lane is not end.lane] + after

    def finish(self, end: SharedEnd) -> None:
        """Let the host wait for the end of an operation."""
        with self._unseen():
            end.event.synchronize()
        if self.shadow is not None and end.entered is not None:
            self.shadow.finish(end.entered.ends)

    def forget(self) -> None:
        """Drop what is kept for operations that nobody has waited for, once they are over."""
        for end in self._kept:
            if end.issued:
                end.event.synchronize()
        self._kept = []


# -- what torch answers ------------------------------------------------------------------------------------------------


def _set_device(device: SharedDevice, index: Any) -> None:
    wanted = torch.device(index).index if isinstance(index, (str, torch.device)) else index
    if wanted not in (None, 0):
        raise RuntimeError(
            f"invalid device ordinal: {wanted}; the ranks of this world share {device.kind}:0, and LOCAL_RANK is 0"
        )


# What the module, and torch.accelerator where it has the name, answer on a rank; each gets the rank's device first.
SHARED: dict[str, Callable[..., Any]] = {
    "device_count": lambda device: 1,
    "set_device": _set_device,
    "set_device_index": _set_device,
    "default_stream": lambda device, _=None: device.default,
    "synchronize": lambda device, _=None: device.finish_all(),
    "memory_allocated": lambda device, _=None: device.memory("allocated"),
    "memory_reserved": lambda device, _=None: device.memory("reserved"),
    "max_memory_allocated": lambda device, _=None: device.memory("allocated", peak=True),
    "max_memory_reserved": lambda device, _=None: device.memory("reserved", peak=True),
    "memory_stats": lambda device, _=None: device.memory_stats(),
    "reset_peak_memory_stats": lambda device, _=None: device.reset_peaks(),
}
