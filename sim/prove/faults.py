"""Common faults of placements and of values, each a check of the local tensors against the full one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.ownership import Splits
from sim.prove.evidence import Bound, Evidence, Mesh, Parts, Pending, all_boxes, gap, read
from sim.prove.infer import explanations, fit, free_axes, splits_by_shape


@dataclass(frozen=True)
class Diagnosis:
    """A usual fault that fits what was seen.

    Args:
        kind: "not_finite", "scaled", "same_values", "reordered", "some_ranks", "blocks", "added", "copies_differ",
            "coarse", "permuted", "pieces", "gathered", "padded" or "shapes".
        sentence: what happened, for a person.
        axis: the axis to blame, if it is one.
        factor: by what the parts, or how often an addend, is too large.
        ranks: the ranks to blame, if they are not all.
        order: per coordinate along the axis, whose part (of a gathered tensor: piece) is held there.
    """

    kind: str
    sentence: str
    axis: str | None = None
    factor: Fraction | None = None
    ranks: tuple[int, ...] = ()
    order: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True, eq=False)
class SuspectedSplit:
    """Evidence, looked at under one way to split the full tensor, after some sums are taken."""

    evidence: Evidence
    splits: Splits
    pending: Pending = ()

    @cached_property
    def boxes(self) -> npt.NDArray[np.int64]:
        """Start and stop of every dim at every mesh position."""
        return all_boxes(self.evidence.full.shape, self.evidence.sizes, self.splits)

    @cached_property
    def groups(self) -> list[list[int]]:
        """Mesh positions, one row per sum."""
        return self.evidence.groups(self.pending).tolist()

    def part(self, group: Sequence[int]) -> torch.Tensor:
        """What the ranks of a group hold, summed."""
        return self.evidence.reduced(group, self.pending)

    def want(self, position: int) -> torch.Tensor:
        """What a mesh position should hold."""
        return self.evidence.full[self.evidence.box(self.boxes, position)]

    def close(self, part: torch.Tensor, want: torch.Tensor, position: int, slack: float = 1.0) -> bool:
        """Whether two tensors that belong to a mesh position agree within `slack` times the bound."""
        limit = self.evidence.limit(self.pending)
        limit = limit[self.evidence.box(self.boxes, position)] if isinstance(limit, torch.Tensor) else limit
        if part.numel() > 4096:  # a few elements tell most differences
            some = tuple(slice(0, 2) for _ in part.shape)
            few = limit[some] if isinstance(limit, torch.Tensor) else limit
            if bool((gap(part[some], want[some]) > few * slack).any()):
                return False
        return bool((gap(part, want) <= limit * slack).all())

    def fits(self, position: int) -> bool:
        """Whether a part is what its rank should hold."""
        return self.close(self.evidence.parts[position], self.want(position), position)

    @property
    def what(self) -> str:
        """The parts, or their sums, as the subject of a sentence."""
        if not self.pending:
            return "every part"
        return f"the sum of the parts over {quoted([self.evidence.names[axis] for axis, _ in self.pending])}"


def sums(evidence: Evidence, splits: Splits) -> Iterator[SuspectedSplit]:
    """Yield the parts as they are, then their sums over axes that split nothing."""
    yield SuspectedSplit(evidence, splits)
    free = free_axes(evidence, splits)
    if evidence.full.dtype == torch.bool:
        return
    for count in range(1, len(free) + 1):
        for axes in combinations(free, count):
            yield SuspectedSplit(evidence, splits, tuple((axis, "sum") for axis in axes))


def coordinates(evidence: Evidence, position: int) -> tuple[int, ...]:
    """Where a mesh position lies along each axis."""
    return tuple(int(i) for i in np.unravel_index(position, evidence.sizes))


def named_ranks(evidence: Evidence, positions: Sequence[int]) -> str:
    """Name ranks, and where they lie if that is one place along an axis."""
    ranks = [evidence.ranks[position] for position in positions]
    words = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
    for axis, size in enumerate(evidence.sizes):
        there = {coordinates(evidence, position)[axis] for position in positions}
        if size > 1 and len(there) == 1 and len(positions) == math.prod(evidence.sizes) // size:
            return f"{words} ({evidence.names[axis]}={min(there)})"
    return words


def quoted(names: Sequence[str]) -> str:
    """Join axis names for a sentence.

    >>> quoted(["dp", "tp"])
    "'dp' and 'tp'"
    """
    return " and ".join(map(repr, names))


# -- placement faults: the right values on the wrong ranks -------------------------------------------------------------


def same_values(evidence: Evidence, splits: Splits) -> Diagnosis | None:
    """Ranks along an axis that splits the tensor hold the same."""
    case = SuspectedSplit(evidence, splits)
    for axis in [axis for axes in splits for axis in axes]:
        differ = 0
        for group in evidence.groups(((axis, "sum"),)).tolist():
            first, *others = group
            part = evidence.parts[first]
            if not part.numel() or not all(torch.equal(part, evidence.parts[other]) for other in others):
                differ = 0
                break
            differ += not all(torch.equal(case.want(first), case.want(other)) for other in others)
        if differ:
            name = evidence.names[axis]
            sentence = f"the ranks along {name!r} hold the same values where each should hold its own part"
            if all(case.fits(group[0]) for group in evidence.groups(((axis, "sum"),)).tolist()):
                return Diagnosis("same_values", f"{sentence}: all hold the first one's", name)
            return Diagnosis("same_values", f"{sentence}: the same random seed on every shard?", name)
    return None


def reordered(evidence: Evidence, splits: Splits) -> Diagnosis | None:
    """Every rank holds a part of this split, but not its own."""
    case = SuspectedSplit(evidence, splits)
    places: dict[tuple[int, ...], int] = {}
    for position, box in enumerate(case.boxes.reshape(len(evidence.parts), -1).tolist()):
        places.setdefault(tuple(box), position)
    if len(places) == 1:
        return None
    source: list[int] = []
    for position, part in enumerate(evidence.parts):
        own = places[tuple(case.boxes[position].ravel().tolist())]
        found = [each for each in (own, *places.values()) if _is_part(case, part, each)]
        if not found:
            return None
        source.append(found[0])
    return _described(evidence, splits, source, list(places.values()))


def _is_part(case: SuspectedSplit, part: torch.Tensor, position: int) -> bool:
    want = case.want(position)
    return part.shape == want.shape and case.close(part, want, position)


def _described(evidence: Evidence, splits: Splits, source: list[int], places: list[int]) -> Diagnosis | None:
    """Say whose part each rank holds: along one axis if that is all, else rank by rank."""
    for axis in [axis for axes in splits for axis in axes]:
        order: dict[int, int] = {}
        for position, held in enumerate(source):
            here, there = coordinates(evidence, position), coordinates(evidence, held)
            same = (
                all(here[other] == there[other] for axes in splits for other in axes if other != axis)
                and order.setdefault(here[axis], there[axis]) == there[axis]
            )
            if not same:
                break
        else:
            row, name = tuple(order[i] for i in range(evidence.sizes[axis])), evidence.names[axis]
            if sorted(row) == list(range(len(row))):
                sentence = f"the parts of the ranks along {name!r} are in another order: {row}"
                return Diagnosis("reordered", sentence, name, order=row)
    own = {position: held for position, held in enumerate(source) if not _same_place(evidence, splits, position, held)}
    words = [f"rank {evidence.ranks[p]} holds rank {evidence.ranks[held]}'s part" for p, held in own.items()]
    more = ", ..." if len(words) > 4 else ""
    sentence = f"parts are on the wrong ranks: {', '.join(words[:4])}{more}"
    return Diagnosis("reordered", sentence, ranks=tuple(evidence.ranks[p] for p in own)) if own else None


def _same_place(evidence: Evidence, splits: Splits, left: int, right: int) -> bool:
    here, there = coordinates(evidence, left), coordinates(evidence, right)
    return all(here[axis] == there[axis] for axes in splits for axis in axes)


def permuted(evidence: Evidence, splits: Splits) -> Diagnosis | None:
    """Every part has the right pieces in another order, as after an all_gather that put them together wrongly."""
    case = SuspectedSplit(evidence, splits)
    large = [axis for axis, size in enumerate(evidence.sizes) if size > 1]
    for axes in (some for count in range(1, len(large) + 1) for some in combinations(large, count)):
        ranks = math.prod(evidence.sizes[axis] for axis in axes)
        for dim, size in enumerate(evidence.parts[0].shape):
            if size % ranks or not size:
                continue
            order = _order(case, 0, dim, ranks)
            if order is None or order == tuple(range(ranks)):
                continue
            if all(_order(case, position, dim, ranks) == order for position in range(1, len(evidence.parts))):
                names = [evidence.names[axis] for axis in axes]
                sentence = f"the {ranks} pieces of dim {dim} are in another order: {order}"
                sentence += f", as if gathered over {quoted(names)} in another order of ranks"
                return Diagnosis("permuted", sentence, names[0] if len(names) == 1 else None, order=order)
    return None


def _order(case: SuspectedSplit, position: int, dim: int, count: int) -> tuple[int, ...] | None:
    """Which piece of what a position should hold stands in each place; None where some piece is no such piece."""
    held, want = (each.chunk(count, dim) for each in (case.evidence.parts[position], case.want(position)))
    if len(held) != count or len(want) != count:  # chunk makes fewer where a dim is short
        return None
    limit = case.evidence.limit(())
    if isinstance(limit, torch.Tensor):  # pieces have moved, and their bounds with them
        limit = float(limit.max())
    order = []
    for place, piece in enumerate(held):
        likely = [place, *(other for other in range(count) if other != place)]
        likely = [at for at in likely if want[at].shape == piece.shape]  # parts of uneven splits have other sizes
        at = next((at for at in likely if bool((gap(piece, want[at]) <= limit).all())), None)
        if at is None:
            return None
        order.append(at)
    return tuple(order) if sorted(order) == list(range(count)) else None


def blocks(evidence: Evidence, splits: Splits) -> Diagnosis | None:
    """One dim is cut into blocks, each of which is split over the axis: fused weights, or elements dealt in turn."""
    case = SuspectedSplit(evidence, splits)
    for dim, axes in enumerate(splits):
        if len(axes) != 1:
            continue
        axis, size = axes[0], evidence.full.shape[dim]
        ranks, name = evidence.sizes[axis], evidence.names[axis]
        for count in _divisors(size // ranks) if size % ranks == 0 else ():
            if not all(_in_blocks(case, position, dim, axis, count) for position in range(len(evidence.parts))):
                continue
            if count == size // ranks:
                sentence = (
                    f"dim {dim} is dealt to the ranks along {name!r} in turn, one element each, not in one piece each"
                )
            else:
                sentence = f"each part holds a piece of each of {count} blocks of dim {dim}"
                sentence += f", as if {name!r} split fused weights one by one"
            return Diagnosis("blocks", sentence, name)
    return None


def _divisors(number: int) -> Iterator[int]:
    yield from (each for each in range(2, number + 1) if number % each == 0)


def _in_blocks(case: SuspectedSplit, position: int, dim: int, axis: int, count: int) -> bool:
    """Whether a part is made of its axis coordinate's piece of each block."""
    evidence = case.evidence
    ranks, here = evidence.sizes[axis], coordinates(evidence, position)[axis]
    box = list(evidence.box(case.boxes, position))
    box[dim] = slice(None)
    full = evidence.full[tuple(box)].unflatten(dim, (count, ranks, -1)).select(dim + 1, here)
    return case.close(evidence.parts[position], full.flatten(dim, dim + 1), position)


