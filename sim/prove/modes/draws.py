"""Random numbers that one device and the ranks share, each rank its part, so that masks are compared."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import torch

from hyper_parallel.core.dtensor.layout import Layout
from sim.explain.errors import ranks_phrase
from sim.prove.evidence import magnitude
from sim.prove.infer import explanations, submesh
from sim.prove.modes.values import listed
from sim.prove.randomness import THE_STEP, DrawPlace, DrawUse
from sim.prove.record import ranks_along
from sim.prove.report import Report, ReportRow

_Uses: TypeAlias = Mapping[DrawPlace, DrawUse]

_COARSE = 2.0**-7
"""Part of a tensor's values: where rounding may be more, any part of it would be right."""


_STEP = re.compile(r" (of|in) step \d+$")


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
        pairs: which draws of ranks have numbers of which of one device.
        elsewhere: where ranks put numbers on another tensor than one device does, and on which.
        left: where numbers are taken at their mean, as nothing tells which part each rank draws.
        rows: draws that are wrong whatever numbers they give.
    """

    one: dict[DrawPlace, torch.Tensor]
    ranks: list[dict[DrawPlace, torch.Tensor]]
    pairs: list[tuple[list[DrawPlace], dict[int, list[DrawPlace]]]] = field(default_factory=list)
    elsewhere: dict[DrawPlace, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    rows: list[ReportRow] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """Say which random numbers are not compared."""
        places = list(dict.fromkeys(self.left))
        why = "nothing tells which part of those of one device each rank draws"
        return [f"random numbers of {listed(places)} are taken at their mean: {why}"] if places else []

    def elsewhere_words(self) -> str:
        """Say where the ranks put numbers on another tensor; "" where they do not."""
        texts = dict.fromkeys(f"those of {_word(place)} are put on {what}" for place, what in self.elsewhere.items())
        return listed(list(texts))

    def check_used(self, mine: Collection[DrawPlace], ranks: Sequence[Collection[DrawPlace]], *, misfit: bool) -> None:
        """Refuse runs in which some have drawn what others have not: their values decide how much they draw.

        What all have left out, as a layer that is dropped, is fine.

        Raises:
            MisfitError: there are such draws.
        """
        for sources, places in self.pairs:
            used = {source in mine for source in sources}
            used |= {place in ranks[rank] for rank, each in places.items() for place in each}
            misfit = misfit or len(used) > 1
        if misfit:
            raise MisfitError


class MisfitError(Exception):
    """With random numbers in the place of their means, a program draws others: as many as its values say."""


def proved_with(report: Report, shared: SharedDraws, prove: Callable[[SharedDraws], Report]) -> Report:
    """Add to a right report what steps with the random numbers of one device on both sides say."""
    noted = replace(report, notes=(*report.notes, *shared.notes))
    if shared.rows:
        return replace(noted, rows=(*report.rows, *shared.rows))
    if not shared.one:
        return noted
    try:
        again = prove(shared)
    except MisfitError:
        note = "random numbers are taken at their mean, as others are drawn where they are not"
        return replace(report, notes=(*report.notes, note))
    except Exception as error:  # such as nan where a mask leaves nothing
        lines = str(error).splitlines() or [""]
        note = f"random numbers are taken at their mean; without it: {type(error).__name__}: {lines[0]}"
        return replace(report, notes=(*report.notes, note))
    if again.bug is None:
        return noted
    elsewhere = shared.elsewhere_words()
    sentence = "it is right with means in the place of random numbers, and wrong with those of one device"
    sentence += f": {elsewhere}" if elsewhere else ""
    hint = "dropout of the same tensor, with the same p, as on one device"
    rows = [_with_words(row) for row in again.rows if row.verdict == "bug"]
    first = replace(_with_words(again.bug), sentence=sentence, suggestion=hint)
    rows = [first, *(row for row in rows if (row.place, row.kind) != (first.place, first.kind))]
    return replace(noted, rows=(*report.rows, *rows))


def _with_words(row: ReportRow) -> ReportRow:
    match = _STEP.search(row.tensor)
    at = match.start() if match is not None else len(row.tensor)
    return replace(row, tensor=f"{row.tensor[:at]} with random numbers{row.tensor[at:]}")


class _Held(NamedTuple):
    """How ranks hold what random numbers are put on.

    Attributes:
        layout: the part of each rank.
        order: the dim along which the full tensor is held in another order, and the places along it.
    """

    layout: Layout
    order: tuple[int, tuple[int, ...]] | None


@dataclass(frozen=True)
class _Drawn:
    """One draw, or those of several calls of a module behind each other, as micro-batches are.

    Attributes:
        places: which draws.
        uses: what became of each.
        given: what they are put on; None where that is not known.
    """

    places: tuple[DrawPlace, ...]
    uses: tuple[DrawUse, ...]
    given: torch.Tensor | None

    @property
    def numbers(self) -> torch.Tensor | None:
        """As they are put on what is given; None where a part was taken of them."""
        if any(_sizes(use.shape) != _sizes(use.drawn.shape) for use in self.uses):
            return None
        shaped = [use.drawn.reshape(use.shape) for use in self.uses]
        return shaped[0] if len(shaped) == 1 else torch.cat(shaped)

    def parts(self, numbers: torch.Tensor) -> list[torch.Tensor]:
        """Divide numbers that are put on what is given into those of each draw."""
        if len(self.uses) == 1:
            return [numbers.reshape(self.uses[0].drawn.shape).clone()]
        pieces = numbers.split([use.shape[0] for use in self.uses])
        return [piece.reshape(use.drawn.shape).clone() for piece, use in zip(pieces, self.uses, strict=True)]


def shared_draws(
    mine: _Uses,
    ranks: Sequence[_Uses],
    mesh: Layout,
    bound: Callable[[DrawPlace, torch.Tensor], float],
    boundaries: Callable[[int], Sequence[ModuleTensor]] = lambda step: (),
    orders: Sequence[tuple[int, ...]] = (),
    repeats: Sequence[bool] = (),
    calls: Callable[[int, str, int], bool] = lambda rank, path, step: True,
    inputs: Callable[[str], Layout | None] = lambda path: None,
    repeated: Callable[[int, str], bool] = lambda step, path: False,
) -> SharedDraws:
    """Find out which part of one device's random numbers each rank draws: that of what the numbers are put on.

    What cannot be known is not shared, and stays at its mean on both sides. Numbers that are put on nothing that is
    known, such as one by which a layer is left out, are the same on all ranks, if these draw as many as one device.

    >>> x, noise = torch.arange(1.0, 5.0), torch.tensor([0.0, 1.0, 1.0, 0.0])
    >>> place = ("drop", "bernoulli_", 0, 0)
    >>> halves = [{place: DrawUse(torch.ones(2), "a", part, (2,), place)} for part in x.chunk(2)]
    >>> one = {place: DrawUse(noise, "a", x, (4,), place)}
    >>> [shared] = shared_draws(one, halves, Layout((2,), ("tp",)), lambda place, given: 0.0).ranks[1].values()
    >>> shared
    tensor([1., 0.])

    Args:
        mine: what became of the numbers on one device.
        ranks: on each rank, by the names of one device.
        mesh: all ranks.
        bound: called with a draw and what it is put on, returns what rounding can do to that.
        boundaries: called with the number of a step, returns other tensors that ranks may have put numbers on.
        orders: places along a dim in which ranks hold their inputs, zig-zag or interleaved.
        repeats: whether backward has computed forward again, on one device and on each rank.
        calls: whether a rank calls a module in a step, with anything.
        inputs: called with a module, returns how the ranks hold what went into it, where that is known.
        repeated: whether one device calls a module several times in a step, as for micro-batches.
    """
    flags = list(repeats) or [False] * (len(ranks) + 1)
    unclear = set().union(*(_repeated(uses, again) for uses, again in zip((mine, *ranks), flags, strict=True)))
    matching = _Matching(mine, ranks, mesh, bound, orders, unclear)
    matching.match(_singly)
    matching.match(_joined)
    matching.match_elsewhere(boundaries)
    matching.match_alike(inputs, repeated)
    shared = matching.shared
    shared.rows += [*matching.lacking(calls), *matching.added()]
    order = [(path, op.rstrip("_")) for path, op, _, _ in (*mine, *(place for uses in ranks for place in uses))]
    shared.rows.sort(key=lambda row: order.index((row.module, row.tensor)))
    left = [place for place in mine if place not in shared.one]
    left += [place for uses in ranks for place in uses if place not in mine and place not in matching.done]
    said = {f"{row.module or 'the model'} ({row.tensor})" for row in shared.rows}
    shared.left = [word for word in map(_word, left) if word not in said]
    return shared


class _Matching:
    """A search for the draws of one device that those of the ranks stand for."""

    def __init__(
        self,
        mine: _Uses,
        ranks: Sequence[_Uses],
        mesh: Layout,
        bound: Callable[[DrawPlace, torch.Tensor], float],
        orders: Sequence[tuple[int, ...]],
        unclear: Collection[DrawPlace],
    ) -> None:
        self.mine, self.ranks, self.mesh, self.bound, self.orders = mine, ranks, mesh, bound, orders
        self.unclear = frozenset(unclear)
        self.shared = SharedDraws({}, [{} for _ in ranks])
        self.done: set[DrawPlace] = set()  # by the ranks, in the names of one device

    def match(self, form: Callable[[_Uses], dict[DrawPlace, _Drawn]]) -> None:
        """Match what is put on the same values: by the same name, then by another one."""
        sources, theirs = self._open(form)
        for is_same in (True, False):
            for place, held_by in list(theirs.items()):
                for key, source in list(sources.items()):
                    if (
                        (key == place) != is_same
                        or (key[1].rstrip("_"), key[3]) != (place[1].rstrip("_"), place[3])
                        or not self._is_sharp(source)
                    ):
                        continue
                    assert source.given is not None
                    held = self._held(held_by, source.given, self._limit(source))
                    if held is not None and self._give(source, held_by, held):
                        del sources[key], theirs[place]
                        break

    def match_elsewhere(self, boundaries: Callable[[int], Sequence[ModuleTensor]]) -> None:
        """Match what the ranks put on another tensor than one device does."""
        for form in (_singly, _joined):
            sources, theirs = self._open(form)
            for place in [place for place in theirs if place in sources]:
                source = sources[place]
                assert source.given is not None
                for other in boundaries(place[3]):
                    if other.full.shape != source.given.shape:
                        continue
                    held = self._held(theirs[place], other.full, other.bound)
                    if held is not None and self._give(source, theirs[place], held):
                        self.shared.elsewhere[place] = other.place
                        break

    def match_alike(self, inputs: Callable[[str], Layout | None], repeated: Callable[[int, str], bool]) -> None:
        """Give all ranks what one device draws, where all draw as much and nothing is seen of what it is put on.

        Args:
            inputs: called with a module, returns how the ranks hold what went into it.
            repeated: whether one device calls a module several times in a step: its micro-batches are other rows.
        """
        counts = [Counter((path, op, step) for path, op, _, step in uses) for uses in (self.mine, *self.ranks)]
        for place, use in self.mine.items():
            kind = (place[0], place[1], place[3])
            there = {rank: uses[place] for rank, uses in enumerate(self.ranks) if place in uses}
            uses = [use, *there.values()]
            known = place in self.shared.one or place in self.done or place in self.unclear or not there
            known = known or repeated(place[3], place[0])
            if known or any(each.given is not None or each.drawn.shape != use.drawn.shape for each in uses):
                continue
            if len({counts[0][kind], *(counts[rank + 1][kind] for rank in there)}) == 1:
                self._take((place,), [use.drawn], {rank: ((place,), [use.drawn]) for rank in there})
                layout = inputs(place[0])
                if layout is not None and set(there) == set(layout.rank_list):
                    self.shared.rows += _apart(place, there, layout, None)

    def lacking(self, calls: Callable[[int, str, int], bool]) -> Iterator[ReportRow]:
        """Yield draws of one device that ranks do without, though all else that they draw is known."""
        for place in self.mine:
            if place in self.shared.one or place in self.unclear:
                continue
            path, _, _, step = place
            every = list(range(len(self.ranks)))
            those = [rank for rank in every if calls(rank, path, step)] or every
            without = [rank for rank in those if place not in self.ranks[rank]]
            unknown = [each for rank in without for each in self.ranks[rank] if each[3] == step]
            if not without or any(each not in self.done for each in unknown):
                continue
            who = "no rank does" if len(without) == len(those) else f"not {ranks_phrase(without)}"
            hint = "the same dropout as on one device, in training mode"
            yield _random_row(place, f"one device draws random numbers here, and {who}", hint)

    def added(self) -> Iterator[ReportRow]:
        """Yield draws of ranks where one device has none, though all else that it draws is known."""
        for place in dict.fromkeys(place for uses in self.ranks for place in uses):
            mine = [each for each in self.mine if each[3] == place[3]]
            # As of a forward that ranks repeat; or of what they send, rounded at random.
            there = place[0] == THE_STEP or any(each[:2] == place[:2] for each in mine)
            if (
                there
                or place in self.unclear
                or place in self.done
                or any(each not in self.shared.one for each in mine)
            ):
                continue
            those = [rank for rank, uses in enumerate(self.ranks) if place in uses]
            verb = "draws" if len(those) == 1 else "draw"
            sentence = f"{ranks_phrase(those)} {verb} random numbers here, and one device does not"
            yield _random_row(place, sentence, "the same dropout as on one device")

    def _open(
        self, form: Callable[[_Uses], dict[DrawPlace, _Drawn]]
    ) -> tuple[dict[DrawPlace, _Drawn], dict[DrawPlace, dict[int, _Drawn]]]:
        """Return what is not matched yet, of one device and of the ranks that have it."""
        sources = form({place: use for place, use in self.mine.items() if self._is_open(place, use, self.shared.one)})
        theirs: dict[DrawPlace, dict[int, _Drawn]] = {}
        for rank, uses in enumerate(self.ranks):
            open_uses = {place: use for place, use in uses.items() if self._is_open(place, use, self.done)}
            for place, drawn in form(open_uses).items():
                theirs.setdefault(place, {})[rank] = drawn
        return sources, theirs

    def _is_open(self, place: DrawPlace, use: DrawUse, done: Collection[DrawPlace]) -> bool:
        return place not in done and place not in self.unclear and use.given is not None

    def _limit(self, source: _Drawn) -> float:
        return max(
            self.bound(place, use.given)
            for place, use in zip(source.places, source.uses, strict=True)
            if use.given is not None
        )

    def _is_sharp(self, source: _Drawn) -> bool:
        assert source.given is not None
        return self._limit(source) < _COARSE * magnitude(source.given)

    def _held(self, held_by: Mapping[int, _Drawn], full: torch.Tensor, limit: float) -> _Held | None:
        parts = {rank: drawn.given for rank, drawn in held_by.items() if drawn.given is not None}
        return _held(parts, full, submesh(self.mesh, list(parts)), limit, self.orders)

    def _give(self, source: _Drawn, held_by: Mapping[int, _Drawn], held: _Held) -> bool:
        """Give each rank its part; False: it does not fit."""
        if len(source.uses) == 1 and _are_whole(source.uses[0], [drawn.uses[0] for drawn in held_by.values()]):
            numbers = source.uses[0].drawn
            ranks = {rank: (drawn.places, [numbers]) for rank, drawn in held_by.items()}
            self._take(source.places, [numbers], ranks)
            return True
        found = {rank: _part(source, drawn, held, rank) for rank, drawn in held_by.items()}
        if any(part is None for part in found.values()):
            return False
        ranks = {at: (held_by[at].places, held_by[at].parts(part)) for at, part in found.items() if part is not None}
        self._take(source.places, [use.drawn for use in source.uses], ranks)
        uses = {rank: drawn.uses[0] for rank, drawn in held_by.items()}
        self.shared.rows += _apart(source.places[0], uses, held.layout, source.given)
        return True

    def _take(
        self,
        places: Sequence[DrawPlace],
        numbers: Sequence[torch.Tensor],
        ranks: Mapping[int, tuple[Sequence[DrawPlace], Sequence[torch.Tensor]]],
    ) -> None:
        self.shared.one.update(zip(places, numbers, strict=True))
        owned: dict[int, list[DrawPlace]] = {}
        for rank, (named, parts) in ranks.items():
            self.done.update(named)
            owned[rank] = [self.ranks[rank][place].place for place in named]
            self.shared.ranks[rank].update(zip(owned[rank], parts, strict=True))
        self.shared.pairs.append((list(places), owned))


def _singly(uses: _Uses) -> dict[DrawPlace, _Drawn]:
    return {place: _Drawn((place,), (use,), use.given) for place, use in uses.items()}


def _joined(uses: _Uses) -> dict[DrawPlace, _Drawn]:
    """Put the draws of a step's calls of a module behind each other, where they are of rows."""
    kinds: dict[tuple[str, str, int], list[DrawPlace]] = {}
    for place in uses:
        kinds.setdefault((place[0], place[1], place[3]), []).append(place)
    found = {}
    for (path, op, step), places in kinds.items():
        those = [uses[place] for place in places]
        given = [use.given for use in those if use.given is not None]
        rows = all(
            each.dim()
            and use.shape[:1] == each.shape[:1]
            and len(use.shape) == each.dim()
            and each.shape[1:] == given[0].shape[1:]
            for each, use in zip(given, those, strict=True)
        )
        if rows:
            found[path, op, 0, step] = _Drawn(tuple(places), tuple(those), torch.cat(given))
    return found


