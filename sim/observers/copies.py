"""Comparison of copies among the local tensors of all ranks: which differ, and where."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from sim.explain.errors import ranks_phrase, table

__all__ = ["GRADIENT", "Copy", "Failure", "disagreement", "first_failure"]


class Copy(NamedTuple):
    """What one rank holds of a tensor.

    Attributes:
        local: Its part.
        shape: Of the full tensor.
        ranks: Of the mesh, in mesh order, last axis fastest.
        sizes: Ranks along each axis.
        names: Of the axes.
        replicated: Per axis, whether the ranks along it hold equal copies.
        layout: How a person would write that.
        tolerance: rtol and atol; zeros compare the bits.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    replicated: tuple[bool, ...]
    layout: str
    tolerance: tuple[float, float]


GRADIENT = "the gradient that to_local passes back"
"""The name of a DTensor that is made in a backward pass."""

Brought = Mapping[int, Mapping[str, Copy]]


class Failure(NamedTuple):
    """What was found: a first line, a row per rank, which ranks are in the minority, further lines, and a hint."""

    what: str
    rows: dict[int, tuple[str, ...]]
    minority: frozenset[int]
    seen: tuple[str, ...]
    hint: str

    def text(self, lines: Mapping[int, str], replay: str) -> str:
        """The message, with every rank's line of the program."""
        ranks = sorted(self.rows)
        rows = [(f"rank {rank}", *self.rows[rank], lines[rank]) for rank in ranks]
        marked = [place for place, rank in enumerate(ranks) if rank in self.minority]
        more = "".join(f"  {line}\n" for line in self.seen)
        return f"{self.what}\n{table(rows, marked=marked)}\n{more}  try: {self.hint}\n  replay: {replay}"


# -- what the ranks say they hold ------------------------------------------------------------------------------------


def disagreement(brought: Brought) -> Failure | None:
    """The first tensor that the ranks describe differently, if there is one."""
    ranks = sorted(brought)
    names = dict.fromkeys(name for rank in ranks for name in brought[rank])
    for name in names:
        said = {rank: _description(brought[rank].get(name)) for rank in ranks}
        classes: dict[tuple[str, ...], list[int]] = {}
        for rank in ranks:
            classes.setdefault(said[rank], []).append(rank)
        if len(classes) > 1:
            usual = max(classes.values(), key=len)
            return Failure(
                f"the ranks do not agree on what {name!r} is",
                said,
                frozenset(ranks) - frozenset(usual),
                (),
                "compare the same tensors, in the same layout, on every rank of the mesh",
            )
    return None


def _description(copy: Copy | None) -> tuple[str, ...]:
    if copy is None:
        return ("brings no such tensor", "")
    return (f"{_dtype(copy.local)} {list(copy.shape)}", copy.layout)


# -- what they hold --------------------------------------------------------------------------------------------------


def first_failure(brought: Brought) -> Failure | None:
    """The first tensor whose copies differ, with the names of the others."""
    differing: list[str] = []
    failure: Failure | None = None
    for name in brought[min(brought)]:
        copies = {rank: mine[name] for rank, mine in brought.items()}
        found = _failure_of(name, copies)
        if found is not None:
            differing.append(name)
            failure = failure or found
    if failure is None or len(differing) == 1:
        return failure
    others = ", ".join(map(repr, differing[1:4])) + (", ..." if len(differing) > 4 else "")
    count = f"{len(differing) - 1} more tensor{'s' if len(differing) > 2 else ''}"
    return failure._replace(seen=(*failure.seen, f"also: {count}: {others}"))


def _failure_of(name: str, copies: Mapping[int, Copy]) -> Failure | None:
    like = next(iter(copies.values()))
    for ranks in _equal_by_layout(like):
        locals_ = [copies[rank].local.detach() for rank in ranks]
        if any(local.is_meta or isinstance(local, FakeTensor) for local in locals_):
            continue  # they have no values
        classes = _classes(locals_, like.tolerance)
        if max(classes) > 0:
            return _failure(name, like, ranks, locals_, classes)
    return None


def _equal_by_layout(copy: Copy) -> list[list[int]]:
    """The sets of ranks that hold equal copies: they differ in their place along replicated axes only."""
    sets: dict[tuple[int, ...], list[int]] = {}
    for rank, place in zip(copy.ranks, itertools.product(*map(range, copy.sizes)), strict=True):
        kept = tuple(index for index, equal in zip(place, copy.replicated, strict=True) if not equal)
        sets.setdefault(kept, []).append(rank)
    return list(sets.values())


