"""The pictures of docs/design/pictures.md, drawn from what the library computes and what simulated ranks do.

`python docs/pictures.py` writes docs/pictures/*.svg anew. A test compares the files with what this draws. One picture
is of a measured run: docs/pictures/walk.jsonl is the log that the README's walk through search, verify and train wrote.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import hyper_parallel as hp
import sim
from hyper_parallel.core.common.errors import readable_bytes
from hyper_parallel.core.redistribute import lower_bound, plan
from hyper_parallel.trainer.report import read_log, readable_seconds

FOLDER = Path(__file__).parent / "pictures"
INK, FAINT, RED = "#333333", "#bbbbbb", "#c23b22"
FILLS = ("#9ecae1", "#a1d99b", "#fdd0a2", "#dadaeb", "#c7e9c0", "#fdae6b", "#bcbddc", "#c6dbef")
MIB = 2**20


# -- shapes ------------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Return a coordinate, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, said: str, *, size: int = 12, anchor: str = "middle", color: str = INK) -> str:
    """Return a line of text whose baseline is at y."""
    place = f'x="{number(x)}" y="{number(y)}"'
    return f'<text {place} font-size="{size}" text-anchor="{anchor}" fill="{color}">{escape(said)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, *, edge: str = "white", bold: bool = False) -> str:
    """Return a rectangle."""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    return f'<rect {place} fill="{fill}" stroke="{edge}" stroke-width="{2.5 if bold else 1}"/>'


def line(x1: float, y1: float, x2: float, y2: float, *, color: str = INK, dashed: bool = False) -> str:
    """Return a straight line."""
    place = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
    return f'<line {place} stroke="{color}"{" stroke-dasharray=" + repr("4 3") if dashed else ""}/>'


def picture(width: int, height: int, parts: Sequence[str]) -> str:
    """Return a whole SVG file."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    lines = [f'{head} font-family="sans-serif">', box(0, 0, width, height, "white"), *parts, "</svg>"]
    return "\n".join(lines) + "\n"


# -- a layout ----------------------------------------------------------------------------------------------------------

SHAPE = (8, 8)
MESH = hp.Layout((2, 4), ("dp", "tp"))


class Tile(NamedTuple):
    """A part of a matrix and the ranks that hold it; rows and columns from `top` and `left`."""

    top: int
    left: int
    rows: int
    columns: int
    ranks: tuple[int, ...]


def tiles(layout: hp.Layout) -> list[Tile]:
    """Return the parts into which a layout cuts the matrix, as `Layout.slices` says."""
    held: dict[tuple[int, int, int, int], list[int]] = {}
    for rank, ((top, bottom), (left, right)) in enumerate(layout.slices(SHAPE).tolist()):
        held.setdefault((top, left, bottom - top, right - left), []).append(rank)
    return [Tile(*place, ranks=tuple(ranks)) for place, ranks in held.items()]


def matrix(layout: hp.Layout, x: float, y: float, side: float) -> Iterator[str]:
    """Yield the matrix with the ranks of each of its parts."""
    cell = side / SHAPE[0]
    for index, tile in enumerate(tiles(layout)):
        left, top = x + tile.left * cell, y + tile.top * cell
        width, height = tile.columns * cell, tile.rows * cell
        yield box(left, top, width, height, FILLS[index])
        said = ",".join(map(str, tile.ranks)) if len(tile.ranks) < 8 else "0 to 7"
        yield text(left + width / 2, top + height / 2 + 4, said)


