"""Observers of communication, and the one that every world has: it enters events into the trace.

A network calls an observer only for what the observer overrides, so that a world pays for nothing that nobody wants.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sim.comm.collectives import Call
from sim.comm.group import Endpoint, Group, Message, Network, Slot
from sim.comm.trace import Event
from sim.kernel.waiting import Waitable

_EVENTS = ("issuing", "issued", "completed", "waited", "made", "ended")


class Observer:
    """What may be of interest in what ranks communicate; a method is called on the thread of its rank."""

    def issuing(self, endpoint: Endpoint, group: Group, what: Call | Message) -> None:
        """A rank is about to begin an operation, of which nobody else knows yet; may raise, or change what it gives."""

    def issued(self, endpoint: Endpoint, what: Slot | Message, call: Call | None) -> None:
        """A rank has begun an operation; `call` is its part in a collective, None for a message."""

    def completed(self, what: Slot | Message, start: float, end: float) -> None:
        """All have come and the data has moved, between these virtual times."""

    def waited(self, endpoint: Endpoint, what: Waitable) -> None:
        """A rank has waited for an operation, or has seen that it is over."""

    def made(self, group: Group) -> None:
        """The first member has made a group."""

    def ended(self, endpoint: Endpoint) -> None:
        """A rank's function has ended."""


def observe(network: Network, observer: Observer, *, first: bool = False) -> None:
    """Let a network call an observer, after all others or before them."""
    for event in _EVENTS:
        if getattr(type(observer), event) is not getattr(Observer, event):
            others, own = getattr(network, event), getattr(observer, event)
            setattr(network, event, (own, *others) if first else (*others, own))


def forget(network: Network, observer: Observer) -> None:
    """Let a network call an observer no longer."""
    for event in _EVENTS:
        own = getattr(observer, event)
        setattr(network, event, tuple(each for each in getattr(network, event) if each != own))


def memory_of(endpoint: Endpoint, what: Slot | Message, call: Call | None) -> tuple[Sequence[torch.Tensor], ...]:
    """What a rank's part in an operation only reads, and what it writes.

    A root's own data, and what is reduced elsewhere, stay as they are.
    """
    if call is None:
        assert isinstance(what, Message)
        return ((what.tensor,), ()) if what.who_waits == "send" else ((), (what.tensor,))
    assert isinstance(what, Slot)
    op, at_root = call.contract.op, call.contract.root == what.group.ranks.index(endpoint.rank)
    if (op == "broadcast" and at_root) or (op == "reduce" and not at_root):
        return (*call.inputs, *call.outputs), ()
    return call.inputs, call.outputs


class TraceRecorder(Observer):
    """Enters what ranks communicate into a network's trace, and when it ran."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def issued(self, endpoint: Endpoint, what: Slot | Message, call: Call | None) -> None:
        """Enter a rank's part in an operation."""
        if call is None:
            self._add_message(endpoint.rank, what)  # type: ignore[arg-type]  # what has no call is a message
            return
        contract, group, trace = call.contract, what.group, self._network.trace
        shapes = _shapes(call.inputs)
        trace.add(
            Event(
                endpoint.rank,
                contract.op,
                call.axis,
                group.ranks,
                what.seq,
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
                issued=self._network.scheduler.now,
                span=what.span,
                digest=call.digest,
            )
        )

    def _add_message(self, rank: int, message: Message) -> None:
        """Enter one side of a point-to-point transfer."""
        size = message.tensor.numel() * message.tensor.element_size()
        sending = message.who_waits == "send"
        dtype = str(message.tensor.dtype).removeprefix("torch.")
        members = message.group.ranks
        # A receive from anybody that comes before its send does not know yet from whom.
        pair = tuple(members[end] for end in (message.sender, message.receiver) if end is not None)
        peer = message.receiver if sending else message.sender
        shape, trace = tuple(message.tensor.shape), self._network.trace
        trace.add(
            Event(
                rank,
                message.who_waits,
                message.axis,
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
                digest=message.digest,
            )
        )

    def completed(self, what: Slot | Message, start: float, end: float) -> None:
        """Note when an operation ran, for the events of all who took part."""
        what.span.start, what.span.end = start, end


def _shapes(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple(tensor.shape) for tensor in tensors])
