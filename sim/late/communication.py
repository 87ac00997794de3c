"""Collectives and messages of late devices: on streams of the process groups, as nccl and hccl carry them out.

A group has a stream of its own on the device of each member. What a rank calls begins there behind what its current
stream holds by then, runs when that is so on all members, and `wait` makes the current stream wait for its end. The
host goes on, though not before all members have called. The memory is in use until then: it may be dropped, as with
both libraries, but it must not be touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from sim.comm.collectives import Call, Problem, execute
from sim.comm.endpoint import Endpoint
from sim.comm.group import Message, Network, Slot
from sim.comm.observer import Observer, memory_of
from sim.kernel.waiting import Waitable
from sim.late.device import LateDevice, apart
from sim.late.queue import Lane, LateQueue, LateTask

__all__ = ["LateCommunication"]

_MOVES = "the host"


class Side(NamedTuple):
    """One rank's part in an operation.

    Attributes:
        device: Of the rank.
        begins: Comes after what the rank had issued before.
        ends: Comes after the operation; held until all have called.
        tensors: Of the call, first those that it gives; each with its twin on the host.
    """

    device: LateDevice
    begins: LateTask
    ends: LateTask
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


class LateCommunication(Observer):
    """Carries out on devices what the ranks of a network communicate.

    Args:
        network: Of the ranks.
        queue: Of the world's work.
    """

    def __init__(self, network: Network, queue: LateQueue) -> None:
        self._network = network
        self._queue = queue
        self._lanes: dict[tuple[Any, ...], Lane] = {}
        self._sides: dict[Call | Message, Side] = {}
        self._ends: dict[tuple[int, Waitable], LateTask] = {}
        self._moves = queue.new_lane(-1, _MOVES)

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
        if any(tensor.device.type == "npu" for tensor in tensors) or (call and call.contract.op == "barrier"):
            with apart():
                self._begin(endpoint, what, call, key)

    def _begin(self, endpoint: Endpoint, what: Slot | Message, call: Call | None, key: tuple[Any, ...]) -> None:
        device: LateDevice = endpoint.late  # type: ignore[attr-defined]  # the ranks of this world have one
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = self._queue.new_lane(endpoint.rank, f"the stream of group {what.group.title!r}")
        begins = device.put(lane, what.describe(), after=[device.current.tail])
        ends = device.put(lane, what.describe(), held=True)
        reads, writes = memory_of(endpoint, what, call)
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor.device.type == "npu":
                    device.touch(ends, tensor, device.twin(tensor), writes=writing)
                    device.use_on(tensor, lane)
        if call is None:
            assert isinstance(what, Message)
            inputs = outputs = [_twin(device, what.tensor)]
            self._sides[what] = Side(device, begins, ends, inputs, outputs)
        else:
            inputs = [_twin(device, tensor) for tensor in call.inputs]
            outputs = inputs if call.outputs is call.inputs else [_twin(device, tensor) for tensor in call.outputs]
            self._sides[call] = Side(device, begins, ends, inputs, outputs)
        self._ends[endpoint.rank, what] = ends

    def waited(self, endpoint: Endpoint, what: Waitable) -> None:
        """Let the rank's current stream wait for an operation; after a barrier, the host does."""
        ends = self._ends.get((endpoint.rank, what))
        if ends is None or not what.ready:
            return
        device: LateDevice = endpoint.late  # type: ignore[attr-defined]
        device.wait_for(device.current, ends)
        if isinstance(what, Slot) and what.first is not None and what.first.contract.op == "barrier":
            device.finish(ends)

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

            def move() -> None:
                for call, side in zip(calls, known, strict=True):
                    call.inputs, call.outputs = side.inputs, side.outputs
                late = run(calls)
                if late is not None:
                    raise RuntimeError(late.what(range(len(calls))))

            self._move(known, move)
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
        self._move(sides, partial(run, give, take))

    def _move(self, sides: list[Side], run: Callable[[], None]) -> None:
        """Issue what comes after the beginning of all sides, and before the end of each."""
        first = sides[0].begins
        # On no stream, but behind those of all: the queue has one lane for such tasks, which orders none of them.
        self._moves.tail = None
        task = self._queue.put(self._moves, first.what, first.line, run, [side.begins for side in sides])
        for side in sides:
            self._queue.release(side.ends, [task])


def _twin(device: LateDevice, tensor: torch.Tensor) -> torch.Tensor:
    return device.twin(tensor) if tensor.device.type == "npu" else tensor


def _on_meta(call: Call) -> Call:
    """The same call without data, which says whether what the members give fits together."""
    inputs = [tensor.to("meta") for tensor in call.inputs]
    outputs = inputs if call.outputs is call.inputs else [tensor.to("meta") for tensor in call.outputs]
    return Call(call.contract, inputs, outputs, factor=call.factor, splits=call.splits)
