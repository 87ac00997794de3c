"""Flips bits in what a rank gives to an operation, in copies, as it would happen on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch

from sim.comm.collectives import Call, Problem, execute
from sim.observers.faults.triggers import Flip

__all__ = ["draw_flips", "execute_flipped", "flipped", "given_by"]


def given_by(call: Call, member: int) -> Sequence[torch.Tensor]:
    """The tensors whose data ``member`` of a group gives to a collective."""
    if call.contract.op == "broadcast":
        return call.outputs if call.contract.root == member else ()
    return call.inputs


def draw_flips(tensors: Sequence[torch.Tensor], bits: int, random: Random) -> tuple[Flip, ...]:
    """Choose ``bits`` different bits of these tensors, in order; all there are if that is fewer; none without data."""
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
            call.contract,
            copies,
            copies if in_place else call.outputs,
            factor=call.factor,
            splits=call.splits,
        )
        if op == "all_reduce":
            copied_back.append((call.outputs, copies))
    problem = execute(used)
    with torch.inference_mode():
        for outputs, copies in copied_back:
            for output, copy in zip(outputs, copies, strict=True):
                output.data.copy_(copy)
    return problem
