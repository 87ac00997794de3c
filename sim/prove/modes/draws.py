"""Random numbers that one device and the ranks share, each rank its part, so that masks are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

from hyper_parallel.core.dtensor.layout import Layout
from sim.prove.evidence import magnitude
from sim.prove.infer import explanations
from sim.prove.modes.values import listed
from sim.prove.randomness import DrawPlace, DrawUse

__all__ = ["ModuleTensor", "SharedDraws", "shared_draws"]

_Uses: TypeAlias = Mapping[DrawPlace, DrawUse]

_COARSE = 2.0**-7
"""Part of a tensor's values: where rounding may be more, any part of it would be right."""


class ModuleTensor(NamedTuple):
    """A tensor of one device that random numbers may have been put on instead of the right one.

    Attributes:
        place: its name in words.
        full: its values.
        bound: what rounding can do to them.
    """

    place: str
    full: torch.Tensor
    bound: float


@dataclass
class SharedDraws:
    """The same random numbers for one device and for the ranks.

    Attributes:
        one: those of one device.
        ranks: the part of each rank.
        elsewhere: where ranks put numbers on another tensor than one device does, and on which.
        left: where numbers are taken at their mean, as nothing tells which part each rank draws.
    """

    one: dict[DrawPlace, torch.Tensor]
    ranks: list[dict[DrawPlace, torch.Tensor]]
    elsewhere: dict[DrawPlace, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Say which random numbers are not compared."""
        places = list(dict.fromkeys(self.left))
        why = "nothing tells which part of those of one device each rank draws"
        return [f"random numbers of {listed(places)} are taken at their mean: {why}"] if places else []

    def elsewhere_words(self) -> str:
        """Say where the ranks put numbers on another tensor; "" where they do not."""
        texts = [f"those of {_word(place)} are put on {what}" for place, what in self.elsewhere.items()]
        return listed(texts)


class _Held(NamedTuple):
    """How ranks hold what random numbers are put on.

    Attributes:
        layout: the part of each rank.
        order: the dim along which the full tensor is held in another order, and the places along it.
    """

    layout: Layout
    order: tuple[int, tuple[int, ...]] | None


def shared_draws(
    mine: _Uses,
    ranks: Sequence[_Uses],
    mesh: Layout,
    bound: Callable[[DrawPlace, torch.Tensor], float],
    boundaries: Sequence[ModuleTensor] = (),
    orders: Sequence[tuple[int, ...]] = (),
    repeats: Sequence[bool] = (),
) -> SharedDraws:
    """Find out which part of one device's random numbers each rank draws: that of what the numbers are put on.

    What cannot be known is not shared, and stays at its mean on both sides.

    >>> x, noise = torch.arange(1.0, 5.0), torch.tensor([0.0, 1.0, 1.0, 0.0])
    >>> place = ("drop", "bernoulli_", 0)
    >>> halves = [{place: DrawUse(torch.ones(2), "a", part, (2,))} for part in x.chunk(2)]
    >>> one = {place: DrawUse(noise, "a", x, (4,))}
    >>> shared_draws(one, halves, Layout((2,), ("tp",)), lambda place, given: 0.0).ranks
    [{('drop', 'bernoulli_', 0): tensor([0., 1.])}, {('drop', 'bernoulli_', 0): tensor([1., 0.])}]

    Args:
        mine: what became of the numbers on one device.
        ranks: on each rank.
        mesh: all ranks.
        bound: called with a draw and what it is put on, returns what rounding can do to that.
        boundaries: other tensors that ranks may have put them on.
        orders: places along a dim in which ranks hold their inputs, zig-zag or interleaved.
        repeats: whether backward has computed forward again, on one device and on each rank.
    """
    shared = SharedDraws({}, [{} for _ in ranks])
    unclear = _repeated(mine, repeats[:1]).union(*map(_repeated, ranks, [[each] for each in repeats[1:]] or [[]]))
    free = {
        place: use
        for place, use in mine.items()
        if place not in unclear and use.given is not None and bound(place, use.given) < _COARSE * magnitude(use.given)
    }
    there = [place for place in ranks[0] if all(place in uses for uses in ranks)]
    used = [place for place in there if all(uses[place].given is not None for uses in ranks)]
    open_places = [place for place in used if place not in unclear]

    def give(place: DrawPlace, source: DrawPlace, held: _Held) -> bool:
        parts = [_part(free[source], uses[place], held, rank) for rank, uses in enumerate(ranks)]
        if _are_whole(free[source], [uses[place] for uses in ranks]):
            parts = [free[source].drawn] * len(ranks)
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return False
        shared.one[source] = free.pop(source).drawn
        for part, numbers in zip(found, shared.ranks, strict=True):
            numbers[place] = part
        open_places.remove(place)
        return True

    def held_as(place: DrawPlace, full: torch.Tensor, limit: float) -> _Held | None:
        return _held([uses[place].given for uses in ranks], full, mesh, limit, orders)  # type: ignore[misc]

    for is_same in (True, False):  # the same draw by its name; then another one of which the values are the same
        for place in list(open_places):
            for source in list(free):
                given = free[source].given
                assert given is not None
                held = held_as(place, given, bound(source, given)) if (source == place) == is_same else None
                if held is not None and give(place, source, held):
                    break
    for place in [each for each in open_places if each in free]:
        like = (each for each in boundaries if each.full.shape == free[place].given.shape)  # type: ignore[union-attr]
        for boundary in like:
            held = held_as(place, boundary.full, boundary.bound)
            if held is not None and give(place, place, held):
                shared.elsewhere[place] = boundary.place
                break
    shared.left = [_word(place) for place in mine if place not in shared.one]
    shared.left += [_word(place) for place in there if place not in shared.ranks[0] and place not in mine]
    return shared


def _repeated(uses: _Uses, repeats: Sequence[bool]) -> set[DrawPlace]:
    """Return the draws that a recomputation cannot tell from others, as they were made from the same state."""
    if not any(repeats):
        return set()
    states = Counter((place[1], use.drawn.shape, use.state) for place, use in uses.items())
    return {place for place, use in uses.items() if states[place[1], use.drawn.shape, use.state] > 1}


def _are_whole(mine: DrawUse, ranks: Sequence[DrawUse]) -> bool:
    """Whether all ranks draw all the numbers, alike, and take their parts of them."""
    alike = len({use.state for use in ranks}) == 1 and all(use.drawn.shape == mine.drawn.shape for use in ranks)
    return alike and any(_sizes(use.shape) != _sizes(use.drawn.shape) for use in ranks)


def _held(
    parts: Sequence[torch.Tensor], full: torch.Tensor, mesh: Layout, limit: float, orders: Sequence[tuple[int, ...]]
) -> _Held | None:
    """Return the only way in which the ranks can hold a tensor; None: there is none, or several."""
    if not full.numel() or any(part.ndim != full.ndim for part in parts):
        return None
    for order, moved in _moved(full, orders):
        fits = explanations(parts, moved, mesh, limit)
        if len({fit.layout.splits(full.ndim) for fit in fits}) > 1:
            return None
        if fits:
            return _Held(fits[0].layout.reset_partial(), order)
    return None


def _moved(
    full: torch.Tensor, orders: Sequence[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, tuple[int, ...]] | None, torch.Tensor]]:
    yield None, full
    for places in orders:
        for dim in range(full.ndim):
            if full.shape[dim] == len(places):
                yield (dim, places), full.index_select(dim, torch.tensor(places))


def _part(mine: DrawUse, use: DrawUse, held: _Held, rank: int) -> torch.Tensor | None:
    """Cut a rank's part out of the numbers of one device, as what they are put on is cut; None: it does not fit."""
    assert mine.given is not None
    if any(_sizes(each.shape) != _sizes(each.drawn.shape) for each in (mine, use)):
        return None  # a part was taken of the numbers
    numbers, full = mine.drawn.reshape(mine.shape), mine.given.shape
    more = len(full) - numbers.ndim  # numbers may have fewer dims, and lie along the last ones
    box = held.layout.local_slice(full, rank)[more:]
    if held.order is not None:
        dim, places = held.order[0] - more, held.order[1]
        if dim >= 0 and numbers.shape[dim] == len(places):
            numbers = numbers.index_select(dim, torch.tensor(places))
    cut = tuple(slice(None) if size == 1 else part for part, size in zip(box, numbers.shape, strict=True))
    part = numbers[cut]
    return part.reshape(use.drawn.shape).clone() if tuple(part.shape) == use.shape else None


def _sizes(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _word(place: DrawPlace) -> str:
    return f"{place[0] or 'the model'} ({place[1].rstrip('_')})"
