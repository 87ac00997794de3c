"""Reference values: the local tensor of every rank, cut from the full tensor, and the full tensor put together again.

The brute-force twin of every algorithm that moves a tensor from one layout to another: no communication, no plan, one
process. A test scatters a full tensor, lets the ranks do something, and gathers what they have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from hyper_parallel.core.common.errors import InvalidType, InvalidValue
from hyper_parallel.core.dtensor.layout import Layout

_NOISE = 5


def scatter_full(full: torch.Tensor, layout: Layout, rank: int | None = None, *, seed: int = 0) -> torch.Tensor:
    """Return what a rank holds of a full tensor: the slice that the layout says, or a pending copy of it.

    >>> layout = Layout((2, 2), ("dp", "tp"))
    >>> [scatter_full(torch.arange(6), layout(("tp", "dp")), rank).tolist() for rank in range(4)]
    [[0, 1], [3, 4], [2], [5]]

    Where a reduction is pending the ranks along those axes get copies that differ, and that reduce to the tensor:

    >>> pending = layout("dp", partial={"tp": "sum"})
    >>> copies = [scatter_full(torch.arange(6), pending, rank) for rank in range(4)]
    >>> (copies[0] + copies[1]).tolist(), (copies[2] + copies[3]).tolist()
    ([0, 1, 2], [3, 4, 5])
    >>> copies[0].tolist() == copies[1].tolist()
    False

    Copies are the tensor plus or minus whole numbers, or times 1 or -1: the reduction is exact, in any order, as long
    as the tensor's own elements are small whole numbers; an average over n ranks adds up to n times them.

    Args:
        full: the full tensor, the same on every rank.
        layout: who holds what; at most one kind of reduction pending.
        rank: whose part. Default: the calling rank's.
        seed: draws the copies; all ranks must give the same.

    Returns:
        A contiguous tensor that shares no memory with `full`.

    Raises:
        TypeError: of the dtype of full there are no copies that reduce to it: of bool, and of complex numbers but for
            "sum" and "avg".
        ValueError: no assignment, a layout that does not fit, a rank that is not on the mesh, several kinds of
            reduction pending.
    """
    asked = "cannot scatter a tensor"
    where = layout.local_slice(full.shape, rank)
    kind = _kind(asked, layout)
    if kind is None:
        return full.detach()[where].clone(memory_format=torch.contiguous_format)
    number, which = _copy(layout, dist.get_rank() if rank is None else rank)
    copies = _copies(asked, full.detach(), kind, number, seed)
    return copies[which][where].clone(memory_format=torch.contiguous_format)


def gather_full(
    parts: Mapping[int, torch.Tensor] | Sequence[torch.Tensor], layout: Layout, shape: Sequence[int]
) -> torch.Tensor:
    """Return the full tensor that the ranks hold parts of, with pending reductions taken.

    >>> layout = Layout((2, 2), ("dp", "tp"))("tp")
    >>> gather_full([torch.tensor(part) for part in ([1, 2], [3], [1, 2], [3])], layout, (3,)).tolist()
    [1, 2, 3]
    >>> gather_full([torch.tensor(part) for part in ([1, 2], [3], [1, 7], [3])], layout, (3,))
    Traceback (most recent call last):
        ...
    AssertionError: ranks 0 and 2 disagree at (1,): 2 and 7
      layout: (tp) on dp=2, tp=2

    Args:
        parts: what the ranks hold, by rank; the results of `sim.run` are.
        layout: who holds what; at most one kind of reduction pending.
        shape: the full tensor's sizes, in elements.

    Raises:
        AssertionError: a part of another shape or dtype than it should have; ranks that should hold the same, down to
            the last bit (but that 0.0 and -0.0 are one), and do not. It names the ranks and the first element, in the
            order of the full tensor, on which they differ.
        ValueError: no assignment, a layout that does not fit, several kinds of reduction pending, a rank without a
            part.
    """
    asked = "cannot gather a tensor"
    kind, where = _kind(asked, layout), layout.slices(shape).tolist()
    held = [_part(parts, rank, layout) for rank in layout.rank_list]
    rows: list[torch.Tensor] = []
    for index in range(_copy(layout, layout.rank_list[0])[0]):
        full = torch.zeros(tuple(shape), dtype=held[0].dtype, device=held[0].device)
        owner = torch.full(tuple(shape), -1, dtype=torch.int64, device=held[0].device)
        for rank, part, box in zip(layout.rank_list, held, where, strict=True):
            _check_part(rank, part, layout, shape, layout.rank_list[0], held[0])
            if _copy(layout, rank)[1] != index:
                continue
            place = tuple(slice(start, stop) for start, stop in box)
            _check_agreement(rank, part, full[place], owner[place], box, layout)
            full[place] = part
            owner[place] = torch.where(owner[place] < 0, rank, owner[place])
        rows.append(full)
    return rows[0] if kind is None else _reduced(torch.stack(rows), kind)


# -- pending copies --------------------------------------------------------------------------------------------------


def _kind(asked: str, layout: Layout) -> str | None:
    """Return the reduction that is pending over axes of more than one rank."""
    sizes = dict(zip(layout.alias_name, layout.mesh_shape, strict=True))
    kinds = list(dict.fromkeys(kind for name, kind in layout.partial.items() if sizes[name] > 1))
    if len(kinds) > 1:
        blame = f"{' and '.join(kinds)} are pending, and the order in which to take them is nowhere said"
        raise InvalidValue(asked, blame, f"layout: {layout}", "one kind of reduction")
    return kinds[0] if kinds else None


def _copy(layout: Layout, rank: int) -> tuple[int, int]:
    """Return how many copies are pending, and which of them a rank holds."""
    coordinates = np.unravel_index(layout.rank_list.index(rank), layout.mesh_shape)
    number, which = 1, 0
    for name, size, coordinate in zip(layout.alias_name, layout.mesh_shape, coordinates, strict=True):
        if name in layout.partial:
            number, which = number * size, which * size + int(coordinate)
    return number, which


def _copies(asked: str, full: torch.Tensor, kind: str, number: int, seed: int) -> list[torch.Tensor]:
    """Return copies of a full tensor that reduce to it."""
    if full.dtype == torch.bool or (full.is_complex() and kind not in ("sum", "avg")):
        blame = f"{kind} is pending, which is not taken of {full.dtype}"
        raise InvalidType(asked, blame, f"full: {full.dtype}, {tuple(full.shape)}", "torch.float32")
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int, *more: int) -> torch.Tensor:
        return torch.randint(low, high + 1, (*more, *full.shape), generator=generator).to(full.device)

    if kind in ("sum", "avg"):
        total = full * number if kind == "avg" else full
        noise = drawn(-_NOISE, _NOISE, number - 1).to(full.dtype)
        return [*noise, total - noise.sum(0, dtype=full.dtype)]
    chosen = drawn(0, number - 1)  # which copy holds the element itself
    if kind == "prod":
        signs = drawn(0, 1, number - 1).to(full.dtype) * 2 - 1 if full.dtype.is_signed else drawn(1, 1, number - 1)
        signs = torch.cat([signs.to(full.dtype), signs.to(full.dtype).prod(0, keepdim=True, dtype=full.dtype)])
        return [torch.where(chosen == index, full, torch.ones_like(full)) * sign for index, sign in enumerate(signs)]
    noise = drawn(1, _NOISE, number).to(full.dtype)
    moved = full - noise if kind == "max" else full + noise
    fits = moved <= full if kind == "max" else moved >= full  # not where the dtype ends
    return [torch.where((chosen != index) & fits[index], moved[index], full) for index in range(number)]


def _reduced(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """Reduce copies, stacked in dim 0; an average of ints is rounded down."""
    if kind == "max":
        return rows.amax(0)
    if kind == "min":
        return rows.amin(0)
    if kind == "prod":
        return rows.prod(0, dtype=rows.dtype)
    total = rows.sum(0, dtype=rows.dtype)
    if kind == "sum":
        return total
    exact = rows.is_floating_point() or rows.is_complex()
    return total / len(rows) if exact else total.div(len(rows), rounding_mode="floor")


# -- checks ----------------------------------------------------------------------------------------------------------


def _part(parts: Mapping[int, torch.Tensor] | Sequence[torch.Tensor], rank: int, layout: Layout) -> torch.Tensor:
    known = rank in parts if isinstance(parts, Mapping) else rank < len(parts)
    found = parts[rank] if known else None
    if not isinstance(found, torch.Tensor):
        blame = f"there is no part of rank {rank}" if found is None else f"rank {rank} gave a {type(found).__name__}"
        hint = f"a tensor for each of the {math.prod(layout.mesh_shape)} ranks of the mesh"
        raise InvalidValue("cannot gather a tensor", blame, f"layout: {layout}", hint)
    return found


def _check_part(
    rank: int, part: torch.Tensor, layout: Layout, shape: Sequence[int], first: int, like: torch.Tensor
) -> None:
    wanted = layout.local_shape(shape, rank)
    if tuple(part.shape) != wanted:
        raise AssertionError(
            f"rank {rank} holds a part of shape {tuple(part.shape)}, and the layout gives it {wanted}\n"
            f"  layout: {layout}   shape: {tuple(shape)}"
        )
    if part.dtype != like.dtype:
        raise AssertionError(f"rank {rank} holds {part.dtype}, rank {first} {like.dtype}\n  layout: {layout}")


def _check_agreement(
    rank: int, part: torch.Tensor, known: torch.Tensor, owner: torch.Tensor, box: list[list[int]], layout: Layout
) -> None:
    """Compare a part with what other ranks said about its elements."""
    same = (part == known) | ((part != part) & (known != known))  # nan is nan here
    wrong = ((owner >= 0) & ~same).nonzero()
    if not len(wrong):
        return
    place = tuple(wrong[0].tolist())
    index = tuple(start + offset for (start, _), offset in zip(box, place, strict=True))
    raise AssertionError(
        f"ranks {int(owner[place])} and {rank} disagree at {index}: {known[place].item()} and {part[place].item()}\n"
        f"  layout: {layout}"
    )