def shapes(evidence: Evidence) -> Diagnosis:
    """No split gives the ranks parts of the shapes that they hold."""
    full, part = tuple(evidence.full.shape), tuple(evidence.parts[0].shape)
    axes = [(name, size) for name, size in zip(evidence.names, evidence.sizes, strict=True) if size > 1]
    if len(full) != len(part):
        sentence = f"rank {evidence.ranks[0]} holds {len(part)} dims, {part}, and the reference has {len(full)}, {full}"
        return Diagnosis("shapes", sentence)
    for dim, (size, held) in enumerate(zip(full, part, strict=True)):
        for name, ranks in axes:
            if size and held == size * ranks:
                sentence = f"dim {dim} is {ranks} times as long as it should be: gathered once too often over {name!r}"
                short = [at for at, (one, other) in enumerate(zip(full, part, strict=True)) if one == other * ranks]
                if short:
                    sentence = f"dim {dim} is {ranks} times as long as it should be, and dim {short[0]} 1/{ranks} as"
                    sentence += f" long: gathered over {name!r} along dim {dim} instead of dim {short[0]}"
                return Diagnosis("gathered", sentence, name)
    equal = all(tuple(each.shape) == part for each in evidence.parts)
    for dim, (size, held) in enumerate(zip(full, part, strict=True)):
        for name, ranks in axes:
            if equal and size % ranks and held == -(-size // ranks):
                sentence = f"dim {dim} of size {size} does not split evenly over {name!r}, and the last part is padded"
                return Diagnosis("padded", f"{sentence}: every rank holds {held}", name)
    whose = _pieces(evidence) if equal else None
    if whose is not None:
        return whose
    held_shapes = {tuple(each.shape): position for position, each in reversed(list(enumerate(evidence.parts)))}
    found = [f"rank {evidence.ranks[position]} holds {shape}" for shape, position in sorted(held_shapes.items())]
    sentence = f"no split of {full} over {evidence.mesh.axes} gives these parts: {', '.join(found[:4])}"
    return Diagnosis("shapes", sentence + f" ({math.prod(evidence.sizes)} ranks)")


def _pieces(evidence: Evidence) -> Diagnosis | None:
    """Say which piece of one dim each rank holds, where there are not as many pieces as ranks along any axis."""
    full, part = evidence.full, evidence.parts[0]
    odd = [dim for dim, size in enumerate(part.shape) if size != full.shape[dim]]
    if len(odd) != 1 or not part.numel() or full.shape[odd[0]] % part.shape[odd[0]]:
        return None
    pieces = full.split(part.shape[odd[0]], odd[0])
    limit = evidence.limit(())
    limit = float(limit.max()) if isinstance(limit, torch.Tensor) else limit
    held: dict[int, list[str]] = {}
    for rank, each in zip(evidence.ranks, evidence.parts, strict=True):
        found = [at for at, piece in enumerate(pieces) if bool((gap(each, piece) <= limit).all())]
        if not found:
            return None
        held.setdefault(found[0], []).append(str(rank))
    words = [f"ranks {', '.join(ranks[:8])} hold piece {at}" for at, ranks in sorted(held.items())]
    text = f"dim {odd[0]} is held in {len(pieces)} pieces, which no split over the mesh gives: {'; '.join(words[:4])}"
    return Diagnosis("pieces", text)


# -- value faults: counted too often, added too often, wrong on some ranks only, not the same --------------------------


_MOST_DENOMINATOR = 256
_MANY = 8


def not_finite(evidence: Evidence, splits: Splits) -> Diagnosis | None:
    """NaN or infinity where the full tensor has finite numbers."""
    if not bool(evidence.full.isfinite().all()):
        return None
    bad = [position for position, part in enumerate(evidence.parts) if not bool(part.isfinite().all())]
    if not bad:
        return None
    holds = "holds" if len(bad) == 1 else "hold"
    sentence = f"{named_ranks(evidence, bad)} {holds} NaN or infinity where the reference is finite"
    return Diagnosis("not_finite", sentence, ranks=tuple(evidence.ranks[position] for position in bad))


def scaled(evidence: Evidence, splits: Splits) -> Diagnosis | None:
    """Every part is the same multiple of what it should be."""
    return _scaled(SuspectedSplit(evidence, splits))


def scaled_sums(evidence: Evidence, splits: Splits) -> Diagnosis | None:
    """Every sum of parts is the same multiple of what it should be."""
    scaled = (_scaled(case) for case in sums(evidence, splits) if case.pending)
    return next((each for each in scaled if each), None)


def _scaled(case: SuspectedSplit) -> Diagnosis | None:
    factor = _factor(case)
    if factor is None or factor == 1:
        return None
    cause, axis = _cause(case.evidence, case.splits, factor)
    return Diagnosis("scaled", f"{case.what} is {_times(factor)}{cause}", axis, factor)


def coarse(evidence: Evidence, splits: Splits) -> Diagnosis | None:
    """Parts are nearly right, and numbers of a coarser dtype than that of the ranks."""
    case, own = SuspectedSplit(evidence, splits), evidence.parts[0].dtype
    bad = [position for position in range(len(evidence.parts)) if not case.fits(position)]
    if evidence.exact or not own.is_floating_point or not bad:
        return None
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        few = 64 * torch.finfo(dtype).eps * float(evidence.full.abs().max())
        if dtype.itemsize >= own.itemsize or not all(_is_of(evidence.parts[position], dtype) for position in bad):
            continue
        if sum(len(evidence.parts[position].unique()) for position in bad) < _MANY:  # such as ones, which any dtype has
            return None
        if any(_is_of(case.want(p), dtype) or bool((gap(evidence.parts[p], case.want(p)) > few).any()) for p in bad):
            return None
        who = "the ranks hold" if len(bad) == len(evidence.parts) else named_ranks(evidence, bad)
        who += "" if len(bad) == len(evidence.parts) else " holds" if len(bad) == 1 else " hold"
        word = str(dtype).removeprefix("torch.")
        sentence = f"{who} numbers that {word} has, near the right ones: they were computed in {word} or cast to it"
        return Diagnosis("coarse", sentence, ranks=tuple(evidence.ranks[position] for position in bad))
    return None


def _is_of(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a coarser dtype has all of the numbers of a tensor."""
    return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def some_ranks(evidence: Evidence, splits: Splits) -> Diagnosis | None:
    """Some ranks hold what they should, and others do not."""
    case = SuspectedSplit(evidence, splits)
    count = len(evidence.parts)
    bad = [position for position in range(count) if not case.fits(position)]
    informative = [position for position in range(count) if position not in bad and bool(case.want(position).any())]
    if not bad or not informative:
        return None
    single = len(bad) == 1
    zero = all(not bool(evidence.parts[position].any()) for position in bad)
    state = ("holds" if single else "hold") + " zeros" if zero else ("is" if single else "are") + " wrong"
    right = count - len(bad)
    others = f"the other {right} hold what they should" if right > 1 else "the other one holds what it should"
    sentence = f"{named_ranks(evidence, bad)} {state}, and {others}"
    return Diagnosis("some_ranks", sentence, _axis_of(evidence, bad), ranks=tuple(evidence.ranks[p] for p in bad))


def added(evidence: Evidence, splits: Splits) -> Diagnosis | None:
    """Every part, or every sum of parts, is off by the same vector in each row, as by a bias."""
    if evidence.full.ndim < 2 or evidence.full.dtype == torch.bool or _rows_agree(evidence.full, 0.0):
        return None
    for case in sums(evidence, splits):
        limit = evidence.limit(case.pending)
        slack = float(limit.max()) if isinstance(limit, torch.Tensor) else limit
        offs = [case.part(group).to(torch.float64) - case.want(group[0]) for group in case.groups]
        if any(off.flatten(0, -2).shape[0] < 2 for off in offs if off.numel()) or not all(
            map(torch.Tensor.numel, offs)
        ):
            continue
        if all(_rows_agree(off, 2 * slack) for off in offs):
            sentence = f"{case.what} is off by the same vector in each row, as by a bias"
            copies = math.prod(evidence.sizes[axis] for axis, _ in case.pending)
            if copies > 1:
                sentence += f" that each of the {copies} ranks adds: add it once, after the reduction"
            else:
                sentence += " that was added once per rank of an axis, or not at all"
            return Diagnosis("added", sentence, _only(evidence, case))
    return None


def added_known(evidence: Evidence, splits: Splits, name: str, addend: torch.Tensor) -> Diagnosis | None:
    """Every part, or every sum of parts, is off by a multiple of a tensor that is known by name."""
    try:
        full = addend.detach().to(torch.float64).expand(evidence.full.shape)
    except RuntimeError:
        return None  # it does not broadcast, so it was not added
    for case in sums(evidence, splits):
        times = _factor(case, full)
        if times is None or times == 0:
            continue
        copies = math.prod(evidence.sizes[axis] for axis, _ in case.pending)
        often = f"{name} once more" if times == 1 else f"{times} times {name}"
        sentence = f"{case.what} is the reference plus {often}"
        if times < 0:
            sentence = f"{case.what} has {-times} times {name} too little"
        if copies > 1 and times == copies - 1:
            sentence += f": each of the {copies} ranks adds it; add it once, after the reduction"
        alone = [axis for axis in free_axes(evidence, splits) if copies == 1 and times == evidence.sizes[axis] - 1]
        if alone:
            name = evidence.names[alone[0]]
            sentence += (
                f", as if each of the {times + 1} ranks along {name!r} adds it; add it once, after the reduction"
            )
            return Diagnosis("added", sentence, name, times)
        return Diagnosis("added", sentence, _only(evidence, case), times)
    return None


def copies_differ(evidence: Evidence, splits: Splits) -> Diagnosis | None:
    """Ranks that should hold the same do not."""
    free = free_axes(evidence, splits)
    for axes in dict.fromkeys((tuple(free), *((axis,) for axis in free))):
        for group in evidence.groups(tuple((axis, "sum") for axis in axes)).tolist():
            most, *others = _classes(evidence, group)
            odd = sorted(position for some in others for position in some)
            if not odd or (len(axes) > 1 and len(most) <= len(odd)):
                continue  # no majority: axis by axis
            names = [evidence.names[axis] for axis in axes]
            off = gap(evidence.parts[most[0]], evidence.parts[odd[0]]).max().item()
            sentence = f"the ranks along {quoted(names)} should hold the same and do not: "
            if len(most) > len(odd):
                differ = "differs" if len(odd) == 1 else "differ"
                sentence += f"{named_ranks(evidence, odd)} {differ} from the others by {off:.2g}"
            else:
                sentence += f"ranks {evidence.ranks[most[0]]} and {evidence.ranks[odd[0]]} differ by {off:.2g}"
            ranks = tuple(evidence.ranks[position] for position in odd) if len(most) > len(odd) else ()
            return Diagnosis("copies_differ", sentence, names[0] if len(names) == 1 else None, ranks=ranks)
    return None


def _classes(evidence: Evidence, group: list[int]) -> list[list[int]]:
    """Sort the ranks of a group by what they hold, the most frequent first."""
    classes: list[list[int]] = []
    for position in group:
        part = evidence.parts[position]
        like = next((each for each in classes if torch.equal(evidence.parts[each[0]], part)), None)
        if like is None:
            classes.append([position])
        else:
            like.append(position)
    return sorted(classes, key=len, reverse=True)


def _factor(case: SuspectedSplit, addend: torch.Tensor | None = None) -> Fraction | None:
    """The one number that the reference (or an addend, then besides the reference) is multiplied by in all groups."""
    factor: Fraction | None = None
    evidence = case.evidence
    if evidence.full.dtype == torch.bool or evidence.full.is_complex():
        return None
    for group in case.groups:
        want, part = case.want(group[0]).to(torch.float64), case.part(group).to(torch.float64)
        base = want if addend is None else addend[evidence.box(case.boxes, group[0])]
        part = part if addend is None else part - want
        if factor is None:
            square = float((base * base).sum())
            if not part.numel() or square == 0 or not math.isfinite(square):
                continue  # zeros tell nothing about a factor
            estimate = float((base * part).sum()) / square
            if not math.isfinite(estimate):
                return None
            factor = Fraction(estimate).limit_denominator(_MOST_DENOMINATOR)
        expected = base * float(factor) if factor is not None else base
        slack = max(1.0, abs(float(factor or 1))) * (1.0 if addend is None else 2.0)
        if evidence.exact:
            if not bool(((part - expected).abs() <= 1e-9 * expected.abs()).all()):
                return None
        elif not case.close(part, expected, group[0], slack):
            return None
    return factor


def _times(factor: Fraction) -> str:
    if factor == 0:
        return "zero"
    if factor == -1:
        return "what it should be with the wrong sign"
    number = str(factor) if factor.denominator < 100 else f"{float(factor):.4g}"
    return f"{number} of what it should be" if 0 < factor < 1 else f"{number} times what it should be"


def _cause(evidence: Evidence, splits: Splits, factor: Fraction) -> tuple[str, str | None]:
    """Why a factor, and the axis to blame if it is one."""
    free = free_axes(evidence, splits)
    axes = free + [axis for axis, size in enumerate(evidence.sizes) if size > 1 and axis not in free]
    for count in range(1, len(axes) + 1):
        for wanted, words in (
            (factor, "counted once per rank of"),
            (1 / factor if factor else None, "averaged once too often over"),
        ):
            found = [some for some in combinations(axes, count) if math.prod(evidence.sizes[a] for a in some) == wanted]
            if not found:
                continue
            names = [quoted([evidence.names[axis] for axis in sorted(some)]) for some in found]
            several = count == 1 and len(found) > 1
            axis = evidence.names[found[0][0]] if count == 1 and not several else None
            return f": {words} {' or '.join(names) if several else names[0]}", axis
    return "", None


def _rows_agree(tensor: torch.Tensor, slack: float) -> bool:
    rows = tensor.flatten(0, -2)
    return bool((gap(rows, rows[:1].expand_as(rows)) <= slack).all()) if rows.numel() else True


def _only(evidence: Evidence, case: SuspectedSplit) -> str | None:
    return evidence.names[case.pending[0][0]] if len(case.pending) == 1 else None


def _axis_of(evidence: Evidence, positions: list[int]) -> str | None:
    """The axis along which these positions are one place."""
    for axis, size in enumerate(evidence.sizes):
        there = {coordinates(evidence, position)[axis] for position in positions}
        if size > 1 and len(positions) == len(evidence.parts) // size and len(there) == 1:
            return evidence.names[axis]
    return None


# -- the first of them that fits ---------------------------------------------------------------------------------------

_MOST_SPLITS = 32
_CHECKS: tuple[Callable[..., Diagnosis | None], ...] = (not_finite, scaled, coarse, same_values, reordered, permuted)
_CHECKS += (some_ranks, scaled_sums, blocks, added, copies_differ)


def diagnose(
    locals: Parts,
    reference: torch.Tensor,
    mesh: Mesh,
    bound: Bound = None,
    *,
    declared: Layout | None = None,
    addends: Mapping[str, torch.Tensor] | None = None,
) -> Diagnosis | None:
    """Look for the usual faults in parts that no layout explains, and say the first that is found.

    >>> full = torch.arange(1.0, 9.0)
    >>> print(diagnose([full * 2, full * 2], full, "dp=2"))
    every part is 2 times what it should be: counted once per rank of 'dp'
    >>> print(diagnose([full[4:], full[:4]], full, "tp=2"))
    the parts of the ranks along 'tp' are in another order: (1, 0)
    >>> diagnose([full, full], full, "tp=2") is None
    True

    Args:
        locals: what each rank holds, by rank.
        reference: the full tensor.
        mesh: as for `infer_layout`.
        bound: as for `infer_layout`.
        declared: who should hold what. Default: every split that gives parts of the shapes that the ranks hold.
        addends: full tensors by name, such as a bias or the input of a residual connection, which broadcast to the
            reference; it is checked whether one of them was added once per rank.

    Returns:
        None if a layout (the declared one, if there is one; else any, with sums and averages pending at most) explains
        the parts, or if nothing usual is the matter.

    Raises:
        TypeError, ValueError: as `infer_layout`.
    """
    evidence = read("cannot diagnose parts", locals, reference, mesh, bound)
    likely = splits_by_shape(evidence)
    if declared is not None:
        found = fit(locals, reference, declared, bound)
        if found.problem is not None and likely:
            return Diagnosis("shapes", found.problem)
        explained, likely = found.fits, likely and [declared.splits(evidence.full.ndim)]
    else:
        explained = bool(explanations(locals, reference, mesh, bound))
    if explained:
        return None
    if not likely:
        return shapes(evidence)
    return _first(evidence, likely[:_MOST_SPLITS], addends or {})


def _first(evidence: Evidence, likely: list[Splits], addends: Mapping[str, torch.Tensor]) -> Diagnosis | None:
    for check in _CHECKS:
        for splits in likely:
            found = _tried(check, evidence, splits)
            if found is not None:
                return found
        if check is blocks:
            for name, addend in addends.items():
                for splits in likely:
                    found = _tried(added_known, evidence, splits, name, addend)
                    if found is not None:
                        return found
    return None


def _tried(check: Callable[..., Diagnosis | None], *args: Any) -> Diagnosis | None:
    """Run one check; one that fails says so in a warning, as the place of a fault is worth more than its cause."""
    try:
        return check(*args)
    except Exception as error:
        warnings.warn(f"the check for {check.__name__!r} failed, and was left out: {error!r}", stacklevel=2)
        return None
