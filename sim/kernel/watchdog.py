"""A watchdog over turns: it names a rank that keeps its turn for long, which the simulator cannot end.

A rank that blocks where the simulator cannot see it (a socket, a process of its own, a lock made elsewhere) sleeps with
its turn, and no other rank can run. If what it sleeps for is another rank, that is a deadlock for ever; if not, it is
only slow. Nor can the simulator tell a loop that never ends from a long computation. And a rank that catches what ends
it, over and over, goes on in a world that has failed.
"""

from __future__ import annotations

import sys
import time
import traceback

from sim.kernel.threads import collector_paused
from sim.kernel.waiting import RankThread

LIMIT_S = 10.0  # without a turn given up and without computing
COMPUTES_S = 60.0  # without a turn given up
REFUSALS = 1_000  # so often has a rank caught what ends it
INTERRUPT_S = 1.0  # after Ctrl-C

_Thread = tuple[int, str]


class Watchdog:
    """Looks at the running rank from the launching thread, now and then."""

    def __init__(self) -> None:
        self._turn: tuple[_Thread, int] | None = None
        self._began = 0.0  # that turn
        self._since = 0.0  # it has not computed
        self._computed = 0.0
        self._reported = False
        self._named: set[tuple[str, _Thread]] = set()  # who has been reported once, and for what

    def look(self, thread: RankThread, turn: int, failure: str, *, alone: bool = False) -> None:
        """Note that `thread` has the turn number `turn`, in a world that `failure` has ended, if it has.

        Say so, once, when it neither computes nor gives it up, when it has not given it up for long (unless it is
        `alone`, and nobody could want it), or when it goes on although the world has failed or it is dead.
        """
        now = time.monotonic()
        who: _Thread = (thread.rank, thread.name)
        if self._turn != (who, turn):
            self._turn, self._began, self._since = (who, turn), now, now
            self._computed, self._reported = -1.0, False
        if thread.refusals >= REFUSALS:
            if self._is_first("refuses", who):
                report_refusal(_words(who), thread.refusals, failure, stack_of(thread.ident))
        elif now - self._began > COMPUTES_S and not alone and self._is_first("computes", who):
            report_long_turn(_words(who), now - self._began, failure, stack_of(thread.ident))
        if self._has_computed(thread.ident):
            self._since, self._reported = now, False
        elif not self._reported and now - self._since > (COMPUTES_S if _runs_a_process(thread.ident) else LIMIT_S):
            self._reported = True
            self._named.add(("computes", who))
            report(_words(who), now - self._since, stack_of(thread.ident))

    def _is_first(self, what: str, who: _Thread) -> bool:
        first = (what, who) not in self._named
        self._named.add((what, who))
        return first

    def _has_computed(self, thread_id: int) -> bool:
        """Whether the thread has used the processor since it last was seen to; True where that is not known."""
        if not hasattr(time, "pthread_getcpuclockid") or not thread_id:
            return True
        computed = time.clock_gettime(time.pthread_getcpuclockid(thread_id))
        if computed - self._computed <= 0.01:
            return False
        self._computed = computed
        return True


def _words(who: _Thread) -> str:
    rank, name = who
    return f"rank {rank}, thread {name!r}," if name else f"rank {rank}"


def _runs_a_process(thread_id: int) -> bool:
    """Whether the thread waits in `subprocess`: a compiler, say, which waits for no rank and may take its time."""
    with collector_paused():
        frame = sys._current_frames().get(thread_id)
    while frame is not None and frame.f_globals.get("__name__") == "selectors":  # by which it reads two pipes
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "subprocess"


def stack_of(thread_id: int) -> str:
    """Where a thread is now."""
    with collector_paused():
        frame = sys._current_frames().get(thread_id)
    return "".join(traceback.format_stack(frame)) if frame is not None else "  (no Python frame)\n"


def _write(text: str) -> None:
    """Write to the error output, which is read before a program that hangs has ended."""
    print(text, file=sys.stderr, flush=True)


def report(who: str, seconds: float, stack: str) -> None:
    """Say that a thread sleeps with its turn."""
    _write(
        f"{who} has slept for {seconds:.0f} s and not given up its turn, so that no other rank can run\n"
        f"{stack}"
        "  try: let ranks wait for each other by torch.distributed only; what several ranks share (a model, a lock), "
        "and a lock made before the ranks began, may block them for ever; Ctrl-C twice ends the program"
    )


def report_long_turn(who: str, seconds: float, failure: str, stack: str) -> None:
    """Say that a thread computes for long, which may be as it should."""
    ended = f"  the other ranks are to end: {failure}\n" if failure else ""
    _write(
        f"{who} has computed for {seconds:.0f} s and not given up its turn; other ranks run when it communicates or "
        "ends\n"
        f"{ended}{stack}"
        "  try: nothing, if it computes what it should; a loop that waits for another rank has to sleep or to "
        "communicate in between; Ctrl-C twice ends the program"
    )


def report_refusal(who: str, times: int, failure: str, stack: str) -> None:
    """Say that a thread goes on although the world has failed, or its rank has been killed."""
    _write(
        f"{who} goes on {f'in a world that has ended: {failure}' if failure else 'after a fault has killed it'}\n"
        f"  seen: it has caught the exception that ends it {times} times\n"
        f"{stack}"
        "  try: except Exception, which lets that exception pass, in place of except BaseException or a bare except; "
        "Ctrl-C twice ends the program"
    )


def report_interrupt(ranks: str) -> None:
    """Say that ranks have not ended yet after Ctrl-C."""
    _write(f"interrupted: {ranks} will end at the next operation; Ctrl-C once more ends the program without waiting")
