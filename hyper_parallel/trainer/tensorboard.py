"""The curves of a run in TensorBoard, where it is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from hyper_parallel.core.common.errors import explain
from hyper_parallel.trainer.record import StepRecord

__all__ = ["TensorBoardLog", "check_tensorboard"]

_CURVES = (
    ("train/loss", "loss"),
    ("train/grad_norm", "grad_norm"),
    ("train/lr", "lr"),
    ("valid/loss", "valid_loss"),
    ("speed/tokens_per_s", "tokens_per_s"),
    ("speed/seconds", "seconds"),
    ("speed/mfu", "mfu"),
    ("memory/bytes", "memory_bytes"),
)


def check_tensorboard() -> None:
    """Check that TensorBoard is installed, before ranks start.

    Raises:
        ValueError: it is not.
    """
    if find_spec("tensorboard") is None:
        asked, blame = "cannot write a TensorBoard log", "the package tensorboard is not installed"
        hint = "pip install 'hyper_parallel[tensorboard]'; or leave it out: the JSONL log has the same numbers"
        raise ValueError(explain(asked, blame, "find_spec('tensorboard') is None", hint))


class TensorBoardLog:
    """Writes the records of a run as TensorBoard's scalars; a context, used by the first rank alone.

        with TensorBoardLog("out/tensorboard") as log:
            log.write(record)

    Args:
        folder: for TensorBoard's event files; None writes nothing.

    Raises:
        ValueError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self._writer = None
        if folder is not None:
            check_tensorboard()
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder))

    def write(self, record: StepRecord) -> None:
        """Add one step."""
        if self._writer is None:
            return
        for curve, name in _CURVES:
            value = getattr(record, name)
            if value is not None:
                self._writer.add_scalar(curve, value, record.step)

    def __enter__(self) -> TensorBoardLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
