"""Put the programs of all ranks of a pipeline together, from the recordings of the kinds of their stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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
from sim.mesh.tracing.expand import Chunk, Key, Recording
from sim.mesh.tracing.orders import Action, orders

__all__ = ["stitch"]

_AFTER = ("reduce", "optimizer")


def stitch(job: Job, parts: Sequence[StagePart], recordings: dict[int, Recording]) -> list[Program]:
    """Return one program per place along the pipeline.

    Args:
        job: what is estimated.
        parts: the stages.
        recordings: by the number of the stage; those of one kind are one object.
    """
    like = job.dims.world_size // job.dims.pp // (job.dims.ep if job.is_skewed else 1)
    if not job.dims.pp_enabled:
        program = Program(0, like, job.dims.world_size)
        _Adder(job, program).add(parts[0], recordings[0])
        order: list[tuple[Key, int]] = [(key, -1) for key in program.segments if key[0] == "begin"]
        for number in range(job.microbatches):
            variant = _variant(number, job.microbatches)
            order += [(("forward", 0, variant), number), (("backward", 0, variant), number)]
        order += [(key, -1) for name in _AFTER for key in program.segments if key[0] == name]
        program.order = order
        return [program]
    actions = orders(job.recipe.schedule, job.dims.pp, job.recipe.stages_per_rank, job.microbatches)
    programs = []
    for rank in range(job.dims.pp):
        device = job.device_of([job.rank_of_stage_rank(rank)])[0]
        program = Program(device, like, job.dims.world_size)
        own = [part for part in parts if part.rank == rank]
        adder = _Adder(job, program)
        for part in own:
            adder.add(part, recordings[part.index])
        program.stages = tuple(part.index for part in own)
        program.order = _order(job, program, actions[rank])
        programs.append(program)
    _tie(job, programs)
    return programs


def _variant(number: int, count: int) -> str:
    if count == 1:
        return "only"
    if number == 0:
        return "first"
    return "last" if number == count - 1 else "steady"


def _order(job: Job, program: Program, actions: Sequence[Action]) -> list[tuple[Key, int]]:
    count = job.microbatches
    order: list[tuple[Key, int]] = [(key, -1) for key in program.segments if key[0] == "begin"]
    for action in actions:
        key = (action.kind, action.stage, _variant(action.batch, count))
        if key not in program.segments:
            _split_backward(job, program, action.stage, key[2])
        order.append((key, action.batch))
    return order + [(key, -1) for name in _AFTER for key in program.segments if key[0] == name]


def _split_backward(job: Job, program: Program, stage: int, variant: str) -> None:
    """Cut a backward in two: products that give gradients of weights, and everything else.

    A product gives the gradient of a weight if what it sums over are the tokens of the micro-batch. Memory is given
    back with the first part, so that of schedules that wait long with the second is estimated too low.
    """
    whole = program.segments["backward", stage, variant]
    tokens = job.micro_batch * job.local_seq_len
    weights: list[Event] = []
    rest: list[Event] = []
    for event in whole.events:
        is_weight = (
            isinstance(event, Op) and event.kind == "matmul" and len(event.shape) == 4 and event.shape[3] == tokens
        )
        (weights if is_weight else rest).append(event)
    program.segments["backward_input", stage, variant] = Segment("backward_input", stage, variant, rest)
    program.segments["backward_weight", stage, variant] = Segment("backward_weight", stage, variant, weights)


class _Adder:
    """Adds recordings to a program, whose numbers go on from those already there."""

    def __init__(self, job: Job, program: Program) -> None:
        self.job, self.program = job, program
        self.blocks = self.handles = self.events = 0
        self.by_rank = {part.index: part.rank for part in job.stages()}

    def add(self, part: StagePart, recording: Recording) -> None:
        """Add a stage."""
        program = self.program
        shift_group, shift_place = len(program.groups), len(program.places)
        program.groups += recording.groups
        program.places += recording.places
        blocks, handles, events = self.blocks, self.handles, self.events
        top = [blocks, handles, events]

        def moved(event: Event) -> Event:
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
            program.segments[key] = Segment(name, part.index, variant, [moved(e) for e in _flat(chunks)])
        program.categories.update({block + blocks: name for block, name in recording.categories.items()})
        self.blocks, self.handles, self.events = top

    def _peer(self, part: StagePart, event: Comm, recording: Recording) -> int | None:
        """The device on the other side of a message: between stages, that of the stage before or after this one."""
        if event.op not in ("send", "recv") or recording.groups[event.group].axis != "pp":
            return None if event.peer is None else self.job.device_of([event.peer])[0]
        place = recording.places[event.place]
        forward = place.phase in ("forward", "loss")
        step = 1 if forward == (event.op == "send") else -1
        rank = self.by_rank[part.index + step]
        return self.job.device_of([self.job.rank_of_stage_rank(rank)])[0]


def _flat(chunks: list[Chunk]) -> list[Event]:
    return [event for _, events in chunks for event in events]


def _tie(job: Job, programs: list[Program]) -> None:
    """Where embedding and head are one weight on two stages, their gradients are added up before the update."""
    if not getattr(job.model.config, "tie_embeddings", False):
        return
    first, last = programs[0], programs[-1]
    if first is last or 0 in last.stages:
        return
    vocab, width = job.model.vocab_size or 0, job.model.hidden_size or 0
    shards = job.dims.tp * (job.dims.token_ranks // job.dims.dp_replicate if job.recipe.zero >= 2 else 1)
    width_of = {"fp32": 4}.get(job.recipe.reduce_dtype, 2)
    size = -(-vocab * width // shards) * width_of
    devices = (programs[0].rank, programs[-1].rank)
    for program in (first, last):
        program.groups.append(CommGroup("pp", devices))
        program.places.append(Place("optimizer", None, "tied weights"))
        key = next(key for key in program.segments if key[0] == "optimizer")
        handle = 1 + max(
            (e.handle for s in program.segments.values() for e in s.events if isinstance(e, Comm)), default=0
        )
        other = devices[1] if program is first else devices[0]
        group, place = len(program.groups) - 1, len(program.places) - 1
        give = Comm("send", group, size, size, "float32", 0, handle, place, other)
        get = Comm("recv", group, size, size, "float32", 0, handle + 1, place, other)
        program.segments[key] = dataclasses.replace(
            program.segments[key], events=[give, get, Wait(handle + 1, 0), *program.segments[key].events]
        )
