"""Usual faults of values: counted too often, added too often, wrong on some ranks only, not the same on all."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import torch

from hyper_parallel.core.dtensor.shards import Splits
from sim.prove.candidates import free_axes
from sim.prove.evidence import Evidence
from sim.prove.gaps import gap
from sim.prove.suspicion import Case, Diagnosis, coordinates, named_ranks, quoted, sums

__all__ = ["added", "added_known", "coarse", "copies_differ", "not_finite", "scaled", "scaled_sums", "some_ranks"]

_MOST_DENOMINATOR = 256
_MANY = 8


def not_finite(evidence: Evidence, splits: Splits) -> Diagnosis | None:
    """NaN or infinity where the whole tensor has finite numbers."""
    if not bool(evidence.whole.isfinite().all()):
        return None
    bad = [position for position, part in enumerate(evidence.parts) if not bool(part.isfinite().all())]
    if not bad:
        return None
    holds = "holds" if len(bad) == 1 else "hold"
    sentence = f"{named_ranks(evidence, bad)} {holds} NaN or infinity where the reference is finite"
    return Diagnosis("not_finite", sentence, ranks=tuple(evidence.ranks[position] for position in bad))


def scaled(evidence: Evidence, splits: Splits) -> Diagnosis | None:
    """Every part is the same multiple of what it should be."""
    return _scaled(Case(evidence, splits))


def scaled_sums(evidence: Evidence, splits: Splits) -> Diagnosis | None:
    """Every sum of parts is the same multiple of what it should be."""
    told = (_scaled(case) for case in sums(evidence, splits) if case.pending)
    return next((each for each in told if each), None)


def _scaled(case: Case) -> Diagnosis | None:
    factor = _factor(case)
    if factor is None or factor == 1:
        return None
    cause, axis = _cause(case.evidence, case.splits, factor)
    return Diagnosis("scaled", f"{case.what} is {_times(factor)}{cause}", axis, factor)


def coarse(evidence: Evidence, splits: Splits) -> Diagnosis | None:
    """Parts are nearly right, and numbers of a coarser dtype than that of the ranks."""
    case, own = Case(evidence, splits), evidence.parts[0].dtype
    bad = [position for position in range(len(evidence.parts)) if not case.fits(position)]
    if evidence.exact or not own.is_floating_point or not bad:
        return None
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        few = 64 * torch.finfo(dtype).eps * float(evidence.whole.abs().max())
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
    case = Case(evidence, splits)
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
    if evidence.whole.ndim < 2 or evidence.whole.dtype == torch.bool or _rows_agree(evidence.whole, 0.0):
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
        whole = addend.detach().to(torch.float64).expand(evidence.whole.shape)
    except RuntimeError:
        return None  # it does not broadcast, so it was not added
    for case in sums(evidence, splits):
        times = _factor(case, whole)
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


def _factor(case: Case, addend: torch.Tensor | None = None) -> Fraction | None:
    """The one number that the reference (or an addend, then besides the reference) is multiplied by in all groups."""
    factor: Fraction | None = None
    evidence = case.evidence
    if evidence.whole.dtype == torch.bool or evidence.whole.is_complex():
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


def _only(evidence: Evidence, case: Case) -> str | None:
    return evidence.names[case.pending[0][0]] if len(case.pending) == 1 else None


def _axis_of(evidence: Evidence, positions: list[int]) -> str | None:
    """The axis along which these positions are one place."""
    for axis, size in enumerate(evidence.sizes):
        there = {coordinates(evidence, position)[axis] for position in positions}
        if size > 1 and len(positions) == len(evidence.parts) // size and len(there) == 1:
            return evidence.names[axis]
    return None
