"""The report of a run: a record per step, its logs, the display in a terminal, tables and pictures for people."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hyper_parallel.core.common.drawing import blank_figure, quiet, whole_steps
from hyper_parallel.core.common.errors import InvalidValue, readable_bytes
from hyper_parallel.core.common.tables import plain_table

MIB = 2**20
KEPT = 10_000
"""Records that a rank keeps: a run of months takes no more memory than one of hours."""


@dataclass(frozen=True)
class Prediction:
    """What a step of a run was predicted to take before the run began.

    Args:
        seconds: of a step.
        tokens_per_s: tokens of the global batch by that time.
        memory_bytes: the most that tensors of the first rank take in a step.
        hardware: what was priced, in words.
        memory_before: part of `StepRecord.memory_bytes` that was taken before the model was built: on the CPU Python,
            its libraries and the text.
    """

    seconds: float
    tokens_per_s: float
    memory_bytes: int
    hardware: str
    memory_before: int = 0


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as every rank sees it.

    Args:
        step: number of the step, from 1.
        loss: mean cross-entropy over the global batch, before the step; nats per token.
        lr: learning rate.
        grad_norm: norm of the gradient over all parameters, before clipping.
        seconds: time this step took, without validation.
        tokens_per_s: tokens of the global batch by that time.
        valid_loss: mean cross-entropy on the held-back text after the step, where it was measured.
        mfu: the model's FLOPs by the peak of all devices, 0 to 1; None where the peak is not known.
        memory_bytes: the most that live tensors of the first rank have taken in this step; on the CPU the process's
            resident set, Python and libraries included, which simulated ranks share.
        tokens: tokens of the global batch that the loss counts.
        skipped: the optimizer's step was skipped, because loss or gradient were not finite.
        predicted: what it was predicted to take.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    seconds: float
    tokens_per_s: float
    valid_loss: float | None = None
    mfu: float | None = None
    memory_bytes: int | None = None
    tokens: int | None = None
    skipped: bool = False
    predicted: Prediction | None = None

    @property
    def grown_bytes(self) -> int | None:
        """Of `memory_bytes`, what was taken since before the model was built; None where nothing was predicted."""
        if self.predicted is None or self.memory_bytes is None:
            return None
        return max(self.memory_bytes - self.predicted.memory_before, 0)


@dataclass(frozen=True)
class TrainResult:
    """A finished run, or one that was asked to stop.

    Args:
        steps: one record per step, those before a resumption left out; of a long run the last `KEPT`, the log has all.
        valid_loss: mean cross-entropy on the held-back text at the end, nats per token; None for a run that stopped.
        parameters: weights in the model.
        layout: how the ranks were arranged, in a line.
        device: what computed it.
        stopped: what asked the run to stop before its last step, such as "SIGTERM".
        first_step: number of the first step, more than 1 for a run that went on from a checkpoint.
        save_failures: what went wrong with checkpoints; training went on.
        safe_step: of the last checkpoint that is complete, also of one that the run went on from; None: there is none.
        last_save_failed: what was trained after `safe_step` is lost.
    """

    steps: tuple[StepRecord, ...]
    valid_loss: float | None
    parameters: int
    layout: str
    device: str
    stopped: str | None = None
    first_step: int = 1
    save_failures: tuple[str, ...] = ()
    safe_step: int | None = None
    last_save_failed: bool = False

    @property
    def losses(self) -> list[float]:
        """Training loss of each step."""
        return [record.loss for record in self.steps]

    @property
    def seconds(self) -> float:
        """Time spent on these steps, without validation."""
        return sum(record.seconds for record in self.steps)

    @property
    def tokens_per_s(self) -> float:
        """Tokens by the time these steps took; 0 for no steps."""
        tokens = sum(record.tokens_per_s * record.seconds for record in self.steps)
        return tokens / self.seconds if self.steps else 0.0


class JsonlLog(AbstractContextManager["JsonlLog"]):
    """A JSONL file with one line per step, on disk as soon as the step is done: a run that is cut short keeps its log.

    A field that does not apply is not in its line. A disk that is full ends the log, with a warning, and not the
    run.

    Args:
        path: file to write, its folder is made; None writes nothing.
        keep_steps: of a log that is there already, keep the lines up to this step, as a run does that goes on from a
            checkpoint; 0 starts anew.
    """

    def __init__(self, path: str | None, keep_steps: int = 0) -> None:
        self._path, self._file = path, None
        if path is None:
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        goes_on = keep_steps > 0 and Path(path).is_file()
        if goes_on:  # nothing is written anew: a run that is killed here keeps its log, too
            os.truncate(path, _end_of_steps(path, keep_steps))
        self._file = open(path, "a" if goes_on else "w", buffering=1, encoding="utf-8")  # noqa: SIM115  see __exit__

    def write(self, record: StepRecord) -> None:
        """Add one line."""
        if self._file is not None:
            fields = {key: value for key, value in dataclasses.asdict(record).items() if value is not None}
            if not record.skipped:
                del fields["skipped"]
            # JSON has no NaN, as of a step that is skipped.
            fields = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
            try:
                self._file.write(json.dumps(fields, allow_nan=False) + "\n")
            except OSError as error:
                warnings.warn(f"the log {self._path} ends before step {record.step}: {error.strerror}", stacklevel=2)
                self._close()

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # a warning has named what could not be written
                file.close()


def _end_of_steps(path: str, last: int) -> int:
    """Return where a log's first line of a step after `last` begins, or an incomplete line; a damaged one stays."""
    end = 0
    with open(path, "rb") as file:
        for line in file:
            fields = None
            with suppress(ValueError, RecursionError):
                fields = json.loads(line)
            if not line.endswith(b"\n") or (isinstance(fields, dict) and fields.get("step", 0) > last):
                break
            end += len(line)
    return end


