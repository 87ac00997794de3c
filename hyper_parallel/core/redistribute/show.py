"""Redistributions as text: layouts in words, the steps of our plan and of torch's, and drawings of both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy.typing as npt
import torch
from rich.table import Table
from rich.text import Text

from hyper_parallel.core.common.errors import InvalidValue, readable_bytes
from hyper_parallel.core.common.tables import View, plain_table
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.redistribute.bounds import TorchPlan, TorchStep, lower_bound, torch_plan
from hyper_parallel.core.redistribute.holdings import Intervals, Located, Part
from hyper_parallel.core.redistribute.plan import Plan
from hyper_parallel.core.redistribute.steps import Step, program

__all__ = [
    "draw_mesh",
    "draw_parts",
    "draw_plan",
    "draw_receipt",
    "draw_svg",
    "draw_transfers",
    "plan_view",
    "shape_words",
    "torch_plan",
]

_LOCAL = ("slice", "copy")
_RIGHT = ("ranks", "received per rank", "sent per rank", "extra memory", "time")


def draw_plan(plan: Plan, *, device_type: str = "cuda", steps_only: bool = False) -> str:
    """Draw a plan as text, with torch's plan for the same transition below it.

    >>> from hyper_parallel.core.redistribute.plan import plan
    >>> mesh = Layout((2, 2), ("dp", "tp"))
    >>> print(draw_plan(plan(mesh("tp", "None"), mesh(("dp", "tp"), "None"), (8, 8), torch.float32)).splitlines()[-1])
    received per rank on average: ours 32 B, torch 128 B, least possible 32 B; torch / ours: 4.00

    Times are shown if the plan was made for a machine.

    Args:
        plan: the plan to draw.
        device_type: device type of torch's plan; on "cpu" torch gathers in place of an all_to_all.
        steps_only: show only our steps.
    """
    if steps_only:
        return str(View(_steps(plan, timed=plan.machine is not None)))
    return str(plan_view(plan, device_type))


def plan_view(plan: Plan, device_type: str = "cuda") -> View:
    """Return the text of `draw_plan` as lines and tables.

    Args:
        plan: the plan to show.
        device_type: device type of torch's plan.
    """
    timed = plan.machine is not None
    on = f", {_node(plan)}" if timed else ""
    theirs = torch_plan(plan.src, plan.dst, plan.global_shape, plan.dtype, plan.machine, device_type=device_type)
    refused = None if theirs.refused is None else Text(f"refuses: {theirs.refused}")
    least = lower_bound(plan.src, plan.dst, plan.global_shape, plan.dtype)
    return View(
        Text("\n".join(_layouts(plan))),
        Text(f"\nhyper_parallel{on}", style="bold"),
        _steps(plan, timed=timed),
        Text(f"\ntorch {torch.__version__}", style="bold"),
        refused or _steps(theirs, timed=timed),
        Text(f"\n{_comparison(plan, theirs, least)}"),
    )


# -- tables ------------------------------------------------------------------------------------------------------------


def _steps(plan: Plan | TorchPlan, *, timed: bool) -> Text | Table:
    """Return a table of the steps."""
    steps: Sequence[Step | TorchStep] = plan.steps
    if not steps:
        return Text("nothing to do")
    table = plain_table("step", "kind", "axes", *_RIGHT[: len(_RIGHT) - (not timed)], left=3)
    for number, step in enumerate(steps, start=1):
        ranks = "-" if step.kind in _LOCAL else str(step.group_size)
        table.add_row(str(number), _kind(step), "+".join(step.axes) or "-", ranks, *_amounts(step, timed=timed))
    count = plan.num_collectives
    table.add_row("total", f"{count} collective{'' if count == 1 else 's'}", "", "", *_amounts(plan, timed=timed))
    return table


def _kind(step: Step | TorchStep) -> str:
    rounds = getattr(step, "rounds", 1)
    return f"{step.kind} x{rounds}" if rounds > 1 else step.kind


def _amounts(moves: Plan | TorchPlan | Step | TorchStep, *, timed: bool) -> Iterator[str]:
    yield _spread(moves.recv_bytes)
    yield _spread(moves.send_bytes)
    yield readable_bytes(moves.peak_extra_bytes)
    if timed:
        yield f"{moves.seconds * 1e6:,.1f} us"


def _spread(counts: npt.NDArray[Any]) -> str:
    """Format the most bytes that a rank moves and, if another rank moves fewer, the least."""
    most, least = counts.max(), counts.min()
    return readable_bytes(most) if most == least else f"{readable_bytes(most)} (min {readable_bytes(least)})"


# -- words -------------------------------------------------------------------------------------------------------------


def _layouts(plan: Plan) -> Iterator[str]:
    shape, size = plan.global_shape, math.prod(plan.global_shape) * plan.dtype.itemsize
    yield f"{str(plan.dtype).removeprefix('torch.')} tensor of {shape_words(shape)}, {readable_bytes(size)}"
    for word, layout in (("from", plan.src), ("to", plan.dst)):
        yield f"{word:<4}  {layout}"
        yield f"      {'; '.join(_words(layout, len(shape)))}"
        ranks = layout.rank_list[:: len(layout.rank_list) - 1] if len(layout.rank_list) > 1 else layout.rank_list
        held = [(rank, layout.local_shape(shape, rank)) for rank in ranks]
        yield "      " + ", ".join(
            f"rank {rank} holds {shape_words(local)} ({readable_bytes(math.prod(local) * plan.dtype.itemsize)})"
            for rank, local in held
        )


def _words(layout: Layout, ndim: int) -> Iterator[str]:
    """Describe the splits and reductions of a layout, and the number of ranks with equal parts."""
    names = layout.alias_name
    for dim, axes in enumerate(layout.splits(ndim)):
        if axes:
            yield f"dim {dim} is split over {', then '.join(names[axis] for axis in axes)}"
    for name, kind in layout.partial.items():
        yield f"{'an' if kind == 'avg' else 'a'} {kind} over {name} is still to be taken"
    copies = layout.repeat_num()
    if copies == len(layout.rank_list):
        yield "every rank holds all of it"
    else:
        yield f"{copies} ranks hold each part" if copies > 1 else "no two ranks hold the same"


def shape_words(shape: Sequence[int]) -> str:
    """Format sizes for display.

    >>> shape_words((4, 2)), shape_words(())
    ('4 x 2', 'no dims')
    """
    return " x ".join(map(str, shape)) or "no dims"


def _node(plan: Plan) -> str:
    assert plan.machine is not None, "times are shown"
    one = max(plan.ranks) < plan.machine.devices_per_node
    return (
        f"times modelled for {plan.machine}, {'one node' if one else f'{plan.machine.devices_per_node} ranks per node'}"
    )


def _comparison(plan: Plan, theirs: TorchPlan, least: npt.NDArray[Any]) -> str:
    """Return the last line: bytes received by our plan, by torch's and at least, and the ratio of torch's to ours."""
    counts = [plan.recv_bytes, least] if theirs.refused is not None else [plan.recv_bytes, theirs.recv_bytes, least]
    alike = all(count.min() == count.max() for count in counts)
    ours, theirs_mean, bound = float(plan.recv_bytes.mean()), float(theirs.recv_bytes.mean()), float(least.mean())
    if theirs.refused is not None:
        said, ratio = "torch refuses", "-"
    else:
        said = f"torch {readable_bytes(theirs_mean)}"
        ratio = f"{theirs_mean / ours:.2f}" if ours else "-" if not theirs_mean else "infinite"
    head = "received per rank" if alike else "received per rank on average"
    return f"{head}: ours {readable_bytes(ours)}, {said}, least possible {readable_bytes(bound)}; torch / ours: {ratio}"


# -- drawings of tensors with one or two dims --------------------------------------------------------------------------
# Rows and columns end where some rank's part starts or ends.


def draw_mesh(layout: Layout) -> str:
    """Draw the ranks of a mesh with one or two axes.

    >>> print(draw_mesh(Layout((2, 4), ("dp", "tp"))))
            tp=0   tp=1   tp=2   tp=3
          +------+------+------+------+
    dp=0  |  0   |  1   |  2   |  3   |
          +------+------+------+------+
    dp=1  |  4   |  5   |  6   |  7   |
          +------+------+------+------+
    """
    names, sizes = layout.alias_name, layout.mesh_shape
    _check_two("axes", layout.alias_name)
    columns = [f"{names[-1]}={at}" for at in range(sizes[-1])]
    rows = [f"{names[0]}={at}" for at in range(sizes[0])] if len(sizes) == 2 else [""]
    ranks = [str(rank) for rank in layout.rank_list]
    return _grid(rows, columns, [ranks[at : at + sizes[-1]] for at in range(0, len(ranks), sizes[-1])])


def draw_parts(at: Located) -> str:
    """Draw a tensor, with the ranks that hold each block of it.

    >>> from hyper_parallel.core.redistribute.plan import plan
    >>> mesh = Layout((2, 2), ("dp", "tp"))
    >>> print(draw_parts(plan(mesh("tp", "None"), mesh("dp", "tp"), (8, 6), torch.float32).before))
           0:6
         +-----+
    0:4  | 0 2 |
         +-----+
    4:8  | 1 3 |
         +-----+

    Args:
        at: the parts of all ranks, e.g. `plan.before`, `plan.after`, or `step.after` between two steps.
    """
    parts = {rank: at.part_of(rank) for rank in at.ranks}
    return _blocks(at.holding.shape, [(str(rank), part) for rank, part in parts.items() if part is not None], " ")


def draw_transfers(step: Step) -> str:
    """Draw the elements sent between each pair of ranks, a row per sender and a column per receiver.

    >>> from hyper_parallel.core.redistribute.plan import plan
    >>> mesh = Layout((2,), ("tp",))
    >>> print(draw_transfers(plan(mesh("tp", "None"), mesh("None", "tp"), (8, 6), torch.float32).steps[0]))
            to 0  to 1
    from 0     .    12
    from 1    12     .
    """
    ranks = sorted(step.ranks)
    sent = {(sender, rank): 0 for sender in ranks for rank in ranks}
    for rank in ranks:
        work = program(step, rank)
        for piece in work.receives:
            sent[work.group[piece.peer], rank] += piece.volume
    rows = [["", *(f"to {rank}" for rank in ranks)]]
    rows += [[f"from {sender}", *(str(sent[sender, rank] or ".") for rank in ranks)] for sender in ranks]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def draw_receipt(step: Step, rank: int) -> str:
    """Draw the part that a rank needs in a step, with the sending ranks of each block.

    >>> from hyper_parallel.core.redistribute.plan import plan
    >>> mesh = Layout((2,), ("tp",))
    >>> print(draw_receipt(plan(mesh("tp", "None"), mesh("None", "tp"), (8, 6), torch.float32).steps[0], rank=1))
           3:6
         +-----+
    0:4  |  0  |
         +-----+
    4:8  |  1  |
         +-----+

    Args:
        step: a step that communicates, in one round.
        rank: the receiver; it is also the sender of elements that it already holds.
    """
    work = program(step, rank)
    need = step.after.part_of(rank)
    assert need is not None, "a receiver is on the mesh"
    pieces = sorted((*work.own, *work.receives), key=lambda piece: piece.peer)
    found = [(str(work.group[piece.peer]), piece.part) for piece in pieces]
    return _blocks(step.after.holding.shape, found, " + " if step.reduces else " ", need)


def draw_svg(panels: Sequence[tuple[str, Located]]) -> str:
    """Draw one tensor several times side by side as SVG: each block shows its ranks, in the colour of the first.

    Args:
        panels: title and parts of each drawing, from left to right.
    """
    size, margin = 240, 24
    ranks = sorted({rank for _, at in panels for rank in at.ranks})
    width, height = len(panels) * (size + margin) + margin, size + 2 * margin + 8
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="monospace">']
    for place, (title, at) in enumerate(panels):
        left, top = margin + place * (size + margin), margin + 8
        lines.append(f'<text x="{left}" y="{margin - 4}" font-size="14" fill="#888">{title}</text>')
        parts = [(rank, part) for rank in at.ranks if (part := at.part_of(rank)) is not None]
        (rows, columns), cells = _cells(at.holding.shape, [(str(rank), part) for rank, part in parts])
        scale = [size / max(stop for _, stop in intervals) for intervals in (rows, columns)]
        for row, names in zip(rows, cells, strict=True):
            for column, held in zip(columns, names, strict=True):
                x, y = left + column[0] * scale[1], top + row[0] * scale[0]
                across, down = (column[1] - column[0]) * scale[1], (row[1] - row[0]) * scale[0]
                hue = 360 * ranks.index(int(held[0])) // len(ranks) if held else 0
                lines.append(
                    f'<rect x="{x:g}" y="{y:g}" width="{across:g}" height="{down:g}" stroke="#333" '
                    f'fill="hsl({hue}, 70%, {80 if held else 100}%)"/>'
                    f'<text x="{x + across / 2:g}" y="{y + down / 2 + 5:g}" font-size="14" text-anchor="middle">'
                    f"{' '.join(held)}</text>"
                )
    return "\n".join([*lines, "</svg>", ""])


def _blocks(shape: tuple[int, ...], parts: Sequence[tuple[str, Part]], between: str, within: Part | None = None) -> str:
    """Draw the grid of a tensor, or of a part of it, with the names of the parts that contain each block."""
    edges, cells = _cells(shape, parts, within)
    labels = [[f"{start}:{stop}" for start, stop in intervals] for intervals in edges]
    rows = [[between.join(names) for names in row] for row in cells]
    return _grid(labels[0] if len(shape) == 2 else [""], labels[1], rows)


def _cells(
    shape: tuple[int, ...], parts: Sequence[tuple[str, Part]], within: Part | None = None
) -> tuple[list[list[tuple[int, int]]], list[list[list[str]]]]:
    """Return the intervals of rows and columns, and for each block the names of the parts that contain it.

    A tensor of one dim is one row.
    """
    _check_two("dims", shape)
    row: list[Intervals] = [((0, 1),)] if len(shape) == 1 else []
    full = [*row, *(within or tuple(((0, size),) for size in shape))]
    both = [(name, [*row, *part]) for name, part in parts if all(part)]
    edges = [_edges(full[dim], [part[dim] for _, part in both]) for dim in range(2)]
    cells = [
        [[name for name, part in both if _has(part[0], down) and _has(part[1], across)] for across in edges[1]]
        for down in edges[0]
    ]
    return edges, cells


def _edges(whole: Intervals, cuts: Sequence[Intervals]) -> list[tuple[int, int]]:
    """Return the intervals between all starts and stops of the parts in a dim."""
    points = {point for intervals in (whole, *cuts) for interval in intervals for point in interval}
    return [pair for pair in pairwise(sorted(points)) if _has(whole, pair)]


def _has(intervals: Intervals, wanted: tuple[int, int]) -> bool:
    return any(start <= wanted[0] and wanted[1] <= stop for start, stop in intervals)


def _grid(rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Draw cells of one width between lines, with the names of rows and columns."""
    margin = max(map(len, rows)) + (2 if any(rows) else 0)
    width = max(len(text) for text in (*columns, *(cell for row in cells for cell in row))) + 2
    line = " " * margin + "+".join(["", *["-" * width] * len(columns), ""])
    lines = [" " * (margin + 1) + " ".join(name.center(width) for name in columns), line]
    for name, row in zip(rows, cells, strict=True):
        lines += [name.ljust(margin) + "|".join(["", *(cell.center(width) for cell in row), ""]), line]
    return "\n".join(text.rstrip() for text in lines)


def _check_two(what: str, given: Sequence[object]) -> None:
    if not 1 <= len(given) <= 2:
        blame = f"it has {len(given)} {what}, and a page has two"
        raise InvalidValue("cannot draw a redistribution", blame, f"{what}: {tuple(given)}", f"1 or 2 {what}")
