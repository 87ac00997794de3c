"""What a run leaves behind: a record per step, the result, and the JSONL log."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType


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
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    seconds: float
    tokens_per_s: float
    valid_loss: float | None = None


@dataclass(frozen=True)
class TrainResult:
    """A finished run.

    Args:
        steps: one record per step.
        valid_loss: mean cross-entropy on the held-back text at the end; nats per token.
        parameters: weights in the model.
        layout: one line that says how the ranks were arranged.
        device: what computed it.
    """

    steps: tuple[StepRecord, ...]
    valid_loss: float
    parameters: int
    layout: str
    device: str

    @property
    def losses(self) -> list[float]:
        """Training loss of each step."""
        return [record.loss for record in self.steps]

    @property
    def seconds(self) -> float:
        """Time spent on the steps, validation left out."""
        return sum(record.seconds for record in self.steps)

    @property
    def tokens_per_s(self) -> float:
        """Tokens by the time all steps took."""
        return sum(record.tokens_per_s * record.seconds for record in self.steps) / self.seconds


class JsonlLog:
    """A JSONL file with one line per step, on disk as soon as the step is done: a run that is cut short keeps its log.

    Args:
        path: file to write anew, its folder is made; None writes nothing.
    """

    def __init__(self, path: str | None) -> None:
        self._file = None
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115  closed by __exit__

    def write(self, record: StepRecord) -> None:
        """Add one line."""
        if self._file is not None:
            fields = {key: value for key, value in dataclasses.asdict(record).items() if value is not None}
            self._file.write(json.dumps(fields) + "\n")

    def __enter__(self) -> JsonlLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def read_log(path: str | Path) -> list[StepRecord]:
    """Read a JSONL log back.

    Args:
        path: file that a run wrote.
    """
    with open(path, encoding="utf-8") as file:
        return [StepRecord(**json.loads(line)) for line in file]
