"""The ways to get from one layout to another that are worth pricing.

All follow one form: keep what is wanted, reduce, exchange, gather last. For every element that form moves the least
there is: one copy short of all copies to the rank that reduces it, which is one that needs it if any holder does, and
then one copy to each rank that needs it and is not that one. The others trade bytes for fewer steps, or for less over
slow links.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hyper_parallel.core.redistribute.builders import Builder
from hyper_parallel.core.redistribute.exchanges import exchanges
from hyper_parallel.core.redistribute.reductions import reductions
from hyper_parallel.core.redistribute.steps import Fill, Step
from hyper_parallel.core.redistribute.transition import Transition
from hyper_parallel.core.redistribute.twins import axis_by_axis


def candidates(task: Transition, builder: Builder) -> Iterator[list[Step]]:
    """Yield every way considered; the first moves the fewest bytes."""
    if 0 in task.shape:  # nothing has to be said about nothing
        yield []
        return
    closing = _closing(task, builder)
    ways = reductions(task, builder) if task.reduces else exchanges(task, builder, task.source, task.copy_axes)
    for way in itertools.chain(ways, [axis_by_axis(task, builder)] if task.reduces or task.split_axes else []):
        if not task.at_once or sum(bool(step.reduces) for step in way) == 1:
            yield [*way, *closing]


def _closing(task: Transition, builder: Builder) -> list[Step]:
    """Return the local step that makes pending copies, or rescales those that stay."""
    if not task.opens and task.times == task.over:
        return []
    times = task.times * (task.ways(task.opens) if task.opening == "avg" else 1)
    return [builder.fill(task.target, task.result, Fill(task.opening or "sum", times, task.over))]
