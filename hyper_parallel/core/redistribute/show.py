"""A redistribution drawn as text for people: both layouts in words, our steps, torch's, and how they compare."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.redistribute.bounds import lower_bound
from hyper_parallel.core.redistribute.plan import Plan
from hyper_parallel.core.redistribute.torch_twin import TorchPlan, torch_plan

_LOCAL = ("slice", "copy")
_WIDTH = 200  # of the console that tables are drawn on: wide enough that no cell is ever folded
_RIGHT = ("ranks", "received per rank", "sent per rank", "extra memory", "time")


class Moves(Protocol):
    """What bytes, memory and time have in common for a step and for a whole plan, ours and torch's."""

    @property
    def recv_bytes(self) -> npt.NDArray[Any]: ...  # noqa: D102
    @property
    def send_bytes(self) -> npt.NDArray[Any]: ...  # noqa: D102
    @property
    def peak_extra_bytes(self) -> int: ...  # noqa: D102
    @property
    def seconds(self) -> float: ...  # noqa: D102


class Step(Moves, Protocol):
    """A step of our plan or of torch's."""

    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def axes(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def group_size(self) -> int: ...  # noqa: D102


class Drawn(Moves, Protocol):
    """Our plan or torch's."""

    @property
    def steps(self) -> Sequence[Step]: ...  # noqa: D102
    @property
    def num_collectives(self) -> int: ...  # noqa: D102


def show(plan: Plan, *, device_type: str = "cuda", steps_only: bool = False) -> str:
    """Return a plan as text, with torch's plan for the same transition below it.

    >>> from hyper_parallel.core.redistribute.plan import plan
    >>> mesh = Layout((2, 2), ("dp", "tp"))
    >>> print(show(plan(mesh("tp", "None"), mesh(("dp", "tp"), "None"), (8, 8), torch.float32)).splitlines()[-1])
    received per rank on average: ours 32 B, torch 128 B, least possible 32 B; torch / ours: 4.00

    Times are shown if the plan was made for a topology that has latencies.

    Args:
        plan: what `plan` returned.
        device_type: what torch would run on; on "cpu" it gathers where it otherwise exchanges.
        steps_only: leave out everything but our steps.
    """
    timed = not plan.topology.counts_bytes_only
    ours = _draw(plan, timed=timed)
    if steps_only:
        return ours
    on = f", {_node(plan)}" if timed else ""
    theirs = torch_plan(
        plan.src, plan.dst, plan.global_shape, plan.dtype, plan.topology if timed else None, device_type=device_type
    )
    text = f"refuses: {theirs.refused}" if theirs.refused is not None else _draw(theirs, timed=timed)
    parts = [
        "\n".join(_layouts(plan)),
        f"hyper_parallel{on}\n{ours}",
        f"torch {torch.__version__}\n{text}",
        _comparison(plan, theirs, lower_bound(plan.src, plan.dst, plan.global_shape, plan.dtype)),
    ]
    return "\n\n".join(parts)


def readable(count: float) -> str:
    """Write a number of bytes for people.

    >>> readable(0), readable(1_023), readable(12_582_912), readable(1.5)
    ('0 B', '1023 B', '12.0 MiB', '1.5 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" or count != int(count) else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} TiB"


# -- tables ------------------------------------------------------------------------------------------------------------


def _draw(plan: Drawn, *, timed: bool) -> str:
    """Return a table of the steps, without blanks at the ends of lines."""
    if not plan.steps:
        return "nothing to do"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="none")
    for name in ("step", "kind", "axes", *_RIGHT[: len(_RIGHT) - (not timed)]):
        table.add_column(name, justify="right" if name in _RIGHT else "left", no_wrap=True)
    for number, step in enumerate(plan.steps, start=1):
        ranks = "-" if step.kind in _LOCAL else str(step.group_size)
        table.add_row(str(number), _kind(step), "+".join(step.axes) or "-", ranks, *_amounts(step, timed=timed))
    count = plan.num_collectives
    table.add_row("total", f"{count} collective{'' if count == 1 else 's'}", "", "", *_amounts(plan, timed=timed))
    out = io.StringIO()
    Console(file=out, width=_WIDTH, color_system=None, markup=False, highlight=False, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _kind(step: Step) -> str:
    rounds = getattr(step, "rounds", 1)
    return f"{step.kind} x{rounds}" if rounds > 1 else step.kind


def _amounts(moves: Moves, *, timed: bool) -> Iterator[str]:
    yield _spread(moves.recv_bytes)
    yield _spread(moves.send_bytes)
    yield readable(moves.peak_extra_bytes)
    if timed:
        yield f"{moves.seconds * 1e6:,.1f} us"


def _spread(counts: npt.NDArray[Any]) -> str:
    """Return the most that a rank moves and, if another moves less, the least."""
    most, least = counts.max(), counts.min()
    return readable(most) if most == least else f"{readable(most)} (min {readable(least)})"


# -- words -------------------------------------------------------------------------------------------------------------


def _layouts(plan: Plan) -> Iterator[str]:
    shape, size = plan.global_shape, math.prod(plan.global_shape) * plan.dtype.itemsize
    yield f"{str(plan.dtype).removeprefix('torch.')} tensor of {_shape(shape)}, {readable(size)}"
    for word, layout in (("from", plan.src), ("to", plan.dst)):
        yield f"{word:<4}  {layout}"
        yield f"      {'; '.join(_words(layout, len(shape)))}"
        ranks = layout.rank_list[:: len(layout.rank_list) - 1] if len(layout.rank_list) > 1 else layout.rank_list
        held = [(rank, layout.local_shape(shape, rank)) for rank in ranks]
        yield "      " + ", ".join(
            f"rank {rank} holds {_shape(local)} ({readable(math.prod(local) * plan.dtype.itemsize)})"
            for rank, local in held
        )


def _words(layout: Layout, ndim: int) -> Iterator[str]:
    """Say what a layout does to each dim, and how many ranks hold the same."""
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


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "no dims"


def _node(plan: Plan) -> str:
    on = plan.topology
    nodes = "one node" if on.ranks_per_node is None else f"{on.ranks_per_node} ranks per node"
    return f"times modelled for {on.name}, {nodes}"


def _comparison(plan: Plan, theirs: TorchPlan, least: npt.NDArray[Any]) -> str:
    """Return the last line: bytes received by ours, by torch, at least, and how many times ours torch receives."""
    counts = [plan.recv_bytes, least] if theirs.refused is not None else [plan.recv_bytes, theirs.recv_bytes, least]
    alike = all(count.min() == count.max() for count in counts)
    ours, theirs_mean, bound = float(plan.recv_bytes.mean()), float(theirs.recv_bytes.mean()), float(least.mean())
    if theirs.refused is not None:
        said, ratio = "torch refuses", "-"
    else:
        said = f"torch {readable(theirs_mean)}"
        ratio = f"{theirs_mean / ours:.2f}" if ours else "-" if not theirs_mean else "infinite"
    head = "received per rank" if alike else "received per rank on average"
    return f"{head}: ours {readable(ours)}, {said}, least possible {readable(bound)}; torch / ours: {ratio}"
