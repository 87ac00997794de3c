"""Conventions of Megatron-LM and its kin: messages between stages, and tokens on their way to experts."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from sim.mesh.job import Job
from sim.mesh.program import Comm, Event, HostWait, Program, Segment, Wait
from sim.mesh.recipe import Conventions

__all__ = ["MegatronConventions", "expose_weights", "split_dispatch"]


@dataclass(frozen=True)
class MegatronConventions(Conventions):
    """What such a trainer does otherwise.

    Args:
        scatter_gather: with tensor parallelism that is not sequence-parallel: ranks along tp, which all have what goes
            from stage to stage, send a part each, and gather it on the other side (Narayanan et al. 2021, section 4.1).
        blocking_messages: the host waits for what comes from other stages before it issues more, as Megatron-LM's and
            DeepSpeed's pipelines do; else the device alone waits.
        waits_for_sends: the device waits for each message that it sends, as Megatron-LM's does unless it overlaps them;
            else as torch's schedules do.
        split_dispatch: with etp > 1: each rank along tp sends a part of the tokens to experts, and these gather them,
            as in Megatron-LM; else each of these ranks sends all of them.
        exposed_weights: with zero >= 2: weights are gathered, and gradients reduced, while nothing is computed.
    """

    scatter_gather: bool = False
    blocking_messages: bool = False
    waits_for_sends: bool = False
    split_dispatch: bool = False
    exposed_weights: bool = False

    def __str__(self) -> str:
        return "; ".join(field.name.replace("_", " ") for field in fields(self) if getattr(self, field.name))

    @property
    def posts_early(self) -> bool:
        """Whether a receive may be posted before the host has got to it."""
        return not self.blocking_messages

    def prepare_stage(self, job: Job, stage: Any, recorder: Any) -> None:
        """Let a stage send and receive as Megatron-LM's pipelines do; see `sim.mesh.recipe.Conventions`."""
        if self.blocking_messages:
            stage.after_message = lambda: recorder.emit(HostWait(None))
        if self.scatter_gather and job.dims.tp_enabled and not job.recipe.sequence_parallel:
            stage.group_of_parts = job.dims.get_mesh("tp").get_group()

    def rewrite(self, job: Job, program: Program) -> Program:
        """Return the program with tokens split on their way to experts, and what is to be exposed."""
        if self.exposed_weights and job.recipe.zero >= 2:
            program = expose_weights(program)
        if self.split_dispatch and job.dims.ep_enabled and job.dims.etp > 1:
            return split_dispatch(program)
        return program


# Weights whose gathers are steps of the computation's own graph (MindSpore)


def expose_weights(program: Program) -> Program:
    """Return the program with communication between data-parallel ranks in the order of what is computed.

    It starts after what was queued to be computed, and what is computed next starts after it.

    Args:
        program: not changed.
    """
    shards = {number for number, group in enumerate(program.groups) if "dp_shard" in group.axis}
    segments = {}
    for key, segment in program.segments.items():
        events: list[Event] = []
        for event in segment.events:
            if isinstance(event, Comm) and event.group in shards:
                events += [event._replace(stream=0), Wait(event.handle, 0)]
            else:
                events.append(event)
        segments[key] = replace(segment, events=events)
    return replace(program, segments=segments)


# Tokens on their way to experts, where tensors are split within experts (Megatron-core, MoEAlltoAllTokenDispatcher)


def split_dispatch(program: Program) -> Program:
    """Return the program with exchanges along ep that are shared by the ranks along tp.

    In Megatron-LM, ranks along tp have parts of the sequence; each sends its own part's tokens along ep, and those
    along tp gather what they have got. Here every rank along tp is given the whole sequence first, and sends all of it:
    with tp ranks of a node, tp times as much between nodes. A program that was recorded of the latter is changed into
    the former: exchanges along ep are a part as large; one along tp follows those that bring tokens to experts, and
    precedes those that bring results back.

    Args:
        program: not changed; without a group along tp it is returned as it is.
    """
    along_tp = next((number for number, group in enumerate(program.groups) if group.axis == "tp"), None)
    if along_tp is None:
        return program
    handle = 1 + max((e.handle for s in program.segments.values() for e in s.events if isinstance(e, Comm)), default=0)
    segments = {}
    for key, segment in program.segments.items():
        events = _changed(program, segment, along_tp, handle)
        handle += len(events) - len(segment.events)
        segments[key] = replace(segment, events=events)
    return replace(program, segments=segments)


def _changed(program: Program, segment: Segment, along_tp: int, handle: int) -> list[Event]:
    """Return the events of a segment; exchanges bring tokens to experts and results back in turn."""
    parts = len(program.groups[along_tp].ranks)
    events: list[Event] = []
    after: dict[int, list[Event]] = {}  # by the handle that is waited for
    goes_out = True
    for event in segment.events:
        if isinstance(event, Wait) and event.handle in after:
            events += [event, *after.pop(event.handle)]
            continue
        is_counts = isinstance(event, Comm) and event.dtype.startswith("int")
        if not isinstance(event, Comm) or event.op != "all_to_all" or is_counts:
            events.append(event)
            continue
        if program.groups[event.group].axis != "ep":
            events.append(event)
            continue
        op = "all_gather" if goes_out else "reduce_scatter"
        moved = event.size - event.size // parts
        within = event._replace(op=op, group=along_tp, moved=moved, handle=handle, messages=1)
        pair: list[Event] = [within, Wait(handle, event.stream)]
        handle += 1
        exchange = event._replace(size=event.size // parts, moved=event.moved // parts)
        if goes_out:
            after[event.handle] = pair
            events.append(exchange)
        else:
            events += [*pair, exchange]
        goes_out = not goes_out
    return events
