"""Triggers of faults, the record that one has happened, and the bits that flip in copies, as on the wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import NamedTuple

import torch

from hyper_parallel.core.common.checks import check
from sim.comm.collectives import Call, Problem, execute
from sim.explain.errors import ranks_phrase
from sim.kernel.context import current_context
from sim.observers.faults.plan import At, AtTime, Corrupt, Drop, Fault, Kill, Slow, SlowLink


class Trigger:
    """Decides at which of the operations that it is shown a fault happens.

    Args:
        fault: Which one; it has an `at`.
        random: What a probability is drawn from.
    """

    def __init__(self, fault: Fault, random: Random) -> None:
        self.fault = fault
        self.random = random
        self.happened = False
        self._at: At = getattr(fault, "at", 0)
        self._seen = 0

    @property
    def recurs(self) -> bool:
        """Whether the fault can happen again once it has happened."""
        return isinstance(self._at, float)

    def is_due(self, regions: Sequence[str], now: float) -> bool:
        """Whether the fault happens at the next operation, issued inside of `regions` at the virtual time `now`."""
        at = self._at
        if isinstance(at, float):
            return self.random.random() < at
        if isinstance(at, AtTime):
            return now >= at.seconds
        if isinstance(at, int):
            self._seen += 1
            return self._seen > at
        name, number = (at, 0) if isinstance(at, str) else at
        if name in regions:
            self._seen += 1
            return self._seen > number
        return False


class Flip(NamedTuple):
    """A bit that was flipped.

    Attributes:
        tensor: Which of the tensors that the rank gave to the operation.
        element: Which element of it, counted along its flattened shape.
        bit: Which bit of the element, from the lowest one of its first byte in memory.
    """

    tensor: int
    element: int
    bit: int


class Happening(NamedTuple):
    """A fault that has happened.

    Attributes:
        fault: Which one.
        rank: Whose operation it happened at.
        number: Of the operation, among all of the rank's, as `world.trace.count(rank)` counts them; -1: of none.
        op: `all_reduce`, `send`, ... or `advance`, `sleep`.
        group: The name of its group.
        line: The user's source line, `file:line in function`.
        time: The rank's virtual clock, in seconds.
        flips: Of a `Corrupt`.
    """

    fault: Fault
    rank: int
    number: int
    op: str
    group: str
    line: str
    time: float
    flips: tuple[Flip, ...] = ()

    def describe(self) -> str:
        """Say what happened, in one line.

        >>> Happening(Kill(2, at=3), 2, 3, "all_reduce", "tp", "train.py:9 in step", 0.0).describe()
        "rank 2 was killed at its operation 3, all_reduce of group 'tp', train.py:9 in step"
        """
        fault = self.fault
        if isinstance(fault, (Slow, SlowLink)):
            who = f"rank {self.rank}" if isinstance(fault, Slow) else f"what {ranks_phrase(fault.involved())} share"
            return f"{who} took {fault.factor:g} times as long from {self.op} on, {self.line}"
        if isinstance(fault, Drop):
            what = f"the message of rank {self.rank} to rank {fault.receiver} was lost"
        elif isinstance(fault, Corrupt):
            what = f"rank {self.rank} gave data with {len(self.flips)} flipped bits"
        else:
            what = f"rank {self.rank} was {'killed' if isinstance(fault, Kill) else 'frozen'}"
        return f"{what} at its operation {self.number}, {self.op} of group {self.group!r}, {self.line}"


@contextmanager
def region(name: str) -> Iterator[None]:
    """Name what the calling rank does inside of the `with` block, so that a fault can happen there.

    ::

        with sim.region("backward"):
            loss.backward()

    Regions can be nested; on what is no simulated rank they do nothing.

    Args:
        name: For the `at` of a fault.

    Raises:
        TypeError: A name that is no string.
    """
    check("cannot name a region", "str", "with sim.region('backward')", name=name)
    context = current_context()
    if context is None:
        yield
        return
    context.regions.append(name)
    try:
        yield
    finally:
        context.regions.pop()


# -- flipped bits --------------------------------------------------------------------------------------------------


def given_by(call: Call, member: int) -> Sequence[torch.Tensor]:
    """The tensors whose data `member` of a group gives to a collective."""
    if call.contract.op == "broadcast":
        return call.outputs if call.contract.root == member else ()
    return call.inputs


def draw_flips(tensors: Sequence[torch.Tensor], bits: int, random: Random) -> tuple[Flip, ...]:
    """Choose `bits` different bits of these tensors, in order; all there are if that is fewer; none without data."""
    widths = [_bits_of(tensor) for tensor in tensors]
    sizes = [tensor.numel() * width for tensor, width in zip(tensors, widths, strict=True)]
    flips = []
    for place in sorted(random.sample(range(sum(sizes)), min(bits, sum(sizes)))):
        tensor = 0
        while place >= sizes[tensor]:
            place -= sizes[tensor]
            tensor += 1
        flips.append(Flip(tensor, *divmod(place, widths[tensor])))
    return tuple(flips)


def _bits_of(tensor: torch.Tensor) -> int:
    if tensor.is_meta or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return 0  # nothing that could be read
    return 1 if tensor.dtype == torch.bool else 8 * tensor.element_size()


def flipped(tensors: Sequence[torch.Tensor], flips: Sequence[Flip]) -> list[torch.Tensor]:
    """The tensors with these bits flipped: copies, contiguous."""
    copies = [t.data.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format) for t in tensors]
    for flip in flips:
        copy = copies[flip.tensor]
        data = copy.view(-1).view(torch.uint8)
        data[flip.element * copy.element_size() + flip.bit // 8] ^= 1 << flip.bit % 8
    return copies


def execute_flipped(calls: list[Call], flips: dict[Call, tuple[Flip, ...]]) -> Problem | None:
    """Carry out a collective in which some calls' data arrives with flipped bits."""
    used, copied_back = list(calls), []
    for member, call in enumerate(calls):
        if call not in flips:
            continue
        copies = flipped(given_by(call, member), flips.pop(call))
        op = call.contract.op
        in_place = op in ("all_reduce", "broadcast")  # what these give is what they are called with as outputs
        used[member] = Call(
            call.contract, copies, copies if in_place else call.outputs, factor=call.factor, splits=call.splits
        )
        if op == "all_reduce":
            copied_back.append((call.outputs, copies))
    problem = execute(used)
    with torch.inference_mode():
        for outputs, copies in copied_back:
            for output, copy in zip(outputs, copies, strict=True):
                output.data.copy_(copy)
    return problem
