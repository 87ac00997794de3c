"""Make the recording of a deep stage from that of a shallow one: the middle layer's part is repeated.

A transformer's layers do the same, one after the other, and the engine's prefetching reaches one layer ahead. So of a
long run of layers of one kind the first three and the last three are recorded, and what the third one did is repeated
for those between, with its references to its neighbours' memory, communication and events shifted along. Tests compare
the result with the recording of all layers, event by event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sim.mesh.program import Alloc, Await, Comm, CommGroup, Event, EventRecord, Free, Op, Place, Touch, Wait

__all__ = ["EDGE", "Recording", "Standing", "expand", "kept_layers"]

EDGE = 3
"""Layers recorded at each end of a run; what a layer does may refer to two layers before and after it."""

_REACH = EDGE - 1

Key = tuple[str, int, str]
Chunk = tuple[int | None, list[Event]]


class Standing(NamedTuple):
    """A block that lives from before a step until after it: weights, the optimizer's state, tables.

    Attributes:
        block: which.
        bytes: its size.
        category: see :class:`~sim.mesh.program.Program`.
        layer: that it belongs to; None: to none.
    """

    block: int
    bytes: int
    category: str
    layer: int | None


@dataclass
class Recording:
    """What one stage does in a step.

    Attributes:
        groups: of its communication.
        places: of its events.
        categories: of its blocks.
        sizes: of its blocks, in bytes.
        standing: what lives through the step.
        segments: chunks by segment: the number of a layer, and what belongs to it; None: to what is around layers.
    """

    groups: list[CommGroup]
    places: list[Place]
    categories: dict[int, str]
    sizes: dict[int, int]
    standing: list[Standing]
    segments: dict[Key, list[Chunk]] = field(default_factory=dict)


def kept_layers(layers: Sequence[int], kinds: Sequence[str]) -> list[int]:
    """Return the layers to record: all but the middle of the longest run of one kind, where it is long.

    >>> kept_layers(range(10), ["dense"] * 2 + ["experts"] * 8)
    [0, 1, 2, 3, 4, 7, 8, 9]

    Args:
        layers: numbers of the stage's layers.
        kinds: of these.
    """
    best = (0, 0)
    start = 0
    for end in range(1, len(kinds) + 1):
        if end == len(kinds) or kinds[end] != kinds[start]:
            if end - start > best[1] - best[0]:
                best = (start, end)
            start = end
    first, last = best[0] + EDGE, best[1] - EDGE
    return [*layers[:first], *layers[last:]] if last > first else list(layers)


class _Name(NamedTuple):
    """A block, handle or event by where it was made: the n-th of its kind in a chunk."""

    space: str
    segment: Any
    scope: Any  # the layer, or ("around", number of the chunk)
    number: int


def expand(recording: Recording, layers: list[int], kept: list[int]) -> Recording:
    """Return the recording of all ``layers``, given that of those ``kept``.

    Args:
        recording: of the layers kept.
        layers: all.
        kept: see :func:`kept_layers`.
    """
    if layers == kept:
        return recording
    return _Expansion(recording, layers, kept).run()


class _Expansion:
    def __init__(self, recording: Recording, layers: list[int], kept: list[int]) -> None:
        self.old = recording
        self.kept = kept
        self.index = {layer: place for place, layer in enumerate(kept)}
        gap = next(i for i in range(len(kept) - 1) if layers.index(kept[i + 1]) != layers.index(kept[i]) + 1)
        self.template = kept[gap]
        self.template_index = gap
        self.copies = layers[layers.index(kept[gap]) + 1 : layers.index(kept[gap + 1])]
        self.order = {layer: place for place, layer in enumerate(layers)}
        self.layers = layers
        self.names: dict[tuple[str, int], _Name] = {}
        self.numbers: dict[_Name, int] = {}
        self.counts = {"block": 0, "handle": 0, "event": 0}
        self.places = list(recording.places)
        self.place_numbers = {place: number for number, place in enumerate(self.places)}
        self.moved_places: dict[tuple[int, int], int] = {}
        self.categories: dict[int, str] = {}
        self.sizes: dict[int, int] = {}
        self._name_all()

    # -- names ---------------------------------------------------------------------------------------------------

    def _name_all(self) -> None:
        counts: dict[Any, int] = {}
        for standing in self.old.standing:
            scope = standing.layer if standing.layer in self.index else ("around", 0)
            key: Any = ("standing", scope)
            counts[key] = counts.get(key, -1) + 1
            self.names["block", standing.block] = _Name("block", "standing", scope, counts[key])
        for segment, chunks in self.old.segments.items():
            for place, (layer, events) in enumerate(chunks):
                scope = layer if layer in self.index else ("around", place)
                for event in events:
                    made = _made(event)
                    if made is None:
                        continue
                    key = (segment, scope, made[0])
                    counts[key] = counts.get(key, -1) + 1
                    self.names[made] = _Name(made[0], segment, scope, counts[key])

    def _number(self, name: _Name, old: int) -> int:
        number = self.numbers.get(name)
        if number is None:
            self.counts[name.space] += 1
            number = self.numbers[name] = self.counts[name.space]
        if name.space == "block" and number not in self.categories:
            self.categories[number] = self.old.categories.get(old, "workspace")
            self.sizes[number] = self.old.sizes.get(old, 0)
        return number

    def _refer(self, space: str, old: int, here: int | None, chunk: int | None) -> int:
        """The new number of something, as the chunk of a layer refers to it.

        Args:
            space: "block", "handle" or "event".
            old: its number in the recording.
            here: the layer of the new chunk; None: it is around layers.
            chunk: the recorded layer that the chunk is a copy of, or is.
        """
        name = self.names.get((space, old))
        if name is None:  # made before the step, and gone in it
            name = _Name(space, "before", ("around", 0), old)
        scope = name.scope
        if here is not None and chunk is not None and isinstance(scope, int):
            distance = self.index[scope] - self.index[chunk]
            if abs(distance) <= _REACH:
                scope = self.layers[self.order[here] + distance]
        return self._number(name._replace(scope=scope), old)

    def _copies_of(self, space: str, old: int) -> list[int]:
        """What stands for something of the repeated layer in all its copies, itself first; else itself alone."""
        name = self.names.get((space, old))
        if name is None or name.scope != self.template:
            return [self._refer(space, old, None, None)]
        return [self._number(name._replace(scope=layer), old) for layer in (self.template, *self.copies)]

    # -- events --------------------------------------------------------------------------------------------------

    def run(self) -> Recording:
        segments: dict[Key, list[Chunk]] = {}
        for key, chunks in self.old.segments.items():
            made: list[Chunk] = []
            before: int | None = None
            for layer, events in chunks:
                if layer != self.template:
                    made.append((layer, self._chunk(events, layer, layer)))
                else:
                    falling = before is not None and self.index[before] > self.template_index
                    following = [(copy, self._chunk(events, copy, layer)) for copy in self.copies]
                    own = (layer, self._chunk(events, layer, layer))
                    made.extend([*reversed(following), own] if falling else [own, *following])
                if layer in self.index:
                    before = layer
            segments[key] = made
        standing: list[Standing] = []
        for each in self.old.standing:
            for number, layer in zip(self._copies_of("block", each.block), (each.layer, *self.copies), strict=False):
                standing.append(each._replace(block=number, layer=layer))
        return Recording(self.old.groups, self.places, self.categories, self.sizes, standing, segments)

    def _chunk(self, events: list[Event], here: int | None, chunk: int | None) -> list[Event]:
        if here not in self.order or chunk not in self.index:
            here = chunk = None
        made: list[Event] = []
        for event in events:
            made.extend(self._event(event, here, chunk))
        return made

    def _event(self, event: Event, here: int | None, chunk: int | None) -> list[Event]:
        around = here is None
        if isinstance(event, Op):
            reads, writes = self._touches(event.reads, here, chunk), self._touches(event.writes, here, chunk)
            return [event._replace(reads=reads, writes=writes, place=self._place(event.place, here, chunk))]
        if isinstance(event, Alloc):
            return [event._replace(block=self._refer("block", event.block, here, chunk))]
        if isinstance(event, Free):
            if around:
                return [Free(number) for number in self._copies_of("block", event.block)]
            return [Free(self._refer("block", event.block, here, chunk))]
        if isinstance(event, Comm):
            handle = self._refer("handle", event.handle, here, chunk)
            return [event._replace(handle=handle, place=self._place(event.place, here, chunk))]
        if isinstance(event, Wait):
            if around:
                return [Wait(number, event.stream) for number in self._copies_of("handle", event.handle)]
            return [Wait(self._refer("handle", event.handle, here, chunk), event.stream)]
        if isinstance(event, EventRecord | Await):
            return [event._replace(event=self._refer("event", event.event, here, chunk))]
        return [event]

    def _touches(self, touches: tuple[Touch, ...], here: int | None, chunk: int | None) -> tuple[Touch, ...]:
        if here is None:
            return tuple(
                [Touch(number, touch.bytes) for touch in touches for number in self._copies_of("block", touch.block)]
            )
        return tuple([Touch(self._refer("block", touch.block, here, chunk), touch.bytes) for touch in touches])

    def _place(self, number: int, here: int | None, chunk: int | None) -> int:
        if here is None or here == chunk:
            return number
        key = (number, here)
        found = self.moved_places.get(key)
        if found is None:
            place = self.places[number]
            moved = place if place.layer != chunk else place._replace(layer=here)
            found = self.place_numbers.get(moved, len(self.places))
            if found == len(self.places):
                self.places.append(moved)
                self.place_numbers[moved] = found
            self.moved_places[key] = found
        return found


def _made(event: Event) -> tuple[str, int] | None:
    if isinstance(event, Alloc):
        return ("block", event.block)
    if isinstance(event, Comm):
        return ("handle", event.handle)
    if isinstance(event, EventRecord):
        return ("event", event.event)
    return None
