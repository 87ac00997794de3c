"""Tokens on their way to experts as Megatron-LM sends them, where tensors are split within experts.

There, ranks along tp have parts of the sequence; each sends its own part's tokens along ep, and those along tp gather
what they have got. Here every rank along tp is given the whole sequence first, and sends all of it: with tp ranks of a
node, tp times as much between nodes. A program that was recorded of the latter is changed into the former: exchanges
along ep are a part as large; one along tp follows those that bring tokens to experts, and precedes those that bring
results back. (Megatron-core, MoEAlltoAllTokenDispatcher.)
"""

from __future__ import annotations

from dataclasses import replace

from sim.mesh.program import Comm, Event, Program, Segment, Wait

__all__ = ["split_dispatch"]


def split_dispatch(program: Program) -> Program:
    """Return the program with exchanges along ep that are shared by the ranks along tp.

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