def draw_layout() -> str:
    """Draw one matrix in five layouts."""
    layouts = [
        ('("dp", "None")', MESH("dp", "None")),
        ('("dp", "tp")', MESH("dp", "tp")),
        ('(("dp", "tp"), "None")', MESH(("dp", "tp"), "None")),
        ('(("tp", "dp"), "None")', MESH(("tp", "dp"), "None")),
        ('("None", "None")', MESH("None", "None")),
    ]
    parts = [text(20, 26, "A matrix on the mesh dp=2, tp=4; each part names the ranks that hold it", anchor="start")]
    for column, (said, layout) in enumerate(layouts):
        x = 20 + column * 172
        parts += matrix(layout, x, 44, 144)
        parts.append(text(x + 72, 208, said))
        rows, columns = layout.local_shape(SHAPE, rank=0)
        parts.append(text(x + 72, 226, f"{rows} x {columns} on rank 0, {layout.repeat_num()} of each", color="#777777"))
    return picture(880, 244, parts)


# -- a plan ------------------------------------------------------------------------------------------------------------

WATCHED = 5


def draw_plan() -> str:
    """Draw a redistribution: both layouts, the part of one rank in each, and the steps between them."""
    source, target = MESH("None", "tp"), MESH(("dp", "tp"), "None")
    asked = (source, target, (4096, 4096), torch.float32)
    steps = plan(*asked)
    parts = [text(20, 26, "From columns over tp to rows over dp, then tp", anchor="start")]
    for x, layout in ((20, source), (520, target)):
        parts += matrix(layout, x, 44, 160)
        tile = next(tile for tile in tiles(layout) if WATCHED in tile.ranks)
        parts.append(
            box(x + tile.left * 20, 44 + tile.top * 20, tile.columns * 20, tile.rows * 20, "none", edge=RED, bold=True)
        )
        parts.append(text(x + 80, 224, str(layout).partition(" on ")[0], size=13))
    parts.append(line(196, 124, 504, 124, color=FAINT))
    parts.append(f'<path d="M504 124l-9 -5v10z" fill="{FAINT}"/>')
    for row, step in enumerate(steps.steps):
        parts.append(text(350, 112 - 20 * row, f"{step.kind} over {' and '.join(step.axes)}", size=14))
    received, least = steps.recv_bytes[WATCHED] / MIB, lower_bound(*asked)[WATCHED] / MIB
    parts.append(text(350, 148, f"rank {WATCHED} receives {received:.0f} MiB", color=RED))
    parts.append(text(350, 166, f"it needs and does not hold {least:.0f} MiB", color=RED))
    parts.append(text(350, 184, "of a 64 MiB matrix", color="#777777"))
    return picture(700, 244, parts)


# -- the life of a unit ------------------------------------------------------------------------------------------------

SECONDS = {"forward": 2.0, "backward": 4.0, "all_gather": 1.5, "reduce_scatter": 1.5}
COLORS = {"all_gather": "#6baed6", "forward": "#74c476", "backward": "#fd8d3c", "reduce_scatter": "#9e9ac8"}


class Done(NamedTuple):
    """What a unit did on rank 0, and when, in virtual seconds."""

    unit: str
    kind: str
    start: float
    end: float


def timed(unit: str, kind: str, alone: dist.ProcessGroup, log: list[tuple[str, str]]) -> None:
    """Compute for a while. A barrier among this rank alone, before and after, writes the times into the trace."""
    dist.barrier(group=alone)
    sim.advance(SECONDS[kind])
    dist.barrier(group=alone)
    log.append((unit, kind))


class Timed(torch.autograd.Function):
    """Hands a block's output on; takes virtual time in forward and in backward."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, compute: Callable[[str], None]
    ) -> torch.Tensor:
        """Take the time of a forward."""
        ctx.compute = compute  # type: ignore[attr-defined]
        compute("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Take the time of a backward."""
        ctx.compute("backward")  # type: ignore[attr-defined]
        return grad, None


