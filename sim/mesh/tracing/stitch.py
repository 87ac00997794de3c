"""Programs of all ranks of a pipeline, put together from the recordings of the kinds of their stages."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.ownership import split_points
from hyper_parallel.core.machine.description import Machine, one_node
from hyper_parallel.core.mesh.parallel_dims import RANK_ORDER
from hyper_parallel.core.pipeline.schedules import find_schedule
from hyper_parallel.core.pipeline.split import stages_of_rank
from hyper_parallel.core.redistribute.plan import Plan, plan
from sim.comm.process_group import moved_by_all_reduce
from sim.mesh.job import Job, StagePart
from sim.mesh.program import (
    Alloc,
    Await,
    Comm,
    CommGroup,
    Event,
    EventRecord,
    Free,
    Op,
    Place,
    Program,
    Segment,
    Touch,
    Wait,
)
from sim.mesh.recipe import Recipe

# In which order each rank of a pipeline works on stages and micro-batches: torch's schedules, asked without ranks -----

_KINDS = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "backward_input",
    "BACKWARD_WEIGHT": "backward_weight",
}


class Action(NamedTuple):
    """One thing that a rank does.

    Attributes:
        kind: `forward`, `backward`, `backward_input` or `backward_weight`.
        stage: number of the stage.
        batch: number of the micro-batch.
    """

    kind: str
    stage: int
    batch: int


def orders(schedule: str, ranks: int, stages_per_rank: int | None, micro_batches: int) -> list[list[Action]]:
    """Return what each rank does in a step, in its order.

    >>> [f"{a.kind[0]}{a.batch}" for a in orders("1f1b", 2, None, 3)[0]]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    kind = find_schedule(schedule)
    each = kind.checked_stages_per_rank(stages_per_rank)
    if schedule == "gpipe":
        return [_gpipe(rank, micro_batches) for rank in range(ranks)]
    if schedule == "1f1b":
        return [_one_forward_one_backward(rank, ranks, micro_batches) for rank in range(ranks)]
    own = stages_of_rank(schedule, 0, ranks, each)
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=index,
            num_stages=ranks * each,
            group_size=ranks,
            group_rank=0,
            is_first=index == 0,
            is_last=index == ranks * each - 1,
            has_backward=True,
            submod=None,
            device=None,
        )
        for index in own
    ]
    made = kind.torch_class(stages, micro_batches, loss_fn=lambda *given: None, scale_grads=False)
    found: list[list[Action]] = []
    for rank in range(ranks):
        actions = [action for action in made.pipeline_order[rank] if action is not None]
        found.append(
            [
                Action(_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)
                for action in actions
                if action.computation_type.name in _KINDS
            ]
        )
    return found


def _gpipe(rank: int, count: int) -> list[Action]:
    return [Action("forward", rank, n) for n in range(count)] + [Action("backward", rank, n) for n in range(count)]


def _one_forward_one_backward(rank: int, ranks: int, count: int) -> list[Action]:
    """As torch's Schedule1F1B: as many forwards ahead as there are stages from here on."""
    ahead = min(ranks - rank, count)
    actions = [Action("forward", rank, n) for n in range(ahead)]
    for n in range(count):
        actions.append(Action("backward", rank, n))
        if ahead + n < count:
            actions.append(Action("forward", rank, ahead + n))
    return actions


def sends_end(recipe: Recipe) -> str:
    """Return when the device waits for what a stage sends: "each", "phase" or "step".

    Args:
        recipe: of the schedule. 1F1B exchanges one message for another, and waits for both; GPipe waits after all
            forwards, and after all backwards; the others when the step ends.
    """
    return {"1f1b": "each", "gpipe": "phase"}.get(recipe.parallel.pipeline.name, "step")


