"""A step as a picture: computation and communication of each rank, what is exposed, and memory below."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.common.drawing import Axes, draw_shapes, sample
from sim.mesh.memory import ClassMemory
from sim.mesh.replay.player import ReplayedStep
from sim.mesh.replay.spans import COMMUNICATION, EXPOSED, DrawnSpan, exposed_parts, spans
from sim.timeline.plot import blank

# Computation is cold, communication is warm, what is lost is red, grey or hatched.
_PHASES = {
    "forward": "#4477aa",
    "recompute": "#88bbdd",
    "loss": "#44aa99",
    "backward": "#225588",
    "reduce": "#117766",
    "optimizer": "#228833",
}
_OTHER_PHASE = "#667799"
_AXES = ("#ee8866", "#ddaa33", "#aa3377", "#cc6677", "#999933", "#882255", "#ffaabb", "#bb5500")
_EXPOSED = "#cc0000"
_WAITING = "#f4bcbc"
_BUBBLE = "#dddddd"
_HOST = "#f7f0c0"
_INK = "#333333"
_CATEGORIES = {
    "parameters": "#4477aa",
    "gradients": "#66ccee",
    "optimizer": "#228833",
    "activations": "#ee8866",
    "gathered weights": "#ccbb44",
    "communication": "#aa3377",
    "logits": "#cc6677",
    "inputs": "#bbbbbb",
    "workspace": "#999933",
}
_OTHER_CATEGORY = "#777777"
_MOST_BOXES = 6_000
_MOST_LABELS = 1_200
_COLUMNS = 250
_LEAST_SHARE = 0.3  # of a column's height, or it is not seen
_MOST_MESSAGES = 200  # of a row; above it, columns
_WIDTH, _HEIGHT, _DPI = 16.0, 9.0, 100


class _Lane(NamedTuple):
    """A row of the picture: what it shows, and where it is."""

    row: int
    lanes: tuple[str, ...]
    label: str
    top: float
    height: float


def draw(timeline: ReplayedStep, path: str | os.PathLike[str]) -> None:
    """Write what `sim.mesh.replay.timeline.Timeline.plot` says."""
    figure = blank("cannot draw the step", path, _WIDTH, _HEIGHT, "to_chrome('step.json')")
    found = spans(timeline, "segment" if len(timeline.programs) > 1 else "layer")
    if len(found) > _MOST_BOXES:
        found = spans(timeline, "segment")
    found += _ends(timeline, found)
    memory = timeline.memory
    curves = [one for one in memory if len(one.curve) > 1]
    scale, unit = _scale(timeline.step)
    if curves:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.6, 1))
    else:
        upper, lower = figure.add_subplot(), None
    lanes = _lanes(timeline, found)
    colors = _axis_colors(found)
    _draw_spans(upper, timeline, found, lanes, colors, scale)
    _finish(upper, timeline, lanes, scale)
    if lower is not None:
        fullest = max(range(len(memory)), key=lambda at: memory[at].peak_allocated)
        _draw_memory(lower, timeline, fullest, memory[fullest], scale)
    (lower or upper).set_xlabel(f"time in the step ({unit})", color=_INK)
    _legend(upper, found, colors)
    upper.set_title(timeline.title or _title(timeline), loc="left", fontsize=13, color=_INK, pad=22)
    upper.text(0, 1.008, _summary(timeline), transform=upper.transAxes, fontsize=10, color=_INK, va="bottom")
    figure.savefig(os.fspath(path), dpi=_DPI)


def _scale(step: float) -> tuple[float, str]:
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if step * factor >= 2:
            return factor, unit
    return (1e3, "ms") if step * 1e6 >= 100 else (1e6, "µs")


def _title(timeline: ReplayedStep) -> str:
    scale, unit = _scale(timeline.step)
    count = len(timeline.programs)
    what = "pipeline ranks" if count > 1 else "rank"
    return f"A step of {timeline.step * scale:.4g} {unit}, {count} {what} of {timeline.programs[0].world_size:,}"


def _summary(timeline: ReplayedStep) -> str:
    """Where the time of the slowest rank goes."""
    rank = timeline.slowest
    parts = [("computes", rank.compute)]
    parts += [(f"exposed communication on {axis}", seconds) for axis, seconds in rank.exposed.items()]
    parts += [("bubble", rank.bubble), ("waits for the host", rank.host)]
    if not timeline.step:
        return "nothing in it takes time"
    shares = [f"{name} {seconds / timeline.step:.1%}" for name, seconds in parts if seconds >= 0.0005 * timeline.step]
    return f"rank {rank.rank}: " + ", ".join(shares)


def _ends(timeline: ReplayedStep, found: Sequence[DrawnSpan]) -> list[DrawnSpan]:
    """What is left of the step when ranks of a pipeline are done."""
    if len(timeline.programs) == 1:
        return []
    ends: dict[int, float] = {}
    for span in found:
        if span.kind != "bubble":
            ends[span.row] = max(ends.get(span.row, 0.0), span.end)
    return [
        DrawnSpan(row, "compute", end, timeline.step, "bubble", "bubble")
        for row, end in ends.items()
        if end < timeline.step
    ]


def _lanes(timeline: ReplayedStep, found: Sequence[DrawnSpan]) -> list[_Lane]:
    """Few ranks have a row for each axis; many have one for all communication, which is lower."""
    ranks = len(timeline.programs)
    lanes: list[_Lane] = []
    top = 0.0
    for row, program in enumerate(timeline.programs):
        own = list(dict.fromkeys(span.lane for span in found if span.row == row and span.kind != EXPOSED))
        streams = sorted(lane for lane in own if lane.startswith("compute"))
        axes = sorted(lane for lane in own if not lane.startswith("compute"))
        name = f"rank {program.rank}"
        if ranks > 4:
            for lane in (tuple(streams), tuple(axes)):
                height = 1.0 if lane == tuple(streams) else 0.8
                lanes.append(_Lane(row, lane, name if lane == tuple(streams) else "", top, height))
                top += height
        else:
            prefix = f"{name}\n" if ranks > 1 else ""
            for number, stream in enumerate(streams):
                label = "compute" if stream == "compute" else f"stream {stream.split()[1]}"
                lanes.append(_Lane(row, (stream,), (prefix if number == 0 else "") + label, top, 1.4))
                top += 1.4
            for axis in axes:
                lanes.append(_Lane(row, (axis,), axis, top, 0.8))
                top += 0.8
        top += 0.25
    return lanes


def _axis_colors(found: Sequence[DrawnSpan]) -> dict[str, str]:
    axes = sorted({span.lane for span in found if span.kind in (COMMUNICATION, EXPOSED)})
    return {axis: _AXES[number % len(_AXES)] for number, axis in enumerate(axes)}


def _draw_spans(
    axes: Axes,
    timeline: ReplayedStep,
    found: list[DrawnSpan],
    lanes: Sequence[_Lane],
    colors: dict[str, str],
    scale: float,
) -> None:
    where = {(lane.row, name): lane for lane in lanes for name in lane.lanes}
    computing = {lane.row: lane for lane in reversed(lanes) if any(name.startswith("compute") for name in lane.lanes)}
    last = max([span.end for span in found], default=1.0) * scale
    idle = [span for span in found if span.kind in ("bubble", "host")]
    for kind, shade in (("bubble", _BUBBLE), ("host", _HOST)):
        boxes = [(span, computing[span.row]) for span in idle if span.kind == kind and span.row in computing]
        _polygons(axes, boxes, scale, [shade] * len(boxes), {"linewidths": 0, "zorder": 1})
    waits = [(span, computing[span.row]) for span in found if span.kind == EXPOSED and span.row in computing]
    _polygons(axes, waits, scale, [_WAITING] * len(waits), {"linewidths": 0, "zorder": 1})
    busy = [span for span in found if span.kind in _PHASES or span.lane.startswith("compute")]
    busy = [span for span in busy if span.kind not in ("bubble", "host") and (span.row, span.lane) in where]
    boxes = [(span, where[span.row, span.lane]) for span in busy]
    shades = [_PHASES.get(span.kind, _OTHER_PHASE) for span in busy]
    edges = ["white" if (span.end - span.start) * scale > last / 200 else "none" for span in busy]
    _polygons(axes, boxes, scale, shades, {"edgecolors": edges, "linewidths": 0.5, "zorder": 3})
    _labels(axes, boxes, scale, last)
    exposed = exposed_parts(found)
    for lane in lanes:
        _draw_communication(axes, lane, found, exposed, colors, scale, timeline.step)


def _draw_communication(
    axes: Axes,
    lane: _Lane,
    found: Sequence[DrawnSpan],
    exposed: Sequence[DrawnSpan],
    colors: dict[str, str],
    scale: float,
    step: float,
) -> None:
    """Above, communication; below, in red, what of it is exposed.

    Where there is much of it, columns are as high as the part of their time that is taken: a hundred short messages do
    not look like a long one.
    """
    middle, half = lane.top + 0.5 * lane.height, 0.44 * lane.height
    moved = [s for s in found if s.row == lane.row and s.lane in lane.lanes and s.kind == COMMUNICATION]
    waited = [s for s in exposed if s.row == lane.row and s.lane in lane.lanes]
    red = {"facecolor": "white", "edgecolor": _EXPOSED, "hatch": "//////", "linewidth": 0.7}
    if len(moved) <= _MOST_MESSAGES and len({span.lane for span in moved}) == 1:
        _boxes(axes, moved, scale, step, (middle - half, middle), {"facecolor": colors[moved[0].lane]})
        _boxes(axes, waited, scale, step, (middle, middle + half), red)
        return
    edges = np.linspace(0.0, step or 1.0, _COLUMNS + 1)
    base, lost = np.full(_COLUMNS, middle), np.zeros(_COLUMNS)
    for axis in lane.lanes:
        if axis not in colors:
            continue
        taken = _shares([span for span in moved if span.lane == axis], edges)
        lost += _shares([span for span in waited if span.lane == axis], edges)
        top = np.maximum(base - half * taken, middle - half)
        _columns(axes, edges * scale, top, base, {"facecolor": colors[axis]})
        base = top
    bottom = middle + half * np.minimum(lost, 1.0)
    _columns(axes, edges * scale, np.full(_COLUMNS, middle), bottom, red)


def _boxes(
    axes: Axes, found: Sequence[DrawnSpan], scale: float, step: float, at: tuple[float, float], style: dict[str, Any]
) -> None:
    least = step * scale / 1_250  # a pixel
    sides = [(span.start * scale, max(span.end * scale, span.start * scale + least)) for span in found]
    _fill(axes, [[(x, at[0]), (y, at[0]), (y, at[1]), (x, at[1])] for x, y in sides], step * scale, style)


def _fill(axes: Axes, shapes: list[list[tuple[float, float]]], last: float, style: dict[str, Any]) -> None:
    """Fill rectangles; those without room for hatches wholly."""
    if "hatch" in style:
        roomy = [s for s in shapes if s[1][0] - s[0][0] > last / 150 and s[2][1] - s[1][1] > 0.25]
        rest = [s for s in shapes if s[1][0] - s[0][0] <= last / 150 or s[2][1] - s[1][1] <= 0.25]
        draw_shapes(axes, rest, facecolor=style["edgecolor"], linewidths=0, zorder=3)
        shapes = roomy
    draw_shapes(axes, shapes, **{"linewidths": 0, "zorder": 3, **style})


def _shares(found: Sequence[DrawnSpan], edges: np.ndarray) -> np.ndarray:
    """Return how much of each column some of the spans cover; a little at least where there is one at all."""
    starts: list[float] = []
    ends: list[float] = []
    for span in sorted(found, key=lambda span: span.start):
        if ends and span.start <= ends[-1]:
            ends[-1] = max(ends[-1], span.end)
        else:
            starts.append(span.start)
            ends.append(span.end)
    if not starts:
        return np.zeros(len(edges) - 1)
    lengths = np.array(ends) - np.array(starts)
    times = np.stack([starts, ends], axis=1).ravel()
    sums = np.stack([np.cumsum(lengths) - lengths, np.cumsum(lengths)], axis=1).ravel()
    share = np.diff(np.interp(edges, times, sums)) / np.diff(edges)
    return np.where(share > 1e-9, np.maximum(share, _LEAST_SHARE), 0.0)


def _columns(axes: Axes, edges: np.ndarray, top: np.ndarray, bottom: np.ndarray, style: dict[str, Any]) -> None:
    """Fill columns; neighbours of about the same height are one box."""
    shapes: list[list[tuple[float, float]]] = []
    for at in np.flatnonzero(bottom - top > 1e-9).tolist():
        left, right, high, low = float(edges[at]), float(edges[at + 1]), float(top[at]), float(bottom[at])
        last = shapes[-1] if shapes else None
        if last is not None and last[1][0] == left and abs(last[0][1] - high) + abs(last[2][1] - low) < 0.02:
            shapes[-1] = [last[0], (right, last[0][1]), (right, last[2][1]), last[3]]
        else:
            shapes.append([(left, high), (right, high), (right, low), (left, low)])
    _fill(axes, shapes, float(edges[-1]), style)


def _polygons(
    axes: Axes, boxes: Sequence[tuple[DrawnSpan, _Lane]], scale: float, shades: Sequence[str], style: dict[str, Any]
) -> None:
    if not boxes:
        return
    shapes = []
    least = max(span.end for span, _ in boxes) * scale / 1_250  # a pixel
    for span, lane in boxes:
        left, right = span.start * scale, max(span.end * scale, span.start * scale + least)
        top, bottom = lane.top + 0.06 * lane.height, lane.top + 0.94 * lane.height
        shapes.append([(left, top), (right, top), (right, bottom), (left, bottom)])
    draw_shapes(axes, shapes, facecolors=list(shades), **style)


def _labels(axes: Axes, boxes: Sequence[tuple[DrawnSpan, _Lane]], scale: float, last: float) -> None:
    """Write on boxes that are large enough."""
    heights = sum(lane.height for lane in {lane for _, lane in boxes}) or 1.0
    written = 0
    for span, lane in sorted(boxes, key=lambda box: box[0].start - box[0].end):
        room = (span.end - span.start) * scale / last * (_WIDTH - 3.0)
        tall = lane.height / heights * 5.5
        sizes = [size for size in (8, 6) if size <= 50 * tall and room > 0.0088 * size * len(span.name) + 0.015]
        if written >= _MOST_LABELS or not sizes:
            continue
        at = ((span.start + span.end) / 2 * scale, lane.top + lane.height / 2)
        text = axes.text(*at, span.name, ha="center", va="center", fontsize=sizes[0], color="white", zorder=6)
        text.set_in_layout(False)  # or it is measured for each try at the layout
        written += 1


def _finish(axes: Axes, timeline: ReplayedStep, lanes: Sequence[_Lane], scale: float) -> None:
    labelled = [lane for lane in lanes if lane.label]
    axes.set_yticks([lane.top + lane.height / 2 for lane in labelled], [lane.label for lane in labelled])
    bottom = max((lane.top + lane.height for lane in lanes), default=1.0)
    axes.set_ylim(bottom + 0.1, -0.15)
    axes.set_xlim(0, (timeline.step * scale or 1.0) * 1.005)
    axes.tick_params(length=0, labelsize=9, colors=_INK)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.6, zorder=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_memory(axes: Axes, timeline: ReplayedStep, row: int, memory: ClassMemory, scale: float) -> None:
    gib = 1 << 30
    points = sorted(memory.curve, key=lambda point: point.position)
    times = [timeline.when(row, point.position, point.event) * scale for point in points]
    for at in range(1, len(times)):
        times[at] = max(times[at], times[at - 1])
    times.append(timeline.step * scale)
    order = [name for name in _CATEGORIES if name in memory.categories]
    order += [name for name in memory.categories if name not in _CATEGORIES]
    series, labels, shades = [], [], []
    for name in order:
        number = memory.categories.index(name)
        heights = [point.totals[number] / gib for point in points]
        if max(heights) > 0:
            series.append([*heights, heights[-1]])
            labels.append(name)
            shades.append(_CATEGORIES.get(name, _OTHER_CATEGORY))
    if series:
        axes.stackplot(times, series, labels=labels, colors=shades, step="post", linewidth=0)
    axes.axhline(memory.peak_allocated / gib, color=_INK, linewidth=0.9, linestyle="--", label="peak allocated")
    axes.axhline(memory.peak_reserved / gib, color=_INK, linewidth=0.9, linestyle=":", label="peak reserved")
    axes.set_ylim(0, memory.peak_reserved / gib * 1.12)
    axes.set_ylabel(f"memory of rank {memory.rank} (GiB)", color=_INK)
    axes.tick_params(length=0, labelsize=9, colors=_INK)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.6, zorder=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)


def _legend(axes: Axes, found: Sequence[DrawnSpan], colors: dict[str, str]) -> None:
    kinds = {span.kind for span in found}
    handles = [sample(color=shade, label=phase) for phase, shade in _PHASES.items() if phase in kinds]
    if any(span.kind not in (*_PHASES, COMMUNICATION, EXPOSED, "bubble", "host") for span in found):
        handles.append(sample(color=_OTHER_PHASE, label="other computation"))
    handles += [sample(color=shade, label=f"communication, {axis}") for axis, shade in colors.items()]
    if EXPOSED in kinds:
        handles.append(sample(facecolor="white", edgecolor=_EXPOSED, hatch="/////", label="exposed communication"))
        handles.append(sample(color=_WAITING, label="computation waits for it"))
    if "bubble" in kinds:
        handles.append(sample(color=_BUBBLE, label="bubble: other stages"))
    if "host" in kinds:
        handles.append(sample(color=_HOST, label="waits for the host"))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
