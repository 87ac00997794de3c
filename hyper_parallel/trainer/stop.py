"""The request to stop a run: one flag, set by a signal, read by all ranks of the process."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hyper_parallel.core.common.errors import explain

__all__ = ["StopRequest", "stop_on_signals"]

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
        """Ask to stop.

        Args:
            reason: for people, such as the name of a signal; that of the first request is kept.
        """
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
    they kill, and SIGUSR1 is what Slurm's `--signal=USR1@60` sends. Signals that the system does not have are left out.
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
            _set(number, on_signal, before)
        with _told_at_once(stop, numbers):
            yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _told_at_once(stop: StopRequest, numbers: Sequence[int]) -> Iterator[None]:
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


def _set(number: int, handler: Any, before: dict[int, Any]) -> None:
    """Set a handler, and remember the one from before."""
    earlier = signal.getsignal(number) or signal.SIG_DFL
    try:
        signal.signal(number, handler)
    except ValueError as error:
        seen = f"thread: {threading.current_thread().name!r}"
        hint = "with stop_on_signals() as stop: in the launcher, and pass stop to the ranks"
        blame = "only a process's main thread may"
        raise RuntimeError(explain("cannot handle signals here", blame, seen, hint)) from error
    before[number] = earlier