class Block(nn.Module):
    """A layer whose inner width tells its messages from those of the others."""

    def __init__(self, inner: int, compute: Callable[[str], None]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, inner, bias=False), nn.Linear(inner, 8, bias=False)
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute, and take time."""
        return Timed.apply(self.down(torch.relu(self.up(x))), self.compute)


UNITS = {"block 0": 16, "block 1": 64, "block 2": 256}


def step() -> list[tuple[str, str]]:
    """Train two steps, since a unit learns the order of gathers in the first; return what the second computed."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    log: list[tuple[str, str]] = []
    blocks = [
        Block(inner, lambda kind, unit=unit: timed(unit, kind, alone, log))  # type: ignore[misc]
        for unit, inner in UNITS.items()
    ]
    model = nn.Sequential(*blocks)
    for block in blocks:
        hp.fully_shard(block)
    hp.fully_shard(model)
    for _ in range(2):
        log.clear()
        dist.barrier(group=alone)
        model(torch.ones(1, 8)).sum().backward()
    return log


def life() -> list[Done]:
    """Return what the units of rank 0 did in a step."""
    with sim.world(4, cost=lambda op, load: SECONDS.get(op, 0.0)) as world:
        log = world.run(step)[0]
    events = world.trace.of_rank(0)
    begins, *marks = [event.issued for event in events if event.group == (0,)][-1 - 2 * len(log) :]
    times = zip(log, marks[::2], marks[1::2], strict=True)
    found = [Done(unit, kind, start, end) for (unit, kind), start, end in times]
    received = {unit: 2 * 8 * inner * 4 * 3 / 4 for unit, inner in UNITS.items()}  # bytes: three of the four shards
    for event in events:
        if event.op in ("all_gather", "reduce_scatter") and event.issued >= begins:
            unit = min(received, key=lambda name, seen=event.recv_bytes: abs(received[name] - seen))  # type: ignore[misc]
            assert event.start is not None
            assert event.end is not None
            found.append(Done(unit, event.op, event.start, event.end))
    return [one._replace(start=one.start - begins, end=one.end - begins) for one in found]


def draw_unit() -> str:
    """Draw a step of three units: a lane each for communication and computing, and when they are unsharded."""
    done = life()
    left, scale = 80, 720 / max(one.end for one in done)
    parts = [text(20, 26, "A training step on rank 0 of 4, reshard_after_forward=True", anchor="start")]
    for row, unit in enumerate(UNITS):
        top = 48 + row * 66
        parts.append(text(20, top + 29, unit, anchor="start"))
        mine = sorted((one for one in done if one.unit == unit), key=lambda one: one.start)
        for start, end in unsharded(mine):
            parts.append(box(left + start * scale, top, (end - start) * scale, 50, "#eeeeee", edge=FAINT))
        for one in mine:
            computes = one.kind in ("forward", "backward")
            place = (left + one.start * scale, top + (27 if computes else 5), (one.end - one.start) * scale, 18)
            parts.append(box(*place, COLORS[one.kind]))
    parts.append(line(left, 244, left + 720, 244, color=FAINT))
    parts.append(text(left + 720, 260, "virtual time", anchor="end", color="#777777"))
    for column, (kind, fill) in enumerate([*COLORS.items(), ("parameters are unsharded", "#eeeeee")]):
        x = left + column * 130
        parts += [box(x, 272, 14, 14, fill, edge=FAINT), text(x + 20, 284, kind, anchor="start")]
    return picture(820, 300, parts)


def unsharded(mine: Sequence[Done]) -> Iterator[tuple[float, float]]:
    """Yield from when a gather begins to fill the parameters until what needs them is over."""
    gathered: float | None = None
    for index, one in enumerate(mine):
        if one.kind == "all_gather":
            gathered = one.start
        following = next((later.kind for later in mine[index + 1 :] if later.kind != "reduce_scatter"), None)
        if one.kind in ("forward", "backward") and gathered is not None and following in ("all_gather", None):
            yield gathered, one.end
            gathered = None


# -- a world -----------------------------------------------------------------------------------------------------------

RANKS, STEPS = 4, 4


