"""Compare two runs side by side, for people: tables for the terminal, a picture of the losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rich.table import Table

from hyper_parallel.core.common.errors import explain
from hyper_parallel.trainer.record import StepRecord, TrainResult, read_log


class Traffic(Protocol):
    """How often one operation ran on one mesh axis, and the bytes that all ranks together, and one rank, received."""

    @property
    def axis(self) -> str: ...  # noqa: D102
    @property
    def op(self) -> str: ...  # noqa: D102
    @property
    def count(self) -> int: ...  # noqa: D102
    @property
    def bytes(self) -> int: ...  # noqa: D102
    @property
    def bytes_per_rank(self) -> int: ...  # noqa: D102


def bits_per_byte(loss: float) -> float:
    """Turn a byte-level loss in nats into bits.

    >>> bits_per_byte(math.log(2))
    1.0

    Args:
        loss: mean cross-entropy per byte, nats.
    """
    return loss / math.log(2)


def largest_difference(first: TrainResult, second: TrainResult) -> tuple[float, int]:
    """Return the largest difference between the training losses of two runs, and its step (from 1)."""
    differences = [abs(a - b) for a, b in zip(first.losses, second.losses, strict=True)]
    largest = max(differences)
    return largest, differences.index(largest) + 1


def loss_table(runs: dict[str, TrainResult], rows: int = 8) -> Table:
    """Put the losses of two runs side by side, at evenly spaced steps, with the validation loss at the end.

    Args:
        runs: two runs of the same number of steps, by title.
        rows: about how many steps to show.
    """
    (first_name, first), (second_name, second) = runs.items()
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("step")
    for name in (first_name, second_name, "difference"):
        table.add_column(name, justify="right")
    for index in _spread(len(first.steps), rows):
        a, b = first.losses[index], second.losses[index]
        table.add_row(str(index + 1), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
    ends = first.valid_loss, second.valid_loss
    if ends[0] is not None and ends[1] is not None:  # a run that was stopped has none
        table.add_row("validation", f"{ends[0]:.6f}", f"{ends[1]:.6f}", f"{abs(ends[0] - ends[1]):.1e}")
    return table


def _spread(count: int, rows: int) -> list[int]:
    """Pick about `rows` indices below `count`: the first, then every n-th step, and the last."""
    stride = max(-(-count // rows), 1)
    return sorted({0, *range(stride - 1, count, stride), count - 1})


def traffic_table(rows: Sequence[Traffic]) -> Table:
    """Show what a run communicated, by axis and op, with the total.

    Args:
        rows: one per axis and op.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("axis", "op"):
        table.add_column(name)
    for name in ("collectives", "received", "per rank"):
        table.add_column(name, justify="right")
    for row in rows:
        moved = (readable_bytes(row.bytes), readable_bytes(row.bytes_per_rank))
        table.add_row(row.axis, row.op, f"{row.count:,}", *moved)
    table.add_row("all", "", f"{sum(row.count for row in rows):,}", readable_bytes(sum(row.bytes for row in rows)), "")
    return table


def readable_bytes(amount: float) -> str:
    """Write a number of bytes for people.

    >>> readable_bytes(12_582_912)
    '12.0 MiB'

    Args:
        amount: bytes.
    """
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def plot_losses(runs: dict[str, TrainResult], path: Path, title: str) -> bool:
    """Draw training and validation losses of several runs into one picture.

    Args:
        runs: the runs by title; later ones are drawn dashed on top, so that equal curves show both.
        path: PNG file to write.
        title: headline of the picture.

    Returns:
        False when matplotlib is not installed; nothing is written then.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    # Figure and canvas directly: pyplot keeps global state and looks for a display.
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    styles = [("tab:blue", "-", 3.0, 0.45), ("black", "--", 1.0, 1.0)]
    for (name, run), (color, dash, width, alpha) in zip(runs.items(), styles, strict=False):
        steps = [record.step for record in run.steps]
        axes.plot(steps, run.losses, dash, color=color, linewidth=width, alpha=alpha, label=f"train, {name}")
        points = [(record.step, record.valid_loss) for record in run.steps if record.valid_loss is not None]
        filled = color if dash == "-" else "none"
        axes.plot(
            *zip(*points, strict=True),
            "o",
            color="tab:orange" if dash == "-" else color,
            markersize=7,
            markerfacecolor="tab:orange" if dash == "-" else filled,
            label=f"validation, {name}",
        )
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.set_xlim(0, None)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return True


def plot_log(logs: Sequence[str | Path], path: str | Path) -> bool:
    """Draw the JSONL logs of runs, finished or not: loss, norm of the gradient, and tokens per second over the steps.

    Args:
        logs: files that runs have written; two with the same name are told apart by their folders.
        path: PNG file to write; its folder is made.

    Returns:
        False when matplotlib is not installed; nothing is written then.

    Raises:
        ValueError: no logs, one that is not there, one without a finished step, one that is no log; a picture that
            cannot be written.
    """
    runs = {str(log): _read(Path(log)) for log in logs}
    if not runs:
        blame = "there is no log to draw"
        raise ValueError(explain("cannot plot", blame, "logs: none", "the file that train.log names, out/train.jsonl"))
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    path = Path(path)
    names = [Path(log).stem for log in runs]
    unique = len(set(names)) == len(names)
    figure = Figure(figsize=(8, 8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    losses, norms, speeds = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    for place, (log, records) in enumerate(runs.items()):
        steps, label, color = [record.step for record in records], Path(log).stem if unique else log, f"C{place}"
        losses.plot(steps, [record.loss for record in records], color=color, label=label)
        measured = [(record.step, record.valid_loss) for record in records if record.valid_loss is not None]
        if measured:
            losses.plot(*zip(*measured, strict=True), "o", color=color, label=f"{label}, validation")
        norms.plot(steps, [record.grad_norm for record in records], color=color)
        speeds.plot(steps, [record.tokens_per_s for record in records], color=color)
    losses.set(ylabel="loss (nats per token)")
    losses.legend(frameon=False)
    norms.set(ylabel="gradient norm")
    speeds.set(ylabel="tokens/s", xlabel="step", ylim=(0, None))
    speeds.xaxis.get_major_locator().set_params(integer=True)
    for axes in (losses, norms, speeds):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except (OSError, ValueError) as error:  # ValueError: a kind of picture that matplotlib does not know
        seen = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ValueError(explain(f"cannot plot to {path}", "it cannot be written", seen, "out/train.png")) from None
    return True


def _read(log: Path) -> list[StepRecord]:
    asked, hint = f"cannot plot {log}", "the JSONL file of a run: what train.log names, by default out/train.jsonl"
    try:
        records = read_log(log)
    except OSError as error:
        raise ValueError(explain(asked, "it cannot be read", f"seen: {error.strerror}", hint)) from None
    except (ValueError, TypeError) as error:  # no JSON; no record
        raise ValueError(explain(asked, "it is no log of steps", f"seen: {error}", hint)) from None
    if not records:
        raise ValueError(explain(asked, "it has no finished step", "seen: no complete line", hint))
    return records