def _apart(
    place: DrawPlace, uses: Mapping[int, DrawUse], layout: Layout, full: torch.Tensor | None
) -> Iterator[ReportRow]:
    """Yield what is the matter where ranks that hold the same draw other numbers.

    Args:
        place: which draw.
        uses: of each rank.
        layout: in which the ranks hold what they compute with.
        full: all of that; None: what they compute with is the input of the module, of whose rows each may draw its own.
    """
    if any(use.spread for use in uses.values()):
        return
    dims = layout.splits(len(layout.alias_placements or ()))[:1] if full is None else layout.splits(full.ndim)
    splits = {layout.alias_name[axis] for axes in dims for axis in axes}
    for name, size in zip(layout.alias_name, layout.mesh_shape, strict=True):
        for rank in layout.rank_list if size > 1 and name not in splits else ():
            line = ranks_along(layout, (name,), rank)
            if len({uses[other].state for other in line}) > 1:
                what = f"{place[1]} draws different numbers on {ranks_phrase(line)}, which hold the same over {name}"
                hint = f"the same seed on all ranks along {name}"
                yield _random_row(place, what, hint)
                return


def _random_row(place: DrawPlace, sentence: str, hint: str) -> ReportRow:
    sentence += f", in step {place[3] + 1}" if place[3] else ""
    return ReportRow(place[0], place[1].rstrip("_"), "random", verdict="bug", sentence=sentence, suggestion=hint)