# Make the recording of a deep stage from that of a shallow one: the middle layer's part is repeated -------------------
#
# A transformer's layers do the same, one after the other, and the engine's prefetching reaches one layer ahead. So of
# a long run of layers of one kind the first three and the last three are recorded, and what the third one did is
# repeated for those between, with its references to its neighbours' memory, communication and events shifted along.
# Tests compare the result with the recording of all layers, event by event.

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
        category: see `sim.mesh.program.Program`.
        layer: that it belongs to; None: to none.
    """

    block: int
    bytes: int
    category: str
    layer: int | None


class Weight(NamedTuple):
    """A weight, and how ranks split it.

    Attributes:
        layer: that it belongs to; None: to none.
        itemsize: bytes of an element.
        shape: of all of it.
        splits: for each dim what splits it, outer first: axes of `RANK_ORDER`, over whose ranks, counted together.
        owner: axes, and the place along them of the only ranks that hold it; None: all do.
    """

    layer: int | None
    itemsize: int
    shape: tuple[int, ...]
    splits: tuple[tuple[tuple[str, ...], ...], ...]
    owner: tuple[tuple[str, ...], int] | None


class UsedPlan(NamedTuple):
    """A plan of a redistribution that a recording contains.

    Attributes:
        src: the layout before it, without a mesh.
        dst: the layout after it, likewise.
        shape: of the full tensor.
        dtype: of the tensor.
        limit: of extra memory, in bytes, see `plan`.
        steps: their kinds and axes.
    """

    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    limit: int | None
    steps: tuple[tuple[str, tuple[str, ...]], ...]

    @classmethod
    def of(cls, made: Plan, limit: int | None) -> UsedPlan:
        """Return what a recording keeps of a plan."""
        steps = tuple([(step.kind, step.axes) for step in made.steps])
        return cls(made.src, made.dst, made.global_shape, made.dtype, limit, steps)

    def holds_on(self, machine: Machine | None) -> bool:
        """Return True if another machine takes the same steps."""
        on = machine or one_node()
        return self == UsedPlan.of(
            plan(self.src, self.dst, self.shape, self.dtype, on, max_extra_bytes=self.limit), self.limit
        )


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
        even: numbers of shards that divide this one split all weights without padding.
        splits: sets of groups over which the weights are split that the norm of gradients counts.
        weights: that are split over ranks.
        plans: of its redistributions, on the machine that it was recorded for.
    """

    groups: list[CommGroup]
    places: list[Place]
    categories: dict[int, str]
    sizes: dict[int, int]
    standing: list[Standing]
    segments: dict[Key, list[Chunk]] = field(default_factory=dict)
    even: int = 1
    splits: tuple[tuple[int, ...], ...] = ()
    weights: tuple[Weight, ...] = ()
    plans: tuple[UsedPlan, ...] = ()