def read_log(path: str | Path) -> list[StepRecord]:
    """Read the JSONL log that a run wrote, or is writing, without a line that was not written to its end.

    Raises:
        ValueError: none of its lines is JSON.
    """
    records, damage = list[StepRecord](), None
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.endswith("\n"):
                try:
                    fields = {**json.loads(line)}
                except (ValueError, RecursionError) as error:  # the latter of brackets within brackets
                    damage = damage or ValueError(str(error))
                    continue
                told = fields.pop("predicted", None)
                numbers: dict[str, Any] = {k: float(v) if isinstance(v, str) else v for k, v in fields.items()}
                records.append(StepRecord(**numbers, predicted=None if told is None else Prediction(**told)))
    if damage is not None and not records:
        raise damage
    return records


def check_tensorboard() -> None:
    """Raise ValueError if TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        asked, blame = "cannot write a TensorBoard log", "the package tensorboard is not installed"
        hint = "pip install 'hyper_parallel[tensorboard]'; or leave it out: the JSONL log has the same numbers"
        raise InvalidValue(asked, blame, "find_spec('tensorboard') is None", hint)


class TensorBoardLog(AbstractContextManager["TensorBoardLog"]):
    """Writes the records of a run as TensorBoard's scalars; a context, used by the first rank alone.

        with TensorBoardLog("out/tensorboard") as log:
            log.write(record)

    Args:
        folder: for TensorBoard's event files; None writes nothing.
        keep_steps: of what is there already, show steps up to this one, as of a run that goes on from a checkpoint.

    Raises:
        ValueError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path | None, keep_steps: int = 0) -> None:
        self._writer = None
        if folder is not None:
            check_tensorboard()
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=keep_steps + 1 if keep_steps else None)

    def write(self, record: StepRecord) -> None:
        """Add one step."""
        if self._writer is None:
            return
        told = record.predicted
        values = {
            "train/loss": record.loss,
            "train/grad_norm": record.grad_norm,
            "train/lr": record.lr,
            "valid/loss": record.valid_loss,
            "speed/tokens_per_s": record.tokens_per_s,
            "speed/seconds": record.seconds,
            "speed/mfu": record.mfu,
            "memory/bytes": record.memory_bytes,
            "speed/predicted_tokens_per_s": told and told.tokens_per_s,
            "speed/predicted_seconds": told and told.seconds,
            "memory/predicted_bytes": told and told.memory_before + told.memory_bytes,
        }
        for curve, value in values.items():
            if value is not None:
                self._writer.add_scalar(curve, value, record.step)

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()


@contextmanager
def profiled_steps(path: Path, steps: int) -> Iterator[Callable[[], None]]:
    """Record a few steps of the block with torch.profiler as a Chrome trace; yield what to call after each step.

        with profiled_steps(Path("out/profile.json"), steps=3) as after_step:
            ...

    The first step builds what is kept from then on, and during the second one the profiler starts: both are left out.
    None is recorded for 0 `steps`, which costs nothing.
    """
    if not steps:
        yield lambda: None
        return

    def write(profiler: torch.profiler.profile) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=steps, repeat=1)
    # All activities of this machine. Without `acc_events` torch warns of what it forgets after a cycle; there is one.
    with torch.profiler.profile(
        schedule=schedule, on_trace_ready=write, record_shapes=True, acc_events=True
    ) as profiler:
        yield profiler.step


