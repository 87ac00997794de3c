"""The guards of a run: what to do about losses and gradients that are NaN or infinite, and the request to stop."""

from __future__ import annotations

import json
import math
import signal
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyper_parallel.core.common.errors import HyperParallelError, InvalidState
from hyper_parallel.trainer.config import TrainConfig


class NonFiniteError(HyperParallelError, ArithmeticError):
    """A loss or gradient was NaN or infinite, and the run was to stop there."""


def action_after(loss: float, grad_norm: float, train: TrainConfig, skipped_in_a_row: int = 0) -> str:
    """Return what to do with a step: "go", or if its loss or gradient norm is NaN or infinite "skip", "stop" or "dump".

    >>> train = TrainConfig(on_nonfinite="skip", max_skips=2)
    >>> action_after(2.5, 1.0, train), action_after(math.nan, 1.0, train), action_after(2.5, math.inf, train, 2)
    ('go', 'skip', 'stop')

    Ranks that pass the same numbers, as after an all_reduce, get the same answer. `train` has `on_nonfinite`, and the
    `max_skips` after which one more step that is skipped ends the run.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return "go"
    if train.on_nonfinite == "skip" and skipped_in_a_row >= train.max_skips:
        return "stop"
    return train.on_nonfinite


def nonfinite_error(
    step: int,
    loss: float,
    grad_norm: float,
    *,
    skipped_in_a_row: int = 0,
    dumped_to: str | Path | None = None,
    counted: float = 1,
) -> NonFiniteError:
    """Return the error that ends a run.

    >>> print(nonfinite_error(7, math.nan, math.nan, dumped_to="out/nonfinite"))
    cannot take step 7: the loss is nan
      loss: nan   gradient norm: nan
      try: look at out/nonfinite/step-00000007/rank-0.json and the other ranks': non-finite gradients, and the samples

    Args:
        step, loss, grad_norm, dumped_to: see `dump_nonfinite`.
        skipped_in_a_row: steps just before that were skipped for the same reason.
        counted: targets of the global batch that count; of none there is no mean.
    """
    bad = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {grad_norm}"
    hint = "on_nonfinite='dump' to see which parameters and samples; a lower learning rate, a longer warmup"
    if dumped_to is not None:
        file = _folder(dumped_to, step) / "rank-0.json"
        hint = f"look at {file} and the other ranks': non-finite gradients, and the samples"
    if not counted:
        bad = "no target of its batch counts, and the loss is the mean over those that do"
        hint = "a larger batch_size, or less that does not count; on_nonfinite='skip' leaves such steps out"
    if skipped_in_a_row:
        bad += f", after {skipped_in_a_row} steps in a row that were skipped"
    seen = f"loss: {loss}   gradient norm: {grad_norm}"
    return NonFiniteError(f"cannot take step {step}", bad, seen, hint)


def dump_nonfinite(
    folder: str | Path,
    named_parameters: Iterable[tuple[str, Tensor]],
    *,
    rank: int,
    step: int,
    loss: float,
    grad_norm: float,
    samples: Sequence[int] = (),
) -> Path:
    """Write what one rank knows about a step that went wrong, and return the file.

    The file is folder/step-00000007/rank-3.json: step, loss, norm, the indices of the rank's samples, and per parameter
    the shape of this rank's shard, the norm of the finite elements of its gradient, and the number of NaN and infinite
    elements in gradient and value; worst first. Nothing is communicated.

    Args:
        folder: made if it is not there; on a disk that people can reach.
        named_parameters: of the model, before the gradients are set to zero.
        rank: of the caller.
        step: number of the step, from 1.
        loss: of the global batch.
        grad_norm: over all parameters.
        samples: indices of the rank's samples in the data.
    """
    rows = [{"name": name, **_describe(param)} for name, param in named_parameters]
    rows.sort(key=lambda row: (-row.get("grad_nonfinite", 0), -row["value_nonfinite"]))
    report: dict[str, Any] = {"step": step, "rank": rank, "loss": _number(loss), "grad_norm": _number(grad_norm)}
    report |= {"samples": [int(index) for index in samples], "parameters": rows}
    path = _folder(folder, step) / f"rank-{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return path


def _folder(folder: str | Path, step: int) -> Path:
    return Path(folder) / f"step-{step:08d}"


def _describe(param: Tensor) -> dict[str, Any]:
    with torch.no_grad():
        value = _local(param)
        row: dict[str, Any] = {"shape": list(value.shape), "value_nonfinite": int((~value.isfinite()).sum())}
        if param.grad is not None:
            grad = _local(param.grad)
            finite = grad.isfinite()
            row["grad_nonfinite"] = int((~finite).sum())
            kept = grad.masked_fill(~finite, 0)
            wide = kept if kept.dtype == torch.float64 else kept.float()  # not every device has float64
            row["grad_norm_of_finite"] = _number(float(wide.norm()))
    return row


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _number(value: float) -> float | str:
    """JSON has no NaN."""
    return value if math.isfinite(value) else str(value)


_SIGNALS = ("SIGTERM", "SIGUSR1")


class StopRequest:
    """A flag that asks a run to stop after the step it is in.

    >>> stop = StopRequest()
    >>> stop.requested()
    False
    >>> stop.request("SIGTERM")
    >>> stop.requested(), stop.reason
    (True, 'SIGTERM')

    Signals reach the processes of a run at different times, or only some of them, so a rank does not act on its own
    flag alone: it adds `requested()` to an all_reduce of the step, and all stop after the step in which the sum is not
    zero. Simulated ranks are threads of one process and share its flag.

    Attributes:
        reason: what asked first, None as long as nothing has.
    """

    # One attribute and no lock: a signal handler may interrupt whoever holds one.

    def __init__(self) -> None:
        self.reason: str | None = None

    def request(self, reason: str) -> None:
        """Ask to stop, for a reason such as the name of a signal; that of the first request is kept."""
        if self.reason is None:
            self.reason = reason

    def requested(self) -> bool:
        """Tell whether something has asked to stop."""
        return self.reason is not None


@contextmanager
def stop_on_signals(stop: StopRequest | None = None, signals: Sequence[str] = _SIGNALS) -> Iterator[StopRequest]:
    """Hold handlers for the block that turn the first signal into a request to stop; a second one acts as before.

        with stop_on_signals() as stop:
            train(config, stop=stop)

    For the launcher, which is the process's main thread: torchrun and cluster schedulers send SIGTERM some time before
    they kill, and SIGUSR1 is what Slurm's `--signal=USR1@60` sends. Signals that the system does not have are omitted.
    The flag is also set while the main thread waits in C++ code, as in a collective, where Python calls no handlers.

    Args:
        stop: the flag to set. Default: a new one.
        signals: names of the signals.

    Raises:
        RuntimeError: not called on the main thread, where alone Python lets handlers be set.
    """
    stop = StopRequest() if stop is None else stop
    numbers = [number for name in signals if (number := getattr(signal, name, None)) is not None]
    before: dict[int, Any] = {}

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.request(signal.Signals(number).name)
        signal.signal(number, before[number])

    try:
        for number in numbers:
            earlier = signal.getsignal(number) or signal.SIG_DFL
            signal.signal(number, on_signal)
            before[number] = earlier
    except ValueError as error:
        seen, blame = f"thread: {threading.current_thread().name!r}", "only a process's main thread may"
        hint = "with stop_on_signals() as stop: in the launcher, and pass stop to the ranks"
        raise InvalidState("cannot handle signals here", blame, seen, hint) from error
    try:
        with _noticed_at_once(stop, numbers):
            yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _noticed_at_once(stop: StopRequest, numbers: Sequence[int]) -> Iterator[None]:
    """Let C code tell a thread of signals, which sets the flag; a simulated rank's are only Python's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen() -> None:
        while arrived := reader.recv(64):
            for number in arrived:
                if number in numbers:
                    stop.request(signal.Signals(number).name)

    listener = threading.Thread(target=listen, name="signals", daemon=True)
    listener.start()
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()
        listener.join()
        reader.close()
