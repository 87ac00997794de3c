"""Usual faults of places: the right values on the wrong ranks, cut in other pieces, gathered twice, padded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

import torch

from hyper_parallel.core.dtensor.shards import Splits
from sim.prove.evidence import Evidence
from sim.prove.gaps import gap
from sim.prove.suspicion import Case, Diagnosis, coordinates, quoted

__all__ = ["blocks", "permuted", "reordered", "same_values", "shapes"]


def same_values(evidence: Evidence, splits: Splits) -> Diagnosis | None:
    """Ranks along an axis that splits the tensor hold the same."""
    case = Case(evidence, splits)
    for axis in [axis for axes in splits for axis in axes]:
        told = 0
        for group in evidence.groups(((axis, "sum"),)).tolist():
            first, *others = group
            part = evidence.parts[first]
            if not part.numel() or not all(torch.equal(part, evidence.parts[other]) for other in others):
                told = 0
                break
            told += not all(torch.equal(case.want(first), case.want(other)) for other in others)
        if told:
            name = evidence.names[axis]
            sentence = f"the ranks along {name!r} hold the same values where each should hold its own part"
            if all(case.fits(group[0]) for group in evidence.groups(((axis, "sum"),)).tolist()):
                return Diagnosis("same_values", f"{sentence}: all hold the first one's", name)
            return Diagnosis("same_values", f"{sentence}: the same random seed on every shard?", name)
    return None


def reordered(evidence: Evidence, splits: Splits) -> Diagnosis | None:
    """Every rank holds a part of this split, but not its own."""
    case = Case(evidence, splits)
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


def _is_part(case: Case, part: torch.Tensor, position: int) -> bool:
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
    case = Case(evidence, splits)
    large = [axis for axis, size in enumerate(evidence.sizes) if size > 1]
    for axes in (some for count in range(1, len(large) + 1) for some in combinations(large, count)):
        ranks = math.prod(evidence.sizes[axis] for axis in axes)
        for dim, size in enumerate(evidence.parts[0].shape):
            if size % ranks or not size:
                continue
            orders = {_order(case, position, dim, ranks) for position in range(len(evidence.parts))}
            order = next(iter(orders))
            if len(orders) == 1 and order is not None and order != tuple(range(ranks)):
                names = [evidence.names[axis] for axis in axes]
                sentence = f"the {ranks} pieces of dim {dim} are in another order: {order}"
                sentence += f", as if gathered over {quoted(names)} in another order of ranks"
                return Diagnosis("permuted", sentence, names[0] if len(names) == 1 else None, order=order)
    return None


def _order(case: Case, position: int, dim: int, count: int) -> tuple[int, ...] | None:
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
        order.append(next((at for at in likely if bool((gap(piece, want[at]) <= limit).all())), -1))
    return tuple(order) if sorted(order) == list(range(count)) else None


def blocks(evidence: Evidence, splits: Splits) -> Diagnosis | None:
    """One dim is cut into blocks, each of which is split over the axis: fused weights, or elements dealt in turn."""
    case = Case(evidence, splits)
    for dim, axes in enumerate(splits):
        if len(axes) != 1:
            continue
        axis, size = axes[0], evidence.whole.shape[dim]
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


def _in_blocks(case: Case, position: int, dim: int, axis: int, count: int) -> bool:
    """Whether a part is made of its axis coordinate's piece of each block."""
    evidence = case.evidence
    ranks, here = evidence.sizes[axis], coordinates(evidence, position)[axis]
    box = list(evidence.box(case.boxes, position))
    box[dim] = slice(None)
    whole = evidence.whole[tuple(box)].unflatten(dim, (count, ranks, -1)).select(dim + 1, here)
    return case.close(evidence.parts[position], whole.flatten(dim, dim + 1), position)


def shapes(evidence: Evidence) -> Diagnosis:
    """No split gives the ranks parts of the shapes that they hold."""
    whole, part = tuple(evidence.whole.shape), tuple(evidence.parts[0].shape)
    axes = [(name, size) for name, size in zip(evidence.names, evidence.sizes, strict=True) if size > 1]
    if len(whole) != len(part):
        sentence = (
            f"rank {evidence.ranks[0]} holds {len(part)} dims, {part}, and the reference has {len(whole)}, {whole}"
        )
        return Diagnosis("shapes", sentence)
    for dim, (size, held) in enumerate(zip(whole, part, strict=True)):
        for name, ranks in axes:
            if size and held == size * ranks:
                sentence = f"dim {dim} is {ranks} times as long as it should be: gathered once too often over {name!r}"
                short = [at for at, (one, other) in enumerate(zip(whole, part, strict=True)) if one == other * ranks]
                if short:
                    sentence = f"dim {dim} is {ranks} times as long as it should be, and dim {short[0]} 1/{ranks} as"
                    sentence += f" long: gathered over {name!r} along dim {dim} instead of dim {short[0]}"
                return Diagnosis("gathered", sentence, name)
    equal = all(tuple(each.shape) == part for each in evidence.parts)
    for dim, (size, held) in enumerate(zip(whole, part, strict=True)):
        for name, ranks in axes:
            if equal and size % ranks and held == -(-size // ranks):
                sentence = f"dim {dim} of size {size} does not split evenly over {name!r}, and the last part is padded"
                return Diagnosis("padded", f"{sentence}: every rank holds {held}", name)
    whose = _pieces(evidence) if equal else None
    if whose is not None:
        return whose
    held_shapes = {tuple(each.shape): position for position, each in reversed(list(enumerate(evidence.parts)))}
    found = [f"rank {evidence.ranks[position]} holds {shape}" for shape, position in sorted(held_shapes.items())]
    mesh = ", ".join(f"{name}={size}" for name, size in zip(evidence.names, evidence.sizes, strict=True))
    sentence = f"no split of {whole} over {mesh} gives these parts: {', '.join(found[:4])}"
    return Diagnosis("shapes", sentence + f" ({math.prod(evidence.sizes)} ranks)")


def _pieces(evidence: Evidence) -> Diagnosis | None:
    """Say which piece of one dim each rank holds, where there are not as many pieces as ranks along any axis."""
    whole, part = evidence.whole, evidence.parts[0]
    odd = [dim for dim, size in enumerate(part.shape) if size != whole.shape[dim]]
    if len(odd) != 1 or not part.numel() or whole.shape[odd[0]] % part.shape[odd[0]]:
        return None
    pieces = whole.split(part.shape[odd[0]], odd[0])
    limit = evidence.limit(())
    limit = float(limit.max()) if isinstance(limit, torch.Tensor) else limit
    held: dict[int, list[str]] = {}
    for rank, each in zip(evidence.ranks, evidence.parts, strict=True):
        found = [at for at, piece in enumerate(pieces) if bool((gap(each, piece) <= limit).all())]
        if not found:
            return None
        held.setdefault(found[0], []).append(str(rank))
    words = [f"ranks {', '.join(ranks[:8])} hold piece {at}" for at, ranks in sorted(held.items())]
    sentence = (
        f"dim {odd[0]} is held in {len(pieces)} pieces, which no split over the mesh gives: {'; '.join(words[:4])}"
    )
    return Diagnosis("pieces", sentence)