class TrainingDisplay:
    """A context that shows the steps of one run; pass its `on_step` to `train`.

    >>> import sys
    >>> with TrainingDisplay(Console(file=sys.stdout), "one device", steps=1) as display:
    ...     display.on_step(StepRecord(step=1, loss=5.5, lr=0.1, grad_norm=1.0, seconds=0.5, tokens_per_s=2_000.0))
    one device: step 1/1  loss 5.500  2,000 tokens/s  grad 1.00

    Behind that stand MFU and memory, where the record has them, and the validation loss. It starts no thread of its
    own. Where the console is no terminal, it prints the first, every tenth part, and the last step instead of drawing a
    bar.
    """

    def __init__(self, console: Console, title: str, steps: int) -> None:
        self.console, self.title, self.steps = console, title, steps
        self._seconds = self._tokens = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s{task.fields[rest]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            auto_refresh=False,  # no thread: drawn once per step
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=steps, loss="-", speed="-", rest="")

    def on_step(self, record: StepRecord) -> None:
        """Show one more step."""
        if record.step > 1 or self.steps == 1:  # the first step warms caches up
            self._seconds += record.seconds
            self._tokens += record.tokens_per_s * record.seconds
        average = self._tokens / self._seconds if self._seconds else record.tokens_per_s
        loss, speed = f"{record.loss:.3f}", f"{average:,.0f}"
        rest = f"  grad {record.grad_norm:.2f}"
        rest += "" if record.mfu is None else f"  MFU {record.mfu:.1%}"
        rest += "" if record.memory_bytes is None else f"  {readable_bytes(record.memory_bytes)}"
        rest += "  skipped" * record.skipped
        if self.console.is_terminal:
            self._bar.update(self._task, completed=record.step, loss=loss, speed=speed, rest=rest, refresh=True)
        elif record.step in (1, self.steps) or record.step * 10 // self.steps > (record.step - 1) * 10 // self.steps:
            rest += "" if record.valid_loss is None else f"  validation {record.valid_loss:.3f}"
            self.console.print(f"{self.title}: step {record.step}/{self.steps}  loss {loss}  {speed} tokens/s{rest}")
            self.console.file.flush()

    def __enter__(self) -> TrainingDisplay:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def largest_difference(first: TrainResult, second: TrainResult) -> tuple[float, int]:
    """Return the largest difference between the training losses of two runs, and its step (from 1)."""
    differences = [abs(a - b) for a, b in zip(first.losses, second.losses, strict=True)]
    largest = max(differences)
    return largest, differences.index(largest) + 1