def kept_layers(layers: Sequence[int], kinds: Sequence[str]) -> list[int]:
    """Return the layers to record: all but the middle of the longest run of one kind, where it is long.

    >>> kept_layers(range(10), ["dense"] * 2 + ["experts"] * 8)
    [0, 1, 2, 3, 4, 7, 8, 9]
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
    """Return the recording of all `layers`, given that of those `kept`."""
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
        self.referred: dict[tuple[str, int], int] = {}  # of the chunk in hand: most blocks are named several times
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
        key = (space, old)
        found = self.referred.get(key)
        if found is None:
            found = self.referred[key] = self._find(key, here, chunk)
        return found

    def _find(self, key: tuple[str, int], here: int | None, chunk: int | None) -> int:
        space, old = key
        name = self.names.get(key)
        if name is None:  # made before the step, and gone in it
            name = _Name(space, "before", ("around", 0), old)
        scope = name.scope
        if here is not None and chunk is not None and isinstance(scope, int):
            distance = self.index[scope] - self.index[chunk]
            if abs(distance) <= _REACH:
                scope = self.layers[self.order[here] + distance]
        return self._number(_Name(space, name.segment, scope, name.number) if scope != name.scope else name, old)

    def _copies_of(self, space: str, old: int) -> list[int]:
        """What stands for something of the repeated layer in all its copies, itself first; else itself alone."""
        name = self.names.get((space, old))
        if name is None or name.scope != self.template:
            return [self._find((space, old), None, None)]
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
        return dataclasses.replace(
            self.old,
            places=self.places,
            categories=self.categories,
            sizes=self.sizes,
            standing=standing,
            segments=segments,
            weights=(
                *self.old.weights,
                *(w for w in self.old.weights if w.layer == self.template for _ in self.copies),
            ),
        )

    def _chunk(self, events: list[Event], here: int | None, chunk: int | None) -> list[Event]:
        if here not in self.order or chunk not in self.index:
            here = chunk = None
        self.referred = {}
        made: list[Event] = []
        for event in events:
            made.extend(self._event(event, here, chunk))
        return made

    def _event(self, event: Event, here: int | None, chunk: int | None) -> list[Event]:
        around = here is None
        if isinstance(event, Op):
            reads, writes = self._touches(event.reads, here, chunk), self._touches(event.writes, here, chunk)
            place = self._place(event.place, here, chunk)
            return [Op(*event[:3], reads, writes, *event[5:8], place)]
        if isinstance(event, Alloc):
            return [Alloc(self._refer("block", event.block, here, chunk), event.bytes, event.stream)]
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


# Put the programs of all ranks of a pipeline together, from the recordings of the kinds of their stages ---------------

_AROUND = ("count", "begin"), ("reduce", "numbers", "optimizer")
_BYTES_OF_NORM = {"float32": 4, "float64": 8}
_OF_A_RANK = ("count", "numbers")
"""Segments that a rank with several stages has once: what it tells and reads of the global batch."""


def stitch(job: Job, parts: Sequence[StagePart], recordings: dict[int, Recording]) -> list[Program]:
    """Return one program per place along the pipeline."""
    if not job.dims.pp_enabled:
        program = _program(job, job.rank_of_stage_rank(0), recordings.values())
        _Adder(job, program).add(parts[0], recordings[0])
        turns = itertools.product(range(job.microbatches), ("forward", "backward"))
        batches = [((name, 0, variant_of(number, job.microbatches)), number) for number, name in turns]
        program.order = _around(program, batches)
        return [program]
    parallel = job.recipe.parallel
    actions = orders(parallel.pipeline.name, job.dims.pp, parallel.stages_each, job.microbatches)
    programs = []
    for rank in range(job.dims.pp):
        device = job.rank_of_stage_rank(rank)
        own = [part for part in parts if part.rank == rank]
        program = _program(job, device, [recordings[part.index] for part in own])
        adder = _Adder(job, program)
        changed = _sums_of_all([recordings[part.index] for part in own], device)
        for part, others in zip(own, changed, strict=True):
            adder.add(part, recordings[part.index], others)
        program.stages = tuple(part.index for part in own)
        variants = _variants(actions[rank], job.microbatches)
        batches = [((kind, stage, variants[stage, batch]), batch) for kind, stage, batch in actions[rank]]
        program.order = _around(program, batches)
        programs.append(program)
    return programs


def _program(job: Job, rank: int, recordings: Iterable[Recording]) -> Program:
    """Return the program, still empty, of a rank and of all that hold as much of each weight, and of what they are."""
    counts = _weights(recordings)
    sizes, total = _held(job, counts)
    own = np.unravel_index(rank % total.size, total.shape)
    places = [_elements(weight, sizes) for weight in counts]
    if job.is_skewed:
        places.append(_along(sizes, [job.dims.expert_axes], np.arange(job.dims.expert_ranks)))
    alike = np.ones(total.shape, dtype=bool)
    for each in places:
        alike &= each == np.broadcast_to(each, total.shape)[own]
    amounts, ranks = np.unique(total, return_counts=True)
    held = sorted(zip(amounts.tolist(), ranks.tolist(), strict=True), key=lambda one: (one[0] != total[own], -one[0]))
    return Program(rank, int(alike.sum()), job.dims.world_size, held=tuple(held) if len(held) > 1 else ())


def fullest_seat(job: Job, parts: Sequence[StagePart], recordings: Mapping[int, Recording]) -> int:
    """Return which rank of its stages holds most of the weights, counted from the first: the first such one."""
    totals = []
    for rank in range(job.dims.pp):
        own = [recordings[part.index] for part in parts if part.rank == rank]
        totals.append(_held(job, _weights(own))[1].ravel())
    return int(np.argmax(np.max(totals, axis=0)))


def _weights(recordings: Iterable[Recording]) -> Counter[Weight]:
    return Counter(weight._replace(layer=None) for recording in recordings for weight in recording.weights)


def _held(job: Job, weights: Mapping[Weight, int]) -> tuple[dict[str, int], npt.NDArray[np.int64]]:
    """Return the sizes of the axes of a stage's ranks, and the bytes of weights that each of them holds."""
    sizes = {axis: int(getattr(job.dims, axis)) for axis in RANK_ORDER if axis != "pp"}
    total = np.zeros((*sizes.values(),), dtype=np.int64)
    for weight, count in weights.items():
        total += count * weight.itemsize * _elements(weight, sizes)
    return sizes, total


