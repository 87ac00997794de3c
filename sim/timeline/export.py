"""A trace in the formats of other tools: chrome's and Perfetto's timeline, and torch's flight recorder."""

from __future__ import annotations

import math
import os
import pickle
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sim.comm.trace import Event, Shape
from sim.comm.trace import EventLog as Trace
from sim.timeline.bars import Bar, lay_out, row_names, row_of, stack
from sim.timeline.perfetto import PerfettoEvents

Json = dict[str, Any]

# -- chrome ----------------------------------------------------------------------------------------------------


def write_chrome(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write what `sim.Trace.to_chrome` says."""
    older = trace.forgotten()
    _chrome(trace).write(path, "ns", f"{older:,} older events" if older else "")


def _chrome(trace: Trace) -> PerfettoEvents:
    """Return names of processes and threads, then slices, then the arrows between them."""
    bars, timed = lay_out(trace)
    unit = 1e6 if timed else 1.0  # the format counts in microseconds; a step counts as one
    threads = _threads(bars)
    found = PerfettoEvents()
    for rank in range(trace.world_size):
        found.process(rank, f"rank {rank}")
    for rank in range(trace.world_size) if trace.forgotten() else ():
        found.label(rank, f"without {trace.forgotten(rank):,} older events")
    for rank, thread, name in sorted({(bar.event.rank, *threads[index]) for index, bar in enumerate(bars)}):
        found.thread(rank, thread, name)
    operations: dict[int, list[tuple[Bar, int]]] = {}
    for index, bar in enumerate(bars):
        thread = threads[index][0]
        _add_slice(found, bar, thread, unit)
        operations.setdefault(bar.number, []).append((bar, thread))
    for members in operations.values():
        _add_arrows(found, members, unit)
    return found


def _threads(bars: Sequence[Bar]) -> list[tuple[int, str]]:
    """Number and name of the row of each bar; slices of one row must not overlap."""
    names = row_names(bars)
    order = list(names)
    by_row: dict[tuple[int, tuple[str, str]], list[int]] = {}
    for index, bar in enumerate(bars):
        by_row.setdefault((bar.event.rank, row_of(bar.event)), []).append(index)
    found = [(0, "")] * len(bars)
    for (_, row), members in by_row.items():
        lanes = stack([(bars[index].left, bars[index].right) for index in members])
        for index, lane in zip(members, lanes, strict=True):
            number = order.index(row) * 1000 + lane + 1
            found[index] = (number, names[row] if lane == 0 else f"{names[row]}, at the same time ({lane + 1})")
    return found


def _add_slice(found: PerfettoEvents, bar: Bar, thread: int, unit: float) -> None:
    event = bar.event
    args: Json = {"group": ", ".join(map(str, event.group)), "dtype": event.dtype, "shape": str(list(event.shape))}
    args |= {"bytes sent": event.send_bytes, "bytes received": event.recv_bytes, "line": event.line}
    optional = {"reduce op": event.reduce_op or None, "root": event.root, "peer": event.peer}
    args |= {name: value for name, value in optional.items() if value is not None}
    args |= {"number": event.seq} if event.seq >= 0 else {}
    args |= {"issued": event.order} if bar.complete else {"issued": event.order, "state": "not all ranks have come"}
    start, duration = bar.left * unit, (bar.right - bar.left) * unit
    found.slice(event.rank, thread, event.op, event.axis, start=start, duration=duration, args=args)


def _add_arrows(found: PerfettoEvents, members: list[tuple[Bar, int]], unit: float) -> None:
    """Lead one arrow through the members of an operation, in rank order, senders first."""
    if len(members) < 2:
        return
    members = sorted(members, key=lambda member: (member[0].event.op == "recv", member[0].event.rank))
    for place, (bar, thread) in enumerate(members):
        phase = "s" if place == 0 else "f" if place == len(members) - 1 else "t"
        event = bar.event
        found.arrow(phase, bar.number, event.rank, thread, event.op, event.axis, bar.left * unit)


# -- flight recorder -------------------------------------------------------------------------------------------

_VERSION = "2.10"  # of the format that torch 2.13 writes; torch's analyser tells versions from 2.7 on apart no more
_DTYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
_LINE = re.compile(r"(.*):(\d+) in (.*)")


def write_flight_recorder(trace: Trace, folder: str | os.PathLike[str]) -> None:
    """Write what `sim.Trace.to_flight_recorder` says."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for rank, dump in enumerate(flight_recorder(trace)):
        (Path(folder) / f"rank_{rank}").write_bytes(pickle.dumps(dump))


def flight_recorder(trace: Trace) -> list[Json]:
    """The dump of each rank, as torch's flight recorder would have made it.

    An operation of which the trace has forgotten some ranks' events is left out: the analyser would miss these ranks.
    """
    bars = _whole_operations(lay_out(trace).bars) if trace.forgotten() else lay_out(trace).bars
    operations = {bar.event.order: bar.number for bar in bars}
    peers = {(bar.number, bar.event.op): bar.event for bar in bars}
    described: dict[tuple[str, tuple[int, ...]], str] = {}
    by_rank: list[list[Event]] = [[] for _ in range(trace.world_size)]
    for event in (bar.event for bar in bars):
        described.setdefault(_group_of(event, _peer(event, peers, operations)), event.axis)
        by_rank[event.rank].append(event)
    dumps = []
    for rank, events in enumerate(by_rank):
        entries = []
        for record, event in enumerate(events):
            name, ranks = _group_of(event, peer := _peer(event, peers, operations))
            entry = _entry(event, record, operations[event.order], ranks, peer)
            entries.append({**entry, "process_group": (name, described[name, ranks])})
        groups = {
            name: {"name": name, "desc": axis, "ranks": str(list(ranks))}
            for (name, ranks), axis in described.items()
            if rank in ranks
        }
        dump = {"version": _VERSION, "pg_config": groups, "pg_status": {}, "entries": entries}
        dumps.append(dump | ({"left_out": older} if (older := trace.count(rank) - len(events)) else {}))
    return dumps


def _whole_operations(bars: list[Bar]) -> list[Bar]:
    """The bars of operations that are not over, or of which all members' are there."""
    members = Counter(bar.number for bar in bars)
    return [
        bar
        for bar in bars
        if not bar.complete or members[bar.number] == (2 if bar.event.seq < 0 else len(bar.event.group))
    ]


def _peer(event: Event, by_side: dict[tuple[int, str], Event], operations: dict[int, int]) -> int | None:
    """The other side of a message; the rank itself for a receive from anybody that nobody has sent to."""
    if event.seq >= 0:
        return None
    if event.peer is not None:
        return event.peer
    other = by_side.get((operations[event.order], "send"))
    return event.rank if other is None else other.rank


def _group_of(event: Event, peer: int | None) -> tuple[str, tuple[int, ...]]:
    """Name and ranks of the group under which the analyser has to look at an event.

    It expects all members of a group to take part in a message, so a pair that talks to each other is one of its own.
    """
    if peer is None:
        return event.process_group, event.members
    pair = tuple(sorted({event.rank, peer}))
    return f"{event.process_group}:{'-'.join(map(str, pair))}", pair


def _entry(event: Event, record: int, number: int, ranks: tuple[int, ...], peer: int | None) -> Json:
    is_message = peer is not None
    name, inputs, outputs = _sizes(event)
    if peer is not None:
        mine, other = ranks.index(event.rank), ranks.index(peer)
        name = f"{event.op} {mine}{'->' if event.op == 'send' else '<-'}{other}"
    dtypes = [_DTYPES.get(dtype, dtype) for dtype in event.dtype.split() if dtype != "-"]
    ended = event.end is not None
    return {
        "record_id": record,
        "pg_id": 0,
        "collective_seq_id": number + 1 if is_message else event.seq + 1,
        "p2p_seq_id": number + 1 if is_message else 0,
        "op_id": record + 1,
        "profiling_name": f"gloo:{name}",
        "time_created_ns": _ns(event.issued),
        "input_sizes": inputs,
        "input_dtypes": dtypes if inputs else [],
        "output_sizes": outputs,
        "output_dtypes": dtypes if outputs else [],
        "state": "completed" if ended else "scheduled",
        "time_discovered_started_ns": _ns(event.start) if event.start is not None else None,
        "time_discovered_completed_ns": _ns(event.end) if event.end is not None else None,
        "duration_ms": (event.end - event.start) * 1e3 if event.end is not None and event.start is not None else None,
        "retired": ended,
        "timeout_ms": 0,
        "is_p2p": is_message,
        "frames": _frames(event.line),
    }


def _ns(at: float) -> int:
    return round(at * 1e9)


def _frames(line: str) -> list[Json]:
    match = _LINE.fullmatch(line)
    return [{"filename": match[1], "line": int(match[2]), "name": match[3]}] if match else []


def _sizes(event: Event) -> tuple[str, list[list[int]], list[list[int]]]:
    """The analyser's name for an operation, and the sizes it compares: lists of tensors count as one tensor."""
    op, inputs, outputs = event.op, event.input_shapes, event.output_shapes
    if op == "broadcast":
        inputs = outputs
    if op == "all_to_all":
        return op, [[_numel(inputs)]], [[_numel(outputs)]]
    if op in ("all_gather", "reduce_scatter"):
        many, one = (outputs, inputs) if op == "all_gather" else (inputs, outputs)
        if _numel(many) != _numel(one) * len(event.members) or len(set(map(math.prod, many))) > 1:  # uneven parts
            # It has no rule for these and takes different sizes on the ranks for a mistake: they get the full size.
            return f"{op}_v", [[_numel(many)]], [[_numel(many)]]
        whole, part = [[_numel(many)]], [[_numel(one)]]
        return (op, part, whole) if op == "all_gather" else (op, whole, part)
    return op, [list(shape) for shape in inputs], [list(shape) for shape in outputs]


def _numel(shapes: Sequence[Shape]) -> int:
    return sum(map(math.prod, shapes))