def _classes(locals_: Sequence[torch.Tensor], tolerance: tuple[float, float]) -> list[int]:
    """Number the different copies, the most frequent one 0 (of several, the one that comes first)."""
    found: list[torch.Tensor] = []
    numbers: list[int] = []
    for local in locals_:
        same = (i for i, other in enumerate(found) if not _differs(local, other, tolerance).any())
        number = next(same, len(found))
        if number == len(found):
            found.append(local)
        numbers.append(number)
    order = sorted(range(len(found)), key=lambda number: (-numbers.count(number), number))
    return [order.index(number) for number in numbers]


def _differs(a: torch.Tensor, b: torch.Tensor, tolerance: tuple[float, float]) -> torch.Tensor:
    """Which elements of `a` differ from those of `b`, flat."""
    if a.shape != b.shape:
        return torch.ones(max(a.numel(), b.numel(), 1), dtype=torch.bool)
    if not a.numel():
        return torch.zeros(0, dtype=torch.bool)
    a, b = (t.contiguous().view(-1) for t in (a, b))
    if any(tolerance):
        rtol, atol = tolerance
        wide = torch.complex128 if a.is_complex() else torch.float64
        return ~torch.isclose(a.to(wide), b.to(wide), rtol=rtol, atol=atol, equal_nan=True)
    bits = [t.view(torch.uint8).view(t.numel(), -1) for t in (a, b)]
    differ = (bits[0] != bits[1]).any(dim=1)
    if differ.any() and (a.is_floating_point() or a.is_complex()):
        wide = torch.complex128 if a.is_complex() else torch.float64
        differ &= ~(a.to(wide).isnan() & b.to(wide).isnan())
    return differ


def _failure(
    name: str, copy: Copy, ranks: list[int], locals_: Sequence[torch.Tensor], classes: Sequence[int]
) -> Failure:
    usual = locals_[classes.index(0)]
    odd = next(local for local, number in zip(locals_, classes, strict=True) if number)
    axes = _axes_to_blame(copy, dict(zip(ranks, classes, strict=True)))
    same_shape = all(local.shape == usual.shape for local in locals_)
    index = _first(_differs(odd, usual, copy.tolerance), usual) if same_shape else ()
    rows: dict[int, tuple[str, ...]] = {}
    for rank, local, number in zip(ranks, locals_, classes, strict=True):
        count = int(_differs(local, usual, copy.tolerance).sum()) if number and same_shape else 0
        much = f"{count} of {local.numel()} elements differ" if count else ""
        rows[rank] = (_value(local[index]) if same_shape else str(list(local.shape)), much)
    where = f"the values at {list(index)} of" if same_shape else "the shapes of"
    kind = f"{_dtype(usual)} {list(usual.shape)}" if same_shape else _dtype(usual)
    named = " and ".join(repr(axis) for axis in axes)
    return Failure(
        f"the copies of {name!r} along {'axis' if len(axes) == 1 else 'axes'} {named} differ",
        rows,
        frozenset(rank for rank, number in zip(ranks, classes, strict=True) if number),
        (f"seen: {where} the local tensors, {kind}", f"layout: {copy.layout}"),
        _hint(name, named, ranks),
    )


def _hint(name: str, axes: str, ranks: Sequence[int]) -> str:
    if name.endswith(".grad") or name == GRADIENT:
        return (
            f"reduce the gradient over {axes} before it is used: all_reduce it, or say grad_placements=[Partial()] "
            "where to_local() took the local tensor"
        )
    return (
        f"give {ranks_phrase(ranks)} the same data (one seed, or a broadcast), or say Partial() for the parts of a sum "
        "and redistribute"
    )


def _axes_to_blame(copy: Copy, classes: Mapping[int, int]) -> list[str]:
    """The axes along which neighbours hold different copies."""
    places = dict(zip(itertools.product(*map(range, copy.sizes)), copy.ranks, strict=True))
    found = []
    for axis, name in enumerate(copy.names):
        along: dict[tuple[int, ...], set[int]] = {}
        for place, rank in places.items():
            if rank in classes and copy.replicated[axis]:
                along.setdefault((*place[:axis], *place[axis + 1 :]), set()).add(classes[rank])
        if any(len(seen) > 1 for seen in along.values()):
            found.append(name)
    return found


def _first(differ: torch.Tensor, like: torch.Tensor) -> tuple[int, ...]:
    place = int(differ.nonzero()[0])
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(place), like.shape)) if like.dim() else ()


def _value(element: torch.Tensor) -> str:
    """Write a value so that no two of them look alike."""
    if element.is_floating_point() and element.dtype != torch.float64:
        text = f"{element.item():.9g}"  # enough to tell any two of float32 apart
        return text if set(text) & set(".en") else f"{text}.0"
    return str(element.item())


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
