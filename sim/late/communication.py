"""Collectives and messages of devices: on streams of the process groups, as nccl and hccl carry them out.

A group has a stream of its own on the device of each member. What a rank calls begins there behind what its current
stream holds by then, runs when that is so on all members, and `wait` makes the current stream wait for its end. The
host goes on, though not before all members have called. The memory is in use until then: it may be dropped, as with
both libraries, but it must not be touched.

The devices may be late ones, of which each rank has its own, or one real device that the ranks share: all that differs
is behind `CommunicatingDevice`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch

from sim.comm.collectives import Call, Problem, execute
from sim.comm.group import Endpoint, Message, Slot
from sim.comm.observer import Observer, memory_of
from sim.kernel.waiting import Waitable
from sim.late.device import apart


class CommunicatingDevice(Protocol):
    """What communication asks of the device of a rank.

    A lane is a stream of a group; beginnings and ends are marks on it, such as events.

    Attributes:
        kind: The type of its tensors.
        join: Waits until all ranks have joined what this one communicates; called where the host waits for all.
    """

    kind: str
    join: Callable[[], None]

    def lane_of_group(self, title: str) -> Any:
        """A stream for what a group communicates."""

    def begin(self, lane: Any, what: str) -> tuple[Any, Any]:
        """Issue an operation behind the current stream; returns its beginning, and its end, which is yet to come."""

    def use(self, end: Any, lane: Any, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Note which tensors an operation reads and writes until its end."""

    def reach(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor through which whoever carries out an operation gets at one of the device."""

    def move(self, sides: Sequence[Side], run: Callable[[], None]) -> None:
        """Issue what comes after the beginning of all sides, and before the end of each."""

    def wait(self, end: Any) -> None:
        """Let the current stream wait for the end of an operation."""

    def finish(self, end: Any) -> None:
        """Let the host wait for the end of an operation."""

    def forget(self) -> None:
        """Drop what is kept for operations that nobody has waited for."""


class Side(NamedTuple):
    """One rank's part in an operation.

    Attributes:
        device: Of the rank.
        lane: The stream of the group there.
        begins: Comes after what the rank had issued before.
        ends: Comes after the operation, once all have called.
        inputs: What it gives, within reach of who carries it out.
        outputs: What it receives into, alike.
    """

    device: CommunicatingDevice
    lane: Any
    begins: Any
    ends: Any
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


class LateCommunication(Observer):
    """Carries out on devices what the ranks of a network communicate.

    Args:
        devices: By rank.

    Attributes:
        kind: The type of their tensors.
    """

    def __init__(self, devices: Mapping[int, CommunicatingDevice]) -> None:
        self._devices = devices
        self.kind = next(iter(devices.values())).kind
        self._lanes: dict[tuple[Any, ...], Any] = {}
        self._sides: dict[Call | Message, Side] = {}
        self._ends: WeakKeyDictionary[Waitable, dict[int, Any]] = WeakKeyDictionary()  # by rank

    # -- what a rank does ----------------------------------------------------------------------------------------------

    def issued(self, endpoint: Endpoint, what: Slot | Message, call: Call | None) -> None:
        """Let an operation begin on the stream of its group, behind the current one."""
        if call is None:
            assert isinstance(what, Message)
            tensors: Sequence[torch.Tensor] = (what.tensor,)
            peer = what.receiver if what.who_waits == "send" else what.sender
            key: tuple[Any, ...] = (endpoint.rank, what.group.name, what.group.ranks, what.who_waits, peer, what.tag)
        else:
            tensors = call.inputs if call.inputs is call.outputs else (*call.inputs, *call.outputs)
            key = (endpoint.rank, what.group.name, what.group.ranks)
        if any(map(self._is_there, tensors)) or (call and call.contract.op == "barrier"):
            with apart():
                self._begin(endpoint, what, call, key)

    def _is_there(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.kind

    def _begin(self, endpoint: Endpoint, what: Slot | Message, call: Call | None, key: tuple[Any, ...]) -> None:
        device = self._devices[endpoint.rank]
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = device.lane_of_group(f"the stream of group {what.group.title!r}")
        begins, ends = device.begin(lane, what.describe())
        reads, writes = memory_of(endpoint, what, call)
        if call is not None and isinstance(call.factor, torch.Tensor):
            reads = (*reads, call.factor)
        device.use(ends, lane, *[[each for each in tensors if self._is_there(each)] for tensors in (reads, writes)])
        if call is None:
            assert isinstance(what, Message)
            inputs = outputs = [self._reach(device, what.tensor)]
            self._sides[what] = Side(device, lane, begins, ends, inputs, outputs)
        else:
            inputs = [self._reach(device, tensor) for tensor in call.inputs]
            same = call.outputs is call.inputs
            outputs = inputs if same else [self._reach(device, tensor) for tensor in call.outputs]
            if isinstance(call.factor, torch.Tensor):
                call.factor = self._reach(device, call.factor)
            self._sides[call] = Side(device, lane, begins, ends, inputs, outputs)
        self._ends.setdefault(what, {})[endpoint.rank] = ends

    def _reach(self, device: CommunicatingDevice, tensor: torch.Tensor) -> torch.Tensor:
        return device.reach(tensor) if self._is_there(tensor) else tensor

    def waited(self, endpoint: Endpoint, what: Waitable) -> None:
        """Let the rank's current stream wait for an operation; after a barrier, the host does."""
        ends = self._ends.get(what, {}).get(endpoint.rank)
        if ends is None or not what.ready:
            return
        device = self._devices[endpoint.rank]
        device.wait(ends)
        if isinstance(what, Slot) and what.contract is not None and what.contract.op == "barrier":
            device.finish(ends)

    def join(self, endpoint: Endpoint) -> None:
        """Let a rank wait until all that it has issued is under way: nothing is, before all ranks have called."""
        for what in [what for what, ends in self._ends.items() if endpoint.rank in ends]:
            endpoint.scheduler.block(what)

    def ended(self, endpoint: Endpoint) -> None:
        """Drop what is kept for operations that nobody has waited for: the rank's function has ended."""
        self._devices[endpoint.rank].forget()

    # -- when all have come --------------------------------------------------------------------------------------------

    def carry_out(self, calls: list[Call], run: Callable[[list[Call]], Problem | None]) -> Problem | None:
        """Issue a collective that all members have called, or do it now if it is not one of devices.

        Args:
            calls: Of the members.
            run: Moves the data.

        Returns:
            What does not fit together.
        """
        sides = [self._sides.pop(call, None) for call in calls]
        known = [side for side in sides if side is not None]
        if not known:
            return run(calls)
        if len(known) < len(calls):
            lack = tuple(place for place, side in enumerate(sides) if side is None)
            return Problem(lambda ranks: "device (on the host on some ranks)", "let all ranks use one device", lack)
        problem = execute([_on_meta(call) for call in calls])
        if problem is None:
            for call, side in zip(calls, known, strict=True):  # what is late keeps no tensor of a device alive
                call.inputs, call.outputs = side.inputs, side.outputs

            def move() -> None:
                late = run(calls)
                if late is not None:
                    raise RuntimeError(late.what(range(len(calls))))

            known[0].device.move(known, move)
        return problem

    def deliver(self, source: Message, target: Message, run: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Issue a transfer of which both sides have come, or do it now if none of them is on a device."""
        given, taken = self._sides.pop(source, None), self._sides.pop(target, None)
        sides = [side for side in (given, taken) if side is not None]
        if not sides:
            run(source.tensor, target.tensor)
            return
        give = source.tensor if given is None else given.inputs[0]
        take = target.tensor if taken is None else taken.inputs[0]
        sides[0].device.move(sides, partial(run, give, take))


def _on_meta(call: Call) -> Call:
    """The same call without data, which says whether what the members give fits together."""
    inputs = [tensor.to("meta") for tensor in call.inputs]
    outputs = inputs if call.outputs is call.inputs else [tensor.to("meta") for tensor in call.outputs]
    return Call(call.contract, inputs, outputs, factor=call.factor, splits=call.splits)