def _elements(weight: Weight, sizes: Mapping[str, int]) -> npt.NDArray[np.int64]:
    """Return how many elements of a weight each rank holds, in an array that broadcasts over axes of ranks."""
    found = np.ones((1,) * len(sizes), dtype=np.int64)
    for size, splits in zip(weight.shape, weight.splits, strict=True):
        parts = [math.prod([sizes[axis] for axis in axes]) for axes in splits]
        start, stop = split_points(size, parts, range(len(parts)))
        found = found * _along(sizes, splits, stop - start)
    if weight.owner is not None:
        axes, owner = weight.owner
        found = found * (_along(sizes, [axes], np.arange(math.prod([sizes[axis] for axis in axes]))) == owner)
    return found


def _along(sizes: Mapping[str, int], splits: Sequence[Sequence[str]], values: npt.NDArray[np.int64]) -> Any:
    """Return values of places along some axes, as an array of one dim for each axis of ranks."""
    order = list(sizes)
    axes = [order.index(axis) for some in splits for axis in some]
    apart = values.reshape([sizes[order[axis]] for axis in axes]).transpose(np.argsort(axes))
    return apart.reshape([size if at in axes else 1 for at, size in enumerate(sizes.values())])


def _sums_of_all(recordings: Sequence[Recording], rank: int) -> list[dict[int, Comm | None]]:
    """Return for each stage of a rank what is in the place of its sums of the norm of gradients; None: nothing is.

    The trainer takes one for each group over all stages, in the order in which their weights need the groups, of a
    number for each set of groups that weights are split over. Here the stage with most of them takes them.
    """
    if len(recordings) == 1:
        return [{}]
    sums = [_sums_of_norm(recording) for recording in recordings]
    whole = max(sums, key=lambda some: sum([comm.size for _, comm in some.values()]))
    known = {over for over, _ in whole.values()}
    splits = [split for recording in recordings for split in _splits(recording)]
    needed = list(dict.fromkeys([ranks for split in splits for ranks in split]))
    found: list[dict[int, Comm | None]] = []
    for own in sums:
        if own is not whole:
            found.append({handle: None for handle, (over, _) in own.items() if over in known})
            continue
        slots = [handle for handle, ((group, _), _) in own.items() if group.ranks in needed]
        taken = sorted([own[handle] for handle in slots], key=lambda one: needed.index(one[0][0].ranks))
        found.append(
            {
                handle: _widened(comm, over, splits, rank)._replace(handle=handle)
                for handle, (over, comm) in zip(slots, taken, strict=True)
            }
        )
    return found


def _sums_of_norm(recording: Recording) -> dict[int, tuple[tuple[CommGroup, str], Comm]]:
    """Return the sums of the norm of gradients by their handles: over which group, of which dtype, and the sums."""
    return {
        event.handle: ((recording.groups[event.group], event.dtype), event)
        for (name, _, _), chunks in recording.segments.items()
        if name == "optimizer"
        for event in _flat(chunks)
        if isinstance(event, Comm) and event.op == "all_reduce"
        if event.size == _bytes_of_sum(recording.groups[event.group], event.dtype, _splits(recording))
    }


def _splits(recording: Recording) -> list[tuple[Sequence[int], ...]]:
    return [tuple([recording.groups[number].ranks for number in split]) for split in recording.splits]


def _bytes_of_sum(group: CommGroup, dtype: str, splits: Sequence[tuple[Sequence[int], ...]]) -> int:
    count = len({frozenset(split) for split in splits if group.ranks in split})
    return max(count, 1) * _BYTES_OF_NORM.get(dtype, 0)


def _widened(comm: Comm, over: tuple[CommGroup, str], splits: Sequence[tuple[Sequence[int], ...]], rank: int) -> Comm:
    """Return the sum of the norm over a group, of the weights of all stages of a rank."""
    group, dtype = over
    size = _bytes_of_sum(group, dtype, splits)
    moved = moved_by_all_reduce(size, len(group.ranks), group.ranks.index(rank))
    return comm._replace(size=size, moved=moved)


def variant_of(number: int, count: int) -> str:
    """Return as which of the recorded micro-batches of a step one is run."""
    if count == 1:
        return "only"
    if number == 0:
        return "first"
    return "last" if number == count - 1 else "steady"


def _around(program: Program, batches: Sequence[tuple[Key, int]]) -> list[tuple[Key, int]]:
    """Return the order of a step: what comes before its micro-batches, these, and what comes after them."""
    before, after = ([key for name in names for key in program.segments if key[0] == name] for names in _AROUND)
    return [*((key, -1) for key in before), *batches, *((key, -1) for key in after)]