def loss_table(runs: dict[str, TrainResult]) -> Table:
    """Put the losses of two runs of as many steps side by side, by title: at about eight steps, and the validations."""
    (first_name, first), (second_name, second) = runs.items()
    count = len(first.steps)
    stride = max(-(-count // 8), 1)
    shown = sorted({0, *range(stride - 1, count, stride), count - 1})
    rows = [(str(index + 1), first.losses[index], second.losses[index]) for index in shown]
    if first.valid_loss is not None and second.valid_loss is not None:  # a run that was stopped has none
        rows.append(("validation", first.valid_loss, second.valid_loss))
    found = ((name, f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}") for name, a, b in rows)
    return _table(("step", first_name, second_name, "difference"), found)


def prediction_table(steps: Sequence[StepRecord]) -> Table | None:
    """Put what a step took beside what it was predicted to take; None where nothing was predicted.

                   measured   predicted
        step         200 ms      250 ms   +25 %
        tokens/s      5,000       4,000   -20 %
        memory     1.50 GiB    1.35 GiB   -10 %

    The first step, which warms caches up and makes the optimizer's state, counts only if it is alone. Of the others the
    median time counts, and the most memory.
    """
    steps = [record for record in (steps[1:] or steps) if record.predicted is not None]
    if not steps or steps[-1].predicted is None:
        return None
    predicted = steps[-1].predicted
    seconds, speed = (statistics.median(getattr(each, name) for each in steps) for name in ("seconds", "tokens_per_s"))
    rows: list[tuple[str, float, float, Callable[[float], str]]] = [
        ("step", seconds, predicted.seconds, readable_seconds),
        ("tokens/s", speed, predicted.tokens_per_s, "{:,.0f}".format),
    ]
    if taken := [record.grown_bytes for record in steps if record.grown_bytes]:
        rows.append(("memory", max(taken), predicted.memory_bytes, readable_bytes))
    found = (
        (name, readable(measured), readable(expected), f"{100 * (expected / measured - 1):+.0f} %")
        for name, measured, expected, readable in rows
    )
    return _table(("", "measured", "predicted", ""), found)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Table:
    table = plain_table(*columns, left=left)
    table.padding = (0, 3, 0, 0)
    for row in rows:
        table.add_row(*row)
    return table


def traffic_table(rows: Sequence[Any]) -> Table:
    """Show what a run communicated, with the total; each row is a `sim.Row`, of one axis and op."""
    found = [(x.axis, x.op, f"{x.count:,}", readable_bytes(x.bytes), readable_bytes(x.bytes_per_rank)) for x in rows]
    total = ("all", "", f"{sum(x.count for x in rows):,}", readable_bytes(sum(x.bytes for x in rows)), "")
    return _table(("axis", "op", "collectives", "received", "per rank"), (*found, total), left=2)


def readable_seconds(amount: float) -> str:
    """Write a number of seconds for people.

    >>> readable_seconds(0.0123), readable_seconds(12.34)
    ('12.3 ms', '12.3 s')
    """
    value, unit = (amount, "s") if amount >= 1 else (amount * 1e3, "ms")
    return f"{value:,.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"


def plot_log(logs: Sequence[str | Path], path: str | Path) -> bool:
    """Draw the JSONL logs of runs, finished or not: loss, norm of the gradient, and tokens per second over the steps.

    Where a log has predictions, step time and memory stand below, and what was predicted is dashed. The first log's
    losses are drawn wide, so that equal curves show both.

    Args:
        logs: files that runs have written; two with the same name are distinguished by their folders.
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
        raise InvalidValue("cannot plot", blame, "logs: none", "the file that train.log names, out/train.jsonl")
    path = Path(path)
    is_predicted = any(record.predicted is not None for records in runs.values() for record in records)
    height, count = (11, 5) if is_predicted else (8, 3)
    figure = blank_figure(path, 8, height, dpi=120)
    if figure is None:
        return False
    names = [Path(log).stem for log in runs]
    unique = len(set(names)) == len(names)
    panels = figure.subplots(count, 1, sharex=True, height_ratios=(3, *[1] * (count - 1)))
    for axes, (label, measured, told, unit) in zip(panels, _PANELS, strict=False):
        for place, (log, records) in enumerate(runs.items()):
            name, color, is_first = Path(log).stem if unique else log, f"C{place}", axes is panels[0]
            width = 3.0 if is_first and place == 0 and len(runs) > 1 else 1.5
            taken = [(record.step, record) for record in records]
            _draw(axes, taken, measured, unit, "-", color=color, linewidth=width, label=name)
            if is_first:
                _draw(axes, taken, "valid_loss", unit, "o", color=color, label=f"{name}, validation")
            if told:
                _draw(axes, [(step, its.predicted) for step, its in taken], told, unit, "--", color=color)
                axes.set(ylim=(0, None))
        axes.set(ylabel=label)
        quiet(axes)
    if is_predicted:
        panels[0].plot([], [], "--", color="black", label="predicted")
    panels[0].legend(frameon=False)
    panels[-1].set(xlabel="step")
    whole_steps(panels[-1])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        seen = error.strerror or str(error)
        raise InvalidValue(f"cannot plot to {path}", "it cannot be written", seen, "out/train.png") from None
    return True


_PANELS = (
    ("loss (nats per token)", "loss", "", 1.0),
    ("gradient norm", "grad_norm", "", 1.0),
    ("tokens/s", "tokens_per_s", "tokens_per_s", 1.0),
    ("step time (ms)", "seconds", "seconds", 1e-3),
    ("memory (MiB)", "grown_bytes", "memory_bytes", MIB),
)
"""Labels of a plot's curves, the fields of `StepRecord` and of `Prediction` that they show, and their unit."""


def _draw(axes: Any, steps: Sequence[tuple[int, Any]], field: str, unit: float, style: str, **options: Any) -> None:
    points = [(step, value / unit) for step, its in steps if (value := getattr(its, field, None)) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), style, **options)


def _read(log: Path) -> list[StepRecord]:
    asked, hint = f"cannot plot {log}", "the JSONL file of a run: what train.log names, by default out/train.jsonl"
    try:
        records = read_log(log)
    except OSError as error:
        raise InvalidValue(asked, "it cannot be read", f"seen: {error.strerror}", hint) from None
    except (ValueError, TypeError) as error:  # no JSON; no record
        raise InvalidValue(asked, "it is no log of steps", f"seen: {error}", hint) from None
    if not records:
        raise InvalidValue(asked, "it has no finished step", "seen: no complete line", hint)
    return records
