"""Names a rank that blocks where the simulator cannot see it: a socket, a process of its own, a lock made elsewhere.

While such a rank sleeps it keeps its turn, and no other rank can run. If what it sleeps for is another rank, that is
a deadlock for ever; if not, it is only slow. The simulator cannot tell which, so it says what it sees and goes on.
"""

from __future__ import annotations

import sys
import time
import traceback

__all__ = ["LIMIT_S", "Watchdog"]

LIMIT_S = 10.0  # without a turn given up and without computing


class Watchdog:
    """Looks at the running rank from the launching thread, now and then."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None
        self._since = 0.0
        self._computed = 0.0
        self._told = False

    def look(self, rank: int, thread_id: int, turn: int, name: str = "") -> None:
        """Note that ``rank`` (its helper thread ``name``) has the turn number ``turn``.

        Say so, once, when it neither computes nor gives it up.
        """
        if not hasattr(time, "pthread_getcpuclockid") or not thread_id:
            return
        computed = time.clock_gettime(time.pthread_getcpuclockid(thread_id))
        now = time.monotonic()
        if self._seen != (rank, turn) or computed - self._computed > 0.01:
            self._seen, self._since, self._computed, self._told = (rank, turn), now, computed, False
        elif now - self._since > LIMIT_S and not self._told:
            self._told = True
            report(f"rank {rank}, thread {name!r}," if name else f"rank {rank}", now - self._since, stack_of(thread_id))


def stack_of(thread_id: int) -> str:
    """Where a thread is now."""
    frame = sys._current_frames().get(thread_id)
    return "".join(traceback.format_stack(frame)) if frame is not None else "  (no Python frame)\n"


def report(who: str, seconds: float, stack: str) -> None:
    """Write to the error output, which is read before a program that hangs has ended."""
    print(
        f"{who} has slept for {seconds:.0f} s and not given up its turn, so that no other rank can run\n"
        f"{stack}"
        "  try: let ranks wait for each other by torch.distributed only; what several ranks share (a model, a lock), "
        "and a lock made before the ranks began, may block them for ever; Ctrl-C twice ends the program",
        file=sys.stderr,
        flush=True,
    )
