"""Pictures of timelines, drawn with matplotlib (the extra `plot`): their canvas, and that of a trace."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from hyper_parallel.core.common.checks import check_choice
from hyper_parallel.core.common.drawing import Axes, Figure, blank_figure, draw_shapes, sample, whole_steps
from sim.comm.trace import EventLog as Trace
from sim.explain.errors import SimError
from sim.timeline.bars import Bar, TraceBars, lay_out, stack

_PALETTE = (
    "#4477aa",
    "#ee8866",
    "#228833",
    "#aa3377",
    "#66ccee",
    "#ccbb44",
    "#777777",
    "#882255",
    "#44aa99",
    "#ddaa33",
)
_NEVER = "#cc0000"
_INK = "#333333"
_FILLED = 0.84  # of a rank's row


class _Box(NamedTuple):
    """A bar with its place among the rows: the row of rank r goes from r - 0.5 to r + 0.5, downwards."""

    bar: Bar
    top: float
    height: float


def draw(trace: Trace, path: str | os.PathLike[str], color: str = "op") -> None:
    """Write what `sim.Trace.plot` says."""
    check_choice("cannot plot a trace", "color", color, ("op", "axis"))
    timeline = lay_out(trace)
    width, height = _size(timeline, trace.world_size)
    figure = blank("cannot draw the trace", path, width, height, "trace.to_chrome('trace.json')")
    axes = figure.add_subplot()
    scale, unit = _scale(timeline)
    if older := trace.forgotten():
        unit += f"; without {older:,} older events"
    boxes = _boxes(timeline, scale)
    colors = _colors(timeline, color)
    _draw_boxes(axes, boxes, {bar.event.order: colors[getattr(bar.event, color)] for bar in timeline.bars})
    _draw_messages(axes, boxes)
    _draw_labels(axes, boxes, width, color)
    _finish(axes, trace.world_size, unit, boxes)
    _draw_legend(figure, colors, timeline, color)
    figure.savefig(os.fspath(path), dpi=130)


def _size(timeline: TraceBars, ranks: int) -> tuple[float, float]:
    """Inches: rows get lower as they get more, and steps need room for each."""
    row = 0.5 if ranks <= 8 else 0.3 if ranks <= 24 else 0.17
    steps = max((bar.right for bar in timeline.bars), default=0.0) if not timeline.timed else 40
    return min(max(7.0, 0.3 * steps), 18.0), max(2.4, 1.5 + row * ranks)


def _scale(timeline: TraceBars) -> tuple[float, str]:
    if not timeline.timed:
        return 1.0, "step (no virtual time has passed)"
    last = max(bar.right for bar in timeline.bars)
    units = ((1.0, "s"), (1e3, "ms"), (1e6, "µs"))
    factor, unit = next((found for found in units if last * found[0] >= 1), units[-1])
    return factor, f"virtual time ({unit})"


def _boxes(timeline: TraceBars, scale: float) -> list[_Box]:
    """Bars of one rank that overlap share its row, one above the other."""
    by_rank: dict[int, list[Bar]] = {}
    for bar in timeline.bars:
        scaled = bar._replace(waits=bar.waits * scale, left=bar.left * scale, right=bar.right * scale)
        by_rank.setdefault(bar.event.rank, []).append(scaled)
    lanes = {rank: stack([(bar.left, bar.right) for bar in bars]) for rank, bars in by_rank.items()}
    most = max((max(found) + 1 for found in lanes.values()), default=1)
    height = _FILLED / most
    return [
        _Box(bar, rank - _FILLED / 2 + lane * height, height)
        for rank, bars in by_rank.items()
        for bar, lane in zip(bars, lanes[rank], strict=True)
    ]


def _colors(timeline: TraceBars, by: str) -> dict[str, str]:
    values = sorted({getattr(bar.event, by) for bar in timeline.bars})
    return {value: _PALETTE[place % len(_PALETTE)] for place, value in enumerate(values)}


def _rectangle(left: float, right: float, top: float, height: float) -> list[tuple[float, float]]:
    return [(left, top), (right, top), (right, top + height), (left, top + height)]


def _draw_boxes(axes: Axes, boxes: Sequence[_Box], colors: dict[int, str]) -> None:
    """Few collections instead of many patches: 64 ranks make tens of thousands of boxes."""
    waits = [box for box in boxes if box.bar.waits < box.bar.left]
    middle = [_rectangle(b.bar.waits, b.bar.left, b.top + 0.35 * b.height, 0.3 * b.height) for b in waits]
    shades = [colors[box.bar.event.order] for box in waits]
    draw_shapes(axes, middle, facecolors=shades, alpha=0.35, linewidths=0, zorder=2)
    last = max((box.bar.right for box in boxes), default=1.0)
    for complete in (True, False):
        chosen = [box for box in boxes if box.bar.complete == complete]
        shapes = [_rectangle(b.bar.left, max(b.bar.right, b.bar.left + last / 500), b.top, b.height) for b in chosen]
        edges = ["white" if box.bar.right - box.bar.left > last / 100 else "none" for box in chosen]
        style: dict[str, Any] = {"edgecolors": edges, "linewidths": 0.6, "zorder": 3}
        if not complete:
            style = {"edgecolors": _NEVER, "linewidths": 1.0, "hatch": "////", "zorder": 4}
        faces = [colors[box.bar.event.order] if complete else "white" for box in chosen]
        draw_shapes(axes, shapes, facecolors=faces, **style)


def _draw_messages(axes: Axes, boxes: Sequence[_Box]) -> None:
    """A line from each send to its recv."""
    strength = 0.8 if len(boxes) <= 300 else 0.4
    sends = {box.bar.number: box for box in boxes if box.bar.event.op == "send"}
    for box in boxes:
        sent = sends.get(box.bar.number)
        if box.bar.event.op == "recv" and sent is not None:
            # Stages often send side by side: where in the boxes the line runs tells them apart.
            at = box.bar.left + (box.bar.right - box.bar.left) * (sent.bar.event.rank % 8 + 0.5) / 8
            ends = (sent.top + sent.height / 2, box.top + box.height / 2)
            axes.annotate(
                "",
                (at, ends[1]),
                (at, ends[0]),
                arrowprops={
                    "arrowstyle": "-|>",
                    "color": _INK,
                    "lw": 0.6,
                    "alpha": strength,
                    "mutation_scale": 7,
                    "shrinkA": 0,
                    "shrinkB": 0,
                },
                zorder=5,
            )


def _draw_labels(axes: Axes, boxes: Sequence[_Box], width: float, color: str) -> None:
    """What the colour does not say, in boxes that are large enough for it."""
    last = max((box.bar.right for box in boxes), default=1.0)
    for box in boxes:
        text = box.bar.event.axis if color == "op" else box.bar.event.op
        room = (box.bar.right - box.bar.left) / last * (width - 1.0)
        if box.height >= 0.4 and room > 0.075 * len(text) and len(boxes) <= 600:
            middle = ((box.bar.left + box.bar.right) / 2, box.top + box.height / 2)
            ink = "white" if box.bar.complete else _NEVER
            axes.text(*middle, text, ha="center", va="center", fontsize=7, color=ink, zorder=6, clip_on=True).set_bbox(
                None if box.bar.complete else {"facecolor": "white", "linewidth": 0, "pad": 1.0}
            )


def _finish(axes: Axes, ranks: int, unit: str, boxes: Sequence[_Box]) -> None:
    every = 1 if ranks <= 32 else 4 if ranks <= 128 else max(1, ranks // 32)
    axes.set_yticks(range(0, ranks, every), [f"rank {rank}" for rank in range(0, ranks, every)])
    axes.set_ylim(ranks - 0.4, -0.6)
    last = max((box.bar.right for box in boxes), default=1.0)
    axes.set_xlim(0, (last or 1.0) * 1.01)
    axes.set_xlabel(unit, color=_INK)
    if unit.startswith("step"):
        whole_steps(axes)
    axes.tick_params(length=0, labelsize=8, colors=_INK)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.6, zorder=0)
    for edge in range(0, ranks + 1, max(1, every)):
        axes.axhline(edge - 0.5, color="#eeeeee", linewidth=0.5, zorder=1)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_legend(figure: Any, colors: dict[str, str], timeline: TraceBars, by: str) -> None:
    handles = [sample(color=color, label=value) for value, color in colors.items()]
    if any(bar.waits < bar.left for bar in timeline.bars):
        handles.append(sample(color="#bbbbbb", label="thin: waits for other ranks"))
    if not all(bar.complete for bar in timeline.bars):
        handles.append(sample(facecolor="white", edgecolor=_NEVER, hatch="////", label="not all ranks came"))
    if handles:
        columns = min(len(handles), 8)
        figure.legend(handles=handles, loc="outside upper left", ncols=columns, frameon=False, fontsize=8)


def blank(asked: str, path: str | os.PathLike[str], width: float, height: float, instead: str) -> Figure:
    """Return an empty figure for a file.

    Args:
        asked: the start of an error message, "cannot draw the step".
        path: of the picture; its ending is its format, such as .png.
        width: inches.
        height: inches.
        instead: what can be done without matplotlib.

    Raises:
        SimError: matplotlib is not installed.
        ValueError: an ending that is no format of a picture.
    """
    figure = blank_figure(path, width, height)
    if figure is None:
        seen = "missing: the extra 'plot' of hyper_parallel"
        hint = f"pip install 'hyper_parallel[plot]', or {instead} for https://ui.perfetto.dev"
        raise SimError(asked, "matplotlib is not installed", seen, hint)
    return figure
