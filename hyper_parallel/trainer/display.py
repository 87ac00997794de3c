"""The display of a run: a progress bar in a terminal, a few lines in a log file."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hyper_parallel.trainer.record import StepRecord
from hyper_parallel.trainer.report import readable_bytes


class TrainingDisplay:
    """A context that shows the steps of one run; pass its `on_step` to `train`.

    >>> import sys
    >>> with TrainingDisplay(Console(file=sys.stdout), "one device", steps=1) as display:
    ...     display.on_step(StepRecord(step=1, loss=5.5, lr=0.1, grad_norm=1.0, seconds=0.5, tokens_per_s=2_000.0))
    one device: step 1/1  loss 5.500  2,000 tokens/s  grad 1.00

    Behind that stand MFU and memory, where the record has them, and the validation loss. It starts no thread of its
    own. Where the console is no terminal, it prints the first, every tenth part, and the last step instead of drawing a
    bar.

    Args:
        console: where to draw.
        title: name of the run.
        steps: how many there will be.
    """

    def __init__(self, console: Console, title: str, steps: int) -> None:
        self.console, self.title, self.steps = console, title, steps
        self.last: StepRecord | None = None
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
        self.last = record
        if record.step > 1 or self.steps == 1:  # the first step warms caches up
            self._seconds += record.seconds
            self._tokens += record.tokens_per_s * record.seconds
        average = self._tokens / self._seconds if self._seconds else record.tokens_per_s
        loss, speed, rest = f"{record.loss:.3f}", f"{average:,.0f}", _rest(record)
        if self.console.is_terminal:
            self._bar.update(self._task, completed=record.step, loss=loss, speed=speed, rest=rest, refresh=True)
        elif record.step in (1, self.steps) or record.step * 10 // self.steps > (record.step - 1) * 10 // self.steps:
            rest += "" if record.valid_loss is None else f"  validation {record.valid_loss:.3f}"
            self.console.print(f"{self.title}: step {record.step}/{self.steps}  loss {loss}  {speed} tokens/s{rest}")
            self.console.file.flush()

    def __enter__(self) -> TrainingDisplay:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def _rest(record: StepRecord) -> str:
    """What stands behind the speed: norm of the gradient, and what the record has besides."""
    parts = [f"grad {record.grad_norm:.2f}"]
    if record.mfu is not None:
        parts.append(f"MFU {record.mfu:.1%}")
    if record.memory_bytes is not None:
        parts.append(readable_bytes(record.memory_bytes))
    if record.skipped:
        parts.append("skipped")
    return "".join(f"  {part}" for part in parts)