def turns() -> list[int]:
    """Return the ranks in the order in which they ran: each turn ends where the rank waits in an all_reduce."""
    order: list[int] = []

    def train() -> None:
        for _ in range(STEPS):
            order.append(dist.get_rank())
            dist.all_reduce(torch.ones(1))

    sim.run(train, world_size=RANKS, seed=1)
    return order


def draw_world() -> str:
    """Draw who runs, who waits, and where an operation has all its ranks."""
    order = turns()
    left, width = 80, 42
    parts = [text(20, 26, f"{RANKS} ranks, {STEPS} all_reduces, seed 1: one rank runs at a time", anchor="start")]
    for rank in range(RANKS):
        top = 48 + rank * 40
        parts.append(text(20, top + 20, f"rank {rank}", anchor="start"))
        mine = [turn for turn, who in enumerate(order) if who == rank]
        for number_of, (turn, following) in enumerate(zip(mine, [*mine[1:], len(order)], strict=True)):
            x = left + turn * width
            if following > turn + 1:
                parts.append(box(x + width, top + 11, (following - turn - 1) * width, 8, "#dddddd"))
            parts.append(box(x, top, width, 30, FILLS[number_of]))
            parts.append(text(x + width / 2, top + 20, str(number_of)))
    for number_of in range(STEPS):
        last = [turn for turn, who in enumerate(order) if order[: turn + 1].count(who) == number_of + 1][-1]
        x = left + (last + 1) * width
        parts.append(line(x, 42, x, 48 + RANKS * 40, color=RED, dashed=True))
    parts.append(text(left, 48 + RANKS * 40 + 22, "a number: the rank runs, up to that all_reduce", anchor="start"))
    parts.append(text(left + 300, 48 + RANKS * 40 + 22, "grey: it waits", anchor="start", color="#777777"))
    parts.append(
        text(left + 410, 48 + RANKS * 40 + 22, "red: the last rank has come, the data moves", anchor="start", color=RED)
    )
    return picture(left + len(order) * width + 40, 250, parts)


# -- a run, predicted and measured -------------------------------------------------------------------------------------


def draw_walk() -> str:
    """Draw a run's steps beside what was predicted of them: time, tokens/s and memory."""
    steps = [(record, record.predicted) for record in read_log(FOLDER / "walk.jsonl")[1:] if record.predicted]
    first = steps[0][1]
    panels = [
        ("step", [record.seconds for record, _ in steps], first.seconds, readable_seconds),
        ("tokens/s", [record.tokens_per_s for record, _ in steps], first.tokens_per_s, "{:,.0f}".format),
        (
            "memory",
            [float(record.grown_bytes or 0) for record, _ in steps],
            float(first.memory_bytes),
            readable_bytes,
        ),
    ]
    parts = [text(20, 26, f"Each step after the first; priced for {first.hardware}", anchor="start")]
    width, height, bottom = 210, 110, 180
    for column, (name, measured, predicted, readable) in enumerate(panels):
        left, most = 20 + column * 280, max(*measured, predicted) * 1.15
        parts.append(line(left, bottom, left + width, bottom, color=FAINT))
        parts.append(text(left, 56, name, anchor="start", size=13))
        heights = [bottom - height * value / most for value in (*measured, predicted)]
        for index, y in enumerate(heights[:-1]):
            parts.append(
                f'<circle cx="{number(left + width * (index + 0.5) / len(measured))}" cy="{number(y)}" r="3"/>'
            )
        parts.append(line(left, heights[-1], left + width, heights[-1], color=RED, dashed=True))
        middle = statistics.median(measured) if name != "memory" else max(measured)
        parts.append(text(left, 202, f"measured {readable(middle)}", anchor="start"))
        parts.append(text(left, 220, f"predicted {readable(predicted)}", anchor="start", color=RED))
    return picture(820, 236, parts)


PICTURES: dict[str, Callable[[], str]] = {
    "layout": draw_layout,
    "plan": draw_plan,
    "unit": draw_unit,
    "walk": draw_walk,
    "world": draw_world,
}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())