def _variants(actions: Sequence[Action], count: int) -> dict[tuple[int, int], str]:
    """Return as which of the recorded micro-batches each stage runs each one.

    Gradients are taken by the backward that runs first and reduced after the one that runs last, which some schedules
    run in falling order. Forwards are alike.
    """
    found: dict[tuple[int, int], str] = {}
    done: Counter[int] = Counter()
    for action in actions:
        if action.kind in ("backward", "backward_weight"):
            found[action.stage, action.batch] = variant_of(done[action.stage], count)
            done[action.stage] += 1
    return found


class _Adder:
    """Adds recordings to a program, whose numbers go on from those already there."""

    def __init__(self, job: Job, program: Program) -> None:
        self.job, self.program = job, program
        self.blocks = self.handles = self.events = 0
        self.by_rank = {part.index: part.rank for part in job.stages()}

    def add(self, part: StagePart, recording: Recording, changed: Mapping[int, Comm | None] | None = None) -> None:
        """Add a stage, with other collectives in the place of those that have some handles; None: without them."""
        program = self.program
        shift_group, shift_place = len(program.groups), len(program.places)
        program.groups += recording.groups
        program.places += recording.places
        blocks, handles, events = self.blocks, self.handles, self.events
        top = [blocks, handles, events]

        is_first = not (blocks or handles or events or shift_group or shift_place)

        def moved(event: Event) -> Event:
            if is_first and not isinstance(event, Comm):  # its numbers stay
                if isinstance(event, Alloc):
                    top[0] = max(top[0], event.block)
                elif isinstance(event, EventRecord | Await):
                    top[2] = max(top[2], event.event)
                return event
            if isinstance(event, Op):
                reads = tuple([Touch(t.block + blocks, t.bytes) for t in event.reads])
                writes = tuple([Touch(t.block + blocks, t.bytes) for t in event.writes])
                return event._replace(reads=reads, writes=writes, place=event.place + shift_place)
            if isinstance(event, Comm):
                top[1] = max(top[1], event.handle + handles)
                return event._replace(
                    handle=event.handle + handles,
                    group=event.group + shift_group,
                    place=event.place + shift_place,
                    peer=self._peer(part, event, recording),
                )
            if isinstance(event, Alloc):
                top[0] = max(top[0], event.block + blocks)
                return event._replace(block=event.block + blocks)
            if isinstance(event, Free):
                return Free(event.block + blocks)
            if isinstance(event, Wait):
                return event._replace(handle=event.handle + handles)
            if isinstance(event, EventRecord | Await):
                top[2] = max(top[2], event.event + events)
                return event._replace(event=event.event + events)
            return event

        build = program.segments.setdefault(("build", -1, "only"), Segment("build", -1, "only"))
        for each in recording.standing:
            build.events.append(Alloc(each.block + blocks, each.bytes, 0))
            top[0] = max(top[0], each.block + blocks)
        for (name, _, variant), chunks in recording.segments.items():
            key = (name, part.index, variant)
            if name in _OF_A_RANK and any(other[0] == name for other in program.segments):
                continue
            known = [made for event in _flat(chunks) if (made := _changed(event, changed or {})) is not None]
            program.segments[key] = Segment(name, part.index, variant, [moved(e) for e in known])
        program.categories.update({block + blocks: name for block, name in recording.categories.items()})
        self.blocks, self.handles, self.events = top

    def _peer(self, part: StagePart, event: Comm, recording: Recording) -> int | None:
        """The device on the other side of a message: between stages, that of the stage before or after this one."""
        place = recording.places[event.place]
        is_message = event.op in ("send", "recv") and recording.groups[event.group].axis == "pp"
        if not is_message or place.phase == "optimizer":  # of a tied weight: there is one stage of each kind
            return event.peer
        forward = place.phase in ("forward", "loss")
        step = 1 if forward == (event.op == "send") else -1
        rank = self.by_rank[part.index + step]
        return self.job.rank_of_stage_rank(rank)


def _changed(event: Event, changed: Mapping[int, Comm | None]) -> Event | None:
    """Return an event, or what has taken its place; None: it is left out, as is who waits for it."""
    if isinstance(event, Comm) and event.handle in changed:
        return changed[event.handle]
    return None if isinstance(event, Wait) and changed.get(event.handle, event) is None else event


def _flat(chunks: list[Chunk]) -> list[Event]:
    return [event for _, events in chunks for event in events]
