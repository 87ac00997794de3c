"""Limits of the best of a search: kernels, exposed communication, the bubble of the pipeline, or memory."""

from __future__ import annotations

from typing import Any, NamedTuple

from sim.mesh.report import gib, number, percent

_WORTH_A_WORD = 0.005  # of a step


class Limit(NamedTuple):
    """The largest loss of a step, and whether more memory would help.

    Attributes:
        by: `kernels`, `communication on AXIS`, `bubble`, `host` or `memory`.
        shares: of the step, by the same names; of memory, what the fastest that does not fit would save.
        text: one sentence.
    """

    by: str
    shares: dict[str, float]
    text: str


def limit_of(result: Any) -> Limit:
    """Return what limits the best of a search.

    Kernels lose what they are slower than the peak of the device, by the FLOPs of the model. What a step waits for is
    lost as a whole. Memory is the limit if what does not fit saves more than any of these loses.

    Args:
        result: what `sim.mesh.search` has returned.
    """
    best = result.best
    time, step = best.estimate.time, best.seconds
    shares = {f"communication on {axis}": quantity.value / step for axis, quantity in time.exposed.items()}
    shares["bubble"] = time.bubble.value / step
    shares["host"] = time.host.value / step
    shares["kernels"] = max(0.0, time.compute.value / step - number(time.mfu))
    faster = min(result.too_large, key=lambda one: one.seconds, default=None)
    saved = 0.0 if faster is None else 1 - faster.seconds / step
    if faster is not None and saved > 0:
        shares["memory"] = saved
    shares = dict(sorted(shares.items(), key=lambda item: -item[1]))
    by = next(iter(shares))
    losses = [
        f"{name} {percent(share)}" for name, share in shares.items() if share >= _WORTH_A_WORD and name != "memory"
    ]
    limited_by = {
        "kernels": "kernels, which reach less than the peak of the device",
        "bubble": "the bubble of its pipeline",
        "host": "the host, which issues operations too late",
        "memory": "memory",
    }.get(by, f"exposed {by}")
    text = f"The best is limited by {limited_by}; of its step is lost: {', '.join(losses) or 'nothing'}."
    if faster is not None and saved >= _WORTH_A_WORD:
        beside = max(one.context_bytes for one in faster.estimate.memory.classes)
        over = gib(faster.bytes + beside - result.limit_bytes)
        text += f" With {over} more memory, {faster.candidate} would be {percent(saved)} faster."
    return Limit(by, shares, text)
