"""Results of a run: a record per step, the summary, and the JSONL log."""

from __future__ import annotations

import dataclasses
import json
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

KEPT = 10_000
"""Records that a rank keeps: a run of months takes no more memory than one of hours."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as every rank sees it.

    Args:
        step: number of the step, from 1.
        loss: mean cross-entropy over the global batch, before the step; nats per token.
        lr: learning rate.
        grad_norm: norm of the gradient over all parameters, before clipping.
        seconds: time this step took, validation left out.
        tokens_per_s: tokens of the global batch by that time.
        valid_loss: mean cross-entropy on the held-back text after the step, where it was measured.
        mfu: the model's FLOPs by the peak of all devices, 0 to 1; None where the peak is not known.
        memory_bytes: the most that live tensors of the first rank have taken in this step; see `metrics.memory_bytes`.
        tokens: tokens of the global batch that the loss counts.
        skipped: the optimizer's step was left out, because loss or gradient were not finite.
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


@dataclass(frozen=True)
class TrainResult:
    """A finished run, or one that was asked to stop.

    Args:
        steps: one record per step, those before a resumption left out; of a long run the last `KEPT`, the log has all.
        valid_loss: mean cross-entropy on the held-back text at the end, nats per token; None for a run that stopped.
        parameters: weights in the model.
        layout: one line that says how the ranks were arranged.
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
        """Time spent on these steps, validation left out."""
        return sum(record.seconds for record in self.steps)

    @property
    def tokens_per_s(self) -> float:
        """Tokens by the time these steps took; 0 for no steps."""
        tokens = sum(record.tokens_per_s * record.seconds for record in self.steps)
        return tokens / self.seconds if self.steps else 0.0


class JsonlLog:
    """A JSONL file with one line per step, on disk as soon as the step is done: a run that is cut short keeps its log.

    A field that does not apply is left out of its line. A disk that is full ends the log, with a warning, and not the
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
        earlier = read_log(path) if keep_steps and Path(path).exists() else []
        self._file = open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115  closed by __exit__
        for record in earlier:
            if record.step <= keep_steps:
                self.write(record)

    def write(self, record: StepRecord) -> None:
        """Add one line."""
        if self._file is not None:
            told = {key: value for key, value in dataclasses.asdict(record).items() if value is not None}
            if not record.skipped:
                del told["skipped"]
            try:
                self._file.write(json.dumps(told) + "\n")
            except OSError as error:
                warnings.warn(f"the log {self._path} ends before step {record.step}: {error.strerror}", stacklevel=2)
                self._close()

    def __enter__(self) -> JsonlLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what could not be written has been told
                file.close()


def read_log(path: str | Path) -> list[StepRecord]:
    """Read a JSONL log back; a last line that a killed run has left unfinished is passed over.

    Args:
        path: file that a run wrote, or is writing.
    """
    with open(path, encoding="utf-8") as file:
        return [StepRecord(**json.loads(line)) for line in file if line.endswith("\n")]