def _repeated(uses: _Uses, repeats: bool) -> set[DrawPlace]:
    """Return the draws that a recomputation cannot tell from others, as they were made from the same state."""
    if not repeats:
        return set()
    states = Counter((place[1], use.drawn.shape, use.state) for place, use in uses.items())
    return {place for place, use in uses.items() if states[place[1], use.drawn.shape, use.state] > 1}


def _are_whole(mine: DrawUse, ranks: Sequence[DrawUse]) -> bool:
    """Whether all ranks draw all the numbers, alike, and take their parts of them."""
    alike = len({use.state for use in ranks}) == 1 and all(use.drawn.shape == mine.drawn.shape for use in ranks)
    return alike and any(_sizes(use.shape) != _sizes(use.drawn.shape) for use in ranks)


def _held(
    parts: Mapping[int, torch.Tensor], full: torch.Tensor, mesh: Layout, limit: float, orders: Sequence[tuple[int, ...]]
) -> _Held | None:
    """Return the only way in which the ranks can hold a tensor; None: there is none, or several."""
    if not full.numel() or any(part.ndim != full.ndim for part in parts.values()):
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


def _part(mine: _Drawn, theirs: _Drawn, held: _Held, rank: int) -> torch.Tensor | None:
    """Cut a rank's part out of the numbers of one device, as what they are put on is cut; None: it does not fit."""
    numbers, other = mine.numbers, theirs.numbers
    if mine.given is None or numbers is None or other is None:
        return None
    full = mine.given.shape
    more = len(full) - numbers.ndim  # numbers may have fewer dims, and lie along the last ones
    box = held.layout.local_slice(full, rank)[more:]
    if held.order is not None:
        dim, places = held.order[0] - more, held.order[1]
        if dim >= 0 and numbers.shape[dim] == len(places):
            numbers = numbers.index_select(dim, torch.tensor(places))
    cut = tuple(slice(None) if size == 1 else part for part, size in zip(box, numbers.shape, strict=True))
    part = numbers[cut]
    return part if part.shape == other.shape else None


def _sizes(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _word(place: DrawPlace) -> str:
    return f"{place[0] or 'the model'} ({place[1].rstrip('_')})"
